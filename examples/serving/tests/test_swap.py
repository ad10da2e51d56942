"""`Engine` with a tier below its prefix cache: what is evicted comes back, or is computed again."""

from __future__ import annotations

import random
import threading
from collections import Counter
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, cast, get_args

import devices
import pytest
import torch
from common import NEVER, Fence, cuda_only, some
from engine_interrupts import Event, Interrupts, Place
from kvpool_serving import Engine, SchedulerOptions
from kvpool_serving.prefixes import Prefixes
from kvpool_serving.sampling import Sampling
from kvpool_serving.slot_supply import SlotSupply
from kvpool_serving.swap import Line, Swap, SwapMode
from memory_store import Memory
from pool_reader import VOCAB, PoolReader, alone, is_whole, settle

from kvpool import ConfigError, GDNPool, HostTier, KVPool, OutOfMemoryError, PrefixCache

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from kvpool_serving import Request
    from software import Driver

    from kvpool import BatchPlan, Load

pytestmark = pytest.mark.usefixtures("device")

MODULUS = 1009


class LayeredReader(PoolReader):
    """Reads every layer behind its arrival."""

    layers = 3

    def forward(
        self, token_ids: torch.Tensor, plan: BatchPlan, wait_layer: Callable[[int], object] | None = None
    ) -> torch.Tensor:
        return self.read(token_ids, plan, wait_layer)


class HybridReader(LayeredReader):
    """Has a state of each request, too, which must be that of its tokens."""

    def __init__(self, size: int, max_reqs: int = 8, max_context_len: int = 128, page_size: int = 1) -> None:
        super().__init__(size, max_reqs, max_context_len, page_size)
        self.gdn_pool: GDNPool = GDNPool(
            max_reqs, 1, 1, 1, 2, 2, 2, devices.current(), torch.float32, max_track_slots=6
        )

    def start(self, rows: Sequence[int]) -> None:
        super().start(rows)
        if rows:
            self.gdn_pool.reset_states(rows)

    def note_tokens(self, plan: BatchPlan, tokens: list[list[int]]) -> None:
        states, _ = self.gdn_pool.get_layer_state(0)
        host = plan.host
        for request, known in enumerate(tokens):
            before = len(known) - int(host.qo_indptr[request + 1] - host.qo_indptr[request])
            state = states[int(host.req_pool_indices[request])]
            assert state.flatten().tolist() == [before, checksum(known[:before])]
            state.copy_(torch.tensor([len(known), checksum(known)], dtype=torch.float32).view(state.shape))


def checksum(tokens: list[int]) -> int:
    total = 0
    for token in tokens:
        total = (31 * total + token + 1) % MODULUS
    return total


READERS: dict[str, type[PoolReader]] = {
    "dense": LayeredReader,
    "hybrid": HybridReader,
    "without layers": PoolReader,
}


def tiered(  # noqa: PLR0913, PLR0917 - the parts of an engine
    model: PoolReader,
    max_step_tokens: int,
    size: int,
    write: str = "through",
    swap: SwapMode = "load",
    options: SchedulerOptions | None = None,
) -> Engine:
    """An engine with a tier."""
    tier = HostTier(model.pool, size, states=model.gdn_pool, write=write)  # type: ignore[arg-type]
    cache = PrefixCache(model.allocator, states=model.gdn_pool, tiers=(tier,))
    return Engine(model, max_step_tokens, prefix_cache=cache, swap=swap, options=options)


def the_tier(engine: Engine) -> HostTier:
    return next(tier for tier in some(engine.prefix_cache).tiers if isinstance(tier, HostTier))


def assert_served(engine: Engine, requests: list[Request]) -> None:
    for request in requests:
        assert request.state == "finished"
        assert request.tokens == alone(request)
    assert is_whole(engine)


def serve_conversations(engine: Engine, users: int = 7, turns: int = 2, seed: int = 0) -> list[Request]:
    """Serves conversations that begin alike, greedy and sampled; a turn comes some steps after the last."""
    chance = random.Random(seed)  # noqa: S311 - no secrets
    head = chance.choices(range(VOCAB), k=9)
    requests: list[Request] = []
    open_turns: list[tuple[int, Request]] = []

    def message() -> list[int]:
        return chance.choices(range(VOCAB), k=chance.randint(2, 6))

    def submit(turn: int, before: list[int]) -> None:
        sampling = Sampling(1.0, seed=len(requests)) if len(requests) % 2 else Sampling()
        request = engine.submit(before + message(), chance.randint(8, 24), sampling=sampling)
        requests.append(request)
        open_turns.append((turn, request))

    for _ in range(users):
        submit(1, head)
        engine.step()
    while engine.step() or open_turns:
        for turn, request in [*open_turns]:
            if request.is_over and chance.random() < 0.2:
                open_turns.remove((turn, request))
                if turn < turns:
                    submit(turn + 1, request.prompt + request.tokens)
    return requests


# Every two values meet in one of them.
@pytest.mark.parametrize(
    ("kind", "page_size", "write", "swap"),
    [
        ("dense", 1, "through", "load"),
        ("dense", 4, "selective", "compute"),
        ("dense", 4, "back", "auto"),
        ("hybrid", 4, "through", "compute"),
        ("hybrid", 1, "selective", "auto"),
        ("hybrid", 4, "back", "load"),
        ("without layers", 4, "through", "auto"),
        ("without layers", 4, "selective", "load"),
        ("without layers", 1, "back", "compute"),
    ],
)
def test_tokens_are_the_same_with_every_swap(kind: str, page_size: int, write: str, swap: SwapMode) -> None:
    model = READERS[kind](64, 6, page_size=page_size)
    engine = tiered(model, 24, 1000, write, swap)
    requests = serve_conversations(engine)
    assert_served(engine, requests)
    stats = engine.stats()
    assert stats["retractions"] > 0
    assert some(engine.prefix_cache).stats()["evicted"] > 100
    if swap != "auto":
        assert (stats["loaded_tokens"] > 0) == (swap == "load")
    assert engine.stats()["in_use"] == 0


# A load, step by step


class Prompts(NamedTuple):
    """An engine whose tier has a prompt, and its cache has not, and what is generated after it."""

    engine: Engine
    prompt: list[int]
    wanted: list[int]


def evicted_prompt(
    model: PoolReader,
    swap: SwapMode = "load",
    length: int = 41,
    max_step_tokens: int = 64,
    options: SchedulerOptions | None = None,
) -> Prompts:
    """Serves a prompt, and evicts it."""
    engine = tiered(model, max_step_tokens, 1000, swap=swap, options=options)
    first = engine.submit([*range(length)], 5)
    engine.run()
    settle(engine)
    cache = some(engine.prefix_cache)
    cache.evict(1000)
    assert cache.cached_size() == 0
    return Prompts(engine, first.prompt, first.tokens)


class ObservedLoad:
    """A load that calls `wait` before it is waited for."""

    def __init__(self, load: Load, wait: Callable[[int], object]) -> None:
        self._load, self._wait, self.length = load, wait, load.length

    def wait_layer(self, layer: int) -> None:
        self._wait(layer)
        self._load.wait_layer(layer)


@contextmanager
def watched(wait: Callable[[int], object]) -> Iterator[None]:
    """Calls `wait` with each layer that the loads of an engine are waited for."""
    try_load = Prefixes.try_load

    def patched(self: Prefixes[Request], request: Request) -> bool:
        answer = try_load(self, request)
        if request.held.load is not None:
            request.held.load = cast("Load", ObservedLoad(request.held.load, wait))
        return answer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Prefixes, "try_load", patched)
        yield


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize("page_size", [1, 4])
def test_an_evicted_prompt_is_not_computed_again(kind: str, page_size: int) -> None:
    model = READERS[kind](200, 4, page_size=page_size)
    engine, prompt, wanted = evicted_prompt(model)
    model.batches.clear()
    again = engine.submit([*prompt, *wanted[:1]], 4)
    engine.run()
    assert again.tokens == wanted[1:]
    assert again.prefix_len == engine.stats()["loaded_tokens"] == 41 // page_size * page_size
    assert model.batches[0] == 42 - again.prefix_len
    assert_served(engine, [again])


def test_nothing_is_loaded_with_compute() -> None:
    engine, prompt, _ = evicted_prompt(LayeredReader(200, 4), swap="compute")
    again = engine.submit(prompt, 5)
    engine.run()
    assert (again.prefix_len, engine.stats()["loaded_tokens"]) == (0, 0)
    assert_served(engine, [again])


def test_requests_that_begin_alike_share_a_load() -> None:
    model = LayeredReader(60, 4, page_size=4)  # has no room for two
    engine, prompt, _ = evicted_prompt(model)
    requests = [engine.submit([*prompt[:40], number], 3) for number in range(3)]
    engine.run()
    assert [request.prefix_len for request in requests] == [40] * 3
    assert some(engine.prefix_cache).stats()["loaded"] == 40
    assert_served(engine, requests)


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_a_layer_computes_while_the_next_one_arrives(kind: str) -> None:
    """Each layer arrives only when the one before was read: an engine that waits first waits forever."""
    model = READERS[kind](200, 4, page_size=4)
    engine, prompt, _ = evicted_prompt(model)
    was_read = [threading.Event() for _ in range(model.layers)]
    waited: list[int] = []

    def wait(layer: int) -> None:
        waited.append(layer)
        assert layer == 0 or was_read[layer - 1].wait(timeout=20)

    read = model._tokens

    def tokens(layer: int, plan: BatchPlan) -> list[list[int]]:
        found = read(layer, plan)
        was_read[layer].set()
        return found

    model._tokens = tokens  # type: ignore[method-assign]
    again = engine.submit(prompt, 5)
    with watched(wait):
        engine.step()
    assert [*dict.fromkeys(waited)] == [0, 1, 2]
    engine.run()
    assert again.prefix_len == 40
    assert_served(engine, [again])


def test_a_model_without_layers_is_called_when_all_have_arrived() -> None:
    model = PoolReader(200, 4)
    model.layers = 3
    model.pool = KVPool(200, 3, 1, 1, devices.current(), torch.float32)
    engine, prompt, _ = evicted_prompt(model)
    events: list[object] = []
    read = model.read

    def forward(token_ids: torch.Tensor, plan: BatchPlan) -> torch.Tensor:
        events.append("forward")
        return read(token_ids, plan)

    model.forward = forward  # type: ignore[method-assign]
    again = engine.submit(prompt, 5)
    with watched(events.append):
        engine.step()
    assert events[:2] == [2, "forward"]
    engine.run()
    assert_served(engine, [again])


@cuda_only
def test_copies_of_all_layers_are_enqueued_before_the_first_is_awaited(driver: Driver) -> None:
    """And the attention of layer 0 is over while those of layer 1 and 2 have not run."""
    model = LayeredReader(200, 4, page_size=4)
    engine, prompt, _ = evicted_prompt(model)
    driver.run()
    driver.set_patience(NEVER)
    driver.reset_calls()
    # Of each layer: launches of copies so far when it is awaited, and work that has not run when it was read.
    launched: list[int] = []
    left: list[int] = []
    read = model._tokens

    def tokens(layer: int, plan: BatchPlan) -> list[list[int]]:
        found = read(layer, plan)  # waits for the stream
        left.append(driver.pending())
        return found

    model._tokens = tokens  # type: ignore[method-assign]
    again = engine.submit(prompt, 1)
    with watched(lambda _: launched.append(driver.calls("launch:kvpool_copy_pages"))):
        engine.step()
    assert launched[:3] == [3, 3, 3]
    assert left[0] > left[1] > left[2]
    assert driver.calls("cuStreamSynchronize") >= 3
    assert_served(engine, [again])


# Failures


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize("fails_at", [0, 1, 2])
def test_a_load_that_fails_half_way_is_computed(kind: str, fails_at: int) -> None:
    model = READERS[kind](200, 4, page_size=4)
    fails_at = min(fails_at, model.layers - 1)
    engine, prompt, _ = evicted_prompt(model)
    other = engine.submit([7, 8, 9], 12, sampling=Sampling(1.0))
    engine.step()
    again = engine.submit(prompt, 5)
    failed: list[int] = []

    def wait(layer: int) -> None:
        if layer >= fails_at:
            failed.append(layer)
            raise RuntimeError("the copies have ended before they were complete")

    with watched(wait):
        assert engine.step()
        assert len(failed) == 1
        assert (again.state, again.prefix_len) == ("waiting", 40)
        settle(engine)
        some(engine.prefix_cache).evict(1000)  # what has arrived nevertheless
        # No load is tried before a step was computed.
        assert engine.step()
        assert (again.state, again.prefix_len) == ("running", 0)
    engine.run()
    assert (other.retractions, again.retractions) == (1, 1)
    assert engine.stats()["loaded_tokens"] == 0
    assert_served(engine, [other, again])


@pytest.mark.parametrize("kind", READERS)
def test_a_load_that_ends_before_its_request_has_run_is_computed(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    try_load = Prefixes.try_load
    left: list[int] = []

    def cancelled(self: Prefixes[Request], request: Request) -> bool:
        answer = try_load(self, request)
        some(request.held.load).cancel()
        left.append(some(request.held.lease).length)  # not 0 if it was faster
        return answer

    engine, prompt, _ = evicted_prompt(READERS[kind](200, 4, page_size=4))
    again = engine.submit(prompt, 5)
    monkeypatch.setattr(Prefixes, "try_load", cancelled)
    engine.run()
    assert ([again.prefix_len], again.retractions) == (left, 0)
    assert_served(engine, [again])


@pytest.mark.parametrize("fails_in", [0, 1, 3, 10])
def test_a_failing_model_loses_no_loads(fails_in: int) -> None:
    model = LayeredReader(64, 4, page_size=4)
    engine, prompt, _ = evicted_prompt(model)
    requests = [engine.submit(prompt + [number] * (5 * number), 9) for number in range(4)]
    model.fails_in = fails_in
    with pytest.raises(RuntimeError, match="the model fails"):
        engine.run()
    assert is_whole(engine)
    model.fails_in, model._fresh = None, set()
    engine.run()
    assert_served(engine, requests)


def test_an_abort_ends_a_load() -> None:
    engine, prompt, _ = evicted_prompt(LayeredReader(200, 4))
    again = engine.submit(prompt, 5)
    step = engine._scheduler.plan()  # the model has not run
    assert some(step).loads[0].length == 40
    engine.abort(again)
    assert is_whole(engine)
    last = engine.submit(prompt, 5)
    engine.run()
    assert_served(engine, [last])


# Slots that are free when a copy is over


def filled(model: PoolReader) -> Engine:
    """An engine whose pool is full of what must be copied down before it is evicted."""
    engine = tiered(model, 64, 1000, "back")
    for number in range(4):
        engine.submit([number] * 17, 1)
    engine.run()
    assert engine.stats()["cached"] >= 60
    return engine


@pytest.mark.parametrize("kind", READERS)
def test_copies_are_waited_for_without_retractions(kind: str) -> None:
    engine = filled(READERS[kind](68, 4, page_size=4))
    requests = [engine.submit([9, number], 12) for number in range(4)]
    engine.run()
    assert engine.stats()["retractions"] == 0
    assert_served(engine, requests)


@cuda_only
@pytest.mark.parametrize("patience", [3, 10, 30, 100, 300])
def test_late_copies_retract_nothing(driver: Driver, patience: int) -> None:
    engine = filled(LayeredReader(68, 4, page_size=4))
    settle(engine)
    driver.set_patience(patience)
    old = engine.submit([9, 9], 20)
    engine.step()
    requests = [old, *(engine.submit([number] * 17 + [8], 3) for number in range(2))]
    engine.run()
    assert engine.stats()["retractions"] == 0
    assert engine.stats()["loaded_tokens"] > 0
    assert_served(engine, requests)


def test_a_step_evicts_for_the_next_one() -> None:
    """So that copies run while the model computes: a request that decodes waits for none."""
    engine = filled(LayeredReader(68, 4, page_size=4))
    request = engine.submit([9, 9], 40)
    engine.step()
    waits = engine._scheduler.waits
    while engine.step():
        settle(engine)
        needs_page = request.state == "running" and request.held.cached % 4 == 0
        assert not needs_page or engine.model.allocator.available_size() >= 4
    assert engine._scheduler.waits == waits
    assert_served(engine, [request])


IMPATIENT = SchedulerOptions(copies_timeout_s=0.05, fetch_timeout_s=0.05)


def test_slots_that_never_come_are_not_waited_for_forever() -> None:
    model = LayeredReader(60, 4)
    engine, prompt, _ = evicted_prompt(model, options=IMPATIENT)
    fence = Fence()
    model.allocator.free(some(model.allocator.alloc(50)), after=fence)
    again = engine.submit(prompt, 5)
    with pytest.raises(OutOfMemoryError, match="10 of 60 slots are available"):
        engine.step()
    assert again.state == "waiting"
    small = engine.submit([1, 2, 3], 4)
    engine.abort(again)
    engine.run()
    fence.done = True
    last = engine.submit(prompt, 5)
    engine.run()
    assert last.prefix_len == 40
    assert_served(engine, [small, last])


def test_a_prompt_is_computed_when_slots_for_its_load_do_not_come() -> None:
    """The load needs slots for the whole prefix, a step only those for its chunk."""
    model = LayeredReader(60, 4)
    engine, prompt, _ = evicted_prompt(model, max_step_tokens=16, options=IMPATIENT)
    fence = Fence()
    model.allocator.free(some(model.allocator.alloc(40)), after=fence)
    again = engine.submit(prompt, 5)
    engine.step()
    assert (again.state, again.prefix_len, again.held.cached) == ("running", 0, 16)
    fence.done = True
    engine.run()
    assert_served(engine, [again])


# Interrupts


FIRST, SECOND = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3], [2, 7, 1, 8, 2, 8, 1, 8, 2, 8, 4]
ROUNDS = [
    [FIRST],
    [SECOND],
    [[*FIRST, 7, 7]],
    [[*SECOND, 9], [6, 6, 6]],
    [[*FIRST, 7, 7, 1], [*FIRST, 8], [*SECOND, 9, 9]],
]
"""Prompts that are served together; before each round what is cached is evicted."""

LOADING = {
    "plan",
    "_admit",
    "_loadable",
    "try_load",
    "_start",
    "match",
    "_try_start",
    "_prepare",
    "attempt",
    "_plan_batch",
    "_forward",
    "wait_layer",
    "wait",
    "record_computed",
    "release",
}
"""Functions that load, or that have to do with what is being loaded."""


def serve_interrupted(kind: str, write: str, at: Event) -> Interrupts:
    """Serves prompts that are loaded, with an interrupt at an event, and goes on."""
    model = READERS[kind](40, 3, 40, 4)
    engine, interrupts = tiered(model, 12, 400, write), Interrupts(at, LOADING)
    requests: list[Request] = []
    raised = 0

    def traced(call: Callable[[], object]) -> None:
        nonlocal raised
        try:
            with interrupts.traced():
                call()
        except KeyboardInterrupt:
            raised += 1
            model._fresh = set()
        settle(engine)  # what is over does not depend on time

    for prompts in ROUNDS:
        some(engine.prefix_cache).evict(1000)
        settle(engine)
        first = len(requests)
        while len(requests) < first + len(prompts):
            prompt = prompts[len(requests) - first]
            traced(lambda: requests.append(engine.submit(prompt, 5)))  # noqa: B023 - called at once
        while not all(request.is_over for request in requests):
            traced(engine.step)
    assert raised == interrupts.has_raised
    assert_served(engine, requests)
    assert raised or engine.stats()["loaded_tokens"] > 30
    return interrupts


@devices.cpu_only
@pytest.mark.parametrize(("kind", "write"), [("dense", "through"), ("hybrid", "through"), ("dense", "back")])
def test_an_interrupt_while_prefixes_are_loaded_loses_nothing(kind: str, write: str) -> None:
    events = Counter(serve_interrupted(kind, write, 0).places)
    assert {name for name, *_ in events} == LOADING
    # A third of the places each. There are fewer events where copies that are waited for are over sooner.
    offset = ["dense through", "hybrid through", "dense back"].index(f"{kind} {write}")
    chosen = [(place, (number + 1) // 2) for place, number in events.items()][offset::3]
    reached = sum(serve_interrupted(kind, write, event).has_raised for event in chosen)
    assert reached >= len(chosen) - 5


# What auto chooses


class SimulatedMachine:
    """The seconds of steps on a simulated machine."""

    def __init__(self, step: float, token: float, load: float, loaded_token: float) -> None:
        self.step, self.token, self.load, self.loaded_token = step, token, load, loaded_token

    def run(self, swap: Swap, chunk_tokens: int = 0, loaded: int = 0) -> None:
        """A step, which takes its time."""
        seconds = self.step + self.token * chunk_tokens
        seconds += (self.load + self.loaded_token * loaded) if loaded else 0.0
        swap.record_step(seconds, chunk_tokens, loaded, is_over=True)

    def serve(self, swap: Swap, sizes: Iterable[int]) -> list[bool]:
        """Prefixes of these sizes, loaded or computed as the swap says, among decoding requests."""
        choices = []
        for size in sizes:
            choices.append(swap.pays(size))
            self.run(swap, *((3, size) if choices[-1] else (size, 0)))
            for _ in range(20):
                self.run(swap)
        return choices


@devices.cpu_only
def test_auto_tries_both_and_keeps_to_the_cheaper() -> None:
    fast, slow = SimulatedMachine(0.02, 1e-4, 1e-3, 1e-5), SimulatedMachine(0.02, 1e-4, 1e-3, 1e-3)
    assert fast.serve(Swap(), [500] * 20) == [False, *[True] * 19]
    assert slow.serve(Swap(), [500] * 20) == [False, True, *[False] * 18]


@devices.cpu_only
def test_auto_chooses_by_the_number_of_tokens() -> None:
    """A load costs 10 ms and more, a computed token 0.1 ms: below 112 tokens computing is cheaper."""
    machine, swap = SimulatedMachine(0.02, 1e-4, 1e-2, 1e-5), Swap()
    machine.serve(swap, [64, 500, 64, 1000, 64, 2000])
    assert [size for size in (16, 32, 64, 100, 125, 250, 1000) if swap.pays(size)] == [125, 250, 1000]


@devices.cpu_only
def test_auto_learns_that_costs_change() -> None:
    slow, fast = SimulatedMachine(0.02, 1e-4, 1e-3, 1e-3), SimulatedMachine(0.02, 1e-4, 1e-3, 1e-6)
    swap = Swap()
    slow.serve(swap, [500] * 20)
    choices = fast.serve(swap, [500] * 1000)
    assert not choices[0]
    assert all(choices[-300:])
    assert not any(slow.serve(swap, [500] * 100)[-20:])


@devices.cpu_only
def test_auto_tries_loads_larger_than_any() -> None:
    """A first load of few tokens, whose cost is that of a call, says nothing of large ones."""
    machine, swap = SimulatedMachine(0.02, 1e-4, 1e-2, 1e-6), Swap()
    assert machine.serve(swap, [4, 4, 4, 4, 4000]) == [False, True, False, False, True]


@devices.cpu_only
def test_steps_that_the_host_has_not_waited_for_count_with_the_next() -> None:
    swaps = Swap(), Swap()
    for swap in swaps:
        swap.record_step(0.02, 0, 0, is_over=True)
    swaps[0].record_step(0.02 + 0.05, 500, 0, is_over=True)
    # A device is busy with two chunks that were enqueued at once.
    swaps[1].record_step(0.001, 250, 0, is_over=False)
    swaps[1].record_step(0.02 + 0.02 + 0.05 - 0.001, 250, 0, is_over=True)
    costs = [swap._steps.at(1000, swap._least) for swap in swaps]
    assert costs[0] == pytest.approx(costs[1])
    assert costs[0] == pytest.approx(0.02 + 0.1)
    swaps[1].record_step(7.0, 250, 0, is_over=False)
    swaps[1].drop_open()
    swaps[1].record_step(0.02, 0, 0, is_over=True)
    assert swaps[1]._least == pytest.approx(0.02)


@devices.cpu_only
def test_a_line_follows_what_was_measured() -> None:
    line = Line()
    assert (line.at(100), line.at(100, 2.0), line.slope(), line.is_known) == (0, 2, 0, False)
    line.add(10, 5.0)
    assert (line.at(20), line.slope(), line.slope(2.0)) == pytest.approx((10, 0.5, 0.3))
    line.add(20, 8.0)
    assert (line.at(0), line.slope(), line.at(40)) == pytest.approx((2.0, 0.3, 14.0))
    falling, below_zero = Line(), Line()
    for tokens, low, high in ((10, 5.0, 1.0), (20, 3.0, 8.0)):
        falling.add(tokens, low)
        below_zero.add(tokens, high)
    assert falling.slope() == 0
    assert 3 < falling.at(1000) < 5
    assert below_zero.at(0) == 0
    assert 0.3 < below_zero.slope() < 0.5


@devices.cpu_only
def test_a_swap_has_one_of_three_names() -> None:
    assert [Swap(mode).pays(1) for mode in get_args(SwapMode)] == [False, True, False]
    with pytest.raises(ConfigError, match="swap is 'sometimes'; it is 'auto', 'load' or 'compute'"):
        Engine(PoolReader(60), 16, swap=cast("SwapMode", "sometimes"))


class DelayedStore(Memory):
    """A store that answers look-ups only while it is open."""

    def __init__(self) -> None:
        self.is_open = threading.Event()
        self.is_open.set()
        super().__init__()

    def find(self, keys: Sequence[bytes]) -> Sequence[bool]:
        assert self.is_open.wait(30)
        return super().find(keys)


def with_store(
    reader: str, store: DelayedStore, swap: SwapMode = "load", options: SchedulerOptions | None = None
) -> Engine:
    model = READERS[reader](64, page_size=4)
    tier = HostTier(model.pool, 4096, states=model.gdn_pool)
    cache = PrefixCache(model.allocator, states=model.gdn_pool, tiers=(tier, store), model=reader)
    return Engine(model, 64, prefix_cache=cache, swap=swap, options=options)


def stored(engine: Engine, prompts: Iterable[list[int]]) -> list[Request]:
    """Serves requests, and waits until its store has what they have computed."""
    requests = [engine.submit(prompt, 6) for prompt in prompts]
    engine.run()
    settle(engine)
    return requests


def prompts_of(seed: int, count: int = 6) -> list[list[int]]:
    chance = random.Random(seed)  # noqa: S311
    return [[chance.randrange(VOCAB) for _ in range(chance.randint(9, 30))] for _ in range(count)]


@pytest.mark.parametrize("reader", READERS)
def test_another_engine_goes_on_with_what_the_store_has(reader: str) -> None:
    with DelayedStore() as store:
        one, other = with_store(reader, store), with_store(reader, store)
        first = stored(one, prompts_of(1))
        assert_served(one, first)
        again = [other.submit(r.prompt + r.tokens + [1, 2], 6) for r in first]
        assert other.stats()["waiting"] == len(again)
        other.run()
        assert_served(other, again)
        stats = other.stats()
        assert 0 < stats["loaded_tokens"] <= stats["found_tokens"]
        assert 0 < stats["fetched_tokens"] <= sum(len(r.prompt) for r in again)
        settle(other)
        assert is_whole(other)
        lonely = with_store(reader, store, "compute")
        requests = stored(lonely, prompts_of(1))
        assert_served(lonely, requests)
        assert lonely.stats()["fetched_tokens"] == 0


def test_others_run_while_a_store_is_asked() -> None:
    with DelayedStore() as store:
        # The first of them has what the store has when it is closed, however busy the machine is.
        engine = with_store("dense", store, options=SchedulerOptions(fetch_wait_s=10.0))
        stored(engine, prompts_of(1, 2))
        running = engine.submit(prompts_of(2)[0], 30)
        engine.step()
        store.is_open.clear()
        late, gone = engine.submit(prompts_of(3)[0], 3), engine.submit(prompts_of(4)[0], 3)
        for _ in range(10):
            engine.step()
        assert (running.state, late.state, len(running.tokens)) == ("running", "waiting", 11)
        engine.abort(gone)
        assert (gone.state, engine.stats()["waiting"]) == ("aborted", 1)
        store.is_open.set()
        engine.run()
        assert_served(engine, [running, late])


@pytest.mark.parametrize("reader", READERS)
def test_requests_that_need_nothing_run_before_those_that_wait(reader: str) -> None:
    """What the store has nothing to add to is answered while the first request waits for a look-up."""
    with DelayedStore() as store:
        engine = with_store(reader, store)
        warm, *_ = stored(engine, [prompts_of(1)[0]])
        # There is a snapshot at the end of a prompt, in whole pages.
        cached = warm.prompt[: len(warm.prompt) // 4 * 4]
        store.is_open.clear()
        slow = engine.submit(prompts_of(3)[0], 3)
        others = [engine.submit(prompt, 3) for prompt in ([*cached, 1], [*cached, 2, 3], [1, 2])]
        while any(request.state != "finished" for request in others):
            assert engine.step()
        assert (slow.state, slow.tokens) == ("waiting", [])
        store.is_open.set()
        engine.run()
        assert_served(engine, [warm, slow, *others])


def test_a_fetch_that_is_over_does_not_wait_for_the_one_before() -> None:
    with DelayedStore() as store:
        engine = with_store("dense", store)
        requests = [engine.submit(prompt, 3) for prompt in prompts_of(3, 3)]
        fetches = [request.held.fetch for request in requests]
        assert all(some(fetch).wait(30) for fetch in fetches)
        # As if the first look-up was late.
        requests[0].held.fetch = SimpleNamespace(query=lambda: False, wait=lambda _: False, length=0)  # type: ignore[assignment]
        while any(request.state != "finished" for request in requests[1:]):
            assert engine.step()
        assert requests[0].state == "waiting"
        requests[0].held.fetch = fetches[0]
        engine.run()
        assert_served(engine, requests)


def test_a_store_that_does_not_answer_is_given_up() -> None:
    """Nothing else is waited for."""
    with DelayedStore() as store:
        engine = with_store("dense", store, options=IMPATIENT)
        store.is_open.clear()
        last = engine.submit(prompts_of(5)[0], 3)
        engine.run()
        assert_served(engine, [last])
        store.is_open.set()


def serve_fetched(store: DelayedStore, prompts: list[list[int]], at: int) -> list[Place]:
    """Serves prompts that are fetched, with an interrupt at an event, and goes on; all events up to it."""
    engine, interrupts = with_store("dense", store), Interrupts(at)
    requests: list[Request] = []
    raised = 0
    while len(requests) < len(prompts) or not all(request.is_over for request in requests):
        try:
            with interrupts.traced():
                if len(requests) < len(prompts):
                    requests.append(engine.submit(prompts[len(requests)], 3))
                else:
                    engine.step()
        except KeyboardInterrupt:
            raised += 1
        for request in engine._scheduler.fetching:
            assert request.held.fetch is None or request.held.fetch.wait(30)
        settle(engine)
    assert raised == (at > 0)
    assert_served(engine, requests)
    engine.run()
    settle(engine)
    assert is_whole(engine)
    assert at > 0 or engine.stats()["fetched_tokens"] > 0
    return interrupts.places


@devices.cpu_only
def test_an_interrupt_while_prompts_are_fetched_loses_nothing() -> None:
    with DelayedStore() as store:
        first = stored(with_store("dense", store), prompts_of(1, 3))
        prompts = [request.prompt + request.tokens for request in first]
        places = serve_fetched(store, prompts, 0)
        names = {"submit", "line_up", "_move_fetched", "_move"}
        assert {name for name, *_ in places} >= names
        for at in {place: at for at, place in enumerate(places, 1) if place[0] in names}.values():
            serve_fetched(store, prompts, at)


# Options of the scheduler


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"snapshot_tokens": 0}, "snapshot_tokens is 0; it must be at least 1"),
        ({"alike_tokens": 0}, "alike_tokens is 0; it must be at least 1"),
        ({"copies_timeout_s": -1.0}, "copies_timeout_s is -1.0; it must be in [0, 86400]"),
        ({"fetch_timeout_s": float("nan")}, "fetch_timeout_s is nan; it must be in [0, 86400]"),
        ({"fetch_wait_s": -1.0}, "fetch_wait_s is -1.0; it must be in [0, 86400]"),
        ({"move_wait_s": -1.0}, "move_wait_s is -1.0; it must be in [0, 86400]"),
        ({"copies_timeout_s": float("inf")}, "copies_timeout_s is inf; it must be in [0, 86400]"),
        ({"fetch_share": 0.0}, "fetch_share is 0.0; it must be above 0, and at most 1"),
        ({"fetch_share": 1.5}, "fetch_share is 1.5; it must be above 0, and at most 1"),
    ],
)
def test_options_outside_of_their_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SchedulerOptions(**options)
    assert str(caught.value) == message


@pytest.mark.parametrize(("alike_tokens", "running"), [(32, 1), (40, 2)])
def test_a_request_waits_for_one_that_begins_alike_if_enough_is_computed(
    alike_tokens: int, running: int
) -> None:
    """The first computes 40 tokens, of which the second can use 39."""
    options = SchedulerOptions(alike_tokens=alike_tokens)
    engine = Engine(LayeredReader(200), max_step_tokens=64, options=options)
    requests = [engine.submit([*range(40)], 4) for _ in range(2)]
    engine.step()
    assert engine.stats()["running"] == running
    engine.run()
    assert_served(engine, requests)


@pytest.mark.parametrize(("snapshot_tokens", "found"), [(8, 24), (64, 4)])
def test_a_state_is_kept_after_so_many_generated_tokens(snapshot_tokens: int, found: int) -> None:
    """What begins like an answer and goes on differently starts at the last snapshot before that."""
    options = SchedulerOptions(snapshot_tokens=snapshot_tokens)
    engine = Engine(HybridReader(200, page_size=4), max_step_tokens=64, options=options)
    first = engine.submit([1, 2, 3, 4], 40)
    engine.run()
    text = first.prompt + first.tokens
    other = engine.submit([*text[:30], (text[30] + 1) % VOCAB], 4)
    engine.step()
    assert other.prefix_len == found
    engine.run()
    assert_served(engine, [first, other])


@pytest.mark.parametrize(("share", "asked"), [(0.5, 2), (0.01, 1)])
def test_prompts_are_fetched_into_their_share_of_the_tier(share: float, asked: int) -> None:
    """The tier has 4096 slots; the first prompt is always fetched."""
    with DelayedStore() as store:
        engine = with_store("dense", store, options=SchedulerOptions(fetch_share=share))
        store.is_open.clear()
        requests = [engine.submit([*range(at, at + 30)], 3) for at in (0, 1)]
        assert [request.held.fetch is not None for request in requests].count(True) == asked
        store.is_open.set()
        engine.run()
        assert_served(engine, requests)


def test_copies_to_the_tier_are_waited_for_without_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pause is for slots of which nothing tells when they are free."""
    pauses: list[float] = []
    monkeypatch.setattr("kvpool_serving.slot_supply.sleep", pauses.append)
    engine = tiered(LayeredReader(60, 4), 64, 1000)
    slots = SlotSupply(engine.model.allocator, engine.prefix_cache)
    slots.wait_for_copies()
    assert pauses == []
    engine.model.allocator.free(some(engine.model.allocator.alloc(10)), after=Fence())
    slots.wait_for_copies()
    assert len(pauses) == 1
    monkeypatch.setattr(slots, "_cache", SimpleNamespace(wait_written=lambda _: False))
    slots.wait_for_copies()
    assert len(pauses) == 1
