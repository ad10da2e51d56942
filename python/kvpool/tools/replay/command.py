"""The command `kvpool replay`."""

from __future__ import annotations

import argparse
import re
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from kvpool._kvpool import _STORAGE_DTYPES
from kvpool.errors import ConfigError, KvPoolError
from kvpool.tools.devices import check_device
from kvpool.tools.needs import COMMANDS
from kvpool.tools.options import Parser, at_least
from kvpool.tools.output import fail, need, refuse, waiting
from kvpool.tools.policies import BELADY, POLICIES, policy_named
from kvpool.tools.replay.config import ReplayConfig

if TYPE_CHECKING:
    from kvpool.tools.traces import Trace

DESCRIPTION = """\
Drive the pools with a request trace and check every stored K and V row.

Runs continuous batching on a virtual clock: admission, prefill with a token
budget, batched decode, finish, and retraction of the youngest request when the
pool is short. Exits with status 1 if one row is wrong, one slot is missing at
the end, or no request fits.

With --capacity the prefix cache alone is measured instead: its hit rate by
policy and size, request after request, without a clock and without outputs."""

SYNTHETIC_REQUESTS = 2_000
"""Requests of the synthetic trace, if --requests is not given."""

_UNITS = {"": 1, "k": 1_000, "m": 1_000_000}


def make_parser() -> Parser:
    """Return the parser of its options, named as the fields of `ReplayConfig`."""
    parser = Parser("kvpool replay", DESCRIPTION)
    default = ReplayConfig()

    def add(name: str, text: str, *, of: object = str, metavar: str = "N", value: object = None) -> None:
        shown = text if value is None else f"{text} (default: {value})"
        parser.add_argument(name, type=of, default=value, metavar=metavar, help=shown)  # type: ignore[arg-type]

    def switch(name: str, text: str, *, value: bool) -> None:
        parser.add_argument(name, action=argparse.BooleanOptionalAction, default=value, help=text)

    count, natural = at_least(1), at_least(0)
    trace = "a trace of Mooncake, Bailian, TraceLab or Azure; its content tells which"
    parser.add_argument("trace", nargs="?", type=Path, metavar="TRACE", help=trace)
    parser.add_argument("--synthetic", action="store_true", help="make a trace instead of reading one")
    add(
        "--agents",
        "make a trace of coding agents: coding, or changes of it: sessions=50,context=1M",
        metavar="SPEC",
    )
    add("--seed", "seed of the generated trace and of the stored rows", of=natural, value=default.seed)
    add("--requests", f"the first N requests only; with --synthetic make N ({SYNTHETIC_REQUESTS})", of=count)
    add("--pool-size", "token slots (default: half of the trace's peak, so that the pool is short)", of=count)
    add("--page-size", "slots per page (default: 1; with --capacity the block of the trace)", of=count)
    add("--layers", "layers of the KV pool", of=count, value=default.layers)
    add("--heads", "K and V heads per layer", of=count, value=default.heads)
    add("--head-dim", "elements per head", of=count, value=default.head_dim)
    dtypes = ", ".join(_STORAGE_DTYPES)
    add("--dtype", f"data type of K and V: {dtypes}", metavar="DTYPE", value=default.dtype)
    add("--device", "device of the pools", metavar="DEVICE", value=default.device)
    add("--max-running", "the most requests that run at once", of=count, value=default.max_running)
    add(
        "--max-context",
        "the most tokens of a request (default: the longest); longer ones are rejected",
        of=count,
    )
    add("--prefill-budget", "prompt tokens per step", of=count, value=default.prefill_budget)
    add("--step-ms", "virtual time of a step", of=float, metavar="MS", value=default.step_ms)
    add("--speed-up", "factor by which requests arrive faster", of=float, metavar="X", value=default.speed_up)
    switch("--kv", "store K and V and check every byte", value=True)
    switch("--need-sort", "hand out the lowest slots first, not first in, first out", value=True)
    switch("--prefix-cache", "find what requests have in common in a prefix cache", value=False)
    policies = f"what the cache evicts first: {', '.join(POLICIES)}"
    add("--policy", policies, metavar="POLICY", value=default.policy)
    capacity = f"measure policies (a list, {BELADY} or all) at these sizes in tokens: 500K,8.2M"
    add("--capacity", capacity, metavar="SIZES")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    add("--plot", "write a plot of occupancy and latencies, or of hit rates", of=Path, metavar="FILE")
    progress = parser.add_mutually_exclusive_group()
    bar = "progress bar on stderr (default: on a terminal, without --json)"
    progress.add_argument("--progress", action="store_true", default=None, help=bar)
    progress.add_argument("--quiet", action="store_false", dest="progress", help="no progress bar")
    return parser


def run(options: argparse.Namespace) -> int:
    """Run the command, and return its exit status."""
    need("replay", *COMMANDS["replay"].needs, *(["matplotlib"] if options.plot is not None else []))
    with waiting("loading PyTorch"):
        from rich.console import Console  # noqa: PLC0415 - of an extra, as the rest

        from kvpool.tools.replay import bars  # noqa: PLC0415
        from kvpool.tools.replay.output import Output  # noqa: PLC0415
        from kvpool.tools.replay.replay import Replay  # noqa: PLC0415
        from kvpool.tools.traces import TraceError  # noqa: PLC0415

    if options.capacity is not None and (options.kv or not options.prefix_cache):
        refuse("--capacity measures the prefix cache alone; give --no-kv and --prefix-cache with it")
    sizes = None if options.capacity is None else _capacities(options.capacity)
    try:
        policies = _policies(options.policy, has_several=sizes is not None)
        config = _config(options, "adaptive" if sizes is not None else policies[0])
        output = Output(options.plot, as_json_object=options.json)
        output.check()
        with waiting("making a trace" if options.trace is None else f"reading {options.trace}"):
            loaded = _load(options)
        errors = Console(stderr=True)
        show = errors.is_terminal and not options.json if options.progress is None else options.progress
        console = errors if show else None
        if sizes is not None:
            output.print_rates(bars.measure(loaded, policies, sizes, options.page_size, console))
            return 0
        check_device(config.device)
        output.print_replay(bars.run(Replay(loaded, config), console))
    except ConfigError as error:
        refuse(str(error))
    except (KvPoolError, TraceError) as error:
        fail(f"{type(error).__name__}: {error}")
    except (OSError, MemoryError) as error:
        fail(str(error) or "out of memory")
    return 0


def _config(options: argparse.Namespace, policy: str) -> ReplayConfig:
    names = {field.name for field in fields(ReplayConfig)} - {"page_size", "policy"}
    given = {name: value for name, value in vars(options).items() if name in names}
    return ReplayConfig(**given, page_size=options.page_size or 1, policy=policy_named(policy))


def _load(options: argparse.Namespace) -> Trace:
    if options.synthetic + (options.trace is not None) + (options.agents is not None) != 1:
        refuse("give one of TRACE, --synthetic and --agents")
    from kvpool.tools import traces  # noqa: PLC0415 - it needs NumPy

    if options.synthetic:
        return traces.synthetic_trace(options.requests or SYNTHETIC_REQUESTS, options.seed)
    if options.agents is not None:
        spec = traces.parse_agents(options.agents)
        return traces.agents_trace(spec, options.seed).head(options.requests)
    return traces.read_trace(options.trace).head(options.requests)


def _policies(text: str, *, has_several: bool) -> list[str]:
    """Return the policies to measure: one for a replay.

    Raises:
        ConfigError: If there is no such policy.
    """
    if not has_several:
        return [policy_named(text)]
    known = [*POLICIES, BELADY]
    if text == "all":
        return known
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in known:
            raise ConfigError(f"policy must be one of {', '.join(known)}, or all, not {name!r}")
    return names


def _capacities(text: str) -> list[int]:
    """Return the sizes in tokens: `500K,8.2M` is 500,000 and 8,200,000."""
    sizes = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,10}(?:\.[0-9]{1,9})?)([kKmM]?)", part.strip())
        size = round(float(match[1]) * _UNITS[match[2].lower()]) if match else 0
        if not 1 <= size < 1 << 31:
            refuse(f"--capacity: {part.strip()!r} is not a size in tokens such as 65536, 500K or 8.2M")
        sizes.append(size)
    return sizes
