"""Drives the pools with a request trace: continuous batching on a virtual clock, every stored byte checked.

Requests are scheduled with continuous batching, with a prefix cache if the configuration has one. There is no
model: instead of K and V, the replay stores rows of hash words that encode (prefix, position, layer, K or V).
Before slots are freed, it reads each row through the request table and compares it, those found in the cache
included. A request ends when all its tokens, prompt and output, have rows.

Each step takes `step_ms` of virtual time; only the calls into the pools are timed.
"""

from __future__ import annotations

from array import array
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import repeat
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from kvpool import BatchPlanner, ReqToTokenPool, TokenToKVPoolAllocator
from kvpool._kvpool import PrefixCache
from kvpool.errors import ConfigError, OutOfMemoryError
from kvpool.tools.replay.errors import ReplayError
from kvpool.tools.replay.pool_size import suggest_pool_size
from kvpool.tools.replay.prompts import Prompts
from kvpool.tools.replay.scheduler import Request, Scheduler
from kvpool.tools.replay.timing import timed, timer_cost_ns
from kvpool.tools.replay.token_rows import KvStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from kvpool.tools.replay.config import ReplayConfig
    from kvpool.tools.replay.scheduler import Step
    from kvpool.tools.traces import Trace

BOOKKEEPING = ("extend", "finish", "alloc_row", "match", "publish")
"""The operations that make up the pools' share of time."""
OPERATIONS = (*BOOKKEEPING, "read", "set_kv", "gather")
"""All operations, including copies of K and V and the table reads of the check."""


@dataclass
class Counts:
    """Counters of a replay.

    A generated token counts as decoded once, and as prefilled each time it is recomputed after a retraction,
    like the tokens of a prompt. Tokens that an admission finds in the prefix cache count as found instead.
    """

    requests: int = 0
    rejected: int = 0
    admissions: int = 0
    finished: int = 0
    retractions: int = 0
    prefilled_tokens: int = 0
    found_tokens: int = 0
    evicted_tokens: int = 0
    decoded_tokens: int = 0
    verified_tokens: int = 0
    steps: int = 0
    peak_in_use: int = 0
    peak_running: int = 0

    @property
    def operations(self) -> int:
        """Scheduler operations: each admission, decoded token, finish and retraction."""
        return self.admissions + self.decoded_tokens + self.finished + self.retractions


class Occupancy(NamedTuple):
    """One entry per step: virtual seconds, slots of requests, slots that only the cache needs, requests."""

    time_s: NDArray[np.float64]
    in_use: NDArray[np.int64]
    evictable: NDArray[np.int64]
    running: NDArray[np.int64]


@dataclass(frozen=True)
class ReplayResult:
    """A finished replay.

    Attributes:
        trace: Name of the trace.
        config: The configuration with `pool_size` and `max_context` filled in.
        capacity: Slots the allocator can hand out.
        kv_bytes: Bytes of the K and V buffers, 0 without a KV pool.
        counts: The counters.
        virtual_s: Virtual time of the last step's end.
        wall_s: Real time of the run, set-up excluded.
        samples: int64 nanoseconds of every call, by operation.
        timer_ns: Median measured time of an empty call, included in every sample.
        occupancy: The pool over virtual time.
        retracted_s: float64 virtual times of the retractions.
    """

    trace: str
    config: ReplayConfig
    capacity: int
    kv_bytes: int
    counts: Counts
    virtual_s: float
    wall_s: float
    samples: dict[str, NDArray[np.int64]]
    timer_ns: float
    occupancy: Occupancy
    retracted_s: NDArray[np.float64]

    @property
    def share_ns(self) -> float:
        """The pools' share: nanoseconds of bookkeeping calls per scheduler operation."""
        total = sum(int(self.samples[name].sum()) for name in BOOKKEEPING)
        return total / max(self.counts.operations, 1)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Limit PyTorch to one thread: small tensors gain little from more, and lose on busy cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class Replay:
    """One replay of a trace: builds the pools, then `run` drives them until every request has ended.

    Attributes:
        trace: The requests.
        config: The configuration with `pool_size` and `max_context` filled in.
        allocator, table: The pools.
        cache: The prefix cache, if the configuration has one.
        kv: The KV pool and its encoder; None with `kv=False`.
        scheduler: The scheduler.
        counts: The counters so far.
        time_s: Virtual time.
    """

    def __init__(self, trace: Trace, config: ReplayConfig) -> None:
        if not len(trace):
            raise ConfigError("the trace holds no requests")
        self.trace = trace
        pool_size, max_context = _sizes(trace, config)
        config = replace(config, pool_size=pool_size, max_context=max_context)
        self.config: ReplayConfig = config
        self._samples: dict[str, array[int]] = {name: array("q") for name in OPERATIONS}
        self.allocator: TokenToKVPoolAllocator = TokenToKVPoolAllocator(
            pool_size, device=config.device, page_size=config.page_size, need_sort=config.need_sort
        )
        self.capacity: int = self.allocator.available_size()
        accepted = _accepted(trace, max_context, self.capacity, config.page_size)
        self.table: ReqToTokenPool = ReqToTokenPool(config.max_running, max_context, device=config.device)
        self.cache: PrefixCache | None = None
        if config.prefix_cache:
            self.cache = PrefixCache(self.allocator, policy=config.policy)
        prompts = Prompts(trace)
        self.kv: KvStore | None = None
        if config.kv:
            self.kv = KvStore(config, pool_size, prompts, self._samples)
        self.counts: Counts = Counts(requests=len(trace), rejected=len(trace) - len(accepted))
        # Hashes of the outputs' prefixes by row, for the tokens of a batch.
        self._row_keys = torch.zeros(config.max_running + 1, dtype=torch.int64, device=config.device)
        planner = BatchPlanner(
            self.table,
            self.allocator,
            config.max_running,
            config.prefill_budget + config.max_running,
            kv_indices=False,
            block_table=False,
        )
        self.scheduler: Scheduler = Scheduler(planner, self.cache, self._samples, self._check_rows)
        self._read = timed(self.table.read, self._samples["read"])
        self._decoding = 0
        self._arrivals = self._make_requests(accepted, prompts)
        self.time_s: float = 0.0
        self._times, self._in_use = array("d"), array("q")
        self._evictable, self._running = array("q"), array("q")
        self._retracted_s = array("d")

    def _make_requests(self, accepted: NDArray[np.int64], prompts: Prompts) -> deque[tuple[float, Request]]:
        """Return the requests that can be served, in order of arrival."""
        arrival_s = self.trace.arrival_s[accepted] / self.config.speed_up
        inputs = self.trace.input_lens[accepted].tolist()
        totals = self.trace.total_lens[accepted].tolist()
        # All tokens of the prompt are known.
        requests = map(Request, accepted.tolist(), totals, inputs, inputs, repeat(prompts))
        return deque(zip(arrival_s.tolist(), requests, strict=True))

    @property
    def ended(self) -> int:
        """Requests that are finished or rejected."""
        return self.counts.finished + self.counts.rejected

    @property
    def in_use(self) -> int:
        """Slots that requests use."""
        return self.capacity - self.allocator.available_size() - self.evictable

    @property
    def evictable(self) -> int:
        """Slots that only the prefix cache needs."""
        return self.cache.evictable_size() if self.cache is not None else 0

    def run(self, on_step: Callable[[Replay], None] | None = None) -> ReplayResult:
        """Run until every request has ended and everything is freed.

        Args:
            on_step: Called with this object before each step's finished requests are checked and freed.

        Raises:
            VerificationError: If a stored row is wrong.
            ReplayError: If slots or rows are missing, now or at the end.
        """
        begin = perf_counter()
        with _one_thread():
            while self.ended < self.counts.requests:
                self._step(on_step)
        wall_s = perf_counter() - begin
        self._check_returned()
        return self._result(wall_s)

    def _step(self, on_step: Callable[[Replay], None] | None) -> None:
        step = self._plan()
        if step is not None and self.kv is not None:
            self._store(self.kv, step)
        self._record()
        if on_step is not None:
            on_step(self)
        if step is not None:
            self._advance(step)
        self.time_s += self.config.step_ms / 1000.0

    def _plan(self) -> Step | None:
        """Plan a step for all requests that have arrived."""
        scheduler, arrivals = self.scheduler, self._arrivals
        if scheduler.is_idle and arrivals:
            self.time_s = max(self.time_s, arrivals[0][0])
        while arrivals and arrivals[0][0] <= self.time_s:
            scheduler.submit(arrivals.popleft()[1])
        # Decoded tokens do not count against the prompts' budget.
        try:
            step = scheduler.plan(self.config.prefill_budget + self._decoding)
        except OutOfMemoryError as error:
            raise ReplayError(f"after {self.time_s:.3f} s: {error}") from error
        self._retracted_s.extend([self.time_s] * (scheduler.retractions - len(self._retracted_s)))
        return step

    def _store(self, kv: KvStore, step: Step) -> None:
        """Write the rows of all new tokens of a step."""
        plan = step.plan
        if step.started:
            outputs = [(r.row, kv.rows.prompts.output(r.index)) for r in step.started]
            rows, prefixes = torch.tensor(outputs).T.to(self._row_keys.device)
            self._row_keys[rows] = kv.rows.prefix_keys[prefixes]
        keys = self._row_keys[plan.req_pool_indices.long()]
        if plan.num_tokens > len(step.requests):
            keys = keys.repeat_interleave(plan.qo_indptr.diff())
        begin = 0
        for request, end in zip(step.requests, step.ends, strict=True):
            count = end - request.cached
            if request.cached < request.input_len:
                if request.prefix_keys is None:
                    request.prefix_keys = kv.rows.prefix_keys_of(request.index, 0, request.total_len)
                keys[begin : begin + count] = request.prefix_keys[request.cached : end]
            begin += count
        kv.store(kv.rows.keys(keys, plan.positions), plan.out_cache_loc)

    def _record(self) -> None:
        in_use, running, counts = self.in_use, len(self.scheduler.running), self.counts
        counts.steps += 1
        counts.peak_in_use = max(counts.peak_in_use, in_use)
        counts.peak_running = max(counts.peak_running, running)
        self._times.append(self.time_s)
        self._in_use.append(in_use)
        self._evictable.append(self.evictable)
        self._running.append(running)

    def _advance(self, step: Step) -> None:
        """Append the next token to requests whose known tokens all have rows; release finished requests."""
        counts = self.counts
        ended: list[Request] = []
        decoding = 0
        counts.found_tokens += sum(request.prefix_len for request in step.started)
        self.scheduler.record_computed(step)
        for request, end in zip(step.requests, step.ends, strict=True):
            if end == request.total_len:
                ended.append(request)
            elif end == request.seq_len:
                request.seq_len = end + 1
                decoding += 1
        self._decoding = decoding
        counts.decoded_tokens += decoding
        counts.prefilled_tokens += step.plan.num_tokens - decoding
        if ended:
            counts.finished += len(ended)
            self.scheduler.release(ended)
        counts.retractions = self.scheduler.retractions
        counts.admissions = counts.finished + counts.retractions + len(self.scheduler.running)

    def _check_rows(self, request: Request) -> None:
        """Compare all rows of K and V of a request with what was stored, before its slots are freed."""
        if self.kv is not None:
            slots = self._read(request.row, request.cached)
            self.kv.check(request.index, self.kv.rows.keys_of(request.index, 0, request.cached), slots)
            self.counts.verified_tokens += request.cached

    def _check_returned(self) -> None:
        problems = []
        if self.cache is not None:
            self.cache.verify()
            self.counts.evicted_tokens = self.cache.stats()["evicted"]
            self.cache.clear()
        if self.in_use:
            problems.append(f"{self.in_use} of {self.capacity} slots were not freed")
        rows = self.table.available_size()
        if rows != self.config.max_running:
            problems.append(
                f"{self.config.max_running - rows} of {self.config.max_running} rows were not freed"
            )
        for name, pool in (("slot", self.allocator), ("row", self.table)):
            dropped = pool.stats()["dropped_frees"]
            if dropped:
                problems.append(f"{dropped} {name} frees were dropped")
        if problems:
            raise ReplayError(f"after the last request of {self.trace.name}: {'; '.join(problems)}")
        self.allocator.verify()
        if self.kv is not None:
            self.kv.pool.check()

    def _result(self, wall_s: float) -> ReplayResult:
        def ints(values: array[int]) -> NDArray[np.int64]:
            return np.array(values, dtype=np.int64)

        return ReplayResult(
            trace=self.trace.name,
            config=self.config,
            capacity=self.capacity,
            kv_bytes=self.kv.pool.mem_bytes() if self.kv is not None else 0,
            counts=self.counts,
            virtual_s=self.time_s,
            wall_s=wall_s,
            samples={name: ints(values) for name, values in self._samples.items()},
            timer_ns=timer_cost_ns(),
            occupancy=Occupancy(
                np.array(self._times), ints(self._in_use), ints(self._evictable), ints(self._running)
            ),
            retracted_s=np.array(self._retracted_s),
        )


def _sizes(trace: Trace, config: ReplayConfig) -> tuple[int, int]:
    """Return the pool size and the longest context: as configured, or those that suit the trace."""
    max_context = config.max_context or int(trace.total_lens.max())
    if config.pool_size is not None:
        return config.pool_size, max_context
    fitting = trace.take(np.flatnonzero(trace.total_lens <= max_context))
    return suggest_pool_size(fitting, config) if len(fitting) else config.page_size, max_context


def _accepted(trace: Trace, max_context: int, capacity: int, page_size: int) -> NDArray[np.int64]:
    """Return the positions of the requests in the trace that fit into the request table and the pool alone.

    Raises:
        ConfigError: If there are none.
    """
    slots = -(-trace.total_lens // page_size) * page_size
    accepted = np.flatnonzero((trace.total_lens <= max_context) & (slots <= capacity))
    if not len(accepted):
        raise ConfigError(
            f"all {len(trace)} requests would be rejected: the shortest has {trace.total_lens.min()} "
            f"tokens, a request can have {max_context} (max_context), and the pool has {capacity} slots"
        )
    return accepted
