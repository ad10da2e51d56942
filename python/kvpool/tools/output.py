"""Output shared by the commands, without other packages."""

from __future__ import annotations

import sys
from typing import NoReturn

from kvpool.tools.needs import lack

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


def need(what: str, *packages: str) -> None:
    """Exit the command if one of the packages that it needs is not installed, and name all that are not."""
    problem = lack(what, packages)
    if problem:
        fail(problem)
