"""KV events: the format, the index against caches, lost messages, restarts, sockets, misuse."""

from __future__ import annotations

import gc
import itertools
import logging
import math
import os
import random
import socket
import struct
import sys
import threading
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import zmq
from blake3 import blake3
from common import some
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_event_checks import KEYS, MAX_BYTES, SAMPLES, check_payload
from msgspec.msgpack import Ext
from tier_scene import Scene

import kvpool
from kvpool import ArgumentError, ConfigError, PrefixCache, StateError, TokenToKVPoolAllocator
from kvpool.integrations.kv_events import (
    AllBlocksCleared,
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
from kvpool.integrations.kv_events import publisher as publishers
from kvpool.integrations.kv_events.feed import Feed
from kvpool.integrations.kv_events.messages import BATCH_TOKENS, MAX_LISTED, batches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from shared_fixtures import RunSnippet

    from kvpool.typing import Namespace

FUZZ = Path(__file__).parent.parent / "fuzz"
KEPT = sorted(FUZZ.glob("corpus/kv_events/*")) + sorted(FUZZ.glob("findings/kv_events/*"))
ANY_PORT = "tcp://127.0.0.1:*"
PATIENCE_S = 60.0
NAMESPACES: list[Namespace] = [None, "a", b"a", 7, 1 << 70]


def make_cache(page_size: int = 4, size: int = 64, device: str = "cpu") -> PrefixCache:
    return PrefixCache(TokenToKVPoolAllocator(size, device, page_size), events=True)


def insert(cache: PrefixCache, prompt: Sequence[int], namespace: Namespace = None) -> None:
    """Publishes the whole pages of a prompt, if it fits."""
    size = cache.allocator.page_size
    whole = [*prompt[: len(prompt) // size * size]]
    slots = cache.allocator.alloc(len(whole)) if whole else None
    if slots is not None:
        cache.insert(whole, slots, namespace=namespace)


def payload_of(cache: PrefixCache, *, int_hashes: bool = False) -> bytes:
    """The changes of a cache since the last call, as one payload."""
    parts = batches(cache.events(), cache.allocator.page_size, int_hashes=int_hashes)
    return encode(EventBatch(time.time(), [event for part in parts for event in part]))


# The format


def test_events_have_the_expected_fields() -> None:
    cache = make_cache()
    insert(cache, range(8), "a")
    insert(cache, [*range(8), *range(50, 54)], "a")
    cache.evict(4)
    first, second, gone = decode(payload_of(cache)).events
    keys: list[bytes | int] = [*page_keys([*range(8), *range(50, 54)], 4, "a")]
    tokens = [*range(8)]
    assert first == BlockStored(keys[:2], None, tokens, 4, None, "GPU", None, [("a",), None])
    assert second == BlockStored(keys[2:], keys[1], [50, 51, 52, 53], 4, None, "GPU", None)
    assert gone == BlockRemoved([keys[2]], "GPU")
    cache.clear()
    assert decode(payload_of(cache)).events == [AllBlocksCleared()]
    assert [*batches([], 4)] == []


@pytest.mark.parametrize("namespace", NAMESPACES, ids=repr)
def test_keys_are_those_of_the_cache(namespace: Namespace) -> None:
    for size in (1, 4, 16):
        cache = make_cache(size)
        insert(cache, range(37), namespace)
        [stored] = cache.events()
        assert isinstance(stored, kvpool.Stored)
        assert [*page_keys(range(37), size, namespace)] == stored.pages
    [root_chained] = page_keys([1], 1, True)
    root = blake3(struct.pack("<QB", 1, 1) + b"1").digest()
    assert root_chained == blake3(root + struct.pack("<i", 1)).digest()


def test_namespaces_are_told_where_a_prompt_begins() -> None:
    for namespace in NAMESPACES:
        cache = make_cache()
        insert(cache, range(4), namespace)
        [stored] = decode(payload_of(cache)).events
        assert isinstance(stored, BlockStored)
        salt = str(namespace) if namespace == 1 << 70 else namespace
        assert stored.extra_keys == (None if namespace is None else [(salt,)])


@pytest.mark.parametrize("size", [1, 16])
def test_long_prompts_are_several_batches_of_bounded_size(size: int) -> None:
    count = 2 * BATCH_TOKENS + 3 * size
    cache = make_cache(size, count)
    prompt = [number % 50_000 for number in range(count)]
    insert(cache, prompt, "a")
    parts = [*batches(cache.events(), size)]
    assert all(part[0].extra_keys is None for part in parts[1:])  # type: ignore[union-attr]
    cache.evict(count)
    parts += batches(cache.events(), size)
    index = PrefixIndex()
    lengths = []
    for part in parts:
        assert len(part) == 1
        payload = encode(EventBatch(0.0, part))
        assert len(payload) < 3 << 20
        index.apply("a", decode(payload))
        lengths.append(index.match(prompt, "a")["a"])
    assert lengths[0] == BATCH_TOKENS
    assert max(lengths) == count
    assert lengths[-1] == 0


# Refusals


@given(payload=st.binary(max_size=300))
def test_any_bytes_are_a_batch_or_an_error(payload: bytes) -> None:
    check_payload(payload)


@settings(max_examples=200)
@given(
    sample=st.sampled_from(SAMPLES),
    changes=st.lists(
        st.tuples(st.integers(0, 500), st.integers(0, 6), st.binary(max_size=6)), min_size=1, max_size=3
    ),
)
def test_a_mutated_batch_is_a_batch_or_an_error(
    sample: EventBatch, changes: list[tuple[int, int, bytes]]
) -> None:
    payload = encode(sample)
    for at, gone, new in changes:
        start = at % (len(payload) + 1)
        payload = payload[:start] + new + payload[start + gone :]
    check_payload(payload)


@pytest.mark.parametrize("path", KEPT, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_seeds_and_findings_are_batches_or_errors(path: Path) -> None:
    check_payload(path.read_bytes())


def test_there_are_seeds_of_both_kinds() -> None:
    found = [check_payload(path.read_bytes()) is None for path in KEPT]
    assert 0 < sum(found) < len(found)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\x80",
        encode(SAMPLES[0])[:-1],
        encode(SAMPLES[0]) + b"\0",
        encode(EventBatch(0.0, [BlockStored(KEYS[:1], None, [1], 1, None, None, None, [(Ext(1, b""),)])])),
        encode(SAMPLES[0]).replace(b"BlockStored", b"BlockStorxd"),
        encode(SAMPLES[0]).replace(b"block_size", b"block_sizx"),
        b"\x93\x01\xdd\xff\xff\xff\xff",  # an array of 4 billion events
        b"\x93\x01" + b"\x91" * 100_000,
        b"\x92\x01\x91\x82\xa4type\xb0AllBlocksCleared\x01" + b"\x91" * 100_000,
        b"\x93\x01\x91\x81\xa4type\xa3\xff\xff\xff\xc0",
        bytes(MAX_BYTES + 1),
    ],
)
def test_malformed_payloads_are_config_errors(payload: bytes) -> None:
    with pytest.raises(ConfigError, match="batch"):
        decode(payload)
    with pytest.raises(ConfigError, match="larger than 3"):
        decode(b"\x93\x01\x90\xc0", max_bytes=3)


def stored(keys: list[bytes | int], size: int, tokens: list[int]) -> BlockStored:
    return BlockStored(keys, None, tokens, size, None, "GPU", None)


@pytest.mark.parametrize(
    "events",
    [
        [stored(KEYS, 1, [1, 2])],
        [stored(KEYS, 0, [])],
        [stored(KEYS, -1, [])],
        [stored([], 1, [])],
        [stored([b"short"], 1, [1])],
        [stored([KEYS[0], 5], 1, [1, 2])],
        [stored([5], 1, [1])],
        [stored([KEYS[0]], 2, [1, 2])],
        [BlockRemoved([b""], "GPU")],
        [AllBlocksCleared(), stored([5], 1, [1]), stored([6], 2, [1, 2])],
    ],
    ids=range(10),
)
def test_batches_that_do_not_fit_change_nothing(events: list[Any]) -> None:
    index = PrefixIndex()
    first = stored([*page_keys([1], 1)], 1, [1])
    index.apply("a", EventBatch(0.0, [first]))
    with pytest.raises(ConfigError):
        index.apply("a", EventBatch(0.0, [stored([KEYS[0]], 1, [1]), *events]))
    with pytest.raises(ConfigError):
        index.apply("b", EventBatch(0.0, [first, *events]))
    assert index.stats() == {"workers": 1, "pages": 1, "left_out": 0}
    assert index.match([1]) == {"a": 1}


def test_questions_that_make_no_sense_are_refused() -> None:
    index = PrefixIndex()
    for tokens in ([-1], [1 << 31], [1, 1 << 70]):
        with pytest.raises(ConfigError, match="token"):
            index.match(tokens)
    with pytest.raises(TypeError):
        index.match(["a"])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="namespace"):
        index.match([1], 1.5)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="tier"):
        index.match([1], tier="disk")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="max_pages"):
        PrefixIndex(max_pages=0)
    with pytest.raises(ConfigError, match="page_size"):
        page_keys([1], 0)


# The index


def test_an_index_knows_tiers_kinds_of_hashes_and_limits() -> None:
    keys: list[bytes | int] = [*page_keys(range(12), 4)]
    tokens = [*range(12)]
    index = PrefixIndex(max_pages=2)
    index.apply("a", EventBatch(0.0, [BlockStored(keys, None, tokens, 4, None, "CPU", None)]))
    assert index.match(tokens) == index.match(tokens, tier="host") == {"a": 8}
    assert index.stats() == {"workers": 1, "pages": 2, "left_out": 1}
    events = [BlockStored(keys[:1], None, tokens[:4], 4, None, medium, None) for medium in ("GPU", "DISK")]
    index.apply("a", EventBatch(0.0, [*events]))
    assert [index.match(tokens, tier=tier)["a"] for tier in ("device", "host", "store")] == [4, 8, 4]
    index.apply("a", EventBatch(0.0, [BlockRemoved(keys, "CPU")]))
    assert index.match(tokens) == {"a": 4}
    index.apply("a", EventBatch(0.0, [BlockRemoved(keys, None), BlockRemoved(keys, "STORAGE")]))
    assert index.stats()["pages"] == 0
    assert index.match([]) == {"a": 0}
    # Other sizes of pages and kinds of hashes in one index, and a worker that changes both.
    cache = make_cache(1)
    insert(cache, range(3))
    index.apply("b", decode(payload_of(cache, int_hashes=True)))
    index.apply("a", EventBatch(0.0, [AllBlocksCleared(), stored(keys[:1], 4, tokens[:4])]))
    assert index.match(range(12)) == {"a": 4, "b": 2}
    index.remove("a")
    index.remove("nobody")
    assert index.match(range(12)) == {"b": 2}
    index.clear("b")
    assert index.match(range(12)) == {"b": 0}


@pytest.mark.usefixtures("device")
def test_tokens_may_be_in_any_form(as_index: Callable[[Sequence[int]], Any]) -> None:
    cache = make_cache(2)
    insert(cache, range(6))
    index = PrefixIndex()
    index.apply("a", decode(payload_of(cache)))
    assert index.match([*range(7)]) == {"a": 6}
    values = as_index([*range(7)])
    if getattr(values, "ndim", 1) == 1:
        assert index.match(values) == {"a": 6}


class Worker:
    """A cache, and the batches that it has sent in this life."""

    def __init__(self, page_size: int, *, kept: int, int_hashes: bool) -> None:
        self.page_size = page_size
        self.kept = kept
        self.int_hashes = int_hashes
        self.begin()

    def begin(self) -> None:
        self.cache = make_cache(self.page_size, 16 * self.page_size)
        self.sent: list[bytes] = []

    def publish(self) -> None:
        for part in batches(self.cache.events(), self.page_size, int_hashes=self.int_hashes):
            self.sent.append(encode(EventBatch(random.random(), part)))  # noqa: S311 - when it was

    def replay(self, feed: Feed, *, is_whole: bool = True) -> None:
        start = feed.begin_replay()
        batches = [*enumerate(self.sent)][-self.kept :] if self.kept else []
        for number, payload in batches if is_whole else batches[: len(batches) // 2]:
            if number >= start:
                feed.replayed(number, payload)
        feed.replay_ended(is_whole=is_whole)


operations = st.lists(
    st.tuples(
        st.integers(0, 2),  # a worker
        st.sampled_from(
            ["insert"] * 6
            + ["evict", "clear", "publish", "publish", "restart"]
            + ["deliver", "deliver", "lose", "lose", "reconnect", "fail"]
        ),
        st.integers(0, 1 << 16),
    ),
    max_size=60,
)


def some_prompt(number: int, page_size: int) -> list[int]:
    """One of a few prompts that begin alike."""
    chance = random.Random(number % 97)  # noqa: S311
    return [chance.randrange(2) for _ in range(chance.randrange(1, 9 * page_size))]


class Network:
    """Workers, a router, and messages on their way."""

    def __init__(self, workers: list[Worker], *, can_replay: bool) -> None:
        self.index = PrefixIndex()
        self.workers = workers
        self.feeds = [Feed(self.index, str(number), can_replay=can_replay) for number in range(len(workers))]
        self.at = [0] * len(workers)  # the next message of each

    def apply(self, number: int, operation: str, choice: int) -> None:
        worker, feed = self.workers[number], self.feeds[number]
        namespace = (None, "a", 7)[choice % 3]
        if operation == "insert":
            insert(worker.cache, some_prompt(choice, worker.page_size), namespace)
        elif operation == "evict":
            worker.cache.evict(choice % (4 * worker.page_size))
        elif operation == "clear":
            worker.cache.clear(namespace)
        elif operation == "publish":
            worker.publish()
        elif operation == "fail" and feed.needs_replay:
            worker.replay(feed, is_whole=False)
        elif operation == "reconnect":
            feed.reconnected()
        else:
            self.move(number, operation)

    def move(self, number: int, operation: str) -> None:
        worker, feed = self.workers[number], self.feeds[number]
        if operation == "restart":
            worker.begin()
            self.at[number] = 0
            feed.reconnected()
        elif operation == "lose":
            self.at[number] = len(worker.sent)
        elif operation == "deliver":
            self.settle(number)
            for place in range(self.at[number], len(worker.sent)):
                feed.message(place, worker.sent[place])
                self.settle(number)
            self.at[number] = len(worker.sent)

    def settle(self, number: int) -> None:
        """Replays until nothing is asked for."""
        for _ in range(5):
            if not self.feeds[number].needs_replay:
                return
            self.workers[number].replay(self.feeds[number])
        raise AssertionError("it asks again and again")

    def publish_everywhere(self, prompts: Sequence[int]) -> None:
        """Has each worker publish a prompt, and delivers that."""
        for number, worker in enumerate(self.workers):
            insert(worker.cache, [*prompts] * worker.page_size)
            worker.publish()
            self.move(number, "deliver")

    def check(self, *, is_exact: bool) -> None:
        """The index has of all prompts what the caches have, or no more than that."""
        for seed in range(97):
            for namespace in (None, "a", 7):
                for number, worker in enumerate(self.workers):
                    prompt = some_prompt(seed, worker.page_size)
                    cached = worker.cache.cached_len(prompt, namespace=namespace)
                    found = self.index.match(prompt, namespace, tier="device")[str(number)]
                    assert found == cached if is_exact else found <= cached


@settings(max_examples=20)  # long ones
@given(
    history=operations,
    sizes=st.permutations([1, 4, 16]),
    int_hashes=st.booleans(),
    kept=st.sampled_from([0, 2, 1000]),
    can_replay=st.booleans(),
)
def test_histories_agree_with_the_caches(
    history: list[tuple[int, str, int]], sizes: list[int], int_hashes: bool, kept: int, can_replay: bool
) -> None:
    workers = [Worker(size, kept=kept, int_hashes=int_hashes) for size in sizes]
    network = Network(workers, can_replay=can_replay)
    for number, operation, choice in history:
        network.apply(number, operation, choice)
    network.publish_everywhere([0, 1])
    network.check(is_exact=False)
    for number, feed in enumerate(network.feeds):
        feed.check()
        network.settle(number)
    network.check(is_exact=can_replay and kept == 1000)
    # Whatever was lost, what is new is known.
    for worker in workers:
        worker.cache.clear()
    network.publish_everywhere([1, 1])
    network.check(is_exact=True)


def test_a_worker_that_restarts_is_noticed_whatever_its_numbers() -> None:
    # The new life has as many batches as the old one when its first message arrives.
    for count in range(4):
        index = PrefixIndex()
        worker = Worker(1, kept=1000, int_hashes=False)
        feed = Feed(index, "a", can_replay=True)
        worker.replay(feed)
        for number in range(2):
            insert(worker.cache, [number])
            worker.publish()
            feed.message(number, worker.sent[number])
        assert index.match([1]) == {"a": 1}
        worker.begin()
        for number in range(count):
            insert(worker.cache, [10 + number])
            worker.publish()
        feed.reconnected()
        while feed.needs_replay:
            worker.replay(feed)
        assert index.match([1]) == index.match([0]) == {"a": 0}
        assert index.stats()["pages"] == count
        assert feed.restarts == 1
        assert feed.drops == 0


def test_a_message_that_counts_back_is_of_another_life() -> None:
    for can_replay in (False, True):
        index = PrefixIndex()
        feed = Feed(index, "a", can_replay=can_replay)
        if can_replay:
            feed.begin_replay()
            feed.replay_ended()
        for number in (0, 1, 0):
            feed.message(number, encode(EventBatch(0.0, [stored([KEYS[number]], 1, [1])])))
        assert index.stats()["pages"] == 1
        assert (feed.restarts, feed.applied, feed.needs_replay) == (1, 3, False)


def test_a_replay_may_be_given_up_for_another() -> None:
    index = PrefixIndex()
    old, new = Worker(1, kept=1000, int_hashes=False), Worker(1, kept=1000, int_hashes=False)
    for number in range(4):
        for worker, token in ((old, number), (new, 10 + number)):
            insert(worker.cache, [token])
            worker.publish()
    feed = Feed(index, "a", can_replay=True)
    last = old.sent.pop()
    old.sent.pop()
    old.replay(feed)
    feed.message(3, last)  # a gap: the replay begins, and the worker ends
    assert feed.begin_replay() == 1
    feed.replayed(1, new.sent[1])
    feed.reconnected()
    new.sent = new.sent[:2]
    while feed.needs_replay:
        new.replay(feed)
    assert [index.match([token])["a"] for token in (0, 1, 2, 3, 10, 11, 12, 13)] == [0] * 4 + [1, 1, 0, 0]
    assert (feed.restarts, feed.drops) == (1, 0)


def test_a_replay_that_lacks_batches_drops_what_was_before() -> None:
    batches = [encode(EventBatch(0.0, [stored([*page_keys([token], 1)], 1, [token])])) for token in range(9)]

    def replay(feed: Feed, *numbers: int) -> list[int]:
        feed.begin_replay()
        for number in numbers:
            feed.replayed(number, batches[number])
        feed.replay_ended()
        return [token for token in range(9) if index.match([token])["a"]]

    index = PrefixIndex()
    feed = Feed(index, "a", can_replay=True)
    assert replay(feed, 0, 1) == [0, 1]
    assert replay(feed, 1, 2) == [0, 1, 2]
    assert replay(feed, 2, 1, 2, 3) == [0, 1, 2, 3]
    assert (feed.applied, feed.drops) == (4, 0)
    assert replay(feed, 3, 5, 6) == [5, 6]  # 4 is missing
    assert replay(feed, 7, 8) == [7, 8]  # whether 6 is the same is not known any more
    assert (feed.drops, feed.restarts, feed.refused) == (2, 0, 0)


def test_a_batch_that_is_refused_clears_its_worker() -> None:
    index = PrefixIndex()
    feed = Feed(index, "a", can_replay=False)
    batch = encode(EventBatch(0.0, [stored([*page_keys([1], 1)], 1, [1])]))
    feed.message(0, batch)
    assert index.match([1]) == {"a": 1}
    feed.message(1, b"nonsense")
    assert index.match([1]) == {"a": 0}
    feed.message(2, batch)
    assert index.match([1]) == {"a": 1}
    assert (feed.applied, feed.refused, feed.drops) == (2, 1, 0)


def test_the_host_tier_is_told_apart(device: str) -> None:
    scene = Scene(device, events=True)
    index = PrefixIndex()
    prompts = [[seed, *range(1, 24)] for seed in range(4)]
    for count, prompt in enumerate(prompts):
        scene.keep(prompt)
        scene.settle()
        scene.cache.evict(4 * count)
        scene.settle()
        index.apply("a", decode(payload_of(scene.cache)))
        for other in prompts:
            with scene.cache.match(other) as lease:
                assert index.match(other, tier="device") == {"a": lease.length}
                assert index.match(other) == {"a": lease.length + lease.loadable}
    assert any(scene.cache.cached_len(prompt) < index.match(prompt)["a"] for prompt in prompts)
    assert all(index.match(prompt, tier="host") == {"a": 24} for prompt in prompts)
    scene.cache.clear()
    index.apply("a", decode(payload_of(scene.cache)))
    assert index.stats()["pages"] == 0
    scene.end()


# The sockets


@pytest.fixture(name="index")
def empty_index() -> PrefixIndex:
    return PrefixIndex()


@pytest.fixture
def subscriber(index: PrefixIndex) -> Iterator[EventSubscriber]:
    with EventSubscriber(index, replay_timeout_s=PATIENCE_S, check_s=PATIENCE_S) as subscriber:
        yield subscriber


def wait_until(subscriber: EventSubscriber, holds: Callable[[], bool]) -> None:
    """Polls until something holds."""
    ends = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < ends
        subscriber.poll(0.05)


def open_publisher(cache: PrefixCache, **options: Any) -> EventPublisher:  # noqa: ANN401
    return EventPublisher(cache, **{"endpoint": ANY_PORT, "replay_endpoint": ANY_PORT, **options})


def open_again(endpoints: dict[str, Any], cache: PrefixCache | None = None) -> EventPublisher:
    """A publisher where another was, whose sockets ZeroMQ closes in a thread of its own."""
    ends = time.monotonic() + PATIENCE_S
    while True:
        try:
            return open_publisher(cache or make_cache(), **endpoints)
        except ConfigError as error:
            if "in use" not in str(error) or time.monotonic() > ends:
                raise
            time.sleep(0.01)


def test_messages_and_replays_have_the_parts_that_vllm_sends() -> None:
    cache = make_cache()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    with (
        open_publisher(cache, topic="kv", data_parallel_rank=2, buffer_steps=3) as publisher,
        context.socket(zmq.SUB) as messages,
        context.socket(zmq.DEALER) as replays,
    ):
        messages.subscribe(b"kv")
        messages.connect(publisher.endpoint)
        replays.connect(some(publisher.replay_endpoint))
        # The first batch has the present contents; none is lost once a subscription was seen.
        while not messages.poll(20):
            insert(cache, [random.randrange(100) for _ in range(8)])  # noqa: S311
            cache.evict(8)
            publisher.publish()
        topic, number, payload = messages.recv_multipart()
        assert topic == b"kv"
        assert len(number) == 8
        assert decode(payload).data_parallel_rank == 2
        for _ in range(6):
            insert(cache, range(8))
            cache.clear()
            assert publisher.publish() == 1
        assert publisher.publish() == 0
        last = publisher.stats()["batches"] - 1
        # Others than right requests are refused, and the right ones answered.
        for wrong in ([b"", b"123"], [b"", bytes(8), b""], [bytes(8)], [b"x", bytes(8)]):
            replays.send_multipart(wrong)
        replays.send_multipart([b"", (last - 1).to_bytes(8, "big")])
        found = [replays.recv_multipart() for _ in range(3)]
        assert [parts[:2] for parts in found] == [[b"", b"kv"], [b"", b"kv"], [b"", b""]]
        numbers = [int.from_bytes(parts[2], "big", signed=True) for parts in found]
        assert numbers == [last - 1, last, -1]
        assert found[2][3] == b""
        replays.send_multipart([b"", bytes(8)])
        found = [replays.recv_multipart() for _ in range(4)]
        assert int.from_bytes(found[0][2], "big") == last - 2
        stats = publisher.stats()
        assert (stats["buffered"], stats["replays"], stats["refused"], stats["stalls"]) == (3, 2, 4, 0)


def test_a_subscriber_follows_several_workers(
    index: PrefixIndex, subscriber: EventSubscriber, tmp_path: Path
) -> None:
    places = [("tcp://127.0.0.1:0", ANY_PORT), (f"ipc://{tmp_path}/a", f"ipc://{tmp_path}/b")]
    places.append(("inproc://kv", "inproc://replays"))
    caches = [make_cache(size) for size in (1, 4, 16)]
    publishers = []
    for cache, (endpoint, replay) in zip(caches, places, strict=True):
        insert(cache, range(16), "before")
        publishers.append(open_publisher(cache, endpoint=endpoint, replay_endpoint=replay))
        publishers[-1].publish()
    for number, publisher in enumerate(publishers):
        subscriber.connect(str(number), publisher.endpoint, publisher.replay_endpoint)
    assert index.match(range(16), "before") == {"0": 0, "1": 0, "2": 0}
    # Without another message: a replay brings it.
    wait_until(subscriber, lambda: index.match(range(16), "before") == {"0": 16, "1": 16, "2": 16})
    chance = random.Random(1)  # noqa: S311
    for _ in range(300):
        cache = chance.choice(caches)
        insert(cache, some_prompt(chance.randrange(97), cache.allocator.page_size))
        if chance.random() < 0.05:
            cache.clear()
        publishers[caches.index(cache)].publish()
        subscriber.poll()
    for seed in range(97):
        for number, cache in enumerate(caches):
            prompt = some_prompt(seed, cache.allocator.page_size)
            want = cache.cached_len(prompt)
            wait_until(subscriber, lambda p=prompt, n=number, w=want: index.match(p)[str(n)] == w)  # type: ignore[misc]
    wait_until(subscriber, lambda: subscriber.stats()["connected"] == 2)
    stats = subscriber.stats()
    assert (stats["workers"], stats["refused"]) == (3, 0)
    assert (stats["restarts"], stats["drops"]) == (0, 0)
    assert [subscriber.is_connected(str(number)) for number in range(3)] == [True, True, False]
    publishers[0].close()
    wait_until(subscriber, lambda: not subscriber.is_connected("0"))
    subscriber.disconnect("0")
    assert {*index.match([1])} == {"1", "2"}
    for publisher in publishers:
        publisher.close()


@pytest.mark.parametrize("has_replay", [False, True])
def test_a_worker_that_ends_and_begins_again(index: PrefixIndex, has_replay: bool) -> None:
    with open_publisher(make_cache()) as publisher:
        endpoint = publisher.endpoint
        replay = publisher.replay_endpoint if has_replay else None
    endpoints = {"endpoint": endpoint, "replay_endpoint": replay}
    # A socket that is being closed takes connections until ZeroMQ has closed it, and never answers.
    with EventSubscriber(index, replay_timeout_s=1, check_s=1) as subscriber:
        subscriber.connect("a", endpoint, replay)
        assert subscriber.poll() == 0
        for life in range(3):
            cache = make_cache(1)
            with open_again(endpoints, cache) as publisher:
                # Some batches before anybody is there, as many in each life.
                for token in range(3):
                    insert(cache, [100 * life + token])
                    publisher.publish()
                wait_until(subscriber, lambda: subscriber.is_connected("a"))

                def send(
                    cache: PrefixCache = cache, publisher: EventPublisher = publisher, life: int = life
                ) -> bool:
                    cache.clear()
                    insert(cache, [100 * life + 50])
                    publisher.publish()
                    return index.match([100 * life + 50]) == {"a": 1}

                wait_until(subscriber, send)
                assert index.stats()["pages"] == cache.cached_size() == 1
                insert(cache, [100 * life + 51])
                publisher.publish()
                wait_until(subscriber, lambda: index.stats()["pages"] == 2)
            wait_until(subscriber, lambda: not subscriber.is_connected("a"))


def test_a_slow_subscriber_keeps_nobody_waiting_and_catches_up(index: PrefixIndex) -> None:
    cache = make_cache(16, 4096)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    with (
        open_publisher(cache, hwm=1) as publisher,
        EventSubscriber(index, replay_timeout_s=PATIENCE_S) as subscriber,
        context.socket(zmq.SUB) as slow,
    ):
        slow.set_hwm(1)
        slow.setsockopt(zmq.RCVBUF, 4096)
        slow.subscribe(b"")
        slow.connect(publisher.endpoint)
        subscriber.connect("a", publisher.endpoint, publisher.replay_endpoint)
        wait_until(subscriber, lambda: subscriber.is_connected("a"))
        prompt = [*range(4096)]
        for _ in range(3000):
            insert(cache, prompt)
            publisher.publish()
            cache.clear()
            if publisher.stats()["stalls"]:
                break
        assert publisher.stats()["stalls"] > 0
        insert(cache, prompt[:32])
        publisher.publish()
        last = publisher.stats()["batches"]

        def change_cache() -> bool:
            insert(cache, [7] * 16)
            cache.evict(16)
            publisher.publish()
            return index.match(prompt) == {"a": cache.cached_len(prompt)}

        wait_until(subscriber, change_cache)
        assert subscriber.stats()["replays"] >= 1
        assert last > 1


def test_a_worker_that_does_not_answer_is_dropped_and_taken_again(index: PrefixIndex) -> None:
    cache = make_cache(1)
    insert(cache, [1])
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    with (
        open_publisher(cache) as publisher,
        context.socket(zmq.ROUTER) as silent,
        EventSubscriber(index, replay_timeout_s=0.05, check_s=0.05) as subscriber,
    ):
        port = silent.bind_to_random_port("tcp://127.0.0.1")
        subscriber.connect("a", publisher.endpoint, f"tcp://127.0.0.1:{port}")
        wait_until(subscriber, lambda: subscriber.stats()["replays"] > 3)

        def send() -> bool:
            # Again, if a check has come between a poll that hears of it and this look.
            cache.clear()
            insert(cache, [1])
            publisher.publish()
            return index.match([1]) == {"a": 1}

        wait_until(subscriber, send)
        # The next check asks in vain for what it knows, and forgets it.
        wait_until(subscriber, lambda: index.match([1]) == {"a": 0})
        stats = subscriber.stats()
        assert stats["drops"] > 0
        # Now it answers, as vLLM once did, without a topic.
        payload = encode(EventBatch(0.0, [stored([*page_keys([1], 1)], 1, [1])]))
        silent.setsockopt(zmq.RCVTIMEO, int(PATIENCE_S * 1000))

        def answer() -> bool:
            while silent.poll(0):
                peer = silent.recv_multipart()[0]
                silent.send_multipart([peer, b"", b"x"])
                silent.send_multipart([peer, b"", bytes(8), payload])
                silent.send_multipart([peer, b"", b"\xff" * 8, b""])
            return index.match([1]) == {"a": 1}

        wait_until(subscriber, answer)
        assert subscriber.stats()["refused"] > 0


def test_messages_that_are_no_batches_are_counted(index: PrefixIndex, subscriber: EventSubscriber) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    with context.socket(zmq.XPUB) as worker:
        port = worker.bind_to_random_port("tcp://127.0.0.1")
        subscriber.connect("a", f"tcp://127.0.0.1:{port}")
        assert worker.recv() == b"\x01"
        batch = encode(EventBatch(0.0, [stored([*page_keys([1], 1)], 1, [1])]))
        for parts in ([b""], [b"", b"", b""], [b"", b"1234567", batch], [b"", bytes(8), batch, b""]):
            worker.send_multipart(parts)
        worker.send_multipart([b"", bytes(8), b"nonsense"])
        worker.send_multipart([b"", (1).to_bytes(8, "big"), batch])
        wait_until(subscriber, lambda: index.match([1]) == {"a": 1})
        assert subscriber.stats()["refused"] == 5


def test_a_batch_that_is_too_large_ends_the_connection() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    with context.socket(zmq.XPUB) as worker, EventSubscriber(PrefixIndex(), max_bytes=1000) as subscriber:
        port = worker.bind_to_random_port("tcp://127.0.0.1")
        subscriber.connect("a", f"tcp://127.0.0.1:{port}")
        assert worker.recv() == b"\x01"
        wait_until(subscriber, lambda: subscriber.is_connected("a"))
        worker.send_multipart([b"", bytes(8), bytes(1001)])
        wait_until(subscriber, lambda: not subscriber.is_connected("a"))
        assert subscriber.stats()["batches"] == 0


def test_an_interrupt_loses_no_event(
    index: PrefixIndex, subscriber: EventSubscriber, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several batches some were sent: they are sent again, in order."""
    cache = make_cache(1, 200)
    monkeypatch.setattr(messages, "BATCH_TOKENS", 8)
    with open_publisher(cache) as publisher:
        subscriber.connect("a", publisher.endpoint, publisher.replay_endpoint)
        wait_until(subscriber, lambda: subscriber.is_connected("a"))
        insert(cache, range(60))
        cache.evict(60)
        insert(cache, range(50))
        sent = publishers._Buffer.append

        def append(buffer: Any, number: int, payload: bytes) -> None:  # noqa: ANN401
            sent(buffer, number, payload)
            if number == 3:
                raise KeyboardInterrupt

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(publishers._Buffer, "append", append)
            publisher.publish()
        assert publisher.publish() > 3
        wait_until(subscriber, lambda: index.match(range(60)) == {"a": 50})
        assert publisher.publish() == 0


def test_threads_publish_one_order(index: PrefixIndex, subscriber: EventSubscriber) -> None:
    cache = make_cache(4, 256)
    with open_publisher(cache) as publisher:
        subscriber.connect("a", publisher.endpoint, publisher.replay_endpoint)
        failures: list[BaseException] = []

        def work(seed: int) -> None:
            chance = random.Random(seed)  # noqa: S311
            try:
                for _ in range(300):
                    insert(cache, some_prompt(chance.randrange(97), 4))
                    if chance.random() < 0.1:
                        cache.evict(40)
                    publisher.publish()
                    index.match(some_prompt(chance.randrange(97), 4))
            except BaseException as error:  # noqa: BLE001
                failures.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            subscriber.poll(0.01)
        assert not failures
        assert publisher.publish() == 0
        wait_until(
            subscriber,
            lambda: all(
                index.match(some_prompt(seed, 4))["a"] == cache.cached_len(some_prompt(seed, 4))
                for seed in range(97)
            ),
        )
        stats = subscriber.stats()
        assert (stats["refused"], stats["restarts"], stats["drops"]) == (0, 0, 0)


# Misuse, and the end


@pytest.mark.parametrize("name", ["endpoint", "replay_endpoint"])
@pytest.mark.parametrize(
    "value",
    [
        "tcp://*:5557",
        "tcp://0.0.0.0:5557",
        "tcp://10.0.0.1:5557",
        "tcp://[::]:5557",
        "tcp://eth0:5557",
        "tcp://localhost.example.org:5557",
        "tcp://127.0.0.1.example.org:5557",
        "udp://127.0.0.1:5557",
        "ws://127.0.0.1:5557",
        "tcp://",
        "127.0.0.1:5557",
        "",
        "tcp://127.0.0.1:99999",
        "tcp://127.0.0.1",
        "ipc:///no/such/folder/kv",
    ],
)
def test_endpoints_that_are_no_loopback_are_refused(name: str, value: str) -> None:
    cache = make_cache()
    insert(cache, range(4))
    with pytest.raises(ConfigError, match=rf"^{name} is "):
        open_publisher(cache, **{name: value})
    assert len(cache.events()) == 1


@pytest.mark.parametrize(
    "value", ["tcp://127.0.0.1:0", "tcp://127.1.2.3:*", "tcp://localhost:*", "tcp://[::1]:*"]
)
def test_loopback_is_allowed(value: str) -> None:
    if "[" in value and not Path("/proc/net/if_inet6").exists():
        pytest.skip("this machine has no IPv6")
    with open_publisher(make_cache(), endpoint=value) as publisher:
        assert int(publisher.endpoint.rpartition(":")[2]) > 0


def test_allow_remote_allows_other_addresses() -> None:
    with open_publisher(make_cache(), endpoint="tcp://*:0", allow_remote=True) as publisher:
        assert publisher.endpoint.startswith("tcp://0.0.0.0:")
    with pytest.raises(ConfigError, match="endpoint is 'udp"):
        open_publisher(make_cache(), endpoint="udp://*:0", allow_remote=True)


def subscribed_length(
    publisher: EventPublisher, secret: bytes | None, cache: PrefixCache, seconds: float = 0.5
) -> int:
    """The tokens of the first prompt that a subscriber receives in `seconds`, while batches are sent."""
    index = PrefixIndex()
    # The lease keeps the prompt from being evicted for the batches.
    with cache.match(range(4)), EventSubscriber(index, secret=secret) as subscriber:
        subscriber.connect("a", publisher.endpoint, publisher.replay_endpoint)
        ends = time.monotonic() + seconds
        for number in itertools.count(1):
            insert(cache, range(1000 * number, 1000 * number + 4))
            publisher.publish()
            subscriber.poll(0.05)
            if (found := index.match(range(4)).get("a", 0)) or time.monotonic() > ends:
                return found
    raise AssertionError


def test_only_who_knows_the_secret_hears_events() -> None:
    """Neither what is published nor what is replayed, and it is not read by who only listens."""
    cache = make_cache(size=1024)
    insert(cache, range(4))
    with open_publisher(cache, endpoint="tcp://*:0", secret=b"a secret of some length") as publisher:
        publisher.publish()
        host, _, port = publisher.endpoint.rpartition(":")
        assert host == "tcp://0.0.0.0"
        for other in (None, b"another secret of some length"):
            assert subscribed_length(publisher, other, cache) == 0
        assert subscribed_length(publisher, b"a secret of some length", cache, PATIENCE_S) == 4
        with socket.create_connection(("127.0.0.1", int(port)), PATIENCE_S) as stranger:
            said = stranger.recv(4096)
            stranger.settimeout(0.2)
            with suppress(TimeoutError):
                while part := stranger.recv(4096):
                    said += part
        assert said[:1] == b"\xff"  # ZeroMQ's greeting, and nothing else
        assert len(said) < 100


def test_a_publisher_without_the_secret_is_refused() -> None:
    """A subscriber ignores an impostor that takes the place of a publisher, with another secret or none."""
    cache = make_cache()
    insert(cache, range(4))
    for other in (None, b"another secret of some length"):
        with open_publisher(cache, secret=other) as publisher:
            assert subscribed_length(publisher, b"a secret of some length", make_cache(size=1024)) == 0


@pytest.mark.parametrize("secret", [b"", b"fifteen bytes 1"])
def test_a_secret_that_can_be_guessed_is_refused(secret: bytes) -> None:
    text = f"the secret has {len(secret)} bytes; at least 16 are needed"
    with pytest.raises(ConfigError, match=text):
        open_publisher(make_cache(), secret=secret)
    with pytest.raises(ConfigError, match=text):
        EventSubscriber(PrefixIndex(), secret=secret)
    for wrong in ("a secret of some length", bytearray(32), 0):
        other: Any = wrong
        with pytest.raises(TypeError, match="a secret must be bytes, not "):
            open_publisher(make_cache(), secret=other)
        with pytest.raises(TypeError, match="a secret must be bytes, not "):
            EventSubscriber(PrefixIndex(), secret=other)


@pytest.mark.skipif(sys.platform != "linux", reason="the system does not tell what a connection has sent")
def test_a_subscriber_that_sends_too_much_is_disconnected(caplog: pytest.LogCaptureFixture) -> None:
    cache = make_cache(size=1024)
    insert(cache, range(4))
    context = zmq.Context()
    with open_publisher(cache) as publisher, caplog.at_level(logging.WARNING, "kvpool"):
        publisher.publish()
        stranger = context.socket(zmq.XSUB)
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.setsockopt(zmq.SNDHWM, 0)
        stranger.setsockopt(zmq.RECONNECT_IVL, -1)
        stranger.connect(publisher.endpoint)
        for number in range(5000):
            stranger.send(b"\1" + number.to_bytes(4, "big") * 200)
        ends = time.monotonic() + PATIENCE_S
        for number in itertools.count(1):
            if publisher.stats()["refused"] or time.monotonic() > ends:
                break
            insert(
                cache, range(1000 * number, 1000 * number + 4)
            )  # without events nobody reads subscriptions
            publisher.publish()
            time.sleep(0.01)
        assert publisher.stats()["refused"] == 1
        stranger.close()
        # Others go on.
        cache.clear()
        insert(cache, range(4))
        assert subscribed_length(publisher, None, cache, PATIENCE_S) == 4
    context.term()
    [text] = caplog.messages
    assert text.startswith("a subscriber from 127.0.0.1 is disconnected: its subscriptions have ")


def test_a_silent_connection_ends() -> None:
    with open_publisher(make_cache()) as publisher:
        assert publisher.replay_endpoint is not None
        for endpoint in (publisher.endpoint, publisher.replay_endpoint):
            port = int(endpoint.rpartition(":")[2])
            with socket.create_connection(("127.0.0.1", port), PATIENCE_S) as silent:
                assert silent.recv(4096)  # a greeting
                while silent.recv(4096):
                    pass


@pytest.mark.parametrize(
    "event",
    [
        BlockStored([0] * (MAX_LISTED + 1), None, [], 4, None, "GPU", None),
        BlockStored([1], None, [0] * (MAX_LISTED + 1), 4, None, "GPU", None),
        BlockRemoved([0] * (MAX_LISTED + 1), "GPU"),
        BlockStored([1], None, [1], 1, None, "GPU", None, extra_keys=[(0,) * 257]),
        BlockStored([1], None, [1], 1, None, "GPU", None, lookahead_token_ids=[[0] * 257]),
    ],
)
def test_lists_of_a_batch_are_bounded(event: BlockStored | BlockRemoved) -> None:
    with pytest.raises(ConfigError, match="not a batch of KV events"):
        decode(encode(EventBatch(0.0, [event])))


def test_without_curve_a_secret_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq, "has", lambda _: False)
    with pytest.raises(ConfigError, match="no CurveZMQ"):
        open_publisher(make_cache(), secret=b"a secret of some length")
    with pytest.raises(ConfigError, match="no CurveZMQ"):
        EventSubscriber(PrefixIndex(), secret=b"a secret of some length")


@pytest.mark.parametrize(
    ("name", "value"),
    [("hwm", 0), ("buffer_steps", -1), ("buffer_bytes", -1), ("data_parallel_rank", -1)],
)
def test_numbers_that_make_no_sense_are_refused(name: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"^{name} is {value}"):
        open_publisher(make_cache(), **{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("replay_timeout_s", 0),
        ("check_s", 0),
        ("check_s", math.inf),
        ("replay_timeout_s", 1e6),
        ("max_bytes", 0),
    ],
)
def test_times_that_make_no_sense_are_refused(name: str, value: float) -> None:
    options: dict[str, Any] = {name: value}
    with pytest.raises(ConfigError, match=f"^{name} is {value}"):
        EventSubscriber(PrefixIndex(), **options)


def test_a_poll_does_not_wait_for_ever(subscriber: EventSubscriber) -> None:
    with pytest.raises(ConfigError, match=r"^timeout is inf"):
        subscriber.poll(math.inf)


def test_a_publisher_that_cannot_be_made_leaves_nothing(
    index: PrefixIndex, subscriber: EventSubscriber
) -> None:
    with open_publisher(make_cache()) as publisher:
        replay = some(publisher.replay_endpoint)
        for wrong in ({"endpoint": publisher.endpoint}, {"replay_endpoint": replay}):
            with pytest.raises(ConfigError, match="in use"):
                open_publisher(make_cache(), **wrong)
        endpoint = publisher.endpoint
    endpoints = {"endpoint": endpoint, "replay_endpoint": replay}
    open_again(endpoints).close()
    open_again(endpoints).close()
    without = PrefixCache(TokenToKVPoolAllocator(16, "cpu"))
    with pytest.raises(StateError, match="events"):
        open_publisher(without)
    with pytest.raises(ConfigError, match="endpoint"):
        subscriber.connect("a", "nowhere")
    with pytest.raises(ConfigError, match="replay_endpoint"):
        subscriber.connect("a", endpoint, "tcp://")
    with pytest.raises(ArgumentError, match="not connected"):
        subscriber.disconnect("a")
    with pytest.raises(ArgumentError, match="not connected"):
        subscriber.is_connected("a")
    subscriber.connect("a", endpoint)
    with pytest.raises(StateError, match="connected already"):
        subscriber.connect("a", endpoint)
    assert index.match([1]) == {"a": 0}


def test_nothing_is_left_after_close() -> None:
    def live() -> None:
        cache = make_cache()
        with open_publisher(cache) as publisher, EventSubscriber(PrefixIndex()) as subscriber:
            subscriber.connect("a", publisher.endpoint, publisher.replay_endpoint)
            insert(cache, range(8))
            publisher.publish()
            wait_until(subscriber, lambda: subscriber.is_connected("a") and subscriber.stats()["batches"] > 0)
        for _ in range(2):
            publisher.close()
            subscriber.close()
            assert publisher.closed
            assert subscriber.closed
        with pytest.raises(RuntimeError, match="publisher is closed"):
            publisher.publish()
        with pytest.raises(RuntimeError, match="subscriber is closed"):
            subscriber.poll()
        with pytest.raises(RuntimeError, match="subscriber is closed"):
            subscriber.connect("a", publisher.endpoint)
        assert publisher.stats()["batches"] == 1

    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - as many as there are

    live()
    threads, before = threading.active_count(), descriptors()
    for _ in range(20):
        live()
    assert threading.active_count() == threads
    # ZeroMQ closes in a thread of its own.
    ends = time.monotonic() + PATIENCE_S
    while descriptors() > before + 4:
        assert time.monotonic() < ends
        time.sleep(0.02)


def test_dropping_closes() -> None:
    publisher: EventPublisher | None = open_publisher(make_cache())
    assert publisher is not None
    endpoints = {"endpoint": publisher.endpoint, "replay_endpoint": some(publisher.replay_endpoint)}
    subscriber: EventSubscriber | None = EventSubscriber(PrefixIndex())
    assert subscriber is not None
    subscriber.connect("a", *endpoints.values())
    threads = threading.active_count()
    publisher = subscriber = None
    gc.collect()
    assert threading.active_count() == threads - 1
    open_again(endpoints).close()


def test_a_program_may_end_without_closing(run_snippet: RunSnippet) -> None:
    run_snippet(
        """
        import kvpool
        from kvpool.integrations.kv_events import EventPublisher, EventSubscriber, PrefixIndex

        cache = kvpool.PrefixCache(kvpool.TokenToKVPoolAllocator(16, "cpu"), events=True)
        publisher = EventPublisher(cache, endpoint="tcp://127.0.0.1:*", replay_endpoint="tcp://127.0.0.1:*")
        subscriber = EventSubscriber(PrefixIndex())
        subscriber.connect("a", publisher.endpoint, publisher.replay_endpoint)
        subscriber.poll(0.1)
        """
    )


def test_a_publisher_of_another_process_is_refused(run_snippet: RunSnippet) -> None:
    run_snippet(
        """
        import os, warnings
        import kvpool
        from kvpool.integrations.kv_events import EventPublisher

        cache = kvpool.PrefixCache(kvpool.TokenToKVPoolAllocator(16, "cpu"), events=True)
        publisher = EventPublisher(cache, endpoint="tcp://127.0.0.1:*", replay_endpoint="tcp://127.0.0.1:*")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            child = os.fork()
        if child == 0:
            refused = 0
            for call in (publisher.publish, publisher.close):
                try:
                    call()
                except RuntimeError as error:
                    refused += "forked" in str(error)
            os._exit(refused)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
        publisher.close()
        """
    )


@pytest.mark.parametrize("name", ["blake3", "msgspec", "zmq"])
def test_missing_packages_are_named(run_snippet: RunSnippet, name: str) -> None:
    run_snippet(
        f"""
        import kvpool
        try:
            from kvpool.integrations.kv_events import EventPublisher
        except ImportError as error:
            assert "install 'kvpool[events]'" in str(error) and {name!r} in str(error), error
        else:
            raise AssertionError("it was imported")
        """,
        hidden=[name],
    )


def test_numbers_of_a_stats_only_grow() -> None:
    cache = make_cache()
    with open_publisher(cache, buffer_bytes=500) as publisher:
        found = []
        for number in range(8):
            insert(cache, [number] * 8)
            publisher.publish()
            found.append(publisher.stats())
        assert all(a["bytes"] < b["bytes"] and a["events"] < b["events"] for a, b in pairwise(found))
        assert 0 < found[-1]["buffered_bytes"] <= 500
        assert 0 < found[-1]["buffered"] < found[-1]["batches"] == 8


@pytest.mark.parametrize("write", ["through", "selective", "back"])
@pytest.mark.parametrize("host", [16, 256])
def test_a_page_is_announced_after_the_page_before_it(write: str, host: int) -> None:
    """A router drops pages whose parent it does not know: each is known somewhere when its children come."""
    for seed in range(4):
        choice = random.Random(seed)  # noqa: S311
        scene = Scene("cpu", host=host, write=write, events=True)
        known: dict[str, set[bytes]] = {"device": set(), "host": set()}
        for _ in range(60):
            parts = ((4, 2), (4, 2), (8, 3), (4 * choice.randrange(1, 3), 3))
            scene.keep([token for count, kinds in parts for token in [choice.randrange(kinds)] * count])
            if choice.random() < 0.4:
                scene.cache.evict(choice.choice((4, 8, 64)))
            if choice.random() < 0.4:
                scene.cache.wait_written()
            for event in scene.cache.events():
                if isinstance(event, kvpool.Stored):
                    assert event.parent is None or event.parent in known["device"] | known["host"]
                    known[event.tier] |= set(event.pages)
                elif isinstance(event, kvpool.Removed):
                    assert known[event.tier] >= set(event.pages)
                    known[event.tier] -= set(event.pages)
        scene.cache.wait_written()
        assert len(known["host"]) == scene.tier.stats()["pages"]
        scene.end()
