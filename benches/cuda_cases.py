"""The cases that are timed on a GPU: rows of K and V and states, in kvpool and in plain PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from reference import KVBuffers, States

import kvpool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

HEADS = (8, 128)
QWEN3_NEXT = (36, 32, 128, 128, 8192, 4)
"""Linear-attention layers, value heads, their dimensions, channels and taps of Qwen3-Next-80B-A3B."""
STATES = (1, 8, 16)
SCALE = 2.0
MEASURED = 16384
"""Tokens of the calls that have to come near to the memory's bandwidth."""


@dataclass(frozen=True)
class Case:
    """Something to time.

    Attributes:
        what: What it is called.
        ours: Calls of kvpool, on different data, made in turn.
        moved: Bytes that a call has to read and write; 0 if bytes are not the point.
        theirs: The same in plain PyTorch, if there is an obvious way.
        alternative: What that is.
        bandwidth: The call of PyTorch that shows what the memory allows, if the case is to come near to it.
        least_ratio: The target, as the least that the time of `theirs` over that of `ours` may be.
    """

    what: str
    ours: Sequence[Callable[[], object]]
    moved: int = 0
    theirs: Sequence[Callable[[], object]] = ()
    alternative: str = "indexing"
    bandwidth: str = ""
    least_ratio: float | None = None


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
            bandwidth = "copy_" if count == MEASURED else ""
            yield Case(
                f"set_kv_buffer {name}, {count} tokens",
                [partial(pool.set_kv_buffer, 0, b.slots, b.k, b.v, *scales) for b in batches],
                moved,
                [partial(plain.set_kv_buffer, b.wide, b.k, b.v) for b in batches],
                bandwidth="" if is_narrow else bandwidth,
                least_ratio=None if is_narrow else 1.0,
            )
            yield Case(
                f"set_kv_buffer {name}, {count} tokens of QKV",
                [partial(pool.set_kv_buffer, 0, b.slots, *b.sliced(), *scales) for b in batches],
                moved,
                [partial(plain.set_kv_buffer, b.wide, *b.sliced()) for b in batches],
            )
            if not is_narrow:
                yield from _reads_and_moves(pool, plain, batches, moved, bandwidth)


def _reads_and_moves(
    pool: kvpool.KVPool, plain: KVBuffers, batches: Sequence[Batch], moved: int, bandwidth: str
) -> Iterator[Case]:
    count = len(batches[0].slots)
    outs = [(torch.empty_like(b.k), torch.empty_like(b.v)) for b in batches]
    yield Case(
        f"gather_kv bf16, {count} tokens",
        [partial(pool.gather_kv, 0, b.slots, out) for b, out in zip(batches, outs, strict=True)],
        moved,
        [partial(plain.gather_kv, b.wide) for b in batches],
        bandwidth=bandwidth,
        least_ratio=1.0,
    )
    half = count // 2
    if half:
        yield Case(
            f"move_kv bf16, {half} tokens",
            [partial(pool.move_kv, b.slots[:half], b.slots[half : 2 * half]) for b in batches],
            moved // count * half,
            [partial(plain.move_kv, b.wide[:half], b.wide[half : 2 * half]) for b in batches],
            bandwidth=bandwidth,
            least_ratio=1.0,
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
            bandwidth="zero_" if count > 1 else "",
        )
        yield Case(
            f"copy_states, {count} of Qwen3-Next's",
            [partial(pool.copy_states, src, dst)],
            2 * count * one,
            [partial(plain.copy_states, *wide)],
            bandwidth="copy_" if count > 1 else "",
        )
