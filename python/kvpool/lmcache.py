"""LMCache's names for pools of KV chunks, on top of `kvpool.ChunkPool`.

This module replaces `lmcache.storage_backend.mem_pool`: the same classes, arguments and results, and the same
number of chunks for a size. `KVObj.data` is contiguous, so that a chunk moves in one copy.
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
    from kvpool.typing import ChunkStats, DeviceLike

__all__ = [
    "BasePool",
    "KVObj",
    "LMCacheMemPoolMetadata",
    "LocalCPUBufferPool",
    "LocalCPUPool",
    "LocalGPUPool",
    "LocalPool",
]

_logger = logging.getLogger("kvpool")

# With debugging, a chunk is attributed to the line that called `allocate`.
_acts_for_callers = True

# Attribute of a `KVObj`, beside LMCache's fields, that holds its chunk.
_CHUNK = "_chunk"


@dataclass
class LMCacheMemPoolMetadata:
    """The chunks of a pool.

    Attributes:
        kv_shape: `(layers, 2, chunk_tokens, kv_heads, head_dim)` of a full chunk.
        kv_dtype: Element type, a `torch.dtype`.
        max_local_cache_size: In GB of 1024**3 bytes; fractions are allowed.
    """

    kv_shape: tuple[int, int, int, int, int]
    kv_dtype: Any
    max_local_cache_size: float


@dataclass
class KVObj:
    """An allocated chunk.

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
        """Return the number of chunks of the pool."""

    @abc.abstractmethod
    def allocate(self, kv_chunk: Any) -> KVObj | None:  # noqa: ANN401
        """Allocate a chunk that `kv_chunk` fits into, or return `None`."""

    @abc.abstractmethod
    def free(self, kv_obj: KVObj) -> None:
        """Free a chunk."""


class LocalPool(BasePool):
    """Chunks in memory of this machine, page-locked if there is a driver.

    Args:
        metadata: The chunks of the pool.

    Raises:
        ConfigError: If the shape does not have five extents, one is below 1, or the size is negative.
        TypeError: If the dtype is not supported.
        OutOfMemoryError: If there is not enough memory.
    """

    device: DeviceLike = "cpu"

    def __init__(self, metadata: LMCacheMemPoolMetadata) -> None:
        if len(metadata.kv_shape) != 5:  # noqa: PLR2004 - the five extents of `kv_shape`
            raise ConfigError(
                f"kv_shape is {tuple(metadata.kv_shape)}; "
                "it must be (layers, 2, chunk_tokens, kv_heads, head_dim)"
            )
        # A pool of one chunk gives the bytes of a chunk, and checks shape and dtype.
        probe = ChunkPool(1, metadata.kv_shape, metadata.kv_dtype, "cpu", pin_memory=False)
        self.chunk_size: int = metadata.kv_shape[2]
        self.size_per_chunk: int = probe.chunk_bytes
        self.max_chunk_num: int = self.init_max_chunk_num(metadata)
        self._dtype = probe.dtype
        self._shape = probe.chunk_shape
        # Frees of objects that no pool allocated.
        self._foreign_frees = 0
        self._pool = ChunkPool(self.max_chunk_num, metadata.kv_shape, metadata.kv_dtype, self.device)

    def init_max_chunk_num(self, metadata: LMCacheMemPoolMetadata) -> int:
        """Return the number of chunks: those that fit the size, and one more that the evictor expects."""
        size = metadata.max_local_cache_size
        if not math.isfinite(size) or size < 0:
            raise ConfigError(f"max_local_cache_size is {size}; it must be a number of GB, not negative")
        return int(size * 1024**3) // self.size_per_chunk + 1

    def allocate(self, kv_chunk: Any) -> KVObj | None:  # noqa: ANN401
        """Allocate a chunk for the tokens of `kv_chunk`. Copies nothing.

        Args:
            kv_chunk: A tensor `(layers, 2, tokens, kv_heads, head_dim)` of the pool's dtype.

        Returns:
            A `KVObj`, or `None` if all chunks are in use.

        Raises:
            ConfigError: If the shape does not fit.
            TypeError: If the dtype differs.
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
        """Free a chunk.

        A chunk that was already freed, belongs to another pool, or was allocated by no pool is dropped,
        counted in `stats()` and reported once.
        """
        chunk: Chunk | None = vars(kv_obj).get(_CHUNK)
        if chunk is not None:
            self._pool.free(chunk)
            return
        level = logging.DEBUG if self._foreign_frees else logging.WARNING
        self._foreign_frees += 1
        _logger.log(level, "dropped 1 of 1 freed chunks: %d (allocated by no pool)", kv_obj.chunk_idx)

    def stats(self) -> ChunkStats:
        """Return the statistics of `ChunkPool.stats`."""
        stats = self._pool.stats()
        stats["dropped_frees"] += self._foreign_frees
        return stats


class LocalCPUPool(LocalPool):
    """Chunks in host memory."""


class LocalCPUBufferPool(LocalCPUPool):
    """Chunks in host memory that buffer chunks on their way to a disk."""


class LocalGPUPool(LocalPool):
    """Chunks in the memory of the first GPU."""

    device: DeviceLike = "cuda"
