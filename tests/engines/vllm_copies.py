"""Offloading in a vLLM on the CPU: specs that vLLM's settings name, with a worker that copies by PyTorch.

vLLM's own worker takes GPUs alone. `Lockstep` asks vLLM's manager and kvpool's, compares their answers, and
returns vLLM's.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.kv_offload.base import OffloadingManager, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from kvpool.integrations.vllm.offload import KvpoolOffloadingManager, KvpoolTieringSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm.v1.kv_offload.base import CanonicalKVCaches

CALLS: dict[str, int] = {}
"""How often each method of the managers in lockstep was called, and `stored` and `loaded` blocks."""


def _count(name: str, number: int = 1) -> None:
    CALLS[name] = CALLS.get(name, 0) + number


class CopyWorker(OffloadingWorker):  # type: ignore[misc]  # vLLM has no types here
    """Copies whole blocks between the tensors of an engine and chunks of several blocks in host memory."""

    def __init__(
        self, spec: CPUOffloadingSpec, caches: CanonicalKVCaches, region: SharedOffloadRegion | None
    ) -> None:
        self._chunk = spec.blocks_per_chunk
        self._refs = caches.group_data_refs
        sizes = [each.page_size_bytes for each in caches.tensors]
        self._blocks = [
            each.tensor.view(torch.int8).view(-1, size)
            for each, size in zip(caches.tensors, sizes, strict=True)
        ]
        self._region = region
        self._chunks = [
            torch.zeros((spec.num_chunks, size * self._chunk), dtype=torch.int8)
            if region is None
            else region.create_next_worker_view(size * self._chunk)
            for size in sizes
        ]
        self._done: list[TransferResult] = []

    def _pairs(self, engine: Any, host: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:  # noqa: ANN401
        """The bytes of each block in the engine and in its chunk."""
        block = chunk = 0
        for count, first, refs in zip(engine.group_sizes, engine.block_indices, self._refs, strict=True):
            skipped = first % self._chunk
            for at in range(count):
                place = host.block_ids[chunk + (at + skipped) // self._chunk]
                within = (at + skipped) % self._chunk
                for ref in refs:
                    blocks, chunks = self._blocks[ref.tensor_idx], self._chunks[ref.tensor_idx]
                    begin = within * blocks.shape[1]
                    size = ref.page_size_bytes
                    yield blocks[engine.block_ids[block + at], :size], chunks[place, begin : begin + size]
            block += count
            chunk += -(-(count + skipped) // self._chunk) if count else 0

    def _finish(self, job: int, name: str, copied: int, began: float) -> bool:
        _count(name, copied)
        self._done.append(
            TransferResult(
                job_id=job, success=True, transfer_size=copied, transfer_time=time.monotonic() - began
            )
        )
        return True

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:  # noqa: ANN401
        began = time.monotonic()
        copied = [host.copy_(engine).numel() for engine, host in self._pairs(src_spec, dst_spec)]
        return self._finish(job_id, "stored", sum(copied), began)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False) -> bool:  # noqa: ANN401, ARG002
        began = time.monotonic()
        copied = [engine.copy_(host).numel() for engine, host in self._pairs(dst_spec, src_spec)]
        return self._finish(job_id, "loaded", sum(copied), began)

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Does nothing: a copy is complete once it was submitted."""

    def shutdown(self) -> None:
        self._chunks = []
        if self._region is not None:
            self._region.cleanup()


class Lockstep(OffloadingManager):  # type: ignore[misc]
    """vLLM's manager of chunks, with kvpool's beside it."""

    def __init__(self, *arguments: Any, **options: Any) -> None:  # noqa: ANN401
        self._sides = (
            CPUOffloadingManager(*arguments, **options),
            KvpoolOffloadingManager(*arguments, **options),
        )
        self.medium = self._sides[0].medium


def _seen(answer: Any) -> Any:  # noqa: ANN401
    """What can be compared of an answer."""
    if hasattr(answer, "keys_to_store"):
        return [*answer.keys_to_store], [*answer.store_spec.block_ids], [*answer.evicted_keys]
    if hasattr(answer, "block_ids"):
        return [*answer.block_ids]
    return repr(answer)


def _both(name: str) -> Any:  # noqa: ANN401
    def call(self: Lockstep, *arguments: Any, **options: Any) -> Any:  # noqa: ANN401
        _count(name)
        own, ours = (getattr(side, name)(*arguments, **options) for side in self._sides)
        if name == "take_events":
            own, ours = list(own), list(ours)
        assert _seen(own) == _seen(ours), (name, own, ours)
        return own

    return call


for _name in (
    "lookup", "get_load_source", "prepare_load", "touch", "complete_load", "prepare_store", "complete_store",
    "on_new_request", "on_request_finished", "take_events", "reset_cache", "config_info", "shutdown",
):  # fmt: skip
    setattr(Lockstep, _name, _both(_name))
Lockstep.__abstractmethods__ = frozenset()


class LockstepSpec(CPUOffloadingSpec):  # type: ignore[misc]
    """Host memory, by both managers."""

    def get_manager(self) -> OffloadingManager:
        return Lockstep(
            self.num_chunks,
            enable_events=self.kv_events_config.enable_kv_cache_events,
            info=self.cpu_info,
        )

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        return CopyWorker(self, kv_caches, None)


class TierSpec(KvpoolTieringSpec):
    """kvpool's host memory, with the tiers below it that the settings name."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        region = SharedOffloadRegion(
            engine_id=self.config.engine_id,
            num_chunks=self.num_chunks,
            rank=0,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        return CopyWorker(self, kv_caches, region)

    def _uses_shared_region(self) -> bool:
        return True
