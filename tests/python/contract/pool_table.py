"""Every class of pools, and what the contract has to know of it."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import devices
import numpy as np
import pytest
import torch
from common import some

import kvpool
import kvpool.typing

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


@dataclass(frozen=True)
class Case:
    """A class of pools.

    Attributes:
        cls: The class.
        sizes: Its arguments that are sizes, and small ones that work.
        stats: The type of `stats()`.
        given: Arguments that are not sizes, and that it cannot do without.
        below: The pools that it is made of, on a device. It is where they are, and has no argument for that.
        may_be_zero: The sizes that may be 0.
        dtype: Its dtype unless one is named, if it has one.
        too_large: Sizes for which no machine has the memory.
        big: Sizes for which a leak shows.
        full: Arguments with which it does all that it can.
        unit: What it hands out, or keeps.
        freed: What a report of bad frees counts, if not that.
        on_device: Whether its memory is on its device. If not it is in host memory, whatever it is made of.
        tensors: Tensors over all of its memory.
        hidden: Bytes of its memory over which there are no tensors.
        use: Does with a new pool all that it is for, so that nothing stays in use.
        take: Takes a unit, or answers None.
        give: Gives a unit back; twice is a bad free.
        number: Which unit it is.
        by_number: Gives back the unit of a number, where units are numbers.
        needs_device: Calls that do something on the device.
    """

    cls: type[Any]
    sizes: dict[str, int]
    stats: type[Any]
    given: dict[str, Any] = field(default_factory=dict)
    below: Callable[..., dict[str, Any]] = dict
    may_be_zero: tuple[str, ...] = ()
    dtype: str | None = None
    too_large: dict[str, int] = field(default_factory=dict)
    big: dict[str, int] = field(default_factory=dict)
    full: dict[str, int] = field(default_factory=dict)
    unit: str = "slot"
    freed: str = ""
    on_device: bool = True
    tensors: Callable[[Any], list[torch.Tensor]] = lambda _pool: []
    hidden: Callable[[Any], int] = lambda _pool: 0
    use: Callable[[Any], object] = lambda _pool: None
    take: Callable[[Any], Any] | None = None
    give: Callable[[Any, Any], None] = lambda _pool, _unit: None
    number: Callable[[Any], int] = int
    by_number: Callable[[Any, Any], None] | None = None
    needs_device: Callable[[Any], list[Callable[[], object]]] = lambda _pool: []

    @property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        """The parameters of the constructor."""
        return inspect.signature(self.cls).parameters

    @property
    def takes_device(self) -> bool:
        """Whether an argument says where it is."""
        return "device" in self.parameters

    def make(self, **changes: Any) -> Any:  # noqa: ANN401
        """A small pool on the device of the test. Changes that it does not know are of those below it."""
        dtype = {} if self.dtype is None else {"dtype": "float32"}
        if self.takes_device:
            return self.cls(**{**self.given, **self.sizes, **dtype, "device": devices.current(), **changes})
        others = {name: changes.pop(name) for name in set(changes) - set(self.parameters)}
        return self.cls(**{**self.below(devices.current(), **others), **self.sizes, **changes})

    @property
    def place(self) -> str:
        """The device of a pool that the test makes."""
        return {"cpu": "cpu", "cuda": "cuda:0"}[devices.current()] if self.on_device else "cpu"

    def taken(self, pool: Any, count: int) -> list[Any]:  # noqa: ANN401
        """Take `count` units, or fail."""
        assert self.take is not None
        units = [self.take(pool) for _ in range(count)]
        assert all(unit is not None for unit in units)
        return units


def _store(pool: kvpool.KVPool) -> None:
    k, v = pool.get_kv_buffer(1)
    pool.set_kv_buffer(0, [1, 2], k[3:5], v[3:5])
    pool.gather_kv(0, [2, 1])
    pool.move_kv([3, 4], [1, 2])
    pool.check()


def _take_slots(pool: kvpool.TokenToKVPoolAllocator) -> None:
    held = [some(pool.alloc(pool.size // 8)) for _ in range(8)]
    pool.share(held[0])
    for slots in (*held, held[0]):
        pool.free(slots)
    pool.free(some(pool.alloc_extend([0], [7], [-1])))
    pool.verify()


def _write_rows(pool: kvpool.ReqToTokenPool) -> None:
    rows = pool.alloc(2) or []
    pool.write((rows[0], slice(0, 4)), [1, 2, 3, 4])
    pool.write((rows, [0, 1]), [7, 8])
    pool.read(rows[0], 4)
    pool.build_kv_indices(rows, [0, 2, 4], pool.req_to_token.new_zeros(4))
    pool.free(rows)


def _copy_states(pool: kvpool.GDNPool) -> None:
    track = pool.alloc_track_slot()
    assert track is not None
    pool.copy_states(1, track)
    pool.reset_states([1, 2])
    pool.free_track_slot(track)


STATES = kvpool.CacheLayout(
    [kvpool.Group("state", "state", [0], [kvpool.Plane("recurrent", "float32", (256, 128))])]
)
"""One slab holds one state of 128 KiB."""


def _use_units(pool: kvpool.CacheArena) -> None:
    taken = some(pool.alloc({"state": 3}))
    pool.buffer("state", "recurrent", 0)[taken["state"]] = 1
    pool.free("state", taken["state"])
    pool.verify()


def _use_pages(pool: kvpool.PagePool) -> None:
    pages = [pool.alloc() for _ in range(pool.total_pages + pool.grow)]
    for page in pages:
        assert page is not None
        pool.page(page).fill_(1)
        pool.free(page)


def _copy_chunks(pool: kvpool.ChunkPool) -> None:
    first, second, *more = pool.allocate_batch(pool.num_chunks) or []
    first.copy_from(second.tensor()).wait()
    first.retain().copy_to(second.tensor()).wait()
    for chunk in (first, first, second, *more):
        chunk.release()


def _use_buffers(pool: kvpool.BufferPool) -> None:
    with pool.step():
        for buffer in (pool.alloc((1 << 18,), "float32"), *pool.alloc_batch([((8,), "int8"), (5, "int64")])):
            buffer.tensor.fill_(1)
        pool.alloc_bytes(100).release()


def _use_arena(pool: kvpool.Workspace) -> None:
    pool.zeros(pool.arena_bytes // 8, "float32").fill_(1)
    pool.empty(3, "int8")
    assert pool.reset()


def _below_a_cache(device: str, slots: int = 64) -> dict[str, Any]:
    return {
        "allocator": kvpool.TokenToKVPoolAllocator(slots, device, page_size=4),
        "states": kvpool.GDNPool(4, 1, 1, 2, 2, 4, 3, device, max_track_slots=3),
    }


def _cache_prompts(cache: kvpool.PrefixCache) -> None:
    allocator, length = cache.allocator, cache.allocator.size // 4
    free = cache.obtainable_size()
    for start in range(0, 6 * length, length):
        # The last evict the first.
        tokens = torch.arange(start, start + length)
        with cache.match(tokens) as lease:
            lease.publish(tokens, some(allocator.alloc(length)), state=1)
    with cache.match(tokens) as lease:
        assert (lease.length, lease.slots.numel()) == (length, length)
        lease.restore(2)
        cache.pin(lease, seconds=1000)
        copy = some(allocator.alloc(length))
        assert cache.insert(tokens, copy).duplicates == length
    cache.clear()
    assert allocator.available_size() == free
    cache.verify()


def _of_a_lease(cache: kvpool.PrefixCache) -> list[Callable[[], object]]:
    slots = some(cache.allocator.alloc(8)).tolist()
    lease = cache.match([])
    lease.publish(range(4), slots[:4], state=1)
    return [
        lambda: lease.slots,
        lambda: lease.restore(2),
        lambda: lease.publish(range(4, 8), slots[4:], state=1),
    ]


def _below_an_arena_cache(device: str, arena_bytes: int = 1 << 20) -> dict[str, Any]:
    return {"arena": kvpool.CacheArena(STATES, arena_bytes, device)}


def _cache_units(cache: kvpool.ArenaPrefixCache) -> None:
    arena, length = cache.arena, 2 * cache.arena.layout.page_size
    free = arena.slabs_free
    for start in range(0, 6 * length, length):
        tokens = list(range(start, start + length))
        with cache.match(tokens) as lease:
            lease.publish(tokens, some(arena.alloc({"state": 1})))
    with cache.match(tokens) as lease:
        assert lease.length == length
        arena.buffer("state", "recurrent", 0)[lease.units("state").units].sum()
    cache.clear()
    assert arena.slabs_free == free
    cache.verify()


def _below_a_tier(device: str) -> dict[str, Any]:
    return {
        "kv": kvpool.KVPool(16, 2, 2, 64, device, "float32"),
        "states": kvpool.GDNPool(4, 1, 1, 128, 128, 4, 3, device, "float32", max_track_slots=3),
    }


def _bytes_of_a_tier(tier: kvpool.HostTier) -> int:
    states = some(tier.states)
    each = states.recurrent_state[:, 0].nbytes + states.conv_state[:, 0].nbytes
    return tier.stats()["capacity"] * tier.page_bytes + tier.stats()["state_capacity"] * each


def _copy_down_and_back(tier: kvpool.HostTier) -> None:
    kv = tier.kv
    allocator = kvpool.TokenToKVPoolAllocator(kv.size, kv.device, kv.page_size)
    cache = kvpool.PrefixCache(allocator, states=tier.states, tiers=[tier])
    tier.wait_page_locked()

    for start in range(0, tier.size, kv.size):
        tokens = torch.arange(start, start + kv.size)
        with cache.match([]) as lease:
            lease.publish(tokens, some(allocator.alloc(kv.size)), state=1)
        assert cache.wait_written(60)
        cache.evict(kv.size)
    with cache.match(tokens) as lease:
        load = some(lease.load())
        for layer in range(kv.layer_num if load.length else 0):
            load.wait_layer(layer)
    cache.clear()
    assert cache.wait_written(60)
    tier.verify()


def _copy_units_down_and_back(tier: kvpool.ArenaHostTier) -> None:
    arena, length = tier.arena, 2 * tier.arena.layout.page_size
    cache = kvpool.ArenaPrefixCache(arena, tiers=[tier])
    for start in range(0, 4 * length, length):
        tokens = list(range(start, start + length))
        with cache.match(tokens) as lease:
            lease.publish(tokens, some(arena.alloc({"state": 1})))
        assert cache.wait_written(60)
    arena.clear()
    with cache.match(tokens) as lease:
        # What could not be copied is not there.
        assert lease.load() in ({0, length} if tier.stats()["failed"] else {length})
    cache.clear()


CASES = {
    case.cls.__name__: case
    for case in (
        Case(
            kvpool.KVPool,
            {
                "size": 16,
                "layer_num": 2,
                "k_head_num": 2,
                "k_head_dim": 4,
                "v_head_num": 2,
                "v_head_dim": 4,
                "page_size": 1,
            },
            kvpool.typing.KVStats,
            dtype="float16",
            too_large={"size": 1 << 30, "layer_num": 1 << 12, "k_head_num": 1 << 6, "k_head_dim": 1 << 8},
            big={"size": 1 << 14, "k_head_dim": 32, "v_head_dim": 32},
            tensors=lambda pool: [*pool.k_buffer, *pool.v_buffer],
            use=_store,
            needs_device=lambda pool: [lambda: pool.move_kv([1], [2]), pool.check],
        ),
        Case(
            kvpool.TokenToKVPoolAllocator,
            {"size": 64, "page_size": 1},
            kvpool.typing.SlotStats,
            big={"size": 1 << 18},
            use=_take_slots,
            take=lambda pool: pool.alloc(1),
            give=lambda pool, slots: pool.free(slots),
            by_number=lambda pool, slot: pool.free([slot]),
            needs_device=lambda pool: [lambda: pool.alloc(3), lambda: pool.free([1])],
        ),
        Case(
            kvpool.ReqToTokenPool,
            {"max_reqs": 4, "max_context_len": 8},
            kvpool.typing.CountedStats,
            too_large={"max_reqs": 1 << 28, "max_context_len": 1 << 28},
            big={"max_reqs": 64, "max_context_len": 1 << 14},
            unit="row",
            tensors=lambda pool: [pool.req_to_token],
            use=_write_rows,
            take=lambda pool: pool.alloc(),
            give=lambda pool, row: pool.free(row),
            number=lambda rows: int(rows[0]),
            by_number=lambda pool, row: pool.free(row),
            needs_device=lambda pool: [pool.alloc, lambda: pool.free(1), lambda: pool.read(1, 2)],
        ),
        Case(
            kvpool.GDNPool,
            {
                "max_reqs": 4,
                "num_gdn_layers": 2,
                "num_v_heads": 3,
                "head_k_dim": 4,
                "head_v_dim": 5,
                "conv_dim": 6,
                "conv_kernel_size": 4,
                "max_track_slots": 3,
            },
            kvpool.typing.TrackStats,
            may_be_zero=("max_track_slots",),
            dtype="bfloat16",
            too_large={
                "max_reqs": 1 << 30,
                "num_gdn_layers": 1 << 8,
                "head_k_dim": 1 << 8,
                "head_v_dim": 1 << 8,
            },
            big={"max_reqs": 64, "head_k_dim": 64, "head_v_dim": 64},
            unit="track slot",
            tensors=lambda pool: [pool.conv_state, pool.recurrent_state],
            use=_copy_states,
            take=lambda pool: pool.alloc_track_slot(),
            give=lambda pool, slot: pool.free_track_slot(slot),
            by_number=lambda pool, slot: pool.free_track_slot(slot),
            needs_device=lambda pool: [lambda: pool.reset_states([1]), lambda: pool.copy_states(1, 2)],
        ),
        Case(
            kvpool.CacheArena,
            {"arena_bytes": 1 << 20},
            kvpool.typing.ArenaStats,
            given={"layout": STATES},
            too_large={"arena_bytes": 1 << 47},
            big={"arena_bytes": 1 << 24},
            unit="slab",
            freed="unit",
            tensors=lambda pool: [pool.buffer("state", "recurrent", 0)],
            use=_use_units,
            take=lambda pool: pool.alloc({"state": 1}),
            give=lambda pool, units: pool.free("state", units["state"]),
            number=lambda units: int(units["state"][0]),
            by_number=lambda pool, unit: pool.free("state", [unit]),
        ),
        Case(
            kvpool.PagePool,
            {"page_size": 4, "initial_pages": 3, "grow": 0},
            kvpool.typing.CountedStats,
            may_be_zero=("initial_pages", "grow"),
            dtype="float32",
            too_large={"page_size": 1 << 24, "initial_pages": 1 << 26},
            big={"page_size": 1 << 16, "initial_pages": 16, "grow": 4},
            full={"grow": 2},
            unit="page",
            tensors=lambda pool: [pool.page(i) for i in range(pool.total_pages)],
            use=_use_pages,
            take=lambda pool: pool.alloc(),
            give=lambda pool, page: pool.free(page),
            by_number=lambda pool, page: pool.free(page),
        ),
        Case(
            kvpool.ChunkPool,
            {"num_chunks": 3, "chunk_shape": 12},
            kvpool.typing.ChunkStats,
            dtype="",
            too_large={"num_chunks": 1 << 26, "chunk_shape": 1 << 24},
            big={"num_chunks": 16, "chunk_shape": 1 << 16},
            unit="chunk",
            tensors=lambda pool: [chunk.tensor() for chunk in pool.allocate_batch(pool.num_chunks)],
            use=_copy_chunks,
            take=lambda pool: pool.allocate(),
            give=lambda pool, chunk: pool.free(chunk),
            number=lambda chunk: int(chunk.index),
            needs_device=lambda pool: [lambda: pool.allocate().copy_from(np.zeros(12, dtype="float32"))],
        ),
        Case(
            kvpool.BufferPool,
            {},
            kvpool.typing.BufferStats,
            unit="buffer",
            tensors=lambda pool: [pool.alloc(100, "float32").tensor, pool.alloc(9, "float32").tensor],
            use=_use_buffers,
            needs_device=lambda pool: [
                lambda: pool.alloc_bytes(1 << 10),
                lambda: pool.alloc_batch([((1 << 11,), "int8")]),
            ],
        ),
        Case(
            kvpool.Workspace,
            {"arena_bytes": 1 << 16},
            kvpool.typing.UnitStats,
            too_large={"arena_bytes": 1 << 52},
            big={"arena_bytes": 1 << 21},
            unit="byte",
            tensors=lambda pool: [pool.zeros(100, "float32"), pool.zeros(9, "float32")],
            use=_use_arena,
            needs_device=lambda pool: [lambda: pool.zeros(8, "float32")],
        ),
        Case(
            kvpool.PrefixCache,
            {},
            kvpool.typing.PrefixStats,
            below=_below_a_cache,
            big={"slots": 1 << 18},
            use=_cache_prompts,
            needs_device=_of_a_lease,
        ),
        Case(
            kvpool.ArenaPrefixCache,
            {},
            kvpool.typing.ArenaPrefixStats,
            below=_below_an_arena_cache,
            big={"arena_bytes": 1 << 24},
            use=_cache_units,
        ),
        Case(
            kvpool.ArenaHostTier,
            {"tier_bytes": 1 << 20},
            kvpool.typing.ArenaTierStats,
            below=_below_an_arena_cache,
            too_large={"tier_bytes": 1 << 47},
            big={"tier_bytes": 1 << 23},
            unit="slab",
            on_device=False,
            hidden=lambda pool: pool.mem_bytes(),
            use=_copy_units_down_and_back,
            needs_device=lambda pool: [pool.wait_page_locked],
        ),
        Case(
            kvpool.HostTier,
            {"size": 16, "max_states": 2},
            kvpool.typing.TierStats,
            below=_below_a_tier,
            too_large={"max_states": (1 << 31) - 1},
            big={"size": 1 << 9},
            unit="page",
            on_device=False,
            hidden=_bytes_of_a_tier,
            use=_copy_down_and_back,
            needs_device=lambda pool: [pool.wait_page_locked],
        ),
    )
}


def each(*needs: str) -> pytest.MarkDecorator:
    """For a test of every class that has all of these."""
    names = [name for name, case in CASES.items() if all(getattr(case, need) for need in needs)]
    return pytest.mark.parametrize("case", [CASES[name] for name in names], ids=names)


def each_size() -> pytest.MarkDecorator:
    """For a test of every size of every class."""
    pairs = {f"{name}.{size}": (case, size) for name, case in CASES.items() for size in case.sizes}
    return pytest.mark.parametrize(("case", "size"), list(pairs.values()), ids=list(pairs))


every_pool = each("cls")
counted = each("take")
"""The classes whose units have owners, so that bad frees are found."""
