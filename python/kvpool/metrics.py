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
`class` and `device`. Those of the prefix cache that SGLang has over kvpool's tree begin with
`kvpool_sglang_prefix_`, count slots, and have the name of the pool of the slots.

Pools with the same labels are one series, the sum of their statistics; so are stores and endpoints. Its
counters do not decrease while one of them lives: those that are gone keep their part.
"""

from __future__ import annotations

import logging
import threading
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from kvpool._endpoints import endpoints
from kvpool._kvpool import ArenaHostTier, ArenaPrefixCache, FileStore, HostTier, PrefixCache
from kvpool._trees import trees
from kvpool.errors import KvPoolError
from kvpool.observe.registry import pools
from kvpool.observe.series import Series
from kvpool.observe.units import counts, hands_out

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from kvpool._kvpool import Pool

__all__ = ["PoolCollector", "register"]

_logger = logging.getLogger("kvpool")

_LABELS = ("pool", "class", "device")


class _Exported(NamedTuple):
    """The metric of one statistic.

    Attributes:
        family: Gauge or counter.
        name: The name, for a counter without `_total`.
        documentation: The help text.
    """

    family: type[GaugeMetricFamily | CounterMetricFamily]
    name: str
    documentation: str


_gauge = partial(_Exported, GaugeMetricFamily)
_counter = partial(_Exported, CounterMetricFamily)

_Table: TypeAlias = "Mapping[str, _Exported]"
"""Metrics by the keys of statistics. A key without a metric only describes the pool."""

# Statistics in units of the pool: key, and end of the help text.
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
    "page_locked": "whose memory is page-locked",
}
_MEMORY: _Table = {
    "bytes": _gauge("kvpool_memory_bytes", "Memory of the pool; of the bookkeeping if it has no other"),
}
_POOLS: _Table = {
    **_MEMORY,
    "device_bytes": _gauge("kvpool_device_bytes", "Device memory of index tensors"),
    "free_bytes": _gauge("kvpool_buffers_free_bytes", "Memory of free buffers"),
    "in_use_bytes": _gauge("kvpool_buffers_in_use_bytes", "Memory of buffers in use"),
    "high_water_bytes": _gauge(
        "kvpool_buffers_high_water_bytes", "The most memory of buffers in use at once"
    ),
    "registered_bytes": _gauge("kvpool_buffers_registered_bytes", "Registered memory of other libraries"),
    "dropped_frees": _counter("kvpool_dropped_frees", "Frees of units that the caller did not own"),
    "stale_uses": _counter("kvpool_stale_uses", "Calls with a buffer after it was freed"),
}
_CACHES: _Table = {
    **_MEMORY,
    "cached": _gauge("kvpool_prefix_cached_tokens", "Cached tokens"),
    "evictable": _gauge("kvpool_prefix_evictable_tokens", "Cached tokens without a lease"),
    "locked": _gauge("kvpool_prefix_locked_tokens", "Cached tokens with a lease"),
    "nodes": _gauge("kvpool_prefix_nodes", "Nodes of the tree of prefixes"),
    "snapshots": _gauge("kvpool_prefix_snapshots", "Snapshots of states"),
    "waiting": _gauge("kvpool_prefix_waiting_requests", "Requests in the waiting queue"),
    "lookups": _counter("kvpool_prefix_lookups", "Look-ups of a prefix cache"),
    "hit_tokens": _counter("kvpool_prefix_hit_tokens", "Tokens that look-ups found"),
    "missed_tokens": _counter("kvpool_prefix_missed_tokens", "Tokens that look-ups did not find"),
    "published": _counter("kvpool_prefix_published_tokens", "Tokens published"),
    "duplicates": _counter("kvpool_prefix_duplicate_tokens", "Tokens that others had published in between"),
    "evicted": _counter("kvpool_prefix_evicted_tokens", "Tokens evicted"),
    "loaded": _counter("kvpool_prefix_loaded_tokens", "Tokens that came back from the tier below"),
    "units": _gauge("kvpool_prefix_units", "Cached units of an arena"),
    "evicted_units": _counter("kvpool_prefix_evicted_units", "Units of an arena that were evicted"),
}
_TIERS: _Table = {
    **_MEMORY,
    "pages": _gauge("kvpool_host_pages", "Pages in host memory"),
    "capacity": _gauge("kvpool_host_pages_capacity", "Pages that host memory has room for"),
    "states": _gauge("kvpool_host_snapshots", "Snapshots of states in host memory"),
    "state_capacity": _gauge("kvpool_host_snapshots_capacity", "Snapshots that host memory has room for"),
    "storing": _gauge("kvpool_host_storing", "Pages and snapshots that a store copies, or is about to"),
    "arriving": _gauge("kvpool_host_arriving", "Pages and snapshots that are being copied to host memory"),
    "page_locked": _gauge("kvpool_host_page_locked", "Pages and snapshots whose place is page-locked"),
    "staging_bytes": _gauge("kvpool_host_staging_bytes", "GPU memory through which copies come to the host"),
    "written": _counter("kvpool_host_written", "Pages and snapshots copied to host memory"),
    "loaded": _counter("kvpool_host_loaded", "Pages and snapshots copied back"),
    "evicted": _counter("kvpool_host_evicted", "Pages and snapshots given up for others"),
    "skipped": _counter("kvpool_host_skipped", "Pages and snapshots not copied, as copies used every place"),
    "failed": _counter("kvpool_host_failed", "Pages and snapshots whose copy failed"),
    "fetched": _counter("kvpool_host_fetched", "Pages and snapshots that came from a store"),
    "unstored": _counter("kvpool_host_unstored", "Pages and snapshots that a store did not take"),
    "damaged": _counter(
        "kvpool_host_damaged", "Pages and snapshots given up, as host memory had damaged them"
    ),
}
_ARENA_TIERS: _Table = {
    **_MEMORY,
    "capacity": _gauge("kvpool_host_slabs_capacity", "Slabs of host memory"),
    "in_use": _gauge("kvpool_host_slabs_in_use", "Slabs of host memory in use"),
    "units": _gauge("kvpool_host_units", "Units of an arena in host memory"),
    "page_locked": _gauge("kvpool_host_page_locked_bytes", "Host memory that is page-locked"),
    **{
        name: _TIERS[name]
        for name in (
            *("staging_bytes", "written", "loaded", "skipped", "failed"),
            *("fetched", "unstored", "damaged"),
        )
    },
}
_STORES: _Table = {
    "pages": _gauge("kvpool_store_pages", "Pages in the store"),
    "capacity": _gauge("kvpool_store_pages_capacity", "Pages that the store has room for"),
    "queued": _gauge("kvpool_store_queued", "Pages that wait to be written"),
    "bytes": _gauge("kvpool_store_bytes", "Bytes of pages in the store"),
    "hits": _counter("kvpool_store_hits", "Pages that were read"),
    "misses": _counter("kvpool_store_misses", "Pages that were to be read and not found"),
    "evicted": _counter("kvpool_store_evicted", "Pages given up for others"),
    "damaged": _counter("kvpool_store_damaged", "Pages, and entries of the index, whose checksum failed"),
    "dropped": _counter("kvpool_store_dropped", "Pages not written, as too many waited"),
    "errors": _counter("kvpool_store_errors", "Errors of the system"),
    "read_bytes": _counter("kvpool_store_read_bytes", "Bytes read"),
    "written_bytes": _counter("kvpool_store_written_bytes", "Bytes written"),
}
_ENDPOINTS: _Table = {
    "peers": _gauge("kvpool_remote_peers", "Peers that are connected"),
    "leases": _gauge("kvpool_remote_leases", "Leases that last"),
    "running": _gauge("kvpool_remote_reads_running", "Reads that run"),
    "returned": _counter("kvpool_remote_leases_returned", "Leases that peers have returned, or filled"),
    "expired": _counter("kvpool_remote_leases_expired", "Leases whose time was over"),
    "completed": _counter("kvpool_remote_reads_completed", "Reads that brought their rows"),
    "failed": _counter("kvpool_remote_reads_failed", "Reads that did not bring their rows"),
    "cuts": _counter("kvpool_remote_cuts", "How often connections were ended to end reads that failed"),
    "refused": _counter("kvpool_remote_refused_notes", "Notes of peers that could not be used"),
    "rows": _counter("kvpool_remote_read_rows", "Slots and states that reads brought"),
    "runs": _counter("kvpool_remote_read_runs", "Pieces in which they came, over all buffers"),
    "bytes": _counter("kvpool_remote_read_bytes", "Bytes that reads brought"),
}
_TREES: _Table = {
    "evictable": _gauge("kvpool_sglang_prefix_evictable_slots", "Cached slots without a lock"),
    "locked": _gauge("kvpool_sglang_prefix_locked_slots", "Cached slots with a lock"),
    "second_owners": _counter(
        "kvpool_sglang_prefix_second_owners", "How often a cached slot was found to have a second owner"
    ),
}
_BY_CLASS: Mapping[type[Pool], _Table] = {
    PrefixCache: _CACHES,
    ArenaPrefixCache: _CACHES,
    HostTier: _TIERS,
    ArenaHostTier: _ARENA_TIERS,
}


class _Histogram(NamedTuple):
    """A histogram with buckets of powers of two.

    Attributes:
        name: The name.
        documentation: The help text.
        scale: The upper bound of bucket `power` is `2**power * scale - less`.
        less: See `scale`.
    """

    name: str
    documentation: str
    scale: float
    less: float


_READ_TIMES = _Histogram(
    "kvpool_remote_read_seconds", "Time of the reads that brought their rows", scale=0.001, less=0
)
_AGES = _Histogram(
    "kvpool_prefix_eviction_age_tokens",
    "Tokens looked up between the last use of a token and its eviction",
    scale=1,
    less=1,
)


class _Part(NamedTuple):
    """A number of a histogram.

    Attributes:
        histogram: The histogram.
        bucket: The values in this bucket; `None` for the sum of all values.
    """

    histogram: _Histogram
    bucket: int | None


_Key: TypeAlias = "_Exported | _Part"
_Labels: TypeAlias = "tuple[str, str, str]"


def _is_counter(key: _Key) -> bool:
    return isinstance(key, _Part) or key.family is CounterMetricFamily


class PoolCollector(Collector):
    """The statistics of all live pools and endpoints of this process, read at each scrape."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._series: dict[_Labels, Series[_Key]] = {}

    def describe(self) -> Iterator[Metric]:
        """Describe the metrics whose names do not depend on pools. A registry takes each name once."""
        exported = {
            one for table in (_POOLS, _CACHES, _TIERS, _STORES, _ENDPOINTS, _TREES) for one in table.values()
        }
        for family, name, documentation in sorted(exported, key=lambda one: one.name):
            yield family(name, documentation)
        for histogram in (_READ_TIMES, _AGES):
            yield HistogramMetricFamily(histogram.name, histogram.documentation)

    def collect(self) -> Iterator[Metric]:
        """Collect the statistics of all pools and endpoints as metric families."""
        scrape = _Scrape()
        scrape.add_pools()
        scrape.add_endpoints()
        scrape.add_trees()
        with self._lock:
            # A series without an object begins anew, as after a restart.
            self._series = {
                labels: self._series.get(labels) or Series(_is_counter) for labels in scrape.numbers
            }
            sums = {
                labels: self._series[labels].update(numbers) for labels, numbers in scrape.numbers.items()
            }
        return _families(sums)


class _Scrape:
    """The numbers of one scrape.

    Attributes:
        numbers: For each series its objects, with their numbers; `None` if these could not be read.
    """

    def __init__(self) -> None:
        self.numbers: dict[_Labels, list[tuple[object, dict[_Key, float] | None]]] = {}

    def add_pools(self) -> None:
        """Add the statistics of pools, and of stores below them: each store under the first cache with it."""
        stores: dict[FileStore, str] = {}
        for pool in pools():
            labels = (pool.name, type(pool).__name__, pool.device)
            numbers = _read(pool.name, pool.stats, partial(_table, pool))
            if isinstance(pool, PrefixCache):
                if numbers is not None:
                    numbers.update(_parts(_AGES, pool.eviction_ages()))
                for store in pool.tiers[1:]:
                    if isinstance(store, FileStore):
                        stores.setdefault(store, pool.name)
            self._add(labels, pool, numbers)
        for store, name in stores.items():
            self._add(
                (name, type(store).__name__, "cpu"), store, _read(store.path, store.stats, lambda: _STORES)
            )

    def add_endpoints(self) -> None:
        """Add the statistics of endpoints."""
        for endpoint in endpoints():
            numbers = _read(endpoint.name, endpoint.stats, lambda: _ENDPOINTS)
            if numbers is not None:
                numbers.update(_parts(_READ_TIMES, endpoint.read_times()))
                numbers[_Part(_READ_TIMES, None)] = endpoint.stats()["seconds"]
            self._add((endpoint.name, "Endpoint", endpoint.device), endpoint, numbers)

    def add_trees(self) -> None:
        """Add the statistics of the trees of engines."""
        for tree in trees():
            numbers = _read(tree.name, tree.stats, lambda: _TREES)
            self._add((tree.name, "HybridTree", tree.device), tree, numbers)

    def _add(self, labels: _Labels, one: object, numbers: dict[_Key, float] | None) -> None:
        self.numbers.setdefault(labels, []).append((one, numbers))


def _families(sums: Mapping[_Labels, Mapping[_Key, float]]) -> Iterator[Metric]:
    """Yield the families of series: those with at least one sample."""
    families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
    histograms: dict[_Histogram, HistogramMetricFamily] = {}
    for labels, numbers in sums.items():
        parts: dict[_Histogram, dict[int | None, float]] = {}
        for key, value in numbers.items():
            if isinstance(key, _Part):
                parts.setdefault(key.histogram, {})[key.bucket] = value
            else:
                family = key.family(key.name, key.documentation, labels=_LABELS)
                families.setdefault(family.name, family).add_metric(labels, value)
        for histogram, buckets in parts.items():
            total = buckets.pop(None, None)
            one = HistogramMetricFamily(histogram.name, histogram.documentation, labels=_LABELS)
            histograms.setdefault(histogram, one).add_metric(labels, _buckets(histogram, buckets), total)
    yield from families.values()
    yield from histograms.values()


def _parts(histogram: _Histogram, numbers: Sequence[int]) -> dict[_Key, float]:
    """Return how many values are in each bucket, by bucket."""
    return {_Part(histogram, bucket): number for bucket, number in enumerate(numbers)}


def _read(
    name: object, stats: Callable[[], Mapping[str, object]], table: Callable[[], _Table]
) -> dict[_Key, float] | None:
    """Read the statistics that `table` exports. A failure is logged, and the others are still exported."""
    try:
        numbers = counts(stats())
    except (KvPoolError, RuntimeError) as error:
        _logger.warning("cannot read the statistics of %s: %s", name, error)
        return None
    exported = table()
    return {exported[key]: value for key, value in numbers.items() if key in exported}


def _table(pool: Pool) -> _Table:
    """Return the metrics of a pool."""
    own = _BY_CLASS.get(type(pool))
    if own is not None:
        return own
    # Units of a pool that hands out none are counted by the pool that does.
    return {**_POOLS, **_of_units(pool.unit)} if hands_out(pool) else _POOLS


def _of_units(unit: str) -> _Table:
    """Return the metrics of units with a name."""
    if unit == "byte":
        return {
            key: _gauge(f"kvpool_arena_{key}_bytes", f"Bytes of an arena {text}")
            for key, text in _UNITS.items()
        }
    prefix = f"kvpool_{unit.replace(' ', '_')}s"
    return {key: _gauge(f"{prefix}_{key}", f"{unit.capitalize()}s {text}") for key, text in _UNITS.items()}


def _buckets(histogram: _Histogram, numbers: Mapping[int | None, float]) -> list[tuple[str, float]]:
    """Return the buckets of a histogram: their upper bounds, and how many values are at most that large.

    Args:
        histogram: The histogram.
        numbers: How many values are in each bucket, the last without a bound.
    """
    bounds = [2.0**power * histogram.scale - histogram.less for power in range(len(numbers) - 1)]
    return [*zip([*map(str, bounds), "+Inf"], accumulate(numbers.values()), strict=True)]


_collectors: WeakKeyDictionary[CollectorRegistry, PoolCollector] = WeakKeyDictionary()


def register(registry: CollectorRegistry = REGISTRY) -> PoolCollector:
    """Export the statistics of all pools and endpoints of this process, including those created later.

    A second call with the same registry does nothing.

    Args:
        registry: The registry; by default that of `prometheus_client`.

    Returns:
        The collector, for `registry.unregister`: one for each registry.

    Raises:
        ValueError: If another collector of the registry has metrics of these names.
    """
    known = _collectors.get(registry)
    collector = _collectors.setdefault(registry, PoolCollector()) if known is None else known
    try:
        registry.register(collector)
    except ValueError:
        # Its names are taken: by itself, or by a collector that was registered without this function.
        if known is None:
            del _collectors[registry]
            raise
    return collector
