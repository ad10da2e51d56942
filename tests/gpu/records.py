"""Records of a step for `run.py`, beside its output: one JSON object a line, written at once.

A step that is ended in the middle has told all it knew by then.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

FILE = "KVPOOL_GPU_RECORDS"


def add(kind: str, **fields: object) -> None:
    """Tells the runner something; without a runner, nobody.

    Args:
        kind: What it is about, such as `capture`.
        **fields: What JSON can hold.
    """
    path = os.environ.get(FILE)
    if path:
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"kind": kind, **fields}) + "\n")


def read(path: Path) -> list[dict[str, Any]]:
    """All records, without a last line that was not finished."""
    if not path.exists():
        return []
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return found
