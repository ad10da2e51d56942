"""vLLM's own tests of its core and of offloading that need no GPU, on vLLM's classes and on kvpool's."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest
from vllm_runs import APART, CORE, NOT_HERE, OFFLOADING, RunResult, run

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    [ran] = run(tmp_path_factory.mktemp("own"), {"none": [OFFLOADING, *APART]})
    return ran


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("mode", "inside"), [("manager", 7), ("policy", 2)])
def test_all_tests_of_offloading_pass(tmp_path: Path, own: RunResult, mode: str, inside: int) -> None:
    [ran] = run(tmp_path, {mode: [OFFLOADING, *APART]})
    more = Counter(ran.skipped) - Counter(own.skipped)
    assert more.total() == inside
    assert all("within vLLM's own class" in reason for reason in more)
    assert ran.passed + inside == own.passed > 400


@pytest.mark.timeout(1800)
def test_all_tests_of_the_core_pass(tmp_path: Path) -> None:
    own, ours = run(tmp_path, {mode: [CORE, *NOT_HERE] for mode in ("none", "blocks")})
    assert ours.passed == own.passed > 1100
    assert Counter(ours.skipped) == Counter(own.skipped)
