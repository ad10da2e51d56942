"""SGLang's plugin: when it is on, what it replaces, when it stops the engine, and a look at the real one.

`make engine-runs` has the engine in many configurations, in processes as SGLang starts them.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import sglang_on_cpu
from sglang_on_cpu import (
    PLUGIN_ON,
    TREE_ON,
    ProcessResult,
    fork,
    job,
    require,
    served,
    tiny_hybrid_model,
    tiny_model,
)

from kvpool.integrations import sglang

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.processes, pytest.mark.engines]


@pytest.mark.parametrize(
    ("plugins", "switch", "is_on"),
    [
        (None, None, False),
        ("", "", False),
        ("other", "0", False),
        ("kvpool", None, True),
        ("other, kvpool", None, True),
        ("kvpool2", None, False),
        (None, "1", True),
    ],
)
def test_it_is_on_only_where_it_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, plugins: str | None, switch: str | None, is_on: bool
) -> None:
    for name, value in (("SGLANG_PLUGINS", plugins), ("KVPOOL_SGLANG", switch)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert sglang.is_switched_on() is is_on
    if not is_on:
        sglang.register()


CHECKS = {
    "off": {},
    "replaced attributes buffers surface groups": PLUGIN_ON,
    "drift": PLUGIN_ON,
    "broken": PLUGIN_ON,
    "overridden": PLUGIN_ON,
    "version": PLUGIN_ON,
}
"""Checks of `sglang_surface.py`, each line in a process of its own, and its environment."""

ENGINES = {"without": {}, "with": {**PLUGIN_ON, **TREE_ON}}

WAITING = {"kvpool": PLUGIN_ON, "core": {**PLUGIN_ON, **TREE_ON}}
"""Prefix caches over kvpool's tree core, and what chooses them beside `--radix-cache-backend`."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sglang")


@pytest.fixture(scope="module")
def ended(folder: Path) -> dict[str, ProcessResult]:
    """How each check and each engine ended, in forks of one process: the import takes the most time."""
    require()
    models = {"dense": tiny_model(folder / "dense"), "hybrid": tiny_hybrid_model(folder / "hybrid")}
    engine = {"page_size": 16, "max_total_tokens": 1024, "max_mamba_cache_size": 40}
    jobs = {"tree core": job("tree_briefly.py")}
    for kind, model in models.items():
        for name, variables in ENGINES.items():
            out = folder / f"{kind} {name}.json"
            config = {"model": str(model), "requests": 8, "engine": engine, "out": str(out)}
            jobs[out.stem] = job("serve_sglang.py", json.dumps(config), **variables)
    for checks, variables in CHECKS.items():
        jobs[checks] = job("sglang_surface.py", *checks.split(), MODEL=str(models["dense"]), **variables)
    for backend, variables in WAITING.items():
        worth = {**variables, "KVPOOL_SGLANG_EVICTION": "adaptive"}
        jobs[f"waiting {backend}"] = job("sglang_waiting.py", str(models["dense"]), backend, **worth)
    return fork(folder, jobs)


def test_an_engine_that_must_be_there_is_not_skipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sglang_on_cpu, "ENGINES", tmp_path)
    monkeypatch.setattr(sglang_on_cpu, "HAS_PACKAGES", True)
    monkeypatch.setenv("KVPOOL_REQUIRE_ENGINES", "1")
    with pytest.raises(pytest.fail.Exception, match="SGLang is not in"):
        require()
    monkeypatch.delenv("KVPOOL_REQUIRE_ENGINES")
    with pytest.raises(pytest.skip.Exception, match="SGLang is not in"):
        require()
    (tmp_path / ".installed").touch()
    with pytest.raises(pytest.fail.Exception, match="SGLang is not in"):
        require()


@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("checks", CHECKS)
def test_checks_within_sglang(ended: dict[str, ProcessResult], checks: str) -> None:
    status, log = ended[checks]
    assert status == 0, log
    assert f"checked {checks}\n" in log


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("kind", "rows"), [("dense", "ReqToTokenPool"), ("hybrid", "HybridReqToTokenPool")])
def test_the_engine_gives_the_same_tokens_by_the_same_schedule(
    folder: Path, ended: dict[str, ProcessResult], kind: str, rows: str
) -> None:
    own, pooled = (served(folder / f"{kind} {name}.json", ended[f"{kind} {name}"]) for name in ENGINES)
    assert pooled.tokens == own.tokens
    assert pooled.schedule == own.schedule
    assert len({tuple(tokens) for tokens in own.tokens}) > 8
    assert min(sum(own.cached), sum(pooled.cached)) > 0
    assert "is kvpool's" not in own.log
    states = {"MambaSlotAllocator"} if kind == "hybrid" else set()
    for made in {rows, "MHATokenToKVPool", "PagedTokenToKVPoolAllocator", *states}:
        assert f"SGLang: {made} is kvpool's" in pooled.log
    assert "Tree Core: KvTreeCore" in pooled.log


@pytest.mark.timeout(600)
@pytest.mark.parametrize("backend", WAITING)
def test_what_a_waiting_request_will_find_is_kept(ended: dict[str, ProcessResult], backend: str) -> None:
    status, log = ended[f"waiting {backend}"]
    assert status == 0, log


@pytest.mark.timeout(600)
def test_the_prefix_cache_is_the_same_over_both_tree_cores(ended: dict[str, ProcessResult]) -> None:
    status, log = ended["tree core"]
    assert status == 0, log
    made = json.loads(log.splitlines()[-1])
    assert len(made) == 4
    for label, counts in made.items():
        assert min(counts[kind] for kind in ("insert", "match", "evict", "events")) > 2, (label, counts)
