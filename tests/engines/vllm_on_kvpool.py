"""A plugin of pytest: vLLM's own tests, with classes of kvpool in the place of vLLM's.

`--on-kvpool=manager` replaces the managers of chunks in host memory, `policy` the LRU order within vLLM's
own managers, `blocks` the pool of blocks, and `none` nothing; `manager,blocks` replaces both. What vLLM has
beside LRU stays vLLM's.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import vllm.platforms
import vllm_blocks
from pydantic import ValidationError
from vllm.platforms.cpu import CpuPlatform

# From its source, vLLM does not know for what it was built.
vllm.platforms.current_platform = CpuPlatform()

from vllm.v1.kv_offload.cpu import manager as cpu_manager  # noqa: E402
from vllm.v1.kv_offload.cpu import spec as cpu_spec  # noqa: E402
from vllm.v1.kv_offload.cpu.policies import lru  # noqa: E402
from vllm.v1.kv_offload.tiering import manager as tiering_manager  # noqa: E402
from vllm.v1.kv_offload.tiering import spec as tiering_spec  # noqa: E402

from kvpool.integrations.vllm.offload import (  # noqa: E402
    KvpoolLRUPolicy,
    KvpoolOffloadingManager,
    KvpoolPrimaryTier,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

INSIDE: dict[str, dict[str, str]] = {
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
    "blocks": {},
    "none": {},
}
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
    """The attributes of a policy that vLLM's tests read."""

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


class _InspectedManager:
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

    class PolicyDispatch(type):
        def __call__(cls, *args: Any, cache_policy: str = "lru", **options: Any) -> Any:  # noqa: ANN401
            if cls is replaced and cache_policy != "lru":
                return own(*args, cache_policy=cache_policy, **options)
            return super().__call__(*args, cache_policy=cache_policy, **options)

    # Derived from `pooled`, which may be abstract: `PolicyDispatch` must be of its metaclass, too.
    meta = type("PolicyDispatch", (PolicyDispatch, type(pooled)), {})
    replaced: Any = meta(own.__name__, (_InspectedManager, pooled), {})
    return replaced  # type: ignore[no-any-return]


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option that says what is replaced."""
    parser.addoption("--on-kvpool", default="none")


def _modes(config: pytest.Config) -> list[str]:
    modes: str = config.getoption("on_kvpool")
    return modes.split(",")


def pytest_configure(config: pytest.Config) -> None:
    """Replaces it."""
    modes = _modes(config)
    if "manager" in modes:
        manager = _kind(cpu_manager.CPUOffloadingManager, KvpoolOffloadingManager)
        primary = _kind(tiering_manager.CPUPrimaryTierOffloadingManager, KvpoolPrimaryTier)
        cpu_manager.CPUOffloadingManager = cpu_spec.CPUOffloadingManager = manager
        tiering_manager.CPUPrimaryTierOffloadingManager = primary
        tiering_spec.CPUPrimaryTierOffloadingManager = primary
    if "policy" in modes:
        lru.LRUCachePolicy = KvpoolLRUPolicy
    if "blocks" in modes:
        vllm_blocks.replace()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skips the tests of `INSIDE`."""
    inside = {name: part for mode in _modes(config) for name, part in INSIDE[mode].items()}
    for item in items:
        name = item.name.partition("[")[0]
        if name in inside:
            item.add_marker(pytest.mark.skip(reason=f"within vLLM's own class: it {inside[name]}"))


NOT_WITHOUT_A_GPU = {
    "failed to be inspected": "the code of its model needs vLLM's kernels",
    "not supported by the V1 model runner": "on the CPU vLLM has the first of its two model runners",
}
"""Why vLLM refuses a configuration here, by words of its message."""


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Iterator[None]:
    """Skips the tests whose configuration vLLM refuses on a machine without a GPU."""
    try:
        return (yield)
    except ValidationError as error:
        for words, reason in NOT_WITHOUT_A_GPU.items():
            if words in str(error):
                pytest.skip(reason)
        raise


@pytest.fixture
def caplog_vllm(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The fixture of vLLM's `conftest.py`, which needs more packages."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with caplog.at_level(logging.INFO):
        yield caplog
