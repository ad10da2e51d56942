"""vLLM's pool of blocks over kvpool: the free queue, the counts of users and the hashes are in Rust.

`KvpoolBlockPool` is a `BlockPool` of vLLM. Calls in every request and step go to `BlockQueue` and `BlockMap`.
Events, partial blocks and connectors use vLLM's own code, on the same objects.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvpool._kvpool import BlockMap, BlockQueue
from kvpool.integrations.vllm.seams import BLOCK_POOL, VLLM
from kvpool.integrations.vllm.turns import turn_of

VLLM.require(BLOCK_POOL)

from vllm.v1.core.block_pool import BlockPool  # noqa: E402
from vllm.v1.core.kv_cache_utils import resolve_block_hashes  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from vllm.v1.request import Request

    from kvpool._kvpool import Block
    from kvpool.typing import BlockLike

__all__ = ["KvpoolBlockPool"]


class KvpoolBlockPool(BlockPool):  # type: ignore[misc]  # vLLM has no types here
    """vLLM's `BlockPool`, with its arguments and attributes.

    Its blocks are objects of kvpool, with the attributes of vLLM's `KVCacheBlock`. A block that is freed more
    often than it was taken is dropped and logged.
    """

    def __init__(self, num_gpu_blocks: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(1, *args, **kwargs)
        self.num_gpu_blocks = num_gpu_blocks
        self.free_block_queue: BlockQueue = BlockQueue(num_gpu_blocks, self)
        self.blocks: list[Block] = self.free_block_queue.blocks
        self.null_block: Block = self.free_block_queue.popleft()
        self.null_block.is_null = True
        self._learns = False

    def evict_by(self, policy: str, block_size: int) -> None:
        """Evict blocks by a policy of `kvpool.PrefixCache`, of requests that each have one list of blocks.

        Args:
            policy: The policy, such as "adaptive".
            block_size: Tokens in a block.

        Raises:
            ConfigError: If there is no such policy.
        """
        self.free_block_queue.evict_by(policy, block_size)
        self._learns = True

    @property
    def cached_block_hash_to_block(self) -> BlockMap:
        """The blocks by their hashes. vLLM assigns an empty map at the start and to drop all hashes."""
        return self._cached

    @cached_block_hash_to_block.setter
    def cached_block_hash_to_block(self, empty: object) -> None:
        self._cached = BlockMap()

    def get_cached_block(self, block_hash: bytes, kv_cache_group_ids: list[int]) -> list[BlockLike] | None:
        """Return a block of each group that has the hash, or None."""
        return self._cached.find(block_hash, kv_cache_group_ids)

    def cache_full_blocks(
        self,
        request: Request,
        blocks: list[Block],
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
        block_mask: list[bool] | None = None,
    ) -> None:
        """Give full blocks the hashes of a request."""
        new = slice(num_cached_blocks, num_full_blocks)
        if num_cached_blocks < num_full_blocks and not self.enable_kv_cache_events:
            hashes: Any = resolve_block_hashes(request.block_hashes, self.hash_block_size, block_size)
            if self._cached.cache(
                blocks[new], hashes[new], kv_cache_group_id, (num_cached_blocks + 1) * block_size, block_size,
                block_mask, self.cached_block_hashes_by_block,
            ):  # fmt: skip
                self._add_prompt(request, blocks, num_cached_blocks, num_full_blocks)
                return
        super().cache_full_blocks(
            request, blocks, num_cached_blocks, num_full_blocks, block_size, kv_cache_group_id, block_mask
        )
        self._add_prompt(request, blocks, num_cached_blocks, num_full_blocks)

    def _add_prompt(self, request: Request, blocks: list[Block], start: int, end: int) -> None:
        if self._learns and start < end:
            turn = turn_of(request)
            self.free_block_queue.add_prompt(
                blocks[start:end], blocks[start - 1] if start else None, turn and turn.session
            )

    def get_new_blocks(self, num_blocks: int) -> list[Block]:
        """Allocate blocks. They lose their hashes."""
        queue = self.free_block_queue
        if self.metrics_collector or self._reuse_watchers or num_blocks > queue.num_free_blocks:
            return super().get_new_blocks(num_blocks)  # type: ignore[no-any-return]
        blocks, removed = queue.alloc(
            num_blocks,
            self._cached,
            self.cached_block_hashes_by_block,
            events=self.enable_kv_cache_events,
        )
        if removed:
            self._emit_block_removed_events(removed)
        return blocks

    def touch(self, blocks: Sequence[Block]) -> None:
        """Add a use to each block."""
        others = blocks if self.metrics_collector else self.free_block_queue.retain(blocks)
        if others:
            super().touch(others)

    def free_blocks(self, ordered_blocks: Iterable[Block]) -> None:
        """Use blocks once less. Those of other pools go to these."""
        others = self.free_block_queue.free(ordered_blocks, keep_hashed=self.enable_caching)
        if others:
            super().free_blocks(others)
