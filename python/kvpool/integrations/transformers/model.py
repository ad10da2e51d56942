"""A model of `transformers` as kvpool's engine serves it.

`PooledModel` runs a ragged batch from a `BatchPlanner`: keys and values go to a `KVPool`, states of Gated
DeltaNet layers to a `GDNPool`. The model gets a cache (`Cache`) that reads and writes the states of the
requests in the batch, and an attention function named "kvpool" (`AttentionInterface`) that writes to the pool
and attends to its tokens. Outside of `PooledModel.forward` that function is PyTorch's SDPA, or the same
formula with capped scores and attention sinks, so that the model generates as before.
"""

from __future__ import annotations

import inspect
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.cache_utils import Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from typing_extensions import override

from kvpool._kvpool import GDNPool
from kvpool.errors import ConfigError
from kvpool.factories import make_full_attention_net_mem_pool, make_req_to_token_pool
from kvpool.serving.attention import PoolAttention, plain_attention

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from transformers import PreTrainedModel

    from kvpool._kvpool import BatchPlan, KVPool, ReqToTokenPool, TokenToKVPoolAllocator
    from kvpool.serving.attention import AttentionGroup
    from kvpool.typing import DTypeLike

    # Arguments: a module, its query, key and value, and the options of an attention function.
    Attend = Callable[..., torch.Tensor]

__all__ = ["PooledModel", "StateCache", "cache_argument", "gdn_shape", "only_shape", "run_two_tokens"]

Shape = TypeVar("Shape")

# The name of the attention function in `transformers`.
_NAME = "kvpool"

# The attention function while a `PooledModel` runs. An option of the model's call would also reach other
# functions.
_ATTEND: ContextVar[Attend | None] = ContextVar("kvpool_attend", default=None)

# Kinds of layers (`config.layer_types`), by the pool that holds them.
_ATTENTION = ("full_attention", "sliding_attention")
_LINEAR = "linear_attention"

# Options of other models' attention that `PoolAttention` does not support.
_FOREIGN = ("position_bias",)


class PooledModel:
    """A causal language model whose layers keep their KV cache and states in kvpool's pools.

    The constructor creates the pools; it runs two tokens through the model to find their shapes. Keys and
    values are stored in the form that the attention function receives, which is the expanded form for
    multi-head latent attention. Layers with a sliding window also keep all tokens.

    Args:
        model: A model with a language-model head, in evaluation mode. Its attention implementation becomes
            "kvpool".
        size: Token slots.
        max_reqs: The most requests with slots at once.
        max_context_len: The most tokens of a request.
        page_size: Slots in a page.
        dtype: Data type of keys and values; by default the model's, which convolution states always have.
        max_track_slots: The most snapshots of states for a prefix cache, each as large as the state of a
            request; by default twice `max_reqs`.

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
            kind have different shapes, or a size is below 1.
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
    ) -> None:
        shapes = _probe(model)
        device = str(model.device)
        self.model = model
        embeddings: Any = model.get_input_embeddings()
        self.vocab_size: int = embeddings.num_embeddings
        self.kv_pool: KVPool
        self.allocator: TokenToKVPoolAllocator
        self.kv_pool, self.allocator = make_full_attention_net_mem_pool(
            size,
            len(shapes.attention_layers),
            *shapes.kv_shape,
            device=device,
            dtype=dtype or model.dtype,
            page_size=page_size,
        )
        self.table: ReqToTokenPool = make_req_to_token_pool(max_reqs, max_context_len, device)
        self.gdn_pool: GDNPool | None = None
        if shapes.gdn_shape is not None:
            self.gdn_pool = GDNPool(
                max_reqs,
                len(shapes.linear_layers),
                *shapes.gdn_shape,
                device=device,
                dtype=model.dtype,
                max_track_slots=2 * max_reqs if max_track_slots is None else max_track_slots,
            )
        self._attention_layers = {layer: i for i, layer in enumerate(shapes.attention_layers)}
        self._linear_layers = {layer: i for i, layer in enumerate(shapes.linear_layers)}
        self._cache_argument = cache_argument(model)
        model.set_attn_implementation(_NAME)

    def start(self, rows: Sequence[int]) -> None:
        """Reset the states of these request rows, before the first tokens of requests.

        Args:
            rows: Rows of the request table.
        """
        if self.gdn_pool is not None and rows:
            self.gdn_pool.reset_states(rows)

    @torch.no_grad()
    def forward(
        self, token_ids: torch.Tensor, plan: BatchPlan, wait_layer: Callable[[int], object] | None = None
    ) -> torch.Tensor:
        """Run the new tokens of a batch through the model.

        A model with attention only processes them in one call. Gated DeltaNet layers need requests with
        equally many new tokens, which takes one call for all requests that decode, and one for each prompt
        chunk.

        Args:
            token_ids: int64 `[T]` on the model's device: the new tokens, in the order of the plan.
            plan: The latest plan of a planner over `table` and `allocator`, with new tokens for each request.
            wait_layer: Called with each layer of `kv_pool` before that is read, as in `PoolAttention`.

        Returns:
            `[B, vocab_size]`: logits after the last token of each request, a new tensor of the model's dtype.

        Raises:
            ConfigError: If tokens and plan do not match, or the model uses an attention option that is not
                supported.
            StaleBufferError: If the planner has made another plan since.
        """
        if token_ids.shape != (plan.padded_num_tokens,):
            raise ConfigError(
                f"token_ids has shape {tuple(token_ids.shape)}, the plan {plan.padded_num_tokens} new tokens"
            )
        attention = PoolAttention(plan, self.kv_pool, wait_layer)
        found = sum(len(group.requests) for group in attention.groups)
        if found == 0 or found != plan.padded_batch_size:
            raise ConfigError(
                f"{found} of {plan.padded_batch_size} requests have new tokens; all must, and at least one"
            )
        positions, slots = plan.positions.long(), plan.out_cache_loc
        if self.gdn_pool is None:
            inputs = (token_ids[None], positions[None], slots)
            return self._run(inputs, attention, _NoCache(), plan.qo_indptr[1:].long() - 1)[0]
        rows, logits = plan.req_pool_indices.long(), []
        for group in attention.groups:
            tokens, shape = group.tokens, (len(group.requests), group.extend_len)
            inputs = (token_ids[tokens].view(shape), positions[tokens].view(shape), slots[tokens])
            states = StateCache(self.gdn_pool, self._linear_layers, rows[group.requests])
            logits.append(self._run(inputs, group, states, 1)[:, 0])
        order = torch.cat([group.requests for group in attention.groups])
        return torch.cat(logits)[order.argsort()]

    def _run(
        self,
        inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        attention: PoolAttention | AttentionGroup,
        cache: Cache,
        logits_to_keep: int | torch.Tensor,
    ) -> torch.Tensor:
        """Call the model once.

        Args:
            inputs: Tokens and their positions, `[n, length]`, and slots, `[n * length]`.
            attention: The attention of these tokens.
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
            **options: Any,  # noqa: ANN401 - passed on by the model
        ) -> torch.Tensor:
            _refuse_foreign(module, options)
            layer = self._attention_layers[module.layer_idx]
            query, key, value = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
            self.kv_pool.set_kv_buffer(layer, slots, key, value)
            out = attention(
                query,
                layer,
                scale=options.get("scaling"),
                sliding_window=options.get("sliding_window"),
                softcap=options.get("softcap"),
                sinks=options.get("s_aux"),
            )
            return out.view(*token_ids.shape, *out.shape[1:])

        with _use_attention(attend):
            output = self.model(
                token_ids,
                position_ids=positions,
                use_cache=True,
                logits_to_keep=logits_to_keep,
                **{self._cache_argument: cache},
            )
        logits: torch.Tensor = output.logits
        return logits


class _NoCache(Cache):
    """A cache that keeps nothing: attention writes to the pool."""

    def __init__(self) -> None:
        super().__init__(layers=[])

    @override
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: object, **_options: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return key_states, value_states


class StateCache(_NoCache):
    """The states of the requests in a rectangular batch, stored in a `GDNPool`.

    A layer gets copies, works on them, and passes them back at its end. Its recurrent states are
    `[n, heads, k_dim, v_dim]`; those of the pool have V before K. There always is a previous state, since
    zeros are equivalent to none.
    """

    def __init__(self, pool: GDNPool, layers: dict[int, int], rows: torch.Tensor) -> None:
        super().__init__()
        self._pool, self._layers, self._rows = pool, layers, rows
        # The state of the running layer, which may write to it.
        self._conv_state = torch.empty(0)

    @override
    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return True

    @override
    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    @override
    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor:
        _, conv_state = self._pool.get_layer_state(self._layers[layer_idx])
        self._conv_state = conv_state[self._rows]
        return self._conv_state

    @override
    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: object
    ) -> torch.Tensor:
        # The first new inputs need the last old ones, whose outputs the layer drops.
        inputs = torch.cat((self.get_conv_state(layer_idx), conv_states), dim=-1)
        self._conv_state = inputs[..., -self._conv_state.shape[-1] :]
        return inputs

    @override
    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor:
        recurrent_state, _ = self._pool.get_layer_state(self._layers[layer_idx])
        states: torch.Tensor = recurrent_state[self._rows]
        return states.transpose(-1, -2)

    @override
    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: object
    ) -> torch.Tensor:
        recurrent_state, conv_state = self._pool.get_layer_state(self._layers[layer_idx])
        recurrent_state[self._rows] = recurrent_states.transpose(-1, -2).to(recurrent_state.dtype)
        conv_state[self._rows] = self._conv_state.to(conv_state.dtype)
        return recurrent_states


class _RecordingCache(DynamicCache):
    """A cache that records which layers pass recurrent states back, instead of writing in place."""

    def __init__(self, config: Any) -> None:  # noqa: ANN401 - a configuration of `transformers`
        super().__init__(config=config)
        self.returned: set[int] = set()

    @override
    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        self.returned.add(layer_idx)
        held: torch.Tensor = super().update_recurrent_state(recurrent_states, layer_idx, *args, **kwargs)
        return held


class _Shapes(NamedTuple):
    """Layers of each kind, and the shapes of their K and V (`KVPool`) and states (`GDNPool`)."""

    attention_layers: list[int]
    linear_layers: list[int]
    kv_shape: tuple[int, int, int, int]
    gdn_shape: tuple[int, int, int, int, int] | None


def _probe(model: PreTrainedModel) -> _Shapes:
    """Run two tokens, and read the shapes from attention and cache: configurations name them differently."""
    config: Any = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or [_ATTENTION[0]] * config.num_hidden_layers
    foreign = sorted({*kinds} - {*_ATTENTION, _LINEAR})
    if foreign:
        raise ConfigError(f"{config.model_type} has unsupported kinds of layers: {', '.join(foreign)}")
    kv_shapes: dict[int, tuple[int, int, int, int]] = {}

    def attend(
        module: Any,  # noqa: ANN401 - a layer of the model
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        **options: Any,  # noqa: ANN401 - passed on by the model
    ) -> torch.Tensor:
        _refuse_foreign(module, options)
        kv_shapes[module.layer_idx] = (key.shape[1], key.shape[3], value.shape[1], value.shape[3])
        return _dense_attention(module, query, key, value, None, **options)[0]

    implementation = model.config._attn_implementation  # noqa: SLF001 - there is no public accessor
    model.set_attn_implementation(_NAME)
    try:
        with _use_attention(attend):
            cache = run_two_tokens(model)
    finally:
        model.set_attn_implementation(implementation)
    linear_layers = [layer for layer, kind in enumerate(kinds) if kind == _LINEAR]
    states = gdn_shape(config, cache, linear_layers)
    kv_shape = only_shape(config, "keys and values", kv_shapes.values())
    return _Shapes(sorted(kv_shapes), linear_layers, kv_shape, states)


def run_two_tokens(model: PreTrainedModel) -> _RecordingCache:
    """Return the cache of a model after two tokens, one after the other."""
    cache = _RecordingCache(model.config.get_text_config())
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    with torch.no_grad():
        for _ in ("prefill", "decode"):
            cache.returned.clear()
            model(token, use_cache=True, logits_to_keep=1, **{cache_argument(model): cache})
    return cache


def cache_argument(model: PreTrainedModel) -> str:
    """Return the name of a model's argument for its cache, which changed in `transformers` 5.24."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def only_shape(config: Any, kept: str, shapes: Iterable[Shape]) -> Shape:  # noqa: ANN401 - of `transformers`
    """Return the shape of what all layers of a kind keep, where it is the same."""
    found = {*shapes}
    if len(found) != 1:
        raise ConfigError(
            f"{config.model_type} has layers with {len(found)} shapes of {kept}; there must be one"
        )
    return found.pop()


def gdn_shape(
    config: Any,  # noqa: ANN401 - a configuration of `transformers`
    cache: _RecordingCache,
    layers: list[int],
) -> tuple[int, int, int, int, int] | None:
    """Return the shape of states for `GDNPool`; None without linear layers."""
    shapes = [_state_shape(cache.layers[layer]) for layer in layers]
    if cache.returned != {*layers}:
        raise ConfigError(
            f"{config.model_type} writes to recurrent states in place when it decodes, which is not "
            "supported; layers must pass them back to the cache, as Gated DeltaNet does"
        )
    return only_shape(config, "states", shapes) if layers else None


def _state_shape(layer: Any) -> tuple[int, int, int, int, int]:  # noqa: ANN401 - a cache layer of `transformers`
    """Return value heads, their K and V dimensions, channels and taps of the convolution for a `GDNPool`."""
    conv_state, recurrent_state = layer.conv_states[0], layer.recurrent_states[0]
    if layer.number_of_states != 1 or recurrent_state is None or recurrent_state.ndim != 4:  # noqa: PLR2004
        raise ConfigError("a linear-attention layer has other states than Gated DeltaNet")
    heads, k_dim, v_dim = recurrent_state.shape[1:]
    return (heads, k_dim, v_dim, conv_state.shape[1], layer.conv_kernel_size[0])


def _refuse_foreign(module: Any, options: dict[str, Any]) -> None:  # noqa: ANN401 - a layer of the model
    """Raise if a model uses an attention option that is not supported."""
    foreign = [name for name in _FOREIGN if options.get(name) is not None]
    if options.get("dropout"):
        foreign.append("dropout")
    if not options.get("is_causal", getattr(module, "is_causal", True)):
        foreign.append("non-causal attention")
    if foreign:
        raise ConfigError(f"attention over a pool does not support {', '.join(foreign)}")


@contextmanager
def _use_attention(attend: Attend) -> Iterator[None]:
    """Set the attention function for the length of a block."""
    token = _ATTEND.set(attend)
    try:
        yield
    finally:
        _ATTEND.reset(token)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,  # noqa: ANN401 - passed on by the model
) -> tuple[torch.Tensor, None]:
    """Compute the attention "kvpool": over the pool while a `PooledModel` runs, else PyTorch's."""
    attend = _ATTEND.get()
    if attend is None:
        return _dense_attention(module, query, key, value, attention_mask, **options)
    return attend(module, query, key, value, **options), None


def _dense_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,  # noqa: ANN401 - passed on by the model
) -> tuple[torch.Tensor, None]:
    """Compute attention over the tensors that the model passes."""
    softcap, sinks = options.get("softcap"), options.get("s_aux")
    if softcap is None and sinks is None:
        output: torch.Tensor
        output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        return output, None
    scale = options.get("scaling")
    out = plain_attention(query, key, value, attention_mask, scale=scale, softcap=softcap, sinks=sinks)
    return out.transpose(1, 2).contiguous(), None


def _mask(*args: Any, **options: Any) -> torch.Tensor | None:  # noqa: ANN401 - those of `sdpa_mask`
    """Return the mask of "kvpool": none while a `PooledModel` runs, as the plan determines it."""
    return sdpa_mask(*args, **options) if _ATTEND.get() is None else None


AttentionInterface.register(_NAME, _attention)
AttentionMaskInterface.register(_NAME, _mask)
