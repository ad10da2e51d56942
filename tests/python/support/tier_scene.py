"""A prefix cache with host memory below, and perhaps a store, whose K, V and states tell their tokens."""

from __future__ import annotations

import gc
import random
import time
from typing import TYPE_CHECKING, Any

import torch
from common import some
from devices import to_current

import kvpool
from kvpool import GDNPool, HostTier, KVPool, PrefixCache, TokenToKVPoolAllocator

if TYPE_CHECKING:
    from collections.abc import Sequence

    from software import Driver

    from kvpool import FileStore, Lease, Load, Store

LAYERS = 3
SIZE = 64


class Scene:
    """A cache with host memory below, whose K, V and states encode their tokens."""

    def __init__(  # noqa: PLR0913 - the options of a scene
        self,
        device: str,
        page_size: int = 4,
        *,
        size: int = SIZE,
        host: int = 256,
        write: str = "through",
        has_states: bool = False,
        tracks: int = 4,
        store: FileStore | Store | None = None,
        model: str = "a model",
        **options: Any,  # noqa: ANN401
    ) -> None:
        self.device = device
        self.kv = KVPool(
            size, LAYERS, 2, 4, device, torch.float32, v_head_num=1, v_head_dim=3, page_size=page_size
        )
        self.allocator = TokenToKVPoolAllocator(size, device, page_size, strict=True)
        self.states = (
            GDNPool(4, 2, 1, 2, 2, 4, 3, device, torch.float32, max_track_slots=tracks)
            if has_states
            else None
        )
        self.tier = HostTier(self.kv, host, states=self.states, write=write)  # type: ignore[arg-type]
        if store is None:
            self.cache = PrefixCache(self.allocator, states=self.states, tiers=(self.tier,), **options)
        else:
            tiers = (self.tier, store)
            self.cache = PrefixCache(self.allocator, states=self.states, tiers=tiers, model=model, **options)

    def kv_of(self, tokens: Sequence[int], layer: int) -> list[torch.Tensor]:
        """K and V of the last of these tokens."""
        chance = random.Random(repr((list(tokens), layer)))  # noqa: S311
        return [
            torch.tensor([chance.random() for _ in range(8)]),
            torch.tensor([chance.random() for _ in range(3)]),
        ]

    def rows(self, tokens: Sequence[int], begin: int, layer: int) -> list[torch.Tensor]:
        """K and V of tokens from `begin` on."""
        each = [self.kv_of(tokens[: end + 1], layer) for end in range(begin, len(tokens))]
        k, v = zip(*each, strict=True) if each else ((torch.empty(0),), (torch.empty(0),))
        return [torch.stack(k).view(-1, 2, 4), torch.stack(v).view(-1, 1, 3)]

    def compute(self, lease: Lease, tokens: Sequence[int], *, state: int | None = None) -> kvpool.Published:
        """Computes what is behind a lease, and publishes it."""
        begin = lease.length
        slots = some(self.allocator.alloc(len(tokens) - begin))
        for layer in range(LAYERS if begin < len(tokens) else 0):
            k, v = self.rows(tokens, begin, layer)
            self.kv.set_kv_buffer(layer, slots, to_current(k), to_current(v))
        if self.states is not None and state is not None:
            self.states.recurrent_state[:, state] = float(sum(tokens))
            self.states.conv_state[:, state] = float(-sum(tokens))
        return lease.publish(tokens[begin:], slots, state=state)

    def keep(self, tokens: Sequence[int], **options: Any) -> None:  # noqa: ANN401
        """A request that computes a prompt, and ends."""
        state = 1 if self.states is not None else None
        with self.cache.match(tokens, **options) as lease:
            self.compute(lease, tokens, state=state)

    def settle(self) -> None:
        """Waits for what is copied down."""
        for _ in range(100_000):
            self.cache.evictable_size()
            if self.tier.stats()["arriving"] == 0:
                # By then, pages that a thread has noted count as on their way to a store.
                self.cache.evictable_size()
                return
            time.sleep(0.0001)
        raise AssertionError("copies end")

    def stored(self) -> None:
        """Waits for what is copied down, and from there to the store."""
        self.settle()
        for _ in range(100_000):
            if self.tier.stats()["storing"] == 0:
                return
            time.sleep(0.0001)
        raise AssertionError("what is put is over")

    def forget(self, tokens: int = SIZE) -> int:
        """Evicts from the device, when all is copied, and lets the rows have other contents."""
        self.settle()
        freed = self.cache.evict(tokens)
        self.settle()
        taken = self.allocator.alloc(self.allocator.available_size())
        if taken is not None:
            for layer in range(LAYERS):
                count = taken.numel()
                self.kv.set_kv_buffer(
                    layer,
                    taken,
                    to_current(torch.full((count, 2, 4), -1.0)),
                    to_current(torch.full((count, 1, 3), -1.0)),
                )
            self.allocator.free(taken)
        return freed

    def keep_on_host_only(self, driver: Driver) -> None:
        """The host alone has a prompt, nothing is on its way, and from now on nothing ends by itself."""
        self.keep(PROMPT)
        driver.run()
        self.forget()
        driver.run()
        driver.set_patience(1 << 30)

    def check(self, lease: Lease, tokens: Sequence[int], layers: int = LAYERS) -> None:
        """The first layers of a lease are those of its tokens."""
        for layer in range(layers):
            expected = self.rows(tokens[: lease.length], 0, layer)
            found = self.kv.gather_kv(layer, lease.slots)
            for one, other in zip(found, expected, strict=True):
                assert torch.equal(one.cpu(), other)
        if self.states is not None and lease.length:
            lease.restore(2)
            assert (self.states.recurrent_state[:, 2].cpu() == sum(tokens[: lease.length])).all()
            assert (self.states.conv_state[:, 2].cpu() == -sum(tokens[: lease.length])).all()

    def finish(self, load: Load) -> None:
        for layer in range(LAYERS):
            load.wait_layer(layer)
        while not load.query():
            pass

    def verify(self) -> None:
        self.allocator.verify()
        self.cache.verify()
        self.tier.verify()
        stats = self.allocator.stats()
        assert stats["available"] + stats["in_use"] == stats["capacity"]
        assert stats["dropped_frees"] == 0

    def end(self) -> None:
        """Gives everything back: nothing is lost."""
        gc.collect()
        self.settle()
        self.verify()
        self.cache.clear()
        self.settle()
        for _ in range(100_000):
            if self.allocator.available_size() == self.allocator.stats()["capacity"]:
                break
            time.sleep(0.0001)
        assert self.allocator.available_size() == self.allocator.stats()["capacity"]
        assert self.tier.stats()["pages"] == 0
        assert self.states is None or self.states.stats()["in_use"] == 0
        self.verify()


def begin(lease: Lease) -> Load:
    """A load, as soon as slots are free whose copies are not over."""
    for _ in range(100_000):
        if (load := lease.load()) is not None:
            return load
        time.sleep(0.0001)
    raise AssertionError("copies end")


PROMPT = list(range(100, 124))
