"""A plugin of pytest: vLLM's own tests, with classes of kvpool in the place of vLLM's.

`KVPOOL_VLLM=manager` replaces the managers of chunks in host memory, `policy` the LRU order within vLLM's own
managers, and `none` nothing. What vLLM has beside LRU stays vLLM's.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from vllm.v1.kv_offload.cpu import manager as cpu_manager
from vllm.v1.kv_offload.cpu import spec as cpu_spec
from vllm.v1.kv_offload.cpu.policies import lru
from vllm.v1.kv_offload.tiering import manager as tiering_manager
from vllm.v1.kv_offload.tiering import spec as tiering_spec

from kvpool.integrations.vllm.offload import KvpoolLRUPolicy, KvpoolOffloadingManager, KvpoolPrimaryTier

if TYPE_CHECKING:
    from collections.abc import Iterator

MODE = os.environ["KVPOOL_VLLM"]

INSIDE = {
    "manager": {
        "test_cpu_manager_reports_allocation_size_on_allocation_failure": "replaces `_allocate_chunks`",
        "test_lru_batch_eviction_failure_is_atomic": "calls `_policy.evict`",
        "test_lru_repeated_pin_cycles_compact_lazy_heap_entries": "reads `_policy._heap`",
        "test_touch_forwards_req_context_to_policy": "replaces `_policy.touch`",
        "test_request_finish_forwards_grouped_deduplicated_accesses": "replaces a hook of `_policy`",
        "test_failed_store_records_access_once_and_uses_store_miss_hook": "replaces hooks of `_policy`",
        "test_touch_propagates_to_all_tiers": "reads `_policy._ranks`",
    },
    "policy": {
        "test_lru_repeated_pin_cycles_compact_lazy_heap_entries": "reads `_heap`",
        "test_touch_propagates_to_all_tiers": "reads `_ranks`",
    },
    "none": {},
}[MODE]
"""Tests of how vLLM's classes are made, not of what they do, and the part that kvpool's do not have."""


class _Chunk:
    """A chunk as vLLM's tests read it: as it is now."""

    def __init__(self, table: Any, key: bytes) -> None:  # noqa: ANN401
        self._table, self._key = table, key

    @property
    def chunk_id(self) -> int:
        return int(self._table.place(self._key)[0])

    @property
    def ref_cnt(self) -> int:
        return int(self._table.place(self._key)[1])

    @property
    def is_ready(self) -> bool:
        return self.ref_cnt >= 0


class _Policy:
    """What vLLM's tests ask a policy for."""

    def __init__(self, table: Any) -> None:  # noqa: ANN401
        self._table = table

    def get(self, key: bytes) -> _Chunk | None:
        return None if self._table.place(key) is None else _Chunk(self._table, key)

    def evict(self, *_arguments: object) -> None:
        raise AssertionError("kvpool's manager calls no policy")


class _Counts:
    """How often keys were offered, as vLLM's tests read it."""

    def __init__(self, table: Any) -> None:  # noqa: ANN401
        self._table = table

    def __bool__(self) -> bool:
        return any(self._table.offers(str(number).encode() + bytes(4)) for number in range(100))

    def __contains__(self, key: bytes) -> bool:
        return bool(self._table.offers(key))

    def __getitem__(self, key: bytes) -> int:
        return int(self._table.offers(key))

    get = __getitem__


class _Shown:
    """Names by which vLLM's tests look into a manager."""

    _table: Any
    _seen = 0
    _policy = property(lambda self: _Policy(self._table))
    _num_evictable_cache_chunks = property(lambda self: self._table.stats()["idle"])
    _num_allocated_chunks = property(
        lambda self: sum(count for name, count in self._table.stats().items() if name != "capacity")
    )
    _free_list: ClassVar[list[int]] = []
    counts = property(lambda self: _Counts(self._table))
    stores_skipped_in_current_batch = property(lambda self: self._skipped())

    def _skipped(self) -> int:
        self._seen += int(self._table.take_skipped())
        return self._seen


def _kind(own: type, pooled: type) -> type:
    """A class that makes kvpool's manager for "lru", and vLLM's otherwise."""

    class Chosen(type):
        def __call__(cls, *args: Any, cache_policy: str = "lru", **options: Any) -> Any:  # noqa: ANN401
            if cls is replaced and cache_policy != "lru":
                return own(*args, cache_policy=cache_policy, **options)
            return super().__call__(*args, cache_policy=cache_policy, **options)

    # Derived from `pooled`, which may be abstract: `Chosen` must be of its metaclass, too.
    meta = type("Chosen", (Chosen, type(pooled)), {})
    replaced: Any = meta(own.__name__, (_Shown, pooled), {})
    return replaced  # type: ignore[no-any-return]


if MODE == "manager":
    manager = _kind(cpu_manager.CPUOffloadingManager, KvpoolOffloadingManager)
    primary = _kind(tiering_manager.CPUPrimaryTierOffloadingManager, KvpoolPrimaryTier)
    cpu_manager.CPUOffloadingManager = cpu_spec.CPUOffloadingManager = manager
    tiering_manager.CPUPrimaryTierOffloadingManager = primary
    tiering_spec.CPUPrimaryTierOffloadingManager = primary
elif MODE == "policy":
    lru.LRUCachePolicy = KvpoolLRUPolicy
else:
    assert MODE == "none", MODE


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips the tests of `INSIDE`."""
    for item in items:
        name = item.name.partition("[")[0]
        if name in INSIDE:
            item.add_marker(pytest.mark.skip(reason=f"within vLLM's own class: it {INSIDE[name]}"))


@pytest.fixture
def caplog_vllm(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """That of vLLM's `conftest.py`, which needs more packages."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with caplog.at_level(logging.INFO):
        yield caplog
