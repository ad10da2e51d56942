"""`KvpoolConnector`'s offloading on the CPU: kvpool's manager, and the worker that copies by PyTorch."""

from __future__ import annotations

import mmap
import secrets
from typing import Any

from kvpool.verify.driver import LeftOutError
from kvpool.verify.drivers.vllm_offload import BLOCKS_PER_CHUNK, VllmOffloadDriver, canonical


class VllmConnectorDriver(VllmOffloadDriver):
    """kvpool's manager and worker in the place of vLLM's. On a GPU the connector has vLLM's worker.

    Args:
        layout: The layout.
        tokens: Tokens of the proof, as in `Workload`.
        device: Device of the blocks.

    Raises:
        LeftOutError: If vLLM or PyTorch is not installed, vLLM is another one than the connector knows, or
            the device is not the CPU.
    """

    def _make(self, chunks: int, device: str) -> tuple[Any, Any]:
        if device != "cpu":
            raise LeftOutError(f"on {device} the connector has vLLM's worker: see vllm-offload")
        from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion  # noqa: PLC0415

        from kvpool.integrations.vllm.connector import CopyWorker  # noqa: PLC0415 - only if vLLM is there
        from kvpool.integrations.vllm.offload import KvpoolOffloadingManager  # noqa: PLC0415

        page = sum(tensor.shape[1] for tensor in self._engine.tensors) * BLOCKS_PER_CHUNK
        whole = -(-page // mmap.PAGESIZE) * mmap.PAGESIZE
        region = SharedOffloadRegion(
            engine_id=f"kvpool_verify_{secrets.token_hex(6)}",
            num_chunks=chunks,
            rank=0,
            kv_bytes_per_chunk=whole,
            cpu_page_size=whole,
        )
        worker = CopyWorker(canonical(self._engine, on_device=False), BLOCKS_PER_CHUNK, region)
        return KvpoolOffloadingManager(chunks), worker
