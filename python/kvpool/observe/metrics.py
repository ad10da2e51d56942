"""Statistics of all pools and endpoints of this process, for Prometheus.

```python
from prometheus_client import start_http_server

import kvpool.metrics

kvpool.metrics.register()
start_http_server(9090)
```

Needs `prometheus_client` (`pip install 'kvpool[metrics]'`). A scrape calls `stats()` of each live pool,
which neither waits for a GPU nor visits single units: it costs microseconds per pool.

Names follow the conventions of Prometheus: `kvpool_slots_in_use`, `kvpool_chunks_available` and so on are
gauges that count units of the pool (`Pool.unit`), `kvpool_..._bytes` are gauges in bytes, and
`kvpool_..._total` are counters. Those of a prefix cache begin with `kvpool_prefix_` and count tokens, those
of a host tier with `kvpool_host_` and count pages and snapshots of states, those of a `FileStore` below a
cache with `kvpool_store_`, and those of an endpoint of `kvpool.remote` with `kvpool_remote_`. Each has the
labels `pool` (`Pool.name`, which you can set; for a store that of its cache, for an endpoint its own),
`class` and `device`.
"""

from __future__ import annotations

import logging
from itertools import accumulate
from typing import TYPE_CHECKING, cast

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from kvpool._endpoints import endpoints
from kvpool._kvpool import FileStore, HostTier, PrefixCache
from kvpool.errors import KvPoolError
from kvpool.observe.registry import pools
from kvpool.observe.units import hands_out

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvpool._kvpool import Pool

__all__ = ["PoolCollector", "register"]

_logger = logging.getLogger("kvpool")

_LABELS = ("pool", "class", "device")

# Statistics in units of the pool: key and help.
_UNITS = {
    "capacity": "that can be in use at once",
    "available": "that can be handed out now",
    "in_use": "in use",
    "high_water": "the most that were in use at once",
    "free": "that are handed out next",
    "released": "that are free, and kept apart until a merge",
    "fenced": "that were freed, and are in use until a fence passes",
    "shared": "with more than one owner",
    "cached": "of a prefix cache, which are in use",
    "pending": "that were freed, with numbers that only the GPU has yet",
    "registered": "whose memory is page-locked",
}

# Statistics in bytes: key, name and help.
_BYTES = {
    "bytes": (
        "kvpool_memory_bytes",
        "Memory of the pool; of the bookkeeping if it has no other",
    ),
    "device_bytes": ("kvpool_device_bytes", "Device memory of index tensors"),
    "free_bytes": ("kvpool_buffers_free_bytes", "Memory of free buffers"),
    "in_use_bytes": ("kvpool_buffers_in_use_bytes", "Memory of buffers in use"),
    "high_water_bytes": (
        "kvpool_buffers_high_water_bytes",
        "The most memory of buffers in use at once",
    ),
    "registered_bytes": ("kvpool_buffers_registered_bytes", "Registered memory of other libraries"),
}

# Counters: key, name without `_total`, and help.
_COUNTERS = {
    "dropped_frees": ("kvpool_dropped_frees", "Frees of units that the caller did not own"),
    "stale_uses": ("kvpool_stale_uses", "Calls with a buffer after it was freed"),
    "lookups": ("kvpool_prefix_lookups", "Look-ups of a prefix cache"),
    "hit_tokens": ("kvpool_prefix_hit_tokens", "Tokens that look-ups found"),
    "missed_tokens": ("kvpool_prefix_missed_tokens", "Tokens that look-ups did not find"),
    "published": ("kvpool_prefix_published_tokens", "Tokens published"),
    "duplicates": ("kvpool_prefix_duplicate_tokens", "Tokens that others had published in between"),
    "evicted": ("kvpool_prefix_evicted_tokens", "Tokens evicted"),
    "loaded": ("kvpool_prefix_loaded_tokens", "Tokens that came back from the tier below"),
}

# Of a prefix cache: key, name and help.
_CACHES = {
    "cached": ("kvpool_prefix_cached_tokens", "Cached tokens"),
    "evictable": ("kvpool_prefix_evictable_tokens", "Cached tokens without a lease"),
    "locked": ("kvpool_prefix_locked_tokens", "Cached tokens with a lease"),
    "nodes": ("kvpool_prefix_nodes", "Nodes of the tree of prefixes"),
    "snapshots": ("kvpool_prefix_snapshots", "Snapshots of states"),
}
# Of a host tier, whose pages and snapshots are pieces: key, name and help.
_TIERS = {
    "pages": ("kvpool_host_pages", "Pages in host memory"),
    "capacity": ("kvpool_host_pages_capacity", "Pages that host memory has room for"),
    "states": ("kvpool_host_snapshots", "Snapshots of states in host memory"),
    "state_capacity": ("kvpool_host_snapshots_capacity", "Snapshots that host memory has room for"),
    "storing": ("kvpool_host_storing", "Pages and snapshots that a store copies, or is about to"),
    "arriving": ("kvpool_host_arriving", "Pages and snapshots that are being copied to host memory"),
    "registered": ("kvpool_host_registered", "Pages and snapshots whose place is page-locked"),
}
_TIER_COUNTERS = {
    "written": ("kvpool_host_written", "Pages and snapshots copied to host memory"),
    "loaded": ("kvpool_host_loaded", "Pages and snapshots copied back"),
    "evicted": ("kvpool_host_evicted", "Pages and snapshots given up for others"),
    "skipped": ("kvpool_host_skipped", "Pages and snapshots not copied, as copies used every place"),
    "failed": ("kvpool_host_failed", "Pages and snapshots whose copy failed"),
    "fetched": ("kvpool_host_fetched", "Pages and snapshots that came from a store"),
    "unstored": ("kvpool_host_unstored", "Pages and snapshots that a store did not take"),
}
# Of a file store below a cache: key, name and help.
_STORES = {
    "pages": ("kvpool_store_pages", "Pages in the store"),
    "capacity": ("kvpool_store_pages_capacity", "Pages that the store has room for"),
    "queued": ("kvpool_store_queued", "Pages that wait to be written"),
    "bytes": ("kvpool_store_bytes", "Bytes of pages in the store"),
}
_STORE_COUNTERS = {
    "hits": ("kvpool_store_hits", "Pages that were read"),
    "misses": ("kvpool_store_misses", "Pages that were to be read and not found"),
    "evicted": ("kvpool_store_evicted", "Pages given up for others"),
    "damaged": ("kvpool_store_damaged", "Pages, and entries of the index, whose checksum failed"),
    "dropped": ("kvpool_store_dropped", "Pages not written, as too many waited"),
    "errors": ("kvpool_store_errors", "Errors of the system"),
    "read_bytes": ("kvpool_store_read_bytes", "Bytes read"),
    "written_bytes": ("kvpool_store_written_bytes", "Bytes written"),
}
# Of an endpoint: key, name and help.
_ENDPOINTS = {
    "peers": ("kvpool_remote_peers", "Peers that are connected"),
    "leases": ("kvpool_remote_leases", "Leases that last"),
    "running": ("kvpool_remote_reads_running", "Reads that run"),
}
_ENDPOINT_COUNTERS = {
    "returned": ("kvpool_remote_leases_returned", "Leases that peers have returned, or filled"),
    "expired": ("kvpool_remote_leases_expired", "Leases whose time was over"),
    "completed": ("kvpool_remote_reads_completed", "Reads that brought their rows"),
    "failed": ("kvpool_remote_reads_failed", "Reads that did not bring their rows"),
    "cuts": ("kvpool_remote_cuts", "How often connections were ended to end reads that failed"),
    "refused": ("kvpool_remote_refused_notes", "Notes of peers that could not be used"),
    "rows": ("kvpool_remote_read_rows", "Slots and states that reads brought"),
    "runs": ("kvpool_remote_read_runs", "Pieces in which they came, over all buffers"),
    "bytes": ("kvpool_remote_read_bytes", "Bytes that reads brought"),
}
_READ_TIMES = ("kvpool_remote_read_seconds", "Time of the reads that brought their rows")
_AGES = (
    "kvpool_prefix_eviction_age_tokens",
    "Tokens looked up between the last use of a token and its eviction",
)


class PoolCollector(Collector):
    """Collects the statistics of all live pools and endpoints of this process at each scrape."""

    def describe(self) -> Iterator[Metric]:
        """Describe nothing: the metrics depend on what is created later."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Collect the statistics of all pools and endpoints as metric families."""
        families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
        ages = HistogramMetricFamily(*_AGES, labels=_LABELS)
        # Each with the first cache that has it.
        stores: dict[FileStore, str] = {}
        for pool in pools():
            labels = [pool.name, type(pool).__name__, pool.device]
            try:
                stats = cast("dict[str, int]", pool.stats())
            except KvPoolError as error:
                # The other pools are still exported.
                _logger.warning("cannot read the statistics of %s: %s", pool.name, error)
                continue
            for key, value in stats.items():
                family = _family(pool, key)
                if family is not None:
                    families.setdefault(family.name, family).add_metric(labels, value)
            if isinstance(pool, PrefixCache):
                ages.add_metric(labels, _buckets(pool.eviction_ages()), None)
                stores.update(
                    (store, pool.name)
                    for store in pool.tiers[1:]
                    if isinstance(store, FileStore) and store not in stores
                )
        for store, name in stores.items():
            for family, value in _of_store(store):
                known = families.setdefault(family.name, family)
                known.add_metric([name, type(store).__name__, "cpu"], value)
        times = _of_endpoints(families)
        yield from families.values()
        yield from (histogram for histogram in (ages, times) if histogram.samples)


def _of_endpoints(families: dict[str, GaugeMetricFamily | CounterMetricFamily]) -> HistogramMetricFamily:
    """Adds the metric families of endpoints; returns the times of their reads. Those of one name are one."""
    found: dict[tuple[str, str], tuple[dict[str, float], list[int]]] = {}
    for endpoint in endpoints():
        counts = endpoint.read_times()
        stats, times = found.setdefault((endpoint.name, endpoint.device), ({}, [0] * len(counts)))
        for key, value in cast("dict[str, float]", endpoint.stats()).items():
            stats[key] = stats.get(key, 0) + value
        times[:] = [sum(pair) for pair in zip(times, counts, strict=True)]
    took = HistogramMetricFamily(*_READ_TIMES, labels=_LABELS)
    for (name, device), (stats, times) in found.items():
        labels = [name, "Endpoint", device]
        for key, value in stats.items():
            family: GaugeMetricFamily | CounterMetricFamily
            if key in _ENDPOINTS:
                family = GaugeMetricFamily(*_ENDPOINTS[key], labels=_LABELS)
            elif key in _ENDPOINT_COUNTERS:
                family = CounterMetricFamily(*_ENDPOINT_COUNTERS[key], labels=_LABELS)
            else:
                continue
            families.setdefault(family.name, family).add_metric(labels, value)
        bounds = [str(2.0**power / 1000) for power in range(len(times) - 1)]
        buckets = [*zip([*bounds, "+Inf"], accumulate(times), strict=True)]
        took.add_metric(labels, buckets, stats["seconds"])
    return took


def _of_store(store: FileStore) -> Iterator[tuple[GaugeMetricFamily | CounterMetricFamily, int]]:
    """The metric families of a store, and their values."""
    try:
        stats = cast("dict[str, int]", store.stats())
    except RuntimeError as error:
        _logger.warning("cannot read the statistics of %s: %s", store.path, error)
        return
    for key, value in stats.items():
        if key in _STORES:
            yield GaugeMetricFamily(*_STORES[key], labels=_LABELS), value
        elif key in _STORE_COUNTERS:
            yield CounterMetricFamily(*_STORE_COUNTERS[key], labels=_LABELS), value


def _buckets(counts: list[int]) -> list[tuple[str, float]]:
    """Upper bounds, one less than 1, 2, 4, ... and none for the last, and how many are at most that large."""
    bounds = [str(2.0**power - 1) for power in range(len(counts) - 1)]
    return [*zip([*bounds, "+Inf"], accumulate(counts), strict=True)]


def _family(pool: Pool, key: str) -> GaugeMetricFamily | CounterMetricFamily | None:
    """The metric family of one statistic; None for a statistic that only describes the pool."""
    counters = _TIER_COUNTERS if isinstance(pool, HostTier) else _COUNTERS
    if key in counters:
        return CounterMetricFamily(*counters[key], labels=_LABELS)
    if key in _BYTES:
        return GaugeMetricFamily(*_BYTES[key], labels=_LABELS)
    if isinstance(pool, PrefixCache | HostTier):
        gauges = _TIERS if isinstance(pool, HostTier) else _CACHES
        return GaugeMetricFamily(*gauges[key], labels=_LABELS) if key in gauges else None
    # Units of a pool that hands out none are counted by the pool that does.
    if key not in _UNITS or not hands_out(pool):
        return None
    if pool.unit == "byte":
        return GaugeMetricFamily(
            f"kvpool_arena_{key}_bytes", f"Bytes of an arena {_UNITS[key]}", labels=_LABELS
        )
    units = pool.unit.replace(" ", "_") + "s"
    return GaugeMetricFamily(
        f"kvpool_{units}_{key}", f"{pool.unit.capitalize()}s {_UNITS[key]}", labels=_LABELS
    )


def register(registry: CollectorRegistry = REGISTRY) -> PoolCollector:
    """Export the statistics of all pools and endpoints of this process, including those created later.

    Args:
        registry: The registry; by default that of `prometheus_client`.

    Returns:
        The collector, for `registry.unregister`. A registry takes one collector, as each pool is exported
        once.
    """
    collector = PoolCollector()
    registry.register(collector)
    return collector
