"""A whole vLLM on the CPU, in this process, with vLLM's scheduler memory and with kvpool's."""

from __future__ import annotations

import os
import random

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",  # the scheduler can be seen
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
)
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections import deque
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.v1.core import kv_cache_coordinator
from vllm.v1.core.sched import async_scheduler, scheduler
from vllm.v1.engine import core
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, FullAttentionSpec, SlidingWindowSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

from kvpool.integrations.vllm import install

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vllm.v1.core.sched.output import SchedulerOutput

MODELS = Path(__file__).parents[2] / "target" / "nano_models"
"""Where models are made, once."""

REQUESTS, TOKENS = 24, 24
"""Of a run: prompts, and tokens for each."""

REPLACED = [
    (kv_cache_coordinator, "BlockPool"),
    (scheduler, "KVCacheManager"),
    (core, "get_request_block_hasher"),
    (scheduler, "Scheduler"),
    (async_scheduler, "AsyncScheduler"),
]
"""The names that kvpool's plugin replaces."""


@contextmanager
def on_kvpool(on: bool = True) -> Iterator[None]:
    """Engines that are made in the body run on kvpool, or on vLLM's own classes."""
    if not on:
        yield
        return
    own = [getattr(module, name) for module, name in REPLACED]
    install()
    try:
        yield
    finally:
        for (module, name), was in zip(REPLACED, own, strict=True):
            setattr(module, name, was)


def make_engine(
    model: Path,
    *,
    kvpool: bool,
    asynchronous: bool = False,
    **options: Any,  # noqa: ANN401
) -> LLMEngine:
    """An engine over a nano model, with options of vLLM.

    `asynchronous` schedules a step before the last one is over: vLLM's default on GPUs, not on the CPU.
    """
    arguments = {
        "dtype": "float32",
        "enforce_eager": True,
        "block_size": 32,
        "kv_cache_memory_bytes": 64 << 20,
        "max_model_len": 2048,
        "max_num_seqs": 32,
        "disable_log_stats": True,
        **options,
    }
    config = EngineArgs(model=str(model), **arguments).create_engine_config()
    config.scheduler_config.async_scheduling = asynchronous
    with on_kvpool(kvpool):
        return LLMEngine.from_vllm_config(config, disable_log_stats=True)


def scheduler_of(engine: LLMEngine) -> Any:  # noqa: ANN401
    """The scheduler of an engine in this process."""
    return engine.engine_core.engine_core.scheduler


def run(
    engine: LLMEngine,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    prefix: str = "",
    extra_args: dict[str, Any] | None = None,
) -> tuple[dict[str, list[int]], int]:
    """The greedy tokens for each prompt by its number, and how many steps they took."""
    greedy = SamplingParams(
        temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, extra_args=extra_args
    )
    for number, prompt in enumerate(prompts):
        engine.add_request(f"{prefix}{number}", {"prompt_token_ids": list(prompt)}, greedy)
    found: dict[str, list[int]] = {}
    steps = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            found[output.request_id] = list(output.outputs[0].token_ids)
        steps += 1
    return found, steps


def token_after(length: int) -> int:
    """The token that the model without layers has after this many tokens."""
    return 4 + length * 7919 % 1000


class StubExecutor(Executor):  # type: ignore[misc]  # vLLM has no types here
    """A model that takes no time: the token after a prefix depends on its length alone.

    With a grammar it is the first that is allowed. The model has one layer of 8 heads of 128 values in 16
    bits, and memory for a million tokens.
    """

    supports_pp = False

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        """As on a GPU, where it is vLLM's default."""
        return True

    def _init_executor(self) -> None:
        self._prompts: dict[str, int] = {}
        self._outputs: deque[ModelRunnerOutput] = deque()

    def collective_rpc(self, method: Any, *_: Any, **__: Any) -> Any:  # noqa: ANN401
        """Answers what an engine asks its workers at the start."""
        answers: dict[str, Any] = {
            "get_kv_cache_spec": self.layers(
                block_size=self.vllm_config.cache_config.block_size,
                num_kv_heads=8,
                head_size=128,
                dtype=self.vllm_config.model_config.dtype,
            ),
            "determine_available_memory": 2**20 * 8 * 128 * 2 * 4,
            "get_supported_kv_cache_layouts": ["NHD"],
            "get_supported_tasks": ("generate",),
            "supports_draft_weight_updates": False,
        }
        return [answers.get(method)]

    def layers(self, **shape: Any) -> dict[str, Any]:  # noqa: ANN401
        """The layers of the model, by their names."""
        return {"full": FullAttentionSpec(**shape)}

    def compile_or_warm_up_model(self) -> None:
        """Does nothing."""

    def check_health(self) -> None:
        """Does nothing."""

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Any:  # noqa: ANN401
        """Computes nothing; the tokens come from `sample_tokens`."""
        computed = {new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs}
        for new in scheduler_output.scheduled_new_reqs:
            self._prompts[new.req_id] = len(new.prompt_token_ids)
        cached = scheduler_output.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        names = list(scheduler_output.num_scheduled_tokens)
        ends = {name: computed[name] + scheduler_output.num_scheduled_tokens[name] for name in names}
        self._outputs.append(
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: at for at, name in enumerate(names)},
                sampled_token_ids=self.sampled(ends, scheduler_output),
            )
        )
        if names:
            return _answer(None, non_block)
        return _answer(self._outputs.pop(), non_block)

    def sampled(self, ends: dict[str, int], _: SchedulerOutput) -> list[list[int]]:
        """The tokens of a step, by the length of each request after it."""
        return [[token_after(end)] if end >= self._prompts[name] else [] for name, end in ends.items()]

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:  # noqa: ANN401
        """A token for each request whose prompt is computed."""
        output = self._outputs.popleft()
        if grammar_output is not None:
            names = grammar_output.structured_output_request_ids
            for name, row in zip(names, grammar_output.grammar_bitmask, strict=True):
                allowed = (at for at in range(32 * len(row)) if int(row[at // 32]) >> at % 32 & 1)
                output.sampled_token_ids[output.req_id_to_index[name]] = [next(allowed)]
        return _answer(output, non_block)


class DraftingExecutor(StubExecutor):
    """The same, with drafts of three tokens, the first of which are right."""

    _drafts: DraftTokenIds

    def sampled(self, ends: dict[str, int], scheduler_output: SchedulerOutput) -> list[list[int]]:
        """The tokens of a step: of a draft those that are right, and one more."""
        sampled = []
        self._drafts = DraftTokenIds([], [])
        for name, end in ends.items():
            drafts = scheduler_output.scheduled_spec_decode_tokens.get(name, [])
            length = end - len(drafts)
            tokens = [token_after(length)] if length >= self._prompts[name] else []
            for draft in drafts:
                if draft != tokens[-1]:
                    break
                tokens.append(token_after(length + len(tokens)))
            sampled.append(tokens)
            length += len(tokens)
            if tokens:
                right = [token_after(length + at) for at in range(length % 4)]
                self._drafts.req_ids.append(name)
                self._drafts.draft_token_ids.append([*right, 3, 3, 3][:3])
        return sampled

    def take_draft_token_ids(self) -> DraftTokenIds:
        """The drafts after the last step."""
        return self._drafts


class WindowExecutor(StubExecutor):
    """The same, with a layer that looks back 70 tokens."""

    def layers(self, **shape: Any) -> dict[str, Any]:  # noqa: ANN401
        window = SlidingWindowSpec(**shape, sliding_window=70)
        return {**super().layers(**shape), "window": window}


class OnlyWindowExecutor(StubExecutor):
    """The same, with layers that look back 70 tokens alone."""

    def layers(self, **shape: Any) -> dict[str, Any]:  # noqa: ANN401
        return {"window": SlidingWindowSpec(**shape, sliding_window=70)}


class ChunkedExecutor(StubExecutor):
    """The same, with a layer that looks back to the last multiple of 64 tokens."""

    def layers(self, **shape: Any) -> dict[str, Any]:  # noqa: ANN401
        chunked = ChunkedLocalAttentionSpec(**shape, attention_chunk_size=64)
        return {**super().layers(**shape), "chunked": chunked}


def _answer(value: Any, non_block: bool) -> Any:  # noqa: ANN401
    if not non_block:
        return value
    future: Future[Any] = Future()
    future.set_result(value)
    return future


class Trace:
    """What a scheduler decided, with requests by the order in which they came."""

    def __init__(self, engine: LLMEngine) -> None:
        self.steps: list[Any] = []
        self.answers: list[Any] = []
        self.quiet = 0
        self._numbers: dict[str, int] = {}
        self._scheduler = scheduler_of(engine)
        self._own = self._scheduler.schedule
        self._scheduler.schedule = self._schedule
        self._own_update = self._scheduler.update_from_output
        self._scheduler.update_from_output = self._update

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
                "known": (
                    [*map(self._number, cached.all_token_ids)],
                    cached.num_output_tokens,
                    sorted(map(self._number, cached.resumed_req_ids)),
                ),
                "copies": output.kv_cache_block_copies,
            }
        )
        return output

    def _update(self, *arguments: Any) -> Any:  # noqa: ANN401
        answers = self._own_update(*arguments)
        self.answers.append(
            {
                client: [
                    (self._number(each.request_id), each.new_token_ids, each.finish_reason, each.stop_reason)
                    for each in answer.outputs
                ]
                for client, answer in answers.items()
            }
        )
        return answers

    @property
    def cached_tokens(self) -> int:
        """The tokens of all prompts that were found."""
        return sum(computed for step in self.steps for computed, _ in step["new"].values())

    @property
    def preemptions(self) -> int:
        """How often a request was preempted."""
        return sum(len(step["preempted"]) for step in self.steps)


def prompts(seed: int) -> list[list[int]]:
    """Prompts with shared prefixes of many lengths."""
    numbers = random.Random(seed)  # noqa: S311
    shared = [numbers.randrange(4, 1000) for _ in range(400)]
    return [
        shared[: numbers.choice((0, 40, 64, 130, 256, 400))]
        + [numbers.randrange(4, 1000) for _ in range(numbers.randrange(1, 100))]
        for _ in range(REQUESTS)
    ]
