"""BatchPlanner: random histories of all operations, misuse included, against the naive planner."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import devices
import numpy as np
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
from planner_model import ExpectedPlan, Pair, RefusedError, compare_field, compare_plans

from kvpool import IndexOwnershipError, StaleBufferError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvpool import BatchPlan

pytestmark = pytest.mark.usefixtures("device")

FORMS: list[Callable[[Sequence[int]], Any]] = [
    list,
    tuple,
    lambda values: np.array(values, dtype=np.int32),
    lambda values: np.array(values, dtype=np.int64),
    lambda values: torch.tensor(values, dtype=torch.int64),
    lambda values: devices.here(torch.tensor(values, dtype=torch.int32)),
]
form = st.sampled_from(FORMS)
anything = st.integers(-2, 12) | st.sampled_from([2**31, 2**40, -(2**40)])
wild = st.lists(anything, max_size=4)


class PlannerHistory(RuleBasedStateMachine):
    """Every operation on a planner, its pools, and their naive models."""

    @initialize(
        page_size=st.sampled_from([1, 1, 2, 4, 16]),
        pages=st.integers(2, 24),
        need_sort=st.booleans(),
        strict=st.booleans(),
        rows=st.integers(2, 6),
        context=st.integers(6, 40),
        padding_row=st.sampled_from([True, True, True, False]),
        batch=st.integers(2, 6),
        tokens=st.integers(8, 80),
        kv_indices=st.sampled_from([True, True, False]),
        block_table=st.sampled_from([True, True, False]),
    )
    def start(  # noqa: PLR0913
        self,
        *,
        page_size: int,
        pages: int,
        need_sort: bool,
        strict: bool,
        rows: int,
        context: int,
        padding_row: bool,
        batch: int,
        tokens: int,
        kv_indices: bool,
        block_table: bool,
    ) -> None:
        self.pair = Pair(
            pages * page_size,
            page_size,
            need_sort=need_sort,
            strict=strict,
            max_reqs=rows,
            max_context_len=context,
            padding_row=padding_row,
            max_batch_size=batch,
            max_tokens=tokens,
            kv_indices=kv_indices,
            block_table=block_table,
        )
        self.real, self.model = self.pair.planner, self.pair.model
        self.fences: list[Fence] = []
        self.cache: list[list[int]] = []
        self.last: tuple[BatchPlan, ExpectedPlan] | None = None
        self.is_changed = False

    def both(self, real: Callable[[], Any], model: Callable[[], Any]) -> tuple[Any, Any] | None:
        """What both answer, or None when both refused for a reason that there is."""
        try:
            expected = model()
        except RefusedError as refused:
            assert raised_by(real) in refused.kinds  # noqa: PT017
            return None
        except BadFreeError:
            self.is_changed = True
            with pytest.raises(IndexOwnershipError):
                real()
            return None
        return real(), expected

    def planned(self, answers: tuple[Any, Any] | None) -> None:
        if answers is None or answers[1] is None:
            assert answers is None or answers[0] is None
            return
        if self.last is not None:
            with pytest.raises(StaleBufferError):
                _ = self.last[0].block_table
        compare_plans(*answers, self.pair.width, devices.current())
        self.last, self.is_changed = answers, False

    def batch(self, data: st.DataObject) -> list[int]:
        live = sorted(self.model.table.live)
        rows: list[int] = data.draw(st.permutations(live))
        return rows[: data.draw(st.integers(0, self.model.max_batch_size))]

    def fence(self, data: st.DataObject) -> Fence | None:
        fence: Fence | None = data.draw(st.sampled_from([None, None, Fence(), *self.fences[-1:]]))
        if fence is not None:
            self.fences.append(fence)
        return fence

    @rule(n=st.integers(1, 3))
    def take_rows(self, n: int) -> None:
        assert self.pair.table.alloc(n) == self.model.table.alloc(n)

    def prefix(self, data: st.DataObject, row: int) -> list[int]:
        """Slots that a new request may begin with, cached or of another request."""
        sources = [*self.cache]
        for other in sorted(self.model.table.live):
            length = self.model.seq_len(other) // self.model.page_size * self.model.page_size
            if other != row and length:
                sources.append(self.model.table.table[other][:length])
        if self.model.seq_len(row) or not sources:
            return []
        slots: list[int] = data.draw(st.sampled_from(sources))
        return slots[: self.model.page_size * data.draw(st.integers(0, 3))]

    @rule(data=st.data(), form=form)
    def extend(self, data: st.DataObject, form: Callable[[Sequence[int]], Any]) -> None:
        rows = self.batch(data)
        with_prefixes = data.draw(st.booleans())
        slots = [self.prefix(data, row) if with_prefixes else [] for row in rows]
        prefix_lens = [
            len(prefix) or self.model.seq_len(row) for row, prefix in zip(rows, slots, strict=True)
        ]
        seq_lens = [prefix + data.draw(st.integers(0, 14)) for prefix in prefix_lens]
        given = [form(prefix) if prefix else None for prefix in slots] if with_prefixes else None
        self.planned(
            self.both(
                lambda: self.real.extend(form(rows), form(prefix_lens), form(seq_lens), given),
                lambda: self.model.extend(rows, prefix_lens, seq_lens, slots),
            )
        )

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
        self.planned(
            self.both(
                lambda: self.real.extend(rows, prefix_lens, seq_lens, slots),
                lambda: self.model.extend(rows, prefix_lens, seq_lens, slots),
            )
        )

    @rule(data=st.data(), form=form, tokens=st.sampled_from([1, 1, 1, 2, 5]))
    def decode(self, data: st.DataObject, form: Callable[[Sequence[int]], Any], tokens: int) -> None:
        rows = self.batch(data)
        seq_lens = [self.model.seq_len(row) + tokens for row in rows]
        pad_to = data.draw(st.none() | st.integers(0, 7) | st.lists(st.integers(0, 7), max_size=4))
        self.planned(
            self.both(
                lambda: self.real.decode(form(rows), form(seq_lens), tokens, pad_to=pad_to),
                lambda: self.model.decode(rows, seq_lens, tokens, pad_to=pad_to),
            )
        )

    @rule(rows=wild, seq_lens=wild, tokens=st.integers(-1, 3), pad_to=st.none() | st.integers(0, 12))
    def decode_anything(self, rows: list[int], seq_lens: list[int], tokens: int, pad_to: int | None) -> None:
        self.planned(
            self.both(
                lambda: self.real.decode(rows, seq_lens, tokens, pad_to=pad_to),
                lambda: self.model.decode(rows, seq_lens, tokens, pad_to=pad_to),
            )
        )

    @rule(data=st.data(), form=form)
    def truncate(self, data: st.DataObject, form: Callable[[Sequence[int]], Any]) -> None:
        rows, fence = self.batch(data), self.fence(data)
        seq_lens = [data.draw(st.integers(0, self.model.seq_len(row))) for row in rows]
        answers = self.both(
            lambda: self.real.truncate(form(rows), form(seq_lens), after=fence),
            lambda: self.model.truncate(rows, seq_lens, fence),
        )
        self.is_changed |= answers is not None

    @rule(rows=wild, seq_lens=wild)
    def truncate_anything(self, rows: list[int], seq_lens: list[int]) -> None:
        answers = self.both(
            lambda: self.real.truncate(rows, seq_lens), lambda: self.model.truncate(rows, seq_lens)
        )
        self.is_changed |= answers is not None

    @rule(data=st.data(), form=form, with_lens=st.booleans())
    def finish(self, data: st.DataObject, form: Callable[[Sequence[int]], Any], with_lens: bool) -> None:
        rows, fence = self.batch(data)[:2], self.fence(data)
        lens = [self.model.seq_len(row) for row in rows] if with_lens else None
        answers = self.both(
            lambda: self.real.finish(form(rows), None if lens is None else form(lens), after=fence),
            lambda: self.model.finish(rows, lens, fence),
        )
        self.is_changed |= answers is not None

    @rule(rows=wild, seq_lens=st.none() | wild)
    def finish_anything(self, rows: list[int], seq_lens: list[int] | None) -> None:
        answers = self.both(
            lambda: self.real.finish(rows, seq_lens), lambda: self.model.finish(rows, seq_lens)
        )
        self.is_changed |= answers is not None

    @precondition(lambda self: len(self.model.table.live) > 1)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        src, dst = data.draw(st.permutations(sorted(self.model.table.live)))[:2]
        self.forked(src, dst, data.draw(st.integers(0, self.model.seq_len(src))))

    @rule(src=anything, dst=anything, seq_len=anything)
    def fork_anything(self, src: int, dst: int, seq_len: int) -> None:
        self.forked(src, dst, seq_len)

    def forked(self, src: int, dst: int, seq_len: int) -> None:
        answers = self.both(
            lambda: self.real.fork(src, dst, seq_len), lambda: self.model.fork(src, dst, seq_len)
        )
        if answers is not None:
            self.is_changed |= answers[0] is not None
            found, expected = answers
            assert (None if found is None else tuple(slots.tolist() for slots in found)) == expected

    @rule(n=st.integers(1, 20))
    def cache_slots(self, n: int) -> None:
        slots = self.pair.allocator.alloc(n)
        expected = self.model.allocator.alloc(n)
        assert (None if slots is None else slots.tolist()) == expected
        size = self.model.page_size
        if expected is not None:
            first = expected[::size]
            self.cache.append([slot + offset for slot in first for offset in range(size)])

    @rule(data=st.data())
    def cache_request(self, data: st.DataObject) -> None:
        for row in self.batch(data)[:1]:
            length = self.model.seq_len(row) // self.model.page_size * self.model.page_size
            slots = self.model.table.table[row][:length]
            try:
                self.model.allocator.share(slots)
            except BadFreeError:
                with pytest.raises(IndexOwnershipError):
                    self.pair.allocator.share(slots)
            else:
                self.pair.allocator.share(slots)
                self.cache.append(slots)

    @precondition(lambda self: self.cache)
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        slots = self.cache.pop(data.draw(st.integers(0, len(self.cache) - 1)))
        self.free(slots, self.fence(data))

    def free(self, slots: list[int], fence: Fence | None = None) -> None:
        self.both(
            lambda: self.pair.allocator.free(slots, after=fence),
            lambda: self.model.allocator.free(slots, fence),
        )

    @rule(data=st.data(), sure=st.integers(0, 3))
    def free_slots_of_a_request(self, data: st.DataObject, sure: int) -> None:
        for row in self.batch(data)[: sure == 0]:
            self.free(self.model.table.table[row][: self.model.seq_len(row)][: data.draw(st.integers(1, 3))])

    @rule(data=st.data(), sure=st.integers(0, 3))
    def free_rows_of_requests(self, data: st.DataObject, sure: int) -> None:
        if sure == 0:
            self.pair.free_rows(self.batch(data)[:2])
            self.is_changed = True

    @rule(sure=st.integers(0, 12))
    def clear(self, sure: int) -> None:
        if sure < 2:
            self.pair.table.clear()
            self.model.table.clear()
            self.is_changed = True
        if sure < 1:
            self.pair.allocator.clear()
            self.model.allocator.clear()
            self.cache.clear()

    @precondition(lambda self: self.fences)
    @rule(data=st.data())
    def fence_passes(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.fences)).done = True

    @invariant()
    def same(self) -> None:
        if not hasattr(self, "pair"):
            return
        self.pair.same()
        if self.last is None:
            return
        plan, expected = self.last
        for name in ("seq_lens", "kv_indices", "block_table"):
            is_gone = self.is_changed and devices.current() != "cpu" and name != "seq_lens"
            tensor, wanted = getattr(plan, name), getattr(expected, name)
            array = (
                getattr(plan.host, name) if not is_gone else tensor if tensor is None else array_of(tensor)
            )
            compare_field(tensor, array, wanted, name, self.pair.width)


def raised_by(call: Callable[[], object]) -> type[Exception] | None:
    try:
        call()
    except Exception as error:  # noqa: BLE001 - the caller looks at it
        return type(error)
    return None


def array_of(tensor: torch.Tensor) -> Any:  # noqa: ANN401
    array = tensor.cpu().numpy()
    array.setflags(write=False)
    return array


def test_random_histories_agree_with_the_model() -> None:
    examples = 60 if devices.current() == "cpu" else 25
    run_state_machine_as_test(PlannerHistory, settings=settings(max_examples=examples))


class Day:
    """A scheduler that does nothing wrong: prefix cache, speculation, parallel sampling and late frees."""

    def __init__(self, pair: Pair, seed: int) -> None:
        self.pair = pair
        self.choose = random.Random(seed)  # noqa: S311
        self.lens: dict[int, int] = {}
        self.cache: list[list[int]] = []
        self.fences: list[Fence] = []
        self.shorts = 0

    def batch(self, room: int = 0) -> list[int]:
        limit = self.pair.model.table.max_context_len
        able = [row for row, length in self.lens.items() if length + room <= limit]
        return self.choose.sample(able, self.choose.randrange(min(len(able), 8) + 1))

    def fence(self) -> Fence | None:
        if self.choose.random() < 0.7:
            return None
        self.fences.append(Fence())
        return self.fences[-1]

    def prefill(self) -> None:
        size, choose = self.pair.model.page_size, self.choose
        rows = self.batch(40)[:3]
        fresh = self.pair.table.alloc(choose.randrange(3))
        assert fresh == self.pair.model.table.alloc(len(fresh or [])) or fresh is None
        prefixes: list[list[int] | None] = [None] * len(rows)
        prefix_lens = [self.lens[row] for row in rows]
        for row in fresh or []:
            rows.append(row)
            cached = choose.choice(self.cache)[: size * choose.randrange(3)] if self.cache else []
            prefixes.append(cached or None)
            prefix_lens.append(len(cached))
        limit = self.pair.model.table.max_context_len
        seq_lens = [
            min(limit, length + choose.choice([0, 1, size, choose.randrange(40)])) for length in prefix_lens
        ]
        if self.pair.try_extend(rows, prefix_lens, seq_lens, prefixes) is None:
            self.shorts += 1
            seq_lens = [self.pair.planner.seq_len(row) for row in rows]
        self.lens.update(zip(rows, seq_lens, strict=True))

    def decode(self) -> None:
        tokens = self.choose.choice([1, 1, 1, 4])
        rows = self.batch(tokens)
        seq_lens = [self.lens[row] + tokens for row in rows]
        pad_to = self.choose.choice([None, [1, 2, 4, 8]])
        if self.pair.try_decode(rows, seq_lens, tokens, pad_to) is None:
            self.shorts += 1
            return
        if tokens > 1:
            # No more than what was just added: that is in pages of its own.
            seq_lens = [seq - self.choose.randrange(tokens) for seq in seq_lens]
            self.pair.truncate(rows, seq_lens, self.fence())
        self.lens.update(zip(rows, seq_lens, strict=True))

    def fork(self) -> None:
        for src in self.batch()[:1]:
            dst = self.pair.table.alloc()
            if dst is None:
                return
            assert dst == self.pair.model.table.alloc()
            self.lens[dst[0]] = 0
            length = self.choose.randrange(self.lens[src] + 1)
            if self.pair.try_fork(src, dst[0], length) is not None:
                self.lens[dst[0]] = length

    def finish(self) -> None:
        rows = self.batch()[:3]
        if self.choose.random() < 0.3 and rows:
            length = self.lens[rows[0]] // self.pair.model.page_size * self.pair.model.page_size
            self.cache.append(self.pair.row_of(rows[0], length))
            self.pair.share(self.cache[-1])
        self.pair.finish(rows, [self.lens.pop(row) for row in rows], self.fence())

    def evict(self) -> None:
        if self.cache:
            self.pair.free(self.cache.pop(self.choose.randrange(len(self.cache))), self.fence())
        for fence in self.fences[self.choose.randrange(4) :]:
            fence.done = True

    def run(self, steps: int) -> None:
        for _ in range(steps):
            weights, shorts = [5, 8, 1, 1, 1], self.shorts
            self.choose.choices([self.prefill, self.decode, self.fork, self.finish, self.evict], weights)[0]()
            if self.shorts > shorts:
                self.evict()
                self.finish()
        self.pair.finish(list(self.lens), list(self.lens.values()))
        while self.cache or not all(fence.done for fence in self.fences):
            self.evict()


@pytest.mark.parametrize("need_sort", [True, False])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_long_days(page_size: int, need_sort: bool) -> None:
    pages = 250 if page_size == 1 else 22
    pair = Pair(
        pages * page_size,
        page_size,
        need_sort=need_sort,
        strict=True,
        max_reqs=12,
        max_context_len=3 * page_size + 80,
        max_tokens=1200,
    )
    day = Day(pair, page_size + need_sort)
    day.run(600 if devices.current() == "cpu" else 250)
    pair.same()
    assert day.shorts > 0
    assert pair.allocator.available_size() == pages * page_size
    assert pair.table.available_size() == 12
    assert pair.planner.stats()["plans"] > 40
    assert some(pair.planner.extend([], [], [])).num_tokens == 0
