"""The command `kvpool plan`."""

from __future__ import annotations

import json
from pathlib import Path  # noqa: TC003 - typer reads the annotation
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from kvpool._kvpool import _STORAGE_DTYPES
from kvpool.errors import ConfigError
from kvpool.tools.bandwidths import read_bandwidths
from kvpool.tools.output import WIDTH, fail, need
from kvpool.tools.plan.fleet_options import MAX_REQUESTS, FleetOptions, fleet_of, machine_of
from kvpool.tools.plan.model_config import read_model
from kvpool.tools.plan.report import print_plan
from kvpool.tools.plan.solver import (
    DTYPE_ALIASES,
    MLA_FORMS,
    PAGE_SIZE,
    STEP_TOKENS,
    PlanConfig,
    make_plan,
)
from kvpool.tools.units import parse_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvpool.tools.bandwidths import Bandwidth
    from kvpool.tools.plan.solver import Plan
    from kvpool.tools.traces import Trace

FLEET = "Fleet"
SYNTHETIC_REQUESTS = 1_000


def plan(  # noqa: PLR0913 - one parameter per option
    called: typer.Context,
    config: Annotated[Path, typer.Argument(help="A model's Hugging Face config.json, or its folder.")],
    *,
    memory: Annotated[
        str,
        typer.Option(
            help="Memory of each GPU for the pools, that is the free memory after loading the weights: 80GiB "
            "(1024**3), 80GB (1000**3), 512MiB or plain bytes."
        ),
    ],
    reserve: Annotated[
        str,
        typer.Option(
            help="The part of --memory for weights, activations and CUDA graphs. With it, --memory can be "
            "the whole memory of a GPU."
        ),
    ] = "0",
    tp: Annotated[int, typer.Option(min=1, help="GPUs that share each layer (tensor parallelism).")] = 1,
    dtype: Annotated[
        str | None,
        typer.Option(
            help=f"Data type of K and V: {', '.join((*_STORAGE_DTYPES, *DTYPE_ALIASES))}. Default: the "
            "configuration's."
        ),
    ] = None,
    context: Annotated[
        int | None, typer.Option(min=1, help="The most tokens of a request. Default: the model's.")
    ] = None,
    mean_context: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of a request on average, prompt and answer. Default: --context."),
    ] = None,
    page_size: Annotated[int, typer.Option(min=1, help="Slots per page.")] = PAGE_SIZE,
    max_requests: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="The most requests at once, each with a row of the table and states. Default: as many as "
            "fit with --mean-context tokens each.",
        ),
    ] = None,
    step_tokens: Annotated[
        int, typer.Option(min=1, help="The most new tokens in a step of the planner.")
    ] = STEP_TOKENS,
    mla: Annotated[
        str,
        typer.Option(
            help=f"Storage form of latent attention (DeepSeek): {', '.join(MLA_FORMS)}. latent: the latent "
            "vector as K and the rotated part of the key as V; fused: both in one row of K; expanded: K and "
            "V of every head."
        ),
    ] = "latent",
    device: Annotated[str, typer.Option(help="Device of the pools, in PyTorch's notation.")] = "cuda",
    as_json_object: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of tables.")
    ] = False,
    fleet: Annotated[
        bool,
        typer.Option(
            "--fleet",
            help="Simulate a fleet of such machines, of --tp GPUs each, with the requests of a trace.",
            rich_help_panel=FLEET,
        ),
    ] = False,
    bandwidth: Annotated[
        Path | None,
        typer.Option(
            help="What `kvpool doctor --bandwidth --json` wrote: bandwidths that are not given below.",
            rich_help_panel=FLEET,
        ),
    ] = None,
    prefill: Annotated[
        int, typer.Option(min=1, help="Machines that compute prompts.", rich_help_panel=FLEET)
    ] = 1,
    decode: Annotated[
        int, typer.Option(min=1, help="Machines that generate answers.", rich_help_panel=FLEET)
    ] = 1,
    prefill_rate: Annotated[
        float | None,
        typer.Option(help="Prompt tokens that a machine computes in a second.", rich_help_panel=FLEET),
    ] = None,
    decode_rate: Annotated[
        float | None,
        typer.Option(
            help="Tokens that a machine generates in a second, over all its requests.", rich_help_panel=FLEET
        ),
    ] = None,
    step_ms: Annotated[
        float,
        typer.Option(help="The least time between two tokens of a request, in ms.", rich_help_panel=FLEET),
    ] = 40.0,
    link: Annotated[
        str | None,
        typer.Option(
            help="Bandwidth between machines: 400Gbit/s, 50GB/s. Default: nixl.contiguous of --bandwidth.",
            rich_help_panel=FLEET,
        ),
    ] = None,
    scattered: Annotated[
        bool,
        typer.Option(
            "--scattered",
            help="Hand over slot by slot: the link is nixl.scattered of --bandwidth.",
            rich_help_panel=FLEET,
        ),
    ] = False,
    store: Annotated[
        str | None,
        typer.Option(
            help="Size of a store that prefill machines share: 20TB. Default: none.", rich_help_panel=FLEET
        ),
    ] = None,
    store_link: Annotated[
        str | None,
        typer.Option(
            help="Bandwidth from the store to a machine. Default: directory.read of --bandwidth.",
            rich_help_panel=FLEET,
        ),
    ] = None,
    latency_ms: Annotated[
        float,
        typer.Option(
            help="Time before the first byte of a transfer or a load arrives, in ms.", rich_help_panel=FLEET
        ),
    ] = 0.0,
    route: Annotated[
        str,
        typer.Option(
            help="To which prefill machine a request goes. earliest: where its prompt would be computed "
            "first, with queues and prefixes considered; prefix: where its longest prefix is; turns: to one "
            "after the other.",
            rich_help_panel=FLEET,
        ),
    ] = "earliest",
    policy: Annotated[
        str,
        typer.Option(
            help="What the prefix caches of prefill machines evict first, as `kvpool replay` has it. With "
            "adaptive no two runs are quite the same.",
            rich_help_panel=FLEET,
        ),
    ] = "lru",
    trace: Annotated[
        Path | None,
        typer.Option(
            help="A Mooncake JSONL or Azure CSV trace of requests. Default: a synthetic one.",
            rich_help_panel=FLEET,
        ),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"Only the first N requests; of the synthetic trace all N [{SYNTHETIC_REQUESTS}].",
            rich_help_panel=FLEET,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the synthetic trace.", rich_help_panel=FLEET)] = 0,
    speed_up: Annotated[
        float, typer.Option(help="Factor by which requests arrive faster.", rich_help_panel=FLEET)
    ] = 1.0,
) -> None:
    """Compute how many tokens and requests of a model fit into memory, and print the pools for them.

    Reads config.json only, and needs neither PyTorch nor transformers nor a GPU. All memory of the pools on
    the device is counted: the printed constructors fit the memory, and one more page would not. An unknown
    model is refused, or attention in every layer is assumed; the notes say so.

    With --fleet, requests of a trace are run through machines that have these pools, on a virtual clock.
    """
    if not fleet:
        _refuse_fleet_options(called)
    elif max_requests is None and mean_context is None:
        max_requests = MAX_REQUESTS
    try:
        made = make_plan(
            read_model(config),
            PlanConfig(
                memory_bytes=parse_bytes(memory),
                reserve_bytes=parse_bytes(reserve),
                tp=tp,
                dtype=dtype,
                context_len=context,
                mean_context=mean_context,
                page_size=page_size,
                max_requests=max_requests,
                step_tokens=step_tokens,
                mla=mla,
                device=device,
            ),
        )
        if fleet:
            options = FleetOptions(
                prefill=prefill,
                decode=decode,
                prefill_rate=prefill_rate,
                decode_rate=decode_rate,
                step_ms=step_ms,
                link=link,
                scattered=scattered,
                store=store,
                store_link=store_link,
                latency_ms=latency_ms,
                route=route,
                policy=policy,
                speed_up=speed_up,
            )
            _run_fleet(
                made,
                options,
                read_bandwidths(bandwidth) if bandwidth is not None else [],
                lambda: _trace(trace, requests, seed),
                as_json_object=as_json_object,
            )
            return
    except (ConfigError, OSError) as error:
        fail(str(error))
    if as_json_object:
        typer.echo(json.dumps(made.as_json()))
    else:
        print_plan(made)


def _refuse_fleet_options(called: typer.Context) -> None:
    """Exit if an option that only a fleet has was given without it."""
    for option in called.command.params:
        if getattr(option, "rich_help_panel", None) == FLEET:
            source = called.get_parameter_source(option.name or "")
            if source is not None and source.name == "COMMANDLINE":
                fail(f"{option.opts[0]} is for --fleet")


def _trace(path: Path | None, requests: int | None, seed: int) -> Trace:
    from kvpool.tools.traces import TraceError, read_trace, synthetic_trace  # noqa: PLC0415 - they need NumPy

    if path is None:
        return synthetic_trace(requests or SYNTHETIC_REQUESTS, seed)
    try:
        return read_trace(path).head(requests)
    except TraceError as error:
        fail(str(error))


def _run_fleet(
    made: Plan,
    options: FleetOptions,
    measured: list[Bandwidth],
    load_trace: Callable[[], Trace],
    *,
    as_json_object: bool,
) -> None:
    need("plan --fleet", "numpy")
    from kvpool.tools.plan.fleet import simulate  # noqa: PLC0415 - it needs NumPy
    from kvpool.tools.plan.fleet_report import fleet_as_json, print_fleet  # noqa: PLC0415

    result = simulate(load_trace(), machine_of(made), fleet_of(options, measured))
    if as_json_object:
        typer.echo(json.dumps(fleet_as_json(result, measured)))
    else:
        print_fleet(result, measured, Console(width=WIDTH))
