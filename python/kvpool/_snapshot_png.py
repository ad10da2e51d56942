"""Snapshots as a picture."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from kvpool._occupancy import owner_of, owners

if TYPE_CHECKING:
    from pathlib import Path

    import numpy.typing as npt
    from matplotlib.axes import Axes

    from kvpool._occupancy import Snapshot

# Of the map: more units than these share cells.
_COLUMNS, _ROWS = 128, 64
_FREE, _FENCED, _OTHER = "#eceff1", "#ffb300", "#546e7a"
# Told apart also by those who see few colours (Okabe and Ito), and lighter ones of the same hues.
_PALETTE = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#8c6bb1", "#b2df8a", "#a65628"]


def draw(taken: list[Snapshot], path: Path) -> None:
    """Draw snapshots one below the other into a PNG file."""
    figure = Figure(figsize=(13, 4.6 * len(taken)), layout="constrained")
    FigureCanvasAgg(figure)
    parts = figure.subfigures(len(taken), 1, squeeze=False)
    for part, one in zip(parts.flat, taken, strict=True):
        left, right = part.subfigures(1, 2, width_ratios=(2, 1))
        _map(left.subplots(), one)
        ages, lifetimes, runs = right.subplots(3, 1)
        _bars(ages, _by_duration(one.ages_s), f"{one.unit}s by age", "seconds")
        _bars(lifetimes, _lifetimes(one), f"{one.unit}s given back, by lifetime", "seconds")
        _bars(runs, _by_power(one.free_runs), "free runs by length", f"{one.unit}s")
    figure.savefig(path, format="png", dpi=110)


def _map(axes: Axes, one: Snapshot) -> None:
    """Units in rows, coloured by owner; cells that several units share have the mean colour."""
    most = owners(one)[: len(_PALETTE)]
    colours = {owner: _PALETTE[at] for at, (owner, _) in enumerate(most)}
    per_cell = max(1, math.ceil(one.count / (_COLUMNS * _ROWS)))
    image = _cells(one, colours, per_cell)
    columns = max(1, min(_COLUMNS, round(math.sqrt(2 * len(image)))))
    rows = max(1, math.ceil(len(image) / columns))
    filled = np.ones((rows * columns, 3))
    filled[: len(image)] = image
    axes.imshow(filled.reshape(rows, columns, 3), aspect="auto", interpolation="nearest")
    axes.set_xticks([])
    axes.yaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    first = one.spans[0].first if one.spans else 0
    axes.yaxis.set_major_formatter(
        FuncFormatter(lambda row, _: f"{first + round(row) * columns * per_cell:,}")
    )
    in_use = sum(span.end - span.first for span in one.spans if span.state != "free")
    shared = f", {per_cell:,} a cell" if per_cell > 1 else ""
    axes.set_title(
        f"{one.name}: {in_use:,} of {one.count:,} {one.unit}s in use{shared}; "
        f"fragmentation {one.fragmentation:.0%}",
        loc="left",
        fontsize=11,
    )
    legend = [Patch(color=_FREE, label="free"), Patch(color=_FENCED, label="fenced")]
    legend += [Patch(color=colours[owner], label=f"{_short(owner)} ({count:,})") for owner, count in most]
    if any(owner not in colours for owner, _ in owners(one)):
        legend.append(Patch(color=_OTHER, label="other owners"))
    axes.legend(
        handles=legend, loc="upper center", bbox_to_anchor=(0.5, -0.02), ncols=4, fontsize=8, frameon=False
    )


def _cells(one: Snapshot, colours: dict[str, str], per_cell: int) -> npt.NDArray[np.float64]:
    """The colour of each cell: red, green and blue."""
    units = np.empty((math.ceil(one.count / per_cell) * per_cell, 3))
    units[:] = to_rgb(_FREE)
    first = one.spans[0].first if one.spans else 0
    for span in one.spans:
        if span.state == "fenced":
            colour = _FENCED
        elif span.state == "live":
            colour = colours.get(owner_of(span), _OTHER)
        else:
            continue
        units[span.first - first : span.end - first] = to_rgb(colour)
    cells: npt.NDArray[np.float64] = units.reshape(-1, per_cell, 3).mean(axis=1)
    return cells


def _short(owner: str, length: int = 34) -> str:
    """The end of a long name, which is the part that differs."""
    return owner if len(owner) <= length else f"...{owner[3 - length :]}"


def _by_duration(weighted: list[tuple[float, int]]) -> dict[str, int]:
    """Weights by powers of ten of the seconds that come with them."""
    if not weighted:
        return {}
    powers = [max(-6, math.floor(math.log10(max(seconds, 1e-6)))) for seconds, _ in weighted]
    counts = dict.fromkeys(range(min(powers), max(powers) + 1), 0)
    for power, (_, weight) in zip(powers, weighted, strict=True):
        counts[power] += weight
    return {f"{10.0**power:g}": count for power, count in counts.items()}


def _lifetimes(one: Snapshot) -> dict[str, int]:
    """How many lives lasted less than powers of two of microseconds, from the shortest to the longest."""
    seen = [at for at, count in enumerate(one.lifetimes) if count]
    if not seen:
        return {}
    return {f"{2.0**at * 1e-6:.2g}": one.lifetimes[at] for at in range(seen[0], seen[-1] + 1)}


def _by_power(lengths: list[int]) -> dict[str, int]:
    """How many lengths there are from each power of two on."""
    if not lengths:
        return {}
    powers = [length.bit_length() - 1 for length in lengths]
    counts = dict.fromkeys(range(min(powers), max(powers) + 1), 0)
    for power in powers:
        counts[power] += 1
    return {f"{2**power:,}": count for power, count in counts.items()}


def _bars(axes: Axes, counts: dict[str, int], title: str, unit: str) -> None:
    """Draw counts as bars."""
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
    axes.set_xticks(range(0, len(counts), step), list(itertools.islice(counts, 0, None, step)), fontsize=7)
    axes.tick_params(axis="y", labelsize=7)
    axes.set_xlabel(unit, fontsize=8)
