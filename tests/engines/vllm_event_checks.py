"""kvpool's KV events beside vLLM's: equal bytes, and each reads what the other publishes.

`tests/python/test_vllm_plugin.py` starts it.
"""

from __future__ import annotations

import dataclasses
import random
import time
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import zmq
from vllm.distributed import kv_events as theirs
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.kv_cache_interface import KVCacheSpecKind

import kvpool
from kvpool.integrations import kv_events as ours
from kvpool.integrations.kv_events.messages import KINDS, short_key

if TYPE_CHECKING:
    from pathlib import Path

NAMES = ["BlockStored", "BlockRemoved", "AllBlocksCleared"]
PATIENCE_S = 60.0
decoder = msgspec.msgpack.Decoder(theirs.KVEventBatch)


def fields(event: Any) -> dict[str, Any]:  # noqa: ANN401
    names = getattr(theirs, type(event).__name__).__struct_fields__
    return {name: getattr(event, name) for name in names}


def as_vllm_batch(batch: ours.EventBatch) -> Any:  # noqa: ANN401
    events = [getattr(theirs, type(event).__name__)(**fields(event)) for event in batch.events]
    return theirs.KVEventBatch(batch.ts, events, batch.data_parallel_rank)


def some_batches(seed: int) -> list[ours.EventBatch]:
    """Batches with any value in any field."""
    chance = random.Random(seed)  # noqa: S311

    def key() -> bytes | int:
        kinds: list[bytes | int] = [
            chance.randbytes(32),
            chance.randrange(1 << 64),
            -chance.randrange(1 << 63),
        ]
        return chance.choice(kinds)

    def maybe(value: Any) -> Any:  # noqa: ANN401
        return chance.choice([None, value])

    def event() -> Any:  # noqa: ANN401
        count = chance.randrange(4)
        keys = [key() for _ in range(count)]
        if chance.random() < 0.3:
            return ours.BlockRemoved(keys, maybe("GPU"), maybe(1), maybe("LOCAL"), maybe("p"))
        if chance.random() < 0.1:
            return ours.AllBlocksCleared()
        extra = [maybe(("salt", ["mm", 3], b"\0", 1.5, True)) for _ in range(count)]
        tokens = [chance.randrange(1 << 31) for _ in range(2 * count)]
        first = (keys, maybe(key()), tokens, 2, maybe(5), maybe("CPU"), maybe("lora"), maybe(extra))
        more = (maybe(3), maybe("full"), maybe(9), maybe("REMOTE"), maybe("p"), maybe("s"), maybe([[1], []]))
        return ours.BlockStored(*first, *more)

    return [
        ours.EventBatch(
            chance.random(), [event() for _ in range(chance.randrange(4))], maybe(chance.randrange(9))
        )
        for _ in range(50)
    ]


@pytest.mark.parametrize("name", NAMES)
def test_events_have_the_same_fields_in_the_same_order(name: str) -> None:
    own = 2 if name == "BlockStored" else 0  # `page_size` and `groups`, behind vLLM's
    mine, others = getattr(ours, name), getattr(theirs, name)
    assert mine.__struct_fields__[: len(mine.__struct_fields__) - own] == others.__struct_fields__
    assert mine.__struct_defaults__[: len(mine.__struct_defaults__) - own] == others.__struct_defaults__
    assert ours.EventBatch.__struct_fields__ == theirs.KVEventBatch.__struct_fields__


def test_each_reads_what_the_other_writes_byte_for_byte() -> None:
    encoder = msgspec.msgpack.Encoder()
    for seed in range(20):
        for batch in some_batches(seed):
            payload = ours.encode(batch)
            assert payload == encoder.encode(as_vllm_batch(batch))
            assert decoder.decode(payload) == as_vllm_batch(batch)
            assert ours.decode(payload) == batch


def test_vllm_reads_the_events_of_groups() -> None:
    full, window = ours.BlockGroup("full", "full", 4), ours.BlockGroup("window", "window", 4, 9, 2)
    key, more = bytes(32), {"page_size": 4, "groups": [full, window]}
    stored = ours.BlockStored([key], None, [1, 2, 3, 4], 4, None, "GPU", None, None, 1, "sliding_window", 9)
    told = ours.BlockStored(**{**fields(stored), **more})
    read = decoder.decode(ours.encode(ours.EventBatch(0.0, [told, ours.BlockRemoved([key], "GPU", 1)])))
    assert read.events == [theirs.BlockStored(**fields(stored)), theirs.BlockRemoved([key], "GPU", 1)]
    kinds = {kind.value for kind in KVCacheSpecKind}
    assert kinds.issuperset(KINDS.values())


def test_ints_stand_for_keys_as_in_vllm() -> None:
    for key in ours.page_keys(range(100), 1):
        assert maybe_convert_block_hash(key) == short_key(key)


def some(slots: Any) -> Any:  # noqa: ANN401
    assert slots is not None
    return slots


def caches() -> tuple[kvpool.PrefixCache, kvpool.TokenToKVPoolAllocator]:
    allocator = kvpool.TokenToKVPoolAllocator(64, "cpu", page_size=4)
    return kvpool.PrefixCache(allocator, events=True), allocator


@pytest.mark.parametrize("int_hashes", [False, True])
def test_vllm_reads_what_a_cache_publishes_and_asks_for_it_again(tmp_path: Path, int_hashes: bool) -> None:
    cache, allocator = caches()
    place = f"ipc://{tmp_path}/kv", f"ipc://{tmp_path}/replay"
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    options: Any = {"topic": "kv", "int_hashes": int_hashes, "data_parallel_rank": 1}
    with (
        ours.EventPublisher(cache, endpoint=place[0], replay_endpoint=place[1], **options) as publisher,
        context.socket(zmq.SUB) as messages,
        context.socket(zmq.DEALER) as replays,
    ):
        messages.subscribe(b"kv")
        messages.connect(place[0])
        replays.connect(place[1])
        while not messages.poll(20):
            cache.insert(range(8), some(allocator.alloc(8)), namespace="a")
            cache.clear()
            publisher.publish()
        parts = messages.recv_multipart()
        cache.insert(range(8), some(allocator.alloc(8)), namespace="a")
        publisher.publish()
        # A replay as vLLM's clients ask for it, and its answer.
        replays.send_multipart((b"", int.from_bytes(parts[1], "big").to_bytes(8, "big")))
        again = []
        while True:
            empty, *frames = replays.recv_multipart()
            assert empty == b""
            if frames[1] == theirs.ZmqEventPublisher.END_SEQ:
                assert frames == [b"", theirs.ZmqEventPublisher.END_SEQ, b""]
                break
            again.append(frames)
        assert again[0] == parts
        batch = decoder.decode(again[-1][2])
        assert batch.data_parallel_rank == 1
        keys: list[bytes | int] = [*ours.page_keys(range(8), 4, "a")]
        if int_hashes:
            keys = [maybe_convert_block_hash(key) for key in keys]
        assert batch.events[-1] == theirs.BlockStored(
            keys, None, [*range(8)], 4, None, theirs.MEDIUM_GPU, None, [("a",), None]
        )


def test_a_subscriber_reads_what_vllm_publishes_and_what_it_replays(tmp_path: Path) -> None:
    place = f"inproc://{tmp_path.name}", f"ipc://{tmp_path}/replay"
    publisher = theirs.ZmqEventPublisher(0, place[0], place[1], buffer_steps=100)
    index = ours.PrefixIndex()
    prompt = [*range(40)]
    keys = [*ours.page_keys(prompt, 4)]
    try:
        with ours.EventSubscriber(index, check_s=0.2) as subscriber:

            def send(number: int) -> None:
                parent = keys[number - 1] if number else None
                tokens = prompt[4 * number : 4 * number + 4]
                event = theirs.BlockStored([keys[number]], parent, tokens, 4, None, "GPU", None)
                publisher.publish(theirs.KVEventBatch(time.time(), [event]))

            for number in range(5):
                send(number)
            subscriber.connect("vllm", *place)
            for number in range(5, 10):
                send(number)
            ends = time.monotonic() + PATIENCE_S
            while index.match(prompt) != {"vllm": 40}:
                assert time.monotonic() < ends
                subscriber.poll(0.1)
            assert subscriber.stats()["drops"] == 0
    finally:
        publisher.shutdown()


def test_settings_have_the_same_names_and_values() -> None:
    from vllm.config.kv_events import KVEventsConfig

    names: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(KVEventsConfig)}
    defaults: dict[str, Any] = ours.EventPublisher.__init__.__kwdefaults__ or {}
    for name in ("replay_endpoint", "buffer_steps", "hwm", "topic"):
        assert defaults[name] == names[name]
    assert defaults["endpoint"].rpartition(":")[2] == names["endpoint"].rpartition(":")[2]
