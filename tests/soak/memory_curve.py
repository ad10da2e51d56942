"""The memory of a process over time, and whether it grows.

A sample is taken when nothing runs. Whether a series is flat is decided by the Theil-Sen slope, the median of
the slopes between all pairs of samples, of its second half: the first half is for warming up, and neither one
jump nor a few outliers move a median. A leak goes on, and so moves all of them.
"""

from __future__ import annotations

import csv
import ctypes
import gc
import os
import re
import threading
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

HOUR_S = 3600.0
MOST_POINTS = 600
"""Longer series are thinned to medians of equal parts, for the pairs grow with the square."""
LEAST_POINTS = 8

LIMITS = {
    "rss_kib": 2048.0,
    "anonymous_kib": 2048.0,
    "heap_kib": 512.0,
    "device_kib": 64.0,
    "objects": 500.0,
    "fds": 2.0,
}
"""By how much a series may grow in an hour. Private memory has no limit: libraries that another process stops
or starts to use, too, are private at one time and not at another."""


@dataclass(frozen=True)
class Sample:
    """The memory of a process at one time.

    Attributes:
        seconds: Since the beginning.
        rounds, operations: Done so far.
        rss_kib: Memory that is resident.
        uss_kib: The part of it that no other process has.
        anonymous_kib: The part of it that is no file's, such as the heap.
        heap_kib: What malloc has given to somebody; 0 where the C library does not say. Resident memory may
            have steps of some MiB besides, one for each of malloc's arenas, which keep the most that their
            threads ever had at one time.
        device_kib: Memory of the GPU that is in use, by whomever; 0 without one.
        objects: Live objects that the garbage collector knows.
        fds: Open file descriptors.
        threads: Threads of the process.
    """

    seconds: float
    rounds: int
    operations: int
    rss_kib: int
    uss_kib: int
    anonymous_kib: int
    heap_kib: int
    device_kib: int
    objects: int
    fds: int
    threads: int


COLUMNS = tuple(field.name for field in fields(Sample))


class MallInfo2(ctypes.Structure):
    """`struct mallinfo2` of glibc 2.33 and later: ten sizes."""

    _fields_ = (("sizes", ctypes.c_size_t * 10),)


def heap_bytes() -> int:
    """Bytes allocated by malloc, in arenas and as mappings; 0 where the C library does not report them."""
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo2 is None:
        return 0
    mallinfo2.restype = MallInfo2
    sizes = mallinfo2().sizes
    # `uordblks` and `hblkhd`.
    return int(sizes[7]) + int(sizes[4])


def take_sample(seconds: float, rounds: int, operations: int, device: str) -> Sample:
    """Looks at this process, after a garbage collection, and without what malloc keeps for later."""
    gc.collect()
    # Freed memory between live pieces stays resident else: steps of some MiB, at any time, that are no leak.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    text = Path("/proc/self/smaps_rollup").read_text(encoding="ascii")
    sizes = {name: int(size) for name, size in re.findall(r"^(\w+): +(\d+) kB$", text, re.MULTILINE)}
    free, total = torch.cuda.mem_get_info(device) if device != "cpu" else (0, 0)
    return Sample(
        seconds=round(seconds, 3),
        rounds=rounds,
        operations=operations,
        rss_kib=sizes["Rss"],
        uss_kib=sizes["Private_Clean"] + sizes["Private_Dirty"],
        anonymous_kib=sizes["Anonymous"],
        heap_kib=heap_bytes() // 1024,
        device_kib=(total - free) // 1024,
        objects=len(gc.get_objects()),
        fds=len(os.listdir("/proc/self/fd")),  # noqa: PTH208 - names alone
        threads=threading.active_count(),
    )


def read_samples(path: Path) -> dict[str, NDArray[np.float64]]:
    """The columns of a file."""
    with path.open(encoding="ascii", newline="") as file:
        rows = list(csv.reader(file))
    table = np.array(rows[1:], dtype=np.float64).reshape(-1, len(COLUMNS))
    return dict(zip(rows[0], table.T, strict=True))


def theil_sen(times: NDArray[np.float64], values: NDArray[np.float64]) -> float:
    """The median of the slopes between all pairs of points with different times."""
    first, second = np.triu_indices(len(times), 1)
    apart = times[second] - times[first]
    slopes = (values[second] - values[first])[apart > 0] / apart[apart > 0]
    return float(np.median(slopes))


def _thinned(values: NDArray[np.float64]) -> NDArray[np.float64]:
    parts = np.array_split(values, min(len(values), MOST_POINTS))
    return np.array([np.median(part) for part in parts])


class Trend(NamedTuple):
    """Whether one series is flat.

    Attributes:
        name: Of the column.
        first, last: Its first and last value.
        per_hour: The slope of its second half.
        limit: The most that it may be.
    """

    name: str
    first: float
    last: float
    per_hour: float
    limit: float

    @property
    def is_flat(self) -> bool:
        """Whether it grows no faster than it may."""
        return self.per_hour <= self.limit


def second_half(seconds: NDArray[np.float64]) -> slice:
    """Where the second half of the time begins."""
    return slice(int(np.searchsorted(seconds, (seconds[0] + seconds[-1]) / 2)), None)


def find_trends(columns: dict[str, NDArray[np.float64]], limits: dict[str, float]) -> list[Trend]:
    """How each series with a limit grows; nothing if there are too few samples to say."""
    seconds = columns["seconds"]
    if len(seconds) < 2 * LEAST_POINTS:
        return []
    half = second_half(seconds)
    hours = _thinned(seconds[half]) / HOUR_S
    if len(hours) < LEAST_POINTS:
        return []
    return [
        Trend(name, values[0], values[-1], theil_sen(hours, _thinned(values[half])), limit)
        for name, limit in limits.items()
        for values in [columns[name]]
    ]


def save_curve(columns: dict[str, NDArray[np.float64]], trends: Sequence[Trend], path: Path) -> None:
    """Draws each series over time, with the slope of its second half if it has a limit."""
    from matplotlib.figure import Figure

    by_name = {trend.name: trend for trend in trends}
    shown = [name for name in COLUMNS[COLUMNS.index("rss_kib") :] if columns[name].any()]
    minutes = columns["seconds"] / 60
    half = second_half(minutes)
    figure = Figure(figsize=(11.0, 2.0 * len(shown)), layout="constrained")
    figure.suptitle(f"{minutes[-1]:.1f} minutes, {int(columns['operations'][-1]):,} operations")
    for axes, name in zip(figure.subplots(len(shown), sharex=True), shown, strict=True):
        values = columns[name]
        axes.plot(minutes, values, linewidth=0.9, label=name)
        if name in by_name:
            per_hour, limit = by_name[name].per_hour, by_name[name].limit
            line = np.median(values[half]) + per_hour / 60 * (minutes[half] - np.median(minutes[half]))
            label = f"{per_hour:+,.1f} an hour, {limit:,.0f} allowed"
            axes.plot(minutes[half], line, color="black", linewidth=1.0, linestyle="--", label=label)
        axes.set_ylim(bottom=0)
        axes.legend(loc="lower right", frameon=False)
    axes.set_xlabel("minutes")
    figure.savefig(path, dpi=120)
