"""SGLang's prefix cache over kvpool's tree, and the choice between this tree and SGLang's own.

`kvpool.integrations.sglang.register` makes both selectable. `KvTreeCore` under SGLang's own cache, which
keeps every feature of it, is `SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND=kvpool`; `--radix-cache-backend kvpool`
is `KvUnifiedRadixCache` as well, which evicts in one call and makes fewer for a checkpoint.

For features that only SGLang's own core has (a host tier, storage, sessions, a custom component),
`make_tree_core` returns that core, and logs the reason.
"""

from __future__ import annotations

import inspect
import logging
from typing import TYPE_CHECKING

import torch
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.tree_core_registry import (
    create_tree_core,
)
from sglang.srt.mem_cache.unified_cache.unified_tree_core_interface import UnifiedTreeCoreInterface
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache, page_interleave_shard_size

from kvpool.errors import ConfigError
from kvpool.integrations.seams import have_source, signature
from kvpool.integrations.sglang.tree_core import DELEGATED, PARTS, KvTreeCore
from kvpool.integrations.sglang.tree_policy import EVICTION, eviction_policy, evicts_by_worth
from kvpool.integrations.sglang.turns import settings as _settings
from kvpool.integrations.sglang.turns import turn_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext

__all__ = [
    "KvUnifiedRadixCache",
    "check_tree_core",
    "make_radix_cache",
    "make_tree_core",
    "reason_to_delegate",
]

_NAME = "kvpool"
_FULL = ComponentType.FULL
_MOST = (1 << 63) - 1
_CHECKPOINT = "3a20fa5c0617352cc19485b47d5fc54b429288fe6deb62747ed95f4fd7ffd098"
"""The SHA-256 of the source of SGLang's `checkpoint_into_tree` that this module has a shorter one for."""

_logger = logging.getLogger("kvpool")


def check_tree_core() -> list[str]:
    """Compare the methods that SGLang calls with the tree core's; return a line for each difference."""
    differences = [
        f"UnifiedTreeCoreInterface.{name} is new" for name in sorted(KvTreeCore.__abstractmethods__)
    ]
    for theirs, ours in ((UnifiedTreeCoreInterface, KvTreeCore), (UnifiedRadixCache, KvUnifiedRadixCache)):
        for name in sorted(vars(ours).keys() & (set(dir(theirs)) | set(DELEGATED))):
            if name.startswith("__"):
                continue
            found, own = getattr(theirs, name, None), vars(ours)[name]
            if found is None:
                differences.append(f"{theirs.__name__}.{name} is missing")
            elif not inspect.isfunction(found) or name in DELEGATED:
                continue
            elif signature(found) != signature(own):
                differences.append(
                    f"{theirs.__name__}.{name} is {signature(found)}, expected was {signature(own)}"
                )
    return differences


def reason_to_delegate(params: CacheInitParams) -> str | None:
    """Return the reason why SGLang's own tree core must be used, or `None` if kvpool's can be.

    Args:
        params: The parameters that SGLang makes the cache of.
    """
    # A cache that is made without a server has none of the features that are settings of one.
    memory, disagg = _settings("memory"), _settings("disagg")
    allocator = params.token_to_kv_pool_allocator
    reasons = {
        "sessions are nodes of SGLang's Python core": params.enable_session_radix_cache,
        "components of others are written for SGLang's Python core": bool(params.component_registry_override),
        "only full attention, sliding windows and Mamba states are kvpool's": bool(
            set(params.tree_components or ()) - set(PARTS)
        ),
        f"the eviction policy {params.eviction_policy} is SGLang's alone": eviction_policy(params) is None,
        "a hierarchical cache has a host tier": getattr(memory, "enable_hierarchical_cache", False),
        "LMCache stores nodes": getattr(memory, "enable_lmcache", False),
        "FlexKV stores nodes": getattr(memory, "enable_flexkv", False),
        "an external linker stores nodes": getattr(memory, "enable_unified_cache_external_linker", False),
        "retraction to the host has a host tier": getattr(
            disagg, "disaggregation_decode_retraction_backup", None
        )
        == "host_pool",
        "sharded pages have rotation bases": page_interleave_shard_size(allocator) > 1,
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def make_tree_core(
    params: CacheInitParams, components: dict[ComponentType, object]
) -> UnifiedTreeCoreInterface:
    """Make kvpool's tree core, or SGLang's own if only that one has the required features.

    Args:
        params: The parameters that SGLang makes the cache of.
        components: The components of the cache, for SGLang's Python core.

    Raises:
        ConfigError: If the interface of SGLang's tree core differs from the one that this module supports, or
            eviction by worth is asked for where only SGLang's own core can be used.
    """
    differences = check_tree_core()
    if differences:
        raise ConfigError(
            "SGLang's tree core is not the one that kvpool was written for: " + "; ".join(differences)
        )
    reason = reason_to_delegate(params)
    if reason is None:
        if evicts_by_worth():
            _logger.info("SGLang: the prefix cache evicts by worth")
        return KvTreeCore(params)
    if evicts_by_worth():
        raise ConfigError(
            f"{EVICTION} is 'adaptive'; SGLang's own tree core has no such policy, and {reason}"
        )
    _logger.warning("the prefix cache uses SGLang's own tree core instead of kvpool's: %s", reason)
    return create_tree_core("rust", params, components)


_KNOWS_CHECKPOINT = have_source([UnifiedRadixCache.checkpoint_into_tree], _CHECKPOINT)


class KvUnifiedRadixCache(UnifiedRadixCache):  # type: ignore[misc]  # SGLang's types are not installed
    """SGLang's cache with one call for an eviction instead of two a leaf, and fewer for a checkpoint.

    It tells the tree of sessions what requests say of them.
    """

    def checkpoint_into_tree(self, req: Req, *, up_to: int, **kwargs: object) -> None:
        """Insert what a request has computed, and move its lock to the end of it.

        SGLang's own method does it where the cache has more than full attention, or KV events.
        """
        core = self.tree_core
        turn = turn_of(req.sampling_params) if self._evicts_by_worth() else None
        if not (
            isinstance(core, KvTreeCore)
            and self.tree_components == (_FULL,)
            and not (core.is_eagle or core.kv_events.enabled or self.disable)
            and _KNOWS_CHECKPOINT
        ):
            if turn is None:
                super().checkpoint_into_tree(req, up_to=up_to, **kwargs)
                return
            core.session = turn.session
            try:
                super().checkpoint_into_tree(req, up_to=up_to, **kwargs)
            finally:
                core.session = None
            return
        tokens, kv, priority, page = req.full_untruncated_fill_ids, req.kv, req.priority or 0, self.page_size
        size = min(up_to, len(tokens))
        if size <= 0:
            return
        size -= size % page
        row = self.req_to_token_pool.req_to_token[kv.req_pool_idx]
        # A copy: the row gets the tree's slots, while a group of frees keeps these.
        slots = row[:size].to(torch.int64, copy=True)
        namespace = req.extra_key if req.cache_salt is None else (req.extra_key, req.cache_salt)
        protected = kv.cache_protected_len
        found, node, actions = core.insert_plain(
            tokens,
            slots,
            namespace,
            found=protected,
            inserted=kv.cache_inserted_len,
            priority=priority,
            session=turn and turn.session,
        )
        self._apply_cache_actions(actions)
        kv.cache_inserted_len = max(kv.cache_inserted_len, size)
        # The answer is a node of its own, so that an eviction can drop it without the prompt.
        prompt = req.origin_input_ids
        length = len(prompt) - len(prompt) % page
        if 0 < length < size:
            _, _, actions = core.insert_plain(
                prompt,
                slots[:length],
                namespace,
                found=length,
                inserted=length,
                priority=min(priority + 1, _MOST),
            )
            self._apply_cache_actions(actions)
        if found > protected:
            # Another request had computed the same tokens: the row has its own slots, which were freed.
            self.req_to_token_pool.write(
                (kv.req_pool_idx, slice(protected, size)), self.path_device_indices(node)[protected:]
            )
        self.unlock(req.lock)
        req.lock = self.lock(node)
        kv.cache_protected_len = size
        req.last_node = node

    def on_release(self, req: Req, *, checkpointed: bool) -> None:
        """Clean up after a request that gives up its slots. A turn ends, unless the request was retracted."""
        super().on_release(req, checkpointed=checkpointed)
        if not (self._evicts_by_worth() and req.finished()) or (turn := turn_of(req.sampling_params)) is None:
            return
        pause, node = turn.pause, req.last_node
        if isinstance(req.finished_reason, FINISH_ABORT):
            # It is known whether it was the last turn, and not what the session waits for.
            pause = None
            if len(req.origin_input_ids) == 1:  # what SGLang puts in the place of a prompt that it refuses
                node = None
        self.tree_core.end_turn(turn.session, node, pause=pause, is_last=turn.is_last)

    def _evicts_by_worth(self) -> bool:
        return isinstance(self.tree_core, KvTreeCore) and self.tree_core.evicts_by_worth

    def _evict_components(
        self,
        request_by_type: dict[ComponentType, int],
        tracker: dict[ComponentType, int],
        available_size_targets: dict[ComponentType, tuple[ComponentType, int]] | None = None,
        *,
        allocation_reclaim_satisfied: Callable[[], bool] | None = None,
    ) -> None:
        is_plain = isinstance(self.tree_core, KvTreeCore) and self.tree_components == (_FULL,)
        if not is_plain or allocation_reclaim_satisfied is not None:
            super()._evict_components(
                request_by_type,
                tracker,
                available_size_targets,
                allocation_reclaim_satisfied=allocation_reclaim_satisfied,
            )
            return
        target = (available_size_targets or {}).get(_FULL)
        wanted = request_by_type[_FULL]
        while wanted > 0:
            if target is not None and self._component_available_size(_FULL) >= target[1]:
                return
            result = self.tree_core.evict_many(wanted)
            evicted = result.tracker.get(_FULL, 0)
            tracker[_FULL] += evicted
            self._apply_eviction_result(result)
            if target is None or not evicted:
                return
            # An allocator may hold slots back: it says itself what it has.
            wanted = max(1, target[1] - self._component_available_size(_FULL))


def make_radix_cache(ctx: TreeCacheBuildContext) -> BasePrefixCache:
    """Make the cache for `--radix-cache-backend kvpool`, or SGLang's own for options that kvpool lacks.

    Args:
        ctx: The parameters that SGLang makes the cache of.

    Raises:
        ConfigError: If eviction by worth is asked for, and another cache has to be used.
    """
    from sglang.srt.mem_cache.registry import (  # noqa: PLC0415
        create_unified_radix_cache,
        default_radix_cache_factory,
    )

    memory = _settings("memory")
    has_own_cache = getattr(memory, "enable_lmcache", False) or getattr(memory, "enable_flexkv", False)
    if ctx.disable_radix_cache:
        return default_radix_cache_factory(ctx)
    if has_own_cache or (ctx.is_hybrid_swa and ctx.full_tokens_per_layer == 0):
        if evicts_by_worth():
            raise ConfigError(f"{EVICTION} is 'adaptive'; these options make SGLang use a cache of its own")
        return default_radix_cache_factory(ctx)
    ctx.params.tree_core_backend = _NAME
    return create_unified_radix_cache(ctx, cache_class=KvUnifiedRadixCache)
