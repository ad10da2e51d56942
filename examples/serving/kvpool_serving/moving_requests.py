"""Requests whose rows come from another process or go to one."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Generic

import torch

from kvpool_serving.schedulable import R, has_begun_to_move

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from kvpool import BatchPlanner
    from kvpool_serving.moves import Move
    from kvpool_serving.pool_calls import Extend
    from kvpool_serving.slot_supply import SlotSupply


class MovingRequests(Generic[R]):
    """Begins the moves of requests, and lists the requests until the moves are over.

    Args:
        planner: The planner over the pools.
        extend: Allocates slots for the rows that arrive.
        slots: The supply of these slots.

    Attributes:
        requests: The requests, in the order in which they were listed.
    """

    def __init__(self, planner: BatchPlanner, extend: Extend, slots: SlotSupply) -> None:
        self.requests: list[R] = []
        self._planner = planner
        self._extend = extend
        self._slots = slots

    def send(self, request: R) -> None:
        """Begin the move of all rows of a listed request to another process."""
        self._begin(request, 0, request.held.cached)

    def receive(self, request: R) -> bool:
        """Allocate slots for all tokens but the last of a listed request, and begin the move of their rows.

        Returns:
            Whether there were enough slots. If not, no row moves, and the request keeps the slots that it
            got.
        """
        begin, end = request.prefix_len, request.seq_len - 1
        for start in range(begin, end, self._planner.max_tokens):
            until = min(start + self._planner.max_tokens, end)
            prefixes = [request.held.lease] if start == begin and request.held.lease is not None else None
            call = partial(self._extend, [request.held.row], [start], [until], prefixes=prefixes)
            if self._slots.attempt(call) is None:
                return False
        self._begin(request, begin, end)
        return True

    def completed(self) -> Iterator[tuple[R, Move]]:
        """Yield the requests whose moves are over, with these moves. They stay listed."""
        for request in [*self.requests]:
            move = request.held.move
            if move is not None and move.query():
                yield request, move

    def wait(self, timeout: float) -> None:
        """Wait until the oldest move is over, at most for `timeout` seconds."""
        for request in self.requests:
            if request.held.move is not None:
                request.held.move.wait(timeout)
                return

    def remove(self, requests: Collection[R]) -> None:
        """Remove these requests from the list."""
        self.requests = [request for request in self.requests if request not in requests]

    def keep_begun(self) -> list[R]:
        """Keep the requests whose moves have begun: their slots stay as they are. Return the others."""
        others = [request for request in self.requests if not has_begun_to_move(request)]
        self.remove(others)
        return others

    def _begin(self, request: R, begin: int, end: int) -> None:
        """Begin a move of the rows of the tokens from position `begin` to `end`."""
        move, lease = request.held.move, request.held.lease
        if move is None:
            return
        slots = self._planner.req_to_token_pool.req_to_token[request.held.row, begin:end]
        if begin == 0 and lease is not None and lease.length:
            # Where tokens were published twice, the table has slots that are free, until the next step.
            slots = torch.cat([lease.slots.to(slots.dtype), slots[lease.length :]])
        move.begin(request.held.row, slots, begin)
