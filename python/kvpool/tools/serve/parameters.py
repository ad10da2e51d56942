"""The parameters of `kvpool serve`: the type of each, its limits, and what the help says of it."""

from typing import Annotated, TypeAlias

import typer

# Of the load, the pools, and what is below them.

Model: TypeAlias = Annotated[
    str, typer.Option(help="A small model with random weights: qwen3, llama or qwen3-next.")
]
Requests: TypeAlias = Annotated[int, typer.Option(min=1, help="Requests of the burst.")]
Conversations: TypeAlias = Annotated[
    int, typer.Option(min=0, help="In place of the burst: users with a conversation of several turns.")
]
PerStep: TypeAlias = Annotated[int, typer.Option(min=1, help="Requests or users that arrive in each step.")]
PoolSize: TypeAlias = Annotated[int, typer.Option(min=1, help="Token slots.")]
PageSize: TypeAlias = Annotated[int, typer.Option(min=1, help="Slots per page.")]
HostTokens: TypeAlias = Annotated[
    int, typer.Option(min=0, help="Tokens of host memory below the prefix cache; 0 for none.")
]
Store: TypeAlias = Annotated[
    str,
    typer.Option(
        metavar="DIRECTORY",
        help="Keep pages in files there, below host memory: a later run with the same model finds them.",
    ),
]
StoreMib: TypeAlias = Annotated[int, typer.Option(min=1, help="The most MiB of these files.")]
Swap: TypeAlias = Annotated[
    str, typer.Option(help="What happens to evicted prefixes there: auto, load or compute.")
]
PrefillBudget: TypeAlias = Annotated[int, typer.Option(min=1, help="New tokens per step.")]
Device: TypeAlias = Annotated[
    str | None, typer.Option(help="In PyTorch's notation. Default: a GPU if there is one.")
]
Seed: TypeAlias = Annotated[int, typer.Option(min=0, help="Seed of weights and requests.")]
Json: TypeAlias = Annotated[bool, typer.Option("--json", help="Print one JSON object, and stream nothing.")]
