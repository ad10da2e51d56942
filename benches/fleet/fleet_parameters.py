"""The parameters of the program that are not those of `kvpool plan`, and what the help says of each."""

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

SYNTHETIC_REQUESTS = 1_000
"""Requests of the synthetic trace, if --requests is not given."""

Bandwidth: TypeAlias = Annotated[
    Path | None,
    typer.Option(help="What `kvpool doctor --bandwidth --json` wrote: bandwidths that are not given below."),
]
Prefill: TypeAlias = Annotated[int, typer.Option(min=1, help="Machines that compute prompts.")]
Decode: TypeAlias = Annotated[int, typer.Option(min=1, help="Machines that generate answers.")]
PrefillRate: TypeAlias = Annotated[
    float | None,
    typer.Option(help="Prompt tokens that a machine computes in a second."),
]
DecodeRate: TypeAlias = Annotated[
    float | None,
    typer.Option(help="Tokens that a machine generates in a second, over all its requests."),
]
StepMs: TypeAlias = Annotated[
    float,
    typer.Option(help="The least time between two tokens of a request, in ms."),
]
Link: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="Bandwidth between machines: 400Gbit/s, 50GB/s. Default: nixl.contiguous of --bandwidth."
    ),
]
Scattered: TypeAlias = Annotated[
    bool,
    typer.Option("--scattered", help="Hand over slot by slot: the link is nixl.scattered of --bandwidth."),
]
Store: TypeAlias = Annotated[
    str | None,
    typer.Option(help="Size of a store that prefill machines share: 20TB. Default: none."),
]
StoreLink: TypeAlias = Annotated[
    str | None,
    typer.Option(help="Bandwidth from the store to a machine. Default: directory.read of --bandwidth."),
]
LatencyMs: TypeAlias = Annotated[
    float,
    typer.Option(help="Time before the first byte of a transfer or a load arrives, in ms."),
]
Route: TypeAlias = Annotated[
    str,
    typer.Option(
        help="To which prefill machine a request goes. earliest: where its prompt would be computed "
        "first, with queues and prefixes considered; prefix: where its longest prefix is; turns: to one "
        "after the other."
    ),
]
Policy: TypeAlias = Annotated[
    str,
    typer.Option(
        help="What the prefix caches of prefill machines evict first, as `kvpool replay` has it. With "
        "adaptive no two runs are quite the same."
    ),
]
Trace: TypeAlias = Annotated[
    Path | None,
    typer.Option(help="A Mooncake JSONL or Azure CSV trace of requests. Default: a synthetic one."),
]
Requests: TypeAlias = Annotated[
    int | None,
    typer.Option(
        min=1, help=f"Only the first N requests; of the synthetic trace all N [{SYNTHETIC_REQUESTS}]."
    ),
]
Seed: TypeAlias = Annotated[int, typer.Option(min=0, help="Seed of the synthetic trace.")]
SpeedUp: TypeAlias = Annotated[float, typer.Option(help="Factor by which requests arrive faster.")]
