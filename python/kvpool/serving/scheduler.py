"""Continuous batching over the pools of a planner."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from time import monotonic, sleep
from typing import TYPE_CHECKING, Generic, Literal, Protocol, TypeAlias, TypeVar

import torch

from kvpool.errors import ConfigError, IndexOwnershipError, OutOfMemoryError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvpool._kvpool import BatchPlan, BatchPlanner, Fetch, Lease, Load, PrefixCache
    from kvpool.serving.moves import Move

State: TypeAlias = Literal["waiting", "running", "finished", "aborted"]

_SNAPSHOT_TOKENS = 64
"""Tokens from one snapshot of a decoding request's state to the next; each takes a track slot."""
_WORTH_WAITING = 32
"""Tokens that a running request computes, for which one that begins alike waits to find them cached."""
_NAP_S = 0.0002
"""Between two looks at whether a copy is over."""
_PATIENCE_S = 10.0
"""How long a step waits for copies before it makes room in other ways, and a request for its fetch."""
_SLICE_S = 0.02
"""How long a step waits for a fetch when it has nothing else to do."""

_row = attrgetter("row")


class Schedulable(Protocol):
    """The interface of a request.

    Attributes:
        state: "waiting", "running", and at the end "finished" or "aborted". The scheduler sets it.
        retractions: Number of retractions.
        row: Row in the request table, while running.
        cached: Number of tokens with slots, while running.
        prefix_len: Number of tokens that were found in the prefix cache at its admission, while running.
        lease: Its lease of the prefix cache, while running with one.
        load: What comes back of its prefix from the tier below, up to the end of its first step.
        fetch: What comes of its prompt to that tier from a store, up to its admission.
        move: What brings its rows from another process, up to their arrival, or takes them there when its
            next token is generated.
    """

    state: State
    retractions: int
    row: int
    cached: int
    prefix_len: int
    lease: Lease | None
    load: Load | None
    fetch: Fetch | None
    move: Move | None

    @property
    def seq_len(self) -> int:
        """Number of known tokens: prompt and generated ones."""

    @property
    def is_complete(self) -> bool:
        """Whether it has all tokens that it asked for."""

    @property
    def owner(self) -> str | int | None:
        """Owner of its row and slots, for pools with debugging."""

    @property
    def namespace(self) -> str | bytes | int | None:
        """Namespace of its tokens in the prefix cache."""

    def between(self, begin: int, end: int) -> Sequence[int]:
        """Known tokens from position `begin` to `end`, for the prefix cache."""


R = TypeVar("R", bound=Schedulable)
T = TypeVar("T")


@dataclass(slots=True)
class Step(Generic[R]):
    """One batch, with slots for its new tokens.

    Attributes:
        requests: The requests of the batch, oldest first.
        ends: For each request, the number of its tokens with slots after the step.
        started: Those of the requests whose first step since their admission this is.
        plan: The slots of the new tokens, and the metadata of all tokens.
    """

    requests: list[R]
    ends: list[int]
    started: list[R]
    plan: BatchPlan

    @property
    def loads(self) -> list[Load]:
        """What comes back of the prefixes of `started`: what reads a layer goes behind `Load.wait_layer`."""
        return [request.load for request in self.started if request.load is not None]

    @property
    def chunk_tokens(self) -> int:
        """The new tokens, without one for each request."""
        return sum(end - r.cached - 1 for r, end in zip(self.requests, self.ends, strict=True))


class Scheduler(Generic[R]):
    """Continuous batching: a token for each request that decodes, and prompt chunks up to a budget.

    Requests are admitted in order while rows and slots last. When the pool is short, the youngest request is
    retracted: its slots are given up, and it returns to the head of the queue.

    With a prefix cache, a request starts behind the prefix that is found at its admission. Chunks of prompts
    are published as they are computed, generated tokens when a request ends or is retracted. A request that
    begins like one whose prompt is being computed waits for that. If the cache has states, chunks end at a
    page where possible, so that a snapshot can be kept there.

    What a tier below the cache has of a prefix comes back while the first step of its request runs, if that
    pays. Slots that are copied are free when the copy is over: a step leaves out the youngest requests
    meanwhile rather than retract them, and waits only if it has room for none. If there is a store, a request
    that is submitted is not in the queue before the store's part of its prompt has come.

    Rows that were computed elsewhere are not computed again: a request with a move that brings them gets
    slots for all of its tokens but the last, and runs when they have arrived; if they do not, it is computed.
    One with a move that takes them away keeps its slots after `hand_over` until that is over. Nothing
    retracts what moves.

    If an exception ends a call early, such as an interrupt, call `retract_all` before the next.

    Args:
        planner: The planner over the pools, for the exclusive use of this scheduler.
        cache: A prefix cache of the planner's allocator.
        pays_to_load: Whether to load so many tokens of a prefix from the tier below, in place of computing
            them; by default always.
        fetches: Whether to ask the cache's store, if it has one.

    Attributes:
        planner: The planner.
        cache: The prefix cache.
        max_step_tokens: The most new tokens in a step; at least one per request, at most those of the
            planner.
        waiting: The queue of waiting requests.
        fetching: Those that are not in the queue yet, in order.
        running: The requests with a row, oldest first. Only the last may have several steps of its prompt
            left.
        moving: Those with a row whose rows come or go, in the order in which that began.
        released: By state, the number of requests that came to it from running.
        waits: How often `plan` has waited for a copy.
        fetched_tokens: Tokens that came from the store.
    """

    def __init__(
        self,
        planner: BatchPlanner,
        cache: PrefixCache | None = None,
        pays_to_load: Callable[[int], bool] = lambda _: True,
        *,
        fetches: bool = True,
    ) -> None:
        self.planner = planner
        self.cache = cache
        self.max_step_tokens: int = planner.max_tokens
        self.waiting: deque[R] = deque()
        self.fetching: deque[R] = deque()
        self.running: list[R] = []
        self.moving: list[R] = []
        self.released: dict[State, int] = {"waiting": 0, "finished": 0, "aborted": 0}
        self.waits: int = 0
        # Rows that no request has: one is about to start, or some are about to be freed.
        self._spare: list[Sequence[int]] = []
        self._too_long: R | None = None
        tiers = () if cache is None else cache.tiers
        self._tier = tiers[0] if tiers else None
        self._fetches = fetches and len(tiers) > 1
        # When the first fetch of those that wait for one is given up, and one that was.
        self._fetch_until = 0.0
        self._overdue: Fetch | None = None
        self.fetched_tokens: int = 0
        self._pays_to_load = pays_to_load
        # Whether the first in the queue waits for slots of its load or its move that copies hold, and whether
        # that is tried at all: after a load that failed only when a step was computed.
        self._is_held_back, self._tries_loads = False, True
        # Whether copies held slots when the last call was short of them.
        self._lacks_copied = False
        self._extend, self._finish = planner.extend, planner.finish
        self._table, self._alloc_row = planner.req_to_token_pool, planner.req_to_token_pool.alloc
        self._allocator, self._page_size = planner.allocator, planner.page_size
        self._obtainable_size = self._allocator.available_size if cache is None else cache.obtainable_size
        self._has_states = cache is not None and cache.states is not None
        self._snapshot_tokens = self._pages(_SNAPSHOT_TOKENS) * self._page_size

    @property
    def retractions(self) -> int:
        """Number of retractions."""
        return self.released["waiting"]

    @property
    def is_idle(self) -> bool:
        """Whether nothing is waiting or running."""
        return not (self.waiting or self.running or self.fetching or self.moving)

    def submit(self, request: R) -> None:
        """Let a request wait, first for what a store has of its prompt."""
        if self._fetches and not _comes(request) and not self._is_store_stuck():
            self.fetching.append(request)
            self._begin_fetches()
        else:
            self.waiting.append(request)

    def withdraw(self, request: R) -> None:
        """Take a waiting request out of the queue."""
        request.fetch = None
        (self.fetching if request in self.fetching else self.waiting).remove(request)

    def _is_store_stuck(self) -> bool:
        """Whether a fetch that was given up is not over yet: nothing else is asked of such a store."""
        if self._overdue is not None and self._overdue.query():
            self._overdue = None
        return self._overdue is not None

    def _begin_fetches(self) -> None:
        """Ask the store for the prompts of the first requests: what comes takes at most half of the tier."""
        if self.cache is None or self._tier is None:
            return
        # What is kept for those that are not admitted yet.
        left = self._tier.size // 2 - sum(r.seq_len for r in self.waiting if r.fetch is not None)
        for place, request in enumerate(self.fetching):
            left -= request.seq_len
            if left < 0 and place > 0:
                return
            if request.fetch is None:
                if place == 0:
                    self._fetch_until = monotonic() + _PATIENCE_S
                tokens = request.between(0, request.seq_len)
                request.fetch = self.cache.fetch(tokens, namespace=request.namespace, limit=len(tokens) - 1)

    def _line_up(self) -> None:
        """Let those wait in the queue whose fetch is over. Wait a little if there is nothing else to do."""
        while self.fetching:
            self._begin_fetches()
            request = self.fetching[0]
            fetch = request.fetch
            if fetch is not None and not fetch.query():
                if monotonic() >= self._fetch_until:
                    fetch.cancel()
                    self._overdue = fetch
                elif self.running or self.waiting or not fetch.wait(_SLICE_S):
                    return
            # It is in a list at any time; `retract_all` looks at both.
            self.waiting.append(request)
            self.fetching.popleft()
            self._fetch_until = monotonic() + _PATIENCE_S
            if self._is_store_stuck():
                self.waiting.extend(self.fetching)
                self.fetching.clear()

    def plan(self) -> Step[R] | None:
        """Admit requests, and allocate slots for the new tokens of a step.

        When the tokens are computed, call `note_computed`. If that fails, call `retract_all`.

        Returns:
            The step; `None` if there is no request, or all wait for rows that move.

        Raises:
            OutOfMemoryError: If slots with other owners leave no room for any request.
        """
        self._end_moves()
        self._line_up()
        self._admit()
        patience = monotonic() + _PATIENCE_S
        while self.running or self._is_held_back:
            batch = self.running
            while batch:
                step = self._with_slots(partial(self._step_of, batch))
                if step is not None:
                    self._evict_ahead(step)
                    return step
                if not self._lacks_copied:
                    break
                # The oldest go on.
                batch = batch[: len(batch) * 3 // 4]
            if not batch:
                # Copies hold the slots that are missing.
                if monotonic() < patience:
                    self.waits += 1
                    sleep(_NAP_S)
                else:
                    self._tries_loads = False
                if not self.running:
                    self._admit()
                if monotonic() < patience or not self.running:
                    continue
            youngest = self.running[-1]
            self.waiting.appendleft(youngest)
            self.release([youngest], "waiting")
        self._wait_for_room()
        return None

    def _wait_for_room(self) -> None:
        """Nothing runs: wait a little for what moves, if anything does."""
        if self.moving:
            sleep(_NAP_S)
        elif self.waiting:
            raise OutOfMemoryError(
                f"no request fits: {self._obtainable_size()} of "
                f"{self._allocator.stats()['capacity']} slots are available, and the others do not belong "
                "to the scheduler"
            )

    def _step_of(self, requests: list[R]) -> Step[R] | None:
        """A step of running requests, as far as the budget lasts; `None` if there are not enough slots."""
        batch, ends, left = [], [], self.max_step_tokens
        for request in requests:
            if left == 0:
                break
            cached, seq_len = request.cached, request.seq_len
            end = seq_len if seq_len - cached <= left else cached + left
            if self._has_states and cached + 1 < end:
                end = self._snapshot_end(request, end)
            batch.append(request)
            ends.append(end)
            left -= end - cached
        started = [r for r in batch if r.cached == r.prefix_len]
        leases = [r.lease if r.cached == r.prefix_len else None for r in batch]
        rows, begins = [r.row for r in batch], [r.cached for r in batch]
        try:
            plan = self._extend(rows, begins, ends, prefixes=leases if started else None)
        except ConfigError:
            # A load that has failed has shortened its lease.
            if not any(map(self._falls_short, started)):
                raise
            return self._step_of(requests)
        return None if plan is None else Step(batch, ends, started, plan)

    def _falls_short(self, request: R) -> bool:
        """Whether the load of a request that has not run has failed; then it starts behind what it has."""
        lease = request.lease
        if request.load is None or lease is None or lease.length == request.prefix_len:
            return False
        request.load = None
        request.prefix_len = request.cached = lease.length
        return True

    def _with_slots(self, call: Callable[[], T | None]) -> T | None:
        """The result of a call that needs slots, `None` if there are not enough: `_lacks_copied` says why."""
        self._lacks_copied = False
        if self._tier is None:
            return call()
        while True:
            before, result = self._allocator.available_size(), call()
            if result is not None:
                return result
            if self._coming_slots():
                self._lacks_copied = True
                return None
            # A copy that was over by now may have held what was missing.
            if self._allocator.available_size() <= before:
                return None

    def _coming_slots(self) -> int:
        """Slots that are free when copies to the tier below, or from there, are over."""
        return 0 if self._tier is None else self._allocator.stats()["fenced"]

    def _evict_ahead(self, step: Step[R]) -> None:
        """Evict what the next step needs, if it is copied down first: the copies run beside this step."""
        if self._tier is None or self._tier.write != "back":
            return
        begins = {request: request.cached for request in self.running}
        begins.update(zip(step.requests, step.ends, strict=True))
        pages = 0
        for request, begin in begins.items():
            end = max(request.seq_len, begin + 1)  # the token of this step
            pages += self._pages(min(end, begin + self.max_step_tokens)) - self._pages(begin)
        # In this order a copy that ends meanwhile is not left out.
        missing = pages * self._page_size - self._coming_slots() - self._allocator.available_size()
        if missing > 0 and self.cache is not None:
            self.cache.evict(missing)

    def note_computed(self, step: Step[R]) -> None:
        """Record that the new tokens of a step are computed, and publish those of prompts.

        Its loads are complete: the current stream, or the host, has waited for their last layer.
        """
        self._tries_loads = True
        for request, end in zip(step.requests, step.ends, strict=True):
            is_chunk = end - request.cached > 1
            request.cached, request.load = end, None
            if is_chunk or (self._has_states and end % self._snapshot_tokens == 0):
                self.publish(request)

    def note_load_failed(self) -> None:
        """Record that a load has failed. Call `retract_all`; what it was for is computed."""
        self._tries_loads = False

    def publish(self, request: R) -> None:
        """Offer what a running request has computed to the prefix cache."""
        lease, cached = request.lease, request.cached
        if lease is None or self._whole(cached) <= (length := lease.length):
            return
        # The state is that after `cached` tokens, unless a step was planned and has failed.
        is_boundary = self._has_states and self._whole(cached) == cached == self.planner.seq_len(request.row)
        lease.publish(
            request.between(length, cached), row=request.row, state=request.row if is_boundary else None
        )

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
            if holders:
                self._spare.append([request.row for request in holders])
            self.released[state] += len(requests)
            for request in requests:
                request.state = state
                request.retractions += state == "waiting"
                request.lease = request.load = None
                if state != "waiting":
                    request.move = None
            self.running = [request for request in self.running if request not in requests]
            self.moving = [request for request in self.moving if request not in requests]
            self._free_spare()

    def hand_over(self, request: R) -> None:
        """Let a running request's rows go: it has them until that is over, and is finished then."""
        self.publish(request)
        # It is in a list at any time.
        self.moving.append(request)
        self.running.remove(request)
        self._begin_move(request, 0, request.cached)

    def abandon(self, request: R) -> None:
        """Abort a request whose rows move. It keeps its slots until nothing arrives in them any more."""
        request.state = "aborted"
        self.released["aborted"] += 1
        if request.move is not None:
            request.move.cancel()

    def _begin_move(self, request: R, begin: int, end: int) -> None:
        if request.move is not None:
            slots, lease = self._table.req_to_token[request.row, begin:end], request.lease
            if begin == 0 and lease is not None and lease.length:
                # For what was published twice the table has slots that are free, until the next step.
                slots = torch.cat([lease.slots.to(slots.dtype), slots[lease.length :]])
            request.move.begin(request.row, slots, begin)

    def _end_moves(self) -> None:
        """Let go of requests whose rows have gone, and go on with those whose rows have come."""
        for request in [*self.moving]:
            move = request.move
            if move is None or not move.query():
                continue
            if request.state == "aborted":
                request.lease = None
                # One call, so that no interrupt comes between what is listed no more and what is freed.
                self._spare.extend(zip(map(_row, map(self.moving.pop, [self.moving.index(request)]))))
                self._free_spare()
            elif not move.brings:
                self.release([request], "finished")
            elif move.has_failed:
                request.move = None
                self.waiting.appendleft(request)
                self.release([request], "waiting")
            else:
                request.cached, request.move = request.seq_len - 1, None
                # It was admitted before those that run, or most of them.
                self.running.insert(0, request)
                self.moving.remove(request)
                self.publish(request)

    def _is_coming(self, request: R) -> bool:
        """Let the rows of an admitted request come, in slots of its own. Whether there are enough."""
        begin, end = request.prefix_len, request.seq_len - 1
        for start in range(begin, end, self.planner.max_tokens):
            until = min(start + self.planner.max_tokens, end)
            prefixes = [request.lease] if start == begin and request.lease is not None else None
            call = partial(self._extend, [request.row], [start], [until], prefixes=prefixes)
            if self._with_slots(call) is None:
                return False
        self._begin_move(request, begin, end)
        return True

    def retract_all(self) -> None:
        """Return all running requests to the queue, in order, with their generated tokens.

        Also if another call, or this one, was left in the middle: no request, row or slot is lost.
        """
        # Slots of what has begun to move stay as they are.
        unmoved = [r for r in self.moving if not _moves(r) and r not in self.running]
        self.running = [r for r in self.running if not _moves(r)] + unmoved
        self.moving = [request for request in self.moving if _moves(request)]
        spare = {row for rows in self._spare for row in rows}
        for request in self.running:
            if request.state == "running" and request.row in spare:
                request.state = "waiting"
        for request in self.waiting:
            request.lease = request.load = None
        self.running = [request for request in self.running if _is_open(request)]
        lined_up = {*self.waiting, *self.running}
        self.fetching = deque(request for request in self.fetching if request not in lined_up)
        known = dict.fromkeys([*self.running, *self.waiting])
        self.waiting = deque(r for r in known if _is_open(r) and not r.is_complete)
        try:
            self.release([request for request in self.running if request.is_complete], "finished")
        finally:
            self.release(self.running, "waiting")

    def _free_spare(self) -> None:
        """Free the rows that no request has, with their slots."""
        self._too_long = None
        while self._spare:
            rows = self._spare[-1]
            try:
                # One call, so that no interrupt comes between what is listed no more and what is freed.
                next(map(self._finish, map(self._spare.pop, [-1])))
            except BaseException:
                # It frees nothing when it fails, such as by the error of a fence.
                if rows not in self._spare and self._is_allocated(rows[0]):
                    self._spare.append(rows)
                raise

    def _is_allocated(self, row: int) -> bool:
        try:
            self.planner.seq_len(row)
        except IndexOwnershipError:
            return False
        return True

    def _admit(self) -> None:
        """Start waiting requests in order, while rows, budget and slots last."""
        self._is_held_back = False
        if not self.waiting:
            return
        left = self.max_step_tokens - sum(r.seq_len - r.cached for r in self.running)
        # Each running request keeps a page in reserve, so that an admission is not undone at once.
        promised = sum(self._pages(r.seq_len) - self._pages(r.cached) + 1 for r in self.running)
        promised += sum(map(_comes, self.moving))
        while self.waiting and left > 0 and self._table.available_size():
            request = self.waiting[0]
            pages = promised + self._pages(request.seq_len) + 1
            # What was matched in vain is matched again when something was released.
            if request is self._too_long or (
                not self._fits(pages) and not self._fits(pages - self._pages(self._cached_len(request)))
            ):
                break
            lease = request.lease = self._match(request)
            length, loadable = (0, 0) if lease is None else (lease.length, self._loadable(request, lease))
            if not self._fits(pages - self._pages(length)):
                request.lease, self._too_long = None, request
                break
            request.prefix_len = length + loadable
            if _comes(request) or (
                not self._finds_more_later(request) and self._is_loaded(request, loadable)
            ):
                # One call, so that no interrupt comes between the row and the list.
                self._spare.extend(filter(None, map(partial(self._alloc_row, owner=request.owner), [1])))
            if not self._spare:
                request.lease = request.load = None
                break
            promised = pages - self._pages(request.prefix_len)
            left -= 1 if _comes(request) else request.seq_len - request.prefix_len
            # It is in a list at any time, and so is its row.
            (self.moving if _comes(request) else self.running).append(request)
            if request.fetch is not None:
                self.fetched_tokens += request.fetch.length
                request.fetch = None
            [request.row] = self._spare[0]
            request.cached = request.prefix_len
            request.state = "running"
            self.waiting.popleft()
            self._spare.clear()
            if _comes(request) and not self._is_coming(request):
                self.waiting.appendleft(request)
                self.release([request], "waiting")
                # With others that move there is something to wait for.
                self._is_held_back = self._lacks_copied and self._tries_loads and not self.moving
                break

    def _finds_more_later(self, request: R) -> bool:
        """Whether a request that runs is about to compute what this one would compute, too."""
        end = self._pages(request.prefix_len + _WORTH_WAITING) * self._page_size
        # A prefix with states ends at a snapshot, which need not be where two requests part.
        if self.cache is None or self._has_states or end >= request.seq_len:
            return False

        def begins_alike(other: R) -> bool:  # at the end first, where most differ
            return all(
                [*other.between(begin, end)] == [*request.between(begin, end)]
                for begin in (request.prefix_len, 0)
            )

        return any(
            other.cached < end <= other.seq_len
            and other.seq_len - other.cached > 1
            and other.namespace == request.namespace
            and begins_alike(other)
            for other in self.running
        )

    def _loadable(self, request: R, lease: Lease) -> int:
        """Tokens of a prefix to load."""
        tries = self._tier is not None and self._tries_loads and not _comes(request)
        loadable = lease.loadable if tries else 0
        return loadable if loadable and self._pays_to_load(loadable) else 0

    def _is_loaded(self, request: R, loadable: int) -> bool:
        """Let the tier's part of a prefix come back, if any shall. Whether its request can start, then."""
        lease = request.lease
        if not loadable or lease is None:
            return True
        request.load = self._with_slots(lease.load)
        if request.load is None and self._lacks_copied:
            self._is_held_back = True
            return False
        # Without slots it is computed.
        request.prefix_len = lease.length
        return True

    def _snapshot_end(self, request: R, end: int) -> int:
        """Where a chunk up to `end` ends instead: where prompts part, or with its last whole page."""
        parting = 0 if request.lease is None else request.lease.kv_length
        if request.cached < parting < end:
            return parting
        whole = self._whole(end)
        return whole if request.cached < whole else end

    def _fits(self, pages: int) -> bool:
        """Whether the running requests can get these pages; a single request fits without a reserve."""
        room = self._coming_slots() + self._obtainable_size()
        return not (self.running or self.moving) or pages * self._page_size <= room

    def _cached_len(self, request: R) -> int:
        if self.cache is None:
            return 0
        tokens = request.between(0, request.seq_len)
        return self.cache.cached_len(tokens, namespace=request.namespace)

    def _match(self, request: R) -> Lease | None:
        if self.cache is None:
            return None
        tokens = request.between(0, request.seq_len)
        return self.cache.match(tokens, namespace=request.namespace, limit=len(tokens) - 1)

    def _whole(self, tokens: int) -> int:
        """The part of so many tokens that fills pages."""
        return tokens // self._page_size * self._page_size

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self._page_size)


def _is_open(request: Schedulable) -> bool:
    return request.state in {"waiting", "running"}


def _comes(request: Schedulable) -> bool:
    """Whether its rows come from another process."""
    return request.move is not None and request.move.brings


def _moves(request: Schedulable) -> bool:
    """Whether rows of it may be on their way."""
    return request.move is not None and request.move.has_begun
