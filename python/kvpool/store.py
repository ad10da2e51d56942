"""Stores below a `HostTier` that are written in Python."""

from __future__ import annotations

import logging
import threading
import weakref
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from kvpool._kvpool import FileStore, _StoreQueue

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from typing_extensions import Self

    from kvpool._kvpool import _Errand

__all__ = ["Store"]

_logger = logging.getLogger("kvpool")


class Store(ABC):
    """What lies below a `HostTier`: pages by key, in a place that is larger and slower than host memory.

    `PrefixCache(tiers=(host, store))` puts there what comes to host memory, and its `fetch` brings back what
    the store has of a prompt. `FileStore` is one. Others are subclasses of this class. Three of their methods
    may take their time: threads of the store call them, one thread `find` and `read` and one `write`, and
    nothing in the cache waits for them. What they raise is logged, and means that nothing is there or was
    written. `close` ends the threads; so does the end of the program, or of the store.

    A key has 32 bytes and names all that the bytes of its page depend on: the model, the shape and dtype of
    the pools, the page size, the namespace, and all tokens up to the page's end. What is there need never be
    written again, and many caches can share a store. A snapshot of a state is a page, too, of another size.

    Args:
        queue_bytes: Bytes of pages that wait to be written, or are. Further ones are dropped.

    Raises:
        ConfigError: If `queue_bytes` is below 1.
    """

    def __init__(self, *, queue_bytes: int = 256 << 20) -> None:
        self._queue = _StoreQueue(queue_bytes)
        for writes in (False, True):
            # The threads let go of a store that nothing else holds.
            target = (self._queue, weakref.ref(self), writes)
            threading.Thread(target=_serve, args=target, name="kvpool-store").start()

    @abstractmethod
    def find(self, keys: Sequence[bytes]) -> Sequence[bool]:
        """Return for each key whether its page is there."""

    @abstractmethod
    def read(self, keys: Sequence[bytes], addresses: Sequence[int], sizes: Sequence[int]) -> Sequence[bool]:
        """Copy pages to memory.

        Args:
            keys: The keys.
            addresses: Where the page of each key shall be: in memory that `attach` was called with.
            sizes: Bytes of each page.

        Returns:
            For each page whether its memory has exactly the bytes that were written under its key. If not,
            it may have any.
        """

    @abstractmethod
    def write(self, keys: Sequence[bytes], addresses: Sequence[int], sizes: Sequence[int]) -> Sequence[bool]:
        """Copy pages from memory, which does not change during the call. The arguments are those of `read`.

        Returns:
            For each page whether it is there now.
        """

    def attach(self, memory: Sequence[tuple[int, int]]) -> None:  # noqa: B027
        """Take note of memory that pages are copied to and from. Each new cache calls it once.

        Args:
            memory: The address and the bytes of each piece of memory, which is valid as long as a cache has
                the tier.
        """

    def close(self) -> None:
        """Take no more calls, and drop those that wait."""
        self._queue.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


Store.register(FileStore)


def _serve(queue: _StoreQueue, store: weakref.ref[Store], writes: bool) -> None:
    """Answer the calls of a store until it is closed, or gone, or the program ends."""
    while threading.main_thread().is_alive():
        try:
            errand = queue.next(writes)
        except RuntimeError:
            return
        here = store()
        if here is None:
            queue.close()
            return
        if errand is not None:
            _answer(here, errand)
        # Not held while the next call is waited for.
        del here, errand


def _answer(store: Store, errand: _Errand) -> None:
    kind, keys, (addresses, sizes) = errand.kind, errand.keys, errand.places
    try:
        if kind == "find":
            present = store.find(keys)
        elif kind == "read":
            present = store.read(keys, addresses, sizes)
        else:
            present = store.write(keys, addresses, sizes)
        errand.finish([bool(is_present) for is_present in present])
    except Exception:
        _logger.exception("%s: %s of %d pages has failed", type(store).__name__, kind, len(keys))
        errand.finish([])
