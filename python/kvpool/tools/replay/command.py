"""The command `kvpool replay`."""

from __future__ import annotations

import argparse
import re
from dataclasses import fields
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from kvpool._kvpool import _STORAGE_DTYPES
from kvpool.errors import ConfigError, KvPoolError
from kvpool.tools.costs import COSTS, read_cost
from kvpool.tools.devices import check_device
from kvpool.tools.needs import COMMANDS
from kvpool.tools.options import Parser, at_least
from kvpool.tools.output import fail, need, refuse, waiting
from kvpool.tools.policies import (
    COMPARED_POLICIES,
    OPTIONAL_POLICIES,
    POLICIES,
    SIMULATED_POLICIES,
    WITH_SESSIONS,
    policy_named,
)
from kvpool.tools.replay.config import ReplayConfig
from kvpool.tools.units import parse_count

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvpool.prefill_cost import PrefillCost
    from kvpool.tools.replay.output import Output
    from kvpool.tools.traces import Trace

DESCRIPTION = (
    """\
Drive the pools with a request trace and check every stored K and V row.

Runs continuous batching on a virtual clock: admission, prefill with a token
budget, batched decode, finish, and retraction of the youngest request when the
pool is short. Exits with status 1 if one row is wrong, one slot is missing at
the end, or no request fits.

With --capacity the prefix cache alone is measured instead: its hit rate by
policy and size, request after request, without a clock and without outputs.
--compare measures all policies, and the seconds of prefill that they save.
--states measures what a hybrid model finds, which resumes only at snapshots
of its state, beside a full-attention model. --windows measures models with
sliding windows, which resume only where K and V of the windows are."""
    ""
)

SYNTHETIC_REQUESTS = 2_000
"""Requests of the synthetic trace, if --requests is not given."""

COMPARED_CAPACITIES = "500K,1M,2M,4.1M,8.2M"
"""The sizes of --compare, if --capacity is not given."""

COMPARED_COSTS = "8B,70B"
"""The costs of --compare, if --cost is not given."""


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
        "make a trace of agents: coding, or changes of it: sessions=50,context=1M",
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
    add(
        "--policy",
        f"what the cache evicts first: {', '.join(POLICIES)}",
        metavar="POLICY",
        value=default.policy,
    )
    simulated = ", ".join(SIMULATED_POLICIES)
    capacity = f"measure policies (a list, all, {simulated}) at these sizes: 500K,8.2M"
    add("--capacity", capacity, metavar="SIZES")
    add(
        "--in-use",
        "share of the pool that running requests have, beside the sizes of --capacity",
        of=_share_in_use,
        metavar="SHARE",
        value=0.0,
    )
    parser.add_argument(
        "--compare",
        action="store_true",
        help="compare policies, with --policy FILE.py:CLASS your own, by hits and by seconds",
    )
    add(
        "--cost",
        f"costs of --compare: 8B, 70B, or a CSV file of prefills (default: {COMPARED_COSTS})",
        metavar="COSTS",
    )
    add(
        "--load",
        "share of the time in which the machine of --compare computes prompts without a cache (default: 0.9)",
        of=_load_share,
        metavar="SHARE",
    )
    _add_models(add)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    add("--plot", "write a plot of occupancy and latencies, or of hit rates", of=Path, metavar="FILE")
    progress = parser.add_mutually_exclusive_group()
    bar = "progress bar on stderr (default: on a terminal, without --json)"
    progress.add_argument("--progress", action="store_true", default=None, help=bar)
    progress.add_argument("--quiet", action="store_false", dest="progress", help="no progress bar")
    return parser


def _add_models(add: Callable[..., None]) -> None:
    """Add the options that measure models with other memory beside pages."""
    states = "measure hybrid models: a snapshot takes the memory of K and V of so many tokens: 1600,3100"
    add("--states", states, metavar="SIZES")
    add(
        "--state-share",
        "share of the memory that --states gives to snapshots, or arena: what they are worth",
        of=_share,
        value=0.05,
    )
    windows = (
        "measure models with windows of so many tokens in so many layers for each full one: 1024x5,4096x3"
    )
    add("--windows", windows, metavar="MODELS")
    chunk = "tokens of a chunk of a prompt, which --states and --windows publish"
    add("--chunk", chunk, of=at_least(1), value=8192)


def run(options: argparse.Namespace) -> int:
    """Run the command, and return its exit status."""
    need("replay", *COMMANDS["replay"].needs, *(["matplotlib"] if options.plot is not None else []))
    with waiting("loading PyTorch"):
        from rich.console import Console  # noqa: PLC0415 - of an extra, as the rest

        from kvpool.tools.replay import bars  # noqa: PLC0415
        from kvpool.tools.replay.hit_rates import LOAD, Job  # noqa: PLC0415
        from kvpool.tools.replay.output import Output  # noqa: PLC0415
        from kvpool.tools.replay.replay import Replay  # noqa: PLC0415
        from kvpool.tools.traces import TraceError  # noqa: PLC0415

    _check_measured(options)
    sizes = None if options.capacity is None else _sizes("--capacity", options.capacity)
    has_models = options.states is not None or options.windows is not None
    try:
        policies = _policies(options.policy, has_several=sizes is not None and not has_models)
        if options.compare:
            policies = [*dict.fromkeys((*COMPARED_POLICIES, *policies))]
        costs = _costs(options.cost or COMPARED_COSTS) if options.compare else ()
        config = _config(options, "adaptive" if sizes is not None else policies[0])
        output = Output(options.plot, as_json_object=options.json)
        output.check()
        with waiting("making a trace" if options.trace is None else f"reading {options.trace}"):
            loaded = _load(options)
        errors = Console(stderr=True)
        show = errors.is_terminal and not options.json if options.progress is None else options.progress
        console = errors if show else None
        if sizes is not None and has_models:
            _measure_models(options, loaded, sizes, policies[0], output)
            return 0
        if sizes is not None:
            if options.compare and loaded.followed_by is not None and WITH_SESSIONS not in policies:
                policies.insert(policies.index("adaptive") + 1, WITH_SESSIONS)
            job = Job(policies, sizes, options.page_size, costs, options.in_use, options.load or LOAD)
            output.print_rates(bars.measure(loaded, job, console))
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


def _measure_models(
    options: argparse.Namespace, trace: Trace, sizes: list[int], policy: str, output: Output
) -> None:
    """Measure the models of --states or --windows, and print what they find."""
    from kvpool.tools.replay import hybrid_rates, window_rates  # noqa: PLC0415 - of an extra

    if options.states is not None:
        states = _sizes("--states", options.states)
        hybrid = hybrid_rates.HybridJob(states, sizes, options.state_share, options.chunk, policy)
        with waiting("measuring"):
            of_states = hybrid_rates.measure(trace, hybrid)
        output.print_hybrid_rates(of_states)
        return
    models = [window_rates.WindowedModel(*model) for model in _windows(options.windows)]
    with waiting("measuring"):
        of_windows = window_rates.measure(trace, window_rates.WindowJob(models, sizes, options.chunk, policy))
    output.print_window_rates(of_windows)


def _check_measured(options: argparse.Namespace) -> None:
    """Exit if the options of what is measured of the prefix cache alone do not go together."""
    own = [name for name in ("states", "windows") if getattr(options, name) is not None]
    if (options.compare or own) and options.capacity is None:
        options.capacity = COMPARED_CAPACITIES
    if len(own) > 1:
        refuse("--states and --windows have a table each")
    if own and (options.compare or options.plot is not None):
        refuse(f"--{own[0]} has a table of its own, without --compare and --plot")
    measures_all = options.compare or own
    if options.capacity is not None and not measures_all and (options.kv or not options.prefix_cache):
        refuse("--capacity measures the prefix cache alone; give --no-kv and --prefix-cache with it")
    if options.in_use and (options.capacity is None or own):
        refuse("--in-use is beside the caches of --capacity, without --states and --windows")
    if options.cost is not None and not options.compare:
        refuse("--cost is what the hits of --compare save")
    if options.load is not None and not options.compare:
        refuse("--load is that of the machine of --compare")


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
    if text == "all":
        return [*POLICIES, *SIMULATED_POLICIES]
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if (
            name
            not in {*POLICIES, *COMPARED_POLICIES, WITH_SESSIONS, *OPTIONAL_POLICIES, *SIMULATED_POLICIES}
            and ":" not in name
        ):
            known = ", ".join((*POLICIES, WITH_SESSIONS, *OPTIONAL_POLICIES, *SIMULATED_POLICIES))
            raise ConfigError(f"policy must be one of {known}, FILE.py:CLASS, or all, not {name!r}")
    return names


def _costs(text: str) -> tuple[PrefillCost, ...]:
    """Return costs by their names, or fitted to tables of prefills.

    Raises:
        ConfigError: If there is no such cost, or a table does not determine one.
        OSError: If a table cannot be opened.
    """
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in COSTS and not name.endswith(".csv"):
            raise ConfigError(f"cost must be one of {', '.join(COSTS)}, or a CSV file, not {name!r}")
    return tuple(COSTS[name] if name in COSTS else read_cost(Path(name)) for name in names)


def _share(text: str) -> float | None:
    """Return a share above 0 and below 1; `None` for `arena`."""
    if text == "arena":
        return None
    share = float(text)
    if not 0.0 < share < 1.0:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1, and not arena")
    return share


def _load_share(text: str) -> float:
    """Return a finite number above 0."""
    load = float(text)
    if not 0.0 < load < inf:
        raise argparse.ArgumentTypeError(f"{text} is not above 0, or not finite")
    return load


def _share_in_use(text: str) -> float:
    """Return a share from 0 on and below 1."""
    share = float(text)
    if not 0.0 <= share < 1.0:
        raise argparse.ArgumentTypeError(f"{text} is not 0 or more, and less than 1")
    return share


def _sizes(option: str, text: str) -> list[int]:
    """Return the sizes in tokens: `500K,8.2M` is 500,000 and 8,200,000."""
    sizes = []
    for part in text.split(","):
        size = round(parse_count(part) or 0)
        if not 1 <= size < 1 << 31:
            refuse(f"{option}: {part.strip()!r} is not a size in tokens such as 65536, 500K or 8.2M")
        sizes.append(size)
    return sizes


def _windows(text: str) -> list[tuple[int, int]]:
    """Return windows, and the layers with one for each full layer: `1024x5` is 1,024 tokens in five."""
    models = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,9})x(\d{1,3})\s*", part)
        window, layers = (int(number) for number in match.groups()) if match else (0, 0)
        if not window or not layers:
            refuse(f"--windows: {part.strip()!r} is no window and its layers, such as 1024x5")
        models.append((window, layers))
    return models
