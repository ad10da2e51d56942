"""TokenToKVPoolAllocator.share: slots with several owners, which return with the last; random histories."""

from __future__ import annotations

import inspect
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import devices
import pytest
import torch
from common import some
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from models import BadFreeError, Fence
from planner_model import SharingAllocatorModel

from kvpool import ConfigError, IndexOwnershipError, TokenToKVPoolAllocator

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

PAGE_SIZES = [1, 4, 16]

pytestmark = pytest.mark.usefixtures("device")


def make(
    size: int = 64, page_size: int = 1, need_sort: bool = True, *, strict: bool = False
) -> TokenToKVPoolAllocator:
    return TokenToKVPoolAllocator(size, devices.current(), page_size, need_sort, strict=strict)


def take(allocator: TokenToKVPoolAllocator, n: int) -> list[int]:
    slots: list[int] = some(allocator.alloc(n)).tolist()
    return slots


def snapshot(allocator: TokenToKVPoolAllocator) -> dict[str, Any]:
    """Everything that can be seen from outside, but the memory that counts take."""
    return {
        **allocator.stats(),
        "free": allocator.free_slots.tolist(),
        "released": allocator.release_slots.tolist(),
        "bytes": 0,
    }


def test_signature() -> None:
    parameters = inspect.signature(TokenToKVPoolAllocator.share).parameters
    assert [name for name in parameters if name != "self"] == ["indices", "owner"]


@pytest.mark.parametrize("need_sort", [True, False])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_shared_slots_return_with_their_last_owner(page_size: int, need_sort: bool) -> None:
    allocator = make(64, page_size, need_sort, strict=True)
    slots = take(allocator, 48)
    shared = slots[:32]
    assert allocator.share(shared) is None  # type: ignore[func-returns-value]
    allocator.share(slots[:16])
    stats = allocator.stats()
    assert (stats["shared"], stats["in_use"], stats["available"]) == (32, 48, 16)
    allocator.free(shared)
    assert allocator.stats()["shared"] == 16
    assert allocator.available_size() == 16
    allocator.free(slots[:16])
    assert allocator.stats()["shared"] == 0
    assert allocator.available_size() == 16
    assert allocator.is_allocated(slots).all()
    allocator.free(slots)
    assert allocator.available_size() == 64
    before = snapshot(allocator)
    with pytest.raises(IndexOwnershipError):
        allocator.free(slots[:1])
    assert snapshot(allocator) == before
    allocator.verify()


def test_nothing_is_shared_at_first() -> None:
    allocator = make()
    take(allocator, 8)
    assert allocator.stats()["shared"] == 0


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_share_takes_every_form_of_indices(as_index: Callable[[Sequence[int]], Any], page_size: int) -> None:
    allocator = make(64, page_size)
    slots = take(allocator, 32)
    allocator.share(as_index(slots[:16]))
    allocator.free(slots)
    assert allocator.is_allocated(slots).tolist() == [True] * 16 + [False] * 16
    allocator.free(as_index(slots[:16]))
    assert allocator.available_size() == 64


def test_share_of_what_alloc_gave() -> None:
    allocator = make()
    slots = some(allocator.alloc(8))
    allocator.share(slots[2:5])
    allocator.free(slots)
    assert allocator.is_allocated(slots).tolist() == [2 <= i < 5 for i in range(8)]


def test_share_of_nothing() -> None:
    allocator = make()
    before = snapshot(allocator)
    allocator.share([])
    allocator.share(torch.empty(0, dtype=torch.int32))
    assert snapshot(allocator) == before


def test_each_naming_of_a_slot_is_an_owner() -> None:
    allocator = make(8)
    slots = take(allocator, 4)
    allocator.share([2, 3, 2])
    # 2 has three owners, 3 two.
    allocator.free([2, 2, 3, 1])
    assert allocator.is_allocated(slots).tolist() == [False, True, True, True]
    allocator.free([2, 3, 4])
    assert allocator.available_size() == 8
    assert allocator.stats()["dropped_frees"] == 0


def test_naming_a_slot_more_often_than_it_has_owners_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    allocator = make(8)
    take(allocator, 4)
    allocator.share([2])
    with caplog.at_level(logging.WARNING, logger="kvpool"):
        allocator.free([2, 1, 2, 2])
    assert allocator.stats()["dropped_frees"] == 1
    assert allocator.available_size() == 6
    assert "2" in caplog.text
    strict = make(8, strict=True)
    take(strict, 4)
    strict.share([2])
    before = snapshot(strict)
    with pytest.raises(IndexOwnershipError, match="2"):
        strict.free([2, 1, 2, 2])
    assert snapshot(strict) == before
    strict.free([2, 2])
    assert strict.available_size() == 5


def test_a_page_has_one_owner_more_for_each_call() -> None:
    allocator = make(64, 4, strict=True)
    slots = take(allocator, 8)
    allocator.share([5, 4, 7, 9])
    allocator.share([6, 6])
    # The first page has three owners, the second two.
    assert allocator.stats()["shared"] == 8
    allocator.free([4, 5, 6, 7, 8])
    assert allocator.stats()["shared"] == 4
    allocator.free(slots)
    assert allocator.is_allocated(slots).tolist() == [True] * 4 + [False] * 4
    allocator.free([7])
    assert allocator.available_size() == 64


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("bad", ["padding", "negative", "outside", "huge", "free", "fenced", "returned"])
def test_only_live_slots_are_shared_and_nothing_changes_otherwise(page_size: int, bad: str) -> None:
    allocator = make(64, page_size)
    slots = take(allocator, 48)
    allocator.free(slots[16:32], after=Fence())
    allocator.share(slots[32:])
    allocator.free(slots[32:])
    allocator.free(slots[32:])
    wrong = {
        "padding": 0,
        "negative": -1,
        "outside": 64 + page_size,
        "huge": 2**40,
        "free": slots[-1] + 1,
        "fenced": slots[16],
        "returned": slots[32],
    }[bad]
    before = snapshot(allocator)
    for given in ([*slots[:2], wrong], [wrong], torch.tensor([wrong, slots[0]])):
        with pytest.raises(IndexOwnershipError, match=str(wrong)):
            allocator.share(given)
        assert snapshot(allocator) == before
    allocator.share(slots[:2])


def test_share_refuses_what_is_no_index(bad_index: Any) -> None:  # noqa: ANN401
    allocator = make()
    take(allocator, 8)
    before = snapshot(allocator)
    with pytest.raises(TypeError):
        allocator.share(bad_index)
    assert snapshot(allocator) == before


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_shared_slots_are_not_handed_out(page_size: int) -> None:
    allocator = make(64, page_size)
    slots = take(allocator, 64)
    allocator.share(slots[:16])
    allocator.free(slots)
    again = take(allocator, 48)
    assert sorted(again) == slots[16:]
    assert allocator.alloc(1) is None
    allocator.free(slots[:16])
    assert take(allocator, 16) == slots[:16]


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_slots_that_were_shared_begin_with_one_owner_again(page_size: int) -> None:
    allocator = make(64, page_size, strict=True)
    slots = take(allocator, 64)
    allocator.share(slots)
    allocator.free(slots)
    allocator.free(slots)
    assert take(allocator, 64) == slots
    assert allocator.stats()["shared"] == 0
    allocator.free(slots)
    assert allocator.available_size() == 64


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_an_owner_behind_a_fence_goes_when_it_has_passed(page_size: int) -> None:
    allocator = make(64, page_size)
    slots = take(allocator, 16)
    allocator.share(slots)
    fence = Fence()
    allocator.free(slots, after=fence)
    assert allocator.available_size() == 48
    # The other owner goes first.
    allocator.free(slots)
    assert allocator.available_size() == 48
    assert allocator.is_allocated(slots).all()
    allocator.free(slots[:1])
    assert allocator.stats()["dropped_frees"] == 1
    fence.done = True
    assert allocator.available_size() == 64
    assert allocator.stats()["shared"] == 0


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_an_owner_stays_when_the_fence_of_another_passes(page_size: int) -> None:
    allocator = make(64, page_size, strict=True)
    slots = take(allocator, 16)
    allocator.share(slots)
    fence = Fence()
    allocator.free(slots, after=fence)
    assert allocator.stats()["shared"] == 16
    allocator.share(slots)
    fence.done = True
    assert allocator.stats()["shared"] == 16
    allocator.free(slots)
    assert allocator.stats()["shared"] == 0
    assert allocator.available_size() == 48
    allocator.free(slots)
    assert allocator.available_size() == 64


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_fences_of_all_owners_pass_in_any_order(page_size: int, order: tuple[int, ...]) -> None:
    allocator = make(64, page_size)
    slots = take(allocator, 16)
    allocator.share(slots)
    allocator.share(slots)
    fences = [Fence() for _ in range(3)]
    for fence in fences:
        allocator.free(slots, after=fence)
    with pytest.raises(IndexOwnershipError):
        allocator.share(slots)
    for i in order:
        assert allocator.available_size() == 48
        assert allocator.is_allocated(slots).all()
        fences[i].done = True
    assert allocator.available_size() == 64


def test_a_group_is_one_call() -> None:
    allocator = make(64, 4)
    slots = take(allocator, 8)
    allocator.share(slots)
    with allocator.free_group():
        allocator.free(slots[:2])
        allocator.free(slots[2:4])
        allocator.share(slots[:1])
        assert allocator.stats()["shared"] == 8
    # The first page had three owners, and one freed it.
    allocator.free(slots)
    assert allocator.stats()["shared"] == 0
    assert allocator.available_size() == 56
    single = make(64)
    slots = take(single, 4)
    single.share(slots[:2])
    with single.free_group():
        single.free([1])
        single.free([1, 2])
    assert single.is_allocated(slots).tolist() == [False, True, True, True]
    assert single.stats()["dropped_frees"] == 0


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_clear_forgets_all_owners(page_size: int) -> None:
    allocator = make(64, page_size, strict=True)
    slots = take(allocator, 32)
    fence = Fence()
    allocator.share(slots)
    allocator.share(slots)
    allocator.free(slots, after=fence)
    allocator.clear()
    assert allocator.stats()["shared"] == 0
    assert take(allocator, 32) == slots
    fence.done = True
    allocator.free(slots)
    assert allocator.available_size() == 64
    allocator.verify()


def test_a_shared_page_may_be_continued() -> None:
    allocator = make(64, 4)
    slots = take(allocator, 2)
    allocator.share(slots)
    assert some(allocator.alloc_extend([2], [5], slots[1:])).tolist() == [6, 7, 8]
    allocator.free([4])
    assert some(allocator.alloc_extend([2], [3], slots[1:])).tolist() == [6]


def test_as_many_owners_as_you_like() -> None:
    allocator = make(8)
    take(allocator, 8)
    for _ in range(300):
        allocator.share([3] * 10)
    allocator.free([3] * 3000)
    assert allocator.is_allocated([3]).tolist() == [True]
    allocator.free([3, 3])
    assert allocator.stats()["dropped_frees"] == 1


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_threads_share_and_free(page_size: int) -> None:
    allocator = make(64, page_size, strict=True)
    slots = take(allocator, 32)
    barrier = threading.Barrier(8)

    def work(number: int) -> None:
        barrier.wait()
        mine = slots[16 * (number % 2) :][:16]
        for _ in range(100):
            allocator.share(mine)
            allocator.free(mine)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert allocator.stats()["shared"] == 0
    assert allocator.available_size() == 32
    allocator.free(slots)
    assert allocator.available_size() == 64


class SharingHistory(RuleBasedStateMachine):
    """Every operation, misuse included, on the allocator and on its naive model."""

    @initialize(
        page_size=st.sampled_from([1, 1, 2, 4]),
        pages=st.integers(1, 12),
        need_sort=st.booleans(),
        strict=st.booleans(),
    )
    def start(self, page_size: int, pages: int, need_sort: bool, strict: bool) -> None:
        size = pages * page_size
        self.real = make(size, page_size, need_sort, strict=strict)
        self.model = SharingAllocatorModel(size, page_size, need_sort=need_sort, strict=strict)
        self.fences: list[Fence] = []

    @rule(need=st.integers(0, 12))
    def alloc(self, need: int) -> None:
        slots = self.real.alloc(need)
        assert (None if slots is None else slots.tolist()) == self.model.alloc(need)

    def some_slots(self, data: st.DataObject) -> list[int]:
        size = self.model.page_size
        live = [page * size + offset for page in sorted(self.model.live) for offset in range(size)]
        return data.draw(st.lists(st.sampled_from(live), min_size=1, max_size=10))

    @precondition(lambda self: self.model.live)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        slots = self.some_slots(data)
        self.real.share(slots)
        self.model.share(slots)

    @rule(slots=st.lists(st.integers(-3, 60), max_size=5))
    def share_anything(self, slots: list[int]) -> None:
        try:
            self.model.share(slots)
        except BadFreeError:
            with pytest.raises(IndexOwnershipError):
                self.real.share(slots)
        else:
            self.real.share(slots)

    def free_both(self, slots: list[int], fence: Fence | None) -> None:
        try:
            self.model.free(slots, fence)
        except BadFreeError:
            with pytest.raises(IndexOwnershipError):
                self.real.free(slots, after=fence)
        else:
            self.real.free(slots, after=fence)

    @precondition(lambda self: self.model.live)
    @rule(data=st.data(), fenced=st.booleans())
    def free(self, data: st.DataObject, fenced: bool) -> None:
        fence = None
        if fenced and not self.model.group_depth:
            fence = data.draw(st.sampled_from([Fence(), *self.fences]))
            self.fences.append(fence)
        self.free_both(self.some_slots(data), fence)

    @rule(slots=st.lists(st.integers(-3, 60), max_size=8))
    def free_anything(self, slots: list[int]) -> None:
        self.free_both(slots, None)

    @precondition(lambda self: self.fences)
    @rule(data=st.data())
    def fence_passes(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.fences)).done = True

    @rule()
    def group_begin(self) -> None:
        self.real.free_group_begin()
        self.model.free_group_begin()

    @rule()
    def group_end(self) -> None:
        if not self.model.group_depth:
            with pytest.raises(ConfigError):
                self.real.free_group_end()
            return
        try:
            self.model.free_group_end()
        except BadFreeError:
            with pytest.raises(IndexOwnershipError):
                self.real.free_group_end()
        else:
            self.real.free_group_end()

    @rule()
    def merge(self) -> None:
        self.real.merge_and_sort_free()
        self.model.merge_and_sort_free()

    @rule(sure=st.integers(0, 8))
    def clear(self, sure: int) -> None:
        if sure == 0:
            self.real.clear()
            self.model.clear()

    @invariant()
    def same(self) -> None:
        if not hasattr(self, "real"):
            return
        assert self.real.available_size() == self.model.available_size()
        stats = self.real.stats()
        assert stats["available"] + stats["in_use"] == stats["capacity"] == self.model.capacity
        assert stats["in_use"] == self.model.in_use
        assert stats["shared"] == self.model.shared
        assert stats["dropped_frees"] == self.model.dropped_frees
        assert stats["high_water"] == self.model.high_water
        assert self.real.free_slots.tolist() == self.model.free_pages
        assert self.real.release_slots.tolist() == self.model.released_pages
        everything = list(range(-2, (self.model.num_pages + 2) * self.model.page_size))
        answers = self.real.is_allocated(everything).tolist()
        assert answers == [self.model.is_allocated(slot) for slot in everything]
        self.real.verify()


def test_random_histories_agree_with_the_model() -> None:
    examples = 60 if devices.current() == "cpu" else 20
    run_state_machine_as_test(SharingHistory, settings=settings(max_examples=examples))
