"""Properties of pools' units that are for the package alone."""

from __future__ import annotations

from operator import attrgetter, methodcaller
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvpool._kvpool import Pool

Holder: TypeAlias = "tuple[str | int | None, str, float, int]"
SpanTuple: TypeAlias = "tuple[int, int, str, int | None, list[Holder]]"

hands_out: Callable[[Pool], bool] = attrgetter("_hands_out")
"""Whether a pool hands out units, which are then free or in use."""

unit_bytes: Callable[[Pool], int | None] = attrgetter("_unit_bytes")
"""Bytes of one unit. `None` if a pool has no memory or its units differ in size."""

spans_and_lifetimes: Callable[[Pool], tuple[list[SpanTuple], list[int]]] = methodcaller("_occupancy")
"""The spans of a pool, as the arguments of `Span`, and the histogram of lifetimes."""
