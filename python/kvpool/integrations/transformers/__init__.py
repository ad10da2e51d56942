"""Unmodified causal language models of Hugging Face `transformers` (5.21 and later) on kvpool's pools.

`PooledModel` is a model for kvpool's engine, `PooledCache` a cache for the model's own `generate`. The module
`continuous` puts kvpool's allocator below the library's continuous batching.
"""

from kvpool.integrations.versions import TRANSFORMERS

with TRANSFORMERS.importing():
    from kvpool.integrations.transformers.arena_cache import ArenaCache
    from kvpool.integrations.transformers.cache import PooledCache
    from kvpool.integrations.transformers.model import PooledModel

__all__ = ["ArenaCache", "PooledCache", "PooledModel"]
