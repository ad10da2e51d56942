"""The interface of a network, for an `Endpoint`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Sequence

Indices: TypeAlias = npt.NDArray[np.int32]
"""Numbers of rows."""


class Memory(NamedTuple):
    """A region of memory that peers may read, or that rows are read into.

    Attributes:
        address: The address of the first byte.
        size: Bytes.
        device: The index of the GPU; `None` for host memory.
    """

    address: int
    size: int
    device: int | None


class Blocks(NamedTuple):
    """Buffers of equal rows in one kind of memory. Rows are numbered continuously over all buffers.

    Attributes:
        buffers: For each buffer its address, the bytes of a row, and its rows.
        device: The index of the GPU; `None` for host memory.
    """

    buffers: tuple[tuple[int, int, int], ...]
    device: int | None

    def strided(self) -> npt.NDArray[np.uint64]:
        """Return address, size, device, stride and number of the rows of each buffer, as NIXL lists them."""
        device = self.device or 0
        listed = [(address, size, device, size, rows) for address, size, rows in self.buffers]
        return np.array(listed, np.uint64).reshape(-1, 5)


class Reading(Protocol):
    """A read that has begun."""

    def state(self) -> Literal["running", "done", "failed"]:
        """Return the progress of the read. After "done" no byte arrives; after "failed" some may."""
        ...

    def release(self) -> None:
        """Release the resources of a read that is done."""
        ...


class Link(Protocol):
    """A peer, as an agent reaches it. Methods do not wait for it, and raise `TransferError` if they fail."""

    def read(self, kind: int, here: Indices, there: Indices, note: bytes) -> Reading:
        """Begin to read rows of the peer's blocks of a kind into rows of the agent's of that kind.

        Args:
            kind: The position of the blocks in the list that `connect` got.
            here: Rows that are written.
            there: Rows that are read, one for each.
            note: A note to send to the peer when all rows have arrived here; empty for none.
        """
        ...

    def send(self, note: bytes) -> None:
        """Send a note."""
        ...


class Agent(Protocol):
    """One end of a network. Methods do not wait for a peer, and raise `TransferError` if they fail."""

    def metadata(self) -> bytes:
        """Return the bytes that peers need to reach this agent."""
        ...

    def connect(self, metadata: bytes, blocks: Sequence[Blocks]) -> Link:
        """Return a link to a peer with these blocks, and prepare reads of them."""
        ...

    def notes(self) -> Sequence[tuple[str, bytes]]:
        """Return the notes received since the last call, each with the name of the agent that sent it."""
        ...

    def close(self) -> None:
        """End all reads: when it returns, no byte of them arrives any more."""
        ...
