"""The command `kvpool replay`."""

from __future__ import annotations

import json
import re
from pathlib import Path  # noqa: TC003 - typer reads the annotation
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from kvpool._kvpool import _STORAGE_DTYPES
from kvpool.errors import KvPoolError
from kvpool.tools.devices import check_device
from kvpool.tools.needs import COMMANDS
from kvpool.tools.output import fail, need
from kvpool.tools.replay.config import ReplayConfig

if TYPE_CHECKING:
    from kvpool.tools.replay.hit_rates import HitRate, HitRates
    from kvpool.tools.replay.replay import Replay, ReplayResult
    from kvpool.tools.traces import Trace

SYNTHETIC_REQUESTS = 2_000
STEPS_PER_UPDATE = 64
PICTURE_FORMATS = (".png", ".svg", ".pdf")
_UNITS = {"": 1, "k": 1_000, "m": 1_000_000}


def replay(  # noqa: PLR0913 - one parameter per option
    trace: Annotated[
        Path | None,
        typer.Argument(help="A Mooncake JSONL or Azure CSV trace; the format is detected from its content."),
    ] = None,
    *,
    synthetic: Annotated[
        bool, typer.Option("--synthetic", help="Generate a trace instead of reading one.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the synthetic trace and of the stored rows.")] = 0,
    requests: Annotated[
        int | None,
        typer.Option(
            min=1, help=f"Replay the first N requests only; with --synthetic make N [{SYNTHETIC_REQUESTS}]."
        ),
    ] = None,
    pool_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Token slots. Default: half of the trace's peak usage of an unlimited pool, so that "
            "requests are retracted, but at least the longest request.",
        ),
    ] = None,
    page_size: Annotated[
        int | None,
        typer.Option(min=1, help="Slots per page. Default: 1; with --capacity the block size of the trace."),
    ] = None,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the KV pool.")] = 2,
    heads: Annotated[int, typer.Option(min=1, help="K and V heads per layer.")] = 2,
    head_dim: Annotated[int, typer.Option(min=1, help="Elements per head.")] = 16,
    dtype: Annotated[
        str, typer.Option(help=f"Data type of K and V: {', '.join(_STORAGE_DTYPES)}.")
    ] = "bfloat16",
    device: Annotated[str, typer.Option(help="Device of the pools, in PyTorch's notation.")] = "cpu",
    max_running: Annotated[int, typer.Option(min=1, help="Most requests that run at once.")] = 256,
    max_context: Annotated[
        int | None,
        typer.Option(min=1, help="Most tokens of a request; longer ones are rejected. Default: the longest."),
    ] = None,
    prefill_budget: Annotated[
        int, typer.Option(min=1, help="Prompt tokens per step (800 in 40 ms are 20,000 tokens/s).")
    ] = 800,
    step_ms: Annotated[
        float,
        typer.Option(help="Virtual time of a step in ms; each running request decodes one token in a step."),
    ] = 40.0,
    speed_up: Annotated[float, typer.Option(help="Factor by which requests arrive faster.")] = 1.0,
    kv: Annotated[
        bool,
        typer.Option("--kv/--no-kv", help="Store K and V and check every byte; or run the bookkeeping only."),
    ] = True,
    need_sort: Annotated[
        bool,
        typer.Option(
            "--need-sort/--no-need-sort", help="Hand out the lowest slots first; or first in, first out."
        ),
    ] = True,
    prefix_cache: Annotated[
        bool,
        typer.Option(
            "--prefix-cache/--no-prefix-cache",
            help="Keep prompts and answers in a prefix cache, and find what requests have in common.",
        ),
    ] = False,
    policy: Annotated[
        str,
        typer.Option(
            help="What the prefix cache evicts first: lru, fifo, lfu, slru, priority or adaptive. With "
            "--capacity several, separated by commas, also belady (which sees the requests to come), or all."
        ),
    ] = "adaptive",
    capacity: Annotated[
        str | None,
        typer.Option(
            help="With --no-kv and --prefix-cache: measure what share of the prompts' blocks the cache alone "
            "finds at this size in tokens, request after request, without a clock and without outputs. "
            "Several sizes are separated by commas: 500K,1M,8.2M."
        ),
    ] = None,
    as_json_object: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of tables.")
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Write a plot to this file: occupancy over time and latencies of calls; with --capacity the "
            "hit rates."
        ),
    ] = None,
    progress: Annotated[
        bool | None,
        typer.Option(
            "--progress/--quiet", help="Progress bar on stderr. Default: on a terminal, without --json."
        ),
    ] = None,
) -> None:
    """Drive the pools with a request trace and check every stored K and V row.

    Runs continuous batching on a virtual clock: admission, prefill with a token budget, batched decode,
    finish, and retraction of the youngest request when the pool is short. Exits with status 1 if one row is
    wrong, one slot is missing at the end, or no request fits.

    With --capacity the prefix cache is measured instead: its hit rate by policy and size.
    """
    need("replay", *COMMANDS["replay"].needs, *(["matplotlib"] if plot is not None else []))
    from kvpool.tools.replay.replay import Replay  # noqa: PLC0415 - PyTorch loads slowly, and may be missing
    from kvpool.tools.traces import TraceError  # noqa: PLC0415

    if capacity is not None and (kv or not prefix_cache):
        fail("--capacity measures the prefix cache alone; give --no-kv and --prefix-cache with it")
    try:
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
            policy=policy if capacity is None else "adaptive",
        )
        _check_plot(plot)
        loaded = _load(trace, synthetic=synthetic, requests=requests, seed=seed)
        errors = Console(stderr=True)
        show = progress if progress is not None else errors.is_terminal and not as_json_object
        console = errors if show else None
        if capacity is not None:
            rates = _measure(loaded, policy, _capacities(capacity), page_size, console)
            _deliver_rates(rates, as_json_object=as_json_object, plot=plot)
            return
        check_device(config.device)
        result = _run(Replay(loaded, config), console)
        _deliver(result, as_json_object=as_json_object, plot=plot)
    except (KvPoolError, TraceError) as error:
        fail(f"{type(error).__name__}: {error}")
    except (OSError, MemoryError) as error:
        fail(str(error) or "out of memory")


def _load(path: Path | None, *, synthetic: bool, requests: int | None, seed: int) -> Trace:
    if synthetic == (path is not None):
        fail("give either TRACE or --synthetic")
    from kvpool.tools.traces import read_trace, synthetic_trace  # noqa: PLC0415

    if path is None:
        return synthetic_trace(requests or SYNTHETIC_REQUESTS, seed)
    return read_trace(path).head(requests)


def _check_plot(plot: Path | None) -> None:
    """Check before the run that the plot can be written."""
    if plot is None:
        return
    if not plot.parent.is_dir():
        fail(f"--plot: {plot.parent} is not a folder")
    if plot.suffix not in PICTURE_FORMATS:
        fail(f"--plot: {plot.name} must end in {', '.join(PICTURE_FORMATS)}")


def _capacities(text: str) -> list[int]:
    """Return the sizes in tokens: `500K,8.2M` is 500,000 and 8,200,000."""
    sizes = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,10}(?:\.[0-9]{1,9})?)([kKmM]?)", part.strip())
        size = round(float(match[1]) * _UNITS[match[2].lower()]) if match else 0
        if not 1 <= size < 1 << 31:
            fail(f"--capacity: {part.strip()!r} is not a size in tokens such as 65536, 500K or 8.2M")
        sizes.append(size)
    return sizes


def _measure(
    trace: Trace, policies: str, capacities: list[int], page_size: int | None, console: Console | None
) -> HitRates:
    from kvpool.tools.replay.hit_rates import BELADY, POLICIES, measure  # noqa: PLC0415 - as above

    names = [*POLICIES, BELADY] if policies == "all" else [name.strip() for name in policies.split(",")]
    if console is None:
        return measure(trace, names, capacities, page_size)
    columns = (
        TextColumn("measuring {task.fields[last]}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=len(names) * len(capacities), last="")

        def update(rate: HitRate) -> None:
            bar.update(task, advance=1, last=rate.policy)

        return measure(trace, names, capacities, page_size, update)


def _deliver_rates(rates: HitRates, *, as_json_object: bool, plot: Path | None) -> None:
    from kvpool.tools.replay.report import print_rates, rates_as_json  # noqa: PLC0415

    if as_json_object:
        typer.echo(json.dumps(rates_as_json(rates)))
    else:
        print_rates(rates, Console())
    if plot is not None:
        from kvpool.tools.replay.plot import save_rates  # noqa: PLC0415 - Matplotlib loads slowly

        save_rates(rates, plot)
        if not as_json_object:
            typer.echo(f"picture: {plot}")


def _run(job: Replay, console: Console | None) -> ReplayResult:
    if console is None:
        return job.run()
    columns = (
        TextColumn("replaying"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("requests, pool {task.fields[used]:3.0f} %"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    # A refresh competes with the timed calls for the interpreter, so there are few.
    with Progress(*columns, console=console, refresh_per_second=4) as bar:
        task = bar.add_task("", total=job.counts.requests, used=0.0)

        def update(state: Replay) -> None:
            if state.counts.steps % STEPS_PER_UPDATE == 0:
                bar.update(task, completed=state.ended, used=100.0 * state.in_use / state.capacity)

        result = job.run(update)
        bar.update(task, completed=job.ended, used=0.0)
        return result


def _deliver(result: ReplayResult, *, as_json_object: bool, plot: Path | None) -> None:
    from kvpool.tools.replay.report import as_json, print_report  # noqa: PLC0415

    if as_json_object:
        typer.echo(json.dumps(as_json(result)))
    else:
        print_report(result, Console())
    if plot is not None:
        from kvpool.tools.replay.plot import save_plot  # noqa: PLC0415 - Matplotlib loads slowly

        save_plot(result, plot)
        if not as_json_object:
            typer.echo(f"picture: {plot}")
