"""How fast kvpool's kernels are on a GPU, and what a call costs the host, beside plain PyTorch.

    python tests/gpu/speed.py [--tokens 1,8,64] [--rows 131072] [--rounds 5] [--only WORD] [--once] [--little]

Each line has the device's time for a call (CUDA events around many of them), the bytes that it has to read
and write in that time, and the host's time to enqueue it. Medians of rounds that alternate between kvpool
and the alternative. `--once` makes every call of kvpool once, without times: for tools that watch the
kernels, and for the driver made of software, which has no clock.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import records
import torch
from backend import is_software, open_device

import kvpool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benches"))

from cuda_cases import Case, row_cases, state_cases
from reference import SortedAllocator

TOKENS = "1,8,64,512,4096,16384,65536"
CALLS = 50
LINE = "{what:46} {us:>9} us {gbs:>8} GB/s  host {host_us:>7} us  {alternative}"


def step_cases(*, little: bool) -> Iterator[Case]:
    """A scheduler's work: a decode step, and slots taken and given back."""
    slots = 4096 if little else 1 << 20
    for requests, context in ((2, 20),) if little else ((16, 1000), (256, 1000)):
        table = kvpool.ReqToTokenPool(requests, 4096, "cuda")
        allocator = kvpool.TokenToKVPoolAllocator(slots, "cuda")
        planner = kvpool.BatchPlanner(table, allocator, requests, 1 << 19)
        rows = table.alloc(requests) or []
        planner.extend(rows, [0] * requests, [context] * requests)
        yield Case(
            f"planner.decode, {requests} requests, context {context}",
            [_decode_steps(planner, rows, context)],
        )
    ours, plain = kvpool.TokenToKVPoolAllocator(slots, "cuda"), SortedAllocator(slots, "cuda")

    def take(allocator: Any) -> None:  # noqa: ANN401 - either of both
        allocator.free(allocator.alloc(16))

    yield Case("alloc + free, 16 slots", [partial(take, ours)], 0, [partial(take, plain)], "PyTorch")


def _decode_steps(planner: kvpool.BatchPlanner, rows: list[int], context: int) -> Callable[[], object]:
    """Steps one after another; after 500 the requests are as long as at first again."""
    lens = [context] * len(rows)

    def step() -> None:
        if lens[0] >= context + 500:
            lens[:] = [context] * len(lens)
            planner.truncate(rows, lens)
        lens[:] = [n + 1 for n in lens]
        planner.decode(rows, lens)

    return step


def copy_case() -> Iterator[Case]:
    """The bandwidth of the memory: a copy of 1 GiB."""
    source = torch.zeros(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    yield Case("Tensor.copy_ of 1 GiB (bandwidth)", [partial(target.copy_, source)], 2 << 30)


def timed(calls: Sequence[Callable[[], object]], count: int) -> tuple[float, float]:
    """The device's and the host's time for a call in microseconds."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    order = itertools.islice(itertools.cycle(calls), count)
    begin.record()
    start = time.perf_counter()
    for call in order:
        call()
    host = time.perf_counter() - start
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / count, host * 1e6 / count


def measure(case: Case, rounds: int) -> dict[str, Any]:
    """Medians of both sides, which alternate."""
    sides = [side for side in (case.ours, case.theirs) if side]
    for side in sides:
        for call in side:
            call()
    torch.cuda.synchronize()
    found: list[list[tuple[float, float]]] = [[] for _ in sides]
    for _ in range(rounds):
        for side, times in zip(sides, found, strict=True):
            times.append(timed(side, CALLS))
    medians = [[statistics.median(column) for column in zip(*times, strict=True)] for times in found]
    us, host_us = medians[0]
    row: dict[str, Any] = {"what": case.what, "us": us, "host_us": host_us, "moved": case.moved}
    row["gbs"] = case.moved / us / 1e3 if case.moved else None
    if case.theirs:
        their_us = medians[1][0]
        row |= {"alternative": case.alternative, "its_us": their_us, "ratio": their_us / us}
    return row


def line_of(row: dict[str, Any]) -> str:
    gbs = f"{row['gbs']:,.0f}" if row["gbs"] else "-"
    beside = f"{row['alternative']} {row['its_us']:,.2f} us, {row['ratio']:.2f}" if "ratio" in row else ""
    times = {"us": f"{row['us']:,.2f}", "host_us": f"{row['host_us']:,.2f}"}
    return LINE.format(what=row["what"], gbs=gbs, alternative=beside, **times)


def cases(arguments: argparse.Namespace) -> Iterator[Case]:
    """Everything, made when it is asked for."""
    tokens = [int(word) for word in arguments.tokens.split(",")]
    if not arguments.once:
        yield from copy_case()
    yield from row_cases(arguments.rows, tokens)
    yield from state_cases(little=arguments.little)
    yield from step_cases(little=arguments.little)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", default=TOKENS, help="rows of a call (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=1 << 17, help="slots of a pool (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each case (default: %(default)s)")
    parser.add_argument("--only", default="", metavar="WORD", help="only cases that contain WORD")
    parser.add_argument("--once", action="store_true", help="every call of kvpool once, untimed")
    parser.add_argument("--little", action="store_true", help="states and steps on little data")
    arguments = parser.parse_args()
    if is_software() and not arguments.once:
        parser.error("the driver made of software has no clock: use --once")
    device = open_device()
    device.use_pytorch()
    gc.disable()
    count = 0
    for case in cases(arguments):
        if arguments.only not in case.what:
            continue
        count += 1
        if arguments.once:
            for call in case.ours[:1]:
                call()
            device.synchronize()
            print(f"{case.what}: made", flush=True)
            records.add("made", what=case.what)
        else:
            row = measure(case, arguments.rounds)
            print(line_of(row), flush=True)
            records.add("speed", **row)
    print(f"{count} cases")
    return 0


if __name__ == "__main__":
    sys.exit(main())
