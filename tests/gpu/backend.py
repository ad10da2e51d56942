"""The device that a check runs on: a GPU under PyTorch, or the driver made of software.

Both have streams and captures of CUDA graphs. On a GPU the graphs are PyTorch's own; the driver made of
software has no PyTorch runtime, and captures with functions that it has for tests.
"""

from __future__ import annotations

import ctypes
import sys
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from kvpool._kvpool import _use_stream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))

BUSY_CYCLES = 20_000_000
"""About 10 ms on a GPU of 2 GHz."""


class SpoiltError(Exception):
    """A capture did not survive."""


class Graph(Protocol):
    """What a capture recorded."""

    def replay(self) -> None:
        """Enqueues it on the current stream."""


class Device(Protocol):
    """Streams and captures of one device."""

    is_software: bool

    def stream(self) -> Any:  # noqa: ANN401 - PyTorch's, or a handle
        """A new stream."""

    def on(self, stream: Any) -> AbstractContextManager[object]:  # noqa: ANN401
        """Makes a stream the current one."""

    def capturing(self, stream: Any) -> AbstractContextManager[Graph]:  # noqa: ANN401
        """Captures a stream of this thread; raises `SpoiltError` at its end if that failed."""

    def memory(self) -> AbstractContextManager[object]:
        """Within it, new tensors of PyTorch have memory of PyTorch's allocator."""

    def order(self, first: Any, second: Any) -> None:  # noqa: ANN401
        """Lets a stream wait for what another has to do."""

    def delay(self) -> None:
        """Keeps the current stream busy for a while."""

    def synchronize(self) -> None:
        """Waits for all work."""


class _CountingGraph:
    """A graph of PyTorch that counts its replays, and fails if it did not run."""

    def __init__(self) -> None:
        self.graph: Any = torch.cuda.CUDAGraph()
        self.count = torch.zeros(1, device="cuda")
        self._replays = 0

    def replay(self) -> None:
        """Enqueues it, and waits until it has run."""
        self._replays += 1
        self.graph.replay()
        torch.cuda.synchronize()
        if self.count.item() != self._replays:
            raise SpoiltError(f"{self._replays} replays counted {self.count.item():g}")


class RealGpu:
    """A GPU under PyTorch."""

    is_software = False

    def __init__(self) -> None:
        torch.zeros(1).cuda()
        torch.cuda.synchronize()

    def stream(self) -> Any:  # noqa: ANN401
        """A new stream of PyTorch."""
        return torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def on(self, stream: Any) -> AbstractContextManager[object]:  # noqa: ANN401
        """`torch.cuda.stream`."""
        return torch.cuda.stream(stream)

    @contextmanager
    def capturing(self, stream: Any) -> Iterator[Graph]:  # noqa: ANN401
        """`torch.cuda.graph`, in the mode in which it forbids most: a call of any thread can spoil it."""
        graph = _CountingGraph()
        try:
            with torch.cuda.graph(graph.graph, stream=stream, capture_error_mode="global"):
                graph.count += 1
                yield graph
        except RuntimeError as error:
            raise SpoiltError(str(error).splitlines()[0]) from None

    def memory(self) -> AbstractContextManager[object]:
        """All memory of tensors is PyTorch's."""
        return nullcontext()

    def order(self, first: Any, second: Any) -> None:  # noqa: ANN401
        """`wait_stream`."""
        second.wait_stream(first)

    def delay(self) -> None:
        """A kernel that counts cycles."""
        torch.cuda._sleep(BUSY_CYCLES)  # type: ignore[no-untyped-call]

    def synchronize(self) -> None:
        """Waits for the device."""
        torch.cuda.synchronize()


class _SoftwareGraph:
    def __init__(self, driver: Any) -> None:  # noqa: ANN401
        self._driver = driver
        self.number = 0
        self.stream = 0

    def replay(self) -> None:
        """Enqueues it, and runs all work."""
        self._driver.replay(self.number, self.stream)
        self._driver.run()


class SoftwareGpu:
    """The driver made of software, with `SoftwareTorch` around everything from now on."""

    is_software = True

    def __init__(self) -> None:
        import software

        torch.set_num_threads(1)
        torch.cuda._lazy_init = lambda: None
        torch._C._cuda_init()
        self._software = software
        self._driver = software.Driver()
        # Nothing runs before somebody waits for it.
        self._driver.set_patience(1 << 60)
        self._current: list[int] = []
        self._torch = software.SoftwareTorch()  # type: ignore[no-untyped-call]
        self._torch.__enter__()  # type: ignore[no-untyped-call]

    def stream(self) -> Any:  # noqa: ANN401
        """The handle of a new stream."""
        return self._driver.stream()

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:  # noqa: ANN401
        """Tells kvpool which handle is current."""
        self._current.append(stream)
        _use_stream(stream)
        try:
            yield
        finally:
            self._current.pop()
            _use_stream(self._current[-1] if self._current else None)

    @contextmanager
    def capturing(self, stream: Any) -> Iterator[Graph]:  # noqa: ANN401
        """A capture in the global mode."""
        graph = _SoftwareGraph(self._driver)
        graph.stream = stream
        self._driver.begin_capture(stream)
        with self.on(stream):
            try:
                yield graph
            finally:
                graph.number = self._driver.end_capture(stream)
        if graph.number <= 0:
            raise SpoiltError(f"the end of the capture answers {graph.number}")

    def memory(self) -> AbstractContextManager[object]:
        """Elsewhere it would be kvpool's."""
        return self._software.memory_of_pytorch()

    def order(self, first: Any, second: Any) -> None:  # noqa: ANN401, ARG002
        """Runs what the first has to do."""
        self._driver.run(first)

    def delay(self) -> None:
        """Work is late anyway."""

    def synchronize(self) -> None:
        """Runs all work."""
        self._driver.run()


def is_software() -> bool:
    """Whether the driver in this process is the one made of software."""
    return hasattr(ctypes.CDLL(None), "soft_calls")


def open_device() -> Device:
    """The device of this process, from now on in use by PyTorch."""
    make: Callable[[], Device] = SoftwareGpu if is_software() else RealGpu
    return make()
