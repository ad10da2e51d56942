"""Snapshots as an interactive page."""

from __future__ import annotations

import datetime as dt
import itertools
import json
import math
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from kvpool.observe.spans import no_collection

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from kvpool.observe.snapshot import Snapshot
    from kvpool.observe.spans import Span

    # Owner and source line.
    Holder: TypeAlias = tuple[str | int | None, str]
    Json: TypeAlias = str | float | Sequence["Json"] | Mapping[str, "Json"] | None

_TEMPLATE = Path(__file__).with_name("snapshot.html")
# Cells of the map. If there are more than twice as many spans, those within a cell are merged.
_CELLS = 16_384
# Holders named in a merged span, and rows of a map's table.
_NAMED, _LISTED = 3, 100


def to_html(taken: list[Snapshot]) -> str:
    """Render snapshots as one self-contained page."""
    with no_collection():
        pools = [_as_json(one) for one in taken]
    data = {
        "taken": dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds"),
        "listed": _LISTED,
        "pools": pools,
    }
    # A `<` in a script element could end it.
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return _TEMPLATE.read_text(encoding="utf-8").replace("__DATA__", text)


def _as_json(one: Snapshot) -> dict[str, Json]:
    """Return a snapshot for the page: holders and source lines by number, so that each is stored once."""
    totals = _totals(one)
    numbers: dict[Holder, int] = {}
    sites: dict[str, int] = {}
    per_cell = max(1, math.ceil(one.count / _CELLS))
    spans = [_span(group, numbers) for group in _groups(one.spans, per_cell)]
    for holder, _ in sorted(totals.items(), key=lambda item: -item[1][0])[:_LISTED]:
        numbers.setdefault(holder, len(numbers))
    holders = [_holder(holder, totals[holder], sites) for holder in numbers]
    return {
        "name": one.name,
        "kind": one.kind,
        "unit": one.unit,
        "unitBytes": one.unit_bytes,
        "debug": one.debug,
        "inUse": one.in_use,
        "use": one.use,
        "cached": one.cached,
        "perCell": per_cell,
        "spans": spans,
        "spanCount": len(one.spans),
        "holders": holders,
        "holderCount": len(totals),
        "sites": list(sites),
        "ages": list(one.ages_s.items()),
        "lifetimes": list(one.lifetimes_s.items()),
        "freeRuns": len(one.free_runs),
        "longestFreeRun": max(one.free_runs, default=0),
        "runLengths": list(one.run_lengths.items()),
        "fragmentation": one.fragmentation,
        "stats": one.stats,
    }


def _span(group: Sequence[Span], numbers: dict[Holder, int]) -> list[Json]:
    """Return a span, or a group of spans that are merged, and number its holders that have no number yet."""
    first, end = group[0].first, group[-1].end
    if len(group) > 1:
        sizes = [span.n_bytes for span in group if span.n_bytes is not None]
        return [first, end, "mixed", sum(sizes) if sizes else None, [], _parts(group, numbers), len(group)]
    (span,) = group
    held = [
        [numbers.setdefault((owner, site), len(numbers)), round(age_s, 6)]
        for owner, site, age_s, _ in span.holders
    ]
    return [first, end, span.state, span.n_bytes, held]


def _holder(holder: Holder, total: tuple[int, float], sites: dict[str, int]) -> list[Json]:
    """Return a holder with its units and the age of the oldest, and number its site, if it is new."""
    (owner, site), (count, oldest_s) = holder, total
    name = owner if owner is None else repr(owner)
    return [name, sites.setdefault(site, len(sites)), count, round(oldest_s, 6)]


def _totals(one: Snapshot) -> dict[Holder, tuple[int, float]]:
    """Return the number of units and age of the oldest in seconds, by holder."""
    totals: dict[Holder, tuple[int, float]] = {}
    for span in one.spans:
        for owner, site, age_s, _ in span.holders:
            count, oldest_s = totals.get((owner, site), (0, 0.0))
            totals[owner, site] = (count + span.end - span.first, max(oldest_s, age_s))
    return totals


def _groups(spans: list[Span], per_cell: int) -> Iterable[Sequence[Span]]:
    """Return single spans or, if there are many spans, groups of small ones that begin in the same cell."""
    if len(spans) <= 2 * _CELLS:
        return ([span] for span in spans)

    def cell(span: Span) -> tuple[int, bool]:
        return (span.first - spans[0].first) // per_cell, span.end - span.first >= per_cell

    return (list(group) for _, group in itertools.groupby(spans, cell))


def _parts(group: Sequence[Span], numbers: dict[Holder, int]) -> list[list[Json]]:
    """Return the units by state and first holder, largest first, with the oldest age; unnamed ones last."""
    held: dict[tuple[str, Holder], tuple[int, float]] = {}
    others: Counter[str] = Counter()
    for span in group:
        units = span.end - span.first
        if not span.holders:
            others[span.state] += units
            continue
        owner, site, age_s, _ = span.holders[0]
        count, oldest_s = held.get((span.state, (owner, site)), (0, 0.0))
        held[span.state, (owner, site)] = (count + units, max(oldest_s, age_s))
    most = sorted(held.items(), key=lambda item: -item[1][0])
    parts: list[list[Json]] = [
        [count, state, [[numbers.setdefault(holder, len(numbers)), round(age_s, 6)]]]
        for (state, holder), (count, age_s) in most[:_NAMED]
    ]
    if more := most[_NAMED:]:
        count, oldest_s = sum(count for _, (count, _) in more), max(age_s for _, (_, age_s) in more)
        parts.append([count, "live", [[None, round(oldest_s, 6)]]])
    parts.extend([count, state, []] for state, count in sorted(others.items(), reverse=True))
    return parts
