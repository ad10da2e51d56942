"""The share of a trace's prompts that a prefix cache finds, by policy and capacity, and what that saves.

The cache alone is measured: one request after another finds its prompt and adds the rest of it, without a
clock but for policies that know which requests wait. Prompts are whole blocks, and a block counts as found if
all its tokens are, as in the release of the Mooncake traces.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from kvpool import TokenToKVPoolAllocator
from kvpool._kvpool import PrefixCache
from kvpool.errors import ConfigError
from kvpool.tools.policies import (
    ADAPTIVE_IN_SECONDS,
    IN_SECONDS_WITH_QUEUE,
    OPTIONAL_POLICIES,
    POLICIES,
    SIMULATED_POLICIES,
    WITH_QUEUE,
    WITH_SESSIONS,
    policy_named,
)
from kvpool.tools.replay.bound import most_saved
from kvpool.tools.replay.eviction import Setting
from kvpool.tools.replay.prompts import Prompts
from kvpool.tools.replay.simulate import simulate
from kvpool.tools.replay.simulated import SIMULATED
from kvpool.tools.traces.trace import END

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from kvpool._kvpool import Session, WaitingRequest
    from kvpool.prefill_cost import PrefillCost
    from kvpool.tools.replay.eviction import Eviction
    from kvpool.tools.traces import Trace

LOAD = 0.9
"""The share of the time in which a machine without a cache computes prompts, for times to first token."""

_UPDATED = 64
"""Waiting requests, the first ones of the queue, that are looked up again whenever a request is served."""


@dataclass(frozen=True)
class Saved:
    """What the hits of one cache save.

    Attributes:
        cost: Name of the cost.
        seconds: Seconds of prefill that are saved.
        ttft_s: Median and 99th percentile of the time to first token in seconds, if one machine computes one
            prompt after another, and requests arrive so fast that it would need a share of the time without a
            cache, which is the load.
    """

    cost: str
    seconds: float
    ttft_s: tuple[float, float]


@dataclass(frozen=True)
class HitRate:
    """The hits of one cache.

    Attributes:
        policy: Its policy.
        capacity: Its tokens.
        found_blocks: Blocks of all prompts that were found.
        wall_s: Real time of the measurement.
        saved: What they save by each cost.
    """

    policy: str
    capacity: int
    found_blocks: int
    wall_s: float
    saved: tuple[Saved, ...] = ()


@dataclass(frozen=True)
class Bound:
    """What no policy exceeds at a capacity.

    Attributes:
        capacity: Tokens.
        found_blocks: Blocks that are found, not a whole number.
        seconds: Seconds that are saved, by each cost.
    """

    capacity: int
    found_blocks: float
    seconds: tuple[float, ...]


@dataclass(frozen=True)
class HitRates:
    """The hit rates of a trace.

    Attributes:
        trace: Name of the trace.
        requests: Requests of the trace.
        block_size: Tokens of a block.
        blocks: Blocks of all prompts.
        repeated_blocks: Blocks of prompts that an unlimited cache finds.
        page_size: Slots per page of the caches.
        rates: One entry for each policy and capacity, in the order in which they were given.
        costs: The costs by which seconds are counted.
        prefill_s: Seconds of all prompts without a cache, by each cost.
        bounds: One entry for each capacity, if there are costs.
        in_use: Share of each pool that requests had.
        load: The load, for times to first token.
    """

    trace: str
    requests: int
    block_size: int
    blocks: int
    repeated_blocks: int
    page_size: int
    rates: list[HitRate]
    costs: tuple[PrefillCost, ...] = ()
    prefill_s: tuple[float, ...] = ()
    bounds: tuple[Bound, ...] = ()
    in_use: float = 0.0
    load: float = LOAD

    def share(self, rate: HitRate) -> float:
        """Return the share of all blocks that was found."""
        return rate.found_blocks / self.blocks


@dataclass(frozen=True)
class Job:
    """What is measured.

    Attributes:
        policies: Names of policies: `POLICIES`, `ADAPTIVE_IN_SECONDS`, `WITH_SESSIONS`,
            `OPTIONAL_POLICIES`, `SIMULATED_POLICIES`, or `FILE.py:CLASS` and `MODULE:CLASS` of an `Eviction`
            in Python, which is made with a `Setting`.
        capacities: Tokens of the caches.
        page_size: Slots per page, which divide the block size; the block size by default. Policies in Python
            evict whole blocks.
        costs: By which seconds are counted. The first one is that of policies that know it, and of the clock
            of those that know which requests wait.
        in_use: Share of each pool that requests have: the pools are so much larger than their caches.
        load: The load, for times to first token: the share of the time in which a machine without a cache
            computes prompts.
    """

    policies: Sequence[str]
    capacities: Sequence[int]
    page_size: int | None = None
    costs: tuple[PrefillCost, ...] = ()
    in_use: float = 0.0
    load: float = LOAD


def measure(trace: Trace, job: Job, on_rate: Callable[[HitRate], None] = lambda _: None) -> HitRates:
    """Measure the hit rate of each policy at each capacity.

    Args:
        trace: A trace with at least one request.
        job: What is measured.
        on_rate: Called after each measurement.

    Raises:
        ConfigError: If the page size does not divide the block size, a capacity is less than a block, or a
            policy is unknown, lacks a cost, or needs to know what follows a request.
    """
    page_size = job.page_size or trace.block_size
    if trace.block_size % page_size:
        raise ConfigError(f"page_size {page_size} does not divide the trace's blocks of {trace.block_size}")
    if min(job.capacities) < trace.block_size:
        raise ConfigError(f"capacity {min(job.capacities)} is less than a block of {trace.block_size} tokens")
    for name in job.policies:
        if name in {ADAPTIVE_IN_SECONDS, *OPTIONAL_POLICIES} and not job.costs:
            raise ConfigError(
                f"policy {name!r} needs a cost, by which it counts or requests wait, as `--compare` has"
            )
    if WITH_SESSIONS in job.policies and trace.followed_by is None:
        raise ConfigError(f"policy {WITH_SESSIONS!r}: the trace does not say what follows a request")
    own = {*POLICIES, ADAPTIVE_IN_SECONDS, WITH_SESSIONS, *OPTIONAL_POLICIES}
    simulated = {name: _simulated(name) for name in job.policies if name not in own}
    prompts, paths = Prompts(trace), trace.all_blocks()
    lens = np.array([len(path) for path in paths])
    clocks = [_Clock(cost, trace, lens, job.load) for cost in job.costs]
    # What a block at each place of a prompt saves: a block, and seconds by each cost.
    ends = trace.block_size * np.arange(lens.max() + 1)
    saves = [np.ones(len(ends) - 1), *(np.diff(cost.seconds(ends)) for cost in job.costs)]
    rates = []
    for policy in job.policies:
        for capacity in job.capacities:
            begin = perf_counter()
            if policy in simulated:
                setting = Setting(capacity // trace.block_size, trace, paths, saves[1 if job.costs else 0])
                found = simulate(simulated[policy](setting), setting)
            else:
                cache = _cache(policy, capacity, page_size, job)
                sessions = _Sessions(cache, trace) if policy == WITH_SESSIONS else None
                queue = _Queue(cache, prompts, clocks[0]) if policy in OPTIONAL_POLICIES else None
                found = _found(prompts, trace, cache, sessions, queue)
            wall_s = perf_counter() - begin
            saved = tuple(clock.saved(found) for clock in clocks)
            rates.append(HitRate(policy, capacity, int(found.sum()), wall_s, saved))
            on_rate(rates[-1])
    return HitRates(
        trace=trace.name,
        requests=len(trace),
        block_size=trace.block_size,
        blocks=int(lens.sum()),
        repeated_blocks=int(lens.sum()) - len(np.unique(np.concatenate(paths))),
        page_size=page_size,
        rates=rates,
        costs=job.costs,
        prefill_s=tuple(clock.prefill_s for clock in clocks),
        bounds=tuple(
            _bound(capacity, most_saved(paths, capacity // trace.block_size, saves))
            for capacity in job.capacities
            if clocks
        ),
        in_use=job.in_use,
        load=job.load,
    )


class _Clock:
    """Seconds by one cost."""

    def __init__(self, cost: PrefillCost, trace: Trace, lens: NDArray[np.int64], load: float) -> None:
        self._cost, self._block_size = cost, trace.block_size
        self._whole_s = cost.seconds(lens * trace.block_size)
        self.prefill_s = float(self._whole_s.sum())
        span_s = float(trace.arrival_s[-1])
        faster = span_s * load / self.prefill_s if span_s and self.prefill_s else 1.0
        self.arrival_s = trace.arrival_s / faster

    def computed_s(self, request: int, found: int) -> float:
        """Return the seconds that a request computes behind these found tokens."""
        return float(self._whole_s[request]) - float(self._cost.seconds(found))

    def saved(self, found: NDArray[np.int64]) -> Saved:
        """Return what these found blocks of each request save."""
        saved_s = self._cost.seconds(found * self._block_size)
        computed_s = self._whole_s - saved_s
        # A queue with one server, which has been busy since the last arrival at an idle server.
        busy_s = np.cumsum(computed_s)
        ends_s = busy_s + np.maximum.accumulate(self.arrival_s - (busy_s - computed_s))
        median, p99 = np.percentile(ends_s - self.arrival_s, (50, 99)).tolist()
        return Saved(self._cost.name, float(saved_s.sum()), (median, p99))


def _bound(capacity: int, most: Sequence[float]) -> Bound:
    blocks, *seconds = most
    return Bound(capacity, blocks, tuple(seconds))


def _simulated(name: str) -> Callable[[Setting], Eviction]:
    """Return what makes a policy in Python."""
    if name in SIMULATED:
        return SIMULATED[name]
    where, _, attribute = name.rpartition(":")
    if not where:
        known = ", ".join((*POLICIES, WITH_SESSIONS, *OPTIONAL_POLICIES, *SIMULATED_POLICIES))
        raise ConfigError(f"unknown policy {name!r}; use {known}, or FILE.py:CLASS")
    try:
        found: Any = getattr(_module(where), attribute)
    except (ImportError, AttributeError, OSError, SyntaxError) as error:
        raise ConfigError(f"policy {name!r}: {type(error).__name__}: {error}") from None
    lacks = [method for method in ("record", "insert", "remove", "victim") if not hasattr(found, method)]
    if lacks or not callable(found):
        raise ConfigError(f"policy {name!r} is no Eviction: it lacks {', '.join(lacks) or 'a constructor'}")
    return found  # type: ignore[no-any-return]


def _module(where: str) -> object:
    if not where.endswith(".py"):
        return importlib.import_module(where)
    spec = importlib.util.spec_from_file_location(Path(where).stem, where)
    if spec is None or spec.loader is None:
        raise ImportError(f"{where} is no module")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _cache(policy: str, capacity: int, page_size: int, job: Job) -> PrefixCache:
    in_use = round(capacity * job.in_use / (1 - job.in_use)) // page_size * page_size
    allocator = TokenToKVPoolAllocator(capacity + in_use, device="cpu", page_size=page_size, need_sort=False)
    if in_use:
        allocator.alloc(in_use)
    if policy in {ADAPTIVE_IN_SECONDS, IN_SECONDS_WITH_QUEUE}:
        return PrefixCache(allocator, cost=job.costs[0])
    if policy in {WITH_SESSIONS, WITH_QUEUE}:
        return PrefixCache(allocator)
    return PrefixCache(allocator, policy=policy_named(policy))


def _found(
    prompts: Prompts, trace: Trace, cache: PrefixCache, sessions: _Sessions | None, queue: _Queue | None
) -> NDArray[np.int64]:
    """Return for each request the blocks that an empty cache finds."""
    allocator = cache.allocator
    most = allocator.available_size()
    found = np.zeros(len(trace), np.int64)
    for request in range(len(trace)):
        tokens = prompts.whole_blocks_of(request)[:most]
        session = sessions.of(request) if sessions else None
        if queue:
            queue.serve(request)
        with cache.match(tokens, session=session) as lease:
            length = lease.length
            found[request] = length // trace.block_size
            if length < len(tokens):
                # All but this prompt can be evicted, so that there is room for it.
                lease.publish(tokens[length:], allocator.alloc(len(tokens) - length))
        if sessions:
            sessions.tell(request)
        if queue:
            queue.end(request, int(found[request]) * trace.block_size)
    return found


class _Queue:
    """The requests that wait on a clock, for a cache."""

    def __init__(self, cache: PrefixCache, prompts: Prompts, clock: _Clock) -> None:
        self._cache, self._prompts, self._clock = cache, prompts, clock
        self._waiting: dict[int, WaitingRequest] = {}
        self._arrived, self._now_s = 0, 0.0

    def serve(self, request: int) -> None:
        """Tell of those that have arrived when a request is served."""
        arrival_s = self._clock.arrival_s
        self._now_s = max(self._now_s, float(arrival_s[request]))
        while self._arrived < len(arrival_s) and arrival_s[self._arrived] <= self._now_s:
            self._waiting[self._arrived] = self._cache.add_waiting(
                self._prompts.whole_blocks_of(self._arrived)
            )
            self._arrived += 1
        for next_one, waiting in islice(self._waiting.items(), _UPDATED):
            waiting.update(self._prompts.whole_blocks_of(next_one))
        self._waiting.pop(request).remove()

    def end(self, request: int, found: int) -> None:
        """Let the time pass in which a request is computed behind these found tokens."""
        self._now_s += self._clock.computed_s(request, found)


class _Sessions:
    """What a trace knows of sessions, for a cache: each context is one."""

    def __init__(self, cache: PrefixCache, trace: Trace) -> None:
        assert trace.contexts is not None  # noqa: S101 - for the type checker
        assert trace.followed_by is not None  # noqa: S101
        self._cache, self._contexts, self._followed_by = cache, trace.contexts, trace.followed_by

    def of(self, request: int) -> Session:
        """Return the session of a request."""
        return self._cache.session(int(self._contexts[request]))

    def tell(self, request: int) -> None:
        """Tell what follows a request."""
        followed_by = str(self._followed_by[request])
        if followed_by == END:
            self.of(request).end()
        elif followed_by:
            self.of(request).pause(followed_by)
