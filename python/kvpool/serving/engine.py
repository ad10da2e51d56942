"""A small serving engine over kvpool's pools.

Each step runs one batch of the scheduler through the model and samples a token for each request whose tokens
are all computed. A request that ends gives its slots back at once. One that was retracted later computes its
prompt and what it generated again, so that its tokens stay the same.
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
    """What the engine needs of a model; `kvpool.integrations.transformers.PooledModel` has it."""

    table: ReqToTokenPool
    allocator: TokenToKVPoolAllocator
    vocab_size: int

    def start(self, rows: Sequence[int]) -> None:
        """Forget what is kept by request row, where new requests begin."""

    def forward(self, token_ids: torch.Tensor, plan: BatchPlan) -> torch.Tensor:
        """Logits `[B, vocab_size]` after the last of each request's new tokens, int64 `[T]`."""


@dataclass(eq=False)
class Request:
    """A prompt and what was generated after it.

    Attributes:
        prompt: Its tokens.
        max_new_tokens: It ends after so many generated tokens,
        stop_tokens: or with one of these, which is the last of `tokens` then.
        sampling: How tokens are picked.
        on_token: Called with the request and each token, in order.
        owner: Who its row and slots belong to, for pools that debug.
        tokens: What was generated so far.
        state: "waiting", "running", and in the end "finished" or "aborted".
        retractions: How often it had to give its slots back.
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
    # While it runs: its row in the request table, and how many of its tokens have slots.
    row: int = 0
    cached: int = 0

    @property
    def is_over(self) -> bool:
        """Whether it gets no more tokens."""
        return self.state in {"finished", "aborted"}

    @property
    def seq_len(self) -> int:
        """Tokens of the prompt and after it."""
        return len(self.prompt) + len(self.tokens)

    def between(self, begin: int, end: int) -> list[int]:
        """Tokens of the prompt and after it, from one position to another."""
        split = len(self.prompt)
        return self.prompt[begin:end] + self.tokens[max(begin - split, 0) : max(end - split, 0)]


class Engine:
    """Serves requests with a model and its pools.

    Calls are for one thread. `step` runs one batch; `run` and `stream` call it. What was submitted first is
    served first.

    Args:
        model: The model and its pools.
        max_step_tokens: New tokens in a step, of prompts and of requests that decode.

    Raises:
        ConfigError: If not every request in the table could decode in one step.
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
        self._news: deque[tuple[Request, int]] = deque()  # what callbacks have yet to be told
        self._counts = dict.fromkeys(
            ("finished", "aborted", "steps", "computed_tokens", "generated_tokens"), 0
        )

    def submit(  # noqa: PLR0913 - a request and what it may have
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
            prompt: Its tokens, at least one.
            max_new_tokens: The most tokens to generate, at least one.
            stop_tokens: Tokens that end it.
            sampling: How tokens are picked, by default the most likely one.
            on_token: Called with the request and each token; what it raises, `step` raises.
            owner: A name for `leaks` and snapshots of pools that debug, such as the request's id.

        Returns:
            The request.

        Raises:
            ConfigError: If the request table or the pool is too small for it, even alone, or it has no tokens
                or some that the model does not know.
        """
        prompt = [int(token) for token in prompt]
        given, vocab_size = len(prompt), self.model.vocab_size
        unknown = [token for token in prompt if not 0 <= token < vocab_size]
        if given < 1 or max_new_tokens < 1:
            raise ConfigError(f"{given} prompt and {max_new_tokens} new tokens; there must be one of each")
        if unknown:
            raise ConfigError(f"the prompt has token {unknown[0]}, the model knows 0 to {vocab_size - 1}")
        needed = given + max_new_tokens - 1  # the last token is not computed any more
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
        """Run one batch, if there is anything to run, and tell the callbacks of its tokens.

        Returns:
            Whether requests are waiting or running.

        Raises:
            OutOfMemoryError: If slots that others took from the pool leave no room for any request.
            Exception: What the model or a callback raises. The requests of a batch that failed are retracted,
                and callbacks that were not called yet are called by the next step.
        """
        self._tell()
        step = self._scheduler.plan()
        if step is not None:
            with ExitStack() as failed:
                # The oldest last, so that it is the first again; and each, even if another cannot be.
                for request in step.requests:
                    failed.callback(self._scheduler.retract, request)
                tokens = self._forward(step)
                failed.pop_all()
            self._extend(tokens)
            self._tell()
        return not self._scheduler.is_idle

    def run(self) -> None:
        """Step until every request is over."""
        while self.step():
            pass

    def stream(self, request: Request) -> Iterator[int]:
        """A request's tokens, each as soon as it is there; steps, with all requests, when there is none."""
        given = 0
        while given < len(request.tokens) or not request.is_over:
            if given < len(request.tokens):
                given += 1
                yield request.tokens[given - 1]
            else:
                self.step()

    def abort(self, request: Request) -> None:
        """End a request now, and give its slots back. One that is over stays as it is."""
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
        """Numbers of this moment and of the whole time.

        `running`, `waiting`, `finished` and `aborted` requests, `retractions`, `steps`, `computed_tokens`
        (again after a retraction), `generated_tokens`, and slots: `in_use` of a `capacity`.
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
        """Runs the model, and picks a token for each request all of whose tokens are computed now."""
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
        """Gives requests their new tokens; those that end give their slots back."""
        for request, token in tokens:
            request.tokens.append(token)
        self._counts["generated_tokens"] += len(tokens)
        self._news.extend(tokens)
        ended = [r for r, token in tokens if len(r.tokens) == r.max_new_tokens or token in r.stop_tokens]
        for request in ended:
            request.state = "finished"
        self._counts["finished"] += len(ended)
        self._scheduler.release(ended)

    def _tell(self) -> None:
        while self._news:
            request, token = self._news.popleft()
            if request.on_token is not None and request.state != "aborted":
                request.on_token(request, token)
