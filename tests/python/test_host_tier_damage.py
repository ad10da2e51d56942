"""Damage in host memory: it is found before pieces leave it, counted, named and computed again."""

from __future__ import annotations

import ctypes
import re
import threading
from typing import TYPE_CHECKING

import devices
import numpy as np
import pytest
from common import some
from memory_store import Memory
from tier_scene import PROMPT, Scene, begin

import kvpool
from kvpool import CacheLayout, Group, Plane
from kvpool.verify import prove
from kvpool.verify.drivers.host_tier import HostTierDriver

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray
    from software import Driver

    from kvpool import PrefixCache

    Bytes = NDArray[np.uint8]

PAGE = 4


class Onlooker(kvpool.Store):
    """A store that has nothing and takes nothing, but knows where the pieces of a tier are."""

    def __init__(self) -> None:
        self.attached: list[tuple[int, int]] = []
        super().__init__()

    def attach(self, memory: Sequence[tuple[int, int]]) -> None:
        self.attached += memory

    def find(self, keys: Sequence[bytes]) -> Sequence[bool]:
        return [False] * len(keys)

    def touch(self, keys: Sequence[bytes]) -> Sequence[bool]:
        """Says that it has them, so that nothing is put again, and compared for that, when it is used."""
        return [True] * len(keys)

    def read(self, keys: Sequence[bytes], _addresses: Sequence[int], _sizes: Sequence[int]) -> Sequence[bool]:
        return [False] * len(keys)

    def write(
        self, keys: Sequence[bytes], _addresses: Sequence[int], _sizes: Sequence[int]
    ) -> Sequence[bool]:
        return [False] * len(keys)


def pieces(store: Onlooker | Memory, count: int, which: int = 0) -> Bytes:
    """The memory of the pages of a tier or, with 1, of its states: a row for each of `count`."""
    address, size = store.attached[which]
    memory: Bytes = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
    return memory.reshape(count, -1)


def pages_of(scene: Scene, store: Onlooker | Memory) -> Bytes:
    """The pages of a scene, without what is between them."""
    return pieces(store, scene.tier.stats()["capacity"])[:, : scene.tier.page_bytes]


def states_of(scene: Scene, store: Onlooker | Memory) -> Bytes:
    return pieces(store, scene.tier.stats()["state_capacity"], 1)


def stale(memory: Bytes, at: int) -> None:
    memory[at] = memory[at - 1]


def swapped(memory: Bytes, at: int) -> None:
    memory[[at, at + 1]] = memory[[at + 1, at]]


def shifted(memory: Bytes, at: int) -> None:
    memory[at] = np.roll(memory[at], 64)


def half_written(memory: Bytes, at: int) -> None:
    memory[at, memory.shape[1] // 2 :] = 0


def never_written(memory: Bytes, at: int) -> None:
    memory[at] = 0


def named(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The pieces that the log names as damaged."""
    found = [
        re.fullmatch(r"(.+) of a HostTier was damaged in host memory: .+", text) for text in caplog.messages
    ]
    return [match[1] for match in found if match]


def loads_again(scene: Scene, length: int) -> None:
    """What is left of the prompt is loaded, the rest is computed, and all of it is right."""
    lease = scene.cache.match(PROMPT)
    assert (lease.length, lease.loadable) == (0, length)
    if length:
        scene.finish(begin(lease))
        scene.check(lease, PROMPT)
    scene.compute(lease, PROMPT, state=1 if scene.states is not None else None)
    scene.check(lease, PROMPT)
    lease.release()
    scene.stored()
    scene.forget()
    # It came to the tier again, and is found there.
    lease = scene.cache.match(PROMPT)
    assert lease.loadable == 24
    scene.finish(begin(lease))
    scene.check(lease, PROMPT)
    lease.release()
    scene.end()


@pytest.mark.parametrize(
    ("damage", "count"), [(stale, 1), (swapped, 2), (shifted, 1), (half_written, 1), (never_written, 1)]
)
def test_a_damaged_page_is_computed_again(
    device: str, caplog: pytest.LogCaptureFixture, damage: Callable[[Bytes, int], None], count: int
) -> None:
    with Onlooker() as store:
        scene = Scene(device, store=store, events=True)
        scene.keep(PROMPT)
        scene.stored()
        scene.forget()
        stored = [event for event in scene.cache.events() if isinstance(event, kvpool.Stored)]
        names = [page.hex() for page in stored[-1].pages]
        damage(pages_of(scene, store), 3)
        lease = scene.cache.match(PROMPT)
        assert lease.loadable == 24, "nobody has looked at it"
        assert scene.tier.stats()["damaged"] == 0
        load = begin(lease)
        assert (load.length, lease.length) == (12, 12), "the load ends before it"
        scene.finish(load)
        scene.check(lease, PROMPT)
        assert scene.tier.stats()["damaged"] == count
        assert named(caplog) == [f"page {name}" for name in names[3 : 3 + count]]
        removed = [event for event in scene.cache.events() if isinstance(event, kvpool.Removed)]
        assert [(event.tier, [page.hex() for page in event.pages]) for event in removed] == [
            ("host", names[3 : 3 + count])
        ]
        lease.release()
        scene.forget()
        loads_again(scene, 12)
        assert (scene.tier.stats()["damaged"], len(named(caplog))) == (count, count), "each is named once"


@pytest.mark.parametrize("is_page_damaged", [False, True])
def test_a_damaged_state_ends_the_load_at_the_one_before(
    device: str, caplog: pytest.LogCaptureFixture, *, is_page_damaged: bool
) -> None:
    """Or nothing is loaded, if a page of what that one needs is damaged, too."""
    with Onlooker() as store:
        scene = Scene(device, store=store, has_states=True)
        with scene.cache.match(PROMPT) as lease:
            scene.compute(lease, PROMPT[:8], state=1)
            scene.compute(lease, PROMPT, state=1)
        scene.stored()
        scene.forget()
        states = states_of(scene, store)
        [last] = [at for at in range(len(states)) if (states[at, :4].view(np.float32) == sum(PROMPT)).all()]
        states[last, :] = 0
        pages = pages_of(scene, store)
        if is_page_damaged:
            pages[1] = 0
        lease = scene.cache.match(PROMPT)
        assert lease.loadable == 24
        load = begin(lease)
        assert (load.length, lease.length) == ((0, 0) if is_page_damaged else (8, 8))
        if not is_page_damaged:
            scene.finish(load)
            scene.check(lease, PROMPT)
        assert scene.tier.stats()["damaged"] == 1 + is_page_damaged
        assert [name.partition(" ")[0] for name in named(caplog)] == ["page", "the"][1 - is_page_damaged :]
        lease.release()
        scene.forget()
        loads_again(scene, 0 if is_page_damaged else 8)


def test_a_damaged_page_goes_to_no_store(device: str, caplog: pytest.LogCaptureFixture) -> None:
    """While it waits, because the store is busy with others."""
    gate = threading.Event()

    class Slow(Memory):
        def write(
            self, keys: Sequence[bytes], addresses: Sequence[int], sizes: Sequence[int]
        ) -> Sequence[bool]:
            gate.wait(30)
            return super().write(keys, addresses, sizes)

    with Slow() as store:
        # Half of the places are kept for the store: three pages are being written, three wait.
        scene = Scene(device, host=24, store=store)
        scene.keep(PROMPT)
        scene.settle()
        pages_of(scene, store)[4] = 0
        gate.set()
        scene.stored()
        assert (len(store.pages), all(map(any, store.pages.values()))) == (5, True)
        stats = scene.tier.stats()
        assert (stats["damaged"], stats["unstored"], stats["pages"]) == (1, 1, 5)
        assert len(named(caplog)) == 1
        scene.forget()
        loads_again(scene, 16)
        assert len(store.pages) == 6
        assert all(map(any, store.pages.values()))


def test_a_page_of_a_store_is_checked_once_it_is_there(device: str) -> None:
    with Memory() as store:
        scene = Scene(device, store=store)
        scene.keep(PROMPT)
        scene.stored()
        scene.forget()
        scene.tier.clear()
        fetch = scene.cache.fetch(PROMPT)
        assert fetch.wait(30)
        assert fetch.length == 24
        pages = pages_of(scene, store)
        fetched = [at for at in range(len(pages)) if bytes(pages[at]) in set(store.pages.values())]
        pages[fetched, 100:] = 0
        lease = scene.cache.match(PROMPT)
        assert lease.loadable == 24
        assert begin(lease).length == 0
        assert scene.tier.stats()["damaged"] == 6
        lease.release()
        del fetch
        # The store still has them.
        fetch = scene.cache.fetch(PROMPT)
        assert fetch.wait(30)
        assert fetch.length == 24
        loads_again(scene, 24)


def test_ranks_agree_without_what_is_damaged(device: str) -> None:
    asked: list[int] = []

    def least(have: int) -> int:
        asked.append(have)
        return have

    with Onlooker() as store:
        scene = Scene(device, store=store)
        scene.keep(PROMPT)
        scene.stored()
        scene.forget()
        pages = pages_of(scene, store)
        pages[4] = 0
        lease = scene.cache.match(PROMPT, agree=least)
        assert (asked, lease.loadable) == ([16], 16)
        # What is damaged after the agreement is not loaded, either.
        pages[2] = 0
        load = begin(lease)
        assert load.length == 8
        scene.finish(load)
        assert scene.tier.stats()["damaged"] == 2
        scene.check(lease, PROMPT)
        lease.release()
        scene.forget()
        loads_again(scene, 8)


@pytest.mark.cuda
def test_a_copy_that_runs_is_not_taken_for_damage(driver: Driver) -> None:
    """A load of pages that are still on their way to the host is behind their copy, and is not compared."""
    with devices.on("cuda"):
        scene = Scene("cuda")
        driver.set_patience(1 << 30)
        scene.keep(PROMPT)
        scene.cache.evict(64)
        lease = scene.cache.match(PROMPT)
        assert lease.loadable == 24
        load = some(lease.load())
        assert load.length == 24
        driver.restore()
        scene.finish(load)
        scene.check(lease, PROMPT)
        assert scene.tier.stats()["damaged"] == 0
        lease.release()
        scene.end()


class DamagedTierDriver(HostTierDriver):
    """`kvpool verify` over a tier whose memory somebody else writes to after the first move."""

    damage: Callable[[Bytes, int], None]

    def _make_cache(self) -> PrefixCache:
        self.store = Onlooker()
        tiers = (self.tier, self.store)
        return kvpool.PrefixCache(self.allocator, states=self.states, tiers=tiers, model="a model")

    def move(self) -> None:
        super().move()
        memory = pieces(self.store, self.tier.stats()["capacity"])[:, : self.tier.page_bytes]
        if not self.tier.stats()["damaged"]:
            type(self).damage(memory, 3)


@pytest.mark.parametrize("damage", [stale, shifted, half_written], ids=lambda damage: damage.__name__)
def test_verify_finds_no_wrong_byte_but_missing_pages(
    caplog: pytest.LogCaptureFixture, damage: Callable[[Bytes, int], None]
) -> None:
    """Without the check, the finding would be what the wrong bytes are."""
    planes = [Plane(name, "bfloat16", (2, 16)) for name in ("k", "v")]
    layout = CacheLayout([Group("full", "full", [0, 3], planes)], page_size=PAGE)
    driver = type("Damaged", (DamagedTierDriver,), {"damage": staticmethod(damage)})(layout, 400)
    with driver:
        finding = prove(driver, tokens=400).finding
        assert str(finding) == "page 3 of request 0, layer 0, k, byte 0 (position 12): is missing"
        assert driver.tier.stats()["damaged"] == 1
        assert len(named(caplog)) == 1
