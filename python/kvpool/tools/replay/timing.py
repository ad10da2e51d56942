"""Timing of single calls."""

from __future__ import annotations

from array import array
from time import perf_counter_ns
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")
R = TypeVar("R")


def timed(call: Callable[P, R], nanoseconds: array[int]) -> Callable[P, R]:
    """Wrap `call` so that each call's duration is appended to `nanoseconds`."""

    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        begin = perf_counter_ns()
        result = call(*args, **kwargs)
        nanoseconds.append(perf_counter_ns() - begin)
        return result

    return run


def timer_cost_ns() -> float:
    """Return the median nanoseconds that `timed` reports for an empty call."""
    samples = array("q")
    empty = timed(lambda _: None, samples)
    for _ in range(10_000):
        empty(0)
    return float(np.median(np.frombuffer(samples, dtype=np.int64)))
