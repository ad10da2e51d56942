"""The cost of moving bytes on a machine: the file of `kvpool doctor --bandwidth`, for programs that read it.

It is one JSON object: `"kvpool_bandwidths"`, the version of the format, and `"lines"`, a list of objects with
the attributes of `Bandwidth`.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from kvpool.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

VERSION = 1
_MARK = "kvpool_bandwidths"


@dataclass(frozen=True)
class Bandwidth:
    """The measurement of one way that bytes take.

    Attributes:
        name: Name of the way, such as "host.copy".
        text: A description of it.
        bytes_per_s: Median over the repetitions; None if it could not be measured.
        size_bytes: Bytes of one repetition.
        repetitions: The number of repetitions.
        problem: The reason why it could not be measured; empty if it was.
    """

    name: str
    text: str
    bytes_per_s: float | None = None
    size_bytes: int = 0
    repetitions: int = 0
    problem: str = ""


def as_json(lines: Iterable[Bandwidth]) -> dict[str, Any]:
    """Return the content of a file with these lines."""
    return {_MARK: VERSION, "lines": [asdict(line) for line in lines]}


def read_bandwidths(path: Path) -> list[Bandwidth]:
    """Read a file of `kvpool doctor --bandwidth --json`.

    Raises:
        ConfigError: If the file is not the output of that command.
        OSError: If the file cannot be read.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not a JSON file: {error}") from None
    version = found.get(_MARK) if isinstance(found, dict) else None
    if version is None:
        raise ConfigError(f"{path} was not written by kvpool doctor --bandwidth --json")
    if version != VERSION or isinstance(version, bool):
        raise ConfigError(f"{path} has version {version!r} of its format; this is for version {VERSION}")
    lines = found.get("lines")
    if not isinstance(lines, list):
        raise ConfigError(f"{path} has no list of lines")
    return [_line(path, number, line) for number, line in enumerate(lines, 1)]


def _line(path: Path, number: int, line: object) -> Bandwidth:
    names = {field.name for field in fields(Bandwidth)}
    if not isinstance(line, dict) or line.keys() != names:
        raise ConfigError(f"{path}: line {number} has to be an object with {', '.join(sorted(names))}")
    checks = {
        "name": _is_text(line["name"]),
        "text": _is_text(line["text"]),
        "problem": _is_text(line["problem"]),
        "bytes_per_s": line["bytes_per_s"] is None or _is_number(line["bytes_per_s"]),
        "size_bytes": _is_count(line["size_bytes"]),
        "repetitions": _is_count(line["repetitions"]),
    }
    wrong = next((name for name, is_right in checks.items() if not is_right), None)
    if wrong is not None:
        raise ConfigError(f"{path}: line {number} has {wrong} {line[wrong]!r:.60}")
    return Bandwidth(**line)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value.isprintable()


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
