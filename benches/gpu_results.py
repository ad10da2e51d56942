"""Puts the figures of a GPU's board into RESULTS.md, under one heading for its card.

    python benches/gpu_results.py target/gpu/board.json

An older table of the same card is replaced; everything else stays as it is.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("RESULTS.md")
COLUMNS = ("question", "kvpool, us", "GB/s", "alternative", "its us", "ratio", "target", "met")
NUMBERS = ("kvpool, us", "GB/s", "its us", "ratio")


def cells(line: dict[str, Any]) -> list[str]:
    """A line of the board as text, one for each of `COLUMNS`."""
    gbs = f"{line['gbs']:,.0f}" if line["gbs"] else ""
    met = {True: "yes", False: "no", None: ""}[line["met"]]
    times = [f"{line[name]:,.2f}" for name in ("ours_us", "its_us", "ratio")]
    return [line["question"], times[0], gbs, line["peer"], times[1], times[2], line["target"], met]


def section(board: dict[str, Any]) -> str:
    """The part of the results for a board: heading, machine, ceilings and table.

    Raises:
        ValueError: The board has no figures, or is of no GPU.
    """
    machine, lines = board["machine"], [line for line in board["lines"] if line["its_us"] is not None]
    if not lines or "gpu" not in machine:
        raise ValueError("the board has no figures of a GPU")
    alone = [line for line in board["lines"] if line["its_us"] is None]
    text = [f"## {heading(board)}", "", "; ".join(f"{name}: {value}" for name, value in machine.items()), ""]
    text += [
        "Ceilings: " + "; ".join(f"{name} {value}" for name, value in board["ceilings"].items()) + ".",
        "",
    ]
    text += ["| " + " | ".join(COLUMNS) + " |"]
    text += ["|" + "|".join("---:" if name in NUMBERS else "---" for name in COLUMNS) + "|"]
    text += ["| " + " | ".join(cells(line)) + " |" for line in lines]
    notes = [f"{line['question']}: {line['ours_us']:,.2f} us, beside nothing" for line in alone]
    notes += [f"{one['question']}: {one['peer']} was missing" for one in board["missing"]]
    notes += [f"failed: {one}" for one in board["failed"]]
    return "\n".join([*text, *(["", *(f"- {note}" for note in notes)] if notes else []), ""])


def heading(board: dict[str, Any]) -> str:
    """The heading for the card."""
    return f"On one {board['machine']['gpu']}"


def with_section(results: str, board: dict[str, Any]) -> str:
    """The results with the section of a board in the place of an older one, or at the end."""
    new = section(board)
    parts = re.split(r"^(?=## )", results, flags=re.MULTILINE)
    first = f"## {heading(board)}\n"
    if not any(part.startswith(first) for part in parts):
        return "".join([results.rstrip("\n"), "\n\n", new])
    replaced = [new + "\n" if part.startswith(first) else part for part in parts]
    return "".join(replaced).rstrip("\n") + "\n"


def main() -> int:
    """Writes the file, or says why not."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("board", type=Path, help="board.json of tests/gpu/board.py")
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="the file (default: benches/RESULTS.md)"
    )
    arguments = parser.parse_args()
    board = json.loads(arguments.board.read_text(encoding="utf-8"))
    try:
        text = with_section(arguments.results.read_text(encoding="utf-8"), board)
    except ValueError as error:
        print(f"{arguments.board}: {error}", file=sys.stderr)
        return 1
    arguments.results.write_text(text, encoding="utf-8")
    print(f"{arguments.results}: {heading(board)}, {len(board['lines'])} figures")
    return 0


if __name__ == "__main__":
    sys.exit(main())
