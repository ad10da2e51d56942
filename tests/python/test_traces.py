"""Readers of the published trace formats, and the generator."""

from __future__ import annotations

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
        (GOOD + "\n[1, 2]\n", 3, "needs an object with timestamp"),
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
        ("\nhello, world\n", 2, "neither a Mooncake line"),
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
