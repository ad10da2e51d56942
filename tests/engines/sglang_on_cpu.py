"""Runs `serve_sglang.py` with and without kvpool's plugin."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

ENGINES = Path(os.environ.get("KVPOOL_ENGINES") or Path(sys.prefix) / "engines")
"""Where `make` installs the engines, without what they share with the tests."""

HAS_PACKAGES = sys.platform == "linux" and (3, 11) <= sys.version_info < (3, 14)
"""Whether SGLang has packages for this machine, as `tests/engines/install` asks."""

PATIENCE_S = 3600
"""Longer than all engines take on a machine that is busy."""

MODELS = {"qwen3", "qwen3_next"}
"""SGLang's modules of the models that are served."""

REMOVED = ("SGLANG_", "KVPOOL_", "PYTHONDONTWRITEBYTECODE")
"""Variables that would change what is tested, or make every process compile what it imports."""

PLUGIN_ON = {"SGLANG_PLUGINS": "kvpool", "KVPOOL_SGLANG_STRICT": "1"}
"""kvpool's pools, strict: what SGLang's pools would drop or take twice ends the scheduler."""

TREE_ON = {"SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "kvpool"}
"""The prefix cache over kvpool's tree core, too."""


_BATCH = re.compile(r"Prefill batch, (.*?#pending-token: \d+)|(#retracted_reqs: .*)")
"""A batch of prompts in the log: requests, tokens, slots in use, waiting requests. The requests of
a call reach the scheduler together, so that this depends on no clock."""


class Schedule(NamedTuple):
    """The decisions of a scheduler.

    Attributes:
        cached: Cached tokens of each request.
        retractions: How often each request was retracted.
        batches: The batches of prompts, and the retractions, in order.
    """

    cached: list[int]
    retractions: list[int]
    batches: list[tuple[str, str]]


class ServingResult(NamedTuple):
    """The results of an engine for all requests, and its log."""

    tokens: list[list[int]]
    cached: list[int]
    retractions: list[int]
    aborted: int
    log: str

    @property
    def schedule(self) -> Schedule:
        """The decisions of the scheduler."""
        return Schedule(self.cached, self.retractions, _BATCH.findall(self.log))


class ProcessResult(NamedTuple):
    """The exit status and the output of a process."""

    status: int
    log: str


def require() -> None:
    """Skips the test where SGLang was not installed. In `make test-engines` that is an error."""
    if not HAS_PACKAGES:
        pytest.skip("SGLang has packages for Linux and Python 3.11 to 3.13")
    if not (ENGINES / "sglang").is_dir():
        missing = f"SGLang is not in {ENGINES}: `make test-engines` installs it"
        if os.environ.get("KVPOOL_REQUIRE_ENGINES") or (ENGINES / ".installed").exists():
            pytest.fail(missing)
        pytest.skip(missing)


def environment(folder: Path, **variables: str) -> dict[str, str]:
    """The environment of a process that finds SGLang, stubs for what needs a GPU, and kvpool's plugin."""
    plugin = folder / "plugin"
    declared = import_module("tomllib").loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    entries = declared["project"]["entry-points"]["sglang.srt.plugins"]
    # A development install may be older than the entry point.
    installed = plugin / "kvpool-0.dist-info"
    installed.mkdir(parents=True, exist_ok=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: kvpool\nVersion: 0\n", encoding="utf-8")
    lines = [f"{name} = {target}" for name, target in entries.items()]
    (installed / "entry_points.txt").write_text(
        "\n".join(["[sglang.srt.plugins]", *lines, ""]), encoding="utf-8"
    )
    package = find_spec("kvpool")
    assert package is not None
    assert package.origin is not None
    models = {file.stem for file in (ENGINES / "sglang/srt/models").glob("*.py")}
    places = [HERE / "no_gpu", plugin, Path(package.origin).parents[1], ENGINES]
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(REMOVED)},
        "PYTHONPATH": os.pathsep.join(str(place) for place in places),
        "SGLANG_USE_CPU_ENGINE": "1",
        # SGLang imports every other model, too.
        "SGLANG_DISABLED_MODEL_ARCHS": ",".join(sorted(models - MODELS)),
        "OMP_NUM_THREADS": "1",
        **variables,
    }


def run(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs Python in that environment."""
    command = [sys.executable, *arguments]
    with subprocess.Popen(
        command,
        env=environment(folder, **variables),
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # The engine starts processes that would outlive it.
        start_new_session=True,
    ) as process:
        try:
            out, errors = process.communicate(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, errors = process.communicate()
            pytest.fail(f"no end after {PATIENCE_S} s:\n{(out + errors)[-4000:]}")
    return subprocess.CompletedProcess(command, process.returncode, out, errors)


def fork(folder: Path, jobs: dict[str, dict[str, Any]]) -> dict[str, ProcessResult]:
    """Runs scripts in forks of one process that has imported SGLang."""
    done = run(folder, str(HERE / "sglang_forks.py"), json.dumps({"folder": str(folder), "jobs": jobs}))
    assert done.returncode == 0, done.stdout + done.stderr
    statuses = json.loads(done.stdout.splitlines()[-1])
    return {name: ProcessResult(statuses[name], (folder / f"{name}.log").read_text("utf-8")) for name in jobs}


def job(script: str, *arguments: str, **variables: str) -> dict[str, Any]:
    """A script beside this one, as `fork` takes it."""
    return {"arguments": [str(HERE / script), *arguments], "variables": variables}


def spawn(folder: Path, jobs: dict[str, dict[str, Any]]) -> dict[str, ProcessResult]:
    """The same, but every process is a new interpreter, as SGLang starts its own."""
    with ThreadPoolExecutor(2) as threads:
        runs = {
            name: threads.submit(run, folder, *each["arguments"], **each["variables"])
            for name, each in jobs.items()
        }
    done = {name: each.result() for name, each in runs.items()}
    return {name: ProcessResult(each.returncode, each.stdout + each.stderr) for name, each in done.items()}


def served(out: Path, ended: ProcessResult) -> ServingResult:
    """The output of an engine before it ended."""
    assert ended.status == 0, ended.log[-4000:]
    assert out.exists(), ended.log[-4000:]
    return ServingResult(**json.loads(out.read_text(encoding="utf-8")), log=ended.log)


def tiny_model(folder: Path) -> Path:
    """A Qwen3 of two layers with random weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=512,
        max_position_embeddings=2048,
        bos_token_id=0,
        eos_token_id=1,
    )
    model: Any = Qwen3ForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def tiny_hybrid_model(folder: Path) -> Path:
    """A Qwen3-Next with random weights: three layers of linear attention, and one of full attention."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    torch.manual_seed(0)
    config = Qwen3NextConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        vocab_size=512,
        max_position_embeddings=2048,
        bos_token_id=0,
        eos_token_id=1,
    )
    model: Any = Qwen3NextForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    # SGLang reads what transformers no longer writes.
    file = folder / "config.json"
    saved = json.loads(file.read_text("utf-8"))
    file.write_text(json.dumps({**saved, "full_attention_interval": config.num_hidden_layers}), "utf-8")
    return folder
