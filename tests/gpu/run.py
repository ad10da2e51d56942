"""Everything that a GPU can tell of kvpool, in one command and within ten minutes.

    python3 tests/gpu/run.py [--plan truth|speed|all] [--seconds 570] [--out FOLDER] [--only WORD]
        [--software]

The plan `truth` is what shows faults, in three minutes; `speed` is the board of `board.py`, in five; `all` is
both and what else there is. It needs Python and PyTorch, and what `make gpu-package` has put into `.gpu`: the
package, and what its tests import. Steps run in the order of what they tell, each in a process of its own
that is ended at its limit; those for which no time is left are named. `report.md` and `report.json` are
written after every step, and `steps.log` has all output. It ends with 1 if a step failed, and with 2 if there
is no package.

With the driver made of software, preloaded or by `--software`, everything runs that needs no clock and no
kernels of PyTorch, with limits three times as long.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime as dt
import importlib.util
import json
import os
import signal
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import package
import report
from steps import FAILED, Result, Runner, Step

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).resolve().parents[2]
HERE = Path("tests") / "gpu"
PACKAGE = ROOT / ".gpu"
SOFTWARE = ROOT / "target" / "software_driver" / "lib" / "libcuda.so.1"
# Seconds of each plan.
PLANS = {"truth": 180.0, "speed": 300.0, "all": 570.0}
SPEED = ("environment", "board")
# Not of the truth: the board, and what tells least.
LATER = (
    *("board", "doctor", "captures, first call", "tests with processes", "tests with models"),
    *("speed", "speed, once", "ncu", "benchmark"),
)
# Suites that take most of the time of all.
WITH_MODELS = (
    *(
        f"tests/python/test_{name}.py"
        for name in ("attention", "model_families", "pooled_cache", "transformers")
    ),
    "examples/serving/tests",
)
SOFTWARE_FACTOR = 3
NO_CLOCK = "the driver made of software has no clock, and no kernels of PyTorch"
NO_KERNELS = "the driver made of software runs kernels on the host, where this tool sees none"
CANNOT_WATCH = r"(ERR_NVGPUCTRPERM|Failed to initialize the profiler|Device not supported)[^\n]*"


def pytest_command(
    processes: int, *arguments: str, is_software: bool, marks: str = "cuda"
) -> tuple[str, ...]:
    """Runs cuda tests, and tells of each; without what else the machine's pytest would load.

    Args:
        processes: How many run them; 0 without `pytest-xdist`.
        *arguments: What tests.
        is_software: What they run on.
        marks: Which of them.
    """
    plugins = ["outcomes", "pytest_timeout", "_hypothesis_pytestplugin"]
    plugins += ["xdist.plugin"] if processes else []
    return (
        *(sys.executable, "-m", "pytest", "-q", "-m", marks, "--continue-on-collection-errors"),
        *(word for plugin in plugins for word in ("-p", plugin)),
        # Another PyTorch may warn of what this one does not; a test that hangs may not cost the others.
        *("-p", "no:cacheprovider", "-o", "filterwarnings=", "-o", f"timeout={120 if is_software else 60}"),
        *(("-n", str(processes)) if processes else ()),
        *(("--software",) if is_software else ()),
        *arguments,
    )


def only_missing(told: Sequence[dict[str, Any]]) -> str:
    """The excuse of tests that all passed, but for files which import what is not on this machine."""
    outcomes = [record["outcome"] for record in told if record["kind"] == "test"]
    expected = max((record["count"] for record in told if record["kind"] == "collected"), default=0)
    missing = outcomes.count("missing")
    if not missing or "failed" in outcomes or len(outcomes) - missing != expected:
        return ""
    return f"{missing} file{'s' if missing > 1 else ''} not read, as what they import is not there"


def make_steps(out: Path, *, is_software: bool, has_xdist: bool) -> list[Step]:
    """The table, in the order of what the steps tell."""

    def script(name: str, *arguments: str) -> tuple[str, ...]:
        return (sys.executable, str(HERE / f"{name}.py"), *arguments)

    def tests(count: int, *arguments: str, marks: str = "cuda") -> tuple[str, ...]:
        return pytest_command(count if has_xdist else 0, *arguments, is_software=is_software, marks=marks)

    processes = max(1, min(14, (os.cpu_count() or 1) - 2))
    ignored = [f"--ignore={name}" for name in ("tests/python/test_cuda_torch.py", *WITH_MODELS)]
    others = ("tests/python", *ignored)
    no_clock, no_kernels = (NO_CLOCK, NO_KERNELS) if is_software else ("", "")
    quick = ("--once", "--little", "--rows", "256", "--tokens", "1,33")
    few = ("--count", "65536") if is_software else ()
    alone = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    steps = [
        Step("environment", "what machine this is", script("environment"), 60, is_vital=True),
        Step(
            *("first pool, cold", "what it costs where nothing was compiled", script("first_pool"), 40),
            env={"CUDA_CACHE_DISABLE": "1"},
        ),
        Step("first pool", "what the first pool costs, compiled before or not", script("first_pool"), 40),
        Step("first pool, warm", "what loading the kernels costs", script("first_pool"), 40),
        Step(
            *("first pool, PTX", "what compiling the PTX costs", script("first_pool"), 40),
            env={"KVPOOL_KERNELS": "ptx", "CUDA_CACHE_DISABLE": "1"},
        ),
        Step("probe", "whether the driver answers as documented", script("probe"), 40),
        Step(
            *("captures", "that every call works or refuses, and spoils no capture"),
            *(script("captures", "--seconds", str(210 if is_software else 45)), 80),
        ),
        Step(
            *("tests with PyTorch", "late frees, streams, graphs, threads, large data"),
            *(tests(1, "tests/python/test_cuda_torch.py"), 100),
            env=alone,
            excuse=only_missing,
        ),
        Step("images", "that kernels write the bits that the CPU writes", script("images", *few), 40),
        Step(
            *("images, PTX", "the same of the PTX, which the driver compiles", script("images", *few), 40),
            env={"KVPOOL_KERNELS": "ptx"},
        ),
        Step(
            *("exactness", "that every bit of every conversion is right, and rows beyond 2^31 elements"),
            *(script("exact", *(("--dry",) if is_software else ())), 60),
        ),
        Step(
            *("all other tests", "the cuda tests of all suites that start no processes and run no models"),
            *(tests(processes, *others, marks="cuda and not processes"), 100),
            env=alone,
            excuse=only_missing,
        ),
        Step(
            *("memcheck", "that no kernel touches memory that is not its own"),
            ("compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9", *script("speed", *quick)),
            60,
            env={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
            skip=no_kernels,
            refused=CANNOT_WATCH,
        ),
        Step(
            *("board", "every figure beside its peers"),
            *(
                script("board", "--seconds", "280", "--out", str(out), *(("--dry",) if is_software else ())),
                290,
            ),
            least=60,
        ),
        Step("doctor", "what kvpool says of it", (sys.executable, "-m", "kvpool", "doctor"), 30),
        Step(
            *("captures, first call", "that a process may begin with any pool beside a capture"),
            *(script("captures", "--first", "--seconds", str(120 if is_software else 40)), 50),
        ),
        Step(
            *("tests with processes", "the cuda tests that start processes"),
            *(tests(processes, *others, marks="cuda and processes"), 100),
            env=alone,
            excuse=only_missing,
        ),
        Step(
            *("tests with models", "that models give the tokens that they give alone"),
            *(tests(processes, *WITH_MODELS), 120),
            env=alone,
            excuse=only_missing,
        ),
        Step("speed", "time and bytes a second of each kernel", script("speed"), 60, skip=no_clock),
        Step(
            *("ncu", "how much of the memory's bandwidth each kernel uses"),
            (
                *("ncu", "--csv", "--clock-control", "none", "-k", "regex:kvpool_"),
                *("--metrics", ",".join(report.NCU_COLUMNS)),
                *script("speed", "--once", "--tokens", "16384"),
            ),
            60,
            skip=no_kernels,
            refused=CANNOT_WATCH,
        ),
        Step(
            *("benchmark", "ratios to plain PyTorch and to copies"),
            (
                *(sys.executable, "benches/bench_cuda.py", "--rounds", "5"),
                *("--markdown", str(out / "bench.md"), "--json", str(out / "bench.json")),
            ),
            90,
            least=30,
            skip=no_clock,
        ),
    ]
    if not is_software:
        return steps
    once = Step("speed, once", "that every call it times can be made", script("speed", *quick), 30)
    at = [step.name for step in steps].index("speed") + 1
    return [replace(step, limit=SOFTWARE_FACTOR * step.limit) for step in (*steps[:at], once, *steps[at:])]


def steps_of(plan: str, steps: Sequence[Step]) -> list[Step]:
    """The steps of a plan: those that nobody has put elsewhere belong to the truth."""
    if plan == "all":
        return list(steps)
    return [step for step in steps if (step.name in SPEED if plan == "speed" else step.name not in LATER)]


def packages() -> tuple[list[str], list[str], dict[str, str]]:
    """The folders of modules and programs for this Python, and what is known of the package."""
    about: dict[str, str] = json.loads((PACKAGE / "package.json").read_text(encoding="utf-8"))
    folders, programs = [PACKAGE / "kvpool"], list[Path]()
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    tools = f"of Python {about['python']}, from .gpu"
    if about["python"] == here:
        more, programs = package.unpack(PACKAGE)
        folders += more
    else:
        tools = f"this machine's, as those in .gpu are of Python {about['python']}"
    known = {"commit": about["commit"], "pytest and others": tools}
    return [str(folder) for folder in folders], [str(folder) for folder in programs], known


def environment(folders: Sequence[str], programs: Sequence[str], software: Path | None) -> dict[str, str]:
    """The environment variables of all steps; programs of the machine come before those of the package."""
    paths = [*folders, str(ROOT / HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    found = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "PATH": os.pathsep.join([os.environ.get("PATH", os.defpath), *programs]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUNBUFFERED": "1",
        "KVPOOL_REQUIRE_CUDA": "1",
    }
    return {**found, "LD_PRELOAD": str(software)} if software else found


def can_import(name: str, env: dict[str, str]) -> bool:
    folders = env["PYTHONPATH"].split(os.pathsep)
    return (
        any((Path(folder) / name).exists() for folder in folders)
        or importlib.util.find_spec(name) is not None
    )


def show(result: Result) -> None:
    reason = f": {result.reason}" if result.reason else ""
    print(f"{result.status:8}{result.seconds:6.1f} s  {result.step.name}{reason}", flush=True)


def run_steps(
    steps: Sequence[Step],
    out: Path,
    env: dict[str, str],
    seconds: float,
    about: dict[str, str],
) -> int:
    """Runs all, and keeps the report up to date. The answer is an exit status."""
    out.mkdir(parents=True, exist_ok=True)
    for name in (
        *(f"{kind}.{end}" for kind in ("report", "bench", "board") for end in ("md", "json")),
        "steps.log",
    ):
        (out / name).unlink(missing_ok=True)
    results: list[Result] = []

    with tempfile.TemporaryDirectory() as scratch:
        runner = Runner(out / "steps.log", Path(scratch), env, seconds)
        for step in steps:
            results.append(runner.run(step))
            show(results[-1])
            report.write(out, results, about, [out / "board.md", out / "bench.md"])
    print(f"{report.verdict(results)}\n{out / 'report.md'}")
    return 1 if any(result.status == FAILED for result in results) else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--plan", choices=PLANS, default="all", help="which steps (default: %(default)s)")
    parser.add_argument("--seconds", type=float, help="for all steps (default: the plan's)")
    parser.add_argument(
        "--out", type=Path, default=Path(os.environ.get("OUT") or "target/gpu"), help="where the report goes"
    )
    parser.add_argument("--only", default="", metavar="WORD", help="only steps that contain WORD")
    parser.add_argument("--software", action="store_true", help="preload the driver made of software")
    arguments = parser.parse_args()
    # A shell lets what it starts in the background ignore interrupts, and the tests would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    out = arguments.out.resolve()
    os.chdir(ROOT)
    if not (PACKAGE / "package.json").exists():
        print(
            "there is no package in .gpu: run `make gpu-package` where Rust is, and bring it", file=sys.stderr
        )
        return 2
    folders, programs, about = packages()
    is_software = arguments.software or hasattr(ctypes.CDLL(None), "soft_calls")
    env = environment(folders, programs, SOFTWARE if arguments.software else None)
    steps = make_steps(out, is_software=is_software, has_xdist=can_import("xdist", env))
    about = {"date": dt.datetime.now(tz=dt.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"), **about}
    wanted = [step for step in steps_of(arguments.plan, steps) if arguments.only in step.name]
    seconds = PLANS[arguments.plan] if arguments.seconds is None else arguments.seconds
    return run_steps(wanted, out, env, seconds, about)


if __name__ == "__main__":
    sys.exit(main())
