"""`kvpool.Tensor` as an array: numbers, parts, arrays and buffers of it, without PyTorch."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from shared_fixtures import RunSnippet

# Memory of every kind, and what one call raises.
TENSORS = """
import kvpool
from kvpool import _kvpool

def raised(call, *errors):
    try:
        found = call()
    except errors as error:
        assert type(error) in errors, repr(error)
        return str(error)
    raise AssertionError(f"no error, but {found!r}")

slots = kvpool.TokenToKVPoolAllocator(64, "cpu").alloc(5)
pool = kvpool.KVPool(16, 1, 2, 4, "cpu", "float32")
keys = pool.k_buffer[0]
"""


def test_elements_are_python_numbers(run_snippet: RunSnippet) -> None:
    run_snippet(
        TENSORS
        + """
assert (slots.tolist(), list(slots), len(slots), slots.ndim) == ([1, 2, 3, 4, 5], [1, 2, 3, 4, 5], 5, 1)
assert (slots[0], slots[-1], slots[(2,)]) == (1, 5, 3)
assert {type(number) for number in slots} == {int}
assert 3 in slots and 9 not in slots
grid = kvpool.TokenToKVPoolAllocator(64, "cpu").runs([4, 5, 9])
assert (grid.tolist(), grid.shape, grid.ndim) == ([[4, 2], [9, 1]], (2, 2), 2)
assert [row.tolist() for row in grid] == [[4, 2], [9, 1]]
assert (grid[1, 0], grid[-1, -2], type(grid[1])) == (9, 9, kvpool.Tensor)
flags = kvpool.TokenToKVPoolAllocator(64, "cpu").is_allocated([1])
assert flags.tolist() == [False] and flags[0] is False
assert (keys.shape, len(keys), keys.ndim) == ((24, 2, 4), 24, 3)
scalar = _kvpool._zeros([], "float32")
assert (scalar.tolist(), scalar.ndim, scalar[()]) == (0.0, 0, 0.0)
for call in (lambda: len(scalar), lambda: iter(scalar)):
    assert raised(call, TypeError) == "a tensor of no dimensions has no length"
""",
        hidden=["torch", "numpy", "ml_dtypes"],
    )


def test_every_dtype_is_read_without_numpy(run_snippet: RunSnippet) -> None:
    """The bytes are written by `copy_from` of the tensor as uint8; the numbers are those of the formats."""
    run_snippet(
        """
        import kvpool, math
        from kvpool import _kvpool
        import numpy as np
        import ml_dtypes

        names = "float32 float16 bfloat16 float8_e4m3fn float8_e5m2 int8 uint8 int32 int64 bool".split()
        tensors = [_kvpool._zeros([2, 256], name) for name in names]
        for tensor in [*tensors, kvpool.BufferPool("cpu").alloc((2, 256), "float64").tensor]:
            dtype = tensor.dtype
            array = tensor.numpy()
            bits = array.view(np.uint8)
            bits[:] = np.arange(bits.size).reshape(bits.shape) % (2 if dtype == "bool" else 256)
            expected = array.tolist() if array.dtype.kind in "iub" else array.astype(np.float64).tolist()
            for ours, theirs in zip(tensor.tolist(), expected):
                for mine, other in zip(ours, theirs):
                    assert type(mine) is type(other), dtype
                    assert mine == other or (math.isnan(mine) and math.isnan(other)), (dtype, mine, other)
        """,
        hidden=["torch"],
    )


def test_parts_of_a_tensor_share_its_memory(run_snippet: RunSnippet) -> None:
    run_snippet(
        TENSORS
        + """
import numpy as np
keys.numpy()[:] = np.arange(24 * 8).reshape(24, 2, 4)
expected = keys.numpy().copy()
for index in (3, -1, (3, 1), slice(2, 5), slice(None, None, 7), slice(5, 2), slice(30, None),
              (slice(1, 9, 3), 1),
              (slice(None), 0, slice(1, 3)), (-1, slice(-3, None, 2), slice(0, 2**62, 2**62)), ()):
    part = keys[index]
    assert part.shape == expected[index].shape, index
    assert part.tolist() == expected[index].tolist(), index
    assert np.array_equal(part.numpy(), expected[index]), index
    assert not part.shape or 0 in part.shape or np.shares_memory(part.numpy(), keys.numpy())
assert keys[3, 1, 2] == expected[3, 1, 2]
row = keys[5]
pool.set_kv_buffer(0, [5], np.full((1, 2, 4), 7.0), np.zeros((1, 8)))
assert row.tolist() == [[7.0] * 4] * 2
assert row[1:][0].tolist() == [7.0] * 4
allocator = kvpool.TokenToKVPoolAllocator(8, "cpu")
some = allocator.alloc(6)
allocator.free(some[1::2])
assert allocator.is_allocated(range(1, 7)).tolist() == [True, False] * 3
del pool, keys
assert row[0, 0] == 7.0
""",
        hidden=["torch"],
    )


def test_other_indices_are_refused(run_snippet: RunSnippet) -> None:
    run_snippet(
        TENSORS
        + """
for index, words in [(5, "index 5 is outside [-5, 5)"), (-6, "index -6 is outside [-5, 5)"),
                     (10**30, "is outside [-5, 5)"), ((0, 0), "2 indices for a tensor of 1 dimensions")]:
    assert words in raised(lambda: slots[index], IndexError), index
for index, kind in [(True, "bool"), (1.0, "float"), (None, "NoneType"), (..., "ellipsis"), ([1], "list")]:
    found = raised(lambda: slots[index], TypeError)
    assert found == f"a tensor is indexed with ints and slices, not {kind}; numpy() takes others"
assert "step of a slice is -1; it must be positive" in raised(lambda: slots[::-1], kvpool.ArgumentError)
assert "zero" in raised(lambda: slots[::0], ValueError)
""",
        hidden=["torch", "numpy"],
    )


def test_comparing_says_how_to(run_snippet: RunSnippet) -> None:
    run_snippet(
        TENSORS
        + """
import weakref
assert slots == slots and not slots != slots
for other in (slots[:], keys, None, 3, [1, 2, 3, 4, 5]):
    assert "a.tolist() == b.tolist()" in raised(lambda: slots == other, TypeError)
    assert "a.tolist() == b.tolist()" in raised(lambda: slots != other, TypeError)
raised(lambda: slots < slots, TypeError)
# It is found by identity: containers ask that first.
assert slots in [slots] and [keys, slots].index(slots, 1) == 1 and {slots: 1, keys: 2}[keys] == 2
assert hash(slots) == hash(slots) != hash(keys)
assert weakref.WeakSet([slots, keys]).__contains__(slots)
raised(lambda: keys in [slots], TypeError)
""",
        hidden=["torch", "numpy"],
    )


def test_it_is_shown_with_its_values(run_snippet: RunSnippet) -> None:
    run_snippet(
        TENSORS
        + """
assert repr(slots) == "kvpool.Tensor([1, 2, 3, 4, 5], shape=[5], dtype=int32, device=cpu)"
assert repr(slots[:0]) == "kvpool.Tensor([], shape=[0], dtype=int32, device=cpu)"
many = kvpool.TokenToKVPoolAllocator(64, "cpu").alloc(20)
assert repr(many) == "kvpool.Tensor([1, 2, 3, ..., 18, 19, 20], shape=[20], dtype=int32, device=cpu)"
pool.set_kv_buffer(0, [23], values := kvpool.KVPool(8, 1, 2, 4, "cpu", "bfloat16").k_buffer[0][:1], values)
row = "[[0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]]"
assert repr(keys) == f"kvpool.Tensor([{row}, ..., {row}], shape=[24, 2, 4], dtype=float32, device=cpu)"
flags = kvpool.TokenToKVPoolAllocator(64, "cpu").is_allocated([1])
assert repr(flags) == "kvpool.Tensor([False], shape=[1], dtype=bool, device=cpu)"
assert repr(_kvpool._zeros([], "float32")) == "kvpool.Tensor(0.0, shape=[], dtype=float32, device=cpu)"
# Half a terabyte that nobody has written, of eight dimensions.
wide = kvpool.KVPool(1 << 20, 1, 64, 1024, "cpu", "float32").k_buffer[0]
assert len(repr(wide)) < 700
deep = _kvpool._zeros([8] * 8, "uint8")
assert len(repr(deep)) < 20_000
""",
        hidden=["torch", "numpy"],
    )


def test_numpy_makes_arrays_of_it_and_never_objects(run_snippet: RunSnippet) -> None:
    run_snippet(
        TENSORS
        + """
import numpy as np
for dtype in "float32 float16 bfloat16 float8_e4m3fn float8_e5m2 int8 uint8 int32 int64 bool".split():
    for shape in ([3, 4], [0], [0, 2], []):
        tensor = _kvpool._zeros(shape, dtype)
        for array in (np.asarray(tensor), np.array(tensor), np.asanyarray(tensor)):
            assert array.dtype.name == dtype, (dtype, array.dtype)
        assert np.asarray(tensor).shape == tuple(shape)
        assert np.asarray(tensor).__array_interface__["data"][0] == tensor.data_ptr() or not all(shape)
assert not np.shares_memory(np.array(slots), slots.numpy())
assert np.asarray(slots, dtype="int64").dtype == np.int64
assert slots.__array__(np.dtype("int32")).ctypes.data == slots.data_ptr()
assert slots.__array__(copy=True).ctypes.data != slots.data_ptr()
assert slots.__array__(None, copy=False).ctypes.data == slots.data_ptr()
raised(lambda: slots.__array__("float64", copy=False), ValueError)
assert np.array([slots, slots]).shape == (2, 5)
assert (np.arange(5) + slots).tolist() == [1, 3, 5, 7, 9]
strided = keys[1:3, 0, ::2]
assert np.asarray(strided).shape == strided.numpy().shape == (2, 2)
""",
        hidden=["torch"],
    )
    run_snippet(
        """
        import numpy as np
        from kvpool import _kvpool
        for dtype in ("bfloat16", "float8_e5m2"):
            tensor = _kvpool._zeros([2], dtype)
            for call in (np.asarray, np.array, lambda given: np.array([given, given])):
                try:
                    call(tensor)
                except ImportError as error:
                    assert "ml_dtypes" in str(error)
                else:
                    raise AssertionError("no dtype of NumPy's for it")
        """,
        hidden=["torch", "ml_dtypes"],
    )


def test_buffers_show_the_same_memory(run_snippet: RunSnippet) -> None:
    is_served = sys.version_info >= (3, 12)
    run_snippet(
        TENSORS
        + f"""
buffer = memoryview if {is_served} else lambda tensor: tensor.__buffer__(0)
halves = dict(float16="e") if {is_served} else {{}}
for dtype, format in dict(**halves, float32="f", int8="b", uint8="B", int32="i", int64="q", bool="?").items():
    view = buffer(_kvpool._zeros([3, 4], dtype))
    assert (view.format, view.shape, view.c_contiguous, view.readonly) == (format, (3, 4), True, False), dtype
    empty = buffer(_kvpool._zeros([0], dtype))
    assert (empty.format, empty.shape) == (format, (0,))
view = buffer(slots)
address = slots.data_ptr()
slots_too = slots[:]
del slots
view[0] = 77
assert view.tolist() == slots_too.tolist() == [77, 2, 3, 4, 5]
assert buffer(_kvpool._zeros([], "int32")).shape == ()
for tensor, words in [
    (_kvpool._zeros([2], "bfloat16"), "buffers have no format for bfloat16"),
    (_kvpool._zeros([2], "float8_e4m3fn"), "buffers have no format for float8_e4m3fn"),
    (keys[:, 0], "a buffer cannot show shape [24, 4] with strides [8, 1]"),
    (_kvpool._zeros([0, 2], "int32"), "a buffer cannot show shape [0, 2]"),
]:
    assert words in raised(lambda: tensor.__buffer__(0), BufferError)
if {is_served}:
    assert bytes(slots_too)[:8] == b"M\\0\\0\\0\\2\\0\\0\\0"
else:
    raised(lambda: memoryview(slots_too), TypeError)
""",
        hidden=["torch", "numpy"],
    )


def test_tensors_begin_a_cache_line(run_snippet: RunSnippet) -> None:
    """Then JAX takes them without a copy."""
    run_snippet(
        """
        import kvpool
        for dtype in ("int32", "int64"):
            for page_size in (1, 16):
                pool = kvpool.TokenToKVPoolAllocator(4096, "cpu", page_size, index_dtype=dtype)
                kept = []
                for count in (1, 1, 2, 3, 15, 16, 17, 100):
                    kept += [pool.alloc(count), pool.alloc(count, contiguous=True)]
                kept += [pool.alloc_extend([0, 0], [3, 20], [-1, -1]), pool.alloc(0)]
                assert [tensor.data_ptr() % 64 for tensor in kept[:-1]] == [0] * (len(kept) - 1)
                assert {tensor.dtype for tensor in kept} == {dtype}
                slots = [slot for tensor in kept for slot in tensor]
                assert len({*slots}) == len(slots)
                assert pool.is_allocated(slots).tolist() == [True] * len(slots)
        """,
        hidden=["torch"],
    )


@pytest.mark.cuda
def test_elements_on_a_gpu_are_copied(run_snippet: RunSnippet) -> None:
    run_snippet(
        TENSORS.replace('"cpu"', '"cuda"')
        + """
import numpy as np
assert (slots.tolist(), slots[-1], list(slots), 3 in slots) == ([1, 2, 3, 4, 5], 5, [1, 2, 3, 4, 5], True)
assert slots[1:4].cpu().tolist() == slots[1:4].tolist() == [2, 3, 4]
assert slots[::2].tolist() == [1, 3, 5]
assert repr(slots) == "kvpool.Tensor(shape=[5], dtype=int32, device=cuda:0)"
pool.set_kv_buffer(0, slots, values := kvpool.KVPool(8, 1, 2, 4, "cuda", "bfloat16").k_buffer[0][:5], values)
assert keys[2:4, 1].cpu().shape == (2, 4) and keys[2:4, 1].tolist() == [[0.0] * 4] * 2
assert [row.tolist() for row in keys[:2]] == [[[0.0] * 4] * 2] * 2
assert slots[:0].tolist() == []
for call in (np.asarray, np.array, lambda given: np.array([given, given]), lambda given: given.__buffer__(0)):
    assert "cpu() gives a copy in host memory" in raised(lambda: call(slots), BufferError)
""",
        hidden=["torch"],
    )
