"""TokenToKVPoolAllocator: frees of tensors whose slots were freed before, and perhaps handed out again."""

from __future__ import annotations

import gc
import logging
import random
from typing import TYPE_CHECKING

import devices
import pytest
import torch
from common import Fence, some

from kvpool import (
    BatchPlanner,
    IndexOwnershipError,
    KVPool,
    PrefixCache,
    ReqToTokenPool,
    StaleBufferError,
    TokenToKVPoolAllocator,
)

if TYPE_CHECKING:
    from collections.abc import Callable

PAGE_SIZES = [1, 4]

pytestmark = pytest.mark.usefixtures("device")


def make(
    size: int = 64, page_size: int = 1, need_sort: bool = True, *, strict: bool = False
) -> TokenToKVPoolAllocator:
    return TokenToKVPoolAllocator(size, devices.current(), page_size, need_sort, strict=strict)


def take(allocator: TokenToKVPoolAllocator, n: int) -> torch.Tensor:
    return some(allocator.alloc(n))


def take_all(allocator: TokenToKVPoolAllocator) -> torch.Tensor:
    return take(allocator, allocator.available_size())


def assert_all_live(allocator: TokenToKVPoolAllocator, slots: torch.Tensor) -> None:
    assert allocator.is_allocated(slots).all()
    assert allocator.available_size() == 0
    allocator.verify()


def dropped(allocator: TokenToKVPoolAllocator) -> int:
    count: int = allocator.stats()["dropped_frees"]
    return count


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("need_sort", [True, False])
@pytest.mark.parametrize("count", [1, 3, 8, 100])
def test_a_second_free_of_a_tensor_takes_nothing_from_the_next_owner(
    page_size: int, need_sort: bool, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    allocator = make(128, page_size, need_sort)
    first = take(allocator, count)
    allocator.free(first)
    others = take_all(allocator)
    with caplog.at_level(logging.WARNING, "kvpool"):
        allocator.free(first)
    assert_all_live(allocator, others)
    assert dropped(allocator) == count
    assert f"{first[0].item()} (freed earlier, and handed out again since)" in caplog.text
    strict = make(128, page_size, need_sort, strict=True)
    first = take(strict, count)
    strict.free(first)
    others = take_all(strict)
    with pytest.raises(IndexOwnershipError, match="handed out again since"):
        strict.free(first)
    assert_all_live(strict, others)


def by_list(allocator: TokenToKVPoolAllocator, slots: torch.Tensor) -> None:
    allocator.free(slots.tolist())


def by_copy(allocator: TokenToKVPoolAllocator, slots: torch.Tensor) -> None:
    allocator.free(slots.clone())
    allocator.available_size()
    allocator.is_allocated([])  # waits for the values


def by_parts(allocator: TokenToKVPoolAllocator, slots: torch.Tensor) -> None:
    allocator.free(slots[:4])
    allocator.free(slots[4:])


def by_segment(allocator: TokenToKVPoolAllocator, slots: torch.Tensor) -> None:
    allocator.free_segment(slots, start_pos=0)


def by_pages(allocator: TokenToKVPoolAllocator, slots: torch.Tensor) -> None:
    size = allocator.page_size
    allocator.free_pages([slot // size for slot in slots[::size].tolist()])


def by_fence(allocator: TokenToKVPoolAllocator, slots: torch.Tensor) -> None:
    fence = Fence()
    allocator.free(slots, after=fence)
    fence.done = True
    allocator.available_size()


def by_group(allocator: TokenToKVPoolAllocator, slots: torch.Tensor) -> None:
    with allocator.free_group():
        allocator.free(slots)


def by_row(allocator: TokenToKVPoolAllocator, slots: torch.Tensor) -> None:
    table = ReqToTokenPool(2, 16, devices.current())
    (row,) = some(table.alloc(1))
    table.write((row, slice(0, 8)), slots)
    allocator.free(table.req_to_token[row, :8])


def by_eviction(allocator: TokenToKVPoolAllocator, slots: torch.Tensor) -> None:
    cache = PrefixCache(allocator)
    cache.insert(range(8), slots)
    assert cache.evict(8) == 8


def by_clear(allocator: TokenToKVPoolAllocator, _: torch.Tensor) -> None:
    allocator.clear()


def by_resize(allocator: TokenToKVPoolAllocator, _: torch.Tensor) -> None:
    allocator.resize(allocator.size)


WAYS = [
    by_list,
    by_copy,
    by_parts,
    by_segment,
    by_pages,
    by_fence,
    by_group,
    by_row,
    by_eviction,
    by_clear,
    by_resize,
]
AGAIN: dict[str, Callable[[TokenToKVPoolAllocator, torch.Tensor], None]] = {
    "whole": lambda allocator, slots: allocator.free(slots),
    "tail": lambda allocator, slots: allocator.free(slots[3:]),
    "every other": lambda allocator, slots: allocator.free(slots[::2]),
    "two rows": lambda allocator, slots: allocator.free(slots.view(2, 4)),
    "segment": lambda allocator, slots: allocator.free_segment(slots, start_pos=0),
    "behind a fence": lambda allocator, slots: allocator.free(slots, after=Fence()),
    "group": by_group,
}


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("again", AGAIN)
@pytest.mark.parametrize("way", WAYS)
def test_a_free_after_slots_were_freed_in_another_way_takes_nothing(
    page_size: int, again: str, way: Callable[[TokenToKVPoolAllocator, torch.Tensor], None]
) -> None:
    allocator = make(64, page_size)
    slots = take(allocator, 8)
    way(allocator, slots)
    others = take_all(allocator)
    AGAIN[again](allocator, slots)
    assert_all_live(allocator, others)
    assert dropped(allocator) > 0


@pytest.mark.parametrize("need_sort", [True, False])
def test_a_tensor_keeps_what_was_not_freed_otherwise(need_sort: bool) -> None:
    allocator = make(16, need_sort=need_sort)
    slots = take(allocator, 8)
    allocator.free(slots[2:4].tolist())
    others = take_all(allocator)
    allocator.free(slots)
    assert allocator.available_size() == 6
    assert allocator.is_allocated(others).all()
    assert dropped(allocator) == 2


def test_scattered_slots_are_known_too() -> None:
    allocator = make(1024)
    every = take_all(allocator)
    allocator.free(every[::2].tolist())
    slots = take_all(allocator)
    allocator.free(slots)
    others = take_all(allocator)
    allocator.free(slots)
    assert_all_live(allocator, others)


@devices.cpu_only
def test_tensors_of_inference_mode_are_known_too() -> None:
    allocator = make(1024)
    with torch.inference_mode():
        every = take_all(allocator)
        allocator.free(every[::2].tolist())
        slots = take_all(allocator)
        allocator.free(slots)
        others = take_all(allocator)
        allocator.free(slots)
        assert_all_live(allocator, others)


@pytest.mark.parametrize("count", [1, 4])
def test_a_tensor_that_was_written_to_is_a_list_of_numbers(count: int) -> None:
    allocator = make(16)
    slots = take(allocator, count)
    allocator.free(slots)
    others = take_all(allocator)
    slots.copy_(others[-count:])
    allocator.free(slots)
    assert dropped(allocator) == 0
    assert allocator.available_size() == count


def test_memory_that_is_used_again_is_not_the_tensor_that_it_was() -> None:
    allocator = make(4096)
    for _ in range(200):
        slots = take(allocator, 3)
        numbers: list[int] = slots.tolist()
        allocator.free(slots)
        del slots
        held = take(allocator, 4096)
        # Tensors of the framework lie where those of the allocator lay.
        copies = [torch.tensor(numbers, dtype=torch.int32) for _ in range(8)]
        allocator.free(copies[-1])
        assert dropped(allocator) == 0
        allocator.free([slot for slot in held.tolist() if slot not in numbers])
        del held
        gc.collect()


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_each_owner_of_shared_slots_frees_their_tensor_once(page_size: int) -> None:
    allocator = make(32, page_size)
    slots = take(allocator, 8)
    allocator.share(slots)
    allocator.free(slots)
    assert allocator.is_allocated(slots).all()
    allocator.free(slots)
    others = take_all(allocator)
    allocator.free(slots)
    assert_all_live(allocator, others)


def test_pages_that_another_tensor_continues_are_freed_once() -> None:
    allocator = make(32, 4)
    prompt = some(allocator.alloc_extend([0], [6], [-1]))
    token = some(allocator.alloc_decode([7], [int(prompt[-1].item())]))
    allocator.free(token)
    others = take(allocator, allocator.available_size())
    allocator.free(prompt)  # its first page is live, its second belongs to others
    assert allocator.available_size() == 4
    assert allocator.is_allocated(others).all()
    assert dropped(allocator) == 2


@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("need_sort", [True, False])
def test_a_tensor_that_continues_freed_pages_takes_nothing(need_sort: bool, scattered: bool) -> None:
    allocator = make(1024, 4, need_sort)
    if scattered:
        allocator.free(take_all(allocator).view(-1, 4)[::2].flatten().tolist())
    prompt = take(allocator, 302)
    token = some(allocator.alloc_decode([303], [int(prompt[-1].item())]))
    allocator.free(prompt)
    others = take_all(allocator)
    allocator.free(token)
    assert_all_live(allocator, others)
    assert dropped(allocator) == 1


def test_a_planner_takes_no_slots_of_a_request_that_came_later() -> None:
    allocator = make(64, 4)
    kv = KVPool(64, 1, 1, 1, devices.current(), "float32", page_size=4)
    slots = take(allocator, 8)
    allocator.free(slots)
    others = take_all(allocator)
    kv.set_kv_buffer(0, others, *torch.ones(2, len(others), 1, 1, device=devices.current()))
    allocator.free(slots)
    assert allocator.alloc(4) is None
    assert kv.gather_kv(0, others)[0].eq(1).all()


class Holders:
    """Which tensor has taken each page in use, for an allocator of 24 pages."""

    def __init__(self, page_size: int, need_sort: bool) -> None:
        self.page_size = page_size
        self.allocator = make(24 * page_size, page_size, need_sort)
        self.holder: dict[int, int] = {}
        self.tensors: dict[int, torch.Tensor] = {}

    def pages_of(self, slots: torch.Tensor) -> set[int]:
        return {slot // self.page_size for slot in slots.tolist()}

    def alloc(self, key: int, count: int) -> None:
        tensor = self.allocator.alloc(count)
        if tensor is not None:
            self.tensors[key] = tensor
            pages = self.pages_of(tensor)
            assert not pages & self.holder.keys()
            self.holder.update(dict.fromkeys(pages, key))

    def free(self, key: int, part: slice, *, as_list: bool) -> None:
        slots = self.tensors[key][part]
        self.allocator.free(slots.tolist() if as_list else slots)
        for page in self.pages_of(slots):
            if as_list or self.holder.get(page) == key:
                self.holder.pop(page, None)

    def check(self) -> None:
        slots = torch.arange(1, 25) * self.page_size
        assert self.allocator.is_allocated(slots).tolist() == [page in self.holder for page in range(1, 25)]
        assert self.allocator.available_size() == (24 - len(self.holder)) * self.page_size


@pytest.mark.parametrize("need_sort", [True, False])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("seed", range(4))
def test_a_random_history_agrees_with_a_model_of_holders(need_sort: bool, page_size: int, seed: int) -> None:
    randoms = random.Random(seed)  # noqa: S311
    model = Holders(page_size, need_sort)
    for step in range(400):
        action = randoms.choice(["alloc", "alloc", "free", "free", "view", "list", "drop"])
        if action == "alloc":
            model.alloc(step, randoms.randrange(1, 4 * page_size))
        elif model.tensors:
            key = randoms.choice(list(model.tensors))
            start = randoms.randrange(len(model.tensors[key])) if action == "view" else 0
            if action == "drop":
                del model.tensors[key]
            else:
                model.free(key, slice(start, None, randoms.choice([1, 2])), as_list=action == "list")
        if randoms.random() < 0.01:
            model.allocator.clear()
            model.holder.clear()
        model.check()
    model.allocator.verify()


# Requests of a planner


@pytest.mark.parametrize("clear", [by_clear, by_resize])
def test_a_clear_under_a_planner_ends_its_requests_alone(
    clear: Callable[[TokenToKVPoolAllocator, torch.Tensor], None],
) -> None:
    allocator, table = make(64, 4, strict=True), ReqToTokenPool(4, 64, devices.current())
    planner = BatchPlanner(table, allocator, 4, 64)
    rows = some(table.alloc(3))
    clear(allocator, some(planner.extend(rows, [0, 0, 0], [14, 9, 3])).out_cache_loc)
    others = take(allocator, 40)
    assert [planner.seq_len(row) for row in rows] == [0, 0, 0]
    assert planner.stats()["requests"] == 0
    calls: list[Callable[[], object]] = [
        lambda: planner.decode(rows[:1], [15]),
        lambda: planner.truncate(rows[:1], [2]),
        lambda: planner.extend(rows[:1], [14], [20]),
        lambda: planner.fork(rows[0], rows[1], 4),
    ]
    for call in calls:
        with pytest.raises(StaleBufferError, match="ended when the allocator was cleared or resized"):
            call()
    planner.finish(rows[:1], [14])
    planner.finish(rows[1:2])
    assert table.available_size() == 3
    assert allocator.is_allocated(others).all()
    # A request may begin again.
    assert some(planner.extend(rows[2:], [0], [5])).out_cache_loc.tolist() == [44, 45, 46, 47, 48]
    assert some(planner.decode(rows[2:], [6])).out_cache_loc.tolist() == [49]
    planner.finish(rows[2:], [6])
    assert allocator.available_size() == 24
    allocator.verify()


def test_slots_of_a_row_that_is_freed_alone_go_back(caplog: pytest.LogCaptureFixture) -> None:
    allocator, table = make(64, 4, strict=True), ReqToTokenPool(4, 64, devices.current())
    planner = BatchPlanner(table, allocator, 4, 64)
    (row,) = some(table.alloc(1))
    planner.extend([row], [0], [20])
    table.free(row)
    with caplog.at_level(logging.WARNING, "kvpool"):
        assert len(take_all(allocator)) == 44
        assert len(take(allocator, 20)) == 20
    (record,) = caplog.records
    assert record.getMessage() == (
        f"request row {row} was freed without its planner while it had 20 tokens: 5 of its 5 pages are free "
        "again; end requests with BatchPlanner.finish"
    )
    assert planner.stats()["requests"] == 0
    allocator.verify()


def test_slots_of_a_row_that_were_freed_by_hand_are_left_to_their_new_owner(
    caplog: pytest.LogCaptureFixture,
) -> None:
    allocator, table = make(64, 4), ReqToTokenPool(4, 64, devices.current())
    planner = BatchPlanner(table, allocator, 4, 64)
    (row,) = some(table.alloc(1))
    plan = some(planner.extend([row], [0], [20]))
    allocator.free(plan.out_cache_loc.tolist())
    others = take_all(allocator)
    with caplog.at_level(logging.WARNING, "kvpool"):
        table.free(row)
        (row,) = some(table.alloc(1))
        assert planner.extend([row], [0], [4]) is None
    assert caplog.records == []
    assert_all_live(allocator, others)
