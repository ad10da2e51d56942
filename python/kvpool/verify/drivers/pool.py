"""`KVPool`, `GDNPool` and their allocators: written, moved within the pool, reused after a free."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvpool._kvpool import TokenToKVPoolAllocator
from kvpool.verify.driver import Driver
from kvpool.verify.drivers import pools
from kvpool.verify.memory import rows_of
from kvpool.verify.pattern import Pattern
from kvpool.verify.requests import Workload

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from kvpool._kvpool import CacheLayout, GDNPool, KVPool
    from kvpool.verify.pattern import Array
    from kvpool.verify.requests import Request

    Bytes = NDArray[np.uint8]


class _Slots:
    """The pool of one group, with the slots of each request."""

    def __init__(self, group: Any, entries: int, units: int, device: str) -> None:  # noqa: ANN401 - a `Group`
        self.group = group
        self.entries = entries
        size = units * entries
        self.pool: KVPool = pools.make_kv(group, size, entries, device)
        self.allocator = TokenToKVPoolAllocator(size, device, entries, strict=True)
        self.slots: dict[int, Any] = {}

    def free(self, slots: Any) -> None:  # noqa: ANN401 - a tensor
        numbers = pools.host_ints(slots)
        self.allocator.free(slots)
        pools.free_kv(self.pool, numbers)

    def move(self) -> None:
        """Give every request other slots."""
        for number, old in self.slots.items():
            new = self.allocator.alloc(len(old))
            assert new is not None  # noqa: S101 - there is room for the largest request
            self.pool.move_kv(new, old)
            self.slots[number] = new
            self.free(old)

    def read(self, number: int) -> Iterator[tuple[Array, Bytes]]:
        """Yield the arrays of a request: of every other layer from a copy, of the rest in place, by pages."""
        slots = self.slots[number]
        rows = pools.host_ints(slots)
        for layer, *arrays in pools.kv_planes(self.group):
            for array, plane in zip(arrays, range(2), strict=True):
                if layer % 2 == 0:
                    found = pools.entry_rows(self.pool.gather_kv(layer, slots)[plane]).read(
                        np.arange(len(rows))
                    )
                else:
                    size = int(self.group.planes[plane].entry_bytes)
                    found = rows_of(self.pool.page_view(layer)[plane], size).read(rows)
                yield array, pools.by_pages(found, self.entries)


class _States:
    """The states of one group, with the row of each request."""

    def __init__(self, group: Any, requests: int, device: str) -> None:  # noqa: ANN401 - a `Group`
        self.group = group
        self.pool: GDNPool = pools.make_states(group, requests + 1, 0, device)
        self._free = list(range(1, requests + 2))
        pools.free_states(self.pool, np.array(self._free))
        self.rows: dict[int, int] = {}

    def write(self, number: int, data: Mapping[Array, Bytes]) -> None:
        row = self.rows[number] = self._free.pop(0)
        pools.write_states(self.pool, self.group, row, data)

    def drop(self, number: int) -> None:
        row = self.rows.pop(number)
        self.pool.reset_states(row)
        self._give_back(row)

    def move(self) -> None:
        """Give every request another row."""
        for number, old in self.rows.items():
            new = self._free.pop(0)
            self.pool.copy_states(old, new)
            self.rows[number] = new
            self._give_back(old)

    def _give_back(self, row: int) -> None:
        pools.free_states(self.pool, np.array([row]))
        self._free.append(row)


class PoolDriver(Driver):
    """`KVPool` with `TokenToKVPoolAllocator` for each group of K and V, and `GDNPool` for states.

    Rows are written by `set_kv_buffer`, moved by `move_kv` and `copy_states` to other places, and read by
    `gather_kv` and `page_view`. What is freed is overwritten, and reused.

    Args:
        layout: The layout.
        tokens: Tokens of the proof, as in `Workload`.
        device: Device of the pools.

    Raises:
        LeftOutError: If a `KVPool` has none of the groups.
    """

    def __init__(self, layout: CacheLayout, tokens: int | None = None, device: str = "cpu") -> None:
        chosen, notes = pools.choose(
            layout, (("KVPool", pools.is_kv), ("GDNPool", pools.is_states)), one_each=False
        )
        super().__init__(chosen)
        self.notes += notes
        pattern = Pattern(chosen)
        load = Workload(pattern, tokens)
        self._slots: list[_Slots] = []
        self._states: list[_States] = []
        for group in chosen.groups:
            each = pattern.unit_tokens(group.name)
            if each is None:
                self._states.append(_States(group, load.units(group.name), device))
            else:
                spare = max(len(request.pages(group.name)) for request in load)
                units = load.units(group.name) + spare
                self._slots.append(_Slots(group, each // group.stride, units, device))

    def write(self, request: Request, data: Mapping[Array, Bytes]) -> None:
        for one in self._slots:
            slots = one.allocator.alloc(len(request.pages(one.group.name)) * one.entries)
            assert slots is not None  # noqa: S101 - the pool has room for all
            one.slots[request.number] = slots
            pools.write_kv(one.pool, one.group, slots, data)
        for states in self._states:
            states.write(request.number, data)

    def move(self) -> None:
        for slots in self._slots:
            slots.move()
        for states in self._states:
            states.move()

    def read(self, request: Request) -> Iterator[tuple[Array, Bytes]]:
        for one in self._slots:
            yield from one.read(request.number)
        for states in self._states:
            yield from pools.read_states(states.pool, states.group, states.rows[request.number])

    def drop(self, request: Request) -> None:
        for one in self._slots:
            one.free(one.slots.pop(request.number))
        for states in self._states:
            states.drop(request.number)
