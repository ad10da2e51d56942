"""The secret that the processes of a cluster share."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvpool._secrets import check_secret
from kvpool.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

_logger = logging.getLogger("kvpool")

_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO


def read_secret(path: str | None = None, environment: Mapping[str, str] = os.environ) -> bytes:
    """Read the shared secret from a file, or from the environment.

    Args:
        path: The file; by default the one that `KVPOOL_SECRET_FILE` names. White space around the secret is
            ignored. Without a file, the value of `KVPOOL_SECRET` is the secret.
        environment: The environment variables.

    Raises:
        ConfigError: If there is no secret, the secret has less than 16 bytes, or the file cannot be read.
    """
    path = path or environment.get("KVPOOL_SECRET_FILE")
    if path:
        try:
            secret = Path(path).read_bytes().strip()
            mode = Path(path).stat().st_mode
        except OSError as error:
            raise ConfigError(f"the secret cannot be read: {error}") from error
        if mode & _OTHERS:
            _logger.warning("others may read the secret in %s: its mode is %o", path, stat.S_IMODE(mode))
    elif environment.get("KVPOOL_SECRET"):
        secret = environment["KVPOOL_SECRET"].strip().encode()
    else:
        raise ConfigError("there is no secret: name a file, or set KVPOOL_SECRET_FILE or KVPOOL_SECRET")
    check_secret(secret)
    return secret
