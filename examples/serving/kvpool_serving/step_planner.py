"""The choice of the new tokens of a step."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Generic

from kvpool.errors import ConfigError
from kvpool_serving.schedulable import R
from kvpool_serving.step import Step

if TYPE_CHECKING:
    from kvpool_serving.pool_calls import Extend
    from kvpool_serving.slot_supply import SlotSupply


class StepPlanner(Generic[R]):
    """Plans steps of running requests: a token for each that decodes, and chunks of prompts.

    Args:
        extend: Allocates the slots of a step.
        slots: The supply of slots.
        has_states: Whether prefixes have states. Then chunks end at a page where possible, so that a
            snapshot can be kept there.
    """

    def __init__(self, extend: Extend, slots: SlotSupply, *, has_states: bool) -> None:
        self._extend = extend
        self._slots = slots
        self._has_states = has_states

    def plan(self, running: list[R], max_tokens: int) -> Step[R] | None:
        """Plan a step of all running requests, or of the oldest while copies hold slots.

        Args:
            running: The running requests, oldest first.
            max_tokens: The most new tokens.

        Returns:
            The step; `None` if there are not enough slots for any.
        """
        batch = running
        while batch:
            step = self._slots.attempt(partial(self._plan_batch, batch, max_tokens))
            if step is not None or not self._slots.lacks_copied:
                return step
            batch = batch[: len(batch) * 3 // 4]
        return None

    def evict_ahead(self, step: Step[R], running: list[R], max_tokens: int) -> None:
        """Evict the pages that running requests need next, if evicting copies them to a tier first."""
        if not self._slots.evicts_ahead:
            return
        begins = {request: request.held.cached for request in running}
        begins.update(zip(step.requests, step.ends, strict=True))
        growth = []
        for request, begin in begins.items():
            end = max(request.seq_len, begin + 1)  # the token of this step
            growth.append((begin, min(end, begin + max_tokens)))
        self._slots.evict_ahead(growth)

    def _plan_batch(self, requests: list[R], max_tokens: int) -> Step[R] | None:
        """Plan a step of requests, as far as the budget lasts; `None` if there are not enough slots."""
        batch: list[R] = []
        ends: list[int] = []
        left = max_tokens
        for request in requests:
            if left == 0:
                break
            end = self._end(request, left)
            batch.append(request)
            ends.append(end)
            left -= end - request.held.cached
        started = [r for r in batch if r.held.cached == r.prefix_len]
        leases = [r.held.lease if r.held.cached == r.prefix_len else None for r in batch]
        rows, begins = [r.held.row for r in batch], [r.held.cached for r in batch]
        try:
            plan = self._extend(rows, begins, ends, prefixes=leases if started else None)
        except ConfigError:
            # A load that has failed has shortened its lease.
            if not any(map(_drop_failed_load, started)):
                raise
            return self._plan_batch(requests, max_tokens)
        return None if plan is None else Step(batch, ends, started, plan)

    def _end(self, request: R, max_tokens: int) -> int:
        """Return the end of a request's next chunk: where prompts differ, or after its last whole page."""
        cached, seq_len = request.held.cached, request.seq_len
        end = min(seq_len, cached + max_tokens)
        if not self._has_states or cached + 1 >= end:
            return end
        parting = 0 if request.held.lease is None else request.held.lease.kv_length
        if cached < parting < end:
            return parting
        whole = self._slots.whole(end)
        return whole if cached < whole else end


def _drop_failed_load(request: R) -> bool:
    """Drop the load of a request that has not run, if it has failed: the request starts behind its lease.

    Returns:
        Whether the load has failed.
    """
    lease = request.held.lease
    if request.held.load is None or lease is None or lease.length == request.prefix_len:
        return False
    request.held.load = None
    request.prefix_len = request.held.cached = lease.length
    return True
