"""Slots of another process: an `Endpoint` beside NIXL alone, and slots in one run beside scattered ones.

`make bench-nixl` runs it, once over TCP and once as NIXL chooses. NIXL alone reads the same rows, prepared
by row as engines do, without leases. It has processes of its own, before the others: its threads ask for
progress all the time, and take the cores of who runs beside them.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import nixl  # type: ignore[import-not-found]
import numpy as np
import torch
from harness import Case, Report, medians

from kvpool import KVPool
from kvpool.integrations.nixl import Endpoint

if TYPE_CHECKING:
    from collections.abc import Sequence
    from multiprocessing.connection import Connection

    import numpy.typing as npt

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
    with Endpoint("lender", pool()) as endpoint:
        questions.send(endpoint.metadata())
        with suppress(EOFError):
            while True:
                if questions.poll(0.0002):
                    questions.send(endpoint.lend(questions.recv(), lease_s=600).ticket)
                endpoint.poll()


def lender_alone(questions: Connection) -> None:
    """The same with NIXL alone."""
    kv = pool()
    agent = nixl.nixl_agent("lender")
    addresses = registered(agent, kv)
    questions.send((agent.get_agent_metadata(), addresses))
    while not questions.poll(0.0002):
        agent.get_new_notifs()


class Reader:
    """Reads slots of the other process with an endpoint."""

    def __init__(self, questions: Connection) -> None:
        """Connects."""
        self.questions = questions
        self.endpoint = Endpoint("reader", pool())
        self.peer = self.endpoint.connect(questions.recv())

    def case(self, there: Slots, here: Slots) -> Case:
        """Reads to the end."""
        self.questions.send(there)
        ticket: bytes = self.questions.recv()

        def read(_: int) -> None:
            self.peer.read(self.peer.slots(ticket), here, keep=True).wait()

        return Case(read, calls=1)


class ReaderAlone:
    """Reads them with NIXL alone."""

    def __init__(self, questions: Connection) -> None:
        """Connects."""
        self.kv = pool()
        self.agent = nixl.nixl_agent("reader")
        addresses = registered(self.agent, self.kv)
        metadata, theirs = questions.recv()
        name = self.agent.add_remote_agent(metadata)
        self.ours, self.theirs = self.prepared("", addresses), self.prepared(name, theirs)

    def prepared(self, name: str | bytes, addresses: Sequence[int]) -> Any:  # noqa: ANN401 - NIXL's
        """Every row of every buffer."""
        rows = len(self.kv.k_buffer[0])
        listed = [(address, ROW_BYTES, 0, ROW_BYTES, rows) for address in addresses]
        return self.agent.prep_xfer_dlist(name, np.array(listed, np.uint64), "DRAM")

    def case(self, there: Slots, here: Slots) -> Case:
        """Reads to the end."""
        firsts = np.arange(BUFFERS)[:, None] * len(self.kv.k_buffer[0])
        ours, theirs = ((firsts + slots[None, :]).ravel().astype(np.int32) for slots in (here, there))

        def read(_: int) -> None:
            handle = self.agent.make_prepped_xfer("READ", self.ours, ours, self.theirs, theirs, b"")
            state = self.agent.transfer(handle)
            while state == "PROC":
                state = self.agent.check_xfer_state(handle)
            assert state == "DONE"
            self.agent.release_xfer_handle(handle)

        return Case(read, calls=1)


def alone(questions: Connection, rounds: int, answers: Connection) -> None:
    """Times NIXL alone: microseconds of each kind."""
    reader = ReaderAlone(questions)
    answers.send({kind: medians([reader.case(*slots)], rounds)[0] for kind, slots in kinds().items()})
    questions.send("over")


def scattered(page: int, seed: int) -> Slots:
    """Slots in pages that are anywhere."""
    pages = 1 + np.random.default_rng(seed).permutation(ROWS // page - 1)[: TOKENS // page]
    slots: Slots = np.add.outer(pages * page, np.arange(page)).ravel().astype(np.int32)
    return slots


def kinds() -> dict[str, tuple[Slots, Slots]]:
    """Slots there and here."""
    run = np.arange(100, 100 + TOKENS, dtype=np.int32)
    return {
        "in one run": (run, run + 7),
        "in pages of 16": (scattered(16, 1), scattered(16, 2)),
        "scattered": (scattered(1, 1), scattered(1, 2)),
        "alone": (run[:1], run[5:6]),
    }


def main() -> None:
    """Measures, and reports."""
    network = os.environ.get("UCX_TLS", "as NIXL chooses")
    report = Report(f"Slots of another process, {network}")
    context = multiprocessing.get_context("spawn")
    (there, here), (answers, answer) = context.Pipe(), context.Pipe()
    pair = [
        context.Process(target=lender_alone, args=(there,), daemon=True),
        context.Process(target=alone, args=(here, report.rounds, answer), daemon=True),
    ]
    for process in pair:
        process.start()
    theirs_us = answers.recv()
    for process in pair:
        process.join()
    there, here = context.Pipe()
    other = context.Process(target=lender, args=(there,), daemon=True)
    other.start()
    reader = Reader(here)
    ours = {kind: reader.case(*slots) for kind, slots in kinds().items()}
    for kind, us in theirs_us.items():
        tokens = "a token" if kind == "alone" else f"{TOKENS} tokens"
        what = f"{tokens} of {ROW_BYTES * BUFFERS >> 10} KiB {kind}, {network}"
        report.compare_with(what, ours[kind], us, alternative="NIXL alone")
    what = f"{TOKENS * ROW_BYTES * BUFFERS >> 20} MiB in one run, {network}"
    report.compare(what, ours["in one run"], ours["scattered"], alternative="scattered")
    begun, used = time.perf_counter(), time.process_time()
    time.sleep(2)
    idle = (time.process_time() - used) / (time.perf_counter() - begun)
    report.note(f"a connected endpoint takes {idle:.1%} of a core while nothing moves, {network}")
    report.finish()
    reader.endpoint.close()
    other.kill()


if __name__ == "__main__":
    main()
