"""The command `kvpool serve`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, cast

import typer
from rich.console import Console

from kvpool.errors import KvPoolError
from kvpool.tools.output import fail, need

if TYPE_CHECKING:
    from kvpool.serving.swap import SwapMode


def serve(  # noqa: PLR0913 - one parameter per option
    *,
    model: Annotated[
        str, typer.Option(help="A small model with random weights: qwen3, llama or qwen3-next.")
    ] = "qwen3",
    requests: Annotated[int, typer.Option(min=1, help="Requests of the burst.")] = 300,
    conversations: Annotated[
        int, typer.Option(min=0, help="In place of the burst: users with a conversation of several turns.")
    ] = 0,
    per_step: Annotated[int, typer.Option(min=1, help="Requests or users that arrive in each step.")] = 8,
    pool_size: Annotated[int, typer.Option(min=1, help="Token slots.")] = 1024,
    page_size: Annotated[int, typer.Option(min=1, help="Slots per page.")] = 1,
    host_tokens: Annotated[
        int, typer.Option(min=0, help="Tokens of host memory below the prefix cache; 0 for none.")
    ] = 0,
    store: Annotated[
        str,
        typer.Option(
            metavar="DIRECTORY",
            help="Keep pages in files there, below host memory: a later run with the same model finds them.",
        ),
    ] = "",
    store_mib: Annotated[int, typer.Option(min=1, help="The most MiB of these files.")] = 1024,
    swap: Annotated[
        str, typer.Option(help="What happens to evicted prefixes there: auto, load or compute.")
    ] = "auto",
    prefill_budget: Annotated[int, typer.Option(min=1, help="New tokens per step.")] = 256,
    device: Annotated[
        str | None, typer.Option(help="In PyTorch's notation. Default: a GPU if there is one.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights and requests.")] = 0,
    as_json_object: Annotated[
        bool, typer.Option("--json", help="Print one JSON object, and stream nothing.")
    ] = False,
) -> None:
    """Serve a small model through the pools, and check every request against the model alone.

    Streams a few requests, serves a burst of them with continuous batching in a pool that is too small for
    all, and generates each again with the model alone. With --conversations, serves users instead who share a
    system prompt and whose turns repeat the earlier ones: with the prefix cache and without it. With
    --host-tokens, what the cache evicts comes back from host memory, and with --store as well what an earlier
    run has computed, however that ended. Exits with status 1 if one token differs or one slot is missing at
    the end.
    """
    need("transformers", "numpy", "torch", "transformers")
    from kvpool.tools.serve import report, service  # noqa: PLC0415 - transformers loads slowly

    if model not in service.CONFIGS:
        fail(f"--model: {model!r} is none of {', '.join(service.CONFIGS)}")
    config = service.ServeConfig(
        model=model,
        requests=requests,
        conversations=conversations,
        per_step=per_step,
        pool_size=pool_size,
        page_size=page_size,
        host_tokens=host_tokens,
        store=store,
        store_mib=store_mib,
        swap=cast("SwapMode", swap),
        prefill_budget=prefill_budget,
        device=device or service.default_device(),
        seed=seed,
    )
    console = Console(quiet=as_json_object)
    try:
        result = report.run(config, console)
    except (KvPoolError, MemoryError) as error:
        fail(f"{type(error).__name__}: {error}")
    if as_json_object:
        typer.echo(json.dumps(report.as_json(result)))
    if not result.is_right:
        raise typer.Exit(1)
