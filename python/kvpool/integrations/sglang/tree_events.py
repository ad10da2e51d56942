"""KV events of SGLang's cache: its recorder makes the events and hashes pages; the tree keeps the hashes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.mem_cache.events import KVCacheEventRecorder
    from sglang.srt.mem_cache.radix_cache import RadixKey

    from kvpool._kvpool import HybridTree
    from kvpool.typing import Namespace

__all__ = ["TreeEvents"]

_HASH_BYTES = 32


class TreeEvents:
    """The events of a tree, for SGLang's recorder.

    Args:
        recorder: SGLang's recorder.
        tree: The tree, which keeps the hashes of its pages.
        page_size: Tokens in a page.
    """

    def __init__(self, recorder: KVCacheEventRecorder, tree: HybridTree, page_size: int) -> None:
        self._recorder, self._tree, self._page_size = recorder, tree, page_size

    def record_added(self, node: int, start: int, end: int, key: RadixKey, session: str | None) -> None:
        """Record tokens that are newly cached."""
        before = self._tree.hash_at(node, start)
        pages = key[start:end]
        # Of the pages before it counts whether there are any, and in which namespace.
        parent = _PagesOfEvent(pages if start else _KeyOfEvent(0))
        if before is not None:
            # Only what comes before every prompt is without a parent.
            parent.parent = _PagesOfEvent(_KeyOfEvent(0))
            parent.name([before.hex()])
        added = _PagesOfEvent(pages, parent)
        if added.is_named_apart:
            # Storage would name them otherwise, and is not there.
            added.hash_value = []
        self._recorder.record_store(added, session_id=session)
        hashes = added.event_hash_value if added.is_named_apart else added.hash_value
        self._tree.set_hashes(node, start, bytes.fromhex("".join(hashes or ())))

    def record_removed(self, namespace: Namespace | tuple[Namespace, ...], hashes: bytes) -> None:
        """Record the removal of a node."""
        extra_key, cache_salt = namespace[:2] if isinstance(namespace, tuple) else (namespace, None)
        length = len(hashes) // _HASH_BYTES * self._page_size
        removed = _PagesOfEvent(_KeyOfEvent(length, extra_key, cache_salt))
        removed.name([hashes[at : at + _HASH_BYTES].hex() for at in range(0, len(hashes), _HASH_BYTES)])
        self._recorder.record_remove(removed)


class _KeyOfEvent:
    """A key of pages with a known number of tokens."""

    def __init__(self, length: int, extra_key: Namespace = None, cache_salt: Namespace = None) -> None:
        self._length, self.extra_key, self.cache_salt = length, extra_key, cache_salt

    def __len__(self) -> int:
        return self._length


class _PagesOfEvent:
    """A node with the attributes that SGLang's recorder reads."""

    def __init__(self, key: RadixKey | _KeyOfEvent, parent: _PagesOfEvent | None = None) -> None:
        self.key = key
        self.parent = parent
        self.hash_value: list[str] | None = None
        self.event_hash_value: list[str] | None = None

    @property
    def is_named_apart(self) -> bool:
        """Whether events and storage use different hashes for the pages."""
        return self.key.extra_key is not None or self.key.cache_salt is not None

    def name(self, hashes: list[str]) -> None:
        """Set the hashes of events and of storage."""
        self.hash_value = self.event_hash_value = hashes
