"""ArenaPrefixCache: prefixes of every group of a layout. Random histories are in Rust."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from common import some

import kvpool
from kvpool import (
    ArenaPrefixCache,
    ArgumentError,
    CacheArena,
    CacheLayout,
    ConfigError,
    Group,
    IndexOwnershipError,
    Plane,
    StaleError,
    StateError,
)

if TYPE_CHECKING:
    from collections.abc import Callable

PAGE = 4
K = [Plane("k", "uint8", (64,))]


def full(stride: int = 1) -> Group:
    return Group("full", "full", [0], K, stride=stride)


def window(tokens: int = 9, sinks: int = 0) -> Group:
    return Group("window", "window", [1, 2], K, tokens=tokens, sinks=sinks)


def state(numbers: int = 16) -> Group:
    return Group("state", "state", [3], [Plane("recurrent", "float32", (numbers,))])


def make(*groups: Group, arena_bytes: int = 1 << 16, **options: Any) -> ArenaPrefixCache:  # noqa: ANN401
    layout = CacheLayout(list(groups), page_size=PAGE)
    arena = CacheArena(layout, arena_bytes, "cpu", strict=True)
    return ArenaPrefixCache(arena, **{"policy": "lru", **options})


def compute(
    cache: ArenaPrefixCache,
    tokens: list[int],
    namespace: str | None = None,
    session: kvpool.Session | None = None,
    **more: list[Any],
) -> dict[str, list[Any]]:
    """Match, compute and publish a prompt, with the units that a request still has at its end."""
    arena, end = cache.arena, len(tokens)
    with cache.match(tokens, namespace=namespace, session=session) as lease:
        given: dict[str, list[Any]] = {}
        for group in arena.layout.groups:
            if group.kind == "state":
                given[group.name] = some(arena.alloc({group.name: 1}))[group.name]
                continue
            each = max(PAGE, group.stride)
            first, last = lease.length // each, end // each
            reach = end if group.kind == "full" else min(end, some(group.tokens) - 1)
            begin = (end - reach) // each
            kept = [unit for unit in range(first, last) if unit >= begin or unit * each < group.sinks]
            units = some(arena.alloc({group.name: len(kept)}))[group.name]
            by_position = dict(zip(kept, units, strict=True))
            given[group.name] = [by_position.get(unit) for unit in range(first, last)]
        return lease.publish(tokens, {**given, **more})


def wholly_free(cache: ArenaPrefixCache) -> bool:
    return bool(cache.arena.slabs_free == cache.arena.stats()["capacity"])


def lengths(cache: ArenaPrefixCache, tokens: list[int]) -> dict[str, int]:
    return {report.group: report.length for report in cache.explain(tokens)}


# Matches


def test_a_prompt_is_found_in_whole_pages() -> None:
    cache = make(full())
    prompt = list(range(10))
    published = compute(cache, prompt[:8])
    with cache.match(prompt) as lease:
        assert (lease.length, len(lease), lease.known_length) == (8, 8, 8)
        units = lease.units("full")
        assert (units.sinks, units.first, units.units) == ([], 0, published["full"])
        assert (cache.locked_size(), cache.evictable_size(), cache.cached_size()) == (8, 0, 8)
    with cache.match(prompt, max_tokens=7) as lease:
        assert lease.length == 4
    assert cache.cached_len(prompt) == 8
    assert cache.cached_len(prompt, max_tokens=5) == 4
    assert cache.match([*prompt[:6], 99]).length == 4
    cache.verify()
    cache.clear()
    assert wholly_free(cache)


def test_a_window_needs_its_last_tokens() -> None:
    cache = make(full(), window(9))
    prompt = list(range(40))
    published = compute(cache, prompt)
    assert published["window"][:7] == [None] * 7
    with cache.match(prompt) as lease:
        found = lease.units("window")
        assert (lease.length, found.first, found.units) == (40, 8, published["window"][8:])
        assert lease.units("full").units == published["full"]
    # Nowhere before has the window its units.
    assert cache.match(prompt, max_tokens=36).length == 0
    assert lengths(cache, prompt[:36]) == {"full": 36, "window": 0}


def test_sinks_stay() -> None:
    cache = make(window(9, sinks=6))
    prompt = list(range(40))
    published = compute(cache, prompt)
    with cache.match(prompt) as lease:
        found = lease.units("window")
        assert (found.sinks, found.first) == (published["window"][:2], 8)
    with cache.match([]) as lease, pytest.raises(ArgumentError, match="unit 0 of group window is missing"):
        lease.publish(list(range(100, 140)), {"window": [None] * 10})


def test_a_chunk_begins_anew_at_its_multiples() -> None:
    cache = make(full(), Group("chunk", "chunk", [1], K, tokens=16))
    prompt = list(range(40))
    compute(cache, prompt[:24])
    compute(cache, prompt[:32])
    with cache.match(prompt) as lease:
        found = lease.units("chunk")
        assert (lease.length, found.first, found.units) == (32, 8, [])


def test_a_state_needs_a_snapshot_exactly_there() -> None:
    cache = make(full(), state())
    prompt = list(range(40))
    first = compute(cache, prompt[:12])
    compute(cache, prompt[:32])
    with cache.match(prompt, max_tokens=31) as lease:
        assert (lease.length, lease.known_length) == (12, 28)
        assert lease.units("state").units == first["state"]
    assert cache.stats()["snapshots"] == 2
    with cache.match([]) as lease:
        assert lease.units("state").units == []


def test_entries_of_many_tokens_do_not_lengthen_the_page() -> None:
    """With a state, a match need not end where entries of 8 and of 16 tokens do."""
    cache = make(full(stride=16), Group("other", "full", [5], K, stride=8), state())
    prompt = list(range(60))
    published = compute(cache, prompt[:28])
    assert {name: len(units) for name, units in published.items()} == {"full": 1, "other": 3, "state": 1}
    with cache.match(prompt) as lease:
        assert lease.length == 28
        assert lease.units("full").units == published["full"]
        # The request has gone on: the entry of tokens 16 to 32 is whole now.
        units = some(cache.arena.alloc({"full": 1, "other": 1, "state": 1}))
        lease.publish(prompt[:32], units)
        assert (lease.length, lease.units("other").units) == (32, published["other"] + units["other"])


def test_entries_without_a_state_end_where_they_are_whole() -> None:
    cache = make(full(stride=8))
    prompt = list(range(40))
    compute(cache, prompt[:20])
    assert cache.match(prompt).length == 16
    report = cache.explain(prompt[:20])[0]
    assert (report.length, report.reason) == (16, "part of an entry")


def test_states_of_single_layers_are_lists() -> None:
    layers = Group("state", "state", list(range(8)), [Plane("recurrent", "float32", (256, 64))])
    layout = CacheLayout([full(), layers], page_size=PAGE)
    arena = CacheArena(layout, 1 << 21, "cpu", strict=True)
    assert arena.slabs.by_layer("state")
    cache = ArenaPrefixCache(arena)
    published = compute(cache, list(range(8)))
    assert np.shape(published["state"]) == (1, 8)
    with cache.match(list(range(8))) as lease:
        assert lease.units("state").units == published["state"]
    cache.clear()
    assert wholly_free(cache)


def test_namespaces_share_nothing() -> None:
    cache = make(full())
    prompt = list(range(8))
    compute(cache, prompt, namespace="a")
    assert [cache.cached_len(prompt, namespace=name) for name in ("a", "b", None)] == [8, 0, 0]
    lease = cache.match(prompt, namespace="a")
    cache.clear("a")
    assert (lease.length, lease.namespace) == (8, "a")
    assert cache.cached_len(prompt, namespace="a") == 0
    lease.release()
    assert wholly_free(cache)


# Publications


def test_what_others_have_published_is_freed() -> None:
    cache = make(full(), window(9), state())
    prompt, arena = list(range(32)), cache.arena
    one, other = cache.match(prompt), cache.match(prompt)
    took = [some(arena.alloc({"full": 8, "window": 8, "state": 1})) for _ in range(2)]
    first = one.publish(prompt, took[0])
    assert first == took[0]
    assert other.publish(prompt, took[1]) == took[0]
    assert other.length == 32
    assert cache.stats()["duplicates"] == 32
    assert arena.group_stats("full")["in_use"] == 8
    with pytest.raises(IndexOwnershipError):
        arena.free("full", took[1]["full"])
    # Another goes on from there, and a third one diverges.
    compute(cache, [*prompt, 1, 2, 3, 4])
    compute(cache, [*prompt, 5, 6, 7, 8])
    assert cache.cached_len([*prompt, 1, 2, 3, 4]) == 36
    one.release()
    other.release()
    cache.clear()
    assert wholly_free(cache)


def test_gaps_are_filled() -> None:
    cache = make(full(), window(9), state())
    prompt, arena = list(range(32)), cache.arena
    with cache.match(prompt) as lease:
        lease.publish(prompt[:16], some(arena.alloc({"full": 4, "window": 4})))
        assert cache.cached_len(prompt) == 0
        with cache.match(prompt) as other:
            units = some(arena.alloc({"full": 4, "window": 4, "state": 1}))
            now = other.publish(prompt[:16], units)
            assert now["full"] != units["full"]
            assert now["state"] == units["state"]
        assert cache.cached_len(prompt) == 16
        assert lease.units("state").units == units["state"]


def test_a_publication_gives_what_alloc_gave() -> None:
    cache = make(full(), state())
    arena = cache.arena
    with cache.match([]) as lease:
        taken = some(arena.alloc({"full": 2, "state": 1}))
        units = {"full": np.array(taken["full"]), "state": taken["state"]}
        assert lease.publish(np.arange(8), units) == taken


WRONG: dict[
    str, tuple[Callable[[dict[str, list[Any]]], tuple[list[int], dict[str, Any]]], type[Exception], str]
] = {
    "a part of a page": (lambda u: (list(range(10)), u), ArgumentError, "10 tokens were published"),
    "tokens of no lease": (
        lambda u: ([9, *range(1, 12)], u),
        ArgumentError,
        "differ from those of the lease at position 0",
    ),
    "fewer tokens": (lambda u: (list(range(4)), u), ArgumentError, "4 tokens were published by a lease of 8"),
    "no token": (lambda u: ([*range(8), 1, 2, 3, -4], u), ArgumentError, "outside"),
    "too few": (
        lambda u: (list(range(16)), u),
        ArgumentError,
        "1 units of group full were published for 2 positions",
    ),
    "a hole": (
        lambda u: (list(range(12)), {**u, "full": [None]}),
        ArgumentError,
        "unit 2 of group full is missing",
    ),
    "no such group": (lambda u: (list(range(12)), {**u, "none": []}), ArgumentError, "there is no group"),
    "an end without its window": (
        lambda u: (list(range(12)), {**u, "window": [None]}),
        ArgumentError,
        "unit 2 of group window is missing; a request that goes on behind the snapshot at 12",
    ),
    "two snapshots": (lambda u: (list(range(12)), {**u, "state": u["state"] * 2}), ArgumentError, "it has 1"),
    "no unit": (
        lambda u: (list(range(12)), {**u, "full": [1 << 20]}),
        IndexOwnershipError,
        "1 units of group full cannot be published",
    ),
    "a padding unit": (lambda u: (list(range(12)), {**u, "full": [0]}), IndexOwnershipError, "0"),
    "a negative unit": (
        lambda u: (list(range(12)), {**u, "full": [-1]}),
        ArgumentError,
        "unit -1 of group full",
    ),
    "another group's unit": (
        lambda u: (list(range(12)), {**u, "full": u["window"]}),
        IndexOwnershipError,
        "not allocated",
    ),
    "a word": (lambda u: (list(range(12)), {**u, "full": ["x"]}), TypeError, "int"),
    "a group by number": (lambda u: (list(range(12)), {0: u["full"]}), TypeError, "named by a str"),  # type: ignore[dict-item]
}


@pytest.mark.parametrize("case", WRONG.values(), ids=WRONG)
def test_wrong_publications_change_nothing(
    case: tuple[Callable[[dict[str, list[Any]]], tuple[list[int], dict[str, Any]]], type[Exception], str],
) -> None:
    cache = make(full(), window(9), state())
    compute(cache, list(range(8)))
    call, error, text = case
    with cache.match(list(range(8))) as lease:
        units = some(cache.arena.alloc({"full": 1, "window": 1, "state": 1}))
        before = cache.stats(), cache.arena.stats()
        with pytest.raises(error, match=text):
            lease.publish(*call(units))
        assert (cache.stats(), cache.arena.stats()) == before
        assert lease.length == 8
        assert lease.publish(list(range(12)), units) == units
    cache.verify()


def test_a_unit_has_one_owner() -> None:
    cache = make(full())
    [unit] = some(cache.arena.alloc({"full": 1}))["full"]
    with cache.match([]) as lease:
        with pytest.raises(IndexOwnershipError, match="named twice"):
            lease.publish(list(range(8)), {"full": [unit, unit]})
        lease.publish(list(range(4)), {"full": [unit]})
        with pytest.raises(IndexOwnershipError) as caught:
            lease.publish(list(range(8)), {"full": [unit]})
        assert caught.value.index == unit
        with pytest.raises(IndexOwnershipError):
            cache.arena.free("full", [unit])


# Leases


def test_leases_end_once() -> None:
    cache = make(full())
    compute(cache, list(range(8)))
    lease = cache.match(list(range(8)))
    lease.release()
    lease.release()
    assert lease.closed
    assert repr(lease) == "ArenaLease(released)"
    calls: list[Callable[[], object]] = [
        lambda: lease.length,
        lambda: lease.known_length,
        lambda: lease.units("full"),
        lambda: lease.publish([], {}),
    ]
    for call in calls:
        with pytest.raises(StaleError, match="it was released"):
            call()
    other = cache.match(list(range(8)))
    assert cache.locked_size() == 8
    del other
    gc.collect()
    assert cache.locked_size() == 0


def test_a_clear_of_the_arena_ends_leases() -> None:
    cache = make(full(), window(9), state(), events=True)
    compute(cache, list(range(8)))
    lease = cache.match(list(range(8)))
    cache.arena.clear()
    assert lease.closed
    with pytest.raises(StaleError, match="the arena was cleared"):
        lease.units("full")
    lease.release()
    assert cache.cached_size() == 0
    assert isinstance(cache.events()[-1], kvpool.Cleared)
    compute(cache, list(range(8)))
    assert cache.cached_len(list(range(8))) == 8
    cache.verify()


def test_a_cache_that_is_dropped_frees_its_units() -> None:
    cache = make(full(), window(9), state())
    arena = cache.arena
    compute(cache, list(range(8)))
    lease = cache.match(list(range(8)))
    del cache
    gc.collect()
    assert lease.length == 8  # it keeps the cache
    del lease
    gc.collect()
    assert arena.slabs_free == arena.stats()["capacity"]


def test_unknown_groups_are_refused() -> None:
    cache = make(full())
    with cache.match([]) as lease, pytest.raises(ArgumentError, match="there is no group"):
        lease.units("window")
    with pytest.raises(ArgumentError, match="there is no group"):
        cache.group_stats("window")
    with pytest.raises(ArgumentError, match="max_tokens"):
        cache.match([], max_tokens=-1)
    with pytest.raises(ConfigError, match="unknown policy"):
        make(full(), policy="best")
    with pytest.raises(StateError, match="without events"):
        cache.events()
    with pytest.raises(TypeError):
        cache.match(["a"])  # type: ignore[list-item]
    with pytest.raises(ArgumentError):
        cache.match([-1])


# Evictions


def test_what_nothing_needs_goes_first() -> None:
    """A request that goes on leaves its windows behind, and an arena that is short takes those."""
    cache = make(full(), window(9), arena_bytes=1 << 14)
    arena, prompt = cache.arena, list(range(48))
    lease = cache.match([])
    for end in (16, 32, 48):
        first = len(lease) // PAGE
        lease.publish(
            prompt[:end], some(arena.alloc({"full": end // PAGE - first, "window": end // PAGE - first}))
        )
    assert cache.group_stats("window") == {"units": 12, "tokens": 48, "unneeded": 10, "evicted": 0}
    taken = 0
    while arena.alloc({"window": 1}):
        taken += 1
    stats = cache.group_stats("window")
    assert (stats["evicted"], stats["units"], taken > 10) == (10, 2, True)
    assert (cache.group_stats("full")["evicted"], cache.cached_len(prompt)) == (0, 48)
    assert lease.units("window").units
    lease.release()
    # Now the prefix itself.
    assert arena.alloc({"window": 1})
    assert cache.cached_len(prompt) == 0
    cache.verify()


def test_a_lease_keeps_no_more_than_its_request_needs() -> None:
    cache = make(full(), window(9), arena_bytes=1 << 14)
    prompt = list(range(32))
    compute(cache, prompt[:16])
    compute(cache, prompt)
    lease = cache.match(prompt)
    assert cache.group_stats("window") == {"units": 4, "tokens": 16, "unneeded": 0, "evicted": 0}
    assert cache.cached_len(prompt[:16]) == 16
    while cache.arena.alloc({"window": 1}):
        pass
    assert cache.group_stats("window")["units"] == 2, "others went on at 16"
    assert (cache.cached_len(prompt[:16]), cache.cached_len(prompt)) == (0, 32)
    assert None not in lease.units("window").units
    cache.verify()


def test_leaves_go_in_the_order_of_the_policy() -> None:
    cache = make(full(), arena_bytes=1 << 12)
    arena = cache.arena
    prompts = [[number] * 16 for number in range(3)]
    for prompt in prompts:
        compute(cache, prompt)
    cache.match(prompts[0]).release()
    free = arena.group_stats("full")["available"]
    assert arena.alloc({"full": free + 1})
    assert [cache.cached_len(prompt) for prompt in prompts] == [16, 12, 16]
    assert cache.group_stats("full")["evicted"] == 1, "no more than needed"
    assert cache.stats()["evicted"] == 4


def test_windows_within_a_session_go_before_what_sessions_end_with() -> None:
    """A window takes as much memory as 16 pages: what a session has gone on from is not worth that."""
    cache = make(full(), window(33), arena_bytes=1 << 17)
    sessions = [[1000 * number + token for token in range(160)] for number in range(3)]
    for end in (80, 160):
        for session in sessions:
            compute(cache, session[:end])
    compute(cache, sessions[0])
    middle, whole = ([cache.cached_len(session[:end]) for session in sessions] for end in (80, 160))
    assert (middle, whole) == ([80] * 3, [160] * 3)
    lost = 0
    while lost < 3:
        some(cache.arena.alloc({"window": 1}))
        lost = [cache.cached_len(session[:80]) for session in sessions].count(0)
        assert [cache.cached_len(session) for session in sessions] == [160] * 3
    while cache.stats()["cached"] == 480:
        some(cache.arena.alloc({"window": 1}))
    assert [cache.cached_len(session) for session in sessions] == [160, 0, 160], "the policy's leaf"
    cache.verify()


def test_many_ends_are_looked_at_once_for_several_evictions() -> None:
    cache = make(full(), window(9), arena_bytes=1 << 20)
    prompts = [[number, *range(31)] for number in range(1_000)]
    for prompt in prompts:
        compute(cache, prompt[:16])
        compute(cache, prompt)
    kept = [cache.cached_len(prompt) for prompt in prompts]
    assert 100 < kept.count(32) < 900, "some had to go"
    assert kept == sorted(kept), "those used first"
    # What is used now stays, although it was among the first to go.
    first = kept.index(32)
    for prompt in prompts[first : first + 8]:
        compute(cache, prompt)
    for number in range(1_000, 1_100):
        compute(cache, [number, *range(31)])
    assert [cache.cached_len(prompt) for prompt in prompts[first : first + 8]] == [32] * 8
    assert cache.cached_len(prompts[first + 8]) == 0
    cache.verify()


def test_of_many_ends_one_that_a_request_waits_for_goes_last() -> None:
    cache = make(full(), window(9), arena_bytes=1 << 20)
    prompts = [[number, *range(31)] for number in range(100)]
    for end in (16, 32):
        for prompt in prompts:
            compute(cache, prompt[:end])
    runs = [cache.match(prompt) for prompt in prompts[1:]]
    waiting = cache.add_waiting(prompts[0])

    def lose_one() -> None:
        before = [cache.cached_len(prompt[:16]) for prompt in prompts]
        while [cache.cached_len(prompt[:16]) for prompt in prompts] == before:
            some(cache.arena.alloc({"window": 1}))

    lose_one()
    # Those that would have gone next are used, and many others are not.
    runs += [cache.match(prompt[:16]) for prompt in prompts[:20]]
    lose_one()
    assert cache.cached_len(prompts[0]) == 32
    assert [len(lease) for lease in runs[:99]] == [32] * 99
    del waiting
    cache.verify()


@pytest.mark.parametrize("other", [window(33), state(2_048)], ids=["window", "state"])
def test_ends_that_are_worth_less_lose_little_beside_recency(other: Group) -> None:
    """All conversations have three turns: the more memory one has, the less often it goes on."""

    def found_by(policy: str) -> int:
        cache = make(full(), other, arena_bytes=1 << 19, policy=policy)
        generator = np.random.default_rng(0)
        turns: list[int] = []
        open_ones: list[int] = []
        for _ in range(12_000):
            if open_ones and generator.random() < 0.6:
                at = -1 - min(int(generator.exponential(60)), len(open_ones) - 1)
                number = open_ones[at]
            else:
                at, number = -1, len(turns)
                turns.append(0)
                open_ones.append(number)
            turns[number] += 1
            if turns[number] == 3:
                del open_ones[at]
            compute(cache, [number] * (64 * turns[number]))
        return cache.stats()["hit_tokens"]

    recent, learned = map(found_by, ("lru", "adaptive"))
    assert learned > 0.96 * recent > 0


def test_nothing_is_evicted_in_vain() -> None:
    cache = make(full(), state(), arena_bytes=1 << 13)
    compute(cache, list(range(16)))
    for units in ({"full": 1 << 10}, {"state": 1 << 10}, {"full": 100, "state": 100}):
        assert cache.arena.alloc(units) is None
    assert cache.cached_len(list(range(16))) == 16
    lease = cache.match(list(range(16)))
    free = cache.arena.group_stats("full")["available"]
    assert cache.arena.alloc({"full": free + 1}) is None
    assert lease.units("full").units


def test_snapshots_go_when_states_are_short() -> None:
    # A snapshot takes as much memory as 16 pages.
    cache = make(full(), state(1024), arena_bytes=1 << 16)
    prompt = list(range(64))
    for end in range(8, 64, 8):
        compute(cache, prompt[:end])
    while cache.group_stats("state")["evicted"] < 3:
        assert cache.arena.alloc({"state": 1})
    assert cache.stats()["snapshots"] < 7
    assert cache.stats()["cached"] == 56
    assert cache.cached_len(prompt) == 56, "the last one is worth most"
    cache.verify()


def test_pages_that_no_snapshot_follows_go_with_the_last_one() -> None:
    cache = make(full(), state(1024), arena_bytes=1 << 15)
    common = list(range(8))
    for last in (100, 200):
        compute(cache, [*common, *range(last, last + 8)])
    assert (cache.stats()["cached"], cache.stats()["snapshots"]) == (24, 2)
    while cache.stats()["snapshots"] == 2:
        assert cache.arena.alloc({"state": 1})
    assert cache.stats()["cached"] == 16
    while cache.stats()["snapshots"]:
        assert cache.arena.alloc({"state": 1})
    assert cache.stats()["cached"] == 0
    cache.verify()


def test_slabs_come_back_from_windows() -> None:
    """Units that nothing needs are given up for another group if they leave a slab empty."""
    cache = make(full(), window(5), arena_bytes=1 << 15)
    arena, prompt = cache.arena, list(range(256))
    lease = cache.match([])
    for end in range(32, 160, 32):
        lease.publish(prompt[:end], some(arena.alloc({"full": 8, "window": 8})))
    assert cache.group_stats("window")["unneeded"] == 31
    free = arena.group_stats("full")["available"]
    assert arena.alloc({"full": free + 1})
    assert cache.group_stats("window")["evicted"] > 0
    assert cache.cached_len(prompt) == 128


# Reports


def test_the_group_that_shortened_a_match_is_named() -> None:
    cache = make(full(), window(9), state())
    prompt = list(range(40))
    compute(cache, prompt[:16])
    compute(cache, prompt[:32])
    reports = cache.explain(prompt[:28])
    assert [str(report) for report in reports] == [
        "full `full`: 28 tokens",
        "window `window`: 16 tokens; 20..24 was never published",
        "state `state`: 16 tokens; no snapshot beyond 16",
    ]
    assert [(report.kind, report.missing, report.reason) for report in reports] == [
        ("full", None, "complete"),
        ("window", (20, 24), "never published"),
        ("state", None, "no snapshot"),
    ]
    assert cache.cached_len(prompt[:28]) == min(report.length for report in reports) == 16
    assert [report.length for report in cache.explain([5, 6, 7, 8])] == [0, 0, 0]
    assert repr(reports[0]) == "GroupReport(full `full`: 28 tokens)"


def test_evicted_windows_are_named() -> None:
    cache = make(full(), window(9), arena_bytes=1 << 14)
    arena, prompt = cache.arena, list(range(64))
    lease = cache.match([])
    lease.publish(prompt[:32], some(arena.alloc({"full": 8, "window": 8})))
    lease.publish(prompt, some(arena.alloc({"full": 8, "window": 8})))
    while cache.group_stats("window")["unneeded"]:
        assert arena.alloc({"window": 1})
    report = cache.explain(prompt[:32])[1]
    assert str(report) == "window `window`: 0 tokens; the units of 24..32 were evicted"


def test_statistics_and_events() -> None:
    cache = make(full(), window(9), state(), events=True, name="units")
    prompt = list(range(16))
    compute(cache, prompt)
    cache.match(prompt).release()
    stats = cache.stats()
    assert set(stats) == {*kvpool.typing.ArenaPrefixStats.__annotations__, "capacity", "bytes"}
    assert (stats["lookups"], stats["hit_tokens"], stats["missed_tokens"], stats["published"]) == (
        2,
        16,
        16,
        16,
    )
    assert (stats["cached"], stats["units"], stats["snapshots"]) == (16, 4 + 2 + 1, 1)
    assert [type(event) for event in cache.events()] == [kvpool.Stored] * 3
    cache.clear()
    assert isinstance(cache.events()[-1], kvpool.Cleared)
    assert cache.name == "units"
    assert cache in kvpool.pools()
    assert "cached=0" in repr(cache)
    assert cache.policy == "lru"


def test_threads_share_a_cache() -> None:
    cache = make(full(), window(9), state(), arena_bytes=1 << 15)
    failures: list[BaseException] = []

    def run(seed: int) -> None:
        random = np.random.default_rng(seed)
        try:
            for _ in range(150):
                prompt = [int(random.integers(3))] * PAGE + [int(token) for token in random.integers(0, 2, 8)]
                with cache.match(prompt) as lease:
                    missing = 3 - lease.length // PAGE
                    taken = cache.arena.alloc({"full": missing, "window": missing, "state": 1})
                    if taken is not None:
                        lease.publish(prompt, taken)
                        assert len(lease.units("full").units) == 3
        except BaseException as error:  # noqa: BLE001 - reported by the test
            failures.append(error)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    cache.verify()
    cache.clear()
    assert wholly_free(cache)


# Sessions


@pytest.mark.parametrize("other", [window(), state()], ids=["window", "state"])
@pytest.mark.parametrize("short", [0, 1])
def test_what_an_ended_session_used_goes_first(other: Group, short: int) -> None:
    cache = make(full(), other, arena_bytes=1 << 15)
    session, old, prompt = cache.session("chat"), list(range(100, 116)), list(range(16))
    compute(cache, old)
    with cache.match(prompt, session=session):
        session.pause("bash")
    compute(cache, prompt, session=session)
    session.end()
    name = cache.arena.layout.groups[short].name
    while cache.group_stats(name)["evicted"] == 0:
        some(cache.arena.alloc({name: 1}))
    assert cache.cached_len(old) == len(old)
    assert cache.cached_len(prompt) < len(prompt)
    cache.verify()


def test_a_turn_supersedes_the_one_that_it_leaves() -> None:
    cache = make(full(), state())
    session, old = cache.session(7), list(range(100, 116))
    compute(cache, old)
    compute(cache, list(range(16)), session=session)
    compute(cache, [*range(8), *range(50, 58)], session=session)
    while cache.group_stats("state")["evicted"] == 0:
        some(cache.arena.alloc({"state": 1}))
    assert cache.cached_len(old) == len(old)
    assert cache.cached_len(list(range(16))) == 0
    assert cache.cached_len([*range(8), *range(50, 58)]) == 16
    cache.verify()


def test_a_session_is_of_one_cache() -> None:
    cache, other = make(full()), make(full())
    session = other.session("chat")
    assert (session.name, repr(session), other.session().name) == ("chat", 'Session(name="chat")', None)
    with pytest.raises(ArgumentError, match="the session is of another prefix cache"):
        cache.match([1, 2, 3, 4], session=session)
    pages = kvpool.PrefixCache(kvpool.TokenToKVPoolAllocator(8, "cpu"))
    with pytest.raises(ArgumentError, match="the session is of another prefix cache"):
        pages.match([1, 2, 3, 4], session=session)
    with pytest.raises(TypeError):
        cache.session(1.5)  # type: ignore[arg-type]
    cache.arena.clear()
    session.pause("user")
    session.end()


def test_a_session_keeps_its_cache_no_longer_than_it_lives() -> None:
    cache = make(full())
    session, reference = cache.session("chat"), weakref.ref(cache.arena)
    del cache
    session.end()
    del session
    gc.collect()
    assert reference() is None


# Requests that wait


def test_what_a_waiting_request_needs_goes_last_of_all_groups() -> None:
    cache = make(full(), window(9), state())
    old, new = list(range(16)), list(range(100, 116))
    compute(cache, old)
    compute(cache, new)
    request = cache.add_waiting([*old, 99], rank=2)
    assert (request.length, request.rank, cache.stats()["waiting"]) == (16, 2, 1)
    while cache.cached_len(new):
        assert cache.arena.alloc({"full": 1, "state": 1}) is not None
        assert cache.cached_len(old) == 16
    # Nothing is locked.
    while cache.cached_len(old):
        assert cache.arena.alloc({"full": 1, "state": 1}) is not None
    cache.verify()


def test_a_clear_of_the_arena_does_not_end_the_wait() -> None:
    cache = make(full())
    compute(cache, list(range(16)))
    request = cache.add_waiting(list(range(16)))
    cache.arena.clear()
    assert (request.update(list(range(16))), cache.stats()["waiting"]) == (0, 1)
    compute(cache, list(range(8)))
    assert request.update(list(range(16))) == request.length == 8
    del request
    assert cache.stats()["waiting"] == 0
    with pytest.raises(ArgumentError, match="-1"):
        cache.add_waiting([-1])
    assert cache.stats()["waiting"] == 0


def test_the_windows_that_a_waiting_request_will_read_are_kept() -> None:
    """The request parts from a prompt where none has ended."""
    cache = make(full(), window(9))
    prompt, other = list(range(24)), list(range(100, 124))
    compute(cache, other)
    with cache.match(prompt) as lease:
        taken = some(cache.arena.alloc({"full": 6, "window": 6}))
        lease.publish(prompt, taken)
    request = cache.add_waiting([*prompt[:12], *[99] * 4])
    assert request.length == 12
    while cache.cached_len(other):
        assert cache.arena.alloc({"window": 1}) is not None
        assert cache.cached_len([*prompt[:12], 99]) == 12
    # Nothing is locked.
    while cache.cached_len(prompt[:12]):
        assert cache.arena.alloc({"window": 1}) is not None
    cache.verify()


def test_windows_beside_a_lease_are_given_up_in_the_end() -> None:
    cache = make(window(9), arena_bytes=1 << 12)
    prompt = list(range(24))
    lease = cache.match(prompt)
    lease.publish(prompt, some(cache.arena.alloc({"window": 6})))
    first, last = cache.add_waiting(prompt[:12]), cache.add_waiting(prompt[:16], rank=1)
    assert (first.length, last.length) == (12, 16)
    unneeded = cache.group_stats("window")["unneeded"]
    last.update(prompt)
    assert cache.group_stats("window")["unneeded"] > unneeded
    last.update(prompt[:16])
    while cache.cached_len(prompt[:16]) == 16:
        assert cache.arena.alloc({"window": 1}) is not None
        assert cache.cached_len(prompt[:12]) == 12
    while cache.cached_len(prompt[:12]):
        assert cache.arena.alloc({"window": 1}) is not None
    assert lease.length == 24
    cache.verify()


def test_a_request_that_runs_leaves_the_end_that_another_waits_for() -> None:
    cache = make(full(), window(9))
    prompt, other = list(range(32)), list(range(100, 116))
    compute(cache, other)
    lease = cache.match(prompt)
    lease.publish(prompt[:16], some(cache.arena.alloc({"full": 4, "window": 4})))
    request = cache.add_waiting([*prompt[:16], 99])
    assert request.length == 16
    lease.publish(prompt, some(cache.arena.alloc({"full": 4, "window": 4})))
    while cache.cached_len(other):
        assert cache.arena.alloc({"window": 1}) is not None
        assert cache.cached_len([*prompt[:16], 99]) == 16
    cache.verify()


def test_ends_that_nobody_waits_for_go_before_what_is_needed() -> None:
    cache = make(full(), window(9))
    old, prompt = list(range(100, 116)), list(range(32))
    compute(cache, old)
    compute(cache, prompt[:16])
    lease = cache.match(prompt)
    lease.publish(prompt, some(cache.arena.alloc({"full": 4, "window": 4})))
    request = cache.add_waiting([*old, 99])
    assert request.length == 16
    while cache.cached_len([*prompt[:16], 99]):
        assert cache.arena.alloc({"window": 1}) is not None
        assert cache.cached_len([*old, 99]) == 16
    cache.verify()
