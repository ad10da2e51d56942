"""Says what machine this is: devices, driver, its files, kernel, Python and PyTorch.

It ends with 1 if PyTorch cannot use a GPU here: nothing else could run then.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import records
import torch
from backend import is_software


def output_of(*command: str) -> str:
    """The output of a program, or the reason why there is none."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=15, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{command[0]}: {error}"
    return (done.stdout + done.stderr).strip()


def driver_files() -> list[str]:
    """Where the loader finds the driver, and where each name leads."""
    lines = [line.split("=>")[-1].strip() for line in output_of("ldconfig", "-p").splitlines()]
    return sorted({f"{line} -> {Path(line).resolve()}" for line in lines if "/libcuda.so" in line})


def devices() -> list[str]:
    found = []
    for number in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(number)
        memory = f"{about.total_memory / 2**30:.1f} GiB"
        found.append(
            f"{about.name}, sm_{about.major}{about.minor}, {memory}, {about.multi_processor_count} SMs"
        )
    return found


def main() -> int:
    fake = is_software()
    smi = output_of(
        "nvidia-smi", "--query-gpu=name,driver_version,clocks.max.sm,clocks.max.mem", "--format=csv"
    )
    about = {
        "device": "a driver made of software" if fake else "; ".join(devices()) or "none",
        "driver": smi.splitlines()[-1] if smi else "unknown",
        "driver files": "; ".join(driver_files()) or "none that the loader knows",
        "system": f"{platform.system()} {platform.release()}",
        "cores": str(len(os.sched_getaffinity(0))),
        "Python": f"{platform.python_version()} ({sys.executable})",
        "PyTorch": f"{torch.__version__}, CUDA {torch.version.cuda}",
    }
    for name, value in about.items():
        print(f"{name}: {value}")
    records.add("machine", **about)
    if not fake:
        print(output_of("nvidia-smi"))
    if fake or torch.cuda.is_available():
        return 0
    print("PyTorch can use no GPU here")
    return 1


if __name__ == "__main__":
    sys.exit(main())
