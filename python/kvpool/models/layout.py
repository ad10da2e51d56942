"""The layout of a model: planes and groups of everything that it keeps for its requests.

The planes are those of serving engines: K and V of each head, the latent vector with the rotated part of the
key behind it (`fused` in `kvpool plan`), an index key as 8-bit floats with a float32 scale for each 128
elements (uint8), recurrent states with V before K, convolution states with one tap fewer than the kernel.
DeepSeek V4's entries of 584 bytes are 448 8-bit floats, 64 bfloat16, and scales; its rings hold what the
compressors have not pooled yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvpool._kvpool import _STORAGE_DTYPES, CacheLayout, Group, Plane
from kvpool.errors import ConfigError
from kvpool.models.model_config import parse_model, read_model
from kvpool.models.sharding import shard, shard_states

if TYPE_CHECKING:
    from kvpool.models.model import Chain, KvLayers, Model, States
    from kvpool.typing import GroupKind

PAGE_SIZE = 16
_INDEX_BLOCK = 128  # elements of an index key with one scale
PACKED_ENTRY = 584
"""Bytes of an entry of DeepSeek V4 in 8 bits."""


def read_layout(  # noqa: PLR0913 - options by name
    config: str | Path | Mapping[str, Any],
    *,
    page_size: int = PAGE_SIZE,
    dtype: str | None = None,
    state_dtype: str = "float32",
    tp: int = 1,
    rank: int = 0,
) -> CacheLayout:
    """Return the layout of a model from its Hugging Face configuration.

    Needs neither PyTorch nor transformers.

    Args:
        config: Path of a `config.json`, or of its folder, or its content.
        page_size: Tokens of a page.
        dtype: Data type of keys, values and latent vectors; None takes the model's. "float8_e4m3fn" and
            "bfloat16" are the forms of DeepSeek V4's entries; the first is the default there.
        state_dtype: Data type of recurrent states. Engines choose it: float32, or that of the model.
        tp: GPUs that share each layer (tensor parallelism).
        rank: Number of this GPU among them.

    Returns:
        The layout. Its `model` is the type of the model, which other models of the same shape have, too.

    Raises:
        ConfigError: If the model is not supported or cannot be divided, or a dtype is none of kvpool's.
        OSError: If the file cannot be read.
    """
    model = parse_model(dict(config)) if isinstance(config, Mapping) else read_model(Path(config))
    return layout_of(model, page_size=page_size, dtype=dtype, state_dtype=state_dtype, tp=tp, rank=rank)


def layout_of(  # noqa: PLR0913 - options by name
    model: Model,
    *,
    page_size: int = PAGE_SIZE,
    dtype: str | None = None,
    state_dtype: str = "float32",
    tp: int = 1,
    rank: int = 0,
) -> CacheLayout:
    """Return the layout of a model; arguments as in `read_layout`.

    Raises:
        ConfigError: If the model cannot be divided, or no dtype is known.
    """
    if not 0 <= rank < tp:
        raise ConfigError(f"rank is {rank}; it must be between 0 and {tp - 1}")
    kept = dtype or model.dtype
    if kept is None:
        raise ConfigError(f"the configuration of {model.model_type} has no dtype; give one")
    for name, value in (("dtype", kept), ("state_dtype", state_dtype)):
        if value not in _STORAGE_DTYPES:
            raise ConfigError(f"{name} is {value!r}; it must be one of {', '.join(_STORAGE_DTYPES)}")
    if model.chains:
        groups = _compressed(model, dtype or "float8_e4m3fn")
    elif model.mla is not None:
        groups = [_latent(model, kept)]
    else:
        groups = _attention(model, kept, tp, rank)
    if model.states is not None:
        conv_dtype = model.dtype if model.dtype in _STORAGE_DTYPES else "bfloat16"
        groups.append(_state(model.states, state_dtype, conv_dtype, tp, rank))
    return CacheLayout(groups, page_size=page_size, model=model.model_type)


def _attention(model: Model, dtype: str, tp: int, rank: int) -> list[Group]:
    """Return a group for each shape of K and V, and for each of full attention, windows and chunks."""
    windowed, shared = set(model.windowed), dict(model.shared)
    limited: GroupKind = "chunk" if model.is_chunked else "window"
    kinds: tuple[GroupKind, ...] = ("full", limited)
    groups: list[Group] = []
    for layers in model.attention:
        for kind in kinds:
            chosen = [layer for layer in layers.layers if (layer in windowed) == (kind == limited)]
            if chosen:
                number = sum(group.kind == kind for group in groups)
                groups.append(
                    Group(
                        kind if number == 0 else f"{kind}_{number + 1}",
                        kind,
                        chosen,
                        _kv_planes(shard(layers, tp), dtype),
                        tokens=model.window if kind == limited else None,
                        aliases={reader: layer for reader, layer in shared.items() if layer in chosen},
                        share=_part(layers.k_head_num, tp, rank),
                    )
                )
    return groups


def _kv_planes(layers: KvLayers, dtype: str) -> list[Plane]:
    return [
        Plane("k", dtype, (layers.k_head_num, layers.k_head_dim)),
        Plane("v", dtype, (layers.v_head_num, layers.v_head_dim)),
    ]


def _part(heads: int, tp: int, rank: int) -> tuple[int, int]:
    """Return the part of heads that a rank has: with more ranks than heads, several have the same."""
    parts = min(heads, tp)
    return rank * parts // tp, parts


def _latent(model: Model, dtype: str) -> Group:
    """Return the latent vectors of all attention layers, which every rank has."""
    assert model.mla is not None  # noqa: S101 - for the type checker
    planes = [Plane("latent", dtype, (model.mla.kv_lora_rank + model.mla.qk_rope_head_dim,))]
    if model.index_dim:
        planes.append(Plane("index_k", "uint8", (_index_bytes(model.index_dim),)))
    return Group("full", "full", model.mla.layers, planes)


def _index_bytes(dim: int) -> int:
    """Return the bytes of an index key: an 8-bit float for each element, and float32 scales."""
    return dim + -(-dim // _INDEX_BLOCK) * 4


def _compressed(model: Model, dtype: str) -> list[Group]:
    """Return the window, the chains and the rings of DeepSeek V4, which every rank has."""
    (layers,) = model.attention
    forms = {
        "float8_e4m3fn": Plane("latent", "uint8", (PACKED_ENTRY,)),
        "bfloat16": Plane("latent", "bfloat16", (layers.k_head_dim,)),
    }
    if dtype not in forms:
        raise ConfigError(f"entries of {model.model_type} are {' or '.join(forms)}, not {dtype}")
    entry = forms[dtype]
    groups = [Group("window", "window", layers.layers, [entry], tokens=model.window)]
    for chain in model.chains:
        planes = [entry]
        if chain.index_dim:
            planes.append(Plane("index_k", "uint8", (_index_bytes(chain.index_dim),)))
        groups.append(Group(f"chain_{chain.ratio}", "full", chain.layers, planes, stride=chain.ratio))
    groups += [_ring(chain, layers.k_head_dim) for chain in model.chains]
    return groups


def _ring(chain: Chain, dim: int) -> Group:
    """Return what a compressor keeps of each request: values and weights of tokens that it still pools."""
    tokens, parts = (2 * chain.ratio, 4) if chain.overlaps else (chain.ratio, 2)
    planes = [Plane("compressor", "float32", (tokens, parts * dim))]
    if chain.index_dim:
        planes.append(Plane("index_compressor", "float32", (tokens, parts * chain.index_dim)))
    return Group(f"ring_{chain.ratio}", "state", chain.layers, planes)


def _state(states: States, dtype: str, conv_dtype: str, tp: int, rank: int) -> Group:
    part = shard_states(states, tp)
    planes = []
    if part.head_num:
        planes.append(Plane("recurrent", dtype, (part.head_num, part.head_v_dim, part.head_k_dim)))
    if part.conv_kernel_size > 1:
        planes.append(Plane("conv", conv_dtype, (part.conv_dim, part.conv_kernel_size - 1)))
    return Group("state", "state", states.layers, planes, share=(rank, tp))
