"""Errors: classes, bases, and numbers in messages and attributes."""

from __future__ import annotations

import pickle
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest
import torch

import kvpool
import kvpool.errors

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from shared_fixtures import RunSnippet

BASES: dict[str, type[Exception]] = {
    "ConfigError": ValueError,
    "IndexOwnershipError": ValueError,
    "OutOfMemoryError": MemoryError,
    "WorkspaceExhaustedError": MemoryError,
    "StaleError": RuntimeError,
    "StateError": RuntimeError,
    "ArgumentError": kvpool.ConfigError,
    "DriverError": RuntimeError,
    "BackendUnavailableError": RuntimeError,
}


def test_the_base_of_errors_is_an_exception_of_the_package() -> None:
    assert issubclass(kvpool.KvPoolError, Exception)
    assert kvpool.KvPoolError.__bases__ == (Exception,)
    assert kvpool.errors.KvPoolError is kvpool.KvPoolError


@pytest.mark.parametrize("name", sorted(BASES))
def test_each_error_has_its_builtin_base(name: str) -> None:
    error = getattr(kvpool, name)
    assert error is getattr(kvpool.errors, name)
    assert issubclass(error, kvpool.KvPoolError)
    assert issubclass(error, BASES[name])
    assert error.__name__ == error.__qualname__ == name
    assert error.__module__ == "kvpool.errors"
    assert error.__doc__


def test_an_earlier_name_is_the_same_error() -> None:
    assert kvpool.StaleBufferError is kvpool.errors.StaleBufferError is kvpool.StaleError


def test_there_are_no_other_errors() -> None:
    found = {
        name
        for name, thing in vars(kvpool.errors).items()
        if isinstance(thing, type) and issubclass(thing, BaseException) and thing.__name__ == name
    }
    assert found == {"KvPoolError", *BASES}


@pytest.mark.parametrize("name", ["KvPoolError", *sorted(BASES)])
def test_errors_can_be_pickled(name: str) -> None:
    error = getattr(kvpool, name)("5 of 3")
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301
    assert type(copy) is type(error)
    assert str(copy) == "5 of 3"


def _kv() -> kvpool.KVPool:
    return kvpool.KVPool(16, 2, 2, 4, "cpu", torch.float32)


def _rows(count: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    rows = torch.zeros(count, 2, 4, dtype=dtype)
    return rows, rows


def _full(*, strict: bool = False) -> kvpool.TokenToKVPoolAllocator:
    allocator = kvpool.TokenToKVPoolAllocator(16, "cpu", strict=strict)
    allocator.alloc(16)
    return allocator


def _chunk() -> kvpool.Chunk:
    chunk = kvpool.ChunkPool(2, (3, 4), torch.float32).allocate()
    assert chunk is not None
    return chunk


def _strict_table() -> kvpool.ReqToTokenPool:
    return kvpool.ReqToTokenPool(4, 8, "cpu", strict=True)


TOO_MUCH = 2 * 4096 * (2**30 + 8) * 64 * 256 * 4


@pytest.mark.parametrize(
    ("call", "error", "words", "facts"),
    [
        (lambda: _full(strict=True).free([3, 99]), kvpool.IndexOwnershipError, "99", {"index": 99}),
        (lambda: _full(strict=True).free([3, 3]), kvpool.IndexOwnershipError, "3", {"index": 3}),
        (lambda: _full().share([3, 99]), kvpool.IndexOwnershipError, "99", {"index": 99}),
        (lambda: _full().alloc_extend([5], [4], [3]), kvpool.ArgumentError, "5 4", {}),
        (lambda: _full().free(torch.tensor([1.0])), TypeError, "float32", {}),
        (lambda: kvpool.TokenToKVPoolAllocator(-9, "cpu"), kvpool.ArgumentError, "-9", {}),
        (lambda: _strict_table().free([4]), kvpool.IndexOwnershipError, "4", {"index": 4}),
        (lambda: _strict_table().write((9, 0), 1), IndexError, "9 5", {"index": 9}),
        (lambda: _strict_table().write((1, 77), 1), IndexError, "77 8", {"index": 77}),
        (lambda: _strict_table().write((1, slice(0, 3)), [1, 2]), kvpool.ArgumentError, "3 2", {}),
        (lambda: _strict_table().read(1, 55), IndexError, "55 8", {"index": 55}),
        (lambda: _kv().gather_kv(7, [1]), IndexError, "7 2", {"index": 7}),
        (lambda: _kv().gather_kv(0, [1, 333]), IndexError, "333 24", {"index": 333}),
        (lambda: _kv().move_kv([1, 2, 3], [1, 2]), kvpool.ArgumentError, "3 2", {}),
        (lambda: _kv().set_kv_buffer(0, [1, 2, 3], *_rows(5)), kvpool.ArgumentError, "5 3", {}),
        (lambda: _kv().set_kv_buffer(0, [444], *_rows(1)), IndexError, "444 24", {"index": 444}),
        (lambda: _kv().set_kv_buffer(0, [1], *_rows(1, torch.int32)), TypeError, "int32 float32", {}),
        (
            lambda: kvpool.KVPool(2**30, 4096, 64, 256, "cpu", torch.float32),
            kvpool.OutOfMemoryError,
            str(TOO_MUCH),
            {"asked": TOO_MUCH},
        ),
        (lambda: kvpool.PagePool(4, 3).page(77), IndexError, "77 3", {"index": 77}),
        (
            lambda: kvpool.PagePool(4, 3, strict=True).free(88),
            kvpool.IndexOwnershipError,
            "88 3",
            {"index": 88},
        ),
        (lambda: _chunk().tensor((5, 7)), kvpool.ArgumentError, "140 48", {}),
        (lambda: _chunk().copy_from(torch.zeros(3).half()), TypeError, "float16 float32", {}),
        (lambda: kvpool.BufferPool("cpu").alloc((3, -7), "float32"), kvpool.ArgumentError, "-7", {}),
        (
            lambda: kvpool.Workspace("cpu", 1024).empty((3000,), "int8"),
            kvpool.WorkspaceExhaustedError,
            "3000 1024 workspace cpu",
            {"asked": 3000, "available": 1024},
        ),
        (
            lambda: kvpool.GDNPool(4, 1, 1, 1, 1, 1, 2, "cpu").reset_states([66]),
            IndexError,
            "66 5",
            {"index": 66},
        ),
    ],
)
def test_messages_and_attributes_carry_the_numbers(
    call: Callable[[], object], error: type[Exception], words: str, facts: dict[str, int]
) -> None:
    with pytest.raises(error) as caught:
        call()
    assert type(caught.value) is error
    assert all(word in str(caught.value) for word in words.split()), str(caught.value)
    names = ("index", "asked", "available", "code")
    found = {name: getattr(caught.value, name, None) for name in names}
    assert found == {name: facts.get(name) for name in names}
    copy = pickle.loads(pickle.dumps(caught.value))  # noqa: S301
    assert {name: getattr(copy, name, None) for name in names} == found


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_missing_backend_names_the_device_and_the_library() -> None:
    with pytest.raises(kvpool.BackendUnavailableError, match="cuda:2") as caught:
        kvpool.TokenToKVPoolAllocator(64, "cuda:2")
    assert "libcuda" in str(caught.value)


def test_a_library_that_is_not_a_driver_is_an_error(run_snippet: RunSnippet, tmp_path: Path) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("it needs a C compiler")
    source = tmp_path / "empty.c"
    source.write_text("int nothing;\n")
    library = tmp_path / "libcuda.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    code = """
        import kvpool
        try:
            kvpool.TokenToKVPoolAllocator(8, "cuda")
        except kvpool.BackendUnavailableError as error:
            print(error)
    """
    told = run_snippet(code, hidden=["torch"], env={"LD_LIBRARY_PATH": str(tmp_path), "LD_PRELOAD": ""})
    assert "cuda:0 cannot be used" in told
    assert "it has no cu" in told


@pytest.mark.cuda
def test_late_errors_have_the_numbers_of_the_free() -> None:
    allocator = kvpool.TokenToKVPoolAllocator(16, "cuda", strict=True)
    allocator.free(torch.tensor([9]).cuda())
    with pytest.raises(kvpool.IndexOwnershipError, match="did not know") as caught:
        allocator.verify()
    assert caught.value.index == 9
