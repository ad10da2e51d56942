"""TokenToKVPoolAllocator: order, owners, pages, batches, groups, fences, misuse, and random histories.

Rust compares the one in host memory with a naive allocator: `tests/rust/histories/slots.rs`.
"""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

import devices
import numpy as np
import pytest
import torch
from common import Fence, outcome, some
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvpool import ConfigError, IndexOwnershipError, StateError, TokenToKVPoolAllocator

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

PAGE_SIZES = [1, 4, 16]

pytestmark = pytest.mark.usefixtures("device")


def make(
    size: int = 64, page_size: int = 1, need_sort: bool = True, *, strict: bool = False
) -> TokenToKVPoolAllocator:
    return TokenToKVPoolAllocator(size, devices.current(), page_size, need_sort, strict=strict)


def take(
    allocator: TokenToKVPoolAllocator,
    n: int,
    *,
    contiguous: bool | Literal["first_fit", "best_fit"] = False,
) -> list[int]:
    slots: list[int] = some(allocator.alloc(n, contiguous=contiguous)).tolist()
    return slots


def allocated(allocator: TokenToKVPoolAllocator, indices: Any) -> list[bool]:  # noqa: ANN401
    answer = allocator.is_allocated(indices)
    assert answer.dtype is torch.bool
    assert answer.dim() == 1
    answers: list[bool] = answer.tolist()
    return answers


def snapshot(allocator: TokenToKVPoolAllocator) -> dict[str, Any]:
    """Everything that can be seen from outside, but the memory that counts take."""
    return {
        **allocator.stats(),
        "free": allocator.free_slots.tolist(),
        "released": allocator.release_slots.tolist(),
        "available": allocator.available_size(),
        "bytes": 0,
    }


def assert_consistent(allocator: TokenToKVPoolAllocator) -> None:
    stats = allocator.stats()
    assert stats["available"] + stats["in_use"] == stats["capacity"]
    assert stats["available"] == allocator.available_size()
    allocator.verify()


# alloc


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("need_sort", [True, False])
def test_every_tensor_has_the_dtype_that_was_asked_for(page_size: int, need_sort: bool) -> None:
    def of(index_dtype: Any) -> tuple[TokenToKVPoolAllocator, list[torch.Tensor]]:  # noqa: ANN401
        allocator = TokenToKVPoolAllocator(
            128, devices.current(), page_size, need_sort, strict=True, index_dtype=index_dtype
        )
        taken = [
            some(allocator.alloc(5)),
            some(allocator.alloc(17, contiguous=True)),
            some(allocator.alloc_extend([0, 0], [3, 1], [-1, -1])),
        ]
        taken.append(some(allocator.alloc_decode([4, 2], taken[2][[2, 3]].tolist())))
        allocator.free(taken[0])
        return allocator, [*taken, allocator.free_slots, allocator.release_slots]

    (narrow, expected), (wide, answers) = of("int32"), of(torch.int64)
    assert (narrow.index_dtype, wide.index_dtype) == (torch.int32, torch.int64)
    assert {answer.dtype for answer in expected} == {torch.int32}
    assert {answer.dtype for answer in answers} == {torch.int64}
    assert [answer.tolist() for answer in answers] == [answer.tolist() for answer in expected]
    wide.free(answers[1][2:7])
    wide.clear()
    assert wide.available_size() == wide.stats()["capacity"]
    assert_consistent(wide)


@pytest.mark.parametrize("index_dtype", [torch.int16, torch.float32, "uint8"])
def test_slots_are_int32_or_int64(index_dtype: Any) -> None:  # noqa: ANN401
    with pytest.raises(TypeError, match="index_dtype must be int32 or int64, not"):
        TokenToKVPoolAllocator(8, devices.current(), index_dtype=index_dtype)


@pytest.mark.parametrize("need_sort", [True, False])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_alloc_gives_an_int32_tensor(page_size: int, need_sort: bool) -> None:
    slots = some(make(64, page_size, need_sort).alloc(5))
    assert type(slots) is torch.Tensor
    assert slots.dtype is torch.int32
    assert slots.device.type == devices.current()
    assert slots.shape == (5,)
    assert slots.is_contiguous()
    assert slots.tolist() == list(range(page_size, page_size + 5))


@pytest.mark.parametrize(
    ("need", "error"),
    [
        *[(need, ConfigError) for need in (-1, -(2**31), -(10**30))],
        *[(need, TypeError) for need in (1.0, 1.5, float("nan"), float("inf"), "1", None, [1])],
        (np.float32(1), TypeError),
    ],
)
def test_rejects_bad_counts(need: Any, error: type[Exception]) -> None:  # noqa: ANN401
    allocator = make()
    before = snapshot(allocator)
    for contiguous in (False, True):
        with pytest.raises(error, match=str(need) if error is ConfigError else None):
            allocator.alloc(need, contiguous=contiguous)
    assert snapshot(allocator) == before
    assert take(allocator, np.int64(3)) == [1, 2, 3]


@pytest.mark.parametrize("contiguous", [True, False, "best_fit"])
@pytest.mark.parametrize("need", [65, 2**31 - 1, 2**31, 2**63, 2**64, 10**30])
def test_short_is_none_and_changes_nothing(need: int, contiguous: bool | Literal["best_fit"]) -> None:
    allocator = make(64, 4)
    before = snapshot(allocator)
    assert allocator.alloc(need, contiguous=contiguous) is None
    assert snapshot(allocator) == before


# Order


def test_sorted_order_keeps_released_slots_apart_until_they_are_needed() -> None:
    allocator = make(10)
    assert take(allocator, 6) == [1, 2, 3, 4, 5, 6]
    allocator.free([5, 2])
    assert allocator.free_slots.tolist() == [7, 8, 9, 10]
    assert allocator.release_slots.tolist() == [2, 5]
    assert take(allocator, 3) == [7, 8, 9]
    assert take(allocator, 2) == [2, 5]
    assert allocator.free_slots.tolist() == [10]
    assert allocator.release_slots.tolist() == []


def test_without_sorting_slots_come_back_first_in_first_out() -> None:
    allocator = make(6, need_sort=False)
    assert take(allocator, 4) == [1, 2, 3, 4]
    allocator.free([3, 1])
    allocator.free(torch.tensor([4, 2]))
    assert allocator.free_slots.tolist() == [5, 6, 3, 1, 4, 2]
    assert allocator.release_slots.tolist() == []
    allocator.merge_and_sort_free()
    assert take(allocator, 4) == [5, 6, 3, 1]
    assert take(allocator, 2) == [4, 2]


# Tensors that were handed out


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_tensors_keep_their_values(page_size: int) -> None:
    allocator = make(64, page_size)
    held = []
    for _ in range(200):
        slots = some(allocator.alloc(7))
        held.append((slots, slots.tolist()))
        allocator.free(slots)
    for slots, values in held:
        assert slots.tolist() == values


def test_writing_to_a_tensor_does_not_reach_the_allocator() -> None:
    allocator = make(64)
    slots = some(allocator.alloc(8))
    slots.fill_(60)
    assert allocated(allocator, list(range(1, 9))) == [True] * 8
    assert take(allocator, 8) == list(range(9, 17))
    assert_consistent(allocator)
    allocator.free(slots)
    assert_consistent(allocator)
    assert allocator.stats()["dropped_frees"] == 8
    allocator.free(list(range(1, 9)))
    assert allocator.available_size() == 56
    assert take(allocator, 56) == [*range(1, 9), *range(17, 65)]


def test_free_believes_the_values_that_a_tensor_has_now() -> None:
    allocator = make(64)
    slots = some(allocator.alloc(4))
    slots.copy_(slots.flip(0))
    allocator.free(slots[:2])
    assert allocated(allocator, [1, 2, 3, 4]) == [True, True, False, False]


# free


@pytest.mark.parametrize("need_sort", [True, False])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_free_takes_every_form_of_indices(
    as_index: Callable[[Sequence[int]], Any], page_size: int, need_sort: bool
) -> None:
    allocator = make(64, page_size, need_sort)
    slots = take(allocator, 64)
    allocator.free(as_index(slots[16:48]))
    assert allocator.available_size() == 32
    assert allocated(allocator, slots) == [not 16 <= i < 48 for i in range(64)]
    assert allocator.stats()["dropped_frees"] == 0
    assert_consistent(allocator)


def test_free_takes_ranges_and_single_tensors() -> None:
    allocator = make(16)
    take(allocator, 16)
    allocator.free(range(3, 9, 2))
    allocator.free(torch.tensor(10))
    allocator.free(torch.arange(11, 13).repeat_interleave(1).view(1, 2, 1))
    assert allocator.release_slots.tolist() == [3, 5, 7, 10, 11, 12]


def test_freeing_nothing_changes_nothing() -> None:
    allocator = make(8)
    take(allocator, 4)
    before = snapshot(allocator)
    tensors = torch.empty(0, dtype=torch.int32), torch.empty(2, 0, dtype=torch.int64)
    nothings: list[Any] = [[], (), range(0), *tensors]
    for nothing in nothings:
        assert allocator.free(nothing) is None  # type: ignore[func-returns-value]
    with pytest.raises(TypeError):
        allocator.free(torch.empty(0))
    assert snapshot(allocator) == before


@pytest.mark.parametrize(
    ("bad", "forms"),
    [
        *[(bad, (list, torch.tensor, np.array)) for bad in (0, -1, -(2**31), -(2**63), 10**6)],
        *[(bad, (list, torch.tensor, np.array)) for bad in (2**31 - 1, 2**31, 2**32 + 1, 2**63 - 1)],
        *[(bad, (list,)) for bad in (2**64, 10**30, -(10**30))],
    ],
)
def test_frees_out_of_range_are_dropped(bad: int, forms: Sequence[Any]) -> None:
    allocator = make(64, 4)
    take(allocator, 32)
    before = snapshot(allocator)
    for form in forms:
        allocator.free(form([bad]))
    assert snapshot(allocator) == {**before, "dropped_frees": len(forms)}
    assert_consistent(allocator)


def test_free_refuses_tensors_without_values() -> None:
    allocator = make(8)
    take(allocator, 4)
    with pytest.raises((TypeError, ConfigError)):
        allocator.free(torch.tensor([1, 2], device="meta"))
    assert allocator.available_size() == 4


# Contiguous runs


def test_contiguous_takes_the_lowest_run_that_fits() -> None:
    allocator = make(16)
    take(allocator, 16)
    allocator.free([2, 3, 5, 6, 7, 10, 11, 12, 13])
    assert allocator.alloc(5, contiguous=True) is None
    assert take(allocator, 3, contiguous=True) == [5, 6, 7]
    assert take(allocator, 1, contiguous=True) == [2]
    assert take(allocator, 3, contiguous=True) == [10, 11, 12]
    assert take(allocator, 2) == [3, 13]


def test_first_fit_is_the_lowest_run_and_best_fit_the_shortest() -> None:
    allocator = make(16)
    take(allocator, 16)
    allocator.free([1, 2, 3, 4, 6, 7, 8, 10, 12, 13, 14])
    allocator.merge_and_sort_free()
    assert take(allocator, 2, contiguous="best_fit") == [6, 7]
    assert take(allocator, 2, contiguous="first_fit") == [1, 2]
    assert take(allocator, 1, contiguous="best_fit") == [8]
    allocator.free([9])  # waits for a merge
    assert take(allocator, 2, contiguous="best_fit") == [3, 4]
    assert take(allocator, 2, contiguous="best_fit") == [9, 10]
    assert allocator.alloc(4, contiguous="best_fit") is None
    assert take(allocator, 3, contiguous="best_fit") == [12, 13, 14]


def test_other_ways_to_find_a_run_are_refused() -> None:
    allocator = make()
    wrong: Any = "worst_fit"
    with pytest.raises(ConfigError, match="unknown fit 'worst_fit'; use 'first_fit' or 'best_fit'"):
        allocator.alloc(2, contiguous=wrong)
    for wrong in (1, None, 0.0, ["best_fit"]):
        with pytest.raises(TypeError, match=f"contiguous must be a bool.*not {type(wrong).__name__}"):
            allocator.alloc(2, contiguous=wrong)
    assert allocator.available_size() == 64


# runs


@pytest.mark.parametrize(
    ("indices", "runs"),
    [
        ([], []),
        ([5], [[5, 1]]),
        ([1, 2, 3], [[1, 3]]),
        ([3, 2, 1], [[3, 1], [2, 1], [1, 1]]),
        ([4, 5, 9, 10, 11, 2, 7, 8], [[4, 2], [9, 3], [2, 1], [7, 2]]),
        ([6, 6, 7], [[6, 1], [6, 2]]),
    ],
)
def test_runs_of_neighbouring_slots_are_found(indices: list[int], runs: list[list[int]]) -> None:
    found = make().runs(indices)
    assert type(found) is torch.Tensor
    assert found.dtype is torch.int32
    assert found.shape == (len(runs), 2)
    assert found.device == torch.device("cpu")
    assert found.tolist() == runs


# Groups


# Segments and pages


def as_given(slots: torch.Tensor, form: str) -> Any:  # noqa: ANN401
    match form:
        case "list":
            return slots.tolist()
        case "array":
            return slots.cpu().numpy()
        case "spread":
            return slots.repeat_interleave(3)[::3]
        case "computed":
            return slots.long() + 0
        case _:
            return slots


@pytest.mark.parametrize("need_sort", [True, False])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("form", ["tensor", "list", "array", "spread", "computed"])
def test_a_segment_frees_its_pages(form: str, page_size: int, need_sort: bool) -> None:
    allocator = make(256, page_size, need_sort, strict=True)
    row = some(allocator.alloc(6 * page_size))
    allocator.free_segment(
        as_given(row[2 * page_size : 5 * page_size - (page_size > 1)], form), start_pos=2 * page_size
    )
    assert allocator.available_size() == 256 - 3 * page_size
    assert allocated(allocator, row) == [True] * 2 * page_size + [False] * 3 * page_size + [True] * page_size
    segments = [
        (row[:page_size], 0),
        (as_given(row[5 * page_size :], form), 5 * page_size),
        (row[:0], page_size),
    ]
    allocator.free_segments(segments)
    assert allocator.available_size() == 256 - page_size
    # An empty segment and no segment free nothing.
    allocator.free_segments([])
    allocator.free_segment(row[:0], start_pos=0)
    allocator.free_pages(as_given(row[page_size : page_size + 1] // page_size, form))
    assert allocator.available_size() == 256
    assert_consistent(allocator)


def test_segments_wait_for_groups_and_fences() -> None:
    allocator, fence = make(64, 4, strict=True), Fence()
    row = some(allocator.alloc(32))
    with allocator.free_group():
        allocator.free_segment(row[:7], start_pos=0)
        allocator.free_pages([int(row[8]) // 4])
        allocator.free(row[1:3])
        assert allocator.available_size() == 32
    assert allocator.available_size() == 44
    allocator.free_segments([(row[12:16], 12), (row[16:20], 16)], after=fence)
    assert allocator.available_size() == 44
    fence.done = True
    assert allocator.available_size() == 52


@pytest.mark.parametrize("start_pos", [1, 3, -4, 2**70])
def test_segments_begin_a_page(start_pos: int) -> None:
    allocator = make(64, 4)
    row = some(allocator.alloc(16))
    before = snapshot(allocator)
    with pytest.raises(ConfigError, match=r"does not begin a page of 4 slots"):
        allocator.free_segment(row[4:8], start_pos=start_pos)
    with pytest.raises(ConfigError, match=r"does not begin a page of 4 slots"):
        allocator.free_segments([(row[:4], 0), (row[4:8], start_pos)])
    assert snapshot(allocator) == before


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda a, row: a.free_segments([(row, 0, 0)]), ValueError),
        (lambda a, row: a.free_segments([row]), (TypeError, ValueError)),
        (lambda a, _: a.free_segment([0.5], start_pos=0), TypeError),
        (lambda a, row: a.free_segment(row, start_pos="0"), TypeError),
        (lambda a, row: a.free_segment(row.view(4, 4).t(), start_pos=0), ConfigError),
        (lambda a, _: a.free_pages([1.5]), TypeError),
        (lambda a, row: a.free_pages(row, after=object()), TypeError),
    ],
)
def test_wrong_segments_change_nothing(call: Any, error: Any) -> None:  # noqa: ANN401
    allocator = make(64, 4)
    row = some(allocator.alloc(16))
    before = snapshot(allocator)
    with pytest.raises(error):
        call(allocator, row)
    assert snapshot(allocator) == before


def test_bad_frees_that_go_on_are_a_warning_a_second(caplog: pytest.LogCaptureFixture) -> None:
    allocator = make(64)
    allocator.name = "slots"
    with caplog.at_level(logging.DEBUG, logger="kvpool"):
        for slot in (3, 4, 5):
            allocator.free([slot])
        time.sleep(1.05)
        allocator.free([6])
    assert caplog.records[0].levelno == caplog.records[-1].levelno == logging.WARNING
    first, last = (caplog.records[at].getMessage() for at in (0, -1))
    assert first.startswith("slots: dropped 1 of 1 freed slots: 3 (")
    assert "last warning" not in first
    assert last.startswith("slots: dropped 1 of 1 freed slots: 6 (")
    if [record.levelno for record in caplog.records[1:-1]] == [logging.DEBUG] * 2:
        assert last.endswith("; reports of bad frees since the last warning: 2")


@pytest.mark.parametrize("page", [0, -1, 17, 2**31, 2**62, -(2**62)])
def test_pages_that_are_none_are_dropped(page: int) -> None:
    allocator = make(64, 4)
    some(allocator.alloc(16))
    allocator.free_pages([1, page])
    assert allocator.available_size() == 52
    assert allocator.stats()["dropped_frees"] == 1
    strict = make(64, 4, strict=True)
    some(strict.alloc(16))
    with pytest.raises(IndexOwnershipError):
        strict.free_pages([1, page])
    assert strict.available_size() == 48


# resize


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("need_sort", [True, False])
def test_resize_is_a_new_pool_in_the_same_object(page_size: int, need_sort: bool) -> None:
    allocator = make(64, page_size, need_sort, strict=True)
    kept = some(allocator.alloc(40))
    values = kept.tolist()
    allocator.free_group_begin()
    for size in (256, 32, 100):
        allocator.resize(size)
        fresh = make(size, page_size, need_sort, strict=True)
        assert snapshot(allocator) == snapshot(fresh)
        assert (allocator.size, allocator.stats()["size"]) == (size, size)
        assert take(allocator, size // page_size * page_size) == take(fresh, size // page_size * page_size)
        assert allocator.alloc(1) is None
    assert kept.tolist() == values
    with pytest.raises(StateError):
        allocator.free_group_end()


def test_resize_refuses_what_no_pool_can_be_and_changes_nothing() -> None:
    allocator = make(64, 4)
    take(allocator, 8)
    before = snapshot(allocator)
    for size, error in ((0, ConfigError), (-1, ConfigError), (2**31, ConfigError), (1.5, TypeError)):
        with pytest.raises(error):
            allocator.resize(size)  # type: ignore[arg-type]
    assert snapshot(allocator) == before


@pytest.mark.parametrize("need_sort", [True, False])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_group_releases_at_its_end(page_size: int, need_sort: bool) -> None:
    allocator = make(64, page_size, need_sort)
    slots = take(allocator, 64)
    allocator.free_group_begin()
    allocator.free(slots[:16])
    allocator.free(slots[32:48])
    assert allocator.available_size() == 0
    assert all(allocated(allocator, slots))
    assert allocator.alloc(1) is None
    allocator.free_group_end()
    assert allocator.available_size() == 32
    assert take(allocator, 32) == slots[:16] + slots[32:48]


def test_group_collects_by_value() -> None:
    allocator = make(8)
    slots = some(allocator.alloc(8))
    indices = torch.tensor([2, 3])
    array = np.array([4, 5])
    with allocator.free_group():
        allocator.free(indices)
        allocator.free(array)
        allocator.free(slots[6:])
        indices.fill_(1)
        array.fill(1)
        slots.fill_(1)
    assert allocator.release_slots.tolist() == [2, 3, 4, 5, 7, 8]
    assert allocator.stats()["dropped_frees"] == 0


def test_group_as_a_context_nests_with_the_methods() -> None:
    allocator = make(8)
    take(allocator, 8)
    with allocator.free_group():
        allocator.free([1])
        with allocator.free_group():
            allocator.free_group_begin()
            allocator.free([2])
            allocator.free_group_end()
        assert allocator.available_size() == 0
    assert allocator.available_size() == 2


def test_group_releases_when_its_body_raises() -> None:
    allocator = make(8)
    take(allocator, 8)
    with pytest.raises(KeyError, match="mine"), allocator.free_group():
        allocator.free([1, 2])
        raise KeyError("mine")
    assert allocator.available_size() == 2
    allocator.free([3])
    assert allocator.available_size() == 3


def test_wrong_type_in_a_group_raises_at_once() -> None:
    allocator = make(8)
    take(allocator, 8)
    allocator.free_group_begin()
    allocator.free([1])
    with pytest.raises(TypeError):
        allocator.free([1.5])  # type: ignore[list-item]
    allocator.free_group_end()
    assert allocator.available_size() == 1


# Fences


@pytest.mark.parametrize("call", ["alloc", "free", "available_size", "stats", "verify"])
def test_fences_are_polled_by_later_calls(call: str) -> None:
    allocator = make(8)
    take(allocator, 8)
    fence = Fence()
    allocator.free([1, 2], after=fence)
    fence.done = True
    before = fence.queries
    arguments: dict[str, list[Any]] = {"alloc": [1], "free": [[3]]}
    getattr(allocator, call)(*arguments.get(call, []))
    assert fence.queries > before
    passed = fence.queries
    assert allocator.available_size() == {"alloc": 1, "free": 3}.get(call, 2)
    assert fence.queries == passed


@pytest.mark.parametrize(
    "fence",
    [object(), 1, "fence", lambda: True, SimpleNamespace(query=True)],
    ids=["object", "int", "str", "function", "no method"],
)
def test_rejects_fences_without_a_query(fence: Any) -> None:  # noqa: ANN401
    allocator = make(8)
    take(allocator, 8)
    with pytest.raises(TypeError):
        allocator.free([1], after=fence)
    assert allocator.available_size() == 0
    allocator.free([1])
    assert allocator.stats()["dropped_frees"] == 0


def test_fence_that_raises_is_reported_once_and_keeps_its_slots(caplog: pytest.LogCaptureFixture) -> None:
    class BrokenFence:
        broken = True

        def query(self) -> bool:
            if self.broken:
                raise OSError("lost the link")
            return True

    allocator = make(8)
    take(allocator, 8)
    fence = BrokenFence()
    with caplog.at_level(logging.WARNING, logger="kvpool"):
        allocator.free([1, 2], after=fence)
        for _ in range(3):
            assert allocator.available_size() == 0
    assert len(caplog.records) == 1
    assert allocator.stats()["in_use"] == 8
    assert_consistent(allocator)


# Batches


def test_extend_continues_the_last_partial_page() -> None:
    allocator = make(64, 4)
    assert some(allocator.alloc_extend([0, 0], [2, 4], [-1, -1])).tolist() == [4, 5, 8, 9, 10, 11]
    assert some(allocator.alloc_extend([2, 4], [7, 6], [5, 11])).tolist() == [6, 7, 12, 13, 14, 16, 17]


def test_extend_that_is_huge_is_short() -> None:
    allocator = make(64, 4)
    before = snapshot(allocator)
    assert allocator.alloc_extend([0], [65], [-1]) is None
    assert allocator.alloc_extend([0, 0, 0], [2**31 - 1] * 3, [-1, -1, -1]) is None
    for seq_len in (2**31, 2**62, 2**63 - 1):
        with pytest.raises(ConfigError, match=str(seq_len)):
            allocator.alloc_extend([0, 0], [seq_len, seq_len], [-1, -1])
    assert snapshot(allocator) == before


def test_decode_adds_one_token_to_each_request() -> None:
    allocator = make(64, 4)
    first = some(allocator.alloc_extend([0, 0], [3, 4], [-1, -1]))
    assert first.tolist() == [4, 5, 6, 8, 9, 10, 11]
    assert some(allocator.alloc_decode([4, 5], [6, 11])).tolist() == [7, 12]
    assert some(allocator.alloc_decode([5, 6], torch.tensor([7, 12]))).tolist() == [16, 13]
    assert some(allocator.alloc_decode([1], [-1])).tolist() == [20]


@pytest.mark.parametrize(
    ("batch", "error"),
    [
        # Lists of different lengths, lengths that do not fit, and last slots in the middle of nowhere.
        *[(([0], [1, 2], [-1, -1]), ConfigError), (([0, 0], [1, 2], [-1]), ConfigError)],
        *[(([0, 0], [1], [-1, -1]), ConfigError), (([-1], [1], [-1]), ConfigError)],
        *[(([0], [-1], [-1]), ConfigError), (([5], [4], [4]), ConfigError)],
        *[(([2], [4], last_loc), ConfigError) for last_loc in ([6], [4], [-1])],
        # Of `alloc_decode`.
        *[(([0], [4]), ConfigError), (([1, 2], [4]), ConfigError)],
        *[(([-3], [4]), ConfigError), (([3], [4]), ConfigError)],
        # Pages that are not allocated, and one that two requests would continue.
        *[(([0, 2], [3, 4], [-1, slot]), IndexOwnershipError) for slot in (9, 1, 401, 2**31 - 3)],
        (([2, 2], [3, 3], [5, 5]), IndexOwnershipError),
    ],
    ids=str,
)
def test_batches_that_contradict_themselves(batch: Any, error: type[Exception]) -> None:  # noqa: ANN401
    allocator = make(64, 4)
    take(allocator, 4)
    before = snapshot(allocator)
    with pytest.raises(error, match=r"\d"):
        (allocator.alloc_decode if len(batch) == 2 else allocator.alloc_extend)(*batch)
    assert snapshot(allocator) == before


# Questions


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_is_allocated_knows_slots_that_are_live(page_size: int) -> None:
    allocator = make(64, page_size)
    slots = take(allocator, 32)
    asked = [slots[0], slots[-1], slots[-1] + 1, 0, -1, 10**6]
    assert allocated(allocator, asked) == [True, True, False, False, False, False]


def test_stats_tell_free_released_and_fenced_slots() -> None:
    allocator = make(64, 4)
    slots = take(allocator, 30)
    allocator.free(slots[:16])
    allocator.free(slots[16:20], after=Fence())
    stats = allocator.stats()
    assert type(stats) is dict
    assert (stats["size"], stats["page_size"], stats["capacity"]) == (64, 4, 64)
    assert (stats["available"], stats["in_use"], stats["high_water"]) == (48, 16, 32)
    assert (stats["free"], stats["released"], stats["fenced"]) == (32, 16, 4)
    assert stats["dropped_frees"] == 0
    assert stats["bytes"] > 0


def test_free_slots_are_a_picture_and_not_the_pool() -> None:
    allocator = make(8)
    for tensor in (allocator.free_slots, allocator.release_slots):
        assert tensor.dtype is torch.int32
        assert tensor.device.type == devices.current()
        assert tensor.dim() == 1
        tensor.fill_(3)
    assert take(allocator, 8) == list(range(1, 9))


# Several owners


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


# Random histories

COUNT = st.integers(0, 12)
SEEN = ("free", "released", "available", "in_use", "shared", "fenced", "dropped_frees", "high_water")
FORMS: list[Callable[[list[int]], Any]] = [
    list,
    np.array,
    torch.tensor,
    lambda slots: torch.tensor(slots, dtype=torch.int32),
]


class AllocatorHistory(RuleBasedStateMachine):
    """Every operation, misuse included, beside an allocator in host memory that is given plain lists."""

    @initialize(
        page_size=st.sampled_from([1, 1, 2, 4]),
        pages=st.integers(1, 40),
        rest=st.integers(0, 3),
        need_sort=st.booleans(),
        strict=st.booleans(),
    )
    def start(self, page_size: int, pages: int, rest: int, need_sort: bool, strict: bool) -> None:
        size = pages * page_size + rest % page_size
        self.real = make(size, page_size, need_sort, strict=strict)
        self.twin = TokenToKVPoolAllocator(size, "cpu", page_size, need_sort, strict=strict)
        self.everything = list(range(-2, (pages + 2) * page_size))
        self.fences: list[Fence] = []

    def call_both(self, call: Callable[[TokenToKVPoolAllocator], Any]) -> None:
        """Both answer the same, the same error included."""
        found, expected = outcome(lambda: call(self.real)), outcome(lambda: call(self.twin))
        if isinstance(expected, torch.Tensor):
            found, expected = found.tolist(), expected.tolist()
        assert found == expected

    def live_slots(self) -> list[int]:
        """Slots that have owners, or had them until a fence passes."""
        live = self.twin.is_allocated(self.everything).tolist()
        return [slot for slot, is_live in zip(self.everything, live, strict=True) if is_live]

    @rule(need=COUNT, contiguous=st.sampled_from([False, True, "best_fit"]))
    def alloc(self, need: int, contiguous: bool | Literal["best_fit"]) -> None:
        self.call_both(lambda pool: pool.alloc(need, contiguous=contiguous))

    @rule(share=st.floats(0, 1.1))
    def alloc_much(self, share: float) -> None:
        self.call_both(lambda pool: pool.alloc(int(share * pool.size)))

    @precondition(lambda self: self.live_slots())
    @rule(data=st.data(), fenced=st.booleans(), form=st.sampled_from(FORMS))
    def free(self, data: st.DataObject, fenced: bool, form: Callable[[list[int]], Any]) -> None:
        slots = data.draw(st.lists(st.sampled_from(self.live_slots()), min_size=1, max_size=20))
        fence = data.draw(st.sampled_from([Fence(), *self.fences])) if fenced else None
        self.fences += [fence] if fence else []
        self.call_both(lambda pool: pool.free(form(slots) if pool is self.real else slots, after=fence))

    @rule(data=st.data(), anything=st.booleans())
    def share(self, data: st.DataObject, anything: bool) -> None:
        live = self.live_slots()
        slots = st.integers(-3, 180) if anything or not live else st.sampled_from(live)
        given = data.draw(st.lists(slots, max_size=8))
        self.call_both(lambda pool: pool.share(given))

    @rule(slots=st.lists(st.integers(-3, 180), max_size=8))
    def free_anything(self, slots: list[int]) -> None:
        self.call_both(lambda pool: pool.free(slots))

    @rule(share=st.floats(0, 1))
    def free_much(self, share: float) -> None:
        slots = self.live_slots()
        self.call_both(lambda pool: pool.free(slots[: int(share * len(slots))][::-1]))

    @precondition(lambda self: self.fences)
    @rule(data=st.data())
    def fence_passes(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.fences)).done = True

    @rule(name=st.sampled_from(["free_group_begin", "free_group_end", "merge_and_sort_free"]))
    def group_or_merge(self, name: str) -> None:
        self.call_both(lambda pool: getattr(pool, name)())

    @rule(data=st.data())
    def extend(self, data: st.DataObject) -> None:
        size = self.twin.page_size
        prefix_lens, seq_lens, last_loc = [], [], []
        for _ in range(data.draw(st.integers(0, 3))):
            prefix = data.draw(st.integers(0, 9))
            candidates = [slot for slot in self.live_slots() if (slot + 1) % size == prefix % size]
            if prefix % size and candidates:
                last_loc.append(data.draw(st.sampled_from(candidates)))
            else:
                last_loc.append(data.draw(st.integers(-1, 90)))
            prefix_lens.append(prefix)
            seq_lens.append(prefix + data.draw(st.integers(1, 9)))
        self.call_both(lambda pool: pool.alloc_extend(prefix_lens, seq_lens, last_loc))

    @rule(sure=st.integers(0, 5))
    def clear(self, sure: int) -> None:
        if sure == 0:
            self.call_both(lambda pool: pool.clear())

    @invariant()
    def check_same(self) -> None:
        if not hasattr(self, "real"):
            return
        assert_consistent(self.real)
        found, expected = snapshot(self.real), snapshot(self.twin)
        assert {name: found[name] for name in SEEN} == {name: expected[name] for name in SEEN}
        assert allocated(self.real, self.everything) == allocated(self.twin, self.everything)


def test_random_histories_agree() -> None:
    run_state_machine_as_test(AllocatorHistory)
