"""Observation of pools: the registry, leaks, snapshots and metrics."""
