"""What engines' memory rules do with an arena: examples computed by hand, and properties."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from model_configs import CONFIGS, PUBLISHED_2026

from kvpool import CacheLayout, Group, Plane
from kvpool.errors import ConfigError
from kvpool.models.layout import read_layout
from kvpool.tools.plan.engines import (
    LEAST_TOKENS,
    REQUEST_TOKENS,
    Usage,
    sglang_usage,
    split_usage,
    vllm_usage,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvpool.typing import GroupKind

GIB = 1 << 30
ARENA = 40 * GIB


def layout_of(name: str, page_size: int = 16, state_dtype: str = "float32") -> CacheLayout:
    return read_layout(PUBLISHED_2026[name], page_size=page_size, state_dtype=state_dtype)


def kv_group(layers: int, width: int, kind: GroupKind = "full", tokens: int | None = None) -> Group:
    """A group with K and V of `width` bfloat16 elements in each of its layers."""
    planes = [Plane("k", "bfloat16", (1, width)), Plane("v", "bfloat16", (1, width))]
    return Group(kind, kind, range(layers), planes, tokens=tokens)


def state_group(layers: int, nbytes: int) -> Group:
    return Group("state", "state", range(100, 100 + layers), [Plane("recurrent", "uint8", (nbytes,))])


def usages_of(layout: CacheLayout, arena_bytes: int) -> Iterator[Usage]:
    """What every way that can lay the layout out does with the arena."""
    ways: tuple[Callable[[], Usage], ...] = (
        lambda: vllm_usage(layout, arena_bytes, layout.page_size),
        lambda: sglang_usage(layout, arena_bytes, layout.page_size),
        lambda: split_usage(layout, arena_bytes),
    )
    for way in ways:
        try:
            yield way()
        except ConfigError:
            assert layout.model in {"deepseek_v4", "jamba"}


def needed_bytes(layout: CacheLayout, tokens: int) -> int:
    """Bytes that any way needs for the tokens: of a compressor, which pools tokens, those of its tokens."""
    total = 0
    for group in layout.groups:
        if group.kind != "state":
            total += len(group.layers) * group.entry_bytes * -(-tokens // group.stride)
        for plane in group.planes if group.kind == "state" else ():
            kept = plane.shape[0] if "compressor" in plane.name else 1
            total += len(group.layers) * plane.entry_bytes // kept * min(tokens, kept)
    return total


@pytest.mark.parametrize(
    ("state_dtype", "block_size", "tokens", "least_bytes"),
    [
        ("bfloat16", 16, 544, 53_477_376),
        ("bfloat16", 64, 576, 56_623_104),
        ("float32", 16, 1056, 103_809_024),
        ("float32", 64, 1088, 106_954_752),
    ],
)
def test_vllm_raises_blocks_until_a_page_covers_a_state(
    state_dtype: str, block_size: int, tokens: int, least_bytes: int
) -> None:
    block_bytes = 12 * 2048 * tokens
    assert least_bytes == 4 * block_bytes
    layout = layout_of("Qwen3-Next-80B-A3B", state_dtype=state_dtype)
    usage = vllm_usage(layout, 1000 * block_bytes, block_size)
    assert usage.name == "vLLM, pages inflated"
    assert usage.least_bytes == least_bytes
    # Three groups of twelve layers with states, and one with attention.
    assert usage.requests == {length: 999 // (3 + -(-length // tokens)) for length in REQUEST_TOKENS}
    state_bytes = 32 * 128 * 128 * (2 if state_dtype == "bfloat16" else 4) + 8192 * 3 * 2
    assert usage.lost == pytest.approx(1 - state_bytes / (2048 * tokens))


def test_vllm_has_blocks_of_128_tokens_beside_states_and_latent_vectors() -> None:
    block_bytes = 7 * 1152 * 15 * 128
    usage = vllm_usage(layout_of("Kimi-Linear-48B-A3B"), 100 * block_bytes, 16)
    assert usage.least_bytes == 4 * block_bytes
    # 20 layers with states in three groups of seven.
    assert usage.lost == pytest.approx(1 - 20 * (12288 * 3 * 2 + 32 * 128 * 128 * 4) / 3 / block_bytes)


def test_vllm_pads_small_states_to_a_page() -> None:
    usage = vllm_usage(layout_of("LFM2-8B-A1B"), 1000 * 6 * 16 * 2048, 16)
    assert usage.lost == pytest.approx(0.75)
    assert usage.least_bytes == 4 * 6 * 16 * 2048


@pytest.mark.parametrize(("block_size", "block_bytes"), [(16, 589_824), (64, 2_359_296)])
def test_vllm_has_two_equal_groups_of_gpt_oss(block_size: int, block_bytes: int) -> None:
    usage = vllm_usage(layout_of("gpt-oss-120b"), 10_000 * block_bytes, block_size)
    assert usage.name == "vLLM, pages of one size"
    assert usage.least_bytes == 2 * block_bytes
    assert usage.lost == 0
    # The next token sees 127 of them: in eight blocks of 16, or two of 64.
    window = 128 // block_size
    assert usage.requests == {length: 9_999 // (length // block_size + window) for length in REQUEST_TOKENS}


@pytest.mark.parametrize(("block_size", "block_bytes"), [(16, 1_310_720), (64, 5_242_880)])
def test_vllm_misses_layers_in_groups_of_gemma_3(block_size: int, block_bytes: int) -> None:
    usage = vllm_usage(layout_of("gemma-3-27b-it"), 1000 * block_bytes, block_size)
    assert usage.least_bytes == 7 * block_bytes
    assert usage.lost == pytest.approx(8 / 60)
    assert usage.requests[32_768] == 999 // (32_768 // block_size + 6 * 1024 // block_size)


def test_vllm_has_more_tokens_in_a_block_of_smaller_entries() -> None:
    # Entries of Gemma 4's windows are twice as large as the others.
    usage = vllm_usage(layout_of("gemma-4-31B-it"), 1000 * 2_621_440, 16)
    assert usage.lost == 0
    assert usage.least_bytes == 6 * 2_621_440
    assert usage.requests[1024] == 999 // (1024 // 32 + 5 * 1024 // 16)


def test_vllm_frees_chunks() -> None:
    usage = vllm_usage(layout_of("Llama-4-Scout"), 10_000 * 786_432, 16)
    assert usage.lost == 0
    # 32,768 tokens are four whole chunks.
    assert usage.requests == {1024: 9_999 // (4 * 64), 32_768: 9_999 // 2048}


def test_vllm_has_one_group_of_latent_vectors_and_index_keys() -> None:
    for block_size in (16, 64):
        usage = vllm_usage(layout_of("DeepSeek-V3.2"), 100 * 5_012_736, block_size)
        assert (usage.lost, usage.least_bytes) == (0, 5_012_736)
    planes = [Plane("latent", "uint8", (656,)), Plane("index_k", "uint8", (132,))]
    layout = CacheLayout([Group("full", "full", range(61), planes)])
    usage = vllm_usage(layout, 100 * 3_076_352, 64)
    assert (usage.lost, usage.least_bytes) == (0, 3_076_352)
    assert usage.requests == {1024: 6, 32_768: 0}


@pytest.mark.parametrize(
    ("name", "block_bytes", "worst_bytes"),
    [
        # The largest group is that of the chains: pages of entries of 4 tokens, of their index keys, and of
        # entries of 128 tokens. What the compressors of 128 tokens keep uses the least of a block.
        ("DeepSeek-V4-Flash", 21 * (37_440 + 8_640) + 20 * 1_728, 20 * 32_768),
        ("DeepSeek-V4-Pro", 30 * (37_440 + 8_640) + 31 * 1_728, 31 * 32_768),
    ],
)
def test_vllm_packs_pages_of_deepseek_v4(name: str, block_bytes: int, worst_bytes: int) -> None:
    usage = vllm_usage(layout_of(name), 1000 * block_bytes, 16)
    assert usage.name == "vLLM, pages packed"
    # One of chains, one in each group of the window, and two for each kind of compressor.
    assert usage.least_bytes == (1 + 2 + 2 + 2) * block_bytes
    assert usage.lost == pytest.approx(1 - worst_bytes / block_bytes)
    assert usage.requests[1024] == 999 // (4 + 2 * 2 + 2 + 16)


def test_vllm_divides_layers_by_the_rarest_kind() -> None:
    kinds = {(12, 13): (13, 2), (13, 36): (13, 4), (2, 5): (2, 4), (10, 15): (10, 3)}
    for (full, windows), (layers, groups) in kinds.items():
        layout = CacheLayout([kv_group(full, 64), kv_group(windows, 64, "window", 100)])
        block_bytes = layers * 16 * 256
        usage = vllm_usage(layout, 100 * block_bytes, 16)
        assert usage.least_bytes == groups * block_bytes


def test_vllm_pads_pages_that_do_not_divide_the_largest() -> None:
    layout = CacheLayout([kv_group(3, 64), kv_group(3, 96, "window", 100)])
    usage = vllm_usage(layout, 100 * 3 * 16 * 384, 16)
    assert usage.least_bytes == 2 * 3 * 16 * 384
    assert usage.lost == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("state_dtype", "slots", "size"), [("float32", 262, 920_754), ("bfloat16", 513, 921_114)]
)
def test_sglang_splits_states_from_tokens(state_dtype: str, slots: int, size: int) -> None:
    layout = layout_of("Qwen3-Next-80B-A3B", state_dtype=state_dtype)
    state_bytes = 36 * layout.groups[1].entry_bytes
    usage = sglang_usage(layout, ARENA, 1)
    assert usage.name == "SGLang, split"
    assert usage.least_bytes == 3 * state_bytes + 12 * 24_576
    assert usage.least_bytes == (232_095_744 if state_dtype == "float32" else 118_849_536)
    assert usage.requests == {1024: slots // 5, 32_768: size // 32_768}
    assert usage.lost == 1 - ((slots + 1) * state_bytes + size * 24_576) / ARENA
    assert sglang_usage(layout, ARENA, 64).least_bytes == 3 * state_bytes + 64 * 24_576


def test_sglang_splits_windows_from_full_attention() -> None:
    layout = layout_of("gpt-oss-120b")
    usage = sglang_usage(layout, ARENA, 1)
    assert usage.least_bytes == 884_736
    assert usage.requests == {1024: 647_269 // 1024, 32_768: 647_269 // 32_768}
    assert usage.lost == 1 - (647_269 + 517_815) * 36_864 / ARENA
    assert sglang_usage(layout, ARENA, 64).least_bytes == 4_718_592


def test_sglang_keeps_all_tokens_of_gemma_3() -> None:
    usage = sglang_usage(layout_of("gemma-3-27b-it"), ARENA, 1)
    assert usage.name == "SGLang, one pool"
    assert usage.least_bytes == 6_094_848
    assert usage.requests == {1024: 84_562 // 1024, 32_768: 84_562 // 32_768}
    assert sglang_usage(layout_of("gemma-3-27b-it"), ARENA, 64).least_bytes == 32_505_856
    for name in ("gemma-2-9b", "Mistral-7B-v0.1"):
        assert sglang_usage(read_layout(CONFIGS[name]), ARENA, 1).name == "SGLang, one pool"


@pytest.mark.parametrize("window", [1, 100, 127, 128, 200])
@pytest.mark.parametrize("page_size", [1, 16, 64, 256])
def test_sglang_frees_what_is_behind_a_window_from_time_to_time(window: int, page_size: int) -> None:
    groups = [kv_group(1, 64, "window", window + 1)]
    slots = 100_000 // page_size * page_size
    usage = sglang_usage(CacheLayout(groups, model="gpt_oss"), slots * 256, page_size)
    freed = 0
    for tokens in range(1, REQUEST_TOKENS[-1] + 1):
        if tokens - window >= freed + 128:
            kept = -(-max(window, page_size) // page_size) * page_size
            freed = max(freed, (tokens - kept) // page_size * page_size)
        if tokens in REQUEST_TOKENS:
            held = -(-tokens // page_size) * page_size - freed
            assert usage.requests[tokens] == slots // held


def test_sglang_limits_requests_by_their_windows() -> None:
    # There are 45,000 slots for full attention, and 36,000 for windows.
    layout = CacheLayout([kv_group(1, 64), kv_group(99, 64, "window", 5000)], model="gpt_oss")
    usage = sglang_usage(layout, 9000 * (5 + 99 * 4) * 256, 1)
    assert usage.requests == {1024: 36_000 // 1024, 32_768: 1}
    with pytest.raises(ConfigError, match="no room for a window of 4,999 tokens"):
        sglang_usage(layout, 1200 * (5 + 99 * 4) * 256, 1)


def test_sglang_has_pages_of_64_tokens_with_index_keys() -> None:
    for page_size in (1, 16, 64, 128):
        usage = sglang_usage(layout_of("DeepSeek-V3.2"), 6401 * 78_324, page_size)
        assert usage.least_bytes == 64 * 78_324
        assert usage.requests == {1024: 6, 32_768: 0}
        assert usage.lost == pytest.approx(1 / 6401)


def test_sglang_has_pages_of_one_token_beside_short_convolutions() -> None:
    layout = layout_of("LFM2-8B-A1B")
    usage = sglang_usage(layout, ARENA, 64)
    assert usage.least_bytes == needed_bytes(layout, 12)
    assert sglang_usage(layout, ARENA, 3) == usage


def test_sglang_splits_pools_of_deepseek_v4() -> None:
    layout = layout_of("DeepSeek-V4-Flash")
    page_bytes = 21 * (37_440 + 64 * 132) + 20 * 1_728
    swa_bytes = 43 * 149_760 + 21 * 81_920
    ring_bytes = 20 * 524_288
    usage = sglang_usage(layout, 259 * ring_bytes + 50 * (10 * page_bytes + swa_bytes), 16)
    assert usage.least_bytes == page_bytes + swa_bytes + ring_bytes
    # 500 pages of 256 tokens in chains, and 50 in windows, of which a request needs one at this length.
    assert usage.requests == {1024: 50, 32_768: 500 // 128}
    assert usage.lost < 0.02
    assert sglang_usage(layout, 1024 * GIB, 16).requests[1024] == 256


def test_pools_with_a_memory_each_are_sized_for_a_mean() -> None:
    layout = layout_of("Qwen3-Next-80B-A3B")
    state_bytes, page_bytes = 77_266_944, 16 * 24_576
    arena_bytes = 11 * state_bytes + (10 * 512 + 1) * page_bytes
    usage = split_usage(layout, arena_bytes)
    assert usage == Usage("kvpool, split", 0, state_bytes + page_bytes, {1024: 10, 32_768: 2})
    # With a shorter mean, there are more states and fewer pages.
    assert split_usage(layout, arena_bytes, 1024).requests[1024] > 10
    # Without states, one pool has all of the memory.
    usage = split_usage(layout_of("gemma-3-27b-it"), (100 * 64 + 1) * 16 * 507_904)
    assert usage == Usage("kvpool, split", 0, 16 * 507_904, {1024: 100, 32_768: 3})


@pytest.mark.parametrize("name", PUBLISHED_2026)
@pytest.mark.parametrize("page_size", [16, 64])
def test_a_request_holds_what_it_needs(name: str, page_size: int) -> None:
    layout = layout_of(name, page_size)
    needed = needed_bytes(layout, LEAST_TOKENS)
    if layout.model != "deepseek_v4":
        assert needed == layout_of(name, 1).request_bytes(LEAST_TOKENS)
    for usage in usages_of(layout, ARENA):
        assert needed <= usage.least_bytes <= ARENA, usage.name
        assert 0 <= usage.lost < 1, usage.name
        assert tuple(usage.requests) == REQUEST_TOKENS
        assert usage.requests[1024] >= usage.requests[32_768] >= 1, usage.name
        assert usage.requests[1024] * usage.least_bytes <= 3 * ARENA, usage.name


@pytest.mark.parametrize("name", PUBLISHED_2026)
def test_more_memory_fits_more_requests(name: str) -> None:
    layout = layout_of(name)
    arenas = [list(usages_of(layout, ARENA << times)) for times in range(4)]
    for smaller, larger in pairwise(arenas):
        for one, other in zip(smaller, larger, strict=True):
            assert (one.name, one.least_bytes) == (other.name, other.least_bytes)
            assert all(one.requests[tokens] <= other.requests[tokens] for tokens in REQUEST_TOKENS)


@pytest.mark.parametrize("name", PUBLISHED_2026)
def test_an_arena_without_room_is_refused(name: str) -> None:
    layout = layout_of(name)
    for way in (vllm_usage, sglang_usage, split_usage):
        with pytest.raises(ConfigError, match=r"no room|does not serve|entry for each token"):
            way(layout, 100_000, 16)


def test_what_engines_cannot_lay_out_is_refused() -> None:
    full = kv_group(2, 64)
    plain = CacheLayout([full])
    with pytest.raises(ConfigError, match="multiples of 16 tokens, not 8"):
        vllm_usage(plain, ARENA, 8)
    with pytest.raises(ConfigError, match="at least 1 token, not 0"):
        sglang_usage(plain, ARENA, 0)
    with pytest.raises(ConfigError, match="at least 1, not 0"):
        split_usage(plain, ARENA, 0)
    sinks = CacheLayout([Group("window", "window", [0], full.planes, tokens=100, sinks=4)])
    alone = CacheLayout([state_group(2, 1000)])
    chains = CacheLayout([full, Group("chain", "full", [5], full.planes, stride=4)], model="a model")
    for way in (vllm_usage, sglang_usage):
        with pytest.raises(ConfigError, match="keep first tokens, as group window does"):
            way(sinks, ARENA, 16)
        with pytest.raises(ConfigError, match="states alone"):
            way(alone, ARENA, 16)
        with pytest.raises(ConfigError, match="of deepseek_v4, not of 'a model'"):
            way(chains, ARENA, 16)
    with pytest.raises(ConfigError, match="states alone"):
        split_usage(alone, ARENA)
    with pytest.raises(ConfigError, match="an entry for each token"):
        split_usage(chains, ARENA)


def test_what_one_engine_cannot_lay_out_is_refused() -> None:
    latent = Group("full", "full", [0, 1], [Plane("latent", "bfloat16", (576,))])
    with pytest.raises(ConfigError, match=r"different sizes beside states: \[256, 384\] bytes"):
        vllm_usage(
            CacheLayout([kv_group(2, 64), kv_group(2, 96, "window", 100), state_group(2, 9)]), ARENA, 16
        )
    with pytest.raises(ConfigError, match="cannot pad pages of latent vectors from 18,432 to 20,480 bytes"):
        vllm_usage(CacheLayout([latent, kv_group(2, 320, "window", 100)]), ARENA, 16)
    of_two_sizes = [
        Group(name, "window", [number], kv_group(1, 64).planes, tokens=tokens)
        for number, (name, tokens) in enumerate([("one", 100), ("two", 200)])
    ]
    with pytest.raises(ConfigError, match=r"windows of one size, not of \[100, 200\] tokens"):
        sglang_usage(CacheLayout(of_two_sizes, model="gpt_oss"), ARENA, 16)
    assert vllm_usage(CacheLayout(of_two_sizes), ARENA, 16).least_bytes == 2 * 16 * 256
    with pytest.raises(ConfigError, match=r"SGLang 0\.5\.23 does not serve jamba"):
        sglang_usage(layout_of("Jamba-1.5-Mini"), ARENA, 16)
    with pytest.raises(ConfigError, match="a divisor of 256 tokens beside states, not 48"):
        sglang_usage(layout_of("Qwen3-Next-80B-A3B"), ARENA, 48)
    wide = read_layout(PUBLISHED_2026["DeepSeek-V4-Flash"], dtype="bfloat16")
    assert vllm_usage(wide, ARENA, 16).least_bytes == 7 * (21 * (65_536 + 8_704) + 20 * 2_048)
    with pytest.raises(ConfigError, match="keeps entries of deepseek_v4 in 584 bytes"):
        sglang_usage(wide, ARENA, 16)
    groups = [group for group in layout_of("DeepSeek-V4-Flash").groups if group.name != "ring_4"]
    with pytest.raises(ConfigError, match="no compressor of the layout keeps entries and index keys"):
        vllm_usage(CacheLayout(groups, model="deepseek_v4"), ARENA, 16)
