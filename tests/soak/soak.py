"""Uses all pools for hours, and decides whether the process grows.

Each round replays a part of a trace with a fresh seed, with every byte of K and V checked; lets random users
work on pools that stay from the first round to the last; and makes pools of every kind anew, uses and drops
them. Between rounds it samples what the process holds. Ends with status 1 if something grew, or a pool was
wrong, and with 2 if there was not enough time to say.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, replace
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

import numpy as np
import torch
from memory_curve import COLUMNS, LIMITS, Trend, find_trends, read_samples, save_curve, take_sample
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from shared_pools import Pools, Sizes
from users import users_of

from kvpool._kvpool import _STORAGE_DTYPES
from kvpool.tools.replay.config import ReplayConfig
from kvpool.tools.replay.replay import Replay
from kvpool.tools.traces import Trace, read_trace, synthetic_trace

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray
    from shared_pools import User

TRACES = Path(__file__).parents[3] / "shared" / "traces"
FILES = ("azure/AzureLLMInferenceTrace_conv.csv", "mooncake/conversation_trace.jsonl")
TOKENS_PER_ROUND = 30_000
LONGEST = 12_000
STEPS_PER_ROUND = 60
USERS = 4
LAYOUTS = tuple(itertools.product((1, 16), (True, False)))


def load_traces(folder: Path) -> list[Trace]:
    """The published traces, as far as they are there."""
    return [read_trace(folder / name) for name in FILES if (folder / name).is_file()]


def part_of(trace: Trace, choose: random.Random) -> Trace:
    """Some requests in a row, none of them very long, with about `TOKENS_PER_ROUND` tokens."""
    kept = np.flatnonzero(trace.total_lens <= LONGEST)
    begin = choose.randrange(len(kept))
    kept = np.roll(kept, -begin)
    ends = np.cumsum(trace.total_lens[kept])
    kept = np.sort(kept[: int(np.searchsorted(ends, TOKENS_PER_ROUND)) + 1])
    part = trace.take(kept)
    return replace(part, arrival_s=part.arrival_s - part.arrival_s[0])


def take_steps(users: list[User]) -> int:
    """Lets all of them work in turn, and says how many operations that were."""
    for _ in range(STEPS_PER_ROUND):
        for user in users:
            user.step()
    return STEPS_PER_ROUND * len(users)


class Soak:
    """Rounds without end.

    Attributes:
        rounds, operations: Done so far.
    """

    def __init__(self, device: str, seed: int, traces: list[Trace]) -> None:
        self.device = device
        self.rounds = self.operations = 0
        self._random = random.Random(seed)
        self._traces = traces
        # These stay: what they lose is never found again.
        self._pools = [
            Pools(Sizes(device, page_size, need_sort, users=USERS)) for page_size, need_sort in LAYOUTS
        ]
        self._users = [
            [user for number in range(USERS) for user in users_of(pools, number, seed)]
            for pools in self._pools
        ]

    def round(self) -> None:
        """One round; what it makes is dropped."""
        page_size, need_sort = LAYOUTS[self.rounds % len(LAYOUTS)]
        self._replay(page_size, need_sort=need_sort)
        for users in self._users:
            self.operations += take_steps(users)
        for pools in self._pools:
            pools.check()
            # It keeps as many buffers of a size as there ever were at once, and records are set for hours.
            pools.buffers.clear()
        self._work_anew(Sizes(self.device, page_size, need_sort, strict=self.rounds % 2 == 0, users=USERS))
        self.rounds += 1

    def finish(self) -> None:
        """Gives everything back, and looks whether everything is there."""
        for pools, users in zip(self._pools, self._users, strict=True):
            for user in users:
                user.finish()
            pools.check_returned(users)

    def _seed(self) -> int:
        return self._random.randrange(1 << 32)

    def _replay(self, page_size: int, *, need_sort: bool) -> None:
        seed = self._seed()
        # Every other round has a synthetic trace.
        which = self.rounds // 2 % len(self._traces) if self._traces and self.rounds % 2 else None
        trace = synthetic_trace(200, seed) if which is None else self._traces[which]
        config = ReplayConfig(
            page_size=page_size,
            need_sort=need_sort,
            dtype=self._random.choice([*_STORAGE_DTYPES]),
            device=self.device,
            seed=seed,
            speed_up=4.0,
        )
        self.operations += Replay(part_of(trace, self._random), config).run().counts.operations

    def _work_anew(self, sizes: Sizes) -> None:
        """Users on threads of their own, on pools that are made for them."""
        pools, seed = Pools(sizes), self._seed()
        groups = [users_of(pools, number, seed) for number in range(USERS)]
        with ThreadPoolExecutor(USERS) as threads:
            list(threads.map(take_steps, groups))
        everybody = [user for users in groups for user in users]
        for user in everybody:
            user.finish()
            self.operations += user.operations
        pools.check_returned(everybody)


def soak_for(  # noqa: PLR0913 - and the clock, for tests
    soak: Soak,
    seconds: float,
    every_s: float,
    path: Path,
    on_round: Callable[[Soak, float], object],
    *,
    clock: Callable[[], float] = monotonic,
) -> None:
    """Rounds until the time is over; a sample between two of them when the last is `every_s` old.

    Args:
        soak: What to do.
        seconds: For how long, and until the round has ended.
        every_s: Seconds between samples.
        path: Where samples go.
        on_round: Called with `soak` and the seconds so far after each round.
        clock: Seconds since any time.
    """
    begin = sampled = clock()
    # Samples are written as they come, so that none is lost and none takes memory.
    with path.open("w", encoding="ascii", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        while clock() - begin < seconds:
            soak.round()
            on_round(soak, clock() - begin)
            if (now := clock()) - sampled >= every_s:
                sampled = now
                sample = take_sample(now - begin, soak.rounds, soak.operations, soak.device)
                writer.writerow(astuple(sample))
                file.flush()


def print_report(columns: dict[str, NDArray[np.float64]], trends: Sequence[Trend], console: Console) -> None:
    """Prints a table of what grew and what did not."""
    seconds, rounds, operations = (columns[name][-1] for name in ("seconds", "rounds", "operations"))
    table = Table(
        title=f"{seconds / 60:.1f} minutes, {rounds:,.0f} rounds, {operations:,.0f} operations; "
        f"slopes of the second half",
        title_justify="left",
    )
    for name in ("series", "first", "last", "an hour", "allowed", "flat"):
        table.add_column(name, justify="left" if name == "series" else "right")
    for trend in trends:
        table.add_row(
            trend.name,
            f"{trend.first:,.0f}",
            f"{trend.last:,.0f}",
            f"{trend.per_hour:+,.1f}",
            f"{trend.limit:,.0f}",
            "yes" if trend.is_flat else "NO",
        )
    console.print(table)


def make_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    add = parser.add_argument
    add("--minutes", type=float, default=60.0, help="for how long; 0 with --hours")
    add("--hours", type=float, default=0.0, help="for how long, in hours, besides --minutes")
    add("--device", default="cpu", help="where the pools live, as PyTorch writes it")
    add("--every-s", type=float, default=5.0, help="seconds between samples")
    add("--seed", type=int, default=0, help="of the first round")
    add("--out", type=Path, default=Path("target"), help="folder of soak.csv and soak.png")
    add("--traces", type=Path, default=TRACES, help="folder of published traces, if it is there")
    limit = "KiB by which resident and anonymous memory may grow in an hour"
    add("--memory-limit", type=float, default=LIMITS["rss_kib"], help=limit)
    return parser


def main() -> int:
    """Use all pools again and again, and end with status 1 if the process grows."""
    options = make_parser().parse_args()
    console = Console(stderr=True)
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    samples, png = options.out / "soak.csv", options.out / "soak.png"
    soak = Soak(options.device, options.seed, load_traces(options.traces))
    columns = (TextColumn("soaking"), BarColumn(), TextColumn("{task.fields[done]}"))
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console) as bar:
        total = 60.0 * options.minutes + 3600.0 * options.hours
        task = bar.add_task("", total=total, done="")

        def update(soak: Soak, seconds: float) -> None:
            bar.update(
                task, completed=seconds, done=f"{soak.rounds:,} rounds, {soak.operations:,} operations"
            )

        try:
            soak_for(soak, total, options.every_s, samples, update)
        except KeyboardInterrupt:
            console.print("interrupted; what follows is about the time until then")
        else:
            soak.finish()
    limit = options.memory_limit
    return deliver(samples, png, {**LIMITS, "rss_kib": limit, "anonymous_kib": limit})


def deliver(samples: Path, png: Path, limits: dict[str, float]) -> int:
    """Prints and draws what is in the CSV file, and says how the script ends."""
    found = read_samples(samples)
    trends = find_trends(found, limits)
    if not trends:
        sys.stdout.write(f"{len(found['seconds'])} samples are too few to say whether anything grows\n")
        return 2
    print_report(found, trends, Console())
    save_curve(found, trends, png)
    sys.stdout.write(f"samples: {samples}, picture: {png}\n")
    return 0 if all(trend.is_flat for trend in trends) else 1


if __name__ == "__main__":
    sys.exit(main())
