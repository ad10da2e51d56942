"""BufferPool: buckets, reuse, batches, steps, memory, threads, and the loop of an engine."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any

import devices
import numpy as np
import pytest
import torch
from buffer_pools import address, addresses, are_apart, flat, free, holds, in_use, make, mark, outside
from common import MIB, STORAGE, THREADS, cuda_only, needs_statm, resident_bytes, together

from kvpool import Buffer, BufferPool, ConfigError, OutOfMemoryError, StaleBufferError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from software import Driver

    from kvpool.typing import DTypeLike

DTYPES = [*STORAGE, torch.float64, torch.int32, torch.int64, torch.bool]

pytestmark = pytest.mark.usefixtures("device")


# Construction


def test_capacities_follow_the_rounding() -> None:
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


def test_alloc_bytes_gives_zeros_in_a_rounded_capacity() -> None:
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
