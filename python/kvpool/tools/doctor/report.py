"""Findings of `kvpool doctor`, as text and as JSON."""

from __future__ import annotations

import textwrap
from dataclasses import asdict, dataclass
from typing import Any

from kvpool.tools.output import WIDTH

OK = "ok"
NOTE = "note"
"""The part works, but is slower or more limited than it could be."""
MISSING = "missing"
"""An optional part is missing."""
BROKEN = "broken"
"""A part does not work, or a required part is missing."""


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        section: Section of the report.
        name: Name of the checked part.
        status: `OK`, `NOTE`, `MISSING` or `BROKEN`.
        text: The result.
        advice: The remedy; empty if none is needed.
    """

    section: str
    name: str
    status: str
    text: str
    advice: str = ""


@dataclass(frozen=True)
class Verdict:
    """Whether a part of kvpool works.

    Attributes:
        name: Name for `--require`.
        title: Title in the report.
        works: Whether it works.
        text: A description of the attempt, or of the reason why it does not work.
        advice: The remedy.
    """

    name: str
    title: str
    works: bool
    text: str
    advice: str = ""


VERDICTS = ("cpu", "cuda", "torch", "transformers", "replay")
"""The names of all verdicts."""


@dataclass(frozen=True)
class Report:
    """All findings and verdicts."""

    findings: tuple[Finding, ...]
    verdicts: tuple[Verdict, ...]

    def verdict(self, name: str) -> Verdict:
        """Return the verdict with this name."""
        return next(verdict for verdict in self.verdicts if verdict.name == name)

    def unmet(self, required: tuple[str, ...]) -> list[Verdict]:
        """Return the verdicts that do not work but must: CPU pools, and the required ones."""
        return [
            verdict for verdict in self.verdicts if verdict.name in {"cpu", *required} and not verdict.works
        ]

    def as_text(self) -> str:
        """Return the report as lines of text."""
        lines, section = [], ""
        for finding in self.findings:
            if finding.section != section:
                section = finding.section
                lines.append(section)
            lines += _entry(finding.status, f"{finding.name}: {finding.text}", finding.advice)
        lines.append("what works")
        for verdict in self.verdicts:
            status = "yes" if verdict.works else "no"
            lines += _entry(status, f"{verdict.title}: {verdict.text}", verdict.advice)
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """Return the report as plain values."""
        return {
            "findings": [asdict(finding) for finding in self.findings],
            "verdicts": {verdict.name: asdict(verdict) for verdict in self.verdicts},
        }


def _entry(status: str, text: str, advice: str) -> list[str]:
    """Return the lines of an entry, and those of its advice, which begin with an arrow."""
    return [*_wrapped(f"  {status:8}", text), *(_wrapped(" " * 10 + "-> ", advice) if advice else ())]


def _wrapped(begin: str, text: str) -> list[str]:
    """Return lines of at most `WIDTH` characters; a longer word, such as a path, stays whole."""
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=begin,
        subsequent_indent=" " * len(begin),
        break_long_words=False,
        break_on_hyphens=False,
    )


def unmet_text(unmet: list[Verdict]) -> str:
    """Return one line about the unmet requirements."""
    return "; ".join(f"{verdict.title} does not work: {verdict.text}" for verdict in unmet)
