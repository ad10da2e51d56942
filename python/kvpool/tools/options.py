"""Options of commands, for `argparse`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, NoReturn

from kvpool.tools.output import WIDTH, refuse

if TYPE_CHECKING:
    from collections.abc import Callable


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line on stderr, with exit status 2. Options are not abbreviated.

    Args:
        name: What starts the program, with the command.
        description: What it does, in paragraphs that are printed as they are.
    """

    def __init__(self, name: str, description: str) -> None:
        super().__init__(prog=name, description=description, formatter_class=_Help, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Exit with this message."""
        refuse(message)


class _Help(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=26, width=WIDTH - 2)


def at_least(least: int) -> Callable[[str], int]:
    """Return a type of options: integers from `least` on."""

    def integer(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer") from None
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is less than {least}")
        return value

    return integer
