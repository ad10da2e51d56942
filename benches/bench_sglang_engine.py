"""SGLang's scheduler on kvpool beside the same on SGLang's own classes, in one process on the CPU.

`make bench-sglang-engine` runs it. The model takes no time, so that all of a run is the engine's host part:
the event loop of `Scheduler`, from requests with their tokens to what it sends to the detokenizer. A round is
a whole run of it, and both must make the same batches. Prompts stay in the prefix cache, which is full after
some rounds.
"""

from __future__ import annotations

import json
import os
import random
import tempfile
import time
from array import array
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from harness import Case, Report
from typing_extensions import Self

if TYPE_CHECKING:
    from collections.abc import Callable

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 1024,
    "max_position_embeddings": 16_384,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
}
"""A model that is never called: the engine sizes its pools by it."""

ENGINE: dict[str, Any] = {
    "load_format": "dummy",
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "skip_tokenizer_init": True,
    "disable_cuda_graph": True,
    "max_total_tokens": 1 << 19,
    "max_running_requests": 256,
    "context_length": 8192,
    "chunked_prefill_size": 8192,
    "random_seed": 1,
    "log_level": "error",
}

PARTS = ("prefix cache", "pools", "next batch", "results", "load reports", "new requests")
CACHE_CALLS = (
    "checkpoint_into_tree",
    "evict",
    "evict_for_alloc",
    "evictable_size",
    "free_kv_row",
    "full_evictable_size",
    "lock",
    "match_prefix",
    "path_device_indices",
    "protected_size",
    "touch_prefix",
    "unlock",
)
SLOT_CALLS = (
    "alloc",
    "alloc_decode",
    "alloc_extend",
    "available_size",
    "free",
    "free_group_begin",
    "free_group_end",
    "free_segment",
    "free_segments",
)
ROW_CALLS = ("alloc", "available_size", "free", "write")
"""What SGLang calls of each."""

Prompts = list["array[int]"]


@dataclass
class Run:
    """What a scheduler decided, and how much time of a processor that took."""

    seconds: float = 0.0
    batches: list[Any] = field(default_factory=list)
    answers: dict[str, int] = field(default_factory=dict)


class Loop:
    """A scheduler with requests from a list, and a model that answers at once."""

    def __init__(self, options: Any, *, shares_runtime: bool) -> None:  # noqa: ANN401 - of SGLang
        """Makes the scheduler; `shares_runtime` if there is one in the process."""
        module = import_module("sglang.srt.managers.scheduler")
        ports = import_module("sglang.srt.server_args").PortArgs.init_new(options)
        with ExitStack() as stack:
            for part in ("init_parallel_runtime", "init_layer_runtime") if shares_runtime else ():
                stack.enter_context(mock.patch.object(module.bootstrap, part))
            self.scheduler = module.Scheduler(options, ports)
        scheduler = self.scheduler
        self._result = import_module("sglang.srt.managers.utils").GenerationBatchResult
        self._waiting: list[Any] = []
        self._run = Run()
        self._tokens = torch.full((ENGINE["max_running_requests"],), 7)
        self._check = scheduler.on_idle
        scheduler.on_idle = self._stop
        scheduler.model_worker.forward_batch_generation = self._forward
        scheduler.request_receiver = SimpleNamespace(recv_requests=self._take)
        scheduler.output_streamer.send_to_detokenizer.send_output = self._answer

    def _take(self, **_: object) -> list[Any]:
        taken, self._waiting = self._waiting, []
        return taken

    def _forward(self, batch: Any, **_: object) -> Any:  # noqa: ANN401
        extends = batch.forward_mode.is_extend()
        lengths = (tuple(batch.prefix_lens), tuple(batch.extend_lens)) if extends else batch.seq_lens_sum
        self._run.batches.append((extends, [req.rid for req in batch.reqs], lengths))
        return self._result(next_token_ids=self._tokens[: len(batch.reqs)])

    def _answer(self, answer: Any, *_: object) -> None:  # noqa: ANN401
        self._run.answers.update(zip(answer.rids, answer.completion_tokens, strict=True))

    def _stop(self) -> None:
        self.scheduler.gracefully_exit = True

    def run(self, requests: list[Any]) -> Run:
        """Serves all requests, which reach the scheduler together."""
        self._waiting, self._run = requests, Run()
        self.scheduler.gracefully_exit = False
        start = time.thread_time()
        self.scheduler.run_event_loop()
        self._run.seconds = time.thread_time() - start
        assert len(self._run.answers) == len(requests)
        # SGLang looks for lost slots, and ends the process if there are some.
        self._check()
        return self._run


def request(name: str, prompt: array[int], tokens: int) -> Any:  # noqa: ANN401
    """A request as SGLang's tokenizer sends it."""
    io_struct = import_module("sglang.srt.managers.io_struct")
    params = import_module("sglang.srt.sampling.sampling_params")
    sampling = params.SamplingParams(max_new_tokens=tokens, temperature=0, ignore_eos=True)
    sampling.normalize(None)
    return io_struct.TokenizedGenerateReqInput(
        rid=name,
        input_text=None,
        input_ids=prompt,
        input_embeds=None,
        mm_inputs=None,
        token_type_ids=None,
        sampling_params=sampling,
        return_logprob=False,
        logprob_start_len=-1,
        top_logprobs_num=0,
        token_ids_logprob=None,
        stream=False,
    )


class Pair:
    """Schedulers over SGLang's classes and over kvpool's."""

    def __init__(self, page_size: int) -> None:
        """Makes both."""
        self._folder = Path(tempfile.mkdtemp())
        (self._folder / "config.json").write_text(json.dumps(CONFIG), "utf-8")
        self._page_size = page_size
        self.theirs = self._make({}, shares_runtime=False)
        import_module("sglang.srt.plugins").load_plugins()
        self.ours = self._make({"radix_cache_backend": "kvpool"}, shares_runtime=True)
        core = type(self.ours.scheduler.tree_cache.tree_core).__name__
        assert core == "KvTreeCore", "set SGLANG_PLUGINS=kvpool"
        self._rounds = 0

    def _make(self, more: dict[str, Any], *, shares_runtime: bool) -> Loop:
        context = import_module("sglang.srt.runtime_context")
        options = import_module("sglang.srt.server_args").ServerArgs(
            model_path=str(self._folder), page_size=self._page_size, **ENGINE, **more
        )
        # The process has one configuration: they differ in what is read while a scheduler is made alone.
        ranks = context.SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0)
        context.publish(options, role="scheduler", ranks=ranks)
        return Loop(options, shares_runtime=shares_runtime)

    def compare(self, report: Report, question: str, prompts: Callable[[], Prompts], tokens: int) -> None:
        """Adds a row: new prompts for each round, the same for both."""
        question = f"{question}, pages of {self._page_size}"
        rounds: list[tuple[str, Prompts]] = []
        runs: dict[Loop, list[Run]] = defaultdict(list)

        def case(loop: Loop) -> Case:
            waiting: list[Any] = []

            def prepare() -> None:
                while len(rounds) <= len(runs[loop]):
                    self._rounds += 1
                    rounds.append((f"{self._rounds:03}", prompts()))
                name, made = rounds[len(runs[loop])]
                waiting[:] = [request(f"{name}-{at:05}", prompt, tokens) for at, prompt in enumerate(made)]

            def once(_: int) -> None:
                runs[loop].append(loop.run(list(waiting)))

            return Case(once, prepare)

        report.compare(question, case(self.ours), case(self.theirs), alternative="SGLang")
        ours, theirs = runs[self.ours], runs[self.theirs]
        assert [(run.batches, run.answers) for run in ours] == [(run.batches, run.answers) for run in theirs]
        if not ours:
            return
        ratio = median(run.seconds for run in theirs) / median(run.seconds for run in ours)
        report.note(
            f"{question}, processor time: {_rates(ours)} on kvpool, {_rates(theirs)} on SGLang's classes, "
            f"{ratio:.2f} times"
        )
        shares = {}
        for loop in (self.ours, self.theirs):
            made = case(loop)
            assert made.prepare is not None
            made.prepare()
            with Shares(loop.scheduler) as shares[loop]:
                made.run(1)
            seconds = runs[loop][-1].seconds
            parts = ", ".join(f"{part} {shares[loop].spent[part] / seconds:.0%}" for part in PARTS)
            report.note(f"    of it {'kvpool' if loop is self.ours else 'SGLang'}: {parts}")


class Shares:
    """Adds up the time within each of `PARTS`, without what one calls of another.

    A watched call takes about half a microsecond more, so that shares are a little too large.
    """

    def __init__(self, scheduler: Any) -> None:  # noqa: ANN401 - of SGLang
        """Watches nothing yet."""
        self.spent = dict.fromkeys(PARTS, 0.0)
        self._within: list[float] = []
        self._owners: dict[str, list[tuple[Any, tuple[str, ...]]]] = {
            "prefix cache": [(scheduler.tree_cache, CACHE_CALLS)],
            "pools": [
                (scheduler.token_to_kv_pool_allocator, SLOT_CALLS),
                (scheduler.req_to_token_pool, ROW_CALLS),
            ],
            "next batch": [(scheduler, ("get_next_batch_to_run",))],
            "results": [(scheduler, ("process_batch_result",))],
            "load reports": [(scheduler, ("publish_load_snapshot",))],
            "new requests": [(scheduler, ("process_input_requests",))],
        }

    def __enter__(self) -> Self:
        """Watches."""
        self._stack = ExitStack()
        for part, owners in self._owners.items():
            for owner, names in owners:
                for name in names:
                    if hasattr(owner, name):
                        watched = self._watched(part, getattr(owner, name))
                        self._stack.enter_context(mock.patch.object(owner, name, watched))
        return self

    def __exit__(self, *_: object) -> None:
        """Watches no more."""
        self._stack.close()

    def _watched(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **options: Any) -> Any:  # noqa: ANN401
            start = time.thread_time()
            self._within.append(0.0)
            try:
                return call(*args, **options)
            finally:
                took = time.thread_time() - start
                self.spent[part] += took - self._within.pop()
                if self._within:
                    self._within[-1] += took

        return watched


def _rates(runs: list[Run]) -> str:
    requests = median(len(run.answers) / run.seconds for run in runs)
    steps = median(len(run.batches) / run.seconds for run in runs)
    return f"{requests:,.0f} requests and {steps:,.0f} steps a second"


def main() -> None:
    """Prints the table."""
    torch.set_num_threads(1)
    report = Report("SGLang's scheduler on kvpool, microseconds a run")
    page_size = int(os.environ.get("KVPOOL_BENCH_PAGE_SIZE", "1"))
    pair = Pair(page_size)
    numbers = random.Random(5)

    def tokens(count: int) -> array[int]:
        return array("q", numbers.choices(range(4, 1000), k=count))

    tools = tokens(4096)
    pair.compare(report, "256 requests decode 128 tokens", lambda: [tokens(64) for _ in range(256)], 128)
    pair.compare(
        report,
        "256 prompts of 4,096 shared and 256 own",
        lambda: [tools + tokens(256) for _ in range(256)],
        4,
    )
    pair.compare(report, "2,048 prompts of 512, none shared", lambda: [tokens(512) for _ in range(2048)], 4)
    report.finish()


if __name__ == "__main__":
    main()
