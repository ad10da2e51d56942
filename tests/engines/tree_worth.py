"""SGLang's cache over kvpool's tree core that evicts by worth. Prints "ok" at the end."""

from __future__ import annotations

import dataclasses
import os
import random
import re
from array import array
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from kvpool.errors import ConfigError
from kvpool.integrations.sglang import radix_cache, register_tree_core
from kvpool.integrations.sglang.pools import REPLACEMENTS
from kvpool.integrations.sglang.radix_cache import KvUnifiedRadixCache, make_radix_cache
from kvpool.integrations.sglang.tree_policy import EVICTION

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvpool.integrations.turns import Turn


def params_of(size: int, page: int) -> CacheInitParams:
    """The parameters of a cache of `size` tokens, a whole number of pages."""
    name = "TokenToKVPoolAllocator" if page == 1 else "PagedTokenToKVPoolAllocator"
    slots: Any = next(made for target, made in REPLACEMENTS.items() if target.endswith(f".{name}"))
    shared = {"size": size, "dtype": torch.bfloat16, "device": "cpu", "kvcache": None, "need_sort": False}
    rows = ReqToTokenPool(size=2, max_context_len=8, device="cpu", enable_memory_saver=False)
    return CacheInitParams(
        disable=False,
        req_to_token_pool=rows,
        token_to_kv_pool_allocator=slots(**shared) if page == 1 else slots(page_size=page, **shared),
        page_size=page,
        tree_components=(ComponentType.FULL,),
        tree_core_backend="kvpool",
    )


def make_cache(size: int, page: int, order: str) -> Any:
    """A cache that evicts in this order: "lru", which is SGLang's default, or one of kvpool."""
    with mock.patch.dict(os.environ):
        os.environ.pop(EVICTION, None)
        if order != "lru":
            os.environ[EVICTION] = order
        return KvUnifiedRadixCache(params_of(size, page))


def serve(cache: Any, tokens: array[int], chunk: int, turn: Turn | None = None) -> int:
    """Serves a prompt of whole pages, computed in chunks, and returns how many of its tokens were found."""
    key, allocator = RadixKey(tokens), cache.token_to_kv_pool_allocator
    cache.tree_core.session = turn and turn.session
    # A scheduler looks a prompt up to order the waiting ones, and at each attempt to admit it.
    cache.match_prefix(MatchPrefixParams(key))
    found = cache.match_prefix(MatchPrefixParams(key))
    length = known = found.device_prefix_len
    inserted, lock = 0, cache.lock(found.last_device_node)
    slots = cache.path_device_indices(found.last_device_node)
    while inserted < len(tokens):
        end = min(known + chunk, len(tokens))
        if end > known:
            missing = end - known - allocator.available_size()
            if missing > 0:
                cache.evict_for_alloc(EvictParams(num_tokens=missing))
            slots = torch.cat([slots, allocator.alloc(end - known)])
        result = cache.insert(
            InsertParams(RadixKey(tokens[:end]), slots, prev_prefix_len=known, inserted_len=inserted)
        )
        cache.unlock(lock)
        lock = cache.lock(result.last_device_node)
        known = inserted = end
    cache.unlock(lock)
    if turn is not None:
        node = result.last_device_node
        cache.tree_core.end_turn(turn.session, node, pause=turn.pause, is_last=turn.is_last)
    return int(length)


def found_by(order: str, page: int) -> int:
    """The tokens found in prompts of twelve sessions in turns, and of others that never come back."""
    cache, dice = make_cache(2560, page, order), random.Random(3)  # noqa: S311
    sessions = [[dice.randrange(1000) for _ in range(208)] for _ in range(12)]
    found = 0
    for turn in range(25):
        for session in sessions:
            found += serve(cache, array("q", [*session, *([turn] * 16)]), 64)
            found += serve(cache, array("q", [dice.randrange(1000) for _ in range(208)]), 64)
    cache.sanity_check()
    return found


def gains() -> None:
    """What is used again is found again, where the order of SGLang has evicted it."""
    for page in (1, 16):
        own, learned = (found_by(order, page) for order in ("lru", "adaptive"))
        # The slots of 24 prompts are taken between two turns, and there are those of 12.
        assert own < 0.01 * 12 * 25 * 208, own
        assert learned > 0.2 * 12 * 25 * 208, learned


def _refused(make: Callable[[], object], words: str) -> None:
    try:
        make()
    except ConfigError as error:
        assert re.search(words, str(error)), error  # noqa: PT017
    else:
        raise AssertionError(words)


def refusals() -> None:
    """Where there is no such policy, the cache is not made."""
    plain = params_of(64, 1)
    refuse = mock.patch.dict(os.environ, {EVICTION: "adaptive"})
    for changes, words in (
        ({"eviction_policy": "lfu"}, "--radix-eviction-policy is 'lfu'"),
        ({"token_to_kv_pool_allocator": None}, "that needs an allocator"),
        ({"enable_session_radix_cache": True}, "SGLang's own tree core has no such policy, and sessions"),
    ):
        params = dataclasses.replace(plain, **changes)
        with refuse:
            _refused(lambda params=params: radix_cache.make_tree_core(params, {}), words)  # type: ignore[misc]
    for name in ("newest", ""):
        _refused(lambda name=name: make_cache(64, 1, name), f"is '{name}'; it must be 'adaptive'")  # type: ignore[misc]
    context: Any = SimpleNamespace(disable_radix_cache=False, is_hybrid_swa=True, full_tokens_per_layer=0)
    with refuse:
        _refused(lambda: make_radix_cache(context), "a cache of its own")


def main() -> None:
    register_tree_core()
    gains()
    refusals()
    print("ok")  # noqa: T201


if __name__ == "__main__":
    main()
