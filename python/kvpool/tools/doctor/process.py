"""Runs a module of the doctor in a separate process, which may crash."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any


class ProcessError(Exception):
    """The process could not be started, took too long, or ended without an answer."""


def answer(module: str, *arguments: str, seconds: float) -> Any:  # noqa: ANN401 - JSON
    """Run `python -m module` and return the JSON that it printed.

    Raises:
        ProcessError: If there is no answer, or it took longer than `seconds`.
    """
    command = [sys.executable, "-W", "ignore", "-m", module, *arguments]
    try:
        done = subprocess.run(  # noqa: S603 - this interpreter
            command, capture_output=True, text=True, timeout=seconds, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ProcessError(f"it could not be tried: {error}") from None
    try:
        return json.loads(done.stdout)
    except ValueError:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise ProcessError(f"the trial ended with status {done.returncode}: {last}") from None
