"""The entry point `kvpool` of LMCache's group `lmcache.device_plugins`, loaded at its start.

Only this group lets an installed package run code before LMCache makes an allocator. The group requires a
device, so this module has one, which is never available.
"""

from __future__ import annotations

from kvpool.integrations.lmcache import register

register()  # first, since LMCache only logs errors of plugins

from lmcache.v1.platform.base.device_spec import DeviceSpec  # noqa: E402

__all__ = ["NoDevice"]


class NoDevice(DeviceSpec):  # type: ignore[misc]
    """A device that is never there."""

    device_type = backend_name = torch_module_name = "kvpool"

    def is_available(self) -> bool:
        """Return whether LMCache can use it: never."""
        return False
