"""kvpool within LMCache: its memory on kvpool, with a look at its own tests.

`make engine-runs` runs all of LMCache's tests of memory management.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import lmcache_runs
import pytest
from lmcache_runs import RANGES, SWITCHED_ON, run
from sglang_on_cpu import HERE

from kvpool.integrations import lmcache

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.processes, pytest.mark.engines]


def test_lmcache_that_must_be_there_is_not_skipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(lmcache_runs, "LMCACHE", tmp_path)
    monkeypatch.setattr(lmcache_runs, "HAS_PACKAGES", True)
    monkeypatch.setenv("KVPOOL_REQUIRE_ENGINES", "1")
    with pytest.raises(pytest.fail.Exception, match="LMCache is not in"):
        lmcache_runs.require()
    monkeypatch.delenv("KVPOOL_REQUIRE_ENGINES")
    with pytest.raises(pytest.skip.Exception, match="LMCache is not in"):
        lmcache_runs.require()


@pytest.mark.parametrize(("switch", "is_on"), [(None, False), ("", False), ("0", False), ("1", True)])
def test_it_is_on_only_where_it_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, switch: str | None, is_on: bool
) -> None:
    monkeypatch.delenv("KVPOOL_LMCACHE", raising=False)
    if switch is not None:
        monkeypatch.setenv("KVPOOL_LMCACHE", switch)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    before = len(sys.meta_path)
    assert lmcache.is_switched_on() is is_on
    lmcache.register()
    lmcache.register()
    assert len(sys.meta_path) == before + is_on


def test_memory_of_kvpool_within_lmcache(tmp_path: Path) -> None:
    """In one process, since the import of LMCache takes the most time."""
    ran = run(tmp_path, str(HERE / "lmcache_checks.py"), RANGES, **SWITCHED_ON)
    assert ran.passed >= 19 + 70
    assert not ran.skipped
