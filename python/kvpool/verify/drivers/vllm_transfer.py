"""`KvpoolTransferConnector`: blocks from one engine to another over NIXL, by the workers' half."""

from __future__ import annotations

import importlib.util
import secrets
from contextlib import ExitStack
from typing import TYPE_CHECKING

import numpy as np

from kvpool.errors import StateError
from kvpool.verify.driver import Driver, LeftOutError
from kvpool.verify.drivers.vllm_blocks import Blocks, part_of
from kvpool.verify.pattern import Pattern
from kvpool.verify.requests import Workload

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from kvpool._kvpool import CacheLayout
    from kvpool.verify.pattern import Array
    from kvpool.verify.requests import Request

    Bytes = NDArray[np.uint8]

_LEASE_S = 120.0


class VllmTransferDriver(Driver):
    """The endpoints of two workers in this process. Every request goes to the other engine with each move.

    Args:
        layout: The layout; the connector moves no states.
        tokens: Tokens of the proof, as in `Workload`.
        device: Device of the blocks.

    Raises:
        LeftOutError: If vLLM, PyTorch or NIXL is not installed, vLLM is another one than the connector knows,
            or the layout has states alone.
    """

    def __init__(self, layout: CacheLayout, tokens: int | None = None, device: str = "cpu") -> None:
        for package in ("torch", "vllm", "nixl"):
            if importlib.util.find_spec(package) is None:
                raise LeftOutError(f"{package} is not installed")
        groups = [group for group in layout.groups if group.kind != "state"]
        if not groups:
            raise LeftOutError("the layout has states alone, which the connector does not move")
        super().__init__(part_of(layout, groups))
        left_out = [group.name for group in layout.groups if group.kind == "state"]
        self.notes += [f"without {', '.join(left_out)}"] if left_out else []
        try:
            from kvpool.integrations.vllm.transfer_worker import TransferWorker  # noqa: PLC0415
        except Exception as error:
            raise LeftOutError(f"this vLLM is not known to the connector: {error!r}") from error
        load = Workload(Pattern(self.layout), tokens)
        self._engines = [Blocks(self.layout, load, device, one_pool=True) for _ in range(2)]
        self._workers = [TransferWorker(f"kvpool-verify-{secrets.token_hex(6)}", 0) for _ in self._engines]
        for engine, worker in zip(self._engines, self._workers, strict=True):
            caches = {f"tensor {at:04}": tensor for at, tensor in enumerate(engine.tensors)}
            worker.register(caches, engine.tensors[0].shape[0], {"layout": self.layout.fingerprint})
        self._here = 0
        self._requests: dict[int, Request] = {}
        self._blocks: dict[int, list[list[int]]] = {}

    def write(self, request: Request, data: Mapping[Array, Bytes]) -> None:
        self._requests[request.number] = request
        blocks = self._blocks[request.number] = self._engines[self._here].alloc(request)
        self._engines[self._here].write(blocks, data)

    def read(self, request: Request) -> Iterator[tuple[Array, Bytes]]:
        return self._engines[self._here].read(self._blocks[request.number])

    def drop(self, request: Request) -> None:
        del self._requests[request.number]
        self._engines[self._here].free(self._blocks.pop(request.number))

    def move(self) -> None:
        from kvpool.integrations.vllm.handoff import Handoff, Lend, Load, Plan  # noqa: PLC0415 - of an engine
        from kvpool.remote import LeaseKeys  # noqa: PLC0415

        there = 1 - self._here
        keys, lent, loads = LeaseKeys(), Plan(), Plan()
        peers = (self._workers[self._here].endpoint.metadata(),)
        moved: dict[int, list[list[int]]] = {}
        for number, blocks in self._blocks.items():
            key, old = keys.take(), _flat(blocks)
            lent.lends.append(Lend(f"{number}", key, old, _LEASE_S))
            lent.sent.append(f"{number}")
            new = moved[number] = self._engines[there].alloc(self._requests[number])
            at = np.arange(len(old), dtype=np.int32)
            handoff = Handoff(len(self._requests[number].tokens), "", (), key.ticket(old, _LEASE_S), peers)
            loads.loads.append(Load(f"{number}", handoff, at, _flat(new)))
        self._workers[self._here].step(lent)
        self._workers[there].step(loads)
        arriving = {f"{number}" for number in moved}
        leaving = set(arriving)
        while arriving or leaving:
            results = self._workers[there].results(set())
            if results.failed_recving:
                raise StateError(f"requests {sorted(results.failed_recving)} have not arrived")
            arriving -= results.finished_recving
            leaving -= self._workers[self._here].results(set()).finished_sending
        for blocks in self._blocks.values():
            self._engines[self._here].free(blocks)
        self._blocks, self._here = moved, there

    def close(self) -> None:
        with ExitStack() as stack:
            for worker in self._workers:
                stack.callback(worker.close)


def _flat(blocks: list[list[int]]) -> NDArray[np.int32]:
    """Return the blocks of all groups, one after the other."""
    return np.array([block for group in blocks for block in group], np.int32)
