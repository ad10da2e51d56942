"""Stores below a `HostTier` that are written in Python."""

from __future__ import annotations

import logging
import threading
import weakref
from abc import abstractmethod
from typing import TYPE_CHECKING

from kvpool._closing import Closing
from kvpool._kvpool import _StoreQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvpool._kvpool import _StoreCall

__all__ = ["Store"]

_logger = logging.getLogger("kvpool")


class Store(Closing):
    """A tier below a `HostTier`: pages by key, in a place that is larger and slower than host memory.

    `PrefixCache(tiers=(host, store))` writes the pages that come to host memory to the store, and its `fetch`
    brings back the part of a prompt that the store has. `FileStore` is such a store. Other stores are
    subclasses of this class. Four of their methods may be slow: threads of the store call them, one thread
    `find`, `touch` and `read` and one `write`, and nothing in the cache waits for them. An exception of a
    method is logged, and means that no page is there or was written. `close` ends the threads; so does the
    end of the program, or of the store.

    A key has 32 bytes and names all that the bytes of its page depend on: the model, the shape and dtype of
    the pools, the page size, the namespace, and all tokens up to the page's end. A page in the store never
    has to be written again, and many caches can share a store. A snapshot of a state is also a page, of
    another size.

    A cache lets a store write at most half of the host tier at a time; other pages wait. The constructor of a
    subclass calls the one of this class at its end, when its methods can be called.

    Memory is passed by its address, for use by networks and other libraries. Do not use it after the call, or
    beyond its size: nothing checks that. From Python, use it through a `memoryview`, which refuses a page of
    another size:

    ```python
    import ctypes


    def view(address: int, size: int) -> memoryview:
        return memoryview((ctypes.c_char * size).from_address(address)).cast("B")
    ```

    `view(address, size)[:] = page` copies a page to memory in `read`; `bytes(view(address, size))` copies it
    from there in `write`.
    """

    def __init__(self) -> None:
        self._queue = _StoreQueue()
        self._ends = threading.Event()  # set before the queue takes no more calls
        # The threads hold no reference that would keep the store alive.
        here = weakref.ref(self)
        self._threads = [
            threading.Thread(target=_serve, args=(get, here, self._ends), name="kvpool-store", daemon=True)
            for get in (self._queue.next_read, self._queue.next_write)
        ]
        # Before the threads: if one cannot be started, those that run end with the store.
        weakref.finalize(self, _end, self._queue, self._ends, self._threads)
        for thread in self._threads:
            thread.start()

    @abstractmethod
    def find(self, keys: Sequence[bytes]) -> Sequence[bool]:
        """Return for each key whether its page is in the store.

        A scheduler may ask again and again for one request: no lease and no order of eviction changes by it.
        """

    def touch(self, keys: Sequence[bytes]) -> Sequence[bool]:
        """Return the same for pages that requests use on the device: a use, for a store that keeps those.

        A cache calls it at a bounded rate. By default it is `find`.
        """
        return self.find(keys)

    @abstractmethod
    def read(self, keys: Sequence[bytes], addresses: Sequence[int], sizes: Sequence[int]) -> Sequence[bool]:
        """Copy pages to memory.

        Args:
            keys: The keys.
            addresses: The place for the page of each key, in memory that `attach` was called with. Nothing
                else uses it until the call returns.
            sizes: Bytes of each page.

        Returns:
            For each page whether its memory has exactly the bytes that were written under its key. If not,
            its content is undefined.
        """

    @abstractmethod
    def write(self, keys: Sequence[bytes], addresses: Sequence[int], sizes: Sequence[int]) -> Sequence[bool]:
        """Copy pages from memory, which does not change until the call returns.

        Args:
            keys: The keys.
            addresses: The place of the page of each key.
            sizes: Bytes of each page.

        Returns:
            For each page whether it is in the store now.
        """

    def attach(self, memory: Sequence[tuple[int, int]]) -> None:
        """Record the memory that pages are copied to and from. Each new cache calls this method once.

        Args:
            memory: The address and the bytes of each piece of memory, which is valid as long as a cache has
                the tier.
        """

    @property
    def closed(self) -> bool:
        """Whether the store is closed."""
        return self._ends.is_set()

    def close(self) -> None:
        """Refuse further calls, and wait until the earlier ones are answered.

        Raises:
            StateError: In the child of a fork.
        """
        self._ends.set()
        if threading.current_thread() in self._threads:
            # It would wait for itself.
            self._queue.abandon()
        else:
            self._queue.close()


def _end(queue: _StoreQueue, ends: threading.Event, threads: list[threading.Thread]) -> None:
    """End the threads of a store that was deleted, or at the end of the program."""
    ends.set()
    queue.abandon()
    if not threading.main_thread().is_alive():
        # No thread may enter the interpreter after this. One in a method of its store may not end in time.
        for thread in threads:
            if thread.ident is not None:  # it was started
                thread.join(1.0)


def _serve(get: Callable[[], _StoreCall | None], store: weakref.ref[Store], ends: threading.Event) -> None:
    """Answer the calls of a store until it is closed, or deleted.

    Args:
        get: Waits for the next call.
        store: The store.
        ends: Returns whether an error of `get` means that the queue takes no more calls.
    """
    while True:
        try:
            call = get()
        except RuntimeError:
            if not ends.is_set():
                _logger.exception("a thread of a store has ended: its calls are not answered")
            return
        here = store()
        if here is not None and call is not None:
            _answer(here, call)
        # No reference is held while waiting for the next call.
        del here, call


def _answer(store: Store, call: _StoreCall) -> None:
    kind, keys, (addresses, sizes) = call.kind, call.keys, call.places
    try:
        if kind == "find":
            present = store.find(keys)
        elif kind == "touch":
            present = store.touch(keys)
        elif kind == "read":
            present = store.read(keys, addresses, sizes)
        else:
            present = store.write(keys, addresses, sizes)
        call.finish([bool(is_present) for is_present in present])
    except BaseException:  # also SystemExit: the thread would end, and later calls have no answer
        _logger.exception("%s: %s of %d pages has failed", type(store).__name__, kind, len(keys))
        call.finish([])
