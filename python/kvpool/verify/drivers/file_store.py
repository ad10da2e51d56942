"""`FileStore` below a `HostTier`: put, closed, opened again by other pools, fetched, loaded."""

from __future__ import annotations

import shutil
import tempfile
from typing import TYPE_CHECKING

from kvpool._kvpool import FileStore, PrefixCache
from kvpool.errors import StateError
from kvpool.verify.drivers.host_tier import PATIENCE_S, HostTierDriver

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    from numpy.typing import NDArray

    from kvpool._kvpool import CacheLayout
    from kvpool.verify.pattern import Array
    from kvpool.verify.requests import Request

_ALIGNED = 4096


class FileStoreDriver(HostTierDriver):
    """A `PrefixCache` over a `HostTier` and a `FileStore` in a temporary directory.

    To move, everything is written to the files, and all pools, the tier and the store are given up. Others,
    whose memory is overwritten, open the files and fetch.

    Args:
        layout: The layout.
        tokens: Tokens of the proof, as in `Workload`.
        device: Device of the pools.

    Raises:
        LeftOutError: If the layout has no full attention whose K and V a `KVPool` has.
    """

    def __init__(self, layout: CacheLayout, tokens: int | None = None, device: str = "cpu") -> None:
        self._folder = tempfile.mkdtemp(prefix="kvpool-verify-")
        try:
            super().__init__(layout, tokens, device)
        except BaseException:
            shutil.rmtree(self._folder)
            raise

    def _make_cache(self) -> PrefixCache:
        page = self.tier.page_bytes
        pages = sum(len(request.tokens) for request in self._load) // self.layout.page_size
        state = sum(
            plane.entry_bytes
            for group in self.layout.groups
            for plane in group.planes
            if group.kind == "state"
        )
        layers = sum(len(group.layers) for group in self.layout.groups if group.kind == "state")
        pieces = pages + len(list(self._load)) * (2 + state * layers // page)
        size = 2 * pieces * -(-page // _ALIGNED) * _ALIGNED
        self.store = FileStore(self._folder, size, page_bytes=page, queue_bytes=size)
        return PrefixCache(
            self.allocator,
            states=self.states,
            tiers=(self.tier, self.store),
            model=self.layout.fingerprint,
        )

    def move(self) -> None:
        self._wait_written()
        del self.cache, self.tier, self.kv, self.allocator, self.states
        self.store.close()
        self._make_pools()
        self.cache = self._make_cache()

    def read(self, request: Request) -> Iterator[tuple[Array, NDArray[np.uint8]]]:
        fetch = self.cache.fetch(request.tokens)
        if not fetch.wait(PATIENCE_S):
            raise StateError(f"a fetch from the store has not ended within {PATIENCE_S:.0f} s")
        yield from super().read(request)

    def close(self) -> None:
        self.store.close()
        shutil.rmtree(self._folder)
