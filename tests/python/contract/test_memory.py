"""Memory of every pool: it stays as long as somebody has it, and goes then."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any

import devices
import pytest
import torch
from common import (
    THREADS,
    assert_refused_after_fork,
    assert_steady,
    cuda_only,
    each_failure,
    needs_fork,
    needs_statm,
    on_stream,
    together,
)
from pool_table import Case, every_pool

if TYPE_CHECKING:
    from software import Driver

pytestmark = pytest.mark.usefixtures("device")


@every_pool
def test_tensors_outlive_their_pool(case: Case) -> None:
    pool = case.make()
    kept = case.tensors(pool)
    for value, tensor in enumerate(kept):
        tensor.fill_(value)
    addresses = [tensor.data_ptr() for tensor in kept]
    del pool
    gc.collect()
    others = [case.make() for _ in range(4)]
    for other in others:
        for tensor in case.tensors(other):
            tensor.fill_(99)
    assert [tensor.data_ptr() for tensor in kept] == addresses
    for value, tensor in enumerate(kept):
        assert tensor.eq(value).all()
        tensor.add_(1)
        assert tensor.eq(value + 1).all()


@every_pool
def test_a_pool_in_a_cycle_is_collected(case: Case) -> None:
    class Owner:
        def __init__(self) -> None:
            self.pool = case.make()
            self.tensors = case.tensors(self.pool)
            self.unit = case.take(self.pool) if case.take else None
            self.me = self

    owner = Owner()
    gone: list[weakref.ref[Any]] = [weakref.ref(part) for part in (owner, owner.pool)]
    del owner
    gc.collect()
    assert [ref() for ref in gone] == [None] * 2


@every_pool
@devices.cpu_only
@needs_statm
def test_memory_does_not_grow(case: Case) -> None:
    def once() -> None:
        pool = case.make(**case.big)
        for tensor in case.tensors(pool):
            tensor.fill_(1)
        case.use(case.make(**case.big))

    assert_steady(once, 16 << 20, warm=4, turns=30)


@every_pool
@cuda_only
def test_memory_comes_back_with_the_last_tensor(case: Case, driver: Driver) -> None:
    before = driver.device_bytes(), driver.page_locked_bytes()
    pool = case.make()
    case.use(pool)
    kept = case.tensors(pool)
    for tensor in kept:
        tensor.fill_(3)
    assert driver.device_bytes() > before[0] or not kept
    del pool
    assert driver.device_bytes() > before[0] or not kept
    assert all(tensor.eq(3).all() for tensor in kept)
    kept = []
    tensor = torch.empty(0)
    gc.collect()
    driver.run()
    assert (driver.device_bytes(), driver.page_locked_bytes()) == before


@every_pool
@devices.cpu_only
def test_memory_may_be_dropped_by_another_thread(case: Case) -> None:
    held: list[list[Any]] = []
    for _ in range(THREADS):
        pool = case.make()
        held.append([*case.tensors(pool), *(case.taken(pool, 2) if case.by_number else []), pool])
        del pool

    def work(number: int) -> None:
        for part in held[number]:
            assert not isinstance(part, torch.Tensor) or part.dtype is torch.int32 or not part.any()
        held[number] = []
        gc.collect()

    together(work)


@every_pool
@cuda_only
def test_a_new_pool_is_ready_for_every_stream(case: Case, driver: Driver) -> None:
    with on_stream(driver.stream()):
        pool = case.make()
    assert driver.pending() == 0
    assert pool.stats()["bytes"] >= 0


@every_pool
@cuda_only
def test_every_driver_call_may_fail(case: Case, driver: Driver) -> None:
    """Each call fails in turn: the error is told, the pool still counts right, and nothing is lost."""
    pools: list[Any] = []

    def work() -> None:
        pools.clear()
        pools.append(case.make(**case.full))
        case.use(pools[0])

    failures = 0
    for error in each_failure(driver, work, pools, in_turn=True):
        failures += error is not None
        if pools:
            stats = pools[0].stats()
            if "in_use" in stats:
                assert stats["available"] + stats["in_use"] == stats["capacity"]
                assert stats.get("dropped_frees", 0) == 0
            if hasattr(pools[0], "verify"):
                pools[0].verify()
    assert failures > 5


@every_pool
@cuda_only
@needs_fork
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_after_a_fork_the_device_is_out_of_reach(case: Case) -> None:
    pool = case.make()
    case.use(pool)
    # Numbers of the host are still there.
    assert_refused_after_fork(
        (case.make, *case.needs_device(pool)),
        lambda: pool.stats()["capacity"] == 0 and pool.unit != "buffer",
    )
    case.use(pool)
