"""How far a running request changes nothing in vLLM's managers of blocks.

Between two ends of blocks a step of a request takes no block, fills none, and leaves none behind. Where the
next such point lies follows from vLLM's rules for each kind of attention, and is computed after a step that
went vLLM's way.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from kvpool.integrations.vllm.seams import STEPS, VLLM

VLLM.require(STEPS)

from vllm.v1.core.single_type_kv_cache_manager import (  # noqa: E402
    ChunkedLocalAttentionManager,
    FullAttentionManager,
    MambaManager,
    SlidingWindowManager,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    Quiet: TypeAlias = Callable[[str, int], tuple[int, int]]

__all__ = ["is_plain", "quiet_of"]


def is_plain(manager: Any) -> bool:  # noqa: ANN401 - vLLM has no types here
    """Return whether blocks are taken and hashed one after the other, and kept until the request ends."""
    if type(manager) is not FullAttentionManager:
        return False
    # With other sizes the end of a prompt gets a hash within a block.
    return not manager.enable_caching or manager.block_size == manager.block_pool.hash_block_size


def quiet_of(manager: Any) -> Quiet | None:  # noqa: ANN401
    """Return a function that says how far a request is quiet in a group, `None` if that is not known.

    The function takes the name of a request, and how many of its tokens are processed. It returns the
    numbers of tokens below which a step changes nothing, and below which it changes no hash, once the
    prompt is computed.
    """
    unused = _unused_from(manager)
    if unused is None:
        return None
    size, blocks, cached = manager.block_size, manager.req_to_blocks, manager.num_cached_block

    def quiet(name: str, processed: int) -> tuple[int, int]:
        full = (cached.get(name, 0) + 1) * size if manager.enable_caching else sys.maxsize
        return min(len(blocks[name]) * size + 1, unused(processed) + 1, full), full

    if type(manager) is not MambaManager or manager.mamba_cache_mode != "align":
        return quiet

    def quiet_unless_copied(name: str, processed: int) -> tuple[int, int]:
        if name in manager._partial_hit_reqs or name in manager._checkpoints:  # noqa: SLF001
            return 0, 0
        return quiet(name, processed)

    return quiet_unless_copied


def _unused_from(manager: Any) -> Callable[[int], int] | None:  # noqa: ANN401
    """Return a function from processed tokens to their number at which the next block is not needed."""
    size, kind = manager.block_size, type(manager)
    if is_plain(manager):
        return lambda _: sys.maxsize
    if kind is SlidingWindowManager:
        passed = manager.sliding_window - 1 + manager.extra_retained_tokens
        return lambda processed: max(processed - passed, 0) // size * size + size + passed
    if kind is ChunkedLocalAttentionManager:
        chunk = manager.attention_chunk_size
        return lambda processed: (processed // chunk + 1) * chunk
    # vLLM 0.32 gives the end of a prompt its hash again at each step.
    if (
        kind is MambaManager
        and not manager.num_speculative_blocks
        and hasattr(manager.block_pool, "num_hash_lookahead_tokens")
    ):
        return lambda processed: -(-processed // size) * size + 1
    return None
