"""An arena for published models: what it loses to packing, and what requests hold, beside other ways."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from model_configs import CONFIGS, PUBLISHED_2026

from kvpool import CacheLayout, ConfigError
from kvpool.models import read_layout
from kvpool.models.model_config import parse_model
from kvpool.tools.cli import main
from kvpool.tools.plan.arena import ArenaPlan, make_arena_plan
from kvpool.tools.plan.engines import LEAST_TOKENS, REQUEST_TOKENS
from kvpool.tools.plan.solver import PlanConfig, make_plan

if TYPE_CHECKING:
    from pathlib import Path

GIB = 1 << 30
PAGES = (16, 64)


def plan_of(name: str, page_size: int, **options: Any) -> ArenaPlan:  # noqa: ANN401 - PlanConfig's fields
    config = PlanConfig(8 * GIB, page_size=page_size, device="cpu", **options)
    return make_arena_plan(parse_model(PUBLISHED_2026[name]), config)


# Entries in all layers, bytes: of a token in each group, or of a state.
GROUPS: dict[str, dict[str, tuple[int, int]]] = {
    "Qwen3-Next-80B-A3B": {"full": (12, 2048), "state": (36, 2_097_152 + 49_152)},
    "Qwen3.5-397B-A17B": {"full": (15, 2048), "state": (45, 4_194_304 + 73_728)},
    "Kimi-Linear-48B-A3B": {"full": (7, 1152), "state": (20, 2_097_152 + 73_728)},
    "gemma-3-27b-it": {"full": (10, 8192), "window": (52, 8192)},
    "gemma-4-31B-it": {"window": (50, 16_384), "full": (10, 8192)},
    "gpt-oss-120b": {"full": (18, 2048), "window": (18, 2048)},
    "Llama-4-Scout": {"full": (12, 4096), "chunk": (36, 4096)},
    "DeepSeek-V3.2": {"full": (61, 1152 + 132)},
    "DeepSeek-V4-Flash": {
        "window": (43, 584),
        "chain_4": (21, 584 + 132),
        "chain_128": (20, 584),
        "ring_4": (21, 65_536 + 16_384),
        "ring_128": (20, 524_288),
    },
    "DeepSeek-V4-Pro": {
        "window": (61, 584),
        "chain_4": (30, 584 + 132),
        "chain_128": (31, 584),
        "ring_4": (30, 65_536 + 16_384),
        "ring_128": (31, 524_288),
    },
    "Jamba-1.5-Mini": {"full": (4, 4096), "state": (28, 524_288 + 49_152)},
    "Falcon-H1-7B": {"full": (44, 1024), "state": (44, 3_145_728 + 21_504)},
    "granite-4.0-h-small": {"full": (4, 4096), "state": (36, 4_194_304 + 50_688)},
    "LFM2-8B-A1B": {"full": (6, 2048), "state": (18, 8192)},
    "Nemotron-H-8B": {"full": (4, 4096), "state": (24, 4_194_304 + 61_440)},
    "Nemotron-3-Nano-30B-A3B": {"full": (6, 1024), "state": (23, 2_097_152 + 36_864)},
}


@pytest.mark.parametrize("name", PUBLISHED_2026)
def test_a_published_model_has_its_groups(name: str) -> None:
    layout = read_layout(PUBLISHED_2026[name])
    assert {group.name: (len(group.layers), group.entry_bytes) for group in layout.groups} == GROUPS[name]


@pytest.mark.parametrize("page_size", PAGES)
@pytest.mark.parametrize("name", PUBLISHED_2026)
def test_an_arena_loses_little(name: str, page_size: int) -> None:
    """At most 3 % to packing, and the least request holds at most 1.05 of what it needs."""
    plan = plan_of(name, page_size)
    ours, *others = plan.usages
    assert ours.name == "kvpool, one arena"
    assert ours.lost == plan.slabs.lost <= 0.03
    assert plan.least_bytes <= ours.least_bytes <= 1.05 * plan.least_bytes
    assert plan.slabs.slab_bytes < 8 * GIB / 50
    # The split pools of the same memory never hold more requests, whatever their tokens.
    split = next((usage for usage in others if usage.name == "kvpool, split"), None)
    for tokens in REQUEST_TOKENS:
        assert ours.requests[tokens] > 0
        assert split is None or ours.requests[tokens] >= split.requests[tokens]


@pytest.mark.parametrize("name", PUBLISHED_2026)
def test_requests_that_fit_are_within_the_arena(name: str) -> None:
    plan = plan_of(name, 16)

    def slabs_of(requests: int, tokens: int) -> int:
        total = 0
        for group in plan.layout.groups:
            units = requests * plan.layout.request_units(tokens)[group.name]
            if plan.slabs.by_layer(group.name):
                units *= len(group.layers)
            total += -(-units // plan.slabs.units(group.name))
        return total

    for tokens, count in plan.usages[0].requests.items():
        assert slabs_of(count, tokens) < plan.slabs.num_slabs  # one is padding
        assert slabs_of(count + 1, tokens) >= plan.slabs.num_slabs


def test_notes_say_which_way_cannot_hold_a_model() -> None:
    plan = plan_of("DeepSeek-V4-Flash", 16)
    assert [usage.name for usage in plan.usages] == [
        "kvpool, one arena",
        "vLLM, pages packed",
        "SGLang, split",
    ]
    assert [note.partition(":")[0] for note in plan.notes] == ["kvpool's pools"]


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("DeepSeek-V4-Flash", "compressed entries beside windows"),
        ("DeepSeek-V3.2", "an index key beside the latent vector"),
        ("LFM2-8B-A1B", "states of convolutions alone"),
    ],
)
def test_pools_that_cannot_hold_a_model_say_what_can(name: str, kept: str) -> None:
    with pytest.raises(ConfigError, match=f"keeps {kept}: a CacheArena holds it"):
        make_plan(parse_model(PUBLISHED_2026[name]), PlanConfig(8 * GIB, device="cpu"))


# Layouts of configurations


def test_layers_that_share_are_aliases() -> None:
    layers = ["sliding_attention"] * 3 + ["full_attention"]
    config = {**SMALL_GEMMA, "layer_types": layers * 3, "num_hidden_layers": 12, "num_kv_shared_layers": 5}
    layout = read_layout(config, dtype="float32")
    aliases = {group.kind: group.aliases for group in layout.groups}
    assert aliases == {"window": {8: 6, 9: 6, 10: 6}, "full": {7: 3, 11: 3}}


SMALL_GEMMA = {
    "model_type": "gemma4_text",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 8,
}


def test_ranks_have_parts_of_heads() -> None:
    shares = [read_layout(CONFIGS["Qwen3-Next-80B-A3B"], tp=4, rank=rank) for rank in range(4)]
    full = [layout.groups[0] for layout in shares]
    assert [group.share for group in full] == [(0, 2), (0, 2), (1, 2), (1, 2)]
    assert all(group.planes[0].shape == (1, 256) for group in full)
    states = [layout.groups[1] for layout in shares]
    assert [group.share for group in states] == [(rank, 4) for rank in range(4)]
    assert states[0].planes[0].shape == (8, 128, 128)
    assert shares[0].fingerprint != shares[1].fingerprint
    assert str(shares[0].difference(shares[1])) == "group state: the part is 0 of 4 here and 1 of 4 there"


def test_every_rank_has_the_latents() -> None:
    layouts = [read_layout(PUBLISHED_2026["DeepSeek-V3.2"], tp=8, rank=rank) for rank in (0, 7)]
    assert layouts[0] == layouts[1]


def test_data_types_are_chosen() -> None:
    layout = read_layout(PUBLISHED_2026["Qwen3-Next-80B-A3B"], dtype="float8_e5m2", state_dtype="bfloat16")
    found = {str(plane) for group in layout.groups for plane in group.planes}
    assert {text.split("'")[3] for text in found} == {"float8_e5m2", "bfloat16"}
    v4 = read_layout(PUBLISHED_2026["DeepSeek-V4-Flash"], dtype="bfloat16")
    assert v4.groups[0].planes[0].shape == (512,)
    with pytest.raises(ConfigError, match="float8_e4m3fn or bfloat16, not float16"):
        read_layout(PUBLISHED_2026["DeepSeek-V4-Flash"], dtype="float16")


@pytest.mark.parametrize("options", [{"dtype": "fp8"}, {"state_dtype": "int3"}])
def test_dtypes_are_those_of_pools(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"dtype is '(fp8|int3)'; it must be one of float32"):
        read_layout(CONFIGS["Llama-3.1-8B"], **options)
    config = {**PUBLISHED_2026["LFM2-8B-A1B"], "dtype": "float64"}
    with pytest.raises(ConfigError, match="dtype is 'float64'"):
        read_layout(config)
    assert read_layout(config, dtype="bfloat16").groups[1].planes[0].entry_bytes == 8192


@pytest.mark.parametrize(("tp", "rank"), [(1, 1), (2, -1)])
def test_a_rank_is_one_of_the_gpus(tp: int, rank: int) -> None:
    with pytest.raises(ConfigError, match=f"rank is {rank}"):
        read_layout(CONFIGS["Llama-3.1-8B"], tp=tp, rank=rank)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("Kimi-Linear-48B-A3B", {"linear_attn_config": 5}, "must be an object"),
        (
            "Kimi-Linear-48B-A3B",
            {"linear_attn_config": {"full_attn_layers": [1], "kda_layers": [1]}},
            "do not name each of 27 layers once",
        ),
        ("LFM2-8B-A1B", {"layer_types": None}, "needs layer_types or full_attn_idxs"),
        ("DeepSeek-V4-Flash", {"compress_ratios": [4]}, "compress_ratios of 1 of 43 layers"),
        ("DeepSeek-V4-Flash", {"compress_ratios": [0] * 43}, "of no layer above 1"),
        ("Qwen3-Next-80B-A3B", {"torch_dtype": None}, "has no dtype"),
        ("LFM2-8B-A1B", {"hidden_size": 2049, "head_dim": 64}, None),
    ],
)
def test_configurations_are_checked(name: str, changes: dict[str, Any], message: str | None) -> None:
    config = {**PUBLISHED_2026[name], **changes}
    if message is None:
        with pytest.raises(ConfigError, match="2049 channels of short convolution states"):
            read_layout(config, tp=2)
        return
    with pytest.raises(ConfigError, match=message):
        read_layout(config)


def test_older_lists_of_layers_are_read() -> None:
    config = {**PUBLISHED_2026["LFM2-8B-A1B"], "model_type": "lfm2", "full_attn_idxs": [2, 6]}
    del config["layer_types"]
    layout = read_layout(config)
    assert layout.groups[0].layers == (2, 6)
    assert len(layout.groups[1].layers) == 22


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "gpt_oss", "llama4_text", "jamba", "nemotron_h"])
def test_a_layout_is_read_from_a_file(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    name = {"llama": "Llama-3.1-8B", "gemma3_text": "gemma-3-27b-it", "gpt_oss": "gpt-oss-20b"}.get(kind)
    name = (
        name or {"llama4_text": "Llama-4-Scout", "jamba": "Jamba-v0.1", "nemotron_h": "Nemotron-H-8B"}[kind]
    )
    path.write_text(json.dumps(CONFIGS[name]), encoding="utf-8")
    layout = read_layout(path)
    assert layout == read_layout(tmp_path) == read_layout(CONFIGS[name])
    assert layout.model == kind
    assert isinstance(layout, CacheLayout)


# The command


def test_the_command_prints_an_arena(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(PUBLISHED_2026["DeepSeek-V4-Flash"]), encoding="utf-8")
    assert main(["plan", str(path), "--memory", "8GiB"]) == 0
    text = capsys.readouterr().out
    for word in ("chain_128", "kvpool, one arena", "vLLM, pages packed", "SGLang, split", "of need"):
        assert word in text
    assert "KVPool(" not in text
    assert main(["plan", str(path), "--memory", "8GiB", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"arena"}
    assert found["arena"]["groups"]["chain_4"]["stride"] == 4
    assert found["arena"]["usages"][0]["requests"].keys() == {str(tokens) for tokens in REQUEST_TOKENS}
    assert found["arena"]["least_bytes"] == read_layout(path).request_bytes(LEAST_TOKENS)


def test_pools_are_planned_where_no_arena_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(PUBLISHED_2026["gemma-3-27b-it"]), encoding="utf-8")
    arguments = ["plan", str(path), "--memory", "19000000", "--context", "16", "--step-tokens", "16"]
    assert main([*arguments, "--device", "cpu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["arena"] is None
    assert found["size"] == 16
    assert any("no arena: an arena of 19000000 bytes is too small" in note for note in found["notes"])
    assert main([*arguments, "--device", "cpu"]) == 0
    assert "kvpool, one arena" not in capsys.readouterr().out


def test_the_command_takes_the_dtype_of_states(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(PUBLISHED_2026["Qwen3-Next-80B-A3B"]), encoding="utf-8")
    arguments = ["plan", str(path), "--memory", "80GiB", "--json", "--state-dtype"]
    assert main([*arguments, "bfloat16"]) == 0
    groups = json.loads(capsys.readouterr().out)["arena"]["groups"]
    assert groups["state"]["entry_bytes"] == 1_048_576 + 49_152
    with pytest.raises(SystemExit):
        main([*arguments, "int3"])
    assert "state_dtype must be one of" in capsys.readouterr().err
