"""A failure at every driver call of whole histories: a replay, and an engine that serves requests."""

from __future__ import annotations

import gc
import re
from typing import TYPE_CHECKING

import devices
import numpy as np
import pytest
import torch
from common import each_failure
from kvpool_serving import Engine, Request
from pool_reader import PoolReader, alone, is_whole
from software import LAUNCH_FAILED, NEWER_CODES, OUT_OF_MEMORY, memory_of_pytorch

from kvpool import DriverError, IndexOwnershipError, KVPool, ReqToTokenPool, TokenToKVPoolAllocator
from kvpool.tools.replay import token_rows
from kvpool.tools.replay.config import ReplayConfig
from kvpool.tools.replay.replay import Replay
from kvpool.tools.traces import Trace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from software import Driver

pytestmark = pytest.mark.cuda

CODES = (LAUNCH_FAILED, OUT_OF_MEMORY, *NEWER_CODES)


@pytest.fixture(autouse=True)
def _on_cuda() -> Iterator[None]:
    # The stand-ins for PyTorch's kernels make no driver call then.
    with devices.on("cuda"), memory_of_pytorch():
        yield


def assert_adds_up(pool: TokenToKVPoolAllocator | ReqToTokenPool) -> None:
    stats = pool.stats()
    assert stats["available"] + stats["in_use"] == stats["capacity"]


def assert_each_once(allocator: TokenToKVPoolAllocator, table: ReqToTokenPool, evictable: int = 0) -> None:
    """Every free unit is handed out once, and no unit in use is."""
    allocator.verify()
    assert_adds_up(allocator)
    assert_adds_up(table)
    size, count = allocator.page_size, allocator.available_size()
    slots = range(size, size + allocator.stats()["capacity"])
    is_free = [not has_owner for has_owner in allocator.is_allocated(slots).tolist()]
    assert is_free.count(True) == count
    rest = allocator.alloc(count)
    assert rest is not None
    assert sorted(rest.tolist()) == [slot for slot, free in zip(slots, is_free, strict=True) if free]
    if not evictable:  # else it would evict
        assert allocator.alloc(1) is None
    allocator.free(rest)
    assert allocator.available_size() == count
    rows = table.alloc(table.available_size())
    assert rows is not None
    assert len(set(rows)) == len(rows)
    assert table.alloc() is None
    table.free(rows)


def assert_pages_of_rows(replay: Replay) -> None:
    """Exactly the pages of the planner's requests are in use, each by one of them."""
    planner, size, held = replay.scheduler.planner, replay.allocator.page_size, list[int]()
    for row in range(1, len(replay.table.req_to_token)):
        try:
            length = planner.seq_len(row)
        except IndexOwnershipError:
            continue
        held += (replay.table.read(row, length)[::size] // size).tolist()
    assert len(set(held)) == len(held)
    assert replay.allocator.stats()["in_use"] == len(held) * size
    assert replay.allocator.is_allocated([page * size for page in held]).all()


def short_trace() -> Trace:
    """Three requests: one is chunked, one retracted, and one admitted when another has ended."""
    return Trace(
        "short",
        np.zeros(3),
        input_lens=np.array([6, 5, 2], dtype=np.int64),
        output_lens=np.array([3, 4, 1], dtype=np.int64),
    )


def test_every_driver_call_of_a_replay_may_fail(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    # Buffers of as many rows as there are tokens, not of a MiB.
    monkeypatch.setattr(token_rows, "CHUNK_BYTES", 64)
    config = ReplayConfig(
        device="cuda",
        page_size=1,
        max_running=2,
        prefill_budget=8,
        pool_size=14,
        layers=1,
        heads=1,
        head_dim=4,
    )
    replays: list[Replay] = []

    def work() -> None:
        replays.clear()
        replays.append(Replay(short_trace(), config))
        result = replays[0].run()
        assert result.counts.verified_tokens >= short_trace().total_lens.sum()
        assert result.counts.retractions == 1

    failures = 0
    for error in each_failure(driver, work, replays, codes=CODES, in_turn=True):
        failures += error is not None
        driver.run()
        while replays:
            replay = replays.pop()
            assert_pages_of_rows(replay)
            assert_each_once(replay.allocator, replay.table)
            assert replay.kv is not None
            replay.kv.pool.check()
            del replay
    assert failures > 100


@pytest.mark.parametrize(("page_size", "least"), [(1, 130), (16, 150)])
def test_every_driver_call_of_an_engine_may_fail(driver: Driver, page_size: int, least: int) -> None:
    served: list[tuple[PoolReader, Engine, list[Request]]] = []
    prompts = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7]]
    expected = [alone(Request(prompt, 4)) for prompt in prompts]

    def work() -> None:
        served.clear()
        model = PoolReader(14 if page_size == 1 else 32, 2, 32, page_size)
        engine = Engine(model, 8)
        served.append((model, engine, [engine.submit(prompt, 4) for prompt in prompts]))
        engine.run()

    failures = 0
    for error in each_failure(driver, work, served, codes=CODES, in_turn=True):
        failures += error is not None
        driver.run()
        while served:
            model, engine, requests = served.pop()
            assert engine.prefix_cache is not None
            engine.prefix_cache.verify()
            assert_each_once(model.allocator, model.table, engine.prefix_cache.evictable_size())
            # It goes on, and nobody gets another token for it.
            engine.run()
            assert [request.tokens for request in requests] == expected
            assert is_whole(engine)
            model.pool.check()
            del model, engine, requests
    assert failures > least


@pytest.mark.parametrize("call", ["cuLaunchKernel", "cuEventRecord"])
def test_slots_that_could_not_be_written_are_not_taken(driver: Driver, call: str) -> None:
    allocator = TokenToKVPoolAllocator(64, "cuda", 4)
    # Often enough to fill the stage, if the positions were lost.
    for _ in range(2300):
        driver.fail(call)
        with pytest.raises(DriverError, match=call):
            allocator.alloc(60)
        if call == "cuLaunchKernel":
            driver.fail(call)
            with pytest.raises(DriverError, match=call):
                allocator.alloc_extend([0, 0], [30, 30], [-1, -1])
        assert allocator.available_size() == 64
    allocator.verify()
    slots = allocator.alloc(64)
    assert slots is not None
    assert sorted(slots.tolist()) == list(range(4, 68))


# A device that has failed for good, and a driver that goes


@pytest.mark.parametrize("code", [226, 700, 719, 721])
def test_a_context_that_has_failed_is_told_by_every_call_and_costs_nothing_else(
    driver: Driver, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    allocator = TokenToKVPoolAllocator(64, "cuda")
    table = ReqToTokenPool(4, 16, "cuda")
    kv = KVPool(64, 1, 1, 4, "cuda", torch.float32)
    slots, rows = allocator.alloc(4), table.alloc(1)
    assert slots is not None
    assert rows is not None
    calls: list[Callable[[], object]] = [
        kv.check,
        lambda: kv.move_kv([1], [2]),
        lambda: table.write((rows[0], slice(0, 4)), slots),
        lambda: KVPool(8, 1, 1, 4, "cuda", torch.float32),
    ]
    driver.break_context(code)
    for call in calls:
        with pytest.raises(DriverError, match=rf"failed with CUDA_ERROR_\w+ \({code}\)"):
            call()
    # Calls on the host still work, so that an engine can report what it had.
    allocator.free(slots)
    assert allocator.available_size() == 64
    allocator.verify()
    table.free(rows)
    assert table.available_size() == 4
    assert re.search(rf"zeroed when they are handed out again: .* \({code}\)", caplog.text)
    with pytest.raises(DriverError, match=rf"failed with CUDA_ERROR_\w+ \({code}\)"):
        table.alloc(4)
    driver.repair()


def test_survives_a_driver_that_shuts_down(driver: Driver) -> None:
    before = driver.device_bytes()
    kv = KVPool(64, 1, 1, 4, "cuda", torch.float32)
    kv.move_kv([1], [2])
    driver.deinitialize()
    with pytest.raises(DriverError, match=r"CUDA_ERROR_DEINITIALIZED \(4\)"):
        kv.move_kv([1], [2])
    del kv
    gc.collect()
    driver.repair()
    # Memory whose streams could not be awaited is returned later.
    allocator = TokenToKVPoolAllocator(8, "cuda")
    del allocator
    driver.run()
    assert driver.device_bytes() == before
