"""Which tree core SGLang's cache gets, and what a changed SGLang is told. Prints "ok" at the end."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any
from unittest import mock

from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.components.full import FullComponent
from sglang.srt.mem_cache.unified_cache.tree_core_registry import get_tree_core_factory
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore
from sglang.srt.mem_cache.unified_cache.unified_tree_core_interface import UnifiedTreeCoreInterface
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.runtime_context import get_memory
from sglang.test.kits.unified_radix_cache import fixtures
from sglang.test.kits.unified_radix_cache.config import CONFIGS

from kvpool.errors import ConfigError
from kvpool.integrations.sglang import radix_cache, register_tree_core
from kvpool.integrations.sglang.radix_cache import check_tree_core
from kvpool.integrations.sglang.tree_core import KvTreeCore

DELEGATED: list[dict[str, Any]] = [
    {"enable_session_radix_cache": True},
    {"eviction_policy": "tlru", "eviction_policy_config": {"threshold": 1.5}},
    {"eviction_policy": "slru", "eviction_policy_config": {"protected_threshold": -1}},
    {"component_registry_override": {ComponentType.FULL: FullComponent}},
]


def _other_leaf(self: object, leaf: int) -> None:
    """A method with other parameters."""


def choices() -> None:
    """kvpool's core is made where it can be, and SGLang's with a reason elsewhere."""
    assert get_tree_core_factory("kvpool") is not None
    cache, _, _ = fixtures.build_fixture(CONFIGS[0])
    plain = dataclasses.replace(cache.cache_init_params, tree_core_backend="kvpool")
    made = UnifiedRadixCache(plain)
    assert type(made.tree_core) is KvTreeCore
    for changes in DELEGATED:
        params = dataclasses.replace(plain, **changes)
        with mock.patch.object(radix_cache, "_logger", mock.Mock(spec=logging.Logger)) as logger:
            other = UnifiedRadixCache(params)
        assert isinstance(other.tree_core, UnifiedTreeCore), changes
        ((_, reason), _) = logger.warning.call_args
        assert reason == radix_cache.reason_to_delegate(params), changes
    hierarchical = mock.Mock(
        wraps=get_memory(), enable_hierarchical_cache=True, enable_lmcache=False, enable_flexkv=False
    )
    with mock.patch.object(radix_cache, "get_memory", return_value=hierarchical):
        assert "host tier" in str(radix_cache.reason_to_delegate(plain))
    # What is not delegated in time refuses, and says what to do.
    for name in ("set_hicache_enabled", "node_by_id"):
        try:
            getattr(made.tree_core, name)()
        except NotImplementedError as error:
            assert "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND" in str(error)  # noqa: PT017
        else:
            raise AssertionError(name)


def drift() -> None:
    """A changed SGLang is a readable failure, and nothing is registered."""
    assert check_tree_core() == []
    with mock.patch.object(UnifiedTreeCoreInterface, "evict_device_leaf", _other_leaf):
        (line,) = check_tree_core()
        assert line == (
            "UnifiedTreeCoreInterface.evict_device_leaf is (self, leaf), expected was "
            "(self, node_id, is_write_back)"
        )
    with mock.patch.object(KvTreeCore, "__abstractmethods__", frozenset({"evict_all"})):
        try:
            radix_cache.make_tree_core(mock.Mock(), {})
        except ConfigError as error:
            assert "evict_all is new" in str(error)  # noqa: PT017
        else:
            raise AssertionError("a new method is a difference")


def main() -> None:
    drift()
    register_tree_core()
    register_tree_core()
    choices()
    print("ok")  # noqa: T201


if __name__ == "__main__":
    main()
