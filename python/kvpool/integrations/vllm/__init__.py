"""vLLM 0.33 on kvpool: its pool of blocks, and its offloading of KV cache to host memory and to disk.

`pip install kvpool`, then start vLLM with `VLLM_PLUGINS=kvpool` in its environment: the scheduler's
blocks are those of `block_pool`. `offload` has the classes that vLLM's settings for offloading name; nothing
is replaced for that.
"""

from __future__ import annotations

import os

from kvpool.integrations.seams import EngineMismatchError

__all__ = ["is_switched_on", "register"]


def is_switched_on() -> bool:
    """Return whether the environment asks for kvpool: `VLLM_PLUGINS` names it, or `KVPOOL_VLLM` is 1.

    vLLM loads every installed plugin if `VLLM_PLUGINS` is not set, so the plugin must be switched on as well.
    """
    named = os.environ.get("VLLM_PLUGINS", "").split(",")
    return "kvpool" in (name.strip() for name in named) or os.environ.get("KVPOOL_VLLM") == "1"


def register() -> None:
    """Replace vLLM's pool of blocks by `block_pool.KvpoolBlockPool`.

    vLLM calls this in each of its processes. The call does nothing unless the plugin is switched on, or if it
    was called before.

    Raises:
        EngineMismatchError: If a class or a signature differs from the supported one, or another package has
            replaced vLLM's pool. Nothing is replaced then.
    """
    if not is_switched_on():
        return
    # vLLM is imported only once it is known to be used.
    from vllm.v1.core import block_pool, kv_cache_coordinator  # noqa: PLC0415

    from kvpool.integrations.vllm.block_pool import KvpoolBlockPool  # noqa: PLC0415

    found = kv_cache_coordinator.BlockPool
    if found is KvpoolBlockPool:
        return
    if found is not block_pool.BlockPool:
        raise EngineMismatchError(
            f"vLLM would make {found.__module__}.{found.__qualname__} for its blocks, and not its own "
            "BlockPool: only one of VLLM_PLUGINS can replace it"
        )
    kv_cache_coordinator.BlockPool = KvpoolBlockPool
