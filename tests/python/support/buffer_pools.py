"""Buffers of a pool, and what lies in them."""

from __future__ import annotations

import itertools
import mmap
from typing import TYPE_CHECKING

import devices
import numpy as np
import torch

from kvpool import Buffer, BufferPool

if TYPE_CHECKING:
    from collections.abc import Iterable


def make(rounding: str = "pow2") -> BufferPool:
    return BufferPool(devices.current(), rounding=rounding)  # type: ignore[arg-type]


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor."""
    return tensor.flatten().view(torch.uint8)


def mark(buffer: Buffer, value: int) -> None:
    flat(buffer.tensor).fill_(value)


def holds(buffer: Buffer, value: int) -> bool:
    return bool(flat(buffer.tensor).cpu().eq(value).all())


def are_apart(buffers: Iterable[Buffer]) -> bool:
    """Whether no two of them have a byte of their buckets in common. Without elements there is no address."""
    spans = sorted((buffer.tensor.data_ptr(), buffer.capacity) for buffer in buffers if buffer.nbytes)
    return all(start + size <= after for (start, size), (after, _) in itertools.pairwise(spans))


def address(buffer: Buffer) -> int:
    where: int = buffer.tensor.data_ptr()
    return where


def addresses(buffers: Iterable[Buffer]) -> list[int]:
    return [address(buffer) for buffer in buffers]


def in_use(pool: BufferPool) -> tuple[int, int]:
    return pool.in_use_count, pool.in_use_bytes


def free(pool: BufferPool) -> tuple[int, int]:
    return pool.free_count, pool.free_bytes


def outside(size: int = 1000) -> torch.Tensor:
    """Host memory that was allocated outside of the pool, in pages of its own."""
    memory = np.frombuffer(mmap.mmap(-1, 4 * size), np.int32)
    return torch.from_numpy(memory).copy_(torch.arange(size, dtype=torch.int32))
