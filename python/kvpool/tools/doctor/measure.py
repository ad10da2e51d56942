"""Measures how fast bytes move, in a separate process: `python -m kvpool.tools.doctor.measure JSON`.

It measures kvpool's own copies, with which pools, host tiers and stores move pages. PyTorch is hidden: it
takes seconds to import, and nothing here needs it.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import tempfile
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

from kvpool.tools.bandwidths import Bandwidth
from kvpool.tools.doctor.libcuda import LIBRARY, CallError, Driver
from kvpool.tools.output import bytes_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvpool import Chunk, FileStore

LEAST_REPETITIONS, MOST_REPETITIONS = 3, 100
PAGE_BYTES = 1 << 20
"""Bytes of a page of the file store."""


class MeasureError(Exception):
    """Bytes did not move as they should."""


@dataclass(frozen=True)
class Job:
    """The measurements of one process.

    Attributes:
        kind: "host", "cuda", "directory" or "nixl".
        size: Bytes of one repetition; if more than a page, whole pages.
        seconds: Time for each line; `LEAST_REPETITIONS` are made in any case.
        directory: A folder on the disk, for "directory".
        device: Number of the GPU, for "cuda".
        devices: The number of GPUs.
    """

    kind: str
    size: int
    seconds: float
    directory: str = ""
    device: int = 0
    devices: int = 0

    @property
    def name(self) -> str:
        """The beginning of the names of its lines."""
        return f"cuda:{self.device}" if self.kind == "cuda" else self.kind

    def line(self, name: str, text: str, move: Callable[[], object]) -> Bandwidth:
        """Measure a way of bytes: once to warm up, and the median of several times."""
        move()
        times: list[float] = []
        begin = perf_counter()
        while len(times) < LEAST_REPETITIONS or (
            perf_counter() - begin < self.seconds and len(times) < MOST_REPETITIONS
        ):
            start = perf_counter()
            move()
            times.append(perf_counter() - start)
        text = f"{bytes_text(self.size)} {text}"
        return Bandwidth(f"{self.name}.{name}", text, self.size / median(times), self.size, len(times))


def _chunks(count: int, job: Job, device: str, *, pin_memory: bool = False) -> list[Chunk]:
    """Allocate `count` chunks, each with the bytes of one repetition."""
    import kvpool  # noqa: PLC0415 - this file must load even if kvpool does not

    pool = kvpool.ChunkPool(count, job.size, "uint8", device, pin_memory)
    pool.wait_page_locked()
    if pin_memory and pool.stats()["page_locked"] != count:
        raise MeasureError(f"{bytes_text(job.size)} of host memory could not be page-locked")
    found = pool.allocate_batch(count)
    assert found is not None  # noqa: S101 - it has as many
    return found


def host(job: Job) -> Iterator[Bandwidth]:
    """Measure copies within host memory."""
    source, target = _chunks(2, job, "cpu")
    # Memory that was never written is one page of zeros.
    ctypes.memset(source.tensor().data_ptr(), 1, job.size)
    yield job.line("copy", "within host memory", lambda: target.copy_from(source.tensor()).wait())


def cuda(job: Job) -> Iterator[Bandwidth]:
    """Measure copies to and from a GPU, within it, and to those with a higher number."""
    there, other = _chunks(2, job, job.name)
    yield job.line("copy", "within its memory", lambda: other.copy_from(there.tensor()).wait())
    (here,) = _chunks(1, job, "cpu", pin_memory=True)
    yield job.line("from_host", "from page-locked memory", lambda: there.copy_from(here.tensor()).wait())
    yield job.line("to_host", "to page-locked memory", lambda: there.copy_to(here.tensor()).wait())
    for number in range(job.device + 1, job.devices):
        (beyond,) = _chunks(1, job, f"cuda:{number}")
        copier = _Copier(job.device, number)
        copy = partial(copier.copy, beyond.tensor().data_ptr(), there.tensor().data_ptr(), job.size)
        yield job.line(f"to_cuda:{number}", f"to cuda:{number}, {copier.way}", copy)


class _Copier:
    """The driver's copies between two GPUs, which kvpool's pools do not make."""

    def __init__(self, device: int, other: int) -> None:
        self._driver = Driver(ctypes.CDLL(LIBRARY))
        contexts = [ctypes.c_void_p(), ctypes.c_void_p()]
        for ordinal, context in zip((device, other), contexts, strict=True):
            number = ctypes.c_int()
            self._driver.call("cuDeviceGet", ctypes.byref(number), ordinal)
            self._driver.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), number)
        self._driver.call("cuCtxSetCurrent", contexts[0])
        try:
            self._driver.call("cuCtxEnablePeerAccess", contexts[1], 0)
        except CallError:
            self.way = "without peer access"
        else:
            self.way = "with peer access"

    def copy(self, target: int, source: int, size: int) -> None:
        places = ctypes.c_uint64(target), ctypes.c_uint64(source)
        self._driver.call("cuMemcpyAsync", *places, ctypes.c_size_t(size), None)
        self._driver.call("cuCtxSynchronize")


def directory(job: Job) -> Iterator[Bandwidth]:
    """Measure pages that a `FileStore` writes and reads one after the other."""
    import kvpool  # noqa: PLC0415 - as above

    page_bytes = min(PAGE_BYTES, job.size)
    count = job.size // page_bytes
    (chunk,) = _chunks(1, job, "cpu")
    pages = chunk.tensor((count, page_bytes))
    for at in range(count):  # with bytes that no file system makes less of
        ctypes.memmove(pages.data_ptr() + at * page_bytes, os.urandom(page_bytes), page_bytes)
    keys = [[number.to_bytes(32, "big") for number in range(at, at + count)] for at in (0, count)]
    turn = 0
    with tempfile.TemporaryDirectory(prefix="kvpool-", dir=job.directory or None) as folder:
        store = kvpool.FileStore(folder, job.size, page_bytes=page_bytes, queue_bytes=2 * job.size)

        def put() -> None:
            nonlocal turn
            turn += 1
            _all_of(store, count, "written", store.put(keys[turn % 2], pages))

        def get() -> None:
            _all_of(store, count, "read", store.get(keys[turn % 2], pages))

        with store:
            way = "past the system's cache" if store.direct else "through the system's cache"
            what = f"in pages of {bytes_text(page_bytes)}, {way}"
            yield job.line("write", what, put)
            yield job.line("read", what, get)


def _all_of(store: FileStore, count: int, done: str, transfer: Any) -> None:  # noqa: ANN401 - of the store
    transfer.wait()
    if transfer.leading != count:
        errors = store.stats()["errors"]
        raise MeasureError(f"{transfer.leading} of {count} pages were {done}, with {errors} errors")


def nixl(job: Job) -> Iterator[Bandwidth]:
    """Measure slots of another process over NIXL."""
    from kvpool.tools.doctor.loopback import reads  # noqa: PLC0415 - few have NIXL

    for name, text, read in reads(job.size):
        yield job.line(name, text, read)


KINDS = {"host": host, "cuda": cuda, "directory": directory, "nixl": nixl}


def measure(job: Job) -> list[Bandwidth]:
    """Measure all lines of a kind. A failure ends the list with a line that has the reason."""
    lines: list[Bandwidth] = []
    try:
        lines.extend(KINDS[job.kind](job))
    except Exception as error:  # noqa: BLE001 - any error is the result
        text = f"{type(error).__name__}: {error}"
        lines.append(Bandwidth(job.name, "", problem=" ".join(text.split())))
    return lines


if __name__ == "__main__":
    sys.modules["torch"] = None  # type: ignore[assignment]
    # NIXL prints to the standard output.
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        json.dump([asdict(line) for line in measure(Job(**json.loads(sys.argv[1])))], answers)
