"""LMCache's allocators of host memory on kvpool's bookkeeping, and on LMCache's own, in one process.

`make bench-lmcache` runs it. Both sides are LMCache's classes and make its objects: what differs is who knows
which bytes are free.
"""

from __future__ import annotations

import logging
import random
from typing import TYPE_CHECKING, Any

import torch
from harness import Case, Report, repeated

logging.disable(logging.WARNING)

from lmcache.v1.memory_allocators.paged_tensor_memory_allocator import (  # noqa: E402 - it logs when imported
    PagedTensorMemoryAllocator as OwnPaged,
)
from lmcache.v1.memory_allocators.tensor_memory_allocator import TensorMemoryAllocator  # noqa: E402
from lmcache.v1.memory_management import AddressManager as OwnAddressManager  # noqa: E402

from kvpool.integrations.lmcache.memory import AddressManager, PagedTensorMemoryAllocator  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator

SHAPE, DTYPE = torch.Size([2, 16, 256, 64]), torch.bfloat16
CHUNK_BYTES = SHAPE.numel() * DTYPE.itemsize
CHUNKS = 512
BATCH = 64
ALTERNATIVE = "LMCache 0.5.6"
LEAST = 0.95
"""A ratio of 1 less the noise, where both sides do little but make LMCache's objects."""


def tensors(manager: type[Any], buffer: torch.Tensor) -> Any:  # noqa: ANN401
    """LMCache's allocator of any size, with this bookkeeping."""
    allocator = TensorMemoryAllocator(buffer)
    allocator.address_manager = manager(buffer.numel())
    return allocator


def one_by_one(allocator: Any) -> Case:  # noqa: ANN401
    """A chunk is allocated, and freed by its last reference."""

    def run() -> None:
        allocator.allocate(SHAPE, DTYPE).ref_count_down()

    return Case(repeated(run))


def batched(allocator: Any) -> Case:  # noqa: ANN401
    """Chunks are allocated and freed in one call each."""

    def run() -> None:
        allocator.batched_free(allocator.batched_allocate(SHAPE, DTYPE, BATCH))

    return Case(repeated(run))


def fragmented(manager: Any, gaps: int) -> None:  # noqa: ANN401
    """Takes all pages, and frees every second one of the first."""
    pages = manager.batched_allocate(4096, 2 * gaps)
    for address, size in pages[::2]:
        manager.free(address, size)


def mixed(kind: type[Any], gaps: int) -> Case:
    """Ranges of different sizes, none of which fits a gap of one page, and some that do, come and go."""
    manager = kind((2 * gaps + 4096) * 4096)
    fragmented(manager, gaps)
    dice = random.Random(1)
    sizes = [4096 * dice.choice([1, 2, 3, 8, 32]) for _ in range(256)]

    def run() -> None:
        taken = [manager.allocate(size) for size in sizes]
        for address, size in taken[::2]:
            manager.free(address, size)
        for address, size in taken[1::2]:
            manager.free(address, size)

    return Case(repeated(run))


def full(kind: type[Any], gaps: int) -> Case:
    """A chunk that no gap holds, as when LMCache has to evict."""
    manager = kind(2 * gaps * 4096)
    fragmented(manager, gaps)

    def run() -> None:
        try:
            manager.allocate(8192)
        except RuntimeError:
            return
        raise AssertionError("a gap has one page")

    return Case(repeated(run))


def cases() -> Iterator[tuple[str, Case, Case]]:
    """The questions, with kvpool and without."""
    buffer = torch.empty(CHUNKS * CHUNK_BYTES, dtype=torch.uint8)
    managers = AddressManager, OwnAddressManager
    ours, theirs = (tensors(manager, buffer) for manager in managers)
    chunk = f"chunks of {CHUNK_BYTES >> 20} MiB"
    yield f"any size: {chunk}, allocate and free", one_by_one(ours), one_by_one(theirs)
    yield f"any size: {chunk}, {BATCH} at once", batched(ours), batched(theirs)
    held = [[side.allocate(SHAPE, DTYPE) for _ in range(CHUNKS)] for side in (ours, theirs)]
    for side in held:
        for each in side[::2]:
            each.ref_count_down()
    yield (
        f"any size: {chunk}, allocate and free, {CHUNKS // 2} gaps of one",
        one_by_one(ours),
        one_by_one(theirs),
    )
    yield f"any size: {chunk}, {BATCH} at once, {CHUNKS // 2} gaps of one", batched(ours), batched(theirs)
    ours, theirs = (kind(buffer, [SHAPE], [DTYPE]) for kind in (PagedTensorMemoryAllocator, OwnPaged))
    yield f"pages: {chunk}, allocate and free", one_by_one(ours), one_by_one(theirs)
    yield f"pages: {chunk}, {BATCH} at once", batched(ours), batched(theirs)
    for gaps in (100, 1000, 10_000):
        mine, own = (mixed(manager, gaps) for manager in managers)
        yield f"addresses alone: 256 of 1 to 32 pages come and go, {gaps:,} gaps of one", mine, own
        mine, own = (full(manager, gaps) for manager in managers)
        yield f"addresses alone: no gap holds it, {gaps:,} gaps", mine, own


def main() -> None:
    """Compares both."""
    report = Report("lmcache")
    for question, ours, theirs in cases():
        report.compare(question, ours, theirs, alternative=ALTERNATIVE, least_ratio=LEAST)
    report.finish()


if __name__ == "__main__":
    main()
