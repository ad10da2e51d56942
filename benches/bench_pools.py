"""Cost of chunks, scratch buffers, pages and workspaces, beside what a user has without them.

Runs on the CPU, and on a GPU if PyTorch can use one. There a page-locked pool of `KVPOOL_BENCH_GIB` GiB is
built, too.
"""

from __future__ import annotations

import os
import time
from functools import partial
from typing import TYPE_CHECKING

import torch
from harness import Case, Report, repeated

import kvpool

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ALLOCATIONS = 1750
"""Scratch allocations for each decoded token, as one engine makes them."""

CHUNK = (32, 2, 16, 8, 128)
"""Layers, K and V, tokens, heads and elements of a head: 2 MiB of bfloat16."""

GIBIBYTES = int(os.environ.get("KVPOOL_BENCH_GIB", "16"))
"""The page-locked pool that is built on a machine with a GPU."""


def shapes() -> Sequence[tuple[int, int]]:
    """The allocations of a step: seven sizes, repeated."""
    return [((1 + i % 7) * 64, 128) for i in range(ALLOCATIONS)]


def torch_step(device: str) -> Case:
    """The same in plain PyTorch."""
    wanted = shapes()

    def step(number: int) -> None:
        for _ in range(number // ALLOCATIONS):
            for shape in wanted:
                torch.empty(shape, dtype=torch.float32, device=device)

    return Case(step, calls=ALLOCATIONS)


def buffers(report: Report, device: str) -> None:
    """A step's scratch buffers with their tensors, allocated and freed: per buffer."""
    wanted, dtype = shapes(), torch.float32

    def step_of(pool: kvpool.BufferPool) -> Callable[[int], None]:
        def step(number: int) -> None:
            for _ in range(number // ALLOCATIONS):
                for shape in wanted:
                    _ = pool.alloc(shape, dtype).tensor
                pool.reset()

        return step

    for rounding in ("pow2", "fine"):
        report.compare(
            f"BufferPool.alloc with tensor + reset, {ALLOCATIONS} a step, {rounding}, {device}",
            Case(step_of(kvpool.BufferPool(device, rounding=rounding)), calls=ALLOCATIONS),
            torch_step(device),
            alternative="torch.empty",
            limit_us=0.5,
        )


def workspaces(report: Report, device: str) -> None:
    """A pass's tensors from the arena, allocated and freed: per tensor."""
    wanted, dtype = shapes(), torch.float32
    workspace = kvpool.Workspace(device)

    def step(number: int) -> None:
        for _ in range(number // ALLOCATIONS):
            for shape in wanted:
                workspace.empty(shape, dtype)
            workspace.reset()

    report.compare(
        f"Workspace.empty + reset, {ALLOCATIONS} a pass, {device}",
        Case(step, calls=ALLOCATIONS),
        torch_step(device),
        alternative="torch.empty",
        limit_us=0.5,
    )
    workspace.close()


class TorchChunks:
    """LMCache's pool in plain PyTorch: one tensor per chunk, and a list of the free ones."""

    def __init__(self, count: int) -> None:
        self._chunks = [torch.empty(CHUNK, dtype=torch.bfloat16) for _ in range(count)]
        self._free = list(range(count))

    def round_trip(self) -> None:
        """Allocates a chunk, views some of its tokens, and frees it."""
        index = self._free.pop()
        _ = self._chunks[index][:, :, 0:12]
        self._free.append(index)


def chunks(report: Report, device: str) -> None:
    """A chunk with a view of 12 tokens, allocated and freed; and the bytes of one."""
    pool, plain = kvpool.ChunkPool(64, CHUNK, torch.bfloat16, device), TorchChunks(64)
    some = (*CHUNK[:2], 12, *CHUNK[3:])

    def round_trip() -> None:
        chunk = pool.allocate()
        if chunk is not None:
            chunk.tensor(some)
            pool.free(chunk)

    report.compare(
        f"ChunkPool.allocate + view + free, {device}",
        Case(repeated(round_trip)),
        Case(repeated(plain.round_trip)),
        alternative="list and slicing",
        limit_us=0.7,
    )
    if device != "cpu":
        return
    chunk = pool.allocate()
    if chunk is None:
        raise RuntimeError("a pool of 64 chunks has none")
    kv = torch.randn(*CHUNK[:2], 2 * CHUNK[2], *CHUNK[3:]).bfloat16()[:, :, : CHUNK[2]]
    target = torch.empty(CHUNK, dtype=torch.bfloat16)
    # Threads of either side look for work for a while after a copy, on the cores that the other side's need.
    rest = partial(time.sleep, 0.01)
    report.compare(
        "Chunk.copy_from 2 MiB, 64 runs, cpu",
        Case(repeated(partial(chunk.copy_from, kv)), rest, calls=50),
        Case(repeated(partial(target.copy_, kv)), rest, calls=50),
        alternative="copy_",
        least_ratio=1.0,
    )


def pages(report: Report) -> None:
    """A page with its tensor, allocated and freed."""
    pool = kvpool.PagePool(4096, 1024)
    plain = [torch.zeros(4096) for _ in range(1024)]
    free = list(range(1024))

    def ours() -> None:
        page = pool.alloc()
        if page is not None:
            pool.page(page)
            pool.free(page)

    def theirs() -> None:
        page = free.pop()
        _ = plain[page].view(-1)
        free.append(page)

    report.compare(
        "PagePool.alloc + page + free, cpu",
        Case(repeated(ours)),
        Case(repeated(theirs)),
        alternative="list and view",
    )


def page_locking(report: Report) -> None:
    """A whole page-locked pool, beside one allocation per chunk."""
    count = (GIBIBYTES << 30) // (2 << 20)

    def ours(_number: int) -> None:
        kvpool.ChunkPool(count, CHUNK, torch.bfloat16).wait_page_locked()

    def theirs(_number: int) -> None:
        kept = [torch.empty(CHUNK, dtype=torch.bfloat16, pin_memory=True) for _ in range(count)]
        kept.clear()
        torch._C._host_emptyCache()  # noqa: SLF001 - else the next round costs nothing

    report.compare(
        f"a page-locked pool of {GIBIBYTES} GiB",
        Case(ours, calls=1),
        Case(theirs, calls=1),
        alternative="torch.empty(pin_memory=True) a chunk",
        least_ratio=5.0,
    )


def main() -> None:
    """Runs and reports every question."""
    report = Report("Chunks, buffers, pages and workspaces")
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        for part in (buffers, workspaces, chunks):
            part(report, device)
    pages(report)
    if torch.cuda.is_available():
        page_locking(report)
    report.finish()


if __name__ == "__main__":
    main()
