"""The slots that requests of a scheduler can get."""

from __future__ import annotations

from time import sleep
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvpool import HostTier, PrefixCache, TokenToKVPoolAllocator

T = TypeVar("T")

_COPY_WAIT_S = 0.0005
"""The most seconds of one wait for copies. It is short, since some copies may end long before the others."""


class SlotSupply:
    """Slots that are free, that a cache can evict, and that copies to or from the tier below it still hold.

    Args:
        allocator: The allocator of the slots.
        cache: A prefix cache of it.

    Attributes:
        tier: The tier below the cache, if there is one.
        page_size: Slots in a page.
        lacks_copied: Whether copies held slots when the last attempt was short of them.
    """

    def __init__(self, allocator: TokenToKVPoolAllocator, cache: PrefixCache | None) -> None:
        tiers = () if cache is None else cache.tiers
        self.tier: HostTier | None = tiers[0] if tiers else None
        self.page_size: int = allocator.page_size
        self.lacks_copied: bool = False
        self._allocator, self._cache = allocator, cache
        self.obtainable: Callable[[], int] = (
            allocator.available_size if cache is None else cache.obtainable_size
        )

    @property
    def capacity(self) -> int:
        """All slots."""
        return self._allocator.stats()["capacity"]

    @property
    def evicts_ahead(self) -> bool:
        """Whether evicted pages are copied to the tier first, so that their slots are free later."""
        return self.tier is not None and self.tier.write == "back"

    @property
    def coming(self) -> int:
        """Slots that become free when the copies to and from the tier below are over."""
        return 0 if self.tier is None else self._allocator.stats()["fenced"]

    def whole(self, tokens: int) -> int:
        """Return the largest multiple of the page size that is at most `tokens`."""
        return tokens // self.page_size * self.page_size

    def pages(self, tokens: int) -> int:
        """Return the number of pages that `tokens` need."""
        return -(-tokens // self.page_size)

    def has_room(self, pages: int) -> bool:
        """Return whether `pages` pages are available now, or will be when the copies are over."""
        return pages * self.page_size <= self.coming + self.obtainable()

    def attempt(self, call: Callable[[], T | None]) -> T | None:
        """Return the result of a call that needs slots; `None` if there are not enough.

        Then `lacks_copied` is set if copies hold slots.
        """
        self.lacks_copied = False
        if self.tier is None:
            return call()
        while True:
            before, result = self._allocator.available_size(), call()
            if result is not None:
                return result
            if self.coming:
                self.lacks_copied = True
                return None
            # A copy that has ended meanwhile may have held the missing slots.
            if self._allocator.available_size() <= before:
                return None

    def wait_for_copies(self) -> None:
        """Wait a little for copies that hold slots.

        Raises:
            DriverError: If the device has failed, so that no copy ends.
        """
        if self._cache is not None and not self._cache.wait_written(_COPY_WAIT_S):
            return
        if self.coming:
            # A cancelled load, or a fence of another owner, holds the slots. No call waits for these.
            sleep(_COPY_WAIT_S)

    def evict_ahead(self, growth: Iterable[tuple[int, int]]) -> None:
        """Evict the pages that requests need next, so that they are copied to the tier during this step.

        Args:
            growth: For each request, the number of its tokens before and after.
        """
        pages = sum(self.pages(after) - self.pages(before) for before, after in growth)
        # In this order, a copy that ends between the two reads is counted.
        missing = pages * self.page_size - self.coming - self._allocator.available_size()
        if missing > 0 and self._cache is not None:
            self._cache.evict(missing)
