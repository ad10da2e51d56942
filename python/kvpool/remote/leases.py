"""The leases of an endpoint."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from kvpool.remote import messages
from kvpool.remote.errors import TransferError
from kvpool.remote.messages import RemoteSlots

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from kvpool.remote.agent import Indices
    from kvpool.remote.marks import Mark
    from kvpool.remote.reads import Read

MAX_LEASES = 4096
"""The most leases of an endpoint at once."""


class LeaseKey(NamedTuple):
    """What tells a lease from all others, made by `LeaseKeys.take`.

    Attributes:
        word: The index of the word that shows whether the lease lasts.
        nonce: The value of this word as long as it does. It cannot be guessed.
    """

    word: int
    nonce: int

    def ticket(self, slots: Indices, lease_s: float) -> bytes:
        """Return the ticket of a lease of this key, for a process that has not made the lease itself.

        It does not wait for work on a GPU, as `SlotLease.ticket` does: send it when the rows are written, for
        example with the token that was computed from them.

        Args:
            slots: The slots of the lease, int32, in its order.
            lease_s: Seconds that are left of it.
        """
        deadline = time.monotonic() + lease_s
        none = np.empty(0, np.int32)
        return messages.encode_ticket(RemoteSlots(slots, none, False, self.word, self.nonce, deadline))


class LeaseKeys:
    """Keys for the leases of an endpoint, or of several that lend the same slots at the same time.

    An engine whose scheduler decides what its workers lend takes the keys there.
    """

    def __init__(self) -> None:
        # In the order in which they were used, so that a key is used again as late as possible.
        self._free: dict[int, None] = dict.fromkeys(range(MAX_LEASES))

    def take(self) -> LeaseKey:
        """Return a key that no lease has.

        Raises:
            TransferError: If too many leases last.
        """
        if not self._free:
            raise TransferError(f"{MAX_LEASES} leases last, which is the limit")
        return self.claim(LeaseKey(next(iter(self._free)), 1 + secrets.randbelow((1 << 63) - 1)))

    def claim(self, key: LeaseKey) -> LeaseKey:
        """Return a key that was taken elsewhere, as one that has a lease now.

        Raises:
            TransferError: If a lease that lasts has its word.
        """
        if key.word not in self._free:
            raise TransferError(f"word {key.word} of {MAX_LEASES} is not that of a new lease")
        del self._free[key.word]
        return key

    def give_back(self, key: LeaseKey) -> None:
        """Take back a key whose lease is over."""
        self._free[key.word] = None


@dataclass(eq=False, slots=True)
class Lease:
    """Slots that are lent.

    Attributes:
        remote: The slots as the peer sees them.
        rows: Their rows in all buffers.
        mark: The work that must be done before the slots are used.
        begun: The time at which the slots were lent, in seconds of `time.monotonic`.
        seconds: How long the lease lasts from then, or from when it was last renewed.
        peer_name: The name of the peer that may use them; `None` for any that has the ticket.
        state: Whether the lease lasts, or how it ended.
        filled_by: The read that brings the rows that a writer has offered, as long as it runs.
        notify: The bytes that the writer has sent with its offer.
    """

    remote: RemoteSlots
    rows: Indices
    mark: Mark | None
    begun: float
    seconds: float
    peer_name: str | None = None
    state: Literal["open", "returned", "expired", "ended"] = "open"
    filled_by: Read | None = None
    notify: bytes | None = None

    def is_over(self) -> bool:
        """Return whether the slots may have another use."""
        return self.state != "open" and self.filled_by is None


class Leases:
    """Leases, each with a word in memory that peers read.

    Invariant: the word of a lease that lasts has its nonce, which cannot be guessed, and every other word has
    0. A peer reads the word after the rows: if it finds the nonce, the rows were lent until it had them.
    """

    def __init__(self) -> None:
        self.words: npt.NDArray[np.uint64] = np.zeros(MAX_LEASES, np.uint64)
        self._keys = LeaseKeys()
        self._lasting: dict[int, Lease] = {}
        # Leases that have ended, into whose slots a read still brings rows.
        self._arriving: list[Lease] = []

    def __len__(self) -> int:
        return len(self._lasting)

    def __iter__(self) -> Iterator[Lease]:
        return iter([*self._lasting.values(), *self._arriving])

    def lend(  # noqa: PLR0913
        self,
        slots: Indices,
        states: Indices,
        rows: Indices,
        seconds: float,
        mark: Mark | None,
        *,
        is_writable: bool,
        key: LeaseKey | None = None,
    ) -> Lease:
        """Lend slots, under a key of these leases or one that was taken elsewhere.

        Raises:
            TransferError: If too many leases last, or one has the key.
        """
        word, nonce = self._keys.take() if key is None else self._keys.claim(key)
        now = time.monotonic()
        remote = RemoteSlots(slots, states, is_writable, word, nonce, now + seconds)
        lease = Lease(remote, rows, mark, now, seconds)
        self._lasting[word] = lease
        self.words[word] = nonce
        return lease

    def find(self, word: int, nonce: int) -> Lease | None:
        """Return the lease with this word and nonce, if it lasts."""
        lease = self._lasting.get(word)
        return lease if lease is not None and lease.remote.nonce == nonce else None

    @staticmethod
    def renew(lease: Lease) -> None:
        """Let the time of a lease begin again."""
        lease.remote = lease.remote._replace(deadline=time.monotonic() + lease.seconds)

    def end(self, lease: Lease, state: Literal["returned", "expired", "ended"]) -> bool:
        """End a lease, and return whether it lasted. A peer discards all rows that it reads from now on."""
        word = lease.remote.word
        if self._lasting.get(word) is not lease:
            return False
        self.words[word] = 0
        del self._lasting[word]
        self._keys.give_back(LeaseKey(word, lease.remote.nonce))
        lease.state = state
        if lease.filled_by is not None:
            self._arriving.append(lease)
        return True

    def forget(self) -> None:
        """Drop the ended leases into whose slots no row arrives any more."""
        self._arriving = [lease for lease in self._arriving if not lease.is_over()]
