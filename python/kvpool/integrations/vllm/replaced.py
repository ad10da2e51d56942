"""What of vLLM the plugin replaces, and where it says so. vLLM is imported only once it is asked for."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from kvpool.integrations.seams import EngineMismatchError, version_of_module

if TYPE_CHECKING:
    from prometheus_client import Gauge

__all__ = ["SEAMS", "install"]

SEAMS = ("blocks", "hashes", "prefixes", "steps")
"""What is kvpool's in a vLLM that runs on it: pool, hashing, look-ups, and steps that need no block.

The log and the metric add "tokens" where the schedulers are kvpool's, too.
"""


def install() -> None:
    """Let vLLM make kvpool's classes and functions in the place of its own, in this process.

    Replaced are three names, where vLLM looks them up: the pool of blocks, the manager of KV cache, and the
    function that hashes blocks; and both schedulers, if vLLM's are those that kvpool's were written after
    and no other package has replaced them. A second call does nothing.

    Raises:
        EngineMismatchError: If a class or a signature differs from the supported one, or another package has
            replaced one of the three. Nothing is replaced then.
    """
    from vllm.v1.core import block_pool, kv_cache_coordinator, kv_cache_manager, kv_cache_utils  # noqa: PLC0415
    from vllm.v1.core.sched import async_scheduler, scheduler  # noqa: PLC0415
    from vllm.v1.engine import core  # noqa: PLC0415

    from kvpool.integrations.vllm import tokens  # noqa: PLC0415
    from kvpool.integrations.vllm.block_pool import KvpoolBlockPool  # noqa: PLC0415
    from kvpool.integrations.vllm.hashing import get_request_block_hasher  # noqa: PLC0415
    from kvpool.integrations.vllm.kv_cache_manager import KvpoolKVCacheManager  # noqa: PLC0415

    replaced: list[tuple[Any, Any, Any]] = [
        (kv_cache_coordinator, block_pool.BlockPool, KvpoolBlockPool),
        (scheduler, kv_cache_manager.KVCacheManager, KvpoolKVCacheManager),
        (core, kv_cache_utils.get_request_block_hasher, get_request_block_hasher),
    ]
    seams: tuple[str, ...] = SEAMS
    if tokens.IS_KNOWN:
        for module, ours in ((scheduler, tokens.Scheduler), (async_scheduler, tokens.AsyncScheduler)):
            own = ours.__bases__[-1]
            if getattr(module, own.__name__) in (own, ours):
                replaced.append((module, own, ours))
                seams = (*SEAMS, "tokens")
    for module, own, ours in replaced:
        found = getattr(module, own.__name__)
        if found is not own and found is not ours:
            raise EngineMismatchError(
                f"vLLM would use {found.__module__}.{found.__qualname__}, and not its own {own.__name__}: "
                "only one of VLLM_PLUGINS can replace it"
            )
    if any(getattr(module, own.__name__) is not ours for module, own, ours in replaced):
        for module, own, ours in replaced:
            setattr(module, own.__name__, ours)
        _tell(seams)


def _tell(seams: tuple[str, ...]) -> None:
    """Say in vLLM's log and in its metrics that kvpool is in use."""
    from vllm.logger import init_logger  # noqa: PLC0415

    import kvpool  # noqa: PLC0415
    from kvpool.integrations.vllm.seams import VLLM  # noqa: PLC0415

    found = version_of_module(VLLM.package)
    # A logger of another name has no handler in vLLM.
    init_logger("vllm.plugins.kvpool").info(
        "vLLM %s is on kvpool %s: %s", found, kvpool.__version__, ", ".join(seams)
    )
    _metric().labels("vllm", found, kvpool.__version__, ",".join(seams)).set(1)


@cache
def _metric() -> Gauge:
    from prometheus_client import Gauge  # noqa: PLC0415 - vLLM's, not kvpool's

    # vLLM removes collectors with its own name in theirs.
    return Gauge(
        "kvpool_engine_info",
        "An engine that this process runs on kvpool, and what is kvpool's",
        ["engine", "engine_version", "version", "seams"],
        multiprocess_mode="max",
    )
