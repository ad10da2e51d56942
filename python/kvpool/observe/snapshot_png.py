"""Snapshots as a picture."""

from __future__ import annotations

import math
import textwrap
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import EngFormatter, MaxNLocator

from kvpool.observe.snapshot import owner_of, owners

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    import numpy.typing as npt
    from matplotlib.axes import Axes

    from kvpool.observe.snapshot import Snapshot

# A taller picture draws slowly, and few programs display it.
_MOST_POOLS = 16
# Cells of the map; more units share cells.
_COLUMNS, _ROWS = 128, 64
_OTHER = "#546e7a"
# Rows of the map with the number of their first unit.
_NAMED_ROWS = 8
# Characters that fit above the map.
_WIDTH_OF_NAME, _WIDTH_OF_NUMBERS = 72, 100
_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
# The states that have one colour.
_STATES = {
    "free": "#eceff1",
    "idle": "#eceff1",
    "fenced": "#ffb300",
    "evictable": "#90a4ae",
    "locked": "#37474f",
}
# Safe for colour-blind readers (Okabe and Ito), with lighter variants.
_PALETTE = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#8c6bb1", "#b2df8a", "#a65628"]


def draw(taken: list[Snapshot], path: Path) -> None:
    """Draw snapshots into a PNG file."""
    to_figure(taken).savefig(path, format="png", dpi=110)


def to_figure(taken: list[Snapshot]) -> Figure:
    """Draw snapshots one below the other; of many, those with the most units in use."""
    by_use = sorted(range(len(taken)), key=lambda at: -taken[at].in_use)
    shown = [taken[at] for at in sorted(by_use[:_MOST_POOLS])]
    # In inches: all parts have the same size, and an automatic layout would take longer than the drawing.
    height, above, below = 3.4, 0.95, 1.15
    total = (height + above + below) * len(shown)
    figure = Figure(figsize=(13, total))
    FigureCanvasAgg(figure)
    rows = figure.add_gridspec(
        len(shown),
        left=0.075,
        right=0.985,
        bottom=below / total,
        top=1 - above / total,
        hspace=(above + below) / height,
    )
    if len(shown) < len(taken):
        note = f"The {len(shown)} of {len(taken)} pools with the most units in use"
        figure.text(0.5, 1 - 0.05 / total, note, ha="center", va="top", fontsize=12)
    for at, one in enumerate(shown):
        grid = rows[at].subgridspec(3, 2, width_ratios=(2, 1), wspace=0.13, hspace=1)
        _map(figure.add_subplot(grid[:, 0]), one)
        ages, lifetimes, runs = (figure.add_subplot(grid[place, 1]) for place in range(3))
        _bars(ages, one.ages_s, time_text, f"{one.unit}s by age, from")
        _bars(lifetimes, one.lifetimes_s, time_text, f"freed {one.unit}s by lifetime, below")
        _bars(runs, one.run_lengths, "{:,}".format, f"free runs by length in {one.unit}s, from")
    return figure


def _map(axes: Axes, one: Snapshot) -> None:
    """Draw units in rows, coloured by owner; a cell of several units has their mean colour."""
    counts = owners(one)
    colours = {owner: colour for (owner, _), colour in zip(counts, _PALETTE, strict=False)}
    per_cell = max(1, math.ceil(one.count / (_COLUMNS * _ROWS)))
    image = _cells(one, colours, per_cell)
    columns = max(1, min(_COLUMNS, round(math.sqrt(2 * len(image)))))
    rows = max(1, math.ceil(len(image) / columns))
    filled = np.full((rows * columns, 3), 255, dtype=np.uint8)
    filled[: len(image)] = image
    axes.imshow(filled.reshape(rows, columns, 3), aspect="auto", interpolation="nearest")
    axes.set_xticks([])
    axes.tick_params(axis="y", labelsize=8)
    first = one.spans[0].first if one.spans else 0
    named = range(0, rows, math.ceil(rows / _NAMED_ROWS))
    axes.set_yticks(named, [f"{first + row * columns * per_cell:,}" for row in named])
    shared = f", {per_cell:,} a cell" if per_cell > 1 else ""
    cached = f", {one.cached}" if one.cached else ""
    fragmentation = "" if one.kind == "Endpoint" else f"; fragmentation {one.fragmentation:.0%}"
    numbers = f"{one.in_use:,} of {one.count:,} {one.unit}s {one.use}{cached}{shared}{fragmentation}"
    # Above the map, and not above what is beside it.
    axes.set_title(textwrap.fill(numbers, _WIDTH_OF_NUMBERS), loc="left", fontsize=9)
    axes.annotate(
        _short(one.name, _WIDTH_OF_NAME),
        (0, 1),
        xycoords="axes fraction",
        xytext=(0, 36),
        textcoords="offset points",
        fontsize=11,
        fontweight="bold",
        parse_math=False,
    )
    _add_legend(axes, one, counts, colours)


def _add_legend(axes: Axes, one: Snapshot, counts: list[tuple[str, int]], colours: dict[str, str]) -> None:
    """Name the colours of states and owners below the map."""
    legend = [
        Patch(color=colour, label=state)
        for state, colour in _STATES.items()
        if one.counts[state] or (state in ("free", "fenced") and one.kind != "Endpoint")
    ]
    legend += [
        Patch(color=colours[owner], label=f"{_short(owner)} ({count:,})")
        for owner, count in counts
        if owner in colours
    ]
    if len(counts) > len(colours):
        legend.append(Patch(color=_OTHER, label="other owners"))
    box = axes.legend(
        handles=legend, loc="upper center", bbox_to_anchor=(0.5, -0.02), ncols=3, fontsize=7, frameon=False
    )
    for text in box.get_texts():
        text.set_parse_math(False)


def _cells(one: Snapshot, colours: dict[str, str], per_cell: int) -> npt.NDArray[np.uint8]:
    """Return the colour of each cell: red, green and blue, as the mean of its units."""
    first = one.spans[0].first if one.spans else 0
    ends = np.array([0, *(span.end - first for span in one.spans)], dtype=np.float64)
    shown = [_STATES.get(span.state) or colours.get(owner_of(span), _OTHER) for span in one.spans]
    rgb = {colour: to_rgb(colour) for colour in {*shown}}
    shades = np.array([rgb[colour] for colour in shown], dtype=np.float64).reshape(-1, 3)
    # Cumulative colours at the end of each span, interpolated at the borders of cells.
    sums = np.vstack([np.zeros(3), (shades * np.diff(ends)[:, None]).cumsum(axis=0)])
    borders = np.append(np.arange(0, one.count, per_cell), one.count)
    cells = np.diff([np.interp(borders, ends, channel) for channel in sums.T]) / np.diff(borders)
    image: npt.NDArray[np.uint8] = (cells.T * 255).round().astype(np.uint8)
    return image


def _short(owner: str, length: int = 34) -> str:
    """Shorten a long name to its end, which is the part that differs."""
    return owner if len(owner) <= length else f"...{owner[3 - length :]}"


def time_text(seconds: float) -> str:
    """Format a time with three digits, in a unit in which it is at least 1."""
    scale, unit = next((pair for pair in _TIMES if seconds >= pair[0]), _TIMES[-1])
    number = seconds / scale
    return f"{number:,.0f} {unit}" if number >= 100 else f"{number:.3g} {unit}"  # noqa: PLR2004


def _bars(
    axes: Axes,
    counts: Mapping[int, int] | Mapping[float, int],
    label: Callable[[float], str],
    title: str,
) -> None:
    """Draw counts as bars, with keys as `label` has them."""
    axes.set_title(title, fontsize=9, loc="left")
    axes.spines[["top", "right"]].set_visible(b=False)
    if not counts:
        axes.text(
            0.5, 0.5, "nothing to show", ha="center", va="center", transform=axes.transAxes, color="#78909c"
        )
        axes.set_xticks([])
        axes.set_yticks([])
        return
    axes.bar(range(len(counts)), list(counts.values()), color="#0072b2", width=0.8)
    step = max(1, math.ceil(len(counts) / 8))
    labels = [label(key) for key in counts]
    axes.set_xticks(range(0, len(counts), step), labels[::step], fontsize=7)
    axes.tick_params(axis="y", labelsize=7)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
    axes.yaxis.set_major_formatter(EngFormatter(sep=""))
