"""Which tree core SGLang's cache gets, and what a changed SGLang is told. Prints "ok" at the end."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import os
import re
from array import array
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.components.full import FullComponent
from sglang.srt.mem_cache.unified_cache.tree_core_registry import get_tree_core_factory
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore
from sglang.srt.mem_cache.unified_cache.unified_tree_core_interface import UnifiedTreeCoreInterface
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.runtime_context import get_context
from sglang.test.kits.unified_radix_cache import fixtures
from sglang.test.kits.unified_radix_cache.config import CONFIGS

from kvpool.errors import ConfigError
from kvpool.integrations.seams import have_source
from kvpool.integrations.sglang import radix_cache, register_tree_core, tree_owners
from kvpool.integrations.sglang.radix_cache import check_tree_core
from kvpool.integrations.sglang.tree_core import DELEGATED as DELEGATED_METHODS
from kvpool.integrations.sglang.tree_core import KvTreeCore

DELEGATED: list[dict[str, Any]] = [
    {"enable_session_radix_cache": True},
    {"eviction_policy": "tlru", "eviction_policy_config": {"threshold": 1.5}},
    {"eviction_policy": "slru", "eviction_policy_config": {"protected_threshold": -1}},
    {"component_registry_override": {ComponentType.FULL: FullComponent}},
]


def _other_leaf(self: object, leaf: int) -> None:
    """A method with other parameters."""


def make_cache(core: str) -> UnifiedRadixCache:
    """A cache of 64 slots, made without a server."""
    assert not get_context().is_config_namespace_published("memory")
    size, parts = {"size": 64, "device": "cpu"}, (ComponentType.FULL,)
    allocator = TokenToKVPoolAllocator(dtype=torch.bfloat16, kvcache=None, need_sort=False, **size)
    rows = ReqToTokenPool(size=2, max_context_len=8, device="cpu", enable_memory_saver=False)
    params = CacheInitParams(
        disable=False,
        req_to_token_pool=rows,
        token_to_kv_pool_allocator=allocator,
        page_size=1,
        tree_components=parts,
        tree_core_backend=core,
    )
    return UnifiedRadixCache(params)


def unpublished() -> None:
    """A cache is made where SGLang's own is, and asks for the same look-ups of waiting requests."""
    own, made = make_cache("python"), make_cache("kvpool")
    assert type(made.tree_core) is KvTreeCore
    assert own.supports_fast_match_prefix() is made.supports_fast_match_prefix() is False
    with mock.patch.dict(os.environ, KVPOOL_SGLANG_FAST_MATCH="1"):
        assert make_cache("kvpool").supports_fast_match_prefix() is True


def second_owners() -> None:
    """A slot of two requests is counted, and a warning a second names the pool."""
    made, name = make_cache("kvpool"), "TokenToKVPoolAllocator"
    insert = partial(_insert, made)
    with (
        mock.patch.object(tree_owners, "_logger", mock.Mock(spec=logging.Logger)) as logger,
        mock.patch.object(tree_owners, "monotonic", return_value=10.0) as clock,
    ):
        insert([1, 2, 3], [11, 12, 13])
        insert([1, 2, 3, 4], [11, 12, 13, 14], found=3)
        assert made.tree_core.stats() == {"evictable": 4, "locked": 0, "second_owners": 0}
        insert([5, 6], [13, 15])
        insert([7, 8], [14, 15])
        assert made.tree_core.stats() == {"evictable": 8, "locked": 0, "second_owners": 3}
        clock.return_value += 1.0
        insert([9], [16])
    texts = [call.args[0] % call.args[1:] for call in logger.warning.call_args_list]
    assert [text.partition(":")[0] for text in texts] == [name, name]
    assert ["warning: 1)" in texts[0], "warning: 2)" in texts[1]] == [True, True], texts


def _insert(cache: UnifiedRadixCache, tokens: list[int], slots: list[int], found: int = 0) -> None:
    cache.insert(InsertParams(RadixKey(array("q", tokens)), torch.tensor(slots), prev_prefix_len=found))


def checkpoints() -> None:
    """A checkpoint is kvpool's only where SGLang's own is the one that it was written after."""
    own = UnifiedRadixCache.checkpoint_into_tree
    assert have_source([own], radix_cache._CHECKPOINT)
    assert not any(have_source([other], radix_cache._CHECKPOINT) for other in (_other_leaf, len))
    made, request = make_cache("kvpool"), mock.Mock()
    made.__class__ = radix_cache.KvUnifiedRadixCache
    with (
        mock.patch.object(radix_cache, "_KNOWS_CHECKPOINT", new=False),
        mock.patch.object(UnifiedRadixCache, "checkpoint_into_tree") as method,
    ):
        made.checkpoint_into_tree(request, up_to=3)
    method.assert_called_once_with(request, up_to=3)


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
    hierarchical = SimpleNamespace(enable_hierarchical_cache=True)
    with mock.patch.object(radix_cache, "_settings", return_value=hierarchical):
        assert "host tier" in str(radix_cache.reason_to_delegate(plain))
    # A call that was not delegated in time raises, and says what to do.
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


def page() -> None:
    """The page has a line for each method of the installed SGLang, and says whose each one is."""
    text = (Path(__file__).parents[2] / "docs/engines/sglang-prefix-cache.md").read_text("utf-8")
    section = text.partition("## The methods of a tree core\n")[2].partition("\n## ")[0]
    tables = [
        re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", part, re.MULTILINE)))
        for part in section.split("\n|---|---|\n")[1:]
    ]
    ours = {name for name in vars(KvTreeCore) if name in vars(UnifiedTreeCoreInterface)} - set(
        DELEGATED_METHODS
    )
    methods = {
        name
        for name, value in vars(UnifiedTreeCoreInterface).items()
        if not name.startswith("_") and (inspect.isfunction(value) or isinstance(value, property))
    }
    assert sorted(tables[0]) == sorted(ours & methods), set(tables[0]) ^ (ours & methods)
    assert sorted(tables[1]) == sorted(methods - ours), set(tables[1]) ^ (methods - ours)
    abstract = UnifiedTreeCoreInterface.__abstractmethods__
    assert f"has {len(abstract)} abstract methods and {len(methods - abstract)} others." in section
    assert f"{len(ours & abstract)} of the {len(abstract)} are kvpool's" in section
    assert f"and {len(ours & methods - abstract)} of the others" in section


def main() -> None:
    drift()
    page()
    register_tree_core()
    register_tree_core()
    unpublished()
    second_owners()
    checkpoints()
    choices()
    print("ok")  # noqa: T201


if __name__ == "__main__":
    main()
