"""How much of an arena the memory rules of engines can use for a model, to compare with slabs.

The rules are those of vLLM 0.33 and SGLang 0.5.23 with their defaults for one NVIDIA GPU: prefix caching on,
no speculation, states in the layout's dtype. Nothing of an engine is imported or run. What requests hold is
counted between two steps, without prefixes that a cache keeps for others, and as if all their tokens but the
first were decoded one by one.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvpool.errors import ConfigError
from kvpool.models.layout import PACKED_ENTRY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvpool import CacheLayout, Group

VLLM = "vLLM 0.33"
SGLANG = "SGLang 0.5.23"

LEAST_TOKENS = 12
REQUEST_TOKENS = (1_024, 32_768)

_DSA_PAGE = 64  # of kernels that read index keys, in both engines
_PACKED_ALIGNMENT = 576  # of its pages, in both engines


@dataclass(frozen=True)
class Usage:
    """What one way to lay out memory does with an arena.

    Attributes:
        name: The engine and the way.
        lost: Share of the arena that the kind of memory worst off loses to packing, were all of the arena its
            own: ends of blocks, padding, missing layers of a group, and the arena's tail. Null blocks are not
            counted.
        least_bytes: Bytes that a request of `LEAST_TOKENS` tokens holds.
        requests: How many requests of so many tokens fit at once, for each of `REQUEST_TOKENS`.
    """

    name: str
    lost: float
    least_bytes: int
    requests: dict[int, int]


@dataclass(frozen=True)
class _Spec:
    """What some layers keep, in the terms of vLLM's `KVCacheSpec`.

    Attributes:
        kind: "full", "window", "chunk" or "state".
        reach: Tokens of a window or chunk; 0 for other kinds.
        is_latent: Whether entries are latent vectors, whose pages cannot be padded to another's size.
        layers: How many layers.
        block_size: Tokens of a block.
        payload_bytes: Bytes of a layer's page in a block that hold something.
        page_bytes: Bytes of that page.
    """

    kind: str
    reach: int
    is_latent: bool
    layers: int
    block_size: int
    payload_bytes: int
    page_bytes: int

    @property
    def type(self) -> tuple[str, int, int]:
        """What `UniformTypeKVCacheSpecs.is_uniform_type` compares."""
        return self.kind, self.reach, self.block_size

    def blocks(self, tokens: int) -> int:
        """Return the blocks that a request holds in a group, by the managers' `get_num_skipped_tokens`."""
        if self.kind == "state":
            return 1
        skipped = 0
        if self.kind == "window":
            skipped = max(0, tokens - self.reach + 1)
        elif self.kind == "chunk":
            skipped = tokens // self.reach * self.reach
        return _ceil_div(tokens, self.block_size) - skipped // self.block_size


@dataclass(frozen=True)
class _Bucket:
    """Layers of one type, divided into groups with a block table each.

    Attributes:
        specs: What they keep.
        groups: How many groups.
    """

    specs: tuple[_Spec, ...]
    groups: int

    @property
    def block_bytes(self) -> int:
        """Bytes of a block that the largest of the groups needs."""
        return sum(_ceil_div(spec.layers, self.groups) * spec.page_bytes for spec in self.specs)

    @property
    def payload_bytes(self) -> float:
        """Bytes of a block that hold something, as a mean of the groups."""
        return sum(spec.layers * spec.payload_bytes for spec in self.specs) / self.groups

    def blocks(self, tokens: int) -> int:
        """Return the blocks that a request holds in all groups."""
        return self.groups * self.specs[0].blocks(tokens)


def vllm_usage(layout: CacheLayout, arena_bytes: int, block_size: int) -> Usage:
    """Return what vLLM 0.33 does with an arena.

    All groups take blocks of one size from one pool, as `_get_kv_cache_bytes_per_block` has it: that of the
    group with the largest pages. `BlockPool` keeps one block as its null block.

    Args:
        layout: The model's layout; its own page size has no influence.
        arena_bytes: Bytes of the arena.
        block_size: Tokens of a block, as `--block-size`. It is a lower bound where a page must be as large as
            a state, or a kernel reads larger blocks. 64 has the effect of FlashInfer's Gated DeltaNet prefill
            on blocks of 16, too.

    Raises:
        ConfigError: If vLLM cannot lay out the groups, or the arena has no room for two blocks.
    """
    if block_size < 1 or block_size % 16:
        raise ConfigError(f"{VLLM} has blocks of multiples of 16 tokens, not {block_size}")
    _refuse_states_alone(layout)
    _refuse_sinks(layout, VLLM)
    if _has_chains(layout):
        name, buckets = "vLLM, pages packed", _packed_buckets(_chain_specs(layout))
    else:
        specs = _specs(layout, block_size)
        buckets = _uniform_buckets(specs)
        has_states = any(spec.kind == "state" for spec in specs)
        name = "vLLM, pages inflated" if has_states else "vLLM, pages of one size"
    block_bytes = max(bucket.block_bytes for bucket in buckets)
    num_blocks = arena_bytes // block_bytes
    if num_blocks < 2:  # noqa: PLR2004 - the null block, and one more
        raise ConfigError(f"an arena of {arena_bytes:,} bytes has no room for two blocks of {block_bytes:,}")

    def held(tokens: int) -> int:
        return sum(bucket.blocks(tokens) for bucket in buckets)

    return Usage(
        name=name,
        lost=1 - num_blocks * min(bucket.payload_bytes for bucket in buckets) / arena_bytes,
        least_bytes=held(LEAST_TOKENS) * block_bytes,
        requests={tokens: (num_blocks - 1) // held(tokens) for tokens in REQUEST_TOKENS},
    )


def _specs(layout: CacheLayout, block_size: int) -> list[_Spec]:
    """Return what layers keep before pages are made equal; index keys are layers of their own."""
    if _has_index(layout):
        block_size = _round_up(block_size, _DSA_PAGE)
    states = [group for group in layout.groups if group.kind == "state"]
    others = [group for group in layout.groups if group.kind != "state"]
    state_page = 0
    if states and others:
        block_size = _block_covering_states(states, others, block_size)
        state_page = block_size * others[0].entry_bytes
    specs = []
    for group in layout.groups:
        entries = 1 if group.kind == "state" else block_size
        of_index = sum(plane.entry_bytes for plane in group.planes if plane.name == "index_k")
        for entry_bytes in filter(None, (group.entry_bytes - of_index, of_index)):
            payload = entries * entry_bytes
            specs.append(
                _Spec(
                    kind=group.kind,
                    reach=group.tokens or 0,
                    is_latent=_is_latent(group),
                    layers=len(group.layers),
                    block_size=block_size,
                    payload_bytes=payload,
                    page_bytes=max(payload, state_page) if group.kind == "state" else payload,
                )
            )
    return specs


def _block_covering_states(states: list[Group], others: list[Group], block_size: int) -> int:
    """Return the tokens of a block whose page covers a state, by `Platform._align_hybrid_block_size`."""
    entries = {group.entry_bytes for group in others}
    if len(entries) > 1:
        raise ConfigError(f"{VLLM} has no entries of different sizes beside states: {sorted(entries)} bytes")
    # MLA kernels need a multiple of 128.
    step = max(block_size, 128) if any(map(_is_latent, others)) else block_size
    return step * _ceil_div(max(group.entry_bytes for group in states), step * entries.pop())


def _uniform_buckets(specs: list[_Spec]) -> list[_Bucket]:
    """Return the groups of a layout whose layers are outermost, by `get_kv_cache_groups`.

    Layers of one type are one group. If not, `unify_kv_cache_spec_page_size` makes all pages as large as the
    largest, and `_get_kv_cache_groups_uniform_page_size` divides each kind into groups of about as many
    layers as the rarest has.
    """
    if len({spec.type for spec in specs}) == 1:
        return [_Bucket(tuple(specs), 1)]
    page_bytes = max(spec.page_bytes for spec in specs)
    unified = [_with_page(spec, page_bytes) for spec in specs]
    least, most = min(spec.layers for spec in unified), max(spec.layers for spec in unified)
    group_size = most if 2 * most < 3 * least else least
    return [_Bucket((spec,), _ceil_div(spec.layers, group_size)) for spec in unified]


def _with_page(spec: _Spec, page_bytes: int) -> _Spec:
    """Return the same with larger pages: of more tokens if that is exact, padded if not."""
    times, rest = divmod(page_bytes, spec.page_bytes)
    if spec.kind != "state" and rest == 0:
        return replace(
            spec,
            block_size=times * spec.block_size,
            payload_bytes=times * spec.payload_bytes,
            page_bytes=page_bytes,
        )
    if spec.is_latent:
        raise ConfigError(
            f"{VLLM} cannot pad pages of latent vectors from {spec.page_bytes:,} to {page_bytes:,} bytes"
        )
    return replace(spec, page_bytes=page_bytes)


_MAIN_BLOCK = 256  # tokens of a block of DeepSeek V4's chains, which its indexer reads
_WINDOW_BLOCK = 64  # of its window
_RING_BLOCKS = {8: 4, 128: 8}  # of what its compressors keep, by the tokens of that


def _chain_specs(layout: CacheLayout) -> list[_Spec]:
    """Return what layers of DeepSeek V4 keep, a spec for each plane, by `get_kv_cache_spec` of its modules.

    What a compressor keeps is a window to vLLM.
    """
    alignment = _PACKED_ALIGNMENT if _is_packed(layout) else 512
    specs = []
    for group in layout.groups:
        for plane in group.planes:
            kind, reach = group.kind, group.tokens or 0
            if group.kind == "full":
                block_size, entries, entry_bytes = _MAIN_BLOCK, _MAIN_BLOCK // group.stride, plane.entry_bytes
            elif group.kind == "window":
                block_size, entries, entry_bytes = _WINDOW_BLOCK, _WINDOW_BLOCK, plane.entry_bytes
            else:
                kind, reach = "window", plane.shape[0]
                block_size = entries = _RING_BLOCKS[reach]
                entry_bytes = plane.entry_bytes // reach
            payload = entries * entry_bytes
            page_bytes = _round_up(payload, alignment)
            specs.append(_Spec(kind, reach, True, len(group.layers), block_size, payload, page_bytes))
    return specs


def _packed_buckets(specs: list[_Spec]) -> list[_Bucket]:
    """Return the groups of a layout whose blocks are outermost, by `_get_packed_kv_cache_groups`.

    Pages lie side by side in a block. A type with equally many layers of each of its page sizes is a pattern
    of layers. The longest such pattern of several sizes is one group, and the others are divided into groups
    of about as many repeats.
    """
    types: dict[tuple[str, int, int], list[_Spec]] = {}
    for spec in specs:
        types.setdefault(spec.type, []).append(spec)
    counts = {of: _layers_by_page(members) for of, members in types.items()}
    patterns = {of: max(pages.values()) for of, pages in counts.items() if len({*pages.values()}) == 1}
    mixed = [layers for of, layers in patterns.items() if len(counts[of]) > 1]
    if not mixed:
        raise ConfigError(f"no compressor of the layout keeps entries and index keys, as {VLLM} expects")
    repeats = _approximate_gcd([*patterns.values()], max(mixed))
    return [
        _Bucket(tuple(members), _ceil_div(patterns[of], repeats) if of in patterns else 1)
        for of, members in types.items()
    ]


def _layers_by_page(specs: Iterable[_Spec]) -> Counter[int]:
    layers: Counter[int] = Counter()
    for spec in specs:
        layers[spec.page_bytes] += spec.layers
    return layers


def _approximate_gcd(values: list[int], least: int) -> int:
    """Return the number from `least` on to whose multiples `values` are rounded up with the least padding."""
    return min(
        range(least, max(values) + 1),
        key=lambda divisor: (sum(-value % divisor for value in values), -divisor),
    )


_SWA_RATIO = (4, 5)  # `swa_full_tokens_ratio`: slots of windows to those of full attention
_STATES_SHARE = (9, 19)  # of the arena, for a `mamba_full_memory_ratio` of 0.9
_EVICTION_INTERVAL = 128  # `SGLANG_SWA_EVICTION_INTERVAL`

_SWA_MODELS = ("gemma4", "gpt_oss", "llama4")
"""Beginnings of model types with a pool for windows: those of `is_hybrid_swa_model` that kvpool knows."""

_EXCLUSIVE_WINDOWS = ("gemma4", "gpt_oss")
"""Of models whose `get_attention_sliding_window_size` leaves out the query's own token."""

_NO_TRACKING = ("lfm2",)
"""Of models without an extra buffer, by `supports_mamba_cache_extra_buffer`."""

_NOT_SERVED = ("bamba", "jamba", "zamba2")
"""Of models with states that SGLang does not have."""


@dataclass(frozen=True)
class _SlotRules:
    """Slots of states, as `_calculate_mamba_ratio` and `get_mamba_tracking_slots` have them.

    Attributes:
        reserved: Slots of a request that limit how many requests run.
        held: Slots that a running request holds.
    """

    reserved: int
    held: int


_TRACKED = _SlotRules(reserved=5, held=3)  # `extra_buffer` with overlap: two slots for the next checkpoints
_UNTRACKED = _SlotRules(reserved=3, held=1)  # `no_buffer`
_TRACK_INTERVAL = 256


def sglang_usage(layout: CacheLayout, arena_bytes: int, page_size: int) -> Usage:
    """Return what SGLang 0.5.23 does with an arena.

    States, full attention and windows have a pool each, whose sizes
    `KVCacheConfigurator._handle_max_mamba_cache`, `DefaultPoolConfigurator` and `HybridSWAPoolConfigurator`
    fix at the start: 9/19 of the arena for states, and four slots of windows for five of full attention. Most
    models' windows have no pool: they keep all tokens.

    Args:
        layout: The model's layout; its own page size has no influence.
        arena_bytes: Bytes of the arena.
        page_size: Tokens of a page, as `--page-size`, unless the model sets another: 64 with index keys, 256
            for DeepSeek V4, and 1 for states without tracking.

    Raises:
        ConfigError: If SGLang does not serve the model, cannot lay out the groups, or the arena is too small.
    """
    if page_size < 1:
        raise ConfigError(f"{SGLANG} has pages of at least 1 token, not {page_size}")
    _refuse_states_alone(layout)
    _refuse_sinks(layout, SGLANG)
    if _has_chains(layout):
        return _sglang_chains(layout, arena_bytes)
    states = [group for group in layout.groups if group.kind == "state"]
    slots = _UNTRACKED if layout.model.startswith(_NO_TRACKING) else _TRACKED
    if _has_index(layout):
        page_size = _DSA_PAGE
    if states:
        page_size = _page_beside_states(layout, page_size, slots)
    state_bytes = sum(map(_entries_bytes, states))
    state_slots, left = _state_slots(arena_bytes, state_bytes) if states else (0, arena_bytes)
    full, windows = _sglang_tokens(layout)
    ratio, whole = (_SWA_RATIO if full else (1, 1)) if windows else (0, 1)
    size = whole * left // (whole * full + ratio * windows) // page_size * page_size
    swa_size = size * ratio // whole // page_size * page_size
    reach = _sglang_window(layout) if windows else 0
    if windows and swa_size <= reach + page_size:
        raise ConfigError(f"an arena of {arena_bytes:,} bytes has no room for a window of {reach:,} tokens")
    if size == 0:
        raise ConfigError(f"an arena of {arena_bytes:,} bytes has no room for a page of {page_size} tokens")

    def fitting(tokens: int) -> int:
        limits = [size // _round_up(tokens, page_size)] if full else []
        if windows:
            limits.append(swa_size // _swa_tokens(tokens, reach, page_size))
        if states:
            limits.append(state_slots // slots.reserved)
        return min(limits)

    used = (state_slots + 1) * state_bytes + size * full + swa_size * windows
    least_bytes = (
        slots.held * state_bytes
        + _round_up(LEAST_TOKENS, page_size) * full
        + _swa_tokens(LEAST_TOKENS, reach, page_size) * windows
    )
    pools = bool(states) + bool(full) + bool(windows)
    name = "SGLang, one pool" if pools == 1 else "SGLang, split"
    return _usage(name, 1 - used / arena_bytes, least_bytes, fitting)


def _page_beside_states(layout: CacheLayout, page_size: int, slots: _SlotRules) -> int:
    """Return the page size that the strategy of a model with states allows."""
    if layout.model.startswith(_NOT_SERVED):
        raise ConfigError(f"{SGLANG} does not serve {layout.model}")
    if slots is _UNTRACKED:
        return 1
    if _TRACK_INTERVAL % page_size:
        raise ConfigError(
            f"{SGLANG} has pages of a divisor of {_TRACK_INTERVAL} tokens beside states, not {page_size}"
        )
    return page_size


def _state_slots(arena_bytes: int, state_bytes: int) -> tuple[int, int]:
    """Return the slots for states, without the padding slot, and the bytes that are left for tokens."""
    share, whole = _STATES_SHARE
    slots = (arena_bytes * share // whole - state_bytes) // state_bytes
    if slots < 1:
        raise ConfigError(
            f"an arena of {arena_bytes:,} bytes has no room for two states of {state_bytes:,} bytes"
        )
    return slots, arena_bytes - (slots + 1) * state_bytes


def _sglang_tokens(layout: CacheLayout) -> tuple[int, int]:
    """Return the bytes of a token of full attention, and of one in windows that have a pool of their own."""
    has_pool = layout.model.startswith(_SWA_MODELS)
    full = windows = 0
    for group in layout.groups:
        if group.kind in {"window", "chunk"} and has_pool:
            windows += _entries_bytes(group)
        elif group.kind != "state":
            full += _entries_bytes(group)
    return full, windows


def _sglang_window(layout: CacheLayout) -> int:
    """Return the tokens that a window keeps; a chunk is a window to SGLang."""
    sizes = {group.tokens or 0 for group in layout.groups if group.kind in {"window", "chunk"}}
    if len(sizes) > 1:
        raise ConfigError(f"{SGLANG} has windows of one size, not of {sorted(sizes)} tokens")
    return sizes.pop() - layout.model.startswith(_EXCLUSIVE_WINDOWS)


def _swa_tokens(tokens: int, window: int, page_size: int) -> int:
    """Return the slots of windows that a request holds.

    `maybe_evict_swa` acts when an interval of tokens is behind the window, and `free_swa_out_of_window_slots`
    then keeps the window in whole pages.
    """
    kept = _round_up(max(window, page_size), page_size)
    first = max(window + _EVICTION_INTERVAL, kept + page_size)
    freed_at_once = (first - kept) // page_size * page_size
    freed = (tokens - first) // freed_at_once + 1 if tokens >= first else 0
    return _round_up(tokens, page_size) - freed * freed_at_once


_CHAIN_PAGE = 256
_CHAIN_RATIO = 10  # pages of chains for one of windows, by a `swa_full_tokens_ratio` of 0.1
_CHAIN_REQUESTS = 256  # `max_running_requests` of `apply_deepseek_v4_defaults`
_OVERLAPPING = 8  # tokens that a compressor keeps whose entries overlap


def _sglang_chains(layout: CacheLayout, arena_bytes: int) -> Usage:
    """Return what `DSV4PoolConfigurator` does with an arena.

    Chains and windows have a pool each, with ten pages of chains for one of windows. Compressors whose
    entries overlap keep theirs by page of the window, and the others by request, for 256 requests.
    """
    if not _is_packed(layout):
        raise ConfigError(f"{SGLANG} keeps entries of {layout.model} in {PACKED_ENTRY} bytes")
    page_bytes = page_payload = swa_bytes = swa_payload = ring_bytes = window = 0
    for group in layout.groups:
        entries = _CHAIN_PAGE // group.stride
        payload = entries * _entries_bytes(group)
        padding = len(group.layers) * (-entries * PACKED_ENTRY % _PACKED_ALIGNMENT)
        if group.kind == "full":
            page_bytes, page_payload = page_bytes + payload + padding, page_payload + payload
        elif group.kind == "window":
            swa_bytes, swa_payload = swa_bytes + payload + padding, swa_payload + payload
            window = group.tokens or 0
        elif group.planes[0].shape[0] == _OVERLAPPING:
            swa_bytes, swa_payload = swa_bytes + _entries_bytes(group), swa_payload + _entries_bytes(group)
        else:
            ring_bytes += _entries_bytes(group)
    # Behind those of requests are that of the padding row, and two more.
    rings_bytes = (_CHAIN_REQUESTS + 3) * ring_bytes
    pages = _CHAIN_RATIO * max(0, arena_bytes - rings_bytes) // (_CHAIN_RATIO * page_bytes + swa_bytes)
    swa_pages = pages // _CHAIN_RATIO
    if swa_pages * _CHAIN_PAGE <= window + _CHAIN_PAGE:
        raise ConfigError(
            f"an arena of {arena_bytes:,} bytes has no room for windows beside what compressors keep of "
            f"{_CHAIN_REQUESTS} requests, {rings_bytes:,} bytes"
        )
    used = pages * page_bytes + swa_pages * swa_bytes + rings_bytes

    def fitting(tokens: int) -> int:
        held = _swa_tokens(tokens, window, _CHAIN_PAGE) // _CHAIN_PAGE
        return min(pages // _ceil_div(tokens, _CHAIN_PAGE), swa_pages // held, _CHAIN_REQUESTS)

    lost = 1 - used / arena_bytes * min(page_payload / page_bytes, swa_payload / swa_bytes)
    return _usage("SGLang, split", lost, page_bytes + swa_bytes + ring_bytes, fitting)


def split_usage(layout: CacheLayout, arena_bytes: int, mean_tokens: int = 8_192) -> Usage:
    """Return what pools with a memory each do with an arena: a `KVPool` for each shape, and a `GDNPool`.

    `KVPool`s have one set of slots for all layers, so windows and chunks keep all tokens. The memory is
    divided at the start, for requests of `mean_tokens` tokens.

    Args:
        layout: The model's layout.
        arena_bytes: Bytes of the arena.
        mean_tokens: Tokens of a request for which the memory is divided.

    Raises:
        ConfigError: If a `KVPool` cannot hold the entries, or the arena has no room for a request.
    """
    if mean_tokens < 1:
        raise ConfigError(f"mean_tokens must be at least 1, not {mean_tokens}")
    _refuse_states_alone(layout)
    page_size = layout.page_size
    if any(group.stride > 1 for group in layout.groups):
        raise ConfigError(f"a KVPool has an entry for each token, and cannot hold those of {layout.model}")
    states = [group for group in layout.groups if group.kind == "state"]
    state_bytes = sum(map(_entries_bytes, states))
    page_bytes = page_size * sum(_entries_bytes(group) for group in layout.groups if group.kind != "state")
    # A page and a state are padding.
    usable = arena_bytes - page_bytes - state_bytes
    max_reqs = max(0, usable) // (state_bytes + _ceil_div(mean_tokens, page_size) * page_bytes)
    if max_reqs == 0:
        raise ConfigError(
            f"an arena of {arena_bytes:,} bytes has no room for a request of {mean_tokens:,} tokens"
        )
    pages = (usable - max_reqs * state_bytes) // page_bytes
    used = (pages + 1) * page_bytes + (max_reqs + 1) * state_bytes

    def fitting(tokens: int) -> int:
        fitting = pages // _ceil_div(tokens, page_size)
        return min(fitting, max_reqs) if states else fitting

    least_bytes = _ceil_div(LEAST_TOKENS, page_size) * page_bytes + state_bytes
    return _usage("kvpool, split", 1 - used / arena_bytes, least_bytes, fitting)


def _usage(name: str, lost: float, least_bytes: int, fitting: Callable[[int], int]) -> Usage:
    return Usage(name, lost, least_bytes, {tokens: fitting(tokens) for tokens in REQUEST_TOKENS})


def _refuse_states_alone(layout: CacheLayout) -> None:
    if all(group.kind == "state" for group in layout.groups):
        raise ConfigError("the layout has states alone, and no entries of tokens")


def _refuse_sinks(layout: CacheLayout, engine: str) -> None:
    for group in layout.groups:
        if group.sinks:
            raise ConfigError(f"{engine} has no windows that keep first tokens, as group {group.name} does")


def _has_chains(layout: CacheLayout) -> bool:
    """Return whether entries stand for several tokens.

    Raises:
        ConfigError: If it is not DeepSeek V4 that has them, whose rules are the only ones for such entries.
    """
    if all(group.stride == 1 for group in layout.groups):
        return False
    kinds, strides = {group.kind for group in layout.groups}, {group.stride for group in layout.groups}
    rings = {plane.shape[:1] for group in layout.groups if group.kind == "state" for plane in group.planes}
    is_known = kinds == {"full", "window", "state"} and strides <= {1, 4, 128}
    if layout.model != "deepseek_v4" or not is_known or rings - {(tokens,) for tokens in _RING_BLOCKS}:
        raise ConfigError(f"engines know entries of several tokens of deepseek_v4, not of {layout.model!r}")
    return True


def _has_index(layout: CacheLayout) -> bool:
    return any(plane.name == "index_k" for group in layout.groups for plane in group.planes)


def _is_latent(group: Group) -> bool:
    return group.planes[0].name == "latent"


def _is_packed(layout: CacheLayout) -> bool:
    """Return whether entries of DeepSeek V4 are those of 8 bits."""
    return layout.groups[0].planes[0].entry_bytes == PACKED_ENTRY


def _entries_bytes(group: Group) -> int:
    """Return the bytes of an entry in all layers."""
    return len(group.layers) * group.entry_bytes


def _ceil_div(number: int, divisor: int) -> int:
    return -(-number // divisor)


def _round_up(number: int, multiple: int) -> int:
    return _ceil_div(number, multiple) * multiple
