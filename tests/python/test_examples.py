"""The programs in `examples` run, and the documentation names each."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").rglob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.relative_to(ROOT / "examples").as_posix())
def test_an_example_runs_and_is_documented(path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(path)], capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout
    name = path.relative_to(ROOT).as_posix()
    assert name in path.read_text(encoding="utf-8")  # how to run it
    assert any(name in page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md"))
