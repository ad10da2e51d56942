"""Pictures of what stands in pools: as PNG, or as HTML in which one can point at things."""

from __future__ import annotations

import datetime as dt
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvpool import _kvpool
from kvpool._leaks import Span, occupancy
from kvpool._pools import pools as living_pools
from kvpool.errors import ConfigError

if TYPE_CHECKING:
    import os

    from kvpool._pools import AnyPool

_TEMPLATE = Path(__file__).with_name("_snapshot.html")

# Owners beyond these share a colour: what holds few units is found by pointing at it.
_MOST_OWNERS = 500


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


def snapshot(path: str | os.PathLike[str], *pools: AnyPool) -> None:
    """Write a map of what is in use in pools, by owner, with distributions of ages, lifetimes and free runs.

    In the HTML file, which loads nothing else, one points at a unit to read which units are alike, who holds
    them since when, and their size. Owners are known of pools that debug (`debug=True` or `KVPOOL_DEBUG=1`);
    of others the map shows what is in use. Waits for freed slots whose values are on their way from a GPU,
    and for nothing else.

    Args:
        path: A file that ends in `.html`, or in `.png` (needs Matplotlib). One that is there is replaced.
        pools: Which; by default all of this process that hand something out.

    Raises:
        ConfigError: If the file ends in something else, or no pool hands anything out.
        TypeError: If a pool hands nothing out.
        ModuleNotFoundError: If Matplotlib is needed and not installed.
    """
    target = Path(path)
    if target.suffix not in {".html", ".png"}:
        raise ConfigError(f"a snapshot is .html or .png, not {target.name!r}")
    chosen = pools or [pool for pool in living_pools() if hasattr(pool, "_occupancy")]
    if not chosen:
        raise ConfigError("no pool of this process hands anything out")
    taken = [take(pool) for pool in chosen]
    if target.suffix == ".png":
        from kvpool._snapshot_png import draw  # noqa: PLC0415 - Matplotlib loads slowly, and few ask for it

        draw(taken, target)
    else:
        target.write_text(to_html(taken), encoding="utf-8")


def to_html(taken: list[Snapshot]) -> str:
    """A page that shows snapshots, with all that it needs in it."""
    data = {
        "taken": dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds"),
        "pools": [_as_json(one) for one in taken],
    }
    # Within a script element, nothing may look like its end.
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return _TEMPLATE.read_text(encoding="utf-8").replace("__DATA__", text)


def _as_json(one: Snapshot) -> dict[str, Any]:
    """A snapshot for the page: holders by number, so that each is named once."""
    holders: dict[tuple[str | int | None, str], int] = {}
    spans = []
    for span in one.spans:
        held = [
            [holders.setdefault((owner, site), len(holders)), round(age_s, 6)]
            for owner, site, age_s, _ in span.holders
        ]
        spans.append([span.first, span.end, span.state, span.n_bytes, held])
    return {
        "name": one.name,
        "kind": one.kind,
        "unit": one.unit,
        "unitBytes": one.unit_bytes,
        "debug": one.debug,
        "spans": spans,
        "holders": [[owner if owner is None else repr(owner), site] for owner, site in holders],
        "lifetimes": one.lifetimes,
        "freeRuns": one.free_runs,
        "fragmentation": one.fragmentation,
        "stats": one.stats,
    }


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
