"""PrefixCache: leases, publication, eviction, namespaces, states, misuse, and users at once.

`tests/rust/histories/prefixes.rs` compares random histories with a naive model.
"""

from __future__ import annotations

import gc
import itertools
import logging
import os
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import devices
import numpy as np
import pytest
import torch
from common import needs_fork, some, together

import kvpool
from kvpool import (
    ConfigError,
    GDNPool,
    IndexOwnershipError,
    PrefixCache,
    StaleBufferError,
    StaleError,
    StateError,
)

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.usefixtures("device")


class Scene:
    """A cache on an allocator of 64 slots, with a working pool of states if asked for."""

    def __init__(
        self,
        page_size: int = 1,
        *,
        size: int = 64,
        tracks: int | None = None,
        **options: Any,  # noqa: ANN401
    ) -> None:
        strict, debug = options.pop("strict", False), options.pop("debug", None)
        self.allocator = kvpool.TokenToKVPoolAllocator(
            size, devices.current(), page_size, strict=strict, debug=debug
        )
        self.states = (
            None
            if tracks is None
            else GDNPool(4, 1, 1, 2, 2, 4, 3, devices.current(), max_track_slots=tracks)
        )
        self.cache = PrefixCache(self.allocator, states=self.states, **options)

    def alloc(self, count: int) -> list[int]:
        slots: list[int] = some(self.allocator.alloc(count)).tolist()
        return slots

    def insert(self, tokens: Sequence[int], namespace: Any = None) -> list[int]:  # noqa: ANN401
        """Caches a prompt; its slots."""
        slots = self.alloc(len(tokens))
        self.cache.insert(tokens, slots, namespace=namespace)
        return slots

    def length(self, tokens: Sequence[int], namespace: Any = None) -> int:  # noqa: ANN401
        """Cached tokens of a prompt, which stays as unused as it was."""
        return self.cache.cached_len(tokens, namespace=namespace)

    def sizes(self) -> tuple[int, int, int, int]:
        """Evictable, locked, in use by requests, and available."""
        cache, slots = self.cache, self.allocator.stats()
        evictable, locked = cache.evictable_size(), cache.locked_size()
        assert cache.cached_size() == evictable + locked
        assert cache.obtainable_size() == slots["available"] + evictable
        assert slots["available"] + slots["in_use"] == slots["capacity"]
        self.cache.verify()
        self.allocator.verify()
        return evictable, locked, slots["in_use"] - evictable - locked, slots["available"]


# Matching


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_prefix_is_found_in_whole_pages(page_size: int) -> None:
    scene = Scene(page_size, size=128)
    prompt = list(range(100, 150))
    slots = scene.insert(prompt)
    whole = 50 // page_size * page_size
    lease = scene.cache.match(prompt)
    assert (lease.length, len(lease), lease.namespace, lease.state_slot) == (whole, whole, None, None)
    assert lease.slots.tolist() == slots[:whole]
    assert lease.slots.dtype is torch.int32
    assert lease.slots.device.type == devices.current()
    for length in (0, 1, 4, 17, 49, 1 << 40):
        limited = scene.cache.match(prompt, limit=length)
        assert limited.length == min(length, whole) // page_size * page_size
        longer = scene.cache.match([*prompt[: min(length, 50)], 7, 7])
        assert longer.length == min(length, whole) // page_size * page_size
    assert scene.cache.match([1, 2, 3]).length == 0
    assert scene.cache.match([]).length == 0


def test_stats_count_tokens_of_lookups_and_of_the_tree() -> None:
    scene = Scene(4, name="mine")
    cache = scene.cache
    assert (cache.name, cache.policy) == ("mine", "adaptive")
    assert cache.allocator is scene.allocator
    assert cache.states is None
    scene.insert(range(10))
    with cache.match(range(12)) as lease:
        assert scene.sizes() == (0, 8, 4, 52)
        assert repr(lease) == "Lease(length=8, namespace=None)"
        assert "cached=8, locked=8" in repr(cache)
    assert scene.sizes() == (8, 0, 4, 52)
    stats = cast("dict[str, int]", cache.stats())
    assert stats.pop("bytes") > 0
    assert stats == {
        "capacity": 64,
        "lookups": 2,
        "hit_tokens": 8,
        "missed_tokens": 10 + 4,
        "published": 8,
        "duplicates": 0,
        "evicted": 0,
        "loaded": 0,
        "cached": 8,
        "evictable": 8,
        "locked": 0,
        "nodes": 1,
        "snapshots": 0,
        "waiting": 0,
    }


@pytest.mark.parametrize("options", [{"policy": "no"}, {"max_pinned": 1.5}, {"max_pinned": float("nan")}])
def test_construction_that_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Scene(**options)


def test_pools_on_other_devices_are_refused() -> None:
    if devices.current() == "cpu":
        pytest.skip("needs two devices")
    states = GDNPool(4, 1, 1, 2, 2, 4, 3, "cpu", max_track_slots=1)
    with pytest.raises(ConfigError, match="cpu"):
        PrefixCache(kvpool.TokenToKVPoolAllocator(8, "cuda"), states=states)


# Leases


@pytest.mark.parametrize("end", ["release", "with", "drop", "twice", "error"])
def test_a_lease_locks_until_it_ends(end: str) -> None:
    scene = Scene()
    scene.insert(range(8))
    lease = scene.cache.match(range(8))
    assert scene.cache.evict(8) == 0
    assert not lease.released
    if end == "with":
        with lease as entered:
            assert entered is lease
    elif end == "error":
        with pytest.raises(KeyError), lease:
            raise KeyError
    elif end == "drop":
        del lease
        gc.collect()
    else:
        for _ in range(1 + (end == "twice")):
            lease.release()
    assert scene.sizes()[:2] == (8, 0)
    assert scene.cache.evict(8) == 8


def uses(scene: Scene, lease: kvpool.Lease) -> list[Callable[[], object]]:
    return [
        lambda: lease.length,
        lambda: len(lease),
        lambda: lease.slots,
        lambda: lease.state_slot,
        lambda: lease.publish([1], [1]),
        lambda: lease.finish([1], [1]),
        lambda: lease.restore(1),
        lambda: scene.cache.pin(lease),
        lambda: scene.cache.pin(lease, seconds=1),
    ]


@pytest.mark.parametrize("end", ["release", "finish", "clear"])
def test_a_lease_that_has_ended_is_stale(end: str) -> None:
    scene = Scene(tracks=2)
    lease = scene.cache.match([1, 2, 3])
    {"release": lease.release, "finish": lambda: lease.finish([], []), "clear": scene.allocator.clear}[end]()
    slots = scene.alloc(1)
    for use in uses(scene, lease):
        with pytest.raises(StaleBufferError, match="released" if end != "clear" else "cleared"):
            use()
    assert lease.released
    assert repr(lease) == "Lease(released)"
    lease.release()
    assert scene.sizes() == (0, 0, 1, 63)
    scene.allocator.free(slots)


def test_a_lease_outlives_its_cache_and_the_allocator() -> None:
    scene = Scene()
    slots = scene.insert(range(8))
    lease = scene.cache.match(range(6))
    del scene
    gc.collect()
    assert lease.slots.tolist() == slots[:6]
    lease.release()


@pytest.mark.parametrize("last", ["allocator", "states", "lease", "pinned", "planner"])
def test_pools_and_leases_go_in_any_order(last: str) -> None:
    others = [name for name in ("allocator", "cache", "states", "lease", "pinned", "planner") if name != last]
    for order in itertools.permutations(others):
        scene = Scene(4, tracks=2)
        table = kvpool.ReqToTokenPool(2, 16, devices.current())
        alive: dict[str, Any] = {
            "allocator": scene.allocator,
            "cache": scene.cache,
            "states": scene.states,
            "planner": kvpool.BatchPlanner(table, scene.allocator, 2, 32),
            "pinned": scene.cache.match(range(8)),
        }
        alive["pinned"].publish(range(8), scene.alloc(8), state=1)
        scene.cache.pin(alive["pinned"], seconds=100)
        alive["lease"] = scene.cache.match(range(9), limit=8)
        row = some(table.alloc())
        some(alive["planner"].extend(row, [8], [12], prefixes=[alive["lease"]]))
        alive["lease"].publish([9, 9, 9, 9], row=row[0])
        del scene, table
        for name in order:
            del alive[name]
        if last == "allocator":
            # The slots of the planner's request went to the cache, and back with it.
            assert alive["allocator"].available_size() == 64
            alive["allocator"].verify()
        elif last == "states":
            assert alive["states"].stats()["in_use"] == 0
        elif last in {"lease", "pinned"}:
            # It may know of no pool any more; it does not fail for that.
            alive[last].release()
            assert alive[last].released


def test_a_cache_that_is_gone_gives_its_slots_back() -> None:
    scene = Scene()
    scene.insert(range(8))
    del scene.cache
    gc.collect()
    assert scene.allocator.available_size() == 64
    scene.allocator.verify()


def test_clearing_the_allocator_empties_the_cache() -> None:
    scene = Scene(tracks=2)
    slots = scene.alloc(4)
    scene.cache.match([]).publish(range(4), slots, state=1)
    leases = [scene.cache.match(range(4)) for _ in range(2)]
    scene.cache.pin(leases[0], seconds=100)
    scene.allocator.clear()
    assert scene.length(range(4)) == 0
    assert scene.sizes() == (0, 0, 0, 64)
    assert some(scene.states).stats()["in_use"] == 0
    scene.insert(range(4))
    assert scene.cache.cached_size() == 4
    del leases
    assert scene.cache.cached_size() == 4


# Publishing


def test_a_lease_grows_chunk_by_chunk() -> None:
    scene = Scene(4)
    prompt = list(range(24))
    lease = scene.cache.match(prompt)
    slots = scene.alloc(24)
    for begin in range(0, 24, 8):
        published = lease.publish(prompt[begin : begin + 8], slots[begin : begin + 8])
        assert (published.length, published.duplicates) == (begin + 8, 0)
        assert published.slots.tolist() == slots[begin : begin + 8]
        assert published.slots is published.slots
        assert repr(published) == f"Published(length={begin + 8}, duplicates=0)"
    assert lease.slots.tolist() == slots
    assert scene.sizes() == (0, 24, 0, 40)
    assert scene.length([*prompt, 9]) == 24


def test_a_partial_page_stays_the_callers() -> None:
    scene = Scene(4)
    slots = scene.alloc(7)
    lease = scene.cache.match(range(7))
    assert lease.publish(range(7), slots).length == 4
    assert scene.sizes() == (0, 4, 4, 56)
    # It goes on where the lease ends.
    assert lease.publish([4, 5, 6, 7], [*slots[4:], slots[6] + 1]).length == 8
    assert scene.sizes() == (0, 8, 0, 56)


@pytest.mark.parametrize("page_size", [1, 4])
def test_duplicate_pages_are_freed(page_size: int) -> None:
    scene = Scene(page_size)
    first, second = scene.cache.match(range(16)), scene.cache.match(range(16))
    mine, theirs = scene.alloc(16), scene.alloc(16)
    first.publish(range(12), mine[:12])
    published = second.publish(range(16), theirs)
    assert (published.length, published.duplicates) == (16, 12)
    assert published.slots.tolist() == mine[:12] + theirs[12:]
    assert second.slots.tolist() == mine[:12] + theirs[12:]
    assert scene.sizes() == (0, 16, 4, 44)
    scene.allocator.free(mine[12:])
    assert scene.cache.stats()["duplicates"] == 12


def test_prompts_that_part_share_what_they_have_in_common() -> None:
    scene = Scene(4)
    common = scene.insert(range(10))
    published = scene.cache.insert([*range(8), 50, 51, 52, 53], scene.alloc(12))
    assert published.duplicates == 8
    assert published.slots.tolist()[:8] == common[:8]
    assert scene.cache.stats()["nodes"] == 2
    assert scene.length([*range(8), 50, 51, 52, 53]) == 12
    assert scene.sizes() == (12, 0, 4, 48)


MISUSES: dict[str, tuple[type[Exception], Callable[[list[int], list[int]], tuple[Any, Any]]]] = {
    "free": (IndexOwnershipError, lambda own, _: (range(4), [own[-1] + 1 + at for at in range(4)])),
    "twice": (IndexOwnershipError, lambda own, _: (range(8), own[:4] * 2)),
    "padding": (IndexOwnershipError, lambda *_: (range(4), range(4))),
    "out of range": (IndexOwnershipError, lambda *_: (range(4), range(4000, 4004))),
    "beyond int32": (IndexOwnershipError, lambda *_: (range(4), range(2**40, 2**40 + 4))),
    "negative": (IndexOwnershipError, lambda *_: (range(4), range(-4, 0))),
    "aside": (IndexOwnershipError, lambda own, _: (range(4), own[1:5])),
    "in another order": (IndexOwnershipError, lambda own, _: (range(4), own[3::-1])),
    "cached": (IndexOwnershipError, lambda _, cached: (range(4), cached)),
    "more tokens": (ConfigError, lambda own, _: (range(5), own[:4])),
    "more slots": (ConfigError, lambda own, _: (range(3), own[:4])),
    "a negative token": (ConfigError, lambda own, _: ([1, 2, -3, 4], own[:4])),
    "a large token": (ConfigError, lambda own, _: ([1, 2, 3, 2**31], own[:4])),
    "a huge token": (ConfigError, lambda own, _: ([1, 2, 3, 10**30], own[:4])),
    "floats": (TypeError, lambda own, _: ([1.0, 2.0, 3.0, 4.0], own[:4])),
    "float slots": (TypeError, lambda own, _: (range(4), [float(slot) for slot in own[:4]])),
}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("misuse", MISUSES)
def test_a_wrong_publication_changes_nothing(misuse: str, *, strict: bool) -> None:
    kind, make = MISUSES[misuse]
    scene = Scene(4, strict=strict)
    cached = scene.insert(range(100, 104))
    own = scene.alloc(8)
    lease = scene.cache.match(range(50, 54))
    before = scene.sizes(), dict(scene.cache.stats()), scene.allocator.stats()
    tokens, slots = make(own, cached)
    for call in (lease.publish, lease.finish):
        with pytest.raises(kind):
            call(tokens, slots)
        assert lease.length == 0
    assert (scene.sizes(), dict(scene.cache.stats()), scene.allocator.stats()) == before
    with pytest.raises(kind):
        scene.cache.insert(tokens, slots)
    assert scene.sizes() == before[0]
    lease.publish(range(50, 58), own)


def test_the_result_of_a_publication_keeps_no_lease() -> None:
    scene = Scene()
    lease = scene.cache.match([1, 2, 3])
    slots = scene.alloc(3)
    published = lease.publish([1, 2, 3], slots)
    inserted = scene.cache.insert([1, 2, 4], scene.alloc(3))
    assert scene.cache.locked_size() == 3
    del lease
    assert scene.sizes() == (4, 0, 0, 60)
    assert len(scene.alloc(64)) == 64
    assert (published.length, published.slots.tolist(), inserted.duplicates) == (3, slots, 2)


def test_finish_is_the_end_of_a_request() -> None:
    scene = Scene(4)
    prompt = list(range(10))
    slots = scene.alloc(10)
    lease = scene.cache.match(prompt)
    assert lease.finish(prompt, slots) is None  # type: ignore[func-returns-value]
    assert lease.released
    assert scene.sizes() == (8, 0, 0, 56)
    # A second one finds it, and publishes the same once more.
    lease = scene.cache.match(prompt, limit=4)
    lease.finish(prompt[4:], scene.alloc(6))
    assert scene.sizes() == (8, 0, 0, 56)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("last", ["free", "cached", "of another page", "not its first", "out of range"])
def test_finish_with_a_wrong_rest_changes_nothing(last: str, *, strict: bool) -> None:
    scene = Scene(4, strict=strict)
    cached = scene.insert(range(100, 104))
    own, freed = scene.alloc(8), scene.alloc(4)
    scene.allocator.free(freed)
    lease = scene.cache.match(range(50, 56))
    wrong = {
        "free": freed[:2],
        "cached": cached[:2],
        "of another page": [own[4], freed[1]],
        "not its first": own[5:7],
        "out of range": [2**40, 2**40 + 1],
    }[last]
    before = scene.sizes(), dict(scene.cache.stats()), scene.allocator.stats()
    slots, page = "|".join(map(str, wrong)), wrong[0] // 4
    with pytest.raises(IndexOwnershipError, match=rf"slot ({slots}|{page * 4})\b|page {page}\b"):
        lease.finish(range(50, 56), [*own[:4], *wrong])
    assert (scene.sizes(), dict(scene.cache.stats()), scene.allocator.stats()) == before
    assert lease.length == 0
    lease.finish(range(50, 56), own[:6])
    assert scene.sizes()[0] == 8


# Eviction


def test_the_least_recently_used_goes_first() -> None:
    scene = Scene(policy="lru")
    for start in (100, 200, 300):
        scene.insert(range(start, start + 8))
    scene.cache.match(range(100, 108)).release()
    assert scene.cache.evict(0) == 0
    assert scene.cache.evict(10) == 10
    assert [scene.length(range(start, start + 8)) for start in (100, 200, 300)] == [8, 0, 6]
    assert scene.cache.evict(1000) == 14
    assert scene.sizes() == (0, 0, 0, 64)
    assert scene.cache.stats()["evicted"] == 24
    ages = scene.cache.eviction_ages()
    assert sum(ages) == 24
    # Eight tokens were looked up three times after the second prompt was.
    assert ages[5] >= 8
    scene.allocator.clear()
    scene.insert(range(8))
    assert scene.cache.eviction_ages() == ages


def test_a_prefix_stays_as_long_as_what_continues_it() -> None:
    scene = Scene(4)
    scene.insert(range(8))
    scene.insert([*range(8), *range(50, 58)])
    with scene.cache.match([*range(8), *range(50, 54)]):
        assert scene.cache.evict(100) == 4
        assert scene.length([*range(8), *range(50, 58)]) == 12


@pytest.mark.parametrize("page_size", [1, 4])
def test_an_allocation_that_is_short_evicts(page_size: int) -> None:
    scene = Scene(page_size)
    scene.insert(range(60))
    with scene.cache.match(range(20)):
        assert scene.allocator.alloc(48) is None
        slots = some(scene.allocator.alloc(44))
        assert scene.allocator.alloc(1) is None
        assert scene.length(range(60)) == 20
    scene.allocator.free(slots)
    assert scene.allocator.alloc(64) is not None
    assert scene.cache.cached_size() == 0


@pytest.mark.parametrize("page_size", [1, 4])
def test_an_allocation_that_cannot_succeed_evicts_nothing(page_size: int) -> None:
    scene = Scene(page_size)
    scene.insert(range(60))
    with scene.cache.match(range(20)) as lease:
        # 4 slots are free and 40 evictable.
        before = scene.sizes()
        assert (before, scene.cache.obtainable_size()) == ((40, 20, 0, 4), 44)
        for contiguous in (False, True):
            assert scene.allocator.alloc(45, contiguous=contiguous) is None
        assert scene.allocator.alloc_extend([0], [48], [-1]) is None
        assert scene.sizes() == before
        # A pin takes from what is available, its end gives it back.
        scene.cache.pin(lease, seconds=1e-6)
        assert scene.allocator.alloc(45) is None
        assert (scene.sizes(), scene.length(range(60))) == (before, 60)
        assert scene.allocator.alloc(44) is not None
    assert scene.cache.stats()["evicted"] == 40


def test_a_step_that_cannot_be_planned_evicts_nothing() -> None:
    scene = Scene()
    scene.insert(range(60))
    table = kvpool.ReqToTokenPool(4, 64, devices.current())
    planner = kvpool.BatchPlanner(table, scene.allocator, 4, 128)
    rows = some(table.alloc(2))
    before = scene.sizes()
    assert planner.extend(rows, [0, 0], [32, 33]) is None
    assert scene.sizes() == before
    assert planner.extend(rows, [0, 0], [32, 30]) is not None
    assert scene.cache.cached_size() == 2
    assert planner.decode(rows, [33, 31]) is not None
    assert scene.cache.cached_size() == 0
    assert planner.decode(rows, [34, 32]) is None
    planner.finish(rows)


def test_two_caches_are_asked_together() -> None:
    scene = Scene()
    scene.insert(range(40))
    other = PrefixCache(scene.allocator)
    other.insert(range(20), scene.alloc(20))
    with other.match(range(20)):
        assert scene.allocator.alloc(45) is None
        assert (scene.cache.cached_size(), other.cached_size()) == (40, 20)
    assert scene.allocator.alloc(64) is not None
    assert (scene.cache.cached_size(), other.cached_size()) == (0, 0)


def test_a_planner_that_is_short_evicts() -> None:
    scene = Scene()
    scene.insert(range(60))
    table = kvpool.ReqToTokenPool(4, 64, devices.current())
    planner = kvpool.BatchPlanner(table, scene.allocator, 4, 64)
    rows = some(table.alloc(1))
    assert planner.extend(rows, [0], [50]) is not None
    assert scene.cache.cached_size() == 14
    planner.finish(rows)
    assert scene.sizes() == (14, 0, 0, 50)


def test_clear_gives_up_what_no_lease_holds() -> None:
    scene = Scene()
    for name in (None, "a", "b"):
        scene.insert(range(8), name)
    lease = scene.cache.match(range(4), namespace="a")
    scene.cache.clear("a")
    assert [scene.length(range(8), name) for name in (None, "a", "b")] == [8, 0, 8]
    assert scene.sizes() == (16, 4, 0, 44)
    assert lease.length == 4
    # Pages published through it are not found either.
    lease.publish([5], scene.alloc(1))
    assert scene.length([*range(4), 5], "a") == 0
    scene.insert(range(8), "a")
    lease.release()
    assert scene.sizes() == (24, 0, 0, 40)
    scene.cache.clear()
    assert scene.sizes() == (0, 0, 0, 64)
    scene.cache.clear("unknown")


# Pins


def test_a_pin_ends_with_its_time() -> None:
    scene = Scene()
    scene.insert(range(8))
    with scene.cache.match(range(4)) as lease:
        scene.cache.pin(lease, seconds=1000)
    assert scene.sizes()[:2] == (4, 4)
    assert scene.cache.evict(8) == 4
    with scene.cache.match(range(4)) as lease:
        scene.cache.pin(lease, seconds=0)
    scene.allocator.clear()
    scene.insert(range(8))
    with scene.cache.match(range(8)) as lease:
        scene.cache.pin(lease, seconds=0)
    assert scene.sizes()[:2] == (8, 0)


def test_eviction_takes_pins_of_low_priority_first() -> None:
    scene = Scene(policy="lru")
    for start, priority in ((100, 2), (200, 0), (300, None)):
        scene.insert(range(start, start + 8))
        with scene.cache.match(range(start, start + 8)) as lease:
            if priority is not None:
                scene.cache.pin(lease, priority=priority)
    gone = []
    while scene.cache.evict(8):
        gone.append([scene.length(range(start, start + 8)) for start in (100, 200, 300)].count(0))
        last = [start for start in (100, 200, 300) if scene.length(range(start, start + 8))]
    assert gone == [1, 2, 3]
    assert last == []


def test_a_pin_beyond_the_share_is_refused() -> None:
    scene = Scene(max_pinned=0.25)
    scene.insert(range(40))
    with scene.cache.match(range(16)) as lease, scene.cache.match(range(17)) as longer:
        scene.cache.pin(lease, priority=1)
        scene.cache.pin(lease, seconds=10)
        with pytest.raises(StateError, match="17 tokens would be pinned; max_pinned allows 16 of 64"):
            scene.cache.pin(longer)


@pytest.mark.parametrize(
    "wrong",
    [
        {"seconds": -1},
        {"seconds": float("nan")},
        {"seconds": float("inf")},
        {"priority": -1},
        {"priority": 2**40},
        {"priority": 10**30},
    ],
)
def test_pins_that_are_refused(wrong: dict[str, Any]) -> None:
    scene, other = Scene(), Scene()
    lease = scene.cache.match([])
    with pytest.raises(ConfigError):
        scene.cache.pin(lease, **wrong)
    with pytest.raises(ConfigError, match="another"):
        other.cache.pin(lease)


# Namespaces

NAMES = [None, "", "a", "b", b"", b"a", 0, 1, -1, "1", b"1", 2**63, str(2**63), -(10**30), "None"]


def test_namespaces_share_nothing() -> None:
    scene = Scene()
    slots = [scene.insert([1, 2], name) for name in NAMES]
    for name, own in zip(NAMES, slots, strict=True):
        lease = scene.cache.match([1, 2, 3], namespace=name)
        assert lease.slots.tolist() == own
        assert lease.namespace == name
        assert type(lease.namespace) is type(name)
    scene.cache.clear("a")
    assert [scene.length([1, 2], name) for name in NAMES] == [0 if name == "a" else 2 for name in NAMES]


@pytest.mark.parametrize("name", [1.0, [1], ("a",), object()])
def test_other_namespaces_are_refused(name: object) -> None:
    cache: Any = Scene().cache
    for call in (cache.match, cache.cached_len, lambda *_, **named: cache.clear(named["namespace"])):
        with pytest.raises(TypeError, match="namespace"):
            call([1], namespace=name)


def test_ten_thousand_namespaces() -> None:
    scene = Scene(size=20_000)
    for name in range(10_000):
        scene.cache.insert([1, 2], scene.alloc(2), namespace=name)
    assert scene.sizes() == (20_000, 0, 0, 0)
    assert scene.cache.match([1, 2], namespace=7777).slots.tolist() == [15555, 15556]
    scene.cache.clear(5000)
    assert scene.cache.evict(9_998) == 9_998
    scene.cache.clear()
    assert scene.sizes() == (0, 0, 0, 20_000)


# States


def test_a_prefix_ends_at_a_snapshot() -> None:
    scene = Scene(4, tracks=3)
    states = some(scene.states)
    prompt = list(range(16))
    lease = scene.cache.match(prompt)
    slots = scene.alloc(16)
    states.recurrent_state[:, 1].fill_(1.0)
    lease.publish(prompt[:8], slots[:8], state=1)
    states.recurrent_state[:, 1].fill_(2.0)
    lease.publish(prompt[8:], slots[8:])
    assert lease.state_slot is None
    assert scene.length(prompt) == 8
    found = scene.cache.match(prompt)
    assert (found.length, found.kv_length) == (8, 16)
    track = some(found.state_slot)
    assert float(states.recurrent_state[0, track].sum()) == states.recurrent_state[0, 0].numel()
    states.recurrent_state[:, 2:4].fill_(5.0)
    assert found.restore(2) is None  # type: ignore[func-returns-value]
    assert bool(states.recurrent_state[:, 2].eq(1.0).all())
    # There is nothing to go on from: the state is that of no tokens.
    scene.cache.match([70]).restore(3)
    assert not states.recurrent_state[:, 3].any()
    # A second snapshot at the same place is not kept twice.
    found.publish([], [], state=2)
    assert scene.cache.stats()["snapshots"] == states.stats()["in_use"] == 1


def test_the_least_recently_used_snapshot_is_given_up() -> None:
    scene = Scene(tracks=2)
    prompts = [range(start, start + 4) for start in (100, 200, 300)]
    for prompt in prompts:
        scene.cache.match(prompt).publish(prompt, scene.alloc(4), state=1)
        if prompt is not prompts[0]:
            scene.cache.match(prompts[0]).release()
    assert [scene.length(prompt) for prompt in prompts] == [4, 0, 4]
    # Snapshots in use stay, and the new one is left out.
    leases = [scene.cache.match(prompt) for prompt in prompts]
    scene.cache.match([5]).publish([5], scene.alloc(1), state=1)
    assert scene.length([5]) == 0
    del leases
    scene.cache.evict(64)
    assert some(scene.states).stats()["in_use"] == 0
    assert scene.sizes() == (0, 0, 0, 64)


@pytest.mark.parametrize(
    ("tracks", "found"),
    [
        (3, [[0, 0, 0, 32], [0, 0, 0, 32], [0, 0, 0, 32]]),
        (8, [[0, 16, 16, 32], [0, 16, 16, 32], [8, 16, 24, 32]]),
        (12, [[8, 16, 24, 32], [8, 16, 24, 32], [8, 16, 24, 32]]),
    ],
)
def test_snapshots_of_prompts_in_chunks_are_thinned_out_evenly(tracks: int, found: list[list[int]]) -> None:
    """Each prompt has eight chunks. What they save decides, not which prompt was the last."""
    scene = Scene(4, size=128, tracks=tracks)
    prompts = [list(range(at, at + 32)) for at in (100, 200, 300)]
    for prompt in prompts:
        with scene.cache.match(prompt, limit=31) as lease:
            for at in range(0, 32, 4):
                lease.publish(prompt[at : at + 4], scene.alloc(4), state=1)
    assert [[scene.length(prompt[:end]) for end in (8, 16, 24, 32)] for prompt in prompts] == found
    scene.cache.verify()


def test_a_snapshot_that_requests_resume_from_outlasts_others() -> None:
    """A prompt that many conversations begin with stays, though each of them is longer."""
    scene = Scene(4, size=256, tracks=3)
    for number in range(8):
        prompt = [*range(16), *range(100 * number + 100, 100 * number + 116)]
        with scene.cache.match(prompt, limit=31) as lease:
            assert lease.length == (16 if number else 0)
            for at in range(lease.length, 32, 8):
                lease.publish(prompt[at : at + 8], scene.alloc(8), state=1)
    scene.cache.verify()


def test_states_that_are_refused() -> None:
    scene, plain = Scene(tracks=2), Scene()
    lease = scene.cache.match([])
    for row in (-1, 7, 2**40, 10**30):
        with pytest.raises(IndexError):
            lease.publish([1], scene.alloc(1), state=row)
        with pytest.raises(IndexError):
            lease.restore(row)
    lease = plain.cache.match([])
    for call in (lambda: lease.publish([1], [1], state=1), lambda: lease.restore(1)):
        with pytest.raises(StateError, match="without states"):
            call()
    assert plain.cache.cached_size() == scene.cache.cached_size() == 0


@pytest.mark.parametrize("strict", [False, True])
def test_the_track_slot_of_a_snapshot_is_the_caches(
    caplog: pytest.LogCaptureFixture, *, strict: bool
) -> None:
    where = devices.current()
    allocator = kvpool.TokenToKVPoolAllocator(64, where)
    states = GDNPool(4, 1, 1, 2, 2, 4, 3, where, max_track_slots=2, strict=strict, debug=True)
    cache = PrefixCache(allocator, states=states, name="the cache")
    lease = cache.match([1])
    states.recurrent_state[:, 1].fill_(5.0)
    lease.publish([1], some(allocator.alloc(1)), state=1)
    track, own = some(lease.state_slot), some(states.alloc_track_slot(owner="request 7"))
    said = "owned by the prefix cache"
    if strict:
        with pytest.raises(IndexOwnershipError, match=said):
            states.free_track_slot(track)
    else:
        with caplog.at_level(logging.WARNING, logger="kvpool"):
            states.free_track_slot(track)
        assert said in caplog.text
        assert "'the cache' at " in caplog.text
        assert states.stats()["dropped_frees"] == 1
    writes: list[Callable[[], object]] = [
        lambda: states.reset_states(track),
        lambda: states.reset_states([1, track]),
        lambda: states.copy_states(own, track),
    ]
    for write in writes:
        with pytest.raises(IndexOwnershipError, match=said):
            write()
    assert states.alloc_track_slot() is None
    assert {leak.state: leak.owner for leak in states.leaks()} == {
        "evictable": "the cache",
        "live": "request 7",
    }
    assert (states.stats()["cached"], states.stats()["in_use"]) == (1, 2)
    states.copy_states(track, own)
    states.reset_states([1, own])
    lease.restore(2)
    assert bool(states.recurrent_state[:, 2].eq(5.0).all())
    cache.verify()
    # It is free when the cache has given it up.
    lease.release()
    assert cache.evict(1) == 1
    assert states.stats()["cached"] == 0
    assert states.alloc_track_slot() == track
    states.free_track_slot(track)


def test_only_working_slots_are_published_and_restored() -> None:
    scene = Scene(tracks=3)
    states = some(scene.states)
    lease = scene.cache.match([1])
    slots = scene.alloc(2)
    states.recurrent_state[:, 1].fill_(5.0)
    lease.publish([1], slots[:1], state=1)
    others = [0, some(lease.state_slot), some(states.alloc_track_slot()), 7, 8, -1]
    for row in others:
        with pytest.raises(IndexError, match=f"slot {row} is no working slot; these are 1 to 4"):
            lease.restore(row)
        with pytest.raises(IndexError, match=f"slot {row} is no working slot; these are 1 to 4"):
            lease.publish([2], slots[1:], state=row)
    assert (lease.length, states.stats()["in_use"]) == (1, 2)
    assert not states.recurrent_state[:, 0].any()
    lease.restore(4)
    assert bool(states.recurrent_state[:, 4].eq(5.0).all())


# Why a prompt missed


def explained(scene: Scene, tokens: Sequence[int], namespace: Any = None) -> list[tuple[int, int, str]]:  # noqa: ANN401
    """The answer of `explain`, which covers the prompt."""
    segments = scene.cache.explain(tokens, namespace)
    ends = [0, *(segment.end for segment in segments)]
    assert [segment.begin for segment in segments] == ends[:-1]
    assert ends[-1] == len(tokens)
    for segment in segments:
        is_evicted = segment.state == "evicted"
        given = (segment.pressure, segment.evicted_s, segment.idle_tokens)
        assert all((value is not None) == is_evicted for value in given)
        assert segment.state in repr(segment)
    return [(segment.begin, segment.end, segment.state) for segment in segments]


def test_each_part_of_a_prompt_is_explained() -> None:
    scene = Scene(4)
    prompt = list(range(22))
    assert explained(scene, []) == []
    assert explained(scene, prompt) == [(0, 20, "never published"), (20, 22, "page not full")]
    scene.insert(prompt, "other")
    assert explained(scene, prompt) == [(0, 20, "other namespace"), (20, 22, "page not full")]
    assert scene.cache.explain(prompt)[0].namespace == "other"
    scene.insert(prompt[:12])
    assert explained(scene, prompt) == [
        (0, 12, "device"),
        (12, 20, "other namespace"),
        (20, 22, "page not full"),
    ]
    scene.cache.clear("other")
    assert explained(scene, prompt)[1:] == [(12, 20, "never published"), (20, 22, "page not full")]
    assert explained(scene, prompt, "other") == [(0, 20, "evicted"), (20, 22, "page not full")]
    assert scene.cache.explain(prompt, "other")[0].pressure == "clear"
    assert scene.sizes() == (12, 0, 4, 48)


def test_evicted_segments_say_when_and_why() -> None:
    scene = Scene(policy="lru")
    scene.insert(range(20))
    scene.cache.match([77] * 30)
    assert scene.cache.evict(5) == 5
    assert explained(scene, range(22)) == [
        (0, 15, "device"),
        (15, 20, "evicted"),
        (20, 22, "never published"),
    ]
    _, gone, _ = scene.cache.explain(range(22))
    assert (gone.pressure, gone.idle_tokens, gone.namespace) == ("evict", 30, None)
    assert 0 <= some(gone.evicted_s) < 100
    scene.alloc(64)
    assert scene.cache.explain(range(15))[0].pressure == "alloc"
    assert explained(scene, range(20)) == [(0, 15, "evicted"), (15, 20, "evicted")]
    # Another prompt with the same end was not.
    assert explained(scene, [5, *range(1, 20)]) == [(0, 20, "never published")]


def test_a_long_prompt_that_parts_from_an_evicted_one() -> None:
    scene = Scene(16, size=1024)
    scene.insert(range(1000))
    scene.cache.evict(1024)
    assert explained(scene, [*range(500), *[7] * 12]) == [(0, 448, "evicted"), (448, 512, "never published")]


def test_a_prefix_without_a_snapshot_is_explained() -> None:
    scene = Scene(tracks=2)
    lease = scene.cache.match([])
    lease.publish(range(4), scene.alloc(4), state=1)
    lease.publish(range(4, 8), scene.alloc(4))
    assert explained(scene, range(10)) == [
        (0, 4, "device"),
        (4, 8, "no snapshot"),
        (8, 10, "never published"),
    ]


# Events


def test_events_are_what_a_router_needs() -> None:
    scene = Scene(4, events=True)
    router: set[bytes] = set()

    def update() -> list[str]:
        events = scene.cache.events()
        for event in events:
            if isinstance(event, kvpool.Stored):
                assert event.parent is None or event.parent in router
                assert len(event.tokens) == 4 * len(event.pages)
                assert event.tier == "device"
                router.update(event.pages)
            elif isinstance(event, kvpool.Removed):
                assert router.issuperset(event.pages)
                router.difference_update(event.pages)
            else:
                router.clear()
        assert len(router) == scene.cache.cached_size() // 4
        return [repr(event) for event in events]

    scene.insert(range(10))
    [stored] = scene.cache.events()
    assert isinstance(stored, kvpool.Stored)
    assert (stored.parent, stored.tokens, stored.namespace) == (None, [*range(8)], None)
    assert [len(page) for page in stored.pages] == [32, 32]
    router.update(stored.pages)
    scene.insert([*range(8), *range(50, 54)])
    assert update() == ["Stored(1 pages, 4 tokens, namespace=None, tier='device')"]
    # The same prefix has another key in another namespace, and the same one in another cache.
    scene.insert(range(8), "a")
    assert update() == ["Stored(2 pages, 8 tokens, namespace=\"a\", tier='device')"]
    other = Scene(4, events=True)
    other.insert(range(8))
    [same] = other.cache.events()
    assert isinstance(same, kvpool.Stored)
    assert same.pages == stored.pages
    scene.cache.evict(4)
    assert update() == ["Removed(1 pages, tier='device')"]
    assert update() == []
    lease = scene.cache.match(range(8), namespace="a")
    scene.cache.clear("a")
    assert scene.cache.events()[0].pages  # type: ignore[union-attr]
    # Pages that are not found cause no events.
    lease.publish([1, 2, 3, 4], scene.alloc(4))
    lease.release()
    assert scene.cache.events() == []
    scene.allocator.clear()
    scene.insert(range(4))
    assert [type(event).__name__ for event in scene.cache.events()] == ["Cleared", "Stored"]
    scene.cache.clear()
    assert [repr(event) for event in scene.cache.events()] == ["Cleared()"]


def test_a_reader_of_events_that_is_late_begins_anew() -> None:
    scene = Scene(events=True)
    for _ in range(1700):
        for slot in scene.alloc(40):
            scene.cache.insert([slot], [slot])
        scene.cache.evict(40)
    events = scene.cache.events()
    assert isinstance(events[0], kvpool.Cleared)
    assert len(events) < 1 << 16


def test_a_cache_without_events_has_none() -> None:
    with pytest.raises(StateError, match="events"):
        Scene().cache.events()


# Ownership


def test_a_free_of_a_cached_slot_names_the_cache(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene(debug=True, name="the cache")
    slots = scene.insert(range(4))
    with caplog.at_level(logging.WARNING, logger="kvpool"):
        scene.allocator.free(slots)
    assert "owned by the prefix cache" in caplog.text
    assert "'the cache' at " in caplog.text
    assert "test_prefix_cache.py" in caplog.text
    assert scene.allocator.stats()["dropped_frees"] == 4
    assert scene.sizes() == (4, 0, 0, 60)
    strict = Scene(strict=True)
    slots = strict.insert(range(4))
    with pytest.raises(IndexOwnershipError, match="owned by the prefix cache"):
        strict.allocator.free([*strict.alloc(1), *slots])
    assert strict.sizes() == (4, 0, 1, 59)


def test_leaks_list_cached_slots_apart() -> None:
    scene = Scene(4, debug=True, name="the cache")
    scene.insert(range(24))
    kept = some(scene.allocator.alloc(4, owner="request 7"))
    live, cached = scene.allocator.leaks()
    assert (live.owner, live.count, live.state) == ("request 7", 4, "live")
    assert (cached.owner, cached.count, cached.state) == ("the cache", 24, "evictable")
    assert cached.spans == [(4, 28)]
    assert "test_prefix_cache.py" in cached.site
    with scene.cache.match(range(9)):
        parts = {leak.state: (leak.owner, leak.spans) for leak in scene.allocator.leaks()[1:]}
    assert parts == {"evictable": ("the cache", [(12, 28)]), "locked": ("the cache", [(4, 12)])}
    # Cached slots are no leak.
    with scene.allocator.expect_balanced():
        scene.insert(range(100, 108))
    scene.allocator.free(kept)
    # Slots shared with a request are live.
    scene.allocator.share([4])
    assert {leak.state for leak in scene.allocator.leaks()} == {"live", "evictable"}
    scene.allocator.free([4])
    scene.cache.clear()
    assert scene.allocator.leaks() == []


# Inputs


def test_tokens_and_slots_in_every_form(as_index: Callable[[Sequence[int]], Any]) -> None:
    scene = Scene(4)
    slots, prompt = scene.alloc(8), [5, 6, 7, 8, 1, 2, 3, 2**31 - 1]
    lease = scene.cache.match(as_index(prompt))
    lease.publish(as_index(prompt[:4]), as_index(slots[:4]))
    lease.finish(as_index(prompt[4:]), as_index(slots[4:]))
    assert scene.length(as_index(prompt)) == 8
    assert scene.cache.match(as_index([*prompt[:6], 9, 9])).length == 4
    assert scene.cache.match(range(5, 9)).length == 4


def test_invalid_tokens_raise_and_change_nothing(bad_index: Any) -> None:  # noqa: ANN401
    scene = Scene()
    slots = scene.alloc(2)
    calls: list[Callable[[], object]] = [
        lambda: scene.cache.match(bad_index),
        lambda: scene.cache.insert(bad_index, slots),
        lambda: scene.cache.insert([1, 2], bad_index),
    ]
    for call in calls:
        with pytest.raises(TypeError):
            call()
    assert scene.sizes() == (0, 0, 2, 62)
    assert scene.cache.stats()["lookups"] == 0


TOKENS: list[Callable[[list[int]], Any]] = [
    list,
    tuple,
    torch.tensor,
    lambda values: torch.tensor(values)[None],
    np.array,
    lambda values: np.repeat(np.array(values), 2)[::2],
]


@pytest.mark.parametrize("form", TOKENS)
@pytest.mark.parametrize("token", [-1, -(2**31), 2**31, 2**40, -(2**40)])
def test_tokens_out_of_range(form: Callable[[list[int]], Any], token: int) -> None:
    scene = Scene()
    scene.insert([1, 2])
    for position in range(4):
        tokens = [1, 2, 3, 4]
        tokens[position] = token
        with pytest.raises(ConfigError, match=str(token)):
            scene.cache.match(form(tokens))
    assert scene.cache.stats()["lookups"] == 1
    assert scene.sizes() == (2, 0, 0, 62)
    for limit in (-1, -(10**30)):
        with pytest.raises(ConfigError):
            scene.cache.match(form([1]), limit=limit)
        with pytest.raises(ConfigError):
            scene.cache.evict(limit)


class Index:
    """An int whose value is the answer of a call."""

    def __init__(self, ask: Callable[[], int]) -> None:
        self.ask = ask

    def __index__(self) -> int:
        return self.ask()


def test_tokens_whose_values_come_from_calls() -> None:
    scene = Scene()
    scene.insert([1, 2, 3])
    tokens: list[Any] = [1, 2, 3]

    def look() -> int:
        """The same cache may be used meanwhile."""
        assert scene.cache.match([1, 2, 3]).length == 3
        return 3

    def fail() -> int:
        raise KeyboardInterrupt

    tokens[2] = Index(look)
    assert scene.cache.match(tokens).length == 3
    tokens[:2] = [Index(lambda: 1), Index(lambda: 2)]
    assert scene.cache.match(tokens).length == 3
    before = scene.sizes()
    tokens[1] = Index(fail)
    for call in (
        scene.cache.match,
        scene.cache.cached_len,
        lambda tokens: scene.cache.insert(tokens, [1] * 3),
    ):
        with pytest.raises(KeyboardInterrupt):
            call(tokens)
    assert scene.sizes() == before


class RaisingHook:
    """Python code that runs within calls, and raises after `left` other turns."""

    def __init__(self) -> None:
        self.left = 1 << 30

    def turn(self) -> None:
        self.left -= 1
        if self.left < 0:
            self.left = 1 << 30
            raise KeyboardInterrupt

    def query(self) -> bool:
        self.turn()
        return False

    def index(self, value: int) -> Index:
        def ask() -> int:
            self.turn()
            return value

        return Index(ask)

    def list(self, values: Sequence[int]) -> list[Any]:
        return [self.index(value) for value in values]

    def sequence(self, values: Sequence[Any]) -> Any:  # noqa: ANN401
        """Values that Python code hands out."""
        turn = self.turn

        class Values(Sequence[Any]):
            def __len__(self) -> int:
                turn()
                return len(values)

            def __getitem__(self, at: Any) -> Any:  # noqa: ANN401
                turn()
                return values[at]

        return Values()


class InterruptedScene(Scene):
    """Calls in which Python code runs: in the values of arguments, and in fences."""

    def __init__(self, page_size: int) -> None:
        super().__init__(page_size, strict=True)
        where = devices.current()
        self.stop = RaisingHook()
        self.insert(range(8))
        self.allocator.free(self.alloc(4), after=self.stop)
        self.table = kvpool.ReqToTokenPool(3, 32, where)
        self.planner = kvpool.BatchPlanner(self.table, self.allocator, 4, 64)
        self.row, self.free_row = some(self.table.alloc(2))
        self.lease = self.cache.match(range(9), limit=8)
        some(self.planner.extend([self.row], [8], [13], prefixes=[self.lease]))
        self.own = self.alloc(6)
        self.mine = self.cache.match([50] * 6)
        self.more = self.cache.match([*range(4), 9])

    def observed_state(self) -> Any:  # noqa: ANN401
        leases = [repr(lease) for lease in (self.lease, self.mine, self.more)]
        lens = [self.planner.seq_len(row) for row in (self.row, self.free_row)]
        return self.sizes(), leases, lens, self.allocator.stats()["fenced"], self.cache.stats()["lookups"]


INTERRUPTED: dict[str, Callable[[InterruptedScene], object]] = {
    "match": lambda scene: scene.cache.match(scene.stop.list(range(8))),
    "match a sequence": lambda scene: scene.cache.match(scene.stop.sequence(range(8))),
    "limit": lambda scene: scene.cache.match(range(8), limit=scene.stop.index(4)),
    "cached_len": lambda scene: scene.cache.cached_len(scene.stop.list(range(8))),
    "explain": lambda scene: scene.cache.explain(scene.stop.list(range(12))),
    "insert": lambda scene: scene.cache.insert(scene.stop.list([7] * 6), scene.stop.list(scene.own)),
    "publish": lambda scene: scene.mine.publish(scene.stop.list([7] * 6), scene.stop.sequence(scene.own)),
    "finish": lambda scene: scene.mine.finish(scene.stop.list([7] * 6), scene.stop.list(scene.own)),
    "publish a row": lambda scene: scene.lease.publish(
        scene.stop.list([8, 8, 8, 8]), row=scene.stop.index(scene.row)
    ),
    "evict": lambda scene: scene.cache.evict(scene.stop.index(4)),
    "pin": lambda scene: scene.cache.pin(scene.mine, priority=scene.stop.index(1)),
    "alloc": lambda scene: scene.allocator.alloc(scene.stop.index(4)),
    "extend": lambda scene: scene.planner.extend(
        scene.stop.list([scene.free_row]),
        scene.stop.list([4]),
        scene.stop.list([9]),
        prefixes=scene.stop.sequence([scene.more]),
    ),
    "truncate": lambda scene: scene.planner.truncate(scene.stop.list([scene.row]), scene.stop.list([4])),
    "fork": lambda scene: scene.planner.fork(
        scene.stop.index(scene.row), scene.stop.index(scene.free_row), scene.stop.index(9)
    ),
    "planner's finish": lambda scene: scene.planner.finish(scene.stop.list([scene.row])),
}


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("name", INTERRUPTED)
def test_an_interrupt_wherever_python_code_runs_changes_nothing(name: str, page_size: int) -> None:
    call = INTERRUPTED[name]
    for left in itertools.count():
        scene = InterruptedScene(page_size)
        before = scene.observed_state()
        scene.stop.left = left
        try:
            call(scene)
        except KeyboardInterrupt:
            assert scene.observed_state() == before
            call(scene)
        else:
            assert left > 0
            break
        finally:
            scene.stop.left = 1 << 30
        scene.sizes()


def test_a_prompt_of_a_million_tokens() -> None:
    size = 1 << 20
    scene = Scene(16, size=size)
    prompt = np.arange(size, dtype=np.int32)
    slots = some(scene.allocator.alloc(size)).cpu()
    scene.cache.match(prompt).publish(prompt, slots)
    assert scene.cache.match(prompt, limit=size - 1).length == size - 16
    assert scene.cache.match(prompt.tolist()).length == size
    assert scene.cache.match(torch.from_numpy(prompt).long()).slots[-1] == slots[-1]
    assert scene.cache.evict(size) == size


@devices.cpu_only
def test_one_call_evicts_half_of_a_million_leaves() -> None:
    size = 1_000_000
    scene = Scene(size=size)
    slots = scene.alloc(size)
    for token, slot in enumerate(slots):
        scene.cache.insert([token], [slot])
    assert scene.cache.stats()["nodes"] == size
    assert [scene.length([token]) for token in range(0, size, 1000)] == [1] * 1000
    assert scene.cache.evict(size // 2) == size // 2
    assert scene.allocator.alloc(size) is not None
    assert scene.sizes() == (0, 0, size, 0)


# Users at once


@pytest.mark.timeout(120)
def test_eight_threads_leave_no_lock_and_no_slot() -> None:
    scene = Scene(4, size=512)

    def work(number: int) -> None:
        for turn in range(100):
            prompt = [turn % 5] * 4 + list(range(number % 3, number % 3 + 4 * (turn % 7)))
            with scene.cache.match(prompt, limit=len(prompt) - 1) as lease:
                begin = lease.length
                slots = scene.allocator.alloc(len(prompt) - begin)
                if slots is None:
                    continue
                lease.finish(prompt[begin:], slots)
            if turn % 10 == number:
                scene.cache.evict(16)
            if turn % 50 == number:
                scene.cache.clear()

    together(work)
    evictable, locked, in_use, _ = scene.sizes()
    assert (locked, in_use) == (0, 0)
    assert scene.cache.evict(512) == evictable


@needs_fork
@devices.cpu_only
def test_a_fork_has_a_cache_of_its_own() -> None:
    scene = Scene()
    scene.insert(range(8))
    lease = scene.cache.match(range(4))
    child = os.fork()
    if child == 0:
        wrong = lease.length != 4 or scene.cache.evict(8) != 4 or scene.length(range(8)) != 4
        lease.release()
        scene.insert(range(100, 160))
        os._exit(wrong)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert scene.sizes() == (4, 4, 0, 56)


def test_garbage_is_collected_across_the_tensors() -> None:
    scene = Scene()
    published = scene.cache.insert([1, 2], scene.alloc(2))
    tensor = published.slots
    tensor.published = published  # type: ignore[attr-defined]
    gone = weakref.ref(tensor)
    cache = weakref.ref(scene.cache)
    del published, tensor, scene
    gc.collect()
    assert gone() is None
    assert cache() is None


# Edges


@pytest.mark.parametrize("policy", ["adaptive", "lru", "priority"])
def test_pinned_prefixes_are_evicted_last_by_every_policy(policy: str) -> None:
    scene = Scene(policy=policy)
    lease = scene.cache.match(range(8))
    lease.publish(range(8), scene.alloc(8))
    scene.cache.pin(lease)
    lease.release()
    assert scene.cache.evict(4) == 4
    assert len(scene.alloc(64)) == 64


def test_pins_without_an_end_are_refused() -> None:
    scene = Scene()
    lease = scene.cache.match(range(8))
    lease.publish(range(8), scene.alloc(8))
    with pytest.raises(ConfigError, match="no end"):
        scene.cache.pin(lease, seconds=1e19)
    lease.release()
    assert scene.cache.evict(8) == 8


def test_rows_freed_without_the_planner_give_up_their_leases() -> None:
    where = devices.current()
    scene = Scene()
    table = kvpool.ReqToTokenPool(1, 16, where)
    planner = kvpool.BatchPlanner(table, scene.allocator, 1, 16)
    row, lease = some(table.alloc()), scene.cache.match([1, 2, 3])
    some(planner.extend(row, [0], [3], prefixes=[lease]))
    lease.publish([1, 2, 3])
    table.free(row)
    lease.release()
    del lease
    row = some(table.alloc())
    some(planner.extend(row, [0], [2], prefixes=[scene.cache.match([9, 9])]))
    assert scene.cache.evictable_size() == 3


def test_namespaces_are_exact_text() -> None:
    scene = Scene()
    for name in ("\ud800", "\udfff"):
        with pytest.raises(UnicodeEncodeError):
            scene.cache.match([1], namespace=name)

    class Tenant(str):
        __slots__ = ()

        def __str__(self) -> str:
            return "another"

    scene.insert([1, 2], "a")
    assert scene.length([1, 2], Tenant("a")) == 2


def test_tokens_of_a_partial_page_are_checked() -> None:
    scene = Scene(4)
    slots = scene.alloc(7)
    with pytest.raises(ConfigError, match="outside"):
        scene.cache.match([1]).publish([1, 2, 3, 4, -5, 6, 7], slots)
    assert scene.sizes() == (0, 0, 8, 56)


def test_states_without_a_snapshot_are_not_restored() -> None:
    scene = Scene(tracks=1)
    lease = scene.cache.match([1, 2])
    lease.publish([1, 2], scene.alloc(2))
    with pytest.raises(StateError, match="no snapshot"):
        lease.restore(1)


def test_pages_with_other_owners_are_not_counted_as_evicted() -> None:
    scene = Scene(size=8, policy="lru")
    shared = scene.insert(range(4))
    scene.insert(range(10, 14))
    scene.allocator.share(shared)
    assert scene.cache.evict(1) == 1
    assert scene.cache.stats()["evicted"] == 5
    assert len(scene.alloc(4)) == 4
    scene.allocator.free(shared)
    assert scene.allocator.available_size() == 4


def test_clearing_the_cache_ends_pins() -> None:
    scene = Scene()
    for name in ("a", "b"):
        lease = scene.cache.match(range(8), namespace=name)
        lease.publish(range(8), scene.alloc(8))
        scene.cache.pin(lease, seconds=600)
        lease.release()
    scene.cache.clear("a")
    assert scene.sizes() == (0, 8, 0, 56)
    scene.cache.clear()
    assert scene.sizes() == (0, 0, 0, 64)


def test_a_cleared_prefix_cannot_be_pinned() -> None:
    scene = Scene()
    lease = scene.cache.match(range(8))
    lease.publish(range(8), scene.alloc(8))
    scene.cache.clear()
    for seconds in (None, 600):
        with pytest.raises(StaleError, match="the prefix was cleared"):
            scene.cache.pin(lease, seconds=seconds)
    lease.release()
    assert scene.sizes() == (0, 0, 0, 64)
