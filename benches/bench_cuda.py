"""Cost of the pools on a GPU, beside plain PyTorch and beside copies of the same bytes."""

from __future__ import annotations

import itertools
import sys
from functools import partial
from typing import TYPE_CHECKING

import torch
from harness import Case, Report
from reference import FifoAllocator, KVBuffers, PagedAllocator, SortedAllocator, States

import kvpool

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MILLION = 1 << 20
PAGE_SIZE = 16
HEADS = (8, 128)
ROWS = 1 << 17
TOKENS = (1, 16, 256, 4096, 16384, 65536)
MEASURED = 16384
SLOTS = (1, 8, 32)
QWEN3_NEXT = (36, 32, 128, 128, 8192, 4)
"""Linear-attention layers, value heads, their dimensions, channels and taps of Qwen3-Next-80B-A3B."""


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


def random_slots(count: int, below: int, seed: int) -> torch.Tensor:
    """Distinct slots, at least 1, int32 on the device."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randperm(below - 1, generator=generator)[:count] + 1).to(torch.int32).cuda()


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


def token_rows(report: Report) -> None:
    """Writes, reads and moves of K and V at random slots."""
    dtype = torch.bfloat16
    pool = kvpool.KVPool(ROWS, 1, *HEADS, "cuda", dtype)
    plain = KVBuffers(ROWS + 8, *HEADS, dtype, "cuda")
    for tokens in TOKENS:
        shape = (tokens, *HEADS)
        batches = range(max(1, min(8, ROWS // tokens // 2)))
        slots = [random_slots(tokens, ROWS, seed) for seed in batches]
        wide = [indices.long() for indices in slots]
        others = [random_slots(2 * tokens, ROWS, 100 + seed) for seed in batches]
        values = [(torch.randn(shape).to(dtype).cuda(), torch.randn(shape).to(dtype).cuda()) for _ in batches]
        outs = [(torch.empty_like(k), torch.empty_like(v)) for k, v in values]
        copies = enqueued([partial(_copy, outs[i], values[i]) for i in batches])
        name = f"{tokens} tokens x {HEADS[0]} x {HEADS[1]} bfloat16, random slots"
        sides = {
            "set_kv_buffer": (
                enqueued([partial(pool.set_kv_buffer, 0, slots[i], *values[i]) for i in batches]),
                enqueued([partial(plain.set_kv_buffer, wide[i], *values[i]) for i in batches]),
            ),
            "gather_kv": (
                enqueued([partial(pool.gather_kv, 0, slots[i], outs[i]) for i in batches]),
                enqueued([partial(plain.gather_kv, wide[i]) for i in batches]),
            ),
            "move_kv": (
                enqueued([partial(pool.move_kv, pair[:tokens], pair[tokens:]) for pair in others]),
                enqueued(
                    [partial(plain.move_kv, pair[:tokens].long(), pair[tokens:].long()) for pair in others]
                ),
            ),
        }
        for operation, (ours, theirs) in sides.items():
            report.compare(f"{operation}, {name}", ours, theirs, alternative="indexing", least_ratio=1.0)
            if tokens == MEASURED:
                report.compare(
                    f"{operation}, {name}", ours, copies, alternative="copy_ (bandwidth)", least_ratio=0.85
                )


def _copy(targets: tuple[torch.Tensor, ...], sources: tuple[torch.Tensor, ...]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def _zero(targets: tuple[torch.Tensor, ...]) -> None:
    for target in targets:
        target.zero_()


def states(report: Report) -> None:
    """Resets and copies of linear-attention states of the size of Qwen3-Next's."""
    working = 2 * max(SLOTS)
    layers, heads, k_dim, v_dim, channels, taps = QWEN3_NEXT
    pool = kvpool.GDNPool(working, layers, heads, k_dim, v_dim, channels, taps, "cuda", torch.bfloat16)
    plain = States(tuple(pool.recurrent_state.shape), tuple(pool.conv_state.shape), torch.bfloat16, "cuda")
    for count in SLOTS:
        chosen = random_slots(2 * count, working + 1, count)
        src, dst = chosen[:count], chosen[count:]
        wide_src, wide_dst = src.long(), dst.long()
        # The same bytes in one piece: the bandwidth of the memory.
        flat = [state[:, :count].contiguous() for state in (pool.recurrent_state, pool.conv_state)]
        target = [torch.empty_like(state) for state in flat]
        name = f"{count} slots, 36 layers, 32 x 128 x 128 float32 + 8192 x 3 bfloat16"
        reset = enqueued([partial(pool.reset_states, dst)])
        copy = enqueued([partial(pool.copy_states, src, dst)])
        least_ratio = 0.85 if count >= 8 else None
        report.compare(
            f"reset_states, {name}",
            reset,
            enqueued([partial(_zero, tuple(target))]),
            alternative="zero_ (bandwidth)",
            least_ratio=least_ratio,
        )
        report.compare(
            f"reset_states, {name}",
            reset,
            enqueued([partial(plain.reset_states, wide_dst)]),
            alternative="indexing",
        )
        report.compare(
            f"copy_states, {name}",
            copy,
            enqueued([partial(_copy, tuple(target), tuple(flat))]),
            alternative="copy_ (bandwidth)",
            least_ratio=least_ratio,
        )
        report.compare(
            f"copy_states, {name}",
            copy,
            enqueued([partial(plain.copy_states, wide_src, wide_dst)]),
            alternative="indexing",
        )


def tables(report: Report) -> None:
    """A decode step's write to the request table, and the slots of a batch for attention."""
    batch, context = 256, 4096
    table = kvpool.ReqToTokenPool(batch, context, "cuda")
    plain = torch.zeros(batch + 1, context, dtype=torch.int32, device="cuda")
    rows = torch.arange(1, batch + 1, dtype=torch.int32, device="cuda")
    columns = torch.full((batch,), context // 2, dtype=torch.int32, device="cuda")
    slots = random_slots(batch, MILLION, 7)
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
    for part in (round_trips, foreign_frees, token_rows, states, tables):
        part(report)
    report.finish()


if __name__ == "__main__":
    main()
