"""A prompt that goes through host memory to files, and comes back; and decode steps beside that.

The alternative writes or reads pages of the same size one after the other, `os.pwritev` and `os.preadv` with
`O_DIRECT` where the file system has it. `stored` includes the copy to host memory, and `fetched` ends there.
`KVPOOL_BENCH_STORE` names a folder on the disk.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
from bench_file_store import Sequential, aligned
from harness import Case, Report

from kvpool import (
    BatchPlanner,
    FileStore,
    HostTier,
    KVPool,
    PrefixCache,
    ReqToTokenPool,
    TokenToKVPoolAllocator,
)

LAYERS, HEADS, DIM = 16, 8, 128
TOKENS, PAGE_SIZE = 4096, 16
LEAST = 0.8
REQUESTS = 64


class Side:
    """A cache above host memory and files, and a prompt."""

    def __init__(self, folder: Path) -> None:
        self.kv = KVPool(2 * TOKENS, LAYERS, HEADS, DIM, "cpu", torch.bfloat16, page_size=PAGE_SIZE)
        self.slots = TokenToKVPoolAllocator(2 * TOKENS, "cpu", PAGE_SIZE)
        self.tier = HostTier(self.kv, 2 * TOKENS)
        size = self.tier.page_bytes
        self.pages = TOKENS // PAGE_SIZE
        self.store = FileStore(folder / "store", self.pages * size, page_bytes=size, queue_bytes=1 << 30)
        self.cache = PrefixCache(self.slots, tiers=(self.tier, self.store), model="a model")
        self.prompt = torch.arange(TOKENS, dtype=torch.int32)
        for buffer in (*self.kv.k_buffer, *self.kv.v_buffer):
            buffer.fill_(1)
        self.file = Sequential(folder / "plain", aligned(self.pages, size), direct=self.store.direct)
        # Once before, so that both write where their files have space already.
        self.put(1)
        self.file.write()

    def empty(self) -> None:
        """Neither memory nor the files have the prompt."""
        self.cache.clear()
        self.store.clear()

    def put(self, _: int) -> None:
        """Publishes the prompt, and waits until the files have it."""
        slots = self.slots.alloc(TOKENS)
        assert slots is not None
        self.cache.insert(self.prompt, slots)
        while len(self.store) < self.pages:
            time.sleep(0.0002)

    def away(self) -> None:
        """The files alone have the prompt."""
        if len(self.store) < self.pages:
            self.put(1)
        self.cache.clear()

    def fetch(self, _: int) -> None:
        """Waits until the prompt is in host memory again."""
        fetch = self.cache.fetch(self.prompt)
        fetch.wait()
        assert fetch.length == TOKENS


class Steps:
    """Decode steps, and prompts that are fetched beside them."""

    def __init__(self, side: Side) -> None:
        self.side = side
        table = ReqToTokenPool(REQUESTS, 2048, "cpu")
        self.planner = BatchPlanner(table, side.slots, REQUESTS, TOKENS)
        rows = table.alloc(REQUESTS)
        assert rows is not None
        self.rows, self.lens = rows, [16] * REQUESTS
        assert self.planner.extend(rows, [0] * REQUESTS, self.lens) is not None

    def p99(self, *, busy: bool) -> float:
        """Microseconds of the 99th of a hundred steps, beside fetches or not."""
        times, fetch = [], None
        for step in range(2000):
            if busy and (fetch is None or fetch.query()):
                del fetch
                self.side.tier.clear()
                fetch = self.side.cache.fetch(self.side.prompt)
            if step % 32 == 0:
                self.planner.truncate(self.rows, [16] * REQUESTS)
                self.lens = [16] * REQUESTS
            self.lens = [length + 1 for length in self.lens]
            begin = time.perf_counter()
            assert self.planner.decode(self.rows, self.lens) is not None
            times.append(time.perf_counter() - begin)
        if fetch is not None:
            fetch.wait()
        return sorted(times)[len(times) * 99 // 100] * 1e6


def main() -> None:
    """Measures, and reports."""
    report = Report("A store below host memory")
    with tempfile.TemporaryDirectory(dir=os.environ.get("KVPOOL_BENCH_STORE")) as name:
        side = Side(Path(name))
        what = f"{TOKENS} tokens, {side.pages} pages of {side.tier.page_bytes >> 10} KiB"
        report.compare(
            f"{what} stored",
            Case(side.put, prepare=side.empty, calls=1),
            Case(side.file.write, calls=1),
            alternative="os.pwritev",
        )
        report.compare(
            f"{what} fetched",
            Case(side.fetch, prepare=side.away, calls=1),
            Case(side.file.read, calls=1),
            alternative="os.preadv",
            least_ratio=LEAST,
        )
        side.away()
        decoding = Steps(side)
        decoding.p99(busy=True)
        turns = [(decoding.p99(busy=False), decoding.p99(busy=True)) for _ in range(15)]
        alone, beside = (statistics.median(times) for times in zip(*turns, strict=True))
        report.note(
            f"p99 of a decode step of {REQUESTS} requests: {alone:.1f} us, beside fetches {beside:.1f} us "
            f"({beside / alone:.2f}x, medians of {len(turns)} turns)"
        )
        side.file.close()
        side.store.close()
    report.finish()


if __name__ == "__main__":
    main()
