"""Policies of eviction in Python, for the simulator alone: the protocol, and a base of ranked leaves."""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from kvpool.tools.traces import Trace


class LookUp(NamedTuple):
    """A request that looks its prompt up.

    Attributes:
        request: Number of the request in the trace.
        at_s: Its arrival in seconds.
        session: Number of its session; -1 if the trace does not say.
        path: The blocks of its prompt. A number names a block with everything before it.
        found: The blocks of it that were found, from the first one on.
    """

    request: int
    at_s: float
    session: int
    path: list[int]
    found: int


@dataclass(frozen=True)
class Setting:
    """What a policy is made for.

    Attributes:
        capacity: Blocks that are cached at most.
        trace: The trace. A policy that can run in an engine does not look at requests to come.
        paths: For each request the numbers of its prompt's blocks.
        saved_s: The seconds that are saved if the block at each place of a prompt is found, float64.
    """

    capacity: int
    trace: Trace
    paths: Sequence[NDArray[np.int64]]
    saved_s: NDArray[np.float64]


class Eviction(Protocol):
    """Decides which leaf of the cached blocks is evicted next, as the trait `Policy` does in Rust.

    A block is a leaf if no cached block continues it. The simulator looks a prompt up, reports its blocks
    with `record`, evicts as many leaves as the missing ones need, and adds those. The blocks of the running
    prompt are never evicted. An object is made with a `Setting`.
    """

    def record(self, look_up: LookUp) -> None:
        """Record that a request has looked up its prompt, before anything is evicted for it."""

    def insert(self, leaf: int) -> None:
        """Add a leaf that can be evicted now."""

    def remove(self, leaf: int) -> None:
        """Remove a leaf: it was evicted, it has a child now, or the running prompt has it."""

    def victim(self) -> int:
        """Return the leaf to evict, one of those that were inserted and not removed since.

        There is at least one. It stays until it is removed.
        """
        ...


class Ranked:
    """A policy that evicts the leaf of the lowest rank, which a leaf has when it is inserted.

    A rank may rise later, as with the time that passes; it must not fall. A subclass defines `rank`.

    Args:
        setting: What the policy is made for.
    """

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self._leaves: set[int] = set()
        # Entries may be out of date: of leaves that were removed, or with a rank that has risen.
        self._heap: list[tuple[Any, int]] = []

    def rank(self, block: int) -> Any:  # noqa: ANN401 - whatever can be compared
        """Return the rank of a leaf now."""
        raise NotImplementedError

    def record(self, look_up: LookUp) -> None:
        """Record that a request has looked up its prompt."""

    def insert(self, leaf: int) -> None:
        """Add a leaf that can be evicted now."""
        self._leaves.add(leaf)
        heappush(self._heap, (self.rank(leaf), leaf))

    def remove(self, leaf: int) -> None:
        """Remove a leaf."""
        self._leaves.discard(leaf)

    def victim(self) -> int:
        """Return the leaf of the lowest rank."""
        heap = self._heap
        while True:
            rank, leaf = heap[0]
            if leaf not in self._leaves:
                heappop(heap)
                continue
            now = self.rank(leaf)
            if now == rank:
                return leaf
            heappop(heap)
            heappush(heap, (now, leaf))
