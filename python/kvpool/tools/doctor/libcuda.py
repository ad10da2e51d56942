"""The NVIDIA driver and its devices, seen through `ctypes`, without a context of ours.

What a device has free can only be asked of its context or of the management library (NVML). A context that is
there already, somebody else's in this process, is asked; none is made for it.
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
"""Of the driver's interface, CUDA 12.0: R525."""
LEAST_CAPABILITY = (7, 0)
"""That the kernels are compiled for."""

_CAPABILITY = (75, 76)  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
_NAME_BYTES, _BUS_ID_BYTES = 256, 32

# Loads a library by its name, as `ctypes.CDLL` does; raises `OSError`.
Loader = Any


class CallError(Exception):
    """A function of the driver that failed or is not there.

    Attributes:
        code: What it answered; None if it is not there.
    """

    def __init__(self, name: str, code: int | None) -> None:
        super().__init__(f"{name} failed with error {code}" if code is not None else f"it has no {name}")
        self.code = code


@dataclass(frozen=True)
class DeviceInfo:
    """A device as the driver describes it.

    Attributes:
        ordinal: Its number.
        name: Its name.
        capability: Compute capability, major and minor.
        total_bytes: Its memory.
        free_bytes: What of it is free; None if nobody could be asked.
    """

    ordinal: int
    name: str
    capability: tuple[int, int]
    total_bytes: int
    free_bytes: int | None


class Driver:
    """The functions that are asked for.

    Args:
        library: What `ctypes.CDLL` gives.
        load: Loads other libraries.
    """

    def __init__(self, library: Any, load: Loader = ctypes.CDLL) -> None:  # noqa: ANN401 - as `load` gives it
        self._library, self._load = library, load

    def version(self) -> int:
        """Of its interface, 1000 * major + 10 * minor."""
        found = ctypes.c_int()
        self._call("cuDriverGetVersion", ctypes.byref(found))
        return found.value

    def initialise(self) -> None:
        """Must come before what follows. It makes no context."""
        self._call("cuInit", 0)

    def device_count(self) -> int:
        """How many it shows."""
        found = ctypes.c_int()
        self._call("cuDeviceGetCount", ctypes.byref(found))
        return found.value

    def describe(self, ordinal: int) -> DeviceInfo:
        """A device."""
        device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(device), ordinal)
        name = ctypes.create_string_buffer(_NAME_BYTES)
        self._call("cuDeviceGetName", name, _NAME_BYTES, device)
        numbers = []
        for attribute in _CAPABILITY:
            found = ctypes.c_int()
            self._call("cuDeviceGetAttribute", ctypes.byref(found), attribute, device)
            numbers.append(found.value)
        total = ctypes.c_size_t()
        self._call("cuDeviceTotalMem_v2", ctypes.byref(total), device)
        text = name.value.decode(errors="replace")
        return DeviceInfo(ordinal, text, (numbers[0], numbers[1]), total.value, self._free_bytes(device))

    def _free_bytes(self, device: ctypes.c_int) -> int | None:
        for ask in (self._ask_context, self._ask_management):
            try:
                found = ask(device)
            except (CallError, OSError):
                continue
            if found is not None:
                return found
        return None

    def _ask_context(self, device: ctypes.c_int) -> int | None:
        """The primary context, if it is in use."""
        flags, active = ctypes.c_uint(), ctypes.c_int()
        self._call("cuDevicePrimaryCtxGetState", device, ctypes.byref(flags), ctypes.byref(active))
        if not active.value:
            return None
        context, free, total = ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_size_t()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        try:
            self._call("cuCtxPushCurrent_v2", context)
            try:
                self._call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
            finally:
                self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))
        finally:
            self._call("cuDevicePrimaryCtxRelease_v2", device)
        return free.value

    def _ask_management(self, device: ctypes.c_int) -> int | None:
        bus_id = ctypes.create_string_buffer(_BUS_ID_BYTES)
        self._call("cuDeviceGetPCIBusId", bus_id, _BUS_ID_BYTES, device)
        library = self._load(MANAGEMENT)
        _call(library, "nvmlInit_v2")
        try:
            handle, memory = ctypes.c_void_p(), (ctypes.c_uint64 * 3)()  # total, free, used
            _call(library, "nvmlDeviceGetHandleByPciBusId_v2", bus_id, ctypes.byref(handle))
            _call(library, "nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
        finally:
            _call(library, "nvmlShutdown")
        return int(memory[1])

    def _call(self, name: str, *arguments: Any) -> None:  # noqa: ANN401 - as C has them
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
    """CUDA's version in words."""
    return f"CUDA {version // 1000}.{version % 1000 // 10}"
