"""The share of a trace's prompts that a prefix cache finds, by policy and capacity.

The cache alone is measured, without a clock: one request after another finds its prompt and adds the rest of
it. Prompts are whole blocks, and a block counts as found if all its tokens are, as in the release of the
Mooncake traces.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from kvpool import TokenToKVPoolAllocator
from kvpool._kvpool import PrefixCache
from kvpool.errors import ConfigError
from kvpool.tools.policies import BELADY, POLICIES, policy_named
from kvpool.tools.replay.belady import belady
from kvpool.tools.replay.prompts import Prompts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvpool.tools.traces import Trace


@dataclass(frozen=True)
class HitRate:
    """The hits of one cache.

    Attributes:
        policy: Its policy.
        capacity: Its tokens.
        found_blocks: Blocks of all prompts that were found.
        wall_s: Real time of the measurement.
    """

    policy: str
    capacity: int
    found_blocks: int
    wall_s: float


@dataclass(frozen=True)
class HitRates:
    """The hit rates of a trace.

    Attributes:
        trace: Name of the trace.
        requests: Requests of the trace.
        block_size: Tokens of a block.
        blocks: Blocks of all prompts.
        repeated_blocks: Blocks of prompts that an unlimited cache finds.
        page_size: Slots per page of the caches.
        rates: One entry for each policy and capacity, in the order in which they were given.
    """

    trace: str
    requests: int
    block_size: int
    blocks: int
    repeated_blocks: int
    page_size: int
    rates: list[HitRate]

    def share(self, rate: HitRate) -> float:
        """Return the share of all blocks that was found."""
        return rate.found_blocks / self.blocks


def measure(
    trace: Trace,
    policies: Sequence[str],
    capacities: Sequence[int],
    page_size: int | None = None,
    on_rate: Callable[[HitRate], None] = lambda _: None,
) -> HitRates:
    """Measure the hit rate of each policy at each capacity.

    Args:
        trace: A trace with at least one request.
        policies: Names of `POLICIES`, or `BELADY`.
        capacities: Tokens of the caches.
        page_size: Slots per page; must divide the block size, which it is by default.
        on_rate: Called after each measurement.

    Raises:
        ConfigError: If the page size does not divide the block size, a capacity is less than a block, or a
            policy is unknown.
    """
    page_size = page_size or trace.block_size
    if trace.block_size % page_size:
        raise ConfigError(f"page_size {page_size} does not divide the trace's blocks of {trace.block_size}")
    if min(capacities) < trace.block_size:
        raise ConfigError(f"capacity {min(capacities)} is less than a block of {trace.block_size} tokens")
    if unknown := set(policies) - {*POLICIES, BELADY}:
        raise ConfigError(f"unknown policy {min(unknown)!r}; use {', '.join((*POLICIES, BELADY))}")
    prompts, blocks = Prompts(trace), trace.all_blocks()
    rates = []
    for policy in policies:
        for capacity in capacities:
            begin = perf_counter()
            if policy == BELADY:
                found = belady(blocks, capacity // trace.block_size)
            else:
                found = _found(prompts, trace, policy, capacity, page_size)
            rates.append(HitRate(policy, capacity, found, perf_counter() - begin))
            on_rate(rates[-1])
    count = sum(map(len, blocks))
    return HitRates(
        trace=trace.name,
        requests=len(trace),
        block_size=trace.block_size,
        blocks=count,
        repeated_blocks=count - len(np.unique(np.concatenate(blocks))),
        page_size=page_size,
        rates=rates,
    )


def _found(prompts: Prompts, trace: Trace, policy: str, capacity: int, page_size: int) -> int:
    """Return the blocks that a cache finds."""
    allocator = TokenToKVPoolAllocator(capacity, device="cpu", page_size=page_size, need_sort=False)
    cache = PrefixCache(allocator, policy=policy_named(policy))
    most = allocator.available_size()
    found = 0
    for request in range(len(trace)):
        tokens = prompts.whole_blocks_of(request)[:most]
        with cache.match(tokens) as lease:
            length = lease.length
            found += length // trace.block_size
            if length < len(tokens):
                # All but this prompt can be evicted, so that there is room for it.
                lease.publish(tokens[length:], allocator.alloc(len(tokens) - length))
    return found
