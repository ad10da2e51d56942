"""Checks of the addresses of sockets: whether they are valid, and whether only this machine reaches them."""

from __future__ import annotations

import ipaddress
from typing import Final

from kvpool.errors import ConfigError

_PORTS: Final = 1 << 16  # ZeroMQ takes others, modulo this


def check_endpoint(name: str, endpoint: str, *, allow_remote: bool) -> None:
    """Refuse an endpoint that is not valid, or that other machines can reach.

    Args:
        name: The name of the argument.
        endpoint: Its value.
        allow_remote: Whether other machines may reach it.

    Raises:
        ConfigError: If the endpoint is refused.
    """
    transport, separator, address = endpoint.partition("://")
    if not (separator and address) or transport not in {"tcp", "ipc", "inproc"}:
        raise ConfigError(
            f"{name} is {endpoint!r}; it must be 'tcp://', 'ipc://' or 'inproc://' and an address"
        )
    port = address.rpartition(":")[2]
    if transport == "tcp" and port != "*" and not (port.isdecimal() and int(port) < _PORTS):
        raise ConfigError(f"{name} is {endpoint!r}; its port must be '*' or below {_PORTS}")
    if transport == "tcp" and not allow_remote and not is_loopback(address):
        raise ConfigError(
            f"{name} is {endpoint!r}, which other machines may reach, and ZeroMQ does not authenticate them; "
            "take a loopback address, pass a secret, or pass allow_remote=True in a network that you trust"
        )


def is_loopback(address: str) -> bool:
    """Return whether only this machine can reach a host and port."""
    host = address.rpartition(":")[0].removeprefix("[").removesuffix("]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
