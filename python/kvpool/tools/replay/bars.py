"""A replay and a measurement of hit rates, with a progress bar."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

if TYPE_CHECKING:
    from rich.console import Console

    from kvpool.tools.replay.hit_rates import HitRate, HitRates, Job
    from kvpool.tools.replay.replay import Replay, ReplayResult
    from kvpool.tools.traces import Trace

STEPS_PER_UPDATE = 64


def run(job: Replay, console: Console | None) -> ReplayResult:
    """Run a replay, with a bar if there is a console for it."""
    if console is None:
        return job.run()
    columns = (
        TextColumn("replaying"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("requests, pool {task.fields[used]:3.0f} %"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    # A refresh competes with the timed calls for the interpreter, so there are few.
    with Progress(*columns, console=console, refresh_per_second=4) as bar:
        task = bar.add_task("", total=job.counts.requests, used=0.0)

        def update(state: Replay) -> None:
            if state.counts.steps % STEPS_PER_UPDATE == 0:
                bar.update(task, completed=state.ended, used=100.0 * state.in_use / state.capacity)

        result = job.run(update)
        bar.update(task, completed=job.ended, used=0.0)
        return result


def measure(trace: Trace, job: Job, console: Console | None) -> HitRates:
    """Measure the hit rates of policies, with a bar if there is a console for it."""
    from kvpool.tools.replay import hit_rates  # noqa: PLC0415 - it needs NumPy

    if console is None:
        return hit_rates.measure(trace, job)
    columns = (
        TextColumn("measuring {task.fields[last]}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=len(job.policies) * len(job.capacities), last="")

        def update(rate: HitRate) -> None:
            bar.update(task, advance=1, last=rate.policy)

        return hit_rates.measure(trace, job, update)
