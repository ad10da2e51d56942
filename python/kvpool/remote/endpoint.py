"""Slots that are lent to peers, and transfers into slots.

Bytes move one way only: an endpoint reads from a peer into its own memory. A write asks the peer to read. So
no process writes to the memory of another, and whether bytes may still arrive in a slot is decided in the
process that owns it: only its own reads bring them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from kvpool._closing import Closing
from kvpool.errors import ArgumentError
from kvpool.remote import messages
from kvpool.remote.core import Core
from kvpool.remote.errors import TransferError
from kvpool.remote.messages import Offered, RemoteSlots
from kvpool.remote.reads import PATIENCE_S

if TYPE_CHECKING:
    from kvpool._kvpool import GDNPool, KVPool
    from kvpool.remote.core import NewAgent
    from kvpool.remote.leases import Lease, LeaseKey
    from kvpool.remote.messages import Introduction
    from kvpool.remote.reads import Read
    from kvpool.remote.rows import Rows
    from kvpool.typing import EndpointStats, IndicesLike


class SlotLease:
    """Slots that a peer may use for some time, made by `Endpoint.lend`.

    A lease can serve as the fence `after` of `TokenToKVPoolAllocator.free`. The slots are then handed out
    again when the peer has returned them or the time is over, and no byte can arrive in them any more.
    """

    def __init__(self, core: Core, lease: Lease) -> None:
        self._core = core
        self._lease = lease

    @property
    def ticket(self) -> bytes:
        """The ticket that the peer needs for `Peer.slots`.

        Waits for the work on a GPU that the current stream had when the slots were lent: a peer reads
        complete rows. A process with the ticket, and the metadata of the endpoint, can use the slots.
        """
        if self._lease.mark is not None:
            self._lease.mark.synchronize()
        return messages.encode_ticket(self._lease.remote)

    @property
    def returned(self) -> bool:
        """Whether the peer has read the slots, or filled them."""
        return self._lease.state == "returned"

    @property
    def notify(self) -> bytes | None:
        """The bytes that the peer sent when it filled the slots; `None` before that."""
        return self._lease.notify if self.returned else None

    def query(self) -> bool:
        """Return whether the slots may have another use: the lease is over, and nothing arrives any more."""
        self._core.poll_for_fence()
        return self._lease.is_over()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the slots may have another use.

        Args:
            timeout: Seconds at most; by default until the time of the lease is over.

        Returns:
            Whether the slots may have another use.
        """
        return self._core.wait(self.query, timeout)

    def end(self) -> None:
        """End the lease before its time. A peer discards all rows that it reads from now on."""
        self._core.end(self._lease)

    def cancel(self) -> None:
        """End the lease, as other work in flight is cancelled."""
        self.end()

    @property
    def error(self) -> None:
        """Always `None`: a lease that ends before the peer has read the slots is not `returned`."""


class Transfer(ABC):
    """A transfer of rows, made by `Peer.read` and `Peer.write`.

    A transfer can serve as the fence `after` of `TokenToKVPoolAllocator.free`.
    """

    _core: Core

    @abstractmethod
    def query(self) -> bool:
        """Return whether the transfer is over: no byte arrives any more, and no peer uses the slots."""

    @property
    @abstractmethod
    def error(self) -> TransferError | None:
        """The reason why the transfer has failed; `None` if it has not failed."""

    @abstractmethod
    def cancel(self) -> None:
        """Cancel the transfer.

        The transfer is over when no byte arrives any more, at the latest when the lease of the peer's slots
        is over.
        """

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the transfer is over.

        Args:
            timeout: Seconds at most; by default until the lease of the peer's slots is over.

        Returns:
            Whether the transfer is over.

        Raises:
            TransferError: If the transfer has failed.
        """
        is_over = self._core.wait(self.query, timeout)
        if is_over and self.error is not None:
            raise self.error
        return is_over


class _Reading(Transfer):
    def __init__(self, core: Core, read: Read) -> None:
        self._core = core
        self._read = read

    def query(self) -> bool:
        self._core.poll_for_fence()
        return self._read.is_over()

    @property
    def error(self) -> TransferError | None:
        return self._read.error

    def cancel(self) -> None:
        with self._core.lock:
            if not self._read.is_over():
                self._read.give_up("the transfer was cancelled")
                self._core.poll()


class _Writing(Transfer):
    """A write: the rows are lent until the peer has fetched them."""

    def __init__(
        self, core: Core, peer: Introduction, remote: RemoteSlots, lease: Lease, notify: bytes
    ) -> None:
        self._core = core
        self._peer = peer
        self._remote = remote
        self._lease = lease
        self._notify: bytes | None = notify
        self._error: TransferError | None = None

    def query(self) -> bool:
        with self._core.lock:
            self._core.poll_for_fence()
            mark = self._lease.mark
            if self._notify is not None and (mark is None or mark.query()):
                self._offer(self._notify)
            if self._lease.is_over() and self._lease.state != "returned" and self._error is None:
                self._error = TransferError(f"{self._peer.name} did not fetch what it was to be given")
            return self._lease.is_over()

    def _offer(self, notify: bytes) -> None:
        self._notify = None
        ticket = messages.encode_ticket(self._lease.remote)
        offered = Offered(self._remote.word, self._remote.nonce, notify, ticket)
        try:
            self._core.reads.send(self._peer, messages.encode_note(offered))
        except TransferError as error:
            self._error = TransferError(str(error))  # without a traceback, which would keep NIXL's objects
            self._core.end(self._lease)

    @property
    def error(self) -> TransferError | None:
        return self._error

    def cancel(self) -> None:
        with self._core.lock:
            if not self._lease.is_over():
                self._error = self._error or TransferError("the transfer was cancelled")
                self._core.end(self._lease)


class Peer:
    """Another endpoint, made by `Endpoint.connect`."""

    def __init__(self, core: Core, introduction: Introduction) -> None:
        self._core = core
        self._introduction = introduction

    @property
    def name(self) -> str:
        """The name of the peer."""
        return self._introduction.name

    def slots(self, ticket: bytes) -> RemoteSlots:
        """Return the slots that the peer has lent, from `SlotLease.ticket`. Their time counts from now.

        Raises:
            ArgumentError: If `ticket` is not a ticket.
            IndexError: If the peer has no such slots.
        """
        return messages.decode_ticket(ticket).of(self._introduction)

    def read(
        self, remote_slots: RemoteSlots, slots: IndicesLike, *, states: IndicesLike = (), keep: bool = False
    ) -> Transfer:
        """Begin to copy rows of the peer into slots of this endpoint, in the order of both.

        When `wait` returns true, all rows have arrived, and the lease lasted until then. Work that the
        current stream has on a GPU is done before the first byte arrives; launch work that uses the rows
        after `wait`.

        Args:
            remote_slots: The peer's slots, from `slots`.
            slots: Slots of this `KVPool`, ints, as many as the peer's.
            states: Slots of this `GDNPool`, as many as the peer's.
            keep: Whether the lease is needed for another read. By default it is returned when the rows have
                arrived.

        Raises:
            ArgumentError: If the numbers of slots differ, or the slots are lent to be filled.
            IndexError: If a slot is outside of its pool.
            TransferError: If the endpoint is closed, or too many transfers run.
        """
        if remote_slots.is_writable:
            raise ArgumentError("the slots are lent to be filled, not to be read")
        rows = self._core.rows(slots, states)
        return _Reading(self._core, self._core.read(self._introduction, remote_slots, rows, keep=keep))

    def renew(self, remote_slots: RemoteSlots) -> None:
        """Let the time of a lease begin again, if the lease lasts when the peer hears it, at its next poll.

        Call it several times within the time of a lease, while its slots are needed and cannot be read yet.

        Args:
            remote_slots: The peer's slots, from `slots`. Their own time does not change: take them from the
                ticket when you read them.

        Raises:
            TransferError: If the endpoint is closed, or the peer cannot be reached.
        """
        self._core.renew(self._introduction, remote_slots)

    def write(
        self,
        slots: IndicesLike,
        remote_slots: RemoteSlots,
        *,
        states: IndicesLike = (),
        notify: bytes = b"",
    ) -> Transfer:
        """Let the peer fetch rows of this endpoint into slots that it has lent to be filled.

        The peer fetches the rows at its next poll, after the work that the current stream has now.

        Args:
            slots: Slots of this `KVPool`, ints, as many as the peer's.
            remote_slots: The peer's slots, from `slots`, lent with `writable=True`.
            states: Slots of this `GDNPool`, as many as the peer's.
            notify: Bytes for the peer's `SlotLease.notify` when the rows have arrived, 64 KiB at most.

        Raises:
            ArgumentError: If the numbers of slots differ, the slots are not lent to be filled, or `notify` is
                too long.
            IndexError: If a slot is outside of its pool.
            TransferError: If the endpoint is closed, the peer cannot be reached, or too much is lent.
        """
        if not remote_slots.is_writable:
            raise ArgumentError("the slots are lent to be read, not to be filled")
        if len(notify) > messages.MAX_NOTIFY_BYTES:
            raise ArgumentError(f"notify has {len(notify)} bytes, more than {messages.MAX_NOTIFY_BYTES}")
        lease = self._core.offer(self._introduction, remote_slots, self._core.rows(slots, states))
        writing = _Writing(self._core, self._introduction, remote_slots, lease, notify)
        writing.query()
        return writing


class Endpoint(Closing):
    """The pools of a process, for transfers: it lends slots to peers, and reads theirs.

    Call `poll` regularly, such as once a step, to answer peers; `query` of leases and transfers answers them
    as well. Several threads may call the methods.

    Args:
        name: The name of the endpoint, which no other has: up to 200 characters without a slash.
        kv: The pool whose slots are lent and read into, or the memory of another library.
        states: The pool of the states that belong to them.
        new_agent: Makes one end of a network.
        may_cut: Whether the endpoint may close an agent to end its reads. Otherwise a read from a stopped
            peer keeps its slots until the network gives up.
        patience_s: Seconds that other reads get to end before the connections of a failed one are closed.
            Reads that are not over by then begin again: allow more time for long reads over a slow network.

    Raises:
        ConfigError: If the pools are on different devices or too large, the name is not valid, or
            `patience_s` is out of its range.
        TransferError: If the network cannot be used.
    """

    def __init__(  # noqa: PLR0913 - pools, and how they are reached
        self,
        name: str,
        kv: KVPool | Rows,
        *,
        states: GDNPool | None = None,
        new_agent: NewAgent,
        may_cut: bool = True,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._core = Core(name, kv, states, new_agent, may_cut=may_cut, patience_s=patience_s)

    @property
    def name(self) -> str:
        """The name of the endpoint."""
        return self._core.introduction.name

    @property
    def has_states(self) -> bool:
        """Whether the endpoint has a pool of states."""
        return self._core.introduction.shapes["states"] is not None

    def metadata(self) -> bytes:
        """Return the bytes that `connect` of a peer takes. They do not change as long as the endpoint lives.

        Send it to trusted peers only: with it, a process can read the pools.
        """
        self._core.check_open()
        return messages.encode_introduction(self._core.introduction)

    def connect(self, metadata: bytes) -> Peer:
        """Return the peer that `metadata` introduces. One of the same name takes the place of an earlier one.

        Raises:
            ArgumentError: If the rows of the peer differ in shape from those of this endpoint (the message
                names the difference), or the bytes are not metadata.
            TransferError: If the peer cannot be reached.
        """
        return Peer(self._core, self._core.connect(metadata))

    def disconnect(self, peer: Peer) -> None:
        """Disconnect a peer that is gone. Reads from it fail now, and not when their leases are over.

        No byte of the peer can arrive any more when this call returns, after some tenths of a second; or
        within `patience_s` if other reads are in progress.
        """
        self._core.disconnect(peer._introduction)  # noqa: SLF001 - of this module

    def lend(
        self,
        slots: IndicesLike,
        *,
        states: IndicesLike = (),
        lease_s: float = 30.0,
        writable: bool = False,
        key: LeaseKey | None = None,
    ) -> SlotLease:
        """Lend slots to a peer: send it the `ticket`, and free the slots `after` the lease.

        Args:
            slots: Slots of the `KVPool`, ints.
            states: Slots of the `GDNPool`, ints.
            lease_s: Seconds of the lease, if the peer does not return it earlier. The peer discards rows
                that it has not read by then.
            writable: Whether the peer fills the slots, with `Peer.write`. Otherwise it reads them.
            key: A key from `LeaseKeys` of the process that writes the tickets; by default a new one. All
                leases of an endpoint have keys of one kind: its own, or those of one `LeaseKeys`.

        Raises:
            IndexError: If a slot is outside of its pool.
            ConfigError: If `lease_s` is not in [0, 86400].
            TransferError: If the endpoint is closed, too many leases last, or one has this key.
        """
        rows = self._core.rows(slots, states)
        return SlotLease(self._core, self._core.lend(rows, lease_s, is_writable=writable, key=key))

    def poll(self) -> None:
        """Answer peers, and advance transfers.

        The call does not wait, except for some tenths of a second when a read has failed or its lease is
        over. Then the connections of the read are closed, so that no late byte arrives in slots with new
        owners. Other reads have `patience_s` to end before that, and begin again otherwise.
        """
        self._core.poll()

    def stats(self) -> EndpointStats:
        """Return counters."""
        return self._core.stats()

    def read_times(self) -> list[int]:
        """Return how many reads brought their rows within less than 1, 2, 4, ... ms; the last took longer.

        The time of a read begins with `Peer.read`, or with the poll that found a peer's offer.
        """
        return self._core.read_times()

    @property
    def closed(self) -> bool:
        """Whether the endpoint is closed."""
        return self._core.is_closed

    def close(self) -> None:
        """End all leases, transfers and connections. When the call returns, no byte arrives any more."""
        self._core.close()
