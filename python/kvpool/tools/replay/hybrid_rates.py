"""The share of what a full-attention model finds in a prefix cache that a hybrid model finds.

The cache alone is measured, as in `hit_rates`. A hybrid model resumes only where there is a snapshot of its
state, so that snapshots have part of the memory: a fixed share, or what they are worth to an arena.
Prompts are cut to whole blocks, because a trace does not say what follows the last tokens of a prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvpool import (
    ArenaPrefixCache,
    CacheArena,
    CacheLayout,
    GDNPool,
    Group,
    Plane,
    TokenToKVPoolAllocator,
)
from kvpool._kvpool import PrefixCache
from kvpool.errors import ConfigError
from kvpool.tools.policies import policy_named
from kvpool.tools.replay.found_tokens import (
    chunk_end,
    found_by_full_attention,
    found_in_arena,
    whole_blocks,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from kvpool.tools.traces import Trace


@dataclass(frozen=True)
class HybridJob:
    """What is measured.

    Attributes:
        snapshot_tokens: Tokens whose K and V take up as much memory as a snapshot, for each model.
        capacities: Tokens whose K and V fill the memory of the cache.
        share: Share of the memory that is given to snapshots, below 1; `None` for an arena.
        chunk: Tokens of a chunk of a prompt, at whose end a state is published.
        policy: Name of the policy of eviction.
    """

    snapshot_tokens: Sequence[int]
    capacities: Sequence[int]
    share: float | None = 0.05
    chunk: int = 8192
    policy: str = "adaptive"


@dataclass(frozen=True)
class HybridRate:
    """What a hybrid model finds.

    Attributes:
        capacity: Tokens whose K and V would fill the memory.
        snapshot_tokens: Tokens that a snapshot takes up the memory of.
        snapshots: Snapshots that fit their share; of an arena, those that it has in the end.
        full_tokens: Tokens that a full-attention model finds in all of the memory.
        hybrid_tokens: Tokens that the hybrid model finds.
    """

    capacity: int
    snapshot_tokens: int
    snapshots: int
    full_tokens: int
    hybrid_tokens: int

    @property
    def share(self) -> float:
        """The share of the tokens that the hybrid model finds; 1 if there is nothing to find."""
        return self.hybrid_tokens / self.full_tokens if self.full_tokens else 1.0


@dataclass(frozen=True)
class HybridRates:
    """What hybrid models find.

    Attributes:
        trace: Name of the trace.
        requests: Requests of the trace.
        prompt_tokens: Tokens of all prompts, in whole blocks.
        share: Share of the memory that is given to snapshots; `None` for an arena.
        chunk: Tokens of a chunk.
        policy: Name of the policy of eviction.
        rates: One entry for each capacity and size of snapshots.
    """

    trace: str
    requests: int
    prompt_tokens: int
    share: float | None
    chunk: int
    policy: str
    rates: list[HybridRate]


def measure(trace: Trace, job: HybridJob) -> HybridRates:
    """Measure what a hybrid model finds beside a full-attention model with the same K and V for each token.

    Raises:
        ConfigError: If a chunk is less than a block, or a share of the memory has no place for a block or a
            snapshot.
    """
    block = trace.block_size
    texts = whole_blocks(trace, job.chunk)
    rates = []
    for capacity in job.capacities:
        full = found_by_full_attention(texts, capacity, block, job.policy)
        for snapshot_tokens in job.snapshot_tokens:
            if job.share is None:
                hybrid, snapshots = _found_in_arena(texts, capacity, block, job, snapshot_tokens)
                rates.append(HybridRate(capacity, snapshot_tokens, snapshots, full, hybrid))
                continue
            snapshots = int(capacity * job.share / snapshot_tokens)
            kept = int(capacity * (1.0 - job.share)) // block * block
            if not (snapshots and kept):
                raise ConfigError(
                    f"{job.share:.0%} of {capacity} tokens for snapshots: needs place for a snapshot of "
                    f"{snapshot_tokens} tokens, and beside it for a block of {block}"
                )
            hybrid = _found(texts, kept, block, job, snapshots)
            rates.append(HybridRate(capacity, snapshot_tokens, snapshots, full, hybrid))
    return HybridRates(
        trace=trace.name,
        requests=len(trace),
        prompt_tokens=sum(map(len, texts)),
        share=job.share,
        chunk=job.chunk,
        policy=job.policy,
        rates=rates,
    )


def _found(
    texts: Sequence[NDArray[np.int32]], capacity: int, block: int, job: HybridJob, snapshots: int
) -> int:
    """Return the tokens that are found with pages of a block, and a share of the memory for snapshots."""
    allocator = TokenToKVPoolAllocator(capacity, device="cpu", page_size=block, need_sort=False)
    states = GDNPool(1, 1, 1, 1, 1, 1, 2, device="cpu", max_track_slots=snapshots)
    cache = PrefixCache(allocator, policy=policy_named(job.policy), states=states)
    chunk = job.chunk // block * block
    found = 0
    for text in texts:
        tokens = text[:capacity]
        with cache.match(tokens) as lease:
            found += lease.length
            cached = lease.kv_length
            while lease.length < len(tokens):
                begin = lease.length
                end = chunk_end(begin, len(tokens), chunk, cached)
                lease.publish(tokens[begin:end], allocator.alloc(end - begin), state=1)
    return found


def _found_in_arena(
    texts: Sequence[NDArray[np.int32]], capacity: int, block: int, job: HybridJob, snapshot_tokens: int
) -> tuple[int, int]:
    """Return the tokens that are found in an arena of `capacity` tokens, and the snapshots in the end."""
    layout = CacheLayout(
        [
            Group("full", "full", [0], [Plane("kv", "uint8", (1,))]),
            Group("state", "state", [1], [Plane("state", "uint8", (snapshot_tokens,))]),
        ],
        page_size=block,
    )
    arena = CacheArena(layout, capacity, "cpu")
    cache = ArenaPrefixCache(arena, policy=policy_named(job.policy))
    found = found_in_arena(texts, cache, job.chunk, lambda pages: arena.alloc({"full": pages, "state": 1}))
    return found, cache.group_stats("state")["units"]
