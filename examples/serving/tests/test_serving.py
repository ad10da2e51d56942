"""`Engine` and `sample`, with a model that reads the tokens of each request back from the pool."""

from __future__ import annotations

import functools
import itertools
import os
import random
import sys
from typing import TYPE_CHECKING, Any

import devices
import numpy as np
import pytest
import torch
from common import some
from devices import to_current
from engine_interrupts import Interrupts, Place, delivered, get
from kvpool_serving import Engine, Request
from kvpool_serving.sampling import Sampling, sample
from pool_reader import VOCAB, PoolReader, alone, is_whole

from kvpool import ArgumentError, ConfigError, OutOfMemoryError, PrefixCache, StateError

if TYPE_CHECKING:
    from collections.abc import Callable

    from shared_fixtures import RunSnippet

    from kvpool import BatchPlan


pytestmark = pytest.mark.usefixtures("device")


def some_prompts(n: int, longest: int = 60, seed: int = 0) -> list[list[int]]:
    chance = np.random.default_rng(seed)
    return [chance.integers(0, VOCAB, chance.integers(1, longest + 1)).tolist() for _ in range(n)]


def assert_served(engine: Engine, requests: list[Request]) -> None:
    for request in requests:
        assert request.state == "finished"
        assert request.tokens == alone(request)
    assert is_whole(engine)


# Serving


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_every_request_gets_the_tokens_of_the_model(page_size: int) -> None:
    """Requests arrive over time, prompts are chunked, and the pool is short."""
    model = PoolReader(160, 8, page_size=page_size)
    engine = Engine(model, max_step_tokens=24)
    prompts = some_prompts(64, 80)
    requests = []
    while prompts or engine.step():
        for prompt in prompts[:2]:
            new_tokens = 1 + (len(prompt) * 7) % 45
            requests.append(engine.submit(prompt, new_tokens, stop_tokens=[3]))
        prompts = prompts[2:]
        if prompts:
            engine.step()
    assert_served(engine, requests)
    assert max(model.batches) <= 24
    stats = engine.stats()
    assert stats["retractions"] == sum(request.retractions for request in requests) > 0
    assert (stats["running"], stats["waiting"], stats["finished"], stats["aborted"]) == (0, 0, 64, 0)
    assert stats["generated_tokens"] == sum(len(request.tokens) for request in requests)
    assert stats["computed_tokens"] == sum(model.batches)
    # One call of the planner per step.
    assert stats["steps"] == len(model.batches) == engine._scheduler.planner.stats()["plans"]


def test_a_request_may_fill_the_whole_pool() -> None:
    model = PoolReader(40, 4, page_size=4)
    engine = Engine(model, 16)
    capacity = model.allocator.stats()["capacity"]
    requests = [engine.submit(prompt, capacity + 1 - len(prompt)) for prompt in some_prompts(5, 30)]
    engine.run()
    assert_served(engine, requests)


def test_first_come_first_served() -> None:
    model = PoolReader(1000, 4)
    engine = Engine(model, 16)
    order: list[Request] = []
    requests = [
        engine.submit(prompt, 3, on_token=lambda request, _: order.append(request))
        for prompt in some_prompts(20, 40)
    ]
    engine.run()
    assert list(dict.fromkeys(order)) == requests
    assert engine.stats()["retractions"] == 0


def test_decoding_goes_on_beside_long_prompts() -> None:
    model = PoolReader(1000, 4)
    engine = Engine(model, 8)
    first = engine.submit([1, 2], 30)
    assert engine.step()
    long = engine.submit(list(range(50)), 2)
    for _ in range(7):
        before = len(first.tokens)
        engine.step()
        assert len(first.tokens) == before + 1
    assert long.state == "running"
    assert not long.tokens
    engine.step()
    assert len(long.tokens) == 1


def test_the_youngest_is_retracted_to_the_head_of_the_queue() -> None:
    model = PoolReader(30, 2)
    engine = Engine(model, 32)
    old, young, last = (engine.submit([i] * 8, 20) for i in range(3))
    while young.retractions == 0:
        engine.step()
    assert (old.state, young.state, last.state) == ("running", "waiting", "waiting")
    while not last.tokens:
        engine.step()
    assert young.is_over or young.state == "running"
    engine.run()
    assert old.retractions == 0
    assert_served(engine, [old, young, last])


def test_requests_of_a_batch_that_failed_stay_in_order() -> None:
    model = PoolReader(1000, 4)
    engine = Engine(model, 16)
    heard: list[Request] = []
    requests = [engine.submit([i], 3, on_token=lambda request, _: heard.append(request)) for i in range(6)]
    engine.step()
    model.fails_in = 0
    with pytest.raises(RuntimeError, match="the model fails"):
        engine.step()
    assert {request.state for request in requests} == {"waiting"}
    model.fails_in = None
    heard.clear()
    engine.run()
    assert [*dict.fromkeys(heard)] == requests
    assert_served(engine, requests)


@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("page_size", [1, 4])
def test_random_histories(page_size: int, prefix_cache: bool) -> None:
    """Requests arrive, are forked and aborted, and end in any order; the pools hold the running ones."""
    chance = random.Random(page_size)  # noqa: S311 - no secrets
    model = PoolReader(64, 5, 60, page_size)
    engine = Engine(model, 10, prefix_cache=prefix_cache)
    requests: list[Request] = []
    for prompt in some_prompts(40, 30, page_size):
        begin = chance.choice(requests).prompt[: chance.randint(0, 20)] if requests else []
        requests.append(
            engine.submit(begin + prompt[len(begin) :] + [1], chance.randint(1, 20), stop_tokens=[7])
        )
        for _ in range(chance.randint(0, 4)):
            engine.step()
            running = [request for request in requests if request.state == "running"]
            pages = sum(-(-request.held.cached // page_size) for request in running)
            stats = engine.stats()
            if prefix_cache:  # pages that several requests share count once
                assert engine.prefix_cache is not None
                assert engine.prefix_cache.locked_size() <= stats["in_use"] <= pages * page_size
                engine.prefix_cache.verify()
            else:
                assert stats["in_use"] == pages * page_size
            assert stats["running"] == len(running) == 5 - model.table.available_size()
        request = chance.choice(requests)
        if chance.random() < 0.3:
            engine.abort(request)
        elif not request.is_over:
            requests.append(engine.fork(request))
    engine.run()
    assert (engine.stats()["found_tokens"] > 100) == prefix_cache
    assert is_whole(engine)
    for request in requests:
        wanted = alone(request)
        assert request.tokens == (wanted if request.state == "finished" else wanted[: len(request.tokens)])
    assert {request.state for request in requests} == {"finished", "aborted"}


def test_stop_tokens_end_a_request() -> None:
    model = PoolReader(200)
    engine = Engine(model, 64)
    free = engine.submit([5, 6], 20)
    engine.run()
    stop = free.tokens[4]
    stopped = engine.submit([5, 6], 20, stop_tokens=[stop, 49])
    engine.run()
    assert stopped.tokens == free.tokens[: free.tokens.index(stop) + 1]
    assert is_whole(engine)


# The prefix cache


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_conversation_computes_only_what_is_new(page_size: int) -> None:
    engine = Engine(PoolReader(400, 4, page_size=page_size), 64)
    prompt, computed = [*range(30)], 0
    for turn in range(4):
        request = engine.submit(prompt, 7)
        engine.run()
        assert_served(engine, [request])
        # Of the turn before, all but the last token was computed; whole pages are found.
        wanted = (len(prompt) - 4) // page_size * page_size if turn else 0
        assert request.prefix_len == wanted
        computed += len(prompt) + 6 - wanted
        prompt = [*prompt, *request.tokens, 5, 6, turn]
    stats = engine.stats()
    assert stats["computed_tokens"] == computed
    assert (stats["in_use"], stats["cached"]) == (0, (len(prompt) - 4) // page_size * page_size)


@pytest.mark.parametrize("page_size", [1, 4])
def test_samples_of_one_prompt_share_its_pages(page_size: int) -> None:
    engine = Engine(PoolReader(100, 8, page_size=page_size), 64)
    first = engine.submit([*range(40)], 10, sampling=Sampling(1.0, seed=0))
    waiting = engine.fork(first, sampling=Sampling(1.0, seed=1))
    engine.abort(waiting)
    engine.step()
    delivered: list[int] = []
    others = [
        engine.fork(
            first, sampling=Sampling(1.0, seed=seed), on_token=lambda _, token: delivered.append(token)
        )
        for seed in range(1, 5)
    ]
    engine.run()
    assert len({tuple(request.tokens) for request in [first, *others]}) == 5
    assert len({request.tokens[0] for request in [first, *others]}) == 1
    assert len(delivered) == 4 * 9
    for request in [first, *others]:
        longer = Request(first.prompt + first.tokens[:1], 9, sampling=request.sampling)
        assert request.tokens[1:] == alone(longer)
    assert [request.prefix_len for request in others] == [40] * 4
    assert engine.stats()["retractions"] == 0  # five copies of the prompt would not fit
    assert is_whole(engine)
    with pytest.raises(StateError, match="the request is finished"):
        engine.fork(first)


def test_equal_prompts_that_arrive_together_are_computed_once() -> None:
    engine = Engine(PoolReader(1000, 8, page_size=4), 64)
    requests = [engine.submit([*range(45), i], 3) for i in range(8)]
    other = engine.submit([*range(45), 0], 3, namespace="another")
    engine.run()
    assert [request.prefix_len for request in [*requests, other]] == [0, *[44] * 7, 0]
    assert_served(engine, [*requests, other])
    assert engine.stats()["steps"] < 12


def test_a_retracted_request_finds_what_it_has_computed() -> None:
    engine = Engine(PoolReader(60, 2), 64)
    old, young = engine.submit([1] * 20, 25), engine.submit([2] * 20, 25)
    while young.retractions == 0:
        engine.step()
    begin = young.seq_len
    while not young.is_over:
        engine.step()
        assert young.state != "running" or young.prefix_len > 10
    assert begin > 20
    assert_served(engine, [old, young])


def test_namespaces_share_nothing() -> None:
    engine = Engine(PoolReader(400, 4), 64)
    found = []
    for namespace in (None, "adapter", "adapter", 7, None, b"adapter"):
        request = engine.submit([*range(30)], 3, namespace=namespace)
        engine.run()
        found.append(request.prefix_len)
        assert_served(engine, [request])
    assert found == [0, 0, 29, 0, 29, 0]


def test_engines_may_share_a_cache() -> None:
    model = PoolReader(400, 4)
    cache = PrefixCache(model.allocator, policy="lru")
    for found in (0, 29):
        engine = Engine(model, 64, prefix_cache=cache)
        assert engine.prefix_cache is cache
        request = engine.submit([*range(30)], 3)
        engine.run()
        assert request.prefix_len == found
        assert_served(engine, [request])


# Streaming


def test_streams_are_in_order_and_may_be_interleaved() -> None:
    model = PoolReader(60, 8)
    engine = Engine(model, 16)
    requests = [engine.submit(prompt, 12) for prompt in some_prompts(6, 30)]
    streams = [engine.stream(request) for request in requests]
    got: list[list[int]] = [[] for _ in requests]
    chance = random.Random(0)  # noqa: S311 - no secrets
    while any(request.state != "finished" or got[i] != request.tokens for i, request in enumerate(requests)):
        i = chance.randrange(len(streams))
        got[i] += [token for token in [next(streams[i], None)] if token is not None]
    assert got == [request.tokens for request in requests]
    assert all(next(stream, None) is None for stream in streams)
    assert_served(engine, requests)


def test_a_stream_is_not_ahead_of_what_was_computed() -> None:
    engine = Engine(PoolReader(100), 16)
    request = engine.submit([1, 2, 3], 5)
    for i, token in enumerate(engine.stream(request)):
        assert request.tokens[i:] == [token]
    assert list(engine.stream(request)) == request.tokens == alone(request)


def test_a_stream_ends_with_an_abort() -> None:
    model = PoolReader(100)
    engine = Engine(model, 16)
    request = engine.submit([1, 2, 3], 50)
    got = []
    for token in engine.stream(request):
        got.append(token)
        if len(got) == 3:
            engine.abort(request)
    assert got == alone(request)[:3]
    assert is_whole(engine)


def test_callbacks_get_each_token_once_and_in_order() -> None:
    model = PoolReader(60, 8)
    engine = Engine(model, 16)
    delivered: dict[Request, list[int]] = {}
    requests = [
        engine.submit(
            prompt, 9, on_token=lambda request, token: delivered.setdefault(request, []).append(token)
        )
        for prompt in some_prompts(12, 30)
    ]
    engine.run()
    assert delivered == {request: request.tokens for request in requests}
    assert_served(engine, requests)


def test_raising_callbacks_lose_no_tokens() -> None:
    model = PoolReader(60, 8)
    engine = Engine(model, 16)
    delivered: dict[Request, list[int]] = {}

    def on_token(request: Request, token: int) -> None:
        delivered.setdefault(request, []).append(token)
        if token % 3 == 0:
            raise LookupError(token)

    requests = [engine.submit(prompt, 9, on_token=on_token) for prompt in some_prompts(12, 30)]
    raised, more = 0, True
    while more:
        try:
            more = engine.step()
        except LookupError:
            raised, more = raised + 1, True
    assert raised > 10
    assert delivered == {request: request.tokens for request in requests}
    assert_served(engine, requests)


def test_callbacks_may_abort_and_submit() -> None:
    model = PoolReader(60, 8)
    engine = Engine(model, 16)
    others = [engine.submit(prompt, 9) for prompt in some_prompts(4, 20)]
    more: list[Request] = []

    def on_token(request: Request, _token: int) -> None:
        if len(request.tokens) == 3:
            engine.abort(request)
            engine.abort(others[-1])
            more.append(engine.submit([1, 2], 4))

    request = engine.submit([4, 5], 9, on_token=on_token)
    engine.run()
    assert (request.state, request.tokens) == ("aborted", alone(request)[:3])
    assert_served(engine, others[:-1] + more)


# Abort, failures, rejected requests


def test_abort_in_every_state() -> None:
    model = PoolReader(100, 2, page_size=4)
    engine = Engine(model, 8)
    running, prefilling, waiting = engine.submit([1], 20), engine.submit([2] * 40, 5), engine.submit([3], 5)
    engine.step()
    engine.step()
    assert [running.state, prefilling.state, waiting.state] == ["running", "running", "waiting"]
    assert 0 < prefilling.held.cached < 40
    for request in (prefilling, waiting, running, running):
        engine.abort(request)
        assert request.state == "aborted"
    assert engine.stats()["aborted"] == 3
    assert is_whole(engine)
    assert not engine.step()
    last = engine.submit([1], 2)
    engine.run()
    engine.abort(last)
    assert_served(engine, [last])
    assert engine.stats()["aborted"] == 3


@pytest.mark.parametrize("fails_in", [0, 1, 3, 10])
def test_a_failing_model_loses_no_requests(fails_in: int) -> None:
    model = PoolReader(80, 6)
    engine = Engine(model, 16)
    requests = [engine.submit(prompt, 12, sampling=Sampling(1.0)) for prompt in some_prompts(10, 40)]
    model.fails_in = fails_in
    with pytest.raises(RuntimeError, match="the model fails"):
        engine.run()
    assert is_whole(engine)
    assert engine.stats()["waiting"] + engine.stats()["finished"] == len(requests)
    model.fails_in, model._fresh = None, set()
    engine.run()
    assert_served(engine, requests)


def serve_interrupted(page_size: int, at: int, fails_in: int | None = None) -> list[Place]:
    """Serves requests, with an interrupt at an event, and goes on; the places of all events up to it.

    Before that, a batch of the model may fail.
    """
    if sys.version_info >= (3, 12):
        # The first run, and each one after an interrupt, is not told of all instructions.
        serve_once(page_size, 0)
    return serve_once(page_size, at, fails_in)


def serve_once(page_size: int, at: int, fails_in: int | None = None) -> list[Place]:
    model = PoolReader(32, 3, 40, page_size)
    model.fails_in = fails_in
    engine, interrupts = Engine(model, 12), Interrupts(at)
    prompts = [[3, 1, 4, 1, 5, 9, 2, 6], [3, 1, 4, 1, 5, 9, 7], [6, 5, 3], [3, 1, 4, 1, 5, 9, 2, 6, 5], [8]]
    requests: list[Request] = []
    delivered.clear()

    def submit(prompt: list[int]) -> None:
        requests.append(engine.submit(prompt, 4, on_token=get))

    calls: list[Callable[[], object]] = [
        *(functools.partial(submit, prompt) for prompt in prompts),
        engine.step,
        lambda: requests.append(engine.fork(requests[0], on_token=get)),
        lambda: engine.abort(requests[4]),
        engine.step,
        lambda: engine.abort(requests[1]),
        engine.run,
    ]
    raised = []
    while calls:
        try:
            with interrupts.traced():
                calls[0]()
            del calls[0]
        except (KeyboardInterrupt, RuntimeError) as error:
            raised.append(type(error))
            model.fails_in, model._fresh = None, set()
    assert raised.count(KeyboardInterrupt) == (at > 0)
    states = [request.state for request in requests]
    assert states == ["finished", "aborted", "finished", "finished", "aborted", "finished"]
    assert all(request.tokens == alone(request) for request in requests if request.state == "finished")
    assert is_whole(engine)
    # A fork's callback is not called with the first ones.
    assert all(tokens == request.tokens[-len(tokens) :] for request, tokens in delivered.items())
    assert [len(delivered[requests[i]]) for i in (0, 2, 3)] == [4, 4, 4]
    return interrupts.places


@devices.cpu_only
@pytest.mark.parametrize("page_size", [1, 4])
def test_an_interrupt_anywhere_in_an_engine_loses_nothing(page_size: int) -> None:
    """At each line of the engine and of what it calls, and each return to it: the first time or the last."""
    places = serve_interrupted(page_size, 0)
    assert {name for name, *_ in places} >= {"step", "submit", "fork", "abort", "_admit", "forward", "sample"}
    last = {place: at for at, place in enumerate(places, 1)}
    first = {place: at for at, place in reversed([*enumerate(places, 1)])}
    # Half of the places with each size of pages.
    half = itertools.islice(last, page_size % 2, None, 2)
    for turn, place in enumerate(half):
        serve_interrupted(page_size, (first if turn % 2 else last)[place])


@devices.cpu_only
def test_an_interrupt_while_a_failed_batch_is_retracted_loses_nothing() -> None:
    places = serve_interrupted(4, 0, fails_in=3)
    of_it = [at for at, (name, *_) in enumerate(places, 1) if name == "retract_all"]
    last = {places[at - 1]: at for at in range(of_it[0] - 3, of_it[-1] + 5)}
    for at in last.values():
        serve_interrupted(4, at, fails_in=3)


class InterruptedFence:
    """Never passes; its `query` number `at` is interrupted."""

    def __init__(self, at: int) -> None:
        self.left = at

    def query(self) -> bool:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        return False


@devices.cpu_only
def test_an_interrupt_within_a_call_of_a_pool_loses_nothing() -> None:
    interrupted = True
    at = 0
    while interrupted:
        at += 1
        model = PoolReader(32, 3, 40, 4)
        engine, fence = Engine(model, 12), InterruptedFence(at)
        model.allocator.free(some(model.allocator.alloc(4)), after=fence)
        requests = [engine.submit([1, 2, 3, 4, 5], 4), engine.submit([7, 8, 9], 4)]
        interrupted, is_busy = False, True
        while is_busy:
            try:
                is_busy = engine.step()
            except KeyboardInterrupt:
                interrupted = True
        assert all(request.tokens == alone(request) for request in requests)
        fence.query = lambda: True  # type: ignore[method-assign]
        assert is_whole(engine)
    assert at > 4


@devices.cpu_only
def test_a_model_cannot_change_the_engine_in_the_middle_of_a_step() -> None:
    class ReentrantReader(PoolReader):
        def forward(self, token_ids: torch.Tensor, plan: BatchPlan) -> torch.Tensor:
            logits = super().forward(token_ids, plan)
            for call in (lambda: engine.abort(requests[1]), engine.step):
                with pytest.raises(StateError, match="in the middle of a step"):
                    call()
            return logits

    engine = Engine(ReentrantReader(32, 3, 40, 4), 12)
    requests = [engine.submit([1, 2, 3, 4, 5], 4), engine.submit([7, 8, 9], 4)]
    engine.run()
    assert all(request.tokens == alone(request) for request in requests)
    assert is_whole(engine)


def test_rejects_bad_requests() -> None:
    model = PoolReader(60, 4, 50)
    engine = Engine(model, 16)
    with pytest.raises(
        ArgumentError, match=r"41 prompt and 11 new tokens need 51 slots.* has 50, the pool 60"
    ):
        engine.submit([1] * 41, 11)
    small = Engine(PoolReader(40, 4, 50, 16), 16)
    with pytest.raises(
        ArgumentError, match=r"30 prompt and 4 new tokens need 33 slots.* has 50, the pool 32"
    ):
        small.submit([1] * 30, 4)
    for prompt, new_tokens in (([], 3), ([1], 0), ([1], -1)):
        with pytest.raises(ArgumentError, match="at least one of each is needed"):
            engine.submit(prompt, new_tokens)
    for prompt in ([1, VOCAB, 2], [2, -1, 1]):
        with pytest.raises(ArgumentError, match=f"has token {prompt[1]}, the vocabulary is 0 to 49"):
            engine.submit(prompt, 2)
    with pytest.raises(ConfigError, match="max_step_tokens is 3; 4 requests"):
        Engine(model, 3)
    assert not engine.step()
    requests = [engine.submit([1] * 41, 10), small.submit([1] * 30, 3)]
    engine.run()
    small.run()
    assert all(request.tokens == alone(request) for request in requests)


def test_slots_with_other_owners() -> None:
    """Slots with other owners leave no room for a request: the engine raises, and loses nothing."""
    model = PoolReader(60, 4)
    engine = Engine(model, 16)
    slots = some(model.allocator.alloc(50))
    requests = [engine.submit([1] * 20, 5), engine.submit([2] * 9, 2)]
    with pytest.raises(OutOfMemoryError, match="10 of 60 slots are available"):
        engine.run()
    assert [request.state for request in requests] == ["waiting", "waiting"]
    model.allocator.free(slots)
    model._fresh = set()
    engine.run()
    assert_served(engine, requests)


# Sampling


def test_samples_do_not_depend_on_the_batch() -> None:
    samplings = [Sampling(0.0), Sampling(0.7, seed=1), Sampling(1.5, 5, seed=2), Sampling(1.0, 0, 0.8, 3)]
    prompts = some_prompts(16, 30)
    wanted: list[list[int]] = []
    for size in (1000, 60):
        model = PoolReader(size, 8)
        engine = Engine(model, 16)
        requests = [engine.submit(prompt, 15, sampling=samplings[i % 4]) for i, prompt in enumerate(prompts)]
        engine.run()
        assert_served(engine, requests)
        wanted = wanted or [request.tokens for request in requests]
        assert [request.tokens for request in requests] == wanted
        assert (engine.stats()["retractions"] > 0) == (size == 60)
    engine = Engine(PoolReader(1000, 8), 16)
    others = [engine.submit(prompts[0], 15, sampling=Sampling(1.0, seed=seed)) for seed in range(5)]
    engine.run()
    assert len({tuple(request.tokens) for request in others}) == 5


def test_samples_follow_the_distribution() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, 3.0, -torch.inf])
    rows = to_current(logits.expand(4000, 5).contiguous())
    for sampling, kept in (
        (Sampling(1.0), [0, 1, 2, 3]),
        (Sampling(2.5), [0, 1, 2, 3]),
        (Sampling(1.0, top_k=2), [2, 3]),
        (Sampling(1.0, top_p=0.9), [1, 2, 3]),
        (Sampling(3.0, top_k=3, top_p=0.6), [2, 3]),
    ):
        tokens = sample(rows, [(sampling, place) for place in range(4000)])
        chances = (logits / sampling.temperature).softmax(0)
        wanted = torch.zeros(5).index_copy(0, torch.tensor(kept), chances[kept] / chances[kept].sum())
        found = torch.bincount(torch.tensor(tokens), minlength=5) / 4000
        assert (found > 0).nonzero().flatten().tolist() == kept
        # Four standard deviations.
        assert ((found - wanted).abs() <= 4 * (wanted * (1 - wanted) / 4000).sqrt()).all()


def test_a_single_candidate_is_the_most_likely_token() -> None:
    logits = to_current(torch.randn(8, 30, generator=torch.Generator().manual_seed(0)))
    wanted = logits.argmax(-1).tolist()
    for sampling in (Sampling(), Sampling(2.0, top_k=1), Sampling(2.0, top_p=1e-9), Sampling(1e-3)):
        assert sample(logits, [(sampling, place) for place in range(8)]) == wanted


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -0.1},
        {"temperature": float("inf")},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
    ],
)
def test_rejects_sampling_out_of_range(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="Sampling"):
        Sampling(**options)


@devices.cpu_only
def test_import_needs_no_model_library(run_snippet: RunSnippet) -> None:
    run_snippet(
        """
        import kvpool_serving, kvpool.attention, kvpool.integrations
        assert "transformers" not in sys.modules
        """,
        env={"PYTHONPATH": os.pathsep.join(sys.path)},
    )


def test_requests_own_their_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPOOL_DEBUG", "1")
    model = PoolReader(64, 4)
    engine = Engine(model, 64, prefix_cache=False)
    engine.submit([1, 2, 3], 4, owner="request 1")
    engine.submit([4, 5], 4, owner=2)
    engine.step()
    assert {leak.owner: leak.count for leak in model.allocator.leaks()} == {"request 1": 3, 2: 2}
    assert {leak.owner: leak.count for leak in model.table.leaks()} == {"request 1": 1, 2: 1}
    engine.run()
    assert model.allocator.leaks() == model.table.leaks() == []
