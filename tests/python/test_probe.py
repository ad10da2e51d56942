"""The software driver passes `tests/gpu/probe.py` with the documented answers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROBE = Path(__file__).resolve().parents[1] / "gpu" / "probe.py"


def probe() -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", PROBE], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.cuda
@pytest.mark.usefixtures("driver")
def test_the_driver_answers_as_its_documentation_promises() -> None:
    done = probe()
    version, *lines = done.stdout.splitlines()
    assert version == "driver 13.2"
    wrong = [line for line in lines if not line.startswith("ok ")]
    assert (wrong, done.returncode, done.stderr) == ([], 0, "")
    assert len({line.split(": ")[0] for line in lines}) == len(lines) > 30


@pytest.mark.cuda
@pytest.mark.usefixtures("driver")
def test_a_failing_driver_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPOOL_SOFTWARE_INIT_ERROR", "100")
    done = probe()
    assert (done.returncode, done.stdout) == (2, "")
    assert "cuInit answers 100" in done.stderr
