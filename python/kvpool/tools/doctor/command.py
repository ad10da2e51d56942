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
            help="End with status 1 if this does not work, for start scripts of containers: "
            f"{', '.join(VERDICTS)}. May be given more than once."
        ),
    ] = None,
    as_json_object: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of text.")
    ] = False,
) -> None:
    """Say what of kvpool is usable here, and for what is not, why and what to do.

    Tries the pools on the CPU and on each GPU, in processes of their own, so that no CUDA context is left
    behind. Ends with status 1 if the pools of the CPU do not work, or something that --require names.
    """
    required = tuple(require or ())
    unknown = [name for name in required if name not in VERDICTS]
    if unknown:
        fail(f"--require: {', '.join(map(repr, unknown))} is none of {', '.join(VERDICTS)}")
    raise typer.Exit(run(required, as_json_object=as_json_object))
