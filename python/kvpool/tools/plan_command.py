"""The command `kvpool plan`, and a plan as tables."""

from __future__ import annotations

import json
from pathlib import Path  # noqa: TC003 - typer looks at it
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from kvpool.errors import ConfigError
from kvpool.tools.model_config import read_model
from kvpool.tools.output import WIDTH, fail, size_text
from kvpool.tools.plan import (
    DTYPE_ALIASES,
    MLA_FORMS,
    PAGE_SIZE,
    STEP_TOKENS,
    PlanConfig,
    make_plan,
    parse_bytes,
)
from kvpool.tools.pool_bytes import ITEM_BYTES, row_bytes

if TYPE_CHECKING:
    from kvpool.tools.plan import Plan


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
            help=f"Of K and V: {', '.join((*ITEM_BYTES, *DTYPE_ALIASES))}. Default: the configuration's."
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


def print_plan(plan: Plan) -> None:
    """Prints what fits, what it takes, what to know about it, and the constructors."""
    console = Console(width=WIDTH)
    console.print(_summary(plan))
    console.print(_memory(plan))
    for note in plan.notes:
        table = Table.grid(padding=(0, 1))
        table.add_row("*", Text(note))
        console.print(table, highlight=False)
    if plan.notes:
        typer.echo()
    typer.echo(plan.code())


def _summary(plan: Plan) -> Table:
    model, shapes, tp = plan.model, plan.shapes, plan.config.tp
    table = Table(title=f"Plan for {escape(model.model_type)}", show_header=False, title_justify="left")
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("layers", _layers_text(plan))
    each = "each GPU" if plan.shapes.on_gpu else "each process"
    if tp > 1:
        table.add_row("tensor parallel", f"{tp}; all that follows is of {each}")
    budget = size_text(plan.config.budget_bytes)
    if plan.config.reserve_bytes:
        budget += f", {plan.config.reserve_bytes:,} B of {plan.config.memory_bytes:,} B are reserved"
    table.add_row("memory for the pools", budget)
    table.add_row("K and V of a token", Text(f"{size_text(shapes.token_bytes)}: {_token_text(plan)}"))
    if tp > 1:
        table.add_row(f"  on {tp} GPUs together", size_text(shapes.token_bytes * tp))
    for name, token_bytes in plan.mla_token_bytes.items():
        if name != plan.config.mla:
            table.add_row(f"  with --mla {name}", size_text(token_bytes))
    if shapes.states is not None:
        table.add_row(
            "states of a request",
            f"{size_text(shapes.recurrent_bytes + shapes.conv_bytes)}: {shapes.recurrent_bytes:,} B "
            f"recurrent (float32) + {shapes.conv_bytes:,} B convolution ({plan.conv_dtype})",
        )
    pages = plan.size // shapes.page_size
    table.add_row("token slots", f"{plan.size:,}, in {pages:,} pages of {shapes.page_size}")
    table.add_row("requests at once", f"{plan.max_reqs:,}")
    table.add_row(f"  of {plan.context_len:,} tokens", f"{plan.full_requests:,}")
    return table


def _layers_text(plan: Plan) -> str:
    model = plan.model
    attention = sum(len(group.layers) for group in plan.shapes.kv)
    kind = "latent attention" if model.mla is not None else "attention"
    parts = [f"{attention} with {kind}"]
    if model.windowed:
        parts.append(f"{len(model.windowed)} of them with a window of {model.window:,}")
    if model.states is not None:
        parts.append(f"{len(model.states.layers)} with {model.states.kind}")
    return f"{model.layer_num}: {', '.join(parts)}"


def _token_text(plan: Plan) -> str:
    texts = []
    for group in plan.shapes.kv:
        k_bytes, v_bytes = row_bytes(group, plan.shapes.kv_item_bytes)
        texts.append(
            f"{len(group.layers)} layers x (K {k_bytes:,} B [{group.k_head_num}, {group.k_head_dim}] + "
            f"V {v_bytes:,} B [{group.v_head_num}, {group.v_head_dim}])"
        )
    return f"{' + '.join(texts)}, {plan.dtype}"


def _memory(plan: Plan) -> Table:
    found = plan.footprint
    table = Table(title="Memory", title_justify="left")
    table.add_column("of")
    table.add_column("bytes", justify="right", no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    rows = (
        ("KVPool", found.kv_bytes),
        ("GDNPool", found.states_bytes),
        ("ReqToTokenPool: the table", found.table_bytes),
        ("TokenToKVPoolAllocator: the stage", found.allocator_bytes),
        ("BatchPlanner: fields of a plan", found.planner_bytes),
        ("numbers on their way to the device", found.transfer_bytes),
        ("left", plan.spare_bytes),
    )
    for name, count in rows:
        if count:
            table.add_row(name, f"{count:,}", f"{100 * count / plan.config.budget_bytes:.2f} %")
    return table
