"""Runs vLLM's own tests, and `vllm_checks.py`, in a process that finds vLLM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree as ET

import pytest
from sglang_on_cpu import ENGINES, HAS_PACKAGES, HERE
from transformers import LlavaConfig, OPTConfig, Qwen2_5_VLConfig, Qwen2Config, Qwen3Config, Qwen3NextConfig

VLLM = Path(os.environ.get("KVPOOL_VLLM_PATH") or ENGINES.with_name("vllm"))
"""Where `make` puts the Python part of vLLM and its tests."""

OFFLOADING = "tests/v1/kv_offload"

APART = [
    f"--ignore={OFFLOADING}/{name}"
    for name in ("cpu/test_gpu_worker.py", "cpu/test_shared_offload_region.py", "tiering/p2p")
]
"""Tests that copy GPU memory, map files and talk to peers, without kvpool. Some of them are timed."""


CORE = "tests/v1/core"

NOT_HERE = [
    f"--ignore={CORE}/{name}.py"
    for name in (
        "prefix_cache/test_hybrid_prefix_cache_hit_rate",
        "test_reset_prefix_cache_e2e",
        "test_scheduler_e2e",
    )
]
"""Tests that run a model, for which vLLM needs its kernels."""

CONFIGS = {
    "facebook/opt-125m": (OPTConfig, "OPTForCausalLM"),
    "facebook/opt-350m": (OPTConfig, "OPTForCausalLM"),
    "llava-hf/llava-1.5-7b-hf": (LlavaConfig, "LlavaForConditionalGeneration"),
    "Qwen/Qwen1.5-7B": (Qwen2Config, "Qwen2ForCausalLM"),
    "Qwen/Qwen2.5-VL-3B-Instruct": (Qwen2_5_VLConfig, "Qwen2_5_VLForConditionalGeneration"),
    "Qwen/Qwen3-0.6B": (Qwen3Config, "Qwen3ForCausalLM"),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": (Qwen3NextConfig, "Qwen3NextForCausalLM"),
}
"""Models that tests of the scheduler name. They read no more than a configuration."""


def write_configs(folder: Path) -> None:
    """Makes configurations of these models as if they had been downloaded."""
    for name, (kind, architecture) in CONFIGS.items():
        model = folder / "hub" / f"models--{name.replace('/', '--')}"
        (model / "refs").mkdir(parents=True)
        (model / "refs" / "main").write_text("made")
        kind(architectures=[architecture], dtype="float16").save_pretrained(model / "snapshots" / "made")


class RunResult(NamedTuple):
    """How many tests passed, and why others were skipped."""

    passed: int
    skipped: list[str]


def require() -> None:
    """Skips the test where vLLM was not installed. In `make test-engines` that is an error."""
    if not HAS_PACKAGES:
        pytest.skip("what vLLM depends on is installed for Linux and Python 3.11 to 3.13")
    if not (VLLM / "vllm").is_dir():
        missing = f"vLLM is not in {VLLM}: `make test-engines` installs it"
        if os.environ.get("KVPOOL_REQUIRE_ENGINES") or (VLLM / ".installed").exists():
            pytest.fail(missing)
        pytest.skip(missing)


def run(folder: Path, runs: dict[str, list[str]]) -> list[RunResult]:
    """Runs pytest within vLLM, for each mode of `vllm_on_kvpool` with its arguments. All tests must pass."""
    require()
    package = find_spec("kvpool")
    assert package is not None
    assert package.origin is not None
    write_configs(folder / "models")
    places = (HERE, VLLM, ENGINES, Path(package.origin).parents[1])
    options = ["-q", "-c", os.devnull, "--rootdir", str(VLLM), "-p", "no:cacheprovider", "--timeout=300"]
    reports = {mode: folder / f"{mode}.xml" for mode in runs}
    commands = [
        [*options, f"--on-kvpool={mode}", f"--junitxml={reports[mode]}", *arguments]
        for mode, arguments in runs.items()
    ]
    done = subprocess.run(
        [sys.executable, str(HERE / "vllm_forks.py"), json.dumps(commands)],
        cwd=VLLM,
        env={
            **{
                name: value
                for name, value in os.environ.items()
                if not name.startswith(("KVPOOL_", "PYTEST_"))
            },
            "PYTHONPATH": os.pathsep.join(map(str, places)),
            "HF_HOME": str(folder / "models"),
            "HF_HUB_OFFLINE": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
    return [ran(report) for report in reports.values()]


def ran(report: Path) -> RunResult:
    """The content of a report of pytest."""
    cases = ET.parse(report).getroot().iter("testcase")  # noqa: S314 - pytest wrote it
    reasons = [[skip.get("message", "") for skip in case.iter("skipped")] for case in cases]
    return RunResult(sum(not reason for reason in reasons), [text for reason in reasons for text in reason])
