"""Every conversion to 8 bits, bit by bit, and rows beyond 2^31 elements of a buffer.

    python tests/gpu/exact.py [--dry]

The nearest value is what PyTorch gives, for e4m3 after values are held to its range, as it has no infinity; a
scale divides, as a float32 tensor by a float32 tensor. It ends with 1 if anything differs. `--dry` does the
same with few values on the CPU. A pool that does not fit into the GPU's memory is left out with the reason.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from functools import partial
from typing import TYPE_CHECKING

import records
import torch

import kvpool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Case = Callable[[], str]

HEADS = (8, 128)
WIDTH = HEADS[0] * HEADS[1]
FORMATS = (torch.float8_e4m3fn, torch.float8_e5m2)
SLICES = 64
SCALES = 20
BIG_ROWS = 4_500_000
LAYOUTS = ("both in one piece", "in one piece", "with strides")


class DifferentError(Exception):
    """Something is not as it should be."""


def nearest(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The nearest value of a format; e4m3 has no infinity, and ends at its largest value."""
    most = torch.finfo(dtype).max if dtype == torch.float8_e4m3fn else torch.inf
    return x.float().clamp(-most, most).to(dtype)


def differences(got: torch.Tensor, expected: torch.Tensor) -> int:
    """Bytes that differ; one NaN is as good as another."""
    nan = expected.float().isnan()
    wrong = (got.view(torch.uint8) != expected.view(torch.uint8)) & ~nan
    return int(wrong.sum()) + int((got.float().isnan() != nan).sum())


class Exact:
    """The cases.

    Args:
        dry: Few values, on the CPU.
    """

    def __init__(self, *, dry: bool) -> None:
        self._dry = dry
        self._device = "cpu" if dry else "cuda"
        self._count = 1 << (14 if dry else 26)

    def cases(self) -> Iterator[tuple[str, Case]]:
        for dtype in FORMATS:
            yield f"every float32 to {dtype}", partial(self.patterns, dtype)
            yield f"{SCALES} scales to {dtype}", partial(self.scales, dtype)
            for source in (torch.bfloat16, torch.float16):
                yield f"every {source} to {dtype}", partial(self.halves, source, dtype)
        yield "rows beyond 2^31 elements", self.big_pool

    def _written(self, x: torch.Tensor, dtype: torch.dtype, scale: float | None = None) -> list[torch.Tensor]:
        """Values as a pool stores them: K and V in one piece, and K in one piece and V with strides."""
        rows = x.numel() // WIDTH
        pool = kvpool.KVPool(rows, 1, *HEADS, self._device, dtype)
        slots = torch.arange(1, rows + 1, dtype=torch.int32, device=self._device)
        whole, strided = x.view(rows, *HEADS), x.view(*HEADS, rows).permute(2, 0, 1)
        k, v = (buffer[0].view(torch.uint8)[1 : rows + 1] for buffer in (pool.k_buffer, pool.v_buffer))
        pool.set_kv_buffer(0, slots, whole, whole, scale, scale)
        both = v.clone()
        pool.set_kv_buffer(0, slots, whole, strided, scale, scale)
        pool.check()
        return [part.flatten().view(dtype) for part in (both, k, v.permute(1, 2, 0))]

    def _compare(self, x: torch.Tensor, dtype: torch.dtype, scale: float | None = None) -> int:
        expected = nearest(
            x if scale is None else x.float() / torch.full_like(x, scale, dtype=torch.float32), dtype
        )
        for layout, got in zip(LAYOUTS, self._written(x, dtype, scale), strict=True):
            wrong = differences(got, expected)
            if wrong:
                at = int((got.view(torch.uint8) != expected.view(torch.uint8)).nonzero()[0])
                told = f"{x[at].item():.9g} gives {got[at].float():g} instead of {expected[at].float():g}"
                raise DifferentError(f"{wrong} of {len(x)} values {layout} differ, scale {scale}: {told}")
        return x.numel()

    def patterns(self, dtype: torch.dtype) -> str:
        """All 2^32 of them, or the beginning of each slice."""
        total, step = 0, (1 << 32) // SLICES
        for number in range(SLICES):
            begin = number * step - (1 << 31)
            bits = torch.arange(begin, begin + self._count, dtype=torch.int64, device=self._device)
            total += self._compare(bits.int().view(torch.float32), dtype)
        return f"{total:,} values"

    def scales(self, dtype: torch.dtype) -> str:
        """Random values of all magnitudes, divided by random scales."""
        generator = torch.Generator(self._device).manual_seed(7)

        def random(count: int) -> torch.Tensor:
            return torch.randn(count, generator=generator, device=self._device)

        x = random(self._count) * torch.exp2(random(self._count) * 6)
        total = 0
        for scale in torch.exp2(random(SCALES) * 3).tolist():
            total += self._compare(x, dtype, scale)
        return f"{total:,} values"

    def halves(self, source: torch.dtype, dtype: torch.dtype) -> str:
        """All 65,536 values of a format of 16 bits, and divided by scales."""
        bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int64, device=self._device)
        x = bits.short().view(source)
        total = sum(
            self._compare(x, dtype, scale) for scale in (None, 0.37, 2.0, 3.7, 1e-3, 1e3, 1e-30, 1e30)
        )
        return f"{total:,} values"

    def big_pool(self) -> str:
        """Rows around 2^31 bytes, 2^31 elements, 2^32 elements, and the ends: written, read, moved."""
        rows = 5000 if self._dry else BIG_ROWS
        need = 2 * (rows + 2) * WIDTH * 2 + (1 << 30)
        if not self._dry:
            free = torch.cuda.mem_get_info()[0]
            if free < need:
                return f"skipped: it needs {need / 1e9:.1f} GB, and {free / 1e9:.1f} are free"
        pool = kvpool.KVPool(rows, 1, *HEADS, self._device, torch.bfloat16)
        marks = [1 << bits for bits in ((8, 11, 12) if self._dry else (20, 21, 22))]
        near = sorted(
            {at for mark in (1, *marks, rows) for at in range(mark - 9, mark + 10) if 1 <= at <= rows}
        )
        taken = set(near)
        free_rows = (at for at in range(rows // 3, rows) if at not in taken)
        others = list(itertools.islice(free_rows, len(near)))
        generator = torch.Generator().manual_seed(5)
        order = torch.randperm(len(near), generator=generator)
        slots, targets = (
            torch.tensor(at, device=self._device)[order.to(self._device)] for at in (near, others)
        )
        values = [
            torch.randn(len(near), *HEADS, generator=generator).bfloat16().to(self._device) for _ in "kv"
        ]

        def check(what: str, at: torch.Tensor) -> None:
            read = pool.gather_kv(0, at)
            straight = pool.k_buffer[0][at], pool.v_buffer[0][at]
            for name, *found, expected in zip("KV", read, straight, values, strict=True):
                for got in found:
                    wrong = (got != expected).flatten(1).any(1)
                    if wrong.any():
                        raise DifferentError(f"{name} {what}: rows {at[wrong][:5].tolist()} are wrong")
            pool.check()

        for narrow in (torch.int32, torch.int64):
            pool.set_kv_buffer(0, slots.to(narrow), *values)
            check(f"written, {narrow}", slots)
            pool.move_kv(targets.to(narrow), slots.to(narrow))
            check(f"moved, {narrow}", targets)
            pool.set_kv_buffer(0, slots.to(narrow), *(torch.zeros_like(value) for value in values))
            pool.move_kv(slots.to(narrow), targets.to(narrow))
            check(f"moved back, {narrow}", slots)
        return f"{len(near)} rows of {pool.k_buffer[0].numel() * 2 / 1e9:.1f} GB a buffer"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dry", action="store_true", help="few values, on the CPU")
    arguments = parser.parse_args()
    failed = 0
    for what, case in Exact(dry=arguments.dry).cases():
        start = time.monotonic()
        try:
            told = case()
        except (DifferentError, RuntimeError) as error:
            failed += 1
            told = f"FAILED: {error}"
        if not arguments.dry:
            torch.cuda.empty_cache()
        print(f"{what}: {told} ({time.monotonic() - start:.1f} s)", flush=True)
        records.add("exact", what=what, told=told)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
