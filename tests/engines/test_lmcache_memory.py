"""All of LMCache's own tests of memory management, with LMCache as it is and with kvpool switched on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from lmcache_runs import SWITCHED_ON, TESTS, run

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.timeout(1800)
def test_all_tests_of_memory_management_pass(tmp_path: Path) -> None:
    own = run(tmp_path, *TESTS)
    ran = run(tmp_path, *TESTS, **SWITCHED_ON)
    assert sorted(ran.skipped) == sorted(own.skipped)
    assert ran.passed == own.passed > 220
