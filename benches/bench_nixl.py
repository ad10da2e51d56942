"""Slots of another process: an `Endpoint` beside NIXL alone, and slots in one run beside scattered ones.

`make bench-nixl` runs it, once over TCP and once as NIXL chooses. NIXL alone reads the same rows, prepared
by row as engines do, without leases, from the same process.
"""

from __future__ import annotations

import multiprocessing
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import nixl  # type: ignore[import-not-found]
import numpy as np
import torch
from harness import Case, Report

from kvpool import KVPool
from kvpool.integrations.nixl import Endpoint

if TYPE_CHECKING:
    from collections.abc import Sequence
    from multiprocessing.connection import Connection

    import numpy.typing as npt

    from kvpool.remote import Transfer

    Slots = npt.NDArray[np.int32]

LAYERS, HEADS, DIM = 16, 8, 64
ROWS, TOKENS = 8192, 2048
BUFFERS, ROW_BYTES = 2 * LAYERS, HEADS * DIM * 2


def pool() -> KVPool:
    """K and V of a small model, every byte written once."""
    kv = KVPool(ROWS, LAYERS, HEADS, DIM, "cpu", torch.bfloat16)
    for buffer in (*kv.k_buffer, *kv.v_buffer):
        buffer.fill_(1)
    return kv


def registered(agent: Any, kv: KVPool) -> list[int]:  # noqa: ANN401 - NIXL's
    """Where the buffers of a pool are, whose memory an agent registers."""
    addresses, sizes, _ = kv.get_contiguous_buf_infos()
    start = min(addresses)
    end = max(address + size for address, size in zip(addresses, sizes, strict=True))
    agent.register_memory([(start, end - start, 0, "")], "DRAM")
    return addresses


def lender(questions: Connection) -> None:
    """The other process: lends slots, and answers reads."""
    kv = pool()
    with Endpoint("lender", kv) as endpoint:
        agent = nixl.nixl_agent("plain")
        addresses = registered(agent, kv)
        questions.send((endpoint.metadata(), agent.get_agent_metadata(), addresses))
        with suppress(EOFError):
            while True:
                if questions.poll(0.0002):
                    questions.send(endpoint.lend(questions.recv(), seconds=600).ticket)
                endpoint.poll()
                agent.get_new_notifs()


class Reader:
    """This process: reads with an endpoint, or with NIXL alone."""

    def __init__(self, questions: Connection) -> None:
        """Connects both."""
        self.questions = questions
        metadata, plain, theirs = questions.recv()
        self.kv = pool()
        self.endpoint = Endpoint("reader", self.kv)
        self.peer = self.endpoint.connect(metadata)
        self.agent = nixl.nixl_agent("reader")
        addresses = registered(self.agent, self.kv)
        name = self.agent.add_remote_agent(plain)
        self.ours, self.theirs = self.prepared("", addresses), self.prepared(name, theirs)

    def prepared(self, name: str | bytes, addresses: Sequence[int]) -> Any:  # noqa: ANN401 - NIXL's
        """Every row of every buffer."""
        rows = len(self.kv.k_buffer[0])
        listed = [(address, ROW_BYTES, 0, ROW_BYTES, rows) for address in addresses]
        return self.agent.prep_xfer_dlist(name, np.array(listed, np.uint64), "DRAM")

    def lent(self, there: Slots) -> bytes:
        """The ticket of slots of the peer."""
        self.questions.send(there)
        ticket: bytes = self.questions.recv()
        return ticket

    def with_endpoint(self, ticket: bytes, here: Slots) -> None:
        """Reads leased slots to the end."""
        transfer: Transfer = self.peer.read(self.peer.slots(ticket), here, keep=True)
        transfer.wait()

    def with_nixl(self, there: Slots, here: Slots) -> None:
        """Reads slots to the end."""
        firsts = np.arange(BUFFERS)[:, None] * len(self.kv.k_buffer[0])
        ours, theirs = ((firsts + slots[None, :]).ravel().astype(np.int32) for slots in (here, there))
        handle = self.agent.make_prepped_xfer("READ", self.ours, ours, self.theirs, theirs, b"")
        state = self.agent.transfer(handle)
        while state == "PROC":
            state = self.agent.check_xfer_state(handle)
        assert state == "DONE"
        self.agent.release_xfer_handle(handle)


def scattered(page: int, seed: int) -> Slots:
    """Slots in pages that are anywhere."""
    pages = 1 + np.random.default_rng(seed).permutation(ROWS // page - 1)[: TOKENS // page]
    slots: Slots = np.add.outer(pages * page, np.arange(page)).ravel().astype(np.int32)
    return slots


def main() -> None:
    """Measures, and reports."""
    network = os.environ.get("UCX_TLS", "as NIXL chooses")
    report = Report(f"Slots of another process, {network}")
    context = multiprocessing.get_context("spawn")
    questions, answers = context.Pipe()
    other = context.Process(target=lender, args=(answers,), daemon=True)
    other.start()
    reader = Reader(questions)
    run = np.arange(100, 100 + TOKENS, dtype=np.int32)
    kinds = {
        "in one run": (run, run + 7),
        "in pages of 16": (scattered(16, 1), scattered(16, 2)),
        "scattered": (scattered(1, 1), scattered(1, 2)),
    }
    size = TOKENS * ROW_BYTES * BUFFERS
    ours = {}
    for kind, (there, here) in kinds.items():
        ticket = reader.lent(there)

        def read(_: int, ticket: bytes = ticket, here: Slots = here) -> None:
            reader.with_endpoint(ticket, here)

        def read_plain(_: int, there: Slots = there, here: Slots = here) -> None:
            reader.with_nixl(there, here)

        what = f"{TOKENS} tokens of {ROW_BYTES * BUFFERS >> 10} KiB {kind}, {network}"
        ours[kind] = Case(read, calls=1)
        report.compare(what, ours[kind], Case(read_plain, calls=1), alternative="NIXL alone")
    what = f"{size >> 20} MiB in one run, {network}"
    report.compare(what, ours["in one run"], ours["scattered"], alternative="scattered")
    report.finish()
    reader.endpoint.close()
    other.kill()


if __name__ == "__main__":
    main()
