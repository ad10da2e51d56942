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
    "ArrayLike",
    "BlockLike",
    "BufferStats",
    "ChunkStats",
    "CountedStats",
    "DTypeLike",
    "DeviceLike",
    "EndpointStats",
    "Fence",
    "HybridAction",
    "IndicesLike",
    "KVStats",
    "KeysLike",
    "Namespace",
    "PoolStats",
    "PrefixStats",
    "SlotStats",
    "StoreStats",
    "StreamLike",
    "SupportsCudaStream",
    "TableIndex",
    "TensorLike",
    "TierStats",
    "UnitStats",
]


class Fence(Protocol):
    """A point in work in flight, such as a `torch.cuda.Event`."""

    def query(self) -> bool:
        """Return whether the work is done."""
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


IndicesLike: TypeAlias = "TensorLike | ArrayLike | Sequence[SupportsIndex]"
"""Integers of 16 to 64 bits: slots, rows, pages or lengths."""

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

StreamLike: TypeAlias = "SupportsCudaStream | int"
"""A `torch.cuda.Stream`, or the handle of a CUDA stream."""

HybridAction: TypeAlias = (
    "tuple[Literal['free', 'free_full'], int, int] | tuple[Literal['free_old'], torch.Tensor] "
    "| tuple[Literal['rebuild'], int, torch.Tensor] | tuple[Literal['recover'], int, torch.Tensor, int, int] "
    "| tuple[Literal['evict_excess'], int]"
)
"""An action that an engine takes for a step of a `HybridTree`. It changes with that class."""


class PoolStats(TypedDict):
    """Statistics of every pool."""

    capacity: int
    bytes: int


class UnitStats(PoolStats):
    """Statistics of a pool that hands out units."""

    available: int
    in_use: int
    high_water: int


class CountedStats(UnitStats):
    """Statistics of a pool that drops bad frees."""

    dropped_frees: int


class SlotStats(CountedStats):
    """Statistics of `TokenToKVPoolAllocator`, in slots."""

    free: int
    released: int
    fenced: int
    shared: int
    cached: int
    pending: int
    size: int
    page_size: int
    device_bytes: int


class ChunkStats(CountedStats):
    """Statistics of `ChunkPool`."""

    page_locked: int


class BufferStats(UnitStats):
    """Statistics of `BufferPool`."""

    stale_uses: int
    free_bytes: int
    in_use_bytes: int
    high_water_bytes: int
    registered_bytes: int


class KVStats(PoolStats):
    """Statistics of `KVPool`, which hands out no units."""

    rows: int
    layer_num: int
    page_size: int


class PrefixStats(PoolStats):
    """Statistics of `PrefixCache`, which hands out no units."""

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


class TierStats(PoolStats):
    """Statistics of `HostTier`, which hands out no units."""

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
    page_locked: int


class StoreStats(TypedDict):
    """Statistics of `FileStore`."""

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
        leases: That last.
        running: Reads that run.
        returned: Leases that peers have returned, or filled.
        expired: Leases whose time was over.
        completed: Reads that brought their rows.
        failed: Reads that did not.
        cuts: Connections that were ended to end reads that failed.
        refused: Notes of peers that could not be used.
        rows: Slots and states that completed reads brought.
        runs: Pieces in which they came, over all buffers.
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
