"""Checks of a cluster's messages, whatever their bytes are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpool import ConfigError
from kvpool.cluster import ChannelError, messages
from kvpool.cluster.messages import Abort, Connect, Disconnect, Join, Refused, Report, Work

if TYPE_CHECKING:
    from collections.abc import Callable

SAMPLES: list[messages.ToRouter | messages.ToWorker] = [
    Join("prefill-0", "prefill", {"model": "m", "seed": 3}, b"metadata", 64, "tcp://127.0.0.1:1", None),
    Refused("its seed is 7"),
    Connect("prefill-0", b"metadata"),
    Disconnect("prefill-0"),
    Work(7, [1, 2, 3], [4], 9, [5], 0.7, 5, 0.9, 11, "a", None, True),
    Work(8, [1], [], 2, namespace_bytes=b"b", peer="prefill-0", ticket=b"ticket"),
    Abort(7),
    Report([(7, [4, 5])], [(7, b"ticket"), (8, None)], [(9, "too long")], {"running": 1}, [7, 8]),
]

_KINDS: list[Callable[[bytes], messages.ToRouter | messages.ToWorker]] = [
    messages.from_worker,
    messages.from_router,
]


def check_payload(payload: bytes) -> int:
    """Reads `payload` as what each side may say, and sends that again; how often it is something."""
    found = 0
    for read in _KINDS:
        try:
            message = read(payload)
        except ChannelError as error:
            assert str(error).startswith("a message cannot be used: ")  # noqa: PT017 - not only for pytest
            continue
        found += 1
        assert repr(read(messages.encode(message))) == repr(message)
        if isinstance(message, Work):
            assert message.number >= 0
            assert all(0 <= token < 1 << 31 for token in message.prompt)
            try:
                message.sampling()
            except ConfigError as error:
                assert "must be at least" in str(error)  # noqa: PT017
    return found
