"""Metrics: what a scrape over HTTP reads."""

from __future__ import annotations

import gc
import importlib
import time
import urllib.request
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import devices
import pytest
import torch
from common import some
from memory_store import Memory
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.parser import text_string_to_metric_families

from kvpool import (
    ArenaHostTier,
    ArenaPrefixCache,
    BufferPool,
    CacheArena,
    CacheLayout,
    ChunkPool,
    DriverError,
    FileStore,
    GDNPool,
    Group,
    HostTier,
    KVPool,
    PagePool,
    Plane,
    PrefixCache,
    ReqToTokenPool,
    TokenToKVPoolAllocator,
    Workspace,
    metrics,
    pools,
)
from kvpool._kvpool import HybridTree
from kvpool.integrations.sglang.tree_owners import TreeOwners

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from shared_fixtures import RunSnippet

    from kvpool import Store

Sample = tuple[str, str]


pytestmark = pytest.mark.usefixtures("device")


@pytest.fixture
def scrape() -> Iterator[Callable[[], dict[Sample, float]]]:
    """Asks a server for all metrics: values by name and pool."""
    registry = CollectorRegistry()
    metrics.register(registry)
    server, thread = start_http_server(0, "127.0.0.1", registry)

    def ask() -> dict[Sample, float]:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        found: dict[Sample, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if "le" in sample.labels:
                    continue
                key = (sample.name, sample.labels["pool"])
                assert key not in found
                found[key] = sample.value
                assert set(sample.labels) == {"pool", "class", "device"}
        return found

    yield ask
    server.shutdown()
    server.server_close()
    thread.join()


def named(pool: Any, name: str) -> Any:  # noqa: ANN401
    pool.name = name
    return pool


def values_of(pool: str) -> dict[str, float]:
    families = metrics.PoolCollector().collect()
    samples = [sample for family in families for sample in family.samples if "le" not in sample.labels]
    return {sample.name: sample.value for sample in samples if sample.labels["pool"] == pool}


def test_a_scrape_has_the_numbers_of_every_pool(scrape: Callable[[], dict[Sample, float]]) -> None:
    device = devices.current()
    kv = named(KVPool(16, 1, 1, 2, device, torch.float16), "kv")
    slots = named(TokenToKVPoolAllocator(16, device), "slots")
    rows = named(ReqToTokenPool(4, 8, device), "rows")
    tracks = named(GDNPool(2, 1, 1, 2, 2, 4, 3, device, max_track_slots=3), "tracks")
    chunks = named(ChunkPool(5, (4,), "int8", device, pin_memory=False), "chunks")
    buffers = named(BufferPool(device), "buffers")
    pages = named(PagePool(4, 2, device=device), "pages")
    arena = named(Workspace(device, 1 << 16), "arena")
    kept = slots.alloc(3), rows.alloc(2), tracks.alloc_track_slot(), chunks.allocate(), pages.alloc()
    buffer, tensor = buffers.alloc((100,), "int8"), arena.empty((64,), "float32")
    slots.free([9, 9, 9])
    found = scrape()

    # The slots are the allocator's.
    assert ("kvpool_slots_capacity", "kv") not in found
    assert found["kvpool_slots_capacity", "slots"] == 16
    assert found["kvpool_memory_bytes", "kv"] == kv.mem_bytes()
    assert found["kvpool_slots_in_use", "slots"] == 3
    assert found["kvpool_slots_available", "slots"] == 13
    assert found["kvpool_dropped_frees_total", "slots"] == 3
    assert found["kvpool_rows_in_use", "rows"] == 2
    assert found["kvpool_track_slots_available", "tracks"] == 2
    assert found["kvpool_chunks_in_use", "chunks"] == 1
    assert found["kvpool_chunks_capacity", "chunks"] == 5
    assert found["kvpool_buffers_in_use_bytes", "buffers"] == 128
    assert found["kvpool_stale_uses_total", "buffers"] == 0
    assert found["kvpool_pages_high_water", "pages"] == 1
    assert found["kvpool_arena_in_use_bytes", "arena"] == 256
    assert found["kvpool_arena_capacity_bytes", "arena"] == 1 << 16
    assert len(kept) == 5
    assert (buffer.nbytes, len(tensor)) == (100, 64)


def test_the_numbers_of_prefix_caches() -> None:
    slots = TokenToKVPoolAllocator(32, devices.current())
    caches = [named(PrefixCache(slots), name) for name in ("one", "two")]
    for start, cache in enumerate(caches):
        tokens = range(8 * start, 8 * start + 8)
        cache.insert(tokens, slots.alloc(8))
        cache.match([*tokens, 99]).release()
    caches[0].evict(3)
    families = {family.name: family for family in metrics.PoolCollector().collect()}

    def values(name: str) -> list[float]:
        samples = families[f"kvpool_prefix_{name}"].samples
        return [sample.value for sample in samples if sample.labels["pool"] in {"one", "two"}]

    assert values("lookups") == [2, 2]
    assert values("hit_tokens") == [8, 8]
    assert values("missed_tokens") == [9, 9]
    assert values("evicted_tokens") == [3, 0]
    assert values("cached_tokens") == values("evictable_tokens") == [5, 8]
    assert values("locked_tokens") == [0, 0]
    ages = [sample for sample in families["kvpool_prefix_eviction_age_tokens"].samples if sample.value]
    assert {sample.labels["pool"] for sample in ages} == {"one"}
    assert next(sample.value for sample in ages if sample.labels.get("le") == "+Inf") == 3
    assert values("lookups") == [2, 2]
    assert families["kvpool_slots_cached"].samples[-1].value == 13


def test_the_numbers_of_host_tiers() -> None:
    device = devices.current()
    kv = KVPool(16, 2, 1, 2, device, torch.float32, page_size=4)
    states = GDNPool(2, 1, 1, 2, 2, 4, 3, device, max_track_slots=3)
    slots = TokenToKVPoolAllocator(16, device, 4)
    tier = named(HostTier(kv, 32, states=states, max_states=5), "tier")
    cache = named(PrefixCache(slots, states=states, tiers=(tier,)), "cache")

    lease, new = cache.match(range(8)), slots.alloc(8)
    lease.publish(range(8), new, state=1)
    lease.release()
    deadline = time.monotonic() + 30
    while values_of("tier")["kvpool_host_arriving"]:
        assert time.monotonic() < deadline
        cache.evictable_size()
    cache.evict(8)
    lease = cache.match(range(8))
    load = some(lease.load())
    load.wait_layer(1)
    assert load.length == 8
    assert values_of("tier") == {
        "kvpool_host_pages": 2,
        "kvpool_host_pages_capacity": 8,
        "kvpool_host_snapshots": 1,
        "kvpool_host_snapshots_capacity": 5,
        "kvpool_host_arriving": 0,
        "kvpool_host_page_locked": 0 if device == "cpu" else 13,
        "kvpool_host_staging_bytes": tier.staging_bytes(),
        "kvpool_host_written_total": 3,
        "kvpool_host_loaded_total": 3,
        "kvpool_host_evicted_total": 0,
        "kvpool_host_skipped_total": 0,
        "kvpool_host_failed_total": 0,
        "kvpool_host_fetched_total": 0,
        "kvpool_host_storing": 0,
        "kvpool_host_unstored_total": 0,
        "kvpool_host_damaged_total": 0,
        "kvpool_memory_bytes": tier.mem_bytes(),
    }
    assert values_of("cache")["kvpool_prefix_loaded_tokens_total"] == 8


def test_the_numbers_of_a_tier_of_an_arena() -> None:
    layout = CacheLayout([Group("full", "full", [0], [Plane("k", "uint8", (64,))])], page_size=4)
    arena = CacheArena(layout, 1 << 16, devices.current())
    tier = named(ArenaHostTier(arena, 1 << 16), "tier")
    cache = named(ArenaPrefixCache(arena, tiers=(tier,)), "cache")
    with cache.match(range(8)) as lease:
        lease.publish(range(8), some(arena.alloc({"full": 2})))
    assert cache.wait_written(60)
    arena.clear()
    with cache.match(range(8)) as lease:
        assert lease.load() == 8
    stats = tier.stats()
    assert values_of("tier") == {
        "kvpool_host_slabs_capacity": stats["capacity"],
        "kvpool_host_slabs_in_use": 1,
        "kvpool_host_units": 2,
        "kvpool_host_page_locked_bytes": 0 if devices.current() == "cpu" else tier.mem_bytes(),
        "kvpool_host_staging_bytes": tier.staging_bytes(),
        "kvpool_host_written_total": 2,
        "kvpool_host_loaded_total": 2,
        "kvpool_host_skipped_total": 0,
        "kvpool_host_failed_total": 0,
        "kvpool_host_fetched_total": 0,
        "kvpool_host_unstored_total": 0,
        "kvpool_host_damaged_total": 0,
        "kvpool_memory_bytes": tier.mem_bytes(),
    }
    assert values_of("cache")["kvpool_prefix_loaded_tokens_total"] == 8


def test_the_numbers_of_stores(tmp_path: Path) -> None:
    device = devices.current()
    kv = KVPool(16, 2, 1, 2, device, torch.float32, page_size=4)

    def cache(name: str, store: FileStore | Store) -> PrefixCache:
        tiers = (HostTier(kv, 32), store)
        slots = TokenToKVPoolAllocator(16, device, 4)
        return PrefixCache(slots, tiers=tiers, model="a model", name=name)

    def values(of: str) -> dict[str, float]:
        return {name: value for name, value in values_of(of).items() if name.startswith("kvpool_store_")}

    with FileStore(tmp_path, 1 << 20, page_bytes=128) as files, Memory() as memory:
        stores: list[FileStore | Store] = [files, files, memory]
        caches = [cache(f"cache-{number}", store) for number, store in enumerate(stores)]
        slots = caches[0].allocator.alloc(8)
        caches[0].insert(range(8), some(slots))
        deadline = time.monotonic() + 30
        while values("cache-0")["kvpool_store_pages"] < 2:
            assert time.monotonic() < deadline
        assert values("cache-0") == {
            "kvpool_store_pages": 2,
            "kvpool_store_pages_capacity": 256,
            "kvpool_store_queued": 0,
            "kvpool_store_bytes": 256,
            **{
                f"kvpool_store_{name}_total": 0
                for name in ("hits", "misses", "evicted", "damaged", "dropped", "errors", "read_bytes")
            },
            "kvpool_store_written_bytes_total": 256,
        }
        assert values("cache-1") == {}  # it is counted once
        assert values("cache-2") == {}


def test_the_numbers_of_trees_of_engines() -> None:
    """Trees over one pool count as one, and slots with two owners are counted by the name of the pool."""
    slots = named(TokenToKVPoolAllocator(16, devices.current()), "slots of an engine")
    trees = [HybridTree(1) for _ in range(2)]
    owners = [TreeOwners(tree, SimpleNamespace(_pool=slots, device="cpu")) for tree in trees]
    for tree, shown in zip(trees, owners, strict=True):
        tree.insert([1, 2], [3, 4])
        tree.insert([7], [4])
        shown.check()
    tree.lock_node(some(tree.insert([1, 2], [3, 4], found=2).node))
    assert (
        values_of("slots of an engine").items()
        >= {
            "kvpool_sglang_prefix_evictable_slots": 4,
            "kvpool_sglang_prefix_locked_slots": 2,
            "kvpool_sglang_prefix_second_owners_total": 2,
        }.items()
    )
    del owners, shown
    gc.collect()
    assert not any("sglang" in name for name in values_of("slots of an engine"))


def test_every_number_of_a_pool_is_exported_or_describes_it(
    scrape: Callable[[], dict[Sample, float]],
) -> None:
    device = devices.current()
    described = {"rows", "layer_num", "page_size", "size"}
    for pool in (
        KVPool(16, 1, 1, 2, device),
        TokenToKVPoolAllocator(16, device, 4),
        BufferPool(device),
        ChunkPool(5, (4,), "int8", device, pin_memory=False),
        HostTier(KVPool(16, 1, 1, 2, device), 16),
        Workspace(device, 1 << 16),
    ):
        exported = [name for name, of in scrape() if of == pool.name]
        if isinstance(pool, Workspace):
            described = {"bytes"}  # its capacity
            exported.remove("kvpool_memory_bytes")
        numbers = pool.stats().keys() - described
        if isinstance(pool, KVPool):
            numbers -= {"capacity"}  # the allocator's
        assert len(exported) == len(numbers)


def test_units_and_kinds_are_those_of_prometheus() -> None:
    pools = [TokenToKVPoolAllocator(16, devices.current()), BufferPool(devices.current())]
    families = list(metrics.PoolCollector().collect())
    assert families
    for family in families:
        assert family.documentation
        counted = family.name in {"kvpool_dropped_frees", "kvpool_stale_uses"}
        assert family.type == ("counter" if counted else "gauge")
        assert family.name.startswith("kvpool_")
        for sample in family.samples:
            assert sample.name.endswith("_total") == counted
    assert len(pools) == 2


def test_a_pool_that_cannot_say_hides_no_other(
    monkeypatch: pytest.MonkeyPatch,
    scrape: Callable[[], dict[Sample, float]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Broken:
        name, device = "broken", "cuda:0"

        def stats(self) -> dict[str, int]:
            raise DriverError("the device is gone")

    pool = named(TokenToKVPoolAllocator(8, devices.current()), "whole")
    monkeypatch.setattr(metrics, "pools", lambda: [Broken(), pool])
    assert ("kvpool_slots_capacity", "whole") in scrape()
    assert "cannot read the statistics of broken: the device is gone" in caplog.text


def test_pools_come_and_go_between_scrapes(scrape: Callable[[], dict[Sample, float]]) -> None:
    before = scrape()
    pool = named(TokenToKVPoolAllocator(8, devices.current()), "short-lived")
    assert ("kvpool_slots_capacity", "short-lived") in scrape()
    del pool
    assert scrape().keys() <= before.keys()


def test_a_registry_can_be_left_again() -> None:
    registry = CollectorRegistry()
    collector = metrics.register(registry)
    registry.unregister(collector)
    assert list(registry.collect()) == []
    assert importlib.import_module("kvpool.metrics").register is metrics.register


def test_pools_that_are_initialised_twice_are_listed_once() -> None:
    pool = PagePool(4, 3)
    pool.__init__()
    assert [found is pool for found in pools()].count(True) == 1


def test_metrics_need_no_import_of_their_own(run_snippet: RunSnippet) -> None:
    run_snippet(
        """
        import sys
        import kvpool
        assert not {"prometheus_client", "kvpool.metrics"} & {*sys.modules}
        assert kvpool.metrics.register is kvpool.metrics.register
        assert kvpool.typing.PoolStats
        """
    )


def test_a_second_registration_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    registry = CollectorRegistry()
    collector = metrics.register(registry)
    assert metrics.register(registry) is collector
    pool = named(PagePool(4, 2, device=devices.current()), "once")
    samples = [sample for family in registry.collect() for sample in family.samples]
    names = [sample.name for sample in samples if sample.labels["pool"] == pool.name]
    assert names.count("kvpool_pages_capacity") == 1
    registry.unregister(collector)
    assert metrics.register(registry) is collector
    assert [*registry.collect()]
    # Another collector would export each series again.
    with pytest.raises(ValueError, match="kvpool_memory_bytes"):
        registry.register(metrics.PoolCollector())
    other = CollectorRegistry()
    other.register(metrics.PoolCollector())
    with pytest.raises(ValueError, match="kvpool_memory_bytes"):
        metrics.register(other)
    assert not caplog.messages


def test_pools_with_one_name_are_one_series(scrape: Callable[[], dict[Sample, float]]) -> None:
    device = devices.current()
    first, second = (named(TokenToKVPoolAllocator(size, device), "same") for size in (8, 16))
    kept = some(second.alloc(3))
    first.free([4, 4])
    second.free([9])
    found = scrape()
    assert found["kvpool_slots_capacity", "same"] == 24
    assert found["kvpool_slots_in_use", "same"] == len(kept)
    assert found["kvpool_dropped_frees_total", "same"] == 3
    caches = [named(PrefixCache(pool), "caches") for pool in (first, second)]
    for cache, length in zip(caches, (2, 3), strict=True):
        pool = cache.allocator
        cache.insert(range(length), some(pool.alloc(length)))
        cache.evict(length)
    found = scrape()
    assert found["kvpool_prefix_evicted_tokens_total", "caches"] == 5
    families = {family.name: family for family in metrics.PoolCollector().collect()}
    ages = [
        sample.value
        for sample in families["kvpool_prefix_eviction_age_tokens"].samples
        if (sample.labels["pool"], sample.labels.get("le")) == ("caches", "+Inf")
    ]
    assert ages == [5]


def test_a_counter_does_not_decrease_while_its_series_has_a_pool(
    scrape: Callable[[], dict[Sample, float]],
) -> None:
    device = devices.current()

    def dropped() -> float | None:
        return scrape().get(("kvpool_dropped_frees_total", "counted"))

    pool = named(TokenToKVPoolAllocator(8, device), "counted")
    pool.free([3, 3])
    assert dropped() == 2
    pool.resize(64)
    assert (pool.stats()["dropped_frees"], dropped()) == (2, 2)
    pool.clear()
    pool.free([3])
    assert dropped() == 3
    other = named(TokenToKVPoolAllocator(8, device), "counted")
    other.free([1])
    assert dropped() == 4
    # One that is gone keeps its part; so does one that has another name by now.
    del pool
    assert dropped() == 4
    third = named(TokenToKVPoolAllocator(8, device), "counted")
    third.free([1])
    assert dropped() == 5
    third.name = "renamed"
    assert dropped() == 5
    assert scrape()["kvpool_dropped_frees_total", "renamed"] == 1
    # Without any it is a new series, as after a restart.
    del other
    assert dropped() is None
    again = named(TokenToKVPoolAllocator(8, device), "counted")
    assert (again.stats()["dropped_frees"], dropped()) == (0, 0)


def test_a_counter_waits_for_a_pool_that_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch, scrape: Callable[[], dict[Sample, float]]
) -> None:
    class Unsteady:
        name, device, unit = "unsteady", "cpu", "slot"
        _hands_out = True
        broken = False

        def stats(self) -> dict[str, int]:
            if self.broken:
                raise DriverError("the device is gone")
            return {"capacity": 4, "dropped_frees": 2}

    steady, other = Unsteady(), Unsteady()
    monkeypatch.setattr(metrics, "pools", lambda: [steady, other])
    for other.broken in (False, True, False):
        found = scrape()
        assert found["kvpool_dropped_frees_total", "unsteady"] == 4
        assert found["kvpool_slots_capacity", "unsteady"] == (4 if other.broken else 8)
