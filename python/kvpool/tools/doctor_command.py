"""The command `kvpool doctor`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvpool.tools.doctor import examine
from kvpool.tools.doctor_plain import complaint
from kvpool.tools.findings import BROKEN, MISSING, NOTE, OK, VERDICTS
from kvpool.tools.output import WIDTH, fail

if TYPE_CHECKING:
    from kvpool.tools.findings import Report

_STYLES = {OK: "green", NOTE: "yellow", MISSING: "dim", BROKEN: "bold red"}


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
        bool, typer.Option("--json", help="Print one JSON object instead of tables.")
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
    report = examine()
    if as_json_object:
        typer.echo(json.dumps(report.as_json()))
    else:
        print_report(report, Console(width=WIDTH))
    unmet = report.unmet(required)
    if unmet:
        fail(complaint(unmet))


def print_report(report: Report, console: Console) -> None:
    """Prints a table of what was found, by section, and one of what works."""
    table = Table(title="What is here", title_justify="left", show_header=False)
    table.add_column(overflow="fold", max_width=15)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    section = ""
    for finding in report.findings:
        if finding.section != section:
            section = finding.section
            table.add_section()
            table.add_row(Text(section, style="bold"))
        status = Text(finding.status, style=_STYLES[finding.status])
        table.add_row(finding.name, status, _words(finding.text, finding.advice))
    console.print(table)
    verdicts = Table(title="What works", title_justify="left", show_header=False)
    verdicts.add_column(overflow="fold", max_width=18)
    verdicts.add_column(no_wrap=True)
    verdicts.add_column(overflow="fold")
    for verdict in report.verdicts:
        works = Text("yes", style="green") if verdict.works else Text("no", style="bold red")
        verdicts.add_row(Text(verdict.title), works, _words(verdict.text, verdict.advice))
    console.print(verdicts)


def _words(text: str, advice: str) -> Text:
    words = Text(text)
    if advice:
        words.append(f"\n-> {advice}", style="cyan")
    return words
