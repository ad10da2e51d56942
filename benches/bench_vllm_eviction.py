"""What a whole vLLM finds of the prompts of a trace, by its own order of eviction and by kvpool's policies.

`make bench-vllm-eviction` runs it with Mooncake's conversation trace; any trace that names the blocks of its
prompts will do. A block of the trace is one of 16 tokens here, so that all sizes are a 32nd of those of the
trace. The model takes no time, and prompts come one after the other: what is found depends on the order of
eviction alone.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from harness import machine
from nano_models import make
from rich.console import Console
from rich.table import Table
from vllm_engine import MODELS, StubExecutor, Trace, make_engine, run

from kvpool.integrations.vllm.kv_cache_manager import EVICTION
from kvpool.tools.traces import read_trace

BLOCK, WORDS = 16, 1000
"""Tokens in a block, and how many of them there are."""


def tokens_of(block: int) -> list[int]:
    """The tokens of a block of the trace, by its number: the same for no other block."""
    digits = []
    for _ in range(BLOCK):
        block, digit = divmod(block, WORDS)
        digits.append(4 + digit)
    return digits


def found(prompts: list[list[int]], blocks: int, policy: str) -> tuple[int, float]:
    """The tokens of all prompts that were found, and the seconds of the run.

    `policy` is vllm for vLLM's own classes, or one of kvpool's.
    """
    os.environ[EVICTION] = policy
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
    for number, prompt in enumerate(prompts):
        run(engine, [prompt], 1, f"{number}-")
    took = time.perf_counter() - begun
    engine.engine_core.shutdown()
    return trace.cached_tokens, took


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument(
        "--capacity", default="0.5,1,2,4.1", help="sizes of the cache, in million tokens of the trace"
    )
    parser.add_argument("--policies", default="vllm,adaptive")
    asked = parser.parse_args()
    trace = read_trace(asked.trace)
    # vLLM computes the last token of a prompt whatever it finds.
    prompts = [
        [token for block in blocks for token in tokens_of(int(block))] + [4] for blocks in trace.blocks
    ]
    whole = sum(map(len, prompts))
    about = "; ".join(f"{key}: {value}" for key, value in machine().items())
    table = Table(title=f"{trace.name}, found by a vLLM; {about}")
    for title in ("million tokens", "order", "found", "of vLLM's", "seconds"):
        table.add_column(title, justify="right")
    for capacity in map(float, asked.capacity.split(",")):
        own = 0
        for policy in asked.policies.split(","):
            tokens, took = found(prompts, int(capacity * 1e6) // trace.block_size, policy)
            own = own or tokens
            table.add_row(
                f"{capacity:g}", policy, f"{tokens / whole:.1%}", f"{tokens / own:.2f}", f"{took:.0f}"
            )
    Console().print(table)


if __name__ == "__main__":
    main()
