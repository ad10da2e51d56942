"""One batch of a scheduler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic

from kvpool_serving.schedulable import R

if TYPE_CHECKING:
    from kvpool import BatchPlan, Load


@dataclass(slots=True)
class Step(Generic[R]):
    """One batch, with slots for its new tokens.

    Attributes:
        requests: The requests of the batch, oldest first.
        ends: For each request, the number of its tokens with slots after the step.
        started: The requests whose first step since their admission this is.
        plan: The slots of the new tokens, and the metadata of all tokens.
    """

    requests: list[R]
    ends: list[int]
    started: list[R]
    plan: BatchPlan

    @property
    def loads(self) -> list[Load]:
        """The loads of the prefixes of `started`. Call `Load.wait_layer` before anything reads a layer."""
        return [request.held.load for request in self.started if request.held.load is not None]

    @property
    def chunk_tokens(self) -> int:
        """The new tokens, without one for each request."""
        return sum(end - r.held.cached - 1 for r, end in zip(self.requests, self.ends, strict=True))
