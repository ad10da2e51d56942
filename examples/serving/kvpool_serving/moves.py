"""The interface with which the rows of a request move between processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class Move(Protocol):
    """A transfer of the rows of one request between this process and another. Its methods raise nothing.

    Attributes:
        brings: Whether the rows come from another process; otherwise they go to another process.
        has_begun: Whether `begin` was called: from then on the slots are in use until `query` returns true.
    """

    brings: bool
    has_begun: bool

    def begin(self, row: int, slots: torch.Tensor, start: int) -> None:
        """Begin the transfer. Sets `has_begun` before anything else.

        Args:
            row: The request's row in the request table, which is also the row of its state.
            slots: Slots of its tokens from position `start` on, int32 `[n]`, on the device of the pool.
            start: The number of tokens before these slots. Their rows are in the local prefix cache and do
                not move.
        """

    def query(self) -> bool:
        """Return whether the transfer is over: no row arrives any more, and nothing else uses the slots."""

    def wait(self, timeout: float) -> bool:
        """Wait until the transfer is over, at most for `timeout` seconds. Return whether it is."""

    def cancel(self) -> None:
        """Cancel the transfer. It may take time until `query` returns true."""

    @property
    def has_failed(self) -> bool:
        """Whether the transfer is over without the rows having arrived from the other process."""
