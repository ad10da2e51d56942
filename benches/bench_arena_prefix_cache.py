"""The prefix cache of an arena beside `PrefixCache`, with one full group, and with a window beside it."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from harness import Case, Report
from prefix_cases import CHUNK, CHUNKS, tokens_of

import kvpool

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from kvpool.typing import Policy

LONG = 131_072
PAGE = 16
WINDOW = 1024
POLICY: Policy = "lru"
BESIDE = "PrefixCache"
K = [kvpool.Plane("k", "uint8", (8,))]
FULL = kvpool.Group("full", "full", [0], K)
WINDOWED = kvpool.Group("window", "window", [1], K, tokens=WINDOW)


class Units:
    """A cache of an arena with `capacity` tokens for each of its groups."""

    def __init__(self, capacity: int, *groups: kvpool.Group) -> None:
        """Makes it empty."""
        layout = kvpool.CacheLayout(list(groups), page_size=PAGE)
        # Slabs of 64 pages.
        slab_bytes = 64 * PAGE * 8
        arena_bytes = capacity * len(groups) * 8 + (1 + len(groups)) * slab_bytes
        self.arena = kvpool.CacheArena(layout, arena_bytes, "cpu", granularity=slab_bytes)
        self.names = [group.name for group in groups]
        self.cache = kvpool.ArenaPrefixCache(self.arena, policy=POLICY)

    def take(self, tokens: int) -> dict[str, list[Any]]:
        """Takes units for so many tokens."""
        units = self.arena.alloc(dict.fromkeys(self.names, tokens // PAGE))
        if units is None:
            raise MemoryError(f"no units for {tokens} tokens")
        return units

    def insert(self, tokens: torch.Tensor) -> None:
        """Publishes a prompt."""
        with self.cache.match(tokens, max_tokens=0) as lease:
            lease.publish(tokens, self.take(len(tokens)))


class Slots:
    """A `PrefixCache` of `capacity` tokens."""

    def __init__(self, capacity: int) -> None:
        """Makes it empty."""
        self.allocator = kvpool.TokenToKVPoolAllocator(capacity, "cpu", PAGE)
        self.cache = kvpool.PrefixCache(self.allocator, policy=POLICY)

    def take(self, tokens: int) -> torch.Tensor:
        """Takes slots for so many tokens."""
        slots = self.allocator.alloc(tokens)
        if slots is None:
            raise MemoryError(f"no slots for {tokens} tokens")
        return slots

    def insert(self, tokens: torch.Tensor) -> None:
        """Publishes a prompt."""
        with self.cache.match(tokens, limit=0) as lease:
            lease.publish(tokens, self.take(len(tokens)))


def lookup(side: Units | Slots, count: int, read: Callable[[Any], object]) -> Case:
    """Finds a cached prompt of `count` tokens, reads it, and gives it up."""
    prompt = torch.from_numpy(tokens_of(count))
    side.insert(prompt)

    def run(number: int) -> None:
        for _ in range(number):
            lease = side.cache.match(prompt)
            read(lease)
            lease.release()

    return Case(run)


def publish(side: Units | Slots, prefix: int) -> Case:
    """Publishes chunks of a request, one after another, behind a cached prefix, with units that it has."""
    begin: NDArray[np.int32] = tokens_of(prefix)
    side.insert(torch.from_numpy(begin))
    number = itertools.count(1)
    steps: list[tuple[Any, torch.Tensor, Any]] = []

    def prepare() -> None:
        new = tokens_of(CHUNK * CHUNKS, seed=next(number))
        whole = torch.from_numpy(np.concatenate([begin, new]))
        lease = side.cache.match(whole)
        taken = [side.take(CHUNK) for _ in range(CHUNKS)]
        steps[:] = [
            (
                lease,
                whole[: prefix + end]
                if isinstance(side, Units)
                else whole[prefix + end - CHUNK : prefix + end],
                units,
            )
            for end, units in zip(range(CHUNK, CHUNK * CHUNKS + 1, CHUNK), taken, strict=True)
        ]

    def run(_: int) -> None:
        for lease, tokens, units in steps:
            lease.publish(tokens, units)

    return Case(run, prepare, 1)


def full_cache(side: Units | Slots, capacity: int, tokens: int) -> Case:
    """Publishes prompts in a cache that is full: each evicts as many tokens as it has."""
    number = itertools.count()

    def prompt() -> torch.Tensor:
        made = np.full(tokens, 1, dtype=np.int32)
        made[0] = next(number)
        return torch.from_numpy(made)

    for _ in range(2 * capacity // tokens):
        side.insert(prompt())
    prompts: list[torch.Tensor] = []

    def prepare() -> None:
        prompts[:] = [prompt() for _ in range(CHUNKS)]

    def run(_: int) -> None:
        for made in prompts:
            side.insert(made)

    return Case(run, prepare, 1)


def ask(report: Report, question: str, case: Callable[..., Case], capacity: int, *about: Any) -> None:  # noqa: ANN401
    """Asks both caches the same."""
    if report.wants(question):
        ours, theirs = case(Units(capacity, FULL), *about), case(Slots(capacity), *about)
        report.compare(question, ours, theirs, alternative=BESIDE)


def ask_with_window(
    report: Report,
    question: str,
    case: Callable[..., Case],
    capacity: int,
    *about: Any,  # noqa: ANN401
) -> None:
    """Asks a cache with a window and one without it."""
    if report.wants(question):
        ours, theirs = (case(Units(capacity, *groups), *about) for groups in ((FULL, WINDOWED), (FULL,)))
        report.compare(question, ours, theirs, alternative="without the window")


def main() -> None:
    """Runs all questions."""
    report = Report("Prefix cache of an arena, CPU")
    torch.set_num_threads(1)
    for count in (64 * PAGE, 512 * PAGE, LONG):
        ask(report, f"match + release of {count:,} tokens", lookup, 2 * count, count, len)
    for count in (64 * PAGE, LONG):
        question = f"match + units (slots) + release of {count:,} tokens"
        if report.wants(question):
            ours = lookup(Units(2 * count, FULL), count, lambda lease: lease.units("full").units)
            theirs = lookup(Slots(2 * count), count, lambda lease: lease.slots)
            report.compare(question, ours, theirs, alternative=BESIDE)
    for prefix in (0, LONG):
        question = f"{CHUNKS} publications of {CHUNK} tokens behind {prefix:,}"
        ask(report, question, publish, 2 * LONG, prefix)
    for tokens in (64, 1024):
        question = f"{CHUNKS} prompts of {tokens:,} tokens in a full cache"
        ask(report, question, full_cache, LONG, LONG, tokens)
    for count in (512 * PAGE, LONG):
        question = f"match + release of {count:,} tokens, with a window of {WINDOW:,}"
        ask_with_window(report, question, lookup, 2 * count, count, len)
    question = f"{CHUNKS} prompts of 1,024 tokens in a full cache, with a window of {WINDOW:,}"
    ask_with_window(report, question, full_cache, LONG, LONG, 1024)
    report.finish()


if __name__ == "__main__":
    main()
