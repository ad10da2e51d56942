"""The check that pools and PyTorch can use a device, before a command begins."""

from __future__ import annotations

import kvpool
from kvpool.errors import BackendUnavailableError


def check_device(device: str) -> None:
    """Check a device with a small pool and a tensor of PyTorch.

    Raises:
        ConfigError: If `device` is not a valid device.
        BackendUnavailableError: If kvpool or PyTorch cannot use the device.
    """
    import torch  # noqa: PLC0415 - commands without a device run without it

    kvpool.PagePool(1, 1, device=device)
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:  # PyTorch without CUDA fails an assertion
        why = str(error).splitlines()[0]
        raise BackendUnavailableError(f"PyTorch cannot use {device}: {why}") from None
