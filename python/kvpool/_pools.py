"""The pools of this process."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvpool._kvpool import Pool

_lock = threading.Lock()
_live: weakref.WeakSet[Pool] = weakref.WeakSet()


def add(pool: Pool) -> None:
    """Note a pool that was made."""
    with _lock:
        _live.add(pool)


def pools() -> list[Pool]:
    """All pools of this process that are alive, by name.

    Returns:
        A list of `kvpool.Pool`.
    """
    with _lock:
        found = list(_live)
    return sorted(found, key=lambda pool: _order(pool.name))


def _order(name: str) -> tuple[str, int]:
    """Name and number apart, so that the tenth comes after the ninth."""
    stem, _, number = name.rpartition("-")
    return (stem, int(number)) if number.isdecimal() else (name, 0)
