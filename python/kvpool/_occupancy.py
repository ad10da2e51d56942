"""What stands in a pool, unit by unit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from kvpool import _kvpool

if TYPE_CHECKING:
    from kvpool._kvpool import Pool
    from kvpool._pools import AnyPool

# Owners beyond these share a colour: what holds few units is found by pointing at it.
_MOST_OWNERS = 500


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
    if not hasattr(pool, "_occupancy"):
        raise TypeError(f"a {type(pool).__name__} hands nothing out that could leak")


def occupancy(pool: Pool) -> tuple[list[Span], list[int]]:
    """All units of a pool in order, and how many lives lasted less than 1, 2, 4, ... microseconds.

    Raises:
        TypeError: If the pool hands nothing out.
    """
    check_hands_out(pool)
    spans, lifetimes = pool._occupancy()  # type: ignore[attr-defined]  # noqa: SLF001 - of this package
    return [Span(*span) for span in spans], lifetimes


@dataclass(frozen=True)
class Snapshot:
    """What stood in one pool at one time.

    Attributes:
        name: Of the pool.
        kind: Its class.
        unit: What it hands out.
        unit_bytes: Bytes of one unit, where all are alike and that is known.
        debug: Whether it is known who holds what.
        spans: All units in order.
        lifetimes: How many lives lasted less than 1, 2, 4, ... microseconds.
        stats: Its numbers.
    """

    name: str
    kind: str
    unit: str
    unit_bytes: int | None
    debug: bool
    spans: list[Span]
    lifetimes: list[int]
    stats: dict[str, int]

    @property
    def count(self) -> int:
        """How many units there are."""
        return self.spans[-1].end - self.spans[0].first if self.spans else 0

    @property
    def free_runs(self) -> list[int]:
        """Lengths of the maximal runs of free units, in order."""
        runs: list[int] = []
        end = None
        for span in self.spans:
            if span.state == "free":
                length = span.end - span.first
                if end == span.first:
                    runs[-1] += length
                else:
                    runs.append(length)
                end = span.end
        return runs

    @property
    def fragmentation(self) -> float:
        """The part of the free units outside of the longest free run: 0 where they are in one piece."""
        runs = self.free_runs
        return 1 - max(runs) / sum(runs) if runs else 0.0

    @property
    def ages_s(self) -> list[tuple[float, int]]:
        """Age in seconds and units of each live span whose holder is known."""
        return [(span.holders[0][2], span.end - span.first) for span in self.spans if span.holders]


def take(pool: AnyPool) -> Snapshot:
    """What stands in `pool` now."""
    spans, lifetimes = occupancy(pool)
    return Snapshot(
        name=pool.name,
        kind=type(pool).__name__,
        unit=pool.unit,
        unit_bytes=_unit_bytes(pool),
        debug=pool.debug,
        spans=spans,
        lifetimes=lifetimes,
        stats=pool.stats(),
    )


def _unit_bytes(pool: AnyPool) -> int | None:
    """Bytes of one unit of a pool; `None` where it has no memory, or units of several sizes."""
    match pool:
        case _kvpool.ChunkPool():
            return pool.chunk_bytes
        case _kvpool.PagePool():
            return pool.stats()["bytes"] // max(1, pool.total_pages)
        case _kvpool.GDNPool():
            return pool.mem_bytes() // pool.pool_size
        case _kvpool.ReqToTokenPool():
            return 4 * pool.max_context_len
        case _:
            return 1 if pool.unit == "byte" else None


def owners(one: Snapshot) -> list[tuple[str, int]]:
    """The owners of live units, the one with the most first, and how many units each has."""
    counts: dict[str, int] = {}
    for span in one.spans:
        if span.state == "live":
            owner = owner_of(span)
            counts[owner] = counts.get(owner, 0) + span.end - span.first
    return sorted(counts.items(), key=lambda item: -item[1])[:_MOST_OWNERS]


def owner_of(span: Span) -> str:
    """How the owner of a live span is shown."""
    if not span.holders:
        return "in use"
    owner, site, *_ = span.holders[0]
    return site if owner is None else str(owner)
