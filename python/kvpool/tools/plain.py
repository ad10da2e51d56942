"""The command `kvpool` without the libraries of the command line."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from kvpool._kvpool import __version__
from kvpool.tools.needs import COMMAND_LINE, COMMANDS, lack
from kvpool.tools.output import fail

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(arguments: Sequence[str]) -> None:
    """Run a command that needs no library; otherwise name the missing packages and exit with status 1."""
    first = arguments[0] if arguments else "--help"
    if first == "doctor":
        from kvpool.tools.doctor.plain import main as doctor  # noqa: PLC0415 - few ask for it

        sys.exit(doctor(arguments[1:]))
    if first == "--version":
        sys.stdout.write(f"kvpool {__version__}\n")
        return
    if first == "--help":
        sys.stdout.write(_help())
        return
    known = COMMANDS.get(first)
    fail(
        lack("every command but doctor", COMMAND_LINE)
        if known is None
        else lack(first, (*COMMAND_LINE, *known.needs))
    )


def _help() -> str:
    lines = [
        "Usage: kvpool COMMAND [OPTIONS]",
        "",
        "Tools over kvpool, the memory core of an LLM serving engine.",
        "",
    ]
    for name, command in COMMANDS.items():
        lines.append(f"  {name:8}{command.text}")
        problem = "" if name == "doctor" else lack("", (*COMMAND_LINE, *command.needs))
        if problem:
            lines.append(f"  {'':8}It{problem}")
    return "\n".join([*lines, "", "  --version  Print the version."]) + "\n"
