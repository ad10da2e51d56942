"""Turns of sessions: what a request says of the conversation or agent that it belongs to.

A request says it by arguments that its engine passes on: the name of its session, and what follows when it is
over. Arguments of others are not looked at.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from kvpool.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["END", "PAUSE", "PREFIX", "SESSION", "Turn", "TurnError", "parse", "parse_unchecked"]

SESSION = "kvpool_session"
"""The argument that names the session of a request: a str of 1 to 256 characters, or an int."""

PAUSE = "kvpool_pause"
"""The argument that says what the session waits for after this turn: a str of 1 to 64 characters."""

END = "kvpool_session_end"
"""The argument that says whether this turn is the last one: true or false, or 1 or 0."""

PREFIX = "kvpool_"
"""What the names of all arguments begin with that are kvpool's."""

_LONGEST_NAME, _LONGEST_KIND, _SHOWN = 256, 64, 80

_logger = logging.getLogger("kvpool")


class Turn(NamedTuple):
    """A request of a session.

    Attributes:
        session: The name of the session.
        pause: What the session waits for when the turn is over; `None` if the request does not say.
        is_last: Whether the session ends with it.
    """

    session: str | int
    pause: str | None = None
    is_last: bool = False


class TurnError(ConfigError):
    """An argument is wrong.

    Attributes:
        parameter: Its name.
    """

    def __init__(self, parameter: str, text: str) -> None:
        super().__init__(text)
        self.parameter = parameter


def parse(arguments: Mapping[str, Any]) -> Turn | None:
    """Return the turn that these arguments say of; `None` if none is kvpool's.

    Raises:
        TurnError: If one is wrong.
    """
    own = {name: value for name, value in arguments.items() if str(name).startswith(PREFIX)}
    if not own:
        return None
    session, pause, is_last = own.pop(SESSION, None), own.pop(PAUSE, None), own.pop(END, False)
    for name, value in own.items():
        raise _error(name, value, f"is none of those that kvpool has: {SESSION}, {PAUSE} and {END}")
    if not (_is_text(session, _LONGEST_NAME) or type(session) is int):
        raise _error(SESSION, session, f"must be a str of 1 to {_LONGEST_NAME} characters, or an int")
    if not (pause is None or _is_text(pause, _LONGEST_KIND)):
        raise _error(PAUSE, pause, f"must be a str of 1 to {_LONGEST_KIND} characters")
    if not (isinstance(is_last, int) and is_last in {0, 1}):
        raise _error(END, is_last, "must be true or false")
    if pause is not None and is_last:
        raise _error(PAUSE, pause, f"must be left out with {END}: a session that ends does not pause")
    return Turn(session, pause, bool(is_last))


def parse_unchecked(arguments: Mapping[str, Any], engine: str) -> Turn | None:
    """Return the turn that these arguments say of; `None`, after a warning, if they are wrong."""
    try:
        return parse(arguments)
    except TurnError:
        _warn_once(engine)
        return None


@cache
def _warn_once(engine: str) -> None:
    _logger.warning(
        "%s has a request whose arguments %s* are wrong and were not checked: it is one of no session",
        engine,
        PREFIX,
    )


def _is_text(value: object, longest: int) -> bool:
    """Whether a value is a text of a length from 1 on that Rust can take."""
    if not isinstance(value, str) or not 1 <= len(value) <= longest:
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _error(name: str, value: object, words: str) -> TurnError:
    shown = repr(value)
    if len(shown) > _SHOWN:
        shown = f"{shown[:_SHOWN]}..."
    return TurnError(name, f"{name} is {shown}; it {words}")
