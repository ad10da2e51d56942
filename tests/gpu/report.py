"""One report of all steps: as Markdown for people, as JSON for programs."""

from __future__ import annotations

import csv
import io
import json
import re
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from steps import FAILED, NOT_RUN, OK, SKIPPED, Result

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

TAIL = 25
NCU_COLUMNS = {
    "gpu__time_duration.sum": "duration",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "memory, % of peak",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "warps active, %",
}


def _cell(value: object) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")


def table(
    columns: Sequence[str], rows: Iterable[Sequence[object]], *, numbers: Sequence[str] = ()
) -> list[str]:
    """The lines of a table; `numbers` are the columns that stand on the right."""
    lines = ["| " + " | ".join(columns) + " |"]
    lines.append("|" + "|".join("---:" if name in numbers else "---" for name in columns) + "|")
    return [*lines, *("| " + " | ".join(map(_cell, row)) + " |" for row in rows), ""]


def section(title: str, lines: Sequence[str]) -> list[str]:
    return [f"## {title}", "", *lines] if lines else []


def bullets(items: Iterable[str], title: str = "") -> list[str]:
    """The lines of a list, if it has any items, under a title."""
    lines = [f"- {item}" for item in items]
    return [*((title, "") if title else ()), *lines, ""] if lines else []


def records_of(results: Sequence[Result], kind: str) -> list[dict[str, Any]]:
    return [record for result in results for record in result.about(kind)]


def verdict(results: Sequence[Result]) -> str:
    """The result, in a sentence."""
    counts = Counter(result.status for result in results)
    words = [f"{counts[status]} {status}" for status in (OK, FAILED, SKIPPED, NOT_RUN) if counts[status]]
    failed = ", ".join(result.step.name for result in results if result.status == FAILED)
    return f"{len(results)} steps: {', '.join(words)}." + (f" **Failed: {failed}.**" if failed else "")


def steps_section(results: Sequence[Result]) -> list[str]:
    columns = ("step", "status", "seconds", "settles", "why")
    words = {FAILED: "**FAILED**"}
    rows = [
        (r.step.name, words.get(r.status, r.status), f"{r.seconds:.1f}", r.step.settles, r.reason)
        for r in results
    ]
    return section("Steps", table(columns, rows, numbers=("seconds",)))


def probe_section(results: Sequence[Result]) -> list[str]:
    """The questions that the driver answers otherwise than its documentation."""
    output = "\n".join(result.output for result in results if "probe" in result.step.name)
    if not output:
        return []
    differs = re.findall(r"^DIFFERS +(.*)$", output, flags=re.MULTILINE)
    right = len(re.findall(r"^ok {6}", output, flags=re.MULTILINE))
    counts = f"{right} answers are as documented, {len(differs)} differ."
    return section("What the driver answers", [counts, "", *bullets(differs)])


def _outcome(record: Mapping[str, Any]) -> str:
    if record["ok"]:
        return str(record["call"])
    return f"**{'SPOILT' if record['capture'] != 'survived' else 'WRONG'}**: {record['call']}"


def captures_section(results: Sequence[Result]) -> list[str]:
    """Calls beside captures: first those that are wrong, with what was said, then all."""
    found = records_of(results, "capture")
    if not found:
        return []
    counts = [
        f"{count['right']} right, {count['wrong']} wrong, {count['left']} not tried for lack of time"
        for count in records_of(results, "captures")
    ]
    reads = [
        f"slots read on a second stream by {read['name']}: {read['wrong']} of {read['of']} wrong"
        for read in records_of(results, "read")
        if "of" in read
    ]
    lines = bullets([*counts, *reads])
    wrong = [record for record in found if not record["ok"]]
    if wrong:
        columns = ("call", "whose capture", "capture", "the call", "what was said")
        fields = ("name", "case", "capture", "call", "detail")
        lines += ["These are wrong:", "", *table(columns, [[r[name] for name in fields] for r in wrong])]
    cases = list(dict.fromkeys(record["case"] for record in found))
    by_name: dict[str, dict[str, str]] = {}
    for record in found:
        by_name.setdefault(record["name"], {})[record["case"]] = _outcome(record)
    rows = [(name, *(calls.get(case, "") for case in cases)) for name, calls in by_name.items()]
    lines += ["What each call did; the capture survived unless it says SPOILT.", ""]
    return section("Calls inside and beside captures", [*lines, *table(("call", *cases), rows)])


def exact_section(results: Sequence[Result]) -> list[str]:
    """The bitwise comparisons, with the number of values."""
    return section("Exactness", bullets(f"{r['what']}: {r['told']}" for r in records_of(results, "exact")))


def first_pool_section(results: Sequence[Result]) -> list[str]:
    columns = ("kernels", "cache", "PyTorch's context, s", "first pool, s", "second pool, s")
    rows = [
        (r["kernels"], r["cache"], f"{r['context']:.3f}", f"{r['first']:.4f}", f"{r['second']:.4f}")
        for r in records_of(results, "first pool")
    ]
    return section("The first pool of a process", table(columns, rows, numbers=columns[2:]) if rows else [])


def images_section(results: Sequence[Result]) -> list[str]:
    """Where the kernels of each image differ from the same calls in host memory."""
    lines: list[str] = []
    for found in records_of(results, "images"):
        counts = f"Kernels {found['kernels']}: {len(found['wrong'])} of {found['checks']} results differ."
        lines += [counts, "", *bullets(found["wrong"])]
    return section("Bit for bit as in host memory", lines)


def tests_section(results: Sequence[Result]) -> list[str]:
    """Counts, and each test that failed, or never ended."""
    rows, failed, missing = [], [], []
    reasons: Counter[str] = Counter()
    for result in results:
        outcomes: dict[str, dict[str, Any]] = {}
        for record in result.about("test"):
            # A test whose worker ended after it is told of twice.
            outcomes.setdefault(record["name"], record)
        collected = max((record["count"] for record in result.about("collected")), default=0)
        if not collected and not outcomes:
            continue
        by_outcome: dict[str, list[dict[str, Any]]] = {}
        for record in outcomes.values():
            by_outcome.setdefault(record["outcome"], []).append(record)
        shown = [len(by_outcome.get(word, ())) for word in ("passed", "failed", "skipped")]
        rows.append((result.step.name, collected, *shown, collected - sum(shown)))
        failed += [f"`{r['name']}`: {r['reason']}" for r in by_outcome.get("failed", ())]
        begun = [record["name"] for record in result.about("begins") if record["name"] not in outcomes]
        failed += [f"`{name}`: it never ended" for name in begun]
        missing += [f"`{r['name']}`: {r['reason']}" for r in by_outcome.get("missing", ())]
        reasons.update(r["reason"] for r in by_outcome.get("skipped", ()))
    if not rows:
        return []
    columns = ("tests", "collected", "passed", "failed", "skipped", "no result")
    lines = table(columns, rows, numbers=columns[1:])
    lines += bullets(failed, "Failed, with their whole text in `report.json`:")
    lines += bullets(missing, "Not read, as something that they import is not there:")
    lines += bullets((f"{count}: {reason}" for reason, count in reasons.most_common()), "Skipped:")
    return section("Tests", lines)


def speed_section(results: Sequence[Result], machine: Mapping[str, str]) -> list[str]:
    """Times of the kernels, as `benches/RESULTS.md` has them."""
    columns = ("what", "us", "GB/s", "host, us", "alternative", "its us", "ratio")
    rows = []
    for r in records_of(results, "speed"):
        beside = ("", "", "")
        if "ratio" in r:
            beside = (r["alternative"], f"{r['its_us']:,.2f}", f"{r['ratio']:.2f}")
        gbs = f"{r['gbs']:,.0f}" if r["gbs"] else ""
        rows.append((r["what"], f"{r['us']:,.2f}", gbs, f"{r['host_us']:,.2f}", *beside))
    if not rows:
        return []
    known = [
        f"{name}: {machine[name]}" for name in ("date", "device", "driver", "PyTorch") if name in machine
    ]
    numbers = ("us", "GB/s", "host, us", "its us", "ratio")
    lines = ["; ".join(known), "", *table(columns, rows, numbers=numbers)]
    return section("Kernels and calls on a GPU", lines)


def sanitizer_section(results: Sequence[Result]) -> list[str]:
    lines = []
    for result in results:
        found = re.findall(r"^=+ (.*)$", result.output, flags=re.MULTILINE)
        if any("ERROR SUMMARY" in line for line in found):
            kinds = ("Invalid", "Misaligned", "Program hit", "ERROR SUMMARY")
            errors = Counter(line for line in found if line.startswith(kinds))
            lines += bullets(f"{count} times: {line}" for line, count in errors.most_common(20))
    return section("compute-sanitizer", lines)


def ncu_rows(output: str) -> list[tuple[str, ...]]:
    """Kernel and counters of each launch, from ncu's CSV."""
    start = output.find('"ID"')
    if start < 0:
        return []
    launches: dict[tuple[str, str], dict[str, str]] = {}
    for row in csv.DictReader(io.StringIO(output[start:])):
        name, metric = row.get("Kernel Name"), row.get("Metric Name")
        if name and metric in NCU_COLUMNS:
            unit = row.get("Metric Unit") or ""
            value = f"{row.get('Metric Value')} {unit if unit != '%' else ''}".strip()
            launches.setdefault((row["ID"], name), {"grid": row.get("Grid Size") or ""})[metric] = value
    return [
        (name, values["grid"], *(values.get(metric, "") for metric in NCU_COLUMNS))
        for (_, name), values in launches.items()
    ]


def ncu_section(results: Sequence[Result]) -> list[str]:
    rows = [row for result in results for row in ncu_rows(result.output)]
    columns = ("kernel", "grid", *NCU_COLUMNS.values())
    return section("ncu", table(columns, rows, numbers=columns[2:]) if rows else [])


def failures_section(results: Sequence[Result]) -> list[str]:
    """The end of what each failed step printed."""
    lines = []
    for result in results:
        if result.status == FAILED:
            command = f"`{' '.join(result.step.command)}`"
            tail = result.output.rstrip().splitlines()[-TAIL:]
            lines += [f"### {result.step.name}", "", command, "", "```", *tail, "```", ""]
    return section("The end of what failed steps printed", lines)


def markdown(results: Sequence[Result], about: Mapping[str, str], tables: Sequence[Path]) -> str:
    """The report.

    Args:
        results: Of all steps that had their turn.
        about: What to say of commit, date and package.
        tables: Files with tables of benchmarks, if they were written.
    """
    machine = {**about}
    for record in records_of(results, "machine"):
        machine |= {name: value for name, value in record.items() if name != "kind"}
    lines = ["# kvpool on a GPU", "", verdict(results), ""]
    lines += [*(f"- {name}: {value}" for name, value in machine.items()), "", *steps_section(results)]
    sections: tuple[Callable[[Sequence[Result]], list[str]], ...] = (
        probe_section,
        captures_section,
        first_pool_section,
        images_section,
        exact_section,
        tests_section,
        lambda results: speed_section(results, machine),
        sanitizer_section,
        ncu_section,
    )
    for make in sections:
        try:
            lines += make(results)
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            # A bad record of one step must not lose those of the others.
            lines += [f"A section could not be made of what was told (`report.json`): {error!r}", ""]
    for path in tables:
        if path.exists():
            lines += path.read_text(encoding="utf-8").splitlines()
    return "\n".join([*lines, *failures_section(results)]).rstrip() + "\n"


def write(folder: Path, results: Sequence[Result], about: Mapping[str, str], tables: Sequence[Path]) -> None:
    """Writes `report.md` and `report.json`."""
    found = [
        {
            **{name: value for name, value in asdict(result).items() if name not in {"step", "output"}},
            "name": result.step.name,
            "command": list(result.step.command),
            "env": dict(result.step.env),
        }
        for result in results
    ]
    text = json.dumps({"about": dict(about), "steps": found}, indent=1)
    (folder / "report.json").write_text(text + "\n", encoding="utf-8")
    (folder / "report.md").write_text(markdown(results, about, tables), encoding="utf-8")
