"""Slots of SGLang's prefix cache that have two owners: a count, and a warning."""

from __future__ import annotations

import logging
from time import monotonic
from typing import TYPE_CHECKING

from kvpool._trees import observe

if TYPE_CHECKING:
    from kvpool._kvpool import HybridTree

__all__ = ["TreeOwners"]

_logger = logging.getLogger("kvpool")

_PAUSE_S = 1.0
"""The least time between two warnings."""


class TreeOwners:
    """Watches a tree for slots that two requests have written to, and shows it to `kvpool.metrics`.

    Args:
        tree: The tree.
        allocator: SGLang's allocator of the slots, whose pool gives the name.

    Attributes:
        name: The name of the pool of slots; that of the allocator's class if SGLang's own has the slots.
        device: The device of the slots.
    """

    def __init__(self, tree: HybridTree, allocator: object) -> None:
        # With sliding windows the slots for full attention have an allocator of their own.
        allocator = getattr(allocator, "full_attn_allocator", allocator)
        pool = getattr(allocator, "_pool", None)
        self.name: str = str(getattr(pool, "name", None) or type(allocator).__name__)
        self.device: str = str(getattr(allocator, "device", "cpu"))
        self._tree = tree
        self._warned = 0
        self._quiet_until = 0.0
        observe(self)

    def stats(self) -> dict[str, int]:
        """Return the numbers of cached slots, and how often one was found to have two owners."""
        return {
            "evictable": self._tree.evictable_size(0),
            "locked": self._tree.locked_size(0),
            "second_owners": self._tree.second_owners()[0],
        }

    def check(self) -> None:
        """Warn if slots with two owners were found, at most once a second."""
        found, slot = self._tree.second_owners()
        if found == self._warned or monotonic() < self._quiet_until:
            return
        _logger.warning(
            "%s: slot %s of the prefix cache has two owners (slots found since the last warning: %d): two "
            "requests have written to it, and their answers may be wrong. A slot that is freed while a "
            "request uses it is handed out again: KVPOOL_SGLANG_STRICT=1 ends the scheduler at the first "
            "free of a slot that is not in use",
            self.name,
            slot,
            found - self._warned,
        )
        self._warned, self._quiet_until = found, monotonic() + _PAUSE_S
