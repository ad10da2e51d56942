"""Turns of sessions: what a request says of the conversation or agent that it belongs to.

A request says it in `SamplingParams.extra_args`, which an OpenAI request has as `vllm_xargs`: the name of its
session, and what follows when it is over. Arguments of others are not looked at.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpool.integrations.turns import END, PAUSE, SESSION, Turn, TurnError, parse, parse_unchecked
from kvpool.integrations.vllm.seams import TURNS, VLLM

VLLM.require(TURNS)

from vllm.exceptions import VLLMValidationError  # noqa: E402

if TYPE_CHECKING:
    from vllm.v1.request import Request

__all__ = ["END", "PAUSE", "SESSION", "Turn", "check", "turn_of"]


def check(request: Request) -> None:
    """Refuse a request whose arguments are wrong.

    Raises:
        VLLMValidationError: If they are. Before the scheduler has the request, vLLM fails it alone.
    """
    params = request.sampling_params
    if params is not None and params.extra_args:
        try:
            parse(params.extra_args)
        except TurnError as error:
            raise VLLMValidationError(str(error), parameter=error.parameter) from None


def turn_of(request: Request) -> Turn | None:
    """Return the turn that a request is; `None` if it says of no session, or if its arguments are wrong."""
    params = request.sampling_params
    if params is None or not params.extra_args:
        return None
    return parse_unchecked(params.extra_args, VLLM.name)
