"""The options of the command line: a fleet from given options and measured bandwidths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fleet_config import FleetConfig, Machine

from kvpool.errors import ConfigError
from kvpool.tools.policies import policy_named
from kvpool.tools.units import parse_bandwidth, parse_bytes

if TYPE_CHECKING:
    from kvpool.tools.bandwidths import Bandwidth
    from kvpool.tools.plan.solver import Plan

CONTIGUOUS, SCATTERED, STORE = "nixl.contiguous", "nixl.scattered", "directory.read"
"""The measured ways of bytes that a fleet has."""
MAX_REQUESTS = 256
"""Requests at once on a machine, if --max-requests is not given: rows of the table, and states."""


@dataclass(frozen=True)
class FleetOptions:
    """The options of the command line; None for those that were not given.

    Attributes:
        prefill: Machines that compute prompts.
        decode: Machines that generate answers.
        prefill_rate: Prompt tokens per second of a prefill machine.
        decode_rate: Tokens per second of a decode machine.
        step_ms: The least time between two tokens of a request.
        link: Bandwidth between machines, such as 400Gbit/s.
        scattered: Whether slots are handed over one by one, at the bandwidth that was measured for that.
        store: Capacity of the store, such as 20TB.
        store_link: Bandwidth from the store, such as 10GB/s.
        latency_ms: Time before the first byte of a transfer or a load.
        route: The way to choose the machine of a request.
        policy: The eviction policy of prefix caches.
        speed_up: Factor by which requests arrive faster.
    """

    prefill: int = 1
    decode: int = 1
    prefill_rate: float | None = None
    decode_rate: float | None = None
    step_ms: float = 40.0
    link: str | None = None
    scattered: bool = False
    store: str | None = None
    store_link: str | None = None
    latency_ms: float = 0.0
    route: str = "earliest"
    policy: str = "lru"
    speed_up: float = 1.0


def machine_of(plan: Plan) -> Machine:
    """Return the capacity of a machine, all of its GPUs together.

    Heads that several GPUs store count once for each GPU, since each GPU hands over all of its heads.
    """
    shapes, tp = plan.shapes, plan.config.tp
    return Machine(
        token_bytes=shapes.token_bytes * tp,
        state_bytes=(shapes.recurrent_bytes + shapes.conv_bytes) * tp,
        tokens=plan.size,
        requests=plan.max_reqs,
    )


def fleet_of(options: FleetOptions, measured: list[Bandwidth]) -> FleetConfig:
    """Return the fleet of the options, with missing bandwidths from `measured`.

    Raises:
        ConfigError: If a speed is neither given nor measured, or a value is not valid.
    """
    if options.prefill_rate is None or options.decode_rate is None:
        raise ConfigError("give --prefill-rate and --decode-rate, tokens per second of a machine")
    if options.link is not None and options.scattered:
        raise ConfigError("--scattered takes the link from --bandwidth: give --link or --scattered, not both")
    if options.link is None:
        link = _measured(measured, SCATTERED if options.scattered else CONTIGUOUS, "--link")
    else:
        link = parse_bandwidth(options.link)
    store_link = 0.0
    if options.store is None and options.store_link is not None:
        raise ConfigError("--store-link is the bandwidth of a store: give its size, --store")
    if options.store_link is not None:
        store_link = parse_bandwidth(options.store_link)
    elif options.store is not None:
        store_link = _measured(measured, STORE, "--store-link")
    return FleetConfig(
        prefill=options.prefill,
        decode=options.decode,
        prefill_rate=options.prefill_rate,
        decode_rate=options.decode_rate,
        link=link,
        step_s=options.step_ms / 1000,
        store_bytes=0 if options.store is None else parse_bytes(options.store),
        store_link=store_link,
        latency_s=options.latency_ms / 1000,
        route=options.route,
        policy=policy_named(options.policy),
        speed_up=options.speed_up,
    )


def _measured(lines: list[Bandwidth], name: str, option: str) -> float:
    """Return the measured bandwidth of a way of bytes."""
    line = next((line for line in lines if line.name == name), None)
    if line is not None and line.bytes_per_s is not None:
        return line.bytes_per_s
    if not lines:
        raise ConfigError(f"give {option}, or --bandwidth with a file of kvpool doctor --bandwidth --json")
    # A kind that could not be measured at all has one line.
    kind = next((line for line in lines if line.name == name.partition(".")[0]), None)
    why = f": {kind.problem}" if kind is not None else ""
    raise ConfigError(f"--bandwidth has no {name}{why}; give {option}")
