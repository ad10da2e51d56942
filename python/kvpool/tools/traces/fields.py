"""Fields of trace files: checked values, or an error that names the file and the line."""

from __future__ import annotations

import json
import re
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from kvpool.tools.traces.trace import TraceError

if TYPE_CHECKING:
    from pathlib import Path

TICKS_PER_S = 10_000_000
"""Times are whole numbers of 100 ns, the resolution of the Azure traces."""

# As a number of ticks it fits an int64.
_MOST_S = 9e11
_TIME = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d+))?(Z|[+-]\d\d:\d\d)?")
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


def json_object(path: Path, number: int, line: str) -> dict[str, Any]:
    """Return the object of a line.

    Raises:
        TraceError: If the line is not a JSON object.
    """
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{path}:{number}: not a JSON object: {error}") from None
    if not isinstance(record, dict):
        raise TraceError(f"{path}:{number}: not a JSON object, but {type(record).__name__}")
    return record


def number_ticks(path: Path, number: int, value: object, unit: str, per_s: int) -> int:
    """Return a `timestamp` in ticks, from a number of `unit`, of which a second has `per_s`.

    Raises:
        TraceError: If the value is not a number that is not negative.
    """
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value <= _MOST_S * per_s:
        raise TraceError(f"{path}:{number}: timestamp is not a number of {unit}: {value!r}")
    return round(value * (TICKS_PER_S // per_s))


def text_ticks(path: Path, number: int, name: str, text: object) -> int:
    """Return a date and time in ticks since 1970.

    Raises:
        TraceError: If the text is not a date and time.
    """
    match = _TIME.fullmatch(text) if isinstance(text, str) else None
    zone = match[3] if match and match[3] not in {None, "Z"} else "+00:00"
    try:
        since = datetime.fromisoformat(f"{match[1]}{zone}" if match else text) - _EPOCH  # type: ignore[arg-type]
    except (ValueError, TypeError):
        raise TraceError(f"{path}:{number}: {name} is not a date and time: {text!r}") from None
    fraction = int((match[2] or "")[:7].ljust(7, "0")) if match else 0
    return (since.days * 86_400 + since.seconds) * TICKS_PER_S + fraction


def token_count(path: Path, number: int, name: str, value: object, least: int) -> int:
    """Return a token count of at least `least`, from an int or its decimal text.

    Raises:
        TraceError: If the value is not such a count.
    """
    if isinstance(value, str) and re.fullmatch("[0-9]{1,10}", value):
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**31:
        raise TraceError(f"{path}:{number}: {name} is not a token count of at least {least}: {value!r}")
    return value
