"""BatchPlanner: random histories of all operations, misuse included, beside one in host memory.

That one is compared with a naive planner by Rust: `tests/rust/histories/planner.rs`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import devices
import numpy as np
import pytest
import torch
from common import Fence, outcome
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
from planner_pair import Pair, Side, compare_field

from kvpool import BatchPlan, IndexOwnershipError, StaleBufferError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

pytestmark = pytest.mark.usefixtures("device")

FORMS: list[Callable[[Sequence[int]], Any]] = [
    list,
    tuple,
    lambda values: np.array(values, dtype=np.int32),
    lambda values: np.array(values, dtype=np.int64),
    lambda values: torch.tensor(values, dtype=torch.int64),
    lambda values: devices.to_current(torch.tensor(values, dtype=torch.int32)),
]
form = st.sampled_from(FORMS)
anything = st.integers(-2, 12) | st.sampled_from([2**31, 2**40, -(2**40)])
wild = st.lists(anything, max_size=4)

SHOWN = ("seq_lens", "kv_indices", "block_table")
"""Fields that are looked at again and again."""


OPTIONS = st.fixed_dictionaries(
    {
        "need_sort": st.booleans(),
        "strict": st.booleans(),
        "max_reqs": st.integers(2, 6),
        "max_context_len": st.integers(6, 40),
        "padding_row": st.sampled_from([True, True, True, False]),
        "max_batch_size": st.integers(2, 6),
        "max_tokens": st.integers(8, 80),
        "kv_indices": st.sampled_from([True, True, False]),
        "block_table": st.sampled_from([True, True, False]),
    }
)


class PlannerHistory(RuleBasedStateMachine):
    """Every operation on a planner, its pools, and their naive models."""

    @initialize(page_size=st.sampled_from([1, 1, 2, 4, 16]), pages=st.integers(2, 24), options=OPTIONS)
    def start(self, page_size: int, pages: int, options: dict[str, Any]) -> None:
        self.pair = Pair(pages * page_size, page_size, **options)
        self.twin = self.pair.twin
        self.fences: list[Fence] = []
        self.cache: list[list[int]] = []
        self.last: tuple[BatchPlan, dict[str, Any]] | None = None
        self.is_changed = False

    def call_both(self, call: Callable[[Side, bool], Any]) -> tuple[Any, Any]:
        """The answers of both planners, the same error included; the second one gets plain lists."""
        found, expected = outcome(lambda: call(self.pair, True)), outcome(lambda: call(self.twin, False))
        if isinstance(expected, type):
            assert found is expected
            # A strict pool tells of what others have freed when it has freed the rest.
            self.is_changed |= expected is IndexOwnershipError
            return None, None
        return found, expected

    def planned(self, real: Sequence[tuple[int, int, int]], call: Callable[[Side, bool], Any]) -> None:
        plan, other = self.call_both(call)
        self.pair.planned(plan, other, real)
        if plan is not None:
            if self.last is not None:
                with pytest.raises(StaleBufferError):
                    _ = self.last[0].block_table
            expected = {name: listed(getattr(other, name)) for name in SHOWN}
            self.last, self.is_changed = (plan, expected), False

    def live(self) -> list[int]:
        return list(self.twin.lens())

    def full_pages(self, row: int) -> list[int]:
        """The slots of a request but for those of its last, partial page."""
        size = self.twin.allocator.page_size
        slots: list[int] = self.twin.table.read(row, self.twin.planner.seq_len(row) // size * size).tolist()
        return slots

    def batch(self, data: st.DataObject) -> list[int]:
        rows: list[int] = data.draw(st.permutations(self.live()))
        return rows[: data.draw(st.integers(0, self.twin.planner.max_batch_size))]

    def fence(self, data: st.DataObject) -> Fence | None:
        fence: Fence | None = data.draw(st.sampled_from([None, None, Fence(), *self.fences[-1:]]))
        if fence is not None:
            self.fences.append(fence)
        return fence

    @rule(n=st.integers(1, 3))
    def take_rows(self, n: int) -> None:
        assert self.pair.table.alloc(n) == self.twin.table.alloc(n)

    def prefix(self, data: st.DataObject, row: int) -> list[int]:
        """Slots that a new request may begin with, cached or of another request."""
        sources = [*self.cache, *(self.full_pages(other) for other in self.live() if other != row)]
        sources = [slots for slots in sources if slots]
        if self.twin.planner.seq_len(row) or not sources:
            return []
        slots: list[int] = data.draw(st.sampled_from(sources))
        return slots[: self.twin.allocator.page_size * data.draw(st.integers(0, 3))]

    @rule(data=st.data(), form=form)
    def extend(self, data: st.DataObject, form: Callable[[Sequence[int]], Any]) -> None:
        rows = self.batch(data)
        with_prefixes = data.draw(st.booleans())
        slots = [self.prefix(data, row) if with_prefixes else [] for row in rows]
        had = [self.twin.planner.seq_len(row) for row in rows]
        prefix_lens = [len(prefix) or length for length, prefix in zip(had, slots, strict=True)]
        seq_lens = [prefix + data.draw(st.integers(0, 14)) for prefix in prefix_lens]

        def call(side: Side, is_real: bool) -> Any:  # noqa: ANN401
            of = form if is_real else list
            given = [of(prefix) if prefix else None for prefix in slots] if with_prefixes else None
            return side.planner.extend(of(rows), of(prefix_lens), of(seq_lens), given)

        self.planned([*zip(rows, prefix_lens, seq_lens, strict=True)], call)

    @rule(
        rows=wild, prefix_lens=wild, seq_lens=wild, slots=st.none() | st.lists(st.none() | wild, max_size=3)
    )
    def extend_anything(
        self,
        rows: list[int],
        prefix_lens: list[int],
        seq_lens: list[int],
        slots: list[list[int] | None] | None,
    ) -> None:
        real = [*zip(rows, prefix_lens, seq_lens, strict=False)]
        self.planned(real, lambda side, _: side.planner.extend(rows, prefix_lens, seq_lens, slots))

    def decoded(self, rows: Any, seq_lens: Any, tokens: int, pad_to: Any, form: Any = list) -> None:  # noqa: ANN401
        def call(side: Side, is_real: bool) -> Any:  # noqa: ANN401
            of = form if is_real else list
            return side.planner.decode(of(rows), of(seq_lens), tokens, pad_to=pad_to)

        self.planned([(row, seq - tokens, seq) for row, seq in zip(rows, seq_lens, strict=False)], call)

    @rule(data=st.data(), form=form, tokens=st.sampled_from([1, 1, 1, 2, 5]))
    def decode(self, data: st.DataObject, form: Callable[[Sequence[int]], Any], tokens: int) -> None:
        rows = self.batch(data)
        pad_to = data.draw(st.none() | st.integers(0, 7) | st.lists(st.integers(0, 7), max_size=4))
        self.decoded(rows, [self.twin.planner.seq_len(row) + tokens for row in rows], tokens, pad_to, form)

    @rule(rows=wild, seq_lens=wild, tokens=st.integers(-1, 3), pad_to=st.none() | st.integers(0, 12))
    def decode_anything(self, rows: list[int], seq_lens: list[int], tokens: int, pad_to: int | None) -> None:
        self.decoded(rows, seq_lens, tokens, pad_to)

    def given_back(self, call: Callable[[Side, bool], object]) -> None:
        self.call_both(call)
        self.is_changed = True

    @rule(data=st.data(), form=form)
    def truncate(self, data: st.DataObject, form: Callable[[Sequence[int]], Any]) -> None:
        rows, fence = self.batch(data), self.fence(data)
        lens = [data.draw(st.integers(0, self.twin.planner.seq_len(row))) for row in rows]
        of = {True: form, False: list}
        self.given_back(lambda side, real: side.planner.truncate(of[real](rows), of[real](lens), after=fence))

    @rule(rows=wild, seq_lens=wild)
    def truncate_anything(self, rows: list[int], seq_lens: list[int]) -> None:
        self.given_back(lambda side, _: side.planner.truncate(rows, seq_lens))

    @rule(data=st.data(), form=form, with_lens=st.booleans())
    def finish(self, data: st.DataObject, form: Callable[[Sequence[int]], Any], with_lens: bool) -> None:
        rows, fence = self.batch(data)[:2], self.fence(data)
        lens = [self.twin.planner.seq_len(row) for row in rows] if with_lens else None

        def call(side: Side, is_real: bool) -> None:
            of = form if is_real else list
            side.planner.finish(of(rows), None if lens is None else of(lens), after=fence)

        self.given_back(call)

    @rule(rows=wild, seq_lens=st.none() | wild)
    def finish_anything(self, rows: list[int], seq_lens: list[int] | None) -> None:
        self.given_back(lambda side, _: side.planner.finish(rows, seq_lens))

    @precondition(lambda self: len(self.live()) > 1)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        src, dst = data.draw(st.permutations(self.live()))[:2]
        self.fork_anything(src, dst, data.draw(st.integers(0, self.twin.planner.seq_len(src))))

    @rule(src=anything, dst=anything, seq_len=anything)
    def fork_anything(self, src: int, dst: int, seq_len: int) -> None:
        answers = self.call_both(lambda side, _: side.planner.fork(src, dst, seq_len))
        found, expected = (answer and [slots.tolist() for slots in answer] for answer in answers)
        assert found == expected
        self.is_changed |= found is not None

    @rule(n=st.integers(1, 20))
    def cache_slots(self, n: int) -> None:
        found, expected = (side.allocator.alloc(n) for side in (self.pair, self.twin))
        assert listed(found) == listed(expected)
        size = self.twin.allocator.page_size
        if expected is not None:
            first = expected.tolist()[::size]
            self.cache.append([slot + offset for slot in first for offset in range(size)])

    @rule(data=st.data())
    def cache_request(self, data: st.DataObject) -> None:
        for row in self.batch(data)[:1]:
            slots = self.full_pages(row)
            if not isinstance(outcome(lambda: self.twin.allocator.share(slots)), type):  # noqa: B023
                self.pair.allocator.share(slots)
                self.cache.append(slots)
            else:
                with pytest.raises(IndexOwnershipError):
                    self.pair.allocator.share(slots)

    @precondition(lambda self: self.cache)
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        slots, fence = self.cache.pop(data.draw(st.integers(0, len(self.cache) - 1))), self.fence(data)
        self.call_both(lambda side, _: side.allocator.free(slots, after=fence))

    @rule(data=st.data(), sure=st.integers(0, 3))
    def free_slots_of_a_request(self, data: st.DataObject, sure: int) -> None:
        for row in self.batch(data)[: sure == 0]:
            count = min(data.draw(st.integers(1, 3)), self.twin.planner.seq_len(row))
            slots = self.twin.table.read(row, count).tolist()
            self.call_both(lambda side, _: side.allocator.free(slots))  # noqa: B023

    @rule(data=st.data(), sure=st.integers(0, 3))
    def free_rows_of_requests(self, data: st.DataObject, sure: int) -> None:
        if sure == 0:
            self.pair.free_rows(self.batch(data)[:2])
            self.is_changed = True

    @rule(sure=st.integers(0, 12))
    def clear(self, sure: int) -> None:
        for side in (self.pair, self.twin):
            if sure < 2:
                side.table.clear()
                self.is_changed = True
            if sure < 1:
                side.allocator.clear()
                self.cache.clear()

    @precondition(lambda self: self.fences)
    @rule(data=st.data())
    def fence_passes(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.fences)).done = True

    @invariant()
    def check_same(self) -> None:
        if not hasattr(self, "pair"):
            return
        self.pair.check_same()
        if self.last is None:
            return
        plan, expected = self.last
        for name in SHOWN:
            is_gone = self.is_changed and devices.current() != "cpu" and name != "seq_lens"
            tensor = getattr(plan, name)
            array = (
                getattr(plan.host, name) if not is_gone else tensor if tensor is None else array_of(tensor)
            )
            compare_field(tensor, array, expected[name], name)


def listed(tensor: torch.Tensor | None) -> Any:  # noqa: ANN401
    return None if tensor is None else tensor.tolist()


def array_of(tensor: torch.Tensor) -> Any:  # noqa: ANN401
    array = tensor.cpu().numpy()
    array.setflags(write=False)
    return array


def test_random_histories_agree() -> None:
    examples = 60 if devices.current() == "cpu" else 25
    run_state_machine_as_test(
        PlannerHistory, settings=settings(max_examples=examples, stateful_step_count=80)
    )
