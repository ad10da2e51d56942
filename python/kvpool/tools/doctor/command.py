"""The command `kvpool doctor`."""

from __future__ import annotations

import json
from pathlib import Path  # noqa: TC003 - typer reads the annotation
from typing import Annotated

import typer
from rich.console import Console

from kvpool.errors import ConfigError
from kvpool.tools.bandwidths import as_json
from kvpool.tools.doctor.bandwidth import SECONDS, SIZE, measure_machine, print_bandwidths
from kvpool.tools.doctor.examine import run
from kvpool.tools.doctor.report import VERDICTS
from kvpool.tools.output import WIDTH, bytes_text, fail, refuse
from kvpool.tools.units import parse_bytes


def doctor(  # noqa: PLR0913 - one parameter per option
    *,
    require: Annotated[
        list[str] | None,
        typer.Option(
            help="Exit with status 1 if this does not work, for start scripts of containers: "
            f"{', '.join(VERDICTS)}. May be given more than once."
        ),
    ] = None,
    bandwidth: Annotated[
        bool,
        typer.Option(
            "--bandwidth",
            help="Measure instead what moving K and V costs: memory, GPUs, a disk, another process.",
        ),
    ] = False,
    directory: Annotated[
        Path | None,
        typer.Option(help="A folder on the disk for --bandwidth. Default: for temporary files."),
    ] = None,
    size: Annotated[
        str | None,
        typer.Option(help=f"Bytes that --bandwidth moves at a time, 1MiB to 1GiB [{bytes_text(SIZE)}]."),
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(help=f"Seconds that --bandwidth takes for each line [{SECONDS:g}].")
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
        refuse(f"--require: {', '.join(map(repr, unknown))} is not one of {', '.join(VERDICTS)}")
    if bandwidth:
        if require:
            refuse("--bandwidth measures, and --require checks: give one of them")
        _measure(directory, size, seconds, as_json_object=as_json_object)
        return
    of_bandwidth = {"--directory": directory, "--size": size, "--seconds": seconds}
    for name, value in of_bandwidth.items():
        if value is not None:
            refuse(f"{name} is for --bandwidth")
    raise typer.Exit(run(required, as_json_object=as_json_object))


def _measure(
    directory: Path | None, size: str | None, seconds: float | None, *, as_json_object: bool
) -> None:
    errors = Console(stderr=True)
    try:
        with errors.status("measuring") as status:
            lines = measure_machine(
                SIZE if size is None else parse_bytes(size),
                SECONDS if seconds is None else seconds,
                directory,
                lambda name: status.update(f"measuring {name}"),
            )
    except ConfigError as error:
        refuse(str(error))
    if as_json_object:
        typer.echo(json.dumps(as_json(lines), indent=1))
    else:
        print_bandwidths(lines, Console(width=WIDTH))
    if all(line.problem for line in lines):
        fail("nothing could be measured")
