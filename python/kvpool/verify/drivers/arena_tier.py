"""`ArenaPrefixCache` over an `ArenaHostTier`: published, copied down, gone from the arena, loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvpool._kvpool import ArenaHostTier, ArenaPrefixCache
from kvpool.errors import StateError
from kvpool.verify.drivers.arena import ArenaDriver
from kvpool.verify.drivers.host_tier import PATIENCE_S
from kvpool.verify.pattern import FREED, Array

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from kvpool._kvpool import CacheLayout
    from kvpool.verify.requests import Request

    Bytes = NDArray[np.uint8]


class ArenaTierDriver(ArenaDriver):
    """All groups of a layout in one `CacheArena`, with a prefix cache and host memory below it.

    Requests publish what they have computed. Once it is in host memory, the arena is cleared and overwritten,
    and what a request needs is loaded again.

    Args:
        layout: The layout.
        tokens: Tokens of the proof, as in `Workload`.
        device: Device of the arena.
    """

    def __init__(self, layout: CacheLayout, tokens: int | None = None, device: str = "cpu") -> None:
        super().__init__(layout, tokens, device)
        # Slabs of other sizes, as each unit is one piece there.
        self.tier = ArenaHostTier(self.arena, 2 * self.arena.mem_bytes(), pin_memory=device != "cpu")
        self.cache = ArenaPrefixCache(self.arena, tiers=(self.tier,))

    def write(self, request: Request, data: Mapping[Array, Bytes]) -> None:
        with self.cache.match(request.tokens) as lease:
            begin, end = lease.length, len(request.tokens)
            if begin == end:
                return
            new = {name: self._new(request, name, begin) for name in self._groups}
            units = self._alloc({name: len(pages) for name, pages in new.items()})
            for array in self._pattern.arrays:
                pages = request.pages(array.group)
                fresh = data[array][len(pages) - len(new[array.group]) :]
                numbers = self._numbers(array, units[array.group])
                self._rows(array).put(numbers, fresh.reshape(-1, fresh.shape[-1]))
            lease.publish(
                request.tokens, {name: self._placed(name, new[name], units[name], begin, end) for name in new}
            )

    def _new(self, request: Request, name: str, begin: int) -> list[int]:
        """Return the pages of a request that are behind its lease."""
        each = self._pattern.unit_tokens(name)
        return [page for page in request.pages(name) if each is None or page * each >= begin]

    def _placed(self, name: str, pages: list[int], units: list[Any], begin: int, end: int) -> list[Any]:
        """Return units by their positions, as a publication has them."""
        each = self._pattern.unit_tokens(name)
        if each is None:
            return units
        found = dict(zip(pages, units, strict=True))
        return [found.get(page) for page in range(begin // each, end // each)]

    def move(self) -> None:
        if not self.cache.wait_written(PATIENCE_S):
            raise StateError(f"copies to host memory have not ended within {PATIENCE_S:.0f} s")
        self.arena.clear()
        for array in self._pattern.arrays:
            rows = self._rows(array)
            rows.put(np.arange(rows.count), FREED)

    def read(self, request: Request) -> Iterator[tuple[Array, Bytes]]:
        with self.cache.match(request.tokens) as lease:
            lease.load()
            if lease.length < len(request.tokens):
                return
            for array in self._pattern.arrays:
                leased = lease.units(array.group)
                units = [*leased.sinks, *leased.units]
                found = self._rows(array).read(self._numbers(array, units))
                yield array, found.reshape(len(request.pages(array.group)), -1, found.shape[-1])

    def drop(self, request: Request) -> None:
        """Leave a request to the cache, which gives up what is needed for others."""

    def close(self) -> None:
        self.cache.clear()
