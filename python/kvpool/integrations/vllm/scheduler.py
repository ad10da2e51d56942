"""vLLM's schedulers over kvpool, for `--scheduler-cls`."""

from __future__ import annotations

from kvpool.integrations.vllm.replaced import install

install()

from vllm.v1.core.sched.async_scheduler import AsyncScheduler as _AsyncScheduler  # noqa: E402
from vllm.v1.core.sched.scheduler import Scheduler as _Scheduler  # noqa: E402

__all__ = ["AsyncScheduler", "Scheduler"]


class Scheduler(_Scheduler):  # type: ignore[misc]  # vLLM has no types here
    """vLLM's `Scheduler`, over the classes that `kvpool.integrations.vllm.install` puts in."""


class AsyncScheduler(_AsyncScheduler):  # type: ignore[misc]
    """vLLM's `AsyncScheduler`, over the same."""
