"""Whether pools and PyTorch can use a device, before a command begins."""

from __future__ import annotations

import kvpool
from kvpool.errors import BackendUnavailableError


def check_device(device: str) -> None:
    """Make a small pool there, and a tensor of PyTorch's own.

    Raises:
        ConfigError: `device` is not a valid device.
        BackendUnavailableError: One of the two cannot use it.
    """
    import torch  # noqa: PLC0415 - commands without a device run without it

    kvpool.PagePool(1, 1, device=device)
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:  # PyTorch without CUDA fails an assertion
        why = str(error).splitlines()[0]
        raise BackendUnavailableError(f"PyTorch cannot use {device}: {why}") from None
