"""The command `kvpool plan`."""

from __future__ import annotations

import json
from pathlib import Path  # noqa: TC003 - typer looks at it
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
    parse_bytes,
)


def plan(  # noqa: PLR0913 - one parameter per option
    config: Annotated[
        Path, typer.Argument(help="A model's config.json, as Hugging Face has it, or the folder it is in.")
    ],
    *,
    memory: Annotated[
        str,
        typer.Option(
            help="Memory of each GPU for the pools, which is what is free once weights are loaded: 80GiB "
            "(1024**3), 80GB (1000**3), 512MiB or plain bytes."
        ),
    ],
    reserve: Annotated[
        str,
        typer.Option(
            help="How much of --memory to leave to others: weights, activations, CUDA graphs. With it "
            "--memory can be all that a GPU has."
        ),
    ] = "0",
    tp: Annotated[int, typer.Option(min=1, help="GPUs that share each layer (tensor parallelism).")] = 1,
    dtype: Annotated[
        str | None,
        typer.Option(
            help=f"Of K and V: {', '.join((*_STORAGE_DTYPES, *DTYPE_ALIASES))}. Default: the configuration's."
        ),
    ] = None,
    context: Annotated[
        int | None, typer.Option(min=1, help="Most tokens of a request. Default: the model's.")
    ] = None,
    page_size: Annotated[int, typer.Option(min=1, help="Slots per page.")] = PAGE_SIZE,
    max_requests: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Requests at once, each with a row of the table and its states. Default: as many as fit "
            "with --context tokens each.",
        ),
    ] = None,
    step_tokens: Annotated[
        int, typer.Option(min=1, help="Most new tokens in a step, for the planner.")
    ] = STEP_TOKENS,
    mla: Annotated[
        str,
        typer.Option(
            help=f"How latent attention (DeepSeek) keeps a token: {', '.join(MLA_FORMS)}. latent: the latent "
            "vector as K and the rotated part of the key as V; fused: both in one row of K; expanded: K and "
            "V of every head."
        ),
    ] = "latent",
    device: Annotated[str, typer.Option(help="Where the pools are, as PyTorch writes it.")] = "cuda",
    as_json_object: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of tables.")
    ] = False,
) -> None:
    """Say how many tokens and requests of a model fit into memory, and which pools hold them.

    Reads config.json alone, and needs neither PyTorch nor transformers nor a GPU. All that the pools take on
    the device is counted, so that the printed constructors fit the memory, and one more page would not. A
    model that is not known is refused, or taken for one with attention in every layer, and then the notes say
    so.
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
