"""ChunkPool: chunks, references, misuse, copies, page-locking, memory, threads, and random histories."""

from __future__ import annotations

import gc
import logging
import random
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import common
import devices
import numpy as np
import pytest
import torch
from common import (
    NEVER,
    STORAGE,
    THREADS,
    WAITS,
    assert_refused_after_fork,
    cuda_only,
    each_failure,
    needs_fork,
    on_stream,
    some,
    together,
)
from software import LAUNCH_FAILED, OUT_OF_MEMORY, each_call

import kvpool
from kvpool import (
    Chunk,
    ChunkCopy,
    ChunkPool,
    ConfigError,
    IndexOwnershipError,
    StaleBufferError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from conftest import RunSnippet
    from software import Driver

T = TypeVar("T")

MEMINFO = Path("/proc/meminfo")
MEMORY = (*common.MEMORY, "cuMemHostRegister_v2")
COPIES = (
    "cuMemcpyAsync",
    "cuMemcpy2DAsync_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyDtoDAsync_v2",
)
# Two and three steps of page-locking, the last of them of two chunks.
LARGE = (66, (1 << 22,))
LARGER = (130, (1 << 22,))

pytestmark = pytest.mark.usefixtures("device")

between = pytest.mark.parametrize(
    ("device", "there"),
    [
        ("cpu", "cpu"),
        pytest.param("cpu", "cuda", marks=pytest.mark.cuda),
        pytest.param("cuda", "cpu", marks=pytest.mark.cuda),
        pytest.param("cuda", "cuda", marks=pytest.mark.cuda),
    ],
    indirect=["device"],
)
"""Chunks on the device of the test, and tensors `there`."""


def make(
    num_chunks: int = 3,
    chunk_shape: int | Sequence[int] = (2, 6),
    dtype: torch.dtype = torch.float32,
    where: str | None = None,
    pin_memory: bool = True,
    **options: Any,  # noqa: ANN401
) -> ChunkPool:
    return ChunkPool(num_chunks, chunk_shape, dtype, where or devices.current(), pin_memory, **options)


def take(pool: ChunkPool, count: int) -> list[Chunk]:
    return [some(pool.allocate()) for _ in range(count)]


def indices(chunks: Sequence[Chunk]) -> list[int]:
    return [chunk.index for chunk in chunks]


def counts(pool: ChunkPool) -> tuple[int, int, int, int]:
    stats = pool.stats()
    return stats["available"], stats["in_use"], stats["high_water"], stats["dropped_frees"]


def put(tensor: torch.Tensor, where: str) -> torch.Tensor:
    """A tensor with the same values and strides on a device."""
    with devices.on(where):
        return devices.here(tensor)


def numbers(count: int, dtype: torch.dtype = torch.float32, start: int = 0) -> torch.Tensor:
    """Small integers, each of which every dtype has."""
    return ((torch.arange(count) + start) % 13).to(torch.float32).to(dtype)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of the elements, in order, in host memory."""
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8)


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(raw(left), raw(right))


def fill(chunk: Chunk, value: float) -> None:
    tensor = chunk.tensor()
    tensor.copy_(torch.full(tensor.shape, value).to(tensor.dtype))


def read(chunk: Chunk) -> list[float]:
    values: list[float] = chunk.tensor().cpu().float().reshape(-1).tolist()
    return values


def within(seconds: float, work: Callable[[], T]) -> T:
    """The answer of `work`, which must not take longer."""
    answers: list[T] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            answers.append(work())
        except BaseException as error:  # noqa: BLE001 - raised below
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "it did not return"
    for failure in failures:
        raise failure
    return answers[0]


def eventually(holds: Callable[[], bool], seconds: float = 20) -> bool:
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


def page_locking_threads() -> list[str]:
    """The names of the threads that page-lock."""
    names = []
    for thread in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended
            names.append((thread / "comm").read_text())
    return [name for name in names if name.startswith("kvpool-page-loc")]  # the kernel cuts names


@contextmanager
def page_lock_threads(count: int) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVPOOL_PAGE_LOCK_THREADS", str(count))
        yield


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


def test_a_tensor_is_a_view() -> None:
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
    ids=repr,
)
def test_tensor_rejects_bad_shapes(shape: Any, error: type[Exception], words: str) -> None:  # noqa: ANN401
    with pytest.raises(error, match=words or None):
        some(make().allocate()).tensor(shape)


# Misuse


def bad_frees(pool: ChunkPool, other: ChunkPool) -> dict[str, tuple[Callable[[], None], int]]:
    """Every free that is none, with the index that it names. Two chunks of `pool` are in use afterwards."""
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


def test_reports_say_why(caplog: pytest.LogCaptureFixture) -> None:
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


# Copies


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda x: x[:24].view(4, 6),
    "all": lambda x: x,
    "one_element": lambda x: x[7:8],
    "no_dimensions": lambda x: x[5],
    "empty": lambda x: x[:0],
    "empty_of_many": lambda x: x[:0].view(3, 0, 2),
    "every_other": lambda x: x[::2],
    "from_the_middle": lambda x: x[5:20],
    "column": lambda x: x.view(12, 6)[:, 2],
    "column_of_one": lambda x: x.view(12, 6)[:, 2:3],
    "block": lambda x: x.view(12, 6)[2:6, 1:4],
    "transposed": lambda x: x[:24].view(4, 6).T,
    "permuted": lambda x: x[:24].view(2, 3, 4).permute(2, 0, 1),
    "tokens": lambda x: x.view(2, 2, 6, 3)[:, :, 1:4],
    "one_token": lambda x: x.view(2, 2, 6, 3)[:, :, 3:4],
    "of_many_dimensions": lambda x: x[:64].view(2, 2, 2, 2, 2, 2).permute(5, 0, 4, 1, 3, 2),
}
READ_LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    **LAYOUTS,
    "expanded": lambda x: x[:3].expand(4, 3),
    "expanded_inside": lambda x: x[:4].view(4, 1).expand(4, 3),
    "sliding": lambda x: x.as_strided((5, 4), (2, 1)),
}


@between
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2], ids=str)
def test_copy_from_every_layout(there: str, dtype: torch.dtype) -> None:
    nines = torch.full((72,), 9.0).to(dtype)
    for layout, look in READ_LAYOUTS.items():
        pool = make(3, 72, dtype)
        chunks = take(pool, 3)
        for chunk in chunks:
            fill(chunk, 9)
        origin = put(numbers(72, dtype), there)
        source = look(origin)
        copy = chunks[1].copy_from(source)
        assert type(copy) is ChunkCopy
        assert copy.wait() is None  # type: ignore[func-returns-value]
        assert copy.query() is True
        count = source.numel()
        assert same(chunks[1].tensor(count), look(numbers(72, dtype))), layout
        assert same(chunks[1].tensor()[count:], nines[count:]), layout
        assert same(chunks[0].tensor(), nines), layout
        assert same(chunks[2].tensor(), nines), layout
        assert same(origin, numbers(72, dtype)), layout


@between
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8], ids=str)
def test_copy_to_every_layout(there: str, dtype: torch.dtype) -> None:
    pool = make(3, 72, dtype)
    chunk = take(pool, 2)[1]
    chunk.tensor().copy_(numbers(72, dtype))
    nines = torch.full((72,), 9.0).to(dtype)
    for layout, look in LAYOUTS.items():
        origin = put(nines.clone(), there)
        target = look(origin)
        copy = chunk.copy_to(target)
        copy.wait()
        assert copy.query() is True
        expected = nines.clone()
        look(expected).copy_(numbers(72, dtype)[: target.numel()].view(target.shape))
        assert same(origin, expected), layout
        assert same(chunk.tensor(), numbers(72, dtype)), layout


@between
def test_copies_by_name_and_of_every_dtype(there: str) -> None:
    for dtype in STORAGE:
        chunk = some(make(2, (3, 5), dtype).allocate())
        source, target = put(numbers(15, dtype), there), put(torch.zeros(15, dtype=dtype), there)
        chunk.copy_from(tensor=source, stream=None).wait()
        chunk.copy_to(tensor=target, stream=None).wait()
        assert same(target, numbers(15, dtype))


@devices.cpu_only
def test_a_copy_in_host_memory_is_done_when_the_call_returns() -> None:
    chunk = some(make(2, 6).allocate())
    source, target = numbers(6), torch.zeros(6)
    copy = chunk.copy_from(source)
    source.fill_(50)
    assert copy.query() is True
    assert same(chunk.tensor(), numbers(6))
    copy = chunk.copy_to(target)
    fill(chunk, 60)
    assert copy.query() is True
    assert same(target, numbers(6))
    for _ in range(3):
        copy.wait()
        assert copy.query() is True


@between
def test_from_chunk_to_chunk(there: str) -> None:
    here, yonder = make(2, (4, 6)), make(2, (4, 6), where=there)
    first, second = some(here.allocate()), some(yonder.allocate())
    first.tensor().copy_(numbers(24).view(4, 6))
    second.copy_from(first.tensor()).wait()
    assert same(second.tensor(), numbers(24))
    fill(second, 5)
    second.copy_to(first.tensor((4, 6))[1:3]).wait()
    assert read(first) == [*numbers(6).tolist(), *[5.0] * 12, *numbers(24)[18:].tolist()]


@devices.cpu_only
def test_a_chunk_and_itself() -> None:
    chunk = some(make(1, (4, 4)).allocate())
    chunk.tensor().copy_(numbers(16).view(4, 4))
    chunk.copy_from(chunk.tensor()).wait()
    chunk.copy_to(chunk.tensor()).wait()
    assert same(chunk.tensor(), numbers(16))


@devices.cpu_only
def test_arrays_of_numpy_and_tensors_of_ours() -> None:
    chunk = some(make(2, (3, 4)).allocate())
    array = np.arange(24, dtype=np.float32).reshape(3, 8)[:, ::2]
    chunk.copy_from(array).wait()
    assert chunk.tensor().numpy().tolist() == array.tolist()
    target = np.zeros((4, 6), dtype=np.float32)
    chunk.copy_to(target[:, 3:]).wait()
    assert target[:, :3].sum() == 0
    assert target[:, 3:].reshape(-1).tolist() == array.reshape(-1).tolist()
    array.flags.writeable = False
    chunk.copy_from(array).wait()
    with pytest.raises(ConfigError, match="read-only"):
        chunk.copy_to(array)


@devices.cpu_only
def test_negative_strides_are_right_or_refused() -> None:
    chunk = some(make(2, 6).allocate())
    fill(chunk, 9)
    array = np.arange(12, dtype=np.float32)
    for view in (array[5::-1], array[10::-2], array.reshape(2, 6)[::-1, 2:4]):
        before = chunk.tensor().tolist()
        try:
            chunk.copy_from(view).wait()
        except (ConfigError, ValueError):
            assert chunk.tensor().tolist() == before
        else:
            assert chunk.tensor(view.size).tolist() == view.reshape(-1).tolist()


@devices.cpu_only
def test_views_that_pytorch_negates_and_tensors_with_gradients() -> None:
    chunk = some(make(2, 6).allocate())
    chunk.copy_from(torch._neg_view(numbers(6))).wait()
    assert same(chunk.tensor(), -numbers(6))
    chunk.copy_from(numbers(6).requires_grad_()).wait()
    assert same(chunk.tensor(), numbers(6))


@between
def test_more_elements_than_a_chunk_has(there: str) -> None:
    pool = make(2, (2, 6))
    chunk = some(pool.allocate())
    fill(chunk, 9)
    large = put(numbers(26).view(2, 13), there)
    for call in (chunk.copy_from, chunk.copy_to):
        for tensor, size in (
            (large[:1], 52),
            (large, 104),
            (large[:, ::2], 56),
            (large[:1].expand(5, 13), 260),
        ):
            with pytest.raises(ConfigError, match=rf"{size}.*48"):
                call(tensor)
    assert read(chunk) == [9] * 12
    assert same(large, numbers(26))


@between
def test_copies_of_another_dtype(there: str) -> None:
    chunk = some(make(2, 12).allocate())
    fill(chunk, 9)
    for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.uint8, torch.bool):
        tensor = put(torch.ones(4, dtype=dtype), there)
        for call in (chunk.copy_from, chunk.copy_to):
            with pytest.raises(TypeError, match=rf"(?s)(?=.*{str(dtype)[6:]})(?=.*float32)"):
                call(tensor)
        assert tensor.cpu().eq(1).all()
    assert read(chunk) == [9] * 12


@pytest.mark.parametrize("bad", [None, 3, "text", [1.0, 2.0], object()])
def test_copies_reject_non_tensors(bad: Any) -> None:  # noqa: ANN401
    chunk = some(make().allocate())
    for call in (chunk.copy_from, chunk.copy_to):
        with pytest.raises(TypeError, match=type(bad).__name__):
            call(bad)
    assert read(chunk) == [0] * 12


@between
def test_elements_on_top_of_each_other_are_not_written_to(there: str) -> None:
    chunk = some(make(2, 12).allocate())
    origin = put(numbers(4), there)
    for tensor in (origin[:3].expand(4, 3), origin.view(4, 1).expand(4, 3)):
        with pytest.raises(ConfigError, match="on top of each other"):
            chunk.copy_to(tensor)
    assert same(origin, numbers(4))
    target = origin[:1].expand(1)
    chunk.copy_to(target).wait()
    assert origin.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("bad", ["text", 1.5, object(), -1, [1]])
def test_rejects_bad_streams(bad: Any) -> None:  # noqa: ANN401
    pool = make()
    chunk = some(pool.allocate())
    value = put(numbers(12, start=1), devices.current())
    for call in (chunk.copy_from, chunk.copy_to):
        with pytest.raises((TypeError, ValueError, OverflowError)):
            call(value, bad)
    assert read(chunk) == [0] * 12
    assert same(value, numbers(12, start=1))
    pool.free(chunk)
    assert counts(pool) == (3, 0, 1, 0)


def test_a_copy_is_a_fence() -> None:
    chunk = some(make().allocate())
    value = put(numbers(12), devices.current())
    allocator = kvpool.TokenToKVPoolAllocator(16, "cpu")
    slots = some(allocator.alloc(4))
    copy = chunk.copy_from(value)
    allocator.free(slots, after=copy)
    copy.wait()
    assert allocator.available_size() == 16


@devices.cpu_only
def test_large_copies_are_shared_among_threads() -> None:
    generator = torch.Generator().manual_seed(3)
    source = torch.randint(0, 256, (3, 1000, 1777), generator=generator, dtype=torch.uint8)
    for view in (source, source.permute(0, 2, 1), source[:, 1:, 3:1700], source[:, ::3]):
        chunk = some(make(1, view.numel(), torch.uint8).allocate())
        chunk.copy_from(view).wait()
        assert torch.equal(chunk.tensor(tuple(view.shape)), view)
        origin = torch.zeros_like(source)
        target = origin.as_strided(view.shape, view.stride(), view.storage_offset())
        chunk.copy_to(target).wait()
        assert torch.equal(target, view)
        assert int(origin.count_nonzero()) == int(view.count_nonzero())


# Copies on a GPU


class Handle:
    """A stream as PyTorch has it."""

    def __init__(self, handle: int) -> None:
        self.cuda_stream = handle


def pinned(count: int = 12, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor in page-locked host memory."""
    tensor: torch.Tensor = some(make(1, count, dtype, "cpu").allocate()).tensor()
    return tensor.copy_(numbers(count, dtype))


class Route(NamedTuple):
    """A chunk of a pool of three, a tensor that need not be waited for, and the method that copies it."""

    pool: ChunkPool
    chunk: Chunk
    tensor: torch.Tensor
    copy: Callable[..., ChunkCopy]


def routes(driver: Driver) -> Iterator[Route]:
    """One of every kind. Nothing is pending when it is handed out, and nothing runs by being asked for."""
    found = []
    for where, there, name in (
        ("cpu", "cuda", "copy_from"),
        ("cpu", "cuda", "copy_to"),
        ("cuda", "cpu", "copy_from"),
        ("cuda", "cpu", "copy_to"),
        ("cuda", "cuda", "copy_from"),
        ("cuda", "cuda", "copy_to"),
    ):
        pool = make(3, 12, where=where)
        chunk = some(pool.allocate())
        tensor = pinned() if there == "cpu" else numbers(12).cuda()
        found.append(Route(pool, chunk, tensor, getattr(chunk, name)))
    driver.set_patience(NEVER)
    for each in found:
        driver.run()
        driver.reset_calls()
        yield each


@cuda_only
def test_a_copy_is_one_call_of_the_driver_and_waits_for_nothing(driver: Driver) -> None:
    for route in routes(driver):
        copy = route.copy(route.tensor)
        work = sum(driver.calls(name) for name in COPIES) + driver.calls("cuLaunchKernel")
        assert work == driver.pending() == 1
        assert [driver.calls(name) for name in (*WAITS, *MEMORY)] == [0] * 8
        assert copy.query() is False


# What lies in a tensor of 4096 numbers, and the copies that it takes.
GAPS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], int]] = {
    "runs": (lambda x: x.view(64, 64)[:, 3:40], 1),
    "one_run": (lambda x: x.view(64, 64)[5:6, 3:40], 1),
    "single_numbers": (lambda x: x[::3], 1),
    "transposed": (lambda x: x.view(64, 64).T, 64),
    "columns_of_pages": (lambda x: x.view(8, 8, 64)[:, :3, :9], 8),
    "two_gaps_that_are_one": (lambda x: x.view(8, 8, 64)[:, :, :9], 1),
    "heads_of_layers": (lambda x: x.view(4, 4, 16, 16)[:, 1:3, ::2, 1:8], 4),
    "overlapping": (lambda x: x.as_strided((9, 4), (3, 1)), 9),
    "repeated": (lambda x: x[:7].expand(5, 7), 5),
    "nothing": (lambda x: x.view(64, 64)[:, :0], 0),
}


@cuda_only
@pytest.mark.parametrize("gap", sorted(GAPS))
def test_runs_that_are_equally_far_apart_are_one_copy(driver: Driver, gap: str) -> None:
    cut, copies = GAPS[gap]
    whole = torch.arange(4096, dtype=torch.float32)
    expected = cut(whole).reshape(-1)
    for where, there in (("cpu", "cuda"), ("cuda", "cpu"), ("cuda", "cuda")):
        chunk = some(make(1, 4096, where=where).allocate())
        base = pinned(4096) if there == "cpu" else torch.zeros(4096).cuda()
        base.copy_(whole)
        driver.run()
        driver.reset_calls()
        chunk.copy_from(cut(base)).wait()
        name = "cuMemcpyAsync" if gap in {"one_run", "overlapping", "repeated"} else "cuMemcpy2DAsync_v2"
        assert [driver.calls(called) for called in COPIES] == [copies * (called == name) for called in COPIES]
        assert torch.equal(chunk.tensor().cpu()[: expected.numel()], expected)
        if gap in {"overlapping", "repeated"}:
            continue
        base.zero_()
        driver.run()
        driver.reset_calls()
        chunk.copy_to(cut(base)).wait()
        assert driver.calls(name) == copies
        right = torch.zeros(4096)
        cut(right).copy_(cut(whole))
        assert torch.equal(base.cpu(), right)


@cuda_only
def test_a_steady_row_of_copies_allocates_nothing(driver: Driver) -> None:
    for route in routes(driver):
        held = driver.device_bytes(), driver.locked_bytes()
        for _ in range(20):
            route.copy(route.tensor)
        assert [driver.calls(name) for name in (*WAITS, *MEMORY)] == [0] * 8
        driver.run()
        route.pool.free(route.chunk)
        assert (driver.device_bytes(), driver.locked_bytes()) == held


@cuda_only
def test_a_copy_is_polled(driver: Driver) -> None:
    for route in routes(driver):
        copy = route.copy(route.tensor)
        assert [copy.query() for _ in range(5)] == [False] * 5
        assert driver.pending() == 1
        driver.run()
        assert [copy.query() for _ in range(3)] == [True] * 3
        assert [driver.calls(name) for name in WAITS] == [0] * 3
        copy.wait()
        assert read(route.chunk) == route.tensor.tolist()


@cuda_only
def test_a_copy_is_waited_for(driver: Driver) -> None:
    for route in routes(driver):
        copy = route.copy(route.tensor)
        copy.wait()
        assert driver.pending() == 0
        assert driver.calls("cuEventSynchronize") == 1
        assert driver.calls("cuCtxSynchronize") == 0
        assert copy.query() is True
        assert read(route.chunk) == route.tensor.tolist()


@cuda_only
def test_a_copy_goes_to_its_stream(driver: Driver) -> None:
    theirs: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream, other = driver.stream(), driver.stream()
    for route in routes(driver):
        for named, where in (
            (None, stream),
            (stream, stream),
            (Handle(stream), stream),
            (theirs, theirs.cuda_stream),
        ):
            with on_stream(stream if named is None else other):
                copy = route.copy(route.tensor, named)
            assert driver.pending(where) == driver.pending() == 1
            driver.run(other)
            assert copy.query() is False
            driver.run(where)
            assert copy.query() is True
        assert read(route.chunk) == route.tensor.tolist()


@cuda_only
@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_copies_of_one_stream_keep_their_order(driver: Driver, where: str) -> None:
    chunk = some(make(2, 12, where=where).allocate())
    first, second = numbers(12).cuda(), numbers(12, start=5).cuda()
    targets = [torch.zeros(12).cuda() for _ in range(2)]
    driver.run()
    driver.set_patience(NEVER)
    with on_stream(driver.stream()):
        chunk.copy_from(first)
        chunk.copy_to(targets[0])
        chunk.copy_from(second)
        last = chunk.copy_to(targets[1])
        assert driver.pending() == 4
        last.wait()
    assert same(targets[0], numbers(12))
    assert same(targets[1], numbers(12, start=5))
    assert same(chunk.tensor(), numbers(12, start=5))


@cuda_only
def test_copies_of_two_streams_do_not_wait_for_each_other(driver: Driver) -> None:
    pool = make(2, 12, where="cpu")
    chunks = take(pool, 2)
    tensors = [numbers(12, start=i).cuda() for i in range(2)]
    driver.run()
    driver.set_patience(NEVER)
    streams = [driver.stream(), driver.stream()]
    copies = [
        chunk.copy_from(tensor, stream)
        for chunk, tensor, stream in zip(chunks, tensors, streams, strict=True)
    ]
    copies[1].wait()
    assert driver.pending(streams[0]) == 1
    assert [copy.query() for copy in copies] == [False, True]
    assert read(chunks[0]) == [0] * 12
    assert read(chunks[1]) == numbers(12, start=1).tolist()
    copies[0].wait()
    assert read(chunks[0]) == numbers(12).tolist()


@cuda_only
def test_a_copy_sees_what_its_stream_has_written(driver: Driver) -> None:
    pool = make(2, 12, where="cpu")
    chunk = some(pool.allocate())
    source = torch.zeros(12).cuda()
    driver.run()
    driver.set_patience(NEVER)
    source.copy_(pinned())
    chunk.copy_from(source).wait()
    assert same(chunk.tensor(), numbers(12))


@cuda_only
@pytest.mark.parametrize("pin_memory", [True, False])
def test_strided_copies_are_right_whatever_is_late(driver: Driver, pin_memory: bool) -> None:
    pool = make(2, 36, where="cpu", pin_memory=pin_memory)
    chunk = some(pool.allocate())
    origin, gaps = numbers(72).cuda(), torch.full((72,), 9.0).cuda()
    driver.run()
    driver.set_patience(NEVER)
    look = LAYOUTS["tokens"]
    with on_stream(driver.stream()):
        chunk.copy_from(look(origin))
        chunk.copy_to(look(gaps)).wait()
    expected = torch.full((72,), 9.0)
    look(expected).copy_(look(numbers(72)))
    assert same(chunk.tensor(), look(numbers(72)))
    assert same(gaps, expected)


@cuda_only
@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_a_freed_chunk_returns_when_its_copies_are_done(driver: Driver, where: str) -> None:
    pool = make(2, 12, where=where)
    chunk = some(pool.allocate())
    source, target = numbers(12).cuda(), torch.zeros(12).cuda()
    driver.run()
    driver.set_patience(NEVER)
    driver.reset_calls()
    copies = [chunk.copy_from(source), chunk.copy_to(target)]
    pool.free(chunk)
    assert chunk.references == 0
    assert counts(pool)[:2] == (1, 1)
    with pytest.raises(StaleBufferError):
        chunk.tensor()
    # The other one, without waiting.
    assert some(pool.allocate()).index == 1
    assert [driver.calls(name) for name in WAITS] == [0] * 3
    assert [copy.query() for copy in copies] == [False, False]
    driver.run()
    again = some(pool.allocate())
    assert again.index == 0
    assert [driver.calls(name) for name in WAITS] == [0] * 3
    assert pool.allocate() is None
    assert same(again.tensor(), numbers(12))
    assert same(target, numbers(12))
    pool.free(chunk)
    assert (again.references, pool.stats()["dropped_frees"]) == (1, 1)


@cuda_only
@pytest.mark.parametrize("batch", [False, True])
def test_only_an_allocate_that_would_fail_waits_for_copies(driver: Driver, batch: bool) -> None:
    pool = make(3, 12, where="cpu")
    chunks = take(pool, 3)
    targets = [torch.zeros(12).cuda() for _ in range(2)]
    for value, chunk in enumerate(chunks, 1):
        fill(chunk, value)
    driver.run()
    driver.set_patience(NEVER)
    driver.reset_calls()
    for chunk, target in zip(chunks, targets, strict=False):
        chunk.copy_to(target)
        pool.free(chunk)
    assert pool.allocate_batch(3) is None
    assert [driver.calls(name) for name in WAITS] == [0] * 3
    again = some(pool.allocate_batch(2)) if batch else take(pool, 2)
    assert driver.calls("cuEventSynchronize") > 0
    assert sorted(indices(again)) == [0, 1]
    # What the next owner writes does not reach the copies.
    for chunk in again:
        fill(chunk, 50)
    driver.run()
    assert [target.tolist() for target in targets] == [[1.0] * 12, [2.0] * 12]
    assert pool.allocate() is None
    assert counts(pool) == (0, 3, 3, 0)


@cuda_only
def test_a_chunk_with_references_left_stays_after_its_copies(driver: Driver) -> None:
    pool = make(2, 12, where="cpu")
    chunk = some(pool.allocate()).retain()
    source = numbers(12).cuda()
    driver.run()
    driver.set_patience(NEVER)
    copy = chunk.copy_from(source)
    chunk.release()
    copy.wait()
    assert (chunk.references, counts(pool)[:2]) == (1, (1, 1))
    assert same(chunk.tensor(), numbers(12))
    chunk.release()
    assert counts(pool)[:2] == (2, 0)


@cuda_only
@pytest.mark.parametrize("end", ["wait", "query", "run"])
def test_a_tensor_lives_until_its_copy_is_done(driver: Driver, end: str) -> None:
    other = torch.ones(1).cuda()
    for route in routes(driver):
        # A view that nobody else has.
        view = route.tensor[:10]
        gone = weakref.ref(view)
        copy = route.copy(view)
        del view
        assert gone() is not None
        assert driver.pending() == 1
        if end == "wait":
            copy.wait()
        elif end == "query":
            assert copy.query() is False
            driver.run()
            assert copy.query() is True
        else:
            driver.run()
            # Whoever copies next lets go of what is done.
            route.chunk.copy_from(other)
        assert gone() is None


@cuda_only
def test_memory_lives_until_its_copy_is_done(driver: Driver) -> None:
    """Late work on memory that was given back ends the process."""
    pool = make(2, 12, where="cuda")
    chunk = some(pool.allocate())
    driver.run()
    driver.set_patience(NEVER)
    with on_stream(driver.stream()):
        chunk.copy_from(pinned())
        copy = chunk.copy_to(pinned())
        driver.run()
    assert copy.query() is True
    assert same(chunk.tensor(), numbers(12))


@cuda_only
def test_a_pool_dropped_with_copies_under_way(driver: Driver) -> None:
    driver.set_patience(NEVER)
    for kept in ("nothing", "copy", "chunk", "tensor"):
        before = driver.device_bytes(), driver.locked_bytes()
        pool = make(2, 12, where="cpu")
        chunk = some(pool.allocate())
        fill(chunk, 4)
        target = torch.zeros(12).cuda()
        driver.run()
        copy = chunk.copy_to(target)
        held = {"nothing": None, "copy": copy, "chunk": chunk, "tensor": chunk.tensor()}[kept]
        del pool, chunk, copy
        driver.run()
        assert target.tolist() == [4] * 12
        del held, target
        driver.run()
        assert (driver.device_bytes(), driver.locked_bytes()) == before, kept


@cuda_only
def test_random_copies_without_waits(driver: Driver) -> None:
    choose = random.Random(11)  # noqa: S311
    pool = make(5, 8, where="cpu")
    stream = driver.stream()
    sources = [torch.full((8,), float(mark)).cuda() for mark in range(20)]
    held: list[tuple[Chunk, int]] = []
    targets = [torch.zeros(8).cuda() for _ in range(6)]
    landed = [0] * len(targets)
    driver.run()
    driver.set_patience(NEVER)
    with on_stream(stream):
        for _ in range(400):
            action = choose.randrange(5)
            if action == 0 and len(held) < 5:
                chunk = some(pool.allocate())
                # If copies of the last owner were under way, they would see this.
                fill(chunk, -1)
                mark = choose.randrange(20)
                chunk.copy_from(sources[mark])
                held.append((chunk, mark))
            elif action == 1 and held:
                chunk, mark = choose.choice(held)
                target = choose.randrange(len(targets))
                chunk.copy_to(targets[target])
                landed[target] = mark
            elif action in {2, 3} and held:
                chunk, _ = held.pop(choose.randrange(len(held)))
                pool.free(chunk)
            elif choose.random() < 0.2:
                driver.run()
    driver.run()
    for chunk, mark in held:
        assert read(chunk) == [mark] * 8
    for tensor, mark in zip(targets, landed, strict=True):
        assert tensor.tolist() == [mark] * 8
    for chunk, _ in held:
        pool.free(chunk)
    assert sorted(indices(take(pool, 5))) == [0, 1, 2, 3, 4]
    assert pool.stats()["dropped_frees"] == 0


def check_unhurt(pool: ChunkPool, held: Chunk, source: torch.Tensor) -> None:
    """That a pool of four chunks, of which somebody has one, hands out each once and copies as ever."""
    while held.references:
        held.release()
    chunks = take(pool, 4)
    assert sorted(indices(chunks)) == [0, 1, 2, 3]
    assert pool.allocate() is None
    chunks[0].copy_from(source).wait()
    assert same(chunks[0].tensor(), source)
    for chunk in chunks:
        pool.free(chunk)
    assert pool.stats()["dropped_frees"] == 0


@cuda_only
def test_every_driver_call_may_fail(driver: Driver) -> None:
    made: list[tuple[ChunkPool, Chunk]] = []
    source, gaps = numbers(24).cuda(), torch.zeros(24).cuda()

    def work() -> None:
        made.clear()
        for where in ("cuda", "cpu"):
            pool = make(4, 12, where=where, strict=True)
            made.append((pool, some(pool.allocate())))
        for pool, chunk in made:
            chunk.copy_from(source[::2])
            chunk.copy_to(gaps[:12])
            chunk.copy_from(source[:12]).wait()
            chunk.copy_to(gaps[12:]).query()
            chunk.retain()
            pool.free(some(pool.allocate()))
            chunk.release()

    failures = 0
    for error in each_failure(driver, work, made):
        failures += error is not None
        driver.run()
        while made:
            check_unhurt(*made.pop(), source[5:17])
    assert failures > 20


@cuda_only
def test_what_a_failed_copy_has_begun_keeps_its_tensor(driver: Driver) -> None:
    pool = make(1, 12, where="cuda")
    chunk = some(pool.allocate())
    host = some(make(1, (12, 2), where="cpu").allocate()).tensor()
    stream = driver.stream()
    columns: list[torch.Tensor] = []

    def work() -> None:
        columns.append(host[:, 0])
        chunk.copy_from(columns[0], stream)

    driver.set_patience(NEVER)
    for error in each_call(driver, work):
        gone = weakref.ref(columns.pop())
        if driver.pending(stream):
            assert gone() is not None, repr(error)
        driver.run()
    pool.free(chunk)
    assert some(pool.allocate()).index == 0


@cuda_only
@needs_fork
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_after_a_fork_the_device_is_out_of_reach() -> None:
    pools = [make(2, 12, where=where) for where in ("cpu", "cuda")]
    chunks = [some(pool.allocate()) for pool in pools]
    host, device = numbers(12), numbers(12).cuda()

    def host_memory_is_lost() -> bool:
        chunks[0].copy_from(host)
        return bool(chunks[0].tensor().tolist() != host.tolist())

    assert_refused_after_fork(
        [
            lambda: chunks[0].copy_to(device),
            lambda: chunks[0].copy_from(device),
            lambda: chunks[1].copy_from(host),
            lambda: chunks[1].copy_to(device),
        ],
        host_memory_is_lost,
    )
    for chunk in chunks:
        chunk.copy_from(device).wait()
        assert same(chunk.tensor(), numbers(12))


@cuda_only
def test_what_a_stream_writes_after_the_zeros_stays(driver: Driver) -> None:
    driver.run()
    stream = driver.stream()
    source = numbers(12).cuda()
    driver.run()
    with on_stream(stream):
        pool = make(2, 12, where="cuda")
        chunk = some(pool.allocate())
        copy = chunk.copy_from(source)
    driver.run(stream)
    assert copy.query() is True
    driver.run()
    assert same(chunk.tensor(), numbers(12))


# Page-locking


class Seen:
    """A `progress` that notes what it is told, and by which thread."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []
        self.threads: set[int] = set()

    def __call__(self, done: int, total: int) -> None:
        self.calls.append((done, total))
        self.threads.add(threading.get_ident())

    def check(self, total: int) -> None:
        done = [call[0] for call in self.calls]
        assert done
        assert done == sorted(done)
        assert done[-1] == total
        assert all(type(number) is int for call in self.calls for number in call)
        assert {call[1] for call in self.calls} == {total}


@pytest.mark.parametrize("pin_memory", [True, False])
def test_where_nothing_is_registered_all_is_ready(pin_memory: bool) -> None:
    if devices.current() == "cpu" and pin_memory and torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    seen = Seen()
    pool = make(4, 12, pin_memory=pin_memory, progress=seen)
    if pool.pin_memory:
        pytest.skip("there is a driver")
    assert pool.wait_registered() is True
    assert pool.wait_registered(0) is True
    assert pool.wait_registered(timeout=5.5) is True
    assert pool.stats()["registered"] == 0
    assert not seen.calls
    assert indices(take(pool, 4)) == [0, 1, 2, 3]


@pytest.mark.parametrize("bad", [-1, -0.5, float("nan"), "1", [1], object()])
def test_rejects_bad_timeouts(bad: Any) -> None:  # noqa: ANN401
    is_number = isinstance(bad, int | float)
    words = r"timeout.*(-|NaN|nan)" if is_number else None
    with pytest.raises(ConfigError if is_number else TypeError, match=words):
        make().wait_registered(bad)


@devices.cpu_only
def test_numa_nodes() -> None:
    pool = make(2, 12, numa_node=0)
    assert pool.numa_node == 0
    assert make().numa_node is None
    chunk = some(pool.allocate())
    fill(chunk, 3)
    assert read(chunk) == [3] * 12
    for node in (10**6, 2**33, -1):
        with pytest.raises(ConfigError, match=rf"numa_node.*{node}"):
            make(2, 12, numa_node=node)
    with pytest.raises(ConfigError, match=r"numa_node.*\d"):
        make(2, 12, numa_node=10**30)
    for bad in ("0", 0.0, [0]):
        with pytest.raises(TypeError):
            make(2, 12, numa_node=bad)


@devices.cpu_only
def test_the_first_node_that_is_not_there_is_named() -> None:
    online = Path("/sys/devices/system/node/online")
    text = online.read_text(encoding="ascii") if online.exists() else "0"
    beyond = int(text.strip().replace("-", ",").split(",")[-1]) + 1
    with pytest.raises(ConfigError, match=rf"numa_node is {beyond}\D"):
        make(2, 12, numa_node=beyond)


def reserved_huge_pages() -> int:
    lines = MEMINFO.read_text(encoding="ascii").splitlines() if MEMINFO.exists() else []
    return sum(int(line.split()[1]) for line in lines if line.startswith("HugePages_Free"))


@devices.cpu_only
@pytest.mark.skipif(reserved_huge_pages() > 0, reason="this machine has reserved huge pages")
def test_without_reserved_huge_pages_others_are_taken(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="kvpool"):
        pool = make(4, 1 << 20, huge_pages=True)
    assert pool.huge_pages is False
    found = [record for record in caplog.records if "huge" in record.getMessage()]
    assert [(record.name, record.levelno) for record in found] == [("kvpool", logging.INFO)]
    for number, chunk in enumerate(take(pool, 4)):
        assert not chunk.tensor().any()
        chunk.tensor().fill_(number)
    assert pool.allocate() is None


@devices.cpu_only
def test_huge_pages_are_not_mentioned_unless_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="kvpool"):
        make(4, 1 << 20, pin_memory=False)
    assert not caplog.records


@cuda_only
def test_a_small_pool_is_page_locked_when_it_is_made(
    driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    before, seen = driver.locked_bytes(), Seen()
    with caplog.at_level(logging.INFO, logger="kvpool"):
        pool = make(100, 12, where="cpu", progress=seen)
    assert pool.pin_memory is True
    assert pool.wait_registered() is True
    assert pool.stats()["registered"] == 100
    assert driver.locked_bytes() - before >= 100 * 48
    assert driver.calls("cuMemHostRegister_v2") == 1
    assert driver.calls("cuMemHostAlloc") == 0
    seen.check(100)
    found = [record for record in caplog.records if "100" in record.getMessage()]
    assert [(record.name, record.levelno) for record in found] == [("kvpool", logging.INFO)]


@cuda_only
def test_ordinary_memory_on_request(driver: Driver, caplog: pytest.LogCaptureFixture) -> None:
    before = driver.locked_bytes()
    with caplog.at_level(logging.INFO, logger="kvpool"):
        pool = make(100, 12, where="cpu", pin_memory=False)
    assert pool.pin_memory is False
    assert pool.wait_registered() is True
    assert pool.stats()["registered"] == 0
    assert driver.locked_bytes() == before
    assert driver.calls("cuMemHostRegister_v2") == 0
    assert not caplog.records
    chunk, device = some(pool.allocate()), numbers(12).cuda()
    chunk.copy_from(device).wait()
    assert same(chunk.tensor(), numbers(12))
    fill(chunk, 4)
    chunk.copy_to(device).wait()
    assert device.tolist() == [4] * 12


@cuda_only
def test_a_pool_on_a_device_is_not_registered(driver: Driver) -> None:
    seen = Seen()
    pool = make(4, 12, where="cuda", progress=seen)
    assert (pool.pin_memory, pool.stats()["registered"], seen.calls) == (False, 0, [])
    assert pool.wait_registered() is True
    assert driver.calls("cuMemHostRegister_v2") == 0


@cuda_only
@pytest.mark.parametrize("threads", [1, 4])
def test_a_large_pool_is_page_locked_in_steps(
    driver: Driver, caplog: pytest.LogCaptureFixture, threads: int
) -> None:
    before, seen = driver.locked_bytes(), Seen()
    number = LARGER[0]
    with caplog.at_level(logging.INFO, logger="kvpool"), page_lock_threads(threads):
        pool = make(*LARGER, torch.uint8, "cpu", progress=seen)
        first = some(pool.allocate())
        assert 0 < pool.stats()["registered"] <= number
        fill(first, 3)
        assert pool.wait_registered() is True
    steps = driver.calls("cuMemHostRegister_v2")
    assert steps > 1
    assert pool.stats()["registered"] == number
    assert driver.locked_bytes() - before >= number * LARGER[1][0]
    assert driver.calls("cuMemHostAlloc") == 0
    seen.check(number)
    assert len(seen.calls) == steps
    assert threading.get_ident() not in seen.threads
    found = [record for record in caplog.records if record.levelno == logging.INFO]
    assert len(found) == len(caplog.records) == steps
    assert all(str(number) in record.getMessage() for record in found)
    chunks = take(pool, number - 1)
    assert sorted(indices([first, *chunks])) == list(range(number))
    assert pool.allocate() is None
    assert first.tensor().eq(3).all()
    assert not chunks[-1].tensor().any()
    del pool, first, chunks, found
    caplog.clear()
    # A thread that has reported its last step may still hold the pool.
    assert eventually(lambda: driver.locked_bytes() == before)
    assert driver.calls("cuMemHostUnregister") == steps


@cuda_only
def test_chunks_are_waited_for_while_page_locking_goes_on(driver: Driver) -> None:
    number = LARGE[0]
    with page_lock_threads(1):
        pool = make(*LARGE, torch.uint8, "cpu")
        assert pool.allocate_batch(number + 1) is None
        chunks = within(60, lambda: take(pool, number))
    assert sorted(indices(chunks)) == list(range(number))
    assert pool.allocate() is None
    assert counts(pool) == (0, number, number, 0)
    with page_lock_threads(1):
        pool = make(*LARGE, torch.uint8, "cpu")
        batch = within(60, lambda: some(pool.allocate_batch(number)))
    assert sorted(indices(batch)) == list(range(number))
    assert driver.calls("cuMemHostRegister_v2") > 2


@cuda_only
def test_a_full_pool_answers_none_while_page_locking_goes_on(driver: Driver) -> None:
    number, go = LARGE[0], threading.Event()
    pool = make(*LARGE, torch.uint8, "cpu", progress=lambda _done, _total: go.wait(60))
    try:
        chunks = within(60, lambda: some(pool.allocate_batch(number)))
        # The last step has not been told of, so it goes on.
        assert within(10, lambda: pool.wait_registered(0.05)) is False
        assert within(10, lambda: pool.wait_registered(0)) is False
        assert within(10, pool.allocate) is None
        assert within(10, lambda: pool.allocate_batch(2)) is None
        pool.free(chunks[7])
        assert some(within(10, pool.allocate)).index == 7
        assert pool.stats()["registered"] == number
    finally:
        go.set()
    assert pool.wait_registered(60) is True
    assert driver.planned() == 0


@cuda_only
def test_waiting_lets_other_threads_run(driver: Driver) -> None:
    go = threading.Event()
    pool = make(*LARGE, torch.uint8, "cpu", progress=lambda _done, _total: go.wait(60))
    all_wait = threading.Barrier(4)
    answers: list[tuple[bool, bool, bool]] = []

    def wait() -> None:
        in_vain = pool.wait_registered(0.001)
        all_wait.wait(60)
        in_the_end = pool.wait_registered()
        answers.append((in_vain, in_the_end, go.is_set()))

    waiters = [threading.Thread(target=wait, daemon=True) for _ in range(3)]
    for waiter in waiters:
        waiter.start()
    all_wait.wait(60)
    go.set()
    for waiter in waiters:
        waiter.join(60)
    assert answers == [(False, True, True)] * 3
    assert driver.planned() == 0


@cuda_only
@pytest.mark.parametrize(("left", "code"), [(0, LAUNCH_FAILED), (1, OUT_OF_MEMORY), (2, OUT_OF_MEMORY)])
def test_a_step_that_fails_leaves_ordinary_memory(
    driver: Driver, caplog: pytest.LogCaptureFixture, left: int, code: int
) -> None:
    seen, number = Seen(), LARGER[0]
    driver.fail("cuMemHostRegister_v2", left, code)
    with caplog.at_level(logging.INFO, logger="kvpool"), page_lock_threads(1):
        pool = make(*LARGER, torch.uint8, "cpu", progress=seen)
        assert pool.wait_registered(60) is True
    assert driver.planned() == 0
    assert 0 < pool.stats()["registered"] < number
    seen.check(number)
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert warnings[0].name == "kvpool"
    assert "cuMemHostRegister_v2 failed with CUDA_ERROR" in warnings[0].getMessage()
    chunks = some(pool.allocate_batch(number))
    device = torch.full((64,), 7, dtype=torch.uint8).cuda()
    for chunk in (chunks[0], chunks[63], chunks[64], chunks[128], chunks[129]):
        chunk.copy_from(device).wait()
        assert chunk.tensor(64).eq(7).all()
        assert not chunk.tensor()[64:].any()
        chunk.copy_to(device).wait()


@cuda_only
def test_a_small_pool_that_cannot_be_page_locked(driver: Driver, caplog: pytest.LogCaptureFixture) -> None:
    before = driver.locked_bytes()
    driver.fail("cuMemHostRegister_v2", 0, OUT_OF_MEMORY)
    with caplog.at_level(logging.WARNING, logger="kvpool"):
        pool = make(4, 12, where="cpu")
    assert len(caplog.records) == 1
    assert "CUDA_ERROR_OUT_OF_MEMORY" in caplog.records[0].getMessage()
    assert pool.stats()["registered"] == 0
    assert driver.locked_bytes() == before
    assert pool.wait_registered() is True
    chunks, device = take(pool, 4), numbers(12).cuda()
    for chunk in chunks:
        chunk.copy_from(device).wait()
        assert same(chunk.tensor(), numbers(12))
    assert pool.allocate() is None


@cuda_only
@pytest.mark.parametrize("shape", [LARGE, (4, (12,))])
def test_a_progress_that_raises_changes_nothing(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, tuple[int, ...]]
) -> None:
    seen: list[Any] = []

    def broken(done: int, total: int) -> None:
        raise LookupError(f"{done} of {total}")

    monkeypatch.setattr("sys.unraisablehook", lambda told: seen.append(str(told.exc_value)))
    pool = make(*shape, torch.uint8, "cpu", progress=broken)
    assert pool.wait_registered(60) is True
    assert pool.stats()["registered"] == shape[0]
    assert seen[-1].strip("'\"") == f"{shape[0]} of {shape[0]}"
    assert len(seen) == driver.calls("cuMemHostRegister_v2")
    assert len(some(pool.allocate_batch(shape[0]))) == shape[0]


@cuda_only
def test_a_progress_that_uses_its_pool(driver: Driver) -> None:
    pools: list[ChunkPool] = []
    answers: list[object] = []
    ready = threading.Event()

    def progress(_done: int, _total: int) -> None:
        ready.wait(60)
        pool = pools[0]
        chunk = some(pool.allocate())
        answers.append((pool.stats()["registered"] > 0, pool.wait_registered(0), chunk.tensor(3).tolist()))
        pool.free(chunk)

    pools.append(make(*LARGE, torch.uint8, "cpu", progress=progress))
    ready.set()
    assert within(60, pools[0].wait_registered) is True
    assert answers == [(True, False, [0, 0, 0])] * len(answers)
    assert len(answers) == driver.calls("cuMemHostRegister_v2")
    assert counts(pools[0])[1] == 0


@cuda_only
@pytest.mark.parametrize("shape", [LARGE, (4, (12,))])
def test_a_progress_is_let_go(driver: Driver, shape: tuple[int, tuple[int, ...]]) -> None:
    seen = Seen()
    gone = weakref.ref(seen)
    pool = make(*shape, torch.uint8, "cpu", progress=seen)
    del seen
    assert pool.wait_registered(60) is True
    assert driver.calls("cuMemHostRegister_v2") > 0

    def is_gone() -> bool:
        pool.stats()
        return gone() is None

    assert eventually(is_gone)


@cuda_only
@pytest.mark.parametrize("kept", [False, True])
def test_a_pool_dropped_while_it_is_page_locked(driver: Driver, kept: bool) -> None:
    gc.collect()
    before = driver.locked_bytes()
    with page_lock_threads(2):
        pool = make(*LARGE, torch.uint8, "cpu")
    tensor = some(pool.allocate()).tensor()
    tensor.fill_(3)
    held = tensor if kept else None
    del pool, tensor
    if held is not None:
        assert eventually(lambda: not page_locking_threads())
        assert held.eq(3).all()
        held = None

    # Memory of earlier tests may be on its way back as well.
    assert eventually(lambda: driver.locked_bytes() <= before)


@cuda_only
def test_the_interpreter_may_end_while_page_locking_goes_on(driver: Driver, run_snippet: RunSnippet) -> None:
    assert driver.calls() == 0
    code = """
        import kvpool
        told = []
        pool = kvpool.ChunkPool(66, (1 << 22,), "uint8", progress=lambda *numbers: told.append(numbers))
        print(pool.allocate().index, pool.pin_memory)
    """
    for hidden in (["torch"], ["torch", "numpy"]):
        # Either of the two steps may be done first.
        assert run_snippet(code, hidden=hidden).split() in (["0", "True"], ["64", "True"])


@cuda_only
def test_a_driver_that_fails_when_it_is_first_used(driver: Driver, run_snippet: RunSnippet) -> None:
    """Whichever call fails, each chunk is handed out, and handed out once."""
    assert driver.calls() == 0
    code = """
        import ctypes, logging, os, sys
        import kvpool
        logging.disable(logging.CRITICAL)
        driver = ctypes.CDLL(None)
        for left in range(1, 16):
            child = os.fork()
            if child == 0:
                driver.soft_fail(None, ctypes.c_long(left), 719)
                pool = kvpool.ChunkPool(4, (8,), "float32")
                found = [pool.allocate() for _ in range(8)]
                indices = [chunk.index for chunk in found if chunk is not None]
                print(left, indices if indices != [0, 1, 2, 3] else "right", flush=True)
                os._exit(0)
            os.waitpid(child, 0)
    """
    lines = run_snippet(code, hidden=["torch"]).splitlines()
    assert lines == [f"{left} right" for left in range(1, 16)]


@cuda_only
@pytest.mark.parametrize("env", [{"KVPOOL_SOFTWARE_DEVICES": "0"}, {"KVPOOL_SOFTWARE_INIT_ERROR": "100"}])
def test_ordinary_memory_where_the_driver_has_no_device(
    driver: Driver, run_snippet: RunSnippet, env: dict[str, str]
) -> None:
    assert driver.calls() == 0
    code = """
        import kvpool
        told = []
        pool = kvpool.ChunkPool(4, (8,), "float32", progress=lambda *numbers: told.append(numbers))
        print(pool.pin_memory, pool.wait_registered(), pool.stats()["registered"], told)
        print([chunk.index for chunk in pool.allocate_batch(4)], pool.allocate())
    """
    assert run_snippet(code, hidden=["torch"], env=env).splitlines() == [
        "False True 0 []",
        "[0, 1, 2, 3] None",
    ]


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
