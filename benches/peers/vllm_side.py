"""vLLM's prefix cache: its pool of blocks, which finds blocks by chained hashes."""

from __future__ import annotations

import hashlib
import logging
import os
import warnings
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from . import stand_ins

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    from numpy.typing import NDArray

VERSION = "0.33.0"

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
for _names in (
    "aiohttp cbor2 cpuinfo fastapi llguidance openai_harmony partial_json_parser psutil pybase64",
    "requests sniffio urllib3 uvloop xgrammar zmq",
):
    stand_ins.install(_names.split())
warnings.filterwarnings("ignore", module="vllm")
logging.getLogger("torch").setLevel(logging.ERROR)

from prefix_sides import Side  # noqa: E402
from vllm.v1.core.block_pool import BlockPool  # noqa: E402
from vllm.v1.core.kv_cache_utils import BlockHash  # noqa: E402


class VLLM(Side):
    """vLLM's block pool. The hashes of a prompt are made outside of what is timed."""

    def __init__(self, capacity: int, page_size: int) -> None:
        """Makes an empty pool."""
        super().__init__(capacity, page_size)
        self.pool = BlockPool(capacity // page_size + 1, enable_caching=True, hash_block_size=page_size)
        self._last: set[int] = set()

    def prompt(self, tokens: NDArray[np.int32]) -> Any:  # noqa: ANN401, D102
        hashes, before = [], b""
        for page in tokens.reshape(-1, self.page_size):
            before = hashlib.sha256(before + page.tobytes()).digest()
            hashes.append(BlockHash(before))
        return hashes

    def _cache(self, hashes: Any, blocks: list[Any], begin: int, end: int) -> None:  # noqa: ANN401
        request = SimpleNamespace(block_hashes=hashes)
        self.pool.cache_full_blocks(request, blocks, begin, end, self.page_size, 0)

    def insert(self, prompt: Any) -> None:  # noqa: ANN401, D102
        blocks = self.pool.get_new_blocks(len(prompt))
        self._cache(prompt, blocks, 0, len(prompt))
        self._last = {block.block_id for block in blocks}
        self.pool.free_blocks(reversed(blocks))

    def _find(self, prompt: Any) -> list[Any]:  # noqa: ANN401
        found = []
        for name in prompt:
            blocks = self.pool.get_cached_block(name, [0])
            if blocks is None:
                break
            found.append(blocks[0])
        self.pool.touch(found)
        return found

    def lookup(self, prompt: Any) -> int:  # noqa: ANN401, D102
        found = self._find(prompt)
        self.pool.free_blocks(reversed(found))
        return len(found) * self.page_size

    def chunks(self, prefix: NDArray[np.int32], chunks: list[NDArray[np.int32]]) -> Iterator[None]:  # noqa: D102
        import numpy as np  # noqa: PLC0415

        hashes = self.prompt(np.concatenate([prefix, *chunks]))
        blocks = self._find(hashes[: len(prefix) // self.page_size])
        at = len(blocks)
        new = self.pool.get_new_blocks(len(hashes) - at)
        self._last = {block.block_id for block in new}
        blocks += new
        yield
        for chunk in chunks:
            end = at + len(chunk) // self.page_size
            self._cache(hashes, blocks, at, end)
            at = end
            yield
        self.pool.free_blocks(reversed(blocks))

    def evict(self, tokens: int) -> None:
        """Evicts what was cached last."""
        assert tokens == len(self._last) * self.page_size
        self.pool.evict_blocks(self._last)

    def cached(self) -> int:  # noqa: D102
        return len(self.pool.cached_block_hash_to_block) * self.page_size
