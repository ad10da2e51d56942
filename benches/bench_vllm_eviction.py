"""What a whole vLLM finds of the prompts of a trace, by its own order of eviction and by kvpool's policies.

`make bench-vllm-eviction` runs it with Mooncake's conversation trace, and with agents of `kvpool replay`, who
also say of which session a request is a turn and what follows it; any trace that names the blocks of its
prompts will do. A block of the trace is one of 16 tokens here, so that all sizes are a 32nd of those of the
trace. The model takes no time, and prompts come one after the other: what is found depends on the order of
eviction alone.

With `--load` requests wait. They come at the times of the trace, faster or slower, on a clock that goes on by
the seconds that prefill takes: `--load 1.1` is a machine that would need 1.1 times the time of the trace
without a cache. vLLM computes chunks of 8,192 tokens of the trace.
"""

from __future__ import annotations

import argparse
import os
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import numpy as np
from harness import machine
from nano_models import make
from rich.console import Console
from rich.table import Table
from trace_turns import said
from vllm.sampling_params import SamplingParams
from vllm_engine import MODELS, StubExecutor, Trace, make_engine, run

from kvpool.integrations.vllm.kv_cache_manager import EVICTION, KvpoolKVCacheManager
from kvpool.tools.costs import COSTS
from kvpool.tools.policies import WITH_SESSIONS
from kvpool.tools.traces import read_trace
from kvpool.tools.traces.agents import agents_trace, parse_agents

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

    from kvpool.tools.traces import Trace as Requests

BLOCK, WORDS = 16, 1000
"""Tokens in a block, and how many of them there are."""


def tokens_of(block: int) -> list[int]:
    """The tokens of a block of the trace, by its number: the same for no other block."""
    digits = []
    for _ in range(BLOCK):
        block, digit = divmod(block, WORDS)
        digits.append(4 + digit)
    return digits


def engine_of(policy: str, prompts: list[list[int]], blocks: int, chunk: int) -> LLMEngine:
    """A vLLM whose model takes no time.

    `policy` is vllm for vLLM's own classes, one of kvpool's, or one with "+sessions" or "-queue" behind it.
    """
    os.environ[EVICTION] = policy.removesuffix("+sessions").removesuffix("-queue")
    return make_engine(
        make(MODELS, "smallest"),
        kvpool=policy != "vllm",
        distributed_executor_backend=StubExecutor,
        block_size=BLOCK,
        num_gpu_blocks_override=blocks + 1,  # one is vLLM's null block
        max_model_len=max(map(len, prompts)) + 2,
        max_num_batched_tokens=chunk,
    )


def fitting(prompts: list[list[int]], blocks: int) -> list[list[int]]:
    """The prompts; of those that are longer than the cache, what fits."""
    return [[*prompt[:-1][: (blocks - 1) * BLOCK], prompt[-1]] for prompt in prompts]


def found(
    prompts: list[list[int]], says: list[dict[str, Any] | None], blocks: int, policy: str
) -> tuple[int, float]:
    """The tokens of all prompts that were found one after the other, and the seconds of the run.

    With adaptive+sessions requests say what they know of their sessions.
    """
    prompts = fitting(prompts, blocks)
    engine = engine_of(policy, prompts, blocks, 16_384)
    trace = Trace(engine)
    begun = time.perf_counter()
    for number, (prompt, arguments) in enumerate(zip(prompts, says, strict=True)):
        run(engine, [prompt], 1, f"{number}-", arguments if policy == WITH_SESSIONS else None)
    took = time.perf_counter() - begun
    engine.engine_core.shutdown()
    return trace.cached_tokens, took


def queued(requests: Requests, prompts: list[list[int]], blocks: int, policy: str, load: float) -> Queued:
    """What is found of prompts that wait, and how long they do.

    With adaptive-queue vLLM's manager is not told of waiting requests.
    """
    scale, prompts = requests.block_size // BLOCK, fitting(prompts, blocks)

    def seconds(tokens: int) -> float:
        return float(COSTS["8B"].seconds(scale * tokens))

    arrivals = requests.arrival_s * (sum(map(seconds, map(len, prompts))) / load / requests.arrival_s[-1])
    engine = engine_of(policy, prompts, blocks, 8_192 // scale)
    once = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    trace, now, added, steps = Trace(engine), 0.0, 0, 0
    waits = np.zeros(len(prompts))
    unqueued = mock.patch.object(KvpoolKVCacheManager, "add_waiting")
    with unqueued if policy.endswith("-queue") else nullcontext():
        while added < len(prompts) or engine.has_unfinished_requests():
            if not engine.has_unfinished_requests():
                now = max(now, float(arrivals[added]))
            while added < len(prompts) and arrivals[added] <= now:
                engine.add_request(str(added), {"prompt_token_ids": prompts[added]}, once)
                added += 1
            done = engine.step()
            for step in trace.steps[steps:]:
                for name, count in step["tokens"].items():
                    computed, _ = step["new"].get(name) or step["more"][name]
                    now += seconds(computed + count) - seconds(computed)
            steps = len(trace.steps)
            for output in done:
                waits[int(output.request_id)] = now - arrivals[int(output.request_id)]
    engine.engine_core.shutdown()
    return Queued(trace.cached_tokens, *np.percentile(waits, (50, 99)).tolist())


class Queued(NamedTuple):
    """Tokens of all prompts that were found, and times to the first token in seconds."""

    tokens: int
    p50: float
    p99: float


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path, nargs="?")
    parser.add_argument("--agents", metavar="SPEC", help="agents of `kvpool replay` in the place of a trace")
    parser.add_argument("--seed", type=int, default=0, help="of the agents")
    parser.add_argument(
        "--capacity", default="0.5,1,2,4.1", help="sizes of the cache, in million tokens of the trace"
    )
    parser.add_argument("--policies", default="vllm,adaptive")
    parser.add_argument("--load", type=float, help="requests wait: the load of a machine without a cache")
    asked = parser.parse_args()
    if (asked.trace is None) == (asked.agents is None):
        parser.error("name a trace or --agents")
    trace = agents_trace(parse_agents(asked.agents), asked.seed) if asked.agents else read_trace(asked.trace)
    # vLLM computes the last token of a prompt whatever it finds.
    prompts = [
        [token for block in blocks for token in tokens_of(int(block))] + [4] for blocks in trace.all_blocks()
    ]
    says = said(trace)
    whole = sum(map(len, prompts))
    about = "; ".join(f"{key}: {value}" for key, value in machine().items())
    table = Table(title=f"{trace.name}, found by a vLLM; {about}")
    ends = ("seconds",) if asked.load is None else ("first token, p50", "p99")
    for title in ("million tokens", "order", "found", "of vLLM's", *ends):
        table.add_column(title, justify="right")
    for capacity in map(float, asked.capacity.split(",")):
        own = 0
        for policy in asked.policies.split(","):
            blocks = int(capacity * 1e6) // trace.block_size
            last: tuple[str, ...]
            if asked.load is None:
                tokens, took = found(prompts, says, blocks, policy)
                last = (f"{took:.0f}",)
            else:
                tokens, p50, p99 = queued(trace, prompts, blocks, policy, asked.load)
                last = (f"{p50:.1f} s", f"{p99:.0f} s")
            own = own or tokens
            table.add_row(f"{capacity:g}", policy, f"{tokens / whole:.2%}", f"{tokens / own:.2f}", *last)
    Console().print(table)


if __name__ == "__main__":
    main()
