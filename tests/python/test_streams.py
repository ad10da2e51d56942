"""Memory and streams: what is used again waits for all that use it, what goes back waits for nobody else."""

from __future__ import annotations

import ctypes
import gc
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from common import on_stream, some, turns_of_others
from torch.utils._python_dispatch import _disable_current_modes

import kvpool
from kvpool import (
    BufferPool,
    ChunkPool,
    ConfigError,
    DriverError,
    KVPool,
    PagePool,
    ReqToTokenPool,
    TokenToKVPoolAllocator,
    Workspace,
    WorkspaceExhaustedError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shared_fixtures import RunSnippet
    from software import Driver

pytestmark = pytest.mark.cuda


@pytest.fixture(autouse=True)
def _alone(driver: Driver) -> Iterator[None]:
    """Nothing of other tests goes back to the driver meanwhile."""
    gc.collect()
    driver.run()
    yield
    driver.run()


def make_allocator(size: int = 64) -> TokenToKVPoolAllocator:
    return TokenToKVPoolAllocator(size, "cuda", need_sort=False)


def ones(count: int) -> torch.Tensor:
    return torch.ones(count, 1, 4).cuda()


def reuse(allocator: TokenToKVPoolAllocator) -> None:
    """Has the allocator write other slots to positions that nobody has: their order turns round."""
    allocator.clear()
    for _ in range(50):
        allocator.free(some(allocator.alloc(27)))


# A reader on a second stream


def test_slots_that_a_second_stream_reads_are_not_overwritten(driver: Driver) -> None:
    allocator, kv = make_allocator(), KVPool(64, 1, 1, 4, "cuda", torch.float32)
    values = ones(8)
    side = driver.stream()
    slots = some(allocator.alloc(64))
    driver.run()
    with on_stream(side):
        kv.set_kv_buffer(0, slots[:8], values, values)
    del slots
    reuse(allocator)
    driver.run()
    assert kv.k_buffer[0].cpu()[:, 0, 0].nonzero().flatten().tolist() == list(range(1, 9))


def test_a_kernel_of_others_on_a_second_stream_is_noted_by_hand(driver: Driver) -> None:
    pinned = KVPool(8, 1, 1, 64, "cpu", torch.float32).k_buffer[0][0].view(torch.int32)
    for noted in (True, False):
        allocator, side = make_allocator(), driver.stream()
        slots = some(allocator.alloc(64))
        driver.run()
        # A copy of which kvpool knows nothing.
        driver.copy_to_host(pinned, slots, side)
        assert driver.pending(side) == 1
        if noted:
            allocator.used_on(slots, side)
            allocator.used_on(slots[2:5], torch.cuda.ExternalStream(side))  # type: ignore[no-untyped-call]
        del slots
        reuse(allocator)
        driver.run()
        # Without the note the reader finds other slots: there is something to note.
        assert (pinned.flatten().tolist() == list(range(1, 65))) is noted


def test_used_on_rejects_other_tensors() -> None:
    allocator, other = make_allocator(), make_allocator()
    for tensor in (some(other.alloc(2)), ones(2), torch.ones(2)):
        with pytest.raises(ConfigError, match="does not come from this allocator"):
            allocator.used_on(tensor)
    with pytest.raises(TypeError):
        allocator.used_on([1, 2])  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        allocator.used_on(some(allocator.alloc(2)), "stream")  # type: ignore[arg-type]


def test_slots_in_host_memory_have_no_streams() -> None:
    allocator = TokenToKVPoolAllocator(8, "cpu")
    allocator.used_on(some(allocator.alloc(2)))


def test_a_freed_tensor_lives_until_its_values_were_read(driver: Driver) -> None:
    allocator, kv = make_allocator(), KVPool(8, 1, 1, 4, "cuda", torch.float32)
    assert kv.k_buffer[0].is_cuda
    slots = some(allocator.alloc(4)).to(torch.int64)
    driver.run()
    side = driver.stream()
    with on_stream(side):
        allocator.free(slots)
    before = driver.device_bytes()
    del slots
    gc.collect()
    # PyTorch would hand the memory to work on its own stream, which does not come after the copy.
    assert driver.device_bytes() == before
    driver.run()
    assert allocator.stats()["available"] == 64
    assert set(some(allocator.alloc(64)).tolist()) == set(range(1, 65))


def test_a_freed_tensor_goes_without_locks(driver: Driver) -> None:
    for end in ("alloc", "clear"):
        allocator, told = make_allocator(), []
        slots = some(allocator.alloc(4)).to(torch.int64)
        allocator.free(slots)
        gone = weakref.ref(slots, lambda _: told.append(allocator.available_size()))  # noqa: B023
        del slots
        assert gone() is not None
        driver.run()
        if end == "alloc":
            assert some(allocator.alloc(64)).numel() == 64
        else:
            allocator.clear()
        assert gone() is None
        assert len(told) == 1


def test_a_consumer_that_names_its_stream_is_waited_for(driver: Driver, run_snippet: RunSnippet) -> None:
    assert driver.calls("cuInit") >= 0
    code = """
        import ctypes, kvpool
        soft = ctypes.CDLL(None)
        soft.soft_stream.restype = ctypes.c_size_t
        side = ctypes.c_size_t(soft.soft_stream(0))
        allocator = kvpool.TokenToKVPoolAllocator(64, "cuda", need_sort=False)
        pinned = kvpool.KVPool(8, 1, 1, 64, "cpu", "float32")
        slots = allocator.alloc(64)
        capsule = slots.__dlpack__(stream=side.value, max_version=(1, 1))
        target, source = pinned.k_buffer[0].data_ptr(), slots.data_ptr()
        context, copy = ctypes.c_size_t(), soft.cuMemcpyDtoHAsync_v2
        assert soft.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
        assert soft.cuCtxPushCurrent_v2(context) == 0
        assert copy(ctypes.c_void_p(target), ctypes.c_uint64(source), ctypes.c_size_t(256), side) == 0
        del slots, capsule
        allocator.clear()
        for _ in range(50):
            allocator.free(allocator.alloc(27))
        soft.soft_run_all()
        print(*(ctypes.c_int32 * 64).from_address(target))
    """
    assert run_snippet(code, hidden=["torch"]).split() == [str(slot) for slot in range(1, 65)]


@pytest.mark.parametrize("handle", [12345, None])
def test_rejects_missing_streams_at_once(driver: Driver, handle: int | None) -> None:
    allocator = make_allocator()
    slots = some(allocator.alloc(2))
    gone = handle or driver.stream()
    if handle is None:
        driver.destroy_stream(gone)
    with pytest.raises(DriverError, match=r"there is no stream 0x[0-9a-f]+ on cuda:0"):
        allocator.used_on(slots, gone)
    reuse(allocator)


def test_allocates_after_a_stream_was_destroyed(driver: Driver) -> None:
    allocator, kv = make_allocator(), KVPool(64, 1, 1, 4, "cuda", torch.float32)
    values, side = ones(8), driver.stream()
    slots = some(allocator.alloc(8))
    with on_stream(side):
        kv.set_kv_buffer(0, slots, values, values)
    driver.run()
    driver.destroy_stream(side)
    del slots
    reuse(allocator)


def use_and_drop(allocator: TokenToKVPoolAllocator, kv: KVPool, stream: int) -> None:
    """Has slots written, handed out and read on a stream, and others read there that another stream has."""
    others = some(allocator.alloc(2))
    with on_stream(stream):
        slots = some(allocator.alloc(40))
        kv.move_kv(slots[:8], slots[8:16])
        kv.move_kv(others[:1], others[1:])
    allocator.used_on(others, stream)
    allocator.free(slots)
    allocator.free(others)


def calls_about_streams(driver: Driver, allocator: TokenToKVPoolAllocator) -> list[int]:
    """Calls for the streams that writes of slots come after."""
    driver.reset_calls()
    reuse(allocator)
    return [driver.calls(name) for name in ("cuStreamIsCapturing", "cuEventRecord", "cuStreamWaitEvent")]


def test_streams_without_slots_are_not_asked_again(driver: Driver) -> None:
    allocator, kv = make_allocator(), KVPool(64, 1, 1, 4, "cuda", torch.float32)
    calls = calls_about_streams(driver, allocator)
    assert calls == calls_about_streams(driver, allocator)
    streams = [driver.stream() for _ in range(8)]
    for stream in streams:
        use_and_drop(allocator, kv, stream)
    reuse(allocator)
    driver.run()
    for stream in streams:
        driver.destroy_stream(stream)
    before = driver.uses_of_destroyed()
    assert calls_about_streams(driver, allocator) == calls
    assert driver.uses_of_destroyed() == before, "their work came before that of the stream that wrote last"


def test_a_new_stream_with_the_handle_of_an_old_one_is_no_user(driver: Driver) -> None:
    allocator, kv, old = make_allocator(), KVPool(64, 1, 1, 4, "cuda", torch.float32), driver.stream()
    use_and_drop(allocator, kv, old)
    reuse(allocator)
    driver.run()
    driver.reuse_streams()
    driver.destroy_stream(old)
    # The handles of other tests come first.
    while driver.stream() != old:
        pass
    # A write of slots that had to come after the new stream would be refused.
    driver.begin_capture(old)
    reuse(allocator)
    assert driver.end_capture(old) >= 1


@pytest.mark.parametrize("reader", ["its own", "another"])
def test_a_stream_stays_a_user_while_it_has_slots(driver: Driver, reader: str) -> None:
    pinned = KVPool(8, 1, 1, 64, "cpu", torch.float32).k_buffer[0][0].view(torch.int32)
    allocator, side = make_allocator(200), driver.stream()
    with on_stream(side if reader == "its own" else 0):
        slots = some(allocator.alloc(64))
    if reader == "another":
        allocator.used_on(slots, side)
    expected = list(range(1, 65))
    # The default stream writes other positions, after all that the side stream has to do by now.
    for _ in range(20):
        allocator.free(some(allocator.alloc(27)))
    driver.run()
    driver.copy_to_host(pinned, slots, side)
    del slots
    reuse(allocator)
    driver.run()
    assert pinned.flatten().tolist() == expected


# Memory that goes back


def pools_in_use(driver: Driver, *streams: int) -> list[KVPool]:
    """A pool for each stream, with work there that has not run."""
    pools = [KVPool(8, 1, 1, 4, "cuda", torch.float32) for _ in streams]
    for pool, stream in zip(pools, streams, strict=True):
        with on_stream(stream):
            pool.move_kv([1, 2], [3, 4])
        assert driver.pending(stream) > 0
    return pools


def test_memory_waits_for_its_own_streams_only(driver: Driver) -> None:
    first, second = driver.stream(), driver.stream()
    pools = pools_in_use(driver, first, second)
    before = driver.device_bytes()
    del pools[0]
    assert driver.pending(first) == 0
    assert driver.pending(second) > 0, "nobody waits for the whole device"
    assert driver.device_bytes() < before


@pytest.mark.parametrize("call", ["cuCtxSynchronize", "cuStreamSynchronize"])
def test_a_pool_that_goes_waits_for_no_more_than_events(driver: Driver, call: str) -> None:
    pools = pools_in_use(driver, driver.stream())
    driver.reset_calls()
    pools.clear()
    assert driver.calls(call) == 0
    assert driver.calls("cuEventSynchronize") == driver.calls("wait:sleeps") > 0


def test_memory_of_a_captured_stream_goes_back_later(driver: Driver) -> None:
    before = driver.device_bytes(), driver.page_locked_bytes()
    stream = driver.stream()
    pools = pools_in_use(driver, stream)
    size = pools[0].mem_bytes()
    driver.run()
    driver.begin_capture(stream)
    pools.clear()
    # The rows, and the word in which a kernel says what is wrong.
    assert driver.device_bytes() - before[0] >= size
    assert driver.page_locked_bytes() > before[1]
    assert driver.end_capture(stream) >= 1
    # The next pool that goes takes what was parked along.
    spare = make_allocator(8)
    del spare
    assert (driver.device_bytes(), driver.page_locked_bytes()) == before


def park(driver: Driver, stream: int) -> None:
    """Gives a pool back while `stream` is captured, with work there that has not run."""
    pools = [KVPool(1024, 1, 1, 64, "cuda", torch.float32)]
    with on_stream(stream):
        pools[0].move_kv([1, 2], [3, 4])
    driver.begin_capture(stream)
    kept = driver.device_bytes() - (1 << 17)
    pools.clear()
    assert driver.device_bytes() > kept, "all but its ring"
    assert driver.end_capture(stream) >= 1
    assert driver.pending(stream) > 0


def test_memory_that_is_taken_under_a_lock_waits_for_none_that_is_parked(driver: Driver) -> None:
    stream, buffers = driver.stream(), BufferPool("cuda")
    pages = PagePool(8, 1, device="cuda", grow=1)
    park(driver, stream)
    held = driver.device_bytes()
    driver.reset_calls()
    kept = [buffers.alloc_bytes(64), pages.alloc(), pages.alloc()]
    assert driver.calls("cuEventSynchronize") == 0
    assert driver.pending(stream) > 0
    assert driver.device_bytes() > held
    driver.run(stream)
    kept.append(buffers.alloc_bytes(1 << 10))
    assert driver.calls("cuEventSynchronize") == 0
    assert driver.device_bytes() < held, "the memory is freed once the work is over"


@pytest.mark.parametrize("class_", [KVPool, BufferPool, PagePool])
def test_memory_that_is_parked_is_waited_for_where_there_is_no_other(driver: Driver, class_: type) -> None:
    stream, buffers, pages = driver.stream(), BufferPool("cuda"), PagePool(8, 1, device="cuda", grow=1)
    takes: dict[type, Callable[[], object]] = {
        KVPool: lambda: KVPool(8, 1, 1, 4, "cuda", torch.float32),
        BufferPool: lambda: buffers.alloc_bytes(64),
        PagePool: lambda: (pages.alloc(), pages.alloc()),
    }
    park(driver, stream)
    driver.set_capacity(driver.device_bytes())
    kept = takes[class_]()
    assert driver.pending(stream) == 0
    with pytest.raises(kvpool.OutOfMemoryError, match="bytes asked for"):
        KVPool(1 << 20, 1, 1, 64, "cuda", torch.float32)
    del kept


def test_zeros_that_cannot_be_written_are_not_waited_for_under_a_lock(driver: Driver) -> None:
    buffers, held = BufferPool("cuda"), driver.device_bytes()
    ones(1)
    driver.reset_calls()
    driver.fail("cuMemsetD8Async")
    with pytest.raises(DriverError, match="cuMemsetD8Async failed"):
        buffers.alloc_bytes(64)
    assert driver.calls("cuEventSynchronize") == 0
    driver.run()
    _ = buffers.alloc_bytes(64)
    buffers.clear()
    assert driver.device_bytes() - held <= 1 << 10


def test_memory_goes_back_whatever_became_of_its_stream(driver: Driver) -> None:
    before = driver.device_bytes()
    stream = driver.stream()
    pools = pools_in_use(driver, stream)
    driver.run()
    driver.destroy_stream(stream)
    pools.clear()
    assert driver.device_bytes() == before


@pytest.mark.parametrize(("size", "how"), [(64, "spins"), ((1 << 18) - 1, "spins"), (1 << 18, "sleeps")])
def test_waiting_for_a_long_copy_sleeps(driver: Driver, size: int, how: str) -> None:
    pool = ChunkPool(1, (size,), torch.float32)
    assert pool.wait_page_locked()
    chunk, values = some(pool.allocate()), torch.ones(size).cuda()
    driver.reset_calls()
    chunk.copy_from(values).wait()
    assert driver.calls(f"wait:{how}") == driver.calls("cuEventSynchronize") == 1
    assert chunk.tensor().sum() == size


def test_page_locked_memory_waits_for_copies(driver: Driver) -> None:
    before = driver.page_locked_bytes()
    pool = ChunkPool(2, (64,), torch.float32)
    assert pool.wait_page_locked()
    chunk = some(pool.allocate())
    values = torch.arange(64.0).cuda()
    driver.run()
    stream = driver.stream()
    with on_stream(stream):
        chunk.copy_from(values)
    assert driver.pending(stream) > 0
    del chunk, pool
    gc.collect()
    assert driver.pending(stream) == 0
    assert driver.page_locked_bytes() == before


def test_work_of_others_is_noted_by_hand(driver: Driver) -> None:
    kv = KVPool(8, 1, 1, 4, "cpu", torch.float32)
    target = KVPool(8, 1, 1, 4, "cuda", torch.float32)
    before, stream = driver.page_locked_bytes(), driver.stream()
    driver.copy_to_host(kv.k_buffer[0], target.k_buffer[0], stream)
    for pool, tensor in ((kv, kv.k_buffer[0]), (target, target.k_buffer[0][2:])):
        pool.used_on(tensor, stream)
    with pytest.raises(ConfigError, match="name the stream"):
        kv.used_on(kv.v_buffer[0])
    with pytest.raises(ConfigError, match="no memory of a pool"):
        kv.used_on(torch.zeros(4), stream)
    target.used_on(target.v_buffer[0])
    del kv, target, pool, tensor
    gc.collect()
    # Each waited for the copy, which the driver would have found without its memory else.
    assert driver.pending(stream) == 0
    assert driver.page_locked_bytes() < before


# Streams of another device


class Named:
    """A stream of another framework that says of which device it is, as `device` or as `device_id`."""

    def __init__(self, handle: int, **of: object) -> None:
        self.cuda_stream = handle
        self.__dict__.update(of)


class Id:
    """A device of `cuda.core`."""

    device_id = 1


def second(driver: Driver) -> KVPool:
    """A pool on the second device."""
    pool = KVPool(64, 1, 1, 8, "cuda:1", torch.float16)
    driver.run()
    return pool


@pytest.mark.parametrize("is_default", [False, True])
@pytest.mark.parametrize("form", ["torch", "core", "cupy", "handle"])
def test_page_locked_memory_waits_for_a_stream_of_another_device(
    driver: Driver, form: str, is_default: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert KVPool(8, 1, 1, 8, "cuda:0", torch.float16).mem_bytes()
    other, before = second(driver), driver.page_locked_bytes()
    host = KVPool(64, 1, 1, 8, "cpu", torch.float16)
    handle = 0 if is_default else driver.stream(1)
    target = host.k_buffer[0]
    driver.copy_to_host(target, other.k_buffer[0], handle, device=1)
    if form == "torch":
        # An external stream of handle 0 is a new one in PyTorch up to 2.11.
        make = torch.cuda.default_stream if is_default else partial(torch.cuda.ExternalStream, handle)
        host.used_on(target, make(device="cuda:1"))
    elif form == "core":
        host.used_on(target, Named(handle, device=Id()))
    elif form == "cupy":
        host.used_on(target, Named(handle, device_id=1))
    else:
        # The software driver is there without PyTorch's initialisation.
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        with torch.cuda.device(1):
            host.used_on(target, handle)
    assert driver.pending() == 1
    del host, target
    gc.collect()
    assert (driver.pending(), driver.page_locked_bytes()) == (0, before)


def test_a_stream_that_is_captured_is_named_without_harm(driver: Driver) -> None:
    for device in (0, 1):
        kv, allocator, stream = (
            KVPool(8, 1, 1, 4, "cpu", torch.float32),
            make_allocator(),
            driver.stream(device),
        )
        slots = some(allocator.alloc(2))
        driver.begin_capture(stream)
        named = Named(stream, device_id=device)
        kv.used_on(kv.k_buffer[0], named)
        allocator.used_on(slots, named)
        assert driver.end_capture(stream) >= 1


def test_memory_waits_for_a_device_that_reads_it_from_beside(driver: Driver) -> None:
    pinned = KVPool(64, 1, 1, 8, "cpu", torch.float16)
    for stream in (Named(driver.stream(1), device_id=1), Named(0, device_id=1)):
        pool = KVPool(64, 1, 1, 8, "cuda:0", torch.float16)
        driver.run()
        source = pool.k_buffer[0]
        driver.copy_to_host(pinned.k_buffer[0], source, stream.cuda_stream, device=1)
        pool.used_on(source, stream)
        before = driver.device_bytes()
        del pool, source
        assert driver.pending() == 0
        assert driver.device_bytes() < before


def test_slots_that_another_device_reads_are_not_overwritten(driver: Driver) -> None:
    pinned = KVPool(8, 1, 1, 64, "cpu", torch.float32).k_buffer[0][0].view(torch.int32)
    for handle in (driver.stream(1), 0):
        allocator = make_allocator()
        slots = some(allocator.alloc(64))
        driver.run()
        driver.copy_to_host(pinned, slots, handle, device=1)
        allocator.used_on(slots, Named(handle, device_id=1))
        del slots
        reuse(allocator)
        driver.run()
        assert pinned.flatten().tolist() == list(range(1, 65))


def test_a_stream_is_looked_for_on_its_own_device(driver: Driver) -> None:
    allocator, kv = make_allocator(), KVPool(8, 1, 1, 4, "cpu", torch.float32)
    slots, stream = some(allocator.alloc(2)), driver.stream(1)
    for call, tensor in ((allocator.used_on, slots), (kv.used_on, kv.k_buffer[0])):
        with pytest.raises(DriverError, match=f"there is no stream {stream:#x} on cuda:0"):
            call(tensor, stream)
        with pytest.raises(DriverError, match="there is no stream 0xbad on cuda:1"):
            call(tensor, Named(0xBAD, device_id=1))
        # As CuPy has it for the stream of the device that is current.
        call(tensor, Named(0, device_id=-1, device="cuda:1"))
        call(tensor, Named(stream, device_id=1))
    reuse(allocator)


def test_work_is_not_enqueued_on_a_stream_of_another_device(driver: Driver) -> None:
    chunks = ChunkPool(2, (8,), torch.float32)
    assert chunks.wait_page_locked()
    chunk, tensor = some(chunks.allocate()), torch.arange(8.0).cuda()
    for handle in (driver.stream(1), 0):
        with pytest.raises(ConfigError, match=f"stream {handle:#x} is one of cuda:1; .* on cuda:0"):
            chunk.copy_from(tensor, Named(handle, device_id=1))
    assert chunk.copy_from(tensor, Named(0, device_id=0)).query() is False


# Stream objects, and the default stream of threads


class OfMethod:
    """A stream of `cuda.core`."""

    def __init__(self, answer: object) -> None:
        self.answer = answer

    def __cuda_stream__(self) -> Any:  # noqa: ANN401 - it may be wrong
        return self.answer


class OfProperty(OfMethod):
    """A stream of a library that has the protocol as a property."""

    @property
    def __cuda_stream__(self) -> Any:  # noqa: ANN401 - as above
        return self.answer


def takers() -> list[tuple[Callable[..., object], torch.Tensor]]:
    """The calls that take a stream, with a tensor for each."""
    allocator, kv = make_allocator(), KVPool(8, 1, 1, 4, "cpu", torch.float32)
    chunks = ChunkPool(2, (8,), torch.float32)
    assert chunks.wait_page_locked()
    chunk, tensor = some(chunks.allocate()), torch.arange(8.0).cuda()
    return [
        (allocator.used_on, some(allocator.alloc(2))),
        (kv.used_on, kv.k_buffer[0]),
        (chunk.copy_from, tensor),
        (chunk.copy_to, tensor),
    ]


@pytest.mark.parametrize("form", [OfMethod, OfProperty])
def test_streams_of_other_libraries_are_taken(driver: Driver, form: type[OfMethod]) -> None:
    stream, calls = driver.stream(), takers()
    for call, tensor in calls:
        call(tensor, form((0, stream)))
        with pytest.raises(DriverError, match=r"0xbad|INVALID_HANDLE"):
            call(tensor, form((0, 0xBAD)))
        with pytest.raises(ConfigError, match="has version 1 of the protocol; kvpool knows version 0"):
            call(tensor, form((1, stream)))
        for answer in (stream, (0,), (0, -1), (0, "0"), None):
            with pytest.raises(TypeError, match=r"__cuda_stream__ of \w+ must give \(version, handle\)"):
                call(tensor, form(answer))
    assert driver.pending(stream) > 0


def test_memory_waits_for_a_stream_of_another_library(driver: Driver) -> None:
    host, source, stream = KVPool(8, 1, 1, 4, "cpu", torch.float32), ones(9), driver.stream()
    driver.run()
    driver.copy_to_host(host.k_buffer[0], source.expand(9, 1, 4).contiguous(), stream)
    host.used_on(host.k_buffer[0], OfMethod((0, stream)))
    assert driver.pending(stream) == 1
    del host
    gc.collect()
    assert driver.pending(stream) == 0


def test_the_default_stream_of_a_thread_is_refused(driver: Driver) -> None:
    text = "stream 2 is the default stream of the calling thread.*; pass a stream that was created"
    for call, tensor in takers():
        for stream in (2, OfMethod((0, 2)), Named(2)):
            with pytest.raises(ConfigError, match=text):
                call(tensor, stream)
    allocator = make_allocator()
    with on_stream(2):
        for refused in (lambda: allocator.alloc(2), lambda: KVPool(8, 1, 1, 4, "cuda", torch.float32)):
            with pytest.raises(ConfigError, match=text):
                refused()
    assert allocator.available_size() == 64
    assert driver.pending() == 0


def test_the_default_stream_of_a_thread_is_no_consumer(driver: Driver, run_snippet: RunSnippet) -> None:
    assert driver.calls("cuInit") >= 0
    code = """
        import kvpool
        from kvpool._kvpool import _use_stream
        slots = kvpool.TokenToKVPoolAllocator(64, "cuda").alloc(4)
        for stream, current in ((2, None), (0, None), (1, 2)):
            _use_stream(current)
            try:
                slots.__dlpack__(stream=stream, max_version=(1, 1))
            except BufferError as error:
                print(type(error).__name__, error)
    """
    lines = run_snippet(code, hidden=["torch"]).splitlines()
    assert ["stream 2 is the default" in line for line in lines] == [True, False, True]
    assert "pass 1 for the legacy default stream" in lines[1]
    assert all(line.startswith("BufferError") for line in lines)


def test_pytorch_allocates_nothing_on_the_default_stream_of_a_thread(driver: Driver) -> None:
    library = ctypes.CDLL(kvpool._kvpool.__file__)
    library.kvpool_workspace_alloc.restype = ctypes.c_void_p
    library.kvpool_workspace_alloc.argtypes = ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p
    driver.run()
    workspace = Workspace("cuda", 1 << 20)
    with pytest.raises(WorkspaceExhaustedError, match="stream 2 is the default stream"), workspace.use():
        assert library.kvpool_workspace_alloc(512, 0, 2) is None
        raise torch.OutOfMemoryError
    workspace.close()


def test_pools_of_the_second_device_leave_the_first_alone(driver: Driver, run_snippet: RunSnippet) -> None:
    assert driver.calls("cuInit") >= 0
    code = """
        import ctypes, kvpool
        kv = kvpool.KVPool(64, 2, 1, 4, "cuda:1", "float32")
        allocator = kvpool.TokenToKVPoolAllocator(64, "cuda:1", debug=True)
        table = kvpool.ReqToTokenPool(4, 16, "cuda:1")
        planner = kvpool.BatchPlanner(table, allocator, 4, 64)
        tier = kvpool.HostTier(kv, size=256)
        cache = kvpool.PrefixCache(allocator, tiers=(tier,))
        tree = kvpool._kvpool.SlotTree(allocator)
        rows = table.alloc(2)
        plan = planner.extend(rows, [0, 0], [5, 7])
        assert planner.seq_len(rows[0]) == 5 and plan.host.seq_lens.tolist() == [5, 7]
        slots = allocator.alloc(8)
        kv.move_kv([1, 2], [3, 4])
        cache.insert(list(range(8)), slots)
        allocator.free(allocator.alloc(3))
        del slots
        planner.finish(rows)
        kvpool.Workspace("cuda:1", 1 << 12).zeros((4,), "float32")
        buffers = kvpool.BufferPool("cuda:1")
        buffers.alloc(100, "float32").release()
        del plan, planner, cache, tree, tier, allocator, table, kv, buffers
        flags, active = ctypes.c_uint(), ctypes.c_int(7)
        driver = ctypes.CDLL(None)
        for device in (0, 1):
            assert driver.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active)) == 0
            print(device, active.value)
    """
    assert run_snippet(code, hidden=["torch"]).splitlines()[-2:] == ["0 0", "1 1"]


def test_a_table_outlives_the_plan_that_writes_it(driver: Driver) -> None:
    allocator, table, stream = make_allocator(), ReqToTokenPool(4, 16, "cuda"), driver.stream()
    planner = kvpool.BatchPlanner(table, allocator, 4, 64)
    driver.run()
    with on_stream(stream):
        plan = some(planner.extend(some(table.alloc()), [0], [5]))
        fields = plan.out_cache_loc
    driver.begin_capture(stream)
    del plan, planner, table, allocator
    gc.collect()
    assert driver.end_capture(stream) >= 1
    driver.run()
    assert fields.tolist() == [1, 2, 3, 4, 5]


# Buffers and workspaces between streams


def test_a_buffer_of_a_captured_stream_is_refused(driver: Driver) -> None:
    pool, stream = BufferPool("cuda"), driver.stream()
    with on_stream(stream):
        pool.release(pool.alloc((4,), torch.float32))
    driver.run()
    driver.begin_capture(stream)
    with pytest.raises(DriverError, match="for which this call has to wait, cannot be captured"):
        pool.alloc((4,), torch.float32)
    assert (pool.free_count, pool.in_use_count) == (1, 0)
    assert driver.end_capture(stream) >= 1
    assert pool.alloc((4,), torch.float32).nbytes == 16


def test_pytorch_allocates_in_the_arena_of_a_device_that_is_not_current(driver: Driver) -> None:
    assert torch.cuda.current_device() == 0
    # PyTorch's own allocator, not what stands for its kernels.
    with _disable_current_modes(), Workspace("cuda:1", 8 << 20) as workspace:
        before = driver.device_bytes()
        with workspace.use():
            tensor = torch.empty(1 << 18, dtype=torch.float32, device="cuda:1")
            assert workspace.used_bytes >= tensor.nbytes
            assert driver.device_bytes() == before
        assert torch.cuda.current_device() == 0
        del tensor
        assert workspace.reset()
        assert workspace.used_bytes == 0


@pytest.mark.parametrize(("version", "refuses"), [("2.10.1", True), ("2.11.0", False)])
def test_expandable_segments_need_a_pytorch_that_takes_them_from_an_arena(
    monkeypatch: pytest.MonkeyPatch, version: str, refuses: bool
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    with Workspace("cuda", 8 << 20) as workspace:
        if refuses:
            with pytest.raises(ConfigError, match=r"PyTorch 2\.10 .* expandable_segments"), workspace.use():
                pass
        else:
            with workspace.use():
                pass
        assert workspace.reset()


# Page-locking in steps


def test_a_pool_in_host_memory_is_page_locked_in_steps(driver: Driver) -> None:
    driver.reset_calls()
    pool = KVPool(1 << 14, 6, 8, 128, "cpu", torch.float16)
    # 33 MB a buffer: one to a step, and never a part of one.
    assert driver.calls("cuMemHostRegister_v2") == 12
    assert driver.calls("cuMemHostAlloc") == 0
    target = torch.empty_like(pool.k_buffer[0], device="cuda")
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        target.copy_(buffer, non_blocking=True)
    driver.run()


def test_a_part_that_the_driver_does_not_page_lock_is_told(driver: Driver) -> None:
    before = driver.page_locked_bytes()
    driver.set_register_limit(1 << 20)
    try:
        with pytest.raises(kvpool.OutOfMemoryError, match=r"\d+ bytes of host memory cannot be page-locked"):
            KVPool(1 << 12, 1, 8, 128, "cpu", torch.float16)
        with pytest.raises(kvpool.OutOfMemoryError, match="2097152 bytes of host memory"):
            BufferPool("cuda").register_existing(torch.zeros(1 << 19))
        assert KVPool(100, 1, 8, 128, "cpu", torch.float16).mem_bytes() < 1 << 20
    finally:
        driver.set_register_limit(512 << 30)
    gc.collect()
    assert driver.page_locked_bytes() == before


@pytest.mark.parametrize("threads", ["0", "-1", "many", ""])
def test_threads_that_page_lock_are_counted_from_one(monkeypatch: pytest.MonkeyPatch, threads: str) -> None:
    monkeypatch.setenv("KVPOOL_PAGE_LOCK_THREADS", threads)
    with pytest.raises(ConfigError, match="KVPOOL_PAGE_LOCK_THREADS"):
        ChunkPool(2, (64,), torch.float32)


# Streams and memory that a call opens and allocates


def test_a_strided_question_allocates_once(driver: Driver) -> None:
    slots = torch.arange(40, dtype=torch.int64).cuda()[::2]
    assert TokenToKVPoolAllocator.runs(slots).tolist()[:2] == [[0, 1], [2, 1]]
    driver.reset_calls()
    TokenToKVPoolAllocator.runs(slots)
    calls = ("cuMemHostAlloc", "cuMemFreeHost", "cuMemAlloc_v2", "cuCtxSynchronize")
    assert [driver.calls(name) for name in calls] == [0] * 4


def test_host_memory_is_locked_through_a_device_that_is_in_use(
    driver: Driver, run_snippet: RunSnippet
) -> None:
    assert driver.calls("cuInit") >= 0
    code = """
        import ctypes, threading, kvpool
        cuda = ctypes.CDLL("libcuda.so.1")
        assert cuda.cuInit(0) == 0
        assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(ctypes.c_void_p()), 1) == 0
        thread = threading.Thread(target=lambda: kvpool.KVPool(8, 1, 1, 4, "cpu"))
        thread.start()
        thread.join()
        active = ctypes.c_int()
        for device in (0, 1):
            cuda.cuDevicePrimaryCtxGetState(device, ctypes.byref(ctypes.c_uint()), ctypes.byref(active))
            print(active.value)
    """
    assert run_snippet(code, hidden=["torch"]).split() == ["0", "1"]


def test_a_pool_that_is_far_ahead_waits_before_it_takes_a_lock(driver: Driver) -> None:
    kv = KVPool(1 << 14, 1, 1, 4, "cuda", torch.float32)
    stream = driver.stream()
    dst, src = list(range(1, 6001)), list(range(8000, 14000))
    driver.set_patience(0)  # no question lets the device go on
    driver.reset_calls()
    with on_stream(stream):
        for _ in range(12):
            kv.move_kv(dst, src)
    # 48 KB each, of a ring of 256: the host waits for the oldest when more than half of it is under way.
    waits = driver.calls("cuEventSynchronize")
    assert 0 < waits < 12
    assert driver.calls("launch:kvpool_move") == 12
    # Calls that send nothing, or next to nothing, do not wait for those that send much.
    indices, values = torch.tensor([3, 4]).cuda(), ones(2)
    with on_stream(driver.stream()):
        kv.set_kv_buffer(0, indices, values, values)
        kv.set_kv_buffer(0, [1, 2], values, values)
    assert driver.calls("cuEventSynchronize") == waits
    driver.run()
    kv.check()


def test_other_threads_run_while_a_pool_is_made() -> None:
    """A pool in host memory is touched page by page and page-locked, which takes its time."""
    assert turns_of_others(lambda: KVPool(1 << 15, 2, 8, 128, "cpu", torch.float16)) > 0
