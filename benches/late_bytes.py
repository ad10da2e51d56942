"""Bytes of a peer that was given up while it was stopped, and that arrive all the same when it wakes up.

`make bench-late-bytes` runs it: NIXL alone, two processes on loopback. The owner of the memory stops the peer
in the middle of a transfer, gives it up as each row says, clears its memory, and wakes the peer up.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import time
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import nixl  # type: ignore[import-not-found]
import numpy as np
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

MB = 1_000_000
PATIENCE_S = 30.0
LATE_S = 5.0
STEP = 1 << 16
"""Bytes between those that are looked at to see how far a transfer is."""


class Case(NamedTuple):
    """The operation during which the peer is stopped, and the way in which it is given up."""

    what: str
    network: str
    size: int
    is_write: bool
    end: str


CASES = (
    Case("writing, and its agent was removed and the memory deregistered", "tcp", 512 * MB, True, "forget"),
    Case("writing, and the agent that it wrote to was closed", "shared memory", 2000 * MB, True, "close"),
    Case("answering a read, which was released, and its agent removed", "tcp", 512 * MB, False, "forget"),
    Case("answering a read, and the agent that read was closed", "tcp", 512 * MB, False, "close"),
)


class Side:
    """An agent with memory."""

    def __init__(self, name: str, size: int, value: int) -> None:
        self.memory = np.full(size, value, np.uint8)
        self.place = (self.memory.ctypes.data, size, 0)
        self.agent = nixl.nixl_agent(name)
        self.registered = self.agent.register_memory([(*self.place, "")], "DRAM")
        self.handle: Any = None

    def introduction(self) -> tuple[bytes, tuple[int, int, int]]:
        """The addresses that the other side has to know."""
        return self.agent.get_agent_metadata(), self.place

    def begin(self, operation: str, other: tuple[bytes, tuple[int, int, int]]) -> None:
        """Begins to copy all of the memory, to or from that of the other."""
        metadata, place = other
        name = self.agent.add_remote_agent(metadata)
        here, there = (self.agent.get_xfer_descs([one], "DRAM") for one in (self.place, place))
        self.handle = self.agent.initialize_xfer(operation, here, there, name, b"")
        self.agent.transfer(self.handle)

    def forget(self) -> None:
        """Lets go of the peer and of the transfer, as far as NIXL does."""
        if self.handle is not None:
            try:
                self.agent.release_xfer_handle(self.handle)
            except Exception as error:  # noqa: BLE001 - there is a base class for each build
                print(f"NIXL: {error}")
        self.agent.remove_remote_agent("peer")
        self.agent.deregister_memory(self.registered)

    def close(self) -> None:
        """Ends the agent."""
        alive = weakref.ref(self.agent.agent)
        self.agent = self.handle = self.registered = None
        gc.collect()
        assert alive() is None, "something refers to the agent"

    def arrived(self) -> float:
        """The share of the memory that the peer has filled."""
        return float((self.memory[::STEP] != 0).mean())


def peer(questions: Connection, case: Case) -> None:
    """Writes to the owner, or answers its read."""
    side = Side("peer", case.size, 1)
    questions.send(side.introduction())
    other = questions.recv()
    # When it wakes up nobody may be there to write to.
    with suppress(Exception):
        if case.is_write:
            side.begin("WRITE", other)
        while True:
            side.agent.get_new_notifs()
            if side.handle is not None:
                side.agent.check_xfer_state(side.handle)


def owner(questions: Connection, pid: int, answers: Connection, case: Case) -> None:
    """Owns the memory into which the bytes go."""
    side = Side("owner", case.size, 0)
    other = questions.recv()
    questions.send(side.introduction())
    if not case.is_write:
        side.begin("READ", other)
    deadline = time.monotonic() + PATIENCE_S
    while not side.arrived() > 0.1:  # it has begun
        assert time.monotonic() < deadline, "nothing arrives"
        if side.handle is not None:
            side.agent.check_xfer_state(side.handle)
    os.kill(pid, signal.SIGSTOP)
    time.sleep(0.2)
    there = side.arrived()
    if case.end == "forget":
        side.forget()
    else:
        side.close()
    side.memory.fill(0)
    os.kill(pid, signal.SIGCONT)
    time.sleep(LATE_S)
    answers.send((there, int(np.count_nonzero(side.memory))))


def measured(case: Case) -> tuple[float, int]:
    """The share that had arrived, and the bytes that arrived afterwards."""
    if case.network == "tcp":
        os.environ["UCX_TLS"] = "tcp"
    else:
        os.environ.pop("UCX_TLS", None)
    context = multiprocessing.get_context("spawn")
    (of_owner, of_peer), (answers, answer) = context.Pipe(), context.Pipe()
    other = context.Process(target=peer, args=(of_peer, case), daemon=True)
    other.start()
    assert other.pid is not None
    own = context.Process(target=owner, args=(of_owner, other.pid, answer, case), daemon=True)
    own.start()
    try:
        assert answers.poll(4 * PATIENCE_S), "no answer"
        there, late = answers.recv()
    finally:
        other.kill()
        own.kill()
        other.join()
        own.join()
    return there, late


def main() -> None:
    """Measures, and reports."""
    table = Table("what the peer was doing", "network", "MB", "had arrived", "MB that arrived afterwards")
    for case in CASES:
        there, late = measured(case)
        table.add_row(case.what, case.network, f"{case.size / MB:,.0f}", f"{there:.0%}", f"{late / MB:,.0f}")
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
