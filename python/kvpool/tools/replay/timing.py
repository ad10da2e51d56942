"""Timing single calls."""

from __future__ import annotations

from array import array
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

P = ParamSpec("P")
R = TypeVar("R")


def timed(call: Callable[P, R], nanoseconds: array[int]) -> Callable[P, R]:
    """Wraps `call` so that each call's duration is appended to `nanoseconds`."""

    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        begin = perf_counter_ns()
        result = call(*args, **kwargs)
        nanoseconds.append(perf_counter_ns() - begin)
        return result

    return run


class Timed:
    """A pool or planner, some of whose calls are timed.

    Args:
        timed_object: The pool or planner.
        samples: For each of these calls, by name, where its durations go.
        others: What else it has in place of its own.
    """

    def __init__(self, timed_object: object, samples: Mapping[str, array[int]], **others: object) -> None:
        self._object = timed_object
        vars(self).update(others)
        for name, nanoseconds in samples.items():
            setattr(self, name, timed(getattr(timed_object, name), nanoseconds))

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the pool has
        return getattr(self._object, name)


def timer_cost_ns() -> float:
    """Median nanoseconds that `timed` reports for a call that does nothing."""
    samples = array("q")
    empty = timed(lambda _: None, samples)
    for _ in range(10_000):
        empty(0)
    return float(np.median(np.frombuffer(samples, dtype=np.int64)))
