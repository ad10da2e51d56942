"""The real engine of SGLang on the CPU: on kvpool's pools and tree core it gives the same tokens, by the same
schedule, as on its own.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from sglang_on_cpu import (
    PLUGIN_ON,
    TREE_ON,
    fork,
    job,
    require,
    served,
    spawn,
    tiny_hybrid_model,
    tiny_model,
)

if TYPE_CHECKING:
    from pathlib import Path

    from sglang_on_cpu import ProcessResult

pytestmark = [
    pytest.mark.timeout(3600),
    # From transformers, while a model is made.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


class Config(NamedTuple):
    """How an engine is started, and what its log must show, so that the case is one."""

    engine: dict[str, Any]
    requests: int = 24
    new_tokens: int = 24
    aborts: bool = False
    variables: dict[str, str] = {}  # noqa: RUF012 - not changed
    shows: str = ""
    spawn: bool = False
    tree: bool = True
    # For the engine on kvpool alone.
    pooled: dict[str, Any] = {}  # noqa: RUF012


SMALL = {"max_total_tokens": 1024}
RETRACT = {"SGLANG_TEST_RETRACT": "1"}
# Requests are admitted as if they generated next to nothing.
FULL = {**SMALL, "schedule_conservativeness": 0.01}
IS_FULL = "KV cache pool is full. Retract requests."
IS_RETRACTED = "Testing retraction."
RETRACTS = {IS_FULL, IS_RETRACTED}
# Other tokens are cached, so that batches differ; the answers do not.
WORTH = {"KVPOOL_SGLANG_EVICTION": "adaptive"}
EACH_STEP = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"}

DENSE = {
    "page size 1": Config({"page_size": 1}, spawn=True),
    "page size 16": Config({"page_size": 16}, spawn=True),
    "page size 64": Config({"page_size": 64}),
    "SGLang's tree core": Config({"page_size": 1}, tree=False),
    "SGLang's tree core, in pages": Config({"page_size": 64}, tree=False),
    "one call for an eviction": Config(
        {"page_size": 16, **SMALL}, 40, pooled={"radix_cache_backend": "kvpool"}
    ),
    "without a prefix cache": Config({"page_size": 1, "disable_radix_cache": True}),
    "without a prefix cache, in pages": Config({"page_size": 64, "disable_radix_cache": True}),
    "without overlap": Config({"page_size": 16, "disable_overlap_schedule": True}, variables=EACH_STEP),
    "small chunks": Config({"page_size": 16, "chunked_prefill_size": 32}, shows="#new-token: 32,"),
    "small chunks of large pages": Config(
        {"page_size": 64, "chunked_prefill_size": 64}, shows="#new-token: 64,"
    ),
    "pressure": Config({"page_size": 1, **SMALL}, 40),
    "pressure, in pages": Config({"page_size": 16, **SMALL}, 40),
    "retraction": Config({"page_size": 1}, variables=RETRACT, shows=IS_RETRACTED, spawn=True),
    "retraction, in pages": Config({"page_size": 64}, variables=RETRACT, shows=IS_RETRACTED),
    "a full pool": Config({"page_size": 1, **FULL}, 24, 96, shows=IS_FULL),
    "a full pool, in pages": Config({"page_size": 16, **FULL}, 24, 96, shows=IS_FULL),
    "aborts": Config({"page_size": 1}, aborts=True),
    "aborts, in pages": Config({"page_size": 16}, aborts=True),
    **{
        policy: Config({"page_size": 16, "schedule_policy": policy, **SMALL, "max_running_requests": 4}, 40)
        for policy in ("fcfs", "lpm", "dfs-weight", "lof", "hrrn", "shortest-prefill-first")
    },
    "a policy of eviction": Config({"page_size": 1, "radix_eviction_policy": "lfu", **SMALL}, 40),
    "eviction by worth": Config(
        {"page_size": 16, **SMALL}, 40, variables=WORTH, pooled={"radix_cache_backend": "kvpool"}
    ),
}

STATES = {"max_mamba_cache_size": 64}
# Without states beside those in use SGLang takes neither pages nor two batches in flight.
PLAIN = {
    "page_size": 1,
    "disable_overlap_schedule": True,
    "mamba_radix_cache_strategy": "no_buffer",
    **STATES,
}
PAGED = {"page_size": 64, "mamba_radix_cache_strategy": "extra_buffer", **STATES}

HYBRID = {
    "page size 1": Config(PLAIN),
    "page size 1, two batches in flight": Config({**PAGED, "page_size": 1}),
    "page size 16": Config({**PAGED, "page_size": 16}),
    "page size 64": Config(PAGED),
    "SGLang's tree core": Config(PLAIN, tree=False),
    "SGLang's tree core, in pages": Config(PAGED, tree=False),
    "one call for an eviction": Config(
        {**PLAIN, **SMALL, "max_mamba_cache_size": 24}, 40, pooled={"radix_cache_backend": "kvpool"}
    ),
    "without a prefix cache": Config({**PLAIN, "disable_radix_cache": True}),
    "small chunks": Config({**PLAIN, "chunked_prefill_size": 32}, shows="#new-token: 32,"),
    "pressure": Config({**PLAIN, **SMALL, "max_mamba_cache_size": 24}, 40),
    "pressure, in pages": Config({**PAGED, **SMALL, "max_mamba_cache_size": 24}, 40),
    "eviction by worth": Config({**PLAIN, **SMALL, "max_mamba_cache_size": 24}, 40, variables=WORTH),
    "retraction": Config(PLAIN, variables=RETRACT, shows=IS_RETRACTED),
    "retraction, in pages": Config(PAGED, variables=RETRACT, shows=IS_RETRACTED),
    "a full pool": Config({**PLAIN, **FULL}, 24, 96, shows=IS_FULL),
    "a full pool, in pages": Config({**PAGED, **FULL}, 24, 96, shows=IS_FULL),
    "aborts": Config(PLAIN, aborts=True),
    "aborts, in pages": Config(PAGED, aborts=True),
}


CONFIGS = {
    **{f"dense, {name}": config for name, config in DENSE.items()},
    **{f"hybrid, {name}": config for name, config in HYBRID.items()},
}
MODELS = {"dense": tiny_model, "hybrid": tiny_hybrid_model}
ROWS = {"dense": {"ReqToTokenPool"}, "hybrid": {"HybridReqToTokenPool", "MambaSlotAllocator"}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the models."""
    require()
    folder = tmp_path_factory.mktemp("sglang")
    for kind, make in MODELS.items():
        make(folder / kind)
    return folder


@pytest.fixture(scope="module")
def forked(request: pytest.FixtureRequest, folder: Path) -> dict[str, ProcessResult]:
    """How the engines of all selected tests ended, but of those that are spawned."""
    selected = {
        item.callspec.params.get("name") for item in request.session.items if hasattr(item, "callspec")
    }
    names = [name for name in CONFIGS if name in selected and not CONFIGS[name].spawn]
    return fork(folder, {key: each for name in names for key, each in jobs(folder, name).items()})


def jobs(folder: Path, name: str) -> dict[str, dict[str, Any]]:
    """An engine on SGLang's own pools, and one on kvpool's."""
    config = CONFIGS[name]
    variables = {**config.variables, **PLUGIN_ON, **(TREE_ON if config.tree else {})}
    return {
        f"{name}, {pools}": job(
            "serve_sglang.py",
            json.dumps(
                {
                    "model": str(folder / name.partition(",")[0]),
                    "out": str(folder / f"{name}, {pools}.json"),
                    "requests": config.requests,
                    "new_tokens": config.new_tokens,
                    "may_retract": config.shows == IS_FULL,
                    "aborts": config.aborts,
                    "engine": engine,
                }
            ),
            **environment,
        )
        for pools, engine, environment in (
            ("own", config.engine, config.variables),
            ("kvpool", {**config.engine, **config.pooled}, variables),
        )
    }


@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_and_schedules_are_the_same(request: pytest.FixtureRequest, folder: Path, name: str) -> None:
    config = CONFIGS[name]
    ended = spawn(folder, jobs(folder, name)) if config.spawn else request.getfixturevalue("forked")
    own, pooled = (
        served(folder / f"{name}, {pools}.json", ended[f"{name}, {pools}"]) for pools in ("own", "kvpool")
    )
    assert pooled.tokens == own.tokens
    assert len({tuple(tokens) for tokens in own.tokens}) > 20
    # When a request is given up depends on the clock, and so does everything after it.
    if not config.aborts and config.variables is not WORTH:
        assert pooled.schedule == own.schedule
    if config.shows in RETRACTS:
        assert sum(own.retractions) > 0
    for each in (own, pooled):
        assert config.shows in each.log, each.log[-4000:]
        assert (each.aborted > 0) is config.aborts
    # Nothing was freed twice or by the wrong caller: a strict pool would have ended the scheduler.
    assert "is kvpool's" not in own.log
    slots = "TokenToKVPoolAllocator" if config.engine["page_size"] == 1 else "PagedTokenToKVPoolAllocator"
    for made in {"MHATokenToKVPool", slots, *ROWS[name.partition(",")[0]]}:
        assert f"SGLang: {made} is kvpool's" in pooled.log
    if "disable_radix_cache" not in config.engine:
        assert min(sum(own.cached), sum(pooled.cached)) > 0
        assert ("Tree Core: KvTreeCore" in pooled.log) is config.tree
        assert ("the prefix cache evicts by worth" in pooled.log) is (config.variables is WORTH)


@pytest.mark.parametrize("backend", ["kvpool", "core"])
def test_requests_say_of_which_session_they_are(folder: Path, backend: str) -> None:
    variables = {**PLUGIN_ON, **TREE_ON, **WORTH}
    ran = job("sglang_sessions.py", str(folder / "dense"), backend, **variables)
    ended = spawn(folder, {backend: ran})[backend]
    assert ended.status == 0, ended.log[-4000:]
