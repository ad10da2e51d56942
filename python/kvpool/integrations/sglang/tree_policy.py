"""SGLang's eviction policies as those of a `HybridTree`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

from sglang.srt.mem_cache.evict_policy import (
    FIFOStrategy,
    FILOStrategy,
    LFUStrategy,
    LRUStrategy,
    MRUStrategy,
    PriorityStrategy,
    SLRUStrategy,
    TLRUStrategy,
)
from sglang.srt.mem_cache.utils import get_eviction_strategy

from kvpool.errors import ConfigError
from kvpool.integrations.sglang.seams import EVICTION

if TYPE_CHECKING:
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams

__all__ = ["EVICTION", "EvictionPolicy", "eviction_policy", "evicts_by_worth"]

_STRATEGIES = (LRUStrategy, MRUStrategy, FIFOStrategy, FILOStrategy, LFUStrategy, PriorityStrategy)


class EvictionPolicy(NamedTuple):
    """The eviction policy of a `HybridTree`, as its constructor's arguments with these names."""

    policy: str
    protected_uses: int = 2
    tail: int = 0
    capacity: int | None = None


def evicts_by_worth() -> bool:
    """Return whether the environment asks for kvpool's own policy.

    Raises:
        ConfigError: If it asks for another one.
    """
    name = os.environ.get(EVICTION)
    if name not in {None, "adaptive"}:
        raise ConfigError(
            f"{EVICTION} is '{name}'; it must be 'adaptive' or not be set: SGLang's own "
            "policies are those of --radix-eviction-policy"
        )
    return name is not None


def eviction_policy(params: CacheInitParams) -> EvictionPolicy | None:
    """Return the arguments of `HybridTree` for a policy; `None` for one of SGLang that has no equal.

    Raises:
        ConfigError: If the environment asks for a policy that kvpool does not have, or beside one of SGLang.
    """
    name = params.eviction_policy.lower()
    if evicts_by_worth():
        if name != "lru":
            raise ConfigError(
                f"{EVICTION} is 'adaptive' and --radix-eviction-policy is '{name}'; leave out one of them"
            )
        allocator = params.token_to_kv_pool_allocator
        if allocator is None:
            raise ConfigError(f"{EVICTION} is 'adaptive'; that needs an allocator, which this cache has not")
        return EvictionPolicy("adaptive", capacity=allocator.size_full)
    # SGLang says itself what is wrong with one.
    strategy = get_eviction_strategy(name, params.eviction_policy_config)
    policy = EvictionPolicy(name)
    if type(strategy) is SLRUStrategy:
        policy = policy._replace(protected_uses=strategy.protected_threshold)
    elif type(strategy) is TLRUStrategy:
        # With a longer estimate nothing goes before the others.
        policy = policy._replace(tail=max(strategy.threshold - strategy.next_prompt_estimate, 0))
    elif type(strategy) not in _STRATEGIES:
        return None
    numbers = (policy.protected_uses, policy.tail)
    is_exact = all(type(number) is int and 0 <= number < 1 << 31 for number in numbers)
    return policy if is_exact else None
