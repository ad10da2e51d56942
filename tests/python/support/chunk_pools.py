"""Pools of chunks, what lies in them, and the threads that page-lock them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import devices
import torch
from common import some

from kvpool import Chunk, ChunkPool

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def make(
    num_chunks: int = 3,
    chunk_shape: int | Sequence[int] = (2, 6),
    dtype: torch.dtype = torch.float32,
    where: str | None = None,
    pin_memory: bool = True,
    **options: Any,  # noqa: ANN401
) -> ChunkPool:
    return ChunkPool(num_chunks, chunk_shape, dtype, where or devices.current(), pin_memory, **options)


def take(pool: ChunkPool, count: int) -> list[Chunk]:
    return [some(pool.allocate()) for _ in range(count)]


def indices(chunks: Sequence[Chunk]) -> list[int]:
    return [chunk.index for chunk in chunks]


def counts(pool: ChunkPool) -> tuple[int, int, int, int]:
    stats = pool.stats()
    return stats["available"], stats["in_use"], stats["high_water"], stats["dropped_frees"]


def put(tensor: torch.Tensor, where: str) -> torch.Tensor:
    """A tensor with the same values and strides on a device."""
    with devices.on(where):
        return devices.to_current(tensor)


def numbers(count: int, dtype: torch.dtype = torch.float32, start: int = 0) -> torch.Tensor:
    """Small integers, each of which every dtype has."""
    return ((torch.arange(count) + start) % 13).to(torch.float32).to(dtype)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of the elements, in order, in host memory."""
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8)


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(raw(left), raw(right))


def fill(chunk: Chunk, value: float) -> None:
    tensor = chunk.tensor()
    tensor.copy_(torch.full(tensor.shape, value).to(tensor.dtype))


def read(chunk: Chunk) -> list[float]:
    values: list[float] = chunk.tensor().cpu().float().reshape(-1).tolist()
    return values


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda x: x[:24].view(4, 6),
    "all": lambda x: x,
    "one_element": lambda x: x[7:8],
    "no_dimensions": lambda x: x[5],
    "empty": lambda x: x[:0],
    "empty_of_many": lambda x: x[:0].view(3, 0, 2),
    "every_other": lambda x: x[::2],
    "from_the_middle": lambda x: x[5:20],
    "column": lambda x: x.view(12, 6)[:, 2],
    "column_of_one": lambda x: x.view(12, 6)[:, 2:3],
    "block": lambda x: x.view(12, 6)[2:6, 1:4],
    "transposed": lambda x: x[:24].view(4, 6).T,
    "permuted": lambda x: x[:24].view(2, 3, 4).permute(2, 0, 1),
    "tokens": lambda x: x.view(2, 2, 6, 3)[:, :, 1:4],
    "one_token": lambda x: x.view(2, 2, 6, 3)[:, :, 3:4],
    "of_many_dimensions": lambda x: x[:64].view(2, 2, 2, 2, 2, 2).permute(5, 0, 4, 1, 3, 2),
}
