"""SGLang on kvpool's pools: a plugin of SGLang 0.5.23.

`pip install 'kvpool[sglang]'`, then start SGLang with `SGLANG_PLUGINS=kvpool` in its environment. The classes
of `pools` replace SGLang's own before it makes any pool: token slots, paged slots, state slots, request rows,
and the buffers of K and V. The rest of SGLang does not change.
"""

from __future__ import annotations

import multiprocessing
import os
from typing import TYPE_CHECKING

from kvpool.integrations.sglang.seams import EVICTION, SEAMS, SGLANG, START, VERIFY, EngineMismatchError

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
    from sglang.srt.mem_cache.unified_cache.unified_tree_core_interface import UnifiedTreeCoreInterface

__all__ = ["TESTED_VERSIONS", "EngineMismatchError", "is_switched_on", "register", "register_tree_core"]

TESTED_VERSIONS = SGLANG.tested
"""Versions of SGLang on which the plugin has passed its tests."""


def is_switched_on() -> bool:
    """Return whether the environment asks for kvpool: `SGLANG_PLUGINS` names it, or `KVPOOL_SGLANG` is 1.

    SGLang loads every installed plugin if `SGLANG_PLUGINS` is not set, so the plugin must be switched on as
    well.
    """
    named = os.environ.get("SGLANG_PLUGINS", "").split(",")
    return "kvpool" in (name.strip() for name in named) or os.environ.get("KVPOOL_SGLANG") == "1"


def register_tree_core() -> None:
    """Register the tree core and the radix cache "kvpool" with SGLang, where they can be chosen.

    A second call does nothing. The modules of SGLang that they need are imported later, when they are made,
    so that the pools are replaced first.
    """
    from sglang.srt.mem_cache import registry  # noqa: PLC0415
    from sglang.srt.mem_cache.unified_cache import tree_core_registry  # noqa: PLC0415

    if tree_core_registry.get_tree_core_factory("kvpool") is None:
        tree_core_registry.register_tree_core_backend("kvpool", _make_tree_core)
    if registry.get_radix_cache_factory("kvpool") is None:
        registry.register_radix_cache_backend("kvpool", _make_radix_cache)


def _make_tree_core(
    params: CacheInitParams, components: dict[ComponentType, object]
) -> UnifiedTreeCoreInterface:
    from kvpool.integrations.sglang.radix_cache import make_tree_core  # noqa: PLC0415

    return make_tree_core(params, components)


def _make_radix_cache(ctx: TreeCacheBuildContext) -> BasePrefixCache:
    from kvpool.integrations.sglang.radix_cache import make_radix_cache  # noqa: PLC0415

    return make_radix_cache(ctx)


def register() -> None:
    """Register the replacements with SGLang, which calls this in each of its processes.

    The call does nothing unless the plugin is switched on. With `KVPOOL_SGLANG_STRICT=1` an invalid free
    raises.

    Raises:
        EngineMismatchError: If a class or a signature is not the one that the replacements were written for,
            or if they cannot be imported. Nothing is replaced then.
    """
    if not is_switched_on():
        return
    try:
        _register()
    except Exception as error:
        raise EngineMismatchError(
            f"SGLang cannot run on kvpool, and nothing was replaced: {type(error).__name__}: {error}. "
            "Without SGLANG_PLUGINS=kvpool it runs on its own pools."
        ) from error


def _register() -> None:
    # SGLang starts many processes: the first one warns for all.
    SGLANG.require(SEAMS, warns=multiprocessing.parent_process() is None)
    # SGLang is imported only once it is known to be used.
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: PLC0415

    from kvpool.integrations.sglang.pools import REPLACEMENTS, check_replaced  # noqa: PLC0415

    register_tree_core()
    for target, replacement in REPLACEMENTS.items():
        HookRegistry.register(target, replacement, HookType.REPLACE)
    HookRegistry.register(START, check_replaced, HookType.BEFORE)
    # With SGLang's own policies nothing is said of sessions and of waiting requests.
    if os.environ.get(EVICTION) == "adaptive":
        from kvpool.integrations.sglang.turns import check  # noqa: PLC0415

        HookRegistry.register(VERIFY, check, HookType.BEFORE)
        HookRegistry.register(START, _watch_queue, HookType.AFTER)


def _watch_queue(_made: None, scheduler: Scheduler, *_args: object, **_options: object) -> None:
    """Show the waiting queue of a scheduler that was made to the tree core of its prefix cache."""
    from kvpool.integrations.sglang.tree_core import KvTreeCore  # noqa: PLC0415

    core = getattr(scheduler.tree_cache, "tree_core", None)
    if isinstance(core, KvTreeCore):
        core.waiting.queue = lambda: scheduler.waiting_queue
