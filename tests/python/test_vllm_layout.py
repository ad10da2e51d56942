"""Layouts from specifications in the form of vLLM's; `tests/engines/vllm_layout_checks.py` has vLLM's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from kvpool import ConfigError
from kvpool.integrations.vllm.layout import cache_layout

# The classes have vLLM's names and fields.


@dataclass
class FullAttentionSpec:
    block_size: int = 16
    num_kv_heads: int = 2
    head_size: int = 8
    head_size_v: int = 8
    dtype: torch.dtype = torch.float16
    num_head_slots: int | None = None
    state_content_bytes: int | None = None
    tokens_per_state: int = 1


@dataclass
class SlidingWindowSpec(FullAttentionSpec):
    sliding_window: int = 5


@dataclass
class MambaSpec:
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    block_size: int = 64


@dataclass
class Group:
    layer_names: list[str]
    kv_cache_spec: Any


@dataclass
class Config:
    kv_cache_groups: list[Group]


def layout_of(*groups: tuple[list[str], Any]) -> Any:  # noqa: ANN401
    config: Any = Config([Group(*group) for group in groups])
    return cache_layout(config)


def test_pages_divide_the_blocks_of_all_groups() -> None:
    layout = layout_of(
        (["layers.0.attn"], FullAttentionSpec(block_size=48)),
        (["layers.1.attn"], SlidingWindowSpec(block_size=32)),
        (["layers.2"], MambaSpec(((4, 3),), (torch.float16,), block_size=5)),
    )
    assert layout.page_size == 16
    assert [group.kind for group in layout.groups] == ["full", "window", "state"]


def test_layers_without_pages_have_pages_of_one_token() -> None:
    layout = layout_of((["layers.2"], MambaSpec(((4, 3),), (torch.float16,))))
    assert layout.page_size == 1


@pytest.mark.parametrize(
    ("count", "planes"),
    [
        (1, ["conv"]),
        (2, ["conv", "recurrent"]),
        (3, ["state_0", "state_1", "state_2"]),
        (4, ["conv_q", "conv_k", "conv_v", "recurrent"]),
    ],
)
def test_arrays_of_states_have_names(count: int, planes: list[str]) -> None:
    spec = MambaSpec(tuple((2, at + 1) for at in range(count)), (torch.float32,) * count)
    (group,) = layout_of((["layers.3"], spec)).groups
    assert [plane.name for plane in group.planes] == planes
    assert [plane.shape for plane in group.planes] == [(2, at + 1) for at in range(count)]


def test_chains_have_a_stride() -> None:
    spec = FullAttentionSpec(head_size_v=0, num_kv_heads=1, head_size=16, tokens_per_state=4)
    (group,) = layout_of((["layers.3"], spec)).groups
    assert (group.stride, [plane.name for plane in group.planes]) == (4, ["latent"])


def test_arrays_of_a_layer_are_of_one_kind() -> None:
    by_layer = {"layers.0.a": FullAttentionSpec(), "layers.0.b": SlidingWindowSpec()}
    spec = FullAttentionSpec()
    spec.kv_cache_specs = by_layer  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="several kinds"):
        layout_of((list(by_layer), spec))


def test_layers_are_numbered() -> None:
    for name, layer in (("h.7.attn", 7), ("model.layers.12.mixer.0", 12)):
        (group,) = layout_of(([name], FullAttentionSpec())).groups
        assert group.layers == (layer,)
    with pytest.raises(ConfigError, match="no number of a layer"):
        layout_of((["attn"], FullAttentionSpec()))


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"of 'layers\.0': .*complex64"):
        layout_of((["layers.0"], FullAttentionSpec(dtype=torch.complex64)))


def test_an_unknown_specification_is_refused() -> None:
    @dataclass
    class CrossAttentionSpec:
        block_size: int = 16

    with pytest.raises(ConfigError, match=r"CrossAttentionSpec of 'layers\.0'"):
        layout_of((["layers.0"], CrossAttentionSpec()))
