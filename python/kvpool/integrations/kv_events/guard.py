"""A limit of what subscribers send to a publisher."""

from __future__ import annotations

import logging
import socket
import struct
import sys
import time
from typing import Final

import zmq
from zmq.utils.monitor import recv_monitor_message

_logger = logging.getLogger("kvpool")

# ZeroMQ keeps each subscription in a tree that takes about 50 bytes for each of its bytes. It neither limits
# them nor names who has sent them. So the bytes that came over each connection are limited.
_FREE_BYTES: Final = 4096  # of a handshake and some subscriptions
_BYTES_PER_S: Final = 32  # of heartbeats
_MOST_LATER_BYTES: Final = 1 << 20
_MOST_EXCESS_BYTES: Final = 1 << 18  # of all connections
_MOST_CONNECTIONS: Final = 1024

_CHECK_MS: Final = 100
_QUIET_S: Final = 60.0  # between two warnings
_RECEIVED_AT: Final = 128  # `tcpi_bytes_received` in Linux's `struct tcp_info`

_EVENTS: Final = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED


class Guard:
    """Ends connections of subscribers who send too much, or are too many.

    Linux alone tells how much a connection has received, and only over TCP. A thread calls `step` when
    `monitor` has messages, and at the latest after `wait_ms`.

    Args:
        publisher: The socket that the subscribers connect to, which is bound.
        port: Its port.

    Attributes:
        refused: The number of connections that were ended.
        monitor: The socket with the events of connections.
    """

    def __init__(self, publisher: zmq.Socket[bytes], port: int) -> None:
        self.refused: int = 0
        self._publisher = publisher
        self._port = port
        self._warned = -_QUIET_S
        self._connections: dict[int, float] = {}  # the times of acceptance, by file descriptor
        self.monitor: zmq.Socket[bytes] = publisher.get_monitor_socket(_EVENTS)

    @property
    def wait_ms(self) -> int | None:
        """The most time until the next step; `None` for as long as there are no events."""
        return _CHECK_MS if self._connections else None

    def close(self) -> None:
        """Close the monitor. Call this before the socket is closed, when no thread calls `step` any more."""
        self._publisher.disable_monitor()
        self.monitor.close()

    def step(self) -> None:
        """Take the events of connections, and check what they have sent."""
        connections = self._connections
        while self.monitor.poll(0):
            event = recv_monitor_message(self.monitor)
            number = event["value"]
            if event["event"] == zmq.EVENT_ACCEPTED:
                connections[number] = time.monotonic()
                if len(connections) > _MOST_CONNECTIONS:
                    self._end(number, f"{_MOST_CONNECTIONS} others are connected")
                    del connections[number]
            else:
                connections.pop(number, None)
        self._check(connections)

    def _check(self, connections: dict[int, float]) -> None:
        """End the connection that has sent most, if all have sent too much."""
        now = time.monotonic()
        sent: list[tuple[int, int]] = []
        for number, begun in [*connections.items()]:
            received = _received(number, self._port)
            if received is None:
                del connections[number]
                continue
            allowed = _FREE_BYTES + min(_MOST_LATER_BYTES, int(_BYTES_PER_S * (now - begun)))
            sent.append((max(0, received - allowed), number))
        excess = sum(each for each, _ in sent)
        for each, number in sorted(sent, reverse=True):
            if excess <= _MOST_EXCESS_BYTES:
                break
            excess -= each
            self._end(number, f"its subscriptions have {each} bytes more than a subscriber may send")
            del connections[number]

    def _end(self, number: int, why: str) -> None:
        connection = _connection(number, self._port)
        if connection is None:
            return
        try:
            peer = connection.getpeername()[0]
            connection.shutdown(socket.SHUT_RDWR)
        except OSError:  # it has ended meanwhile
            return
        finally:
            connection.detach()
        self.refused += 1
        if time.monotonic() - self._warned >= _QUIET_S:
            self._warned = time.monotonic()
            _logger.warning("a subscriber from %s is disconnected: %s", peer, why)


def guard(publisher: zmq.Socket[bytes], endpoint: str) -> Guard | None:
    """Return a guard of a publisher, or `None` where the system does not tell what it needs.

    Args:
        publisher: The socket, which is bound.
        endpoint: Its address.
    """
    if sys.platform != "linux" or not endpoint.startswith("tcp://"):
        return None
    return Guard(publisher, int(endpoint.rpartition(":")[2]))


def _connection(number: int, port: int) -> socket.socket | None:
    """Return the connection with a file descriptor, which ZeroMQ may have closed meanwhile.

    Detach it after use: the descriptor belongs to ZeroMQ.
    """
    try:
        connection = socket.socket(fileno=number)
    except OSError:
        return None
    try:
        if connection.family in {socket.AF_INET, socket.AF_INET6} and connection.getsockname()[1] == port:
            return connection
    except OSError:
        pass
    connection.detach()
    return None


def _received(number: int, port: int) -> int | None:
    """Return the bytes that were received over a connection; `None` if it is over."""
    connection = _connection(number, port)
    if connection is None:
        return None
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED_AT + 8)
    except OSError:
        return None
    finally:
        connection.detach()
    received: int = struct.unpack_from("Q", info, _RECEIVED_AT)[0] if len(info) > _RECEIVED_AT else 0
    return received
