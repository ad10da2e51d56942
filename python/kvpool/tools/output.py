"""What the commands' output has in common."""

from __future__ import annotations

import importlib.util
from typing import NoReturn

import typer

WIDTH = 80
"""Columns of tables that read the same on every terminal and in a file."""

_UNITS = ("TiB", "GiB", "MiB", "KiB")


def size_text(count: int) -> str:
    """Bytes for people: exact, and in the largest unit of which there is one."""
    for power, unit in zip((40, 30, 20, 10), _UNITS, strict=True):
        if count >= 1 << power:
            return f"{count / (1 << power):,.2f} {unit}".replace(".00 ", " ") + f" ({count:,} B)"
    return f"{count:,} B"


def fail(message: str) -> NoReturn:
    """Ends the command with status 1 and one line on stderr."""
    typer.echo(f"kvpool: {message}", err=True)
    raise typer.Exit(1)


def need(extra: str, *modules: str) -> None:
    """Ends the command if a module is not installed, and names the extra that brings it."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        fail(f"{', '.join(missing)} not found; run: pip install 'kvpool[{extra}]'")
