"""What SGLang's prefix cache over kvpool's tree core finds of the prompts of a trace, by order of eviction.

`make bench-sglang-eviction` runs it with Mooncake's conversation trace; any trace that names the blocks of
its prompts will do. Each prompt is matched, locked, inserted in the chunks in which SGLang computes it, and
unlocked, one after the other, through SGLang's cache: what is found depends on the order of eviction alone.
With `--agents` the prompts are of agents of `kvpool replay`, who also say of which session a request is a
turn and what follows it. A block of the trace is one of 16 tokens there, and all sizes are a 32nd of those
of the trace. Without, the same calls are timed with both orders, for prompts that are new and evict as many
tokens.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from array import array
from pathlib import Path
from typing import TYPE_CHECKING

from harness import machine
from rich.console import Console
from rich.table import Table
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
from trace_turns import said
from tree_worth import make_cache, serve

from kvpool.integrations.sglang import register_tree_core
from kvpool.integrations.turns import parse
from kvpool.tools.policies import WITH_SESSIONS
from kvpool.tools.replay.hit_rates import Job, measure
from kvpool.tools.traces import Trace, read_trace
from kvpool.tools.traces.agents import agents_trace, parse_agents

if TYPE_CHECKING:
    from collections.abc import Iterator

BLOCK = 16
"""Tokens of a block of agents' prompts."""

CHUNK = 8192
"""Tokens of a prompt that SGLang computes at once."""

NEW = (64, 1024, 8192)
"""Tokens of the new prompts that are timed."""


def prompts_of(trace: Trace, page: int, block_tokens: int) -> Iterator[array[int]]:
    """The tokens of each prompt, in whole pages: the same for blocks with the same number, for no others."""
    for blocks, tokens in zip(trace.all_blocks(), trace.input_lens.tolist(), strict=True):
        prompt = array("q")
        for block in blocks.tolist():
            prompt.extend(range(block * block_tokens, block * block_tokens + block_tokens))
        # Of the last block of agents the whole, as for a whole vLLM.
        length = tokens if block_tokens == trace.block_size else len(prompt)
        yield prompt[: length // page * page]


def found_by(trace: Trace, size: int, page: int, order: str, block_tokens: int) -> tuple[int, float]:
    """The tokens of all prompts that were found, and the seconds of the run.

    `order` is lru, adaptive, or adaptive+sessions, with what requests say.
    """
    size = size * block_tokens // trace.block_size // page * page
    cache, found, says = make_cache(size, page, order.removesuffix("+sessions")), 0, said(trace)
    chunk = CHUNK * block_tokens // trace.block_size
    begun = time.perf_counter()
    for prompt, arguments in zip(prompts_of(trace, page, block_tokens), says, strict=True):
        turn = parse(arguments or {}) if order == WITH_SESSIONS else None
        found += serve(cache, prompt[:size], chunk, turn)
    took = time.perf_counter() - begun
    cache.sanity_check()
    return found, took


def times(page: int, rounds: int) -> dict[int, dict[str, float]]:
    """Medians in microseconds of serving a new prompt that evicts as many, by its length and the order."""
    medians: dict[int, dict[str, float]] = {}
    for new in NEW:
        caches = {order: make_cache(64 * 8192, page, order) for order in ("lru", "adaptive")}
        spent: dict[str, list[float]] = {order: [] for order in caches}
        gc.disable()
        for turn in range(64 * 8192 // new + rounds):
            tokens = array("q", range(turn * new, turn * new + new))
            for order, cache in caches.items():
                begun = time.perf_counter()
                serve(cache, tokens, CHUNK)
                spent[order].append((time.perf_counter() - begun) * 1e6)
        gc.enable()
        # Once the cache is full.
        medians[new] = {order: statistics.median(each[-rounds:]) for order, each in spent.items()}
    return medians


def found_of_agents(trace: Trace, sizes: list[int], page: int, about: str) -> Table:
    """What is found of the prompts of agents, and the share of the way from lru to belady."""
    best = measure(trace, Job(["belady"], sizes))
    whole = sum(map(len, trace.all_blocks())) * BLOCK
    table = Table(title=f"{trace.name}, found by SGLang's cache, pages of {page}; {about}")
    for title in ("million tokens", "order", "found", "way to belady", "left to compute", "seconds"):
        table.add_column(title, justify="right")
    for size, rate in zip(sizes, best.rates, strict=True):
        recent, most = 0, rate.found_blocks * BLOCK
        for order in ("lru", "adaptive", WITH_SESSIONS):
            found, took = found_by(trace, size, page, order, BLOCK)
            recent = recent or found
            way, left = (found - recent) / (most - recent), (whole - found) / (whole - recent)
            table.add_row(
                f"{size / 1e6:g}", order, f"{found / whole:.2%}", f"{way:.0%}", f"{left:.0%}", f"{took:.0f}"
            )
        table.add_row(f"{size / 1e6:g}", "belady", f"{most / whole:.2%}", "100%", "", "")
    return table


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path, nargs="?")
    parser.add_argument("--agents", metavar="SPEC", help="agents of `kvpool replay` in the place of a trace")
    parser.add_argument("--seed", type=int, default=0, help="of the agents")
    parser.add_argument("--capacity", default="0.5,1,2,4.1", help="sizes of the cache, in million tokens")
    parser.add_argument("--page", type=int, default=1, help="tokens of a page")
    parser.add_argument("--rounds", type=int, default=500)
    asked = parser.parse_args()
    if (asked.trace is None) == (asked.agents is None):
        parser.error("name a trace or --agents")
    set_global_server_args_for_scheduler(ServerArgs(model_path="dummy"))
    register_tree_core()
    about = "; ".join(f"{key}: {value}" for key, value in machine().items())
    sizes = [int(float(capacity) * 1e6) for capacity in asked.capacity.split(",")]
    if asked.agents:
        trace = agents_trace(parse_agents(asked.agents), asked.seed)
        Console().print(found_of_agents(trace, sizes, asked.page, about))
        return
    if asked.trace.exists():
        trace = read_trace(asked.trace)
        whole = int(trace.input_lens.sum())
        table = Table(title=f"{trace.name}, found by SGLang's cache, pages of {asked.page}; {about}")
        for title in ("million tokens", "order", "found", "of lru's", "seconds"):
            table.add_column(title, justify="right")
        for size in sizes:
            recent = 0
            for order in ("lru", "adaptive"):
                found, took = found_by(trace, size, asked.page, order, trace.block_size)
                recent = recent or found
                table.add_row(
                    f"{size / 1e6:g}", order, f"{found / whole:.1%}", f"{found / recent:.2f}", f"{took:.0f}"
                )
        Console().print(table)
    else:
        Console().print(f"{asked.trace} is not there: no prompts are looked up")
    table = Table(
        title=f"Serving a new prompt that evicts as many tokens, us, pages of {asked.page}; {about}"
    )
    for title in ("tokens", "lru", "adaptive", "ratio"):
        table.add_column(title, justify="right")
    for new, medians in times(asked.page, asked.rounds).items():
        own, learned = medians["lru"], medians["adaptive"]
        table.add_row(f"{new}", f"{own:.1f}", f"{learned:.1f}", f"{learned / own:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
