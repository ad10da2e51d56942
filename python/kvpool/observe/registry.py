"""The pools of this process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpool._kvpool import _pools

if TYPE_CHECKING:
    from kvpool._kvpool import Pool


def pools() -> list[Pool]:
    """Return all live pools of this process, sorted by name.

    Returns:
        A list of `kvpool.Pool`.
    """
    return sorted(_pools(), key=lambda pool: _order(pool.name))


def _order(name: str) -> tuple[str, int]:
    """Return the sort key with the number apart, so that the tenth pool comes after the ninth."""
    stem, _, number = name.rpartition("-")
    return (stem, int(number)) if number.isdecimal() else (name, 0)
