"""Sockets of ZeroMQ, and their encryption."""

from __future__ import annotations

import hashlib
import hmac
from contextlib import contextmanager
from typing import TYPE_CHECKING

import zmq
from zmq.utils import z85

from kvpool._secrets import check_secret
from kvpool.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


def curve_options(secret: bytes | None, *, is_server: bool) -> list[tuple[int, int | bytes]]:
    """Return options of an encrypted socket (CurveZMQ) that only processes with the secret can use.

    The keys of both sides are derived from the secret. A server accepts every client that knows its public
    key. This key is never sent, and only processes with the secret can compute it.

    Args:
        secret: The secret; `None` for a socket without encryption.
        is_server: Whether the socket is bound.

    Raises:
        ConfigError: If the secret has less than 16 bytes, or ZeroMQ was built without CurveZMQ.
        TypeError: If the secret is not `bytes`.
    """
    if secret is None:
        return []
    check_secret(secret)
    if not zmq.has("curve"):
        raise ConfigError("this build of ZeroMQ has no CurveZMQ: its sockets cannot have a secret")
    server, client = (
        z85.encode(hmac.digest(secret, b"kvpool events, " + side, hashlib.sha256))
        for side in (b"server", b"client")
    )
    if is_server:
        return [(zmq.CURVE_SERVER, 1), (zmq.CURVE_SECRETKEY, server)]
    return [
        (zmq.CURVE_SERVERKEY, zmq.curve_public(server)),
        (zmq.CURVE_PUBLICKEY, zmq.curve_public(client)),
        (zmq.CURVE_SECRETKEY, client),
    ]


@contextmanager
def open_socket(kind: int, options: Sequence[tuple[int, int | bytes]]) -> Iterator[zmq.Socket[bytes]]:
    """Open a socket. When it is closed, messages that are not sent yet are dropped.

    Args:
        kind: The type of the socket, such as `zmq.PUB`.
        options: Pairs of an option and its value.
    """
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    with socket:
        socket.setsockopt(zmq.LINGER, 0)
        for option, value in options:
            socket.setsockopt(option, value)
        yield socket


def bind(socket: zmq.Socket[bytes], name: str, endpoint: str) -> str:
    """Bind a socket.

    Args:
        socket: The socket.
        name: The name of the argument that has the endpoint.
        endpoint: The endpoint.

    Returns:
        The endpoint, with its port.

    Raises:
        ConfigError: If it cannot be bound.
    """
    _reach(socket, socket.bind, name, endpoint)
    return socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")


def connect(socket: zmq.Socket[bytes], name: str, endpoint: str) -> None:
    """Connect a socket to an endpoint, which need not exist yet. The arguments are those of `bind`."""
    _reach(socket, socket.connect, name, endpoint)


def _reach(socket: zmq.Socket[bytes], call: Callable[[str], object], name: str, endpoint: str) -> None:
    if "[" in endpoint:
        socket.setsockopt(zmq.IPV6, 1)
    try:
        call(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(f"{name} is {endpoint!r}, which cannot be opened: {error}") from error
