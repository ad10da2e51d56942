"""Two vLLM servers on kvpool behind vllm-router: routed by KV events, then with prefill and decode apart.

`make demo-cluster` installs all of it for the CPU and runs it with a model of a million random weights. Where
`vllm`, `vllm-router` and NIXL are installed, run `python examples/vllm_cluster.py MODEL`; with `--gpu` it
leaves out the settings for the CPU. The commands are those of "A small cluster" in `docs/engines/vllm.md`,
but for the model and the ports, which are free ones. It fails if an answer differs from that of one server
alone, if few requests go where their prefix is, or if it takes too long; then it shows the end of every log.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack, contextmanager, suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE = Path(__file__).parents[1] / "docs" / "engines" / "vllm.md"

PREFILL, DECODE = SERVERS = (8100, 8200)
BY_EVENTS, APART = 8000, 8001
PORTS = (*SERVERS, BY_EVENTS, APART, 5557, 5558, 5567, 5568, 29000, 29001)
"""The ports that the page names: of the servers, the routers, events, replays, the routers' metrics."""

PREFIXES, SHARED, OWN, ROUNDS, ANSWER = 10, 640, 20, 3, 8
"""Prefixes, their tokens, tokens after them, requests for each prefix, and tokens of an answer."""

TOKENS = range(4, 1000)
"""Of prompts: any model has these, and in the small one they are words."""

ENOUGH = 0.8
"""The share of requests, from the second round on, that must go where their prefix is."""

ANSWER_S, STOP_S, SETTLE_S = 120, 20, 2
"""Seconds in which a request is answered, in which processes end when they are asked to, and in which events
arrive: the router does not tell what it has indexed."""


class ClusterError(Exception):
    """The cluster did not do what it should."""


class TooLongError(Exception):
    """The time is over. No wait takes this for an answer that is still to come."""


FAILURES = (ClusterError, TooLongError, OSError, HTTPException, subprocess.TimeoutExpired)
"""What is told with the logs."""


def commands() -> list[str]:
    """Return the shell commands of the page, block by block."""
    section = PAGE.read_text(encoding="utf-8").partition("\n## A small cluster\n")[2].partition("\n## ")[0]
    return re.findall(r"^```sh\n(.*?)^```$", section, flags=re.MULTILINE | re.DOTALL)


def free_ports(count: int) -> list[int]:
    """Return ports that nothing listens on, all different."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]


def call(port: int, path: str, body: dict[str, Any] | None = None) -> str:
    """Return what a server on this machine answers."""
    connection = HTTPConnection("127.0.0.1", port, timeout=ANSWER_S)
    try:
        method, text = ("GET", None) if body is None else ("POST", json.dumps(body))
        connection.request(method, path, text, {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer = response.read().decode()
        if response.status != 200:  # noqa: PLR2004
            raise ClusterError(f"{path} on port {port}: status {response.status}, {answer[:500]}")
        return answer
    finally:
        connection.close()


class Cluster:
    """The commands of the page as processes, with their logs in a folder."""

    def __init__(self, model: str, folder: Path, *, gpu: bool) -> None:
        self._model, self._folder = model, folder
        self._ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
        self._started: dict[str, subprocess.Popen[bytes]] = {}
        self.last_lines = ""
        settings, on_cpu, servers, *rest = map(self._here, commands())
        self._settings = settings + ("" if gpu else on_cpu)
        self.servers = servers
        self.look, self.by_events, self.ask, self.apart = rest

    def _here(self, block: str) -> str:
        """Return a block of the page with the model and the ports of this cluster."""
        block = re.sub(r"^MODEL=.*$", f"MODEL={shlex.quote(self._model)}", block, flags=re.MULTILINE)
        named = "|".join(map(str, PORTS))
        return re.sub(rf"\b(?:{named})\b", lambda found: str(self._ports[int(found[0])]), block)

    def _bash(self, block: str) -> dict[str, Any]:
        """Return how a block is run: as in a shell that has run the settings."""
        kept = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
        return {
            "args": ["bash", "-euo", "pipefail", "-c", self._settings + block],
            "cwd": self._folder,
            "env": {**kept, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"},
        }

    def run(self, block: str) -> str:
        """Run a block, and return what it prints."""
        done = subprocess.run(
            **self._bash(block), capture_output=True, text=True, check=False, timeout=ANSWER_S
        )
        if done.returncode:
            raise ClusterError(f"status {done.returncode} of\n{block}\n{done.stdout}{done.stderr}")
        return str(done.stdout)

    @contextmanager
    def started(self, name: str, block: str, *ports: int) -> Iterator[None]:
        """Start a block in a process group of its own, and wait until its ports answer."""
        with (self._folder / f"{name}.log").open("wb") as log:
            # The shell ends with the first server that does.
            process = subprocess.Popen(
                **self._bash(f"{block}\nwait -n"), start_new_session=True, stdin=subprocess.DEVNULL,
                stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip
        self._started[name] = process
        try:
            for port in ports:
                while not self._is_ready(port):
                    self.check()
                    time.sleep(0.5)
            yield
        except FAILURES:
            # Before the servers write that they were ended.
            self.last_lines = self.last_lines or self._logs()
            raise
        finally:
            del self._started[name]
            stop(process)

    def check(self) -> None:
        """Raise an error if something that was started has ended."""
        for name, process in self._started.items():
            if process.poll() is not None:
                raise ClusterError(f"{name}: a process has ended")

    def _is_ready(self, port: int) -> bool:
        with suppress(OSError, HTTPException, ClusterError):
            self.get(port, "/health")
            return True
        return False

    def get(self, port: int, path: str) -> str:
        """Return what the server or router answers that has a port of the page."""
        return call(self._ports[port], path)

    def answer(self, port: int, prompt: list[int], **options: str) -> str:
        """Return what the model says after a prompt."""
        body = {
            "model": self._model, "prompt": prompt, "max_tokens": ANSWER, "temperature": 0,
            "ignore_eos": True, **options,
        }  # fmt: skip
        answered = json.loads(call(self._ports[port], "/v1/completions", body))
        return str(answered["choices"][0]["text"])

    def counts(self, port: int) -> Counter[str]:
        """Return a server's own figures: requests, and tokens of prompts by where they came from."""
        found: Counter[str] = Counter()
        for line in self.get(port, "/metrics").splitlines():
            name, _, value = line.rpartition(" ")
            if name.startswith("vllm:request_success_total{"):
                found["requests"] += int(float(value))
            elif name.startswith("vllm:prompt_tokens_by_source_total{"):
                [source] = re.findall(r'source="(\w+)"', name)
                found[source] += int(float(value))
        return found

    def _logs(self, lines: int = 30) -> str:
        """Return the end of every log."""
        texts = {log.name: log.read_text(errors="replace") for log in sorted(self._folder.glob("*.log"))}
        return "\n".join(
            f"--- the end of {name}\n" + "\n".join(text.splitlines()[-lines:]) for name, text in texts.items()
        )


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a process group, at last by force."""
    for order in (signal.SIGTERM, signal.SIGKILL):
        until = time.monotonic() + STOP_S
        with suppress(ProcessLookupError):  # the whole group has ended
            os.killpg(process.pid, order)
            while time.monotonic() < until:
                process.poll()  # the leader counts until it has been waited for
                os.killpg(process.pid, 0)
                time.sleep(0.1)
            continue
        break
    process.wait()


class Board:
    """Where requests went, as a table and as figures."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._rows: dict[tuple[str, int], Counter[str]] = {}
        self._before = {server: cluster.counts(server) for server in SERVERS}

    def await_requests(self, part: str, count: int) -> dict[int, Counter[str]]:
        """Return what servers have counted since the last call, once they have finished so many requests."""
        until = time.monotonic() + ANSWER_S
        while True:
            now = {server: self._cluster.counts(server) for server in SERVERS}
            new = {server: now[server] - self._before[server] for server in SERVERS}
            done = sum(each["requests"] for each in new.values())
            if done >= count:
                break
            if time.monotonic() > until:
                raise ClusterError(f"{part}: the servers count {done} requests, not {count}")
            time.sleep(0.05)
        self._before = now
        for server, each in new.items():
            row = self._rows.setdefault((part, server), Counter())
            row.update(each)
            row["hits"] += each["local_cache_hit"] >= SHARED
        return new

    def __rich__(self) -> Table:
        table = Table(title="Requests of two vLLM servers on kvpool")
        table.add_column("part")
        table.add_column("server")
        for title in ("requests", "prefix hits", "tokens cached", "computed", "over NIXL"):
            table.add_column(title, justify="right")
        for (part, server), row in self._rows.items():
            figures = ("requests", "hits", "local_cache_hit", "local_compute", "external_kv_transfer")
            table.add_row(part, str(server), *(f"{row[figure]:,}" for figure in figures))
        return table


Asked = list[tuple[list[int], str]]
"""Prompts and what was answered."""


def ask_by_events(cluster: Cluster, board: Board, numbers: random.Random) -> Asked:
    """Give each prefix to one server, then ask for what begins with them. Most must go there."""
    prefixes = [(numbers.choices(TOKENS, k=SHARED), numbers.choice(SERVERS)) for _ in range(PREFIXES)]
    for prefix, server in prefixes:
        cluster.answer(server, prefix)
        board.await_requests("warm", 1)
    asked, right = [], [0] * ROUNDS
    with cluster.started("router-by-events", cluster.by_events, BY_EVENTS):
        # What was sent before the router came, it asks for once a server sends something new.
        for server in SERVERS:
            cluster.answer(server, numbers.choices(TOKENS, k=SHARED))
            board.await_requests("new event", 1)
        time.sleep(SETTLE_S)
        for round_number in range(ROUNDS):
            for prefix, server in prefixes:
                prompt = prefix + numbers.choices(TOKENS, k=OWN)
                asked.append((prompt, cluster.answer(BY_EVENTS, prompt)))
                new = board.await_requests("by events", 1)[server]
                right[round_number] += new["requests"] == 1 and new["local_cache_hit"] >= SHARED
        cluster.run(cluster.ask)
        board.await_requests("curl", 1)
    of = PREFIXES * (ROUNDS - 1)
    later = sum(right[1:])
    print(f"to the server with their prefix: {right[0]} of {PREFIXES} requests, then {later} of {of}")
    if later < ENOUGH * of:
        raise ClusterError("too few requests went where their prefix is")
    return asked


def ask_apart(cluster: Cluster, board: Board, numbers: random.Random) -> Asked:
    """Ask for prompts that one server computes and the other answers."""
    asked = []
    with cluster.started("router-apart", cluster.apart, APART):
        for _ in range(PREFIXES):
            prompt = numbers.choices(TOKENS, k=SHARED)
            asked.append((prompt, cluster.answer(APART, prompt)))
            new = board.await_requests("apart", 2)
            if new[PREFILL]["local_compute"] < SHARED or new[DECODE]["external_kv_transfer"] < SHARED - 1:
                raise ClusterError(f"a prompt was not computed on one server for the other: {new}")
    print(f"computed on one server and answered by the other: {len(asked)} of {len(asked)} requests")
    return asked


def compare(cluster: Cluster, board: Board, asked: Asked) -> None:
    """Ask one server alone, which must find nothing in its cache, and compare the answers."""
    same = 0
    for number, (prompt, answered) in enumerate(asked):
        same += cluster.answer(PREFILL, prompt, cache_salt=f"alone {number}") == answered
        if board.await_requests("alone", 1)[PREFILL]["local_cache_hit"]:
            raise ClusterError("the server that answers alone has found a prompt in its cache")
    print(f"answers equal to those of one server alone: {same} of {len(asked)}")
    if same < len(asked):
        raise ClusterError("answers differ")


def run(cluster: Cluster, seed: int) -> None:
    """Start the servers and ask them in both ways."""
    began = time.monotonic()
    print("two servers start, which takes a minute or more")
    with cluster.started("servers", cluster.servers, *SERVERS):
        print(f"both answer after {time.monotonic() - began:.0f} s")
        print(cluster.run(cluster.look), end="")
        numbers = random.Random(seed)  # noqa: S311
        board = Board(cluster)
        with Live(board, console=Console(), refresh_per_second=4):
            asked = ask_by_events(cluster, board, numbers)
            asked += ask_apart(cluster, board, numbers)
            compare(cluster, board, asked)


def end(number: int, _: object) -> None:
    """End the program, and everything that it has started."""
    if number == signal.SIGALRM:
        raise TooLongError("it took too long")
    sys.exit(128 + number)


def main() -> int:
    """Run the cluster in a temporary folder."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a folder, or a model that is downloaded already")
    parser.add_argument("--gpu", action="store_true", help="leave out the settings for the CPU")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    parser.add_argument("--seconds", type=int, default=900, help="after which it fails")
    options = parser.parse_args()
    missing = [name for name in ("bash", "vllm", "vllm-router") if shutil.which(name) is None]
    if missing:
        parser.error(f"not found: {', '.join(missing)}")
    model = str(Path(options.model).resolve()) if Path(options.model).is_dir() else options.model
    for each in (signal.SIGTERM, signal.SIGALRM):
        signal.signal(each, end)
    signal.alarm(options.seconds)
    with tempfile.TemporaryDirectory() as folder:
        cluster = Cluster(model, Path(folder), gpu=options.gpu)
        try:
            run(cluster, options.seed)
        except FAILURES as error:
            print(cluster.last_lines, f"{type(error).__name__}: {error}", sep="\n", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            return 128 + signal.SIGINT
    return 0


if __name__ == "__main__":
    sys.exit(main())
