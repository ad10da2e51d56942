"""Runs LMCache's own tests of memory management, and `lmcache_checks.py`, in a process that finds LMCache."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from sglang_on_cpu import ENGINES, HAS_PACKAGES, HERE
from vllm_runs import VLLM, RunResult, ran

LMCACHE = Path(os.environ.get("KVPOOL_LMCACHE_PATH") or ENGINES.with_name("lmcache"))
"""Where `make` puts LMCache and its tests."""

RANGES = "tests/v1/test_address_manager.py"
TESTS = (
    RANGES,
    "tests/v1/test_memory_management.py",
    "tests/v1/test_memory_allocator_import_surface.py",
    "tests/v1/distributed/memory_manager",
    "tests/v1/distributed/test_devdax_l1_allocator.py",
    "tests/v1/distributed/test_l1_memory_manager.py",
    "tests/v1/storage_backend/test_local_cpu_backend.py",
    "tests/v1/storage_backend/test_local_cpu_backend_nixl_paged.py",
)
"""LMCache's tests of its allocators, and of what asks them for memory."""

SWITCHED_ON = {"KVPOOL_LMCACHE": "1"}


def require() -> None:
    """Skips the test where LMCache was not installed. In `make test-engines` that is an error."""
    if not HAS_PACKAGES:
        pytest.skip("what LMCache depends on is installed for Linux and Python 3.11 to 3.13")
    if not (LMCACHE / "lmcache").is_dir():
        missing = f"LMCache is not in {LMCACHE}: `make test-engines` installs it"
        if os.environ.get("KVPOOL_REQUIRE_ENGINES") or (LMCACHE / ".installed").exists():
            pytest.fail(missing)
        pytest.skip(missing)


def python(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a process that finds LMCache, with these variables in its environment."""
    require()
    package = find_spec("kvpool")
    assert package is not None
    assert package.origin is not None
    places = HERE, LMCACHE, ENGINES, VLLM, Path(package.origin).parents[1]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("KVPOOL_", "PYTEST_"))}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=LMCACHE,
        env={
            **kept,
            "PYTHONPATH": os.pathsep.join(map(str, places)),
            "LMCACHE_TRACK_USAGE": "false",
            "OMP_NUM_THREADS": "1",
            **variables,
        },
        capture_output=True,
        text=True,
        check=False,
    )


def run(folder: Path, *arguments: str, **variables: str) -> RunResult:
    """Runs pytest within LMCache. All tests must pass."""
    report = folder / "report.xml"
    options = ["-q", "-c", os.devnull, "--rootdir", str(LMCACHE), "-p", "no:cacheprovider", "--timeout=300"]
    command = ["-m", "pytest", "-p", "lmcache_on_kvpool", *options, f"--junitxml={report}"]
    done = python(*command, *arguments, **variables)
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
    return ran(report)
