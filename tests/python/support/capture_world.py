"""The objects of calls while a stream is captured: a pool of each class, and arguments."""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING

import torch
from common import some
from memory_store import Memory

import kvpool
from kvpool import _kvpool, lmcache

if TYPE_CHECKING:
    from collections.abc import Callable

SIZE = 64
PAGE = 4
LAYERS = 2
HEADS, DIM = 1, 4
ROWS = 8
CONTEXT = 32
GDN = (4, 2, 1, 4, 4, 8, 4)
LMCACHE = lmcache.LMCacheMemPoolMetadata((LAYERS, 2, 4, HEADS, DIM), torch.float32, 1e-6)
FLOAT = torch.float32
LAYOUT = kvpool.CacheLayout(
    [kvpool.Group("full", "full", range(LAYERS), [kvpool.Plane("k", FLOAT, (HEADS, DIM))])], page_size=4
)

POOLS: dict[str, Callable[[], object]] = {
    "BufferPool": lambda: kvpool.BufferPool("cuda"),
    "CacheArena": lambda: kvpool.CacheArena(LAYOUT, 1 << 14, "cuda"),
    "ChunkPool": lambda: kvpool.ChunkPool(4, 8, FLOAT, "cuda"),
    "GDNPool": lambda: kvpool.GDNPool(*GDN, "cuda", FLOAT),
    "KVPool": lambda: kvpool.KVPool(SIZE, LAYERS, HEADS, DIM, "cuda", FLOAT),
    "PagePool": lambda: kvpool.PagePool(8, 4, FLOAT, "cuda"),
    "ReqToTokenPool": lambda: kvpool.ReqToTokenPool(ROWS, CONTEXT, "cuda"),
    "TokenToKVPoolAllocator": lambda: kvpool.TokenToKVPoolAllocator(SIZE, "cuda"),
    "Workspace": lambda: kvpool.Workspace("cuda", 1 << 14),
    "LocalGPUPool": lambda: lmcache.LocalGPUPool(LMCACHE),
    "LocalCPUPool": lambda: lmcache.LocalCPUPool(LMCACHE),
    "LocalCPUBufferPool": lambda: lmcache.LocalCPUBufferPool(LMCACHE),
    "LocalPool": lambda: lmcache.LocalPool(LMCACHE),
    "make_full_attention_net_mem_pool": lambda: kvpool.make_full_attention_net_mem_pool(
        SIZE, LAYERS, HEADS, DIM, HEADS, DIM, "cuda", FLOAT
    ),
    "make_req_to_token_pool": lambda: kvpool.make_req_to_token_pool(ROWS, CONTEXT, "cuda"),
}
"""The calls that make a pool, as the first call of a process may."""


class Inputs:
    """Tensors of PyTorch on the device, which no pool knows. What a call writes to is named `out`."""

    def __init__(self) -> None:
        def ints(*values: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype).cuda()

        self.one = ints(1)
        self.slots = ints(1, 2, 3)
        self.others = ints(11, 12, 13)
        self.states = ints(1, 2)
        self.other_states = ints(3, 4)
        self.lengths = ints(3)
        self.last = ints(PAGE + 1)
        self.zeros = ints(0)
        self.minus = ints(-1)
        self.indptr = ints(0, 3, dtype=torch.int32)
        self.rows = ints(1, dtype=torch.int32)
        self.out_indices = torch.zeros(3, dtype=torch.int32).cuda()
        self.k = torch.arange(12, dtype=FLOAT).reshape(3, HEADS, DIM).cuda()
        self.v = -self.k
        self.out = torch.zeros_like(self.k), torch.zeros_like(self.k)
        self.chunk = torch.arange(8, dtype=FLOAT).cuda()
        self.out_chunk = torch.zeros(8, dtype=FLOAT).cuda()
        self.pageable = torch.arange(16, dtype=FLOAT)
        self.out_pageable = torch.zeros(16, dtype=FLOAT)
        self.kv_chunk = torch.zeros((LAYERS, 2, 4, HEADS, DIM), dtype=FLOAT).cuda()
        self.weights = torch.zeros(16, dtype=FLOAT).cuda()


def _hybrid() -> tuple[_kvpool.HybridTree, _kvpool.HybridStep, int]:
    """A tree, the step that inserted a prompt, and the node at its end."""
    tree = _kvpool.HybridTree(1, window=2, state_grid=1)
    step = tree.insert([7, 8], [1, 2], window_freed=2, state=[3])
    return tree, step, some(step.node)


class Offloaded:
    """The offloads of an engine: a chunk that is complete, and its order elsewhere."""

    def __init__(self) -> None:
        self.key, self.keys = b"chunk", [b"chunk"]
        self.request, self.turn = _kvpool.OffloadRequest(), _kvpool.OffloadTurn()
        self.table, self.order = _kvpool.OffloadTable(2, events=True), _kvpool.OffloadOrder()
        assert self.table.begin_store(self.keys, self.request)
        self.table.end_store(self.keys)
        self.order.insert(self.key, object(), self.turn)
        self.space = _kvpool.AddressSpace(4096)
        assert self.space.take(1024) == 0


class Blocks:
    """An engine's blocks: one is taken and has a hash."""

    def __init__(self) -> None:
        self.queue, self.map = _kvpool.BlockQueue(4), _kvpool.BlockMap()
        self.more: dict[int, set[bytes]] = {}
        self.taken = self.queue.alloc(1, self.map, self.more)[0]
        self.map.cache(self.taken, [b"hash"], 0, PAGE, PAGE, None, self.more)
        [(self.key, _)] = self.map.items()
        [self.block] = self.taken


class Files:
    """A store with one page, whose files go with it."""

    def __init__(self) -> None:
        self.keys, self.pages = [bytes(32)], torch.zeros((1, 16), dtype=torch.uint8)
        with tempfile.TemporaryDirectory() as folder:
            self.store = kvpool.FileStore(folder, 1 << 16, page_bytes=16)
            self.stored = self.store.put(self.keys, self.pages)
            assert self.stored.wait()


def _evicted() -> tuple[kvpool.ArenaPrefixCache, kvpool.ArenaLease]:
    """A cache, and a lease of what host memory alone has."""
    arena = kvpool.CacheArena(LAYOUT, 1 << 14, "cuda")
    cache = kvpool.ArenaPrefixCache(arena, tiers=[kvpool.ArenaHostTier(arena, 1 << 14)])
    cache.match([]).publish([1, 2, 3, 4], some(arena.alloc({"full": 1})))
    arena.clear()
    lease = cache.match([1, 2, 3, 4])
    assert lease.loadable == PAGE
    return cache, lease


class World:
    """One of each pool on a GPU, used a little on the current stream: slots 1 to 3 and row 1 are taken."""

    def __init__(self, inputs: Inputs) -> None:  # noqa: PLR0915 - one of each
        self.inputs = inputs
        self.allocator = kvpool.TokenToKVPoolAllocator(SIZE, "cuda")
        self.slots = some(self.allocator.alloc(3))
        self.allocator.free(some(self.allocator.alloc(4)))
        self.noting = kvpool.TokenToKVPoolAllocator(SIZE, "cuda", debug=True)
        self.paged = kvpool.TokenToKVPoolAllocator(SIZE, "cuda", PAGE)
        self.page = some(self.paged.alloc(PAGE))
        self.table = kvpool.ReqToTokenPool(ROWS, CONTEXT, "cuda")
        [self.row] = some(self.table.alloc())
        self.table.write((self.row, slice(0, 3)), self.slots)
        self.kv = kvpool.KVPool(SIZE, LAYERS, HEADS, DIM, "cuda", FLOAT)
        self.kv.set_kv_buffer(0, inputs.slots, inputs.k, inputs.v)
        self.gdn = kvpool.GDNPool(*GDN, "cuda", FLOAT, 3)
        self.track = some(self.gdn.alloc_track_slot())
        self.planned_slots = kvpool.TokenToKVPoolAllocator(SIZE, "cuda")
        self.planned_rows = kvpool.ReqToTokenPool(ROWS, CONTEXT, "cuda")
        self.planner = kvpool.BatchPlanner(self.planned_rows, self.planned_slots, 4, SIZE)
        self.planned = some(self.planned_rows.alloc(2))
        self.plan = some(self.planner.extend(self.planned[:1], [0], [5]))
        self.prefix_slots = kvpool.TokenToKVPoolAllocator(SIZE, "cuda")
        self.cache = kvpool.PrefixCache(self.prefix_slots, states=self.gdn, events=True)
        some(self.prefix_slots.alloc(3))
        self.prefix_own = [3]
        self.published = self.cache.match([]).publish([7, 8], [1, 2], state=1)
        self.lease = self.cache.match([7, 8])
        self.tier = kvpool.HostTier(self.kv, 4 * SIZE)
        self.tier_slots = kvpool.TokenToKVPoolAllocator(SIZE, "cuda")
        self.tiered = kvpool.PrefixCache(self.tier_slots, tiers=[self.tier])
        self.loadable, self.loaded, self.load = self._loads()
        self.hybrid, self.step, self.node = _hybrid()
        self.tree_slots = kvpool.TokenToKVPoolAllocator(SIZE, "cuda")
        self.tree = _kvpool.SlotTree(self.tree_slots)
        some(self.tree_slots.alloc(3))
        self.inserted = self.tree.insert([7, 8], [1, 2])
        self.matched = self.tree.match([7, 8])
        self.tree.lock(self.matched.node)
        self.chunks = kvpool.ChunkPool(4, 8, FLOAT)
        assert self.chunks.wait_page_locked()
        self.chunk = some(self.chunks.allocate())
        self.gpu_chunks = kvpool.ChunkPool(4, 8, FLOAT, "cuda")
        self.gpu_chunk = some(self.gpu_chunks.allocate())
        self.copy = self.chunk.copy_from(inputs.chunk)
        self.buffers = kvpool.BufferPool("cuda")
        self.buffers.release(self.buffers.alloc(16, FLOAT))
        self.buffer = self.buffers.alloc(64, FLOAT)
        self.arena = kvpool.CacheArena(LAYOUT, 1 << 14, "cuda")
        self.units = some(self.arena.alloc({"full": 2}))["full"]
        self.arena_tier = kvpool.ArenaHostTier(self.arena, 1 << 14)
        self.arena_cache = kvpool.ArenaPrefixCache(self.arena, tiers=[self.arena_tier], events=True)
        self.arena_lease = self.arena_cache.match([])
        self.arena_lease.publish([1, 2, 3, 4], some(self.arena.alloc({"full": 1})))
        self.more_units = some(self.arena.alloc({"full": 1}))
        self.evicted_cache, self.evicted = _evicted()
        self.arena_planner = kvpool.ArenaPlanner(self.arena, ROWS, SIZE, 4, SIZE)
        self.arena_rows = some(self.arena_planner.alloc(2))
        self.arena_plan = some(
            self.arena_planner.extend(self.arena_rows[:1], [0], [5], prefixes=[self.arena_cache.match([])])
        )
        self.pages = kvpool.PagePool(8, 4, FLOAT, "cuda")
        self.page_number = some(self.pages.alloc())
        self.workspace = kvpool.Workspace("cuda", 1 << 14)
        self.workspace.empty(4, FLOAT)
        self.local = lmcache.LocalGPUPool(LMCACHE)
        self.kv_obj = some(self.local.allocate(inputs.kv_chunk))
        self.pinned = lmcache.LocalCPUBufferPool(LMCACHE)
        self.offloaded = Offloaded()
        self.blocks = Blocks()
        self.files = Files()
        self.memory = Memory()
        self.fetch = self.tiered.fetch([7, 8])
        self.spare: list[object] = []

    def _loads(self) -> tuple[kvpool.Lease, kvpool.Lease, kvpool.Load]:
        """Leases, and a load of one that had nothing to load: a wait for copies would spoil a capture."""
        leases = self.tiered.match([7, 8]), self.tiered.match([9, 10])
        return *leases, some(leases[1].load())

    def stats(self) -> list[object]:
        """The numbers of all pools."""
        return [part.stats() for part in vars(self).values() if hasattr(part, "stats")]

    def tensors(self) -> list[torch.Tensor]:
        """The tensors to which calls may write."""
        return [
            *self.kv.k_buffer,
            *self.kv.v_buffer,
            self.table.req_to_token,
            self.planned_rows.req_to_token,
            self.gdn.recurrent_state,
            self.gdn.conv_state,
            self.gpu_chunk.tensor(),
            self.buffer.tensor,
            self.inputs.out_indices,
            self.inputs.out_chunk,
            self.inputs.out_pageable,
            *self.inputs.out,
        ]

    def touch(self) -> None:
        """Uses all pools on the current stream, which is another one than that on which they were made."""
        inputs = self.inputs
        self.allocator.free(some(self.allocator.alloc(1)))
        self.paged.free(some(self.paged.alloc(PAGE)))
        self.table.write((self.row, slice(0, 3)), self.slots)
        self.kv.set_kv_buffer(0, inputs.slots, inputs.k, inputs.v)
        self.gdn.reset_states(inputs.states)
        self.plan = some(self.planner.decode(self.planned[:1], [6]))
        self.copy = self.chunk.copy_from(inputs.chunk)
        self.gpu_chunk.copy_from(inputs.chunk)
        self.buffers.release(self.buffers.alloc(16, FLOAT))
        assert self.workspace.reset()
        self.workspace.empty(4, FLOAT)
