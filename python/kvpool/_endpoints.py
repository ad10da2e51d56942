"""The endpoints of this process, for snapshots and metrics."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    import numpy.typing as npt

    from kvpool.typing import EndpointStats


class Moving(NamedTuple):
    """Slots of one pool that are under transfer.

    Attributes:
        slots: int32 `[n]`.
        state: "lent": a peer may read them; "filling": a peer may fill them, or is filling them; "reading":
            they are being read from a peer.
        peer: The name of the peer; `None` if any that has the ticket may read them.
        lease: The lease, in words.
        age_s: Seconds since the lease or the read began.
    """

    slots: npt.NDArray[np.int32]
    state: str
    peer: str | None
    lease: str
    age_s: float


class Observed(Protocol):
    """An endpoint, as snapshots and metrics see it."""

    @property
    def name(self) -> str:
        """The name of the endpoint."""
        ...

    @property
    def device(self) -> str:
        """The device of its pools."""
        ...

    @property
    def is_closed(self) -> bool:
        """Whether the endpoint is closed."""
        ...

    def stats(self) -> EndpointStats:
        """Return counters."""
        ...

    def read_times(self) -> list[int]:
        """Return how many reads brought their rows within less than 1, 2, 4, ... ms; the last took longer."""
        ...

    def moving(self) -> Mapping[str, tuple[int, Sequence[Moving]]]:
        """Return the number of rows and the slots under transfer of each pool, "kv" and "states"."""
        ...


_lock = threading.Lock()
_known: weakref.WeakSet[Observed] = weakref.WeakSet()


def observe(endpoint: Observed) -> None:
    """Show an endpoint to observers as long as it lives and is not closed."""
    with _lock:
        _known.add(endpoint)


def endpoints() -> list[Observed]:
    """Return the endpoints that are not closed, sorted by name."""
    with _lock:
        known = [*_known]
    return sorted((one for one in known if not one.is_closed), key=lambda one: one.name)
