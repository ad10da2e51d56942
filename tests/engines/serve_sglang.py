"""Serves a tiny model with `sglang.Engine` on the CPU, and writes what it generated.

python serve_sglang.py '{"model": PATH, "out": PATH, "requests": 24, "engine": {...}}'
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

VOCABULARY = 500
SHARED = 96


def prompts_of(requests: int) -> list[list[int]]:
    """Prompts of different lengths, with beginnings in common."""
    numbers = random.Random(0)  # noqa: S311 - no secrets
    shared = [numbers.randrange(2, VOCABULARY) for _ in range(SHARED)]

    def prompt() -> list[int]:
        own = [numbers.randrange(2, VOCABULARY) for _ in range(numbers.randrange(1, 200))]
        return shared[: numbers.randrange(16, SHARED)] + own

    return [prompt() for _ in range(requests)]


async def abort_some(engine: Any, prompts: list[list[int]]) -> int:  # noqa: ANN401 - of SGLang
    """Starts requests, gives them up at different points, and returns how many ended by that."""

    async def one(number: int, prompt: list[int]) -> bool:
        answers = await engine.async_generate(
            input_ids=prompt,
            sampling_params={"temperature": 0, "max_new_tokens": 64, "ignore_eos": True},
            stream=True,
            rid=f"gone-{number}",
        )
        count, reason = 0, None
        async for answer in answers:
            if count == number % 5:
                engine.tokenizer_manager.abort_request(rid=f"gone-{number}")
            count, reason = count + 1, answer["meta_info"]["finish_reason"]
        return reason is not None and reason["type"] == "abort"

    return sum(await asyncio.gather(*(one(number, prompt) for number, prompt in enumerate(prompts))))


def main() -> None:
    """Serves, and writes the tokens."""
    import sglang

    config = json.loads(sys.argv[1])
    arguments = {
        "model_path": config["model"],
        "device": "cpu",
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "skip_tokenizer_init": True,
        "disable_cuda_graph": True,
        "max_total_tokens": 2048,
        "max_running_requests": 16,
        "context_length": 1024,
        "chunked_prefill_size": 128,
        "random_seed": 1,
        "watchdog_timeout": 600,
        "log_level": "info",
        **config["engine"],
    }
    prompts = prompts_of(config["requests"])
    engine = sglang.Engine(**arguments)
    # SGLang admits requests that ignore it only if all of them fit to their ends.
    ignore_eos = not config.get("may_retract")
    sampling = {"temperature": 0, "max_new_tokens": config.get("new_tokens", 24), "ignore_eos": ignore_eos}
    # SGLang admits some requests in the order of their names, which are random if they are not given.
    names = [f"request {number:04}" for number in range(len(prompts) + 8)]
    answers = engine.generate(input_ids=prompts, sampling_params=sampling, rid=names[:-8])
    aborted = 0
    if config.get("aborts"):
        aborted = engine.loop.run_until_complete(abort_some(engine, prompts[:12]))
    # Earlier requests are in the prefix cache, if there is one.
    again = {**sampling, "max_new_tokens": 16}
    answers += engine.generate(input_ids=prompts[:8], sampling_params=again, rid=names[-8:])
    report = {
        "tokens": [answer["output_ids"] for answer in answers],
        "cached": [answer["meta_info"]["cached_tokens"] for answer in answers],
        "retractions": [answer["meta_info"]["num_retractions"] for answer in answers],
        "aborted": aborted,
    }
    # The scheduler refuses it until it has noted that the last request has ended.
    deadline = time.monotonic() + 60
    while not engine.flush_cache().success:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    # The scheduler checks its pools while it is idle, and ends if slots are missing.
    engine.generate(input_ids=prompts[0], sampling_params=sampling)
    engine.shutdown()
    Path(config["out"]).write_text(json.dumps(report), encoding="utf-8")


if __name__ == "__main__":
    main()
