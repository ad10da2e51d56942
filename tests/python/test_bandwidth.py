"""`kvpool doctor --bandwidth`: what is measured, what is reported of failures, and the file."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import multiprocessing
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import command_line
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_nixl import environment

import kvpool
from kvpool.errors import ConfigError
from kvpool.tools import bandwidths
from kvpool.tools.bandwidths import Bandwidth, as_json, read_bandwidths
from kvpool.tools.cli import main
from kvpool.tools.doctor import bandwidth as tool
from kvpool.tools.doctor import command, driver, loopback, measure
from kvpool.tools.doctor.bandwidth import measure_machine
from kvpool.tools.doctor.measure import Job, MeasureError
from kvpool.tools.doctor.process import ProcessError, answer
from kvpool.tools.units import bandwidth_text, parse_bandwidth

KIB, MIB = 1 << 10, 1 << 20


def job(kind: str, **others: Any) -> Job:  # noqa: ANN401 - of `Job`
    return Job(kind, 64 * KIB, 1e-6, **others)


def by_name(lines: list[Bandwidth]) -> dict[str, Bandwidth]:
    return {line.name: line for line in lines}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("100Gbit/s", 12.5e9),
        ("400 gbit/s", 50e9),
        ("8bit/s", 1.0),
        ("50GB/s", 50e9),
        ("1.5 GiB/s", 1.5 * (1 << 30)),
        (" 2B/s ", 2.0),
    ],
)
def test_bandwidths_are_read_in_every_unit(text: str, expected: float) -> None:
    assert parse_bandwidth(text) == expected


@pytest.mark.parametrize(
    "text", ["", "5", "5/s", "5GB", "5Gb/s", "0GB/s", "-1GB/s", "GB/s", "1XB/s", "1GB/h"]
)
def test_refuses_what_is_no_bandwidth(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a bandwidth: give 400Gbit/s"):
        parse_bandwidth(text)


@pytest.mark.parametrize(
    ("speed", "text"),
    [
        (12.5e9, "12.5 GB/s (100 Gbit/s)"),
        (684_321_000, "684 MB/s (5.47 Gbit/s)"),
        (3.35e12, "3.35 TB/s (26.8 Tbit/s)"),
        (0.5, "0.5 B/s (4 bit/s)"),
    ],
)
def test_bandwidths_are_shown_in_bytes_and_bits(speed: float, text: str) -> None:
    assert bandwidth_text(speed) == text


LINES = [
    Bandwidth("host.copy", "64 MiB within host memory", 1e10, 64 * MIB, 50),
    Bandwidth("cuda", "", problem="no GPU: kvpool doctor says more"),
]


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "measured.json"
    path.write_text(json.dumps(as_json(LINES)))
    assert read_bandwidths(path) == LINES


def changed(**values: object) -> str:
    found = as_json(LINES)
    found["lines"][1].update(values)
    return json.dumps(found)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not a JSON file: "),
        ("[" * 100_000, "is not a JSON file: "),
        ("[]", "was not written by kvpool doctor --bandwidth --json"),
        ('{"findings": []}', "was not written by kvpool doctor --bandwidth --json"),
        ('{"kvpool_bandwidths": 2}', "has version 2 of its format; this is for version 1"),
        ('{"kvpool_bandwidths": true}', "has version True of its format"),
        ('{"kvpool_bandwidths": 1, "lines": {}}', "has no list of lines"),
        ('{"kvpool_bandwidths": 1, "lines": [3]}', "line 1 has to be an object with bytes_per_s, name, "),
        ('{"kvpool_bandwidths": 1, "lines": [{"name": "x"}]}', "line 1 has to be an object with"),
        (changed(more=1), "line 2 has to be an object with"),
        (changed(name=3), "line 2 has name 3"),
        (changed(text="a\nb"), r"line 2 has text 'a\nb'"),
        (changed(problem=None), "line 2 has problem None"),
        (changed(bytes_per_s=0), "line 2 has bytes_per_s 0"),
        (changed(bytes_per_s=True), "line 2 has bytes_per_s True"),
        (changed(bytes_per_s=float("inf")), "line 2 has bytes_per_s inf"),
        (changed(bytes_per_s=float("nan")), "line 2 has bytes_per_s nan"),
        (changed(bytes_per_s="9"), "line 2 has bytes_per_s '9'"),
        (changed(size_bytes=-1), "line 2 has size_bytes -1"),
        (changed(repetitions=1.5), "line 2 has repetitions 1.5"),
    ],
)
def test_other_files_are_refused_with_the_place(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "measured.json"
    path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        read_bandwidths(path)
    assert str(caught.value).startswith(f"{path}")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=8), inner, max_size=2),
    max_leaves=4,
)


@given(value=json_values, key=st.sampled_from(["lines", "kvpool_bandwidths", *as_json(LINES)["lines"][0]]))
def test_any_value_is_read_or_refused(
    value: object, key: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    found = as_json(LINES)
    where = found if key in found else found["lines"][1]
    where[key] = value
    path = tmp_path_factory.getbasetemp() / "any.json"
    path.write_text(json.dumps(found))
    try:
        lines = read_bandwidths(path)
    except ConfigError as error:
        assert str(error).isprintable()  # noqa: PT017 - there may be none
    else:
        assert json.loads(json.dumps(as_json(lines))) == json.loads(path.read_text())


def test_host_memory_and_a_folder_are_measured(tmp_path: Path) -> None:
    lines = [*measure.measure(job("host")), *measure.measure(job("directory", directory=str(tmp_path)))]
    assert [line.name for line in lines] == ["host.copy", "directory.write", "directory.read"]
    for line in lines:
        assert line.problem == ""
        assert line.bytes_per_s is not None
        assert line.bytes_per_s > 0
        assert (line.size_bytes, line.repetitions) == (64 * KIB, measure.LEAST_REPETITIONS)
    assert lines[2].text.startswith("64 KiB in pages of 64 KiB, ")
    assert not list(tmp_path.iterdir())


def test_the_median_of_the_time_that_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]

    def now() -> float:
        return clock[0]

    moves: list[float] = []

    def move() -> None:
        moves.append(clock[0])
        clock[0] += len(moves)

    monkeypatch.setattr(measure, "perf_counter", now)
    line = Job("host", 120, 10.0).line("copy", "there", move)
    # Moves of 1 s (not counted), 2, 3, 4 and 5 s: the fourth begins 9 s after the first counted one.
    assert (line.repetitions, line.bytes_per_s) == (4, 120 / 3.5)
    assert line.text == "120 B there"


def test_a_folder_that_cannot_be_used_is_a_line(tmp_path: Path) -> None:
    (line,) = measure.measure(job("directory", directory=str(tmp_path / "none")))
    assert (line.name, line.bytes_per_s) == ("directory", None)
    assert line.problem.startswith("FileNotFoundError: ")


def test_measurements_before_a_failure_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    check = measure._all_of

    def failing(store: Any, count: int, what: str, transfer: Any) -> None:  # noqa: ANN401 - of the store
        done.append(what)
        found = SimpleNamespace(wait=transfer.wait, leading=0) if what == "read" else transfer
        check(store, count, what, found)

    monkeypatch.setattr(measure, "_all_of", failing)
    lines = measure.measure(job("directory", directory=str(tmp_path)))
    assert [line.name for line in lines] == ["directory.write", "directory"]
    assert lines[1].problem == "MeasureError: 0 of 1 pages were read, with 0 errors"
    assert done == ["written"] * 4 + ["read"]


def test_a_disk_behind_the_system_s_cache_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kvpool, "FileStore", partial(kvpool.FileStore, direct=False))
    lines = measure.measure(job("directory", directory=str(tmp_path)))
    assert all("through the system's cache" in line.text for line in lines)


def test_memory_that_cannot_be_page_locked_is_not_measured_as_if(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = SimpleNamespace(
        wait_page_locked=lambda: True, stats=lambda: {"page_locked": 0}, allocate_batch=lambda _: []
    )
    monkeypatch.setattr(kvpool, "ChunkPool", lambda *_: pool)
    with pytest.raises(MeasureError, match="64 KiB of host memory could not be page-locked"):
        measure._chunks(1, job("cuda"), "cpu", pin_memory=True)


@pytest.mark.cuda
def test_every_gpu_is_measured() -> None:
    _, count = driver.examine(Path("/"))
    lines = tool._lines(job("cuda", devices=count))
    beyond = [f"cuda:0.to_cuda:{number}" for number in range(1, count)]
    assert [line.name for line in lines] == ["cuda:0.copy", "cuda:0.from_host", "cuda:0.to_host", *beyond]
    for line in lines:
        assert line.problem == ""
        assert line.bytes_per_s is not None
    (line,) = tool._lines(job("cuda", device=99, devices=100))
    assert line.name == "cuda:99"
    assert "BackendUnavailableError: device cuda:99 cannot be used" in line.problem


def test_peer_access_is_used_where_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    class Peers:
        """A driver that can do everything."""

        def __init__(self, _: object) -> None:
            pass

        def call(self, name: str, *_: object) -> None:
            calls.append(name)

    monkeypatch.setattr(measure, "Driver", Peers)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: None)
    copier = measure._Copier(0, 1)
    assert copier.way == "with peer access"
    copier.copy(1, 2, 3)
    assert calls[-3:] == ["cuCtxEnablePeerAccess", "cuMemcpyAsync", "cuCtxSynchronize"]


def test_nixl_that_is_not_installed_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    (line,) = tool._lines(job("nixl"))
    assert line == Bandwidth("nixl", "", problem="nixl is not installed: pip install 'kvpool[nixl]'")
    monkeypatch.setitem(sys.modules, "nixl", None)
    (line,) = measure.measure(job("nixl"))
    assert line.problem.startswith("ConfigError: NIXL cannot be imported")


def test_a_process_that_ends_early_or_does_not_answer_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def crashed(*_: str, seconds: float) -> Any:  # noqa: ANN401 - JSON
        raise ProcessError(f"it took longer than {seconds:g} s")

    monkeypatch.setattr(tool, "answer", crashed)
    assert tool._lines(job("host")) == [Bandwidth("host", "", problem="it took longer than 120 s")]
    with pytest.raises(ProcessError, match=r"it could not be tried: .*timed out"):
        answer("kvpool.tools.doctor.measure", "{}", seconds=1e-6)
    with pytest.raises(ProcessError, match=r"the trial ended with status 1: .*JSONDecodeError"):
        answer("kvpool.tools.doctor.measure", "{", seconds=60)


def test_every_kind_moves_whole_pages() -> None:
    assert tool.LEAST_SIZE % measure.PAGE_BYTES == 0
    assert tool.LEAST_SIZE % (loopback.PAGE * loopback.TOKEN_BYTES) == 0


def test_slots_are_scattered_and_differ() -> None:
    for page in (1, 16):
        slots = loopback.slots_of(64, page, 1)
        assert len({*slots}) == len(slots) == 64
        assert min(slots) >= page
        assert max(slots) < 128
        assert all(slots[at] == slots[at - at % page] + at % page for at in range(64))
        assert slots != sorted(slots)


def test_a_process_that_lends_nothing_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = multiprocessing.Pipe()
    monkeypatch.setattr(loopback, "_PATIENCE_S", 0.001)
    with pytest.raises(TimeoutError, match="the other process has not answered for 0 s"):
        loopback._receive(ours)
    theirs.close()
    with pytest.raises(EOFError, match="the other process ended"):
        loopback._receive(ours)


@pytest.mark.engines
def test_the_whole_machine_is_measured_from_the_command_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "kvpool", "doctor", "--bandwidth", "--json", "--size", "1.9MiB"),
            *("--seconds", "1e-6", "--directory", str(tmp_path)),
        ],
        env={name: value for name, value in environment().items() if name != "NIXL_LOG_LEVEL"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    path = tmp_path / "measured.json"
    path.write_text(done.stdout)
    lines = by_name(read_bandwidths(path))
    assert {"host.copy", "directory.write", "directory.read"} <= {*lines}
    assert {line.size_bytes for line in lines.values() if not line.problem} == {MIB}
    if "nixl" in lines and not os.environ.get("KVPOOL_REQUIRE_ENGINES"):
        pytest.skip(lines["nixl"].problem)
    for name in ("nixl.contiguous", "nixl.pages", "nixl.scattered"):
        speed = lines[name].bytes_per_s
        assert speed is not None
        assert speed > 0


def invoke(*arguments: str) -> command_line.Result:
    return command_line.invoke(main, ["doctor", "--bandwidth", *arguments])


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Bandwidth]:
    """The bandwidths of a machine in a test; nothing is measured."""
    lines = list(LINES)
    monkeypatch.setattr(driver, "examine", lambda _: ([], 0))

    def lines_of(one: Job) -> list[Bandwidth]:
        return [line for line in lines if line.name.startswith(one.kind)]

    monkeypatch.setattr(tool, "_lines", lines_of)
    return lines


def test_the_command_prints_a_table_or_the_file(measured: list[Bandwidth], tmp_path: Path) -> None:
    result = invoke("--size", "64MiB", "--seconds", "0.5", "--directory", str(tmp_path))
    assert (result.exit_code, result.stderr) == (0, "")
    text = " ".join(result.stdout.split())
    for part in ("host.copy", "10 GB/s (80 Gbit/s)", "64 MiB within host memory, 50", "no GPU"):
        assert part in text
    found = invoke("--json")
    assert json.loads(found.stdout) == as_json(measured)
    assert json.loads(found.stdout)["kvpool_bandwidths"] == bandwidths.VERSION


def test_kinds_are_named_as_they_begin(measured: list[Bandwidth], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "examine", lambda _: ([], 2))
    names: list[str] = []
    assert measure_machine(on_kind=names.append)[0] == measured[0]
    assert names == ["host", "cuda:0", "cuda:1", "directory", "nixl"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--require", "cuda"), "--bandwidth measures, and --require checks: give one of them"),
        (("--size", "many"), "'many' is not a size"),
        (("--size", "1KiB"), "--size is 1,024 bytes; it must be between 1,048,576 and 1,073,741,824"),
        (("--size", "2GiB"), "--size is 2,147,483,648 bytes"),
        (("--seconds", "0"), "--seconds is 0; it must be more than 0, and at most 60"),
        (("--seconds", "61"), "--seconds is 61"),
        (("--directory", "/nowhere"), "--directory: /nowhere is not a folder"),
    ],
)
@pytest.mark.usefixtures("measured")
def test_wrong_options_are_one_line(arguments: tuple[str, ...], message: str) -> None:
    result = invoke(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"kvpool: {message}")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("option", [("--size", "1MiB"), ("--seconds", "1"), ("--directory", "/")])
def test_options_of_the_measurement_need_it(option: tuple[str, str]) -> None:
    result = command_line.invoke(main, ["doctor", *option])
    assert (result.exit_code, result.stderr) == (2, f"kvpool: {option[0]} is for --bandwidth\n")


def test_a_machine_on_which_nothing_moves_is_an_error(
    measured: list[Bandwidth], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "measure_machine", lambda *_: measured[1:])
    result = invoke("--json")
    assert (result.exit_code, result.stderr) == (1, "kvpool: nothing could be measured\n")
    assert json.loads(result.stdout)["lines"][0]["problem"] == measured[1].problem


def test_without_the_library_of_tables_it_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    result = invoke()
    said = "kvpool: doctor --bandwidth needs rich: pip install 'kvpool[tools]'\n"
    assert (result.exit_code, result.stdout, result.stderr) == (1, "", said)
