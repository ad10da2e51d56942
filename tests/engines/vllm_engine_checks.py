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
from vllm.exceptions import VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RepetitionDetectionParams, SamplingParams, StructuredOutputsParams
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_metrics import KVCacheMetricsCollector
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus
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
from kvpool.integrations.vllm import kv_cache_manager, tokens
from kvpool.integrations.vllm.block_pool import KvpoolBlockPool
from kvpool.integrations.vllm.kv_cache_manager import EVICTION, KvpoolKVCacheManager
from kvpool.integrations.vllm.tokens import IS_KNOWN
from kvpool.integrations.vllm.turns import END, PAUSE, SESSION, turn_of

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
        # Turns of one session side by side, which are preempted.
        said = {SESSION: "chat", PAUSE: "user"}
        answers.append([run(engine, prompts(seed), TOKENS, f"{seed}-", said)[0] for seed in (1, 2, 1)])
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


class Sessions:
    """An engine whose cache has 40 blocks of 16 tokens, and what it finds of the prompts of sessions."""

    def __init__(self, policy: str, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:  # noqa: ANN401
        monkeypatch.setenv(EVICTION, policy)
        self.engine = make_engine(
            make(MODELS, "smallest"),
            kvpool=True,
            distributed_executor_backend=StubExecutor,
            block_size=16,
            num_gpu_blocks_override=41,  # one is vLLM's null block
            max_model_len=600,
            **options,
        )
        self.pool: KvpoolBlockPool = scheduler_of(self.engine).kv_cache_manager.block_pool
        self._trace, self._requests = Trace(self.engine), 0

    def found(self, prompt: list[int], said: dict[str, Any] | None = None, tokens: int = 1) -> int:
        """The tokens of a prompt that are found. It is computed, and says something of its session."""
        self._requests += 1
        before = self._trace.cached_tokens
        run(self.engine, [prompt], tokens, f"{self._requests}-", said)
        return self._trace.cached_tokens - before

    def cached(self, prompt: list[int]) -> int:
        """The tokens of a prompt that are found by a request of no session."""
        return self.found(prompt, {"else": 1})


def unique(number: int, count: int = 160) -> list[int]:
    """Tokens like no others."""
    return [4 + (number * 997 + at * at) % 900 for at in range(count)]


SPECIAL: dict[str, tuple[bool, dict[str, Any]]] = {
    "plain": (False, {}),
    "asynchronous": (False, {"asynchronous": True}),
    "metrics": (True, {}),
    "chunks": (False, {"max_num_batched_tokens": 64}),
}


@pytest.mark.parametrize("name", SPECIAL)
def test_with_a_policy_what_ended_sessions_leave_goes_first(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    collects, options = SPECIAL[name]
    found = {}
    for said in (False, True):
        sessions = Sessions("adaptive", monkeypatch, **options)
        if collects:
            sessions.pool.metrics_collector = KVCacheMetricsCollector()
        chat, shared = unique(0, 161), unique(1, 32)
        sessions.found(chat, {SESSION: 0, PAUSE: "user"} if said else None)
        for number in range(2, 12):
            agent = [*shared, *unique(number, 100)]
            sessions.found(agent, {SESSION: f"agent {number}", PAUSE: "tool"} if said else None)
            # The last turn has one token more, and the prefix that all have in common is no one's.
            agent = [*agent, 4, 5]
            ends = {SESSION: f"agent {number}", END: 1}
            assert sessions.found(agent, ends if said else None, tokens=20) == 128
        found[said] = sessions.found(chat), sessions.found([*shared, 4])
        sessions.engine.engine_core.shutdown()
    assert found == {False: (0, 32), True: (160, 32)}


def test_with_a_policy_a_turn_leaves_what_it_does_not_continue(monkeypatch: pytest.MonkeyPatch) -> None:
    sessions = Sessions("adaptive", monkeypatch)
    chat, other = unique(0, 320), unique(1, 161)
    sessions.found(other)
    sessions.found([*chat, 4], {SESSION: "chat"})
    # The context is compacted to its beginning and a summary.
    assert sessions.found([*chat[:160], *unique(2, 61)], {SESSION: "chat", END: False}) == 160
    sessions.found(unique(3, 272))
    assert sessions.found(other) == 160
    assert sessions.found([*chat, 4]) == 160
    sessions.engine.engine_core.shutdown()


def test_with_a_policy_a_short_request_ends_a_session(monkeypatch: pytest.MonkeyPatch) -> None:
    sessions = Sessions("adaptive", monkeypatch)
    chat, other = unique(0, 161), unique(1, 161)
    sessions.found(other)
    sessions.found(chat, {SESSION: "chat", PAUSE: "user"})
    sessions.found([4], {SESSION: "chat", END: True})
    sessions.found(unique(2, 400))
    assert sessions.found(other) == 160
    # So does one that is given up before it runs.
    chat = unique(3, 161)
    sessions.found(chat, {SESSION: "chat", PAUSE: "user"})
    ends = SamplingParams(max_tokens=1, extra_args={SESSION: "chat", END: True})
    sessions.engine.add_request("gone", {"prompt_token_ids": [4]}, ends)
    sessions.engine.abort_request(["gone"])
    sessions.found(unique(4, 400))
    assert sessions.found(other) == 160
    assert sessions.found(chat) == 0
    sessions.engine.engine_core.shutdown()


def test_with_a_policy_a_turn_ends_with_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    sessions = Sessions("adaptive", monkeypatch)
    said = SamplingParams(max_tokens=9, ignore_eos=True, extra_args={SESSION: "chat", PAUSE: "user"})
    sessions.engine.add_request("chat", {"prompt_token_ids": unique(0, 40)}, said)
    sessions.engine.step()
    scheduler, learner = scheduler_of(sessions.engine), mock.Mock()
    manager: KvpoolKVCacheManager = scheduler.kv_cache_manager
    [request] = scheduler.requests.values()
    blocks = list(manager.get_blocks(request.request_id).blocks[0])
    assert len(blocks) == 3
    own = manager._learner
    manager._learner = learner
    for status in (
        RequestStatus.RUNNING,  # while it is preempted
        RequestStatus.FINISHED_ABORTED,
        RequestStatus.FINISHED_ERROR,
        RequestStatus.FINISHED_STOPPED,
    ):
        request.status = status
        manager._forget(request)
    request.status, manager._learner = RequestStatus.RUNNING, own
    assert learner.mock_calls == [
        mock.call.add_waiting(blocks, is_next=True, rank=(0, 0)),
        mock.call.remove_waiting(learner.add_waiting.return_value),
        *(mock.call.end_turn("chat", blocks, pause=pause, is_last=False) for pause in (None, None, "user")),
    ]
    sessions.engine.engine_core.shutdown()


@pytest.mark.skipif(not IS_KNOWN, reason="vLLM's own scheduler tells of no waiting request")
@pytest.mark.parametrize("name", SPECIAL)
def test_with_a_policy_what_a_waiting_request_will_find_is_kept(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    collects, options = SPECIAL[name]
    sessions = Sessions("adaptive", monkeypatch, max_num_seqs=1, **options)
    if collects:
        sessions.pool.metrics_collector = KVCacheMetricsCollector()
    engine, once = sessions.engine, SamplingParams(max_tokens=1, ignore_eos=True)
    chat, others = unique(0, 161), [unique(number, 200) for number in range(1, 9)]
    sessions.found(chat)
    for number, other in enumerate(others):
        engine.add_request(f"other {number}", {"prompt_token_ids": other}, once)
    engine.add_request("chat", {"prompt_token_ids": chat}, once)
    while engine.has_unfinished_requests():
        engine.step()
    assert sessions._trace.cached_tokens == 160
    # It has had what it needs.
    manager: KvpoolKVCacheManager = scheduler_of(engine).kv_cache_manager
    assert manager._waiting == {}
    for other in others:
        sessions.found(other)
    assert sessions.found(chat) == 0
    # So has one that is given up.
    for number, other in enumerate(others):
        engine.add_request(f"other {number}", {"prompt_token_ids": other}, once)
    engine.add_request("chat", {"prompt_token_ids": chat}, once)
    assert len(manager._waiting) == len(others) + 1
    engine.abort_request(["chat"])
    while engine.has_unfinished_requests():
        engine.step()
    assert manager._waiting == {}
    assert sessions.found(chat) == 0
    engine.engine_core.shutdown()


@pytest.mark.skipif(not IS_KNOWN, reason="vLLM's own scheduler tells of no waiting request")
def test_with_a_policy_what_others_compute_for_a_waiting_request_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sessions = Sessions("adaptive", monkeypatch, max_num_seqs=1)
    engine, once = sessions.engine, SamplingParams(max_tokens=1, ignore_eos=True)
    document, others = unique(0, 160), [unique(number, 200) for number in range(1, 9)]
    for number, prompt in enumerate([[*document, 4], *others, [*document, 5]]):
        engine.add_request(f"{number}", {"prompt_token_ids": prompt}, once)
    manager: KvpoolKVCacheManager = scheduler_of(engine).kv_cache_manager
    find = mock.Mock(wraps=manager._find)
    with mock.patch.object(manager, "_find", find), mock.patch.object(kv_cache_manager, "_AGAIN", 3):
        while engine.has_unfinished_requests():
            engine.step()
    assert sessions._trace.cached_tokens == 160
    # Some at once, in turns.
    looked_up = [int(call.args[0].request_id.partition("-")[0]) for call in find.call_args_list]
    assert looked_up[:9] == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    engine.engine_core.shutdown()


@pytest.mark.skipif(not IS_KNOWN, reason="vLLM's own scheduler tells of no waiting request")
def test_with_a_policy_requests_are_looked_up_again_after_each_chunk_of_a_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sessions = Sessions("adaptive", monkeypatch, max_num_seqs=1, max_num_batched_tokens=64)
    engine, some = sessions.engine, SamplingParams(max_tokens=20, ignore_eos=True)
    for number in range(2):
        engine.add_request(f"{number}", {"prompt_token_ids": unique(number, 161)}, some)
    manager: KvpoolKVCacheManager = scheduler_of(engine).kv_cache_manager
    with mock.patch.object(manager, "_find", wraps=manager._find) as find:
        counts = []
        for _ in range(10):
            engine.step()
            counts.append(find.call_count)
    # Three steps compute the prompt, and those after them no more of it.
    assert counts == [0, 1, 2, 3, 3, 3, 3, 3, 3, 3]
    engine.engine_core.shutdown()


def test_with_a_policy_each_step_of_a_prompt_says_what_was_not_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sessions = Sessions("adaptive", monkeypatch, max_num_batched_tokens=64)
    chat = unique(0, 100)
    sessions.found(chat)
    manager: KvpoolKVCacheManager = scheduler_of(sessions.engine).kv_cache_manager
    with mock.patch.object(manager, "_learner", mock.Mock(wraps=manager._learner)) as learner:
        assert sessions.found([*chat, *unique(1, 141)]) == 96
    told = [call.args for call in learner.set_user.call_args_list]
    assert told == [(None, 241, 96), (None,)] * 3
    assert not manager._found
    sessions.engine.engine_core.shutdown()


@pytest.mark.skipif(not IS_KNOWN, reason="vLLM's own scheduler tells of no waiting request")
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_with_a_policy_requests_wait_in_the_order_of_the_scheduler(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions = Sessions("adaptive", monkeypatch, max_num_seqs=1, scheduling_policy=policy)
    engine, once = sessions.engine, SamplingParams(max_tokens=1, ignore_eos=True)
    chats = {name: unique(number, 241) for number, name in enumerate(("late", "early"))}
    for chat in chats.values():
        sessions.found(chat)
    first = 0 if policy == "priority" else -(2**70)
    for number in range(2, 9):
        engine.add_request(f"{number}", {"prompt_token_ids": unique(number, 200)}, once, priority=first)
    # They do not fit beside each other and a prompt that is computed.
    for name, priority in (("late", 2**70), ("early", 1)):
        engine.add_request(name, {"prompt_token_ids": chats[name]}, once, priority=priority)
    found = {}
    while engine.has_unfinished_requests():
        found.update({output.request_id: output.num_cached_tokens for output in engine.step()})
    kept, lost = ("early", "late") if policy == "priority" else ("late", "early")
    assert found[kept] == 240
    assert found[lost] < 240
    engine.engine_core.shutdown()


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no session": ({PAUSE: "user"}, f"{SESSION} is None; it must be a str of 1 to 256 characters, or an int"),
    "an empty session": ({SESSION: ""}, f"{SESSION} is ''; it must be a str"),
    "a long session": ({SESSION: "x" * 257}, f"{SESSION} is '{'x' * 79}...; it must be a str"),
    "a strange session": ({SESSION: "\ud800"}, f"{SESSION} is .*; it must be a str"),
    "a real session": ({SESSION: 1.5}, f"{SESSION} is 1.5; it must be a str"),
    "a true session": ({SESSION: True}, f"{SESSION} is True; it must be a str"),
    "a list of sessions": ({SESSION: ["a"]}, rf"{SESSION} is \['a'\]; it must be a str"),
    "a pause of 3": ({SESSION: 1, PAUSE: 3}, f"{PAUSE} is 3; it must be a str of 1 to 64 characters"),
    "a long pause": ({SESSION: 1, PAUSE: "x" * 65}, f"{PAUSE} is 'x*'; it must be a str of 1 to 64"),
    "an end in words": ({SESSION: 1, END: "yes"}, f"{END} is 'yes'; it must be true or false"),
    "an end of 2": ({SESSION: 1, END: 2}, f"{END} is 2; it must be true or false"),
    "a list of ends": ({SESSION: 1, END: [1]}, rf"{END} is \[1\]; it must be true or false"),
    "a pause at the end": (
        {SESSION: 1, PAUSE: "user", END: 1},
        f"{PAUSE} is 'user'; it must be left out with",
    ),
    "another name": ({"kvpool_sesion": 1}, "kvpool_sesion is 1; it is none of those that kvpool has"),
}


def test_with_a_policy_wrong_arguments_fail_their_request_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sessions = Sessions("adaptive", monkeypatch)
    prompt = unique(0, 33)
    for said, wrong in WRONG.values():
        with pytest.raises(VLLMValidationError, match=wrong):
            sessions.found(prompt, said)
        # vLLM has noted the request before it fails, if the engine is in this process.
        sessions.engine.abort_request([f"{sessions._requests}-0"])
        assert not sessions.engine.has_unfinished_requests()
    assert sessions.found(prompt) == 0, "none has come to the scheduler"
    sessions.engine.engine_core.shutdown()
    # Where a request comes to the scheduler without that check, it counts as one of no session.
    for said, _ in WRONG.values():
        assert turn_of(mock.Mock(sampling_params=SamplingParams(extra_args=said))) is None
    assert [record.name for record in caplog.records if "kvpool_*" in record.getMessage()] == ["kvpool"]


def test_with_a_policy_the_process_of_an_engine_outlives_wrong_arguments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in (("VLLM_ENABLE_V1_MULTIPROCESSING", "1"), ("VLLM_PLUGINS", "kvpool")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(EVICTION, "adaptive")
    engine = make_engine(
        make(MODELS, "smallest"), kvpool=False, distributed_executor_backend=StubExecutor, block_size=16
    )
    ends = []
    for said in ({SESSION: ""}, {SESSION: "chat", END: True}, {PAUSE: "user"}, None):
        params = SamplingParams(max_tokens=1, ignore_eos=True, detokenize=False, extra_args=said)
        engine.add_request(f"{said}", {"prompt_token_ids": [4, 5]}, params)
        while engine.has_unfinished_requests():
            ends += [output.outputs[0].finish_reason for output in engine.step()]
    engine.engine_core.shutdown()
    assert ends == ["error", "length", "error", "length"]


def test_without_a_policy_sessions_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    sessions = Sessions("lru", monkeypatch)
    chat, other = unique(0, 161), unique(1, 161)
    sessions.found(other)
    sessions.found(chat, {SESSION: "chat", END: True})
    for said, _ in WRONG.values():
        sessions.found([4], said)
    sessions.found(unique(2, 400))
    assert sessions.found(other) == 80  # the first that was freed, and not what has ended
    sessions.engine.engine_core.shutdown()


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
