"""What `kvpool doctor` finds, and how it is printed."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

OK = "ok"
NOTE = "note"
"""It works, but something is slower or less than it could be."""
MISSING = "missing"
"""Something that not everybody needs is not there."""
BROKEN = "broken"
"""Something is there and does not work, or is needed by all and not there."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        section: What it belongs to.
        name: What it is.
        status: `OK`, `NOTE`, `MISSING` or `BROKEN`.
        text: What was found.
        advice: What to do about it; empty where there is nothing to do.
    """

    section: str
    name: str
    status: str
    text: str
    advice: str = ""


@dataclass(frozen=True)
class Verdict:
    """Whether something can be used.

    Attributes:
        name: By which `--require` asks for it.
        title: What it is.
        works: Whether it does.
        text: What was tried, or why it does not work.
        advice: What to do about it.
    """

    name: str
    title: str
    works: bool
    text: str
    advice: str = ""


VERDICTS = ("cpu", "cuda", "torch", "serve", "replay")
"""The names of all verdicts."""


@dataclass(frozen=True)
class Report:
    """All that was found."""

    findings: tuple[Finding, ...]
    verdicts: tuple[Verdict, ...]

    def verdict(self, name: str) -> Verdict:
        """The one of that name."""
        return next(verdict for verdict in self.verdicts if verdict.name == name)

    def unmet(self, required: tuple[str, ...]) -> list[Verdict]:
        """What does not work of what must: the pools of the CPU, always, and what is asked for."""
        return [
            verdict for verdict in self.verdicts if verdict.name in {"cpu", *required} and not verdict.works
        ]

    def as_text(self) -> str:
        """The report as lines of text."""
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
        """The report as plain values."""
        return {
            "findings": [asdict(finding) for finding in self.findings],
            "verdicts": {verdict.name: asdict(verdict) for verdict in self.verdicts},
        }


def _entry(status: str, text: str, advice: str) -> list[str]:
    """One line, and a second one for the advice if there is any."""
    return [f"  {status:8}{text}", *([f"          -> {advice}"] if advice else [])]


def complaint(unmet: list[Verdict]) -> str:
    """One line about what must work and does not."""
    return "; ".join(f"{verdict.title} does not work: {verdict.text}" for verdict in unmet)
