"""Readers of the published trace formats, and the generator."""

from __future__ import annotations

import gzip
import json
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvpool.tools.traces import Trace, TraceError, read_trace, synthetic_trace

if TYPE_CHECKING:
    from pathlib import Path

MOONCAKE = (
    '{"timestamp": 3000, "input_length": 513, "output_length": 7, "hash_ids": [0, 1]}\n'
    '{"timestamp": 1000, "input_length": 6758, "output_length": 500, '
    '"hash_ids": [0, 9, 2, 3, 4, 5, 6, 7, 8, 1, 10, 11, 12, 13]}\n'
    '{"timestamp": 3000, "input_length": 1, "output_length": 0}\n'
)
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    "2023-11-16 18:15:46.6805900,374,44\r\n"
    "2023-11-16 18:15:50.9951690,396,109\r\n"
    "2023-11-17 18:15:50.9951691,1,0"
)


# Two prompts of one session; the parent of the first is not in the file.
BAILIAN = (
    '{"chat_id": 159, "parent_chat_id": 55, "timestamp": 61.114, "input_length": 33, "output_length": 132, '
    '"type": "text", "turn": 2, "hash_ids": [7, 8, 9]}\n'
    '{"chat_id": 160, "parent_chat_id": 159, "timestamp": 62.5, "input_length": 48, "output_length": 1, '
    '"type": "text", "turn": 3, "hash_ids": [7, 8, 10]}\n'
)


def call(  # noqa: PLR0913, PLR0917 - the fields of a line
    session: str,
    at: str,
    tokens: int | None,
    found: int,
    output: int,
    result_at: str = "",
    *,
    has_tool_call: bool = False,
) -> str:
    """A line of TraceLab: a call whose first output is at `at`, after a result of a tool."""
    events = [{"event_type": "text", "timestamp": f"2026-06-01T{at}.5Z"}]
    if has_tool_call:
        events.append({"event_type": "tool_call", "timestamp": f"2026-06-01T{at}.6Z"})
    if result_at:
        events.insert(0, {"event_type": "tool_result", "timestamp": f"2026-06-01T{result_at}Z"})
    record = {"session_id": session, "input_tokens_total": tokens, "prefix_tokens": found}
    return json.dumps({**record, "output_tokens": output, "timing_events": events, "model": "m"}) + "\n"


# Session a grows, and is compacted; session b begins with the same prompt of tools.
TRACELAB = (
    call("a", "10:00:09", 4000, 1500, 20, has_tool_call=True)
    + call("a", "10:00:20", 6000, 0, 30, "10:00:19")
    + call("b", "10:00:21", 3000, 1100, 5)
    + call("a", "10:00:30", 2100, 1030, 5)
)


def event_less(events: str) -> str:
    return json.dumps({**json.loads(TRACELAB.splitlines()[0]), "timing_events": json.loads(events)})


def read(folder: Path, content: str | bytes) -> Trace:
    path = folder / "sample.trace"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_trace(path)


def test_mooncake_lines_are_sorted_by_arrival(tmp_path: Path) -> None:
    trace = read(tmp_path, MOONCAKE)
    assert trace.name == "sample"
    assert trace.arrival_s.tolist() == [0.0, 2.0, 2.0]
    assert trace.input_lens.tolist() == [6758, 513, 1]
    assert trace.output_lens.tolist() == [500, 7, 0]
    assert trace.total_lens.tolist() == [7258, 520, 1]
    assert trace.block_size == 512
    assert len(trace) == 3


def test_a_block_is_named_with_everything_before_it(tmp_path: Path) -> None:
    """Block 1 follows block 8 in the first request, and block 0 in the second."""
    trace = read(tmp_path, MOONCAKE)
    assert [blocks.tolist() for blocks in trace.blocks] == [[*range(14)], [0, 14], []]
    assert [blocks.tolist() for blocks in trace.all_blocks()] == [[*range(14)], [0, 14], [15]]
    assert [blocks.tolist() for blocks in trace.head(1).all_blocks()] == [[*range(14)]]


def test_prompts_of_a_trace_without_hash_ids_have_nothing_in_common(tmp_path: Path) -> None:
    trace = read(tmp_path, AZURE)
    assert trace.blocks == ()
    assert [blocks.tolist() for blocks in trace.all_blocks()] == [[0], [1], [2]]


@pytest.mark.parametrize(
    ("prompts", "block_size"),
    [([(512, 1)], 512), ([(7, 1)], 512), ([(600, 1)], 1024), ([(100, 7)], 16), ([(50, 5), (37, 4)], 10)],
)
def test_the_block_size_follows_from_the_prompts(
    tmp_path: Path, prompts: list[tuple[int, int]], block_size: int
) -> None:
    lines = (GOOD.replace("1,", f'{n}, "hash_ids": {[*range(ids)]},', 1) for n, ids in prompts)
    assert read(tmp_path, "".join(lines)).block_size == block_size


def test_bailian_requests_belong_to_sessions(tmp_path: Path) -> None:
    other = BAILIAN.splitlines()[0].replace("159", "3").replace(": 55", ": -1")
    trace = read(tmp_path, BAILIAN + other)
    assert trace.arrival_s == pytest.approx([0.0, 0.0, 1.386])
    assert trace.block_size == 16
    assert trace.sessions is not None
    assert trace.sessions.tolist() == [0, 1, 0]
    assert [blocks.tolist() for blocks in trace.blocks] == [[0, 1, 2], [0, 1, 2], [0, 1, 3]]
    head = trace.take(np.array([2]))
    assert head.sessions is not None
    assert head.sessions.tolist() == [0]


def test_the_block_size_of_bailian_is_16_where_it_fits(tmp_path: Path) -> None:
    short = BAILIAN.splitlines()[0].replace("33,", "9,").replace("[7, 8, 9]", "[7]")
    assert read(tmp_path, short).block_size == 16


def test_prompts_of_tracelab_continue_those_before_in_their_session(tmp_path: Path) -> None:
    trace = read(tmp_path, TRACELAB)
    assert trace.arrival_s.tolist() == [0.0, 9.5, 12.0, 21.0]
    assert trace.input_lens.tolist() == [4000, 6000, 3000, 2100]
    assert trace.output_lens.tolist() == [20, 30, 5, 5]
    assert trace.sessions is not None
    assert trace.sessions.tolist() == [0, 0, 1, 0]
    assert trace.contexts is trace.sessions
    assert trace.followed_by is not None
    assert trace.followed_by.tolist() == ["tool", "user", "user", "user"]
    first, second, other, compacted = (blocks.tolist() for blocks in trace.blocks)
    assert [len(blocks) for blocks in trace.blocks] == [8, 12, 6, 5]
    # 4000 tokens are 7 whole blocks, the prompt of tools has 2, and 1030 tokens are 2.
    assert first[:7] == second[:7]
    assert not {*first[7:]} & {*second[7:]}
    assert other[:2] == first[:2]
    assert not {*other[2:]} & {*second, *first}
    assert compacted[:2] == first[:2]
    assert not {*compacted[2:]} & {*second, *first, *other}


def test_calls_of_tracelab_without_a_number_of_tokens_are_left_out(tmp_path: Path) -> None:
    assert len(read(tmp_path, TRACELAB + call("a", "11:00:00", None, 0, 1))) == 4
    with pytest.raises(TraceError, match="holds no requests"):
        read(tmp_path, call("a", "11:00:00", None, 0, 1))


def test_a_compressed_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "sample.jsonl.gz"
    path.write_bytes(gzip.compress(BAILIAN.encode()))
    trace = read_trace(path)
    assert (trace.name, len(trace)) == ("sample", 2)
    path.write_bytes(gzip.compress(BAILIAN.encode())[:-9])
    with pytest.raises(TraceError, match="is not a whole gzip file"):
        read_trace(path)


def test_azure_lines_end_in_crlf_and_have_seven_digits(tmp_path: Path) -> None:
    trace = read(tmp_path, AZURE)
    assert trace.arrival_s == pytest.approx([0.0, 4.314579, 86404.3145791], abs=1e-9)
    assert trace.input_lens.tolist() == [374, 396, 1]
    assert trace.output_lens.tolist() == [44, 109, 0]


@pytest.mark.parametrize(
    ("first", "second", "gap_s"),
    [
        ("2024-05-10 00:00:00", "2024-05-10 00:00:01", 1.0),
        ("2024-05-10 00:00:00.009930+00:00", "2024-05-10 00:00:00.019930+00:00", 0.01),
        ("2024-05-10T02:00:00.5+02:00", "2024-05-10T00:00:00.75+00:00", 0.25),
        ("2024-05-10T00:00:00.25Z", "2024-05-10T00:00:01Z", 0.75),
        ("2024-02-28 23:59:59.9999999", "2024-02-29 00:00:00.0000000", 1e-7),
        ("2024-05-10 00:00:00.1234567891", "2024-05-10 00:00:00.1234568999", 1e-7),
    ],
)
def test_time_stamps_of_azure_give_seconds(tmp_path: Path, first: str, second: str, gap_s: float) -> None:
    trace = read(tmp_path, f"TIMESTAMP,ContextTokens,GeneratedTokens\n{first},1,1\n{second},1,1\n")
    assert trace.arrival_s[1] == pytest.approx(gap_s, abs=1e-12)


def test_azure_columns_are_found_by_name(tmp_path: Path) -> None:
    trace = read(tmp_path, "GeneratedTokens,Model,TIMESTAMP,ContextTokens\n9,x,2024-05-10 00:00:00,7\n")
    assert (trace.input_lens.tolist(), trace.output_lens.tolist()) == ([7], [9])


@pytest.mark.parametrize("content", [MOONCAKE, AZURE])
def test_blank_lines_and_a_byte_order_mark_are_skipped(tmp_path: Path, content: str) -> None:
    assert len(read(tmp_path, "\ufeff\n" + content + "\n\n")) == 3


def test_head_takes_the_first_requests(tmp_path: Path) -> None:
    trace = read(tmp_path, MOONCAKE)
    assert trace.head(2).input_lens.tolist() == [6758, 513]
    assert len(trace.head(None)) == 3
    assert len(trace.head(99)) == 3


GOOD = '{"timestamp": 0, "input_length": 1, "output_length": 1}\n'
HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


@pytest.mark.parametrize(
    ("content", "line", "message"),
    [
        (GOOD + "{oops\n", 2, "not a JSON object"),
        (GOOD + "\n[1, 2]\n", 3, "not a JSON object, but list"),
        (GOOD + '{"timestamp": 0, "input_length": 1}\n', 2, "needs an object with timestamp"),
        (GOOD.replace("0,", '"soon",'), 1, "timestamp is not a number of milliseconds: 'soon'"),
        (GOOD.replace("0,", "true,"), 1, "timestamp is not a number of milliseconds: True"),
        (GOOD.replace("0,", "NaN,"), 1, "timestamp is not a number of milliseconds: nan"),
        (GOOD.replace("0,", "-1,"), 1, "timestamp is not a number of milliseconds: -1"),
        (GOOD.replace("1,", "0,"), 1, "input_length is not a token count of at least 1: 0"),
        (GOOD.replace("1,", "1.5,"), 1, "input_length is not a token count of at least 1: 1.5"),
        (GOOD.replace("1}", "-1}"), 1, "output_length is not a token count of at least 0: -1"),
        (GOOD.replace("1}", "true}"), 1, "output_length is not a token count of at least 0: True"),
        (GOOD.replace("1}", "9" * 5000 + "}"), 1, "not a JSON object"),
        (GOOD.replace("}", ', "hash_ids": 1}'), 1, "hash_ids are not a list of ints"),
        (GOOD.replace("}", ', "hash_ids": [1.0]}'), 1, "hash_ids are not a list of ints"),
        (GOOD + GOOD.replace("}", ', "hash_ids": [1, 2]}'), 2, "2 hash_ids for 1 tokens: no block size fits"),
        (HEADER + "2023-11-16 18:15:46.68,374\n", 2, "has 2 columns, the header has 3"),
        (HEADER + "2023-11-16 18:15:46.68,many,1\n", 2, "ContextTokens is not a token count of at least 1"),
        (HEADER + "2023-11-16 18:15:46.68,1,\n", 2, "GeneratedTokens is not a token count of at least 0: ''"),
        (HEADER + "2023-11-16 18:15:46.68,1," + "9" * 5000, 2, "GeneratedTokens is not a token count"),
        (
            HEADER + "2023-02-30 18:15:46.68,1,1\n",
            2,
            "TIMESTAMP is not a date and time: '2023-02-30 18:15:46.68'",
        ),
        (HEADER + "yesterday,1,1\n", 2, "TIMESTAMP is not a date and time: 'yesterday'"),
        (HEADER + "2023-02-20,1,1\n", 2, "TIMESTAMP is not a date and time: '2023-02-20'"),
        (BAILIAN.replace("55", "null"), 1, "chat_id and parent_chat_id are not ints: 159, None"),
        (BAILIAN.replace("61.114", "-1"), 1, "timestamp is not a number of seconds: -1"),
        (BAILIAN + GOOD, 3, "needs an object with chat_id, parent_chat_id, timestamp"),
        (TRACELAB + GOOD, 5, "needs an object with session_id, input_tokens_total"),
        (TRACELAB.replace('"a"', "7", 1), 1, "session_id is not a text: 7"),
        (
            TRACELAB.replace("10:00:09", "noon", 1),
            1,
            "timestamp is not a date and time: '2026-06-01Tnoon.5Z'",
        ),
        (TRACELAB.replace("4000", "0.5", 1), 1, "input_tokens_total is not a token count of at least 1: 0.5"),
        (event_less("[]"), 1, "timing_events is not a list of one event or more"),
        (event_less("[3]"), 1, "timing_events is not a list of one event or more"),
        ("\nhello, world\n", 2, "neither a line of Mooncake, Bailian or TraceLab"),
    ],
)
def test_a_malformed_line_is_reported(tmp_path: Path, content: str, line: int, message: str) -> None:
    with pytest.raises(TraceError) as caught:
        read(tmp_path, content)
    assert f"sample.trace:{line}: " in str(caught.value)
    assert message in str(caught.value)


@pytest.mark.parametrize("content", ["", "\n \r\n", HEADER])
def test_rejects_a_file_without_requests(tmp_path: Path, content: str) -> None:
    with pytest.raises(TraceError, match="holds no requests"):
        read(tmp_path, content)


def test_rejects_a_binary_file(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="not a text file"):
        read(tmp_path, b"{\xff\xfe\x00")


def test_a_missing_file_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_trace(tmp_path / "absent")


def test_the_generator_is_seeded() -> None:
    one, same, other = synthetic_trace(500, 7), synthetic_trace(500, 7), synthetic_trace(500, 8)
    for name in ("arrival_s", "input_lens", "output_lens"):
        assert np.array_equal(getattr(one, name), getattr(same, name))
        assert not np.array_equal(getattr(one, name), getattr(other, name))
    assert all(map(np.array_equal, one.blocks, same.blocks))
    assert not all(map(np.array_equal, one.blocks, other.blocks))


def test_generated_prompts_begin_alike() -> None:
    trace = synthetic_trace(500, 7)
    assert [len(blocks) for blocks in trace.blocks] == (-(-trace.input_lens // trace.block_size)).tolist()
    blocks = np.concatenate(trace.blocks)
    assert 0.1 < 1 - len(np.unique(blocks)) / len(blocks) < 0.4


def test_the_generator_resembles_the_azure_trace() -> None:
    trace = synthetic_trace(20_000, 0)
    assert trace.arrival_s[0] == 0.0
    assert (np.diff(trace.arrival_s) >= 0.0).all()
    assert trace.arrival_s[-1] == pytest.approx(20_000 / 5.5, rel=0.05)
    assert trace.input_lens.min() >= 1
    assert trace.output_lens.min() >= 1
    assert trace.input_lens.mean() == pytest.approx(1_150, rel=0.05)
    assert trace.output_lens.mean() == pytest.approx(205, rel=0.05)


@pytest.mark.parametrize(("requests", "seed"), [(0, 0), (-1, 0), (1, -1)])
def test_the_generator_rejects_bad_arguments(requests: int, seed: int) -> None:
    with pytest.raises(TraceError, match="requests >= 1 and seed >= 0"):
        synthetic_trace(requests, seed)
