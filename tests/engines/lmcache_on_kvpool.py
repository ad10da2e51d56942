"""A plugin of pytest: LMCache's own tests, without its `conftest.py`, which needs more packages.

With `KVPOOL_LMCACHE=1` LMCache itself puts kvpool in, by its entry points. Every test fails if it has not,
and without the variable if it has.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
import torch
from lmcache.v1 import memory_management
from lmcache.v1.memory_allocators.mixed_memory_allocator import MixedMemoryAllocator
from lmcache.v1.metadata import LMCacheMetadata

if TYPE_CHECKING:
    from collections.abc import Iterator

IS_ON = os.environ.get("KVPOOL_LMCACHE") == "1"


@pytest.fixture(autouse=True, scope="session")
def on_kvpool() -> None:
    """Checks that LMCache uses kvpool if, and only if, it should."""
    assert (memory_management.AddressManager.__module__ == "kvpool.integrations.lmcache.memory") is IS_ON


@pytest.fixture(scope="session")
def memory_allocator() -> Iterator[Any]:
    """An allocator that tests share."""
    allocator = MixedMemoryAllocator(256 << 20)
    close, allocator.close = allocator.close, lambda: None
    yield allocator
    assert allocator.memcheck()
    close()


@pytest.fixture
def lmcache_engine_metadata() -> Any:  # noqa: ANN401
    """LMCache's metadata of a model."""
    return LMCacheMetadata(
        model_name="test_model",
        world_size=1,
        local_world_size=1,
        worker_id=0,
        local_worker_id=0,
        kv_dtype=torch.bfloat16,
        kv_shape=(32, 2, 256, 32, 128),
        use_mla=False,
        role="worker",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Names the markers of LMCache's tests."""
    for name in ("cuda", "no_shared_allocator"):
        config.addinivalue_line("markers", f"{name}: a marker of LMCache's tests")
