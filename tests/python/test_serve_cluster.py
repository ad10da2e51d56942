"""`kvpool serve` as several processes: tokens, workers that are killed or stopped, machines of their own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import pytest
from test_nixl import nixl
from typer.testing import CliRunner

from kvpool.cluster import Router
from kvpool.tools.cli import app
from kvpool.tools.serve import cluster as clusters
from kvpool.tools.serve.cluster import Cluster, Options, WorkerError, children, common, new_secret
from kvpool.tools.serve.service import ServeConfig, Service

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.processes

__all__ = ["nixl"]  # the fixture

PATIENCE_S = 100
SMALL = ServeConfig(requests=0, pool_size=512, page_size=4)


@pytest.fixture
def environ(nixl: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    for name, value in nixl.items():
        monkeypatch.setenv(name, value)
    return nixl


def plot(router: Router, processes: dict[str, subprocess.Popen[bytes]]) -> Iterator[None]:
    """Failures of workers while requests run. Each worker is serving requests when it fails."""

    def status(name: str) -> tuple[bool, int]:
        [found] = [worker for worker in router.workers() if worker.name == name]
        return found.is_alive, found.requests

    def is_busy(name: str) -> bool:
        is_alive, requests = status(name)
        return is_alive and requests > 0

    while not is_busy("decode-0"):
        yield
    processes["decode-0"].send_signal(signal.SIGSTOP)
    while status("decode-0")[0]:
        yield
    processes["decode-0"].send_signal(signal.SIGCONT)
    while not (status("decode-0")[0] and is_busy("decode-1")):
        yield
    processes["decode-1"].kill()
    while status("decode-1")[0] or not is_busy("prefill-0"):
        yield
    processes["prefill-0"].kill()
    while status("prefill-0")[0] or not is_busy("decode-0"):
        yield


@pytest.mark.usefixtures("environ")
def test_answers_are_the_same_whoever_is_stopped_or_killed() -> None:
    secret = new_secret()
    with Router(secret, model=common(SMALL), lost_after_s=1.5, max_losses=9) as router:
        cluster = Cluster(router)
        with children(SMALL, Options(prefill=1, decode=2), cluster, secret) as processes:
            cluster.wait(1, 2, PATIENCE_S)
            service = Service(SMALL, cluster)
            deadline = time.monotonic() + PATIENCE_S
            for _ in plot(router, processes):
                assert time.monotonic() < deadline
                if not router.step():
                    for _ in range(2):
                        service.submit()
            result = service.serve()
            service.check(result)
    stats = router.stats()
    assert result.is_right, result.differences
    assert stats["finished"] == len(service.requests)
    # On a busy machine others may say nothing for as long, and come back.
    assert (stats["failed"], min(stats["lost_workers"], 3)) == (0, 3)
    assert stats["handed_over"] > 0 < stats["repeated"]


@contextmanager
def machines(names: list[str]) -> Iterator[list[tuple[list[str], str, str]]]:
    """For each name what runs a command there, its address and network device: machines with a switch.

    They are network namespaces where that is allowed, and otherwise this machine.
    """
    prefix, tool = f"kvp{os.getpid()}", shutil.which("ip") or ""

    def ip(*arguments: str) -> None:
        subprocess.run([tool, *arguments], check=True, capture_output=True, timeout=PATIENCE_S)

    if os.getuid() or not tool:
        yield [([], "127.0.0.1", "lo")] * len(names)
        return
    with ExitStack() as made:
        namespaces = [f"{prefix}-{name}" for name in names]
        for namespace in namespaces:
            ip("netns", "add", namespace)
            made.callback(ip, "netns", "del", namespace)
            ip("-n", namespace, "link", "set", "lo", "up")
        ip("-n", namespaces[0], "link", "add", "eth0", "type", "bridge")
        for number, namespace in enumerate(namespaces):
            if number:
                ends = f"v{number} type veth peer name eth0 netns {namespace}"
                ip("-n", namespaces[0], "link", "add", *ends.split())
                ip("-n", namespaces[0], "link", "set", f"v{number}", "master", "eth0", "up")
            ip("-n", namespace, "addr", "add", f"10.77.0.{number + 1}/24", "dev", "eth0")
            ip("-n", namespace, "link", "set", "eth0", "up")
        yield [
            ([tool, "netns", "exec", namespace], f"10.77.0.{number + 1}", "eth0")
            for number, namespace in enumerate(namespaces)
        ]


def test_a_hybrid_model_is_served_by_several_machines(environ: dict[str, str]) -> None:
    command = [sys.executable, "-m", "kvpool", "serve", "--allow-remote", "--device", "cpu"]
    command += ["--model", "qwen3-next", "--page-size", "16", "--conversations", "2"]
    env = {**environ, "KVPOOL_SECRET": "an open secret for tests", "UCX_TLS": "tcp"}
    with machines(["router", "prefill", "decode"]) as (place, *others), ExitStack() as opened:
        wrap, address, _ = place
        router = f"{address}:7077"
        for role, (inside, host, network) in zip(("prefill", "decode"), others, strict=True):
            options = ["--role", role, "--name", role, "--router", router]
            options += ["--host", host, "--network", network]
            worker = subprocess.Popen([*inside, *command, *options], env=env)
            opened.enter_context(worker)
            opened.callback(worker.terminate)
        done = subprocess.run(
            [*wrap, *command, "--role", "router", "--listen", router, "--json"],
            env=env,
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE_S,
        )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["is_right"]
    assert result["finished"] == 8
    assert result["handed_over"] > 0
    workers = {worker["name"]: worker for worker in result["workers"]}
    assert workers["decode"]["stats"]["read_bytes"] > 0
    assert workers["decode"]["stats"]["computed_tokens"] < workers["prefill"]["stats"]["computed_tokens"]


def invoke(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["serve", "--device", "cpu", *arguments])
    # Workers that do not join are no wrong option.
    assert result.exit_code == (1 if "have joined" in result.stderr else 2)
    return result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--role", "both"], "--role is 'both'; it must be one of router, prefill, decode"),
        (["--role", "prefill"], "a worker for prefill needs --router"),
        (["--prefill", "1"], "1 workers for prompts and 0 for what follows"),
        (["--prefill", "1", "--decode", "1", "--store", "x"], "a store cannot be shared"),
        (["--role", "router"], "there is no secret"),
        (["--role", "decode", "--router", "10.0.0.1:1"], "not a loopback address"),
        (["--role", "router", "--listen", "0.0.0.0:1"], "not a loopback address"),
        (["--role", "router", "--secret-file", "/nowhere"], "the secret cannot be read"),
        (["--role", "router", "--join-timeout", "0"], "0 of 1 workers for prompts and 0 of 1"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.syspath_prepend(environ["PYTHONPATH"].split(os.pathsep)[1])
    if "secret" not in message:
        monkeypatch.setenv("KVPOOL_SECRET", "an open secret for tests")
    assert message in invoke(*arguments)


@pytest.mark.usefixtures("environ")
def test_workers_that_do_not_come_are_an_error() -> None:
    secret = new_secret()
    with Router(secret) as router:
        cluster = Cluster(router)
        with (
            children(ServeConfig(page_size=0), Options(prefill=1), cluster, secret),
            pytest.raises(WorkerError, match=r"prefill-0 has ended with status 2:\n(?s:.)*--page-size"),
        ):
            cluster.wait(1, 0, PATIENCE_S)
        cluster.check = lambda: None
        with pytest.raises(WorkerError, match=r"0 of 1 workers for prompts and 0 of 2 .* in 0\.05 s"):
            cluster.wait(1, 2, 0.05)


def test_workers_that_do_not_end_are_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deaf, is_up = tmp_path / "deaf", tmp_path / "up"
    deaf.write_text(f"#!/bin/sh\ntrap '' TERM\ntouch {is_up}\nexec sleep 60\n", encoding="ascii")
    deaf.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(deaf))
    monkeypatch.setattr(clusters, "END_S", 0.1)
    secret = new_secret()
    with Router(secret) as router:
        with children(SMALL, Options(prefill=1), Cluster(router), secret) as processes:
            deadline = time.monotonic() + PATIENCE_S
            while not is_up.exists():
                assert time.monotonic() < deadline
                time.sleep(0.005)
        assert processes["prefill-0"].returncode == -signal.SIGKILL


def test_workers_that_end_later_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody else would ever come."""
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    secret = new_secret()
    with Router(secret) as router:
        cluster = Cluster(router)
        with children(SMALL, Options(decode=1), cluster, secret) as processes:
            processes["decode-0"].wait(PATIENCE_S)
            cluster.submit([1, 2, 3], 4, on_token=lambda *_: None)
            with pytest.raises(WorkerError, match="decode-0 has ended with status 1"):
                cluster.step()
