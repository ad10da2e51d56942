"""The layout that `kvpool verify` proves: of a model, of options, or one with a bit of everything."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpool._kvpool import CacheLayout, Group, Plane
from kvpool.models.layout import read_layout

if TYPE_CHECKING:
    from pathlib import Path

HEADS, HEAD_DIM = 2, 64
_LAYERS = 8
_WINDOW, _SINKS = 128, 4
_STATE_HEADS, _STATE_DIM, _CONV_DIM, _TAPS = 4, 32, 96, 3


def layout_of_model(config: Path, *, page_size: int, dtype: str | None, tp: int) -> CacheLayout:
    """Return the layout of a configuration.

    Raises:
        ConfigError: If the model is not supported, or cannot be divided.
        OSError: If the file cannot be read.
    """
    return read_layout(config, page_size=page_size, dtype=dtype, tp=tp)


def layout_of_options(
    layers: int | None, heads: int, head_dim: int, *, page_size: int, dtype: str
) -> CacheLayout:
    """Return a layout of full attention with these layers; by default one with a window and states, too.

    Raises:
        ConfigError: If a size is too large.
        TypeError: If `dtype` is not one of storage.
    """
    planes = [Plane(name, dtype, (heads, head_dim)) for name in ("k", "v")]
    if layers is not None:
        return CacheLayout(
            [Group("full", "full", range(layers), planes)], page_size=page_size, model="options"
        )
    every = range(_LAYERS)
    states = [
        Plane("recurrent", "float32", (_STATE_HEADS, _STATE_DIM, _STATE_DIM)),
        Plane("conv", "bfloat16", (_CONV_DIM, _TAPS)),
    ]
    groups = [
        Group("full", "full", every[3::4], planes),
        Group("window", "window", every[::4], planes, tokens=_WINDOW, sinks=_SINKS),
        Group("state", "state", [layer for layer in every if layer % 4 in {1, 2}], states),
    ]
    return CacheLayout(groups, page_size=page_size, model="a bit of everything")
