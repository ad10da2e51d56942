"""A whole vLLM on kvpool and on its own classes, in one process: every step, token and block is the same."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import vllm_copies
from nano_models import make
from vllm.config import KVTransferConfig
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm_engine import make_engine, run, scheduler_of

from kvpool.integrations.vllm.block_pool import KvpoolBlockPool
from kvpool.integrations.vllm.kv_cache_manager import KvpoolKVCacheManager

if TYPE_CHECKING:
    from pathlib import Path

    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine.llm_engine import LLMEngine

REQUESTS, TOKENS = 24, 24


class Trace:
    """What a scheduler decided, with requests by the order in which they came."""

    def __init__(self, engine: LLMEngine) -> None:
        self.steps: list[Any] = []
        self.quiet = 0
        self._numbers: dict[str, int] = {}
        self._scheduler = scheduler_of(engine)
        self._own = self._scheduler.schedule
        self._scheduler.schedule = self._schedule

    def _number(self, name: str) -> int:
        return self._numbers.setdefault(name, len(self._numbers))

    def _schedule(self, *arguments: Any) -> SchedulerOutput:  # noqa: ANN401
        output = self._own(*arguments)
        cached = output.scheduled_cached_reqs
        self.steps.append(
            {
                "tokens": {self._number(name): count for name, count in output.num_scheduled_tokens.items()},
                "new": {
                    self._number(new.req_id): (new.num_computed_tokens, new.block_ids)
                    for new in output.scheduled_new_reqs
                },
                "more": {
                    self._number(name): (computed, blocks)
                    for name, computed, blocks in zip(
                        cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
                    )
                },
                "preempted": sorted(map(self._number, output.preempted_req_ids or ())),
                "copies": output.kv_cache_block_copies,
            }
        )
        return output

    @property
    def cached_tokens(self) -> int:
        """The tokens of all prompts that were found."""
        return sum(computed for step in self.steps for computed, _ in step["new"].values())

    @property
    def preemptions(self) -> int:
        """How often a request was preempted."""
        return sum(len(step["preempted"]) for step in self.steps)


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


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def prompts(seed: int) -> list[list[int]]:
    """Prompts with shared prefixes of many lengths."""
    numbers = random.Random(seed)  # noqa: S311
    shared = [numbers.randrange(4, 1000) for _ in range(400)]
    return [
        shared[: numbers.choice((0, 40, 64, 130, 256, 400))]
        + [numbers.randrange(4, 1000) for _ in range(numbers.randrange(1, 100))]
        for _ in range(REQUESTS)
    ]


@pytest.mark.parametrize("name", CASES)
def test_every_step_is_the_same(models: Path, name: str) -> None:
    model, options, preempts = CASES[name]
    place = make(models, model)
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


def offloading(spec: str, **extra: Any) -> dict[str, Any]:  # noqa: ANN401
    """An engine that offloads, with less memory of its own than the prompts need."""
    return {
        "kv_cache_memory_bytes": 2 << 20,
        "max_model_len": 600,
        "kv_transfer_config": KVTransferConfig(
            kv_connector="OffloadingConnector",
            kv_role="kv_both",
            kv_connector_extra_config={
                "spec_name": spec,
                "spec_module_path": "vllm_copies",
                "cpu_bytes_to_use": 16 << 20,
                **extra,
            },
        ),
    }


def test_both_managers_of_chunks_answer_the_same(models: Path) -> None:
    place = make(models, "llama")
    plain = make_engine(place, kvpool=True)
    expected = [run(plain, prompts(seed), TOKENS)[0] for seed in (1, 2, 1)]
    vllm_copies.CALLS.clear()
    engine = make_engine(place, kvpool=True, **offloading("LockstepSpec"))
    trace = Trace(engine)
    assert [run(engine, prompts(seed), TOKENS)[0] for seed in (1, 2, 1)] == expected
    assert vllm_copies.CALLS["stored"] > vllm_copies.CALLS["loaded"] > 0
    called = {
        "lookup",
        "prepare_load",
        "complete_load",
        "prepare_store",
        "complete_store",
        "on_request_finished",
    }
    assert called <= vllm_copies.CALLS.keys()
    assert trace.cached_tokens > 0


def test_tokens_come_back_from_disk_after_a_restart(models: Path, tmp_path: Path) -> None:
    place = make(models, "llama")
    tier = {
        "type": "FileStoreTier", "module_path": "kvpool.integrations.vllm.offload", "path": str(tmp_path),
        "capacity_bytes": 64 << 20,
    }  # fmt: skip
    answers, found = [], []
    for _ in range(2):
        vllm_copies.CALLS.clear()
        engine = make_engine(place, kvpool=True, **offloading("TierSpec", secondary_tiers=[tier]))
        trace = Trace(engine)
        answers.append(run(engine, prompts(1), TOKENS)[0])
        found.append(trace.cached_tokens)
        engine.engine_core.shutdown()
    assert answers[0] == answers[1]
    assert found[1] > found[0]
    assert vllm_copies.CALLS["loaded"] > 0
