"""`tests/gpu/run.py` with steps that need no GPU: statuses and reports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import records
import report
import run
from steps import FAILED, NOT_RUN, OK, SKIPPED, Result, Step

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parents[2]
ABOUT = {"date": "2026-11-22", "commit": "abc"}
ENV = {**os.environ, "PYTHONPATH": str(ROOT / "tests" / "gpu")}


def python(name: str, code: str, limit: float = 20, **options: Any) -> Step:  # noqa: ANN401 - a step's fields
    return Step(name, f"what {name} settles", (sys.executable, "-S", "-c", code), limit, **options)


def ran(steps: list[Step], out: Path, seconds: float = 60) -> tuple[int, dict[str, Any], str]:
    """The exit status, the steps of the JSON report by name, and the Markdown report."""
    status = run.run_steps(steps, out, ENV, seconds, ABOUT)
    found = json.loads((out / "report.json").read_text())
    assert found["about"] == ABOUT
    return status, {step["name"]: step for step in found["steps"]}, (out / "report.md").read_text()


def run_until_ended(code: str, out: Path, is_there: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """A step that hangs, and was ended after it had got somewhere, which takes a busy machine longer."""
    for limit in (0.5, 3, 20):
        _, found, _ = ran([python("hanging", code, limit)], out)
        if is_there(found["hanging"]):
            break
    step: dict[str, Any] = found["hanging"]
    return step


def test_every_status_has_its_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = [
        python("fine", "print('all | well')"),
        python("failing", "print('begin'); print('boom'); raise SystemExit(3)"),
        python("dying", "import os; os.kill(os.getpid(), 9)"),
        python("hanging", "import time; time.sleep(60)", 0.5),
        Step("missing", "nothing", ("no-such-tool", "--version"), 5),
        python(
            "unable", "print('== Device not supported: 1'); raise SystemExit(1)", refused="Device not s.*"
        ),
        python("left out", "", skip="it needs a clock"),
    ]
    status, found, text = ran(steps, tmp_path)
    assert status == 1
    assert {name: step["status"] for name, step in found.items()} == {
        "fine": OK,
        "failing": FAILED,
        "dying": FAILED,
        "hanging": FAILED,
        "missing": SKIPPED,
        "unable": SKIPPED,
        "left out": SKIPPED,
    }
    reasons = {name: step["reason"] for name, step in found.items()}
    assert reasons["failing"] == "exit status 3; last line: boom"
    assert reasons["dying"] == "signal 9; last line: (it printed nothing)"
    assert reasons["hanging"] == "ended at its limit of 0 s; last line: (it printed nothing)"
    assert reasons["missing"] == "there is no no-such-tool on this machine"
    assert reasons["unable"].endswith("cannot work here: Device not supported: 1")
    assert found["hanging"]["seconds"] < 60
    verdict = "7 steps: 1 ok, 3 failed, 3 skipped. **Failed: failing, dying, hanging.**"
    assert verdict in text
    assert verdict in capsys.readouterr().out
    assert "| failing | **FAILED** |" in text
    assert "### failing" in text
    assert "begin\nboom\n```" in text
    assert "all | well" in (tmp_path / "steps.log").read_text()


def test_children_of_a_hanging_step_end_with_it(tmp_path: Path) -> None:
    code = "import subprocess as s; p = s.Popen(['sleep', '60']); print(p.pid, flush=True); p.wait()"
    reason = run_until_ended(code, tmp_path, lambda step: step["reason"].split()[-1].isdigit())["reason"]
    child = Path("/proc") / str(int(reason.split()[-1])) / "stat"
    deadline = time.monotonic() + 30  # it would go on for longer
    while child.exists() and child.read_text().split()[2] != "Z":
        assert time.monotonic() < deadline, "the child is still there"
        time.sleep(0.05)


def test_the_last_line_of_a_hanging_step_is_told(tmp_path: Path) -> None:
    code = "print('begins'); print('waits', flush=True); import time; time.sleep(60)"
    reason = run_until_ended(code, tmp_path, lambda step: "printed nothing" not in step["reason"])["reason"]
    assert reason.startswith("ended at its limit of ")
    assert reason.endswith(" s; last line: waits")


def test_steps_without_time_left_are_named(tmp_path: Path) -> None:
    steps = [
        python("long", "import time; time.sleep(60)", 30, least=0.1),
        python("next", "", 30),
        python("short", "", 0.1, least=5),
    ]
    status, found, text = ran(steps, tmp_path, seconds=1.4)
    assert status == 1
    assert found["long"]["reason"].startswith("ended at its limit of 1 s")
    assert [found[name]["status"] for name in ("next", "short")] == [NOT_RUN, NOT_RUN]
    assert found["next"]["reason"] == "0 s of 1 were left"
    assert "| next | not run | 0.0 |" in text


def test_nothing_runs_after_a_failed_vital_step(tmp_path: Path) -> None:
    status, found, _ = ran(
        [python("gpu", "raise SystemExit(1)", is_vital=True), python("next", "")], tmp_path
    )
    assert (status, found["next"]["status"], found["next"]["reason"]) == (1, NOT_RUN, "'gpu' failed")


def test_success_replaces_old_reports(tmp_path: Path) -> None:
    for name in ("bench.md", "steps.log"):
        (tmp_path / name).write_text("old")
    status, found, text = ran([python("fine", ""), Step("missing", "", ("no-such-tool",), 5)], tmp_path)
    assert (status, len(found)) == (0, 2)
    assert "old" not in text + (tmp_path / "steps.log").read_text()
    assert "Failed" not in text


def test_the_report_grows_with_each_step(tmp_path: Path) -> None:
    code = f"print('steps in the report:', open({str(tmp_path / 'report.md')!r}).read().count('| ok |'))"
    ran([python("fine", ""), python("next", code)], tmp_path)
    assert "steps in the report: 1" in (tmp_path / "steps.log").read_text()


def test_output_of_a_step_is_kept_up_to_its_end(tmp_path: Path) -> None:
    code = "import records; records.add('note', name='A.b'); import time; time.sleep(60)"
    found = run_until_ended(code, tmp_path, lambda step: bool(step["told"]))
    assert found["told"] == [{"kind": "note", "name": "A.b"}]


def test_missing_imports_are_not_failures(tmp_path: Path) -> None:
    missing, passed, failed = outcome("a.py", "missing"), outcome("b", "passed"), outcome("c", "failed")
    for told, excuse in (
        (
            [{"kind": "collected", "count": 1}, passed, missing],
            "1 file not read, as what they import is not there",
        ),
        ([{"kind": "collected", "count": 1}, passed], ""),
        ([{"kind": "collected", "count": 2}, passed, missing], ""),
        ([{"kind": "collected", "count": 2}, passed, failed, missing], ""),
    ):
        assert run.only_missing(told) == excuse
    steps = [
        python("excused", "raise SystemExit(1)", excuse=lambda _: "not read"),
        python("hanging", "import time; time.sleep(60)", 0.3, excuse=lambda _: "not read"),
        python("fine", "", excuse=lambda _: "not read"),
    ]
    _, found, _ = ran(steps, tmp_path)
    assert [(step["status"], step["reason"][:9]) for step in found.values()] == [
        (OK, "not read"),
        (FAILED, "ended at "),
        (OK, ""),
    ]


def test_a_broken_section_does_not_affect_others() -> None:
    told: list[dict[str, Any]] = [
        {"kind": "capture", "name": "KVPool.check"},
        {"kind": "collected", "count": 3},
    ]
    text = report.markdown([Result(Step("odd", "", ("true",), 1), OK, told=told)], ABOUT, [])
    assert "could not be made of what was told (`report.json`): KeyError('ok')" in text
    assert "| odd | 3 | 0 | 0 | 0 | 3 |" in text


def test_an_unfinished_line_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "told.jsonl"
    assert records.read(path) == []
    monkeypatch.setenv(records.FILE, str(path))
    records.add("speed", what="x")
    with path.open("a") as file:
        file.write('{"kind": "spe')
    assert records.read(path) == [{"kind": "speed", "what": "x"}]
    monkeypatch.delenv(records.FILE)
    records.add("speed")
    assert len(records.read(path)) == 1


NCU = """==PROF== Connected to process 7
"ID","Process ID","Kernel Name","Grid Size","Metric Name","Metric Unit","Metric Value"
"0","7","kvpool_set_rows(long)","(8, 1, 1)","gpu__time_duration.sum","us","12.5"
"0","7","kvpool_set_rows(long)","(8, 1, 1)","dram__throughput.avg.pct_of_peak_sustained_elapsed","%","81.20"
"1","7","kvpool_gather","(9, 1, 1)","gpu__time_duration.sum","us","3"
==PROF== Disconnected
"""


def capture(name: str, case: str, call: str, *, survived: bool = True) -> dict[str, Any]:
    end = "survived" if survived else "spoilt"
    fields = {"name": name, "case": case, "capture": end, "call": call, "detail": "", "ok": survived}
    return {"kind": "capture", **fields}


def outcome(name: str, word: str, reason: str = "") -> dict[str, Any]:
    return {"kind": "test", "name": name, "outcome": word, "seconds": 0.1, "reason": reason}


def test_the_report_lists_the_findings(tmp_path: Path) -> None:
    told: dict[str, list[dict[str, Any]]] = {
        "environment": [{"kind": "machine", "device": "H100", "driver": "580"}],
        "captures": [
            capture("KVPool.check", "own", "refused"),
            capture("KVPool.check", "a known stream's", "worked", survived=False),
            {"kind": "captures", "right": 1, "wrong": 1, "left": 7},
            {"kind": "read", "name": "set_kv_buffer", "case": "read", "wrong": 0, "of": 20, "ok": True},
        ],
        "first pool": [
            {"kind": "first pool", "kernels": "ptx", "cache": "disabled"}
            | {"context": 1, "first": 0.9, "second": 0.001}
        ],
        "images": [{"kind": "images", "kernels": "ptx", "checks": 42, "wrong": ["moved K: 3 of 9 bytes"]}],
        "tests": [
            {"kind": "collected", "count": 5},
            *({"kind": "begins", "name": f"test_{name}"} for name in ("a", "b", "c", "hangs")),
            outcome("test_a", "passed"),
            outcome("test_b", "failed", "AssertionError: 1 != 2"),
            outcome("test_b", "failed", "worker 'gw0' crashed"),
            outcome("test_c", "skipped", "it needs two GPUs"),
            outcome("test_d.py", "missing", "ModuleNotFoundError: No module named 'transformers'"),
        ],
        "speed": [
            *[
                {
                    "kind": "speed",
                    "what": "set_kv_buffer",
                    "us": 10.0,
                    "host_us": 2.0,
                    "moved": 1,
                    "gbs": 1234.5,
                }
            ],
            {"kind": "speed", "what": "alloc", "us": 1.0, "host_us": 1.0, "moved": 0, "gbs": None}
            | {"alternative": "PyTorch", "its_us": 4.0, "ratio": 4.0},
        ],
    }
    output = {
        "probe": "driver 13.0\nok      this: 0\nDIFFERS that: 1  (expected 0: cuda.h)\n",
        "memcheck": "========= Invalid __global__ read of size 4\n========= ERROR SUMMARY: 1 error\n",
        "ncu": NCU,
    }
    results = [
        Result(Step(name, "", ("true",), 1), OK, output=output.get(name, ""), told=told.get(name, ()))
        for name in {**told, **output}
    ]
    bench = tmp_path / "bench.md"
    bench.write_text("## GPU\n\n| question |\n")
    text = report.markdown(results, ABOUT, [bench, tmp_path / "none.md"])
    for line in (
        "- commit: abc",
        "- device: H100",
        "1 answers are as documented, 1 differ.",
        "- that: 1  (expected 0: cuda.h)",
        "- 1 right, 1 wrong, 7 not tried for lack of time",
        "- slots read on a second stream by set_kv_buffer: 0 of 20 wrong",
        "| KVPool.check | a known stream's | spoilt | worked |  |",
        "| KVPool.check | refused | **SPOILT**: worked |",
        "| ptx | disabled | 1.000 | 0.9000 | 0.0010 |",
        "Kernels ptx: 1 of 42 results differ.",
        "- moved K: 3 of 9 bytes",
        "| tests | 5 | 1 | 1 | 1 | 2 |",
        "- `test_b`: AssertionError: 1 != 2",
        "- `test_hangs`: it never ended",
        "- `test_d.py`: ModuleNotFoundError: No module named 'transformers'",
        "- 1: it needs two GPUs",
        "date: 2026-11-22; device: H100; driver: 580",
        "| set_kv_buffer | 10.00 | 1,234 | 2.00 |  |  |  |",
        "| alloc | 1.00 |  | 1.00 | PyTorch | 4.00 | 4.00 |",
        "- 1 times: ERROR SUMMARY: 1 error",
        "| kvpool_set_rows(long) | (8, 1, 1) | 12.5 us | 81.20 |  |",
        "| kvpool_gather | (9, 1, 1) | 3 us |  |  |",
        "| question |",
    ):
        assert line in text.splitlines(), f"{line}\n\n{text}"
    assert "crashed" not in text


TESTS = """
import pytest

@pytest.mark.parametrize("value", [1, 2])
def test_value(value):
    assert value == 1

@pytest.mark.skip(reason="no device")
def test_skipped():
    pass
"""


def test_the_plugin_reports_each_test(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "test_other.py").write_text("import a_module_that_nobody_has\n")
    told = tmp_path / "told.jsonl"
    options = ("-p", "outcomes", "-p", "no:cacheprovider", "-q", "--continue-on-collection-errors")
    subprocess.run(
        [sys.executable, "-m", "pytest", *options, "-c", os.devnull, "--rootdir", tmp_path, tmp_path],
        env={**ENV, records.FILE: str(told), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        timeout=60,
        check=False,
    )
    found = records.read(told)
    outcomes = {
        record["name"]: (record["outcome"], record["reason"]) for record in found if "outcome" in record
    }
    assert outcomes == {
        "test_other.py": ("missing", "ModuleNotFoundError: No module named 'a_module_that_nobody_has'"),
        "test_some.py::test_value[1]": ("passed", ""),
        "test_some.py::test_value[2]": ("failed", "assert 2 == 1"),
        "test_some.py::test_skipped": ("skipped", "Skipped: no device"),
    }
    assert [record["count"] for record in found if record["kind"] == "collected"] == [3]
    assert [record["name"] for record in found if record["kind"] == "begins"] == list(outcomes)[1:]


@pytest.mark.parametrize("is_software", [False, True])
def test_all_steps_are_listed(tmp_path: Path, *, is_software: bool) -> None:
    steps = run.make_steps(tmp_path, is_software=is_software, has_xdist=True)
    names = [step.name for step in steps]
    assert len(set(names)) == len(names) > 10
    assert [step.name for step in steps if step.skip] == (
        ["memcheck", "speed", "ncu", "benchmark"] if is_software else []
    )
    for step in steps:
        for word in step.command:
            if word.endswith(".py") and "=" not in word:
                assert (ROOT / word).exists(), word


def test_plans_part_the_steps(tmp_path: Path) -> None:
    steps = run.make_steps(tmp_path, is_software=False, has_xdist=True)
    plans = {plan: [step.name for step in run.steps_of(plan, steps)] for plan in run.PLANS}
    assert plans["all"] == [step.name for step in steps]
    assert plans["speed"] == ["environment", "board"]
    truth = [
        "environment",
        "probe",
        "captures",
        "tests with PyTorch",
        "images",
        "images, PTX",
        "exactness",
        "all other tests",
        "memcheck",
    ]
    assert [name for name in plans["truth"] if not name.startswith("first pool")] == truth
    assert {*run.LATER, *run.SPEED} <= {*plans["all"], "speed, once"}
    marks = {
        step.name: step.command[step.command.index("-m", 3) + 1] for step in steps if "pytest" in step.command
    }
    assert marks == {
        "tests with PyTorch": "cuda",
        "all other tests": "cuda and not processes",
        "tests with processes": "cuda and processes",
        "tests with models": "cuda",
    }
    words = {step.name: step.command for step in steps if step.name in marks}
    for name in run.WITH_MODELS:
        assert name in words["tests with models"]
        for others in ("all other tests", "tests with processes"):
            assert f"--ignore={name}" in words[others]


def test_programs_of_the_package_come_after_the_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin")
    monkeypatch.setenv("PYTHONPATH", "/mine")
    env = run.environment(["/kvpool", "/wheels"], ["/programs"], None)
    assert env["PATH"].split(os.pathsep) == ["/usr/bin", "/programs"]
    assert env["PYTHONPATH"].split(os.pathsep) == ["/kvpool", "/wheels", str(ROOT / run.HERE), "/mine"]
