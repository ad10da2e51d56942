"""Reads the KV cache and states of a model from its Hugging Face `config.json`.

This does not need `transformers`: the names of fields, and the rules for kinds of layers that a file does not
list, follow its configuration classes (5.x) and published files. `Model.notes` lists defaults and
assumptions; anything that would be a guess raises `ConfigError`.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from kvpool.errors import ConfigError
from kvpool.models.fields import Fields, brief
from kvpool.models.layer_kinds import (
    CHUNK,
    FULL,
    HYBRID,
    LINEAR,
    PLAIN_KINDS,
    WINDOW,
    layer_kinds,
    unknown_kinds,
)
from kvpool.models.model import Chain, KvLayers, Mla, Model, States

if TYPE_CHECKING:
    from pathlib import Path

ATTENTION_TYPES = frozenset(
    [
        "bloom",
        "cohere",
        "cohere2",
        "ernie4_5",
        "exaone4",
        "falcon",
        "gemma",
        "gemma2",
        "gemma3_text",
        "gemma3n_text",
        "gemma4_text",
        "glm4",
        "glm4_moe",
        "gpt2",
        "gpt_bigcode",
        "gpt_neox",
        "gpt_oss",
        "granite",
        "granitemoe",
        "llama",
        "llama4_text",
        "minimax_m2",
        "mistral",
        "mixtral",
        "olmo2",
        "olmo3",
        "opt",
        "phi",
        "phi3",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_moe",
        "smollm3",
        "stablelm",
        "starcoder2",
    ]
)
"""Supported model types with keys and values, and no states, in their layers."""

MLA_TYPES = frozenset(("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_k2"))
"""Model types with multi-head latent attention in every layer."""

GDN_TYPES = frozenset(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"))
MAMBA2_TYPES = frozenset(("bamba", "falcon_h1", "granitemoehybrid", "nemotron_h", "zamba2"))
MAMBA_TYPES = frozenset(("jamba",))
KDA_TYPES = frozenset(("kimi_linear",))
"""Model types with Kimi Delta Attention in some layers, and latent attention in the others."""

CONV_TYPES = frozenset(("lfm2", "lfm2_moe"))
"""Model types with short convolutions, which have no recurrent state."""

INDEXED_TYPES = frozenset(("deepseek_v32",))
"""Model types with an index key beside the latent vector."""

CHAIN_TYPES = frozenset(("deepseek_v4",))
"""Model types with compressed entries."""

TEXT_CONFIGS = ("text_config", "llm_config", "language_config")
"""Keys of the language model's configuration in multimodal models."""

FOREIGN = [
    "attn_layer_period",
    "attn_type_list",
    "block_configs",
    "compress_ratios",
    "conv_L_cache",
    "index_head_dim",
    "layers_block_type",
    "linear_attn_config",
    "linear_num_value_heads",
    "lru_width",
    "mamba_d_state",
    "rwkv_version",
    "ssm_cfg",
    "ssm_state_size",
    "state_size",
    "time_step_rank",
]
"""Fields that indicate more than keys and values, in unknown model types."""


def read_model(path: Path) -> Model:
    """Read a `config.json`, or the one in the folder `path`.

    Raises:
        ConfigError: If the file is not a JSON object, or the model is not supported.
        OSError: If the file cannot be read.
    """
    if path.is_dir():
        path /= "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not a JSON file: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path} is not a JSON object")
    return parse_model(config)


def parse_model(config: dict[str, Any]) -> Model:
    """Parse a model's configuration.

    Args:
        config: The content of its `config.json`.

    Raises:
        ConfigError: If the model type or a field is missing, or the model is not supported.
    """
    fields = _language_model(config)
    if config.get("is_encoder_decoder") or fields.values.get("is_encoder_decoder"):
        raise fields.error("is an encoder-decoder, whose cross-attention is not supported")
    _refuse_foreign(fields)
    chains = _chains(fields) if fields.model_type in CHAIN_TYPES else ()
    kinds = [WINDOW] * fields.count("num_hidden_layers") if chains else layer_kinds(fields)
    attending = tuple(i for i, kind in enumerate(kinds) if kind in {FULL, WINDOW, CHUNK, HYBRID})
    windowed = tuple(i for i, kind in enumerate(kinds) if kind in {WINDOW, CHUNK})
    if not attending:
        raise fields.error("has no attention layer, so it needs no token slots")
    is_latent = fields.model_type in MLA_TYPES | INDEXED_TYPES | KDA_TYPES
    mla = _mla(fields, attending) if is_latent else None
    attention = () if mla is not None else _attention(fields, kinds, attending)
    kept = {layer for group in attention for layer in group.layers}
    windowed = tuple(layer for layer in windowed if mla is not None or layer in kept)
    window = fields.optional("attention_chunk_size", "sliding_window") if windowed else None
    if window is None:
        windowed = ()
    shared = _shared(fields, kinds, attending, kept) if kept else ()
    _add_drafting_note(fields)
    return Model(
        model_type=fields.model_type,
        layer_num=len(kinds),
        query_head_num=_query_heads(fields),
        attention=attention,
        mla=mla,
        states=_states(fields, kinds),
        windowed=windowed,
        window=window,
        is_chunked=CHUNK in kinds,
        shared=shared,
        index_dim=fields.count("index_head_dim") if fields.model_type in INDEXED_TYPES else 0,
        chains=chains,
        dtype=_dtype(fields, config),
        max_context_len=fields.optional(
            "max_position_embeddings", "n_positions", "model_max_length", "n_ctx"
        ),
        notes=tuple(fields.notes),
    )


def _language_model(config: dict[str, Any]) -> Fields:
    """Return the fields of the language model in a configuration."""
    whole = config.get("model_type")
    inner = next((config[name] for name in TEXT_CONFIGS if isinstance(config.get(name), dict)), None)
    values = config if inner is None else inner
    model_type = values.get("model_type")
    if not model_type:
        raise ConfigError("the configuration has no model_type: is it the config.json of a model?")
    if not isinstance(model_type, str) or not model_type.isprintable():
        raise ConfigError(f"the configuration has an invalid model_type: {brief(model_type)}")
    fields = Fields(values, model_type)
    if inner is not None:
        fields.notes.append(
            f"the language model ({model_type}) of a {brief(whole)} model; its encoders are not counted"
        )
    return fields


def _refuse_foreign(fields: Fields) -> None:
    """Raise for an unknown model type that has more than keys and values."""
    known = ATTENTION_TYPES | MLA_TYPES | GDN_TYPES | MAMBA2_TYPES | MAMBA_TYPES
    known |= KDA_TYPES | CONV_TYPES | INDEXED_TYPES | CHAIN_TYPES
    model_type = fields.model_type
    if model_type in known:
        return
    found = [name for name in FOREIGN if fields.values.get(name) is not None]
    found += unknown_kinds(fields.entries("layer_types"), PLAIN_KINDS)
    if fields.values.get("kv_lora_rank") is not None:
        found.append("kv_lora_rank")
    if found:
        raise fields.error(
            "is not a known model type, and has more than keys and values in every layer "
            f"({', '.join(found)})"
        )
    fields.notes.append(
        f"{model_type} is not a known model type: attention in every layer is assumed, as its fields have "
        "the usual names; check the bytes per token"
    )


def _query_heads(fields: Fields) -> int:
    return fields.count("num_attention_heads", "n_head", "n_heads")


def _attention(fields: Fields, kinds: list[str], attending: tuple[int, ...]) -> tuple[KvLayers, ...]:
    """Return the layers with keys and values, by shape."""
    # The last layers of these models attend to the keys and values of earlier layers.
    shared = fields.optional("num_kv_shared_layers", least=0) or 0
    keeping = tuple(layer for layer in attending if layer < len(kinds) - shared)
    if not keeping:
        raise fields.error(
            f"has num_kv_shared_layers {shared} of {len(kinds)} layers: no layer has keys and values"
        )
    if shared:
        fields.notes.append(
            f"the last {shared} layers use the keys and values of earlier layers and have none"
        )
    heads, dim = _kv_heads(fields), _head_dim(fields)
    others = _own_shapes(fields, kinds, heads)
    groups: dict[tuple[int, int], list[int]] = {}
    for layer in keeping:
        groups.setdefault(others.get(layer, (heads, dim)), []).append(layer)
    return tuple(
        KvLayers(tuple(layers), number, width, number, width) for (number, width), layers in groups.items()
    )


def _shared(
    fields: Fields, kinds: list[str], attending: tuple[int, ...], kept: set[int]
) -> tuple[tuple[int, int], ...]:
    """Return the layers that use the keys and values of another: the last one of their kind that has any."""
    pairs = []
    for layer in attending:
        if layer not in kept:
            of = max((keeper for keeper in kept if kinds[keeper] == kinds[layer]), default=None)
            if of is None:
                raise fields.error(f"has no layer whose keys and values layer {layer} could use")
            pairs.append((layer, of))
    return tuple(pairs)


def _chains(fields: Fields) -> tuple[Chain, ...]:
    """Return the layers with compressed entries. The list has an entry for each drafting layer, too."""
    total = fields.count("num_hidden_layers")
    ratios = fields.numbers("compress_ratios", 1 << 20)[:total]
    if len(ratios) < total:
        raise fields.error(f"has compress_ratios of {len(ratios)} of {total} layers")
    found = sorted({ratio for ratio in ratios if ratio > 1})
    if not found:
        raise fields.error("has compress_ratios of no layer above 1")
    # The finest chain has an index, and entries that overlap.
    index_dim = fields.count("index_head_dim")
    return tuple(
        Chain(
            tuple(layer for layer, of in enumerate(ratios) if of == ratio),
            ratio,
            index_dim if ratio == found[0] else 0,
            overlaps=ratio == found[0],
        )
        for ratio in found
    )


def _own_shapes(fields: Fields, kinds: list[str], heads: int) -> dict[int, tuple[int, int]]:
    """Return the KV heads and head dimension of layers that differ from the rest, which have `heads`."""
    listed = fields.values.get("per_layer_config")
    if listed is not None:
        return _listed_shapes(fields, listed, len(kinds))
    if fields.model_type != "gemma4_text":
        return {}
    if fields.values.get("attention_k_eq_v", False):
        heads = fields.optional("num_global_key_value_heads") or heads
    dim = fields.count("global_head_dim")
    return {layer: (heads, dim) for layer, kind in enumerate(kinds) if kind == FULL}


def _listed_shapes(fields: Fields, listed: object, layer_num: int) -> dict[int, tuple[int, int]]:
    """Return the shapes from `per_layer_config`, which has the fields that differ in a layer."""
    if not isinstance(listed, dict):
        raise fields.error(f"has per_layer_config {brief(listed)}; it must be an object")
    own = {}
    for layer, values in listed.items():
        if re.fullmatch("[0-9]{1,5}", str(layer)) is None or int(layer) >= layer_num:
            raise fields.error(
                f"has {brief(layer)} in per_layer_config; it must be between 0 and {layer_num - 1}"
            )
        if not isinstance(values, dict):
            raise fields.error(
                f"has {brief(values)} for layer {layer} in per_layer_config; it must be an object"
            )
        inner = Fields({**fields.values, **values}, fields.model_type)
        own[int(layer)] = (_kv_heads(inner), _head_dim(inner))
    return own


def _kv_heads(fields: Fields) -> int:
    model_type, values = fields.model_type, fields.values
    is_old_falcon = model_type == "falcon" and not values.get("new_decoder_architecture", False)
    if is_old_falcon or model_type == "gpt_bigcode":
        return 1 if values.get("multi_query", True) else _query_heads(fields)
    found = fields.optional("num_key_value_heads", "num_kv_heads")
    return _query_heads(fields) if found is None else found


def _head_dim(fields: Fields) -> int:
    if fields.model_type == "zamba2":
        # Its attention processes the layer's input concatenated with the embeddings.
        whole, name = 2 * fields.count("hidden_size"), "twice hidden_size"
        return _per_head(fields, "head_dim", name, whole, _query_heads(fields))
    found = fields.optional("head_dim", "attention_head_dim")
    if found is not None:
        return found
    whole = fields.count("hidden_size", "n_embd", "d_model")
    return _per_head(fields, "head_dim", "hidden_size", whole, _query_heads(fields))


def _per_head(fields: Fields, missing: str, name: str, whole: int, heads: int) -> int:
    """Return the head dimension if its field is missing: an equal share of the whole."""
    if whole % heads:
        raise fields.error(f"has no {missing}, and {name} {whole} is not a multiple of its {heads} heads")
    return whole // heads


def _mla(fields: Fields, layers: tuple[int, ...]) -> Mla:
    return Mla(
        layers,
        _query_heads(fields),
        fields.count("kv_lora_rank"),
        fields.count("qk_rope_head_dim"),
        fields.count("qk_nope_head_dim"),
        fields.count("v_head_dim"),
    )


def _states(fields: Fields, kinds: list[str]) -> States | None:
    layers = tuple(i for i, kind in enumerate(kinds) if kind in {LINEAR, HYBRID})
    if not layers:
        return None
    if fields.model_type in GDN_TYPES:
        return States(
            "Gated DeltaNet",
            layers,
            fields.count("linear_num_value_heads"),
            fields.count("linear_key_head_dim"),
            fields.count("linear_value_head_dim"),
            fields.count("linear_num_key_heads"),
            fields.count("linear_conv_kernel_dim"),
        )
    if fields.model_type in KDA_TYPES:
        return _kda(fields, layers)
    if fields.model_type in CONV_TYPES:
        taps = fields.count("conv_L_cache")
        return States("short convolution", layers, 0, 0, 0, 0, taps, fields.count("hidden_size"))
    expand = fields.optional("mamba_expand", "expand") or 2
    inner = fields.optional("mamba_d_ssm") or expand * fields.count("hidden_size")
    taps = fields.count("mamba_d_conv", "conv_kernel")
    if fields.model_type in MAMBA_TYPES:
        return States("Mamba", layers, inner, fields.count("mamba_d_state"), 1, 0, taps)
    heads = fields.count("mamba_n_heads", "mamba_num_heads", "n_mamba_heads")
    width = fields.optional("mamba_d_head", "mamba_head_dim")
    if width is None:
        width = _per_head(fields, "mamba_d_head", "the inner size", inner, heads)
    groups = fields.count("mamba_n_groups", "n_groups", "mamba_ngroups")
    return States(
        "Mamba-2", layers, heads, fields.count("mamba_d_state", "ssm_state_size"), width, groups, taps
    )


def _kda(fields: Fields, layers: tuple[int, ...]) -> States:
    """Return states of Kimi Delta Attention: a convolution for queries, keys and values of every head."""
    if isinstance(fields.values.get("linear_attn_config"), dict):
        fields = fields.inner("linear_attn_config")
    heads, dim = fields.count("linear_num_heads", "num_heads"), fields.count("linear_head_dim", "head_dim")
    taps = fields.count("linear_conv_kernel_dim", "short_conv_kernel_size")
    return States("Kimi Delta Attention", layers, heads, dim, dim, heads, taps, 3 * heads * dim)


def _dtype(fields: Fields, config: dict[str, Any]) -> str | None:
    for values in (fields.values, config):
        for name in ("dtype", "torch_dtype"):
            if isinstance(values.get(name), str):
                return str(values[name]).removeprefix("torch.")
    return None


def _add_drafting_note(fields: Fields) -> None:
    extra = fields.optional("num_nextn_predict_layers", least=0) or fields.optional("num_mtp_layers", least=0)
    if extra:
        fields.notes.append(
            f"{extra} layer{'s' if extra > 1 else ''} for multi-token prediction not counted; drafting "
            "with them needs that many more"
        )
