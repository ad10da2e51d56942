"""Changes that an interrupt leaves either undone or done.

Ctrl-C raises `KeyboardInterrupt` between two instructions of Python, never within a function of CPython or of
the extension. So two steps that must not be separated are one call of such a function here: `next` or
`list.extend` over a `map`. A change of more steps is guarded, and repaired if an exception has left it.
"""

from __future__ import annotations

from contextlib import contextmanager
from inspect import GEN_SUSPENDED, getgeneratorstate
from operator import length_hint
from typing import TYPE_CHECKING, Generic, TypeVar
from weakref import ref

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from contextlib import AbstractContextManager

T = TypeVar("T")
S = TypeVar("S")


def append_result(items: list[T], call: Callable[[S], T | None], argument: S) -> None:
    """Append the result of a call to a list, unless it is empty, with no interrupt between the two."""
    items.extend(filter(None, map(call, [argument])))


def call_with_last(call: Callable[[T], object], items: list[T]) -> None:
    """Pop the last item of a list and call a function with it, with no interrupt between the two."""
    next(map(call, map(items.pop, [-1])))


class Delivery(Generic[T]):
    """Passes each item that is appended to a list to a callback, once and in order.

    Args:
        items: The list. Its present items are not passed.
    """

    def __init__(self, items: list[T]) -> None:
        self._rest = iter(items)
        for _ in range(len(items)):
            next(self._rest)

    def deliver_next(self, callback: Callable[[T], object]) -> bool:
        """Call `callback` with the next item.

        An interrupt comes before the item is taken, or within the callback, never in between.

        Returns:
            Whether there was an item.
        """
        # An iterator that has been asked beyond the end of its list does not see later items.
        if not length_hint(self._rest):
            return False
        next(map(callback, self._rest))
        return True


class ChangeGuard:
    """Guards changes that take several calls: if an exception ends one, its remains are repaired.

    If another exception comes during the repair, the next change begins with it.

    Args:
        repair: Repairs the state that an interrupted change, or an interrupted repair, has left.
    """

    def __init__(self, repair: Callable[[], object]) -> None:
        self._repair = repair
        self._is_broken = False  # whether a change has begun, and neither ended nor been repaired
        # The last change, as long as a `with` holds it. An interrupt on the way into a `with` drops the
        # generator, which Python then closes: a flag would stay set.
        self._last: Callable[[], Generator[None] | None] = lambda: None

    @property
    def is_changing(self) -> bool:
        """Whether a change is going on, so that the caller runs within that change."""
        last = self._last()
        return last is not None and getgeneratorstate(last) == GEN_SUSPENDED

    def change(self) -> AbstractContextManager[None]:
        """Return a context for one change. No other change may be going on."""
        change = self._change()
        self._last = ref(change)
        return contextmanager(lambda: change)()

    def _change(self) -> Generator[None]:
        if self._is_broken:
            self._repair()
        self._is_broken = True
        try:
            yield
        except BaseException:
            self._repair()
            self._is_broken = False
            raise
        self._is_broken = False
