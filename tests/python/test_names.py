"""Names of counts and of what is over, and the earlier names that mean the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

import direct_network
import pytest
from common import some
from memory_store import Memory

import kvpool

if TYPE_CHECKING:
    from pathlib import Path


def test_counts_of_what_is_free() -> None:
    allocator = kvpool.TokenToKVPoolAllocator(64, "cpu", page_size=4)
    slots = some(allocator.alloc(8))
    assert (allocator.slots_free, allocator.pages_free) == (56, 14)
    assert allocator.slots_free == allocator.available_size()
    allocator.free(slots)
    assert (allocator.slots_free, allocator.pages_free) == (64, 16)
    table = kvpool.ReqToTokenPool(4, 8, "cpu")
    some(table.alloc(3))
    assert table.rows_free == table.available_size() == 1
    pages = kvpool.PagePool(4, 8)
    pages.alloc()
    assert pages.pages_free == pages.free_pages == 7
    buffers = kvpool.BufferPool("cpu")
    buffers.alloc((8,), "float32").release()
    assert buffers.buffers_free == buffers.free_count == 1
    assert buffers.bytes_free == buffers.free_bytes > 0


def test_counts_of_a_pool_s_shape() -> None:
    kv = kvpool.KVPool(8, 3, 2, 4, "cpu", "float32", v_head_num=1)
    assert (kv.num_layers, kv.num_k_heads, kv.num_v_heads) == (3, 2, 1)
    assert (kv.layer_num, kv.k_head_num, kv.v_head_num) == (3, 2, 1)


def test_rows_are_freed_by_either_name() -> None:
    table = kvpool.ReqToTokenPool(4, 8, "cpu")
    one, two, three = some(table.alloc(3))
    table.free(one)
    table.free(rows=two)
    table.free(slot_or_slots=three)
    assert table.rows_free == 4
    with pytest.raises(TypeError, match=r"indices must be int16.*not NoneType"):
        table.free()
    with pytest.raises(TypeError, match="free takes rows or slot_or_slots, not both"):
        table.free(1, slot_or_slots=1)


def test_what_is_closed_says_so() -> None:
    cache = kvpool.PrefixCache(kvpool.TokenToKVPoolAllocator(8, "cpu"))
    lease = cache.match([1, 2, 3])
    assert (lease.closed, lease.released) == (False, False)
    lease.release()
    assert (lease.closed, lease.released) == (True, True)
    workspace = kvpool.Workspace("cpu", 1024)
    assert (workspace.closed, workspace.is_closed) == (False, False)
    workspace.close()
    assert (workspace.closed, workspace.is_closed) == (True, True)


def test_stores_and_endpoints_are_closed_at_the_end_of_a_with(tmp_path: Path) -> None:
    with Memory() as store:
        assert not store.closed
    assert store.closed
    with kvpool.FileStore(str(tmp_path / "store"), 1 << 20, page_bytes=4096) as files:
        assert not files.closed
    assert files.closed
    with direct_network.endpoint("a", kvpool.KVPool(8, 1, 1, 4, "cpu", "float32")) as endpoint:
        assert not endpoint.closed
    assert endpoint.closed
