"""The questions that every prefix cache is asked."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from harness import Case

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray
    from prefix_sides import Side

CHUNK = 64
CHUNKS = 16
EVICTIONS = 8
VOCABULARY = 150_000


def tokens_of(count: int, seed: int = 0) -> NDArray[np.int32]:
    """Random tokens."""
    return np.random.default_rng(seed).integers(0, VOCABULARY, count, dtype=np.int32)


def lookup(side: Side, count: int) -> Case:
    """Finds a cached prompt of `count` tokens, keeps it and gives it up."""
    prompt = side.prompt(tokens_of(count))
    side.insert(prompt)
    assert side.lookup(prompt) == count

    def run(number: int) -> None:
        for _ in range(number):
            side.lookup(prompt)

    return Case(run)


def publish(side: Side, prefix: int) -> Case:
    """Adds chunks of a request, one after another, behind a cached prefix."""
    tokens = tokens_of(prefix)
    if prefix:
        side.insert(side.prompt(tokens))
    chunks = list(tokens_of(CHUNK * CHUNKS, seed=1).reshape(CHUNKS, CHUNK))
    steps: list[Iterator[None]] = []

    def prepare() -> None:
        for step in steps:
            for _ in step:
                pass
            assert side.cached() == prefix + CHUNK * CHUNKS
            side.evict(CHUNK * CHUNKS)
        steps[:] = [side.chunks(tokens, chunks)]
        next(steps[0])

    def run(number: int) -> None:
        step = steps[0]
        for _ in range(number):
            next(step)

    return Case(run, prepare, CHUNKS)


def insert(side: Side, count: int) -> Case:
    """Adds a prompt of which nothing is cached."""
    prompt = side.prompt(tokens_of(count))
    side.insert(prompt)
    return Case(lambda _: side.insert(prompt), lambda: side.evict(count))


def evict(side: Side, leaves: int, size: int) -> Case:
    """Evicts 64 tokens of `leaves` leaves of `size` tokens."""
    made = 0

    def fill() -> None:
        nonlocal made
        missing = leaves - side.cached() // size
        tokens = np.zeros((missing, size), dtype=np.int32)
        tokens[:, 0] = np.arange(made, made + missing)
        made += missing
        for leaf in tokens:
            side.insert(side.prompt(leaf))

    fill()

    def run(number: int) -> None:
        for _ in range(number):
            side.evict(CHUNK)

    return Case(run, fill, EVICTIONS)
