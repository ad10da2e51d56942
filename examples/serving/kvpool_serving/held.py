"""The parts of a request that belong to its scheduler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvpool import Fetch, Lease, Load
    from kvpool_serving.moves import Move


@dataclass(slots=True)
class Held:
    """Everything that a request holds of pools, caches and stores.

    Attributes:
        row: Row in the request table, while running.
        cached: Number of tokens with slots, while running.
        lease: Its lease of the prefix cache, while running with one.
        load: The load of its prefix from the tier below, up to the end of its first step.
        fetch: The fetch of its prompt from a store to that tier, up to its admission.
        move: The move of its rows from another process, up to their arrival, or the move to another process
            that begins when its next token is generated.
    """

    row: int = 0
    cached: int = 0
    lease: Lease | None = None
    load: Load | None = None
    fetch: Fetch | None = None
    move: Move | None = None
