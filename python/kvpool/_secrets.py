"""The check of secrets that processes share."""

from __future__ import annotations

from typing import Final

from kvpool.errors import ConfigError

_MIN_BYTES: Final = 16


def check_secret(secret: bytes) -> None:
    """Refuse a secret that a stranger could guess.

    Args:
        secret: The secret.

    Raises:
        ConfigError: If it has less than 16 bytes.
        TypeError: If it is not `bytes`.
    """
    if not isinstance(secret, bytes):
        raise TypeError(f"a secret must be bytes, not {type(secret).__name__}")
    if len(secret) < _MIN_BYTES:
        raise ConfigError(f"the secret has {len(secret)} bytes; at least {_MIN_BYTES} are needed")
