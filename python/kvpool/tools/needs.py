"""The packages that commands need beside kvpool, and the extras that bring them. It imports none of them."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

COMMAND_LINE = ("typer", "rich")
"""The packages that every command needs. Without them only `doctor` works: it parses arguments itself."""


class Command(NamedTuple):
    """A command.

    Attributes:
        text: A description of it.
        needs: Packages that it needs besides `COMMAND_LINE`.
    """

    text: str
    needs: tuple[str, ...] = ()


COMMANDS = {
    "serve": Command("Serve a small model through the pools.", ("numpy", "torch", "transformers")),
    "replay": Command("Drive the pools with a request trace.", ("numpy", "torch")),
    "plan": Command("Compute what fits into memory, and print the pools for it."),
    "doctor": Command("Report what works on this machine."),
}

_EXTRAS = {
    **dict.fromkeys((*COMMAND_LINE, "matplotlib", "numpy"), "tools"),
    "torch": "torch",
    "transformers": "transformers",
}


def missing(names: Iterable[str]) -> list[str]:
    """Return the packages among these that are not installed."""
    return [name for name in names if importlib.util.find_spec(name) is None]


def remedy(packages: Iterable[str]) -> str:
    """Return the command that installs these packages."""
    extras = {_EXTRAS[name] for name in packages}
    if "transformers" in extras:
        extras -= {"torch"}  # it brings PyTorch
    return f"pip install 'kvpool[{','.join(sorted(extras))}]'"


def lack(what: str, packages: Iterable[str]) -> str:
    """Return one line that names the missing ones of these packages; empty if all are installed."""
    absent = missing(packages)
    if not absent:
        return ""
    *others, last = absent
    names = f"{', '.join(others)} and {last}" if others else last
    return f"{what} needs {names}: {remedy(absent)}"
