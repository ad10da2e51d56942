"""Small models of every type that `kvpool plan` knows, and what they keep of a token."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from model_configs import COMMON, SMALL
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from kvpool.integrations.transformers.layout import cache_argument


class StateShapes(NamedTuple):
    """Shapes by layer: keys and values, recurrent states, convolution states."""

    kv: dict[int, tuple[int, ...]]
    recurrent: dict[int, tuple[int, ...]]
    conv: dict[int, tuple[int, ...]]


def state_shapes_of(config: Any) -> StateShapes:  # noqa: ANN401 - a configuration of `transformers`
    """The shapes of the states that a model of random weights keeps for one token."""
    cache = DynamicCache(config=config)
    with torch.no_grad():
        make: Any = AutoModelForCausalLM.from_config
        model = make(config).eval()
        model(torch.ones(1, 1, dtype=torch.int64), use_cache=True, **{cache_argument(model): cache})
    kept = StateShapes({}, {}, {})
    for i, layer in enumerate(cache.layers):
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is not None and values is not None:
            kept.kv[i] = (keys.shape[1], keys.shape[3], values.shape[1], values.shape[3])
        for states, found in (("recurrent_states", kept.recurrent), ("conv_states", kept.conv)):
            if getattr(layer, states, None):
                found[i] = tuple(getattr(layer, states)[0].shape[1:])
    return kept


def small_config(model_type: str) -> Any:  # noqa: ANN401 - a configuration of `transformers`
    values = {**COMMON, **SMALL.get(model_type, {})}
    if model_type in {"bloom", "falcon", "gpt2", "gpt_bigcode", "gpt_neox", "opt"}:
        del values["num_key_value_heads"]  # they have none
    return AutoConfig.for_model(model_type, **values)
