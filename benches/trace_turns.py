"""What each request of a trace says of its session, as an engine takes it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvpool.integrations.turns import END, PAUSE, SESSION
from kvpool.tools.traces.trace import END as NONE_FOLLOWS

if TYPE_CHECKING:
    from kvpool.tools.traces import Trace


def said(trace: Trace) -> list[dict[str, Any] | None]:
    """What each request says of its session, if the trace knows of sessions."""
    if trace.contexts is None or trace.followed_by is None:
        return [None] * len(trace)
    says: list[dict[str, Any] | None] = []
    for context, follows in zip(trace.contexts.tolist(), trace.followed_by.tolist(), strict=True):
        more = {END: True} if follows == NONE_FOLLOWS else {PAUSE: follows} if follows else {}
        says.append({SESSION: context, **more})
    return says
