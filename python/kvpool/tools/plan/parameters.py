"""The parameters of `kvpool plan`: the type of each, its limits, and what the help says of it."""

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from kvpool._kvpool import _STORAGE_DTYPES
from kvpool.tools.plan.solver import DTYPE_ALIASES, MLA_FORMS

Config: TypeAlias = Annotated[Path, typer.Argument(help="A model's Hugging Face config.json, or its folder.")]
Memory: TypeAlias = Annotated[
    str,
    typer.Option(
        help="Memory of each GPU for the pools, that is the free memory after loading the weights: 80GiB "
        "(1024**3), 80GB (1000**3), 512MiB or plain bytes."
    ),
]
Reserve: TypeAlias = Annotated[
    str,
    typer.Option(
        help="The part of --memory for weights, activations and CUDA graphs. With it, --memory can be "
        "the whole memory of a GPU."
    ),
]
TensorParallelism: TypeAlias = Annotated[
    int, typer.Option(min=1, help="GPUs that share each layer (tensor parallelism).")
]
Dtype: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help=f"Data type of K and V: {', '.join((*_STORAGE_DTYPES, *DTYPE_ALIASES))}. Default: the "
        "configuration's."
    ),
]
Context: TypeAlias = Annotated[
    int | None, typer.Option(min=1, help="The most tokens of a request. Default: the model's.")
]
MeanContext: TypeAlias = Annotated[
    int | None,
    typer.Option(min=1, help="Tokens of a request on average, prompt and answer. Default: --context."),
]
PageSize: TypeAlias = Annotated[int, typer.Option(min=1, help="Slots per page.")]
MaxRequests: TypeAlias = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="The most requests at once, each with a row of the table and states. Default: as many as "
        "fit with --mean-context tokens each.",
    ),
]
StepTokens: TypeAlias = Annotated[
    int, typer.Option(min=1, help="The most new tokens in a step of the planner.")
]
HostTier: TypeAlias = Annotated[
    bool,
    typer.Option("--host-tier", help="Count the staging area of a HostTier (KVPOOL_STAGING_BYTES)."),
]
LatentForm: TypeAlias = Annotated[
    str,
    typer.Option(
        help=f"Storage form of latent attention (DeepSeek): {', '.join(MLA_FORMS)}. latent: the latent "
        "vector as K and the rotated part of the key as V; fused: both in one row of K; expanded: K and "
        "V of every head."
    ),
]
Device: TypeAlias = Annotated[str, typer.Option(help="Device of the pools, in PyTorch's notation.")]
Json: TypeAlias = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
