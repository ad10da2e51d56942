"""vLLM's schedulers over kvpool, for `--scheduler-cls`."""

from __future__ import annotations

from kvpool.integrations.vllm.replaced import install

install()

from kvpool.integrations.vllm.tokens import AsyncScheduler, Scheduler  # noqa: E402

__all__ = ["AsyncScheduler", "Scheduler"]
