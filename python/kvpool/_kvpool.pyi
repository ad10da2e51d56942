# Tensors are `torch.Tensor` where PyTorch is installed and `kvpool.Tensor` elsewhere. A type checker that finds no
# PyTorch takes them as `Any`, and `torch.Tensor | None` as `Any | None`: it finds a missing check for `None` all the
# same. `Any` is written where objects of an engine pass through.
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import ModuleType
from typing import Any, Literal, SupportsFloat, SupportsIndex, TypeVar, final

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import Self, disjoint_base

from kvpool.observe.leaks import ExpectBalanced, Leak
from kvpool.prefill_cost import PrefillCost
from kvpool.store import Store
from kvpool.typing import (
    ArenaPrefixStats,
    ArenaStats,
    ArenaTierStats,
    BlockLike,
    BufferStats,
    ChunkStats,
    CountedStats,
    DeviceLike,
    DTypeLike,
    Fence,
    Fit,
    GroupKind,
    HybridAction,
    IndicesLike,
    KeysLike,
    KVStats,
    Layout,
    Namespace,
    Policy,
    PoolStats,
    PrefixStats,
    Pressure,
    Rounding,
    SlotStats,
    StoreStats,
    StreamLike,
    TableIndex,
    TensorLike,
    TierName,
    TierStats,
    TrackStats,
    UnitStats,
    WriteMode,
)

_T = TypeVar("_T")

__all__ = [
    "_ERROR_CLASSES",
    "_STORAGE_DTYPES",
    "AddressSpace",
    "ArenaHostTier",
    "ArenaLease",
    "ArenaPlan",
    "ArenaPlanner",
    "ArenaPrefixCache",
    "BatchPlan",
    "BatchPlanner",
    "Block",
    "BlockHasher",
    "BlockMap",
    "BlockQueue",
    "Buffer",
    "BufferPool",
    "BufferStep",
    "CacheArena",
    "CacheLayout",
    "Chunk",
    "ChunkCopy",
    "ChunkPool",
    "Cleared",
    "Fetch",
    "FileStore",
    "FreeGroup",
    "GDNPool",
    "Group",
    "GroupPlan",
    "GroupReport",
    "HostPlan",
    "HostTier",
    "HybridFrees",
    "HybridMatch",
    "HybridNode",
    "HybridStep",
    "HybridTree",
    "KVPool",
    "Lease",
    "LeasedUnits",
    "Load",
    "OffloadOrder",
    "OffloadRequest",
    "OffloadTable",
    "OffloadTurn",
    "PagePool",
    "Plane",
    "Pool",
    "PrefixCache",
    "Published",
    "Removed",
    "ReqToTokenPool",
    "Segment",
    "Session",
    "SlabLayout",
    "SlotTree",
    "SlotTreeEviction",
    "SlotTreeInsertion",
    "SlotTreeMatch",
    "SlotTreeNode",
    "StoreTransfer",
    "Stored",
    "Tensor",
    "TokenToKVPoolAllocator",
    "WaitingRequest",
    "_PageLocking",
    "_StoreCall",
    "_StoreQueue",
    "_Workspace",
    "__version__",
    "_after_fork",
    "_before_fork",
    "_footprint",
    "_noted",
    "_pools",
    "_report_leaks_with",
    "_store_keys",
    "_use_stream",
    "_zeros",
    "get_num_threads",
    "set_num_threads",
]

__version__: str
_STORAGE_DTYPES: dict[str, int]
_ERROR_CLASSES: list[str]

def get_num_threads() -> int:
    """Returns the maximum number of threads of one large copy on the CPU."""

def set_num_threads(threads: SupportsIndex) -> None:
    """Sets the maximum number of threads of one large copy on the CPU.

    Copies below 2 MiB always use one thread.

    Args:
        threads: The number of threads. 0 means one per CPU, up to 16.

    Raises:
        ArgumentError: If `threads` is negative.
        TypeError: If `threads` is not an int.
    """

def _use_stream(handle: int | None) -> None:
    """Sets the current CUDA stream of this thread. `None` restores PyTorch's current stream.

    Args:
        handle: A `cudaStream_t` as an int.
    """

def _footprint(shapes: object, size: int, max_reqs: int) -> dict[str, int]:
    """Returns the bytes of the pools of a model: the arguments of `kvpool.tools.plan.pool_bytes.Footprint`.

    Args:
        shapes: Shapes of the pools.
        size: Token slots.
        max_reqs: The most requests at once.

    Raises:
        ArgumentError: If no pool can be that large.
    """

def _noted() -> int:
    """Returns the number of calls that debugging pools have recorded. Later calls have this number or a greater
    one.
    """

def _pools() -> list[Pool]:
    """The pools of this process that are alive, in the order of their construction."""

def _report_leaks_with(reporter: Callable[[], ModuleType]) -> None:
    """Registers a function that returns the module with `leaks` and `ExpectBalanced`.

    Args:
        reporter: Called for each report, so that the first report imports the module.
    """

def _before_fork() -> None:
    """Keeps threads of the crate from holding locks while the process is forked. A child would wait for them
    forever.
    """

def _after_fork() -> None:
    """Ends `_before_fork`, in both processes."""

def _zeros(shape: Sequence[int], dtype: str, device: str = "cpu") -> torch.Tensor:
    """Returns a tensor of zeros, made in the same way as the tensors of the pools. Tests use it to cover every
    dtype.

    Args:
        shape: Extents.
        dtype: The name of a storage dtype, or "int32", "int64" or "bool".
        device: The device of the tensor.
    """

@final
class Tensor:
    """A tensor over memory that kvpool owns, for programs without PyTorch: `numpy()`, `numpy.asarray`, `memoryview` (from
    Python 3.12 on) and the `from_dlpack` of NumPy, CuPy and JAX see the same bytes without a copy.

    A tensor keeps its memory alive even after the pool is dropped, and shows later writes to that memory. It
    has no arithmetic. Elements are read as Python numbers: `tolist()`, iteration, and `tensor[i]`, or
    `tensor[i, j]` of two dimensions, where indices may be negative. Fewer indices, and slices with a positive
    step, give a view. Reading elements on a device copies them, and waits for its current stream. `==` raises
    `TypeError` unless it is the same object: compare `tolist()` or `numpy()`.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape, a tuple of ints."""
    @property
    def ndim(self) -> int:
        """The number of dimensions."""
    @property
    def dtype(self) -> str:
        """The name of the element type."""
    @property
    def device(self) -> str:
        """The device in PyTorch's notation, such as "cpu" or "cuda:0"."""
    def data_ptr(self) -> int:
        """Returns the address of element 0."""
    def cpu(self) -> Tensor:
        """Returns the tensor itself if it is in host memory, else a copy there. The copy waits for the current
        stream of the device.

        Raises:
            OutOfMemoryError: If the host has no memory for the copy.
        """
    def tolist(self) -> Any:
        """Returns the elements as Python numbers: nested lists of as many dimensions as the tensor has, or a number if it
        has none. Those on a device are copied first, which waits for its current stream.

        Raises:
            OutOfMemoryError: If the host has no memory for them.
        """
    def numpy(self) -> npt.NDArray[Any]:
        """Returns a NumPy array over the same memory.

        8-bit floats and bfloat16 need the package `ml_dtypes`.

        Raises:
            ImportError: If NumPy, or `ml_dtypes` if needed, is not installed.
            BufferError: If the tensor is not in host memory.
        """
    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        """Returns the tensor as an array, for `numpy.asarray`: see `numpy()`.

        Args:
            dtype: The dtype of the array. Another than the tensor's takes a copy.
            copy: `True` copies in any case, `False` never.

        Raises:
            ImportError: If NumPy, or `ml_dtypes` if needed, is not installed.
            BufferError: If the tensor is not in host memory.
            ValueError: If `copy` is `False`, and `dtype` takes one.
        """
    def __buffer__(self, _flags: int) -> memoryview:
        """Returns a view of the memory, with the shape and the format of the tensor: what `memoryview` and other users of
        buffers call, from Python 3.12 on.

        Raises:
            BufferError: If the tensor is not in host memory or not contiguous, if buffers have no format for its dtype
                (bfloat16 and 8-bit floats), or no shape for it (empty, of several dimensions or none).
        """
    def __len__(self) -> int:
        """Return len(self)."""
    def __getitem__(self, key: SupportsIndex | slice | tuple[SupportsIndex | slice, ...], /) -> Any:
        """Return self[key]."""
    def __iter__(self) -> Iterator[Any]:
        """Implement iter(self)."""
    def __eq__(self, value: object, /) -> bool: ...
    def __ne__(self, value: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    def __dlpack_device__(self) -> tuple[int, int]:
        """Returns the DLPack device as (type, ordinal)."""
    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """Returns a DLPack capsule over the same memory, never a copy.

        Args:
            stream: The consumer's CUDA stream, which waits for the work enqueued on the current stream: a
                handle, 1 or `None` for the legacy default stream, -1 for no synchronization. 2, the default stream
                of the calling thread, raises. Ignored in host memory.
            max_version: The newest DLPack (major, minor) that the caller reads. From (1, 0) on the capsule is
                versioned, otherwise legacy.
            dl_device: The requested device. Only the tensor's own is accepted.
            copy: `True` raises: there is no copy.

        Raises:
            BufferError: If another device or a copy is requested.
            TypeError: If an argument has the wrong type.
        """

@disjoint_base
class Pool:
    """The base class of every pool: a name, statistics (`stats()`), and the owners of its units.

    Not constructed directly: see `KVPool`, `TokenToKVPoolAllocator`, `ReqToTokenPool`, `GDNPool`, `CacheArena`,
    `ChunkPool`, `BufferPool`, `PagePool`, `Workspace`, `PrefixCache`, `ArenaPrefixCache` and `HostTier`.

    A pool cannot be pickled or copied: `pickle` and `copy` raise `TypeError`. `KVPool`,
    `TokenToKVPoolAllocator` and `ReqToTokenPool` can be base classes of Python classes. As with `tuple`,
    their arguments go to `__new__`; `__init__` takes any, and lists the pool in `kvpool.pools()`. kvpool's
    own classes never call methods that a Python class overrides.
    """

    name: str
    def __init__(self, *_arguments: object, **_more: object) -> None: ...
    @property
    def unit(self) -> str:
        """The unit that the pool hands out, such as "slot"."""
    @property
    def device(self) -> str:
        """The device of the memory or the index tensors, in PyTorch's notation, such as "cuda:0"."""
    @property
    def strict(self) -> bool:
        """Whether an invalid free raises instead of being dropped, counted and reported."""
    @property
    def debug(self) -> bool:
        """Whether the pool records owners and call sites: `debug=True`, or `KVPOOL_DEBUG=1` in the environment
        at construction.
        """
    def stats(self) -> PoolStats:
        """Returns the statistics of this pool, at the cost of a lock and a few loads. The keys are those of
        `kvpool.typing.PoolStats`, and of the subclass for this pool: `UnitStats` and `CountedStats` if it hands
        out units, `SlotStats`, `ArenaStats`, `TrackStats`, `ChunkStats`, `BufferStats`, `KVStats`, `PrefixStats`,
        `ArenaPrefixStats`, `TierStats` or `ArenaTierStats`.
        """
    def used_on(self, tensor: TensorLike, stream: StreamLike | None = None) -> None:
        """Records that work on a stream uses memory of a pool. The memory returns to the driver only after that
        work, even if the pool and its tensors are dropped first.

        kvpool's own calls record their streams; call this for your own kernels and for every stream on which
        you replay a CUDA graph. `Tensor.record_stream` has no effect on memory that PyTorch does not own.

        Args:
            tensor: A tensor over pool memory that a GPU can access: on the GPU, or page-locked.
            stream: A `torch.cuda.Stream`, an object with `__cuda_stream__` (`cuda.core`, CuPy, Numba), or a stream
                handle; not 2, the default stream of the calling thread, for which no other thread can wait. Defaults
                to the current stream of the tensor's device. It must outlive the pool. It may be a stream of another
                GPU that accesses the memory, if it is an object that says so. A handle names a stream of the tensor's
                GPU or, for host memory, of PyTorch's current GPU; without PyTorch, of the first GPU.

        Raises:
            ArgumentError: If the memory does not belong to a pool that a GPU can access, or is host memory and
                `stream` is omitted; if `stream` is 2.
            DriverError: If the GPU has no such stream.
        """
    def leaks(self) -> list[Leak]:
        """Lists live units by owner and call site, largest count first, and after them those that only a prefix
        cache holds.

        A unit with several owners counts once for each. Units that wait for a fence are not live.

        Returns:
            A list of `kvpool.Leak`: `owner`, `site`, `count`, `age_s` (age of the oldest unit in seconds),
            `spans`, the units as (first, end) pairs, and `state`: "live", or for units that a prefix cache
            alone holds "evictable" or, with leases, "locked".

        Raises:
            StateError: If the pool does not debug.
            TypeError: If the pool hands nothing out, or is a `Workspace`, which records no owners.
        """
    def _repr_html_(self) -> str:
        """The pool as a notebook shows it: how full it is, its statistics and, if it debugs, the owners of its units."""
    def expect_balanced(self) -> ExpectBalanced:
        """Returns a context manager that checks that no more units are live at exit than at entry. An exception
        of the body propagates unchanged. If the pool debugs, a unit with several owners counts once for each.

        Raises:
            IndexOwnershipError: At exit, if more units are live. The message has their number and, if the
                pool debugs, a table of the units taken in the body.
            TypeError: If the pool hands nothing out.
        """
    @property
    def _hands_out(self) -> bool:
        """Whether the pool hands out units, which are then free or in use."""
    @property
    def _unit_bytes(self) -> int | None:
        """Bytes of one unit. `None` if the pool has no memory or its units differ in size."""
    def _occupancy(
        self,
    ) -> tuple[
        list[tuple[int, int, str, int | None, list[tuple[str | int | None, str, float, int]]]], list[int]
    ]:
        """The spans of the pool, each as (first, end, state, bytes, holders), and the histogram of lifetimes."""

@disjoint_base
class KVPool(Pool):
    """K and V storage of every layer, in one region.

    Each buffer is `[rows, head_num, head_dim]`, zero at first. Usable slots are `1..=size`; slot 0 is the
    padding slot, written by padded tokens and never allocated. `rows` is `size + page_size`, rounded up to a
    multiple of 8, so that every slot of a paged allocator of the same `size` has a row. Ordinary host memory
    is committed on first touch, in pages of 2 MiB if the system provides them. Calls are thread-safe and
    atomic with respect to each other, but not with respect to direct writes to the tensors.

    On a GPU each call is one launch on the current stream, which orders calls, without allocations. A call
    waits only if the host is so far ahead that its staging memory for indices is full. The kernel reads index
    tensors on the GPU; the host never does. A slot outside of the pool is skipped, and a later call or
    `check()` raises the error. Indices in host memory are checked first, as on the CPU, and copied, so such a
    call cannot be captured into a CUDA graph; `set_kv_buffer` with tensors on the GPU can. The memory is
    zeroed on the stream that is current at construction.

    Args:
        size: Number of usable slots.
        layer_num: Number of layers.
        k_head_num: Number of key heads.
        k_head_dim: Elements of a key head.
        device: Device of the buffers.
        dtype: float32, float16 (default), bfloat16, float8_e4m3fn, float8_e5m2, int8 or uint8.
        v_head_num: Number of value heads. Defaults to `k_head_num`.
        v_head_dim: Elements of a value head. Defaults to `k_head_dim`.
        pin_memory: Whether to page-lock host memory if an NVIDIA driver is present, through a device in use
            or else the first. Page-locked memory is committed whole at construction.
        page_size: Slots per page of the allocator.
        layout: "split": keys of all layers, then values. "fused": keys and values of each layer together, the
            values a whole number of pages behind the keys, for kernels that reach both from one address.

    Raises:
        ConfigError: If a size is below 1, a slot does not fit int32, the size in bytes overflows, or `layout`
            is "fused" and rows of keys and values differ in shape.
        TypeError: If `dtype` is not a storage dtype.
        OutOfMemoryError: If there is not enough memory.
        BackendUnavailableError: If `device` is not available.
    """

    def __new__(
        cls,
        size: SupportsIndex,
        layer_num: SupportsIndex,
        k_head_num: SupportsIndex,
        k_head_dim: SupportsIndex,
        device: DeviceLike = "cuda",
        dtype: DTypeLike = "float16",
        v_head_num: SupportsIndex | None = None,
        v_head_dim: SupportsIndex | None = None,
        pin_memory: bool = True,
        *,
        page_size: SupportsIndex = 1,
        layout: Layout = "split",
    ) -> Self: ...
    @property
    def k_buffer(self) -> list[torch.Tensor]:
        """The keys of every layer: a list of `layer_num` tensors `[rows, k_head_num, k_head_dim]`, without a
        copy.
        """
    @property
    def v_buffer(self) -> list[torch.Tensor]:
        """The values of every layer: a list of `layer_num` tensors `[rows, v_head_num, v_head_dim]`, without a
        copy.
        """
    @property
    def size(self) -> int:
        """Number of usable slots."""
    @property
    def layout(self) -> Layout:
        """Layout of the buffers: "split" or "fused"."""
    @property
    def page_size(self) -> int:
        """Slots per page."""
    @property
    def num_layers(self) -> int:
        """Number of layers."""
    @property
    def num_k_heads(self) -> int:
        """Number of key heads."""
    @property
    def num_v_heads(self) -> int:
        """Number of value heads."""
    @property
    def layer_num(self) -> int:
        """Another name of `num_layers`, as the constructor has it."""
    @property
    def k_head_num(self) -> int:
        """Another name of `num_k_heads`, as the constructor has it."""
    @property
    def k_head_dim(self) -> int:
        """Elements of a key head."""
    @property
    def v_head_num(self) -> int:
        """Another name of `num_v_heads`, as the constructor has it."""
    @property
    def v_head_dim(self) -> int:
        """Elements of a value head."""
    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the elements: a `torch.dtype`, or its name if PyTorch is not installed."""
    def get_key_buffer(self, layer_id: SupportsIndex) -> torch.Tensor:
        """Returns the keys of a layer, `[rows, k_head_num, k_head_dim]`, without a copy.

        Raises:
            IndexError: If the layer does not exist.
        """
    def get_value_buffer(self, layer_id: SupportsIndex) -> torch.Tensor:
        """Returns the values of a layer, `[rows, v_head_num, v_head_dim]`, without a copy.

        Raises:
            IndexError: If the layer does not exist.
        """
    def get_kv_buffer(self, layer_id: SupportsIndex) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the keys and values of a layer, without a copy.

        Raises:
            IndexError: If the layer does not exist.
        """
    def set_kv_buffer(
        self,
        layer_id: SupportsIndex,
        indices: IndicesLike,
        k: TensorLike,
        v: TensorLike,
        k_scale: SupportsFloat | None = None,
        v_scale: SupportsFloat | None = None,
    ) -> None:
        """Writes `k` and `v` to the rows that `indices` lists, in one call.

        Negative indices are skipped. For a row listed twice, the last value wins; with indices on a GPU, such
        a row may end up with K of one value and V of another, or with words of several values in each. The
        values are read in place, with any strides; do not resize their storage during the call. Large copies
        on the CPU release the GIL and use several threads.

        Values of another float dtype become float32, are divided by the scale, and are rounded once, to
        nearest, ties to even: the numbers of `(x.float() / scale).to(dtype)` in PyTorch, if `scale` is a
        tensor. (On a GPU PyTorch multiplies with the reciprocal of a Python number, which is rounded.) Values
        beyond float8_e4m3fn, infinities too, become its largest number, 448 or -448; in older versions of
        PyTorch they become NaN. A NaN stays one. In an 8-bit float it is 0x7f or 0xff, by its sign, which a
        float64 may lose; PyTorch's on a GPU may have other bits.

        Args:
            layer_id: Index of the layer.
            indices: `n` slots, int32 or int64, of any shape.
            k: Leading dimensions whose product is `n`, then `[k_head_num, k_head_dim]` or `[k_head_num *
                k_head_dim]`.
            v: The values, shaped like `k` with the value heads.
            k_scale: Divisor of keys before conversion to an 8-bit float. Keys that are already in the pool's
                dtype are stored unchanged. A pool of another dtype accepts only `None` or 1.
            v_scale: Divisor of values, like `k_scale`.

        Raises:
            IndexError: If a slot or the layer is outside of the pool. Nothing is written. With indices on a
                GPU, invalid ones are skipped and a later call raises this error.
            ArgumentError: If a shape, device or scale is invalid. Nothing is written.
            TypeError: If a dtype cannot be converted. Nothing is written.
        """
    def gather_kv(
        self,
        layer_id: SupportsIndex,
        indices: IndicesLike,
        out: tuple[TensorLike, TensorLike] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies the rows that `indices` lists.

        Args:
            layer_id: Index of the layer.
            indices: `n` slots, int32 or int64, of any shape.
            out: A pair of contiguous output tensors `[n, head_num, head_dim]` of the pool's dtype.

        Returns:
            Keys `[n, k_head_num, k_head_dim]` and values `[n, v_head_num, v_head_dim]`, contiguous copies;
            `out` if given. On a GPU, PyTorch allocates them if `out` is omitted, within `torch.cuda.graph`
            from the memory of the graph; without PyTorch `out` is required.

        Raises:
            IndexError: If a slot or the layer is outside of the pool. With indices on a GPU, the row of an
                invalid index is zero and a later call raises this error.
            ArgumentError: If `out` has another shape, device or layout.
            TypeError: If `out` has another dtype.
        """
    def move_kv(self, dst_indices: IndicesLike, src_indices: IndicesLike) -> None:
        """Moves row `src_indices[i]` to row `dst_indices[i]` in all layers, as if all were read before any is
        written.

        This holds for indices in host memory. With index tensors on a GPU, the contents of a row that is both
        read and written, or written twice, are undefined.

        Args:
            dst_indices: `n` slots, int32 or int64. For a slot listed twice, the last move wins.
            src_indices: `n` slots.

        Raises:
            IndexError: If a slot is outside of the pool. Nothing is moved.
            ArgumentError: If the arguments differ in length.
        """
    def page_view(self, layer_id: SupportsIndex) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the keys and values of a layer in the layout of paged attention kernels, without a copy.

        Returns:
            Two views `[num_pages, page_size, head_num, head_dim]`; page 0 is the padding page.

        Raises:
            IndexError: If the layer does not exist.
        """
    def get_contiguous_buf_infos(self) -> tuple[list[int], list[int], list[int]]:
        """Returns the buffers for registration with a transfer engine: keys of all layers, then values, in any layout.

        Returns:
            Three lists of `2 * layer_num` ints: addresses, bytes of each buffer, bytes of one of its rows.
        """
    def check(self) -> None:
        """Waits for the current stream and raises the errors of earlier calls on it whose indices only the GPU
        knew. Does nothing on the CPU, where each call raises its own errors.

        Raises:
            IndexError: If a slot was outside of the pool; its row was skipped.
            DriverError: If work on the GPU has failed.
        """
    @property
    def cache_layout(self) -> CacheLayout:
        """What the pool keeps, as a layout of one group."""
    def mem_bytes(self) -> int:
        """Returns the bytes of all buffers."""
    def _mem_bytes(self) -> int:
        """`mem_bytes()`, under the name that pymllm calls."""
    def stats(self) -> KVStats:
        """Returns the statistics of this pool, at the cost of a lock and a few loads. The keys are those of
        `kvpool.typing.PoolStats`, and of the subclass for this pool: `UnitStats` and `CountedStats` if it hands
        out units, `SlotStats`, `ArenaStats`, `TrackStats`, `ChunkStats`, `BufferStats`, `KVStats`, `PrefixStats`,
        `ArenaPrefixStats`, `TierStats` or `ArenaTierStats`.
        """

@disjoint_base
class TokenToKVPoolAllocator(Pool):
    """Hands out the token slots of a `KVPool` as index tensors and takes them back.

    With `need_sort` the lowest free slots come first, and freed slots are kept apart until the others cannot
    serve a request. Without it, slots are handed out first in, first out. With `page_size > 1` slots are
    handed out and freed as whole pages `[p * page_size, (p + 1) * page_size)`, numbered from 1. Slot 0 is
    never handed out.

    An invalid free (a slot that is out of range, the padding slot, not allocated, already free, or listed
    twice in one call; a tensor of `alloc`, or a view of one, whose slots were freed since, also if they were
    handed out again) is dropped, counted in `stats()` and reported once through the logger `kvpool`. With
    `strict` it raises instead, and nothing is changed. All calls are atomic and thread-safe.

    On a GPU the tensors are views of a stage, to which the next slots are sent ahead of time: `alloc` and
    `free` then make no driver call, and only methods that say so wait. Tensors are valid on the stream that
    was current in `alloc`; another stream needs an event. Nothing is allocated on the device after
    construction. A tensor kept alive after its slots were freed still occupies the stage, which holds twice
    the pool's slots.

    `free` reads the values of a GPU tensor on the host, without a copy from the GPU, if the tensor is a
    result of `alloc` (of any allocator), is `ReqToTokenPool.req_to_token`, or is an evenly spaced view of one
    of these, and PyTorch has counted no write to it (`_version`; for the table, no write beyond those that
    `mark_modified` accounts for). PyTorch does not count writes through `.data`, through another framework's
    view, or by a custom kernel: do not write to these tensors in such a way, or free a copy instead. The
    values of any other GPU tensor are copied asynchronously on the current stream, and its slots become free
    when the copy has completed. Until then `available_size` already counts them, as whole pages of their own.

    The slots that a call returns depend only on the calls before it, and not on when such a copy completes:
    ranks that make the same calls get the same slots. With `need_sort` a merge waits for copies in progress.
    Without it, a free waits behind those in progress, and finds invalid slots when they complete. The
    exceptions are slots freed with a fence and, without `need_sort`, slots that a `PrefixCache` gives up: the
    time at which they become free varies.

    Args:
        size: Number of slots. A partial last page is never handed out.
        device: Device of the index tensors.
        page_size: Slots per page.
        need_sort: Hand out the lowest free slots first, instead of first in, first out.
        strict: Whether an invalid free raises.
        index_dtype: The dtype of all tensors that the allocator returns, int32 or int64. `free` and the other
            methods accept both in any case.
        debug: Whether to record owners and call sites for `leaks` and reports. Defaults to the environment
            variable `KVPOOL_DEBUG`.

    Raises:
        ConfigError: If `size` or `page_size` is below 1, or a slot would not fit int32.
        TypeError: If `index_dtype` is neither int32 nor int64.
        BackendUnavailableError: If `device` cannot be used here.
    """

    def __new__(
        cls,
        size: SupportsIndex,
        device: DeviceLike = "cuda",
        page_size: SupportsIndex = 1,
        need_sort: bool = True,
        *,
        strict: bool = False,
        index_dtype: DTypeLike = "int32",
        debug: bool | None = None,
    ) -> Self: ...
    @property
    def index_dtype(self) -> torch.dtype:
        """The dtype of the tensors that the allocator returns: a `torch.dtype` or, without PyTorch, its name."""
    @property
    def size(self) -> int:
        """The number of slots, as passed to the constructor or to `resize`."""
    @property
    def page_size(self) -> int:
        """Slots per page."""
    @property
    def need_sort(self) -> bool:
        """Whether the lowest free slots are handed out first."""
    @property
    def free_slots(self) -> torch.Tensor:
        """The free slots (with pages, the free pages) in the order in which they are handed out: a new 1-D
        tensor. Waits for pending copies of values.
        """
    @property
    def release_slots(self) -> torch.Tensor:
        """The freed slots (with pages, the freed pages) that wait for a merge, lowest first: a new 1-D
        tensor. Waits for pending copies of values.
        """
    def alloc(
        self,
        need_size: SupportsIndex,
        *,
        contiguous: bool | Fit = False,
        owner: str | int | None = None,
    ) -> torch.Tensor | None:
        """Takes slots.

        Args:
            need_size: Number of slots.
            contiguous: Take one ascending run. `True` or "first_fit": the lowest that is long enough;
                "best_fit": the shortest that is long enough, the lowest if there are several. Long runs last
                longer with it, and it looks at all free slots, those that wait for a merge included, which it
                merges.
            owner: An owner for reports and `leaks`, a str or an int. Recorded only if the pool debugs.

        Returns:
            A 1-D tensor of `need_size` slots on the pool's device, which keeps its memory alive, or
            `None` if there are not enough slots. With pages, the rest of the last page belongs to the caller
            as well.

        Waits in two cases only: for freed slots whose values are still being copied from a GPU, if it would
        otherwise return `None`; and for the GPU, if it is far behind with slots handed out before.

        Raises:
            ArgumentError: If `need_size` is negative, or `contiguous` is another string.
            TypeError: If `need_size` is not an int, or `contiguous` neither a bool nor a string.
            OutOfMemoryError: If tensors that are still alive cover the stage. Nothing is taken.
            DriverError: If a driver call fails, or the stream is being captured. Nothing is taken.
        """
    def alloc_extend(
        self,
        prefix_lens: IndicesLike,
        seq_lens: IndicesLike,
        last_loc: IndicesLike,
        *,
        owner: str | int | None = None,
    ) -> torch.Tensor | None:
        """Takes the slots for positions `[prefix, seq)` of each request, as SGLang's paged allocator does.

        A prefix that ends inside a page is continued from `last_loc + 1`; then new pages are taken.

        Values of `last_loc` that only the pool's GPU has stay there: a kernel on the current stream writes the slots
        behind them, and `free` copies those from the GPU. A later `alloc_extend` or `alloc_decode` raises the errors
        that it finds; that a page is in use is not checked. Waits for the values of other arguments on a GPU.

        Args:
            prefix_lens: Tokens that each request has now, ints `[bs]`.
            seq_lens: Tokens that each request will have, ints `[bs]`.
            last_loc: Slot of the last token of each request, ints `[bs]`. Ignored for a prefix that fills its
                pages.
            owner: As in `alloc`.

        Returns:
            A 1-D tensor of `sum(seq_lens - prefix_lens)` slots, one request after the other, or `None`
            if there are not enough slots.

        Raises:
            ArgumentError: If the arguments differ in length, a length is negative or shrinks, or `last_loc` is
                not the end of its prefix. If that is found on a GPU, the slots behind it were the padding slot.
            IndexOwnershipError: If the page of `last_loc` is not in use, or two requests would continue the
                same page.
        """
    def alloc_decode(
        self, seq_lens: IndicesLike, last_loc: IndicesLike, *, owner: str | int | None = None
    ) -> torch.Tensor | None:
        """Takes one slot for each request of a decode step: `alloc_extend` from `seq_lens - 1` to `seq_lens`.

        Args:
            seq_lens: Tokens of each request, including the new one, ints `[bs]`.
            last_loc: Slot of the token before the new one, ints `[bs]`.
            owner: As in `alloc`.

        Returns:
            A 1-D tensor `[bs]`, or `None` if there are not enough slots.

        Raises:
            ArgumentError: As in `alloc_extend`.
            IndexOwnershipError: As in `alloc_extend`.
        """
    def free(
        self, indices: IndicesLike, *, after: Fence | None = None, owner: str | int | None = None
    ) -> None:
        """Frees slots; with pages, the whole page of every slot, once.

        The values are copied, so you may overwrite the tensor at once. Does not wait, unless more values are
        being copied from a GPU than the pool has slots. Values that only a GPU has are copied in the order
        of the current stream, and a later call finds invalid ones.

        Args:
            indices: Slots, an int tensor or array of any shape, a sequence of ints, or an int.
            after: A fence: an object with `query() -> bool`, such as a `torch.cuda.Event`. The slots stay in
                use until `query()` returns true; later calls of the allocator query it.
            owner: As in `alloc`. Selects the owner of a shared slot that gives it up, else the first. A slot that
                is held by others alone is not freed.

        Raises:
            IndexOwnershipError: If the pool is strict and a free is invalid. For values that only a GPU
                has, a later call raises it; none of them is freed.
            TypeError: If `indices` does not hold ints, or `after` has no `query`.
        """
    def free_segment(
        self,
        indices: IndicesLike,
        *,
        start_pos: SupportsIndex,
        after: Fence | None = None,
        owner: str | int | None = None,
    ) -> None:
        """Frees consecutive slots of a request, as its row of the table has them: whole pages from the first on,
        the last one even if not all of its slots are listed.

        Reads one slot of each page, so it costs less than `free`, and `available_size` is exact while values
        are being copied from a GPU.

        Args:
            indices: Slots of the tokens from `start_pos` on, an int tensor of one dimension, or contiguous, an
                array or a sequence of ints.
            start_pos: Position of the first token, which begins a page.
            after: As in `free`.
            owner: As in `free`.

        Raises:
            ArgumentError: If `start_pos` does not begin a page.
            IndexOwnershipError: As in `free`.
            TypeError: As in `free`.
        """
    def free_segments(
        self,
        segments: Iterable[tuple[IndicesLike, SupportsIndex]],
        *,
        after: Fence | None = None,
        owner: str | int | None = None,
    ) -> None:
        """Frees several segments, as one call of `free_segment` would.

        Args:
            segments: Pairs of `indices` and `start_pos`, as in `free_segment`.
            after: As in `free`.
            owner: As in `free`.

        Raises:
            ArgumentError: As in `free_segment`. Nothing is freed.
            IndexOwnershipError: As in `free`.
            TypeError: As in `free`.
        """
    def free_pages(
        self, page_ids: IndicesLike, *, after: Fence | None = None, owner: str | int | None = None
    ) -> None:
        """Frees pages by their numbers. Page `p` has the slots from `p * page_size` on.

        Args:
            page_ids: Pages, an int tensor or array of any shape or a sequence of ints.
            after: As in `free`.
            owner: As in `free`.

        Raises:
            IndexOwnershipError: As in `free`. The message has the first slot of a page.
            TypeError: As in `free`.
        """
    def resize(self, size: SupportsIndex) -> None:
        """Changes the number of slots, as an engine does once it has measured how much memory is left. Frees every slot,
        as `clear` does. On a GPU it allocates the tensors anew.

        Args:
            size: As in the constructor.

        Raises:
            ConfigError: As in the constructor. Nothing is changed.
            OutOfMemoryError: If there is not enough memory. Nothing is changed.
            DriverError: If the stream is being captured. Nothing is changed.
        """
    def used_on(self, tensor: TensorLike, stream: StreamLike | None = None) -> None:
        """Records that work on a stream reads a tensor of slots. Its memory is reused only after that work, even
        if the tensor is dropped first.

        kvpool's own calls record their streams. Call this if your own kernel reads the tensor on a stream
        other than the one that was current in `alloc`: `Tensor.record_stream` has no effect on memory that
        PyTorch does not own.

        Args:
            tensor: A tensor that `alloc` returned, or a view of one.
            stream: A stream or its handle, as in `Pool.used_on`; it may be one of another GPU. Defaults to the current
                stream. It must outlive the allocator.

        Raises:
            ArgumentError: If the tensor does not come from this allocator, or `stream` is 2.
            DriverError: If the GPU has no such stream.
        """
    def share(self, indices: IndicesLike, *, owner: str | int | None = None) -> None:
        """Adds an owner to slots, for example when requests share a cached prefix; with pages, to the page of
        every slot, once.

        Each owner frees the slot once; it becomes free with its last owner. A slot listed twice in one call
        gains two owners, or loses two in `free`; a page gains or loses one.

        Args:
            indices: Slots, an int tensor or array of any shape, a sequence of ints, or an int. Waits for values that
                only a GPU has.
            owner: As in `alloc`.

        Raises:
            IndexOwnershipError: If a slot is not in use. Nothing is changed.
        """
    def poison_freed(self, kv_pool: KVPool) -> None:
        """Poisons rows of a `KVPool` when their slots become free, so that a read after free is visible: NaN in
        floats, -1 in int8, 255 in uint8, in all layers, written on the stream that is current at that time.
        Does nothing if the pool does not debug.

        Args:
            kv_pool: The `KVPool` that the slots index. It is not kept alive.
        """
    def free_group_begin(self) -> None:
        """Starts to collect the values of frees, from all threads. Groups nest. Frees with a fence are not
        collected.
        """
    def free_group_end(self) -> None:
        """Ends a group. The end of the outermost group frees everything collected, as one call.

        Raises:
            StateError: If no group is open.
            IndexOwnershipError: As in `free`. The group is closed, and none of its slots is freed.
        """
    def free_group(self) -> FreeGroup:
        """Returns a context manager around `free_group_begin` and `free_group_end`."""
    def available_size(self) -> int:
        """Returns the number of slots that can be handed out, including freed slots whose values are still being
        copied from a GPU.
        """
    @property
    def slots_free(self) -> int:
        """Number of slots that can be handed out: what `available_size` returns."""
    @property
    def pages_free(self) -> int:
        """Number of pages that can be handed out."""
    def clear(self) -> None:
        """Frees every slot, closes groups and discards fences. Do not use tensors that were handed out before. Loads
        from a tier below a prefix cache are over in the order of the current stream; without a GPU the call waits for
        them. Leases of a prefix cache and requests of a `BatchPlanner` end: they have no tokens afterwards.
        """
    def merge_and_sort_free(self) -> None:
        """Merges the freed slots into those that are handed out next. Waits for values that are being copied from
        a GPU. Does nothing without `need_sort`.
        """
    @staticmethod
    def runs(indices: IndicesLike) -> torch.Tensor:
        """Returns the maximal ascending runs of `indices`, in order.

        Args:
            indices: An int tensor or array of any shape, a sequence of ints, or an int.

        Returns:
            An int32 tensor `[k, 2]` of (start, length) on the host, in the form of DMA and transfer
            descriptors.
        """
    def is_allocated(self, indices: IndicesLike) -> torch.Tensor:
        """Returns whether each slot is in use: live, or freed with a fence that has not passed. Waits for
        pending copies of values.

        Args:
            indices: An int tensor or array of any shape, a sequence of ints, or an int.

        Returns:
            A 1-D bool tensor on the host. False for an index that is not a slot.
        """
    def verify(self) -> None:
        """Checks that free and live slots add up to the pool, and that no slot is in two states. Waits for
        pending copies of values.

        Raises:
            IndexOwnershipError: If a check fails, with a description.
        """
    def stats(self) -> SlotStats:
        """Returns the statistics of this pool, at the cost of a lock and a few loads. The keys are those of
        `kvpool.typing.PoolStats`, and of the subclass for this pool: `UnitStats` and `CountedStats` if it hands
        out units, `SlotStats`, `ArenaStats`, `TrackStats`, `ChunkStats`, `BufferStats`, `KVStats`, `PrefixStats`,
        `ArenaPrefixStats`, `TierStats` or `ArenaTierStats`.
        """

@final
class FreeGroup:
    """The context manager of `TokenToKVPoolAllocator.free_group`: frees inside it take effect together at its
    end.
    """

    def __enter__(self) -> None: ...
    def __exit__(self, *_exception: object) -> None:
        """Ends the group. An exception of the body propagates; an error of the group itself is then logged."""

@disjoint_base
class ReqToTokenPool(Pool):
    """The table `req_to_token[request, position] -> slot`. It does not track sequence lengths.

    Row 0 is the padding row, for the padding requests of a CUDA graph. The table has `max_reqs + 1` rows, of
    which `1..=max_reqs` are handed out, first in, first out. Rows are zero when they are handed out, unless
    `zero_rows` is false.

    On a GPU all work is enqueued on the current stream, and only methods that say so wait. The host keeps a
    mirror of the table, so that slots read from it can be freed without a copy from the GPU. `write` and
    `free` update the mirror at once or, for values that only the GPU has, when the kernel has reported what
    it wrote. PyTorch's writes to `req_to_token` are detected by its write count (`_version`) and invalidate
    the whole mirror until `mark_modified` or `clear`. Writes by other kernels are not detected: report them
    with `mark_modified(rows)`, or set `foreign_writes` if other kernels write most of the table: the host then
    keeps no mirror, and copies slots from the GPU when they are freed.

    Args:
        max_reqs: Maximum number of requests.
        max_context_len: Maximum tokens per request: the number of columns.
        device: Device of the table.
        padding_row: Whether row 0 is padding. `False` gives exactly `max_reqs` rows, numbered from 0.
        strict: Whether an invalid free raises; otherwise it is dropped, counted and reported.
        zero_rows: Whether to zero the written columns of a row when it is freed. If not, a row still has the
            slots of its earlier owners.
        foreign_writes: Whether anything but this class writes the table, without `mark_modified`. Rows are then
            zeroed whole.
        debug: Whether to record owners and call sites for `leaks` and reports. Defaults to the environment
            variable `KVPOOL_DEBUG`.

    Raises:
        ConfigError: If a size is below 1, or the size in bytes overflows.
        OutOfMemoryError: If there is not enough memory.
        BackendUnavailableError: If `device` is not available.
    """

    def __new__(
        cls,
        max_reqs: SupportsIndex,
        max_context_len: SupportsIndex,
        device: DeviceLike = "cuda",
        *,
        padding_row: bool = True,
        strict: bool = False,
        zero_rows: bool = True,
        foreign_writes: bool = False,
        debug: bool | None = None,
    ) -> Self: ...
    @property
    def generation(self) -> torch.Tensor:
        """The number of times that each row was handed out, int64 `[max_reqs + 1]` on the host (`max_reqs` without a
        padding row), without a copy. `clear` keeps it: a row has another request if its number is another one. Do not
        write to it.
        """
    @property
    def req_to_token(self) -> torch.Tensor:
        """The table, int32 `[max_reqs + 1, max_context_len]` (`max_reqs` rows without a padding row), without a
        copy.
        """
    @property
    def size(self) -> int:
        """Maximum number of requests."""
    @property
    def max_context_len(self) -> int:
        """Maximum tokens per request: the number of columns."""
    @property
    def zero_rows(self) -> bool:
        """Whether the written columns of a row are zeroed when it is freed."""
    @property
    def foreign_writes(self) -> bool:
        """Whether anything but this class writes the table, without `mark_modified`."""
    @property
    def padding_row(self) -> bool:
        """Whether row 0 is padding."""
    def alloc(self, n: SupportsIndex = 1, *, owner: str | int | None = None) -> list[int] | None:
        """Takes rows.

        Args:
            n: Number of rows.
            owner: An owner for reports and `leaks`, a str or an int. Recorded only if the pool debugs.

        Returns:
            A list of `n` ints, or `None` if there are not enough rows.

        Raises:
            ArgumentError: If `n` is negative.
            DriverError: If the stream is being captured, or rows that an earlier call could not zero cannot be zeroed now.
                No row is taken.
        """
    def free(
        self,
        rows: SupportsIndex | IndicesLike | None = None,
        *,
        owner: str | int | None = None,
        slot_or_slots: SupportsIndex | IndicesLike | None = None,
    ) -> None:
        """Frees one or more rows, and zeroes their written columns, unless `zero_rows` is false. If the driver
        fails to zero them, a warning is logged, and they are zeroed before they are handed out again. Requests of
        a `BatchPlanner` end with `BatchPlanner.finish`; if their rows are freed here, the planner frees their
        slots at its next call, or when slots are short, and logs a warning.

        Args:
            rows: An int, or ints in a tensor, an array or a sequence. Waits for values that only a GPU has.
            owner: As in `alloc`.
            slot_or_slots: Another name of `rows`.

        Raises:
            IndexOwnershipError: If the pool is strict and a free is invalid. Nothing is changed.
            DriverError: If the stream is being captured. Nothing is changed.
        """
    def write(self, index: TableIndex, values: SupportsIndex | IndicesLike) -> None:
        """Writes slots to the table; on a GPU in one launch.

        For a place listed twice, the last value wins; if only the GPU has the places, either may.

        Args:
            index: `(row, slice)`, `(row, column)`, or `(rows, columns)` with one column for each row.
            values: One slot for each place, int32 or int64, or a single one for all places.

        Raises:
            IndexError: If a place is outside of the table. Nothing is written. An invalid place that only the
                GPU has is skipped, and a later call raises this error.
            ArgumentError: If the number of values is neither 1 nor the number of places.
            DriverError: If a driver call fails, or the stream is being captured.
        """
    def read(self, row: SupportsIndex, length: SupportsIndex) -> torch.Tensor:
        """Returns the first `length` slots of a row: an int32 tensor `[length]`, a view of the table.

        Raises:
            IndexError: If the row or the length is outside of the table.
        """
    def build_kv_indices(
        self, req_pool_indices: IndicesLike, kv_indptr: IndicesLike, kv_indices: TensorLike
    ) -> None:
        """Concatenates the slots of requests in the layout of FlashInfer's `kv_indices`.

        Request `i` fills `kv_indices[kv_indptr[i]:kv_indptr[i + 1]]` with the first slots of its row. On a
        GPU it is one launch on the current stream. Invalid arguments that only the GPU has are skipped, and
        a later call raises the error.

        Args:
            req_pool_indices: Request rows, int32 or int64 `[bs]`.
            kv_indptr: Offsets of the requests, int32 or int64 `[bs + 1]`.
            kv_indices: Output, a contiguous int32 tensor on the table's device.

        Raises:
            IndexError: If a row is not in the table, or a request is longer than a row or than `kv_indices`.
            ArgumentError: If a length or device is invalid.
            TypeError: If `kv_indices` is not an int32 tensor.
        """
    def mark_modified(self, rows: SupportsIndex | IndicesLike) -> None:
        """Reports that rows of the tensor were written outside of this class. They are zeroed whole when they
        are freed, and until then their values are copied from the GPU when needed. All PyTorch writes so far
        are accounted for.

        Args:
            rows: An int, or ints in a tensor, an array or a sequence. Waits for values that only a GPU has.

        Raises:
            IndexError: If a row is outside of the table.
        """
    def available_size(self) -> int:
        """Returns the number of free rows."""
    @property
    def rows_free(self) -> int:
        """Number of free rows: what `available_size` returns."""
    def rows_in_use(self) -> list[int]:
        """Returns the rows in use, ascending: all that `alloc` has returned and nobody has freed.

        After an error in the middle of a step, those that no request has can be freed.

        Raises:
            OutOfMemoryError: If there is not enough host memory.
        """
    def clear(self) -> None:
        """Frees every row, and zeroes everything that was written through this class, marked as modified or, on
        a GPU, counted by PyTorch.
        """
    def stats(self) -> CountedStats:
        """Returns the statistics of this pool, at the cost of a lock and a few loads. The keys are those of
        `kvpool.typing.PoolStats`, and of the subclass for this pool: `UnitStats` and `CountedStats` if it hands
        out units, `SlotStats`, `ArenaStats`, `TrackStats`, `ChunkStats`, `BufferStats`, `KVStats`, `PrefixStats`,
        `ArenaPrefixStats`, `TierStats` or `ArenaTierStats`.
        """

@final
class BatchPlanner:
    """Plans the steps of a scheduler: one call takes the slots of a whole batch, writes the request table and
    builds the metadata that attention kernels read.

    The planner tracks how many tokens of each request have slots, and owns these slots. `seq_lens` always
    include the new tokens; a length that does not follow from the request's current length is an error. Rows
    come from `req_to_token_pool.alloc`; `finish` frees them with their slots. A row that was freed and
    allocated again starts with no tokens. The lease of a row that was freed without `finish` ends in the next
    call of the planner. `extend` and `decode` are all or nothing: when they return `None`
    or raise, nothing is changed.

    A step is one pass on the host. Its cost grows with the new tokens and the requests; only `kv_indices` is
    rewritten whole in every step. On a GPU a step is one launch on the current stream, preceded by a copy to
    the device if it has more numbers than a launch takes. It waits only if the host is many large steps ahead.
    If you plan on another stream than before, make that stream wait, by an event, for the work that reads the
    previous plan. All calls are atomic.

    Args:
        req_to_token_pool: The request table. Do not write to rows that the planner uses.
        allocator: The allocator of the slots, on the same device. The metadata has its page size.
        max_batch_size: Maximum number of requests in a batch, including padding.
        max_tokens: Maximum number of new tokens in a batch, including padding.
        kv_indices: Whether to build FlashInfer's `kv_indices`, which takes memory for `max_batch_size`
            requests of full length.
        block_table: Whether to build the block table of FlashAttention and vLLM, which takes as much memory
            again.

    Raises:
        ConfigError: If a size is below 1, or the pools are on different devices.
        OutOfMemoryError: If there is not enough memory.
    """

    def __new__(
        cls,
        req_to_token_pool: ReqToTokenPool,
        allocator: TokenToKVPoolAllocator,
        max_batch_size: SupportsIndex,
        max_tokens: SupportsIndex,
        *,
        kv_indices: bool = True,
        block_table: bool = True,
    ) -> BatchPlanner: ...
    @property
    def req_to_token_pool(self) -> ReqToTokenPool:
        """The request table."""
    @property
    def allocator(self) -> TokenToKVPoolAllocator:
        """The allocator of the slots."""
    @property
    def max_batch_size(self) -> int:
        """Maximum number of requests in a batch, including padding."""
    @property
    def max_tokens(self) -> int:
        """Maximum number of new tokens in a batch, including padding."""
    @property
    def page_size(self) -> int:
        """Slots per page."""
    @property
    def device(self) -> str:
        """The device of the tensors, in PyTorch's notation, such as "cuda:0"."""
    def extend(
        self,
        req_pool_indices: SupportsIndex | IndicesLike,
        prefix_lens: SupportsIndex | IndicesLike,
        seq_lens: SupportsIndex | IndicesLike,
        prefix_slots: Sequence[IndicesLike | None] | None = None,
        *,
        prefixes: Sequence[Lease | None] | None = None,
    ) -> BatchPlan | None:
        """Takes the slots for positions `[prefix, seq)` of each request: a prefill, whole or chunked.

        Args:
            req_pool_indices: Request rows, ints `[bs]`.
            prefix_lens: Tokens that each request has now, ints `[bs]`. For a new request: 0, or the length of
                its cached prefix.
            seq_lens: Tokens that each request will have, ints `[bs]`.
            prefix_slots: Slots of cached prefixes: `None`, or a sequence with one entry per request, each
                `None` or ints. The slots must be in use and fill whole pages. The request becomes an
                additional owner (see `TokenToKVPoolAllocator.share`); the caller remains one.
            prefixes: In place of `prefix_slots`, leases of a `PrefixCache`: `None`, or a sequence with one
                entry per request, each `None` or a `Lease` as long as its prefix, possibly of length 0. The
                request keeps the lease, publishes through it, and releases it in `finish`. A lease is for one
                request; with later chunks pass `None` or the same lease again.

        Returns:
            A `BatchPlan`, or `None` if there are not enough slots. The slots are in the allocator's order,
            those of a partly used page first.

        Waits in two cases only: for freed slots whose values are still being copied from a GPU, if it would
        otherwise return `None`; and for the values of arguments on a GPU.

        Raises:
            ArgumentError: If the arguments differ in length, a length does not follow from the request's
                current length, a row is listed twice, cached slots do not fill their prefix or their pages,
                or the batch exceeds the planner's limits.
            IndexError: If a row or a length is outside of the table.
            IndexOwnershipError: If a row is not allocated, a cached slot is not in use, or the page that a
                request continues was freed by another owner.
            StaleError: If the allocator was cleared or resized since a request, which is not extended from
                0, took its slots.
            DriverError: If a driver call fails, or the stream is being captured.
        """
    def decode(
        self,
        req_pool_indices: SupportsIndex | IndicesLike,
        seq_lens: SupportsIndex | IndicesLike,
        tokens_per_req: SupportsIndex = 1,
        *,
        pad_to: SupportsIndex | IndicesLike | None = None,
    ) -> BatchPlan | None:
        """Takes the slots for the next tokens of each request: `extend` from `seq_lens - tokens_per_req` to
        `seq_lens`.

        `seq_lens` are lengths after this step, the new tokens included: a request that has 30 tokens and gets
        its next one has the length 31 here, and 32 in the step after that.

        Args:
            req_pool_indices: Request rows, ints `[bs]`.
            seq_lens: Tokens that each request will have, including the new ones, ints `[bs]`.
            tokens_per_req: New tokens per request. Use more than one for speculative decoding, and `truncate`
                to free the rejected ones.
            pad_to: Batch sizes of CUDA graphs, an int or a sequence. The batch is padded to the smallest size
                that it fits. A padding request has row 0, the padding page, and `tokens_per_req` tokens, all
                new and at slot 0 (-1 in `slot_mapping`).

        Returns:
            A `BatchPlan`, or `None` if there are not enough slots.

        Raises:
            ArgumentError: As in `extend`; also if the batch exceeds every size of `pad_to`, or the table has no
                padding row.
            IndexError: As in `extend`.
            IndexOwnershipError: As in `extend`.
            StaleError: If the allocator was cleared or resized since a request took its slots.
            DriverError: As in `extend`.
        """
    def truncate(
        self,
        req_pool_indices: SupportsIndex | IndicesLike,
        seq_lens: SupportsIndex | IndicesLike,
        *,
        after: Fence | None = None,
    ) -> None:
        """Shrinks requests, for example by rejected tokens, and frees their slots. Table entries beyond the new
        length keep their values but are no longer owned. A lease that is longer is cut as well.

        Args:
            req_pool_indices: Request rows, ints `[bs]`.
            seq_lens: Tokens that each request keeps, ints `[bs]`.
            after: A fence as in `TokenToKVPoolAllocator.free`: the slots stay in use until its `query()`
                returns true.

        Raises:
            ArgumentError: If a request has fewer tokens, or a row is listed twice. Nothing is changed.
            IndexError: If a row is outside of the table.
            IndexOwnershipError: If a row is not allocated, or a request would end inside a page that has
                another owner (possibly one behind a fence), which later tokens would overwrite; nothing is
                changed. Also if the allocator is strict and a slot of the planner was freed by another owner;
                all others are freed.
            StaleError: As in `decode`.
        """
    def finish(
        self,
        req_pool_indices: SupportsIndex | IndicesLike,
        seq_lens: SupportsIndex | IndicesLike | None = None,
        *,
        after: Fence | None = None,
    ) -> None:
        """Frees the slots and the rows of requests, and ends their leases. The rows are zeroed, as by
        `ReqToTokenPool.free`. Requests from before a `clear` or `resize` of the allocator have no slots: only
        their rows are freed.

        Args:
            req_pool_indices: Request rows, ints `[bs]`.
            seq_lens: Tokens of each request, ints `[bs]`. Only checked.
            after: A fence as in `TokenToKVPoolAllocator.free`: the slots stay in use, and leased prefixes
                locked, until its `query()` returns true.

        Raises:
            ArgumentError: If a length differs from the request's, or a row is listed twice. Nothing is changed.
            IndexError: If a row is outside of the table.
            IndexOwnershipError: If a row is not allocated; nothing is changed. Also if the allocator is
                strict and a slot of the planner was freed by another owner; everything else is freed.
            DriverError: If the stream is being captured. Nothing is changed.
        """
    def fork(
        self, src: SupportsIndex, dst: SupportsIndex, seq_len: SupportsIndex
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Gives an empty request the first tokens of another, for example for parallel sampling. Full pages are
        shared, with each request as an owner. A partly used page gets a new page in its place, to which you
        copy its contents.

        Args:
            src: Row of the request that has the tokens.
            dst: Row of the empty request.
            seq_len: Number of tokens.

        Returns:
            `(dst_slots, src_slots)`, 1-D tensors of slots of equal length for `KVPool.move_kv`, empty if there
            is nothing to copy (always for pages of one slot); or `None` if there is no free page.

        Raises:
            ArgumentError: If `src` has fewer tokens, `dst` is not empty, or they are the same row.
            IndexError: If a row is outside of the table.
            IndexOwnershipError: If a row is not allocated, or a page of `src` was freed by another owner.
            StaleError: If the allocator was cleared or resized since `src` took its slots.
            DriverError: If a driver call fails, or the stream is being captured.
        """
    def seq_len(self, req_pool_idx: SupportsIndex) -> int:
        """Returns the number of tokens of a request that have slots.

        Raises:
            IndexError: If the row is outside of the table.
            IndexOwnershipError: If the row is not allocated.
        """
    def stats(self) -> dict[str, int]:
        """Returns the statistics of this planner: `requests` with slots, their `tokens`, `plans` so far,
        `max_batch_size`, `max_tokens`, and `bytes` of the arrays on its device.
        """

@final
class BatchPlan:
    """A planned step: the arrays that attention kernels and samplers read.

    The tensors are int32 (`slot_mapping`: int64) views of the planner's memory, on its device and at the same
    addresses in every plan. They are valid on the stream that was current in the planning call. The next plan
    of the planner overwrites them, and getters of this plan then raise `StaleError`. `B` is the padded
    number of requests, `T` the padded number of new tokens.
    """

    @property
    def out_cache_loc(self) -> torch.Tensor:
        """Slots of the new tokens, `[T]`, one request after the other; 0 for padding (SGLang's name)."""
    @property
    def positions(self) -> torch.Tensor:
        """Positions of the new tokens in their requests, `[T]`."""
    @property
    def slot_mapping(self) -> torch.Tensor:
        """Slots of the new tokens, int64 `[T]`; -1 for padding, which vLLM's kernels skip."""
    @property
    def req_pool_indices(self) -> torch.Tensor:
        """Rows of the request table, `[B]`; 0 for padding."""
    @property
    def seq_lens(self) -> torch.Tensor:
        """Tokens of each request, including the new ones, `[B]`."""
    @property
    def cache_seqlens(self) -> torch.Tensor:
        """The same tensor as `seq_lens`, by FlashAttention's name (`flash_attn_with_kvcache`)."""
    @property
    def qo_indptr(self) -> torch.Tensor:
        """Offsets of the new tokens of each request, ending with their total, `[B + 1]` (FlashInfer)."""
    @property
    def cu_seqlens_q(self) -> torch.Tensor:
        """The same tensor as `qo_indptr`, by FlashAttention's name (`flash_attn_varlen_func`)."""
    @property
    def kv_indptr(self) -> torch.Tensor:
        """Offsets of the pages of each request in `kv_indices`, ending with their total, `[B + 1]` (FlashInfer)."""
    @property
    def kv_indices(self) -> torch.Tensor | None:
        """The pages of all requests, one request after the other, `[kv_indptr[-1]]` (FlashInfer). With pages of
        one slot these are the slots. `None` if the planner does not build it.
        """
    @property
    def kv_last_page_len(self) -> torch.Tensor:
        """Tokens in the last page of each request, `[B]`, 1 to `page_size` (FlashInfer); 0 for a request without
        tokens.
        """
    @property
    def block_table(self) -> torch.Tensor | None:
        """The pages of each request, padded with zeros, `[B, ceil(max_context_len / page_size)]` (FlashAttention
        and vLLM). `None` if the planner does not build it.
        """
    @property
    def host(self) -> HostPlan:
        """The arrays of this plan in host memory."""
    @property
    def batch_size(self) -> int:
        """Number of requests, without padding."""
    @property
    def padded_batch_size(self) -> int:
        """Number of requests, including padding: `B`."""
    @property
    def num_tokens(self) -> int:
        """Number of new tokens, without padding."""
    @property
    def padded_num_tokens(self) -> int:
        """Number of new tokens, including padding: `T`."""
    @property
    def max_seqlen_q(self) -> int:
        """Largest number of new tokens of a request (FlashAttention's name)."""
    @property
    def max_seqlen_k(self) -> int:
        """Largest number of tokens of a request (FlashAttention's name)."""

@final
class HostPlan:
    """The arrays of a `BatchPlan` in host memory: read-only NumPy arrays over the planner's memory, which the
    next plan overwrites.

    On a GPU `kv_indices` and `block_table` are built on access, which raises `StaleError` after
    `truncate`, `finish` or `fork`. Without NumPy the arrays are `kvpool.Tensor`s.
    """

    @property
    def out_cache_loc(self) -> npt.NDArray[np.int32]:
        """`BatchPlan.out_cache_loc` in host memory."""
    @property
    def positions(self) -> npt.NDArray[np.int32]:
        """`BatchPlan.positions` in host memory."""
    @property
    def slot_mapping(self) -> npt.NDArray[np.int64]:
        """`BatchPlan.slot_mapping` in host memory."""
    @property
    def req_pool_indices(self) -> npt.NDArray[np.int32]:
        """`BatchPlan.req_pool_indices` in host memory."""
    @property
    def seq_lens(self) -> npt.NDArray[np.int32]:
        """`BatchPlan.seq_lens` in host memory."""
    @property
    def cache_seqlens(self) -> npt.NDArray[np.int32]:
        """`BatchPlan.cache_seqlens` in host memory."""
    @property
    def qo_indptr(self) -> npt.NDArray[np.int32]:
        """`BatchPlan.qo_indptr` in host memory."""
    @property
    def cu_seqlens_q(self) -> npt.NDArray[np.int32]:
        """`BatchPlan.cu_seqlens_q` in host memory."""
    @property
    def kv_indptr(self) -> npt.NDArray[np.int32]:
        """`BatchPlan.kv_indptr` in host memory."""
    @property
    def kv_indices(self) -> npt.NDArray[np.int32] | None:
        """`BatchPlan.kv_indices` in host memory."""
    @property
    def kv_last_page_len(self) -> npt.NDArray[np.int32]:
        """`BatchPlan.kv_last_page_len` in host memory."""
    @property
    def block_table(self) -> npt.NDArray[np.int32] | None:
        """`BatchPlan.block_table` in host memory."""

@final
class GDNPool(Pool):
    """States of Gated DeltaNet layers, one for each request, indexed like the rows of `ReqToTokenPool`.

    Index 0 is padding. Working slots are `1..=max_reqs`. Track slots, which hold snapshots for a prefix
    cache, follow in `[max_reqs + 1, max_reqs + 1 + max_track_slots)`. Both states are zero at first and share
    one region.

    On a GPU each call is one launch on the current stream, without temporaries or allocations. A call waits
    only if the host is so far ahead that its staging memory for indices is full. The kernel reads index
    tensors on the GPU: a slot outside of the pool is skipped, and a later call raises the error.

    Args:
        max_reqs: Number of working slots.
        num_gdn_layers: Number of linear-attention layers.
        num_v_heads: Number of value heads.
        head_k_dim: Elements of a key head.
        head_v_dim: Elements of a value head.
        conv_dim: Channels of the causal convolution.
        conv_kernel_size: Taps of the causal convolution; the state holds one fewer.
        device: Device of the states.
        dtype: Dtype of the convolution state, bfloat16 by default. The recurrent state is float32.
        max_track_slots: Number of track slots.
        strict: Whether an invalid free of a track slot raises; otherwise it is dropped, counted and reported.
        debug: Whether to record owners and call sites for `leaks` and reports. Defaults to the environment
            variable `KVPOOL_DEBUG`.

    Raises:
        ConfigError: If a size is below 1 (`max_track_slots`: below 0), or the size in bytes overflows.
        TypeError: If `dtype` is not a storage dtype.
        OutOfMemoryError: If there is not enough memory.
        BackendUnavailableError: If `device` is not available.
    """

    def __new__(
        cls,
        max_reqs: SupportsIndex,
        num_gdn_layers: SupportsIndex,
        num_v_heads: SupportsIndex,
        head_k_dim: SupportsIndex,
        head_v_dim: SupportsIndex,
        conv_dim: SupportsIndex,
        conv_kernel_size: SupportsIndex,
        device: DeviceLike = "cuda",
        dtype: DTypeLike = "bfloat16",
        max_track_slots: SupportsIndex = 0,
        *,
        strict: bool = False,
        debug: bool | None = None,
    ) -> GDNPool: ...
    @property
    def recurrent_state(self) -> torch.Tensor:
        """Recurrent states, float32 `[num_gdn_layers, pool_size, num_v_heads, head_v_dim, head_k_dim]`, without
        a copy. V comes before K, as in FlashInfer's GDN kernels.
        """
    @property
    def conv_state(self) -> torch.Tensor:
        """Convolution states, `dtype` `[num_gdn_layers, pool_size, conv_dim, conv_kernel_size - 1]`, without a
        copy.
        """
    @property
    def pool_size(self) -> int:
        """Number of slots in each layer: padding, working and track slots."""
    @property
    def max_reqs(self) -> int:
        """Number of working slots."""
    @property
    def num_gdn_layers(self) -> int:
        """Number of linear-attention layers."""
    @property
    def num_v_heads(self) -> int:
        """Number of value heads."""
    @property
    def head_k_dim(self) -> int:
        """Elements of a key head."""
    @property
    def head_v_dim(self) -> int:
        """Elements of a value head."""
    @property
    def conv_dim(self) -> int:
        """Channels of the causal convolution."""
    @property
    def conv_kernel_size(self) -> int:
        """Taps of the causal convolution."""
    @property
    def max_track_slots(self) -> int:
        """Number of track slots."""
    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the convolution state: a `torch.dtype`, or its name if PyTorch is not installed."""
    def get_layer_state(self, i: SupportsIndex) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the recurrent and convolution states of a layer: the two tensors without their first
        dimension, without a copy.

        Raises:
            IndexError: If the layer does not exist.
        """
    def get_contiguous_buf_infos(self) -> tuple[list[int], list[int], list[int]]:
        """Returns the buffers for registration with a transfer engine: recurrent states of all layers, then convolution
        states. A row is the state of a slot.

        Returns:
            Three lists of `2 * num_gdn_layers` ints: addresses, bytes of each buffer, bytes of one of its rows.
        """
    def reset_states(self, indices: SupportsIndex | IndicesLike) -> None:
        """Zeroes both states of slots, in all layers.

        Args:
            indices: An int, or ints in a tensor, an array or a sequence.

        Raises:
            IndexError: If a slot is outside of the pool. Nothing is zeroed.
            IndexOwnershipError: If a slot has a snapshot of a prefix cache. Nothing is zeroed. Tensors on a GPU
                are not checked for it.
        """
    def copy_states(self, src: SupportsIndex | IndicesLike, dst: SupportsIndex | IndicesLike) -> None:
        """Copies both states of slot `src[i]` to slot `dst[i]`, in all layers, as if all were read before any is
        written, without a temporary.

        This holds for indices in host memory. With index tensors on a GPU, the contents of a slot that is
        both read and written, or written twice, are undefined.

        Args:
            src: An int, or ints in a tensor, an array or a sequence.
            dst: Indices, as many as `src`. For a slot listed twice, the last copy wins.

        Raises:
            IndexError: If a slot is outside of the pool. Nothing is copied.
            IndexOwnershipError: If a slot of `dst` has a snapshot of a prefix cache. Nothing is copied. Tensors
                on a GPU are not checked for it.
            ArgumentError: If `src` and `dst` differ in length.
        """
    def alloc_track_slot(self, *, owner: str | int | None = None) -> int | None:
        """Takes the track slot that has been free longest, or returns `None`. Its states are unchanged."""
    def free_track_slot(self, slot: SupportsIndex, *, owner: str | int | None = None) -> None:
        """Frees a track slot. One that has a snapshot of a prefix cache is the cache's: freeing it is an invalid
        free.

        Raises:
            IndexOwnershipError: If the pool is strict and the slot is not in use, or a prefix cache has it.
        """
    @property
    def cache_layout(self) -> CacheLayout:
        """What the pool keeps, as a layout of one group."""
    def mem_bytes(self) -> int:
        """Returns the bytes of both states."""
    def stats(self) -> TrackStats:
        """Returns the statistics of this pool, at the cost of a lock and a few loads. The keys are those of
        `kvpool.typing.PoolStats`, and of the subclass for this pool: `UnitStats` and `CountedStats` if it hands
        out units, `SlotStats`, `ArenaStats`, `TrackStats`, `ChunkStats`, `BufferStats`, `KVStats`, `PrefixStats`,
        `ArenaPrefixStats`, `TierStats` or `ArenaTierStats`.
        """

@final
class HybridTree:
    """Finds slots by tokens for an engine that drives eviction itself, with values of several kinds of attention.

    Every node of the tree has the slots of its tokens for full attention (part 0). Models with sliding-window
    attention have windows beside them (part 1, one slot a token), those with linear attention states (part 2,
    one value a node). A prefix is found up to the deepest node that all parts accept: sliding-window
    attention needs the slots of the whole last window, linear attention only the state of the node itself.

    The tree owns no slots: the engine frees the values that an eviction returns, and those that the actions
    of an insertion name. Nodes are ints that are never used again. When a node is split, the deeper part
    keeps the number.

    Tokens are 64-bit ints; an `array.array("q")` is read in place. Slots are ints in `[0, 2**31)`; a contiguous
    int32 or int64 tensor in host memory is read in place, one on a GPU is copied first, which waits for the GPU.
    Tensors that are returned are int64, on the host, and copies.

    A namespace keeps prefixes apart: `None`, a str, bytes, an int, or a tuple of these. Calls are atomic and
    thread-safe. A node that no longer exists raises `KeyError`.

    Args:
        page_size: Tokens that are found together.
        policy: The order of eviction: "lru", "mru", "fifo", "filo", "lfu", "priority", "slru", "tlru" or "adaptive".
        protected_uses: With "slru", the number of uses from which on a node is evicted after the others.
        tail: With "tlru", leaves go before the others that are within this many tokens of the end of the longest
            prompt that went through them.
        capacity: With "adaptive", tokens that there is room for, below 2**31. That policy learns from insertions, whose
            `inserted` tells how much of a request was counted before; look-ups and locks count nothing.
        window: Tokens of history that sliding-window attention reads; `None` for models without it.
        window_gates: Whether a prefix is found only with its window.
        state_grid: The number of tokens between places where states can be taken; `None` for models without
            states.
        states_per_path: How many states `evict_excess_states` leaves on a path; `None` leaves all.

    Raises:
        ConfigError: If `policy` is unknown, a size is not positive, or "adaptive" has no `capacity`.
    """

    def __new__(
        cls,
        page_size: SupportsIndex,
        *,
        policy: str = "lru",
        protected_uses: int = 2,
        tail: int = 0,
        capacity: SupportsIndex | None = None,
        window: SupportsIndex | None = None,
        window_gates: bool = True,
        state_grid: SupportsIndex | None = None,
        states_per_path: SupportsIndex | None = None,
    ) -> HybridTree: ...
    def reset(
        self,
    ) -> None:
        """Removes all nodes, locked or not. No later node has the number of an earlier one."""
    def root(
        self,
    ) -> int:
        """Returns the root node, which is the end of the empty prefix."""
    def match(
        self,
        tokens: IndicesLike,
        start: int = 0,
        end: int | None = None,
        namespace: Namespace | tuple[Namespace, ...] = None,
    ) -> HybridMatch:
        """Finds the longest prefix that all parts accept, in whole pages, and refreshes it.

        Args:
            tokens: Token ids.
            start: The position of the first one that counts.
            end: One past the position of the last one; `None` for all.
            namespace: See the class.

        Raises:
            ArgumentError: If `start` and `end` are not within the tokens.
        """
    def peek(
        self,
        tokens: IndicesLike,
        start: int = 0,
        end: int | None = None,
        namespace: Namespace | tuple[Namespace, ...] = None,
    ) -> tuple[int, int, int]:
        """Returns how many tokens have slots for full attention, whatever the other parts say, the deepest node
        with some of them, and the tokens up to its end. Changes nothing.

        Args:
            tokens: Token ids, as in `match`.
            start: The position of the first token that counts.
            end: One past the position of the last one; `None` for all.
            namespace: As in `match`.

        Raises:
            ArgumentError: As in `match`.
        """
    def insert(
        self,
        tokens: IndicesLike,
        slots: IndicesLike,
        start: int = 0,
        end: int | None = None,
        namespace: Namespace | tuple[Namespace, ...] = None,
        *,
        found: int = 0,
        inserted: int = 0,
        window_freed: int = 0,
        priority: int = 0,
        state: IndicesLike | None = None,
        branch: int | None = None,
        session: str | bytes | int | None = None,
    ) -> HybridStep:
        """Inserts the whole pages of tokens with their slots, up to the first step after which the engine must
        act.

        Args:
            tokens: Token ids, as in `match`. How many there are in all, those after `end` included, tells the policy "adaptive"
                how much of the request is new.
            slots: One for each token at least.
            start: The position of the first token that counts.
            end: One past the position of the last one; `None` for all.
            namespace: As in `match`.
            found: Tokens that the request had found in the tree, and has locked since: their slots are the tree's
                already, and most of them are not compared again. Slots of later ones that are there are to be
                freed.
            inserted: Tokens that the request has inserted before: they do not count as used again.
            window_freed: Tokens whose windows are free already, a whole number of pages.
            priority: Nodes of higher priority are evicted later, with the policy "priority".
            state: The state at the end of the tokens, required where nodes have states.
            branch: The number of tokens at which the request branches off from a window.
            session: The name of the session of which the request is a turn, for the policy "adaptive"; `None` for none.

        Raises:
            ArgumentError: As in `match`; if there are fewer slots than tokens, a slot is outside of [0, 2**31),
                another insertion is in progress, or the state is missing.
        """
    def advance(
        self,
        tokens: IndicesLike,
        slots: IndicesLike,
        start: int = 0,
        end: int | None = None,
        namespace: Namespace | tuple[Namespace, ...] = None,
    ) -> HybridStep:
        """Continues an insertion of the same tokens and slots, after the actions of the previous step.

        Args:
            tokens: The tokens of the insertion.
            slots: The slots of the insertion.
            start: The position of the first token that counts.
            end: One past the position of the last one; `None` for all.
            namespace: As in `match`.

        Raises:
            ArgumentError: If it began with other tokens or in another namespace.
            StaleError: If the node that it has reached was evicted since.
            StateError: If no insertion is in progress, or it has failed.
        """
    def end_turn(
        self, session: str | bytes | int, node: int, *, pause: str | None = None, is_last: bool = False
    ) -> None:
        """Tells the policy "adaptive" that a turn of a session is over. If it does not continue the turn before, what only
        this session has used of that, and no lock keeps, is evicted first, down to where they part.

        Args:
            session: The name of the session.
            node: The node at the end of the tokens of the turn; the root to say only what follows.
            pause: What the session waits for, such as "bash" or "user". How long pauses of each kind are is learned, in
                tokens inserted. 256 kinds are told apart.
            is_last: Whether the session ends: what only it has used is evicted first.

        Raises:
            ValueError: If a session that ends pauses. Nothing is changed.
            KeyError: If the node no longer exists.
        """
    def set_waiting(self, requests: Sequence[tuple[int | None, int | None]]) -> list[int]:
        """Tells the policy "adaptive" what the engine's waiting queue is, from the request on that is served next. What the
        requests need, tokens up to a node, is evicted after all else, that of the last request first. What several need
        counts as of the first of them. A request that is not in the queue any more needs nothing. Nothing is locked, and
        windows and states go by recency. With another policy nothing changes.

        Args:
            requests: For each, its number if it was in the queue before, or `None`; and the node at the end of what was
                found for it, or `None`. With `None`, or a node that no longer exists, it needs what it needed before, as far
                as that is cached.

        Returns:
            The number of each request from now on.
        """
    def is_inserting(
        self,
    ) -> bool:
        """Returns whether an insertion is in progress."""
    def end_insertion(
        self,
    ) -> list[HybridAction]:
        """Gives up the insertion in progress, if there is one, and returns the remaining actions, as
        `HybridStep.actions`.
        """
    def lock_node(
        self,
        node: int,
        skip: Sequence[int] = ...,
    ) -> tuple[int, int | None]:
        """Locks a node: its slots for full attention up to its end, those of its last window, and its state.
        Returns how many slots for full attention were without locks, and the `boundary` to pass to `unlock_node`.

        Args:
            node: The node.
            skip: Parts that are not locked.

        Raises:
            KeyError: If the node no longer exists.
        """
    def unlock_node(
        self,
        node: int,
        boundary: int | None = None,
        skip: Sequence[int] = ...,
        *,
        window_done: bool = False,
    ) -> None:
        """Undoes one `lock_node`.

        Args:
            node: The node.
            boundary: The result of `lock_node`.
            skip: The parts that were not locked.
            window_done: Whether `unlock_window` has released window and state. After a call of it without
                the state, leave the window out by `skip` instead.

        Raises:
            KeyError: If the node no longer exists.
            IndexOwnershipError: If it has no such lock. Nothing is changed.
        """
    def unlock_window(
        self,
        node: int,
        boundary: int | None = None,
        skip: Sequence[int] = ...,
        *,
        with_state: bool = True,
    ) -> HybridFrees:
        """Releases the window of one `lock_node` early, and the state with it, because the request has moved
        past it. Returns the windows that are no longer locked and that no other prefix needs.

        Args:
            node: The node.
            boundary: The result of `lock_node`.
            skip: The parts that were not locked.
            with_state: Whether the state is released, too.

        Raises:
            KeyError: If the node no longer exists.
            IndexOwnershipError: If it has no such lock. Nothing is changed.
        """
    def pin(
        self,
        node: int,
    ) -> None:
        """Locks only the slots for full attention up to the end of a node.

        Raises:
            KeyError: If the node no longer exists.
        """
    def unpin(
        self,
        node: int,
    ) -> None:
        """Undoes one `pin`.

        Raises:
            KeyError: If the node no longer exists.
            IndexOwnershipError: If it has no lock. Nothing is changed.
        """
    def slots(
        self,
        node: int,
        until: int,
    ) -> torch.Tensor:
        """Returns the slots for full attention behind `until` up to the end of `node`, a 1-D int64 tensor.

        Raises:
            KeyError: If a node no longer exists, or `until` is not on the way to `node`.
        """
    def begin_eviction(
        self,
        part: int,
        wanted: int,
    ) -> None:
        """Begins to evict values of a part, `wanted` of them.

        Raises:
            StateError: If an eviction of the part is in progress.
        """
    def next_victim(
        self,
        part: int,
        evicted: int,
    ) -> int | HybridFrees | None:
        """Returns the next step of an eviction: an int, the leaf to evict with `evict_leaf`; or values that were
        removed already, of a node that stays; or `None`, if enough was evicted or nothing evictable is left.

        Args:
            part: The part.
            evicted: Values of the part that were evicted until now.

        Raises:
            StateError: If no eviction of the part has begun.
        """
    def evict_leaf(
        self,
        node: int,
    ) -> HybridFrees:
        """Evicts a leaf with all its values.

        Raises:
            KeyError: If the node no longer exists.
            IndexOwnershipError: If it is no leaf, or is locked.
        """
    def end_eviction(
        self,
        part: int,
    ) -> None:
        """Ends an eviction.

        Raises:
            StateError: If no eviction of the part has begun.
        """
    def evict(
        self,
        wanted: int,
    ) -> HybridFrees:
        """Evicts leaves until at least `wanted` slots for full attention were given up, in one call."""
    def evict_excess_states(
        self,
        node: int,
    ) -> HybridFrees:
        """Evicts the states of ancestors of a node that exceed the number that a path keeps, those nearest to
        the root first. Nodes with several children, locked nodes and leaves keep their states.

        Raises:
            KeyError: If the node no longer exists.
        """
    def evictable_size(
        self,
        part: int,
    ) -> int:
        """Returns how many values of a part have no locks."""
    def locked_size(
        self,
        part: int,
    ) -> int:
        """Returns how many values of a part are locked."""
    def adjust_size(
        self,
        node: int,
        part: int,
        delta: int,
    ) -> None:
        """Changes what a part counts on a node whose values the engine backs with more or fewer rows than values.

        Raises:
            KeyError: If the node no longer exists.
            ArgumentError: If the size would become negative.
        """
    def value(
        self,
        node: int,
        part: int,
    ) -> torch.Tensor | None:
        """Returns the value of a node, a 1-D int64 tensor; `None` if it has none.

        Raises:
            KeyError: If the node no longer exists.
        """
    def set_value(
        self,
        node: int,
        part: int,
        value: IndicesLike,
    ) -> None:
        """Gives a node a window or a state that it does not have.

        Raises:
            KeyError: If the node no longer exists.
            ArgumentError: If the part is 0 or nodes do not have it, the node has a value, or the length is wrong.
        """
    def hash_at(
        self,
        node: int,
        end: int,
    ) -> bytes | None:
        """Returns the hash of the page that ends at `end` tokens on the way to a node, 32 bytes; `None` if it has
        none.

        Raises:
            KeyError: If the node no longer exists.
        """
    def set_hashes(
        self,
        node: int,
        start: int,
        hashes: bytes,
    ) -> None:
        """Sets the hashes of the pages from the token `start` up to the end of a node, for engines that publish
        the contents of the tree. `HybridFrees.removed` has the hashes of removed nodes.

        Args:
            node: The node.
            start: The position where a node on the way to it begins.
            hashes: 32 bytes for each page.

        Raises:
            KeyError: If the node no longer exists.
            ArgumentError: If there are not as many hashes as pages, or no node begins at `start`. Nothing is
                changed.
        """
    def window_gaps(
        self,
        tokens: IndicesLike,
        begin: int,
        limit: int,
        start: int = 0,
        end: int | None = None,
        namespace: Namespace | tuple[Namespace, ...] = None,
    ) -> list[tuple[int, int]]:
        """Returns the ranges of tokens within `begin..limit` that are in the tree without a window."""
    def attach_window(
        self,
        tokens: IndicesLike,
        begin: int,
        values: IndicesLike,
        start: int = 0,
        end: int | None = None,
        namespace: Namespace | tuple[Namespace, ...] = None,
    ) -> None:
        """Gives tokens from `begin` on, which are there without a window, the windows `values`.

        Raises:
            ArgumentError: If they are no whole pages, or some of them are not there or have a window. Nothing is
                changed.
        """
    def by_common_prefix(
        self,
        nodes: Sequence[int],
    ) -> list[int]:
        """Returns positions in `nodes`, ordered so that nodes with common prefixes are next to each other, larger
        groups first.

        Raises:
            KeyError: If a node no longer exists.
        """
    def path(
        self,
        node: int,
    ) -> list[tuple[int, int, int, int, int]]:
        """Returns the path to a node, the root left out: node, parent, tokens before it, tokens up to its end, and
        children of each.

        Raises:
            KeyError: If the node no longer exists.
        """
    def values(
        self,
        part: int,
    ) -> torch.Tensor:
        """Returns all values of a part, a 1-D int64 tensor."""
    def slot_rows(
        self,
        *,
        unlocked: bool = False,
        windows: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns the slots for full attention, the positions of their tokens, and the slots before them (-1 for
        none): three 1-D int64 tensors.

        Args:
            unlocked: Leave out nodes with locks: of windows if `windows`, else of full attention.
            windows: Leave out nodes without a window.
        """
    def contains(
        self,
        node: int,
    ) -> bool:
        """Returns whether a node exists."""
    def nodes(
        self,
    ) -> list[int]:
        """Returns all nodes, the root first."""
    def children(
        self,
        node: int,
    ) -> list[int]:
        """Returns the children of a node, in the order of their insertion. Looks at every node.

        Raises:
            KeyError: If the node no longer exists.
        """
    def listed(
        self,
        part: int,
    ) -> list[int]:
        """Returns the nodes with a window (part 1) or a state (part 2), the most recent first."""
    def info(
        self,
        node: int,
    ) -> HybridNode:
        """Returns a node as it is now.

        Raises:
            KeyError: If it no longer exists.
        """
    def verify(
        self,
    ) -> None:
        """Checks every invariant.

        Raises:
            IndexOwnershipError: With the first broken one.
        """
    def second_owners(
        self,
    ) -> tuple[int, int | None]:
        """Returns how often a slot for full attention was found to have two owners, and the slot that was found last.
        A slot is found when it is inserted while a node has it, or is to be freed as a duplicate of another one:
        two requests have written to it, and what one of them finds there is wrong.
        """
    def memory_size(
        self,
    ) -> int:
        """Returns the size of the bookkeeping in bytes. Looks at every node."""

@final
class HybridMatch:
    """A prefix that was found."""

    @property
    def length(self) -> int:
        """Tokens of the prefix."""
    @property
    def node(self) -> int:
        """The node at its end."""
    @property
    def visited(self) -> int | None:
        """The deepest node with tokens of the prompt, accepted or not; `None` if there is none."""
    @property
    def full_length(self) -> int:
        """Tokens with slots for full attention."""
    @property
    def window_branch(self) -> int | None:
        """The end of the whole pages with slots for full attention, if it is after the prefix and nodes have
        windows. With a window there, more of the prompt could be used.
        """
    @property
    def state_branch(self) -> int | None:
        """The last position of the grid with slots for full attention, if it is after the prefix and nodes have
        states. With a state there, more of the prompt could be used.
        """

@final
class HybridStep:
    """A step of an insertion."""

    def actions(self) -> list[HybridAction]:
        """The actions that the engine must take, in this order, as tuples. Ranges are of the inserted slots.

        ("free", start, end): free them with their windows. ("free_full", start, end): free them; their windows
        are free already. ("free_old", slots): free these slots; their windows are free. ("rebuild", node,
        slots): find the window of these slots and give it to the node with `set_value`. ("recover", node, kept,
        start, end): move the windows of the inserted slots to the kept ones, give them to the node, and free
        the inserted slots without their windows. ("evict_excess", node): call `evict_excess_states`.
        """
    @property
    def done(self) -> bool:
        """Whether the insertion is done. If not, call `advance` when the actions are."""
    @property
    def added(self) -> tuple[int, int, int] | None:
        """The tokens that this step has added: the node at their end, the first one, and one past the last; `None` if
        there are none.
        """
    @property
    def found(self) -> int:
        """Tokens that were in the tree before, in whole pages."""
    @property
    def node(self) -> int | None:
        """The node at the end of the inserted tokens; `None` until the insertion is done."""
    @property
    def had_state(self) -> bool:
        """Whether the node had a state already, so that the inserted one still belongs to the caller."""
    @property
    def reached_branch(self) -> bool:
        """Whether the tokens reach the branch that `insert` was given."""
    @property
    def adopted(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """The inserted values that the tree has taken over: two lists of ranges, of slots for full attention and of
        windows.
        """

@final
class HybridFrees:
    """Values that the tree has removed, for the engine to free."""

    @property
    def full(self) -> torch.Tensor | None:
        """Slots for full attention, a 1-D int64 tensor; `None` for none."""
    @property
    def window(self) -> torch.Tensor | None:
        """Slots for full attention whose windows are to be freed; `None` for none."""
    @property
    def state(self) -> torch.Tensor | None:
        """States; `None` for none."""
    @property
    def counts(self) -> tuple[int, int, int]:
        """The number of removed values of each part."""
    @property
    def removed(self) -> list[tuple[Namespace | tuple[Namespace, ...], bytes]]:
        """The removed nodes whose pages have hashes: the namespace and the hashes of each, in the order of their
        removal. Hashes are bytes, 32 for each page.
        """

@final
class HybridNode:
    """A node of a `HybridTree` at the time of `HybridTree.node`."""

    @property
    def parent(self) -> int | None:
        """The parent node; `None` for the root."""
    @property
    def tokens(self) -> list[int]:
        """The node's own tokens."""
    @property
    def end(self) -> int:
        """Tokens up to the end of the node."""
    @property
    def locks(self) -> tuple[int, int, int]:
        """Locks by part."""
    @property
    def hits(self) -> int:
        """The number of times that the node was inserted."""
    @property
    def is_leaf(self) -> bool:
        """Whether the node may be evicted as a whole."""

@final
class SlotTree:
    """Finds slots by tokens for an engine that holds nodes, locks them and evicts by itself, and owns the slots.

    A node is a run of tokens with their slots. Its number is an int below 2**63 that no other node of the
    tree ever has. When a node is split, the deeper half keeps its number, its end and its locks. Prefixes are
    found in whole pages, and compared token by token. Tokens and namespaces are those of `PrefixCache`.

    Slots that are inserted belong to the tree until they are evicted: freeing them through the allocator is
    an invalid free. An insertion frees nothing; slots of tokens that were cached before stay the caller's.
    The slots of an insertion after its last whole page are kept, too, in a node that no look-up finds. The
    next insertion of the same slots takes this node over, and it is not evicted while its parent is locked.
    If its parent is the root, it is not evicted until the same slots are inserted again.

    All calls are atomic and thread-safe. They wait for a GPU only for the values of an argument that the host
    does not have. Clearing the allocator empties the tree. Slots are valid, and reused, in the order of the
    current stream.

    Args:
        allocator: The allocator of the slots, with `page_size` 1. With `None`, slots are plain ints of the
            caller, and evicted ones are only listed; then only `verify` checks that slots differ, not each
            insertion.
        page_size: Tokens that are found together.
        name: The owner of cached slots in reports. Defaults to the class name and a number.

    Raises:
        ConfigError: If `page_size` is 0, or the allocator has pages of more than one slot.
    """

    def __new__(
        cls,
        allocator: TokenToKVPoolAllocator | None = None,
        *,
        page_size: SupportsIndex = 1,
        name: str | None = None,
    ) -> SlotTree: ...
    def match(self, tokens: IndicesLike, *, namespace: Namespace = None) -> SlotTreeMatch:
        """Finds the longest cached prefix, in whole pages, and refreshes it. Splits a node if none ends there.

        Args:
            tokens: Token ids of the prompt.
            namespace: A str, bytes or an int; `None` is a namespace of its own.

        Raises:
            ArgumentError: If a token is outside of [0, 2**31).
            TypeError: If `tokens` are not ints, or `namespace` is of another type.
        """
    def insert(
        self, tokens: IndicesLike, slots: IndicesLike, *, namespace: Namespace = None
    ) -> SlotTreeInsertion:
        """Adds tokens with their slots, up to the first slot that is 0 or not allocated.

        Args:
            tokens: Token ids, from the first on.
            slots: Their slots, ints of the same length. The caller's ownership of those that were not cached
                before passes to the tree. The values are copied.
            namespace: As in `match`.

        Raises:
            ArgumentError: If a token or slot is outside of [0, 2**31), or `tokens` and `slots` differ in length.
            IndexOwnershipError: If a slot is listed twice, or cached with other tokens. Nothing is changed.
            StaleError: If another thread clears the allocator meanwhile. Nothing is changed.
            TypeError: As in `match`.
        """
    def lock(self, node: SupportsIndex) -> None:
        """Keeps a node and its ancestors from being evicted. Locks of a node are counted.

        Raises:
            StaleError: If the node was evicted.
        """
    def unlock(self, node: SupportsIndex) -> None:
        """Undoes one `lock` of a node.

        Raises:
            StaleError: If the node was evicted.
            IndexOwnershipError: If the node has no lock. Nothing is changed.
        """
    def evict(self, tokens: SupportsIndex) -> SlotTreeEviction:
        """Evicts whole nodes, ends of prefixes first, until at least `tokens` slots became free or nothing is
        evictable. The tokens of insertions after their last whole page go first, then the least recently used nodes.

        Raises:
            ArgumentError: If `tokens` is negative.
        """
    def clear(self) -> SlotTreeEviction:
        """Gives up every node, locked or not, and frees the slots."""
    def slots(self, node: SupportsIndex) -> torch.Tensor:
        """Returns the slots of a prefix: 1-D in the allocator's `index_dtype`, on its device, or in host memory
        without one. A copy.

        Args:
            node: The node at the end of the prefix.

        Raises:
            StaleError: If the node was evicted.
        """
    def node(self, node: SupportsIndex) -> SlotTreeNode:
        """Describes a node as it is now. This is a call for debugging, because it looks at every node.

        Raises:
            StaleError: If the node was evicted.
        """
    @property
    def root(self) -> int:
        """The root node, which is the end of the empty prefix. It changes when the tree is cleared."""
    def cached_size(self) -> int:
        """Returns the number of cached tokens."""
    def evictable_size(self) -> int:
        """Returns the number of cached tokens that no lock keeps, those of inner nodes included."""
    def locked_size(self) -> int:
        """Returns the number of cached tokens that locks keep."""
    def stats(self) -> dict[str, int]:
        """Returns the statistics of the tree: `cached`, `evictable` and `locked` in tokens, `nodes`, and the
        `bytes` of the bookkeeping. Looks at every node.
        """
    def verify(self) -> None:
        """Checks every invariant of the tree.

        Raises:
            IndexOwnershipError: If a check fails, with a description.
        """

@final
class SlotTreeMatch:
    """A prefix that `SlotTree.match` found."""

    @property
    def node(self) -> int:
        """The node that ends where the prefix ends; the root if nothing was found."""
    @property
    def length(self) -> int:
        """Tokens of the prefix, in whole pages."""

@final
class SlotTreeInsertion:
    """The result of `SlotTree.insert`."""

    @property
    def node(self) -> int:
        """The node that ends where the inserted tokens end."""
    @property
    def cached(self) -> int:
        """Tokens that were cached before, in whole pages. Slots that the caller owned for them are the caller's
        still.
        """
    @property
    def length(self) -> int:
        """Tokens inserted: those before the first slot that is 0 or not allocated."""
    @property
    def removed_nodes(self) -> list[int]:
        """Nodes that no longer exist: tails that became part of another node."""

@final
class SlotTreeEviction:
    """The result of `SlotTree.evict` and `SlotTree.clear`."""

    @property
    def tokens(self) -> int:
        """Slots that became free."""
    @property
    def removed_nodes(self) -> list[int]:
        """Nodes that no longer exist, in the order of their removal, with those that a `clear` of the allocator
        removed before.
        """
    @property
    def slots(self) -> torch.Tensor:
        """The slots evicted: 1-D int32 in host memory, a new tensor each time."""

@final
class SlotTreeNode:
    """A node of a `SlotTree` at the time of `SlotTree.node`."""

    @property
    def parent(self) -> int | None:
        """The parent node; `None` for the root."""
    @property
    def children(self) -> list[int]:
        """The child nodes."""
    @property
    def tokens(self) -> list[int]:
        """The node's own tokens, without those of its ancestors."""
    @property
    def slots(self) -> list[int]:
        """The slots of its own tokens."""
    @property
    def locks(self) -> int:
        """Locks of the node and of all its descendants."""

@final
class PrefixCache(Pool):
    """Keeps the K and V of prompts and answers by their tokens, so that a request that begins like an earlier one
    does not compute them again.

    The cache owns whole pages of an allocator, from their publication to their eviction; requests hold
    leases. A call of the allocator, or of a planner on it, that is short of slots evicts pages without a
    lease. If all evictable pages would not suffice, it evicts none and fails. At any time `cached_size() ==
    evictable_size() + locked_size()`. Freeing a cached slot through the allocator is an invalid free.

    Token ids are ints in `[0, 2**31)`: a 1-D int32 or int64 tensor or array in host memory, or a list, is read
    in place; other sequences of ints and tensors on a GPU are copied first. Prefixes are compared token by
    token, never by a hash. A namespace (a str, bytes or an int, such as an adapter or a tenant) keeps prefixes
    apart: two namespaces share nothing.

    All calls are atomic and thread-safe. They wait for a GPU only for the values of an argument that the host
    does not have (see `TokenToKVPoolAllocator`). Clearing the allocator empties the cache.

    On a GPU, publish when the work that writes the K and V is enqueued on the current stream: prefixes are valid
    in the order of that stream. Pages that are evicted, and duplicates, are reused in its order, too.

    Args:
        allocator: The allocator of the slots. The cache keeps whole pages of its page size.
        states: A `GDNPool` with track slots, on the same device, for models with linear-attention states. A
            prefix is then found only up to a snapshot of the state at its end.
        policy: The order of eviction: "adaptive", "lru", "fifo", "lfu", "slru" or "priority". Only the ends of
            prefixes are evicted, never pages that other cached prefixes continue.
        cost: The seconds that a prefill takes: the adaptive policy then keeps what saves most seconds, else what
            saves most tokens. It does not count with a tier below: what is loaded takes as long at any position.
            Other policies do not use it.
        tiers: The tiers below the device: nothing, a `HostTier` for this cache alone, or that and a store: a `FileStore`
            or another `Store`. `Lease.load` loads evicted pages from the first, `fetch` copies pages from the
            second to the first.
        model: The name, in a store, of everything that K and V depend on besides the tokens, the namespace and the
            shape of the pools: the model with its revision, and the rank if the model is divided among ranks.
            Caches with the same name share pages. Required with a store, and only then.
        max_pinned: The share of the allocator's capacity that `pin` may retain.
        events: Whether to record changes for `events`.
        name: The owner of cached slots in reports and `leaks`, and the name of this pool. Defaults to the class
            name and a number, such as "PrefixCache-0".

    Raises:
        ConfigError: If `policy` is unknown, `max_pinned` is outside of [0, 1], the pools are on different devices,
            the tier is for other pools or belongs to another cache, or only one of a store and `model` is given.
        StateError: If the store is closed.
        TypeError: If `tiers` has something else.
    """

    def __new__(
        cls,
        allocator: TokenToKVPoolAllocator,
        *,
        states: GDNPool | None = None,
        policy: Policy = "adaptive",
        cost: PrefillCost | None = None,
        tiers: Sequence[HostTier | FileStore | Store] = (),
        model: str | None = None,
        max_pinned: float = 0.5,
        events: bool = False,
        name: str | None = None,
    ) -> PrefixCache: ...
    @property
    def allocator(self) -> TokenToKVPoolAllocator:
        """The allocator of the slots."""
    @property
    def states(self) -> GDNPool | None:
        """The pool of states, if there is one."""
    @property
    def tiers(self) -> tuple[()] | tuple[HostTier] | tuple[HostTier, FileStore | Store]:
        """The tiers below the device: a tuple."""
    @property
    def model(self) -> str | None:
        """The name of the model in the store, as passed to the constructor; `None` without a store."""
    @property
    def policy(self) -> Policy:
        """The name of the policy."""
    def match(
        self,
        tokens: IndicesLike,
        *,
        namespace: Namespace = None,
        limit: SupportsIndex | None = None,
        session: Session | None = None,
        agree: Callable[[int], int] | None = None,
    ) -> Lease:
        """Leases the longest cached prefix, in whole pages. The pages found count as used. A miss is a lease of
        length 0, through which the request publishes what it computes.

        Args:
            tokens: Token ids of the prompt.
            namespace: A str, bytes or an int; `None` is a namespace of its own.
            limit: Maximum length in tokens. Engines pass `len(tokens) - 1`: the last token must be computed.
            session: The session whose next turn this is. The turn ends with the lease.
            agree: For ranks that run one model together, with a store below: a function that gets the tokens which
                this rank has, on the device and in host memory, and returns the smallest number of all ranks, as an
                all-reduce does. `loadable` is then what all ranks can load, and host memory keeps it until the lease
                loads, publishes or ends. Called once or, with states, until all agree, equally often on all ranks.
                Without a store, ranks that make the same calls agree anyway.

        Raises:
            ArgumentError: If a token is outside of [0, 2**31), `limit` is negative, the session is of another cache,
                or `agree` returns less than the device has or more than this rank has. What `agree` raises.
            TypeError: If `tokens` are not ints, or `namespace` is of another type.
        """
    def fetch(
        self,
        tokens: IndicesLike,
        *,
        namespace: Namespace = None,
        limit: SupportsIndex | None = None,
    ) -> Fetch:
        """Starts to fetch the pages of a prompt from the store to the host tier. Returns at once; a thread
        fetches the pages, one prompt after another. Call it when a request arrives, and call `match` when the
        request is about to run: `match` finds the pages that have arrived.

        Args:
            tokens: As in `match`.
            namespace: As in `match`.
            limit: Maximum length of the prefix in tokens.

        Returns:
            A `Fetch`; without a store it is over at once.

        Raises:
            ArgumentError: As in `match`.
            OutOfMemoryError: If no thread can be started.
            TypeError: As in `match`.
        """
    def insert(
        self,
        tokens: IndicesLike,
        slots: IndicesLike,
        *,
        namespace: Namespace = None,
        session: Session | None = None,
    ) -> Published:
        """Adds a prompt: matches it, publishes the rest, and releases the lease. The caller's slots of tokens
        that are cached already are freed.

        Args:
            tokens: Token ids, from the first on.
            slots: Their slots, which fill pages in order. Those of a partial page at the end stay the caller's.
            namespace: As in `match`.
            session: As in `match`.

        Raises:
            ArgumentError: As in `match` and `Lease.publish`.
            IndexOwnershipError: As in `Lease.publish`.
        """
    def session(self, name: Namespace = None) -> Session:
        """Returns the session with a name, for the turns of one conversation or agent: see `Session`. Sessions with
        equal names are one.

        Args:
            name: A str, bytes or an int; `None` makes a session like no other.

        Raises:
            TypeError: If `name` is of another type.
        """
    def add_waiting(
        self,
        tokens: IndicesLike,
        *,
        namespace: Namespace = None,
        limit: SupportsIndex | None = None,
        rank: int = 0,
    ) -> WaitingRequest:
        """Adds a request to the engine's waiting queue: what it would find now is evicted after everything that is not retained,
        until it is removed or dropped. Call it when a request arrives or is preempted, `WaitingRequest.update` now and then
        while it waits, and `WaitingRequest.remove` once `match` has leased its prefix.

        Args:
            tokens: As in `match`. They are not kept.
            namespace: As in `match`.
            limit: As in `match`. Pass the same: of states, the snapshot counts at which `match` will end.
            rank: Requests of a lower rank are served first; those of one rank in the order in which they were added.

        Raises:
            ArgumentError: As in `match`.
            OverflowError: If `rank` does not fit 64 bits.
            TypeError: As in `match`.
        """
    def evict(self, tokens: SupportsIndex) -> int:
        """Evicts at least `tokens` tokens, or all that are evictable, and returns how many slots became free.

        Raises:
            ArgumentError: If `tokens` is negative.
        """
    def wait_written(self, timeout: float | None = None) -> bool:
        """Waits, without the GIL, until all copies of pages to host memory, and from there to a store, are
        complete. Without tiers it returns at once.

        Args:
            timeout: Seconds; `None` for any time.

        Returns:
            Whether all copies completed within the time.

        Raises:
            ArgumentError: If `timeout` is negative.
            DriverError: If the device has failed.
        """
    def clear(self, namespace: Namespace = None) -> None:
        """Gives up all prefixes, or those of a namespace, pinned or not. Prefixes with a lease are no longer
        found, and are given up when their last lease ends.
        """
    def pin(self, lease: Lease, *, seconds: float | None = None, priority: SupportsIndex = 0) -> None:
        """Retains the prefix of a lease, also after the lease ends: its pages are evicted after all pages that
        are not retained, the lowest priority first.

        Args:
            lease: A lease of this cache.
            seconds: If given, the pages are locked for that time, and `priority` has no effect.
            priority: 0 to 254.

        Raises:
            ArgumentError: If an argument is negative, or the lease is of another cache.
            StaleError: If the lease was released, or the prefix was cleared.
            StateError: If more than the share `max_pinned` of the capacity would be retained.
        """
    def cached_len(self, tokens: IndicesLike, *, namespace: Namespace = None) -> int:
        """Returns the tokens of the longest cached prefix, in whole pages, without a lease and without refreshing
        it: for schedulers that choose among waiting requests.

        Raises:
            TypeError: As in `match`.
        """
    def explain(self, tokens: IndicesLike, namespace: Namespace = None) -> list[Segment]:
        """Returns where each part of a prompt is cached, or why it is not. Refreshes nothing.

        Evictions are remembered for a while: the last 32,768 places, one for each 64 tokens of a prefix and
        one where an eviction ended, so fewer tokens if pages are evicted one by one. This is a call for
        debugging, because it looks at every namespace. Waits for the store, if there is one.

        Args:
            tokens: As in `match`.
            namespace: As in `match`.

        Returns:
            A list of `Segment`, which together cover the prompt, in order.

        Raises:
            ArgumentError: As in `match`.
            TypeError: As in `match`.
        """
    def events(self) -> list[Stored | Removed | Cleared]:
        """Returns the changes since the last call, in order: objects of `Stored`, `Removed` and `Cleared`,
        from which a router learns what is cached here. 65,536 events are kept; a reader that falls further behind
        gets `Cleared` and must start over.

        Raises:
            StateError: If the cache was made without `events=True`.
        """
    def cached_size(self) -> int:
        """Returns the number of cached tokens."""
    def evictable_size(self) -> int:
        """Returns the number of cached tokens that no lease holds."""
    def locked_size(self) -> int:
        """Returns the number of cached tokens that leases hold."""
    def obtainable_size(self) -> int:
        """Returns the number of slots that an allocation can get: those that are free, and those that are
        evictable.
        """
    def eviction_ages(self) -> list[int]:
        """Returns how many evicted tokens had an age below 1, 2, 4, ... when they were evicted: the number of
        tokens that were looked up after their last use.
        """
    def verify(self) -> None:
        """Checks every invariant of the cache.

        Raises:
            IndexOwnershipError: If a check fails, with a description.
        """
    def stats(self) -> PrefixStats:
        """Returns the statistics of this pool, at the cost of a lock and a few loads. The keys are those of
        `kvpool.typing.PoolStats`, and of the subclass for this pool: `UnitStats` and `CountedStats` if it hands
        out units, `SlotStats`, `ArenaStats`, `TrackStats`, `ChunkStats`, `BufferStats`, `KVStats`, `PrefixStats`,
        `ArenaPrefixStats`, `TierStats` or `ArenaTierStats`.
        """

@final
class Lease:
    """A request's hold on a cached prefix, whose pages are not evicted. As a context manager it is released at
    the end of the block; a lease that is dropped is released, too.
    """

    @property
    def length(self) -> int:
        """Tokens of the prefix, in whole pages.

        Raises:
            StaleError: If the lease was released, or the allocator was cleared.
        """
    @property
    def kv_length(self) -> int:
        """Tokens whose K and V were cached at the match, in whole pages. This is more than `length` only if the
        cache has states, and no snapshot of the state at the end of these tokens. Other prompts diverge from
        this one there: end a chunk of the prefill there, and publish it with its state.

        Raises:
            StaleError: If the lease was released, or the allocator was cleared.
        """
    def __len__(self) -> int:
        """Return len(self)."""
    @property
    def loadable(self) -> int:
        """Tokens after the prefix that the tiers below the device had at the match, and that `load` can load. 0
        after a load or a publication.

        Raises:
            StaleError: If the lease was released, or the allocator was cleared.
        """
    @property
    def slots(self) -> torch.Tensor:
        """The slots of the prefix: 1-D `[length]` in the allocator's `index_dtype`, on its device, made by each access.

        Raises:
            StaleError: If the lease was released, or the allocator was cleared.
        """
    @property
    def state_slot(self) -> int | None:
        """The track slot with the state at the end of the prefix; `None` for a prefix without tokens and a cache
        without states. The cache owns it: `GDNPool` does not free it, and does not write it.

        Raises:
            StaleError: If the lease was released, or the allocator was cleared.
        """
    @property
    def namespace(self) -> Namespace:
        """The namespace of the prefix."""
    @property
    def closed(self) -> bool:
        """Whether the lease was released, or the allocator was cleared."""
    @property
    def released(self) -> bool:
        """Another name of `closed`."""
    def publish(
        self,
        tokens: IndicesLike,
        slots: IndicesLike | None = None,
        *,
        state: SupportsIndex | None = None,
        row: SupportsIndex | None = None,
    ) -> Published:
        """Publishes what the request has computed since: whole pages become the cache's, and the lease grows over
        them. The cost is proportional to the number of new tokens. The partial page at the end stays the caller's.

        Pages that another request has published in between are not kept twice: the caller's slots of these
        pages are freed, and the request continues with those of the cache (`Published.slots`).

        Args:
            tokens: Token ids of positions `length` and up, only the new ones.
            slots: Their slots, ints of the same length, which fill pages in order. The caller's ownership of
                whole pages passes to the cache. Not needed for a lease that a planner has, which has the slots
                of its requests.
            row: The request row of a lease that a planner has; only checked. The planner's next call with the
                row writes the cache's slots to the request table, in place of those of duplicates. Without a
                planner the cache has no table: write `Published.slots` to yours.
            state: A working slot of the cache's states, whose state is that after the last whole page. A
                snapshot of it is kept if a track slot is free or can be given up: superseded ones first, which are
                earlier ones of the same lease behind the tokens that it was matched with, then the one that is worth
                least, unless the new one is worth less. The state is copied before anything is published, on the
                current stream.

        Nothing is changed if the call raises, except that another snapshot may have been given up for the state.

        Raises:
            ArgumentError: If a token is outside of [0, 2**31), or `tokens` and `slots` differ in length.
            DriverError: If the state cannot be copied.
            IndexError: If `state` is no working slot.
            IndexOwnershipError: If a slot is not in use, listed twice, cached already, or not at its place in a
                page.
            StaleError: If the lease was released, or the allocator was cleared.
            StateError: If a load of the lease is not over, or a state is given and the cache was made without states.
        """
    def finish(
        self,
        tokens: IndicesLike,
        slots: IndicesLike | None = None,
        *,
        row: SupportsIndex | None = None,
    ) -> None:
        """Publishes, frees the partial page at the end, and releases the lease: the end of a request. Nothing is
        changed if the publication raises.

        Args:
            tokens: As in `publish`.
            slots: As in `publish`.
            row: The request row of a lease that a planner has. The planner then finishes the request, as
                `BatchPlanner.finish` does: it frees the other slots and the row.

        Raises:
            ArgumentError: As in `publish`; also if a planner has the lease and `row` is not given.
            IndexOwnershipError: As in `publish`, and with `row` as in `BatchPlanner.finish`.
            StaleError: As in `publish`.
            StateError: As in `publish`.
        """
    def load(self, *, limit: SupportsIndex | None = None) -> Load | None:
        """Loads the pages that the tiers below the device have after the prefix. The lease has their slots from
        now on; call `Load.wait_layer` before the work that uses a layer. Pages that another request is
        loading are not loaded twice.

        Load before you pass the lease to a planner, and publish after `wait_layer` of the last layer: a
        publication raises while tokens are being loaded. On a GPU the copies run on a separate stream, after
        the work enqueued on the current stream.

        Pages and snapshots whose fingerprint is not that of what came to the tier are not loaded: they are given up,
        logged and counted as `damaged` in `HostTier.stats`, and the load ends before them.

        Args:
            limit: Maximum number of tokens to load.

        Returns:
            A `Load`, or `None` if there are not enough slots, or no track slot for the state.

        Raises:
            ArgumentError: If `limit` is negative.
            DriverError: If a copy cannot be enqueued, as while the current stream is being captured.
            StaleError: If the lease was released, or the allocator was cleared.
            StateError: If a planner has the lease, or it is loading already.
        """
    def restore(self, row: SupportsIndex) -> None:
        """Copies the state at the end of the prefix to a working slot of the cache's states, or resets that for a
        prefix without tokens. Enqueued on the current stream.

        Raises:
            StateError: If the cache was made without states, or the prefix has tokens and no snapshot.
            IndexError: If `row` is no working slot.
            StaleError: If the lease was released, or the allocator was cleared.
        """
    def release(self) -> None:
        """Ends the lease. Does nothing if it has ended. A planner that has the lease keeps the prefix until the
        request is finished.
        """
    def __enter__(self) -> Self: ...
    def __exit__(self, *_exception: object) -> None: ...

@final
class Session:
    """The turns of one conversation or agent, which tell a prefix cache what comes back: the newest turn, after a
    pause, or nothing. Made by `PrefixCache.session` or
    `ArenaPrefixCache.session`; pass it to `match`, and to `PrefixCache.insert`.

    Nothing is locked or kept for a session: one that is abandoned costs nothing. What other requests use as well,
    such as a system prompt, is theirs, too, and no call of a session changes when it is evicted. Contexts that go
    on side by side, such as those of an agent and its sub-agents, are sessions of their own.

    A turn ends with its lease. If it continues the one before, that stays cached below it. If it does not, because
    the context was compacted or edited, it supersedes what only this session has used of the turn before behind
    the tokens that they have in common: that is evicted before anything else. A snapshot of the state at the end of
    a turn is superseded by the next turn, unless others have used that prefix, too.

    Calls may be made in any order, also while a lease of the session is open. The next `match` of a session takes
    back `pause` and `end`.
    """

    @property
    def name(self) -> Namespace:
        """The name, as it was passed to `session`."""
    def pause(self, kind: str) -> None:
        """Says that the turn is over, and what the session waits for. The policy "adaptive" learns how long pauses
        of each kind are, in tokens that are looked up meanwhile, and evicts accordingly.

        Args:
            kind: A class of tool calls, such as "bash", or "user". 256 kinds are told apart: use no names of
                single calls.
        """
    def end(self) -> None:
        """Says that the session has ended: what only it has used is evicted first."""

@final
class WaitingRequest:
    """A request in the engine's waiting queue: what it would find is evicted after everything that is not retained. Made by
    `PrefixCache.add_waiting` or `ArenaPrefixCache.add_waiting`.

    Nothing is locked: memory that is short still evicts it, the prefix of the last request in the queue first, and a request
    that runs always finds room. What several requests need counts as of the first of them. The snapshot from which a request
    would resume, and the windows that it would read, are kept likewise. Tiers are not told.

    Dropping it removes it from the queue. Clearing the allocator or the arena does not: the request needs nothing then until
    it is updated.
    """

    @property
    def length(self) -> int:
        """Tokens that the request would have found when it was looked up last, in whole pages."""
    @property
    def rank(self) -> int:
        """Its place in the queue: see `PrefixCache.add_waiting`."""
    def update(self, tokens: IndicesLike, *, limit: SupportsIndex | None = None) -> int:
        """Looks the prompt up again, as others may have published more of it since. The request needs what it would find now.
        It does not count as a use.

        Args:
            tokens: Token ids of the prompt, as in `PrefixCache.match`. Those behind what is found are not checked.
            limit: As in `PrefixCache.add_waiting`.

        Returns:
            Tokens that it would find, in whole pages.

        Raises:
            ArgumentError: If a token that is looked up is outside of [0, 2**31), or `limit` is negative.
            StateError: If it was removed.
            TypeError: If `tokens` are not ints.
        """
    def remove(self) -> None:
        """Removes the request from the queue, because it runs now or does not go on. A second call does nothing."""

@final
class Published:
    """The result of a publication. It keeps no lease."""

    @property
    def length(self) -> int:
        """Tokens of the lease now."""
    @property
    def duplicates(self) -> int:
        """Tokens that another request had published in between. The caller's slots of them were freed."""
    @property
    def slots(self) -> torch.Tensor:
        """The cache's slots of the tokens published, from the former length of the lease to `length`: 1-D tensor
        on the allocator's device. Without duplicates they are the caller's.
        """

@final
class Segment:
    """A part of a prompt: where it is cached, or why it is not."""

    @property
    def begin(self) -> int:
        """The first position."""
    @property
    def end(self) -> int:
        """One past the last position."""
    @property
    def state(
        self,
    ) -> Literal[
        "device",
        "host",
        "store",
        "no snapshot",
        "evicted",
        "other namespace",
        "never published",
        "page not full",
    ]:
        """The place where it is cached, "device", "host" or "store", or the reason why it is not found: "no snapshot"
        (cached, but without a snapshot of the state at its end), "evicted", "other namespace", "never published", or
        "page not full".
        """
    @property
    def pressure(self) -> Pressure | None:
        """The cause of the eviction, if the segment was evicted: "alloc" for an allocation that was short,
        "evict" and "clear" for these calls.
        """
    @property
    def evicted_s(self) -> float | None:
        """Seconds since the eviction, if the segment was evicted."""
    @property
    def idle_tokens(self) -> int | None:
        """The age of evicted pages: the tokens looked up between their last use and their eviction. `None` for others."""
    @property
    def worth(self) -> float | None:
        """What the adaptive policy expected of the evicted pages: the uses of a token while as many tokens are
        looked up as the cache has; with a `cost`, times the seconds that a use saves. `None` if it evicted the
        least recently used pages, and for other policies and segments.
        """
    @property
    def least_kept_worth(self) -> float | None:
        """The least `worth` of pages of another class, position or age that the cache kept; infinite if there were none."""
    @property
    def namespace(self) -> Namespace:
        """The other namespace that has the segment."""

@final
class Stored:
    """Consecutive pages were stored, or consecutive units of a group of an `ArenaPrefixCache`."""

    @property
    def pages(self) -> list[bytes]:
        """The keys of the pages, each of 32 bytes; of units, the keys of the pages that they end with. A key is BLAKE3 of the key before and the tokens of the page, as int32 in little
        endian. Before the first page, it is that of the page size, as uint64, a byte for the kind of the namespace (0:
        None, 1: an int, 2: a str, 3: bytes) and the namespace, an int in decimal.
        """
    @property
    def parent(self) -> bytes | None:
        """The key of the page before `tokens`; `None` at the beginning of a prompt."""
    @property
    def tokens(self) -> list[int]:
        """The token ids of the pages or units, the same number for each: for a unit of several pages those of all, for a
        snapshot of a state those of the page at whose end it is.
        """
    @property
    def namespace(self) -> Namespace:
        """The namespace of the pages."""
    @property
    def tier(self) -> TierName:
        """The tier of the pages: "device" or "host"."""
    @property
    def group(self) -> str | None:
        """The name of the group whose units were stored; `None` for pages, which are those of a `PrefixCache`, and those of an
        `ArenaPrefixCache` that has no full group with a unit for every page.
        """
    @property
    def kind(self) -> GroupKind | None:
        """The kind of the group: "full", "window", "chunk" or "state"; `None` for pages."""
    @property
    def window(self) -> int | None:
        """The tokens of the window or chunk of the group; `None` for others. `Group.tokens` of the layout is the same."""

@final
class Removed:
    """Pages were removed, or units of a group of an `ArenaPrefixCache`."""

    @property
    def pages(self) -> list[bytes]:
        """The keys of the pages; of units, the keys of the pages that they ended with."""
    @property
    def tier(self) -> TierName:
        """The tier of the pages: "device" or "host"."""
    @property
    def group(self) -> str | None:
        """The name of the group whose units were removed; `None` for pages, which are those of a `PrefixCache`, and those of an
        `ArenaPrefixCache` that has no full group with a unit for every page.
        """
    @property
    def kind(self) -> GroupKind | None:
        """The kind of the group: "full", "window", "chunk" or "state"; `None` for pages."""

@final
class Cleared:
    """The cache is empty now, or a reader fell so far behind that events were lost: it starts over with an empty index."""

@final
class Plane:
    """One array of a layer.

    Args:
        name: A name of letters, digits and `_`: "k", "v", "latent", "k_scale", "index_k", "recurrent", "conv".
        dtype: Storage dtype of the elements. Elements below a byte are declared by the bytes they are packed in.
        shape: Shape of one entry.

    Raises:
        ConfigError: If the name is invalid, or an entry has no bytes.
        TypeError: If `dtype` is not a storage dtype.
    """

    def __new__(cls, name: str, dtype: DTypeLike, shape: Sequence[int]) -> Self: ...
    @property
    def name(self) -> str:
        """The name."""
    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the elements: a `torch.dtype`, or its name if PyTorch is not installed."""
    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one entry."""
    @property
    def entry_bytes(self) -> int:
        """Bytes of one entry."""
    def __getnewargs__(self) -> tuple[str, str, list[int]]: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@final
class Group:
    """Layers whose entries live and die together, with one index space.

    Args:
        name: A name of letters, digits and `_`.
        kind: "full": an entry for each token, as long as the request lives. "window": the last `tokens` tokens, the
            query's own included. "chunk": the tokens since the last multiple of `tokens`. "state": one entry for each
            request.
        layers: Layers that have entries, ascending.
        planes: The arrays of each layer, of different names.
        tokens: Tokens of a window or chunk.
        sinks: Tokens at the beginning that stay, whatever the window or chunk.
        stride: Tokens that an entry stands for: 4 or 128 in compressed chains.
        aliases: Layers that read the entries of another: {reader: layer}.
        share: `(part, parts)`: the part of the bytes that this rank has. Ranks with the same part have the same bytes;
            `(0, 1)` if all have all of it. Shapes of planes are those of the part.

    Raises:
        ConfigError: If an argument is invalid; the message has the numbers.
    """

    def __new__(
        cls,
        name: str,
        kind: GroupKind,
        layers: Iterable[int],
        planes: Sequence[Plane],
        *,
        tokens: SupportsIndex | None = None,
        sinks: SupportsIndex = 0,
        stride: SupportsIndex = 1,
        aliases: dict[int, int] | None = None,
        share: tuple[SupportsIndex, SupportsIndex] = (0, 1),
    ) -> Self: ...
    @property
    def name(self) -> str:
        """The name."""
    @property
    def kind(self) -> GroupKind:
        """How long entries are needed: "full", "window", "chunk" or "state"."""
    @property
    def tokens(self) -> int | None:
        """Tokens of a window or chunk; None for other kinds."""
    @property
    def sinks(self) -> int:
        """Tokens at the beginning that stay."""
    @property
    def layers(self) -> tuple[int, ...]:
        """Layers that have entries, ascending."""
    @property
    def planes(self) -> tuple[Plane, ...]:
        """The arrays of each layer."""
    @property
    def stride(self) -> int:
        """Tokens that an entry stands for."""
    @property
    def aliases(self) -> dict[int, int]:
        """Layers that read the entries of another: {reader: layer}."""
    @property
    def share(self) -> tuple[int, int]:
        """`(part, parts)`: the part of the bytes that this rank has."""
    @property
    def entry_bytes(self) -> int:
        """Bytes of an entry in one layer."""
    def __getnewargs_ex__(self) -> tuple[tuple[Any, ...], dict[str, Any]]: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@final
class CacheLayout:
    """What a model keeps for its requests. It has no memory and no device.

    `str` gives a table. Layouts can be compared, hashed and pickled.

    Args:
        groups: The groups, of different names.
        page_size: Tokens of a page. A group's stride is a divisor or a multiple of it.
        model: Name of the model, which the bytes depend on.

    Raises:
        ConfigError: If an argument is invalid, or a page has more bytes than an address can name.
    """

    def __new__(cls, groups: Sequence[Group], *, page_size: SupportsIndex = 16, model: str = "") -> Self: ...
    @property
    def model(self) -> str:
        """Name of the model."""
    @property
    def page_size(self) -> int:
        """Tokens of a page."""
    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups."""
    @property
    def fingerprint(self) -> str:
        """Digest of all of the layout, as 64 hexadecimal digits: BLAKE3. Pools, tiers and peers with the same can exchange
        bytes, if `model` tells the model from others of its shape.
        """
    def difference(self, other: CacheLayout) -> str | None:
        """Returns the first difference to another layout, in words, or None if the fingerprints are equal."""
    def request_bytes(self, tokens: SupportsIndex) -> int:
        """Returns the bytes that a request of `tokens` tokens needs between two steps, in whole units of each group.

        A window or chunk needs the pages that the next query sees, and those of its sinks.
        """
    def request_units(self, tokens: SupportsIndex) -> dict[str, int]:
        """Returns the units of each group, by name, that a request of `tokens` tokens needs between two steps."""
    def slabs(self, arena_bytes: SupportsIndex, *, granularity: SupportsIndex = 1) -> SlabLayout:
        """Returns how the groups lie in the slabs of an arena.

        Args:
            arena_bytes: Bytes of the arena.
            granularity: What the bytes of a slab are a multiple of.

        Raises:
            ConfigError: If the arena has no room for a unit of every group at once, and a slab of padding.
        """
    def __getnewargs_ex__(self) -> tuple[tuple[Any, ...], dict[str, Any]]: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@final
class SlabLayout:
    """How the groups of a layout lie in the slabs of an arena: of `CacheLayout.slabs` and `CacheArena.slabs`."""

    @property
    def slab_bytes(self) -> int:
        """Bytes of a slab."""
    @property
    def num_slabs(self) -> int:
        """Number of slabs, the padding slab included."""
    @property
    def mem_bytes(self) -> int:
        """Bytes of all slabs."""
    @property
    def lost(self) -> float:
        """The share of the arena that the group worst off loses to packing, were all of it its own: the ends of slabs,
        padding of units, and the end of the arena. The padding slab is not counted.
        """
    def units(self, group: str) -> int:
        """Returns the units of a slab of a group; of single layers, if it is placed layer by layer.

        Raises:
            ArgumentError: If there is no such group.
        """
    def unit_step(self, group: str) -> int:
        """Returns the bytes from one unit of a group to the next, in a plane of a layer.

        Raises:
            ArgumentError: If there is no such group.
        """
    def by_layer(self, group: str) -> bool:
        """Returns whether each layer of a state has a unit of its own.

        Raises:
            ArgumentError: If there is no such group.
        """
    def held_bytes(self, group: str) -> float:
        """Returns the bytes of the arena that a unit of a group takes in all layers, its share of what a slab loses
        included.

        Raises:
            ArgumentError: If there is no such group.
        """

@final
class CacheArena(Pool):
    """Pages and states of all groups of a layout, in one region that is not split between them.

    The region is cut into slabs of equal size. A slab belongs to one group while a unit in it is in use, then to whoever
    needs it. Units never move. Every plane of every layer is one tensor over the whole region, in which a unit has the
    same number in all layers, unless it is a state that is placed layer by layer (`slabs.by_layer`), which has a number
    for each: kernels see a large page table with gaps in its numbers. Tensors of different groups overlap as
    descriptions, never in units that are in use. The first slab is padding: unit 0 of every group is in it, and padded
    tokens may be written there.

    Units are numbers on the host, as those of `ReqToTokenPool` are. Calls are thread-safe and atomic, and make no CUDA
    call, but for `copy`. The memory is zeroed at construction, on the stream that is current then; units are not zeroed
    again.

    Args:
        layout: The groups that share the arena.
        arena_bytes: Bytes of the arena; what is behind the last whole slab is not allocated.
        device: Device of the memory.
        floors: Slabs that other groups leave to a group, by its name.
        granularity: What the bytes of a slab are a multiple of.
        strict: Whether an invalid free raises; otherwise it is dropped, counted and reported.

    Raises:
        ConfigError: If the arena is too small for the layout, or floors are more than there is.
        OutOfMemoryError: If there is not enough memory.
        BackendUnavailableError: If `device` is not available.
    """

    def __new__(
        cls,
        layout: CacheLayout,
        arena_bytes: SupportsIndex,
        device: DeviceLike = "cuda",
        *,
        floors: dict[str, int] | None = None,
        granularity: SupportsIndex = 1,
        strict: bool = False,
    ) -> CacheArena: ...
    @property
    def layout(self) -> CacheLayout:
        """The groups that share the arena."""
    @property
    def slabs(self) -> SlabLayout:
        """How the groups lie in slabs."""
    @property
    def arena_bytes(self) -> int:
        """Bytes that the arena was asked for; `mem_bytes()` is those of whole slabs."""
    @property
    def floors(self) -> dict[str, int]:
        """Slabs that other groups leave to a group, by its name."""
    @property
    def granularity(self) -> int:
        """What the bytes of a slab are a multiple of."""
    @property
    def clears(self) -> int:
        """How often the arena was cleared: units from before the last time are somebody else's."""
    @property
    def slabs_free(self) -> int:
        """Number of slabs that no group has."""
    def alloc(self, units: dict[str, int]) -> dict[str, list[Any]] | None:
        """Takes units of several groups, or none: those of the fullest slabs first. Where a prefix cache has to give units up
        that are being copied to its tier, the call waits for that copy.

        Args:
            units: Numbers of units by the name of the group.

        Returns:
            The numbers of the units, by the name of each group that `units` names, or None if one of them is short. A
            state that is placed layer by layer (`slabs.by_layer`) has a list of numbers, one a layer.

        Raises:
            ArgumentError: If there is no such group, or a number is negative.
        """
    def fits(self, units: dict[str, int]) -> bool:
        """Returns whether `alloc` of these units would succeed.

        Raises:
            ArgumentError: As `alloc`.
        """
    def free(self, group: str, units: IndicesLike) -> None:
        """Frees units of a group. A slab whose last unit is freed can be any group's.

        Args:
            group: Name of the group.
            units: Their numbers: ints, a tensor or array of them, of any shape, whose values are on the host, or what
                `alloc` gave for the group.

        Raises:
            ArgumentError: If there is no such group.
            IndexOwnershipError: If the arena is strict and a number is not in use, or named twice. Nothing is changed.
        """
    def copy(self, group: str, dst: IndicesLike, src: IndicesLike) -> None:
        """Copies whole units of a group, `src[i]` to `dst[i]`, as if all were read before any is written: the state of a
        request to a snapshot, say. On a GPU it is one launch on the current stream.

        Nothing is copied if the call raises.

        Args:
            group: Name of the group.
            dst: The units that are written, as `free` takes them.
            src: The units that are read, as many.

        Raises:
            ArgumentError: If there is no such group, the numbers of units differ, or there are more than 8192. A state
                that is placed layer by layer counts once for each layer.
            IndexError: If there is no such unit in `src`.
            IndexOwnershipError: If a unit of `dst` is not in use, or is a planner's or a prefix cache's.
            DriverError: If a driver call fails, or the stream is being captured.
        """
    def clear(self) -> None:
        """Frees all units of all groups, those of prefix caches and planners too: their leases end. Waits for loads from a tier
        that are copying to some of them.
        """
    def buffer(self, group: str, plane: str, layer: SupportsIndex) -> torch.Tensor:
        """Returns a plane of a layer as one tensor over the arena, without a copy.

        Args:
            group: Name of the group.
            plane: Name of the plane.
            layer: Layer of the model; an alias gives the entries that it reads.

        Returns:
            `[units, entries, *shape]`, or `[units, *shape]` for states; one tensor for all layers of a state that is placed
            layer by layer. Dimension 0 is indexed by the numbers of units; its stride is the bytes of a unit, larger where
            planes lie side by side. Units of other groups are in it too: do not write where this group has none.

        Raises:
            ArgumentError: If there is no such group or plane.
            IndexError: If the group has no such layer.
        """
    def group_stats(self, group: str) -> dict[str, int]:
        """Returns what a group has: `slabs`, `in_use`, `ready` (free units in its slabs), `available` (units that it could
        take now), `high_water` and `dropped_frees`, all but the first in units; in units of single layers, if the group
        is placed layer by layer.

        Raises:
            ArgumentError: If there is no such group.
        """
    def verify(self) -> None:
        """Checks the bookkeeping.

        Raises:
            StateError: If it is inconsistent.
        """
    def get_contiguous_buf_infos(self) -> tuple[list[int], list[int], list[int]]:
        """Returns the addresses, the bytes and the bytes of an item of the memory, for transfer engines: one buffer, whose
        items are slabs.
        """
    def mem_bytes(self) -> int:
        """Bytes of all slabs."""
    def stats(self) -> ArenaStats:
        """Returns the statistics of this pool, at the cost of a lock and a few loads. The keys are those of
        `kvpool.typing.PoolStats`, and of the subclass for this pool: `UnitStats` and `CountedStats` if it hands
        out units, `SlotStats`, `ArenaStats`, `TrackStats`, `ChunkStats`, `BufferStats`, `KVStats`, `PrefixStats`,
        `ArenaPrefixStats`, `TierStats` or `ArenaTierStats`.
        """

@final
class ArenaPrefixCache(Pool):
    """Keeps the units of prompts and answers by their tokens, so that a request that begins like an earlier one does not
    compute them again: the prefix cache of a `CacheArena`, for every group of its layout.

    A prefix is found up to the last page at which every group can go on: full groups have all units, windows those that
    the next token sees, chunks those of the current chunk, both their sinks, and states a snapshot exactly there.
    Entries of several tokens need not be whole at that page if the layout has a state, which knows the rest.

    The cache owns units of the arena, from their publication to their eviction; requests hold leases. A lease locks
    what a request needs to go on, and not what is behind a window. A call of the arena that is short of units evicts
    what is worth least: units of windows that nothing needs, then what is worth least for its memory, a snapshot or a
    window within a prefix or the end of one; of full groups alone, ends in the order of the policy. If all that would
    not suffice, it evicts nothing and fails. Freeing a cached unit through the arena is an invalid free.

    Token ids are ints in `[0, 2**31)`, as those of `PrefixCache`. Prefixes are compared token by token, never by a
    hash. A namespace (a str, bytes or an int, such as an adapter or a tenant) keeps prefixes apart: two namespaces
    share nothing.

    All calls are atomic and thread-safe, and make no CUDA call, but for copies to a tier and back. Clearing the arena
    empties the cache, not the tier. On a GPU, publish
    when the work that writes the units is enqueued on the current stream: prefixes are valid in the order of that
    stream.

    Args:
        arena: The arena of the units.
        policy: The order in which ends of prefixes are evicted: "adaptive", "lru", "fifo", "lfu", "slru" or "priority".
        cost: The seconds that a prefill takes: the adaptive policy then keeps what saves most seconds, else what
            saves most tokens. With tiers below it counts in the last one, above a store: what is loaded takes as
            long at any position. Other policies do not use it.
        tiers: The tiers below the device: nothing, an `ArenaHostTier` for this cache alone, or that and a store: a `FileStore`
            or another `Store`. What is published is copied to the first and from there to the second; `ArenaLease.load`
            loads what was evicted meanwhile from the first, `fetch` copies units from the second to the first.
        model: The name, in a store, of everything that the units depend on besides the tokens, the namespace and the layout:
            the model with its revision, and the rank if the model is divided among ranks. Caches with the same name
            share units. Required with a store, and only then.
        events: Whether to record changes for `events`.
        name: The name of this pool. Defaults to the class name and a number, such as "ArenaPrefixCache-0".

    Raises:
        ConfigError: If `policy` is unknown, the tier is for another arena or belongs to another cache, or only one of a store
            and `model` is given.
        StateError: If the store is closed.
        TypeError: If `tiers` has something else.
    """

    def __new__(
        cls,
        arena: CacheArena,
        *,
        policy: Policy = "adaptive",
        cost: PrefillCost | None = None,
        tiers: Sequence[ArenaHostTier | FileStore | Store] = (),
        model: str | None = None,
        events: bool = False,
        name: str | None = None,
    ) -> ArenaPrefixCache: ...
    @property
    def arena(self) -> CacheArena:
        """The arena of the units."""
    @property
    def tiers(self) -> tuple[()] | tuple[ArenaHostTier] | tuple[ArenaHostTier, FileStore | Store]:
        """The tiers below the device."""
    @property
    def model(self) -> str | None:
        """The name in a store of what the units depend on, as passed to the constructor."""
    @property
    def policy(self) -> Policy:
        """The name of the policy."""
    def fetch(
        self, token_ids: IndicesLike, *, max_tokens: SupportsIndex | None = None, namespace: Namespace = None
    ) -> Fetch:
        """Starts to fetch what the store has of a prompt to the host tier. Returns at once; a thread fetches, one prompt after
        another. Call it when a request arrives, and `match` and `ArenaLease.load` when the request is about to run.

        Args:
            token_ids: As in `match`.
            max_tokens: As in `match`.
            namespace: As in `match`.

        Returns:
            A `Fetch`; without a store it is over at once.

        Raises:
            ArgumentError: As in `match`.
            OutOfMemoryError: If no thread can be started.
            TypeError: As in `match`.
        """
    def wait_written(self, timeout: float | None = None) -> bool:
        """Waits, without the GIL, until all copies of units to host memory, and from there to a store, are complete. Without
        tiers it returns at once.

        Args:
            timeout: Seconds; `None` for any time.

        Returns:
            Whether all copies completed within the time.

        Raises:
            ArgumentError: If `timeout` is negative.
            DriverError: If the device has failed.
        """
    def match(
        self,
        token_ids: IndicesLike,
        *,
        max_tokens: SupportsIndex | None = None,
        namespace: Namespace = None,
        session: Session | None = None,
    ) -> ArenaLease:
        """Leases the longest cached prefix at which every group can go on. What was found counts as used. A miss is a
        lease of length 0, through which the request publishes what it computes.

        Args:
            token_ids: Token ids of the prompt.
            max_tokens: Maximum length in tokens. Engines pass `len(token_ids) - 1`: the last token must be computed.
            namespace: A str, bytes or an int; `None` is a namespace of its own.
            session: The session whose next turn this is. The turn ends with the lease.

        Raises:
            ArgumentError: If a token is outside of [0, 2**31), `max_tokens` is negative, or the session is of another
                cache.
            TypeError: If `token_ids` are not ints, or `namespace` is of another type.
        """
    def session(self, name: Namespace = None) -> Session:
        """Returns the session with a name, for the turns of one conversation or agent: see `Session`. Sessions with
        the same name are the same. Tiers are not told of sessions.

        Args:
            name: A str, bytes or an int; `None` makes a session like no other.

        Raises:
            TypeError: If `name` is of another type.
        """
    def add_waiting(
        self,
        token_ids: IndicesLike,
        *,
        namespace: Namespace = None,
        max_tokens: SupportsIndex | None = None,
        rank: int = 0,
    ) -> WaitingRequest:
        """Adds a request to the engine's waiting queue: see `PrefixCache.add_waiting`.

        Args:
            token_ids: As in `match`. They are not kept.
            namespace: As in `match`.
            max_tokens: As in `match`. Pass the same: of states, the snapshot counts at which `match` will end.
            rank: Requests of a lower rank are served first; those of one rank in the order in which they were added.

        Raises:
            ArgumentError: If a token is outside of [0, 2**31), or `max_tokens` is negative.
            OverflowError: If `rank` does not fit 64 bits.
            TypeError: As in `match`.
        """
    def cached_len(
        self,
        token_ids: IndicesLike,
        *,
        max_tokens: SupportsIndex | None = None,
        namespace: Namespace = None,
    ) -> int:
        """Returns the length that `match` would find, without a lease and without refreshing it.

        Raises:
            ArgumentError: If `max_tokens` is negative.
            TypeError: As in `match`.
        """
    def explain(self, token_ids: IndicesLike, *, namespace: Namespace = None) -> list[GroupReport]:
        """Returns how far each group could go on alone, and why not further. A match is at most as long as the shortest of
        them. Refreshes nothing; a call for debugging, because it looks at every namespace.

        Args:
            token_ids: As in `match`.
            namespace: As in `match`.

        Returns:
            A list of `GroupReport`, one a group, in their order.

        Raises:
            ArgumentError: As in `match`.
            TypeError: As in `match`.
        """
    def clear(self, namespace: Namespace = None) -> None:
        """Gives up all prefixes, or those of a namespace, in the tier too. Prefixes with a lease are no longer found, and
        are given up when their last lease ends.
        """
    def events(self) -> list[Stored | Removed | Cleared]:
        """Returns the changes since the last call, in order: objects of `Stored`, `Removed` and `Cleared`, as those of
        `PrefixCache.events`, for every group.

        A unit that the cache takes or gives up is an event of its group, and named by the key of the page that it ends
        with; a snapshot of a state by that of the page at whose end it is. So a reader knows which units a prompt has, and
        where every group can go on, by the same rules as `match`. If no full group has a unit for every page, pages are
        reported as well, without a group: a prefix is known as far as its pages are.

        Units of the host tier follow those of the device, with `tier="host"`; one that is found damaged there is reported as
        long as it keeps its place.

        65,536 events are kept of each; a reader that falls further behind gets `Cleared` and must start over.

        Raises:
            StateError: If the cache was made without `events=True`.
        """
    def group_stats(self, group: str) -> dict[str, int]:
        """Returns what the cache has of a group: `units`, `tokens` (that the units stand for; 0 for states), `unneeded`
        (units that no lease and no expected match needs, the first to be evicted) and `evicted` (units, since the cache
        was made). States that are placed layer by layer count each layer.

        Raises:
            ArgumentError: If there is no such group.
        """
    def cached_size(self) -> int:
        """Returns the number of cached tokens."""
    def evictable_size(self) -> int:
        """Returns the number of cached tokens that no lease holds."""
    def locked_size(self) -> int:
        """Returns the number of cached tokens that leases hold."""
    def verify(self) -> None:
        """Checks every invariant of the cache.

        Raises:
            IndexOwnershipError: If a check fails, with a description.
        """
    def stats(self) -> ArenaPrefixStats:
        """Returns the statistics of this pool, at the cost of a lock and a few loads. The keys are those of
        `kvpool.typing.PoolStats`, and of the subclass for this pool: `UnitStats` and `CountedStats` if it hands
        out units, `SlotStats`, `ArenaStats`, `TrackStats`, `ChunkStats`, `BufferStats`, `KVStats`, `PrefixStats`,
        `ArenaPrefixStats`, `TierStats` or `ArenaTierStats`.
        """

@final
class ArenaLease:
    """A request's hold on a cached prefix: what the request needs to go on is not evicted. As a context manager it is
    released at the end of the block; a lease that is dropped is released, too.
    """

    @property
    def length(self) -> int:
        """Tokens of the prefix, in whole pages.

        Raises:
            StaleError: If the lease was released, or the arena was cleared.
        """
    @property
    def known_length(self) -> int:
        """Tokens that were known at the match, in whole pages: more than `length` if not every group could go on at their
        end. Other prompts diverge from this one there: end a chunk of the prefill there, and publish it.

        Raises:
            StaleError: If the lease was released, or the arena was cleared.
        """
    @property
    def loadable(self) -> int:
        """Tokens after the prefix that host memory has, and that `load` can load. 0 without a tier.

        Raises:
            StaleError: If the lease was released, or the arena was cleared.
        """
    def load(self) -> int:
        """Copies what host memory has after the prefix to units of the arena, and extends the lease over it. On a GPU the copies
        run on a separate stream; the current stream waits for them, and the host does not. Otherwise the call waits for
        them, without the GIL.

        Load before you pass the lease to a planner. Units whose fingerprint is not that of what came to the tier are not
        loaded: they are logged and counted as `damaged` in `ArenaHostTier.stats`, and the load ends before them.

        Returns:
            The tokens that the lease has grown by: less than `loadable` if the arena has not enough units, or some are
            damaged.

        Raises:
            DriverError: If a copy cannot be enqueued, as while the current stream is being captured.
            StaleError: If the lease was released, or the arena was cleared.
            StateError: If a request of an `ArenaPlanner` has the lease, or the copy has failed. The lease is as long as
                before.
        """
    def __len__(self) -> int:
        """Return len(self)."""
    @property
    def namespace(self) -> Namespace:
        """The namespace of the prefix."""
    @property
    def closed(self) -> bool:
        """Whether the lease was released, or the arena was cleared."""
    def units(self, group: str) -> LeasedUnits:
        """Returns the units of a group that a request needs to go on behind the prefix; of a state, the snapshot at its
        end, from which the request copies: the cache owns it and does not change it.

        Raises:
            ArgumentError: If there is no such group.
            StaleError: If the lease was released, or the arena was cleared.
        """
    def publish(self, token_ids: IndicesLike, units: dict[str, Any]) -> dict[str, list[Any]]:
        """Publishes what the request has computed since: its units become the cache's, and the lease grows over them.

        Units of tokens that another request has published in between are not kept twice: the caller's are freed, and
        the request continues with those that the call returns. What the cache lacks for such tokens, a unit of a window
        or a snapshot, it takes.

        Args:
            token_ids: Token ids of the whole prefix, from the first one on, in whole pages.
            units: The units by the name of the group, as `CacheArena.alloc` gives them; the caller's ownership passes
                to the cache. Of a group of pages, one for each position from that of the lease's end on, without one
                that is not full at the end of the tokens, and `None` for those that the request has given up behind a
                window. Of states, a snapshot of the state behind the last token, or nothing; of all states or none.

        Returns:
            The cache's units for the same positions, by the name of the group. `None` for a unit that neither had; an
            empty list for a state without a snapshot.

        Nothing is changed if the call raises.

        Raises:
            ArgumentError: If `token_ids` are not whole pages, do not begin with the tokens of the lease, or one is
                outside of [0, 2**31); if there is no such group; if units are too few or too many, or one is `None`
                that a prefix always has or that a request needs to go on behind a snapshot.
            IndexOwnershipError: If a unit is not in use, listed twice, or owned by a cache or a planner.
            StaleError: If the lease was released, or the arena was cleared.
            StateError: If a request of an `ArenaPlanner` has the lease: it publishes by `ArenaPlanner.publish`.
            TypeError: If a unit is not an int or `None`.
        """
    def release(self) -> None:
        """Ends the lease. Does nothing if it has ended, and if a request of an `ArenaPlanner` has it: it ends with the
        request.
        """
    def __enter__(self) -> Self: ...
    def __exit__(self, *_exception: object) -> None: ...

@final
class LeasedUnits:
    """Units of a group that a request needs to go on behind a prefix."""

    @property
    def sinks(self) -> list[int]:
        """The units of the sinks, which are units 0, 1, ... of the request; those that are among `units` are left out."""
    @property
    def first(self) -> int:
        """The position of the first of `units`, in units of the group: 0 for full groups and states."""
    @property
    def units(self) -> list[Any]:
        """The units from there on to the end of the prefix, without one that is not full; of a state, the snapshot, as
        `CacheArena.alloc` gives one. `None` for a unit that the publication of the lease did not have.
        """

@final
class GroupReport:
    """How far a group could go on alone, and why not further."""

    @property
    def group(self) -> str:
        """The name of the group."""
    @property
    def kind(self) -> GroupKind:
        """The kind of the group: "full", "window", "chunk" or "state"."""
    @property
    def length(self) -> int:
        """The longest prefix, in tokens, at which the group could go on."""
    @property
    def missing(self) -> tuple[int, int] | None:
        """The first and one past the last token of the units that are missing to go on where the known tokens end, or of
        the tokens behind them; `None` if none is.
        """
    @property
    def reason(
        self,
    ) -> Literal[
        "complete", "evicted", "never published", "no snapshot", "snapshot evicted", "part of an entry"
    ]:
        """Why it is not longer: "complete" (it is all of the prompt's pages), "evicted", "never published" (or forgotten),
        "no snapshot", "snapshot evicted", or "part of an entry" (the last entry is of more tokens, and no state has the
        rest).
        """

@final
class ArenaPlanner:
    """Plans the steps of a scheduler over a `CacheArena`: one call takes the units of a whole batch in every group of the
    layout, and builds the metadata that attention and state kernels read.

    A request is a row, from `alloc` to `finish`. The planner tracks how many of its tokens have units, and owns these
    units: `CacheArena.free` refuses them. `seq_lens` always include the new tokens; a length that does not follow from
    the request's current length is an error. A request has units of pages in the order of its tokens, and one unit of
    each group of states, from its first `extend` on; states are not zeroed.

    `extend` and `decode` first free the units that no new token sees: those behind the window, or of earlier chunks, of
    the first new token, or of the last whole page if the request publishes to a prefix cache. Sinks stay. These units
    may be handed out by the same step: what reads them must have been enqueued before, on the stream of the step or one
    that the stream waits for. Then they take units of all groups, or return `None` and take none.

    A step is one pass on the host. On a GPU it is one launch on the current stream, preceded by a copy to the device if
    it has more numbers than a launch takes. It waits only if the host is many large steps ahead. All calls are atomic
    and thread-safe.

    Args:
        arena: The arena of the units. The arrays are on its device.
        max_requests: Maximum number of requests at once.
        max_context_len: Maximum number of tokens of a request.
        max_batch_size: Maximum number of requests in a batch, including padding.
        max_tokens: Maximum number of new tokens in a batch, including padding.
        kv_indices: Whether to build FlashInfer's `kv_indices`, which take memory for `max_batch_size` requests of full
            length in each group.
        block_table: Whether to build the block tables of FlashAttention and vLLM, which take as much memory again.

    Raises:
        ConfigError: If a size is below 1, or numbers may be beyond int32.
        OutOfMemoryError: If there is not enough memory.
    """

    def __new__(
        cls,
        arena: CacheArena,
        max_requests: SupportsIndex,
        max_context_len: SupportsIndex,
        max_batch_size: SupportsIndex,
        max_tokens: SupportsIndex,
        *,
        kv_indices: bool = True,
        block_table: bool = True,
    ) -> ArenaPlanner: ...
    @property
    def arena(self) -> CacheArena:
        """The arena of the units."""
    @property
    def max_requests(self) -> int:
        """Maximum number of requests at once."""
    @property
    def max_context_len(self) -> int:
        """Maximum number of tokens of a request."""
    @property
    def max_batch_size(self) -> int:
        """Maximum number of requests in a batch, including padding."""
    @property
    def max_tokens(self) -> int:
        """Maximum number of new tokens in a batch, including padding."""
    @property
    def device(self) -> str:
        """The device of the tensors, in PyTorch's notation, such as "cuda:0"."""
    def alloc(self, n: SupportsIndex = 1) -> list[int] | None:
        """Takes rows for requests without tokens.

        Args:
            n: How many.

        Returns:
            A list of row numbers, or `None` if there are fewer free rows.

        Raises:
            ArgumentError: If `n` is negative.
        """
    def extend(
        self,
        req_pool_indices: IndicesLike,
        prefix_lens: IndicesLike,
        seq_lens: IndicesLike,
        *,
        prefixes: Sequence[ArenaLease | None] | None = None,
    ) -> ArenaPlan | None:
        """Takes the units for positions `[prefix, seq)` of each request in every group: a prefill, whole or chunked.

        Args:
            req_pool_indices: Request rows, ints `[bs]`.
            prefix_lens: Tokens that each request has now, ints `[bs]`.
            seq_lens: Tokens that each request will have, ints `[bs]`.
            prefixes: `None`, or a sequence with one entry per request, each `None` or the `ArenaLease` of a new
                request, as long as its prefix and possibly of length 0. The request keeps the lease, publishes through
                it, and releases it in `finish`. Its states become copies of the lease's snapshot, in stream order. A
                lease is for one request; with later chunks pass `None` or the same lease again.

        Returns:
            An `ArenaPlan`, or `None` if a group is short of units: then nothing is taken.

        Raises:
            ArgumentError: If the arguments differ in length, a length does not follow from the request's current length
                or its lease, a row is listed twice, a lease is of another arena, or the batch exceeds the planner's
                limits.
            IndexError: If a row or a length is beyond the planner's.
            IndexOwnershipError: If a row is not allocated.
            StaleError: If the arena was cleared since a request, which is not extended from 0, took its units, or since
                a lease was made; if a lease was released.
            StateError: If a lease is another request's.
            DriverError: If a driver call fails, or the stream is being captured.
        """
    def decode(
        self,
        req_pool_indices: IndicesLike,
        seq_lens: IndicesLike,
        tokens_per_req: SupportsIndex = 1,
        *,
        pad_to: IndicesLike | None = None,
    ) -> ArenaPlan | None:
        """Takes the units for the next tokens of each request: `extend` from `seq_lens - tokens_per_req` to `seq_lens`.

        Args:
            req_pool_indices: Request rows, ints `[bs]`.
            seq_lens: Tokens that each request will have, including the new ones, ints `[bs]`.
            tokens_per_req: New tokens per request. Use more than one for speculative decoding, and `truncate` to free
                the rejected ones.
            pad_to: Batch sizes of CUDA graphs, an int or a sequence. The batch is padded to the smallest size that it
                fits. A padding request has row 0, the padding unit in every group, and `tokens_per_req` tokens, all new
                and at slot 0 (-1 in `slot_mapping`).

        Returns:
            An `ArenaPlan`, or `None` if a group is short of units.

        Raises:
            ArgumentError: As in `extend`; also if the batch exceeds every size of `pad_to`.
            IndexError: As in `extend`.
            IndexOwnershipError: As in `extend`.
            StaleError: If the arena was cleared since a request took its units.
            DriverError: As in `extend`.
        """
    def publish(self, req_pool_idx: SupportsIndex, token_ids: IndicesLike, *, snapshot: bool = False) -> int:
        """Publishes what a request has computed through its lease: the units of its first tokens become the cache's.

        Units of tokens that another request has published in between are not kept twice: the request goes on with the
        cache's, which the next plan shows. Publish when the work that writes the units is enqueued on the current
        stream.

        Args:
            req_pool_idx: Request row.
            token_ids: Token ids from the first one on, in whole pages: ints, or a tensor or array of them.
            snapshot: Whether to keep a copy of the states, so that a request can go on behind these tokens: they must
                be all that the request has. The copy is enqueued on the current stream, one launch for each group of
                states. Nothing is kept of the states if there are no units for them.

        Returns:
            The number of tokens of the lease now.

        Nothing is changed if the call raises.

        Raises:
            ArgumentError: If the request has fewer tokens, or more and `snapshot` is set; if `token_ids` are not whole
                pages, do not begin with the tokens of the lease, or one is outside of [0, 2**31).
            IndexError: If the row is beyond the planner's.
            IndexOwnershipError: If the row is not allocated.
            StaleError: If the arena was cleared since the request took its units.
            StateError: If the request has no lease.
            DriverError: If a driver call fails, or the stream is being captured.
        """
    def truncate(self, req_pool_indices: IndicesLike, seq_lens: IndicesLike) -> None:
        """Shrinks requests, for example by rejected tokens, and frees the units of the others. What a state has seen stays
        in it.

        Args:
            req_pool_indices: Request rows, ints `[bs]`.
            seq_lens: Tokens that each request keeps, ints `[bs]`.

        Raises:
            ArgumentError: If a request has fewer tokens, if the next token would see tokens whose units were freed
                behind a window, or a row is listed twice. Nothing is changed.
            IndexError: If a row is beyond the planner's.
            IndexOwnershipError: If a row is not allocated.
            StaleError: As in `decode`.
        """
    def finish(self, req_pool_indices: IndicesLike, seq_lens: IndicesLike | None = None) -> None:
        """Frees the units and the rows of requests, and ends their leases.

        Args:
            req_pool_indices: Request rows, ints `[bs]`.
            seq_lens: Tokens of each request, ints `[bs]`. Only checked.

        Raises:
            ArgumentError: If a length differs from the request's, or a row is listed twice. Nothing is changed.
            IndexError: If a row is beyond the planner's.
            IndexOwnershipError: If a row is not allocated. Nothing is changed.
        """
    def seq_len(self, req_pool_idx: SupportsIndex) -> int:
        """Returns the number of tokens of a request that have units.

        Raises:
            IndexError: If the row is beyond the planner's.
            IndexOwnershipError: If the row is not allocated.
        """
    def units(self, req_pool_idx: SupportsIndex, group: str) -> dict[int, int]:
        """Returns the units of a request in a group by position: a page's number in the request, or a number of a state.

        Raises:
            ArgumentError: If there is no such group.
            IndexError: If the row is beyond the planner's.
            IndexOwnershipError: If the row is not allocated.
        """
    def verify(self) -> None:
        """Checks the bookkeeping.

        Raises:
            StateError: If it is inconsistent.
        """
    def stats(self) -> dict[str, int]:
        """Returns the statistics of this planner: `rows` in use, `requests` with units, their `tokens`, `plans` so far,
        `max_requests`, `max_batch_size`, `max_tokens`, and `bytes` of the arrays on its device.
        """

@final
class ArenaPlan:
    """A planned step over a layout: the arrays that do not depend on a group, and those of each group.

    The tensors are int32 views of the planner's memory, on its device and at the same addresses in every plan. They are
    valid on the stream that was current in the planning call. The next plan of the planner overwrites them, and getters
    of this plan then raise `StaleError`. `B` is the padded number of requests, `T` the padded number of new tokens.
    """

    @property
    def positions(self) -> torch.Tensor:
        """Positions of the new tokens in their requests, `[T]`."""
    @property
    def req_pool_indices(self) -> torch.Tensor:
        """Rows of the requests, `[B]`; 0 for padding."""
    @property
    def seq_lens(self) -> torch.Tensor:
        """Tokens of each request, including the new ones, `[B]`."""
    @property
    def cache_seqlens(self) -> torch.Tensor:
        """The same tensor as `seq_lens`, by FlashAttention's name (`flash_attn_with_kvcache`)."""
    @property
    def qo_indptr(self) -> torch.Tensor:
        """Offsets of the new tokens of each request, ending with their total, `[B + 1]` (FlashInfer)."""
    @property
    def cu_seqlens_q(self) -> torch.Tensor:
        """The same tensor as `qo_indptr`, by FlashAttention's name (`flash_attn_varlen_func`)."""
    @property
    def batch_size(self) -> int:
        """Number of requests, without padding."""
    @property
    def padded_batch_size(self) -> int:
        """Number of requests, including padding: `B`."""
    @property
    def num_tokens(self) -> int:
        """Number of new tokens, without padding."""
    @property
    def padded_num_tokens(self) -> int:
        """Number of new tokens, including padding: `T`."""
    @property
    def max_seqlen_q(self) -> int:
        """Largest number of new tokens of a request (FlashAttention's name)."""
    @property
    def max_seqlen_k(self) -> int:
        """Largest number of tokens of a request (FlashAttention's name)."""
    def group(self, name: str) -> GroupPlan:
        """Returns the arrays of a group.

        Args:
            name: Name of the group.

        Raises:
            ArgumentError: If there is no such group.
        """
    def host(self, name: str) -> npt.NDArray[np.int32]:
        """Returns an array of this plan in host memory, a read-only NumPy array: on the CPU over the planner's
        memory, from a GPU a copy that needs no transfer. Without NumPy it is a `kvpool.Tensor`.

        Args:
            name: Name of the array.

        Raises:
            ArgumentError: If there is no such array.
            StaleError: After a later plan.
        """

@final
class GroupPlan:
    """The arrays of a group in a planned step: those of pages, or those of states.

    The tensors are as those of `ArenaPlan`, int32 (`slot_mapping`: int64). A slot is an entry of a unit:
    `unit * entries + entry`, the row of the group's buffers with the first two dimensions flattened. An entry of
    several tokens is complete with its last token, and has its slot there.
    """

    @property
    def out_cache_loc(self) -> torch.Tensor | None:
        """Slots of the entries that the new tokens complete, `[T]`, one request after the other; 0 for the other
        tokens and for padding (SGLang's name). `None` for states.
        """
    @property
    def slot_mapping(self) -> torch.Tensor | None:
        """The same slots, int64 `[T]`; -1 in place of 0, which vLLM's kernels skip. `None` for states."""
    @property
    def kv_indptr(self) -> torch.Tensor | None:
        """Offsets of the units of each request in `kv_indices`, ending with their total, `[B + 1]` (FlashInfer).
        `None` for states.
        """
    @property
    def kv_indices(self) -> torch.Tensor | None:
        """The units with entries of all requests, one request after the other, `[kv_indptr[-1]]`: sinks, then those
        that the new tokens see (FlashInfer); of a request that publishes to a prefix cache, those that the token
        behind its last whole page before them sees. `None` for states, and if the planner does not build it.
        """
    @property
    def kv_last_page_len(self) -> torch.Tensor | None:
        """Entries in the last unit of each request, `[B]`; 0 for a request without entries (FlashInfer). `None` for
        states.
        """
    @property
    def block_table(self) -> torch.Tensor | None:
        """The units of each request by position, `[B, ceil(max_context_len / tokens of a unit)]`, 0 for those that it
        does not have or has no more (FlashAttention and vLLM). `None` for states, and if the planner does not build
        it.
        """
    @property
    def state_indices(self) -> torch.Tensor | None:
        """The unit of each request's state, `[N, B]`; 0 for padding. `N` is 1, or the number of layers if the group is
        placed layer by layer (`SlabLayout.by_layer`). `None` for pages.
        """
    def host(self, name: str) -> npt.NDArray[Any] | None:
        """Returns an array of this group in host memory, as `ArenaPlan.host`; `None` where the tensor is `None`.

        Args:
            name: Name of the array.

        Raises:
            ArgumentError: If there is no such array.
            StaleError: After a later plan; on a GPU also after `truncate` and `finish`.
        """

@final
class PagePool(Pool):
    """Fixed-size pages of elements, numbered from 0, with a free list.

    Pages are zero at first and are not zeroed again. The pool never shrinks, and no page moves when it grows.
    On a GPU a page is valid on the stream that was current when its memory was allocated, in the constructor
    or in the `alloc` that grew the pool; another stream needs an event.

    Args:
        page_size: Elements per page.
        initial_pages: Initial number of pages.
        dtype: Storage dtype of the elements, float32 by default.
        device: Device of the pages.
        grow: Number of pages that `alloc` adds when all are in use; 0 for a fixed size.
        strict: Whether an invalid free raises; otherwise it is dropped, counted and reported.
        debug: Whether to record owners and call sites for `leaks` and reports. Defaults to the environment
            variable `KVPOOL_DEBUG`.

    Raises:
        ConfigError: If `page_size` is below 1, another number is below 0, or the size in bytes overflows.
        TypeError: If `dtype` is not a storage dtype.
        OutOfMemoryError: If there is not enough memory.
        BackendUnavailableError: If `device` is not available.
    """

    def __new__(
        cls,
        page_size: SupportsIndex,
        initial_pages: SupportsIndex,
        dtype: DTypeLike = "float32",
        device: DeviceLike = "cpu",
        *,
        grow: SupportsIndex = 0,
        strict: bool = False,
        debug: bool | None = None,
    ) -> PagePool: ...
    @property
    def page_size(self) -> int:
        """Elements per page."""
    @property
    def total_pages(self) -> int:
        """Number of pages, free and in use."""
    @property
    def pages_free(self) -> int:
        """Number of free pages."""
    @property
    def free_pages(self) -> int:
        """Another name of `pages_free`."""
    @property
    def used_pages(self) -> int:
        """Number of pages in use."""
    @property
    def grow(self) -> int:
        """Number of pages that `alloc` adds when all are in use."""
    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the elements: a `torch.dtype`, or its name if PyTorch is not installed."""
    def alloc(self, *, owner: str | int | None = None) -> int | None:
        """Takes the page freed last, else the lowest that was never taken.

        Args:
            owner: An owner for reports and `leaks`, a str or an int. Recorded only if the pool debugs.

        Returns:
            The index of the page, or `None` if all are in use and the pool does not grow. The page keeps its
            last contents.

        Raises:
            OutOfMemoryError: If there is not enough memory for more pages. Nothing is changed.
        """
    def free(self, page: SupportsIndex, *, owner: str | int | None = None) -> None:
        """Frees a page.

        Args:
            page: Index of the page.
            owner: As in `alloc`.

        Raises:
            IndexOwnershipError: If the pool is strict and the page is not in use. Nothing is changed.
        """
    def page(self, i: SupportsIndex) -> torch.Tensor:
        """Returns the elements of a page, `dtype` `[page_size]`, in use or not, without a copy.

        Raises:
            IndexError: If the page does not exist.
        """
    def stats(self) -> CountedStats:
        """Returns the statistics of this pool, at the cost of a lock and a few loads. The keys are those of
        `kvpool.typing.PoolStats`, and of the subclass for this pool: `UnitStats` and `CountedStats` if it hands
        out units, `SlotStats`, `ArenaStats`, `TrackStats`, `ChunkStats`, `BufferStats`, `KVStats`, `PrefixStats`,
        `ArenaPrefixStats`, `TierStats` or `ArenaTierStats`.
        """

@final
class ChunkPool(Pool):
    """Fixed-size chunks in one region, for offloaded K and V.

    Chunks are numbered from 0. They are zero at first and are not zeroed again. The chunk freed last is taken
    first, then the lowest that was never taken.

    If there is a driver, host memory is page-locked in steps of about 64 MiB on two threads.
    `KVPOOL_PAGE_LOCK_THREADS` sets the number of threads: more threads finish sooner but delay other driver
    calls meanwhile. The constructor of a larger pool returns at once, chunks become available as their step
    completes, and progress is reported through the logger `kvpool`. A step that cannot be page-locked stays
    ordinary memory, with a warning.

    Args:
        num_chunks: Number of chunks.
        chunk_shape: Shape of a chunk.
        dtype: Storage dtype of the elements.
        device: Device of the chunks.
        pin_memory: Whether to page-lock host memory if a driver is present.
        numa_node: Prefer this NUMA node for host memory. A machine without NUMA has node 0.
        huge_pages: Whether to use explicit huge pages for host memory: of the largest size of which the system
            has reserved enough, and which adds at most an eighth to the memory. If there is none, transparent
            huge pages are used, with a log message.
        strict: Whether an invalid free raises; otherwise it is dropped, counted and reported.
        debug: Whether to record owners and call sites for `leaks` and reports. Defaults to the environment
            variable `KVPOOL_DEBUG`.
        progress: Called as `progress(done_chunks, num_chunks)` after each step, from another thread if there
            are several steps.

    Raises:
        ConfigError: If a size is below 1, the size in bytes overflows, or the NUMA node does not exist.
        TypeError: If `dtype` is not a storage dtype.
        OutOfMemoryError: If there is not enough memory.
        BackendUnavailableError: If `device` is not available.
    """

    def __new__(
        cls,
        num_chunks: SupportsIndex,
        chunk_shape: SupportsIndex | Sequence[SupportsIndex],
        dtype: DTypeLike,
        device: DeviceLike = "cpu",
        pin_memory: bool = True,
        *,
        numa_node: SupportsIndex | None = None,
        huge_pages: bool = False,
        strict: bool = False,
        debug: bool | None = None,
        progress: Callable[[int, int], object] | None = None,
    ) -> ChunkPool: ...
    @property
    def num_chunks(self) -> int:
        """Number of chunks."""
    @property
    def chunk_shape(self) -> tuple[int, ...]:
        """Shape of a chunk, a tuple of ints."""
    @property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk."""
    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the elements: a `torch.dtype`, or its name if PyTorch is not installed."""
    @property
    def pin_memory(self) -> bool:
        """Whether the memory is page-locked, or page-locking is in progress."""
    @property
    def numa_node(self) -> int | None:
        """The requested NUMA node."""
    @property
    def huge_pages(self) -> bool:
        """Whether the memory uses explicit huge pages."""
    def allocate(self, *, owner: str | int | None = None) -> Chunk | None:
        """Takes a chunk, with one reference.

        If no chunk is ready, waits, without the GIL, as long as page-locking in progress or copies of freed
        chunks can still provide one.

        Returns:
            A `Chunk`, or `None` if all are in use.
        """
    def allocate_batch(self, n: SupportsIndex, *, owner: str | int | None = None) -> list[Chunk] | None:
        """Takes `n` chunks, or none of them. Waits like `allocate`.

        Returns:
            A list of `Chunk`, or `None` if there are not enough.

        Raises:
            ArgumentError: If `n` is negative.
        """
    def free(self, chunk: Chunk, *, owner: str | int | None = None) -> None:
        """Frees a chunk to which the caller has the only reference.

        Raises:
            IndexOwnershipError: If the pool is strict and the chunk was already freed, has further references
                or belongs to another pool. Nothing is changed.
            TypeError: If `chunk` is not a `Chunk`.
        """
    def wait_page_locked(self, timeout: float | None = None) -> bool:
        """Waits until page-locking has ended, without the GIL.

        Args:
            timeout: Maximum wait in seconds; unlimited by default.

        Returns:
            Whether page-locking has ended.

        Raises:
            ArgumentError: If `timeout` is negative or NaN.
            DriverError: In a forked child, where page-locking never ends.
        """
    def stats(self) -> ChunkStats:
        """Returns the statistics of this pool, at the cost of a lock and a few loads. The keys are those of
        `kvpool.typing.PoolStats`, and of the subclass for this pool: `UnitStats` and `CountedStats` if it hands
        out units, `SlotStats`, `ArenaStats`, `TrackStats`, `ChunkStats`, `BufferStats`, `KVStats`, `PrefixStats`,
        `ArenaPrefixStats`, `TierStats` or `ArenaTierStats`.
        """

@final
class Chunk:
    """One allocation of a chunk of a `ChunkPool`. A later allocation of the same index is a different `Chunk`.

    Dropping the object does not free the chunk. `with chunk:` releases it at exit.
    """

    @property
    def index(self) -> int:
        """Index of the chunk in the pool."""
    @property
    def nbytes(self) -> int:
        """Bytes of the whole chunk."""
    @property
    def references(self) -> int:
        """Number of references; 0 after the chunk was freed."""
    def tensor(self, shape: SupportsIndex | Sequence[SupportsIndex] | None = None) -> torch.Tensor:
        """Returns the chunk's first elements as a contiguous tensor, without a copy.

        The tensor keeps the memory alive, but not the chunk: once the chunk is freed, its next owner may
        write there.

        Args:
            shape: Shape of at most as many elements as a chunk has. Defaults to `chunk_shape`.

        Raises:
            ArgumentError: If `shape` does not fit the chunk.
            StaleError: If the chunk was freed.
        """
    def retain(self) -> Chunk:
        """Adds a reference.

        Returns:
            The chunk itself.

        Raises:
            StaleError: If the chunk was freed.
        """
    def release(self) -> None:
        """Drops a reference. Dropping the last one frees the chunk as soon as its copies are complete.

        Raises:
            IndexOwnershipError: If the pool is strict and the chunk was already freed.
        """
    def copy_from(self, tensor: TensorLike, stream: StreamLike | None = None) -> ChunkCopy:
        """Copies the elements of `tensor`, in order, to the beginning of the chunk.

        Between host memory the copy is complete on return. With a GPU on either side it is enqueued, as one
        copy for all equally spaced runs of contiguous elements. Tensor and chunk are kept until it completes,
        even if the chunk is freed meanwhile.

        Args:
            tensor: A tensor of the chunk's dtype, on any device, with any strides.
            stream: A stream or its handle, as in `Pool.used_on`, of the GPU that copies. Defaults to the current
                stream.

        Returns:
            A `ChunkCopy`: `query` and `wait` say when the copy is complete.

        Raises:
            ArgumentError: If `tensor` has more elements than the chunk, or `stream` is one of another GPU or 2.
            TypeError: If `tensor` has another dtype.
            StaleError: If the chunk was freed.
        """
    def copy_to(self, tensor: TensorLike, stream: StreamLike | None = None) -> ChunkCopy:
        """Copies the beginning of the chunk to the elements of `tensor`, in order. Otherwise like `copy_from`.

        Raises:
            ArgumentError: If `tensor` has more elements than the chunk, is read-only, or overlaps itself, or `stream` is
                one of another GPU or 2.
            TypeError: If `tensor` has another dtype.
            StaleError: If the chunk was freed.
        """
    def __enter__(self) -> Chunk: ...
    def __exit__(self, *_exception: object) -> None: ...

@final
class ChunkCopy:
    """A copy to or from a chunk. It can serve as the fence `after` of `TokenToKVPoolAllocator.free`."""

    def query(self) -> bool:
        """Returns whether the copy is complete. Does not wait.

        Raises:
            DriverError: If a driver call fails, or earlier work on the device has failed.
        """
    def wait(self, timeout: float | None = None) -> bool:
        """Waits until the copy is complete, without the GIL. Without a time limit, an interrupt waits, too.

        Args:
            timeout: Maximum wait in seconds; unlimited by default.

        Returns:
            Whether the copy is complete.

        Raises:
            ArgumentError: If `timeout` is negative or NaN.
            DriverError: As in `query`.
        """
    def cancel(self) -> None:
        """Does nothing: a copy that is on a stream runs. Wait before its memory has another use."""
    @property
    def error(self) -> Exception | None:
        """The `DriverError` of a device that has failed, else `None`."""

@final
class BufferPool(Pool):
    """Scratch buffers that are reused from step to step.

    A buffer occupies the smallest bucket that fits it. Free buffers of a bucket are reused last in, first
    out, so that a step with the same allocations as the step before gets the same memory. New memory is
    zeroed once; reused memory is not.

    On a GPU a buffer is valid on the stream that was current when it was allocated. A buffer that was
    released while that stream still uses it is reused at once on the same stream; another stream waits on the
    device, and the host never waits. If you use a buffer on a further stream, make the allocating stream wait
    for that work before you release the buffer. Only a new buffer makes driver calls, which may wait for the
    device; there can be none while its stream is captured.

    Args:
        device: Device of the buffers.
        rounding: "pow2" for power-of-two buckets, "fine" for four buckets per doubling.
        debug: Whether to record owners and call sites for `leaks` and reports. Defaults to the environment
            variable `KVPOOL_DEBUG`.

    Raises:
        ConfigError: If `rounding` is neither "pow2" nor "fine".
        BackendUnavailableError: If `device` cannot be used here.
    """

    def __new__(
        cls, device: DeviceLike = "cuda", *, rounding: Rounding = "pow2", debug: bool | None = None
    ) -> BufferPool: ...
    @property
    def rounding(self) -> Rounding:
        """The way in which sizes are rounded up: "pow2" or "fine"."""
    @property
    def buffers_free(self) -> int:
        """Number of free buffers."""
    @property
    def bytes_free(self) -> int:
        """Bytes of the free buffers."""
    @property
    def free_count(self) -> int:
        """Another name of `buffers_free`."""
    @property
    def free_bytes(self) -> int:
        """Another name of `bytes_free`."""
    @property
    def in_use_count(self) -> int:
        """Number of buffers in use."""
    @property
    def in_use_bytes(self) -> int:
        """Bytes of the buffers in use, in whole buckets."""
    @property
    def high_water_bytes(self) -> int:
        """Largest number of bytes in use at once, in whole buckets."""
    def alloc(
        self,
        shape: SupportsIndex | Sequence[SupportsIndex],
        dtype: DTypeLike,
        *,
        owner: str | int | None = None,
    ) -> Buffer:
        """Takes a buffer.

        Args:
            shape: Shape of the tensor, ints.
            dtype: Dtype of the tensor: a storage dtype, float64, int32, int64 or bool.
            owner: An owner for reports and `leaks`, a str or an int. Recorded only if the pool debugs.

        Returns:
            A `Buffer`. New memory is zeroed; reused memory has its last contents.

        Raises:
            ArgumentError: If an extent is negative or the bytes overflow.
            TypeError: If the dtype is not supported.
            OutOfMemoryError: If there is not enough memory even after the free buffers were deallocated.
            DriverError: If a driver call fails, or a new buffer is needed while the current stream is
                captured.
        """
    def alloc_bytes(self, n: SupportsIndex, *, owner: str | int | None = None) -> Buffer:
        """Takes a buffer of `n` bytes, whose tensor is uint8 `[n]`. Otherwise like `alloc`."""
    def alloc_batch(
        self,
        specs: Iterable[tuple[SupportsIndex | Sequence[SupportsIndex], DTypeLike]],
        *,
        owner: str | int | None = None,
    ) -> list[Buffer]:
        """Takes a buffer for each of `specs`, or none of them.

        Args:
            specs: Pairs of shape and dtype, as in `alloc`.
            owner: As in `alloc`.

        Returns:
            A list of `Buffer` in the order of `specs`.

        Raises:
            As in `alloc`. Nothing is taken.
        """
    def release(self, buffer: Buffer) -> None:
        """Gives a buffer back.

        Raises:
            StaleError: If the buffer was already given back. Nothing is changed.
            IndexOwnershipError: If the buffer belongs to another pool.
        """
    def reset(self) -> None:
        """Gives every buffer in use back. Using one of them afterwards raises `StaleError`. The same
        sequence of `alloc` calls then gets the same memory.
        """
    def step(self) -> BufferStep:
        """Returns a context manager that resets the pool at exit."""
    def register_existing(self, tensor: TensorLike) -> None:
        """Registers existing memory, such as weights, which the pool neither owns nor recycles.

        Host memory is page-locked, for copies at full speed, until the pool is dropped, if there is a driver
        and `KVPOOL_NO_RESIDENCY` is not 1. The pool keeps the tensor alive. Registering the same memory again
        does nothing. Whole pages are locked, so a tensor should have its pages for itself, as large ones do.

        Args:
            tensor: A contiguous tensor in host memory or on the pool's device.

        Raises:
            ConfigError: If the tensor is on another device, is not contiguous, or would be page-locked but
                covers only a part of its PyTorch storage, or shares a page with memory that is page-locked
                already: the driver cannot copy memory that is page-locked in part.
            OutOfMemoryError: If the driver cannot page-lock that much memory in one piece.
            DriverError: If page-locking fails otherwise.
        """
    def clear(self) -> None:
        """Deallocates the memory of free buffers. On a GPU this waits for the streams that used it."""
    def stats(self) -> BufferStats:
        """Returns the statistics of this pool, at the cost of a lock and a few loads. The keys are those of
        `kvpool.typing.PoolStats`, and of the subclass for this pool: `UnitStats` and `CountedStats` if it hands
        out units, `SlotStats`, `ArenaStats`, `TrackStats`, `ChunkStats`, `BufferStats`, `KVStats`, `PrefixStats`,
        `ArenaPrefixStats`, `TierStats` or `ArenaTierStats`.
        """

@final
class Buffer:
    """A scratch buffer of a `BufferPool`, valid until it is given back.

    Dropping the object does not give the buffer back. `with buffer:` releases it at exit, unless the pool was
    reset meanwhile.
    """

    @property
    def tensor(self) -> torch.Tensor:
        """The buffer as a contiguous tensor of the requested shape and dtype, without a copy.

        If you keep the tensor after the buffer was given back, it shows what the next owner writes.

        Raises:
            StaleError: If the buffer was given back.
        """
    @property
    def nbytes(self) -> int:
        """Number of bytes requested."""
    @property
    def capacity(self) -> int:
        """Bytes of its bucket."""
    def release(self) -> None:
        """Gives the buffer back.

        Raises:
            StaleError: If the buffer was already given back. Nothing is changed.
        """
    def __enter__(self) -> Buffer: ...
    def __exit__(self, *_exception: object) -> None: ...

@final
class BufferStep:
    """The context manager of `BufferPool.step`: resets the pool at exit."""

    def __enter__(self) -> BufferPool: ...
    def __exit__(self, *_exception: object) -> None: ...

@disjoint_base
class _Workspace(Pool):
    """The arena of a `Workspace`."""

    def __new__(
        cls,
        device: DeviceLike = "cuda",
        arena_bytes: SupportsIndex = 536870912,
        num_threads: SupportsIndex | None = None,
        *,
        debug: bool | None = None,
    ) -> Self: ...
    @property
    def arena_bytes(self) -> int:
        """Bytes of the arena."""
    @property
    def used_bytes(self) -> int:
        """Bytes in use, in whole alignments of 256."""
    @property
    def high_water_bytes(self) -> int:
        """Largest number of bytes in use at once."""
    @property
    def num_threads(self) -> int | None:
        """Number of PyTorch threads inside `use()`, or `None` to keep PyTorch's setting."""
    @property
    def closed(self) -> bool:
        """Whether the workspace is closed."""
    @property
    def is_closed(self) -> bool:
        """Another name of `closed`."""
    def empty(self, shape: SupportsIndex | Sequence[SupportsIndex], dtype: DTypeLike) -> torch.Tensor:
        """Returns a contiguous tensor in the arena, 256-byte aligned, with undefined elements.

        Do not use it after the next reset. On a GPU it is valid on the current stream.

        Args:
            shape: Shape of the tensor, ints.
            dtype: A storage dtype, float64, int32, int64 or bool.

        Raises:
            WorkspaceExhaustedError: If the tensor does not fit the arena.
            ArgumentError: If an extent is negative, or the size in bytes overflows.
            TypeError: If the dtype is not supported.
            StateError: If another thread uses the workspace, or the workspace is closed.
        """
    def zeros(self, shape: SupportsIndex | Sequence[SupportsIndex], dtype: DTypeLike) -> torch.Tensor:
        """Returns a tensor like `empty`, filled with zeros."""
    def stats(self) -> UnitStats:
        """Returns the statistics of this pool, at the cost of a lock and a few loads. The keys are those of
        `kvpool.typing.PoolStats`, and of the subclass for this pool: `UnitStats` and `CountedStats` if it hands
        out units, `SlotStats`, `ArenaStats`, `TrackStats`, `ChunkStats`, `BufferStats`, `KVStats`, `PrefixStats`,
        `ArenaPrefixStats`, `TierStats` or `ArenaTierStats`.
        """
    def _reset(self) -> bool:
        """Takes back the tensors of `empty` and `zeros`. Returns `False`, and does nothing, while PyTorch holds
        memory of the arena.
        """
    def _close(self) -> None:
        """Closes the workspace and drops its reference to the arena."""
    def _enter(self) -> None:
        """Lets `kvpool_workspace_alloc` take memory of the arena for PyTorch's allocations on this thread."""
    def _leave(self) -> str | None:
        """Undoes `_enter`. Returns a description of the last allocation that failed, if any."""

@final
class ArenaHostTier(Pool):
    """Host memory below an `ArenaPrefixCache`. Loading units from there with `ArenaLease.load` is faster than computing them.

    It is an arena of its own: pages, windows and snapshots of states share its slabs, and a prefix is found there by the
    same rules as on the device. Each unit is one contiguous piece, all layers one behind the other. What a request
    publishes is copied there in the background, one copy after the other: on a thread or, for an arena on a GPU, on a
    separate stream. Of windows only what the next token sees is copied.

    Pieces have fingerprints, which are checked before a load (see `docs/host-tier.md`, "Damage"): a damaged one is counted,
    named in the log and not used, the load ends before it, and the next publication of these tokens replaces it.

    If the arena is on a GPU, the memory is page-locked in steps on threads, and copies pass through staging areas on the
    GPU: `KVPOOL_STAGING_BYTES`, as for a `HostTier`.

    Args:
        arena: The arena of the units.
        tier_bytes: Bytes of host memory; what is behind the last whole slab is not allocated.
        pin_memory: Whether to page-lock the memory for an arena on a GPU.

    Raises:
        ConfigError: If `tier_bytes` are too few for the layout.
        OutOfMemoryError: If there is not enough memory.
    """

    def __new__(
        cls, arena: CacheArena, tier_bytes: SupportsIndex, *, pin_memory: bool = True
    ) -> ArenaHostTier: ...
    @property
    def arena(self) -> CacheArena:
        """The arena of the units."""
    @property
    def tier_bytes(self) -> int:
        """Bytes of host memory, as passed to the constructor."""
    @property
    def pin_memory(self) -> bool:
        """Whether page-locking was requested, as passed to the constructor."""
    def stats(self) -> ArenaTierStats:
        """Returns the statistics of this pool, at the cost of a lock and a few loads. The keys are those of
        `kvpool.typing.PoolStats`, and of the subclass for this pool: `UnitStats` and `CountedStats` if it hands
        out units, `SlotStats`, `ArenaStats`, `TrackStats`, `ChunkStats`, `BufferStats`, `KVStats`, `PrefixStats`,
        `ArenaPrefixStats`, `TierStats` or `ArenaTierStats`.
        """
    def mem_bytes(self) -> int:
        """Bytes of the memory."""
    def staging_bytes(self) -> int:
        """Bytes of GPU memory through which copies come here and go back; 0 if there is no such area."""
    def piece_bytes(self, group: str) -> int:
        """Bytes of a unit of a group; of one layer's, if it is a state that is placed layer by layer.

        Raises:
            ArgumentError: If there is no such group.
        """
    def get_contiguous_buf_infos(self) -> tuple[list[int], list[int], list[int]]:
        """Returns the addresses, the bytes and the bytes of an item of the memory, for transfer engines: one buffer, whose
        items are slabs.
        """
    def wait_page_locked(self, timeout: float | None = None) -> bool:
        """Waits, without the GIL, until page-locking has ended.

        Args:
            timeout: Seconds; `None` for any time.

        Returns:
            Whether it has ended within the time.

        Raises:
            ArgumentError: If `timeout` is negative.
            DriverError: In a forked child.
        """

@final
class HostTier(Pool):
    """Host memory below a `PrefixCache`. Loading pages from there with `Lease.load` is faster than computing
    them.

    Each page of K and V is one contiguous piece: the K and then the V of the first layer, then of the next.
    Copies run in the background, one after the other in each direction: on a thread or, for a pool on a GPU,
    on a separate stream. A page can be loaded from the moment its copy begins. Pages that the cache has on the device, too,
    are evicted last. Of the others, those that are worth least by the `adaptive` policy of the cache are evicted first or,
    with another policy or another `write` than "through", those that were evicted from the device first.

    If there is a driver and the pool is on a GPU, the memory is page-locked in steps on threads, like that of
    a `ChunkPool`, and can be used before all of it is page-locked. Copies in both directions then pass through
    staging areas on the GPU, so that copy engines move them over the bus and not kernels, which would take
    multiprocessors from the model and wait for them: `KVPOOL_STAGING_BYTES`, 192 MiB by default and at most three
    times the tier; 0 for none.

    Args:
        kv: The pool of the K and V.
        size: Tokens to make room for, in whole pages.
        states: The `GDNPool` of the cache, for models with linear-attention states.
        max_states: Snapshots of states to make room for. Defaults to the number per token that `states` has per
            token of `kv`.
        pin_memory: Whether to page-lock the memory for a pool on a GPU.
        write: When pages are copied there: "through", when they are published; "selective", when a second request
            uses them; or "back", when they are evicted from the device: whoever takes their slots comes after the
            copy. Snapshots of states are copied when they are made or, with "selective", when a second request uses
            them.

    Raises:
        ConfigError: If a size is below a page or below 1, `write` is unknown, `max_states` is given without `states`,
            or the pools are on different devices.
        OutOfMemoryError: If there is not enough memory.
    """

    def __new__(
        cls,
        kv: KVPool,
        size: SupportsIndex,
        *,
        states: GDNPool | None = None,
        max_states: SupportsIndex | None = None,
        pin_memory: bool = True,
        write: WriteMode = "through",
    ) -> HostTier: ...
    @property
    def kv(self) -> KVPool:
        """The pool of the K and V."""
    @property
    def states(self) -> GDNPool | None:
        """The pool of states, if there is one."""
    @property
    def size(self) -> int:
        """Tokens that the tier has room for, as passed to the constructor."""
    @property
    def max_states(self) -> int:
        """Snapshots of states that the tier has room for."""
    @property
    def pin_memory(self) -> bool:
        """Whether page-locking was requested, as passed to the constructor."""
    @property
    def write(self) -> WriteMode:
        """When pages are copied to the tier: "through", "selective" or "back"."""
    @property
    def page_bytes(self) -> int:
        """Bytes of K and V of a page."""
    def stats(self) -> TierStats:
        """Returns the statistics of this pool, at the cost of a lock and a few loads. The keys are those of
        `kvpool.typing.PoolStats`, and of the subclass for this pool: `UnitStats` and `CountedStats` if it hands
        out units, `SlotStats`, `ArenaStats`, `TrackStats`, `ChunkStats`, `BufferStats`, `KVStats`, `PrefixStats`,
        `ArenaPrefixStats`, `TierStats` or `ArenaTierStats`.
        """
    def mem_bytes(self) -> int:
        """Bytes of the memory."""
    def staging_bytes(self) -> int:
        """Bytes of GPU memory through which copies come here; 0 if there is no such area."""
    def wait_page_locked(self, timeout: float | None = None) -> bool:
        """Waits, without the GIL, until page-locking has ended.

        Args:
            timeout: Seconds; `None` for any time.

        Returns:
            Whether it has ended within the time.

        Raises:
            ArgumentError: If `timeout` is negative.
            DriverError: In a forked child.
        """
    def clear(self) -> None:
        """Gives up all pages and snapshots. Those that are being copied keep their places until the copy is over. This
        emits no events: `PrefixCache.clear` clears both and emits them.
        """
    def verify(self) -> None:
        """Checks every invariant of the tier.

        Raises:
            IndexOwnershipError: If a check fails, with a description.
        """

@final
class Load:
    """A load of pages of a prefix from the tiers below the device, layer by layer. Its lease has the pages already. Call
    `wait_layer` before the work that uses a layer.
    """

    @property
    def length(self) -> int:
        """Tokens that the load adds to the lease; 0 if there was nothing to load."""
    def __len__(self) -> int:
        """Return len(self)."""
    def wait_layer(self, layer: SupportsIndex) -> None:
        """Makes the current stream wait for the copies of a layer, of those before it, and of the state; the host does
        not wait. Without a GPU, the call waits for them, without the GIL.

        Raises:
            DriverError: If the current stream is being captured.
            IndexError: If there is no such layer.
            StateError: If the load was cancelled or failed before it.
        """
    def query(self) -> bool:
        """Returns whether the load is complete. When that is known, by this call or by `wait_layer` of the last layer,
        other requests find the pages, too. Does not wait.

        Raises:
            StateError: If it was cancelled or failed: the lease is as long as before, and the request computes.
        """
    def wait(self, timeout: float | None = None) -> bool:
        """Waits until the load is complete, without the GIL. An interrupt ends the wait only.

        Args:
            timeout: Maximum wait in seconds; unlimited by default.

        Returns:
            Whether it is complete.

        Raises:
            ArgumentError: If `timeout` is negative or NaN.
            StateError: As in `query`.
        """
    @property
    def error(self) -> Exception | None:
        """The `StateError` of a load that was cancelled or failed, the `DriverError` of a device that has failed, else
        `None`.

        Raises:
            DriverError: If the current stream is being captured.
        """
    def cancel(self) -> None:
        """Gives up the load unless it is complete: the lease is as long as before, and its slots are free: their
        next owner comes after the copies. Does nothing if the load is complete, or the lease was released.

        Raises:
            StateError: If a planner has the lease: its request uses the slots.
        """

@final
class FileStore:
    """Pages by their keys in files on a local disk, for one process at a time.

    Stored pages survive the process, also a `SIGKILL` at any moment. A checksum covers the key and the bytes
    of each page: a page that is found has exactly the bytes that were put, and a damaged one is missing. The
    pages that are worth least, or were used least recently, are evicted; a use is a `put`, a `get`, a `touch`, or
    an `exists` with `will_use`.
    Of the pages of a prompt, the last are evicted first, so that the beginning of a prefix stays longest: the
    pages of one call follow each other, and `parent` of `put` names the page before them.

    Threads read and write, bypassing the page cache where the file system supports it. They report failures
    in `stats()`, and the first of each kind as a warning of the logger `kvpool` at a later call. If a page
    cannot be read or written, no other page is lost, except the one that was evicted to make room for it.

    Nothing is flushed: after a power cut the last pages may be missing. Use as a context manager, or call `close`:
    a store that is dropped without it drops the pages in its queue.

    Args:
        path: A directory, made if it is missing, with access for its owner only. Others that may read or change
            its pages are a warning. It is locked by this process; a child of a fork cannot use the store.
        capacity_bytes: Bytes of pages, each rounded up to 4096. The index takes 64 bytes more for each page. A store
            can be opened with another capacity: a smaller one keeps the pages used last.
        page_bytes: Bytes of a page.
        policy: Which prompt loses its last page: "adaptive", that whose pages are worth least, as in `PrefixCache`;
            "lru", that which was used least recently; or another policy of `PrefixCache`. What "adaptive" has learned
            ends with the process.
        threads: Threads that read and write.
        queue_bytes: Bytes of pages that wait to be written. Further ones are dropped.
        direct: Whether to bypass the system's cache, if the file system supports that.

    Raises:
        ConfigError: If a size does not fit, `policy` is unknown, or the directory is in use by a process, also this
            one, has a store with other pages or of another version, or cannot be used. The message then has the path
            and the cause.
        OutOfMemoryError: If the index does not fit in memory.
    """

    def __new__(
        cls,
        path: str | os.PathLike[str],
        capacity_bytes: SupportsIndex,
        *,
        page_bytes: SupportsIndex,
        policy: Policy = "adaptive",
        threads: SupportsIndex = 2,
        queue_bytes: SupportsIndex = 268435456,
        direct: bool = True,
    ) -> FileStore: ...
    @property
    def path(self) -> str:
        """The directory, as it was given."""
    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
    @property
    def capacity_bytes(self) -> int:
        """Bytes of pages that the store was given."""
    @property
    def policy(self) -> Policy:
        """The name of the policy."""
    @property
    def direct(self) -> bool:
        """Whether pages pass the system's cache by."""
    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
    def exists(self, keys: KeysLike, *, will_use: bool = False) -> int:
        """Returns the number of keys before the first whose page is not in the store. Reads no file.

        Args:
            keys: A sequence of `bytes` objects of 32 bytes, or a uint8 array or tensor `[n, 32]` in host memory.
            will_use: Whether a prompt begins with these pages and will use them. Then this is a use of those that
                are there, and `put` without `parent` follows them. Otherwise the order of eviction stays as it is,
                however often one asks.

        Raises:
            ArgumentError: If a key does not have 32 bytes.
            TypeError: If `keys` is something else.
            StateError: If the store is closed, or belongs to the process that this one was forked from.
        """
    def find(self, keys: KeysLike) -> list[bool]:
        """Returns for each key whether its page is in the store. Reads no file, and records no use.

        Args:
            keys: As in `exists`.

        Raises:
            StateError: As in `exists`.
        """
    def touch(self, keys: KeysLike) -> list[bool]:
        """Records a use of pages that are in the store or being put, as `get` does. Reads no file.

        Args:
            keys: As in `exists`, in the order of the prompt. Those of other pages are ignored.

        Returns:
            What `find` returns.

        Raises:
            StateError: As in `exists`.
        """
    def get(self, keys: KeysLike, pages: TensorLike, *, rows: IndicesLike | None = None) -> StoreTransfer:
        """Reads pages. Returns at once.

        Do not use the memory before the transfer is done, which keeps it alive until then. The row of a page that is
        not found keeps its bytes.

        Args:
            keys: As in `exists`.
            pages: A tensor or array in host memory whose dimension 0 counts pages, with `page_bytes` contiguous bytes
                in each, of any dtype.
            rows: The rows of `pages` to use, one for each key and none twice. By default all, in order.

        Returns:
            A `StoreTransfer`.

        Raises:
            ArgumentError: If the numbers of keys and pages differ, or the pages have another size, are not contiguous,
                overlap, are read-only, or are not in host memory.
            IndexError: If there is no such row.
            StateError: As in `exists`.
        """
    def put(
        self,
        keys: KeysLike,
        pages: TensorLike,
        *,
        rows: IndicesLike | None = None,
        parent: bytes | None = None,
    ) -> StoreTransfer:
        """Writes pages. Returns at once: pages for which the queue has no room are dropped and counted, and so are
        the last pages of a prompt that does not fit into the store.

        Do not change the memory before the transfer is done, which keeps it alive until then. Pages that are
        stored already, or being written, are not written again.

        Args:
            keys: As in `exists`, in the order of the prompt.
            pages: As in `get`; they may be read-only.
            rows: As in `get`.
            parent: The key of the page before the first one; `b""` if it is the first of a prompt. The pages are
                as recent as that page, and evicted before it; if it is not there, they are stored only where there is
                room. By default calls between two look-ups (`exists`, `get`) count as the parts of one prompt,
                behind the pages that the first of these look-ups has found, as long as the store has room for all.

        Returns:
            A `StoreTransfer`.

        Raises:
            ArgumentError: As in `get`; or if `parent` does not have 0 or 32 bytes.
            IndexError: As in `get`.
            StateError: As in `exists`.
        """
    def remove(self, keys: KeysLike) -> int:
        """Removes pages, also for later processes. Those that are still being put are stored nevertheless. Writes to the
        index, without the GIL.

        Args:
            keys: As in `exists`.

        Returns:
            How many were there.

        Raises:
            StateError: As in `exists`.
        """
    def clear(self) -> int:
        """Removes all pages. Otherwise like `remove`."""
    def close(self) -> None:
        """Waits for the transfers in progress, without the GIL, and closes the files. Other calls raise from then on. May
        be called again, also after an interrupt.

        Raises:
            StateError: If the store belongs to the process that this one was forked from.
        """
    def stats(self) -> StoreStats:
        """Returns the statistics: `pages`, `capacity` and `queued` (to be written) in pages; `bytes` of pages; and since
        the store was opened `hits` and `misses` of `get`, `evicted`, `damaged` (pages, and entries of the index),
        `dropped` pages of `put` (for which there was no room), `errors` of the system, `read_bytes` and `written_bytes`.

        Raises:
            StateError: If the store belongs to the process that this one was forked from.
        """
    def __len__(self) -> int:
        """Return len(self)."""
    def __bool__(self) -> bool:
        """True if self else False"""
    def __enter__(self) -> Self: ...
    def __exit__(self, *_exception: object) -> None: ...

@final
class StoreTransfer:
    """Pages that a `FileStore` reads or writes. It can serve as the fence `after` of `TokenToKVPoolAllocator.free`."""

    def query(self) -> bool:
        """Returns whether all pages are done. Does not wait.

        Raises:
            StateError: If it belongs to the process that this one was forked from.
        """
    def wait(self, timeout: float | None = None) -> bool:
        """Waits until all pages are done, without the GIL. An interrupt ends the wait only.

        Args:
            timeout: Maximum wait in seconds; unlimited by default.

        Returns:
            Whether all pages are done.

        Raises:
            ArgumentError: If `timeout` is negative or NaN.
            StateError: As in `query`.
        """
    def cancel(self) -> None:
        """Gives up the pages that are not being read or written yet: they are done soon, and not present. The others go
        on: wait before the memory has another use.
        """
    @property
    def error(self) -> None:
        """Always `None`: a page that could not be read or written is not `present`, and `FileStore.stats()` counts it."""
    @property
    def present(self) -> list[bool]:
        """Whether each page is where it was to go: after a `get` in memory, after a `put` in the store. False for pages
        that are not done, and for one that another `put` is still writing.

        Raises:
            StateError: As in `query`.
        """
    @property
    def leading(self) -> int:
        """The number of present pages before the first that is not: the part of a prefix that can be used.

        Raises:
            StateError: As in `query`.
        """

@final
class Fetch:
    """A fetch of a prompt's pages from a store to the `HostTier` above it, made by `PrefixCache.fetch`, or of its units to an
    `ArenaHostTier`, made by `ArenaPrefixCache.fetch`. As long as it lives, it keeps what it fetched to or found in the host
    tier: drop it when the request has its lease and has loaded. It keeps nothing on the device.
    """

    @property
    def length(self) -> int:
        """Tokens whose pages have arrived from the store, in whole pages. `PrefixCache.match` finds how many a request can
        load.
        """
    def query(self) -> bool:
        """Returns whether the fetch is over. Does not wait."""
    def wait(self, timeout: float | None = None) -> bool:
        """Waits until the fetch is over, without the GIL. An interrupt ends the wait only.

        Args:
            timeout: Maximum wait in seconds; unlimited by default.

        Returns:
            Whether the fetch is over.

        Raises:
            ArgumentError: If `timeout` is negative or NaN.
        """
    def cancel(self) -> None:
        """Stops fetching. Pages that have arrived stay."""
    @property
    def error(self) -> None:
        """Always `None`: pages that a store does not bring are missing, and `length` does not count them."""

@final
class _StoreQueue:
    """The calls of a `Store`, for threads that answer them."""

    def __new__(cls) -> _StoreQueue: ...
    def next_read(self) -> _StoreCall | None:
        """Returns the next call of `find` or `read`, or `None` after a while without one. Waits without the GIL.

        Raises:
            StateError: Once it is closed, and in the child of a fork.
        """
    def next_write(self) -> _StoreCall | None:
        """Returns the next call of `write`. Otherwise like `next_read`."""
    def close(self) -> None:
        """Rejects further calls, and waits, without the GIL, until the earlier ones are answered.

        Raises:
            StateError: In the child of a fork.
        """
    def abandon(self) -> None:
        """Rejects further calls, and drops those that are not being answered."""

@final
class _StoreCall:
    """A call of a store. One that is dropped has failed."""

    @property
    def kind(self) -> Literal["find", "touch", "read", "write"] | None:
        """The requested operation: "find", "read" or "write"; `None` once the call is finished."""
    @property
    def keys(self) -> list[bytes]:
        """The keys of the pages."""
    @property
    def places(self) -> tuple[list[int], list[int]]:
        """The address and the bytes of each page in memory."""
    def finish(self, present: Sequence[bool]) -> None:
        """Finishes the call with an answer for each page: whether it was found, read or written. Pages without
        an answer were not.
        """

@final
class _PageLocking:
    """Page-locking in progress, for the thread that reports it."""

    def run(self) -> None:
        """Reports every step. The interpreter waits for this thread, so no further step begins after the main
        thread has ended.
        """

@final
class AddressSpace:
    """Records which byte ranges of some memory are taken. The lowest range that is long enough is handed out
    first.

    It hands out offsets from 0 on, and does not access the memory. Calls are atomic and thread-safe. Their
    cost is one step for each 64 gaps.

    Args:
        capacity: Bytes, below 2**63.
        alignment: Lengths are rounded up to a multiple of it, a power of two.
        strict: Whether an invalid free raises; otherwise it is dropped, counted and reported.

    Raises:
        ConfigError: If `capacity` is negative or too large, or `alignment` is no power of two.
    """

    def __new__(
        cls, capacity: SupportsIndex, *, alignment: SupportsIndex = 1, strict: bool = False
    ) -> AddressSpace: ...
    def take(self, size: SupportsIndex) -> int | None:
        """Takes a range.

        Args:
            size: Bytes, at least 1, which are rounded up to the alignment.

        Returns:
            Where it begins. `None` if no gap is long enough.

        Raises:
            ArgumentError: If `size` is below 1.
        """
    def take_many(self, size: SupportsIndex, count: SupportsIndex) -> list[int] | None:
        """Takes ranges of one size, or none of them.

        Args:
            size: Bytes of each, as in `take`.
            count: The number of ranges.

        Returns:
            Where they begin, in order. `None` if the gaps do not hold all of them.

        Raises:
            ArgumentError: If `size` is below 1, or `count` is negative.
            OutOfMemoryError: If there is not enough memory for the list.
        """
    def give_back_many(self, starts: Iterable[SupportsIndex], size: SupportsIndex) -> None:
        """Frees ranges of one size, each as `give_back` does.

        Args:
            starts: Where they begin.
            size: Bytes of each.

        Raises:
            ArgumentError: If a number is negative, or `size` is 0.
            IndexOwnershipError: If the space is strict and one of them cannot be freed. Nothing is changed.
        """
    def give_back(self, start: SupportsIndex, size: SupportsIndex) -> None:
        """Frees a range, all bytes of which are taken: one that was taken, several that touch, or a part.

        A range with a byte that is not taken is dropped as a whole, counted in `stats`, and reported.

        Raises:
            ArgumentError: If a number is negative, or `size` is 0.
            IndexOwnershipError: If the space is strict and the range cannot be freed. Nothing is changed.
        """
    def grow(self, size: SupportsIndex) -> None:
        """Adds bytes at the end.

        Args:
            size: Bytes, which are rounded up to the alignment.

        Raises:
            ArgumentError: If `size` is below 1, or the capacity would be 2**63 or more.
        """
    def rounded(self, size: SupportsIndex) -> int:
        """Returns `size`, rounded up to the alignment.

        Raises:
            ArgumentError: If `size` is negative, or an address cannot name as many bytes.
        """
    @property
    def capacity(self) -> int:
        """All bytes, taken or free."""
    @property
    def alignment(self) -> int:
        """The number of bytes that lengths are rounded up to a multiple of."""
    @property
    def in_use(self) -> int:
        """Bytes that are taken."""
    @property
    def available(self) -> int:
        """Bytes that are free."""
    def stats(self) -> dict[str, int]:
        """Returns the capacity, the bytes available and in use, the most bytes that were in use at once, the bytes of the
        longest gap, and the frees that were dropped.
        """
    def verify(self) -> None:
        """Raises `AssertionError` if the bookkeeping is not consistent."""

@final
class OffloadRequest:
    """The chunks that a request has used, for an `OffloadTable`. If it is passed to another table, or the table
    was cleared, the request starts over.
    """

    def __new__(cls) -> OffloadRequest: ...

@final
class Block:
    """A block of an engine, by vLLM's names: its number, how many requests use it, and its hash. `BlockQueue` makes it."""

    @property
    def block_id(self) -> int:
        """The number of the block, from 0 on; -1 at the ends of a queue."""
    @property
    def ref_cnt(self) -> int:
        """The number of requests that use it."""
    @ref_cnt.setter
    def ref_cnt(self, count: int) -> None:
        """The number of requests that use it."""
    @property
    def is_null(self) -> bool:
        """Whether this is a null block, which stands for no memory and is never freed."""
    @is_null.setter
    def is_null(self, is_null: bool) -> None:
        """Whether this is a null block, which stands for no memory and is never freed."""
    @property
    def pool(self) -> object:
        """The pool that the queue was made for; `None` if there was none, or it no longer exists."""
    @property
    def block_hash(self) -> bytes | None:
        """The hash of the block, as bytes; `None` if it has none."""
    @property
    def block_hash_num_tokens(self) -> int | None:
        """The number of tokens of the prompt that its hash covers."""
    def set_block_hash(self, block_hash: bytes, num_tokens: int | None = None) -> None:
        """Sets the hash of the block.

        Raises:
            AssertionError: If it has one.
        """
    def reset_hash(self) -> None:
        """Removes the hash of the block."""
    @property
    def prev_free_block(self) -> Block | None:
        """The free block before it, or the front of the queue; `None` if it is not free."""
    @property
    def next_free_block(self) -> Block | None:
        """The free block after it, or the end of the queue; `None` if it is not free."""

@final
class BlockQueue:
    """Free blocks in the order in which they are used again, and all blocks: the numbers from 0 to `count`, all free,
    the lowest in front.

    The methods with vLLM's names work like those of its `FreeKVCacheBlockQueue`; `alloc`, `free` and `retain`
    are calls for many blocks at once. Calls are atomic and thread-safe. A block of another queue is never
    added.

    Args:
        count: Blocks, below 2**31.
        pool: The pool of the engine, which blocks name. It is not kept alive.

    Raises:
        ConfigError: If `count` is 0, negative, or too large.
    """

    def __new__(cls, count: int, pool: object = None) -> BlockQueue: ...
    @property
    def blocks(self) -> list[Block]:
        """All blocks by their numbers, free or not: a new list."""
    @property
    def num_free_blocks(self) -> int:
        """The number of free blocks."""
    def evict_by(self, policy: str, block_size: int) -> None:
        """Takes free blocks with a hash by a policy of `PrefixCache` from now on, and not in the order of the queue: first the
        block that is worth least of those that no block with a hash follows, by what `add_prompt` says. Blocks without a
        hash are taken first, as before. Call this before the first block is taken.

        Args:
            policy: One of `PrefixCache`, such as "adaptive".
            block_size: Tokens in a block, below 2**20.

        Raises:
            ConfigError: If there is no such policy, or the block size is 0, negative, or too large.
        """
    def look_up(self, tokens: int, session: Namespace = None) -> None:
        """Tells the policy that a request has looked up a prompt: the time by which it counts. The request is compared to others
        by what `set_user` has said was not found, so this comes before the next `set_user`.

        Args:
            tokens: Tokens of the prompt.
            session: The session of which the request is a turn, by its name; `None` for none.
        """
    def set_user(self, session: Namespace, tokens: int = 0, found: int = 0) -> None:
        """Tells the policy which request uses blocks from now on, by `retain` and `remove`, and adds some, by `add_prompt`;
        at first it is none. Blocks that one session alone has used are those that its turns and its end can leave. How
        many tokens of a request were not found, compared to other requests, tells something of whether it will be
        continued.

        Args:
            session: The name of the session of which the request is a turn; `None` for none.
            tokens: Tokens of its prompt, in each of the steps that compute it; 0 in others, in which blocks that are added are as
                new as those before them.
            found: Those of them that were found in the beginning.
        """
    def add_prompt(
        self, blocks: Iterable[Block], before: Block | None = None, session: Namespace = None
    ) -> None:
        """Tells the policy that blocks follow each other in a prompt. Those it knows stay as they are; a block without a
        hash, and what is behind it, is left out.

        Args:
            blocks: The blocks.
            before: The block before them; `None` at the beginning of a prompt.
            session: The name of the session of which the request is a turn; `None` for none.

        Raises:
            IndexOwnershipError: If one is of another queue. Nothing is changed.
        """
    def end_turn(
        self,
        session: str | bytes | int,
        blocks: Iterable[Block],
        *,
        pause: str | None = None,
        is_last: bool = False,
    ) -> None:
        """Tells the policy that a turn of a session is over, before its blocks are freed. If it does not continue the turn
        before, what only this session has used of that is taken first, down to the block where they part.

        Args:
            session: The name of the session.
            blocks: The blocks of the turn; none to say only what follows.
            pause: What the session waits for, such as "bash" or "user". The policy "adaptive" learns how long pauses of
                each kind are, in tokens looked up. 256 kinds are told apart.
            is_last: Whether the session ends: what only it has used is taken first.

        Raises:
            ValueError: If a session that ends pauses. Nothing is changed.
            IndexOwnershipError: If a block is of another queue. Nothing is changed.
        """
    def add_waiting(
        self, blocks: Iterable[Block], *, is_next: bool = False, rank: tuple[int, int] = ...
    ) -> tuple[int, int, int]:
        """Adds a request to the engine's waiting queue, for which blocks were found: they are taken after all others with a hash,
        those of the last request first, until the request is removed. A block that several waiting requests need counts as
        of the first of them in the queue. Without a policy nothing changes.

        Args:
            blocks: The blocks, in the order of the prompt. Those that no prompt has named are left out.
            is_next: Whether the request is the next one, as after it was preempted, and not the last one.
            rank: Two numbers, such as a priority and a time of arrival, of a queue that is not served by arrival: the
                request is behind those of lower ranks, and is the next or the last one among those of the same.

        Returns:
            The request in the queue: the rank, and a number, which is lower for earlier requests of that rank.

        Raises:
            IndexOwnershipError: If a block is of another queue. Nothing is changed.
        """
    def extend_waiting(self, request: tuple[int, int, int], blocks: Iterable[Block]) -> None:
        """Records that blocks were found, too, for a request that is in the waiting queue: others have computed them.

        Args:
            request: What `add_waiting` returned. One that was removed needs nothing.
            blocks: The blocks, as in `add_waiting`. Those that were found before may be among them.

        Raises:
            IndexOwnershipError: If a block is of another queue. Nothing is changed.
        """
    def remove_waiting(self, request: tuple[int, int, int]) -> None:
        """Removes a request from the waiting queue, because it runs now or does not go on.

        Args:
            request: What `add_waiting` returned. One that is not in the queue changes nothing.
        """
    @property
    def fake_free_list_head(self) -> Block:
        """The object before the first free block."""
    @property
    def fake_free_list_tail(self) -> Block:
        """The object after the last free block."""
    def popleft(self) -> Block:
        """Takes the first free block, regardless of its reference count.

        Raises:
            ValueError: If none is free.
        """
    def popleft_n(self, n: int) -> list[Block]:
        """Takes the first `n` free blocks, regardless of their reference counts.

        Raises:
            ValueError: If there are fewer. Nothing is taken.
        """
    def remove(self, block: Block) -> None:
        """Removes a block from the queue.

        Raises:
            IndexOwnershipError: If it is of another queue.
            RuntimeError: If it is not free.
        """
    def append(self, block: Block) -> None:
        """Adds a block at the end, regardless of its reference count.

        Raises:
            IndexOwnershipError: If it is of another queue, or free already. Nothing is changed.
        """
    def append_n(self, blocks: Iterable[Block]) -> None:
        """Adds blocks at the end, in their order; the rest as `append`."""
    def prepend_n(self, blocks: Iterable[Block]) -> None:
        """Adds blocks in front, in their order; the rest as `append`."""
    def get_all_free_blocks(self) -> list[Block]:
        """Returns the free blocks, the first one in front."""
    def iter_blocks_after(self, cursor: Block | None) -> Iterator[Block]:
        """Returns an iterator over the free blocks after a block, or over all. It ends where the queue ends, or
        at a block that is taken meanwhile.
        """
    def alloc(
        self, count: int, cached: BlockMap, more_hashes: dict[int, set[bytes]], *, events: bool = False
    ) -> tuple[list[Block], list[bytes]]:
        """Takes the first free blocks, with a reference count of 1 each. They lose their hashes.

        Args:
            count: The number of blocks.
            cached: The map of the hashes.
            more_hashes: By the number of a block, a set of hashes that it has beside its own. Those of taken blocks are removed.
            events: Whether to return the hashes.

        Returns:
            The blocks, and the hashes that are no longer in the map, in order; none without `events`.

        Raises:
            ValueError: If there are fewer free blocks. Nothing is taken.
            AssertionError: If one of them is counted as used. Nothing is taken.
            TypeError: If `more_hashes` has an object that is not bytes. Nothing is taken.
        """
    def free(self, blocks: Iterable[_T], *, keep_hashed: bool = True) -> list[_T]:
        """Gives back one use of each block. Those that are no longer used are free: the ones with a hash at the end, the
        others in front, both in the order given. Null blocks are left out.

        A block that is not used is dropped, and logged.

        Args:
            blocks: The blocks, of any kind.
            keep_hashed: Whether a hash makes a difference.

        Returns:
            The objects that are not blocks of this queue, unchanged.
        """
    def retain(self, blocks: Iterable[_T]) -> list[_T]:
        """Adds one use of each block, and removes those that were free from the queue. Null blocks are left out.

        Returns:
            The objects that are not blocks of this queue, unchanged.

        Raises:
            RuntimeError: If a block is neither used nor free. Nothing is changed.
        """
    def count_unused(self, blocks: Iterable[object]) -> int:
        """Returns how many of these blocks no request uses, null blocks left out.

        Args:
            blocks: The blocks, of any kind.
        """
    def __len__(self) -> int:
        """Return len(self)."""

@final
class BlockHasher:
    """The hashes of blocks of tokens, each with the hash of the block before it, byte for byte as vLLM computes them for
    text: of `(parent, tokens, None)`, by one of its `prefix_caching_hash_algo`.

    Args:
        algorithm: "sha256", "sha256_cbor", "xxhash" or "xxhash_cbor".
        block_size: The tokens of a block, at least 1.

    Raises:
        ConfigError: If the algorithm is another, or `block_size` is below 1.
    """

    def __new__(cls, algorithm: str, block_size: SupportsIndex) -> Self: ...
    def hashes(self, tokens: list[int], start: int, parent: bytes) -> list[bytes] | None:
        """Returns the hashes of the full blocks of a prompt from `start` on.

        Args:
            tokens: The tokens of the whole prompt.
            start: The first token of the first block.
            parent: The hash of the block before it.

        Returns:
            A hash for each full block, `None` if what vLLM would compute is not known: if an element is no plain int
            from 0 to 2**31 - 1, the parent has more than 255 bytes, or a pickled block takes 64 KiB.
        """

@disjoint_base
class BlockMap:
    """An engine's blocks by their hashes: bytes of any length that end with the group of layers, 4 bytes, the highest
    first, as vLLM's `BlockHashWithGroupId` has them. Several blocks may have one hash.

    The methods with vLLM's names work like those of its `BlockHashToBlockMap`; `find`, `find_prefix` and
    `cache` are calls for groups and for many blocks. Calls are atomic and thread-safe.
    """

    def __new__(cls) -> Self: ...
    def get_one_block(self, key: bytes) -> BlockLike | None:
        """Returns the block that has had this hash for the longest time; `None` if no block has it."""
    def contain(self, key: bytes, block_id: int) -> bool:
        """Returns whether the block with a number has a hash."""
    def insert(self, key: bytes, block: BlockLike) -> None:
        """Gives a block a hash."""
    def pop(self, key: bytes, block_id: int) -> BlockLike | None:
        """Removes a hash of the block with a number, and returns the block; `None` if the block does not have
        it.
        """
    def clear(self) -> None:
        """Removes all hashes of all blocks."""
    def items(self) -> list[tuple[bytes, list[BlockLike]]]:
        """Returns pairs of a hash and the list of its blocks, those that got it first in front."""
    def find(self, block_hash: bytes, group_ids: Sequence[int]) -> list[BlockLike] | None:
        """Returns a block of each group that has a hash there; `None` unless each group has one.

        Args:
            block_hash: The hash without a group.
            group_ids: The groups.
        """
    def find_prefix(self, block_hashes: Iterable[bytes], group_ids: Sequence[int]) -> list[list[BlockLike]]:
        """Returns the blocks of each group for the hashes from the first on, up to one that a group has no block of.

        Args:
            block_hashes: The hashes without groups.
            group_ids: The groups.
        """
    def find_last_run(
        self,
        block_hashes: Iterable[bytes],
        group_ids: Sequence[int],
        need: int,
        *,
        period: int = 1,
        first: int = 0,
    ) -> tuple[int, list[list[BlockLike]]]:
        """Returns the last `need` hashes in a row of which each group has a block, as the position of the first and the
        blocks of each group. If there are none, returns those from position 0 on: fewer than `need`, perhaps none.

        Args:
            block_hashes: The hashes without groups.
            group_ids: The groups.
            need: How many blocks a window needs; 1 for a state.
            period: A run ends where the number of hashes up to its end is `first` and a multiple of this.
            first: As above.
        """
    def cache(
        self,
        blocks: Sequence[object],
        block_hashes: Sequence[bytes],
        group_id: int,
        num_tokens: int,
        block_size: int,
        block_mask: Sequence[bool] | None,
        more_hashes: dict[int, set[bytes]],
    ) -> bool:
        """Gives full blocks their hashes in a group. A block that has a hash of fewer tokens loses that and all others.

        Args:
            blocks: The blocks. Null blocks are left out.
            block_hashes: As many hashes without a group.
            group_id: The group.
            num_tokens: The tokens of the prompt that the first hash covers.
            block_size: The number of tokens that each further hash covers in addition.
            block_mask: Which of them to hash; all, if it is `None`.
            more_hashes: As in `BlockQueue.alloc`.

        Returns:
            False, and nothing is done, if there are objects that are not blocks of a `BlockQueue`.

        Raises:
            AssertionError: If a block has a hash of as many tokens, or the lengths differ. Nothing is done.
            OverflowError: If a block ends above 2**64 tokens. Nothing is done.
        """
    def __len__(self) -> int:
        """Return len(self)."""

@final
class OffloadTable:
    """Records the place of each chunk in host memory, for an engine that chooses the keys of chunks and moves
    them itself.

    Keys are bytes of any length, compared whole; their last four bytes are the group of layers, as vLLM's
    `OffloadKey` has it. Of the chunks that no transfer uses, those of the least recently active request are
    evicted first and, of one request, the end of its prompt before the beginning.

    `position`, where a call takes it, is called with each key and gives where the chunk ends in the prompt, or `None`.
    Arrays of places are int32 in host memory, in the order of the keys. Calls are atomic and thread-safe.

    Args:
        capacity: Places, below 2**31.
        store_threshold: How often a chunk is offered until it is stored. Up to 1, each is stored at once.
        max_tracked: Chunks whose offers are counted: those offered lately.
        events: Whether to record events for `take_events`.

    Raises:
        ConfigError: If `capacity` is 2**31 or more, or a number is negative.
    """

    def __new__(
        cls,
        capacity: SupportsIndex,
        *,
        store_threshold: SupportsIndex = 0,
        max_tracked: SupportsIndex = 64000,
        events: bool = False,
    ) -> OffloadTable: ...
    def find(self, key: bytes) -> bool | None:
        """Returns whether a chunk can be read: `None` if it is not here, False while it is being stored."""
    def place(self, key: bytes) -> tuple[int, int] | None:
        """Returns the place of a chunk, and how many loads read it, -1 while it is being stored. `None` if it is not here."""
    def offers(self, key: bytes) -> int:
        """Returns how often a chunk was offered, of those whose offers are counted."""
    def begin_store(
        self,
        keys: Iterable[bytes],
        request: OffloadRequest,
        position: Callable[[bytes], int | None] | None = None,
    ) -> tuple[list[bytes], npt.NDArray[np.int32], list[bytes]] | None:
        """Takes places for the chunks that are not here, and evicts other chunks, never one of `keys`, if
        necessary.

        Args:
            keys: Keys of the request, in the order of its prompt. A key that is listed again is left out.
            request: The request. It uses the chunks that it stores, and those of the others that can be read.
            position: As above.

        Returns:
            The keys to store, their places, and the keys that were evicted. `None` if there are not enough places;
            then nothing is evicted.

        Raises:
            StateError: If the request is finished, and has not used one of them before.
            TypeError: If a key is not bytes.
        """
    def end_store(self, keys: Iterable[bytes], success: bool = True) -> None:
        """Ends the store of chunks: they can be read or, if `success` is False, are removed. Chunks that are not
        being stored are left as they are.
        """
    def begin_load(
        self,
        keys: Iterable[bytes],
        request: OffloadRequest | None = None,
        position: Callable[[bytes], int | None] | None = None,
    ) -> npt.NDArray[np.int32]:
        """Keeps chunks until `end_load`.

        Args:
            keys: Their keys.
            request: The request that uses them; `None` for a copy that is no use.
            position: As above.

        Returns:
            Their places.

        Raises:
            StaleError: If a chunk is not here, or is being stored. Nothing is changed.
            StateError: As in `begin_store`.
            TypeError: As in `begin_store`.
        """
    def end_load(self, keys: Iterable[bytes]) -> None:
        """Ends a load of chunks.

        Raises:
            IndexOwnershipError: If a chunk is not loaded so often. Nothing is changed.
            TypeError: As in `begin_store`.
        """
    def touch(self, keys: Iterable[bytes]) -> None:
        """Records a use of chunks: the first of them is evicted last."""
    def finish(self, request: OffloadRequest) -> None:
        """Ends a request: the chunks that it used count as used now, the beginning of its prompt last."""
    def clear(self) -> None:
        """Removes all chunks, also those that transfers use."""
    def take_events(self) -> list[tuple[Literal["stored", "evicted", "failed"], list[bytes]]]:
        """Returns the changes since the last call, in order: pairs of "stored", "evicted" or "failed", and keys.
        A store that failed is left out if the chunk is here again.
        """
    def take_asked(self) -> list[int]:
        """Returns how many chunks each call of `begin_store` was to store, for the calls since the last time."""
    def take_skipped(self) -> int:
        """Returns how many chunks were not stored as they were not offered often enough, since the last time."""
    def stats(self) -> dict[Literal["capacity", "arriving", "loading", "idle"], int]:
        """Returns the statistics in chunks: `capacity`, `arriving` (being stored), `loading` and `idle`."""
    def verify(self) -> None:
        """Raises `AssertionError` if the bookkeeping is not consistent."""

@final
class OffloadTurn:
    """The turn of a request in an `OffloadOrder`."""

    def __new__(cls) -> OffloadTurn: ...

@final
class OffloadOrder:
    """The order in which offloaded chunks are evicted, and an object of the engine for each chunk.
    `OffloadTable` contains one; use this class if the engine keeps places and counts of loads itself.

    Keys and positions are those of `OffloadTable`.
    """

    def __new__(cls) -> OffloadOrder: ...
    def get(self, key: bytes) -> Any:
        """Returns the object of a chunk; `None` if it is not here."""
    def insert(self, key: bytes, chunk: object, turn: OffloadTurn, position: int | None = None) -> None:
        """Adds a chunk with its object, in the turn of the request if the position is known, or as the one used last. It
        is not evicted before `set_evictable`.
        """
    def remove(self, key: bytes) -> Any:
        """Removes a chunk, and returns its object.

        Raises:
            KeyError: If it is not here.
        """
    def set_evictable(self, key: bytes, is_evictable: bool) -> None:
        """Allows or prevents the eviction of a chunk.

        Raises:
            KeyError: If it is not here.
        """
    def touch(self, keys: Iterable[bytes]) -> None:
        """Records a use of chunks: the first of them is evicted last. Chunks that are not here are ignored."""
    def access(
        self, keys: Iterable[bytes], turn: OffloadTurn, position: Callable[[bytes], int | None]
    ) -> None:
        """Records that an active request uses chunks, which counts as its turn. Chunks that are not here, have
        no position, or were used later are left as they are.
        """
    def evict(self, count: int, spared: Iterable[bytes]) -> list[tuple[bytes, Any]] | None:
        """Removes the chunks that are first in the order, except the spared ones. Returns pairs of keys and
        objects. If there are not enough chunks, returns `None` and changes nothing.
        """
    def clear(self) -> None:
        """Removes all chunks."""
    def __len__(self) -> int:
        """Return len(self)."""
    def __bool__(self) -> bool:
        """True if self else False"""

def _store_keys(space: bytes, keys: Iterable[bytes]) -> list[bytes]:
    """Returns names of 32 bytes for a store, for chunks of one space: BLAKE3 of the length of the space as
    uint64 in little endian, the space, and the key.

    Args:
        space: Everything else that the bytes of a chunk depend on: the model, its dtype, the layout.
        keys: Bytes of any length.

    Raises:
        TypeError: If one of them is not bytes.
    """
