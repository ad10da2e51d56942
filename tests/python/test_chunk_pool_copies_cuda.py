"""ChunkPool: copies on a GPU, by calls of the driver, streams, lifetimes, and failures."""

from __future__ import annotations

import random
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import common
import pytest
import torch
from chunk_pools import LAYOUTS, counts, fill, indices, make, numbers, read, same, take
from common import (
    NEVER,
    WAITS,
    assert_refused_after_fork,
    cuda_only,
    each_failure,
    needs_fork,
    on_stream,
    some,
)
from software import each_call

from kvpool import Chunk, ChunkCopy, ChunkPool, StaleBufferError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from software import Driver

MEMORY = (*common.MEMORY, "cuMemHostRegister_v2")
COPIES = (
    "cuMemcpyAsync",
    "cuMemcpy2DAsync_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyDtoDAsync_v2",
)

pytestmark = pytest.mark.usefixtures("device")


class FakeStream:
    """A stream with the attribute that PyTorch gives it."""

    def __init__(self, handle: int) -> None:
        self.cuda_stream = handle


def page_locked(count: int = 12, dtype: torch.dtype = torch.float32) -> torch.Tensor:
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
        tensor = page_locked() if there == "cpu" else numbers(12).cuda()
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


# Parts of a tensor of 4096 numbers, and the copies that each takes.
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
        base = page_locked(4096) if there == "cpu" else torch.zeros(4096).cuda()
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
        held = driver.device_bytes(), driver.page_locked_bytes()
        for _ in range(20):
            route.copy(route.tensor)
        assert [driver.calls(name) for name in (*WAITS, *MEMORY)] == [0] * 8
        driver.run()
        route.pool.free(route.chunk)
        assert (driver.device_bytes(), driver.page_locked_bytes()) == held


@cuda_only
def test_a_copy_is_done_when_a_query_says_so(driver: Driver) -> None:
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
            (FakeStream(stream), stream),
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
    source.copy_(page_locked())
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
    # Writes of the next owner do not reach the copies.
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
        chunk.copy_from(page_locked())
        copy = chunk.copy_to(page_locked())
        driver.run()
    assert copy.query() is True
    assert same(chunk.tensor(), numbers(12))


@cuda_only
def test_a_pool_dropped_with_copies_under_way(driver: Driver) -> None:
    driver.set_patience(NEVER)
    for kept in ("nothing", "copy", "chunk", "tensor"):
        before = driver.device_bytes(), driver.page_locked_bytes()
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
        assert (driver.device_bytes(), driver.page_locked_bytes()) == before, kept


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
    """Checks that a pool of four chunks, one of them in use, hands out each once and copies correctly."""
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
def test_a_failed_copy_keeps_the_tensor_it_has_begun_to_read(driver: Driver) -> None:
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
def test_writes_after_the_zeros_stay(driver: Driver) -> None:
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
