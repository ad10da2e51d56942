"""Runs `examples/vllm_cluster.py` with what `make` installs for the CPU. Options are those of the example."""

from __future__ import annotations

import os
import sys

import pytest
import vllm_engine_runs
from nano_models import make
from sglang_on_cpu import ENGINES, ROOT

ROUTER, NIXL = ENGINES.with_name("vllm-router"), ENGINES.with_name("nixl")
"""Where `make` puts vLLM's router, with what servers need beyond an engine, and NIXL."""


def require() -> None:
    """Skips the test where a part was not installed. In `make test-engines` that is an error."""
    vllm_engine_runs.require()
    for folder, package in ((ROUTER, "vllm_router"), (NIXL, "nixl")):
        if not (folder / package).is_dir():
            missing = f"{package} is not in {folder}: `make test-vllm-engine` installs it"
            if os.environ.get("KVPOOL_REQUIRE_ENGINES"):
                pytest.fail(missing)
            pytest.skip(missing)


def environment() -> dict[str, str]:
    """The variables of a process that finds vLLM, its router and NIXL, and their commands."""
    found = vllm_engine_runs.environment("0.33")
    commands = (ROUTER / "bin", vllm_engine_runs.ENGINE / "bin")
    return {
        **found,
        "PATH": os.pathsep.join([*map(str, commands), found.get("PATH", os.defpath)]),
        "PYTHONPATH": os.pathsep.join([found["PYTHONPATH"], str(ROUTER), str(NIXL)]),
    }


def arguments(*options: str) -> list[str]:
    """The command, with a small model."""
    model = make(ROOT / "target" / "nano_models", "llama")
    return [sys.executable, str(ROOT / "examples" / "vllm_cluster.py"), str(model), *options]


if __name__ == "__main__":
    try:
        require()
    except BaseException as missing:  # noqa: BLE001 - pytest's outcomes are no Exception
        sys.exit(str(missing))
    # In this process: what ends it ends the servers.
    os.execve(sys.executable, arguments(*sys.argv[1:]), environment())  # noqa: S606
