"""Draws the ratios of `RESULTS.md` into `docs/img`: all of the CPU's, and the few that the README shows.

A dot is how many times faster kvpool is than its alternative in the same process, on a logarithmic scale; a
tick is the target. A target in microseconds stands where kvpool would be with that time. No number comes from
elsewhere.
"""

from __future__ import annotations

import html
import math
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benches" / "RESULTS.md"
IMAGES = ROOT / "docs" / "img"

# The short chart: question, alternative where a question has several, and label.
SHORT = [
    ("alloc + free, n = 1, sorted, fresh pool", "", "alloc + free of 1 slot, lowest first"),
    ("alloc + free, n = 128, sorted, fresh pool", "", "alloc + free of 128, lowest first"),
    (
        "alloc + free, n = 128, first in, first out, fresh pool",
        "",
        "alloc + free of 128, first in, first out",
    ),
    ("alloc + free, n = 128, page size 16, fresh pool", "", "alloc + free of 128, pages of 16"),
    ("alloc of 128 that merges half of 1 M: the upper half", "", "alloc of 128 that merges half of the pool"),
    (
        "alloc + free, n = 4096, all that is free: each alloc merges",
        "",
        "alloc + free of 4096 that are all far apart",
    ),
    (
        "set_kv_buffer, 4096 tokens x 8 x 128 bfloat16, random slots",
        "indexing",
        "set_kv_buffer, 4096 tokens, one thread",
    ),
    (
        "gather_kv into new tensors, 4096 tokens x 8 x 128 bfloat16, random slots",
        "indexing",
        "gather_kv, 4096 tokens, one thread",
    ),
    ("decode of 256 requests, context 64", "", "a decode step of 256 requests, context 64"),
    ("decode of 256 requests, context 4096", "", "a decode step of 256 requests, context 4096"),
    ("extend of 32 requests by 512 tokens", "", "prefill of 32 requests by 512 tokens"),
    ("Workspace.empty + reset, 1750 a pass, cpu", "", "Workspace.empty + reset, a tensor of 1750"),
    ("ChunkPool.allocate + view + free, cpu", "", "ChunkPool.allocate + view + free"),
]

STYLE = """
  .card { fill: #ffffff; stroke: #d0d7de; }
  text { font-family: "Segoe UI", "Noto Sans", "DejaVu Sans", Helvetica, Arial, sans-serif; fill: #1f2328; }
  .muted { fill: #59636e; }
  .grid { stroke: #d8dee4; }
  .one { stroke: #59636e; stroke-width: 1.5; }
  .target { stroke: #1f2328; stroke-width: 2; }
  .fast { fill: #0b6e99; } .stem-fast { stroke: #0b6e99; }
  .slow { fill: #c2510c; } .stem-slow { stroke: #c2510c; }
  @media (prefers-color-scheme: dark) {
    .card { fill: #0d1117; stroke: #3d444d; }
    text { fill: #f0f6fc; }
    .muted { fill: #9198a1; }
    .grid { stroke: #262c36; }
    .one { stroke: #9198a1; }
    .target { stroke: #f0f6fc; }
    .fast { fill: #4cb7e5; } .stem-fast { stroke: #4cb7e5; }
    .slow { fill: #f0883e; } .stem-slow { stroke: #f0883e; }
  }
"""

WIDTH, MARGIN = 1000, 24
RIGHT = 770  # end of the scale
ROW, HEADING, TOP, BOTTOM = 22, 52, 92, 46


# Alternatives that are plain PyTorch.
PLAIN = {"PyTorch", "per-request PyTorch", "radix tree in Python"}


@dataclass(frozen=True)
class Figure:
    """One row of a table.

    Attributes:
        question: The operation that was measured.
        alternative: The alternative it is compared with.
        ours: The time of kvpool, as in the table.
        theirs: The time of the alternative.
        unit: The unit of both times.
        ratio: The alternative's time divided by kvpool's.
        target: The target ratio, if any.
    """

    question: str
    alternative: str
    ours: str
    theirs: str
    unit: str
    ratio: float
    target: float | None


@dataclass(frozen=True)
class Section:
    """A table with its title, machine and date."""

    title: str
    machine: str
    figures: list[Figure]


def number(text: str) -> float:
    """A number of a table."""
    return float(text.replace(",", ""))


def target_of(text: str, theirs: str) -> float | None:
    """The ratio that a target asks for."""
    if text.startswith("ratio >= "):
        return number(text.removeprefix("ratio >= "))
    if match := re.fullmatch(r"<= ([\d.,]+) us", text):
        return number(theirs) / number(match[1])
    if text:
        raise ValueError(f"unknown target: {text!r}")
    return None


def sections() -> list[Section]:
    """All tables of the results that have ratios."""
    found = []
    for part in re.split(r"^## ", RESULTS.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        lines = part.splitlines()
        rows = [
            [cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")
        ]
        if not rows or "ratio" not in rows[0]:
            continue
        head, figures = rows[0], []
        for row in rows[2:]:
            cells = dict(zip(head, row, strict=True))
            ours = next(name for name in head if name.startswith("kvpool"))
            theirs = head[head.index("ratio") - 1]
            unit = ours.rpartition(" ")[2]
            alternative = cells.get("alternative", theirs.partition(",")[0])
            target = target_of(cells.get("target", ""), cells[theirs])
            figures.append(
                Figure(row[0], alternative, cells[ours], cells[theirs], unit, number(cells["ratio"]), target)
            )
        known = dict(
            part.split(": ", 1) for line in lines if line.startswith("date: ") for part in line.split("; ")
        )
        card = [known["gpu"]] if "gpu" in known else []
        words = [known["date"], *card, known["processor"], f"{known['cores']} cores"] if known else []
        beside = {figure.alternative for figure in figures}
        if len(beside) == 1 and not beside & PLAIN:
            words.append(f"beside an {beside.pop()}")
        machine = ", ".join(words)
        found.append(Section(lines[0], machine, figures))
    return found


class Scale:
    """A logarithmic scale over all ratios and targets, including parity."""

    def __init__(self, figures: list[Figure], left: int) -> None:
        """A scale for the figures of a chart, from `left` on."""
        self._left = left
        seen = [1.0, *(f.ratio for f in figures), *(f.target for f in figures if f.target is not None)]
        self._low, self._high = math.log10(min(seen)) - 0.08, math.log10(max(seen)) + 0.08
        self.marks = [
            m
            for m in (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 1000, 10000)
            if min(seen) <= m <= max(seen)
        ]

    def at(self, ratio: float) -> float:
        """The position of a ratio."""
        part = (math.log10(ratio) - self._low) / (self._high - self._low)
        return self._left + part * (RIGHT - self._left)


def text(  # noqa: PLR0913 - all that a line of text has
    x: float, y: float, words: str, size: int, *, of: str = "", anchor: str = "start", bold: bool = False
) -> str:
    """A line of text."""
    kind = f' class="{of}"' if of else ""
    weight = ' font-weight="600"' if bold else ""
    place = f'x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}"'
    return f"<text {place}{weight}{kind}>{html.escape(words, quote=False)}</text>"


def ratio_of(figure: Figure) -> str:
    """A ratio with as many digits as are significant."""
    digits = 0 if figure.ratio >= 100 else 1 if figure.ratio >= 10 else 2
    return f"{figure.ratio:.{digits}f} x"


def draw(parts: list[Section], title: str, subtitle: str, left: int) -> str:
    """A chart of some tables, as SVG, with labels up to `left`."""
    figures = [figure for part in parts for figure in part.figures]
    scale = Scale(figures, left)
    headings = sum(1 for part in parts if part.title)
    height = TOP + HEADING * headings + ROW * len(figures) + BOTTOM
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{html.escape(title)}">',
        f"<style>{STYLE}</style>",
        f'<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>',
        text(MARGIN, 34, title, 17, bold=True),
        text(MARGIN, 55, subtitle, 12, of="muted"),
    ]
    bottom = height - BOTTOM
    for mark in scale.marks:
        x, kind = scale.at(mark), "one" if mark == 1 else "grid"
        out.append(f'<line class="{kind}" x1="{x:.1f}" y1="{TOP - 12}" x2="{x:.1f}" y2="{bottom + 4}"/>')
        ends = (TOP - 18, bottom + 20)
        out += [text(x, end, f"{mark:g}", 11, of="muted", anchor="middle") for end in ends]
    out.append(text(WIDTH - MARGIN, TOP - 18, "kvpool / alternative", 11, of="muted", anchor="end"))
    y = float(TOP)
    for part in parts:
        if part.title:
            out.append(text(MARGIN, y + 22, part.title, 14, bold=True))
            out.append(text(MARGIN, y + 39, part.machine, 10, of="muted"))
            y += HEADING
        for figure in part.figures:
            out += _row(figure, scale, y + ROW / 2)
            y += ROW
    legend = bottom + 36
    out += [
        f'<circle class="fast" cx="{MARGIN + 5}" cy="{legend - 4}" r="5"/>',
        text(MARGIN + 16, legend, "kvpool is faster", 11, of="muted"),
        f'<circle class="slow" cx="{MARGIN + 130}" cy="{legend - 4}" r="5"/>',
        text(MARGIN + 141, legend, "kvpool is slower", 11, of="muted"),
        f'<path class="target" d="M{MARGIN + 258} {legend - 11} v14"/>',
        text(MARGIN + 267, legend, "target", 11, of="muted"),
        "</svg>",
    ]
    return "\n".join(out) + "\n"


def _row(figure: Figure, scale: Scale, y: float) -> list[str]:
    """The label, stem, dot, target and numbers of a figure."""
    kind = "fast" if figure.ratio >= 1 else "slow"
    one, x = scale.at(1), scale.at(figure.ratio)
    row = [
        text(MARGIN, y + 4, figure.question, 12),
        f'<line class="stem-{kind}" stroke-width="3" x1="{one:.1f}" y1="{y}" x2="{x:.1f}" y2="{y}"/>',
    ]
    if figure.target is not None:
        at = scale.at(figure.target)
        row.append(f'<line class="target" x1="{at:.1f}" y1="{y - 7}" x2="{at:.1f}" y2="{y + 7}"/>')
    row += [
        f'<circle class="{kind}" cx="{x:.1f}" cy="{y}" r="5"/>',
        text(RIGHT + 54, y + 4, ratio_of(figure), 12, anchor="end", bold=True),
        text(
            WIDTH - MARGIN,
            y + 4,
            f"{figure.ours} / {figure.theirs} {figure.unit}",
            11,
            of="muted",
            anchor="end",
        ),
    ]
    return row


def with_alternative(figure: Figure) -> Figure:
    """A figure; its label names the alternative where it differs from the table's."""
    plain = figure.alternative in PLAIN | {"unchecked queue"}
    beside = "" if plain else f", beside {figure.alternative.removeprefix('per-request ')}"
    question = figure.question
    for long, short in [
        ("4096 tokens x 8 x 128 bfloat16", "4096 tokens"),
        ("first in, first out", "FIFO"),
        (" of 256 requests", " of 256"),
        (" tokens, page size ", ", page "),
        (" tokens behind ", " behind "),
        (" tokens each", " each"),
        (", 4 M slots against 64 k", ", 4 M slots"),
        (" into new tensors", ""),
        (", clone, target in the cache", ", clone in the cache"),
        ("context 64 beside 4096", "context 64"),
    ]:
        question = question.replace(long, short)
    return replace(figure, question=question + beside)


def short(parts: list[Section]) -> Section:
    """The figures of the short chart."""
    figures = [figure for part in parts for figure in part.figures]
    chosen = []
    for question, alternative, words in SHORT:
        found = [f for f in figures if f.question == question and alternative in {"", f.alternative}]
        if not found:
            raise LookupError(f"RESULTS.md has no figure for {question!r}")
        chosen.append(replace(found[0], question=words))
    return Section("", "", chosen)


def charts() -> dict[Path, str]:
    """All charts by their files."""
    # The boards of cards have hundreds of rows each, and tables of their own in the documentation.
    parts = [part for part in sections() if not part.title.startswith("On one ")]
    where = "Beside plain PyTorch; torch.empty for Workspace, a list and slices for ChunkPool"
    title = "How many times faster kvpool is than its alternative in the same process"
    long = [Section(part.title, part.machine, [with_alternative(f) for f in part.figures]) for part in parts]
    return {
        IMAGES / "ratios-short.svg": draw([short(parts)], title, f"{where}. {parts[0].machine}.", 330),
        IMAGES / "ratios.svg": draw(
            long,
            "kvpool beside its alternative in the same process",
            "Ratios of medians, log scale: right of 1 kvpool is faster. Beside plain PyTorch unless named.",
            430,
        ),
    }


def main() -> None:
    """Draws the charts. With `--check`, exits with status 1 if the files differ from what would be drawn."""
    stale = False
    for path, picture in charts().items():
        if "--check" not in sys.argv:
            path.write_text(picture, encoding="utf-8")
        elif not path.is_file() or path.read_text(encoding="utf-8") != picture:
            print(f"{path.relative_to(ROOT)} does not match RESULTS.md; run: make chart")
            stale = True
    sys.exit(stale)


if __name__ == "__main__":
    main()
