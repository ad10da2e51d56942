"""What a scheduler knows of a request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpool._kvpool import Fetch, Lease, Load
    from kvpool.serving.moves import Move

State: TypeAlias = Literal["waiting", "running", "finished", "aborted"]


class Schedulable(Protocol):
    """The interface of a request.

    Attributes:
        state: "waiting", "running", and at the end "finished" or "aborted". The scheduler sets it.
        retractions: Number of retractions.
        row: Row in the request table, while running.
        cached: Number of tokens with slots, while running.
        prefix_len: Number of tokens that were found in the prefix cache at its admission, while running.
        lease: Its lease of the prefix cache, while running with one.
        load: What comes back of its prefix from the tier below, up to the end of its first step.
        fetch: What comes of its prompt to that tier from a store, up to its admission.
        move: What brings its rows from another process, up to their arrival, or takes them there when its
            next token is generated.
    """

    state: State
    retractions: int
    row: int
    cached: int
    prefix_len: int
    lease: Lease | None
    load: Load | None
    fetch: Fetch | None
    move: Move | None

    @property
    def seq_len(self) -> int:
        """Number of known tokens: prompt and generated ones."""

    @property
    def is_complete(self) -> bool:
        """Whether it has all tokens that it asked for."""

    @property
    def owner(self) -> str | int | None:
        """Owner of its row and slots, for pools with debugging."""

    @property
    def namespace(self) -> str | bytes | int | None:
        """Namespace of its tokens in the prefix cache."""

    def between(self, begin: int, end: int) -> Sequence[int]:
        """Known tokens from position `begin` to `end`, for the prefix cache."""


R = TypeVar("R", bound=Schedulable)


def is_open(request: Schedulable) -> bool:
    """Whether a request has not ended."""
    return request.state in {"waiting", "running"}


def has_rows_elsewhere(request: Schedulable) -> bool:
    """Whether rows of a request come from another process."""
    return request.move is not None and request.move.brings


def has_begun_to_move(request: Schedulable) -> bool:
    """Whether rows of a request may be on their way."""
    return request.move is not None and request.move.has_begun
