"""The command `kvpool plan --fleet`: it reads a trace, simulates a fleet and prints it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from kvpool.tools.output import WIDTH, fail, need, refuse_unused, waiting
from kvpool.tools.plan.fleet_options import machine_of
from kvpool.tools.plan.parameters import FLEET_PANEL, SYNTHETIC_REQUESTS

if TYPE_CHECKING:
    from pathlib import Path

    from kvpool.tools.bandwidths import Bandwidth
    from kvpool.tools.plan.fleet_config import FleetConfig
    from kvpool.tools.plan.solver import Plan
    from kvpool.tools.traces import Trace


@dataclass(frozen=True)
class TraceOptions:
    """The choice of the requests that a fleet gets.

    Attributes:
        path: File of the trace; None for a synthetic trace.
        requests: The number of requests to take from its begin; None for all, or `SYNTHETIC_REQUESTS`.
        seed: Seed of the synthetic trace.
    """

    path: Path | None
    requests: int | None
    seed: int


def refuse_fleet_options(called: typer.Context) -> None:
    """Exit if an option of fleets was given without --fleet."""
    params = called.command.params
    names = [one.name or "" for one in params if getattr(one, "rich_help_panel", None) == FLEET_PANEL]
    refuse_unused(called, names, "--fleet")


def print_simulation(
    made: Plan,
    fleet: FleetConfig,
    trace: TraceOptions,
    measured: list[Bandwidth],
    *,
    as_json_object: bool,
) -> None:
    """Run the requests of a trace through machines with the pools of a plan, and print the results.

    Args:
        made: The plan.
        fleet: The fleet.
        trace: The requests.
        measured: The measured bandwidths.
        as_json_object: Whether to print JSON.

    Raises:
        ConfigError: If the machines have no room for the requests.
        OSError: If a file cannot be read.
    """
    need("plan --fleet", "numpy")
    from kvpool.tools.plan.fleet import simulate  # noqa: PLC0415 - it needs NumPy
    from kvpool.tools.plan.fleet_report import fleet_as_json, print_fleet  # noqa: PLC0415

    with waiting("simulating the machines"):
        result = simulate(_read(trace), machine_of(made), fleet)
    if as_json_object:
        typer.echo(json.dumps(fleet_as_json(result, measured)))
    else:
        print_fleet(result, measured, Console(width=WIDTH))


def _read(options: TraceOptions) -> Trace:
    from kvpool.tools.traces import TraceError, read_trace, synthetic_trace  # noqa: PLC0415 - they need NumPy

    if options.path is None:
        return synthetic_trace(options.requests or SYNTHETIC_REQUESTS, options.seed)
    try:
        return read_trace(options.path).head(options.requests)
    except TraceError as error:
        fail(str(error))
