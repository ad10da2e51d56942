"""vLLM's format of KV events: MessagePack, an array for a batch and a tagged map for each event."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias

import msgspec

from kvpool._kvpool import Removed, Stored
from kvpool._messagepack import refuse_extension
from kvpool.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from kvpool._kvpool import ArenaPrefixCache, Cleared
    from kvpool.typing import Namespace

MAX_BYTES: Final = 16 << 20
"""The largest payload that is decoded by default."""

BATCH_TOKENS: Final = 1 << 16
"""The most tokens, or pages, of a batch that is sent: 3 MB with pages of one token."""

MEDIA: Final = {"device": "GPU", "host": "CPU", "store": "STORAGE"}
"""vLLM's names of the tiers."""

MAX_LISTED: Final = 1 << 20
"""The most entries of a list in a batch: blocks, tokens, events."""

KINDS: Final = {
    "full": "full_attention",
    "window": "sliding_window",
    "chunk": "chunked_local_attention",
    "state": "mamba",
}
"""vLLM's names of the kinds of groups."""

_INTS: Final = range(-(1 << 63), 1 << 64)  # of MessagePack
_SHORT_BYTES: Final = 8


_LISTED: Final = msgspec.Meta(max_length=MAX_LISTED)
_FEW: Final = msgspec.Meta(max_length=256)  # of what belongs to one block
_Hashes: TypeAlias = Annotated[list[bytes | int], _LISTED]
_Extras: TypeAlias = Annotated[tuple[Any, ...], _FEW]


class BlockGroup(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A group of a layout: layers whose blocks live and die together.

    Attributes:
        name: Its name.
        kind: "full", "window", "chunk" or "state".
        block_size: Tokens of a block: a page, or a whole entry of several pages. That of a state is a page.
        tokens: Tokens of a window or chunk.
        sinks: Tokens at the beginning that a window or chunk keeps.
    """

    name: str
    kind: str
    block_size: int
    tokens: int | None = None
    sinks: int = 0


# The order of the fields is part of the format: vLLM can also send events as arrays.
class BlockStored(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Consecutive blocks were stored. A block is a page of kvpool, or a unit of a group of an arena.

    Attributes:
        block_hashes: Their keys: 32 bytes, or 64 bits as an int. That of a unit is the key of the page that
            it ends with, that of a snapshot of a state the key of the page at whose end it is.
        parent_block_hash: The key of the block before them; `None` at the beginning of a prompt.
        token_ids: The tokens of all blocks.
        block_size: Tokens of a block.
        lora_id: A field of vLLM; kvpool sends `None`.
        medium: The tier that has them: "GPU", "CPU" or "STORAGE".
        lora_name: A field of vLLM; kvpool sends `None`.
        extra_keys: For each block, further values that its key depends on. For the first block of a prompt
            this is the namespace in kvpool, and the `cache_salt` of a request in vLLM.
        group_idx: The number of the group of the blocks; `None` for pages.
        kv_cache_spec_kind: vLLM's name of the kind of the group.
        kv_cache_spec_sliding_window: The tokens of its window.
        locality: This and the next ones are of vLLM, and not sent by kvpool.
        page_size: Tokens of the pages that keys are of. This and the next one are fields of kvpool.
        groups: All groups, in the order of their numbers. The first blocks of a batch have them, and the
            first ones behind a clear.
    """

    block_hashes: _Hashes
    parent_block_hash: bytes | int | None
    token_ids: Annotated[list[int], _LISTED]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: Annotated[list[_Extras | None], _LISTED] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    lookahead_token_ids: Annotated[list[Annotated[list[int], _FEW]], _LISTED] | None = None
    page_size: int | None = None
    groups: Annotated[list[BlockGroup], _FEW] | None = None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Blocks were removed.

    Attributes:
        block_hashes: Their keys.
        medium: The tier that had them.
        group_idx: The number of the group of the blocks; `None` for pages.
        locality: This and the next one are of vLLM, and not sent by kvpool.
    """

    block_hashes: _Hashes
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """The cache is empty, or events were lost: readers drop all pages."""


Event: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The changes of a cache in one step of an engine.

    Attributes:
        ts: The time, in seconds since 1970.
        events: The events, in order.
        data_parallel_rank: The rank of the engine.
    """

    ts: float
    events: Annotated[list[Event], _LISTED]
    data_parallel_rank: int | None = None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(EventBatch, ext_hook=refuse_extension)


def encode(batch: EventBatch) -> bytes:
    """Return a batch as the payload of a message."""
    return _encoder.encode(batch)


def decode(payload: bytes, *, max_bytes: int = MAX_BYTES) -> EventBatch:
    """Return the batch in a payload of kvpool or vLLM.

    Args:
        payload: The last part of a message.
        max_bytes: The largest payload that is decoded.

    Raises:
        ArgumentError: If the payload is larger, or is not a batch. Unknown fields of an event are ignored.
    """
    if len(payload) > max_bytes:
        raise ArgumentError(f"a batch of {len(payload)} bytes is larger than {max_bytes}")
    try:
        return _decoder.decode(payload)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ArgumentError(f"not a batch of KV events: {error}") from error


def short_key(key: bytes) -> int:
    """Return the last 64 bits of a key, which stand for the key where hashes are ints, as in vLLM."""
    return int.from_bytes(key[-_SHORT_BYTES:], "big")


def groups_of(cache: ArenaPrefixCache) -> list[BlockGroup]:
    """Return the groups of a cache's layout."""
    layout = cache.arena.layout
    return [
        BlockGroup(
            group.name,
            group.kind,
            layout.page_size if group.kind == "state" else max(layout.page_size, group.stride),
            group.tokens,
            group.sinks,
        )
        for group in layout.groups
    ]


def batches(
    events: Iterable[Stored | Removed | Cleared],
    page_size: int,
    *,
    int_hashes: bool = False,
    groups: Sequence[BlockGroup] = (),
) -> Iterator[list[Event]]:
    """Yield a cache's events in vLLM's format, in parts for one message each.

    Args:
        events: The events of `PrefixCache.events` or `ArenaPrefixCache.events`.
        page_size: The page size of its allocator or layout, in tokens.
        int_hashes: Whether keys are ints of 64 bits.
        groups: The groups of the layout.
    """
    batch: list[Event] = []
    room = BATCH_TOKENS
    numbers = {group.name: number for number, group in enumerate(groups)}
    has_groups = False
    for event in events:
        for part, size in _parts(event, numbers, int_hashes=int_hashes):
            if batch and size > room:
                yield batch
                batch, room, has_groups = [], BATCH_TOKENS, False
            if isinstance(part, AllBlocksCleared):
                has_groups = False
            elif isinstance(part, BlockStored) and groups and not has_groups:
                part.page_size, part.groups, has_groups = page_size, [*groups], True
            batch.append(part)
            room -= size
    if batch:
        yield batch


def _parts(
    event: Stored | Removed | Cleared, numbers: dict[str, int], *, int_hashes: bool
) -> Iterator[tuple[Event, int]]:
    """Yield the pieces of an event that fit into a batch, and the size of each."""
    if not isinstance(event, Stored | Removed):
        yield AllBlocksCleared(), 1
        return
    hashes: list[bytes | int] = [*map(short_key, event.pages)] if int_hashes else [*event.pages]
    medium = MEDIA[event.tier]
    group = None if event.group is None else numbers[event.group]
    if isinstance(event, Removed):
        for start in range(0, len(hashes), BATCH_TOKENS):
            part = hashes[start : start + BATCH_TOKENS]
            yield BlockRemoved(part, medium, group), len(part)
        return
    key = event.parent
    parent: bytes | int | None = short_key(key) if int_hashes and key is not None else key
    tokens, namespace = event.tokens, event.namespace
    size = len(tokens) // len(hashes)
    step = max(1, BATCH_TOKENS // size)
    for start in range(0, len(hashes), step):
        part = hashes[start : start + step]
        ids = tokens[start * size : (start + step) * size]
        stored = BlockStored(part, parent, ids, size, None, medium, None, group_idx=group)
        if event.kind is not None:
            stored.kv_cache_spec_kind = KINDS[event.kind]
            if event.kind == "window":
                stored.kv_cache_spec_sliding_window = event.window
        if parent is None and namespace is not None:
            stored.extra_keys = [(_salt(namespace),), *[None] * (len(part) - 1)]
        yield stored, len(ids)
        parent = part[-1]


def _salt(namespace: Namespace) -> Namespace:
    """Return a namespace as a type that MessagePack supports."""
    return str(namespace) if isinstance(namespace, int) and namespace not in _INTS else namespace
