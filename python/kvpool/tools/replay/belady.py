"""The cache that knows future requests, as an upper bound for the hits of every policy."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


def belady(requests: Sequence[NDArray[np.int64]], capacity: int) -> int:
    """Return the number of found blocks of all requests if the leaf with the latest next use is evicted.

    Args:
        requests: For each request the numbers of its prompt's blocks, as in `Trace.blocks`.
        capacity: Blocks that are cached at most; those of the running request are not evicted.
    """
    cache = _Cache(capacity)
    next_uses = _next_uses(requests)
    return sum(
        cache.add(path.tolist(), uses.tolist()) for path, uses in zip(requests, next_uses, strict=True)
    )


class _Cache:
    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        # By cached block: the request that uses it next, its parent, and the number of its children.
        self._uses: dict[int, int] = {}
        self._parents: dict[int, int] = {}
        self._children: dict[int, int] = {}
        # A heap of leaves, the one that is used again last first. Entries may be out of date.
        self._leaves: list[tuple[int, int]] = []

    def add(self, path: list[int], next_uses: list[int]) -> int:
        """Look up a prompt, add its missing blocks, and return the number of found ones."""
        uses, path = self._uses, path[: self._capacity]
        found = next((at for at, block in enumerate(path) if block not in uses), len(path))
        # Their entries in the heap, which name this request, are out of date now.
        uses.update(zip(path[:found], next_uses, strict=False))
        self._evict(len(uses) + len(path) - found - self._capacity, {*path[:found]})
        for at in range(found, len(path)):
            block = path[at]
            uses[block], self._children[block] = next_uses[at], 0
            if at:
                self._parents[block] = path[at - 1]
                self._children[path[at - 1]] += 1
        self._add_if_leaf(path[-1])
        return found

    def _evict(self, count: int, kept: set[int]) -> None:
        while count > 0:
            next_use, block = heappop(self._leaves)
            if self._uses.get(block) != -next_use or self._children[block] or block in kept:
                continue
            count -= 1
            del self._uses[block]
            parent = self._parents.get(block)
            if parent is not None:
                self._children[parent] -= 1
                if parent not in kept:
                    self._add_if_leaf(parent)

    def _add_if_leaf(self, block: int) -> None:
        if not self._children[block]:
            heappush(self._leaves, (-self._uses[block], block))


def _next_uses(requests: Sequence[NDArray[np.int64]]) -> list[NDArray[np.int64]]:
    """Return for each block of each request the next request with it, or their number if there is none."""
    lens = [len(path) for path in requests]
    users, blocks = np.repeat(np.arange(len(requests)), lens), np.concatenate(requests)
    order = np.argsort(blocks, kind="stable")
    is_again = blocks[order[1:]] == blocks[order[:-1]]
    result = np.full(len(blocks), len(requests))
    result[order[:-1][is_again]] = users[order[1:][is_again]]
    return np.split(result, np.cumsum(lens)[:-1])
