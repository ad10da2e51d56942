"""Readers of request traces in the formats in which they are published."""

from __future__ import annotations

import gzip
import zlib
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvpool.tools.traces.fields import TICKS_PER_S, json_object, number_ticks, text_ticks, token_count
from kvpool.tools.traces.trace import BLOCK_SIZE, Trace, TraceError
from kvpool.tools.traces.tracelab import TRACELAB_KEYS, tracelab_trace

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
MOONCAKE_KEYS = ("timestamp", "input_length", "output_length")
BAILIAN_KEYS = ("chat_id", "parent_chat_id", *MOONCAKE_KEYS)
BAILIAN_BLOCK_SIZE = 16
"""Tokens of a block in the Bailian traces."""


def read_trace(path: Path) -> Trace:
    """Read a trace file; requests are sorted by arrival, ties in file order.

    - **Mooncake** (JSON lines): the block size of `hash_ids` follows from their number and the length of the
      prompts: `BLOCK_SIZE` if it fits. A prompt without them is like no other.
    - **Bailian** (JSON lines with `chat_id` and `parent_chat_id`): likewise, with `BAILIAN_BLOCK_SIZE`. A
      session is a request with all that follow from it.
    - **TraceLab** (JSON lines, one for each call of a model): the release has lengths but no contents, so
      that which prompts begin alike is inferred; see `tracelab_trace`.
    - **Azure** (CSV): no prompt is like another.

    Args:
        path: The file, compressed if its name ends in `.gz`. Its name without the endings becomes the trace's
            name.

    Raises:
        TraceError: If the file holds no requests, is in none of the formats, or has a malformed line.
        OSError: If the file cannot be opened.
    """
    lines = _lines(path)
    if not lines:
        raise TraceError(f"{path}: holds no requests")
    name = path.name.removesuffix(".gz").rpartition(".")[0] or path.stem
    first = lines[0][1].strip()
    if first.startswith("{"):
        keys = json_object(path, *lines[0]).keys()
        if keys >= {*TRACELAB_KEYS}:
            return tracelab_trace(name, path, lines)
        is_bailian = keys >= {*BAILIAN_KEYS}
        block_size = _BlockSize(BAILIAN_BLOCK_SIZE if is_bailian else BLOCK_SIZE)
        read = _bailian_rows if is_bailian else _mooncake_rows
        return _from_rows(name, list(read(path, lines, block_size)), block_size.size())
    if set(AZURE_COLUMNS) <= {column.strip() for column in first.split(",")}:
        rows = list(_azure_rows(path, lines))
        if not rows:
            raise TraceError(f"{path}: holds no requests")
        return _from_rows(name, rows)
    raise TraceError(
        f"{path}:{lines[0][0]}: neither a line of Mooncake, Bailian or TraceLab (a JSON object) nor an Azure "
        f"header ({','.join(AZURE_COLUMNS)}): {first[:60]!r}"
    )


def _lines(path: Path) -> list[tuple[int, str]]:
    """Return the lines that are not blank, with their numbers."""
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8-sig", newline="") as file:
            return [(number, line) for number, line in enumerate(file, 1) if line.strip()]
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}: is not a text file ({error.reason} at byte {error.start})") from None
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise TraceError(f"{path}: is not a whole gzip file ({error})") from None


class _Row(NamedTuple):
    """A request of a file, with its time in units of 100 ns."""

    time: int
    input_len: int
    output_len: int
    hash_ids: Sequence[int] = ()
    session: int = -1


def _from_rows(name: str, rows: list[_Row], block_size: int = BLOCK_SIZE) -> Trace:
    rows.sort(key=lambda row: row.time)
    table = np.array([row[:3] for row in rows], dtype=np.int64)
    shares, has_sessions = any(row.hash_ids for row in rows), any(row.session >= 0 for row in rows)
    sessions: dict[int, int] = {}
    return Trace(
        name,
        (table[:, 0] - table[0, 0]) / TICKS_PER_S,
        np.ascontiguousarray(table[:, 1]),
        np.ascontiguousarray(table[:, 2]),
        _number_blocks([row.hash_ids for row in rows]) if shares else (),
        block_size,
        np.array([sessions.setdefault(row.session, len(sessions)) for row in rows]) if has_sessions else None,
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

    def __init__(self, usual: int = BLOCK_SIZE) -> None:
        self._usual, self._least, self._most = usual, 1, 2**31

    def fits(self, input_len: int, blocks: int) -> bool:
        """Add a prompt, and return whether there is a size for all prompts so far."""
        self._least = max(self._least, -(-input_len // blocks))
        if blocks > 1:
            self._most = min(self._most, (input_len - 1) // (blocks - 1))
        return self._least <= self._most

    def size(self) -> int:
        """Return the usual size if it fits, or the least power of two, or the least size."""
        power = 1 << (self._least - 1).bit_length()
        usual = (size for size in (self._usual, power) if self._least <= size <= self._most)
        return next(usual, self._least)


def _mooncake_rows(path: Path, lines: list[tuple[int, str]], block_size: _BlockSize) -> Iterator[_Row]:
    for number, line in lines:
        record = _record(path, number, line, MOONCAKE_KEYS)
        time = number_ticks(path, number, record["timestamp"], "milliseconds", 1_000)
        yield _row_of(path, number, record, time, block_size)


def _bailian_rows(path: Path, lines: list[tuple[int, str]], block_size: _BlockSize) -> Iterator[_Row]:
    sessions: dict[int, int] = {}
    for number, line in lines:
        record = _record(path, number, line, BAILIAN_KEYS)
        chat, parent = record["chat_id"], record["parent_chat_id"]
        if type(chat) is not int or type(parent) is not int:
            raise TraceError(
                f"{path}:{number}: chat_id and parent_chat_id are not ints: {chat!r}, {parent!r}"
            )
        # The parent of a request is in a line before it, or before the file.
        root = chat if parent < 0 else sessions.get(parent, parent)
        sessions[chat] = root
        time = number_ticks(path, number, record["timestamp"], "seconds", 1)
        yield _row_of(path, number, record, time, block_size)._replace(session=root)


def _record(path: Path, number: int, line: str, keys: tuple[str, ...]) -> dict[str, Any]:
    record = json_object(path, number, line)
    if not record.keys() >= {*keys}:
        raise TraceError(f"{path}:{number}: needs an object with {', '.join(keys)}")
    return record


def _row_of(path: Path, number: int, record: dict[str, Any], time: int, block_size: _BlockSize) -> _Row:
    input_len = token_count(path, number, "input_length", record["input_length"], 1)
    hash_ids = record.get("hash_ids") or []
    if not isinstance(hash_ids, list) or not all(type(each) is int for each in hash_ids):
        raise TraceError(f"{path}:{number}: hash_ids are not a list of ints")
    if hash_ids and not block_size.fits(input_len, len(hash_ids)):
        raise TraceError(
            f"{path}:{number}: {len(hash_ids)} hash_ids for {input_len} tokens: no block size fits these "
            "and the lines before"
        )
    output_len = token_count(path, number, "output_length", record["output_length"], 0)
    return _Row(time, input_len, output_len, hash_ids)


def _azure_rows(path: Path, lines: list[tuple[int, str]]) -> Iterator[_Row]:
    header = [name.strip() for name in lines[0][1].split(",")]
    time_at, input_at, output_at = (header.index(name) for name in AZURE_COLUMNS)
    for number, line in lines[1:]:
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != len(header):
            raise TraceError(f"{path}:{number}: has {len(fields)} columns, the header has {len(header)}")
        yield _Row(
            text_ticks(path, number, "TIMESTAMP", fields[time_at]),
            token_count(path, number, "ContextTokens", fields[input_at], 1),
            token_count(path, number, "GeneratedTokens", fields[output_at], 0),
        )
