"""Serves requests of sessions with `sglang.Engine` on the CPU, which evicts by worth.

python sglang_sessions.py MODEL BACKEND
"""

from __future__ import annotations

import sys
from typing import Any

LENGTH = 300


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
        max_running_requests=4,
        context_length=1024,
        page_size=16,
        random_seed=1,
        watchdog_timeout=600,
        **({} if backend == "core" else {"radix_cache_backend": backend}),
    )

    def serve(first: int, length: int, said: dict[str, str | int] | None = None) -> int:
        """Serves a prompt, and returns how many of its tokens were cached."""
        sampling: dict[str, Any] = {"temperature": 0, "max_new_tokens": 2, "ignore_eos": True}
        prompt = [first] + [first + at % 50 for at in range(length - 1)]
        answer = engine.generate(input_ids=prompt, sampling_params={**sampling, "custom_params": said})
        return int(answer["meta_info"]["cached_tokens"])

    def refusal(said: dict[str, str | int]) -> str:
        try:
            serve(2, LENGTH, said)
        except ValueError as error:
            return str(error)
        raise AssertionError(said)

    if backend == "core":
        assert "need --radix-cache-backend kvpool" in refusal({"kvpool_session": "chat"})
    else:
        assert "kvpool_session is None" in refusal({"kvpool_pause": "user"})
        assert "kvpool_next is 1" in refusal({"kvpool_session": 7, "kvpool_next": 1})
        serve(10, LENGTH, {"thinking_budget": 7})
        serve(100, LENGTH, {"kvpool_session": "chat", "kvpool_pause": "user"})
        serve(100, LENGTH + 40, {"kvpool_session": "chat", "kvpool_session_end": True})
        # There is no room for all three prompts: of the first more than half would go, had none ended.
        serve(200, 2 * LENGTH)
        assert serve(10, LENGTH) > LENGTH // 2
    # The engine goes on after requests that were refused.
    assert serve(300, 100) == 0
    engine.shutdown()


if __name__ == "__main__":
    main()
