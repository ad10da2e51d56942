"""The command `kvpool doctor`."""

from __future__ import annotations

from typing import Annotated

import typer

from kvpool.tools.doctor.examine import run
from kvpool.tools.doctor.report import VERDICTS
from kvpool.tools.output import fail


def doctor(
    *,
    require: Annotated[
        list[str] | None,
        typer.Option(
            help="Exit with status 1 if this does not work, for start scripts of containers: "
            f"{', '.join(VERDICTS)}. May be given more than once."
        ),
    ] = None,
    as_json_object: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of text.")
    ] = False,
) -> None:
    """Report what works on this machine and, for what does not, the reason and the remedy.

    Tries the pools on the CPU and on each GPU, in separate processes, so that no CUDA context is left behind.
    Exits with status 1 if CPU pools or a required part do not work.
    """
    required = tuple(require or ())
    unknown = [name for name in required if name not in VERDICTS]
    if unknown:
        fail(f"--require: {', '.join(map(repr, unknown))} is none of {', '.join(VERDICTS)}")
    raise typer.Exit(run(required, as_json_object=as_json_object))
