"""HostTier and Lease.load: what comes back, when it may be used, what is short, and what goes first."""

from __future__ import annotations

import contextlib
import gc
import logging
import random
import time
from pathlib import Path
from typing import TYPE_CHECKING

import devices
import pytest
import torch
from common import (
    assert_refused_after_fork,
    assert_steady,
    failing,
    needs_fork,
    needs_statm,
    on_stream,
    some,
    together,
)
from devices import to_current
from memory_store import Memory
from tier_scene import LAYERS, PROMPT, SIZE, Scene, begin

import kvpool
from kvpool import (
    BatchPlanner,
    ConfigError,
    DriverError,
    GDNPool,
    HostTier,
    KVPool,
    OutOfMemoryError,
    PrefixCache,
    ReqToTokenPool,
    StaleBufferError,
    StateError,
    TokenToKVPoolAllocator,
)

if TYPE_CHECKING:
    from software import Driver

    from kvpool import Lease, Load
    from kvpool.typing import Policy


@pytest.mark.parametrize("has_states", [False, True])
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("write", ["through", "back"])
def test_evicted_pages_are_loaded_layer_by_layer(
    device: str, page_size: int, write: str, *, has_states: bool
) -> None:
    scene = Scene(device, page_size, write=write, has_states=has_states)
    scene.keep(PROMPT)
    assert scene.forget() == 24
    assert (scene.cache.cached_size(), scene.tier.stats()["pages"]) == (0, 24 // page_size)
    lease = scene.cache.match([*PROMPT, 1, 2], limit=25)
    assert (lease.length, lease.loadable) == (0, 24)
    load = some(lease.load())
    assert (load.length, len(load), lease.length, lease.loadable) == (24, 24, 24, 0)
    for layer in range(LAYERS):
        load.wait_layer(layer)
        scene.check(lease, PROMPT, layer + 1)
    scene.finish(load)
    scene.check(lease, PROMPT)
    assert (scene.cache.stats()["loaded"], scene.cache.cached_size()) == (24, 24)
    # It is found by others, and goes on.
    again = scene.cache.match(PROMPT)
    assert (again.length, again.loadable) == (24, 0)
    assert torch.equal(again.slots.cpu(), lease.slots.cpu())
    longer = [*PROMPT, 1, 2, 3, 4]
    scene.compute(lease, longer, state=1 if has_states else None)
    scene.check(lease, longer)
    lease.release()
    again.release()
    scene.end()


def test_pages_go_down_when_the_policy_says(device: str) -> None:
    for write, after in (("through", (6, 6, 6)), ("selective", (0, 6, 6)), ("back", (0, 0, 6))):
        scene = Scene(device, write=write)
        scene.keep(PROMPT)
        scene.settle()
        published = scene.tier.stats()["pages"]
        scene.cache.match(PROMPT).release()
        scene.settle()
        used = scene.tier.stats()["pages"]
        assert scene.forget() == 24
        assert (published, used, scene.tier.stats()["pages"]) == after
        scene.end()


@pytest.mark.cuda
def test_work_on_a_slot_comes_after_the_copy_of_what_was_evicted_there(driver: Driver) -> None:
    """The slot is free at once, no matter when the copy ends, on any stream, and the host does not wait."""
    for is_other_stream in (False, True):
        with devices.on("cuda"):
            scene = Scene("cuda", write="back")
            scene.keep(PROMPT)
            driver.run()
            driver.set_patience(1 << 30)
            assert scene.cache.evict(8) == 8
            assert (scene.allocator.available_size(), scene.allocator.stats()["fenced"]) == (SIZE - 16, 0)
            with on_stream(driver.stream()) if is_other_stream else contextlib.nullcontext():
                taken = some(scene.allocator.alloc(SIZE - 16))
                assert driver.pending() > 0, "the copy has not run"
                for layer in range(LAYERS):
                    rows = [torch.full((SIZE - 16, *shape), -1.0) for shape in ((2, 4), (1, 3))]
                    scene.kv.set_kv_buffer(layer, taken, *map(to_current, rows))
            driver.restore()
            scene.allocator.free(taken)
            with scene.cache.match(PROMPT) as lease:
                assert (lease.length, lease.loadable) == (16, 8)
                some(lease.load()).wait_layer(LAYERS - 1)
                scene.check(lease, PROMPT)
            scene.end()


@pytest.mark.cuda
def test_the_cause_of_a_copy_that_failed_is_logged(driver: Driver, caplog: pytest.LogCaptureFixture) -> None:
    with devices.on("cuda"), caplog.at_level(logging.WARNING, "kvpool"):
        scenes, told = [Scene("cuda")], 0
        for _ in failing(driver, lambda: scenes[-1].keep(PROMPT)):
            driver.run()
            scenes[-1].settle()
            failed = scenes[-1].tier.stats()["failed"]
            causes = [text for text in caplog.messages if text.startswith("pages were not copied")]
            assert len(causes) == (failed > 0)
            assert all("failed with CUDA_ERROR" in cause for cause in causes)
            told += len(causes)
            caplog.clear()
            scenes.append(Scene("cuda"))
    assert told > 0


def test_a_page_that_is_copied_down_is_not_reused_before(device: str) -> None:
    # Evicted at once: the copies have hardly begun.
    scene = Scene(device, size=16)
    for number in range(40):
        prompt = [number, *range(15)]
        scene.keep(prompt)
        scene.cache.evict(16)
        taken = None
        while taken is None:
            taken = scene.allocator.alloc(16)
        for layer in range(LAYERS):
            scene.kv.set_kv_buffer(
                layer, taken, to_current(torch.zeros(16, 2, 4)), to_current(torch.zeros(16, 1, 3))
            )
        scene.allocator.free(taken)
        scene.settle()
        lease = scene.cache.match(prompt)
        assert lease.loadable == 16
        scene.finish(some(lease.load()))
        scene.check(lease, prompt)
        lease.release()
    scene.end()


def test_a_limit_and_a_shortage(device: str) -> None:
    scene = Scene(device)
    scene.keep(PROMPT)
    scene.forget()
    lease = scene.cache.match(PROMPT)
    assert some(lease.load(limit=0)).length == 0
    assert some(lease.load(limit=3)).length == 0
    taken = some(scene.allocator.alloc(SIZE - 8))
    assert lease.load() is None
    assert (lease.length, lease.loadable) == (0, 24)
    load = some(lease.load(limit=11))
    assert (load.length, lease.length) == (8, 8)
    scene.finish(load)
    scene.check(lease, PROMPT)
    scene.allocator.free(taken)
    # A later match loads the rest.
    lease.release()
    later = scene.cache.match(PROMPT)
    assert (later.length, later.loadable) == (8, 16)
    scene.finish(some(later.load()))
    scene.check(later, PROMPT)
    nothing = some(later.load())
    assert (nothing.length, nothing.query()) == (0, True)
    nothing.wait_layer(0)
    nothing.cancel()
    later.release()
    scene.end()


def test_a_load_evicts_what_it_needs(device: str) -> None:
    scene = Scene(device, size=32)
    scene.keep(PROMPT)
    scene.forget()
    scene.keep(range(1000, 1032))
    scene.settle()
    lease = scene.cache.match(PROMPT)
    scene.finish(begin(lease))
    scene.check(lease, PROMPT)
    lease.release()
    scene.end()


def test_two_requests_load_once(device: str) -> None:
    scene = Scene(device)
    scene.keep(PROMPT)
    scene.forget()
    first, second, third = (scene.cache.match(PROMPT) for _ in range(3))
    loads = [some(first.load()), some(second.load()), some(third.load(limit=8))]
    for load in loads:
        scene.finish(load)
    shared = torch.equal(first.slots.cpu(), second.slots.cpu())
    for lease in (first, second, third):
        scene.check(lease, PROMPT)
    # On the CPU the first may have been there before the second began: it is found, then.
    assert shared
    assert (first.length, second.length, third.length) == (24, 24, 8)
    assert scene.tier.stats()["loaded"] == 6
    first.release()
    scene.check(second, PROMPT)
    second.release()
    scene.cache.evict(SIZE)
    scene.check(third, PROMPT)
    third.release()
    scene.end()


@pytest.mark.parametrize("has_states", [False, True])
def test_a_load_that_is_given_up_leaves_nothing_behind(device: str, *, has_states: bool) -> None:
    scene = Scene(device, has_states=has_states)
    scene.keep(PROMPT)
    scene.forget()
    for end in ("cancel", "release", "drop", "finish"):
        lease = scene.cache.match(PROMPT)
        load = begin(lease)
        if end == "cancel":
            load.cancel()
            assert lease.length in {0, 24}
            load.cancel()
            lease.release()
            load.cancel()
        elif end == "release":
            lease.release()
        elif end == "drop":
            del lease
        else:
            scene.finish(load)
            load.cancel()
            assert lease.length == 24
            scene.check(lease, PROMPT)
            lease.release()
        scene.forget()
    scene.end()


@pytest.mark.cuda
def test_a_cancelled_load_gives_its_slots_back_at_once(driver: Driver) -> None:
    with devices.on("cuda"):
        scene = Scene("cuda")
        scene.keep_on_host_only(driver)
        lease = scene.cache.match(PROMPT)
        load = some(lease.load())
        load.cancel()
        # Their next owner comes after the copies.
        assert (lease.length, scene.allocator.available_size()) == (0, SIZE)
        assert driver.pending() > 0
        driver.run()
        with pytest.raises(RuntimeError, match="24 tokens has ended early"):
            load.query()
        # The copies are over, the request computes.
        assert scene.allocator.available_size() == SIZE
        scene.compute(lease, PROMPT)
        scene.check(lease, PROMPT)
        driver.restore()
        lease.release()
        scene.end()


@pytest.mark.cuda
def test_a_load_that_ends_while_its_lease_is_looked_at_has_arrived(driver: Driver) -> None:
    """Each look asks about the copies more than once, and they may end in between."""
    with devices.on("cuda"):
        for patience in range(1, 9):
            scene = Scene("cuda")
            scene.keep_on_host_only(driver)
            lease = scene.cache.match(PROMPT)
            driver.set_patience(patience)
            load = some(lease.load())
            assert [lease.length for _ in range(9)] == [24] * 9
            assert load.query()
            scene.check(lease, PROMPT)
            lease.release()
            driver.restore()
            scene.end()


@pytest.mark.cuda
def test_layers_come_beside_the_calls_of_their_user(driver: Driver) -> None:
    with devices.on("cuda"):
        scene = Scene("cuda", page_size=1)
        scene.keep(PROMPT)
        driver.run()
        scene.forget()
        lease = scene.cache.match(PROMPT)
        driver.run()
        driver.set_patience(1 << 30)
        driver.reset_calls()
        stream = driver.stream()
        load = some(lease.load())
        # All layers are enqueued before the first is waited for; no call waits.
        assert driver.calls("launch:kvpool_copy_pages") == LAYERS
        # Driver calls that are not needed for each layer are made once.
        assert driver.calls("cuStreamIsCapturing") == 2
        assert driver.calls("cuCtxPushCurrent_v2") <= 2
        assert driver.calls("cuEventRecord") == LAYERS + 1
        assert driver.pending() >= LAYERS
        waits = ("cuStreamSynchronize", "cuEventSynchronize", "cuMemAlloc_v2", "cuMemHostAlloc")
        assert [driver.calls(name) for name in waits] == [0, 0, 0, 0]
        with on_stream(stream):
            load.wait_layer(0)
            first = scene.kv.gather_kv(0, lease.slots)[0]
            driver.run(stream)
            # The work behind layer 0 has run; layers 1 and 2 have not arrived.
            assert driver.pending() >= LAYERS - 1
            assert driver.pending(stream) == 0
            del first
            load.wait_layer(LAYERS - 1)
        with pytest.raises(StateError, match="24 tokens of the lease are on their way"):
            lease.publish([1, 2], some(scene.allocator.alloc(2)))
        driver.run()
        driver.restore()
        scene.check(lease, PROMPT)


@pytest.mark.cuda
def test_work_behind_the_last_layer_on_its_stream_needs_no_query(driver: Driver) -> None:
    with devices.on("cuda"):
        scene = Scene("cuda")
        scene.keep_on_host_only(driver)
        lease = scene.cache.match(PROMPT)
        load = some(lease.load())
        load.wait_layer(LAYERS - 1)
        assert not load.query()
        scene.compute(lease, [*PROMPT, 1, 2, 3, 4])
        assert scene.cache.cached_len([*PROMPT, 1, 2, 3, 4]) == 28
        scene.check(lease, [*PROMPT, 1, 2, 3, 4])
        driver.restore()
        lease.release()
        scene.end()


@pytest.mark.cuda
def test_a_place_in_host_memory_is_written_after_a_stream_has_read_it(driver: Driver) -> None:
    with devices.on("cuda"):
        scene = Scene("cuda", host=24)
        scene.keep_on_host_only(driver)
        lease = scene.cache.match(PROMPT)
        load = some(lease.load())
        load.wait_layer(LAYERS - 1)
        # The cache has it, in the order of this stream; the copies have not run.
        assert (lease.length, scene.cache.cached_len(PROMPT), driver.pending() >= LAYERS) == (24, 24, True)
        with on_stream(driver.stream()):
            scene.keep([9] * 8)
        # The tier decides as if they had; what is written there comes after what is read.
        assert (scene.tier.stats()["evicted"], scene.tier.stats()["skipped"]) == (2, 0)
        driver.restore()
        scene.check(lease, PROMPT)
        lease.release()
        scene.end()


def test_a_planner_takes_a_lease_that_loads(device: str) -> None:
    scene = Scene(device)
    scene.keep(PROMPT)
    scene.forget()
    table = ReqToTokenPool(4, 40, device, strict=True)
    planner = BatchPlanner(table, scene.allocator, 4, 64)
    longer = [*PROMPT, 5, 6, 7]
    [row] = some(table.alloc(1))
    lease = scene.cache.match(longer, limit=26)
    load = some(lease.load())
    plan = some(planner.extend([row], [lease.length], [27], prefixes=[lease]))
    with pytest.raises(StateError, match=r"24 tokens of the lease are on their way|request row 1 already"):
        lease.load()
    try:
        load.cancel()
    except StateError as error:
        assert "row 1, which uses the pages" in str(error)  # noqa: PT017 - a thread may be done with it
    else:
        assert load.query()
    slots = table.req_to_token[row, :27].clone()
    assert torch.equal(slots[:24].cpu(), lease.slots.cpu())
    for layer in range(LAYERS):
        load.wait_layer(layer)
        k, v = scene.rows(longer, 24, layer)
        scene.kv.set_kv_buffer(layer, plan.out_cache_loc, to_current(k), to_current(v))
        found = scene.kv.gather_kv(layer, slots)
        for one, other in zip(found, scene.rows(longer, 0, layer), strict=True):
            assert torch.equal(one.cpu(), other)
    lease.publish(longer[24:], row=row)
    [fork] = some(table.alloc(1))
    some(planner.fork(row, fork, 27))
    planner.finish([row, fork])
    assert table.available_size() == 4
    lease.release()
    scene.end()


def test_a_request_that_ends_while_it_loads(device: str) -> None:
    scene = Scene(device, page_size=1)
    scene.keep(PROMPT)
    table = ReqToTokenPool(4, 40, device, strict=True)
    planner = BatchPlanner(table, scene.allocator, 4, 64)
    for length in (0, 7, 24):
        scene.forget()
        [row] = some(table.alloc(1))
        lease = scene.cache.match(PROMPT)
        load = begin(lease)
        some(planner.extend([row], [24], [25], prefixes=[lease]))
        if length:
            planner.truncate([row], [length])
            assert lease.length == length
            scene.finish(load)
            scene.check(lease, PROMPT)
        planner.finish([row])
        assert lease.released
        del load
    scene.end()


def test_clear_clears_the_tier(device: str) -> None:
    scene = Scene(device, events=True)
    for name in ("a", "b"):
        scene.keep(PROMPT, namespace=name)
    scene.settle()
    scene.cache.clear("a")
    assert scene.tier.stats()["pages"] == 6
    scene.cache.evict(SIZE)
    assert scene.cache.match(PROMPT, namespace="a").loadable == 0
    assert scene.cache.match(PROMPT, namespace="b").loadable == 24
    lease = scene.cache.match(PROMPT, namespace="b")
    load = some(lease.load())
    slots = lease.slots.tolist()
    scene.allocator.clear()
    # Nothing is written to slots that are free.
    taken = some(scene.allocator.alloc(24))
    assert taken.tolist() == slots
    for layer in range(LAYERS):
        scene.kv.set_kv_buffer(
            layer, taken, to_current(torch.ones(24, 2, 4)), to_current(torch.ones(24, 1, 3))
        )
    # Copies up run one after the other.
    scene.keep(PROMPT, namespace="c")
    scene.settle()
    scene.cache.evict(SIZE)
    with scene.cache.match(PROMPT, namespace="c") as last:
        scene.finish(some(last.load()))
    for layer in range(LAYERS):
        assert (scene.kv.gather_kv(layer, taken)[0] == 1).all()
    scene.allocator.free(taken)
    scene.cache.clear("c")
    with pytest.raises(StaleBufferError):
        len(lease)
    load.cancel()
    assert scene.cache.match(PROMPT, namespace="b").loadable == 0
    assert scene.tier.stats()["pages"] == 0
    scene.keep(PROMPT)
    scene.settle()
    scene.tier.clear()
    assert scene.tier.stats()["pages"] == 0
    scene.end()


def test_pages_on_the_device_are_evicted_last_and_beginnings_after_ends(device: str) -> None:
    scene = Scene(device, size=32, host=32)
    old, new = list(range(16)), list(range(500, 516))
    scene.keep(old)
    scene.settle()
    scene.cache.evict(16)
    scene.keep(new)
    scene.settle()
    assert (scene.tier.stats()["pages"], scene.tier.stats()["evicted"]) == (8, 0)
    # One page more: the end of what the device has no more.
    scene.keep([*new, 1, 2, 3, 4])
    scene.settle()
    assert scene.tier.stats()["evicted"] == 1
    assert scene.cache.match(old).loadable == 12
    assert scene.cache.evict(SIZE) == 20
    assert scene.cache.match([*new, 1, 2, 3, 4]).loadable == 20
    scene.end()


@pytest.mark.cuda
def test_of_what_was_read_the_end_goes_first(driver: Driver) -> None:
    with devices.on("cuda"):
        scene = Scene("cuda", host=24)
        scene.keep_on_host_only(driver)
        lease = scene.cache.match(PROMPT)
        some(lease.load()).cancel()
        driver.restore()
        assert scene.allocator.available_size() == SIZE
        scene.keep([9] * 8)
        scene.settle()
        assert (scene.tier.stats()["evicted"], scene.cache.match(PROMPT).loadable) == (2, 16)
        lease.release()
        scene.end()


def test_events_and_explanations_know_the_tier(device: str) -> None:
    scene = Scene(device, events=True)
    scene.keep(PROMPT)
    scene.settle()
    scene.cache.evict(8)
    parts = [(part.begin, part.end, part.state) for part in scene.cache.explain([*PROMPT, 1])]
    assert parts == [(0, 16, "device"), (16, 24, "host"), (24, 25, "page not full")]
    events = scene.cache.events()
    told = [(type(event).__name__, event.tier, len(event.pages)) for event in events]  # type: ignore[union-attr]
    assert told == [("Stored", "device", 6), ("Stored", "host", 6), ("Removed", "device", 2)]
    stored = [event for event in events if isinstance(event, kvpool.Stored)]
    assert stored[0].pages == stored[1].pages
    assert (stored[1].tokens, stored[1].parent) == (PROMPT, None)
    scene.tier.clear()
    parts = [(part.begin, part.end, part.state) for part in scene.cache.explain(PROMPT)]
    assert parts == [(0, 16, "device"), (16, 24, "evicted")]
    scene.end()


def test_a_hybrid_prefix_is_in_host_memory_as_far_as_its_state(device: str) -> None:
    scene = Scene(device, has_states=True)
    with scene.cache.match(PROMPT) as lease:
        scene.compute(lease, PROMPT[:8], state=1)
        scene.compute(lease, PROMPT)
    scene.forget()
    parts = [(part.begin, part.end, part.state) for part in scene.cache.explain(PROMPT)]
    assert parts == [(0, 8, "host"), (8, 24, "evicted")]
    assert scene.cache.match(PROMPT).loadable == 8
    scene.end()


def test_a_tier_has_room_for_states_in_proportion(device: str) -> None:
    kv = KVPool(64, 1, 1, 2, device, torch.float32)
    states = GDNPool(2, 1, 1, 2, 2, 2, 2, device, max_track_slots=3)
    tier = HostTier(kv, 640, states=states)
    assert (tier.max_states, tier.size, tier.write, tier.pin_memory) == (30, 640, "through", True)
    assert (tier.kv, tier.states, tier.page_bytes) == (kv, states, 16)
    assert HostTier(kv, 1, states=states, max_states=7).max_states == 7
    assert HostTier(kv, 1).max_states == 0
    assert tier.wait_page_locked(60)
    assert tier.mem_bytes() >= 640 * 16


def test_misuse_has_its_messages(device: str) -> None:
    kv = KVPool(64, 2, 1, 2, device, torch.float32, page_size=4)
    states = GDNPool(2, 1, 1, 2, 2, 2, 2, device, max_track_slots=3)
    allocator = TokenToKVPoolAllocator(64, device, 4)
    for make, words in (
        (lambda: HostTier(kv, 3), "size 3 is less than a page of 4 tokens"),
        (
            lambda: HostTier(kv, 64, write="twice"),  # type: ignore[arg-type]
            "write is 'twice'; it is 'through', 'selective' or 'back'",
        ),
        (lambda: HostTier(kv, 64, max_states=2), "max_states is 2, but there are no states"),
        (lambda: PrefixCache(allocator, tiers=[HostTier(kv, 8)] * 3), "3 tiers were given"),
        (
            lambda: PrefixCache(TokenToKVPoolAllocator(64, device, 2), tiers=[HostTier(kv, 8)]),
            "the host tier is for 64 slots on .* in pages of 4, the allocator has 64 on .* in pages of 2",
        ),
        (
            lambda: PrefixCache(TokenToKVPoolAllocator(68, device, 4), tiers=[HostTier(kv, 8)]),
            "for 64 slots .* has 68",
        ),
        (lambda: PrefixCache(allocator, states=states, tiers=[HostTier(kv, 8)]), "the host tier has none"),
        (lambda: PrefixCache(allocator, tiers=[HostTier(kv, 8, states=states)]), "the cache has none"),
    ):
        with pytest.raises(ConfigError, match=words):
            make()
    with pytest.raises(TypeError):
        PrefixCache(allocator, tiers=[kv])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="beyond 2147483647"):
        HostTier(kv, 1 << 46)
    with pytest.raises(OutOfMemoryError):
        HostTier(KVPool(64, 64, 64, 128, device, page_size=64), (1 << 31) - 64)
    tier = HostTier(kv, 64)
    cache = PrefixCache(allocator, tiers=[tier])
    with pytest.raises(ConfigError, match="belongs to another prefix cache"):
        PrefixCache(allocator, tiers=[tier])
    assert cache.tiers == (tier,)
    lease = cache.match([1])
    with pytest.raises(ConfigError, match="limit is -1"):
        lease.load(limit=-1)
    load = some(lease.load())
    with pytest.raises(ConfigError, match="layer is -1"):
        load.wait_layer(-1)
    lease.release()
    with pytest.raises(StaleBufferError):
        lease.load()
    del cache, lease
    gc.collect()
    # Pages stay for the next cache.
    assert PrefixCache(allocator, tiers=[tier]).tiers == (tier,)


def test_pages_outlive_their_cache(device: str) -> None:
    scene = Scene(device)
    scene.keep(PROMPT)
    del scene.cache
    gc.collect()
    assert scene.allocator.available_size() == SIZE
    assert scene.tier.stats()["pages"] == 6
    scene.cache = PrefixCache(scene.allocator, tiers=[scene.tier])
    lease = scene.cache.match(PROMPT)
    assert lease.loadable == 24
    scene.finish(some(lease.load()))
    scene.check(lease, PROMPT)
    lease.release()
    scene.end()


def test_many_threads_share_a_tier() -> None:
    scene = Scene("cpu", page_size=2, size=128, host=512)
    prompts = [[number // 4, number // 2, *range(number, number + 20)] for number in range(24)]

    def work(thread: int) -> None:
        chance = random.Random(thread)  # noqa: S311
        for _ in range(60):
            prompt = chance.choice(prompts)
            with scene.cache.match(prompt) as lease:
                load = lease.load() if chance.random() < 0.8 else None
                if load is not None and chance.random() < 0.2:
                    load.cancel()
                elif load is not None:
                    for layer in range(LAYERS):
                        load.wait_layer(layer)
                    found = scene.kv.gather_kv(1, lease.slots)
                    expected = scene.rows(prompt[: lease.length], 0, 1)
                    assert torch.equal(found[0], expected[0])
                    assert torch.equal(found[1], expected[1])
                if scene.allocator.available_size() > 40 or scene.cache.evict(40) >= 40:
                    try:
                        scene.compute(lease, prompt)
                    except AssertionError:
                        # Another thread was faster.
                        continue

    together(work)
    assert scene.cache.stats()["loaded"] > 0
    scene.end()


@needs_fork
def test_the_child_of_a_fork_computes_what_its_parent_loads() -> None:
    scene = Scene("cpu")
    scene.keep(PROMPT)
    scene.forget()
    lease = scene.cache.match(PROMPT)
    load = some(lease.load())
    scene.finish(load)

    def is_wrong() -> bool:
        # Pages that had arrived are there; the child has threads of its own.
        scene.check(lease, PROMPT)
        scene.keep([7] * 8)
        scene.settle()
        return bool(scene.tier.stats()["pages"] != 8)

    assert_refused_after_fork([], is_wrong)
    lease.release()
    scene.end()


@needs_statm
def test_memory_does_not_grow() -> None:
    scene = Scene("cpu")
    scene.keep(PROMPT)

    def once() -> None:
        scene.forget()
        with scene.cache.match(PROMPT) as lease:
            scene.finish(begin(lease))

    assert_steady(once, 1 << 20)


@pytest.mark.cuda
@pytest.mark.parametrize("has_states", [False, True])
@pytest.mark.parametrize("call", ["publish", "evict", "load", "wait", "cancel", "drop"])
def test_a_driver_call_that_fails_loses_nothing(  # noqa: C901 - one call after the other
    driver: Driver, call: str, *, has_states: bool
) -> None:
    with devices.on("cuda"):
        failures = 0

        def make() -> tuple[Scene, Lease, Load | None]:
            scene = Scene("cuda", has_states=has_states, write="back" if call == "evict" else "through")
            if call == "publish":
                return scene, scene.cache.match(PROMPT), None
            scene.keep(PROMPT)
            driver.run()
            if call == "evict":
                return scene, scene.cache.match([1]), None
            scene.forget()
            lease = scene.cache.match(PROMPT)
            return scene, lease, some(lease.load()) if call != "load" else None

        scene, lease, load = make()
        slots = some(scene.allocator.alloc(24))

        def work() -> None:
            nonlocal load
            if call == "publish":
                lease.publish(PROMPT, slots, state=1 if has_states else None)
            elif call == "evict":
                scene.cache.evict(8)
            elif call == "load":
                load = some(lease.load())
            elif call == "wait":
                some(load).wait_layer(0)
            elif call == "cancel":
                some(load).cancel()
            else:
                lease.release()

        for error in failing(driver, work):
            failures += error is not None
            driver.run()
            scene.verify()
            if error is not None:
                # It works again.
                work()
            if call in {"load", "wait"}:
                scene.finish(some(load))
                scene.check(lease, PROMPT)
            if call != "publish":
                scene.allocator.free(slots)
            load = None
            lease.release()
            scene.end()
            scene, lease, load = make()
            slots = some(scene.allocator.alloc(24))
        # A page that cannot be copied down is not found there; the call succeeds.
        is_told = call in {"load", "wait", "cancel"} or (call == "publish" and has_states)
        assert (failures > 0) == is_told, failures


@pytest.mark.cuda
@pytest.mark.parametrize("write", ["back", "selective"])
def test_a_copy_down_is_behind_every_stream_that_published(driver: Driver, write: str) -> None:
    with devices.on("cuda"):
        scene = Scene("cuda", write=write)
        one, two = driver.stream(), driver.stream()
        with on_stream(one):
            scene.keep(PROMPT)
        driver.run()
        driver.reset_calls()
        with on_stream(two):
            if write == "back":
                scene.cache.evict(SIZE)
            else:
                scene.cache.match(PROMPT).release()
        # Both streams of copies, the stream that gathers, and the copies behind it.
        assert driver.calls("cuStreamWaitEvent") == 4
        driver.run()
        scene.forget()
        lease = scene.cache.match(PROMPT)
        scene.finish(some(lease.load()))
        scene.check(lease, PROMPT)
        lease.release()
        scene.end()


@pytest.mark.cuda
@pytest.mark.parametrize("captured", [False, True])
def test_slots_are_cleared_behind_what_is_copied_there(driver: Driver, *, captured: bool) -> None:
    with devices.on("cuda"):
        scene = Scene("cuda")
        scene.keep_on_host_only(driver)
        stream = driver.stream()
        lease = scene.cache.match(PROMPT)
        load = some(lease.load())
        assert driver.pending() == LAYERS
        if captured:
            # The stream cannot be ordered behind the copies: they are waited for.
            driver.begin_capture(stream)
            with on_stream(stream):
                scene.allocator.clear()
            driver.end_capture(stream)
            assert driver.pending() == 0
        else:
            driver.reset_calls()
            with on_stream(stream):
                scene.allocator.clear()
            assert driver.pending() >= LAYERS
            # Work enqueued there from now on comes after the copies.
            driver.run(stream)
            assert driver.pending() == 0
        driver.restore()
        assert scene.allocator.available_size() == SIZE
        with pytest.raises(RuntimeError, match="ended early"):
            load.query()


@pytest.mark.cuda
@pytest.mark.parametrize("end", ["release", "drop", "clear"])
def test_a_load_whose_lease_has_ended_is_not_there(driver: Driver, end: str) -> None:
    with devices.on("cuda"):
        scene = Scene("cuda")
        scene.keep_on_host_only(driver)
        lease: Lease | None = scene.cache.match(PROMPT)
        load = some(some(lease).load())
        if end == "release":
            some(lease).release()
        elif end == "drop":
            lease = None
        else:
            scene.allocator.clear()
        assert not load.query()
        driver.run()
        with pytest.raises(RuntimeError, match="the load of 24 tokens has ended early"):
            load.query()
        driver.restore()


def test_recomputed_pages_are_evicted_after_pages_missing_on_the_device(device: str) -> None:
    scene = Scene(device, host=32)
    new, old = list(range(16)), list(range(500, 516))
    for prompt in (new, old):
        scene.keep(prompt)
        scene.settle()
        scene.cache.evict(16)
    scene.keep(new)
    scene.settle()
    scene.keep([7, 7, 7, 7])
    scene.settle()
    assert (scene.tier.stats()["evicted"], scene.cache.match(old).loadable) == (1, 12)
    scene.end()


@pytest.mark.parametrize(("policy", "least", "most"), [("adaptive", 0.9, 1.0), ("lru", 0.0, 0.0)])
def test_pages_that_come_back_stay_longer_than_pages_used_once(
    device: str, policy: Policy, least: float, most: float
) -> None:
    """40 prompts come in turn, three others after each: more than the tier holds between two uses."""
    page, documents, rounds, last = 64, 40, 12, 4
    slots = TokenToKVPoolAllocator(16 * page, device, page)
    kv = KVPool(16 * page, 1, 1, 1, device, torch.float16, page_size=page)
    cache = PrefixCache(slots, policy=policy, tiers=(HostTier(kv, 64 * page),))
    found, others = 0, 10_000
    for turn in range(rounds):
        for document in range(documents):
            for number in (document, others, others + 1, others + 2):
                with cache.match([number] * page) as lease:
                    if lease.loadable:
                        load = lease.load()
                        assert load is not None
                        load.wait_layer(0)
                    if lease.length < page:
                        lease.publish([number] * page, slots.alloc(page))
                    elif turn >= rounds - last:
                        found += 1
            others += 3
    assert least <= found / (last * documents) <= most
    assert cache.wait_written(30)


@pytest.mark.cuda
def test_a_capture_waits_for_no_load(driver: Driver) -> None:
    with devices.on("cuda"):
        scene = Scene("cuda")
        scene.keep(PROMPT)
        driver.run()
        scene.forget()
        lease = scene.cache.match(PROMPT)
        stream = driver.stream()
        load = some(lease.load())
        driver.begin_capture(stream)
        with on_stream(stream), pytest.raises(DriverError, match="cannot be captured into a CUDA graph"):
            load.wait_layer(0)
        assert driver.end_capture(stream) > 0
        scene.finish(load)
        scene.check(lease, PROMPT)
        lease.release()
        scene.end()


class Rank:
    """A rank that makes calls, some of which give copies the time to end."""

    def __init__(self, scene: Scene, speed: str, seed: int) -> None:
        self.scene, self.speed = scene, speed
        self.choice, self.pause = random.Random(seed), random.Random(speed)  # noqa: S311
        self.log: list[object] = []

    def rest(self) -> None:
        """Lets copies end: all of them, none, or those that happen to."""
        if self.speed == "fast" or (self.speed == "uneven" and self.pause.random() < 0.3):
            self.scene.cache.wait_written()

    def prompt(self) -> list[int]:
        parts = ((8, 3), (8, 3), (4 * self.choice.randrange(1, 6), 4))
        return [token for count, kinds in parts for token in [self.choice.randrange(kinds)] * count]

    def serve(self) -> None:
        """A request: it finds, loads, takes slots and publishes, or ends early."""
        scene, prompt, end = self.scene, self.prompt(), self.choice.random()
        lease = scene.cache.match(prompt)
        self.log.append(("match", lease.length, lease.loadable, lease.kv_length))
        self.rest()
        if lease.loadable:
            load = lease.load(limit=self.choice.choice((None, 8)))
            self.log.append(("load", None if load is None else load.length, lease.length))
            self.rest()
            if load is not None and end < 0.3:
                load.cancel() if end < 0.15 else lease.release()
            elif load is not None:
                self.log.append(("found meanwhile", scene.cache.cached_len(prompt)))
                load.wait_layer(LAYERS - 1)
                scene.check(lease, prompt)
        if end < 0.15 or end >= 0.3:
            need = len(prompt) - lease.length
            has_room = scene.allocator.available_size() + scene.cache.evictable_size() >= need
            if need and has_room:
                published = scene.compute(lease, prompt, state=1 if scene.states is not None else None)
                self.log.append((published.length, published.slots.tolist(), lease.state_slot))
            if end > 0.9:
                self.log.append(("evict", scene.cache.evict(8)))
            self.log.append(("slots", lease.slots.tolist()))
            lease.release()
        self.rest()
        stats = scene.tier.stats()
        self.log.append((stats["evicted"], stats["skipped"], scene.allocator.available_size()))
        rest = scene.allocator.available_size() - 8
        if rest > 0 and end > 0.5:  # slots that were evicted a moment ago
            taken = some(scene.allocator.alloc(rest))
            self.log.append(taken.tolist())
            for layer in range(LAYERS):
                rows = [torch.full((rest, *shape), -1.0) for shape in ((2, 4), (1, 3))]
                scene.kv.set_kv_buffer(layer, taken, *map(to_current, rows))
            scene.allocator.free(taken)


@pytest.mark.parametrize("has_states", [False, True])
@pytest.mark.parametrize("host", [40, 128])
@pytest.mark.parametrize("write", ["through", "selective", "back"])
def test_ranks_of_different_speed_decide_the_same(
    device: str, write: str, host: int, *, has_states: bool
) -> None:
    for seed in range(3):
        logs, events = [], []
        for speed in ("fast", "slow", "uneven"):
            scene = Scene(device, host=host, write=write, has_states=has_states, policy="lru", events=True)
            rank = Rank(scene, speed, seed)
            for _ in range(60):
                rank.serve()
            logs.append(rank.log)
            events.append([repr(event) for event in scene.cache.events()])
            scene.tier.verify()
            scene.end()
        assert logs[0] == logs[1] == logs[2]
        assert events[0] == events[1] == events[2]


def test_slots_are_the_same_whatever_the_order_of_free_slots(device: str) -> None:
    for need_sort in (False, True):
        logs = []
        for is_slow in (False, True):
            kv = KVPool(64, LAYERS, 2, 4, device, torch.float32, page_size=4)
            slots = TokenToKVPoolAllocator(64, device, 4, need_sort=need_sort)
            cache = PrefixCache(slots, tiers=(HostTier(kv, 256, write="back"),))
            log: list[object] = []
            for number in range(40):
                prompt = [number % 7] * (8 + number % 3 * 4)
                with cache.match(prompt) as lease:
                    taken = slots.alloc(len(prompt) - lease.length)
                    log.append((lease.length, lease.loadable, some(taken).tolist()))
                    lease.publish(prompt[lease.length :], some(taken))
                if not is_slow:
                    cache.wait_written()
            logs.append(log)
        assert logs[0] == logs[1]


def test_a_load_counts_as_complete_when_somebody_knows_that_it_is(device: str) -> None:
    """Its end alone changes nothing: ranks do not see it at the same moment."""
    scene = Scene(device)
    for way in ("wait", "query"):
        scene.keep(PROMPT)
        scene.forget()
        lease = scene.cache.match(PROMPT)
        load, other = some(lease.load()), scene.cache.match(PROMPT)
        time.sleep(0.02)  # its copies are over, if they run on a thread
        assert (scene.cache.cached_len(PROMPT), other.loadable) == (0, 24)
        with pytest.raises(StateError, match="wait for their last layer first"):
            lease.publish([], scene.allocator.alloc(0))
        if way == "wait":
            load.wait_layer(LAYERS - 1)
        else:
            while not load.query():
                time.sleep(0.0001)
        assert (lease.length, scene.cache.cached_len(PROMPT)) == (24, 24)
        lease.release()
        other.release()
    scene.end()


@pytest.mark.parametrize("host", [12, 16, 20])
def test_host_memory_gives_up_the_end_of_a_prefix_before_its_beginning(device: str, host: int) -> None:
    """Pages are copied as they are evicted: the last ones of each prompt come first."""
    head, tails = list(range(8)), [[number] * 4 for number in (10, 20, 30)]
    for at_once in (SIZE, 4):
        scene = Scene(device, host=host, write="back")
        for tail in tails:
            scene.keep([*head, *tail])
        while scene.cache.evict(at_once):
            pass
        scene.settle()
        found = [scene.cache.match([*head, *tail]).loadable // 4 for tail in tails]
        assert sorted(found) == [2] * (5 - host // 4) + [3] * (host // 4 - 2), (at_once, found)
        scene.keep([90] * 4)
        scene.cache.evict(SIZE)
        scene.settle()
        found = [scene.cache.match([*head, *tail]).loadable // 4 for tail in tails]
        assert sorted(found) == [2] * (6 - host // 4) + [3] * (host // 4 - 3), (at_once, found)
        scene.end()


def test_a_tier_that_can_never_have_anything_else_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "kvpool"):
        for write, host, is_useless in (
            ("through", SIZE, True),
            ("through", SIZE - 4, True),
            ("through", SIZE + 4, False),
            ("selective", SIZE, False),
            ("back", SIZE, False),
        ):
            scene = Scene("cpu", host=host, write=write)
            scene.keep(PROMPT)
            scene.forget()
            messages = [text for text in caplog.messages if "nothing can be loaded from it" in text]
            assert len(messages) == is_useless, (write, host)
            caplog.clear()
        with Memory() as store:  # what comes from there can be loaded
            Scene("cpu", host=SIZE, store=store)
        assert not caplog.messages


def test_pools_larger_than_the_memory_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    lines = Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").exists() else []
    total = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemTotal:")), None)
    if total is None:
        pytest.skip("the system does not tell its memory")
    with caplog.at_level(logging.WARNING, "kvpool"):
        kv = KVPool(64, 1, 1, 1024, "cpu", torch.float32, page_size=4)
        HostTier(kv, 256)
        assert not caplog.messages
        tier = HostTier(kv, total // kv.mem_bytes() * 64 * 2)
        [message] = caplog.messages
        tier.stats()
    assert message.startswith(f"{tier.name} has {tier.mem_bytes() >> 20} MiB, more than the memory")
    assert "the system kills the process without an error" in message
    assert len(caplog.messages) == 1
