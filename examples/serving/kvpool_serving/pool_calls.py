"""The calls of a scheduler that take from the pools and give back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvpool import BatchPlan, BatchPlanner, Lease, PrefixCache
    from kvpool.typing import Namespace
    from kvpool_serving.schedulable import Tokens


class AllocRows(Protocol):
    """`ReqToTokenPool.alloc`."""

    def __call__(self, n: int, *, owner: str | int | None) -> Sequence[int] | None:
        """Take rows of the request table; `None` if there are not enough."""


class Extend(Protocol):
    """`BatchPlanner.extend`."""

    def __call__(
        self,
        rows: Sequence[int],
        prefix_lens: Sequence[int],
        seq_lens: Sequence[int],
        /,
        *,
        prefixes: Sequence[Lease | None] | None,
    ) -> BatchPlan | None:
        """Take the slots of a step; `None` if there are not enough."""


class Match(Protocol):
    """`PrefixCache.match`."""

    def __call__(self, tokens: Tokens, *, namespace: Namespace, limit: int) -> Lease:
        """Lease the longest cached prefix of tokens."""


@dataclass(frozen=True)
class PoolCalls:
    """The calls of a scheduler that take from the pools and give back. Wrap them to measure or to check them.

    Attributes:
        alloc_rows: Takes rows of the request table.
        extend: Takes the slots of a step.
        finish: Frees rows, with their slots.
        match: Leases the longest cached prefix of tokens; `None` without a cache.
    """

    alloc_rows: AllocRows
    extend: Extend
    finish: Callable[[Sequence[int]], object]
    match: Match | None

    @classmethod
    def of(cls, planner: BatchPlanner, cache: PrefixCache | None) -> PoolCalls:
        """Return the calls of a planner and a prefix cache."""
        match = None if cache is None else cache.match
        return cls(planner.req_to_token_pool.alloc, planner.extend, planner.finish, match)
