"""What SGLang's prefix cache over kvpool's tree core finds of the prompts of a trace, by order of eviction.

`make bench-sglang-eviction` runs it with Mooncake's conversation trace; any trace that names the blocks of
its prompts will do. Each prompt is matched, locked, inserted in the chunks in which SGLang computes it, and
unlocked, one after the other, through SGLang's cache: what is found depends on the order of eviction alone.
Then the same calls are timed with both orders, for prompts that are new and evict as many tokens.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from array import array
from pathlib import Path

from harness import machine
from rich.console import Console
from rich.table import Table
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
from tree_worth import make_cache, serve

from kvpool.integrations.sglang import register_tree_core
from kvpool.tools.traces import Trace, read_trace

CHUNK = 8192
"""Tokens of a prompt that SGLang computes at once."""

NEW = (64, 1024, 8192)
"""Tokens of the new prompts that are timed."""


def prompt_of(trace: Trace, number: int, page: int) -> array[int]:
    """The tokens of a prompt, in whole pages: the same for blocks with the same number, and for no others."""
    tokens, size = array("q"), trace.block_size
    for block in trace.blocks[number].tolist():
        tokens.extend(range(block * size, block * size + size))
    length = int(trace.input_lens[number])
    return tokens[: length // page * page]


def found_by(trace: Trace, size: int, page: int, order: str) -> tuple[int, float]:
    """The tokens of all prompts that were found, and the seconds of the run."""
    cache, found = make_cache(size // page * page, page, order), 0
    begun = time.perf_counter()
    for number in range(len(trace.blocks)):
        found += serve(cache, prompt_of(trace, number, page), CHUNK)
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


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--capacity", default="0.5,1,2,4.1", help="sizes of the cache, in million tokens")
    parser.add_argument("--page", type=int, default=1, help="tokens of a page")
    parser.add_argument("--rounds", type=int, default=500)
    asked = parser.parse_args()
    set_global_server_args_for_scheduler(ServerArgs(model_path="dummy"))
    register_tree_core()
    about = "; ".join(f"{key}: {value}" for key, value in machine().items())
    if asked.trace.exists():
        trace = read_trace(asked.trace)
        whole = int(trace.input_lens.sum())
        table = Table(title=f"{trace.name}, found by SGLang's cache, pages of {asked.page}; {about}")
        for title in ("million tokens", "order", "found", "of lru's", "seconds"):
            table.add_column(title, justify="right")
        for capacity in map(float, asked.capacity.split(",")):
            recent = 0
            for order in ("lru", "adaptive"):
                found, took = found_by(trace, int(capacity * 1e6), asked.page, order)
                recent = recent or found
                table.add_row(
                    f"{capacity:g}", order, f"{found / whole:.1%}", f"{found / recent:.2f}", f"{took:.0f}"
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
