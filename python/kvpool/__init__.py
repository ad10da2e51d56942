"""Memory core of an LLM serving engine.

A scheduler allocates KV-cache memory once and then, many thousands of times a second, takes token slots,
maps requests to slots, hands index tensors to attention kernels and gives everything back. Rust does the
bookkeeping; tensors share memory with it.

With PyTorch installed all tensors are `torch.Tensor`; without it `kvpool.Tensor`, which speaks DLPack.
Neither PyTorch nor CUDA nor NumPy is needed to import this package.
"""

from kvpool._kvpool import (
    BatchPlan,
    BatchPlanner,
    Buffer,
    BufferPool,
    Chunk,
    ChunkCopy,
    ChunkPool,
    GDNPool,
    HostPlan,
    KVPool,
    PagePool,
    Pool,
    ReqToTokenPool,
    Tensor,
    TokenToKVPoolAllocator,
    __version__,
    get_num_threads,
    set_num_threads,
)
from kvpool._leaks import Leak
from kvpool._pools import pools
from kvpool._snapshot import snapshot
from kvpool.errors import (
    BackendUnavailableError,
    ConfigError,
    DriverError,
    IndexOwnershipError,
    KvPoolError,
    OutOfMemoryError,
    StaleBufferError,
    WorkspaceExhaustedError,
)
from kvpool.factories import make_full_attention_net_mem_pool, make_req_to_token_pool
from kvpool.workspace import Workspace

__all__ = [
    "BackendUnavailableError",
    "BatchPlan",
    "BatchPlanner",
    "Buffer",
    "BufferPool",
    "Chunk",
    "ChunkCopy",
    "ChunkPool",
    "ConfigError",
    "DriverError",
    "GDNPool",
    "HostPlan",
    "IndexOwnershipError",
    "KVPool",
    "KvPoolError",
    "Leak",
    "OutOfMemoryError",
    "PagePool",
    "Pool",
    "ReqToTokenPool",
    "StaleBufferError",
    "Tensor",
    "TokenToKVPoolAllocator",
    "Workspace",
    "WorkspaceExhaustedError",
    "__version__",
    "get_num_threads",
    "make_full_attention_net_mem_pool",
    "make_req_to_token_pool",
    "pools",
    "set_num_threads",
    "snapshot",
]
