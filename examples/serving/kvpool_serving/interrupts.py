"""Ctrl-C while an engine works."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Interrupts:
    """Defers SIGINT while lists and pools change, so that Ctrl-C never comes in the middle of a change.

    The handler of the program, which by default raises `KeyboardInterrupt`, runs at the end of `deferred`, or
    at the beginning of `allowed` within it. Threads other than the main one get no signals.
    """

    def __init__(self) -> None:
        self._handler: Callable[..., Any] | None = None  # the program's, while deferred
        self._came: list[tuple[Any, ...]] = []

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Return a context that defers interrupts. It may be entered again within itself."""
        handler = signal.getsignal(signal.SIGINT)
        is_main = threading.current_thread() is threading.main_thread()
        if self._handler is not None or not is_main or not callable(handler):
            yield
            return
        signal.signal(signal.SIGINT, self._note)
        self._handler = handler
        try:
            yield
        finally:
            self._handler = None
            signal.signal(signal.SIGINT, handler)
            self._deliver(handler)

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """Return a context within `deferred` that can be interrupted, for what changes nothing."""
        handler = self._handler
        if handler is None:
            yield
            return
        self._deliver(handler)
        signal.signal(signal.SIGINT, handler)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, self._note)

    def _note(self, *arguments: Any) -> None:  # noqa: ANN401 - those of a handler
        self._came.append(arguments)

    def _deliver(self, handler: Callable[..., Any]) -> None:
        if self._came:
            arguments = self._came[0]
            self._came.clear()
            handler(*arguments)
