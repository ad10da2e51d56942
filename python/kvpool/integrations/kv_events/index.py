"""A router's index of the caches of its workers."""

from __future__ import annotations

import sys
import threading
from array import array
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal, TypedDict

from blake3 import blake3

from kvpool.errors import ArgumentError, ConfigError
from kvpool.integrations.kv_events.messages import (
    MEDIA,
    AllBlocksCleared,
    BlockStored,
    short_key,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvpool.integrations.kv_events.messages import BlockGroup, Event, EventBatch
    from kvpool.typing import IndicesLike, Namespace

_KEY_BYTES: Final = 32
_MASK: Final = (1 << 64) - 1  # SGLang's ints are signed

# A page has a bit for each tier. A medium that is not named is the device; others are below the host.
_BITS: Final = {MEDIA["device"]: 1, MEDIA["host"]: 2, "CPU_PINNED": 2, None: 1}
_STORE: Final = 4
_TIERS: Final = {None: 7, "device": 1, "host": 2, "store": _STORE}

# The bits of pages come first, then those of the blocks of each group that end with the page.
_TIER_BITS: Final = 3
_MOST_GROUPS: Final = 63


@dataclass(frozen=True)
class _Kind:
    """The kind of a worker's blocks.

    Attributes:
        page_size: The tokens of the pages that keys are of.
        has_ints: Whether keys are ints.
        sizes: The tokens of a block, by the number of the group; `None` for pages.
        groups: All groups; none if the worker has not named them.
    """

    page_size: int
    has_ints: bool
    sizes: dict[int | None, int]
    groups: tuple[BlockGroup, ...]

    def mask(self, bits: int) -> int:
        """Return the bits of pages that count as cached, of these bits of tiers."""
        if not self.groups:  # which group has all pages is not known
            return sum(bits << _shift(group) for group in self.sizes)
        full = (
            number
            for number, group in enumerate(self.groups)
            if (group.kind, group.block_size) == ("full", self.page_size)
        )
        return bits << _shift(next(full, None))


def _shift(group: int | None) -> int:
    return 0 if group is None else _TIER_BITS * (1 + group)


class IndexStats(TypedDict):
    """Statistics of a `PrefixIndex`."""

    workers: int
    pages: int
    left_out: int


def page_keys(tokens: IndicesLike, page_size: int, namespace: Namespace = None) -> Iterator[bytes]:
    """Return the keys of a prompt's whole pages, as `Stored.pages` has them, each computed on demand.

    Args:
        tokens: Token ids: ints, or a tensor or array.
        page_size: The page size of the cache, in tokens.
        namespace: A str, bytes or an int; `None` is a namespace of its own.

    Raises:
        ConfigError: If a token is outside of [0, 2**31), or `page_size` is below 1.
        TypeError: If `tokens` are no ints, or `namespace` is of another type.
    """
    if page_size < 1:
        raise ConfigError(f"page_size is {page_size}; it must be at least 1")
    return _chain(_bytes_of(tokens), page_size, _root(page_size, namespace))


class PrefixIndex:
    """An index of the pages that each worker has cached, with which a router finds the longest cached prefix.

    A worker with an `ArenaPrefixCache` names the groups of its layout. Its prefixes end where every group can
    go on, as a match of its cache does. Of a worker that sends events of groups without naming them, as vLLM
    does, a page counts as cached as long as any group has it.

    The index has only pages that a worker has published. It lacks pages that were published before the router
    subscribed and are not replayed, and the pages of a worker above `max_pages`. A page takes 100 to 150
    bytes, and 32 more with three groups or more.

    All calls are atomic and thread-safe.

    Args:
        max_pages: The most pages of a worker in the index. Further pages are left out, and counted.

    Raises:
        ConfigError: If `max_pages` is below 1.
    """

    def __init__(self, *, max_pages: int = 1 << 20) -> None:
        if max_pages < 1:
            raise ConfigError(f"max_pages is {max_pages}; it must be at least 1")
        self._max_pages = max_pages
        self._workers: dict[str, _Pages] = {}
        self._left_out = 0
        self._lock = threading.Lock()

    def apply(self, worker: str, batch: EventBatch) -> None:
        """Apply the events of a batch. A new worker is added.

        Args:
            worker: The name of the worker.
            batch: The batch that follows the last one of this worker.

        Raises:
            ConfigError: If the pages of a worker, or the blocks of a group, differ in size or are named by
                both bytes and ints, their tokens do not fit, bytes are not 32, or there is no layout of
                such groups. Nothing is changed.
        """
        with self._lock:
            pages = self._workers.get(worker) or _Pages()
            kinds = []
            kind = pages.kind
            for event in batch.events:
                kind = _check(event, kind)
                kinds.append(kind)
            self._workers[worker] = pages
            for event, kind in zip(batch.events, kinds, strict=True):
                self._left_out += pages.apply(event, kind, self._max_pages)

    def match(
        self,
        tokens: IndicesLike,
        namespace: Namespace = None,
        *,
        tier: Literal["device", "host", "store"] | None = None,
    ) -> dict[str, int]:
        """Return how many tokens of a prompt each worker has, in whole pages from the first on.

        A worker that names its groups has those up to the last place where every group can go on. The call
        computes one hash per page, up to the longest match of any worker.

        Args:
            tokens: Token ids of the prompt: ints, or a tensor or array.
            namespace: A str, bytes or an int; `None` is a namespace of its own.
            tier: The only tier whose pages count. By default pages of all tiers count.

        Returns:
            The number of tokens for each worker, also for workers that have none.

        Raises:
            ArgumentError: If a token is outside of [0, 2**31), or there is no such tier.
            TypeError: If `tokens` are no ints, or `namespace` is of another type.
        """
        if tier not in _TIERS:
            raise ArgumentError(f"there is no tier {tier!r}, only 'device', 'host' and 'store'")
        bits = _TIERS[tier]
        content = _bytes_of(tokens)
        _root(1, namespace)  # raises for an invalid namespace even without workers
        with self._lock:
            lengths = dict.fromkeys(self._workers, 0)
            for size in {pages.kind.page_size for pages in self._workers.values() if pages.kind}:
                having = [
                    (worker, pages.tiers, pages.kind.has_ints, pages.kind.mask(bits), _walk(pages.kind, bits))
                    for worker, pages in self._workers.items()
                    if pages.kind and pages.kind.page_size == size
                ]
                for number, key in enumerate(_chain(content, size, _root(size, namespace)), 1):
                    short = short_key(key)
                    having = [
                        (worker, tiers, has_ints, mask, walk)
                        for worker, tiers, has_ints, mask, walk in having
                        if tiers.get(short if has_ints else key, 0) & mask
                    ]
                    if not having:
                        break
                    for worker, tiers, has_ints, _, walk in having:
                        if walk is None or walk.can_go_on(number * size, tiers[short if has_ints else key]):
                            lengths[worker] = number * size
        return lengths

    def clear(self, worker: str) -> None:
        """Drop the pages of a worker, and keep the worker."""
        with self._lock:
            self._workers[worker] = _Pages()

    def remove(self, worker: str) -> None:
        """Drop a worker and its pages."""
        with self._lock:
            self._workers.pop(worker, None)

    def stats(self) -> IndexStats:
        """Return the number of `workers`, of their `pages`, and of those `left_out` so far."""
        with self._lock:
            pages = sum(len(pages.tiers) for pages in self._workers.values())
            return {"workers": len(self._workers), "pages": pages, "left_out": self._left_out}


class _Walk:
    """A walk over the pages of a prompt, from the first one on, which a worker has."""

    __slots__ = ("_begins", "_groups", "_has_states")

    def __init__(self, kind: _Kind, bits: int) -> None:
        self._groups = [(number, group, bits << _shift(number)) for number, group in enumerate(kind.groups)]
        self._has_states = any(group.kind == "state" for group in kind.groups)
        # For each group, the first token from which on all blocks are there; None once a sink is not.
        self._begins: list[int | None] = [0] * len(kind.groups)

    def can_go_on(self, end: int, page: int) -> bool:
        """Take the next page, which ends behind `end` tokens. Return whether every group can go on there."""
        can = True
        for number, group, bits in self._groups:
            size = group.block_size
            if group.kind == "state":
                can = can and page & bits != 0
                continue
            if end % size:
                # What is known of an entry that is not whole is in a state.
                can = can and self._has_states
            elif not page & bits:
                self._begins[number] = end if end - size >= group.sinks else None
            begin = self._begins[number]
            can = can and begin is not None and begin <= (end - _reach(group, end)) // size * size
        return can


def _walk(kind: _Kind, bits: int) -> _Walk | None:
    """Return a walk over pages with groups, of these bits of tiers; `None` where only pages count."""
    return _Walk(kind, bits) if kind.groups else None


def _reach(group: BlockGroup, end: int) -> int:
    """Return how many of the tokens up to `end` the next one sees, sinks apart."""
    if not group.tokens:
        return end
    return min(end, group.tokens - 1) if group.kind == "window" else end % group.tokens


class _Pages:
    """The pages of a worker."""

    __slots__ = ("kind", "tiers")

    def __init__(self) -> None:
        self.kind: _Kind | None = None
        self.tiers: dict[bytes | int, int] = {}

    def apply(self, event: Event, kind: _Kind | None, max_pages: int) -> int:
        """Apply an event after which the pages are of this kind, and return how many pages were left out."""
        self.kind = kind
        tiers = self.tiers
        if isinstance(event, AllBlocksCleared):
            tiers.clear()
            return 0
        bit = _BITS.get(event.medium, _STORE) << _shift(event.group_idx)
        left_out = 0
        if isinstance(event, BlockStored):
            for key in map(_normal, event.block_hashes):
                if key in tiers:
                    tiers[key] |= bit
                elif len(tiers) < max_pages:
                    tiers[key] = bit
                else:
                    left_out += 1
        else:
            for key in map(_normal, event.block_hashes):
                rest = tiers.get(key, 0) & ~bit
                if rest:
                    tiers[key] = rest
                else:
                    tiers.pop(key, None)
        return left_out


def _normal(key: bytes | int) -> bytes | int:
    return key & _MASK if isinstance(key, int) else key


def _check(event: Event, kind: _Kind | None) -> _Kind | None:
    """Return the kind of a worker's blocks after an event, or raise if the event does not fit."""
    if isinstance(event, AllBlocksCleared):
        return None
    for key in event.block_hashes:
        if isinstance(key, bytes) and len(key) != _KEY_BYTES:
            raise ArgumentError(f"a block hash has {_KEY_BYTES} bytes, not {len(key)}")
    if event.group_idx is not None and not 0 <= event.group_idx < _MOST_GROUPS:
        raise ArgumentError(f"group {event.group_idx} is outside of [0, {_MOST_GROUPS})")
    if not isinstance(event, BlockStored):
        return kind
    if not event.block_hashes or event.block_size < 1:
        raise ArgumentError(f"{len(event.block_hashes)} blocks of {event.block_size} tokens were stored")
    if len(event.token_ids) != len(event.block_hashes) * event.block_size:
        raise ArgumentError(
            f"{len(event.token_ids)} tokens are not those of {len(event.block_hashes)} blocks of "
            f"{event.block_size}"
        )
    new = _kind_after(event, kind)
    if any(isinstance(key, int) is not new.has_ints for key in event.block_hashes) or (
        new.sizes.get(event.group_idx) != event.block_size
    ):
        raise ArgumentError("the blocks of a worker differ in size, or are named by both bytes and ints")
    return new


def _kind_after(event: BlockStored, kind: _Kind | None) -> _Kind:
    """Return the kind of a worker's blocks after some were stored, if they fit."""
    group, size = event.group_idx, event.block_size
    if event.groups is not None:
        named = _named(event)
        if kind is not None and kind != named:
            raise ArgumentError("the groups of a worker have changed")
        return named
    if kind is None:
        return _Kind(size, isinstance(event.block_hashes[0], int), {group: size}, ())
    if kind.groups or group in kind.sizes:
        return kind
    return replace(kind, page_size=min(kind.page_size, size), sizes={**kind.sizes, group: size})


def _named(event: BlockStored) -> _Kind:
    """Return the kind of blocks whose groups are named, or raise if they are none of a layout."""
    page_size, groups = event.page_size or 0, event.groups or []
    if page_size < 1 or not 0 < len(groups) <= _MOST_GROUPS:
        raise ArgumentError(f"there is no layout of {len(groups)} groups with pages of {page_size} tokens")
    for group in groups:
        least = {"window": 1, "chunk": 1, "full": 0, "state": 0}.get(group.kind, -1)
        tokens = 0 if group.tokens is None else group.tokens
        is_whole = group.block_size > 0 and group.block_size % page_size == 0
        if least < 0 or tokens < least or (least == 0 and tokens) or group.sinks < 0 or not is_whole:
            raise ArgumentError(f"with pages of {page_size} tokens there is no {group}")
    sizes: dict[int | None, int] = {number: group.block_size for number, group in enumerate(groups)}
    has_ints = isinstance(event.block_hashes[0], int)
    return _Kind(page_size, has_ints, {None: page_size, **sizes}, tuple(groups))


def _bytes_of(tokens: IndicesLike) -> bytes:
    """Return the token ids as int32 in little endian."""
    values: Any = tokens
    if not hasattr(tokens, "tolist") and hasattr(tokens, "__array__"):  # an array of Arrow
        values = tokens.__array__()
    if hasattr(values, "tolist"):
        values = values.tolist()
    try:
        content = array("i", iter(values))
    except OverflowError:
        content = array("i", [-1])
    if content and min(content) < 0:
        raise ArgumentError("a token is outside of [0, 2**31)")
    if sys.byteorder == "big":
        content.byteswap()
    return content.tobytes()


def _root(page_size: int, namespace: Namespace) -> bytes:
    """Return the bytes that stand for the key before the first page."""
    if namespace is None:
        kind, name = 0, b""
    elif isinstance(namespace, int):
        kind, name = 1, b"%d" % namespace
    elif isinstance(namespace, str):
        kind, name = 2, namespace.encode()
    elif isinstance(namespace, bytes):
        kind, name = 3, namespace
    else:
        raise TypeError(f"a namespace is a str, bytes, an int or None, not {type(namespace).__name__}")
    return blake3(page_size.to_bytes(8, "little") + bytes([kind]) + name).digest()


def _chain(content: bytes, page_size: int, key: bytes) -> Iterator[bytes]:
    step = 4 * page_size
    for start in range(0, len(content) - step + 1, step):
        key = blake3(key + content[start : start + step]).digest()
        yield key
