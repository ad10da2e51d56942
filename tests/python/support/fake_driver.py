"""An NVIDIA driver and a management library that answer as they are told."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

GIB = 1 << 30


class Card(NamedTuple):
    """A device of `FakeDriver`."""

    name: bytes = b"A device"
    capability: tuple[int, int] = (9, 0)
    total_bytes: int = 80 * GIB
    is_active: bool = False


class FakeDriver:
    """A driver, and a management library, that answer as they are told, and count contexts."""

    def __init__(self, *cards: Card, version: int = 12_040, fail: dict[str, int] | None = None) -> None:
        self.cards, self.version, self.fail = cards, version, fail or {}
        self.retained = self.pushed = self.sessions = 0
        self.missing: set[str] = set()

    def __getattr__(self, name: str) -> Callable[..., int]:
        if name in self.missing or not name.startswith(("cu", "nvml")):
            raise AttributeError(name)

        def call(*arguments: Any) -> int:  # noqa: ANN401 - as C has them
            code = self.fail.get(name, 0)
            if code == 0:
                getattr(type(self), f"do_{name}")(self, *(getattr(a, "_obj", a) for a in arguments))
            return code

        return call

    def do_cuDriverGetVersion(self, out: Any) -> None:  # noqa: ANN401, N802
        out.value = self.version

    def do_cuInit(self, flags: int) -> None:  # noqa: N802
        assert flags == 0

    def do_cuDeviceGetCount(self, out: Any) -> None:  # noqa: ANN401, N802
        out.value = len(self.cards)

    def do_cuDeviceGet(self, out: Any, ordinal: int) -> None:  # noqa: ANN401, N802
        out.value = ordinal

    def do_cuDeviceGetName(self, out: Any, size: int, device: Any) -> None:  # noqa: ANN401, N802
        out.value = self.cards[device.value].name[: size - 1]

    def do_cuDeviceGetAttribute(self, out: Any, attribute: int, device: Any) -> None:  # noqa: ANN401, N802
        out.value = self.cards[device.value].capability[{75: 0, 76: 1}[attribute]]

    def do_cuDeviceTotalMem_v2(self, out: Any, device: Any) -> None:  # noqa: ANN401, N802
        out.value = self.cards[device.value].total_bytes

    def do_cuDevicePrimaryCtxGetState(self, device: Any, flags: Any, active: Any) -> None:  # noqa: ANN401, N802
        flags.value, active.value = 0, self.cards[device.value].is_active

    def do_cuDevicePrimaryCtxRetain(self, _out: Any, device: Any) -> None:  # noqa: ANN401, N802
        assert self.cards[device.value].is_active, "a context would have been made"
        self.retained += 1

    def do_cuDevicePrimaryCtxRelease_v2(self, _device: Any) -> None:  # noqa: ANN401, N802
        self.retained -= 1

    def do_cuCtxPushCurrent_v2(self, _context: Any) -> None:  # noqa: ANN401, N802
        self.pushed += 1

    def do_cuCtxPopCurrent_v2(self, _out: Any) -> None:  # noqa: ANN401, N802
        self.pushed -= 1

    def do_cuMemGetInfo_v2(self, free: Any, total: Any) -> None:  # noqa: ANN401, N802
        assert self.pushed == 1
        free.value, total.value = 7 * GIB, 80 * GIB

    def do_cuDeviceGetPCIBusId(self, out: Any, size: int, _device: Any) -> None:  # noqa: ANN401, N802
        assert size >= 13
        out.value = b"0000:01:00.0"

    def do_nvmlInit_v2(self) -> None:  # noqa: N802
        self.sessions += 1

    def do_nvmlDeviceGetHandleByPciBusId_v2(self, bus_id: Any, handle: Any) -> None:  # noqa: ANN401, N802
        assert bus_id.value == b"0000:01:00.0"
        handle.value = 1

    def do_nvmlDeviceGetMemoryInfo(self, _handle: Any, memory: Any) -> None:  # noqa: ANN401, N802
        memory[0], memory[1], memory[2] = 80 * GIB, 60 * GIB, 20 * GIB

    def do_nvmlShutdown(self) -> None:  # noqa: N802
        self.sessions -= 1
