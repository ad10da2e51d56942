"""Requests that change engines: their rows are lent, read, or lost on the way."""

from __future__ import annotations

import functools
import gc
import itertools
import threading
from random import Random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from common import Fence, some
from engine_interrupts import Interrupts, Place, delivered, get
from fake_network import Network
from kvpool_serving import Engine, Request, SchedulerOptions
from kvpool_serving.sampling import Sampling
from moving_request import Incoming, Outgoing
from pool_reader import VOCAB, PoolReader, alone, is_whole

from kvpool import ArgumentError, HostTier, OutOfMemoryError, PrefixCache

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvpool.remote import Endpoint


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Iterator[Network]:
    network = Network(monkeypatch)
    network.runs_by_itself = False  # rows arrive when a test says so, also while an engine waits
    clock = SimpleNamespace(monotonic=lambda: network.seconds, sleep=network.sleep)
    monkeypatch.setattr("moving_request.time", clock)
    yield network
    gc.collect()


class Side:
    """An engine and its endpoint."""

    def __init__(self, network: Network, name: str, *, prefix_cache: bool = True, **sizes: int) -> None:
        self.model = PoolReader(**sizes)
        self.endpoint = network.endpoint(name, self.model.pool)
        self.engine = Engine(self.model, max_step_tokens=24, prefix_cache=prefix_cache)


class Pair:
    """An engine that computes prompts, and one that goes on with them."""

    def __init__(self, network: Network, sizes: dict[str, int], *, prefix_cache: bool = True) -> None:
        self.network = network
        self.prefill = Side(network, "prefill", prefix_cache=prefix_cache, **sizes)
        self.decode = Side(network, "decode", prefix_cache=prefix_cache, **sizes)
        self.peer = self.decode.endpoint.connect(self.prefill.endpoint.metadata())
        self.requests: list[Request] = []  # of the second engine
        self.first: list[Request] = []
        self.bring: Callable[[Endpoint, Any, bytes], Incoming] = Incoming

    def submit(self, prompt: Sequence[int], new_tokens: int, **options: Any) -> Request:  # noqa: ANN401
        at = len(self.first)
        going = Outgoing(self.prefill.endpoint, 30.0, lambda ticket: self.go_on(at, ticket, **options))
        self.first.append(self.prefill.engine.submit(prompt, new_tokens, move=going, **options))
        return self.first[at]

    def go_on(self, at: int, ticket: bytes | None, **options: Any) -> None:  # noqa: ANN401
        request = self.first[at]
        coming = None if ticket is None else self.bring(self.decode.endpoint, self.peer, ticket)
        self.requests.append(
            self.decode.engine.submit(
                request.prompt, request.max_new_tokens, tokens=request.tokens, move=coming, **options
            )
        )

    def step(self, rows: int = 1 << 30) -> bool:
        is_busy = self.prefill.engine.step()
        self.network.run(rows)
        is_busy |= self.decode.engine.step()
        self.prefill.endpoint.poll()
        return is_busy

    def run(self, rows: int = 1 << 30, seconds: float = 0.001) -> None:
        for _ in range(5000):
            if not self.step(rows):
                break
            self.network.seconds += seconds
        else:
            raise AssertionError("it does not end")

    def assert_served(self) -> None:
        assert [request.state for request in self.first] == ["finished"] * len(self.first)
        for request in self.requests:
            assert request.state == "finished"
            assert request.tokens == alone(request)
        handed = [request for request in self.first if not request.is_complete]
        assert len(handed) == len(self.requests)
        for request in self.first:
            assert request.tokens == alone(request)[: len(request.tokens)]
        assert is_whole(self.prefill.engine)
        assert is_whole(self.decode.engine)


def some_prompts(n: int, longest: int = 60, seed: int = 0) -> list[list[int]]:
    """Prompts, some of which begin alike."""
    chance = Random(seed)  # noqa: S311 - no secrets
    common = [chance.randrange(VOCAB) for _ in range(longest)]
    prompts = []
    for _ in range(n):
        length = chance.randint(1, longest)
        shared = chance.randint(0, length) if chance.random() < 0.5 else 0
        prompts.append(common[:shared] + [chance.randrange(VOCAB) for _ in range(length - shared)])
    return prompts


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_requests_that_change_engines_get_the_same_tokens(
    network: Network, page_size: int, *, prefix_cache: bool
) -> None:
    """Prompts are chunked and begin alike, both pools are short, and rows arrive a few at a time."""
    pair = Pair(network, {"size": 160, "page_size": page_size}, prefix_cache=prefix_cache)
    prompts = some_prompts(40, 80, seed=page_size)
    while prompts:
        for prompt in prompts[:2]:
            sampling = Sampling(temperature=0.8, seed=len(prompt)) if len(prompt) % 2 else None
            pair.submit(prompt, 1 + (len(prompt) * 7) % 30, sampling=sampling)
        prompts = prompts[2:]
        pair.step(rows=37)
    pair.run(rows=37)
    pair.assert_served()
    prefill, decode = pair.prefill.engine.stats(), pair.decode.engine.stats()
    # It computes a token for each one that it generates, but for what was retracted.
    assert decode["computed_tokens"] == decode["generated_tokens"] or decode["retractions"]
    assert prefill["moving"] == decode["moving"] == 0
    stats = pair.decode.endpoint.stats()
    assert stats["completed"] == len(pair.requests) > 30
    assert stats["failed"] == stats["cuts"] == 0
    assert pair.prefill.endpoint.stats()["returned"] == len(pair.requests)


def test_states_of_a_hybrid_model_move_with_their_rows(network: Network) -> None:
    pytest.importorskip("transformers", minversion="5.21")
    from kvpool_serving.service import Pools, ServeConfig, make_model

    config = ServeConfig(model="qwen3-next", pool_size=256, page_size=16, device="cpu")
    first, second, whole = (Pools(config, make_model(config)) for _ in range(3))
    here, there = (
        network.endpoint(name, pools.pooled.kv_pool, pools.pooled.gdn_pool)
        for name, pools in (("first", first), ("second", second))
    )
    peer, tickets = there.connect(here.metadata()), list[bytes | None]()
    prompt = [*range(40)]
    given = first.engine.submit(prompt, 12, move=Outgoing(here, 30.0, tickets.append))
    while not tickets:
        first.engine.step()
    network.runs_by_itself = True
    coming = Incoming(there, peer, some(tickets[0]))
    taken = second.engine.submit(prompt, 12, tokens=given.tokens, move=coming)
    alone = whole.engine.submit(prompt, 12)
    for pools in (second, first, whole):
        pools.engine.run()
    assert taken.tokens == alone.tokens
    assert not coming.has_failed
    assert second.engine.stats()["computed_tokens"] == 11
    assert is_whole(first.engine)
    assert is_whole(second.engine)


def test_what_the_second_engine_has_is_not_read_again(network: Network) -> None:
    pair = Pair(network, {"size": 160, "page_size": 4})
    prompt = [7] * 41
    for _ in range(2):
        pair.submit(prompt, 5)
        pair.run()
    # 41 rows, and one behind the 10 pages that the second engine found, of keys and of values.
    assert pair.decode.endpoint.stats()["rows"] == 41 + 1
    assert pair.decode.engine.stats()["computed_tokens"] == 2 * 4
    pair.assert_served()


def test_slots_of_what_another_has_published_are_not_lent(network: Network) -> None:
    """The last token of the second prompt is computed although it is cached: its slot is free again."""
    pair = Pair(network, {"size": 32})
    pair.submit([*range(20)], 1)
    pair.run()
    pair.submit([*range(5)], 4)
    pair.prefill.engine.step()
    pair.submit([9] * 12, 1)  # takes all that are free
    pair.prefill.engine.step()
    pair.run()
    pair.assert_served()


def test_a_request_that_ends_with_its_first_token_stays(network: Network) -> None:
    pair = Pair(network, {"size": 64})
    request = pair.submit([1, 2, 3], 1)
    pair.run()
    assert request.tokens == alone(request)
    assert not pair.requests
    pair.assert_served()


def test_rows_that_do_not_come_are_computed(network: Network) -> None:
    pair = Pair(network, {"size": 160, "page_size": 4})
    for prompt in some_prompts(8, seed=3):
        pair.submit(prompt, 9)
    while len(pair.requests) < 4:
        pair.step(rows=3)
    network.kill("prefill")
    while pair.decode.engine.step():
        network.run()
        network.seconds += 0.01
    for request in pair.requests:
        assert request.tokens == alone(request)
    assert is_whole(pair.decode.engine)
    assert pair.decode.endpoint.stats()["failed"] > 0


def test_slots_of_a_process_that_never_asks_come_back(network: Network) -> None:
    pair = Pair(network, {"size": 48, "page_size": 4})
    pair.bring = lambda *_: pytest.fail("it is not told")
    pair.go_on = lambda *_, **__: None  # type: ignore[method-assign]
    for _ in range(3):
        pair.submit([*range(20)], 9)
    begin = network.seconds
    while pair.prefill.engine.step():
        network.seconds += 0.5
    # Each has the pool for itself, or shares what is cached.
    assert 30 <= network.seconds - begin < 3 * 31
    assert [request.state for request in pair.first] == ["finished"] * 3
    assert is_whole(pair.prefill.engine)


def test_a_ticket_that_comes_too_late_is_of_no_use(network: Network) -> None:
    pair = Pair(network, {"size": 64})
    tickets: list[bytes | None] = []
    pair.go_on = lambda _at, ticket, **_: tickets.append(ticket)  # type: ignore[method-assign]
    pair.submit([1, 2, 3], 4)
    while pair.prefill.engine.step():
        network.seconds += 1.0
    Pair.go_on(pair, 0, tickets[0])
    pair.run()
    pair.assert_served()
    assert pair.decode.endpoint.stats()["failed"] == 1


def test_without_leases_the_second_engine_computes(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(network, {"size": 64})
    monkeypatch.setattr(pair.prefill.endpoint._core.leases._keys, "_free", {})
    pair.submit([1, 2, 3], 4)
    pair.run()
    pair.assert_served()
    assert pair.decode.endpoint.stats()["completed"] == 0


def test_without_transfers_the_second_engine_computes(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(network, {"size": 64})
    monkeypatch.setattr(pair.decode.endpoint._core.reads, "_free", [])
    pair.submit([1, 2, 3], 4)
    pair.run(seconds=1.0)
    pair.assert_served()


@pytest.mark.parametrize("steps", range(6))
def test_a_request_is_aborted_on_either_side_at_any_time(network: Network, steps: int) -> None:
    pair = Pair(network, {"size": 160, "page_size": 4})
    for prompt in some_prompts(6, 30, seed=5):
        pair.submit(prompt, 6)
    for _ in range(steps):
        pair.step(rows=11)
    for side, requests in ((pair.prefill, pair.first), (pair.decode, pair.requests)):
        for request in requests[::2]:
            is_over = request.is_over
            side.engine.abort(request)
            side.engine.abort(request)  # once more changes nothing
            assert request.state == "aborted" or is_over
    network.seconds += 1
    for _ in range(2000):
        if not pair.step(rows=11):
            break
        network.seconds += 0.1  # what was aborted on one side is over with its lease on the other
    for request in pair.requests:
        assert request.state in {"aborted", "finished"}
        assert request.state == "aborted" or request.tokens == alone(request)
    assert is_whole(pair.prefill.engine)
    assert is_whole(pair.decode.engine)


def test_what_moves_is_not_retracted_when_the_model_fails(network: Network) -> None:
    pair = Pair(network, {"size": 160})
    for prompt in some_prompts(6, 30, seed=5):
        pair.submit(prompt, 12)
    fails = itertools.cycle([None, 0, None, 1])
    for _ in range(200):
        for side in (pair.prefill, pair.decode):
            side.model.fails_in, side.model._fresh = next(fails), set()
            try:
                side.engine.step()
            except RuntimeError:
                side.model.fails_in = None
        network.run(5)
        pair.prefill.endpoint.poll()
    pair.run()
    pair.assert_served()
    assert pair.decode.endpoint.stats()["completed"] == len(pair.requests)


def test_slots_of_others_are_no_reason_to_wait(network: Network) -> None:
    pair = Pair(network, {"size": 32})
    pair.submit([*range(20)], 6)
    pair.prefill.engine.step()
    others = some(pair.decode.model.allocator.alloc(20))
    with pytest.raises(OutOfMemoryError, match="no request fits: 12 of 32"):
        pair.decode.engine.step()
    pair.decode.model.allocator.free(others)
    pair.run()
    pair.assert_served()


@pytest.mark.parametrize("is_over", [True, False])
def test_a_request_waits_for_slots_that_are_copied(network: Network, *, is_over: bool) -> None:
    """With a tier below the cache, what is evicted is free when it is copied: rows have no room before."""
    pair = Pair(network, {"size": 32})
    decode = pair.decode.model
    tier = HostTier(decode.pool, 32)
    cache = PrefixCache(decode.allocator, tiers=(tier,))
    options = SchedulerOptions(copies_timeout_s=10.0 if is_over else 0.1)
    pair.decode.engine = Engine(decode, max_step_tokens=24, prefix_cache=cache, options=options)
    pair.submit([*range(20)], 6)
    pair.prefill.engine.step()
    copy = Fence()
    decode.allocator.free(some(decode.allocator.alloc(20)), after=copy)
    if is_over:
        threading.Timer(0.02, setattr, (copy, "done", True)).start()
    else:
        with pytest.raises(OutOfMemoryError, match="no request fits: 12 of 32"):
            pair.decode.engine.step()
        copy.done = True
    pair.run()
    pair.assert_served()
    assert pair.decode.engine.stats()["computed_tokens"] == 5


def test_a_step_waits_for_a_move_when_nothing_runs(network: Network) -> None:
    """For as long as the options say. It ends with the move, not with the time."""
    pair = Pair(network, {"size": 64})
    options = SchedulerOptions(move_wait_s=0.25)
    pair.decode.engine = Engine(pair.decode.model, max_step_tokens=24, options=options)
    pair.submit([*range(20)], 4)
    pair.prefill.engine.step()
    begun = network.seconds
    pair.decode.engine.step()
    assert network.seconds - begun == pytest.approx(0.25)
    network.runs_by_itself = True
    pair.decode.engine.step()
    assert network.seconds - begun < 0.3
    assert pair.decode.engine.stats()["moving"] == 1  # the next step finds that it is over
    pair.run()
    pair.assert_served()


def test_a_wait_for_a_move_raises_nothing(network: Network) -> None:
    """Also if the move has failed, or an interrupt has left it without its transfer."""
    pair = Pair(network, {"size": 64})
    lender, reader = pair.prefill.endpoint, pair.decode.endpoint
    tickets: list[bytes | None] = []
    going = Outgoing(lender, 2.0, tickets.append)
    assert going.wait(1.0)  # nothing is lent
    going.begin(1, torch.tensor([1, 2]), 0)
    begun = network.seconds
    assert not going.wait(0.5)
    ticket = some(tickets[0])
    coming, lost = (Incoming(reader, pair.peer, ticket) for _ in range(2))
    coming.begin(1, torch.tensor([3, 4]), 0)
    assert not coming.wait(0.5)
    assert not lost.wait(0.5)
    assert network.seconds - begun == pytest.approx(1.5)
    coming.cancel()
    assert coming.wait(60)
    assert coming.has_failed
    assert going.wait(60)
    network.seconds += 2.0
    assert lost.wait(0)
    assert lost.has_failed
    assert lost.wait(60)


def test_a_request_waits_for_slots_that_move(network: Network) -> None:
    """The second prompt fits only when the first has gone."""
    pair = Pair(network, {"size": 32}, prefix_cache=False)
    pair.submit([*range(20)], 6)
    pair.submit([*range(20, 40)], 6)
    network.stopped.add("prefill")
    for _ in range(5):
        pair.step()
    stats = pair.prefill.engine.stats()
    assert (stats["moving"], stats["waiting"], stats["retractions"]) == (1, 1, 0)
    network.stopped.clear()
    pair.run()
    pair.assert_served()


def test_a_request_that_was_matched_in_vain_is_matched_again_when_slots_have_moved(network: Network) -> None:
    """A request would lock the prefix that it shares with others, and then not fit beside the moving rows."""
    pair = Pair(network, {"size": 48, "page_size": 4})
    network.stopped.add("prefill")
    engine = pair.prefill.engine
    shared = [*range(17)]
    engine.submit(shared, 1)
    engine.run()
    moving = pair.submit([9] * 20, 6)
    engine.step()
    request = engine.submit([*shared[:16], *[8] * 16], 1)
    engine.step()
    assert engine._scheduler._prefixes.misfit is request
    engine.abort(moving)
    engine.run()
    assert request.tokens == alone(request)


def test_tokens_that_are_known_are_not_generated_again(network: Network) -> None:
    side = Side(network, "alone", size=64)
    expected = Request([1, 2, 3], 9)
    delivered.clear()
    request = side.engine.submit([1, 2, 3], 9, tokens=alone(expected)[:4], on_token=get)
    side.engine.run()
    assert request.tokens == alone(expected)
    assert delivered[request] == alone(expected)[4:]
    with pytest.raises(ArgumentError, match="all of its tokens: 4 of at most 4"):
        side.engine.submit([1], 4, tokens=[1, 2, 3, 4])
    with pytest.raises(ArgumentError, match="all of its tokens: 2 of at most 4"):
        side.engine.submit([1], 4, tokens=[1, 2], stop_tokens=[2])
    with pytest.raises(ArgumentError, match="token 50, the vocabulary is 0 to 49"):
        side.engine.submit([1], 4, tokens=[50])


class InterruptedPair:
    """Two engines, one of which is interrupted at an event."""

    def __init__(self, network: Network, at: int, *, side: str) -> None:
        self.interrupts = Interrupts(at)
        self.pair = Pair(network, {"size": 24, "max_reqs": 2, "page_size": 4})
        self.engine: Engine = getattr(self.pair, side).engine

    def serve(self) -> list[Place]:
        pair, raised = self.pair, 0
        delivered.clear()
        calls: list[Callable[[], object]] = [
            functools.partial(pair.submit, [3, 1, 4, 1, 5, 9, 2, 6, 5], 4, on_token=get),
            functools.partial(pair.submit, [3, 1, 4, 1, 5, 9, 2], 5, on_token=get),
        ]
        for call in calls:
            call()
        for number in range(400):
            for engine in (pair.prefill.engine, pair.decode.engine):
                raised += self._step(engine)
                pair.network.run(3)
            if number == 8 and len(pair.requests) > 1:
                pair.decode.engine.abort(pair.requests[1])
            pair.prefill.endpoint.poll()
            # A lease whose ticket went with an interrupt ends by itself.
            pair.network.seconds += 0.2
            if number > 8 and not any(
                engine.stats()[state]
                for engine in (pair.prefill.engine, pair.decode.engine)
                for state in ("running", "waiting", "moving")
            ):
                break
        assert raised == self.interrupts.has_raised
        return self.interrupts.places

    def _step(self, engine: Engine) -> int:
        try:
            if engine is self.engine:
                with self.interrupts.traced():
                    engine.step()
            else:
                engine.step()
        except KeyboardInterrupt:
            for side in (self.pair.prefill, self.pair.decode):
                side.model._fresh = set()
            return 1
        return 0

    def check(self) -> None:
        pair = self.pair
        assert [request.state for request in pair.first] == ["finished"] * 2
        for request in pair.requests:
            assert request.state in {"finished", "aborted"}
            assert request.state == "aborted" or request.tokens == alone(request)
        assert is_whole(pair.prefill.engine)
        assert is_whole(pair.decode.engine)


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_an_interrupt_anywhere_loses_no_slot_that_moves(monkeypatch: pytest.MonkeyPatch, side: str) -> None:
    whole = InterruptedPair(Network(monkeypatch), 0, side=side)
    clock = SimpleNamespace(monotonic=lambda: whole.pair.network.seconds)
    monkeypatch.setattr("moving_request.time", clock)
    places = whole.serve()
    whole.check()
    firsts = {place: at for at, place in reversed([*enumerate(places, 1)])}
    moves = {"hand_over", "send", "receive", "completed", "_begin", "_end_moves", "remove", "retract_all"}
    moves |= {"keep_begun", "_admit", "match", "_try_start", "_prepare", "_start"}
    moves |= {"_free", "release", "_changing", "deferred", "allowed"}
    chosen = [at for place, at in firsts.items() if place[0] in moves]
    assert len(chosen) > 60
    for at in chosen:
        one = InterruptedPair(Network(monkeypatch), at, side=side)
        clock.monotonic = lambda one=one: one.pair.network.seconds
        one.serve()
        one.check()
