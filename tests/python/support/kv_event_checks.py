"""Checks of whatever arrives as KV events: it is a batch, or a ConfigError."""

from __future__ import annotations

from kvpool import ConfigError
from kvpool.integrations.kv_events import (
    AllBlocksCleared,
    BlockGroup,
    BlockRemoved,
    BlockStored,
    EventBatch,
    PrefixIndex,
    decode,
    encode,
)

MAX_BYTES = 4096

KEYS: list[bytes | int] = [bytes([number]) * 32 for number in range(3)]

SAMPLES = [
    EventBatch(
        1.5,
        [
            BlockStored(KEYS[:2], None, [1, 2, 3, 4], 2, None, "GPU", None, [("a",), None]),
            BlockStored(KEYS[2:], KEYS[1], [5, 6], 2, None, "CPU", None),
            BlockRemoved(KEYS[2:], "CPU"),
        ],
        3,
    ),
    EventBatch(0.0, [AllBlocksCleared(), BlockRemoved([], None)]),
    EventBatch(
        0.0,
        [
            AllBlocksCleared(),
            BlockStored(
                KEYS[:2],
                None,
                [1, 2],
                1,
                None,
                "GPU",
                None,
                group_idx=0,
                page_size=1,
                groups=[
                    BlockGroup("full", "full", 1),
                    BlockGroup("window", "window", 2, 3, 1),
                    BlockGroup("chunk", "chunk", 1, 4),
                    BlockGroup("state", "state", 1),
                ],
            ),
            BlockStored(KEYS[1:2], None, [1, 2], 2, None, "GPU", None, group_idx=1),
            BlockRemoved(KEYS[:1], "GPU", 3),
        ],
    ),
    EventBatch(
        2.0,
        [
            BlockStored([7, 1 << 63], -1, [8, 9], 1, 4, None, "lora", [(("mm", 3), b"\xff", None), None]),
            BlockStored([9], 7, [1], 1, None, None, None, None, 0, "full", 4096, "LOCAL", "p", "s", [[2]]),
        ],
    ),
]


def check_payload(payload: bytes) -> EventBatch | None:
    """Decodes and indexes a payload; None when it is refused as it should be."""
    try:
        batch = decode(payload, max_bytes=MAX_BYTES)
    except ConfigError as error:
        assert str(error)  # noqa: PT017 - not only for pytest
        return None
    assert len(payload) <= MAX_BYTES
    # NaN is a time, too, and no two of them are equal.
    assert repr(decode(encode(batch))) == repr(batch)
    check_index(batch)
    return batch


def check_index(batch: EventBatch) -> None:
    index = PrefixIndex(max_pages=4)
    index.apply("a", EventBatch(0.0, [BlockStored(KEYS[:1], None, [1], 1, None, None, None)]))
    before = index.stats()
    try:
        index.apply("a", batch)
    except ConfigError:
        assert index.stats() == before
    assert index.stats()["pages"] <= 4
    assert index.match([1, 2, 3, 4])["a"] in range(5)
