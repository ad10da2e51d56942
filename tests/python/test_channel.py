"""Connections of a cluster: who gets in, and what an intruder may try."""

from __future__ import annotations

import math
import queue
import socket
import struct
import threading
import time
from contextlib import closing, contextmanager, suppress
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool import ConfigError
from kvpool.cluster import channel as channels
from kvpool.cluster import parse_address, read_secret
from kvpool.cluster.channel import (
    DEFAULTS,
    MAX_BYTES,
    Channel,
    ChannelError,
    ChannelOptions,
    Listener,
    connect,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

SECRET = b"an open secret for tests"
HERE = ("127.0.0.1", 0)


class RecordingServer:
    """A listener that records the payloads and errors of its channels."""

    def __init__(
        self,
        secret: bytes = SECRET,
        address: tuple[str, int] = HERE,
        options: ChannelOptions = DEFAULTS,
    ) -> None:
        self.received: queue.SimpleQueue[bytes | ChannelError] = queue.SimpleQueue()
        self.channels: list[Channel] = []
        self.listener = Listener(address, secret, self._listen, options)
        self.address = self.listener.address

    def _listen(self, channel: Channel) -> None:
        self.channels.append(channel)
        try:
            while True:
                self.received.put(channel.receive())
        except ChannelError as error:
            self.received.put(error)

    def next(self) -> bytes | ChannelError:
        return self.received.get(timeout=10)

    def assert_refused(self, callers: int) -> None:
        until(lambda: self.listener.refused == callers)
        assert self.received.empty()


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.fixture
def server() -> Iterator[RecordingServer]:
    server = RecordingServer()
    yield server
    server.listener.close()


@contextmanager
def client(server: RecordingServer) -> Iterator[Channel]:
    channel = connect(server.address, SECRET)
    yield channel
    channel.close()


@contextmanager
def raw_connection(server: RecordingServer) -> Iterator[socket.socket]:
    with socket.create_connection(server.address, 10) as connection:
        yield connection


def receive_exactly(connection: socket.socket, count: int) -> bytes:
    return channels._take(connection, count)


def test_payloads_arrive_in_order_both_ways(server: RecordingServer) -> None:
    payloads = [b"", b"a", bytes(range(256)) * 300, bytes(MAX_BYTES)]
    with client(server) as channel:
        for payload in payloads:
            channel.send(payload)
        assert [server.next() for _ in payloads] == payloads
        for payload in payloads:
            server.channels[0].send(payload)
        assert [channel.receive() for _ in payloads] == payloads
        with pytest.raises(ChannelError, match="16777217 bytes is larger than 16777216"):
            channel.send(bytes(MAX_BYTES + 1))
    assert "ended" in str(server.next())
    with pytest.raises(ChannelError, match="ended"):
        channel.send(b"")
    with pytest.raises(ChannelError, match="ended"):
        channel.receive()
    channel.close()


def test_a_last_payload_arrives_before_the_end(server: RecordingServer) -> None:
    last = bytes(MAX_BYTES)
    with client(server) as channel:
        until(lambda: len(server.channels) == 1)
        server.channels[0].send(b"first")
        server.channels[0].finish(last)
        server.channels[0].close()  # for what else there was to send
        assert server.channels[0].is_over
        with pytest.raises(ChannelError, match="ended"):
            server.channels[0].send(b"later")
        assert [channel.receive(), channel.receive()] == [b"first", last]
        with pytest.raises(ChannelError, match="ended"):
            channel.receive()
    assert "ended" in str(server.next())


def test_a_last_payload_that_nobody_takes_keeps_no_channel(server: RecordingServer) -> None:
    with raw_connection(server) as connection:
        other = channels._call(connection, SECRET, DEFAULTS)
        until(lambda: len(server.channels) == 1)
        server.channels[0].finish(bytes(MAX_BYTES))
        other.close()
        assert "ended" in str(server.next())
        until(lambda: server.channels[0]._state is channels._State.CLOSED)


def test_several_callers_are_heard_at_once(server: RecordingServer) -> None:
    with client(server) as first, client(server) as second:
        second.send(b"second")
        assert server.next() == b"second"
        first.send(b"first")
        assert server.next() == b"first"


def test_a_listener_that_is_closed_ends_its_channels() -> None:
    server = RecordingServer()
    with client(server) as channel:
        until(lambda: len(server.channels) == 1)
        server.listener.close()
        with pytest.raises(ChannelError, match="ended"):
            channel.receive()
    with pytest.raises(ChannelError, match="cannot be reached"):
        connect(server.address, SECRET)
    with pytest.raises(ConfigError, match=r"cannot listen at 192\.0\.2\.1:1"):
        RecordingServer(address=("192.0.2.1", 1))


def test_what_is_not_taken_ends_the_channel() -> None:
    server = RecordingServer(options=ChannelOptions(max_unsent_bytes=MAX_BYTES))
    with (
        closing(server.listener),
        client(server),
        pytest.raises(ChannelError, match="bytes are not taken by the other end"),
    ):
        until(lambda: len(server.channels) == 1)
        for _ in range(64):
            server.channels[0].send(bytes(MAX_BYTES // 4))
    assert "ended" in str(server.next())


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="the system has no such limit")
def test_a_machine_that_is_gone_is_noticed() -> None:
    server = RecordingServer(options=ChannelOptions(silence_s=7))
    with closing(server.listener), client(server) as channel:
        until(lambda: len(server.channels) == 1)
        for end, silence_s in ((channel, DEFAULTS.silence_s), (server.channels[0], 7)):
            limit = end._connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
            assert limit == 1000 * silence_s


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"handshake_s": 0}, "handshake_s is 0; it must be in [0.001, 86400]"),
        ({"silence_s": -1}, "silence_s is -1; it must be in [0.001, 86400]"),
        ({"silence_s": 0.0005}, "silence_s is 0.0005; it must be in [0.001, 86400]"),
        ({"silence_s": 3e6}, "silence_s is 3000000.0; it must be in [0.001, 86400]"),
        ({"silence_s": math.inf}, "silence_s is inf; it must be in [0.001, 86400]"),
        ({"handshake_s": math.nan}, "handshake_s is nan; it must be in [0.001, 86400]"),
        ({"max_handshakes": 0}, "max_handshakes is 0; it must be in [1, 65536]"),
        ({"max_unsent_bytes": 1000}, f"max_unsent_bytes is 1000; it must be in [{MAX_BYTES}, {1 << 40}]"),
    ],
)
def test_limits_outside_of_their_range_are_refused(limits: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ChannelOptions(**limits)
    assert str(caught.value) == message


@pytest.mark.parametrize("kind", ["Thread", "Timer"])
def test_a_lack_of_threads_passes(
    server: RecordingServer, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    def fail(_self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    kinds = SimpleNamespace(Thread=threading.Thread, Timer=threading.Timer)
    setattr(kinds, kind, type(kind, (getattr(threading, kind),), {"start": fail}))
    monkeypatch.setattr(channels, "threading", kinds)
    monkeypatch.setattr(server.listener, "_handshakes", threading.Semaphore(1))
    for number in range(1, 4):
        with raw_connection(server) as connection:
            assert connection.recv(1) == b""
        until(lambda: server.listener.refused == number)  # noqa: B023 - called at once
    monkeypatch.setattr(channels, "threading", threading)
    with client(server) as channel:
        channel.send(b"in")
        assert server.next() == b"in"


def test_a_lack_of_files_passes(
    server: RecordingServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The listener does not ask for another one at once, again and again, and says so once."""
    asked: list[float] = []
    waits = server.listener._socket

    def fail() -> None:
        asked.append(time.monotonic())
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(server.listener, "_socket", SimpleNamespace(accept=fail, close=waits.close))
    with raw_connection(server) as connection:  # ends the wait of the socket itself
        connection.recv(1)
    until(lambda: len(asked) == 3)
    assert asked[2] - asked[0] > channels._RETRY_S
    assert sum("connections cannot be accepted" in text for text in caplog.messages) == 1
    monkeypatch.setattr(server.listener, "_socket", waits)
    with client(server) as channel:
        channel.send(b"in")
        assert server.next() == b"in"


# Intruders


def test_who_does_not_know_the_secret_is_refused(server: RecordingServer) -> None:
    with pytest.raises(ChannelError, match="ended"):
        connect(server.address, SECRET + b"!")
    server.assert_refused(1)


def test_a_listener_that_does_not_know_the_secret_is_left() -> None:
    server = RecordingServer(SECRET + b"!")
    with pytest.raises(ChannelError, match="ended"):
        connect(server.address, SECRET)
    server.listener.close()


@pytest.mark.parametrize("answer", ["nothing", "zeros", "what the caller sent"])
def test_an_impostor_learns_nothing(answer: str) -> None:
    """The impostor listens in the place of the router, and may send back what it has received."""
    with socket.create_server(HERE) as server:
        told: list[bytes] = []

        def impersonate() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(channels._HELLO.pack(b"kvpool\r\n", channels.VERSION, bytes(32)))
                told.append(receive_exactly(connection, 64))
                if answer != "nothing":
                    connection.sendall(bytes(32) if answer == "zeros" else told[0][32:])

        thread = threading.Thread(target=impersonate)
        thread.start()
        with pytest.raises(
            ChannelError, match="ended" if answer == "nothing" else "does not know the secret"
        ):
            connect(server.getsockname(), SECRET)
        thread.join()
    assert SECRET not in told[0]


def test_a_proof_is_good_for_one_challenge(server: RecordingServer) -> None:
    """A proof that was recorded, or made by the listener itself, opens nothing."""
    with socket.create_server(HERE) as impostor:
        thread = threading.Thread(target=lambda: suppressed(lambda: connect(impostor.getsockname(), SECRET)))
        thread.start()
        connection, _ = impostor.accept()
        with connection, raw_connection(server) as other:
            # The challenge of the server goes to a caller, whose proof comes back: so far it is the caller
            # itself. What it proved to the server a second one cannot say again.
            hello = receive_exactly(other, channels._HELLO.size)
            connection.sendall(hello)
            recorded = receive_exactly(connection, 64)
        thread.join()
    with raw_connection(server) as again:
        assert receive_exactly(again, channels._HELLO.size) != hello
        again.sendall(recorded)
        assert again.recv(1) == b""
    until(lambda: server.listener.refused == 2)
    with raw_connection(server) as mirrored:
        _, _, challenge = channels._HELLO.unpack(receive_exactly(mirrored, channels._HELLO.size))
        mirrored.sendall(challenge + channels._proof(bytes(16), b"listener", challenge, challenge))
        assert mirrored.recv(1) == b""
    server.assert_refused(3)


def suppressed(call: Callable[[], object]) -> None:
    with suppress(ChannelError):
        call()


class TamperingProxy:
    """A proxy between a client and a server that changes the frames of the client."""

    def __init__(self, target: RecordingServer, change: Callable[[int, bytes], bytes]) -> None:
        self.server = socket.create_server(HERE)
        self.address: tuple[str, int] = self.server.getsockname()
        self._target = target
        self._change = change
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def end(self) -> None:
        self._thread.join()
        self.server.close()

    def _run(self) -> None:
        here, _ = self.server.accept()
        there = socket.create_connection(self._target.address)
        with here, there, suppress(ChannelError, OSError):
            here.sendall(receive_exactly(there, channels._HELLO.size))
            there.sendall(receive_exactly(here, 64))
            here.sendall(receive_exactly(there, 32))
            for number in range(100):
                length = receive_exactly(here, 4)
                frame = (
                    length + receive_exactly(here, *struct.unpack("<I", length)) + receive_exactly(here, 32)
                )
                there.sendall(self._change(number, frame))


@pytest.mark.parametrize(
    ("change", "received"),
    [
        (lambda number, frame: frame if number != 1 else frame[:4] + b"X" + frame[5:], 1),
        (lambda number, frame: frame if number != 1 else frame[:-1] + bytes([frame[-1] ^ 1]), 1),
        (lambda number, frame: frame * (1 + (number == 1)), 2),
        (lambda number, frame: frame if number != 1 else b"", 1),
        (lambda number, frame: frame if number != 1 else struct.pack("<I", MAX_BYTES + 1) + frame[4:], 1),
    ],
    ids=["payload", "tag", "twice", "left out", "length"],
)
def test_frames_that_were_changed_on_the_way_are_refused(
    server: RecordingServer, change: Callable[[int, bytes], bytes], received: int
) -> None:
    between = TamperingProxy(server, change)
    channel = connect(between.address, SECRET)
    for number in range(4):
        with suppress(ChannelError):
            channel.send(b"payload %d" % number)
    for number in range(received):
        assert server.next() == b"payload %d" % number
    assert str(server.next()).startswith("a frame ")
    channel.close()
    between.end()


def test_a_channel_cannot_be_answered_with_its_own_frames(server: RecordingServer) -> None:
    with client(server) as channel:
        channel.send(b"hello")
        server.next()
        own = channels._Tags(channel._sending._key)
        there = server.channels[0]
        there._connection.sendall(struct.pack("<I", 5) + b"hello" + own.of(b"hello"))
        with pytest.raises(ChannelError, match="not of the other end"):
            channel.receive()


def test_callers_that_say_nothing_do_not_keep_others_out() -> None:
    server = RecordingServer(options=ChannelOptions(handshake_s=0.3, max_handshakes=8))
    with raw_connection(server) as slow:
        silent = [socket.create_connection(server.address) for _ in range(8 + 4)]
        until(lambda: server.listener.refused >= 5)  # too many at once
        for _ in range(20):  # a byte now and then is not enough
            with suppress(OSError):
                slow.send(b"x")
            time.sleep(0.03)
        until(lambda: server.listener.refused == len(silent) + 1)
    for connection in silent:
        connection.close()
    with closing(server.listener), client(server) as channel:
        channel.send(b"in")
        assert server.next() == b"in"


def test_a_connection_whose_thread_cannot_be_started_is_refused(
    server: RecordingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def start_others(thread: threading.Thread) -> None:
        if thread.name == "kvpool channel" and threading.current_thread() is threading.main_thread():
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_others)
    with pytest.raises(ChannelError, match="no thread can be started for a connection"):
        connect(server.address, SECRET)
    assert "ended" in str(server.next())


@pytest.mark.parametrize("content", [b"", b"GET / HTTP/1.1\r\n\r\n", bytes(64), bytes(4096)])
def test_strangers_are_refused(server: RecordingServer, content: bytes) -> None:
    # The server may have closed the connection meanwhile.
    with raw_connection(server) as connection, suppress(OSError):
        connection.sendall(content)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(4096):
            pass
    server.assert_refused(1)


@pytest.mark.parametrize("hello", [b"SSH-2.0-OpenSSH_9.6\r\n" + bytes(40), b"kvpool\r\n\x02\x00" + bytes(32)])
def test_a_caller_leaves_who_is_not_kvpool_or_of_another_version(hello: bytes) -> None:
    with socket.create_server(HERE) as server:

        def send_hello() -> None:
            with server.accept()[0] as connection:
                connection.sendall(hello)

        thread = threading.Thread(target=send_hello)
        thread.start()
        with pytest.raises(ChannelError, match="not kvpool, or of version"):
            connect(server.getsockname(), SECRET)
        thread.join()


# Secrets and addresses


def test_the_secret_is_of_a_file_or_the_environment(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"  0123456789abcdef\n")
    path.chmod(0o600)
    assert read_secret(str(path), {}) == b"0123456789abcdef"
    assert read_secret(None, {"KVPOOL_SECRET_FILE": str(path), "KVPOOL_SECRET": "x"}) == b"0123456789abcdef"
    assert read_secret(None, {"KVPOOL_SECRET": " fedcba9876543210 "}) == b"fedcba9876543210"
    assert not caplog.records
    path.chmod(0o644)
    read_secret(str(path), {})
    assert "others may read the secret" in caplog.text
    assert "its mode is 644" in caplog.text
    path.write_bytes(b"0123456789abcde\n")
    with pytest.raises(ConfigError, match="the secret has 15 bytes; at least 16 are needed"):
        read_secret(str(path), {})
    with pytest.raises(ConfigError, match="the secret cannot be read"):
        read_secret(str(tmp_path / "none"), {})
    with pytest.raises(ConfigError, match="there is no secret"):
        read_secret(None, {})


@pytest.mark.parametrize("secret", [b"", b"0123456789abcde"])
def test_a_channel_needs_a_secret_that_is_long_enough(secret: bytes) -> None:
    text = f"the secret has {len(secret)} bytes; at least 16 are needed"
    with pytest.raises(ConfigError, match=text):
        connect(("127.0.0.1", 9), secret)
    with pytest.raises(ConfigError, match=text):
        Listener(("127.0.0.1", 0), secret, print)
    other: Any = secret.decode()
    with pytest.raises(TypeError, match="a secret must be bytes, not str"):
        Listener(("127.0.0.1", 0), other, print)


def test_addresses_are_of_this_machine_unless_it_is_said() -> None:
    assert parse_address("a", "127.0.0.1:7000", allow_remote=False) == ("127.0.0.1", 7000)
    assert parse_address("a", "[::1]:0", allow_remote=False) == ("::1", 0)
    assert parse_address("a", "10.0.0.1:7000", allow_remote=True) == ("10.0.0.1", 7000)
    for address in ("10.0.0.1:7000", "0.0.0.0:0", "example.com:80"):
        with pytest.raises(ConfigError, match=r"a is .* not a loopback address"):
            parse_address("a", address, allow_remote=False)
    for address in ("", "7000", ":7000", "host:", "host:http", "host:65536"):
        with pytest.raises(ConfigError, match="not a host and a port"):
            parse_address("a", address, allow_remote=True)


def test_a_listener_may_be_at_an_ipv6_address() -> None:
    server = RecordingServer(address=("::1", 0))
    with client(server) as channel:
        channel.send(b"six")
        assert server.next() == b"six"
    server.listener.close()


# Whatever comes


@given(content=st.binary(max_size=200), is_caller=st.booleans())
def test_no_bytes_are_a_proof(content: bytes, *, is_caller: bool) -> None:
    """Neither side takes anything for the secret, or says more than a challenge before."""
    here, there = socket.socketpair()
    with here, there:
        there.sendall(
            (channels._HELLO.pack(b"kvpool\r\n", channels.VERSION, bytes(32)) if is_caller else b"") + content
        )
        there.shutdown(socket.SHUT_WR)
        with pytest.raises(ChannelError):
            (channels._call if is_caller else channels._answer)(here, SECRET, DEFAULTS)
        here.shutdown(socket.SHUT_WR)
        assert len(receive_exactly(there, 64 if is_caller else channels._HELLO.size)) > 0
        assert there.recv(1) == b""


@given(content=st.binary(max_size=200), cut=st.integers(0, 60))
def test_no_bytes_are_a_frame(content: bytes, cut: int) -> None:
    """After a frame that is one, what comes is an error."""
    here, there = socket.socketpair()
    channel = Channel(here, bytes(32), bytes(32), MAX_BYTES)
    with here, there:
        frame = struct.pack("<I", 5) + b"hello" + channels._Tags(bytes(32)).of(b"hello")
        there.sendall(frame + frame[:cut] + content)
        there.shutdown(socket.SHUT_WR)
        assert channel.receive() == b"hello"
        with pytest.raises(ChannelError):
            channel.receive()
        channel.close()
