"""`KvpoolTransferConnector`, with the places of a hand-off at which `vllm_pair.reach` may kill an engine."""

from __future__ import annotations

from typing import Any

from vllm_pair import reach

from kvpool.integrations.vllm import transfer
from kvpool.integrations.vllm.transfer_scheduler import TransferScheduler
from kvpool.integrations.vllm.transfer_worker import TransferWorker
from kvpool.remote import Endpoint
from kvpool.remote.reads import Reads


def at(owner: type, name: str, place: str, *, before: bool = True, when: Any = lambda *_: True) -> None:  # noqa: ANN401
    """Makes a method reach a place before or after what it does."""
    own = getattr(owner, name)

    def reaching(self: Any, *arguments: Any, **options: Any) -> Any:  # noqa: ANN401
        is_there = when(self, *arguments)
        if before and is_there:
            reach(place)
        found = own(self, *arguments, **options)
        if not before and is_there:
            reach(place)
        return found

    setattr(owner, name, reaching)


def is_in_parts(scheduler: TransferScheduler, output: Any) -> bool:  # noqa: ANN401
    """Whether a prompt is computed of which tokens were computed before."""
    requests = {name: prefill.request for name, prefill in scheduler._prefills.items()}
    return any(requests[name].num_computed_tokens for name in requests.keys() & output.num_scheduled_tokens)


def is_prefill(_: TransferScheduler, request: Any, *__: Any) -> bool:  # noqa: ANN401
    """Whether a request's prompt is computed for another engine."""
    return bool((request.kv_transfer_params or {}).get("do_remote_decode"))


at(TransferScheduler, "add", "added", before=False, when=is_prefill)
at(TransferScheduler, "plan", "computing", when=is_in_parts)
at(TransferWorker, "_lend", "lent", before=False)
at(TransferScheduler, "finished", "finished", before=False, when=is_prefill)
at(TransferScheduler, "allocated", "allocated", before=False, when=lambda self, request, *_: (
    request.request_id in self._arrivals
))  # fmt: skip
at(Endpoint, "connect", "connecting")
at(Endpoint, "connect", "connected", before=False)
at(Reads, "begin", "reading", before=False)
at(Reads, "_has_arrived", "checking", when=lambda _, read: read.step == "reading")
at(Reads, "_has_arrived", "arrived", when=lambda _, read: read.step == "checking")


class DyingConnector(transfer.KvpoolTransferConnector):
    """The connector, in whose modules the places are."""
