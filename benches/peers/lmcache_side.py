"""LMCache's pool of host memory, with the copies that a connector without a GPU would make."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

logging.disable(logging.WARNING)

from lmcache.utils import CacheEngineKey  # noqa: E402 - it logs as it is imported
from lmcache.v1.config import LMCacheEngineConfig  # noqa: E402
from lmcache.v1.memory_allocators.host_memory_allocator import HostMemoryAllocator  # noqa: E402
from lmcache.v1.memory_management import MemoryFormat  # noqa: E402
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend  # noqa: E402

if TYPE_CHECKING:
    from kvpool import KVPool

CHUNK = 256
"""Tokens of a chunk, LMCache's default."""


class Chunks:
    """A prompt in chunks, whose slots follow each other: the best case of a copy."""

    def __init__(self, kv: KVPool, tokens: int, first_slot: int, size: int) -> None:
        self._buffers = [[layer.flatten(1) for layer in kind] for kind in (kv.k_buffer, kv.v_buffer)]
        self._slices = [slice(first_slot + at, first_slot + at + CHUNK) for at in range(0, tokens, CHUNK)]
        k, _ = self._buffers
        self._shape = torch.Size([2, len(k), CHUNK, k[0].shape[1]])
        self._dtype = k[0].dtype
        config: Any = LMCacheEngineConfig
        self._backend: Any = LocalCPUBackend(
            config.from_defaults(), dst_device="cpu", memory_allocator=HostMemoryAllocator(size)
        )
        self._keys = [CacheEngineKey("model", 1, 0, at, self._dtype) for at in range(len(self._slices))]

    def empty(self) -> None:
        """Nothing is in the pool."""
        self._backend.clear()

    def down(self, _: int = 1) -> None:
        """Copies the prompt there."""
        for key, rows in zip(self._keys, self._slices, strict=True):
            chunk = self._backend.allocate(self._shape, self._dtype, MemoryFormat.KV_2LTD)
            assert chunk is not None
            for kind, buffers in enumerate(self._buffers):
                for layer, buffer in enumerate(buffers):
                    chunk.tensor[kind, layer].copy_(buffer[rows])
            self._backend.submit_put_task(key, chunk)
            chunk.ref_count_down()

    def up(self, _: int = 1) -> None:
        """Copies it back."""
        for key, rows in zip(self._keys, self._slices, strict=True):
            chunk = self._backend.get_blocking(key)
            assert chunk is not None
            for kind, buffers in enumerate(self._buffers):
                for layer, buffer in enumerate(buffers):
                    buffer[rows].copy_(chunk.tensor[kind, layer])
            chunk.ref_count_down()
