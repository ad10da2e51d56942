"""Helpers that the suites of several classes have in common."""

from __future__ import annotations

import gc
import os
import re
import resource
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
import torch
from software import LAUNCH_FAILED, OUT_OF_MEMORY, each_call

import kvpool
from kvpool import DriverError, OutOfMemoryError
from kvpool._kvpool import _use_stream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from software import Driver

T = TypeVar("T")

THREADS = 8
MIB = 1 << 20
NEVER = 1 << 40
"""Queries of an event, so many that its work is always late."""
WAITS = ("cuStreamSynchronize", "cuCtxSynchronize", "cuEventSynchronize")
MEMORY = ("cuMemAlloc_v2", "cuMemFree_v2", "cuMemHostAlloc", "cuMemFreeHost")

STATM = Path("/proc/self/statm")
needs_statm = pytest.mark.skipif(not STATM.exists(), reason="needs /proc to see how much memory is in use")
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

STORAGE = [
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.uint8,
]
"""The dtypes of storage."""

cuda_only = pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.cuda)], indirect=True)
"""For a test of a suite that runs on every device, and has to do with GPUs alone."""


@dataclass
class Fence:
    """Work in flight: passed as soon as a test sets `done`."""

    done: bool = False
    queries: int = 0

    def query(self) -> bool:
        self.queries += 1
        return self.done


def some(value: T | None) -> T:
    """Returns a value that must not be None."""
    assert value is not None
    return value


def outcome(call: Callable[[], Any]) -> Any:  # noqa: ANN401
    """The result of a call, or the class of the exception that it raises."""
    try:
        return call()
    except Exception as error:  # noqa: BLE001 - the caller looks at it
        return type(error)


def together(work: Callable[[int], None]) -> None:
    """Runs `work(0)` to `work(7)` at once, and raises what any of them raised."""
    barrier = threading.Barrier(THREADS)

    def start(number: int) -> None:
        barrier.wait()
        work(number)

    with ThreadPoolExecutor(THREADS) as executor:
        for future in [executor.submit(start, number) for number in range(THREADS)]:
            future.result()


@contextmanager
def on_stream(handle: int) -> Iterator[None]:
    """Works like `torch.cuda.stream`, where there is no PyTorch stream."""
    _use_stream(handle)
    try:
        yield
    finally:
        _use_stream(None)


def resident_bytes() -> int:
    """Memory of the process, when garbage is collected."""
    gc.collect()
    return int(STATM.read_text(encoding="ascii").split()[1]) * resource.getpagesize()


def assert_steady(once: Callable[[], object], most: int, *, warm: int = 50, turns: int = 500) -> None:
    """Doing something again and again costs no more than so many bytes."""
    for _ in range(warm):
        once()
    before = resident_bytes()
    for _ in range(turns):
        once()
    assert resident_bytes() - before < most


def assert_refused_after_fork(calls: Iterable[Callable[[], object]], is_wrong: Callable[[], bool]) -> None:
    """In a child of this process each of the calls says so, and what the host has is not wrong."""
    child = os.fork()
    if child == 0:
        wrong = 0
        for call in calls:
            try:
                call()
            except DriverError as error:
                wrong += "forked" not in str(error)
            except BaseException:  # noqa: BLE001 - the child must end here
                wrong += 1
            else:
                wrong += 1
        os._exit(wrong + is_wrong())
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


FAILED_CALL = r"cu[A-Z]\w+ failed with (CUDA_ERROR_\w+|a code that the driver has no name for) \(\d+\)"


def each_failure(
    driver: Driver,
    work: Callable[[], object],
    made: list[Any],
    *,
    codes: tuple[int, ...] = (LAUNCH_FAILED, OUT_OF_MEMORY),
    in_turn: bool = False,
) -> Iterator[BaseException | None]:
    """Does `work` with a failure at each driver call, which is told; what it `made` loses no memory."""

    def out() -> tuple[int, int]:
        # PyTorch keeps what it once had.
        return driver.device_bytes() - torch.cuda.memory_reserved(), driver.page_locked_bytes()

    def memory(expected: tuple[int, int] | None = None) -> tuple[int, int]:
        made.clear()
        driver.run()
        if out() != expected:
            # Something is in a cycle.
            gc.collect()
            # Memory that could not be zeroed is returned with that of the next pool.
            kvpool.PagePool(1, 1, device="cuda")
        return out()

    work()
    before = memory()
    for error in each_call(driver, work, codes=codes, in_turn=in_turn):
        if error is not None:
            assert isinstance(error, (DriverError, OutOfMemoryError)), repr(error)
            words = r"\d+ bytes" if isinstance(error, OutOfMemoryError) else FAILED_CALL
            assert re.search(words, str(error)), repr(error)
        yield error
        found = memory(before)
        # A call that gives memory back tells nobody of its failure; what it had is lost.
        assert error is None or found == before
        before = found


def failing(driver: Driver, call: Callable[[], object]) -> Iterator[Exception | None]:
    """The exceptions of `call` when the next driver call fails, then the one after, and so on."""
    left, is_over = 0, False
    while not is_over:
        driver.run()
        driver.fail(None, left)
        raised: Exception | None = None
        try:
            call()
        except DriverError as error:
            raised = error.with_traceback(None)
        is_over = driver.planned() > 0
        driver.forget_plans()
        yield raised
        left += 1


def turns_of_others(work: Callable[[], object]) -> int:
    """How often other threads run while `work` does what it does on one thread."""
    threads, interval = kvpool.get_num_threads(), sys.getswitchinterval()
    running, done = threading.Event(), threading.Event()
    turns = 0

    def run() -> None:
        running.set()
        work()
        done.set()

    thread = threading.Thread(target=run)
    try:
        kvpool.set_num_threads(1)
        # Python itself takes the GIL away from nobody now: only who gives it up lets others run.
        sys.setswitchinterval(1000)
        thread.start()
        running.wait()
        while not done.is_set():
            turns += 1
            time.sleep(0)
        thread.join()
    finally:
        sys.setswitchinterval(interval)
        kvpool.set_num_threads(threads)
    return turns
