"""Request traces: readers for two published formats, and a seeded generator.

A trace has the arrival time, the prompt length and the output length of each request. Formats: the Mooncake
release (JSON lines, https://github.com/kvcache-ai/Mooncake) and the Azure LLM inference traces
(CSV, https://github.com/Azure/AzurePublicDataset). The first line of a file determines its format.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
MOONCAKE_KEYS = ("timestamp", "input_length", "output_length")

_AZURE_TIME = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d+))?(Z|[+-]\d\d:\d\d)?")
# In units of 100 ns it fits an int64.
_MOST_MS = 9e14
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)

# Close to the Azure conversation trace: mean context 1,155, mean output 211, 5.5 requests/s.
_REQUESTS_PER_S = 5.5
_INPUT_MEDIAN, _INPUT_SIGMA, _INPUT_MAX = 700.0, 1.0, 16_384
_OUTPUT_MEDIAN, _OUTPUT_SIGMA, _OUTPUT_MAX = 150.0, 0.8, 2_048


class TraceError(ValueError):
    """A trace file cannot be read; the message names the file and the line."""


@dataclass(frozen=True)
class Trace:
    """Requests in order of arrival.

    Attributes:
        name: Name of the trace in reports.
        arrival_s: float64 `[n]`, seconds since the first request, ascending.
        input_lens: int64 `[n]`, prompt tokens, at least 1.
        output_lens: int64 `[n]`, generated tokens, at least 0.
    """

    name: str
    arrival_s: NDArray[np.float64]
    input_lens: NDArray[np.int64]
    output_lens: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def total_lens(self) -> NDArray[np.int64]:
        """int64 `[n]`: tokens of each request when it ends."""
        return self.input_lens + self.output_lens

    def head(self, requests: int | None) -> Trace:
        """The first `requests` requests; all of them for None, or if there are fewer."""
        cut = slice(requests)
        return Trace(self.name, self.arrival_s[cut], self.input_lens[cut], self.output_lens[cut])


def read_trace(path: Path) -> Trace:
    """Reads a Mooncake JSONL or Azure CSV trace; requests are sorted by arrival, ties in file order.

    Args:
        path: The file. Its name without the ending becomes the trace's name.

    Raises:
        TraceError: The file holds no requests, is in neither format, or has a malformed line.
        OSError: The file cannot be opened.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            lines = [(number, line) for number, line in enumerate(file, 1) if line.strip()]
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}: is not a text file ({error.reason} at byte {error.start})") from None
    if not lines:
        raise TraceError(f"{path}: holds no requests")
    first = lines[0][1].strip()
    if first.startswith("{"):
        rows = list(_mooncake_rows(path, lines))
    elif set(AZURE_COLUMNS) <= {name.strip() for name in first.split(",")}:
        rows = list(_azure_rows(path, lines))
    else:
        raise TraceError(
            f"{path}:{lines[0][0]}: neither a Mooncake line (a JSON object) nor an Azure header "
            f"({','.join(AZURE_COLUMNS)}): {first[:60]!r}"
        )
    if not rows:
        raise TraceError(f"{path}: holds no requests")
    return _from_rows(path.stem, rows)


def synthetic_trace(requests: int, seed: int) -> Trace:
    """Generate a trace that resembles the Azure conversation trace.

    Arrivals are a Poisson process of 5.5 requests/s; input and output lengths are log-normal with means near
    1,150 and 205 tokens. The same arguments give the same trace.

    Args:
        requests: Number of requests, at least 1.
        seed: Any non-negative integer.

    Raises:
        TraceError: `requests` is not positive or `seed` is negative.
    """
    if requests < 1 or seed < 0:
        raise TraceError(f"a synthetic trace needs requests >= 1 and seed >= 0, not {requests} and {seed}")
    generator = np.random.default_rng(seed)
    arrival_s = np.cumsum(generator.exponential(1.0 / _REQUESTS_PER_S, requests))
    input_lens = generator.lognormal(np.log(_INPUT_MEDIAN), _INPUT_SIGMA, requests)
    output_lens = generator.lognormal(np.log(_OUTPUT_MEDIAN), _OUTPUT_SIGMA, requests)
    return Trace(
        f"synthetic (seed {seed})",
        arrival_s - arrival_s[0],
        np.clip(input_lens, 1, _INPUT_MAX).astype(np.int64),
        np.clip(output_lens, 1, _OUTPUT_MAX).astype(np.int64),
    )


def _from_rows(name: str, rows: list[tuple[int, int, int]]) -> Trace:
    """Builds a trace from (time in units of 100 ns, input length, output length)."""
    table = np.array(rows, dtype=np.int64)
    table = table[np.argsort(table[:, 0], kind="stable")]
    return Trace(
        name,
        (table[:, 0] - table[0, 0]) * 1e-7,
        np.ascontiguousarray(table[:, 1]),
        np.ascontiguousarray(table[:, 2]),
    )


def _mooncake_rows(path: Path, lines: list[tuple[int, str]]) -> Iterator[tuple[int, int, int]]:
    for number, line in lines:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise TraceError(f"{path}:{number}: not a JSON object: {error}") from None
        if not isinstance(record, dict) or not set(MOONCAKE_KEYS) <= record.keys():
            raise TraceError(f"{path}:{number}: needs an object with {', '.join(MOONCAKE_KEYS)}")
        time_ms = record["timestamp"]
        if not isinstance(time_ms, (int, float)) or isinstance(time_ms, bool) or not 0 <= time_ms <= _MOST_MS:
            raise TraceError(f"{path}:{number}: timestamp is not a number of milliseconds: {time_ms!r}")
        yield (
            round(time_ms * 10_000),
            _length(path, number, "input_length", record["input_length"], 1),
            _length(path, number, "output_length", record["output_length"], 0),
        )


def _azure_rows(path: Path, lines: list[tuple[int, str]]) -> Iterator[tuple[int, int, int]]:
    header = [name.strip() for name in lines[0][1].split(",")]
    time_at, input_at, output_at = (header.index(name) for name in AZURE_COLUMNS)
    for number, line in lines[1:]:
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != len(header):
            raise TraceError(f"{path}:{number}: has {len(fields)} columns, the header has {len(header)}")
        yield (
            _azure_ticks(path, number, fields[time_at]),
            _length(path, number, "ContextTokens", fields[input_at], 1),
            _length(path, number, "GeneratedTokens", fields[output_at], 0),
        )


def _azure_ticks(path: Path, number: int, text: str) -> int:
    """A time stamp in units of 100 ns since 1970, the resolution the files have (7 digits)."""
    match = _AZURE_TIME.fullmatch(text)
    zone = match[3] if match and match[3] not in {None, "Z"} else "+00:00"
    whole = f"{match[1]}{zone}" if match else text
    try:
        since = datetime.fromisoformat(whole) - _EPOCH
    except (ValueError, TypeError):
        raise TraceError(f"{path}:{number}: TIMESTAMP is not a date and time: {text!r}") from None
    fraction = int((match[2] or "")[:7].ljust(7, "0")) if match else 0
    return (since.days * 86_400 + since.seconds) * 10_000_000 + fraction


def _length(path: Path, number: int, name: str, value: object, least: int) -> int:
    """A token count of at least `least`, from an int or its decimal text."""
    if isinstance(value, str) and re.fullmatch("[0-9]{1,10}", value):
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**31:
        raise TraceError(f"{path}:{number}: {name} is not a token count of at least {least}: {value!r}")
    return value
