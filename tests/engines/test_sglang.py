"""The real engine of SGLang on the CPU: the same tokens on kvpool's pools and tree core as on its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from sglang_on_cpu import PLUGIN_ON, TREE_ON, Started, require, serve, tiny_hybrid_model, tiny_model

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.timeout(900),
    # From transformers, while a model is made.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


class Config(NamedTuple):
    """How an engine is started, and what its log must show, so that the case is one."""

    engine: dict[str, Any]
    requests: int = 24
    aborts: bool = False
    variables: dict[str, str] = {}  # noqa: RUF012 - not changed
    shows: str = ""
    spawn: bool = False
    tree: bool = True
    # For the engine on kvpool alone.
    pooled: dict[str, Any] = {}  # noqa: RUF012


SMALL = {"max_total_tokens": 1024}
BOLD = {"schedule_conservativeness": 0.0}
RETRACT = {"SGLANG_TEST_RETRACT": "1"}
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
    "retraction": Config({"page_size": 1}, variables=RETRACT, shows="Testing retraction.", spawn=True),
    "retraction, in pages": Config({"page_size": 64}, variables=RETRACT, shows="Testing retraction."),
    "too many admitted": Config({"page_size": 16, **SMALL, **BOLD}, 40, shows="Retract requests."),
    "aborts": Config({"page_size": 1}, aborts=True, shows="gone-"),
    "aborts, in pages": Config({"page_size": 16}, aborts=True, shows="gone-"),
    "sorted": Config({"page_size": 16, "schedule_policy": "lpm"}),
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
    "retraction": Config(PLAIN, variables=RETRACT, shows="Testing retraction."),
    "retraction, in pages": Config(PAGED, variables=RETRACT, shows="Testing retraction."),
    "too many admitted": Config({**PAGED, **SMALL, **BOLD}, 40, shows="Retract requests."),
    "aborts": Config(PLAIN, aborts=True, shows="gone-"),
    "aborts, in pages": Config(PAGED, aborts=True, shows="gone-"),
}


@pytest.fixture(scope="module")
def dense_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    require()
    return tiny_model(tmp_path_factory.mktemp("dense"))


@pytest.fixture(scope="module")
def hybrid_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    require()
    return tiny_hybrid_model(tmp_path_factory.mktemp("hybrid"))


@pytest.mark.parametrize("name", DENSE)
def test_tokens_are_the_same(tmp_path: Path, dense_model: Path, name: str) -> None:
    config = DENSE[name]
    compare(tmp_path, dense_model, config, {"ReqToTokenPool", "MHATokenToKVPool", slots(config)})


@pytest.mark.parametrize("name", HYBRID)
def test_tokens_of_hybrid_models_are_the_same(tmp_path: Path, hybrid_model: Path, name: str) -> None:
    config = HYBRID[name]
    made = {"HybridReqToTokenPool", "MambaSlotAllocator", "MHATokenToKVPool", slots(config)}
    compare(tmp_path, hybrid_model, config, made)


def slots(config: Config) -> str:
    return "TokenToKVPoolAllocator" if config.engine["page_size"] == 1 else "PagedTokenToKVPoolAllocator"


def compare(folder: Path, model: Path, config: Config, made: set[str]) -> None:
    """Serves the same on SGLang's own pools and on kvpool's, which must be those of `made`."""
    given = {"model": str(model), "requests": config.requests, "aborts": config.aborts}
    kvpool = {**config.variables, **PLUGIN_ON, **(TREE_ON if config.tree else {})}
    engines = [
        Started({**given, "engine": config.engine}, config.variables),
        Started({**given, "engine": {**config.engine, **config.pooled}}, kvpool),
    ]
    own, pooled = serve(folder, engines, spawn=config.spawn)
    assert pooled.tokens == own.tokens
    assert len({tuple(tokens) for tokens in own.tokens}) > 20
    for log in (own.log, pooled.log):
        assert config.shows in log, log[-4000:]
    # Nothing was freed twice or by the wrong caller: a strict pool would have ended the scheduler.
    assert "kvpool" not in own.log.replace(str(folder), "")
    for name in made:
        assert f"SGLang: {name} is kvpool's" in pooled.log
    if "disable_radix_cache" not in config.engine:
        assert min(own.cached, pooled.cached) > 0
        assert ("Tree Core: KvTreeCore" in pooled.log) is config.tree
