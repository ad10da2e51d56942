"""Kinds of a model's layers, from its Hugging Face configuration."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from kvpool.models.fields import brief

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from kvpool.models.fields import Fields

FULL = "full"
"""A layer that attends to all tokens."""
WINDOW = "window"
"""A layer that attends to the last tokens only."""
CHUNK = "chunk"
"""A layer that attends to the tokens of its chunk only."""
LINEAR = "linear"
"""A layer with a state."""
HYBRID = "hybrid"
"""A layer with a state that also attends to all tokens."""
NONE = "none"
"""A layer with neither attention nor a state."""

MOST_LAYERS = 10_000

# Names in `layer_types` and `layers_block_type`, old and new.
PLAIN_KINDS = frozenset(("attention", "chunked_attention", "full_attention", "sliding_attention"))
LINEAR_KINDS = frozenset(("conv", "linear_attention", "mamba", "mamba2"))
_KINDS = {
    "attention": FULL,
    "full_attention": FULL,
    "sliding_attention": WINDOW,
    "chunked_attention": CHUNK,
    "indexed_attention": FULL,
    **dict.fromkeys(LINEAR_KINDS, LINEAR),
    "hybrid": HYBRID,
    "mlp": NONE,
    "moe": NONE,
}

# Nemotron-H's alphabet.
_LETTERS = {"M": LINEAR, "*": FULL, "-": NONE, "E": NONE}

# The period of layers that attend to all tokens; the others have a window or a state.
_WINDOW_EVERY = {
    "cohere2": 4,
    "exaone4": 4,
    "gemma2": 2,
    "gemma3_text": 6,
    "gemma3n_text": 5,
    "gemma4_text": 6,
    "gpt_oss": 2,
    "olmo3": 4,
}
_LINEAR_EVERY = {"qwen3_next": 4, "qwen3_5_text": 4, "qwen3_5_moe_text": 4}

# Models with a window that is off unless the configuration says otherwise.
_WINDOW_OFF = frozenset(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3"))


def unknown_kinds(listed: list[Any], known: Collection[str]) -> list[str]:
    """Return the unknown kinds of layers, for a message."""
    return sorted({brief(kind) for kind in listed if not isinstance(kind, str) or kind not in known})


def layer_kinds(fields: Fields) -> list[str]:
    """Return the kind of each layer: listed in the configuration, or by the rule of the model type.

    Raises:
        ConfigError: If a kind is unknown, or the kinds of layers cannot be determined.
    """
    name = next((name for name in ("layer_types", "layers_block_type") if fields.entries(name)), None)
    kinds = _RULES.get(fields.model_type, _by_window)(fields) if name is None else _listed(fields, name)
    total = fields.optional("num_hidden_layers", most=MOST_LAYERS)
    if total is not None and total != len(kinds):
        raise fields.error(f"lists the kinds of {len(kinds)} layers and has num_hidden_layers {total}")
    if len(kinds) > MOST_LAYERS:
        raise fields.error(f"lists the kinds of {len(kinds):,} layers; at most {MOST_LAYERS:,} are supported")
    return kinds


def _listed(fields: Fields, name: str) -> list[str]:
    listed = fields.entries(name)
    unknown = unknown_kinds(listed, _KINDS)
    if unknown:
        raise fields.error(f"has unknown kinds in {name}: {', '.join(unknown)}")
    kinds = [_KINDS[kind] for kind in listed]
    if fields.model_type == "zamba2":
        return [HYBRID if kind in {FULL, HYBRID} else kind for kind in kinds]
    return kinds


def _layers(fields: Fields) -> int:
    return fields.count("num_hidden_layers", "n_layer", "n_layers", most=MOST_LAYERS)


def _every(fields: Fields, period: int, others: str) -> list[str]:
    """Return layers of which the last of each `period` attends to all tokens."""
    return [others if (layer + 1) % period else FULL for layer in range(_layers(fields))]


def _by_window(fields: Fields) -> list[str]:
    """Return attention in every layer, with a window if the configuration has one and does not disable it."""
    total, values = _layers(fields), fields.values
    if not values.get("sliding_window") or values.get("use_sliding_window") is False:
        return [FULL] * total
    if "use_sliding_window" not in values and fields.model_type in _WINDOW_OFF:
        return [FULL] * total
    first = fields.optional("max_window_layers", least=0) if "use_sliding_window" in values else 0
    return [WINDOW if layer >= (first or 0) else FULL for layer in range(total)]


def _by_pattern(fields: Fields) -> list[str]:
    if fields.model_type == "exaone4" and fields.values.get("sliding_window") is None:
        return [FULL] * _layers(fields)
    pattern = fields.values.get("sliding_window_pattern")
    if isinstance(pattern, str) and re.fullmatch("L*G", pattern):
        return _every(fields, len(pattern), WINDOW)
    period = fields.optional("sliding_window_pattern") or _WINDOW_EVERY[fields.model_type]
    return _every(fields, period, WINDOW)


def _by_interval(fields: Fields) -> list[str]:
    period = fields.optional("full_attention_interval") or _LINEAR_EVERY[fields.model_type]
    return _every(fields, period, LINEAR)


def _llama4(fields: Fields) -> list[str]:
    """Return layers that attend within a chunk, and to all tokens those without rotary embeddings."""
    rotary = fields.numbers("no_rope_layers", 1)
    if rotary:
        return [CHUNK if flag else FULL for flag in rotary]
    return _every(fields, fields.optional("no_rope_layer_interval") or 4, CHUNK)


def _jamba(fields: Fields) -> list[str]:
    period, offset = fields.count("attn_layer_period"), fields.optional("attn_layer_offset", least=0)
    return [FULL if layer % period == offset else LINEAR for layer in range(_layers(fields))]


def _by_indices(fields: Fields, name: str, kind: str) -> list[str]:
    """Return layers with states, of which the listed ones attend too, or instead."""
    total = _layers(fields)
    listed = fields.numbers(name, total - 1)
    if not listed:
        raise fields.error(f"needs layer_types or {name}, and the configuration does not have it")
    return [kind if layer in listed else LINEAR for layer in range(total)]


def _nemotron_h(fields: Fields) -> list[str]:
    pattern = fields.values.get("hybrid_override_pattern")
    if not isinstance(pattern, str) or not set(pattern) <= set(_LETTERS):
        raise fields.error(
            f"needs layers_block_type or a hybrid_override_pattern of {' '.join(_LETTERS)}, "
            f"not {brief(pattern)}"
        )
    return [_LETTERS[letter] for letter in pattern]


def _kimi(fields: Fields) -> list[str]:
    """Return layers of which `linear_attn_config` lists those with attention, from 1 on."""
    total = _layers(fields)
    inner = fields.inner("linear_attn_config")
    attending = set(inner.numbers("full_attn_layers", total))
    linear = set(inner.numbers("kda_layers", total))
    if attending & linear or attending | linear != set(range(1, total + 1)):
        raise fields.error(f"has linear_attn_config lists that do not name each of {total} layers once")
    return [FULL if layer + 1 in attending else LINEAR for layer in range(total)]


def _lfm2(fields: Fields) -> list[str]:
    listed = fields.numbers("full_attn_idxs", _layers(fields) - 1)
    if not listed:
        raise fields.error("needs layer_types or full_attn_idxs, and the configuration does not have it")
    return [FULL if layer in listed else LINEAR for layer in range(_layers(fields))]


def _granite(fields: Fields) -> list[str]:
    raise fields.error("needs layer_types, and the configuration does not have it")


_RULES: dict[str, Callable[[Fields], list[str]]] = {
    **dict.fromkeys(_WINDOW_EVERY, _by_pattern),
    **dict.fromkeys(_LINEAR_EVERY, _by_interval),
    "llama4_text": _llama4,
    "jamba": _jamba,
    "bamba": lambda fields: _by_indices(fields, "attn_layer_indices", FULL),
    "zamba2": lambda fields: _by_indices(fields, "hybrid_layer_ids", HYBRID),
    "nemotron_h": _nemotron_h,
    "falcon_h1": lambda fields: [HYBRID] * _layers(fields),
    "granitemoehybrid": _granite,
    "kimi_linear": _kimi,
    "lfm2": _lfm2,
    "lfm2_moe": _lfm2,
}
