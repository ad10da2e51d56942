"""Properties of pools and their units that are for the package alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvpool._kvpool import Pool

Holder: TypeAlias = "tuple[str | int | None, str, float, int]"
SpanTuple: TypeAlias = "tuple[int, int, str, int | None, list[Holder]]"


def hands_out(pool: Pool) -> bool:
    """Return whether a pool hands out units, which are then free or in use."""
    return pool._hands_out  # noqa: SLF001 - the extension has it for this package


def unit_bytes(pool: Pool) -> int | None:
    """Return the bytes of one unit: `None` if a pool has no memory or its units differ in size."""
    return pool._unit_bytes  # noqa: SLF001 - the extension has it for this package


def spans_and_lifetimes(pool: Pool) -> tuple[list[SpanTuple], list[int]]:
    """Return the spans of a pool, as the arguments of `Span`, and the histogram of lifetimes."""
    return pool._occupancy()  # noqa: SLF001 - the extension has it for this package


def counts(stats: Mapping[str, object]) -> dict[str, int]:
    """Return the integers of `stats()`: all of them, for a pool.

    Each type of `stats()` names its keys: a type checker takes none for a mapping to ints.
    """
    return {key: value for key, value in stats.items() if isinstance(value, int)}
