"""A small serving engine over kvpool's pools.

Each step runs one batch of the scheduler through the model, and samples a token for each request whose tokens
are all computed. The slots of a finished request are freed at once. A retracted request recomputes its prompt
and its generated tokens later, so that its output stays the same.
"""

from __future__ import annotations

from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch

from kvpool._kvpool import BatchPlanner
from kvpool.errors import ConfigError
from kvpool.serving.sampling import Sampling, sample
from kvpool.serving.scheduler import Scheduler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from kvpool._kvpool import BatchPlan, ReqToTokenPool, TokenToKVPoolAllocator
    from kvpool.serving.scheduler import State, Step

__all__ = ["Engine", "Model", "Request", "Sampling"]


class Model(Protocol):
    """The interface of a model, implemented by `kvpool.integrations.transformers.PooledModel`."""

    table: ReqToTokenPool
    allocator: TokenToKVPoolAllocator
    vocab_size: int

    def start(self, rows: Sequence[int]) -> None:
        """Reset the state of these request rows, for new requests."""

    def forward(self, token_ids: torch.Tensor, plan: BatchPlan) -> torch.Tensor:
        """Logits `[B, vocab_size]` after the last of each request's new tokens, int64 `[T]`."""


@dataclass(eq=False)
class Request:
    """A prompt and its generated tokens.

    Attributes:
        prompt: Tokens of the prompt.
        max_new_tokens: The most tokens to generate.
        stop_tokens: Tokens that end the request; such a token is the last of `tokens`.
        sampling: Sampling parameters.
        on_token: Called with the request and each token, in order.
        owner: Owner of its row and slots, for pools with debugging.
        tokens: Tokens generated so far.
        state: "waiting", "running", and at the end "finished" or "aborted".
        retractions: Number of retractions.
    """

    prompt: list[int]
    max_new_tokens: int
    stop_tokens: frozenset[int] = frozenset()
    sampling: Sampling = field(default_factory=Sampling)
    on_token: Callable[[Request, int], object] | None = None
    owner: str | int | None = None
    tokens: list[int] = field(default_factory=list)
    state: State = "waiting"
    retractions: int = 0
    # While running: the row in the request table, and the number of tokens with slots.
    row: int = 0
    cached: int = 0

    @property
    def is_over(self) -> bool:
        """Whether the request is finished or aborted."""
        return self.state in {"finished", "aborted"}

    @property
    def seq_len(self) -> int:
        """Number of prompt and generated tokens."""
        return len(self.prompt) + len(self.tokens)

    def between(self, begin: int, end: int) -> list[int]:
        """Prompt and generated tokens from position `begin` to `end`."""
        split = len(self.prompt)
        return self.prompt[begin:end] + self.tokens[max(begin - split, 0) : max(end - split, 0)]


class Engine:
    """Serves requests with a model and its pools.

    Use an engine from one thread. `step` runs one batch; `run` and `stream` call it. Requests are served in
    the order of their submission.

    Args:
        model: The model and its pools.
        max_step_tokens: The most new tokens in a step, of prompts and of requests that decode.

    Raises:
        ConfigError: If `max_step_tokens` is too small for all requests of the table to decode in one step.
    """

    def __init__(self, model: Model, max_step_tokens: int = 512) -> None:
        if max_step_tokens < model.table.size:
            raise ConfigError(
                f"max_step_tokens is {max_step_tokens}; {model.table.size} requests may decode in one step"
            )
        self.model = model
        self.max_step_tokens = max_step_tokens
        planner = BatchPlanner(model.table, model.allocator, model.table.size, max_step_tokens)
        self._scheduler: Scheduler[Request] = Scheduler(planner)
        self._capacity = model.allocator.stats()["capacity"]
        self._undelivered: deque[tuple[Request, int]] = deque()  # tokens not yet passed to callbacks
        self._counts = dict.fromkeys(
            ("finished", "aborted", "steps", "computed_tokens", "generated_tokens"), 0
        )

    def submit(  # noqa: PLR0913 - the options of a request
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        *,
        stop_tokens: Iterable[int] = (),
        sampling: Sampling | None = None,
        on_token: Callable[[Request, int], object] | None = None,
        owner: str | int | None = None,
    ) -> Request:
        """Queue a request.

        Args:
            prompt: Tokens of the prompt, at least one.
            max_new_tokens: The most tokens to generate, at least one.
            stop_tokens: Tokens that end the request.
            sampling: Sampling parameters; by default the most likely token is selected.
            on_token: Called with the request and each token; `step` propagates its exceptions.
            owner: A name for `leaks` and snapshots of pools with debugging, such as the request's id.

        Returns:
            The request.

        Raises:
            ConfigError: If the request table or the pool is too small for the request alone, the prompt is
                empty, or a token is not in the vocabulary.
        """
        prompt = [int(token) for token in prompt]
        given, vocab_size = len(prompt), self.model.vocab_size
        unknown = [token for token in prompt if not 0 <= token < vocab_size]
        if given < 1 or max_new_tokens < 1:
            raise ConfigError(
                f"{given} prompt and {max_new_tokens} new tokens; at least one of each is needed"
            )
        if unknown:
            raise ConfigError(f"the prompt has token {unknown[0]}, the vocabulary is 0 to {vocab_size - 1}")
        needed = given + max_new_tokens - 1  # the last token is not computed
        context, capacity = self.model.table.max_context_len, self._capacity
        if needed > min(context, capacity):
            raise ConfigError(
                f"{given} prompt and {max_new_tokens} new tokens need {needed} slots; a row of the request "
                f"table has {context}, the pool {capacity}"
            )
        request = Request(
            prompt,
            max_new_tokens,
            frozenset(stop_tokens),
            sampling or Sampling(),
            on_token,
            owner,
        )
        self._scheduler.waiting.append(request)
        return request

    def step(self) -> bool:
        """Run one batch, if there is anything to run, and call the callbacks with its tokens.

        Returns:
            Whether requests are waiting or running.

        Raises:
            OutOfMemoryError: If slots with other owners leave no room for any request.
            Exception: Any exception of the model or a callback. The requests of a failed batch are retracted,
                and the next step calls the remaining callbacks.
        """
        self._deliver()
        step = self._scheduler.plan()
        if step is not None:
            with ExitStack() as failed:
                # In reverse, so that the oldest is first in the queue again; all of them, even if one fails.
                for request in step.requests:
                    failed.callback(self._scheduler.retract, request)
                tokens = self._forward(step)
                failed.pop_all()
            self._extend(tokens)
            self._deliver()
        return not self._scheduler.is_idle

    def run(self) -> None:
        """Step until every request is over."""
        while self.step():
            pass

    def stream(self, request: Request) -> Iterator[int]:
        """Yield a request's tokens as they are generated; runs steps, which serve all requests."""
        given = 0
        while given < len(request.tokens) or not request.is_over:
            if given < len(request.tokens):
                given += 1
                yield request.tokens[given - 1]
            else:
                self.step()

    def abort(self, request: Request) -> None:
        """Abort a request and free its slots. A request that is over stays as it is."""
        before = request.state
        if request.is_over:
            return
        request.state = "aborted"
        self._counts["aborted"] += 1
        if before == "waiting":
            self._scheduler.waiting.remove(request)
        else:
            self._scheduler.release([request])

    def stats(self) -> dict[str, int]:
        """Return current and cumulative statistics.

        `running`, `waiting`, `finished` and `aborted` requests, `retractions`, `steps`, `computed_tokens`
        (those recomputed after a retraction included), `generated_tokens`, and slots: `in_use` of `capacity`.
        """
        scheduler = self._scheduler
        return {
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            "retractions": scheduler.retractions,
            **self._counts,
            "in_use": self._capacity - self.model.allocator.available_size(),
            "capacity": self._capacity,
        }

    def _forward(self, step: Step[Request]) -> list[tuple[Request, int]]:
        """Run the model, and sample a token for each request whose tokens are all computed now."""
        batch, ends = step.requests, step.ends
        self.model.start([request.row for request in batch if request.cached == 0])
        new = [t for r, end in zip(batch, ends, strict=True) for t in r.between(r.cached, end)]
        token_ids = torch.tensor(new, device=self._scheduler.planner.device)
        logits = self.model.forward(token_ids, step.plan)
        ready = [i for i, r in enumerate(batch) if ends[i] == r.seq_len]
        picked = sample(logits[ready], [(batch[i].sampling, batch[i].seq_len) for i in ready])
        for request, end in zip(batch, ends, strict=True):
            request.cached = end
        self._counts["steps"] += 1
        self._counts["computed_tokens"] += len(new)
        return [(batch[i], token) for i, token in zip(ready, picked, strict=True)]

    def _extend(self, tokens: list[tuple[Request, int]]) -> None:
        """Append new tokens to their requests, and release finished requests."""
        for request, token in tokens:
            request.tokens.append(token)
        self._counts["generated_tokens"] += len(tokens)
        self._undelivered.extend(tokens)
        ended = [r for r, token in tokens if len(r.tokens) == r.max_new_tokens or token in r.stop_tokens]
        for request in ended:
            request.state = "finished"
        self._counts["finished"] += len(ended)
        self._scheduler.release(ended)

    def _deliver(self) -> None:
        while self._undelivered:
            request, token = self._undelivered.popleft()
            if request.on_token is not None and request.state != "aborted":
                request.on_token(request, token)
