"""`CacheArena`: units of all groups in one region, moved to other units, in slabs that change hands."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvpool._kvpool import CacheArena
from kvpool.verify.driver import Driver
from kvpool.verify.memory import rows_of
from kvpool.verify.pattern import FREED, Array, Pattern
from kvpool.verify.requests import Workload

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from kvpool._kvpool import CacheLayout, Group
    from kvpool.verify.memory import Rows
    from kvpool.verify.requests import Request

    Bytes = NDArray[np.uint8]

_SLABS = 8  # of more than each group needs, so that every group has a part of one
_LEAST_BYTES = 1 << 20


class ArenaDriver(Driver):
    """All groups of a layout in one `CacheArena`.

    Every unit is written and read through the tensor of its plane and layer; a layer that reads another's
    entries is read in its place. Every request is moved to other units, and freed slabs pass to other groups.

    Args:
        layout: The layout.
        tokens: Tokens of the proof, as in `Workload`.
        device: Device of the arena.
    """

    def __init__(self, layout: CacheLayout, tokens: int | None = None, device: str = "cpu") -> None:
        super().__init__(layout)
        self._pattern = Pattern(layout)
        self._groups: dict[str, Group] = {group.name: group for group in layout.groups}
        load = Workload(self._pattern, tokens)
        self._units: dict[int, dict[str, list[Any]]] = {}
        wanted = {
            group: load.units(group) + max(len(one.pages(group)) for one in load) for group in self._groups
        }
        arena_bytes = _LEAST_BYTES + sum(self._unit_bytes(name) * count for name, count in wanted.items())
        # A slab of a group may have no other unit in it.
        while True:
            self.arena: CacheArena = CacheArena(layout, arena_bytes, device, strict=True)
            if self.arena.fits(wanted):
                break
            arena_bytes += arena_bytes // 4

    def _unit_bytes(self, name: str) -> int:
        group, each = self._groups[name], self._pattern.unit_tokens(name)
        entries = 1 if each is None else each // group.stride
        return int(group.entry_bytes) * len(group.layers) * entries

    def _rows(self, array: Array) -> Rows:
        """Return the memory of an array, as the last of the layers that read it has it."""
        group = self._groups[array.group]
        readers = [reader for reader, layer in group.aliases.items() if layer == array.layer]
        layer = max(readers, default=array.layer)
        buffer = self.arena.buffer(array.group, array.plane, layer)
        return rows_of(buffer, self._pattern.entry_bytes(array))

    def _numbers(self, array: Array, units: list[Any]) -> NDArray[np.int64]:
        """Return the rows of units in the memory of an array; a state has one, or one for each layer."""
        group, each = self._groups[array.group], self._pattern.unit_tokens(array.group)
        if each is None:
            [unit] = units
            layer = group.layers.index(array.layer)
            return np.array([unit[layer] if self.arena.slabs.by_layer(group.name) else unit])
        entries = each // group.stride
        numbers: NDArray[np.int64] = (np.array(units)[:, None] * entries + np.arange(entries)).ravel()
        return numbers

    def _alloc(self, wanted: dict[str, int]) -> dict[str, list[Any]]:
        units = self.arena.alloc(wanted)
        assert units is not None  # noqa: S101 - there is room for all and the largest request
        return dict(units)

    def _free(self, units: dict[str, list[Any]]) -> None:
        for array in self._pattern.arrays:
            self._rows(array).put(self._numbers(array, units[array.group]), FREED)
        for group, numbers in units.items():
            self.arena.free(group, np.array(numbers).ravel())

    def write(self, request: Request, data: Mapping[Array, Bytes]) -> None:
        units = self._alloc({group: len(request.pages(group)) for group in self._groups})
        self._units[request.number] = units
        for array in self._pattern.arrays:
            flat = data[array].reshape(-1, data[array].shape[-1])
            self._rows(array).put(self._numbers(array, units[array.group]), flat)

    def move(self) -> None:
        for number, old in self._units.items():
            new = self._alloc({group: len(units) for group, units in old.items()})
            for array in self._pattern.arrays:
                rows = self._rows(array)
                found = rows.read(self._numbers(array, old[array.group]))
                rows.put(self._numbers(array, new[array.group]), found)
            self._free(old)
            self._units[number] = new
        self.arena.verify()

    def read(self, request: Request) -> Iterator[tuple[Array, Bytes]]:
        units = self._units[request.number]
        for array in self._pattern.arrays:
            found = self._rows(array).read(self._numbers(array, units[array.group]))
            yield array, found.reshape(len(units[array.group]), -1, found.shape[-1])

    def drop(self, request: Request) -> None:
        self._free(self._units.pop(request.number))

    def close(self) -> None:
        self.arena.clear()
