"""Turns of sessions: what a request says of the conversation or agent that it belongs to.

A request says it in `SamplingParams.extra_args`, which an OpenAI request has as `vllm_xargs`: the name of its
session, and what follows when it is over. Arguments of others are not looked at.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from kvpool.integrations.vllm.seams import TURNS, VLLM

VLLM.require(TURNS)

from vllm.exceptions import VLLMValidationError  # noqa: E402

if TYPE_CHECKING:
    from vllm.v1.request import Request

__all__ = ["END", "PAUSE", "SESSION", "Turn", "check", "turn_of"]

SESSION = "kvpool_session"
"""The argument that names the session of a request: a str of 1 to 256 characters, or an int."""

PAUSE = "kvpool_pause"
"""The argument that says what the session waits for after this turn: a str of 1 to 64 characters."""

END = "kvpool_session_end"
"""The argument that says whether this turn is the last one: true or false; vLLM's server makes it 1 or 0."""

_PREFIX = "kvpool_"
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


def check(request: Request) -> None:
    """Refuse a request whose arguments are wrong.

    Raises:
        VLLMValidationError: If they are. Before the scheduler has the request, vLLM fails it alone.
    """
    params = request.sampling_params
    if params is not None and params.extra_args:
        _turn(params.extra_args)


def turn_of(request: Request) -> Turn | None:
    """Return the turn that a request is; `None` if it says of no session, or if its arguments are wrong."""
    params = request.sampling_params
    if params is None or not params.extra_args:
        return None
    try:
        return _turn(params.extra_args)
    except VLLMValidationError:
        _warn_once()
        return None


@cache
def _warn_once() -> None:
    _logger.warning(
        "vLLM has a request whose arguments %s* are wrong and were not checked: it is one of no session",
        _PREFIX,
    )


def _turn(arguments: dict[str, Any]) -> Turn | None:
    own = {name: value for name, value in arguments.items() if str(name).startswith(_PREFIX)}
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


def _is_text(value: object, longest: int) -> bool:
    """Whether a value is a text of a length from 1 on that Rust can take."""
    if not isinstance(value, str) or not 1 <= len(value) <= longest:
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _error(name: str, value: object, words: str) -> VLLMValidationError:
    shown = repr(value)
    if len(shown) > _SHOWN:
        shown = f"{shown[:_SHOWN]}..."
    return VLLMValidationError(f"{name} is {shown}; it {words}", parameter=name)
