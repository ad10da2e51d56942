"""Output of `kvpool serve`: a stream of text, a live table, and the result as a table or as JSON."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import torch
from rich.live import Live
from rich.progress import track
from rich.table import Table
from rich.text import Text
from transformers.utils import logging

from kvpool_serving.service import Service, spell

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import Console

    from kvpool_serving.service import ServeConfig, ServeResult

STREAMED = 3
UPDATES_PER_SECOND = 8


def as_json(result: ServeResult) -> dict[str, Any]:
    """Return the result as plain values."""
    values = {
        "config": asdict(result.config),
        **result.stats,
        "hit_rate": result.hit_rate,
        "host_pages": result.host_pages,
        "host_capacity": result.host_capacity,
        "stored_pages": result.stored_pages,
        "peak_in_use": result.peak_in_use,
        "peak_running": result.peak_running,
        "differences": [{**found._asdict(), "is_tie": found.is_tie} for found in result.differences],
        "is_right": result.is_right,
        "timing": {
            "served_s": result.served_s,
            "first_token_s": result.first_token_s,
            "checked_s": result.checked_s,
        },
    }
    if result.uncached is not None:
        values["uncached"] = as_json(result.uncached)
    return values


@contextmanager
def quiet() -> Iterator[None]:
    """Silence advice, and let PyTorch use one thread: the matrices are too small to gain from more."""
    log: Any = logging
    threads, verbosity = torch.get_num_threads(), log.get_verbosity()
    torch.set_num_threads(1)
    log.set_verbosity_error()  # hides advice about faster kernels
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        log.set_verbosity(verbosity)


def run(config: ServeConfig, console: Console) -> ServeResult:
    """Stream, serve, check and report."""
    with quiet():
        result = served(Service(config), console)
        if config.conversations:
            alone = replace(config, prefix_cache=False, host_tokens=0, store="")
            result.uncached = served(Service(alone), console)
    print_report(result, console)
    return result


def served(service: Service, console: Console) -> ServeResult:
    """Serve and check."""
    if not service.config.conversations:
        stream(service, console)
    with live(console) as update:
        result = service.serve(update)
    checked(service, result, console)
    return result


def stream(service: Service, console: Console) -> None:
    """Stream a few requests that run together: the first as it is generated, the others after it."""
    requests = [service.submit() for _ in range(STREAMED)]
    for number, request in enumerate(requests, 1):
        console.print(
            f"request {number} of {STREAMED}, {len(request.prompt)} tokens of prompt:", style="dim", end=" "
        )
        for token in request.follow(service.server.step):
            console.print(Text(spell(token)), end="", soft_wrap=True)
        console.print()


@contextmanager
def live(console: Console) -> Iterator[Callable[[dict[str, int], float], None]]:
    """Show a live table, updated after each step."""
    with Live(console=console, refresh_per_second=UPDATES_PER_SECOND) as view:
        yield lambda stats, rate: view.update(_now(stats, rate))
    if not console.is_terminal:
        console.print()


def checked(service: Service, result: ServeResult, console: Console) -> None:
    """Check the result, with a progress bar."""
    bar = iter(track(service.requests, "checking against the model alone", console=console))
    service.check(result, lambda: next(bar, None))
    next(bar, None)


def print_report(result: ServeResult, console: Console) -> None:
    """Print the result, beside the one without the prefix cache, if there is one."""
    stats, config = result.stats, result.config
    table = Table(
        title=f"Served {stats['finished']} requests of a {config.model} model on {config.device}",
        show_header=result.uncached is not None,
        title_justify="left",
    )
    columns = [result] if result.uncached is None else [result, result.uncached]
    table.add_column()
    for header in ("with the prefix cache", "without")[: len(columns)]:
        table.add_column(header, justify="right")
    rows = [_rows(column, of=result) for column in columns]
    for row in zip(*rows, strict=True):
        table.add_row(row[0][0], *(value for _, value in row))
    console.print(table)
    for found in (found for column in columns for found in column.differences if not found.is_tie):
        console.print(
            f"request {found.request} differs from token {found.position} on, "
            f"by {found.gap:.4f} in the logits of the model alone"
        )


def _rows(result: ServeResult, *, of: ServeResult) -> list[tuple[str, str]]:
    """Return names and values, in the same rows as those of another result."""
    stats = result.stats
    share = 100 * result.peak_in_use / stats["capacity"]
    ties = sum(found.is_tie for found in result.differences)
    host = [
        ("host memory", f"{result.host_pages:,} of {result.host_capacity:,} pages"),
        ("loaded from there", f"{stats['loaded_tokens']:,} tokens, swap {result.config.swap}"),
    ]
    if of.config.store:
        host += [
            ("store", f"{result.stored_pages:,} pages"),
            ("fetched from there", f"{stats['fetched_tokens']:,} tokens"),
        ]
    return [
        ("pool", f"{stats['capacity']:,} slots, pages of {result.config.page_size}"),
        ("peak occupancy", f"{result.peak_in_use:,} slots, {share:.0f} %"),
        ("peak running", f"{result.peak_running} requests"),
        ("retractions", f"{stats['retractions']:,}"),
        ("steps", f"{stats['steps']:,}"),
        ("tokens generated", f"{stats['generated_tokens']:,}"),
        ("tokens computed", f"{stats['computed_tokens']:,}"),
        ("found in the cache", f"{stats['found_tokens']:,} tokens, {100 * result.hit_rate:.0f} %"),
        *(host if of.host_capacity else []),
        ("first token", f"after {1000 * result.first_token_s:,.0f} ms (median)"),
        ("served in", f"{result.served_s:,.1f} s"),
        ("checked in", f"{result.checked_s:,.1f} s"),
        ("equal to the model alone", f"{stats['finished'] - len(result.differences):,}"),
        ("different at a tie", f"{ties:,}"),
        ("wrong", f"{len(result.differences) - ties:,}"),
    ]


def _now(stats: dict[str, int], rate: float) -> Table:
    table = Table(show_edge=False)
    for name in ("running", "waiting", "finished", "retractions", "tokens/s", "pool"):
        table.add_column(name, justify="right", min_width=9)
    share = 100 * stats["in_use"] / stats["capacity"]
    names = ("running", "waiting", "finished", "retractions")
    table.add_row(*(f"{stats[name]:,}" for name in names), f"{rate:,.0f}", f"{share:.0f} %")
    return table
