"""ChunkPool: chunks, batches, references, tensors, misuse, memory, and threads."""

from __future__ import annotations

import logging
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import devices
import numpy as np
import pytest
import torch
from chunk_pools import counts, fill, indices, make, numbers, put, read, same, take
from common import THREADS, cuda_only, some, together

from kvpool import Chunk, ChunkCopy, ChunkPool, ConfigError, IndexOwnershipError, StaleBufferError

if TYPE_CHECKING:
    from collections.abc import Callable

    from software import Driver

pytestmark = pytest.mark.usefixtures("device")


# Construction


def test_attributes_are_the_arguments() -> None:
    pool = make(5, [2, 3, 4], torch.bfloat16)
    assert (pool.chunk_shape, pool.chunk_bytes, pool.huge_pages) == ((2, 3, 4), 48, False)
    assert type(pool.chunk_shape) is tuple
    chunk = some(pool.allocate())
    for name in ("index", "nbytes", "references"):
        with pytest.raises(AttributeError):
            setattr(chunk, name, getattr(chunk, name))


@pytest.mark.parametrize("shape", [(7,), (2, 3), [2, 3], 6, torch.Size([3, 2]), (1, 2, 1, 3, 1, 1, 1, 1)])
def test_every_way_to_write_a_shape(shape: Any) -> None:  # noqa: ANN401
    extents = (shape,) if isinstance(shape, int) else tuple(shape)
    pool = make(2, shape)
    assert pool.chunk_shape == extents
    assert some(pool.allocate()).tensor().shape == extents


@pytest.mark.parametrize("shape", [0, (0,), (2, 0, 3), -1, (-1,), (2, -3), -(2**40), (1,) * 9])
def test_rejects_bad_shapes(shape: Any) -> None:  # noqa: ANN401
    bad = min((shape,) if isinstance(shape, int) else shape)
    with pytest.raises(ConfigError, match=rf"chunk_shape.*{bad}" if bad < 1 else "9"):
        make(2, shape)


@pytest.mark.parametrize("bad", [3, "text", object(), (1,)])
def test_rejects_a_progress_that_is_not_callable(bad: Any) -> None:  # noqa: ANN401
    with pytest.raises(TypeError, match="progress"):
        make(progress=bad)


# allocate and free


def test_a_batch_is_all_or_nothing() -> None:
    pool = make(5)
    batch = some(pool.allocate_batch(np.int32(3)))
    assert type(batch) is list
    assert indices(batch) == [0, 1, 2]
    before = pool.stats()
    assert pool.allocate_batch(3) is None
    assert pool.allocate_batch(n=6) is None
    assert pool.allocate_batch(10**30) is None
    assert pool.stats() == before
    pool.free(batch[1])
    assert indices(some(pool.allocate_batch(3))) == [1, 3, 4]
    assert pool.allocate_batch(0) == []
    assert counts(pool) == (0, 5, 5, 0)


@pytest.mark.parametrize(
    ("number", "error"),
    [
        *[(number, ConfigError) for number in (-1, -(2**40), -(10**30))],
        *[(number, TypeError) for number in (1.0, "1", None, float("nan"), [1])],
    ],
)
def test_rejects_bad_batches(number: Any, error: type[Exception]) -> None:  # noqa: ANN401
    pool = make()
    with pytest.raises(error, match=str(number) if error is ConfigError else None):
        pool.allocate_batch(number)
    assert counts(pool) == (3, 0, 0, 0)


# References


def test_a_chunk_is_free_when_its_last_reference_goes() -> None:
    pool = make()
    chunk = some(pool.allocate())
    assert chunk.retain() is chunk
    assert chunk.retain() is chunk
    assert chunk.references == 3
    for left in (2, 1):
        assert chunk.release() is None  # type: ignore[func-returns-value]
        assert chunk.references == left
        assert counts(pool)[:2] == (2, 1)
    chunk.release()
    assert chunk.references == 0
    assert counts(pool) == (3, 0, 1, 0)


def test_leaving_a_block_gives_up_one_reference() -> None:
    pool = make()
    chunk = some(pool.allocate())
    with chunk as entered:
        assert entered is chunk
        assert chunk.references == 1
    assert chunk.references == 0
    other = some(pool.allocate())
    other.retain()
    with other:
        assert other.references == 2
    assert other.references == 1
    with other:
        pass
    assert counts(pool) == (3, 0, 1, 0)


def test_an_exception_passes_through_a_block() -> None:
    pool = make(strict=True)
    chunk = some(pool.allocate())
    with pytest.raises(KeyError, match="mine"), chunk:
        raise KeyError("mine")
    assert chunk.references == 0
    assert counts(pool) == (3, 0, 1, 0)


def test_dropping_a_chunk_frees_nothing() -> None:
    pool = make()
    for _ in range(3):
        pool.allocate()
    assert counts(pool) == (0, 3, 3, 0)
    assert pool.allocate() is None


# tensor


def test_a_tensor_is_a_view_of_its_chunk() -> None:
    pool = make(3, (2, 4), torch.int8)
    chunk = take(pool, 2)[1]
    first, again = chunk.tensor(), chunk.tensor(shape=(8,))
    assert first.data_ptr() == again.data_ptr()
    first.fill_(7)
    again[2] = 9
    assert read(chunk) == [7, 7, 9, 7, 7, 7, 7, 7]
    others = [some(pool.allocate())]
    assert not others[0].tensor().any()


@pytest.mark.parametrize(
    "shape",
    [(12,), (3, 4), (2, 5), (1,), 7, [2, 2], (0,), 0, (3, 0, 2), (), (2, 1, 6, 1, 1, 1, 1, 1), np.int64(7)],
)
def test_any_shape_that_fits(shape: Any) -> None:  # noqa: ANN401
    chunk = take(make(), 2)[1]
    chunk.tensor().copy_(numbers(12).view(2, 6))
    extents = (shape,) if isinstance(shape, int | np.integer) else tuple(shape)
    tensor = chunk.tensor(shape)
    assert tensor.shape == extents
    assert tensor.is_contiguous()
    assert same(tensor, numbers(12)[: tensor.numel()])
    if tensor.numel():
        assert tensor.data_ptr() == chunk.tensor().data_ptr()
        tensor.fill_(40)
        assert read(chunk)[: tensor.numel()] == [40] * tensor.numel()
        assert read(chunk)[tensor.numel() :] == numbers(12)[tensor.numel() :].tolist()


@pytest.mark.parametrize(
    ("shape", "error", "words"),
    [
        *[(13, ConfigError, "52.*48"), ((2, 7), ConfigError, "56.*48"), ((2**40,), ConfigError, "48")],
        *[(-1, ConfigError, "-1"), ((2, -6), ConfigError, "-6"), ((-2, -6), ConfigError, "-6")],
        *[((0, -1), ConfigError, "-1"), ((2**40, 2**40), ConfigError, r"\d"), ((2**62,), ConfigError, r"\d")],
        *[(10**30, ConfigError, r"\d"), ((1,) * 9, ConfigError, "9")],
        *[(bad, TypeError, "") for bad in (1.0, "12", (1.0,), ("1",), (None,), object(), {"a": 1})],
    ],
)
def test_tensor_rejects_bad_shapes(shape: Any, error: type[Exception], words: str) -> None:  # noqa: ANN401
    with pytest.raises(error, match=words or None):
        some(make().allocate()).tensor(shape)


# Misuse


def bad_frees(pool: ChunkPool, other: ChunkPool) -> dict[str, tuple[Callable[[], None], int]]:
    """Every invalid free, with the index that it names. Two chunks of `pool` are in use afterwards."""
    freed, again, shared = take(pool, 3)
    pool.free(freed)
    pool.free(again)
    taken = some(pool.allocate())
    assert taken.index == again.index
    shared.retain()
    foreign = take(other, 2)[1]
    return {
        "freed before": (lambda: pool.free(freed), freed.index),
        "handed out again": (lambda: pool.free(again), again.index),
        "still referenced": (lambda: pool.free(shared), shared.index),
        "of another pool": (lambda: pool.free(foreign), foreign.index),
        "released before": (freed.release, freed.index),
        "released, handed out again": (again.release, again.index),
        "left before": (lambda: freed.__exit__(None, None, None), freed.index),
    }


each_bad_free = pytest.mark.parametrize(
    "kind",
    [
        *["freed before", "handed out again", "still referenced", "of another pool", "released before"],
        *["released, handed out again", "left before"],
    ],
)


@each_bad_free
def test_bad_frees_are_dropped_and_counted(kind: str) -> None:
    pool, other = make(4), make(4)
    call, _ = bad_frees(pool, other)[kind]
    before, theirs = pool.stats(), other.stats()
    call()
    assert pool.stats() == {**before, "dropped_frees": 1}
    call()
    assert pool.stats() == {**before, "dropped_frees": 2}
    assert other.stats() == theirs
    assert indices(take(pool, 2)) == [0, 3]
    assert pool.allocate() is None


@each_bad_free
def test_strict_raises_before_anything_is_changed(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    pool, other = make(4, strict=True), make(4)
    call, index = bad_frees(pool, other)[kind]
    before, theirs = pool.stats(), other.stats()
    with caplog.at_level(logging.DEBUG, logger="kvpool"), pytest.raises(IndexOwnershipError) as caught:
        call()
    assert str(index) in str(caught.value)
    assert "4" in str(caught.value)
    assert pool.stats() == before
    assert other.stats() == theirs
    assert not caplog.records
    assert indices(take(pool, 2)) == [0, 3]


def test_a_strict_pool_tells_of_its_frees_and_not_of_those_of_others() -> None:
    strict, lenient = make(strict=True), make()
    chunk = some(strict.allocate())
    lenient.free(chunk)
    assert lenient.stats()["dropped_frees"] == 1
    assert chunk.references == 1
    with pytest.raises(IndexOwnershipError):
        strict.free(some(lenient.allocate()))
    strict.free(chunk)
    assert counts(strict) == (3, 0, 1, 0)


def test_reports_of_bad_frees_say_why(caplog: pytest.LogCaptureFixture) -> None:
    words = {
        "freed before": "already free",
        "handed out again": "already free",
        "still referenced": "still referenced",
        "of another pool": "another pool",
        "released before": "already free",
    }
    for kind, why in words.items():
        pool, other = make(4), make(4)
        call, index = bad_frees(pool, other)[kind]
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="kvpool"):
            call()
        assert why in caplog.records[0].getMessage(), kind
        assert str(index) in caplog.records[0].getMessage()
        assert "chunk" in caplog.records[0].getMessage()


@pytest.mark.parametrize("again", [False, True])
def test_a_stale_chunk_raises(again: bool) -> None:
    pool = make(3)
    chunk = take(pool, 2)[1]
    pool.free(chunk)
    holder = some(pool.allocate()) if again else None
    before = pool.stats()
    value = put(numbers(12), devices.current())
    calls: list[Callable[[], object]] = [
        chunk.tensor,
        lambda: chunk.tensor((2,)),
        chunk.retain,
        lambda: chunk.copy_from(value),
        lambda: chunk.copy_to(value),
    ]
    for call in calls:
        with pytest.raises(StaleBufferError, match="1"):
            call()
    assert (chunk.index, chunk.nbytes, chunk.references) == (1, 48, 0)
    assert pool.stats() == before
    assert same(value, numbers(12))
    if holder is not None:
        assert holder.references == 1
        assert read(holder) == [0] * 12


def test_a_chunk_freed_within_its_block() -> None:
    pool, strict = make(), make(strict=True)
    with some(pool.allocate()) as chunk:
        pool.free(chunk)
    assert counts(pool) == (3, 0, 1, 1)
    with pytest.raises(IndexOwnershipError), some(strict.allocate()) as chunk:
        strict.free(chunk)
    assert counts(strict) == (3, 0, 1, 0)


def test_chunks_and_copies_are_made_by_pools_only() -> None:
    for cls in (Chunk, ChunkCopy):
        with pytest.raises(TypeError):
            cls()
        with pytest.raises(TypeError):
            type("Mine", (cls,), {})


# Memory


def test_a_chunk_keeps_its_pool() -> None:
    pool = make()
    gone = weakref.ref(pool)
    chunk = some(pool.allocate())
    del pool
    fill(chunk, 3)
    assert read(chunk) == [3] * 12
    chunk.retain().release()
    chunk.release()
    assert chunk.references == 0
    del chunk
    assert gone() is None


@devices.cpu_only
def test_given_tensors_are_let_go() -> None:
    pool = make(2, 12)
    chunk = some(pool.allocate())
    tensor = numbers(12)
    gone = weakref.ref(tensor)
    chunk.copy_from(tensor)
    chunk.copy_to(tensor)
    for _ in range(3):
        with pytest.raises(ConfigError):
            chunk.copy_from(tensor.expand(2, 12))
    del tensor
    assert gone() is None


# Threads


def test_references_are_counted_across_threads() -> None:
    pool = make(2, 4)
    chunk = some(pool.allocate())

    def work(_number: int) -> None:
        for _ in range(300):
            chunk.retain()
            assert chunk.references >= 2
            with chunk:
                pass

    together(work)
    assert chunk.references == 1
    assert counts(pool) == (1, 1, 1, 0)


def test_the_last_of_many_threads_frees() -> None:
    pool = make(2, 4, strict=True)
    for _ in range(50):
        chunk = some(pool.allocate())
        for _ in range(THREADS - 1):
            chunk.retain()
        with ThreadPoolExecutor(THREADS) as executor:
            list(executor.map(lambda _number, chunk=chunk: chunk.release(), range(THREADS)))
        assert chunk.references == 0
        assert counts(pool)[:2] == (2, 0)


@cuda_only
def test_copies_of_many_threads(driver: Driver) -> None:
    rounds = 25
    pool = make(5, 12, where="cpu", strict=True)
    sources = [numbers(12, start=number).cuda() for number in range(THREADS)]
    targets = [[torch.zeros(12).cuda() for _ in range(rounds)] for _ in range(THREADS)]
    streams = [driver.stream() for _ in range(THREADS)]
    driver.run()

    def work(number: int) -> None:
        for i, target in enumerate(targets[number]):
            chunk = pool.allocate()
            while chunk is None:
                time.sleep(0)
                chunk = pool.allocate()
            chunk.copy_from(sources[number], streams[number])
            copy = chunk.copy_to(target, streams[number])
            if i % 3 == 0:
                copy.wait()
            elif i % 3 == 1:
                copy.query()
            pool.free(chunk)

    together(work)
    driver.run()
    for number, found in enumerate(targets):
        assert all(same(target, numbers(12, start=number)) for target in found)
    assert sorted(indices(take(pool, 5))) == [0, 1, 2, 3, 4]
    assert pool.stats()["dropped_frees"] == 0
