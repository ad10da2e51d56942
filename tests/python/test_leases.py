"""Leases, with all that they keep: fences, rows, planners, snapshots of states, and calls that fail.

`test_prefix_cache.py` covers the cache itself, `test_leased_requests.py` requests of a planner.
"""

from __future__ import annotations

import gc
import logging
import sys
import threading
import time
import weakref
from typing import TYPE_CHECKING

import devices
import pytest
import torch
from common import Fence, cuda_only, needs_statm, resident_bytes, some

import kvpool
from kvpool import DriverError, GDNPool, IndexOwnershipError, PrefixCache, StaleBufferError

if TYPE_CHECKING:
    from collections.abc import Callable

    from software import Driver

pytestmark = pytest.mark.usefixtures("device")

PROMPT = list(range(100, 110))


class Scene:
    """A planner of four requests on 64 slots, and a cache."""

    def __init__(self, page_size: int = 1, *, tracks: int | None = None, debug: bool = False) -> None:
        where = devices.current()
        self.table = kvpool.ReqToTokenPool(4, 64, where)
        self.allocator = kvpool.TokenToKVPoolAllocator(64, where, page_size, strict=True, debug=debug)
        self.planner = kvpool.BatchPlanner(self.table, self.allocator, 4, 128)
        self.states = None if tracks is None else GDNPool(4, 1, 1, 2, 2, 4, 3, where, max_track_slots=tracks)
        self.cache = PrefixCache(self.allocator, states=self.states, policy="lru")

    def start(self, prompt: list[int] = PROMPT) -> tuple[int, kvpool.Lease]:
        """Admits a request and publishes its prompt; its row and its lease."""
        lease = self.cache.match(prompt, limit=len(prompt) - 1)
        [row] = some(self.table.alloc(1))
        begin = lease.length
        some(self.planner.extend([row], [begin], [len(prompt)], prefixes=[lease]))
        lease.publish(prompt[begin:])
        return row, lease

    def sizes(self) -> tuple[int, int, int]:
        """Evictable, locked, and in use by requests."""
        cache = self.cache
        cache.verify()
        self.allocator.verify()
        cached = cache.evictable_size() + cache.locked_size()
        return cache.evictable_size(), cache.locked_size(), self.allocator.stats()["in_use"] - cached


# Fences


@pytest.mark.parametrize("cut", ["finish", "truncate", "truncate to nothing"])
def test_pools_go_although_a_fence_never_passes(cut: str) -> None:
    scene = Scene()
    row, lease = scene.start()
    fence = Fence()
    if cut == "finish":
        scene.planner.finish([row], after=fence)
    else:
        scene.planner.truncate([row], [4 if cut == "truncate" else 0], after=fence)
    # The allocator has the fence, and goes with it.
    gone = [weakref.ref(object_) for object_ in (fence, scene.allocator, scene.cache, scene.planner)]
    del fence, scene, lease
    gc.collect()
    assert [object_() for object_ in gone] == [None] * 4


@needs_statm
@devices.cpu_only
def test_memory_comes_back_although_fences_never_pass() -> None:
    def serve() -> None:
        where = devices.current()
        table = kvpool.ReqToTokenPool(1, 8, where)
        allocator = kvpool.TokenToKVPoolAllocator(1 << 18, where)
        planner = kvpool.BatchPlanner(table, allocator, 1, 8)
        cache = PrefixCache(allocator)
        lease, [row] = cache.match(PROMPT), some(table.alloc(1))
        some(planner.extend([row], [0], [8], prefixes=[lease]))
        lease.publish(PROMPT[:8])
        planner.finish([row], after=Fence())

    for _ in range(4):
        serve()
    before = resident_bytes()
    for _ in range(100):
        serve()
    assert resident_bytes() - before < 32 << 20


def test_a_cache_that_is_dropped_keeps_what_waits_for_a_fence() -> None:
    scene = Scene()
    row, lease = scene.start()
    fence = Fence()
    scene.planner.finish([row], after=fence)
    del lease, scene.cache
    gc.collect()
    assert scene.allocator.available_size() == 64 - 10
    fence.done = True
    assert scene.allocator.stats()["available"] == 64


def test_a_lease_ends_at_once_and_its_pages_behind_the_fence() -> None:
    scene = Scene()
    row, lease = scene.start()
    fence = Fence()
    scene.planner.finish([row], after=fence)
    with pytest.raises(StaleBufferError):
        _ = lease.length
    assert scene.sizes() == (0, 10, 0)
    assert scene.cache.evict(64) == 0
    fence.done = True
    scene.allocator.stats()
    assert scene.sizes() == (10, 0, 0)


def test_a_cut_request_publishes_before_the_fence() -> None:
    scene = Scene()
    row, lease = scene.start([1, 2, 3, 4])
    first, second = Fence(), Fence()
    scene.planner.truncate([row], [2], after=first)
    assert lease.length == 2
    some(scene.planner.extend([row], [2], [6]))
    assert lease.publish([7, 8, 5, 6]).length == 6
    # Tokens that were cut off may still be read, and cannot be evicted.
    assert scene.sizes() == (0, 8, 0)
    scene.planner.truncate([row], [3], after=second)
    first.done = True
    scene.allocator.stats()
    assert scene.sizes() == (2, 6, 0)
    assert scene.cache.cached_len([1, 2, 3, 4]) == 4
    scene.planner.finish([row])
    assert scene.sizes() == (2, 6, 0)
    second.done = True
    scene.allocator.stats()
    assert scene.sizes() == (8, 0, 0)


def test_clearing_drops_what_waits_for_a_fence() -> None:
    scene = Scene()
    row, lease = scene.start()
    scene.planner.finish([row], after=Fence())
    scene.allocator.clear()
    assert scene.sizes() == (0, 0, 0)
    _, lease = scene.start()
    assert lease.length == 10


# Rows that are freed without their planner


@pytest.mark.parametrize("call", ["extend", "decode", "truncate", "finish", "fork"])
@pytest.mark.parametrize("how", ["free", "clear"])
def test_leases_of_freed_rows_end_at_the_next_call_of_the_planner(call: str, how: str) -> None:
    scene = Scene()
    row, lease = scene.start()
    other, _ = scene.start([1, 2])
    if how == "free":
        scene.table.free(row)
    else:
        scene.table.clear()
    if call == "fork" or how == "clear":
        other = some(scene.table.alloc(1))[0]
    calls: dict[str, Callable[[], object]] = {
        "extend": lambda: scene.planner.extend([], [], []),
        "decode": lambda: scene.planner.decode([], []),
        "truncate": lambda: scene.planner.truncate([], []),
        "finish": lambda: scene.planner.finish([]),
        "fork": lambda: scene.planner.fork(other, some(scene.table.alloc(1))[0], 0),
    }
    calls[call]()
    with pytest.raises(StaleBufferError, match="released"):
        _ = lease.length
    assert scene.cache.locked_size() == (0 if how == "clear" else 2)


def test_a_short_planner_evicts_what_freed_rows_had() -> None:
    scene = Scene()
    row, _lease = scene.start(list(range(60)))
    scene.table.free(row)
    _, lease = scene.start(list(range(200, 240)))
    assert lease.length == 40


# Snapshots of states


def test_a_state_that_cannot_be_copied_changes_nothing() -> None:
    scene = Scene(tracks=1)
    prompt = [1, 2, 3]
    lease = scene.cache.match(prompt)
    slots = some(scene.allocator.alloc(3)).tolist()
    for row in (-1, 7, 2**40):
        with pytest.raises(IndexError):
            lease.publish(prompt, slots, state=row)
    assert (lease.length, scene.sizes(), some(scene.states).stats()["in_use"]) == (0, (0, 0, 3), 0)
    # And what cannot be published leaves no snapshot behind.
    with pytest.raises(IndexOwnershipError):
        lease.publish(prompt, [*slots[:2], 60], state=1)
    assert (lease.length, some(scene.states).stats()["in_use"]) == (0, 0)
    assert lease.publish(prompt, slots, state=1).length == 3
    assert lease.state_slot is not None


@cuda_only
def test_a_driver_that_refuses_a_state_changes_nothing(driver: Driver) -> None:
    scene = Scene(tracks=1)
    prompt = [1, 2, 3]
    lease = scene.cache.match(prompt)
    slots = some(scene.allocator.alloc(3)).tolist()
    driver.fail("cuLaunchKernel")
    with pytest.raises(DriverError):
        lease.publish(prompt, slots, state=1)
    assert (lease.length, scene.sizes(), some(scene.states).stats()["in_use"]) == (0, (0, 0, 3), 0)
    assert lease.publish(prompt, slots, state=1).length == 3
    assert lease.state_slot is not None


def test_a_snapshot_is_not_taken_twice() -> None:
    scene = Scene(2, tracks=4)
    states = some(scene.states)
    for _ in range(2):
        lease = scene.cache.match([1, 2, 3, 4, 5], limit=0)
        slots = some(scene.allocator.alloc(6))[:5]
        assert lease.publish([1, 2, 3, 4, 5], slots, state=1).length == 4
        scene.allocator.free(slots[4:])
        assert states.stats()["in_use"] == 1
    # A prefix of it ends inside of a node, and gets one of its own.
    lease = scene.cache.match([1, 2, 9], limit=0)
    assert lease.publish([1, 2], some(scene.allocator.alloc(2)), state=1).length == 2
    assert states.stats()["in_use"] == 2
    assert scene.cache.cached_len([1, 2, 9]) == 2


def test_snapshots_behind_a_prompt_go_first() -> None:
    """A request that decodes keeps its newest snapshot; those of prompts and of others stay."""
    scene = Scene(tracks=4)
    states = some(scene.states)

    def decode(lease: kvpool.Lease, tokens: list[int]) -> None:
        lease.publish(tokens, some(scene.allocator.alloc(len(tokens))), state=1)

    decode(scene.cache.match([50, 51]), [50, 51])  # the least recently used
    lease = scene.cache.match([1, 2, 3, 4])
    decode(lease, [1, 2])
    decode(lease, [3, 4])
    decode(lease, [5])
    assert states.stats()["available"] == 0
    for token in (6, 7, 8, 9):
        decode(lease, [token])
    ends = [scene.cache.cached_len([1, 2, 3, 4, 5, 6, 7, 8, 9][:end]) for end in range(1, 10)]
    assert ends == [0, 2, 2, 4, 4, 4, 4, 4, 9]
    assert scene.cache.cached_len([50, 51]) == 2


def test_a_snapshot_that_another_request_goes_on_from_is_not_superseded() -> None:
    scene = Scene(tracks=3)
    lease = scene.cache.match([1])

    def decode(tokens: list[int]) -> None:
        lease.publish(tokens, some(scene.allocator.alloc(len(tokens))), state=1)

    decode([1])
    decode([2])
    decode([3])  # supersedes the one behind token 2
    scene.cache.match([1, 2, 7]).release()
    decode([4])
    assert [scene.cache.cached_len([1, 2, 3, 4][:end]) for end in range(1, 5)] == [1, 2, 2, 4]


def test_the_order_of_snapshots_is_that_of_their_uses() -> None:
    scene = Scene(tracks=3)
    heads = [[10], [20], [30]]
    for head in heads:
        lease = scene.cache.match(head)
        lease.publish(head, some(scene.allocator.alloc(1)), state=1)
    # On the way to another prefix: a use without a lease that ends there.
    longer = scene.cache.match([10])
    longer.publish([11], some(scene.allocator.alloc(1)))
    longer.release()
    scene.cache.match([20]).release()
    for token in (40, 50):
        lease = scene.cache.match([token])
        lease.publish([token], some(scene.allocator.alloc(1)), state=1)
    assert [scene.cache.cached_len([token]) for token in (10, 20, 30, 40, 50)] == [0, 1, 0, 1, 1]


def looks_during(call: str) -> int:
    """How often another thread asks a cache while a state of it is copied."""
    # Copies of this size take several milliseconds.
    states = GDNPool(1, 4, 8, 128, 128, 64, 4, devices.current(), max_track_slots=2)
    while states.mem_bytes() < 256 << 20:
        layers = 4 * (256 << 20) // states.mem_bytes() + 4
        states = GDNPool(1, layers, 8, 128, 128, 64, 4, devices.current(), max_track_slots=2)
    allocator = kvpool.TokenToKVPoolAllocator(8, devices.current())
    cache = PrefixCache(allocator, states=states)
    lease = cache.match([1, 2])
    slots = some(allocator.alloc(2))
    if call == "restore":
        lease.publish([1, 2], slots, state=1)
    looks, begun, over = [0], threading.Event(), threading.Event()

    def look() -> None:
        begun.set()
        while not over.is_set():
            cache.cached_size()
            looks[0] += 1
            time.sleep(0)  # lets go of the GIL

    before = sys.getswitchinterval()
    looker = threading.Thread(target=look)
    looker.start()
    begun.wait()
    # A thread keeps the GIL until it lets go of it.
    sys.setswitchinterval(1000)
    try:
        first = looks[0]
        if call == "restore":
            lease.restore(1)
        else:
            lease.publish([1, 2], slots, state=1)
        looked = looks[0] - first
    finally:
        sys.setswitchinterval(before)
        over.set()
        looker.join()
    assert lease.state_slot is not None
    return looked


@devices.cpu_only
@pytest.mark.parametrize("call", ["publish", "restore"])
def test_long_copies_of_states_let_others_run(call: str) -> None:
    """Neither the GIL nor the cache's lock is held during the copy of a state.

    On a busy machine the other thread may get no processor in time.
    """
    assert any(looks_during(call) for _ in range(20))


# Notices


class CacheUsingHandler(logging.Handler):
    """Uses a cache whenever something is logged."""

    def __init__(self, cache: PrefixCache, lease: kvpool.Lease) -> None:
        super().__init__()
        self.cache, self.lease, self.seen = cache, lease, list[int]()

    def emit(self, record: logging.LogRecord) -> None:
        assert "not poisoned" in record.getMessage()
        self.seen.append(self.cache.match(PROMPT).length + self.cache.cached_size())
        self.lease.release()


@pytest.mark.timeout(60)
@cuda_only
@pytest.mark.parametrize("call", ["evict", "publish", "clear", "release", "alloc"])
def test_a_notice_is_logged_without_locks(call: str, driver: Driver) -> None:
    scene = Scene(debug=True)
    kv = kvpool.KVPool(64, 1, 1, 4, devices.current(), "float32")
    scene.allocator.poison_freed(kv)
    scene.cache.insert(PROMPT, some(scene.allocator.alloc(10)))
    lease = scene.cache.match([1, 2], namespace="mine")
    rival = scene.cache.match([1, 2], namespace="mine")
    lease.publish([1, 2], some(scene.allocator.alloc(2)))
    given = some(scene.allocator.alloc(2))
    if call == "release":
        scene.cache.clear("mine")
    handler = CacheUsingHandler(scene.cache, rival)
    logger = logging.getLogger("kvpool")
    logger.addHandler(handler)
    driver.fail("cuMemsetD8Async", 1, 719)
    try:
        if call == "evict":
            scene.cache.evict(4)
        elif call == "publish":
            rival.publish([1, 2], given)
        elif call == "clear":
            scene.cache.clear()
        elif call == "release":
            lease.release()
        else:
            some(scene.allocator.alloc(54))
    finally:
        logger.removeHandler(handler)
    assert len(handler.seen) == 1


# Bookkeeping


def test_the_bytes_of_the_bookkeeping_are_all_counted() -> None:
    scene = Scene()
    scene.cache.insert([1], some(scene.allocator.alloc(1)))
    scene.cache.clear()  # which is remembered
    bytes_ = scene.cache.stats()["bytes"]
    lease = scene.cache.match([1, 2], namespace="x" * 10_000)
    named = scene.cache.stats()["bytes"]
    assert named >= bytes_ + 20_000
    lease.publish([1, 2], some(scene.allocator.alloc(2)))
    published = scene.cache.stats()["bytes"]
    for _ in range(100):
        scene.cache.pin(lease, seconds=600)
    assert scene.cache.stats()["bytes"] >= published + 100 * 64 + 10_000
    lease.release()
    scene.cache.clear()
    assert scene.cache.stats()["bytes"] < published


def test_pins_end_in_their_order() -> None:
    scene = Scene()
    leases = [scene.cache.match([head, 0], namespace=head % 2) for head in range(6)]
    for head, lease in enumerate(leases):
        lease.publish([head, 0], some(scene.allocator.alloc(2)))
        scene.cache.pin(lease, seconds=0.0 if head in {1, 4} else 600.0 - head)
        lease.release()
    assert scene.sizes() == (4, 8, 0)
    scene.cache.clear(0)
    assert scene.sizes() == (2, 4, 0)
    scene.cache.clear(1)
    assert scene.sizes() == (0, 0, 0)


def test_cleared_namespaces_are_rid_of_all_of_their_nodes() -> None:
    """Whatever came, went, and came again with the number of an earlier node."""
    scene = Scene()
    for turn in range(30):
        for name in range(3):
            head = [name, turn % 4, turn % 5]
            scene.cache.insert(head, some(scene.allocator.alloc(3)), namespace=name)
        if turn % 3 == 0:
            scene.cache.evict(8)
        if turn % 7 == 0:
            scene.cache.clear(turn % 3)
            assert scene.cache.cached_len([turn % 3], namespace=turn % 3) == 0
        scene.cache.verify()
    for name in range(3):
        scene.cache.clear(name)
    assert scene.sizes() == (0, 0, 0)
    assert scene.cache.stats()["nodes"] == 0


def test_rows_of_other_tables_are_rewritten_by_their_owner() -> None:
    """The way without a planner, as the guide says."""
    scene = Scene()
    scene.cache.insert(PROMPT, some(scene.allocator.alloc(10)))
    lease = scene.cache.match(PROMPT, limit=0)
    [row] = some(scene.table.alloc(1))
    slots = some(scene.allocator.alloc(10))
    scene.table.write((row, slice(0, 10)), slots)
    published = lease.publish(PROMPT, slots)
    assert published.duplicates == 10
    scene.table.write((row, slice(0, published.length)), published.slots)
    assert torch.equal(scene.table.read(row, 10).cpu(), lease.slots.cpu())


@pytest.mark.parametrize("is_released", [False, True])
def test_requests_end_with_their_planner(*, is_released: bool) -> None:
    scene = Scene()
    _, lease = scene.start()
    if is_released:
        lease.release()
    locked = scene.cache.locked_size()
    del scene.planner
    gc.collect()
    assert scene.cache.locked_size() == (0 if is_released else locked)
    lease.release()
    assert scene.cache.locked_size() == 0


@cuda_only
def test_a_pool_is_resized_although_its_rows_are_not_poisoned(
    driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    scene = Scene(debug=True)
    kv = kvpool.KVPool(64, 1, 1, 8, device=devices.current())
    scene.allocator.poison_freed(kv)
    row, lease = scene.start()
    # The lock that is kept behind the fence ends in the same call.
    scene.planner.finish([row], after=Fence())
    del lease
    driver.fail("cuMemsetD8Async")
    with caplog.at_level(logging.WARNING, logger="kvpool"):
        scene.allocator.resize(32)
    assert any("not poisoned" in record.getMessage() for record in caplog.records)
    assert (scene.allocator.size, scene.allocator.available_size()) == (32, 32)
