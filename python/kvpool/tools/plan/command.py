"""The command `kvpool plan`."""

import json

import typer

from kvpool.errors import ConfigError
from kvpool.tools.output import fail, refuse
from kvpool.tools.plan import parameters
from kvpool.tools.plan.model_config import read_model
from kvpool.tools.plan.report import print_plan
from kvpool.tools.plan.solver import PAGE_SIZE, STEP_TOKENS, PlanConfig, make_plan
from kvpool.tools.units import parse_bytes


def plan(  # noqa: PLR0913 - one parameter per option
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
) -> None:
    """Compute how many tokens and requests of a model fit into memory, and print the pools for them.

    Reads config.json only, and needs neither PyTorch nor transformers nor a GPU. All memory of the pools on
    the device is counted: the printed constructors fit the memory, and one more page would not. An unknown
    model is refused, or attention in every layer is assumed; the notes say so.
    """
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
    try:
        made = make_plan(read_model(config), options)
        if as_json_object:
            typer.echo(json.dumps(made.as_json()))
        else:
            print_plan(made)
    except (ConfigError, OSError) as error:
        fail(str(error))
