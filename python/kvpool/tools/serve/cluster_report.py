"""Output of `kvpool serve` for a cluster: the work of each process, while it runs and at the end."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table

from kvpool.cluster import Router, read_secret
from kvpool.tools.output import bytes_text
from kvpool.tools.serve import report
from kvpool.tools.serve.cluster import Cluster, children, common, new_secret
from kvpool.tools.serve.service import Service

if TYPE_CHECKING:
    from rich.console import Console

    from kvpool.cluster import WorkerStatus
    from kvpool.tools.serve.cluster import Options
    from kvpool.tools.serve.service import ServeConfig, ServeResult


def run(config: ServeConfig, options: Options, console: Console) -> ServeResult:
    """Start a router, and perhaps workers; serve with them, check and report."""
    options.check(config)
    secret = read_secret(options.secret_file or None) if options.role else new_secret()
    with (
        report.quiet(),
        Router(secret, options.listen, allow_remote=options.allow_remote, model=common(config)) as router,
    ):
        cluster = Cluster(router)
        console.print(f"router at {router.address}", highlight=False)
        with nullcontext() if options.role else children(config, options, cluster, secret):
            cluster.wait(max(options.prefill, 1), max(options.decode, 1), options.join_timeout_s)

            def now(stats: dict[str, int], rate: float) -> Group:
                return Group(table(router.workers()), f"{stats['finished']:,} finished, {rate:,.0f} tokens/s")

            result = report.served(Service(config, cluster), console, now)
            result.workers = tuple(router.workers())
    report.print_report(result, console)
    console.print(table(result.workers))
    return result


def table(workers: tuple[WorkerStatus, ...] | list[WorkerStatus]) -> Table:
    """Return the workers with what they do."""
    table = Table(show_edge=False)
    table.add_column("worker")
    for name in ("has", "runs", "moves", "found", "computed", "read", "made", "pool"):
        table.add_column(name, justify="right")
    for name, _, is_alive, requests, _, stats in workers:
        if not is_alive:
            table.add_row(name, "lost", style="red")
        elif stats:
            share = 100 * stats["in_use"] / stats["capacity"]
            columns = ("running", "moving", "found_tokens", "computed_tokens")
            numbers = [f"{stats[column]:,}" for column in columns]
            table.add_row(
                name,
                f"{requests:,}",
                *numbers,
                bytes_text(stats["read_bytes"]),
                f"{stats['generated_tokens']:,}",
                f"{share:.0f} %",
            )
    return table
