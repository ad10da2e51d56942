"""A check that all decoders of MessagePack share."""

from __future__ import annotations

from typing import NoReturn

import msgspec


def refuse_extension(code: int, _data: memoryview) -> NoReturn:
    """Refuse what a decoder of MessagePack would hand on as it is."""
    raise msgspec.ValidationError(f"extension type {code} of MessagePack is not part of the format")
