"""`kvpool.snapshot`: a file that shows what stands in pools."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvpool.errors import ConfigError
from kvpool.observe.registry import pools as living_pools
from kvpool.observe.snapshot import take
from kvpool.observe.snapshot_html import to_html

if TYPE_CHECKING:
    import os

    from kvpool._kvpool import Pool


def snapshot(path: str | os.PathLike[str], *pools: Pool) -> None:
    """Write a map of what is in use in pools, by owner, with distributions of ages, lifetimes and free runs.

    In the HTML file, which loads nothing else, one points at a unit to read which units are alike, who holds
    them since when, and their size. Owners are known of pools that debug (`debug=True` or `KVPOOL_DEBUG=1`);
    of others the map shows what is in use. Waits for freed slots whose values are on their way from a GPU,
    and for nothing else.

    Files stay small. Of a pool with more than 32,768 spans, the page merges those that share a cell of the
    map, and names the three holders with the most units in it. A picture has at most 16 pools, those with the
    most units in use; if there are more, it says so.

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
    chosen = pools or [pool for pool in living_pools() if pool._hands_out]  # noqa: SLF001 - of this package
    if not chosen:
        raise ConfigError("no pool of this process hands anything out")
    taken = [take(pool) for pool in chosen]
    if target.suffix == ".png":
        from kvpool.observe.snapshot_png import draw  # noqa: PLC0415 - Matplotlib loads slowly, and few ask for it

        draw(taken, target)
    else:
        target.write_text(to_html(taken), encoding="utf-8")
