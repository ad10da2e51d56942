"""SGLang's prefix cache over kvpool's tree core, beside the same cache over SGLang's own tree cores.

One process, one allocator of SGLang's for each, the same calls: medians in microseconds, and how many times
as much as kvpool's through SGLang's own loop. Needs SGLang.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from array import array
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.tree_core_registry import resolve_tree_core_backend
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

from kvpool.integrations.sglang import register_tree_core
from kvpool.integrations.sglang.radix_cache import KvUnifiedRadixCache

if TYPE_CHECKING:
    from collections.abc import Callable

LONG = 1 << 17
"""Tokens of a long prompt."""


class Subject:
    """One cache, with a prompt generator of its own that gives all of them the same prompts."""

    def __init__(
        self, name: str, backend: str, page: int, size: int, cache: type = UnifiedRadixCache
    ) -> None:
        self.name, self.page = name, page
        shared = {"size": size, "dtype": torch.bfloat16, "device": "cpu", "kvcache": None, "need_sort": False}
        self.allocator = (
            TokenToKVPoolAllocator(**shared)
            if page == 1
            else PagedTokenToKVPoolAllocator(page_size=page, **shared)
        )
        rows = ReqToTokenPool(size=2, max_context_len=8, device="cpu", enable_memory_saver=False)
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=rows,
            token_to_kv_pool_allocator=self.allocator,
            page_size=page,
            tree_components=(ComponentType.FULL,),
            tree_core_backend=backend,
        )
        self.cache = cache(params)
        self.times: dict[str, list[float]] = {}
        self.prompts = 0

    def tokens(self, count: int) -> array[int]:
        """Tokens that no prompt before began with."""
        self.prompts += 1
        first = self.prompts * 7919 % (1 << 29)
        return array("q", range(first, first + count))

    def insert(self, tokens: array[int], found: int = 0) -> int:
        """Inserts a prompt, whose first `found` tokens are there."""
        values = self.allocator.alloc(len(tokens) - found)
        if found:
            node = self.match(tokens).last_device_node
            values = torch.cat([self.cache.path_device_indices(node)[:found], values])
        params = InsertParams(RadixKey(tokens), values, prev_prefix_len=found)
        return int(self.cache.insert(params).last_device_node)

    def match(self, tokens: array[int]) -> Any:
        """Matches a prompt."""
        return self.cache.match_prefix(MatchPrefixParams(RadixKey(tokens)))

    def time(self, row: str, call: Callable[[], Any]) -> Any:
        """Calls it, and notes how long it took."""
        begin = time.perf_counter()
        answer = call()
        self.times.setdefault(row, []).append((time.perf_counter() - begin) * 1e6)
        return answer


def run(subject: Subject, leaves: int, rounds: int) -> None:
    """All rows at one number of leaves."""
    count = f"{leaves // 1000}k leaves"
    while subject.cache.evictable_size() < leaves * 64:
        subject.insert(subject.tokens(64))
    for _ in range(rounds):
        subject.time(f"evict(64), {count}", lambda: subject.cache.evict(EvictParams(num_tokens=64)))
        tokens = subject.tokens(64)
        values = subject.allocator.alloc(64)
        params = InsertParams(RadixKey(tokens), values)
        subject.time(f"insert 64 (new leaf), {count}", partial(subject.cache.insert, params))
    for _ in range(max(1, rounds // 10)):
        subject.time(f"evict(16384), {count}", lambda: subject.cache.evict(EvictParams(num_tokens=16384)))
        for _ in range(256):
            subject.insert(subject.tokens(64))


def run_long(subject: Subject, rounds: int) -> None:
    """Prompts of 131,072 tokens, in one node and in 2,048."""
    cache = subject.cache
    tokens = subject.tokens(LONG)
    node = subject.insert(tokens)
    missing = array("q", tokens)
    missing[0] = -1
    for _ in range(rounds):
        subject.time("match 131k, miss", lambda: subject.match(missing))
    run_path(subject, tokens, node, rounds, "one node")
    slots = cache.path_device_indices(node)
    for _ in range(rounds):
        longer = tokens + subject.tokens(64)
        values = torch.cat([slots, subject.allocator.alloc(64)])
        params = InsertParams(RadixKey(longer), values, prev_prefix_len=LONG)
        subject.time("insert +64 on 131k", partial(cache.insert, params))
    chain = subject.tokens(LONG)
    node = subject.insert(chain)
    # From the end on, so that each match cuts the first node.
    for end in range(LONG - 64, 0, -64):
        subject.match(chain[:end])
    run_path(subject, chain, node, rounds, "2048 nodes")


def run_path(subject: Subject, tokens: array[int], node: int, rounds: int, name: str) -> None:
    """The calls of a request for a path, one by one and all in turn."""
    cache = subject.cache
    for _ in range(rounds):
        subject.time(f"match 131k, {name}", lambda: subject.match(tokens))
    for _ in range(rounds):
        subject.time(f"path_device_indices, {name}", lambda: cache.path_device_indices(node))
    for _ in range(rounds):
        lock = subject.time(f"lock, {name}", lambda: cache.inc_lock_ref(node))
        subject.time(f"unlock, {name}", partial(cache.dec_lock_ref, node, lock.to_dec_params()))

    def use() -> None:
        found = subject.match(tokens).last_device_node
        lock = cache.inc_lock_ref(found)
        cache.path_device_indices(found)
        cache.dec_lock_ref(found, lock.to_dec_params())

    for _ in range(rounds):
        subject.time(f"all four in turn, {name}", use)


def subjects(page: int, size: int) -> list[Subject]:
    """kvpool, in one call and through SGLang's loop, and the faster core of SGLang that runs here."""
    found = [
        Subject("kvpool, one call", "kvpool", page, size, KvUnifiedRadixCache),
        Subject("kvpool", "kvpool", page, size),
    ]
    params = CacheInitParams(
        disable=False, req_to_token_pool=None, token_to_kv_pool_allocator=None, page_size=page
    )
    # The compiled one, where this PyTorch can load it.
    core = resolve_tree_core_backend("rust", params)
    return [*found, Subject(f"SGLang, {core}", core, page, size)]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--leaves", type=int, nargs="+", default=[1000, 10_000, 50_000])
    parser.add_argument("--pages", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--json", type=Path, help="where the medians go")
    options = parser.parse_args()
    set_global_server_args_for_scheduler(ServerArgs(model_path="dummy"))
    register_tree_core()
    report: dict[str, Any] = {}
    gc.disable()
    for page in options.pages:
        times: dict[str, dict[str, list[float]]] = {}
        # SGLang's allocators copy all free slots for each free: there are few beside the cached ones.
        for leaves in options.leaves:
            tested = subjects(page, leaves * 64 + 4096)
            for subject in tested:
                subject.times = times.setdefault(subject.name, {})
                run(subject, leaves, options.rounds)
                gc.collect()
        tested = subjects(page, 6 * LONG)
        for subject in tested:
            subject.times = times.setdefault(subject.name, {})
            run_long(subject, max(5, options.rounds // 4))
            gc.collect()
        names = [subject.name for subject in tested]
        print(f"page size {page}, PyTorch {torch.__version__}, microseconds (times of kvpool)")
        print(f"{'':34}" + "".join(f"{name:>26}" for name in names))
        for row in tested[0].times:
            medians = [statistics.median(subject.times[row]) for subject in tested]
            cells = [f"{median:11.1f} (x{median / medians[1]:.1f})" for median in medians]
            print(f"{row:34}" + "".join(f"{cell:>26}" for cell in cells))
            report[f"{page}/{row}"] = dict(zip(names, medians, strict=True))
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
