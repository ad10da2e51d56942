"""The tests of the library: see `support/shared_fixtures.py`."""

from __future__ import annotations

import sys

pytest_plugins = ["shared_fixtures"]

# They need `transformers`, which has no version for older ones.
collect_ignore = [
    f"test_{name}.py"
    for name in (
        "lmcache_allocators",
        "plan",
        "plan_conventions",
        "pooled_cache",
        "transformers",
        "vllm_plugin",
    )
    if sys.version_info < (3, 11)
]
