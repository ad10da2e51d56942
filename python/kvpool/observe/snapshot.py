"""The occupancy of a pool at one time, and its distributions."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from kvpool.observe.spans import Span, occupancy
from kvpool.observe.units import counts, unit_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvpool._endpoints import Moving, Observed
    from kvpool._kvpool import Pool

# States of units with an owner, and states of an endpoint's slots.
_FOR = {"lent": "lent to", "filling": "filled by", "reading": "read from"}
_OWNED = ("live", *_FOR)


@dataclass(frozen=True)
class Snapshot:
    """The occupancy of one pool at one time, or the slots of a pool that an endpoint moves.

    Attributes:
        name: Name of the pool.
        kind: Class of the pool.
        unit: Name of its units.
        unit_bytes: Bytes of one unit, if known and the same for all.
        debug: Whether owners are recorded.
        spans: All units in order.
        lifetimes: Histogram of lifetimes below 1, 2, 4, ... microseconds.
        stats: Its statistics.
        use: A description of the units that `in_use` counts.
    """

    name: str
    kind: str
    unit: str
    unit_bytes: int | None
    debug: bool
    spans: list[Span]
    lifetimes: list[int]
    stats: dict[str, int]
    use: str = "in use"

    @property
    def count(self) -> int:
        """Number of units."""
        return self.spans[-1].end - self.spans[0].first if self.spans else 0

    @cached_property
    def counts(self) -> Counter[str]:
        """Number of units by state."""
        counts: Counter[str] = Counter()
        for span in self.spans:
            counts[span.state] += span.end - span.first
        return counts

    @property
    def in_use(self) -> int:
        """Number of units that are not free; for an endpoint, of those that are not idle."""
        return self.count - self.counts["free"] - self.counts["idle"]

    @property
    def cached(self) -> str:
        """A description of the units that only a prefix cache holds; empty if there are none."""
        evictable, locked = self.counts["evictable"], self.counts["locked"]
        total = evictable + locked
        return f"{total:,} of them cached: {evictable:,} evictable and {locked:,} locked" if total else ""

    @cached_property
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
        """Share of free units outside of the longest free run: 0 if they are contiguous."""
        runs = self.free_runs
        return 1 - max(runs) / sum(runs) if runs else 0.0

    @property
    def run_lengths(self) -> dict[int, int]:
        """Number of free runs by length, in powers of two: from the key to below twice the key."""
        powers = Counter(length.bit_length() - 1 for length in self.free_runs)
        return {2**power: count for power, count in _filled(powers).items()}

    @property
    def ages_s(self) -> dict[float, int]:
        """Number of units with a recorded holder by age, in powers of ten."""
        powers: Counter[int] = Counter()
        for span in self.spans:
            if span.holders:
                age_s = max(span.holders[0][2], 1e-6)
                powers[max(-6, math.floor(math.log10(age_s)))] += span.end - span.first
        return {10.0**power: count for power, count in _filled(powers).items()}

    @property
    def lifetimes_s(self) -> dict[float, int]:
        """Number of lifetimes below the key, and at least half of it."""
        powers = Counter({at: lives for at, lives in enumerate(self.lifetimes) if lives})
        return {2.0**power * 1e-6: lives for power, lives in _filled(powers).items()}


def _filled(counts: Counter[int]) -> dict[int, int]:
    """Return counts from the least key to the greatest, without gaps."""
    return {key: counts[key] for key in range(min(counts), max(counts) + 1)} if counts else {}


def take(pool: Pool) -> Snapshot:
    """Take a snapshot of `pool`."""
    spans, lifetimes = occupancy(pool)
    return Snapshot(
        name=pool.name,
        kind=type(pool).__name__,
        unit=pool.unit,
        unit_bytes=unit_bytes(pool),
        debug=pool.debug,
        spans=spans,
        lifetimes=lifetimes,
        stats=counts(pool.stats()),
    )


def take_endpoint(endpoint: Observed) -> list[Snapshot]:
    """Take a snapshot of the slots that an endpoint moves, for each of its pools."""
    return [
        Snapshot(
            name=endpoint.name if pool == "kv" else f"{endpoint.name}, {pool}",
            kind="Endpoint",
            unit="slot",
            unit_bytes=None,
            debug=True,
            spans=[*_under_transfer(rows, moving)],
            lifetimes=[],
            stats={},
            use="under transfer",
        )
        for pool, (rows, moving) in endpoint.moving().items()
    ]


def _under_transfer(rows: int, moving: Sequence[Moving]) -> Iterator[Span]:
    """Yield spans of the slots `[1, rows)`: the moving slots, and the idle ones between them."""
    found: dict[int, list[Moving]] = {}
    for one in moving:
        for slot in one.slots.tolist():
            found.setdefault(slot, []).append(one)
    end = 1
    # Neighbours: the difference of a slot and its place among the others is the same.
    for _, group in itertools.groupby(
        enumerate(sorted(found)), lambda pair: (pair[1] - pair[0], [id(one) for one in found[pair[1]]])
    ):
        slots = [slot for _, slot in group]
        if end < slots[0]:
            yield Span(end, slots[0], "idle", None, [])
        held = found[slots[0]]
        end = slots[-1] + 1
        holders: list[tuple[str | int | None, str, float, int]] = [
            (f"{_FOR[one.state]} {one.peer or 'whoever has the ticket'}", one.lease, one.age_s, 0)
            for one in held
        ]
        yield Span(slots[0], end, held[0].state, None, holders)
    if end < rows:
        yield Span(end, rows, "idle", None, [])


def owners(one: Snapshot) -> list[tuple[str, int]]:
    """Return the owners of live units, or the peers of moving ones, with their units, largest first."""
    counts: Counter[str] = Counter()
    for span in one.spans:
        if span.state in _OWNED:
            counts[owner_of(span)] += span.end - span.first
    return counts.most_common()


def owner_of(span: Span) -> str:
    """Return the label of a span's owner: strings in quotes, as they may look like other labels."""
    if not span.holders:
        return "in use"
    owner, site, *_ = span.holders[0]
    return site if owner is None else repr(owner)
