"""`kvpool.typing.InFlight`: what copies, loads, fetches, transfers and leases have in common."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import direct_network
import numpy as np
import pytest
import torch
from common import some
from memory_store import Memory
from tier_scene import PROMPT, Scene, begin

import kvpool
from kvpool import ChunkPool, FileStore, KVPool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from kvpool.typing import InFlight

    Make = Callable[[Path], AbstractContextManager[InFlight]]


class Gated(Memory):
    """Answers when it is opened."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        super().__init__()

    def find(self, keys: Sequence[bytes]) -> Sequence[bool]:
        assert self.gate.wait(30)
        return super().find(keys)


@contextmanager
def a_copy(_: Path) -> Iterator[InFlight]:
    chunk = some(ChunkPool(1, (8,), "float32").allocate())
    yield chunk.copy_from(torch.ones(8))


@contextmanager
def a_load(_: Path) -> Iterator[InFlight]:
    scene = Scene("cpu")
    scene.keep(PROMPT)
    scene.forget()
    with scene.cache.match(PROMPT) as lease:
        yield begin(lease)


@contextmanager
def a_fetch(_: Path) -> Iterator[InFlight]:
    with Memory() as store:
        yield Scene("cpu", store=store).cache.fetch(PROMPT)


@contextmanager
def a_store_transfer(path: Path) -> Iterator[InFlight]:
    with FileStore(str(path / "store"), 1 << 20, page_bytes=4096) as store:
        yield store.put(np.ones((4, 32), np.uint8), np.ones((4, 4096), np.uint8))


def pool() -> KVPool:
    return KVPool(16, 1, 1, 4, device="cpu", dtype="float32")


@contextmanager
def a_transfer(_: Path) -> Iterator[InFlight]:
    with direct_network.endpoint("a", pool()) as a, direct_network.endpoint("b", pool()) as b:
        peer = b.connect(a.metadata())
        yield peer.read(peer.slots(a.lend([1, 2]).ticket), [3, 4])


@contextmanager
def a_lease(_: Path) -> Iterator[InFlight]:
    with direct_network.endpoint("a", pool()) as a:
        yield a.lend([1, 2], lease_s=0.05)


KINDS: list[Make] = [a_copy, a_load, a_fetch, a_store_transfer, a_transfer, a_lease]
each_kind = pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__.removeprefix("a_"))


@each_kind
def test_it_ends_and_can_be_waited_for(make: Make, tmp_path: Path) -> None:
    with make(tmp_path) as flight:
        assert flight.error is None
        assert flight.wait(timeout=30) is True
        assert flight.query() is True
        assert flight.wait() is True
        assert flight.wait(0) is True
        flight.cancel()  # it is over: nothing happens
        assert flight.query() is True
        assert flight.error is None


@each_kind
def test_it_can_be_given_up_again_and_again(make: Make, tmp_path: Path) -> None:
    with make(tmp_path) as flight:
        flight.cancel()
        flight.cancel()
        deadline = time.monotonic() + 30
        while not is_over(flight):
            assert time.monotonic() < deadline


def is_over(flight: InFlight) -> bool:
    try:
        return flight.query()
    except RuntimeError:  # a load that did not arrive
        return flight.error is not None


@each_kind
def test_it_is_a_fence(make: Make, tmp_path: Path) -> None:
    allocator = kvpool.TokenToKVPoolAllocator(8, device="cpu")
    with make(tmp_path) as flight:
        allocator.free(some(allocator.alloc(8)), after=flight)
        assert flight.wait(30)
        assert allocator.available_size() == 8


@pytest.mark.parametrize("timeout", [-1.0, float("nan")])
@pytest.mark.parametrize("make", KINDS[:4], ids=lambda make: make.__name__.removeprefix("a_"))
def test_a_wrong_time_is_refused(make: Make, timeout: float, tmp_path: Path) -> None:
    with make(tmp_path) as flight, pytest.raises(ValueError, match="it must be seconds, not negative"):
        flight.wait(timeout)


def test_a_wait_ends_with_its_time() -> None:
    with ExitStack() as stack:
        store = stack.enter_context(Gated())
        stack.callback(store.gate.set)
        fetch = Scene("cpu", store=store).cache.fetch(PROMPT)
        lent = stack.enter_context(direct_network.endpoint("a", pool())).lend([1], lease_s=60)
        flights: list[InFlight] = [fetch, lent]
        for flight in flights:
            start = time.monotonic()
            assert flight.wait(0.02) is False
            assert time.monotonic() - start >= 0.02
            assert flight.query() is False
        store.gate.set()
        lent.cancel()
        assert all(flight.wait(30) for flight in flights)
        assert not lent.returned


def test_pages_of_a_store_that_are_given_up_are_not_present(tmp_path: Path) -> None:
    keys, pages = np.arange(200 * 32, dtype=np.uint32).astype(np.uint8).reshape(200, 32), 1 << 20
    keys[:, 0] = np.arange(200)
    memory: Any = np.ones((200, pages), np.uint8)
    with FileStore(str(tmp_path / "store"), 200 * pages, page_bytes=pages, threads=1) as store:
        put = store.put(keys, memory)
        put.cancel()
        assert put.wait(60)
        stored = sum(put.present)
        assert stored < 200
        assert len(store) == stored == 200 - store.stats()["dropped"]
        again = store.put(keys[:8], memory[:8])
        assert again.wait(60)
        assert all(again.present)
        get = store.get(keys[:8], memory[:8])
        get.cancel()
        assert get.wait(60)
        assert get.leading <= 8
        assert store.find(keys[:8]) == [True] * 8


@pytest.mark.cuda
def test_a_load_and_a_copy_on_a_device(device: str) -> None:
    scene = Scene(device)
    scene.keep(PROMPT)
    scene.forget()
    with scene.cache.match(PROMPT) as lease:
        load = begin(lease)
        assert load.wait(30)
        assert load.error is None
        chunk = some(ChunkPool(1, (8,), "float32").allocate())
        copy = chunk.copy_from(torch.ones(8, device=device))
        assert copy.wait(30)
        assert copy.error is None
        assert chunk.tensor().eq(1).all()
    scene.end()


def test_a_load_that_was_given_up_has_an_error() -> None:
    scene = Scene("cpu")
    scene.keep(PROMPT)
    scene.forget()
    with scene.cache.match(PROMPT) as lease:
        load = begin(lease)
        load.cancel()
        if lease.length:  # it was over before
            assert load.wait(30)
            return
        for ends in (load.wait, load.query, lambda: load.wait(1)):
            with pytest.raises(RuntimeError, match="the load of 24 tokens has ended early"):
                ends()
        assert str(load.error) == "the load of 24 tokens has ended early"
