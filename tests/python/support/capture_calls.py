"""Every public call of the pools, with what it does while its own stream is captured.

`ENTRIES` names a call as `Class.method`, a constructor as `Class()` and a function by its name; behind `: `
stands a variant. `capture_surface` says which calls there are, so that a call without an entry is found.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from capture_engine_calls import (
    BLOCK_CALLS,
    OFFLOAD_CALLS,
    ORDER_CALLS,
    SPACE_CALLS,
    TREE_CALLS,
    block_call,
    offload_call,
    order_call,
    space_call,
    tree_call,
)
from capture_entry import REFUSES, WORKS, Entry
from capture_surface import surface
from capture_world import FLOAT, LMCACHE, POOLS, SIZE, World
from memory_store import Memory

import kvpool
from kvpool import _kvpool

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch


def _drain(allocator: kvpool.TokenToKVPoolAllocator) -> object:
    return allocator.alloc(allocator.available_size())


def _group(world: World) -> None:
    with world.allocator.free_group():
        world.allocator.free(world.slots)


def _begin_group(world: World) -> None:
    world.allocator.free_group_begin()
    world.allocator.free(world.slots)
    world.allocator.free_group_end()


def _has_copied(part: slice) -> Callable[[World, object], bool]:
    return lambda world, _: world.gpu_chunk.tensor().cpu().equal(world.inputs.pageable[part])


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


# Calls that neither allocate nor write on the device; the others need zeroed memory, and kernels.
_WITHOUT_MEMORY = ("LocalCPUPool", "LocalCPUBufferPool", "LocalPool")


def _making(name: str) -> Entry:
    return Entry(lambda _: POOLS[name](), WORKS if name in _WITHOUT_MEMORY else REFUSES)


def _dropping(name: str) -> Entry:
    return Entry(
        lambda world: world.spare.clear(), WORKS, prepare=lambda world: world.spare.append(POOLS[name]())
    )


def _in_turn(*calls: Callable[[], object]) -> None:
    for call in calls:
        call()


ENTRIES: dict[str, Entry] = {
    **{name if name.startswith("make_") else f"{name}()": _making(name) for name in POOLS},
    **{f"{name} dropped": _dropping(name) for name in POOLS if not name.startswith("make_")},
    "ArenaPlanner()": Entry(lambda w: kvpool.ArenaPlanner(w.arena, 2, SIZE, 4, SIZE), REFUSES),
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
    "TokenToKVPoolAllocator.slots_free": Entry(lambda w: w.allocator.slots_free == SIZE - 3, WORKS),
    "TokenToKVPoolAllocator.pages_free": Entry(lambda w: w.allocator.pages_free == SIZE - 3, WORKS),
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
    "ReqToTokenPool.rows_free": Entry(lambda w: w.table.rows_free, WORKS),
    "ReqToTokenPool.rows_in_use": Entry(lambda w: w.table.rows_in_use(), WORKS),
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
    # PyTorch makes the tensors: within its captures of memory that the graph has for itself.
    "KVPool.gather_kv: to new memory": Entry(
        lambda w: w.kv.gather_kv(0, w.inputs.slots),
        WORKS,
        lambda w, found: found[0].cpu().equal(w.inputs.k.cpu()) and found[1].cpu().equal(w.inputs.v.cpu()),
    ),
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
    # ArenaPlanner: as BatchPlanner.
    "ArenaPlanner.alloc": Entry(lambda w: w.arena_planner.alloc(), WORKS),
    "ArenaPlanner.extend": Entry(lambda w: w.arena_planner.extend(w.arena_rows[1:], [0], [4]), REFUSES),
    "ArenaPlanner.decode": Entry(lambda w: w.arena_planner.decode(w.arena_rows[:1], [6]), REFUSES),
    "ArenaPlanner.publish": Entry(lambda w: w.arena_planner.publish(w.arena_rows[0], [7, 8, 9, 10]), WORKS),
    "ArenaPlanner.truncate": Entry(lambda w: w.arena_planner.truncate(w.arena_rows[:1], [3]), WORKS),
    "ArenaPlanner.finish": Entry(lambda w: w.arena_planner.finish(w.arena_rows[:1]), WORKS),
    "ArenaPlanner.seq_len": Entry(lambda w: w.arena_planner.seq_len(w.arena_rows[0]), WORKS),
    "ArenaPlanner.units": Entry(lambda w: w.arena_planner.units(w.arena_rows[0], "full"), WORKS),
    "ArenaPlanner.verify": Entry(lambda w: w.arena_planner.verify(), WORKS),
    "ArenaPlanner.stats": Entry(lambda w: w.arena_planner.stats(), WORKS),
    "ArenaPlan.group": Entry(lambda w: w.arena_plan.group("full"), WORKS),
    "ArenaPlan.host": Entry(lambda w: w.arena_plan.host("seq_lens"), WORKS),
    "GroupPlan.host": Entry(lambda w: w.arena_plan.group("full").host("kv_indices"), WORKS),
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
    "PrefixCache.wait_written": Entry(lambda w: w.cache.wait_written(), WORKS),
    "PrefixCache.explain": Entry(lambda w: w.cache.explain([7, 8, 9]), WORKS),
    "PrefixCache.events": Entry(lambda w: w.cache.events(), WORKS),
    "PrefixCache.verify": Entry(lambda w: w.cache.verify(), WORKS),
    "PrefixCache.session": Entry(lambda w: w.cache.session(), WORKS),
    "PrefixCache.add_waiting": Entry(lambda w: w.cache.add_waiting([7, 8, 9]), WORKS),
    "PrefillCost()": Entry(lambda _: kvpool.PrefillCost(1e-5, 1e-9), WORKS),
    "PrefillCost.fit": Entry(lambda _: kvpool.PrefillCost.fit([(0, 10, 1e-3), (90, 10, 2e-3)]), WORKS),
    "PrefillCost.of_model": Entry(
        lambda _: kvpool.PrefillCost.of_model(weights=1e9, layers=2, heads=2, head_dim=64, flops=1e12), WORKS
    ),
    "PrefillCost.seconds": Entry(lambda _: kvpool.PrefillCost(1e-5, 1e-9).seconds(100), WORKS),
    "Session.pause": Entry(lambda w: w.cache.session("a").pause("user"), WORKS),
    "Session.end": Entry(lambda w: w.cache.session().end(), WORKS),
    "WaitingRequest.update": Entry(lambda w: w.cache.add_waiting([7]).update([7, 8]), WORKS),
    "WaitingRequest.remove": Entry(lambda w: w.cache.add_waiting([7]).remove(), WORKS),
    # SlotTree: the same.
    "SlotTree()": Entry(lambda w: w.spare.append(_kvpool.SlotTree(w.allocator)), WORKS),
    "SlotTree.match": Entry(lambda w: w.tree.match([7]), WORKS, lambda _, match: match.length == 1),
    "SlotTree.insert": Entry(lambda w: w.tree.insert([6], [3]), WORKS),
    "SlotTree.lock": Entry(lambda w: w.tree.lock(w.matched.node), WORKS),
    "SlotTree.unlock": Entry(lambda w: w.tree.unlock(w.matched.node), WORKS),
    "SlotTree.evict": Entry(lambda w: w.tree.evict(1), WORKS),
    "SlotTree.clear": Entry(lambda w: w.tree.clear(), WORKS),
    "SlotTree.slots": Entry(lambda w: w.tree.slots(w.matched.node), REFUSES),
    "SlotTree.node": Entry(lambda w: w.tree.node(w.matched.node), WORKS),
    "SlotTree.cached_size": Entry(lambda w: w.tree.cached_size(), WORKS),
    "SlotTree.evictable_size": Entry(lambda w: w.tree.evictable_size(), WORKS),
    "SlotTree.locked_size": Entry(lambda w: w.tree.locked_size(), WORKS),
    "SlotTree.stats": Entry(lambda w: w.tree.stats(), WORKS),
    "SlotTree.verify": Entry(lambda w: w.tree.verify(), WORKS),
    # Offloading by an engine: bookkeeping on the host.
    "OffloadTable()": Entry(lambda w: w.spare.append(_kvpool.OffloadTable(1)), WORKS),
    "OffloadRequest()": Entry(lambda w: w.spare.append(_kvpool.OffloadRequest()), WORKS),
    "OffloadOrder()": Entry(lambda w: w.spare.append(_kvpool.OffloadOrder()), WORKS),
    "OffloadTurn()": Entry(lambda w: w.spare.append(_kvpool.OffloadTurn()), WORKS),
    "AddressSpace()": Entry(lambda w: w.spare.append(_kvpool.AddressSpace(1)), WORKS),
    **{f"AddressSpace.{name}": space_call(name, args) for name, args in SPACE_CALLS.items()},
    **{f"OffloadTable.{name}": offload_call(name, args) for name, args in OFFLOAD_CALLS.items()},
    **{f"OffloadOrder.{name}": order_call(name, args) for name, args in ORDER_CALLS.items()},
    # An engine's blocks: on the host, too.
    "BlockQueue()": Entry(lambda w: w.spare.append(_kvpool.BlockQueue(1)), WORKS),
    "BlockMap()": Entry(lambda w: w.spare.append(_kvpool.BlockMap()), WORKS),
    "BlockHasher()": Entry(lambda w: w.spare.append(_kvpool.BlockHasher("sha256", 16)), WORKS),
    **{name: block_call(call) for name, call in BLOCK_CALLS.items()},
    # HybridTree: the tree is on the host, and so are its answers.
    "HybridTree()": Entry(lambda w: w.spare.append(_kvpool.HybridTree(1)), WORKS),
    "HybridTree.insert": Entry(lambda w: w.hybrid.insert([9], w.inputs.one, state=[4]), REFUSES),
    "HybridTree.advance": Entry(
        lambda w: [w.hybrid.insert([9], [5], state=[4]), w.hybrid.advance([9], w.inputs.one)], REFUSES
    ),
    "HybridTree.end_turn": Entry(lambda w: w.hybrid.end_turn("chat 3", w.node, pause="bash"), WORKS),
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
    **{f"HybridTree.{name}": tree_call(name, args) for name, args in TREE_CALLS.items()},
    "HybridStep.actions": Entry(lambda w: w.step.actions(), WORKS),
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
    "ChunkPool.wait_page_locked": Entry(lambda w: w.chunks.wait_page_locked(), WORKS),
    "Chunk.tensor": Entry(lambda w: w.gpu_chunk.tensor(), WORKS),
    "Chunk.retain": Entry(lambda w: w.gpu_chunk.retain(), WORKS),
    "Chunk.release": Entry(lambda w: w.gpu_chunk.release(), WORKS),
    "Chunk.copy_from": Entry(lambda w: w.chunk.copy_from(w.inputs.chunk), REFUSES),
    "Chunk.copy_from: on the device": Entry(lambda w: w.gpu_chunk.copy_from(w.inputs.chunk), REFUSES),
    "Chunk.copy_to": Entry(lambda w: w.chunk.copy_to(w.inputs.out_chunk), REFUSES),
    "Chunk.copy_to: on the device": Entry(lambda w: w.gpu_chunk.copy_to(w.inputs.out_chunk), REFUSES),
    # The driver stages what is pageable, and waits. Every second element is a copy of rows.
    "Chunk.copy_from: pageable": Entry(
        lambda w: w.gpu_chunk.copy_from(w.inputs.pageable[:8]), REFUSES, _has_copied(slice(8))
    ),
    "Chunk.copy_from: pageable rows": Entry(
        lambda w: w.gpu_chunk.copy_from(w.inputs.pageable[::2]), REFUSES, _has_copied(slice(None, None, 2))
    ),
    "Chunk.copy_to: pageable": Entry(lambda w: w.gpu_chunk.copy_to(w.inputs.out_pageable[:8]), REFUSES),
    "Chunk.copy_to: pageable rows": Entry(lambda w: w.gpu_chunk.copy_to(w.inputs.out_pageable[::2]), REFUSES),
    "Chunk.with": Entry(lambda w: _with(w.gpu_chunk), WORKS),
    # Files, and host memory.
    # HostTier: copies run on a stream of their own, behind the current one, which must not be captured.
    "HostTier()": Entry(lambda w: w.spare.append(kvpool.HostTier(w.kv, SIZE)), WORKS),
    "HostTier.clear": Entry(lambda w: w.tier.clear(), WORKS),
    "HostTier.verify": Entry(lambda w: w.tier.verify(), WORKS),
    "HostTier.mem_bytes": Entry(lambda w: w.tier.mem_bytes(), WORKS),
    "HostTier.staging_bytes": Entry(lambda w: w.tier.staging_bytes(), WORKS),
    "HostTier.wait_page_locked": Entry(lambda w: w.tier.wait_page_locked(), WORKS),
    "Lease.load": Entry(lambda w: w.loadable.load(), REFUSES),
    "Load.wait_layer": Entry(lambda w: w.load.wait_layer(0), WORKS),
    "Load.query": Entry(lambda w: w.load.query(), WORKS),
    "Load.wait": Entry(lambda w: w.load.wait(0), WORKS),
    "Load.error": Entry(lambda w: w.load.error is None, WORKS),
    "Load.cancel": Entry(lambda w: w.load.cancel(), WORKS),
    "FileStore()": Entry(_with_store, WORKS),
    "FileStore.exists": Entry(lambda w: w.files.store.exists(w.files.keys) == 1, WORKS),
    "FileStore.find": Entry(lambda w: w.files.store.find(w.files.keys) == [True], WORKS),
    "FileStore.touch": Entry(lambda w: w.files.store.touch(w.files.keys) == [True], WORKS),
    "FileStore.get": Entry(lambda w: w.files.store.get(w.files.keys, w.files.pages).wait(), WORKS),
    "FileStore.put": Entry(lambda w: w.files.store.put(w.files.keys, w.files.pages), WORKS),
    "FileStore.remove": Entry(lambda w: w.files.store.remove(w.files.keys), WORKS),
    "FileStore.clear": Entry(lambda w: w.files.store.clear(), WORKS),
    "FileStore.close": Entry(_close, WORKS),
    "FileStore.stats": Entry(lambda w: w.files.store.stats(), WORKS),
    "FileStore.with": Entry(_with_store, WORKS),
    "Store()": Entry(lambda _: Memory().close(), WORKS),
    "Store.attach": Entry(lambda w: w.memory.attach([]), WORKS),
    "Store.closed": Entry(lambda w: w.memory.closed is False, WORKS),
    "Store.close": Entry(lambda w: w.memory.close(), WORKS),
    "Store.find": Entry(lambda w: w.memory.find([]), WORKS),
    "Store.read": Entry(lambda w: w.memory.read([], [], []), WORKS),
    "Store.with": Entry(lambda w: _with(w.memory), WORKS),
    "Store.touch": Entry(lambda w: w.memory.touch([]), WORKS),
    "Store.write": Entry(lambda w: w.memory.write([], [], []), WORKS),
    "PrefixCache.fetch": Entry(lambda w: w.tiered.fetch([7, 8]), WORKS),
    "Fetch.query": Entry(lambda w: w.fetch.query(), WORKS),
    "Fetch.wait": Entry(lambda w: w.fetch.wait(), WORKS),
    "Fetch.cancel": Entry(lambda w: w.fetch.cancel(), WORKS),
    "StoreTransfer.cancel": Entry(lambda w: w.files.stored.cancel(), WORKS),
    "StoreTransfer.query": Entry(lambda w: w.files.stored.query(), WORKS),
    "StoreTransfer.wait": Entry(lambda w: w.files.stored.wait(), WORKS),
    "ChunkCopy.query": Entry(lambda w: w.copy.query(), WORKS),
    "ChunkCopy.wait": Entry(lambda w: w.copy.wait(), WORKS),
    "ChunkCopy.cancel": Entry(lambda w: w.copy.cancel(), WORKS),
    "ChunkCopy.error": Entry(lambda w: w.copy.error is None, WORKS),
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
    # ArenaPrefixCache: the tree and the units are on the host. Before the arena is cleared.
    "ArenaPrefixCache()": Entry(lambda w: w.spare.append(kvpool.ArenaPrefixCache(w.arena)), WORKS),
    "ArenaPrefixCache.match": Entry(lambda w: len(w.arena_cache.match([1, 2, 3, 4])) == 4, WORKS),
    "ArenaPrefixCache.session": Entry(lambda w: w.arena_cache.session(), WORKS),
    "ArenaPrefixCache.add_waiting": Entry(lambda w: w.arena_cache.add_waiting([1, 2, 3, 4]), WORKS),
    "ArenaPrefixCache.cached_len": Entry(lambda w: w.arena_cache.cached_len([1, 2, 3, 4]), WORKS),
    "ArenaPrefixCache.explain": Entry(lambda w: w.arena_cache.explain([1, 2, 3, 4]), WORKS),
    "ArenaPrefixCache.group_stats": Entry(lambda w: w.arena_cache.group_stats("full"), WORKS),
    "ArenaPrefixCache.cached_size": Entry(lambda w: w.arena_cache.cached_size(), WORKS),
    "ArenaPrefixCache.evictable_size": Entry(lambda w: w.arena_cache.evictable_size(), WORKS),
    "ArenaPrefixCache.locked_size": Entry(lambda w: w.arena_cache.locked_size(), WORKS),
    "ArenaPrefixCache.events": Entry(lambda w: w.arena_cache.events(), WORKS),
    "ArenaPrefixCache.verify": Entry(lambda w: w.arena_cache.verify(), WORKS),
    "ArenaPrefixCache.fetch": Entry(lambda w: w.arena_cache.fetch([1, 2, 3, 4]), WORKS),
    "ArenaPrefixCache.wait_written": Entry(lambda w: w.arena_cache.wait_written(), WORKS),
    "ArenaPrefixCache.clear": Entry(lambda w: w.arena_cache.clear(), WORKS),
    "ArenaLease.units": Entry(lambda w: w.arena_lease.units("full"), WORKS),
    "ArenaLease.publish": Entry(lambda w: w.arena_lease.publish(range(1, 9), w.more_units), WORKS),
    "ArenaLease.load": Entry(lambda w: w.evicted.load(), REFUSES),
    "ArenaLease.load: nothing": Entry(lambda w: w.arena_lease.load(), REFUSES),
    "ArenaLease.with": Entry(lambda w: w.arena_cache.match([]).__enter__().__exit__(), WORKS),
    "ArenaLease.release": Entry(lambda w: w.arena_cache.match([]).release(), WORKS),
    # ArenaHostTier: as HostTier.
    "ArenaHostTier()": Entry(lambda w: w.spare.append(kvpool.ArenaHostTier(w.arena, 1 << 14)), WORKS),
    "ArenaHostTier.mem_bytes": Entry(lambda w: w.arena_tier.mem_bytes(), WORKS),
    "ArenaHostTier.staging_bytes": Entry(lambda w: w.arena_tier.staging_bytes(), WORKS),
    "ArenaHostTier.piece_bytes": Entry(lambda w: w.arena_tier.piece_bytes("full"), WORKS),
    "ArenaHostTier.wait_page_locked": Entry(lambda w: w.arena_tier.wait_page_locked(), WORKS),
    "ArenaHostTier.get_contiguous_buf_infos": Entry(lambda w: w.arena_tier.get_contiguous_buf_infos(), WORKS),
    # CacheArena: units are numbers on the host.
    "CacheArena.alloc": Entry(lambda w: w.arena.alloc({"full": 1}), WORKS),
    "CacheArena.fits": Entry(lambda w: w.arena.fits({"full": 1}), WORKS),
    "CacheArena.free": Entry(lambda w: w.arena.free("full", w.units), WORKS),
    "CacheArena.copy": Entry(lambda w: w.arena.copy("full", w.units[:1], w.units[1:]), REFUSES),
    "CacheArena.clear": Entry(lambda w: w.arena.clear(), WORKS),
    "CacheArena.buffer": Entry(lambda w: w.arena.buffer("full", "k", 1), WORKS),
    "CacheArena.group_stats": Entry(lambda w: w.arena.group_stats("full"), WORKS),
    "CacheArena.verify": Entry(lambda w: w.arena.verify(), WORKS),
    "CacheArena.mem_bytes": Entry(lambda w: w.arena.mem_bytes(), WORKS),
    "CacheArena.get_contiguous_buf_infos": Entry(lambda w: w.arena.get_contiguous_buf_infos(), WORKS),
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
    "ArenaHostTier": lambda w: w.arena_tier,
    "ArenaPlan": lambda w: w.arena_plan,
    "ArenaPlanner": lambda w: w.arena_planner,
    "ArenaLease": lambda w: w.arena_lease,
    "ArenaPrefixCache": lambda w: w.arena_cache,
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
    "GroupPlan": lambda w: w.arena_plan.group("full"),
    "GroupReport": lambda w: w.arena_cache.explain([1, 2])[0],
    "HostPlan": lambda w: w.plan.host,
    "HostTier": lambda w: w.tier,
    "KVPool": lambda w: w.kv,
    "HybridFrees": lambda w: w.hybrid.evict(2),
    "HybridMatch": lambda w: w.hybrid.match([7, 8]),
    "HybridNode": lambda w: w.hybrid.info(w.node),
    "HybridStep": lambda w: w.step,
    "Lease": lambda w: w.lease,
    "LeasedUnits": lambda w: w.arena_lease.units("full"),
    "Load": lambda w: w.load,
    "LocalGPUPool": lambda w: w.local,
    "LocalPool": lambda w: w.local,
    "CacheArena": lambda w: w.arena,
    "PagePool": lambda w: w.pages,
    "Pool": lambda w: w.allocator,
    "PrefixCache": lambda w: w.cache,
    "PrefillCost": lambda _: kvpool.PrefillCost(1e-5, 1e-9),
    "Session": lambda w: w.cache.session(),
    "SlotTree": lambda w: w.tree,
    "Published": lambda w: w.published,
    "ReqToTokenPool": lambda w: w.table,
    "StoreTransfer": lambda w: w.files.stored,
    "TokenToKVPoolAllocator": lambda w: w.allocator,
    "WaitingRequest": lambda w: w.cache.add_waiting([7]),
    "Workspace": lambda w: w.workspace,
}
"""An object of each class with properties."""


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
