"""Serves requests that wait with `sglang.Engine` on the CPU, which evicts by worth.

python sglang_waiting.py MODEL BACKEND
"""

from __future__ import annotations

import sys
from typing import Any

LENGTH = 300
OTHERS = 6


def main() -> None:
    """Serves."""
    import sglang

    backend = sys.argv[2]
    engine = sglang.Engine(
        model_path=sys.argv[1],
        device="cpu",
        attention_backend="torch_native",
        sampling_backend="pytorch",
        skip_tokenizer_init=True,
        disable_cuda_graph=True,
        max_total_tokens=1024,
        max_running_requests=1,
        context_length=1024,
        page_size=16,
        random_seed=1,
        watchdog_timeout=600,
        **({} if backend == "core" else {"radix_cache_backend": backend}),
    )
    sampling = {"temperature": 0, "max_new_tokens": 2, "ignore_eos": True}

    def serve(*firsts: int, step: int = 1) -> list[int]:
        """Serves prompts that come together, one by one, and returns how many tokens of each were cached."""
        prompts = [[first + step * at % 50 for at in range(LENGTH)] for first in firsts]
        names = [f"request {first}" for first in firsts]
        answers: Any = engine.generate(input_ids=prompts, sampling_params=sampling, rid=names)
        return [int(answer["meta_info"]["cached_tokens"]) for answer in answers]

    others = range(50, 50 + OTHERS * 50, 50)
    assert serve(10) == [0]
    # The prompts of the others would fill the cache twice, and the first one is the oldest.
    found = serve(*others, 10)
    assert found[:-1] == [0] * OTHERS, found
    assert found[-1] > LENGTH - 32, found
    # It is needed no longer.
    assert serve(*others, step=7) == [0] * OTHERS
    assert serve(10) == [0]
    engine.shutdown()


if __name__ == "__main__":
    main()
