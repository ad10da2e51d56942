"""What SGLang's prefix cache over kvpool's tree core finds of the prompts of a trace, by order of eviction.

`make bench-sglang-eviction` runs it with Mooncake's conversation trace; any trace that names the blocks of
its prompts will do. Each prompt is matched, locked, inserted in the chunks in which SGLang computes it, and
unlocked, one after the other, through SGLang's cache: what is found depends on the order of eviction alone.
With `--agents` the prompts are of agents of `kvpool replay`, who also say of which session a request is a
turn and what follows it. A block of the trace is one of 16 tokens there, and all sizes are a 32nd of those
of the trace. Without, the same calls are timed with both orders, for prompts that are new and evict as many
tokens.

With `--load` requests wait, in SGLang's scheduler. They come at the times of the trace, faster or slower, on
a clock that goes on by the seconds that prefill takes: `--load 1.1` is a machine that would need 1.1 times
the time of the trace without a cache. Blocks and sizes are as for agents, in pages of 16 tokens.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
from array import array
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import numpy as np
from bench_sglang_engine import CONFIG, ENGINE, Loop, request
from harness import machine
from rich.console import Console
from rich.table import Table
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
from trace_turns import said
from tree_worth import make_cache, serve

from kvpool.integrations.sglang import register_tree_core
from kvpool.integrations.sglang.tree_policy import EVICTION
from kvpool.integrations.turns import parse
from kvpool.tools.costs import COSTS
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


class Waits(NamedTuple):
    """Tokens of all prompts that were found, and times to the first token in seconds."""

    tokens: int
    p50: float
    p99: float


class Queue(Loop):
    """A scheduler whose requests come when they do, on a clock of the seconds that prefill takes."""

    def serve(self, prompts: list[array[int]], arrivals: list[float], scale: int) -> Waits:
        """Serves all prompts. A token of theirs is `scale` of the model."""
        self._prompts, self._arrivals, self._scale = prompts, arrivals, scale
        self._now, self._taken, self._found = 0.0, 0, 0
        self._begun: set[str] = set()
        self._waits = np.zeros(len(prompts))
        self.scheduler.gracefully_exit = False
        self.scheduler.run_event_loop()
        self._check()
        return Waits(self._found, *np.percentile(self._waits, (50, 99)).tolist())

    def _take(self, **_: object) -> list[Any]:
        begin = self._taken
        while self._taken < len(self._prompts) and self._arrivals[self._taken] <= self._now:
            self._taken += 1
        return [request(str(at), self._prompts[at], 1) for at in range(begin, self._taken)]

    def _forward(self, batch: Any, **_: object) -> Any:  # noqa: ANN401
        seconds = COSTS["8B"].seconds
        for req, found, new in zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True):
            self._now += seconds(self._scale * (found + new)) - seconds(self._scale * found)
            # Later chunks find what the earlier ones have computed.
            self._found += 0 if req.rid in self._begun else found
            self._begun.add(req.rid)
        return self._result(next_token_ids=self._tokens[: len(batch.reqs)])

    def _answer(self, answer: Any, *_: object) -> None:  # noqa: ANN401
        for name in map(int, answer.rids):
            self._waits[name] = self._now - self._arrivals[name]

    def _stop(self) -> None:
        if self._taken < len(self._prompts):
            self._now = max(self._now, self._arrivals[self._taken])
        else:
            self.scheduler.gracefully_exit = True


def queued(trace: Trace, size: int, order: str, load: float, *, shares_runtime: bool) -> Waits:
    """What is found of prompts that wait, and how long they do.

    `order` is lru, adaptive, or adaptive-queue, whose tree is not told of waiting requests.
    """
    scale = trace.block_size // BLOCK
    size = size // scale // BLOCK * BLOCK
    # Of prompts that are longer than the cache, what fits; SGLang computes the last token whatever it finds.
    prompts = [prompt[: size - 2 * BLOCK] + array("q", [4]) for prompt in prompts_of(trace, BLOCK, BLOCK)]
    seconds = sum(float(COSTS["8B"].seconds(scale * len(prompt))) for prompt in prompts)
    arrivals = trace.arrival_s * (seconds / load / trace.arrival_s[-1])
    os.environ.pop(EVICTION, None)
    if order != "lru":
        os.environ[EVICTION] = "adaptive"
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG), "utf-8")
        changed = {
            "max_total_tokens": size,
            "page_size": BLOCK,
            "chunked_prefill_size": CHUNK // scale,
            "radix_cache_backend": "kvpool",
            "disable_overlap_schedule": True,
        }
        options = ServerArgs(model_path=folder, **{**ENGINE, **changed})
        context = import_module("sglang.srt.runtime_context")
        ranks = context.SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0)
        context.publish(options, role="scheduler", ranks=ranks)
        loop = Queue(options, shares_runtime=shares_runtime)
    waiting = loop.scheduler.tree_cache.tree_core.waiting
    with mock.patch.object(waiting, "tell") if order.endswith("-queue") else nullcontext():
        return loop.serve(prompts, arrivals.tolist(), scale)


def found_in_queue(trace: Trace, sizes: list[int], load: float, orders: list[str], about: str) -> Table:
    """What is found of prompts that wait, by size and order."""
    # The plugin looks at it once, and each cache when it is made.
    os.environ[EVICTION] = "adaptive"
    import_module("sglang.srt.plugins").load_plugins()
    whole = sum(map(len, trace.all_blocks())) * BLOCK
    table = Table(title=f"{trace.name}, found by SGLang's scheduler, load {load}; {about}")
    for title in ("million tokens", "order", "found", "first token, p50", "p99"):
        table.add_column(title, justify="right")
    for size in sizes:
        for order in orders:
            found = queued(trace, size, order, load, shares_runtime=table.row_count > 0)
            table.add_row(
                f"{size / 1e6:g}",
                order,
                f"{found.tokens / whole:.2%}",
                f"{found.p50:.1f} s",
                f"{found.p99:.0f} s",
            )
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
    parser.add_argument("--load", type=float, help="requests wait: the load of a machine without a cache")
    parser.add_argument("--orders", default="lru,adaptive-queue,adaptive", help="those of --load")
    asked = parser.parse_args()
    if (asked.trace is None) == (asked.agents is None):
        parser.error("name a trace or --agents")
    about = "; ".join(f"{key}: {value}" for key, value in machine().items())
    sizes = [int(float(capacity) * 1e6) for capacity in asked.capacity.split(",")]
    trace = agents_trace(parse_agents(asked.agents), asked.seed) if asked.agents else None
    if asked.load:
        trace = trace or read_trace(asked.trace)
        Console().print(found_in_queue(trace, sizes, asked.load, asked.orders.split(","), about))
        return
    set_global_server_args_for_scheduler(ServerArgs(model_path="dummy"))
    register_tree_core()
    if trace is not None:
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
