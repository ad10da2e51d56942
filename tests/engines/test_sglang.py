"""The real engine of SGLang on the CPU: the same tokens with kvpool's pools as with its own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from sglang_on_cpu import PLUGIN_ON, Served, require, serve, tiny_model

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.timeout(900),
    # From transformers, while a model is made.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

CONFIGS: dict[str, dict[str, Any]] = {
    "page size 1": {"engine": {"page_size": 1}},
    "page size 16": {"engine": {"page_size": 16}},
    "page size 64": {"engine": {"page_size": 64}},
    "without a prefix cache": {"engine": {"page_size": 1, "disable_radix_cache": True}},
    "without a prefix cache, in pages": {"engine": {"page_size": 64, "disable_radix_cache": True}},
    "without overlap": {"engine": {"page_size": 16, "disable_overlap_schedule": True}},
    "small chunks": {"engine": {"page_size": 16, "chunked_prefill_size": 32}},
    "pressure": {"requests": 40, "engine": {"page_size": 1, "max_total_tokens": 1024}},
    "pressure, in pages": {"requests": 40, "engine": {"page_size": 16, "max_total_tokens": 1024}},
    "retraction": {"engine": {"page_size": 1}, "variables": {"SGLANG_TEST_RETRACT": "1"}},
    "retraction, in pages": {"engine": {"page_size": 16}, "variables": {"SGLANG_TEST_RETRACT": "1"}},
    "aborts": {"aborts": True, "engine": {"page_size": 1}},
    "aborts, in pages": {"aborts": True, "engine": {"page_size": 16}},
    "sorted": {"engine": {"page_size": 16, "schedule_policy": "lpm"}},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    require()
    return tiny_model(tmp_path_factory.mktemp("model"))


def served(tmp_path: Path, model: Path, name: str) -> tuple[Served, Served]:
    """What SGLang generates on its own pools, and on kvpool's."""
    config = {"requests": 24, **CONFIGS[name], "model": str(model)}
    variables = config.pop("variables", {})
    with ThreadPoolExecutor(2) as threads:
        own = threads.submit(serve, tmp_path, config, **variables)
        pooled = threads.submit(serve, tmp_path, config, **variables, **PLUGIN_ON)
        return own.result(), pooled.result()


@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_are_the_same(tmp_path: Path, model: Path, name: str) -> None:
    own, pooled = served(tmp_path, model, name)
    assert pooled.tokens == own.tokens
    assert len({tuple(tokens) for tokens in own.tokens}) > 20
    assert "kvpool" not in own.log.replace(str(tmp_path), "")
    slots = (
        "TokenToKVPoolAllocator"
        if CONFIGS[name]["engine"]["page_size"] == 1
        else "PagedTokenToKVPoolAllocator"
    )
    for made in (slots, "ReqToTokenPool", "MHATokenToKVPool"):
        assert f"SGLang: {made} is kvpool's" in pooled.log
    # Nothing was freed twice or by the wrong caller: a strict pool would have ended the scheduler.
    if "prefix cache" not in name:
        assert min(own.cached, pooled.cached) > 0
