"""What `PooledModel` must know of a model before it makes pools, and what it refuses.

Three tokens are run through the model with the cache and masks that `transformers` itself would use, and
then as a step over the pools does: without masks, and with a cache that keeps nothing.
"""

from __future__ import annotations

import inspect
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from kvpool._kvpool import GDNPool
from kvpool.errors import ConfigError
from kvpool.integrations.transformers import attention
from kvpool.integrations.transformers.bounds import Bounds
from kvpool.integrations.transformers.layout import (
    CacheLayers,
    RecordingCache,
    cache_layers,
    call,
    gdn_shape,
    name_of,
    only_shape,
    some_tokens,
)
from kvpool.integrations.transformers.masks import Masks
from kvpool.integrations.transformers.rotation import check_rotation
from kvpool.integrations.transformers.states import LengthCache, StateCache

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Layout", "call_options", "check_call", "empty_cache", "layout_of", "run_step"]

# Options of an attention function that it applies, or that do not change its result.
_OPTIONS = {
    "scaling",
    "softcap",
    "s_aux",
    "sliding_window",  # which is also the mask's
    "dropout",
    "is_causal",
    "position_ids",
    "cache_position",
    "logits_to_keep",
    "use_cache",
    "return_dict",
    "num_items_in_batch",
}
_OUTPUTS = "output_"
"""The beginning of options that ask for further outputs."""

KVShape = tuple[int, int, int, int]


class Layout(NamedTuple):
    """The layers of a model in pools, and how it is called.

    Attributes:
        attention_layers: The layers with attention, in order: their places in a `KVPool`.
        linear_layers: The layers with states, in order: their places in a `GDNPool`.
        windows: For each attention layer the tokens that a query attends to, itself included; None for all.
        kv_shape: Heads and elements of keys, and of values.
        gdn_shape: The shape of states; None without such layers.
        by_length: Whether the model asks its cache for its length, so that a call has requests of one length.
        takes_positions: Whether it takes the positions of tokens.
        keeps_logits: Whether it takes the tokens to compute logits for.
    """

    attention_layers: dict[int, int]
    linear_layers: dict[int, int]
    windows: list[int | None]
    kv_shape: KVShape
    gdn_shape: tuple[int, int, int, int, int] | None
    by_length: bool
    takes_positions: bool
    keeps_logits: bool


def layout_of(model: PreTrainedModel, longest: int) -> Layout:
    """Find the layers of a model, and refuse what pools cannot serve.

    Args:
        model: The model, which is unchanged afterwards.
        longest: The most tokens of a request.

    Raises:
        ConfigError: If the model does what is not supported; the message says what, and in which layer.
    """
    layers = cache_layers(model)
    check_rotation(model, longest)
    parameters = inspect.signature(model.forward).parameters
    with attention.implemented(model):
        calls = _Calls(model, longest)
        cache = RecordingCache(model)
        calls.run(cache, takes_positions="position_ids" in parameters)
        calls.check(layers)
        attention_layers = sorted(calls.shapes)
        layout = Layout(
            {layer: i for i, layer in enumerate(attention_layers)},
            {layer: i for i, layer in enumerate(layers.linear)},
            [calls.windows[layer] for layer in attention_layers],
            only_shape(model, "keys and values (heads and elements of each)", calls.shapes),
            gdn_shape(model, cache, layers.linear),
            by_length=False,
            takes_positions="position_ids" in parameters,
            keeps_logits="logits_to_keep" in parameters,
        )
        asks = _asks_for_length(model, layout, longest)
        return layout._replace(by_length=asks or not layout.takes_positions)


def check_call(
    model: PreTrainedModel,
    module: Any,  # noqa: ANN401 - a layer of the model
    options: dict[str, Any],
    attention_mask: torch.Tensor | None = None,
) -> int:
    """Return the layer that calls its attention function, if pools support the call.

    Args:
        model: The model.
        module: What calls the function.
        options: The options of the call.
        attention_mask: The mask, where the model was given none.

    Raises:
        ConfigError: If they do not.
    """
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise ConfigError(
            f"{name_of(model)} has attention outside of its layers, in {type(module).__name__}, which is not "
            "supported"
        )
    if attention_mask is not None:
        raise ConfigError(
            f"{name_of(model)}: layer {layer} attends with a mask that the model computes by itself, "
            "which is not supported"
        )
    foreign = [
        name
        for name, value in options.items()
        if value is not None and value is not False and name not in _OPTIONS and not name.startswith(_OUTPUTS)
    ]
    if options.get("dropout"):
        foreign.append("dropout")
    if not options.get("is_causal", getattr(module, "is_causal", True)):
        foreign.append("attention to later tokens")
    if foreign:
        raise ConfigError(
            f"{name_of(model)}: attention over a pool does not support {', '.join(foreign)} (layer {layer})"
        )
    return layer


class _Calls:
    """The calls of the attention function while three tokens run through a model.

    Attributes:
        shapes: Heads and elements of keys and values, by layer.
        windows: The windows of the masks, by layer.
    """

    def __init__(self, model: PreTrainedModel, longest: int) -> None:
        self._model, self._longest = model, longest
        self._masks = Masks(model, longest)
        self._counts: Counter[int] = Counter()
        self.shapes: dict[int, KVShape] = {}
        self.windows: dict[int, int | None] = {}

    def run(self, cache: RecordingCache, *, takes_positions: bool) -> None:
        """Run two tokens and one more, with the cache and the masks of `transformers`."""
        with attention.use(self._attend, self._masks.make):
            for start, length in ((0, 2), (2, 1)):
                cache.start()
                self._counts.clear()
                tokens = some_tokens(self._model, 1, length, seed=start)
                positions = {"position_ids": _positions(tokens, start)} if takes_positions else {}
                call(self._model, tokens, cache, **positions)

    def check(self, layers: CacheLayers) -> None:
        """Refuse layers that do not call their attention function once for all that they keep."""
        named = name_of(self._model)
        for layer, calls in sorted(self._counts.items()):
            if calls > 1:
                raise ConfigError(
                    f"{named}: layer {layer} computes attention {calls} times in a forward pass; a pool "
                    "keeps one set of keys and values for a layer"
                )
        silent = sorted(layers.windows.keys() - self._counts.keys())
        if silent:
            raise ConfigError(
                f"{named}: layer {silent[0]} computes attention by itself, not with the attention functions "
                "of transformers (AttentionInterface), through which it would reach a pool"
            )
        foreign = sorted(self._counts.keys() - layers.windows.keys() - {*layers.shared})
        if foreign:
            raise ConfigError(
                f"{named}: layer {foreign[0]} has attention and no place in the cache of transformers, so "
                "that what it attends to is unknown"
            )
        if not self._counts:
            raise ConfigError(f"{named} has no layer with attention, and so no keys and values for a pool")
        for layer, kept in layers.windows.items():
            window = self.windows[layer]
            if kept is not None and kept < self._longest and (window is None or window > kept):
                attended = "all tokens" if window is None else f"{window} tokens"
                raise ConfigError(
                    f"{named}: the mask of layer {layer} lets a token attend to {attended}, and its cache "
                    f"keeps {kept}: what a token attends to depends on how a prompt is cut into chunks, "
                    f"which is not supported (up to max_context_len={kept} it is)"
                )

    def _attend(
        self,
        module: Any,  # noqa: ANN401 - a layer of the model
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **options: Any,  # noqa: ANN401 - passed on by the model
    ) -> torch.Tensor:
        layer = check_call(self._model, module, options)
        self._counts[layer] += 1
        self.shapes[layer] = (key.shape[1], key.shape[3], value.shape[1], value.shape[3])
        window = self._masks.window(layer, attention_mask)
        if self.windows.setdefault(layer, window) != window:
            raise ConfigError(
                f"{name_of(self._model)}: the mask of layer {layer} has another window when the model decodes"
            )
        return attention.dense_attention(module, query, key, value, attention_mask, **options)


def _positions(token_ids: torch.Tensor, start: int) -> torch.Tensor:
    """Return the positions of the tokens of sequences, from `start` on: int64 `[n, length]`."""
    n, length = token_ids.shape
    return torch.arange(start, start + length, device=token_ids.device).expand(n, -1)


def _asks_for_length(model: PreTrainedModel, layout: Layout, longest: int) -> bool:
    """Run the last tokens of the longest request as a step over pools does, over no earlier ones.

    Returns:
        Whether the model asks its cache for its length.

    Raises:
        ConfigError: If the model does not run so, or has fewer positions.
    """
    n = min(3, longest)
    cache = empty_cache(model, layout, 1, longest - n)
    with Bounds(model, longest):
        run_step(model, layout, some_tokens(model, 1, n), [longest - n], cache)
    return cache.is_asked


def run_step(
    model: PreTrainedModel, layout: Layout, tokens: torch.Tensor, starts: list[int], cache: LengthCache
) -> torch.Tensor:
    """Run tokens as a step over pools does, with attention to each other alone.

    Args:
        model: The model, with the attention "kvpool".
        layout: Its layers.
        tokens: int64 `[n, length]`.
        starts: The position of the first token of each sequence.
        cache: What the model gets as its cache.

    Returns:
        Logits, `[n, length, vocab_size]`.

    Raises:
        ConfigError: If the model does not run so.
    """

    def attend(
        module: Any,  # noqa: ANN401 - a layer of the model
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **options: Any,  # noqa: ANN401 - passed on by the model
    ) -> torch.Tensor:
        check_call(model, module, options, attention_mask)
        return attention.dense_attention(module, query, key, value, None, **options)

    length = tokens.shape[1]
    positions = torch.cat([_positions(tokens[:1], start) for start in starts])
    with attention.use(attend):
        return call(model, tokens, cache, **call_options(layout, positions, length))


def call_options(
    layout: Layout, positions: torch.Tensor, logits_to_keep: int | torch.Tensor
) -> dict[str, object]:
    """Return the arguments of a call of the model that it takes."""
    options: dict[str, object] = {}
    if layout.takes_positions:
        options["position_ids"] = positions
    if layout.keeps_logits:
        options["logits_to_keep"] = logits_to_keep
    return options


def empty_cache(model: PreTrainedModel, layout: Layout, n: int, length: int = 0) -> LengthCache:
    """Return a cache for a step over no pools: with states of its own, all zeros, where the model has states.

    Args:
        model: The model.
        layout: Its layers.
        n: Sequences of the step.
        length: The tokens before, as the model is told.
    """
    if layout.gdn_shape is None:
        return LengthCache(length)
    layers, device = len(layout.linear_layers), str(model.device)
    pool = GDNPool(n, layers, *layout.gdn_shape, device=device, dtype=model.dtype)
    rows = torch.arange(1, n + 1, device=model.device)
    return StateCache(pool, layout.linear_layers, rows, length)
