"""Occupancy of a pool, unit by unit."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from kvpool.observe.units import Holder, hands_out, spans_and_lifetimes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvpool._kvpool import Pool


class Span(NamedTuple):
    """Neighbouring units of a pool that are alike.

    Attributes:
        first: The first unit.
        end: One past the last unit.
        state: "free"; "live"; "evictable", held only by a prefix cache; "locked", held only by a prefix cache
            with leases; or "fenced", freed but kept until work in flight is done. For an endpoint: "idle", or
            a state of `kvpool._endpoints.Moving`.
        n_bytes: Bytes, if units differ in size.
        holders: With debugging, for each holder: owner, source line, seconds since the allocation, and the
            sequence number of the call. For an endpoint: the purpose, the lease, and seconds since its begin.
    """

    first: int
    end: int
    state: str
    n_bytes: int | None
    holders: list[Holder]


def check_hands_out(pool: Pool) -> None:
    """Raise `TypeError` for a pool that hands out no units."""
    if not hands_out(pool):
        raise TypeError(f"a {type(pool).__name__} hands out no units, so none can leak")


def occupancy(pool: Pool) -> tuple[list[Span], list[int]]:
    """Return all units of a pool in order, and a histogram of lifetimes below 1, 2, 4, ... microseconds.

    Raises:
        TypeError: If the pool hands out no units.
    """
    check_hands_out(pool)
    with no_collection():
        spans, lifetimes = spans_and_lifetimes(pool)
        return [Span(*span) for span in spans], lifetimes


@contextmanager
def no_collection() -> Iterator[None]:
    """Disable the garbage collector, which would traverse millions of new spans and free nothing."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
