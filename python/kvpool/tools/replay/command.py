"""The command `kvpool replay`."""

import re
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from kvpool.errors import ConfigError, KvPoolError
from kvpool.tools.devices import check_device
from kvpool.tools.needs import COMMANDS
from kvpool.tools.output import fail, need, refuse, waiting
from kvpool.tools.policies import BELADY, POLICIES, policy_named
from kvpool.tools.replay import parameters
from kvpool.tools.replay.bars import measure, run
from kvpool.tools.replay.config import ReplayConfig
from kvpool.tools.replay.output import Output

if TYPE_CHECKING:
    from kvpool.tools.traces import Trace

_UNITS = {"": 1, "k": 1_000, "m": 1_000_000}


def replay(  # noqa: PLR0913 - one parameter per option
    trace: parameters.Trace = None,
    *,
    synthetic: parameters.Synthetic = False,
    seed: parameters.Seed = 0,
    requests: parameters.Requests = None,
    pool_size: parameters.PoolSize = None,
    page_size: parameters.PageSize = None,
    layers: parameters.Layers = 2,
    heads: parameters.Heads = 2,
    head_dim: parameters.HeadDim = 16,
    dtype: parameters.Dtype = "bfloat16",
    device: parameters.Device = "cpu",
    max_running: parameters.MaxRunning = 256,
    max_context: parameters.MaxContext = None,
    prefill_budget: parameters.PrefillBudget = 800,
    step_ms: parameters.StepMs = 40.0,
    speed_up: parameters.SpeedUp = 1.0,
    kv: parameters.KV = True,
    need_sort: parameters.NeedSort = True,
    prefix_cache: parameters.PrefixCache = False,
    policy: parameters.Policy = "adaptive",
    capacity: parameters.Capacity = None,
    as_json_object: parameters.Json = False,
    plot: parameters.Plot = None,
    progress: parameters.Progress = None,
) -> None:
    """Drive the pools with a request trace and check every stored K and V row.

    Runs continuous batching on a virtual clock: admission, prefill with a token budget, batched decode,
    finish, and retraction of the youngest request when the pool is short. Exits with status 1 if one row is
    wrong, one slot is missing at the end, or no request fits.

    With --capacity the prefix cache is measured instead: its hit rate by policy and size.
    """
    need("replay", *COMMANDS["replay"].needs, *(["matplotlib"] if plot is not None else []))
    with waiting("loading PyTorch"):
        from kvpool.tools.replay.replay import Replay  # noqa: PLC0415 - it loads slowly, and may be missing
        from kvpool.tools.traces import TraceError  # noqa: PLC0415

    if capacity is not None and (kv or not prefix_cache):
        refuse("--capacity measures the prefix cache alone; give --no-kv and --prefix-cache with it")
    sizes = None if capacity is None else _capacities(capacity)
    try:
        policies = _policies(policy, has_several=sizes is not None)
        config = ReplayConfig(
            pool_size=pool_size,
            page_size=page_size or 1,
            need_sort=need_sort,
            kv=kv,
            layers=layers,
            heads=heads,
            head_dim=head_dim,
            dtype=dtype,
            device=device,
            max_running=max_running,
            max_context=max_context,
            prefill_budget=prefill_budget,
            step_ms=step_ms,
            speed_up=speed_up,
            seed=seed,
            prefix_cache=prefix_cache,
            policy="adaptive" if sizes is not None else policy_named(policy),
        )
        output = Output(plot, as_json_object=as_json_object)
        output.check()
        with waiting("making a trace" if trace is None else f"reading {trace}"):
            loaded = _load(trace, synthetic=synthetic, requests=requests, seed=seed)
        errors = Console(stderr=True)
        show = progress if progress is not None else errors.is_terminal and not as_json_object
        console = errors if show else None
        if sizes is not None:
            output.print_rates(measure(loaded, policies, sizes, page_size, console))
            return
        check_device(config.device)
        output.print_replay(run(Replay(loaded, config), console))
    except ConfigError as error:
        refuse(str(error))
    except (KvPoolError, TraceError) as error:
        fail(f"{type(error).__name__}: {error}")
    except (OSError, MemoryError) as error:
        fail(str(error) or "out of memory")


def _load(path: Path | None, *, synthetic: bool, requests: int | None, seed: int) -> "Trace":
    if synthetic == (path is not None):
        refuse("give either TRACE or --synthetic")
    from kvpool.tools.traces import read_trace, synthetic_trace  # noqa: PLC0415

    if path is None:
        return synthetic_trace(requests or parameters.SYNTHETIC_REQUESTS, seed)
    return read_trace(path).head(requests)


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
