"""A plan as tables."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from kvpool.tools.output import WIDTH, exact_bytes_text
from kvpool.tools.plan.engines import LEAST_TOKENS, REQUEST_TOKENS
from kvpool.tools.plan.pool_bytes import row_bytes

if TYPE_CHECKING:
    from kvpool.tools.plan.arena import ArenaPlan
    from kvpool.tools.plan.solver import Plan


def print_arena(plan: ArenaPlan) -> None:
    """Print the layout of a model, and what an arena and other ways hold."""
    console = Console(width=WIDTH)
    console.print(_layout(plan))
    console.print(_usages(plan))
    for note in plan.notes:
        table = Table.grid(padding=(0, 1))
        table.add_row("*", Text(note))
        console.print(table, highlight=False)


def _layout(plan: ArenaPlan) -> Table:
    """Return a row for each group."""
    layout = plan.layout
    table = Table(
        title=f"Layout of {escape(layout.model)}, pages of {layout.page_size}", title_justify="left"
    )
    for name in ("group", "kind", "planes of an entry"):
        table.add_column(name)
    for name in ("layers", "bytes, all layers", "in a slab"):
        table.add_column(name, justify="right")
    for group in layout.groups:
        kind = group.kind if group.tokens is None else f"{group.kind} of {group.tokens:,}"
        if group.stride > 1:
            kind += f", 1 for {group.stride} tokens"
        each = " of a layer" if plan.slabs.by_layer(group.name) else ""
        aliases = f" + {len(group.aliases)} aliases" if group.aliases else ""
        table.add_row(
            group.name,
            kind,
            Text(
                "\n".join(
                    f"{plane.name} {list(plane.shape)}: {plane.entry_bytes:,} B" for plane in group.planes
                )
            ),
            f"{len(group.layers)}{aliases}",
            f"{len(group.layers) * group.entry_bytes:,}",
            f"{plan.slabs.units(group.name):,}{each}",
        )
    return table


def _usages(plan: ArenaPlan) -> Table:
    """Return a row for each way to lay out the memory."""
    slabs = plan.slabs
    table = Table(
        title=f"The same memory: {slabs.num_slabs:,} slabs of {slabs.slab_bytes:,} B, or other ways",
        title_justify="left",
    )
    table.add_column("way")
    table.add_column("lost", justify="right")
    table.add_column(f"{LEAST_TOKENS} tokens", justify="right")
    for tokens in REQUEST_TOKENS:
        table.add_column(f"{tokens:,} tokens", justify="right")
    for usage in plan.usages:
        table.add_row(
            usage.name,
            f"{100 * usage.lost:.2f} %",
            f"{usage.least_bytes / plan.least_bytes:.2f}x of need",
            *(f"{usage.requests[tokens]:,} at once" for tokens in REQUEST_TOKENS),
        )
    return table


def print_plan(plan: Plan) -> None:
    """Print the sizes, the memory, the notes and the constructors."""
    console = Console(width=WIDTH)
    console.print(_summary(plan))
    console.print(_memory(plan))
    for note in plan.notes:
        table = Table.grid(padding=(0, 1))
        table.add_row("*", Text(note))
        console.print(table, highlight=False)
    if plan.notes:
        sys.stdout.write("\n")
    sys.stdout.write(f"{plan.code()}\n")


def _summary(plan: Plan) -> Table:
    model, shapes, tp = plan.model, plan.shapes, plan.config.tp
    table = Table(title=f"Plan for {escape(model.model_type)}", show_header=False, title_justify="left")
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("layers", _layers_text(plan))
    each = "each GPU" if plan.shapes.device != "cpu" else "each process"
    if tp > 1:
        table.add_row("tensor parallel", f"{tp}; everything below is for {each}")
    budget = exact_bytes_text(plan.config.budget_bytes)
    if plan.config.reserve_bytes:
        budget += f", {plan.config.reserve_bytes:,} B of {plan.config.memory_bytes:,} B are reserved"
    table.add_row("memory for the pools", budget)
    table.add_row("K and V of a token", Text(f"{exact_bytes_text(shapes.token_bytes)}: {_token_text(plan)}"))
    if tp > 1:
        table.add_row(f"  on {tp} GPUs together", exact_bytes_text(shapes.token_bytes * tp))
    for name, token_bytes in plan.mla_token_bytes.items():
        if name != plan.config.mla:
            table.add_row(f"  with --mla {name}", exact_bytes_text(token_bytes))
    if shapes.states is not None:
        table.add_row(
            "states of a request",
            f"{exact_bytes_text(shapes.recurrent_bytes + shapes.conv_bytes)}: {shapes.recurrent_bytes:,} B "
            f"recurrent (float32) + {shapes.conv_bytes:,} B convolution ({plan.conv_dtype})",
        )
    pages = plan.size // shapes.page_size
    table.add_row("token slots", f"{plan.size:,}, in {pages:,} pages of {shapes.page_size}")
    table.add_row("requests at once", f"{plan.max_reqs:,}")
    table.add_row(f"  of {plan.context_len:,} tokens", f"{plan.full_requests:,}")
    mean = plan.config.mean_context
    if mean is not None and mean != plan.context_len:
        table.add_row(f"  of {mean:,} tokens", f"{plan.mean_requests:,}")
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
        k_bytes, v_bytes = row_bytes(group, plan.dtype)
        texts.append(
            f"{len(group.layers)} layers x (K {k_bytes:,} B [{group.k_head_num}, {group.k_head_dim}] + "
            f"V {v_bytes:,} B [{group.v_head_num}, {group.v_head_dim}])"
        )
    return f"{' + '.join(texts)}, {plan.dtype}"


def _memory(plan: Plan) -> Table:
    found = plan.footprint
    table = Table(title="Memory", title_justify="left")
    table.add_column("part")
    table.add_column("bytes", justify="right", no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    rows = (
        ("KVPool", found.kv_bytes),
        ("GDNPool", found.states_bytes),
        ("ReqToTokenPool: the table", found.table_bytes),
        ("TokenToKVPoolAllocator: the stage", found.allocator_bytes),
        ("BatchPlanner: fields of a plan", found.planner_bytes),
        ("HostTier: the staging area", found.staging_bytes),
        ("transfer buffers", found.transfer_bytes),
        ("left", plan.spare_bytes),
    )
    for name, count in rows:
        if count:
            table.add_row(name, f"{count:,}", f"{100 * count / plan.config.budget_bytes:.2f} %")
    return table
