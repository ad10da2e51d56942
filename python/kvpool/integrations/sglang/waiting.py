"""The requests in the waiting queue of SGLang's scheduler, and what they will find in the prefix cache.

The queue itself says who waits, and it is read before each eviction: kvpool need not hear of what becomes of
a request, and forgets one that is gone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sglang.srt.managers.schedule_batch import Req

    from kvpool._kvpool import HybridTree

__all__ = ["WaitingRequests"]

_AGAIN = 64
"""How many requests are looked up again at once."""


class WaitingRequests:
    """What the requests in a waiting queue will find, for a tree that evicts by worth.

    Each is looked up before the first eviction after it came, or after it was retracted. Others may compute
    more of what it needs: some are looked up again, in turns, before an eviction that follows an insertion.

    Args:
        tree: The tree.
        find: Looks the prompt of a request up, and returns the node at the end of what is cached.

    Attributes:
        queue: Returns the waiting queue, the request that is served next in front; at first, none waits.
        may_find_more: Whether tokens were inserted since the tree was told.
    """

    def __init__(self, tree: HybridTree, find: Callable[[Req], int]) -> None:
        self.queue: Callable[[], Sequence[Req]] = list
        self.may_find_more = False
        self._tree = tree
        self._find = find
        # The numbers that the requests have in the tree, by name and by how often they were retracted. The
        # order is that of the queue.
        self._numbers: dict[tuple[str, int], int] = {}
        # The place in the queue of the first one to look up again.
        self._turn = 0

    def tell(self) -> None:
        """Tell the tree what has changed since the last call."""
        queue = self.queue()
        if not queue and not self._numbers:
            return
        names = [(req.rid, req.retraction_count) for req in queue]
        if names == [*self._numbers] and not self.may_find_more:
            return
        again = _AGAIN if self.may_find_more else 0
        requests = []
        for place, (req, name) in enumerate(zip(queue, names, strict=True)):
            number = self._numbers.get(name)
            is_looked_up = number is None or (place - self._turn) % len(queue) < again
            requests.append((number, self._find(req) if is_looked_up else None))
        self._turn = (self._turn + again) % max(len(queue), 1)
        self._numbers = dict(zip(names, self._tree.set_waiting(requests), strict=True))
        self.may_find_more = False
