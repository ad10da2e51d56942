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

# Of a cluster.

Prefill: TypeAlias = Annotated[
    int, typer.Option(min=0, help="Workers for prompts. Alone, they are started on this machine.")
]
Decode: TypeAlias = Annotated[int, typer.Option(min=0, help="Workers for what follows.")]
Role: TypeAlias = Annotated[str, typer.Option(help="Be one process of a cluster: router, prefill or decode.")]
Listen: TypeAlias = Annotated[str, typer.Option(help="Where the router listens.")]
Router: TypeAlias = Annotated[str, typer.Option(metavar="HOST:PORT", help="Where a worker finds the router.")]
Name: TypeAlias = Annotated[str, typer.Option(help="Of a worker. Default: its role and process.")]
SecretFile: TypeAlias = Annotated[
    str, typer.Option(help="Has the secret of the cluster. Default: KVPOOL_SECRET_FILE or KVPOOL_SECRET.")
]
AllowRemote: TypeAlias = Annotated[
    bool, typer.Option("--allow-remote", help="Other machines are part of the cluster.")
]
Host: TypeAlias = Annotated[str, typer.Option(help="Address at which a worker publishes events.")]
Network: TypeAlias = Annotated[
    str, typer.Option(help="Network devices of a worker for rows, as UCX has them.")
]
JoinTimeout: TypeAlias = Annotated[
    float, typer.Option(min=0, metavar="SECONDS", help="How long a router waits for its workers to join.")
]
UntilStdinEnds: TypeAlias = Annotated[bool, typer.Option("--until-stdin-ends", hidden=True)]
