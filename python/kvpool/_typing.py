"""Types of arguments and results, without an import of PyTorch or NumPy."""

from collections.abc import Sequence
from typing import Any, Protocol, SupportsIndex, TypeAlias, TypedDict


class Fence(Protocol):
    """A point in work in flight, such as a `torch.cuda.Event`."""

    def query(self) -> bool:
        """Whether the work is done."""
        ...


# A `torch.Tensor`, a NumPy array, or any object with `__dlpack__`.
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
    pending: int
    size: int
    page_size: int
    device_bytes: int


class ChunkStats(CountedStats):
    """Statistics of `ChunkPool`."""

    registered: int


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
