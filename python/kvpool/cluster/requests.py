"""The requests of a cluster."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

from kvpool.cluster.messages import Work
from kvpool.serving.generation import Generation

if TYPE_CHECKING:
    from collections.abc import Callable

State: TypeAlias = Literal["waiting", "prefill", "decode", "finished", "failed", "aborted"]


@dataclass(eq=False)
class ClusterRequest(Generation):
    """A prompt and its generated tokens, made by `Router.submit`.

    Attributes:
        on_token: Called with the request and each token, in order.
        state: "waiting" for a worker; "prefill" or "decode" on a worker of this role; and at the end
            "finished", "failed" or "aborted".
        workers: Names of the workers that the request was sent to, in order.
        losses: The number of these workers that were lost while they had the request.
        error: The reason why the request has failed.
    """

    on_token: Callable[[ClusterRequest, int], object] | None = None
    state: State = "waiting"
    workers: list[str] = field(default_factory=list)
    losses: int = 0
    error: str | None = None
    # While a worker has it: the number of the attempt, and its share of the worker's load, in tokens.
    attempt: int = -1
    load: int = 0
    # The attempt whose rows are lent, and the worker that lends them.
    lent: int = -1
    lender: str | None = None

    @property
    def is_over(self) -> bool:
        """Whether the request is finished, failed or aborted."""
        return self.state in {"finished", "failed", "aborted"}


def as_work(number: int, request: ClusterRequest) -> Work:
    """Return the message that sends a request to a worker."""
    sampling, namespace = request.sampling, request.namespace
    return Work(
        number=number,
        prompt=request.prompt,
        tokens=request.tokens,
        max_new_tokens=request.max_new_tokens,
        stop_tokens=[*request.stop_tokens],
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        seed=sampling.seed,
        namespace=None if isinstance(namespace, bytes) else namespace,
        namespace_bytes=namespace if isinstance(namespace, bytes) else None,
    )
