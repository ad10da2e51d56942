"""ArenaHostTier: what an arena has evicted comes back, by what memory holds."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import re
import signal
import threading
import time
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import devices
import numpy as np
import pytest
import torch
from arena_engine import CHUNK, FULL, HYBRID, LAYOUTS, PAGE, STATES, WINDOW, Engine, K, len_of
from common import needs_fork, some
from memory_store import Memory

import kvpool
from kvpool import (
    ArenaHostTier,
    ArenaLease,
    ArenaPrefixCache,
    CacheArena,
    CacheLayout,
    ConfigError,
    FileStore,
    Group,
    Plane,
    StaleError,
    StateError,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

pytestmark = pytest.mark.usefixtures("device")

STRIDED = CacheLayout(
    [FULL, Group("sparse", "full", [6], K, stride=8), Group("state", "state", [4, 5], STATES)], page_size=PAGE
)
ALL = {**LAYOUTS, "strided": STRIDED}
PROMPT = list(range(1, 25))


def evict(engine: Engine) -> None:
    """Take all that the arena can give, and give it back: no prefix without a lease is left."""
    arena = engine.arena
    taken = []
    for group in engine.groups:
        while (units := arena.alloc({group.name: 1})) is not None:
            taken.append(units)
    for units in taken:
        for name, numbers in units.items():
            arena.free(name, numbers)


def keep(engine: Engine, tokens: list[int]) -> None:
    """Compute a prompt, publish it with its state, and finish its request."""
    row, _ = some(engine.begin([*tokens, 0], PAGE))
    if rest := tokens[len(engine.tokens[row]) :]:
        assert engine.grow([row], [rest])
    assert engine.publish(row) == len(tokens)
    engine.finish(row)


def settle(engine: Engine) -> kvpool.typing.ArenaTierStats:
    assert engine.cache.wait_written(60)
    return engine.tiers[0].stats()


def wholly_free(engine: Engine) -> None:
    for row in [*engine.tokens]:
        engine.finish(row)
    if devices.current() != "cpu":
        # Loads keep their pieces until they are over.
        torch.cuda.synchronize()
    settle(engine)
    engine.cache.clear()
    assert engine.arena.slabs_free == engine.arena.stats()["capacity"]
    stats = engine.tiers[0].stats()
    assert stats["available"] == stats["capacity"], stats


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("seed", range(4))
def test_memory_holds_what_its_tokens_left_there(name: str, seed: int) -> None:
    choose = random.Random(seed)  # noqa: S311 - of a test
    engine = Engine(ALL[name], choose.choice([6_000, 12_000]), tier_bytes=choose.choice([6, 8, 40]) * 4096)
    heads = [[choose.randrange(3) for _ in range(24)] for _ in range(6)]
    for _ in range(200):
        live = sorted(engine.tokens)
        match choose.choice(["begin", "begin", "grow", "publish", "publish", "finish", "finish", "evict"]):
            case "begin":
                head = choose.choice(heads)[: choose.randint(1, 24)]
                tail = [choose.randrange(3) for _ in range(choose.randint(1, 6))]
                engine.begin(head + tail, choose.choice([3, 4, 8, 30]))
            case "grow":
                rows = [row for row in live if len(engine.tokens[row]) < 50 and choose.random() < 0.6]
                engine.grow(
                    rows, [[choose.randrange(3) for _ in range(choose.choice([1, 1, 4]))] for _ in rows]
                )
            case "publish" if live:
                engine.publish(choose.choice(live))
            case "finish" if live:
                engine.finish(choose.choice(live))
            case "evict" if choose.random() < 0.5:
                evict(engine)
            case _:
                pass
        engine.verify()
    stats = settle(engine)
    assert engine.cache.stats()["loaded"] > 0
    assert stats["loaded"] > 0
    assert (stats["failed"], stats["damaged"]) == (0, 0)
    wholly_free(engine)


def fill(engine: Engine) -> None:
    """Keep the prompt, and evict it when the tier has it."""
    keep(engine, PROMPT)
    settle(engine)
    evict(engine)
    assert engine.cache.cached_size() == 0


@pytest.mark.parametrize("name", ALL)
def test_evicted_units_are_loaded(name: str) -> None:
    engine = Engine(ALL[name], 1 << 16, tier_bytes=1 << 16)
    fill(engine)
    lease = engine.cache.match([*PROMPT, 1, 2], max_tokens=25)
    assert (lease.length, lease.loadable) == (0, 24)
    assert lease.load() == 24
    assert (len_of(lease), lease.loadable, lease.load()) == (24, 0, 0)
    assert engine.cache.stats()["loaded"] == 24
    assert engine.cache.stats()["published"] == 24
    # It is found by others, and goes on; `begin` compares what memory holds.
    assert some(engine.begin([*PROMPT, 1, 2], 4))[1] == 24
    lease.release()
    engine.verify()


def test_the_rest_of_a_prefix_is_loaded() -> None:
    engine = Engine(LAYOUTS["full"], 1 << 16, tier_bytes=1 << 16)
    fill(engine)
    keep(engine, PROMPT[:8])
    lease = engine.cache.match(PROMPT)
    assert (lease.length, lease.loadable, lease.load(), len_of(lease)) == (8, 16, 16, 24)
    # What both have is copied once.
    assert settle(engine)["written"] == 6
    lease.release()
    wholly_free(engine)


def test_windows_come_back_as_far_as_the_next_token_sees() -> None:
    engine = Engine(LAYOUTS["windows"], 1 << 16, tier_bytes=1 << 16)
    fill(engine)
    # 6 pages of 24 tokens; a sink and the last two pages of the window; a chunk that has just begun.
    assert settle(engine)["written"] == 6 + 1 + 2
    lease = engine.cache.match(PROMPT)
    lease.load()
    window = lease.units("window")
    assert (len(window.sinks), window.first, len(window.units)) == (1, 4, 2)
    assert lease.units("chunk").units == []


def test_a_load_ends_where_the_arena_is_full() -> None:
    engine = Engine(LAYOUTS["full"], 1 << 12, tier_bytes=1 << 16)
    fill(engine)
    taken = some(engine.arena.alloc({"full": 1}))
    while (more := engine.arena.alloc({"full": 1})) is not None:
        taken["full"] += more["full"]
    engine.arena.free("full", taken["full"][:3])
    lease = engine.cache.match(PROMPT)
    assert (lease.load(), len_of(lease)) == (12, 12)
    engine.arena.free("full", taken["full"][3:])
    assert (lease.load(), len_of(lease)) == (12, 24)


def test_a_tier_gives_up_what_is_used_least() -> None:
    engine = Engine(LAYOUTS["hybrid"], 1 << 16, tier_bytes=6 * 4096)
    prompts = [[number, *range(1, 24)] for number in range(200)]
    for prompt in prompts:
        keep(engine, prompt)
        keep(engine, prompts[0])
        settle(engine)
    evict(engine)
    loadable = [engine.cache.match(prompt).loadable for prompt in prompts]
    assert (loadable[0], loadable[-1]) == (24, 24)
    assert 2 <= loadable.count(24) < 200
    assert loadable.count(0) == 200 - loadable.count(24)


def test_what_is_being_copied_is_waited_for() -> None:
    # The arena has room for one prompt: the next one needs the units that go down.
    engine = Engine(LAYOUTS["full"], 1 << 10, tier_bytes=1 << 16)
    for number in range(50):
        keep(engine, [number, *range(1, 24)])
    stats = settle(engine)
    assert stats["written"] == 50 * 6
    evict(engine)
    assert all(engine.cache.match([number, *range(1, 24)]).loadable == 24 for number in range(50))


def test_namespaces_are_apart_and_clear_empties_both() -> None:
    engine = Engine(LAYOUTS["full"], 1 << 16, tier_bytes=1 << 16)
    fill(engine)
    assert engine.cache.match(PROMPT, namespace="other").loadable == 0
    engine.cache.clear("other")
    assert engine.cache.match(PROMPT).loadable == 24
    engine.cache.clear()
    assert engine.cache.match(PROMPT).loadable == 0
    wholly_free(engine)


def test_a_clear_of_the_arena_leaves_the_tier() -> None:
    engine = Engine(LAYOUTS["hybrid"], 1 << 16, tier_bytes=1 << 16)
    fill(engine)
    old = engine.cache.match(PROMPT)
    engine.arena.clear()
    with pytest.raises(StaleError):
        old.load()
    with pytest.raises(StaleError):
        _ = old.loadable
    # `begin` compares what memory holds.
    assert some(engine.begin([*PROMPT, 0], 8))[1] == 24


def test_what_a_clear_may_have_overwritten_is_not_used() -> None:
    engine = Engine(LAYOUTS["full"], 1 << 16, tier_bytes=1 << 16)
    keep(engine, PROMPT)
    # Whether the copy was over is not known.
    engine.arena.clear()
    stats = settle(engine)
    assert stats["written"] + stats["failed"] == 6
    lease = engine.cache.match(PROMPT)
    assert lease.load() == (24 if stats["written"] else 0)


def test_a_request_of_a_planner_does_not_load() -> None:
    engine = Engine(LAYOUTS["full"], 1 << 16, tier_bytes=1 << 16)
    fill(engine)
    lease = engine.cache.match(PROMPT)
    rows = some(engine.planner.alloc())
    some(engine.planner.extend(rows, [0], [30], prefixes=[lease]))
    with pytest.raises(StateError, match="planner's request's; load it before"):
        lease.load()
    engine.planner.finish(rows)


def memory_of(tier: ArenaHostTier) -> NDArray[np.uint8]:
    ((address,), (size,), _) = tier.get_contiguous_buf_infos()
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))


@pytest.mark.parametrize("name", ALL)
def test_damage_is_found_named_and_repaired(name: str, caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(ALL[name], 1 << 16, tier_bytes=1 << 16)
    fill(engine)
    memory = memory_of(engine.tiers[0])
    memory[:] = np.roll(memory, 3)
    lease = engine.cache.match(PROMPT)
    assert (lease.loadable, lease.load(), len_of(lease)) == (24, 0, 0)
    lease.load()
    stats = settle(engine)
    assert stats["loaded"] == 0
    assert 0 < stats["damaged"] <= stats["written"]
    found = [
        re.fullmatch(r"(.+) of an ArenaHostTier was damaged in host memory: .+", text)
        for text in caplog.messages
    ]
    names = [match[1] for match in found if match]
    # Once each; no byte of the prompt's first page was right.
    assert len(names) == len(set(names)) == stats["damaged"]
    assert f"tokens 0 to 4 of group {engine.groups[0].name}" in names
    lease.release()
    # The request computes and publishes, and so repairs.
    fill(engine)
    assert settle(engine)["written"] == 2 * stats["written"]
    assert some(engine.begin([*PROMPT, 0], 8))[1] == 24
    assert settle(engine)["damaged"] == stats["damaged"]


def test_what_is_before_damage_is_loaded() -> None:
    engine = Engine(LAYOUTS["full"], 1 << 16, tier_bytes=1 << 16)
    fill(engine)
    memory = memory_of(engine.tiers[0])
    size = engine.tiers[0].piece_bytes("full")
    # Pieces of one save lie one behind the other.
    [first] = np.flatnonzero(memory)[:1] // size
    memory[(first + 3) * size : (first + 4) * size] = 1
    lease = engine.cache.match(PROMPT)
    assert (lease.load(), len_of(lease)) == (12, 12)
    assert settle(engine)["damaged"] == 1


def test_threads_share_a_tier() -> None:
    engine = Engine(LAYOUTS["full"], 1 << 13, tier_bytes=1 << 16)
    faults: list[BaseException] = []

    def work(number: int) -> None:
        choose = random.Random(number)  # noqa: S311 - of a test
        try:
            for _ in range(150):
                prompt = [choose.randrange(8), *range(1, 24)]
                with engine.cache.match(prompt) as lease:
                    lease.load()
                    begin = lease.length
                    units = engine.arena.alloc({"full": (24 - begin) // PAGE})
                    if units is not None:
                        lease.publish(prompt, units)
        except BaseException as fault:  # noqa: BLE001 - for the test's thread
            faults.append(fault)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    settle(engine)
    engine.cache.verify()
    wholly_free(engine)


def test_construction() -> None:
    layout = CacheLayout([FULL, WINDOW, CHUNK], page_size=PAGE)
    arena = CacheArena(layout, 1 << 16, devices.current())
    tier = ArenaHostTier(arena, 1 << 16)
    assert (tier.arena, tier.pin_memory) == (arena, True)
    assert tier.piece_bytes("full") == 2 * PAGE * 8
    assert tier.wait_page_locked(60)
    assert repr(tier).startswith("ArenaHostTier(bytes=")
    cache = ArenaPrefixCache(arena, tiers=[tier])
    assert (cache.tiers, cache.model) == ((tier,), None)
    with pytest.raises(ConfigError, match="belongs to another prefix cache"):
        ArenaPrefixCache(arena, tiers=[tier])
    other = CacheArena(layout, 1 << 16, devices.current())
    with pytest.raises(ConfigError, match="for another arena"):
        ArenaPrefixCache(other, tiers=[tier])
    with pytest.raises(ConfigError, match="3 tiers were given"):
        ArenaPrefixCache(arena, tiers=[tier, tier, tier])
    with pytest.raises(TypeError, match=r"tiers\[0\] must be an ArenaHostTier, not int"):
        ArenaPrefixCache(arena, tiers=[1])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="no store whose pages it would name"):
        ArenaPrefixCache(arena, model="m")
    with pytest.raises(ConfigError, match="the host tier of an arena"):
        ArenaHostTier(arena, 100)
    with pytest.raises(kvpool.ArgumentError, match="no group"):
        tier.piece_bytes("state")
    # A tier is free again when its cache is gone.
    gone = weakref.ref(cache)
    del cache
    gc.collect()
    assert gone() is None
    ArenaPrefixCache(arena, tiers=[tier])


def test_without_a_tier_there_is_nothing_to_load() -> None:
    engine = Engine(LAYOUTS["full"], 1 << 16)
    keep(engine, PROMPT)
    lease = engine.cache.match(PROMPT)
    assert (lease.loadable, lease.load(), engine.cache.tiers) == (0, 0, ())
    assert engine.cache.wait_written(0)
    fetch = engine.cache.fetch(PROMPT)
    assert (fetch.query(), fetch.wait(), fetch.length) == (True, True, 0)


def test_a_clear_waits_for_loads() -> None:
    """The units that a load fills are nobody else's before its copy is over."""
    layout = CacheLayout([Group("full", "full", range(4), [Plane("k", "uint8", (1 << 13,))])], page_size=16)
    arena = CacheArena(layout, 300 << 19, devices.current())
    cache = ArenaPrefixCache(arena, tiers=[ArenaHostTier(arena, 300 << 19)])
    tokens = [*range(16 * 256)]
    k = arena.buffer("full", "k", 0)
    with cache.match(tokens) as lease:
        units = some(arena.alloc({"full": 256}))
        k[units["full"]] = 1
        lease.publish(tokens, units)
    assert cache.wait_written(60)
    arena.clear()
    loaded: list[object] = []

    def load() -> None:
        try:
            with cache.match(tokens) as lease:
                loaded.append(lease.load())
        except StaleError:
            loaded.append(None)

    for turn in range(5):
        thread = threading.Thread(target=load)
        thread.start()
        time.sleep(0.002)
        arena.clear()
        mine = some(arena.alloc({"full": 256}))["full"]
        k[mine] = 7
        thread.join()
        assert (k[mine] == 7).all()
        assert loaded[turn] in {len(tokens), None, 0}
        arena.clear()


def test_a_save_is_no_use() -> None:
    """What was used twice outlives a scan of what was used once, with a tier as without."""
    kept = []
    for tier_bytes in (0, 1 << 16):
        engine = Engine(LAYOUTS["full"], 1 << 13, tier_bytes=tier_bytes, policy="slru")
        hot = [[number, *range(1, 16)] for number in range(4)]
        for prompt in (*hot, *hot):
            keep(engine, prompt)
        for number in range(100, 300):
            keep(engine, [number, *range(1, 16)])
        kept.append([engine.cache.cached_len(prompt) for prompt in hot])
    assert kept[0] == kept[1] == [16] * 4


def test_ends_of_chunks_do_not_keep_their_windows() -> None:
    unneeded = []
    for tier_bytes in (0, 1 << 16):
        engine = Engine(CacheLayout([FULL, WINDOW], page_size=PAGE), 1 << 16, tier_bytes=tier_bytes)
        row, _ = some(engine.begin([*PROMPT, 0], PAGE))
        for begin in range(PAGE, len(PROMPT), PAGE):
            engine.publish(row)
            assert engine.grow([row], [PROMPT[begin : begin + PAGE]])
        engine.publish(row)
        engine.finish(row)
        engine.cache.wait_written(60)
        unneeded.append(engine.cache.group_stats("window")["unneeded"])
        if tier_bytes:
            assert engine.tiers[0].stats()["written"] >= 9
    assert unneeded[0] == unneeded[1] > 0


def test_two_threads_load_one_lease() -> None:
    engine = Engine(LAYOUTS["windows"], 1 << 16, tier_bytes=1 << 16)
    fill(engine)
    for _ in range(20):
        engine.arena.clear()
        lease = engine.cache.match(PROMPT)
        with ThreadPoolExecutor(4) as pool:
            loaded = [*pool.map(ArenaLease.load, [lease] * 4)]
        assert sorted(loaded) == [0, 0, 0, 24]
        assert lease.length == 24


def test_a_window_with_a_hole_is_not_loaded_behind() -> None:
    engine = Engine(CacheLayout([FULL, WINDOW], page_size=PAGE), 1 << 16, tier_bytes=1 << 16)
    fill(engine)
    with engine.cache.match(PROMPT) as lease:
        assert (lease.length, lease.loadable) == (0, len(PROMPT))
        units = some(engine.arena.alloc({"full": 2, "window": 1}))
        lease.publish(PROMPT[:8], {**units, "window": [*units["window"], None]})
        assert (lease.length, lease.loadable, lease.load()) == (8, 0, 0)
    with engine.cache.match(PROMPT) as lease:
        # Where the window is whole.
        assert (lease.length, lease.load(), lease.length) == (4, 20, 24)


@needs_fork
@devices.cpu_only
@pytest.mark.usefixtures("device")
def test_a_fork_beside_loads_hangs_no_child() -> None:
    engine = Engine(LAYOUTS["full"], 1 << 16, tier_bytes=1 << 16)
    fill(engine)
    is_over = threading.Event()

    def load() -> None:
        while not is_over.is_set():
            engine.arena.clear()
            engine.cache.match(PROMPT).load()
            engine.cache.wait_written(0)

    thread = threading.Thread(target=load)
    thread.start()
    try:
        for _ in range(40):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of threads
                child = os.fork()
            if child == 0:
                signal.alarm(20)
                engine.cache.match(PROMPT).release()
                engine.cache.stats()
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        is_over.set()
        thread.join()


# Stores


def fetch(engine: Engine, tokens: list[int], **options: Any) -> int:  # noqa: ANN401
    fetching = engine.cache.fetch(tokens, **options)
    assert fetching.wait(60)
    assert fetching.query()
    return fetching.length


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("page_bytes", [8, 1 << 12])
def test_a_new_process_finds_what_an_earlier_one_had(tmp_path: Path, name: str, page_bytes: int) -> None:
    for turn in range(2):
        with FileStore(tmp_path, 1 << 24, page_bytes=page_bytes) as store:
            engine = Engine(ALL[name], 1 << 16, tier_bytes=1 << 16, store=store)
            assert fetch(engine, [*PROMPT, 1, 2]) == (24 if turn else 0)
            assert engine.cache.match(PROMPT).loadable == (24 if turn else 0)
            row, found = some(engine.begin([*PROMPT, 0], 24))
            assert found == (24 if turn else 0)
            engine.finish(row)
            stats = settle(engine)
            if turn:
                assert stats["fetched"] > 0
                # It is in the tier already.
                assert fetch(engine, PROMPT) == 0
            keep(engine, PROMPT)
            assert settle(engine)["unstored"] == 0
            del engine
            gc.collect()


def test_what_goes_to_a_store_is_what_a_place_needs() -> None:
    with Memory() as store:
        engine = Engine(LAYOUTS["windows"], 1 << 16, tier_bytes=1 << 16, store=store)
        keep(engine, PROMPT)
        settle(engine)
        assert len(store.pages) == 6 + 1 + 2
        # A longer prompt that begins alike needs other pages of the window.
        keep(engine, [*PROMPT, *range(8)])
        settle(engine)
        assert len(store.pages) == 9 + 2 + 2
        assert [count for call, count in store.calls if call == "write"] == [9, 4]
        engine.cache.clear()
        assert fetch(engine, [*PROMPT, 7]) == 24
        engine.cache.clear()
        assert fetch(engine, [*PROMPT, *range(9)]) == 32
        engine.cache.clear()
        assert fetch(engine, [*PROMPT, *range(9)], max_tokens=31) == 24
        assert fetch(engine, [*PROMPT, *range(9)], namespace="other") == 0


def test_a_fetch_ends_where_every_group_can_go_on() -> None:
    with Memory() as store:
        engine = Engine(HYBRID, 1 << 16, tier_bytes=1 << 16, store=store)
        for length in (8, 16, 24):
            keep(engine, PROMPT[:length])
        settle(engine)
        everything = dict(store.pages)
        for gone in everything:
            store.pages = {key: page for key, page in everything.items() if key != gone}
            engine.cache.clear()
            found = fetch(engine, PROMPT)
            assert found in (0, 8, 16, 24)
            assert engine.cache.match(PROMPT).loadable == found
        lost = []
        for end in (24, 16, 8):
            store.pages = dict(everything)
            while True:
                engine.cache.clear()
                found = fetch(engine, PROMPT)
                if found < end:
                    break
                store.pages.popitem()
            lost.append(found)
        assert lost == [16, 8, 0]


def test_a_store_that_is_damaged_or_refuses_is_no_fault() -> None:
    class Full(Memory):
        def write(
            self, keys: Sequence[bytes], addresses: Sequence[int], sizes: Sequence[int]
        ) -> Sequence[bool]:
            del addresses, sizes
            return [False] * len(keys)

    with Full() as store:
        engine = Engine(LAYOUTS["full"], 1 << 16, tier_bytes=1 << 16, store=store)
        keep(engine, PROMPT)
        assert settle(engine)["unstored"] == 6
    assert fetch(engine, PROMPT) == 0


def test_pieces_of_a_fetch_keep_their_places() -> None:
    with Memory() as store:
        engine = Engine(LAYOUTS["full"], 1 << 16, tier_bytes=3 * 4096, store=store)
        keep(engine, PROMPT)
        settle(engine)
        engine.cache.clear()
        fetching = engine.cache.fetch(PROMPT)
        assert fetching.wait(60)
        for number in range(100):
            keep(engine, [number, *range(1, 24)])
            settle(engine)
        assert engine.cache.match([*PROMPT]).length == 0
        assert engine.cache.match([*PROMPT]).loadable == 24
        del fetching
        for number in range(100):
            keep(engine, [number, *range(1, 24)])
            settle(engine)
        assert engine.cache.match([*PROMPT]).loadable == 0


class Slow(Memory):
    """A store whose calls wait."""

    def __init__(self) -> None:
        super().__init__()
        self.may_go = threading.Event()

    def write(self, keys: Sequence[bytes], addresses: Sequence[int], sizes: Sequence[int]) -> Sequence[bool]:
        self.may_go.wait(60)
        return super().write(keys, addresses, sizes)

    def read(self, keys: Sequence[bytes], addresses: Sequence[int], sizes: Sequence[int]) -> Sequence[bool]:
        self.may_go.wait(60)
        return super().read(keys, addresses, sizes)


def test_a_store_that_stands_still_keeps_half_of_a_tier_at_most() -> None:
    with Slow() as store:
        engine = Engine(LAYOUTS["full"], 1 << 14, tier_bytes=9 * 4096, store=store)
        for number in range(400):
            keep(engine, [number, *range(1, 24)])
        evict(engine)
        # The last ones came, and pushed others out.
        assert engine.cache.match([399, *range(1, 24)]).loadable == 24
        assert not engine.cache.wait_written(0)
        store.may_go.set()
        stats = settle(engine)
        assert stats["unstored"] + len(store.pages) == 5 * 400 + 400
        assert stats["failed"] == 0


def test_a_fetch_is_given_up() -> None:
    with Slow() as store:
        engine = Engine(LAYOUTS["full"], 1 << 14, tier_bytes=1 << 16, store=store)
        store.may_go.set()
        keep(engine, PROMPT)
        settle(engine)
        engine.cache.clear()
        store.may_go.clear()
        fetching = engine.cache.fetch(PROMPT)
        assert not fetching.wait(0.05)
        fetching.cancel()
        assert fetching.wait(60)
        assert fetching.length == 0
        # One that nobody holds does not keep the next one.
        engine.cache.fetch(PROMPT)
        store.may_go.set()
        assert fetch(engine, PROMPT) == 24
    wholly_free(engine)


def test_what_a_store_lost_or_a_tier_lacks_ends_a_fetch_earlier() -> None:
    class Forgetful(Memory):
        """Finds what it cannot read."""

        lost: bytes | None = None

        def find(self, keys: Sequence[bytes]) -> Sequence[bool]:
            return [found or key == self.lost for key, found in zip(keys, super().find(keys), strict=True)]

    with Forgetful() as store:
        engine = Engine(LAYOUTS["full"], 1 << 14, tier_bytes=1 << 16, store=store)
        keep(engine, PROMPT)
        settle(engine)
        engine.cache.clear()
        store.lost = [*store.pages][4]
        page = store.pages.pop(store.lost)
        assert fetch(engine, PROMPT) == 16
        store.pages[store.lost] = page
        assert fetch(engine, PROMPT) == 8
    small = Engine(LAYOUTS["full"], 1 << 14)
    with Memory() as other:
        engine = Engine(LAYOUTS["full"], 1 << 16, tier_bytes=1 << 17, store=other)
        long = [*range(4 * 256)]
        for end in range(64, len(long) + 1, 64):
            compute = engine.cache.match(long[:end])
            units = some(engine.arena.alloc({"full": (end - compute.length) // PAGE}))
            compute.publish(long[:end], units)
        settle(engine)
        tier = ArenaHostTier(small.arena, 3 * 4096)
        cache = ArenaPrefixCache(small.arena, tiers=[tier, other], model="a model")
        fetching = cache.fetch(long)
        assert fetching.wait(60)
        assert 0 < fetching.length < len(long)
        assert tier.stats()["skipped"] > 0


def test_a_store_needs_the_name_of_a_model() -> None:
    engine = Engine(LAYOUTS["full"], 1 << 16)
    tier = ArenaHostTier(engine.arena, 1 << 16)
    with Memory() as store:
        with pytest.raises(ConfigError, match="a store needs the name of the model"):
            ArenaPrefixCache(engine.arena, tiers=[tier, store])
        with pytest.raises(TypeError, match=r"tiers\[1\] must be a FileStore or another Store, not int"):
            ArenaPrefixCache(engine.arena, tiers=[tier, 1], model="m")  # type: ignore[list-item]
        cache = ArenaPrefixCache(engine.arena, tiers=[tier, store], model="m")
        assert (cache.tiers, cache.model) == ((tier, store), "m")
    with pytest.raises(StateError):
        ArenaPrefixCache(engine.arena, tiers=[ArenaHostTier(engine.arena, 1 << 16), store], model="m")
