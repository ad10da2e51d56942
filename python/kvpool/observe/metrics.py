"""The numbers of all pools of this process, for Prometheus.

```python
from prometheus_client import start_http_server

import kvpool.metrics

kvpool.metrics.register()
start_http_server(9090)
```

Needs `prometheus_client` (`pip install 'kvpool[metrics]'`). A scrape asks each living pool for its `stats()`,
which neither waits for a GPU nor looks at single units, so it costs microseconds a pool.

Names follow the conventions of Prometheus: `kvpool_slots_in_use`, `kvpool_chunks_available` and so on are
gauges that count what the pool hands out (`Pool.unit`), `kvpool_..._bytes` are gauges in bytes,
`kvpool_..._total` are counters. Each has the labels `pool` (`Pool.name`, which may be set),
`class` and `device`.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, cast

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvpool.errors import KvPoolError
from kvpool.observe.registry import pools

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvpool._kvpool import Pool

__all__ = ["PoolCollector", "register"]

_log = logging.getLogger("kvpool")

_LABELS = ("pool", "class", "device")

# Of `stats()`, what counts units of the pool: key and help.
_UNITS = {
    "capacity": "that can be in use at once",
    "available": "that could be handed out now",
    "in_use": "in use",
    "high_water": "the most that were in use at once",
    "free": "that are handed out next",
    "released": "that are free again and wait for a merge",
    "fenced": "that were freed and wait for a fence",
    "shared": "with more than one owner",
    "pending": "that were freed and whose numbers only the GPU knows",
    "registered": "whose memory is page-locked",
}

# What is in bytes: key, name and help.
_BYTES = {
    "bytes": (
        "kvpool_memory_bytes",
        "Memory of the pool; of slots and rows without memory, of the bookkeeping",
    ),
    "device_bytes": ("kvpool_device_bytes", "Device memory of index tensors"),
    "free_bytes": ("kvpool_buffers_free_bytes", "Memory of buffers that are free"),
    "in_use_bytes": ("kvpool_buffers_in_use_bytes", "Memory of buffers that are out"),
    "high_water_bytes": (
        "kvpool_buffers_high_water_bytes",
        "The most memory of buffers that was out at once",
    ),
    "registered_bytes": ("kvpool_buffers_registered_bytes", "Memory of others that is registered"),
}

# What only grows: key, name without `_total`, and help.
_COUNTERS = {
    "dropped_frees": ("kvpool_dropped_frees", "Frees of units that their giver did not own"),
    "stale_uses": ("kvpool_stale_uses", "Calls with a buffer that had been given back"),
}


class PoolCollector(Collector):
    """Asks all living pools of this process at each scrape."""

    def describe(self) -> Iterator[Metric]:
        """Nothing: which metrics there are depends on the pools, and they are made later."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """The numbers of all pools, as metric families."""
        families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
        for pool in pools():
            labels = [pool.name, type(pool).__name__, pool.device]
            try:
                stats = cast("dict[str, int]", pool.stats())
            except KvPoolError as error:
                # The others are exported all the same.
                _log.warning("no numbers of %s: %s", pool.name, error)
                continue
            for key, value in stats.items():
                family = _family(pool, key)
                if family is not None:
                    families.setdefault(family.name, family).add_metric(labels, value)
        return iter(families.values())


def _family(pool: Pool, key: str) -> GaugeMetricFamily | CounterMetricFamily | None:
    """The metric family for one of the numbers of a pool; none for what only describes the pool."""
    if key in _COUNTERS:
        return CounterMetricFamily(*_COUNTERS[key], labels=_LABELS)
    if key in _BYTES:
        return GaugeMetricFamily(*_BYTES[key], labels=_LABELS)
    # What such a pool has is what another one hands out.
    if key not in _UNITS or not pool._hands_out:  # noqa: SLF001 - of this package
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
    """Export the numbers of all pools of this process, those made later too.

    Args:
        registry: Where to; the default one of `prometheus_client` if none is given.

    Returns:
        The collector, for `registry.unregister`. Each pool must be exported once, so a registry takes one.
    """
    collector = PoolCollector()
    registry.register(collector)
    return collector
