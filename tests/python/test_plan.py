"""`kvpool plan`: configurations compared with models, and plans compared with pools."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
from typing import TYPE_CHECKING, Any, NamedTuple

import command_line
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_configs import COMMON, CONFIGS, SMALL
from small_models import small_config, state_shapes_of
from transformers import AutoConfig, AutoModelForCausalLM

from kvpool._kvpool import _STORAGE_DTYPES
from kvpool.errors import ConfigError
from kvpool.integrations.transformers import PooledModel
from kvpool.models.fields import DEFAULTS, Fields
from kvpool.models.layer_kinds import layer_kinds
from kvpool.models.model_config import (
    ATTENTION_TYPES,
    GDN_TYPES,
    MAMBA2_TYPES,
    MAMBA_TYPES,
    MLA_TYPES,
    parse_model,
    read_model,
)
from kvpool.tools.cli import main
from kvpool.tools.costs import read_cost
from kvpool.tools.output import bytes_text, exact_bytes_text
from kvpool.tools.plan.pool_bytes import footprint
from kvpool.tools.plan.solver import MLA_FORMS, Plan, PlanConfig, make_plan
from kvpool.tools.units import parse_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from shared_fixtures import RunSnippet
    from software import Driver

    from kvpool.models.model import Model

MIB = 1 << 20
GIB = 1 << 30


class Facts(NamedTuple):
    """Known sizes of a published model: bytes of a token, of a request's states, and layers."""

    token_bytes: int
    state_bytes: int
    attention_layers: int
    windowed_layers: int = 0


FACTS = {
    "Llama-3.1-8B": Facts(128 << 10, 0, 32),
    "Qwen3-30B-A3B": Facts(96 << 10, 0, 48),
    "Mistral-7B-v0.1": Facts(128 << 10, 0, 32, 32),
    "gemma-2-9b": Facts(42 * 2 * 8 * 256 * 4, 0, 42, 21),
    "gemma-3-27b-it": Facts(62 * 2 * 16 * 128 * 2, 0, 62, 52),
    "gemma-3-4b-it": Facts(34 * 2 * 4 * 256 * 2, 0, 34, 29),
    "gpt-oss-20b": Facts(48 << 10, 0, 24, 12),
    "Llama-4-Scout": Facts(192 << 10, 0, 48, 36),
    "DeepSeek-V2-Lite": Facts(27 * 576 * 2, 0, 27),
    "DeepSeek-V3": Facts(70_272, 0, 61),
    "Qwen3-Next-80B-A3B": Facts(24 << 10, 36 * (32 * 128 * 128 * 4 + 8192 * 3 * 2), 12),
    "Jamba-v0.1": Facts(16 << 10, 28 * (8192 * 16 * 4 + 8192 * 3 * 2), 4),
    "Nemotron-H-8B": Facts(16 << 10, 24 * (128 * 64 * 128 * 4 + (8192 + 2 * 8 * 128) * 3 * 2), 4),
    "Falcon-H1-7B": Facts(44 << 10, 44 * (24 * 128 * 256 * 4 + (3072 + 2 * 256) * 3 * 2), 44),
    "granite-4.0-h-small": Facts(16 << 10, 36 * (128 * 64 * 128 * 4 + (8192 + 2 * 128) * 3 * 2), 4),
    "Bamba-9B": Facts(12 << 10, 29 * (128 * 64 * 128 * 4 + (8192 + 2 * 128) * 3 * 2), 3),
    "Zamba2-2.7B": Facts(9 * 2 * 32 * 160 * 2, 54 * (80 * 64 * 64 * 4 + (5120 + 2 * 64) * 3 * 2), 9),
}


def plan_of(name: str, **options: Any) -> Plan:  # noqa: ANN401 - PlanConfig's fields
    options.setdefault("memory_bytes", 24 * GIB)
    options.setdefault("context_len", 1000)
    options.setdefault("device", "cpu")
    return make_plan(parse_model(CONFIGS[name]), PlanConfig(**options))


@pytest.mark.parametrize("name", CONFIGS)
def test_published_models_have_their_known_sizes(name: str) -> None:
    plan, facts = plan_of(name), FACTS[name]
    assert plan.shapes.token_bytes == facts.token_bytes
    assert plan.shapes.recurrent_bytes + plan.shapes.conv_bytes == facts.state_bytes
    assert sum(len(group.layers) for group in plan.shapes.kv) == facts.attention_layers
    assert len(plan.model.windowed) == facts.windowed_layers


KNOWN = sorted((ATTENTION_TYPES | MLA_TYPES | GDN_TYPES | MAMBA2_TYPES | MAMBA_TYPES) - {"kimi_k2"})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", KNOWN)
def test_a_model_has_the_shapes_of_its_configuration(model_type: str) -> None:
    config = small_config(model_type)
    model, kept = parse_model(json.loads(config.to_json_string(use_diff=False))), state_shapes_of(config)
    plan = make_plan(model, PlanConfig(memory_bytes=GIB, dtype="float32", device="cpu"))
    assert kept.kv == {
        layer: (group.k_head_num, group.k_head_dim, group.v_head_num, group.v_head_dim)
        for group in plan.shapes.kv
        for layer in group.layers
    }
    states = model.states
    assert sorted(kept.recurrent) == list(states.layers if states else ())
    for layer, recurrent in kept.recurrent.items():
        assert states is not None
        # In `transformers`, Gated DeltaNet has K before V, Mamba-2 the state last, and Mamba no heads.
        shape = (states.head_num, states.head_v_dim, states.head_k_dim)
        assert sorted(recurrent) == sorted(size for size in shape if states.kind != "Mamba" or size != 1)
        assert kept.conv[layer] == (states.conv_dim, states.conv_kernel_size)
    assert not any("not a known model type" in note for note in model.notes)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "deepseek_v3", "qwen3_next"])
def test_a_plan_creates_pools_that_serve_the_model(model_type: str) -> None:
    config = small_config(model_type)
    plan = make_plan(
        parse_model(json.loads(config.to_json_string(use_diff=False))),
        PlanConfig(memory_bytes=4 * MIB, dtype="float32", device="cpu", mla="expanded", max_requests=5),
    )
    make: Any = AutoModelForCausalLM.from_config
    served = PooledModel(
        make(config).eval(), plan.size, plan.max_reqs, plan.context_len, page_size=16, max_track_slots=0
    )
    names = construct(plan.code()).names
    for made, of_model in ((names["kv"], served.kv_pool), (names["table"], served.table)):
        assert made.stats() == of_model.stats()
    assert names["kv"].v_head_dim == served.kv_pool.v_head_dim
    assert ("states" in names) == (served.gdn_pool is not None)
    if served.gdn_pool is not None:
        for state in ("recurrent_state", "conv_state"):
            assert getattr(names["states"], state).shape == getattr(served.gdn_pool, state).shape


@pytest.mark.parametrize(
    "model_type", sorted({kind for kind in DEFAULTS if kind not in {"gemma4_text", "qwen3_next"}})
)
def test_defaults_equal_those_of_transformers(model_type: str) -> None:
    config = AutoConfig.for_model(model_type)
    for name, value in DEFAULTS[model_type].items():
        assert getattr(config, name) == value, name


KINDS = {
    "full_attention": "full",
    "sliding_attention": "window",
    "chunked_attention": "chunk",
    "linear_attention": "linear",
    "hybrid": "hybrid",
    "mlp": "none",
    "moe": "none",
}


@pytest.mark.parametrize("model_type", KNOWN)
def test_layer_rules_match_transformers(model_type: str) -> None:
    """A file without a list of layers, like old files."""
    values = {**COMMON, **SMALL.get(model_type, {}), "sliding_window": 8}
    listed = getattr(AutoConfig.for_model(model_type, **values), "layer_types", None)
    kinds = layer_kinds(Fields({**values, "model_type": model_type}, model_type))
    if listed is None:
        # Without kinds, either all layers have the window, or the model ignores it.
        assert len({*kinds}) == 1
    else:
        assert kinds == [KINDS[kind] for kind in listed]


def layer_kinds_of(**values: Any) -> list[str]:  # noqa: ANN401 - of a configuration
    model_type: str = values["model_type"]
    return layer_kinds(Fields(values, model_type))


def test_layer_rules_have_exceptions() -> None:
    four: dict[str, Any] = {"num_hidden_layers": 4, "sliding_window": 8}
    qwen2 = {**four, "model_type": "qwen2"}
    assert layer_kinds_of(**qwen2) == ["full"] * 4  # a window is off unless the file says it is on
    assert layer_kinds_of(**qwen2, use_sliding_window=False) == ["full"] * 4
    on = layer_kinds_of(**qwen2, use_sliding_window=True, max_window_layers=3)
    assert on == ["full"] * 3 + ["window"]
    assert layer_kinds_of(**four, model_type="mistral") == ["window"] * 4
    exaone = {**four, "model_type": "exaone4"}
    assert layer_kinds_of(**exaone, sliding_window_pattern="LLG") == ["window", "window", "full", "window"]
    assert layer_kinds_of(**{**exaone, "sliding_window": None}) == ["full"] * 4
    assert layer_kinds_of(num_hidden_layers=3, model_type="zamba2", hybrid_layer_ids=[1]) == [
        "linear",
        "hybrid",
        "linear",
    ]


class ConstructedPools(NamedTuple):
    """The pools of the printed constructors."""

    names: dict[str, Any]
    taken_bytes: int


def construct(code: str) -> ConstructedPools:
    """Run the constructors, and count their memory on the CPU."""
    names: dict[str, Any] = {}
    exec(code, names)  # noqa: S102 - what a user pastes
    taken_bytes = names["table"].stats()["bytes"] + names["planner"].stats()["bytes"]
    for name, pool in names.items():
        if name.startswith("kv") and name != "kvpool":
            addresses, sizes, _ = pool.get_contiguous_buf_infos()
            # The last buffer is padded like the others.
            taken_bytes += -(-(max(addresses) - min(addresses) + sizes[-1]) // 256) * 256
    if "states" in names:
        taken_bytes += names["states"].mem_bytes()
    return ConstructedPools(names, taken_bytes)


def more_slots(plan: Plan, count: int) -> Plan:
    size = plan.size + count
    return dataclasses.replace(plan, size=size, footprint=footprint(plan.shapes, size, plan.max_reqs))


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("tp", [1, 4])
def test_the_printed_pools_fit_and_one_more_page_does_not(name: str, tp: int) -> None:
    plan = plan_of(name, memory_bytes=1500 * MIB, tp=tp, context_len=300, page_size=16)
    made = construct(plan.code())
    assert made.taken_bytes == plan.footprint.total_bytes <= plan.config.budget_bytes
    larger = more_slots(plan, 16)
    assert construct(larger.code()).taken_bytes == larger.footprint.total_bytes > plan.config.budget_bytes
    assert made.names["kv"].mem_bytes() <= plan.footprint.kv_bytes
    assert made.names["kv"].size == made.names["allocator"].available_size() == plan.size
    assert made.names["table"].size == made.names["planner"].max_batch_size == plan.max_reqs
    assert ("states" in made.names) == (plan.shapes.states is not None)
    assert plan.full_requests == min(plan.max_reqs, plan.size // 304)


def test_the_requested_number_of_requests_fits_with_full_context() -> None:
    plan = plan_of("Qwen3-Next-80B-A3B", memory_bytes=2 * GIB, context_len=2000, page_size=16)
    assert plan.full_requests == plan.max_reqs > 5
    one_more = footprint(plan.shapes, (plan.max_reqs + 1) * 2000, plan.max_reqs + 1)
    assert one_more.total_bytes > plan.config.budget_bytes
    made = construct(plan.code())
    table, planner, allocator = (made.names[name] for name in ("table", "planner", "allocator"))
    rows = table.alloc(plan.max_reqs)
    for row in rows:
        assert planner.extend([row], [0], [2000]) is not None
    assert allocator.available_size() < 2000


def test_states_and_tokens_share_the_memory() -> None:
    few, many = (plan_of("Qwen3-Next-80B-A3B", max_requests=count, memory_bytes=8 * GIB) for count in (8, 64))
    assert (few.max_reqs, many.max_reqs) == (8, 64)
    assert (
        many.footprint.states_bytes - few.footprint.states_bytes
        == 56 * FACTS["Qwen3-Next-80B-A3B"].state_bytes
    )
    lost = (few.size - many.size) * few.shapes.token_bytes
    assert lost == pytest.approx(56 * FACTS["Qwen3-Next-80B-A3B"].state_bytes, rel=0.01)


@pytest.mark.parametrize("name", ["Llama-3.1-8B", "Qwen3-Next-80B-A3B", "DeepSeek-V3", "Jamba-v0.1"])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.cuda
def test_everything_on_the_device_is_counted(name: str, page_size: int, driver: Driver) -> None:
    construct(plan_of(name, memory_bytes=300 * MIB, context_len=100, device="cuda").code())  # loads kernels
    options = {"memory_bytes": 700 * MIB, "context_len": 300, "page_size": page_size, "device": "cuda"}
    plan = plan_of(name, **options)
    before = driver._library.soft_device_bytes()
    made = construct(plan.code())
    assert driver._library.soft_device_bytes() - before == plan.footprint.total_bytes <= 700 * MIB
    assert made.names["allocator"].stats()["device_bytes"] == plan.footprint.allocator_bytes
    del made
    larger = more_slots(plan, page_size)
    again = construct(larger.code())
    assert again.names["kv"].size == larger.size
    assert driver._library.soft_device_bytes() - before == larger.footprint.total_bytes > 700 * MIB


def test_the_staging_area_of_a_host_tier_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"memory_bytes": 8 * GIB, "dtype": "bf16", "host_tier": True}
    name = next(iter(CONFIGS))
    for value, device, expected in (
        (None, "cuda", 192 * MIB),
        ("65536", "cuda", 65536),
        ("0", "cuda", 0),
        (None, "cpu", 0),
    ):
        monkeypatch.delenv("KVPOOL_STAGING_BYTES", raising=False)
        if value is not None:
            monkeypatch.setenv("KVPOOL_STAGING_BYTES", value)
        plan = plan_of(name, device=device, **options)
        assert plan.footprint.staging_bytes == expected
        assert plan.spare_bytes + plan.footprint.total_bytes == 8 * GIB
    monkeypatch.setenv("KVPOOL_STAGING_BYTES", "many")
    with pytest.raises(ConfigError, match="KVPOOL_STAGING_BYTES"):
        plan_of(name, device="cuda", **options)


def test_latent_attention_has_three_forms() -> None:
    expected = {"latent": 70_272, "fused": 61 * 2 * 577, "expanded": 61 * 2 * 128 * (128 + 64 + 128)}
    for form in MLA_FORMS:
        plan = plan_of("DeepSeek-V3", mla=form)
        assert plan.mla_token_bytes == expected
        assert plan.shapes.token_bytes == expected[form]
    assert plan_of("DeepSeek-V3", mla="expanded", tp=8).shapes.token_bytes == expected["expanded"] // 8
    assert plan_of("DeepSeek-V3", tp=8).shapes.token_bytes == expected["latent"]
    assert any("the same on every GPU" in note for note in plan_of("DeepSeek-V3", tp=8).notes)
    assert any("1 layer for multi-token prediction not counted" in note for note in plan.notes)


def test_latent_rows_are_written_without_joining_them() -> None:
    plan = plan_of("DeepSeek-V3", memory_bytes=200 * MIB, context_len=64, dtype="fp32")
    names = construct(plan.code()).names
    latent, rotated = torch.randn(3, 1, 512), torch.randn(3, 1, 64)
    slots = names["allocator"].alloc(3)
    names["kv"].set_kv_buffer(60, slots, latent, rotated)
    k, v = names["kv"].gather_kv(60, slots)
    assert torch.equal(k, latent)
    assert torch.equal(v, rotated)


@pytest.mark.parametrize(
    ("name", "tp", "k_heads", "states"),
    [
        ("Llama-3.1-8B", 8, 1, None),
        ("Llama-3.1-8B", 32, 1, None),
        ("Qwen3-Next-80B-A3B", 4, 1, (8, 4, 2048)),
        ("Qwen3-Next-80B-A3B", 16, 1, (2, 1, 512)),
        ("Nemotron-H-8B", 4, 2, (32, 2, 2048 + 2 * 2 * 128)),
        ("granite-4.0-h-small", 4, 2, (32, 1, 2048 + 2 * 128)),
        ("Jamba-v0.1", 4, 2, (2048, 0, 2048)),
    ],
)
def test_heads_are_divided_or_replicated(
    name: str, tp: int, k_heads: int, states: tuple[int, int, int] | None
) -> None:
    plan = plan_of(name, tp=tp)
    assert plan.shapes.kv[0].k_head_num == plan.shapes.kv[0].v_head_num == k_heads
    found = plan.shapes.states
    assert states == (found and (found.head_num, found.group_num, found.conv_dim))
    replicated = tp > parse_model(CONFIGS[name]).attention[0].k_head_num
    assert any("more than KV heads" in note for note in plan.notes) == replicated


def test_windows_are_reported() -> None:
    text = "52 of 62 layers attend to the last 1,024 tokens only; the pools store all tokens for them, too"
    assert text in plan_of("gemma-3-27b-it", context_len=32_768).notes
    assert "last 8,192 tokens" in " ".join(plan_of("Llama-4-Scout").notes)


def test_defaults_are_reported() -> None:
    notes = " ".join(plan_of("gemma-3-4b-it").notes)
    for text in ("num_attention_heads is not in the configuration: 8", "head_dim", "num_key_value_heads"):
        assert text in notes
    assert "the language model (gemma3_text) of a 'gemma3' model" in notes


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("Qwen3-Next-80B-A3B", "the layout of GDNPool"),
        ("Bamba-9B", "no pool of its own for Mamba-2"),
        ("Jamba-v0.1", "no pool of its own for Mamba;"),
    ],
)
def test_the_pool_for_states_is_reported(name: str, text: str) -> None:
    assert any(text in note for note in plan_of(name).notes)


def test_layers_of_several_shapes_get_a_pool_each() -> None:
    config = {**COMMON, **SMALL["gemma4_text"], "model_type": "gemma4_text", "sliding_window": 8}
    plan = make_plan(parse_model(config), PlanConfig(memory_bytes=64 * MIB, dtype="bf16", device="cpu"))
    made = construct(plan.code())
    assert made.taken_bytes == plan.footprint.total_bytes <= 64 * MIB
    assert (made.names["kv"].layer_num, made.names["kv_2"].layer_num) == (10, 2)
    assert made.names["kv"].size == made.names["kv_2"].size == made.names["allocator"].size
    assert any("2 shapes of K and V" in note for note in plan.notes)


def test_layers_may_have_fields_of_their_own() -> None:
    own = {"03": {"head_dim": 32}, "5": {"num_key_value_heads": 1}}
    model = parse_model(small("qwen3", num_hidden_layers=6, per_layer_config=own))
    shapes = {
        layer: (group.k_head_num, group.k_head_dim) for group in model.attention for layer in group.layers
    }
    assert shapes == {0: (2, 24), 1: (2, 24), 2: (2, 24), 3: (2, 32), 4: (2, 24), 5: (1, 24)}


def test_unknown_models_with_usual_fields_are_planned_with_a_note() -> None:
    config = {**CONFIGS["Llama-3.1-8B"], "model_type": "llama9"}
    model = parse_model(config)
    assert model.attention == parse_model(CONFIGS["Llama-3.1-8B"]).attention
    assert any("llama9 is not a known model type" in note for note in model.notes)


def without(name: str, *fields: str, **others: Any) -> dict[str, Any]:  # noqa: ANN401 - of a configuration
    values = {**CONFIGS[name], **others}
    return {field: value for field, value in values.items() if field not in fields}


def llama4(**others: Any) -> dict[str, Any]:  # noqa: ANN401 - of a configuration
    return {**CONFIGS["Llama-4-Scout"]["text_config"], **others}


def small(model_type: str, **others: Any) -> dict[str, Any]:  # noqa: ANN401 - of a configuration
    return {**COMMON, **SMALL.get(model_type, {}), "model_type": model_type, **others}


WINDOWED = {"use_sliding_window": True, "sliding_window": 8}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "no model_type"),
        (without("Llama-3.1-8B", "num_hidden_layers"), "'llama' needs num_hidden_layers or n_layer"),
        (without("Llama-3.1-8B", "num_attention_heads"), "'llama' needs num_attention_heads"),
        (without("Llama-3.1-8B", hidden_size=4095), "hidden_size 4095 is not a multiple of its 32 heads"),
        (
            without("Llama-3.1-8B", num_key_value_heads="many"),
            "num_key_value_heads 'many'; it must be an integer",
        ),
        (without("Llama-3.1-8B", num_hidden_layers=True), "num_hidden_layers True; it must be an integer"),
        (
            without("Llama-3.1-8B", num_hidden_layers=0),
            "num_hidden_layers 0; it must be between 1 and 10,000",
        ),
        (without("Llama-3.1-8B", is_encoder_decoder=True), "encoder-decoder"),
        (
            without("Llama-3.1-8B", layer_types=["full_attention", "wavelet"]),
            "unknown kinds in layer_types: 'wavelet'",
        ),
        (without("Llama-3.1-8B", layer_types=["full_attention"]), "1 layers and has num_hidden_layers 32"),
        (without("Llama-3.1-8B", layer_types="full"), "layer_types 'full'; it must be a list"),
        (without("DeepSeek-V3", "qk_rope_head_dim"), "'deepseek_v3' needs qk_rope_head_dim"),
        (without("DeepSeek-V3", model_type="deepseek_v9"), "in every layer (kv_lora_rank)"),
        (without("DeepSeek-V3", model_type="deepseek_v33", index_head_dim=128), "index_head_dim"),
        (without("Bamba-9B", model_type="mamba3"), "mamba_d_state"),
        (without("Llama-3.1-8B", model_type="new", layer_types=["rwkv"]), "('rwkv')"),
        (without("Qwen3-Next-80B-A3B", "linear_num_value_heads"), "needs linear_num_value_heads"),
        (without("Qwen3-Next-80B-A3B", full_attention_interval=99), "no attention layer"),
        (without("Bamba-9B", "attn_layer_indices"), "needs layer_types or attn_layer_indices"),
        (without("granite-4.0-h-small", "layer_types"), "needs layer_types"),
        (without("Nemotron-H-8B", hybrid_override_pattern="M?"), "of M * - E, not 'M?'"),
        (without("gemma-2-9b", sliding_window_pattern=-1), "sliding_window_pattern -1; it must be"),
        (
            without("gemma-2-9b", sliding_window_pattern=[1]),
            "sliding_window_pattern [1]; it must be an integer",
        ),
        (
            without("gemma-2-9b", sliding_window_pattern="LL"),
            "sliding_window_pattern 'LL'; it must be an integer",
        ),
        (without("gemma-2-9b", sliding_window=0), "sliding_window 0; it must be between 1 and 2,147,483,647"),
        (without("Llama-3.1-8B", head_dim=0), "head_dim 0; it must be between 1 and"),
        (without("Llama-3.1-8B", num_key_value_heads=0), "num_key_value_heads 0; it must be between 1 and"),
        (without("Llama-3.1-8B", max_position_embeddings=0), "max_position_embeddings 0; it must be"),
        (
            without("Llama-3.1-8B", num_hidden_layers=10**30),
            "num_hidden_layers 1000000000000000000000000000000;",
        ),
        (
            without("Llama-3.1-8B", "num_hidden_layers", layer_types=["attention"] * 10_001),
            "of 10,001 layers",
        ),
        (
            without("Llama-3.1-8B", layer_types=[["full_attention"]]),
            "unknown kinds in layer_types",
        ),
        (without("Llama-3.1-8B", layer_types=["a\nb"]), r"unknown kinds in layer_types: 'a\nb'"),
        (without("Llama-3.1-8B", model_type="a\nb"), r"an invalid model_type: 'a\nb'"),
        (without("Llama-3.1-8B", model_type=["llama"]), "an invalid model_type: ['llama']"),
        (without("Llama-3.1-8B", per_layer_config=[1]), "per_layer_config [1]; it must be an object"),
        (
            without("Llama-3.1-8B", per_layer_config={"x": {}}),
            "'x' in per_layer_config; it must be between 0",
        ),
        (without("Llama-3.1-8B", per_layer_config={"32": {}}), "it must be between 0 and 31"),
        (without("Llama-3.1-8B", per_layer_config={"1": 5}), "5 for layer 1 in per_layer_config"),
        (without("Llama-3.1-8B", per_layer_config={"1": {"head_dim": 0}}), "head_dim 0; it must be"),
        (without("Qwen3-Next-80B-A3B", head_dim=0), "head_dim 0; it must be"),
        (without("Qwen3-Next-80B-A3B", num_key_value_heads=0), "num_key_value_heads 0; it must be"),
        (without("Qwen3-Next-80B-A3B", full_attention_interval=0), "full_attention_interval 0; it must be"),
        (without("Nemotron-H-8B", attention_head_dim=0), "attention_head_dim 0; it must be"),
        (without("Nemotron-H-8B", num_hidden_layers=51), "52 layers and has num_hidden_layers 51"),
        (without("Bamba-9B", mamba_d_head=0), "mamba_d_head 0; it must be"),
        (
            without("Bamba-9B", "mamba_d_head", mamba_n_heads=3),
            "inner size 8192 is not a multiple of its 3 heads",
        ),
        (
            without("Bamba-9B", attn_layer_indices=[32]),
            "32 in attn_layer_indices; it must be between 0 and 31",
        ),
        (
            without("Zamba2-2.7B", num_attention_heads=33),
            "twice hidden_size 5120 is not a multiple of its 33",
        ),
        (
            without("Qwen3-30B-A3B", **WINDOWED, max_window_layers="x"),
            "max_window_layers 'x'; it must be an integer",
        ),
        (llama4(no_rope_layers=1.5), "no_rope_layers 1.5; it must be a list"),
        (llama4(no_rope_layers=[1, "x"]), "'x' in no_rope_layers; it must be between 0 and 1"),
        (llama4(no_rope_layers=[1, 0]), "2 layers and has num_hidden_layers 48"),
        (
            small("gemma3n_text", num_kv_shared_layers=10),
            "num_kv_shared_layers 10 of 10 layers: no layer has keys",
        ),
    ],
)
def test_missing_fields_are_named(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_model(config)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


OPTIONAL = (
    "attention_chunk_size",
    "full_attention_interval",
    "global_head_dim",
    "head_dim",
    "hybrid_override_pattern",
    "layer_types",
    "mamba_d_head",
    "mamba_d_ssm",
    "max_window_layers",
    "no_rope_layer_interval",
    "no_rope_layers",
    "num_kv_shared_layers",
    "num_mtp_layers",
    "per_layer_config",
    "sliding_window",
    "sliding_window_pattern",
    "text_config",
    "use_sliding_window",
)
"""Optional fields that the examples omit."""

words = st.sampled_from(
    ["auto", "full_attention", "sliding_attention", "mamba", "LLG", "M*", "0", "1", "head_dim"]
)
numbers = st.sampled_from([-1, 0, 1, 2, 3, 10_000, 10_001, 2**31 - 1, 2**31, 10**30]) | st.integers()
json_values = st.recursive(
    st.none() | st.booleans() | numbers | st.floats() | words | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(words | st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=8,
)
examples = st.sampled_from([*CONFIGS.values(), *(small(model_type) for model_type in KNOWN)])


def places(value: Any) -> Iterator[tuple[Any, Any]]:  # noqa: ANN401 - JSON
    """Every object or list in a value, with each of its keys or first indices."""
    for key in [*value, *OPTIONAL] if isinstance(value, dict) else range(len(value))[:2]:
        yield value, key
        if isinstance(value, list) or key in value:
            inner = value[key]
            if isinstance(inner, dict | list):
                yield from places(inner)


@settings(max_examples=200)
@given(example=examples, value=json_values, mla=st.sampled_from(MLA_FORMS), choose=st.data())
def test_any_value_gives_a_plan_or_an_error(
    example: dict[str, Any], value: object, mla: str, choose: st.DataObject
) -> None:
    config = copy.deepcopy(example)
    where, key = choose.draw(st.sampled_from(list(places(config))))
    where[key] = value
    try:
        plan = make_plan(parse_model(config), PlanConfig(GIB, dtype="bf16", mla=mla))
    except ConfigError as error:
        assert str(error).isprintable()  # noqa: PT017 - there may be none
    else:
        assert plan.shapes.token_bytes > 0
        assert all(note.isprintable() for note in plan.notes)
        json.dumps(plan.as_json())


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("Llama-3.1-8B", {"tp": 3}, "32 query heads cannot be divided among 3 GPUs"),
        ("Zamba2-2.7B", {"tp": 32}, "80 heads of Mamba-2 states cannot be divided among 32 GPUs"),
        ("Falcon-H1-7B", {"tp": 3}, "2 KV heads can neither be divided among 3 GPUs"),
        ("Llama-3.1-8B", {"dtype": "int4"}, "dtype must be one of float32, float16"),
        ("Llama-3.1-8B", {"memory_bytes": 10_000}, "not enough for one page with 1 request, which takes"),
        (
            "Llama-3.1-8B",
            {"memory_bytes": GIB, "reserve_bytes": 2 * GIB},
            "--reserve, 2,147,483,648 bytes, exceeds --memory, 1,073,741,824 bytes",
        ),
        ("Llama-3.1-8B", {"memory_bytes": GIB, "reserve_bytes": GIB}, "0 bytes are not enough"),
        ("Llama-3.1-8B", {"max_requests": 2**30}, "more pages than fit int32"),
        ("Llama-3.1-8B", {"mean_context": 0}, "mean_context must be between 1 and"),
        (
            "Llama-3.1-8B",
            {"context_len": 4096, "mean_context": 4097},
            "--mean-context, 4,097 tokens, exceeds the context of 4,096 tokens",
        ),
        ("Llama-3.1-8B", {"tp": 0}, "tp must be between 1 and"),
        ("Llama-3.1-8B", {"mla": "thin"}, "mla must be one of latent"),
        ("Llama-3.1-8B", {"device": "gpu"}, "device must be cpu, cuda"),
    ],
)
def test_impossible_plans_are_rejected(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_of(name, **options)
    assert message in str(caught.value)


def model_of(**changes: Any) -> Model:  # noqa: ANN401 - Model's fields
    return dataclasses.replace(parse_model(CONFIGS["Qwen3-Next-80B-A3B"]), **changes)


def test_dtypes_and_context_come_from_the_configuration_or_options() -> None:
    config = PlanConfig(memory_bytes=GIB, device="cpu")
    assert make_plan(model_of(), config).context_len == 262_144
    fp8 = make_plan(model_of(), dataclasses.replace(config, dtype="fp8_e4m3fn"))
    assert (fp8.dtype, fp8.conv_dtype, fp8.shapes.token_bytes) == ("float8_e4m3fn", "bfloat16", 12 << 10)
    bare = make_plan(model_of(dtype=None), dataclasses.replace(config, dtype="bf16"))
    assert any("assumed to be bfloat16" in note for note in bare.notes)
    with pytest.raises(ConfigError, match="has no dtype; give --dtype"):
        make_plan(model_of(dtype=None), config)
    with pytest.raises(ConfigError, match="of the configuration"):
        make_plan(model_of(dtype="float64"), config)
    with pytest.raises(ConfigError, match="no context length; give --context"):
        make_plan(model_of(max_context_len=None), config)


def test_bytes_of_elements_are_those_of_pytorch() -> None:
    assert {name: getattr(torch, name).itemsize for name in _STORAGE_DTYPES} == _STORAGE_DTYPES


def test_slots_are_limited_to_int32() -> None:
    plan = plan_of("Qwen3-30B-A3B", memory_bytes=1 << 50, max_requests=4, dtype="int8")
    assert plan.size > 2**31 - 100
    assert any("int32" in note for note in plan.notes)


def test_a_mean_context_gives_more_rows_of_the_whole_context() -> None:
    whole = plan_of("Llama-3.1-8B", memory_bytes=40 * GIB, context_len=131_072)
    plan = plan_of("Llama-3.1-8B", memory_bytes=40 * GIB, context_len=131_072, mean_context=2001)
    assert (whole.max_reqs, whole.full_requests, whole.mean_requests) == (2, 2, 2)
    assert plan.context_len == whole.context_len == 131_072
    pages = -(-2001 // plan.config.page_size)
    assert plan.max_reqs == plan.mean_requests == plan.size // (pages * plan.config.page_size) > 100
    assert plan.full_requests == 2
    assert plan.size <= whole.size
    assert any("as many request rows as requests of 2,001 tokens" in note for note in plan.notes)
    # One more request would not fit.
    more = plan_of("Llama-3.1-8B", memory_bytes=40 * GIB, context_len=131_072, max_requests=plan.max_reqs + 1)
    assert more.size < (plan.max_reqs + 1) * pages * plan.config.page_size
    few = plan_of(
        "Llama-3.1-8B", memory_bytes=40 * GIB, context_len=131_072, mean_context=2001, max_requests=5
    )
    assert (few.max_reqs, few.mean_requests) == (5, 5)


def test_a_context_that_does_not_fit_is_reported() -> None:
    plan = plan_of("Llama-3.1-8B", memory_bytes=128 * MIB, context_len=100_000)
    assert (plan.max_reqs, plan.full_requests) == (1, 0)
    assert any("no request of 100,000 tokens fits" in note for note in plan.notes)


def test_a_context_beyond_the_models_is_reported() -> None:
    text = "requests of 131,073 tokens are longer than the 131,072 of the configuration"
    assert text in plan_of("Llama-3.1-8B", context_len=131_073).notes
    assert not any("are longer than" in note for note in plan_of("Llama-3.1-8B", context_len=131_072).notes)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("80GiB", 80 * GIB),
        ("80GB", 80 * 10**9),
        ("512MiB", 512 * MIB),
        ("1.5 KiB", 1536),
        ("1tb", 10**12),
        ("12345", 12345),
        ("0", 0),
    ],
)
def test_sizes_are_read_in_every_unit(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    ("count", "text", "exact"),
    [
        (0, "0 B", "0 B"),
        (1023, "1,023 B", "1,023 B"),
        (70_272, "68.62 KiB", "68.62 KiB (70,272 B)"),
        (80 << 30, "80 GiB", "80 GiB (85,899,345,920 B)"),
        (3 << 40, "3 TiB", "3 TiB (3,298,534,883,328 B)"),
    ],
)
def test_sizes_are_exact_and_readable(count: int, text: str, exact: str) -> None:
    assert bytes_text(count) == text
    assert exact_bytes_text(count) == exact


@pytest.mark.parametrize("text", ["80G", "GiB", "-1", "1e9", "", "80 GiB free"])
def test_rejects_what_is_not_a_size(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a size"):
        parse_bytes(text)


@pytest.fixture
def deepseek(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIGS["DeepSeek-V3"]))
    return path


def invoke(*arguments: str) -> command_line.Result:
    return command_line.invoke(main, ["plan", *arguments])


def test_the_command_fits_the_cost_of_a_prefill(deepseek: Path, tmp_path: Path) -> None:
    """A token takes 2 us, and 3 ns for each token before it."""
    table = tmp_path / "measured.csv"
    table.write_text("before,tokens,seconds\n0,1000,0.0035\n1000,1000,0.0065\n")
    arguments = (str(deepseek), "--memory", "1GiB", "--context", "512", "--prefills", str(table))
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    cost = read_cost(table)
    assert f"cost = kvpool.{cost!r}" in result.stdout
    assert (cost.per_token_s, cost.per_pair_s) == pytest.approx((2e-6, 3e-9))
    result = invoke(*arguments, "--json")
    assert json.loads(result.stdout)["prefill_cost"] == dataclasses.asdict(cost)
    table.write_text("before,tokens\n")
    result = invoke(*arguments)
    assert result.exit_code == 1
    assert "needs the columns before, tokens, seconds" in result.stderr


def test_the_command_prints_tables_and_constructors(deepseek: Path) -> None:
    result = invoke(str(deepseek), "--memory", "1GiB", "--tp", "8", "--context", "512", "--reserve", "1MiB")
    assert result.exit_code == 0, result.output
    for text in (
        "70,272 B",
        "549 KiB (562,176 B)",
        "1,048,576 B of 1,073,741,824 B are reserved",
        "--mla expanded",
        "tensor parallel",
        "Memory",
    ):
        assert text in " ".join(result.stdout.replace("│", " ").split())
    assert max(len(line) for line in result.stdout.splitlines()) <= 80
    code = result.stdout[result.stdout.index("import kvpool") :]
    assert construct(code.replace('"cuda"', '"cpu"')).names["kv"].layer_num == 61


@pytest.mark.parametrize("name", CONFIGS)
def test_every_plan_is_as_wide_as_a_terminal(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    result = invoke(str(tmp_path), "--memory", "24GiB", "--context", "4096")
    assert result.exit_code == 0, result.output
    assert max(len(line) for line in result.stdout.splitlines()) <= 80


def test_a_model_type_is_printed_without_markup(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(without("Llama-3.1-8B", model_type="[/b]")))
    result = invoke(str(tmp_path), "--memory", "24GiB")
    assert result.exit_code == 0, result.output
    assert "Plan for [/b]" in result.stdout


def test_the_command_prints_json(deepseek: Path) -> None:
    text = invoke(str(deepseek), "--memory", "1GiB", "--context", "512", "--mean-context", "48").stdout
    assert re.search(
        r"requests at once +│ +(\d+) .*of 512 tokens +│ +\d+ .*of 48 tokens +│ +\1 ", text, re.DOTALL
    )
    result = invoke(str(deepseek), "--memory", "1GiB", "--context", "512", "--json", "--max-requests", "3")
    found = json.loads(result.stdout)
    plan = make_plan(read_model(deepseek), PlanConfig(GIB, context_len=512, max_requests=3))
    assert found.pop("arena")["groups"]["full"]["planes"] == {"latent": [576]}
    assert found == json.loads(json.dumps(plan.as_json()))
    assert (found["token_bytes"], found["max_reqs"], found["states"]) == (70_272, 3, None)
    assert found["total_bytes"] + found["spare_bytes"] == GIB


@pytest.mark.parametrize(
    ("content", "arguments", "message"),
    [
        (None, (), "No such file"),
        ("{", (), "is not a JSON file"),
        ("[]", (), "is not a JSON object"),
        ("[" * 100_000, (), "is not a JSON file: maximum recursion depth exceeded"),
        ("{}", (), "no model_type"),
        (json.dumps(CONFIGS["Llama-3.1-8B"]), ("--memory", "80G"), "'80G' is not a size"),
        (json.dumps(CONFIGS["Llama-3.1-8B"]), ("--dtype", "int4"), "dtype must be one of"),
        (json.dumps(CONFIGS["Llama-3.1-8B"]), ("--mla", "other"), "mla must be one of"),
        (json.dumps(CONFIGS["Llama-3.1-8B"]), ("--tp", "3"), "32 query heads"),
    ],
)
def test_the_command_reports_errors_in_one_line(
    content: str | None, arguments: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    if content is not None:
        path.write_text(content)
    result = invoke(str(path), "--memory", "1GiB", *arguments)
    # An option is wrong by itself; what does not fit a model is found by computing.
    assert result.exit_code == (2 if {"--memory", "--dtype", "--mla"} & {*arguments} else 1)
    assert result.stderr.startswith("kvpool: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_the_command_needs_neither_pytorch_nor_numpy(deepseek: Path, run_snippet: RunSnippet) -> None:
    code = f"""
        sys.argv = ["kvpool", "plan", {str(deepseek)!r}, "--memory", "1GiB", "--json"]
        from kvpool.__main__ import main
        main()
    """
    found = json.loads(run_snippet(code, hidden=("torch", "numpy", "transformers", "matplotlib")))
    assert found["token_bytes"] == 70_272
