"""The command `kvpool doctor`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from kvpool.errors import ConfigError
from kvpool.tools.bandwidths import as_json
from kvpool.tools.doctor.bandwidth import SECONDS, SIZE, measure_machine, print_bandwidths
from kvpool.tools.doctor.examine import run as examine
from kvpool.tools.doctor.report import VERDICTS
from kvpool.tools.needs import COMMAND_LINE
from kvpool.tools.options import Parser
from kvpool.tools.output import WIDTH, fail, need, refuse
from kvpool.tools.units import parse_bytes

if TYPE_CHECKING:
    from argparse import Namespace

DESCRIPTION = """\
Report what works on this machine and, for what does not, the reason and the
remedy.

Tries the pools on the CPU and on each GPU, in separate processes, so that no
CUDA context is left behind. Exits with status 1 if CPU pools or a required part
do not work."""


def make_parser() -> Parser:
    """Return the parser of its options."""
    parser = Parser("kvpool doctor", DESCRIPTION)
    add = parser.add_argument
    add(
        "--require",
        action="append",
        default=[],
        choices=VERDICTS,
        help="exit with status 1 if this does not work",
    )
    add("--bandwidth", action="store_true", help="measure bandwidths instead: memory, GPUs, a disk, NIXL")
    add("--directory", type=Path, metavar="PATH", help="a folder on the disk to measure (default: temporary)")
    add("--size", metavar="SIZE", help="bytes to move at a time, 1MiB to 1GiB (default: 64MiB)")
    add("--seconds", type=float, metavar="S", help="seconds for each bandwidth (default: 1)")
    add("--json", action="store_true", help="print one JSON object instead of text")
    return parser


def run(options: Namespace) -> int:
    """Run the command, and return its exit status."""
    if options.bandwidth:
        if options.require:
            refuse("--bandwidth measures, and --require checks: give one of them")
        return _measure(options)
    for name in ("directory", "size", "seconds"):
        if getattr(options, name) is not None:
            refuse(f"--{name} is for --bandwidth")
    return examine(tuple(options.require), as_json_object=options.json)


def _measure(options: Namespace) -> int:
    need("doctor --bandwidth", *COMMAND_LINE)
    from rich.console import Console  # noqa: PLC0415 - of an extra

    try:
        with Console(stderr=True).status("measuring") as status:
            lines = measure_machine(
                SIZE if options.size is None else parse_bytes(options.size),
                SECONDS if options.seconds is None else options.seconds,
                options.directory,
                lambda name: status.update(f"measuring {name}"),
            )
    except ConfigError as error:
        refuse(str(error))
    if options.json:
        sys.stdout.write(json.dumps(as_json(lines), indent=1) + "\n")
    else:
        print_bandwidths(lines, Console(width=WIDTH))
    if all(line.problem for line in lines):
        fail("nothing could be measured")
    return 0
