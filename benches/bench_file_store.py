"""Pages put to and got from files, beside plain sequential writes and reads of the same bytes.

The alternative has no keys, checksums or index: one thread, one file, `os.pwritev` and `os.preadv` of the
same sizes in the same file system, with `O_DIRECT` too. `KVPOOL_BENCH_STORE` names a folder on the disk.
"""

from __future__ import annotations

import mmap
import os
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from harness import Case, Report, repeated

import kvpool

if TYPE_CHECKING:
    import numpy.typing as npt

KIB, MIB = 1 << 10, 1 << 20
TOTAL = 512 * MIB
ENTRIES = int(os.environ.get("KVPOOL_BENCH_ENTRIES", "1000000"))
LEAST = 0.8


def aligned(count: int, size: int) -> npt.NDArray[np.uint8]:
    """Pages of random bytes, as `O_DIRECT` wants their addresses."""
    pages = np.frombuffer(mmap.mmap(-1, count * size), dtype=np.uint8).reshape(count, size)
    pages[:] = np.random.default_rng(1).integers(0, 256, size, dtype=np.uint8)
    pages.view(np.uint64)[:, 0] = np.arange(count)
    return pages


def keys_of(count: int) -> npt.NDArray[np.uint8]:
    """As many keys."""
    return np.random.default_rng(2).integers(0, 256, (count, 32), dtype=np.uint8)


class Sequential:
    """A file that is written and read from its beginning to its end."""

    def __init__(self, path: Path, pages: npt.NDArray[np.uint8], *, direct: bool) -> None:
        flags = os.O_RDWR | os.O_CREAT | (os.O_DIRECT if direct else 0)
        self._file = os.open(path, flags, 0o600)
        self._pages = pages

    def write(self, _: int = 1) -> None:
        """Writes all pages, one call for each."""
        size = self._pages.shape[1]
        for at, page in enumerate(self._pages):
            assert os.pwritev(self._file, [page], at * size) == size

    def read(self, _: int = 1) -> None:
        """Reads them again."""
        size = self._pages.shape[1]
        for at, page in enumerate(self._pages):
            assert os.preadv(self._file, [page], at * size) == size

    def close(self) -> None:
        """Closes the file."""
        os.close(self._file)


def bandwidth(report: Report, folder: Path, size: int, *, direct: bool) -> None:
    """A store that is overwritten and read, beside a file: microseconds per page."""
    count = TOTAL // size
    pages, keys = aligned(count, size), np.split(keys_of(2 * count), 2)
    way = "O_DIRECT" if direct else "cached"
    store = kvpool.FileStore(folder / "store", TOTAL, page_bytes=size, queue_bytes=2 * TOTAL, direct=direct)
    file = Sequential(folder / "plain", pages, direct=direct)
    turn = 0

    def put(_: int) -> None:
        nonlocal turn
        turn += 1
        transfer = store.put(keys[turn % 2], pages)
        transfer.wait()
        assert transfer.leading == count

    def get(_: int) -> None:
        transfer = store.get(keys[turn % 2], pages)
        transfer.wait()
        assert transfer.leading == count

    # Once before, so that both write where their files have space already.
    put(count)
    file.write(count)
    for name, ours, theirs in (("put", put, file.write), ("get", get, file.read)):
        call = "os.pwritev" if name == "put" else "os.preadv"
        question = f"{name} of {size // KIB} KiB pages, {way}"
        # In the system's cache, checksums are compared with copies: there is no disk to keep busy.
        least = LEAST if direct else None
        report.compare(
            question, Case(ours, calls=count), Case(theirs, calls=count), alternative=call, least_ratio=least
        )
    file.close()
    store.close()
    for path in (folder / "plain", *(folder / "store").iterdir()):
        path.unlink()


def lookups(report: Report, folder: Path) -> None:
    """Look-ups of a scheduler in a store of many pages, and the time to open such a store."""
    keys = keys_of(ENTRIES)
    pages = np.zeros((4096, 64), dtype=np.uint8)
    capacity = ENTRIES * 4096
    with kvpool.FileStore(folder / "many", capacity, page_bytes=64, direct=False) as store:
        begin = time.perf_counter()
        for at in range(0, ENTRIES, len(pages)):
            some = keys[at : at + len(pages)]
            store.put(some, pages[: len(some)]).wait()
        report.note(f"{ENTRIES:,} pages of 64 bytes are put in {time.perf_counter() - begin:.1f} s")
    seconds = []
    for _ in range(5):
        begin = time.perf_counter()
        store = kvpool.FileStore(folder / "many", capacity, page_bytes=64, direct=False)
        seconds.append(time.perf_counter() - begin)
        assert len(store) == ENTRIES
        store.close()
    report.note(f"a store of {ENTRIES:,} pages opens in {statistics.median(seconds):.2f} s (median of 5)")
    with kvpool.FileStore(folder / "many", capacity, page_bytes=64, direct=False) as store:
        prefix = np.ascontiguousarray(keys[np.random.default_rng(3).permutation(ENTRIES)[:4096]])
        listed = [bytes(key) for key in prefix]
        known = {bytes(key): at for at, key in enumerate(keys)}

        def in_a_dict() -> int:
            count = 0
            for key in listed:
                if key not in known:
                    break
                count += 1
            return count

        assert store.exists(prefix) == store.exists(listed) == in_a_dict() == 4096
        for name, given in (("an array", prefix), ("a list", listed)):
            report.compare(
                f"exists of 4096 keys in {name}, among {ENTRIES:,}",
                Case(repeated(partial(store.exists, given))),
                Case(repeated(in_a_dict)),
                alternative="dict",
            )


def main() -> None:
    """Measures, and reports."""
    report = Report("Pages in files")
    with tempfile.TemporaryDirectory(dir=os.environ.get("KVPOOL_BENCH_STORE")) as name:
        folder = Path(name)
        for size in (64 * KIB, 256 * KIB, MIB):
            bandwidth(report, folder, size, direct=True)
        bandwidth(report, folder, 256 * KIB, direct=False)
        lookups(report, folder)
    report.finish()


if __name__ == "__main__":
    main()
