"""The layout of a model from vLLM's own description of its KV cache."""

from __future__ import annotations

import re
from itertools import groupby
from math import gcd
from typing import TYPE_CHECKING, Any

from kvpool import CacheLayout, Group, Plane
from kvpool.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm.v1.kv_cache_interface import KVCacheConfig

    from kvpool.typing import GroupKind

_STATE_PLANES = {
    1: ("conv",),
    2: ("conv", "recurrent"),
    4: ("conv_q", "conv_k", "conv_v", "recurrent"),
}
"""Names of the arrays of a `MambaSpec`, in its order, by their number."""


def cache_layout(config: KVCacheConfig, *, model: str = "") -> CacheLayout:
    """Return what a rank of vLLM keeps, by the `KVCacheConfig` of its worker.

    A group of the layout is a group of vLLM, or several, where its layers have arrays of different shapes.
    Bytes that are packed in a way that the specification does not tell are a plane "kv" of uint8. Pages have
    the greatest size that divides the blocks of every group.

    Args:
        config: Of a worker: the scheduler's has one specification for layers of different shapes.
        model: Name of the model.

    Raises:
        ConfigError: If a specification is of an unknown class or dtype, or a layer's name has no number.
    """
    groups: list[Group] = []
    page_size = 0
    for found in config.kv_cache_groups:
        for kind, options, layers, planes in _parts(found):
            number = sum(group.kind == kind for group in groups)
            name = kind if number == 0 else f"{kind}_{number + 1}"
            groups.append(Group(name, kind, layers, planes, **options))
        if groups and groups[-1].kind != "state":
            page_size = gcd(page_size, found.kv_cache_spec.block_size)
    return CacheLayout(groups, page_size=page_size or 1, model=model)


def _parts(group: Any) -> Iterator[tuple[GroupKind, dict[str, Any], list[int], list[Plane]]]:  # noqa: ANN401 - of vLLM
    """Return the layers of a group that have arrays of equal shapes."""
    specs: dict[int, list[tuple[str, Any]]] = {}
    for name in group.layer_names:
        spec = group.kv_cache_spec
        by_layer = getattr(spec, "kv_cache_specs", None)
        specs.setdefault(_layer(name), []).append((name, spec if by_layer is None else by_layer[name]))
    described = [(_described(found), layer) for layer, found in specs.items()]
    described.sort(key=lambda pair: (repr(pair[0]), pair[1]))
    for (kind, options, planes), alike in groupby(described, key=lambda pair: pair[0]):
        yield kind, dict(options), [layer for _, layer in alike], list(planes)


def _layer(name: str) -> int:
    """Return the layer of an array by its name, such as "model.layers.3.self_attn.attn"."""
    found = re.search(r"(?:^|\.)layers\.(\d+)(?:\.|$)", name) or re.search(r"(?:^|\.)(\d+)(?:\.|$)", name)
    if found is None:
        raise ConfigError(f"the KV cache of {name!r} has no number of a layer")
    return int(found[1])


def _described(
    specs: list[tuple[str, Any]],
) -> tuple[GroupKind, tuple[tuple[str, int], ...], tuple[Plane, ...]]:
    """Return the kind, the options and the planes of a layer with these specifications."""
    kinds, planes = set(), []
    for name, spec in specs:
        kinds.add(_kind(name, spec))
        planes += _planes(name, spec)
    if len(kinds) > 1:
        raise ConfigError(
            f"layer {_layer(specs[0][0])} has arrays of several kinds in one group: {sorted(kinds)}"
        )
    kind, options = kinds.pop()
    return kind, options, tuple(planes)


def _kind(name: str, spec: Any) -> tuple[GroupKind, tuple[tuple[str, int], ...]]:  # noqa: ANN401 - of vLLM
    classes = {base.__name__ for base in type(spec).__mro__}
    if "MambaSpec" in classes:
        return "state", ()
    stride = (("stride", int(getattr(spec, "tokens_per_state", 1))),)
    if "SlidingWindowSpec" in classes:
        return "window", (("tokens", spec.sliding_window), *stride)
    if "ChunkedLocalAttentionSpec" in classes:
        return "chunk", (("tokens", spec.attention_chunk_size), *stride)
    if "FullAttentionSpec" in classes:
        return "full", stride
    raise ConfigError(f"{type(spec).__name__} of {name!r} is no specification that a layout can describe")


def _planes(name: str, spec: Any) -> list[Plane]:  # noqa: ANN401 - of vLLM
    try:
        return _arrays(name, spec)
    except TypeError as error:
        raise ConfigError(f"the KV cache of {name!r}: {error}") from None


def _arrays(name: str, spec: Any) -> list[Plane]:  # noqa: ANN401 - of vLLM
    if hasattr(spec, "shapes"):
        names = _STATE_PLANES.get(len(spec.shapes)) or [f"state_{at}" for at in range(len(spec.shapes))]
        arrays = zip(names, spec.dtypes, spec.shapes, strict=True)
        return [Plane(plane, dtype, shape) for plane, dtype, shape in arrays]
    prefix = "index_" if "indexer" in name else ""
    slots, content = getattr(spec, "num_head_slots", None), getattr(spec, "state_content_bytes", None)
    heads = spec.num_kv_heads
    if slots is not None or content is not None:
        element = spec.dtype.itemsize
        entry = content or (spec.head_size + spec.head_size_v) * element
        return [Plane(f"{prefix}kv", "uint8", (slots or heads, entry))]
    if spec.head_size_v == 0:
        return [Plane(f"{prefix}k" if prefix else "latent", spec.dtype, (heads, spec.head_size))]
    return [
        Plane(f"{prefix}k", spec.dtype, (heads, spec.head_size)),
        Plane(f"{prefix}v", spec.dtype, (heads, spec.head_size_v)),
    ]
