"""`kvpool doctor` where not even the libraries of the command line are installed: plain text."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from kvpool.tools.doctor import examine
from kvpool.tools.findings import VERDICTS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpool.tools.findings import Report, Verdict


def plain(report: Report) -> str:
    """The report as lines of text."""
    lines, section = [], ""
    for finding in report.findings:
        if finding.section != section:
            section = finding.section
            lines.append(section)
        lines.append(f"  {finding.status:8}{finding.name}: {finding.text}")
        if finding.advice:
            lines.append(f"          -> {finding.advice}")
    lines.append("what works")
    for verdict in report.verdicts:
        lines.append(f"  {'yes' if verdict.works else 'no':8}{verdict.title}: {verdict.text}")
        if verdict.advice:
            lines.append(f"          -> {verdict.advice}")
    return "\n".join(lines)


def complaint(unmet: list[Verdict]) -> str:
    """One line about what does not work and must."""
    return "; ".join(f"{verdict.title} does not work: {verdict.text}" for verdict in unmet)


def main(arguments: Sequence[str]) -> int:
    """Runs the command with these arguments and returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="kvpool doctor", description="Say what is usable here, and why not."
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument("--require", action="append", default=[], choices=VERDICTS, help="what must work")
    given = parser.parse_args(arguments)
    report = examine()
    sys.stdout.write((json.dumps(report.as_json()) if given.json else plain(report)) + "\n")
    unmet = report.unmet(tuple(given.require))
    if unmet:
        sys.stderr.write(f"kvpool: {complaint(unmet)}\n")
    return 1 if unmet else 0
