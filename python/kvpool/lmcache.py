"""The public path of `kvpool.integrations.lmcache.mem_pool`."""

from kvpool.integrations.lmcache.mem_pool import (
    BasePool,
    KVObj,
    LMCacheMemPoolMetadata,
    LocalCPUBufferPool,
    LocalCPUPool,
    LocalGPUPool,
    LocalPool,
)

__all__ = [
    "BasePool",
    "KVObj",
    "LMCacheMemPoolMetadata",
    "LocalCPUBufferPool",
    "LocalCPUPool",
    "LocalGPUPool",
    "LocalPool",
]
