"""`kvpool doctor` without the libraries of the command line."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from kvpool.tools.doctor.examine import run
from kvpool.tools.doctor.report import VERDICTS

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(arguments: Sequence[str]) -> int:
    """Run the command with these arguments and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="kvpool doctor",
        description="Report what works on this machine and, for what does not, the reason and the remedy.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument("--require", action="append", default=[], choices=VERDICTS, help="what must work")
    parser.add_argument("--bandwidth", action="store_true", help="needs pip install 'kvpool[tools]'")
    options = parser.parse_args(arguments)
    if options.bandwidth:
        parser.error("--bandwidth needs typer and rich: pip install 'kvpool[tools]'")
    return run(tuple(options.require), as_json_object=options.json)
