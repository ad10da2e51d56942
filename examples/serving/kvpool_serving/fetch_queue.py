"""The queue of requests that wait for the parts of their prompts that a store has."""

from __future__ import annotations

from collections import deque
from time import monotonic
from typing import TYPE_CHECKING, Generic

from kvpool_serving.schedulable import R

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from kvpool import Fetch, PrefixCache
    from kvpool_serving.options import SchedulerOptions


class FetchQueue(Generic[R]):
    """The queue of requests before the queue for slots: the parts of their prompts in the store are fetched.

    A request leaves this queue when its own fetch is over, whatever those before it wait for.

    Args:
        cache: The prefix cache; `None`, or one without a store, fetches nothing.
        options: The limits of fetches: how long to wait for them, and their share of the tier.
        whole: Returns the number of tokens in the whole pages of so many tokens.

    Attributes:
        has_store: Whether there is a store.
        requests: The requests, in order.
    """

    def __init__(
        self, cache: PrefixCache | None, options: SchedulerOptions, whole: Callable[[int], int]
    ) -> None:
        self.requests: deque[R] = deque()
        tiers = () if cache is None else cache.tiers
        self.has_store: bool = len(tiers) > 1
        self._cache = cache
        self._options = options
        self._whole = whole
        self._tier = tiers[0] if tiers else None
        # The time at which the fetch of the first request is given up.
        self._deadline = 0.0
        # A fetch that was given up, until it is over.
        self._overdue: Fetch | None = None

    @property
    def is_stuck(self) -> bool:
        """Whether a cancelled fetch is not over yet. Until it is, nothing else is fetched from the store."""
        if self._overdue is not None and self._overdue.query():
            self._overdue = None
        return self._overdue is not None

    def concerns(self, request: R) -> bool:
        """Return whether the store may have a part of a request's prompt that the device does not have."""
        if self._cache is None or not self.has_store:
            return False
        # The last token is computed in any case.
        tokens = request.between(0, request.seq_len - 1)
        return self._cache.cached_len(tokens, namespace=request.namespace) < self._whole(len(tokens))

    def submit(self, request: R, waiting: Collection[R]) -> None:
        """Append a request, and fetch the part of its prompt that the store has."""
        self.requests.append(request)
        self._begin(waiting)

    def remove(self, others: Collection[R]) -> None:
        """Remove those of the given requests that are queued here."""
        self.requests = deque(request for request in self.requests if request not in others)

    def line_up(self, waiting: deque[R], *, is_busy: bool) -> None:
        """Move the requests whose fetches are over to the queue for slots, in order.

        Args:
            waiting: The queue for slots.
            is_busy: Whether the engine has other work. If not, the call waits a little for the first fetch.
        """
        while self.requests:
            self._begin(waiting)
            fetch = self.requests[0].held.fetch
            if not (
                self._move_fetched(waiting)
                or self._give_up(fetch, waiting)
                or (not (is_busy or waiting) and fetch is not None and fetch.wait(self._options.fetch_wait_s))
            ):
                return

    def _move_fetched(self, waiting: deque[R]) -> bool:
        """Move the requests whose fetches are over, and return whether there are any."""
        first = self.requests[0]
        fetched = []
        for request in self.requests:
            if request.held.fetch is None:
                # Nor has one of those after it.
                break
            if request.held.fetch.query():
                fetched.append(request)
        for request in fetched:
            self._move(request, waiting)
        if fetched and fetched[0] is first:
            self._deadline = monotonic() + self._options.fetch_timeout_s
        return bool(fetched)

    def _give_up(self, fetch: Fetch | None, waiting: deque[R]) -> bool:
        """Cancel the fetch of the first request after its deadline. Then no request waits for the store.

        Returns:
            Whether it is given up.
        """
        if fetch is None or monotonic() < self._deadline:
            return False
        fetch.cancel()
        self._overdue = fetch
        self._move(self.requests[0], waiting)
        self._deadline = monotonic() + self._options.fetch_timeout_s
        if self.is_stuck:
            waiting.extend(self.requests)
            self.requests.clear()
        return True

    def _move(self, request: R, waiting: deque[R]) -> None:
        # The request is always in one of the queues; `remove` takes it out of this one.
        waiting.append(request)
        self.requests.remove(request)

    def _begin(self, waiting: Collection[R]) -> None:
        """Begin to fetch the prompts of the first requests, into at most their share of the tier."""
        if self._cache is None or self._tier is None:
            return
        # The fetched prompts of requests that are not admitted yet stay in the tier.
        kept = sum(request.seq_len for request in waiting if request.held.fetch is not None)
        left = int(self._tier.size * self._options.fetch_share) - kept
        for place, request in enumerate(self.requests):
            left -= request.seq_len
            if left < 0 and place > 0:
                return
            if request.held.fetch is None:
                if place == 0:
                    self._deadline = monotonic() + self._options.fetch_timeout_s
                tokens = request.between(0, request.seq_len)
                request.held.fetch = self._cache.fetch(
                    tokens, namespace=request.namespace, limit=len(tokens) - 1
                )
