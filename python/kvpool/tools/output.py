"""What the output of the commands has in common. Needs no other package."""

from __future__ import annotations

import importlib.util
import sys
from typing import NoReturn

WIDTH = 80
"""Columns of tables that read the same on every terminal and in a file."""

_UNITS = ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB"))


def bytes_text(count: int) -> str:
    """Bytes in the largest unit of which there is at least one, with at most two decimals."""
    for power, unit in _UNITS:
        if count >= 1 << power:
            return f"{count / (1 << power):,.2f} {unit}".replace(".00 ", " ")
    return f"{count:,} B"


def exact_bytes_text(count: int) -> str:
    """Bytes as `bytes_text` has them, and their exact number."""
    text, exact = bytes_text(count), f"{count:,} B"
    return text if text == exact else f"{text} ({exact})"


def fail(message: str) -> NoReturn:
    """Ends the command with status 1 and one line on stderr."""
    sys.stderr.write(f"kvpool: {message}\n")
    sys.exit(1)


def need(extra: str, *modules: str) -> None:
    """Ends the command if a module is not installed, and names the extra that brings it."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        fail(f"{', '.join(missing)} not found; run: pip install 'kvpool[{extra}]'")
