"""A network in memory, whose bytes arrive when a test says so, or far too late."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch

import kvpool
from kvpool.remote import Endpoint, TransferError
from kvpool.remote.reads import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np
    import numpy.typing as npt
    import pytest

    from kvpool.remote import Blocks, Memory, Rows

    Indices = npt.NDArray[np.int32]


class Row(NamedTuple):
    """Bytes to copy."""

    source: int
    target: int
    size: int


@dataclass(eq=False)
class FakeReading:
    """Rows that have not arrived."""

    reader: FakeAgent
    source: FakeAgent
    rows: list[Row]
    note: bytes
    is_lost: bool = False

    def state(self) -> Literal["running", "done", "failed"]:
        self.reader.network.called("state")
        if self.is_lost:
            return "failed"
        return "running" if self.rows else "done"

    def release(self) -> None:
        self.reader.network.called("release")
        assert not self.rows

    def arrive(self, row: Row) -> None:
        self.rows.remove(row)
        ctypes.memmove(row.target, row.source, row.size)
        if not self.rows and not self.is_lost and self.note:
            self.source.received.append((self.reader.name, self.note))


class FakeLink(NamedTuple):
    """A peer, as an agent reaches it."""

    own: FakeAgent
    agent: FakeAgent
    blocks: tuple[Blocks, ...]

    def read(self, kind: int, here: Indices, there: Indices, note: bytes) -> FakeReading:
        own, network = self.own, self.own.network
        assert not own.is_closed
        rows = [
            Row(source, target, size)
            for (source, size), (target, target_size) in zip(
                located(self.blocks[kind], there), located(own.blocks[kind], here), strict=True
            )
            if size == target_size or not network.called("sizes differ")
        ]
        for row in rows:
            assert inside(row.source, row.size, self.agent.memory)
            assert inside(row.target, row.size, own.memory)
        reading = FakeReading(own, self.agent, rows, note)
        network.readings.append(reading)
        network.called("read")  # some of it may be under way when it fails
        if self.agent.is_closed:
            raise TransferError(f"{self.agent.name} is gone")
        return reading

    def send(self, note: bytes) -> None:
        self.own.network.called("send")
        if self.agent.is_closed:
            raise TransferError(f"{self.agent.name} is gone")
        self.agent.received.append((self.own.name, note))


@dataclass(eq=False)
class FakeAgent:
    """One end of the network."""

    network: Network
    name: str
    memory: Sequence[Memory]
    blocks: tuple[Blocks, ...]
    received: list[tuple[str, bytes]] = field(default_factory=list)
    is_closed: bool = False

    def metadata(self) -> bytes:
        self.network.called("metadata")
        return self.name.encode()

    def connect(self, metadata: bytes, blocks: Sequence[Blocks]) -> FakeLink:
        self.network.called("connect")
        agent = self.network.agents.get(metadata.decode())
        if agent is None:
            raise TransferError(f"there is no agent {metadata.decode()}")
        return FakeLink(self, agent, tuple(blocks))

    def notes(self) -> list[tuple[str, bytes]]:
        self.network.called("notes")
        received, self.received = self.received, []
        return received

    def close(self) -> None:
        self.is_closed = True
        self.network.readings = [one for one in self.network.readings if one.reader is not self]
        for reading in self.network.readings:
            if reading.source is self:
                reading.is_lost = True
                reading.rows.clear()  # its memory may be gone


def located(blocks: Blocks, numbers: Indices) -> Iterator[tuple[int, int]]:
    """Addresses and sizes of rows by number."""
    for number in numbers.tolist():
        at = number
        for address, size, rows in blocks.buffers:
            if at < rows:
                yield address + at * size, size
                break
            at -= rows
        else:
            raise AssertionError(f"there is no row {number}")


def inside(address: int, size: int, memory: Sequence[Memory]) -> bool:
    return any(one.address <= address and address + size <= one.address + one.size for one in memory)


class Network:
    """Agents by name, what is under way between them, and the time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.agents: dict[str, FakeAgent] = {}
        self.endpoints: list[Endpoint] = []
        self.readings: list[FakeReading] = []
        self.stopped: set[str] = set()
        self.seconds = 1000.0
        self.calls: list[str] = []
        self.fails_at: int | None = None
        self.runs_by_itself = True
        self.chance = Random(0)  # noqa: S311 - no secrets
        clock = SimpleNamespace(monotonic=lambda: self.seconds)
        for module in ("core", "leases", "messages", "reads"):
            monkeypatch.setattr(f"kvpool.remote.{module}.time", clock)
        monkeypatch.setattr("kvpool.remote.core.pause", lambda _, seconds: self.sleep(seconds))
        monkeypatch.setattr("kvpool.remote.core.PAUSE_S", 0.0)

    def called(self, call: str) -> bool:
        """A call, which fails if it is its turn."""
        assert call != "sizes differ"
        self.calls.append(call)
        if self.fails_at == len(self.calls) - 1:
            raise TransferError(f"call {self.fails_at} fails: {call}")
        return True

    def new_agent(self, name: str, memory: Sequence[Memory], blocks: tuple[Blocks, Blocks]) -> FakeAgent:
        self.called("new_agent")
        assert name not in self.agents
        self.agents[name] = FakeAgent(self, name, memory, blocks)
        return self.agents[name]

    def endpoint(
        self,
        name: str,
        kv: kvpool.KVPool | Rows,
        states: kvpool.GDNPool | None = None,
        *,
        may_cut: bool = True,
        patience_s: float = PATIENCE_S,
    ) -> Endpoint:
        made = Endpoint(
            name, kv, states=states, new_agent=self.new_agent, may_cut=may_cut, patience_s=patience_s
        )
        self.endpoints.append(made)
        return made

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds
        if self.runs_by_itself:
            self.run()

    def run(self, rows: int = 1 << 30) -> None:
        """Lets so many rows arrive, in any order, from peers that are awake."""
        for _ in range(rows):
            moving = [one for one in self.readings if one.rows and not self.is_asleep(one.source)]
            if not moving:
                break
            reading = self.chance.choice(moving)
            reading.arrive(self.chance.choice(reading.rows))
        self.readings = [one for one in self.readings if one.rows]

    def is_asleep(self, agent: FakeAgent) -> bool:
        return agent.name.partition("#")[0] in self.stopped

    def kill(self, name: str) -> None:
        """Ends a process. What it has sent may still arrive."""
        for agent in self.agents.values():
            if agent.name.partition("#")[0] == name:
                agent.is_closed = True
        for reading in self.readings:
            if reading.source.is_closed:
                reading.is_lost = True
        self.readings = [one for one in self.readings if not one.reader.is_closed]


def filled(rows: int = 64, seed: int = 0, layers: int = 2) -> kvpool.KVPool:
    """A pool with numbers in every row."""
    pool = kvpool.KVPool(rows, layers, 2, 4, "cpu", torch.float32)
    generator = torch.Generator().manual_seed(seed)
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer.copy_(torch.randn(buffer.shape, generator=generator))
    return pool


def states(seed: int = 0) -> kvpool.GDNPool:
    pool = kvpool.GDNPool(4, 2, 2, 4, 4, 6, 4, "cpu", torch.float32, 2)
    generator = torch.Generator().manual_seed(seed)
    for state in (pool.recurrent_state, pool.conv_state):
        state.copy_(torch.randn(state.shape, generator=generator))
    return pool


def rows(pool: kvpool.KVPool, slots: Sequence[int]) -> torch.Tensor:
    """K and V of slots, `[buffers, n, heads, dim]`."""
    return torch.stack(
        [buffer[torch.tensor(slots, dtype=torch.int64)] for buffer in (*pool.k_buffer, *pool.v_buffer)]
    )


def state_rows(pool: kvpool.GDNPool, slots: Sequence[int]) -> torch.Tensor:
    at = torch.tensor(slots)
    return torch.cat([pool.recurrent_state[:, at].flatten(2), pool.conv_state[:, at].flatten(2)], dim=2)
