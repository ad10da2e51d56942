"""A worker's half of `KvpoolTransferConnector`: the endpoint over the engine's KV cache."""

from __future__ import annotations

import hashlib
import logging
from typing import TYPE_CHECKING, Any

from kvpool.errors import ConfigError, KvPoolError
from kvpool.integrations.nixl import Endpoint
from kvpool.integrations.vllm.seams import TRANSFER, VLLM
from kvpool.remote import Rows, TransferError

VLLM.require(TRANSFER)

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults  # noqa: E402
from vllm.v1.kv_cache_interface import group_kernel_blocks  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from kvpool.integrations.vllm.handoff import Handoff, Lend, Load, Plan
    from kvpool.remote import Peer, RemoteSlots, SlotLease, Transfer

_logger = logging.getLogger("kvpool")


def rows_of(
    caches: Mapping[str, torch.Tensor], blocks: int, shape: Mapping[str, int | str], device: str
) -> Rows:
    """Return an engine's KV cache as rows of blocks.

    Args:
        caches: The tensor of each layer.
        blocks: Blocks of the engine.
        shape: What both engines must have in common. How a block lies in memory is added to it.
        device: `"cpu"` or `"cuda:0"`.

    Raises:
        ConfigError: If the bytes of a block of a layer do not lie together.
    """
    # Both engines number the buffers by the names of their layers: addresses have another order in each.
    buffers: dict[tuple[int, int], int] = {}
    described = []
    for name, cache in sorted(caches.items()):
        if cache.shape[0] % blocks:
            raise ConfigError(f"{name} has {[*cache.shape]} values, not {blocks} blocks one after the other")
        view = group_kernel_blocks(cache, blocks)
        size = view.element_size()
        row = view.stride(0) * size
        inner = [*zip(view.shape[1:], view.stride()[1:], strict=True)]
        if (sum((count - 1) * stride for count, stride in inner) + 1) * size > row:
            raise ConfigError(f"{name} has strides {view.stride()}: blocks do not lie together")
        storage = view.untyped_storage().data_ptr()
        # Layers may share rows.
        first, within = divmod(view.data_ptr() - storage, row)
        number = buffers.setdefault((storage + first * row, row), len(buffers))
        described.append((name, number, within, inner, str(view.dtype)))
    layout = hashlib.blake2b(repr(described).encode(), digest_size=16).hexdigest()
    return Rows([*buffers], rows=blocks, shape={**shape, "memory layout": layout}, device=device)


class TransferWorker:
    """Lends and reads blocks of a worker.

    Args:
        name: The name of the endpoint.
        rank: The rank of the worker, and so of the one that it reads from.
        settings: The options of the endpoint.
    """

    def __init__(self, name: str, rank: int, **settings: Any) -> None:  # noqa: ANN401
        self._name, self._rank, self._settings = name, rank, settings
        self._endpoint: Endpoint | None = None
        self._caches: Mapping[str, torch.Tensor] = {}  # their memory must stay valid as long as the endpoint
        self._leases: dict[str, SlotLease] = {}
        self._sent: set[str] = set()
        self._reading: dict[str, Transfer] = {}
        self._failed: set[str] = set()
        self._returning: list[Transfer] = []

    def register(
        self, caches: Mapping[str, torch.Tensor], blocks: int, shape: Mapping[str, int | str]
    ) -> None:
        """Make the endpoint over the tensors of all layers."""
        device = next(iter(caches.values())).device
        named = "cpu" if device.type == "cpu" else f"cuda:{device.index or 0}"
        self._caches = dict(caches)
        self._endpoint = Endpoint(self._name, rows_of(caches, blocks, shape, named), **self._settings)

    @property
    def endpoint(self) -> Endpoint:
        """The endpoint."""
        if self._endpoint is None:
            raise ConfigError("the engine has not registered its KV cache")
        return self._endpoint

    def step(self, plan: Plan) -> None:
        """Do what the scheduler has decided."""
        for request_id in plan.ends:
            if lease := self._leases.pop(request_id, None):
                lease.end()
        for lend in plan.lends:
            self._lend(lend)
        self._sent.update(plan.sent)
        for load in plan.loads:
            self._load(load)
        for request_id in plan.lacking:
            self._fail(request_id, TransferError("blocks of a window are needed that are gone"))
        for handoff in plan.returns:
            self._return(handoff)
        for handoff in plan.renewals:
            self._renew(handoff)

    def _lend(self, lend: Lend) -> None:
        try:
            lease = self.endpoint.lend(lend.blocks, lease_s=lend.lease_s, key=lend.key)
        except KvPoolError as error:
            _logger.warning("request %s is not handed over: %s", lend.request_id, error)
        else:
            self._leases[lend.request_id] = lease

    def _load(self, load: Load) -> None:
        try:
            peer, lent = self._lent(load.handoff)
            transfer = peer.read(lent._replace(slots=lent.slots[load.there]), load.here)
        except (KvPoolError, IndexError) as error:
            self._fail(load.request_id, error)
        else:
            self._reading[load.request_id] = transfer

    def _return(self, handoff: Handoff) -> None:
        """Give a lease back, by a read of no rows."""
        try:
            peer, lent = self._lent(handoff)
            self._returning.append(peer.read(lent.since(len(lent.slots)), ()))
        except (KvPoolError, IndexError) as error:
            _logger.debug("a lease is not given back: %s", error)  # it ends by itself

    def _renew(self, handoff: Handoff) -> None:
        try:
            peer, lent = self._lent(handoff)
            peer.renew(lent)
        except (KvPoolError, IndexError) as error:
            _logger.debug("a lease is not renewed: %s", error)  # reading its blocks will tell

    def _lent(self, handoff: Handoff) -> tuple[Peer, RemoteSlots]:
        """Return the worker of the same rank, and the blocks that it has lent."""
        if self._rank >= len(handoff.peers):
            raise TransferError(f"rank {self._rank} is beyond the {len(handoff.peers)} of the other engine")
        peer = self.endpoint.connect(handoff.peers[self._rank])
        return peer, peer.slots(handoff.ticket)

    def _fail(self, request_id: str, why: Exception) -> None:
        _logger.warning("request %s computes its prompt: %s", request_id, why)
        self._failed.add(request_id)

    def results(self, ended: set[str]) -> KVConnectorTransferResults:
        """Return the requests whose leases are over, whose blocks have arrived, and whose have not.

        Args:
            ended: Requests that are over, by now or earlier.
        """
        if self._leases or self._reading or self._returning:
            self.endpoint.poll()
        for request_id in ended & self._reading.keys():
            self._reading[request_id].cancel()
        arrived = {request_id for request_id, transfer in self._reading.items() if transfer.query()}
        for request_id in arrived:
            error = self._reading.pop(request_id).error
            if error is not None:
                self._fail(request_id, error)
        self._returning = [transfer for transfer in self._returning if not transfer.query()]
        over = {
            request_id
            for request_id in self._sent
            if (lease := self._leases.get(request_id)) is None or lease.query()
        }
        self._sent -= over
        for request_id in over:
            self._leases.pop(request_id, None)
        failed, self._failed = self._failed, set()
        return KVConnectorTransferResults(
            finished_sending=over, finished_recving=arrived | failed, failed_recving=failed
        )

    def close(self) -> None:
        """End all transfers. When the call returns, no byte arrives any more."""
        if self._endpoint is not None:
            self._endpoint.close()
