"""The public path of `kvpool.observe.metrics`."""

from kvpool.observe.metrics import PoolCollector, register

__all__ = ["PoolCollector", "register"]
