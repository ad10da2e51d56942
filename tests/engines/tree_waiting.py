"""What requests of SGLang's waiting queue will find is evicted last. Prints "ok" at the end."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any
from unittest import mock

from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from tree_worth import make_cache

from kvpool.integrations.sglang import register_tree_core, waiting

FIRST, SECOND, THIRD = [1, 2, 3], [4, 5, 6], [7, 8, 9]


def request(name: str, tokens: list[int], **more: Any) -> Any:
    """A request as it waits."""
    said = {"output_ids": array("q"), "extra_key": None, "cache_salt": None, "retraction_count": 0, **more}
    return SimpleNamespace(rid=name, origin_input_ids=array("q", tokens), **said)


class Cache:
    """A cache of 64 tokens beside a waiting queue."""

    def __init__(self, order: str = "adaptive", *, is_fast: bool = True) -> None:
        self.cache = make_cache(64, 1, order)
        self.core = self.cache.tree_core
        self.queue: list[Any] = []
        self.core.waiting.queue = lambda: self.queue
        self._is_fast = is_fast

    def insert(self, *prompts: list[int], salt: str | None = None) -> None:
        """Caches prompts."""
        for tokens in prompts:
            key = RadixKey(array("q", tokens), cache_salt=salt)
            slots = self.cache.token_to_kv_pool_allocator.alloc(len(tokens))
            self.cache.insert(InsertParams(key, slots))

    def evict(self, tokens: int) -> None:
        """Evicts tokens, in one call or as SGLang does."""
        allocator = self.cache.token_to_kv_pool_allocator
        more = {} if self._is_fast else {"allocation_reclaim_satisfied": lambda: False}
        before = allocator.available_size()
        self.cache.evict_for_alloc(EvictParams(num_tokens=tokens), **more)
        assert allocator.available_size() - before == tokens
        self.cache.sanity_check()

    def found(self, *prompts: list[int], salt: str | None = None) -> list[int]:
        """How many tokens of each prompt are cached."""
        keys = (RadixKey(array("q", prompt), cache_salt=salt) for prompt in prompts)
        return [self.cache.match_prefix(MatchPrefixParams(key)).device_prefix_len for key in keys]


def order() -> None:
    """What requests need goes after all else, that of the last one in the queue first. Nothing is locked."""
    for is_fast in (True, False):
        cache = Cache(is_fast=is_fast)
        cache.insert(FIRST, SECOND, THIRD)
        cache.queue = [request("a", [*SECOND, 50]), request("b", [*FIRST, 51])]
        for expected in ([3, 3, 0], [0, 3, 0], [0, 0, 0]):
            cache.evict(3)
            assert cache.found(FIRST, SECOND, THIRD) == expected, is_fast
        # The scheduler has put them in another order, as by priority.
        cache.insert(FIRST, SECOND, THIRD)
        cache.evict(3)
        cache.queue = cache.queue[::-1]
        cache.evict(3)
        assert cache.found(FIRST, SECOND, THIRD) == [3, 0, 0], is_fast


def parts() -> None:
    """A request needs its prefix and no more, whatever the nodes are."""
    cache = Cache()
    cache.insert([1, 2, 3, 10, 11], [1, 2, 3, 20])
    cache.queue = [request("a", [1, 2, 30])]
    cache.evict(4)
    assert cache.found([1, 2, 3]) == [2]
    # What is left of it is needed.
    cache.insert(THIRD)
    cache.evict(1)
    assert cache.found([1, 2], THIRD) == [2, 2]
    cache.evict(3)
    assert cache.found([1, 2], THIRD) == [1, 0]
    cache.insert(THIRD)
    cache.evict(3)
    assert cache.found([1, 2], THIRD) == [1, 0]
    # Two requests need the same: that of the first one counts.
    cache.insert(SECOND, THIRD)
    cache.queue = [request("b", SECOND), request("c", THIRD), request("d", SECOND)]
    cache.evict(1 + 3)
    assert cache.found([1], SECOND, THIRD) == [0, 3, 0]


def ends() -> None:
    """A request that is not in the queue any more needs nothing, whatever has become of it."""
    cache = Cache()
    cache.insert(FIRST, SECOND, THIRD)
    cache.queue = [request("a", FIRST), request("b", SECOND)]
    cache.evict(1)
    cache.queue = cache.queue[1:]
    cache.evict(2 + 3)
    assert cache.found(FIRST, SECOND, THIRD) == [0, 3, 0]
    cache.queue = []
    cache.insert(FIRST)
    cache.evict(3)
    assert cache.found(FIRST, SECOND) == [3, 0]
    assert cache.core.waiting._numbers == {}
    cache.cache.reset()
    cache.queue = [request("c", FIRST)]
    cache.insert(FIRST, SECOND)
    cache.evict(3)
    assert cache.found(FIRST, SECOND) == [3, 0]


def look_ups() -> None:
    """A request is looked up when it has come, when it was retracted, and when others have computed more."""
    cache = Cache()
    with mock.patch.object(cache.core.waiting, "_find", wraps=cache.core.waiting._find) as find:
        cache.insert(FIRST, SECOND)
        cache.queue = [request("a", FIRST)]
        cache.evict(1)
        cache.evict(1)
        assert find.call_count == 1
        # It has run, and has left its answer.
        cache.queue = [request("a", FIRST, output_ids=array("q", [40, 41]), retraction_count=1)]
        cache.evict(1)
        assert find.call_count == 2
        cache.insert([*FIRST, 40], THIRD)
        cache.evict(3)
        assert cache.found([*FIRST, 40], THIRD) == [4, 0]
        assert find.call_count == 3
        # A checkpoint of a request inserts in a way of its own.
        slots = cache.cache.token_to_kv_pool_allocator.alloc(1)
        cache.core.insert_plain([100], slots, None, found=0, inserted=0, priority=0)
        cache.evict(1)
        assert find.call_count == 4
    # Of a long queue some at once, in turns.
    cache = Cache()
    cache.queue = [request(f"{number}", [*FIRST, number]) for number in range(3 * waiting._AGAIN)]
    cache.insert(THIRD)
    cache.evict(1)
    with mock.patch.object(cache.core.waiting, "_find", wraps=cache.core.waiting._find) as find:
        for _ in range(3):
            cache.insert([100])
            cache.evict(1)
        looked_up = [call.args[0].rid for call in find.call_args_list]
    assert sorted(looked_up) == sorted(req.rid for req in cache.queue)


def namespaces() -> None:
    """A request needs what is cached for its user."""
    cache = Cache()
    cache.insert(FIRST, salt="x")
    cache.insert(FIRST)
    cache.queue = [request("a", FIRST, cache_salt="x")]
    cache.evict(3)
    assert (cache.found(FIRST, salt="x"), cache.found(FIRST)) == ([3], [0])

    # SGLang's speculative decoding caches pairs of tokens.
    cache.core.is_eagle = True
    cache.insert([*SECOND, 60], [*THIRD, 90])
    cache.queue = [request("b", [*SECOND, 60])]
    cache.evict(3 + 3)
    assert cache.found([*SECOND, 60], [*THIRD, 90]) == [3, 0]


def others() -> None:
    """In another order of eviction the queue is not looked at, and without one none waits."""
    cache = Cache("lru")
    cache.insert(FIRST, SECOND)
    cache.core.waiting.queue = mock.Mock(side_effect=AssertionError)
    cache.evict(3)
    assert cache.found(FIRST, SECOND) == [0, 3]
    cache = Cache()
    cache.core.waiting.queue = waiting.WaitingRequests(cache.core._tree, mock.Mock()).queue
    cache.insert(FIRST, SECOND)
    cache.evict(3)
    assert cache.found(FIRST, SECOND) == [0, 3]


def main() -> None:
    register_tree_core()
    order()
    parts()
    ends()
    look_ups()
    namespaces()
    others()
    print("ok")  # noqa: T201


if __name__ == "__main__":
    main()
