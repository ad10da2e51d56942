"""kvpool within vLLM: its blocks and its offloading on kvpool, with a look at its own tests, and KV events.

`make engine-runs` runs all of vLLM's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import vllm_engine_runs
import vllm_runs
from sglang_on_cpu import HERE
from vllm_runs import CORE, OFFLOADING, run

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType

pytestmark = [pytest.mark.processes, pytest.mark.engines]

CHECKS = ("", "block_", "event_", "finder_", "layout_", "token_", "transfer_")

BRIEFLY = [
    *(f"{OFFLOADING}/{name}.py" for name in ("cpu/test_manager", "tiering/test_tiering_offloading")),
    f"{CORE}/test_prefix_caching.py",
    f"{CORE}/prefix_cache/test_partial_prefix_cache_primitives.py",
]


@pytest.mark.parametrize(("runs", "folder"), [(vllm_runs, "VLLM"), (vllm_engine_runs, "ENGINE")])
def test_vllm_that_must_be_there_is_not_skipped(
    runs: ModuleType, folder: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(runs, folder, tmp_path)
    monkeypatch.setattr(runs, "HAS_PACKAGES", True)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setenv("KVPOOL_REQUIRE_ENGINES", "1")
    with pytest.raises(pytest.fail.Exception, match="vLLM is not in"):
        runs.require()
    monkeypatch.delenv("KVPOOL_REQUIRE_ENGINES")
    with pytest.raises(pytest.skip.Exception, match="vLLM is not in"):
        runs.require()
    monkeypatch.setattr(runs, "HAS_PACKAGES", False)
    with pytest.raises(pytest.skip.Exception, match=r"Python 3\.11 to 3\.13"):
        runs.require()


def test_tests_of_vllm_pass_on_kvpool(tmp_path: Path) -> None:
    """Classes and events of kvpool, and tests of vLLM with the blocks and the manager of kvpool."""
    checks = [str(HERE / f"vllm_{name}checks.py") for name in CHECKS]
    own, ours = run(tmp_path, {"none": checks, "manager,blocks": BRIEFLY})
    assert own.passed >= 15 + 109 + 9 + 4 + 5 + 35 + 23
    assert not own.skipped
    assert ours.passed >= 120 + 230
    assert len(ours.skipped) == 7
    assert all("within vLLM's own class" in reason for reason in ours.skipped)


@pytest.mark.timeout(900)
def test_a_whole_vllm_makes_the_same_steps_on_kvpool() -> None:
    """A model on the CPU, and random requests without one. `make test-vllm-engine` has the others."""
    file = "vllm_engine_checks.py"
    cases = (
        "every_step_is_the_same[llama]",
        "random_requests_are_scheduled_the_same[True-True-WindowExecutor]",
        "a_policy_finds_what_vllm_s_order_has_evicted[plain]",
        "with_a_policy_what_ended_sessions_leave_goes_first[plain]",
    )
    assert vllm_engine_runs.run("0.33", *(f"{file}::test_{case}" for case in cases)) == len(cases)
