"""A whole vLLM on kvpool and on its own classes, in one process: every step, token and block is the same."""

from __future__ import annotations

import random
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import pytest
from nano_models import make
from vllm.config import KVEventsConfig
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RepetitionDetectionParams, SamplingParams, StructuredOutputsParams
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_metrics import KVCacheMetricsCollector
from vllm.v1.core.sched.scheduler import Scheduler
from vllm_engine import (
    MODELS,
    REQUESTS,
    TOKENS,
    ChunkedExecutor,
    DraftingExecutor,
    OnlyWindowExecutor,
    StubExecutor,
    Trace,
    WindowExecutor,
    make_engine,
    prompts,
    run,
    scheduler_of,
    token_after,
)

from kvpool.errors import ConfigError
from kvpool.integrations.vllm import tokens
from kvpool.integrations.vllm.block_pool import KvpoolBlockPool
from kvpool.integrations.vllm.kv_cache_manager import EVICTION, KvpoolKVCacheManager

if TYPE_CHECKING:
    from collections.abc import Callable

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


def compare(traces: list[Trace]) -> None:
    """Both schedulers decided the same in every step, and said the same of every token."""
    for kind in ("steps", "answers"):
        for own, ours in zip(*(getattr(trace, kind) for trace in traces), strict=True):
            assert own == ours


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
    compare(traces)
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


def plain(_: random.Random) -> tuple[dict[str, Any], LoRARequest | None]:
    """No more than a prompt and a number of tokens."""
    return {"ignore_eos": True}, None


def history(
    engine: LLMEngine,
    seed: int,
    steps: int,
    options: Callable[[random.Random], tuple[dict[str, Any], LoRARequest | None]] = plain,
) -> list[tuple[str, list[int]]]:
    """Requests that come and are aborted between steps; the tokens of each that ends.

    `options` are those of a request, by a function of dice: of its sampling, and its LoRA.
    """
    dice = random.Random(seed)  # noqa: S311
    shared = [dice.randrange(4, 1000) for _ in range(400)]
    running: list[str] = []
    ended = []
    for step in range(steps):
        while dice.random() < 0.4 and len(running) < 12:
            prompt = shared[: dice.randrange(400)] + [
                dice.randrange(4, 1000) for _ in range(dice.randrange(1, 80))
            ]
            more, lora = options(dice)
            greedy = SamplingParams(
                **{"temperature": 0, "max_tokens": dice.randrange(1, 120), "detokenize": False, **more}
            )
            running.append(f"{step}-{len(running)}")
            engine.add_request(running[-1], {"prompt_token_ids": prompt}, greedy, lora_request=lora)
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
    compare(traces)
    assert answers[0] == answers[1]
    assert len(answers[0]) > 20
    assert traces[0].cached_tokens > 0
    assert (traces[0].preemptions > 0) == few


def test_a_policy_changes_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    model, options, _ = CASES["llama, preemption"]
    place = make(MODELS, model)
    monkeypatch.setenv(EVICTION, "adaptive")
    answers = []
    for on in (False, True):
        engine = make_engine(place, kvpool=on, **options)
        trace = Trace(engine)
        answers.append([run(engine, prompts(seed), TOKENS, f"{seed}-")[0] for seed in (1, 2, 1)])
        assert trace.cached_tokens > 0
        assert trace.preemptions > 0
        engine.engine_core.shutdown()
    assert answers[0] == answers[1]


def found_by(policy: str, collects: bool, monkeypatch: pytest.MonkeyPatch, **options: Any) -> int:  # noqa: ANN401
    """The tokens found in prompts of twelve sessions in turns, and of others that never come back."""
    monkeypatch.setenv(EVICTION, policy)
    engine = make_engine(
        make(MODELS, "smallest"),
        kvpool=True,
        distributed_executor_backend=StubExecutor,
        block_size=16,
        num_gpu_blocks_override=160,
        max_model_len=600,
        **options,
    )
    if collects:
        scheduler_of(engine).kv_cache_manager.block_pool.metrics_collector = KVCacheMetricsCollector()
    trace, dice = Trace(engine), random.Random(3)  # noqa: S311
    sessions = [[dice.randrange(4, 1000) for _ in range(200)] for _ in range(12)]
    for turn in range(25):
        for number, session in enumerate(sessions):
            once = [dice.randrange(4, 1000) for _ in range(200)]
            run(engine, [[*session, 4 + turn]], 1, f"{turn}-{number}-")
            run(engine, [once], 1, f"{turn}-{number}-once-")
    engine.engine_core.shutdown()
    return trace.cached_tokens


@pytest.mark.parametrize(
    ("collects", "options"),
    [
        (False, {}),
        (False, {"kv_events_config": KVEventsConfig(enable_kv_cache_events=True, publisher="null")}),
        (True, {}),
    ],
    ids=["plain", "events", "metrics"],
)
def test_a_policy_finds_what_vllm_s_order_has_evicted(
    collects: bool, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    own, learned = (found_by(policy, collects, monkeypatch, **options) for policy in ("lru", "adaptive"))
    assert own == 0  # the blocks of 24 prompts are taken between two turns, and there are those of 12
    assert learned > 0.2 * 12 * 25 * 200


@pytest.mark.parametrize(
    ("executor", "policy", "words"),
    [
        (WindowExecutor, "adaptive", "KVPOOL_VLLM_EVICTION is 'adaptive'; it must be 'lru' .* 2 groups"),
        (StubExecutor, "newest", "unknown policy 'newest'"),
    ],
)
def test_a_policy_that_cannot_be_is_an_error(
    executor: type[Any], policy: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(EVICTION, policy)
    with pytest.raises(ConfigError, match=words):
        make_engine(
            make(MODELS, "smallest"), kvpool=True, distributed_executor_backend=executor, block_size=16
        )


def stops(dice: random.Random) -> tuple[dict[str, Any], LoRARequest | None]:
    """Reasons to end beside the number of tokens."""
    return {
        "stop_token_ids": [token_after(dice.randrange(500)) for _ in range(dice.choice((0, 1, 3)))],
        "min_tokens": dice.choice((0, 0, 3)),
        "repetition_detection": dice.choice((None, REPEATS)),
    }, None


def structured(dice: random.Random) -> tuple[dict[str, Any], LoRARequest | None]:
    """A grammar for some."""
    grammar = StructuredOutputsParams(choice=["w5w6w7w8w9w5w6", "w4w4"])
    return {"structured_outputs": dice.choice((None, None, grammar))}, None


def adapted(dice: random.Random) -> tuple[dict[str, Any], LoRARequest | None]:
    """One of three adapters for some, two of which may run at once."""
    number = dice.randrange(4)
    return {}, LoRARequest(f"{number}", number, "/nowhere") if number else None


REPEATS = RepetitionDetectionParams(max_pattern_size=3, min_count=2)

MORE: dict[str, tuple[Any, dict[str, Any]]] = {
    "stops": (stops, {}),
    "drafts": (
        stops,
        {
            "distributed_executor_backend": DraftingExecutor,
            "speculative_config": {
                "method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2,
            },
        },
    ),
    "structured": (structured, {}),
    "adapted": (adapted, {"enable_lora": True, "max_loras": 2}),
    "priority": (stops, {"scheduling_policy": "priority"}),
}  # fmt: skip
"""Requests with more than tokens, and options of their engine."""


@pytest.mark.parametrize(
    ("name", "asynchronous"),
    # vLLM makes these drafts after a step, which it knows only if it has waited for it.
    [(name, on) for name in MORE for on in (False, True) if not on or name != "drafts"],
)
def test_what_requests_ask_for_beside_tokens(
    name: str, asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("lmformatenforcer", "lmformatenforcer.integrations.vllm"):  # imported, and not used
        monkeypatch.setitem(sys.modules, module, mock.MagicMock())
    place = make(MODELS, "smallest")
    left: Counter[bool] = Counter()
    own = Scheduler._update_request_with_output
    traces, answers, on = [], [], False

    def counted(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401
        left[on] += 1
        return own(*arguments, **options)

    monkeypatch.setattr(Scheduler, "_update_request_with_output", counted)
    options_of, engine_options = MORE[name]
    for on in (False, True):
        engine = make_engine(
            place,
            kvpool=on,
            asynchronous=asynchronous,
            **{"distributed_executor_backend": StubExecutor, **engine_options},
            block_size=16,
            num_gpu_blocks_override=60,
            max_model_len=600,
            max_num_batched_tokens=256,
        )
        # A grammar that is compiled on a thread is ready at another step each time.
        scheduler_of(engine).structured_output_manager._use_async_grammar_compilation = False
        traces.append(Trace(engine))
        answers.append(history(engine, 6, 500, options_of))
        engine.engine_core.shutdown()
    compare(traces)
    assert answers[0] == answers[1]
    assert len(answers[0]) > 20
    assert traces[0].preemptions > 0
    if tokens.IS_KNOWN:
        assert 0 < left[True] < left[False]
    else:
        assert left[True] == left[False]
