"""Malformed trace files: arbitrary bytes, and valid files with mutations."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from trace_checks import AZURE, BAILIAN, MOONCAKE, TRACELAB, check_content

from kvpool.tools.traces import TraceError, read_trace

FOLDER = Path(__file__).parent.parent / "fuzz"
KEPT = sorted(FOLDER.glob("corpus/trace_readers/*")) + sorted(FOLDER.glob("findings/trace_readers/*"))

any_path = settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
pieces = st.sampled_from(
    [b"\n", b"\r", b",", b'"', b"{", b"}", b"[", b"-", b".5", b"e9", b"NaN", b"\xff", b"\x00"]
)
changes = st.lists(
    st.tuples(st.integers(0, 400), st.integers(0, 12), st.one_of(pieces, st.binary(max_size=6))), max_size=4
)


@any_path
@given(content=st.binary(max_size=400))
def test_any_bytes_are_a_trace_or_an_error(tmp_path: Path, content: bytes) -> None:
    check_content(tmp_path / "sample.trace", content)


@any_path
@given(content=st.sampled_from([MOONCAKE, AZURE, BAILIAN, TRACELAB]), changes=changes)
def test_a_mutated_trace_is_a_trace_or_an_error(
    tmp_path: Path, content: bytes, changes: list[tuple[int, int, bytes]]
) -> None:
    for at, gone, new in changes:
        start = at % (len(content) + 1)
        content = content[:start] + new + content[start + gone :]
    check_content(tmp_path / "sample.trace", content)


@any_path
@example(rows=[(9e14, 1, 0)])
@given(
    rows=st.lists(
        st.tuples(
            st.one_of(st.integers(0, 9 * 10**14), st.floats(0, 9e14)),
            st.integers(1, 2**31 - 1),
            st.integers(0, 2**31 - 1),
        ),
        min_size=1,
        max_size=8,
    )
)
def test_every_mooncake_request_is_read(tmp_path: Path, rows: list[tuple[float, int, int]]) -> None:
    lines = [
        f'{{"timestamp": {row[0]}, "input_length": {row[1]}, "output_length": {row[2]}}}' for row in rows
    ]
    trace = check_content(tmp_path / "sample.trace", "\n".join(lines).encode())
    assert trace is not None
    assert sorted(trace.input_lens.tolist()) == sorted(row[1] for row in rows)
    assert trace.arrival_s[-1] == pytest.approx((max(rows)[0] - min(rows)[0]) / 1000, rel=1e-9, abs=1e-3)


@pytest.mark.parametrize("path", KEPT, ids=lambda path: f"{path.parent.name}-{path.name[:12]}")
def test_fuzzer_findings_are_a_trace_or_an_error(tmp_path: Path, path: Path) -> None:
    check_content(tmp_path / "sample.trace", path.read_bytes())


@pytest.mark.parametrize(
    "content", [MOONCAKE.replace(b"1000.5", b"999999999999999"), b'{"a":' + b"[" * 100_000]
)
def test_rejects_impossible_values(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "sample.trace"
    path.write_bytes(content)
    with pytest.raises(TraceError):
        read_trace(path)


def test_seeds_of_the_fuzzer_are_there() -> None:
    assert KEPT
