"""Pages copied to host memory and back, beside copies of as many bytes; and decode steps beside that.

The alternative is `torch.Tensor.copy_` of one contiguous tensor, and LMCache's pool of host memory where
that is installed, all on one thread. A page is copied in pieces of each layer. `copied down` includes keys,
places and the wait for its end.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from functools import partial
from importlib.util import find_spec

import torch
from harness import Case, Report

from kvpool import (
    ArenaHostTier,
    ArenaPrefixCache,
    BatchPlanner,
    CacheArena,
    CacheLayout,
    Group,
    HostTier,
    KVPool,
    Plane,
    PrefixCache,
    ReqToTokenPool,
    TokenToKVPoolAllocator,
)

LAYERS, HEADS, DIM = 16, 8, 128
TOKENS = 4096
LEAST = 0.9
LEAST_OF_UNITS = 0.85


class Side:
    """A cache with a prompt of `TOKENS`, and host memory for it."""

    def __init__(self, page_size: int) -> None:
        self.kv = KVPool(2 * TOKENS, LAYERS, HEADS, DIM, "cpu", torch.bfloat16, page_size=page_size)
        self.slots = TokenToKVPoolAllocator(2 * TOKENS, "cpu", page_size)
        self.tier = HostTier(self.kv, 4 * TOKENS)
        self.cache = PrefixCache(self.slots, tiers=(self.tier,))
        self.prompt = torch.arange(TOKENS, dtype=torch.int32)
        for buffer in (*self.kv.k_buffer, *self.kv.v_buffer):
            buffer.fill_(1)
        self.bytes = TOKENS * LAYERS * HEADS * DIM * 2 * 2
        self.source = torch.ones(self.bytes, dtype=torch.uint8)
        self.target = torch.zeros(self.bytes, dtype=torch.uint8)
        self.down(1)

    def empty(self) -> None:
        """Neither the device nor the host has the prompt."""
        self.cache.clear()

    def down(self, _: int) -> None:
        """Publishes the prompt, and waits until it is in host memory."""
        slots = self.slots.alloc(TOKENS)
        assert slots is not None
        self.cache.insert(self.prompt, slots)
        self.cache.wait_written()

    def away(self) -> None:
        """The host alone has the prompt."""
        if self.tier.stats()["pages"] == 0:
            self.down(1)
        self.cache.evict(TOKENS)

    def up(self, _: int) -> None:
        """Loads the prompt, and waits for its last layer."""
        with self.cache.match(self.prompt) as lease:
            load = lease.load()
            assert load is not None
            assert load.length == TOKENS
            load.wait_layer(LAYERS - 1)

    def copy(self, _: int) -> None:
        """The same bytes in one call."""
        self.target.copy_(self.source)


class Units:
    """The same prompt in an arena, with a prefix cache by group and host memory below it."""

    def __init__(self, page_size: int) -> None:
        """Has it in host memory once."""
        planes = [Plane(name, "bfloat16", (HEADS, DIM)) for name in ("k", "v")]
        layout = CacheLayout([Group("full", "full", range(LAYERS), planes)], page_size=page_size)
        size = 2 * TOKENS * layout.groups[0].entry_bytes * LAYERS
        self.arena = CacheArena(layout, size + size // 8, "cpu")
        self.tier = ArenaHostTier(self.arena, 2 * size)
        self.cache = ArenaPrefixCache(self.arena, tiers=(self.tier,))
        self.prompt = torch.arange(TOKENS, dtype=torch.int32)
        self.pages = TOKENS // page_size
        for layer in range(LAYERS):
            for plane in ("k", "v"):
                self.arena.buffer("full", plane, layer).fill_(1)
        self.down(1)

    def empty(self) -> None:
        """Neither the device nor the host has the prompt."""
        self.cache.clear()

    def down(self, _: int) -> None:
        """Publishes the prompt, and waits until it is in host memory."""
        units = self.arena.alloc({"full": self.pages})
        assert units is not None
        with self.cache.match(self.prompt, max_tokens=0) as lease:
            lease.publish(self.prompt, units)
        self.cache.wait_written()

    def away(self) -> None:
        """The host alone has the prompt."""
        if self.tier.stats()["units"] == 0:
            self.down(1)
        self.arena.clear()

    def up(self, _: int) -> None:
        """Loads the prompt."""
        with self.cache.match(self.prompt) as lease:
            assert lease.load() == TOKENS


def beside_lmcache(report: Report, side: Side, page_size: int) -> None:
    """The same copies in LMCache's pool, in chunks of 256 tokens of slots that follow each other."""
    from peers.lmcache_side import Chunks  # noqa: PLC0415 - where it is installed

    slots = side.slots.alloc(TOKENS)
    assert slots is not None
    chunks = Chunks(side.kv, TOKENS, int(slots[0]), 2 * side.bytes)
    side.slots.free(slots)
    chunks.down()
    what = f"{TOKENS} tokens, {side.bytes >> 20} MiB, pages of {page_size}"
    for name, cases in (
        ("copied down", (Case(side.down, prepare=side.empty), Case(chunks.down, prepare=chunks.empty))),
        ("loaded", (Case(side.up, prepare=side.away), Case(chunks.up))),
    ):
        ours, theirs = (replace(case, calls=1) for case in cases)
        report.compare(f"{what} {name}", ours, theirs, alternative="LMCache 0.5")
    chunks.empty()


class Steps:
    """Decode steps of 64 requests, and a lease that loads beside them."""

    def __init__(self, side: Side) -> None:
        self.side = side
        table = ReqToTokenPool(64, 2048, "cpu")
        self.planner = BatchPlanner(table, side.slots, 64, 4096)
        rows = table.alloc(64)
        assert rows is not None
        self.rows, self.lens = rows, [16] * 64
        assert self.planner.extend(rows, [0] * 64, self.lens) is not None

    def p99(self, *, busy: bool) -> float:
        """Microseconds of the 99th of a hundred steps, beside loads or not."""
        times, lease, load = [], None, None
        for step in range(400):
            if busy and (load is None or load.query()):
                if lease is not None:
                    lease.release()
                self.side.cache.evict(TOKENS)
                lease = self.side.cache.match(self.side.prompt)
                load = lease.load()
            if step % 32 == 0:
                self.planner.truncate(self.rows, [16] * 64)
                self.lens = [16] * 64
            self.lens = [length + 1 for length in self.lens]
            begin = time.perf_counter()
            assert self.planner.decode(self.rows, self.lens) is not None
            times.append(time.perf_counter() - begin)
        if lease is not None:
            lease.release()
        return sorted(times)[len(times) * 99 // 100] * 1e6


def steps(report: Report, side: Side, page_size: int) -> None:
    """The slowest one of a hundred decode steps, beside loads and without, in turns."""
    decoding = Steps(side)
    decoding.p99(busy=True)
    turns = [(decoding.p99(busy=False), decoding.p99(busy=True)) for _ in range(15)]
    decoding.planner.finish(decoding.rows)
    alone, beside = (statistics.median(times) for times in zip(*turns, strict=True))
    text = f"p99 of a decode step of 64 requests, pages of {page_size}: {alone:.1f} us"
    report.note(
        f"{text}, beside loads {beside:.1f} us ({beside / alone:.2f}x, medians of {len(turns)} turns)"
    )


def usable(report: Report) -> None:
    """How long 16 GiB take until a page is there."""
    kv = KVPool(4096, 32, 8, 128, "cpu", torch.bfloat16, page_size=16)
    slots = TokenToKVPoolAllocator(4096, "cpu", 16)
    begin = time.perf_counter()
    tier = HostTier(kv, 2**17)  # of 128 KiB each
    cache = PrefixCache(slots, tiers=(tier,))
    own = slots.alloc(16)
    assert own is not None
    cache.insert(list(range(16)), own)
    cache.wait_written()
    seconds = time.perf_counter() - begin
    report.note(
        f"{tier.mem_bytes() / 2**30:.0f} GiB of host memory have their first page after {seconds:.3f} s"
    )


def main() -> None:
    """Measures, and reports."""
    report = Report("Host memory below a prefix cache")
    # A tier copies on one thread; the others belong to the model.
    torch.set_num_threads(1)
    for page_size in (16, 1):
        side = Side(page_size)
        what = f"{TOKENS} tokens, {side.bytes >> 20} MiB, pages of {page_size}"
        for name, prepare, run in (("copied down", side.empty, side.down), ("loaded", side.away, side.up)):
            report.compare(
                f"{what} {name}",
                Case(run, prepare=prepare, calls=1),
                Case(partial(side.copy), calls=1),
                alternative="copy_",
                least_ratio=LEAST,
            )
        units = Units(page_size)
        for name, cases in (
            ("copied down", (Case(units.down, units.empty), Case(side.down, side.empty))),
            ("loaded", (Case(units.up, units.away), Case(side.up, side.away))),
        ):
            ours, theirs = (replace(case, calls=1) for case in cases)
            report.compare(
                f"{what} of an arena {name}", ours, theirs, alternative="HostTier", least_ratio=LEAST_OF_UNITS
            )
        del units
        if find_spec("lmcache") is not None:
            beside_lmcache(report, side, page_size)
        side.away()
        steps(report, side, page_size)
    usable(report)
    report.finish()


if __name__ == "__main__":
    main()
