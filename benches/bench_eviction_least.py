"""What `adaptive` finds at least of what `lru` finds: in small caches, and on traces made to mislead it.

`make bench-eviction-least` runs it on parts and orders of Mooncake's traces, if they are there, and on traces
of prompts that are made here. Each is replayed in caches of `SIZES` sizes, from 110 blocks or a 1,500th of
the trace's, to 60 % of these. `tokens` compares found tokens, `seconds` the seconds of 8B on one H100 that
`adaptive-seconds` saves. The least and the geometric mean of the ratios are printed, and how many caches are
below 0.97. Caches in which `lru` finds nothing are left out.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from harness import machine
from rich.console import Console
from rich.table import Table

from kvpool.tools.costs import COSTS
from kvpool.tools.policies import ADAPTIVE_IN_SECONDS
from kvpool.tools.replay.hit_rates import Job, measure
from kvpool.tools.traces import read_trace
from kvpool.tools.traces.trace import BLOCK_SIZE, Trace

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    Block = tuple[object, ...]
    """A block of a document or question, by any name."""

SIZES = 8
LEAST_BLOCKS, LEAST_SHARE, MOST_SHARE = 110, 1 / 1500, 0.6
WANTED = 0.97
LRU = "lru"


@dataclass
class Ratios:
    """What caches find, of what `lru` finds."""

    found: list[float] = field(default_factory=list)

    def add(self, own: float, lru: float) -> None:
        """Adds a cache, unless `lru` finds nothing."""
        if lru > 0:
            self.found.append(own / lru)

    def cells(self) -> tuple[str, ...]:
        """Least, geometric mean, and how many are below what is wanted."""
        if not self.found:
            return ("", "", "0 of 0")
        mean = float(np.exp(np.log(np.maximum(self.found, 1e-9)).mean()))
        below = sum(ratio < WANTED for ratio in self.found)
        return f"{min(self.found):.3f}", f"{mean:.3f}", f"{below} of {len(self.found)}"


def trace_of(name: str, prompts: Sequence[Sequence[Block]]) -> Trace:
    """Makes a trace of prompts, whose blocks are alike if all before them are, too."""
    numbers: dict[tuple[int, Block], int] = {}
    blocks = []
    for prompt in prompts:
        path, before = [], -1
        for block in prompt:
            before = numbers.setdefault((before, block), len(numbers))
            path.append(before)
        blocks.append(np.array(path))
    lens = np.array([len(path) for path in blocks]) * BLOCK_SIZE
    arrival_s = np.arange(len(lens), dtype=np.float64)
    return Trace(name, arrival_s, lens, np.ones_like(lens), tuple(blocks))


def reordered(trace: Trace, order: Sequence[int]) -> Trace:
    """Takes requests in another order, at the same times."""
    taken = trace.take(np.array(order, np.intp))
    return Trace(trace.name, trace.arrival_s[: len(order)], taken.input_lens, taken.output_lens, taken.blocks)


def parts_and_orders(trace: Trace) -> Iterator[tuple[str, Trace]]:
    """Parts of a trace, and orders of the whole."""
    count = len(trace)
    every = list(range(count))
    yield "the whole", trace
    for at, name in enumerate(("first", "second", "third")):
        yield f"{name} third", reordered(trace, every[at * count // 3 : (at + 1) * count // 3])
    for at in range(4):
        yield f"every fourth, from {at}", reordered(trace, every[at::4])
    yield "reversed", reordered(trace, every[::-1])
    for seed in range(3):
        chunks = [every[at : at + 250] for at in range(0, count, 250)]
        random.Random(seed).shuffle(chunks)
        yield f"chunks of 250, shuffled {seed}", reordered(trace, [at for chunk in chunks for at in chunk])


def documents(
    chance: random.Random, count: int, of: object, skew: float, lens: tuple[int, int]
) -> list[list[Block]]:
    """Prompts of documents, of which the first are asked for more often."""
    sizes = [chance.randint(*lens) for _ in range(100)]
    weights = [1 / (at + 1) ** skew for at in range(len(sizes))]
    return [
        [(of, at, i) for i in range(sizes[at])] for at in chance.choices(range(len(sizes)), weights, k=count)
    ]


def conversations(chance: random.Random, count: int, of: object) -> list[list[Block]]:
    """Prompts that continue one of the last eight, or begin anew."""
    prompts: list[list[Block]] = []
    for turn in range(count):
        if prompts and chance.random() < 0.6:
            before = prompts[-chance.randint(1, min(8, len(prompts)))]
            prompts.append([*before, *((of, turn, i) for i in range(2))])
        else:
            prompts.append([(of, turn, i) for i in range(chance.randint(10, 60))])
    return prompts


def made(seed: int) -> Iterator[tuple[str, Trace]]:
    """Traces in which what was learned is wrong a little later, or nothing can be learned."""
    chance = random.Random(seed)
    loop = [[("loop", at, i) for i in range(30)] for at in range(80)]
    yield "to and fro", trace_of("", (loop + loop[::-1]) * 25)
    growing = [[[(size, at, i) for i in range(25)] for at in range(10 + 8 * size)] for size in range(12)]
    yield "growing loops", trace_of("", [prompt for loop in growing for prompt in loop * 6])
    yield "documents", trace_of("", documents(chance, 4000, "all", 1.1, (1, 90)))
    other = [documents(chance, 120, period, 0.3, (5, 80)) for period in range(40)]
    yield "other documents every 120", trace_of("", [prompt for period in other for prompt in period])
    turns = (
        prompts
        for period in range(4)
        for prompts in (
            documents(chance, 800, (period, "old"), 0.9, (5, 60)),
            conversations(chance, 1200, (period, "new")),
        )
    )
    yield (
        "documents, then conversations, in turns",
        trace_of("", [prompt for part in turns for prompt in part]),
    )
    asked = [
        [*prompt, *(("q", n, i) for i in range(chance.randint(1, 20)))]
        for n, prompt in enumerate(documents(chance, 4000, "asked", 0.0, (40, 280)))
    ]
    yield "long documents, short questions", trace_of("", asked)
    yield "conversations", trace_of("", conversations(chance, 5000, "all"))


def replay(trace: Trace, tokens: Ratios, seconds: Ratios) -> None:
    """Replays a trace in caches of all sizes."""
    blocks = len(np.unique(np.concatenate(trace.all_blocks())))
    least, most = max(blocks * LEAST_SHARE, LEAST_BLOCKS), max(blocks * MOST_SHARE, 2 * LEAST_BLOCKS)
    capacities = [int(size) * BLOCK_SIZE for size in np.geomspace(least, most, SIZES)]
    job = Job((LRU, "adaptive", ADAPTIVE_IN_SECONDS), capacities, costs=(COSTS["8B"],))
    rates = {(rate.policy, rate.capacity): rate for rate in measure(trace, job).rates}
    for capacity in capacities:
        lru = rates[LRU, capacity]
        tokens.add(rates["adaptive", capacity].found_blocks, lru.found_blocks)
        seconds.add(rates[ADAPTIVE_IN_SECONDS, capacity].saved[0].seconds, lru.saved[0].seconds)


def main() -> None:
    """Replays all traces."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traces", type=Path, nargs="*", help="files in a format of `kvpool replay`")
    parser.add_argument(
        "--seed", type=int, default=0, help="of the traces that are made (default: %(default)s)"
    )
    arguments = parser.parse_args()
    console = Console(width=160)
    for name, value in machine().items():
        console.print(f"[dim]{name}:[/dim] {value}", highlight=False)
    table = Table("trace", "tokens: least", "mean", "below 0.97", "seconds: least", "mean", "below 0.97")
    all_tokens, all_seconds = Ratios(), Ratios()
    sources = [("made", made(arguments.seed))]
    for path in arguments.traces:
        if path.is_file():
            sources.append((path.stem, parts_and_orders(read_trace(path))))
        else:
            console.print(f"skipped: there is no trace {path}")
    for source, traces in sources:
        for name, trace in traces:
            tokens, seconds = Ratios(), Ratios()
            replay(trace, tokens, seconds)
            table.add_row(f"{source}: {name}", *tokens.cells(), *seconds.cells())
            all_tokens.found += tokens.found
            all_seconds.found += seconds.found
    table.add_section()
    table.add_row("all", *all_tokens.cells(), *all_seconds.cells())
    console.print(table)


if __name__ == "__main__":
    main()
