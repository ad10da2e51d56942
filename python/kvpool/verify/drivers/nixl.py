"""Rows and states between two processes over NIXL, there and back."""

from __future__ import annotations

import importlib.util
import multiprocessing
import sys
import time
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from kvpool._kvpool import CacheLayout, TokenToKVPoolAllocator
from kvpool.errors import KvPoolError, StateError
from kvpool.verify.driver import Driver, LeftOutError
from kvpool.verify.drivers import pools
from kvpool.verify.pattern import Pattern
from kvpool.verify.requests import Workload

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from multiprocessing.connection import Connection

    from numpy.typing import NDArray

    from kvpool._kvpool import GDNPool, KVPool
    from kvpool.verify.pattern import Array
    from kvpool.verify.requests import Request

    Bytes = NDArray[np.uint8]

_LEASE_S, _PATIENCE_S = 120.0, 60.0
_POLL_S = 0.0005


class _Side:
    """The pools and the endpoint of a process."""

    def __init__(self, name: str, layout: CacheLayout, slots: int, rows: int, device: str) -> None:
        from kvpool.integrations.nixl import Endpoint  # noqa: PLC0415 - only if NIXL is there

        self.kv_group = next(group for group in layout.groups if group.kind == "full")
        self.state_group = next((group for group in layout.groups if group.kind == "state"), None)
        self.kv: KVPool = pools.make_kv(self.kv_group, slots, layout.page_size, device)
        self.allocator = TokenToKVPoolAllocator(slots, device, layout.page_size, strict=True)
        self.states: GDNPool | None = None
        if self.state_group is not None:
            self.states = pools.make_states(self.state_group, rows, 0, device)
            pools.free_states(self.states, np.arange(1, rows + 1))
        self.endpoint = Endpoint(name, self.kv, states=self.states)

    def alloc(self, count: int) -> list[int]:
        """Take slots, which a process that has no PyTorch can name as well."""
        slots = self.allocator.alloc(count)
        assert slots is not None  # noqa: S101 - there is room for all
        return [int(slot) for slot in slots.tolist()]

    def free(self, slots: list[int], states: list[int]) -> None:
        self.allocator.free(slots)
        pools.free_kv(self.kv, np.array(slots))
        if self.states is not None:
            pools.free_states(self.states, np.array(states))

    def read(self, peer: Any, ticket: bytes, slots: list[int], states: list[int]) -> None:  # noqa: ANN401 - a `Peer`
        """Read what a ticket names into slots and states, to the end."""
        peer.read(peer.slots(ticket), slots, states=states).wait(_PATIENCE_S)


class NixlDriver(Driver):
    """Two processes with an `Endpoint` of `kvpool.integrations.nixl` each.

    Every request is lent to the other process, which reads it into slots of its own; its rows are overwritten
    here, and read back from the other process into other slots.

    Args:
        layout: The layout.
        tokens: Tokens of the proof, as in `Workload`.
        device: Device of the pools.

    Raises:
        LeftOutError: If NIXL is not installed, or the layout has no full attention whose K and V a
            `KVPool` has.
    """

    def __init__(self, layout: CacheLayout, tokens: int | None = None, device: str = "cpu") -> None:
        if importlib.util.find_spec("nixl") is None:
            raise LeftOutError("NIXL is not installed: pip install 'kvpool[nixl]'")
        choices = (("an endpoint", _is_full_kv), ("GDNPool", pools.is_states))
        chosen, notes = pools.choose(layout, choices, one_each=True)
        super().__init__(chosen)
        self.notes += notes
        load = Workload(Pattern(chosen), tokens)
        slots = load.most_tokens + max(len(request.tokens) for request in load)
        rows = len(load.first) + 1
        self._slots: dict[int, list[int]] = {}
        self._rows: dict[int, list[int]] = {}
        self._free_rows = list(range(1, rows + 1))
        with ExitStack() as stack:
            self._here = _Side("kvpool-verify-here", chosen, slots, rows, device)
            stack.callback(self._here.endpoint.close)
            context = multiprocessing.get_context("spawn")
            self._questions, answers = context.Pipe()
            arguments = (answers, chosen, slots, rows, device)
            other = context.Process(target=_serve, args=arguments, daemon=True)
            other.start()
            stack.callback(other.join)
            stack.callback(other.kill)
            answers.close()
            self._peer = self._here.endpoint.connect(self._ask("connect", self._here.endpoint.metadata()))
            self._stack = stack.pop_all()

    def _ask(self, *question: object) -> Any:  # noqa: ANN401 - as the question
        """Return the answer of the other process, while peers of this one are served."""
        self._questions.send(question)
        deadline = time.monotonic() + _PATIENCE_S
        while not self._questions.poll(_POLL_S):
            self._here.endpoint.poll()
            if time.monotonic() > deadline:
                raise StateError(f"the other process has not answered for {_PATIENCE_S:.0f} s")
        try:
            answer = self._questions.recv()
        except EOFError:
            raise StateError("the other process has ended") from None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _take(self, request: int) -> None:
        if self._here.states is not None:
            self._rows[request] = [self._free_rows.pop(0)]

    def write(self, request: Request, data: Mapping[Array, Bytes]) -> None:
        here = self._here
        slots = self._slots[request.number] = here.alloc(len(request.tokens))
        pools.write_kv(here.kv, here.kv_group, slots, data)
        self._take(request.number)
        if here.states is not None and here.state_group is not None:
            [row] = self._rows[request.number]
            pools.write_states(here.states, here.state_group, row, data)

    def move(self) -> None:
        here = self._here
        for number, old in self._slots.items():
            rows = self._rows.get(number, [])
            lease = here.endpoint.lend(old, states=rows, lease_s=_LEASE_S)
            ticket = self._ask("take", lease.ticket, len(old))
            new = here.alloc(len(old))
            self._take(number)
            lease.end()
            here.read(self._peer, ticket, new, self._rows.get(number, []))
            self._ask("forget")
            self._give_back(old, rows)
            self._slots[number] = new

    def _give_back(self, slots: list[int], rows: list[int]) -> None:
        self._here.free(slots, rows)
        self._free_rows += rows

    def read(self, request: Request) -> Iterator[tuple[Array, Bytes]]:
        here = self._here
        slots = self._slots[request.number]
        for layer, *arrays in pools.kv_planes(here.kv_group):
            for array, buffer in zip(arrays, here.kv.get_kv_buffer(layer), strict=True):
                found = pools.entry_rows(buffer).read(np.array(slots))
                yield array, pools.by_pages(found, self.layout.page_size)
        if here.states is not None and here.state_group is not None:
            [row] = self._rows[request.number]
            yield from pools.read_states(here.states, here.state_group, row)

    def drop(self, request: Request) -> None:
        self._give_back(self._slots.pop(request.number), self._rows.pop(request.number, []))

    def close(self) -> None:
        self._stack.close()


def _is_full_kv(group: Any) -> bool:  # noqa: ANN401 - a `Group`
    return group.kind == "full" and group.stride == 1 and pools.is_kv(group)


def _serve(questions: Connection, layout: CacheLayout, slots: int, rows: int, device: str) -> None:
    """Answer questions in the other process, until the one that asks has ended."""
    if device == "cpu":
        sys.modules["torch"] = None  # type: ignore[assignment]  # it takes seconds, and no byte is looked at here
    side = _Side("kvpool-verify-there", layout, slots, rows, device)
    taken: list[int] = []
    lease: Any = None
    states = [1] if side.states is not None else []
    peer: Any = None
    with suppress(EOFError, KeyboardInterrupt):
        while True:
            if not questions.poll(_POLL_S):
                side.endpoint.poll()
                continue
            name, *arguments = questions.recv()
            try:
                if name == "connect":
                    peer = side.endpoint.connect(arguments[0])
                    questions.send(side.endpoint.metadata())
                elif name == "take":
                    ticket, count = arguments
                    taken = side.alloc(count)
                    side.read(peer, ticket, taken, states)
                    lease = side.endpoint.lend(taken, states=states, lease_s=_LEASE_S)
                    questions.send(lease.ticket)
                else:
                    lease.end()
                    side.free(taken, states)
                    questions.send(None)
            except KvPoolError as error:
                questions.send(error)
    side.endpoint.close()
