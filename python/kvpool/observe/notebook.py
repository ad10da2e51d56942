"""Pools in notebooks."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from kvpool.errors import KvPoolError
from kvpool.observe.leaks import leaks, records_owners
from kvpool.observe.units import counts, hands_out

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvpool._kvpool import Pool

# Rows of the table of owners.
_SHOWN = 10
_CELL = 'style="text-align:left"'
_FILLED = "height:100%;background:#0072b2"
_BAR = "height:0.7em;max-width:40em;background:#eceff1;margin:0.3em 0"


def to_html(pool: Pool) -> str:
    """Return a pool as HTML: what it is, how full it is, its statistics, and owners if it records them."""
    stats = counts(pool.stats())
    kind = f"{type(pool).__name__} on {pool.device}"
    title = f"<strong>{escape(pool.name)}</strong>, {escape(kind)}"
    parts = [f"<div>{title}</div>"]
    if hands_out(pool):
        in_use, capacity = stats["in_use"], stats["capacity"]
        share = 100 * in_use / capacity if capacity else 0
        parts += [
            f"<div>{in_use:,} of {capacity:,} {escape(pool.unit)}s in use</div>",
            f'<div style="{_BAR}"><div style="{_FILLED};width:{share:.1f}%"></div></div>',
        ]
    rows = [(name, f"{number:,}") for name, number in stats.items()]
    parts.append(f"<details><summary>statistics</summary>{_table(rows)}</details>")
    if pool.debug and hands_out(pool) and records_owners(pool):
        parts.append(_owners(pool))
    return f"<div>{''.join(parts)}</div>"


def _owners(pool: Pool) -> str:
    """Return the owners of live units as a table."""
    try:
        found = leaks(pool)
    except KvPoolError as error:
        return f"<div>{escape(str(error))}</div>"
    rows: list[tuple[str, ...]] = [
        (f"{one.count:,}", "no owner given" if one.owner is None else repr(one.owner), one.site, one.state)
        for one in found[:_SHOWN]
    ]
    if len(found) > _SHOWN:
        rows.append((f"and {len(found) - _SHOWN:,} more", "", "", ""))
    return _table(rows)


def _table(rows: Iterable[tuple[str, ...]]) -> str:
    lines = ("".join(f"<td {_CELL}>{escape(cell)}</td>" for cell in row) for row in rows)
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"
