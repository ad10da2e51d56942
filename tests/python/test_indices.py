"""Every call that takes indices takes them in every form, and nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import devices
import numpy as np
import pytest
import torch
from planner_pair import TENSORS

from kvpool import BatchPlan, BatchPlanner, GDNPool, KVPool, ReqToTokenPool, TokenToKVPoolAllocator

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

pytestmark = pytest.mark.usefixtures("device")


class UsedPools:
    """Pools in the middle of their work: 32 slots, four rows, and requests in rows 3 and 4."""

    def __init__(self) -> None:
        where = devices.current()
        self.slots = TokenToKVPoolAllocator(64, where, 4)
        self.slots.alloc(32)
        self.table = ReqToTokenPool(4, 8, where)
        self.table.alloc(4)
        self.kv = KVPool(16, 1, 1, 2, where, torch.float32)
        self.rows = devices.to_current(torch.arange(8.0).view(4, 1, 2) + 50)
        self.gdn = GDNPool(4, 1, 1, 2, 2, 2, 4, where, torch.float32, 3)
        buffers = (*self.kv.k_buffer, *self.kv.v_buffer, self.gdn.recurrent_state, self.gdn.conv_state)
        for buffer in buffers:
            buffer.copy_(torch.arange(float(buffer.numel())).view(buffer.shape))
        self.buffers = buffers
        self.planned = ReqToTokenPool(4, 32, where)
        self.planner = BatchPlanner(self.planned, TokenToKVPoolAllocator(64, where, 4), 4, 32)
        self.planned.alloc(4)
        self.planner.extend([3, 4], [0, 0], [5, 1])

    def store(self, slots: Any) -> None:  # noqa: ANN401
        rows = self.rows[:3]
        self.kv.set_kv_buffer(0, slots, rows, rows)

    def picture(self) -> list[Any]:
        """Whatever a call may change."""
        allocators = (self.slots, self.planner.allocator)
        for allocator in allocators:
            allocator.verify()
        pools = (*allocators, self.table, self.gdn, self.planned, self.planner)
        lists = [
            tensor for allocator in allocators for tensor in (allocator.free_slots, allocator.release_slots)
        ]
        tensors = (*self.buffers, self.table.req_to_token, self.planned.req_to_token, *lists)
        return [*(pool.stats() for pool in pools), *(tensor.tolist() for tensor in tensors)]


# Each call, and indices for each of its arguments that take some.
CALLS: dict[str, tuple[Callable[..., object], list[list[int]]]] = {
    "TokenToKVPoolAllocator.free": (lambda w, *a: w.slots.free(*a), [[8, 21, 9]]),
    "TokenToKVPoolAllocator.share": (lambda w, *a: w.slots.share(*a), [[4, 5, 6, 7]]),
    "TokenToKVPoolAllocator.runs": (lambda w, *a: w.slots.runs(*a), [[4, 5, 9, 10, 11, 2, 7, 8]]),
    "TokenToKVPoolAllocator.is_allocated": (lambda w, *a: w.slots.is_allocated(*a), [[4, 36, 0, -1, 10**6]]),
    "TokenToKVPoolAllocator.alloc_extend": (
        lambda w, *a: w.slots.alloc_extend(*a),
        [[0, 2], [3, 6], [-1, 5]],
    ),
    "TokenToKVPoolAllocator.alloc_decode": (lambda w, *a: w.slots.alloc_decode(*a), [[1, 3], [-1, 5]]),
    "ReqToTokenPool.free": (lambda w, *a: w.table.free(*a), [[3, 1, 4]]),
    "ReqToTokenPool.write, a slice": (lambda w, *a: w.table.write((2, slice(3, 6)), *a), [[11, 12, 13]]),
    "ReqToTokenPool.write, cells": (
        lambda w, rows, columns, values: w.table.write((rows, columns), values),
        [[4, 1, 1], [7, 0, 5], [21, 22, 23]],
    ),
    "ReqToTokenPool.mark_modified": (lambda w, *a: w.table.mark_modified(*a), [[3, 1]]),
    "KVPool.set_kv_buffer": (lambda w, *a: w.store(*a), [[5, 1, 16]]),
    "KVPool.gather_kv": (lambda w, *a: w.kv.gather_kv(0, *a), [[5, 0, 16, 5]]),
    "KVPool.move_kv": (lambda w, *a: w.kv.move_kv(*a), [[7, 2, 9], [4, 5, 4]]),
    "GDNPool.reset_states": (lambda w, *a: w.gdn.reset_states(*a), [[2, 7, 2]]),
    "GDNPool.copy_states": (lambda w, *a: w.gdn.copy_states(*a), [[1, 2], [3, 6]]),
    "BatchPlanner.extend": (lambda w, *a: w.planner.extend(*a), [[1, 3], [0, 5], [5, 7]]),
    "BatchPlanner.extend, a prefix": (lambda w, a: w.planner.extend([1], [4], [5], [a]), [[4, 5, 6, 7]]),
    "BatchPlanner.decode": (lambda w, *a: w.planner.decode(*a, pad_to=3), [[4, 3], [2, 6]]),
    "BatchPlanner.truncate": (lambda w, *a: w.planner.truncate(*a), [[3, 4], [4, 1]]),
    "BatchPlanner.finish": (lambda w, *a: w.planner.finish(*a), [[3, 4], [5, 1]]),
}
# Of everything but single ints.
NOT_INDICES = (
    "indices must be int16, uint16, int32, uint32, int64 or uint64 in a tensor, an array or a series, "
    "or a sequence of ints, not "
)
each_call = pytest.mark.parametrize("name", sorted(CALLS))


def shown(answer: Any) -> Any:  # noqa: ANN401
    if isinstance(answer, BatchPlan):
        return {field: getattr(answer, field).tolist() for field in TENSORS}
    if isinstance(answer, tuple):
        return [shown(part) for part in answer]
    return answer.tolist() if isinstance(answer, torch.Tensor) else answer


@each_call
def test_every_form_is_taken_as_a_list_is(as_index: Callable[[Sequence[int]], Any], name: str) -> None:
    call, arguments = CALLS[name]
    world, other = UsedPools(), UsedPools()
    answer = call(world, *map(as_index, arguments))
    assert shown(answer) == shown(call(other, *arguments))
    assert world.picture() == other.picture()


# Calls with one index in place of each list.
SINGLES: dict[str, list[int]] = {
    "TokenToKVPoolAllocator.free": [8],
    "TokenToKVPoolAllocator.share": [4],
    "TokenToKVPoolAllocator.runs": [4],
    "TokenToKVPoolAllocator.is_allocated": [36],
    "TokenToKVPoolAllocator.alloc_extend": [2, 6, 5],
    "TokenToKVPoolAllocator.alloc_decode": [3, 5],
    "ReqToTokenPool.free": [3],
    "ReqToTokenPool.mark_modified": [3],
    "KVPool.gather_kv": [5],
    "KVPool.move_kv": [7, 4],
    "GDNPool.reset_states": [2],
    "GDNPool.copy_states": [1, 3],
    "BatchPlanner.extend": [1, 0, 5],
    "BatchPlanner.truncate": [3, 4],
    "BatchPlanner.finish": [3, 5],
}


@pytest.mark.parametrize("make", [int, np.int64], ids=["int", "a NumPy int"])
@pytest.mark.parametrize("name", sorted(SINGLES))
def test_one_index_is_taken_as_a_list_of_it_is(make: Callable[[int], Any], name: str) -> None:
    call, _ = CALLS[name]
    world, other = UsedPools(), UsedPools()
    answer = call(world, *map(make, SINGLES[name]))
    assert shown(answer) == shown(call(other, *([one] for one in SINGLES[name])))
    assert world.picture() == other.picture()
    pages = (world.slots, other.slots)
    pages[0].free_pages(2)
    pages[1].free_pages([2])
    assert world.picture() == other.picture()


@each_call
def test_rejects_what_is_not_an_index_and_changes_nothing(bad_index: Any, name: str) -> None:  # noqa: ANN401
    call, arguments = CALLS[name]
    world = UsedPools()
    before = world.picture()
    for place in range(len(arguments)):
        # Lengths that are checked are optional, and so is a prefix.
        if bad_index is None and (name, place) in {
            ("BatchPlanner.finish", 1),
            ("BatchPlanner.extend, a prefix", 0),
        }:
            continue
        with pytest.raises(TypeError, match=NOT_INDICES):
            call(world, *arguments[:place], bad_index, *arguments[place + 1 :])
        assert world.picture() == before
