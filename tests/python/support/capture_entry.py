"""One call, with what it does while its own stream is captured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from capture_world import World

WORKS = "works"
REFUSES = "refuses"


@dataclass(frozen=True)
class Entry:
    """A call.

    Attributes:
        call: It, on a world.
        own: Whether it `works` or `refuses` while the current stream is captured.
        check: Whether it did, by its answer, after its graph has run.
        prepare: What it needs beforehand.
    """

    call: Callable[[World], object]
    own: str
    check: Callable[[World, Any], bool] | None = None
    prepare: Callable[[World], object] = lambda _: None
