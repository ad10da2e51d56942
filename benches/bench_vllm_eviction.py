"""What a whole vLLM finds of the prompts of a trace, by its own order of eviction and by kvpool's policies.

`make bench-vllm-eviction` runs it with Mooncake's conversation trace, and with agents of `kvpool replay`, who
also say of which session a request is a turn and what follows it; any trace that names the blocks of its
prompts will do. A block of the trace is one of 16 tokens here, so that all sizes are a 32nd of those of the
trace. The model takes no time, and prompts come one after the other: what is found depends on the order of
eviction alone.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

from harness import machine
from nano_models import make
from rich.console import Console
from rich.table import Table
from trace_turns import said
from vllm_engine import MODELS, StubExecutor, Trace, make_engine, run

from kvpool.integrations.vllm.kv_cache_manager import EVICTION
from kvpool.tools.policies import WITH_SESSIONS
from kvpool.tools.traces import read_trace
from kvpool.tools.traces.agents import agents_trace, parse_agents

BLOCK, WORDS = 16, 1000
"""Tokens in a block, and how many of them there are."""


def tokens_of(block: int) -> list[int]:
    """The tokens of a block of the trace, by its number: the same for no other block."""
    digits = []
    for _ in range(BLOCK):
        block, digit = divmod(block, WORDS)
        digits.append(4 + digit)
    return digits


def found(
    prompts: list[list[int]], says: list[dict[str, Any] | None], blocks: int, policy: str
) -> tuple[int, float]:
    """The tokens of all prompts that were found, and the seconds of the run.

    `policy` is vllm for vLLM's own classes, one of kvpool's, or adaptive+sessions, with what requests say.
    """
    # Of a prompt that is longer than the cache, what fits.
    prompts = [[*prompt[:-1][: (blocks - 1) * BLOCK], prompt[-1]] for prompt in prompts]
    os.environ[EVICTION] = policy.removesuffix("+sessions")
    engine = make_engine(
        make(MODELS, "smallest"),
        kvpool=policy != "vllm",
        distributed_executor_backend=StubExecutor,
        block_size=BLOCK,
        num_gpu_blocks_override=blocks + 1,  # one is vLLM's null block
        max_model_len=max(map(len, prompts)) + 2,
        max_num_batched_tokens=16_384,
    )
    trace = Trace(engine)
    begun = time.perf_counter()
    for number, (prompt, arguments) in enumerate(zip(prompts, says, strict=True)):
        run(engine, [prompt], 1, f"{number}-", arguments if policy == WITH_SESSIONS else None)
    took = time.perf_counter() - begun
    engine.engine_core.shutdown()
    return trace.cached_tokens, took


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
    for title in ("million tokens", "order", "found", "of vLLM's", "seconds"):
        table.add_column(title, justify="right")
    for capacity in map(float, asked.capacity.split(",")):
        own = 0
        for policy in asked.policies.split(","):
            tokens, took = found(prompts, says, int(capacity * 1e6) // trace.block_size, policy)
            own = own or tokens
            table.add_row(
                f"{capacity:g}", policy, f"{tokens / whole:.2%}", f"{tokens / own:.2f}", f"{took:.0f}"
            )
    Console().print(table)


if __name__ == "__main__":
    main()
