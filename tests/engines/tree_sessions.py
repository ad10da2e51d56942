"""What requests of SGLang say of sessions reaches kvpool's tree. Prints "ok" at the end."""

from __future__ import annotations

import logging
from array import array
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from sglang.srt.managers.schedule_batch import FINISH_ABORT, FINISH_LENGTH
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.sampling.sampling_params import SamplingParams
from tree_worth import make_cache

from kvpool.integrations import turns as said_of_turns
from kvpool.integrations.sglang import radix_cache, register_tree_core, turns
from kvpool.integrations.turns import END, PAUSE, SESSION, Turn, TurnError

DONE, ABORTED = FINISH_LENGTH(1), FINISH_ABORT("gone")


class Cache:
    """A cache of 64 tokens, and requests that it serves."""

    def __init__(self, order: str = "adaptive") -> None:
        self.cache = make_cache(64, 1, order)
        self.cache.req_to_token_pool.req_to_token = torch.zeros((2, 64), dtype=torch.int32)

    def serve(
        self,
        tokens: list[int],
        said: dict[str, Any] | None = None,
        *,
        reason: object = DONE,
        saved: bool = True,
    ) -> Any:
        """Serves a request that says this, ends it for this reason, and returns it."""
        cache, key = self.cache, RadixKey(array("q", tokens))
        found = cache.match_prefix(MatchPrefixParams(key))
        length = found.device_prefix_len
        slots = cache.token_to_kv_pool_allocator.alloc(len(tokens) - length)
        cache.req_to_token_pool.req_to_token[0, : len(tokens)] = torch.cat(
            [cache.path_device_indices(found.last_device_node), slots]
        )
        request = SimpleNamespace(
            full_untruncated_fill_ids=key.token_ids,
            origin_input_ids=key.token_ids,
            extra_key=None,
            cache_salt=None,
            priority=None,
            session_id=None,
            kv_rotation_base=None,
            sampling_params=SamplingParams(custom_params=said),
            lock=cache.lock(found.last_device_node),
            last_node=found.last_device_node,
            finished_reason=reason,
            finished=lambda: reason is not None,
            kv=SimpleNamespace(req_pool_idx=0, cache_protected_len=length, cache_inserted_len=0),
            rid="",
        )
        if saved:
            cache.checkpoint_into_tree(request, up_to=len(tokens))
        else:
            cache.token_to_kv_pool_allocator.free(slots)
        cache.unlock(request.lock)
        cache.on_release(request, checkpointed=saved)
        return request

    def evicted_first(self, *prompts: list[int]) -> list[int]:
        """Evicts a token, and returns how many are found of each prompt."""
        self.cache.evict(EvictParams(num_tokens=1))
        keys = (RadixKey(array("q", prompt)) for prompt in prompts)
        return [self.cache.match_prefix(MatchPrefixParams(key)).device_prefix_len for key in keys]


CHAT, OTHER = [1, 2, 3], [7, 8, 9]


def ends() -> None:
    """What a request says of the end of its session is heard, on each way of an insertion."""
    for knows in (True, False):
        with mock.patch.object(radix_cache, "_KNOWS_CHECKPOINT", new=knows):
            cache = Cache()
            cache.serve(OTHER)
            cache.serve(CHAT, {SESSION: "chat"})
            cache.serve([*CHAT, 4], {SESSION: "chat", END: True})
            assert cache.evicted_first([*CHAT, 4], OTHER) == [3, 3], knows
            # What is inserted without a request is of no session.
            assert cache.cache.tree_core.session is None
            cache.serve([*CHAT, 5], {SESSION: "chat", PAUSE: "user"})
            cache.serve([*CHAT, 6], {SESSION: "chat", PAUSE: "user"})
            assert cache.evicted_first([*CHAT, 5], OTHER) == [3, 3], knows


def retractions() -> None:
    """A request that is retracted goes on; of one that is aborted it counts that it was the last one."""
    for reason, saved, is_heard in ((None, False, False), (ABORTED, False, True), (ABORTED, True, True)):
        cache = Cache()
        cache.serve(OTHER)
        cache.serve(CHAT, {SESSION: "chat"})
        cache.serve(CHAT, {SESSION: "chat", END: 1}, reason=reason, saved=saved)
        assert cache.evicted_first(CHAT, OTHER) == ([2, 3] if is_heard else [3, 2]), (reason, saved)
    cache = Cache()
    with mock.patch.object(cache.cache.tree_core, "end_turn") as end_turn:
        request = cache.serve(CHAT, {SESSION: 7, PAUSE: "user"}, reason=ABORTED)
        cache.serve([0], {SESSION: 7}, reason=ABORTED)
    assert end_turn.call_args_list == [
        mock.call(7, request.last_node, pause=None, is_last=False),
        # What SGLang puts in the place of a prompt that it refuses supersedes nothing.
        mock.call(7, None, pause=None, is_last=False),
    ]
    cache.cache.tree_core.end_turn(7, request.last_node + 100, pause=None, is_last=True)


def wrong() -> None:
    """Wrong arguments fail their request before the scheduler has it, and are of no session in it."""
    good: list[tuple[Any, Turn | None]] = [
        (None, None),
        ({"thinking_budget": 7, "__req__": object()}, None),
        ({SESSION: "chat", PAUSE: "bash", "ngram_size": 3}, Turn("chat", "bash")),
        ({SESSION: 7, END: 1}, Turn(7, None, is_last=True)),
    ]
    elsewhere, here = (SimpleNamespace(radix_cache_backend=name) for name in (None, "kvpool"))
    for said, turn in good:
        with mock.patch.object(turns, "settings", return_value=here):
            turns.check(SamplingParams(custom_params=said), 512)
        assert turns.turn_of(SamplingParams(custom_params=said)) == turn
    with mock.patch.object(said_of_turns, "_logger", mock.Mock(spec=logging.Logger)) as logger:
        wrongs: list[tuple[dict[str, Any], str]] = [
            ({PAUSE: "user"}, "kvpool_session is None"),
            ({SESSION: ""}, "kvpool_session is ''"),
            ({SESSION: 7, END: 2}, "kvpool_session_end is 2"),
            ({SESSION: 7, "kvpool_other": 1}, "kvpool_other is 1"),
        ]
        for bad, words in wrongs:
            refused(bad, here, words)
            assert turns.turn_of(SamplingParams(custom_params=bad)) is None
            Cache().serve(CHAT, bad)
    logger.warning.assert_called_once()
    refused({SESSION: 7}, elsewhere, "need --radix-cache-backend kvpool")
    # With SGLang's own order, nothing is looked at.
    Cache("lru").serve(CHAT, {SESSION: "chat", END: True})


def refused(said: dict[str, Any], memory: object, words: str) -> None:
    """The arguments are refused."""
    with mock.patch.object(turns, "settings", return_value=memory):
        try:
            turns.check(SamplingParams(custom_params=said), 512)
        except TurnError as error:
            assert words in str(error), error  # noqa: PT017
        else:
            raise AssertionError(said)


def main() -> None:
    register_tree_core()
    ends()
    retractions()
    wrong()
    print("ok")  # noqa: T201


if __name__ == "__main__":
    main()
