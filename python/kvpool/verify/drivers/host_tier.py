"""`PrefixCache` over a `HostTier`: published, copied down, evicted, loaded."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from kvpool._kvpool import HostTier, PrefixCache, TokenToKVPoolAllocator
from kvpool.errors import StateError
from kvpool.verify.driver import Driver
from kvpool.verify.drivers import pools
from kvpool.verify.pattern import Pattern
from kvpool.verify.requests import Workload

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from kvpool._kvpool import CacheLayout, GDNPool, Group, Lease
    from kvpool.verify.pattern import Array
    from kvpool.verify.requests import Request

    Bytes = NDArray[np.uint8]

PATIENCE_S = 60.0
"""Seconds that copies may take."""

_WRITTEN, _RESTORED = 1, 2
"""The rows of states into which requests write, and in which they continue."""


def _is_full_kv(group: Group) -> bool:
    return group.kind == "full" and group.stride == 1 and pools.is_kv(group)


def parts(layout: CacheLayout) -> tuple[CacheLayout, list[str]]:
    """Return the part of a layout that a prefix cache has: full attention, and states.

    Raises:
        LeftOutError: If it has no full attention whose K and V a `KVPool` has.
    """
    choices = (("a prefix cache", _is_full_kv), ("GDNPool", pools.is_states))
    return pools.choose(layout, choices, one_each=True)


class HostTierDriver(Driver):
    """A `PrefixCache` over a `HostTier`, with snapshots of states if the layout has them.

    Requests publish what they have computed, and everything is evicted once it is in host memory. What was
    evicted is overwritten, and loaded again layer by layer.

    Args:
        layout: The layout.
        tokens: Tokens of the proof, as in `Workload`.
        device: Device of the pools.

    Raises:
        LeftOutError: If the layout has no full attention whose K and V a `KVPool` has.
    """

    def __init__(self, layout: CacheLayout, tokens: int | None = None, device: str = "cpu") -> None:
        chosen, notes = parts(layout)
        super().__init__(chosen)
        self.notes += notes
        self._device = device
        self._load = Workload(Pattern(chosen), tokens)
        self._kv_group: Group = next(group for group in chosen.groups if group.kind == "full")
        self._state_group: Group | None = next(
            (group for group in chosen.groups if group.kind == "state"), None
        )
        self._make_pools()
        self.cache = self._make_cache()

    def _make_pools(self) -> None:
        """Make pools whose memory is overwritten."""
        page, size, tracks = self.layout.page_size, self._load.most_tokens, len(list(self._load))
        self.kv = pools.make_kv(self._kv_group, size, page, self._device)
        self.allocator = TokenToKVPoolAllocator(size, self._device, page, strict=True)
        self.states: GDNPool | None = None
        if self._state_group is not None:
            self.states = pools.make_states(self._state_group, 2, tracks, self._device)
            pools.free_states(self.states, np.arange(1, self.states.pool_size))
        total = sum(len(request.tokens) for request in self._load)
        self.tier = HostTier(
            self.kv,
            total,
            states=self.states,
            max_states=tracks if self.states is not None else None,
            pin_memory=self._device != "cpu",
        )

    def _make_cache(self) -> PrefixCache:
        return PrefixCache(self.allocator, states=self.states, tiers=(self.tier,))

    def write(self, request: Request, data: Mapping[Array, Bytes]) -> None:
        with self.cache.match(request.tokens) as lease:
            begin = lease.length
            slots = _until(lambda: self.allocator.alloc(len(request.tokens) - begin))
            pools.write_kv(self.kv, self._kv_group, slots, data, begin)
            state = None
            if self.states is not None and self._state_group is not None:
                state = _WRITTEN
                pools.write_states(self.states, self._state_group, state, data)
            lease.publish(request.tokens[begin:], slots, state=state)

    def move(self) -> None:
        self._wait_written()
        self._forget()

    def _wait_written(self) -> None:
        if not self.cache.wait_written(PATIENCE_S):
            raise StateError(f"copies to host memory have not ended within {PATIENCE_S:.0f} s")

    def _forget(self) -> None:
        """Evict everything, and overwrite where it was."""
        self.cache.evict(self._load.most_tokens)
        if self.cache.cached_size():
            raise StateError(f"{self.cache.cached_size()} tokens are not evicted")
        slots = _until(lambda: self.allocator.alloc(self._load.most_tokens))
        pools.free_kv(self.kv, pools.host_ints(slots))
        self.allocator.free(slots)
        if self.states is not None:
            pools.free_states(self.states, np.arange(1, self.states.pool_size))

    def read(self, request: Request) -> Iterator[tuple[Array, Bytes]]:
        with self.cache.match(request.tokens) as lease:
            yield from self._read(lease)

    def _read(self, lease: Lease) -> Iterator[tuple[Array, Bytes]]:
        load = _until(lease.load)
        slots = lease.slots
        if not len(slots):
            return
        for layer, *arrays in pools.kv_planes(self._kv_group):
            load.wait_layer(layer)
            for array, rows in zip(arrays, self.kv.gather_kv(layer, slots), strict=True):
                found = pools.entry_rows(rows).read(np.arange(len(slots)))
                yield array, pools.by_pages(found, self.layout.page_size)
        load.wait(PATIENCE_S)
        if self.states is not None and self._state_group is not None:
            pools.free_states(self.states, np.array([_RESTORED]))
            lease.restore(_RESTORED)
            yield from pools.read_states(self.states, self._state_group, _RESTORED)


def _until(call: Any) -> Any:  # noqa: ANN401 - any call, and its result
    """Return the result of a call that returns None while places are being copied."""
    deadline = time.monotonic() + PATIENCE_S
    while (found := call()) is None:
        if time.monotonic() > deadline:
            raise StateError(f"nothing has become free within {PATIENCE_S:.0f} s")
        time.sleep(0.0002)
    return found
