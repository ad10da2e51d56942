"""Calls of the parts that are written for engines: their schedulers' blocks, trees and offloaded chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from capture_entry import WORKS, Entry
from capture_world import PAGE, Blocks, Offloaded, World

from kvpool import _kvpool

if TYPE_CHECKING:
    from collections.abc import Callable

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


def offload_call(name: str, args: Callable[[Offloaded], tuple[object, ...]]) -> Entry:
    return Entry(lambda w: getattr(w.offloaded.table, name)(*args(w.offloaded)), WORKS)


def order_call(name: str, args: Callable[[Offloaded], tuple[object, ...]]) -> Entry:
    return Entry(lambda w: getattr(w.offloaded.order, name)(*args(w.offloaded)), WORKS)


BLOCK_CALLS: dict[str, Callable[[Blocks], object]] = {
    "BlockQueue.evict_by": lambda b: b.queue.evict_by("adaptive", PAGE),
    "BlockQueue.look_up": lambda b: b.queue.look_up(PAGE),
    "BlockQueue.set_user": lambda b: b.queue.set_user("chat 3", 2 * PAGE, PAGE),
    "BlockQueue.add_prompt": lambda b: b.queue.add_prompt(b.taken),
    "BlockQueue.end_turn": lambda b: b.queue.end_turn("chat 3", b.taken, pause="bash"),
    "Block.set_block_hash": lambda b: b.queue.blocks[3].set_block_hash(b"other"),
    "Block.reset_hash": lambda b: b.block.reset_hash(),
    "BlockQueue.add_waiting": lambda b: b.queue.add_waiting(b.taken),
    "BlockQueue.extend_waiting": lambda b: b.queue.extend_waiting((0, 0, 1), b.taken),
    "BlockQueue.remove_waiting": lambda b: b.queue.remove_waiting((0, 0, 1)),
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
    "BlockQueue.count_unused": lambda b: b.queue.count_unused(b.taken),
    "BlockMap.get_one_block": lambda b: b.map.get_one_block(b.key),
    "BlockMap.contain": lambda b: b.map.contain(b.key, 0),
    "BlockMap.insert": lambda b: b.map.insert(b"other", b.block),
    "BlockMap.pop": lambda b: b.map.pop(b.key, 0),
    "BlockMap.clear": lambda b: b.map.clear(),
    "BlockMap.items": lambda b: b.map.items(),
    "BlockMap.find": lambda b: b.map.find(b"hash", [0]),
    "BlockMap.find_prefix": lambda b: b.map.find_prefix([b"hash"], [0]),
    "BlockMap.find_last_run": lambda b: b.map.find_last_run([b"hash"], [0], 1),
    "BlockHasher.hashes": lambda _: _kvpool.BlockHasher("sha256", 2).hashes([1, 2], 0, b""),
    "BlockMap.cache": lambda b: b.map.cache(b.queue.blocks[3:], [b"other"], 0, PAGE, PAGE, None, b.more),
}
"""Calls of an engine's blocks."""


def block_call(call: Callable[[Blocks], object]) -> Entry:
    return Entry(lambda w: call(w.blocks), WORKS)


def space_call(name: str, args: tuple[object, ...]) -> Entry:
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
    "second_owners": lambda _: (),
    "slots": lambda w: (w.node, w.hybrid.root()),
    "value": lambda w: (w.node, 0),
    "values": lambda _: (0,),
    "verify": lambda _: (),
    "hash_at": lambda w: (w.node, 1),
    "set_hashes": lambda w: (w.node, 0, bytes(64)),
    "set_waiting": lambda w: ([(None, w.node)],),
    "window_gaps": lambda _: ([7, 8], 0, 2),
}
"""Calls of `HybridTree` that take no tensor of a GPU, with their arguments."""


def tree_call(name: str, args: Callable[[World], tuple[object, ...]]) -> Entry:
    return Entry(lambda w: getattr(w.hybrid, name)(*args(w)), WORKS)
