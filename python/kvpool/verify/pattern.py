"""Bytes that tell what they are: of which prefix, position, layer and plane.

The identity of an entry is packed into 64 bits and mixed by the finaliser of SplitMix64, which can be
inverted. Word `w` of the entry is that number XOR a constant of `w`. So filling and checking take one pass
over memory, any two entries differ in every word, and a word that is found anywhere tells what it is and
where in its entry it belongs.

| bits | what |
|---:|---|
| 24 | position: the first token that the entry stands for; of a state, the number of tokens |
| 12 | prefix: the request that has computed it |
| 10 | layer |
| 6 | plane, counted over all groups |
| 6 | part of the bytes that the rank has |
| 6 | a constant, by which other bytes are told apart |

An entry whose bytes are no multiple of 8 ends with the first bytes of a word. Entries of fewer than 8 bytes
hold a part of their identity alone: they are compared with all that was filled, together with their
neighbours.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvpool.errors import ArgumentError, ConfigError
from kvpool.verify.finding import Entry, Finding
from kvpool.verify.memory import rows_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import ArrayLike, NDArray

    from kvpool._kvpool import CacheLayout, Group
    from kvpool.verify.memory import Rows

    Words = NDArray[np.uint64]
    Bytes = NDArray[np.uint8]

FREED = 0xDB
"""The byte that drivers write over memory that has nothing in it, so that nothing is right by chance."""

WORD = 8
_FIELDS = (("position", 24), ("prefix", 12), ("layer", 10), ("plane", 6), ("part", 6), ("check", 6))
_MOST = {name: 1 << bits for name, bits in _FIELDS}
_CHECK = 0b10_1101
_CHUNK_BYTES = 1 << 20  # what is computed at once stays in the cache of a core
_MOST_CANDIDATES = 1 << 22
_SHOWN = 8

# SplitMix64: the increment, the factors of the finaliser, and their inverses modulo 2**64.
_STEP = 0x9E37_79B9_7F4A_7C15
_FACTORS = (0xBF58_476D_1CE4_E5B9, 0x94D0_49BB_1331_11EB)
_INVERSES = tuple(pow(factor, -1, 1 << 64) for factor in _FACTORS)


class Array(NamedTuple):
    """A plane of a layer: what a layout has the bytes of.

    Attributes:
        group: Name of the group.
        layer: Layer of the model.
        plane: Name of the plane.
    """

    group: str
    layer: int
    plane: str

    def __str__(self) -> str:
        return f"layer {self.layer}, {self.plane} of {self.group}"


def mix(words: Words) -> Words:
    """Return the words with every bit spread over all 64, one to one: `unmix` is the inverse."""
    for shift, factor in zip((30, 27), _FACTORS, strict=True):
        words = (words ^ (words >> np.uint64(shift))) * np.uint64(factor)
    mixed: Words = words ^ (words >> np.uint64(31))
    return mixed


def unmix(words: Words) -> Words:
    """Return the words that `mix` makes these of."""
    words = _unshift(words, 31) * np.uint64(_INVERSES[1])
    words = _unshift(words, 27) * np.uint64(_INVERSES[0])
    return _unshift(words, 30)


def _unshift(words: Words, bits: int) -> Words:
    """Return `x` of `words = x ^ (x >> bits)`, for shifts of at least a third of the word."""
    found: Words = words ^ (words >> np.uint64(bits)) ^ (words >> np.uint64(2 * bits))
    return found


@cache
def _places(count: int) -> Words:
    """Return the constants of the first `count` words of an entry."""
    found = mix(np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_STEP))
    found.flags.writeable = False
    return found


class Pattern:
    """The bytes of all entries of a layout.

    A buffer is a NumPy array, a `torch.Tensor` on any device, or a `kvpool.Tensor` in host memory, `[rows,
    *entry]` or `[units, entries, *entry]`: its leading dimensions are counted as one by `rows`. It may have
    strides between entries, not within one. A tensor on a device is written and compared there. PyTorch is
    not imported for arrays.

    Args:
        layout: The groups, layers and planes.

    Attributes:
        layout: The same.
        groups: The groups by name.
        lengths: How long each prefix is, as far as it was written or compared.

    Raises:
        ConfigError: If the layout has more than 64 planes, 64 parts, or layers from 1,024 on.
    """

    def __init__(self, layout: CacheLayout) -> None:
        self.layout = layout
        self.groups: dict[str, Group] = {group.name: group for group in layout.groups}
        self._planes = [(group.name, plane.name) for group in layout.groups for plane in group.planes]
        self._entry_bytes = {
            (group.name, plane.name): int(plane.entry_bytes)
            for group in layout.groups
            for plane in group.planes
        }
        self.lengths: dict[int, int] = {}
        layers = 1 + max(layer for group in layout.groups for layer in group.layers)
        parts = max(group.share[1] for group in layout.groups)
        for name, count in (("plane", len(self._planes)), ("part", parts), ("layer", layers)):
            if count > _MOST[name]:
                raise ConfigError(f"the layout has {count} {name}s; a pattern names {_MOST[name]}")

    @property
    def arrays(self) -> tuple[Array, ...]:
        """All planes of all layers of all groups, in order; aliases have none of their own."""
        return tuple(
            Array(group.name, layer, plane.name)
            for group in self.layout.groups
            for layer in group.layers
            for plane in group.planes
        )

    def array(self, layer: int, plane: str, group: str | None = None) -> Array:
        """Return the array of a plane of a layer. Layers that read those of another are the other.

        Raises:
            ArgumentError: If there is none, or several groups have one and none is named.
        """
        found = []
        for one in self.layout.groups:
            source = one.aliases.get(layer, layer)
            if group in {None, one.name} and source in one.layers and (one.name, plane) in self._entry_bytes:
                found.append(Array(one.name, source, plane))
        if len(found) == 1:
            return found[0]
        whose = "" if group is None else f" in group {group}"
        if not found:
            raise ArgumentError(f"layer {layer} has no plane {plane!r}{whose}")
        raise ArgumentError(
            f"name the group of {plane!r} of layer {layer}: {', '.join(one.group for one in found)}"
        )

    def entry_bytes(self, array: Array) -> int:
        """Return the bytes of an entry of an array."""
        return self._entry_bytes[array.group, array.plane]

    def unit_tokens(self, group: str) -> int | None:
        """Return the tokens of a page of a group; None for states."""
        one = self.groups[group]
        return None if one.kind == "state" else max(self.layout.page_size, one.stride)

    def bytes_of(self, array: Array, prefix: ArrayLike, positions: ArrayLike) -> Bytes:
        """Return the bytes of entries, uint8 `[n, entry_bytes]`.

        Args:
            array: The array.
            prefix: Number of the request that has computed them: an int, or one for each entry.
            positions: First tokens of the entries, ints `[n]`; numbers of tokens of states.

        Raises:
            ArgumentError: If a number is negative or too large for the pattern.
        """
        size = self.entry_bytes(array)
        words = self._mixed(array, prefix, positions)[:, None] ^ _places(-(-size // WORD))
        return words.view(np.uint8)[:, :size]

    def fill(  # noqa: PLR0913, PLR0917 - what an entry is, and where it lies
        self,
        buffer: Any,  # noqa: ANN401 - an array or tensor of any framework
        rows: ArrayLike,
        prefix: ArrayLike,
        positions: ArrayLike,
        layer: int,
        plane: str,
        *,
        group: str | None = None,
    ) -> None:
        """Write entries into a buffer.

        Args:
            buffer: The memory of the plane and layer, as the class describes.
            rows: Where each entry goes, ints `[n]`.
            prefix: As in `bytes_of`.
            positions: As in `bytes_of`, ints `[n]`.
            layer: Layer of the model.
            plane: Name of the plane.
            group: Name of the group, if the layer has the plane in several.

        Raises:
            ArgumentError: If an argument does not fit the layout or the buffer.
            IndexError: If a row is outside of the buffer.
        """
        array = self.array(layer, plane, group)
        memory = rows_of(buffer, self.entry_bytes(array))
        for places, mixed, _ in self._chunks(array, memory, rows, prefix, positions):
            memory.write(places, mixed, _places(memory.words))

    def check(  # noqa: PLR0913, PLR0917 - as in `fill`
        self,
        buffer: Any,  # noqa: ANN401 - as in `fill`
        rows: ArrayLike,
        prefix: ArrayLike,
        positions: ArrayLike,
        layer: int,
        plane: str,
        *,
        group: str | None = None,
        request: int | None = None,
    ) -> Finding | None:
        """Compare entries of a buffer with what `fill` writes; the arguments are those of `fill`.

        Args:
            buffer: The memory.
            rows: Where each entry lies.
            prefix: Whose entry it should be.
            positions: Which entry it should be.
            layer: Layer of the model.
            plane: Name of the plane.
            group: Name of the group.
            request: The request that reads them, for the finding; by default the prefix.

        Returns:
            The first wrong byte, in the order of `rows`; None if all are right.

        Raises:
            ArgumentError: As in `fill`.
            IndexError: As in `fill`.
        """
        array = self.array(layer, plane, group)
        memory = rows_of(buffer, self.entry_bytes(array))
        for places, mixed, begin in self._chunks(array, memory, rows, prefix, positions):
            wrong = memory.first_wrong(places, mixed, _places(memory.words))
            if wrong is not None:
                entries = _Entries(self, array, memory, rows, prefix, positions)
                return entries.finding(begin + wrong, request)
        return None

    def missing(self, array: Array, prefix: int, position: int, request: int) -> Finding:
        """Return the finding that an entry of a request is not there at all."""
        group, tokens = self.groups[array.group], self.unit_tokens(array.group)
        part, is_state = group.share[0], tokens is None
        entry_of_page = 0 if tokens is None else position % tokens // group.stride
        return Finding(
            request=request,
            page=None if tokens is None else position // tokens,
            byte=entry_of_page * self.entry_bytes(array),
            should_be=Entry(prefix, position, array.layer, array.group, array.plane, part, is_state),
            note="is missing",
            names_group=self.names_group(array),
        )

    def names_group(self, array: Array) -> bool:
        """Return whether a sentence needs the group: several have a plane of this name."""
        return [name for _, name in self._planes].count(array.plane) > 1

    def decode(self, word: int, place: int = 0) -> Entry | None:
        """Return which entry a word is of, if it is word `place` of one; None if it is of none."""
        found = self.identities(np.array([word], np.uint64) ^ _places(place + 1)[place:])
        return found[0][1] if found else None

    def _chunks(
        self, array: Array, memory: Rows, rows: ArrayLike, prefix: ArrayLike, positions: ArrayLike
    ) -> Iterator[tuple[NDArray[np.int64], Words, int]]:
        """Yield rows, mixed identities, and the number of the first entry, in parts that fit into a cache."""
        places, mixed = _ints("rows", rows), self._mixed(array, prefix, positions)
        if places.shape != mixed.shape:
            raise ArgumentError(f"there are {len(places)} rows for {len(mixed)} positions")
        if len(places) and not 0 <= places.min() <= places.max() < memory.count:
            bad = places[(places < 0) | (places >= memory.count)][0]
            raise IndexError(f"row {bad} is outside of the buffer's {memory.count}")
        self._note(prefix, positions)
        step = max(1, _CHUNK_BYTES // memory.entry_bytes)
        for begin in range(0, len(places), step):
            yield places[begin : begin + step], mixed[begin : begin + step], begin

    def _note(self, prefix: ArrayLike, positions: ArrayLike) -> None:
        """Note how long each prefix is, for the entries that are too short to tell themselves."""
        whose, where = np.broadcast_arrays(_ints("prefix", prefix), _ints("positions", positions))
        for one in np.unique(whose).tolist():
            self.lengths[one] = max(self.lengths.get(one, 0), 1 + int(where[whose == one].max()))

    def _mixed(self, array: Array, prefix: ArrayLike, positions: ArrayLike) -> Words:
        """Return the mixed identity of each entry, `[n]`."""
        fields = {
            "position": _ints("positions", positions),
            "prefix": _ints("prefix", prefix),
            "layer": np.array([array.layer]),
            "plane": np.array([self._planes.index((array.group, array.plane))]),
            "part": np.array([self.groups[array.group].share[0]]),
            "check": np.array([_CHECK]),
        }
        count = len(fields["position"])
        packed = np.zeros(count, np.uint64)
        for name, bits in _FIELDS:
            values = fields[name]
            if len(values) not in {1, count}:
                raise ArgumentError(f"there are {len(values)} prefixes for {count} positions")
            if values.size and not 0 <= values.min() <= values.max() < 1 << bits:
                bad = values[(values < 0) | (values >= 1 << bits)][0]
                raise ArgumentError(f"{name} {bad} is outside of a pattern's {1 << bits}")
            packed = (packed << np.uint64(bits)) | values.astype(np.uint64)
        return mix(packed)

    def identities(self, mixed: Words) -> list[tuple[int, Entry]]:
        """Return which of these numbers are identities of entries of the layout, with the entries."""
        packed = unmix(mixed)
        fields: dict[str, NDArray[np.int64]] = {}
        for name, bits in reversed(_FIELDS):
            fields[name] = (packed & np.uint64((1 << bits) - 1)).astype(np.int64)
            packed >>= np.uint64(bits)
        may_be = (fields["check"] == _CHECK) & (fields["plane"] < len(self._planes))
        found = []
        for at in np.flatnonzero(may_be).tolist():
            group, plane = self._planes[fields["plane"][at]]
            layer, part = int(fields["layer"][at]), int(fields["part"][at])
            one = self.groups[group]
            if layer in one.layers and part < one.share[1]:
                prefix, position = int(fields["prefix"][at]), int(fields["position"][at])
                found.append((at, Entry(prefix, position, layer, group, plane, part, one.kind == "state")))
        return found


class _Entries:
    """The entries of one check of which one is wrong: what they are, and what they hold."""

    def __init__(  # noqa: PLR0913, PLR0917 - those of `check`
        self,
        pattern: Pattern,
        array: Array,
        memory: Rows,
        rows: ArrayLike,
        prefix: ArrayLike,
        positions: ArrayLike,
    ) -> None:
        self._pattern, self._array, self._memory = pattern, array, memory
        self._rows = _ints("rows", rows)
        self._positions = _ints("positions", positions)
        self._prefixes = np.broadcast_to(_ints("prefix", prefix), self._positions.shape)
        self._group = pattern.groups[array.group]

    def _read(self, numbers: NDArray[np.int64]) -> tuple[Bytes, Bytes]:
        """Return what entries hold and what they should, uint8 `[n, entry_bytes]` each."""
        should = self._pattern.bytes_of(self._array, self._prefixes[numbers], self._positions[numbers])
        return self._memory.read(self._rows[numbers]), should

    def finding(self, number: int, request: int | None) -> Finding:
        """Return what is to be said of the entry with a number, which is wrong."""
        array, tokens = self._array, self._pattern.unit_tokens(self._array.group)
        prefix, position = int(self._prefixes[number]), int(self._positions[number])
        if tokens is None:
            page, of_page, entry_of_page = None, np.array([number]), 0
        else:
            page = position // tokens
            same = (self._positions // tokens == page) & (self._prefixes == prefix)
            of_page = np.flatnonzero(same)
            entry_of_page = position % tokens // self._group.stride
        found, should = self._read(of_page)
        wrong = (found != should).any(1)
        [at] = np.flatnonzero(of_page == number)
        byte = int((found[at] != should[at]).argmax())
        holds, holds_byte, note = self._holds(found[at:], byte, of_page[at:])
        is_state = tokens is None
        part = self._group.share[0]
        return Finding(
            request=prefix if request is None else request,
            page=page,
            byte=entry_of_page * self._memory.entry_bytes + byte,
            should_be=Entry(prefix, position, array.layer, array.group, array.plane, part, is_state),
            holds=holds,
            holds_byte=None if holds_byte == byte else holds_byte,
            note=note,
            found=found[at, byte : byte + _SHOWN].tobytes(),
            wrong_entries=int(wrong.sum()),
            page_entries=len(of_page),
            names_group=self._pattern.names_group(array),
        )

    def _holds(
        self, found: Bytes, byte: int, numbers: NDArray[np.int64]
    ) -> tuple[Entry | None, int | None, str]:
        """Return the entry that is found, its byte that is at the wrong one, and a note if it is none."""
        first = found[0]
        rest = first[byte:]
        head = rest[:WORD]
        if not head.any():
            return None, None, "holds zeros: it was never written"
        if (head == FREED).all():
            return None, None, "holds what freed memory is overwritten with: it has not arrived"
        place = byte // WORD
        word = first[place * WORD : (place + 1) * WORD]
        if len(word) == WORD:
            at_place = self._pattern.decode(int(word.view("<u8")[0]), place)
            if at_place is not None:
                return at_place, byte, ""
        elsewhere = self._elsewhere(rest)
        if elsewhere is not None:
            return *elsewhere, ""
        short = self._short(found, place, numbers) if len(word) < WORD else None
        if short is not None:
            return short, byte, ""
        return None, None, ""

    def _elsewhere(self, rest: Bytes) -> tuple[Entry, int] | None:
        """Return the entry and byte that these bytes begin with, wherever in an entry they belong."""
        pattern = self._pattern
        places = max(-(-pattern.entry_bytes(array) // WORD) for array in pattern.arrays)
        for shift in range(min(WORD, len(rest) - WORD + 1)):
            word = rest[shift : shift + WORD].copy().view("<u8")
            for place, entry in pattern.identities(word ^ _places(places)):
                size = pattern.entry_bytes(Array(entry.group, entry.layer, entry.plane))
                if WORD * place + WORD <= size and WORD * place >= shift:
                    return entry, WORD * place - shift
        return None

    def _short(self, found: Bytes, place: int, numbers: NDArray[np.int64]) -> Entry | None:
        """Return the entry whose part of a word is found, as its neighbours are; None if several may be it.

        Args:
            found: What entries of the page hold, the wrong one first.
            place: The number of the word.
            numbers: The numbers of these entries.
        """
        pattern, lengths = self._pattern, self._pattern.lengths
        arrays = [array for array in pattern.arrays if pattern.entry_bytes(array) == found.shape[1]]
        if len(arrays) * sum(lengths.values()) > _MOST_CANDIDATES:
            return None
        behind = self._positions[numbers] - self._positions[numbers[0]]
        # The same array comes first: of two that fit, it is the likelier one.
        for array in sorted(arrays, key=lambda one: one != self._array):
            prefixes = np.repeat(list(lengths), list(lengths.values()))
            positions = np.concatenate([np.arange(length) for length in lengths.values()])
            for rest, step in zip(found[:, place * WORD :], behind, strict=True):
                inside = positions + step < _MOST["position"]
                prefixes, positions = prefixes[inside], positions[inside]
                same = pattern.bytes_of(array, prefixes, positions + step)[:, place * WORD :] == rest
                fits = same.all(1)
                # What follows may be of another page.
                if step and not fits.any():
                    break
                prefixes, positions = prefixes[fits], positions[fits]
            if len(positions) == 1:
                group = pattern.groups[array.group]
                is_state = group.kind == "state"
                return Entry(int(prefixes[0]), int(positions[0]), *_named(array), group.share[0], is_state)
        return None


def _named(array: Array) -> tuple[int, str, str]:
    return array.layer, array.group, array.plane


def _ints(name: str, values: ArrayLike) -> NDArray[np.int64]:
    """Return ints `[n]`.

    Raises:
        ArgumentError: If they are something else.
    """
    found = np.asarray(values)
    if found.size and found.dtype.kind not in "iu":
        raise ArgumentError(f"{name} must be ints, not {found.dtype}")
    return np.atleast_1d(found).astype(np.int64).ravel()
