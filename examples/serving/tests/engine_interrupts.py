"""Interrupts at a chosen event of an engine."""

from __future__ import annotations

import dis
import functools
import itertools
import signal
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import kvpool_serving
import pool_reader

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from types import CodeType, FrameType

    from kvpool_serving import Request

Place = tuple[str, int, bool]
"""Name of a function, a line or the offset of an instruction in it, and whether it is a line."""

Event = int | tuple[Place, int]
"""The number of an event, from 1 on and 0 for none, or a place and the number of an event there."""


class Interrupts:
    """Sends SIGINT at one event of the code of an engine and of what it calls.

    An event is a line, or the return from a call, where Python lets a signal in before the next instruction.
    If `functions` are named, only theirs count, and the rest runs faster.

    Attributes:
        places: Those of all events up to the one that raises.
        has_raised: Whether there was such an event.
    """

    def __init__(self, at: Event, functions: Collection[str] = ()) -> None:
        self._place: Place | None
        self._place, self._left = (None, at) if isinstance(at, int) else at
        self._functions = functions
        self.places: list[Place] = []
        self.has_raised = False

    def _note(self, place: Place) -> None:
        self.places.append(place)
        if self._place in {None, place}:
            self._left -= 1
            if self._left == 0:
                self.has_raised = True
                signal.raise_signal(signal.SIGINT)

    def _on_call(self, frame: FrameType, _event: str, _arg: object) -> Any:  # noqa: ANN401
        code = frame.f_code
        is_model = code.co_filename == pool_reader.__file__ and code.co_name in {"start", "forward", "read"}
        is_engine = is_of_engine(code.co_filename)
        if self._functions and code.co_name not in self._functions:
            return None
        frame.f_trace_opcodes = is_engine
        if not (is_model or is_engine or code is get.__code__):
            return None
        name, returns = code.co_name, returns_of(code)

        def on_event(frame: FrameType, event: str, _arg: object) -> Any:  # noqa: ANN401
            if event == "line":
                self._note((name, frame.f_lineno, True))
            elif event == "opcode" and frame.f_lasti in returns:
                self._note((name, frame.f_lasti, False))
            return on_event

        return on_event

    @contextmanager
    def traced(self) -> Iterator[None]:
        """Counts events within it, up to the one that raises."""
        if self.has_raised:
            yield
            return
        before = sys.gettrace()
        sys.settrace(self._on_call)
        try:
            yield
        finally:
            sys.settrace(before)


@functools.cache
def is_of_engine(file: str) -> bool:
    """Whether a file is one of the engine."""
    return Path(file).parent == Path(kvpool_serving.__file__).parent


@functools.cache
def returns_of(code: CodeType) -> frozenset[int]:
    """Offsets of the instructions that follow a call."""
    pairs = itertools.pairwise(dis.get_instructions(code))
    return frozenset(after.offset for before, after in pairs if before.opname.startswith("CALL"))


delivered: dict[Request, list[int]] = {}


def get(request: Request, token: int) -> None:
    """Takes a token."""
    delivered.setdefault(request, []).append(token)
