"""Threads: calls are atomic, no slot is in two hands, totals stay right, and long copies let others run.

`KVPOOL_SOAK_S=180` lets threads share pools of every class for so many seconds, with other seeds each time.
"""

from __future__ import annotations

import gc
import itertools
import logging
import os
import sys
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
import torch
from common import MIB, THREADS, some, together, turns_of_others
from shared_pools import Pools, Sizes
from users import users_of

import kvpool

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shared_pools import User

SOAK_S = float(os.environ.get("KVPOOL_SOAK_S", "0"))
LAYOUTS = tuple(itertools.product((1, 16), (False, True)))


def test_long_stores_let_other_threads_run() -> None:
    tokens = 60_000
    pool = kvpool.KVPool(tokens, 1, 8, 32, "cpu", torch.float8_e4m3fn)
    indices, k = torch.arange(1, tokens + 1), torch.ones(tokens, 8, 32)
    assert turns_of_others(lambda: pool.set_kv_buffer(0, indices, k, k)) > 0
    assert pool.k_buffer[0].view(torch.uint8).eq(0x38).sum() == tokens * 256


def test_long_copies_let_other_threads_run() -> None:
    size = 64 * MIB
    chunk = some(kvpool.ChunkPool(1, size, torch.uint8).allocate())
    source = torch.ones(size, 1, dtype=torch.uint8)
    assert turns_of_others(lambda: chunk.copy_from(source)) > 0
    assert chunk.tensor().eq(1).all()


# Every pool at once, and each thread knows what it has


@contextmanager
def frequent_switches() -> Iterator[None]:
    """Lets threads take turns as often as Python can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)


def run_users(pools: Pools, seed: int, steps: int) -> None:
    """Eight threads, each with a user of every kind."""
    groups = [users_of(pools, number, seed) for number in range(THREADS)]

    def work(number: int) -> None:
        for _ in range(steps):
            for user in groups[number]:
                user.step()

    with frequent_switches():
        together(work)
    everybody: list[User] = [user for users in groups for user in users]
    for user in everybody:
        user.finish()
    pools.check_returned(everybody)


@pytest.mark.timeout(300 + SOAK_S)
@pytest.mark.parametrize(("page_size", "strict"), LAYOUTS)
def test_eight_threads_on_one_pool_of_each_class(page_size: int, strict: bool) -> None:
    end = time.monotonic() + SOAK_S / len(LAYOUTS)
    for seed in itertools.count():
        run_users(Pools(Sizes("cpu", page_size, seed % 2 == 0, strict, users=THREADS)), seed, 120)
        if time.monotonic() >= end:
            return


@pytest.mark.timeout(120)
def test_destructors_of_garbage_use_the_pools_in_the_middle_of_calls() -> None:
    pools = Pools(Sizes(users=THREADS))
    collected = itertools.count()

    class Cycle:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            next(collected)
            pools.check()
            slots = pools.allocator.alloc(3)
            if slots is not None:
                pools.allocator.free(slots)
            if next(collected) < 4000:
                Cycle()

    before = gc.get_threshold()
    gc.set_threshold(20)
    try:
        Cycle()
        run_users(pools, 1, 40)
    finally:
        gc.set_threshold(*before)
        gc.collect()
    assert next(collected) > 100
    assert not pools.allocator.stats()["in_use"]


class ThreadedFence:
    """A fence whose `query` has another thread use the pools, and waits until it has."""

    def __init__(self, pools: Pools, left: int) -> None:
        self._pools = pools
        self._left = left
        self._is_busy = threading.Lock()
        self.failures: list[BaseException] = []

    def query(self) -> bool:
        # The other thread asks the fences, too.
        if not self._is_busy.acquire(blocking=False):
            return False
        try:
            self._left -= 1
            thread = threading.Thread(target=self._use)
            thread.start()
            thread.join()
            return self._left <= 0
        finally:
            self._is_busy.release()

    def _use(self) -> None:
        try:
            allocator, planner = self._pools.allocator, self._pools.planner
            self._pools.check()
            slots = allocator.alloc(5)
            if slots is not None:
                allocator.free(slots)
            rows = self._pools.table.alloc()
            if rows is not None:
                if planner.extend(rows, [0], [9]) is None:
                    self._pools.table.free(rows)
                else:
                    planner.finish(rows)
        except BaseException as error:  # noqa: BLE001 - told by the test
            self.failures.append(error)


@pytest.mark.timeout(120)
def test_a_fence_may_wait_for_a_thread_that_uses_the_pools() -> None:
    pools = Pools(Sizes())
    fences = [ThreadedFence(pools, 2 + number) for number in range(THREADS)]

    def work(number: int) -> None:
        for i in range(10):
            slots = pools.allocator.alloc(11)
            assert slots is not None
            pools.allocator.free(slots, after=fences[number] if i == 5 else None)

    together(work)
    while pools.allocator.stats()["fenced"]:
        pools.allocator.available_size()
    assert not [failure for fence in fences for failure in fence.failures]
    assert not pools.allocator.stats()["in_use"]
    pools.check()


class PoolUsingHandler(logging.Handler):
    """A log handler that uses the pools of each record."""

    def __init__(self, pools: Pools) -> None:
        super().__init__()
        self.pools = pools
        self.records = 0

    def emit(self, _record: logging.LogRecord) -> None:
        self.records += 1
        self.pools.check()
        slots = self.pools.allocator.alloc(2)
        if slots is not None:
            self.pools.allocator.free(slots)


@pytest.mark.timeout(120)
def test_a_logging_handler_may_use_the_pools(caplog: pytest.LogCaptureFixture) -> None:
    pools = Pools(Sizes(users=THREADS))
    handler = PoolUsingHandler(pools)

    def work(number: int) -> None:
        for _ in range(20):
            pools.allocator.free([0, 1 << 20])
            pools.table.free(1 << 20)
            pools.pages.free(number + (1 << 20))

    with caplog.at_level(logging.DEBUG, logger="kvpool"), frequent_switches():
        logging.getLogger("kvpool").addHandler(handler)
        try:
            together(work)
        finally:
            logging.getLogger("kvpool").removeHandler(handler)
    assert handler.records == THREADS * 20 * 3
    pools.check()
    assert not pools.allocator.stats()["in_use"]
