"""PyTorch on the software driver: what needs a kernel is done on the host, on copies.

The driver has no kernels of PyTorch. Within `SoftwareTorch` every operation on tensors of the device reads
them to the host in the order of the current stream, runs there, and writes back what it changed. Views stay
views, and versions count up, as on a GPU.
"""

from __future__ import annotations

import ctypes
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import kvpool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

OUT_OF_MEMORY = 2
RELAXED = 2
LAUNCH_FAILED = 719
NEWER_CODES = (36, 225, 226, 402, 721, 913, 917, 9999)
"""Answers of drivers that no header of CUDA 12.0 knows; the last is no code of any."""


class Driver:
    """The functions that the driver has for tests."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        for name in ("calls", "failures_left", "pending", "pending_all", "end_capture"):
            getattr(self._library, f"soft_{name}").restype = ctypes.c_long
        for name in ("device_bytes", "page_locked_bytes", "uses_of_destroyed"):
            getattr(self._library, f"soft_{name}").restype = ctypes.c_long
        self._library.soft_stream.restype = ctypes.c_size_t

    def calls(self, name: str | None = None) -> int:
        """Calls of a function since the last reset; of all, without a name.

        `launch:NAME` is a kernel, `wait:sleeps` and `wait:spins` are waits of the host for an event.
        """
        return int(self._library.soft_calls(name.encode() if name else None))

    def reset_calls(self) -> None:
        """Counts from 0 again."""
        self._library.soft_reset_calls()

    def fail(self, name: str | None, left: int = 0, code: int = LAUNCH_FAILED) -> None:
        """Lets the call after `left` others of a function (of any, for None) fail with `code`."""
        self._library.soft_fail(name.encode() if name else None, ctypes.c_long(left + 1), code)

    def planned(self) -> int:
        """Failures that have not happened yet."""
        return int(self._library.soft_failures_left())

    def forget_plans(self) -> None:
        """Plans no failure any more."""
        self._library.soft_forget_failures()

    def set_capacity(self, size: int) -> None:
        """Bytes that each device has."""
        self._library.soft_set_capacity(ctypes.c_long(size))

    @contextmanager
    def on_device(self, device: int) -> Iterator[None]:
        """Makes a device the current one of the driver, of which PyTorch knows nothing."""
        context = ctypes.c_size_t()
        assert self._library.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0
        assert self._library.cuCtxPushCurrent_v2(context) == 0
        try:
            yield
        finally:
            assert self._library.cuCtxPopCurrent_v2(ctypes.byref(context)) == 0

    def copy_to_host(self, target: torch.Tensor, source: torch.Tensor, stream: int, device: int = 0) -> None:
        """Enqueues a copy to page-locked memory, as a program does that is neither PyTorch nor kvpool."""
        size = ctypes.c_size_t(source.nbytes)
        pointers = ctypes.c_void_p(target.data_ptr()), ctypes.c_uint64(source.data_ptr())
        with self.on_device(device):
            assert self._library.cuMemcpyDtoHAsync_v2(*pointers, size, ctypes.c_size_t(stream)) == 0

    def reuse_streams(self) -> None:
        """Gives new streams the handles of destroyed ones, until `restore`."""
        self._library.soft_reuse_streams(1)

    def uses_of_destroyed(self) -> int:
        """Calls that were given the handle of a destroyed stream."""
        return int(self._library.soft_uses_of_destroyed())

    def destroy_stream(self, stream: int) -> None:
        """Destroys a stream; its handle must not be used any more."""
        assert self._library.cuStreamDestroy_v2(ctypes.c_size_t(stream)) == 0

    def set_patience(self, queries: int) -> None:
        """Queries of an event after which what lies before it has run."""
        self._library.soft_set_queries(ctypes.c_long(queries))

    def set_register_limit(self, size: int) -> None:
        """From how many bytes on one call page-locks nothing."""
        self._library.soft_set_register_limit(ctypes.c_long(size))

    def set_seed(self, seed: int) -> None:
        """Decides the order of blocks and threads; 0 for the last first."""
        self._library.soft_set_seed(ctypes.c_long(seed))

    def break_context(self, code: int) -> None:
        """Lets all calls of the current context answer `code`, as after an error of a kernel."""
        self._library.soft_break(code)

    def deinitialize(self) -> None:
        """Lets the driver go down, as at the end of a process."""
        self._library.soft_deinitialize()

    def repair(self) -> None:
        """Mends all contexts, and brings the driver back."""
        self._library.soft_mend()

    def restore(self) -> None:
        """Brings back all that a test may choose as it is at first, and mends what it broke."""
        self._library.soft_restore()

    def pending(self, stream: int | None = None) -> int:
        """Work that has not run, of one stream or of all."""
        if stream is None:
            return int(self._library.soft_pending_all())
        return int(self._library.soft_pending(ctypes.c_size_t(stream)))

    def run(self, stream: int | None = None) -> None:
        """Runs the work of a stream, or of all."""
        if stream is None:
            self._library.soft_run_all()
        else:
            assert self._library.soft_run(ctypes.c_size_t(stream)) == 0

    def stream(self, device: int = 0) -> int:
        """A new stream of a device."""
        return int(self._library.soft_stream(device))

    def device_bytes(self) -> int:
        """Device memory that is out."""
        return int(self._library.soft_device_bytes())

    def page_locked_bytes(self) -> int:
        """Page-locked memory that is out."""
        return int(self._library.soft_page_locked_bytes())

    def begin_capture(self, stream: int) -> None:
        """Records what is enqueued on a stream instead of enqueuing it."""
        assert self._library.soft_begin_capture(ctypes.c_size_t(stream)) == 0

    def end_capture(self, stream: int) -> int:
        """The number of the graph that was recorded."""
        return int(self._library.soft_end_capture(ctypes.c_size_t(stream)))

    def replay(self, graph: int, stream: int) -> None:
        """Enqueues the work of a graph."""
        assert self._library.soft_replay(ctypes.c_long(graph), ctypes.c_size_t(stream)) == 0


def is_preloaded() -> bool:
    """Whether the driver is in this process."""
    return hasattr(ctypes.CDLL(None), "soft_calls")


_OF_PYTORCH: list[bool] = []


@contextmanager
def memory_of_pytorch() -> Iterator[None]:
    """Within it, new tensors have memory of PyTorch's own allocator, which keeps what it took."""
    _OF_PYTORCH.append(True)
    try:
        yield
    finally:
        _OF_PYTORCH.pop()


@contextmanager
def _beside_captures() -> Iterator[None]:
    """Within it, what this thread does may be unsafe while somebody captures.

    Copies stand for kernels here, which are safe, and PyTorch allocates like this in a capture.
    """
    mode = ctypes.c_int(RELAXED)
    exchange = ctypes.CDLL(None).cuThreadExchangeStreamCaptureMode
    exchange(ctypes.byref(mode))
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


def _span(tensor: torch.Tensor) -> int:
    """Elements from the first to the last that a tensor reaches."""
    if tensor.numel() == 0:
        return 0
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((extent - 1) * stride for extent, stride in pairs)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a device tensor in host memory, with its strides."""
    flat = tensor.as_strided((_span(tensor),), (1,))
    return flat.cpu().as_strided(tensor.shape, tensor.stride())


def to_device(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a host tensor on the device, with its strides."""
    span = _span(tensor)
    size = span * tensor.element_size()
    memory = (
        torch.empty(size, dtype=torch.uint8, device="cuda")
        if _OF_PYTORCH
        else kvpool._kvpool._zeros([size], "uint8", "cuda")
    )
    flat: torch.Tensor = memory.view(tensor.dtype)
    flat.copy_(tensor.as_strided((span,), (1,)))
    return flat.as_strided(tensor.shape, tensor.stride())


def _is_on_device(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_cuda


class SoftwareTorch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs operations on device tensors on the host."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Without a wrapper around each operation that hides it from `torch.compile`, which no test uses."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401
        _types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        kwargs = kwargs or {}
        found: list[torch.Tensor] = []
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Tensor):
                if value.is_cuda:
                    found.append(value)
            elif isinstance(value, (list, tuple)):
                found += [one for one in value if _is_on_device(one)]
        device = kwargs.get("device")
        target = torch.device(device) if device is not None else None
        if func.is_view or (not found and (target is None or target.type != "cuda")):
            return func(*args, **kwargs)
        with _beside_captures():
            return _on_host(func, args, kwargs, found, target)


def _mapped(change: Callable[[torch.Tensor], Any], value: Any) -> Any:  # noqa: ANN401
    """A value of an operation with its tensors changed: one, or a list of some."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        return type(value)([_mapped(change, one) for one in value])
    return value


def _on_host(
    func: Any,  # noqa: ANN401
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    found: list[torch.Tensor],
    target: torch.device | None,
) -> Any:  # noqa: ANN401
    copies = {id(tensor): to_host(tensor) for tensor in found}

    def swap(tensor: torch.Tensor) -> torch.Tensor:
        return copies.get(id(tensor), tensor)

    on_host = {name: _mapped(swap, value) for name, value in kwargs.items()}
    if target is not None:
        on_host["device"] = torch.device("cpu")
    answer = func(*(_mapped(swap, value) for value in args), **on_host)
    written = {}
    for position, name in _written(func):
        value = args[position] if position < len(args) else kwargs.get(name)
        for tensor in [value] if isinstance(value, torch.Tensor) else value or []:
            if id(tensor) in copies:
                written[id(copies[id(tensor)])] = tensor
    for tensor in written.values():
        span, source = (_span(tensor),), copies[id(tensor)]
        tensor.as_strided(span, (1,)).copy_(source.as_strided(span, (1,)))
    stays = target is not None and target.type == "cpu"

    def back(value: torch.Tensor) -> torch.Tensor:
        if value.is_cuda:
            return value
        if id(value) in written:
            return written[id(value)]
        is_argument = any(value is argument for argument in (*args, *kwargs.values()))
        return value if stays or is_argument else to_device(value)

    return _mapped(back, answer)


@cache
def _written(func: Any) -> list[tuple[int, str]]:  # noqa: ANN401
    """Place and name of the arguments that an operation writes to, by its schema."""
    arguments = enumerate(func._schema.arguments)
    return [(place, each.name) for place, each in arguments if each.alias_info and each.alias_info.is_write]


def each_call(
    driver: Driver,
    work: Callable[[], object],
    *,
    codes: tuple[int, ...] = (LAUNCH_FAILED,),
    in_turn: bool = False,
) -> Iterator[BaseException | None]:
    """Does `work` again and again, each time with a failure at the next driver call, until none is reached.

    Yields what was raised each time. Plans are forgotten before. Each call fails with each of the codes, or,
    where there are too many calls for that, with one of them `in_turn`.
    """
    for series in [codes] if in_turn else [(code,) for code in codes]:
        left, is_over = 0, False
        while not is_over:
            driver.fail(None, left, series[left % len(series)])
            raised: BaseException | None = None
            try:
                work()
            except Exception as error:  # noqa: BLE001 - the caller looks at it
                # Its frames would keep alive what they held.
                raised = error.with_traceback(None)
            is_over = driver.planned() > 0
            driver.forget_plans()
            yield raised
            left += 1
