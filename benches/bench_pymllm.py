"""pymllm's prefix cache over kvpool beside its own, each behind the surface that its runner uses.

Both are on kvpool's allocator. pymllm comes from the folder that `PYMLLM_PATH` names.
"""

from __future__ import annotations

import random
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import torch
from harness import Case, Report, repeated

import kvpool

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "python" / "support"))

SHARED = 576
OWN = 64
LONG = 131_072
TURNS = 2_048
VOCABULARY = 150_000
PYMLLM = "pymllm's RadixCache"


class Side:
    """A cache with leaves of 64 tokens behind a shared prefix of 576."""

    def __init__(self, kind: Any, leaves: int, spare: int = 8_192) -> None:  # noqa: ANN401 - a class of either
        from pymllm.mem_cache.base_prefix_cache import RadixKey  # noqa: PLC0415 - once it is on the path

        self.key = RadixKey
        self.random = random.Random(leaves)
        self.allocator = kvpool.TokenToKVPoolAllocator(SHARED + (leaves + spare) * OWN, "cpu")
        self.cache = kind(token_to_kv_pool_allocator=self.allocator)
        self.shared = self.tokens(SHARED)
        self.shared_slots = self.take(SHARED)
        self.cache.insert(self.key(self.shared), self.shared_slots)
        self.made = 0
        self.waiting: list[tuple[Any, torch.Tensor]] = []
        self.add(leaves)

    def tokens(self, count: int) -> list[int]:
        """Random tokens."""
        return [self.random.randrange(VOCABULARY) for _ in range(count)]

    def take(self, count: int) -> torch.Tensor:
        """New slots, as the runner passes them."""
        slots = self.allocator.alloc(count)
        assert slots is not None, "there are enough"
        return slots.to(torch.int64)

    def offer(self, count: int) -> None:
        """Keys and slots of new leaves."""
        for _ in range(count):
            slots = torch.cat([self.shared_slots, self.take(OWN)])
            self.made += 1  # the first token of its own is like no other's
            self.waiting.append((self.key([*self.shared, self.made, *self.tokens(OWN - 1)]), slots))

    def insert(self) -> None:
        """Adds what was offered last."""
        self.last = self.waiting.pop()
        assert self.cache.insert(*self.last).prefix_len == SHARED

    def add(self, count: int) -> None:
        """Adds leaves."""
        for _ in range(count):
            self.offer(1)
            self.insert()


def hit(side: Side) -> Case:
    """A prompt of 640 tokens."""
    key, _ = side.last
    assert side.cache.match_prefix(key).prefix_len == SHARED + OWN
    return Case(repeated(lambda: side.cache.match_prefix(key)))


def leaf(side: Side) -> Case:
    """A new leaf behind the shared prefix; as many leave between the rounds."""

    def prepare() -> None:
        side.cache.evict(16 * OWN)
        side.offer(16)

    return Case(repeated(side.insert), prepare, 16)


def locks(side: Side) -> Case:
    """The lock of a hit and its end."""
    node, cache = side.cache.match_prefix(side.last[0]).last_node, side.cache

    def run(number: int) -> None:
        for _ in range(number):
            token = cache.inc_lock_ref(node)
            cache.dec_lock_ref(node, token)

    return Case(run)


def eviction(side: Side, leaves: int, tokens: int, calls: int) -> Case:
    """The oldest leaves, which are replaced between the rounds."""
    return Case(repeated(lambda: side.cache.evict(tokens)), lambda: side.add(leaves * calls), calls)


class Prompt:
    """A long prompt, in one node or in turns."""

    def __init__(self, kind: Any, turn: int) -> None:  # noqa: ANN401 - a class of either
        from pymllm.mem_cache.base_prefix_cache import RadixKey  # noqa: PLC0415 - once it is on the path

        generator = random.Random(turn)
        tokens = [generator.randrange(VOCABULARY) for _ in range(LONG)]
        allocator = kvpool.TokenToKVPoolAllocator(LONG, "cpu")
        slots = allocator.alloc(LONG)
        assert slots is not None, "there are enough"
        self.cache = kind(token_to_kv_pool_allocator=allocator)
        # pymllm's takes up to a second.
        self.calls = 8 if hasattr(self.cache, "_tree") else 1
        self.slots = slots.to(torch.int64)
        self.key = RadixKey(tokens)
        # Ends of turns are found by look-ups of them, from the last one on.
        self.cache.insert(self.key, self.slots)
        for end in range(LONG - turn, 0, -turn):
            self.cache.match_prefix(self.key[:end])

    def match(self) -> Case:
        """Finds the whole prompt."""
        assert self.cache.match_prefix(self.key).prefix_len == LONG
        return Case(repeated(lambda: self.cache.match_prefix(self.key)), calls=self.calls)

    def insert(self) -> Case:
        """Inserts what is cached."""
        return Case(repeated(lambda: self.cache.insert(self.key, self.slots)), calls=self.calls)


def request(kind: Any, length: int, steps: int) -> Case:  # noqa: ANN401 - a class of either
    """The runner's work for a request without the model: admission, insertion, decode steps, end."""
    import pymllm_engine  # noqa: PLC0415 - once it is on the path
    from pymllm.orchestrator import model_runner_process  # noqa: PLC0415

    model_runner_process.RadixCache = kind
    engine = pymllm_engine.Engine(1 << 19, 8, 2 * length, strict=False)
    generator = random.Random(length)
    shared = [generator.randrange(VOCABULARY) for _ in range(length - OWN)]
    prompts: list[list[int]] = []

    def prepare() -> None:
        prompts[:] = [[*shared, *(generator.randrange(VOCABULARY) for _ in range(OWN))] for _ in range(4)]

    def run(number: int) -> None:
        for prompt in prompts[:number]:
            engine.pass_through(prompt, steps)

    prepare()
    run(1)
    return Case(run, prepare, 4)


def memory(kind: Any, leaves: int = 50_000) -> float:  # noqa: ANN401 - a class of either
    """Bytes of a leaf: those that Python counts, and those that a tree in Rust counts."""
    side = Side(kind, 1, leaves + 1)
    side.offer(leaves)
    keys = [key for key, _ in side.waiting]
    tracemalloc.start()
    before, counted = tracemalloc.get_traced_memory()[0], _counted(side.cache)
    while side.waiting:
        key, slots = side.waiting.pop()
        # The runner keeps neither.
        side.cache.insert(side.key([*key.token_ids]), slots)
    after = tracemalloc.get_traced_memory()[0] + _counted(side.cache) - counted
    tracemalloc.stop()
    # PyTorch's tensors are not Python's: each leaf of pymllm's keeps one of int64.
    tensors = 0 if hasattr(side.cache, "_tree") else leaves * OWN * 8
    del keys
    return (after - before + tensors) / leaves


def _counted(cache: Any) -> int:  # noqa: ANN401 - a class of either
    return int(cache._tree.stats()["bytes"]) if hasattr(cache, "_tree") else 0  # noqa: SLF001 - see `memory`


def main() -> None:
    """Asks both sides the same questions."""
    report = Report("pymllm: the prefix cache, behind the surface of its runner")
    # Threads of one side that wait for work would take the processor from the other.
    torch.set_num_threads(1)
    import pymllm_engine  # noqa: PLC0415 - found by then

    if not (Path(pymllm_engine.FOLDER) / "pymllm" / "mem_cache").is_dir():
        report.note("skipped: PYMLLM_PATH names no folder with the package pymllm")
        return report.finish()
    pymllm_engine.need_pymllm()
    from pymllm.mem_cache.radix_cache import RadixCache as Theirs  # noqa: PLC0415 - once it is on the path

    from kvpool.integrations.pymllm import RadixCache as Ours  # noqa: PLC0415

    for leaves in (1_000, 10_000, 50_000):
        ours, theirs = Side(Ours, leaves), Side(Theirs, leaves)
        at = f"at {leaves:,} leaves"
        for question, case, limit in (
            (f"match, hit of 640 tokens in a list, {at}", hit, 10),
            (f"insert of a new leaf, {at}", leaf, 12),
            (f"lock + unlock, {at}", locks, 1),
        ):
            report.compare(question, case(ours), case(theirs), alternative=PYMLLM, limit_us=limit)
        for question, count, limit_us in (
            (f"evict 1 token, {at}", 1, 10),
            (f"evict a tenth, {at}", leaves // 10, 15_000 if leaves == 50_000 else None),
        ):
            tokens = 1 if count == 1 else count * OWN
            cases = [eviction(side, count, tokens, 8 if count == 1 else 1) for side in (ours, theirs)]
            report.compare(question, *cases, alternative=PYMLLM, limit_us=limit_us)
    for where, turn in (("one node", LONG), (f"{TURNS:,} nodes", LONG // TURNS)):
        ours_long, theirs_long = Prompt(Ours, turn), Prompt(Theirs, turn)
        for name in ("match", "insert"):
            cases = [getattr(prompt, name)() for prompt in (ours_long, theirs_long)]
            limit_us = 1_000 if name == "match" else None
            question = f"{name} again, {LONG:,} tokens in a list, {where}"
            report.compare(question, *cases, alternative=PYMLLM, limit_us=limit_us)
    for length, steps in ((1_024, 0), (1_024, 16), (16_384, 0)):
        question = f"a request of {length:,} tokens, {OWN} new, {steps} decode steps, all of the runner"
        if report.wants(question):
            cases = [request(kind, length, steps) for kind in (Ours, Theirs)]
            report.compare(question, *cases, alternative=PYMLLM)
    report.note(f"bytes a leaf of {OWN} tokens: kvpool {memory(Ours):,.0f}, {PYMLLM} {memory(Theirs):,.0f}")
    return report.finish()


if __name__ == "__main__":
    main()
