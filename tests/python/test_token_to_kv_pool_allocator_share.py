"""TokenToKVPoolAllocator.share: slots with several owners, which return with the last; random histories."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import devices
import pytest
import torch
from common import some
from models import Fence

from kvpool import IndexOwnershipError, TokenToKVPoolAllocator

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


def test_share_rejects_what_is_not_an_index(bad_index: Any) -> None:  # noqa: ANN401
    allocator = make()
    take(allocator, 8)
    before = snapshot(allocator)
    with pytest.raises(TypeError):
        allocator.share(bad_index)
    assert snapshot(allocator) == before


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
