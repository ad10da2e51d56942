"""The device that a check runs on: a GPU under PyTorch, or the driver made of software.

Both have streams and captures of CUDA graphs. On a GPU the graphs are PyTorch's own; the driver made of
software has no PyTorch runtime, and captures with functions that it has for tests.
"""

from __future__ import annotations

import ctypes
import sys
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kvpool._kvpool import _use_stream

if TYPE_CHECKING:
    from collections.abc import Iterator

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python" / "support"))

BUSY_CYCLES = 20_000_000
"""About 10 ms on a GPU of 2 GHz."""


class SpoiltError(Exception):
    """A capture did not survive."""


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

    def use_pytorch(self) -> None:
        """The GPU is in use from the beginning."""

    def stream(self) -> Any:  # noqa: ANN401
        return torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def on(self, stream: Any) -> AbstractContextManager[object]:  # noqa: ANN401
        return torch.cuda.stream(stream)

    @contextmanager
    def capturing(self, stream: Any) -> Iterator[_CountingGraph]:  # noqa: ANN401
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
        second.wait_stream(first)

    def delay(self) -> None:
        """A kernel that counts cycles."""
        torch.cuda._sleep(BUSY_CYCLES)  # type: ignore[no-untyped-call]

    def synchronize(self) -> None:
        torch.cuda.synchronize()


class _SoftwareGraph:
    def __init__(self, driver: Any) -> None:  # noqa: ANN401
        self._driver = driver
        self.number = 0
        self.stream = 0

    def replay(self) -> None:
        self._driver.replay(self.number, self.stream)
        self._driver.run()


class SoftwareGpu:
    """The driver made of software.

    Args:
        driver: Its functions for tests, if PyTorch runs on it already.
    """

    is_software = True

    def __init__(self, driver: Any = None) -> None:  # noqa: ANN401
        import software

        self._software = software
        self._driver = driver or software.Driver()
        self._has_pytorch = driver is not None
        # Nothing runs before somebody waits for it.
        self._driver.set_patience(1 << 60)
        self._current: list[int] = []

    def use_pytorch(self) -> None:
        """Puts `SoftwareTorch` around everything from now on."""
        if not self._has_pytorch:
            self._has_pytorch = True
            torch.set_num_threads(1)
            torch.cuda._lazy_init = lambda: None
            torch._C._cuda_init()
            self._software.SoftwareTorch().__enter__()  # type: ignore[no-untyped-call]

    def stream(self) -> Any:  # noqa: ANN401
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
    def capturing(self, stream: Any) -> Iterator[_SoftwareGraph]:  # noqa: ANN401
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
        self._driver.run(first)

    def delay(self) -> None:
        """Work is late anyway."""

    def synchronize(self) -> None:
        self._driver.run()


Device = RealGpu | SoftwareGpu


def is_software() -> bool:
    """Whether the driver in this process is the one made of software."""
    return hasattr(ctypes.CDLL(None), "soft_calls")


def open_device() -> Device:
    """The device of this process."""
    return SoftwareGpu() if is_software() else RealGpu()
