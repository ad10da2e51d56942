"""Plots of a replay (the pool's occupancy over virtual time, and call latencies) and of hit rates."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure

from kvpool.tools.policies import BELADY, BELADY_IN_SECONDS
from kvpool.tools.replay.replay import OPERATIONS
from kvpool.tools.replay.report import tokens_text

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes
    from numpy.typing import NDArray

    from kvpool.tools.replay.hit_rates import HitRates
    from kvpool.tools.replay.replay import ReplayResult

ORACLES = {BELADY, BELADY_IN_SECONDS}
_POINTS = 2_000  # about the width of the picture


def save_plot(result: ReplayResult, path: Path) -> None:
    """Draw occupancy over time and the latency distribution of each operation.

    Args:
        result: A finished replay.
        path: The file to write; its ending selects the format.
    """
    figure = Figure(figsize=(11.0, 9.0), layout="constrained")
    figure.suptitle(_title(result))
    occupancy, latency = figure.subplots(2, 1)
    _draw_occupancy(occupancy, result)
    _draw_latency(latency, result)
    figure.savefig(path, dpi=120)


def save_rates(rates: HitRates, path: Path) -> None:
    """Draw the hit rate of each policy over the capacity.

    Args:
        rates: The measured hit rates.
        path: The file to write; its ending selects the format.
    """
    figure = Figure(figsize=(9.0, 5.5), layout="constrained")
    axes = figure.subplots()
    axes.set_title(f"Prompt blocks found in a prefix cache, {rates.trace}", loc="left")
    axes.axhline(
        100.0 * rates.repeated_blocks / rates.blocks,
        color="grey",
        linewidth=0.8,
        linestyle=":",
        label="unlimited",
    )
    capacities = sorted({rate.capacity for rate in rates.rates})
    for policy in dict.fromkeys(rate.policy for rate in rates.rates):
        shares = {rate.capacity: 100.0 * rates.share(rate) for rate in rates.rates if rate.policy == policy}
        style, width = ("--", 1.5) if policy in ORACLES else ("-", 2.5 if policy == "adaptive" else 1.2)
        label = f"{policy} (knows the future)" if policy in ORACLES else policy
        axes.plot(
            capacities,
            [shares[capacity] for capacity in capacities],
            marker="o",
            markersize=3.5,
            linestyle=style,
            linewidth=width,
            label=label,
        )
    axes.set_xscale("log")
    axes.set_xticks(capacities, [tokens_text(capacity) for capacity in capacities])
    axes.minorticks_off()
    axes.set_xlabel("capacity (tokens)")
    axes.set_ylabel("prompt blocks found (%)")
    axes.set_ylim(bottom=0.0)
    axes.grid(visible=True, alpha=0.3)
    axes.legend(loc="lower right", frameon=False)
    figure.savefig(path, dpi=120)


def _title(result: ReplayResult) -> str:
    config, counts = result.config, result.counts
    order = "lowest first" if config.need_sort else "first in, first out"
    kv = f"{config.layers} x {config.heads} x {config.head_dim} {config.dtype}" if config.kv else "no K and V"
    return (
        f"Replay of {result.trace}: {counts.finished:,} requests, {counts.retractions:,} retractions\n"
        f"{result.capacity:,} slots, page size {config.page_size}, {order}, {kv}, {config.device}"
    )


def _draw_occupancy(axes: Axes, result: ReplayResult) -> None:
    """Draw the maximum of each interval, so that peaks survive the downsampling."""
    axes.set_title("Occupancy", loc="left")
    time_s, in_use, evictable, running = result.occupancy
    starts = np.unique(np.linspace(0, len(time_s) - 1, _POINTS, dtype=np.int64))
    times = time_s[starts]
    axes.fill_between(
        times,
        np.maximum.reduceat(in_use, starts),
        step="post",
        color="tab:blue",
        alpha=0.35,
        label="slots in use",
    )
    if result.config.prefix_cache:
        axes.step(
            times,
            np.maximum.reduceat(in_use + evictable, starts),
            where="post",
            color="tab:green",
            linewidth=0.8,
            label="in use or cached",
        )
    axes.axhline(result.capacity, color="tab:red", linewidth=1.0, label="pool capacity")
    if len(result.retracted_s):
        axes.plot(
            result.retracted_s,
            np.full(len(result.retracted_s), 1.03 * result.capacity),
            linestyle="none",
            marker="|",
            markeredgewidth=0.5,
            color="black",
            label="retraction",
        )
    axes.set_xlim(0.0, max(float(time_s[-1]), 1e-3))
    axes.set_ylim(0.0, 1.25 * result.capacity)
    axes.set_xlabel("virtual time (s)")
    axes.set_ylabel("slots (tokens)")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    right = _draw_running(axes, times, np.maximum.reduceat(running, starts))
    handles, labels = axes.get_legend_handles_labels()
    more_handles, more_labels = right.get_legend_handles_labels()
    right.legend(handles + more_handles, labels + more_labels, loc="upper center", ncols=5, frameon=False)


def _draw_running(axes: Axes, times: NDArray[np.float64], running: NDArray[np.int64]) -> Axes:
    """Draw the numbers of running requests on an axis at the right, which is returned."""
    right = axes.twinx()
    right.step(
        times,
        running,
        where="post",
        color="tab:orange",
        linewidth=0.8,
        label="running requests",
    )
    right.set_ylim(0.0, 1.25 * max(int(running.max()), 1))
    right.set_ylabel("running requests")
    return right


def _draw_latency(axes: Axes, result: ReplayResult) -> None:
    """Draw the share of an operation's calls that took longer than a time, which shows the tail."""
    for name in OPERATIONS:
        samples = result.samples[name]
        if len(samples):
            times_us, slower = _slower_share(samples)
            axes.step(times_us, slower, where="post", label=f"{name} ({len(samples):,} calls)")
    for share, label in ((0.5, "median"), (0.01, "p99")):
        axes.axhline(share, color="grey", linewidth=0.8, linestyle=":")
        axes.annotate(
            label,
            (0.005, share),
            xycoords=("axes fraction", "data"),
            xytext=(0, 2),
            textcoords="offset points",
            color="grey",
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter(lambda share, _: f"{100.0 * share:g} %")
    axes.set_xlabel("time of a call (us)")
    axes.set_ylabel("share of calls that take longer")
    axes.grid(visible=True, alpha=0.3)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    axes.set_title("Latency of the pools' calls", loc="left")


def _slower_share(samples: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Call times in us, ascending, and the share of calls that took at least as long as each."""
    ordered = np.sort(samples)
    count = len(ordered)
    # Evenly spaced ranks for the body and logarithmic ones for the tail.
    from_end = np.geomspace(1, count, _POINTS).astype(np.int64)
    ranks = np.unique(np.concatenate((np.linspace(0, count - 1, _POINTS).astype(np.int64), count - from_end)))
    return ordered[ranks] / 1e3, (count - ranks) / count
