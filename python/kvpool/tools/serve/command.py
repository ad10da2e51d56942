"""The command `kvpool serve`."""

import json

import typer
from rich.console import Console

from kvpool.errors import ConfigError, KvPoolError
from kvpool.integrations.versions import TRANSFORMERS
from kvpool.tools.devices import check_device
from kvpool.tools.needs import COMMANDS, remedy
from kvpool.tools.output import fail, need, refuse, refuse_unused, waiting
from kvpool.tools.serve import parameters


def serve(  # noqa: PLR0913 - one parameter per option
    called: typer.Context,
    *,
    model: parameters.Model = "qwen3",
    requests: parameters.Requests = 300,
    conversations: parameters.Conversations = 0,
    per_step: parameters.PerStep = 8,
    pool_size: parameters.PoolSize = 1024,
    page_size: parameters.PageSize = 1,
    host_tokens: parameters.HostTokens = 0,
    store: parameters.Store = "",
    store_mib: parameters.StoreMib = 1024,
    swap: parameters.Swap = "auto",
    prefill_budget: parameters.PrefillBudget = 256,
    device: parameters.Device = None,
    seed: parameters.Seed = 0,
    as_json_object: parameters.Json = False,
) -> None:
    """Serve a small model through the pools, and check every request against the model alone.

    Streams a few requests, serves a burst of them with continuous batching in a pool that is too small for
    all, and generates each again with the model alone. With --conversations, serves users instead who share a
    system prompt and whose turns repeat the earlier ones: with the prefix cache and without it. With
    --host-tokens, what the cache evicts comes back from host memory, and with --store as well what an earlier
    run has computed, however that ended. Exits with status 1 if one token differs or one slot is missing at
    the end.
    """
    if not store:
        refuse_unused(called, ("store_mib",), "--store")
    need("serve", *COMMANDS["serve"].needs)
    _check_transformers()
    with waiting("loading PyTorch and transformers"):
        from kvpool.serving.swap import swap_mode  # noqa: PLC0415 - PyTorch and transformers load slowly
        from kvpool.tools.serve import report, service  # noqa: PLC0415

    if model not in service.CONFIGS:
        refuse(f"--model is {model!r}; it must be one of {', '.join(service.CONFIGS)}")
    console = Console(quiet=as_json_object)
    try:
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
            swap=swap_mode(swap),
            prefill_budget=prefill_budget,
            device=device or service.default_device(),
            seed=seed,
        )
        check_device(config.device)
        result = report.run(config, console)
    except ConfigError as error:
        refuse(str(error))
    except (KvPoolError, MemoryError) as error:
        fail(f"{type(error).__name__}: {error}")
    if as_json_object:
        typer.echo(json.dumps(report.as_json(result)))
    if not result.is_right:
        raise typer.Exit(1)


def _check_transformers() -> None:
    """Exit if the installed version cannot be used, in the words of `kvpool doctor`."""
    problem = TRANSFORMERS.why_not()
    if problem:
        fail(f"serve: {problem}: {remedy(COMMANDS['serve'].needs)}")
