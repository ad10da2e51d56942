"""The packages that commands need beside kvpool, and the extras that bring them. It imports none of them."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

COMMAND_LINE = ("rich",)
"""The packages that print tables and show progress."""


class Command(NamedTuple):
    """A command.

    Attributes:
        text: A description of it.
        needs: Packages without which it does nothing.
    """

    text: str
    needs: tuple[str, ...] = ()


COMMANDS = {
    "doctor": Command("Report what works on this machine."),
    "plan": Command("Compute what fits into memory, and print the pools for it."),
    "replay": Command("Drive the pools with a request trace.", (*COMMAND_LINE, "numpy", "torch")),
    "verify": Command("Prove that every byte of a layout arrives.", (*COMMAND_LINE, "numpy")),
}

_EXTRAS = {**dict.fromkeys((*COMMAND_LINE, "matplotlib", "numpy"), "tools"), "torch": "torch"}


def missing(names: Iterable[str]) -> list[str]:
    """Return the packages among these that are not installed."""
    return [name for name in names if importlib.util.find_spec(name) is None]


def remedy(packages: Iterable[str]) -> str:
    """Return the command that installs these packages."""
    return f"pip install 'kvpool[{','.join(sorted({_EXTRAS[name] for name in packages}))}]'"


def lack(what: str, packages: Iterable[str]) -> str:
    """Return one line that names the missing ones of these packages; empty if all are installed."""
    absent = missing(packages)
    if not absent:
        return ""
    *others, last = absent
    names = f"{', '.join(others)} and {last}" if others else last
    return f"{what} needs {names}: {remedy(absent)}"
