"""The pools under PyTorch on a real GPU: late frees, streams, graphs, threads, memory, and large data.

What the driver made of software can show, and other files do not, runs there as well, on less data. The rest
is skipped there with its reason.
"""

from __future__ import annotations

import gc
import json
import random
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import command_line
import pytest
import torch
from common import some

from kvpool import (
    BatchPlanner,
    DriverError,
    GDNPool,
    KVPool,
    OutOfMemoryError,
    ReqToTokenPool,
    TokenToKVPoolAllocator,
)
from kvpool.tools.cli import main
from kvpool.tools.traces import synthetic_trace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from software import Driver


pytestmark = pytest.mark.cuda

# About 0.2 s on a GPU of 2 GHz: longer than what a test enqueues behind it takes on the host.
BUSY_CYCLES = 400_000_000
POISON = 0xA5
DTYPES = [
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]
DIMS = [1, 3, 64, 80, 128, 192, 576]


class Gpu(NamedTuple):
    """The device of a test: a real one, or the driver made of software."""

    driver: Driver | None

    def keep_busy(self) -> Callable[[], bool]:
        """Keeps the current stream busy. The answer says whether it still is."""
        if self.driver is not None:
            # Work is late there anyway.
            return self.is_late
        torch.cuda._sleep(BUSY_CYCLES)  # type: ignore[no-untyped-call]
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return lambda: not event.query()

    def is_late(self) -> bool:
        """Whether work of the driver made of software has not run."""
        return self.driver is not None and self.driver.pending() > 0

    def rows(self, most: int) -> int:
        """As many as this device has done soon enough."""
        return most if self.driver is None else min(most, 130)


@pytest.fixture
def gpu(request: pytest.FixtureRequest) -> Iterator[Gpu]:
    """The device, with all work done before and after."""
    if not request.config.getoption("--software"):
        torch.cuda.synchronize()
        yield Gpu(None)
        torch.cuda.synchronize()
        return
    driver: Driver = request.getfixturevalue("driver")
    # Nothing runs before somebody waits for it.
    driver.set_patience(1 << 60)
    yield Gpu(driver)


@pytest.fixture
def real_gpu(request: pytest.FixtureRequest) -> Gpu:
    """A device that runs PyTorch's own kernels."""
    if request.config.getoption("--software"):
        pytest.skip("it needs PyTorch's CUDA runtime on a GPU, which the driver made of software is not")
    gpu: Gpu = request.getfixturevalue("gpu")
    # A pool that were collected during a capture would give memory back, which ends the capture.
    gc.collect()
    return gpu


def new_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


def on_gpu(values: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype).cuda()


def permutation(size: int, seed: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """The numbers below `size` in random order, in host memory."""
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, with every byte overwritten."""
    tensor.view(torch.uint8).fill_(POISON)
    return tensor


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


# Frees of what PyTorch computed

COMPUTED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "converted": lambda slots: slots.to(torch.int64),
    "cloned": torch.clone,
    "concatenated": lambda slots: torch.cat([slots[20:], slots[:20]]),
    "unique": torch.unique,
    "picked": lambda slots: slots[permutation(len(slots), 0).cuda()],
    "strided": lambda slots: torch.stack([slots, -slots], dim=1)[:, 0],
    "two_dimensions": lambda slots: slots.clone().view(2, -1).T,
    "masked": lambda slots: slots[slots > 0],
}


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("how", sorted(COMPUTED))
def test_slots_that_pytorch_computed_return_when_they_have_landed(gpu: Gpu, how: str, page_size: int) -> None:
    allocator = TokenToKVPoolAllocator(64, "cuda", page_size)
    slots = some(allocator.alloc(32))
    kept = some(allocator.alloc(16))
    wanted = slots.tolist()
    computed = COMPUTED[how](slots)
    is_busy = gpu.keep_busy()
    allocator.free(computed)
    assert allocator.stats()["pending"] == 32
    assert allocator.available_size() == 48
    assert is_busy()
    torch.cuda.synchronize()
    stats = allocator.stats()
    assert (stats["pending"], stats["released"], stats["dropped_frees"]) == (0, 32, 0)
    assert not allocator.is_allocated(wanted).any()
    assert allocator.is_allocated(kept.tolist()).all()
    allocator.verify()


@pytest.mark.parametrize("write", ["tensor", "view", "slice"])
def test_a_handed_out_tensor_that_was_written_to_frees_what_it_holds_now(gpu: Gpu, write: str) -> None:
    allocator = TokenToKVPoolAllocator(64, "cuda")
    first, second = some(allocator.alloc(8)), some(allocator.alloc(8))
    if write == "tensor":
        second.copy_(first)
    elif write == "view":
        second.view(2, 4).copy_(first.view(2, 4))
    else:
        second[:] = first
    gpu.keep_busy()
    allocator.free(second)
    torch.cuda.synchronize()
    assert not allocator.is_allocated(list(range(1, 9))).any()
    assert allocator.is_allocated(list(range(9, 17))).all()
    assert allocator.stats()["dropped_frees"] == 0


def test_a_computed_tensor_may_be_overwritten_as_soon_as_it_was_freed(gpu: Gpu) -> None:
    allocator = TokenToKVPoolAllocator(64, "cuda")
    computed = some(allocator.alloc(32)).to(torch.int64)
    gpu.keep_busy()
    allocator.free(computed)
    computed.fill_(40)
    torch.cuda.synchronize()
    assert allocator.available_size() == 64
    assert allocator.stats()["dropped_frees"] == 0
    allocator.verify()


def test_an_alloc_that_would_fail_waits_for_computed_slots(gpu: Gpu) -> None:
    allocator = TokenToKVPoolAllocator(64, "cuda")
    computed = some(allocator.alloc(64)).to(torch.int64)
    is_busy = gpu.keep_busy()
    allocator.free(computed)
    assert some(allocator.alloc(64)).tolist() == list(range(1, 65))
    assert not is_busy()
    assert allocator.alloc(1) is None


def test_an_alloc_that_can_be_served_waits_for_nothing(gpu: Gpu) -> None:
    allocator = TokenToKVPoolAllocator(64, "cuda")
    computed = some(allocator.alloc(32)).to(torch.int64)
    torch.cuda.synchronize()
    is_busy = gpu.keep_busy()
    allocator.free(computed)
    slots = some(allocator.alloc(32))
    assert is_busy()
    assert slots.tolist() == list(range(33, 65))


def test_slots_that_a_tensor_of_requests_wrote_to_the_table_are_freed_from_its_rows(gpu: Gpu) -> None:
    allocator = TokenToKVPoolAllocator(256, "cuda")
    table = ReqToTokenPool(8, 32, "cuda")
    rows = some(table.alloc(8))
    for position in range(32):
        columns = on_gpu([position] * 8)
        table.write((on_gpu(rows), columns), some(allocator.alloc(8)))
    assert allocator.available_size() == 0
    gpu.keep_busy()
    for row in rows:
        allocator.free(table.read(row, 32))
    table.free(rows)
    assert sorted(some(allocator.alloc(256)).tolist()) == list(range(1, 257))
    assert allocator.stats()["dropped_frees"] == 0
    assert not table.req_to_token.any()


# Streams


def test_work_is_enqueued_on_the_current_stream(gpu: Gpu) -> None:
    pool = KVPool(64, 2, 2, 8, "cuda", torch.float32)
    allocator = TokenToKVPoolAllocator(64, "cuda")
    torch.cuda.synchronize()
    gathered = []
    for number in range(8):
        stream = new_stream()
        with torch.cuda.stream(stream):
            k, v = poison(torch.empty(8, 2, 8, device="cuda")), poison(torch.empty(8, 2, 8, device="cuda"))
            gpu.keep_busy()
            # Whoever did not come after these on their stream would read poison.
            k.fill_(number)
            v.fill_(-number)
            slots = some(allocator.alloc(8))
            pool.set_kv_buffer(1, slots, k, v)
            out = torch.empty_like(k), torch.empty_like(v)
            pool.gather_kv(1, slots, out=out)
            gathered.append((stream, out))
    # Work on the default stream by mistake would run before the work that it has to wait for.
    torch.cuda.default_stream().synchronize()
    for number, (stream, (k, v)) in enumerate(gathered):
        stream.synchronize()
        assert k.eq(number).all()
        assert v.eq(-number).all()
    pool.check()
    assert not pool.k_buffer[0].any()


def test_slots_that_were_staged_on_one_stream_can_be_used_on_another(gpu: Gpu) -> None:
    allocator = TokenToKVPoolAllocator(4096, "cuda")
    first, *others = [new_stream() for _ in range(4)]
    with torch.cuda.stream(first):
        gpu.keep_busy()
        # Brings more slots to the device than it hands out.
        some(allocator.alloc(8))
    copies = []
    for stream in others:
        with torch.cuda.stream(stream):
            copies.append(some(allocator.alloc(8)).clone())
    torch.cuda.synchronize()
    assert torch.cat(copies).tolist() == list(range(9, 33))


def test_memory_of_handed_out_slots_is_used_again_after_those_who_read_it(gpu: Gpu) -> None:
    size, steps = 64, 48
    allocator = TokenToKVPoolAllocator(size, "cuda", need_sort=False)
    streams = [new_stream() for _ in range(3)]
    copies = torch.full((steps, size), -1, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    wanted, expected = list(range(1, size + 1)), []
    for step in range(steps):
        with torch.cuda.stream(streams[step % 3]):
            if step == 0:
                gpu.keep_busy()
            slots = some(allocator.alloc(size))
            copies[step].copy_(slots)
            # The tensor is gone at once, and its memory is free.
            del slots
            expected.append(wanted)
            wanted = (1 + permutation(size, step)).tolist()
            allocator.free(wanted)
    torch.cuda.synchronize()
    assert copies.tolist() == expected


def test_states_are_reset_and_copied_on_the_current_stream(gpu: Gpu) -> None:
    pool = GDNPool(8, 2, 2, 4, 4, 6, 4, "cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(new_stream()):
        gpu.keep_busy()
        pool.recurrent_state.fill_(1)
        pool.conv_state.fill_(1)
        pool.recurrent_state[:, 1].fill_(2)
        pool.copy_states(1, 2)
        pool.reset_states(on_gpu([1, 3]))
        recurrent = pool.recurrent_state[0, :, 0, 0, 0].tolist()
    assert recurrent == [1, 0, 2, 0, 1, 1, 1, 1, 1]


# CUDA graphs


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_a_captured_write_is_replayed_with_new_indices_and_values(
    real_gpu: Gpu, dtype: torch.dtype, stored: torch.dtype
) -> None:
    assert real_gpu.driver is None
    pool = KVPool(64, 2, 2, 8, "cuda", stored)
    indices = torch.zeros(16, dtype=dtype, device="cuda")
    qkv = torch.zeros(16, 3, 2, 8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(2):
            pool.set_kv_buffer(layer, indices, qkv[:, layer], qkv[:, 2])
    expected = [torch.zeros(buffer.shape).to(stored) for buffer in (*pool.k_buffer, *pool.v_buffer)]
    for step in range(4):
        picked = 1 + permutation(64, step)[:16]
        picked[step] = -1
        values = torch.randn(qkv.shape, generator=torch.Generator().manual_seed(step))
        indices.copy_(picked)
        qkv.copy_(values)
        graph.replay()
        live = picked >= 0
        for buffer, part in zip(expected, (0, 1, 2, 2), strict=True):
            buffer.view(torch.uint8)[picked[live]] = values[live, part].to(stored).view(torch.uint8)
        found = (*pool.k_buffer, *pool.v_buffer)
        assert all(same_bits(left.cpu(), right) for left, right in zip(found, expected, strict=True))
    pool.check()


def test_capturing_does_nothing_and_a_replay_tells_what_is_out_of_range(real_gpu: Gpu) -> None:
    assert real_gpu.driver is None
    pool = KVPool(16, 1, 1, 4, "cuda", torch.float32)
    indices = on_gpu([1, 2], torch.int64)
    ones = torch.ones(2, 1, 4).cuda()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pool.set_kv_buffer(0, indices, ones, ones)
    assert not pool.k_buffer[0].any()
    indices.copy_(torch.tensor([3, 999]))
    graph.replay()
    with pytest.raises(IndexError, match="999"):
        pool.check()
    assert pool.k_buffer[0].sum(dim=(1, 2)).tolist()[:4] == [0, 0, 0, 4]
    indices.copy_(torch.tensor([4, 5]))
    graph.replay()
    pool.check()
    assert pool.k_buffer[0].sum() == 12


def test_numbers_from_the_host_are_refused_while_capturing_and_the_capture_goes_on(real_gpu: Gpu) -> None:
    assert real_gpu.driver is None
    pool = KVPool(16, 1, 1, 4, "cuda", torch.float32)
    indices = on_gpu([1, 2], torch.int64)
    ones = torch.ones(2, 1, 4).cuda()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(DriverError, match="captured"):
            pool.set_kv_buffer(0, [3, 4], ones, ones)
        pool.set_kv_buffer(0, indices, ones, ones)
    graph.replay()
    assert pool.k_buffer[0].sum(dim=(1, 2)).tolist()[:5] == [0, 4, 4, 0, 0]


def test_gathers_moves_and_resets_can_be_captured(real_gpu: Gpu) -> None:
    assert real_gpu.driver is None
    pool, states = KVPool(16, 2, 1, 4, "cuda", torch.float32), GDNPool(8, 2, 2, 4, 4, 6, 4, "cuda")
    for number, buffer in enumerate([*pool.k_buffer, *pool.v_buffer]):
        rows = torch.arange(buffer.shape[0], device="cuda", dtype=torch.float32) + 100 * number
        buffer.copy_(rows[:, None, None].expand(buffer.shape))
    states.recurrent_state.fill_(1)
    dst, src = on_gpu([1, 2], torch.int64), on_gpu([3, 4], torch.int64)
    out = torch.empty(2, 1, 4, device="cuda"), torch.empty(2, 1, 4, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pool.move_kv(dst, src)
        pool.gather_kv(1, dst, out=out)
        states.reset_states(dst)
    for picked in ([5, 6], [7, 8]):
        src.copy_(torch.tensor(picked))
        graph.replay()
        assert out[0][:, 0, 0].tolist() == [100 + row for row in picked]
        assert out[1][:, 0, 0].tolist() == [300 + row for row in picked]
    assert states.recurrent_state.sum(dim=(0, 2, 3, 4)).count_nonzero() == 7


# The steady state


@contextmanager
def synchronising_raises() -> Iterator[None]:
    """Lets every operation of PyTorch that waits for the GPU raise."""
    with warnings.catch_warnings():
        # It says of itself that it is a prototype.
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class Engine:
    """Decode steps as an engine does them: 16 requests, one token each a step."""

    def __init__(self, steps: int) -> None:
        self.allocator = TokenToKVPoolAllocator(4096, "cuda")
        self.table = ReqToTokenPool(16, steps, "cuda")
        self.pool = KVPool(4096, 2, 2, 8, "cuda", torch.bfloat16)
        self.requests = some(self.table.alloc(16))
        self.rows = torch.tensor(self.requests, dtype=torch.int32).cuda()
        self.positions = torch.zeros(16, dtype=torch.int32).cuda()
        self.values = torch.randn(16, 2, 8).cuda()

    def step(self) -> None:
        slots = some(self.allocator.alloc(16))
        self.table.write((self.rows, self.positions), slots)
        for layer in range(2):
            self.pool.set_kv_buffer(layer, slots, self.values, self.values)
            self.pool.gather_kv(layer, slots)
        self.positions.add_(1)

    def finish(self, steps: int) -> None:
        for request in self.requests:
            self.allocator.free(self.table.read(request, steps).to(torch.int64))


def test_a_steady_state_synchronises_nothing(real_gpu: Gpu) -> None:
    engine = Engine(32)
    engine.step()
    torch.cuda.synchronize()
    is_busy = real_gpu.keep_busy()
    with synchronising_raises():
        for _ in range(31):
            engine.step()
            # An alloc and a free of what the host knows.
            engine.allocator.free(some(engine.allocator.alloc(100)))
        engine.finish(32)
    # Nor did anything wait that PyTorch does not know of.
    assert is_busy()
    torch.cuda.synchronize()
    assert engine.allocator.available_size() == 4096
    assert engine.allocator.stats()["dropped_frees"] == 0
    engine.pool.check()


def test_a_loop_that_synchronises_is_noticed(real_gpu: Gpu) -> None:
    engine = Engine(8)
    with synchronising_raises():
        engine.step()
        with pytest.raises(RuntimeError, match="synchroniz"):
            engine.positions.max().item()
    is_busy = real_gpu.keep_busy()
    assert is_busy()
    engine.pool.check()
    assert not is_busy()


def test_planned_steps_wait_for_nothing(real_gpu: Gpu) -> None:
    table = ReqToTokenPool(64, 512, "cuda")
    planner = BatchPlanner(table, TokenToKVPoolAllocator(16_384, "cuda", 16), 64, 4_096)
    rows, lens = some(table.alloc(64)), torch.arange(1, 65)
    total = torch.zeros((), dtype=torch.int64, device="cuda")
    is_busy = real_gpu.keep_busy()
    with synchronising_raises():
        planner.extend(rows, torch.zeros_like(lens), lens)
        for _ in range(32):
            lens += 2
            plan = some(planner.decode(rows, lens, 2))
            total += some(plan.kv_indices).sum() + some(plan.block_table).sum() + plan.slot_mapping.sum()
            lens -= 1
            planner.truncate(rows, lens)
        planner.finish(rows, lens)
    assert is_busy()
    assert int(total) > 0


# Threads and memory


def test_two_threads_with_a_pool_each_on_streams_of_their_own(real_gpu: Gpu) -> None:
    assert real_gpu.driver is None

    def work(seed: int) -> int:
        rng = random.Random(seed)  # noqa: S311 - no secret
        with torch.cuda.stream(new_stream()):
            allocator = TokenToKVPoolAllocator(512, "cuda", need_sort=bool(seed % 2))
            pool = KVPool(512, 2, 2, 8, "cuda", torch.float32)
            live: list[tuple[torch.Tensor, torch.Tensor]] = []
            for _ in range(300):
                slots = allocator.alloc(rng.randint(1, 40))
                if slots is not None:
                    values = torch.randn(len(slots), 2, 8, device="cuda")
                    pool.set_kv_buffer(1, slots, values, -values)
                    live.append((slots, values))
                if slots is None or rng.random() < 0.5:
                    slots, values = live.pop(rng.randrange(len(live)))
                    k, v = pool.gather_kv(1, slots)
                    assert torch.equal(k, values)
                    assert torch.equal(v, -values)
                    allocator.free(slots if rng.random() < 0.5 else slots.to(torch.int64))
            for slots, _ in live:
                allocator.free(slots)
            pool.check()
            allocator.verify()
            assert allocator.stats()["dropped_frees"] == 0
            return allocator.available_size()

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(work, range(2))) == [512, 512]


def test_threads_that_share_an_allocator_get_slots_of_their_own(real_gpu: Gpu) -> None:
    assert real_gpu.driver is None
    allocator = TokenToKVPoolAllocator(4096, "cuda")
    lock, live = threading.Lock(), set[int]()

    def work(seed: int) -> None:
        rng = random.Random(seed)  # noqa: S311 - no secret
        with torch.cuda.stream(new_stream()):
            for _ in range(200):
                slots = some(allocator.alloc(rng.randint(1, 500)))
                numbers = set(slots.tolist())
                with lock:
                    assert live.isdisjoint(numbers)
                    live.update(numbers)
                assert len(numbers) == len(slots)
                with lock:
                    live.difference_update(numbers)
                allocator.free(slots if rng.random() < 0.5 else slots.to(torch.int64))

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    allocator.verify()
    assert (allocator.available_size(), allocator.stats()["dropped_frees"]) == (4096, 0)


def test_a_pool_that_does_not_fit_is_out_of_memory_and_the_next_one_works(real_gpu: Gpu) -> None:
    assert real_gpu.driver is None
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    row_bytes = 2 * 64 * 8 * 128 * 2

    def make(size: int) -> KVPool:
        return KVPool(size // row_bytes, 64, 8, 128, "cuda", torch.bfloat16)

    with pytest.raises(OutOfMemoryError, match=r"\d{9}"):
        make(total + (1 << 30))
    half = make(free * 6 // 10)
    with pytest.raises(OutOfMemoryError, match=r"\d{8}"):
        make(free * 6 // 10)
    ones = torch.ones(1, 8, 128).cuda()
    half.set_kv_buffer(63, [1], ones, ones)
    assert half.k_buffer[63][:3, 0, 0].tolist() == [0, 1, 0]
    del half
    again = make(free * 6 // 10)
    again.set_kv_buffer(63, [1], ones, ones)
    assert again.k_buffer[63][:3, 0, 0].tolist() == [0, 1, 0]
    del again
    torch.cuda.synchronize()
    # PyTorch can have the memory again.
    assert torch.empty(free * 6 // 10, dtype=torch.uint8, device="cuda").is_cuda
    torch.cuda.empty_cache()


# Large data


class Batch(NamedTuple):
    """K and V of many tokens, parts of a fused tensor, and where they go."""

    pool: KVPool
    indices: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


def stored_batch(
    rows: int, dim: int, stored: torch.dtype, source: torch.dtype, scale: float | None = None
) -> Batch:
    """Random values, from tiny to 50, written to random rows of a poisoned pool."""
    torch.manual_seed(dim)
    pool = KVPool(rows + 100, 1, 1, dim, "cuda", stored)
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        poison(buffer)
    qkv = torch.randn(rows, 3 * dim, device="cuda")
    qkv *= 10.0 ** (4 * torch.rand(rows, 1, device="cuda") - 3)
    qkv = qkv.to(source)
    k, v = qkv[:, dim : 2 * dim], qkv[:, 2 * dim :]
    indices = (1 + permutation(rows + 100, dim)[:rows]).to(torch.int32 if dim % 2 else torch.int64).cuda()
    pool.set_kv_buffer(0, indices, k, v, scale, None if scale is None else 2 * scale)
    pool.check()
    return Batch(pool, indices.long(), k, v)


def rows_of(buffer: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """A copy of rows, also of dtypes that PyTorch cannot index."""
    return buffer.view(torch.uint8)[indices].view(buffer.dtype)


def untouched(buffer: torch.Tensor, indices: torch.Tensor) -> bool:
    """Whether all rows but those of `indices` still hold poison."""
    others = torch.ones(buffer.shape[0], dtype=torch.bool).cuda()
    others[indices] = False
    return bool(buffer.view(torch.uint8)[others].eq(POISON).all())


def assert_rounded(found: torch.Tensor, exact: torch.Tensor) -> None:
    """As near to `exact`, float64, as the dtype allows, but for the rounding of one division in float32."""
    info = torch.finfo(found.dtype)
    subnormal = info.smallest_normal * info.eps
    allowed = exact.abs() * (info.eps / 2 + 2.0**-23) + subnormal * 0.5001
    error = (found.double() - exact).abs()
    assert bool((error <= allowed).all()), f"off by up to {(error - allowed).max().item()} more than allowed"


def row_count(gpu: Gpu, dim: int) -> int:
    """A million rows if they are small."""
    return gpu.rows(min(1_000_000, (1 << 26) // dim))


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("stored", DTYPES, ids=str)
def test_stored_rows_agree_with_a_float64_reference(gpu: Gpu, stored: torch.dtype, dim: int) -> None:
    batch = stored_batch(row_count(gpu, dim), dim, stored, torch.float32)
    for buffer, values in ((batch.pool.k_buffer[0], batch.k), (batch.pool.v_buffer[0], batch.v)):
        found = rows_of(buffer, batch.indices).view(values.shape)
        assert_rounded(found, values.double())
        assert same_bits(found, values.to(stored))
        assert untouched(buffer, batch.indices)


@pytest.mark.parametrize("source", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("stored", DTYPES, ids=str)
def test_half_precision_rows_agree_with_a_float64_reference(
    gpu: Gpu, stored: torch.dtype, source: torch.dtype
) -> None:
    batch = stored_batch(gpu.rows(200_000), 128, stored, source)
    for buffer, values in ((batch.pool.k_buffer[0], batch.k), (batch.pool.v_buffer[0], batch.v)):
        found = rows_of(buffer, batch.indices).view(values.shape)
        assert_rounded(found, values.double())
        assert same_bits(found, values.to(stored))


@pytest.mark.parametrize("dim", [1, 80, 128])
@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_scaled_rows_agree_with_a_float64_reference(gpu: Gpu, stored: torch.dtype, dim: int) -> None:
    scale = 1.7
    # The divisor is the scale in float32.
    divisor = torch.tensor(scale, dtype=torch.float32).double().item()
    batch = stored_batch(row_count(gpu, dim), dim, stored, torch.float32, scale)
    for buffer, values, by in (
        (batch.pool.k_buffer[0], batch.k, divisor),
        (batch.pool.v_buffer[0], batch.v, 2 * divisor),
    ):
        assert_rounded(rows_of(buffer, batch.indices).view(values.shape), values.double() / by)
        assert untouched(buffer, batch.indices)


@pytest.mark.parametrize("rows", [1, 2, 31, 33, 255, 257, 65_537])
def test_every_count_of_rows_is_stored_and_gathered_whole(gpu: Gpu, rows: int) -> None:
    batch = stored_batch(gpu.rows(rows), 128, torch.bfloat16, torch.bfloat16)
    out = tuple(poison(torch.empty(len(batch.k), 1, 128, dtype=torch.bfloat16).cuda()) for _ in range(2))
    batch.pool.gather_kv(0, batch.indices, out=(out[0], out[1]))
    assert same_bits(out[0].view(-1, 128), batch.k)
    assert same_bits(out[1].view(-1, 128), batch.v)
    assert untouched(batch.pool.k_buffer[0], batch.indices)
    assert untouched(batch.pool.v_buffer[0], batch.indices)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("stored", [torch.uint8, torch.bfloat16, torch.float32], ids=str)
def test_large_gathers_and_moves(gpu: Gpu, stored: torch.dtype, dim: int) -> None:
    rows = row_count(gpu, dim)
    pool = KVPool(rows, 2, 1, dim, "cuda", stored, 1, 2 * dim)
    buffers = [*pool.k_buffer, *pool.v_buffer]
    for seed, buffer in enumerate(buffers):
        torch.manual_seed(seed)
        as_bytes = buffer.view(torch.uint8)
        as_bytes.copy_(torch.randint(0, 120, as_bytes.shape, dtype=torch.uint8, device="cuda"))
    order = permutation(rows, dim)
    half = rows // 2
    dst, src = order[:half].cuda(), order[half : 2 * half].to(torch.int32).cuda()
    wanted = [buffer.clone() for buffer in buffers]
    for buffer in wanted:
        buffer[dst] = buffer[src.long()]
    pool.move_kv(dst, src)
    pool.check()
    assert all(same_bits(buffer, expected) for buffer, expected in zip(buffers, wanted, strict=True))
    out = (
        poison(torch.empty(half, 1, dim, dtype=stored).cuda()),
        poison(torch.empty(half, 1, 2 * dim, dtype=stored).cuda()),
    )
    pool.gather_kv(1, src, out=out)
    pool.check()
    assert same_bits(out[0], pool.k_buffer[1][src.long()])
    assert same_bits(out[1], pool.v_buffer[1][src.long()])


def test_moves_of_the_host_trade_places_as_if_all_were_read_first(gpu: Gpu) -> None:
    rows = gpu.rows(10_000)
    pool = KVPool(rows, 2, 1, 80, "cuda", torch.float16)
    buffers = [*pool.k_buffer, *pool.v_buffer]
    for seed, buffer in enumerate(buffers):
        buffer.copy_(torch.randn(buffer.shape, generator=torch.Generator().manual_seed(seed)).half())
    dst, src = permutation(rows, 1), permutation(rows, 2)
    wanted = [buffer.cpu() for buffer in buffers]
    for buffer in wanted:
        buffer[dst] = buffer[src].clone()
    pool.move_kv(dst, src)
    assert all(same_bits(buffer.cpu(), expected) for buffer, expected in zip(buffers, wanted, strict=True))


@pytest.mark.parametrize("kind", ["host", "device"])
def test_large_states_are_copied_and_reset(gpu: Gpu, kind: str) -> None:
    heads, dim = (16, 128) if gpu.driver is None else (2, 16)
    pool = GDNPool(16, 8, heads, dim, dim, 512, 4, "cuda", max_track_slots=16)
    for seed, state in enumerate((pool.recurrent_state, pool.conv_state)):
        noise = torch.randn(state.shape, generator=torch.Generator().manual_seed(seed))
        state.copy_(noise.to(state.dtype))
    order = permutation(33, 3)
    src, dst, reset = order[:12], order[12:24], order[24:30]
    wanted = [pool.recurrent_state.cpu(), pool.conv_state.cpu()]
    for state in wanted:
        state[:, dst] = state[:, src]
        state[:, reset] = 0
    given = [indices if kind == "host" else indices.cuda() for indices in (src, dst, reset)]
    pool.copy_states(given[0], given[1])
    pool.reset_states(given[2])
    assert same_bits(pool.recurrent_state.cpu(), wanted[0])
    assert same_bits(pool.conv_state.cpu(), wanted[1])


def test_many_cells_of_the_table_are_written_at_once(gpu: Gpu) -> None:
    requests, columns = 256, gpu.rows(4_096)
    table = ReqToTokenPool(requests, columns, "cuda")
    count = requests * columns // 2
    places = permutation(requests * columns, 4)[:count]
    values = permutation(count, 5, torch.int32)
    expected = torch.zeros(requests + 1, columns, dtype=torch.int32)
    expected[1 + places // columns, places % columns] = values
    table.write(((1 + places // columns).cuda(), (places % columns).cuda()), values.cuda())
    assert torch.equal(table.req_to_token.cpu(), expected)
    rows = some(table.alloc(requests))
    assert not table.req_to_token.any()
    table.free(rows)


# The command


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("options", [[], ["--prefix-cache"]])
def test_the_command_replays_on_the_device_and_verifies_every_token(
    real_gpu: Gpu, page_size: int, options: list[str]
) -> None:
    assert real_gpu.driver is None
    arguments = [
        *("replay", "--synthetic", "--requests", "100", "--device", "cuda"),
        *("--page-size", str(page_size), "--speed-up", "4", "--json"),
        *options,
    ]
    result = command_line.invoke(main, arguments)
    assert result.exit_code == 0, result.output
    said: dict[str, Any] = json.loads(result.stdout)
    assert (said["finished"], said["rejected"], said["config"]["device"]) == (100, 0, "cuda")
    assert said["verified_tokens"] >= int(synthetic_trace(100, 0).total_lens.sum())
