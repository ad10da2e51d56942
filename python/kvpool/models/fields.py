"""The fields of a model's Hugging Face configuration."""

from __future__ import annotations

import reprlib
from typing import Any

from kvpool.errors import ConfigError

MOST_INT32 = 2**31 - 1
"""The largest value of slots, pages and the fields of a configuration."""

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
"""Defaults of the configuration classes of `transformers`, which published files omit."""

_BRIEF = reprlib.Repr()
_BRIEF.maxlevel, _BRIEF.maxstring = 2, 80


def brief(value: object) -> str:
    """Format a value of a configuration for a message: in one line, shortened if it is long."""
    return _BRIEF.repr(value)


class Fields:
    """Numbers of a configuration, by any of their names.

    Attributes:
        values: The configuration.
        model_type: Model type of the configuration.
        notes: Defaults and assumptions.
    """

    def __init__(self, values: dict[str, Any], model_type: str) -> None:
        self.values = values
        self.model_type = model_type
        self.notes: list[str] = []

    def error(self, message: str) -> ConfigError:
        """Create an error about this model."""
        return ConfigError(f"model_type {self.model_type!r} {message}")

    def count(self, *names: str, most: int = MOST_INT32) -> int:
        """Read a number of at least 1.

        Raises:
            ConfigError: If the number is missing or invalid.
        """
        found = self.optional(*names, most=most)
        if found is None:
            raise self.error(f"needs {' or '.join(names)}, and the configuration does not have it")
        return found

    def optional(self, *names: str, least: int = 1, most: int = MOST_INT32) -> int | None:
        """Read a number; if it is missing or null, return the model type's default or None.

        Raises:
            ConfigError: If the value is not a number from `least` to `most`.
        """
        for name in names:
            value = self.values.get(name)
            # Some files have "auto" for a value that follows from others.
            if value is None or value == "auto":
                continue
            if not isinstance(value, int) or isinstance(value, bool):
                raise self.error(f"has {name} {brief(value)}; it must be an integer")
            if not least <= value <= most:
                raise self.error(f"has {name} {brief(value)}; it must be between {least} and {most:,}")
            return value
        defaults = DEFAULTS.get(self.model_type, {})
        found = next(((name, defaults[name]) for name in names if name in defaults), None)
        if found is None or found[0] in self.values:
            return None
        note = f"{found[0]} is not in the configuration: {found[1]}, the default of {self.model_type}"
        if note not in self.notes:
            self.notes.append(note)
        return found[1]

    def entries(self, name: str) -> list[Any]:
        """Read a list; empty if it is missing or null.

        Raises:
            ConfigError: If the value is not a list.
        """
        value = self.values.get(name)
        if value is not None and not isinstance(value, list):
            raise self.error(f"has {name} {brief(value)}; it must be a list")
        return value or []

    def inner(self, name: str) -> Fields:
        """Read an object of fields.

        Raises:
            ConfigError: If the value is missing or not an object.
        """
        value = self.values.get(name)
        if not isinstance(value, dict):
            raise self.error(f"has {name} {brief(value)}; it must be an object")
        return Fields(value, self.model_type)

    def numbers(self, name: str, most: int) -> list[int]:
        """Read a list of numbers from 0 to `most`; empty if it is missing or null.

        Raises:
            ConfigError: If the value is not a list of such numbers.
        """
        found = self.entries(name)
        for value in found:
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
                raise self.error(f"has {brief(value)} in {name}; it must be between 0 and {most:,}")
        return found
