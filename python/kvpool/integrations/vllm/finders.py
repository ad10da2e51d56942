"""The longest cached prefix of a prompt, by one call for each kind of attention.

Each function answers as `find_longest_cache_hit` of vLLM's manager of that kind does. Where vLLM asks its
pool for block after block, they ask once.
"""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING, Any, NamedTuple

from kvpool.integrations.vllm.block_pool import KvpoolBlockPool
from kvpool.integrations.vllm.seams import PREFIXES, VLLM

VLLM.require(PREFIXES)

from vllm.v1.core.kv_cache_coordinator import (  # noqa: E402
    HybridKVCacheCoordinator,
    UnitaryKVCacheCoordinator,
)
from vllm.v1.core.single_type_kv_cache_manager import (  # noqa: E402
    ChunkedLocalAttentionManager,
    FullAttentionManager,
    MambaManager,
    SlidingWindowManager,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    from kvpool.typing import BlockLike

    Hit: TypeAlias = tuple[tuple[list[BlockLike], ...], int]

__all__ = ["find_in_one_call"]


class _Search(NamedTuple):
    """The arguments of a call, with the hashes of whole blocks."""

    fine: list[bytes]
    hashes: list[bytes]
    length: int
    block_size: int
    alignment: int
    groups: list[int]
    pool: KvpoolBlockPool
    spec: Any
    drops: bool

    @property
    def is_fine(self) -> bool:
        """Whether a prefix may end within a block, at a hash of a part of it."""
        return self.alignment < self.block_size and self.block_size % self.alignment == 0

    @property
    def period(self) -> int:
        """How many blocks lie between two lengths that a prefix may have."""
        return self.alignment // gcd(self.alignment, self.block_size)


class _Finder:
    """What vLLM's coordinator needs of a class of managers, with a function that finds in one call."""

    def __init__(self, manager: type[Any], find: Callable[[_Search], Hit]) -> None:
        self._manager = manager
        self._find = find
        self.supports_fine_grained_hash_lookup: bool = manager.supports_fine_grained_hash_lookup

    def find_longest_cache_hit(  # noqa: PLR0913, PLR0917 - vLLM's signature
        self,
        block_hashes: Any,  # noqa: ANN401 - vLLM has no types here
        max_length: int,
        kv_cache_group_ids: list[int],
        block_pool: Any,  # noqa: ANN401
        kv_cache_spec: Any,  # noqa: ANN401
        drop_eagle_block: bool,
        alignment_tokens: int,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
    ) -> Hit:
        """Return the blocks of each group, and how many tokens they cover."""
        is_known = type(block_hashes) is list and isinstance(block_pool, KvpoolBlockPool)
        if not is_known or dcp_world_size != 1 or pcp_world_size != 1:
            own: Hit = self._manager.find_longest_cache_hit(
                block_hashes, max_length, kv_cache_group_ids, block_pool, kv_cache_spec, drop_eagle_block,
                alignment_tokens, dcp_world_size, pcp_world_size,
            )  # fmt: skip
            return own
        block_size = kv_cache_spec.block_size
        scale = block_size // block_pool.hash_block_size
        hashes = block_hashes if scale == 1 else block_hashes[scale - 1 :: scale]
        return self._find(
            _Search(
                fine=block_hashes,
                hashes=hashes[: max_length // block_size],
                length=max_length,
                block_size=block_size,
                alignment=alignment_tokens,
                groups=kv_cache_group_ids,
                pool=block_pool,
                spec=kv_cache_spec,
                drops=drop_eagle_block,
            )
        )


def _full(search: _Search) -> Hit:
    cached = search.pool.cached_block_hash_to_block
    blocks = cached.find_prefix(search.hashes, search.groups)
    whole = len(blocks[0])
    length = whole * search.block_size
    if search.is_fine:
        first = whole * (search.block_size // search.alignment)
        last = min(first + search.block_size // search.alignment - 1, search.length // search.alignment)
        at, tails = cached.find_last_run(search.fine[first:last], search.groups, 1)
        if tails[0]:
            blocks = [of_group + tail for of_group, tail in zip(blocks, tails, strict=True)]
            length = (first + at + 1) * search.alignment
    if search.drops and length > 0:
        length -= min(search.alignment, search.block_size)
    length -= length % search.alignment
    for of_group in blocks:
        del of_group[-(-length // search.block_size) :]
    return tuple(blocks), length


def _sliding(search: _Search) -> Hit:
    need = SlidingWindowManager._contiguous_blocks_for_hit(  # noqa: SLF001
        search.spec.sliding_window, search.block_size, search.drops
    )
    period = search.period
    start, runs = search.pool.cached_block_hash_to_block.find_last_run(
        search.hashes, search.groups, need, period=period, first=int(search.drops) if period > 1 else 0
    )
    blocks = tuple([search.pool.null_block] * start + run for run in runs)
    if len(runs[0]) < need:
        _align(blocks, period)
    if search.drops and blocks[0]:
        for of_group in blocks:
            of_group.pop()
        _align(blocks, period)
    return blocks, len(blocks[0]) * search.block_size


def _align(blocks: tuple[list[BlockLike], ...], period: int) -> None:
    for of_group in blocks:
        del of_group[len(of_group) // period * period :]


def _chunked(search: _Search) -> Hit:
    chunk = search.spec.attention_chunk_size
    start = max(search.length, 0) // chunk * chunk // search.block_size
    runs = search.pool.cached_block_hash_to_block.find_prefix(search.hashes[start:], search.groups)
    blocks = tuple([search.pool.null_block] * start + run for run in runs)
    return blocks, len(blocks[0]) * search.block_size


def _state(search: _Search) -> Hit:
    cached = search.pool.cached_block_hash_to_block
    if search.is_fine:
        fine = search.fine[: search.length // search.alignment]
        at, found = cached.find_last_run(fine, search.groups, 1)
        before, length = at * search.alignment // search.block_size, (at + 1) * search.alignment
    else:
        before, found = cached.find_last_run(search.hashes, search.groups, 1, period=search.period)
        length = (before + 1) * search.block_size
    if not found[0]:
        return tuple(found), 0
    return tuple([search.pool.null_block] * before + state for state in found), length


_FINDERS: dict[type[Any], Any] = {
    FullAttentionManager: _Finder(FullAttentionManager, _full),
    SlidingWindowManager: _Finder(SlidingWindowManager, _sliding),
    ChunkedLocalAttentionManager: _Finder(ChunkedLocalAttentionManager, _chunked),
    MambaManager: _Finder(MambaManager, _state),
}


def find_in_one_call(coordinator: Any) -> None:  # noqa: ANN401
    """Let a coordinator of vLLM ask the finders. Other managers, and other coordinators, stay as they are."""
    if type(coordinator) is UnitaryKVCacheCoordinator:
        manager = coordinator.single_type_managers[0]
        if finder := _FINDERS.get(type(manager)):
            manager.find_longest_cache_hit = finder.find_longest_cache_hit
    elif type(coordinator) is HybridKVCacheCoordinator:
        coordinator.attention_groups = [
            group._replace(manager_cls=_FINDERS.get(group.manager_cls, group.manager_cls))
            for group in coordinator.attention_groups
        ]
