"""Types of arguments and results, for annotations of your own.

Importing the module imports neither PyTorch nor NumPy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol, SupportsIndex, TypeAlias, TypedDict

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import torch

__all__ = [
    "ArenaPrefixStats",
    "ArenaStats",
    "ArenaTierStats",
    "ArrayLike",
    "BlockLike",
    "BufferStats",
    "ChunkStats",
    "CountedStats",
    "DTypeLike",
    "DeviceLike",
    "EndpointStats",
    "Fence",
    "Fit",
    "GroupKind",
    "HybridAction",
    "InFlight",
    "IndicesLike",
    "KVStats",
    "KeysLike",
    "Layout",
    "LeakState",
    "Namespace",
    "Policy",
    "PoolStats",
    "PrefixStats",
    "Pressure",
    "Rounding",
    "SlotStats",
    "StoreStats",
    "StreamLike",
    "SupportsCudaStream",
    "SupportsStreamProtocol",
    "TableIndex",
    "TensorLike",
    "TierName",
    "TierStats",
    "TrackStats",
    "UnitStats",
    "WriteMode",
]


class Fence(Protocol):
    """A point in work in flight, such as a `torch.cuda.Event`."""

    def query(self) -> bool:
        """Return whether the work is done."""
        ...


class InFlight(Protocol):
    """Work in flight: `ChunkCopy`, `Load`, `Fetch`, `StoreTransfer`; `Transfer`, `SlotLease` of `remote`.

    It can be a fence of `TokenToKVPoolAllocator.free`: when it is over, nothing uses its memory any more.
    """

    def query(self) -> bool:
        """Return whether it is over. Does not wait. A load that has failed raises its error."""
        ...

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is over, at most for `timeout` seconds, and return whether it is.

        A load or transfer that has failed raises its error.
        """
        ...

    def cancel(self) -> None:
        """Give up what has not begun. It is over when the rest is: what runs on a stream is not cut off."""
        ...

    @property
    def error(self) -> Exception | None:
        """The reason why it has failed; `None` if it has not."""
        ...


class TensorLike(Protocol):
    """A `torch.Tensor`, a NumPy array, a `kvpool.Tensor`, or any other tensor that supports DLPack."""

    def __dlpack__(self, *args: Any, **options: Any) -> Any:  # noqa: ANN401 - frameworks differ in what they take
        """Return a DLPack capsule."""
        ...

    def __dlpack_device__(self) -> tuple[Any, int]:
        """Return the DLPack device: its type and number."""
        ...


class SupportsCudaStream(Protocol):
    """A stream object, such as a `torch.cuda.Stream`."""

    @property
    def cuda_stream(self) -> int:
        """The handle of the stream."""
        ...


class SupportsStreamProtocol(Protocol):
    """A stream object of `cuda.core`, CuPy, Numba and others, by the protocol that NVIDIA proposes."""

    def __cuda_stream__(self) -> tuple[int, int]:
        """Return the version of the protocol, which is 0, and the handle. It may be a property, too."""
        ...


class ArrayLike(Protocol):
    """An object that NumPy makes an array of: a series of Polars or pandas, an array of Arrow in chunks."""

    def __array__(self, *args: Any, **options: Any) -> np.ndarray[Any, Any]:  # noqa: ANN401 - as above
        """Return an array of the values."""
        ...


class BlockLike(Protocol):
    """A block of an engine: one of a `BlockQueue`, or of the engine's own."""

    @property
    def block_id(self) -> int:
        """The number of the block."""
        ...


IndicesLike: TypeAlias = "TensorLike | ArrayLike | Sequence[SupportsIndex] | SupportsIndex"
"""Integers of 16 to 64 bits, or a single int: slots, rows, pages or lengths."""

TableIndex: TypeAlias = (
    "tuple[SupportsIndex, slice] | tuple[SupportsIndex | IndicesLike, SupportsIndex | IndicesLike]"
)
"""A place in a request table: `(row, slice)`, `(row, column)`, or `(rows, columns)`."""

KeysLike: TypeAlias = "TensorLike | Sequence[bytes]"
"""Keys of pages: `bytes` objects of 32 bytes, or a uint8 array of shape `[n, 32]`."""

Namespace: TypeAlias = "str | bytes | int | None"
"""The name that keeps cached prefixes apart, such as that of an adapter or a tenant."""

DeviceLike: TypeAlias = "str | torch.device"
"""A name such as "cpu", "cuda" or "cuda:1", or a `torch.device`."""

DTypeLike: TypeAlias = "str | torch.dtype | np.dtype[Any] | type[np.generic]"
"""A `torch.dtype`, a NumPy dtype, or the name of one."""

StreamLike: TypeAlias = "SupportsCudaStream | SupportsStreamProtocol | int"
"""A `torch.cuda.Stream`, a stream of `cuda.core`, CuPy or Numba, or the handle of a CUDA stream."""

Policy: TypeAlias = "Literal['adaptive', 'lru', 'fifo', 'lfu', 'slru', 'priority']"
"""The order in which a prefix cache evicts."""

Fit: TypeAlias = "Literal['first_fit', 'best_fit']"
"""The run of free slots that an allocation takes: the lowest that is long enough, or the shortest."""

GroupKind: TypeAlias = "Literal['full', 'window', 'chunk', 'state']"
"""How long the entries of a group of a `CacheLayout` are needed."""

Layout: TypeAlias = "Literal['split', 'fused']"
"""Where the K and V of a layer of a `KVPool` are: in two buffers, or in one."""

Rounding: TypeAlias = "Literal['pow2', 'fine']"
"""The sizes of the buckets of a `BufferPool`."""

WriteMode: TypeAlias = "Literal['through', 'selective', 'back']"
"""When pages are copied to a `HostTier`: when they are published, used again, or evicted."""

TierName: TypeAlias = "Literal['device', 'host']"
"""The tier of the pages of an event."""

Pressure: TypeAlias = "Literal['alloc', 'evict', 'clear']"
"""The cause of an eviction."""

LeakState: TypeAlias = "Literal['live', 'evictable', 'locked']"
"""Who holds units: an owner, or a prefix cache alone, without leases or with."""

HybridAction: TypeAlias = (
    "tuple[Literal['free', 'free_full'], int, int] | tuple[Literal['free_old'], torch.Tensor] "
    "| tuple[Literal['rebuild'], int, torch.Tensor] | tuple[Literal['recover'], int, torch.Tensor, int, int] "
    "| tuple[Literal['evict_excess'], int]"
)
"""An action that an engine takes for a step of a `HybridTree`. This type changes with that class."""


class PoolStats(TypedDict):
    """Statistics of every pool.

    Attributes:
        capacity: Units that the pool has room for.
        bytes: Bytes of its memory; of the bookkeeping, if the pool has no memory of its own.
    """

    capacity: int
    bytes: int


class UnitStats(PoolStats):
    """Statistics of a pool that hands out units.

    Attributes:
        available: Free units.
        in_use: Units that have an owner.
        high_water: The most units that were in use at once.
    """

    available: int
    in_use: int
    high_water: int


class CountedStats(UnitStats):
    """Statistics of a pool that drops bad frees.

    Attributes:
        dropped_frees: Units that were freed although they had no owner.
    """

    dropped_frees: int


class ArenaStats(CountedStats):
    """Statistics of `CacheArena`, in slabs.

    Attributes:
        units_in_use: Units in use, of all groups.
    """

    units_in_use: int


class SlotStats(CountedStats):
    """Statistics of `TokenToKVPoolAllocator`, in slots.

    On a strict pool `stats()` does not settle pending frees: their errors belong in `alloc` and `free`.

    Attributes:
        free: Slots that the next call can take.
        released: Slots that were freed, and join the free ones when these run out.
        fenced: Slots that were freed behind a fence that has not passed.
        shared: Slots with more than one owner.
        cached: Slots of a prefix cache, which are in use.
        pending: Slots that were freed with values that only the GPU has yet.
        size: Slots of the pool, as `capacity`.
        page_size: Slots per page.
        device_bytes: Bytes of GPU memory for the index tensors.
    """

    free: int
    released: int
    fenced: int
    shared: int
    cached: int
    pending: int
    size: int
    page_size: int
    device_bytes: int


class TrackStats(CountedStats):
    """Statistics of `GDNPool`, in track slots.

    Attributes:
        cached: Track slots of prefix caches, which are in use.
    """

    cached: int


class ChunkStats(CountedStats):
    """Statistics of `ChunkPool`. Chunks with copies in flight are in use.

    Attributes:
        page_locked: Chunks that are page-locked.
    """

    page_locked: int


class BufferStats(UnitStats):
    """Statistics of `BufferPool`.

    Attributes:
        stale_uses: Calls with a buffer that was already given back.
        free_bytes: Bytes of free buffers.
        in_use_bytes: Bytes of buffers in use, in whole buckets.
        high_water_bytes: The most bytes that were in use at once.
        registered_bytes: Bytes of registered memory.
    """

    stale_uses: int
    free_bytes: int
    in_use_bytes: int
    high_water_bytes: int
    registered_bytes: int


class KVStats(PoolStats):
    """Statistics of `KVPool`, which hands out no units.

    Attributes:
        rows: Rows of each buffer, with those of the padding page.
        layer_num: Layers.
        page_size: Rows per page.
    """

    rows: int
    layer_num: int
    page_size: int


class PrefixStats(PoolStats):
    """Statistics of `PrefixCache`, which hands out no units. Its `capacity` is that of the allocator.

    Attributes:
        lookups: Calls of `match`.
        hit_tokens: Tokens that were found, over all lookups.
        missed_tokens: Tokens that were not found, over all lookups.
        published: Tokens that requests have published.
        duplicates: Published tokens that were cached before.
        evicted: Tokens that were evicted.
        loaded: Tokens that came back from the tier below.
        cached: Tokens that are cached.
        evictable: Cached tokens that can be evicted.
        locked: Cached tokens that are in use.
        nodes: Nodes of the tree.
        snapshots: Snapshots of states.
        waiting: Requests that wait: those of `add_waiting`.
    """

    lookups: int
    hit_tokens: int
    missed_tokens: int
    published: int
    duplicates: int
    evicted: int
    loaded: int
    cached: int
    evictable: int
    locked: int
    nodes: int
    snapshots: int
    waiting: int


class ArenaPrefixStats(PoolStats):
    """Statistics of `ArenaPrefixCache`, which hands out no units.

    `capacity` is in tokens: those of which the arena could keep all units of full groups, and nothing else.

    Attributes:
        lookups: Calls of `match`.
        hit_tokens: Tokens that were found, over all lookups.
        missed_tokens: Tokens that were not found, over all lookups.
        published: Tokens that requests have published.
        duplicates: Published tokens that were cached before.
        loaded: Tokens that came back from host memory.
        evicted: Tokens that were evicted.
        cached: Tokens that are cached.
        evictable: Cached tokens that no lease holds.
        locked: Cached tokens that are in use.
        units: Units of all groups; each layer of a state that is placed layer by layer counts.
        evicted_units: Units that were evicted.
        nodes: Nodes of the tree.
        snapshots: Snapshots of states.
        waiting: Requests that wait: those of `add_waiting`.
    """

    lookups: int
    hit_tokens: int
    missed_tokens: int
    published: int
    duplicates: int
    loaded: int
    evicted: int
    cached: int
    evictable: int
    locked: int
    units: int
    evicted_units: int
    nodes: int
    snapshots: int
    waiting: int


class TierStats(PoolStats):
    """Statistics of `HostTier`, which hands out no units.

    `capacity` is in pages. Numbers without a unit count pages and snapshots of states together.

    Attributes:
        pages: Pages that are found.
        arriving: On their way from the device or a store.
        state_capacity: Snapshots of states that the tier has room for.
        states: Snapshots of states that are found.
        written: Copied from the device.
        loaded: Copied back to the device.
        evicted: Evicted to make room.
        skipped: Not written, because there was no room.
        failed: Not written, because a copy failed.
        fetched: Copied from a store.
        storing: On their way to a store, those that wait included.
        unstored: Not taken by a store.
        damaged: Given up, because host memory had other bytes than those that came.
        page_locked: Places that are page-locked.
        staging_bytes: GPU memory through which copies come here.
    """

    pages: int
    arriving: int
    state_capacity: int
    states: int
    written: int
    loaded: int
    evicted: int
    skipped: int
    failed: int
    fetched: int
    storing: int
    unstored: int
    damaged: int
    page_locked: int
    staging_bytes: int


class ArenaTierStats(PoolStats):
    """Statistics of `ArenaHostTier`, which hands out no units.

    `capacity`, `available` and `in_use` are in slabs; the others, without a unit, count units of all groups,
    those of each layer for states that are placed layer by layer.

    Attributes:
        available: Slabs that are empty.
        in_use: Slabs with units.
        units: Units that are in use.
        written: Copied from the device.
        loaded: Copied back to the device.
        skipped: Not written, because nothing could be given up for them.
        failed: Not written, because a copy failed.
        damaged: Found with other bytes than those that came.
        fetched: Copied from a store.
        unstored: Not taken by a store.
        page_locked: Bytes that are page-locked.
        staging_bytes: GPU memory through which copies come here.
    """

    available: int
    in_use: int
    units: int
    written: int
    loaded: int
    skipped: int
    failed: int
    damaged: int
    fetched: int
    unstored: int
    page_locked: int
    staging_bytes: int


class StoreStats(TypedDict):
    """Statistics of `FileStore`.

    Attributes:
        pages: Pages that are found.
        capacity: Pages that the store has room for.
        queued: Pages that wait to be written or are being written.
        bytes: Bytes of the pages that are found.
        hits: Pages that were read.
        misses: Pages that were not found, or could not be read.
        evicted: Pages that were evicted.
        damaged: Pages whose checksum was wrong.
        dropped: Pages that were not written, because the queue was full, or the store with pages that come
            before them or were used later.
        errors: Operations on the files that failed.
        read_bytes: Bytes that were read.
        written_bytes: Bytes that were written.
    """

    pages: int
    capacity: int
    queued: int
    bytes: int
    hits: int
    misses: int
    evicted: int
    damaged: int
    dropped: int
    errors: int
    read_bytes: int
    written_bytes: int


class EndpointStats(TypedDict):
    """Statistics of an endpoint of `kvpool.remote`.

    Attributes:
        peers: Endpoints that are connected.
        leases: Leases that last.
        running: Reads in progress.
        returned: Leases that peers have returned, or filled.
        expired: Leases whose time was over.
        completed: Reads that brought their rows.
        failed: Reads that failed.
        cuts: Connections that were ended to end reads that failed.
        refused: Notes of peers that could not be used.
        rows: Slots and states that completed reads brought.
        runs: Contiguous pieces in which these rows were copied, over all buffers.
        bytes: The bytes of these rows.
        seconds: The sum of the times of completed reads.
    """

    peers: int
    leases: int
    running: int
    returned: int
    expired: int
    completed: int
    failed: int
    cuts: int
    refused: int
    rows: int
    runs: int
    bytes: int
    seconds: float
