"""Types of arguments and results. Importing them imports neither PyTorch nor NumPy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, SupportsIndex, TypeAlias, TypedDict

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import torch


class Fence(Protocol):
    """Something that work in flight passes, such as a `torch.cuda.Event`."""

    def query(self) -> bool:
        """Whether the work is done."""
        ...


class TensorLike(Protocol):
    """A `torch.Tensor`, a NumPy array, a `kvpool.Tensor`, or any other tensor that speaks DLPack."""

    def __dlpack__(self, *args: Any, **options: Any) -> Any:  # noqa: ANN401 - frameworks differ in what they take
        """A DLPack capsule."""
        ...

    def __dlpack_device__(self) -> tuple[Any, int]:
        """The DLPack device: its type and number."""
        ...


class SupportsCudaStream(Protocol):
    """A stream object, such as a `torch.cuda.Stream`."""

    @property
    def cuda_stream(self) -> int:
        """The handle of the stream."""
        ...


# int32 or int64.
IndicesLike: TypeAlias = "TensorLike | Sequence[SupportsIndex]"

# "cpu", "cuda", "cuda:1", or a `torch.device`.
DeviceLike: TypeAlias = "str | torch.device"

# A `torch.dtype`, a NumPy dtype, or the name of one.
DTypeLike: TypeAlias = "str | torch.dtype | np.dtype[Any] | type[np.generic]"

# A `torch.cuda.Stream`, or the handle of a CUDA stream.
StreamLike: TypeAlias = "SupportsCudaStream | int"


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
