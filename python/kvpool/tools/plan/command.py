"""The command `kvpool plan`."""

import json

import typer

from kvpool.errors import ConfigError
from kvpool.tools.bandwidths import Bandwidth, read_bandwidths
from kvpool.tools.output import fail, refuse
from kvpool.tools.plan import parameters
from kvpool.tools.plan.fleet_command import TraceOptions, print_simulation, refuse_fleet_options
from kvpool.tools.plan.fleet_config import FleetConfig
from kvpool.tools.plan.fleet_options import MAX_REQUESTS, FleetOptions, fleet_of
from kvpool.tools.plan.model_config import read_model
from kvpool.tools.plan.report import print_plan
from kvpool.tools.plan.solver import PAGE_SIZE, STEP_TOKENS, Plan, PlanConfig, make_plan
from kvpool.tools.units import parse_bytes


def plan(  # noqa: PLR0913 - one parameter per option
    called: typer.Context,
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
    device: parameters.Device = "cuda",
    as_json_object: parameters.Json = False,
    fleet: parameters.Fleet = False,
    bandwidth: parameters.Bandwidth = None,
    prefill: parameters.Prefill = 1,
    decode: parameters.Decode = 1,
    prefill_rate: parameters.PrefillRate = None,
    decode_rate: parameters.DecodeRate = None,
    step_ms: parameters.StepMs = 40.0,
    link: parameters.Link = None,
    scattered: parameters.Scattered = False,
    store: parameters.Store = None,
    store_link: parameters.StoreLink = None,
    latency_ms: parameters.LatencyMs = 0.0,
    route: parameters.Route = "earliest",
    policy: parameters.Policy = "lru",
    trace: parameters.Trace = None,
    requests: parameters.Requests = None,
    seed: parameters.Seed = 0,
    speed_up: parameters.SpeedUp = 1.0,
) -> None:
    """Compute how many tokens and requests of a model fit into memory, and print the pools for them.

    Reads config.json only, and needs neither PyTorch nor transformers nor a GPU. All memory of the pools on
    the device is counted: the printed constructors fit the memory, and one more page would not. An unknown
    model is refused, or attention in every layer is assumed; the notes say so.

    With --fleet, requests of a trace are run through machines that have these pools, on a virtual clock.
    """
    if not fleet:
        refuse_fleet_options(called)
    elif max_requests is None and mean_context is None:
        max_requests = MAX_REQUESTS
    try:
        options = PlanConfig(
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
            device=device,
        )
    except ConfigError as error:
        refuse(str(error))
    fleet_options = FleetOptions(
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
        measured = [] if bandwidth is None else read_bandwidths(bandwidth)
        machines = _fleet(fleet_options, measured) if fleet else None
        made = make_plan(read_model(config), options)
        if machines is None:
            _print(made, as_json_object=as_json_object)
        else:
            chosen = TraceOptions(trace, requests, seed)
            print_simulation(made, machines, chosen, measured, as_json_object=as_json_object)
    except (ConfigError, OSError) as error:
        fail(str(error))


def _fleet(options: FleetOptions, measured: list[Bandwidth]) -> FleetConfig:
    try:
        return fleet_of(options, measured)
    except ConfigError as error:
        refuse(str(error))


def _print(made: Plan, *, as_json_object: bool) -> None:
    if as_json_object:
        typer.echo(json.dumps(made.as_json()))
    else:
        print_plan(made)
