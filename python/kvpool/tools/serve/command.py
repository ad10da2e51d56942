"""The command `kvpool serve`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, cast

import typer
from rich.console import Console

from kvpool.errors import KvPoolError
from kvpool.tools.devices import check_device
from kvpool.tools.needs import CLUSTER, COMMANDS
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
    prefill: Annotated[
        int, typer.Option(min=0, help="Workers for prompts. Alone, they are started on this machine.")
    ] = 0,
    decode: Annotated[int, typer.Option(min=0, help="Workers for what follows.")] = 0,
    role: Annotated[str, typer.Option(help="Be one process of a cluster: router, prefill or decode.")] = "",
    listen: Annotated[str, typer.Option(help="Where the router listens.")] = "127.0.0.1:0",
    router: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where a worker finds the router.")] = "",
    name: Annotated[str, typer.Option(help="Of a worker. Default: its role and process.")] = "",
    secret_file: Annotated[
        str, typer.Option(help="Has the secret of the cluster. Default: KVPOOL_SECRET_FILE or KVPOOL_SECRET.")
    ] = "",
    allow_remote: Annotated[
        bool, typer.Option("--allow-remote", help="Other machines are part of the cluster.")
    ] = False,
    host: Annotated[str, typer.Option(help="Address at which a worker publishes events.")] = "127.0.0.1",
    network: Annotated[
        str, typer.Option(help="Network devices of a worker for rows, as UCX has them.")
    ] = "lo",
    until_stdin_ends: Annotated[bool, typer.Option("--until-stdin-ends", hidden=True)] = False,
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

    With --prefill and --decode, workers compute prompts and others generate, as processes of their own; with
    --role each of them is started by hand, on any machine.
    """
    need("serve", *COMMANDS["serve"].needs, *(CLUSTER if prefill or decode or role else ()))
    from kvpool.tools.serve import report, service  # noqa: PLC0415 - transformers loads slowly

    if model not in service.CONFIGS:
        fail(f"--model is {model!r}; it must be one of {', '.join(service.CONFIGS)}")
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
        if role != "router":  # which has no pools
            check_device(config.device)
        if prefill or decode or role:
            from kvpool.tools.serve import cluster, cluster_report  # noqa: PLC0415

            options = cluster.Options(
                role=role,
                prefill=prefill,
                decode=decode,
                listen=listen,
                router=router,
                name=name,
                secret_file=secret_file,
                allow_remote=allow_remote,
                host=host,
                network=network,
            )
            if role in {"prefill", "decode"}:
                cluster.work(config, options, until_stdin_ends=until_stdin_ends)
                return
            result = cluster_report.run(config, options, console)
        else:
            result = report.run(config, console)
    except (KvPoolError, MemoryError) as error:
        fail(f"{type(error).__name__}: {error}")
    if as_json_object:
        typer.echo(json.dumps(report.as_json(result)))
    if not result.is_right:
        raise typer.Exit(1)
