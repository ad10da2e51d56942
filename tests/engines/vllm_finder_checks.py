"""What is cached of a prompt, found by one call and by vLLM's managers, over pools with random content."""

from __future__ import annotations

import random
from math import lcm
from typing import Any

import pytest
import torch
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id
from vllm.v1.core.single_type_kv_cache_manager import (
    ChunkedLocalAttentionManager,
    FullAttentionManager,
    MambaManager,
    SlidingWindowManager,
)
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
)

from kvpool.integrations.vllm import finders
from kvpool.integrations.vllm.block_pool import KvpoolBlockPool

HASHED, BLOCKS, GROUPS = 4, 60, [0, 2]
SHAPE: dict[str, Any] = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}


def spec_of(kind: type, size: int, window: int) -> Any:  # noqa: ANN401
    if kind is FullAttentionManager:
        return FullAttentionSpec(block_size=size, **SHAPE)
    if kind is SlidingWindowManager:
        return SlidingWindowSpec(block_size=size, sliding_window=window, **SHAPE)
    if kind is ChunkedLocalAttentionManager:
        return ChunkedLocalAttentionSpec(block_size=size, attention_chunk_size=window, **SHAPE)
    return MambaSpec(block_size=size, shapes=((1,),), dtypes=(torch.float32,), mamba_cache_mode="align")


@pytest.mark.parametrize(
    "kind", [FullAttentionManager, SlidingWindowManager, ChunkedLocalAttentionManager, MambaManager]
)
def test_one_call_finds_what_many_find(kind: Any) -> None:  # noqa: ANN401
    dice = random.Random(kind.__name__)  # noqa: S311
    lengths = set()
    for _ in range(2000):
        scale = dice.choice([1, 1, 2, 3])
        size = scale * HASHED
        pool = KvpoolBlockPool(BLOCKS * len(GROUPS), True, HASHED)
        hashes = [number.to_bytes(32, "big") for number in range(dice.randrange(BLOCKS))]
        share = dice.choice([0.2, 0.7, 0.9, 1.0])
        for at, value in enumerate(hashes):
            for group in GROUPS:
                if dice.random() < share:
                    block = pool.blocks[1 + at * len(GROUPS) + GROUPS.index(group)]
                    pool.cached_block_hash_to_block.insert(make_block_hash_with_group_id(value, group), block)
        alignment = dice.choice([size, lcm(size, dice.choice([HASHED, 8, 16, 24])), HASHED])
        drops = dice.random() < 0.5
        if kind is ChunkedLocalAttentionManager:
            alignment, drops = size, False
        arguments = (
            hashes,
            dice.randrange(len(hashes) * HASHED + 1),
            GROUPS[: dice.choice([1, 2])],
            pool,
            spec_of(kind, size, dice.choice([1, 5, 8, 17, 32, 100])),
            drops,
            alignment,
        )
        expected = kind.find_longest_cache_hit(*arguments)
        found = finders._FINDERS[kind].find_longest_cache_hit(*arguments)
        assert found == expected
        lengths.add(expected[1])
    assert len(lengths) > 20
