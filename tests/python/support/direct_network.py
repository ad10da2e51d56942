"""A network within a process whose rows are there at once, for endpoints in several threads."""

from __future__ import annotations

import ctypes
import threading
from typing import TYPE_CHECKING, Literal, NamedTuple

from fake_network import located

from kvpool.remote import Endpoint, TransferError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpool import GDNPool, KVPool
    from kvpool.remote import Blocks, Indices, Memory

_agents: dict[str, DirectAgent] = {}


class FinishedRead:
    """A read that is over."""

    def state(self) -> Literal["done"]:
        return "done"

    def release(self) -> None:
        pass


class DirectAgent:
    """One end of the network."""

    def __init__(self, name: str, memory: Sequence[Memory], blocks: tuple[Blocks, Blocks]) -> None:  # noqa: ARG002
        self.name = name
        self.blocks = blocks
        self.received: list[tuple[str, bytes]] = []
        self.lock = threading.Lock()
        _agents[name] = self

    def metadata(self) -> bytes:
        return self.name.encode()

    def connect(self, metadata: bytes, blocks: Sequence[Blocks]) -> DirectLink:
        return DirectLink(self, metadata.decode(), blocks)

    def notes(self) -> list[tuple[str, bytes]]:
        with self.lock:
            received, self.received = self.received, []
        return received

    def close(self) -> None:
        _agents.pop(self.name, None)


class DirectLink(NamedTuple):
    """A peer, as an agent reaches it."""

    own: DirectAgent
    name: str
    blocks: Sequence[Blocks]

    def read(self, kind: int, here: Indices, there: Indices, note: bytes) -> FinishedRead:
        self._peer()
        for (source, size), (target, _) in zip(
            located(self.blocks[kind], there), located(self.own.blocks[kind], here), strict=True
        ):
            ctypes.memmove(target, source, size)
        if note:
            self.send(note)
        return FinishedRead()

    def send(self, note: bytes) -> None:
        agent = self._peer()
        with agent.lock:
            agent.received.append((self.own.name, note))

    def _peer(self) -> DirectAgent:
        agent = _agents.get(self.name)  # at once: it may be closed by another thread
        if agent is None:
            raise TransferError(f"{self.name} is gone")
        return agent


def endpoint(name: str, kv: KVPool, states: GDNPool | None = None) -> Endpoint:
    return Endpoint(name, kv, states=states, new_agent=DirectAgent)
