"""Stores below a HostTier: what was written is found again, by this process and the next."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from common import needs_fork, some, together
from memory_store import Memory
from tier_scene import PROMPT, SIZE, Scene

import kvpool
from kvpool import ConfigError, FileStore, HostTier, PrefixCache
from kvpool.store import _serve

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from kvpool import Fetch, Store

PAGE_BYTES = 4 * 3 * (2 * 4 + 3) * 4
"""Bytes of a page of four tokens of a `Scene`."""


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.0005)


def stored_prompt(device: str, store: FileStore | Store, **options: Any) -> Scene:  # noqa: ANN401
    """A scene that has published the prompt, and whose store has it."""
    scene = Scene(device, store=store, **options)
    scene.keep(PROMPT)
    scene.stored()
    assert scene.tier.stats()["unstored"] == 0
    assert not isinstance(store, Memory) or len(store.pages) == 6 + (scene.states is not None)
    return scene


def fetched(scene: Scene, tokens: Sequence[int] | torch.Tensor, **options: object) -> Fetch:
    fetch = scene.cache.fetch(tokens, **options)  # type: ignore[arg-type]
    assert fetch.wait(30)
    assert fetch.query()
    return fetch


def _has(store: FileStore, pages: int) -> bool:
    return store.stats()["pages"] >= pages


def files(path: Path, page_bytes: int = PAGE_BYTES, capacity: int = 1 << 22) -> FileStore:
    return FileStore(path, capacity, page_bytes=page_bytes)


@pytest.mark.parametrize("has_states", [False, True])
@pytest.mark.parametrize("page_bytes", [PAGE_BYTES, 100, 1 << 16])
def test_a_new_process_finds_what_an_earlier_one_had(
    device: str, tmp_path: Path, page_bytes: int, *, has_states: bool
) -> None:
    for turn in range(2):
        with files(tmp_path, page_bytes) as store:
            scene = Scene(device, store=store, has_states=has_states)
            fetch = fetched(scene, PROMPT)
            assert fetch.length == turn * 24
            lease = scene.cache.match([*PROMPT, 1])
            assert (lease.length, lease.loadable) == (0, turn * 24)
            if turn:
                load = some(lease.load())
                scene.finish(load)
                scene.check(lease, PROMPT)
                assert scene.tier.stats()["fetched"] == 6 + has_states
            scene.compute(lease, PROMPT, state=1 if has_states else None)
            lease.release()
            del fetch
            scene.settle()
            until(partial(_has, store, 6 * -(-PAGE_BYTES // page_bytes) + has_states))
            scene.end()
        assert not store.stats()["errors"]


def test_published_pages_are_stored_without_another_call(device: str, tmp_path: Path) -> None:
    with files(tmp_path) as store:
        scene = Scene(device, store=store)
        scene.keep(PROMPT)
        until(lambda: store.stats()["pages"] == 6)
        scene.end()


def test_two_caches_share_a_store(device: str) -> None:
    with Memory() as store:
        one, other = Scene(device, store=store), Scene(device, store=store)
        assert sorted(size for _, size in store.attached) == sorted(
            [one.tier.mem_bytes(), other.tier.mem_bytes()]
        )
        one.keep(PROMPT)
        until(lambda: len(store.pages) == 6)
        assert fetched(other, PROMPT).length == 24
        # Pages in the tier are not fetched again.
        assert fetched(other, PROMPT).length == 0
        assert fetched(one, PROMPT).length == 0
        lease = other.cache.match(PROMPT)
        assert lease.loadable == 24
        other.finish(some(lease.load()))
        other.check(lease, PROMPT)
        lease.release()
        assert {name for name, _ in store.calls} - {"touch"} == {"find", "read", "write"}
        one.end()
        other.end()


def test_only_pages_of_the_same_model_shape_and_namespace_are_found(device: str) -> None:
    with Memory() as store:
        stored_prompt(device, store)
        assert fetched(Scene(device, store=store), PROMPT).length == 24
        for other in (
            Scene(device, store=store, model="another model"),
            Scene(device, store=store, page_size=2),
            Scene(device, store=store, page_size=8),
        ):
            assert fetched(other, PROMPT).length == 0
        other = Scene(device, store=store)
        assert fetched(other, PROMPT, namespace="tenant").length == 0
        assert fetched(other, [*PROMPT[:9], 1, 2, 3]).length == 8
        assert fetched(other, PROMPT, limit=15).length == 4
        assert fetched(other, PROMPT[::-1]).length == 0
        assert fetched(other, torch.tensor(PROMPT, device=device)).length == 12


def test_a_tier_with_another_model_is_empty(device: str) -> None:
    with Memory() as store:
        scene = Scene(device, store=store)
        scene.keep(PROMPT)
        scene.settle()
        for model, pages in (("a model", 6), ("its next version", 0)):
            del scene.cache
            gc.collect()
            scene.cache = PrefixCache(scene.allocator, tiers=(scene.tier, store), model=model)
            assert scene.tier.stats()["pages"] == pages


def test_a_hybrid_prompt_is_fetched_up_to_a_snapshot(device: str) -> None:
    with Memory() as store:
        scene = Scene(device, store=store, has_states=True)
        with scene.cache.match(PROMPT) as lease:
            scene.compute(lease, PROMPT[:16], state=1)
            scene.compute(lease, PROMPT)
        until(lambda: len(store.pages) == 7)
        other = Scene(device, store=store, has_states=True)
        assert fetched(other, PROMPT).length == 16
        assert fetched(other, PROMPT[:15]).length == 0
        lease = other.cache.match(PROMPT)
        assert lease.loadable == 16
        other.finish(some(lease.load()))
        other.check(lease, PROMPT)
        # On the device its pages are found, and only the snapshot is fetched.
        lease.release()
        scene.end()


def test_a_fetch_keeps_what_it_brought(device: str) -> None:
    with Memory() as store:
        stored_prompt(device, store)
        other = Scene(device, store=store, host=32)
        fetch = fetched(other, PROMPT)
        other.keep(range(500, 524))  # has two places left
        other.settle()
        assert (other.cache.match(PROMPT).loadable, other.tier.stats()["skipped"]) == (24, 4)
        del fetch
        other.keep(range(600, 624))
        other.settle()
        assert other.cache.match(PROMPT).loadable < 24
        # One that has no place for all of a prompt brings its beginning.
        small = Scene(device, store=store, host=8)
        assert fetched(small, PROMPT).length == 8


def test_a_wait_ends_when_all_tiers_have_what_was_published(device: str) -> None:
    answers = threading.Event()

    class SlowStore(Memory):
        def write(
            self, keys: Sequence[bytes], addresses: Sequence[int], sizes: Sequence[int]
        ) -> Sequence[bool]:
            answers.wait(30)
            return super().write(keys, addresses, sizes)

    with SlowStore() as store:
        scene = Scene(device, store=store)
        assert scene.cache.wait_written()
        scene.keep(PROMPT)
        assert not scene.cache.wait_written(0.05)
        assert not store.pages
        answers.set()
        assert scene.cache.wait_written(30)
        assert scene.tier.stats()["arriving"] == scene.tier.stats()["storing"] == 0
        assert len(store.pages) == 6
        with pytest.raises(ConfigError, match="timeout is -1"):
            scene.cache.wait_written(-1.0)


def test_an_interrupt_ends_a_wait_for_a_store_that_does_not_answer(device: str) -> None:
    answers = threading.Event()

    class SlowStore(Memory):
        def find(self, keys: Sequence[bytes]) -> Sequence[bool]:
            answers.wait(30)
            return super().find(keys)

    scene = Scene(device, store=SlowStore())
    interrupt = threading.Timer(0.3, signal.raise_signal, [signal.SIGINT])
    interrupt.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            scene.cache.explain(PROMPT)
    finally:
        interrupt.join()
        answers.set()


def test_explain_and_events_tell_of_the_store(device: str) -> None:
    with Memory() as store:
        stored_prompt(device, store)
        other = Scene(device, store=store, events=True)
        other.keep(PROMPT[:8])
        other.settle()
        other.cache.events()

        def parts() -> list[tuple[str, int, int]]:
            return [(part.state, part.begin, part.end) for part in other.cache.explain([*PROMPT, 7])]

        rest = ("page not full", 24, 25)
        assert parts() == [("device", 0, 8), ("store", 8, 24), rest]
        fetch = fetched(other, PROMPT)
        assert parts() == [("device", 0, 8), ("host", 8, 24), rest]
        (stored,) = other.cache.events()
        assert isinstance(stored, kvpool.Stored)
        assert (stored.tier, stored.tokens, len(stored.pages)) == ("host", PROMPT[8:], 4)
        scene_events = Scene(device, store=store, events=True)
        scene_events.keep(PROMPT[:8])
        (first,) = [e for e in scene_events.cache.events() if isinstance(e, kvpool.Stored)][:1]
        assert stored.parent == first.pages[-1]
        del fetch


class Faulty(Memory):
    """A store that does something else with every call of one kind."""

    def __init__(self, kind: str, fault: Callable[[int], Sequence[bool]]) -> None:
        self.kind, self.fault = kind, fault
        super().__init__()

    def find(self, keys: Sequence[bytes]) -> Sequence[bool]:
        return self.fault(len(keys)) if self.kind == "find" else super().find(keys)

    def read(self, keys: Sequence[bytes], addresses: Sequence[int], sizes: Sequence[int]) -> Sequence[bool]:
        if self.kind != "read":
            return super().read(keys, addresses, sizes)
        for address, size in zip(addresses, sizes, strict=True):
            ctypes.memset(address, 0xEE, size)
        return self.fault(len(keys))

    def write(self, keys: Sequence[bytes], addresses: Sequence[int], sizes: Sequence[int]) -> Sequence[bool]:
        return self.fault(len(keys)) if self.kind == "write" else super().write(keys, addresses, sizes)


def _raises(count: int) -> Sequence[bool]:
    raise OSError(f"no {count} pages")


@pytest.mark.parametrize("kind", ["find", "read", "write"])
@pytest.mark.parametrize(
    "fault",
    [_raises, lambda _: [], lambda count: [False] * count, lambda _: None],
    ids=["raises", "empty", "false", "none"],
)
def test_pages_that_a_store_fails_to_keep_are_missing(
    device: str, kind: str, fault: Callable[[int], Sequence[bool]], caplog: pytest.LogCaptureFixture
) -> None:
    with Faulty(kind, fault) as store, caplog.at_level(logging.ERROR, "kvpool"):
        scene = Scene(device, store=store)
        scene.keep(PROMPT)
        scene.settle()
        scene.stored()
        other = Scene(device, store=store)
        assert fetched(other, PROMPT).length == 0
        assert other.cache.match(PROMPT).loadable == 0
        assert other.tier.stats()["arriving"] == 0
        is_logged = any(f"{kind} of 6 pages has failed" in record.message for record in caplog.records)
        assert is_logged == (fault is _raises or fault(1) is None)
        # It computes, and goes on with what it has.
        other.keep(PROMPT)
        scene.end()
        other.end()


def test_some_pages_of_a_batch_may_be_missing(device: str) -> None:
    with Memory() as store:
        stored_prompt(device, store)
        del store.pages[list(store.pages)[3]]
        assert fetched(Scene(device, store=store), PROMPT).length == 12

    # Found, and gone when it is read.
    with Faulty("read", lambda count: [True] * 2 + [False] + [True] * (count - 3)) as store:
        stored_prompt(device, store)
        other = Scene(device, store=store)
        assert fetched(other, PROMPT).length == 8
        assert other.tier.stats()["pages"] == 2


class BlockingStore(Memory):
    """A store whose answers to one kind of call wait."""

    def __init__(self, kind: str) -> None:
        self.gate, self.is_asked, self.kind = threading.Event(), threading.Event(), kind
        self.fails = False
        super().__init__()

    def find(self, keys: Sequence[bytes]) -> Sequence[bool]:
        assert self.kind != "find" or self.gate.wait(30)
        return super().find(keys)

    def read(self, keys: Sequence[bytes], addresses: Sequence[int], sizes: Sequence[int]) -> Sequence[bool]:
        assert self.kind != "read" or self.gate.wait(30)
        return [False] * len(keys) if self.fails else super().read(keys, addresses, sizes)

    def write(self, keys: Sequence[bytes], addresses: Sequence[int], sizes: Sequence[int]) -> Sequence[bool]:
        self.is_asked.set()
        assert self.kind != "write" or self.gate.wait(30)
        return super().write(keys, addresses, sizes)


@pytest.mark.parametrize("kind", ["find", "read"])
@pytest.mark.parametrize("end", ["cancel", "drop", "clear", "clear tier", "drop cache", "close"])
def test_nothing_waits_for_a_store_and_a_fetch_can_end_early(device: str, kind: str, end: str) -> None:
    with BlockingStore(kind) as store:
        scene = stored_prompt(device, store)
        other = Scene(device, store=store)
        fetch: Fetch | None = other.cache.fetch(PROMPT)
        # The cache goes on meanwhile.
        other.keep(range(500, 524))
        assert not some(fetch).query()
        assert not some(fetch).wait(0.01)
        if kind == "read":
            until(lambda: other.tier.stats()["arriving"] == 6)
        if end == "cancel":
            some(fetch).cancel()
        elif end == "drop":
            fetch = None
        elif end == "clear":
            other.cache.clear()
        elif end == "clear tier":
            other.tier.clear()
        elif end == "drop cache":
            del other.cache
        elif end == "close":
            closing = threading.Thread(target=store.close)
            closing.start()
        store.gate.set()
        if fetch is not None:
            assert fetch.wait(30)
        if end == "drop cache":
            gc.collect()
            other.cache = PrefixCache(other.allocator, tiers=(other.tier, Memory()), model="a model")
        until(lambda: other.cache.cached_size() >= 0 and other.tier.stats()["arriving"] == 0)
        other.tier.verify()
        # Pages that arrived before the cancellation stay; cleared ones are gone.
        loadable = other.cache.match(PROMPT).loadable
        assert loadable == 0 if "clear" in end else loadable in {0, 24}
        other.end()
        scene.end()


def test_the_queue_of_writes_is_bounded(device: str) -> None:
    with BlockingStore("write") as store:
        scene = Scene(device, store=store, host=28)  # seven pages: four may wait
        scene.keep(PROMPT)
        scene.settle()
        assert store.is_asked.wait(30)
        until(lambda: scene.tier.stats()["storing"] == 6)  # four are being written, two wait
        assert (scene.tier.stats()["unstored"], scene.tier.stats()["pages"]) == (0, 6)
        # The places of four are kept until they are written; those of the two that wait are used again.
        scene.keep(range(500, 524))
        scene.settle()
        assert scene.tier.stats()["pages"] == 7
        store.gate.set()
        scene.stored()
        assert scene.tier.stats()["unstored"] > 0
        assert fetched(Scene(device, store=store), PROMPT).length == 16
        scene.end()


def test_pages_queued_behind_evicted_ones_are_written(device: str) -> None:
    with BlockingStore("write") as store:
        scene = Scene(device, store=store, host=28)  # seven pages: four may wait
        scene.keep(PROMPT)
        scene.settle()
        assert store.is_asked.wait(30)
        for first in (500, 600):
            scene.keep(range(first, first + 24))
            scene.settle()
        # Each has three pages in the tier, beside the four that are being written. Four others have left it.
        until(lambda: scene.tier.stats()["storing"] == 12)
        store.gate.set()
        scene.stored()
        assert (len(store.pages), scene.tier.stats()["unstored"]) == (7, 5)
        scene.end()


def test_a_store_of_files_may_be_damaged(
    device: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The third page of the file, which is one of those behind the first two of the prompt."""
    with files(tmp_path) as store:
        scene = Scene(device, store=store)
        for end in (8, len(PROMPT)):
            scene.keep(PROMPT[:end])
            scene.stored()
        scene.end()
    pages = tmp_path / "pages"
    damaged = bytearray(pages.read_bytes())
    damaged[2 * 4096 + 77] ^= 1
    pages.write_bytes(damaged)
    with files(tmp_path) as store:
        scene = Scene(device, store=store)
        assert 8 <= fetched(scene, PROMPT).length < len(PROMPT)
        lease = scene.cache.match(PROMPT)
        scene.finish(some(lease.load()))
        scene.check(lease, PROMPT)
        assert store.stats()["damaged"] == 1
        [said] = [text for text in caplog.messages if "damaged" in text]
        name = re.escape(str(tmp_path))
        assert re.fullmatch(rf"page [0-9a-f]{{64}} of the store in {name} is damaged: it was removed", said)
        assert scene.tier.stats()["damaged"] == 0, "it did not come to host memory"
        lease.release()
        scene.end()


def test_misuse_has_its_messages(device: str, tmp_path: Path) -> None:
    scene = Scene(device)
    tier, allocator = HostTier(scene.kv, 8), scene.allocator
    with files(tmp_path) as store:
        for tiers, model, kind, words in (
            ((tier, store), None, ConfigError, "needs the name of the model"),
            ((tier,), "m", ConfigError, 'model is "m", but there is no store'),
            ((), "m", ConfigError, 'model is "m", but there is no store'),
            ((store,), "m", TypeError, r"tiers\[0\] must be a HostTier, not FileStore"),
            ((tier, tier), "m", TypeError, r"tiers\[1\] must be a FileStore or another Store, not HostTier"),
            ((tier, store, store), "m", ConfigError, "3 tiers were given"),
        ):
            with pytest.raises(kind, match=words):
                PrefixCache(allocator, tiers=tiers, model=model)
        cache = PrefixCache(allocator, tiers=(tier, store), model="m")
        assert (cache.tiers, cache.model) == ((tier, store), "m")
        del cache
        gc.collect()
    with pytest.raises(RuntimeError, match="is closed"):
        PrefixCache(allocator, tiers=(tier, store), model="m")
    cache = PrefixCache(allocator, tiers=(tier,))
    fetch = cache.fetch(PROMPT)
    assert (fetch.length, fetch.query(), fetch.wait()) == (0, True, True)
    assert repr(fetch) == "Fetch(length=0, over)"
    with pytest.raises(ConfigError, match="limit is -1"):
        cache.fetch(PROMPT, limit=-1)
    with pytest.raises(ConfigError, match="timeout is -1"):
        fetch.wait(-1)
    fetch.cancel()


def test_a_refused_attachment_makes_no_cache(device: str) -> None:
    class Refusing(Memory):
        def attach(self, memory: Sequence[tuple[int, int]]) -> None:
            raise ConfigError(f"{sum(size for _, size in memory)} bytes are too many")

    scene = Scene(device)
    tier = HostTier(scene.kv, 8)
    with Refusing() as store, pytest.raises(ConfigError, match=f"{tier.mem_bytes()} bytes are too many"):
        PrefixCache(scene.allocator, tiers=(tier, store), model="m")
    PrefixCache(scene.allocator, tiers=(tier,))


def test_threads_publish_and_fetch_at_once(device: str, tmp_path: Path) -> None:
    with files(tmp_path) as store:
        scene = Scene(device, store=store, size=4 * SIZE, host=64)
        other = Scene(device, store=store, size=4 * SIZE, host=64)

        def work(number: int) -> None:
            for turn in range(10):
                prompt = [number % 3, turn, *range(14)]
                with (scene, other)[number % 2].cache.match(prompt) as lease:
                    held = (scene, other)[number % 2]
                    load = lease.load()
                    if load is not None:
                        load.wait_layer(2)
                    if held.allocator.available_size() >= 16:
                        held.check(lease, prompt)
                fetch = (scene, other)[(number + 1) % 2].cache.fetch(prompt)
                if turn % 3:
                    fetch.wait(30)

        for number in range(3):
            for turn in range(10):
                scene.keep([number, turn, *range(14)])
        together(work)
        scene.end()
        other.end()


def test_a_store_that_cannot_start_all_of_its_threads_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    start, threads = threading.Thread.start, list[threading.Thread]()

    def start_one(thread: threading.Thread) -> None:
        if thread.name == "kvpool-store":
            threads.append(thread)
            if len(threads) > 1:
                raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_one)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        Memory()
    gc.collect()
    threads[0].join(10)
    assert not threads[0].is_alive()


@needs_fork
def test_a_child_of_a_fork_has_nothing_to_wait_for(tmp_path: Path) -> None:
    with files(tmp_path) as store:
        scene = Scene("cpu", store=store)
        scene.keep(PROMPT)
        until(lambda: store.stats()["pages"] == 6)
        fetch = scene.cache.fetch(range(7))
        child = os.fork()
        if child == 0:
            is_right = fetch.query() and fetch.wait() and fetch.length == 0
            fetch.cancel()
            del fetch
            os._exit(0 if is_right else 1)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        del fetch
        scene.end()


def test_the_threads_of_a_store_end_with_it() -> None:
    def threads() -> int:
        return sum(thread.name == "kvpool-store" for thread in threading.enumerate())

    before = threads()
    store = Memory()
    assert threads() == before + 2
    store.close()
    store.close()
    until(lambda: threads() == before)
    store = Memory()
    del store
    until(lambda: threads() == before)
    # A program that closes nothing ends nevertheless, and so does one that closes at its end.
    program = """
import atexit, threading
import test_store
store, other = test_store.Memory(), test_store.Memory()
atexit.register(other.close)

def serve():  # goes on when the main thread has ended
    threading.main_thread().join()
    scene = test_store.Scene("cpu", store=store)
    scene.keep(test_store.PROMPT)
    scene.stored()
    assert len(store.pages) == 6
    print("served")

threading.Thread(target=serve).start()
"""
    path = os.pathsep.join(map(str, sys.path))
    begin = time.monotonic()
    subprocess.run(
        [sys.executable, "-c", program], check=True, env={**os.environ, "PYTHONPATH": path}, timeout=60
    )
    assert time.monotonic() - begin < 60


def test_a_thread_that_ends_before_its_store_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise RuntimeError("no more")

    with Memory() as store, caplog.at_level(logging.ERROR, "kvpool"):
        ends = threading.Event()
        _serve(fail, weakref.ref(store), ends)
        assert "a thread of a store has ended" in caplog.text
        assert "no more" in caplog.text
        caplog.clear()
        ends.set()
        _serve(fail, weakref.ref(store), ends)
    assert not caplog.records


def test_a_store_may_close_itself_and_survives_any_exception(caplog: pytest.LogCaptureFixture) -> None:
    class ExitingStore(Memory):
        def find(self, keys: Sequence[bytes]) -> Sequence[bool]:
            if not self.calls:
                self.calls.append(("find", 1))
                raise SystemExit(3)
            self.close()
            return [False] * len(keys)

    with ExitingStore() as store, caplog.at_level(logging.ERROR, "kvpool"):
        scene = Scene("cpu", store=store)
        for _ in range(2):
            assert fetched(scene, PROMPT).length == 0
        assert "find of 6 pages has failed" in caplog.text
        with pytest.raises(RuntimeError, match="is closed"):
            PrefixCache(scene.allocator, tiers=(HostTier(scene.kv, 8), store), model="m")
        scene.keep(PROMPT)
        scene.stored()
        assert scene.tier.stats()["unstored"] == 6
        scene.end()


def test_a_long_fetch_keeps_what_it_brought(device: str) -> None:
    """In more batches than are on their way at once, to a tier full of pages that the device has, too."""
    with Memory() as store:

        def made(pages: int) -> tuple[kvpool.TokenToKVPoolAllocator, HostTier, PrefixCache]:
            kv = kvpool.KVPool(64 * 16, 1, 16, 4096, device, torch.float32, page_size=16)  # 8 MiB a page
            slots = kvpool.TokenToKVPoolAllocator(64 * 16, device, 16)
            tier = HostTier(kv, 16 * pages)
            assert tier.wait_page_locked(30)  # of so much, in steps
            return slots, tier, PrefixCache(slots, tiers=(tier, store), model="m")

        def publish(prompt: Sequence[int]) -> None:
            cache.insert(prompt, some(slots.alloc(len(prompt))))
            until(lambda: cache.cached_size() and not tier.stats()["arriving"] + tier.stats()["storing"])

        prompt = range(1000, 1000 + 16 * 9)
        slots, tier, cache = made(18)
        publish(prompt)
        assert len(store.pages) == 9
        slots, tier, cache = made(18)
        for number in range(9):
            publish(range(16 * number, 16 * number + 32))
        assert tier.stats()["pages"] == 18
        fetch = cache.fetch(prompt)
        assert fetch.wait(30)
        assert (fetch.length, cache.match(prompt).loadable) == (16 * 9, 16 * 9)


@pytest.mark.parametrize("end", ["cancel", "drop"])
def test_a_prompt_is_fetched_again_after_a_fetch_that_ended_early(device: str, end: str) -> None:
    with BlockingStore("read") as store:
        stored_prompt(device, store)
        other = Scene(device, store=store)
        first: Fetch | None = other.cache.fetch(PROMPT)
        until(lambda: other.tier.stats()["arriving"] == 6)
        if end == "cancel":
            some(first).cancel()
        first = None
        # The thread that brings it looks now and then.
        until(lambda: other.tier.stats()["arriving"] == 0)
        again = other.cache.fetch(PROMPT)
        store.gate.set()
        assert again.wait(30)
        assert again.length == 24
        lease = other.cache.match(PROMPT)
        other.finish(some(lease.load()))
        other.check(lease, PROMPT)
        lease.release()
        del again
        other.end()


@pytest.mark.parametrize("write", ["through", "back"])
def test_pages_computed_during_a_fetch_are_written(device: str, write: str) -> None:
    with BlockingStore("read") as store:
        stored_prompt(device, store)
        other = Scene(device, store=store, write=write)
        fetch = other.cache.fetch(PROMPT)
        until(lambda: other.tier.stats()["arriving"] == 6)
        other.keep(PROMPT)
        store.fails = True
        if write == "back":
            other.cache.evict(24)
        store.gate.set()
        assert fetch.wait(30)
        other.settle()
        assert (fetch.length, other.tier.stats()["written"]) == (0, 6)
        other.forget()
        lease = other.cache.match(PROMPT)
        assert lease.loadable == 24
        other.finish(some(lease.load()))
        other.check(lease, PROMPT)
        lease.release()
        del fetch
        other.end()


def test_a_fetched_snapshot_is_kept_beside_pages_of_the_device(device: str) -> None:
    with Memory() as store:
        stored_prompt(device, store, has_states=True)
        other = Scene(device, store=store, has_states=True, write="selective", host=64, tracks=3)
        with other.cache.match(PROMPT) as lease:
            other.compute(lease, PROMPT[:16])  # without a snapshot
        fetch = fetched(other, PROMPT)
        assert fetch.length == 8
        for number in range(3):
            for _ in range(2):
                other.keep(range(500 * number, 500 * number + 8))
        other.settle()
        lease = other.cache.match(PROMPT)
        assert lease.loadable == 24
        other.finish(some(lease.load()))
        other.check(lease, PROMPT)


def test_a_prompt_without_a_missing_page_waits_for_no_other(device: str) -> None:
    with BlockingStore("find") as store:
        scene = Scene(device, store=store)
        scene.keep(PROMPT)
        slow = scene.cache.fetch(range(500, 524))
        for prompt in (PROMPT, PROMPT[:9], [1, 2, 3], []):
            assert scene.cache.fetch(prompt).query()
        assert not slow.query()
        store.gate.set()
        assert slow.wait(30)


@pytest.mark.parametrize("has_states", [False, True])
def test_a_prompt_that_is_in_host_memory_waits_for_no_other(device: str, has_states: bool) -> None:
    """Its pages, and the snapshot at their end, stay there as long as the fetch."""
    with BlockingStore("find") as store:
        scene = Scene(device, host=128, store=store, has_states=has_states)
        scene.keep(PROMPT)
        scene.stored()
        scene.cache.evict(1000)
        slow = scene.cache.fetch(range(500, 524))
        fetch = scene.cache.fetch(PROMPT)
        assert fetch.query()
        assert fetch.length == 0
        assert not scene.cache.fetch([*PROMPT, *range(4)]).query()
        for number in range(5):
            scene.keep(range(600 + 100 * number, 624 + 100 * number))
        scene.cache.evict(1000)
        assert scene.cache.match(PROMPT).loadable == 24
        del fetch
        store.gate.set()
        assert slow.wait(30)


def test_a_refused_cache_leaves_the_tier_as_it_was(device: str, tmp_path: Path) -> None:
    with files(tmp_path) as store:
        scene = stored_prompt(device, store)
        del scene.cache
        gc.collect()
    with pytest.raises(RuntimeError, match="is closed"):
        PrefixCache(scene.allocator, tiers=(scene.tier, store), model="another model")
    assert scene.tier.stats()["pages"] == 6


@needs_fork
def test_a_child_of_a_fork_does_not_wait_for_threads_of_its_parent(tmp_path: Path) -> None:
    """Forked again and again while they lock what the child locks, too."""
    with files(tmp_path) as store:
        scene = Scene("cpu", 1, size=256, host=512, store=store)
        is_over = False

        def work() -> None:
            number = 0
            while not is_over:
                number += 1
                prompt = [number % 7, *range(20)]
                fetch = scene.cache.fetch(prompt)
                with scene.cache.match(prompt) as lease:
                    slots = scene.allocator.alloc(21 - lease.length)
                    if slots is not None:
                        lease.publish(prompt[lease.length :], slots)
                scene.cache.evict(30)
                fetch.wait(1)
                scene.tier.clear()

        thread = threading.Thread(target=work)
        thread.start()
        try:
            for _ in range(12):
                child = os.fork()
                if child == 0:
                    signal.signal(signal.SIGALRM, signal.SIG_DFL)
                    signal.alarm(20)
                    scene.cache.match(range(9)).release()
                    scene.cache.evict(5)
                    assert scene.cache.fetch(range(9)).wait(10)
                    os._exit(0)
                _, status = os.waitpid(child, 0)
                assert os.waitstatus_to_exitcode(status) == 0
        finally:
            is_over = True
            thread.join()


LONG = list(range(240))


def test_pages_refused_by_a_slow_store_are_stored_later(device: str) -> None:
    """In order: nothing that came later lies behind a hole."""
    with BlockingStore("write") as store:
        scene = Scene(device, size=512, host=256, store=store)  # 64 pages: 32 may be written at a time
        scene.keep(LONG[:200])
        scene.settle()
        until(lambda: scene.tier.stats()["storing"] == 50)
        assert not scene.cache.wait_written(0.01)
        store.gate.set()
        scene.keep(LONG)
        assert scene.cache.wait_written(30)
        assert (len(store.pages), scene.tier.stats()["unstored"]) == (60, 0)
        assert fetched(Scene(device, size=512, store=store), LONG).length == 240
        scene.end()


def test_a_store_that_takes_a_part_of_each_call_gets_everything(device: str) -> None:
    class Reluctant(Memory):
        def write(
            self, keys: Sequence[bytes], addresses: Sequence[int], sizes: Sequence[int]
        ) -> Sequence[bool]:
            taken = super().write(keys[:3], addresses[:3], sizes[:3])
            return [*taken, *[False] * (len(keys) - 3)][: len(keys)]

    with Reluctant() as store:
        scene = Scene(device, size=512, host=256, store=store)
        scene.keep(LONG)
        assert scene.cache.wait_written(30)
        assert (len(store.pages), scene.tier.stats()["unstored"]) == (60, 0)
        scene.end()


def test_refused_pages_are_put_again_when_used(device: str) -> None:
    class Refusing(Memory):
        refuses = True

        def write(
            self, keys: Sequence[bytes], addresses: Sequence[int], sizes: Sequence[int]
        ) -> Sequence[bool]:
            return [False] * len(keys) if self.refuses else super().write(keys, addresses, sizes)

    with Refusing() as store:
        scene = Scene(device, store=store, has_states=True)
        scene.keep(PROMPT)
        scene.stored()
        assert (len(store.pages), scene.tier.stats()["unstored"]) == (0, 7)
        store.refuses = False
        scene.cache.match(PROMPT).release()
        assert fetched(scene, PROMPT).length == 0  # the device has all of it
        until(lambda: len(store.pages) == 7)
        assert fetched(Scene(device, store=store, has_states=True), PROMPT).length == 24
        scene.end()


def test_pages_used_on_the_device_stay_in_the_store(device: str, tmp_path: Path) -> None:
    """Each request begins alike; the device alone sees that, and the store is too small for all of them."""
    talks = [[*range(16), *[1000 * number + place for place in range(16)]] for number in range(1, 15)]
    for turn in range(2):
        with FileStore(tmp_path, 32 * 4096, page_bytes=PAGE_BYTES, threads=1) as store:
            scene = Scene(device, size=1024, host=1024, store=store)
            if turn:
                assert fetched(scene, talks[-1]).length == 32
            else:
                for talk in talks:
                    fetched(scene, talk)
                    scene.keep(talk)
                    assert scene.cache.wait_written(30)
            scene.end()


def test_uses_are_recorded_at_a_bounded_rate_and_never_by_a_match(device: str) -> None:
    with Memory() as store:
        scene = stored_prompt(device, store)
        store.calls.clear()
        for _ in range(200):
            scene.cache.match(PROMPT).release()
        assert not store.calls
        begin = time.monotonic()
        for _ in range(200):
            scene.cache.match(PROMPT).release()
            fetched(scene, PROMPT)
        until(lambda: ("touch", 6) in store.calls)
        seconds = time.monotonic() - begin
        uses = [count for name, count in store.calls if name == "touch"]
        assert 1 <= len(uses) <= 2 + seconds
        assert set(uses) == {6}
        scene.end()


class Agreement:
    """How ranks agree: on the smallest number that any of them passes."""

    def __init__(self, ranks: int) -> None:
        self.barrier, self.numbers = threading.Barrier(ranks, timeout=30), [0] * ranks

    def of(self, rank: int) -> Callable[[int], int]:
        def agree(have: int) -> int:
            self.numbers[rank] = have
            self.barrier.wait()
            least = min(self.numbers)
            self.barrier.wait()
            return least

        return agree


@pytest.mark.parametrize("has_states", [False, True])
def test_ranks_agree_on_what_all_of_their_stores_have(*, has_states: bool) -> None:
    """Their stores have different parts of the prompt; each loads what both have.

    A fetch brings the last snapshot that its store has, so ranks with states fetch again up to what all have.
    """
    with Memory() as one, Memory() as other:
        for store, ends in ((one, (8, 16, 24)), (other, (8, 20))):
            scene = Scene("cpu", store=store, has_states=has_states)
            for end in ends:
                scene.keep(PROMPT[:end])
                scene.stored()
            scene.end()
        common = 8 if has_states else 20  # snapshots are where the prompts ended
        agreement, results = Agreement(2), [(0, 0, 0)] * 2

        def serve(rank: int) -> None:
            scene = Scene("cpu", host=40, store=(one, other)[rank], has_states=has_states)
            agree, limit, least, most = agreement.of(rank), len(PROMPT), 0, 1
            while least < most:
                fetch = fetched(scene, PROMPT, limit=limit)
                with scene.cache.match(PROMPT, limit=limit) as lease:
                    have = lease.length + lease.loadable
                least, most = agree(have), -agree(-have)
                limit = least
            lease = scene.cache.match(PROMPT, limit=limit, agree=agree)
            loadable = lease.loadable
            del fetch
            # Host memory keeps it, whatever else comes there.
            for number in range(3):
                scene.keep([100 * rank + number] * 24)
            load = some(lease.load())
            scene.finish(load)
            scene.check(lease, PROMPT[:common])
            results[rank] = (loadable, load.length, lease.length)
            lease.release()
            scene.end()

        with ThreadPoolExecutor(2) as ranks:
            for rank in [ranks.submit(serve, rank) for rank in range(2)]:
                rank.result()
        assert results == [(common, common, common)] * 2


def test_an_agreement_is_between_what_the_device_has_and_what_this_rank_has(device: str) -> None:
    with Memory() as store:
        scene = stored_prompt(device, store)
        scene.forget()
        for wrong in (28, -1):
            with pytest.raises(ConfigError, match="agree"):
                scene.cache.match(PROMPT, agree=partial(max, wrong) if wrong > 0 else partial(min, wrong))
        with pytest.raises(ZeroDivisionError):
            scene.cache.match(PROMPT, agree=lambda have: have // 0)
        scene.keep(PROMPT[:8])
        with pytest.raises(ConfigError, match="of which 8 are on its device"):
            scene.cache.match(PROMPT, agree=lambda _have: 4)
        asked: list[int] = []

        def agree(have: int) -> int:
            asked.append(have)
            return 12

        with scene.cache.match(PROMPT, agree=agree) as lease:
            assert (lease.length, lease.loadable, asked) == (8, 4, [24])
        assert scene.cache.locked_size() == 0
        scene.end()
