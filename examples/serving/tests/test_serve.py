"""The command: a model served through the pools, compared with the model alone."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import command_line
import pytest
import torch
from common import some
from kvpool_serving import report
from kvpool_serving.__main__ import main
from kvpool_serving.service import (
    CONFIGS,
    TIE,
    TURNS,
    VOCAB_SIZE,
    Difference,
    ServeConfig,
    ServeResult,
    Service,
)

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.processes

SMALL = ServeConfig(requests=12, per_step=6, pool_size=300)


def invoke(*arguments: str) -> command_line.Result:
    return command_line.invoke(main, ["--device", "cpu", *arguments])


def test_served_tokens_equal_those_of_the_model_alone() -> None:
    for model in CONFIGS:
        result = invoke(
            "--json", "--model", model, "--requests", "6", "--page-size", "16", "--pool-size", "512"
        )
        assert result.exit_code == 0, result.output
        found = json.loads(result.stdout)
        assert found["finished"] == 6 + report.STREAMED
        assert (found["in_use"], found["running"], found["waiting"]) == (0, 0, 0)
        assert found["is_right"]


def test_conversations_compute_less_with_the_cache() -> None:
    result = invoke("--json", "--conversations", "4", "--pool-size", "2048", "--page-size", "4")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    without = found["uncached"]
    for run in (found, without):
        assert run["finished"] == 4 * TURNS
        assert run["in_use"] == run["retractions"] == 0
    assert found["generated_tokens"] == without["generated_tokens"]
    assert found["found_tokens"] + found["computed_tokens"] == without["computed_tokens"]
    assert found["hit_rate"] > 0.6
    assert without["found_tokens"] == without["hit_rate"] == 0


def test_conversations_in_a_small_pool() -> None:
    """Of hybrid models, whose prefixes end at snapshots."""
    result = invoke("--model", "qwen3-next", "--conversations", "4", "--pool-size", "384")
    assert result.exit_code == 0, result.output
    for row in ("with the prefix cache", "without", "found in the cache", "first token", "wrong"):
        assert row in result.stdout


@pytest.mark.parametrize(
    ("model", "swaps"),
    [("qwen3", ["load", "compute"]), ("qwen3-next", ["load"])],
    ids=["qwen3", "qwen3-next"],
)
def test_evicted_conversations_come_back_from_host_memory(model: str, swaps: list[str]) -> None:
    small = ("--model", model, "--conversations", "4", "--pool-size", "320", "--page-size", "4")
    computed = {}
    for swap in swaps:
        result = invoke("--json", *small, "--host-tokens", "4096", "--swap", swap)
        assert result.exit_code == 0, result.output
        found = json.loads(result.stdout)
        assert found["is_right"]
        assert 0 < found["host_pages"] <= found["host_capacity"] == 1024
        assert found["uncached"]["host_capacity"] == found["uncached"]["loaded_tokens"] == 0
        assert (found["loaded_tokens"] > 0) == (swap == "load")
        computed[swap] = found["computed_tokens"]
    assert computed["load"] < computed.get("compute", math.inf)


@pytest.mark.parametrize("model", ["qwen3", "qwen3-next"])
def test_a_restarted_service_finds_its_conversations(model: str, tmp_path: Path) -> None:
    small = ("--model", model, "--conversations", "3", "--pool-size", "512", "--page-size", "4")
    below = ("--host-tokens", "4096", "--swap", "load", "--store", str(tmp_path / "store"))
    runs = []
    for _ in range(2):
        result = invoke("--json", *small, *below)
        assert result.exit_code == 0, result.output
        runs.append(json.loads(result.stdout))
    first, again = runs
    assert first["fetched_tokens"] == 0
    assert 0 < first["stored_pages"] <= again["stored_pages"]
    assert again["fetched_tokens"] > 0
    assert again["computed_tokens"] < 0.8 * first["computed_tokens"]
    if model == "qwen3":
        other = invoke("--json", *small, *below, "--seed", "1")
        assert json.loads(other.stdout)["fetched_tokens"] == 0  # of other weights
    wrong = invoke(*small, "--store", str(tmp_path / "store"))
    assert wrong.exit_code == 2
    assert "there are 0 host tokens" in wrong.stderr


def test_a_killed_service_finds_its_conversations(tmp_path: Path) -> None:
    """Killed in the middle of a run, while pages are written."""
    store = tmp_path / "store"
    options = ["--json", "--conversations", "6", "--pool-size", "512", "--page-size", "4", "--swap", "load"]
    options += ["--host-tokens", "4096", "--store", str(store)]
    command = [sys.executable, "-m", "kvpool_serving", *options]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=env) as process:
        deadline = time.monotonic() + 60
        while not (store / "pages").exists() or (store / "pages").stat().st_size < 40 * 4096:
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.001)
        process.kill()
    result = invoke(*options)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["fetched_tokens"] > 0


def test_the_report_has_host_memory(tmp_path: Path) -> None:
    small = ("--requests", "12", "--per-step", "6", "--pool-size", "300", "--host-tokens", "2000")
    result = invoke(*small, "--store", str(tmp_path))
    assert result.exit_code == 0, result.output
    for row in ("host memory", "of 2,000 pages", "loaded from there", "swap auto", "store", "fetched"):
        assert row in result.stdout


def test_the_command_streams_and_prints_a_report() -> None:
    result = invoke("--requests", "12", "--per-step", "6", "--pool-size", "300")
    assert result.exit_code == 0, result.output
    assert result.stdout.count("tokens of prompt:") == report.STREAMED
    for row in ("retractions", "peak occupancy", "equal to the model alone", "15"):
        assert row in result.stdout


def test_a_small_pool_retracts() -> None:
    service = Service(SMALL)
    result = service.serve()
    assert result.stats["retractions"] > 0
    assert result.stats["finished"] == SMALL.requests
    assert 250 < result.peak_in_use <= 300
    service.check(result)
    assert result.is_right


def test_a_wrong_token_is_found() -> None:
    service = Service(SMALL)
    result = service.serve()
    wrong = service.requests[7]
    wrong.tokens[2] = (wrong.tokens[2] + 1) % VOCAB_SIZE
    service.check(result)
    (found,) = result.differences
    assert (found.request, found.position) == (7, 2)
    assert found.gap > TIE
    assert not result.is_right


def test_only_ties_may_differ() -> None:
    assert Difference(0, 0, TIE / 2).is_tie
    assert not Difference(0, 0, TIE * 2).is_tie


def test_a_load_of_nothing_is_served() -> None:
    result = Service(replace(SMALL, requests=0)).serve()
    assert (result.first_token_s, result.stats["finished"]) == (0.0, 0)


def test_a_leaked_slot_is_found() -> None:
    service = Service(SMALL)
    result = service.serve()
    some(service.pools).pooled.allocator.alloc(1)
    result.stats = service.server.stats()
    assert not result.is_right


def test_a_failed_check_ends_with_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    found = (Difference(3, 1, 0.5),)

    def check(_: Service, result: ServeResult, *_rest: object) -> None:
        result.differences = found

    monkeypatch.setattr(Service, "check", check)
    result = invoke("--requests", "3")
    assert result.exit_code == 1
    assert "request 3 differs from token 1 on" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "gpt"), "argument --model: invalid choice: 'gpt'"),
        (("--requests", "0"), "argument --requests: '0' is not a number from 1 on"),
        (("--prefill-budget", "8"), "max_step_tokens is 8"),
        (("--pool-size", "16"), "the pool 16"),
        (("--store-mib", "8"), "--store-mib is for --store"),
        (("--swap", "never"), "argument --swap: invalid choice: 'never'"),
    ],
)
def test_the_command_reports_errors_in_one_line(arguments: tuple[str, ...], message: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_pytorch_that_cannot_use_the_device_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_size: int, **_options: object) -> None:
        raise AssertionError("Torch not compiled with CUDA enabled\nand more")

    monkeypatch.setattr(torch, "empty", refuse)
    result = invoke("--device", "cpu")
    told = "BackendUnavailableError: PyTorch cannot use cpu: Torch not compiled with CUDA enabled"
    assert (result.exit_code, result.stderr) == (1, f"kvpool_serving: {told}\n")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
@pytest.mark.parametrize(
    ("device", "code", "message"),
    [
        ("cuda", 1, "BackendUnavailableError: device cuda:0 cannot be used: no NVIDIA driver"),
        ("tpu", 2, "unknown device 'tpu'"),
    ],
)
def test_a_device_that_cannot_be_used_is_told_in_one_line(device: str, code: int, message: str) -> None:
    result = invoke("--device", device)
    assert (result.exit_code, result.stdout) == (code, "")
    assert result.stderr.startswith(f"kvpool_serving: {message}")
    assert result.stderr.count("\n") == 1
