"""How many prompts get one run of slots, in pools that are nearly full, by which of the runs is taken.

`make bench-contiguous` runs it with the Azure conversation trace. Requests run in continuous batching: the
next prompt comes as soon as the pool is no fuller with it than `--occupancy`. Each request takes the lowest
page every 16 tokens, or `--growth` pages at once in one run, and frees all when it ends. Prompts that find no
run take the lowest pages. Prompts are counted from when the pool is full for the first time; then a probe
asks whether 2,048 tokens would have had a run.
"""

from __future__ import annotations

import argparse
import heapq
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from harness import machine
from rich.console import Console
from rich.table import Table

from kvpool import TokenToKVPoolAllocator
from kvpool.tools.traces import read_trace

if TYPE_CHECKING:
    import torch

    from kvpool.tools.traces import Trace

    Fit = Literal[False, "first_fit", "best_fit"]

PAGE_SIZE = 16
PROBE = 2048
SIZES = (1 << 16, 1 << 18, 1 << 20)
FITS: tuple[Fit, ...] = (False, "first_fit", "best_fit")


@dataclass
class Request:
    """A request that runs."""

    slots: list[torch.Tensor]
    room: int
    left: int


@dataclass
class Batch:
    """Requests that run in a pool, and what their prompts got."""

    size: int
    fit: Fit
    occupancy: float
    growth: int
    is_full: bool = False
    pieces: list[int] = field(default_factory=list)
    long_pieces: list[int] = field(default_factory=list)
    probes: list[bool] = field(default_factory=list)
    call_us: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.allocator = TokenToKVPoolAllocator(self.size, "cpu", PAGE_SIZE)
        self.running: list[tuple[int, int, Request]] = []
        self.step = self.number = 0

    def run(self, trace: Trace) -> None:
        """Runs all requests that the pool can hold."""
        for prompt, output in zip(trace.input_lens.tolist(), trace.output_lens.tolist(), strict=True):
            pages = -(-prompt // PAGE_SIZE)
            most = int(self.occupancy * self.size) - pages * PAGE_SIZE
            if most < 0:
                continue
            while self.size - self.allocator.available_size() > most:
                self.is_full = True
                self.advance()
            self.begin(prompt, pages, output)

    def begin(self, prompt: int, pages: int, output: int) -> None:
        """Takes the slots of a prompt, and looks whether the probe would have got a run."""
        begun = time.perf_counter_ns()
        slots = self.allocator.alloc(pages * PAGE_SIZE, contiguous=self.fit)
        took = (time.perf_counter_ns() - begun) / 1000
        if slots is None:
            slots = self.allocator.alloc(pages * PAGE_SIZE)
        assert slots is not None
        if self.is_full:
            pieces = len(TokenToKVPoolAllocator.runs(slots))
            self.pieces.append(pieces)
            if prompt >= PROBE:
                self.long_pieces.append(pieces)
            self.call_us.append(took)
            self.probes.append(self.longest_run() >= PROBE)
        self.later(Request([slots], pages * PAGE_SIZE - prompt, output))

    def later(self, request: Request) -> None:
        """Comes back to a request when it ends or needs a page."""
        self.number += 1
        at = self.step + min(request.left, request.room + 1)
        heapq.heappush(self.running, (at, self.number, request))

    def advance(self) -> None:
        """Ends the next request, or gives it a page."""
        self.step, _, request = heapq.heappop(self.running)
        more = self.more() if request.left > request.room else None
        if more is None:
            with self.allocator.free_group():
                for slots in request.slots:
                    self.allocator.free(slots)
            return
        request.slots.append(more)
        request.left -= request.room + 1
        request.room = len(more) - 1
        self.later(request)

    def more(self) -> torch.Tensor | None:
        """Takes slots for the next tokens of a request."""
        slots = None
        if self.growth > 1:
            slots = self.allocator.alloc(self.growth * PAGE_SIZE, contiguous=self.fit)
        return self.allocator.alloc(PAGE_SIZE) if slots is None else slots

    def longest_run(self) -> int:
        """Tokens of the longest run of free slots."""
        pages = np.concatenate([self.allocator.free_slots, self.allocator.release_slots])
        pages.sort()
        breaks = np.flatnonzero(np.diff(pages) != 1)
        lengths = np.diff(np.concatenate([[-1], breaks, [len(pages) - 1]]))
        return int(lengths.max(initial=0)) * PAGE_SIZE


def share(found: list[bool]) -> str:
    """How many are true."""
    return f"{sum(found) / len(found):.0%}" if found else ""


def main() -> None:
    """Replays the trace in each pool."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path, help="an Azure LLM inference trace, CSV")
    parser.add_argument("--occupancy", type=float, default=0.9, help="of the pool (default: %(default)s)")
    parser.add_argument(
        "--growth", type=int, default=1, help="pages that a request takes at once (default: %(default)s)"
    )
    arguments = parser.parse_args()
    console = Console(width=160)
    if not arguments.trace.is_file():
        console.print(f"skipped: there is no trace {arguments.trace}")
        return
    trace = read_trace(arguments.trace)
    for name, value in machine().items():
        console.print(f"[dim]{name}:[/dim] {value}", highlight=False)
    table = Table(
        "slots",
        "run",
        "prompts in one run",
        f"prompts of {PROBE} and more",
        f"probes of {PROBE}",
        "pieces of a prompt",
        "call, us",
        title=f"Prompts of {trace.name} at {arguments.occupancy:.0%} occupancy, pages of {PAGE_SIZE}",
    )
    for size in SIZES:
        for fit in FITS:
            batch = Batch(size, fit, arguments.occupancy, arguments.growth)
            batch.run(trace)
            table.add_row(
                f"{size:,}",
                fit or "not asked for",
                share([pieces == 1 for pieces in batch.pieces]),
                share([pieces == 1 for pieces in batch.long_pieces]),
                share(batch.probes),
                f"{statistics.mean(batch.pieces):.1f}",
                f"{statistics.median(batch.call_us):.1f}",
            )
    console.print(table)


if __name__ == "__main__":
    main()
