"""`generate()` with all that a model keeps in one arena, beside transformers' own cache, bit for bit."""

from __future__ import annotations

import copy
import gc
import inspect
import json
import logging
import random
import threading
from functools import cache
from typing import TYPE_CHECKING, Any

import devices
import pytest
import torch
from common import some
from devices import to_current
from model_configs import COMMON, SMALL
from tiny_models import make
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForSeq2SeqLM,
    DynamicCache,
    MambaForCausalLM,
    T5Config,
    cache_utils,
)

from kvpool import (
    ArenaHostTier,
    ArenaPrefixCache,
    ArgumentError,
    CacheArena,
    ConfigError,
    OutOfMemoryError,
    StaleBufferError,
    StateError,
)
from kvpool.integrations.transformers import ArenaCache
from kvpool.integrations.transformers.arena_layout import kept_layout
from kvpool.integrations.transformers.layout import cache_argument
from kvpool.models import layout_of
from kvpool.models.model_config import parse_model

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpool import CacheLayout

PAGE = 4
WINDOW = 16
# Longer than windows and chunks, the second one padded on the left; then several windows more.
PROMPT, PADDING, NEW = 41, 9, 40

WINDOWED = {"sliding_window": WINDOW}
# Beside `SMALL`: windows and chunks that prompts exceed.
FAMILIES: dict[str, dict[str, Any]] = {
    "bamba": {},
    "deepseek_v3": {},
    "deepseek_v32": {},
    "deepseek_v4": {
        **WINDOWED,
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        "layer_types": [
            "sliding_attention",
            "compressed_sparse_attention",
            "heavily_compressed_attention",
            "sliding_attention",
        ],
    },
    "falcon_h1": {},
    "gemma3_text": {**WINDOWED, "num_hidden_layers": 6},
    "gemma3n_text": WINDOWED,
    "gemma4_text": WINDOWED,
    "gpt_oss": {**WINDOWED, "num_experts_per_tok": 4},
    "granitemoehybrid": {},
    "jamba": {},
    "kimi_linear": {},
    "lfm2": {},
    "lfm2_moe": {},
    "llama": {},
    "llama4_text": {"attention_chunk_size": WINDOW, "intermediate_size_mlp": 64, "num_experts_per_tok": 1},
    "mamba": {},
    "mamba2": {},
    "nemotron_h": {},
    "qwen3_5_text": {},
    "qwen3_next": {},
    "zamba2": {},
}
# What older versions of transformers keep elsewhere, and layers that keep nothing but seem to.
REFUSED: dict[str, str] = {}
if "cache" not in inspect.signature(MambaForCausalLM.forward).parameters:
    REFUSED |= dict.fromkeys(("mamba", "mamba2"), "takes no cache of keys and values")
if not hasattr(cache_utils, "DummyLayer"):
    REFUSED["nemotron_h"] = "layer 1 passes no inputs of a convolution"
SERVED = [family for family in FAMILIES if family not in REFUSED]
# All kinds of groups.
SOME = ["gpt_oss", "llama4_text", "falcon_h1", "qwen3_next", "lfm2", "deepseek_v32", "deepseek_v4"]


@pytest.fixture(autouse=True)
def _device(request: pytest.FixtureRequest, device: str) -> str:
    """Every test runs on every device that PyTorch has kernels for."""
    if device == "cuda" and request.config.getoption("--software"):
        pytest.skip("it needs PyTorch's kernels on a GPU, which the software driver has not")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    return device


def values_of(family: str) -> dict[str, Any]:
    more = {"initializer_range": 0.3, "max_position_embeddings": 256, "tie_word_embeddings": False}
    return {**COMMON, **more, **SMALL.get(family, {}), **FAMILIES[family]}


@cache
def built(family: str, device: str) -> Any:  # noqa: ANN401
    """A model with random weights, the same every time."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **values_of(family))
    return make(config, attn_implementation="eager").eval().to(device)


def a_model(family: str) -> Any:  # noqa: ANN401
    return built(family, devices.current())


def prompts(n: int = 2, length: int = PROMPT) -> dict[str, torch.Tensor]:
    """Prompts, of which all but the first are padded on the left."""
    ids = torch.randint(1, 64, (n, length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1:, :PADDING] = 0
    return {"input_ids": to_current(ids * mask), "attention_mask": to_current(mask)}


def an_arena_cache(family: str, **options: Any) -> ArenaCache:  # noqa: ANN401
    return ArenaCache(a_model(family), **{"arena_bytes": 4 << 20, "page_size": PAGE, **options})


def generated(
    family: str,
    inputs: dict[str, torch.Tensor],
    cache: Any = None,  # noqa: ANN401
    **options: Any,  # noqa: ANN401
) -> Any:  # noqa: ANN401
    model = a_model(family)
    torch.manual_seed(7)
    if cache is not None:
        options[cache_argument(model)] = cache
    outputs = {"output_logits": True, "return_dict_in_generate": True}
    return model.generate(**inputs, **{"do_sample": False, "max_new_tokens": 8, **outputs, **options})


def needs_reordering(family: str) -> None:
    """Skips where transformers' own cache reorders windows and no compressed entries: before 5.23."""
    kinds = {type(layer) for layer in DynamicCache(config=a_model(family).config).layers}
    if any("reorder_cache" not in vars(kind) for kind in kinds if kind.__name__ == "DeepseekV4HCACache"):
        pytest.skip("this version of transformers reorders no compressed entries")


def assert_same(found: Any, wanted: Any) -> None:  # noqa: ANN401
    assert torch.equal(found.sequences, wanted.sequences)
    for ours, theirs in zip(found.logits, wanted.logits, strict=True):
        assert torch.equal(ours, theirs)


def in_use(arena: CacheArena) -> dict[str, int]:
    return {group.name: arena.group_stats(group.name)["in_use"] for group in arena.layout.groups}


def units_of(layout: CacheLayout, batch: int, tokens: int) -> dict[str, int]:
    return {name: batch * units for name, units in layout.request_units(tokens).items()}


def is_empty(arena: CacheArena) -> bool:
    arena.verify()
    return arena.slabs_free == arena.stats()["capacity"] and not any(in_use(arena).values())


# Tokens


@pytest.mark.parametrize("family", SERVED)
def test_padded_prompts_generate_the_same(family: str) -> None:
    wanted = generated(family, prompts(), max_new_tokens=NEW)
    with an_arena_cache(family) as cache:
        assert_same(generated(family, prompts(), cache, max_new_tokens=NEW), wanted)
        arena = cache.arena
        assert in_use(arena) == units_of(arena.layout, 2, PROMPT + NEW - 1)
        for group in arena.layout.groups:
            if group.kind == "window":
                assert arena.group_stats(group.name)["in_use"] <= 2 * (WINDOW // PAGE + 1)
                # Of a prompt, too, only the window is written; a step has the pages of two windows at most.
                assert arena.group_stats(group.name)["high_water"] <= 2 * 2 * (WINDOW // PAGE + 1)
            assert arena.group_stats(group.name)["dropped_frees"] == 0
    assert is_empty(arena)


def test_families_have_all_kinds_of_groups() -> None:
    found = {}
    for family in SERVED:
        layout = an_arena_cache(family).arena.layout
        found[family] = [(group.kind, group.stride, len(group.aliases)) for group in layout.groups]
        planes = {plane.name for group in layout.groups for plane in group.planes}
        assert ("index_k" in planes) == (family == "deepseek_v32")
    assert found["llama"] == [("full", 1, 0)]
    assert (
        found["gemma3_text"] == found["gpt_oss"] == found["llama4_text"] == [("window", 1, 0), ("full", 1, 0)]
    )
    assert found["gemma3n_text"] == [("window", 1, 4), ("full", 1, 1)]
    for family in {"mamba", "mamba2"} - {*REFUSED}:
        assert found[family] == [("state", 1, 0)]
    assert found["falcon_h1"] == [("full", 1, 0), ("state", 1, 0)]
    assert [group[:2] for group in found["deepseek_v4"]] == [
        ("window", 1),
        ("window", 1),
        ("full", 4),
        ("state", 1),
        ("full", 8),
        ("state", 1),
    ]


WAYS: dict[str, dict[str, Any]] = {
    "chunks": {"prefill_chunk_size": 6},
    "large chunks": {"prefill_chunk_size": 20},
    "samples": {"do_sample": True, "num_return_sequences": 2},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "sampled beams": {"num_beams": 2, "do_sample": True},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", SOME)
def test_every_way_to_generate(family: str, way: str) -> None:
    if "beams" in way:
        needs_reordering(family)
    wanted = generated(family, prompts(), **WAYS[way])
    cache = an_arena_cache(family)
    for _ in range(2):
        assert_same(generated(family, prompts(), cache, **WAYS[way]), wanted)
        sequences = 2 * max(WAYS[way].get("num_beams", 1), WAYS[way].get("num_return_sequences", 1))
        assert in_use(cache.arena) == units_of(cache.arena.layout, sequences, PROMPT + 7)
        cache.reset()
        assert is_empty(cache.arena)


@pytest.mark.parametrize("page_size", [1, 8, 64])
@pytest.mark.parametrize("family", ["gpt_oss", "falcon_h1", "deepseek_v4"])
def test_pages_of_other_sizes(family: str, page_size: int) -> None:
    cache = an_arena_cache(family, page_size=page_size, arena_bytes=64 << 20)
    options = {"max_new_tokens": 6}  # the last entries of DeepSeek V4 are not whole
    assert_same(generated(family, prompts(), cache, **options), generated(family, prompts(), **options))
    assert in_use(cache.arena) == units_of(cache.arena.layout, 2, PROMPT + 5)


@pytest.mark.parametrize("family", ["llama4_text", "falcon_h1", "qwen3_next"])
def test_other_data_types_and_attention(family: str) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **values_of(family))
    model = make(config, attn_implementation="sdpa").eval().to(devices.current(), torch.bfloat16)
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, **prompts()}
    with ArenaCache(model, 4 << 20, page_size=PAGE) as cache:
        found = model.generate(**options, **{cache_argument(model): cache})
        planes = {plane.name: plane for group in cache.arena.layout.groups for plane in group.planes}
    assert torch.equal(found, model.generate(**options))
    assert planes["k"].dtype == torch.bfloat16
    assert "recurrent" not in planes or planes["recurrent"].dtype == torch.float32


@pytest.mark.parametrize("family", SOME)
def test_a_conversation_goes_on(family: str) -> None:
    caches = [an_arena_cache(family), DynamicCache(config=a_model(family).config)]
    first = prompts(1)
    turns = [generated(family, first, cache) for cache in caches]
    assert_same(*turns)
    more = to_current(torch.tensor([[9, 8, 7, 6, 5] * 5]))
    inputs = {"input_ids": torch.cat((turns[0].sequences, more), 1)}
    assert_same(*(generated(family, inputs, cache) for cache in caches))


@pytest.mark.parametrize("family", [*SOME[2:5], "mamba" if "mamba" in SERVED else "jamba", "deepseek_v4"])
@pytest.mark.parametrize("batch", [3, 4])
def test_states_that_are_no_views(family: str, batch: int) -> None:
    """Units of states that are not equally far apart: a layer works on copies, which go back to the arena."""
    cache = an_arena_cache(family)
    arena = cache.arena
    name = [group.name for group in arena.layout.groups if group.kind == "state"][-1]
    layers = [layer for layer, kept in enumerate(cache.layers) if hasattr(kept, "conv_states")]
    taken = some(arena.alloc({name: 8}))[name]
    arena.free(name, [taken[i] for i in (0, 1, 3, 6, 7)])
    inputs = prompts(batch)
    assert_same(generated(family, inputs, cache), generated(family, inputs))
    if batch == 3:  # the last layer's states, too, are in the arena after the next call
        other = DynamicCache(config=a_model(family).config)
        generated(family, inputs, other)
        for each in (cache, other):
            each.reorder_cache(to_current(torch.tensor([2, 0, 1])))
        for layer in layers:
            assert torch.equal(cache.layers[layer].conv_states[0], other.layers[layer].conv_states[0])
            states = next(states for states in cache._batch.states if states.group.name == name)
            kept = arena.buffer(name, "conv", layer)[states.units_of(layer)]
            assert torch.equal(kept, other.layers[layer].conv_states[0])
    cache.close()
    arena.free(name, [taken[i] for i in (2, 4, 5)])
    assert is_empty(arena)


@pytest.mark.parametrize("batch", [2, 3])
def test_states_that_are_placed_layer_by_layer(batch: int) -> None:
    torch.manual_seed(0)
    values = {**values_of("granitemoehybrid"), "mamba_d_state": 64}
    model = make(AutoConfig.for_model("granitemoehybrid", **values)).eval().to(devices.current())
    inputs = prompts(batch)
    cache = ArenaCache(model, 2 << 20, page_size=PAGE)
    assert cache.arena.slabs.by_layer("state")
    for ways in ({}, {"num_beams": 2}):
        cache.reset()
        options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12, **ways}
        found = model.generate(**inputs, **options, **{cache_argument(model): cache})
        assert torch.equal(found, model.generate(**inputs, **options))
        assert cache.arena.group_stats("state")["in_use"] == len(found) * ways.get("num_beams", 1) * 3
    short = ArenaCache(model, 320_000, page_size=PAGE)
    with pytest.raises(OutOfMemoryError, match=r"12 units of state \(\d+ are available\)"):
        model.generate(**prompts(4), max_new_tokens=2, **{cache_argument(model): short})
    assert is_empty(short.arena)


# Histories


class Pair:
    """The same calls to a cache of kvpool and to one of `transformers`, by a model."""

    def __init__(self, family: str) -> None:
        self.model = a_model(family)
        self.ours, self.theirs = an_arena_cache(family), DynamicCache(config=self.model.config)

    def step(self, tokens: torch.Tensor) -> None:
        argument = cache_argument(self.model)
        with torch.no_grad():
            found, wanted = (
                self.model(tokens, use_cache=True, **{argument: kept}).logits
                for kept in (self.ours, self.theirs)
            )
        assert torch.equal(found, wanted)

    def call_both(self, call: str, *given: Any) -> None:  # noqa: ANN401
        for kept in (self.ours, self.theirs):
            getattr(kept, call)(*given)


@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v32", "llama4_text"])
def test_histories_beside_the_dynamic_cache(family: str) -> None:
    """Through every change of the batch that transformers' own cache can make."""
    chance = random.Random(family)  # noqa: S311 - no secrets
    torch.manual_seed(1)
    pair = Pair(family)
    for _ in range(3):
        batch = tokens = chance.randint(1, 3)
        tokens = 0
        for at in range(14):
            new = chance.choice([1, 1, 1, 2, 9]) if at else chance.randint(1, 40)
            pair.step(to_current(torch.randint(1, 64, (batch, new))))
            tokens += new
            match chance.randrange(5):
                case 0 | 1:
                    order = [chance.randrange(batch) for _ in range(batch)]
                    pair.call_both("reorder_cache", to_current(torch.tensor(order)))
                case 2 if batch > 1:
                    batch -= 1
                    pair.call_both("batch_select_indices", to_current(torch.arange(batch + 1) != batch // 2))
                case 3 if batch < 4:
                    batch *= 2
                    pair.call_both("batch_repeat_interleave", 2)
            assert in_use(pair.ours.arena) == units_of(pair.ours.arena.layout, batch, tokens)
        pair.ours.reset()
        pair.theirs = DynamicCache(config=pair.model.config)
        assert is_empty(pair.ours.arena)


@pytest.mark.parametrize("family", ["falcon_h1", "qwen3_next", "zamba2", "deepseek_v4"])
def test_histories_of_states(family: str) -> None:
    """transformers only reorders these, which also repeats and leaves out sequences."""
    needs_reordering(family)
    chance = random.Random(family)  # noqa: S311 - no secrets
    torch.manual_seed(1)
    pair = Pair(family)
    pair.step(to_current(torch.randint(1, 64, (3, 21))))
    for new in (1, 1, 7, 1, 18, 1):
        order = to_current(torch.tensor([chance.randrange(3) for _ in range(3)]))
        pair.call_both("reorder_cache", order)
        pair.step(to_current(torch.randint(1, 64, (3, new))))
    ours = pair.ours
    ours.batch_repeat_interleave(2)
    pair.theirs.reorder_cache(to_current(torch.tensor([0, 0, 1, 1, 2, 2])))
    for new in (1, 5, 1):
        pair.step(to_current(torch.randint(1, 64, (6, new))))
    ours.batch_select_indices(to_current(torch.tensor([5, 0])))
    pair.theirs.reorder_cache(to_current(torch.tensor([5, 0])))
    for new in (1, 5, 1):
        pair.step(to_current(torch.randint(1, 64, (2, new))))
    assert in_use(ours.arena) == units_of(ours.arena.layout, 2, 21 + 29 + 14)
    ours.close()
    assert is_empty(ours.arena)


# Memory


@pytest.mark.parametrize("family", SOME)
def test_a_prompt_that_does_not_fit_takes_nothing(family: str) -> None:
    cache = an_arena_cache(family, arena_bytes=4 << 20)
    inputs = prompts(400)
    with pytest.raises(
        OutOfMemoryError, match=r"400 sequences of 0 tokens with 41 more each do not fit: they need \d+ "
    ):
        generated(family, inputs, cache)
    assert is_empty(cache.arena)
    assert_same(generated(family, prompts(1), cache), generated(family, prompts(1)))


@pytest.mark.parametrize("new", [1, 6])
@pytest.mark.parametrize("family", SOME)
def test_tokens_that_do_not_fit_change_nothing(family: str, new: int) -> None:
    """Somebody else fills the arena: a forward pass fails before it has changed anything, and runs later."""
    pair = Pair(family)
    arena = pair.ours.arena
    pair.step(to_current(torch.randint(1, 64, (2, 40), generator=torch.Generator().manual_seed(3))))
    before = in_use(arena)
    name = arena.layout.groups[0].name
    filled = some(arena.alloc({name: arena.group_stats(name)["available"]}))[name]
    # Units that are ready in slabs of other groups.
    others: dict[str, list[Any]] = {}
    for group in arena.layout.groups:
        left = arena.group_stats(group.name)["available"]
        others[group.name] = (
            [] if group.kind == "state" else some(arena.alloc({group.name: left}))[group.name]
        )
    held = in_use(arena)
    tokens = to_current(torch.full((2, new), 5))
    for _ in range(2):
        with pytest.raises(OutOfMemoryError, match=r"2 sequences of 40 tokens with \d more each"):
            pair.step(tokens)
        assert in_use(arena) == held
    arena.free(name, filled)
    for other, units in others.items():
        arena.free(other, units)
    assert in_use(arena) == before
    pair.step(tokens)


def test_caches_share_an_arena() -> None:
    first = an_arena_cache("gpt_oss")
    second = ArenaCache(a_model("gpt_oss"), arena=first.arena)
    wanted = generated("gpt_oss", prompts())
    assert_same(generated("gpt_oss", prompts(), first), wanted)
    assert_same(generated("gpt_oss", prompts(), second), wanted)
    assert in_use(first.arena) == units_of(first.arena.layout, 4, PROMPT + 7)
    first.close()
    assert second.arena.layout.page_size == PAGE
    assert in_use(second.arena) == units_of(second.arena.layout, 2, PROMPT + 7)
    second.close()
    assert is_empty(second.arena)


def test_threads_share_an_arena() -> None:
    wanted = generated("qwen3_next", prompts())
    arena = an_arena_cache("qwen3_next").arena
    wrong: list[BaseException] = []

    def run() -> None:
        try:
            with ArenaCache(a_model("qwen3_next"), arena=arena) as cache:
                for _ in range(2):
                    model = a_model("qwen3_next")
                    found = model.generate(
                        **prompts(), max_new_tokens=8, do_sample=False, **{cache_argument(model): cache}
                    )
                    assert torch.equal(found, wanted.sequences)
                    cache.reset()
        except BaseException as error:  # noqa: BLE001 - shown by the test
            wrong.append(error)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert is_empty(arena)


def test_a_dropped_cache_frees_its_units() -> None:
    cache = an_arena_cache("falcon_h1")
    arena = cache.arena
    generated("falcon_h1", prompts(), cache)
    del cache
    gc.collect()
    assert is_empty(arena)


# Layouts


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss", "gemma3n_text", "gemma4_text"])
def test_the_layout_of_a_configuration_is_the_same(family: str) -> None:
    """Where transformers keeps what engines keep."""
    config = json.loads(a_model(family).config.to_json_string(use_diff=False))
    wanted = layout_of(parse_model(config), page_size=PAGE, dtype="float32")
    found = an_arena_cache(family).arena.layout
    assert {group.name: group for group in found.groups} == {group.name: group for group in wanted.groups}


@pytest.mark.parametrize("family", ["qwen3_next", "granitemoehybrid", "falcon_h1"])
def test_what_transformers_keeps_otherwise(family: str) -> None:
    """K before V in recurrent states of GDN, and convolutions with an input more."""
    config = json.loads(a_model(family).config.to_json_string(use_diff=False))
    planes = [
        {
            plane.name: plane.shape
            for group in layout.groups
            if group.kind == "state"
            for plane in group.planes
        }
        for layout in (
            layout_of(parse_model(config), page_size=PAGE, dtype="float32"),
            an_arena_cache(family).arena.layout,
        )
    ]
    engines, kept = planes
    assert kept["conv"] == (engines["conv"][0], engines["conv"][1] + 1)
    heads, v_dim, k_dim = engines["recurrent"]
    assert kept["recurrent"] == ((heads, k_dim, v_dim) if family == "qwen3_next" else (heads, v_dim, k_dim))


# Refusals


@pytest.fixture
def pair() -> Pair:
    return Pair("llama")


def keys(batch: int, new: int, elements: int = 24) -> torch.Tensor:
    found: torch.Tensor = to_current(torch.randn(batch, 2, new, elements))
    return found


def write(cache: ArenaCache, batch: int, new: int, layers: Sequence[int] = range(4)) -> None:
    for layer in layers:
        cache.update(keys(batch, new), keys(batch, new), layer)


def test_refuses_and_changes_nothing(pair: Pair) -> None:
    cache = pair.ours
    write(cache, 2, 3)
    before = in_use(cache.arena)
    with pytest.raises(StateError, match="the batch has 3 sequences, the cache 2"):
        cache.update(keys(3, 1), keys(3, 1), 0)
    with pytest.raises(ArgumentError, match="another model"):
        cache.update(keys(2, 1, 8), keys(2, 1, 8), 0)
    with pytest.raises(ArgumentError, match="no gradients"):
        cache.update(keys(2, 1).requires_grad_(), keys(2, 1), 0)
    for indices in ([0, 2], [-1], []):
        with pytest.raises(IndexError):
            cache.reorder_cache(to_current(torch.tensor(indices)))
    with pytest.raises(OutOfMemoryError, match="more do not fit"):
        cache.batch_repeat_interleave(100_000)
    with pytest.raises(ConfigError, match="is not copied"):
        copy.deepcopy(cache)
    with pytest.raises(ConfigError, match="takes no tokens back"):
        cache.crop(-1)
    cache.crop(0)
    assert in_use(cache.arena) == before
    write(cache, 2, 1)
    assert cache.get_seq_length() == 4


def test_a_forward_pass_that_ends_early(pair: Pair) -> None:
    cache = pair.ours
    write(cache, 2, 3)
    write(cache, 2, 1, [0])
    with pytest.raises(StaleBufferError, match="ended before 6 of 8 writes"):
        write(cache, 2, 1, [0])
    with pytest.raises(StaleBufferError, match="ended before 6 of 8 writes"):
        cache.reorder_cache(to_current(torch.tensor([1, 0])))
    with pytest.raises(StaleBufferError, match="layer 1 with 3 tokens gets 2 more, and another has 4"):
        write(cache, 2, 2, [1])
    cache.reset()
    assert is_empty(cache.arena)
    write(cache, 1, 2)


def test_a_closed_cache_refuses_writes(pair: Pair) -> None:
    cache = pair.ours
    write(cache, 1, 3)
    for _ in range(2):
        cache.close()
    assert cache.closed
    assert is_empty(cache.arena)
    with pytest.raises(StaleBufferError, match="closed"):
        write(cache, 1, 1)
    cache.reorder_cache(to_current(torch.tensor([0])))  # of no sequence


def test_states_of_another_model_and_gradients() -> None:
    cache = an_arena_cache("qwen3_next")
    conv, recurrent = (
        next(plane.shape for plane in cache.arena.layout.groups[0].planes if plane.name == name)
        for name in ("conv", "recurrent")
    )
    inputs = to_current(torch.randn(2, conv[0], 5))
    with pytest.raises(ArgumentError, match="no gradients"):
        cache.update_conv_state(inputs.clone().requires_grad_(), 0, conv_kernel_size=conv[1])
    assert is_empty(cache.arena)
    with pytest.raises(ArgumentError, match="another model"):
        cache.update_conv_state(inputs[:, 1:], 0, conv_kernel_size=conv[1])
    cache.reset()
    cache.update_conv_state(inputs, 0, conv_kernel_size=conv[1])
    with pytest.raises(ArgumentError, match="another model"):
        cache.update_recurrent_state(to_current(torch.randn(2, *recurrent[1:])), 0)
    cache.close()
    with pytest.raises(StaleBufferError, match="closed"):
        cache.update_conv_state(inputs, 0, conv_kernel_size=conv[1])
    with pytest.raises(StaleBufferError, match="closed"):
        cache.get_conv_state(0)
    cache.reorder_cache(to_current(torch.tensor([0])))


@pytest.mark.parametrize("family", ["llama", "lfm2"])
def test_no_tokens_are_taken_back(family: str) -> None:
    cache = an_arena_cache(family)
    with pytest.raises(ConfigError, match="takes no tokens back"):
        generated(family, prompts(1), cache, prompt_lookup_num_tokens=2, output_logits=False)
    assert is_empty(cache.arena)


def test_arenas_that_do_not_serve() -> None:
    model = a_model("llama")
    with pytest.raises(ArgumentError, match="either arena_bytes, or the arena"):
        ArenaCache(model)
    arena = an_arena_cache("gpt_oss").arena
    with pytest.raises(ArgumentError, match="either arena_bytes, or the arena"):
        ArenaCache(model, 1 << 20, arena=arena)
    with pytest.raises(ConfigError, match=r"not of this model's layout: .*gpt_oss"):
        ArenaCache(model, arena=arena)
    with pytest.raises(ConfigError, match="too small"):
        ArenaCache(model, 1 << 10)


MORE: dict[str, Any] = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
UNSUPPORTED: dict[str, tuple[str, dict[str, Any], str]] = {
    "several convolutions": ("inkling_text", COMMON, "inkling_text: layer 0 has 4 convolutions"),
    "a state elsewhere": (
        "recurrent_gemma",
        {**MORE, "intermediate_size": 64, "lru_width": 64},
        "recurrent_gemma: layer 0 (passes no inputs of a convolution|keeps nothing of three tokens)",
    ),
    "a cache of its own": (
        "xlstm",
        COMMON,
        "xlstm (keeps 'rnn_state' in a cache of its own class|takes no cache)",
    ),
    "few inputs": (
        "zaya",
        {**COMMON, "num_experts_per_tok": 1},
        r"zaya: layer 0 passes \d inputs of its convolution to the cache for \d tokens",
    ),
    "two updates": ("dory", COMMON, "dory: layer 0 passes keys and values to the cache 2 times"),
}


@pytest.mark.parametrize("what", UNSUPPORTED)
def test_models_without_a_place(what: str) -> None:
    family, values, words = UNSUPPORTED[what]
    if family not in CONFIG_MAPPING:
        pytest.skip(f"this version of transformers has no {family}")
    model = make(AutoConfig.for_model(family, **values)).eval().to(devices.current())
    with pytest.raises(ConfigError, match=words):
        ArenaCache(model, 1 << 20)


@pytest.mark.parametrize("family", REFUSED)
def test_families_that_older_versions_keep_elsewhere(family: str) -> None:
    with pytest.raises(ConfigError, match=f"{family}:? {REFUSED[family]}"):
        an_arena_cache(family)


def test_an_encoder_has_no_place() -> None:
    config = T5Config(vocab_size=64, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    make_both: Any = AutoModelForSeq2SeqLM.from_config
    with pytest.raises(ConfigError, match="t5 has an encoder"):
        ArenaCache(make_both(config).eval().to(devices.current()), 1 << 20)


# Prefix caches


def a_prefix_cache(
    family: str, page_size: int = PAGE, arena_bytes: int = 8 << 20, tier_bytes: int = 0
) -> ArenaPrefixCache:
    arena = CacheArena(kept_layout(a_model(family), page_size), arena_bytes, devices.current())
    return ArenaPrefixCache(arena, tiers=[ArenaHostTier(arena, tier_bytes)] if tier_bytes else [])


def evict(cache: ArenaPrefixCache) -> None:
    """Take all that the arena can give, and give it back: no prefix is left."""
    arena, taken = cache.arena, []
    for group in arena.layout.groups:
        while (units := arena.alloc({group.name: 1})) is not None:
            taken.append(units)
    for units in taken:
        for name, numbers in units.items():
            arena.free(name, numbers)
    assert cache.cached_size() == 0


def left(family: str, inputs: dict[str, torch.Tensor], first: int) -> dict[str, torch.Tensor]:
    """What `generate` is given behind a prefix: all tokens, but the others of a model with states alone."""
    begin = first if all(DynamicCache(config=a_model(family).config).is_linear) else 0
    return {name: values[:, begin:] for name, values in inputs.items()}


def from_prefix(family: str, cache: ArenaPrefixCache, inputs: Any, **options: Any) -> tuple[int, int, Any]:  # noqa: ANN401
    """The tokens that were cached, those published in the end, and what was generated."""
    with ArenaCache(a_model(family), prefix_cache=cache) as arena_cache:
        found = arena_cache.prefill(**inputs)
        rest = left(family, inputs, arena_cache.num_tokens)
        output = generated(family, rest, arena_cache, **options)
        prompt = inputs["input_ids"]
        whole = torch.cat((prompt, output.sequences[:, rest["input_ids"].shape[1] :]), dim=1)
        published = arena_cache.publish(whole)
    cache.verify()
    cache.arena.verify()
    return found, published, output


def in_two_steps(
    family: str,
    inputs: dict[str, torch.Tensor],
    first: int,
    cache: Any = None,  # noqa: ANN401
    **options: Any,  # noqa: ANN401
) -> Any:  # noqa: ANN401
    """What transformers' own cache generates, if the first tokens are a forward pass of their own."""
    cache = DynamicCache(config=a_model(family).config) if cache is None else cache
    repeated = {
        name: values.repeat_interleave(options.get("num_beams", 1), 0) for name, values in inputs.items()
    }
    begun = {name: values[:, :first] for name, values in repeated.items()}
    generated(family, begun, cache, max_new_tokens=1)
    return generated(family, left(family, inputs, first), cache, **options)


@pytest.mark.parametrize("family", SERVED)
def test_cached_prefixes_generate_the_same(family: str) -> None:
    cache, inputs = a_prefix_cache(family), prompts()
    whole = (PROMPT - 1) // PAGE * PAGE
    wanted = in_two_steps(family, inputs, whole)
    assert_same(wanted_tokens(family, inputs, wanted), wanted)
    # The first computes what the others find, in the same forward passes.
    for expected in (0, whole, whole):
        found, published, output = from_prefix(family, cache, inputs)
        assert found == expected
        assert published == (PROMPT + 7) // PAGE * PAGE
        assert_same(output, wanted)
    # Another prompt with the same beginning.
    other = {name: values.clone() for name, values in inputs.items()}
    other["input_ids"][:, 30:] = 5
    found, _, output = from_prefix(family, cache, other)
    # Windows and states are kept at the ends that were published.
    is_full = all(group.kind == "full" for group in cache.arena.layout.groups)
    assert found == (30 // PAGE * PAGE if is_full else 0)
    assert_same(output, in_two_steps(family, other, whole, begun(family, inputs, found)))
    cache.clear()
    assert is_empty(cache.arena)


@pytest.mark.parametrize("family", SERVED)
def test_evicted_prefixes_come_back_from_host_memory(family: str) -> None:
    cache, inputs = a_prefix_cache(family, tier_bytes=8 << 20), prompts()
    whole = (PROMPT - 1) // PAGE * PAGE
    _, published, wanted = from_prefix(family, cache, inputs)
    for _ in range(2):
        assert cache.wait_written(60)
        evict(cache)
        loaded = cache.stats()["loaded"]
        found, again, output = from_prefix(family, cache, inputs)
        assert (found, again) == (whole, published)
        # Each of the prompts, as far as they are not one another's beginning.
        assert cache.stats()["loaded"] >= loaded + whole
        assert_same(output, wanted)
    stats = cache.tiers[0].stats() if cache.tiers else None
    assert stats
    assert (stats["failed"], stats["damaged"], stats["skipped"]) == (0, 0, 0)
    cache.clear()
    assert is_empty(cache.arena)


def begun(family: str, inputs: dict[str, torch.Tensor], first: int) -> Any:  # noqa: ANN401
    """Transformers' own cache of the first tokens, as the first two steps have computed them."""
    cache = DynamicCache(config=a_model(family).config)
    if first:
        whole = {name: values[:, :40] for name, values in inputs.items()}
        generated(family, whole, cache, max_new_tokens=1)
        cache.crop(first - 40)
    return cache


def wanted_tokens(family: str, inputs: dict[str, torch.Tensor], wanted: Any) -> Any:  # noqa: ANN401
    """Without a prefix, the same tokens are generated: forward passes of other lengths round otherwise."""
    plain = generated(family, inputs)
    new = plain.sequences.shape[1] - inputs["input_ids"].shape[1]
    assert torch.equal(plain.sequences[:, -new:], wanted.sequences[:, -new:])
    return wanted


@pytest.mark.parametrize("family", SOME)
@pytest.mark.parametrize("page_size", [1, 8, 16])
def test_prefixes_in_pages_of_other_sizes(family: str, page_size: int) -> None:
    cache, inputs = a_prefix_cache(family, page_size), prompts()
    whole = (PROMPT - 1) // page_size * page_size
    wanted = in_two_steps(family, inputs, whole)
    for expected in (0, whole):
        found, _, output = from_prefix(family, cache, inputs)
        assert found == expected
        assert_same(output, wanted)


@pytest.mark.parametrize("family", SOME)
def test_a_conversation_is_found_as_far_as_it_was_published(family: str) -> None:
    cache, inputs = a_prefix_cache(family), prompts(1)
    _, published, output = from_prefix(family, cache, inputs, max_new_tokens=8)
    # Of 49 tokens the last is not computed, and those before fill 12 pages: the states are at their end.
    assert published == 48
    turn = torch.cat((output.sequences, to_current(torch.full((1, 6), 9))), dim=1)
    more = {"input_ids": turn, "attention_mask": torch.ones_like(turn)}
    found, _, again = from_prefix(family, cache, more)
    assert found == 48
    theirs = DynamicCache(config=a_model(family).config)
    assert torch.equal(in_two_steps(family, inputs, 40, theirs).sequences, output.sequences)
    assert_same(again, in_two_steps(family, more, 52, theirs))


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_next"])
def test_beams_over_a_prefix(family: str) -> None:
    needs_reordering(family)
    cache, inputs = a_prefix_cache(family), prompts(1)
    repeated: dict[str, Any] = {name: values.repeat_interleave(3, 0) for name, values in inputs.items()}
    options: dict[str, Any] = {"num_beams": 3, "output_logits": False}
    wanted = in_two_steps(family, inputs, 40, **options).sequences
    for expected in (0, 40):
        with ArenaCache(a_model(family), prefix_cache=cache) as arena_cache:
            assert arena_cache.prefill(**repeated) == expected
            output = generated(family, inputs, arena_cache, **options)
            assert torch.equal(output.sequences, wanted)
            with pytest.raises(StateError, match="others have taken their place"):
                arena_cache.publish(torch.zeros(3, 100, dtype=torch.long))
        cache.verify()
    cache.clear()
    assert is_empty(cache.arena)


def test_prompts_of_a_batch_share_what_all_of_them_have() -> None:
    cache, inputs = a_prefix_cache("llama"), prompts(1)
    from_prefix("llama", cache, inputs)
    ids = inputs["input_ids"].repeat(2, 1)
    ids[1, 20:] = 3
    both = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    found, _, output = from_prefix("llama", cache, both)
    assert found == 20
    assert torch.equal(output.sequences, generated("llama", both).sequences)


def test_an_arena_gives_up_prefixes_for_sequences() -> None:
    layout = kept_layout(a_model("qwen3_next"), PAGE)
    need = layout.request_bytes(PROMPT + 8)
    cache = a_prefix_cache("qwen3_next", PAGE, 4 * need)
    for seed in range(6):
        ids = torch.randint(1, 64, (1, PROMPT), generator=torch.Generator().manual_seed(seed))
        inputs = {"input_ids": to_current(ids), "attention_mask": to_current(torch.ones_like(ids))}
        found, _, output = from_prefix("qwen3_next", cache, inputs)
        assert found == 0
        assert torch.equal(output.sequences, generated("qwen3_next", inputs).sequences)
    assert cache.stats()["evicted"] > 0


def test_prompts_with_other_padding_are_apart() -> None:
    cache, inputs = a_prefix_cache("llama"), prompts()
    # The padding token of the second prompt, as a token.
    whole = {"input_ids": inputs["input_ids"], "attention_mask": torch.ones_like(inputs["input_ids"])}
    assert from_prefix("llama", cache, inputs)[0] == 0
    found, _, output = from_prefix("llama", cache, whole)
    assert found == 0
    assert_same(output, in_two_steps("llama", whole, 40))
    assert from_prefix("llama", cache, inputs)[0] == from_prefix("llama", cache, whole)[0] == 40


def test_prefill_takes_no_beams_from_the_model() -> None:
    cache, inputs = a_prefix_cache("llama"), dict[str, Any](prompts(1))
    model = a_model("llama")
    before = model.generation_config.num_beams
    model.generation_config.num_beams = 2
    try:
        with ArenaCache(model, prefix_cache=cache) as arena_cache:
            assert arena_cache.prefill(**inputs) == 0
            assert arena_cache.num_tokens == 40
    finally:
        model.generation_config.num_beams = before


def test_a_clear_of_the_arena_ends_sequences() -> None:
    cache = an_arena_cache("llama")
    generated("llama", prompts(), cache)
    cache.arena.clear()
    other = an_arena_cache("llama", arena_bytes=None, arena=cache.arena)
    generated("llama", prompts(), other)
    held = in_use(cache.arena)
    with pytest.raises(StaleBufferError, match="2 sequences ended when the arena was cleared"):
        generated("llama", prompts(), cache)
    cache.reset()
    cache.close()
    assert in_use(other.arena) == held
    assert other.arena.stats()["dropped_frees"] == 0


def test_prefill_refuses_and_changes_nothing() -> None:
    model, inputs = a_model("llama"), dict[str, Any](prompts())
    plain = an_arena_cache("llama")
    with pytest.raises(StateError, match="needs a prefix_cache"):
        plain.prefill(**inputs)
    with pytest.raises(ArgumentError, match="either arena_bytes, or the arena of another, or a prefix_cache"):
        ArenaCache(model, 1 << 20, prefix_cache=a_prefix_cache("llama"))
    cache = a_prefix_cache("llama")
    with ArenaCache(model, prefix_cache=cache) as arena_cache:
        with pytest.raises(StateError, match=r"began without prefill\(\)"):
            arena_cache.publish(torch.zeros(0, 0, dtype=torch.long))
        with pytest.raises(ArgumentError, match=r"shape \[0, 4\] have no token"):
            arena_cache.prefill(inputs["input_ids"][:0, :4])
        with pytest.raises(ArgumentError, match="is not that of padding on the left"):
            arena_cache.prefill(inputs["input_ids"], 1 - inputs["attention_mask"])
        arena_cache.prefill(**inputs)
        with pytest.raises(StateError, match="has 2 sequences"):
            arena_cache.prefill(**inputs)
        with pytest.raises(ArgumentError, match="for 2 sequences of 40 tokens"):
            arena_cache.publish(inputs["input_ids"][:, :39])
        with pytest.raises(ArgumentError, match="do not begin with its 40 published tokens"):
            arena_cache.publish(inputs["input_ids"] + 1)
        assert arena_cache.publish(inputs["input_ids"]) == 40
    with pytest.raises(StaleBufferError, match="is closed"):
        arena_cache.prefill(**inputs)
    tight = a_prefix_cache("llama", PAGE, cache.arena.layout.request_bytes(24))
    with ArenaCache(model, prefix_cache=tight) as arena_cache:
        with pytest.raises(OutOfMemoryError, match="do not fit"):
            arena_cache.prefill(**inputs)
        assert is_empty(tight.arena)
