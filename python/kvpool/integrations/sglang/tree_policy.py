"""SGLang's eviction policies as those of a `HybridTree`."""

from __future__ import annotations

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

if TYPE_CHECKING:
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams

__all__ = ["EvictionPolicy", "eviction_policy"]

_STRATEGIES = (LRUStrategy, MRUStrategy, FIFOStrategy, FILOStrategy, LFUStrategy, PriorityStrategy)


class EvictionPolicy(NamedTuple):
    """The eviction policy of a `HybridTree`, as its constructor's arguments with these names."""

    policy: str
    protected_uses: int = 2
    tail: int = 0


def eviction_policy(params: CacheInitParams) -> EvictionPolicy | None:
    """Return the arguments of `HybridTree` for a policy of SGLang; `None` if there is no equal one."""
    name = params.eviction_policy.lower()
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
