"""The pools of this process."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from kvpool._kvpool import _pools

if TYPE_CHECKING:
    from kvpool import _kvpool
    from kvpool.workspace import Workspace

    AnyPool: TypeAlias = (
        _kvpool.KVPool
        | _kvpool.TokenToKVPoolAllocator
        | _kvpool.ReqToTokenPool
        | _kvpool.GDNPool
        | _kvpool.ChunkPool
        | _kvpool.BufferPool
        | _kvpool.PagePool
        | Workspace
    )


def pools() -> list[AnyPool]:
    """All pools of this process that are alive, by name.

    Returns:
        A list of `kvpool.Pool`.
    """
    return sorted(_pools(), key=lambda pool: _order(pool.name))


def _order(name: str) -> tuple[str, int]:
    """Name and number apart, so that the tenth comes after the ninth."""
    stem, _, number = name.rpartition("-")
    return (stem, int(number)) if number.isdecimal() else (name, 0)
