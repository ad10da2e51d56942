"""Cost of the pools on a GPU, beside plain PyTorch and beside copies of the same bytes."""

from __future__ import annotations

import itertools
import sys
from functools import partial
from typing import TYPE_CHECKING

import torch
from cuda_cases import on_device, row_cases, slots_of, state_cases
from harness import Case, Report
from reference import FifoAllocator, PagedAllocator, SortedAllocator

import kvpool

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MILLION = 1 << 20
PAGE_SIZE = 16
ROWS = 1 << 17
TOKENS = (1, 16, 256, 4096, 16384, 65536)


def enqueued(calls: Sequence[Callable[[], object]]) -> Case:
    """Consecutive calls, timed until the device has done all of them."""
    order = itertools.cycle(calls)

    def run(number: int) -> None:
        for _ in itertools.repeat(None, number):
            next(order)()
        torch.cuda.synchronize()

    return Case(run)


def on_host(call: Callable[[], object]) -> Case:
    """The host's time for a call, without the wait for the device."""

    def run(number: int) -> None:
        for _ in itertools.repeat(None, number):
            call()

    return Case(run, torch.cuda.synchronize, 256)


def round_trips(report: Report) -> None:
    """Alloc and free of the same slots in a pool of a million."""
    sides: dict[
        str, tuple[int, bool, Callable[[], SortedAllocator | FifoAllocator | PagedAllocator], float]
    ] = {
        "sorted": (1, True, lambda: SortedAllocator(MILLION, "cuda"), 10.0),
        "first in, first out": (1, False, lambda: FifoAllocator(MILLION, "cuda"), 10.0),
        f"page size {PAGE_SIZE}": (
            PAGE_SIZE,
            True,
            lambda: PagedAllocator(MILLION, PAGE_SIZE, "cuda"),
            60.0,
        ),
    }
    for name, (page_size, need_sort, make_plain, least_ratio) in sides.items():
        for n in (1, 128, 4096):
            ours = kvpool.TokenToKVPoolAllocator(MILLION, "cuda", page_size, need_sort)
            plain = make_plain()
            pair = partial(_pair, ours, n)
            other = partial(_pair, plain, n)
            question = f"alloc + free, n = {n}, {name}, host time"
            report.compare(question, on_host(pair), on_host(other), limit_us=4.0 if n == 4096 else 1.5)
            if n <= 128:
                report.compare(question, on_host(pair), on_host(other), least_ratio=least_ratio)


def _pair(
    allocator: kvpool.TokenToKVPoolAllocator | SortedAllocator | FifoAllocator | PagedAllocator, n: int
) -> None:
    slots = allocator.alloc(n)
    allocator.free(slots)  # type: ignore[arg-type]


def foreign_frees(report: Report) -> None:
    """Frees of slots in a tensor whose values the host does not know."""
    allocator = kvpool.TokenToKVPoolAllocator(MILLION, "cuda")
    plain = SortedAllocator(MILLION, "cuda")
    batch = 128
    slots = torch.arange(1, MILLION + 1, dtype=torch.int64, device="cuda").view(-1, batch)

    def prepare() -> None:
        allocator.clear()
        allocator.alloc(MILLION)
        plain.clear()
        torch.cuda.synchronize()

    def frees(free: Callable[[torch.Tensor], object]) -> Case:
        def run(number: int) -> None:
            for row in range(number):
                free(slots[row])

        return Case(run, prepare, 256)

    report.compare(
        f"free of {batch} slots as a foreign int64 tensor, host time",
        frees(allocator.free),
        frees(plain.free),
        limit_us=10.0,
    )


def rows_and_states(report: Report) -> None:
    """Writes, reads and moves of K and V at random slots, and resets and copies of states."""
    for case in itertools.chain(row_cases(ROWS, TOKENS), state_cases(little=False)):
        ours = enqueued(case.ours)
        theirs, alternative = enqueued(case.theirs), case.alternative
        report.compare(case.what, ours, theirs, alternative=alternative, least_ratio=case.least_ratio)
        if case.bandwidth:
            # The same bytes in one piece: half of those of a copy are read.
            target, source = (
                torch.zeros(case.moved // 2, dtype=torch.uint8, device="cuda") for _ in range(2)
            )
            zeroed = torch.empty(case.moved, dtype=torch.uint8, device="cuda")
            calls: dict[str, Callable[[], object]] = {
                "copy_": partial(target.copy_, source),
                "zero_": zeroed.zero_,
            }
            alternative = f"{case.bandwidth} (bandwidth)"
            report.compare(
                case.what, ours, enqueued([calls[case.bandwidth]]), alternative=alternative, least_ratio=0.85
            )


def tables(report: Report) -> None:
    """A decode step's write to the request table, and the slots of a batch for attention."""
    batch, context = 256, 4096
    table = kvpool.ReqToTokenPool(batch, context, "cuda")
    plain = torch.zeros(batch + 1, context, dtype=torch.int32, device="cuda")
    rows = torch.arange(1, batch + 1, dtype=torch.int32, device="cuda")
    columns = torch.full((batch,), context // 2, dtype=torch.int32, device="cuda")
    slots = on_device(slots_of(batch, MILLION, 7))
    wide = rows.long(), columns.long()

    def index_put() -> None:
        plain[wide] = slots

    report.compare(
        f"write, {batch} requests, one column each",
        enqueued([partial(table.write, (rows, columns), slots)]),
        enqueued([index_put]),
        alternative="indexing",
    )
    lens = torch.full((batch,), context // 2)
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), lens.cumsum(0)]).cuda()
    out = torch.empty(int(lens.sum()), dtype=torch.int32, device="cuda")
    mask = torch.arange(context, device="cuda")[None] < lens.cuda()[:, None]
    report.compare(
        f"build_kv_indices, {batch} requests of {context // 2} tokens",
        enqueued([partial(table.build_kv_indices, rows, indptr, out)]),
        enqueued([lambda: plain[wide[0]][mask]]),
        alternative="indexing and a mask",
    )


def main() -> None:
    """Runs and reports every question."""
    if not torch.cuda.is_available():
        sys.exit("bench_cuda.py needs an NVIDIA GPU that PyTorch can use")
    report = Report("GPU")
    for part in (round_trips, foreign_frees, rows_and_states, tables):
        part(report)
    report.finish()


if __name__ == "__main__":
    main()
