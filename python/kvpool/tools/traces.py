"""Request traces: readers for two published formats, and a seeded generator.

A trace has the arrival time, the prompt length and the output length of each request, and which prompts begin
alike. Formats: the Mooncake release (JSON lines, https://github.com/kvcache-ai/Mooncake) and the Azure LLM
inference traces (CSV, https://github.com/Azure/AzurePublicDataset). The first line of a file determines its
format.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
MOONCAKE_KEYS = ("timestamp", "input_length", "output_length")
BLOCK_SIZE = 512
"""Tokens of a block in the Mooncake traces."""

_AZURE_TIME = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d+))?(Z|[+-]\d\d:\d\d)?")
# In units of 100 ns it fits an int64.
_MOST_MS = 9e14
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)

# Close to the Azure conversation trace: mean context 1,155, mean output 211, 5.5 requests/s.
_REQUESTS_PER_S = 5.5
_INPUT_MEDIAN, _INPUT_SIGMA, _INPUT_MAX = 700.0, 1.0, 16_384
_OUTPUT_MEDIAN, _OUTPUT_SIGMA, _OUTPUT_MAX = 150.0, 0.8, 2_048
# Half of the requests begin like one of the last 64, so that their blocks are small.
_SHARING, _SHARED_BEFORE, _SYNTHETIC_BLOCK_SIZE = 0.5, 64, 64


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
        blocks: For each request the numbers of its prompt's blocks, int64 `[ceil(input_len / block_size)]`,
            or none for a prompt that is like no other. A number names a block with everything before it.
            Empty if the trace does not say which prompts begin alike.
        block_size: Tokens of a block. The last block of a prompt may have fewer.
    """

    name: str
    arrival_s: NDArray[np.float64]
    input_lens: NDArray[np.int64]
    output_lens: NDArray[np.int64]
    blocks: tuple[NDArray[np.int64], ...] = ()
    block_size: int = BLOCK_SIZE

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def total_lens(self) -> NDArray[np.int64]:
        """int64 `[n]`: tokens of each request when it ends."""
        return self.input_lens + self.output_lens

    def take(self, kept: NDArray[np.intp]) -> Trace:
        """Return the requests with these indices, ascending; their arrivals stay what they are."""
        return replace(
            self,
            arrival_s=self.arrival_s[kept],
            input_lens=self.input_lens[kept],
            output_lens=self.output_lens[kept],
            blocks=tuple(self.blocks[at] for at in kept) if self.blocks else (),
        )

    def head(self, requests: int | None) -> Trace:
        """Return the first `requests` requests; all of them for None, or if there are fewer."""
        return self.take(np.arange(len(self))[:requests])

    def all_blocks(self) -> list[NDArray[np.int64]]:
        """Return `blocks`, in which prompts without block numbers get numbers that no other prompt has."""
        counts = (-(-self.input_lens // self.block_size)).tolist()
        free = 1 + max((int(blocks.max()) for blocks in self.blocks if blocks.size), default=-1)
        result = []
        for count, blocks in zip(counts, self.blocks or [np.empty(0, np.int64)] * len(self), strict=True):
            if blocks.size:
                result.append(blocks)
            else:
                result.append(np.arange(free, free + count))
                free += count
        return result


def read_trace(path: Path) -> Trace:
    """Read a Mooncake JSONL or Azure CSV trace; requests are sorted by arrival, ties in file order.

    The block size of `hash_ids` follows from their number and the length of the prompts: `BLOCK_SIZE` if it
    fits. A prompt without them is like no other.

    Args:
        path: The file. Its name without the ending becomes the trace's name.

    Raises:
        TraceError: If the file holds no requests, is in neither format, or has a malformed line.
        OSError: If the file cannot be opened.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            lines = [(number, line) for number, line in enumerate(file, 1) if line.strip()]
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}: is not a text file ({error.reason} at byte {error.start})") from None
    if not lines:
        raise TraceError(f"{path}: holds no requests")
    first = lines[0][1].strip()
    block_size = _BlockSize()
    if first.startswith("{"):
        rows = list(_mooncake_rows(path, lines, block_size))
    elif set(AZURE_COLUMNS) <= {name.strip() for name in first.split(",")}:
        rows = list(_azure_rows(path, lines))
    else:
        raise TraceError(
            f"{path}:{lines[0][0]}: neither a Mooncake line (a JSON object) nor an Azure header "
            f"({','.join(AZURE_COLUMNS)}): {first[:60]!r}"
        )
    if not rows:
        raise TraceError(f"{path}: holds no requests")
    return _from_rows(path.stem, rows, block_size.size())


def synthetic_trace(requests: int, seed: int) -> Trace:
    """Generate a trace that resembles the Azure conversation trace.

    Arrivals are a Poisson process of 5.5 requests/s; input and output lengths are log-normal with means near
    1,150 and 205 tokens. Half of the prompts begin like one of the last 64. The same arguments give the same
    trace.

    Args:
        requests: Number of requests, at least 1.
        seed: Any non-negative integer.

    Raises:
        TraceError: If `requests` is not positive or `seed` is negative.
    """
    if requests < 1 or seed < 0:
        raise TraceError(f"a synthetic trace needs requests >= 1 and seed >= 0, not {requests} and {seed}")
    generator = np.random.default_rng(seed)
    arrival_s = np.cumsum(generator.exponential(1.0 / _REQUESTS_PER_S, requests))
    raw_lens = generator.lognormal(np.log(_INPUT_MEDIAN), _INPUT_SIGMA, requests)
    input_lens = np.clip(raw_lens, 1, _INPUT_MAX).astype(np.int64)
    output_lens = generator.lognormal(np.log(_OUTPUT_MEDIAN), _OUTPUT_SIGMA, requests)
    return Trace(
        f"synthetic (seed {seed})",
        arrival_s - arrival_s[0],
        input_lens,
        np.clip(output_lens, 1, _OUTPUT_MAX).astype(np.int64),
        _synthetic_blocks(input_lens, generator),
        _SYNTHETIC_BLOCK_SIZE,
    )


def _synthetic_blocks(
    input_lens: NDArray[np.int64], generator: np.random.Generator
) -> tuple[NDArray[np.int64], ...]:
    """Return blocks of prompts, half of which share whole blocks with one of the last prompts."""
    shares = generator.random(len(input_lens)) < _SHARING
    back = generator.integers(1, _SHARED_BEFORE, len(input_lens), endpoint=True)
    blocks: list[NDArray[np.int64]] = []
    free = 0
    for at, length in enumerate(input_lens.tolist()):
        shared = np.empty(0, np.int64)
        if at and shares[at]:
            like = max(0, at - int(back[at]))
            shared = blocks[like][: min(length, int(input_lens[like])) // _SYNTHETIC_BLOCK_SIZE]
        own = -(-length // _SYNTHETIC_BLOCK_SIZE) - len(shared)
        blocks.append(np.concatenate((shared, np.arange(free, free + own))))
        free += own
    return tuple(blocks)


class _Row(NamedTuple):
    """A request of a file, with its time in units of 100 ns."""

    time: int
    input_len: int
    output_len: int
    hash_ids: Sequence[int] = ()


def _from_rows(name: str, rows: list[_Row], block_size: int = BLOCK_SIZE) -> Trace:
    rows.sort(key=lambda row: row.time)
    table = np.array([row[:3] for row in rows], dtype=np.int64)
    shares = any(row.hash_ids for row in rows)
    return Trace(
        name,
        (table[:, 0] - table[0, 0]) * 1e-7,
        np.ascontiguousarray(table[:, 1]),
        np.ascontiguousarray(table[:, 2]),
        _number_blocks([row.hash_ids for row in rows]) if shares else (),
        block_size,
    )


def _number_blocks(hash_ids: Iterable[Sequence[int]]) -> tuple[NDArray[np.int64], ...]:
    """Return numbers for blocks: equal ones exactly if they and everything before them are equal."""
    numbers: dict[tuple[int, int], int] = {}

    def chain(ids: Sequence[int]) -> Iterator[int]:
        before = -1
        for each in ids:
            before = numbers.setdefault((before, each), len(numbers))
            yield before

    return tuple(np.fromiter(chain(ids), np.int64, len(ids)) for ids in hash_ids)


class _BlockSize:
    """The block size of a file, from its prompts: `ceil(input_len / size)` is the number of their blocks."""

    def __init__(self) -> None:
        self._least, self._most = 1, 2**31

    def fits(self, input_len: int, blocks: int) -> bool:
        """Add a prompt, and return whether there is a size for all prompts so far."""
        self._least = max(self._least, -(-input_len // blocks))
        if blocks > 1:
            self._most = min(self._most, (input_len - 1) // (blocks - 1))
        return self._least <= self._most

    def size(self) -> int:
        """Return the usual size if it fits, or the least power of two, or the least size."""
        power = 1 << (self._least - 1).bit_length()
        usual = (size for size in (BLOCK_SIZE, power) if self._least <= size <= self._most)
        return next(usual, self._least)


def _mooncake_rows(path: Path, lines: list[tuple[int, str]], block_size: _BlockSize) -> Iterator[_Row]:
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
        input_len = _length(path, number, "input_length", record["input_length"], 1)
        hash_ids = record.get("hash_ids") or []
        if not isinstance(hash_ids, list) or not all(type(each) is int for each in hash_ids):
            raise TraceError(f"{path}:{number}: hash_ids are not a list of ints")
        if hash_ids and not block_size.fits(input_len, len(hash_ids)):
            raise TraceError(
                f"{path}:{number}: {len(hash_ids)} hash_ids for {input_len} tokens: no block size fits these "
                "and the lines before"
            )
        yield _Row(
            round(time_ms * 10_000),
            input_len,
            _length(path, number, "output_length", record["output_length"], 0),
            hash_ids,
        )


def _azure_rows(path: Path, lines: list[tuple[int, str]]) -> Iterator[_Row]:
    header = [name.strip() for name in lines[0][1].split(",")]
    time_at, input_at, output_at = (header.index(name) for name in AZURE_COLUMNS)
    for number, line in lines[1:]:
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != len(header):
            raise TraceError(f"{path}:{number}: has {len(fields)} columns, the header has {len(header)}")
        yield _Row(
            _azure_ticks(path, number, fields[time_at]),
            _length(path, number, "ContextTokens", fields[input_at], 1),
            _length(path, number, "GeneratedTokens", fields[output_at], 0),
        )


def _azure_ticks(path: Path, number: int, text: str) -> int:
    """Return a time stamp in units of 100 ns since 1970, the resolution the files have (7 digits)."""
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
    """Return a token count of at least `least`, from an int or its decimal text."""
    if isinstance(value, str) and re.fullmatch("[0-9]{1,10}", value):
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**31:
        raise TraceError(f"{path}:{number}: {name} is not a token count of at least {least}: {value!r}")
    return value
