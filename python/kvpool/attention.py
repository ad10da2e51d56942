"""Attention for a `BatchPlan`, computed from a `KVPool` with PyTorch alone.

A reference for examples and tests that runs wherever PyTorch does. Requests that decode are computed
together, prompts one by one. On a GPU, kernels that read a paged KV cache in place (FlashInfer,
FlashAttention) are faster.

The formula is that of `torch.nn.functional.scaled_dot_product_attention`, `softmax(Q K^T * scale + mask) V`,
with the mask of a causal model whose queries are the last tokens of each request. Scores may be capped as in
Gemma 2, and heads may have attention sinks as in GPT-OSS.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812 - PyTorch's own abbreviation

from kvpool.errors import ArgumentError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvpool._kvpool import BatchPlan, KVPool

__all__ = ["AttentionGroup", "PoolAttention", "plain_attention"]

# Requests with at most this many new tokens are computed together: padding them to one length costs less than
# separate calls. More tokens are enough work for a call of their own, without padding to a longer context.
_MAX_BATCHED_TOKENS = 16


class PoolAttention:
    """Causal attention of a batch's new tokens over all tokens of their requests, in any layer of a pool.

    Create one per step and call it in each layer, after the K and V of the new tokens were written
    (`set_kv_buffer` to `plan.out_cache_loc`). The constructor computes the slots to read once; the requests
    must still own them in later calls. Use it from one thread. It computes no gradients.

    Args:
        plan: The batch, of a planner with a block table.
        kv_pool: The pool of K and V, on the planner's device and with its page size.
        wait_layer: Called with each layer before it is read, such as `kvpool.Load.wait_layer` for a prefix
            that comes back from the tier below.

    Attributes:
        kv_pool: The pool.
        groups: The requests with new tokens, grouped by the number of these.

    Raises:
        ConfigError: If the plan has no block table, or keys and values differ in their number of heads.
        StaleError: If the planner has made another plan since.
    """

    def __init__(
        self, plan: BatchPlan, kv_pool: KVPool, wait_layer: Callable[[int], object] | None = None
    ) -> None:
        if plan.block_table is None:
            raise ConfigError("the planner has no block table (block_table=False), which attention needs")
        if kv_pool.k_head_num != kv_pool.v_head_num:
            raise ConfigError(
                f"a key has {kv_pool.k_head_num} heads, a value {kv_pool.v_head_num}; they must be equal"
            )
        self.kv_pool = kv_pool
        self.groups: list[AttentionGroup] = [
            AttentionGroup(plan, kv_pool, requests, wait_layer) for requests in _group(plan)
        ]

    def __call__(  # noqa: PLR0913 - the options of models
        self,
        query: torch.Tensor,
        layer_id: int,
        *,
        scale: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute the attention of all new tokens in a layer.

        Copies the K and V that it reads to a buffer that the next layer reuses. Runs on the current stream.

        Args:
            query: `[T, heads, k_head_dim]`, one request after the other in the order of the plan, of any
                float dtype on the pool's device. `heads` is a multiple of the pool's heads, each of which
                serves a group of neighbouring query heads (grouped-query attention).
            layer_id: The layer.
            scale: Factor of the scores, `k_head_dim ** -0.5` by default.
            sliding_window: Number of tokens that a token attends to, itself included; by default all.
            softcap: Scores `s` become `softcap * tanh(s / softcap)`, before the mask.
            sinks: `[heads]`: for each head, a further score that takes its part of the softmax, without a
                value.

        Returns:
            `[T, heads, v_head_dim]`, a new tensor of the query's dtype.

        Raises:
            ArgumentError: If the shape of the query is wrong.
            IndexError: If there is no such layer.
        """
        pool = self.kv_pool
        tokens = sum(group.tokens.numel() for group in self.groups)
        heads = query.shape[1] if query.ndim == 3 else 0  # noqa: PLR2004 - tokens, heads, elements
        if query.shape != (tokens, heads, pool.k_head_dim) or heads % pool.k_head_num or not heads:
            raise ArgumentError(
                f"query has shape {tuple(query.shape)}; it must be ({tokens}, n * {pool.k_head_num}, "
                f"{pool.k_head_dim})"
            )

        def attend(group: AttentionGroup, queries: torch.Tensor) -> torch.Tensor:
            return group(
                queries,
                layer_id,
                scale=scale,
                sliding_window=sliding_window,
                softcap=softcap,
                sinks=sinks,
            )

        if len(self.groups) == 1:  # it has all tokens, in order
            return attend(self.groups[0], query)
        out = query.new_empty(tokens, heads, pool.v_head_dim)
        for group in self.groups:
            out[group.tokens] = attend(group, query[group.tokens])
        return out


class AttentionGroup:
    """The part of a `PoolAttention` for requests with equally many new tokens.

    A model that needs a rectangular input processes one group at a time.

    Attributes:
        requests: int64 `[n]` on the device: positions of requests in the batch, ascending.
        tokens: int64 `[n * extend_len]` on the device: positions of their new tokens in the batch, ascending.
        extend_len: New tokens of each request.
    """

    def __init__(
        self,
        plan: BatchPlan,
        kv_pool: KVPool,
        requests: list[int],
        wait_layer: Callable[[int], object] | None = None,
    ) -> None:
        if plan.block_table is None:
            raise ConfigError("attention over pages needs a planner with block_table=True")
        device = plan.block_table.device
        starts = torch.from_numpy(plan.host.qo_indptr[requests]).long()
        seq_lens = torch.from_numpy(plan.host.seq_lens[requests]).long()
        self.extend_len: int = int(plan.host.qo_indptr[requests[0] + 1] - starts[0])
        tokens = starts[:, None] + torch.arange(self.extend_len)
        self.tokens: torch.Tensor = tokens.flatten().to(device)
        self.requests: torch.Tensor = torch.tensor(requests, device=device)
        self._kv_pool = kv_pool
        self._wait_layer = wait_layer
        self._kv_len = int(seq_lens.max())
        # All tokens are new, so that PyTorch's own causal mask applies.
        self._is_square = len(requests) == 1 and self._kv_len == self.extend_len
        self._seq_lens = seq_lens[:, None].to(device)
        self._masks: dict[int | None, torch.Tensor] = {}
        # K and V of a layer, reused by the next one.
        self._gathered: tuple[torch.Tensor, torch.Tensor] | None = None
        # Positions after a request are masked, but must be finite: they repeat its last token.
        key = torch.arange(self._kv_len, device=device).minimum(self._seq_lens - 1)
        pages = plan.block_table[self.requests].gather(1, key // kv_pool.page_size)
        self._slots = pages * kv_pool.page_size + key % kv_pool.page_size

    @torch.no_grad()
    def __call__(  # noqa: PLR0913 - the options of models
        self,
        query: torch.Tensor,
        layer_id: int,
        *,
        scale: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute the attention of the group's new tokens, as `PoolAttention` does.

        Args:
            query: `[n * extend_len, heads, k_head_dim]`.
            layer_id: The layer.
            scale: Factor of the scores.
            sliding_window: Number of tokens that a token attends to.
            softcap: Bound of the scores.
            sinks: A further score of each head.

        Returns:
            `[n * extend_len, heads, v_head_dim]`, a new tensor.
        """
        n, heads, groups = len(self.requests), query.shape[1], self._kv_pool.k_head_num
        if self._wait_layer is not None:
            self._wait_layer(layer_id)
        self._gathered = self._kv_pool.gather_kv(layer_id, self._slots, self._gathered)
        keys, values = (
            x.view(n, self._kv_len, groups, -1).transpose(1, 2).to(query.dtype) for x in self._gathered
        )
        if softcap is not None or sinks is not None:
            queries = query.view(n, self.extend_len, heads, -1).transpose(1, 2)
            mask = self._mask(sliding_window)
            out = plain_attention(queries, keys, values, mask, scale=scale, softcap=softcap, sinks=sinks)
            return out.transpose(1, 2).flatten(0, 1)
        if self.extend_len == 1:
            # Query heads that share a key head become queries of that head, so that keys are not repeated.
            queries = query.view(n, groups, heads // groups, -1)
        else:
            queries = query.view(n, self.extend_len, heads, -1).transpose(1, 2)
        is_causal = self._is_square and sliding_window is None
        out = F.scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=None if is_causal else self._mask(sliding_window),
            is_causal=is_causal and self.extend_len > 1,
            scale=scale,
            enable_gqa=self.extend_len > 1 and heads != groups,
        )
        if self.extend_len > 1:
            out = out.transpose(1, 2)
        return out.reshape(n * self.extend_len, heads, -1)

    def _mask(self, sliding_window: int | None) -> torch.Tensor:
        """Return the keys that each query attends to: bool `[n, 1, extend_len, kv_len]`."""
        if sliding_window not in self._masks:
            device = self._slots.device
            query = self._seq_lens - self.extend_len + torch.arange(self.extend_len, device=device)
            distance = query[:, None, :, None] - torch.arange(self._kv_len, device=device)
            mask = distance >= 0
            if sliding_window is not None:
                mask &= distance < sliding_window
            self._masks[sliding_window] = mask
        return self._masks[sliding_window]


def plain_attention(  # noqa: PLR0913 - the terms of the formula
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute attention with capped scores and attention sinks, which PyTorch's own function lacks.

    Args:
        query: `[n, heads, tokens, elements]`.
        key: `[n, kv_heads, kv_tokens, elements]`.
        value: `[n, kv_heads, kv_tokens, v_elements]`.
        mask: bool, broadcast to `[n, 1, tokens, kv_tokens]`: the keys that each query attends to. By default
            the queries are the last tokens, and attend to all tokens up to their own. The output of a query
            without keys is finite, and means nothing.
        scale: Factor of the scores, `elements ** -0.5` by default.
        softcap: Scores `s` become `softcap * tanh(s / softcap)`, before the mask.
        sinks: `[heads]`: for each head, a further score that takes its part of the softmax, without a value.

    Returns:
        `[n, heads, tokens, v_elements]`, of the query's dtype; the softmax is computed in float32.
    """
    (heads, tokens), (groups, kv_tokens) = query.shape[1:3], key.shape[1:3]
    if mask is None:
        mask = query.new_ones(tokens, kv_tokens, dtype=torch.bool).tril(kv_tokens - tokens)[None, None]
    # Query heads that share a key head: [n, groups, heads of a group, tokens, elements].
    queries = query.reshape(len(query), groups, heads // groups, tokens, -1)
    scores = (queries @ key[:, :, None].mT).float() * (query.shape[3] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    # Not -inf: the shares of a query of padding, which has no keys, would be NaN, and so all that reads it.
    scores = scores.masked_fill(~mask[:, :, None], torch.finfo(scores.dtype).min)
    if sinks is not None:
        sink = sinks.float().view(groups, -1, 1, 1).expand(*scores.shape[:4], 1)
        scores = torch.cat((scores, sink), dim=-1)
    shares = scores.softmax(-1)[..., :kv_tokens].to(query.dtype)
    return (shares @ value[:, :, None]).flatten(1, 2)


def _group(plan: BatchPlan) -> list[list[int]]:
    """Return the positions of the requests that are computed together, ascending in each group."""
    batched: dict[int, list[int]] = {}  # by the number of new tokens
    groups: list[list[int]] = []
    for request, tokens in enumerate((plan.host.qo_indptr[1:] - plan.host.qo_indptr[:-1]).tolist()):
        if tokens > _MAX_BATCHED_TOKENS:
            groups.append([request])
        elif tokens in batched:
            batched[tokens].append(request)
        elif tokens > 0:
            batched[tokens] = [request]
            groups.append(batched[tokens])
    return groups
