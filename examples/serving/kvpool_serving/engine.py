"""A small serving engine over kvpool's pools.

Each step runs one batch of the scheduler through the model, and samples a token for each request whose tokens
are all computed. A prefix cache keeps the full pages of finished and retracted requests until their slots are
needed: a request that begins like one of them, such as the next turn of a conversation, starts behind their
common prefix. A retracted request computes evicted tokens again; its output stays the same. With a tier below
the cache, evicted pages are loaded from there, layer by layer, where that is cheaper.
"""

from __future__ import annotations

from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import signature
from time import perf_counter
from typing import TYPE_CHECKING, Protocol

import torch

from kvpool import BatchPlanner, PrefixCache
from kvpool.errors import ArgumentError, ConfigError, StateError
from kvpool_serving.generation import Generation
from kvpool_serving.held import Held
from kvpool_serving.interrupts import Interrupts
from kvpool_serving.sampling import Sampling, sample
from kvpool_serving.scheduler import Scheduler
from kvpool_serving.swap import Arrivals, LoadError, Swap

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from kvpool import (
        BatchPlan,
        GDNPool,
        ReqToTokenPool,
        TokenToKVPoolAllocator,
    )
    from kvpool.typing import Namespace
    from kvpool_serving.moves import Move
    from kvpool_serving.options import SchedulerOptions
    from kvpool_serving.schedulable import State
    from kvpool_serving.step import Step
    from kvpool_serving.swap import SwapMode

__all__ = ["Engine", "Model", "Request", "Sampling"]


class Model(Protocol):
    """The interface of a model, implemented by `kvpool.integrations.transformers.PooledModel`.

    Attributes:
        table: The request table.
        allocator: The allocator of the slots of K and V.
        vocab_size: Size of the vocabulary.
    """

    table: ReqToTokenPool
    allocator: TokenToKVPoolAllocator
    vocab_size: int

    @property
    def gdn_pool(self) -> GDNPool | None:
        """States by request row, if there are any. A prefix cache keeps snapshots in its track slots."""

    def start(self, rows: Sequence[int]) -> None:
        """Reset the state of these request rows, for requests that start at their first token."""

    def forward(self, token_ids: torch.Tensor, plan: BatchPlan) -> torch.Tensor:
        """Return the logits `[B, vocab_size]` after the last of each request's new tokens, int64 `[T]`.

        The method may have a third parameter, `wait_layer: Callable[[int], object] | None = None`, to call
        with each layer of the pool of K and V before that is read (`PoolAttention` takes it). Then the later
        layers of a prefix come back from the tier below while the earlier ones compute. Without the
        parameter, all layers have arrived before the call.
        """


@dataclass(eq=False)
class Request(Generation):
    """A prompt and its generated tokens: a `Generation` of an engine.

    Attributes:
        on_token: Called with the request and each token, in order.
        owner: Owner of its row and slots, for pools with debugging.
        state: "waiting", "running", and at the end "finished" or "aborted".
        retractions: Number of retractions.
        prefix_len: Tokens found in the prefix cache at its last admission.
        held: The state of the request that only the engine reads and changes.
    """

    on_token: Callable[[Request, int], object] | None = None
    owner: str | int | None = None
    state: State = "waiting"
    retractions: int = 0
    prefix_len: int = 0
    held: Held = field(default_factory=Held, init=False, repr=False)
    _delivered: int = field(init=False, repr=False)  # tokens that `on_token` was called with, or need not be

    def __post_init__(self) -> None:
        self._delivered = len(self.tokens)

    @property
    def is_over(self) -> bool:
        """Whether the request is finished or aborted."""
        return self.state in {"finished", "aborted"}

    def _deliver_next(self) -> bool:
        """Call `on_token` with the next token not yet passed to it. Return whether there was one."""
        if self.on_token is None or self.state == "aborted" or self._delivered == len(self.tokens):
            return False
        self._delivered += 1
        self.on_token(self, self.tokens[self._delivered - 1])
        return True

    def between(self, begin: int, end: int) -> list[int]:
        """Return the prompt and generated tokens from position `begin` to `end`."""
        split = len(self.prompt)
        if (begin, end) == (0, split):
            return self.prompt
        return self.prompt[begin:end] + self.tokens[max(begin - split, 0) : max(end - split, 0)]


class Engine:
    """Serves requests with a model and its pools.

    Use an engine from one thread. `step` runs one batch; `run` and `stream` call it. Requests are served in
    the order of their submission. No exception loses a request, token or slot: call `step` again to go on.
    Ctrl-C ends a call while the model runs, or at the call's end.

    Args:
        model: The model and its pools.
        max_step_tokens: The most new tokens in a step, of prompts and of requests that decode.
        prefix_cache: Whether to make a prefix cache, so that prompts start behind their cached prefix. Or a
            `PrefixCache` over the model's allocator and states, such as one with a tier below (`tiers`) to
            which evicted pages are copied.
        swap: The treatment of the part of a prefix that only the tier has: "load" brings it back, "compute"
            computes it again, and "auto" does what takes less time, as measured. The tokens are the same.
        options: The options of its scheduler; by default `SchedulerOptions()`.

    Attributes:
        model: The model.
        max_step_tokens: The most new tokens in a step.
        prefix_cache: The prefix cache, if there is one.

    Raises:
        ConfigError: If `max_step_tokens` is too small for all requests of the table to decode in one step, or
            `swap` is not one of these.
    """

    def __init__(
        self,
        model: Model,
        max_step_tokens: int = 512,
        *,
        prefix_cache: bool | PrefixCache = True,
        swap: SwapMode = "auto",
        options: SchedulerOptions | None = None,
    ) -> None:
        if max_step_tokens < model.table.size:
            raise ConfigError(
                f"max_step_tokens is {max_step_tokens}; {model.table.size} requests may decode in one step"
            )
        self.model = model
        self.max_step_tokens = max_step_tokens
        planner = BatchPlanner(model.table, model.allocator, model.table.size, max_step_tokens)
        if prefix_cache is True:
            prefix_cache = PrefixCache(model.allocator, states=model.gdn_pool)
        self.prefix_cache: PrefixCache | None = prefix_cache or None
        self._swap = Swap(swap)
        self._scheduler: Scheduler[Request] = Scheduler(
            planner, self.prefix_cache, self._swap.pays, fetches=swap != "compute", options=options
        )
        tiers = () if self.prefix_cache is None else self.prefix_cache.tiers
        self._layers = tiers[0].kv.layer_num if tiers else 0  # whose K and V may be loaded
        self._overlaps = "wait_layer" in signature(model.forward).parameters
        self._capacity = model.allocator.stats()["capacity"]
        self._undelivered: deque[Request] = deque()  # may have tokens not yet passed to callbacks
        self._interrupts = Interrupts()
        self._is_changing = False
        self._is_broken = False  # whether a change has begun, and neither ended nor been repaired
        self._counts = dict.fromkeys(
            ("aborted", "steps", "computed_tokens", "found_tokens", "loaded_tokens", "generated_tokens"), 0
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
        namespace: Namespace = None,
        tokens: Sequence[int] = (),
        move: Move | None = None,
    ) -> Request:
        """Queue a request.

        Args:
            prompt: Tokens of the prompt, at least one.
            max_new_tokens: The most tokens to generate, at least one.
            stop_tokens: Tokens that end the request.
            sampling: Sampling parameters; by default the most likely token is selected.
            on_token: Called with the request and each token; `step` propagates its exceptions.
            owner: A name for `leaks` and snapshots of pools with debugging, such as the request's id.
            namespace: Requests share cached prefixes only with those of the same namespace, such as an
                adapter or a tenant.
            tokens: The first of the new tokens, if another process has generated them. `on_token` is not
                called with these.
            move: A move of the K, V and states of all tokens but the last from the process that has computed
                them; this engine computes them only if the move fails. Or a move to another process: it
                begins when the next token is generated, unless that is the last one, and the request is
                finished here when the move is over.

        Returns:
            The request.

        Raises:
            ArgumentError: If the request table or the pool is too small for the request alone, the prompt is
                empty, a token is not in the vocabulary, or `tokens` has `max_new_tokens` tokens already.
        """
        prompt, tokens = [int(token) for token in prompt], [int(token) for token in tokens]
        prompt_len, vocab_size = len(prompt), self.model.vocab_size
        unknown = [token for token in prompt + tokens if not 0 <= token < vocab_size]
        if prompt_len < 1 or max_new_tokens < 1:
            raise ArgumentError(
                f"{prompt_len} prompt and {max_new_tokens} new tokens; at least one of each is needed"
            )
        if unknown:
            raise ArgumentError(
                f"the request has token {unknown[0]}, the vocabulary is 0 to {vocab_size - 1}"
            )
        needed = prompt_len + max_new_tokens - 1  # the last token is not computed
        context, capacity = self.model.table.max_context_len, self._capacity
        if needed > min(context, capacity):
            raise ArgumentError(
                f"{prompt_len} prompt and {max_new_tokens} new tokens need {needed} slots; a row of the "
                f"request table has {context}, the pool {capacity}"
            )
        request = Request(
            prompt=prompt,
            max_new_tokens=max_new_tokens,
            stop_tokens=frozenset(stop_tokens),
            sampling=sampling or Sampling(),
            namespace=namespace,
            tokens=tokens,
            on_token=on_token,
            owner=owner,
        )
        request.held.move = move
        if request.is_complete:
            raise ArgumentError(
                f"the request has all of its tokens: {len(tokens)} of at most {max_new_tokens}"
            )
        with self._interrupts.deferred():
            self._scheduler.submit(request)
        return request

    def fork(
        self,
        request: Request,
        *,
        sampling: Sampling | None = None,
        on_token: Callable[[Request, int], object] | None = None,
        owner: str | int | None = None,
    ) -> Request:
        """Queue a copy of a request, which continues after the tokens generated so far.

        For several samples of one prompt, fork the request after a step that has computed its prompt: with a
        prefix cache, the copies compute only the tokens of the last, partial page.

        Args:
            request: A request that is not over.
            sampling: Sampling parameters; by default those of the request.
            on_token: Called with the copy and each new token, not with the tokens generated so far.
            owner: A name of the copy for `leaks` and snapshots of pools with debugging.

        Returns:
            The copy.

        Raises:
            StateError: If the request is over.
        """
        if request.is_over:
            raise StateError(f"the request is {request.state}; submit its tokens as a prompt instead")
        copy = Request(
            prompt=request.prompt,
            max_new_tokens=request.max_new_tokens,
            stop_tokens=request.stop_tokens,
            sampling=sampling or request.sampling,
            namespace=request.namespace,
            tokens=[*request.tokens],
            on_token=on_token,
            owner=owner,
        )
        with self._interrupts.deferred():
            if request.state == "running":
                self._scheduler.publish(request)
            self._scheduler.submit_fork(copy)
        return copy

    def step(self) -> bool:
        """Run one batch, if there is anything to run, and call the callbacks with its tokens.

        Returns:
            Whether requests are waiting, running or moving.

        Raises:
            StateError: If the model calls it during a step.
            OutOfMemoryError: If slots with other owners leave no room for any request.
            Exception: Any exception of the model or a callback. If a batch fails, the running requests are
                retracted, and the next step calls the remaining callbacks. A load that fails raises nothing:
                the running requests are retracted, and the next step computes their tokens.
        """
        with self._interrupts.deferred():
            self._deliver()
            try:
                self._run_batch()
            except LoadError:
                # The running requests are retracted. The next step computes the tokens that were not loaded.
                return True
            self._deliver()
            return not self._scheduler.is_idle

    def run(self) -> None:
        """Step until every request is over."""
        while self.step():
            pass

    def stream(self, request: Request) -> Iterator[int]:
        """Yield a request's tokens as they are generated; runs steps, which serve all requests."""
        return request.follow(self.step)

    def abort(self, request: Request) -> None:
        """Abort a request and free its slots. Those of a moving request are free when its move is over.

        A request that is over stays as it is.

        Raises:
            StateError: If the model calls it during a step. Callbacks may abort requests.
        """
        with self._changing():
            if request.is_over:
                return
            if request.state == "waiting":
                request.state = "aborted"
                self._scheduler.withdraw(request)
            elif request in self._scheduler.moving:
                self._scheduler.abandon(request)
            else:
                self._scheduler.release([request], "aborted")
            self._counts["aborted"] += 1

    def stats(self) -> dict[str, int]:
        """Return current and cumulative statistics.

        `running`, `waiting`, `finished` and `aborted` requests, those that are `moving` to another process or
        from there, `retractions`, `steps`, `computed_tokens` (those recomputed after a retraction included),
        `found_tokens` (of prefixes that were cached when a request was admitted), `loaded_tokens` (those of
        them that came back from the tier below), `fetched_tokens` (those that came to that tier from a
        store), `generated_tokens`, and slots: `in_use` by requests, or by a copy to or from the tier, and
        `cached`, which requests may use as well, of `capacity`. A step that an exception has ended may be
        missing from the cumulative ones.
        """
        scheduler, cache, allocator = self._scheduler, self.prefix_cache, self.model.allocator
        obtainable = allocator.available_size() if cache is None else cache.obtainable_size()
        return {
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting) + len(scheduler.fetching),
            "moving": len(scheduler.moving),
            "retractions": scheduler.retractions,
            "finished": scheduler.released["finished"],
            **self._counts,
            "fetched_tokens": scheduler.fetched_tokens,
            "in_use": self._capacity - obtainable,
            "cached": 0 if cache is None else cache.cached_size(),
            "capacity": self._capacity,
        }

    def _run_batch(self) -> None:
        """Plan a batch, run it, and append the tokens."""
        with self._changing():
            begin, waits = perf_counter(), self._scheduler.waits
            step = self._scheduler.plan()
            if step is None:
                return
            chunk_tokens, loads = step.chunk_tokens, step.loads
            loaded, new_tokens = sum(load.length for load in loads), step.plan.num_tokens
            with self._interrupts.allowed():
                tokens = self._forward(step)
            self._counts["steps"] += 1
            self._counts["computed_tokens"] += new_tokens
            self._counts["found_tokens"] += sum(request.prefix_len for request in step.started)
            self._counts["loaded_tokens"] += loaded
            self._scheduler.record_computed(step)
            self._extend(tokens)
            if self._layers and waits == self._scheduler.waits:
                # The host has waited for the logits of requests that got a token.
                seconds = perf_counter() - begin
                self._swap.record_step(seconds, chunk_tokens, loaded, is_over=bool(tokens))

    def _forward(self, step: Step[Request]) -> list[tuple[Request, int]]:
        """Run the model, and sample a token for each request whose tokens are all computed now."""
        batch, ends, loads = step.requests, step.ends, step.loads
        arrivals = Arrivals(loads, self._layers, self._scheduler.record_failed_load)
        self.model.start([request.held.row for request in step.started if request.held.cached == 0])
        for request in step.started:
            if request.held.lease is not None and self.model.gdn_pool is not None:
                arrivals.wait_layer(0)  # states arrive before layer 0
                request.held.lease.restore(request.held.row)
        new = [t for r, end in zip(batch, ends, strict=True) for t in r.between(r.held.cached, end)]
        token_ids = torch.tensor(new, device=self._scheduler.planner.device)
        forward: Callable[..., torch.Tensor] = self.model.forward
        if self._overlaps:
            logits = forward(token_ids, step.plan, wait_layer=arrivals.wait_layer)
        else:
            arrivals.wait()
            logits = forward(token_ids, step.plan)
        arrivals.wait()
        ready = [i for i, r in enumerate(batch) if ends[i] == r.seq_len]
        picked = sample(logits[ready], [(batch[i].sampling, batch[i].seq_len) for i in ready])
        return [(batch[i], token) for i, token in zip(ready, picked, strict=True)]

    def _extend(self, tokens: list[tuple[Request, int]]) -> None:
        """Append new tokens to their requests, and release finished requests."""
        self._undelivered.extend([request for request, _ in tokens])
        for request, token in tokens:
            request.tokens.append(token)
        self._counts["generated_tokens"] += len(tokens)
        self._scheduler.release([request for request, _ in tokens if request.is_complete], "finished")
        for request, _ in tokens:
            if request.held.move is not None and request.state == "running":
                self._scheduler.hand_over(request)

    def _deliver(self) -> None:
        """Call the callbacks with the tokens not yet passed to them."""
        while self._undelivered:
            request = self._undelivered[0]
            if not request._deliver_next():  # noqa: SLF001 - of this module
                self._undelivered.popleft()

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Guard a change of the scheduler: if an exception ends it, the running requests are retracted.

        If another exception comes meanwhile, the next change begins with that.
        """
        if self._is_changing:
            raise StateError(
                "the engine is in the middle of a step: its model cannot step it or abort requests"
            )
        with self._interrupts.deferred():
            if self._is_broken:
                self._retract()
            self._is_changing = self._is_broken = True
            try:
                yield
            except BaseException:
                self._retract()
                self._is_broken = False
                raise
            finally:
                self._is_changing = False
            self._is_broken = False

    def _retract(self) -> None:
        """Retract all running requests, after an exception."""
        self._swap.drop_open()
        self._scheduler.retract_all()
