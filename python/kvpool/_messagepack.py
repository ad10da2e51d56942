"""A check that all decoders of MessagePack share."""

from __future__ import annotations

from typing import NoReturn

import msgspec


def refuse_extension(code: int, _data: memoryview) -> NoReturn:
    """Refuse an extension type of MessagePack, which a decoder would pass on unchanged."""
    raise msgspec.ValidationError(f"extension type {code} of MessagePack is not part of the format")
