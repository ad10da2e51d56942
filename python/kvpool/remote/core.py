"""The state of an endpoint behind its public classes: leases, reads, and the notes of peers."""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
from typing import TYPE_CHECKING, Protocol

import numpy as np

from kvpool._endpoints import Moving, observe
from kvpool._limits import MAX_S, check_seconds
from kvpool.errors import ArgumentError, ConfigError, KvPoolError
from kvpool.remote import messages
from kvpool.remote.agent import Memory
from kvpool.remote.errors import TransferError
from kvpool.remote.leases import Lease, Leases
from kvpool.remote.marks import mark
from kvpool.remote.messages import Introduction, Offered, RemoteSlots, Renewed, Returned
from kvpool.remote.reads import Read, Reads
from kvpool.remote.rows import Rows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvpool._kvpool import GDNPool, KVPool
    from kvpool.remote.agent import Agent, Blocks, Indices
    from kvpool.remote.leases import LeaseKey
    from kvpool.typing import EndpointStats, IndicesLike

_logger = logging.getLogger("kvpool")

_FIRST_PAUSE_S = 1e-5
_MAX_PAUSE_S = 0.001
"""Seconds between two polls of `Core.wait`, at first and at most: a network has no call that waits for it."""

PAUSE_S = 0.0005
"""Seconds within which queries of fences share a poll: an allocator queries all its fences one by one."""


def pause(progress: threading.Condition, seconds: float) -> None:
    """Wait until another thread has made progress, at most for `seconds`."""
    progress.wait(seconds)


class NewAgent(Protocol):
    """Makes one end of a network."""

    def __call__(self, name: str, memory: Sequence[Memory], blocks: tuple[Blocks, Blocks]) -> Agent:
        """Return an agent with this name, which no other agent has.

        Peers may read its `memory`, and the agent reads into `blocks`.
        """
        ...


class Core:
    """Leases and reads behind one lock."""

    def __init__(  # noqa: PLR0913 - those of an endpoint
        self,
        name: str,
        kv: KVPool | Rows,
        states: GDNPool | None,
        new_agent: NewAgent,
        *,
        may_cut: bool,
        patience_s: float,
    ) -> None:
        check_seconds(0.0, MAX_S, patience_s=patience_s)
        self.lock: threading.RLock = threading.RLock()
        self._progress = threading.Condition(self.lock)  # a lease or a read is over
        self.leases: Leases = Leases()
        self.peers: dict[str, Introduction] = {}
        self.returned: int = 0
        self.expired: int = 0
        self.refused: int = 0
        self.is_closed: bool = False
        self._polled = -math.inf
        self._pools = (kv, states)  # their memory must stay valid as long as this object
        self._new_agent = new_agent
        self._readers = 0
        new_reader = self._new_reader if may_cut else lambda: self._agent
        self.reads: Reads = Reads(new_reader, may_cut=may_cut, patience_s=patience_s)
        self.introduction: Introduction = _introduce(name, kv, states, self.leases.words)
        messages.encode_introduction(self.introduction)  # refuses pools that are too large
        pools, _ = messages.blocks(self.introduction)
        scratch = messages.words(self.reads.words)
        self._blocks = (pools, scratch)
        self._memory = [
            Memory(words.ctypes.data, words.nbytes, None) for words in (self.leases.words, self.reads.words)
        ]
        for pool, rows in zip(messages.POOLS, self._pools, strict=True):
            if isinstance(rows, Rows):
                self._memory += rows.regions(self.introduction.device)
            else:
                self._memory += messages.regions(self.introduction, pool)
        # Reads go through agents of their own: those can be closed while peers read here.
        self._agent: Agent = new_agent(self.introduction.agent, self._memory, self._blocks)
        self.introduction = self.introduction._replace(metadata=self._agent.metadata())
        observe(self)

    @property
    def name(self) -> str:
        """The name of the endpoint."""
        return self.introduction.name

    @property
    def device(self) -> str:
        """The device of its pools."""
        return self._pools[0].device

    def _new_reader(self) -> Agent:
        self._readers += 1
        return self._new_agent(f"{self.introduction.agent}/{self._readers}", self._memory, self._blocks)

    def check_open(self) -> None:
        """Raise `TransferError` if the endpoint is closed."""
        if self.is_closed:
            raise TransferError(f"{self.introduction.name} is closed")

    def connect(self, metadata: bytes) -> Introduction:
        """Connect to a peer, and return its properties."""
        peer = messages.decode_introduction(metadata)
        different = messages.difference(self.introduction, peer)
        if different is not None:
            raise ArgumentError(
                f"the pools of {peer.name} and {self.introduction.name} do not fit: {different}"
            )
        if peer.agent == self.introduction.agent:
            raise ArgumentError(f"{peer.name} is this endpoint itself")
        with self.lock:
            self.check_open()
            self.reads.reach(peer)
            for other in [*self.peers.values()]:
                if other.name == peer.name and other.agent != peer.agent:
                    del self.peers[other.agent]
                    self.reads.forget(other)
            self.peers[peer.agent] = peer
        return peer

    def disconnect(self, peer: Introduction) -> None:
        """Disconnect a peer that is gone."""
        with self.lock:
            self.peers.pop(peer.agent, None)
            self.reads.leave(peer)

    def rows(self, slots: IndicesLike, states: IndicesLike) -> list[Indices]:
        """Return slots of both pools as int32."""
        return [
            _slots(listed, self.introduction.rows[pool], pool)
            for pool, listed in zip(messages.POOLS, (slots, states), strict=True)
        ]

    def lend(
        self, rows: Sequence[Indices], lease_s: float, *, is_writable: bool, key: LeaseKey | None = None
    ) -> Lease:
        """Lend slots."""
        check_seconds(0.0, messages.MAX_SECONDS, lease_s=lease_s)
        numbers = messages.number_rows(self.introduction, *rows)
        with self.lock:
            self.check_open()
            self.poll()
            slots, states = rows
            until = mark(self.introduction.device)
            return self.leases.lend(slots, states, numbers, lease_s, until, is_writable=is_writable, key=key)

    def read(self, peer: Introduction, remote: RemoteSlots, rows: Sequence[Indices], *, keep: bool) -> Read:
        """Begin to read the slots of a peer."""
        self._check_counts(rows, (remote.slots, remote.states))
        here = messages.number_rows(self.introduction, *rows)
        there = messages.number_rows(peer, remote.slots, remote.states)
        read = Read(peer, remote, rows, here, there, mark(self.introduction.device), keep)
        with self.lock:
            self.check_open()
            self.reads.begin(read)
        return read

    def offer(self, peer: Introduction, remote: RemoteSlots, rows: Sequence[Indices]) -> Lease:
        """Lend slots from which a peer is to fetch rows into slots that it has lent."""
        self._check_counts(rows, (remote.slots, remote.states))
        seconds = max(remote.deadline - time.monotonic(), 0.0)
        with self.lock:
            self.check_open()
            self.reads.reach(peer)
            lease = self.lend(rows, min(seconds, messages.MAX_SECONDS), is_writable=False)
            lease.peer_name = peer.name
            return lease

    def renew(self, peer: Introduction, remote: RemoteSlots) -> None:
        """Tell a peer that one of its leases is needed longer."""
        with self.lock:
            self.check_open()
            self.reads.send(peer, messages.encode_note(Renewed(remote.word, remote.nonce)))

    @staticmethod
    def _check_counts(rows: Sequence[Indices], remote_rows: Sequence[Indices]) -> None:
        for pool, here, there in zip(messages.POOLS, rows, remote_rows, strict=True):
            if len(here) != len(there):
                raise ArgumentError(
                    f"{len(here)} slots of {pool} are given, and the peer has lent {len(there)}"
                )

    def end(self, lease: Lease) -> None:
        """End a lease before its time."""
        with self.lock:
            self.leases.end(lease, "ended")
            self._progress.notify_all()

    def poll_for_fence(self) -> None:
        """Poll, unless the last poll was less than `PAUSE_S` seconds ago."""
        if time.monotonic() - self._polled >= PAUSE_S:
            self.poll()

    def wait(self, is_over: Callable[[], bool], timeout: float | None) -> bool:
        """Poll until `is_over` returns true, at most for `timeout` seconds. Return whether it did.

        If another thread ends a lease or a read meanwhile, this call notices it at once.
        """
        if timeout is not None and not timeout >= 0:
            raise ArgumentError(f"timeout is {timeout}, not a number of seconds from 0 on")
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        seconds = _FIRST_PAUSE_S
        with self.lock:
            while True:
                self.poll()
                if is_over():
                    return True
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                pause(self._progress, min(seconds, left))
                seconds = min(2 * seconds, _MAX_PAUSE_S)

    def poll(self) -> None:
        """Answer peers, and advance all leases and reads."""
        with self.lock:
            if self.is_closed:
                return
            before = self._ended()
            now = time.monotonic()
            for lease in self.leases:
                if lease.remote.deadline <= now and self.leases.end(lease, "expired"):
                    self.expired += 1
            self._listen()
            self.reads.advance()
            for lease in self.leases:
                self._settle(lease)
            self.leases.forget()
            self._polled = time.monotonic()
            if self._ended() != before:
                self._progress.notify_all()

    def _ended(self) -> int:
        """Return how many leases and reads have ended by a poll so far."""
        return self.returned + self.expired + self.reads.completed + self.reads.failed

    def _settle(self, lease: Lease) -> None:
        """End a lease whose slots a read has filled."""
        read = lease.filled_by
        if read is not None and read.is_over():
            lease.filled_by = None
            if read.error is None and self.leases.end(lease, "returned"):
                self.returned += 1

    def _listen(self) -> None:
        try:
            notes = self._agent.notes()
        except TransferError as error:
            _logger.warning("%s cannot listen to peers: %s", self.introduction.name, error)
            return
        for sender, note in notes:
            try:
                self._handle(sender.partition("/")[0], messages.decode_note(note))
            except (KvPoolError, IndexError) as error:  # noqa: PERF203 - the next one may be good
                self.refused += 1
                _logger.warning("%s refuses a note of %.80s: %s", self.introduction.name, sender, error)

    def _handle(self, sender: str, note: Returned | Renewed | Offered) -> None:
        lease = self.leases.find(note.word, note.nonce)
        if lease is None:
            return  # the lease was over before the note arrived
        if isinstance(note, Returned):
            if lease.remote.is_writable:
                raise ArgumentError("slots that are to be filled are not returned")
            self.leases.end(lease, "returned")
            self.returned += 1
            return
        if isinstance(note, Renewed):
            self.leases.renew(lease)
            return
        peer = self.peers.get(sender)
        if peer is None:
            raise ArgumentError("it is not connected")
        remote = messages.decode_ticket(note.ticket).of(peer)
        if remote.is_writable or not lease.remote.is_writable or lease.filled_by is not None:
            raise ArgumentError("slots are offered for some that are not lent to be filled")
        self._check_counts((lease.remote.slots, lease.remote.states), (remote.slots, remote.states))
        # No byte may arrive after the end of either lease.
        until = remote._replace(deadline=min(remote.deadline, lease.remote.deadline))
        there = messages.number_rows(peer, remote.slots, remote.states)
        slots = lease.remote.slots, lease.remote.states
        read = Read(peer, until, slots, lease.rows, there, lease.mark)
        self.reads.begin(read)
        lease.filled_by, lease.notify = read, note.notify

    def stats(self) -> EndpointStats:
        """Return counters."""
        with self.lock:
            return {
                "peers": len(self.peers),
                "leases": len(self.leases),
                "running": len(self.reads),
                "returned": self.returned,
                "expired": self.expired,
                "completed": self.reads.completed,
                "failed": self.reads.failed,
                "cuts": self.reads.cuts,
                "refused": self.refused,
                "rows": self.reads.rows,
                "runs": self.reads.runs,
                "bytes": self.reads.bytes,
                "seconds": self.reads.seconds,
            }

    def read_times(self) -> list[int]:
        """Return how many reads brought their rows within less than 1, 2, 4, ... ms; the last took longer."""
        with self.lock:
            return [*self.reads.times]

    def moving(self) -> dict[str, tuple[int, list[Moving]]]:
        """Return the number of rows and the slots under transfer of each pool of the endpoint."""
        now = time.monotonic()
        found: dict[str, tuple[int, list[Moving]]] = {
            pool: (self.introduction.rows[pool], [])
            for pool in messages.POOLS
            if self.introduction.rows[pool]
        }

        def add(slots: Sequence[Indices], state: str, peer: str | None, lease: str, begun: float) -> None:
            for (_, moving), of_pool in zip(found.values(), slots, strict=False):
                moving.append(Moving(of_pool, state, peer, lease, now - begun))

        with self.lock:
            filling = {id(lease.filled_by) for lease in self.leases}
            for lease in self.leases:
                remote, read = lease.remote, lease.filled_by
                state = "filling" if remote.is_writable else "lent"
                peer = lease.peer_name if read is None else read.peer.name
                what = f"lease {remote.word}, {max(remote.deadline - now, 0):.1f} s left"
                add((remote.slots, remote.states), state, peer, what, lease.begun)
            for read in self.reads:
                if id(read) not in filling:
                    what = f"lease {read.remote.word} of {read.peer.name}"
                    add(read.slots, "reading", read.peer.name, what, read.begun)
        return found

    def __del__(self) -> None:
        # The pools are dropped after this call: their memory stays valid as long as bytes may arrive.
        if hasattr(self, "_agent"):
            self.close()

    def close(self) -> None:
        """End all leases, reads and connections."""
        with self.lock:
            if self.is_closed:
                return
            self.is_closed = True
            for lease in self.leases:
                self.leases.end(lease, "ended")
            self.reads.close()
            for lease in self.leases:
                lease.filled_by = None
            self.leases.forget()
            self._agent.close()
            self._progress.notify_all()


def _slots(indices: IndicesLike, rows: int, pool: str) -> Indices:
    """Return slots as int32 on the host, checked against their pool. Waits for values that are on a GPU."""
    to_host = getattr(indices, "cpu", None)
    listed = np.asarray(indices if to_host is None else to_host())
    if listed.size and listed.dtype.kind not in "iu":
        raise TypeError(f"slots of {pool} must be ints, not {listed.dtype}")
    flat = listed.reshape(-1).astype(np.int64)
    if len(flat) > messages.MAX_ROWS:
        raise ArgumentError(f"{len(flat)} slots of {pool} are more than {messages.MAX_ROWS}")
    outside = flat[(flat < 1) | (flat >= rows)]
    if len(outside):
        raise IndexError(f"slot {outside[0]} is outside [1, {rows}) of {pool}")
    return flat.astype(np.int32)


def _introduce(name: str, kv: KVPool | Rows, states: GDNPool | None, words: np.ndarray) -> Introduction:
    if not 0 < len(name) <= messages.MAX_NAME or "/" in name:
        raise ConfigError(f"name is {name!r:.40}, not 1 to {messages.MAX_NAME} characters without a slash")
    device = None if kv.device == "cpu" else int(kv.device.rpartition(":")[2])
    buffers: dict[str, list[tuple[int, int]]] = {"kv": [], "states": []}
    rows = dict.fromkeys(messages.POOLS, 0)
    for pool, pool_name in ((kv, "kv"), (states, "states")):
        if pool is None:
            continue
        if pool.device != kv.device:
            raise ConfigError(f"states are on {pool.device}, and kv is on {kv.device}")
        for address, size, row in zip(*pool.get_contiguous_buf_infos(), strict=True):
            if row:
                buffers[pool_name].append((address, row))
                rows[pool_name] = size // row
    agent = f"{name}#{secrets.token_hex(6)}"
    return Introduction(
        name, agent, _shapes(kv, states), buffers, rows, device, (words.ctypes.data, len(words)), b""
    )


def _shapes(kv: KVPool | Rows, states: GDNPool | None) -> dict[str, dict[str, int | str] | None]:
    """Return the properties that rows of both sides must have in common."""
    names = ("layer_num", "k_head_num", "k_head_dim", "v_head_num", "v_head_dim")
    state_names = (
        "num_gdn_layers",
        "num_v_heads",
        "head_k_dim",
        "head_v_dim",
        "conv_dim",
        "conv_kernel_size",
    )

    def shape(pool: KVPool | GDNPool, names: Sequence[str]) -> dict[str, int | str]:
        return {name: int(getattr(pool, name)) for name in names} | {
            "dtype": str(pool.dtype).removeprefix("torch.")
        }

    of_kv = kv.shape if isinstance(kv, Rows) else shape(kv, names)
    return {"kv": of_kv, "states": None if states is None else shape(states, state_names)}
