"""TraceLab's release: calls of models by coding agents, without their contents."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvpool.tools.traces.contexts import Context
from kvpool.tools.traces.fields import TICKS_PER_S, json_object, text_ticks, token_count
from kvpool.tools.traces.trace import BLOCK_SIZE, Trace, TraceError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TRACELAB_KEYS = ("session_id", "input_tokens_total", "prefix_tokens", "output_tokens", "timing_events")

_JITTER_TOKENS = 1_024
"""A prompt that is shorter by at most so much continues the one before (TraceLab's micro-reduction)."""
_INPUTS = ("user_message", "tool_result")
_TOOL_CALL = "tool_call"
_OUTPUTS = ("reasoning", "text", _TOOL_CALL)


class _Call(NamedTuple):
    """A call of a model, with its time in ticks."""

    time: int
    session: str
    kind: tuple[str, ...]
    input_len: int
    found: int
    output_len: int
    has_tool_call: bool


def tracelab_trace(name: str, path: Path, lines: list[tuple[int, str]]) -> Trace:
    """Return the trace of a file of TraceLab (arXiv:2606.30560).

    A call arrives with the last message of the user or result of a tool before its first output. What prompts
    have in common is inferred from their lengths and from what the provider's cache found:

    - A prompt begins with the whole prompt before it in its session. If it is more than 1,024 tokens shorter,
      the context was compacted, and it begins with as much of that prompt as the cache found.
    - The first prompt of a session begins with what the cache found of it, which it has in common with the
      other sessions of the same provider, model and project: the prompt of the tools.

    A call with an output that calls a tool is followed by its result, any other by a message of the user.

    Calls without a number of input tokens are left out.

    Args:
        name: Name of the trace.
        path: The file, for errors.
        lines: Its lines that are not blank, with their numbers.

    Raises:
        TraceError: If no line has input tokens, or a line is malformed.
    """
    calls = sorted(_calls(path, lines), key=lambda call: call.time)
    if not calls:
        raise TraceError(f"{path}: holds no requests")
    nothing = Context(BLOCK_SIZE)
    shared: dict[tuple[str, ...], Context] = {}
    contexts: dict[str, Context] = {}
    blocks = []
    for call in calls:
        before = contexts.get(call.session)
        if before is None:
            base = shared.setdefault(call.kind, nothing.copy())
            base.extend(max(0, min(call.found, call.input_len) - len(base)))
            context = base.copy(min(call.found, call.input_len))
        elif call.input_len < len(before) - _JITTER_TOKENS:
            context = before.copy(min(call.found, call.input_len))
        else:
            context = before.copy(call.input_len)
        context.extend(call.input_len - len(context))
        contexts[call.session] = context
        blocks.append(context.prompt())
    numbers = {session: at for at, session in enumerate(contexts)}
    sessions = np.array([numbers[call.session] for call in calls], dtype=np.int64)
    times = np.array([call.time for call in calls], dtype=np.int64)
    return Trace(
        name,
        (times - times[0]) / TICKS_PER_S,
        np.array([call.input_len for call in calls], dtype=np.int64),
        np.array([call.output_len for call in calls], dtype=np.int64),
        tuple(blocks),
        BLOCK_SIZE,
        sessions,
        sessions,
        np.array(["tool" if call.has_tool_call else "user" for call in calls]),
    )


def _calls(path: Path, lines: list[tuple[int, str]]) -> Iterator[_Call]:
    for number, line in lines:
        record = json_object(path, number, line)
        if not record.keys() >= {*TRACELAB_KEYS}:
            raise TraceError(f"{path}:{number}: needs an object with {', '.join(TRACELAB_KEYS)}")
        if not record["input_tokens_total"]:
            continue
        session = record["session_id"]
        if not isinstance(session, str):
            raise TraceError(f"{path}:{number}: session_id is not a text: {session!r}")
        yield _Call(
            _arrival(path, number, record["timing_events"]),
            session,
            tuple(str(record.get(key)) for key in ("provider", "model", "project")),
            token_count(path, number, "input_tokens_total", record["input_tokens_total"], 1),
            token_count(path, number, "prefix_tokens", record["prefix_tokens"] or 0, 0),
            token_count(path, number, "output_tokens", record["output_tokens"] or 0, 0),
            any(event.get("event_type") == _TOOL_CALL for event in record["timing_events"]),
        )


def _arrival(path: Path, number: int, events: Any) -> int:  # noqa: ANN401 - of a file
    """Return the time of the last input before the first output, or of the first event."""
    if not isinstance(events, list) or not events or not all(isinstance(event, dict) for event in events):
        raise TraceError(f"{path}:{number}: timing_events is not a list of one event or more")
    times = [text_ticks(path, number, "timestamp", event.get("timestamp")) for event in events]
    kinds = [event.get("event_type") for event in events]
    first_output = min(
        (time for time, kind in zip(times, kinds, strict=True) if kind in _OUTPUTS), default=max(times)
    )
    inputs = [
        time for time, kind in zip(times, kinds, strict=True) if kind in _INPUTS and time <= first_output
    ]
    return max(inputs, default=min(times))
