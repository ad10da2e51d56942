"""SGLang's prefix cache: its unified radix cache with the compiled tree core, or with the one in Python."""

from __future__ import annotations

import itertools
import logging
import warnings
from array import array
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from . import stand_ins

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

VERSION = "0.5.23"

for _names in (
    "IPython aiohttp compressed_tensors gguf orjson partial_json_parser psutil pybase64 requests",
    "sentencepiece sniffio starlette torchvision tvm_ffi zmq",
):
    stand_ins.install(_names.split())
warnings.filterwarnings("ignore", module="sglang")
logging.getLogger("torch").setLevel(logging.ERROR)

from prefix_sides import Side  # noqa: E402
from sglang.srt.mem_cache.base_prefix_cache import (  # noqa: E402
    EvictParams,
    InsertParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams  # noqa: E402
from sglang.srt.mem_cache.radix_cache import RadixKey  # noqa: E402
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType  # noqa: E402
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache  # noqa: E402


class _Slots:
    """The least of an allocator: SGLang's own joins tensors of all free slots at each free."""

    device = "cpu"

    def __init__(self, capacity: int, page_size: int) -> None:
        self.page_size = page_size
        self._slots = torch.arange(capacity)
        self._next = 0

    def alloc(self, count: int) -> torch.Tensor:
        if self._next + count > len(self._slots):
            self._next = 0
        self._next += count
        return self._slots[self._next - count : self._next]

    def free(self, slots: torch.Tensor) -> None:
        pass

    def free_segment(self, slots: torch.Tensor, start_pos: int = 0) -> None:
        pass


class SGLang(Side):
    """SGLang's unified radix cache."""

    core = "rust"

    def __init__(self, capacity: int, page_size: int) -> None:
        """Makes an empty cache."""
        super().__init__(capacity, page_size)
        self.allocator = _Slots(capacity, page_size)
        self.cache = UnifiedRadixCache(
            params=CacheInitParams(
                disable=False,
                req_to_token_pool=SimpleNamespace(device="cpu"),
                token_to_kv_pool_allocator=self.allocator,
                page_size=page_size,
                tree_components=(ComponentType.FULL,),
                tree_core_backend=self.core,
            )
        )

    def prompt(self, tokens: NDArray[np.int32]) -> Any:  # noqa: ANN401, D102
        return RadixKey(array("q", tokens.astype(np.int64).tobytes()))

    def _insert(self, key: Any, slots: torch.Tensor, before: int = 0) -> Any:  # noqa: ANN401
        return self.cache.insert(InsertParams(key=key, value=slots, prev_prefix_len=before)).last_device_node

    def insert(self, prompt: Any) -> None:  # noqa: ANN401, D102
        self._insert(prompt, self.allocator.alloc(len(prompt)))

    def lookup(self, prompt: Any) -> int:  # noqa: ANN401, D102
        found = self.cache.match_prefix(MatchPrefixParams(key=prompt))
        receipt = self.cache.inc_lock_ref(found.last_device_node)
        self.cache.dec_lock_ref(found.last_device_node, receipt.to_dec_params())
        return int(found.device_prefix_len)

    def chunks(self, prefix: NDArray[np.int32], chunks: list[NDArray[np.int32]]) -> Iterator[None]:  # noqa: D102
        found = self.cache.match_prefix(MatchPrefixParams(key=self.prompt(prefix)))
        node, receipt = found.last_device_node, self.cache.inc_lock_ref(found.last_device_node)
        slots = torch.empty(0, dtype=torch.int64)
        if len(prefix):
            root = self.cache.root_node_handle()
            slots = self.cache.tree_core.collect_full_device_indices(node, root)
        tokens = np.concatenate([prefix, *chunks])
        ends = list(itertools.accumulate((len(chunk) for chunk in chunks), initial=len(prefix)))[1:]
        keys = [self.prompt(tokens[:end]) for end in ends]
        values = []
        for chunk in chunks:
            slots = torch.cat([slots, self.allocator.alloc(len(chunk))])
            values.append(slots)
        before = len(prefix)
        yield
        # As after a chunk of a prefill: insert, lock the new end, unlock the old one.
        for key, value in zip(keys, values, strict=True):
            end = self._insert(key, value, before)
            before = len(value)
            later = self.cache.inc_lock_ref(end)
            self.cache.dec_lock_ref(node, receipt.to_dec_params())
            node, receipt = end, later
            yield
        self.cache.dec_lock_ref(node, receipt.to_dec_params())

    def evict(self, tokens: int) -> None:  # noqa: D102
        self.cache.evict(EvictParams(num_tokens=tokens))

    def cached(self) -> int:  # noqa: D102
        return int(self.cache.total_size()[0])


class SGLangPython(SGLang):
    """The same with its tree core in Python."""

    core = "python"
