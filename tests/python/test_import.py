"""Importing the package needs no other package and no driver."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

import kvpool
from kvpool import _kvpool

if TYPE_CHECKING:
    from shared_fixtures import RunSnippet

USE = """
import kvpool
from kvpool.lmcache import LMCacheMemPoolMetadata, LocalCPUPool

allocator = kvpool.TokenToKVPoolAllocator(64, "cpu", 4)
slots = allocator.alloc(5)
assert len(slots) == 5
assert slots.shape == (5,)
allocator.free(slots)
allocator.free([99])
assert allocator.stats()["dropped_frees"] == 1

table = kvpool.ReqToTokenPool(4, 8, "cpu")
row = table.alloc()[0]
table.write((row, slice(0, 3)), [5, 6, 7])
table.write(([row], [3]), [8])
assert table.read(row, 4).shape == (4,)
allocator.free(table.read(row, 4))
table.free(row)

pool = kvpool.KVPool(64, 2, 2, 4, "cpu", "bfloat16", page_size=4)
assert pool.dtype == "bfloat16"
k, v = pool.gather_kv(1, [3, 4])
pool.set_kv_buffer(0, [1, 2], k, v)
pool.move_kv([5], [6])
assert k.shape == (2, 2, 4)
assert pool.k_buffer[0].shape == (72, 2, 4)

states = kvpool.GDNPool(4, 1, 1, 2, 2, 2, 4, "cpu", "float16", 2)
states.reset_states([1])
states.copy_states(1, states.alloc_track_slot())
assert states.recurrent_state.dtype == "float32"

planner = kvpool.BatchPlanner(table, allocator, 4, 32)
rows = table.alloc(2)
plan = planner.extend(rows, [0, 0], [5, 3])
assert (plan.seq_lens.dtype, plan.slot_mapping.dtype) == ("int32", "int64")
assert plan.block_table.shape == (2, 2)
assert planner.decode(rows, [6, 4], pad_to=4).positions.shape == (4,)
row = table.alloc()[0]
dst_slots, src_slots = planner.fork(rows[0], row, 6)
assert dst_slots.shape == src_slots.shape == (2,)
cached = table.alloc()[0]
planner.truncate(rows, [5, 0])
planner.extend([cached], [4], [6], [table.read(rows[0], 4)])
planner.finish([*rows, row, cached])
assert (planner.stats()["tokens"], allocator.available_size()) == (0, 64)

chunks = kvpool.ChunkPool(2, (2, 3), "float16", pin_memory=False)
chunk, other = chunks.allocate_batch(2)
assert (chunk.tensor().shape, chunk.tensor().dtype) == ((2, 3), "float16")
chunk.copy_from(other.tensor((4,))).wait()
assert chunk.copy_to(other.tensor((3, 2))).query()

buffers = kvpool.BufferPool("cpu")
buffer = buffers.alloc((2, 3), "int64")
assert (buffer.tensor.dtype, buffers.alloc_bytes(3).tensor.dtype) == ("int64", "uint8")
buffers.register_existing(k)
buffers.reset()

pages = kvpool.PagePool(4, 1, "float16", grow=2)
assert [pages.alloc(), pages.alloc(), pages.total_pages] == [0, 1, 3]
assert pages.page(1).shape == (4,)

cache = LocalCPUPool(LMCacheMemPoolMetadata((2, 2, 4, 1, 3), "float16", 0.0))
given = kvpool.Workspace("cpu", 1 << 16).zeros((2, 2, 3, 1, 3), "float16")
kv_obj = cache.allocate(given)
assert (kv_obj.chunk_idx, kv_obj.size, kv_obj.data.shape) == (0, 96, (2, 2, 3, 1, 3))
assert cache.allocate(given) is None
cache.free(kv_obj)
assert cache.allocate(kv_obj.data).chunk_idx == 0

tensors = [slots, k, states.conv_state, dst_slots, chunk.tensor(), pages.page(0), given, kv_obj.data]
assert {type(tensor) for tensor in tensors} == {kvpool.Tensor}
"""


@pytest.mark.parametrize(
    "hidden",
    [["torch"], ["torch", "numpy"], ["torch", "ml_dtypes"], ["torch", "numpy", "ml_dtypes"]],
    ids="+".join,
)
def test_works_with_modules_hidden(run_snippet: RunSnippet, hidden: list[str]) -> None:
    run_snippet(USE, hidden=hidden)


def test_works_with_numpy_hidden_and_torch_present(run_snippet: RunSnippet) -> None:
    run_snippet(
        """
        import warnings
        warnings.filterwarnings("ignore")
        import torch, kvpool
        allocator = kvpool.TokenToKVPoolAllocator(64, "cpu")
        slots = allocator.alloc(5)
        assert type(slots) is torch.Tensor and slots.tolist() == [1, 2, 3, 4, 5]
        allocator.free(slots[1:3])
        allocator.free([1])
        pool = kvpool.KVPool(64, 1, 2, 4, "cpu", torch.bfloat16)
        pool.set_kv_buffer(0, slots, torch.ones(5, 2, 4), torch.ones(5, 8))
        assert pool.gather_kv(0, [5])[0].float().sum() == 8
        """,
        hidden=["numpy", "ml_dtypes"],
    )


def test_import_loads_no_other_package(run_snippet: RunSnippet) -> None:
    loaded = run_snippet(
        """
        import kvpool, kvpool.typing
        tools = {"rich", "matplotlib", "blake3", "msgspec", "zmq"}
        others = {"torch", "numpy", "ml_dtypes", *tools}
        print(*(name for name in sys.modules if name in others or name.startswith("kvpool.tools")), end="")
        """
    )
    assert loaded == ""


def test_import_needs_no_driver(run_snippet: RunSnippet) -> None:
    run_snippet("import kvpool", env={"LD_LIBRARY_PATH": "", "CUDA_VISIBLE_DEVICES": ""})


def test_modules_can_be_imported_in_any_order(run_snippet: RunSnippet) -> None:
    run_snippet(
        """
        import kvpool
        allocator = kvpool.TokenToKVPoolAllocator(8, "cpu")
        import numpy
        allocator.alloc(8)
        allocator.free(numpy.array([1, 2]))
        import torch
        allocator.free(torch.tensor([3]))
        assert allocator.available_size() == 3
        """
    )


@pytest.mark.parametrize("name", sorted(set(kvpool.__all__) - {"__version__"}))
def test_public_names_are_documented(name: str) -> None:
    thing = getattr(kvpool, name)
    assert thing.__doc__
    assert thing.__module__.split(".")[0] == "kvpool"


def test_classes_are_where_they_say_they_are() -> None:
    """Also private ones, which are in the extension alone: messages and reprs name them so."""
    classes = [thing for thing in vars(_kvpool).values() if isinstance(thing, type)]
    assert len(classes) > 50
    for thing in classes:
        assert getattr(sys.modules[thing.__module__], thing.__name__) is thing


def test_all_lists_the_public_names() -> None:
    assert len(set(kvpool.__all__)) == len(kvpool.__all__)
    assert all(hasattr(kvpool, name) for name in kvpool.__all__)
