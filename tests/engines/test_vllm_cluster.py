"""The commands of "A small cluster" in `docs/engines/vllm.md`, as `make demo-cluster` runs them."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from vllm_cluster_runs import arguments, environment, require


def processes_in(folder: Path) -> list[str]:
    """What runs in a folder or below it."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            place = (process / "cwd").readlink()
            named = (process / "comm").read_text()
        except OSError:  # it has ended, or is not ours
            continue
        if place.is_relative_to(folder):
            found.append(named.strip())
    return found


@pytest.fixture
def in_folder(tmp_path: Path) -> dict[str, str]:
    """The environment, with temporary files in a folder that shows what is left."""
    require()
    return {**environment(), "TMPDIR": str(tmp_path)}


@pytest.mark.timeout(1200)
def test_requests_go_where_their_prefix_is_and_answers_are_the_same(
    in_folder: dict[str, str], tmp_path: Path
) -> None:
    done = subprocess.run(arguments(), env=in_folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-12_000:]
    on_kvpool = r"vLLM 0\.33\.0\S* is on kvpool \S+: blocks, hashes, prefixes, steps, tokens$"
    assert len(re.findall(on_kvpool, done.stdout, re.MULTILINE)) >= 2
    assert done.stdout.count('kvpool_engine_info{engine="vllm"') == 2
    [(first, later)] = re.findall(
        r"to the server with their prefix: (\d+) of 10 requests, then (\d+) of 20", done.stdout
    )
    assert int(first) >= 8
    assert int(later) >= 16
    assert "answered by the other: 10 of 10 requests" in done.stdout
    assert "answers equal to those of one server alone: 40 of 40" in done.stdout
    assert processes_in(tmp_path) == []


@pytest.mark.timeout(300)
@pytest.mark.parametrize("order", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_everything(in_folder: dict[str, str], tmp_path: Path, order: signal.Signals) -> None:
    process = subprocess.Popen(
        arguments(), env=in_folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    until = time.monotonic() + 120
    while len(processes_in(tmp_path)) < 3:  # a shell and two servers
        assert time.monotonic() < until
        assert process.poll() is None
        time.sleep(0.2)
    process.send_signal(order)
    assert process.wait(120) != 0
    assert processes_in(tmp_path) == []


@pytest.mark.timeout(600)
def test_a_server_that_does_not_start_shows_its_log(in_folder: dict[str, str], tmp_path: Path) -> None:
    [python, program, _] = arguments()
    done = subprocess.run(
        [python, program, str(tmp_path)], env=in_folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "--- the end of server-" in done.stderr
    assert done.stderr.rstrip().endswith("ClusterError: servers: a process has ended")
    assert processes_in(tmp_path) == []
