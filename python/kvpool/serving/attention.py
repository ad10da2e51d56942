"""Attention for a `BatchPlan`, computed from a `KVPool` with PyTorch alone.

A reference that runs wherever PyTorch does, for examples and tests. Requests that decode are computed
together, prompts one by one. On a GPU, kernels that read a paged KV cache where it lies (FlashInfer,
FlashAttention) copy nothing and are faster.

The formula is that of `torch.nn.functional.scaled_dot_product_attention`, `softmax(Q K^T * scale + mask) V`,
with the mask of a causal model whose queries are the last tokens of each request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812 - PyTorch's own abbreviation

from kvpool.errors import ConfigError

if TYPE_CHECKING:
    from kvpool._kvpool import BatchPlan, KVPool

__all__ = ["AttentionGroup", "PoolAttention"]

# Requests with at most so many new tokens are computed together: padded to one length they cost less than as
# many calls. More tokens are work enough for a call, and need not be padded to somebody else's context.
_MOST_TOGETHER = 16


class PoolAttention:
    """Causal attention of a batch's new tokens over all tokens of their requests, in any layer of a pool.

    Make one in a step and call it in each layer, after K and V of the new tokens were written there
    (`set_kv_buffer` to `plan.out_cache_loc`). Which slots are read is computed once, here, and not looked up
    in the plan again; the requests must still own them. Calls are for one thread, and make no gradients.

    Args:
        plan: The batch, of a planner that makes the block table.
        kv_pool: Where K and V are: on the planner's device, with its page size.

    Attributes:
        kv_pool: The pool.
        groups: The requests that have new tokens, by their number.

    Raises:
        ConfigError: If the plan has no block table, or a key has not as many heads as a value.
        StaleBufferError: If the planner has made another plan since.
    """

    def __init__(self, plan: BatchPlan, kv_pool: KVPool) -> None:
        if plan.block_table is None:
            raise ConfigError("the planner makes no block table (block_table=False), which says what to read")
        if kv_pool.k_head_num != kv_pool.v_head_num:
            raise ConfigError(
                f"a key has {kv_pool.k_head_num} heads, a value {kv_pool.v_head_num}; they must be equal"
            )
        self.kv_pool = kv_pool
        self.groups = [AttentionGroup(plan, kv_pool, requests) for requests in _group(plan)]

    def __call__(
        self,
        query: torch.Tensor,
        layer_id: int,
        *,
        scale: float | None = None,
        sliding_window: int | None = None,
    ) -> torch.Tensor:
        """Attention of all new tokens in a layer.

        Copies the K and V that it reads to memory that it keeps, and uses again in the next layer. Runs on
        the current stream.

        Args:
            query: `[T, heads, k_head_dim]`, one request after the other as in the plan, of any float dtype on
                the pool's device. `heads` is a multiple of the pool's; each of its heads serves as many
                neighbouring ones of these (grouped-query attention).
            layer_id: The layer.
            scale: Factor of the scores, `k_head_dim ** -0.5` by default.
            sliding_window: A token sees so many tokens, itself included; by default all before it.

        Returns:
            `[T, heads, v_head_dim]`, a new tensor of the query's dtype.

        Raises:
            ConfigError: If the query does not fit.
            IndexError: If there is no such layer.
        """
        pool = self.kv_pool
        tokens = sum(group.tokens.numel() for group in self.groups)
        heads = query.shape[1] if query.ndim == 3 else 0  # noqa: PLR2004 - tokens, heads, elements
        if query.shape != (tokens, heads, pool.k_head_dim) or heads % pool.k_head_num or not heads:
            raise ConfigError(
                f"query has shape {tuple(query.shape)}; it must be ({tokens}, n * {pool.k_head_num}, "
                f"{pool.k_head_dim})"
            )
        if len(self.groups) == 1:  # it has all tokens, in order
            return self.groups[0](query, layer_id, scale=scale, sliding_window=sliding_window)
        out = query.new_empty(tokens, heads, pool.v_head_dim)
        for group in self.groups:
            found = group(query[group.tokens], layer_id, scale=scale, sliding_window=sliding_window)
            out[group.tokens] = found
        return out


class AttentionGroup:
    """The part of a `PoolAttention` that concerns requests with equally many new tokens.

    A model that needs a rectangular input takes one group at a time.

    Attributes:
        requests: int64 `[n]` on the device: places in the batch, ascending.
        tokens: int64 `[n * extend_len]` on the device: places of their new tokens in the batch, ascending.
        extend_len: New tokens of each of them.
    """

    def __init__(self, plan: BatchPlan, kv_pool: KVPool, requests: list[int]) -> None:
        if plan.block_table is None:
            raise ConfigError("attention over pages needs a planner with block_table=True")
        device = plan.block_table.device
        starts = torch.from_numpy(plan.host.qo_indptr[requests]).long()
        seq_lens = torch.from_numpy(plan.host.seq_lens[requests]).long()
        self.extend_len = int(plan.host.qo_indptr[requests[0] + 1] - starts[0])
        self.tokens = (starts[:, None] + torch.arange(self.extend_len)).flatten().to(device)
        self.requests = torch.tensor(requests, device=device)
        self._kv_pool = kv_pool
        self._kv_len = int(seq_lens.max())
        # The new tokens are all that there is, so that PyTorch's own causal mask fits.
        self._is_square = len(requests) == 1 and self._kv_len == self.extend_len
        self._seq_lens = seq_lens[:, None].to(device)
        self._masks: dict[int | None, torch.Tensor] = {}
        # Memory for what a layer reads, which the next one uses again.
        self._gathered: tuple[torch.Tensor, torch.Tensor] | None = None
        # What lies after a request is masked, but must be finite: its own last token.
        key = torch.arange(self._kv_len, device=device).minimum(self._seq_lens - 1)
        pages = plan.block_table[self.requests].gather(1, key // kv_pool.page_size)
        self._slots = pages * kv_pool.page_size + key % kv_pool.page_size

    @torch.no_grad()
    def __call__(
        self,
        query: torch.Tensor,
        layer_id: int,
        *,
        scale: float | None = None,
        sliding_window: int | None = None,
    ) -> torch.Tensor:
        """Attention of the group's new tokens, as `PoolAttention` has it.

        Args:
            query: `[n * extend_len, heads, k_head_dim]`.
            layer_id: The layer.
            scale: Factor of the scores.
            sliding_window: Tokens that a token sees.

        Returns:
            `[n * extend_len, heads, v_head_dim]`, a new tensor.
        """
        n, heads, groups = len(self.requests), query.shape[1], self._kv_pool.k_head_num
        self._gathered = self._kv_pool.gather_kv(layer_id, self._slots, self._gathered)
        keys, values = (
            x.view(n, self._kv_len, groups, -1).transpose(1, 2).to(query.dtype) for x in self._gathered
        )
        if self.extend_len == 1:
            # Query heads that share a key head are so many queries of it, and nothing is repeated.
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
        """Which keys a query sees: bool `[n, 1, extend_len, kv_len]`."""
        if sliding_window not in self._masks:
            device = self._slots.device
            query = self._seq_lens - self.extend_len + torch.arange(self.extend_len, device=device)
            distance = query[:, None, :, None] - torch.arange(self._kv_len, device=device)
            mask = distance >= 0
            if sliding_window is not None:
                mask &= distance < sliding_window
            self._masks[sliding_window] = mask
        return self._masks[sliding_window]


def _group(plan: BatchPlan) -> list[list[int]]:
    """Places of requests in the batch that are computed together, ascending in each group."""
    groups: dict[Any, list[int]] = {}
    for request, tokens in enumerate((plan.host.qo_indptr[1:] - plan.host.qo_indptr[:-1]).tolist()):
        if tokens > 0:
            groups.setdefault(tokens if tokens <= _MOST_TOGETHER else (request,), []).append(request)
    return list(groups.values())
