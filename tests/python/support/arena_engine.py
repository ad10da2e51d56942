"""An engine whose memory holds what follows from its tokens, over a planner and an arena's prefix cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import devices

from kvpool import (
    ArenaHostTier,
    ArenaLease,
    ArenaPlanner,
    ArenaPrefixCache,
    CacheArena,
    CacheLayout,
    FileStore,
    Group,
    Plane,
    Store,
)

if TYPE_CHECKING:
    from kvpool.typing import Policy

PAGE, ROWS = 4, 8
K = [Plane("k", "float32", (2,))]
STATES = [Plane("recurrent", "float32", (2,)), Plane("conv", "float32", (2,))]
FULL = Group("full", "full", [0, 3], K)
WINDOW = Group("window", "window", [1], K, tokens=6, sinks=2)
CHUNK = Group("chunk", "chunk", [2], K, tokens=8)
STATE = Group("state", "state", [4, 5], STATES)
HYBRID = CacheLayout([FULL, WINDOW, STATE], page_size=PAGE)
LAYOUTS = {
    "full": CacheLayout([FULL], page_size=PAGE),
    "windows": CacheLayout([FULL, WINDOW, CHUNK], page_size=PAGE),
    "hybrid": HYBRID,
}


def digest(tokens: list[int]) -> float:
    """What an entry holds that follows from all tokens up to its own."""
    value = 7.0
    for token in tokens:
        value = (value * 31 + token + 1) % 100_003
    return value


class Engine:
    """Requests whose memory holds what follows from their tokens."""

    def __init__(
        self,
        layout: CacheLayout,
        arena_bytes: int,
        *,
        tier_bytes: int = 0,
        store: FileStore | Store | None = None,
        policy: Policy = "lru",
    ) -> None:
        self.arena = CacheArena(layout, arena_bytes, devices.current())
        self.tiers = [ArenaHostTier(self.arena, tier_bytes)] if tier_bytes else []
        stores = [store] if store else []
        self.cache = ArenaPrefixCache(
            self.arena, policy=policy, tiers=[*self.tiers, *stores], model="a model" if store else None
        )
        self.planner = ArenaPlanner(self.arena, ROWS, 64, ROWS, 256)
        self.groups = layout.groups
        self.strides = {group.name: group.stride for group in self.groups}
        self.tokens: dict[int, list[int]] = {}
        self.buffers = {
            (group.name, layer): self.arena.buffer(group.name, "k", layer)
            for group in self.groups
            if group.kind != "state"
            for layer in group.layers
        }
        self.states = {
            (plane.name, layer): self.arena.buffer("state", plane.name, layer)
            for group in self.groups
            if group.kind == "state"
            for plane in group.planes
            for layer in group.layers
        }

    def write(self, row: int, first: int) -> None:
        """Write the entries from a position on, and the states."""
        tokens = self.tokens[row]
        for (name, layer), buffer in self.buffers.items():
            units, stride = self.planner.units(row, name), self.strides[name]
            for at in range(first, len(tokens)):
                if (at + 1) % stride == 0:
                    unit, entry = divmod(at, max(PAGE, stride))
                    buffer[units[unit], entry // stride] = digest(tokens[: at + 1]) + layer
        for (_, layer), buffer in self.states.items():
            buffer[self.number(row, layer)] = digest(tokens) + layer

    def number(self, row: int, layer: int) -> int:
        """The number of a state's unit in a layer."""
        units = self.planner.units(row, "state")
        return units[[4, 5].index(layer)] if len(units) > 1 else units[0]

    def check(self, row: int, length: int) -> None:
        """The units that a request keeps hold what its first tokens left there, and so does its state."""
        tokens = self.tokens[row]
        for (name, layer), buffer in self.buffers.items():
            held, stride = buffer.tolist(), self.strides[name]
            each = max(PAGE, stride)
            for position, unit in self.planner.units(row, name).items():
                for at in range(position * each + stride - 1, min(position * each + each, length), stride):
                    expected = digest(tokens[: at + 1]) + layer
                    assert held[unit][at % each // stride] == [expected] * 2, (name, layer, row, at)
        for (_, layer), buffer in self.states.items():
            if length:
                assert buffer[self.number(row, layer)].tolist() == [digest(tokens[:length]) + layer] * 2

    def begin(self, tokens: list[int], chunk: int) -> tuple[int, int] | None:
        """Begin a request with what is cached of its tokens, and compute a chunk of the others."""
        taken = self.planner.alloc()
        if taken is None:
            return None
        lease = self.cache.match(tokens, max_tokens=len(tokens) - 1)
        lease.load()
        end = min(len(tokens), len_of(lease) + chunk)
        plan = self.planner.extend(taken, [len_of(lease)], [end], prefixes=[lease])
        if plan is None:
            self.planner.finish(taken)
            lease.release()
            return None
        self.tokens[taken[0]] = tokens[:end]
        self.check(taken[0], len_of(lease))
        self.write(taken[0], len_of(lease))
        return taken[0], len_of(lease)

    def grow(self, rows: list[int], more: list[list[int]]) -> bool:
        """Compute more tokens of requests."""
        lens = [len(self.tokens[row]) for row in rows]
        ends = [length + len(tokens) for length, tokens in zip(lens, more, strict=True)]
        if self.planner.extend(rows, lens, ends, prefixes=[None] * len(rows)) is None:
            return False
        for row, length, tokens in zip(rows, lens, more, strict=True):
            self.check(row, length)
            self.tokens[row] = self.tokens[row] + tokens
            self.write(row, length)
        return True

    def publish(self, row: int) -> int:
        """Publish whole pages, with a snapshot where the state is at their end."""
        tokens = self.tokens[row]
        whole = len(tokens) // PAGE * PAGE
        return self.planner.publish(row, tokens[:whole], snapshot=whole == len(tokens))

    def finish(self, row: int) -> None:
        self.planner.finish([row])
        del self.tokens[row]

    def verify(self) -> None:
        self.planner.verify()
        self.cache.verify()
        self.arena.verify()


def len_of(lease: ArenaLease) -> int:
    return lease.length
