"""One arena for everything that a forward pass allocates."""

from __future__ import annotations

import os
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

from kvpool import _kvpool
from kvpool._kvpool import _Workspace
from kvpool.errors import ConfigError, WorkspaceExhaustedError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from typing_extensions import Self


# In debugging, a part belongs to the line that called `empty` or `zeros`.
_acts_for_callers = True


class Workspace(_Workspace):
    """The resources that one inference loop uses again and again: an arena of fixed size on a device.

    `empty` and `zeros` cut tensors from it, `reset` takes all of them back at once. On a GPU `with
    workspace.use():` has PyTorch take its own memory from the arena, so that an unmodified model allocates
    nothing from the driver.

    A workspace belongs to one thread from its first tensor until it is reset, and while it is in use; calls
    of other threads raise. Tensors of the arena keep its memory alive, also after `close`. On a GPU memory
    that was given back is used again in the order of the streams that had it; only the constructor
    allocates.

    Where it debugs, `reset` fills the arena with NaN (-1 for ints), so that a tensor that is used afterwards
    shows.

    Args:
        device: Where the arena is.
        arena_bytes: Its size.
        num_threads: PyTorch's intra-op threads within `use()`; by default those that it has.
        debug: Whether it debugs; by default if `KVPOOL_DEBUG=1` is in the environment.

    Raises:
        ConfigError: If `arena_bytes` or `num_threads` is below 1.
        OutOfMemoryError: If the memory cannot be had.
        BackendUnavailableError: If `device` cannot be used here.
    """

    # PyTorch's memory pool over the arena, while it has memory of it.
    _mem_pool: Any = None
    # Whether PyTorch allocates there now.
    _is_routed = False

    @contextmanager
    def use(self) -> Iterator[Self]:
        """Within it, PyTorch's CUDA allocations of this thread come from the arena. May be nested.

        What PyTorch frees it uses again by itself, within this and later uses; tensors that outlive it keep
        their memory. On the CPU, where PyTorch has no such pools, only `num_threads` takes effect: tensors
        come from `empty`.

        Yields:
            The workspace.

        Raises:
            WorkspaceExhaustedError: If PyTorch asks for more than is left.
            RuntimeError: If another thread uses the workspace, or it is closed.
            ConfigError: If PyTorch before 2.11 is told to use expandable segments, which no arena gives.
            ModuleNotFoundError: If PyTorch is not installed.
        """
        import torch  # noqa: PLC0415 - only who calls this needs it

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
            torch.set_num_threads(threads)
            words = self._leave()
            if refused is not None and words is not None:
                raise WorkspaceExhaustedError(words) from refused

    @contextmanager
    def _routed(self) -> Iterator[None]:
        """Within it, what PyTorch allocates on the device of the arena comes from there."""
        if self.device == "cpu" or self._is_routed:
            yield
            return
        import torch  # noqa: PLC0415 - only who calls this needs it

        if self._mem_pool is None:
            _expect_fixed_segments()
            # A pool serves the device that is current when it is made.
            with torch.cuda.device(self.device):
                self._mem_pool = torch.cuda.MemPool(_allocator().allocator())
        self._is_routed = True
        try:
            with torch.cuda.use_mem_pool(self._mem_pool, device=self.device):
                yield
        finally:
            self._is_routed = False

    def reset(self) -> bool:
        """Take everything back at once; the arena keeps its address, and any thread may use it next.

        Tensors of `empty` and `zeros` must not be used any more. What PyTorch keeps of the arena for later
        uses goes back, too.

        Returns:
            Whether it was reset: not while tensors that PyTorch made within `use()` are alive.

        Raises:
            RuntimeError: If another thread uses the workspace, within `use()`, or if it is closed.
        """
        if self._reset():
            return True
        # PyTorch has memory of the arena; what of it no tensor has goes back with the pool.
        if self._mem_pool is None or _has_tensors(self._mem_pool):
            return False
        self._forget_mem_pool()
        return self._reset()

    def close(self) -> None:
        """Give the arena up. Its memory goes when the last tensor of it does. Closing it again does nothing.

        Raises:
            RuntimeError: If another thread uses the workspace, or within `use()`.
        """
        self._close()
        self._forget_mem_pool()

    def _forget_mem_pool(self) -> None:
        """Let go of what PyTorch keeps of the arena, on the arena's device."""
        if self._mem_pool is None:
            return
        import torch  # noqa: PLC0415 - it is there, as it made the pool

        with torch.cuda.device(self.device):
            self._mem_pool = None

    def __enter__(self) -> Self:
        """The workspace, which is closed at the end."""
        return self

    def __exit__(self, *_exception: object) -> None:
        """Close it."""
        self.close()


@cache
def _allocator() -> Any:  # noqa: ANN401 - PyTorch's, which need not be installed
    """PyTorch's view of the functions that the extension module exports."""
    import torch  # noqa: PLC0415 - only who calls this needs it

    return torch.cuda.memory.CUDAPluggableAllocator(
        _kvpool.__file__, "kvpool_workspace_alloc", "kvpool_workspace_free"
    )


def _expect_fixed_segments() -> None:
    """Refuse segments that PyTorch would map by itself, past the arena."""
    import torch  # noqa: PLC0415 - only who calls this needs it

    major, minor = (int(number) for number in torch.__version__.split(".")[:2])
    options = os.environ.get("PYTORCH_ALLOC_CONF", "") + os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    if (major, minor) < (2, 11) and "expandable_segments:True" in options.replace(" ", ""):
        raise ConfigError(
            f"PyTorch {major}.{minor} does not take expandable segments from an arena: leave"
            " expandable_segments:True out of PYTORCH_ALLOC_CONF, or use PyTorch 2.11 or later"
        )


def _has_tensors(mem_pool: Any) -> bool:  # noqa: ANN401 - PyTorch's, which need not be installed
    """Whether tensors have memory of a pool, or streams still use what had."""
    import torch  # noqa: PLC0415 - only who calls this needs it

    pool_id = tuple(mem_pool.id)
    try:
        segments = torch.cuda.memory_snapshot(pool_id, include_traces=False)  # type: ignore[no-untyped-call]
    except TypeError:  # older versions tell of all pools at once
        segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    return any(
        segment["active_size"] > 0 for segment in segments if tuple(segment["segment_pool_id"]) == pool_id
    )
