"""`KvpoolTransferConnector`: prefill on one vLLM engine and decode on another, by leases of `kvpool.remote`.

In `kv_transfer_config` of both, with the plugin switched on (else also `"kv_connector_module_path"`, this
module):

    {"kv_connector": "KvpoolTransferConnector", "kv_role": "kv_both", "kv_connector_extra_config":
        {"network": "eth0", "lease_s": 30}}

A request for prefill has `kv_transfer_params` with `do_remote_decode`, and those of its answer go with the
request to the other engine. That one reads the blocks over NIXL, and then the word of their lease: if the
prefill engine is gone, late, or not the one that gave the lease, the request computes its prompt itself. The
prefill engine has its blocks back when they were read, or when the lease is over.

Both engines have the same model, the same blocks and as many tensor-parallel workers, without pipeline and
context parallelism. Recurrent states are not moved.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvpool._limits import check_seconds
from kvpool.errors import ConfigError
from kvpool.integrations.vllm.handoff import EndpointMetadata
from kvpool.integrations.vllm.layout import cache_layout
from kvpool.integrations.vllm.seams import TRANSFER, VLLM
from kvpool.integrations.vllm.transfer_scheduler import TransferScheduler
from kvpool.integrations.vllm.transfer_worker import TransferWorker
from kvpool.remote import messages

VLLM.require(TRANSFER)

from vllm import __version__ as vllm_version  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.base import (  # noqa: E402
    KVConnectorBase_V1,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank  # noqa: E402
from vllm.v1.request import RequestStatus  # noqa: E402

if TYPE_CHECKING:
    import torch
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from kvpool.integrations.vllm.handoff import Plan

__all__ = ["KvpoolTransferConnector"]

_WHOLE = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)
"""How a request ends that was answered."""


class KvpoolTransferConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]  # vLLM has no types here
    """A connector that moves the blocks of prompts between engines, by leases.

    Settings are `network`, the devices that NIXL uses, as UCX lists them (`"lo"`, this machine alone, by
    default), `lease_s`, the seconds for which a prefill engine keeps blocks (30), and `patience_s` of
    `kvpool.integrations.nixl.Endpoint`.

    A load that fails is computed again: the connector sets vLLM's `kv_load_failure_policy` to that. Below a
    `MultiConnector` it cannot; set it there.

    Raises:
        ConfigError: If the model has recurrent states, the engine has pipeline or context parallelism, a
            setting is out of its range, or NIXL is not there.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        parallel = vllm_config.parallel_config
        ways = {
            "pipeline": parallel.pipeline_parallel_size,
            "decode context": parallel.decode_context_parallel_size,
            "prefill context": parallel.prefill_context_parallel_size,
        }
        for way, size in ways.items():
            if size > 1:
                raise ConfigError(
                    f"KvpoolTransferConnector cannot move blocks of {size}-fold {way} parallelism"
                )
        specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        if kv_cache_config.has_mamba_layers:
            raise ConfigError("KvpoolTransferConnector moves no recurrent states, and the model has some")
        transfer = vllm_config.kv_transfer_config
        settings = transfer.kv_connector_extra_config
        lease_s = float(settings.get("lease_s", 30.0))
        check_seconds(0.001, messages.MAX_SECONDS, lease_s=lease_s)
        self._block_sizes = [spec.block_size for spec in specs]
        self.scheduler: TransferScheduler | None = None
        self.worker: TransferWorker | None = None
        if role == KVConnectorRole.SCHEDULER:
            transfer.kv_load_failure_policy = "recompute"
            self.scheduler = TransferScheduler(
                transfer.engine_id,
                self._block_sizes,
                lease_s,
                may_lend=transfer.is_kv_producer,
                may_read=transfer.is_kv_consumer,
            )
            return
        rank = get_tensor_model_parallel_rank()
        options = {name: settings[name] for name in ("network", "patience_s") if name in settings}
        self.worker = TransferWorker(f"{transfer.engine_id}:{rank}", rank, **options)

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: KVTransferConfig) -> bool:
        """Return false: the endpoint has registered the memory that an engine that sleeps gives up."""
        del kv_transfer_config
        return False

    # Of the worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Make the endpoint over the engine's KV cache."""
        config, worker = self._vllm_config, self._worker()
        model = config.model_config
        shape: dict[str, int | str] = {
            "vLLM": vllm_version,
            "model": str(model.model),
            "revision": str(model.revision),
            "quantization": str(model.quantization),
            "dtype of the cache": str(config.cache_config.cache_dtype),
            "drafts": str(config.speculative_config is not None),
            "layout": cache_layout(self._kv_cache_config).fingerprint,
            "tokens of a block": str(self._block_sizes),
            "tensor-parallel workers": config.parallel_config.tensor_parallel_size,
            "rank": get_tensor_model_parallel_rank(),
        }
        worker.register(kv_caches, self._kv_cache_config.num_blocks, shape)

    def _worker(self) -> TransferWorker:
        if self.worker is None:
            raise ConfigError("this is the scheduler's half")
        return self.worker

    def get_handshake_metadata(self) -> EndpointMetadata:
        """Return the metadata of the endpoint."""
        return EndpointMetadata(self._worker().endpoint.metadata())

    def start_load_kv(self, forward_context: ForwardContext, **_: Any) -> None:  # noqa: ANN401
        """Begin to lend and to read blocks."""
        del forward_context
        plan: Plan = self._get_connector_metadata()
        self._worker().step(plan)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: a request is scheduled when its blocks have arrived."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, *_: Any, **__: Any) -> None:  # noqa: ANN401
        """Do nothing: blocks are lent where they are."""

    def wait_for_save(self) -> None:
        """Do nothing: a block that is lent stays until its lease is over."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return the leases that are over, and the reads that are."""
        return self._worker().results(finished_req_ids)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """Return the leases that are over, and the reads that are."""
        results = self.get_transfer_results(finished_req_ids)
        return results.finished_sending, results.finished_recving

    def shutdown(self) -> None:
        """End all transfers."""
        if self.worker is not None:
            self.worker.close()

    # Of the scheduler

    def _scheduler(self) -> TransferScheduler:
        if self.scheduler is None:
            raise ConfigError("this is a worker's half")
        return self.scheduler

    def set_xfer_handshake_metadata(self, metadata: dict[int, EndpointMetadata]) -> None:
        """Note the endpoints of all workers, by rank."""
        self._scheduler().peers = tuple(metadata[rank].metadata for rank in sorted(metadata))

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        """Note the manager that knows the blocks of requests."""
        super().bind_kv_cache_manager(kv_cache_manager)
        self._scheduler().manager = kv_cache_manager

    def on_new_request(self, request: Request) -> None:
        """Note a request."""
        self._scheduler().add(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        """Return how many tokens another engine has computed, and that they arrive between steps."""
        elsewhere = self._scheduler().tokens_elsewhere(request, num_computed_tokens)
        return elsewhere, elsewhere > 0

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        """Return all groups: what is read are the request's own blocks."""
        del request
        return tuple(range(len(self._block_sizes)))

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Read tokens into the blocks of a request."""
        self._scheduler().allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Plan:
        """Return what the workers do at this step."""
        return self._scheduler().plan(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Note the leases that are over."""
        self._scheduler().returned(connector_output.finished_sending or ())

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """As `request_finished_all_groups`, of the only group."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Return whether a request keeps its blocks for another engine, and the parameters for it."""
        return self._scheduler().finished(request, block_ids, is_whole=request.status in _WHOLE)
