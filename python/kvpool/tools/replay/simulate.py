"""A prefix cache of blocks whose policy is written in Python."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvpool.tools.replay.errors import ReplayError
from kvpool.tools.replay.eviction import LookUp

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvpool.tools.replay.eviction import Eviction, Setting


def simulate(policy: Eviction, setting: Setting) -> NDArray[np.int64]:
    """Return for each request the blocks of its prompt that are found, int64 `[n]`.

    One request after another looks its prompt up and adds what is missing. A prompt longer than the cache is
    cut.

    Raises:
        ReplayError: If the policy names a block that is no leaf.
    """
    cache = _Cache(policy, setting.capacity)
    arrivals, sessions = setting.trace.arrival_s.tolist(), setting.trace.sessions
    numbers = [-1] * len(setting.paths) if sessions is None else sessions.tolist()
    return np.fromiter(
        (
            cache.add(index, arrivals[index], numbers[index], path[: setting.capacity].tolist())
            for index, path in enumerate(setting.paths)
        ),
        np.int64,
        len(setting.paths),
    )


class _Cache:
    def __init__(self, policy: Eviction, capacity: int) -> None:
        self._policy, self._capacity = policy, capacity
        # By cached block: its parent, -1 without one, and the number of its children.
        self._parents: dict[int, int] = {}
        self._children: dict[int, int] = {}
        self._leaves: set[int] = set()

    def add(self, index: int, at_s: float, session: int, path: list[int]) -> int:
        """Look up a prompt, add its missing blocks, and return the number of found ones."""
        parents, children = self._parents, self._children
        found = next((at for at, block in enumerate(path) if block not in children), len(path))
        if found:
            self._lock(path[found - 1])
        self._policy.record(LookUp(index, at_s, session, path, found))
        self._evict(len(children) + len(path) - found - self._capacity, {*path[:found]})
        for at in range(found, len(path)):
            block, parent = path[at], path[at - 1] if at else -1
            parents[block], children[block] = parent, 0
            if at:
                children[parent] += 1
        if path and not children[path[-1]]:
            self._unlock(path[-1])
        return found

    def _evict(self, count: int, kept: set[int]) -> None:
        policy, parents, children = self._policy, self._parents, self._children
        for _ in range(count):
            block = policy.victim()
            if block not in self._leaves:
                raise ReplayError(f"{type(policy).__name__}.victim() returned {block}, which is no leaf")
            self._lock(block)
            del children[block]
            parent = parents.pop(block)
            if parent >= 0:
                children[parent] -= 1
                if not children[parent] and parent not in kept:
                    self._unlock(parent)

    def _lock(self, block: int) -> None:
        if block in self._leaves:
            self._leaves.remove(block)
            self._policy.remove(block)

    def _unlock(self, block: int) -> None:
        self._leaves.add(block)
        self._policy.insert(block)
