"""Running a ragged batch through a model whose keys, values and states are in pools."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from kvpool.attention import AttentionGroup, PoolAttention
from kvpool.errors import ArgumentError
from kvpool.integrations.transformers import attention
from kvpool.integrations.transformers.layout import cache_argument
from kvpool.integrations.transformers.probe import call_options, check_call
from kvpool.integrations.transformers.states import LengthCache, StateCache

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel

    from kvpool._kvpool import BatchPlan, GDNPool, KVPool
    from kvpool.integrations.transformers.probe import Layout

__all__ = ["Runner"]


class _Group(NamedTuple):
    """Requests that a call of the model takes together, with equally many new tokens.

    Attributes:
        attention: The attention of their new tokens.
        length: Tokens of each request before these; 0 where the model does not ask.
    """

    attention: AttentionGroup
    length: int


class Runner:
    """A model over pools.

    Args:
        model: The model, with the attention "kvpool".
        layout: Its layers.
        kv_pool: Keys and values.
        gdn_pool: States, for a model that has such layers.
    """

    def __init__(
        self, model: PreTrainedModel, layout: Layout, kv_pool: KVPool, gdn_pool: GDNPool | None
    ) -> None:
        self._model, self._layout = model, layout
        self._kv_pool, self._gdn_pool = kv_pool, gdn_pool
        self._cache_argument = cache_argument(model)
        self._config = model.config.get_text_config(decoder=True)

    @torch.no_grad()
    def forward(
        self, token_ids: torch.Tensor, plan: BatchPlan, wait_layer: Callable[[int], object] | None = None
    ) -> torch.Tensor:
        """Run the new tokens of a batch, as `PooledModel.forward` describes it."""
        if token_ids.shape != (plan.padded_num_tokens,):
            raise ArgumentError(
                f"token_ids has shape {tuple(token_ids.shape)}, the plan {plan.padded_num_tokens} new tokens"
            )
        attention.check_installed(self._config)
        step = PoolAttention(plan, self._kv_pool, wait_layer)
        found = sum(len(group.requests) for group in step.groups)
        if found == 0 or found != plan.padded_batch_size:
            raise ArgumentError(
                f"{found} of {plan.padded_batch_size} requests have new tokens; all must, and at least one"
            )
        positions, slots = plan.positions.long(), plan.out_cache_loc
        if self._gdn_pool is None and not self._layout.by_length:
            inputs = (token_ids[None], positions[None], slots)
            return self._run(inputs, step, LengthCache(), plan.qo_indptr[1:].long() - 1)[0]
        logits, groups = [], self._groups(plan, step, wait_layer)
        for group, length in groups:
            tokens, shape = group.tokens, (len(group.requests), group.extend_len)
            inputs = (token_ids[tokens].view(shape), positions[tokens].view(shape), slots[tokens])
            cache = self._cache(plan.req_pool_indices.long()[group.requests], length)
            logits.append(self._run(inputs, group, cache, 1)[:, 0])
        order = torch.cat([group.attention.requests for group in groups])
        return torch.cat(logits)[order.argsort()]

    def _groups(
        self, plan: BatchPlan, step: PoolAttention, wait_layer: Callable[[int], object] | None
    ) -> list[_Group]:
        """Return the requests that a rectangular input can have together."""
        if not self._layout.by_length:
            return [_Group(group, 0) for group in step.groups]
        new = (plan.host.qo_indptr[1:] - plan.host.qo_indptr[:-1]).tolist()
        alike: dict[tuple[int, int], list[int]] = {}
        for request, (tokens, end) in enumerate(zip(new, plan.host.seq_lens.tolist(), strict=True)):
            alike.setdefault((tokens, end - tokens), []).append(request)
        return [
            _Group(AttentionGroup(plan, self._kv_pool, requests, wait_layer), length)
            for (_, length), requests in alike.items()
        ]

    def _cache(self, rows: torch.Tensor, length: int) -> LengthCache:
        if self._gdn_pool is None:
            return LengthCache(length)
        return StateCache(self._gdn_pool, self._layout.linear_layers, rows, length)

    def _run(
        self,
        inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        group: PoolAttention | AttentionGroup,
        cache: LengthCache,
        logits_to_keep: int | torch.Tensor,
    ) -> torch.Tensor:
        """Call the model once.

        Args:
            inputs: Tokens and their positions, `[n, length]`, and slots, `[n * length]`.
            group: The attention of these tokens.
            cache: The states of these requests.
            logits_to_keep: The number of last tokens, or the positions of tokens, to compute logits for.

        Returns:
            Logits, `[n, kept, vocab_size]`.
        """
        token_ids, positions, slots = inputs

        def attend(
            module: Any,  # noqa: ANN401 - a layer of the model
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            attention_mask: torch.Tensor | None,
            **options: Any,  # noqa: ANN401 - passed on by the model
        ) -> torch.Tensor:
            layer = self._layout.attention_layers[check_call(self._model, module, options, attention_mask)]
            query, key, value = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
            self._kv_pool.set_kv_buffer(layer, slots, key, value)
            out = group(
                query,
                layer,
                scale=options.get("scaling"),
                # The model's own option may differ from its mask, which `transformers` applies.
                sliding_window=self._layout.windows[layer],
                softcap=options.get("softcap"),
                sinks=options.get("s_aux"),
            )
            return out.view(*token_ids.shape, *out.shape[1:])

        with attention.use(attend):
            output = self._model(
                token_ids,
                use_cache=True,
                **{self._cache_argument: cache, **call_options(self._layout, positions, logits_to_keep)},
            )
        logits: torch.Tensor = output.logits
        if not self._layout.keeps_logits:
            kept = (
                logits_to_keep if isinstance(logits_to_keep, torch.Tensor) else slice(-logits_to_keep, None)
            )
            logits = logits[:, kept]
        return logits
