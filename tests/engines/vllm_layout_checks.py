"""Layouts from vLLM's own specifications, and pages of the bytes that vLLM computes.

`tests/python/test_vllm_plugin.py` starts it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvpool import CacheLayout, ConfigError
from kvpool.integrations.vllm.layout import cache_layout

BLOCK = 16
HEADS: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": 4, "head_size": 64, "dtype": torch.bfloat16}


def layout_of(*groups: tuple[list[str], Any]) -> CacheLayout:
    specs = [KVCacheGroupSpec(names, spec) for names, spec in groups]
    return cache_layout(KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=specs), model="m")


def names(*layers: int, array: str = "self_attn.attn") -> list[str]:
    return [f"model.layers.{layer}.{array}" for layer in layers]


def test_groups_have_the_pages_of_vllm() -> None:
    specs = {
        "full": FullAttentionSpec(**HEADS),
        "window": SlidingWindowSpec(**HEADS, sliding_window=128),
        "chunk": ChunkedLocalAttentionSpec(**HEADS, attention_chunk_size=64),
        "state": MambaSpec(
            block_size=512, shapes=((24, 3), (4, 16, 16)), dtypes=(torch.bfloat16, torch.float32)
        ),
    }
    layout = layout_of(*((names(at, at + 4), spec) for at, spec in enumerate(specs.values())))
    assert layout.page_size == BLOCK
    for at, (group, (kind, spec)) in enumerate(zip(layout.groups, specs.items(), strict=True)):
        assert (group.name, group.kind, group.layers) == (kind, kind, (at, at + 4))
        entries = 1 if kind == "state" else BLOCK
        assert entries * group.entry_bytes == spec.page_size_bytes
    assert [group.tokens for group in layout.groups] == [None, 128, 64, None]
    assert [plane.name for plane in layout.groups[3].planes] == ["conv", "recurrent"]


def test_latents_have_an_index_beside_them() -> None:
    latent = MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    index = MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=132, dtype=torch.uint8)
    by_layer = {
        **dict.fromkeys(names(0, 1, array="self_attn.attn"), latent),
        **dict.fromkeys(names(0, 1, array="self_attn.indexer.k_cache"), index),
    }
    spec = UniformTypeKVCacheSpecs(block_size=64, kv_cache_specs=by_layer)
    (group,) = layout_of((list(by_layer), spec)).groups
    assert [plane.name for plane in group.planes] == ["latent", "index_k"]
    assert 2 * 64 * group.entry_bytes == spec.page_size_bytes


def test_layers_of_other_shapes_are_groups_of_their_own() -> None:
    small, large = FullAttentionSpec(**HEADS), FullAttentionSpec(**{**HEADS, "head_size": 128})
    by_layer = {**dict.fromkeys(names(0, 2), small), **dict.fromkeys(names(1), large)}
    spec = UniformTypeKVCacheSpecs(block_size=BLOCK, kv_cache_specs=by_layer)
    groups = layout_of((list(by_layer), spec)).groups
    assert {group.name: group.layers for group in groups} in (
        {"full": (0, 2), "full_2": (1,)},
        {"full": (1,), "full_2": (0, 2)},
    )


def test_packed_entries_are_bytes() -> None:
    spec = FullAttentionSpec(**HEADS, state_content_bytes=264)
    (group,) = layout_of((names(0), spec)).groups
    assert [(plane.name, plane.shape) for plane in group.planes] == [("kv", (4, 264))]
    assert BLOCK * group.entry_bytes == spec.page_size_bytes


def test_what_no_layout_describes_is_refused() -> None:
    with pytest.raises(ConfigError, match="CircularBufferSpec"):
        layout_of((names(0), CircularBufferSpec(**HEADS)))
    with pytest.raises(ConfigError, match="no number of a layer"):
        layout_of((["model.attn"], FullAttentionSpec(**HEADS)))
