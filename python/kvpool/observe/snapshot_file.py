"""`kvpool.snapshot`: a file that shows the occupancy of pools."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvpool._endpoints import endpoints
from kvpool.errors import ArgumentError, StateError
from kvpool.observe.registry import pools as living_pools
from kvpool.observe.snapshot import take, take_endpoint
from kvpool.observe.snapshot_html import to_html
from kvpool.observe.units import hands_out

if TYPE_CHECKING:
    import os

    from kvpool._kvpool import Pool


def snapshot(path: str | os.PathLike[str], *pools: Pool) -> None:
    """Write a map of the units in use, by owner, with distributions of ages, lifetimes and free runs.

    The HTML file is self-contained; the unit under the pointer is shown with its neighbours in the same
    state, their holders, ages and sizes. Owners are recorded by pools with debugging (`debug=True` or
    `KVPOOL_DEBUG=1`); for other pools the map shows only which units are in use. The call waits only for
    freed slots whose values are on their way from a GPU.

    Files stay small. If a pool has more than 32,768 spans, the page merges the spans within a cell of the
    map, and names the three largest holders in it. A picture shows at most 16 pools, those with the most
    units in use, and says so if there are more.

    Args:
        path: A file that ends in `.html`, or in `.png` (needs Matplotlib). An existing file is replaced.
        pools: The pools to show; by default all of this process that hand out units, and for each endpoint
            the slots that are lent, being filled or being read, with their peer and lease.

    Raises:
        ArgumentError: If the file has another ending.
        StateError: If no pool hands out units.
        TypeError: If a pool hands out no units.
        ModuleNotFoundError: If Matplotlib is needed and not installed.
    """
    target = Path(path)
    if target.suffix not in {".html", ".png"}:
        raise ArgumentError(f"a snapshot is .html or .png, not {target.name!r}")
    chosen = pools or [pool for pool in living_pools() if hands_out(pool)]
    taken = [take(pool) for pool in chosen]
    if not pools:
        taken += [one for endpoint in endpoints() for one in take_endpoint(endpoint)]
    if not taken:
        raise StateError("no pool of this process hands out units")
    if target.suffix == ".png":
        from kvpool.observe.snapshot_png import draw  # noqa: PLC0415 - Matplotlib loads slowly

        draw(taken, target)
    else:
        target.write_text(to_html(taken), encoding="utf-8")
