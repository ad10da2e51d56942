"""Checks of the NVIDIA driver and its devices."""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING

from kvpool.tools.doctor.libcuda import (
    LEAST_CAPABILITY,
    LEAST_VERSION,
    LIBRARY,
    CallError,
    Driver,
    version_text,
)
from kvpool.tools.doctor.report import BROKEN, MISSING, OK, Finding
from kvpool.tools.output import bytes_text

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvpool.tools.doctor.libcuda import DeviceInfo, Loader

SECTION = "NVIDIA driver"
DEVICES = "devices"

_INSTALL = (
    "install the NVIDIA driver R525 or newer; in a container start it with the GPUs (docker run --gpus all)"
)
_INIT_ADVICE = {
    34: "a stub of the CUDA toolkit is found first: remove its folder (lib64/stubs) from LD_LIBRARY_PATH",
    100: "no GPU is visible: check CUDA_VISIBLE_DEVICES, nvidia-smi, and how the container was started",
    802: "the system is not ready: is nvidia-fabricmanager running?",
    803: "libcuda and the kernel module have different versions: reboot, or install matching versions",
    804: "the compatibility libcuda does not support this GPU: remove its folder from LD_LIBRARY_PATH",
}


def examine(root: Path, load: Loader = ctypes.CDLL) -> tuple[list[Finding], int]:
    """Check the driver and its devices.

    Args:
        root: The folder of `/proc` and `/sys`.
        load: Loads a library by name.

    Returns:
        The findings, and the number of devices.
    """
    findings = list(_kernel_module(root))
    try:
        library = load(LIBRARY)
    except OSError as error:
        there = "not found" in str(error) or "cannot open" in str(error)
        findings.append(_no_library(root, "" if there else str(error)))
        return findings, 0
    driver = Driver(library, load)
    try:
        version = driver.version()
        findings.append(_version(root, version))
        if version < LEAST_VERSION:
            return findings, 0
        driver.initialise()
        count = driver.device_count()
    except CallError as error:
        advice = _INIT_ADVICE.get(error.code or 0, "check nvidia-smi; update the driver")
        findings.append(Finding(SECTION, "start", BROKEN, str(error), advice))
        return findings, 0
    if count == 0:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        why = "" if visible is None else f"; CUDA_VISIBLE_DEVICES is {visible!r}"
        findings.append(
            Finding(DEVICES, "devices", MISSING, f"the driver reports none{why}", _INIT_ADVICE[100])
        )
    for ordinal in range(count):
        try:
            findings.append(_device(driver.describe(ordinal)))
        except CallError as error:  # noqa: PERF203 - other devices may work
            findings.append(Finding(DEVICES, f"cuda:{ordinal}", BROKEN, str(error), "check nvidia-smi"))
    return findings, count


def _device(info: DeviceInfo) -> Finding:
    major, minor = info.capability
    free = "free memory unknown" if info.free_bytes is None else f"{bytes_text(info.free_bytes)} free"
    text = f"{info.name}, compute capability {major}.{minor}, {bytes_text(info.total_bytes)}, {free}"
    if info.capability < LEAST_CAPABILITY:
        advice = "the kernels need compute capability 7.0 (Volta) or higher: use another device"
        return Finding(DEVICES, f"cuda:{info.ordinal}", BROKEN, text, advice)
    return Finding(DEVICES, f"cuda:{info.ordinal}", OK, text)


def _version(root: Path, version: int) -> Finding:
    text = f"{version_text(version)}, {_where(root)}"
    if version < LEAST_VERSION:
        needed = f"{version_text(LEAST_VERSION)} is needed: install the NVIDIA driver R525 or newer"
        return Finding(SECTION, LIBRARY, BROKEN, text, needed)
    return Finding(SECTION, LIBRARY, OK, text)


def _where(root: Path) -> str:
    """Return the file of the loaded library."""
    try:
        lines = (root / "proc/self/maps").read_text().splitlines()
    except OSError:
        return "from an unknown place"
    paths = (line.split(maxsplit=5)[5] for line in lines if "libcuda.so" in line)
    return next(paths, "from an unknown place")


def _kernel_module(root: Path) -> Iterator[Finding]:
    try:
        text = (root / "proc/driver/nvidia/version").read_text()
    except OSError:
        return
    line = (text.splitlines() or [""])[0].partition(":")[2].strip() or "unknown version"
    yield Finding(SECTION, "kernel module", OK, line)


def _no_library(root: Path, reason: str) -> Finding:
    """Return the reason why the library is missing: no GPU, no driver, or a container without it."""
    if reason:
        return Finding(SECTION, LIBRARY, BROKEN, f"it cannot be loaded: {reason}", _INSTALL)
    text = "not found by the dynamic loader"
    if (root / "proc/driver/nvidia").is_dir():
        text += ", though the kernel module is loaded"
        advice = (
            "in a container, start it with the driver's libraries (docker run --gpus all, NVIDIA Container "
            "Toolkit); else add the folder of libcuda.so.1 to LD_LIBRARY_PATH"
        )
        return Finding(SECTION, LIBRARY, BROKEN, text, advice)
    if any(_nvidia_gpus(root)):
        return Finding(SECTION, LIBRARY, BROKEN, f"{text}, though there is an NVIDIA GPU", _INSTALL)
    return Finding(
        SECTION, LIBRARY, MISSING, f"{text}, and no NVIDIA GPU was found", f"for device='cuda': {_INSTALL}"
    )


def _nvidia_gpus(root: Path) -> Iterator[str]:
    """Yield NVIDIA's PCI devices that are displays or 3D controllers."""
    for device in sorted((root / "sys/bus/pci/devices").glob("*")):
        try:
            vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
        except OSError:
            continue
        if vendor == "0x10de" and kind.startswith("0x03"):
            yield device.name
