"""Runs all checks of `kvpool doctor`.

The checks need neither PyTorch nor NumPy nor a GPU, and create no CUDA context in this process: a separate
process tries the pools on each device.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from kvpool.integrations.seams import version_of
from kvpool.integrations.versions import TRANSFORMERS
from kvpool.tools.doctor import driver, host, libraries
from kvpool.tools.doctor.report import BROKEN, MISSING, OK, Finding, Report, Verdict, unmet_text
from kvpool.tools.doctor.trial import Outcome, run_trial
from kvpool.tools.needs import COMMANDS, remedy
from kvpool.tools.output import waiting

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvpool.tools.doctor.libcuda import Loader
    from kvpool.tools.doctor.libraries import TorchState

_DRIVER_ADVICE = "see 'NVIDIA driver' and 'devices' above"


_KERNEL_ADVICE = {
    221: "this device needs the driver's compiler, which is missing: install libnvidia-ptxjitcompiler.so.1;"
    " in a container set NVIDIA_DRIVER_CAPABILITIES=compute,utility",
    222: "the driver is older than the kernels: install the NVIDIA driver R525 or newer",
    223: "this device needs the driver's compiler, which is disabled: unset CUDA_DISABLE_PTX_JIT",
}
"""Remedies for kernels that cannot be loaded, by the driver's code."""


def examine(
    root: Path = Path("/"), load: Loader = ctypes.CDLL, try_device: Callable[[str], Outcome] = run_trial
) -> Report:
    """Run all checks.

    Args:
        root: The folder of `/proc` and `/sys`.
        load: Loads a library by name.
        try_device: Tries the pools on a device.
    """
    of_driver, devices = driver.examine(root, load)
    tried = {}
    for device in ("cpu", *(f"cuda:{ordinal}" for ordinal in range(max(1, devices)))):
        with waiting(f"trying pools on {device}"):
            tried[device] = try_device(device)
    cpu, gpus = tried.pop("cpu"), tried
    with waiting("loading PyTorch"):
        torch = libraries.torch_state(devices)
    # A broken extension cannot be asked.
    package = libraries.package(gpus["cuda:0"].text) if cpu.works else []
    findings = [
        *package,
        Finding("pools", "cpu", OK if cpu.works else BROKEN, cpu.text),
        *(_gpu(name, outcome, devices) for name, outcome in gpus.items()),
        *of_driver,
        *torch.findings,
        *libraries.libraries(),
        *host.examine(root, _threads() if cpu.works else 1),
    ]
    return Report(tuple(findings), tuple(_verdicts(cpu, gpus, torch)))


def run(required: tuple[str, ...], *, as_json_object: bool) -> int:
    """Print the report, and return the exit status: 1 if a requirement is not met."""
    report = examine()
    sys.stdout.write((json.dumps(report.as_json()) if as_json_object else report.as_text()) + "\n")
    unmet = report.unmet(required)
    if unmet:
        sys.stderr.write(f"kvpool: {unmet_text(unmet)}\n")
    return 1 if unmet else 0


def _threads() -> int:
    import kvpool  # noqa: PLC0415 - this file must load even if kvpool does not

    return kvpool.get_num_threads()


def _gpu(name: str, outcome: Outcome, devices: int) -> Finding:
    status = OK if outcome.works else BROKEN if devices else MISSING
    advice = next((words for code, words in _KERNEL_ADVICE.items() if f"({code})" in outcome.text), "")
    return Finding("pools", name, status, outcome.text, advice)


def _verdicts(cpu: Outcome, gpus: dict[str, Outcome], torch: TorchState) -> list[Verdict]:
    advice = "" if cpu.works else "reinstall kvpool: pip install --force-reinstall kvpool"
    verdicts = [Verdict("cpu", 'device="cpu"', cpu.works, cpu.text, advice)]
    working = [name for name, outcome in gpus.items() if outcome.works]
    if working:
        broken = [name for name in gpus if name not in working]
        text = f"on {', '.join(working)}" + (f"; not on {', '.join(broken)}" if broken else "")
        verdicts.append(Verdict("cuda", 'device="cuda"', True, text, _DRIVER_ADVICE if broken else ""))
    else:
        verdicts.append(Verdict("cuda", 'device="cuda"', False, gpus["cuda:0"].text, _DRIVER_ADVICE))
    title = "PyTorch tensors without a copy"
    verdicts.append(
        Verdict("torch", title, False, torch.problem, torch.advice)
        if torch.problem
        else Verdict("torch", title, True, "tensors of a pool are views of its memory")
    )
    problem, advice = _needs_of(
        cpu, torch, ("numpy", "torch", "transformers"), "pip install 'kvpool[transformers]'"
    )
    if not problem:
        problem = TRANSFORMERS.why_not()
    verdicts.append(_of_needs("transformers", "models of transformers", problem, advice))
    needs = COMMANDS["replay"].needs
    problem, advice = _needs_of(cpu, torch, needs, remedy(needs))
    verdicts.append(_of_needs("replay", "kvpool replay", problem, advice))
    return verdicts


def _of_needs(name: str, title: str, problem: str, advice: str) -> Verdict:
    return Verdict(name, title, not problem, problem or "all requirements are met", advice if problem else "")


def _needs_of(cpu: Outcome, torch: TorchState, packages: Sequence[str], install: str) -> tuple[str, str]:
    """Return the reason why what needs these packages cannot be used, and the remedy."""
    if not cpu.works:
        return 'device="cpu" does not work', ""
    absent = [name for name in packages if version_of(name) is None]
    if absent:
        return f"{', '.join(absent)} not installed", install
    return (torch.problem, torch.advice) if torch.problem else ("", install)
