"""The interface of requests that a scheduler works with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt

    from kvpool.typing import Namespace
    from kvpool_serving.held import Held

State: TypeAlias = Literal["waiting", "running", "finished", "aborted"]
"""The state of a request."""

Tokens: TypeAlias = "Sequence[int] | npt.NDArray[np.int32]"
"""Token ids."""


class Schedulable(Protocol):
    """The interface of a request.

    Attributes:
        state: "waiting", "running", and at the end "finished" or "aborted". The scheduler sets it.
        retractions: Number of retractions.
        prefix_len: Number of tokens that were found in the prefix cache at its admission, while running.
        held: The state of the request that only the scheduler changes. At first it is empty except for a
            move, if there is one.
    """

    state: State
    retractions: int
    prefix_len: int
    held: Held

    @property
    def seq_len(self) -> int:
        """Number of known tokens: prompt and generated ones."""

    @property
    def is_complete(self) -> bool:
        """Whether all tokens of the request are generated."""

    @property
    def owner(self) -> str | int | None:
        """Owner of its row and slots, for pools with debugging."""

    @property
    def namespace(self) -> Namespace:
        """Namespace of its tokens in the prefix cache."""

    def between(self, begin: int, end: int) -> Tokens:
        """Return the known tokens from position `begin` to `end`, for the prefix cache."""


R = TypeVar("R", bound=Schedulable)


def is_open(request: Schedulable) -> bool:
    """Return whether a request has not ended."""
    return request.state in {"waiting", "running"}


def has_rows_elsewhere(request: Schedulable) -> bool:
    """Return whether rows of a request come from another process."""
    return request.held.move is not None and request.held.move.brings


def has_begun_to_move(request: Schedulable) -> bool:
    """Return whether rows of a request may be on their way."""
    return request.held.move is not None and request.held.move.has_begun
