"""Two vLLM servers on the CPU, one that computes prompts and one that answers, and where they are killed."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Any

import vllm_cluster_runs
from sglang_on_cpu import ROOT

if TYPE_CHECKING:
    from collections.abc import Sequence

ANSWER = 8
"""Tokens of an answer."""

CHUNK = 128
"""Tokens of a step: longer prompts are computed in several."""


def prompts(seed: int, count: int, longest: int = 700) -> list[list[int]]:
    """Prompts of 5 tokens and more, every second of which begins like the first of these."""
    draw = random.Random(seed)  # noqa: S311
    shared = [draw.randrange(4, 1000) for _ in range(320)]
    found = []
    for number in range(count):
        own = [draw.randrange(4, 1000) for _ in range(draw.randrange(5, longest - 320))]
        found.append((shared if number % 2 else []) + own)
    return found


class Server:
    """A `vllm serve` in a process group of its own.

    Args:
        folder: Where its log is.
        model: The model.
        connector: `kv_connector` and more of `kv_transfer_config`; without it there is none.
        port: Where it listens; a free one by default.
        options: More of its command line.
        environment: More variables.
    """

    def __init__(
        self,
        folder: Path,
        model: Path,
        connector: dict[str, Any] | None = None,
        port: int | None = None,
        options: Sequence[str] = (),
        **environment: str,
    ) -> None:
        if port is None:
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = free.getsockname()[1]
        self.port, self.model = port, str(model)
        self.log = folder / f"{port}-{time.monotonic_ns()}.log"
        command = [
            sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", self.model, "--host", "127.0.0.1",
            "--port", str(port), "--block-size", "32", "--dtype", "float32", "--enforce-eager",
            "--max-model-len", "2048", "--max-num-seqs", "32", "--kv-cache-memory-bytes", "16M",
            "--max-num-batched-tokens", str(CHUNK), *options,
        ]  # fmt: skip
        if connector is not None:
            command += ["--kv-transfer-config", json.dumps({"kv_role": "kv_both", **connector})]
        found = vllm_cluster_runs.environment()
        found["PYTHONPATH"] += os.pathsep + str(ROOT / "examples")
        more = {
            "VLLM_PLUGINS": "kvpool", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "UCX_TLS": "tcp", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", **environment,
        }  # fmt: skip
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, env={**found, **more}, cwd=folder, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def wait_ready(self, seconds: float = 180) -> None:
        """Waits until it answers."""
        until = time.monotonic() + seconds
        while True:
            with suppress(OSError, HTTPException):
                if self.call("/health")[0] == 200:
                    return
            assert self.process.poll() is None, self.last_lines()
            assert time.monotonic() < until, self.last_lines()
            time.sleep(0.3)

    def call(self, path: str, body: dict[str, Any] | None = None, timeout: float = 60) -> tuple[int, str]:
        """The status and the text of an answer."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            text = None if body is None else json.dumps(body)
            connection.request(
                "GET" if body is None else "POST", path, text, {"Content-Type": "application/json"}
            )
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def complete(self, prompt: Sequence[int], tokens: int = ANSWER, **more: Any) -> dict[str, Any]:  # noqa: ANN401
        """The answer to a prompt; the status must be 200."""
        body = {
            "model": self.model, "prompt": [*prompt], "max_tokens": tokens, "temperature": 0,
            "ignore_eos": True, "return_token_ids": True, **more,
        }  # fmt: skip
        status, text = self.call("/v1/completions", body)
        assert status == 200, f"{status}: {text[:500]}\n{self.last_lines()}"
        found: dict[str, Any] = json.loads(text)
        return found

    def tokens(self, prompt: Sequence[int], **more: Any) -> list[int]:  # noqa: ANN401
        """The tokens of the answer to a prompt."""
        found: list[int] = self.complete(prompt, **more)["choices"][0]["token_ids"]
        return found

    def prefill(self, prompt: Sequence[int]) -> dict[str, Any]:
        """`kv_transfer_params` for the server that answers."""
        answer = self.complete(prompt, 1, kv_transfer_params={"do_remote_decode": True})
        params: dict[str, Any] = answer["kv_transfer_params"]
        assert params
        return params

    def metric(self, name: str) -> float:
        """The value of one of the server's metrics, by the beginning of its line."""
        values = re.findall(rf"^{name}.*? (\S+)$", self.call("/metrics")[1], re.MULTILINE)
        assert values, name
        return sum(map(float, values))

    def wait_unused(self, seconds: float = 20) -> None:
        """Waits until no request has a block."""
        until = time.monotonic() + seconds
        while self.metric("vllm:kv_cache_usage_perc"):
            assert time.monotonic() < until, self.last_lines()
            time.sleep(0.2)

    def last_lines(self) -> str:
        """The end of its log."""
        return self.log.read_text(errors="replace")[-6000:]

    def signal(self, what: signal.Signals) -> None:
        """Sends a signal to all of its processes."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, what)

    def kill(self) -> None:
        """Ends it at once."""
        self.signal(signal.SIGKILL)
        self.process.wait()


def at_once(ask: Any, prompts: Sequence[Sequence[int]], threads: int = 6) -> list[Any]:  # noqa: ANN401
    """What `ask` returns for each prompt, for several at a time."""
    with ThreadPoolExecutor(threads) as pool:
        return [*pool.map(ask, prompts)]


class Order:
    """A file that says at which place of a connector which server is killed."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def give(self, place: str, victim: Server) -> None:
        """From now on the process that first reaches this place kills the victim."""
        self.path.write_text(f"{place} {victim.process.pid}", encoding="utf-8")

    def is_done(self) -> bool:
        """Whether it was reached."""
        return not self.path.exists()


def reach(place: str) -> None:
    """Kills the victim if this is the place. A connector of the tests calls it at each one."""
    order = Path(os.environ["KILL_ORDER"])
    with suppress(FileNotFoundError):
        named, pid = order.read_text(encoding="utf-8").split()
        if named == place:
            order.unlink()  # who fails at that is not the first
            os.killpg(int(pid), signal.SIGKILL)
