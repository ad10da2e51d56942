"""`kvpool doctor` with drivers and devices of every kind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from fake_driver import GIB, Card, FakeDriver
from machines import by_name, write

from kvpool.tools.doctor import driver as doctor_driver
from kvpool.tools.doctor.libcuda import Driver

if TYPE_CHECKING:
    from pathlib import Path

    from kvpool.tools.doctor.report import Finding


def look(root: Path, driver: FakeDriver) -> tuple[dict[str, Finding], int]:
    findings, count = doctor_driver.examine(root, lambda _: driver)
    return by_name(findings), count


def test_devices_are_described_without_a_context(tmp_path: Path) -> None:
    maps = "7f00-7f01 r-xp 00000000 00:01 12345   /usr/lib/libcuda.so.550.54\n"
    write(
        tmp_path, {"proc/self/maps": maps, "proc/driver/nvidia/version": "NVRM version: 550.54  x86\nGCC\n"}
    )
    driver = FakeDriver(Card(), Card(b"Old", (6, 1), 8 * GIB))
    found, count = look(tmp_path, driver)
    assert count == 2
    assert found["libcuda.so.1"].text == "CUDA 12.4, /usr/lib/libcuda.so.550.54"
    assert found["kernel module"].text == "550.54  x86"
    assert found["cuda:0"].text == "A device, compute capability 9.0, 80 GiB, 60 GiB free"
    assert (found["cuda:0"].status, found["cuda:1"].status) == ("ok", "broken")
    assert "7.0 (Volta)" in found["cuda:1"].advice
    assert (driver.retained, driver.pushed, driver.sessions) == (0, 0, 0)


def test_an_active_context_is_used_and_kept(tmp_path: Path) -> None:
    driver = FakeDriver(Card(is_active=True))
    assert look(tmp_path, driver)[0]["cuda:0"].text.endswith("7 GiB free")
    driver.fail["cuMemGetInfo_v2"] = 700
    assert look(tmp_path, driver)[0]["cuda:0"].text.endswith("60 GiB free")
    driver.fail["cuCtxPushCurrent_v2"] = 201
    assert look(tmp_path, driver)[0]["cuda:0"].text.endswith("60 GiB free")
    assert (driver.retained, driver.pushed, driver.sessions) == (0, 0, 0)


@pytest.mark.parametrize("name", ["cuDeviceGetPCIBusId", "nvmlInit_v2", "nvmlDeviceGetMemoryInfo"])
def test_free_memory_may_be_unknown(name: str, tmp_path: Path) -> None:
    failing, lacking = FakeDriver(Card(), fail={name: 999}), FakeDriver(Card())
    lacking.missing.add(name)
    for driver in (failing, lacking):
        assert look(tmp_path, driver)[0]["cuda:0"].text.endswith("free memory unknown")
        assert driver.sessions == 0


def test_works_without_a_management_library() -> None:
    def load(_: str) -> Any:  # noqa: ANN401 - a library
        raise OSError("no such file")

    assert Driver(FakeDriver(Card()), load).describe(0).free_bytes is None


def test_an_old_driver_is_reported_with_the_needed_version(tmp_path: Path) -> None:
    found, count = look(tmp_path, FakeDriver(Card(), version=11_080))
    assert (count, found["libcuda.so.1"].status) == (0, "broken")
    assert found["libcuda.so.1"].text == "CUDA 11.8, from an unknown place"
    assert "R525" in found["libcuda.so.1"].advice


@pytest.mark.parametrize(
    ("code", "advice"),
    [
        (100, "no GPU is visible"),
        (802, "fabricmanager"),
        (803, "reboot"),
        (999, "check nvidia-smi"),
        (34, "stub"),
    ],
)
def test_a_driver_start_failure_comes_with_advice(code: int, advice: str, tmp_path: Path) -> None:
    found, count = look(tmp_path, FakeDriver(Card(), fail={"cuInit": code}))
    assert (count, found["start"].status) == (0, "broken")
    assert found["start"].text == f"cuInit failed with error {code}"
    assert advice in found["start"].advice


def test_names_a_library_that_is_not_a_driver(tmp_path: Path) -> None:
    driver = FakeDriver(Card())
    driver.missing.add("cuDriverGetVersion")
    assert look(tmp_path, driver)[0]["start"].text == "it has no cuDriverGetVersion"


def test_a_failing_device_does_not_hide_others(tmp_path: Path) -> None:
    driver = FakeDriver(Card(), fail={"cuDeviceGetName": 101})
    found, count = look(tmp_path, driver)
    assert (count, found["cuda:0"].status) == (1, "broken")
    assert found["cuda:0"].text == "cuDeviceGetName failed with error 101"


def test_hidden_devices_are_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found, count = look(tmp_path, FakeDriver())
    assert (count, found["devices"].status) == (0, "missing")
    assert found["devices"].text == "the driver reports none; CUDA_VISIBLE_DEVICES is ''"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert look(tmp_path, FakeDriver())[0]["devices"].text == "the driver reports none"


GPU = {"sys/bus/pci/devices/0/vendor": "0x10de\n", "sys/bus/pci/devices/0/class": "0x030200\n"}
OTHER = {"sys/bus/pci/devices/1/vendor": "0x10de\n", "sys/bus/pci/devices/1/class": "0x020700\n"}


@pytest.mark.parametrize(
    ("files", "reason", "status", "text"),
    [
        ({}, "cannot open shared object file", "missing", "no NVIDIA GPU was found"),
        (
            {**OTHER, "sys/bus/pci/devices/2/vendor": "0x10de"},
            "not found",
            "missing",
            "no NVIDIA GPU was found",
        ),
        ({**GPU, **OTHER}, "cannot open shared object file", "broken", "there is an NVIDIA GPU"),
        (
            {"proc/driver/nvidia/version": ""},
            "cannot open shared object file",
            "broken",
            "the kernel module is loaded",
        ),
        ({}, "wrong ELF class", "broken", "it cannot be loaded: wrong ELF class"),
    ],
)
def test_a_missing_library_is_explained(
    files: dict[str, str], reason: str, status: str, text: str, tmp_path: Path
) -> None:
    def load(_: str) -> Any:  # noqa: ANN401 - a library
        raise OSError(reason)

    findings, count = doctor_driver.examine(write(tmp_path, files), load)
    found = by_name(findings)["libcuda.so.1"]
    assert (count, found.status) == (0, status)
    assert text in found.text
    assert found.advice
