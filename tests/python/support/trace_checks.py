"""Checks of whatever readers of traces are given: it is a trace of right numbers, or a TraceError."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvpool.tools.traces import Trace, TraceError, read_trace

if TYPE_CHECKING:
    from pathlib import Path

MOONCAKE = (
    b'{"timestamp": 3000, "input_length": 513, "output_length": 7, "hash_ids": [0, 1]}\n'
    b'{"timestamp": 1000.5, "input_length": 6758, "output_length": 500}\n'
    b'{"timestamp": 3000, "input_length": 1, "output_length": 0}\n'
)
AZURE = (
    b"TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    b"2023-11-16 18:15:46.6805900,374,44\r\n"
    b"2024-05-10T02:00:00.5+02:00,396,109\n"
    b"2023-11-17 18:15:50,1,0"
)
BAILIAN = (
    b'{"chat_id": 1, "parent_chat_id": -1, "timestamp": 61.114, "input_length": 33, "output_length": 132, '
    b'"type": "text", "turn": 1, "hash_ids": [7, 8, 9]}\n'
    b'{"chat_id": 2, "parent_chat_id": 1, "timestamp": 62.5, "input_length": 48, "output_length": 1, '
    b'"type": "text", "turn": 2, "hash_ids": [7, 8, 10]}\n'
)
TRACELAB = (
    b'{"session_id": "a", "input_tokens_total": 4000, "prefix_tokens": 900, "output_tokens": 20, '
    b'"timing_events": [{"event_type": "user_message", "timestamp": "2026-06-01T05:40:20.151Z"}]}\n'
    b'{"session_id": "a", "input_tokens_total": 500, "prefix_tokens": 100, "output_tokens": 20, '
    b'"timing_events": [{"event_type": "text", "timestamp": "2026-06-01T05:41:20.151Z"}]}\n'
)


def check_content(path: Path, content: bytes) -> Trace | None:
    """Reads `content` as a trace file at `path`; None when it is refused as it should be."""
    path.write_bytes(content)
    try:
        trace = read_trace(path)
    except TraceError as error:
        check_refusal(path, error)
        return None
    check_trace(trace, content)
    return trace


def check_refusal(path: Path, error: TraceError) -> None:
    """The message names the file."""
    assert str(error).startswith(f"{path}:")


def check_trace(trace: Trace, content: bytes) -> None:
    count = len(trace)
    lines = content.count(b"\n") + content.count(b"\r") + 1
    assert 1 <= count <= lines
    assert trace.arrival_s.dtype == np.float64
    assert trace.arrival_s[0] == 0.0
    assert np.isfinite(trace.arrival_s).all()
    assert (np.diff(trace.arrival_s) >= 0.0).all()
    for lens, least in ((trace.input_lens, 1), (trace.output_lens, 0)):
        assert lens.dtype == np.int64
        assert lens.shape == (count,)
        assert lens.flags.c_contiguous
        assert lens.min() >= least
        assert lens.max() < 2**31
    assert len(trace.all_blocks()) == count
    if trace.sessions is not None:
        assert trace.sessions.shape == (count,)
        assert trace.sessions[0] == 0
    assert (trace.total_lens == trace.input_lens + trace.output_lens).all()
    assert len(trace.head(1)) == 1
