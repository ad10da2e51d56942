"""Policies to compare with those of `PrefixCache`: in Python, for the simulator alone."""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from math import exp
from typing import TYPE_CHECKING, Any

import numpy as np

from kvpool.tools.replay.eviction import Ranked

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from kvpool.tools.replay.eviction import Eviction, LookUp, Setting


class S3Fifo:
    """S3-FIFO (Yang et al., SOSP 2023), which evicts the first leaf of a queue in place of its first block.

    New blocks enter a small queue, which has a tenth of the capacity; those that are evicted from it are
    remembered, as many as the large queue has blocks. A remembered block enters the large queue, and so does
    one that was used again while it was in the small queue. From the large queue goes the first leaf that was
    not used since it was passed over last.
    """

    SMALL = 0.1
    """The share of the small queue."""
    MOST_USES = 3
    """Uses that are counted at most."""

    def __init__(self, setting: Setting) -> None:
        self._small_size = max(1, int(self.SMALL * setting.capacity))
        self._ghosts_size = max(1, setting.capacity - self._small_size)
        self._uses: dict[int, int] = {}
        self._is_large: dict[int, bool] = {}
        self._turns: dict[int, int] = {}
        self._turn, self._in_small = 0, 0
        self._ghosts: deque[int] = deque()
        self._is_ghost: set[int] = set()
        self._leaves: set[int] = set()
        self._heaps: dict[bool, list[tuple[int, int]]] = {False: [], True: []}

    def record(self, look_up: LookUp) -> None:
        """Count uses, and let new blocks enter a queue."""
        for block in look_up.path[: look_up.found]:
            self._uses[block] = min(self._uses[block] + 1, self.MOST_USES)
        for block in look_up.path[look_up.found :]:
            self._enter(block, is_large=block in self._is_ghost)
            self._is_ghost.discard(block)
            self._uses[block] = 0

    def insert(self, leaf: int) -> None:
        """Add a leaf that can be evicted now."""
        self._leaves.add(leaf)
        heappush(self._heaps[self._is_large[leaf]], (self._turns[leaf], leaf))

    def remove(self, leaf: int) -> None:
        """Remove a leaf."""
        self._leaves.discard(leaf)

    def victim(self) -> int:
        """Return the leaf to evict."""
        while True:
            small, large = self._first(is_large=False), self._first(is_large=True)
            is_small = small is not None and (self._in_small >= self._small_size or large is None)
            leaf = small if is_small else large
            assert leaf is not None, "there is a leaf to evict"  # noqa: S101
            if not self._uses[leaf]:
                break
            self._uses[leaf] = 0 if is_small else self._uses[leaf] - 1
            self._in_small -= is_small
            self._enter(leaf, is_large=True)
            heappush(self._heaps[True], (self._turns[leaf], leaf))
        if is_small:
            self._remember(leaf)
        self._in_small -= is_small
        return leaf

    def _enter(self, block: int, *, is_large: bool) -> None:
        self._turn += 1
        self._turns[block], self._is_large[block] = self._turn, is_large
        self._in_small += not is_large

    def _first(self, *, is_large: bool) -> int | None:
        heap = self._heaps[is_large]
        while heap:
            turn, leaf = heap[0]
            if leaf in self._leaves and self._turns[leaf] == turn and self._is_large[leaf] == is_large:
                return leaf
            heappop(heap)
        return None

    def _remember(self, block: int) -> None:
        self._ghosts.append(block)
        self._is_ghost.add(block)
        if len(self._ghosts) > self._ghosts_size:
            self._is_ghost.discard(self._ghosts.popleft())


class Gdsf(Ranked):
    """Greedy-Dual-Size-Frequency (Cherkasova, 1998): a block's uses times the seconds that it saves.

    The worth of what was evicted last is added to that of a block when it is used, so that blocks age. A
    block that was evicted is new when it comes back.
    """

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._saved_s = setting.saved_s.tolist()
        self._uses: dict[int, int] = {}
        self._worth: dict[int, float] = {}
        self._age = 0.0

    def rank(self, block: int) -> float:
        """Return the worth of a block."""
        return self._worth[block]

    def record(self, look_up: LookUp) -> None:
        """Count uses."""
        for at, block in enumerate(look_up.path):
            uses = self._uses[block] = self._uses.get(block, 0) + 1 if at < look_up.found else 1
            self._worth[block] = self._age + uses * self._saved_s[at]

    def victim(self) -> int:
        """Return the leaf that is worth least."""
        leaf = super().victim()
        self._age = max(self._age, self._worth[leaf])
        return leaf


class SessionAware:
    """The policy by workload of "KVCache Cache in the Wild" (Wang et al., USENIX ATC 2025).

    Blocks belong to the turn of their session that used them last. For each number of turns are learned the
    share of uses that are followed by another one, and the mean time until then, of an exponential
    distribution. The leaf goes whose probability of another use within the time that leaves stay is least; of
    equal ones that at the end of the longest prompt. Without sessions, the turn is the number of uses of a
    prompt's last found block.
    """

    TURNS = 12
    """Turns from this one on count as one."""

    def __init__(self, setting: Setting) -> None:
        self._trace_has_sessions = setting.trace.sessions is not None
        self._turns: dict[int, int] = {}
        self._used: dict[int, tuple[int, int]] = {}
        self._uses: dict[int, int] = {}
        self._leaves: set[int] = set()
        # By turn: leaves by the time of their use, and of the same time those of longer prompts first.
        self._heaps: list[list[tuple[int, int, int]]] = [[] for _ in range(self.TURNS)]
        self._begun = [2.0] * self.TURNS
        self._ended = [1.0] * self.TURNS
        self._spans = [float(len(setting.paths)) / 8] * self.TURNS
        self._stay = float(len(setting.paths)) / 8
        self._now = 0
        self._places: dict[int, int] = {}

    def record(self, look_up: LookUp) -> None:
        """Learn from the uses of the blocks of a prompt."""
        self._now = look_up.request
        last = look_up.path[look_up.found - 1] if look_up.found else None
        if self._trace_has_sessions:
            turn = self._turns.get(look_up.session, 0)
            self._turns[look_up.session] = turn + 1
        else:
            turn = self._uses.get(last, 0) if last is not None else 0
        turn = min(turn, self.TURNS - 1)
        for at, block in enumerate(look_up.path):
            if block in self._used:  # in the cache or not
                used, before = self._used[block]
                self._ended[before] += 1
                self._spans[before] += look_up.request - used
            self._begun[turn] += 1
            self._used[block] = (look_up.request, turn)
            self._uses[block] = self._uses.get(block, 0) + 1
            self._places[block] = at

    def insert(self, leaf: int) -> None:
        """Add a leaf that can be evicted now."""
        self._leaves.add(leaf)
        used, turn = self._used[leaf]
        heappush(self._heaps[turn], (used, -self._places[leaf], leaf))

    def remove(self, leaf: int) -> None:
        """Remove a leaf."""
        self._leaves.discard(leaf)

    def victim(self) -> int:
        """Return the leaf that is used again soon with the least probability."""
        least: tuple[float, int, int] | None = None
        for turn, heap in enumerate(self._heaps):
            while heap and (heap[0][2] not in self._leaves or self._used[heap[0][2]] != (heap[0][0], turn)):
                heappop(heap)
            if heap:
                used, place, leaf = heap[0]
                entry = (self._probability(turn, self._now - used), place, leaf)
                least = entry if least is None else min(least, entry)
        assert least is not None, "there is a leaf to evict"  # noqa: S101
        leaf = least[2]
        self._stay += 0.01 * (self._now - self._used[leaf][0] - self._stay)
        return leaf

    def _probability(self, turn: int, age: int) -> float:
        """Return the probability of a use within the time that leaves stay, after `age` without one."""
        share = min(self._ended[turn] / self._begun[turn], 1.0)
        mean = max(self._spans[turn] / self._ended[turn], 1e-9)
        still = share * exp(-age / mean)
        return still * (1.0 - exp(-max(self._stay, 1.0) / mean)) / max(still + 1.0 - share, 1e-300)


class Belady(Ranked):
    """Evicts the leaf that is used again last: it knows the requests to come."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.next_uses = next_uses(setting.paths)
        self.uses: dict[int, int] = {}

    def rank(self, block: int) -> Any:  # noqa: ANN401 - of a subclass, a number of another kind
        """Return the next use, the last one first."""
        return -self.uses[block]

    def record(self, look_up: LookUp) -> None:
        """Look the next uses up."""
        uses = self.next_uses[look_up.request].tolist()
        self.uses.update(zip(look_up.path, uses, strict=False))


class BeladyInSeconds(Belady):
    """Evicts the leaf that saves the fewest seconds for each request until its next use.

    This is greedy. It often saves more than `Belady`, but it is no bound.
    """

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._saved_s = setting.saved_s.tolist()
        self._places: dict[int, int] = {}
        self._now, self._never = 0, len(setting.paths)

    def rank(self, block: int) -> float:
        """Return the seconds for each request until the next use."""
        use = self.uses[block]
        if use == self._never:
            return 0.0
        return float(self._saved_s[self._places[block]]) / (use - self._now)

    def record(self, look_up: LookUp) -> None:
        """Look the next uses up."""
        super().record(look_up)
        self._now = look_up.request
        for at, block in enumerate(look_up.path):
            self._places[block] = at


def next_uses(requests: Sequence[NDArray[np.int64]]) -> list[NDArray[np.int64]]:
    """Return for each block of each request the next request with it, or their number if there is none."""
    lens = [len(path) for path in requests]
    users, blocks = np.repeat(np.arange(len(requests)), lens), np.concatenate(requests)
    order = np.argsort(blocks, kind="stable")
    is_again = blocks[order[1:]] == blocks[order[:-1]]
    result = np.full(len(blocks), len(requests))
    result[order[:-1][is_again]] = users[order[1:][is_again]]
    return np.split(result, np.cumsum(lens)[:-1])


SIMULATED: dict[str, Callable[[Setting], Eviction]] = {
    "s3-fifo": S3Fifo,
    "gdsf": Gdsf,
    "session": SessionAware,
    "belady": Belady,
    "belady-seconds": BeladyInSeconds,
}
"""The policies of the simulator, by name."""
