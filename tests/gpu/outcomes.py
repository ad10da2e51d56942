"""A plugin of pytest that tells the runner what came of each test, as soon as it is known.

After a failure it looks whether the GPU's context still works. Where it does not, each test that follows in
this process would fail as well: the process ends, and `pytest-xdist` starts another for the tests that are
left.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

import pytest
import records

if TYPE_CHECKING:
    from collections.abc import Generator

BROKEN_STATUS = 70
TEXT = 4000
ERROR = re.compile(r"\w*(Error|Exception|Interrupt|Warning)\b")
MISSING = ("ModuleNotFoundError", "ImportError")


def reason_of(report: pytest.TestReport | pytest.CollectReport) -> str:
    """The error in a line, and the last one that it quotes, as of a process that a test started."""
    lines = [line[1:].strip() for line in report.longreprtext.splitlines() if line.startswith("E ")]
    crash = str(getattr(getattr(report.longrepr, "reprcrash", None), "message", "")).splitlines()
    quoted = [line for line in lines[1:] if ERROR.match(line)]
    first = (crash or quoted[-1:] or lines or report.longreprtext.splitlines()[-1:] or [""])[0]
    return " ... ".join(dict.fromkeys([first, *quoted[-1:]]))[:400]


def is_worker() -> bool:
    """Whether another process sees the reports of this one, and would replace it."""
    return "PYTEST_XDIST_WORKER" in os.environ


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Tells of a test that is over, or of a fixture that failed."""
    if is_worker() or (report.when != "call" and report.passed):
        return
    reason = ""
    if report.skipped:
        reason = str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else "expected to fail"
    elif report.failed:
        reason = reason_of(report)
    text = report.longreprtext[-TEXT:] if report.failed else ""
    fields = {"outcome": report.outcome, "seconds": report.duration, "reason": reason, "text": text}
    records.add("test", name=report.nodeid, **fields)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Tells of a file that could not be read."""
    if is_worker() or not report.failed:
        return
    reason = reason_of(report)
    is_missing = reason.startswith(MISSING) and "kvpool" not in reason
    records.add(
        "test", name=report.nodeid, outcome="missing" if is_missing else "failed", seconds=0.0, reason=reason
    )


def pytest_runtest_logstart(nodeid: str) -> None:
    """Tells of a test that begins, which may be the one that never ends."""
    if not is_worker():
        records.add("begins", name=nodeid)


def pytest_collection_finish(session: pytest.Session) -> None:
    if not is_worker() and session.items:
        records.add("collected", count=len(session.items))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(ids: list[str]) -> None:
    records.add("collected", count=len(ids))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """Ends a worker whose context is broken, after the reports of the test are on their way."""
    failed = item.session.testsfailed
    answer = yield
    if (
        is_worker()
        and item.session.testsfailed > failed
        and not item.config.getoption("--software", default=False)
    ):
        import torch

        try:
            torch.cuda.synchronize()
        except RuntimeError:
            os._exit(BROKEN_STATUS)
    return answer
