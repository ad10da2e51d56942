# Tensors are `torch.Tensor` where PyTorch is installed and `kvpool.Tensor` elsewhere; a type checker that finds no
# PyTorch takes them as `Any`.
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any, SupportsFloat, SupportsIndex, final

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import Self, disjoint_base

from kvpool._typing import (
    BufferStats,
    ChunkStats,
    CountedStats,
    DeviceLike,
    DTypeLike,
    Fence,
    IndicesLike,
    KVStats,
    PoolStats,
    SlotStats,
    StreamLike,
    TensorLike,
    UnitStats,
)
from kvpool.observe.leaks import ExpectBalanced, Leak

__all__ = [
    "_ERROR_CLASSES",
    "_STORAGE_DTYPES",
    "BatchPlan",
    "BatchPlanner",
    "Buffer",
    "BufferPool",
    "BufferStep",
    "Chunk",
    "ChunkCopy",
    "ChunkPool",
    "FreeGroup",
    "GDNPool",
    "HostPlan",
    "KVPool",
    "PagePool",
    "Pool",
    "ReqToTokenPool",
    "Tensor",
    "TokenToKVPoolAllocator",
    "_PageLocking",
    "_Workspace",
    "__version__",
    "_noted",
    "_pools",
    "_report_leaks_with",
    "_use_stream",
    "_zeros",
    "get_num_threads",
    "set_num_threads",
]

__version__: str
_STORAGE_DTYPES: dict[str, int]
_ERROR_CLASSES: list[str]

def get_num_threads() -> int:
    """How many threads one large copy on the CPU may use."""

def set_num_threads(threads: SupportsIndex) -> None:
    """Sets how many threads one large copy on the CPU may use.

    Copies below 4 MiB never use more than one.

    Args:
        threads: At least 1, or 0 for as many as the machine has, up to 16.

    Raises:
        ConfigError: If it is negative.
        TypeError: If it is no int.
    """

def _use_stream(handle: int | None) -> None:
    """Makes a CUDA stream, by its handle, the current one of this thread; `None` asks PyTorch again.

    Args:
        handle: A `cudaStream_t` as an int.
    """

def _noted() -> int:
    """How many calls were noted by pools that debug: later ones have this number or a greater one."""

def _pools() -> list[Pool]:
    """All pools of this process that are alive, in the order in which they were made."""

def _report_leaks_with(reporter: Callable[[], ModuleType]) -> None:
    """Registers a function that gives the module with `leaks` and `ExpectBalanced`.

    Args:
        reporter: Called for each report, so that the module is imported by the first.
    """

def _zeros(shape: Sequence[int], dtype: str, device: str = "cpu") -> torch.Tensor:
    """A tensor of zeros, as the pools hand them out: how tests reach every dtype that can cross.

    Args:
        shape: Extents.
        dtype: The name of a storage dtype, or "int32", "int64" or "bool".
        device: Where it is.
    """

@final
class Tensor:
    """A tensor over memory that kvpool owns, for frameworks that speak DLPack (NumPy, CuPy, JAX).

    It owns its memory, also after its pool is gone. It has no arithmetic: `numpy()`, `numpy.from_dlpack` or another
    framework's `from_dlpack` see the same bytes without a copy.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents, a tuple of ints."""
    @property
    def dtype(self) -> str:
        """The name of the element type."""
    @property
    def device(self) -> str:
        """Where the memory is, as PyTorch writes it."""
    def data_ptr(self) -> int:
        """The address of element 0."""
    def cpu(self) -> Tensor:
        """The tensor in host memory: itself, or a copy. Waits for the current stream of its device.

        Raises:
            OutOfMemoryError: If the host has no room for it.
        """
    def numpy(self) -> npt.NDArray[Any]:
        """A NumPy array over the same memory.

        8-bit floats and bfloat16 need the package `ml_dtypes`.

        Raises:
            ImportError: If NumPy, or `ml_dtypes` where it is needed, is not installed.
            BufferError: If the tensor is not in host memory.
        """
    def __len__(self) -> int:
        """Return len(self)."""
    def __dlpack_device__(self) -> tuple[int, int]:
        """The device as DLPack counts it: (type, ordinal)."""
    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """A DLPack capsule over the same memory, never a copy.

        Args:
            stream: The consumer's CUDA stream, whose later work comes after what was enqueued on the current stream:
                a handle, 1 or `None` for the legacy default stream, -1 for no order. Ignored in host memory.
            max_version: The newest (major, minor) that the caller reads. From (1, 0) on the capsule is versioned,
                else a legacy one.
            dl_device: The device that the caller wants; only the tensor's own will do.
            copy: `True` is refused.

        Raises:
            BufferError: If another device or a copy is asked for.
            TypeError: If an argument is not of its type.
        """

@disjoint_base
class Pool:
    """What all pools have in common: a name, numbers (`stats()`), and who holds what.

    Cannot be made itself: see `KVPool`, `TokenToKVPoolAllocator`, `ReqToTokenPool`, `GDNPool`, `ChunkPool`, `BufferPool`,
    `PagePool` and `Workspace`.
    """

    name: str
    def __init__(self, *_arguments: object, **_more: object) -> None: ...
    @property
    def unit(self) -> str:
        """What it hands out, such as "slot"."""
    @property
    def device(self) -> str:
        """Where its memory or its index tensors are, as PyTorch writes it."""
    @property
    def strict(self) -> bool:
        """Whether a bad free raises."""
    @property
    def debug(self) -> bool:
        """Whether it notes who takes and gives what: `debug=True`, or `KVPOOL_DEBUG=1` in the environment of the constructor."""
    def stats(self) -> PoolStats:
        """The numbers of this pool: `capacity`, `available`, `in_use` and `high_water` in units, `dropped_frees`, and `bytes` of
        memory; of the bookkeeping where the pool has no memory of its own.

        Of some classes there is more:

        - `TokenToKVPoolAllocator`: `free`, `released`, `fenced`, `shared` (with more than one owner) and `pending` slots (freed,
          but only the GPU knows which they are); `size`, `page_size`, and `device_bytes` of GPU memory for the tensors. Of a
          strict pool it leaves frees pending, as what is wrong with them is to be raised where slots are used.
        - `ChunkPool`: `registered` chunks, which are page-locked. Chunks whose copies are under way are in use.
        - `BufferPool`: `free_bytes`, `in_use_bytes`, `high_water_bytes`, `registered_bytes`; and instead of `dropped_frees`
          `stale_uses`, calls with a buffer that had been given back.
        - `Workspace`: no `dropped_frees`.
        - `KVPool`, which hands nothing out: `capacity`, `rows`, `layer_num`, `page_size` and `bytes`.
        """
    def used_on(self, tensor: object, stream: object | None = None) -> None:
        """Notes that work of others on a stream uses memory of a pool, so that it goes back to the driver after that work only,
        also when pool and tensors are gone before. Calls of kvpool note it themselves. A CUDA graph uses memory wherever it is
        replayed; `Tensor.record_stream` has no effect on memory that is not PyTorch's own.

        Args:
            tensor: A tensor over memory of a pool that a GPU reaches, on the GPU or page-locked.
            stream: A `torch.cuda.Stream`, or the handle of a stream; by default the current one of the tensor's device. It must
                live as long as the pool.

        Raises:
            ConfigError: If the memory is none of a pool that a GPU reaches, or is in host memory and no stream is named.
        """
    def leaks(self) -> list[Leak]:
        """Live units by owner and place in the program, the most first.

        A unit with several owners counts for each of them. What waits for a fence is not live.

        Returns:
            A list of `kvpool.Leak`: `owner`, `site`, `count`, `age_s` of the oldest in seconds, and `spans`, the units as
            (first, end).

        Raises:
            ConfigError: If the pool does not debug.
            TypeError: If the pool hands nothing out, or is a `Workspace`, of which nobody holds a part.
        """
    def expect_balanced(self) -> ExpectBalanced:
        """A context manager at whose end no more units may be live than at its begin. What the body raises goes on as it is.
        Where the pool debugs, a unit with several owners counts for each of them.

        Raises:
            IndexOwnershipError: At its end, if more are live: how many more and, where the pool debugs, a table of those that
                were taken within it.
            TypeError: If the pool hands nothing out.
        """
    @property
    def _hands_out(self) -> bool:
        """Whether it hands units out, which are free or in use."""
    @property
    def _unit_bytes(self) -> int | None:
        """Bytes of a unit; `None` where it has no memory, or units of several sizes."""
    def _occupancy(self) -> tuple[list[tuple[Any, ...]], list[int]]:
        """What stands in the pool: (first, end, state, bytes, holders) of each span, and lifetimes."""

@final
class KVPool(Pool):
    """K and V storage of every layer, in one region.

    Each buffer is `[rows, head_num, head_dim]`, zero at first. Usable slots are `1..=size`; slot 0 is the padding
    slot, written by padded tokens and never allocated. `rows` is `size + page_size`, rounded up to a multiple of 8,
    so that every slot that a paged allocator of the same `size` hands out is inside. In host memory a pool is there
    at once and costs what is touched, in pages of 2 MiB where the system gives them. Calls may come from any thread
    and are atomic among themselves; who writes to the tensors directly goes past that.

    On a GPU calls are enqueued on the current stream, which orders them, as one launch each; they allocate nothing and
    wait for nothing, unless the host is so far ahead that the memory through which its numbers go is all in use. Index
    tensors there are read by the kernel, never by the host: a slot outside of the pool is left
    out, and raised by a later call or by `check()`. Indices of the host are checked first, as on the CPU, and copied,
    so they cannot be captured into a CUDA graph; `set_kv_buffer` with tensors on the GPU can. The memory is zeroed on
    the stream that was current at construction.

    Args:
        size: Usable slots.
        layer_num: Layers.
        k_head_num: Heads of a key.
        k_head_dim: Elements of a key head.
        device: Where the buffers are.
        dtype: float32, float16 (default), bfloat16, float8_e4m3fn, float8_e5m2, int8 or uint8.
        v_head_num: Heads of a value, by default as keys.
        v_head_dim: Elements of a value head, by default as keys.
        pin_memory: Page-lock host memory where an NVIDIA driver is present, through a device that is in use or else the
            first; ordinary memory elsewhere. Page-locked memory is taken at once and whole.
        page_size: Slots in a page of the allocator.

    Raises:
        ConfigError: If a size is below 1, slots do not fit int32, or bytes overflow.
        TypeError: If `dtype` cannot be stored.
        OutOfMemoryError: If the memory cannot be had.
        BackendUnavailableError: If `device` cannot be used here.
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
    ) -> KVPool: ...
    @property
    def k_buffer(self) -> list[torch.Tensor]:
        """The keys of every layer: a list of `layer_num` tensors `[rows, k_head_num, k_head_dim]`, no copy."""
    @property
    def v_buffer(self) -> list[torch.Tensor]:
        """The values of every layer: a list of `layer_num` tensors `[rows, v_head_num, v_head_dim]`, no copy."""
    @property
    def size(self) -> int:
        """Usable slots."""
    @property
    def page_size(self) -> int:
        """Slots in a page."""
    @property
    def layer_num(self) -> int:
        """Layers."""
    @property
    def k_head_num(self) -> int:
        """Heads of a key."""
    @property
    def k_head_dim(self) -> int:
        """Elements of a key head."""
    @property
    def v_head_num(self) -> int:
        """Heads of a value."""
    @property
    def v_head_dim(self) -> int:
        """Elements of a value head."""
    @property
    def dtype(self) -> torch.dtype:
        """A `torch.dtype`, or its name where PyTorch is not installed."""
    def get_key_buffer(self, layer_id: SupportsIndex) -> torch.Tensor:
        """The keys of a layer, `[rows, k_head_num, k_head_dim]`, no copy.

        Raises:
            IndexError: If there is no such layer.
        """
    def get_value_buffer(self, layer_id: SupportsIndex) -> torch.Tensor:
        """The values of a layer, `[rows, v_head_num, v_head_dim]`, no copy.

        Raises:
            IndexError: If there is no such layer.
        """
    def get_kv_buffer(self, layer_id: SupportsIndex) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer, no copy.

        Raises:
            IndexError: If there is no such layer.
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
        """Writes `k` and `v` to the rows that `indices` names, in one call.

        Negative indices are skipped. When a row is named twice, the last of its values stays; of indices on a GPU, the
        row may end up with K of one and V of another, or with words of several in each. The values are read where they
        lie: any stride will do; nobody may resize their storage meanwhile. Values of another float dtype are converted
        as `Tensor.to` does, through float32 and rounded to nearest even. Long copies on the CPU release the GIL and use
        several threads.

        Args:
            layer_id: The layer.
            indices: `n` slots, int32 or int64, of any shape.
            k: Leading dimensions whose product is `n`, then `[k_head_num, k_head_dim]` or `[k_head_num * k_head_dim]`.
            v: The same for values.
            k_scale: Divides keys before they are converted to an 8-bit float; keys that are stored as they are stay
                as they are. A pool of another dtype takes only `None` or 1.
            v_scale: The same for values.

        Raises:
            IndexError: If a slot or the layer is outside of the pool. Nothing is written. Of indices on a GPU those
                outside are left out, and a later call raises this.
            ConfigError: If a shape, a device or a scale does not fit. Nothing is written.
            TypeError: If a dtype cannot be converted. Nothing is written.
        """
    def gather_kv(
        self,
        layer_id: SupportsIndex,
        indices: IndicesLike,
        out: tuple[TensorLike, TensorLike] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows that `indices` names.

        Args:
            layer_id: The layer.
            indices: `n` slots, int32 or int64, of any shape.
            out: A pair of contiguous tensors `[n, head_num, head_dim]` of the pool's dtype to write to.

        Returns:
            Keys `[n, k_head_num, k_head_dim]` and values `[n, v_head_num, v_head_dim]`, contiguous copies; `out` if
            it was given. On a GPU without `out` they are PyTorch's memory; without PyTorch `out` must be given.

        Raises:
            IndexError: If a slot or the layer is outside of the pool. The row of an index on a GPU that is outside is
                zero, and a later call raises this.
            ConfigError: If `out` does not fit.
            TypeError: If `out` has another dtype.
        """
    def move_kv(self, dst_indices: IndicesLike, src_indices: IndicesLike) -> None:
        """Moves row `src_indices[i]` to row `dst_indices[i]` in all layers, as if all were read before any is written.

        That holds for indices of the host. Of tensors on a GPU no row may be both written and read, or written twice:
        what it holds then is not defined.

        Args:
            dst_indices: `n` slots, int32 or int64. Of a slot that is named twice, the last move counts.
            src_indices: `n` slots.

        Raises:
            IndexError: If a slot is outside of the pool. Nothing is moved.
            ConfigError: If there are not as many of both.
        """
    def page_view(self, layer_id: SupportsIndex) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer as paged attention kernels take them, no copy.

        Returns:
            Two views `[num_pages, page_size, head_num, head_dim]`; page 0 is the padding page.

        Raises:
            IndexError: If there is no such layer.
        """
    def get_contiguous_buf_infos(self) -> tuple[list[int], list[int], list[int]]:
        """What a transfer engine registers, keys of all layers first, then values.

        Returns:
            Three lists of `2 * layer_num` ints: addresses, bytes of each buffer, bytes of one of its rows.
        """
    def check(self) -> None:
        """Raises what an earlier call on the current stream could not, since only the GPU knew its indices: waits for
        that stream. Does nothing on the CPU, where every call raises by itself.

        Raises:
            IndexError: If a slot was outside of the pool; its row was left out.
            DriverError: If the GPU has failed.
        """
    def mem_bytes(self) -> int:
        """Bytes of all buffers."""
    def _mem_bytes(self) -> int:
        """`mem_bytes()`, under the name that pymllm calls."""
    def stats(self) -> KVStats:
        """The numbers of this pool: `capacity`, `available`, `in_use` and `high_water` in units, `dropped_frees`, and `bytes` of
        memory; of the bookkeeping where the pool has no memory of its own.

        Of some classes there is more:

        - `TokenToKVPoolAllocator`: `free`, `released`, `fenced`, `shared` (with more than one owner) and `pending` slots (freed,
          but only the GPU knows which they are); `size`, `page_size`, and `device_bytes` of GPU memory for the tensors. Of a
          strict pool it leaves frees pending, as what is wrong with them is to be raised where slots are used.
        - `ChunkPool`: `registered` chunks, which are page-locked. Chunks whose copies are under way are in use.
        - `BufferPool`: `free_bytes`, `in_use_bytes`, `high_water_bytes`, `registered_bytes`; and instead of `dropped_frees`
          `stale_uses`, calls with a buffer that had been given back.
        - `Workspace`: no `dropped_frees`.
        - `KVPool`, which hands nothing out: `capacity`, `rows`, `layer_num`, `page_size` and `bytes`.
        """

@final
class TokenToKVPoolAllocator(Pool):
    """Hands out the token slots of a `KVPool` as int32 tensors and takes them back.

    With `need_sort` the lowest free slots come first, and freed ones are kept apart until the others cannot serve a
    request; without, the longest free come first. With `page_size > 1` slots leave and return as whole pages
    `[p * page_size, (p + 1) * page_size)`, numbered from 1. Slot 0 is never handed out.

    A slot that is out of range, the padding slot, not allocated, already free or named twice in one call is dropped,
    counted in `stats()` and reported once through the logger `kvpool`; with `strict` it raises instead, and nothing
    is changed. All calls are atomic and may come from any thread.

    On a GPU tensors are parts of a stage, to which the next slots are copied before anybody asks for them: `alloc` and
    `free` then make no driver call, and nothing waits but what says so. Tensors are valid on the stream that was
    current in `alloc`; another stream needs an event. Nothing is allocated on the device after construction, so tensors
    that are kept although their slots were freed take room from later ones: the stage holds twice the pool's slots.

    `free` knows the values of a tensor without asking the GPU if it is one from `alloc` (of this or another
    allocator) or of `ReqToTokenPool.req_to_token`, or a view of such a tensor with evenly spaced elements, and PyTorch
    counts no write to it (`_version`; for the table, none that `mark_modified` did not account for). What PyTorch does
    not count is not seen: writes through `.data`, through another framework's view, or by a kernel that it does not
    know of; do not write to these tensors in such a way, or free a copy. Every other tensor on a GPU, computed or of
    somebody else, is copied asynchronously on the current stream, and its slots return when the copy has landed. Until
    then `available_size` counts them, as whole pages of their own.

    Args:
        size: Slots; the last partial page is never handed out.
        device: Where the index tensors are.
        page_size: Slots in a page.
        need_sort: Lowest first, else first in, first out.
        strict: Whether a bad free raises.
        debug: Whether to note who takes and gives what, for `leaks` and reports; by default if `KVPOOL_DEBUG=1`.

    Raises:
        ConfigError: If `size` or `page_size` is below 1, or a slot would not fit int32.
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
        debug: bool | None = None,
    ) -> TokenToKVPoolAllocator: ...
    @property
    def size(self) -> int:
        """Slots asked for at construction."""
    @property
    def page_size(self) -> int:
        """Slots in a page."""
    @property
    def need_sort(self) -> bool:
        """Whether the lowest free slots are handed out first."""
    @property
    def free_slots(self) -> torch.Tensor:
        """The free slots (pages, with pages), in the order in which they are handed out: a new 1-D int32 tensor. Waits
        for values on their way.
        """
    @property
    def release_slots(self) -> torch.Tensor:
        """The freed slots (pages, with pages) that wait for a merge, lowest first: a new 1-D int32 tensor. Waits for
        values on their way.
        """
    def alloc(
        self, need_size: SupportsIndex, *, contiguous: bool = False, owner: str | int | None = None
    ) -> torch.Tensor | None:
        """Takes slots.

        Args:
            need_size: How many.
            contiguous: One ascending run, the lowest that fits.
            owner: A name for reports and `leaks`, a str or an int. Only noted where the pool debugs.

        Returns:
            A 1-D int32 tensor of `need_size` slots on the pool's device, over memory that it owns, or `None` when the
            pool is short. With pages, the rest of the last page belongs to the caller, too.

        Waits only where it would otherwise answer `None`, for freed slots whose values are on their way from a GPU, and where
        the GPU is far behind with slots that were handed out before.

        Raises:
            ConfigError: If `need_size` is negative.
            TypeError: If it is no int.
            OutOfMemoryError: If tensors that are still alive cover the stage. Nothing is taken.
            DriverError: If the driver refuses, or the stream is being captured. Nothing is taken.
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

        A prefix that ends inside a page is continued from `last_loc + 1`; then new pages are taken. Arguments that
        only a GPU knows are waited for.

        Args:
            prefix_lens: Tokens that each request has, ints `[bs]`.
            seq_lens: Tokens that it will have, ints `[bs]`.
            last_loc: The slot of its last token, ints `[bs]`; ignored where the prefix fills its pages.
            owner: As in `alloc`.

        Returns:
            A 1-D int32 tensor of `sum(seq_lens - prefix_lens)` slots, the requests concatenated, or `None` when the
            pool is short.

        Raises:
            ConfigError: If lengths differ, are negative or shrink, or `last_loc` does not end its prefix.
            IndexOwnershipError: If `last_loc` is in nobody's page, or two requests would continue the same page.
        """
    def alloc_decode(
        self, seq_lens: IndicesLike, last_loc: IndicesLike, *, owner: str | int | None = None
    ) -> torch.Tensor | None:
        """Takes one slot for each request of a decode step: `alloc_extend` from `seq_lens - 1` to `seq_lens`.

        Args:
            seq_lens: Tokens of each request with the new one, ints `[bs]`.
            last_loc: The slot of the token before the new one, ints `[bs]`.
            owner: As in `alloc`.

        Returns:
            A 1-D int32 tensor `[bs]`, or `None` when the pool is short.

        Raises:
            ConfigError: As `alloc_extend`.
            IndexOwnershipError: As `alloc_extend`.
        """
    def free(
        self, indices: IndicesLike, *, after: Fence | None = None, owner: str | int | None = None
    ) -> None:
        """Gives slots back; with pages, the whole page of every slot, once.

        The values are copied, so the caller may overwrite its tensor at once. Waits for nothing, unless more values
        are on their way from a GPU than the pool has slots. What a GPU alone knows is copied in the order of the
        current stream, and what is wrong with it is found by a later call.

        Args:
            indices: Slots, an int tensor or array of any shape or a sequence of ints.
            after: Something with `query() -> bool`, such as a `torch.cuda.Event`. The slots stay in use until it
                answers true; later calls ask it.
            owner: As in `alloc`; of a slot with several owners, the one of that name leaves, or else the first.

        Raises:
            IndexOwnershipError: If the pool is strict and a slot is not the caller's to free; of values that a GPU
                alone knew, a later call raises it, and none of them was freed.
            TypeError: If `indices` holds no ints, or `after` has no `query`.
        """
    def used_on(self, tensor: object, stream: object | None = None) -> None:
        """Notes that work on a stream reads slots that this allocator handed out, so that their memory is used again after that
        work only, also when the tensor is gone before. Calls of kvpool note it themselves; a kernel of others that reads the
        tensor on another stream than the one that was current in `alloc` needs this, as `Tensor.record_stream` has no
        effect on memory that is not PyTorch's own.

        Args:
            tensor: A tensor that `alloc` returned, or a view of one.
            stream: A `torch.cuda.Stream`, or the handle of a stream; the current one by default. It must live as long as the
                allocator.

        Raises:
            ConfigError: If the tensor is none of this allocator's.
        """
    def share(self, indices: IndicesLike, *, owner: str | int | None = None) -> None:
        """Adds an owner to slots, as a prefix cache does whose requests share it; with pages, to the page of every slot, once.
        Each owner frees once, and a slot returns with its last owner. A slot that is named twice in one call has two owners
        more, or gives up two of them in `free`; a page has one.

        Args:
            indices: Slots, an int tensor or array of any shape or a sequence of ints. A tensor that only a GPU knows is
                waited for.
            owner: As in `alloc`.

        Raises:
            IndexOwnershipError: If a slot is not in use; nothing is changed then.
        """
    def poison_freed(self, kv_pool: KVPool) -> None:
        """Has rows of a `KVPool` poisoned when their slots become free, so that reading one shows: NaN in floats, -1 in int8,
        255 in uint8, in all layers, written on the stream that is current then. Where the pool does not debug nothing
        happens.

        Args:
            kv_pool: The `KVPool` whose rows the slots are. It is not kept alive.
        """
    def free_group_begin(self) -> None:
        """Starts to collect frees, by value, of whichever thread. Groups nest. Frees behind a fence are not collected."""
    def free_group_end(self) -> None:
        """Ends a group; the outermost frees all that was collected as one call.

        Raises:
            ConfigError: If no group is open.
            IndexOwnershipError: As `free`; the group is closed, and nothing of it was freed.
        """
    def free_group(self) -> FreeGroup:
        """A context manager around `free_group_begin` and `free_group_end`."""
    def available_size(self) -> int:
        """Tokens that can be handed out, those counted in whose values are on their way from a GPU."""
    def clear(self) -> None:
        """Makes every slot free, closes groups and forgets fences. Tensors handed out before must not be used."""
    def merge_and_sort_free(self) -> None:
        """Merges the freed slots into those that are handed out next."""
    @staticmethod
    def runs(indices: IndicesLike) -> torch.Tensor:
        """The maximal ascending runs of `indices`, in order.

        Args:
            indices: An int tensor or array of any shape or a sequence of ints.

        Returns:
            An int32 tensor `[k, 2]` of (start, length) on the host: what DMA and transfer descriptors want.
        """
    def is_allocated(self, indices: IndicesLike) -> torch.Tensor:
        """Whether each slot is in use: live, or freed behind a fence that has not passed. Waits for values on their way.

        Args:
            indices: An int tensor or array of any shape or a sequence of ints.

        Returns:
            A 1-D bool tensor on the host; false for what is no slot.
        """
    def verify(self) -> None:
        """Checks that free and live slots make up the pool, and that no slot is in two states. Waits for values on their
        way.

        Raises:
            IndexOwnershipError: If not, with what is wrong.
        """
    def stats(self) -> SlotStats:
        """The numbers of this pool: `capacity`, `available`, `in_use` and `high_water` in units, `dropped_frees`, and `bytes` of
        memory; of the bookkeeping where the pool has no memory of its own.

        Of some classes there is more:

        - `TokenToKVPoolAllocator`: `free`, `released`, `fenced`, `shared` (with more than one owner) and `pending` slots (freed,
          but only the GPU knows which they are); `size`, `page_size`, and `device_bytes` of GPU memory for the tensors. Of a
          strict pool it leaves frees pending, as what is wrong with them is to be raised where slots are used.
        - `ChunkPool`: `registered` chunks, which are page-locked. Chunks whose copies are under way are in use.
        - `BufferPool`: `free_bytes`, `in_use_bytes`, `high_water_bytes`, `registered_bytes`; and instead of `dropped_frees`
          `stale_uses`, calls with a buffer that had been given back.
        - `Workspace`: no `dropped_frees`.
        - `KVPool`, which hands nothing out: `capacity`, `rows`, `layer_num`, `page_size` and `bytes`.
        """

@final
class FreeGroup:
    """What `TokenToKVPoolAllocator.free_group` returns: frees within it are released together at its end."""

    def __enter__(self) -> None: ...
    def __exit__(self, *_exception: object) -> None:
        """Ends the group. What the body raised goes on; what the end finds wrong with its slots is logged then."""

@final
class ReqToTokenPool(Pool):
    """The table `req_to_token[request, position] -> slot`. It does not track sequence lengths.

    Row 0 is the padding row, at which padded rows of a CUDA graph point: the table has `max_reqs + 1` rows, and
    `1..=max_reqs` are handed out, the longest free first. Rows are zero when they are handed out.

    On a GPU all work is enqueued on the current stream and nothing waits but what says so. The host keeps a copy of the
    table, so that slots read from it can be freed without asking the GPU. What `write` and `free` do is in the copy at
    once, or, for values that only the GPU knows, when the kernel has told what it wrote. Writes of PyTorch to
    `req_to_token` are seen by its count of them (`_version`), and make the whole copy doubtful until `mark_modified` or
    `clear`; writes of other kernels are not seen: say them with `mark_modified(rows)`.

    Args:
        max_reqs: Requests that can be in it at once.
        max_context_len: Columns.
        device: Where the table is.
        padding_row: `False` gives exactly `max_reqs` rows, the first being 0.
        strict: Whether a bad free raises; otherwise it is dropped, counted and reported.
        debug: Whether to note who takes and gives what, for `leaks` and reports; by default if `KVPOOL_DEBUG=1`.

    Raises:
        ConfigError: If a size is below 1 or its bytes overflow.
        OutOfMemoryError: If the memory cannot be had.
        BackendUnavailableError: If `device` cannot be used here.
    """

    def __new__(
        cls,
        max_reqs: SupportsIndex,
        max_context_len: SupportsIndex,
        device: DeviceLike = "cuda",
        *,
        padding_row: bool = True,
        strict: bool = False,
        debug: bool | None = None,
    ) -> ReqToTokenPool: ...
    @property
    def req_to_token(self) -> torch.Tensor:
        """The table: int32 `[max_reqs + 1, max_context_len]` (`max_reqs` rows without a padding row), no copy."""
    @property
    def size(self) -> int:
        """Requests that can be in it at once."""
    @property
    def max_context_len(self) -> int:
        """Columns."""
    @property
    def padding_row(self) -> bool:
        """Whether row 0 is nobody's."""
    def alloc(self, n: SupportsIndex = 1, *, owner: str | int | None = None) -> list[int] | None:
        """Takes rows.

        Args:
            n: How many.

        Returns:
            A list of `n` ints, or `None` when the pool is short.

        Raises:
            ConfigError: If `n` is negative.
        """
    def free(self, slot_or_slots: SupportsIndex | IndicesLike, *, owner: str | int | None = None) -> None:
        """Gives a row or several back, and zeroes what was written to them.

        Args:
            slot_or_slots: An int, or ints in a tensor, an array or a sequence. A tensor that only a GPU knows is
                waited for.

        Raises:
            IndexOwnershipError: If the pool is strict and a row is not the caller's to free.
        """
    def write(self, index: tuple[Any, Any], values: SupportsIndex | IndicesLike) -> None:
        """Writes slots to the table; on a GPU in one launch.

        Of a place that is named twice the last value stays, unless only the GPU knows the places: then any may.

        Args:
            index: `(row, slice)`, `(row, column)`, or `(rows, columns)` with one column for each row.
            values: One slot for each place, int32 or int64, or a single one for all places.

        Raises:
            IndexError: If a place is outside of the table. Nothing is written then. A place that only the GPU knows
                is left out, and a later call raises it.
            ConfigError: If there are not as many values as places.
            DriverError: If numbers of the host would have to be copied while the stream is being captured.
        """
    def read(self, row: SupportsIndex, length: SupportsIndex) -> torch.Tensor:
        """The first `length` slots of a row: an int32 tensor `[length]`, a view of the table.

        Raises:
            IndexError: If they are outside of the table.
        """
    def build_kv_indices(
        self, req_pool_indices: IndicesLike, kv_indptr: IndicesLike, kv_indices: TensorLike
    ) -> None:
        """Puts the slots of some requests one after the other, as FlashInfer's `kv_indices` has them.

        Request `i` fills `kv_indices[kv_indptr[i]:kv_indptr[i + 1]]` with the first slots of its row. On a GPU it is
        one launch on the current stream, and what only the GPU knows to be wrong is left out and raised by a later
        call.

        Args:
            req_pool_indices: Rows, int32 or int64 `[bs]`.
            kv_indptr: Where each request begins and ends, int32 or int64 `[bs + 1]`.
            kv_indices: int32, contiguous, on the table's device: written to.

        Raises:
            IndexError: If a row is not in the table, or a request is longer than a row or than `kv_indices`.
            ConfigError: If a length or a device does not fit.
            TypeError: If `kv_indices` is no int32 tensor.
        """
    def mark_modified(self, rows: SupportsIndex | IndicesLike) -> None:
        """Says that these rows of the tensor were written by somebody else: they are zeroed whole when they are freed, and
        until then the host asks the GPU for their values. All writes of PyTorch so far are accounted for then.

        Args:
            rows: An int, or ints in a tensor, an array or a sequence. A tensor that only a GPU knows is waited for.

        Raises:
            IndexError: If a row is outside of the table.
        """
    def available_size(self) -> int:
        """Rows that can be handed out now."""
    def clear(self) -> None:
        """Makes every row free, and zeroes what was written through this class, marked as modified or, on a GPU, counted
        by PyTorch.
        """
    def stats(self) -> CountedStats:
        """The numbers of this pool: `capacity`, `available`, `in_use` and `high_water` in units, `dropped_frees`, and `bytes` of
        memory; of the bookkeeping where the pool has no memory of its own.

        Of some classes there is more:

        - `TokenToKVPoolAllocator`: `free`, `released`, `fenced`, `shared` (with more than one owner) and `pending` slots (freed,
          but only the GPU knows which they are); `size`, `page_size`, and `device_bytes` of GPU memory for the tensors. Of a
          strict pool it leaves frees pending, as what is wrong with them is to be raised where slots are used.
        - `ChunkPool`: `registered` chunks, which are page-locked. Chunks whose copies are under way are in use.
        - `BufferPool`: `free_bytes`, `in_use_bytes`, `high_water_bytes`, `registered_bytes`; and instead of `dropped_frees`
          `stale_uses`, calls with a buffer that had been given back.
        - `Workspace`: no `dropped_frees`.
        - `KVPool`, which hands nothing out: `capacity`, `rows`, `layer_num`, `page_size` and `bytes`.
        """

@final
class BatchPlanner:
    """Plans the steps of a scheduler: one call takes the slots of a whole batch, writes the request table and makes the
    metadata that attention kernels read.

    The planner knows how many tokens of each request have slots, and owns these: `seq_lens` are always lengths with the new
    tokens, and what does not fit what a request has is an error. Rows come from `req_to_token_pool.alloc`; `finish` gives
    them back with their slots. A row that was freed and taken again by somebody else begins anew. `extend` and `decode` are
    all or nothing: `None` when the pool is short, and an error, leave everything as it was.

    A step is one pass on the host, whose cost grows with the new tokens and the requests; only `kv_indices` is written whole
    every time. On a GPU it is one launch on the current stream, behind a copy to the device where the batch is large, and
    nothing waits, unless the host is many large steps ahead; a plan on another stream than the one before must be ordered
    after whatever still reads that, by an event. All calls are atomic.

    Args:
        req_to_token_pool: The request table, which nobody else writes in rows that the planner uses.
        allocator: Where slots come from, on the same device. Its page size is that of the metadata.
        max_batch_size: Requests in a batch, padding counted.
        max_tokens: New tokens in a batch, padding counted.
        kv_indices: Whether FlashInfer's `kv_indices` are made: memory for `max_batch_size` requests of full length.
        block_table: Whether the block table of FlashAttention and vLLM is made: as much memory again.

    Raises:
        ConfigError: If a size is below 1, or the pools are on different devices.
        OutOfMemoryError: If the memory cannot be had.
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
        """Where slots come from."""
    @property
    def max_batch_size(self) -> int:
        """Requests in a batch, at most."""
    @property
    def max_tokens(self) -> int:
        """New tokens in a batch, at most."""
    @property
    def page_size(self) -> int:
        """Slots in a page."""
    @property
    def device(self) -> str:
        """Where the tensors are, as PyTorch writes it."""
    def extend(
        self,
        req_pool_indices: SupportsIndex | IndicesLike,
        prefix_lens: SupportsIndex | IndicesLike,
        seq_lens: SupportsIndex | IndicesLike,
        prefix_slots: Sequence[IndicesLike | None] | None = None,
    ) -> BatchPlan | None:
        """Takes the slots for positions `[prefix, seq)` of each request: prefill, chunk by chunk or at once.

        Args:
            req_pool_indices: Rows, ints `[bs]`.
            prefix_lens: Tokens that each request has, ints `[bs]`: 0 for a new one, or the length of its cached prefix.
            seq_lens: Tokens that it will have, ints `[bs]`.
            prefix_slots: Slots of cached prefixes: `None`, or a sequence with one entry for each request, `None` or ints.
                They must be in use, and fill whole pages. The request becomes one more owner of them (see
                `TokenToKVPoolAllocator.share`); the caller stays one.

        Returns:
            A `BatchPlan`, or `None` when the pool is short. The slots are in the allocator's order, those of a partly used
            page first.

        Waits only where it would otherwise answer `None`, for freed slots whose values are on their way from a GPU, and for
        arguments that only a GPU knows.

        Raises:
            ConfigError: If lengths differ or do not fit what a request has, a row is named twice, cached slots do not fill
                their prefix or their pages, or the batch is larger than the planner's.
            IndexError: If a row or a length is outside of the table.
            IndexOwnershipError: If a row was not taken, a cached slot is not in use, or somebody else freed the page that a
                request goes on filling.
            DriverError: If the driver refuses, or the stream is being captured.
        """
    def decode(
        self,
        req_pool_indices: SupportsIndex | IndicesLike,
        seq_lens: SupportsIndex | IndicesLike,
        tokens_per_req: SupportsIndex = 1,
        *,
        pad_to: SupportsIndex | IndicesLike | None = None,
    ) -> BatchPlan | None:
        """Takes the slots for the next tokens of each request: `extend` from `seq_lens - tokens_per_req` to `seq_lens`.

        Args:
            req_pool_indices: Rows, ints `[bs]`.
            seq_lens: Tokens of each request with the new ones, ints `[bs]`.
            tokens_per_req: New tokens of each request; more than one for speculative decoding, after which `truncate` gives
                back those that were rejected.
            pad_to: Batch sizes of CUDA graphs, an int or a sequence: the batch is filled up to the least that it fits. A
                padding request points at row 0, has `tokens_per_req` tokens at slot 0 (-1 in `slot_mapping`), all of them new,
                and the padding page.

        Returns:
            A `BatchPlan`, or `None` when the pool is short.

        Raises:
            ConfigError: As `extend`; if the batch is larger than all of `pad_to`, or the table has no padding row.
            IndexError: As `extend`.
            IndexOwnershipError: As `extend`.
            DriverError: As `extend`.
        """
    def truncate(
        self,
        req_pool_indices: SupportsIndex | IndicesLike,
        seq_lens: SupportsIndex | IndicesLike,
        *,
        after: Fence | None = None,
    ) -> None:
        """Shrinks requests, such as by tokens that were rejected. What the table holds beyond stays there, and is nobody's.

        Args:
            req_pool_indices: Rows, ints `[bs]`.
            seq_lens: Tokens that each keeps, ints `[bs]`.
            after: As in `TokenToKVPoolAllocator.free`: the slots stay in use until its `query()` answers true.

        Raises:
            ConfigError: If a request has less, or a row is named twice; nothing is changed then.
            IndexError: If a row is outside of the table.
            IndexOwnershipError: If a row was not taken, or a request would end within a page that has another owner, maybe
                one behind a fence, which later tokens would overwrite; nothing is changed then. If the allocator is strict,
                and somebody else freed a slot of the planner; all others were given back then.
        """
    def finish(
        self,
        req_pool_indices: SupportsIndex | IndicesLike,
        seq_lens: SupportsIndex | IndicesLike | None = None,
        *,
        after: Fence | None = None,
    ) -> None:
        """Gives back the slots and the rows of requests; the rows are zeroed.

        Args:
            req_pool_indices: Rows, ints `[bs]`.
            seq_lens: Tokens of each that have slots, ints `[bs]`; only checked.
            after: As in `TokenToKVPoolAllocator.free`: the slots stay in use until its `query()` answers true.

        Raises:
            ConfigError: If a length is not what the request has, or a row is named twice; nothing is changed then.
            IndexError: If a row is outside of the table.
            IndexOwnershipError: If a row was not taken; nothing is changed then. If the allocator is strict, and somebody
                else freed a slot of the planner; all else was given back then.
            DriverError: If the driver refuses to zero the rows; they are given back all the same.
        """
    def fork(
        self, src: SupportsIndex, dst: SupportsIndex, seq_len: SupportsIndex
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Gives a request that has nothing the first tokens of another, as parallel sampling does. Full pages are shared, each
        request being an owner; a partly used one is replaced by a new page, to which the caller copies.

        Args:
            src: The row of the request that has the tokens.
            dst: The row of the other.
            seq_len: How many tokens.

        Returns:
            `(dst_slots, src_slots)`, 1-D int32 tensors of the same length for `KVPool.move_kv`, empty where nothing is to be
            copied (always with pages of one slot); or `None` when there is no page for it.

        Raises:
            ConfigError: If `src` has less, `dst` has something, or they are the same.
            IndexError: If a row is outside of the table.
            IndexOwnershipError: If a row was not taken, or somebody else freed a page of `src`.
            DriverError: If the driver refuses, or the stream is being captured.
        """
    def seq_len(self, req_pool_idx: SupportsIndex) -> int:
        """Tokens of a request that have slots.

        Raises:
            IndexError: If the row is outside of the table.
            IndexOwnershipError: If it was not taken.
        """
    def stats(self) -> dict[str, int]:
        """The numbers of this planner: `requests` that have slots, their `tokens`, `plans` so far; `max_batch_size`,
        `max_tokens`, and `bytes` of the arrays on its device.
        """

@final
class BatchPlan:
    """A step that a `BatchPlanner` planned: what attention kernels and samplers read.

    The tensors are int32 (`slot_mapping` int64) views of the planner's memory, on its device and at the same addresses in
    every plan, valid on the stream that was current then; the next plan of the planner overwrites them. After it they cannot
    be asked for here any more (`StaleBufferError`). `B` is the padded number of requests, `T` that of new tokens.
    """

    @property
    def out_cache_loc(self) -> torch.Tensor:
        """Slots of the new tokens, `[T]`, one request after the other; 0 for padding. SGLang's name."""
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
        """Tokens of each request with the new ones, `[B]`."""
    @property
    def cache_seqlens(self) -> torch.Tensor:
        """The same tensor as `seq_lens`, by FlashAttention's name (`flash_attn_with_kvcache`)."""
    @property
    def qo_indptr(self) -> torch.Tensor:
        """Where the new tokens of each request begin, and how many there are in all, `[B + 1]` (FlashInfer)."""
    @property
    def cu_seqlens_q(self) -> torch.Tensor:
        """The same tensor as `qo_indptr`, by FlashAttention's name (`flash_attn_varlen_func`)."""
    @property
    def kv_indptr(self) -> torch.Tensor:
        """Where the pages of each request begin in `kv_indices`, and how many there are in all, `[B + 1]` (FlashInfer)."""
    @property
    def kv_indices(self) -> torch.Tensor | None:
        """The pages of all requests, one after the other, `[kv_indptr[-1]]` (FlashInfer); with pages of one slot, their slots.
        `None` if the planner does not make it.
        """
    @property
    def kv_last_page_len(self) -> torch.Tensor:
        """Tokens in the last page of each request, `[B]`, 1 to `page_size` (FlashInfer); 0 for a request without tokens."""
    @property
    def block_table(self) -> torch.Tensor | None:
        """The pages of each request, `[B, ceil(max_context_len / page_size)]`, zeros after them (FlashAttention and vLLM).
        `None` if the planner does not make it.
        """
    @property
    def host(self) -> HostPlan:
        """The same arrays on the host."""
    @property
    def batch_size(self) -> int:
        """Requests, padding not counted."""
    @property
    def padded_batch_size(self) -> int:
        """Requests with padding: `B`."""
    @property
    def num_tokens(self) -> int:
        """New tokens, padding not counted."""
    @property
    def padded_num_tokens(self) -> int:
        """New tokens with those of padding: `T`."""
    @property
    def max_seqlen_q(self) -> int:
        """The most new tokens of a request, by FlashAttention's name."""
    @property
    def max_seqlen_k(self) -> int:
        """The most tokens of a request, by FlashAttention's name."""

@final
class HostPlan:
    """The arrays of a `BatchPlan` on the host: read-only NumPy arrays, in the planner's memory, which the next plan overwrites.

    On a GPU `kv_indices` and `block_table` are made when they are asked for, which is an error (`StaleBufferError`) after
    `truncate`, `finish` or `fork`. Without NumPy they are `kvpool.Tensor`.
    """

    @property
    def out_cache_loc(self) -> npt.NDArray[np.int32]:
        """As `BatchPlan.out_cache_loc`."""
    @property
    def positions(self) -> npt.NDArray[np.int32]:
        """As `BatchPlan.positions`."""
    @property
    def slot_mapping(self) -> npt.NDArray[np.int64]:
        """As `BatchPlan.slot_mapping`."""
    @property
    def req_pool_indices(self) -> npt.NDArray[np.int32]:
        """As `BatchPlan.req_pool_indices`."""
    @property
    def seq_lens(self) -> npt.NDArray[np.int32]:
        """As `BatchPlan.seq_lens`."""
    @property
    def cache_seqlens(self) -> npt.NDArray[np.int32]:
        """As `BatchPlan.cache_seqlens`."""
    @property
    def qo_indptr(self) -> npt.NDArray[np.int32]:
        """As `BatchPlan.qo_indptr`."""
    @property
    def cu_seqlens_q(self) -> npt.NDArray[np.int32]:
        """As `BatchPlan.cu_seqlens_q`."""
    @property
    def kv_indptr(self) -> npt.NDArray[np.int32]:
        """As `BatchPlan.kv_indptr`."""
    @property
    def kv_indices(self) -> npt.NDArray[np.int32] | None:
        """As `BatchPlan.kv_indices`."""
    @property
    def kv_last_page_len(self) -> npt.NDArray[np.int32]:
        """As `BatchPlan.kv_last_page_len`."""
    @property
    def block_table(self) -> npt.NDArray[np.int32] | None:
        """As `BatchPlan.block_table`."""

@final
class GDNPool(Pool):
    """States of Gated DeltaNet layers, one for each request, indexed like the rows of `ReqToTokenPool`.

    Index 0 is padding. Working slots are `1..=max_reqs`; track slots, which hold snapshots for a prefix cache, follow
    in `[max_reqs + 1, max_reqs + 1 + max_track_slots)`. Both states are zero at first and lie in one region.

    On a GPU calls are enqueued on the current stream as one launch each, without a temporary; they allocate nothing and
    wait for nothing, unless the host is so far ahead that the memory through which its numbers go is all in use. Index
    tensors there are read by the kernel: a slot outside of the pool is left out, and raised by
    a later call.

    Args:
        max_reqs: Working slots.
        num_gdn_layers: Linear-attention layers.
        num_v_heads: Value heads.
        head_k_dim: Elements of a key head.
        head_v_dim: Elements of a value head.
        conv_dim: Channels of the causal convolution.
        conv_kernel_size: Taps of the causal convolution; the state holds one less.
        device: Where the states are.
        dtype: Of the convolution state, bfloat16 by default; the recurrent state is float32.
        max_track_slots: Snapshots.
        strict: Whether a bad free of a track slot raises; otherwise it is dropped, counted and reported.

    Raises:
        ConfigError: If a size is below 1 (`max_track_slots` below 0), or bytes overflow.
        TypeError: If `dtype` cannot be stored.
        OutOfMemoryError: If the memory cannot be had.
        BackendUnavailableError: If `device` cannot be used here.
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
        """float32 `[num_gdn_layers, pool_size, num_v_heads, head_v_dim, head_k_dim]`, no copy. V stands before K, as
        FlashInfer's GDN kernels take it.
        """
    @property
    def conv_state(self) -> torch.Tensor:
        """`dtype` `[num_gdn_layers, pool_size, conv_dim, conv_kernel_size - 1]`, no copy."""
    @property
    def pool_size(self) -> int:
        """Slots of every layer: padding, working and track slots."""
    @property
    def max_reqs(self) -> int:
        """Working slots."""
    @property
    def num_gdn_layers(self) -> int:
        """Linear-attention layers."""
    @property
    def num_v_heads(self) -> int:
        """Value heads."""
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
        """Snapshots."""
    @property
    def dtype(self) -> torch.dtype:
        """Of the convolution state: a `torch.dtype`, or its name where PyTorch is not installed."""
    def get_layer_state(self, i: SupportsIndex) -> tuple[torch.Tensor, torch.Tensor]:
        """Recurrent and convolution state of a layer: the two tensors without their first dimension, no copy.

        Raises:
            IndexError: If there is no such layer.
        """
    def reset_states(self, indices: SupportsIndex | IndicesLike) -> None:
        """Zeroes both states of some slots, in all layers.

        Args:
            indices: An int, or ints in a tensor, an array or a sequence.

        Raises:
            IndexError: If a slot is outside of the pool. Nothing is zeroed.
        """
    def copy_states(self, src: SupportsIndex | IndicesLike, dst: SupportsIndex | IndicesLike) -> None:
        """Copies both states of slot `src[i]` to slot `dst[i]`, in all layers, as if all were read before any is
        written, and without a temporary.

        That holds for indices of the host. Of tensors on a GPU no slot may be both written and read, or written twice:
        what it holds then is not defined.

        Args:
            src: An int, or ints in a tensor, an array or a sequence.
            dst: As many. Of a slot that is named twice, the last copy counts.

        Raises:
            IndexError: If a slot is outside of the pool. Nothing is copied.
            ConfigError: If there are not as many of both.
        """
    def alloc_track_slot(self, *, owner: str | int | None = None) -> int | None:
        """Takes a track slot, the longest free first, or returns `None`. Its states are what they were."""
    def free_track_slot(self, slot: SupportsIndex, *, owner: str | int | None = None) -> None:
        """Gives a track slot back.

        Raises:
            IndexOwnershipError: If the pool is strict and it is not the caller's to free.
        """
    def mem_bytes(self) -> int:
        """Bytes of both states."""
    def stats(self) -> CountedStats:
        """The numbers of this pool: `capacity`, `available`, `in_use` and `high_water` in units, `dropped_frees`, and `bytes` of
        memory; of the bookkeeping where the pool has no memory of its own.

        Of some classes there is more:

        - `TokenToKVPoolAllocator`: `free`, `released`, `fenced`, `shared` (with more than one owner) and `pending` slots (freed,
          but only the GPU knows which they are); `size`, `page_size`, and `device_bytes` of GPU memory for the tensors. Of a
          strict pool it leaves frees pending, as what is wrong with them is to be raised where slots are used.
        - `ChunkPool`: `registered` chunks, which are page-locked. Chunks whose copies are under way are in use.
        - `BufferPool`: `free_bytes`, `in_use_bytes`, `high_water_bytes`, `registered_bytes`; and instead of `dropped_frees`
          `stale_uses`, calls with a buffer that had been given back.
        - `Workspace`: no `dropped_frees`.
        - `KVPool`, which hands nothing out: `capacity`, `rows`, `layer_num`, `page_size` and `bytes`.
        """

@final
class PagePool(Pool):
    """Fixed-size pages of elements, numbered from 0, with a free list.

    Pages are zero at first and not zeroed again. The pool never shrinks; where it grows, no page moves. On a GPU pages are
    valid on the stream that was current when their memory was made, by the constructor or by an `alloc` that grew the
    pool; another stream needs an event.

    Args:
        page_size: Elements of a page.
        initial_pages: Pages at first.
        dtype: Of the elements, float32 by default.
        device: Where the pages are.
        grow: Pages that `alloc` adds when all are in use; 0 for none.
        strict: Whether a bad free raises; otherwise it is dropped, counted and reported.
        debug: Whether to note who takes and gives what, for `leaks` and reports; by default if `KVPOOL_DEBUG=1`.

    Raises:
        ConfigError: If `page_size` is below 1, another number below 0, or bytes overflow.
        TypeError: If `dtype` cannot be stored.
        OutOfMemoryError: If the memory cannot be had.
        BackendUnavailableError: If `device` cannot be used here.
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
        """Elements of a page."""
    @property
    def total_pages(self) -> int:
        """Pages, in use or not."""
    @property
    def free_pages(self) -> int:
        """Pages that are not in use."""
    @property
    def used_pages(self) -> int:
        """Pages in use."""
    @property
    def grow(self) -> int:
        """Pages that are added when all are in use."""
    @property
    def dtype(self) -> torch.dtype:
        """Of the elements: a `torch.dtype`, or its name where PyTorch is not installed."""
    def alloc(self, *, owner: str | int | None = None) -> int | None:
        """Takes a page: the last that was freed, else the lowest that was never taken.

        Args:
            owner: A name for reports and `leaks`, a str or an int. Only noted where the pool debugs.

        Returns:
            Its number, or `None` if all are in use and the pool does not grow. What it holds is what was last written to it.

        Raises:
            OutOfMemoryError: If the memory for pages to add cannot be had. Nothing is changed.
        """
    def free(self, page: SupportsIndex, *, owner: str | int | None = None) -> None:
        """Gives a page back.

        Args:
            page: Its number.
            owner: As in `alloc`.

        Raises:
            IndexOwnershipError: If the pool is strict and the page is not in use. Nothing is changed.
        """
    def page(self, i: SupportsIndex) -> torch.Tensor:
        """`dtype` `[page_size]`: the elements of a page, in use or not, no copy.

        Raises:
            IndexError: If there is no such page.
        """
    def stats(self) -> CountedStats:
        """The numbers of this pool: `capacity`, `available`, `in_use` and `high_water` in units, `dropped_frees`, and `bytes` of
        memory; of the bookkeeping where the pool has no memory of its own.

        Of some classes there is more:

        - `TokenToKVPoolAllocator`: `free`, `released`, `fenced`, `shared` (with more than one owner) and `pending` slots (freed,
          but only the GPU knows which they are); `size`, `page_size`, and `device_bytes` of GPU memory for the tensors. Of a
          strict pool it leaves frees pending, as what is wrong with them is to be raised where slots are used.
        - `ChunkPool`: `registered` chunks, which are page-locked. Chunks whose copies are under way are in use.
        - `BufferPool`: `free_bytes`, `in_use_bytes`, `high_water_bytes`, `registered_bytes`; and instead of `dropped_frees`
          `stale_uses`, calls with a buffer that had been given back.
        - `Workspace`: no `dropped_frees`.
        - `KVPool`, which hands nothing out: `capacity`, `rows`, `layer_num`, `page_size` and `bytes`.
        """

@final
class ChunkPool(Pool):
    """Fixed-size chunks in one region, for KV that left the GPU.

    Chunks are numbered from 0, zero at first and not zeroed again. The last freed is taken first, then the lowest that was
    never taken. Host memory is page-locked where there is a driver, in steps of about 64 MiB on two threads
    (`KVPOOL_PAGE_LOCK_THREADS`; more are sooner done, and hold up other calls of the driver meanwhile): the
    constructor of a larger pool returns at once, chunks can be taken as their step is done, and the logger `kvpool` tells how
    far it has come. A step that the driver refuses stays ordinary memory, and is told as a warning.

    Args:
        num_chunks: Chunks.
        chunk_shape: Extents of a chunk.
        dtype: Of the elements.
        device: Where the chunks are.
        pin_memory: Page-lock host memory where a driver is present.
        numa_node: Take host memory from this NUMA node as long as it has any. A machine without nodes has node 0.
        huge_pages: Take host memory in explicit huge pages of 2 MiB; where the system has not reserved enough of them,
            a log line says so and transparent ones are used.
        strict: Whether a bad free raises; otherwise it is dropped, counted and reported.
        progress: Called as `progress(done_chunks, num_chunks)` after each step, from another thread if there are several.

    Raises:
        ConfigError: If a size is below 1, bytes overflow, or the machine has no such node.
        TypeError: If `dtype` cannot be stored.
        OutOfMemoryError: If the memory cannot be had.
        BackendUnavailableError: If `device` cannot be used here.
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
        """Chunks."""
    @property
    def chunk_shape(self) -> tuple[int, ...]:
        """Extents of a chunk, a tuple of ints."""
    @property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk."""
    @property
    def dtype(self) -> torch.dtype:
        """Of the elements: a `torch.dtype`, or its name where PyTorch is not installed."""
    @property
    def pin_memory(self) -> bool:
        """Whether the memory is page-locked, or is about to be."""
    @property
    def numa_node(self) -> int | None:
        """The NUMA node that was asked for."""
    @property
    def huge_pages(self) -> bool:
        """Whether the memory is in explicit huge pages."""
    def allocate(self, *, owner: str | int | None = None) -> Chunk | None:
        """Takes a chunk, with one reference.

        While page-locking goes on and all chunks that are ready are taken, or copies of a freed chunk are under direction, it
        waits for them, without the GIL.

        Returns:
            A `Chunk`, or `None` if all are in use.
        """
    def allocate_batch(self, n: SupportsIndex, *, owner: str | int | None = None) -> list[Chunk] | None:
        """Takes `n` chunks, or none of them. Waits as `allocate` does.

        Returns:
            A list of `Chunk`, or `None` if there are not so many.

        Raises:
            ConfigError: If `n` is negative.
        """
    def free(self, chunk: Chunk, *, owner: str | int | None = None) -> None:
        """Frees a chunk that nobody else refers to.

        Raises:
            IndexOwnershipError: If the pool is strict and the chunk was freed before, is still referenced or of another
                pool. Nothing is changed.
            TypeError: If it is no `Chunk`.
        """
    def wait_registered(self, timeout: float | None = None) -> bool:
        """Waits until page-locking has ended, without the GIL.

        Args:
            timeout: Seconds to wait at most.

        Returns:
            Whether it has ended.

        Raises:
            ConfigError: If `timeout` is negative or no number.
            DriverError: In the child of a fork, where it never ends.
        """
    def stats(self) -> ChunkStats:
        """The numbers of this pool: `capacity`, `available`, `in_use` and `high_water` in units, `dropped_frees`, and `bytes` of
        memory; of the bookkeeping where the pool has no memory of its own.

        Of some classes there is more:

        - `TokenToKVPoolAllocator`: `free`, `released`, `fenced`, `shared` (with more than one owner) and `pending` slots (freed,
          but only the GPU knows which they are); `size`, `page_size`, and `device_bytes` of GPU memory for the tensors. Of a
          strict pool it leaves frees pending, as what is wrong with them is to be raised where slots are used.
        - `ChunkPool`: `registered` chunks, which are page-locked. Chunks whose copies are under way are in use.
        - `BufferPool`: `free_bytes`, `in_use_bytes`, `high_water_bytes`, `registered_bytes`; and instead of `dropped_frees`
          `stale_uses`, calls with a buffer that had been given back.
        - `Workspace`: no `dropped_frees`.
        - `KVPool`, which hands nothing out: `capacity`, `rows`, `layer_num`, `page_size` and `bytes`.
        """

@final
class Chunk:
    """A chunk of a `ChunkPool`, as it was allocated: it is told from the same index allocated again later.

    Dropping it frees nothing. `with chunk:` releases it at the end.
    """

    @property
    def index(self) -> int:
        """Its number."""
    @property
    def nbytes(self) -> int:
        """Bytes of the whole chunk."""
    @property
    def references(self) -> int:
        """How often it is referred to; 0 once it was freed."""
    def tensor(self, shape: SupportsIndex | Sequence[SupportsIndex] | None = None) -> torch.Tensor:
        """The chunk's first elements as a contiguous tensor, no copy.

        The tensor keeps the region alive, not the chunk: after it was freed, somebody else may write there.

        Args:
            shape: Extents, of as many elements as a chunk has or fewer; by default all of it, in `chunk_shape`.

        Raises:
            ConfigError: If it does not fit.
            StaleBufferError: If the chunk was freed.
        """
    def retain(self) -> Chunk:
        """Adds a reference.

        Returns:
            The chunk itself.

        Raises:
            StaleBufferError: If it was freed.
        """
    def release(self) -> None:
        """Gives up a reference. With the last one the chunk is freed, as soon as its copies are done.

        Raises:
            IndexOwnershipError: If the pool is strict and the chunk was freed before.
        """
    def copy_from(self, tensor: TensorLike, stream: StreamLike | None = None) -> ChunkCopy:
        """Copies the elements of `tensor`, in order, to the beginning of the chunk.

        In host memory it is done on return. With a GPU on either side it is enqueued, one copy for all runs of contiguous
        elements that are equally far apart; tensor and chunk are kept until it is done, also if the chunk is freed meanwhile.

        Args:
            tensor: Of the chunk's dtype, on any device, with any strides.
            stream: A `torch.cuda.Stream` or its handle; by default the current one.

        Raises:
            ConfigError: If it has more elements than the chunk.
            TypeError: If it is of another dtype.
            StaleBufferError: If the chunk was freed.
        """
    def copy_to(self, tensor: TensorLike, stream: StreamLike | None = None) -> ChunkCopy:
        """Copies the beginning of the chunk to the elements of `tensor`, in order. As `copy_from` otherwise.

        Raises:
            ConfigError: If it has more elements than the chunk, is read-only, or overlaps itself.
            TypeError: If it is of another dtype.
            StaleBufferError: If the chunk was freed.
        """
    def __enter__(self) -> Chunk: ...
    def __exit__(self, *_exception: object) -> None: ...

@final
class ChunkCopy:
    """A copy to or from a chunk. It is a fence, as `TokenToKVPoolAllocator.free` takes one."""

    def query(self) -> bool:
        """Whether it is done. Does not wait.

        Raises:
            DriverError: If the driver refuses, also for what failed on the device before.
        """
    def wait(self) -> None:
        """Waits until it is done, without the GIL.

        Raises:
            DriverError: As `query`.
        """

@final
class BufferPool(Pool):
    """Scratch buffers that are used again from step to step.

    A buffer's memory is the smallest bucket that holds it; a free one of that bucket is handed out again, the last that was
    given back first, so that a step that allocates like the one before gets the same memory. New memory is zeroed once,
    memory that is handed out again is not.

    On a GPU buffers are valid on the stream that was current when they were allocated. A buffer that was given back while
    that stream still uses it is handed out for the same stream at once; another stream waits on the device, the host never.
    Who used it on another stream, too, orders that stream before giving the buffer back. Only a new buffer costs driver
    calls, which may wait for the device; none can be made while its stream is captured.

    Args:
        device: Where the buffers are.
        rounding: "pow2" for buckets of powers of two, "fine" for four buckets a doubling.
        debug: Whether to note who takes and gives what, for `leaks` and reports; by default if `KVPOOL_DEBUG=1`.

    Raises:
        ConfigError: If `rounding` is something else.
        BackendUnavailableError: If `device` cannot be used here.
    """

    def __new__(
        cls, device: DeviceLike = "cuda", *, rounding: str = "pow2", debug: bool | None = None
    ) -> BufferPool: ...
    @property
    def rounding(self) -> str:
        """How sizes are rounded up: "pow2" or "fine"."""
    @property
    def free_count(self) -> int:
        """Buffers that are free."""
    @property
    def free_bytes(self) -> int:
        """Bytes of the buffers that are free."""
    @property
    def in_use_count(self) -> int:
        """Buffers that are out."""
    @property
    def in_use_bytes(self) -> int:
        """Bytes of the buffers that are out, in whole buckets."""
    @property
    def high_water_bytes(self) -> int:
        """The most bytes that were out at once, in whole buckets."""
    def alloc(
        self,
        shape: SupportsIndex | Sequence[SupportsIndex],
        dtype: DTypeLike,
        *,
        owner: str | int | None = None,
    ) -> Buffer:
        """Takes a buffer.

        Args:
            shape: Extents of its tensor.
            dtype: Of its tensor: a storage dtype, float64, int32, int64 or bool.
            owner: A name for reports and `leaks`, a str or an int. Only noted where the pool debugs.

        Returns:
            A `Buffer`. What it holds is what was last written there, zeros if it is new.

        Raises:
            ConfigError: If an extent is negative or the bytes overflow.
            TypeError: If the dtype is not known.
            OutOfMemoryError: If the memory cannot be had, also after the free buffers were given back.
            DriverError: If the driver refuses, and for a new buffer while the current stream is captured.
        """
    def alloc_bytes(self, n: SupportsIndex, *, owner: str | int | None = None) -> Buffer:
        """Takes a buffer of `n` bytes, whose tensor is uint8 `[n]`. As `alloc` otherwise."""
    def alloc_batch(
        self,
        specs: Iterable[tuple[SupportsIndex | Sequence[SupportsIndex], DTypeLike]],
        *,
        owner: str | int | None = None,
    ) -> list[Buffer]:
        """Takes a buffer for each of `specs`, or none of them.

        Args:
            specs: Pairs of shape and dtype, as `alloc` takes them.
            owner: As in `alloc`.

        Returns:
            A list of `Buffer`, in their order.

        Raises:
            As `alloc`. Nothing is taken then.
        """
    def release(self, buffer: Buffer) -> None:
        """Gives a buffer back.

        Raises:
            StaleBufferError: If it was given back before. Nothing is changed.
            IndexOwnershipError: If it is of another pool.
        """
    def reset(self) -> None:
        """Gives every buffer back that is out. Using one of them afterwards raises `StaleBufferError`; the same sequence of
        `alloc` gets the same memory again.
        """
    def step(self) -> BufferStep:
        """A context manager that resets the pool at its end."""
    def register_existing(self, tensor: TensorLike) -> None:
        """Notes an allocation of others, such as weights, which the pool neither owns nor recycles.

        Host memory is page-locked, for copies at full speed, until the pool goes, where there is a driver and
        `KVPOOL_NO_RESIDENCY` is not 1. The pool keeps the tensor alive as long. Registering it again does nothing.

        Args:
            tensor: A contiguous tensor in host memory or on the device of the pool.

        Raises:
            ConfigError: If it is on another device, not contiguous, or to be page-locked and only a part of the memory that
                PyTorch allocated for it: the driver copies no memory of which a part is page-locked.
            OutOfMemoryError: If the driver cannot page-lock so much in one piece.
            DriverError: If the driver refuses to page-lock it.
        """
    def clear(self) -> None:
        """Gives the memory of free buffers back. On a GPU that waits for the streams that used it."""
    def stats(self) -> BufferStats:
        """The numbers of this pool: `capacity`, `available`, `in_use` and `high_water` in units, `dropped_frees`, and `bytes` of
        memory; of the bookkeeping where the pool has no memory of its own.

        Of some classes there is more:

        - `TokenToKVPoolAllocator`: `free`, `released`, `fenced`, `shared` (with more than one owner) and `pending` slots (freed,
          but only the GPU knows which they are); `size`, `page_size`, and `device_bytes` of GPU memory for the tensors. Of a
          strict pool it leaves frees pending, as what is wrong with them is to be raised where slots are used.
        - `ChunkPool`: `registered` chunks, which are page-locked. Chunks whose copies are under way are in use.
        - `BufferPool`: `free_bytes`, `in_use_bytes`, `high_water_bytes`, `registered_bytes`; and instead of `dropped_frees`
          `stale_uses`, calls with a buffer that had been given back.
        - `Workspace`: no `dropped_frees`.
        - `KVPool`, which hands nothing out: `capacity`, `rows`, `layer_num`, `page_size` and `bytes`.
        """

@final
class Buffer:
    """A scratch buffer of a `BufferPool`, until it is given back.

    Dropping it gives nothing back. `with buffer:` releases it at the end, unless the pool was reset meanwhile.
    """

    @property
    def tensor(self) -> torch.Tensor:
        """The buffer as a contiguous tensor of the shape and dtype that were asked for, no copy.

        Who keeps the tensor after the buffer was given back sees what its next owner writes.

        Raises:
            StaleBufferError: If the buffer was given back.
        """
    @property
    def nbytes(self) -> int:
        """Bytes that were asked for."""
    @property
    def capacity(self) -> int:
        """Bytes of its bucket."""
    def release(self) -> None:
        """Gives it back.

        Raises:
            StaleBufferError: If it was given back before. Nothing is changed.
        """
    def __enter__(self) -> Buffer: ...
    def __exit__(self, *_exception: object) -> None: ...

@final
class BufferStep:
    """What `BufferPool.step` returns: `with` resets the pool at its end."""

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
        """The most bytes that were in use at once."""
    @property
    def num_threads(self) -> int | None:
        """PyTorch's threads within `use()`, or `None` for those that it has."""
    @property
    def is_closed(self) -> bool:
        """Whether it was closed."""
    def empty(self, shape: SupportsIndex | Sequence[SupportsIndex], dtype: DTypeLike) -> torch.Tensor:
        """A contiguous tensor of the arena, 256-byte aligned; its elements are not defined.

        It must not be used after the next reset. On a GPU it is valid on the current stream.

        Args:
            shape: Extents.
            dtype: A storage dtype, float64, int32, int64 or bool.

        Raises:
            WorkspaceExhaustedError: If it does not fit.
            ConfigError: If an extent is negative or the bytes overflow.
            TypeError: If the dtype is not known.
            RuntimeError: If another thread uses the workspace, or it is closed.
        """
    def zeros(self, shape: SupportsIndex | Sequence[SupportsIndex], dtype: DTypeLike) -> torch.Tensor:
        """As `empty`, of zeros."""
    def stats(self) -> UnitStats:
        """The numbers of this pool: `capacity`, `available`, `in_use` and `high_water` in units, `dropped_frees`, and `bytes` of
        memory; of the bookkeeping where the pool has no memory of its own.

        Of some classes there is more:

        - `TokenToKVPoolAllocator`: `free`, `released`, `fenced`, `shared` (with more than one owner) and `pending` slots (freed,
          but only the GPU knows which they are); `size`, `page_size`, and `device_bytes` of GPU memory for the tensors. Of a
          strict pool it leaves frees pending, as what is wrong with them is to be raised where slots are used.
        - `ChunkPool`: `registered` chunks, which are page-locked. Chunks whose copies are under way are in use.
        - `BufferPool`: `free_bytes`, `in_use_bytes`, `high_water_bytes`, `registered_bytes`; and instead of `dropped_frees`
          `stale_uses`, calls with a buffer that had been given back.
        - `Workspace`: no `dropped_frees`.
        - `KVPool`, which hands nothing out: `capacity`, `rows`, `layer_num`, `page_size` and `bytes`.
        """
    def _reset(self) -> bool:
        """Takes back what `empty` and `zeros` gave; `False`, and nothing happens, while PyTorch has memory of the arena."""
    def _close(self) -> None:
        """Gives the arena up."""
    def _enter(self) -> None:
        """Lets PyTorch's allocations of this thread that ask `kvpool_workspace_alloc` have memory of the arena."""
    def _leave(self) -> str | None:
        """Ends what `_enter` began. Returns what was asked for in vain last, in words."""

@final
class _PageLocking:
    """Page-locking that goes on, for the thread that reports how far it has come."""

    def run(self) -> None:
        """Reports every step. Once the main thread has ended, those that were begun are the last: the interpreter waits for this
        thread.
        """
