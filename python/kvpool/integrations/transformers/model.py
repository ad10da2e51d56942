"""A model of `transformers` as kvpool's engine serves it.

`PooledModel` runs a ragged batch from a `BatchPlanner`: keys and values go to a `KVPool`, states of Gated
DeltaNet layers to a `GDNPool`. The model gets a cache that reads and writes the states of the requests in the
batch, and an attention function named "kvpool" (`AttentionInterface`) that writes to the pool and attends to
its tokens. Outside of `PooledModel.forward` that function is PyTorch's SDPA, or the same formula with capped
scores and attention sinks, so that the model generates as before.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch

from kvpool._kvpool import GDNPool
from kvpool.factories import make_full_attention_net_mem_pool, make_req_to_token_pool
from kvpool.integrations.transformers import attention
from kvpool.integrations.transformers.check import check_logits
from kvpool.integrations.transformers.probe import layout_of
from kvpool.integrations.transformers.runner import Runner

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from transformers import PreTrainedModel

    from kvpool._kvpool import BatchPlan, KVPool, ReqToTokenPool, TokenToKVPoolAllocator
    from kvpool.typing import DTypeLike

__all__ = ["PooledModel"]

_SETTING = threading.Lock()
"""Held while the attention of a model is set, which models with the same configuration object share."""


class PooledModel:
    """A causal language model whose layers keep their KV cache and states in kvpool's pools.

    The constructor creates the pools; it runs three tokens through the model to find their shapes, the
    windows of its masks, and what pools cannot serve. Then it compares: two short random prompts and a few
    decoding steps over small pools of their own, beside the model's own forward pass. The random state of
    PyTorch is as before. Keys and values are stored in the form that the attention function receives, which
    is the expanded form for multi-head latent attention. Layers with a sliding window also keep all tokens.

    Args:
        model: A model with a language-model head, in evaluation mode. Its attention implementation becomes
            "kvpool", and with it that of all models that share its configuration object.
        size: Token slots.
        max_reqs: The most requests with slots at once.
        max_context_len: The most tokens of a request.
        page_size: Slots in a page.
        dtype: Data type of keys and values; by default the model's, which convolution states always have.
        max_track_slots: The most snapshots of states for a prefix cache, each as large as the state of a
            request; by default twice `max_reqs`.
        check: Whether to compare. Leave it out for weights that are not there yet; what is not seen in
            shapes, masks and calls is not refused then.

    Attributes:
        model: The model.
        vocab_size: Size of the vocabulary.
        allocator: The allocator of token slots, for a `BatchPlanner` with `table`.
        table: The request table.
        kv_pool: Keys and values; its layers are the attention layers, in order.
        gdn_pool: The states of Gated DeltaNet layers, in order, with the rows of the request table as working
            slots; None without such layers.

    Raises:
        ConfigError: If a layer is neither full nor sliding-window attention nor Gated DeltaNet, layers of one
            kind have different shapes, the model does something else that is not supported, its logits over
            pools differ from its own, or a size is below 1. The message names the model, and the layer where
            it is one.
        OutOfMemoryError: If there is not enough memory.
    """

    def __init__(  # noqa: PLR0913 - a model and the sizes of its pools
        self,
        model: PreTrainedModel,
        size: int,
        max_reqs: int,
        max_context_len: int,
        *,
        page_size: int = 1,
        dtype: DTypeLike | None = None,
        max_track_slots: int | None = None,
        check: bool = True,
    ) -> None:
        device = str(model.device)
        self.table: ReqToTokenPool = make_req_to_token_pool(max_reqs, max_context_len, device)
        devices = [model.device] if model.device.type == "cuda" else []
        with _SETTING, torch.random.fork_rng(devices):
            layout = layout_of(model, max_context_len)
            if check:
                check_logits(model, layout, max_context_len)
        self.model = model
        embeddings: Any = model.get_input_embeddings()
        self.vocab_size: int = embeddings.num_embeddings
        self.kv_pool: KVPool
        self.allocator: TokenToKVPoolAllocator
        self.kv_pool, self.allocator = make_full_attention_net_mem_pool(
            size,
            len(layout.attention_layers),
            *layout.kv_shape,
            device=device,
            dtype=dtype or model.dtype,
            page_size=page_size,
        )
        self.gdn_pool: GDNPool | None = None
        if layout.gdn_shape is not None:
            self.gdn_pool = GDNPool(
                max_reqs,
                len(layout.linear_layers),
                *layout.gdn_shape,
                device=device,
                dtype=model.dtype,
                max_track_slots=2 * max_reqs if max_track_slots is None else max_track_slots,
            )
        self._runner = Runner(model, layout, self.kv_pool, self.gdn_pool)
        with _SETTING:
            attention.install(model)

    def start(self, rows: Sequence[int]) -> None:
        """Reset the states of these request rows, before the first tokens of requests.

        Args:
            rows: Rows of the request table.
        """
        if self.gdn_pool is not None and rows:
            self.gdn_pool.reset_states(rows)

    def forward(
        self, token_ids: torch.Tensor, plan: BatchPlan, wait_layer: Callable[[int], object] | None = None
    ) -> torch.Tensor:
        """Run the new tokens of a batch through the model.

        A model with attention only processes them in one call. Gated DeltaNet layers need requests with
        equally many new tokens, which takes one call for all requests that decode, and one for each prompt
        chunk. A model that takes positions from the length of its cache gets a call for requests of each
        length.

        Args:
            token_ids: int64 `[T]` on the model's device: the new tokens, in the order of the plan.
            plan: The latest plan of a planner over `table` and `allocator`, with new tokens for each request.
            wait_layer: Called with each layer of `kv_pool` before that is read, as in `PoolAttention`.

        Returns:
            `[B, vocab_size]`: logits after the last token of each request, a new tensor of the model's dtype.

        Raises:
            ConfigError: If tokens and plan do not match, the model uses an attention option that is not
                supported, or its attention is no longer "kvpool".
            StaleError: If the planner has made another plan since.
        """
        return self._runner.forward(token_ids, plan, wait_layer)
