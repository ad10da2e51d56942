"""Connections between processes of a cluster, each of which has proved that it knows the shared secret.

The side that listens sends a challenge; the side that connects answers it with a challenge of its own:

    listener:  magic, version, 32 random bytes `a`
    caller:    32 random bytes `b`, HMAC(secret, "caller", version, a, b)
    listener:  HMAC(secret, "listener", version, a, b)

A side that receives a wrong HMAC closes the connection. From then on a frame is its length (4 bytes, little
endian), its payload and an HMAC of its number and payload, with keys derived from the secret and both
challenges: nobody else can forge, change, drop or replay a frame. Frames are not encrypted. All HMACs use
SHA-256.

`multiprocessing.connection` also proves a secret, but to one caller at a time, so that a silent caller blocks
all others, and it does not protect the messages that follow. TLS supports shared secrets only from Python
3.13 on. ZeroMQ, which carries the events, reconnects by itself, but a router has to know that a connection
and all its requests are lost.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import queue
import secrets
import socket
import struct
import threading
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Final, TypeVar

from kvpool._limits import MAX_OPTION_BYTES, MAX_S, MIN_S, check_ints, check_seconds
from kvpool._secrets import check_secret
from kvpool.errors import ConfigError, KvPoolError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

T = TypeVar("T")

_logger = logging.getLogger("kvpool")

VERSION: Final = 1
"""The version of the handshake and the messages. Processes of different versions refuse each other."""

MAX_BYTES: Final = 16 << 20
"""The largest payload."""

_MAX_HANDSHAKES: Final = 1 << 16
"""The largest limit of handshakes at once."""

_RETRY_S: Final = 0.05
"""Seconds until a listener tries again to accept callers, after the system has refused."""

_MAGIC: Final = b"kvpool\r\n"
_HELLO: Final = struct.Struct("<8sH32s")
_LENGTH: Final = struct.Struct("<I")
_NUMBER: Final = struct.Struct("<Q")
_PROOF_BYTES: Final = 32


class ChannelError(KvPoolError):
    """A connection cannot be made, has ended, or has delivered data that no member of the cluster sends."""


@dataclass(frozen=True, kw_only=True)
class ChannelOptions:
    """The limits of a process for its connections. Those of the other end may differ.

    Attributes:
        handshake_s: Seconds that a handshake may take, and the attempt to reach a listener.
        silence_s: Seconds after which a connection ends if the other machine has acknowledged nothing that
            was sent to it. Only for systems with such a limit, such as Linux.
        max_handshakes: The most callers at once that have not yet proved that they know the secret.
        max_unsent_bytes: The most bytes queued for a slow receiver. More of them end the connection.

    Raises:
        ConfigError: If a time is not in [0.001, 86400], `max_handshakes` is not in [1, 65536], or
            `max_unsent_bytes` has no room for the largest payload.
    """

    handshake_s: float = 5.0
    silence_s: float = 30.0
    max_handshakes: int = 32
    max_unsent_bytes: int = 4 * MAX_BYTES

    def __post_init__(self) -> None:
        check_seconds(MIN_S, MAX_S, handshake_s=self.handshake_s, silence_s=self.silence_s)
        check_ints(1, _MAX_HANDSHAKES, max_handshakes=self.max_handshakes)
        check_ints(MAX_BYTES, MAX_OPTION_BYTES, max_unsent_bytes=self.max_unsent_bytes)


DEFAULTS: Final = ChannelOptions()


class _State(Enum):
    """The state of a channel."""

    OPEN = auto()
    """The channel sends and receives."""
    FINISHING = auto()
    """The channel sends the remaining payloads, and then closes."""
    MUTE = auto()
    """The channel only receives."""
    CLOSED = auto()


class Channel:
    """A connection whose other end has proved that it knows the secret.

    One thread receives; any may send. Payloads are queued in memory, and a thread of the channel writes them.
    """

    def __init__(
        self, connection: socket.socket, sending: bytes, receiving: bytes, max_unsent_bytes: int
    ) -> None:
        self._connection = connection
        self._max_unsent_bytes = max_unsent_bytes
        self._sending, self._receiving = _Tags(sending), _Tags(receiving)
        self._unsent: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._unsent_bytes = 0
        self._lock = threading.Lock()
        self._state = _State.OPEN
        try:
            threading.Thread(target=self._write, name="kvpool channel", daemon=True).start()
        except RuntimeError as error:
            raise ChannelError(f"no thread can be started for a connection: {error}") from error

    @property
    def is_over(self) -> bool:
        """Whether nothing more can be sent. What the other end has sent may still be received."""
        return self._state is not _State.OPEN

    def send(self, payload: bytes) -> None:
        """Send a payload without waiting.

        Raises:
            ChannelError: If the connection has ended, the other side does not read the payloads sent before,
                or the payload is too large.
        """
        self._put(payload, _State.OPEN)

    def finish(self, payload: bytes) -> None:
        """Send a last payload without waiting, and end the connection once it is on its way.

        Raises:
            ChannelError: For the same reasons as in `send`.
        """
        self._put(payload, _State.FINISHING)

    def _put(self, payload: bytes, state: _State) -> None:
        """Queue a payload for the thread that writes, and set the state of the channel."""
        if len(payload) > MAX_BYTES:
            raise ChannelError(f"a payload of {len(payload)} bytes is larger than {MAX_BYTES}")
        with self._lock:
            if self.is_over:
                raise ChannelError("the connection has ended")
            unsent = self._unsent_bytes + len(payload)
            if unsent <= self._max_unsent_bytes:
                self._state, self._unsent_bytes = state, unsent
                self._unsent.put(payload)
                if state is _State.FINISHING:
                    self._unsent.put(None)
                return
        self.close()
        raise ChannelError(f"{unsent} bytes are not taken by the other end")

    def _write(self) -> None:
        try:
            while (payload := self._unsent.get()) is not None:
                self._connection.sendall(_LENGTH.pack(len(payload)) + payload + self._sending.of(payload))
                with self._lock:
                    self._unsent_bytes -= len(payload)
        except OSError:
            pass  # `receive` raises the error, after the frames that came before it
        with self._lock:
            state = self._state
            if state is not _State.CLOSED:
                self._state = _State.MUTE
        if state is _State.FINISHING:
            self.close()

    def receive(self) -> bytes:
        """Wait for the next payload, and return it.

        Raises:
            ChannelError: If the connection has ended, or the received data is not a frame of the other end.
        """
        try:
            return self._receive()
        except ChannelError:
            self.close()
            raise

    def _receive(self) -> bytes:
        [length] = _LENGTH.unpack(_take(self._connection, _LENGTH.size))
        if length > MAX_BYTES:
            raise ChannelError(f"a frame of {length} bytes is larger than {MAX_BYTES}")
        payload = _take(self._connection, length)
        if not hmac.compare_digest(_take(self._connection, _PROOF_BYTES), self._receiving.of(payload)):
            raise ChannelError("a frame is not of the other end")
        return payload

    def close(self) -> None:
        """End the connection, and every call that waits for data from it.

        Payloads that are not sent yet are dropped. After `finish` this call does nothing: the channel closes
        once they are sent.
        """
        with self._lock:
            if self._state in {_State.FINISHING, _State.CLOSED}:
                return
            self._state = _State.CLOSED
            self._unsent.put(None)
        _end(self._connection)
        self._connection.close()


def drain(received: queue.SimpleQueue[T], timeout: float) -> Iterator[T]:
    """Yield the items of a queue until it is empty, after waiting at most `timeout` for the first."""
    try:
        yield received.get(timeout=timeout) if timeout else received.get_nowait()
        while True:
            yield received.get_nowait()
    except queue.Empty:
        return


class _Tags:
    """HMACs of the frames of one direction."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._next = 0

    def of(self, payload: bytes) -> bytes:
        """Return the HMAC of the next payload."""
        number = _NUMBER.pack(self._next)
        self._next += 1
        return hmac.digest(self._key, number + payload, hashlib.sha256)


def connect(address: tuple[str, int], secret: bytes, options: ChannelOptions = DEFAULTS) -> Channel:
    """Return a channel to a listener.

    Args:
        address: Its host and port.
        secret: The shared secret.
        options: Limits of the connection.

    Raises:
        ChannelError: If nothing listens there, or the listener does not prove that it knows the secret.
        ConfigError: If the secret has less than 16 bytes.
    """
    check_secret(secret)
    try:
        connection = socket.create_connection(address, options.handshake_s)
    except OSError as error:
        raise ChannelError(f"{address[0]}:{address[1]} cannot be reached: {error}") from error
    try:
        return _call(connection, secret, options)
    except BaseException:
        connection.close()
        raise


def _call(connection: socket.socket, secret: bytes, options: ChannelOptions) -> Channel:
    magic, version, remote_challenge = _HELLO.unpack(_take(connection, _HELLO.size))
    if magic != _MAGIC or version != VERSION:
        raise ChannelError(f"the other end is not kvpool, or of version {version} and not {VERSION}")
    local_challenge = secrets.token_bytes(_PROOF_BYTES)
    _send(connection, local_challenge + _proof(secret, b"caller", remote_challenge, local_challenge))
    if not hmac.compare_digest(
        _take(connection, _PROOF_BYTES), _proof(secret, b"listener", remote_challenge, local_challenge)
    ):
        raise ChannelError("the other end does not know the secret")
    sending, receiving = _keys(secret, remote_challenge, local_challenge)
    return _ready(connection, sending, receiving, options)


def _answer(connection: socket.socket, secret: bytes, options: ChannelOptions) -> Channel:
    local_challenge = secrets.token_bytes(_PROOF_BYTES)
    _send(connection, _HELLO.pack(_MAGIC, VERSION, local_challenge))
    remote_challenge = _take(connection, _PROOF_BYTES)
    if not hmac.compare_digest(
        _take(connection, _PROOF_BYTES), _proof(secret, b"caller", local_challenge, remote_challenge)
    ):
        raise ChannelError("the other end does not know the secret")
    _send(connection, _proof(secret, b"listener", local_challenge, remote_challenge))
    receiving, sending = _keys(secret, local_challenge, remote_challenge)
    return _ready(connection, sending, receiving, options)


def _proof(secret: bytes, role: bytes, listener: bytes, caller: bytes) -> bytes:
    """Return the HMAC that proves knowledge of the secret.

    All parts of its text except the first have fixed lengths.
    """
    return hmac.digest(
        secret, role + b"\0" + VERSION.to_bytes(2, "little") + listener + caller, hashlib.sha256
    )


def _keys(secret: bytes, listener: bytes, caller: bytes) -> tuple[bytes, bytes]:
    """Return the keys for the frames of the caller, and for those of the listener."""
    return (
        _proof(secret, b"caller sends", listener, caller),
        _proof(secret, b"listener sends", listener, caller),
    )


def _ready(connection: socket.socket, sending: bytes, receiving: bytes, options: ChannelOptions) -> Channel:
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        # Without this limit, sending to a machine that is down fails only after a quarter of an hour.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(options.silence_s * 1000))
    return Channel(connection, sending, receiving, options.max_unsent_bytes)


def _send(connection: socket.socket, content: bytes) -> None:
    try:
        connection.sendall(content)
    except OSError as error:
        raise ChannelError(f"the connection has ended: {error}") from error


def _take(connection: socket.socket, count: int) -> bytes:
    """Receive `count` bytes. Memory is allocated as they arrive, not for the length that a peer claims."""
    content = bytearray()
    while len(content) < count:
        try:
            part = connection.recv(min(count - len(content), 1 << 16))
        except OSError as error:
            raise ChannelError(f"the connection has ended: {error}") from error
        if not part:
            raise ChannelError(f"the connection has ended after {len(content)} of {count} bytes")
        content += part
    return bytes(content)


class Listener:
    """Accepts callers that know the secret, and calls `on_channel` for each, in a thread of its own.

    Args:
        address: Host and port; port 0 for any free one.
        secret: The shared secret.
        on_channel: Called with each channel, which is closed when it returns.
        options: Limits of its connections.

    Attributes:
        address: Host and port.
        refused: Callers that did not know the secret, or were too many at once.

    Raises:
        ConfigError: If the address cannot be bound, or the secret has less than 16 bytes.
    """

    def __init__(
        self,
        address: tuple[str, int],
        secret: bytes,
        on_channel: Callable[[Channel], object],
        options: ChannelOptions = DEFAULTS,
    ) -> None:
        check_secret(secret)
        self.refused: int = 0
        self._secret = secret
        self._on_channel = on_channel
        self._options = options
        self._handshakes = threading.Semaphore(options.max_handshakes)
        self._open: set[Channel] = set()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        try:
            family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
            self._socket = socket.create_server(address, family=family, backlog=options.max_handshakes)
        except OSError as error:
            raise ConfigError(f"cannot listen at {address[0]}:{address[1]}: {error}") from error
        host, port = self._socket.getsockname()[:2]
        self.address: tuple[str, int] = (host, port)
        threading.Thread(target=self._accept, name="kvpool listener", daemon=True).start()

    def close(self) -> None:
        """Stop listening, and end all channels."""
        with self._lock:
            self._closed.set()
            channels = [*self._open]
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for channel in channels:
            channel.close()

    def _accept(self) -> None:
        is_failing = False
        while True:
            try:
                connection, address = self._socket.accept()
            except OSError as error:  # the listener is closed, or too many files are open
                if self._closed.is_set():
                    return
                if not is_failing:
                    _logger.warning("connections cannot be accepted, and are tried again: %s", error)
                is_failing = True
                self._closed.wait(_RETRY_S)
                continue
            is_failing = False
            if not self._handshakes.acquire(blocking=False):
                self._refuse(
                    connection, address, f"{self._options.max_handshakes} other handshakes are in progress"
                )
                continue
            try:
                threading.Thread(target=self._handshake, args=(connection, address), daemon=True).start()
            except RuntimeError as error:  # too many threads run
                self._handshakes.release()
                self._refuse(connection, address, str(error))

    def _handshake(self, connection: socket.socket, address: tuple[object, ...]) -> None:
        try:
            # A caller that sends a byte now and then does not stay longer than one that sends none.
            timer = threading.Timer(self._options.handshake_s, _end, [connection])
            timer.daemon = True
            try:
                timer.start()
                connection.settimeout(self._options.handshake_s)
                channel = _answer(connection, self._secret, self._options)
            finally:
                timer.cancel()
                self._handshakes.release()
        except (ChannelError, OSError, RuntimeError) as error:  # too many threads run
            self._refuse(connection, address, str(error))
            return
        with self._lock:
            if not self._closed.is_set():
                self._open.add(channel)
        try:
            if channel in self._open:
                self._on_channel(channel)
        finally:
            with self._lock:
                self._open.discard(channel)
            channel.close()

    def _refuse(self, connection: socket.socket, address: tuple[object, ...], why: str) -> None:
        with self._lock:  # several threads refuse
            self.refused += 1
        _logger.warning("a caller from %s is refused: %s", address[0], why)
        connection.close()


def _end(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
