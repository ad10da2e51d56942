"""The command line: a fleet of machines with the pools that `kvpool plan` computes for a model."""

import json
from pathlib import Path

import fleet_parameters
import typer
from fleet import simulate
from fleet_config import FleetConfig
from fleet_options import MAX_REQUESTS, FleetOptions, fleet_of, machine_of
from fleet_report import fleet_as_json, print_fleet
from rich.console import Console

from kvpool.errors import ConfigError
from kvpool.tools.bandwidths import Bandwidth, read_bandwidths
from kvpool.tools.output import WIDTH, fail, refuse, waiting
from kvpool.tools.plan import parameters
from kvpool.tools.plan.model_config import read_model
from kvpool.tools.plan.solver import PAGE_SIZE, STEP_TOKENS, PlanConfig, make_plan
from kvpool.tools.traces import Trace, TraceError, read_trace, synthetic_trace
from kvpool.tools.units import parse_bytes

app: typer.Typer = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def simulation(  # noqa: PLR0913 - one parameter per option
    config: parameters.Config,
    *,
    memory: parameters.Memory,
    reserve: parameters.Reserve = "0",
    tp: parameters.TensorParallelism = 1,
    dtype: parameters.Dtype = None,
    context: parameters.Context = None,
    mean_context: parameters.MeanContext = None,
    page_size: parameters.PageSize = PAGE_SIZE,
    max_requests: parameters.MaxRequests = None,
    step_tokens: parameters.StepTokens = STEP_TOKENS,
    host_tier: parameters.HostTier = False,
    mla: parameters.LatentForm = "latent",
    bandwidth: fleet_parameters.Bandwidth = None,
    prefill: fleet_parameters.Prefill = 1,
    decode: fleet_parameters.Decode = 1,
    prefill_rate: fleet_parameters.PrefillRate = None,
    decode_rate: fleet_parameters.DecodeRate = None,
    step_ms: fleet_parameters.StepMs = 40.0,
    link: fleet_parameters.Link = None,
    scattered: fleet_parameters.Scattered = False,
    store: fleet_parameters.Store = None,
    store_link: fleet_parameters.StoreLink = None,
    latency_ms: fleet_parameters.LatencyMs = 0.0,
    route: fleet_parameters.Route = "earliest",
    policy: fleet_parameters.Policy = "lru",
    trace: fleet_parameters.Trace = None,
    requests: fleet_parameters.Requests = None,
    seed: fleet_parameters.Seed = 0,
    speed_up: fleet_parameters.SpeedUp = 1.0,
    as_json_object: parameters.Json = False,
) -> None:
    """Run the requests of a trace through a fleet of machines, of --tp GPUs each, on a virtual clock.

    Each machine has the pools that `kvpool plan` computes for the model.
    """
    if max_requests is None and mean_context is None:
        max_requests = MAX_REQUESTS
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
    try:
        memory_of_each = PlanConfig(
            memory_bytes=parse_bytes(memory),
            reserve_bytes=parse_bytes(reserve),
            tp=tp,
            dtype=dtype,
            context_len=context,
            mean_context=mean_context,
            page_size=page_size,
            max_requests=max_requests,
            step_tokens=step_tokens,
            host_tier=host_tier,
            mla=mla,
        )
    except ConfigError as error:
        refuse(str(error))
    try:
        measured = [] if bandwidth is None else read_bandwidths(bandwidth)
        machines = _fleet(options, measured)
        made = make_plan(read_model(config), memory_of_each)
        with waiting("simulating the machines"):
            result = simulate(_read(trace, requests, seed), machine_of(made), machines)
        if as_json_object:
            typer.echo(json.dumps(fleet_as_json(result, measured)))
        else:
            print_fleet(result, measured, Console(width=WIDTH))
    except (ConfigError, OSError, TraceError) as error:
        fail(str(error))


def _fleet(options: FleetOptions, measured: list[Bandwidth]) -> FleetConfig:
    try:
        return fleet_of(options, measured)
    except ConfigError as error:
        refuse(str(error))


def _read(path: Path | None, requests: int | None, seed: int) -> Trace:
    if path is None:
        return synthetic_trace(requests or fleet_parameters.SYNTHETIC_REQUESTS, seed)
    return read_trace(path).head(requests)
