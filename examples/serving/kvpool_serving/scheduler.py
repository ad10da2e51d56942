"""Continuous batching over the pools of a planner."""

from __future__ import annotations

from collections import deque
from enum import Enum, auto
from time import monotonic
from typing import TYPE_CHECKING, Generic

from kvpool.errors import OutOfMemoryError
from kvpool_serving.fetch_queue import FetchQueue
from kvpool_serving.moving_requests import MovingRequests
from kvpool_serving.options import SchedulerOptions
from kvpool_serving.pool_calls import PoolCalls
from kvpool_serving.prefixes import Prefixes
from kvpool_serving.schedulable import R, has_rows_elsewhere
from kvpool_serving.slot_supply import SlotSupply
from kvpool_serving.step_planner import StepPlanner

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvpool import BatchPlanner, PrefixCache
    from kvpool_serving.schedulable import State
    from kvpool_serving.step import Step


class _Admission(Enum):
    """The result of an attempt to start the first request of the queue."""

    STARTS = auto()
    WAITS = auto()
    """The request waits for slots, a row, or tokens that a running request computes."""
    WAITS_FOR_COPIES = auto()
    """The request waits for slots that copies hold, and the copies end by themselves."""


class Scheduler(Generic[R]):
    """Continuous batching: a token for each request that decodes, and prompt chunks up to a budget.

    Requests are admitted in order while rows and slots last. When the pool is short, the youngest request is
    retracted: its slots are given up, and it returns to the head of the queue.

    With a prefix cache, a request starts behind the prefix that is found at its admission. Chunks of prompts
    are published as they are computed, generated tokens when a request ends or is retracted. A request that
    begins like one whose prompt is being computed waits for that computation. If the cache has states, chunks
    end at a page where possible, so that a snapshot can be kept there.

    The part of a prefix that only a tier below the cache has is loaded during the first step of its request,
    if that costs less than computing it. Slots that a copy reads or writes are free when the copy is over: in
    the meantime a step leaves out the youngest requests rather than retract them, and waits only if it has
    room for none. If there is a store, a submitted request is queued when the store's part of its prompt has
    been fetched; a request that needs nothing from the store, or has it, does not wait for those before it.

    Rows that another process has computed are not computed again: a request with a move from there gets slots
    for all of its tokens but the last, and runs when the rows have arrived. If the move fails, the rows are
    computed. A request with a move to another process keeps its slots after `hand_over` until the move is
    over. A request whose rows move is not retracted.

    If an exception ends a call early, such as one of the driver, call `retract_all` before the next. What was
    held at that moment is not remembered: rows in use that no request has are freed.

    Args:
        planner: The planner over the pools, with its request table for the exclusive use of this scheduler.
        cache: A prefix cache of the planner's allocator.
        pays_to_load: Called with a number of tokens of a prefix; returns whether to load so many from the
            tier below instead of computing them. By default they are always loaded.
        fetches: Whether to ask the cache's store, if it has one.
        options: The waiting times, and what the scheduler keeps.
        calls: The calls that allocate from the pools and free; by default those of the planner and the cache.

    Attributes:
        planner: The planner.
        cache: The prefix cache.
        max_step_tokens: The most new tokens in a step; at least one per request, at most those of the
            planner.
        waiting: The queue of waiting requests.
        running: The requests with a row, oldest first. Only the last may have several steps of its prompt
            left.
        released: The number of running requests that have changed to each other state.
        waits: The number of times that `plan` has waited for a copy.
        fetched_tokens: Tokens that came from the store.
    """

    def __init__(  # noqa: PLR0913 - the parts of a scheduler
        self,
        planner: BatchPlanner,
        cache: PrefixCache | None = None,
        pays_to_load: Callable[[int], bool] = lambda _: True,
        *,
        fetches: bool = True,
        options: SchedulerOptions | None = None,
        calls: PoolCalls | None = None,
    ) -> None:
        options = options or SchedulerOptions()
        calls = calls or PoolCalls.of(planner, cache)
        self.planner = planner
        self.cache = cache
        self.max_step_tokens: int = planner.max_tokens
        self.waiting: deque[R] = deque()
        self.running: list[R] = []
        self.released: dict[State, int] = {"waiting": 0, "finished": 0, "aborted": 0}
        self.waits: int = 0
        self.fetched_tokens: int = 0
        self._options = options
        self._slots = SlotSupply(planner.allocator, cache)
        self._fetch_queue: FetchQueue[R] = FetchQueue(cache if fetches else None, options, self._slots.whole)
        self._alloc_rows, self._finish = calls.alloc_rows, calls.finish
        self._prefixes: Prefixes[R] = Prefixes(
            cache, self._slots, calls.match, pays_to_load, alike_tokens=options.alike_tokens
        )
        self._moves: MovingRequests[R] = MovingRequests(planner, calls.extend, self._slots)
        self._has_states = cache is not None and cache.states is not None
        self._steps: StepPlanner[R] = StepPlanner(calls.extend, self._slots, has_states=self._has_states)
        self._snapshot_tokens = self._slots.pages(options.snapshot_tokens) * self._slots.page_size

    @property
    def retractions(self) -> int:
        """Number of retractions."""
        return self.released["waiting"]

    @property
    def fetching(self) -> deque[R]:
        """The requests that are not in the queue yet, in order."""
        return self._fetch_queue.requests

    @property
    def moving(self) -> list[R]:
        """The requests whose rows move from or to another process, in the order in which the moves began."""
        return self._moves.requests

    @property
    def is_idle(self) -> bool:
        """Whether no request is fetching, waiting, running or moving."""
        return not (self.waiting or self.running or self.fetching or self.moving)

    def submit(self, request: R) -> None:
        """Queue a request. If there is a store, the store's part of its prompt is fetched first."""
        queue = self._fetch_queue
        if not has_rows_elsewhere(request) and not queue.is_stuck and queue.concerns(request):
            queue.submit(request, self.waiting)
        else:
            self.waiting.append(request)

    def submit_fork(self, request: R) -> None:
        """Queue a copy of a request.

        Nothing is fetched from a store for it: the original has published its tokens, or fetches them itself.
        """
        self.waiting.append(request)

    def withdraw(self, request: R) -> None:
        """Take a waiting request out of the queue."""
        request.held.fetch = None
        (self.fetching if request in self.fetching else self.waiting).remove(request)

    def plan(self) -> Step[R] | None:
        """Admit requests, and allocate slots for the new tokens of a step.

        When the tokens are computed, call `record_computed`. If that fails, call `retract_all`.

        Returns:
            The step; `None` if there is no request, or all wait for rows that move.

        Raises:
            OutOfMemoryError: If slots with other owners leave no room for any request.
            DriverError: If the device has failed, or a driver call does.
        """
        self._end_moves()
        self._fetch_queue.line_up(self.waiting, is_busy=bool(self.running))
        waits_for_copies = self._admit()
        deadline = monotonic() + self._options.copies_timeout_s
        while self.running or waits_for_copies:
            step = self._steps.plan(self.running, self.max_step_tokens)
            if step is not None:
                self._steps.evict_ahead(step, self.running, self.max_step_tokens)
                return step
            if not self.running:
                self._wait_for_copies(deadline)
                waits_for_copies = self._admit()
            elif not (self._slots.lacks_copied and self._wait_for_copies(deadline)):
                youngest = self.running[-1]
                self.waiting.appendleft(youngest)
                self.release([youngest], "waiting")
        self._wait_for_moves()
        return None

    def _wait_for_copies(self, deadline: float) -> bool:
        """Wait a little for copies that hold slots. After the deadline, do not wait, and load nothing.

        Returns:
            Whether it has waited.
        """
        if monotonic() >= deadline:
            self._prefixes.tries_loads = False
            return False
        self.waits += 1
        self._slots.wait_for_copies()
        return True

    def _wait_for_moves(self) -> None:
        """Wait a little for rows that move, when nothing runs.

        Raises:
            OutOfMemoryError: If nothing moves, and a request waits.
        """
        if self.moving:
            self._moves.wait(self._options.move_wait_s)
        elif self.waiting:
            raise OutOfMemoryError(
                f"no request fits: {self._slots.obtainable()} of "
                f"{self._slots.capacity} slots are available, and the others do not belong "
                "to the scheduler"
            )

    def record_computed(self, step: Step[R]) -> None:
        """Record that the new tokens of a step are computed, and publish those of prompts.

        Its loads are complete: the current stream, or the host, has waited for their last layer.
        """
        self._prefixes.tries_loads = True
        for request, end in zip(step.requests, step.ends, strict=True):
            is_chunk = end - request.held.cached > 1
            request.held.cached, request.held.load = end, None
            if is_chunk or (self._has_states and end % self._snapshot_tokens == 0):
                self.publish(request)

    def record_failed_load(self) -> None:
        """Record that a load has failed. Call `retract_all`; its tokens are computed."""
        self._prefixes.tries_loads = False

    def publish(self, request: R) -> None:
        """Publish the computed tokens of a running request to the prefix cache."""
        row, lease, cached = request.held.row, request.held.lease, request.held.cached
        if lease is None or self._slots.whole(cached) <= (length := lease.length):
            return
        # The state is that after `cached` tokens, unless a step was planned and has failed.
        is_whole = self._slots.whole(cached) == cached
        is_boundary = self._has_states and is_whole and cached == self.planner.seq_len(row)
        lease.publish(request.between(length, cached), row=row, state=row if is_boundary else None)

    def release(self, requests: list[R], state: State) -> None:
        """Publish running requests, and free their slots and rows, also if the driver fails.

        Args:
            requests: The requests.
            state: Their state from now on. Those that are "waiting" are in the queue.
        """
        holders = [request for request in requests if request.state == "running"]
        try:
            for request in holders:
                self.publish(request)
        finally:
            self.released[state] += len(requests)
            for request in requests:
                request.state = state
                request.retractions += state == "waiting"
                request.held.lease = request.held.load = None
                if state != "waiting":
                    request.held.move = None
            self.running = [request for request in self.running if request not in requests]
            self._moves.remove(requests)
            self._free([request.held.row for request in holders])

    def hand_over(self, request: R) -> None:
        """Begin the move of a running request's rows: it is finished when they have gone."""
        self.publish(request)
        self.moving.append(request)
        self.running.remove(request)
        self._moves.send(request)

    def abandon(self, request: R) -> None:
        """Abort a request whose rows move. The request keeps its slots until the move is over."""
        request.state = "aborted"
        self.released["aborted"] += 1
        if request.held.move is not None:
            request.held.move.cancel()

    def _end_moves(self) -> None:
        """Release requests whose rows have gone, and go on with those whose rows have come."""
        for request, move in self._moves.completed():
            if request.state == "aborted":
                request.held.lease = None
                self._moves.remove([request])
                self._free([request.held.row])
            elif not move.brings:
                self.release([request], "finished")
            elif move.has_failed:
                request.held.move = None
                self.waiting.appendleft(request)
                self.release([request], "waiting")
            else:
                request.held.cached, request.held.move = request.seq_len - 1, None
                # The request was admitted before most of the running ones.
                self.running.insert(0, request)
                self._moves.remove([request])
                self.publish(request)

    def retract_all(self) -> None:
        """Return all running requests to the queue, in order, with their generated tokens.

        This also works after an exception has ended another call, or this one: no request, row or slot is
        lost. Requests whose rows are on their way stay as they are.
        """
        self.running += self._moves.keep_begun()
        for request in self.waiting:
            request.held.lease = request.held.load = None
        known = dict.fromkeys([*self.running, *self.waiting])
        self.waiting = deque(request for request in known if not request.is_complete)
        try:
            self.release([request for request in self.running if request.is_complete], "finished")
        finally:
            self.release(self.running, "waiting")
        held = {request.held.row for request in self.moving}
        self._free([row for row in self.planner.req_to_token_pool.rows_in_use() if row not in held])

    def _free(self, rows: list[int]) -> None:
        """Free rows with their slots. If the driver fails, nothing is freed: `retract_all` tries again."""
        self._prefixes.record_release()
        if rows:
            self._finish(rows)

    def _admit(self) -> bool:
        """Start waiting requests in order, while rows, budget and slots last.

        Returns:
            Whether the first that was not started waits for slots that copies hold.
        """
        if not self.waiting:
            return False
        left = self.max_step_tokens - sum(r.seq_len - r.held.cached for r in self.running)
        promised = self._promised_pages()
        while self.waiting and left > 0 and self.planner.req_to_token_pool.available_size():
            request = self.waiting[0]
            pages = promised + self._slots.pages(request.seq_len) + 1
            result = self._try_start(request, pages)
            if result is not _Admission.STARTS:
                return result is _Admission.WAITS_FOR_COPIES
            promised = pages - self._slots.pages(request.prefix_len)
            left -= 1 if has_rows_elsewhere(request) else request.seq_len - request.prefix_len
        return False

    def _promised_pages(self) -> int:
        """Return the pages that admitted requests will take, plus one each: none is retracted at once."""
        pages = self._slots.pages
        missing = sum(pages(request.seq_len) - pages(request.held.cached) + 1 for request in self.running)
        return missing + sum(map(has_rows_elsewhere, self.moving))

    def _try_start(self, request: R, pages: int) -> _Admission:
        """Start the first request of the queue, if it fits and need not wait for its prefix.

        Args:
            request: The request.
            pages: Pages that this request and all running ones will take if no prefix is found.
        """
        if not self._prefixes.match(request, pages, is_alone=not (self.running or self.moving)):
            return _Admission.WAITS
        result = self._prepare(request)
        rows = self._alloc_rows(1, owner=request.owner) if result is _Admission.STARTS else None
        if rows is None:
            request.held.lease = request.held.load = None
            return _Admission.WAITS if result is _Admission.STARTS else result
        self._start(request, rows[0])
        if not has_rows_elsewhere(request) or self._moves.receive(request):
            return _Admission.STARTS
        self.waiting.appendleft(request)
        self.release([request], "waiting")
        # While other requests move, the next call of `plan` tries again: their slots may be free then.
        if self._slots.lacks_copied and self._prefixes.tries_loads and not self.moving:
            return _Admission.WAITS_FOR_COPIES
        return _Admission.WAITS

    def _prepare(self, request: R) -> _Admission:
        """Begin the load of a matched prefix, if its request can start."""
        if not has_rows_elsewhere(request):
            if self._prefixes.is_computed_soon(request, self.running):
                return _Admission.WAITS
            if not self._prefixes.try_load(request):
                return _Admission.WAITS_FOR_COPIES
        return _Admission.STARTS

    def _start(self, request: R, row: int) -> None:
        """Let the first request of the queue run, or move, in a row."""
        (self.moving if has_rows_elsewhere(request) else self.running).append(request)
        if request.held.fetch is not None:
            self.fetched_tokens += request.held.fetch.length
            request.held.fetch = None
        request.held.row = row
        request.held.cached = request.prefix_len
        request.state = "running"
        self.waiting.popleft()
