"""BufferPool: buckets, reuse, stale and foreign buffers, registration, streams, threads, random histories."""

from __future__ import annotations

import gc
import itertools
import weakref
from typing import TYPE_CHECKING, Any

import devices
import numpy as np
import pytest
import torch
from common import (
    MIB,
    NEVER,
    STORAGE,
    THREADS,
    WAITS,
    cuda_only,
    each_failure,
    needs_statm,
    on_stream,
    resident_bytes,
    together,
)
from software import LAUNCH_FAILED, OUT_OF_MEMORY, is_preloaded

import kvpool
from kvpool import (
    Buffer,
    BufferPool,
    ConfigError,
    DriverError,
    IndexOwnershipError,
    OutOfMemoryError,
    StaleBufferError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from conftest import RunSnippet
    from software import Driver

    from kvpool._typing import DTypeLike

DTYPES = [*STORAGE, torch.float64, torch.int32, torch.int64, torch.bool]
EVENTS = ("cuEventRecord", "cuStreamWaitEvent")
# About 0.05 s on a GPU of 2 GHz: longer than what a test enqueues behind it takes on the host.
BUSY_CYCLES = 100_000_000

pytestmark = pytest.mark.usefixtures("device")


def make(rounding: str = "pow2") -> BufferPool:
    return BufferPool(devices.current(), rounding=rounding)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor."""
    return tensor.flatten().view(torch.uint8)


def mark(buffer: Buffer, value: int) -> None:
    flat(buffer.tensor).fill_(value)


def holds(buffer: Buffer, value: int) -> bool:
    return bool(flat(buffer.tensor).cpu().eq(value).all())


def are_apart(buffers: Iterable[Buffer]) -> bool:
    """Whether no two of them have a byte of their buckets in common. Without elements there is no address."""
    spans = sorted((buffer.tensor.data_ptr(), buffer.capacity) for buffer in buffers if buffer.nbytes)
    return all(start + size <= after for (start, size), (after, _) in itertools.pairwise(spans))


def address(buffer: Buffer) -> int:
    where: int = buffer.tensor.data_ptr()
    return where


def addresses(buffers: Iterable[Buffer]) -> list[int]:
    return [address(buffer) for buffer in buffers]


def in_use(pool: BufferPool) -> tuple[int, int]:
    return pool.in_use_count, pool.in_use_bytes


def free(pool: BufferPool) -> tuple[int, int]:
    return pool.free_count, pool.free_bytes


# Construction


def test_roundings() -> None:
    for rounding, capacity in (("pow2", 2048), ("fine", 1280)):
        pool = make(rounding)
        assert (pool.rounding, pool.alloc_bytes(1100).capacity) == (rounding, capacity)
    for unknown, error in (("pow3", ConfigError), ("FINE", ConfigError), (2, TypeError), (None, TypeError)):
        with pytest.raises(error, match=str(unknown) if error is ConfigError else None):
            BufferPool(devices.current(), rounding=unknown)  # type: ignore[arg-type]


def test_attributes_are_read_only() -> None:
    buffer = make().alloc((2,), torch.int8)
    for name in ("tensor", "nbytes", "capacity"):
        with pytest.raises(AttributeError):
            setattr(buffer, name, getattr(buffer, name))


def test_buffers_come_from_pools_alone() -> None:
    with pytest.raises(TypeError):
        Buffer()


# alloc


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (5,), (2, 3), (4, 1, 7), (0,), (3, 0, 2), (1,) * 8])
def test_buffers_are_tensors_of_zeros(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    buffer = make().alloc(shape, dtype)
    tensor = buffer.tensor
    assert type(tensor) is torch.Tensor
    assert tensor.shape == shape
    assert tensor.dtype is dtype
    assert tensor.device.type == devices.current()
    assert tensor.is_contiguous()
    assert buffer.nbytes == tensor.numel() * dtype.itemsize
    assert buffer.capacity == 1 << max(buffer.nbytes - 1, 0).bit_length()
    assert tensor.data_ptr() % 256 == 0
    assert not flat(tensor).any()


@pytest.mark.parametrize("shape", [5, np.int32(5), (5,), [5], torch.Size([5]), (np.int64(5),)], ids=repr)
def test_every_way_to_write_a_shape(shape: Any) -> None:  # noqa: ANN401
    assert make().alloc(shape=shape, dtype=torch.int32).tensor.shape == (5,)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("bfloat16", torch.bfloat16),
        ("torch.int64", torch.int64),
        ("bool", torch.bool),
        ("float64", torch.float64),
        (np.float32, torch.float32),
        (np.dtype("int32"), torch.int32),
        (np.bool_, torch.bool),
    ],
)
def test_every_way_to_write_a_dtype(dtype: DTypeLike, expected: torch.dtype) -> None:
    assert make().alloc((2,), dtype).tensor.dtype is expected


def test_bytes() -> None:
    pool = make()
    buffer = pool.alloc_bytes(100)
    assert (buffer.tensor.shape, buffer.tensor.dtype) == ((100,), torch.uint8)
    assert (buffer.nbytes, buffer.capacity) == (100, 128)
    assert not buffer.tensor.any()
    assert pool.alloc_bytes(n=np.int64(0)).tensor.shape == (0,)


def test_a_buffer_has_one_tensor() -> None:
    buffer = make().alloc((3,), torch.int32)
    first, second = buffer.tensor, buffer.tensor
    assert first.data_ptr() == second.data_ptr()
    first[1] = 7
    assert second.tolist() == [0, 7, 0]


@pytest.mark.parametrize("rounding", ["pow2", "fine"])
@pytest.mark.parametrize(
    ("size", "error", "words"),
    [
        *[(-1, ConfigError, "-1"), (-(10**30), ConfigError, str(10**30))],
        *[(size, TypeError, "") for size in (1.0, "1", None, float("nan"), (1,))],
        (1 << 50, OutOfMemoryError, str(1 << 50)),
        *[(size, (ConfigError, OutOfMemoryError), r"\d{10}") for size in ((1 << 62) + 1, (1 << 63) - 1)],
        *[(size, (ConfigError, OutOfMemoryError), r"\d{10}") for size in (1 << 63, (1 << 64) - 1, 10**30)],
    ],
    ids=repr,
)
def test_rejects_bad_numbers_of_bytes(rounding: str, size: Any, error: Any, words: str) -> None:  # noqa: ANN401
    pool = make(rounding)
    held = pool.alloc((4,), torch.int32)
    mark(held, 5)
    with pytest.raises(error, match=words or None):
        pool.alloc_bytes(size)
    assert in_use(pool) == (1, 16)
    assert holds(held, 5)


# Tensors of memory that is handed out again


class Sub(torch.Tensor):
    """What somebody makes of a tensor."""


def is_as_new(buffer: Buffer) -> bool:
    tensor = buffer.tensor
    return bool(
        type(tensor) is torch.Tensor
        and tensor.shape == (4, 3)
        and tensor.stride() == (3, 1)
        and tensor.dtype is torch.float32
        and tensor.storage_offset() == 0
        and not tensor.requires_grad
        and tensor.grad_fn is None
        and tensor.grad is None
        and not tensor.is_inference()
        and not vars(tensor)
    )


def become_sub(tensor: torch.Tensor) -> None:
    tensor.__class__ = Sub


def become_a_leaf_of_old(tensor: torch.Tensor) -> None:
    tensor.requires_grad_()
    (tensor * 2).sum().backward()  # type: ignore[no-untyped-call]
    tensor.requires_grad_(False)


SHAPE_CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "unsqueezed": lambda tensor: tensor.unsqueeze_(0),
    "transposed": lambda tensor: tensor.t_(),
    "resized": lambda tensor: tensor.resize_(2),
    "set": lambda tensor: tensor.set_(torch.zeros(9).untyped_storage()),
    "other_data": lambda tensor: setattr(tensor, "data", torch.zeros(7)),
}
CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    **SHAPE_CHANGES,
    "records_gradients": lambda tensor: tensor.requires_grad_(),
    "has_a_gradient": become_a_leaf_of_old,
    "class": become_sub,
}


@devices.cpu_only
@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("how", sorted(CHANGES))
def test_what_was_done_to_a_tensor_ends_with_its_buffer(how: str, kept: bool) -> None:
    pool = make()
    buffer = pool.alloc((4, 3), torch.float32)
    where = address(buffer)
    assert is_as_new(buffer)
    tensor = buffer.tensor
    CHANGES[how](tensor)
    held = [tensor] if kept else []
    del tensor
    pool.reset()
    again = pool.alloc((4, 3), torch.float32)
    assert is_as_new(again)
    assert address(again) == where
    assert len(held) == kept


@devices.cpu_only
@pytest.mark.parametrize("how", sorted(SHAPE_CHANGES))
def test_a_buffer_has_the_shape_that_was_asked_for_whatever_is_done_to_its_tensors(how: str) -> None:
    buffer = make().alloc((4, 3), torch.float32)
    where = address(buffer)
    SHAPE_CHANGES[how](buffer.tensor)
    assert is_as_new(buffer)
    assert address(buffer) == where


def test_a_kept_tensor_is_not_the_next_owners() -> None:
    pool = make()
    kept = pool.alloc((4, 3), torch.float32).tensor
    pool.reset()
    again = pool.alloc((4, 3), torch.float32).tensor
    assert again is not kept
    assert again.data_ptr() == kept.data_ptr()


@devices.cpu_only
@pytest.mark.parametrize("first", [True, False])
def test_inference_mode_ends_with_its_block(first: bool) -> None:
    pool, weights = make(), torch.ones(4, 3, requires_grad=True)
    for is_inference in (first, not first, first):
        with torch.inference_mode(is_inference), pool.step():
            buffer = pool.alloc((4, 3), torch.float32)
            buffer.tensor.fill_(2)
            if not is_inference:
                assert is_as_new(buffer)
                weights.grad = None
                torch.autograd.backward((weights * buffer.tensor).sum())
                assert weights.grad is not None
                assert weights.grad.eq(2).all()


@devices.cpu_only
def test_a_view_of_a_former_tensor_does_not_reach_the_next() -> None:
    pool, weights = make(), torch.ones(3, requires_grad=True)
    view = pool.alloc((4, 3), torch.float32).tensor[1]
    pool.reset()
    buffer = pool.alloc((4, 3), torch.float32)
    tensor = buffer.tensor
    # Autograd notes this in what the view is a view of.
    view.mul_(weights)
    assert is_as_new(buffer)
    assert not tensor.requires_grad


BAD_SHAPES: list[tuple[Any, type[Exception], str]] = [
    ((-1,), ConfigError, "-1"),
    ((4, -7), ConfigError, "-7"),
    ((0, -7), ConfigError, "-7"),
    ((-(10**30),), ConfigError, ""),
    ((1,) * 9, ConfigError, "9"),
    ((1 << 62, 8), ConfigError, str(1 << 62)),
    ((1 << 31, 1 << 31, 1 << 31), ConfigError, str(1 << 31)),
    ((10**30,), ConfigError, ""),
    ((1.0,), TypeError, ""),
    (("1",), TypeError, ""),
    ((None,), TypeError, ""),
    (((1,),), TypeError, ""),
    (None, TypeError, ""),
    (1.5, TypeError, ""),
]


@pytest.mark.parametrize(("shape", "error", "words"), BAD_SHAPES, ids=repr)
def test_rejects_bad_shapes(shape: Any, error: type[Exception], words: str) -> None:  # noqa: ANN401
    pool = make()
    pool.alloc((4,), torch.int32).release()
    before = pool.stats()
    for call in (
        lambda: pool.alloc(shape, torch.int32),
        lambda: pool.alloc_batch([((4,), torch.int32), (shape, torch.int32)]),
    ):
        with pytest.raises(error) as caught:
            call()
        assert words in str(caught.value)
        assert error is TypeError or any(c.isdigit() for c in str(caught.value))
    assert pool.stats() == before


@pytest.mark.parametrize(
    "dtype", ["complex64", torch.complex64, torch.int16, "int", "text", 3, None, np.uint16]
)
def test_rejects_unknown_dtypes(dtype: DTypeLike) -> None:
    pool = make()
    before = pool.stats()
    with pytest.raises(TypeError):
        pool.alloc((4,), dtype)
    with pytest.raises(TypeError):
        pool.alloc_batch([((4,), torch.int32), ((4,), dtype)])
    assert pool.stats() == before


# Reuse


def test_a_dropped_buffer_is_in_use_until_a_reset() -> None:
    pool = make()
    tensor = pool.alloc((4,), torch.int32).tensor
    tensor.fill_(3)
    assert in_use(pool) == (1, 16)
    other = pool.alloc((4,), torch.int32)
    assert address(other) != tensor.data_ptr()
    other.tensor.fill_(4)
    assert tensor.tolist() == [3] * 4
    pool.reset()
    assert (free(pool), in_use(pool)) == ((2, 32), (0, 0))


def test_buffers_without_elements() -> None:
    pool = make()
    buffers = [pool.alloc((0, 5), torch.float64), pool.alloc_bytes(0), pool.alloc((3, 0), torch.bool)]
    assert [buffer.capacity for buffer in buffers] == [1, 1, 1]
    assert [tuple(buffer.tensor.shape) for buffer in buffers] == [(0, 5), (0,), (3, 0)]
    buffers[1].release()
    assert (free(pool), in_use(pool)) == ((1, 1), (2, 2))
    assert pool.alloc_bytes(1).tensor.tolist() == [0]
    assert (free(pool), in_use(pool)) == ((0, 0), (3, 3))


def test_stats_and_high_water() -> None:
    pool = make()
    buffers = [pool.alloc_bytes(size) for size in (100, 200, 1000)]
    buffers[2].release()
    pool.alloc_bytes(60).release()
    stats = pool.stats()
    assert (stats["capacity"], stats["available"], stats["in_use"], stats["high_water"]) == (4, 2, 2, 3)
    assert (stats["free_bytes"], stats["in_use_bytes"], stats["high_water_bytes"]) == (1088, 384, 1408)
    assert stats["bytes"] == 1472
    assert (stats["registered_bytes"], stats["stale_uses"]) == (0, 0)
    assert all(type(value) is int for value in stats.values())
    assert (*free(pool), *in_use(pool), pool.high_water_bytes) == (2, 1088, 2, 384, 1408)
    pool.reset()
    assert pool.high_water_bytes == 1408
    pool.clear()
    stats = pool.stats()
    assert (stats["capacity"], stats["bytes"], stats["high_water"], stats["high_water_bytes"]) == (
        0,
        0,
        3,
        1408,
    )


# Batches


def test_a_batch_is_its_allocations_in_order() -> None:
    pool = make()
    specs: list[tuple[Sequence[int], DTypeLike]] = [
        ((3,), torch.int32),
        ([2, 2], "bfloat16"),
        ((), np.float64),
        ((0,), torch.bool),
        ((3,), torch.float32),
    ]
    first = [pool.alloc(shape, dtype) for shape, dtype in specs]
    where = addresses(first)
    pool.reset()
    buffers = pool.alloc_batch(specs)
    assert type(buffers) is list
    assert addresses(buffers) == where
    assert [tuple(buffer.tensor.shape) for buffer in buffers] == [(3,), (2, 2), (), (0,), (3,)]
    assert [buffer.tensor.dtype for buffer in buffers[:3]] == [torch.int32, torch.bfloat16, torch.float64]
    assert [buffer.capacity for buffer in buffers] == [16, 8, 8, 1, 16]
    assert are_apart(buffers)
    assert in_use(pool) == (5, 49)
    buffers[1].release()
    assert in_use(pool) == (4, 41)


@pytest.mark.parametrize(
    "specs",
    [
        None,
        3,
        [3],
        [(3,)],
        [((3,), torch.int32, 1)],
        [((3,), torch.int32), None],
        [((3,), torch.int32), ((3,), 7)],
        [((3,), torch.int32), (("3",), torch.int32)],
        "ab",
    ],
    ids=repr,
)
def test_rejects_bad_batches(specs: Any) -> None:  # noqa: ANN401
    pool = make()
    where = address(pool.alloc((3,), torch.int32))
    pool.reset()
    before = pool.stats()
    with pytest.raises(TypeError):
        pool.alloc_batch(specs)
    assert pool.stats() == before
    assert address(pool.alloc((3,), torch.int32)) == where


# Stale buffers


def end_step(pool: BufferPool, _buffer: Buffer) -> None:
    with pool.step():
        pass


def release_and_reset(pool: BufferPool, buffer: Buffer) -> None:
    buffer.release()
    pool.reset()


def release_and_clear(pool: BufferPool, buffer: Buffer) -> None:
    buffer.release()
    pool.clear()


ENDS: dict[str, Callable[[BufferPool, Buffer], object]] = {
    "released": lambda _pool, buffer: buffer.release(),
    "reset": lambda pool, _buffer: pool.reset(),
    "released and reset": release_and_reset,
    "step": end_step,
    "left": lambda _pool, buffer: buffer.__exit__(None, None, None),
    "released and cleared": release_and_clear,
}
USES: dict[str, Callable[[BufferPool, Buffer], object]] = {
    "tensor": lambda _pool, buffer: buffer.tensor,
    "release": lambda _pool, buffer: buffer.release(),
    "pool_release": lambda pool, buffer: pool.release(buffer),
}


@pytest.mark.parametrize("taken_again", [False, True])
@pytest.mark.parametrize("use", sorted(USES))
@pytest.mark.parametrize("end", sorted(ENDS))
def test_stale_buffers(end: str, use: str, taken_again: bool) -> None:
    pool = make()
    stale = pool.alloc((6,), torch.float32)
    ENDS[end](pool, stale)
    taken = [pool.alloc((6,), torch.float32)] if taken_again else []
    for buffer in taken:
        mark(buffer, 5)
    before = pool.stats()
    for uses in (1, 2, 3):
        with pytest.raises(StaleBufferError, match=r"\d"):
            USES[use](pool, stale)
        assert pool.stats() == {**before, "stale_uses": uses}
    assert (stale.nbytes, stale.capacity) == (24, 32)
    assert all(holds(buffer, 5) for buffer in taken)
    assert are_apart([*taken, *(pool.alloc((6,), torch.float32) for _ in range(3))])


def test_a_buffer_stays_stale_however_often_its_memory_is_used() -> None:
    pool = make()
    stale = pool.alloc_bytes(8)
    where = address(stale)
    stale.release()
    for _ in range(70_000):
        pool.alloc_bytes(8).release()
    last = pool.alloc_bytes(8)
    assert address(last) == where
    with pytest.raises(StaleBufferError):
        stale.release()
    with pytest.raises(StaleBufferError):
        _ = stale.tensor
    assert in_use(pool) == (1, 8)


@pytest.mark.parametrize("bad", [None, 3, "buffer", object(), torch.zeros(3), [1]])
def test_release_rejects_non_buffers(bad: Any) -> None:  # noqa: ANN401
    pool = make()
    pool.alloc_bytes(8)
    before = pool.stats()
    with pytest.raises(TypeError):
        pool.release(bad)
    assert pool.stats() == before


def test_a_buffer_of_another_pool() -> None:
    pool, other = make(), make()
    mine, theirs = pool.alloc_bytes(64), other.alloc_bytes(64)
    before = pool.stats(), other.stats()
    with pytest.raises(IndexOwnershipError):
        pool.release(theirs)
    with pytest.raises(IndexOwnershipError):
        other.release(mine)
    assert (pool.stats(), other.stats()) == before
    assert are_apart([mine, theirs])
    # It goes where it came from.
    theirs.release()
    mine.release()
    assert (free(pool), free(other)) == ((1, 64), (1, 64))


def test_a_buffer_of_a_pool_that_is_gone() -> None:
    buffer, pool = make().alloc_bytes(64), make()
    with pytest.raises(IndexOwnershipError):
        pool.release(buffer)
    buffer.tensor.fill_(3)
    assert holds(buffer, 3)
    buffer.release()
    with pytest.raises(StaleBufferError):
        buffer.release()
    assert set(pool.stats().values()) == {0}


# with


def test_leaving_a_buffer_releases_it() -> None:
    pool = make()
    buffer = pool.alloc_bytes(64)
    with buffer as same:
        assert same is buffer
        assert in_use(pool) == (1, 64)
    assert (free(pool), in_use(pool)) == ((1, 64), (0, 0))
    assert pool.stats()["stale_uses"] == 0


def test_leaving_a_buffer_by_an_exception_releases_it() -> None:
    pool = make()
    with pytest.raises(KeyError, match="mine"), pool.alloc_bytes(64):
        raise KeyError("mine")
    assert free(pool) == (1, 64)


def test_leaving_a_buffer_after_a_reset_does_nothing() -> None:
    pool = make()
    with pool.alloc_bytes(64):
        pool.reset()
        held = pool.alloc_bytes(64)
        mark(held, 3)
    assert (free(pool), in_use(pool)) == ((0, 0), (1, 64))
    assert pool.stats()["stale_uses"] == 0
    assert holds(held, 3)


def test_a_step_resets_at_its_end() -> None:
    pool = make()
    before = pool.alloc_bytes(32)
    with pool.step() as same:
        assert same is pool
        buffers = [pool.alloc_bytes(64) for _ in range(3)]
        buffers[1].release()
        assert in_use(pool) == (3, 160)
    assert (free(pool), in_use(pool)) == ((4, 224), (0, 0))
    for buffer in (before, *buffers):
        with pytest.raises(StaleBufferError):
            _ = buffer.tensor


def test_a_step_that_ends_by_an_exception_resets() -> None:
    pool = make()
    with pytest.raises(KeyError, match="mine"), pool.step():
        pool.alloc_bytes(64)
        raise KeyError("mine")
    assert (free(pool), in_use(pool)) == ((1, 64), (0, 0))


def test_a_step_that_is_not_entered_resets_nothing() -> None:
    pool = make()
    step = pool.step()
    pool.alloc_bytes(64)
    del step
    assert in_use(pool) == (1, 64)


def test_a_step_within_a_step() -> None:
    pool = make()
    with pool.step():
        pool.alloc_bytes(64)
        with pool.step():
            pool.alloc_bytes(64)
        assert in_use(pool) == (0, 0)
        assert are_apart([pool.alloc_bytes(64) for _ in range(3)])
    assert free(pool) == (3, 192)


# clear


def test_clear_gives_free_memory_back() -> None:
    pool = make()
    held = pool.alloc_bytes(100)
    mark(held, 3)
    for size in (100, 1000, 10):
        pool.alloc_bytes(size).release()
    assert pool.clear() is None  # type: ignore[func-returns-value]
    assert (free(pool), in_use(pool)) == ((0, 0), (1, 128))
    assert pool.stats()["bytes"] == 128
    assert holds(held, 3)
    new = pool.alloc_bytes(100)
    assert are_apart([held, new])
    # It is new memory, so it is zeroed.
    assert not new.tensor.any()
    held.release()
    assert free(pool) == (1, 128)


def test_a_tensor_keeps_memory_that_was_cleared() -> None:
    pool = make()
    buffer = pool.alloc((1000,), torch.int32)
    tensor = buffer.tensor
    tensor.fill_(3)
    buffer.release()
    pool.clear()
    others = [pool.alloc((1000,), torch.int32) for _ in range(8)]
    for other in others:
        assert not other.tensor.any()
        other.tensor.fill_(9)
    assert tensor.eq(3).all()
    tensor.fill_(4)
    assert all(other.tensor.eq(9).all() for other in others)


@devices.cpu_only
@needs_statm
def test_cleared_memory_goes_back_to_the_system() -> None:
    pool = make()
    for _ in range(4):
        mark(pool.alloc_bytes(16 * MIB), 1)
    pool.reset()
    before = resident_bytes()
    pool.clear()
    assert before - resident_bytes() > 48 * MIB


# register_existing


def outside(size: int = 1000) -> torch.Tensor:
    """What somebody else allocated, in host memory."""
    return torch.arange(size, dtype=torch.int32)


def test_what_is_registered_is_neither_owned_nor_recycled() -> None:
    pool, weights = make(), outside(1024)
    assert pool.register_existing(weights) is None  # type: ignore[func-returns-value]
    pool.register_existing(tensor=weights)
    assert (*free(pool), *in_use(pool), pool.high_water_bytes) == (0, 0, 0, 0, 0)
    first, end = weights.data_ptr(), weights.data_ptr() + 4096
    for _ in range(3):
        for _ in range(8):
            buffer = pool.alloc_bytes(4096)
            mark(buffer, 255)
            assert not first - 4096 < address(buffer) < end
        pool.reset()
    pool.clear()
    assert torch.equal(weights, outside(1024))
    del pool
    assert torch.equal(weights, outside(1024))
    weights.fill_(3)
    assert weights.eq(3).all()


OUTSIDE: dict[str, Callable[[], Any]] = {
    "parameter": lambda: torch.nn.Parameter(torch.ones(100)),
    "numpy": lambda: np.ones(100),
    "empty": lambda: torch.empty(0),
    "no_elements": lambda: torch.empty(3, 0, 2),
    "scalar": lambda: torch.tensor(1.5),
    "half": lambda: torch.ones(7, dtype=torch.bfloat16),
    "ours": lambda: kvpool.KVPool(16, 1, 1, 4, "cpu", "float32").k_buffer[0],
    "pageable": lambda: kvpool.KVPool(16, 1, 1, 4, "cpu", "float32", pin_memory=False).k_buffer[0],
}


@pytest.mark.parametrize("kind", sorted(OUTSIDE))
def test_everything_that_can_be_registered(kind: str) -> None:
    pool, tensor = make(), OUTSIDE[kind]()
    pool.register_existing(tensor)
    once = pool.stats()
    pool.register_existing(tensor)
    assert pool.stats() == once
    assert (once["capacity"], once["bytes"], once["stale_uses"]) == (0, 0, 0)


@pytest.mark.parametrize("bad", [None, 3, "weights", [1.0, 2.0], (1,), object()], ids=repr)
def test_register_existing_rejects_non_tensors(bad: Any) -> None:  # noqa: ANN401
    pool = make()
    with pytest.raises(TypeError):
        pool.register_existing(bad)
    assert set(pool.stats().values()) == {0}


def test_register_existing_rejects_tensors_with_gaps() -> None:
    pool, weights = make(), outside()
    for view in (weights[::2], weights.view(10, 100)[:, :50], weights.view(10, 100)[::2]):
        with pytest.raises(ConfigError):
            pool.register_existing(view)
    assert set(pool.stats().values()) == {0}


def test_the_pool_keeps_what_it_registered() -> None:
    pool, array = make(), np.ones(1000)
    gone = weakref.ref(array)
    pool.register_existing(torch.from_numpy(array))
    del array
    assert gone() is not None
    pool.reset()
    pool.clear()
    assert gone() is not None
    del pool
    assert gone() is None


@pytest.mark.cuda
@devices.cpu_only
def test_a_pool_of_the_host_registers_nothing_of_a_device() -> None:
    pool = make()
    with pytest.raises(ConfigError, match=r"cuda:0"):
        pool.register_existing(torch.zeros(4, device="cuda"))
    assert set(pool.stats().values()) == {0}


@cuda_only
def test_device_memory_is_registered_without_the_driver(driver: Driver) -> None:
    pool = make()
    weights = pool.alloc((100,), torch.int32).tensor
    foreign = kvpool._kvpool._zeros([100], "int32", "cuda")
    driver.run()
    locked = driver.locked_bytes()
    pool.register_existing(foreign)
    once = pool.stats()
    pool.register_existing(foreign)
    assert pool.stats() == once
    assert driver.locked_bytes() == locked
    assert driver.calls("cuMemHostRegister_v2") == 0
    assert weights.shape == (100,)


@cuda_only
def test_memory_of_another_device_is_refused(driver: Driver) -> None:
    pool = make()
    foreign = kvpool._kvpool._zeros([100], "uint8", "cuda:1")
    before = pool.stats(), driver.locked_bytes()
    with pytest.raises(ConfigError, match=r"(?s)(cuda:1.*cuda:0|cuda:0.*cuda:1)"):
        pool.register_existing(foreign)
    assert (pool.stats(), driver.locked_bytes()) == before


@pytest.mark.cuda
def test_host_memory_is_locked_once_until_the_pool_goes(driver: Driver) -> None:
    pool, weights = make(), outside()
    before = driver.locked_bytes()
    pool.register_existing(weights)
    assert driver.locked_bytes() - before >= 4000
    assert pool.stats()["registered_bytes"] >= 4000
    locked, stats = driver.locked_bytes(), pool.stats()
    driver.reset_calls()
    for again in (weights, weights.view(10, 100), weights.view(torch.uint8), weights.detach()):
        pool.register_existing(again)
    assert (driver.locked_bytes(), pool.stats()) == (locked, stats)
    other = outside(500)
    pool.register_existing(other)
    assert driver.locked_bytes() - locked >= 2000
    pool.alloc_bytes(100)
    pool.reset()
    pool.clear()
    assert driver.locked_bytes() - locked >= 2000
    del weights
    assert driver.locked_bytes() - locked >= 2000
    del pool
    assert driver.locked_bytes() == before
    assert torch.equal(other, outside(500))


@pytest.mark.cuda
def test_parts_of_a_storage_are_not_locked(driver: Driver) -> None:
    pool, weights, before = make(), outside(), driver.locked_bytes()
    for part in (weights[:100], weights[100:]):
        with pytest.raises(ConfigError, match="a part of its allocation"):
            pool.register_existing(part)
    assert (driver.locked_bytes(), pool.stats()["registered_bytes"]) == (before, 0)
    pool.register_existing(weights)
    pool.register_existing(weights[:100])  # page-locked already, as all of it is


@pytest.mark.cuda
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_pools_lock_the_same_memory(driver: Driver, order: tuple[int, int]) -> None:
    weights = outside()
    before = driver.locked_bytes()
    pools: list[BufferPool | None] = [make(), make()]
    for pool in pools:
        assert pool is not None
        pool.register_existing(weights)
    del pool
    for i in order:
        pools[i] = None
        assert torch.equal(weights, outside())
    assert driver.locked_bytes() == before


@pytest.mark.cuda
def test_memory_that_is_locked_already_stays_so(driver: Driver) -> None:
    kv = kvpool.KVPool(1000, 1, 2, 8, "cpu", torch.float32)
    locked = driver.locked_bytes()
    pool = make()
    pool.register_existing(kv.k_buffer[0])
    del pool
    assert driver.locked_bytes() == locked
    kv.k_buffer[0].fill_(3)
    assert kv.k_buffer[0].eq(3).all()


STILL_LOCKED: list[torch.Tensor] = []
"""What the driver failed to unlock: its addresses must not be used again."""


@pytest.mark.cuda
@pytest.mark.parametrize("code", [LAUNCH_FAILED, OUT_OF_MEMORY])
def test_a_lock_that_fails_leaves_nothing(driver: Driver, code: int) -> None:
    pool, weights = make(), outside()
    before = pool.stats(), driver.locked_bytes()
    driver.fail("cuMemHostRegister_v2", code=code)
    with pytest.raises((DriverError, OutOfMemoryError), match=r"cuMemHostRegister|\d"):
        pool.register_existing(weights)
    assert driver.planned() == 0
    assert (pool.stats(), driver.locked_bytes()) == before
    pool.register_existing(weights)
    assert driver.locked_bytes() - before[1] >= 4000
    driver.fail("cuMemHostUnregister")
    STILL_LOCKED.append(weights)
    # A pool that goes tells nobody.
    del pool
    assert driver.planned() == 0


@cuda_only
@pytest.mark.parametrize(("env", "locked"), [({}, True), ({"KVPOOL_NO_RESIDENCY": "1"}, False)])
def test_page_locking_can_be_turned_off(
    driver: Driver, run_snippet: RunSnippet, env: dict[str, str], locked: bool
) -> None:
    assert driver.calls() == 0
    code = """
        import ctypes, kvpool, numpy
        soft = ctypes.CDLL(None)
        soft.soft_locked_bytes.restype = ctypes.c_long
        for device in ("cuda", "cpu"):
            pool = kvpool.BufferPool(device)
            before = soft.soft_locked_bytes()
            weights = numpy.ones(1 << 20, numpy.uint8)
            pool.register_existing(weights)
            print(soft.soft_locked_bytes() - before >= 1 << 20, soft.soft_locked_bytes() == before)
            del pool
            print(soft.soft_locked_bytes() == before)
    """
    lines = run_snippet(code, hidden=["torch"], env=env).splitlines()
    assert lines == [f"{locked} {not locked}", "True"] * 2


# Memory


def test_a_buffer_outlives_its_pool() -> None:
    pool = make()
    buffer = pool.alloc((100,), torch.int32)
    stale = pool.alloc((100,), torch.int32)
    stale.release()
    buffer.tensor.fill_(3)
    del pool
    gc.collect()
    assert buffer.tensor.eq(3).all()
    assert (buffer.nbytes, stale.nbytes) == (400, 400)
    with pytest.raises(StaleBufferError):
        _ = stale.tensor
    buffer.release()
    with pytest.raises(StaleBufferError):
        _ = buffer.tensor


def test_a_step_outlives_its_pool() -> None:
    pool = make()
    buffer = pool.alloc_bytes(8)
    step = pool.step()
    del pool
    gc.collect()
    with step:
        pass
    with pytest.raises(StaleBufferError):
        _ = buffer.tensor


@devices.cpu_only
@pytest.mark.parametrize("how", ["tensor", "released", "registered"])
def test_a_pool_whose_tensors_know_it_is_collected(how: str) -> None:
    class Owner:
        pass

    pool, owner = make(), Owner()
    buffer = pool.alloc((4,), torch.float32)
    tensor: Any = torch.zeros(4) if how == "registered" else buffer.tensor
    tensor.pool, tensor.owner = pool, owner
    if how == "registered":
        pool.register_existing(tensor)
    elif how == "released":
        buffer.release()
    gone = weakref.ref(owner)
    del pool, owner, buffer, tensor
    gc.collect()
    assert gone() is None


# The loop of an engine


def sizes_of_step(step: int) -> list[int]:
    """Elements of int32 for every allocation of a step: from small to large, or from large to small.

    The sizes differ from step to step, and the buckets in which they lie are the same in all.
    """
    tops = sorted(16 << i % 11 for i in range(1750))
    sizes = [top // 4 - (step * 7 + i * 3) % (top // 8) for i, top in enumerate(tops)]
    return sizes[::-1] if step % 2 else sizes


@pytest.mark.parametrize("gives_back", [False, True])
def test_the_loop_of_an_engine(gives_back: bool) -> None:
    pool, kept = make(), []
    for step in range(20):
        with pool.step():
            buffers = []
            for i, size in enumerate(sizes_of_step(step)):
                buffers.append(pool.alloc((size,), torch.int32))
                if gives_back and i % 64 == 63:
                    assert are_apart(buffers)
                    for buffer in buffers[::3]:
                        buffer.release()
                    del buffers[::3]
            assert are_apart(buffers)
        kept.append({**pool.stats(), "high_water": 0, "high_water_bytes": 0})
    assert all(stats == kept[2] for stats in kept[2:])
    assert pool.stats()["capacity"] <= 1750


@cuda_only
def test_the_loop_of_an_engine_makes_no_driver_call(driver: Driver) -> None:
    pool = make()
    for step in range(8):
        out = driver.device_bytes()
        driver.reset_calls()
        tensors = [pool.alloc((elements,), torch.int32).tensor for elements in sizes_of_step(step)]
        pool.reset()
        assert len(tensors) == 1750
        assert step < 2 or (driver.calls(), driver.device_bytes()) == (0, out)


# Threads


def test_a_buffer_is_released_once_however_many_threads_try() -> None:
    pool = make()
    buffers = [pool.alloc_bytes(64) for _ in range(200)]
    released = [0] * THREADS

    def work(number: int) -> None:
        for i in range(200):
            try:
                buffers[(i + number * 25) % 200].release()
            except StaleBufferError:
                continue
            released[number] += 1

    together(work)
    assert sum(released) == 200
    assert pool.stats()["stale_uses"] == 7 * 200
    assert (free(pool), in_use(pool)) == ((200, 200 * 64), (0, 0))
    assert are_apart([pool.alloc_bytes(64) for _ in range(201)])


def test_resets_while_others_allocate() -> None:
    pool = make()

    def work(number: int) -> None:
        for i in range(300):
            if number == 0:
                pool.reset()
                continue
            buffer = pool.alloc_bytes(1 + (number * 31 + i * 7) % 500)
            try:
                assert buffer.tensor.numel() == buffer.nbytes
                if i % 2:
                    buffer.release()
            except StaleBufferError:
                pass
            stats = pool.stats()
            assert stats["available"] + stats["in_use"] == stats["capacity"]
            assert stats["free_bytes"] + stats["in_use_bytes"] == stats["bytes"]
            assert stats["in_use"] <= stats["high_water"]

    together(work)
    pool.reset()
    stats = pool.stats()
    assert (stats["in_use"], stats["available"]) == (0, stats["capacity"])
    held = [pool.alloc_bytes(1 << i % 10) for i in range(300)]
    assert are_apart(held)


def test_registering_by_many_threads() -> None:
    pool, weights = make(), [outside(100 + i) for i in range(20)]

    def work(number: int) -> None:
        for i in range(20):
            pool.register_existing(weights[(i + number) % 20])

    together(work)
    once = pool.stats()
    for tensor in weights:
        pool.register_existing(tensor)
    assert pool.stats() == once


# The driver


@cuda_only
def test_a_new_buffer_costs_one_allocation_and_a_used_one_nothing(driver: Driver) -> None:
    pool = make()
    before = driver.device_bytes()
    driver.reset_calls()
    buffer = pool.alloc_bytes(1000)
    assert driver.calls("cuMemAlloc_v2") == 1
    assert driver.device_bytes() - before >= 1024
    driver.reset_calls()
    for _ in range(10):
        buffer.release()
        buffer = pool.alloc((250,), torch.float32)
        assert buffer.tensor.numel() == 250
        pool.reset()
        with pool.step():
            for buffer in pool.alloc_batch([((500,), torch.bfloat16)]):
                assert buffer.nbytes == 1000
        with pytest.raises(StaleBufferError):
            _ = buffer.tensor
        buffer = pool.alloc_bytes(1024)
        pool.stats()
    assert driver.calls() == 0


@cuda_only
def test_new_memory_is_zeroed_on_the_stream_that_is_current(driver: Driver) -> None:
    pool = make()
    driver.run()
    stream = driver.stream()
    with on_stream(stream):
        buffer = pool.alloc_bytes(1000)
    assert driver.pending(stream) == driver.pending() > 0
    assert [driver.calls(name) for name in WAITS] == [0] * 3
    driver.run(stream)
    assert not buffer.tensor.cpu().any()


@cuda_only
def test_the_same_stream_uses_a_buffer_again_at_once(driver: Driver) -> None:
    pool, stream = make(), driver.stream()
    driver.set_patience(NEVER)
    with on_stream(stream):
        first = pool.alloc_bytes(1000)
        where = address(first)
        assert driver.pending(stream) > 0
        driver.reset_calls()
        first.release()
        assert address(pool.alloc_bytes(1000)) == where
        pool.reset()
        assert address(pool.alloc_bytes(1000)) == where
    assert driver.calls() == 0
    assert driver.pending(stream) > 0


@cuda_only
@pytest.mark.parametrize("by", ["release", "reset"])
def test_another_stream_uses_a_buffer_again_after_an_event(driver: Driver, by: str) -> None:
    pool, first, second = make(), driver.stream(), driver.stream()
    driver.set_patience(NEVER)
    with on_stream(first):
        buffer = pool.alloc_bytes(1000)
        where = address(buffer)
        driver.reset_calls()
        if by == "release":
            buffer.release()
        else:
            pool.reset()
    assert driver.calls() == 0
    with on_stream(second):
        again = pool.alloc_bytes(1000)
    assert address(again) == where
    assert [driver.calls(name) for name in EVENTS] == [1, 1]
    assert [driver.calls(name) for name in (*WAITS, "cuMemAlloc_v2", "cuMemFree_v2")] == [0] * 5
    # The host has waited for nothing, and the second stream waits for the first.
    assert driver.pending(first) > 0
    driver.run(second)
    assert driver.pending(first) == 0
    # From here on it belongs to the second stream.
    driver.reset_calls()
    with on_stream(second):
        again.release()
        again = pool.alloc_bytes(1000)
        assert driver.calls() == 0
        again.release()
    with on_stream(first):
        assert address(pool.alloc_bytes(1000)) == where
    assert [driver.calls(name) for name in EVENTS] == [1, 1]


@cuda_only
@pytest.mark.parametrize("name", [*EVENTS, "cuCtxGetCurrent"])
@pytest.mark.parametrize("batch", [False, True])
def test_a_change_of_streams_that_fails_loses_nothing(driver: Driver, name: str, batch: bool) -> None:
    pool, first, second = make(), driver.stream(), driver.stream()
    with on_stream(first):
        buffers = [pool.alloc_bytes(64) for _ in range(3)]
        where = addresses(buffers)
        pool.reset()
    before = pool.stats()
    driver.fail(name)
    with on_stream(second), pytest.raises(DriverError, match=name):
        if batch:
            pool.alloc_batch([((64,), torch.uint8)] * 3)
        else:
            pool.alloc_bytes(64)
    assert driver.planned() == 0
    assert pool.stats() == before
    with on_stream(first):
        assert sorted(addresses(pool.alloc_bytes(64) for _ in range(3))) == sorted(where)
        pool.reset()
    with on_stream(second):
        held = [pool.alloc_bytes(64) for _ in range(4)]
    assert sorted(addresses(held[:3])) == sorted(where)
    assert are_apart(held)


@cuda_only
def test_work_of_two_streams_on_one_buffer_keeps_its_order() -> None:
    pool = make()
    streams = [torch.cuda.Stream() for _ in range(2)]  # type: ignore[no-untyped-call]
    with torch.cuda.stream(streams[0]):
        buffer = pool.alloc((1 << 12,), torch.int32)
        where = address(buffer)
        if not is_preloaded():
            torch.cuda._sleep(BUSY_CYCLES)  # type: ignore[no-untyped-call]
        buffer.tensor.fill_(1)
        buffer.release()
    with torch.cuda.stream(streams[1]):
        again = pool.alloc((1 << 12,), torch.int32)
        assert address(again) == where
        again.tensor.fill_(2)
    torch.cuda.synchronize()
    assert again.tensor.eq(2).all()


@cuda_only
def test_free_memory_is_given_back_before_memory_runs_out(driver: Driver) -> None:
    pool = make()
    driver.set_capacity(driver.device_bytes() + MIB)
    held, given = pool.alloc_bytes(MIB // 4), pool.alloc_bytes(MIB // 2)
    mark(held, 3)
    given.release()
    # A quarter is free, and a half would be.
    with pytest.raises(OutOfMemoryError, match="1048576"):
        pool.alloc_bytes(MIB)
    assert in_use(pool) == (1, MIB // 4)
    assert holds(held, 3)
    with pytest.raises(OutOfMemoryError, match="524288"):
        pool.alloc_batch([((MIB // 2,), torch.int8), ((100,), torch.int8), ((MIB // 2,), torch.int8)])
    assert in_use(pool) == (1, MIB // 4)
    assert pool.stats()["high_water"] == 2
    small = [pool.alloc_bytes(1000) for _ in range(8)]
    for buffer in (held, *small):
        buffer.release()
    whole = pool.alloc_bytes(MIB)
    assert (free(pool), in_use(pool)) == ((0, 0), (1, MIB))
    with pytest.raises(OutOfMemoryError, match="64"):
        pool.alloc_bytes(64)
    whole.release()
    assert in_use(pool) == (0, 0)
    pool.alloc_bytes(64)
    assert pool.in_use_count == 1


@cuda_only
def test_device_memory_comes_back(driver: Driver) -> None:
    before = driver.device_bytes(), driver.locked_bytes()
    pool = make()
    tensors = [pool.alloc_bytes(size).tensor for size in (1000, 5000, 100)]
    tensors[1].fill_(7)
    pool.alloc_bytes(1 << 20).release()
    out = driver.device_bytes()
    pool.clear()
    assert out - driver.device_bytes() >= MIB
    # What is cleared stays for those who have a tensor of it.
    pool.reset()
    pool.clear()
    assert driver.device_bytes() - before[0] >= 6100
    assert tensors[1].eq(7).all()
    tensors[2:] = tensors[:1] = []
    assert driver.device_bytes() - before[0] < 16384
    pool.alloc_bytes(100)
    del pool
    assert tensors[0].eq(7).all()
    assert driver.device_bytes() > before[0]
    tensors.clear()
    assert (driver.device_bytes(), driver.locked_bytes()) == before


@cuda_only
def test_every_driver_call_may_fail(driver: Driver) -> None:
    pools: list[BufferPool] = []
    weights, other = outside(), driver.stream()

    def work() -> None:
        pools[:] = [make()]
        pool = pools[0]
        first = pool.alloc((8,), torch.float32)
        pool.alloc_batch([((100,), torch.int8), ((3, 3), torch.int64)])
        assert first.tensor.numel() == 8
        first.release()
        with on_stream(other):
            pool.alloc((8,), torch.float32)
            pool.alloc_bytes(1000)
            pool.reset()
        pool.register_existing(weights)
        pool.alloc_batch([((8,), torch.float32), ((100,), torch.int8), ((5,), torch.int8)])
        pool.reset()
        pool.clear()
        pool.alloc_bytes(8)

    failures = 0
    for error in each_failure(driver, work, pools):
        failures += error is not None
        if pools:
            check_pool(pools[0], is_over=error is None)
    assert failures > 10


def check_pool(pool: BufferPool, *, is_over: bool) -> None:
    """Whatever failed in it, a pool counts right and hands out no memory twice."""
    stats = pool.stats()
    assert stats["available"] + stats["in_use"] == stats["capacity"]
    assert stats["free_bytes"] + stats["in_use_bytes"] == stats["bytes"]
    assert not is_over or stats["in_use"] == 1
    pool.reset()
    assert pool.in_use_count == 0
    held = [pool.alloc_bytes(size) for size in (32, 32, 128, 128, 8, 8, 1024, 72) for _ in range(2)]
    assert are_apart(held)
    assert pool.in_use_count == 16
    pool.reset()
    pool.clear()
    assert pool.stats()["capacity"] == 0
