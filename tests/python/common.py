"""What the suites of several classes have in common."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
import torch

from kvpool._kvpool import _use_stream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

T = TypeVar("T")

THREADS = 8

STORAGE = [
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.uint8,
]
"""The dtypes of storage."""

cuda_only = pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.cuda)], indirect=True)
"""For a test of a suite that runs on every device, and has to do with GPUs alone."""


@dataclass
class Fence:
    """Work in flight: passed as soon as a test sets `done`."""

    done: bool = False
    queries: int = 0

    def query(self) -> bool:
        self.queries += 1
        return self.done


def some(value: T | None) -> T:
    """What must not be None."""
    assert value is not None
    return value


def outcome(call: Callable[[], Any]) -> Any:  # noqa: ANN401
    """What a call answers, or the class of what it raises."""
    try:
        return call()
    except Exception as error:  # noqa: BLE001 - the caller looks at it
        return type(error)


def together(work: Callable[[int], None]) -> None:
    """Runs `work(0)` to `work(7)` at once, and raises what any of them raised."""
    barrier = threading.Barrier(THREADS)

    def start(number: int) -> None:
        barrier.wait()
        work(number)

    with ThreadPoolExecutor(THREADS) as executor:
        for future in [executor.submit(start, number) for number in range(THREADS)]:
            future.result()


@contextmanager
def on_stream(handle: int) -> Iterator[None]:
    """What `torch.cuda.stream` does, where there is no PyTorch stream."""
    _use_stream(handle)
    try:
        yield
    finally:
        _use_stream(None)
