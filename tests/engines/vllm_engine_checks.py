"""A whole vLLM on kvpool and on its own classes, in one process: every step, token and block is the same."""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from nano_models import make
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm_engine import (
    MODELS,
    REQUESTS,
    TOKENS,
    ChunkedExecutor,
    OnlyWindowExecutor,
    StubExecutor,
    Trace,
    WindowExecutor,
    make_engine,
    prompts,
    run,
    scheduler_of,
)

from kvpool.integrations.vllm.block_pool import KvpoolBlockPool
from kvpool.integrations.vllm.kv_cache_manager import KvpoolKVCacheManager

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine


class Case(NamedTuple):
    """A model with options of vLLM."""

    model: str
    options: dict[str, Any]
    preempts: bool = False


CASES = {
    "llama": Case("llama", {}),
    "llama, chunks": Case("llama", {"max_num_batched_tokens": 64, "long_prefill_token_threshold": 48}),
    "llama, preemption": Case(
        "llama", {"kv_cache_memory_bytes": 1 << 20, "max_model_len": 512}, preempts=True
    ),
    "llama, no cache": Case("llama", {"enable_prefix_caching": False}),
    "llama, sha256_cbor": Case("llama", {"prefix_caching_hash_algo": "sha256_cbor"}),
    "gemma3": Case("gemma3", {"max_num_batched_tokens": 256}),
    "gemma3, preemption": Case(
        "gemma3", {"kv_cache_memory_bytes": 3 << 20, "max_model_len": 512}, preempts=True
    ),
    "qwen3_next": Case("qwen3_next", {"dtype": "bfloat16", "max_num_batched_tokens": 256}),
    "mamba2": Case("mamba2", {"max_num_batched_tokens": 256, "enable_prefix_caching": False}),
}


@pytest.mark.parametrize("name", CASES)
def test_every_step_is_the_same(name: str) -> None:
    model, options, preempts = CASES[name]
    place = make(MODELS, model)
    answers, traces, ends = [], [], []
    for on in (False, True):
        engine = make_engine(place, kvpool=on, **options)
        manager = scheduler_of(engine).kv_cache_manager
        assert isinstance(manager, KVCacheManager)
        assert isinstance(manager, KvpoolKVCacheManager) == on
        assert isinstance(manager.block_pool, KvpoolBlockPool) == on
        trace = Trace(engine)
        # The second time many prompts are found whole.
        answers.append([run(engine, prompts(seed), TOKENS, f"{seed}-") for seed in (1, 2, 1)])
        traces.append(trace)
        pool = manager.block_pool
        ends.append(
            [(block.block_id, block.block_hash) for block in pool.free_block_queue.get_all_free_blocks()]
        )
        engine.engine_core.shutdown()
    assert answers[0] == answers[1]
    assert len(answers[0][0][0]) == REQUESTS
    for own, ours in zip(traces[0].steps, traces[1].steps, strict=True):
        assert own == ours
    assert ends[0] == ends[1]
    assert (traces[0].cached_tokens > 0) == options.get("enable_prefix_caching", True)
    assert (traces[0].preemptions > 0) == preempts
    varied = Counter(token for tokens in answers[0][0][0].values() for token in tokens)
    assert len(varied) > TOKENS  # greedy tokens of random weights that do not repeat one


EXECUTORS: dict[type[Any], int] = {
    StubExecutor: 60,
    WindowExecutor: 100,
    OnlyWindowExecutor: 60,
    ChunkedExecutor: 100,
}
"""By a model, so few blocks that requests are preempted."""


def history(engine: LLMEngine, seed: int, steps: int) -> list[tuple[str, list[int]]]:
    """Requests that come and are aborted between steps; the tokens of each that ends."""
    dice = random.Random(seed)  # noqa: S311
    shared = [dice.randrange(4, 1000) for _ in range(400)]
    running: list[str] = []
    ended = []
    for step in range(steps):
        while dice.random() < 0.4 and len(running) < 12:
            prompt = shared[: dice.randrange(400)] + [
                dice.randrange(4, 1000) for _ in range(dice.randrange(1, 80))
            ]
            greedy = SamplingParams(
                temperature=0, max_tokens=dice.randrange(1, 120), ignore_eos=True, detokenize=False
            )
            running.append(f"{step}-{len(running)}")
            engine.add_request(running[-1], {"prompt_token_ids": prompt}, greedy)
        if running and dice.random() < 0.03:
            engine.abort_request([running.pop(dice.randrange(len(running)))])
        for output in engine.step():
            if output.finished:
                running.remove(output.request_id)
                ended.append((output.request_id, list(output.outputs[0].token_ids)))
    return ended


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("few", [True, False])
def test_random_requests_are_scheduled_the_same(executor: type[Any], asynchronous: bool, few: bool) -> None:
    place = make(MODELS, "smallest")
    traces, answers, quiet = [], [], []
    for on in (False, True):
        engine = make_engine(
            place,
            kvpool=on,
            asynchronous=asynchronous,
            distributed_executor_backend=executor,
            block_size=16,
            num_gpu_blocks_override=EXECUTORS[executor] if few else 600,
            max_model_len=600,
            max_num_batched_tokens=256,
        )
        traces.append(Trace(engine))
        answers.append(history(engine, 5, 600))
        quiet.append(getattr(scheduler_of(engine).kv_cache_manager, "_may_be_quiet", None))
        engine.engine_core.shutdown()
    assert quiet == [None, True]
    for own, ours in zip(traces[0].steps, traces[1].steps, strict=True):
        assert own == ours
    assert answers[0] == answers[1]
    assert len(answers[0]) > 20
    assert traces[0].cached_tokens > 0
    assert (traces[0].preemptions > 0) == few
