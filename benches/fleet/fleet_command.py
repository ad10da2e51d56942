"""The command line: a fleet of machines with the pools that `kvpool plan` computes for a model."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from fleet import simulate
from fleet_config import ROUTES, FleetConfig
from fleet_options import MAX_REQUESTS, FleetOptions, fleet_of, machine_of
from fleet_report import fleet_as_json, print_fleet
from rich.console import Console

from kvpool.errors import ConfigError
from kvpool.models.model_config import read_model
from kvpool.tools.bandwidths import Bandwidth, read_bandwidths
from kvpool.tools.options import Parser, at_least
from kvpool.tools.output import WIDTH, fail, refuse, waiting
from kvpool.tools.plan.command import add_model_options, model_options
from kvpool.tools.plan.solver import make_plan
from kvpool.tools.traces import Trace, TraceError, read_trace, synthetic_trace

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Sequence

DESCRIPTION = """\
Run the requests of a trace through a fleet of machines, of --tp GPUs each, on a
virtual clock.

Each machine has the pools that `kvpool plan` computes for the model."""

SYNTHETIC_REQUESTS = 1_000
"""Requests of the synthetic trace, if --requests is not given."""


def make_parser() -> Parser:
    """Return the parser of the options. Their names are the fields of `FleetOptions`, where it has them."""
    parser = Parser("python benches/fleet", DESCRIPTION)
    add_model_options(parser)
    add, count = parser.add_argument, at_least(1)
    add(
        "--bandwidth",
        type=Path,
        metavar="FILE",
        help="output of `kvpool doctor --bandwidth --json`, for what is not given",
    )
    add("--prefill", type=count, default=1, metavar="N", help="machines that compute prompts (default: 1)")
    add("--decode", type=count, default=1, metavar="N", help="machines that generate answers (default: 1)")
    add("--prefill-rate", type=float, metavar="R", help="prompt tokens that a machine computes in a second")
    add(
        "--decode-rate",
        type=float,
        metavar="R",
        help="tokens that a machine generates in a second, over all requests",
    )
    add(
        "--step-ms",
        type=float,
        default=40.0,
        metavar="MS",
        help="least time between two tokens of a request (default: 40)",
    )
    add(
        "--link",
        metavar="RATE",
        help="bandwidth between machines: 400Gbit/s, 50GB/s (default: nixl.contiguous)",
    )
    add("--scattered", action="store_true", help="hand over slot by slot: the link is nixl.scattered")
    add("--store", metavar="SIZE", help="size of a store that prefill machines share: 20TB (default: none)")
    add(
        "--store-link", metavar="RATE", help="bandwidth from the store to a machine (default: directory.read)"
    )
    add(
        "--latency-ms",
        type=float,
        default=0.0,
        metavar="MS",
        help="time before the first byte of a transfer (default: 0)",
    )
    add(
        "--route",
        default="earliest",
        help=f"prefill machine of a request: {', '.join(ROUTES)} (default: earliest)",
    )
    add(
        "--policy", default="lru", help="what prefix caches evict first, as in `kvpool replay` (default: lru)"
    )
    add(
        "--trace",
        type=Path,
        metavar="FILE",
        help="a Mooncake JSONL or Azure CSV trace (default: a synthetic one)",
    )
    add(
        "--requests",
        type=count,
        metavar="N",
        help=f"the first N requests; of a synthetic trace all ({SYNTHETIC_REQUESTS})",
    )
    add("--seed", type=at_least(0), default=0, metavar="N", help="seed of the synthetic trace (default: 0)")
    add(
        "--speed-up",
        type=float,
        default=1.0,
        metavar="X",
        help="factor by which requests arrive faster (default: 1)",
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit status."""
    options = make_parser().parse_args(arguments)
    if options.max_requests is None and options.mean_context is None:
        options.max_requests = MAX_REQUESTS
    fleet = FleetOptions(**{field.name: getattr(options, field.name) for field in fields(FleetOptions)})
    try:
        config = model_options(options, "cuda")
    except ConfigError as error:
        refuse(str(error))
    try:
        measured = [] if options.bandwidth is None else read_bandwidths(options.bandwidth)
        machines = _fleet(fleet, measured)
        made = make_plan(read_model(options.config), config)
        with waiting("simulating the machines"):
            result = simulate(_read(options), machine_of(made), machines)
    except (ConfigError, OSError, TraceError) as error:
        fail(str(error))
    if options.json:
        print(json.dumps(fleet_as_json(result, measured)))
    else:
        print_fleet(result, measured, Console(width=WIDTH))
    return 0


def _fleet(options: FleetOptions, measured: list[Bandwidth]) -> FleetConfig:
    try:
        return fleet_of(options, measured)
    except ConfigError as error:
        refuse(str(error))


def _read(options: Namespace) -> Trace:
    if options.trace is None:
        return synthetic_trace(options.requests or SYNTHETIC_REQUESTS, options.seed)
    return read_trace(options.trace).head(options.requests)
