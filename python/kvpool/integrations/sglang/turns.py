"""Turns of sessions in SGLang: requests say of them by `sampling_params.custom_params`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.runtime_context import get_context

from kvpool.integrations.sglang.seams import SGLANG
from kvpool.integrations.turns import PREFIX, Turn, TurnError, parse, parse_unchecked

if TYPE_CHECKING:
    from sglang.srt.sampling.sampling_params import SamplingParams

__all__ = ["check", "settings", "turn_of"]


def settings(namespace: str) -> object:
    """Return settings of the server; `None` in a process without a server, such as a test of SGLang."""
    context = get_context()
    return context.config_bag(namespace) if context.is_config_namespace_published(namespace) else None


def check(params: SamplingParams, *_args: object, **_options: object) -> None:
    """Refuse a request whose arguments are wrong, or that says of a session where nothing hears of it.

    Raises:
        TurnError: If that is so.
    """
    if not isinstance(params.custom_params, dict):
        return
    turn, memory = parse(params.custom_params), settings("memory")
    if turn is not None and memory is not None and getattr(memory, "radix_cache_backend", None) != "kvpool":
        raise TurnError(PREFIX, f"arguments {PREFIX}* need --radix-cache-backend kvpool, which is not set")


def turn_of(params: SamplingParams) -> Turn | None:
    """Return the turn that a request is; `None` if it says of no session, or if its arguments are wrong."""
    if not isinstance(params.custom_params, dict):
        return None
    return parse_unchecked(params.custom_params, SGLANG.name)
