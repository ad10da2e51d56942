"""Continuous batching for a replay: which requests run in a step, and how many of their tokens."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvpool.errors import OutOfMemoryError
from kvpool.tools.replay.timing import timed

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable

    import numpy as np
    import torch
    from numpy.typing import NDArray

    from kvpool import BatchPlan, BatchPlanner, Lease, PrefixCache
    from kvpool.tools.replay.prompts import Prompts

_ALIKE_TOKENS = 32
"""A request waits for one that is computing at least so many tokens that both share."""


@dataclass(slots=True, eq=False)
class Request:
    """A request of a trace.

    Attributes:
        index: Its place in the trace.
        total_len, input_len: Tokens of prompt and output, and of the prompt.
        seq_len: Known tokens: those of the prompt, and those generated.
        prompts: The texts of the trace.
        row: Row in the request table, while running.
        cached: Tokens with slots, while running.
        lease: Its lease of the prefix cache, while running with one.
        prefix_len: Tokens found in the prefix cache at its last admission.
        tokens: Its token ids, int32 `[total_len]`, once needed.
        prefix_keys: Hashes of its positions' prefixes, once needed.
    """

    index: int
    total_len: int
    input_len: int
    seq_len: int
    prompts: Prompts
    row: int = 0
    cached: int = 0
    lease: Lease | None = None
    prefix_len: int = 0
    tokens: NDArray[np.int32] | None = None
    prefix_keys: torch.Tensor | None = None

    def between(self, begin: int, end: int) -> NDArray[np.int32]:
        """Return tokens from position `begin` to `end`: a view, which the prefix cache reads in place."""
        if self.tokens is None:
            self.tokens = self.prompts.tokens_of(self.index, 0, self.total_len)
        return self.tokens[begin:end]


@dataclass(slots=True)
class Step:
    """One batch, with slots for its new tokens.

    Attributes:
        requests: The requests, oldest first.
        ends: For each, the number of its tokens with slots after the step.
        started: The requests whose first step since their admission this is.
        plan: The slots of the new tokens.
    """

    requests: list[Request]
    ends: list[int]
    started: list[Request]
    plan: BatchPlan


class Scheduler:
    """Continuous batching: a token for each request that decodes, and chunks of prompts up to a budget.

    Requests are admitted in order while rows and slots last. When the pool is short, the youngest is
    retracted: its slots are freed, and it returns to the head of the queue. With a prefix cache, a request
    starts behind the prefix that is found at its admission; chunks of prompts are published as they are
    computed, generated tokens when a request ends or is retracted.

    Args:
        planner: The planner over the pools, of this scheduler alone.
        cache: A prefix cache of its allocator.
        samples: Where the duration of each call goes, by operation.
        check: Called with each request before its slots are freed.

    Attributes:
        planner: The planner.
        waiting: Requests without a row, in order.
        running: Requests with a row, oldest first.
        retractions: Number of retractions.
    """

    def __init__(
        self,
        planner: BatchPlanner,
        cache: PrefixCache | None,
        samples: dict[str, array[int]],
        check: Callable[[Request], object],
    ) -> None:
        self.planner = planner
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.retractions: int = 0
        self._cache = cache
        self._check = check
        self._page_size = planner.allocator.page_size
        self._obtainable = planner.allocator.available_size if cache is None else cache.obtainable_size
        self._alloc_rows = timed(planner.req_to_token_pool.alloc, samples["alloc_row"])
        self._extend = timed(planner.extend, samples["extend"])
        self._finish = timed(planner.finish, samples["finish"])
        self._match_prefix = None if cache is None else timed(cache.match, samples["match"])
        self._publish_new = timed(self._publish_untimed, samples["publish"])
        # The request that was matched last and did not fit: a match changes what is evicted next, so that it
        # is matched again only when slots were freed.
        self._misfit: Request | None = None

    @property
    def is_idle(self) -> bool:
        """Whether no request waits or runs."""
        return not (self.waiting or self.running)

    def submit(self, request: Request) -> None:
        """Queue a request."""
        self.waiting.append(request)

    def plan(self, max_tokens: int) -> Step | None:
        """Admit requests, and take slots for at most `max_tokens` new tokens; `None` without requests.

        Raises:
            OutOfMemoryError: If no request fits, since slots are missing.
        """
        self._admit(max_tokens)
        while self.running:
            step = self._plan_batch(max_tokens)
            if step is not None:
                return step
            youngest = self.running[-1]
            self.retractions += 1
            self.waiting.appendleft(youngest)
            self.release([youngest])
        if self.waiting:
            capacity = self.planner.allocator.stats()["capacity"]
            raise OutOfMemoryError(f"no request fits: {self._obtainable()} of {capacity} slots are available")
        return None

    def record_computed(self, step: Step) -> None:
        """Record that the new tokens of a step have rows, and publish those of prompts."""
        for request, end in zip(step.requests, step.ends, strict=True):
            is_chunk = end - request.cached > 1
            request.cached = end
            if is_chunk:
                self._publish(request)

    def release(self, requests: list[Request]) -> None:
        """Check and publish running requests, and free their slots and rows."""
        for request in requests:
            self._check(request)
            self._publish(request)
        self._finish([request.row for request in requests])
        self._misfit = None
        self.running = [request for request in self.running if request not in requests]
        for request in requests:
            request.lease = request.tokens = request.prefix_keys = None

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self._page_size)

    def _publish(self, request: Request) -> None:
        if request.lease is not None:
            self._publish_new(request, request.lease)

    def _publish_untimed(self, request: Request, lease: Lease) -> None:
        if request.cached // self._page_size * self._page_size > lease.length:
            lease.publish(request.between(lease.length, request.cached), row=request.row)

    def _admit(self, max_tokens: int) -> None:
        """Start waiting requests in order, while rows, budget and slots last."""
        pages = self._pages
        left = max_tokens - sum(r.seq_len - r.cached for r in self.running)
        # What admitted requests will take, and one page more each, so that none is retracted at once.
        promised = sum(pages(r.seq_len) - pages(r.cached) + 1 for r in self.running)
        while self.waiting and left > 0 and self.planner.req_to_token_pool.available_size():
            request = self.waiting[0]
            needed = promised + pages(request.seq_len) + 1
            if not self._match(request, needed):
                return
            if self._is_computed_soon(request):
                request.lease = None
                return
            request.row = (self._alloc_rows(1) or [])[0]
            request.cached = request.prefix_len
            self.running.append(self.waiting.popleft())
            promised = needed - pages(request.prefix_len)
            left -= request.seq_len - request.prefix_len

    def _match(self, request: Request, pages: int) -> bool:
        """Lease the cached prefix of a request, if it fits behind that prefix.

        Args:
            request: The request.
            pages: Pages that it and all running requests will take if no prefix is found.
        """
        if request is self._misfit:
            return False
        is_alone = not self.running
        tokens = request.between(0, request.seq_len)
        if not (
            is_alone or self._has_room(pages) or self._has_room(pages - self._pages(self._found(tokens)))
        ):
            return False
        if self._match_prefix is not None:
            request.lease = self._match_prefix(tokens, limit=len(tokens) - 1)
        request.prefix_len = 0 if request.lease is None else request.lease.length
        # Leased pages cannot be evicted, so that there may be less room than before.
        if not (is_alone or self._has_room(pages - self._pages(request.prefix_len))):
            request.lease, self._misfit = None, request
            return False
        return True

    def _has_room(self, pages: int) -> bool:
        return pages * self._page_size <= self._obtainable()

    def _found(self, tokens: NDArray[np.int32]) -> int:
        return 0 if self._cache is None else self._cache.cached_len(tokens)

    def _is_computed_soon(self, request: Request) -> bool:
        """Return whether a running request is about to compute what a matched request would compute, too."""
        end = self._pages(request.prefix_len + _ALIKE_TOKENS) * self._page_size
        if self._cache is None or end >= request.seq_len:
            return False

        def begins_alike(other: Request) -> bool:  # at the end first, where most differ
            return all(
                bool((other.between(begin, end) == request.between(begin, end)).all())
                for begin in (request.prefix_len, 0)
            )

        return any(
            other.cached < end <= other.seq_len and other.seq_len - other.cached > 1 and begins_alike(other)
            for other in self.running
        )

    def _plan_batch(self, max_tokens: int) -> Step | None:
        """Plan a step of the running requests, as far as the budget lasts; `None` if slots are short."""
        requests: list[Request] = []
        ends: list[int] = []
        for request in self.running:
            if max_tokens == 0:
                break
            end = min(request.seq_len, request.cached + max_tokens)
            requests.append(request)
            ends.append(end)
            max_tokens -= end - request.cached
        started = [request for request in requests if request.cached == request.prefix_len]
        leases = [request.lease if request.cached == request.prefix_len else None for request in requests]
        rows, begins = [request.row for request in requests], [request.cached for request in requests]
        plan = self._extend(rows, begins, ends, prefixes=leases if started else None)
        return None if plan is None else Step(requests, ends, started, plan)
