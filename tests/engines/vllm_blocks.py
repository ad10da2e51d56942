"""Puts what kvpool's plugin replaces in vLLM's place: where vLLM uses it, and where its tests import it.

vLLM's tests read and change the dict `_cache` of the map of hashes, which kvpool's has not: here it has.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, MutableMapping
from typing import Any

from kvpool._kvpool import BlockMap
from kvpool.integrations.vllm import register


class _Cache(MutableMapping[bytes, Any]):
    """A map of hashes as the dict that vLLM has: by a hash its block, or its blocks by their numbers."""

    def __init__(self, shown: _ShownMap) -> None:
        self._map = shown

    def _dict(self) -> dict[bytes, Any]:
        held = dict(self._map.items())
        # vLLM keeps a dict once there were two.
        self._map.several |= {key for key, blocks in held.items() if len(blocks) > 1}
        self._map.several &= held.keys()
        return {
            key: {block.block_id: block for block in blocks} if key in self._map.several else blocks[0]
            for key, blocks in held.items()
        }

    def __getitem__(self, key: bytes) -> Any:  # noqa: ANN401
        return self._dict()[key]

    def __setitem__(self, key: bytes, value: Any) -> None:  # noqa: ANN401
        for block in value.values() if isinstance(value, dict) else [value]:
            self._map.insert(key, block)

    def __delitem__(self, key: bytes) -> None:
        for block in dict(self._map.items())[key]:
            self._map.pop(key, block.block_id)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._dict())

    def __len__(self) -> int:
        return len(self._map)

    def __copy__(self) -> dict[bytes, Any]:
        return self._dict()


class _ShownMap(BlockMap):
    def __init__(self) -> None:
        self.several: set[bytes] = set()

    @property
    def _cache(self) -> _Cache:
        return _Cache(self)


def replace() -> None:
    """Switches kvpool on as a user does, and has the tests that make a pool or a manager make kvpool's."""
    from vllm.v1.core import block_pool as vllm_block_pool
    from vllm.v1.core import kv_cache_manager as vllm_manager
    from vllm.v1.core import kv_cache_utils as vllm_utils

    from kvpool.integrations.vllm import block_pool, hashing, kv_cache_manager

    block_pool.BlockMap = _ShownMap  # type: ignore[attr-defined]
    os.environ["KVPOOL_VLLM"] = "1"
    register()
    vllm_block_pool.BlockPool = block_pool.KvpoolBlockPool
    vllm_manager.KVCacheManager = kv_cache_manager.KvpoolKVCacheManager
    vllm_utils.get_request_block_hasher = hashing.get_request_block_hasher
