"""Memory core of an LLM serving engine.

A scheduler allocates KV-cache memory once. Then, thousands of times a second, it allocates token slots, maps
requests to slots, passes index tensors to attention kernels and frees everything. The bookkeeping is written
in Rust; tensors share memory with it.

Tensors are `torch.Tensor` if PyTorch is installed, else `kvpool.Tensor`, which supports DLPack. Importing
this package needs neither PyTorch nor CUDA nor NumPy.
"""

import atexit
import importlib
import os
from types import ModuleType
from typing import TYPE_CHECKING

from kvpool import _fork  # noqa: F401 - registers its handlers
from kvpool._kvpool import (
    ArenaHostTier,
    ArenaLease,
    ArenaPlan,
    ArenaPlanner,
    ArenaPrefixCache,
    BatchPlan,
    BatchPlanner,
    Buffer,
    BufferPool,
    CacheArena,
    CacheLayout,
    Chunk,
    ChunkCopy,
    ChunkPool,
    Cleared,
    Fetch,
    FileStore,
    GDNPool,
    Group,
    GroupPlan,
    GroupReport,
    HostPlan,
    HostTier,
    KVPool,
    Lease,
    LeasedUnits,
    Load,
    PagePool,
    Plane,
    Pool,
    PrefixCache,
    Published,
    Removed,
    ReqToTokenPool,
    Segment,
    Session,
    SlabLayout,
    Stored,
    StoreTransfer,
    Tensor,
    TokenToKVPoolAllocator,
    WaitingRequest,
    __version__,
    _report_leaks_with,
    get_num_threads,
    set_num_threads,
)
from kvpool.errors import (
    ArgumentError,
    BackendUnavailableError,
    ConfigError,
    DriverError,
    IndexOwnershipError,
    KvPoolError,
    OutOfMemoryError,
    StaleBufferError,
    StaleError,
    StateError,
    WorkspaceExhaustedError,
)
from kvpool.factories import make_full_attention_net_mem_pool, make_req_to_token_pool
from kvpool.prefill_cost import PrefillCost
from kvpool.store import Store
from kvpool.workspace import Workspace

if TYPE_CHECKING:
    from kvpool import attention as attention
    from kvpool import metrics as metrics
    from kvpool import typing as typing
    from kvpool import verify as verify
    from kvpool.observe.leaks import Leak
    from kvpool.observe.registry import pools
    from kvpool.observe.snapshot_file import snapshot

__all__ = [
    "ArenaHostTier",
    "ArenaLease",
    "ArenaPlan",
    "ArenaPlanner",
    "ArenaPrefixCache",
    "ArgumentError",
    "BackendUnavailableError",
    "BatchPlan",
    "BatchPlanner",
    "Buffer",
    "BufferPool",
    "CacheArena",
    "CacheLayout",
    "Chunk",
    "ChunkCopy",
    "ChunkPool",
    "Cleared",
    "ConfigError",
    "DriverError",
    "Fetch",
    "FileStore",
    "GDNPool",
    "Group",
    "GroupPlan",
    "GroupReport",
    "HostPlan",
    "HostTier",
    "IndexOwnershipError",
    "KVPool",
    "KvPoolError",
    "Leak",
    "Lease",
    "LeasedUnits",
    "Load",
    "OutOfMemoryError",
    "PagePool",
    "Plane",
    "Pool",
    "PrefillCost",
    "PrefixCache",
    "Published",
    "Removed",
    "ReqToTokenPool",
    "Segment",
    "Session",
    "SlabLayout",
    "StaleBufferError",
    "StaleError",
    "StateError",
    "Store",
    "StoreTransfer",
    "Stored",
    "Tensor",
    "TokenToKVPoolAllocator",
    "WaitingRequest",
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

# Imported on first use.
_OBSERVERS = {"Leak": "leaks", "pools": "registry", "snapshot": "snapshot_file"}
_MODULES = frozenset({"attention", "metrics", "typing", "verify"})

if not TYPE_CHECKING:
    # A type checker that saw it would take every name for one of this module.
    def __getattr__(name: str) -> object:
        if name in _MODULES:
            return importlib.import_module(f"{__name__}.{name}")
        if name not in _OBSERVERS:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = globals()[name] = getattr(_observer(_OBSERVERS[name]), name)
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_OBSERVERS})


def _observer(name: str) -> ModuleType:
    return importlib.import_module(f"{__name__}.observe.{name}")


def _at_exit(process: int) -> None:
    """Report live units, where every pool records owners. A forked process has none of its own."""
    if os.environ.get("KVPOOL_DEBUG", "").lower() in {"1", "true", "yes", "on"} and os.getpid() == process:
        _observer("leaks").report_at_exit()


_report_leaks_with(lambda: _observer("reports"))
atexit.register(_at_exit, os.getpid())
