"""The order in which the batches of one worker are applied, with replays of missed ones."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from blake3 import blake3

from kvpool.errors import ConfigError
from kvpool.integrations.kv_events.messages import MAX_BYTES, decode

if TYPE_CHECKING:
    from kvpool.integrations.kv_events.index import PrefixIndex

_logger = logging.getLogger("kvpool")


class Feed:
    """The batches of a worker for an index, from its messages and from replays.

    The numbers of messages are consecutive. A lower number means that the worker has restarted. A missing
    message is taken from a replay, which begins with the last applied batch: this batch shows whether the
    worker is still the same. If there is no replay, or it does not close the gap, the entries of the worker
    are dropped. So the index never has a page that the worker did not have when it sent the last applied
    batch.

    While `needs_replay` is true, and until `replay_ended`, pass no messages.

    Args:
        index: The index that batches go to.
        worker: The name of the worker in the index.
        can_replay: Whether the worker has a replay endpoint.
        max_bytes: The largest batch.
    """

    def __init__(
        self, index: PrefixIndex, worker: str, *, can_replay: bool, max_bytes: int = MAX_BYTES
    ) -> None:
        self.needs_replay: bool = can_replay
        self.applied: int = 0
        self.refused: int = 0
        self.restarts: int = 0
        self.drops: int = 0
        self._index = index
        self._worker = worker
        self._can_replay = can_replay
        self._max_bytes = max_bytes
        # The number of the last applied batch, and its digest. -1: none yet; None: any number may be next.
        self._last: int | None = -1 if can_replay else None
        self._digest = b""
        self._seen: int | None = None  # the number of the last message
        self._held: tuple[int, bytes] | None = None  # a message behind a gap
        self._is_same = True  # whether the replay is known to come from the same start of the worker
        self._is_other = False  # whether it is known to come from another start
        self._lacks = False  # whether a replay without an end mark lacks a batch
        index.clear(worker)

    def message(self, number: int, payload: bytes) -> None:
        """Take the next message."""
        if self._seen is not None and number <= self._seen:
            self._begin_anew()
        self._seen = number
        last = self._last
        if last is None or number == last + 1:
            self._apply(number, payload)
        elif number > last:
            if self._can_replay:
                self._held = number, payload
                self.needs_replay = True
            else:
                self._drop()
                self._apply(number, payload)

    def reconnected(self) -> None:
        """Record a reconnection: messages may be missing, and the worker may have restarted."""
        self._seen = self._held = None
        if self._can_replay:
            self.needs_replay = True
        elif self._last is not None:
            self._drop()

    def check(self) -> None:
        """Request a replay, in case the latest messages were missed."""
        self.needs_replay = self._can_replay

    def begin_replay(self) -> int:
        """Return the number at which a new replay begins. An earlier replay that has not ended is dropped."""
        self.needs_replay = self._is_other = False
        if self._lacks:
            self._lacks = False
            self._drop()
        if self._last is None:
            self._last = -1
        self._is_same = self._last < 0
        return max(self._last, 0)

    def replayed(self, number: int, payload: bytes) -> None:
        """Take the next batch of a replay."""
        if self._is_other:
            return
        last = self._last
        if not self._is_same:
            self._is_same = True
            if number == last:
                if blake3(payload).digest() != self._digest:
                    self._is_other = True
                return
            self._drop()  # the last applied batch is not in the replay, for comparison
            last = None
        if last is not None and number <= last:
            return
        if last is not None and number != last + 1:
            self._drop()
        self._apply(number, payload)

    def replay_ended(self, *, is_whole: bool = True) -> None:
        """Record the end of a replay.

        Args:
            is_whole: Whether the end mark of the replay was received.
        """
        held, self._held = self._held, None
        is_empty, self._is_same = not self._is_same, True
        if self._is_other or (is_empty and is_whole):
            self._is_other = False
            self._begin_anew()
            self.needs_replay = True
        elif not is_whole:
            self._lacks = True
            if is_empty:
                self._drop()
        if self.needs_replay:  # the replay has this message, too
            return
        if held is not None:
            number, payload = held
            if self._last is not None and number > self._last + 1:
                self._drop()
            if self._last is None or number == self._last + 1:
                self._apply(number, payload)

    def _apply(self, number: int, payload: bytes) -> None:
        self._last = number
        self._digest = blake3(payload).digest()
        try:
            self._index.apply(self._worker, decode(payload, max_bytes=self._max_bytes))
        except ConfigError as error:
            level = logging.DEBUG if self.refused else logging.WARNING
            _logger.log(level, "batch %d of worker %s is refused: %s", number, self._worker, error)
            self.refused += 1
            self._index.clear(self._worker)
        else:
            self.applied += 1

    def _begin_anew(self) -> None:
        """Drop the entries of a restarted worker, whose numbers begin with 0 again."""
        self.restarts += 1
        self._index.clear(self._worker)
        self._last = -1 if self._can_replay else None

    def _drop(self) -> None:
        """Drop the entries of the worker, since the missing batches are not available."""
        self.drops += 1
        self._index.clear(self._worker)
        self._last = None
