"""`tests/gpu/images.py`: both images write what the CPU writes, on the software driver; differences show."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

GPU = Path(__file__).resolve().parents[1] / "gpu"


def run(*arguments: str) -> tuple[int, list[str]]:
    done = subprocess.run(
        [sys.executable, *arguments, "--count", "16384"],
        capture_output=True,
        text=True,
        cwd=GPU,
        timeout=120,
        check=False,
    )
    assert not done.stderr
    return done.returncode, done.stdout.splitlines()


@pytest.mark.cuda
@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize("kernels", ["", "ptx"])
def test_kernels_write_the_bits_that_the_host_writes(monkeypatch: pytest.MonkeyPatch, kernels: str) -> None:
    monkeypatch.setenv("KVPOOL_KERNELS", kernels)
    said = f"kernels: {kernels or 'best'}; 70 results compared with those in host memory, 0 differ"
    assert run("images.py") == (0, [said])


@pytest.mark.cuda
@pytest.mark.usefixtures("driver")
def test_a_difference_is_told() -> None:
    code = "import images, sys, torch; pair = torch.tensor([1, 2, 3]), torch.tensor([1, 0, 3]); "
    code += "images.conversions = lambda _: [('a row', *pair)]; "
    code += "images.rows = images.tables = images.plans = list; "
    status, lines = run("-c", f"{code}sys.exit(images.main())")
    assert (status, lines[0]) == (1, "DIFFERS a row: 1 of 3 bytes")
