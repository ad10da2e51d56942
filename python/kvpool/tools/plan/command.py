"""The command `kvpool plan`."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvpool.errors import ConfigError
from kvpool.models.model_config import read_model
from kvpool.tools.costs import COLUMNS, read_cost
from kvpool.tools.needs import COMMAND_LINE
from kvpool.tools.options import Parser, at_least
from kvpool.tools.output import fail, need, refuse
from kvpool.tools.plan.arena import make_arena_plan
from kvpool.tools.plan.solver import MLA_FORMS, PAGE_SIZE, STEP_TOKENS, PlanConfig, make_plan, needs_arena
from kvpool.tools.units import parse_bytes

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from kvpool.tools.plan.arena import ArenaPlan
    from kvpool.tools.plan.solver import Plan

DESCRIPTION = """\
Compute how many tokens and requests of a model fit into memory, and print the
layout of what it keeps, an arena for it beside what engines do with the same
memory, and the pools.

Reads config.json only, and needs neither PyTorch nor transformers nor a GPU.
All memory of the pools on the device is counted: the printed constructors fit
the memory, and one more page would not. An unknown model is refused, or
attention in every layer is assumed; the notes say so."""


def add_model_options(parser: ArgumentParser) -> None:
    """Add the options of a model and its memory, which other programs have as well."""
    add, count = parser.add_argument, at_least(1)
    add("config", type=Path, metavar="CONFIG", help="a model's Hugging Face config.json, or its folder")
    add(
        "--memory",
        required=True,
        metavar="SIZE",
        help="memory of each GPU for the pools: 80GiB, 80GB or bytes",
    )
    add(
        "--reserve",
        default="0",
        metavar="SIZE",
        help="the part of --memory for weights and graphs (default: 0)",
    )
    add("--tp", type=count, default=1, metavar="N", help="GPUs that share each layer (default: 1)")
    add(
        "--dtype",
        metavar="DTYPE",
        help="data type of K and V, such as bf16 or fp8_e4m3fn (default: the model's)",
    )
    add("--context", type=count, metavar="N", help="the most tokens of a request (default: the model's)")
    add("--mean-context", type=count, metavar="N", help="mean tokens of a request (default: --context)")
    add(
        "--page-size",
        type=count,
        default=PAGE_SIZE,
        metavar="N",
        help=f"slots per page (default: {PAGE_SIZE})",
    )
    add("--max-requests", type=count, metavar="N", help="the most requests at once (default: as many as fit)")
    add(
        "--step-tokens",
        type=count,
        default=STEP_TOKENS,
        metavar="N",
        help=f"the most new tokens in a step (default: {STEP_TOKENS})",
    )
    add(
        "--host-tier", action="store_true", help="count the staging area of a HostTier (KVPOOL_STAGING_BYTES)"
    )
    add(
        "--mla",
        default="latent",
        metavar="FORM",
        help=f"storage of latent attention: {', '.join(MLA_FORMS)} (default: latent)",
    )
    add(
        "--state-dtype",
        default="float32",
        metavar="DTYPE",
        help="data type of recurrent states in an arena (default: float32)",
    )
    add("--json", action="store_true", help="print one JSON object instead of tables")


def model_options(options: Namespace, device: str) -> PlanConfig:
    """Return the configuration that these options make.

    Raises:
        ConfigError: If an option is wrong.
    """
    return PlanConfig(
        memory_bytes=parse_bytes(options.memory),
        reserve_bytes=parse_bytes(options.reserve),
        tp=options.tp,
        dtype=options.dtype,
        context_len=options.context,
        mean_context=options.mean_context,
        page_size=options.page_size,
        max_requests=options.max_requests,
        step_tokens=options.step_tokens,
        host_tier=options.host_tier,
        state_dtype=options.state_dtype,
        mla=options.mla,
        device=device,
    )


def make_parser() -> Parser:
    """Return the parser of its options."""
    parser = Parser("kvpool plan", DESCRIPTION)
    add_model_options(parser)
    parser.add_argument("--device", default="cuda", help="device of the pools (default: cuda)")
    prefills = f"fit the cost of a PrefixCache to measured prefills: CSV with {', '.join(COLUMNS)}"
    parser.add_argument("--prefills", type=Path, metavar="FILE", help=prefills)
    return parser


def run(options: Namespace) -> int:
    """Run the command, and return its exit status."""
    if not options.json:
        need("plan without --json", *COMMAND_LINE)
    try:
        config = model_options(options, options.device)
    except ConfigError as error:
        refuse(str(error))
    try:
        cost = None if options.prefills is None else read_cost(options.prefills)
        pools, arena = _plans(options.config, config)
    except (ConfigError, OSError) as error:
        fail(str(error))
    if options.json:
        found = {} if pools is None else pools.as_json()
        fitted = {} if cost is None else {"prefill_cost": asdict(cost)}
        sys.stdout.write(json.dumps({**found, "arena": arena and arena.as_json(), **fitted}) + "\n")
        return 0
    from kvpool.tools.plan.report import print_arena, print_plan  # noqa: PLC0415 - of an extra

    if arena is not None:
        print_arena(arena)
    if pools is not None:
        print_plan(pools)
    if cost is not None:
        sys.stdout.write(f"cost = kvpool.{cost!r}  # of PrefixCache and ArenaPrefixCache\n")
    return 0


def _plans(path: Path, config: PlanConfig) -> tuple[Plan | None, ArenaPlan | None]:
    """Return the pools and the arena of a model: one of them, if the other has no room or no place for it."""
    model = read_model(path)
    if needs_arena(model) is not None:
        return None, make_arena_plan(model, config)
    pools = make_plan(model, config)
    try:
        return pools, make_arena_plan(model, config)
    except ConfigError as error:
        return replace(pools, notes=(*pools.notes, f"no arena: {error}")), None
