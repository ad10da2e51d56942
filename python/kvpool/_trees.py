"""The prefix caches of engines in this process whose slots an engine owns, for metrics."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping


class Observed(Protocol):
    """A prefix cache of an engine, as metrics see it."""

    @property
    def name(self) -> str:
        """The name of the pool of its slots."""
        ...

    @property
    def device(self) -> str:
        """The device of its slots."""
        ...

    def stats(self) -> Mapping[str, int]:
        """Return counters."""
        ...


_lock = threading.Lock()
_known: weakref.WeakSet[Observed] = weakref.WeakSet()


def observe(tree: Observed) -> None:
    """Show a tree to observers as long as it lives."""
    with _lock:
        _known.add(tree)


def trees() -> list[Observed]:
    """Return the trees, sorted by name."""
    with _lock:
        known = [*_known]
    return sorted(known, key=lambda one: one.name)
