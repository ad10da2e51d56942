"""BufferPool: calls of the driver, streams, device memory, and failures."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from buffer_pools import address, addresses, are_apart, free, holds, in_use, make, mark, outside
from common import MIB, NEVER, WAITS, cuda_only, each_failure, on_stream
from software import is_preloaded

from kvpool import BufferPool, DriverError, OutOfMemoryError, StaleBufferError

if TYPE_CHECKING:
    from software import Driver


EVENTS = ("cuEventRecord", "cuStreamWaitEvent")
# About 0.05 s on a GPU of 2 GHz: longer than what a test enqueues behind it takes on the host.
BUSY_CYCLES = 100_000_000

pytestmark = pytest.mark.usefixtures("device")


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
    before = driver.device_bytes(), driver.page_locked_bytes()
    pool = make()
    tensors = [pool.alloc_bytes(size).tensor for size in (1000, 5000, 100)]
    tensors[1].fill_(7)
    pool.alloc_bytes(1 << 20).release()
    out = driver.device_bytes()
    pool.clear()
    assert out - driver.device_bytes() >= MIB
    # Tensors keep their memory after a clear.
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
    assert (driver.device_bytes(), driver.page_locked_bytes()) == before


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
