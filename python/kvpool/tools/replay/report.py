"""A replay's result as tables and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table

from kvpool.tools.policies import BELADY
from kvpool.tools.replay.replay import BOOKKEEPING, OPERATIONS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from rich.console import Console

    from kvpool.tools.replay.hit_rates import HitRate, HitRates
    from kvpool.tools.replay.hybrid_rates import HybridRate, HybridRates
    from kvpool.tools.replay.replay import ReplayResult
    from kvpool.tools.replay.window_rates import WindowRate, WindowRates


def as_json(result: ReplayResult) -> dict[str, Any]:
    """Return the result as plain values; everything that depends on the machine's speed is in `"timing"`.

    Operation times are in nanoseconds, and None without calls.
    """
    counts = result.counts
    return {
        "trace": result.trace,
        "config": asdict(result.config),
        "capacity": result.capacity,
        "kv_bytes": result.kv_bytes,
        **asdict(counts),
        "peak_in_use_share": counts.peak_in_use / result.capacity if result.capacity else 0.0,
        "operations": counts.operations,
        "virtual_s": result.virtual_s,
        "timing": {
            "wall_s": result.wall_s,
            "share_ns_per_operation": result.share_ns,
            "timer_ns": result.timer_ns,
            "calls": {name: _call_times(result.samples[name]) for name in OPERATIONS},
        },
    }


def print_report(result: ReplayResult, console: Console) -> None:
    """Print the counters and the times of the pools' calls."""
    console.print(_summary(result))
    console.print(_calls(result))
    console.print(
        f"pools' share: {result.share_ns / 1e3:.3f} us per operation ({', '.join(BOOKKEEPING)} over "
        f"{result.counts.operations:,} admissions, decoded tokens, finishes and retractions)\n"
        f"timer: every call includes {result.timer_ns:.0f} ns of measurement",
        highlight=False,
    )


def rates_as_json(rates: HitRates) -> dict[str, Any]:
    """Return the hit rates as plain values."""
    plain = asdict(rates)
    plain["unlimited_hit_rate"] = rates.repeated_blocks / rates.blocks
    for entry, rate in zip(plain["rates"], rates.rates, strict=True):
        entry["hit_rate"] = rates.share(rate)
    return plain


def print_rates(rates: HitRates, console: Console) -> None:
    """Print a row for each policy and a column for each capacity."""
    console.print(f"Prompt blocks found, {rates.trace}", style="italic", highlight=False)
    table = Table()
    table.add_column("policy")
    for capacity in dict.fromkeys(rate.capacity for rate in rates.rates):
        table.add_column(tokens_text(capacity), justify="right")
    for policy in dict.fromkeys(rate.policy for rate in rates.rates):
        shares = (f"{rates.share(rate):.1%}" for rate in rates.rates if rate.policy == policy)
        table.add_row(policy, *shares)
    console.print(table)
    console.print(
        f"{rates.blocks:,} blocks of {rates.block_size} tokens in {rates.requests:,} prompts, pages of "
        f"{rates.page_size}; an unlimited cache finds {rates.repeated_blocks / rates.blocks:.1%}"
        f"{_beside(rates)}; "
        f"{sum(rate.wall_s for rate in rates.rates):,.1f} s",
        highlight=False,
    )


def _beside(rates: HitRates) -> str:
    return f"; requests have {rates.in_use:.1%} of each pool" if rates.in_use else ""


def shares_as_json(rates: HybridRates | WindowRates) -> dict[str, Any]:
    """Return what models with other memory beside pages find as plain values."""
    each: Sequence[HybridRate | WindowRate] = rates.rates
    return {**asdict(rates), "rates": [{**asdict(rate), "share_found": rate.share} for rate in each]}


def print_hybrid_rates(rates: HybridRates, console: Console) -> None:
    """Print a row for each capacity and size of snapshots."""
    console.print(f"Tokens found by hybrid models, {rates.trace}", style="italic", highlight=False)
    table = Table()
    for column in ("memory", "a snapshot", "snapshots", "full attention", "hybrid", "share"):
        table.add_column(column, justify="right")
    for rate in rates.rates:
        table.add_row(
            tokens_text(rate.capacity),
            f"{rate.snapshot_tokens:,}",
            f"{rate.snapshots:,}",
            f"{rate.full_tokens / rates.prompt_tokens:.1%}",
            f"{rate.hybrid_tokens / rates.prompt_tokens:.1%}",
            f"{rate.share:.1%}",
        )
    console.print(table)
    memory = "as much memory as they are worth" if rates.share is None else f"{rates.share:.0%} of the memory"
    console.print(
        f"{rates.prompt_tokens:,} tokens in whole blocks of {rates.requests:,} prompts, in chunks of "
        f"{rates.chunk:,}; policy {rates.policy}.",
        f"Snapshots: {memory}. memory, a snapshot: in tokens of K and V.",
        sep="\n",
        highlight=False,
    )


def print_window_rates(rates: WindowRates, console: Console) -> None:
    """Print a row for each capacity and model."""
    console.print(f"Tokens found by models with windows, {rates.trace}", style="italic", highlight=False)
    table = Table()
    for column in ("memory", "window", "layers with one", "if it were free", "found", "share"):
        table.add_column(column, justify="right")
    for rate in rates.rates:
        table.add_row(
            tokens_text(rate.capacity),
            f"{rate.model.window:,}",
            f"{rate.model.layers} of {rate.model.layers + 1}",
            f"{rate.possible_tokens / rates.prompt_tokens:.1%}",
            f"{rate.found_tokens / rates.prompt_tokens:.1%}",
            f"{rate.share:.1%}",
        )
    console.print(table)
    console.print(
        f"{rates.prompt_tokens:,} tokens in whole blocks of {rates.requests:,} prompts, in chunks of "
        f"{rates.chunk:,}; policy {rates.policy}.",
        "memory: in tokens of K and V of all layers. "
        "if it were free: if windows took no memory and were everywhere.",
        sep="\n",
        highlight=False,
    )


def print_comparison(rates: HitRates, console: Console) -> None:
    """Print a table for each capacity, with a row for each policy."""
    console.print(f"Prefix caches by their policies, {rates.trace}", style="italic", highlight=False)
    for at, bound in enumerate(rates.bounds):
        console.print(_comparison(rates, bound.capacity, at))
    console.print(
        f"{rates.blocks:,} blocks of {rates.block_size} tokens in {rates.requests:,} prompts; an unlimited "
        f"cache finds {rates.repeated_blocks / rates.blocks:.1%}{_beside(rates)}.",
        "way: the share of the distance from lru to belady. bound: no policy finds or saves more; "
        "belady-seconds is greedy, and none.",
        *(
            f"{cost.name}: {1e6 * cost.per_token_s:.3g} us for each token, {1e9 * cost.per_pair_s:.3g} ns "
            f"for each token before it; {seconds:,.0f} s for all prompts."
            for cost, seconds in zip(rates.costs, rates.prefill_s, strict=True)
        ),
        f"p50, p99: seconds to the first token with {rates.costs[0].name}, one prompt after another, at a "
        f"rate that takes {100 * rates.load:.3g}% of its time without a cache.",
        f"{sum(rate.wall_s for rate in rates.rates):,.1f} s",
        sep="\n",
        highlight=False,
    )


def _comparison(rates: HitRates, capacity: int, at: int) -> Table:
    rows = {rate.policy: rate for rate in rates.rates if rate.capacity == capacity}
    recent, best = rows.get("lru"), rows.get(BELADY)
    table = Table(title=f"{tokens_text(capacity)} tokens", title_justify="left", padding=(0, 0))
    table.add_column("policy")
    headings = ["found", "way"]
    for cost in rates.costs:
        headings += [f"{cost.name.split()[0]} s", "x lru"]
    for heading in (*headings, "p50", "p99"):
        table.add_column(heading, justify="right")
    for policy, rate in rows.items():
        cells = [f"{rates.share(rate):.1%}", _way(rate, recent, best)]
        for kind, saved in enumerate(rate.saved):
            least = recent.saved[kind].seconds if recent else 0.0
            cells += [f"{saved.seconds:,.0f}", f"{saved.seconds / least:.2f}" if least else "-"]
        cells += [f"{time_s:,.2f}" for time_s in rate.saved[0].ttft_s]
        table.add_row(policy.rpartition(":")[2], *cells)
    bound = rates.bounds[at]
    seconds = [cell for saved in bound.seconds for cell in (f"{saved:,.0f}", "")]
    table.add_row("bound", f"{bound.found_blocks / rates.blocks:.1%}", "", *seconds, "", "", style="dim")
    return table


def _way(rate: HitRate, recent: HitRate | None, best: HitRate | None) -> str:
    """Return the share of the distance from least-recently-used eviction to the optimum."""
    if recent is None or best is None or best.found_blocks == recent.found_blocks:
        return "-"
    return f"{(rate.found_blocks - recent.found_blocks) / (best.found_blocks - recent.found_blocks):.0%}"


def tokens_text(tokens: int) -> str:
    """Format a number of tokens: 8,200,000 is `8.2M`."""
    for unit, size in (("M", 1_000_000), ("K", 1_000)):
        if tokens >= size / 2 and tokens % (size // 10) == 0:
            return f"{tokens / size:g}{unit}"
    return f"{tokens:,}"


def _call_times(samples: NDArray[np.int64]) -> dict[str, float | int | None]:
    if not len(samples):
        return {"count": 0, "median_ns": None, "p99_ns": None, "worst_ns": None, "total_ns": 0}
    median, p99 = np.percentile(samples, (50, 99))
    return {
        "count": len(samples),
        "median_ns": float(median),
        "p99_ns": float(p99),
        "worst_ns": int(samples.max()),
        "total_ns": int(samples.sum()),
    }


def _summary(result: ReplayResult) -> Table:
    counts, config = result.counts, result.config
    table = Table(title=f"Replay of {result.trace}", show_header=False, title_justify="left")
    table.add_column()
    table.add_column(justify="right")
    order = "lowest first" if config.need_sort else "first in, first out"
    share = 100.0 * counts.peak_in_use / result.capacity if result.capacity else 0.0
    table.add_row(
        "pool", f"{result.capacity:,} slots, page size {config.page_size}, {order}, {config.device}"
    )
    if config.kv:
        kv_mib = result.kv_bytes / (1 << 20)
        shape = f"{config.layers} layers x {config.heads} heads x {config.head_dim} {config.dtype}"
        table.add_row("K and V", f"{shape}, {kv_mib:,.1f} MiB")
    table.add_row("requests finished", f"{counts.finished:,} of {counts.requests:,}")
    table.add_row("requests rejected", f"{counts.rejected:,}")
    table.add_row("tokens prefilled", f"{counts.prefilled_tokens:,}")
    if config.prefix_cache:
        found = counts.found_tokens / max(counts.found_tokens + counts.prefilled_tokens, 1)
        table.add_row("tokens found", f"{counts.found_tokens:,}, {found:.1%} of these and the prefilled ones")
        table.add_row("tokens evicted", f"{counts.evicted_tokens:,} by {config.policy}")
    table.add_row("tokens decoded", f"{counts.decoded_tokens:,}")
    table.add_row("tokens verified", f"{counts.verified_tokens:,}" if config.kv else "none (no K and V)")
    table.add_row("retractions", f"{counts.retractions:,}")
    table.add_row("steps", f"{counts.steps:,}")
    table.add_row("peak occupancy", f"{counts.peak_in_use:,} tokens, {share:.1f} % of the pool")
    table.add_row("peak running", f"{counts.peak_running:,} requests")
    table.add_row("virtual time", f"{result.virtual_s:,.1f} s")
    table.add_row("wall time", f"{result.wall_s:,.2f} s")
    return table


def _calls(result: ReplayResult) -> Table:
    table = Table(title="Time per call", title_justify="left")
    table.add_column("call")
    for heading in ("count", "median us", "p99 us", "worst us", "total ms"):
        table.add_column(heading, justify="right")
    for name in OPERATIONS:
        times = _call_times(result.samples[name])
        if times["count"]:
            microseconds = [f"{(times[key] or 0) / 1e3:,.2f}" for key in ("median_ns", "p99_ns", "worst_ns")]
            table.add_row(
                name, f"{times['count']:,}", *microseconds, f"{(times['total_ns'] or 0) / 1e6:,.1f}"
            )
    return table
