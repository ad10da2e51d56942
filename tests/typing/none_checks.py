"""A forgotten check for `None` is an error: mypy checks this with PyTorch's types and without them."""

from __future__ import annotations

import kvpool


def use(
    allocator: kvpool.TokenToKVPoolAllocator, planner: kvpool.BatchPlanner, table: kvpool.ReqToTokenPool
) -> None:
    slots = allocator.alloc(4)
    slots.tolist()  # type: ignore[union-attr]
    len(slots)  # type: ignore[arg-type]
    allocator.free(slots)  # type: ignore[arg-type]
    if slots is not None:
        allocator.free(slots.tolist())
        allocator.free(slots)
    for more in (
        allocator.alloc(4, contiguous=True),
        allocator.alloc_extend([0], [4], [-1]),
        allocator.alloc_decode([5], [4]),
    ):
        more.tolist()  # type: ignore[union-attr]

    rows = table.alloc(2)
    rows[0]  # type: ignore[index]
    plan = planner.extend([1, 2], [0, 0], [3, 4])
    plan.out_cache_loc.tolist()  # type: ignore[union-attr]
    plan = planner.decode([1, 2], [4, 5])
    assert plan is not None
    plan.kv_indices.tolist()  # type: ignore[union-attr]
    plan.block_table.tolist()  # type: ignore[union-attr]
    dst, src = planner.fork(1, 3, 4)  # type: ignore[misc]
    table.write((3, slice(0, 4)), dst)
    table.write(([3], [4]), src)


def use_more(pages: kvpool.PagePool, chunks: kvpool.ChunkPool, states: kvpool.GDNPool) -> None:
    pages.page(pages.alloc())  # type: ignore[arg-type]
    chunks.allocate().tensor()  # type: ignore[union-attr]
    chunks.allocate_batch(2)[0]  # type: ignore[index]
    states.copy_states(1, states.alloc_track_slot())  # type: ignore[arg-type]
