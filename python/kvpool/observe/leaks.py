"""Live units of a pool, by owner."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvpool._kvpool import _noted, _Workspace
from kvpool.errors import IndexOwnershipError, KvPoolError, StateError
from kvpool.observe.registry import pools
from kvpool.observe.spans import check_hands_out, occupancy
from kvpool.observe.units import hands_out

if TYPE_CHECKING:
    from types import TracebackType

    from kvpool._kvpool import Pool
    from kvpool.typing import LeakState

_logger = logging.getLogger("kvpool")

# Rows of the table in an error message.
_SHOWN = 20


@dataclass(frozen=True)
class Leak:
    """Live units of a pool with the same owner and source line.

    Attributes:
        owner: The `owner` argument of `alloc`, if given; for units of a prefix cache, the name of the cache.
        site: File, line and function of the allocation.
        count: Number of units.
        age_s: Seconds since the oldest unit was allocated.
        spans: The units, as (first, end).
        state: "live"; or, for units that only a prefix cache holds, "evictable" or, with leases, "locked".
    """

    owner: str | int | None
    site: str
    count: int
    age_s: float
    spans: list[tuple[int, int]]
    state: LeakState = "live"


def leaks(pool: Pool, since: int = 0) -> list[Leak]:
    """Return the leaks of a pool like `Pool.leaks`, for allocations from call number `since` on."""
    check_hands_out(pool)
    if not records_owners(pool):
        raise TypeError(f"a {type(pool).__name__} records no owners; its reset() frees everything")
    if not pool.debug:
        raise StateError(f"{pool.name} records no owners; create it with debug=True, or set KVPOOL_DEBUG=1")
    spans, _ = occupancy(pool)
    groups: dict[tuple[str | int | None, str, LeakState], list[tuple[float, int, int]]] = {}
    for span in spans:
        state = _held(span.state)
        for owner, site, age_s, number in span.holders:
            if number >= since:
                groups.setdefault((owner, site, state), []).append((age_s, span.first, span.end))
    found = [
        Leak(
            owner,
            site,
            sum(end - first for _, first, end in held),
            max(age_s for age_s, _, _ in held),
            [(first, end) for _, first, end in held],
            state,
        )
        for (owner, site, state), held in groups.items()
    ]
    return sorted(found, key=lambda leak: (leak.state != "live", -leak.count, -leak.age_s))


def _held(state: str) -> LeakState:
    """Return the state of units that have a holder."""
    if state == "evictable":
        return "evictable"
    return "locked" if state == "locked" else "live"


def table(found: list[Leak], unit: str) -> str:
    """Format leaks as lines of text: count, owner, source line, age and the first units."""
    lines = []
    for leak in found[:_SHOWN]:
        spans = [f"{first}..{end - 1}" if end - first > 1 else str(first) for first, end in leak.spans[:4]]
        more = ", ..." if len(leak.spans) > len(spans) else ""
        owner = "no owner given" if leak.owner is None else f"owner {leak.owner!r}"
        held = f"{leak.count} {unit}{'s' if leak.count != 1 else ''} ({', '.join(spans)}{more})"
        lines.append(f"  {held}: {owner}, taken at {leak.site} {leak.age_s:.3f} s ago")
    if len(found) > _SHOWN:
        lines.append(f"  and {len(found) - _SHOWN} more owners or places")
    return "\n".join(lines)


def report_at_exit() -> None:
    """Log what is still live in each pool that records owners, by owner and source line."""
    for pool in pools():
        if not (pool.debug and hands_out(pool) and records_owners(pool)):
            continue
        try:
            live = [leak for leak in leaks(pool) if leak.state == "live"]
        except (KvPoolError, RuntimeError) as error:
            _logger.warning("%s: what is live at exit cannot be listed: %s", pool.name, error)
            continue
        if live:
            count, unit = sum(leak.count for leak in live), pool.unit
            units = f"{count} {unit}{'s are' if count != 1 else ' is'} live"
            _logger.warning("%s: %s at exit:\n%s", pool.name, units, table(live, unit))


class ExpectBalanced:
    """The context of `Pool.expect_balanced`, which raises if more units are live at exit than at entry."""

    def __init__(self, pool: Pool) -> None:
        check_hands_out(pool)
        self._pool = pool
        self._live = self._since = 0

    def __enter__(self) -> Pool:
        self._live = _live_count(self._pool)
        self._since = _noted()
        return self._pool

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        live = _live_count(self._pool)
        if kind is not None or live <= self._live:
            return
        unit = self._pool.unit
        more = live - self._live
        message = f"{self._pool.name}: {live} {unit}s are live, {more} more than the {self._live} before"
        if not records_owners(self._pool):
            raise IndexOwnershipError(message)
        if self._pool.debug:
            taken = [leak for leak in leaks(self._pool, self._since) if leak.state == "live"]
            raise IndexOwnershipError(f"{message}; taken meanwhile:\n{table(taken, unit)}")
        raise IndexOwnershipError(f"{message}; debug=True or KVPOOL_DEBUG=1 records their owners")


def records_owners(pool: Pool) -> bool:
    """Return whether the pool can record owners."""
    return not isinstance(pool, _Workspace)


def _live_count(pool: Pool) -> int:
    """Return the number of live units. With debugging, a unit counts once for each owner."""
    spans, _ = occupancy(pool)
    return sum((span.end - span.first) * max(1, len(span.holders)) for span in spans if span.state == "live")
