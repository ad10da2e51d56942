"""Errors of a replay."""

from kvpool.errors import KvPoolError


class ReplayError(KvPoolError, RuntimeError):
    """The pools misbehaved: slots or rows are missing, or an allocation failed that should succeed."""


class VerificationError(ReplayError):
    """A stored row differs from the row written for its token.

    Attributes:
        request: Index of the request in the trace.
        position: Token position within the request.
        layer: Layer of the KV pool.
        part: `"K"` or `"V"`.
        slot: Slot of the position in the request table.
        expected: The row's bytes as written, in hexadecimal.
        found: The row's bytes as read, in hexadecimal.
        found_token: The first request and position with the row that was read, if there is one.
    """

    def __init__(  # noqa: PLR0913 - all that names the row
        self,
        *,
        request: int,
        position: int,
        layer: int,
        part: str,
        slot: int,
        expected: str,
        found: str,
        found_token: tuple[int, int] | None = None,
    ) -> None:
        whose = f" of request {found_token[0]}, position {found_token[1]}" if found_token else ""
        super().__init__(
            f"request {request}, position {position}, layer {layer}, {part} in slot {slot}: "
            f"expected {_shorten(expected)}, found {_shorten(found)}{whose}"
        )
        self.request = request
        self.position = position
        self.layer = layer
        self.part = part
        self.slot = slot
        self.expected = expected
        self.found = found
        self.found_token = found_token


def _shorten(digits: str) -> str:
    """Return at most 16 bytes of a hexadecimal row."""
    most = 32
    return f"0x{digits}" if len(digits) <= most else f"0x{digits[:most]}... ({len(digits) // 2} bytes)"
