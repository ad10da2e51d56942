"""Every public call of all pools beside captures of CUDA graphs: it works, or it refuses and changes nothing.

Nobody's capture is spoilt by it in either case. The calls are those of `capture_calls`, where none may be
missing. They are made within the capture of their own stream, beside one of another thread or of another
stream, and as the first of a process.
"""

from __future__ import annotations

import ctypes
import os
import re
import threading
import traceback
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from capture_calls import ENTRIES, INSTANCES, POOLS, REFUSES, Entry, Inputs, World, all_entries, surface
from common import on_stream
from software import Driver, SoftwareTorch, memory_of_pytorch

from kvpool import KvPoolError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from conftest import RunSnippet

    Captured = Callable[[Driver, int], AbstractContextManager[None]]

TABLE = all_entries()
KINDS = sorted({re.split(r"[.(: ]", name)[0] for name in TABLE})
each_kind = pytest.mark.parametrize("kind", KINDS)


def test_every_public_call_has_an_entry() -> None:
    calls, properties = surface()
    named = {name.partition(":")[0] for name in TABLE}
    named |= {name for name in properties if name.split(".")[0] in INSTANCES}
    missing = sorted(calls - named)
    assert not missing, f"capture_calls.ENTRIES says nothing of {missing}"
    gone = sorted(name for name in ENTRIES if name.partition(":")[0] not in calls and "dropped" not in name)
    assert not gone, f"capture_calls.ENTRIES has {gone}, which are no calls"


@contextmanager
def captured_elsewhere(driver: Driver, stream: int) -> Iterator[None]:
    """Within it, another thread captures a stream."""
    begun, over, ends = threading.Event(), threading.Event(), [0]

    def capture() -> None:
        driver.begin_capture(stream)
        begun.set()
        over.wait()
        ends.append(driver.end_capture(stream))

    thread = threading.Thread(target=capture)
    thread.start()
    begun.wait()
    try:
        yield
    finally:
        over.set()
        thread.join()
    assert ends[-1] > 0, f"the capture of the other thread ended with {ends[-1]}"


@contextmanager
def captured_here(driver: Driver, stream: int) -> Iterator[None]:
    """Within it, this thread captures a stream."""
    driver.begin_capture(stream)
    graph = 0
    try:
        yield
    finally:
        graph = driver.end_capture(stream)
    assert graph > 0, f"the capture ended with {graph}"


def contents(tensor: torch.Tensor) -> bytes:
    """What the memory of a tensor holds now, whatever is enqueued."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    size = tensor.element_size() * (1 + sum((extent - 1) * step for extent, step in steps))
    target = ctypes.create_string_buffer(size)
    peek = ctypes.CDLL(None).soft_peek
    assert peek(target, ctypes.c_size_t(tensor.data_ptr()), ctypes.c_long(size)) == 0
    return target.raw


def everything(world: World) -> tuple[list[object], list[bytes]]:
    """What a call that refuses must not change."""
    return world.stats(), [contents(tensor) for tensor in world.tensors()]


def attempt(entry: Entry, world: World) -> tuple[Any, Exception | None]:
    """The answer of a call, or the error that it raised, without the frames that would keep memory alive."""
    try:
        return entry.call(world), None
    except Exception as error:  # noqa: BLE001 - the caller looks at it
        return None, error.with_traceback(None)


def assert_refused(error: Exception | None) -> None:
    assert error is not None, "it did not refuse"
    assert isinstance(error, KvPoolError), repr(error)
    assert "captur" in str(error), repr(error)


class Place:
    """A world on a stream, with another stream beside it, and nothing enqueued."""

    def __init__(self, driver: Driver, entry: Entry, *, is_touched: bool = False) -> None:
        self.driver, self.entry = driver, entry
        self.stream, self.other = driver.stream(), driver.stream()
        with memory_of_pytorch():
            inputs = Inputs()
        driver.run()
        with on_stream(self.stream):
            self.world = World(inputs)
            entry.prepare(self.world)
        if is_touched:
            with on_stream(self.other):
                self.world.touch()
        driver.run()
        self.before = everything(self.world)

    def assert_refused(self, error: Exception | None) -> None:
        """The call raised an error of kvpool that tells of captures, and changed nothing."""
        assert_refused(error)
        now = everything(self.world)
        for before, after in zip(self.before[0], now[0], strict=True):
            assert before == after, f"it changed {before} to {after}"
        assert now == self.before, "it changed a tensor"

    def assert_works(self, answer: object, error: Exception | None) -> None:
        """The call did what it documents."""
        assert error is None, repr(error)
        self.driver.run()
        assert self.entry.check is None or self.entry.check(self.world, answer), "it did something else"


def within(driver: Driver, entry: Entry) -> None:
    """A call within the capture of its own stream."""
    place = Place(driver, entry)
    with on_stream(place.stream):
        driver.begin_capture(place.stream)
        answer, error = attempt(entry, place.world)
        graph = driver.end_capture(place.stream)
    assert graph > 0, f"the capture ended with {graph}; the call: {error!r}"
    if entry.own == REFUSES:
        place.assert_refused(error)
    driver.replay(graph, place.stream)
    driver.run()
    if entry.own == REFUSES:
        place.assert_refused(error)
    else:
        place.assert_works(answer, error)


def beside(driver: Driver, entry: Entry, captured: Captured, *, is_touched: bool) -> None:
    """A call beside the capture of another stream; one that has to come after that stream refuses."""
    place = Place(driver, entry, is_touched=is_touched)
    with on_stream(place.stream):
        with captured(driver, place.other):
            answer, error = attempt(entry, place.world)
        if is_touched and error is not None:
            place.assert_refused(error)
        elif is_touched:
            driver.run()
        else:
            place.assert_works(answer, error)


BESIDE: dict[str, Captured] = {"another thread": captured_elsewhere, "this thread": captured_here}

CASES: dict[str, Callable[[Driver, Entry], None]] = {
    "within its own": within,
    "beside that of another thread": partial(beside, captured=captured_elsewhere, is_touched=False),
    "beside that of another stream": partial(beside, captured=captured_here, is_touched=False),
    "beside that of a stream that it knows": partial(beside, captured=captured_elsewhere, is_touched=True),
}


@pytest.mark.cuda
@pytest.mark.parametrize("case", CASES)
@each_kind
def test_a_call_spoils_no_capture_and_works_or_changes_nothing(driver: Driver, kind: str, case: str) -> None:
    failed = []
    for name, entry in TABLE.items():
        if re.split(r"[.(: ]", name)[0] == kind:
            try:
                CASES[case](driver, entry)
            except Exception as error:  # noqa: BLE001 - all are told at the end
                failed.append(f"{name} | {case}: {str(error).splitlines()[0]}")
    assert not failed, "\n".join(failed)


# First uses of a process


def first_pool(key: str, where: str) -> str:
    """What happens if a pool is made first in this process, which has not used the driver yet."""
    driver, entry = Driver(), ENTRIES[key]
    stream, other = driver.stream(), driver.stream()
    with on_stream(stream):
        if where in BESIDE:
            with BESIDE[where](driver, other):
                pool = entry.call(None)  # type: ignore[arg-type]
            del pool
            return "ok"
        driver.begin_capture(stream)
        _, error = attempt(entry, None)  # type: ignore[arg-type]
        graph = driver.end_capture(stream)
    assert graph > 0, f"the capture ended with {graph}; the call: {error!r}"
    if entry.own == REFUSES:
        assert_refused(error)
    else:
        assert error is None, repr(error)
    return "ok"


def first_world(where: str) -> str:
    """What happens if all pools are made and used first beside a capture."""
    torch.cuda._lazy_init = lambda: None
    torch._C._cuda_init()
    driver = Driver()
    with SoftwareTorch():  # type: ignore[no-untyped-call]
        with memory_of_pytorch():
            inputs = Inputs()
        stream, other = driver.stream(), driver.stream()
        driver.run()
        with on_stream(stream):
            with BESIDE[where](driver, other):
                world = World(inputs)
            driver.run()
            world.stats()
    return "ok"


def in_child(work: Callable[[], str]) -> str:
    """What `work` answers or raises in a child of this process."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            words = work()
        except BaseException as error:  # noqa: BLE001 - told to the parent
            words = traceback.format_exception_only(error)[-1].strip()
        os.write(write, words.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as told:
        words = told.read()
    status = os.waitpid(child, 0)[1]
    return words or f"died of signal {status & 0x7F}"


def print_first_uses() -> None:
    """Tries each in a process of its own; for the test below, in an interpreter that has used no driver."""
    for name in POOLS:
        key = name if name.startswith("make_") else f"{name}()"
        for where in ("own", *BESIDE):
            told = in_child(partial(first_pool, key, where))
            print(f"{key}|{where}|{told}", flush=True)  # noqa: T201 - the test reads it
    for where in BESIDE:
        print(f"all|{where}|{in_child(partial(first_world, where))}", flush=True)  # noqa: T201


@pytest.mark.cuda
@pytest.mark.usefixtures("driver")
def test_the_first_call_of_a_process_beside_a_capture(
    run_snippet: RunSnippet, request: pytest.FixtureRequest
) -> None:
    folder = str(request.path.parent)
    told = run_snippet(
        f"sys.path.insert(0, {folder!r})\nimport test_captures\ntest_captures.print_first_uses()"
    )
    lines = [line.split("|", 2) for line in told.splitlines()]
    assert len(lines) == 3 * len(POOLS) + len(BESIDE)
    failed = [" | ".join(line) for line in lines if line[2] != "ok"]
    assert not failed, "\n".join(failed)


@pytest.mark.cuda
@pytest.mark.usefixtures("driver")
def test_a_tensor_without_pytorch_is_not_read_within_a_capture(run_snippet: RunSnippet) -> None:
    run_snippet(
        """
        import ctypes
        import kvpool
        soft = ctypes.CDLL(None)
        soft.soft_stream.restype = ctypes.c_size_t
        tensor = kvpool._kvpool._zeros([4], "float32", "cuda")
        calls = {
            "shape": lambda: tensor.shape, "dtype": lambda: tensor.dtype, "device": lambda: tensor.device,
            "data_ptr": tensor.data_ptr, "__len__": lambda: len(tensor), "cpu": tensor.cpu,
            "__dlpack_device__": tensor.__dlpack_device__, "__dlpack__": lambda: tensor.__dlpack__(stream=-1),
            "numpy": tensor.numpy,
        }
        public = {name for name in vars(kvpool.Tensor) if not name.startswith("_")}
        assert public <= set(calls), public - set(calls)
        for name, call in calls.items():
            stream = ctypes.c_size_t(soft.soft_stream(0))
            kvpool._kvpool._use_stream(stream.value)
            assert soft.soft_begin_capture(stream) == 0
            try:
                call()
                said = "works"
            except (kvpool.KvPoolError, TypeError, BufferError) as error:
                said = type(error).__name__
            end = soft.soft_end_capture(stream)
            expected = {"cpu": "DriverError", "numpy": "BufferError"}
            assert (said, end > 0) == (expected.get(name, "works"), True), (name, said, end)
        """,
        hidden=["torch"],
    )
