"""A whole vLLM on kvpool and on its own classes, in one process: every step, token and block is the same."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import pytest
from nano_models import make
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm_engine import MODELS, REQUESTS, TOKENS, Trace, make_engine, prompts, run, scheduler_of

from kvpool.integrations.vllm.block_pool import KvpoolBlockPool
from kvpool.integrations.vllm.kv_cache_manager import KvpoolKVCacheManager


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
