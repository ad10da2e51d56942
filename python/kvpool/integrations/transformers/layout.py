"""What the layers of a model keep: which of them have keys and values or states, and of which shapes.

Configurations name these differently, so that three tokens are run through the model with the cache that
`transformers` itself would use, and what its layers write is read.
"""

from __future__ import annotations

import inspect
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from transformers import DynamicCache, cache_utils
from transformers.cache_utils import (
    Cache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
)
from typing_extensions import override

from kvpool.errors import ConfigError, KvPoolError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from transformers import PreTrainedModel

__all__ = [
    "CacheLayers",
    "RecordingCache",
    "cache_argument",
    "cache_layers",
    "call",
    "gdn_shape",
    "name_of",
    "only_shape",
    "run_tokens",
    "some_tokens",
]

Shape = TypeVar("Shape")

_DUMMY: Any = getattr(cache_utils, "DummyLayer", None)
"""The place in a cache of a layer that keeps nothing, which is not in all versions."""

_LAYER_KINDS = {
    "chunked_attention": "attends within chunks of the prompt",
    "conv": "is a convolution without a recurrent state",
    "hybrid": "has both attention and a recurrent state",
    "hybrid_sliding": "has both attention and a recurrent state",
    "indexed_attention": "chooses the keys that it attends to with an index (sparse attention)",
    "dummy": "keeps no keys and values of its own: it shares those of another layer, or has no attention",
}
"""What layers that are not supported do, by their kind (`layer_types`)."""


def name_of(model: PreTrainedModel) -> str:
    """Return how a message names a model: by its type."""
    config: Any = model.config
    text: Any = config.get_text_config(decoder=True)
    return str(text.model_type or config.model_type)


def cache_argument(model: PreTrainedModel) -> str:
    """Return the name of a model's argument for its cache, which changed in `transformers` 5.24.

    Raises:
        ConfigError: If the model takes no cache.
    """
    parameters = inspect.signature(model.forward).parameters
    for name in ("cache", "past_key_values"):
        if name in parameters:
            return name
    others = [name for name in ("state", "cache_params") if name in parameters]
    has = f"; it keeps its state in {others[0]!r}, in a form of its own" if others else ""
    raise ConfigError(f"{name_of(model)} takes no cache of keys and values{has}")


class CacheLayers(NamedTuple):
    """The layers of a model, as the cache of `transformers` keeps them.

    Attributes:
        windows: For each layer with keys and values the tokens that its cache keeps, None for all.
        linear: Layers with a state instead.
        shared: Layers that keep nothing: they have no attention, or attend to what another layer keeps.
    """

    windows: dict[int, int | None]
    linear: list[int]
    shared: list[int]


def cache_layers(model: PreTrainedModel) -> CacheLayers:
    """Return the layers of a model by what they keep.

    Raises:
        ConfigError: If the model has an encoder, or a layer keeps what the pools have no place for.
    """
    config: Any = model.config.get_text_config(decoder=True)
    if model.config.is_encoder_decoder:
        raise ConfigError(
            f"{name_of(model)} has an encoder: its layers also attend to the encoder's output, which is not "
            "supported"
        )
    with refused(model):
        layers: list[Any] = DynamicCache(config=config).layers
    kinds = _kinds(config, len(layers))
    # Before 5.22 the cache ends before layers at the end that share.
    found = CacheLayers({}, [], [*range(len(layers), config.num_hidden_layers)])
    for number, layer in enumerate(layers):
        if type(layer) is LinearAttentionLayer:
            found.linear.append(number)
        elif type(layer) is DynamicSlidingWindowLayer:
            found.windows[number] = layer.sliding_window
        elif type(layer) is DynamicLayer:
            found.windows[number] = None
        elif _DUMMY is not None and type(layer) is _DUMMY:
            found.shared.append(number)
        else:
            does = _LAYER_KINDS.get(kinds[number], f"is of the kind {kinds[number]!r}")
            raise ConfigError(f"{name_of(model)}: layer {number} {does}, which is not supported")
    return found


def _kinds(config: Any, n: int) -> list[str]:  # noqa: ANN401 - a configuration of `transformers`
    """Return the kind of each layer as the configuration names it."""
    kinds = getattr(config, "layer_types", None) or []
    return [*kinds, *(["full_attention"] * n)][:n]


class RecordingCache(DynamicCache):
    """The cache of `transformers` for a model, which records what the layers pass to it.

    Attributes:
        returned: Layers that passed recurrent states back since the last `start`, instead of writing in
            place.
        updates: How often each layer passed keys and values since then.
    """

    def __init__(self, model: PreTrainedModel, *, strided: bool = False) -> None:
        with refused(model):
            super().__init__(config=model.config.get_text_config(decoder=True))
        self.returned: set[int] = set()
        self.updates: Counter[int] = Counter()
        self._strided = strided

    def start(self) -> None:
        """Forget what was recorded, before a call of the model."""
        self.returned.clear()
        self.updates.clear()

    @override
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.updates[layer_idx] += 1
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if self._strided:  # as views of a pool are, where a token's heads lie side by side
            keys, values = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (keys, values))
        return keys, values

    @override
    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        self.returned.add(layer_idx)
        held: torch.Tensor = super().update_recurrent_state(recurrent_states, layer_idx, *args, **kwargs)
        return held


def some_tokens(model: PreTrainedModel, *shape: int, seed: int = 0) -> torch.Tensor:
    """Return random tokens, int64 on the model's device, none of which has a meaning of its own.

    The random state of PyTorch is not used. Tokens that stand for images, padding or an end are left out:
    their number and place may matter.
    """
    embeddings: Any = model.get_input_embeddings()
    special = {
        token
        for config in (model.config, model.config.get_text_config(decoder=True))
        for name, value in config.to_dict().items()
        if name.endswith(("token_id", "token_index", "token_ids"))
        for token in (value if isinstance(value, list) else [value])
        if isinstance(token, int)
    }
    plain = [token for token in range(min(embeddings.num_embeddings, 1000)) if token not in special] or [0]
    chance = torch.Generator().manual_seed(seed)
    tokens = torch.tensor(plain)[torch.randint(len(plain), shape, generator=chance)]
    return tokens.to(model.device)


def call(model: PreTrainedModel, token_ids: torch.Tensor, cache: object, **options: object) -> torch.Tensor:
    """Run tokens through a model with a cache, and return the logits.

    Raises:
        ConfigError: If the model does not run with that cache.
    """
    arguments = {cache_argument(model): cache, **options}
    with refused(model), torch.no_grad():
        logits: torch.Tensor = model(token_ids, use_cache=True, **arguments).logits
    return logits


@contextmanager
def refused(model: PreTrainedModel) -> Iterator[None]:
    """Turn what a model raises in a block into a `ConfigError` that names the model."""
    try:
        yield
    except (KvPoolError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if isinstance(error, AttributeError) and isinstance(error.obj, Cache):
            does = f"keeps {error.name!r} in a cache of its own class, which is not supported"
        else:
            said = " ".join(str(error).split()).replace(str(RecordingCache), DynamicCache.__name__)
            does = f"does not run with the cache that most models have: {type(error).__name__}: {said}"
        raise ConfigError(f"{name_of(model)} {does}") from error


def run_tokens(model: PreTrainedModel, cache: RecordingCache, n: int = 1) -> None:
    """Run two tokens and then one more of `n` sequences through a model."""
    for seed, length in enumerate((2, 1)):
        cache.start()
        call(model, some_tokens(model, n, length, seed=seed), cache)


def only_shape(model: PreTrainedModel, kept: str, shapes: Mapping[int, Shape]) -> Shape:
    """Return the shape of what all layers of a kind keep, where it is the same.

    Args:
        model: The model.
        kept: What they keep.
        shapes: The shapes, by layer: at least one.
    """
    first, shape = next(iter(shapes.items()))
    for layer, other in shapes.items():
        if other != shape:
            raise ConfigError(
                f"{name_of(model)}: layer {layer} has {kept} of the shape {other}, layer {first} of {shape}; "
                "a pool has one shape for all layers"
            )
    return shape


def gdn_shape(
    model: PreTrainedModel, cache: RecordingCache, layers: list[int]
) -> tuple[int, int, int, int, int] | None:
    """Return the shape of states for `GDNPool`; None without linear layers."""
    shapes = {layer: _state_shape(model, layer, cache.layers[layer]) for layer in layers}
    in_place = sorted({*layers} - cache.returned)
    if in_place:
        raise ConfigError(
            f"{name_of(model)}: layer {in_place[0]} writes to its recurrent state in place when it decodes, "
            "which is not supported; layers must pass it back to the cache, as Gated DeltaNet does"
        )
    return only_shape(model, "states (heads, keys, values, channels, taps)", shapes) if layers else None


def _state_shape(
    model: PreTrainedModel,
    number: int,
    layer: Any,  # noqa: ANN401 - a cache layer of `transformers`
) -> tuple[int, int, int, int, int]:
    """Return value heads, their K and V dimensions, channels and taps of the convolution for a `GDNPool`."""
    states, convolutions = layer.recurrent_states, layer.conv_states
    wrong = ""
    if layer.number_of_states != 1:
        wrong = f"keeps {layer.number_of_states} states"
    elif states[0] is None:
        wrong = "keeps the inputs of a convolution and no recurrent state"
    elif states[0].ndim != 4:  # noqa: PLR2004 - sequences, heads, keys, values
        wrong = f"keeps a recurrent state with {states[0].ndim - 1} dimensions"
    elif convolutions[0] is None:
        wrong = "keeps a recurrent state and no inputs of a convolution"
    if wrong:
        raise ConfigError(
            f"{name_of(model)}: layer {number} {wrong}; supported is one state of heads, keys and values "
            "with one convolution, as Gated DeltaNet has"
        )
    heads, k_dim, v_dim = states[0].shape[1:]
    return (heads, k_dim, v_dim, convolutions[0].shape[1], layer.conv_kernel_size[0])
