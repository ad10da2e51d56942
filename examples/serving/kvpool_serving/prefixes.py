"""The cached prefixes with which the requests of a scheduler start."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic

from kvpool_serving.schedulable import R, has_rows_elsewhere

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvpool import Lease, PrefixCache
    from kvpool_serving.pool_calls import Match
    from kvpool_serving.slot_supply import SlotSupply


class Prefixes(Generic[R]):
    """Matches the prefixes of waiting requests, and loads the parts that only the tier below the cache has.

    Args:
        cache: The prefix cache; `None` finds nothing.
        slots: The supply of slots.
        match: Leases the longest cached prefix of tokens; `None` without a cache.
        pays_to_load: Called with a number of tokens; returns whether to load so many from the tier instead of
            computing them.
        alike_tokens: If a running request is about to compute at least this many tokens that a waiting
            request shares, the latter waits to find them cached.

    Attributes:
        misfit: The request that was matched last and did not fit. It is matched again when slots are
            released (`record_release`), since a match has a cost and changes what is evicted next.
        tries_loads: Whether prefixes are loaded. It is false after a load that has failed or did not get
            slots in time, until a step was computed.
    """

    def __init__(
        self,
        cache: PrefixCache | None,
        slots: SlotSupply,
        match: Match | None,
        pays_to_load: Callable[[int], bool],
        *,
        alike_tokens: int,
    ) -> None:
        self.misfit: R | None = None
        self.tries_loads: bool = True
        self._cache = cache
        self._slots = slots
        self._match = match
        self._pays_to_load = pays_to_load
        self._alike_tokens = alike_tokens

    def match(self, request: R, pages: int, *, is_alone: bool) -> bool:
        """Lease the cached prefix of a request, if the request fits behind it.

        Sets `held.lease` and `prefix_len`, which includes the tokens to load.

        Args:
            request: The request.
            pages: Pages that this request and all others will take if no prefix is found.
            is_alone: Whether there are no others. Such a request always fits, without a reserve.

        Returns:
            Whether the request fits.
        """
        if request is self.misfit:
            return False
        pages_of = self._slots.pages
        if not (
            is_alone
            or self._slots.has_room(pages)
            or self._slots.has_room(pages - pages_of(self._cached_len(request)))
        ):
            return False
        lease = request.held.lease = self._lease(request)
        length, loadable = (0, 0) if lease is None else (lease.length, self._loadable(request, lease))
        # Leased pages cannot be evicted, so there may be less room than before.
        if not (is_alone or self._slots.has_room(pages - pages_of(length))):
            request.held.lease, self.misfit = None, request
            return False
        request.prefix_len = length + loadable
        return True

    def is_computed_soon(self, request: R, running: Iterable[R]) -> bool:
        """Return whether a running request is about to compute what a matched request would compute, too."""
        end = self._slots.pages(request.prefix_len + self._alike_tokens) * self._slots.page_size
        # A prefix with states ends at a snapshot, which need not be where two requests part.
        if self._cache is None or self._cache.states is not None or end >= request.seq_len:
            return False

        def begins_alike(other: R) -> bool:  # at the end first, where most differ
            return all(
                [*other.between(begin, end)] == [*request.between(begin, end)]
                for begin in (request.prefix_len, 0)
            )

        return any(
            other.held.cached < end <= other.seq_len
            and other.seq_len - other.held.cached > 1
            and other.namespace == request.namespace
            and begins_alike(other)
            for other in running
        )

    def try_load(self, request: R) -> bool:
        """Begin to load the part of a matched prefix that only the tier has, if it is to be loaded.

        Returns:
            Whether the request can start. If not, copies hold the slots that the load needs. If slots are
            short for another reason, the request starts and computes this part.
        """
        lease = request.held.lease
        if lease is None or lease.length == request.prefix_len:
            return True
        request.held.load = self._slots.attempt(lease.load)
        if request.held.load is None and self._slots.lacks_copied:
            return False
        request.prefix_len = lease.length
        return True

    def record_release(self) -> None:
        """Record that slots were released."""
        self.misfit = None

    def _lease(self, request: R) -> Lease | None:
        if self._match is None:
            return None
        tokens = request.between(0, request.seq_len)
        return self._match(tokens, namespace=request.namespace, limit=len(tokens) - 1)

    def _cached_len(self, request: R) -> int:
        if self._cache is None:
            return 0
        return self._cache.cached_len(request.between(0, request.seq_len), namespace=request.namespace)

    def _loadable(self, request: R, lease: Lease) -> int:
        """Return the tokens behind a lease that are to be loaded."""
        if self._slots.tier is None or not self.tries_loads or has_rows_elsewhere(request):
            return 0
        loadable = lease.loadable
        return loadable if loadable and self._pays_to_load(loadable) else 0
