"""Endpoints over NIXL, in processes of their own: rows between them, and peers that are killed or stopped."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from shared_fixtures import RunSnippet
    from typing_extensions import Self

pytestmark = [pytest.mark.processes, pytest.mark.engines]

NIXL = Path(os.environ.get("KVPOOL_NIXL") or Path(sys.prefix) / "nixl")
"""The folder in which `make` installs NIXL."""

HAS_PACKAGES = sys.platform == "linux" and sys.version_info < (3, 15)
PROCESS = Path(__file__).parent / "support" / "nixl_process.py"
PATIENCE_S = 60
IP = shutil.which("ip")


def environment() -> dict[str, str]:
    """The environment of a process that finds NIXL."""
    package = find_spec("kvpool")
    assert package is not None
    assert package.origin is not None
    places = [str(Path(package.origin).parents[1]), str(NIXL), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(places),
        "NIXL_LOG_LEVEL": "FATAL",
        "UCX_LOG_LEVEL": "fatal",
    }


@pytest.fixture(scope="module")
def nixl() -> dict[str, str]:
    """The environment. Without NIXL the test is skipped; `make test-engines` makes that an error."""
    if not HAS_PACKAGES:
        pytest.skip("NIXL has packages for Linux")
    env = environment()
    tried = subprocess.run(
        [sys.executable, "-c", "import nixl"],
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    if tried.returncode:
        missing = f"NIXL cannot be imported from {NIXL}: {tried.stderr.strip().splitlines()[-1]}"
        if os.environ.get("KVPOOL_REQUIRE_ENGINES"):
            pytest.fail(missing)
        pytest.skip(missing)
    return env


def wait_until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.002)


class Process:
    """One process with an endpoint."""

    def __init__(
        self, env: dict[str, str], name: str, inside: Sequence[str] = (), /, **options: str | int
    ) -> None:
        """Start it by the command `inside`, with the options of `nixl_process.py`."""
        self.name = name
        values = [f"--{option}={value}" for option, value in options.items()]
        self._process = subprocess.Popen(
            [*inside, sys.executable, str(PROCESS), name, *values],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, command: str, *arguments: object) -> Any:  # noqa: ANN401
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{json.dumps([command, arguments])}\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"{self.name} has ended: {self._process.wait()}"
        return json.loads(line)

    def connections(self) -> set[tuple[str, str]]:
        """The two addresses of each TCP socket that it has open, its own first."""
        files = Path(f"/proc/{self._process.pid}/fd")
        targets = []
        for file in files.iterdir():
            with suppress(OSError):  # closed meanwhile
                targets.append(str(file.readlink()))
        found = set()
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/net/{table}").read_text(encoding="ascii").splitlines()[1:]:
                fields = line.split()
                if f"socket:[{fields[9]}]" in targets:
                    found.add((fields[1], fields[2]))
        return found

    def is_over(self, transfer: int) -> bool:
        return bool(self.ask("transfer", transfer)[0])

    def read(
        self, source: Process, ticket: str, slots: list[int], states: list[int] | None = None
    ) -> str | None:
        """Reads to the end; the error."""
        at = self.ask("read", source.name, ticket, slots, states or [])
        wait_until(lambda: self.is_over(at), "the read is not over")
        error: str | None = self.ask("transfer", at)[1]
        return error

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)
        if number is signal.SIGKILL:
            self._process.wait(PATIENCE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


def pair(env: dict[str, str], stack: ExitStack, **options: int) -> tuple[Process, Process]:
    """Two processes that know each other."""
    a, b = (stack.enter_context(Process(env, name, **options)) for name in "ab")
    assert b.ask("connect", a.ask("metadata")) == "a"
    assert a.ask("connect", b.ask("metadata")) == "b"
    return a, b


@pytest.fixture(scope="module")
def three(nixl: dict[str, str]) -> Iterator[tuple[Process, Process, Process]]:
    """Two that know each other, and one whose rows are larger."""
    with ExitStack() as stack:
        other = stack.enter_context(Process(nixl, "c", dim=16))
        yield (*pair(nixl, stack), other)


@pytest.fixture
def two_processes(three: tuple[Process, Process, Process]) -> tuple[Process, Process]:
    return three[:2]


SLOTS = {
    "contiguous": (list(range(100, 164)), list(range(7, 71))),
    "scattered": ([7 * slot % 509 + 1 for slot in range(64)], [11 * slot % 509 + 1 for slot in range(64)]),
    "one": ([511], [1]),
}


@pytest.mark.parametrize("kind", SLOTS)
def test_rows_between_processes(two_processes: tuple[Process, Process], kind: str) -> None:
    a, b = two_processes
    there, here = SLOTS[kind]
    a.ask("fill", there, 5)
    b.ask("fill", list(range(1, 512)), 6)
    ticket = a.ask("lend", there, 30, [2, 3])
    assert b.read(a, ticket, here, [4, 1]) is None
    assert b.ask("wrong", here, 5) == 0
    assert (b.ask("state", 4), b.ask("state", 1), b.ask("state", 2)) == (
        [5.25, -5.25],
        [5.375, -5.375],
        [6.25, -6.25],
    )
    wait_until(lambda: a.ask("lease", -1) == [True, True, None], "the slots were not returned")


def test_rows_are_written_to_a_process(two_processes: tuple[Process, Process]) -> None:
    a, b = two_processes
    there, here = SLOTS["scattered"]
    a.ask("fill", there, 8)
    ticket = b.ask("lend", here, 30, [], True)
    transfer = a.ask("write", "b", there, ticket, "prompt 17")
    wait_until(lambda: b.ask("lease", -1)[0], "nothing was written")
    assert b.ask("lease", -1) == [True, True, "prompt 17"]
    assert b.ask("wrong", here, 8) == 0
    wait_until(lambda: a.ask("transfer", transfer) == [True, None], "the writer does not know")


def test_a_lease_that_is_over_gives_nothing(two_processes: tuple[Process, Process]) -> None:
    a, b = two_processes
    a.ask("fill", [1, 2], 9)
    ticket = a.ask("lend", [1, 2], 0.2)
    wait_until(lambda: a.ask("lease", -1)[0], "the lease is not over")
    error = b.read(a, ticket, [3, 4])  # counts from now for b
    assert error == "the lease of a was over before all rows had arrived"
    assert a.ask("lease", -1) == [True, False, None]


def test_sockets_are_on_loopback(two_processes: tuple[Process, Process]) -> None:
    for process in two_processes:
        addresses = process.ask("listening")
        assert addresses
        assert {*addresses} == {"0100007F"}


@contextmanager
def two_machines() -> Iterator[list[list[str]]]:
    """What runs a command on each of two machines: network namespaces, with a cable from `eth0` to `eth0`."""

    def ip(*arguments: str) -> str:
        command = [str(IP), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=PATIENCE_S).stdout

    names = [f"kvp{os.getpid()}-{number}" for number in range(2)]
    with ExitStack() as made:
        for name in names:
            ip("netns", "add", name)
            made.callback(ip, "netns", "del", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", names[0], "link", "add", *f"eth0 type veth peer name eth0 netns {names[1]}".split())
        for number, name in enumerate(names):
            ip("-n", name, "addr", "add", f"10.77.0.{number + 1}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
        for name in names:
            show = partial(ip, "-n", name, "link", "show", "eth0")
            wait_until(lambda: "state UP" in show(), "the cable is dead")  # noqa: B023 - it is called here
        yield [[str(IP), "netns", "exec", name] for name in names]


@pytest.mark.skipif(IP is None or os.getuid() != 0, reason="network namespaces need root and iproute2")
def test_rows_between_machines(nixl: dict[str, str]) -> None:
    """Over the device that `network` names: neither loopback nor memory of one machine leads to the other."""
    env = {**nixl, "UCX_TLS": "tcp"}
    there, here = SLOTS["scattered"]
    with two_machines() as places, ExitStack() as stack:
        a, b = (
            stack.enter_context(Process(env, name, inside, network="eth0"))
            for name, inside in zip("ab", places, strict=True)
        )
        assert {*a.ask("listening")} == {"01004D0A"}
        assert b.ask("connect", a.ask("metadata")) == "a"
        assert a.ask("connect", b.ask("metadata")) == "b"
        a.ask("fill", there, 5)
        ticket = a.ask("lend", there, 30)
        assert b.read(a, ticket, here) is None
        assert b.ask("wrong", here, 5) == 0
        wait_until(lambda: a.ask("lease", -1) == [True, True, None], "the slots were not returned")
        # A device that one of them does not have leads nowhere.
        stranger = stack.enter_context(Process(env, "c", places[0]))
        assert b.ask("connect", stranger.ask("metadata"))["error"] == "TransferError"


def test_pools_that_do_not_fit(three: tuple[Process, Process, Process]) -> None:
    a, _, other = three
    assert a.ask("connect", other.ask("metadata")) == {
        "error": "ArgumentError",
        "text": "the pools of c and a do not fit: k_head_dim of kv is 16 at c and 8 at a",
    }


LARGE = {"rows": 1500, "dim": 2048}
MANY = list(range(1, 1001))
"""Rows with 128 MB of K and V, which are still on their way when a read has begun."""
MORE = list(range(1200, 1300))


@pytest.fixture
def tcp(nixl: dict[str, str]) -> dict[str, str]:
    """Over TCP alone, in small pieces: processes on one machine read each other's memory in one call."""
    return {**nixl, "UCX_TLS": "tcp", "UCX_TCP_TX_SEG_SIZE": "8k", "UCX_TCP_RX_SEG_SIZE": "64k"}


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_no_byte_arrives_in_slots_of_a_new_owner(tcp: dict[str, str], end: signal.Signals) -> None:
    """The peer is killed in the middle of a transfer, or stopped past its lease, and wakes up."""
    assert any(was_interrupted(tcp, end) for _ in range(4)), "all rows arrived before it was stopped"


def was_interrupted(env: dict[str, str], end: signal.Signals) -> bool:
    """Whether it was in the middle."""
    with ExitStack() as stack:
        a, b, c = (stack.enter_context(Process(env, name, **LARGE)) for name in "abc")
        # a does not know b: all connections between them are those of b's reads.
        for source in (a, c):
            b.ask("connect", source.ask("metadata"))
        a.ask("fill", MANY, 1)
        c.ask("fill", MORE, 3)
        assert b.read(a, a.ask("lend", [1], 30), [1]) is None  # they are connected
        transfer = b.ask("read", "a", a.ask("lend", MANY, 2), MANY)
        ends = {own for own, _ in a.connections()}

        def a_can_send() -> bool:
            """Messages arrive over a connection."""
            return any(other in ends for _, other in b.connections())

        assert a_can_send()
        a.signal(end)
        more = b.ask("read", "c", c.ask("lend", MORE, 30), MORE)
        wait_until(lambda: b.is_over(transfer), "the slots are lost")
        error = b.ask("transfer", transfer)[1]
        if not b.ask("wrong", MANY, 1):
            return False
        assert not a_can_send(), "the slots are free, and a can send to b"
        if end is signal.SIGKILL:
            assert error.startswith(("the connection to a failed", "NIXL cannot"))
        else:
            assert error == "the lease of a was over before all rows had arrived"
        b.ask("fill", MANY, 2)
        if end is signal.SIGSTOP:
            a.signal(signal.SIGCONT)
        wait_until(lambda: b.is_over(more), "the other read is not over")
        assert b.ask("transfer", more)[1] is None
        assert b.ask("wrong", MORE, 3) == 0
        assert not a_can_send(), "a can send to b again"
        assert b.ask("wrong", MANY, 2) == 0
        stats = b.ask("stats")
        assert (stats["running"], stats["failed"]) == (0, 1)
        assert stats["cuts"] >= 1
        # Another one in its place. UCX may end one that wakes up, as it cannot answer over TCP any more.
        a.signal(signal.SIGKILL)
        again = stack.enter_context(Process(env, "a", **LARGE))
        b.ask("connect", again.ask("metadata"))
        assert b.read(again, again.ask("lend", [5, 6], 30), [5, 6]) is None
        return True


def test_a_killed_reader_returns_slots_with_time(tcp: dict[str, str]) -> None:
    assert any(was_killed(tcp) for _ in range(4)), "all rows arrived before it was killed"


def was_killed(env: dict[str, str]) -> bool:
    """Whether it was in the middle."""
    with ExitStack() as stack:
        a, b = pair(env, stack, **LARGE)
        assert b.read(a, a.ask("lend", [1], 30), [1]) is None
        begun = time.monotonic()
        ticket = a.ask("lend", MANY, 1.5)
        b.ask("read", "a", ticket, MANY)
        b.signal(signal.SIGKILL)
        wait_until(lambda: a.ask("lease", -1)[0], "the slots are lost")
        _, was_returned, notify = a.ask("lease", -1)
        if was_returned:
            return False
        assert time.monotonic() - begun > 1.4
        assert notify is None
        # Another one comes in its place.
        again = stack.enter_context(Process(env, "b", **LARGE))
        again.ask("connect", a.ask("metadata"))
        a.ask("fill", [1, 2, 3], 4)
        assert again.read(a, a.ask("lend", [1, 2, 3], 30), [7, 8, 9]) is None
        assert again.ask("wrong", [7, 8, 9], 4) == 0
        return True


NO_TORCH = "import sys; sys.modules['torch'] = None\n"
"""Loading it takes seconds, and no test here needs it."""


def run(code: str, env: dict[str, str]) -> None:
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["docs/nixl.md", "examples/serving/moving_request.py"])
def test_the_examples_run(nixl: dict[str, str], name: str) -> None:
    path = Path(__file__).parents[2] / name
    arguments = [str(path)]
    if path.suffix == ".md":
        text = path.read_text("utf-8")
        examples = re.findall(r"^```python nixl\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        assert len(examples) == 2
        arguments = ["-c", "\n".join(examples)]
    done = subprocess.run(
        [sys.executable, *arguments],
        env=nixl,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr


def test_without_the_package_the_error_says_what_to_install(run_snippet: RunSnippet) -> None:
    output = run_snippet(
        """
        import kvpool
        from kvpool.integrations.nixl import Endpoint
        try:
            Endpoint("a", kvpool.KVPool(8, 1, 1, 1, "cpu", "float32"))
        except kvpool.ConfigError as error:
            print(error)
        """,
        hidden=("nixl", "torch"),
    )
    assert "install 'kvpool[nixl]'" in output


def test_an_agent_of_the_caller_is_used_and_not_closed(nixl: dict[str, str]) -> None:
    run(
        f"""{NO_TORCH}
import kvpool, nixl
from kvpool.integrations.nixl import Endpoint
pools = [kvpool.KVPool(64, 2, 2, 4, "cpu", "float32") for _ in range(2)]
agents = [nixl.nixl_agent(name) for name in ("mine", "yours")]
a, b = [Endpoint(name, pool, agent=agent) for name, pool, agent in zip("ab", pools, agents)]
pools[0].k_buffer[1].numpy()[5:8] = 3
peer = b.connect(a.metadata())
for _ in range(2):
    lease = a.lend([5, 6, 7])
    assert peer.read(peer.slots(lease.ticket), [1, 2, 3]).wait(10)
    assert lease.wait(10) and lease.returned
assert (pools[1].k_buffer[1].numpy()[1:4] == 3).all()
a.close(), b.close()
assert all(agent.get_agent_metadata() for agent in agents)
""",
        nixl,
    )


@pytest.mark.parametrize("network", [{}, {"UCX_TLS": "tcp"}])
def test_an_endpoint_sleeps_while_nothing_moves(nixl: dict[str, str], network: dict[str, str]) -> None:
    """Alone and connected. NIXL's threads serve a peer all the same, without a poll of the lender."""
    run(
        f"""{NO_TORCH}
import threading, time
from contextlib import suppress
from pathlib import Path
import kvpool
from kvpool.integrations.nixl import Endpoint

def is_asleep():
    # A thread that spins is running, or waiting for a core, at every look.
    for thread in Path("/proc/self/task").iterdir():
        if int(thread.name) != threading.get_native_id():
            with suppress(OSError):  # it has ended
                if (thread / "stat").read_text().rpartition(") ")[2].startswith("R"):
                    return False
    return True

def wait_until_idle():
    looks, end = 0, time.monotonic() + {PATIENCE_S / 3}
    while looks < 100 and time.monotonic() < end:
        looks = looks + 1 if is_asleep() else 0
    return looks == 100

a, b = [Endpoint(name, kvpool.KVPool(64, 2, 2, 4, "cpu", "float32")) for name in "ab"]
assert wait_until_idle()
peer = b.connect(a.metadata())
assert peer.read(peer.slots(a.lend([5, 6, 7]).ticket), [1, 2, 3]).wait(10)
assert wait_until_idle()
b.close(), a.close()
""",
        {**nixl, **network},
    )


def test_an_error_that_is_kept_does_not_keep_the_agent(nixl: dict[str, str]) -> None:
    run(
        f"""{NO_TORCH}
import kvpool
from kvpool.integrations.nixl import Endpoint, TransferError
from kvpool.remote import messages
a, b = [Endpoint(name, kvpool.KVPool(64, 2, 2, 4, "cpu", "float32")) for name in "ab"]
known = messages.decode_introduction(a.metadata())
kept = []
strangers = known._replace(agent="x#1", metadata=b"nonsense"), known._replace(agent="x#2", words=(4096, 9))
for strange in strangers:
    try:
        b.connect(messages.encode_introduction(strange))
    except TransferError as error:
        kept.append(error)
assert len(kept) == 2 and all("NIXL cannot reach a peer" in str(error) for error in kept), kept
peer = b.connect(a.metadata())
assert peer.read(peer.slots(a.lend([5, 6, 7]).ticket), [1, 2, 3]).wait(10)
b.close()  # raises an error if its agents live on
a.close()
""",
        nixl,
    )
