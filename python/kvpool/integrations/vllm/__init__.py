"""vLLM 0.32 and 0.33 on kvpool: its scheduler's memory, and its offloading to host memory and to disk.

`pip install kvpool`, then start vLLM with `VLLM_PLUGINS=kvpool` in its environment, or with
`--scheduler-cls kvpool.integrations.vllm.AsyncScheduler` (`Scheduler` without asynchronous scheduling).
Both do the same: blocks are those of `block_pool`, hashes come from `hashing`, `kv_cache_manager` finds
prefixes and answers steps, and `tokens` has the schedulers. `offload` has the classes that vLLM's settings
for offloading name; nothing is replaced for that.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

from kvpool.integrations.vllm.replaced import SEAMS, install

if TYPE_CHECKING:
    from kvpool.integrations.vllm.scheduler import AsyncScheduler, Scheduler

__all__ = ["SEAMS", "AsyncScheduler", "Scheduler", "install", "is_switched_on", "register"]


if not TYPE_CHECKING:  # a type checker would give every name this type

    def __getattr__(name: str) -> type:
        if name not in ("AsyncScheduler", "Scheduler"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        # vLLM is imported only once a class of it is needed.
        from kvpool.integrations.vllm import scheduler  # noqa: PLC0415

        return getattr(scheduler, name)


def is_switched_on() -> bool:
    """Return whether the environment asks for kvpool: `VLLM_PLUGINS` names it, or `KVPOOL_VLLM` is 1.

    vLLM loads every installed plugin if `VLLM_PLUGINS` is not set, so the plugin must be switched on as well.
    """
    named = os.environ.get("VLLM_PLUGINS", "").split(",")
    return "kvpool" in (name.strip() for name in named) or os.environ.get("KVPOOL_VLLM") == "1"


def register() -> None:
    """Call `install` if the plugin is switched on, and make kvpool's connectors known by their names.

    vLLM calls this in each of its processes.

    Raises:
        EngineMismatchError: As `install`.
    """
    if not is_switched_on():
        return
    install()
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory  # noqa: PLC0415

    for name, module in (("KvpoolConnector", "connector"), ("KvpoolTransferConnector", "transfer")):
        with suppress(ValueError):  # it is known already
            KVConnectorFactory.register_connector(name, f"{__name__}.{module}", name)
