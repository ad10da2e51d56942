"""Output shared by the commands, without other packages."""

from __future__ import annotations

import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

from kvpool.tools.needs import lack

if TYPE_CHECKING:
    from collections.abc import Iterator

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


PATIENCE_S = 3.0
"""Seconds after which a command says what it waits for."""


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Say on stderr what the command waits for, if the body of this context takes long."""
    stderr = sys.stderr
    timer = threading.Timer(PATIENCE_S, lambda: stderr.write(f"kvpool: {what} ...\n"))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def fail(message: str) -> NoReturn:
    """Exit the command with status 1 and one line on stderr."""
    _end(message, 1)


def refuse(message: str) -> NoReturn:
    """Exit the command with status 2 and one line on stderr: an option is wrong, and nothing was done."""
    _end(message, 2)


def _end(message: str, status: int) -> NoReturn:
    sys.stderr.write(f"kvpool: {message}\n")
    sys.exit(status)


def need(what: str, *packages: str) -> None:
    """Exit the command if one of the packages that it needs is not installed, and name all that are not."""
    problem = lack(what, packages)
    if problem:
        fail(problem)
