"""A fleet of machines that compute prompts and others that generate answers, simulated event by event.

A request goes to a prefill machine, which computes what neither its prefix cache nor the store has of the
prompt, one prompt after another. Its K, V and states are then handed over to the decode machine with the
fewest tokens that has room for prompt and answer. The first token is there when they are. `README.md`
lists what is left out.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, fields
from functools import partial
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from break_even import BreakEven

from kvpool import TokenToKVPoolAllocator
from kvpool._kvpool import PrefixCache
from kvpool.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from fleet_config import FleetConfig, Machine
    from numpy.typing import NDArray

    from kvpool._kvpool import Lease
    from kvpool.tools.traces import Trace
    from kvpool.typing import Policy


@dataclass(frozen=True)
class FleetResult:
    """A simulation, with an entry for each request that was not rejected, by arrival; times are in seconds.

    Attributes:
        trace: Name of the trace.
        machine: The capacity of a machine.
        config: The configuration.
        rejected: Requests that no machine has room for.
        duration_s: Time from the first arrival to the end of the last request.
        output_lens: Tokens of the answers.
        input_lens: Tokens of the prompts.
        device_tokens: Tokens of the prompts that the machine's prefix cache had.
        store_tokens: Tokens of the prompts that were loaded from the store.
        prefill_wait_s: Time from the arrival to the begin of the computation.
        prefill_s: The computation.
        handover_wait_s: Time from its end to the begin of the transfer: for room, and for the link.
        handover_s: The transfer.
        decode_s: Time from the first token to the last.
        handover_bytes: Bytes of K, V and states that were handed over.
        loaded_bytes: Bytes that were loaded from the store, used or not.
        stored_bytes: Bytes that were put into the store.
        repeated_share: The share of the prompts' blocks that an unlimited cache finds.
        busy: The share of time that each resource was busy, over all machines that have it.
    """

    trace: str
    machine: Machine
    config: FleetConfig
    rejected: int
    duration_s: float
    input_lens: NDArray[np.int64]
    output_lens: NDArray[np.int64]
    device_tokens: NDArray[np.int64]
    store_tokens: NDArray[np.int64]
    prefill_wait_s: NDArray[np.float64]
    prefill_s: NDArray[np.float64]
    handover_wait_s: NDArray[np.float64]
    handover_s: NDArray[np.float64]
    decode_s: NDArray[np.float64]
    handover_bytes: NDArray[np.int64]
    loaded_bytes: int
    stored_bytes: int
    repeated_share: float
    busy: dict[str, float]

    @property
    def computed_tokens(self) -> NDArray[np.int64]:
        """int64 `[n]`: prompt tokens that were computed, at least 1."""
        return self.input_lens - self.device_tokens - self.store_tokens

    @property
    def first_token_s(self) -> NDArray[np.float64]:
        """float64 `[n]`: from the arrival to the first token at the decode machine."""
        return self.prefill_wait_s + self.prefill_s + self.handover_wait_s + self.handover_s

    @property
    def bottleneck(self) -> str:
        """The resource that is busy most of the time."""
        return max(self.busy, key=self.busy.__getitem__)

    @property
    def balanced_decode(self) -> float:
        """Decode machines for each prefill machine with which these would be as busy as those.

        The busiest resource of a machine counts, links excluded: speed, memory, or rows of requests.
        """
        prefill, decode = self.config.prefill, self.config.decode
        busiest = max(self.busy[name] for name in ("decode", "decode memory", "decode requests"))
        return busiest * decode / (self.busy["prefill"] * prefill)


def simulate(trace: Trace, machine: Machine, config: FleetConfig) -> FleetResult:
    """Run a trace through a fleet.

    Args:
        trace: A trace with at least one request.
        machine: The capacity of each machine.
        config: The fleet.

    Raises:
        ConfigError: If no request fits, a machine or the store has no room for a block of the trace, or the
            policy is unknown.
    """
    size = trace.block_size
    if machine.tokens < size or 0 < config.store_bytes < size * machine.token_bytes:
        raise ConfigError(
            f"a block of the trace has {size} tokens, {size * machine.token_bytes:,} bytes: a machine has "
            f"room for {machine.tokens:,} tokens, and the store for {config.store_bytes:,} bytes"
        )
    whole_lens = -(-trace.input_lens // size) * size
    kept = np.flatnonzero(np.maximum(trace.total_lens, whole_lens) <= machine.tokens // size * size)
    if not len(kept):
        shortest = int(trace.total_lens.min())
        raise ConfigError(
            f"no request fits: the shortest has {shortest:,} tokens, a machine room for {machine.tokens:,}"
        )
    return _Fleet(trace.take(kept), machine, config).run(len(trace) - len(kept))


@dataclass(eq=False, slots=True)
class _Request:
    """A request; times are those of the simulation, in seconds."""

    index: int
    blocks: NDArray[np.int64]
    input_len: int
    output_len: int
    arrival: float
    estimate: float = 0.0
    # Blocks that a load brings, from the first to the second, and whether it is over.
    loaded: tuple[int, int] = (0, 0)
    is_ready: bool = True
    device_tokens: int = 0
    store_tokens: int = 0
    begin: float = 0.0
    computed: float = 0.0
    handover: float = 0.0
    first: float = 0.0
    end: float = 0.0
    handover_bytes: int = 0
    # From the begin of its computation on.
    prompt: _Prompt = field(init=False)


class _Cache:
    """A prefix cache whose pages are the trace's blocks; every length here is a number of blocks.

    Args:
        blocks: Its capacity.
        page_size: Slots of a page. The policy "adaptive" learns from ages in tokens, so that it matters.
        policy: The eviction policy.
    """

    def __init__(self, blocks: int, page_size: int, policy: Policy) -> None:
        self._page_size = page_size
        self._allocator = TokenToKVPoolAllocator(
            blocks * page_size, device="cpu", page_size=page_size, need_sort=False
        )
        self._cache = PrefixCache(self._allocator, policy=policy)

    def _tokens(self, blocks: NDArray[np.int64]) -> NDArray[np.int32]:
        """Return tokens that stand for a prompt: the number of a block names it with all before it."""
        return np.repeat(blocks.astype(np.int32), self._page_size)

    def length(self, blocks: NDArray[np.int64]) -> int:
        """Return the number of a prompt's blocks that are cached."""
        return self._cache.cached_len(self._tokens(blocks)) // self._page_size

    def use(self, blocks: NDArray[np.int64]) -> int:
        """Return the number of a prompt's cached blocks, and count a use of them."""
        with self._cache.match(self._tokens(blocks)) as lease:
            return lease.length // self._page_size

    def begin(self, blocks: NDArray[np.int64]) -> _Prompt | None:
        """Take slots for what is not cached; None if prompts that are not over hold too many."""
        tokens = self._tokens(blocks)
        lease = self._cache.match(tokens)
        slots = self._allocator.alloc(len(tokens) - lease.length)
        if slots is None:
            lease.release()
            return None
        return _Prompt(lease, slots, tokens[lease.length :], lease.length // self._page_size)

    def put(self, blocks: NDArray[np.int64], first: int = 0) -> int:
        """Add the blocks from `first` on, as many as there is room for, and return how many are new.

        No block is added if the blocks before `first` are not cached any more.
        """
        tokens = self._tokens(blocks)
        with self._cache.match(tokens) as lease:
            if lease.length < first * self._page_size:
                return 0
            new = min(len(tokens) - lease.length, self._cache.obtainable_size())
            if new:
                lease.publish(tokens[lease.length : lease.length + new], self._allocator.alloc(new))
            return new // self._page_size


class _Prompt(NamedTuple):
    """A prompt on a prefill machine, from the begin of its computation to the end of its transfer."""

    lease: Lease
    slots: Any  # of any framework
    tokens: NDArray[np.int32]
    found: int

    def publish(self) -> None:
        """Publish the computed tokens of the prompt, so that others find them."""
        if len(self.tokens):
            self.lease.publish(self.tokens, self.slots)


class _Prefill:
    """A machine that computes prompts."""

    def __init__(self, cache: _Cache) -> None:
        self.cache = cache
        # Prompts that wait to be computed, and then to be handed over.
        self.queue: deque[_Request] = deque()
        self.computed: deque[_Request] = deque()
        self.is_busy = self.is_linked = False
        # When it has computed what it began; seconds of what waits; when its loads are over.
        self.free_at = self.waiting_s = self.load_free = 0.0
        self.busy_s = self.link_s = self.load_s = 0.0


class _Decode:
    """A machine that generates answers: its requests share its speed equally.

    Each request that runs gets `speed` tokens per second, so that one number counts what each has got.
    """

    def __init__(self, tokens: int, requests: int) -> None:
        self.room, self.rows = tokens, requests
        self.got = self.since = self.speed = 0.0
        self.version = 0
        # Requests that run, by what `got` is at their end.
        self.running: list[tuple[float, int, _Request]] = []
        self.is_linked = False
        # Seconds of transfers; seconds for which tokens have slots, and requests rows, of all of them.
        self.link_s = self.token_s = self.row_s = 0.0


class _Fleet:
    def __init__(self, trace: Trace, machine: Machine, config: FleetConfig) -> None:
        self._trace, self._machine, self._config = trace, machine, config
        self._costs = BreakEven(
            machine.token_bytes, machine.state_bytes, config.prefill_rate, config.latency_s
        )
        size, blocks = trace.block_size, trace.all_blocks()
        # A cache for all blocks, and one more prompt, is as good as a larger one.
        most = len(np.unique(np.concatenate(blocks))) + max(map(len, blocks))
        cached, stored = machine.tokens // size, config.store_bytes // (size * machine.token_bytes)
        self._prefill = [
            _Prefill(_Cache(min(cached, most), size, config.policy)) for _ in range(config.prefill)
        ]
        self._decode = [_Decode(machine.tokens, machine.requests) for _ in range(config.decode)]
        self._store = _Cache(min(stored, most), 1, "lru") if stored else None
        self._requests = [
            _Request(index, each, input_len, output_len, arrival / config.speed_up)
            for index, (each, input_len, output_len, arrival) in enumerate(
                zip(
                    blocks,
                    trace.input_lens.tolist(),
                    trace.output_lens.tolist(),
                    (trace.arrival_s - trace.arrival_s[0]).tolist(),
                    strict=True,
                )
            )
        ]
        # Events in the order of time; of those at the same time, the one planned first.
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._planned = 0
        self._now = 0.0
        self._decode_tokens = self._loaded_bytes = self._stored_bytes = 0

    def run(self, rejected: int) -> FleetResult:
        for request in self._requests:
            self._plan(request.arrival, partial(self._arrive, request))
        while self._events:
            self._now, _, happen = heappop(self._events)
            happen()
        return self._result(rejected)

    def _plan(self, time: float, happen: Callable[[], None]) -> None:
        self._planned += 1
        heappush(self._events, (time, self._planned, happen))

    # Prefill machines.

    def _arrive(self, request: _Request) -> None:
        stored = self._store.use(request.blocks) if self._store else 0
        cached = [machine.cache.length(request.blocks) for machine in self._prefill]
        costs = [self._seconds(request, length, stored) for length in cached]
        number = self._choose(request, cached, costs)
        machine, length = self._prefill[number], cached[number]
        request.estimate, is_loaded = costs[number]
        if is_loaded:
            self._load(request, machine, length, stored)
        machine.queue.append(request)
        machine.waiting_s += request.estimate
        self._next_prompt(machine)

    def _seconds(self, request: _Request, cached: int, stored: int) -> tuple[float, bool]:
        """Return the time of a prompt on a machine, and whether that loads what the store has."""
        found = self._tokens(request, cached)
        more = self._tokens(request, stored) - found
        rest_s = self._costs.compute_s(request.input_len - found - max(more, 0))
        if more <= 0:
            return rest_s, False
        load_s, compute_s = self._costs.load_s(more, self._config.store_link), self._costs.compute_s(more)
        return rest_s + min(load_s, compute_s), load_s < compute_s

    def _tokens(self, request: _Request, blocks: int) -> int:
        """Return the tokens of a prompt's first blocks. The last token is computed in any case."""
        return min(blocks * self._trace.block_size, request.input_len - 1)

    def _choose(self, request: _Request, cached: list[int], costs: list[tuple[float, bool]]) -> int:
        """Return the number of the prefill machine for a request: the one that is free first."""
        waits = [max(machine.free_at - self._now, 0.0) + machine.waiting_s for machine in self._prefill]
        numbers = range(len(waits))
        if self._config.route == "turns":
            return request.index % len(waits)
        if self._config.route == "prefix":
            return min(numbers, key=lambda number: (-cached[number], waits[number], number))
        return min(numbers, key=lambda number: (waits[number] + costs[number][0], number))

    def _load(self, request: _Request, machine: _Prefill, first: int, end: int) -> None:
        """Load blocks from the store into the machine's prefix cache."""
        tokens = self._tokens(request, end) - self._tokens(request, first)
        seconds = self._costs.load_s(tokens, self._config.store_link)
        request.loaded, request.is_ready = (first, end), False
        machine.load_free = max(self._now, machine.load_free) + seconds
        machine.load_s += seconds
        self._loaded_bytes += self._bytes(tokens)
        self._plan(machine.load_free, partial(self._loaded, request, machine))

    def _loaded(self, request: _Request, machine: _Prefill) -> None:
        first, end = request.loaded
        machine.cache.put(request.blocks[:end], first)
        request.is_ready = True
        self._next_prompt(machine)

    def _next_prompt(self, machine: _Prefill) -> None:
        """Begin to compute the prompt that waits longest, once it is loaded and there is room for it."""
        if machine.is_busy or not machine.queue or not machine.queue[0].is_ready:
            return
        request = machine.queue[0]
        prompt = machine.cache.begin(request.blocks)
        if prompt is None:  # until others are handed over
            return
        machine.queue.popleft()
        machine.waiting_s -= request.estimate
        found = self._tokens(request, prompt.found)
        first, end = (self._tokens(request, blocks) for blocks in request.loaded)
        request.store_tokens = max(0, min(found, end) - first)
        request.device_tokens = found - request.store_tokens
        request.prompt, request.begin = prompt, self._now
        seconds = self._costs.compute_s(request.input_len - found)
        machine.is_busy, machine.free_at = True, self._now + seconds
        machine.busy_s += seconds
        self._plan(machine.free_at, partial(self._compute, request, machine))

    def _compute(self, request: _Request, machine: _Prefill) -> None:
        """End the computation of a prompt: others find it from now on."""
        request.prompt.publish()
        if self._store is not None:
            new = self._store.put(request.blocks)
            self._stored_bytes += new * self._trace.block_size * self._machine.token_bytes
        machine.is_busy, request.computed = False, self._now
        if request.output_len <= 1:  # the token is there
            request.handover = request.first = request.end = self._now
            request.prompt.lease.release()
        else:
            machine.computed.append(request)
            self._hand_over()
        self._next_prompt(machine)

    # Transfers.

    def _bytes(self, tokens: int) -> int:
        return tokens * self._machine.token_bytes + self._machine.state_bytes

    def _hand_over(self) -> None:
        """Begin transfers where both links are free, in the order in which prompts were computed.

        The one that is first waits for room, and those behind it do, too: no large prompt waits forever.
        """
        heads = [(prefill.computed[0], prefill) for prefill in self._prefill if prefill.computed]
        heads.sort(key=lambda head: (head[0].computed, head[0].index))
        for request, prefill in heads:
            tokens = request.input_len + request.output_len
            fitting = [decode for decode in self._decode if decode.room >= tokens and decode.rows]
            if not fitting:
                return
            free = [decode for decode in fitting if not decode.is_linked]
            if free and not prefill.is_linked:
                decode = max(free, key=lambda decode: decode.room)
                self._transfer(request, prefill, decode)

    def _transfer(self, request: _Request, prefill: _Prefill, decode: _Decode) -> None:
        prefill.computed.popleft()
        prefill.is_linked = decode.is_linked = True
        tokens = request.input_len + request.output_len
        decode.room, decode.rows = decode.room - tokens, decode.rows - 1
        decode.token_s -= tokens * self._now
        decode.row_s -= self._now
        request.handover, request.handover_bytes = self._now, self._bytes(request.input_len)
        seconds = self._config.latency_s + request.handover_bytes / self._config.link
        prefill.link_s += seconds
        decode.link_s += seconds
        self._plan(self._now + seconds, partial(self._begin_answer, request, prefill, decode))

    def _begin_answer(self, request: _Request, prefill: _Prefill, decode: _Decode) -> None:
        """Begin the answer to a prompt that has arrived, and free its slots on the prefill machine."""
        request.first = self._now
        prefill.is_linked = decode.is_linked = False
        request.prompt.lease.release()
        self._settle(decode)
        heappush(decode.running, (decode.got + request.output_len - 1, request.index, request))
        self._decode_tokens += request.output_len - 1
        self._plan_end(decode)
        self._hand_over()
        self._next_prompt(prefill)

    # Decode machines.

    def _settle(self, decode: _Decode) -> None:
        """Count the tokens that each request has got."""
        decode.got += (self._now - decode.since) * decode.speed
        decode.since = self._now

    def _plan_end(self, decode: _Decode) -> None:
        """Plan the end of the request that is over first, if none comes or goes before."""
        decode.version += 1
        if not decode.running:
            decode.speed = 0.0
            return
        decode.speed = min(1 / self._config.step_s, self._config.decode_rate / len(decode.running))
        left = max(decode.running[0][0] - decode.got, 0.0)
        version = decode.version
        self._plan(self._now + left / decode.speed, partial(self._end_answer, decode, version))

    def _end_answer(self, decode: _Decode, version: int) -> None:
        if version != decode.version:
            return
        decode.since, decode.got = self._now, decode.running[0][0]
        while decode.running and decode.running[0][0] <= decode.got:
            _, _, request = heappop(decode.running)
            tokens = request.input_len + request.output_len
            decode.room, decode.rows = decode.room + tokens, decode.rows + 1
            decode.token_s += tokens * self._now
            decode.row_s += self._now
            request.end = self._now
        self._plan_end(decode)
        self._hand_over()

    def _result(self, rejected: int) -> FleetResult:
        config, machine, requests = self._config, self._machine, self._requests
        duration = max(request.end for request in requests)
        names = [each.name for each in fields(_Request) if each.type in {"int", "float"}]
        table = {name: np.array([getattr(request, name) for request in requests]) for name in names}
        prefill_s, decode_s = config.prefill * duration, config.decode * duration
        busy = {
            "prefill": sum(each.busy_s for each in self._prefill) / prefill_s,
            "decode": self._decode_tokens / config.decode_rate / decode_s,
            "decode memory": sum(each.token_s for each in self._decode) / machine.tokens / decode_s,
            "decode requests": sum(each.row_s for each in self._decode) / machine.requests / decode_s,
            "link of prefill": sum(each.link_s for each in self._prefill) / prefill_s,
            "link of decode": sum(each.link_s for each in self._decode) / decode_s,
        }
        if self._store is not None:
            busy["store link"] = sum(each.load_s for each in self._prefill) / prefill_s
        blocks = np.concatenate([request.blocks for request in requests])
        return FleetResult(
            trace=self._trace.name,
            machine=machine,
            config=config,
            rejected=rejected,
            duration_s=duration,
            input_lens=table["input_len"],
            output_lens=table["output_len"],
            device_tokens=table["device_tokens"],
            store_tokens=table["store_tokens"],
            prefill_wait_s=table["begin"] - table["arrival"],
            prefill_s=table["computed"] - table["begin"],
            handover_wait_s=table["handover"] - table["computed"],
            handover_s=table["first"] - table["handover"],
            decode_s=table["end"] - table["first"],
            handover_bytes=table["handover_bytes"],
            loaded_bytes=self._loaded_bytes,
            stored_bytes=self._stored_bytes,
            repeated_share=1 - len(np.unique(blocks)) / len(blocks),
            busy=busy,
        )
