"""ChunkPool: memory that is page-locked in steps, on huge pages, or not at all."""

from __future__ import annotations

import gc
import logging
import threading
import time
import weakref
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import devices
import pytest
import torch
from chunk_pools import counts, fill, indices, make, numbers, read, same, take
from common import cuda_only, some
from software import LAUNCH_FAILED, OUT_OF_MEMORY

from kvpool import ChunkPool, ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shared_fixtures import RunSnippet
    from software import Driver

MEMINFO = Path("/proc/meminfo")
# Two and three steps of page-locking, the last of them of two chunks.
LARGE = (66, (1 << 22,))
LARGER = (130, (1 << 22,))
T = TypeVar("T")

pytestmark = pytest.mark.usefixtures("device")


def within(seconds: float, work: Callable[[], T]) -> T:
    """The answer of `work`, which must not take longer."""
    answers: list[T] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            answers.append(work())
        except BaseException as error:  # noqa: BLE001 - raised below
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "it did not return"
    for failure in failures:
        raise failure
    return answers[0]


def eventually(holds: Callable[[], bool], seconds: float = 20) -> bool:
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


def page_locking_threads() -> list[str]:
    """The names of the threads that page-lock."""
    names = []
    for thread in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended
            names.append((thread / "comm").read_text())
    return [name for name in names if name.startswith("kvpool-page-loc")]  # the kernel cuts names


@contextmanager
def page_lock_threads(count: int) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVPOOL_PAGE_LOCK_THREADS", str(count))
        yield


class ProgressRecorder:
    """A `progress` callback that records its calls and their threads."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []
        self.threads: set[int] = set()

    def __call__(self, done: int, total: int) -> None:
        self.calls.append((done, total))
        self.threads.add(threading.get_ident())

    def check(self, total: int) -> None:
        done = [call[0] for call in self.calls]
        assert done
        assert done == sorted(done)
        assert done[-1] == total
        assert all(type(number) is int for call in self.calls for number in call)
        assert {call[1] for call in self.calls} == {total}


@pytest.mark.parametrize("pin_memory", [True, False])
def test_where_nothing_is_registered_all_is_ready(pin_memory: bool) -> None:
    if devices.current() == "cpu" and pin_memory and torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    seen = ProgressRecorder()
    pool = make(4, 12, pin_memory=pin_memory, progress=seen)
    if pool.pin_memory:
        pytest.skip("there is a driver")
    assert pool.wait_page_locked() is True
    assert pool.wait_page_locked(0) is True
    assert pool.wait_page_locked(timeout=5.5) is True
    assert pool.stats()["page_locked"] == 0
    assert not seen.calls
    assert indices(take(pool, 4)) == [0, 1, 2, 3]


@pytest.mark.parametrize("bad", [-1, -0.5, float("nan"), "1", [1], object()])
def test_rejects_bad_timeouts(bad: Any) -> None:  # noqa: ANN401
    is_number = isinstance(bad, int | float)
    words = r"timeout.*(-|NaN|nan)" if is_number else None
    with pytest.raises(ConfigError if is_number else TypeError, match=words):
        make().wait_page_locked(bad)


@devices.cpu_only
def test_a_numa_node_that_cannot_be_raises() -> None:
    pool = make(2, 12, numa_node=0)
    assert pool.numa_node == 0
    assert make().numa_node is None
    chunk = some(pool.allocate())
    fill(chunk, 3)
    assert read(chunk) == [3] * 12
    for node in (10**6, 2**33, -1):
        with pytest.raises(ConfigError, match=rf"numa_node.*{node}"):
            make(2, 12, numa_node=node)
    with pytest.raises(ConfigError, match=r"numa_node.*\d"):
        make(2, 12, numa_node=10**30)
    for bad in ("0", 0.0, [0]):
        with pytest.raises(TypeError):
            make(2, 12, numa_node=bad)


@devices.cpu_only
def test_the_first_node_that_is_not_there_is_named() -> None:
    online = Path("/sys/devices/system/node/online")
    text = online.read_text(encoding="ascii") if online.exists() else "0"
    beyond = int(text.strip().replace("-", ",").split(",")[-1]) + 1
    with pytest.raises(ConfigError, match=rf"numa_node is {beyond}\D"):
        make(2, 12, numa_node=beyond)


def reserved_huge_pages() -> int:
    lines = MEMINFO.read_text(encoding="ascii").splitlines() if MEMINFO.exists() else []
    return sum(int(line.split()[1]) for line in lines if line.startswith("HugePages_Free"))


@devices.cpu_only
@pytest.mark.skipif(reserved_huge_pages() > 0, reason="this machine has reserved huge pages")
def test_without_reserved_huge_pages_others_are_taken(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="kvpool"):
        pool = make(4, 1 << 20, huge_pages=True)
    assert pool.huge_pages is False
    found = [record for record in caplog.records if "huge" in record.getMessage()]
    assert [(record.name, record.levelno) for record in found] == [("kvpool", logging.INFO)]
    for number, chunk in enumerate(take(pool, 4)):
        assert not chunk.tensor().any()
        chunk.tensor().fill_(number)
    assert pool.allocate() is None


@devices.cpu_only
def test_huge_pages_are_not_mentioned_unless_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="kvpool"):
        make(4, 1 << 20, pin_memory=False)
    assert not caplog.records


@cuda_only
def test_a_small_pool_is_page_locked_when_it_is_made(
    driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    before, seen = driver.page_locked_bytes(), ProgressRecorder()
    with caplog.at_level(logging.INFO, logger="kvpool"):
        pool = make(100, 12, where="cpu", progress=seen)
    assert pool.pin_memory is True
    assert pool.wait_page_locked() is True
    assert pool.stats()["page_locked"] == 100
    assert driver.page_locked_bytes() - before >= 100 * 48
    assert driver.calls("cuMemHostRegister_v2") == 1
    assert driver.calls("cuMemHostAlloc") == 0
    seen.check(100)
    found = [record for record in caplog.records if "100" in record.getMessage()]
    assert [(record.name, record.levelno) for record in found] == [("kvpool", logging.INFO)]


@cuda_only
def test_ordinary_memory_on_request(driver: Driver, caplog: pytest.LogCaptureFixture) -> None:
    before = driver.page_locked_bytes()
    with caplog.at_level(logging.INFO, logger="kvpool"):
        pool = make(100, 12, where="cpu", pin_memory=False)
    assert pool.pin_memory is False
    assert pool.wait_page_locked() is True
    assert pool.stats()["page_locked"] == 0
    assert driver.page_locked_bytes() == before
    assert driver.calls("cuMemHostRegister_v2") == 0
    assert not caplog.records
    chunk, device = some(pool.allocate()), numbers(12).cuda()
    chunk.copy_from(device).wait()
    assert same(chunk.tensor(), numbers(12))
    fill(chunk, 4)
    chunk.copy_to(device).wait()
    assert device.tolist() == [4] * 12


@cuda_only
def test_a_pool_on_a_device_is_not_registered(driver: Driver) -> None:
    seen = ProgressRecorder()
    pool = make(4, 12, where="cuda", progress=seen)
    assert (pool.pin_memory, pool.stats()["page_locked"], seen.calls) == (False, 0, [])
    assert pool.wait_page_locked() is True
    assert driver.calls("cuMemHostRegister_v2") == 0


@cuda_only
@pytest.mark.parametrize("threads", [1, 4])
def test_a_large_pool_is_page_locked_in_steps(
    driver: Driver, caplog: pytest.LogCaptureFixture, threads: int
) -> None:
    before, seen = driver.page_locked_bytes(), ProgressRecorder()
    number = LARGER[0]
    with caplog.at_level(logging.INFO, logger="kvpool"), page_lock_threads(threads):
        pool = make(*LARGER, torch.uint8, "cpu", progress=seen)
        first = some(pool.allocate())
        assert 0 < pool.stats()["page_locked"] <= number
        fill(first, 3)
        assert pool.wait_page_locked() is True
    steps = driver.calls("cuMemHostRegister_v2")
    assert steps > 1
    assert pool.stats()["page_locked"] == number
    assert driver.page_locked_bytes() - before >= number * LARGER[1][0]
    assert driver.calls("cuMemHostAlloc") == 0
    seen.check(number)
    assert len(seen.calls) == steps
    assert threading.get_ident() not in seen.threads
    found = [record for record in caplog.records if record.levelno == logging.INFO]
    assert len(found) == len(caplog.records) == steps
    assert all(str(number) in record.getMessage() for record in found)
    chunks = take(pool, number - 1)
    assert sorted(indices([first, *chunks])) == list(range(number))
    assert pool.allocate() is None
    assert first.tensor().eq(3).all()
    assert not chunks[-1].tensor().any()
    del pool, first, chunks, found
    caplog.clear()
    # A thread that has reported its last step may still hold the pool.
    assert eventually(lambda: driver.page_locked_bytes() == before)
    assert driver.calls("cuMemHostUnregister") == steps


@cuda_only
def test_chunks_are_waited_for_while_page_locking_goes_on(driver: Driver) -> None:
    number = LARGE[0]
    with page_lock_threads(1):
        pool = make(*LARGE, torch.uint8, "cpu")
        assert pool.allocate_batch(number + 1) is None
        chunks = within(60, lambda: take(pool, number))
    assert sorted(indices(chunks)) == list(range(number))
    assert pool.allocate() is None
    assert counts(pool) == (0, number, number, 0)
    with page_lock_threads(1):
        pool = make(*LARGE, torch.uint8, "cpu")
        batch = within(60, lambda: some(pool.allocate_batch(number)))
    assert sorted(indices(batch)) == list(range(number))
    assert driver.calls("cuMemHostRegister_v2") > 2


@cuda_only
def test_a_full_pool_answers_none_while_page_locking_goes_on(driver: Driver) -> None:
    number, go = LARGE[0], threading.Event()
    pool = make(*LARGE, torch.uint8, "cpu", progress=lambda _done, _total: go.wait(60))
    try:
        chunks = within(60, lambda: some(pool.allocate_batch(number)))
        # The last step has not been told of, so it goes on.
        assert within(10, lambda: pool.wait_page_locked(0.05)) is False
        assert within(10, lambda: pool.wait_page_locked(0)) is False
        assert within(10, pool.allocate) is None
        assert within(10, lambda: pool.allocate_batch(2)) is None
        pool.free(chunks[7])
        assert some(within(10, pool.allocate)).index == 7
        assert pool.stats()["page_locked"] == number
    finally:
        go.set()
    assert pool.wait_page_locked(60) is True
    assert driver.planned() == 0


@cuda_only
def test_waiting_lets_other_threads_run(driver: Driver) -> None:
    go = threading.Event()
    pool = make(*LARGE, torch.uint8, "cpu", progress=lambda _done, _total: go.wait(60))
    all_wait = threading.Barrier(4)
    answers: list[tuple[bool, bool, bool]] = []

    def wait() -> None:
        in_vain = pool.wait_page_locked(0.001)
        all_wait.wait(60)
        in_the_end = pool.wait_page_locked()
        answers.append((in_vain, in_the_end, go.is_set()))

    waiters = [threading.Thread(target=wait, daemon=True) for _ in range(3)]
    for waiter in waiters:
        waiter.start()
    all_wait.wait(60)
    go.set()
    for waiter in waiters:
        waiter.join(60)
    assert answers == [(False, True, True)] * 3
    assert driver.planned() == 0


@cuda_only
@pytest.mark.parametrize(("left", "code"), [(0, LAUNCH_FAILED), (1, OUT_OF_MEMORY), (2, OUT_OF_MEMORY)])
def test_a_step_that_fails_leaves_ordinary_memory(
    driver: Driver, caplog: pytest.LogCaptureFixture, left: int, code: int
) -> None:
    seen, number = ProgressRecorder(), LARGER[0]
    driver.fail("cuMemHostRegister_v2", left, code)
    with caplog.at_level(logging.INFO, logger="kvpool"), page_lock_threads(1):
        pool = make(*LARGER, torch.uint8, "cpu", progress=seen)
        assert pool.wait_page_locked(60) is True
    assert driver.planned() == 0
    assert 0 < pool.stats()["page_locked"] < number
    seen.check(number)
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert warnings[0].name == "kvpool"
    assert "cuMemHostRegister_v2 failed with CUDA_ERROR" in warnings[0].getMessage()
    chunks = some(pool.allocate_batch(number))
    device = torch.full((64,), 7, dtype=torch.uint8).cuda()
    for chunk in (chunks[0], chunks[63], chunks[64], chunks[128], chunks[129]):
        chunk.copy_from(device).wait()
        assert chunk.tensor(64).eq(7).all()
        assert not chunk.tensor()[64:].any()
        chunk.copy_to(device).wait()


@cuda_only
def test_a_small_pool_that_cannot_be_page_locked(driver: Driver, caplog: pytest.LogCaptureFixture) -> None:
    # What other tests have left must not be collected in between.
    gc.collect()
    before = driver.page_locked_bytes()
    driver.fail("cuMemHostRegister_v2", 0, OUT_OF_MEMORY)
    with caplog.at_level(logging.WARNING, logger="kvpool"):
        pool = make(4, 12, where="cpu")
    assert len(caplog.records) == 1
    assert "CUDA_ERROR_OUT_OF_MEMORY" in caplog.records[0].getMessage()
    assert pool.stats()["page_locked"] == 0
    assert driver.page_locked_bytes() == before
    assert pool.wait_page_locked() is True
    chunks, device = take(pool, 4), numbers(12).cuda()
    for chunk in chunks:
        chunk.copy_from(device).wait()
        assert same(chunk.tensor(), numbers(12))
    assert pool.allocate() is None


@cuda_only
@pytest.mark.parametrize("shape", [LARGE, (4, (12,))])
def test_a_progress_that_raises_changes_nothing(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, tuple[int, ...]]
) -> None:
    seen: list[Any] = []

    def broken(done: int, total: int) -> None:
        raise LookupError(f"{done} of {total}")

    monkeypatch.setattr("sys.unraisablehook", lambda told: seen.append(str(told.exc_value)))
    pool = make(*shape, torch.uint8, "cpu", progress=broken)
    assert pool.wait_page_locked(60) is True
    assert pool.stats()["page_locked"] == shape[0]
    assert seen[-1].strip("'\"") == f"{shape[0]} of {shape[0]}"
    assert len(seen) == driver.calls("cuMemHostRegister_v2")
    assert len(some(pool.allocate_batch(shape[0]))) == shape[0]


@cuda_only
def test_a_progress_that_uses_its_pool(driver: Driver) -> None:
    pools: list[ChunkPool] = []
    answers: list[object] = []
    ready = threading.Event()

    def progress(_done: int, _total: int) -> None:
        ready.wait(60)
        pool = pools[0]
        chunk = some(pool.allocate())
        answers.append((pool.stats()["page_locked"] > 0, pool.wait_page_locked(0), chunk.tensor(3).tolist()))
        pool.free(chunk)

    pools.append(make(*LARGE, torch.uint8, "cpu", progress=progress))
    ready.set()
    assert within(60, pools[0].wait_page_locked) is True
    assert answers == [(True, False, [0, 0, 0])] * len(answers)
    assert len(answers) == driver.calls("cuMemHostRegister_v2")
    assert counts(pools[0])[1] == 0


@cuda_only
@pytest.mark.parametrize("shape", [LARGE, (4, (12,))])
def test_a_progress_is_let_go(driver: Driver, shape: tuple[int, tuple[int, ...]]) -> None:
    seen = ProgressRecorder()
    gone = weakref.ref(seen)
    pool = make(*shape, torch.uint8, "cpu", progress=seen)
    del seen
    assert pool.wait_page_locked(60) is True
    assert driver.calls("cuMemHostRegister_v2") > 0

    def is_gone() -> bool:
        pool.stats()
        return gone() is None

    assert eventually(is_gone)


@cuda_only
@pytest.mark.parametrize("kept", [False, True])
def test_a_pool_dropped_while_it_is_page_locked(driver: Driver, kept: bool) -> None:
    gc.collect()
    before = driver.page_locked_bytes()
    with page_lock_threads(2):
        pool = make(*LARGE, torch.uint8, "cpu")
    tensor = some(pool.allocate()).tensor()
    tensor.fill_(3)
    held = tensor if kept else None
    del pool, tensor
    if held is not None:
        assert eventually(lambda: not page_locking_threads())
        assert held.eq(3).all()
        held = None

    # Memory of earlier tests may be on its way back as well.
    assert eventually(lambda: driver.page_locked_bytes() <= before)


@cuda_only
def test_the_interpreter_may_end_while_page_locking_goes_on(driver: Driver, run_snippet: RunSnippet) -> None:
    assert driver.calls() == 0
    code = """
        import kvpool
        told = []
        pool = kvpool.ChunkPool(66, (1 << 22,), "uint8", progress=lambda *numbers: told.append(numbers))
        print(pool.allocate().index, pool.pin_memory)
    """
    for hidden in (["torch"], ["torch", "numpy"]):
        # Any of the steps of 16 chunks, 64 MiB, may be done first.
        first, is_locked = run_snippet(code, hidden=hidden).split()
        assert (int(first) in range(0, 66, 16), is_locked) == (True, "True")


@cuda_only
def test_a_driver_that_fails_when_it_is_first_used(driver: Driver, run_snippet: RunSnippet) -> None:
    """Whichever call fails, each chunk is handed out, and handed out once."""
    assert driver.calls() == 0
    code = """
        import ctypes, logging, os, sys
        import kvpool
        logging.disable(logging.CRITICAL)
        driver = ctypes.CDLL(None)
        for left in range(1, 16):
            child = os.fork()
            if child == 0:
                driver.soft_fail(None, ctypes.c_long(left), 719)
                pool = kvpool.ChunkPool(4, (8,), "float32")
                found = [pool.allocate() for _ in range(8)]
                indices = [chunk.index for chunk in found if chunk is not None]
                print(left, indices if indices != [0, 1, 2, 3] else "right", flush=True)
                os._exit(0)
            os.waitpid(child, 0)
    """
    lines = run_snippet(code, hidden=["torch"]).splitlines()
    assert lines == [f"{left} right" for left in range(1, 16)]


@cuda_only
@pytest.mark.parametrize("env", [{"KVPOOL_SOFTWARE_DEVICES": "0"}, {"KVPOOL_SOFTWARE_INIT_ERROR": "100"}])
def test_ordinary_memory_where_the_driver_has_no_device(
    driver: Driver, run_snippet: RunSnippet, env: dict[str, str]
) -> None:
    assert driver.calls() == 0
    code = """
        import kvpool
        told = []
        pool = kvpool.ChunkPool(4, (8,), "float32", progress=lambda *numbers: told.append(numbers))
        print(pool.pin_memory, pool.wait_page_locked(), pool.stats()["page_locked"], told)
        print([chunk.index for chunk in pool.allocate_batch(4)], pool.allocate())
    """
    assert run_snippet(code, hidden=["torch"], env=env).splitlines() == [
        "False True 0 []",
        "[0, 1, 2, 3] None",
    ]
