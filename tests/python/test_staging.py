"""Copies between pages and the host tier through staging areas: what, in which parts, and what fails."""

from __future__ import annotations

import gc
import random
from typing import TYPE_CHECKING

import devices
import pytest
import torch
from common import failing, on_stream, some
from devices import to_current
from tier_scene import LAYERS, PROMPT, SIZE, Scene, begin

from kvpool import ConfigError, HostTier, KVPool, OutOfMemoryError, PrefixCache, TokenToKVPoolAllocator

if TYPE_CHECKING:
    from collections.abc import Sequence

    from software import Driver

TOKENS = 256
DEPTH = 40
WIDTH = 256


class LargeScene:
    """Pages of one token and 2 KiB a layer, of whose layers 32 make a row of 64 KiB."""

    def __init__(self) -> None:
        self.kv = KVPool(2 * TOKENS, DEPTH, 1, WIDTH, "cuda", torch.float32)
        self.allocator = TokenToKVPoolAllocator(2 * TOKENS, "cuda")
        self.tier = HostTier(self.kv, 2 * TOKENS)
        assert self.tier.wait_page_locked(30)
        self.cache = PrefixCache(self.allocator, tiers=(self.tier,))

    def values(self, tokens: Sequence[int], layer: int) -> torch.Tensor:
        return torch.tensor(tokens, dtype=torch.float32) + 1000 * layer + 1

    def write(self, rows: list[int], tokens: Sequence[int]) -> None:
        """Computes K and V, by number: V has the opposite of K."""
        for layer in range(DEPTH):
            values = self.values(tokens, layer).view(-1, 1, 1).expand(-1, 1, WIDTH)
            for buffer, sign in ((self.kv.k_buffer[layer], 1), (self.kv.v_buffer[layer], -1)):
                whole = buffer.cpu()
                whole[rows] = sign * values
                buffer.copy_(to_current(whole))

    def forget(self) -> None:
        self.cache.evict(2 * TOKENS)
        for buffer in (*self.kv.k_buffer, *self.kv.v_buffer):
            buffer.zero_()

    def is_there(self, rows: torch.Tensor, tokens: Sequence[int], layer: int) -> bool:
        rows = rows.cpu().long()
        values = self.values(tokens, layer)
        return all(
            torch.equal(buffer[layer].cpu()[rows, 0, at], sign * values)
            for buffer, sign in ((self.kv.k_buffer, 1), (self.kv.v_buffer, -1))
            for at in (0, WIDTH - 1)
        )

    def keep_on_host(self, driver: Driver, *prompts: range, at_once: int) -> None:
        """Saves some tokens of each, in turns, and evicts them from the device."""
        slots = [some(self.allocator.alloc(len(tokens))) for tokens in prompts]
        for its, tokens in zip(slots, prompts, strict=True):
            self.write(its.cpu().tolist(), tokens)
        for end in range(at_once, TOKENS + 1, at_once):
            for its, tokens in zip(slots, prompts, strict=True):
                with self.cache.match(tokens[:end]) as lease:
                    lease.publish(tokens[end - at_once : end], its[end - at_once : end])
        self.cache.wait_written()
        self.forget()
        driver.run()


@pytest.mark.cuda
def test_a_load_passes_through_the_area_some_layers_at_a_time(driver: Driver) -> None:
    with devices.on("cuda"):
        scene, tokens = LargeScene(), range(TOKENS)
        scene.keep_on_host(driver, tokens, at_once=TOKENS)
        driver.reset_calls()
        with scene.cache.match(tokens) as lease:
            load = begin(lease)
            # 32 layers of 160 pages in each of the parts of 10 MiB, and then 8 layers.
            assert driver.calls("cuMemcpy2DAsync_v2") == driver.calls("launch:kvpool_copy_pages") == 2 + 1
            stream = driver.stream()
            with on_stream(stream):
                rows = lease.slots
                load.wait_layer(0)
            driver.run(stream)
            assert all(scene.is_there(rows, tokens, layer) for layer in range(32))
            assert not scene.is_there(rows, tokens, 32)
            with on_stream(stream):
                load.wait_layer(DEPTH - 1)
            driver.run(stream)
            assert all(scene.is_there(rows, tokens, layer) for layer in range(DEPTH))
            driver.run()
            assert load.query()


@pytest.mark.cuda
def test_scattered_pages_are_loaded_without_the_area(driver: Driver) -> None:
    """A copy for each would take longer than a kernel that reads them in place."""
    with devices.on("cuda"):
        scene, mine = LargeScene(), range(TOKENS)
        # Their pages go to the tier in turns.
        scene.keep_on_host(driver, mine, range(5000, 5000 + TOKENS), at_once=1)
        driver.reset_calls()
        with scene.cache.match(mine) as lease:
            load = begin(lease)
            assert driver.calls("cuMemcpy2DAsync_v2") == 0
            assert driver.calls("launch:kvpool_copy_pages") == DEPTH
            load.wait_layer(DEPTH - 1)
            driver.run()
            assert all(scene.is_there(lease.slots, mine, layer) for layer in range(DEPTH))


@pytest.mark.cuda
def test_a_load_through_the_area_of_which_a_call_fails_can_be_repeated(driver: Driver) -> None:
    with devices.on("cuda"):
        scene, tokens = LargeScene(), range(TOKENS)
        scene.keep_on_host(driver, tokens, at_once=TOKENS)
        lease = scene.cache.match(tokens)
        failures = 0

        def load_some() -> None:
            some(lease.load())

        for error in failing(driver, load_some):
            failures += error is not None
            driver.run()
            lease.release()
            lease = scene.cache.match(tokens)
            load = begin(lease)
            load.wait_layer(DEPTH - 1)
            driver.run()
            assert all(scene.is_there(lease.slots, tokens, layer) for layer in (0, 31, 32, DEPTH - 1))
            lease.release()
            scene.forget()
            driver.run()
            lease = scene.cache.match(tokens)
        # Of both groups: copies, events and launches.
        assert failures > 10
        lease.release()
        scene.cache.verify()


@pytest.mark.cuda
@pytest.mark.parametrize("has_states", [False, True])
@pytest.mark.parametrize(
    ("page_size", "staging", "passes"),
    [(1, 0, 0), (1, 1536, 8), (4, 3072, 6), (4, 4608, 3), (4, 1 << 20, 1)],
)
def test_pages_come_to_host_memory_through_a_staging_area(  # noqa: PLR0913 - two fixtures
    driver: Driver,
    monkeypatch: pytest.MonkeyPatch,
    page_size: int,
    staging: int,
    passes: int,
    *,
    has_states: bool,
) -> None:
    """A kernel fills one part, and a copy of the driver empties it, as the pages lie in a row."""
    monkeypatch.setenv("KVPOOL_STAGING_BYTES", str(staging))
    with devices.on("cuda"):
        scene = Scene("cuda", page_size, has_states=has_states)
        # An area has whole lines of memory.
        most = min(staging, 3 * scene.tier.mem_bytes())
        assert most * 2 // 3 <= scene.tier.staging_bytes() == scene.tier.stats()["staging_bytes"] <= most
        driver.reset_calls()
        scene.keep(PROMPT)
        scene.settle()
        states = int(has_states)
        assert driver.calls("launch:kvpool_copy_pages") == (passes or 1) + states
        assert driver.calls("cuMemcpy2DAsync_v2") == passes + states * bool(staging)
        assert scene.forget() == 24
        lease = scene.cache.match(PROMPT)
        scene.finish(begin(lease))
        scene.check(lease, PROMPT)
        lease.release()
        scene.end()


@pytest.mark.cuda
@pytest.mark.usefixtures("driver")
def test_gathered_pages_reach_scattered_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPOOL_STAGING_BYTES", "4608")
    chance = random.Random(1)  # noqa: S311
    with devices.on("cuda"):
        scene = Scene("cuda", host=44)  # eleven pages
        prompts = [[prompt] * (4 * chance.randrange(2, 7)) for prompt in range(12)]
        copied = 0
        for _ in range(60):
            prompt = chance.choice(prompts)
            scene.keep(prompt)
            scene.forget()
            with scene.cache.match(prompt) as lease:
                load = lease.load()
                if load is not None:
                    scene.finish(load)
                    scene.check(lease, prompt[: lease.length])
                    copied += load.length
        assert copied > 200
        assert scene.tier.stats()["evicted"] > 50
        scene.end()


@pytest.mark.cuda
def test_the_places_of_a_prompt_lie_together(driver: Driver) -> None:
    """The places of another prompt, whose end was evicted first."""
    with devices.on("cuda"):
        scene = Scene("cuda", host=48)  # twelve pages
        for first in (100, 200):
            scene.keep(range(first, first + 24))
            scene.forget()
        driver.reset_calls()
        scene.keep(range(300, 324))
        scene.settle()
        assert scene.tier.stats()["evicted"] == 6
        assert driver.calls("cuMemcpy2DAsync_v2") == 1
        scene.end()


@pytest.mark.cuda
def test_no_copy_crosses_what_is_page_locked_at_once(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of 2 MiB, of which 32 are page-locked in a step; the area has room for all 36."""
    monkeypatch.setenv("KVPOOL_STAGING_BYTES", str(1 << 30))
    with devices.on("cuda"):
        kv = KVPool(16 * 36, 1, 1, 1 << 14, "cuda", torch.float32, page_size=16)
        allocator = TokenToKVPoolAllocator(16 * 36, "cuda", 16)
        tier = HostTier(kv, 16 * 36)
        assert tier.staging_bytes() == 3 * tier.mem_bytes()
        cache = PrefixCache(allocator, tiers=(tier,))
        assert tier.wait_page_locked(30)
        driver.reset_calls()
        with cache.match(range(16 * 36)) as lease:
            slots = some(allocator.alloc(16 * 36))
            for buffer in (kv.k_buffer[0], kv.v_buffer[0]):
                buffer.copy_(
                    to_current(
                        torch.arange(buffer.shape[0], dtype=torch.float32).view(-1, 1, 1).expand(buffer.shape)
                    )
                )
            lease.publish(range(16 * 36), slots)
        driver.run()
        assert driver.calls("launch:kvpool_copy_pages") == 1
        assert driver.calls("cuMemcpy2DAsync_v2") == 2
        assert cache.evict(16 * 36) == 16 * 36
        kv.k_buffer[0].zero_()
        driver.reset_calls()
        with cache.match(range(16 * 36)) as lease:
            load = begin(lease)
            load.wait_layer(0)
            driver.run()
            # Nine in each part of the area, of which the last has those on both sides.
            assert driver.calls("cuMemcpy2DAsync_v2") == 5
            rows = lease.slots.cpu().long()
            assert torch.equal(
                kv.k_buffer[0].cpu()[rows, 0, 0].sort().values, torch.arange(16, 16 * 37).float()
            )


@pytest.mark.cuda
def test_a_staging_area_that_does_not_fit_is_named(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    with devices.on("cuda"):
        kv = KVPool(SIZE, LAYERS, 2, 4, "cuda", torch.float32, page_size=4)
        gc.collect()
        before = driver.device_bytes(), driver.page_locked_bytes()
        driver.set_capacity(before[0] + 4096)
        with pytest.raises(
            OutOfMemoryError, match=r"KVPOOL_STAGING_BYTES; 0 for none.*98304 bytes asked for"
        ):
            HostTier(kv, 256)
        gc.collect()
        assert (driver.device_bytes(), driver.page_locked_bytes()) == before
        monkeypatch.setenv("KVPOOL_STAGING_BYTES", "0")
        assert HostTier(kv, 256).staging_bytes() == 0
        # The last is no text.
        for value in ("-1", "64k", "", "\udcff"):
            monkeypatch.setenv("KVPOOL_STAGING_BYTES", value)
            with pytest.raises(ConfigError, match=r"KVPOOL_STAGING_BYTES is .* must be a number from 0 on"):
                HostTier(kv, 256)
