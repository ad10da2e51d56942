"""vLLM's offloading over kvpool: specs, a manager, a cache policy, and a tier on disk.

vLLM finds them by its settings (`kv_connector_extra_config`):

| setting | value |
|---|---|
| `spec_name` | `KvpoolOffloadingSpec`, or `KvpoolTieringSpec` with `secondary_tiers` |
| `spec_module_path` | `kvpool.integrations.vllm.offload` |
| `secondary_tiers` | `{"type": "FileStoreTier", "module_path": ..., "path": ..., "capacity_bytes": ...}` |

`KvpoolLRUPolicy` is for vLLM's own specs, as `eviction_policy` with `cache_policy_module_path`.
"""

from __future__ import annotations

import json
from bisect import bisect_left, insort
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch

from kvpool import FileStore
from kvpool._kvpool import OffloadOrder, OffloadRequest, OffloadTable, OffloadTurn, _store_keys
from kvpool.errors import ConfigError
from kvpool.integrations.vllm.seams import OFFLOADING, VLLM

VLLM.require(OFFLOADING)

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (  # noqa: E402
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import (  # noqa: E402
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingManager,
    PrepareStoreOutput,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec, CPUOffloadingMetrics  # noqa: E402
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy, order_request_keys  # noqa: E402
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion  # noqa: E402
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec  # noqa: E402
from vllm.v1.kv_offload.file_mapper import FileMapper  # noqa: E402
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager  # noqa: E402
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory  # noqa: E402
from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager  # noqa: E402
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec  # noqa: E402
from vllm.v1.metrics.cache_hit_source import CacheHitSource  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence
    from typing import Literal

    from vllm.v1.kv_offload.base import OffloadKey, ReqContext
    from vllm.v1.kv_offload.cpu.common import CPUOffloadingInfo
    from vllm.v1.kv_offload.cpu.policies.base import ChunkStatus
    from vllm.v1.kv_offload.tiering.base import TransferJob

    from kvpool._kvpool import StoreTransfer

__all__ = [
    "FileStoreTier",
    "KvpoolLRUPolicy",
    "KvpoolOffloadingManager",
    "KvpoolOffloadingSpec",
    "KvpoolPrimaryTier",
    "KvpoolTieringSpec",
]

_FOUND = {None: LookupResult.MISS, False: LookupResult.HIT_PENDING, True: LookupResult.HIT}


def _state(req_context: ReqContext, kind: type[Any]) -> Any:
    """Return the object of the class `kind` that vLLM keeps with a request, and make it at the first use."""
    state = req_context.get_state(kind)
    if state is None:
        state = kind()
        req_context.set_state(state)
    return state


class KvpoolOffloadingManager(OffloadingManager):  # type: ignore[misc]
    """vLLM's manager of chunks in host memory, over `OffloadTable`.

    The arguments are those of `CPUOffloadingManager`.

    Raises:
        ConfigError: If `cache_policy` is not "lru". Only vLLM's own manager has other policies.
    """

    def __init__(
        self,
        num_chunks: int,
        cache_policy: str = "lru",
        cache_policy_module_path: str | None = None,
        enable_events: bool = False,
        store_threshold: int = 1,
        max_tracker_size: int = 64_000,
        info: CPUOffloadingInfo | None = None,
    ) -> None:
        if cache_policy != "lru" or cache_policy_module_path is not None:
            named = " of ".join(repr(name) for name in (cache_policy, cache_policy_module_path) if name)
            raise ConfigError(f"eviction_policy is {named}; the manager of kvpool has 'lru'")
        self.medium = Medium.CPU
        self._num_chunks = num_chunks  # which vLLM's tiering reads
        self._config_info = {} if info is None else info.as_config_info()
        self._table = OffloadTable(
            num_chunks,
            store_threshold=max(store_threshold, 0),
            max_tracked=max(max_tracker_size, 0),
            events=enable_events,
        )
        self._counts_offers = store_threshold > 1

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        return _FOUND[self._table.find(key)]

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        return CacheHitSource.HOST

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> CPULoadStoreSpec:
        request = _state(req_context, OffloadRequest)
        return CPULoadStoreSpec(self._table.begin_load(keys, request, req_context.get_offload_key_position))

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self._table.end_load(keys)

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self._table.touch(keys)

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        request = _state(req_context, OffloadRequest)
        stored = self._table.begin_store(keys, request, req_context.get_offload_key_position)
        if stored is None:
            return None
        chosen, places, evicted = stored
        return PrepareStoreOutput(chosen, CPULoadStoreSpec(places), evicted)

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        self._table.end_store(keys, success)

    def on_request_finished(self, req_context: ReqContext) -> None:
        request = req_context.get_state(OffloadRequest)
        if request is not None:
            self._table.finish(request)

    def reset_cache(self) -> None:
        self._table.clear()

    def take_events(self) -> Iterable[OffloadingEvent]:
        for change, keys in self._table.take_events():
            yield OffloadingEvent(
                keys=keys,
                medium=self.medium,
                removed=change != "stored",
                metadata_only=change == "failed",
            )

    def config_info(self) -> Sequence[Any]:
        return [self._config_info]

    def get_stats(self) -> OffloadingConnectorStats:
        counts = self._table.stats()
        stats = OffloadingConnectorStats()
        capacity = counts["capacity"] or 1
        used = counts["arriving"] + counts["loading"]
        stats.set_gauge(CPUOffloadingMetrics.CPU_CACHE_USAGE_PERC, used / capacity)
        stats.set_gauge(CPUOffloadingMetrics.CPU_CACHE_WRITE_USAGE_PERC, counts["arriving"] / capacity)
        stats.set_gauge(CPUOffloadingMetrics.CPU_CACHE_READ_USAGE_PERC, counts["loading"] / capacity)
        for asked in self._table.take_asked():
            stats.observe_histogram(CPUOffloadingMetrics.CPU_ALLOCATION_SIZE, asked)
        if self._counts_offers:
            stats.increase_counter(CPUOffloadingMetrics.STORES_SKIPPED, self._table.take_skipped())
        return stats


class KvpoolPrimaryTier(KvpoolOffloadingManager):
    """The manager as the first of several tiers, like vLLM's `CPUPrimaryTierOffloadingManager`."""

    def __init__(self, num_chunks: int, mmap_region: SharedOffloadRegion, **options: Any) -> None:
        super().__init__(num_chunks, **options)
        self._region = mmap_region
        self._view: memoryview = mmap_region.create_kv_memoryview()

    def prepare_read(self, keys: Collection[OffloadKey], req_context: ReqContext) -> CPULoadStoreSpec:
        """Lock chunks for a copy to a tier below. The copy does not count as a use of the chunks."""
        return CPULoadStoreSpec(self._table.begin_load(keys))

    def complete_read(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """End the copy to a tier below."""
        self.complete_load(keys, req_context)

    def prepare_write(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        """Allocate chunks for a copy from a tier below."""
        return self.prepare_store(keys, req_context)

    def complete_write(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        """End the copy from a tier below."""
        self.complete_store(keys, req_context, success)

    def get_kv_memoryview(self) -> memoryview:
        return self._view

    def shutdown(self) -> None:
        super().shutdown()
        self._view.release()
        self._region.cleanup()


class KvpoolLRUPolicy(CachePolicy):  # type: ignore[misc]
    """vLLM's LRU order over `OffloadOrder`, for vLLM's own managers."""

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self._order = OffloadOrder()

    def get(self, key: OffloadKey) -> ChunkStatus | None:
        return self._order.get(key)

    def insert(self, key: OffloadKey, chunk: ChunkStatus, req_context: ReqContext) -> None:
        turn = _state(req_context, OffloadTurn)
        self._order.insert(key, chunk, turn, req_context.get_offload_key_position(key))
        if chunk.ref_cnt == 0:
            self._order.set_evictable(key, True)

    def remove(self, key: OffloadKey) -> None:
        self._order.remove(key)

    def touch(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        self._order.touch(keys)

    def on_request_access(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        turn = _state(req_context, OffloadTurn)
        self._order.access(keys, turn, req_context.get_offload_key_position)

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[OffloadKey]],
        insertion_only_keys: set[OffloadKey],
        reused_keys: set[OffloadKey],
        req_context: ReqContext,
    ) -> None:
        self._order.touch(order_request_keys(key_groups, req_context))

    def evict(self, n: int, protected: set[OffloadKey]) -> list[tuple[OffloadKey, ChunkStatus]] | None:
        return self._order.evict(n, protected)

    def clear(self) -> None:
        self._order.clear()

    def mark_evictable(self, key: OffloadKey) -> None:
        self._order.set_evictable(key, True)

    def mark_non_evictable(self, key: OffloadKey) -> None:
        self._order.set_evictable(key, False)


class _Prompt:
    """The chunks of a request that its calls have named so far, by position."""

    def __init__(self) -> None:
        self._positions: list[int] = []
        self._keys: dict[int, OffloadKey] = {}
        self._last: OffloadKey | Literal[b""] = b""

    def add(self, keys: Iterable[OffloadKey], request: ReqContext) -> None:
        for key in keys:
            position = request.get_offload_key_position(key)
            if position is not None:
                if position not in self._keys:
                    insort(self._positions, position)
                self._keys[position] = key
            self._last = key

    def before(self, keys: Sequence[OffloadKey], request: ReqContext) -> OffloadKey | Literal[b""]:
        """Return the key before the first one, which is `b""` if there is none."""
        position = request.get_offload_key_position(keys[0]) if keys else None
        if position is None:
            return self._last
        at = bisect_left(self._positions, position)
        return self._keys[self._positions[at - 1]] if at else b""


class _Job(NamedTuple):
    """A transfer in progress, and its keys in the order of its pages."""

    job: TransferJob
    keys: list[OffloadKey]
    transfer: StoreTransfer


class FileStoreTier(SecondaryTierManager):  # type: ignore[misc]
    """A tier on a local disk: chunks of host memory in a `FileStore`.

    Each model, layout and data-parallel replica has a directory of its own below `path`, with
    `capacity_bytes` of chunks. Look-ups are answered at once, from memory. Of the chunks of a prompt the last
    ones are evicted first, in whatever order vLLM names them: it tells their positions.

    Args:
        offloading_spec: The spec that the tier belongs to.
        primary_kv_view: The chunks of the tier above, one in each row.
        tier_type: The name in vLLM's metrics.
        path: The directory.
        capacity_bytes: The argument of `FileStore`.
        threads: The argument of `FileStore`.
        queue_bytes: The argument of `FileStore`.
        locality: "LOCAL" or "REMOTE", as vLLM's filters of tiers name it.
        backpressure_detector: vLLM's.

    Raises:
        ConfigError: For the reasons of `FileStore`, such as another process that uses the directory.
    """

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        path: str,
        capacity_bytes: int,
        threads: int = 4,
        queue_bytes: int = 1 << 28,
        locality: str | None = None,
        backpressure_detector: Any = None,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.locality: Locality | None = None if locality is None else Locality(locality)
        mapper = FileMapper.from_offloading_spec(
            root_dir=path,
            offloading_spec=offloading_spec,
            blocks_per_file=offloading_spec.blocks_per_chunk,
            parallel_agnostic=True,
        )
        parallel = offloading_spec.config.parallel
        replica = f"_dp{parallel.data_parallel_index}" if parallel.data_parallel_size > 1 else ""
        self._space = json.dumps(mapper.get_run_config(), sort_keys=True).encode()
        chunks = torch.frombuffer(primary_kv_view, dtype=torch.uint8).view(-1, self.block_size_bytes)
        self._chunks: Any = chunks
        self._store = FileStore(
            f"{mapper.base_path}_r{mapper.rank}{replica}",
            capacity_bytes,
            page_bytes=self.block_size_bytes,
            threads=threads,
            queue_bytes=max(queue_bytes, self.block_size_bytes),
        )
        self._running: dict[int, _Job] = {}

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        [found] = self._store.find(_store_keys(self._space, [key]))
        return LookupResult.HIT if found else LookupResult.MISS

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        ordered = order_request_keys([[*keys]], req_context)
        self._store.touch(_store_keys(self._space, ordered))
        _state(req_context, _Prompt).add(ordered, req_context)

    def submit_store(self, job_metadata: TransferJob) -> None:
        request = job_metadata.req_context
        keys = [*job_metadata.keys]
        places = dict(zip(keys, job_metadata.chunk_ids, strict=True))
        ordered = order_request_keys([keys], request)
        prompt = _state(request, _Prompt)
        before = prompt.before(ordered, request)
        transfer = self._store.put(
            _store_keys(self._space, ordered),
            self._chunks,
            rows=[int(places[key]) for key in ordered],
            parent=_store_keys(self._space, [before])[0] if before else b"",
        )
        prompt.add(ordered, request)
        self._running[job_metadata.job_id] = _Job(job_metadata, ordered, transfer)

    def submit_load(self, job_metadata: TransferJob) -> None:
        keys = [*job_metadata.keys]
        transfer = self._store.get(_store_keys(self._space, keys), self._chunks, rows=job_metadata.chunk_ids)
        self.touch(keys, job_metadata.req_context)
        self._running[job_metadata.job_id] = _Job(job_metadata, keys, transfer)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        done = [job_id for job_id, running in self._running.items() if running.transfer.query()]
        return [self._result(self._running.pop(job_id)) for job_id in done]

    def _result(self, running: _Job) -> JobResult:
        present, job = running.transfer.present, running.job
        arrived = [key for key, is_present in zip(running.keys, present, strict=True) if is_present]
        return JobResult(
            job_id=job.job_id,
            success=all(present),
            successful_keys=arrived if job.is_promotion and arrived and not all(present) else None,
            transfer_bytes=len(arrived) * self.block_size_bytes,
        )

    def drain_jobs(self) -> None:
        for running in self._running.values():
            running.transfer.wait()

    def shutdown(self) -> None:
        self._store.close()
        self._running.clear()
        self._chunks = None  # the view is released after this


class KvpoolOffloadingSpec(CPUOffloadingSpec):  # type: ignore[misc]
    """vLLM's `CPUOffloadingSpec` with kvpool's manager. Settings and workers are the same."""

    _manager: OffloadingManager | None

    def get_manager(self) -> OffloadingManager:
        if self._manager is None:
            self._manager = KvpoolOffloadingManager(
                num_chunks=self.num_chunks,
                cache_policy=self.eviction_policy,
                cache_policy_module_path=self.cache_policy_module_path,
                enable_events=self.kv_events_config.enable_kv_cache_events,
                store_threshold=int(self.extra_config.get("store_threshold", 0)),
                max_tracker_size=int(self.extra_config.get("max_tracker_size", 64_000)),
                info=self.cpu_info,
            )
        return self._manager


class KvpoolTieringSpec(TieringOffloadingSpec):  # type: ignore[misc]
    """vLLM's `TieringOffloadingSpec` with kvpool's manager as the first tier.

    Settings and workers are the same.
    """

    _manager: OffloadingManager | None

    def get_manager(self) -> OffloadingManager:
        if self._manager is not None:
            return self._manager
        if int(self.extra_config.get("store_threshold", 0)) > 1:
            raise ConfigError("store_threshold is not supported for KvpoolTieringSpec")
        with ExitStack() as undo:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=None,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            undo.callback(region.cleanup)
            primary = KvpoolPrimaryTier(
                num_chunks=self.num_chunks,
                mmap_region=region,
                cache_policy=self.eviction_policy,
                cache_policy_module_path=self.cache_policy_module_path,
                enable_events=self.kv_events_config.enable_kv_cache_events,
                info=self.cpu_info,
            )
            undo.callback(primary.get_kv_memoryview().release)
            tiers = []
            for config in self.secondary_tier_configs:
                tier = SecondaryTierFactory.create_secondary_tier(config, primary.get_kv_memoryview(), self)
                undo.callback(tier.shutdown)
                tiers.append(tier)
            self._manager = TieringOffloadingManager(
                primary_tier=primary, secondary_tiers=tiers, tier_poll_interval_s=self.tier_poll_interval_s
            )
            self._scheduler_mmap = region
            undo.pop_all()
        return self._manager
