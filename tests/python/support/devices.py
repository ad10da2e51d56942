"""The device on which the tests put their pools."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

_DEVICE = ["cpu"]

cpu_only = pytest.mark.parametrize("device", ["cpu"], indirect=True)
"""For a test of a suite that runs on every device, and has to do with the CPU alone."""


def current() -> str:
    """The device of the test that runs."""
    return _DEVICE[-1]


@contextmanager
def on(device: str) -> Iterator[None]:
    """Makes `device` the current one."""
    _DEVICE.append(device)
    try:
        yield
    finally:
        _DEVICE.pop()


def to_current(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with the same values and strides on the current device."""
    if current() == "cpu":
        return tensor
    span = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    span = span if tensor.numel() else 0
    flat = tensor.as_strided((span,), (1,)).cuda()
    return flat.as_strided(tensor.shape, tensor.stride())
