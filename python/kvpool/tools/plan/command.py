"""The command `kvpool plan`."""

from __future__ import annotations

import json
from pathlib import Path  # noqa: TC003 - typer reads the annotation
from typing import Annotated

import typer

from kvpool._kvpool import _STORAGE_DTYPES
from kvpool.errors import ConfigError
from kvpool.tools.output import fail
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


def plan(  # noqa: PLR0913 - one parameter per option
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
    page_size: Annotated[int, typer.Option(min=1, help="Slots per page.")] = PAGE_SIZE,
    max_requests: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="The most requests at once, each with a row of the table and states. Default: as many as "
            "fit with --context tokens each.",
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
) -> None:
    """Compute how many tokens and requests of a model fit into memory, and print the pools for them.

    Reads config.json only, and needs neither PyTorch nor transformers nor a GPU. All memory of the pools on
    the device is counted: the printed constructors fit the memory, and one more page would not. An unknown
    model is refused, or attention in every layer is assumed; the notes say so.
    """
    try:
        made = make_plan(
            read_model(config),
            PlanConfig(
                memory_bytes=parse_bytes(memory),
                reserve_bytes=parse_bytes(reserve),
                tp=tp,
                dtype=dtype,
                context_len=context,
                page_size=page_size,
                max_requests=max_requests,
                step_tokens=step_tokens,
                mla=mla,
                device=device,
            ),
        )
    except (ConfigError, OSError) as error:
        fail(str(error))
    if as_json_object:
        typer.echo(json.dumps(made.as_json()))
    else:
        print_plan(made)
