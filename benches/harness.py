"""Times two implementations of the same operation side by side, and reports the results.

Every figure is a median of rounds that alternate between the two, so that both see the same machine. A round
of a short operation repeats it many times; the cost of the loop, 10 to 50 ns per call, is not subtracted.
"""

from __future__ import annotations

import argparse
import datetime as dt
import gc
import importlib.metadata
import itertools
import json
import os
import platform
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Callable

ROUND_SECONDS = 0.002

COLUMNS = ("question", "kvpool, us", "alternative", "its us", "ratio", "target", "met")
NUMBERS = ("kvpool, us", "its us", "ratio")


@dataclass(frozen=True)
class Case:
    """A case to time.

    Attributes:
        run: The timed function; its argument is the number of repetitions.
        prepare: Called before each round, outside of the timed part.
        calls: Repetitions in a round; by default enough for about 2 ms, or one with a `prepare`.
    """

    run: Callable[[int], object]
    prepare: Callable[[], object] | None = None
    calls: int | None = None


def repeated(call: Callable[[], object]) -> Callable[[int], None]:
    """Repeats a call the given number of times."""

    def run(number: int) -> None:
        for _ in itertools.repeat(None, number):
            call()

    return run


@dataclass(frozen=True)
class Row:
    """One question and its answer.

    Attributes:
        question: The operation.
        ours_us: Median of kvpool, in microseconds per call.
        alternative: The name of the alternative.
        alternative_us: Median of the alternative, in microseconds per call.
        ratio: Alternative over ours: above 1, kvpool is faster.
        target: The target in words, or empty.
        met: Whether the target is met; `None` without one.
    """

    question: str
    ours_us: float
    alternative: str
    alternative_us: float
    ratio: float
    target: str
    met: bool | None

    def cells(self) -> tuple[str, ...]:
        """The row as text, one for each of `COLUMNS`."""
        return (
            self.question,
            f"{self.ours_us:,.2f}",
            self.alternative,
            f"{self.alternative_us:,.2f}",
            f"{self.ratio:,.2f}",
            self.target,
            {True: "yes", False: "no", None: ""}[self.met],
        )


def _once(case: Case, number: int) -> float:
    if case.prepare is not None:
        case.prepare()
    start = time.perf_counter_ns()
    case.run(number)
    return (time.perf_counter_ns() - start) / number / 1000


def _calls_a_round(case: Case) -> int:
    if case.calls is not None or case.prepare is not None:
        return case.calls or 1
    number = 1
    while True:
        micros = _once(case, number) * number
        if micros >= ROUND_SECONDS * 1e6 or number >= 1 << 20:
            return number
        number *= 2


def medians(cases: list[Case], rounds: int) -> list[float]:
    """Times the cases alternately, `rounds` times each.

    Args:
        cases: The cases. Each is warmed up before it is timed.
        rounds: The number of rounds of each case.

    Returns:
        The median of each, in microseconds per call.
    """
    numbers = [_calls_a_round(case) for case in cases]
    times: list[list[float]] = [[] for _ in cases]
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for case, number, found in zip(cases, numbers, times, strict=True):
                found.append(_once(case, number))
    finally:
        gc.enable()
    return [statistics.median(found) for found in times]


class Report:
    """Collects rows, prints them as a table, and writes them as JSON."""

    def __init__(self, title: str) -> None:
        parser = argparse.ArgumentParser(description=title)
        parser.add_argument("--json", type=Path, metavar="FILE", help="write machine, date and rows to FILE")
        parser.add_argument(
            "--markdown", type=Path, metavar="FILE", help="add a table for RESULTS.md to FILE"
        )
        parser.add_argument(
            "--rounds", type=int, default=31, help="rounds of each case (default: %(default)s)"
        )
        parser.add_argument("--only", default="", metavar="WORD", help="only questions that contain WORD")
        self._arguments = parser.parse_args()
        self._title = title
        self._rows: list[Row] = []
        self._notes: list[str] = []
        self._console = Console(width=None if os.isatty(1) else 160)

    @property
    def rounds(self) -> int:
        """Rounds of each case."""
        return int(self._arguments.rounds)

    def wants(self, question: str) -> bool:
        """Whether the user asked for this question."""
        return str(self._arguments.only) in question

    def compare(  # noqa: PLR0913 - two cases and two kinds of target
        self,
        question: str,
        ours: Case,
        theirs: Case,
        *,
        alternative: str = "PyTorch",
        limit_us: float | None = None,
        least_ratio: float | None = None,
    ) -> None:
        """Times both and adds a row.

        Args:
            question: What this row answers.
            ours: The case of kvpool.
            theirs: The same work done otherwise.
            alternative: What does it otherwise.
            limit_us: The target, as the most microseconds that ours may take.
            least_ratio: The target, as the least that alternative over ours may be.
        """
        if not self.wants(question):
            return
        with self._console.status(question):
            ours_us, theirs_us = medians([ours, theirs], self._arguments.rounds)
        self._add(question, ours_us, theirs_us, alternative, limit_us, least_ratio)

    def compare_with(self, question: str, ours: Case, theirs_us: float, *, alternative: str) -> None:
        """Times ours and adds a row beside a time that another process measured."""
        if self.wants(question):
            (ours_us,) = medians([ours], self._arguments.rounds)
            self._add(question, ours_us, theirs_us, alternative, None, None)

    def _add(  # noqa: PLR0913, PLR0917 - all that a row has
        self,
        question: str,
        ours_us: float,
        theirs_us: float,
        alternative: str,
        limit_us: float | None,
        least_ratio: float | None,
    ) -> None:
        ratio = theirs_us / ours_us
        target, met = "", None
        if limit_us is not None:
            target, met = f"<= {limit_us:g} us", ours_us <= limit_us
        elif least_ratio is not None:
            target, met = f"ratio >= {least_ratio:.2f}", ratio >= least_ratio
        self._rows.append(Row(question, ours_us, alternative, theirs_us, ratio, target, met))

    def note(self, text: str) -> None:
        """Adds a line below the table, for a figure that is no time."""
        self._notes.append(text)

    def finish(self) -> None:
        """Prints machine, date and table, and writes the JSON file if requested."""
        about = machine()
        for name, value in about.items():
            self._console.print(f"[dim]{name}:[/dim] {value}", highlight=False)
        table = Table(title=self._title, title_justify="left")
        for name in COLUMNS:
            table.add_column(name, justify="right" if name in NUMBERS else "left")
        for row in self._rows:
            table.add_row(*row.cells())
        self._console.print(table)
        for note in self._notes:
            self._console.print(note, highlight=False)
        if self._arguments.json is not None:
            report = {
                "title": self._title,
                "machine": about,
                "rows": [asdict(row) for row in self._rows],
                "notes": self._notes,
            }
            self._arguments.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        if self._arguments.markdown is not None:
            with self._arguments.markdown.open("a", encoding="utf-8") as file:
                file.write(self._markdown(about))

    def _markdown(self, about: dict[str, Any]) -> str:
        lines = [f"## {self._title}", "", "; ".join(f"{name}: {value}" for name, value in about.items()), ""]
        lines += ["| " + " | ".join(COLUMNS) + " |"]
        lines += ["|" + "|".join("---:" if name in NUMBERS else "---" for name in COLUMNS) + "|"]
        lines += ["| " + " | ".join(row.cells()) + " |" for row in self._rows]
        notes = ["", *(f"- {note}" for note in self._notes)] if self._notes else []
        return "\n".join([*lines, *notes, "", ""])


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    found: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        found.setdefault(name.strip(), value.strip())
    model = found.get("model name", platform.machine())
    if "cpu family" in found:
        model += f" (family {found['cpu family']}, model {found.get('model', '?')})"
    return model


def machine() -> dict[str, Any]:
    """The environment of the figures: processor, cores, versions, and today's date."""
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("kvpool", "torch", "numpy")]
    gpu = {"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}
    return {
        "date": dt.datetime.now(tz=dt.timezone.utc).date().isoformat(),
        "processor": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        **gpu,
        "system": f"{platform.system()} {platform.release()}",
        "versions": ", ".join([f"Python {platform.python_version()}", *versions]),
    }
