"""A whole vLLM engine on kvpool beside the same on vLLM's own classes, in one process.

`make bench-vllm-engine` runs it. With the model that takes no time all of a run is the engine's host part;
the nano model runs on the CPU. A round is a whole run: requests are added, and steps are made until all
have their tokens, which must be the same on both.
"""

from __future__ import annotations

import random
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from harness import Case, Report
from nano_models import make
from vllm_engine import MODELS, StubExecutor, make_engine, run, scheduler_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.v1.engine.llm_engine import LLMEngine

STUB: dict[str, Any] = {
    "block_size": 16,
    "distributed_executor_backend": StubExecutor,
    "max_model_len": 65_536,
    "max_num_batched_tokens": 16_384,
    "max_num_seqs": 256,
}
NANO: dict[str, Any] = {
    "kv_cache_memory_bytes": 1 << 30,
    "max_model_len": 16_384,
    "max_num_batched_tokens": 8192,
    "max_num_seqs": 256,
}

Prompts = list[list[int]]


class Pair:
    """Engines with the same model on vLLM's classes and on kvpool's."""

    def __init__(self, options: dict[str, Any]) -> None:
        """Makes both."""
        model = make(MODELS, "smallest")
        self._engines = {on: make_engine(model, kvpool=on, **options) for on in (False, True)}
        self._runs = 0

    def compare(
        self, report: Report, question: str, prompts: Callable[[], Prompts], tokens: int, least: float
    ) -> None:
        """Adds a row: new prompts for each round, the same for both engines."""
        rounds: list[Prompts] = []
        answers: dict[bool, list[Any]] = {False: [], True: []}

        def case(on: bool) -> Case:
            def prepare() -> None:
                while len(rounds) <= len(answers[on]):
                    rounds.append(prompts())

            def once(_: int) -> None:
                answers[on].append(self._run(self._engines[on], rounds[len(answers[on])], tokens))

            return Case(once, prepare)

        report.compare(question, case(True), case(False), alternative="vLLM", least_ratio=least)
        assert answers[True] == answers[False]
        if report.wants(question):
            shares = ", ".join(f"{name} {share:.0%}" for name, share in self._shares(prompts(), tokens))
            report.note(f"of vLLM's own run, {question}: {shares}")

    def _shares(self, prompts: Prompts, tokens: int) -> list[tuple[str, float]]:
        """How much of a run on vLLM's own classes the calls take that kvpool replaces."""
        engine = self._engines[False]
        manager = scheduler_of(engine).kv_cache_manager
        took = {}
        calls = [
            ("hashes", engine.engine_core.engine_core, "request_block_hasher"),
            ("prefixes", manager.coordinator, "find_longest_cache_hit"),
            ("steps and blocks", manager, "allocate_slots"),
            ("frees", manager, "free"),
        ]
        with ExitStack() as undo:
            for name, place, attribute in calls:
                own = getattr(place, attribute)
                undo.callback(setattr, place, attribute, own)
                took[name] = 0.0

                def timed(*arguments: Any, name: str = name, own: Any = own, **options: Any) -> Any:  # noqa: ANN401
                    began = time.perf_counter()
                    try:
                        return own(*arguments, **options)
                    finally:
                        took[name] += time.perf_counter() - began

                setattr(place, attribute, timed)
            began = time.perf_counter()
            self._run(engine, prompts, tokens)
            whole = time.perf_counter() - began
        return [(name, seconds / whole) for name, seconds in took.items()]

    def _run(self, engine: LLMEngine, prompts: Prompts, tokens: int) -> Any:  # noqa: ANN401
        self._runs += 1
        found, steps = run(engine, prompts, tokens, f"{self._runs}-")
        return sorted(found.values()), steps


def main() -> None:
    """Prints the table."""
    report = Report("A vLLM engine on kvpool, microseconds a run")
    numbers = random.Random(5)

    def tokens(count: int) -> list[int]:
        return [numbers.randrange(4, 1000) for _ in range(count)]

    def decoding() -> Prompts:
        return [tokens(64) for _ in range(256)]

    def shared() -> Prompts:
        prefixes = [tokens(7680) for _ in range(16)]
        return [prefixes[number % 16] + tokens(512) for number in range(256)]

    tools = tokens(4096)

    def agents() -> Prompts:
        return [tools + tokens(256) for _ in range(256)]

    def unshared() -> Prompts:
        return [tokens(2048) for _ in range(256)]

    ahead = Pair({**STUB, "asynchronous": True})
    ahead.compare(report, "no model, asynchronous: 256 requests decode 200 tokens", decoding, 200, 1.4)
    stub = Pair(STUB)
    stub.compare(report, "no model: 256 requests decode 200 tokens", decoding, 200, 1.4)
    stub.compare(report, "no model: 256 prompts of 8,192, 16 prefixes of 7,680", shared, 4, 2.2)
    stub.compare(report, "no model: 256 prompts of 4,096 shared and 256 own", agents, 16, 1.7)
    stub.compare(report, "no model: 256 prompts of 2,048, none shared", unshared, 4, 1.7)
    nano = Pair(NANO)
    nano.compare(report, "nano model: 256 requests decode 50 tokens", decoding, 50, 1.15)
    nano.compare(report, "nano model: 256 prompts of 4,096 shared and 256 own", agents, 4, 1.15)
    report.finish()


if __name__ == "__main__":
    main()
