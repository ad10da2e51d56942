"""The leases of an endpoint."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

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


@dataclass(eq=False, slots=True)
class Lease:
    """Slots that are lent.

    Attributes:
        remote: The slots as the peer sees them.
        rows: Their rows in all buffers.
        mark: The work that must be done before the slots are used.
        begun: The time at which the slots were lent, in seconds of `time.monotonic`.
        peer_name: The name of the peer that may use them; `None` for any that has the ticket.
        state: Whether the lease lasts, or how it ended.
        filled_by: The read that brings the rows that a writer has offered, as long as it runs.
        notify: The bytes that the writer has sent with its offer.
    """

    remote: RemoteSlots
    rows: Indices
    mark: Mark | None
    begun: float
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
        self._free = [*range(MAX_LEASES)]
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
    ) -> Lease:
        """Lend slots.

        Raises:
            TransferError: If too many leases last.
        """
        if not self._free:
            raise TransferError(f"{len(self._lasting)} leases last, which is the limit")
        word = self._free.pop()
        nonce = 1 + secrets.randbelow((1 << 63) - 1)
        now = time.monotonic()
        lease = Lease(RemoteSlots(slots, states, is_writable, word, nonce, now + seconds), rows, mark, now)
        self._lasting[word] = lease
        self.words[word] = nonce
        return lease

    def find(self, word: int, nonce: int) -> Lease | None:
        """Return the lease with this word and nonce, if it lasts."""
        lease = self._lasting.get(word)
        return lease if lease is not None and lease.remote.nonce == nonce else None

    def end(self, lease: Lease, state: Literal["returned", "expired", "ended"]) -> bool:
        """End a lease, and return whether it lasted. A peer discards all rows that it reads from now on."""
        word = lease.remote.word
        if self._lasting.get(word) is not lease:
            return False
        self.words[word] = 0
        del self._lasting[word]
        self._free.append(word)
        lease.state = state
        if lease.filled_by is not None:
            self._arriving.append(lease)
        return True

    def forget(self) -> None:
        """Drop the ended leases into whose slots no row arrives any more."""
        self._arriving = [lease for lease in self._arriving if not lease.is_over()]
