"""`tests/gpu` without a GPU: rows of the board are made, figures become a table, the package is bounded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import zipfile
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import board
import board_peers
import board_rows
import exact
import package
import pytest
import records
import report
import torch
from board_measure import OURS, Board, Side, Target
from steps import FAILED, OK, Result, Step

import kvpool

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[dict[str, Any]]]:
    """The records of one kind that a board writes."""
    path = tmp_path / "told.jsonl"
    monkeypatch.setenv(records.FILE, str(path))
    return lambda kind: [record for record in records.read(path) if record["kind"] == kind]


@pytest.mark.parametrize("group", board_rows.GROUPS)
def test_every_row_can_be_made(
    group: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, told: Callable[[str], list[dict[str, Any]]]
) -> None:
    monkeypatch.setattr(board_peers, "SGLANG", tmp_path / "none")
    board_peers.sglang.cache_clear()
    rows = list(board_rows.GROUPS[group][1](Board(dry=True, quick=False)))
    for _, make in rows:
        make()
    assert 0 < len(rows) <= len(told("made"))
    assert not told("line")
    missing = {record["peer"] for record in told("missing")}
    assert missing == {
        "steps": {"SGLang"},
        "slots": {"SGLang"},
        "indices": {"SGLang"},
        "allocations": {"SGLang"},
        "writes": {"FlashInfer", "vLLM's scheme"},
    }.get(group, set())


def test_different_results_are_not_timed() -> None:
    nothing: list[Any] = [lambda: None]
    with pytest.raises(AssertionError, match="results of other differ from kvpool's"):
        Board(dry=True, quick=False).compare("row", {OURS: nothing, "other": nothing}, same=lambda _: False)


def test_a_wrong_row_of_a_peer_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def put(caches: board_rows.Caches, slots: torch.Tensor, k: torch.Tensor, _v: torch.Tensor) -> None:
        caches[0][slots] = k

    monkeypatch.setattr(board_rows, "put", put)
    _, make = next(iter(board_rows.write_rows(Board(dry=True, quick=False))))
    with pytest.raises(AssertionError, match="results of index_put differ"):
        make()


class FakeEvent:
    """An event of a device that has done everything at once."""

    def __init__(self, **_options: bool) -> None:
        self.seconds = 0.0

    def record(self) -> None:
        self.seconds = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: FakeEvent) -> float:
        return (end.seconds - self.seconds) * 1e3


class FakeStream:
    def wait_stream(self, other: FakeStream) -> None:
        pass

    def synchronize(self) -> None:
        pass


class FakeGraph:
    def replay(self) -> None:
        time.sleep(1e-5)


def replace_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls that the board makes to PyTorch's GPU, without one."""
    for name, fake in {
        "Event": FakeEvent,
        "Stream": FakeStream,
        "CUDAGraph": FakeGraph,
        "current_stream": FakeStream,
        "stream": lambda _: nullcontext(),
        "graph": lambda _graph, stream: nullcontext(stream),
        "synchronize": lambda: None,
        "empty_cache": lambda: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)


@pytest.mark.parametrize("group", board_rows.GROUPS)
def test_every_row_can_be_timed(
    group: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, told: Callable[[str], list[dict[str, Any]]]
) -> None:
    monkeypatch.setattr(board_peers, "SGLANG", tmp_path / "none")
    board_peers.sglang.cache_clear()
    replace_cuda(monkeypatch)
    one = Board(dry=True, quick=True)
    one.dry = False
    for _, make in board_rows.GROUPS[group][1](one):
        make()
    lines = [board.cells(line) for line in told("line")]
    assert bool(lines) == (group != "card")
    assert all(line["ours_us"] > 0 for line in told("line"))
    if group == "card":
        assert set(told("ceilings")[0]) >= {"d2d", "zeros", "h2d", "d2h", "zero_ of 8"}
    if group == "tier":
        assert [(line[0], line[2], line[5]) for line in lines] == [
            ("save of 128 tokens, pages of 16", "the copy engine", "ratio >= 0.93"),
            ("save of 128 tokens, pages of 16, beside a matmul", "limit", "<= 32 us"),
            ("matmul of 8192^3 beside the save of 128 tokens, pages of 16", "alone", "ratio >= 0.95"),
            ("load of 128 tokens, pages of 16", "the copy engine", "ratio >= 0.93"),
            ("load of 128 tokens, pages of 16, beside a matmul", "limit", "<= 32 us"),
            ("matmul of 8192^3 beside the load of 128 tokens, pages of 16", "alone", ""),
            ("save of 128 tokens, pages of 16, time of the host", "limit", "<= 300 us"),
        ]
    if group == "writes":
        assert {(line[2], line[5]) for line in lines if line[0].endswith("device")} == {
            ("index_put", "ratio >= 1.00"),
            ("index_copy_", "ratio >= 1.00"),
        }


def test_a_peer_that_cannot_be_captured_is_named(
    monkeypatch: pytest.MonkeyPatch, told: Callable[[str], list[dict[str, Any]]]
) -> None:
    replace_cuda(monkeypatch)
    one = Board(dry=True, quick=True)
    one.dry = False

    def refuse() -> None:
        raise RuntimeError("not in a capture")

    sides: dict[str, Any] = {OURS: [lambda: None], "other": [lambda: None]}
    monkeypatch.setattr(
        Side, "capture", lambda self: refuse() if self.calls == sides["other"] else capture(self)
    )
    one.compare("row", sides)
    assert [record["why"] for record in told("missing")] == ["RuntimeError: not in a capture"]
    assert {line["peer"] for line in told("line")} == {""}
    sides[OURS] = sides["other"]
    with pytest.raises(RuntimeError, match="not in a capture"):
        one.compare("row", sides)


capture = Side.capture


def test_sizes_of_a_quick_run() -> None:
    assert Board(dry=True, quick=True).sizes(1, 8, 64) == (8,)
    assert Board(dry=True, quick=False).sizes(1, 8, 64) == (1, 8, 64)


def test_targets_are_judged(told: Callable[[str], list[dict[str, Any]]]) -> None:
    times = {OURS: 2.0, "A": 1.99, "B": 1.0}
    targets = [Target("host", least=1.0, peer="A"), Target("host", most_us=1.5), Target("device", least=9.0)]
    one = Board(dry=True, quick=False)
    one.told("both", "host", times, targets, moved=8000)
    one.told("alone", "host", {OURS: 2.0})
    rows = [board.cells(line) for line in told("line")]
    assert rows == [
        ("both", "2.00", "A", "1.99", "0.99", "ratio >= 1.00", "no"),
        ("both", "2.00", "B", "1.00", "0.50", "", ""),
        ("both", "2.00", "limit", "1.50", "0.75", "<= 1.5 us", "no"),
        ("alone", "2.00", "", "", "", "", ""),
    ]
    assert [line["gbs"] for line in told("line")] == [4.0, 4.0, 4.0, None]


def results() -> list[Result]:
    line = {
        "kind": "line",
        "question": "q, host",
        "ours_us": 1234.5,
        "gbs": None,
        "peer": "P",
        "its_us": 2469.0,
    }
    line |= {"ratio": 2.0, "target": "ratio >= 2.00", "met": True}
    missing = {"kind": "missing", "question": "q", "peer": "F", "why": "ImportError: none"}
    failed = {"kind": "failed", "question": "r", "why": "ValueError: 1"}
    step = Step("group", "", ("true",), 1)
    return [
        Result(step, OK, told=[line, missing, {"kind": "ceilings", "d2d": "3,000 GB/s"}]),
        Result(step, FAILED, "exit status 1", told=[failed]),
        Result(step, FAILED, "ended at its limit"),
    ]


def test_a_board_is_collected_from_its_groups() -> None:
    found = board.collect(results())
    assert found["failed"] == ["r: ValueError: 1", "group: failed: ended at its limit"]
    text = board.markdown(found)
    for words in (
        "| q, host | 1,234.50 | P | 2,469.00 | 2.00 | ratio >= 2.00 | yes |",
        "| q |  | F | missing |  |  |  |",
        "- d2d: 3,000 GB/s",
        "- q: F: ImportError: none",
        "- r: ValueError: 1",
    ):
        assert words in text.splitlines(), text


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("", ""),
        ("raise SystemExit(3)", "it could not be compiled, exit status 3"),
        ("import time; time.sleep(60)", "it was not compiled in time"),
    ],
)
def test_rows_are_made_without_a_peer_that_does_not_compile(
    monkeypatch: pytest.MonkeyPatch, code: str, why: str
) -> None:
    monkeypatch.setattr(board, "COMPILE_SECONDS", 1 if "sleep" in code else 60)
    found = board.compiled([sys.executable, "-S", "-c", code], dict(os.environ))
    assert found == ({board_peers.NO_FLASHINFER: why} if why else {})
    if why:
        monkeypatch.setenv(*found.popitem())
        board_peers.flashinfer_page.cache_clear()
        with pytest.raises(RuntimeError, match=why):
            board_peers.flashinfer_page()


@pytest.mark.processes
def test_a_dry_board_writes_its_files(tmp_path: Path) -> None:
    path = os.pathsep.join([str(Path(kvpool.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, ROOT / "tests" / "gpu" / "board.py", "--dry", "--only", "alloc_", "--out", tmp_path],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "board.json").read_text())
    assert [row.split()[0] for row in found["made"]] == ["alloc_extend", "alloc_decode"]
    assert found["machine"]["versions"]
    assert (tmp_path / "board.md").read_text().startswith("## Board")
    assert "row | ours | peer | its | ratio | target | met" in done.stdout.splitlines()


def test_conversions_are_exact(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["exact.py", "--dry"])
    assert exact.main() == 0
    printed = capsys.readouterr().out
    assert "every float32 to torch.float8_e5m2: 1,048,576 values" in printed
    assert "rows beyond 2^31 elements: 77 rows" in printed


def test_a_wrong_conversion_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["exact.py", "--dry"])
    monkeypatch.setattr(exact, "nearest", lambda x, dtype: (x.float() * 2).to(dtype))
    assert exact.main() == 1
    assert "FAILED: " in capsys.readouterr().out


def test_a_wrong_row_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvpool.KVPool, "move_kv", lambda *_: None)
    with pytest.raises(exact.DifferentError, match=r"K moved, torch.int32: rows \["):
        exact.Exact(dry=True).big_pool()


def wheel(path: Path, **files: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as packed:
        for name, text in files.items():
            packed.writestr(name, text)
    return path


def test_wheels_are_unpacked_once(tmp_path: Path) -> None:
    base = tmp_path / "base"
    assert package.unpack(tmp_path / "empty", base) == ([], [])
    files = {"some/__init__.py": "", "some-1.data/scripts/tool": "#!/bin/sh\n"}
    wheel(tmp_path / ".gpu" / "wheels" / "some-1-py3-none-any.whl", **files)
    (folder,), (programs,) = package.unpack(tmp_path / ".gpu", base)
    assert (folder / "some" / "__init__.py").exists()
    assert os.access(programs / "tool", os.X_OK)
    (folder / "mark").touch()
    assert package.unpack(tmp_path / ".gpu", base) == ([folder], [programs])
    assert (folder / "mark").exists()
    wheel(tmp_path / ".gpu" / "wheels" / "some-1-py3-none-any.whl", **files, more="more")
    (other,), _ = package.unpack(tmp_path / ".gpu", base)
    assert other != folder
    assert sorted(base.iterdir()) == sorted([folder, other])


def test_a_package_that_is_too_large_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sglang = wheel(tmp_path / "sglang.whl", **dict.fromkeys([*package.SGLANG, "sglang/other.py"], "x"))
    folder = tmp_path / ".gpu"
    folder.mkdir()
    monkeypatch.setattr(sys, "argv", ["package.py", str(folder), str(sglang)])
    assert package.main() == 0
    assert package.bytes_below(folder) == len(package.SGLANG)
    assert not (folder / "peers" / "sglang" / "other.py").exists()
    assert ": peers 0.0, tracked files " in capsys.readouterr().out
    with (folder / "large").open("wb") as file:
        file.truncate(package.MOST_BYTES)
    assert package.main() == 1
    error = capsys.readouterr().err
    assert error.startswith("the package is too large: ")
    assert "large 60.0" in error


def test_a_report_has_what_was_exact() -> None:
    told = [{"kind": "exact", "what": "every float32", "told": "7 values"}]
    text = report.markdown([Result(Step("exactness", "", ("true",), 1), OK, told=told)], {}, [])
    assert "- every float32: 7 values" in text.splitlines()
