"""Rows of requests on their way between processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class Move(Protocol):
    """Rows of one request that come from another process, or go there. Its methods raise nothing.

    Attributes:
        brings: Whether the rows come. Otherwise they go.
        has_begun: Whether `begin` was called: from then on slots are in use until `query` says otherwise.
    """

    brings: bool
    has_begun: bool

    def begin(self, row: int, slots: torch.Tensor, start: int) -> None:
        """Let rows move. Sets `has_begun` before anything else.

        Args:
            row: The request's row, which is that of its state, too.
            slots: Slots of its tokens from position `start` on, int32 `[n]`, on the device of the pool.
            start: Tokens before, which need not come: they were found in the prefix cache.
        """

    def query(self) -> bool:
        """Return whether it is over: nothing arrives any more, and nothing else uses the slots."""

    def cancel(self) -> None:
        """Do without the rows. It may take time until `query` says that it is over."""

    @property
    def has_failed(self) -> bool:
        """Whether rows that should have come are not there."""
