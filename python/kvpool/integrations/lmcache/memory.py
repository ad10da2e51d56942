"""LMCache's bookkeeping of host memory over kvpool: ranges, pages, and the memory itself.

| in the place of | of | over |
|---|---|---|
| `AddressManager` | `lmcache.v1.memory_management` | `AddressSpace`, in Rust |
| `PagedTensorMemoryAllocator` | `lmcache.v1.memory_allocators.paged_tensor_memory_allocator` | the same |
| `_allocate_cpu_memory`, `_free_cpu_memory` | `lmcache.v1.memory_management` | `ChunkPool`, one chunk |

`MixedMemoryAllocator` and all other allocators of LMCache make these.
"""

from __future__ import annotations

import logging
import os
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from lmcache.utils import get_size_bytes
from lmcache.v1 import memory_management
from lmcache.v1.memory_allocators import paged_tensor_memory_allocator
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj

from kvpool import ChunkPool
from kvpool._kvpool import AddressSpace
from kvpool.errors import ConfigError, IndexOwnershipError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvpool import Chunk

__all__ = [
    "AddressManager",
    "PagedTensorMemoryAllocator",
    "allocate_cpu_memory",
    "free_cpu_memory",
    "replace",
]

_logger = logging.getLogger("kvpool")
_Size, _DType = torch.Size, torch.dtype


def _is_strict() -> bool:
    """Return whether an invalid free raises."""
    return os.environ.get("KVPOOL_LMCACHE_STRICT") == "1"


def _is_consistent(space: AddressSpace) -> bool:
    try:
        space.verify()
    except AssertionError:
        _logger.exception("LMCache's memory is not consistent")
        return False
    return True


class AddressManager:
    """LMCache's ranges of an address space, over `AddressSpace`.

    The lowest gap that is long enough is used first.

    Args:
        size: Bytes.
        align_bytes: Lengths are rounded up to a multiple of this power of two.

    Raises:
        ConfigError: If `size` is negative, or `align_bytes` is no power of two.
    """

    ALIGN_BYTES: ClassVar[int] = 4096

    def __init__(self, size: int, align_bytes: int = ALIGN_BYTES) -> None:
        self._space = AddressSpace(size, alignment=align_bytes, strict=_is_strict())

    @property
    def total_allocated_size(self) -> int:
        """Bytes that are allocated."""
        return self._space.in_use

    def compute_aligned_size(self, raw_size: int) -> int:
        """Return the bytes that are allocated for `raw_size`."""
        return self._space.rounded(raw_size)

    def allocate(self, size: int) -> tuple[int, int]:
        """Allocate a range.

        Returns:
            The start of the range, and its bytes.

        Raises:
            ConfigError: If `size` is below 1.
            RuntimeError: If no gap is long enough, as in LMCache.
        """
        _check_positive(size)
        start = self._space.take(size)
        if start is None:
            raise RuntimeError(self._no_memory(size, 1))
        return start, self._space.rounded(size)

    def batched_allocate(self, size: int, batch_size: int) -> list[tuple[int, int]]:
        """Allocate ranges of one size, or none of them.

        Returns:
            The start and the bytes of each range, in order.

        Raises:
            ConfigError: If `size` is below 1.
            RuntimeError: If the gaps have no room for all, or `batch_size` is negative, as in LMCache.
        """
        _check_positive(size)
        if batch_size < 0:
            raise RuntimeError(f"batch_size must be non-negative, it is {batch_size}")
        starts = self._space.take_many(size, batch_size)
        if starts is None:
            raise RuntimeError(self._no_memory(size, batch_size))
        rounded = self._space.rounded(size)
        return [(start, rounded) for start in starts]

    def _no_memory(self, size: int, count: int) -> str:
        free = self._space.stats()
        return (
            f"no memory is available for {count} ranges of {size} bytes: "
            f"{free['available']} of {free['capacity']} bytes are free, {free['longest']} in one piece"
        )

    def free(self, address: int, size: int) -> None:
        """Free a range, or several that touch.

        If a byte of a range is not allocated, the whole free is dropped, counted and reported.
        """
        self._space.give_back(address, size)

    def sbrk(self, size: int) -> None:
        """Add bytes, rounded up, to the end of the address space."""
        self._space.grow(size)

    def get_heap_size(self) -> int:
        """Return the number of all bytes, allocated or free."""
        return self._space.capacity

    def get_free_size(self) -> int:
        """Return the free bytes."""
        return self._space.available

    def check_consistency(self) -> bool:
        """Return whether the bookkeeping is consistent."""
        return _is_consistent(self._space)


def _check_positive(size: int) -> None:
    if size <= 0:
        raise ConfigError(f"size must be greater than 0, it is {size}")


def _foreign(memory_obj: Any) -> IndexOwnershipError:
    return IndexOwnershipError(f"the object at address {memory_obj.meta.address} is of another allocator")


class _FreePages:
    """The free pages of an allocator. LMCache reads only their number."""

    def __init__(self, space: AddressSpace) -> None:
        self._space = space

    def __len__(self) -> int:
        return self._space.available


class PagedTensorMemoryAllocator(paged_tensor_memory_allocator.PagedTensorMemoryAllocator):  # type: ignore[misc]
    """LMCache's allocator of pages, with the free pages in kvpool. The lowest free page is used first.

    A page has one object, as in LMCache. While the page is free, the object is invalid. A page whose object
    was dropped without `ref_count_down` becomes free again, with a line in the log.

    The arguments are those of LMCache's class.
    """

    free_blocks: Any

    def __init__(
        self, tensor: Any, shapes: list[Any], dtypes: list[Any], fmt: MemoryFormat = MemoryFormat.KV_2LTD
    ) -> None:
        super().__init__(tensor, shapes, dtypes, fmt)
        # Only the owner of an allocated page has its object.
        self._free: list[Any] = [*self.free_blocks]
        self._known = [self._know(page) for page in self._free]
        self._is_strict = _is_strict()
        self._space = AddressSpace(len(self._free), strict=self._is_strict)
        self.free_blocks = _FreePages(self._space)
        for page in self._free:
            page.invalidate()

    def _know(self, page: Any) -> weakref.ref[Any]:
        """Return a weak reference to a page's object, which shows when the object is gone."""
        return weakref.ref(page, partial(_renew, weakref.WeakMethod(self._replace_lost), page.meta.address))

    def _number_of(self, memory_obj: Any) -> int:
        number: int = memory_obj.meta.address
        if not 0 <= number < len(self._known):
            raise _foreign(memory_obj)
        known = self._known[number]()
        # None while the object and its allocator go in one pass of the garbage collector.
        if known is not memory_obj and known is not None:
            raise _foreign(memory_obj)
        return number

    def _numbers_of(self, memory_objs: list[Any]) -> list[int]:
        numbers = [page.meta.address for page in memory_objs]
        try:
            known = map(self._known.__getitem__, numbers)
            if [ref() for ref in known] == memory_objs:
                return numbers
        except IndexError:
            pass
        return [*map(self._number_of, memory_objs)]

    def _replace_lost(self, number: int) -> None:
        """Make a new object for a page whose owner dropped the old one, and free the page."""
        meta = MemoryObjMetadata(
            self.shapes[0], self.dtypes[0], number, self.align_bytes, 1, 0, self.fmt,
            shapes=self.shapes, dtypes=self.dtypes,
        )  # fmt: skip
        page = TensorMemoryObj(self.paged_buffers[number], meta, self)
        page.invalidate()
        self._known[number], self._free[number] = self._know(page), page
        self._space.give_back(number, 1)
        self._report_use()
        _logger.warning("page %d of LMCache was dropped without ref_count_down, and is free again", number)

    def allocate(
        self,
        shapes: Any,
        dtypes: Any,
        fmt: MemoryFormat = MemoryFormat.KV_2LTD,
        allocator_type: str | None = None,
    ) -> Any:
        """Take a page; `None` if none is free."""
        # Here and below, what LMCache's allocators make of an object. It has no method: a call costs as much.
        if isinstance(shapes, _Size):
            shapes = [shapes]
        if isinstance(dtypes, _DType):
            dtypes = [dtypes]
        used = None
        if shapes == self.shapes and len(dtypes) == len(shapes):
            shapes = self.shapes
        else:
            used = get_size_bytes(shapes, dtypes)
        number = self._space.take(1)
        if number is None:
            return None
        page, self._free[number] = self._free[number], None
        meta = page.meta
        meta.shape = shapes[0]
        meta.dtype = dtypes[0]
        meta.shapes = shapes
        meta.dtypes = dtypes
        meta.fmt = fmt
        meta.ref_count = 1
        page._used_size_override = None  # noqa: SLF001 - they set it, too
        if page._l1_manager_id is not None:  # noqa: SLF001 - faster than to reset it always
            page.reset_l1_manager()
        if used is not None:
            page.raw_data = page.raw_data[:used]
        page.valid = True
        self._report_use()
        return page

    def batched_allocate(
        self,
        shapes: Any,
        dtypes: Any,
        batch_size: int,
        fmt: MemoryFormat = MemoryFormat.KV_2LTD,
        allocator_type: str | None = None,
    ) -> list[Any] | None:
        """Take pages, or none and return `None` if there are not enough free ones.

        Raises:
            ConfigError: If `batch_size` is negative.
        """
        shapes, dtypes = self._adapt_shapes_and_dtypes(shapes, dtypes)
        used = None
        if shapes == self.shapes:
            shapes = self.shapes
        else:
            used = get_size_bytes(shapes, dtypes)
        numbers = self._space.take_many(1, batch_size)
        if numbers is None:
            return None
        free = self._free
        pages = [*map(free.__getitem__, numbers)]
        shape, dtype = shapes[0], dtypes[0]
        for number, page in zip(numbers, pages):  # noqa: B905 - as many
            free[number] = None
            meta = page.meta
            meta.shape = shape
            meta.dtype = dtype
            meta.shapes = shapes
            meta.dtypes = dtypes
            meta.fmt = fmt
            meta.ref_count = 1
            page._used_size_override = None  # noqa: SLF001
            if page._l1_manager_id is not None:  # noqa: SLF001
                page.reset_l1_manager()
            if used is not None:
                page.raw_data = page.raw_data[:used]
            page.valid = True
        self._report_use()
        return pages

    def free(self, memory_obj: Any, allocator_type: str | None = None) -> None:
        """Free a page, as `batched_free`."""
        number = self._number_of(memory_obj)
        memory_obj.valid = False
        if memory_obj.meta.shapes is not self.shapes:
            memory_obj.raw_data = self.paged_buffers[number]
        self._free[number] = memory_obj
        self._space.give_back(number, 1)
        self._report_use()

    def batched_free(
        self, memory_objs: list[Any], allocator_type: str | None = None, update_stats: bool = True
    ) -> None:
        """Free pages. A page that is free already is dropped, counted and reported.

        Raises:
            IndexOwnershipError: If an object belongs to another allocator or, for a strict allocator, if a
                page is free or listed twice. Nothing is changed then.
        """
        numbers = self._numbers_of(memory_objs)
        before = [(page, page.valid, page.raw_data) for page in memory_objs] if self._is_strict else []
        whole, free = self.shapes, self._free
        for number, page in zip(numbers, memory_objs):  # noqa: B905 - as many
            # First, since the next owner may have it as soon as it is free.
            page.valid = False
            if page.meta.shapes is not whole:
                page.raw_data = self.paged_buffers[number]
            free[number] = page
        try:
            self._space.give_back_many(numbers, 1)
        except IndexOwnershipError:
            for number, (page, was_valid, data) in zip(numbers, before, strict=True):
                page.valid, page.raw_data = was_valid, data
                if was_valid:
                    free[number] = None
            raise
        self._report_use()

    def _report_use(self) -> None:
        """Report the memory in use to LMCache."""
        count = self._space.in_use
        used = count * self.align_bytes
        self.num_active_allocations: int = count
        self.total_allocated_size: int = used
        self.stats_monitor.update_local_cache_usage(used)
        self.stats_monitor.update_active_memory_objs_count(count)

    def memcheck(self) -> bool:
        """Return whether the bookkeeping is consistent."""
        return _is_consistent(self._space) and bool(super().memcheck())


def _renew(replace_lost: weakref.WeakMethod[Callable[[int], None]], number: int, _: object) -> None:
    """Replace the lost object of a page."""
    replace = replace_lost()
    if replace is not None:  # the allocator still exists
        replace(number)


_own_allocate, _own_free = memory_management._allocate_cpu_memory, memory_management._free_cpu_memory  # noqa: SLF001

_chunks: dict[int, Chunk] = {}
"""The memory that LMCache has not freed, by address."""


def allocate_cpu_memory(
    size: int,
    numa_mapping: Any = None,
    shm_name: str | None = None,
    use_hugepages: bool = False,
) -> torch.Tensor:
    """Allocate host memory: one chunk of a `ChunkPool`, page-locked if there is a driver.

    LMCache itself allocates shared memory.

    Returns:
        uint8 `[size]`. The tensor keeps the memory alive, even after the memory is freed.

    Raises:
        OutOfMemoryError: If there is not enough memory.
        ConfigError: If the NUMA node does not exist.
    """
    if shm_name or size == 0:
        own: torch.Tensor = _own_allocate(size, numa_mapping, shm_name, use_hugepages)
        return own
    device = memory_management.torch_dev
    ordinal = device.current_device() if device.is_available() else 0
    node = None if numa_mapping is None else numa_mapping.gpu_to_numa_mapping[ordinal]
    pool = ChunkPool(1, (size,), torch.uint8, "cpu", numa_node=node, huge_pages=use_hugepages)
    chunk = pool.allocate()
    assert chunk is not None  # noqa: S101 - it has one
    memory: torch.Tensor = chunk.tensor()
    _chunks[memory.data_ptr()] = chunk
    return memory


def free_cpu_memory(
    buffer: torch.Tensor,
    size: int | None = None,
    numa_mapping: Any = None,
    shm_name: str | None = None,
    use_hugepages: bool = False,
) -> None:
    """Free host memory as soon as no tensor uses it and the device has completed its work."""
    chunk = _chunks.get(buffer.data_ptr())
    if chunk is None:
        _own_free(buffer, size, numa_mapping, shm_name, use_hugepages)
        return
    device = memory_management.torch_dev
    if device.is_available():
        device.synchronize()
    del _chunks[buffer.data_ptr()]
    chunk.release()


def replace() -> None:
    """Replace LMCache's names, before another module imports them."""
    memory_management.AddressManager = AddressManager
    memory_management._allocate_cpu_memory = allocate_cpu_memory  # noqa: SLF001
    memory_management._free_cpu_memory = free_cpu_memory  # noqa: SLF001
    paged_tensor_memory_allocator.PagedTensorMemoryAllocator = PagedTensorMemoryAllocator
    _logger.info("LMCache's host memory is kvpool's")
