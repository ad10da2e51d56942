"""The messages of endpoints. Each message of a peer is checked before it is used."""

from __future__ import annotations

import json
import struct
import time
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import numpy as np

from kvpool._kvpool import TokenToKVPoolAllocator
from kvpool._limits import MAX_S
from kvpool.errors import ArgumentError, ConfigError
from kvpool.remote.agent import Blocks, Memory

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

VERSION = 1
"""The version of all messages. Endpoints of different versions refuse each other."""

MAX_ROWS = 1 << 20
"""The most rows of one lease."""

MAX_SECONDS = MAX_S
"""The longest time of a lease: a day."""

MAX_NAME = 200
"""The most characters in the name of an endpoint."""

MAX_NOTIFY_BYTES = 1 << 16
"""The most bytes that a writer sends to the peer."""

MAX_MESSAGE_BYTES = 8 * MAX_ROWS + (1 << 20)

POOLS = ("kv", "states")
"""The pools of an endpoint, in the order of their rows."""

WORD_BYTES = 8
"""Bytes of the word that shows whether a lease lasts."""

_MAX_TEXT = 256
_MAX_HEADER_BYTES = 1 << 22
_MAX_BUFFERS = 1 << 14
_END = 1 << 63

_INTRODUCTION = struct.Struct("<8sHI")
_INTRODUCTION_MAGIC = b"kvpeer\r\n"
_TICKET = struct.Struct("<4sHHIQdII")
_TICKET_MAGIC = b"kvt\n"
_NOTE = struct.Struct("<4sHHIQI")
_NOTE_MAGIC = b"kvn\n"
_WRITABLE = 1
_RETURNED, _OFFERED, _RENEWED = 1, 2, 3


class Introduction(NamedTuple):
    """The properties of an endpoint that its peers need.

    Attributes:
        name: The name of the endpoint.
        agent: The name of its agent in the network, which no other process has.
        shapes: For each pool, "kv" and "states", the properties that must be equal on both sides; `None` for
            an endpoint without this pool.
        buffers: The address and the bytes of a row of each buffer, by pool.
        rows: The rows of every buffer, by pool.
        device: The index of the GPU that has the pools; `None` for host memory.
        words: The address and the number of the words that show which leases last.
        metadata: The bytes that the agent needs to connect.
    """

    name: str
    agent: str
    shapes: dict[str, dict[str, int | str] | None]
    buffers: dict[str, list[tuple[int, int]]]
    rows: dict[str, int]
    device: int | None
    words: tuple[int, int]
    metadata: bytes


class RemoteSlots(NamedTuple):
    """Slots of a peer that were leased to this endpoint, made by `Peer.slots` from a ticket.

    Attributes:
        slots: Slots of its `KVPool`, int32 `[n]`.
        states: Slots of its `GDNPool`, int32 `[m]`.
        is_writable: Whether `Peer.write` may fill the slots; otherwise `Peer.read` may read them.
        word: The index of the word, in the memory of the peer, that shows whether the lease lasts.
        nonce: The value of this word as long as the lease lasts.
        deadline: The time at which the lease is over, in seconds of `time.monotonic`.
    """

    slots: npt.NDArray[np.int32]
    states: npt.NDArray[np.int32]
    is_writable: bool
    word: int
    nonce: int
    deadline: float

    def since(self, start: int) -> RemoteSlots:
        """Return the remote slots without the first `start` ones. The lease is the same."""
        return self._replace(slots=self.slots[start:])

    def of(self, peer: Introduction) -> RemoteSlots:
        """Return the remote slots after a check that the peer has them.

        Raises:
            IndexError: If the peer does not have them.
        """
        if self.word >= peer.words[1]:
            raise IndexError(f"word {self.word} is outside [0, {peer.words[1]}) of {peer.name}")
        for pool, rows in zip(POOLS, (self.slots, self.states), strict=True):
            if len(rows) and rows.max() >= peer.rows[pool]:
                raise IndexError(
                    f"slot {rows.max()} is outside [1, {peer.rows[pool]}) of {pool} of {peer.name}"
                )
        return self


class Returned(NamedTuple):
    """A note that a lease is not needed any more."""

    word: int
    nonce: int


class Renewed(NamedTuple):
    """A note that a lease is needed longer: its time begins again."""

    word: int
    nonce: int


class Offered(NamedTuple):
    """A note that asks the owner of a lease to fetch the slots of a ticket into its own.

    The owner then gets `notify`.
    """

    word: int
    nonce: int
    notify: bytes
    ticket: bytes


def _refuse(what: str) -> NoReturn:
    raise ArgumentError(f"a peer's message cannot be used: {what}")


def _whole(value: object, what: str, low: int, end: int) -> int:
    if type(value) is not int or not low <= value < end:
        _refuse(f"{what} is {value!r:.40}, not an int in [{low}, {end})")
    return value


def _text(value: object, what: str) -> str:
    if type(value) is not str or not 0 < len(value) <= _MAX_TEXT:
        _refuse(f"{what} is {value!r:.40}, not a str of 1 to {_MAX_TEXT} characters")
    return value


def _listed(value: object, what: str, most: int) -> list[object]:
    if type(value) is not list or len(value) > most:
        _refuse(f"{what} is not a list of at most {most}")
    return value


def _fields(value: object, what: str) -> Mapping[str, object]:
    if type(value) is not dict:
        _refuse(f"{what} is not an object")
    return value


def encode_introduction(introduction: Introduction) -> bytes:
    """Return an introduction as bytes.

    Raises:
        ConfigError: If the rows of all buffers are more than int32 can number.
    """
    too_many = _too_many_rows(introduction)
    if too_many:
        raise ConfigError(too_many)
    header = {
        "name": introduction.name,
        "agent": introduction.agent,
        "shapes": introduction.shapes,
        "buffers": introduction.buffers,
        "rows": introduction.rows,
        "device": introduction.device,
        "words": introduction.words,
    }
    text = json.dumps(header).encode()
    return _INTRODUCTION.pack(_INTRODUCTION_MAGIC, VERSION, len(text)) + text + introduction.metadata


def decode_introduction(message: bytes) -> Introduction:
    """Return the introduction in `message`.

    Raises:
        ArgumentError: If the message is not a valid introduction, or has another version.
    """
    if not _INTRODUCTION.size <= len(message) <= MAX_MESSAGE_BYTES:
        _refuse(f"it has {len(message)} bytes")
    magic, version, length = _INTRODUCTION.unpack_from(message)
    _check_version(magic == _INTRODUCTION_MAGIC, version)
    if length > _MAX_HEADER_BYTES:
        _refuse(f"its header has {length} bytes")
    text, metadata = message[_INTRODUCTION.size :][:length], message[_INTRODUCTION.size + length :]
    try:
        header = _fields(json.loads(text), "its header")
    except (ValueError, RecursionError) as error:
        raise ArgumentError("a peer's message cannot be used: its header is not JSON") from error
    shapes: dict[str, dict[str, int | str] | None] = {}
    buffers: dict[str, list[tuple[int, int]]] = {}
    rows: dict[str, int] = {}
    for pool in POOLS:
        shape = _fields(header.get("shapes"), "shapes").get(pool)
        shapes[pool] = None if shape is None else _shape(shape, pool)
        listed = _listed(
            _fields(header.get("buffers"), "buffers").get(pool), f"buffers of {pool}", _MAX_BUFFERS
        )
        buffers[pool] = [_buffer(buffer, pool) for buffer in listed]
        rows[pool] = _whole(_fields(header.get("rows"), "rows").get(pool), f"rows of {pool}", 0, 1 << 31)
    device = header.get("device")
    words = _listed(header.get("words"), "words", 2)
    if len(words) != 2:  # noqa: PLR2004 - address and number
        _refuse("words are not an address and a number")
    introduction = Introduction(
        _text(header.get("name"), "name"),
        _text(header.get("agent"), "agent"),
        shapes,
        buffers,
        rows,
        None if device is None else _whole(device, "device", 0, 1 << 16),
        (_whole(words[0], "the address of words", 1, _END), _whole(words[1], "words", 1, 1 << 24)),
        metadata,
    )
    too_many = _too_many_rows(introduction)
    if too_many:
        _refuse(too_many)
    return introduction


def _too_many_rows(introduction: Introduction) -> str | None:
    """Return the reason why int32 cannot number the rows of all buffers; `None` if it can."""
    total = sum(introduction.rows[pool] * len(introduction.buffers[pool]) for pool in POOLS)
    return f"{total} rows in all buffers are more than int32 numbers" if total >= 1 << 31 else None


def _check_version(is_ours: bool, version: int) -> None:
    if not is_ours:
        _refuse("it is not kvpool's")
    if version != VERSION:
        _refuse(f"it has version {version}, and this is version {VERSION}")


def _shape(value: object, pool: str) -> dict[str, int | str]:
    fields = _fields(value, f"the shape of {pool}")
    if len(fields) > _MAX_TEXT:
        _refuse(f"the shape of {pool} has {len(fields)} fields")
    return {
        _text(name, f"a field of {pool}"): _text(field, name)
        if type(field) is str
        else _whole(field, name, 0, _END)
        for name, field in fields.items()
    }


def _buffer(value: object, pool: str) -> tuple[int, int]:
    numbers = _listed(value, f"a buffer of {pool}", 2)
    if len(numbers) != 2:  # noqa: PLR2004 - address and bytes
        _refuse(f"a buffer of {pool} is not an address and a size")
    return _whole(numbers[0], "an address", 1, _END), _whole(numbers[1], "the bytes of a row", 1, 1 << 40)


def difference(local: Introduction, remote: Introduction) -> str | None:
    """Return the difference that prevents copies of rows between two endpoints; `None` if there is none."""
    for pool in POOLS:
        local_shape, remote_shape = local.shapes[pool], remote.shapes[pool]
        if local_shape is None or remote_shape is None:
            if local_shape is not remote_shape:
                has, has_not = (local, remote) if remote_shape is None else (remote, local)
                return f"{has.name} has {pool}, and {has_not.name} has none"
            continue
        for name in {**local_shape, **remote_shape}:
            local_value, remote_value = local_shape.get(name), remote_shape.get(name)
            if local_value != remote_value:
                values = f"{remote_value!r} at {remote.name} and {local_value!r} at {local.name}"
                return f"{name} of {pool} is {values}"
        local_sizes, remote_sizes = ([size for _, size in one.buffers[pool]] for one in (local, remote))
        if local_sizes != remote_sizes:
            return (
                f"buffers of {pool} have rows of {remote_sizes} bytes at {remote.name} "
                f"and {local_sizes} at {local.name}"
            )
    return None


def runs(rows: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Return the ascending runs of `rows`, in order: `[k, 2]` of start and length."""
    found: npt.NDArray[np.int32] = TokenToKVPoolAllocator.runs(rows).numpy()
    return found


def pieces(here: npt.NDArray[np.int32], there: npt.NDArray[np.int32]) -> int:
    """Return the number of contiguous pieces in which rows are copied."""
    breaks = (np.diff(here) != 1) | (np.diff(there) != 1)
    return int(breaks.sum()) + 1 if len(here) else 0


def _rows(packed: bytes, what: str) -> npt.NDArray[np.int32]:
    pairs = np.frombuffer(packed, "<i4").reshape(-1, 2).astype(np.int64)
    starts, lengths = pairs[:, 0], pairs[:, 1]
    total = int(lengths.sum()) if len(pairs) else 0
    if len(pairs) and (starts.min() < 1 or lengths.min() < 1 or (starts + lengths).max() > 1 << 31):
        _refuse(f"{what} are not runs of slots")
    if total > MAX_ROWS:
        _refuse(f"{total} {what} are more than {MAX_ROWS}")
    firsts = np.repeat(starts - np.cumsum(lengths) + lengths, lengths)
    return (firsts + np.arange(total)).astype(np.int32)


def encode_ticket(remote: RemoteSlots) -> bytes:
    """Return the ticket with which a peer can use slots of this endpoint."""
    seconds = max(remote.deadline - time.monotonic(), 0.0)
    parts = [runs(remote.slots), runs(remote.states)]
    flags = _WRITABLE if remote.is_writable else 0
    head = _TICKET.pack(
        _TICKET_MAGIC, VERSION, flags, remote.word, remote.nonce, seconds, len(parts[0]), len(parts[1])
    )
    return head + b"".join(part.astype("<i4").tobytes() for part in parts)


def decode_ticket(message: bytes) -> RemoteSlots:
    """Return the slots of a ticket. The time of its lease counts from now.

    Raises:
        ArgumentError: If the message is not a ticket, or has another version.
    """
    if not _TICKET.size <= len(message) <= MAX_MESSAGE_BYTES:
        _refuse(f"it has {len(message)} bytes")
    magic, version, flags, word, nonce, seconds, slots, states = _TICKET.unpack_from(message)
    _check_version(magic == _TICKET_MAGIC, version)
    if len(message) != _TICKET.size + 8 * (slots + states):
        _refuse(f"it has {len(message)} bytes, for {slots} + {states} runs")
    if flags & ~_WRITABLE or not 0 <= seconds <= MAX_SECONDS or not nonce:
        _refuse(f"flags {flags}, seconds {seconds}, nonce {nonce}")
    at = _TICKET.size + 8 * slots
    return RemoteSlots(
        _rows(message[_TICKET.size : at], "slots"),
        _rows(message[at:], "states"),
        bool(flags & _WRITABLE),
        word,
        nonce,
        time.monotonic() + seconds,
    )


def encode_note(note: Returned | Renewed | Offered) -> bytes:
    """Return a note as bytes."""
    if not isinstance(note, Offered):
        kind = _RETURNED if isinstance(note, Returned) else _RENEWED
        return _NOTE.pack(_NOTE_MAGIC, VERSION, kind, note.word, note.nonce, 0)
    head = _NOTE.pack(_NOTE_MAGIC, VERSION, _OFFERED, note.word, note.nonce, len(note.notify))
    return head + note.notify + note.ticket


def decode_note(message: bytes) -> Returned | Renewed | Offered:
    """Return the content of a note.

    Raises:
        ArgumentError: If the message is not a valid note, or has another version.
    """
    if not _NOTE.size <= len(message) <= MAX_MESSAGE_BYTES:
        _refuse(f"it has {len(message)} bytes")
    magic, version, kind, word, nonce, length = _NOTE.unpack_from(message)
    _check_version(magic == _NOTE_MAGIC, version)
    body = message[_NOTE.size :]
    if kind in (_RETURNED, _RENEWED) and not body and not length:
        return Returned(word, nonce) if kind == _RETURNED else Renewed(word, nonce)
    if kind != _OFFERED or not length <= min(MAX_NOTIFY_BYTES, len(body)):
        _refuse(f"kind {kind} with {length} of {len(body)} bytes")
    return Offered(word, nonce, body[:length], body[length:])


def words(memory: npt.NDArray[np.uint64]) -> Blocks:
    """Return words of this process as rows."""
    return Blocks(((memory.ctypes.data, WORD_BYTES, len(memory)),), None)


def blocks(introduction: Introduction) -> tuple[Blocks, Blocks]:
    """Return the rows of an endpoint's pools, and its words."""
    pools = tuple(
        (address, size, introduction.rows[pool])
        for pool in POOLS
        for address, size in introduction.buffers[pool]
    )
    address, count = introduction.words
    return Blocks(pools, introduction.device), Blocks(((address, WORD_BYTES, count),), None)


def regions(introduction: Introduction, pool: str) -> list[Memory]:
    """Return the memory of a pool of an endpoint. Its buffers lie in one region."""
    buffers = introduction.buffers[pool]
    if not buffers:
        return []
    start = min(address for address, _ in buffers)
    end = max(address + introduction.rows[pool] * size for address, size in buffers)
    return [Memory(start, end - start, introduction.device)]


def bytes_of(introduction: Introduction, remote: RemoteSlots) -> int:
    """Return the bytes of slots of an endpoint, in all buffers."""
    counts = zip(POOLS, (len(remote.slots), len(remote.states)), strict=True)
    return sum(count * sum(size for _, size in introduction.buffers[pool]) for pool, count in counts)


def number_rows(
    introduction: Introduction, slots: npt.NDArray[np.int32], states: npt.NDArray[np.int32]
) -> npt.NDArray[np.int32]:
    """Return the numbers of the rows of slots in all buffers of an endpoint, as `blocks` counts them."""
    parts, first = [], 0
    for pool, rows in zip(POOLS, (slots, states), strict=True):
        firsts = first + introduction.rows[pool] * np.arange(len(introduction.buffers[pool]))
        parts.append(np.add.outer(firsts, rows).ravel())
        first += introduction.rows[pool] * len(introduction.buffers[pool])
    return np.concatenate(parts).astype(np.int32)
