"""Drives the pools with a request trace: continuous batching on a virtual clock, every stored byte checked.

The scheduler is small but does what a serving engine does: it admits requests in order of arrival while rows
and slots last, prefills them with a token budget per step, decodes one token per step for all of them in one
batch, gives a finished request's slots and row back, and retracts the youngest request when the pool is
short. There is no model: in place of K and V it stores rows of hash words that encode (request, position,
layer, K or V), and compares each of them, read through the request table, before the slots are given back.

Steps take `step_ms` of virtual time each; only the calls into the pools are timed.
"""

from __future__ import annotations

from array import array
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import starmap
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch

from kvpool import ReqToTokenPool, TokenToKVPoolAllocator
from kvpool.errors import ConfigError
from kvpool.tools.replay.errors import ReplayError
from kvpool.tools.replay.timing import timed, timer_cost_ns
from kvpool.tools.replay.token_rows import KvStore, TokenRows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from kvpool.tools.replay.config import ReplayConfig
    from kvpool.tools.replay.traces import Trace

OPERATIONS = ("alloc", "free", "alloc_row", "free_row", "write", "read", "set_kv", "gather")
BOOKKEEPING = ("alloc", "free", "alloc_row", "free_row", "write", "read")
"""The operations whose time is the pools' share: all but the copies of K and V."""

DEFAULT_POOL_SHARE = 0.5
"""The default pool holds this part of what the trace would occupy in an unlimited one."""


@dataclass
class Counts:
    """What happened in a replay; tokens count again when a retracted request is prefilled again."""

    requests: int = 0
    rejected: int = 0
    admissions: int = 0
    finished: int = 0
    retractions: int = 0
    prefilled_tokens: int = 0
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
    """One entry per step: virtual seconds (float64), slots in use (int64), running requests (int64)."""

    time_s: NDArray[np.float64]
    in_use: NDArray[np.int64]
    running: NDArray[np.int64]


@dataclass(frozen=True)
class ReplayResult:
    """A finished replay.

    Attributes:
        trace: Name of the trace.
        config: The configuration with `pool_size` and `max_context` filled in.
        capacity: Slots the allocator can hand out.
        kv_bytes: Bytes of the K and V buffers, 0 without a KV pool.
        counts: What happened.
        virtual_s: Virtual time of the last step's end.
        wall_s: Real time of the run, set-up excluded.
        samples: int64 nanoseconds of every call, by operation.
        timer_ns: Median time that timing an empty call gives, contained in every sample.
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


def suggest_pool_size(trace: Trace, config: ReplayConfig) -> int:
    """The default pool size: tight enough to force retractions, large enough for every single request.

    It is `DEFAULT_POOL_SHARE` of the most slots that the trace would occupy in an unlimited pool at the
    configured rates, at least the longest request, in whole pages. In the unlimited pool requests are
    prefilled one after another at the full budget and then decode one token per step; no more than
    `max_running` count.

    Args:
        trace: At least one request.
        config: Rates, page size and `max_running`.
    """
    page_size = config.page_size
    totals = -(-trace.total_lens // page_size) * page_size
    most = min(_unlimited_peak(trace, config), float(np.sort(totals)[-config.max_running :].sum()))
    pages = max(-(-int(most * DEFAULT_POOL_SHARE) // page_size), int(totals.max()) // page_size)
    return pages * page_size


def _unlimited_peak(trace: Trace, config: ReplayConfig) -> float:
    """Most slots in use at once in a pool without limit, the prompts in whole pages."""
    step_s = config.step_ms / 1000.0
    inputs = -(-trace.input_lens // config.page_size) * config.page_size
    prefill_s = trace.input_lens * (step_s / config.prefill_budget)
    # A queue with one server: it has been busy since the latest arrival that found it idle.
    busy_s = np.cumsum(prefill_s)
    ready = busy_s + np.maximum.accumulate(trace.arrival_s / config.speed_up - (busy_s - prefill_s))
    ended = ready + trace.output_lens * step_s
    # Usage falls only where a request ends, so its peak lies just before an end, or where a prompt comes in.
    times = np.concatenate((ended, ready - prefill_s))
    started = _sums_until(times, ready - prefill_s, inputs, "right")
    over = _sums_until(times, ended, inputs, "left")
    ones = np.ones(len(trace))
    decoding = _sums_until(times, ready, ones, "right") - _sums_until(times, ended, ones, "left")
    ready_of_decoding = _sums_until(times, ready, ready, "right") - _sums_until(times, ended, ready, "left")
    return float((started - over + (decoding * times - ready_of_decoding) / step_s).max())


def _sums_until(
    times: NDArray[np.float64],
    keys: NDArray[np.float64],
    values: NDArray[Any],
    side: Literal["left", "right"],
) -> NDArray[np.float64]:
    """For each time the sum of the `values` whose key is below it, or also equal to it for `"right"`."""
    order = np.argsort(keys)
    sums = np.concatenate(([0.0], np.cumsum(values[order])))
    return sums[np.searchsorted(keys[order], times, side)]


@contextmanager
def _one_thread() -> Iterator[None]:
    """Keeps PyTorch to one thread: small pieces gain little from more, and lose on busy cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@dataclass(slots=True, eq=False)
class _Request:
    """A request until it ends; `row` and what follows belong to its current admission."""

    index: int
    input_len: int
    output_len: int
    generated: int = 0
    row: int = 0
    prefilled: int = 0
    joined: int = 0

    @property
    def seq_len(self) -> int:
        """Tokens at admission: the prompt, and what was generated before a retraction."""
        return self.input_len + self.generated

    @property
    def ends(self) -> int:
        """The value of the decode counter at which the last token has been decoded."""
        return self.joined + self.output_len - self.generated


class _Batch:
    """The requests that decode, oldest first, and their state as tensors on the pool's device.

    The tensors are rebuilt when the membership changes; otherwise a step only adds 1 to `positions`.
    """

    def __init__(self, device: torch.device) -> None:
        self.requests: list[_Request] = []
        self.rows = torch.empty(0, dtype=torch.int32, device=device)
        self.positions = self.rows
        self.last_slots = self.rows
        self.request_keys = torch.empty(0, dtype=torch.int64, device=device)
        self.next_end = 0
        self.changed = False

    def rebuild(self, decoded: int, req_to_token: torch.Tensor, rows: TokenRows | None) -> None:
        """Brings the tensors up to date.

        Args:
            decoded: The decode counter: a member that joined at `j` has `seq_len + decoded - j` tokens.
            req_to_token: The request table; the last slot of every member is read from it.
            rows: Gives the request keys; None without a KV pool.
        """
        device = self.rows.device
        members = self.requests
        self.rows = torch.tensor([r.row for r in members], dtype=torch.int32).to(device)
        lengths = [r.seq_len + decoded - r.joined for r in members]
        self.positions = torch.tensor(lengths, dtype=torch.int32).to(device)
        self.last_slots = req_to_token[self.rows.long(), self.positions.long() - 1]
        if rows is not None:
            indices = torch.tensor([r.index for r in members]).to(device)
            self.request_keys = rows.request_keys[indices]
        self.next_end = min((r.ends for r in members), default=0)
        self.changed = False


class Replay:
    """One replay of a trace: builds the pools, then `run` drives them until every request has ended.

    Attributes:
        trace: The requests.
        config: The configuration with `pool_size` and `max_context` filled in.
        allocator, table: The pools.
        kv: The KV pool and its encoder; None with `kv=False`.
        counts: What happened so far.
        time_s: Virtual time.
    """

    def __init__(self, trace: Trace, config: ReplayConfig) -> None:
        if not len(trace):
            raise ConfigError("the trace holds no requests")
        self.trace = trace
        max_context = config.max_context or int(trace.total_lens.max())
        inside = trace.total_lens <= max_context
        pool_size = config.pool_size
        if pool_size is None:
            fitting = replace(
                trace,
                arrival_s=trace.arrival_s[inside],
                input_lens=trace.input_lens[inside],
                output_lens=trace.output_lens[inside],
            )
            pool_size = suggest_pool_size(fitting, config) if len(fitting) else config.page_size
        self.config = config = replace(config, pool_size=pool_size, max_context=max_context)
        self._samples: dict[str, array[int]] = {name: array("q") for name in OPERATIONS}
        self.allocator = TokenToKVPoolAllocator(
            pool_size, device=config.device, page_size=config.page_size, need_sort=config.need_sort
        )
        self.capacity = self.allocator.available_size()
        pages = -(-trace.total_lens // config.page_size)
        accepted = np.flatnonzero(inside & (pages * config.page_size <= self.capacity))
        if not len(accepted):
            raise ConfigError(
                f"all {len(trace)} requests would be rejected: the shortest has {trace.total_lens.min()} "
                f"tokens, a request can have {max_context} (max_context), and the pool has {self.capacity} "
                "slots"
            )
        self.table = ReqToTokenPool(config.max_running, max_context, device=config.device)
        self.kv = KvStore(config, pool_size, len(trace), self._samples) if config.kv else None
        self.counts = Counts(requests=len(trace), rejected=len(trace) - len(accepted))
        self._wrap_calls()
        self._start(accepted)

    def _wrap_calls(self) -> None:
        samples, allocator, table = self._samples, self.allocator, self.table
        self._alloc = timed(allocator.alloc, samples["alloc"])
        self._alloc_extend = timed(allocator.alloc_extend, samples["alloc"])
        self._alloc_decode = timed(allocator.alloc_decode, samples["alloc"])
        self._free = timed(allocator.free, samples["free"])
        self._alloc_row = timed(table.alloc, samples["alloc_row"])
        self._free_row = timed(table.free, samples["free_row"])
        self._write = timed(table.write, samples["write"])
        self._read = timed(table.read, samples["read"])

    def _start(self, accepted: NDArray[np.int64]) -> None:
        arrival_s = self.trace.arrival_s[accepted] / self.config.speed_up
        lens = (accepted, self.trace.input_lens[accepted], self.trace.output_lens[accepted])
        self._arrivals = deque(
            zip(
                arrival_s.tolist(),
                starmap(_Request, zip(*(x.tolist() for x in lens), strict=True)),
                strict=True,
            )
        )
        self._retracted: deque[_Request] = deque()
        self._prefilling: _Request | None = None
        self._slots = torch.empty(0, dtype=torch.int32)
        self._batch = _Batch(self.table.req_to_token.device)
        self._decoded_steps = 0
        self.time_s = 0.0
        self._times, self._in_use, self._running = array("d"), array("q"), array("q")
        self._retracted_s = array("d")

    @property
    def ended(self) -> int:
        """Requests that are finished or rejected."""
        return self.counts.finished + self.counts.rejected

    @property
    def in_use(self) -> int:
        """Slots that are not available."""
        return self.capacity - self.allocator.available_size()

    def run(self, on_step: Callable[[Replay], None] | None = None) -> ReplayResult:
        """Runs until every request has ended and everything has been given back.

        Args:
            on_step: Called with this object before each step's finished requests are checked and freed.

        Raises:
            VerificationError: A stored row is wrong.
            ReplayError: Slots or rows are missing, now or at the end.
        """
        begin = perf_counter()
        with _one_thread():
            while self.ended < self.counts.requests:
                self._step(on_step)
        wall_s = perf_counter() - begin
        self._check_returned()
        return self._result(wall_s)

    def _step(self, on_step: Callable[[Replay], None] | None) -> None:
        if self._idle and self._arrivals:
            self.time_s = max(self.time_s, self._arrivals[0][0])
        self._prefill()
        self._decode()
        self._record()
        if on_step is not None:
            on_step(self)
        self._finish_ended()
        self.time_s += self.config.step_ms / 1000.0

    @property
    def _idle(self) -> bool:
        return not self._batch.requests and self._prefilling is None and not self._retracted

    def _record(self) -> None:
        in_use = self.in_use
        running = len(self._batch.requests) + (self._prefilling is not None)
        counts = self.counts
        counts.steps += 1
        counts.peak_in_use = max(counts.peak_in_use, in_use)
        counts.peak_running = max(counts.peak_running, running)
        self._times.append(self.time_s)
        self._in_use.append(in_use)
        self._running.append(running)

    def _prefill(self) -> None:
        """Spends the step's budget on the request in prefill, then on those that can be admitted."""
        budget = self.config.prefill_budget
        while budget > 0:
            request = self._prefilling or self._admit()
            if request is None:
                return
            count = min(budget, request.seq_len - request.prefilled)
            if self.kv is not None:
                self._store_prompt(self.kv, request, count)
            request.prefilled += count
            self.counts.prefilled_tokens += count
            budget -= count
            if request.prefilled == request.seq_len:
                self._join(request)

    def _admit(self) -> _Request | None:
        """Gives the next waiting request its row and slots, when there are enough.

        A page (or slot) for each running request is left over, so that the next step does not undo an
        admission.
        """
        if self._retracted:
            request = self._retracted[0]
        elif self._arrivals and self._arrivals[0][0] <= self.time_s:
            request = self._arrivals[0][1]
        else:
            return None
        page_size, length = self.config.page_size, request.seq_len
        running = len(self._batch.requests)
        need = (-(-length // page_size) + running) * page_size
        if self.table.available_size() == 0 or self.allocator.available_size() < need:
            if running == 0:
                raise ReplayError(
                    f"nothing runs, but {self.allocator.available_size()} of {self.capacity} slots and "
                    f"{self.table.available_size()} of {self.config.max_running} rows are left for request "
                    f"{request.index} of {length} tokens"
                )
            return None
        rows = self._alloc_row(1)
        slots = self._alloc(length) if page_size == 1 else self._alloc_extend([0], [length], [0])
        if rows is None or slots is None:
            raise ReplayError(
                f"no {length} slots or no row for request {request.index}, though {need} are available"
            )
        (self._retracted or self._arrivals).popleft()
        request.row = rows[0]
        request.prefilled = 0
        self._write((request.row, slice(0, length)), slots)
        self._slots = slots
        self._prefilling = request
        self.counts.admissions += 1
        return request

    def _store_prompt(self, kv: KvStore, request: _Request, count: int) -> None:
        begin, end = request.prefilled, request.prefilled + count
        kv.store(kv.rows.prompt_keys(request.index, begin, end), self._slots[begin:end])

    def _join(self, request: _Request) -> None:
        """Moves a prefilled request into the batch that decodes."""
        self._prefilling = None
        if request.generated == request.output_len:
            self._release(request, request.seq_len)
            self.counts.finished += 1
            return
        request.joined = self._decoded_steps
        self._batch.requests.append(request)
        self._batch.changed = True

    def _decode(self) -> None:
        """One token for every request of the batch: one allocation, one table write, one store."""
        batch = self._batch
        slots = self._take_slots()
        if slots is None:
            return
        self._write((batch.rows, batch.positions), slots)
        if self.kv is not None:
            self.kv.store(self.kv.rows.keys(batch.request_keys, batch.positions), slots)
        batch.positions += 1
        batch.last_slots = slots
        self._decoded_steps += 1
        self.counts.decoded_tokens += len(batch.requests)

    def _take_slots(self) -> torch.Tensor | None:
        """A slot for each request of the batch, after retracting the youngest if need be; None if empty."""
        batch = self._batch
        while batch.requests:
            if batch.changed:
                rows = self.kv.rows if self.kv is not None else None
                batch.rebuild(self._decoded_steps, self.table.req_to_token, rows)
            slots: torch.Tensor | None
            if self.config.page_size == 1:
                slots = self._alloc(len(batch.requests))
            else:
                slots = self._alloc_decode(batch.positions + 1, batch.last_slots)
            if slots is not None:
                return slots
            self._retract_youngest()
        return None

    def _retract_youngest(self) -> None:
        batch = self._batch
        request = self._prefilling
        if request is not None:
            self._prefilling = None
            self._release(request, request.prefilled)
        elif len(batch.requests) > 1:
            request = batch.requests.pop()
            request.generated += self._decoded_steps - request.joined
            batch.changed = True
            self._release(request, request.seq_len)
        else:
            raise ReplayError(
                f"request {batch.requests[0].index} runs alone, but no slot is left: "
                f"{self.allocator.available_size()} of {self.capacity} are available"
            )
        self._retracted.appendleft(request)
        self._retracted_s.append(self.time_s)
        self.counts.retractions += 1

    def _finish_ended(self) -> None:
        batch = self._batch
        if not batch.requests or batch.next_end != self._decoded_steps:
            return
        for request in batch.requests:
            if request.ends == self._decoded_steps:
                self._release(request, request.input_len + request.output_len)
                self.counts.finished += 1
        batch.requests = [r for r in batch.requests if r.ends != self._decoded_steps]
        batch.changed = True

    def _release(self, request: _Request, stored: int) -> None:
        """Checks the `stored` first tokens of a request, then gives its slots and its row back."""
        slots = self._read(request.row, max(stored, request.seq_len))
        if self.kv is not None:
            self.kv.check(request.index, self.kv.rows.prompt_keys(request.index, 0, stored), slots[:stored])
            self.counts.verified_tokens += stored
        self._free(slots)
        self._free_row(request.row)

    def _check_returned(self) -> None:
        problems = []
        if self.in_use:
            problems.append(f"{self.in_use} of {self.capacity} slots were not given back")
        rows = self.table.available_size()
        if rows != self.config.max_running:
            problems.append(
                f"{self.config.max_running - rows} of {self.config.max_running} rows were not given back"
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
            occupancy=Occupancy(np.array(self._times), ints(self._in_use), ints(self._running)),
            retracted_s=np.array(self._retracted_s),
        )
