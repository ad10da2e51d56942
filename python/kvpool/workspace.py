"""One arena for the allocations of a forward pass."""

from __future__ import annotations

import os
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING

from kvpool import _kvpool
from kvpool._kvpool import _Workspace
from kvpool.errors import ConfigError, WorkspaceExhaustedError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.cuda import MemPool
    from torch.cuda.memory import CUDAPluggableAllocator
    from typing_extensions import Self


# With debugging, an allocation is attributed to the line that called `empty` or `zeros`.
_acts_for_callers = True


class Workspace(_Workspace):
    """An arena of fixed size on a device, for one inference loop.

    `empty` and `zeros` allocate tensors from it; `reset` frees all of them at once. On a GPU, PyTorch
    allocates from the arena inside `with workspace.use():`, so that an unmodified model allocates nothing
    from the driver.

    A workspace belongs to one thread from its first tensor until it is reset, and while it is in use; calls
    from other threads raise. Tensors of the arena keep its memory alive, also after `close`. On a GPU, freed
    memory is reused in the order of the streams that used it; only the constructor allocates.

    With debugging, `reset` fills the arena with NaN (-1 for ints), which shows any use of a stale tensor.

    Args:
        device: Device of the arena.
        arena_bytes: Size of the arena.
        num_threads: PyTorch's intra-op threads within `use()`; unchanged by default.
        debug: Whether to debug; by default if `KVPOOL_DEBUG=1` is in the environment.

    Raises:
        ConfigError: If `arena_bytes` or `num_threads` is below 1, or `num_threads` above 1024.
        OutOfMemoryError: If there is not enough memory.
        BackendUnavailableError: If `device` cannot be used on this machine.
    """

    # PyTorch's memory pool over the arena, while PyTorch holds memory of it.
    _mem_pool: MemPool | None = None
    # Whether PyTorch allocates from the arena now.
    _is_routed = False

    @contextmanager
    def use(self) -> Iterator[Self]:
        """Serve PyTorch's CUDA allocations of this thread from the arena. May be nested.

        PyTorch reuses memory that it freed, within this and later uses; tensors that outlive the block keep
        their memory. On the CPU, where PyTorch has no such pools, only `num_threads` takes effect: tensors
        come from `empty`.

        Yields:
            The workspace.

        Raises:
            WorkspaceExhaustedError: If PyTorch asks for more memory than is left.
            StateError: If another thread uses the workspace, or it is closed.
            ConfigError: If PyTorch before 2.11 is configured to use expandable segments.
            ModuleNotFoundError: If PyTorch is not installed.
        """
        import torch  # noqa: PLC0415 - only needed here

        self._enter()
        threads = torch.get_num_threads()
        refused = None
        try:
            if self.num_threads is not None:
                torch.set_num_threads(self.num_threads)
            with self._routed():
                yield self
        except torch.cuda.OutOfMemoryError as error:
            refused = error
            raise
        finally:
            if self.num_threads is not None:
                torch.set_num_threads(threads)
            words = self._leave()
            if refused is not None and words is not None:
                raise WorkspaceExhaustedError(words) from refused

    @contextmanager
    def _routed(self) -> Iterator[None]:
        """Route PyTorch's allocations on the arena's device to the arena."""
        if self.device == "cpu" or self._is_routed:
            yield
            return
        import torch  # noqa: PLC0415 - only needed here

        if self._mem_pool is None:
            _expect_fixed_segments()
            # A pool serves the device that is current when it is made.
            with torch.cuda.device(self.device):
                self._mem_pool = torch.cuda.MemPool(_allocator().allocator())  # type: ignore[no-untyped-call]
        self._is_routed = True
        try:
            with torch.cuda.use_mem_pool(self._mem_pool, device=self.device):
                yield
        finally:
            self._is_routed = False

    def reset(self) -> bool:
        """Free everything at once. The arena keeps its address, and any thread may use it next.

        Do not use tensors of `empty` and `zeros` afterwards. Memory that PyTorch caches of the arena is
        freed, too.

        Returns:
            Whether the arena was reset. It is not reset while tensors that PyTorch made within `use()` are
            alive.

        Raises:
            StateError: If another thread uses the workspace, within `use()`, or if it is closed.
        """
        if self._reset():
            return True
        # PyTorch holds memory of the arena; memory without tensors is freed with the pool.
        if self._mem_pool is None or _has_tensors(self._mem_pool):
            return False
        self._forget_mem_pool()
        return self._reset()

    def close(self) -> None:
        """Release the arena. Its memory is freed with its last tensor. Closing it again does nothing.

        Raises:
            StateError: If another thread uses the workspace, or within `use()`.
        """
        self._close()
        self._forget_mem_pool()

    def _forget_mem_pool(self) -> None:
        """Drop PyTorch's memory pool, on the arena's device."""
        if self._mem_pool is None:
            return
        import torch  # noqa: PLC0415 - already imported

        with torch.cuda.device(self.device):
            self._mem_pool = None

    def __enter__(self) -> Self:
        """Return the workspace, which is closed at exit."""
        return self

    def __exit__(self, *_exception: object) -> None:
        """Close the workspace."""
        self.close()


@cache
def _allocator() -> CUDAPluggableAllocator:
    """Return PyTorch's view of the functions that the extension module exports."""
    import torch  # noqa: PLC0415 - only needed here

    return torch.cuda.memory.CUDAPluggableAllocator(
        _kvpool.__file__, "kvpool_workspace_alloc", "kvpool_workspace_free"
    )


def _expect_fixed_segments() -> None:
    """Reject segments that PyTorch would map itself, outside of the arena."""
    import torch  # noqa: PLC0415 - only needed here

    major, minor = (int(number) for number in torch.__version__.split(".")[:2])
    options = os.environ.get("PYTORCH_ALLOC_CONF", "") + os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    if (major, minor) < (2, 11) and "expandable_segments:True" in options.replace(" ", ""):
        raise ConfigError(
            f"PyTorch {major}.{minor} does not take expandable segments from an arena: leave"
            " expandable_segments:True out of PYTORCH_ALLOC_CONF, or use PyTorch 2.11 or later"
        )


def _has_tensors(mem_pool: MemPool) -> bool:
    """Return whether tensors of a memory pool are alive, or streams still use memory of dropped ones."""
    import torch  # noqa: PLC0415 - only needed here

    pool_id = tuple(mem_pool.id)
    try:
        segments = torch.cuda.memory_snapshot(pool_id, include_traces=False)  # type: ignore[no-untyped-call]
    except TypeError:  # older versions report all pools at once
        segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    return any(
        segment["active_size"] > 0 for segment in segments if tuple(segment["segment_pool_id"]) == pool_id
    )
