"""A spec of offloading that vLLM's settings name: both managers of chunks in lockstep."""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_offload.base import OffloadingManager
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

from kvpool.integrations.vllm.connector import KvpoolSpec
from kvpool.integrations.vllm.offload import KvpoolOffloadingManager

CALLS: dict[str, int] = {}
"""How often each method of the managers in lockstep was called."""


class Lockstep(OffloadingManager):  # type: ignore[misc]
    """vLLM's manager of chunks, with kvpool's beside it."""

    def __init__(self, *arguments: Any, **options: Any) -> None:  # noqa: ANN401
        self._sides = (
            CPUOffloadingManager(*arguments, **options),
            KvpoolOffloadingManager(*arguments, **options),
        )
        self.medium = self._sides[0].medium


def _seen(answer: Any) -> Any:  # noqa: ANN401
    """What can be compared of an answer."""
    if hasattr(answer, "keys_to_store"):
        return [*answer.keys_to_store], [*answer.store_spec.block_ids], [*answer.evicted_keys]
    if hasattr(answer, "block_ids"):
        return [*answer.block_ids]
    return repr(answer)


def _both(name: str) -> Any:  # noqa: ANN401
    def call(self: Lockstep, *arguments: Any, **options: Any) -> Any:  # noqa: ANN401
        CALLS[name] = CALLS.get(name, 0) + 1
        own, ours = (getattr(side, name)(*arguments, **options) for side in self._sides)
        if name == "take_events":
            own, ours = list(own), list(ours)
        assert _seen(own) == _seen(ours), (name, own, ours)
        return own

    return call


for _name in (
    "lookup", "get_load_source", "prepare_load", "touch", "complete_load", "prepare_store", "complete_store",
    "on_new_request", "on_request_finished", "take_events", "reset_cache", "config_info", "shutdown",
):  # fmt: skip
    setattr(Lockstep, _name, _both(_name))
Lockstep.__abstractmethods__ = frozenset()


class LockstepSpec(KvpoolSpec):
    """Host memory, by both managers."""

    def get_manager(self) -> OffloadingManager:
        return Lockstep(
            self.num_chunks,
            enable_events=self.kv_events_config.enable_kv_cache_events,
            info=self.cpu_info,
        )
