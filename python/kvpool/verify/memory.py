"""Entries of a buffer as rows of bytes: of NumPy, PyTorch on any device, or kvpool without either."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from kvpool._kvpool import Tensor
from kvpool.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]
    Ints = NDArray[np.int64]
    Words = NDArray[np.uint64]

WORD = 8


class Rows(Protocol):
    """The entries of a buffer, counted over its leading dimensions.

    Attributes:
        count: The number of entries.
        entry_bytes: Bytes of one.
        words: Words of one, the last of which may be a part of a word.
    """

    count: int
    entry_bytes: int
    words: int

    def write(self, rows: Ints, mixed: Words, places: Words) -> None:
        """Write `mixed[i] ^ places[w]` as word `w` of row `rows[i]`."""

    def put(self, rows: Ints, data: Bytes | int) -> None:
        """Write bytes `[n, entry_bytes]`, or one byte everywhere, into rows."""

    def first_wrong(self, rows: Ints, mixed: Words, places: Words) -> int | None:
        """Return the first `i` whose row differs from what `write` writes."""

    def read(self, rows: Ints) -> Bytes:
        """Return a copy of rows in host memory, uint8 `[n, entry_bytes]`."""


def rows_of(buffer: Any, entry_bytes: int) -> Rows:  # noqa: ANN401 - of any framework
    """Return a buffer's entries, without a copy.

    Raises:
        ArgumentError: If no leading dimensions leave entries of `entry_bytes`, or an entry is not contiguous.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(buffer, torch.Tensor):
        if buffer.device.type != "cpu":
            return _DeviceRows(buffer, entry_bytes)
        lead = _lead(tuple(buffer.shape), buffer.element_size(), entry_bytes)
        plain = buffer.detach()
        strides = [step * buffer.element_size() for step in buffer.stride()]
        _check_entries(tuple(buffer.shape), strides, lead, buffer.element_size())
        # Rows of elements, whose last dimension NumPy can take as bytes in any dtype.
        shape = (*buffer.shape[:lead], math.prod(buffer.shape[lead:]))
        flat = plain.as_strided(shape, (*buffer.stride()[:lead], 1), buffer.storage_offset())
        return _HostRows(flat.view(torch.uint8).numpy())
    array = buffer.numpy() if isinstance(buffer, Tensor) else buffer
    if not isinstance(array, np.ndarray):
        raise ArgumentError(f"a buffer is an array or a tensor, not a {type(buffer).__name__}")
    lead = _lead(array.shape, array.itemsize, entry_bytes)
    _check_entries(array.shape, array.strides, lead, array.itemsize)
    shape = (*array.shape[:lead], math.prod(array.shape[lead:]))
    flat_array = np.lib.stride_tricks.as_strided(array, shape, (*array.strides[:lead], array.itemsize))
    return _HostRows(flat_array.view(np.uint8))


def _lead(shape: Sequence[int], itemsize: int, entry_bytes: int) -> int:
    """Return how many dimensions come before those of an entry."""
    for lead in range(1, len(shape) + 1):
        if math.prod(shape[lead:]) * itemsize == entry_bytes:
            return lead
    elements = f"shape {list(shape)} with elements of {itemsize} bytes"
    raise ArgumentError(f"a buffer of {elements} has no entries of {entry_bytes} bytes")


def _check_entries(shape: Sequence[int], strides: Sequence[int], lead: int, itemsize: int) -> None:
    step = itemsize
    for axis in range(len(shape) - 1, lead - 1, -1):
        if shape[axis] > 1 and strides[axis] != step:
            raise ArgumentError(
                f"entries of the buffer are not contiguous: dimension {axis} has steps of {strides[axis]}"
            )
        step *= shape[axis]


class _HostRows:
    """Rows of an array of bytes, `[..., entry_bytes]`."""

    def __init__(self, memory: Bytes) -> None:
        self._memory = memory
        self._lead = memory.shape[:-1]
        self.count = math.prod(self._lead)
        self.entry_bytes = memory.shape[-1]
        self.words = -(-self.entry_bytes // WORD)

    def _index(self, rows: Ints) -> tuple[Any, ...]:
        if len(self._lead) == 1:
            return (_as_slice(rows),)
        return np.unravel_index(rows, self._lead)

    def write(self, rows: Ints, mixed: Words, places: Words) -> None:
        words = mixed[:, None] ^ places
        self._memory[self._index(rows)] = words.view(np.uint8)[:, : self.entry_bytes]

    def put(self, rows: Ints, data: Bytes | int) -> None:
        self._memory[self._index(rows)] = data

    def first_wrong(self, rows: Ints, mixed: Words, places: Words) -> int | None:
        found = self._memory[self._index(rows)]
        words = mixed[:, None] ^ places
        if self.entry_bytes % WORD or not found.flags.c_contiguous:
            wrong = (found != words.view(np.uint8)[:, : self.entry_bytes]).any(1)
        else:
            wrong = (found.view(np.uint64) != words).any(1)
        return int(wrong.argmax()) if wrong.any() else None

    def read(self, rows: Ints) -> Bytes:
        return np.array(self._memory[self._index(rows)])


def _as_slice(rows: Ints) -> Any:  # noqa: ANN401 - what an array is indexed with
    """Return consecutive rows as a slice, which takes no copy."""
    if len(rows) and rows[-1] - rows[0] == len(rows) - 1 and (np.diff(rows) == 1).all():
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return rows


class _DeviceRows:
    """Rows of a tensor on a device, which are computed and compared there."""

    def __init__(self, buffer: torch.Tensor, entry_bytes: int) -> None:
        self._torch = sys.modules["torch"]
        size = buffer.element_size()
        lead = _lead(tuple(buffer.shape), size, entry_bytes)
        _check_entries(tuple(buffer.shape), [step * size for step in buffer.stride()], lead, size)
        shape = (*buffer.shape[:lead], math.prod(buffer.shape[lead:]))
        flat = buffer.detach().as_strided(shape, (*buffer.stride()[:lead], 1), buffer.storage_offset())
        self._memory: torch.Tensor = flat.view(self._torch.uint8)
        self._lead = tuple(self._memory.shape[:-1])
        self.count = math.prod(self._lead)
        self.entry_bytes = entry_bytes
        self.words = -(-entry_bytes // WORD)

    def _index(self, rows: Ints) -> tuple[torch.Tensor, ...]:
        places = np.unravel_index(rows, self._lead)
        return tuple(self._there(place.astype(np.int64)) for place in places)

    def _there(self, values: NDArray[Any]) -> torch.Tensor:
        moved: torch.Tensor = self._torch.from_numpy(np.ascontiguousarray(values).view(np.int64).copy())
        return moved.to(self._memory.device)

    def _expected(self, mixed: Words, places: Words) -> torch.Tensor:
        words = self._there(mixed)[:, None] ^ self._there(places)
        return words.view(self._torch.uint8)[:, : self.entry_bytes]

    def write(self, rows: Ints, mixed: Words, places: Words) -> None:
        self._memory[self._index(rows)] = self._expected(mixed, places)

    def put(self, rows: Ints, data: Bytes | int) -> None:
        moved = data if isinstance(data, int) else self._torch.from_numpy(data).to(self._memory.device)
        self._memory[self._index(rows)] = moved

    def first_wrong(self, rows: Ints, mixed: Words, places: Words) -> int | None:
        wrong = (self._memory[self._index(rows)] != self._expected(mixed, places)).any(1)
        return int(wrong.nonzero()[0, 0]) if bool(wrong.any()) else None

    def read(self, rows: Ints) -> Bytes:
        found: Bytes = self._memory[self._index(rows)].cpu().numpy()
        return found
