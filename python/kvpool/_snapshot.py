"""Pictures of what stands in pools: as PNG, or as HTML in which one can point at things."""

from __future__ import annotations

import datetime as dt
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvpool._occupancy import take
from kvpool._pools import pools as living_pools
from kvpool.errors import ConfigError

if TYPE_CHECKING:
    import os

    from kvpool._occupancy import Snapshot
    from kvpool._pools import AnyPool

_TEMPLATE = Path(__file__).with_name("_snapshot.html")


def snapshot(path: str | os.PathLike[str], *pools: AnyPool) -> None:
    """Write a map of what is in use in pools, by owner, with distributions of ages, lifetimes and free runs.

    In the HTML file, which loads nothing else, one points at a unit to read which units are alike, who holds
    them since when, and their size. Owners are known of pools that debug (`debug=True` or `KVPOOL_DEBUG=1`);
    of others the map shows what is in use. Waits for freed slots whose values are on their way from a GPU,
    and for nothing else.

    A picture has at most 16 pools, those with the most units in use; if there are more, it says so.

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
