"""vLLM's `KVCacheManager` over kvpool: prefixes found by one call, steps that need no block answered at once.

Taking, sharing and freeing blocks is `block_pool`'s part.
"""

from __future__ import annotations

import os
from itertools import islice
from typing import TYPE_CHECKING, Any

from kvpool.errors import ConfigError
from kvpool.integrations.vllm.finders import find_in_one_call
from kvpool.integrations.vllm.quiet import is_plain, quiet_of
from kvpool.integrations.vllm.seams import STEPS, VLLM
from kvpool.integrations.vllm.turns import turn_of

VLLM.require(STEPS)

from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager  # noqa: E402
from vllm.v1.request import RequestStatus  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.v1.request import Request

    from kvpool._kvpool import BlockQueue
    from kvpool.integrations.vllm.block_pool import KvpoolBlockPool

__all__ = ["EVICTION", "KvpoolKVCacheManager"]

EVICTION = "KVPOOL_VLLM_EVICTION"
"""The environment variable that names the policy by which blocks are evicted."""


_MOST = (1 << 63) - 1
_AGAIN = 64
"""How many waiting requests are looked up again in a step."""

_BROKEN_OFF = (RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR)


class _NoBlocks(KVCacheBlocks):  # type: ignore[misc]  # vLLM has no types here
    """What most steps get: no block, and no numbers to collect."""

    def get_block_ids(
        self, allow_none: bool = False, *, group_ids: Sequence[int] | None = None
    ) -> tuple[list[int], ...] | None:
        """Return a list for each group, or `None`."""
        if allow_none:
            return None
        return super().get_block_ids(group_ids=group_ids)  # type: ignore[no-any-return]


class KvpoolKVCacheManager(KVCacheManager):  # type: ignore[misc]
    """vLLM's `KVCacheManager`, with its arguments, attributes and answers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - vLLM's, unchanged
        super().__init__(*args, **kwargs)
        self.empty_kv_cache_blocks: KVCacheBlocks = _NoBlocks(
            tuple(() for _ in range(self.num_kv_cache_groups))
        )
        managers = self.coordinator.single_type_managers
        self._quiet = [quiet for manager in managers if (quiet := quiet_of(manager))]
        self._may_be_quiet = len(self._quiet) == len(managers)
        # By a running request, the tokens below which a step changes neither its blocks nor their hashes, and
        # those below which it changes no hash.
        self._quiet_below: dict[str, tuple[int, int]] = {}
        self._only: Any = managers[0] if len(managers) == 1 and is_plain(managers[0]) else None
        # What learns from requests; `None` with vLLM's own order.
        self._learner = self._evict_by(os.environ.get(EVICTION, "lru"))
        # Waiting requests and their places in its queue, by name. Those in front were looked up longest ago.
        self._waiting: dict[str, tuple[Request, tuple[int, int, int]]] = {}
        self._waits_by_priority = False
        # The tokens that were found for each request when it was admitted first, by name.
        self._found: dict[str, int] = {}
        # Whether more of other prompts was cached since some were looked up.
        self._may_find_more = False
        count_unused = self.block_pool.free_block_queue.count_unused
        for manager in managers:
            manager._get_num_evictable_blocks = count_unused  # noqa: SLF001
        find_in_one_call(self.coordinator)

    def _evict_by(self, policy: str) -> BlockQueue | None:
        """Evict by a policy of kvpool, and return the queue that has it; `None` for vLLM's own order."""
        if policy == "lru" or not self.enable_caching:
            return None
        if self._only is None:
            raise ConfigError(
                f"{EVICTION} is '{policy}'; it must be 'lru' for layers without full attention, and for "
                f"prefixes that end within blocks: there are {self.num_kv_cache_groups} groups of layers"
            )
        pool: KvpoolBlockPool = self.block_pool
        pool.evict_by(policy, self._only.block_size)
        return pool.free_block_queue

    def add_waiting(self, request: Request, *, by_priority: bool) -> None:
        """Keep what a new request of the waiting queue will find, as long as other blocks can be taken.

        Args:
            request: The request.
            by_priority: Whether the queue is served by priority, and not by arrival alone.
        """
        self._waits_by_priority = by_priority
        if self._learner is not None and self.prefix_cache_lookup_enabled(request):
            self._wait(request, self._learner, self._find(request))

    def _wait(
        self, request: Request, learner: BlockQueue, blocks: Sequence[Any], *, is_next: bool = False
    ) -> None:
        rank = (0, 0)
        if self._waits_by_priority:
            priority = min(max(request.priority, -_MOST), _MOST)
            rank = (priority, int(request.arrival_time * 1e6))
        self._waiting[request.request_id] = request, learner.add_waiting(blocks, is_next=is_next, rank=rank)

    def _find(self, request: Request) -> Sequence[Any]:
        found: Any = self.coordinator.find_longest_cache_hit(request.block_hashes, request.num_tokens - 1)
        return found[0][0]  # type: ignore[no-any-return]

    def new_step_starts(self) -> None:
        """Begin a step. What others have cached since may be what waiting requests will find."""
        super().new_step_starts()
        if self._learner is None or not self._may_find_more:
            return
        self._may_find_more = False
        for name in [*islice(self._waiting, _AGAIN)]:
            request, place = self._waiting[name] = self._waiting.pop(name)
            self._learner.extend_waiting(place, self._find(request))

    def allocate_slots(  # noqa: PLR0913, PLR0917 - vLLM's signature
        self,
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: KVCacheBlocks | None = None,
        num_lookahead_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        delay_cache_blocks: bool = False,
        num_encoder_tokens: int = 0,
        full_sequence_must_fit: bool = False,
        reserved_blocks: int = 0,
        has_scheduled_reqs: bool = True,
        skip_zeroing_group_ids: tuple[int, ...] = (),
    ) -> KVCacheBlocks | None:
        """Give a request blocks for its new tokens; `None` if there are too few."""
        is_step = new_computed_blocks is None and not (
            num_new_computed_tokens
            or num_external_computed_tokens
            or delay_cache_blocks
            or num_encoder_tokens
            or full_sequence_must_fit
            or reserved_blocks
        )
        if is_step and num_new_tokens:
            quiet = self._quiet_below.get(request.request_id)
            if quiet is not None:
                tokens = request.num_computed_tokens + num_new_tokens
                if request.num_prompt_tokens < tokens:
                    if tokens + num_lookahead_tokens < quiet[0]:
                        return self.empty_kv_cache_blocks
                    if self._only is not None:
                        return self._step(request, tokens, num_lookahead_tokens, quiet[1])
        name, begins, turn, found = request.request_id, new_computed_blocks is not None, None, 0
        is_prompt = begins or request.num_computed_tokens < request.num_prompt_tokens
        learner = self._learner if is_prompt else None
        if learner is not None:
            turn = turn_of(request) if begins else None
            found = self._found.get(name, num_new_computed_tokens + num_external_computed_tokens)
            learner.set_user(turn and turn.session, request.num_tokens, found)
        try:
            blocks = super().allocate_slots(
                request, num_new_tokens, num_new_computed_tokens, new_computed_blocks, num_lookahead_tokens,
                num_external_computed_tokens, delay_cache_blocks, num_encoder_tokens, full_sequence_must_fit,
                reserved_blocks, has_scheduled_reqs, skip_zeroing_group_ids,
            )  # fmt: skip
            if begins and blocks is not None and learner is not None:
                self._found[name] = found
                self._end_waiting(request, learner)
                learner.look_up(request.num_tokens, turn and turn.session)
                self._may_find_more = True
        finally:
            if learner is not None:
                learner.set_user(None)
        if blocks is not None and is_step:
            self._note(request)
        else:
            self._quiet_below.pop(name, None)
        return blocks

    def _step(
        self, request: Request, tokens: int, num_lookahead_tokens: int, unhashed: int
    ) -> KVCacheBlocks | None:
        """Do what vLLM does for a running request whose one group has full attention."""
        manager: Any = self._only
        name = request.request_id
        blocks = manager.req_to_blocks[name]
        slots = min(tokens + num_lookahead_tokens, self.max_model_len)
        new: list[Any] = []
        if (more := -(-slots // manager.block_size) - len(blocks)) > 0:
            if more > self.block_pool.get_num_free_blocks():
                self._quiet_below.pop(name, None)
                return None
            new = self.block_pool.get_new_blocks(more)
            blocks.extend(new)
            if manager.records_new_block_ids:
                manager.new_block_ids.extend(block.block_id for block in new)
        if tokens >= unhashed:
            full = self.coordinator.get_num_cacheable_tokens(min(tokens, request.num_tokens), 0)
            manager.cache_blocks(request, full, replay_boundaries=())
        self._note(request)
        return KVCacheBlocks((new,)) if new else self.empty_kv_cache_blocks

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Give the full blocks of a request their hashes."""
        quiet = self._quiet_below.get(request.request_id)
        if quiet is None or num_computed_tokens <= request.num_prompt_tokens:
            super().cache_blocks(request, num_computed_tokens)
        elif num_computed_tokens >= quiet[1]:
            super().cache_blocks(request, num_computed_tokens)
            self._note(request)

    def _note(self, request: Request) -> None:
        """Note how far the request is quiet, after a step."""
        name = request.request_id
        if request.num_computed_tokens < request.num_prompt_tokens:
            # More of its prompt is cached.
            self._may_find_more = True
        if self._only is not None:
            self._quiet_below[name] = self._quiet[0](name, 0)
        elif self._may_be_quiet:
            # vLLM frees what a window has passed by the tokens that are processed.
            processed = min(request.num_computed_tokens, self.max_model_len) - request.num_in_flight_tokens
            ends = [quiet(name, max(processed, 0)) for quiet in self._quiet]
            below, full = map(min, zip(*ends, strict=True))
            self._quiet_below[name] = (below, full)

    def free(self, request: Request) -> None:
        """Free the blocks of a request."""
        self._forget(request)
        super().free(request)

    def pop_blocks_for_free(self, request: Request) -> list[Any]:
        """Return the blocks of a request, which is forgotten."""
        self._forget(request)
        return super().pop_blocks_for_free(request)  # type: ignore[no-any-return]

    def _forget(self, request: Request) -> None:
        """Forget a request, which still has its blocks. A turn of a session ends, unless it is preempted."""
        name, learner = request.request_id, self._learner
        self._quiet_below.pop(name, None)
        if learner is None:
            return
        self._end_waiting(request, learner)
        blocks = self._only.req_to_blocks.get(name, ())
        if not request.is_finished():
            # It was preempted, and is the next one of the waiting queue, or what it waited for did not come.
            if self.prefix_cache_lookup_enabled(request):
                self._wait(request, learner, blocks, is_next=True)
            return
        self._found.pop(name, None)
        if (turn := turn_of(request)) is not None:
            # Of a turn that was broken off is known that it was the last one, not what the session waits for.
            pause = None if request.status in _BROKEN_OFF else turn.pause
            learner.end_turn(turn.session, blocks, pause=pause, is_last=turn.is_last)

    def _end_waiting(self, request: Request, learner: BlockQueue) -> None:
        waiting = self._waiting.pop(request.request_id, None)
        if waiting is not None:
            learner.remove_waiting(waiting[1])
