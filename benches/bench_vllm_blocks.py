"""vLLM's pool of blocks over kvpool beside vLLM's own, with vLLM's own managers and requests, in one process.

`make bench-vllm` runs it. Most pools are full of 50,000 blocks with hashes: what is taken evicts.
Behind the rows of vLLM's calls stand those of one call for many blocks, which its interface does not have.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from harness import Case, Report, repeated
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_coordinator
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, register_all_kvcache_specs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

import kvpool
from kvpool.integrations.vllm.block_pool import KvpoolBlockPool

if TYPE_CHECKING:
    from collections.abc import Callable

COUNT = 50_000
SIZE = 16
SPEC = FullAttentionSpec(block_size=SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32)
RUNNING, CONTEXT, STEPS = 256, 1000, 16


class Hashed:
    """The attributes of a request that a pool reads, with hashes that no other request has."""

    made = 0

    def __init__(self, blocks: int) -> None:
        """Makes the hashes."""
        Hashed.made += 1
        seed = Hashed.made.to_bytes(8, "big")
        self.block_hashes = [
            hashlib.sha256(seed + number.to_bytes(8, "big")).digest() for number in range(blocks)
        ]


def full(kind: type[Any]) -> Any:  # noqa: ANN401 - vLLM's
    """A pool whose free blocks all have hashes."""
    pool = kind(COUNT, enable_caching=True, hash_block_size=SIZE)
    for _ in range(COUNT // 1000):
        use(pool, Hashed(min(1000, pool.get_num_free_blocks())))
    return pool


def use(pool: Any, request: Hashed) -> None:  # noqa: ANN401
    """Takes blocks for a prompt, gives them its hashes, and gives them back as vLLM does."""
    count = len(request.block_hashes)
    blocks = pool.get_new_blocks(count)
    pool.cache_full_blocks(request, blocks, 0, count, SIZE, 0)
    pool.free_blocks(reversed(blocks))


def alloc_and_free(kind: type[Any]) -> Case:
    """Blocks without hashes come and go."""
    pool = kind(COUNT, enable_caching=True, hash_block_size=SIZE)
    return Case(repeated(lambda: pool.free_blocks(reversed(pool.get_new_blocks(1024)))))


def evict(kind: type[Any]) -> Case:
    """Blocks get hashes, and those that they take lose theirs."""
    pool, waiting = full(kind), list[Hashed]()
    return Case(lambda _: use(pool, waiting.pop()), lambda: waiting.append(Hashed(1024)), calls=1)


def with_prompt(kind: type[Any]) -> tuple[Any, Hashed]:
    """A full pool that has the blocks of a prompt."""
    pool, prompt = full(kind), Hashed(4096)
    use(pool, prompt)
    return pool, prompt


def find(kind: type[Any]) -> Case:
    """The look-up of a prompt by vLLM's manager."""
    pool, prompt = with_prompt(kind)

    def run() -> None:
        (blocks,), tokens = FullAttentionManager.find_longest_cache_hit(
            prompt.block_hashes, 4096 * SIZE, [0], pool, SPEC, drop_eagle_block=False, alignment_tokens=SIZE
        )
        assert tokens == len(blocks) * SIZE == 4096 * SIZE

    return Case(repeated(run))


def share(kind: type[Any]) -> Case:
    """Another request uses the blocks of a prompt."""
    pool, prompt = with_prompt(kind)
    found = [pool.get_cached_block(each, [0])[0] for each in prompt.block_hashes]

    def run() -> None:
        pool.touch(found)
        pool.free_blocks(reversed(found))

    return Case(repeated(run))


def batch_find(kind: type[Any]) -> Case:
    """The look-up of a prompt in one call."""
    pool, prompt = with_prompt(kind)
    return Case(repeated(lambda: pool.cached_block_hash_to_block.find_prefix(prompt.block_hashes, [0])))


class Decoding:
    """A manager of vLLM with requests that decode."""

    def __init__(self, kind: type[Any]) -> None:
        """Takes the prompts."""
        kv_cache_coordinator.BlockPool = kind
        config = KVCacheConfig(
            num_blocks=COUNT, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], SPEC)]
        )
        self.manager = KVCacheManager(config, 2 * CONTEXT, scheduler_block_size=SIZE, hash_block_size=SIZE)
        assert type(self.manager.block_pool) is kind
        self.requests: list[Request] = []

    def begin(self) -> None:
        """Begins with new requests at the same context."""
        for request in self.requests:
            self.manager.free(request)
        self.requests = [self._request(number) for number in range(RUNNING)]

    def _request(self, number: int) -> Request:
        request = Request(
            request_id=str(number),
            prompt_token_ids=[number] * CONTEXT,
            sampling_params=SamplingParams(max_tokens=17),
            pooling_params=None,
            block_hasher=get_request_block_hasher(SIZE, sha256),
        )
        assert self.manager.allocate_slots(request, CONTEXT) is not None
        request.num_computed_tokens = CONTEXT
        return request

    def step(self, number: int) -> None:
        """Takes a slot for each request and step. The hashes of new tokens are no work of a pool."""
        for _ in range(number):
            for request in self.requests:
                assert self.manager.allocate_slots(request, 1) is not None
                request.num_computed_tokens += 1


def decode(kind: type[Any]) -> Case:
    """Steps of all requests."""
    side = Decoding(kind)
    return Case(side.step, side.begin, calls=STEPS)


def batch_decode(_: type[Any]) -> Case:
    """The same step as one call of a planner."""
    table = kvpool.ReqToTokenPool(RUNNING, 2 * CONTEXT, "cpu")
    allocator = kvpool.TokenToKVPoolAllocator(COUNT * SIZE, "cpu", SIZE)
    planner = kvpool.BatchPlanner(table, allocator, RUNNING, 1 << 20)
    rows = np.array(table.alloc(RUNNING), dtype=np.int32)
    none = np.zeros_like(rows)
    planner.extend(rows, none, none + CONTEXT)

    def run(number: int) -> None:
        for step in range(number):
            planner.decode(rows, none + CONTEXT + step + 1)

    return Case(run, lambda: planner.truncate(rows, none + CONTEXT), calls=STEPS)


def main() -> None:
    """Compares both."""
    init_none_hash(sha256)
    register_all_kvcache_specs(None)
    report = Report("vllm-blocks")
    cases: dict[str, tuple[Callable[[type[Any]], Case], Callable[[type[Any]], Case]]] = {
        "get_new_blocks and free_blocks of 1,024": (alloc_and_free, alloc_and_free),
        "the same with cache_full_blocks, evicting as many": (evict, evict),
        "find_longest_cache_hit of 4,096 blocks": (find, find),
        "touch and free_blocks of the 4,096": (share, share),
        f"allocate_slots for a token of {RUNNING} requests each": (decode, decode),
        f"one BatchPlanner.decode of {RUNNING} requests": (batch_decode, decode),
        "one BlockMap.find_prefix of 4,096 blocks": (batch_find, find),
    }
    for question, (ours, theirs) in cases.items():
        if report.wants(question):
            report.compare(question, ours(KvpoolBlockPool), theirs(BlockPool), alternative="vLLM 0.33.0")
    report.finish()


if __name__ == "__main__":
    main()
