"""Checks of peers' messages, whatever their bytes are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpool import ConfigError
from kvpool.remote import messages

if TYPE_CHECKING:
    from collections.abc import Callable


def check_message(content: bytes) -> int:
    """Reads `content` as every kind of message; how many it is. What was read is the same when it is sent."""
    found = 0
    for read, write in _KINDS:
        refused = ""
        try:
            message = read(content)
        except ConfigError as error:
            refused = str(error)
        if refused:
            assert refused.startswith("a peer's message cannot be used: ")
            assert len(refused) < 400
        else:
            found += 1
            assert repr(read(write(message)))[:1000] == repr(message)[:1000]
    return found


def _checked_introduction(content: bytes) -> messages.Introduction:
    introduction = messages.decode_introduction(content)
    messages.difference(introduction, introduction._replace(name="other"))
    assert all(number < 1 << 31 for number in introduction.rows.values())
    return introduction


def _checked_ticket(content: bytes) -> messages.RemoteSlots:
    remote = messages.decode_ticket(content)._replace(deadline=0.0)
    assert len(remote.slots) <= messages.MAX_ROWS
    assert (remote.slots >= 1).all()
    assert (remote.states >= 1).all()
    return remote


_KINDS: list[tuple[Callable[[bytes], object], Callable[..., bytes]]] = [
    (_checked_introduction, messages.encode_introduction),
    (_checked_ticket, messages.encode_ticket),
    (messages.decode_note, messages.encode_note),
]
