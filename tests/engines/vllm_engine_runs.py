"""Runs tests in a process that finds a whole vLLM."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys

import pytest
from sglang_on_cpu import ENGINES, HAS_PACKAGES, HERE, ROOT

ENGINE = ENGINES.with_name("vllm-engine")
"""Where `make` puts vLLM for the CPU and its PyTorch. LMCache's folder has the rest of what it needs."""


def require() -> None:
    """Skips the test where vLLM was not installed. In `make test-engines` that is an error."""
    if not HAS_PACKAGES or platform.machine() != "x86_64":
        pytest.skip("vLLM for the CPU has packages for Linux on x86-64 and Python 3.11 to 3.13")
    if not (ENGINE / "0.33").is_dir():
        missing = f"vLLM is not in {ENGINE}: `make test-vllm-engine` installs it"
        if os.environ.get("KVPOOL_REQUIRE_ENGINES") or (ENGINE / ".installed").exists():
            pytest.fail(missing)
        pytest.skip(missing)


def environment(version: str) -> dict[str, str]:
    """The variables of a process with vLLM of a version."""
    places = (HERE, ENGINE / version, ENGINE, ENGINES.with_name("lmcache"), ENGINES, ROOT / "python")
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("KVPOOL_", "PYTEST_", "VLLM_", "LD_PRELOAD"))
    }
    return {**kept, "PYTHONPATH": os.pathsep.join(map(str, places)), "HF_HUB_OFFLINE": "1"}


def run(version: str, *tests: str) -> int:
    """The number of these tests that pass. All must."""
    require()
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", str(HERE)]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", *(str(HERE / test) for test in tests)],
        env=environment(version),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
    [passed] = re.findall(r"^(\d+) passed", done.stdout, re.MULTILINE)
    return int(passed)
