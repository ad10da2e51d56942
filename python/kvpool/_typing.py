"""Types of arguments and answers that neither PyTorch nor NumPy need be imported for."""

from collections.abc import Sequence
from typing import Any, Protocol, SupportsIndex, TypeAlias, TypedDict


class Fence(Protocol):
    """Something that work in flight passes, such as a `torch.cuda.Event`."""

    def query(self) -> bool:
        """Whether the work is done."""
        ...


# A `torch.Tensor`, a NumPy array, or whatever else has `__dlpack__`.
TensorLike: TypeAlias = Any

# int32 or int64.
IndicesLike: TypeAlias = TensorLike | Sequence[SupportsIndex]

# "cpu", "cuda", "cuda:1", or a `torch.device`.
DeviceLike: TypeAlias = Any

# A `torch.dtype`, a NumPy dtype, or the name of one.
DTypeLike: TypeAlias = Any

# A `torch.cuda.Stream`, or the handle of a CUDA stream.
StreamLike: TypeAlias = Any


class PoolStats(TypedDict):
    """What `stats()` of every pool has."""

    capacity: int
    bytes: int


class UnitStats(PoolStats):
    """Units of a pool that hands them out."""

    available: int
    in_use: int
    high_water: int


class CountedStats(UnitStats):
    """Of a pool that drops bad frees."""

    dropped_frees: int


class SlotStats(CountedStats):
    """Of `TokenToKVPoolAllocator`, in slots."""

    free: int
    released: int
    fenced: int
    shared: int
    pending: int
    size: int
    page_size: int
    device_bytes: int


class ChunkStats(CountedStats):
    """Of `ChunkPool`."""

    registered: int


class BufferStats(UnitStats):
    """Of `BufferPool`."""

    stale_uses: int
    free_bytes: int
    in_use_bytes: int
    high_water_bytes: int
    registered_bytes: int


class KVStats(PoolStats):
    """Of `KVPool`, which hands nothing out."""

    rows: int
    layer_num: int
    page_size: int
