"""The command `kvpool`.

Each command has a folder, whose module `command` has its options and imports what it needs when it runs: the
parser, `kvpool doctor` and `kvpool plan --json` need no other package.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from kvpool._kvpool import __version__
from kvpool.tools.doctor import command as doctor
from kvpool.tools.needs import COMMANDS, lack
from kvpool.tools.options import Parser
from kvpool.tools.plan import command as plan
from kvpool.tools.replay import command as replay
from kvpool.tools.verify import command as verify

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Sequence

RUN: dict[str, Callable[[Namespace], int]] = {
    "doctor": doctor.run,
    "plan": plan.run,
    "replay": replay.run,
    "verify": verify.run,
}
"""What each command does with its options, and its exit status."""


def make_parsers() -> dict[str, Parser]:
    """Return the parser of each command."""
    return {
        "doctor": doctor.make_parser(),
        "plan": plan.make_parser(),
        "replay": replay.make_parser(),
        "verify": verify.make_parser(),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, by default the one of `sys.argv`, and return its exit status."""
    first, *rest = (sys.argv[1:] if arguments is None else [*arguments]) or ["--help"]
    if first in {"-h", "--help"}:
        sys.stdout.write(_help())
    elif first == "--version":
        sys.stdout.write(f"kvpool {__version__}\n")
    elif first in RUN:
        return RUN[first](make_parsers()[first].parse_args(rest))
    else:
        Parser("kvpool", "").error(f"there is no command {first!r}; there are {', '.join(COMMANDS)}")
    return 0


def _help() -> str:
    lines = [
        "usage: kvpool COMMAND [OPTIONS]",
        "",
        "Tools over kvpool, the memory core of an LLM serving engine.",
        "",
    ]
    for name, command in COMMANDS.items():
        lines.append(f"  {name:8}{command.text}")
        problem = lack("", command.needs)
        if problem:
            lines.append(f"  {'':8}It{problem}")
    return (
        "\n".join(
            [*lines, "", "  kvpool COMMAND --help lists the options, kvpool --version prints the version."]
        )
        + "\n"
    )
