"""MooncakeStore: pages between processes, damage, masters and processes that are killed, misuse, forks."""

from __future__ import annotations

import json
import os
import random
import re
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, closing
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvpool import ConfigError
from kvpool.integrations import mooncake as adapter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shared_fixtures import RunSnippet

pytestmark = [pytest.mark.processes, pytest.mark.engines]

EXAMPLES = Path(__file__).parents[2] / "examples" / "serving"
MOONCAKE = Path(os.environ.get("KVPOOL_MOONCAKE") or Path(sys.prefix) / "mooncake")
"""The folder in which `make` installs Mooncake, and the packages of Debian that it needs."""

HAS_PACKAGES = sys.platform == "linux" and sys.version_info < (3, 14)
"""Whether Mooncake has packages for this machine, as `tests/engines/install` asks."""

PROCESS = Path(__file__).parent / "support" / "mooncake_process.py"
ENGINE = Path(__file__).parent / "support" / "mooncake_engine.py"
PAGE = 256 << 10
SEGMENT = 64 << 20
PATIENCE_S = 100


def environment() -> dict[str, str]:
    """The environment of a process that finds Mooncake and what it needs."""
    package = find_spec("kvpool")
    assert package is not None
    assert package.origin is not None
    libraries = {str(library.parent) for library in (MOONCAKE / "debian").rglob("lib*.so.*")}
    searched = {
        "PYTHONPATH": [str(Path(package.origin).parents[1]), str(MOONCAKE), str(EXAMPLES)],
        "LD_LIBRARY_PATH": sorted(libraries),
    }
    return {
        **os.environ,
        **{
            name: os.pathsep.join([*places, *filter(None, [os.environ.get(name)])])
            for name, places in searched.items()
        },
    }


@pytest.fixture(scope="module")
def mooncake() -> dict[str, str]:
    """The environment. Without Mooncake the test is skipped; `make test-engines` makes that an error."""
    if not HAS_PACKAGES:
        pytest.skip("Mooncake has packages for Linux and Python up to 3.13")
    env = environment()
    code = "import mooncake.store, os; print(os.path.dirname(mooncake.store.__file__))"
    tried = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False, timeout=PATIENCE_S
    )
    if tried.returncode:
        missing = f"Mooncake cannot be imported from {MOONCAKE}: {tried.stderr.strip().splitlines()[-1]}"
        if os.environ.get("KVPOOL_REQUIRE_ENGINES"):
            pytest.fail(missing)
        pytest.skip(missing)
    return {**env, "MOONCAKE": tried.stdout.strip()}


class Master:
    """`mooncake_master` on loopback, at one port for its life and those after it."""

    def __init__(self, env: dict[str, str], log: Path, *flags: str) -> None:
        self._env, self._flags, self._log = env, flags, log
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        command = [
            f"{self._env['MOONCAKE']}/mooncake_master",
            "--rpc_address=127.0.0.1",
            f"--rpc_port={self.port}",
            "--metrics_host=127.0.0.1",
            "--metrics_port=0",
            *self._flags,
        ]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(command, env=self._env, stdout=log, stderr=log)
        until(self._answers, f"{self.address} does not answer")

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self._log.read_text("utf-8", "replace")[-2000:]
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


class Server:
    """A process with a `MooncakeStore`: its commands are the methods of `mooncake_process.Process`."""

    def __init__(self, env: dict[str, str], log: Path, program: Path, *arguments: str) -> None:
        self._log = log
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                [sys.executable, str(program), *arguments],
                env=env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self._answer()

    def __call__(self, *command: Any) -> Any:  # noqa: ANN401
        assert self.process.stdin is not None
        self.process.stdin.write(f"{json.dumps(command)}\n")
        self.process.stdin.flush()
        return self._answer()

    def writes(self, page: int) -> bool:
        return bool(self("write", [page], PAGE) == [True])

    def finds(self, page: int) -> bool:
        return bool(self("find", [page]) == [True])

    def write_endlessly(self, first: int) -> None:
        assert self("endless", first, PAGE) is None

    def _answer(self) -> Any:  # noqa: ANN401
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"status {self.process.wait()}: {self._log.read_text('utf-8', 'replace')[-4000:]}"
        return json.loads(line)

    @property
    def log(self) -> str:
        return self._log.read_text("utf-8", "replace")

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


class Cluster:
    """A master and processes, all of which end with the test."""

    def __init__(self, env: dict[str, str], folder: Path, stack: ExitStack, *flags: str) -> None:
        self._env, self._folder, self._stack = env, folder, stack
        self.master = Master(env, folder / "master.log", *flags)
        stack.callback(self.master.kill)
        self._servers = 0

    def server(self, segment: int = SEGMENT, program: Path = PROCESS) -> Server:
        self._servers += 1
        log = self._folder / f"server-{self._servers}.log"
        server = Server(self._env, log, program, self.master.address, str(segment))
        self._stack.callback(server.kill)
        return server


@pytest.fixture(scope="module")
def pair(
    mooncake: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, Server]]:
    """Two processes that share memory of both. Each test has numbers of its own."""
    with ExitStack() as stack:
        cluster = Cluster(mooncake, tmp_path_factory.mktemp("mooncake"), stack)
        yield cluster.server(), cluster.server()


@pytest.fixture
def start(mooncake: dict[str, str], tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    """Starts a cluster with these flags of its master."""
    with ExitStack() as stack:
        yield lambda *flags: Cluster(mooncake, tmp_path, stack, *flags)


def some_of(reader: Server, first: int) -> list[int]:
    """Pages from this one on that are there, as soon as there are any."""
    pages = [*range(first, first + 20_000)]
    found: list[int] = []

    def is_any() -> bool:
        are_there = reader("find", pages)
        found[:] = [page for page, is_there in zip(pages, are_there, strict=True) if is_there]
        return bool(found)

    until(is_any, "nothing is found")
    return found


def until(is_so: Callable[[], bool], message: str) -> None:
    end = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < end, message
        time.sleep(0.05)


def test_processes_read_each_others_pages(pair: tuple[Server, Server]) -> None:
    one, other = pair
    pages = [*range(100, 116)]
    assert other("find", pages) == [False] * 16
    assert other("read", pages, PAGE) == ["missing"] * 16
    assert one("write", pages[:8], PAGE) == [True] * 8
    assert other("write", pages[8:], PAGE) == [True] * 8
    for server in pair:
        assert server("find", [*pages, 99]) == [True] * 16 + [False]
        assert server("read", [99, *pages], PAGE) == ["missing"] + ["right"] * 16


@pytest.mark.parametrize("size", [1, 36, 4095, 4097, 1 << 20, 8 << 20])
def test_pages_have_any_size(pair: tuple[Server, Server], size: int) -> None:
    one, other = pair
    assert one("write", [200 + size], size) == [True]
    assert other("read", [200 + size], size) == ["right"]
    others = [length for length in (size - 1, size + 1, size + 36, size // 2) if 0 < length <= 8 << 20]
    assert [other("read", [200 + size], length) for length in others] == [["missing"]] * len(others)


def test_a_key_is_written_once(pair: tuple[Server, Server]) -> None:
    one, other = pair
    assert one("write", [300], PAGE) == other("write", [300], PAGE) == one("write", [300], PAGE) == [True]
    # In one call, too. Of such a key Mooncake would read one.
    assert one("write", [301, 302, 301], PAGE) == [True] * 3
    assert other("read", [301, 302, 301, 303, 301], PAGE) == ["right", "right", "right", "missing", "right"]


def test_a_call_takes_many_pages_or_none(pair: tuple[Server, Server]) -> None:
    one, other = pair
    pages = [*range(10_000, 13_000)]
    assert all(one("write", pages, 512))
    assert other("read", pages, 512) == ["right"] * 3000
    assert all(other("find", pages))
    assert one("write", [], PAGE) == one("read", [], PAGE) == one("find", []) == []


def test_a_value_that_does_not_fit_its_key_is_missing(pair: tuple[Server, Server]) -> None:
    one, other = pair
    before = other("damaged")
    assert one("forge", 400, PAGE, 401) == 0
    one("tear", 402, PAGE)
    assert other("find", [400, 401, 402]) == [True] * 3
    assert other("read", [400, 401, 402], PAGE) == ["missing", "right", "missing"]
    assert other("damaged") == before + 2
    # It is removed, so that it can be written again.
    assert other("find", [400, 401, 402]) == [False, True, False]
    assert one("write", [400, 402], PAGE) == [True, True]
    assert other("read", [400, 401, 402], PAGE) == ["right"] * 3


def test_evicted_pages_are_missing(start: Callable[..., Cluster]) -> None:
    # Pages written or found may be evicted after a moment instead of ten seconds.
    cluster = start("--default_kv_lease_ttl=50", "--eviction_ratio=0.2")
    one, other = cluster.server(16 << 20), cluster.server(16 << 20)
    pages = [*range(320)]
    written = 0
    for first in range(0, 320, 16):
        written += sum(one("write", pages[first : first + 16], PAGE))
        assert "wrong" not in other("read", pages[: first + 16][-24:], PAGE)
    assert written > 128, "it took no more than fit"
    states = other("read_all", pages, PAGE)
    assert states.keys() == {"missing", "right"}
    assert other("damaged") == 0


def test_a_page_that_is_only_asked_for_is_not_kept(start: Callable[..., Cluster]) -> None:
    """The master keeps what it was asked about for a second, and a scheduler asks more often."""
    cluster = start("--default_kv_lease_ttl=1000")
    server = cluster.server()
    assert server("write", [1, 2, 3], PAGE) == [True] * 3
    assert server("find", [1, 2, 9]) == [True, True, False]
    end = time.monotonic() + 1.5
    while time.monotonic() < end:
        assert server("find", [1]) == [True]
        assert server("touch", [2]) == [True]
        time.sleep(0.05)
    assert server("remove", [1, 2, 3]) == [True, False, True]
    # It is known that it was there, until a use shows that it is not.
    assert server("find", [1, 2, 9]) == [True, True, False]
    assert server("read", [1, 2, 3], PAGE) == ["missing", "right", "missing"]
    assert server("find", [1, 2, 3]) == [False, True, False]


def test_sharing_goes_on_with_a_master_that_was_restarted(start: Callable[..., Cluster]) -> None:
    cluster = start()
    one, other = cluster.server(), cluster.server()
    assert one("write", [1, 2], PAGE) == [True] * 2
    for life in range(2):
        cluster.master.kill()
        for server in (one, other):
            assert server("find", [1, 2]) == [False] * 2
            assert server("read", [1, 2], PAGE) == ["missing"] * 2
            assert server("write", [3], PAGE) == [False]
        cluster.master.start()
        for page, server, reader in ((10 + life, one, other), (20 + life, other, one)):
            until(partial(server.writes, page), "nothing is written")
            until(partial(reader.finds, page), "nothing is found")
            assert reader("read", [page], PAGE) == ["right"]
        assert "wrong" not in other("read", [1, 2, 3], PAGE)
    assert one.log.count(f"the Mooncake master {cluster.master.address} is gone") >= 2


def prompts_of(number: int) -> list[list[int]]:
    chance = random.Random(number)  # noqa: S311
    return [[chance.randrange(50) for _ in range(20)] for _ in range(3)]


def test_serving_processes_share_prefixes_as_long_as_there_is_a_master(start: Callable[..., Cluster]) -> None:
    cluster = start()
    one, other = cluster.server(program=ENGINE), cluster.server(program=ENGINE)
    first = one(*prompts_of(0))
    assert (first["are_right"], first["fetched"]) == (True, 0)
    longer = [p + tokens + [1, 2] for p, tokens in zip(prompts_of(0), first["tokens"], strict=True)]
    again = other(*longer)
    assert again["are_right"]
    assert again["fetched"] >= again["loaded"] >= 3 * 20
    cluster.master.kill()
    for server in (one, other):
        alone = server(*prompts_of(1))
        assert (alone["are_right"], alone["fetched"]) == (True, 0)
    cluster.master.start()
    number = 1

    def share_again() -> bool:
        nonlocal number
        number += 1
        assert one(*prompts_of(number))["are_right"]
        shared = other(*prompts_of(number))
        assert shared["are_right"]
        return bool(shared["fetched"])

    until(share_again, "they share nothing")


def test_a_master_that_is_restarted_while_pages_move_leaves_none_wrong(start: Callable[..., Cluster]) -> None:
    cluster = start()
    reader = cluster.server(0)
    writers = {first: cluster.server(16 << 20) for first in (0, 100_000)}
    for first, writer in writers.items():
        writer.write_endlessly(first)

    for _ in range(3):
        for first in writers:
            pages = some_of(reader, first)
            assert "wrong" not in reader("read_all", pages, PAGE)
        cluster.master.kill()
        cluster.master.start()
    for writer in writers.values():
        assert writer.process.poll() is None


def test_pages_of_a_killed_writer_are_right_or_missing(start: Callable[..., Cluster]) -> None:
    cluster = start("--client_ttl=2")
    reader = cluster.server(256 << 20)
    first = 0
    for turn in range(4):
        first += 100_000
        writer = cluster.server(0 if turn % 2 else 16 << 20)  # into the memory of others, and its own
        writer.write_endlessly(first)
        pages = some_of(reader, first)
        writer.kill()
        states = reader("read_all", [*pages, *range(pages[-1] + 1, pages[-1] + 64)], PAGE)
        assert "wrong" not in states
        assert turn % 2 == 0 or states["right"]
    until(partial(reader.writes, 1), "nothing is written")
    assert reader("read", [1], PAGE) == ["right"]


def test_misuse_is_refused_with_its_numbers(pair: tuple[Server, Server]) -> None:
    patterns = [
        "ArgumentError: a key has 32 bytes, not 5",
        "ArgumentError: a key has 32 bytes, not 33",
        "ArgumentError: 2 keys, 1 addresses and 1 sizes",
        *["are in no region that was attached"] * 5,
        "ArgumentError: a region of 0 bytes at 0x",
        "ArgumentError: the region at 0x",
        "ConfigError: master is '127.0.0.1'; it must be 'host:port'",
        "ConfigError: master is '127.0.0.1:0'",
        "ConfigError: master is ':50051'",
        "ConfigError: segment_bytes is -1, below 0",
        "ConfigError: protocol is 'pigeon'; it is 'tcp' or 'rdma'",
        "ConfigError: timeout_s is 0; it must be above 0, and at most 30",
        "ConfigError: timeout_s is 31; it must be above 0, and at most 30",
        "ConfigError: MC_TCP_PROGRESS_TIMEOUT_SEC is '0'; it must be above 0, and at most 30",
        "ConfigError: the Mooncake master 127.0.0.1:1 cannot be reached: ",
    ]
    said = pair[0]("errors")
    assert len(said) == len(patterns)
    assert [pattern for pattern, message in zip(patterns, said, strict=True) if pattern not in message] == []
    assert pair[0]("write", [500], PAGE) == [True]


def test_memory_is_attached_again(start: Callable[..., Cluster]) -> None:
    assert start().server()("attach_again") == [[True]] * 3


def test_threads_share_a_store(pair: tuple[Server, Server]) -> None:
    states = pair[0]("threads", 6, 12, 64 << 10)
    assert len(states) == 6 * 12 * 8
    assert "wrong" not in states
    assert states.count("right") >= len(states) // 2


def test_a_read_that_would_go_on_gives_the_store_up(start: Callable[..., Cluster]) -> None:
    cluster = start()
    one, other = cluster.server(), cluster.server()
    assert one("write", [1], PAGE) == [True]
    assert one("read_slowly", 1, PAGE) == [[["missing"], ["missing"]], ["missing"], [False], [False]]
    assert "the store is given up" in one.log
    assert other.writes(2)


def test_a_child_of_a_fork_cannot_use_the_store(pair: tuple[Server, Server]) -> None:
    one, other = pair
    said = json.loads(one("fork"))
    assert said == [f"the store belongs to process {one.process.pid}, from which this one was forked"] * 3
    assert one("write", [600], PAGE) == [True]
    assert other("read", [600], PAGE) == ["right"]


def test_close_waits_for_calls_and_takes_the_segment_along(start: Callable[..., Cluster]) -> None:
    cluster = start()
    one, other = cluster.server(), cluster.server(0)
    assert one("write", [1], PAGE) == [True]
    assert other("read", [1], PAGE) == ["right"]
    assert one("close") == ["the store is closed"] * 3
    assert other("read", [1], PAGE) == ["missing"]
    assert other("write", [2], PAGE) == [False]  # no memory is left


def test_the_examples_of_the_documentation_run(
    start: Callable[..., Cluster], mooncake: dict[str, str]
) -> None:
    page = Path(__file__).parents[2] / "docs" / "mooncake.md"
    blocks = re.findall(r"^```python mooncake\n(.*?)^```$", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 3
    code = "\n".join(blocks)
    assert code.count("127.0.0.1:50051") == 4
    code = code.replace("127.0.0.1:50051", start().master.address)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=mooncake,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr


class Registry:
    """A client of Mooncake that registers memory, but not what begins at `refused`."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.refused = 0

    def setup(self, *_arguments: object) -> int:
        return 0

    def register_buffer(self, address: int, size: int) -> int:
        if address == self.refused:
            return -1
        self.registered[address] = address + size
        return 0

    def unregister_buffer(self, address: int) -> int:
        del self.registered[address]
        return 0

    def close(self) -> int:
        return 0


def test_memory_that_is_attached_in_part_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store goes on with what Mooncake has registered, and never passes it other memory."""
    client = Registry()
    monkeypatch.setattr(adapter, "_new_client", lambda: client)
    monkeypatch.setattr(adapter, "_connect", lambda _endpoint: "127.0.0.1")
    monkeypatch.setattr(adapter, "_set_timeouts", lambda _seconds: None)
    with closing(adapter.MooncakeStore("127.0.0.1:50051")) as store:
        store.attach([(4096, 100), (8192, 100)])
        client.refused = 8000
        with pytest.raises(ConfigError, match="cannot register 1000 bytes at 0x1f40"):
            store.attach([(2048, 100), (4000, 1000), (8000, 1000)])
        assert dict(zip(*store._regions, strict=True)) == client.registered == {2048: 2148, 4000: 5000}
        client.refused = 0
        store.attach([(8000, 1000)])
        assert dict(zip(*store._regions, strict=True)) == client.registered


def test_without_the_package_the_error_says_what_to_install(run_snippet: RunSnippet) -> None:
    said = run_snippet(
        """
        import kvpool.integrations.mooncake
        try:
            kvpool.integrations.mooncake.MooncakeStore("127.0.0.1:50051")
        except kvpool.ConfigError as error:
            print(error)
        """,
        hidden=("mooncake",),
    )
    assert "install 'kvpool[mooncake]'" in said


def test_without_a_library_the_error_names_the_packages_of_debian(
    run_snippet: RunSnippet, tmp_path: Path
) -> None:
    package = tmp_path / "mooncake"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "store.py").write_text("raise ImportError('libibverbs.so.1: cannot open', path='store.so')\n")
    said = run_snippet(
        f"""
        sys.path.insert(0, {str(tmp_path)!r})
        import kvpool.integrations.mooncake
        try:
            kvpool.integrations.mooncake.MooncakeStore("127.0.0.1:50051")
        except kvpool.ConfigError as error:
            print(error)
        """
    )
    assert "libibverbs.so.1: cannot open" in said
    assert "libibverbs1, libnl-3-200, libnl-route-3-200" in said
