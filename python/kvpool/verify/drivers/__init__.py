"""Drivers of what kvpool has, and of an engine's connector, by name."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from kvpool.errors import ConfigError

if TYPE_CHECKING:
    from kvpool._kvpool import CacheLayout
    from kvpool.verify.driver import Driver

DRIVERS = {
    "pool": ("pool", "PoolDriver"),
    "arena": ("arena", "ArenaDriver"),
    "host-tier": ("host_tier", "HostTierDriver"),
    "arena-tier": ("arena_tier", "ArenaTierDriver"),
    "file-store": ("file_store", "FileStoreDriver"),
    "nixl": ("nixl", "NixlDriver"),
    "vllm-offload": ("vllm_offload", "VllmOffloadDriver"),
    "vllm-connector": ("vllm_connector", "VllmConnectorDriver"),
    "vllm-transfer": ("vllm_transfer", "VllmTransferDriver"),
}
"""Module and class of each driver."""


def make_driver(name: str, layout: CacheLayout, tokens: int | None = None, device: str = "cpu") -> Driver:
    """Return a driver that kvpool has.

    Args:
        name: One of `DRIVERS`.
        layout: The layout; a driver may take a part of it, as its notes say.
        tokens: Tokens of the proof: those that are passed to `prove`.
        device: Device of the pools.

    Raises:
        ConfigError: If there is no such driver.
        LeftOutError: If what it drives is not here, or does not take the layout.
    """
    if name not in DRIVERS:
        raise ConfigError(f"there is no {name!r}; there are {', '.join(DRIVERS)}")
    module, kind = DRIVERS[name]
    found: type[Driver] = getattr(importlib.import_module(f"kvpool.verify.drivers.{module}"), kind)
    return found(layout, tokens, device)  # type: ignore[call-arg]  # as each of them takes them
