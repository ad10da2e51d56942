"""ArenaPlanner on a GPU: one launch a step, no waiting, failures of the driver, captures."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import devices
import pytest
from arena_engine import HYBRID, Engine
from arena_plans import LAYOUT, PLAIN, check_plan, make
from common import MEMORY, NEVER, WAITS, assert_refused_after_fork, failing, needs_fork, on_stream, some

import kvpool
from kvpool import ArenaPlan, ArenaPlanner, CacheArena, DriverError, OutOfMemoryError, StaleError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from software import Driver

pytestmark = pytest.mark.cuda

LONG = {"kvpool_unit_plan_listed": 4096, "kvpool_unit_plan_long": 12_288, "kvpool_unit_plan_longest": 32_760}
"""The kernels whose parameters hold the numbers of a step, by their bytes."""
PARAMS = 88


@pytest.fixture(autouse=True)
def _on_cuda() -> Iterator[None]:
    with devices.on("cuda"):
        yield


def kernel_of(count: int) -> str:
    """The kernel that takes so many numbers."""
    fits = [name for name, size in LONG.items() if PARAMS + 4 * count <= size]
    return fits[0] if fits else "kvpool_unit_plan"


def one_launch(driver: Driver, count: int) -> None:
    """A step was one launch of the kernel for `count` numbers, and a copy where none takes them."""
    kernel = kernel_of(count)
    copies = int(kernel == "kvpool_unit_plan")
    assert driver.calls("cuMemcpyHtoDAsync_v2") == driver.calls("cuEventRecord") == copies
    assert driver.calls("cuLaunchKernel") == driver.calls(f"launch:{kernel}") == 1
    assert [driver.calls(name) for name in (*WAITS, *MEMORY)] == [0] * 7
    assert driver.calls("cuMemcpyDtoHAsync_v2") == 0


def numbers_of(planner: ArenaPlanner, requests: int, units: int) -> int:
    groups = len(planner.arena.layout.groups)
    return 11 * groups + requests * (4 + 9 * groups) + units


# Driver calls


def test_a_step_is_one_launch_and_waits_for_nothing(driver: Driver) -> None:
    planner = make()
    rows = some(planner.alloc(3))
    steps: list[tuple[Callable[[], ArenaPlan | None], list[tuple[int, int, int]]]] = [
        (
            lambda: planner.extend(rows, [0, 0, 0], [9, 1, 17]),
            [(row, 0, n) for row, n in zip(rows, (9, 1, 17), strict=True)],
        ),
        (
            lambda: planner.decode(rows[::-1], [18, 2, 10]),
            [(row, n - 1, n) for row, n in zip(rows[::-1], (18, 2, 10), strict=True)],
        ),
        (
            lambda: planner.decode(rows[:1], [13], 3, pad_to=[2, 4]),
            [(rows[0], 10, 13), (0, 0, 3)],
        ),
    ]
    driver.run()
    driver.set_patience(NEVER)
    plans = []
    for call, batch in steps:
        driver.reset_calls()
        plans.append((some(call()), batch))
        assert driver.calls("cuLaunchKernel") == 1
        assert [driver.calls(name) for name in (*WAITS, *MEMORY)] == [0] * 7
    driver.set_patience(0)
    check_plan(planner, *plans[-1])


@pytest.mark.parametrize("requests", [1, 42, 43, 44, 128, 136, 137, 256, 369, 370])
def test_a_decode_step_is_four_driver_calls(driver: Driver, requests: int) -> None:
    planner = make(PLAIN, 1 << 20, (requests, 16, requests, 4096))
    rows = some(planner.alloc(requests))
    some(planner.extend(rows, [0] * requests, [5] * requests))
    driver.run()
    driver.reset_calls()
    plan = some(planner.decode(rows, [6] * requests))
    kernel = kernel_of(numbers_of(planner, requests, 0))
    assert driver.calls(f"launch:{kernel}") == 1
    if kernel != "kvpool_unit_plan":
        assert driver.calls() == 4
    check_plan(planner, plan, [(row, 5, 6) for row in rows])


def test_a_long_prompt_travels_with_the_launch_or_is_copied(driver: Driver) -> None:
    planner = make(PLAIN, 1 << 23, (2, 1 << 16, 2, 1 << 16))
    for size in LONG.values():
        room = (size - PARAMS) // 4
        for units in (room - numbers_of(planner, 1, 0), room - numbers_of(planner, 1, 0) + 2):
            [row] = some(planner.alloc())
            tokens = units // 2 * 4
            driver.run()
            driver.reset_calls()
            plan = some(planner.extend([row], [0], [tokens]))
            one_launch(driver, numbers_of(planner, 1, units // 2 * 2))
            check_plan(planner, plan, [(row, 0, tokens)])
            planner.finish([row])


def test_truncate_and_finish_make_no_driver_call(driver: Driver) -> None:
    planner = make()
    rows = some(planner.alloc(2))
    some(planner.extend(rows, [0, 0], [9, 1]))
    driver.run()
    driver.reset_calls()
    planner.truncate(rows[:1], [8])
    planner.finish(rows)
    assert driver.calls() == 0


def test_arrays_of_the_host_need_no_transfer_and_end_with_a_change(driver: Driver) -> None:
    planner = make()
    rows = some(planner.alloc(2))
    plan = some(planner.extend(rows, [0, 0], [9, 1]))
    driver.run()
    driver.reset_calls()
    before = some(plan.group("window").host("kv_indices")).tolist()
    assert driver.calls() == 0
    planner.truncate(rows[:1], [8])
    assert len(before) == 4
    assert plan.host("seq_lens").tolist() == [9, 1]
    with pytest.raises(StaleError, match="the requests of plan 1 have changed"):
        plan.group("window").host("kv_indices")
    assert some(plan.group("window").kv_indices).tolist() == before


def test_arrays_of_the_host_end_with_a_step_that_is_short(driver: Driver) -> None:
    planner = make(PLAIN, 1 << 14, (2, 4096, 2, 4096))
    [row] = some(planner.alloc())
    plan = some(planner.extend([row], [0], [20]))
    driver.run()
    before = some(plan.group("window").kv_indices).tolist()
    assert planner.extend([row], [20], [4000]) is None
    with pytest.raises(StaleError, match="the requests of plan 1 have changed"):
        plan.group("window").host("out_cache_loc")
    assert some(plan.group("window").kv_indices).tolist() == before
    assert some(plan.group("window").kv_indptr).tolist() == [0, 5]


# Failures


def test_a_step_whose_driver_call_fails_changes_nothing_and_works_again(driver: Driver) -> None:
    """A failure at each of its driver calls; what lay behind windows may be free."""
    for padding in (None, 4):
        planner = make()
        rows = some(planner.alloc(3))
        lens = [7, 4, 1]
        some(planner.extend(rows, [0] * 3, lens))
        answers: list[Any] = []
        failures = 0

        def state(planner: ArenaPlanner = planner, rows: list[int] = rows) -> list[Any]:
            return [planner.seq_len(row) for row in rows] + [
                {at: unit for at, unit in planner.units(row, group.name).items() if at > 1}
                for row in rows
                for group in LAYOUT.groups
            ]

        def call(
            planner: ArenaPlanner = planner,
            rows: list[int] = rows,
            padding: int | None = padding,
            answers: list[Any] = answers,
        ) -> None:
            lens = [planner.seq_len(row) + 1 for row in rows]
            answers[:] = [planner.decode(rows, lens, pad_to=padding), lens]

        for error in failing(driver, call):
            if error is not None:
                failures += 1
                assert "failed with CUDA_ERROR" in str(error)
                planner.verify()
                call()
            plan, after = answers
            extra = [(0, 0, 1)] if padding else []
            check_plan(planner, plan, [(row, n - 1, n) for row, n in zip(rows, after, strict=True)] + extra)
            assert state()[:3] == after
        assert failures > 1


def test_leases_and_snapshots_whose_driver_calls_fail_change_nothing(driver: Driver) -> None:
    engine = Engine(HYBRID, 1 << 16)
    tokens = [*range(8)]
    row, _ = some(engine.begin(tokens, 30))
    units = [engine.planner.units(row, group.name) for group in engine.groups]
    failures = 0
    for error in failing(driver, lambda: engine.publish(row)):
        if error is not None:
            failures += 1
            assert "failed with CUDA_ERROR" in str(error)
            assert [engine.planner.units(row, group.name) for group in engine.groups] == units
            assert engine.cache.stats()["cached"] == 0
        engine.verify()
    assert failures > 0
    engine.check(row, 8)
    [other] = some(engine.planner.alloc())
    failures = 0
    lease = engine.cache.match([*tokens, 9])

    def extend() -> None:
        if engine.planner.seq_len(other) == 0:
            some(engine.planner.extend([other], [8], [9], prefixes=[lease]))

    for error in failing(driver, extend):
        if error is not None:
            failures += 1
            assert engine.planner.seq_len(other) == 0
            assert engine.planner.units(other, "state") == {}
        engine.verify()
    assert failures > 1
    engine.tokens[other] = [*tokens, 9]
    engine.check(other, 8)


def test_a_planner_that_has_no_memory_leaves_nothing(driver: Driver) -> None:
    arena = CacheArena(PLAIN, 1 << 16, "cuda")
    gc.collect()
    before = driver.device_bytes(), driver.page_locked_bytes()
    driver.set_capacity(before[0] + (1 << 20))
    with pytest.raises(OutOfMemoryError, match=r"\d"):
        ArenaPlanner(arena, 64, 1 << 16, 64, 64)
    gc.collect()
    assert (driver.device_bytes(), driver.page_locked_bytes()) == before


def test_tensors_of_a_plan_outlive_their_planner(driver: Driver) -> None:
    gc.collect()
    before = driver.device_bytes(), driver.page_locked_bytes()
    planner: Any = make()
    plan: Any = planner.extend(planner.alloc(2), [0, 0], [5, 2])
    kept = plan.group("full").kv_indptr
    del planner, plan
    gc.collect()
    assert kept.tolist() == [0, 2, 3]
    assert driver.device_bytes() > before[0]
    del kept
    gc.collect()
    assert (driver.device_bytes(), driver.page_locked_bytes()) == before


def test_a_step_within_a_capture_is_refused(driver: Driver) -> None:
    planner = make()
    rows = some(planner.alloc(2))
    some(planner.extend(rows, [0, 0], [5, 2]))
    driver.run()
    stream = driver.stream()
    with on_stream(stream):
        driver.begin_capture(stream)
        with pytest.raises(DriverError, match="of which the host keeps a copy, cannot be captured"):
            planner.decode(rows, [6, 3])
        driver.end_capture(stream)
    assert [planner.seq_len(row) for row in rows] == [5, 2]


@needs_fork
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_planner_cannot_be_used_after_a_fork() -> None:
    planner = make()
    rows = some(planner.alloc(2))
    some(planner.extend(rows, [0, 0], [5, 2]))
    calls: list[Callable[[], object]] = [
        lambda: planner.decode(rows, [6, 3]),
        lambda: planner.extend(rows, [5, 2], [7, 4]),
    ]
    assert_refused_after_fork(calls, lambda: planner.stats()["tokens"] != 7)


def test_a_planner_is_on_the_device_of_its_arena() -> None:
    planner = make()
    assert planner.device == str(planner.arena.device) == "cuda:0"
    assert kvpool.ArenaPlanner(CacheArena(PLAIN, 1 << 16, "cpu"), 1, 8, 1, 8).device == "cpu"
