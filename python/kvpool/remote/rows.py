"""Memory of another library, as an endpoint reads and lends it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpool.errors import ConfigError
from kvpool.remote.agent import Memory

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class Rows:
    """Buffers of another library with equal numbers of rows, in place of an endpoint's `KVPool`.

    Slot `i` is row `i` of every buffer. Slot 0 is neither lent nor filled, as in a pool. The caller keeps the
    memory until the endpoint is closed.

    Args:
        buffers: The address and the bytes of a row of each buffer; its rows lie one after the other.
        rows: Rows of every buffer.
        shape: What both sides must have in common, by name: a peer with other values is refused.
        device: `"cpu"` or `"cuda:0"`, where the buffers are.

    Raises:
        ConfigError: If there is no buffer, or one has no address, no bytes or no rows.
    """

    def __init__(
        self,
        buffers: Sequence[tuple[int, int]],
        *,
        rows: int,
        shape: Mapping[str, int | str],
        device: str = "cpu",
    ) -> None:
        if not buffers or rows < 1 or min(min(buffer) for buffer in buffers) < 1:
            raise ConfigError(f"{rows} rows in {[*buffers]!r:.200}: not buffers of rows")
        self.device: str = device
        self.shape: dict[str, int | str] = dict(shape)
        self._buffers = [*buffers]
        self._rows = rows

    def get_contiguous_buf_infos(self) -> tuple[list[int], list[int], list[int]]:
        """Return the addresses of the buffers, their bytes, and the bytes of a row of each."""
        addresses, sizes = zip(*self._buffers, strict=True)
        return [*addresses], [self._rows * size for size in sizes], [*sizes]

    def regions(self, device: int | None) -> list[Memory]:
        """Return each buffer as a region: nothing is known of the memory between them."""
        return [Memory(address, self._rows * size, device) for address, size in self._buffers]
