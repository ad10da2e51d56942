"""Asks a CUDA driver what it does where kvpool counts on it, and compares the answers with the documentation.

It talks to `libcuda.so.1` alone: no kvpool, no PyTorch. The driver made of software has to answer every
question as the documentation promises, so a line that says `DIFFERS` on a GPU shows what to correct: the
software driver first, then whatever of kvpool counted on it.

    python tests/gpu/probe.py

A line is `ok` or `DIFFERS`, the question, and the answer: what the calls returned, and what the end of a
capture returned (0 if it survived, 901 if it was spoilt). Where the documentation leaves a case open, every
answer that it allows is `ok`. It ends with 1 if a line differs and with 2 if there is no driver to ask.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

KERNELS = Path(__file__).resolve().parents[2] / "src" / "kernels" / "table.ptx"
KERNEL = b"kvpool_read_indices"
LONG_KERNELS = KERNELS.with_name("plan_long.ptx")
LONG_KERNEL = b"kvpool_plan_longest"
# Its parameters in words of eight bytes; which of them are addresses, and the two numbers that a plan without
# requests writes there.
LONG_WORDS, LONG_ADDRESSES, LONG_NUMBERS = 32_760 // 8, (9, 10), 16
THREADS = 256

# CUstreamCaptureMode.
GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2
# CUstream_flags and CUevent_flags.
BLOCKING, NON_BLOCKING, NO_TIMING = 0, 1, 2
LEGACY, PER_THREAD = 1, 2
# CUfunction_attribute.
MAX_THREADS, NUM_REGS = 0, 4
# Portable and mapped, of page-locked memory.
FLAGS = 3
HALF = 1 << 20
MUCH = 1 << 30
PAGE = mmap.PAGESIZE
# CUpointer_attribute.
MEMORY_TYPE = 2

SURVIVES = "call 0, end 0"
SPOILS = "call 900, end 901"
ISOLATED = "call 905, end 901"


class NoDriverError(Exception):
    """There is no driver, or it has no device."""


def size(value: int) -> ctypes.c_size_t:
    """An argument as wide as an address."""
    return ctypes.c_size_t(value)


class Driver:
    """The driver, with the context of its first device, a loaded module and a stream whose work is over."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise NoDriverError(str(error)) from None
        for name, arguments in (("cuInit", (0,)), ("cuDeviceGet", (ctypes.byref(ctypes.c_int()), 0))):
            code = self.call(name, *arguments)
            if code:
                raise NoDriverError(f"{name} answers {code}")
        self.context = self.make("cuDevicePrimaryCtxRetain", 0)
        self.enter()
        self.image = KERNELS.read_bytes() + b"\0"
        self.stream = self.make("cuStreamCreate", NON_BLOCKING)
        self.event = self.make("cuEventCreate", NO_TIMING)
        self.require_success("cuEventRecord", size(self.event), size(self.stream))
        self.require_success("cuStreamSynchronize", size(self.stream))
        self.block = self.make("cuMemAlloc_v2", size(2 * HALF))

    def has(self, name: str) -> bool:
        return hasattr(self._library, name)

    def call(self, name: str, *arguments: object) -> int:
        return int(getattr(self._library, name)(*arguments))

    def require_success(self, name: str, *arguments: object) -> None:
        """A call that prepares a question."""
        code = self.call(name, *arguments)
        if code:
            raise RuntimeError(f"{name} answers {code}")

    def make(self, name: str, *arguments: object) -> int:
        """The handle that a function writes to its first argument."""
        made = size(0)
        self.require_success(name, ctypes.byref(made), *arguments)
        return made.value

    def number(self, name: str, *arguments: object) -> tuple[int, int]:
        """The code of a function, and the number that it writes to its first argument."""
        number = ctypes.c_int(-1)
        return self.call(name, ctypes.byref(number), *arguments), number.value

    def enter(self) -> None:
        self.require_success("cuCtxPushCurrent_v2", size(self.context))

    def function(self) -> int:
        """A kernel of a module that nobody else uses."""
        module = self.make("cuModuleLoadData", self.image)
        return self.make("cuModuleGetFunction", size(module), KERNEL)

    def launch(self, function: int, stream: int, given: ctypes.Array[ctypes.c_uint64] | None = None) -> int:
        """Launches a kernel with parameters, or one that has nothing to do: they are zeros."""
        given = given or (ctypes.c_uint64 * 512)()
        params = (ctypes.c_void_p * 1)(ctypes.addressof(given))
        grid = (1, 1, 1, THREADS, 1, 1, 0)
        return self.call("cuLaunchKernel", size(function), *grid, size(stream), params, None)

    def status(self, stream: int) -> tuple[int, int]:
        """The driver's answer about a stream's capture: a code, and whether it is captured."""
        status = ctypes.c_int(-1)
        return self.call("cuStreamIsCapturing", size(stream), ctypes.byref(status)), status.value

    @contextmanager
    def mode(self, mode: int) -> Iterator[None]:
        swapped = ctypes.c_int(mode)
        self.require_success("cuThreadExchangeStreamCaptureMode", ctypes.byref(swapped))
        try:
            yield
        finally:
            self.require_success("cuThreadExchangeStreamCaptureMode", ctypes.byref(swapped))

    def end(self, stream: int) -> int:
        return self.call("cuStreamEndCapture", size(stream), ctypes.byref(size(0)))


def elsewhere(driver: Driver, work: Callable[[], object]) -> object:
    """The result of `work` in another thread with the same context."""
    answers: list[object] = []

    def enter() -> None:
        driver.enter()
        answers.append(work())

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    return answers[0]


@contextmanager
def host_memory() -> Iterator[int]:
    """The address of two halves of host memory, each of whole pages."""
    memory = mmap.mmap(-1, 2 * HALF)
    start = ctypes.c_char.from_buffer(memory)
    try:
        yield ctypes.addressof(start)
    finally:
        del start
        memory.close()


def captured(
    work: Callable[[Driver, int], object], mode: int = GLOBAL, thread: int = GLOBAL, flags: int = NON_BLOCKING
) -> Callable[[Driver], str]:
    """Asks what `work` answers while a new stream is captured, which it gets; and what the end answers."""

    def ask(driver: Driver) -> str:
        stream = driver.make("cuStreamCreate", flags)
        driver.require_success("cuStreamBeginCapture_v2", size(stream), mode)
        with driver.mode(thread):
            answer = work(driver, stream)
        end = driver.end(stream)
        driver.require_success("cuStreamDestroy_v2", size(stream))
        return f"call {answer}, end {end}"

    return ask


def synchronize(driver: Driver, _: int) -> int:
    return driver.call("cuCtxSynchronize")


def allocate(driver: Driver, _: int) -> int:
    made = size(0)
    code = driver.call("cuMemAlloc_v2", ctypes.byref(made), size(HALF))
    return code or driver.call("cuMemFree_v2", made)


def allocate_elsewhere(driver: Driver, stream: int) -> object:
    return elsewhere(driver, lambda: allocate(driver, stream))


def allocate_locked(driver: Driver, _: int) -> int:
    made = size(0)
    code = driver.call("cuMemHostAlloc", ctypes.byref(made), size(HALF), FLAGS)
    return code or driver.call("cuMemFreeHost", made)


def register(driver: Driver, _: int) -> int:
    with host_memory() as start:
        code = driver.call("cuMemHostRegister_v2", size(start), size(HALF), FLAGS)
        return code or driver.call("cuMemHostUnregister", size(start))


def copy_pageable(driver: Driver, _: int) -> int:
    """Copies from pageable memory and back, on a stream that is not captured."""
    stream = size(driver.stream)
    with host_memory() as start:
        sides = size(driver.block), size(start)
        code = driver.call("cuMemcpyHtoDAsync_v2", *sides, size(HALF), stream)
        return code or driver.call("cuMemcpyDtoHAsync_v2", *reversed(sides), size(HALF), stream)


def copy_pageable_elsewhere(driver: Driver, stream: int) -> object:
    return elsewhere(driver, lambda: copy_pageable(driver, stream))


def load_module(driver: Driver, _: int) -> int:
    return driver.call("cuModuleLoadData", ctypes.byref(size(0)), driver.image)


def wait_for_event(driver: Driver, _: int) -> int:
    event = size(driver.event)
    return driver.call("cuEventQuery", event) or driver.call("cuEventSynchronize", event)


def query_captured_event(driver: Driver, stream: int) -> int:
    event = size(driver.make("cuEventCreate", NO_TIMING))
    driver.require_success("cuEventRecord", event, size(stream))
    return driver.call("cuEventQuery", event)


def wait_for_other_stream(driver: Driver, _: int) -> int:
    return driver.call("cuStreamSynchronize", size(driver.stream))


def fork(driver: Driver, *, has_work: bool = True, is_joined: bool) -> str:
    """Pulls another stream into a capture, perhaps with work, and lets the origin await it or not."""
    other = size(driver.make("cuStreamCreate", NON_BLOCKING))
    event = size(driver.make("cuEventCreate", NO_TIMING))
    block = size(driver.make("cuMemAlloc_v2", size(1)))

    def work(driver: Driver, stream: int) -> int:
        driver.require_success("cuEventRecord", event, size(stream))
        code = driver.call("cuStreamWaitEvent", other, event, 0)
        if code == 0 and driver.status(other.value) != (0, 1):
            return -1
        if has_work:
            driver.require_success("cuMemsetD8Async", block, 0, size(1), other)
        if is_joined:
            driver.require_success("cuEventRecord", event, other)
            driver.require_success("cuStreamWaitEvent", size(stream), event, 0)
        return code

    answer = captured(work)(driver)
    driver.require_success("cuMemFree_v2", block)
    return answer


def await_done(driver: Driver, stream: int) -> int:
    """A captured stream awaits an event of one that is not captured, and has done all before it."""
    return driver.call("cuStreamWaitEvent", size(stream), size(driver.event), 0)


def await_work(driver: Driver) -> str:
    """The same with work before the event that takes milliseconds, and is not awaited by anybody."""
    block, event = (
        size(driver.make("cuMemAlloc_v2", size(MUCH))),
        size(driver.make("cuEventCreate", NO_TIMING)),
    )
    for _ in range(10):
        driver.require_success("cuMemsetD8Async", block, 0, size(MUCH), size(driver.stream))
    driver.require_success("cuEventRecord", event, size(driver.stream))
    answer = captured(lambda _, stream: driver.call("cuStreamWaitEvent", size(stream), event, 0))(driver)
    driver.require_success("cuStreamSynchronize", size(driver.stream))
    driver.require_success("cuMemFree_v2", block)
    return answer


def end_elsewhere(driver: Driver, stream: int) -> object:
    return elsewhere(driver, lambda: driver.end(stream))


def ask_legacy(driver: Driver, _: int) -> list[int]:
    """The answers of the default streams while a stream that is tied to them is captured."""
    return [driver.status(handle)[0] for handle in (0, LEGACY, PER_THREAD)]


def use_legacy(driver: Driver, _: int, *, handle: int = 0) -> int:
    return driver.call("cuMemsetD8Async", size(driver.block), 0, size(16), size(handle))


def capture_legacy(driver: Driver) -> str:
    codes = [driver.call("cuStreamBeginCapture_v2", size(handle), GLOBAL) for handle in (0, LEGACY)]
    return "refused" if all(codes) else f"answered {codes}"


def loading_state(driver: Driver, function: int) -> str:
    if not driver.has("cuFuncIsLoaded"):
        return "unknown"
    code, state = driver.number("cuFuncIsLoaded", size(function))
    return ("unloaded", "loaded")[state] if code == 0 else f"error {code}"


def state_after(driver: Driver, attribute: int | None) -> str:
    """Whether a function is loaded after it was looked up, and asked for an attribute."""
    function = driver.function()
    code = 0 if attribute is None else driver.number("cuFuncGetAttribute", attribute, size(function))[0]
    return f"{code}, {loading_state(driver, function)}"


def load_function(driver: Driver) -> str:
    if not driver.has("cuFuncLoad"):
        return "0, unknown"
    function = driver.function()
    return f"{driver.call('cuFuncLoad', size(function))}, {loading_state(driver, function)}"


def launch_loaded(driver: Driver) -> str:
    """A launch in a capture, of a function that was launched before."""
    function = driver.function()
    code = driver.launch(function, driver.stream)
    driver.require_success("cuStreamSynchronize", size(driver.stream))
    return (
        f"call {code}, end 0" if code else captured(lambda _, stream: driver.launch(function, stream))(driver)
    )


def launch_first(driver: Driver) -> str:
    function = driver.function()
    return captured(lambda _, stream: driver.launch(function, stream))(driver)


def launch_long(driver: Driver) -> str:
    """A launch with more than 4 KiB of parameters, and what it wrote, if the driver takes its PTX."""
    module = size(0)
    code = driver.call("cuModuleLoadData", ctypes.byref(module), LONG_KERNELS.read_bytes() + b"\0")
    if code:
        return f"load {code}"
    function = driver.make("cuModuleGetFunction", module, LONG_KERNEL)
    params = (ctypes.c_uint64 * LONG_WORDS)()
    for word in LONG_ADDRESSES:
        params[word] = driver.block
    params[LONG_NUMBERS] = 7 << 32 | 7
    code = driver.launch(function, driver.stream, params)
    found = ctypes.c_int(-1)
    target, stream = size(ctypes.addressof(found)), size(driver.stream)
    driver.require_success("cuMemcpyDtoHAsync_v2", target, size(driver.block), size(4), stream)
    driver.require_success("cuStreamSynchronize", stream)
    return f"{code}, wrote {found.value}"


def copy_halves(driver: Driver, registered: int, offset: int, length: int) -> str:
    """The code of a copy of host memory whose first `registered` halves are page-locked, one by one."""
    with host_memory() as start:
        halves = [size(start + half * HALF) for half in range(registered)]
        for half in halves:
            driver.require_success("cuMemHostRegister_v2", half, size(HALF), FLAGS)
        stream = size(driver.stream)
        source = size(start + offset)
        code = driver.call("cuMemcpyHtoDAsync_v2", size(driver.block), source, size(length), stream)
        driver.require_success("cuStreamSynchronize", stream)
        for half in halves:
            driver.require_success("cuMemHostUnregister", half)
    return f"{code}"


def share_page(driver: Driver) -> str:
    """Whether a page is registered as a whole: by a range that names its first half."""
    with host_memory() as start:
        first, second = size(start), size(start + PAGE // 2)
        driver.require_success("cuMemHostRegister_v2", first, size(PAGE // 2), FLAGS)
        kind = driver.number("cuPointerGetAttribute", MEMORY_TYPE, second)[0]
        code = driver.call("cuMemHostRegister_v2", second, size(PAGE // 2), FLAGS)
        for half in (first, second)[: 2 if code == 0 else 1]:
            driver.require_success("cuMemHostUnregister", half)
    return f"asked {kind}, registered {code}"


def copy_from_page(driver: Driver) -> str:
    """The code of a copy from the rest of a page that is registered in part, and from the next page."""
    with host_memory() as start:
        driver.require_success("cuMemHostRegister_v2", size(start), size(PAGE // 2), FLAGS)
        sides = size(driver.block), size(start + PAGE // 2)
        code = driver.call("cuMemcpyHtoDAsync_v2", *sides, size(PAGE), size(driver.stream))
        driver.require_success("cuStreamSynchronize", size(driver.stream))
        driver.require_success("cuMemHostUnregister", size(start))
    return f"{code}"


def name(driver: Driver, code: int) -> str:
    found = ctypes.c_char_p(b"untouched")
    answer = driver.call("cuGetErrorName", code, ctypes.byref(found))
    return f"{answer}, {found.value.decode() if found.value else 'null'}"


def newest_names(driver: Driver) -> str:
    """Whether the codes are known that drivers of 2024 on may answer."""
    known = [code for code in (226, 721, 913) if name(driver, code).startswith("0, CUDA_ERROR_")]
    return f"known: {known}"


def libraries(_: Driver) -> str:
    """How many files of the driver the process has."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    paths = {line.split(maxsplit=5)[5] for line in maps if "/libcuda.so" in line}
    return f"{len(paths)} file" if len(paths) == 1 else ", ".join(sorted(paths))


@dataclass(frozen=True)
class Question:
    """A question, the answers that the documentation allows, and the place where it does."""

    text: str
    ask: Callable[[Driver], str]
    expected: tuple[str, ...]
    source: str


DEVICE_WAIT = (
    "Programming Guide, stream capture: a handle that encompasses a captured stream, as a device or a "
    "context, cannot be waited for; a thread's RELAXED mode does not allow what necessarily conflicts"
)
MODES = "cuda.h, cuThreadExchangeStreamCaptureMode: which threads may make unsafe calls beside which captures"
LAZY = (
    "Programming Guide, lazy loading: cuModuleGetFunction loads a kernel; cuda.h, cuFuncGetAttribute: "
    "three attributes need a loaded function, and answer 913 where it is not"
)
LONG = "PTX ISA 8.1, CUDA 12.1: kernels take up to 32,764 bytes of parameters; older drivers refuse the PTX"
REGISTERED = (
    "cuda.h, cuMemcpyAsync and registration: a range is page-locked by one call as a whole, or not at all"
)
PAGES = (
    "cuda.h, cuPointerGetAttribute: an address that is not registered is an invalid value; "
    "it says nothing of the rest of a page"
)
DEFAULT = "cuda.h, cuStreamIsCapturing: the legacy stream answers 906 and spoils nothing; its use does"
NAMES = "cuda.h, cuGetErrorName: an unknown code is an invalid value and gives a null pointer"
ISOLATION = "cuda.h, CUDA_ERROR_STREAM_CAPTURE_ISOLATION: a dependency that crosses the boundary of a capture"
OPEN = (SURVIVES, SPOILS)

QUESTIONS = [
    Question("which files of the driver are mapped", libraries, ("1 file",), "one driver in a process"),
    Question(
        "context-wide wait, relaxed thread, global capture",
        captured(synchronize, GLOBAL, RELAXED),
        (SPOILS,),
        DEVICE_WAIT,
    ),
    Question(
        "context-wide wait, relaxed thread, relaxed capture",
        captured(synchronize, RELAXED, RELAXED),
        (SPOILS,),
        DEVICE_WAIT,
    ),
    Question("cuMemAlloc, global thread", captured(allocate), (SPOILS,), MODES),
    Question(
        "cuMemAlloc and cuMemFree, relaxed thread", captured(allocate, thread=RELAXED), (SURVIVES,), MODES
    ),
    Question(
        "cuMemAlloc of another thread beside a global capture",
        captured(allocate_elsewhere, GLOBAL),
        (SPOILS,),
        MODES,
    ),
    Question(
        "cuMemAlloc of another thread beside a thread-local capture",
        captured(allocate_elsewhere, THREAD_LOCAL),
        (SURVIVES,),
        MODES,
    ),
    Question(
        "cuMemHostAlloc and cuMemFreeHost, relaxed thread",
        captured(allocate_locked, thread=RELAXED),
        (SURVIVES,),
        MODES,
    ),
    Question(
        "cuMemHostRegister and Unregister, relaxed thread",
        captured(register, thread=RELAXED),
        (SURVIVES,),
        MODES,
    ),
    Question(
        "copies of pageable memory by another thread beside a global capture",
        captured(copy_pageable_elsewhere),
        OPEN,
        f"{MODES}; no list says whether these are among the unsafe ones",
    ),
    Question(
        "copies of pageable memory, relaxed thread",
        captured(copy_pageable, thread=RELAXED),
        (SURVIVES,),
        MODES,
    ),
    Question(
        "cuModuleLoadData, global thread",
        captured(load_module),
        OPEN,
        f"{MODES}; no list says whether loading is among the unsafe ones",
    ),
    Question("cuModuleLoadData, relaxed thread", captured(load_module, thread=RELAXED), (SURVIVES,), MODES),
    Question(
        "cuEventQuery and Synchronize of another stream's event, global thread",
        captured(wait_for_event),
        OPEN,
        f"{MODES}; no list says whether these are among the unsafe ones, other libraries saw that they are",
    ),
    Question(
        "cuEventQuery and Synchronize of another stream's event, relaxed thread",
        captured(wait_for_event, thread=RELAXED),
        (SURVIVES,),
        MODES,
    ),
    Question(
        "cuEventQuery of a captured event, relaxed",
        captured(query_captured_event, RELAXED, RELAXED),
        ("call 907, end 901",),
        MODES,
    ),
    Question(
        "cuStreamSynchronize of another stream, global thread",
        captured(wait_for_other_stream),
        OPEN,
        f"{MODES}; no list says whether it is among the unsafe ones",
    ),
    Question(
        "cuStreamSynchronize of another stream, relaxed thread",
        captured(wait_for_other_stream, thread=RELAXED),
        (SURVIVES,),
        MODES,
    ),
    Question(
        "captured event awaited by another stream without work, which the origin does not await",
        partial(fork, has_work=False, is_joined=False),
        (SURVIVES,),
        "an H100 and an H200, 580.159.04: there is nothing to join",
    ),
    Question(
        "captured event awaited by another stream, which the origin does not await",
        partial(fork, is_joined=False),
        ("call 0, end 904",),
        "cuda.h, CUDA_ERROR_STREAM_CAPTURE_UNJOINED: a fork that was not joined to the primary stream",
    ),
    Question(
        "captured event awaited by another stream, which the origin awaits",
        partial(fork, is_joined=True),
        (SURVIVES,),
        "Programming Guide, cross-stream dependencies: streams that joined have to be joined back",
    ),
    Question(
        "event of a stream that is not captured and is done, awaited by one that is",
        captured(await_done),
        (SURVIVES, ISOLATED),
        f"{ISOLATION}; where nothing is left to wait for, there need not be one",
    ),
    Question(
        "event of a stream that is not captured and is at work, awaited by one that is",
        await_work,
        (ISOLATED, SURVIVES),
        f"{ISOLATION}; a device may be done before the call",
    ),
    Question(
        "end of a capture in another thread",
        captured(end_elsewhere),
        ("call 908, end 401", "call 908, end 0"),
        "cuda.h, cuStreamEndCapture: the same thread, unless the capture is relaxed; it does not say whether "
        "the capture is over afterwards",
    ),
    Question(
        "default streams 0, 1 and 2 asked beside a blocking capture",
        captured(ask_legacy, flags=BLOCKING),
        ("call [906, 906, 0], end 0",),
        DEFAULT,
    ),
    Question(
        "stream 0 used beside a blocking capture",
        captured(use_legacy, RELAXED, RELAXED, BLOCKING),
        ("call 906, end 901",),
        DEFAULT,
    ),
    Question(
        "stream 1 used beside a blocking capture",
        captured(partial(use_legacy, handle=LEGACY), RELAXED, RELAXED, BLOCKING),
        ("call 906, end 901",),
        DEFAULT,
    ),
    Question(
        "capture of streams 0 and 1",
        capture_legacy,
        ("refused",),
        "cuda.h, cuStreamBeginCapture: not on the legacy stream",
    ),
    Question(
        "function after it was looked up",
        partial(state_after, attribute=None),
        ("0, loaded", "0, unloaded", "0, unknown"),
        LAZY,
    ),
    Question(
        "function after NUM_REGS",
        partial(state_after, attribute=NUM_REGS),
        ("0, loaded", "0, unloaded", "0, unknown"),
        LAZY,
    ),
    Question(
        "function after MAX_THREADS_PER_BLOCK",
        partial(state_after, attribute=MAX_THREADS),
        ("0, loaded", "0, unknown", "913, unloaded"),
        LAZY,
    ),
    Question("function after cuFuncLoad", load_function, ("0, loaded", "0, unknown"), "cuda.h, cuFuncLoad"),
    Question("first launch of a function, in a capture", launch_first, OPEN, LAZY),
    Question("second launch of a function, in a capture", launch_loaded, (SURVIVES,), LAZY),
    Question("launch with 32,760 bytes of parameters", launch_long, ("0, wrote 7", "load 222"), LONG),
    Question(
        "copy within one registration",
        partial(copy_halves, registered=2, offset=0, length=HALF),
        ("0",),
        REGISTERED,
    ),
    Question(
        "copy across two registrations",
        partial(copy_halves, registered=2, offset=HALF - 4096, length=8192),
        ("1",),
        REGISTERED,
    ),
    Question(
        "copy of a range that is half registered",
        partial(copy_halves, registered=1, offset=HALF - 4096, length=8192),
        ("1",),
        REGISTERED,
    ),
    Question(
        "second half of a page whose first half is registered",
        share_page,
        ("asked 0, registered 712", "asked 1, registered 0"),
        PAGES,
    ),
    Question("copy from the rest of a registered page and the next", copy_from_page, ("1", "0"), PAGES),
    Question(
        "name of error 721", partial(name, code=721), ("0, CUDA_ERROR_TENSOR_MEMORY_LEAK", "1, null"), NAMES
    ),
    Question("name of error 9999", partial(name, code=9999), ("1, null",), NAMES),
    Question(
        "names of errors 226, 721 and 913",
        newest_names,
        ("known: [226, 721, 913]", "known: [721, 913]", "known: [913]", "known: []"),
        NAMES,
    ),
]
"""In this order: an answer that breaks the context would make the rest worthless."""


def main() -> int:
    """Asks, prints a line for each question, and says whether all answers are as expected."""
    try:
        driver = Driver()
    except NoDriverError as error:
        print(f"there is no driver to ask: {error}", file=sys.stderr)
        return 2
    version = driver.number("cuDriverGetVersion")[1]
    print(f"driver {version // 1000}.{version % 1000 // 10}")
    wrong = 0
    for question in QUESTIONS:
        answer = question.ask(driver)
        is_right = answer in question.expected
        wrong += not is_right
        expected = "" if is_right else f"  (expected {' or '.join(question.expected)}: {question.source})"
        print(f"{'ok' if is_right else 'DIFFERS':8}{question.text}: {answer}{expected}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
