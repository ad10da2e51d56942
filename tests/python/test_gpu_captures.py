"""`tests/gpu/captures.py` on the software driver, and with processes that do not go on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import records

if TYPE_CHECKING:
    from shared_fixtures import RunSnippet

GPU = Path(__file__).resolve().parents[1] / "gpu"


def test_a_process_that_does_not_go_on_costs_one_call(run_snippet: RunSnippet) -> None:
    told = run_snippet(
        f"""
        import os, time
        sys.path.insert(0, {str(GPU)!r})
        import captures

        def attempt(_, item):
            if item.name == "hangs":
                time.sleep(60)
            if item.name == "dies":
                os.kill(os.getpid(), 9)
            if item.name == "exits":
                raise SystemExit(3)
            if item.name == "raises":
                raise RuntimeError("odd")
            spoilt = item.name == "spoils"
            found = {{"call": "worked", "detail": str(os.getpid()), "ok": not spoilt}}
            return {{"capture": "spoilt" if spoilt else "survived", **found}}

        captures.HANG_SECONDS = 0.7
        captures.attempt_item = attempt
        captures.open_device = lambda: None
        names = "a b spoils c hangs dies exits raises d".split()
        todo = [captures.Item(name, "own") for name in names]
        for item, found in captures.run(todo, time.monotonic() + 60):
            print(item.name, found["ok"], found["capture"], found["detail"], sep="|")
        assert not todo
        todo = [captures.Item(name, "first: own") for name in "ab"]
        found = dict(captures.run(todo, time.monotonic() + 60))
        assert len({{entry["detail"] for entry in found.values()}}) == 2, found
        todo = [captures.Item("late", "own")]
        assert [*captures.run(todo, time.monotonic())] == [] and todo
        """
    )
    lines = [line.split("|") for line in told.splitlines()]
    assert [line[:3] for line in lines] == [
        ["a", "True", "survived"],
        ["b", "True", "survived"],
        ["spoils", "False", "spoilt"],
        ["c", "True", "survived"],
        ["hangs", "False", "?"],
        ["dies", "False", "?"],
        ["exits", "False", "?"],
        ["raises", "False", "?"],
        ["d", "True", "survived"],
    ]
    details = {line[0]: line[3] for line in lines}
    assert details["a"] == details["b"] == details["spoils"] != details["c"] != details["d"]
    assert details["hangs"].startswith("it hung")
    assert details["dies"] == "the process died: signal 9"
    assert (details["exits"], details["raises"]) == ("SystemExit: 3", "RuntimeError: odd")


@pytest.mark.cuda
@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize(
    "script", [["captures", "--only", "ReqToTokenPool.read"], ["speed"]], ids=lambda s: s[0]
)
def test_the_scripts_run_on_the_driver_made_of_software(script: list[str], tmp_path: Path) -> None:
    # Of the child alone: the tests themselves may run as a step that tells its own.
    env = {**os.environ, records.FILE: str(tmp_path / "told.jsonl")}
    name, *options = script
    options = options or ["--once", "--little", "--rows", "64", "--tokens", "3"]
    done = subprocess.run(
        [sys.executable, GPU / f"{name}.py", *options],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=env,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = records.read(tmp_path / "told.jsonl")
    assert len(told) >= 5, json.dumps(told, indent=1)
    assert all(record["ok"] for record in told if record["kind"] == "capture")
