"""Every public call of the pools, with what it does while its own stream is captured.

`ENTRIES` names a call as `Class.method`, a constructor as `Class()` and a function by its name; behind `: `
stands a variant. `surface()` says which calls there are, so that a call without an entry is found.
"""

from __future__ import annotations

import inspect
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from common import some
from memory_store import Memory

import kvpool
from kvpool import _kvpool, lmcache
from kvpool._closing import Closing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SIZE = 64
PAGE = 4
LAYERS = 2
HEADS, DIM = 1, 4
ROWS = 8
CONTEXT = 32
GDN = (4, 2, 1, 4, 4, 8, 4)
LMCACHE = lmcache.LMCacheMemPoolMetadata((LAYERS, 2, 4, HEADS, DIM), torch.float32, 1e-6)
FLOAT = torch.float32

POOLS: dict[str, Callable[[], object]] = {
    "BufferPool": lambda: kvpool.BufferPool("cuda"),
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
"""What makes a pool, as the first call of a process may."""

WORKS = "works"
REFUSES = "refuses"


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
        self.kv_chunk = torch.zeros((LAYERS, 2, 4, HEADS, DIM), dtype=FLOAT).cuda()
        self.weights = torch.zeros(16, dtype=FLOAT).cuda()


def _hybrid() -> tuple[_kvpool.HybridTree, _kvpool.HybridStep, int]:
    """A tree, the step that inserted a prompt, and the node at its end."""
    tree = _kvpool.HybridTree(1, window=2, state_grid=1)
    step = tree.insert([7, 8], [1, 2], window_freed=2, state=[3])
    return tree, step, some(step.node)


class Offloaded:
    """What an engine has offloaded: a chunk that is complete, and its order elsewhere."""

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
        self.tree = kvpool.PrefixTree(self.tree_slots)
        some(self.tree_slots.alloc(3))
        self.inserted = self.tree.insert([7, 8], [1, 2])
        self.matched = self.tree.match([7, 8])
        self.tree.lock(self.matched.node)
        self.chunks = kvpool.ChunkPool(4, 8, FLOAT)
        assert self.chunks.wait_registered()
        self.chunk = some(self.chunks.allocate())
        self.gpu_chunks = kvpool.ChunkPool(4, 8, FLOAT, "cuda")
        self.gpu_chunk = some(self.gpu_chunks.allocate())
        self.copy = self.chunk.copy_from(inputs.chunk)
        self.buffers = kvpool.BufferPool("cuda")
        self.buffers.release(self.buffers.alloc(16, FLOAT))
        self.buffer = self.buffers.alloc(64, FLOAT)
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
        """What a call may write to."""
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


@dataclass(frozen=True)
class Entry:
    """A call.

    Attributes:
        call: It, on a world.
        own: Whether it `works` or `refuses` while the current stream is captured.
        check: Whether it did, by its answer, after its graph has run.
        prepare: What it needs beforehand.
    """

    call: Callable[[World], object]
    own: str
    check: Callable[[World, Any], bool] | None = None
    prepare: Callable[[World], object] = lambda _: None


def _drain(allocator: kvpool.TokenToKVPoolAllocator) -> object:
    return allocator.alloc(allocator.available_size())


def _group(world: World) -> None:
    with world.allocator.free_group():
        world.allocator.free(world.slots)


def _begin_group(world: World) -> None:
    world.allocator.free_group_begin()
    world.allocator.free(world.slots)
    world.allocator.free_group_end()


def _step(world: World) -> int:
    with world.buffers.step() as buffers:
        return buffers.in_use_count


def _with(guard: Any) -> None:  # noqa: ANN401 - anything that has a `with`
    with guard:
        pass


def _use(world: World) -> None:
    with world.workspace.use():
        pass


def _balanced(world: World) -> None:
    with world.allocator.expect_balanced():
        pass


def _threads(_: World) -> None:
    kvpool.set_num_threads(kvpool.get_num_threads())


def _snapshot(world: World) -> None:
    with tempfile.TemporaryDirectory() as folder:
        kvpool.snapshot(Path(folder) / "pools.html", world.allocator, world.table)


def _close(world: World) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = kvpool.FileStore(folder, 1 << 16, page_bytes=16)
        store.put(world.files.keys, world.files.pages)
        store.close()


def _with_store(_: World) -> None:
    with tempfile.TemporaryDirectory() as folder, kvpool.FileStore(folder, 1 << 16, page_bytes=16):
        pass


def _named(world: World) -> str:
    world.allocator.name = world.allocator.name
    return world.allocator.name


def _is_new(_: World, slots: torch.Tensor) -> bool:
    return len(slots) == 1 and slots.tolist()[0] not in {1, 2, 3}


def _is_stored(world: World, _: object) -> bool:
    rows = world.kv.k_buffer[1].cpu()[[1, 2, 3]]
    return bool(rows.eq(world.inputs.k.cpu()).all())


def _is_gathered(world: World, _: object) -> bool:
    return bool(world.inputs.out[0].cpu().eq(world.inputs.k.cpu()).all())


def _is_moved(world: World, _: object) -> bool:
    buffer = world.kv.k_buffer[0].cpu()
    return bool(buffer[[11, 12, 13]].eq(buffer[[1, 2, 3]]).all())


def _is_built(world: World, _: object) -> bool:
    return bool(world.inputs.out_indices.cpu().tolist() == [1, 2, 3])


def _is_free(count: int) -> Callable[[World, object], bool]:
    return lambda world, _: world.allocator.available_size() == count


# Those that neither allocate nor write on the device; the others need memory that is zeroed, and kernels.
_WITHOUT_MEMORY = ("LocalCPUPool", "LocalCPUBufferPool", "LocalPool")


def _making(name: str) -> Entry:
    return Entry(lambda _: POOLS[name](), WORKS if name in _WITHOUT_MEMORY else REFUSES)


def _dropping(name: str) -> Entry:
    return Entry(
        lambda world: world.spare.clear(), WORKS, prepare=lambda world: world.spare.append(POOLS[name]())
    )


OFFLOAD_CALLS: dict[str, Callable[[Offloaded], tuple[object, ...]]] = {
    "find": lambda o: (o.key,),
    "place": lambda o: (o.key,),
    "offers": lambda o: (o.key,),
    "begin_store": lambda o: ([b"other"], o.request),
    "end_store": lambda o: (o.keys,),
    "begin_load": lambda o: (o.keys, o.request),
    "end_load": lambda _: ([],),
    "touch": lambda o: (o.keys,),
    "finish": lambda o: (o.request,),
    "clear": lambda _: (),
    "take_events": lambda _: (),
    "take_asked": lambda _: (),
    "take_skipped": lambda _: (),
    "stats": lambda _: (),
    "verify": lambda _: (),
}
"""Calls of `OffloadTable`, with their arguments."""

SPACE_CALLS: dict[str, tuple[object, ...]] = {
    "take": (1024,),
    "take_many": (256, 2),
    "give_back": (0, 1024),
    "give_back_many": ([0], 1024),
    "grow": (256,),
    "rounded": (256,),
    "stats": (),
    "verify": (),
}
"""Calls of `AddressSpace`, with their arguments."""

ORDER_CALLS: dict[str, Callable[[Offloaded], tuple[object, ...]]] = {
    "get": lambda o: (o.key,),
    "insert": lambda o: (b"other", object(), o.turn, 16),
    "remove": lambda o: (o.key,),
    "set_evictable": lambda o: (o.key, True),
    "touch": lambda o: (o.keys,),
    "access": lambda o: (o.keys, o.turn, len),
    "evict": lambda o: (1, o.keys),
    "clear": lambda _: (),
}
"""Calls of `OffloadOrder`, with their arguments."""


def _offload_call(name: str, args: Callable[[Offloaded], tuple[object, ...]]) -> Entry:
    return Entry(lambda w: getattr(w.offloaded.table, name)(*args(w.offloaded)), WORKS)


def _order_call(name: str, args: Callable[[Offloaded], tuple[object, ...]]) -> Entry:
    return Entry(lambda w: getattr(w.offloaded.order, name)(*args(w.offloaded)), WORKS)


BLOCK_CALLS: dict[str, Callable[[Blocks], object]] = {
    "Block.set_block_hash": lambda b: b.queue.blocks[3].set_block_hash(b"other"),
    "Block.reset_hash": lambda b: b.block.reset_hash(),
    "BlockQueue.popleft": lambda b: b.queue.popleft(),
    "BlockQueue.popleft_n": lambda b: b.queue.popleft_n(2),
    "BlockQueue.remove": lambda b: b.queue.remove(b.queue.blocks[2]),
    "BlockQueue.append": lambda b: b.queue.append(b.block),
    "BlockQueue.append_n": lambda b: b.queue.append_n(b.taken),
    "BlockQueue.prepend_n": lambda b: b.queue.prepend_n(b.taken),
    "BlockQueue.get_all_free_blocks": lambda b: b.queue.get_all_free_blocks(),
    "BlockQueue.iter_blocks_after": lambda b: list(b.queue.iter_blocks_after(None)),
    "BlockQueue.alloc": lambda b: b.queue.alloc(1, b.map, b.more),
    "BlockQueue.free": lambda b: b.queue.free(b.taken),
    "BlockQueue.retain": lambda b: b.queue.retain(b.taken),
    "BlockMap.get_one_block": lambda b: b.map.get_one_block(b.key),
    "BlockMap.contain": lambda b: b.map.contain(b.key, 0),
    "BlockMap.insert": lambda b: b.map.insert(b"other", b.block),
    "BlockMap.pop": lambda b: b.map.pop(b.key, 0),
    "BlockMap.clear": lambda b: b.map.clear(),
    "BlockMap.items": lambda b: b.map.items(),
    "BlockMap.find": lambda b: b.map.find(b"hash", [0]),
    "BlockMap.find_prefix": lambda b: b.map.find_prefix([b"hash"], [0]),
    "BlockMap.cache": lambda b: b.map.cache(b.queue.blocks[3:], [b"other"], 0, PAGE, PAGE, None, b.more),
}
"""Calls of an engine's blocks."""


def _block_call(call: Callable[[Blocks], object]) -> Entry:
    return Entry(lambda w: call(w.blocks), WORKS)


def _space_call(name: str, args: tuple[object, ...]) -> Entry:
    return Entry(lambda w: getattr(w.offloaded.space, name)(*args), WORKS)


TREE_CALLS: dict[str, Callable[[World], tuple[object, ...]]] = {
    "adjust_size": lambda w: (w.node, 0, 1),
    "begin_eviction": lambda _: (0, 1),
    "by_common_prefix": lambda w: ([w.node],),
    "children": lambda w: (w.node,),
    "contains": lambda w: (w.node,),
    "end_insertion": lambda _: (),
    "evict": lambda _: (1,),
    "evict_excess_states": lambda w: (w.node,),
    "evict_leaf": lambda w: (w.node,),
    "evictable_size": lambda _: (0,),
    "info": lambda w: (w.node,),
    "is_inserting": lambda _: (),
    "listed": lambda _: (1,),
    "lock_node": lambda w: (w.node,),
    "locked_size": lambda _: (0,),
    "match": lambda _: ([7, 8],),
    "memory_size": lambda _: (),
    "nodes": lambda _: (),
    "path": lambda w: (w.node,),
    "peek": lambda _: ([7, 8],),
    "pin": lambda w: (w.node,),
    "reset": lambda _: (),
    "root": lambda _: (),
    "slot_rows": lambda _: (),
    "slots": lambda w: (w.node, w.hybrid.root()),
    "value": lambda w: (w.node, 0),
    "values": lambda _: (0,),
    "verify": lambda _: (),
    "hash_at": lambda w: (w.node, 1),
    "set_hashes": lambda w: (w.node, 0, bytes(64)),
    "window_gaps": lambda _: ([7, 8], 0, 2),
}
"""Calls of `HybridTree` that take no tensor of a GPU, with their arguments."""


def _tree_call(name: str, args: Callable[[World], tuple[object, ...]]) -> Entry:
    return Entry(lambda w: getattr(w.hybrid, name)(*args(w)), WORKS)


def _in_turn(*calls: Callable[[], object]) -> None:
    for call in calls:
        call()


ENTRIES: dict[str, Entry] = {
    **{name if name.startswith("make_") else f"{name}()": _making(name) for name in POOLS},
    **{f"{name} dropped": _dropping(name) for name in POOLS if not name.startswith("make_")},
    "BatchPlanner()": Entry(lambda w: kvpool.BatchPlanner(w.planned_rows, w.planned_slots, 4, SIZE), REFUSES),
    # Functions, and what all pools have.
    "get_num_threads": Entry(lambda _: kvpool.get_num_threads(), WORKS),
    "set_num_threads": Entry(_threads, WORKS),
    "pools": Entry(lambda w: w.allocator in kvpool.pools(), WORKS),
    "snapshot": Entry(_snapshot, WORKS),
    "Pool.used_on": Entry(lambda w: w.kv.used_on(w.kv.k_buffer[0]), WORKS),
    "Pool.name": Entry(_named, WORKS),
    "Pool.stats": Entry(lambda w: w.stats(), WORKS),
    "Pool.leaks": Entry(lambda w: w.noting.leaks(), WORKS),
    "Pool.expect_balanced": Entry(_balanced, WORKS),
    # TokenToKVPoolAllocator: what the host knows needs no device.
    "TokenToKVPoolAllocator.alloc": Entry(lambda w: w.allocator.alloc(1), WORKS, _is_new),
    "TokenToKVPoolAllocator.alloc: more than is staged": Entry(lambda w: _drain(w.allocator), REFUSES),
    "TokenToKVPoolAllocator.alloc_extend": Entry(
        lambda w: w.paged.alloc_extend(w.inputs.zeros, w.inputs.lengths, w.inputs.minus), REFUSES
    ),
    "TokenToKVPoolAllocator.alloc_decode": Entry(
        lambda w: w.paged.alloc_decode(w.inputs.lengths, w.inputs.last), REFUSES
    ),
    "TokenToKVPoolAllocator.free": Entry(lambda w: w.allocator.free(w.slots), WORKS, _is_free(SIZE)),
    "TokenToKVPoolAllocator.free: of the table": Entry(
        lambda w: w.allocator.free(w.table.read(w.row, 3)), WORKS, _is_free(SIZE)
    ),
    "TokenToKVPoolAllocator.free: of host values": Entry(
        lambda w: w.allocator.free([1, 2, 3]), WORKS, _is_free(SIZE)
    ),
    "TokenToKVPoolAllocator.free: of unknown values": Entry(
        lambda w: w.allocator.free(w.inputs.slots), REFUSES
    ),
    "TokenToKVPoolAllocator.free_segment": Entry(
        lambda w: w.allocator.free_segment(w.slots, start_pos=0), WORKS, _is_free(SIZE)
    ),
    "TokenToKVPoolAllocator.free_segment: of unknown values": Entry(
        lambda w: w.allocator.free_segment(w.inputs.slots, start_pos=0), REFUSES
    ),
    "TokenToKVPoolAllocator.free_segments": Entry(
        lambda w: w.allocator.free_segments([(w.slots[:1], 0), (w.slots[1:], 1)]), WORKS, _is_free(SIZE)
    ),
    "TokenToKVPoolAllocator.free_segments: of unknown values": Entry(
        lambda w: w.allocator.free_segments([(w.slots[:1], 0), (w.inputs.slots, 1)]), REFUSES
    ),
    "TokenToKVPoolAllocator.free_pages": Entry(
        lambda w: w.allocator.free_pages(w.slots), WORKS, _is_free(SIZE)
    ),
    "TokenToKVPoolAllocator.free_pages: of unknown values": Entry(
        lambda w: w.allocator.free_pages(w.inputs.slots), REFUSES
    ),
    "TokenToKVPoolAllocator.resize": Entry(lambda w: w.allocator.resize(2 * SIZE), REFUSES),
    "TokenToKVPoolAllocator.used_on": Entry(lambda w: w.allocator.used_on(w.slots), WORKS),
    "TokenToKVPoolAllocator.share": Entry(lambda w: w.allocator.share(w.slots), WORKS),
    "TokenToKVPoolAllocator.share: of unknown values": Entry(
        lambda w: w.allocator.share(w.inputs.slots), REFUSES
    ),
    "TokenToKVPoolAllocator.poison_freed": Entry(lambda w: w.allocator.poison_freed(w.kv), WORKS),
    "TokenToKVPoolAllocator.free_group_begin": Entry(_begin_group, WORKS, _is_free(SIZE)),
    "TokenToKVPoolAllocator.free_group_end": Entry(_begin_group, WORKS, _is_free(SIZE)),
    "TokenToKVPoolAllocator.free_group": Entry(_group, WORKS, _is_free(SIZE)),
    "FreeGroup.with": Entry(_group, WORKS, _is_free(SIZE)),
    "TokenToKVPoolAllocator.available_size": Entry(lambda w: w.allocator.available_size() == SIZE - 3, WORKS),
    "TokenToKVPoolAllocator.clear": Entry(lambda w: w.allocator.clear(), WORKS, _is_free(SIZE)),
    "TokenToKVPoolAllocator.merge_and_sort_free": Entry(lambda w: w.allocator.merge_and_sort_free(), WORKS),
    "TokenToKVPoolAllocator.runs": Entry(lambda w: w.allocator.runs([1, 2, 3]), WORKS),
    "TokenToKVPoolAllocator.runs: of unknown values": Entry(
        lambda w: w.allocator.runs(w.inputs.slots), REFUSES
    ),
    "TokenToKVPoolAllocator.is_allocated": Entry(lambda w: w.allocator.is_allocated(w.slots), WORKS),
    "TokenToKVPoolAllocator.is_allocated: of unknown values": Entry(
        lambda w: w.allocator.is_allocated(w.inputs.slots), REFUSES
    ),
    "TokenToKVPoolAllocator.verify": Entry(lambda w: w.allocator.verify(), WORKS),
    # New tensors on the device, which are written.
    "TokenToKVPoolAllocator.free_slots": Entry(lambda w: w.allocator.free_slots, REFUSES),
    "TokenToKVPoolAllocator.release_slots": Entry(lambda w: w.allocator.release_slots, REFUSES),
    # ReqToTokenPool: a write changes the host's copy, which a replay does not; rows that are given back are
    # zeroed.
    "ReqToTokenPool.alloc": Entry(lambda w: w.table.alloc(2), REFUSES),
    "ReqToTokenPool.free": Entry(lambda w: w.table.free(w.row), REFUSES),
    "ReqToTokenPool.write": Entry(lambda w: w.table.write((w.row, slice(0, 3)), w.slots), REFUSES),
    "ReqToTokenPool.write: of a number": Entry(lambda w: w.table.write((w.row, slice(0, 3)), 7), REFUSES),
    "ReqToTokenPool.write: of host values": Entry(
        lambda w: w.table.write((w.row, slice(0, 3)), [7, 8, 9]), REFUSES
    ),
    "ReqToTokenPool.write: of unknown values": Entry(
        lambda w: w.table.write((w.row, slice(0, 3)), w.inputs.others), REFUSES
    ),
    "ReqToTokenPool.write: to unknown places": Entry(
        lambda w: w.table.write((w.inputs.rows, w.inputs.one), w.inputs.one), REFUSES
    ),
    "ReqToTokenPool.read": Entry(
        lambda w: w.table.read(w.row, 3), WORKS, lambda _, found: bool(found.tolist() == [1, 2, 3])
    ),
    "ReqToTokenPool.build_kv_indices": Entry(
        lambda w: w.table.build_kv_indices(w.inputs.rows, w.inputs.indptr, w.inputs.out_indices),
        WORKS,
        _is_built,
    ),
    "ReqToTokenPool.build_kv_indices: of host values": Entry(
        lambda w: w.table.build_kv_indices([w.row], [0, 3], w.inputs.out_indices), REFUSES
    ),
    "ReqToTokenPool.mark_modified": Entry(lambda w: w.table.mark_modified(w.row), WORKS),
    "ReqToTokenPool.available_size": Entry(lambda w: w.table.available_size(), WORKS),
    "ReqToTokenPool.clear": Entry(lambda w: w.table.clear(), REFUSES),
    # KVPool: launches over indices of the device are recorded.
    "KVPool.get_key_buffer": Entry(lambda w: w.kv.get_key_buffer(0), WORKS),
    "KVPool.get_value_buffer": Entry(lambda w: w.kv.get_value_buffer(0), WORKS),
    "KVPool.get_kv_buffer": Entry(lambda w: w.kv.get_kv_buffer(0), WORKS),
    "KVPool.set_kv_buffer": Entry(
        lambda w: w.kv.set_kv_buffer(1, w.inputs.slots, w.inputs.k, w.inputs.v), WORKS, _is_stored
    ),
    "KVPool.set_kv_buffer: at staged slots": Entry(
        lambda w: w.kv.set_kv_buffer(1, w.slots, w.inputs.k, w.inputs.v), WORKS, _is_stored
    ),
    "KVPool.set_kv_buffer: at host values": Entry(
        lambda w: w.kv.set_kv_buffer(1, [1, 2, 3], w.inputs.k, w.inputs.v), REFUSES
    ),
    "KVPool.gather_kv": Entry(lambda w: w.kv.gather_kv(0, w.inputs.slots, w.inputs.out), WORKS, _is_gathered),
    "KVPool.gather_kv: to new memory": Entry(lambda w: w.kv.gather_kv(0, w.inputs.slots), REFUSES),
    "KVPool.move_kv": Entry(lambda w: w.kv.move_kv(w.inputs.others, w.inputs.slots), WORKS, _is_moved),
    "KVPool.move_kv: of host values": Entry(lambda w: w.kv.move_kv([11], [1]), REFUSES),
    "KVPool.page_view": Entry(lambda w: w.kv.page_view(0), WORKS),
    "KVPool.get_contiguous_buf_infos": Entry(lambda w: w.kv.get_contiguous_buf_infos(), WORKS),
    "KVPool.check": Entry(lambda w: w.kv.check(), REFUSES),
    "KVPool.mem_bytes": Entry(lambda w: w.kv.mem_bytes(), WORKS),
    # GDNPool.
    "GDNPool.get_layer_state": Entry(lambda w: w.gdn.get_layer_state(0), WORKS),
    "GDNPool.get_contiguous_buf_infos": Entry(lambda w: w.gdn.get_contiguous_buf_infos(), WORKS),
    "GDNPool.reset_states": Entry(lambda w: w.gdn.reset_states(w.inputs.states), WORKS),
    "GDNPool.reset_states: of host values": Entry(lambda w: w.gdn.reset_states([1]), REFUSES),
    "GDNPool.copy_states": Entry(lambda w: w.gdn.copy_states(w.inputs.states, w.inputs.other_states), WORKS),
    "GDNPool.copy_states: of host values": Entry(lambda w: w.gdn.copy_states([1], [2]), REFUSES),
    "GDNPool.alloc_track_slot": Entry(lambda w: w.gdn.alloc_track_slot(), WORKS),
    "GDNPool.free_track_slot": Entry(lambda w: w.gdn.free_track_slot(w.track), WORKS),
    "GDNPool.mem_bytes": Entry(lambda w: w.gdn.mem_bytes(), WORKS),
    # BatchPlanner: a plan is uploaded, and the host notes what it holds.
    "BatchPlanner.extend": Entry(lambda w: w.planner.extend(w.planned[1:], [0], [4]), REFUSES),
    "BatchPlanner.extend: of device values": Entry(
        lambda w: w.planner.extend(w.planned[1:], w.inputs.zeros, w.inputs.lengths), REFUSES
    ),
    "BatchPlanner.decode": Entry(
        lambda w: w.planner.decode(w.planned[:1], [w.planner.seq_len(w.planned[0]) + 1]), REFUSES
    ),
    "BatchPlanner.truncate": Entry(lambda w: w.planner.truncate(w.planned[:1], [3]), WORKS),
    "BatchPlanner.finish": Entry(lambda w: w.planner.finish(w.planned[:1]), REFUSES),
    "BatchPlanner.fork": Entry(lambda w: w.planner.fork(w.planned[0], w.planned[1], 3), REFUSES),
    "BatchPlanner.seq_len": Entry(lambda w: w.planner.seq_len(w.planned[0]), WORKS),
    "BatchPlanner.stats": Entry(lambda w: w.planner.stats(), WORKS),
    # PrefixCache: the tree is on the host, and tensors of slots are new memory that is written.
    "PrefixCache()": Entry(lambda w: w.spare.append(kvpool.PrefixCache(w.allocator)), WORKS),
    "PrefixCache.match": Entry(lambda w: w.cache.match([7, 8, 9]), WORKS, lambda _, lease: len(lease) == 2),
    "PrefixCache.insert": Entry(lambda w: w.cache.insert([6], w.prefix_own), WORKS),
    "PrefixCache.evict": Entry(lambda w: w.cache.evict(1), WORKS),
    "PrefixCache.clear": Entry(lambda w: w.cache.clear(), WORKS),
    "PrefixCache.pin": Entry(lambda w: w.cache.pin(w.lease, seconds=1), WORKS),
    "PrefixCache.cached_len": Entry(lambda w: w.cache.cached_len([7, 8]) == 2, WORKS),
    "PrefixCache.cached_size": Entry(lambda w: w.cache.cached_size(), WORKS),
    "PrefixCache.evictable_size": Entry(lambda w: w.cache.evictable_size(), WORKS),
    "PrefixCache.locked_size": Entry(lambda w: w.cache.locked_size(), WORKS),
    "PrefixCache.obtainable_size": Entry(lambda w: w.cache.obtainable_size(), WORKS),
    "PrefixCache.eviction_ages": Entry(lambda w: w.cache.eviction_ages(), WORKS),
    "PrefixCache.explain": Entry(lambda w: w.cache.explain([7, 8, 9]), WORKS),
    "PrefixCache.events": Entry(lambda w: w.cache.events(), WORKS),
    "PrefixCache.verify": Entry(lambda w: w.cache.verify(), WORKS),
    # PrefixTree: the same.
    "PrefixTree()": Entry(lambda w: w.spare.append(kvpool.PrefixTree(w.allocator)), WORKS),
    "PrefixTree.match": Entry(lambda w: w.tree.match([7]), WORKS, lambda _, match: match.length == 1),
    "PrefixTree.insert": Entry(lambda w: w.tree.insert([6], [3]), WORKS),
    "PrefixTree.lock": Entry(lambda w: w.tree.lock(w.matched.node), WORKS),
    "PrefixTree.unlock": Entry(lambda w: w.tree.unlock(w.matched.node), WORKS),
    "PrefixTree.evict": Entry(lambda w: w.tree.evict(1), WORKS),
    "PrefixTree.clear": Entry(lambda w: w.tree.clear(), WORKS),
    "PrefixTree.slots": Entry(lambda w: w.tree.slots(w.matched.node), REFUSES),
    "PrefixTree.node": Entry(lambda w: w.tree.node(w.matched.node), WORKS),
    "PrefixTree.cached_size": Entry(lambda w: w.tree.cached_size(), WORKS),
    "PrefixTree.evictable_size": Entry(lambda w: w.tree.evictable_size(), WORKS),
    "PrefixTree.locked_size": Entry(lambda w: w.tree.locked_size(), WORKS),
    "PrefixTree.stats": Entry(lambda w: w.tree.stats(), WORKS),
    "PrefixTree.verify": Entry(lambda w: w.tree.verify(), WORKS),
    # What an engine offloads: bookkeeping on the host.
    "OffloadTable()": Entry(lambda w: w.spare.append(_kvpool.OffloadTable(1)), WORKS),
    "OffloadRequest()": Entry(lambda w: w.spare.append(_kvpool.OffloadRequest()), WORKS),
    "OffloadOrder()": Entry(lambda w: w.spare.append(_kvpool.OffloadOrder()), WORKS),
    "OffloadTurn()": Entry(lambda w: w.spare.append(_kvpool.OffloadTurn()), WORKS),
    "AddressSpace()": Entry(lambda w: w.spare.append(_kvpool.AddressSpace(1)), WORKS),
    **{f"AddressSpace.{name}": _space_call(name, args) for name, args in SPACE_CALLS.items()},
    **{f"OffloadTable.{name}": _offload_call(name, args) for name, args in OFFLOAD_CALLS.items()},
    **{f"OffloadOrder.{name}": _order_call(name, args) for name, args in ORDER_CALLS.items()},
    # An engine's blocks: on the host, too.
    "BlockQueue()": Entry(lambda w: w.spare.append(_kvpool.BlockQueue(1)), WORKS),
    "BlockMap()": Entry(lambda w: w.spare.append(_kvpool.BlockMap()), WORKS),
    **{name: _block_call(call) for name, call in BLOCK_CALLS.items()},
    # HybridTree: the tree is on the host, and so are its answers.
    "HybridTree()": Entry(lambda w: w.spare.append(_kvpool.HybridTree(1)), WORKS),
    "HybridTree.insert": Entry(lambda w: w.hybrid.insert([9], w.inputs.one, state=[4]), REFUSES),
    "HybridTree.advance": Entry(
        lambda w: [w.hybrid.insert([9], [5], state=[4]), w.hybrid.advance([9], w.inputs.one)], REFUSES
    ),
    "HybridTree.end_eviction": Entry(
        lambda w: _in_turn(partial(w.hybrid.begin_eviction, 0, 1), partial(w.hybrid.end_eviction, 0)), WORKS
    ),
    "HybridTree.set_value": Entry(lambda w: w.hybrid.set_value(w.node, 1, w.inputs.states), REFUSES),
    "HybridTree.attach_window": Entry(lambda w: w.hybrid.attach_window([7, 8], 0, w.inputs.states), REFUSES),
    "HybridTree.next_victim": Entry(
        lambda w: _in_turn(partial(w.hybrid.begin_eviction, 0, 1), partial(w.hybrid.next_victim, 0, 0)), WORKS
    ),
    "HybridTree.unlock_node": Entry(
        lambda w: _in_turn(partial(w.hybrid.lock_node, w.node), partial(w.hybrid.unlock_node, w.node)), WORKS
    ),
    "HybridTree.unlock_window": Entry(
        lambda w: _in_turn(partial(w.hybrid.lock_node, w.node), partial(w.hybrid.unlock_window, w.node)),
        WORKS,
    ),
    "HybridTree.unpin": Entry(
        lambda w: _in_turn(partial(w.hybrid.pin, w.node), partial(w.hybrid.unpin, w.node)), WORKS
    ),
    **{f"HybridTree.{name}": _tree_call(name, args) for name, args in TREE_CALLS.items()},
    "HybridStep.acts": Entry(lambda w: w.step.acts(), WORKS),
    "Lease.slots": Entry(lambda w: w.lease.slots, REFUSES),
    "Lease.publish": Entry(lambda w: w.lease.publish([6], w.prefix_own), WORKS),
    "Lease.finish": Entry(lambda w: w.lease.finish([6], w.prefix_own), WORKS),
    "Lease.restore": Entry(lambda w: w.lease.restore(1), REFUSES),
    "Lease.release": Entry(lambda w: w.lease.release(), WORKS),
    "Lease.with": Entry(lambda w: _with(w.lease), WORKS),
    "Published.slots": Entry(lambda w: w.published.slots, REFUSES),
    # ChunkPool: the host is told when a copy is done, which a replay does not do.
    "ChunkPool.allocate": Entry(lambda w: w.gpu_chunks.allocate(), WORKS),
    "ChunkPool.allocate_batch": Entry(lambda w: w.gpu_chunks.allocate_batch(2), WORKS),
    "ChunkPool.free": Entry(lambda w: w.gpu_chunks.free(w.gpu_chunk), WORKS),
    "ChunkPool.wait_registered": Entry(lambda w: w.chunks.wait_registered(), WORKS),
    "Chunk.tensor": Entry(lambda w: w.gpu_chunk.tensor(), WORKS),
    "Chunk.retain": Entry(lambda w: w.gpu_chunk.retain(), WORKS),
    "Chunk.release": Entry(lambda w: w.gpu_chunk.release(), WORKS),
    "Chunk.copy_from": Entry(lambda w: w.chunk.copy_from(w.inputs.chunk), REFUSES),
    "Chunk.copy_from: on the device": Entry(lambda w: w.gpu_chunk.copy_from(w.inputs.chunk), REFUSES),
    "Chunk.copy_to": Entry(lambda w: w.chunk.copy_to(w.inputs.out_chunk), REFUSES),
    "Chunk.copy_to: on the device": Entry(lambda w: w.gpu_chunk.copy_to(w.inputs.out_chunk), REFUSES),
    "Chunk.with": Entry(lambda w: _with(w.gpu_chunk), WORKS),
    # Files, and host memory.
    # HostTier: copies run on a stream of their own, behind the current one, which must not be captured.
    "HostTier()": Entry(lambda w: w.spare.append(kvpool.HostTier(w.kv, SIZE)), WORKS),
    "HostTier.clear": Entry(lambda w: w.tier.clear(), WORKS),
    "HostTier.verify": Entry(lambda w: w.tier.verify(), WORKS),
    "HostTier.mem_bytes": Entry(lambda w: w.tier.mem_bytes(), WORKS),
    "HostTier.wait_registered": Entry(lambda w: w.tier.wait_registered(), WORKS),
    "Lease.load": Entry(lambda w: w.loadable.load(), REFUSES),
    "Load.wait_layer": Entry(lambda w: w.load.wait_layer(0), WORKS),
    "Load.query": Entry(lambda w: w.load.query(), WORKS),
    "Load.cancel": Entry(lambda w: w.load.cancel(), WORKS),
    "FileStore()": Entry(_with_store, WORKS),
    "FileStore.exists": Entry(lambda w: w.files.store.exists(w.files.keys) == 1, WORKS),
    "FileStore.get": Entry(lambda w: w.files.store.get(w.files.keys, w.files.pages).wait(), WORKS),
    "FileStore.put": Entry(lambda w: w.files.store.put(w.files.keys, w.files.pages), WORKS),
    "FileStore.remove": Entry(lambda w: w.files.store.remove(w.files.keys), WORKS),
    "FileStore.clear": Entry(lambda w: w.files.store.clear(), WORKS),
    "FileStore.close": Entry(_close, WORKS),
    "FileStore.stats": Entry(lambda w: w.files.store.stats(), WORKS),
    "FileStore.with": Entry(_with_store, WORKS),
    "Store()": Entry(lambda _: Memory().close(), WORKS),
    "Store.attach": Entry(lambda w: w.memory.attach([]), WORKS),
    "Store.close": Entry(lambda w: w.memory.close(), WORKS),
    "Store.find": Entry(lambda w: w.memory.find([]), WORKS),
    "Store.read": Entry(lambda w: w.memory.read([], [], []), WORKS),
    "Store.with": Entry(lambda w: _with(w.memory), WORKS),
    "Store.write": Entry(lambda w: w.memory.write([], [], []), WORKS),
    "PrefixCache.fetch": Entry(lambda w: w.tiered.fetch([7, 8]), WORKS),
    "Fetch.query": Entry(lambda w: w.fetch.query(), WORKS),
    "Fetch.wait": Entry(lambda w: w.fetch.wait(), WORKS),
    "Fetch.cancel": Entry(lambda w: w.fetch.cancel(), WORKS),
    "StoreTransfer.query": Entry(lambda w: w.files.stored.query(), WORKS),
    "StoreTransfer.wait": Entry(lambda w: w.files.stored.wait(), WORKS),
    "ChunkCopy.query": Entry(lambda w: w.copy.query(), WORKS),
    "ChunkCopy.wait": Entry(lambda w: w.copy.wait(), WORKS),
    # BufferPool: what this stream gave back is there for it.
    "BufferPool.alloc": Entry(lambda w: w.buffers.alloc(16, FLOAT), WORKS),
    "BufferPool.alloc: new memory": Entry(lambda w: w.buffers.alloc(1 << 12, FLOAT), REFUSES),
    "BufferPool.alloc_bytes": Entry(lambda w: w.buffers.alloc_bytes(64), WORKS),
    "BufferPool.alloc_bytes: new memory": Entry(lambda w: w.buffers.alloc_bytes(1 << 12), REFUSES),
    "BufferPool.alloc_batch": Entry(lambda w: w.buffers.alloc_batch([(16, FLOAT)]), WORKS),
    "BufferPool.alloc_batch: new memory": Entry(
        lambda w: w.buffers.alloc_batch([(16, FLOAT), (1 << 12, FLOAT)]), REFUSES
    ),
    "BufferPool.release": Entry(lambda w: w.buffers.release(w.buffer), WORKS),
    "BufferPool.reset": Entry(lambda w: w.buffers.reset(), WORKS),
    "BufferPool.step": Entry(_step, WORKS),
    "BufferStep.with": Entry(_step, WORKS),
    "BufferPool.register_existing": Entry(lambda w: w.buffers.register_existing(w.inputs.weights), WORKS),
    "BufferPool.clear": Entry(lambda w: w.buffers.clear(), WORKS),
    "Buffer.release": Entry(lambda w: w.buffer.release(), WORKS),
    "Buffer.with": Entry(lambda w: _with(w.buffer), WORKS),
    # PagePool.
    "PagePool.alloc": Entry(lambda w: w.pages.alloc(), WORKS),
    "PagePool.free": Entry(lambda w: w.pages.free(w.page_number), WORKS),
    "PagePool.page": Entry(lambda w: w.pages.page(0), WORKS),
    # Workspace: the stream that had memory gets it again.
    "Workspace.empty": Entry(lambda w: w.workspace.empty(4, FLOAT), WORKS),
    "Workspace.zeros": Entry(
        lambda w: w.workspace.zeros(4, FLOAT), WORKS, lambda _, found: bool(found.cpu().eq(0).all())
    ),
    "Workspace.use": Entry(_use, WORKS),
    "Workspace.reset": Entry(lambda w: w.workspace.reset(), WORKS),
    "Workspace.close": Entry(lambda w: w.workspace.close(), WORKS),
    "Workspace.with": Entry(lambda w: _with(w.workspace), WORKS),
    # LMCache's pools.
    "LocalPool.init_max_chunk_num": Entry(lambda w: w.local.init_max_chunk_num(LMCACHE), WORKS),
    "LocalPool.allocate": Entry(lambda w: w.local.allocate(w.inputs.kv_chunk), WORKS),
    "LocalPool.free": Entry(lambda w: w.local.free(w.kv_obj), WORKS),
    "LocalPool.stats": Entry(lambda w: w.local.stats(), WORKS),
}

INSTANCES: dict[str, Callable[[World], object]] = {
    "BatchPlan": lambda w: w.plan,
    "BatchPlanner": lambda w: w.planner,
    "Block": lambda w: w.blocks.block,
    "BlockQueue": lambda w: w.blocks.queue,
    "Buffer": lambda w: w.buffer,
    "AddressSpace": lambda w: w.offloaded.space,
    "BufferPool": lambda w: w.buffers,
    "Chunk": lambda w: w.chunk,
    "ChunkPool": lambda w: w.gpu_chunks,
    "Fetch": lambda w: w.fetch,
    "FileStore": lambda w: w.files.store,
    "GDNPool": lambda w: w.gdn,
    "HostPlan": lambda w: w.plan.host,
    "HostTier": lambda w: w.tier,
    "KVPool": lambda w: w.kv,
    "HybridFrees": lambda w: w.hybrid.evict(2),
    "HybridMatch": lambda w: w.hybrid.match([7, 8]),
    "HybridNode": lambda w: w.hybrid.info(w.node),
    "HybridStep": lambda w: w.step,
    "Lease": lambda w: w.lease,
    "Load": lambda w: w.load,
    "LocalGPUPool": lambda w: w.local,
    "LocalPool": lambda w: w.local,
    "PagePool": lambda w: w.pages,
    "Pool": lambda w: w.allocator,
    "PrefixCache": lambda w: w.cache,
    "PrefixTree": lambda w: w.tree,
    "Published": lambda w: w.published,
    "ReqToTokenPool": lambda w: w.table,
    "StoreTransfer": lambda w: w.files.stored,
    "TokenToKVPoolAllocator": lambda w: w.allocator,
    "Workspace": lambda w: w.workspace,
}
"""Of each class with properties one that has them."""

# They hold numbers, or have no calls of their own: reports, LMCache's records and its abstract class. Where
# PyTorch is, there is no `Tensor`.
_WITHOUT_CALLS = (
    "BasePool",
    "Cleared",
    "KVObj",
    "LMCacheMemPoolMetadata",
    "Leak",
    "Removed",
    "Segment",
    "Stored",
    "Tensor",
    "TreeEviction",
    "TreeInsertion",
    "TreeMatch",
    "TreeNode",
)


def _classes() -> Iterator[type]:
    """The public classes, each once."""
    found = {**vars(_kvpool), **{name: getattr(kvpool, name) for name in kvpool.__all__}}
    found |= {name: getattr(lmcache, name) for name in lmcache.__all__}
    for name, value in sorted(found.items()):
        is_call = isinstance(value, type) and not issubclass(value, Exception)
        if is_call and not name.startswith("_") and name not in _WITHOUT_CALLS:
            yield value


def _can_be_made(kind: type) -> bool:
    """Whether a class has a constructor; `Pool` has one for others to inherit."""
    try:
        kind()
    except TypeError as error:
        return "No constructor" not in str(error) and "cannot create" not in str(error)
    except Exception:  # noqa: BLE001 - it lacks arguments, or a device
        return True
    return kind is not kvpool.Pool


def _members(kind: type) -> Iterator[tuple[str, object]]:
    """What a class has itself, or from a private one."""
    for base in kind.__mro__:
        if base is kind or base is Closing or base.__name__.startswith("_"):
            yield from vars(base).items()


def surface() -> tuple[set[str], set[str]]:
    """The public calls, and the properties among them."""
    calls = {name for name in kvpool.__all__ if inspect.isroutine(getattr(kvpool, name))}
    properties = set()
    for kind in _classes():
        # None of the pools is made here: it would be the first use of the driver.
        if kind.__name__ in POOLS or _can_be_made(kind):
            calls.add(f"{kind.__name__}()")
        for name, member in _members(kind):
            if name == "__enter__":
                calls.add(f"{kind.__name__}.with")
            elif not name.startswith("_"):
                calls.add(f"{kind.__name__}.{name}")
                if not callable(member) and not isinstance(member, staticmethod):
                    properties.add(f"{kind.__name__}.{name}")
    return calls, properties


def _reading(names: list[str]) -> Entry:
    def read(world: World) -> list[object]:
        return [getattr(INSTANCES[kind](world), name) for kind, name in (name.split(".") for name in names)]

    return Entry(read, WORKS)


def all_entries() -> dict[str, Entry]:
    """The table, with the properties of each class: reading them works, unless `ENTRIES` says otherwise."""
    properties = sorted(surface()[1] - set(ENTRIES))
    read = {}
    for kind in INSTANCES:
        names = [name for name in properties if name.startswith(f"{kind}.")]
        if names:
            read[f"{kind}.properties"] = _reading(names)
    return {**read, **ENTRIES}
