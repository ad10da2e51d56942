"""LMCache's names for pools of KV chunks, over `kvpool.ChunkPool`.

They take the place of `lmcache.storage_backend.mem_pool`: the same classes, arguments and results, and the
same number of chunks for a size. `KVObj.data` is contiguous, so that a chunk moves in one copy.
"""

from __future__ import annotations

import abc
import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvpool._kvpool import Chunk, ChunkPool
from kvpool.errors import ConfigError

if TYPE_CHECKING:
    from kvpool._typing import ChunkStats, DeviceLike

__all__ = [
    "BasePool",
    "KVObj",
    "LMCacheMemPoolMetadata",
    "LocalCPUBufferPool",
    "LocalCPUPool",
    "LocalGPUPool",
    "LocalPool",
]

# In debugging, a chunk belongs to the line that called `allocate`.
_acts_for_callers = True

# Where a `KVObj`, whose fields are LMCache's, has the chunk that it stands for.
_CHUNK = "_chunk"


@dataclass
class LMCacheMemPoolMetadata:
    """What a pool holds.

    Attributes:
        kv_shape: `(layers, 2, chunk_tokens, kv_heads, head_dim)` of a full chunk.
        kv_dtype: Of its elements, a `torch.dtype`.
        max_local_cache_size: In GB of 1024**3 bytes; fractions are allowed.
    """

    kv_shape: tuple[int, int, int, int, int]
    kv_dtype: Any
    max_local_cache_size: float


@dataclass
class KVObj:
    """A chunk that was allocated.

    Attributes:
        chunk_idx: Its number in the pool.
        size: Bytes of a full chunk.
        data: `(layers, 2, tokens, kv_heads, head_dim)`, contiguous, a view of the chunk.
    """

    chunk_idx: int
    size: int
    data: Any


class BasePool(abc.ABC):
    """A pool of chunks."""

    @abc.abstractmethod
    def init_max_chunk_num(self, metadata: LMCacheMemPoolMetadata) -> int:
        """How many chunks the pool has."""

    @abc.abstractmethod
    def allocate(self, kv_chunk: Any) -> KVObj | None:  # noqa: ANN401
        """Take a chunk that `kv_chunk` fits into, or return `None`."""

    @abc.abstractmethod
    def free(self, kv_obj: KVObj) -> None:
        """Give a chunk back."""


class LocalPool(BasePool):
    """Chunks in page-locked memory of this machine, as far as there is a driver.

    Args:
        metadata: What the pool holds.

    Raises:
        ConfigError: If the shape has not five extents, one is below 1, or the size is negative.
        TypeError: If the dtype cannot be stored.
        OutOfMemoryError: If the memory cannot be had.
    """

    device: DeviceLike = "cpu"

    def __init__(self, metadata: LMCacheMemPoolMetadata) -> None:
        if len(metadata.kv_shape) != 5:  # noqa: PLR2004 - the five extents of `kv_shape`
            raise ConfigError(
                f"kv_shape is {tuple(metadata.kv_shape)}; "
                "it must be (layers, 2, chunk_tokens, kv_heads, head_dim)"
            )
        # What a chunk takes is asked of a pool, which also checks shape and dtype.
        probe = ChunkPool(1, metadata.kv_shape, metadata.kv_dtype, "cpu", pin_memory=False)
        self.size_per_chunk = probe.chunk_bytes
        self.max_chunk_num = self.init_max_chunk_num(metadata)
        self._dtype = probe.dtype
        self._shape = probe.chunk_shape
        # Frees of what no pool allocated.
        self._strays = 0
        self._pool = ChunkPool(self.max_chunk_num, metadata.kv_shape, metadata.kv_dtype, self.device)

    def init_max_chunk_num(self, metadata: LMCacheMemPoolMetadata) -> int:
        """How many chunks the pool has: as many as the size holds, and one that the evictor counts on."""
        size = metadata.max_local_cache_size
        if not math.isfinite(size) or size < 0:
            raise ConfigError(f"max_local_cache_size is {size}; it must be a number of GB, not negative")
        return int(size * 1024**3) // self.size_per_chunk + 1

    def allocate(self, kv_chunk: Any) -> KVObj | None:  # noqa: ANN401
        """Take a chunk for as many tokens as `kv_chunk` has. Copies nothing.

        Args:
            kv_chunk: A tensor `(layers, 2, tokens, kv_heads, head_dim)` of the pool's dtype.

        Returns:
            A `KVObj`, or `None` if all chunks are in use.

        Raises:
            ConfigError: If the shape does not fit.
            TypeError: If the dtype is another one.
        """
        shape = tuple(kv_chunk.shape)
        layers, pair, most, heads, head_dim = self._shape
        fits = len(shape) == len(self._shape) and (*shape[:2], *shape[3:]) == (layers, pair, heads, head_dim)
        if not fits or shape[2] > most:
            raise ConfigError(
                f"kv_chunk has shape {shape}; it must be {self._shape} with at most {most} tokens"
            )
        if kv_chunk.dtype != self._dtype:
            raise TypeError(f"kv_chunk is {kv_chunk.dtype}, the pool {self._dtype}")
        chunk = self._pool.allocate()
        if chunk is None:
            return None
        kv_obj = KVObj(chunk.index, self.size_per_chunk, chunk.tensor(shape))
        vars(kv_obj)[_CHUNK] = chunk
        return kv_obj

    def free(self, kv_obj: KVObj) -> None:
        """Give a chunk back.

        What was freed before, or is of another pool, is dropped, counted in `stats()` and reported once.

        So is what no pool allocated, whatever number it has.
        """
        chunk: Chunk | None = vars(kv_obj).get(_CHUNK)
        if chunk is not None:
            self._pool.free(chunk)
            return
        level = logging.DEBUG if self._strays else logging.WARNING
        self._strays += 1
        logging.getLogger("kvpool").log(
            level, "dropped 1 of 1 freed chunks: %d (allocated by no pool)", kv_obj.chunk_idx
        )

    def stats(self) -> ChunkStats:
        """The numbers of `ChunkPool.stats`."""
        stats = self._pool.stats()
        stats["dropped_frees"] += self._strays
        return stats


class LocalCPUPool(LocalPool):
    """Chunks in host memory."""


class LocalCPUBufferPool(LocalCPUPool):
    """Chunks in host memory through which others pass on their way to a disk."""


class LocalGPUPool(LocalPool):
    """Chunks in the memory of the first GPU."""

    device: DeviceLike = "cuda"
