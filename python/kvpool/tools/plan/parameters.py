"""The parameters of `kvpool plan`: the type of each, its limits, and what the help says of it."""

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from kvpool._kvpool import _STORAGE_DTYPES
from kvpool.tools.plan.solver import DTYPE_ALIASES, MLA_FORMS

FLEET_PANEL = "Fleet"
"""The panel of the help with the options of fleets."""
SYNTHETIC_REQUESTS = 1_000
"""Requests of the synthetic trace, if --requests is not given."""

# Of a plan.

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

# Of a fleet.

Fleet: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--fleet",
        help="Simulate a fleet of such machines, of --tp GPUs each, with the requests of a trace.",
        rich_help_panel=FLEET_PANEL,
    ),
]
Bandwidth: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        help="What `kvpool doctor --bandwidth --json` wrote: bandwidths that are not given below.",
        rich_help_panel=FLEET_PANEL,
    ),
]
Prefill: TypeAlias = Annotated[
    int, typer.Option(min=1, help="Machines that compute prompts.", rich_help_panel=FLEET_PANEL)
]
Decode: TypeAlias = Annotated[
    int, typer.Option(min=1, help="Machines that generate answers.", rich_help_panel=FLEET_PANEL)
]
PrefillRate: TypeAlias = Annotated[
    float | None,
    typer.Option(help="Prompt tokens that a machine computes in a second.", rich_help_panel=FLEET_PANEL),
]
DecodeRate: TypeAlias = Annotated[
    float | None,
    typer.Option(
        help="Tokens that a machine generates in a second, over all its requests.",
        rich_help_panel=FLEET_PANEL,
    ),
]
StepMs: TypeAlias = Annotated[
    float,
    typer.Option(help="The least time between two tokens of a request, in ms.", rich_help_panel=FLEET_PANEL),
]
Link: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="Bandwidth between machines: 400Gbit/s, 50GB/s. Default: nixl.contiguous of --bandwidth.",
        rich_help_panel=FLEET_PANEL,
    ),
]
Scattered: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--scattered",
        help="Hand over slot by slot: the link is nixl.scattered of --bandwidth.",
        rich_help_panel=FLEET_PANEL,
    ),
]
Store: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="Size of a store that prefill machines share: 20TB. Default: none.", rich_help_panel=FLEET_PANEL
    ),
]
StoreLink: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="Bandwidth from the store to a machine. Default: directory.read of --bandwidth.",
        rich_help_panel=FLEET_PANEL,
    ),
]
LatencyMs: TypeAlias = Annotated[
    float,
    typer.Option(
        help="Time before the first byte of a transfer or a load arrives, in ms.", rich_help_panel=FLEET_PANEL
    ),
]
Route: TypeAlias = Annotated[
    str,
    typer.Option(
        help="To which prefill machine a request goes. earliest: where its prompt would be computed "
        "first, with queues and prefixes considered; prefix: where its longest prefix is; turns: to one "
        "after the other.",
        rich_help_panel=FLEET_PANEL,
    ),
]
Policy: TypeAlias = Annotated[
    str,
    typer.Option(
        help="What the prefix caches of prefill machines evict first, as `kvpool replay` has it. With "
        "adaptive no two runs are quite the same.",
        rich_help_panel=FLEET_PANEL,
    ),
]
Trace: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        help="A Mooncake JSONL or Azure CSV trace of requests. Default: a synthetic one.",
        rich_help_panel=FLEET_PANEL,
    ),
]
Requests: TypeAlias = Annotated[
    int | None,
    typer.Option(
        min=1,
        help=f"Only the first N requests; of the synthetic trace all N [{SYNTHETIC_REQUESTS}].",
        rich_help_panel=FLEET_PANEL,
    ),
]
Seed: TypeAlias = Annotated[
    int, typer.Option(min=0, help="Seed of the synthetic trace.", rich_help_panel=FLEET_PANEL)
]
SpeedUp: TypeAlias = Annotated[
    float, typer.Option(help="Factor by which requests arrive faster.", rich_help_panel=FLEET_PANEL)
]
