"""Events of an ArenaPrefixCache: a reader that has nothing else knows where every group can go on."""

from __future__ import annotations

import random
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import pytest
from common import some
from hypothesis import given, settings
from hypothesis import strategies as st

import kvpool
from kvpool import (
    ArenaHostTier,
    ArenaLease,
    ArenaPrefixCache,
    CacheArena,
    CacheLayout,
    Cleared,
    ConfigError,
    Group,
    Plane,
    PrefixCache,
    Removed,
    Stored,
    TokenToKVPoolAllocator,
)
from kvpool.integrations.kv_events import (
    AllBlocksCleared,
    BlockGroup,
    BlockRemoved,
    BlockStored,
    EventBatch,
    EventPublisher,
    EventSubscriber,
    PrefixIndex,
    decode,
    encode,
    messages,
    page_keys,
)
from kvpool.integrations.kv_events.messages import batches, groups_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvpool.typing import Namespace

PAGE = 4
K = [Plane("k", "uint8", (64,))]
FULL = Group("full", "full", [0], K)
WINDOW = Group("window", "window", [1, 2], K, tokens=9)
STATE = Group("state", "state", [3], [Plane("recurrent", "float32", (16,))])
LARGE = [Plane("recurrent", "float32", (256, 64))]

LAYOUTS: dict[str, list[Group]] = {
    "full": [FULL],
    "full and window": [WINDOW, FULL],
    "full and window with sinks": [FULL, Group("window", "window", [1, 2], K, tokens=9, sinks=6)],
    "window": [WINDOW],
    "window of nothing": [Group("window", "window", [1], K, tokens=1)],
    "chunk": [Group("chunk", "chunk", [1], K, tokens=16, sinks=2)],
    "full and chunk": [FULL, Group("chunk", "chunk", [1], K, tokens=16)],
    "full and state": [FULL, STATE],
    "state": [STATE],
    "full and state by layer": [FULL, Group("state", "state", [*range(8)], LARGE)],
    "window and two states": [WINDOW, STATE, Group("other", "state", [4], STATE.planes)],
    "entries of 8 tokens": [Group("full", "full", [0], K, stride=8)],
    "entries of 8 and 16 tokens": [
        Group("full", "full", [0], K, stride=16),
        Group("window", "window", [1], K, tokens=20, stride=8),
    ],
    "entries of 8 tokens and state": [Group("full", "full", [0], K, stride=8), WINDOW, STATE],
}
PATIENCE_S = 60.0
NAMESPACES: list[Namespace] = [None, "a"]


def make(groups: list[Group], slabs: int = 40, tier_bytes: int = 0) -> ArenaPrefixCache:
    """A small cache, which often has to evict."""
    layout = CacheLayout(groups, page_size=PAGE)
    slab_bytes = CacheArena(layout, 1 << 23, "cpu").slabs.slab_bytes
    arena = CacheArena(layout, slabs * slab_bytes, "cpu")
    tiers = [ArenaHostTier(arena, tier_bytes)] if tier_bytes else []
    return ArenaPrefixCache(arena, policy="lru", tiers=tiers, events=True)


def tokens_of(group: Group) -> int:
    """The tokens of a unit."""
    return PAGE if group.kind == "state" else max(PAGE, group.stride)


class Reader:
    """What the events tell. Slow, and near to the words of the documentation."""

    def __init__(self, groups: list[Group], tier: str = "device") -> None:
        self.groups, self.tier = groups, tier
        self.has_states = any(group.kind == "state" for group in groups)
        whole = [group.name for group in groups if group.kind == "full" and tokens_of(group) == PAGE]
        self.pages = whole[0] if whole else None
        self.units: dict[str | None, set[bytes]] = defaultdict(set)

    def apply(self, events: Iterable[Stored | Removed | Cleared]) -> None:
        known = {group.name: group for group in self.groups}
        for event in events:
            if isinstance(event, Cleared):
                self.units.clear()
                continue
            group = None if event.group is None else known[event.group]
            assert event.kind == (None if group is None else group.kind)
            if event.tier != self.tier:
                continue
            units = self.units[event.group]
            if isinstance(event, Removed):
                assert units.issuperset(event.pages)
                units.difference_update(event.pages)
                continue
            assert event.window == (None if group is None else group.tokens)
            each = PAGE if group is None else tokens_of(group)
            assert len(event.tokens) == each * len(event.pages)
            assert units.isdisjoint(event.pages)
            units.update(event.pages)
            if event.group == self.pages:
                assert event.parent is None or event.parent in units

    def cached_len(self, tokens: list[int], namespace: Namespace) -> int:
        keys = [*page_keys(tokens, PAGE, namespace)]

        def has(group: str | None, end: int) -> bool:
            return keys[end // PAGE - 1] in self.units[group]

        def can_go_on(group: Group, end: int) -> bool:
            if group.kind == "state":
                return has(group.name, end)
            each = tokens_of(group)
            if end % each and not self.has_states:
                return False

            def is_seen(token: int) -> bool:
                if token < group.sinks or group.tokens is None:
                    return True
                if group.kind == "window":
                    return token > end - group.tokens
                return token // group.tokens == end // group.tokens

            return all(
                has(group.name, begin + each)
                for begin in range(0, end - each + 1, each)
                if any(map(is_seen, range(begin, begin + each)))
            )

        ends = [end for end in range(PAGE, len(tokens) + 1, PAGE) if has(self.pages, end)]
        return max((end for end in ends if all(can_go_on(group, end) for group in self.groups)), default=0)


class World:
    """A cache, what its readers know, and requests."""

    def __init__(self, groups: list[Group], tier_bytes: int = 0) -> None:
        self.cache = make(groups, slabs=10, tier_bytes=tier_bytes)
        self.groups = groups
        self.reader = Reader(groups)
        self.index = PrefixIndex()
        self.index.clear("a")
        self.leases: list[tuple[list[int], ArenaLease]] = []
        self.taken: list[dict[str, list[Any]]] = []

    def publish(self, tokens: list[int], lease: ArenaLease, chance: random.Random) -> None:
        """Publishes a prompt up to a page, with the units of windows that are needed there, and some more."""
        end = chance.randrange(lease.length, len(tokens) + 1, PAGE) if len(tokens) > lease.length else 0
        if end <= lease.length:
            return
        places: dict[str, list[bool]] = {}
        for group in self.groups:
            each = tokens_of(group)
            if group.kind == "state":
                places[group.name] = [True]
                continue
            seen = end
            if group.tokens is not None:
                seen = min(end, group.tokens - 1) if group.kind == "window" else end % group.tokens
            more = group.kind == "full" or chance.random() < 0.4
            places[group.name] = [
                more or (unit + 1) * each > end - seen or unit * each < group.sinks
                for unit in range(lease.length // each, end // each)
            ]
        if any(group.kind == "state" for group in self.groups) and chance.random() < 0.4:
            places.update({group.name: [] for group in self.groups if group.kind == "state"})
        wanted = {name: sum(units) for name, units in places.items()}
        taken = self.cache.arena.alloc(wanted)
        if taken is None:
            return
        left = {name: iter(units) for name, units in taken.items()}
        units = {name: [next(left[name]) if is_ else None for is_ in each] for name, each in places.items()}
        try:
            lease.publish(tokens[:end], units)
        except kvpool.ArgumentError:  # a snapshot without the window before it
            self.free(taken)

    def free(self, taken: dict[str, list[Any]]) -> None:
        for name, of_group in taken.items():
            self.cache.arena.free(name, of_group)

    def step(self, operation: str, choice: int) -> None:
        chance = random.Random(choice)  # noqa: S311
        namespace = NAMESPACES[choice % 3 == 0]
        if operation == "match" and len(self.leases) < 4:
            prompt = some_prompt(choice)
            self.leases.append((prompt, self.cache.match(prompt, namespace=namespace)))
        elif operation in {"match", "publish"} and self.leases:
            prompt, lease = self.leases[choice % len(self.leases)]
            if not lease.closed:
                self.publish(prompt, lease, chance)
        elif operation == "release" and self.leases:
            self.leases.pop(choice % len(self.leases))[1].release()
        elif operation == "insert":
            with self.cache.match(some_prompt(choice), namespace=namespace) as lease:
                self.publish(some_prompt(choice), lease, chance)
        elif operation == "alloc":
            taken = self.cache.arena.alloc({group.name: chance.randrange(4) for group in self.groups})
            self.taken.extend([] if taken is None else [taken])
        elif operation == "free" and self.taken:
            self.free(self.taken.pop(choice % len(self.taken)))
        elif operation == "clear":
            self.cache.clear(*([] if choice % 2 else [namespace]))
        elif operation == "clear the arena":
            self.cache.arena.clear()
            self.taken.clear()

    def check(self) -> None:
        events = self.cache.events()
        self.reader.apply(events)
        for batch in batches(events, PAGE, groups=groups_of(self.cache)):
            self.index.apply("a", decode(encode(EventBatch(0.0, batch))))
        for number in range(PROMPTS):
            prompt = some_prompt(number)
            for namespace in NAMESPACES:
                cached = self.cache.cached_len(prompt, namespace=namespace)
                assert self.reader.cached_len(prompt, namespace) == cached
                assert self.index.match(prompt, namespace)["a"] == cached


PROMPTS = 12


def some_prompt(number: int) -> list[int]:
    """One of a few prompts that begin alike, in whole pages."""
    chance = random.Random(number % PROMPTS)  # noqa: S311
    tokens = [chance.randrange(3) // 2 for _ in range(chance.randrange(3, 12))]
    return [token for token in tokens for _ in range(PAGE)]


OPERATIONS = ["match"] * 4 + ["publish"] * 4 + ["insert"] * 4 + ["release"] * 2 + ["alloc"] * 3 + ["free"] * 2
operations = st.lists(
    st.tuples(st.sampled_from([*OPERATIONS, "clear", "clear the arena"]), st.integers(0, 1 << 16)),
    max_size=50,
)


@pytest.mark.parametrize("name", LAYOUTS)
@settings(max_examples=30)
@given(history=operations)
def test_readers_know_what_a_match_gives(name: str, history: list[tuple[str, int]]) -> None:
    world = World(LAYOUTS[name])
    for operation, choice in history:
        world.step(operation, choice)
        world.check()


@pytest.mark.parametrize("name", LAYOUTS)
def test_readers_agree_when_memory_is_short(name: str) -> None:
    """Long histories of a cache that evicts most of the time."""
    world, chance = World(LAYOUTS[name]), random.Random(name)  # noqa: S311
    for number in range(300):
        world.step(chance.choice(OPERATIONS), chance.randrange(1 << 16))
        if number % 10 == 0:
            world.check()
    evicted = world.cache.stats()["evicted_units"]
    assert evicted > 5
    world.cache.clear("a")
    world.check()


@pytest.mark.parametrize("name", LAYOUTS)
def test_readers_know_what_the_tier_has(name: str) -> None:
    groups = LAYOUTS[name]
    largest = max(group.entry_bytes * len(group.layers) for group in groups)
    world, chance = World(groups, tier_bytes=8 * max(4096, 2 * largest)), random.Random(name)  # noqa: S311
    readers = world.reader, Reader(groups, "host")
    for number in range(300):
        world.step(chance.choice(OPERATIONS), chance.randrange(1 << 16))
        if number % 10:
            continue
        events = world.cache.events()
        for reader in readers:
            reader.apply(events)
        for prompt in map(some_prompt, range(PROMPTS)):
            here, below = (reader.cached_len(prompt, None) for reader in readers)
            with world.cache.match(prompt) as lease:
                assert (lease.length, lease.loadable) == (here, max(0, below - here))
    world.cache.arena.clear()
    assert any(world.cache.match(some_prompt(number)).loadable for number in range(PROMPTS))
    world.cache.clear()
    assert any(isinstance(event, Cleared) for event in world.cache.events())


def units(events: Iterable[Stored | Removed | Cleared]) -> list[tuple[str, str | None, list[bytes]]]:
    return [
        (type(event).__name__, event.group, event.pages) for event in events if not isinstance(event, Cleared)
    ]


def test_each_unit_is_an_event_of_its_group() -> None:
    cache = make([WINDOW, Group("full", "full", [0], K), Group("long", "full", [5], K, stride=8), STATE])
    arena, prompt = cache.arena, [*range(24)]
    keys = [*page_keys(prompt, PAGE, "a")]
    with cache.match(prompt, namespace="a") as lease:
        taken = some(arena.alloc({"full": 5, "long": 2, "window": 2, "state": 1}))
        lease.publish(prompt[:20], {**taken, "window": [None] * 3 + taken["window"]})
        events = cache.events()
        # Full groups come first, so that pages are known before what is at them.
        assert units(events) == [
            ("Stored", "full", keys[:5]),
            ("Stored", "long", [keys[1], keys[3]]),
            ("Stored", "window", keys[3:5]),
            ("Stored", "state", [keys[4]]),
        ]
        stored = [event for event in events if isinstance(event, Stored)]
        assert [event.parent for event in stored] == [None, None, keys[2], keys[3]]
        assert [event.tokens for event in stored] == [prompt[:20], prompt[:16], prompt[12:20], prompt[16:20]]
        assert [event.kind for event in stored] == ["full", "full", "window", "state"]
        assert [event.window for event in stored] == [None, None, 9, None]
        assert {event.namespace for event in stored} == {"a"}
        assert repr(stored[2]).endswith(", tier='device', group='window')")
        # An entry that began before the publication.
        lease.publish(prompt, some(arena.alloc({"full": 1, "long": 1, "window": 1})))
        events = cache.events()
        assert units(events) == [
            ("Stored", "full", [keys[5]]),
            ("Stored", "long", [keys[5]]),
            ("Stored", "window", [keys[5]]),
        ]
        stored = [event for event in events if isinstance(event, Stored)]
        assert [event.parent for event in stored] == [keys[4], keys[3], keys[4]]
        assert stored[1].tokens == prompt[16:24]
        cache.clear("a")
        assert [(kind, group, set(pages)) for kind, group, pages in units(cache.events())] == [
            ("Removed", "state", {keys[4]}),
            ("Removed", "window", {*keys[3:]}),
            ("Removed", "long", {keys[1], keys[3], keys[5]}),
            ("Removed", "full", {*keys}),
        ]
        # What is published behind a cleared prefix is not found.
        with cache.match(prompt, namespace="a") as other:
            assert other.length == 0
    assert cache.events() == []
    assert repr(events[-1]).endswith("group='window')")


def test_units_that_fill_a_gap_are_stored_again() -> None:
    cache = make([FULL, WINDOW])
    arena, prompt = cache.arena, [*range(32)]
    keys = [*page_keys(prompt, PAGE)]
    with cache.match(prompt) as lease:
        lease.publish(prompt[:16], some(arena.alloc({"full": 4, "window": 4})))
        lease.publish(prompt, some(arena.alloc({"full": 4, "window": 4})))
    cache.events()
    taken = []
    while cache.group_stats("window")["unneeded"]:
        taken += some(arena.alloc({"window": 1}))["window"]
    gone = units(cache.events())
    assert {(kind, group) for kind, group, _ in gone} == {("Removed", "window")}
    assert {key for _, _, pages in gone for key in pages} == {*keys[:6]}
    assert cache.cached_len(prompt[:16]) == 0
    arena.free("window", taken)
    with cache.match(prompt[:16]) as lease:
        assert lease.length == 0
        again = some(arena.alloc({"full": 4, "window": 3}))
        first, *rest = again["window"]
        lease.publish(prompt[:16], {"full": again["full"], "window": [first, None, *rest]})
    stored = [event for event in cache.events() if isinstance(event, Stored)]
    assert units(stored) == [("Stored", "window", keys[:1]), ("Stored", "window", keys[2:4])]
    assert [event.parent for event in stored] == [None, keys[1]]
    assert [event.tokens for event in stored] == [prompt[:4], prompt[8:16]]
    arena.clear()
    assert [type(event) for event in cache.events()] == [Cleared]


def test_pages_are_told_where_no_group_has_each() -> None:
    prompt = [*range(16)]
    keys = [*page_keys(prompt, PAGE)]
    cache = make([WINDOW])
    with cache.match([]) as lease:
        taken = some(cache.arena.alloc({"window": 2}))["window"]
        lease.publish(prompt, {"window": [None, None, *taken]})
    first, second = cache.events()
    assert isinstance(first, Stored)
    assert (first.group, first.kind, first.window, first.tokens) == (None, None, None, prompt)
    assert units([first, second]) == [("Stored", None, keys), ("Stored", "window", keys[2:])]


def test_a_reader_that_is_late_starts_over() -> None:
    size = 1 << 21
    layout = CacheLayout([FULL, Group("other", "full", [1], K)], page_size=1 << 16)
    cache = ArenaPrefixCache(CacheArena(layout, 1 << 30, "cpu"), events=True)
    with cache.match([]) as lease:
        count = size >> 16
        lease.publish([7] * size, some(cache.arena.alloc({"full": count, "other": count})))
    cleared, rest = cache.events()
    assert isinstance(cleared, Cleared)
    assert units([rest])[0][:2] == ("Stored", "other")


def test_events_of_a_prefix_cache_have_no_group() -> None:
    allocator = TokenToKVPoolAllocator(64, "cpu", page_size=4)
    cache = PrefixCache(allocator, events=True)
    cache.insert(range(8), some(allocator.alloc(8)))
    cache.evict(4)
    stored, removed = cache.events()
    assert isinstance(stored, Stored)
    assert isinstance(removed, Removed)
    assert (stored.group, stored.kind, stored.window) == (removed.group, removed.kind, None) == (None,) * 3
    assert repr(removed) == "Removed(1 pages, tier='device')"


# Messages and the index


def test_messages_have_the_fields_of_vllm() -> None:
    cache = make([FULL, WINDOW, STATE])
    prompt = [*range(8)]
    keys: list[bytes | int] = [*page_keys(prompt, PAGE, "a")]
    groups = groups_of(cache)
    assert groups == [
        BlockGroup("full", "full", PAGE),
        BlockGroup("window", "window", PAGE, 9),
        BlockGroup("state", "state", PAGE),
    ]
    with cache.match(prompt, namespace="a") as lease:
        lease.publish(prompt, some(cache.arena.alloc({"full": 2, "window": 2, "state": 1})))
    cache.clear("a")
    [batch] = batches(cache.events(), PAGE, groups=groups)
    told: dict[str, Any] = {"page_size": PAGE, "groups": groups, "extra_keys": [("a",), None]}
    stored = keys, None, prompt, PAGE, None, "GPU", None
    assert decode(encode(EventBatch(0.0, batch))).events == [
        BlockStored(*stored, group_idx=0, kv_cache_spec_kind="full_attention", **told),
        BlockStored(
            *stored,
            group_idx=1,
            extra_keys=[("a",), None],
            kv_cache_spec_kind="sliding_window",
            kv_cache_spec_sliding_window=9,
        ),
        BlockStored(
            keys[1:], keys[0], prompt[4:], PAGE, None, "GPU", None, group_idx=2, kv_cache_spec_kind="mamba"
        ),
        BlockRemoved(keys[1:], "GPU", 2),
        BlockRemoved(keys, "GPU", 1),
        BlockRemoved(keys, "GPU", 0),
    ]


def test_each_message_names_the_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make([FULL, WINDOW])
    for first in (0, 50):
        prompt = [*range(first, first + 16)]
        with cache.match(prompt) as lease:
            lease.publish(prompt, some(cache.arena.alloc({"full": 4, "window": 4})))
    with monkeypatch.context() as patched:
        patched.setattr(messages, "BATCH_TOKENS", 8)
        parts = [*batches(cache.events(), PAGE, groups=groups_of(cache))]
    assert len(parts) == 8
    assert all(isinstance(part[0], BlockStored) and part[0].groups for part in parts)
    cache.clear()
    with cache.match([1] * 4) as lease:
        lease.publish([1] * 4, some(cache.arena.alloc({"full": 1, "window": 1})))
    [[cleared, first_stored, second]] = batches(cache.events(), PAGE, groups=groups_of(cache))
    assert isinstance(cleared, AllBlocksCleared)
    assert [event.groups is None for event in (first_stored, second)] == [False, True]  # type: ignore[union-attr]


@pytest.mark.parametrize("int_hashes", [False, True])
def test_a_publisher_sends_what_an_arena_has(int_hashes: bool) -> None:
    cache = make([FULL, WINDOW, STATE])
    prompt, index = [*range(32)], PrefixIndex()
    with (
        EventPublisher(
            cache,
            endpoint="tcp://127.0.0.1:*",
            replay_endpoint="tcp://127.0.0.1:*",
            int_hashes=int_hashes,
        ) as publisher,
        EventSubscriber(index) as subscriber,
    ):
        with cache.match(prompt) as lease:
            lease.publish(prompt[:16], some(cache.arena.alloc({"full": 4, "window": 4, "state": 1})))
            lease.publish(prompt, some(cache.arena.alloc({"full": 4, "window": 4})))
        publisher.publish()
        subscriber.connect("a", publisher.endpoint, publisher.replay_endpoint)
        ends = time.monotonic() + PATIENCE_S
        while index.match(prompt)["a"] != 16:
            assert time.monotonic() < ends
            subscriber.poll(0.1)
        assert cache.cached_len(prompt) == 16
        assert index.match(prompt, tier="host") == {"a": 0}


def stored_in(group: int | None, key: bytes, size: int = PAGE, **more: Any) -> BlockStored:  # noqa: ANN401
    return BlockStored([key], None, [1] * size, size, None, "GPU", None, group_idx=group, **more)


def test_groups_that_are_not_named_are_apart() -> None:
    """vLLM sends numbers of groups, and not what they are."""
    index, prompt = PrefixIndex(), [1] * 8
    first, second = page_keys(prompt, PAGE)

    def apply(*events: BlockStored | BlockRemoved) -> int:
        index.apply("a", EventBatch(0.0, [*events]))
        return index.match(prompt)["a"]

    assert apply(stored_in(1, second, 8), stored_in(0, first), stored_in(0, second)) == 8
    assert apply(BlockRemoved([second], "GPU", 1)) == 8
    assert apply(BlockRemoved([second], "GPU", 7)) == 8
    assert apply(BlockRemoved([second], "GPU", 0)) == 4
    assert index.stats()["pages"] == 1


ONE = [BlockGroup("full", "full", PAGE)]
KEY = bytes(32)


@pytest.mark.parametrize(
    "event",
    [
        stored_in(-1, KEY),
        stored_in(63, KEY),
        BlockRemoved([KEY], "GPU", 1 << 40),
        stored_in(1, KEY, page_size=PAGE, groups=ONE),
        stored_in(0, KEY, 8, page_size=PAGE, groups=ONE),
        stored_in(0, KEY, groups=ONE),
        stored_in(0, KEY, page_size=0, groups=ONE),
        stored_in(0, KEY, page_size=3, groups=ONE),
        stored_in(0, KEY, page_size=PAGE, groups=[]),
        stored_in(0, KEY, page_size=PAGE, groups=ONE * 64),
        stored_in(0, KEY, page_size=PAGE, groups=[BlockGroup("full", "half", PAGE)]),
        stored_in(0, KEY, page_size=PAGE, groups=[BlockGroup("full", "full", 0)]),
        stored_in(0, KEY, page_size=PAGE, groups=[BlockGroup("full", "full", PAGE, 5)]),
        stored_in(0, KEY, page_size=PAGE, groups=[BlockGroup("window", "window", PAGE)]),
        stored_in(0, KEY, page_size=PAGE, groups=[BlockGroup("window", "window", PAGE, 5, -1)]),
    ],
    ids=range(15),
)
def test_groups_that_do_not_fit_change_nothing(event: BlockStored | BlockRemoved) -> None:
    index = PrefixIndex()
    [key] = page_keys([1] * PAGE, PAGE)
    with pytest.raises(ConfigError):
        index.apply("a", EventBatch(0.0, [stored_in(0, key), event]))
    assert index.match([1] * PAGE) == {}
    index.apply("a", EventBatch(0.0, [stored_in(0, key, page_size=PAGE, groups=ONE)]))
    changed = [BlockGroup("full", "full", PAGE), BlockGroup("state", "state", PAGE)]
    with pytest.raises(ConfigError, match="have changed"):
        index.apply("a", EventBatch(0.0, [stored_in(0, key, page_size=PAGE, groups=changed)]))
    assert index.match([1] * PAGE) == {"a": PAGE}
