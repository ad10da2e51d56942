"""Units of every pool that hands them out: nobody has one twice, numbers add up, and bad frees do no harm."""

from __future__ import annotations

import logging
import random
import threading
import time
from typing import TYPE_CHECKING, Any

import devices
import pytest
from common import cuda_only, together
from pool_table import Case, counted, each, every_pool

import kvpool
from kvpool import IndexOwnershipError

if TYPE_CHECKING:
    from software import Driver

pytestmark = pytest.mark.usefixtures("device")

NO_UNITS = (-1, -(2**63), 10**6, 2**31, 2**32, 2**32 + 1, 2**40, 10**30, -(10**30))
by_number = each("by_number")


def take_all(case: Case, pool: Any) -> list[Any]:  # noqa: ANN401
    return case.taken(pool, pool.stats()["capacity"])


@every_pool
def test_stats_are_what_their_type_says(case: Case) -> None:
    pool = case.make()
    least = sum(tensor.nbytes for tensor in case.tensors(pool)) + case.hidden(pool)
    stats = pool.stats()
    assert type(stats) is dict
    assert stats.keys() == case.stats.__required_keys__
    assert all(type(value) is int for value in stats.values())
    assert least <= stats["bytes"] <= least + (1 << 16)


@every_pool
def test_nothing_is_in_use_after_a_full_cycle(case: Case) -> None:
    pool = case.make()
    for _ in range(3):
        case.use(pool)
    stats = pool.stats()
    for name in ("in_use", "dropped_frees", "stale_uses", "cached", "locked", "pages", "arriving", "states"):
        assert stats.get(name, 0) == 0
    assert stats["capacity"] == stats.get("available", stats["capacity"])


@counted
def test_units_are_handed_out_once_until_the_pool_is_full(case: Case) -> None:
    pool = case.make()
    capacity = pool.stats()["capacity"]
    units = []
    for used in range(capacity):
        stats = pool.stats()
        assert (stats["available"], stats["in_use"], stats["high_water"]) == (capacity - used, used, used)
        units += case.taken(pool, 1)
    numbers = [case.number(unit) for unit in units]
    assert numbers == sorted(set(numbers))
    full = pool.stats()
    assert case.take is not None
    assert [case.take(pool) for _ in range(5)] == [None] * 5
    assert pool.stats() == full
    for left, unit in enumerate(units[1:], 1):
        assert case.give(pool, unit) is None  # type: ignore[func-returns-value]
        stats = pool.stats()
        assert (stats["available"], stats["in_use"], stats["high_water"]) == (left, capacity - left, capacity)
    again = [case.number(unit) for unit in case.taken(pool, capacity - 1)]
    assert sorted(again) == numbers[1:]
    assert case.take(pool) is None


@counted
def test_a_unit_that_was_taken_again_can_be_freed_again(case: Case) -> None:
    pool = case.make()
    units = take_all(case, pool)
    for _ in range(5):
        case.give(pool, units.pop())
        units += case.taken(pool, 1)
    assert pool.stats()["dropped_frees"] == 0
    assert pool.stats()["available"] == 0


@counted
def test_a_unit_freed_twice_is_handed_out_once(case: Case) -> None:
    pool = case.make()
    units = take_all(case, pool)
    before = pool.stats()
    case.give(pool, units[1])
    for _ in range(2):
        case.give(pool, units[1])
    stats = pool.stats()
    assert (stats["available"], stats["in_use"]) == (1, before["in_use"] - 1)
    assert stats["dropped_frees"] == 2
    assert [case.number(unit) for unit in case.taken(pool, 1)] == [case.number(units[1])]
    assert case.take is not None
    assert case.take(pool) is None


@by_number
def test_bad_frees_are_dropped_and_counted(case: Case) -> None:
    pool = case.make()
    assert case.by_number is not None
    (first, *_) = case.taken(pool, 2)
    never = case.number(first) + 2
    before = pool.stats()
    for count, bad in enumerate((*NO_UNITS, never), 1):
        case.by_number(pool, bad)
        assert pool.stats() == {**before, "dropped_frees": count}
    left = [case.number(unit) for unit in case.taken(pool, before["available"])]
    assert left == list(range(never, never + before["available"]))


@counted
def test_strict_raises_before_anything_is_changed(case: Case, caplog: pytest.LogCaptureFixture) -> None:
    pool = case.make(strict=True)
    freed, held = case.taken(pool, 2)
    case.give(pool, freed)
    before = pool.stats()
    with caplog.at_level(logging.DEBUG, logger="kvpool"):
        with pytest.raises(IndexOwnershipError, match=str(case.number(freed))):
            case.give(pool, freed)
        for bad in NO_UNITS if case.by_number else ():
            with pytest.raises(IndexOwnershipError, match=str(bad) if abs(bad) < 2**63 else r"\d"):
                case.by_number(pool, bad)  # type: ignore[misc]
    assert pool.stats() == before
    assert not caplog.records
    case.give(pool, held)
    assert pool.stats()["in_use"] == 0


@counted
@pytest.mark.parametrize("bad", [1.5, "1", None, float("nan"), object()], ids=lambda bad: type(bad).__name__)
def test_rejects_frees_of_a_wrong_type(case: Case, bad: object) -> None:
    pool = case.make()
    take_all(case, pool)
    before = pool.stats()
    with pytest.raises(TypeError):
        case.give(pool, bad)
    assert pool.stats() == before


@counted
def test_one_bad_free_of_a_pool_in_a_second_is_a_warning(
    case: Case, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        begin = time.monotonic()
        pool = case.make()
        units = take_all(case, pool)[:3]
        caplog.clear()
        with caplog.at_level(logging.DEBUG, logger="kvpool"):
            for unit in units:
                case.give(pool, unit)
            assert not caplog.records
            for unit in units:
                case.give(pool, unit)
        levels = [(record.name, record.levelno) for record in caplog.records]
        if time.monotonic() - begin < 1:
            assert levels == [("kvpool", logging.WARNING), *[("kvpool", logging.DEBUG)] * 2]
        for record, unit in zip(caplog.records, units, strict=True):
            assert str(case.number(unit)) in record.getMessage()
            assert (case.freed or pool.unit) in record.getMessage()


@by_number
def test_reports_say_why(case: Case, caplog: pytest.LogCaptureFixture) -> None:
    reports = set()
    assert case.by_number is not None
    for kind in ("outside", "never taken", "freed"):
        pool = case.make()
        (unit,) = case.taken(pool, 1)
        case.give(pool, unit)
        number = {"outside": 10**6, "never taken": case.number(unit) + 1, "freed": case.number(unit)}[kind]
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="kvpool"):
            case.by_number(pool, number)
        reports.add(caplog.records[0].getMessage().replace(str(number), "N", 1))
    assert len(reports) >= 2


@counted
def test_a_handler_that_raises_does_not_undo_a_free(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []

    class Broken(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise RuntimeError(record.getMessage())

    monkeypatch.setattr("sys.unraisablehook", seen.append)
    pool, handler = case.make(), Broken(logging.WARNING)
    (unit,) = case.taken(pool, 1)
    case.give(pool, unit)
    logging.getLogger("kvpool").addHandler(handler)
    try:
        case.give(pool, unit)
    finally:
        logging.getLogger("kvpool").removeHandler(handler)
    assert len(seen) == 1
    stats = pool.stats()
    assert (stats["available"], stats["dropped_frees"]) == (stats["capacity"], 1)


# Threads


@counted
def test_no_unit_is_in_two_hands(case: Case) -> None:
    pool = case.make(strict=True)
    owner: dict[int, int] = {}
    lock = threading.Lock()

    def give(unit: Any, number: int) -> None:  # noqa: ANN401
        with lock:
            assert owner.pop(case.number(unit)) == number
        case.give(pool, unit)

    def work(number: int) -> None:
        choose = random.Random(number)  # noqa: S311
        held: list[Any] = []
        assert case.take is not None
        for _ in range(200):
            unit = case.take(pool)
            if unit is not None:
                with lock:
                    assert owner.setdefault(case.number(unit), number) == number
                held.append(unit)
            if held and (unit is None or choose.random() < 0.5):
                give(held.pop(choose.randrange(len(held))), number)
        for unit in held:
            give(unit, number)

    together(work)
    stats = pool.stats()
    assert (stats["in_use"], stats["available"], stats["dropped_frees"]) == (0, stats["capacity"], 0)
    take_all(case, pool)


@counted
def test_each_unit_is_freed_once_however_many_threads_try(case: Case) -> None:
    pool = case.make()
    units = take_all(case, pool)
    count = len(units)

    def work(number: int) -> None:
        for i in range(count):
            case.give(pool, units[(i + number) % count])

    together(work)
    stats = pool.stats()
    assert (stats["available"], stats["in_use"], stats["dropped_frees"]) == (count, 0, 7 * count)
    take_all(case, pool)


@counted
def test_readers_see_whole_operations(case: Case) -> None:
    pool = case.make()

    def work(number: int) -> None:
        assert case.take is not None
        for _ in range(200):
            if number % 2:
                stats = pool.stats()
                assert stats["available"] + stats["in_use"] == stats["capacity"]
                assert stats["in_use"] <= stats["high_water"]
                if "released" in stats:
                    assert stats["free"] + stats["released"] == stats["available"]
                    pool.verify()
            elif (unit := case.take(pool)) is not None:
                case.give(pool, unit)

    together(work)
    assert pool.stats()["in_use"] == 0


@counted
@cuda_only
def test_bookkeeping_makes_no_driver_call(case: Case, driver: Driver) -> None:
    if case.cls in {kvpool.ReqToTokenPool, kvpool.TokenToKVPoolAllocator}:
        return  # Rows are zeroed, and slots staged.
    pool = case.make()
    for _ in range(3):
        driver.reset_calls()
        units = take_all(case, pool)
        for unit in (*units, units[0]):
            case.give(pool, unit)
        pool.stats()
        assert devices.current() in pool.device
    assert driver.calls() == 0
