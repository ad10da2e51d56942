"""Tensors across frameworks: DLPack capsules, the C exchange table and its absence, NumPy, and no copies."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import common
import pytest
import torch

from kvpool import _kvpool

if TYPE_CHECKING:
    from shared_fixtures import RunSnippet


STORAGE = [str(dtype)[6:] for dtype in common.STORAGE]
DTYPES = [*STORAGE, "int32", "int64", "bool"]

# Reads capsules as a consumer written in C does. `torch` is hidden while kvpool makes its tensors.
CAPSULES = """
import ctypes
import kvpool

class DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]

class Legacy(ctypes.Structure):
    _fields_ = [("tensor", DLTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]

class Versioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p), ("flags", ctypes.c_uint64), ("tensor", DLTensor),
    ]

name_of = ctypes.pythonapi.PyCapsule_GetName
name_of.restype, name_of.argtypes = ctypes.c_char_p, [ctypes.py_object]
pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]

kept = []

def opened(capsule):
    kept.append(capsule)
    name = name_of(capsule)
    kind = {b"dltensor": Legacy, b"dltensor_versioned": Versioned}[name]
    return name.decode(), kind.from_address(pointer_of(capsule, name))

def refused(*errors, **arguments):
    try:
        tensor.__dlpack__(**arguments)
    except errors as error:
        assert type(error) in (BufferError, TypeError), type(error)
        return True
    return False
"""

HANDLED = """
tensor = kvpool.TokenToKVPoolAllocator(16, "cpu").alloc(5)
pool = kvpool.KVPool(16, 2, 2, 4, "cpu", "float32")
buffer = pool.k_buffer[1]
"""


def test_capsules_are_versioned_or_legacy_as_asked(run_snippet: RunSnippet) -> None:
    run_snippet(
        CAPSULES
        + HANDLED
        + """
for arguments in ({}, {"max_version": None}, {"max_version": (0, 8)}, {"stream": None}):
    name, managed = opened(tensor.__dlpack__(**arguments))
    assert name == "dltensor", (arguments, name)
    assert managed.tensor.data == tensor.data_ptr()
    assert managed.deleter
for version in ((1, 0), (1, 3), (2, 0), (99, 99)):
    capsule = tensor.__dlpack__(max_version=version)
    name, managed = opened(capsule)
    assert name == "dltensor_versioned", (version, name)
    assert managed.major == 1
    assert managed.deleter
    assert managed.flags == 0
    assert managed.tensor.data + managed.tensor.byte_offset == tensor.data_ptr()
    assert (managed.tensor.device_type, managed.tensor.device_id) == (1, 0)
    assert (managed.tensor.ndim, managed.tensor.shape[0], managed.tensor.strides[0]) == (1, 5, 1)
    assert (managed.tensor.code, managed.tensor.bits, managed.tensor.lanes) == (0, 32, 1)
capsule = buffer.__dlpack__(max_version=(1, 0))
managed = opened(capsule)[1]
assert managed.tensor.shape[:3] == [24, 2, 4]
assert managed.tensor.strides[:3] == [8, 4, 1]
assert tensor.__dlpack_device__() == (1, 0)
""",
        hidden=["torch"],
    )


def test_capsules_of_an_empty_tensor(run_snippet: RunSnippet) -> None:
    run_snippet(
        CAPSULES
        + """
tensor = kvpool.TokenToKVPoolAllocator(16, "cpu").alloc(0)
for arguments in ({}, {"max_version": (1, 0)}):
    capsule = tensor.__dlpack__(**arguments)
    managed = opened(capsule)[1]
    assert managed.tensor.ndim == 1
    assert managed.tensor.shape[0] == 0
    assert managed.tensor.strides
assert len(tensor) == 0
assert tensor.shape == (0,)
""",
        hidden=["torch"],
    )


def test_only_buffer_errors_and_type_errors_come_out(run_snippet: RunSnippet) -> None:
    run_snippet(
        CAPSULES
        + HANDLED
        + """
assert refused(BufferError, dl_device=(2, 0))
assert refused(BufferError, dl_device=(1, 5)) or opened(tensor.__dlpack__(dl_device=(1, 5)))
assert refused(BufferError, TypeError, dl_device=(77, 0))
assert refused(TypeError, dl_device="cpu")
assert refused(TypeError, dl_device=3)
assert refused(TypeError, max_version="1.0")
assert refused(TypeError, max_version=1)
assert refused(TypeError, max_version=(1.0, 0))
assert refused(TypeError, BufferError, max_version=(10**30, 0))
assert refused(TypeError, BufferError, max_version=(-1, 0))
assert refused(TypeError, nonsense=1)
assert refused(TypeError, BufferError, stream="now")
assert refused(TypeError, copy="yes")
try:
    tensor.__dlpack__(None)
except TypeError:
    pass
else:
    raise AssertionError("the arguments are keywords")
for arguments in ({"copy": False}, {"copy": None}, {"dl_device": (1, 0)}, {"dl_device": None}):
    assert opened(tensor.__dlpack__(**arguments))[1].tensor.data == tensor.data_ptr()
try:
    capsule = tensor.__dlpack__(copy=True)
except BufferError:
    pass
else:
    assert opened(capsule)[1].tensor.data != tensor.data_ptr()
""",
        hidden=["torch"],
    )


def test_torch_reads_a_kvpool_tensor(run_snippet: RunSnippet) -> None:
    run_snippet(
        f"""
        import gc
        import kvpool
        found = {{}}
        for dtype in {STORAGE!r}:
            tensor = kvpool.KVPool(16, 2, 2, 4, "cpu", dtype).v_buffer[1]
            assert type(tensor) is kvpool.Tensor
            found[dtype] = tensor
        slots = kvpool.TokenToKVPoolAllocator(16, "cpu").alloc(3)
        del sys.modules["torch"]
        import torch
        for dtype, ours in list(found.items()):
            if "float8" in dtype and not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
                del found[dtype]  # this version's own `from_dlpack` does not know it
                continue
            theirs = torch.from_dlpack(ours)
            assert theirs.dtype is getattr(torch, dtype), dtype
            assert theirs.shape == ours.shape == (24, 2, 4), dtype
            assert theirs.data_ptr() == ours.data_ptr(), dtype
            theirs.view(torch.uint8).fill_(3)
            found[dtype] = theirs
        del ours, tensor, theirs
        gc.collect()
        others = [kvpool.KVPool(16, 2, 2, 4, "cpu", dtype).v_buffer[1] for dtype in found]
        assert all(theirs.view(torch.uint8).eq(3).all() for theirs in found.values())
        assert torch.from_dlpack(slots).tolist() == [1, 2, 3]
        """,
        hidden=["torch"],
    )


def test_numpy_reads_without_a_copy(run_snippet: RunSnippet) -> None:
    run_snippet(
        """
        import kvpool
        import numpy as np
        for dtype in ("float32", "float16", "int8", "uint8"):
            pool = kvpool.KVPool(16, 1, 2, 4, "cpu", dtype)
            ours = pool.k_buffer[0]
            for array in (np.from_dlpack(ours), ours.numpy()):
                assert array.dtype == np.dtype(dtype)
                assert array.shape == (24, 2, 4)
                assert array.ctypes.data == ours.data_ptr()
                array[3] = 7
                array[4] = 0
            k, _ = pool.gather_kv(0, [3, 4])
            assert k.numpy()[:, 0, 0].tolist() == [7, 0]
        table = kvpool.ReqToTokenPool(4, 8, "cpu")
        row = table.alloc()[0]
        table.write((row, slice(0, 3)), np.array([5, 6, 7]))
        view = np.from_dlpack(table.req_to_token)
        assert view[row, :4].tolist() == [5, 6, 7, 0]
        view[row, 3] = 8
        assert table.read(row, 4).numpy().tolist() == [5, 6, 7, 8]
        slots = kvpool.TokenToKVPoolAllocator(16, "cpu").alloc(3)
        assert np.from_dlpack(slots).tolist() == slots.numpy().tolist() == [1, 2, 3]
        assert slots.numpy().dtype == np.int32
        """,
        hidden=["torch"],
    )


def test_numpy_without_what_it_needs_is_a_clear_error(run_snippet: RunSnippet) -> None:
    run_snippet(
        """
        import kvpool
        tensor = kvpool.KVPool(16, 1, 2, 4, "cpu", "bfloat16").k_buffer[0]
        try:
            tensor.numpy()
        except (ImportError, kvpool.KvPoolError, TypeError, BufferError) as error:
            assert "ml_dtypes" in str(error), error
        else:
            raise AssertionError("there is no bfloat16 in NumPy")
        """,
        hidden=["torch", "ml_dtypes"],
    )
    run_snippet(
        """
        import kvpool
        tensor = kvpool.KVPool(16, 1, 2, 4, "cpu", "float32").k_buffer[0]
        try:
            tensor.numpy()
        except (ImportError, kvpool.KvPoolError) as error:
            assert "numpy" in str(error).lower(), error
        else:
            raise AssertionError("there is no NumPy")
        assert tensor.data_ptr()
        """,
        hidden=["torch", "numpy", "ml_dtypes"],
    )


# The same work with the C exchange table of PyTorch and without it.
WORK = """
import json
import kvpool

pool = kvpool.KVPool(40, 2, 3, 5, "cpu", torch.bfloat16, 1, 7, page_size=4)
allocator = kvpool.TokenToKVPoolAllocator(40, "cpu", 4, strict=True)
table = kvpool.ReqToTokenPool(4, 16, "cpu")
states = kvpool.GDNPool(4, 2, 1, 2, 3, 4, 4, "cpu", torch.float16, 2)
slots = allocator.alloc(10)
assert type(slots) is torch.Tensor and slots.dtype is torch.int32 and slots.shape == (10,)
qkv = torch.arange(10 * 31, dtype=torch.float32).view(10, 31)
pool.set_kv_buffer(1, slots, qkv[:, 2:17].view(10, 3, 5), qkv[:, 20:27])
k, v = pool.gather_kv(1, slots.flip(0))
assert type(k) is torch.Tensor and k.dtype is torch.bfloat16
assert k.equal(qkv[:, 2:17].view(10, 3, 5).flip(0).bfloat16())
out = torch.empty_like(k), torch.empty_like(v)
pool.gather_kv(1, slots, out=out)
pool.move_kv(slots[:2], slots[2:4].long())
row = table.alloc()[0]
table.write((row, slice(0, 10)), slots)
table.write((torch.tensor([row]), torch.tensor([10])), torch.tensor([99]))
states.recurrent_state[:, 1] = 5
states.copy_states(torch.tensor([1]), torch.tensor([2]))
states.reset_states(torch.tensor([1]))
allocator.free(table.read(row, 10))
more = allocator.alloc_extend(torch.tensor([0, 0]), torch.tensor([3, 4]), torch.tensor([-1, -1]))
small = kvpool.KVPool(8, 1, 1, 2, "cpu", torch.float8_e4m3fn)
small.set_kv_buffer(0, [1], torch.ones(1, 1, 2, dtype=torch.float16), torch.ones(1, 2), k_scale=0.5)
assert small.k_buffer[0].dtype is torch.float8_e4m3fn
for bad in (torch.tensor([1.0]), torch.tensor([True])):
    try:
        allocator.free(bad)
    except TypeError:
        pass
    else:
        raise AssertionError(bad)
print(json.dumps([
    slots.tolist(), k.tolist(), v.tolist(), out[0].tolist(), out[1].tolist(), more.tolist(),
    pool.k_buffer[1].tolist(), pool.v_buffer[1].tolist(), table.req_to_token.tolist(),
    states.recurrent_state.tolist(), small.k_buffer[0].float().tolist(), small.v_buffer[0].float().tolist(),
    [tensor.is_contiguous() for tensor in (slots, k, v, table.req_to_token)],
]))
"""


# Tensors that are not plain, as values and as indices.
UNUSUAL = """
import kvpool
import warnings

warnings.simplefilter("ignore")
ones = torch.ones(2, 1, 4)
with torch.inference_mode():
    inference = torch.full((2, 1, 4), 5.0)
    inference_slots = kvpool.TokenToKVPoolAllocator(8, "cpu").alloc(2)
assert type(inference_slots) is torch.Tensor
grads = torch.full((2, 1, 4), 3.0, requires_grad=True)
values = {
    "gradients": grads,
    "a result of gradients": grads * 2,
    "a parameter": torch.nn.Parameter(ones * 4),
    "of inference": inference,
    "negated": torch.view_as_complex(torch.full((2, 1, 4, 2), 7.0)).conj().imag,
    "expanded": torch.full((1, 1, 1), 8.0).expand(2, 1, 4),
    "transposed": torch.arange(8.0).view(4, 1, 2).permute(2, 1, 0),
    "8-bit": (ones * 2).to(torch.float8_e5m2),
    "8-bit, strided": (torch.ones(2, 2, 4) * 2).to(torch.float8_e4m3fn)[:, 1:],
    "8-bit with gradients": (grads * 2).to(torch.float8_e4m3fn),
    "sparse": ones.to_sparse(),
    "without memory": ones.to("meta"),
    "complex": torch.ones(2, 1, 4, dtype=torch.complex64),
    "quantized": torch.quantize_per_tensor(ones, 0.1, 0, torch.qint8),
}
indices = {
    "of inference": inference_slots,
    "a parameter": torch.nn.Parameter(torch.tensor([3, 4]), requires_grad=False),
    "int16": torch.tensor([5, 6], dtype=torch.int16),
    "uint32": torch.tensor([5, 6], dtype=torch.uint32),
    "a scalar": torch.tensor(7),
    "sparse": torch.tensor([3, 4]).to_sparse(),
    "floats": torch.tensor([3.0]),
    "bools": torch.tensor([True]),
    "bytes": torch.tensor([3], dtype=torch.uint8),
    "complex": torch.tensor([3], dtype=torch.complex64),
}
kv = kvpool.KVPool(16, 1, 1, 4, "cpu", torch.float32)
for name, tensor in values.items():
    kv.k_buffer[0].zero_()
    try:
        kv.set_kv_buffer(0, [2, 9], tensor, ones)
    except Exception as error:
        print(name, type(error).__name__, str(error)[:26])
    print(name, kv.k_buffer[0][[2, 9]].tolist())
for name, tensor in indices.items():
    allocator = kvpool.TokenToKVPoolAllocator(16, "cpu")
    allocator.alloc(8)
    try:
        allocator.free(tensor)
    except Exception as error:
        print(name, type(error).__name__, str(error)[:26])
    print(name, allocator.release_slots.tolist())
"""


@pytest.mark.parametrize("work", [WORK, UNUSUAL], ids=["work", "unusual tensors"])
def test_capsules_do_what_the_exchange_table_does(run_snippet: RunSnippet, work: str) -> None:
    with_table = run_snippet(f"import torch\n{work}", has_torch=True)
    hide = """
for kind in torch.Tensor.__mro__:
    if "__dlpack_c_exchange_api__" in vars(kind):
        delattr(kind, "__dlpack_c_exchange_api__")
assert not hasattr(torch.Tensor, "__dlpack_c_exchange_api__")
"""
    without_table = run_snippet(f"import torch\n{hide}\n{work}", has_torch=True)
    assert without_table == with_table
    assert with_table.count("\n") > 0


def test_capsules_also_work_for_scalars_and_views(run_snippet: RunSnippet) -> None:
    run_snippet(
        """
        import torch
        if hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
            del torch.Tensor.__dlpack_c_exchange_api__
        import kvpool
        allocator = kvpool.TokenToKVPoolAllocator(16, "cpu")
        slots = allocator.alloc(16)
        allocator.free(torch.tensor(3))
        allocator.free(slots[::5])
        allocator.free(slots.view(4, 4)[1:3, 1])
        allocator.free(torch.empty(0, dtype=torch.int64))
        assert allocator.release_slots.tolist() == [1, 3, 6, 10, 11, 16], allocator.release_slots
        assert allocator.stats()["dropped_frees"] == 1
        """,
        has_torch=True,
    )


def test_tensors_of_other_libraries_are_taken(run_snippet: RunSnippet) -> None:
    run_snippet(
        """
        import kvpool
        class Foreign:
            def __init__(self, tensor):
                self.tensor = tensor
            def __dlpack__(self, **arguments):
                return self.tensor.__dlpack__(**arguments)
            def __dlpack_device__(self):
                return self.tensor.__dlpack_device__()
        class Old(Foreign):
            def __dlpack__(self, stream=None):
                return self.tensor.__dlpack__(stream=stream)
        allocator = kvpool.TokenToKVPoolAllocator(16, "cpu")
        allocator.free(Foreign(allocator.alloc(3)))
        allocator.free(Old(allocator.alloc(2)))
        assert allocator.available_size() == 16
        assert allocator.stats()["dropped_frees"] == 0
        """,
        hidden=["torch"],
    )


def test_arrays_that_must_not_change_are_no_targets(run_snippet: RunSnippet) -> None:
    """Capsules of JAX do not say that they are read-only; its arrays are told by their class."""
    run_snippet(
        """
        import sys, types
        import numpy as np
        import kvpool

        class Array:
            def __init__(self, array):
                self.array = array
            def __dlpack__(self, **arguments):
                return self.array.__dlpack__()
            def __dlpack_device__(self):
                return self.array.__dlpack_device__()

        pool = kvpool.KVPool(16, 1, 1, 4, "cpu", "float32")
        chunk = kvpool.ChunkPool(1, (2, 4), "float32", pin_memory=False).allocate()
        given, other = (Array(np.ones((2, 1, 4), np.float32)) for _ in range(2))
        read_only = np.ones((2, 1, 4), np.float32)
        read_only.flags.writeable = False

        def refused(words, target):
            gather = lambda: pool.gather_kv(0, [1, 2], out=(target, other))
            for call in (gather, lambda: chunk.copy_to(target)):
                try:
                    call()
                except kvpool.ConfigError as error:
                    assert words in str(error), error
                else:
                    raise AssertionError(words)

        refused("out is read-only", read_only)
        assert given.array.all()
        pool.set_kv_buffer(0, [1, 2], given, given)
        pool.gather_kv(0, [3, 4], out=(given, other))  # any other class may be written to
        assert not given.array.any()
        sys.modules["jax"] = types.ModuleType("jax")
        pool.gather_kv(0, [1, 2], out=(given, other))  # as long as it is not imported wholly
        assert given.array.all()
        sys.modules["jax"].Array = Array
        refused("out is a jax.Array, which must not change; pass a NumPy array", given)
        pool.set_kv_buffer(0, [5, 6], given, given)
        assert pool.k_buffer[0].numpy()[5:7].all() and given.array.all()
        """,
        hidden=["torch"],
    )


def test_arrays_of_arrow_and_series_are_indices(run_snippet: RunSnippet) -> None:
    """As Arrow has it, an array with gaps has no capsule, and an error of a class of its own."""
    run_snippet(
        """
        import numpy as np
        import kvpool

        class ArrowError(TypeError):
            pass

        class Arrow:
            def __init__(self, values):
                self.values = values
            def __dlpack__(self, stream=None):
                if self.values.dtype.kind != "i":
                    raise ArrowError("Can only use DLPack on arrays with no nulls.")
                return self.values.__dlpack__()
            def __dlpack_device__(self):
                return self.values.__dlpack_device__()
            def __array__(self, dtype=None, copy=None):
                return self.values

        class Series:
            def __init__(self, values):
                self.values = values
            def __array__(self, dtype=None, copy=None):
                return self.values

        allocator = kvpool.TokenToKVPoolAllocator(16, "cpu")
        allocator.alloc(8)
        cache = kvpool.PrefixCache(allocator)
        beyond = np.array([3, 2**63, 2**64 - 1], np.uint64)
        assert allocator.is_allocated(beyond).tolist() == [True, False, False]
        for kind in (Arrow, Series):
            for values in (np.array([3, 9]), np.array([3, 9], ">u8"), np.array([3, 9], np.uint16)):
                assert allocator.is_allocated(kind(values)).tolist() == [True, False]
                assert cache.cached_len(kind(values)) == 0
            for wrong, dtype in (([3.0, np.nan], "float64"), (["3"], "<U1"), ([None], "object")):
                for call in (allocator.free, cache.cached_len):
                    try:
                        call(kind(np.array(wrong)))
                    except TypeError as error:
                        assert str(error).startswith("indices must be "), error
                        assert str(error).endswith(f"not {dtype}"), error
                    else:
                        raise AssertionError(dtype)
        """,
        hidden=["torch"],
    )


def test_capsules_that_lie_are_refused(run_snippet: RunSnippet) -> None:
    run_snippet(
        """
        import kvpool
        class InvalidProducer:
            def __init__(self, answer):
                self.answer = answer
            def __dlpack__(self, **arguments):
                if isinstance(self.answer, Exception):
                    raise self.answer
                return self.answer
            def __dlpack_device__(self):
                return (1, 0)
        allocator = kvpool.TokenToKVPoolAllocator(16, "cpu")
        slots = allocator.alloc(3)
        used = slots.__dlpack__(max_version=(1, 0))
        allocator.free(InvalidProducer(used))
        assert allocator.available_size() == 16
        for answer in (None, 3, "capsule", object(), used, BufferError("no")):
            try:
                allocator.free(InvalidProducer(answer))
            except (TypeError, BufferError, kvpool.ConfigError):
                pass
            else:
                raise AssertionError(answer)
        assert allocator.available_size() == 16
        """,
        hidden=["torch"],
    )


# Every dtype crosses at the same address, and the tensor keeps its memory


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_arrives_in_torch(dtype: str) -> None:
    tensor = _kvpool._zeros([3, 4], dtype)
    assert type(tensor) is torch.Tensor
    assert tensor.dtype is getattr(torch, dtype)
    assert (tensor.shape, tensor.stride()) == ((3, 4), (4, 1))
    size = tensor.nbytes
    tensor.view(torch.uint8).fill_(1)
    others = [_kvpool._zeros([3, 4], dtype) for _ in range(50)]
    gc.collect()
    assert len({other.data_ptr() for other in [tensor, *others]}) == 51
    assert int(tensor.view(torch.uint8).sum()) == size


def test_without_the_exchange_table_the_same_arrives(run_snippet: RunSnippet) -> None:
    run_snippet(
        f"""
        import torch
        if hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
            del torch.Tensor.__dlpack_c_exchange_api__
        from kvpool import _kvpool

        for dtype in {DTYPES!r}:
            tensor = _kvpool._zeros([3, 4], dtype)
            assert type(tensor) is torch.Tensor
            assert tensor.dtype is getattr(torch, dtype), dtype
            assert (tensor.shape, tensor.stride()) == ((3, 4), (4, 1))
            tensor.view(torch.uint8).fill_(1)
        """,
        has_torch=True,
    )


def test_without_torch_numpy_reads_the_same_memory(run_snippet: RunSnippet) -> None:
    run_snippet(
        f"""
        import numpy as np
        from kvpool import _kvpool

        for dtype in {DTYPES!r}:
            tensor = _kvpool._zeros([3, 4], dtype)
            array = tensor.numpy()
            assert str(array.dtype) == tensor.dtype == dtype
            assert array.__array_interface__["data"][0] == tensor.data_ptr()
            assert array.shape == tensor.shape == (3, 4)
            array.view(np.uint8)[:] = 1
            again = tensor.numpy()
            del tensor
            assert (again.view(np.uint8) == 1).all()
        """,
        hidden=["torch"],
    )
