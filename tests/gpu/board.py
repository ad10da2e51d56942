"""kvpool on a GPU beside its peers: every figure that has a target, and the card's ceilings, in one run.

    python tests/gpu/board.py [--quick] [--only WORD] [--dry] [--seconds 280] [--out target/gpu]

Each group of `board_rows.py` runs in a process of its own, within a limit. A row's results are compared
before it is timed: `host` is the time until a call returns, in bursts, and `device` a call's share of a
replayed CUDA graph; both are medians of rounds in which all sides have their turn. The last lines are
`row | ours | peer | its | ratio | target | met`, in microseconds; `board.md` and `board.json` have them, too.
A peer that is not there is named. It ends with 1 if a row could not be made, not where a target is missed.

`--dry` makes every call once on the CPU, with nothing timed, and SGLang's kernels in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import records
import report
from board_peers import NO_FLASHINFER
from steps import OK, Result, Runner, Step

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

HERE = Path(__file__).resolve()
COLUMNS = ("row", "ours", "peer", "its", "ratio", "target", "met")
ALL = "all"
COMPILE_SECONDS = 100.0
WARM_SECONDS = 0.4


def number(value: float | None) -> str:
    return "" if value is None else f"{value:,.2f}"


def cells(line: dict[str, Any]) -> tuple[str, ...]:
    """A line of the board as text, one for each of `COLUMNS`."""
    met = {True: "yes", False: "no", None: ""}[line["met"]]
    times = [number(line[name]) for name in ("ours_us", "its_us", "ratio")]
    return line["question"], times[0], line["peer"], times[1], times[2], line["target"], met


def lines_of(found: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """All lines, and one for each peer that was not there."""
    yield from (cells(line) for line in found["lines"])
    for one in found["missing"]:
        yield one["question"], "", one["peer"], "missing", "", "", ""


@cache
def about() -> dict[str, Any]:
    """The machine, as the other benchmarks tell of it."""
    sys.path.insert(0, str(HERE.parents[2] / "benches"))
    from harness import machine

    return machine()


def markdown(found: dict[str, Any]) -> str:
    """The board as a part of a report."""
    lines = ["; ".join(f"{name}: {value}" for name, value in found["machine"].items()), ""]
    lines += report.bullets(f"{name}: {value}" for name, value in found["ceilings"].items())
    numbers = ("ours", "its", "ratio")
    lines += report.table(COLUMNS, lines_of(found), numbers=numbers)
    lines += report.bullets(
        (f"{one['question']}: {one['peer']}: {one['why']}" for one in found["missing"]), "Missing:"
    )
    lines += report.bullets(found["failed"], "Failed:")
    return "\n".join(report.section("Board, in microseconds", lines))


def collect(results: Sequence[Result]) -> dict[str, Any]:
    """The records of all groups."""

    def told(kind: str) -> list[dict[str, Any]]:
        return [{k: v for k, v in r.items() if k != "kind"} for r in report.records_of(results, kind)]

    failed = [f"{one['question']}: {one['why']}" for one in told("failed")]
    failed += [
        f"{r.step.name}: {r.status}: {r.reason}" for r in results if r.status != OK and not r.about("failed")
    ]
    ceilings = {name: value for one in told("ceilings") for name, value in one.items()}
    return {
        "machine": about(),
        "ceilings": ceilings,
        "lines": told("line"),
        "made": [one["question"] for one in told("made")],
        "missing": told("missing"),
        "failed": failed,
    }


def run_groups(arguments: argparse.Namespace) -> int:
    """Runs each group in a process, and keeps the board up to date."""
    out: Path = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    env = child_environment(is_dry=arguments.dry)
    options = [*(["--quick"] if arguments.quick else []), *(["--dry"] if arguments.dry else [])]
    if arguments.only:
        options += ["--only", arguments.only]
    command = [sys.executable, str(HERE), *options, "--group"]
    begin = time.monotonic()
    more = {} if arguments.dry else compiled([*command, "compile"], env)
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as scratch:
        left = arguments.seconds - (time.monotonic() - begin)
        runner = Runner(Path(scratch) / "log", Path(scratch), env, left)
        # Where nothing is timed, one process imports everything once.
        for name, limit in ({ALL: arguments.seconds} if arguments.dry else limits()).items():
            result = runner.run(Step(name, "", (*command, name), limit, env=more))
            results.append(result)
            print(
                f"{result.output}{result.status}: {name}, {result.seconds:.0f} s {result.reason}",
                flush=True,
            )
            found = collect(results)
            (out / "board.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
            (out / "board.md").write_text(markdown(found), encoding="utf-8")
    for one in found["missing"]:
        print(f"missing: {one['question']}: {one['peer']}: {one['why']}")
    for text in found["failed"]:
        print(f"failed: {text}")
    print(found["ceilings"], " | ".join(COLUMNS), sep="\n")
    for row in lines_of(found):
        print(" | ".join(row))
    if arguments.dry:
        print(f"{len(found['made'])} rows made")
    return 1 if found["failed"] else 0


def limits() -> dict[str, float]:
    """The seconds of each group."""
    from board_rows import GROUPS as ROWS

    return {name: limit for name, (limit, _) in ROWS.items()}


def child_environment(*, is_dry: bool) -> dict[str, str]:
    """The environment of a group: compilers, and folders for their output."""
    kept = Path(tempfile.gettempdir()) / f"kvpool-gpu-{os.getuid()}"
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    env.setdefault("FLASHINFER_WORKSPACE_BASE", str(kept))
    env.setdefault("TRITON_CACHE_DIR", str(kept / "triton"))
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    if Path(nvcc).exists():
        env.setdefault("CUDA_HOME", str(Path(nvcc).resolve().parents[1]))
    if is_dry:
        env["TRITON_INTERPRET"] = "1"
    return env


def compiled(command: Sequence[str], env: dict[str, str]) -> dict[str, str]:
    """Compiles FlashInfer before anything is timed; if that fails, the environment that tells its rows."""
    try:
        status = subprocess.run(command, env=env, timeout=COMPILE_SECONDS, check=False).returncode
    except subprocess.TimeoutExpired:
        return {NO_FLASHINFER: "it was not compiled in time"}
    return {NO_FLASHINFER: f"it could not be compiled, exit status {status}"} if status else {}


def run_group(arguments: argparse.Namespace) -> int:
    """The rows of one group, in this process."""
    import torch
    from board_measure import Board

    if arguments.group == "compile":
        from board_peers import flashinfer_page

        flashinfer_page()
        return 0
    board = Board(dry=arguments.dry, quick=arguments.quick)
    torch.manual_seed(1)
    if arguments.dry:
        torch.set_num_threads(1)
    else:
        wake(torch)
    from board_rows import GROUPS as ROWS

    failed = 0
    groups = list(ROWS) if arguments.group == ALL else [arguments.group]
    for what, make in itertools.chain.from_iterable(ROWS[name][1](board) for name in groups):
        if arguments.only not in what:
            continue
        try:
            make()
        except Exception as error:  # noqa: BLE001 - a row may not cost the others
            failed += 1
            traceback.print_exc()
            records.add("failed", question=what, why=f"{type(error).__name__}: {error}"[:300])
        gc.collect()
        if not arguments.dry:
            torch.cuda.empty_cache()
    return 1 if failed else 0


def wake(torch: Any) -> None:  # noqa: ANN401
    """Makes the context, and lets the clocks rise."""
    numbers = torch.randn(1 << 26, device="cuda")
    end = time.monotonic() + WARM_SECONDS
    while time.monotonic() < end:
        numbers.mul_(1.0001)
        torch.cuda.synchronize()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one size of each row")
    parser.add_argument("--only", default="", metavar="WORD", help="only rows that contain WORD")
    parser.add_argument("--dry", action="store_true", help="every call once on the CPU, untimed")
    parser.add_argument("--seconds", type=float, default=280.0, help="for all groups (default: %(default)s)")
    parser.add_argument(
        "--out", type=Path, default=Path(os.environ.get("OUT") or "target/gpu"), help="a folder"
    )
    parser.add_argument("--group", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    return run_group(arguments) if arguments.group else run_groups(arguments)


if __name__ == "__main__":
    sys.exit(main())
