"""Roles of `kvpool serve`: workers for prompts, workers for what follows, and their router."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, contextmanager
from typing import IO, TYPE_CHECKING, Final, NamedTuple

import torch

from kvpool.cluster import Router, Worker, parse_address, read_secret
from kvpool.cluster.worker import REPORT_S
from kvpool.errors import ConfigError, KvPoolError
from kvpool.integrations.kv_events import EventPublisher
from kvpool.integrations.nixl import Endpoint
from kvpool.tools.output import waiting
from kvpool.tools.serve.service import Pools, make_model, revision

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvpool.cluster import ClusterRequest, Role
    from kvpool.serving.generation import Generation
    from kvpool.tools.serve.service import ServeConfig

END_S: Final = 10.0
"""Seconds that workers may take to end."""

_TAIL: Final = 2000


class Options(NamedTuple):
    """The options of a process of a cluster.

    Attributes:
        role: "router", "prefill", "decode", or empty for a router that starts the workers.
        prefill: Workers for prompts.
        decode: Workers for what follows.
        listen: Host and port of the router, for itself.
        router: Host and port of the router, for a worker.
        name: The name of a worker; empty for one of its role and process.
        secret_file: The file with the shared secret; empty for the secret in the environment.
        allow_remote: Whether other machines are part of the cluster.
        host: The address of this machine at which a worker publishes events.
        network: The network devices through which rows are read.
        join_timeout_s: Seconds that workers may take to join.
    """

    role: str = ""
    prefill: int = 0
    decode: int = 0
    listen: str = "127.0.0.1:0"
    router: str = ""
    name: str = ""
    secret_file: str = ""
    allow_remote: bool = False
    host: str = "127.0.0.1"
    network: str = "lo"
    join_timeout_s: float = 120.0

    def check(self, config: ServeConfig) -> None:
        """Raise `ConfigError` if the options contradict each other."""
        if self.role not in {"", "router", "prefill", "decode"}:
            raise ConfigError(f"--role is {self.role!r}; it must be one of router, prefill, decode")
        if self.role in {"prefill", "decode"} and not self.router:
            raise ConfigError(f"a worker for {self.role} needs --router")
        if not self.role and not (self.prefill and self.decode):
            raise ConfigError(
                f"{self.prefill} workers for prompts and {self.decode} for what follows: "
                "at least one of each is needed"
            )
        for option, address in (("--listen", self.listen), ("--router", self.router)):
            if address:
                parse_address(option, address, allow_remote=self.allow_remote)
        if config.store:
            raise ConfigError("a store cannot be shared by the workers of a cluster")


class WorkerError(KvPoolError, RuntimeError):
    """A worker has not joined, or has ended."""


def common(config: ServeConfig) -> dict[str, str | int]:
    """Return the properties that all processes of a cluster have in common."""
    return {"model": revision(config)}


def work(config: ServeConfig, options: Options, *, until_stdin_ends: bool) -> None:
    """Run a worker until a signal ends the process."""
    options.check(config)
    role: Role = "prefill" if options.role == "prefill" else "decode"
    name = options.name or f"{role}-{socket.gethostname()}-{os.getpid()}"
    secret = read_secret(options.secret_file or None)
    address = parse_address("--router", options.router, allow_remote=options.allow_remote)
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    if until_stdin_ends:
        threading.Thread(target=_wait_for_end, args=(stop,), daemon=True).start()
    torch.set_num_threads(1)
    pools = Pools(config, make_model(config), events=True)
    cache = pools.cache
    if cache is None:
        raise ConfigError("a worker needs a prefix cache")
    pooled, where = pools.pooled, f"tcp://{options.host}:*"
    with (
        Endpoint(name, pooled.kv_pool, states=pooled.gdn_pool, network=options.network) as endpoint,
        EventPublisher(cache, endpoint=where, replay_endpoint=where, secret=secret) as publisher,
    ):
        worker = Worker(
            pools.engine, endpoint, name=name, role=role, model=common(config), publisher=publisher
        )
        worker.run(address, secret, stop)


def _wait_for_end(stop: threading.Event) -> None:
    """Wait until stdin is closed, whose other end the parent holds: however the parent ends."""
    sys.stdin.read()
    stop.set()


class Cluster:
    """A router, as `Service` uses an engine.

    Attributes:
        router: The router.
    """

    def __init__(self, router: Router) -> None:
        self.router = router
        self.check: Callable[[], object] = lambda: None
        self._busy = 0.0

    def wait(self, prefill: int, decode: int, timeout: float) -> None:
        """Wait for these numbers of workers, at most for `timeout` seconds.

        Raises:
            WorkerError: If the workers do not join in time.
        """
        text = f"waiting for {prefill} workers for prompts and {decode} for what follows to join"
        with waiting(f"{text}, at most {timeout:g} s"):
            self._wait(prefill, decode, timeout)

    def _wait(self, prefill: int, decode: int, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while True:
            alive = [one.role for one in self.router.workers() if one.is_alive and one.stats]
            if alive.count("prefill") >= prefill and alive.count("decode") >= decode:
                return
            if time.monotonic() > deadline:
                raise WorkerError(
                    f"{alive.count('prefill')} of {prefill} workers for prompts and "
                    f"{alive.count('decode')} of {decode} for what follows have joined in {timeout:g} s"
                )
            self.check()
            self.router.step()

    def submit(
        self, prompt: list[int], max_new_tokens: int, *, on_token: Callable[[Generation, int], object]
    ) -> ClusterRequest:
        """Queue a request."""
        return self.router.submit(prompt, max_new_tokens, on_token=on_token)

    def step(self) -> bool:
        """Run one step of the router.

        Return whether any request is not over, or a worker has not reported since.

        Raises:
            ConfigError: If no worker can go on with requests, and a worker that was started here has ended.
        """
        workers = [worker for worker in self.router.workers() if worker.is_alive]
        if all(worker.role != "decode" for worker in workers):
            self.check()
        now = time.monotonic()
        if self.router.step():
            self._busy = now
        # A report that comes right after the last token may have been made before it.
        return any(now - worker.age_s < self._busy + REPORT_S for worker in workers)

    def stats(self) -> dict[str, int]:
        """Return sums of `Engine.stats` of all workers, and the router's counts of requests."""
        workers = self.router.workers()
        names = {name for worker in workers for name in worker.stats}
        total = {name: sum(worker.stats.get(name, 0) for worker in workers) for name in names}
        for name in ("capacity", "in_use", "cached"):
            total[name] = sum(worker.stats.get(name, 0) for worker in workers if worker.is_alive)
        return total | self.router.stats()


@contextmanager
def children(
    config: ServeConfig, options: Options, cluster: Cluster, secret: bytes
) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Run workers on this machine, as processes of their own. They end with this process.

    Args:
        config: The configuration of their pools and model.
        options: Their numbers by role.
        cluster: The cluster that they join. Its `check` raises `WorkerError` if one of them has ended.
        secret: The shared secret, which is in their environment.

    Yields:
        The processes, by name.
    """
    names = [f"prefill-{number}" for number in range(options.prefill)]
    names += [f"decode-{number}" for number in range(options.decode)]
    with ExitStack() as opened:
        started = [
            opened.enter_context(_child(name, config, cluster.router.address, secret)) for name in names
        ]

        def check() -> None:
            for name, process, errors in started:
                if process.poll() is not None:
                    errors.seek(0)
                    output = errors.read().decode(errors="replace").strip()[-_TAIL:]
                    raise WorkerError(f"{name} has ended with status {process.returncode}:\n{output}")

        cluster.check = check
        yield {name: process for name, process, _ in started}


@contextmanager
def _child(
    name: str, config: ServeConfig, address: str, secret: bytes
) -> Iterator[tuple[str, subprocess.Popen[bytes], IO[bytes]]]:
    role = name.partition("-")[0]
    command = [sys.executable, "-m", "kvpool", "serve", "--role", role, "--router", address]
    command += ["--name", name, "--until-stdin-ends"]
    for option in (
        "model",
        "pool_size",
        "page_size",
        "host_tokens",
        "swap",
        "prefill_budget",
        "device",
        "seed",
    ):
        command += ["--" + option.replace("_", "-"), str(getattr(config, option))]
    environment = {**os.environ, "KVPOOL_SECRET": secret.decode()}
    environment.pop("KVPOOL_SECRET_FILE", None)
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(  # noqa: S603 - this program
            command, env=environment, stdin=subprocess.PIPE, stderr=errors
        ) as process,
    ):
        try:
            yield name, process, errors
        finally:
            process.terminate()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:  # it is stopped, or hangs
                process.kill()


def new_secret() -> bytes:
    """Return a random secret."""
    return secrets.token_hex(32).encode()
