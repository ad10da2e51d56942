"""Series of numbers over several objects with the same labels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar
from weakref import ReferenceType, ref

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

K = TypeVar("K")


class _Member(NamedTuple, Generic[K]):
    """An object of a series, and its counters when they were last read."""

    of: ReferenceType[object]
    counters: dict[K, float]


class Series(Generic[K]):
    """The sums of the numbers of several objects.

    A counter does not decrease while the series has an object: objects that are gone keep their part of it.
    This is what a system that computes rates expects, which takes a decrease for a restart.

    Args:
        is_counter: Whether a number only increases during the life of an object.
    """

    def __init__(self, is_counter: Callable[[K], bool]) -> None:
        self._is_counter = is_counter
        self._gone: dict[K, float] = {}
        self._members: dict[int, _Member[K]] = {}

    def update(self, read: Iterable[tuple[object, Mapping[K, float] | None]]) -> dict[K, float]:
        """Return the sums.

        Args:
            read: All objects that the series has now, with their numbers. Without them, as they could not be
                read, the counters of the object are those that were read last.
        """
        read = [*read]
        self._remove_others({id(member): member for member, _ in read})
        sums: dict[K, float] = {}
        for member, numbers in read:
            if numbers is not None:
                counters = {key: value for key, value in numbers.items() if self._is_counter(key)}
                self._members[id(member)] = _Member(ref(member), counters)
                _add(sums, {key: value for key, value in numbers.items() if key not in counters})
        for one in self._members.values():
            _add(sums, one.counters)
        return {key: value + self._gone.get(key, 0) for key, value in sums.items()}

    def _remove_others(self, present: Mapping[int, object]) -> None:
        """Keep the counters of objects that are not present."""
        for number, one in [*self._members.items()]:
            # Another object may have the address by now.
            if number not in present or one.of() is not present[number]:
                _add(self._gone, self._members.pop(number).counters)


def _add(sums: dict[K, float], numbers: Mapping[K, float]) -> None:
    for key, value in numbers.items():
        sums[key] = sums.get(key, 0) + value
