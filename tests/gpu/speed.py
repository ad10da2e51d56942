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
from dataclasses import dataclass
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

from reference import KVBuffers, SortedAllocator, States

HEADS = (8, 128)
QWEN3_NEXT = (36, 32, 128, 128, 8192, 4)
"""Linear-attention layers, value heads, their dimensions, channels and taps of Qwen3-Next-80B-A3B."""
TOKENS = "1,8,64,512,4096,16384,65536"
STATES = (1, 8, 16)
SCALE = 2.0
CALLS = 50
LINE = "{what:46} {us:>9} us {gbs:>8} GB/s  host {host_us:>7} us  {alternative}"


@dataclass(frozen=True)
class Case:
    """Something to time.

    Attributes:
        what: What it is called.
        ours: Calls of kvpool, on different data, made in turn.
        moved: Bytes that a call has to read and write; 0 if bytes are not the point.
        theirs: The same in plain PyTorch, if there is an obvious way.
        alternative: What that is.
    """

    what: str
    ours: Sequence[Callable[[], object]]
    moved: int = 0
    theirs: Sequence[Callable[[], object]] = ()
    alternative: str = "indexing"


def on_device(values: torch.Tensor) -> torch.Tensor:
    """A copy on the device."""
    return values.cuda()


def slots_of(count: int, rows: int, seed: int) -> torch.Tensor:
    """Different slots in random order, int32, in host memory."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randperm(rows, generator=generator)[:count] + 1).to(torch.int32)


class PlainEightBit:
    """K and V in 8-bit floats with scales, written by indexing the bytes."""

    def __init__(self, rows: int, dtype: torch.dtype) -> None:
        self._bytes = KVBuffers(rows, *HEADS, torch.uint8, "cuda")
        self._dtype = dtype

    def set_kv_buffer(self, indices: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Divides, converts and writes."""
        k, v = ((x / SCALE).to(self._dtype).view(torch.uint8) for x in (k, v))
        self._bytes.set_kv_buffer(indices, k, v)


@dataclass(frozen=True)
class Batch:
    """Rows of one call: slots in both widths, K and V in one piece, and a tensor of Q, K and V."""

    slots: torch.Tensor
    wide: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    qkv: torch.Tensor

    @classmethod
    def make(cls, count: int, rows: int, seed: int) -> Batch:
        """Random rows."""
        slots = slots_of(count, rows, seed)
        values = [torch.randn(count, *HEADS, device="cuda").to(torch.bfloat16) for _ in range(2)]
        qkv = torch.randn(count, 3, *HEADS, device="cuda").to(torch.bfloat16)
        return cls(on_device(slots), on_device(slots.long()), values[0], values[1], qkv)

    def sliced(self) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V as slices."""
        return self.qkv[:, 1], self.qkv[:, 2]


def row_cases(rows: int, tokens: Sequence[int]) -> Iterator[Case]:
    """Writes, reads and moves of rows of K and V."""
    elements = HEADS[0] * HEADS[1]
    for dtype, size in ((torch.bfloat16, 2), (torch.float8_e4m3fn, 1)):
        is_narrow = size == 1
        pool = kvpool.KVPool(rows, 1, *HEADS, "cuda", dtype)
        plain: Any = (
            PlainEightBit(rows + 8, dtype) if is_narrow else KVBuffers(rows + 8, *HEADS, dtype, "cuda")
        )
        scales = (SCALE, SCALE) if is_narrow else ()
        name = "fp8 with scales" if is_narrow else "bf16"
        for count in (count for count in tokens if count <= rows):
            # Together more than a cache holds, where rows are many.
            batches = [Batch.make(count, rows, seed) for seed in range(max(1, min(4, rows // count)))]
            moved = 2 * count * elements * (2 + size)
            yield Case(
                f"set_kv_buffer {name}, {count} tokens",
                [partial(pool.set_kv_buffer, 0, b.slots, b.k, b.v, *scales) for b in batches],
                moved,
                [partial(plain.set_kv_buffer, b.wide, b.k, b.v) for b in batches],
            )
            yield Case(
                f"set_kv_buffer {name}, {count} tokens of QKV",
                [partial(pool.set_kv_buffer, 0, b.slots, *b.sliced(), *scales) for b in batches],
                moved,
                [partial(plain.set_kv_buffer, b.wide, *b.sliced()) for b in batches],
            )
            if not is_narrow:
                yield from _reads_and_moves(pool, plain, batches, moved)


def _reads_and_moves(
    pool: kvpool.KVPool, plain: KVBuffers, batches: Sequence[Batch], moved: int
) -> Iterator[Case]:
    count = len(batches[0].slots)
    outs = [(torch.empty_like(b.k), torch.empty_like(b.v)) for b in batches]
    yield Case(
        f"gather_kv bf16, {count} tokens",
        [partial(pool.gather_kv, 0, b.slots, out) for b, out in zip(batches, outs, strict=True)],
        moved,
        [partial(plain.gather_kv, b.wide) for b in batches],
    )
    half = count // 2
    if half:
        yield Case(
            f"move_kv bf16, {half} tokens",
            [partial(pool.move_kv, b.slots[:half], b.slots[half : 2 * half]) for b in batches],
            moved // count * half,
            [partial(plain.move_kv, b.wide[:half], b.wide[half : 2 * half]) for b in batches],
        )


def state_cases(*, little: bool) -> Iterator[Case]:
    """Resets and copies of linear-attention states of the size of Qwen3-Next's."""
    layers, heads, k_dim, v_dim, channels, taps = (2, 2, 16, 16, 64, 4) if little else QWEN3_NEXT
    slots = 2 * max(STATES)
    pool = kvpool.GDNPool(slots, layers, heads, k_dim, v_dim, channels, taps, "cuda", torch.bfloat16)
    plain = States(tuple(pool.recurrent_state.shape), tuple(pool.conv_state.shape), torch.bfloat16, "cuda")
    one = layers * (heads * k_dim * v_dim * 4 + channels * (taps - 1) * 2)
    for count in STATES:
        chosen = slots_of(2 * count, slots, count)
        src, dst = on_device(chosen[:count]), on_device(chosen[count:])
        wide = on_device(chosen[:count].long()), on_device(chosen[count:].long())
        yield Case(
            f"reset_states, {count} of Qwen3-Next's",
            [partial(pool.reset_states, dst)],
            count * one,
            [partial(plain.reset_states, wide[1])],
        )
        yield Case(
            f"copy_states, {count} of Qwen3-Next's",
            [partial(pool.copy_states, src, dst)],
            2 * count * one,
            [partial(plain.copy_states, *wide)],
        )


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
    """What the memory can do: a copy of 1 GiB."""
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
    """A line for a reader."""
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
    """Times every case, or makes each call once."""
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
