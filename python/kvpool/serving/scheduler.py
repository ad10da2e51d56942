"""Continuous batching over the pools of a planner."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Literal, Protocol, TypeAlias, TypeVar

from kvpool.errors import OutOfMemoryError

if TYPE_CHECKING:
    from kvpool._kvpool import BatchPlan, BatchPlanner

State: TypeAlias = Literal["waiting", "running", "finished", "aborted"]


class Schedulable(Protocol):
    """The interface of a request.

    Attributes:
        state: "waiting", "running", and at the end "finished" or "aborted".
        retractions: Number of retractions.
        row: Row in the request table, while running.
        cached: Number of tokens with slots, while running.
    """

    state: State
    retractions: int
    row: int
    cached: int

    @property
    def seq_len(self) -> int:
        """Number of known tokens: prompt and generated ones."""

    @property
    def owner(self) -> str | int | None:
        """Owner of its row and slots, for pools with debugging."""


R = TypeVar("R", bound=Schedulable)


@dataclass(slots=True)
class Step(Generic[R]):
    """One batch, with slots for its new tokens.

    Attributes:
        requests: The requests of the batch, oldest first.
        ends: For each request, the number of its tokens with slots after the step.
        plan: The slots of the new tokens, and the metadata of all tokens.
    """

    requests: list[R]
    ends: list[int]
    plan: BatchPlan


class Scheduler(Generic[R]):
    """Continuous batching: a token for each request that decodes, and prompt chunks up to a budget.

    Requests are admitted in order while rows and slots last. When the pool is short, the youngest request is
    retracted: its slots are freed, and it returns to the head of the queue.

    Args:
        planner: The planner over the pools, for the exclusive use of this scheduler.

    Attributes:
        planner: The planner.
        max_step_tokens: The most new tokens in a step; at least one per request, at most those of the
            planner.
        waiting: The queue of waiting requests.
        running: The requests with a row, oldest first. Only the last may have several steps of its prompt
            left.
        retractions: Number of retractions.
    """

    def __init__(self, planner: BatchPlanner) -> None:
        self.planner = planner
        self.max_step_tokens = planner.max_tokens
        self.waiting: deque[R] = deque()
        self.running: list[R] = []
        self.retractions = 0
        self._extend, self._finish = planner.extend, planner.finish
        self._alloc_row = planner.req_to_token_pool.alloc
        self._allocator, self._page_size = planner.allocator, planner.page_size

    @property
    def is_idle(self) -> bool:
        """Whether nothing is waiting or running."""
        return not self.waiting and not self.running

    def plan(self) -> Step[R] | None:
        """Admit requests, and allocate slots for the new tokens of a step.

        When the tokens are computed, set `cached` of each request to its end. If that fails, call `retract`
        for all of them, youngest first.

        Returns:
            The step; `None` if there is no request.

        Raises:
            OutOfMemoryError: If slots with other owners leave no room for any request.
        """
        self._admit()
        while self.running:
            batch, ends, left = [], [], self.max_step_tokens
            for request in self.running:
                if left == 0:
                    break
                cached, seq_len = request.cached, request.seq_len
                end = seq_len if seq_len - cached <= left else cached + left
                batch.append(request)
                ends.append(end)
                left -= end - cached
            plan = self._extend([r.row for r in batch], [r.cached for r in batch], ends)
            if plan is not None:
                return Step(batch, ends, plan)
            self.retract(self.running[-1])
        if self.waiting:
            raise OutOfMemoryError(
                f"no request fits: {self._allocator.available_size()} of "
                f"{self._allocator.stats()['capacity']} slots are available, and the others do not belong "
                "to the scheduler"
            )
        return None

    def retract(self, request: R) -> None:
        """Return a request to the head of the queue, with its generated tokens."""
        request.state = "waiting"
        request.retractions += 1
        self.retractions += 1
        self.waiting.appendleft(request)
        self.release([request])

    def release(self, requests: list[R]) -> None:
        """Free the slots and rows of requests that no longer run, also if the driver fails."""
        self.running = [request for request in self.running if request not in requests]
        self._finish([request.row for request in requests])

    def _admit(self) -> None:
        """Start waiting requests in order, while rows, budget and slots last."""
        if not self.waiting:
            return
        # Each running request keeps a page in reserve, so that an admission is not undone at once.
        free = self._allocator.available_size() // self._page_size - len(self.running)
        if self.running and free <= self._pages(self.waiting[0].seq_len):
            return
        left = self.max_step_tokens - sum(r.seq_len - r.cached for r in self.running)
        free -= sum(self._pages(r.seq_len) - self._pages(r.cached) for r in self.running)
        while self.waiting and left > 0:
            request = self.waiting[0]
            left -= request.seq_len
            free -= self._pages(request.seq_len) + 1
            if free < 0 and self.running:  # a single request fits without a reserve
                break
            row = self._alloc_row(owner=request.owner)
            if row is None:
                break
            request.row, request.cached, request.state = row[0], 0, "running"
            self.running.append(self.waiting.popleft())

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self._page_size)
