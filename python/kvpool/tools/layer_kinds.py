"""Which layer of a model does what, from its Hugging Face configuration."""

from __future__ import annotations

import re
import reprlib
from typing import TYPE_CHECKING, Any

from kvpool.errors import ConfigError
from kvpool.tools.pool_bytes import MOST_INT32

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

FULL = "full"
"""Attends to all tokens."""
WINDOW = "window"
"""Attends to the last tokens only."""
LINEAR = "linear"
"""Keeps a state."""
HYBRID = "hybrid"
"""Keeps a state and attends to all tokens."""
NONE = "none"
"""Keeps nothing."""

MOST_LAYERS = 10_000

# As configurations call them, in `layer_types` or `layers_block_type`, old names and new.
PLAIN_KINDS = frozenset(("attention", "chunked_attention", "full_attention", "sliding_attention"))
LINEAR_KINDS = frozenset(("linear_attention", "mamba", "mamba2"))
_KINDS = {
    "attention": FULL,
    "full_attention": FULL,
    "sliding_attention": WINDOW,
    "chunked_attention": WINDOW,
    **dict.fromkeys(LINEAR_KINDS, LINEAR),
    "hybrid": HYBRID,
    "mlp": NONE,
    "moe": NONE,
}

# Nemotron-H's alphabet.
_LETTERS = {"M": LINEAR, "*": FULL, "-": NONE, "E": NONE}

# Every so many layers one attends to all tokens, and the others to a window or with a state.
_WINDOW_EVERY = {
    "cohere2": 4,
    "exaone4": 4,
    "gemma2": 2,
    "gemma3_text": 6,
    "gemma3n_text": 5,
    "gemma4_text": 6,
}
_WINDOW_EVERY |= {"gpt_oss": 2, "olmo3": 4}
_LINEAR_EVERY = {"qwen3_next": 4, "qwen3_5_text": 4, "qwen3_5_moe_text": 4}

# Models with a window that is off unless the configuration says otherwise.
_WINDOW_OFF = frozenset(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3"))

DEFAULTS: dict[str, dict[str, int]] = {
    "gemma": {"head_dim": 256},
    "gemma2": {"head_dim": 256, "sliding_window": 4096},
    "gemma3_text": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
        "sliding_window": 4096,
    },
    "cohere2": {"sliding_window": 4096},
    "ernie4_5": {"head_dim": 128},
    "exaone4": {"sliding_window": 4096},
    "gemma3n_text": {"num_kv_shared_layers": 15, "sliding_window": 512},
    "gemma4_text": {"global_head_dim": 512, "sliding_window": 512},
    "gpt_oss": {"head_dim": 64, "num_key_value_heads": 8, "sliding_window": 128},
    "llama4_text": {"attention_chunk_size": 8192, "head_dim": 128},
    "olmo3": {"sliding_window": 4096},
    "qwen3": {"head_dim": 128},
    "qwen3_moe": {"num_key_value_heads": 4},
    "qwen3_next": {"head_dim": 256, "linear_conv_kernel_dim": 4},
    "qwen3_5_text": {"head_dim": 256, "linear_conv_kernel_dim": 4},
    "qwen3_5_moe_text": {"head_dim": 256, "linear_conv_kernel_dim": 4},
    "jamba": {"attn_layer_period": 8, "attn_layer_offset": 4},
}
"""What published files leave out because the configuration class of `transformers` has it."""


_BRIEF = reprlib.Repr()
_BRIEF.maxlevel, _BRIEF.maxstring = 2, 80


def brief(value: object) -> str:
    """A value of a configuration for a message: in one line, and not all of it if it is long."""
    return _BRIEF.repr(value)


def unknown_kinds(listed: list[Any], known: Collection[str]) -> list[str]:
    """Those kinds of layers that are not known, for a message."""
    return sorted({brief(kind) for kind in listed if not isinstance(kind, str) or kind not in known})


class Fields:
    """Numbers of a configuration, by whichever of their names is there.

    Attributes:
        values: The configuration.
        model_type: Its model type.
        notes: What was taken for granted.
    """

    def __init__(self, values: dict[str, Any], model_type: str) -> None:
        self.values = values
        self.model_type = model_type
        self.notes: list[str] = []

    def error(self, message: str) -> ConfigError:
        """An error about this model."""
        return ConfigError(f"model_type {self.model_type!r} {message}")

    def count(self, *names: str, most: int = MOST_INT32) -> int:
        """A number of at least 1.

        Raises:
            ConfigError: It is missing, or no such number.
        """
        found = self.optional(*names, most=most)
        if found is None:
            raise self.error(f"needs {' or '.join(names)}, and the configuration does not have it")
        return found

    def optional(self, *names: str, least: int = 1, most: int = MOST_INT32) -> int | None:
        """A number, or None if it is missing or null; for one that files leave out, what is then meant.

        Raises:
            ConfigError: It is no number from `least` to `most`.
        """
        for name in names:
            value = self.values.get(name)
            # "auto" is how some files say that it follows from others.
            if value is None or value == "auto":
                continue
            if not isinstance(value, int) or isinstance(value, bool):
                raise self.error(f"has a {name} that is no count: {brief(value)}")
            if not least <= value <= most:
                raise self.error(f"has {name} {brief(value)}; it must be between {least} and {most:,}")
            return value
        defaults = DEFAULTS.get(self.model_type, {})
        found = next(((name, defaults[name]) for name in names if name in defaults), None)
        if found is None or found[0] in self.values:
            return None
        note = f"{found[0]} is not in the configuration: {found[1]}, which {self.model_type} has by default"
        if note not in self.notes:
            self.notes.append(note)
        return found[1]

    def entries(self, name: str) -> list[Any]:
        """A list; empty if it is missing or null.

        Raises:
            ConfigError: It is no list.
        """
        value = self.values.get(name)
        if value is not None and not isinstance(value, list):
            raise self.error(f"has {name} {brief(value)}; it must be a list")
        return value or []

    def numbers(self, name: str, most: int) -> list[int]:
        """A list of numbers from 0 to `most`; empty if it is missing or null.

        Raises:
            ConfigError: It is no such list.
        """
        found = self.entries(name)
        for value in found:
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
                raise self.error(f"has {brief(value)} in {name}; it must be between 0 and {most:,}")
        return found


def layer_kinds(fields: Fields) -> list[str]:
    """The kind of each layer: listed in the configuration, or by the rule of its model type.

    Raises:
        ConfigError: A kind is unknown, or nothing says which layers are of which.
    """
    name = next((name for name in ("layer_types", "layers_block_type") if fields.entries(name)), None)
    kinds = _RULES.get(fields.model_type, _by_window)(fields) if name is None else _listed(fields, name)
    total = fields.optional("num_hidden_layers", most=MOST_LAYERS)
    if total is not None and total != len(kinds):
        raise fields.error(f"lists the kinds of {len(kinds)} layers and has num_hidden_layers {total}")
    if len(kinds) > MOST_LAYERS:
        raise fields.error(f"lists the kinds of {len(kinds):,} layers; there can be {MOST_LAYERS:,}")
    return kinds


def _listed(fields: Fields, name: str) -> list[str]:
    listed = fields.entries(name)
    unknown = unknown_kinds(listed, _KINDS)
    if unknown:
        raise fields.error(f"has kinds in {name} that kvpool does not know: {', '.join(unknown)}")
    kinds = [_KINDS[kind] for kind in listed]
    if fields.model_type == "zamba2":
        return [HYBRID if kind in {FULL, HYBRID} else kind for kind in kinds]
    return kinds


def _layers(fields: Fields) -> int:
    return fields.count("num_hidden_layers", "n_layer", "n_layers", most=MOST_LAYERS)


def _every(fields: Fields, period: int, others: str) -> list[str]:
    """Layers of which each last of `period` attends to all tokens."""
    return [others if (layer + 1) % period else FULL for layer in range(_layers(fields))]


def _by_window(fields: Fields) -> list[str]:
    """Attention everywhere: to a window where the configuration has one and does not say that it is off."""
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
    """Layers with rotary embeddings attend within a chunk, those without to everything."""
    rotary = fields.numbers("no_rope_layers", 1)
    if rotary:
        return [WINDOW if flag else FULL for flag in rotary]
    return _every(fields, fields.optional("no_rope_layer_interval") or 4, WINDOW)


def _jamba(fields: Fields) -> list[str]:
    period, offset = fields.count("attn_layer_period"), fields.optional("attn_layer_offset", least=0)
    return [FULL if layer % period == offset else LINEAR for layer in range(_layers(fields))]


def _by_indices(fields: Fields, name: str, kind: str) -> list[str]:
    """Layers with states, of which those named attend, too or instead."""
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
}
