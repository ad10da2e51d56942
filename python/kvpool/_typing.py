"""Types of arguments that neither PyTorch nor NumPy need be imported for."""

from collections.abc import Sequence
from typing import Any, Protocol, SupportsIndex, TypeAlias


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
