"""Imports SGLang once, and runs scripts in forks of the process: the import takes longer than most of them.

    python sglang_forks.py '{"folder": PATH, "jobs": {NAME: {"arguments": [...], "variables": {...}}}}'

What NAME prints goes to NAME.log in the folder, and the exit statuses to standard output. The engines start
their own processes by forks, too, instead of new interpreters as SGLang does.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import runpy
import sys
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

AT_ONCE = 2

IMPORTED = (
    "sgl_kernel.mamba",  # before it is looked for
    "sglang.srt.entrypoints.engine",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.managers.scheduler",
    "sglang.srt.models.registry",
)


def run_job(job: dict[str, Any], log: Path) -> int:
    """Runs a script as Python would run it by itself, and returns the exit status."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.update(job["variables"])
    # SGLang has read it while it was imported.
    scheduler = import_module("sglang.srt.managers.scheduler")
    setattr(scheduler, "TEST_RETRACT", "SGLANG_TEST_RETRACT" in os.environ)  # noqa: B010 - without types
    sys.argv = job["arguments"]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)  # noqa: T201
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - as the interpreter does
        traceback.print_exc()
        return 1
    return 0


def main() -> None:
    config = json.loads(sys.argv[1])
    for name in IMPORTED:
        import_module(name)
    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = lambda *_, **__: None  # SGLang asks for "spawn"
    waiting = dict(config["jobs"])
    running: dict[int, str] = {}
    statuses: dict[str, int] = {}
    while waiting or running:
        while waiting and len(running) < AT_ONCE:
            name = next(iter(waiting))
            job = waiting.pop(name)
            process = os.fork()
            if process == 0:
                status = 1
                try:
                    status = run_job(job, Path(config["folder"]) / f"{name}.log")
                finally:
                    sys.stdout.flush()
                    sys.stderr.flush()
                    os._exit(status)
            running[process] = name
        process, status = os.wait()
        statuses[running.pop(process)] = os.waitstatus_to_exitcode(status)
    print(json.dumps(statuses))  # noqa: T201


if __name__ == "__main__":
    main()
