"""A model that reads the tokens of each request back from the pool: a wrong slot gives a wrong token."""

from __future__ import annotations

import time
import zlib
from itertools import islice
from typing import TYPE_CHECKING

import devices
import numpy as np
import torch
from common import some
from devices import to_current
from kvpool_serving.sampling import sample

from kvpool import HostTier, KVPool, ReqToTokenPool, TokenToKVPoolAllocator

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvpool_serving import Engine, Request

    from kvpool import BatchPlan, GDNPool

VOCAB = 50


def logits_after(tokens: Sequence[int]) -> torch.Tensor:
    """The model's next token after these tokens."""
    seed = zlib.crc32(bytes(tokens))
    return torch.from_numpy(np.random.default_rng(seed).normal(size=VOCAB).astype(np.float32))


class PoolReader:
    """A model whose keys are its tokens: it reads all of a request's, and says what comes after them.

    It reads them in each layer, whose keys say which one it is.
    """

    vocab_size = VOCAB
    gdn_pool: GDNPool | None = None
    layers = 1

    def __init__(self, size: int, max_reqs: int = 8, max_context_len: int = 128, page_size: int = 1) -> None:
        where = devices.current()
        self.allocator = TokenToKVPoolAllocator(size, where, page_size, strict=True)
        self.table = ReqToTokenPool(max_reqs, max_context_len, where, strict=True)
        self.pool = KVPool(size, self.layers, 1, 1, where, torch.float32, page_size=page_size)
        self.batches: list[int] = []  # new tokens of each call
        self.fails_in: int | None = None
        self._fresh: set[int] = set()

    def start(self, rows: Sequence[int]) -> None:
        self._fresh = set(rows)

    def forward(self, token_ids: torch.Tensor, plan: BatchPlan) -> torch.Tensor:
        return self.read(token_ids, plan)

    def read(
        self, token_ids: torch.Tensor, plan: BatchPlan, wait_layer: Callable[[int], object] | None = None
    ) -> torch.Tensor:
        """The forward pass, of which each layer is read behind its arrival."""
        fresh, self._fresh = self._fresh, set()
        assert token_ids.dtype is torch.int64
        assert token_ids.device.type == devices.current()
        key = token_ids.to(torch.float32).view(-1, 1, 1)
        for layer in range(self.layers):
            self.pool.set_kv_buffer(layer, plan.out_cache_loc, key + layer * VOCAB, key)
        if self.fails_in is not None:
            self.fails_in -= 1
            if self.fails_in < 0:
                raise RuntimeError("the model fails")
        self.batches.append(len(token_ids))
        host = plan.host
        new = host.qo_indptr[1:] - host.qo_indptr[:-1]
        assert new.min() > 0
        assert {*host.req_pool_indices[host.seq_lens == new].tolist()} == fresh
        known: list[list[int]] = []
        for layer in range(self.layers):
            if wait_layer is not None:
                wait_layer(layer)
            found = self._tokens(layer, plan)
            known = known or found
            assert found == known
        self.note_tokens(plan, known)
        return to_current(torch.stack([logits_after(tokens) for tokens in known]))

    def note_tokens(self, plan: BatchPlan, tokens: list[list[int]]) -> None:
        """All tokens of each request of a batch were read."""

    def _tokens(self, layer: int, plan: BatchPlan) -> list[list[int]]:
        """The tokens of each request of a batch, as a layer has them."""
        host, page_size = plan.host, self.allocator.page_size
        pages = np.split(some(host.kv_indices), host.kv_indptr[1:-1])
        offsets = np.arange(page_size)
        slots = [
            (held[:, None] * page_size + offsets).flatten()[:length]
            for held, length in zip(pages, host.seq_lens, strict=True)
        ]
        keys, values = (x.flatten().tolist() for x in self.pool.gather_kv(layer, np.concatenate(slots)))
        assert [key - layer * VOCAB for key in keys] == values
        tokens = iter(values)
        return [[int(token) for token in islice(tokens, int(length))] for length in host.seq_lens]


def settle(engine: Engine) -> None:
    """Waits for the copies to the tiers of an engine, and from there."""
    cache, deadline = some(engine.prefix_cache), time.monotonic() + 30
    tiers = [tier for tier in cache.tiers if isinstance(tier, HostTier)]
    while (
        any(tier.stats()["arriving"] + tier.stats()["storing"] for tier in tiers)
        or engine.model.allocator.stats()["fenced"]
    ):
        assert time.monotonic() < deadline
        time.sleep(0.0005)
        cache.obtainable_size()  # takes note of what is over
    for tier in tiers:
        tier.verify()


def is_whole(engine: Engine) -> bool:
    """Nothing runs, and only the prefix cache has slots."""
    if engine.prefix_cache is not None and engine.prefix_cache.tiers:
        settle(engine)
    allocator, table, cached = engine.model.allocator, engine.model.table, 0
    allocator.verify()
    if engine.prefix_cache is not None:
        engine.prefix_cache.verify()
        assert engine.prefix_cache.locked_size() == 0
        cached = engine.prefix_cache.evictable_size()
    return (
        allocator.available_size() + cached == allocator.stats()["capacity"]
        and table.available_size() == table.size
        and not table.req_to_token.cpu().any()
    )


def alone(request: Request) -> list[int]:
    """The tokens that a request must get."""
    tokens = list(request.prompt)
    for _ in range(request.max_new_tokens):
        tokens += sample(logits_after(tokens)[None], [(request.sampling, len(tokens))])
        if tokens[-1] in request.stop_tokens:
            break
    return tokens[len(request.prompt) :]
