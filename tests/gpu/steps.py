"""Steps in processes of their own, each ended at its limit, all of them within a budget of seconds."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import records

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

OK, FAILED, SKIPPED, NOT_RUN = "ok", "failed", "skipped", "not run"
GRACE_SECONDS = 2.0


@dataclass(frozen=True)
class Step:
    """Something to run.

    Attributes:
        name: What it is called in the report.
        settles: What is known after it.
        command: The program and its arguments.
        limit: Seconds after which it is ended.
        env: What it has in its environment beside everybody's.
        least: Seconds without which it does not begin.
        skip: Why it cannot run on this machine, if so.
        refused: A pattern of output by which a tool says that it cannot work on this machine.
        excuse: Given what it told, why a failing exit status is none, or nothing.
        is_vital: Whether nothing after it can run without it.
    """

    name: str
    settles: str
    command: Sequence[str]
    limit: float
    env: Mapping[str, str] = field(default_factory=dict)
    least: float = 10.0
    skip: str = ""
    refused: str = ""
    excuse: Callable[[Sequence[dict[str, Any]]], str] = lambda _: ""
    is_vital: bool = False


@dataclass(frozen=True)
class Result:
    """The result of a step.

    Attributes:
        step: The step.
        status: `ok`, `failed`, `skipped` or `not run`.
        reason: Why, unless it is `ok`.
        seconds: How long it ran.
        output: What it printed.
        told: What it told with `records.add`.
    """

    step: Step
    status: str
    reason: str = ""
    seconds: float = 0.0
    output: str = ""
    told: Sequence[dict[str, Any]] = ()

    def about(self, kind: str) -> list[dict[str, Any]]:
        return [record for record in self.told if record["kind"] == kind]


class Runner:
    """Runs steps, and appends what they print to one log.

    Args:
        log: The file for all output.
        scratch: A folder for what steps tell.
        env: The environment of every step.
        seconds: The budget of all steps together.
    """

    def __init__(self, log: Path, scratch: Path, env: Mapping[str, str], seconds: float) -> None:
        self._log = log
        self._scratch = scratch
        self._env = env
        self._seconds = seconds
        self._end = time.monotonic() + seconds
        self._stopped_by = ""

    def run(self, step: Step) -> Result:
        """Runs one step, or says why not."""
        result = self._run(step)
        if step.is_vital and result.status == FAILED:
            self._stopped_by = step.name
        return result

    def _run(self, step: Step) -> Result:
        left = self._end - time.monotonic()
        if step.skip:
            return Result(step, SKIPPED, step.skip)
        if shutil.which(step.command[0], path=self._env.get("PATH")) is None:
            return Result(step, SKIPPED, f"there is no {step.command[0]} on this machine")
        if self._stopped_by:
            return Result(step, NOT_RUN, f"'{self._stopped_by}' failed")
        if left < min(step.least, step.limit):
            return Result(step, NOT_RUN, f"{max(left, 0.0):.0f} s of {self._seconds:.0f} were left")
        return self._start(step, min(step.limit, left))

    def _start(self, step: Step, limit: float) -> Result:
        told = self._scratch / f"{re.sub(r'[^a-z0-9]+', '-', step.name.lower())}.jsonl"
        env = {**self._env, **step.env, records.FILE: str(told)}
        with self._log.open("ab") as log:
            settings = "".join(f"{name}={value} " for name, value in step.env.items())
            log.write(f"\n==== {step.name}: {settings}{' '.join(step.command)}\n".encode())
            log.flush()
            begin, start = log.tell(), time.monotonic()
            process = subprocess.Popen(
                step.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=env,
                start_new_session=True,
            )
            try:
                code: int | None = process.wait(limit)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                _end(process)
        seconds = time.monotonic() - start
        with self._log.open("rb") as log:
            log.seek(begin)
            output = log.read().decode(errors="replace")
        found = records.read(told)
        status, reason = _judge(step, code, output, limit)
        excuse = step.excuse(found) if code else ""
        status, reason = (OK, excuse) if excuse else (status, reason)
        return Result(step, status, reason, seconds, output, found)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends what a step has left running, gently first: a profiler removes what it put into a driver."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        if process.returncode is not None:
            continue
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)


def _judge(step: Step, code: int | None, output: str, limit: float) -> tuple[str, str]:
    last = last_line(output)
    if code is None:
        return FAILED, f"ended at its limit of {limit:.0f} s; last line: {last}"
    if code == 0:
        return OK, ""
    refusal = re.search(step.refused, output) if step.refused else None
    if refusal is not None:
        return SKIPPED, f"{step.command[0]} cannot work here: {refusal[0].strip()}"
    how = f"signal {-code}" if code < 0 else f"exit status {code}"
    return FAILED, f"{how}; last line: {last}"


def last_line(output: str) -> str:
    """The last line that says something."""
    lines = [line.strip() for line in output.splitlines() if re.search(r"\w", line)]
    return lines[-1][:300] if lines else "(it printed nothing)"
