"""The parameters of `kvpool replay`: the type of each, its limits, and what the help says of it."""

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from kvpool._kvpool import _STORAGE_DTYPES

SYNTHETIC_REQUESTS = 2_000
"""Requests of the synthetic trace, if --requests is not given."""

Trace: TypeAlias = Annotated[
    Path | None,
    typer.Argument(help="A Mooncake JSONL or Azure CSV trace; the format is detected from its content."),
]
Synthetic: TypeAlias = Annotated[
    bool, typer.Option("--synthetic", help="Generate a trace instead of reading one.")
]
Seed: TypeAlias = Annotated[
    int, typer.Option(min=0, help="Seed of the synthetic trace and of the stored rows.")
]
Requests: TypeAlias = Annotated[
    int | None,
    typer.Option(
        min=1, help=f"Replay the first N requests only; with --synthetic make N [{SYNTHETIC_REQUESTS}]."
    ),
]
PoolSize: TypeAlias = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Token slots. Default: half of the trace's peak usage of an unlimited pool, so that "
        "requests are retracted, but at least the longest request.",
    ),
]
PageSize: TypeAlias = Annotated[
    int | None,
    typer.Option(min=1, help="Slots per page. Default: 1; with --capacity the block size of the trace."),
]
Layers: TypeAlias = Annotated[int, typer.Option(min=1, help="Layers of the KV pool.")]
Heads: TypeAlias = Annotated[int, typer.Option(min=1, help="K and V heads per layer.")]
HeadDim: TypeAlias = Annotated[int, typer.Option(min=1, help="Elements per head.")]
Dtype: TypeAlias = Annotated[str, typer.Option(help=f"Data type of K and V: {', '.join(_STORAGE_DTYPES)}.")]
Device: TypeAlias = Annotated[str, typer.Option(help="Device of the pools, in PyTorch's notation.")]
MaxRunning: TypeAlias = Annotated[int, typer.Option(min=1, help="Most requests that run at once.")]
MaxContext: TypeAlias = Annotated[
    int | None,
    typer.Option(min=1, help="Most tokens of a request; longer ones are rejected. Default: the longest."),
]
PrefillBudget: TypeAlias = Annotated[
    int, typer.Option(min=1, help="Prompt tokens per step (800 in 40 ms are 20,000 tokens/s).")
]
StepMs: TypeAlias = Annotated[
    float,
    typer.Option(help="Virtual time of a step in ms; each running request decodes one token in a step."),
]
SpeedUp: TypeAlias = Annotated[float, typer.Option(help="Factor by which requests arrive faster.")]
KV: TypeAlias = Annotated[
    bool,
    typer.Option("--kv/--no-kv", help="Store K and V and check every byte; or run the bookkeeping only."),
]
NeedSort: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--need-sort/--no-need-sort", help="Hand out the lowest slots first; or first in, first out."
    ),
]
PrefixCache: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--prefix-cache/--no-prefix-cache",
        help="Keep prompts and answers in a prefix cache, and find what requests have in common.",
    ),
]
Policy: TypeAlias = Annotated[
    str,
    typer.Option(
        help="What the prefix cache evicts first: lru, fifo, lfu, slru, priority or adaptive. With "
        "--capacity several, separated by commas, also belady (which sees the requests to come), or all."
    ),
]
Capacity: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="With --no-kv and --prefix-cache: measure what share of the prompts' blocks the cache alone "
        "finds at this size in tokens, request after request, without a clock and without outputs. "
        "Several sizes are separated by commas: 500K,1M,8.2M."
    ),
]
Json: TypeAlias = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
Plot: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        help="Write a plot to this file: occupancy over time and latencies of calls; with --capacity the "
        "hit rates."
    ),
]
Progress: TypeAlias = Annotated[
    bool | None,
    typer.Option(
        "--progress/--quiet", help="Progress bar on stderr. Default: on a terminal, without --json."
    ),
]
