"""Runs tests in a process that finds a whole vLLM."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from sglang_on_cpu import ENGINES, HERE, ROOT

ENGINE = ENGINES.with_name("vllm-engine")
"""Where `make` puts vLLM for the CPU and its PyTorch. LMCache's folder has the rest of what it needs."""


def require() -> None:
    """Skips the test where vLLM was not installed. In `make test-engines` that is an error."""
    if (ENGINE / "0.33").is_dir():
        return
    missing = f"vLLM is not in {ENGINE}: `make test-vllm-engine` installs it, on x86-64 Linux"
    if (
        os.environ.get("KVPOOL_REQUIRE_ENGINES")
        and sys.platform == "linux"
        and os.uname().machine == "x86_64"
    ):
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
