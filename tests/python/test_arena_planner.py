"""ArenaPlanner: units and metadata of every group, against a naive planner; misuse, shortage, padding."""

from __future__ import annotations

import gc
import random
import threading
import weakref
from typing import TYPE_CHECKING, Any

import devices
import pytest
from arena_plans import LAYOUT, PAGE, PLAIN, Naive, check_plan, make, numbers

import kvpool
from kvpool import (
    ArenaPlan,
    ArenaPlanner,
    ArgumentError,
    CacheArena,
    CacheLayout,
    ConfigError,
    Group,
    IndexOwnershipError,
    Plane,
    StaleError,
)

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.usefixtures("device")

# Random histories


class History:
    """Random calls, each compared with the naive planner."""

    def __init__(self, seed: int) -> None:
        self.choose = random.Random(seed)  # noqa: S311 - of a test
        layout, arena_bytes = (
            (LAYOUT, self.choose.choice([1 << 16, 1 << 18])) if seed % 3 else (PLAIN, 1 << 15)
        )
        self.planner = make(layout, arena_bytes)
        self.naive = Naive(self.planner)
        self.cleared: set[int] = set()

    def some_rows(self) -> list[int]:
        return self.choose.sample(sorted(self.naive.lens), self.choose.randint(0, len(self.naive.lens)))

    def alloc(self) -> None:
        count = self.choose.randint(0, 2)
        taken = self.planner.alloc(count)
        assert (taken is None) == (len(self.naive.lens) + count > self.planner.max_requests)
        for row in taken or []:
            self.naive.begin(row)

    def extend(self) -> None:
        longest = self.planner.max_context_len
        rows = self.some_rows()
        olds = [self.naive.lens[row] for row in rows]
        news = [min(old + self.choose.choice([0, 1, 3, 9]), longest) for old in olds]
        plan = self.planner.extend(rows, olds, news)
        self.compare(plan, [*zip(rows, olds, news, strict=True)])

    def decode(self) -> None:
        width = self.choose.choice([1, 1, 1, 3])
        longest = self.planner.max_context_len
        rows = [row for row in self.some_rows() if self.naive.lens[row] + width <= longest]
        pad = self.choose.choice([None, [2, 4, 6]])
        plan = self.planner.decode(rows, [self.naive.lens[row] + width for row in rows], width, pad_to=pad)
        size = len(rows) if pad is None else min(size for size in pad if size >= len(rows))
        batch = [(row, self.naive.lens[row], self.naive.lens[row] + width) for row in rows]
        self.compare(plan, batch + [(0, 0, width)] * (size - len(rows)))

    def compare(self, plan: ArenaPlan | None, batch: list[tuple[int, int, int]]) -> None:
        if not step(self.naive, plan, batch):
            self.cleared -= {row for row, _, _ in batch}

    def truncate(self) -> None:
        rows = [row for row in self.some_rows() if row not in self.cleared]
        lens = [self.choose.randint(max(0, self.naive.lens[row] - 3), self.naive.lens[row]) for row in rows]
        if all(self.naive.can_shrink(row, seq) for row, seq in zip(rows, lens, strict=True)):
            self.planner.truncate(rows, lens)
            for row, seq in zip(rows, lens, strict=True):
                self.naive.shrink(row, seq)
        else:
            with pytest.raises(ArgumentError, match="the token after"):
                self.planner.truncate(rows, lens)

    def finish(self) -> None:
        rows = self.some_rows()[:2]
        self.planner.finish(rows, [self.naive.lens[row] for row in rows])
        for row in rows:
            self.naive.finish(row)
            self.cleared.discard(row)

    def clear(self) -> None:
        if self.choose.random() < 0.8:
            return
        self.planner.arena.clear()
        self.cleared |= {row for row, length in self.naive.lens.items() if length}
        for row in sorted(self.cleared):
            with pytest.raises(StaleError, match="ended when the arena was cleared"):
                self.planner.decode([row], [self.naive.lens[row] + 2])
        for row in self.naive.lens:
            self.naive.begin(row)

    def run(self, steps: int) -> None:
        calls = [self.alloc, self.extend, *[self.decode] * 3, self.truncate, self.finish, self.clear]
        for _ in range(steps):
            self.choose.choice(calls)()
            self.naive.check()
        self.planner.finish([*self.naive.lens])
        stats = self.planner.arena.stats()
        assert stats["available"] == stats["capacity"]


@pytest.mark.parametrize("seed", range(12))
def test_random_steps_are_those_of_a_naive_planner(seed: int) -> None:
    History(seed).run(120)


def step(naive: Naive, plan: ArenaPlan | None, batch: list[tuple[int, int, int]]) -> bool:
    """Do what a plan did, and compare it. Return whether it was short."""
    real = [(row, seq) for row, _, seq in batch if row]
    for row, _ in real:
        naive.trim(row)
    if plan is None:
        return True
    for row, seq in real:
        naive.grow(row, seq)
    check_plan(naive.planner, plan, batch)
    return False


# Steps


def test_a_step_frees_what_lies_behind_windows() -> None:
    planner = make(PLAIN)
    [row] = planner.alloc() or []
    assert planner.extend([row], [0], [32]) is not None
    assert [*planner.units(row, "window")] == [*range(8)]
    # The token at position 32 sees 25 to 32.
    assert planner.decode([row], [33]) is not None
    assert [*planner.units(row, "window")] == [6, 7, 8]
    assert [*planner.units(row, "full")] == [*range(9)]


def test_a_truncation_that_needs_freed_units_names_the_group() -> None:
    planner = make(PLAIN)
    [row] = planner.alloc() or []
    assert planner.extend([row], [0], [32]) is not None
    assert planner.decode([row], [33]) is not None
    message = "33 tokens and, in group window, units from token 24 on; the token after 24 sees token 16"
    with pytest.raises(ArgumentError, match=message):
        planner.truncate([row], [24])
    assert planner.seq_len(row) == 33


def test_kept_tensors_are_those_of_the_next_plan() -> None:
    planner = make(PLAIN)
    [row] = planner.alloc() or []
    before = planner.extend([row], [0], [3])
    assert before is not None
    seq_lens, table = before.seq_lens, before.group("window").block_table
    after = planner.decode([row], [4])
    assert after is not None
    assert numbers(seq_lens) == [4]
    assert after.seq_lens.data_ptr() == seq_lens.data_ptr()
    assert table is not None
    with pytest.raises(StaleError, match="not the last any more"):
        before.seq_lens  # noqa: B018
    with pytest.raises(StaleError, match="not the last any more"):
        before.group("full").host("kv_indices")


def test_a_short_arena_plans_nothing() -> None:
    planner = make(PLAIN, 4096, (5, 4096, 6, 4096))
    one, other = planner.alloc(2) or []
    assert planner.extend([one], [0], [4]) is not None
    naive = [planner.units(one, name) for name in ("full", "window")]
    assert planner.extend([other], [0], [4000]) is None
    assert planner.extend([one, other], [4, 0], [5, 4000]) is None
    assert [planner.units(one, name) for name in ("full", "window")] == naive
    assert planner.seq_len(other) == 0
    assert planner.extend([other], [0], [4]) is not None


def test_rows_are_taken_and_given_back() -> None:
    planner = make()
    assert planner.alloc(0) == []
    assert planner.alloc(6) is None
    rows = planner.alloc(5)
    assert rows == [1, 2, 3, 4, 5]
    assert planner.alloc() is None
    planner.finish(rows[1:3])
    assert planner.alloc(2) == [2, 3]


def test_arrays_that_are_not_wanted_are_not_built() -> None:
    planner = make(kv_indices=False, block_table=False)
    whole = make()
    assert planner.stats()["bytes"] < whole.stats()["bytes"]
    [row] = planner.alloc() or []
    plan = planner.extend([row], [0], [9])
    assert plan is not None
    of = plan.group("window")
    assert of.kv_indices is of.block_table is None
    assert of.host("kv_indices") is None
    assert numbers(of.kv_indptr) == [0, 3]


def test_units_of_a_planner_are_not_freed_by_others(caplog: pytest.LogCaptureFixture) -> None:
    planner = make(PLAIN)
    [row] = planner.alloc() or []
    assert planner.extend([row], [0], [9]) is not None
    units = [*planner.units(row, "full").values()]
    planner.arena.free("full", units)
    assert "held by another owner" in caplog.text
    assert planner.arena.group_stats("full")["dropped_frees"] == 3
    assert [*planner.units(row, "full").values()] == units
    planner.verify()


def test_an_end_of_a_planner_frees_its_units() -> None:
    planner = make(PLAIN)
    arena = planner.arena
    rows = planner.alloc(2) or []
    assert planner.extend(rows, [0, 0], [9, 3]) is not None
    assert arena.group_stats("full")["in_use"] == 4
    ended = weakref.ref(planner)
    del planner
    gc.collect()
    assert ended() is None
    assert arena.group_stats("full")["in_use"] == 0
    arena.verify()


def test_two_planners_share_an_arena() -> None:
    arena = CacheArena(PLAIN, 1 << 15, devices.current())
    planners = [ArenaPlanner(arena, 2, 32, 2, 64) for _ in range(2)]
    for planner in planners:
        rows = planner.alloc(2) or []
        assert planner.extend(rows, [0, 0], [9, 9]) is not None
    one, other = (
        [*planner.units(row, "full").values()] for planner, row in zip(planners, (1, 1), strict=True)
    )
    assert not {*one} & {*other}
    planners[0].finish([1, 2])
    assert arena.group_stats("full")["in_use"] == 6


def test_threads_share_a_planner() -> None:
    planner = make(PLAIN, 1 << 18, (8, 64, 8, 64))
    rows = planner.alloc(8) or []
    failures: list[BaseException] = []

    def work(row: int) -> None:
        try:
            for length in range(60):
                assert planner.decode([row], [length + 1]) is not None
        except BaseException as failure:  # noqa: BLE001 - of any thread
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(row,)) for row in rows]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    planner.verify()
    assert planner.stats()["tokens"] == 8 * 60


UNEVEN = CacheLayout(
    [
        Group("big", "full", [0], [Plane("k", "float32", (64,))]),
        Group("small", "full", [1], [Plane("k", "float32", (16,))]),
        Group("state", "state", [*range(2, 14)], [Plane("recurrent", "float32", (16, 16))]),
    ],
    page_size=PAGE,
)
"""Slabs with other numbers of units in each group, and states that are placed layer by layer."""


def test_units_of_runs_that_cross_slabs_are_held() -> None:
    planner = make(UNEVEN, 1 << 18)
    assert planner.arena.slabs.by_layer("state")
    naive = Naive(planner)
    rows = planner.alloc(3) or []
    for row in rows:
        naive.begin(row)
    lens = [32, 13, 19]
    plan = planner.extend(rows, [0] * 3, lens)
    for row, length in zip(rows, lens, strict=True):
        naive.grow(row, length)
    check_plan(planner, plan, [(row, 0, length) for row, length in zip(rows, lens, strict=True)])
    naive.check()
    for group in UNEVEN.groups:
        for unit in planner.units(rows[0], group.name).values():
            planner.arena.free(group.name, [unit])
    naive.check()
    planner.finish(rows)
    assert planner.arena.stats()["available"] == planner.arena.stats()["capacity"]


def test_slots_must_fit_int32() -> None:
    layout = CacheLayout([Group("full", "full", [0], [Plane("k", "uint8", (1,))])], page_size=4096)
    arena = CacheArena(layout, (2 << 30) + (64 << 20), "cpu")
    with pytest.raises(ConfigError, match="of 4096 entries in group full needs indices beyond"):
        ArenaPlanner(arena, 1, 4096, 1, 4096)


# Misuse


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((0, 48, 6, 64), "max_requests is 0"),
        ((5, 0, 6, 64), "max_context_len is 0"),
        ((5, 48, 0, 64), "max_batch_size is 0"),
        ((5, 48, 6, 0), "max_tokens is 0"),
        ((5, 2**31, 6, 64), "largest int32"),
        ((2**31, 48, 6, 64), "largest int32"),
        ((5, 48, 2**28, 64), "largest int32"),
        ((5, 48, 6, 2**31), "largest int32"),
    ],
)
def test_sizes_must_make_sense(sizes: tuple[int, int, int, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(sizes=sizes)


CALLS: list[tuple[str, type[Exception], Callable[[ArenaPlanner], object]]] = [
    ("has 5 tokens with units; it cannot grow from 4 to 6", ArgumentError, lambda p: p.extend([1], [4], [6])),
    ("has 5 tokens with units; it cannot grow from 5 to 4", ArgumentError, lambda p: p.extend([1], [5], [4])),
    ("it cannot grow from 6 to 7", ArgumentError, lambda p: p.decode([1], [7])),
    ("it cannot grow from -1 to", ArgumentError, lambda p: p.extend([2], [-1], [3])),
    ("3 rows, 2 prefix_lens and 3 seq_lens", ArgumentError, lambda p: p.extend([1, 2, 3], [0, 0], [1, 1, 1])),
    ("2 rows and 1 seq_lens", ArgumentError, lambda p: p.decode([1, 2], [6])),
    ("2 rows and 1 seq_lens", ArgumentError, lambda p: p.truncate([1, 2], [1])),
    ("2 rows and 1 seq_lens", ArgumentError, lambda p: p.finish([1, 2], [1])),
    ("is resolved twice", ArgumentError, lambda p: p.decode([1, 1], [6, 6])),
    ("tokens_per_req is 0", ArgumentError, lambda p: p.decode([1], [6], 0)),
    ("larger than all of pad_to", ArgumentError, lambda p: p.decode([1, 2], [6, 1], pad_to=1)),
    ("more than max_batch_size 6", ArgumentError, lambda p: p.decode([1], [6], pad_to=7)),
    ("more than max_tokens 64", ArgumentError, lambda p: p.decode([2], [40], 40, pad_to=2)),
    ("70 new tokens", ArgumentError, lambda p: p.extend([2, 3], [0, 0], [35, 35])),
    ("longer than max_context_len 48", IndexError, lambda p: p.extend([2], [0], [49])),
    ("row 4 at position 1 is not allocated", IndexOwnershipError, lambda p: p.decode([1, 4], [6, 1])),
    ("row 0 at position 0 is not allocated", IndexOwnershipError, lambda p: p.finish([0])),
    ("6", IndexError, lambda p: p.finish([6])),
    ("cannot be truncated to 6", ArgumentError, lambda p: p.truncate([1], [6])),
    ("cannot be truncated to -1", ArgumentError, lambda p: p.truncate([1], [-1])),
    ("has 5 tokens with units, not 4", ArgumentError, lambda p: p.finish([1], [4])),
    ('there is no group "other"', ArgumentError, lambda p: p.units(1, "other")),
    ("n must not be negative|n is -1", ArgumentError, lambda p: p.alloc(-1)),
]


@pytest.mark.parametrize(("message", "error", "call"), CALLS, ids=[message for message, _, _ in CALLS])
def test_misuse_changes_nothing(
    message: str, error: type[Exception], call: Callable[[ArenaPlanner], object]
) -> None:
    planner = make()
    planner.alloc(3)
    plan = planner.extend([1], [0], [5])
    before = [planner.units(1, group.name) for group in LAYOUT.groups], planner.stats()
    with pytest.raises(error, match=message):
        call(planner)
    assert ([planner.units(1, group.name) for group in LAYOUT.groups], planner.stats()) == before
    planner.verify()
    check_plan(planner, plan, [(1, 0, 5)])


def test_unknown_arrays_are_refused() -> None:
    planner = make()
    planner.alloc()
    plan = planner.extend([1], [0], [5])
    assert plan is not None
    with pytest.raises(ArgumentError, match='no array "kv_indices"; the arrays are positions'):
        plan.host("kv_indices")
    with pytest.raises(ArgumentError, match='no array "positions"; the arrays are out_cache_loc'):
        plan.group("full").host("positions")
    with pytest.raises(ArgumentError, match='no group "other"; the groups are full, window'):
        plan.group("other")


def test_what_it_is_shows() -> None:
    planner = make()
    planner.alloc()
    plan = planner.extend([1], [0], [5])
    assert plan is not None
    assert repr(planner).startswith("ArenaPlanner(max_requests=5, max_batch_size=6, max_tokens=64, device='")
    assert repr(plan) == (
        "ArenaPlan(batch_size=1, num_tokens=5, max_seqlen_q=5, max_seqlen_k=5, padded_batch_size=1)"
    )
    assert repr(plan.group("window")) == "GroupPlan('window', batch_size=1)"
    kinds: list[Any] = [kvpool.ArenaPlan, kvpool.GroupPlan]
    for kind in kinds:
        with pytest.raises(TypeError):
            kind()


def test_a_cleared_request_can_begin_again() -> None:
    planner = make()
    planner.alloc()
    assert planner.extend([1], [0], [5]) is not None
    planner.arena.clear()
    calls: list[Callable[[], object]] = [
        lambda: planner.decode([1], [6]),
        lambda: planner.truncate([1], [4]),
    ]
    for call in calls:
        with pytest.raises(StaleError, match="the 5 tokens of request row 1 at position 0 ended"):
            call()
    assert planner.seq_len(1) == 0
    plan = planner.extend([1], [0], [3])
    check_plan(planner, plan, [(1, 0, 3)])
    planner.arena.clear()
    planner.finish([1], [3])
    assert planner.stats()["rows"] == 0
