"""What stands in a pool, unit by unit."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvpool._kvpool import Pool


class Span(NamedTuple):
    """Neighbouring units of a pool that are alike.

    Attributes:
        first: The first of them.
        end: One past the last.
        state: "free", "live", or "fenced": given back, and kept until work in flight is done.
        n_bytes: Bytes, where units have sizes of their own.
        holders: Of each who holds them, where the pool debugs: owner, place in the program, seconds since,
            and the number of the call among all that were noted.
    """

    first: int
    end: int
    state: str
    n_bytes: int | None
    holders: list[tuple[str | int | None, str, float, int]]


def check_hands_out(pool: Pool) -> None:
    """Raises `TypeError` for a pool that hands nothing out."""
    if not pool._hands_out:  # noqa: SLF001 - of this package
        raise TypeError(f"a {type(pool).__name__} hands nothing out that could leak")


def occupancy(pool: Pool) -> tuple[list[Span], list[int]]:
    """All units of a pool in order, and how many lives lasted less than 1, 2, 4, ... microseconds.

    Raises:
        TypeError: If the pool hands nothing out.
    """
    check_hands_out(pool)
    with no_collection():
        spans, lifetimes = pool._occupancy()  # noqa: SLF001 - of this package
        return [Span(*span) for span in spans], lifetimes


@contextmanager
def no_collection() -> Iterator[None]:
    """Keeps the garbage collector from looking through millions of new spans, which are no garbage."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
