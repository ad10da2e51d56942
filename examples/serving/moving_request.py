"""Moves a request to another process and back, over NIXL: `python examples/serving/moving_request.py`."""

from __future__ import annotations

import multiprocessing
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import torch
from kvpool_serving import Engine
from own_model import VOCAB_SIZE, Decoder, PooledDecoder, generate

from kvpool import KvPoolError
from kvpool.integrations.nixl import Endpoint, TransferError

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

    from kvpool import remote

PROMPT, ANSWER, HALF, LEASE_S = 60, 24, 12, 30.0


class Outgoing:
    """Lends the rows of a request: a `kvpool_serving.Move`. Its slots are in use until the lease is over."""

    brings, has_begun, has_failed = False, False, False
    _lease: remote.SlotLease | None = None

    def __init__(
        self, endpoint: remote.Endpoint, lease_s: float, report: Callable[[bytes | None], object]
    ) -> None:
        self._endpoint, self._lease_s, self._report = endpoint, lease_s, report

    def begin(self, row: int, slots: torch.Tensor, start: int) -> None:  # noqa: ARG002 - nothing is there yet
        """Lend the rows, and report the ticket; `None` if they cannot be lent."""
        self.has_begun = True
        with suppress(KvPoolError):
            states = [row] if self._endpoint.has_states else ()
            self._lease = self._endpoint.lend(slots, states=states, lease_s=self._lease_s)
        self._report(None if self._lease is None else self._lease.ticket)

    def query(self) -> bool:
        """Return whether the rows were read, or are not lent any more."""
        return self._lease is None or self._lease.query()

    def wait(self, timeout: float) -> bool:
        """Wait for that."""
        return self._lease is None or self._lease.wait(timeout)

    def cancel(self) -> None:
        """End the lease: what a peer reads from now on is not used there."""
        if self._lease is not None:
            self._lease.end()


class Incoming:
    """Reads the rows of a request: a `kvpool_serving.Move`. If that fails, the engine computes them."""

    brings, has_begun, has_failed = True, False, False
    _transfer: remote.Transfer | None = None

    def __init__(self, endpoint: remote.Endpoint, peer: remote.Peer, ticket: bytes) -> None:
        self._endpoint, self._peer, self._remote = endpoint, peer, peer.slots(ticket)

    def begin(self, row: int, slots: torch.Tensor, start: int) -> None:
        """Read the rows that are not in the prefix cache of this process."""
        self.has_begun = True
        states = [row] if len(self._remote.states) else ()
        try:
            self._transfer = self._peer.read(self._remote.since(start), slots, states=states)
        except KvPoolError:
            self.has_failed = True

    def query(self) -> bool:
        """Return whether no row arrives any more."""
        if self._transfer is not None:
            is_over = self._transfer.query()
            self.has_failed = is_over and self._transfer.error is not None
            return is_over
        if time.monotonic() >= self._remote.deadline:  # of a read that an interrupt left without its transfer
            self._endpoint.poll()
            self.has_failed = True
        return self.has_failed

    def wait(self, timeout: float) -> bool:
        """Wait for that."""
        with suppress(TransferError):  # `query` takes note of it
            self._transfer.wait(timeout) if self._transfer else time.sleep(0 if self.has_failed else timeout)
        return self.query()

    def cancel(self) -> None:
        """Cancel the read. It is over when nothing can arrive any more."""
        if self._transfer is not None:
            self._transfer.cancel()


class Side:
    """An engine of one process, and its endpoint. The processes tell each other over `link` what to read."""

    def __init__(self, name: str, link: Connection) -> None:
        torch.manual_seed(0)  # both have the same weights
        self.model = PooledDecoder(Decoder(), size=256, page_size=1, device="cpu")
        self.engine, self.endpoint, self.link = Engine(self.model), Endpoint(name, self.model.kv), link
        link.send(self.endpoint.metadata())
        self.peer = self.endpoint.connect(link.recv())

    def give(self, prompt: list[int], tokens: list[int]) -> None:
        """Compute what is not cached and one token more; then the other process goes on."""
        move = Outgoing(self.endpoint, LEASE_S, lambda ticket: self.link.send((request.tokens, ticket)))
        request = self.engine.submit(prompt, ANSWER, tokens=tokens, move=move)
        self.engine.run()  # until the rows were read, for LEASE_S at most

    def take(self, prompt: list[int], count: int) -> list[int]:
        """Go on with a request until it has `count` tokens, and return these."""
        tokens, ticket = self.link.recv()
        move = None if ticket is None else Incoming(self.endpoint, self.peer, ticket)
        request = self.engine.submit(prompt, count, tokens=tokens, move=move)
        self.engine.run()
        return request.tokens


def work(link: Connection, prompt: list[int]) -> None:
    """Be the other process."""
    side = Side("there", link)
    side.give(prompt, side.take(prompt, HALF))
    side.endpoint.close()


def main() -> None:
    """Move a request there and back, and compare the answer with that of the model alone."""
    prompt = torch.randint(VOCAB_SIZE, (PROMPT,)).tolist()
    link, other_end = multiprocessing.Pipe()
    other = multiprocessing.get_context("spawn").Process(target=work, args=(other_end, prompt), daemon=True)
    other.start()
    here = Side("here", link)
    here.give(prompt, [])
    assert here.take(prompt, ANSWER) == generate(here.model.decoder, prompt, ANSWER, "cpu")
    other.join()
    here.endpoint.close()
    assert here.endpoint.stats()["rows"] == HALF  # those of the prompt are in the prefix cache here
    print(f"{PROMPT} rows went there, {HALF} came back, and the answer is that of one process")


if __name__ == "__main__":
    main()
