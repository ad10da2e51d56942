"""A simulated fleet as tables and as JSON."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
from break_even import BreakEven
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from kvpool.tools.output import bytes_text
from kvpool.tools.units import bandwidth_text

if TYPE_CHECKING:
    from fleet import FleetResult
    from numpy.typing import NDArray
    from rich.console import Console

    from kvpool.tools.bandwidths import Bandwidth

TIMES = {
    "wait for prefill": "prefill_wait_s",
    "prefill": "prefill_s",
    "wait for room and link": "handover_wait_s",
    "hand-over": "handover_s",
    "first token": "first_token_s",
}
"""The parts of the time to the first token, and the whole."""
# Ways by which nothing is loaded.
_AWAY = (".to_host", ".write")


def break_even_of(result: FleetResult) -> BreakEven:
    """Return how computing compares with loading on the machines of a fleet."""
    machine, config = result.machine, result.config
    return BreakEven(machine.token_bytes, machine.state_bytes, config.prefill_rate, config.latency_s)


def fleet_as_json(result: FleetResult, measured: list[Bandwidth]) -> dict[str, Any]:
    """Return the result as plain values: seconds, bytes, tokens, shares from 0 to 1."""
    costs, prompt = break_even_of(result), float(np.median(result.input_lens))
    return {
        "trace": result.trace,
        "machine": asdict(result.machine),
        "config": asdict(result.config),
        "requests": len(result.input_lens),
        "rejected": result.rejected,
        "duration_s": result.duration_s,
        "prompt_tokens": int(result.input_lens.sum()),
        "device_tokens": int(result.device_tokens.sum()),
        "store_tokens": int(result.store_tokens.sum()),
        "computed_tokens": int(result.computed_tokens.sum()),
        "answer_tokens": int(result.output_lens.sum()),
        "device_hit_rate": _share(result.device_tokens, result),
        "store_hit_rate": _share(result.store_tokens, result),
        "unlimited_hit_rate": result.repeated_share,
        "handover_bytes": int(result.handover_bytes.sum()),
        "loaded_bytes": result.loaded_bytes,
        "stored_bytes": result.stored_bytes,
        "times_s": {name: _times(getattr(result, field)) for name, field in TIMES.items()},
        "token_s": _times(_token_s(result)),
        "busy": result.busy,
        "bottleneck": result.bottleneck,
        "balanced_decode_per_prefill": result.balanced_decode,
        "break_even": {
            "bytes_per_s": costs.bandwidth,
            "prompt_tokens": prompt,
            "compute_s": costs.compute_s(prompt),
            "links": [
                {
                    "name": name,
                    "bytes_per_s": speed,
                    "load_s": costs.load_s(prompt, speed),
                    "tokens": None if math.isinf(costs.tokens(speed)) else costs.tokens(speed),
                }
                for name, speed in _links(result, measured)
            ],
        },
    }


def print_fleet(result: FleetResult, measured: list[Bandwidth], console: Console) -> None:
    """Print waiting times, the use of resources, and when loading is faster than computing."""
    console.print(_summary(result))
    console.print(_times_table(result))
    console.print(_busy_table(result))
    console.print(_break_even_table(result, measured))
    for note in _notes(result):
        grid = Table.grid(padding=(0, 1))
        grid.add_row("*", Text(note))
        console.print(grid, highlight=False)


def _share(tokens: NDArray[np.int64], result: FleetResult) -> float:
    return float(tokens.sum() / result.input_lens.sum())


def _token_s(result: FleetResult) -> NDArray[np.float64]:
    """Return the time between two tokens of each answer that has two."""
    several = result.output_lens > 1
    times: NDArray[np.float64] = result.decode_s[several] / (result.output_lens[several] - 1)
    return times


def _times(seconds: NDArray[np.float64]) -> dict[str, float | None]:
    if not len(seconds):
        return {"median": None, "p99": None}
    median, p99 = np.percentile(seconds, (50, 99))
    return {"median": float(median), "p99": float(p99)}


def _links(result: FleetResult, measured: list[Bandwidth]) -> list[tuple[str, float]]:
    """Return the ways by which a prompt can be loaded: those of the fleet, and measured ones."""
    config = result.config
    links = [("link", config.link)]
    if config.store_bytes:
        links.append(("store link", config.store_link))
    lines = [(line.name, line.bytes_per_s) for line in measured if not line.name.endswith(_AWAY)]
    return links + [(name, speed) for name, speed in lines if speed is not None]


def _summary(result: FleetResult) -> Table:
    machine, config = result.machine, result.config
    title = f"{config.prefill} prefill and {config.decode} decode machines, {escape(result.trace)}"
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    count = len(result.input_lens)
    table.add_row("requests", f"{count:,} in {result.duration_s:,.1f} s, {result.rejected:,} rejected")
    states = f", {machine.state_bytes:,} B of states a request" if machine.state_bytes else ""
    table.add_row(
        "a machine",
        f"{machine.tokens:,} tokens of {machine.token_bytes:,} B{states}; {machine.requests:,} requests",
    )
    prompts = int(result.input_lens.sum())
    table.add_row("prompt tokens", f"{prompts:,}")
    table.add_row("  on the machine", f"{_share(result.device_tokens, result):.1%}")
    if config.store_bytes:
        table.add_row("  in the store", f"{_share(result.store_tokens, result):.1%}")
    computed = int(result.computed_tokens.sum())
    table.add_row("  computed", f"{computed:,}, {_share(result.computed_tokens, result):.1%}")
    table.add_row("an unlimited cache", f"finds {result.repeated_share:.1%} of the prompts' blocks")
    costs = break_even_of(result)
    table.add_row(
        "prefill",
        f"{costs.compute_s(computed):,.1f} machine-seconds, {costs.compute_s(prompts):,.1f} without a cache",
    )
    table.add_row("handed over", bytes_text(int(result.handover_bytes.sum())))
    if config.store_bytes:
        mean = bandwidth_text(result.loaded_bytes / result.duration_s) if result.loaded_bytes else "0 B/s"
        table.add_row("loaded from the store", f"{bytes_text(result.loaded_bytes)}, {mean} on average")
        table.add_row("put into the store", bytes_text(result.stored_bytes))
    return table


def _times_table(result: FleetResult) -> Table:
    table = Table(title="Time of a request, in seconds", title_justify="left")
    table.add_column("part")
    table.add_column("median", justify="right")
    table.add_column("p99", justify="right")
    rows = {name: getattr(result, field) for name, field in TIMES.items()}
    for name, seconds in {**rows, "between tokens": _token_s(result)}.items():
        found = _times(seconds)
        table.add_row(name, *("-" if each is None else f"{each:,.3f}" for each in found.values()))
    return table


def _busy_table(result: FleetResult) -> Table:
    table = Table(title="Resources", title_justify="left")
    table.add_column("resource")
    table.add_column("busy", justify="right")
    for name, share in result.busy.items():
        mark = " (bottleneck)" if name == result.bottleneck else ""
        table.add_row(f"{name}{mark}", f"{share:.1%}")
    return table


def _break_even_table(result: FleetResult, measured: list[Bandwidth]) -> Table:
    costs, prompt = break_even_of(result), float(np.median(result.input_lens))
    title = f"Loading a prompt of {prompt:,.0f} tokens, or computing it in {costs.compute_s(prompt):,.3f} s"
    table = Table(title=title, title_justify="left")
    table.add_column("through")
    for heading in ("bandwidth", "loads in", "is faster"):
        table.add_column(heading, justify="right")
    for name, speed in _links(result, measured):
        tokens = costs.tokens(speed)
        when = "never" if math.isinf(tokens) else f"beyond {tokens:,.0f} tokens" if tokens else "always"
        table.add_row(name, bandwidth_text(speed), f"{costs.load_s(prompt, speed):,.3f} s", when)
    return table


def _notes(result: FleetResult) -> list[str]:
    machine, config, costs = result.machine, result.config, break_even_of(result)
    largest = result.busy[result.bottleneck]
    fixed = f" + {machine.state_bytes:,} B" if machine.state_bytes else ""
    latency = f"{config.latency_s:g} s + " if config.latency_s else ""
    size = f"n x {machine.token_bytes:,} B{fixed}"
    least = f"{machine.token_bytes:,} B x {config.prefill_rate:,.0f}/s = {bandwidth_text(costs.bandwidth)}"
    return [
        f"the bottleneck is {result.bottleneck}, {largest:.1%} busy; full at {1 / largest:.2f} x the load",
        f"{result.balanced_decode:.2f} decode machines for each prefill machine would be as busy as that",
        f"loading n tokens is faster if {latency}({size}) / bandwidth < n / {config.prefill_rate:,.0f} s",
        f"it never is up to a bandwidth of {least}",
    ]
