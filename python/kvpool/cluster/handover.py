"""Moves of requests between processes: one engine lends their rows, the next one reads them."""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from kvpool.errors import KvPoolError
from kvpool.remote.errors import TransferError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from kvpool.remote import Endpoint, Peer, RemoteSlots, SlotLease, Transfer

_logger = logging.getLogger("kvpool")


class Outgoing:
    """Lends the rows of a request to the process that continues it. It is a `Move` for `Engine.submit`.

    Args:
        endpoint: The endpoint of the model's pools.
        lease_s: Seconds for which the rows are lent.
        report: Called with the ticket when the rows are lent, or with `None` if they cannot be.
    """

    brings: bool = False
    has_failed: bool = False

    def __init__(self, endpoint: Endpoint, lease_s: float, report: Callable[[bytes | None], object]) -> None:
        self.has_begun: bool = False
        self._endpoint = endpoint
        self._lease_s = lease_s
        self._report = report
        self._lease: SlotLease | None = None

    def begin(self, row: int, slots: torch.Tensor, start: int) -> None:  # noqa: ARG002 - nothing is there yet
        """Lend the rows."""
        self.has_begun = True
        ticket = None
        try:
            states = [row] if self._endpoint.has_states else ()
            self._lease = self._endpoint.lend(slots, states=states, lease_s=self._lease_s)
            ticket = self._lease.ticket
        except KvPoolError as error:
            _logger.warning("%s cannot lend the rows of a request: %s", self._endpoint.name, error)
        self._report(ticket)

    def query(self) -> bool:
        """Return whether the rows were read, or are not lent any more."""
        return self._lease is None or self._lease.query()

    def wait(self, timeout: float) -> bool:
        """Wait until the rows were read, or are not lent any more."""
        return self._lease is None or self._lease.wait(timeout)

    def cancel(self) -> None:
        """End the lease."""
        if self._lease is not None:
            self._lease.end()


class Incoming:
    """Reads the rows of a request from the process that has computed them.

    It is a `Move` for `Engine.submit`.

    Args:
        endpoint: The endpoint of the model's pools.
        peer: The process that lends them.
        ticket: Its ticket.

    Raises:
        ConfigError: If `ticket` is not a ticket.
        IndexError: If the peer has no such slots.
    """

    brings: bool = True

    def __init__(self, endpoint: Endpoint, peer: Peer, ticket: bytes) -> None:
        self.has_begun: bool = False
        self.has_failed: bool = False
        self._endpoint = endpoint
        self._peer = peer
        self._remote: RemoteSlots = peer.slots(ticket)
        self._transfers: list[Transfer] = []

    def begin(self, row: int, slots: torch.Tensor, start: int) -> None:
        """Read the rows that are not in the local prefix cache."""
        self.has_begun = True
        states = [row] if len(self._remote.states) else ()
        remote = self._remote.since(start)
        try:
            self._transfers.append(self._peer.read(remote, slots, states=states))
        except KvPoolError as error:
            self._fail(error)

    def query(self) -> bool:
        """Return whether no row arrives any more."""
        if self._transfers:
            [transfer] = self._transfers
            is_over = transfer.query()
            if is_over and transfer.error is not None and not self.has_failed:
                self._fail(transfer.error)
            return is_over
        # A read that an interrupt left without its transfer ends with the lease.
        if not self.has_failed and time.monotonic() >= self._remote.deadline:
            self._endpoint.poll()
            self.has_failed = True
        return self.has_failed

    def wait(self, timeout: float) -> bool:
        """Wait until no row arrives any more."""
        if self._transfers:
            with suppress(TransferError):  # `query` records it
                self._transfers[0].wait(timeout)
        elif not self.has_failed:
            time.sleep(timeout)
        return self.query()

    def cancel(self) -> None:
        """Cancel the read."""
        for transfer in self._transfers:
            transfer.cancel()

    def _fail(self, error: KvPoolError) -> None:
        self.has_failed = True
        _logger.warning("%s computes a request again: %s", self._endpoint.name, error)
