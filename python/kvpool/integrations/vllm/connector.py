"""`KvpoolConnector`: KV cache of a vLLM engine in memory of kvpool, with host memory and a disk below it.

In `kv_transfer_config`, with the plugin switched on (else also `"kv_connector_module_path"`, this module):

    {"kv_connector": "KvpoolConnector", "kv_role": "kv_both", "kv_connector_extra_config":
        {"cpu_bytes_to_use": 17179869184, "path": "/var/cache/kv", "capacity_bytes": 1099511627776}}

It is vLLM's `OffloadingConnector` over `KvpoolTieringSpec`, on GPUs and on the CPU, where vLLM's own refuses
to run: there blocks are copied by PyTorch, when a step submits them. Without `path` there is no disk. Other
settings are those of the connector.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from kvpool import Workspace
from kvpool.errors import ConfigError
from kvpool.integrations.vllm.offload import KvpoolTieringSpec
from kvpool.integrations.vllm.seams import CONNECTOR, VLLM

VLLM.require(CONNECTOR)

from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import (  # noqa: E402
    OffloadingConnector,
)
from vllm.platforms import current_platform  # noqa: E402
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult  # noqa: E402
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.kv_offload.base import CanonicalKVCaches

__all__ = ["CopyWorker", "KvpoolConnector", "KvpoolSpec"]

_SEGMENT = 2 << 20
"""PyTorch takes GPU memory in multiples of this."""


class KvpoolConnector(OffloadingConnector):  # type: ignore[misc]  # vLLM has no types here
    """vLLM's connector for offloading, whose engine keeps its KV cache in a `kvpool.Workspace`.

    Raises:
        ConfigError: If `cpu_bytes_to_use` is missing, or one of `path` and `capacity_bytes` alone is there.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        _complete(vllm_config.kv_transfer_config.kv_connector_extra_config)
        self.memory: Workspace | None = None
        super().__init__(vllm_config, role, kv_cache_config)

    def get_mem_pool_context(self) -> Any:  # noqa: ANN401 - a context manager
        """Return a context in which the engine's KV cache is allocated in `memory`."""
        sizes = {tensor.size for tensor in self._kv_cache_config.kv_cache_tensors}
        if not sizes:
            return None
        device = current_platform.device_type
        whole = -(-max(sizes) // _SEGMENT) * _SEGMENT
        self.memory = Workspace(device, whole)
        return _zeros_from(self.memory) if device == "cpu" else self.memory.use()

    def shutdown(self) -> None:
        """End all transfers, and give the memory back with its last tensor."""
        super().shutdown()
        if self.memory is not None:
            self.memory.close()


def _complete(settings: dict[str, Any]) -> None:
    """Add to a connector's settings what vLLM's connector needs."""
    if not settings.get("cpu_bytes_to_use"):
        raise ConfigError(
            "KvpoolConnector needs cpu_bytes_to_use, the bytes of host memory for offloaded blocks"
        )
    settings.setdefault("spec_name", "KvpoolSpec")
    settings.setdefault("spec_module_path", __name__)
    path, capacity = settings.get("path"), settings.get("capacity_bytes")
    if (path is None) != (capacity is None):
        raise ConfigError(
            f"path is {path!r} and capacity_bytes {capacity!r}: a disk needs both, none of them is none"
        )
    if path is not None and "secondary_tiers" not in settings:
        settings["secondary_tiers"] = [
            {
                "type": "FileStoreTier",
                "module_path": KvpoolTieringSpec.__module__,
                "path": path,
                "capacity_bytes": capacity,
            }
        ]


@contextmanager
def _zeros_from(memory: Workspace) -> Iterator[None]:
    """Let `torch.zeros` take whole buffers of bytes, as vLLM allocates its KV cache, from a workspace."""
    own = torch.zeros

    def zeros(*size: Any, **options: Any) -> torch.Tensor:  # noqa: ANN401 - PyTorch's
        if len(size) == 1 and isinstance(size[0], int) and options.get("dtype") == torch.int8:
            return memory.zeros(size[0], torch.int8)
        return own(*size, **options)

    torch.zeros = zeros
    try:
        yield
    finally:
        torch.zeros = own


class KvpoolSpec(KvpoolTieringSpec):
    """`KvpoolTieringSpec`, also for engines on the CPU."""

    _worker: OffloadingWorker | None

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Return what copies between the engine's blocks and host memory: vLLM's own on a GPU."""
        if current_platform.device_type != "cpu":
            return super().get_worker(kv_caches)
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self.config.engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = CopyWorker(kv_caches, self.blocks_per_chunk, region)
        return self._worker

    def _uses_shared_region(self) -> bool:
        return True


class CopyWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies blocks of an engine on the CPU to and from chunks of host memory, at once.

    Args:
        caches: The tensors of the engine, `[blocks, bytes]` int8 each, and which of them a group uses.
        blocks_per_chunk: Blocks of a chunk.
        region: The host memory.
    """

    def __init__(self, caches: CanonicalKVCaches, blocks_per_chunk: int, region: SharedOffloadRegion) -> None:
        self._chunk = blocks_per_chunk
        self._refs = caches.group_data_refs
        self._region = region
        self._blocks = [each.tensor.view(torch.int8).flatten(1) for each in caches.tensors]
        sizes = [each.page_size_bytes for each in caches.tensors]
        # By chunk, block of the chunk, and byte.
        self._chunks = [
            region.create_next_worker_view(size * blocks_per_chunk).unflatten(1, (blocks_per_chunk, size))
            for size in sizes
        ]
        self._done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:  # noqa: ANN401 - vLLM's
        """Copy blocks to chunks."""
        return self._copy(job_id, src_spec, dst_spec, stores=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False) -> bool:  # noqa: ANN401
        """Copy chunks to blocks."""
        del expedited  # a copy is over when this returns
        return self._copy(job_id, dst_spec, src_spec, stores=False)

    def _copy(self, job_id: int, engine: Any, host: Any, *, stores: bool) -> bool:  # noqa: ANN401
        began, copied = time.monotonic(), 0
        block = chunk = 0
        for count, first, refs in zip(engine.group_sizes, engine.block_indices, self._refs, strict=True):
            if not count:
                continue
            # A request's first block may be in the middle of a chunk.
            within = torch.arange(count) + first % self._chunk
            blocks = torch.as_tensor(engine.block_ids[block : block + count], dtype=torch.int64)
            places = torch.as_tensor(host.block_ids, dtype=torch.int64)[chunk + within // self._chunk]
            for ref in refs:
                size = ref.page_size_bytes
                rows = self._blocks[ref.tensor_idx][:, :size]
                slots = self._chunks[ref.tensor_idx][:, :, :size]
                if stores:
                    slots[places, within % self._chunk] = rows[blocks]
                else:
                    rows[blocks] = slots[places, within % self._chunk]
                copied += count * size
            block += count
            chunk += int(within[-1]) // self._chunk + 1
        self._done.append(
            TransferResult(
                job_id=job_id, success=True, transfer_size=copied, transfer_time=time.monotonic() - began
            )
        )
        return True

    def get_finished(self) -> list[TransferResult]:
        """Return the transfers since the last call."""
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Do nothing: a copy is over when it is submitted."""

    def shutdown(self) -> None:
        """Give the host memory back."""
        self._chunks = []
        self._region.cleanup()
