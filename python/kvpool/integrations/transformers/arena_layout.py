"""The layout of what `transformers` keeps for a model: of `DynamicCache` after a few tokens.

It differs from that of engines (`kvpool.models`): K comes before V in recurrent states, convolutions have one
input more, index keys have the model's data type, and a chunk is kept as a window. Masks begin their chunks
behind the padding of each sequence, which a cache is not told.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import cache_utils
from typing_extensions import override

from kvpool._kvpool import CacheLayout, Group, Plane
from kvpool.errors import ConfigError
from kvpool.integrations.transformers.layout import RecordingCache, call, name_of, run_tokens, some_tokens

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from kvpool.typing import GroupKind

__all__ = ["kept_layout"]

# Not all of them are in all versions.
_SERVED = [
    getattr(cache_utils, name, None)
    for name in (
        "DynamicLayer",
        "DynamicSlidingWindowLayer",
        "DynamicIndexedLayer",
        "LinearAttentionLayer",
        "LinearAttentionAndFullAttentionLayer",
        "LinearAttentionAndSlidingWindowAttentionLayer",
    )
]

# Kind, tokens, stride and planes: what layers of a group have in common.
_Form = tuple["GroupKind", "int | None", int, tuple[Plane, ...]]


def kept_layout(model: PreTrainedModel, page_size: int) -> CacheLayout:
    """Return the layout of what a model keeps.

    Args:
        model: A causal language model, in evaluation mode. A few tokens are run through it.
        page_size: Tokens of a page.

    Raises:
        ConfigError: If a layer keeps something else, or the model does not run with the cache that most
            models have.
    """
    if model.config.is_encoder_decoder:
        raise ConfigError(f"{name_of(model)} has an encoder, whose output is not a part of a layout")
    cache = _Probe(model)
    layers = len(cache.layers)
    run_tokens(model, cache)
    if len(cache.layers) > layers:
        raise ConfigError(
            f"{name_of(model)} adds {len(cache.layers) - layers} layers to the {layers} of its cache as it "
            "runs (it runs layers several times, say)"
        )
    found: dict[_Form, list[int]] = {}
    for number in range(layers):
        for form in _forms(model, cache, number):
            found.setdefault(form, []).append(number)
    if not found:
        raise ConfigError(f"{name_of(model)} keeps nothing in the cache of transformers")
    kernels = [plane.shape[-1] for *_, planes in found for plane in planes if plane.name == "conv"]
    if kernels:
        _check_inputs(model, max(kernels) + 2)
    aliases = _aliases(model)
    groups: list[Group] = []
    for (kind, tokens, stride, planes), numbers in found.items():
        same = sum(group.kind == kind for group in groups)
        groups.append(
            Group(
                kind if same == 0 else f"{kind}_{same + 1}",
                kind,
                numbers,
                planes,
                tokens=tokens,
                stride=stride,
                aliases={reader: layer for reader, layer in aliases.items() if layer in numbers}
                if kind != "state"
                else None,
            )
        )
    return CacheLayout(groups, page_size=page_size, model=name_of(model))


class _Probe(RecordingCache):
    """A cache that also records how many inputs a layer passes to it for a convolution."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self.inputs: dict[int, int] = {}

    @override
    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        self.inputs[layer_idx] = conv_states.shape[-1]
        found: torch.Tensor = super().update_conv_state(conv_states, layer_idx, *args, **kwargs)
        return found


def _check_inputs(model: PreTrainedModel, tokens: int) -> None:
    """Check that layers pass the inputs of all tokens to the cache: it counts them there."""
    cache = _Probe(model)
    call(model, some_tokens(model, 1, tokens), cache)
    for number, inputs in cache.inputs.items():
        if inputs != tokens:
            raise ConfigError(
                f"{name_of(model)}: layer {number} passes {inputs} inputs of its convolution to the cache "
                f"for {tokens} tokens; it must pass all, by which a cache counts tokens"
            )


def _forms(model: PreTrainedModel, cache: RecordingCache, number: int) -> list[_Form]:
    """Return what a layer keeps: attention, a state, both, or nothing."""
    layer: Any = cache.layers[number]
    named = f"{name_of(model)}: layer {number}"
    forms: list[_Form] = []
    if getattr(layer, "keys", None) is not None:
        if cache.updates[number] != 1:
            raise ConfigError(
                f"{named} passes keys and values to the cache {cache.updates[number]} times in a forward pass"
            )
        forms.append(_attention(layer, named))
    elif hasattr(layer, "is_sliding"):
        raise ConfigError(f"{named} keeps nothing of three tokens, and may keep some of others")
    if hasattr(layer, "conv_states"):
        forms.append(_state(layer, named))
    if getattr(layer, "compressed_kv", None) is not None:
        forms += _compressed(layer)
    elif forms and type(layer) not in _SERVED:
        raise ConfigError(
            f"{named} keeps its tokens in a {type(layer).__name__}, which an arena cache does not serve"
        )
    return forms


def _attention(layer: Any, named: str) -> _Form:  # noqa: ANN401 - a cache layer of `transformers`
    """Return what a layer keeps of each token."""
    window = layer.sliding_window if layer.is_sliding else None
    planes = [_plane("k", layer.keys, 2)]
    if layer.values is not layer.keys:
        planes.append(_plane("v", layer.values, 2))
    if getattr(layer, "is_indexer_initialized", False):
        planes.append(_plane("index_k", layer.indexer_keys, 1))
    if getattr(layer, "indexer_position_ids", None) is not None:
        raise ConfigError(f"{named} keeps positions beside its index, which have no place in a layout")
    return ("full" if window is None else "window", window, 1, tuple(planes))


def _state(layer: Any, named: str) -> _Form:  # noqa: ANN401 - a cache layer of `transformers`
    """Return what a layer keeps of each request."""
    convolution, recurrent = layer.conv_states, layer.recurrent_states
    if len(convolution) > 1:
        raise ConfigError(f"{named} has {len(convolution)} convolutions; a layout has one for a layer")
    if convolution[0] is None:
        raise ConfigError(
            f"{named} passes no inputs of a convolution to the cache, which tell how many tokens there are"
        )
    kept = (("conv", convolution[0]), ("recurrent", recurrent[0]))
    planes = tuple(Plane(name, x.dtype, x.shape[1:]) for name, x in kept if x is not None)
    return ("state", None, 1, planes)


def _compressed(layer: Any) -> list[_Form]:  # noqa: ANN401 - a cache layer of DeepSeek V4
    """Return the entries of a layer that compresses tokens, and the tokens that it has not compressed yet."""
    rate = layer.compress_rate
    chain: list[Plane] = []
    ring: list[Plane] = []
    for name, entries in layer.compressed_kv.items():
        chain.append(_plane(name, entries, 1))
        for of, waiting in (("kv", layer.buffer_kv[name]), ("gate", layer.buffer_gate[name])):
            ring.append(Plane(f"{name}_{of}", waiting.dtype, (rate, waiting.shape[2])))
            if hasattr(layer, "overlap_kv"):
                ring.append(Plane(f"{name}_overlap_{of}", waiting.dtype, (rate, entries.shape[2])))
    return [("full", None, rate, tuple(chain)), ("state", None, 1, tuple(ring))]


def _plane(name: str, states: torch.Tensor, tokens_dim: int) -> Plane:
    """Return the plane of `[n, ..., tokens, elements]`, without the sequences and the tokens."""
    return Plane(name, states.dtype, [*states.shape[1:tokens_dim], *states.shape[tokens_dim + 1 :]])


def _aliases(model: PreTrainedModel) -> dict[int, int]:
    """Return which layers attend to what another keeps: the last of their kind that keeps it."""
    config: Any = model.config.get_text_config(decoder=True)
    kinds = getattr(config, "layer_types", None) or []
    modes = getattr(config, "kv_sharing_modes", None)
    if modes is None:  # in older versions a number of layers at the end
        shared = getattr(config, "num_kv_shared_layers", None) or 0
        modes = [None] * (len(kinds) - shared) + ["reuse"] * shared
    sources: dict[str, int] = {}
    aliases: dict[int, int] = {}
    for number, (mode, kind) in enumerate(zip(modes, kinds, strict=False)):
        if mode != "reuse":
            sources[kind] = number
        elif kind in sources:
            aliases[number] = sources[kind]
    return aliases
