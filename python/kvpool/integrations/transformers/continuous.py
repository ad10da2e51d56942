"""The continuous batching of `transformers` with kvpool's allocator below it.

`PagedAttentionCache` gives its memory in sectors to kinds of layers, which cut them into blocks of pages;
where all layers are of one kind, a sector is a block. `SectorPool` takes the sectors from a
`TokenToKVPoolAllocator`, lowest first. The division of sectors, reference counts, hashes of prompts, the
scheduler and the memory itself stay those of `transformers`.
"""

from __future__ import annotations

from typing import Any

from transformers.generation.continuous_batching import cache, offloading_manager
from transformers.generation.continuous_batching.cache_allocators.cache_pool import CachePool, RegularTrees
from typing_extensions import override

from kvpool._kvpool import TokenToKVPoolAllocator
from kvpool.errors import OutOfMemoryError
from kvpool.integrations.seams import EngineMismatchError
from kvpool.integrations.transformers import seams

__all__ = ["SectorPool", "disable", "enable"]

# The modules that make pools of sectors: of the device, and of the host memory that requests are swapped to.
_MAKERS: tuple[Any, ...] = (cache, offloading_manager)


class SectorPool(CachePool):
    """A pool of sectors, with the free ones in an allocator of kvpool. Freeing a sector twice raises.

    Args:
        num_sectors: The number of sectors to allocate.
        num_allocators: Kinds of layers.
        num_reserved_sectors: The number of sectors before these, which are never allocated.

    Attributes:
        allocator: The allocator. Its slot `i` is sector `i - 1 + num_reserved_sectors`.
    """

    def __init__(self, num_sectors: int, num_allocators: int, num_reserved_sectors: int = 2) -> None:
        self.allocator: TokenToKVPoolAllocator = TokenToKVPoolAllocator(num_sectors, "cpu", strict=True)
        super().__init__(num_sectors, num_allocators, num_reserved_sectors)

    @override
    def reset(self) -> None:
        """Take all sectors back."""
        self.allocator.clear()
        self._free_blocks = [RegularTrees(blocks) for blocks in self.blocks_per_sector]

    @override
    def allocate_sector(self, index: int) -> None:
        """Allocate the lowest free sector to a kind of layers.

        Raises:
            OutOfMemoryError: If none is free. Nothing is changed.
        """
        slots = self.allocator.alloc(1)
        if slots is None:
            raise OutOfMemoryError(f"none of {self.num_sectors} sectors is free")
        self._free_blocks[index].add_tree(int(slots[0]) - 1 + self.num_reserved_sectors)

    @property
    @override
    def num_free_sectors(self) -> int:
        return self.allocator.available_size()

    @property
    def free_sectors(self) -> list[int]:  # an attribute there
        """A new list of the free sectors, ascending."""
        slots = [*self.allocator.free_slots.tolist(), *self.allocator.release_slots.tolist()]
        return sorted(slot - 1 + self.num_reserved_sectors for slot in slots)

    @override
    def try_to_free_sectors(self) -> None:
        """Free the sectors without blocks in use.

        Raises:
            IndexOwnershipError: If a sector is free already.
        """
        roots = [root for blocks in self._free_blocks for root in blocks.delete_full_trees()]
        self.allocator.free([root + 1 - self.num_reserved_sectors for root in roots])


def enable() -> None:
    """Use kvpool's allocator in every manager of continuous batching that is made from now on.

    A second call does nothing.

    Raises:
        EngineMismatchError: If the interface of `transformers` differs from the supported one. Nothing is
            replaced.
    """
    seams.TRANSFORMERS.require(seams.CONTINUOUS)
    missing = {"_free_blocks", "blocks_per_sector", "free_sectors", "num_reserved_sectors"} - vars(
        CachePool(1, 1)
    ).keys()
    if missing:
        raise EngineMismatchError(f"CachePool of transformers has no {', '.join(sorted(missing))}")
    for module in _MAKERS:
        module.CachePool = SectorPool


def disable() -> None:
    """Use the pool of `transformers` again in managers that are made from now on."""
    for module in _MAKERS:
        module.CachePool = CachePool
