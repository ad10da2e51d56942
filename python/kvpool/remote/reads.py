"""Reads of peers' rows, each until no byte of it can arrive any more."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from kvpool.remote import messages
from kvpool.remote.errors import TransferError
from kvpool.remote.messages import Introduction, RemoteSlots, Returned

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy.typing as npt

    from kvpool.remote.agent import Agent, Indices, Link, Reading
    from kvpool.remote.marks import Mark

_logger = logging.getLogger("kvpool")

MAX_READS = 4096
"""The most reads of an endpoint at once."""

PATIENCE_S = 1.0
"""Seconds for which other reads may go on before an agent is closed in the middle of them, by default."""

_POOLS, _WORDS = 0, 1
_TIMES = 16


@dataclass(eq=False, slots=True)
class Read:
    """A read of rows and then of the word of their lease, which shows whether they were lent until then.

    Attributes:
        peer: The peer whose rows they are.
        remote: The slots there.
        slots: The slots here, of each pool.
        here: Rows that are written.
        there: Rows that are read.
        mark: Work that must be done before the first byte arrives.
        keep: Whether the lease is still needed when the rows have arrived.
        begun: The time of the call that began it, in seconds of `time.monotonic`.
        step: The state of the read. A read that is "lost" is over when its agent is closed.
        reading: The network's read.
        word: The place for the word of the lease.
        error: The reason why the read has failed. A failed read is over only when `reading` has ended.
    """

    peer: Introduction
    remote: RemoteSlots
    slots: Sequence[Indices]
    here: Indices
    there: Indices
    mark: Mark | None
    keep: bool = False
    begun: float = 0.0
    step: Literal["waiting", "reading", "checking", "lost", "over"] = "waiting"
    reading: Reading | None = None
    word: int = -1
    error: TransferError | None = None

    def is_over(self) -> bool:
        """Return whether no byte arrives any more."""
        return self.step == "over"

    def give_up(self, why: str) -> None:
        """Record that the read has failed. The first reason is kept."""
        if self.error is None:
            self.error = TransferError(why)


class Reads:
    """The reads of an endpoint.

    Invariant: a read is over only if none of its bytes can arrive any more. This holds when the network
    reports that all bytes have arrived, and when the agent of the read is closed. A failed or dropped read is
    not over, since a peer that was suspended may still send. So a read that fails is "lost" until its agent
    is closed. Before an agent is closed, its other reads get time to end: closing it notifies no peer, and
    over TCP, UCX may end the process of a peer that is sending. New reads wait for the next agent, and reads
    that are not over within `patience_s` begin again with it.

    Args:
        new_agent: Makes an agent that reads. This class closes the agent if `may_cut` is true.
        may_cut: Whether agents may be closed. Otherwise a read is over when the network reports it.
        patience_s: Seconds for which other reads may go on before an agent is closed.
    """

    def __init__(
        self, new_agent: Callable[[], Agent], *, may_cut: bool, patience_s: float = PATIENCE_S
    ) -> None:
        self.words: npt.NDArray[np.uint64] = np.zeros(MAX_READS, np.uint64)
        self.completed: int = 0
        self.failed: int = 0
        self.cuts: int = 0
        self.rows: int = 0
        self.runs: int = 0
        self.bytes: int = 0
        self.seconds: float = 0.0
        # Completed reads that took less than 1, 2, 4, ... ms; the last took longer.
        self.times: list[int] = [0] * _TIMES
        self._free = [*range(MAX_READS)]
        self._running: list[Read] = []
        self._new_agent, self._may_cut, self._patience_s = new_agent, may_cut, patience_s
        self._agent: Agent | None = None
        # Peers as the agent reaches them, by their agents.
        self._reached: dict[str, Link] = {}
        # When the agent is closed at the latest, if reads are lost.
        self._cut_at: float | None = None

    def __len__(self) -> int:
        return len(self._running)

    def __iter__(self) -> Iterator[Read]:
        return iter([*self._running])

    def reach(self, peer: Introduction) -> Link:
        """Return the peer as the agent reaches it.

        Raises:
            TransferError: If the peer cannot be reached.
        """
        if self._agent is None:
            self._agent = self._new_agent()
        if peer.agent not in self._reached:
            self._reached[peer.agent] = self._agent.connect(peer.metadata, messages.blocks(peer))
        return self._reached[peer.agent]

    def forget(self, peer: Introduction) -> None:
        """Drop the connection to a peer, unless rows are read from it."""
        if all(read.peer.agent != peer.agent for read in self._running):
            self._reached.pop(peer.agent, None)

    def leave(self, peer: Introduction) -> None:
        """End the reads from a peer that is gone. If any is under way, the agent is closed for it."""
        for read in self._running:
            if read.peer.agent == peer.agent:
                read.give_up(f"{peer.name} is gone")
                if self._may_cut and read.step != "waiting":
                    self._lose(read)
        self.advance()
        self.forget(peer)

    def send(self, peer: Introduction, note: bytes) -> None:
        """Send a note.

        Raises:
            TransferError: If the peer cannot be reached.
        """
        self.reach(peer).send(note)

    def begin(self, read: Read) -> None:
        """Add a read, which begins when the work of its mark is done.

        Raises:
            TransferError: If too many reads run.
        """
        if not self._free:
            raise TransferError(f"{len(self._running)} transfers run, which is the limit")
        read.begun = time.monotonic()
        read.word = self._free.pop()
        self._running.append(read)
        self._advance(read)
        self._cut_off()

    def advance(self) -> None:
        """Advance all reads by the progress of the network."""
        for read in [*self._running]:
            self._advance(read)
        self._cut_off()

    def close(self) -> None:
        """End all reads. When the call returns, no byte arrives any more."""
        self._end_agent()
        for read in [*self._running]:
            read.give_up("the endpoint was closed")
            self._finish(read)

    def _advance(self, read: Read) -> None:
        is_late = read.remote.deadline <= time.monotonic()
        if read.step == "waiting":
            if is_late:
                read.give_up(f"the lease of {read.peer.name} was over before rows were read")
            self._start(read)
        elif read.step != "lost":
            self._follow(read, is_late=is_late)

    def _start(self, read: Read) -> None:
        if read.error is not None:
            self._finish(read)
        elif self._cut_at is not None:
            return  # the read begins with the next agent
        elif not len(read.here):
            self._has_arrived(read)
        elif read.mark is None or read.mark.query():
            self._post(read, "reading", read.here, read.there, b"")

    def _follow(self, read: Read, *, is_late: bool) -> None:
        state = self._state(read)
        if state == "done":
            read.reading = None
            self._has_arrived(read)
        elif state == "failed":
            self._fail(read, f"the connection to {read.peer.name} failed")
        elif is_late:
            read.give_up(f"the lease of {read.peer.name} was over before all rows had arrived")
            if self._may_cut:
                self._lose(read)

    @staticmethod
    def _state(read: Read) -> Literal["running", "done", "failed"]:
        """Return the progress of a read in the network. No reference to the agent is left afterwards."""
        if read.reading is None:
            return "done"
        try:
            state = read.reading.state()
            if state == "done":
                read.reading.release()
        except TransferError:
            return "failed"
        return state

    def _has_arrived(self, read: Read) -> None:
        if read.step == "checking":
            if self.words[read.word] != read.remote.nonce:
                read.give_up(f"the lease of {read.peer.name} was over before all rows had arrived")
            self._finish(read)
            return
        returned = messages.encode_note(Returned(read.remote.word, read.remote.nonce))
        if read.error is None:
            self.words[read.word] = 0
            here = np.array([read.word], np.int32)
            there = np.array([read.remote.word], np.int32)
            self._post(read, "checking", here, there, b"" if read.keep else returned)
            return
        try:
            self.send(read.peer, returned)
        except TransferError as error:
            _logger.debug("%s learns later that its lease is over: %s", read.peer.name, error)
        self._finish(read)

    def _post(
        self, read: Read, step: Literal["reading", "checking"], here: Indices, there: Indices, note: bytes
    ) -> None:
        try:
            link = self.reach(read.peer)
        except TransferError as error:
            read.give_up(str(error))
            self._finish(read)
            return
        read.step = step
        kind = _POOLS if step == "reading" else _WORDS
        failure = None
        try:
            read.reading = link.read(kind, here, there, note)
        except TransferError as error:
            failure = str(error)
        # Outside of the handler: the traceback holds objects that would keep the agent alive.
        if failure is not None:
            self._fail(read, failure)

    def _fail(self, failed: Read, why: str) -> None:
        """End a failed read.

        If its agent may be closed, end all reads from the same peer with it: they would fail one by one.
        """
        failed.give_up(why)
        if not self._may_cut:
            # Rows of the other reads from this peer may still arrive.
            self._finish(failed)
            return
        for read in self._running:
            if read.peer.agent == failed.peer.agent and read.step != "waiting":
                read.give_up(why)
                self._lose(read)

    def _lose(self, read: Read) -> None:
        """Mark a failed read, whose rows may still arrive, as lost: it is over when its agent is closed."""
        read.step = "lost"
        if self._cut_at is None:
            self._cut_at = time.monotonic() + self._patience_s

    def _cut_off(self) -> None:
        """Close the agent of lost reads, when its other reads have ended or their time is over."""
        if self._cut_at is None:
            return
        begun = [read for read in self._running if read.step != "waiting"]
        lost = [read for read in begun if read.step == "lost"]
        if len(lost) < len(begun) and time.monotonic() < self._cut_at:
            return
        self.cuts += 1
        again = sum(read.error is None for read in begun)
        _logger.warning("transfers are cut off: %s; %d begin again", lost[0].error, again)
        self._end_agent()
        for read in begun:
            read.step = "waiting"
            if read.error is not None:
                self._finish(read)

    def _end_agent(self) -> None:
        # Objects of the agent would keep it alive.
        for read in self._running:
            read.reading = None
        self._reached.clear()
        self._cut_at = None
        agent, self._agent = self._agent, None
        if agent is not None and self._may_cut:
            agent.close()

    def _finish(self, read: Read) -> None:
        read.step = "over"
        read.reading = None
        self._running.remove(read)
        self._free.append(read.word)
        if read.error is not None:
            self.failed += 1
            return
        took = time.monotonic() - read.begun
        self.completed += 1
        self.seconds += took
        self.times[min(int(took * 1e3).bit_length(), _TIMES - 1)] += 1
        self.rows += len(read.remote.slots) + len(read.remote.states)
        self.runs += messages.pieces(read.here, read.there)
        self.bytes += messages.bytes_of(read.peer, read.remote)
