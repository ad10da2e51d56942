"""Output shared by the commands, without other packages."""

from __future__ import annotations

import importlib.util
import sys
from typing import NoReturn

WIDTH = 80
"""Width of tables, the same on every terminal and in a file."""

_UNITS = ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB"))


def bytes_text(count: int) -> str:
    """Format bytes in the largest unit that does not exceed them, with at most two decimals."""
    for power, unit in _UNITS:
        if count >= 1 << power:
            return f"{count / (1 << power):,.2f} {unit}".replace(".00 ", " ")
    return f"{count:,} B"


def exact_bytes_text(count: int) -> str:
    """Format bytes like `bytes_text`, with their exact number."""
    text, exact = bytes_text(count), f"{count:,} B"
    return text if text == exact else f"{text} ({exact})"


def fail(message: str) -> NoReturn:
    """Exit the command with status 1 and one line on stderr."""
    sys.stderr.write(f"kvpool: {message}\n")
    sys.exit(1)


def need(extra: str, *modules: str) -> None:
    """Exit the command if a module is not installed, and name the extra that installs it."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        fail(f"{', '.join(missing)} not found; run: pip install 'kvpool[{extra}]'")
