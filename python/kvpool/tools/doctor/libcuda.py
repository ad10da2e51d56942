"""The NVIDIA driver and its devices through `ctypes`, without creating a context.

The free memory of a device is reported by its context and by the management library (NVML). A context that
already exists in this process is used; none is created.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

LIBRARY = "libcuda.so.1"
MANAGEMENT = "libnvidia-ml.so.1"
LEAST_VERSION = 12_000
"""The oldest supported version of the driver's interface, CUDA 12.0: R525."""
LEAST_CAPABILITY = (7, 0)
"""The lowest compute capability that the kernels are compiled for."""

_CAPABILITY = (75, 76)  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
_NAME_BYTES, _BUS_ID_BYTES = 256, 32

# Loads a library by name like `ctypes.CDLL`, and raises `OSError`.
Loader = Any


class CallError(Exception):
    """A driver function failed or is missing.

    Attributes:
        code: The result of the function; None if the function is missing.
    """

    def __init__(self, name: str, code: int | None) -> None:
        super().__init__(f"{name} failed with error {code}" if code is not None else f"it has no {name}")
        self.code = code


@dataclass(frozen=True)
class DeviceInfo:
    """A device, as described by the driver.

    Attributes:
        ordinal: Number of the device.
        name: Name of the device.
        capability: Compute capability, major and minor.
        total_bytes: Memory of the device.
        free_bytes: Free memory; None if unknown.
    """

    ordinal: int
    name: str
    capability: tuple[int, int]
    total_bytes: int
    free_bytes: int | None


class Driver:
    """The driver functions used here.

    Args:
        library: A library from `ctypes.CDLL`.
        load: Loads other libraries.
    """

    def __init__(self, library: Any, load: Loader = ctypes.CDLL) -> None:  # noqa: ANN401 - a library of `load`
        self._library, self._load = library, load

    def version(self) -> int:
        """Return the version of the interface, 1000 * major + 10 * minor."""
        found = ctypes.c_int()
        self.call("cuDriverGetVersion", ctypes.byref(found))
        return found.value

    def initialise(self) -> None:
        """Initialise the driver, before any call below. Creates no context."""
        self.call("cuInit", 0)

    def device_count(self) -> int:
        """Return the number of visible devices."""
        found = ctypes.c_int()
        self.call("cuDeviceGetCount", ctypes.byref(found))
        return found.value

    def describe(self, ordinal: int) -> DeviceInfo:
        """Describe a device."""
        device = ctypes.c_int()
        self.call("cuDeviceGet", ctypes.byref(device), ordinal)
        name = ctypes.create_string_buffer(_NAME_BYTES)
        self.call("cuDeviceGetName", name, _NAME_BYTES, device)
        numbers = []
        for attribute in _CAPABILITY:
            found = ctypes.c_int()
            self.call("cuDeviceGetAttribute", ctypes.byref(found), attribute, device)
            numbers.append(found.value)
        total = ctypes.c_size_t()
        self.call("cuDeviceTotalMem_v2", ctypes.byref(total), device)
        text = name.value.decode(errors="replace")
        return DeviceInfo(ordinal, text, (numbers[0], numbers[1]), total.value, self._free_bytes(device))

    def _free_bytes(self, device: ctypes.c_int) -> int | None:
        for free_bytes in (self._free_in_context, self._free_in_nvml):
            try:
                found = free_bytes(device)
            except (CallError, OSError):
                continue
            if found is not None:
                return found
        return None

    def _free_in_context(self, device: ctypes.c_int) -> int | None:
        """Free memory from the primary context, if it is active."""
        flags, active = ctypes.c_uint(), ctypes.c_int()
        self.call("cuDevicePrimaryCtxGetState", device, ctypes.byref(flags), ctypes.byref(active))
        if not active.value:
            return None
        context, free, total = ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_size_t()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        try:
            self.call("cuCtxPushCurrent_v2", context)
            try:
                self.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
            finally:
                self.call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))
        finally:
            self.call("cuDevicePrimaryCtxRelease_v2", device)
        return free.value

    def _free_in_nvml(self, device: ctypes.c_int) -> int | None:
        bus_id = ctypes.create_string_buffer(_BUS_ID_BYTES)
        self.call("cuDeviceGetPCIBusId", bus_id, _BUS_ID_BYTES, device)
        library = self._load(MANAGEMENT)
        _call(library, "nvmlInit_v2")
        try:
            handle, memory = ctypes.c_void_p(), (ctypes.c_uint64 * 3)()  # total, free, used
            _call(library, "nvmlDeviceGetHandleByPciBusId_v2", bus_id, ctypes.byref(handle))
            _call(library, "nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
        finally:
            _call(library, "nvmlShutdown")
        return int(memory[1])

    def call(self, name: str, *arguments: Any) -> None:  # noqa: ANN401 - as C has them
        """Call a function, which must return 0.

        Raises:
            CallError: If the function returned another result, or is missing.
        """
        _call(self._library, name, *arguments)


def _call(library: Any, name: str, *arguments: Any) -> None:  # noqa: ANN401 - as C has them
    try:
        function: Callable[..., int] = getattr(library, name)
    except AttributeError:
        raise CallError(name, None) from None
    code = function(*arguments)
    if code:
        raise CallError(name, code)


def version_text(version: int) -> str:
    """Format a CUDA version."""
    return f"CUDA {version // 1000}.{version % 1000 // 10}"
