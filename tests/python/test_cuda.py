"""Pools on a GPU: nothing waits, a steady pair is free of driver calls, faults are reported later."""

from __future__ import annotations

import gc
import logging
import os
import re
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from common import MEMORY, NEVER, WAITS, Fence, on_stream, some, turns_of_others
from software import NEWER_CODES

from kvpool import (
    BackendUnavailableError,
    ConfigError,
    DriverError,
    GDNPool,
    IndexOwnershipError,
    KVPool,
    ReqToTokenPool,
    TokenToKVPoolAllocator,
)
from kvpool.tools.replay.config import ReplayConfig
from kvpool.tools.replay.replay import Replay
from kvpool.tools.traces import Trace

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from shared_fixtures import RunSnippet
    from software import Driver

pytestmark = pytest.mark.cuda


def ints(*values: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype).cuda()


def make_allocator(size: int = 4096, page_size: int = 1, **options: Any) -> TokenToKVPoolAllocator:  # noqa: ANN401
    return TokenToKVPoolAllocator(size, "cuda", page_size, **options)


# Driver calls


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("need_sort", [True, False])
@pytest.mark.parametrize("count", [1, 128])
@pytest.mark.parametrize("index_dtype", ["int32", "int64"])
def test_a_steady_pair_makes_no_driver_call(
    driver: Driver, page_size: int, need_sort: bool, count: int, index_dtype: str
) -> None:
    allocator = make_allocator(1 << 16, page_size, need_sort=need_sort, index_dtype=index_dtype)
    allocator.free(some(allocator.alloc(count)))
    driver.reset_calls()
    slots = some(allocator.alloc(count))
    allocator.free(slots)
    assert driver.calls() == 0
    for _ in range(3):
        slots = some(allocator.alloc(count))
        allocator.free(slots[: count // 2])
        allocator.free(slots[count // 2 :])
    assert driver.calls() == 0
    assert allocator.available_size() == allocator.size


def test_many_pairs_make_few_launches_and_never_wait(driver: Driver) -> None:
    allocator = make_allocator(1 << 16)
    driver.reset_calls()
    for _ in range(4000):
        allocator.free(some(allocator.alloc(16)))
    launches = driver.calls("cuLaunchKernel")
    # Once per staged batch, and once per merge of the whole pool.
    assert 0 < launches < 40
    assert driver.calls("cuEventRecord") == launches
    assert [driver.calls(name) for name in (*WAITS, *MEMORY)] == [0] * 7
    assert driver.calls("cuMemcpyHtoDAsync_v2") == 0


def test_a_batch_costs_one_launch_and_no_event(driver: Driver) -> None:
    allocator = make_allocator(1 << 16, 16)
    first = some(allocator.alloc_extend([0] * 32, [509] * 32, [-1] * 32))
    driver.run()
    driver.reset_calls()
    some(allocator.alloc_decode([510] * 32, first[508::509]))
    allocator.free(first)
    assert driver.calls("cuLaunchKernel") == 1
    others = ("cuMemcpyHtoDAsync_v2", "cuEventRecord", "cuEventQuery")
    assert [driver.calls(name) for name in others] == [0] * 3
    assert allocator.available_size() == 1 << 16


@pytest.mark.parametrize("index_dtype", ["int32", "int64"])
@pytest.mark.parametrize("runs", [1, 508, 509, 510, 1300])
def test_runs_cross_with_a_launch_or_are_copied(driver: Driver, runs: int, index_dtype: str) -> None:
    allocator = make_allocator(3 * runs, index_dtype=index_dtype)
    every = some(allocator.alloc(3 * runs))
    pairs = [slot for slot in range(1, 3 * runs + 1) if slot % 3]
    allocator.free(pairs)
    driver.run()
    driver.reset_calls()
    taken = some(allocator.alloc(2 * runs))
    writes = [driver.calls(name) for name in ("cuLaunchKernel", "cuMemcpyHtoDAsync_v2")]
    assert writes == ([1, 0] if runs <= 509 else [0, 1])
    assert taken.tolist() == pairs
    assert every.tolist() == list(range(1, 3 * runs + 1))


@pytest.mark.parametrize("index_dtype", ["int32", "int64"])
@pytest.mark.parametrize("need_sort", [True, False])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_any_part_of_slots_is_freed_as_on_the_host(
    driver: Driver, page_size: int, need_sort: bool, index_dtype: str
) -> None:
    options: Any = {"need_sort": need_sort, "index_dtype": index_dtype}
    pools = [TokenToKVPoolAllocator(4096, device, page_size, **options) for device in ("cuda", "cpu")]
    numbers = np.random.default_rng(7)
    kept: list[list[torch.Tensor]] = []
    driver.reset_calls()
    for _ in range(300):
        if kept and numbers.random() < 0.6:
            which = int(numbers.integers(len(kept)))
            first, last = sorted(numbers.integers(0, len(kept[which][0]) + 1, 2))
            step = int(numbers.choice([1, 1, 2, 3]))
            for pool, slots in zip(pools, kept[which], strict=True):
                pool.free(slots[first:last:step])
            # The rest is freed later, and sometimes a part of these slots a second time.
            if numbers.random() < 0.5:
                kept.pop(which)
        else:
            lens = [int(length) for length in numbers.integers(1, 400, numbers.integers(1, 4))]
            nothing = [0] * len(lens)
            batch = numbers.random() < 0.5
            taken = [
                pool.alloc_extend(nothing, lens, nothing) if batch else pool.alloc(sum(lens))
                for pool in pools
            ]
            if taken[1] is None:
                assert taken[0] is None
                kept.clear()
                for pool in pools:
                    pool.clear()
                continue
            kept.append([some(slots) for slots in taken])
            assert kept[-1][0].tolist() == kept[-1][1].tolist()
        on_device, on_host = ((pool.available_size(), pool.stats()["dropped_frees"]) for pool in pools)
        assert on_device == on_host
    assert pools[0].stats()["dropped_frees"] > 0
    assert driver.calls("cuMemcpyDtoHAsync_v2") == 0
    for pool in pools:
        pool.verify()


def test_a_slice_of_the_table_is_freed_without_the_driver(driver: Driver) -> None:
    allocator = make_allocator()
    table = ReqToTokenPool(8, 64, "cuda")
    row = some(table.alloc())[0]
    slots = some(allocator.alloc(40))
    table.write((row, slice(0, 40)), slots)
    driver.reset_calls()
    allocator.free(table.req_to_token[row, :10])
    allocator.free(table.read(row, 20)[10:])
    allocator.free(table.req_to_token[row, 20:40:2])
    assert driver.calls() == 0
    assert allocator.available_size() == 4096 - 10
    assert allocator.stats()["dropped_frees"] == 0


def kv_pool(layers: int = 4) -> KVPool:
    return KVPool(64, layers, 2, 8, "cuda", torch.bfloat16)


def gdn_pool() -> GDNPool:
    return GDNPool(4, 3, 2, 8, 8, 16, 4, "cuda", max_track_slots=2)


Call = tuple[int, "Callable[[], object]", "Sequence[torch.Tensor]"]


def by_index(device: str, count: int, form: Callable[[Sequence[int]], Any] = list) -> dict[str, Call]:
    """Calls with so many indices of a form: numbers of a list that cross, the call, and what it writes to."""
    generator = torch.Generator().manual_seed(count)
    size = 2 * count + 8
    kv = KVPool(size, 2, 2, 8, device, torch.bfloat16)
    gdn = GDNPool(size, 2, 1, 2, 2, 4, 2, device)
    table = ReqToTokenPool(count + 1, 8, device, padding_row=False)
    order = (torch.randperm(size, generator=generator) + 1).tolist()
    rows, others = form(order[:count]), form(order[count : 2 * count])
    cells, starts = (form(range(count)), form([3] * count)), form(range(0, 4 * count + 1, 4))
    values = torch.randn(count, 2, 8, generator=generator).to(torch.bfloat16).to(device)
    states = torch.randn(*gdn.recurrent_state[0].shape, generator=generator).to(gdn.recurrent_state[0].dtype)
    buffers = (*kv.k_buffer, *kv.v_buffer)
    for buffer in buffers:
        buffer.copy_(torch.arange(buffer.numel()).view(buffer.shape).to(buffer.dtype))
    for state in gdn.recurrent_state:
        state.copy_(states)
    out = torch.zeros(8 * count, dtype=torch.int32).to(device)
    k, v = torch.zeros_like(values), torch.zeros_like(values)
    cycle = [*order[1:count], order[0]]
    steps = 0 if count == 1 else 3 * (count - 1)
    gdn_states = [*gdn.recurrent_state]
    return {
        "set_kv_buffer": (count, lambda: kv.set_kv_buffer(0, rows, values, values), buffers),
        "gather_kv": (count, lambda: kv.gather_kv(1, rows, (k, v)), (k, v)),
        "move_kv": (2 * count, lambda: kv.move_kv(rows, others), buffers),
        "move_kv in order": (steps, lambda: kv.move_kv(order[:count], cycle), buffers),
        "reset_states": (count, lambda: gdn.reset_states(rows), gdn_states),
        "copy_states": (2 * count, lambda: gdn.copy_states(rows, others), gdn_states),
        "write": (3 * count, lambda: table.write(cells, rows), [table.req_to_token]),
        "build_kv_indices": (
            2 * count + 1,
            lambda: table.build_kv_indices(cells[0], starts, out),
            [out],
        ),
    }


KERNELS = {
    "set_kv_buffer": "kvpool_store_wide",
    "gather_kv": "kvpool_gather",
    "move_kv": "kvpool_move",
    "reset_states": "kvpool_zero",
    "copy_states": "kvpool_move",
    "write": "kvpool_write_points",
    "build_kv_indices": "kvpool_kv_indices",
}


@pytest.mark.parametrize("name", sorted(KERNELS))
def test_one_launch_a_call_and_nothing_else(driver: Driver, name: str) -> None:
    _, call, _ = by_index("cuda", 3, lambda values: ints(*values))[name]
    driver.run()
    driver.reset_calls()
    call()
    assert driver.calls("cuLaunchKernel") == driver.calls(f"launch:{KERNELS[name]}") == 1
    assert [driver.calls(name) for name in (*WAITS, *MEMORY)] == [0] * 7
    assert driver.calls("cuMemcpyHtoDAsync_v2") == driver.calls("cuMemcpyDtoHAsync_v2") == 0


def test_values_that_words_of_16_bytes_do_not_fit_are_stored_by_another_kernel(driver: Driver) -> None:
    pool = kv_pool()
    plain = torch.arange(3 * 16).bfloat16().view(3, 2, 8)
    apart = torch.cat([torch.zeros(1).bfloat16(), plain.flatten()]).to("cuda")[1:].view(3, 2, 8)
    for k, v in ((plain, apart), (apart, plain), (plain.float(), plain)):
        driver.reset_calls()
        pool.set_kv_buffer(0, ints(5, 3, 9), k.to("cuda"), v.to("cuda"))
        assert driver.calls("cuLaunchKernel") == driver.calls("launch:kvpool_store") == 1
        for buffer in (pool.k_buffer[0], pool.v_buffer[0]):
            assert torch.equal(buffer.cpu()[[5, 3, 9]], plain)
            buffer.zero_()


def test_indices_of_the_host_cost_one_launch(driver: Driver) -> None:
    pool = kv_pool()
    driver.reset_calls()
    pool.move_kv([3, 1], [5, 6])
    # A cycle has an order, which is also one launch.
    pool.move_kv([1, 2, 3], [2, 3, 1])
    for name in ("kvpool_move_listed", "kvpool_move_in_order_listed"):
        assert driver.calls(f"launch:{name}") == 1
    assert driver.calls("cuLaunchKernel") == 2
    assert driver.calls("cuMemcpyHtoDAsync_v2") == driver.calls("cuEventRecord") == 0


@pytest.mark.parametrize(
    "count", [1, 2, 297, 298, 330, 331, 454, 455, 465, 466, 858, 859, 948, 949, 954, 955, 1200]
)
def test_lists_cross_with_the_launch_or_are_copied_and_do_the_same(driver: Driver, count: int) -> None:
    # The rest of 4 KiB beside the other parameters.
    room = {
        "set_kv_buffer": 858,
        "gather_kv": 954,
        "move_kv": 908,
        "move_kv in order": 988,
        "reset_states": 948,
        "copy_states": 908,
        "write": 892,
        "build_kv_indices": 932,
    }
    on_cpu, on_gpu = by_index("cpu", count), by_index("cuda", count)
    for name, (numbers, call, written) in on_gpu.items():
        driver.run()
        driver.reset_calls()
        call()
        copies = int(numbers > room[name])
        made_calls = [driver.calls(called) for called in ("cuMemcpyHtoDAsync_v2", "cuEventRecord")]
        assert (name, made_calls) == (name, [copies, copies])
        _, right_call, expected = on_cpu[name]
        right_call()
        for tensor, right in zip(written, expected, strict=True):
            assert torch.equal(tensor.cpu(), right), name


@pytest.mark.parametrize("count", [1, 1200])
def test_lists_of_any_length_are_refused_within_a_capture(driver: Driver, count: int) -> None:
    for _, call, _ in by_index("cuda", count).values():
        driver.run()
        stream = driver.stream()
        with on_stream(stream):
            driver.begin_capture(stream)
            with pytest.raises(DriverError, match="cannot be captured"):
                call()
            driver.end_capture(stream)


def test_a_foreign_tensor_costs_one_copy(driver: Driver) -> None:
    allocator = make_allocator()
    slots = some(allocator.alloc(64))
    foreign = slots.to(torch.int64)
    driver.reset_calls()
    allocator.free(foreign[:32])
    assert (driver.calls("cuMemcpyDtoHAsync_v2"), driver.calls("cuLaunchKernel")) == (1, 0)
    allocator.free(foreign[32:][::2])
    assert (driver.calls("cuMemcpyDtoHAsync_v2"), driver.calls("cuLaunchKernel")) == (1, 1)
    assert [driver.calls(name) for name in (*WAITS, *MEMORY)] == [0] * 7


# Frees that the host does not know


def test_only_an_alloc_that_would_fail_waits(driver: Driver) -> None:
    allocator = make_allocator(100)
    first, second = some(allocator.alloc(40)), some(allocator.alloc(40))
    # They are kept, since memory that is given back lets everything run.
    foreign = first.to(torch.int64), second.clone()
    driver.set_patience(NEVER)
    driver.reset_calls()
    for tensor in foreign:
        allocator.free(tensor)
    assert allocator.available_size() == 100
    assert allocator.stats()["pending"] == 80
    assert some(allocator.alloc(20)).numel() == 20
    assert [driver.calls(name) for name in WAITS] == [0] * 3
    assert some(allocator.alloc(30)).numel() == 30
    # A merge takes all frees before it.
    assert driver.calls("cuEventSynchronize") == 2
    assert allocator.alloc(100) is None
    allocator.verify()


def free_in_one_of_many_ways(
    allocator: TokenToKVPoolAllocator, row: list[int], way: int
) -> tuple[torch.Tensor, ...]:
    """Frees a row, whole or in parts that only the GPU has. Returns tensors to keep alive."""
    tensor, page_size = ints(*row), allocator.page_size
    pages = tensor[::page_size] // page_size
    half = len(row) // page_size // 2 * page_size
    match way:
        case 0:
            allocator.free(row)
        case 1:
            allocator.free_segment(tensor, start_pos=0)
        case 2:
            allocator.free_pages(pages)
        case 3:
            allocator.free_segments([(tensor[half:], half), (row[:half], 0)])
        case _:
            with allocator.free_group():
                allocator.free_segment(tensor[:page_size], start_pos=0)
                allocator.free(row[page_size:])
    return tensor, pages


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("need_sort", [True, False])
def test_slots_do_not_depend_on_when_frees_land(driver: Driver, page_size: int, need_sort: bool) -> None:
    def history(patience: int) -> list[object]:
        """The results of a history with a fixed seed, while the device is `patience` queries late."""
        numbers = np.random.default_rng(7)
        allocator = make_allocator(40 * page_size, page_size, need_sort=need_sort)
        rows: list[list[int]] = []
        answers: list[object] = []
        kept = []
        driver.set_patience(patience)
        for _ in range(300):
            if rows and numbers.random() < 0.5:
                row = rows.pop(numbers.integers(len(rows)))
                kept.append(free_in_one_of_many_ways(allocator, row, int(numbers.integers(5))))
            elif numbers.random() < 0.05:
                allocator.merge_and_sort_free()
            else:
                contiguous = bool(numbers.random() < 0.1)
                taken = allocator.alloc(int(numbers.integers(1, 7)) * page_size, contiguous=contiguous)
                if taken is not None:
                    rows.append(taken.tolist())
                answers.append(None if taken is None else rows[-1])
            answers.append(allocator.available_size())
        driver.run()
        allocator.verify()
        assert allocator.stats()["dropped_frees"] == 0
        return answers

    expected = history(0)
    assert None in expected
    for patience in (1, 3, 11, NEVER):
        assert history(patience) == expected


def test_frees_that_are_known_stay_behind_those_that_are_not(driver: Driver) -> None:
    allocator = make_allocator(8, need_sort=False)
    first, second, rest = (some(allocator.alloc(count)) for count in (2, 3, 3))
    foreign = first.to(torch.int64)
    driver.set_patience(NEVER)
    driver.reset_calls()
    allocator.free(foreign)
    allocator.free(second)
    allocator.free(rest)
    assert (allocator.available_size(), allocator.stats()["pending"]) == (8, 8)
    assert [driver.calls(name) for name in WAITS] == [0] * 3
    assert some(allocator.alloc(4)).tolist() == [1, 2, 3, 4]
    assert allocator.free_slots.tolist() == [5, 6, 7, 8]


def test_segments_are_counted_exactly_while_they_land(driver: Driver) -> None:
    allocator = make_allocator(64, 16)
    row = some(allocator.alloc(64))
    foreign = row.to(torch.int64)
    pages = foreign[48:49] // 16
    driver.set_patience(NEVER)
    driver.reset_calls()
    allocator.free_segments([(foreign[:16], 0), (foreign[32:33], 32)])
    assert allocator.available_size() == 32
    allocator.free_pages(pages)
    assert (allocator.available_size(), allocator.stats()["pending"]) == (48, 48)
    assert [driver.calls(name) for name in WAITS] == [0] * 3
    allocator.verify()
    assert (allocator.available_size(), allocator.stats()["pending"]) == (48, 0)


def test_cuda_without_a_number_is_the_current_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 7)
    with pytest.raises(BackendUnavailableError, match="cuda:7"):
        make_allocator(8)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert TokenToKVPoolAllocator(8).device == "cuda:0"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 7)
    assert TokenToKVPoolAllocator(8, torch.device("cuda")).device == "cuda:0"
    assert TokenToKVPoolAllocator(8, "cuda:0").device == "cuda:0"


def test_tensors_of_inference_mode_are_known_all_the_same(driver: Driver) -> None:
    allocator = make_allocator()
    with torch.inference_mode():
        slots = some(allocator.alloc(8))
        assert not slots.is_inference()
        driver.reset_calls()
        allocator.free(slots[4:])
        assert driver.calls() == 0
        slots[:4] = slots[:4].flip(0)
        allocator.free(slots[:4])
        assert driver.calls("cuMemcpyDtoHAsync_v2") > 0
    allocator.verify()
    assert allocator.available_size() == 4096


def test_a_group_waits_for_what_is_landing(driver: Driver) -> None:
    allocator = make_allocator(64)
    slots = some(allocator.alloc(12))
    foreign = slots[4:8].to(torch.int64)
    driver.set_patience(NEVER)
    with allocator.free_group():
        allocator.free(slots[:4])
        allocator.free(foreign)
        allocator.free([9, 10, 4])
        assert allocator.stats()["available"] == 52
    assert allocator.stats()["pending"] > 0
    allocator.verify()
    stats = allocator.stats()
    # 4 was named twice in the group.
    assert (stats["available"], stats["dropped_frees"]) == (62, 1)


@pytest.mark.parametrize("passes_first", [True, False])
def test_a_fence_and_a_copy_are_both_waited_for(driver: Driver, passes_first: bool) -> None:
    allocator = make_allocator(64)
    slots = some(allocator.alloc(8))
    foreign, fence = slots.to(torch.int64), Fence()
    driver.set_patience(NEVER)
    allocator.free(foreign, after=fence)
    assert allocator.available_size() == 56
    if passes_first:
        fence.done = True
        assert allocator.available_size() == 64
        assert allocator.stats()["pending"] == 8
        allocator.verify()
    else:
        allocator.verify()
        assert allocator.stats()["fenced"] == 8
        fence.done = True
    assert allocator.available_size() == 64
    assert allocator.stats()["in_use"] == 0


def test_clear_forgets_frees_that_have_not_landed(driver: Driver) -> None:
    allocator = make_allocator(64)
    slots = some(allocator.alloc(8))
    foreign = slots.to(torch.int64), slots.clone()
    driver.set_patience(NEVER)
    allocator.free(foreign[0])
    allocator.free_group_begin()
    allocator.free(foreign[1])
    allocator.clear()
    taken = some(allocator.alloc(64))
    driver.run()
    allocator.verify()
    assert allocator.is_allocated(taken).all()
    assert allocator.stats()["dropped_frees"] == 0


def test_bad_values_are_dropped_when_they_land(caplog: pytest.LogCaptureFixture) -> None:
    allocator = make_allocator(64)
    some(allocator.alloc(4))
    with caplog.at_level(logging.WARNING, logger="kvpool"):
        allocator.free(ints(1, 2, 2, 0, -7, 99, 2**40))
        allocator.verify()
    assert allocator.stats()["dropped_frees"] == 5
    assert "2 (named twice)" in caplog.text
    assert allocator.is_allocated([1, 2, 3, 4]).tolist() == [False, False, True, True]


def test_strict_tells_of_bad_values_when_they_land() -> None:
    allocator = make_allocator(64, strict=True)
    some(allocator.alloc(4))
    allocator.free(ints(1, 2, 99))
    torch.cuda.synchronize()
    # A call that only looks does not report it, and leaves it to the next call.
    assert allocator.stats()["pending"] == 3
    with pytest.raises(IndexOwnershipError, match=r"did not know.*99"):
        allocator.verify()
    allocator.verify()
    assert allocator.is_allocated([1, 2]).all()
    allocator.free(ints(1, 2))
    assert allocator.is_allocated([1, 2, 3]).tolist() == [False, False, True]


def test_more_values_than_the_pool_has_slots_are_read_at_once() -> None:
    allocator = make_allocator(64)
    slots = some(allocator.alloc(64))
    allocator.free(torch.cat([slots.long(), torch.zeros(100_000, dtype=torch.int64).cuda()]))
    assert allocator.stats()["dropped_frees"] == 100_000
    assert allocator.available_size() == 64


def test_threads_run_while_a_free_reads_more_values_than_the_pool_has_slots(
    caplog: pytest.LogCaptureFixture,
) -> None:
    allocator, many = make_allocator(64), torch.zeros(100_000, dtype=torch.int64).cuda()
    # A message that is written lets others run, too.
    caplog.set_level(logging.CRITICAL, "kvpool")

    def work() -> None:
        for _ in range(100):
            allocator.free(many)

    # The first of them makes a buffer, which takes a turn or two.
    assert turns_of_others(work) > 10


def test_a_pool_on_the_cpu_frees_what_is_on_a_gpu() -> None:
    allocator = TokenToKVPoolAllocator(64, "cpu")
    some(allocator.alloc(8))
    allocator.free(ints(1, 2, 3))
    allocator.verify()
    assert allocator.available_size() == 59


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("count", "parts"), [(5, 1), (128 << 10, 1), ((128 << 10) + 3, 2), (300 << 10, 3)])
def test_values_that_are_waited_for_come_through_page_locked_memory(
    driver: Driver, dtype: torch.dtype, count: int, parts: int
) -> None:
    allocator = make_allocator(64)
    assert allocator.alloc(8) is not None
    numbers = torch.arange(count) % 20
    values = numbers.to(dtype).cuda()
    allocator.is_allocated(values[:1])
    driver.reset_calls()
    found = allocator.is_allocated(values)
    assert [driver.calls(name) for name in ("cuMemcpyDtoHAsync_v2", "wait:spins")] == [parts] * 2
    assert driver.calls("cuEventSynchronize") == parts
    assert [driver.calls(name) for name in ("cuStreamSynchronize", "cuMemHostAlloc")] == [0] * 2
    assert (found == (numbers >= 1) & (numbers <= 8)).all()


def test_values_that_are_waited_for_and_fail_to_come_are_asked_for_again(driver: Driver) -> None:
    allocator = make_allocator(64)
    assert allocator.alloc(8) is not None
    # As many as the ring has room for.
    values = (torch.arange(128 << 10) % 20).cuda()
    assert allocator.is_allocated(values)[1]
    for call in ("cuMemcpyDtoHAsync_v2", "cuEventRecord", "cuEventSynchronize", "cuEventQuery"):
        driver.fail(call)
        with pytest.raises(DriverError, match=f"{call} failed"):
            allocator.is_allocated(values)
        assert driver.planned() == 0
        driver.run()
        locked = driver.page_locked_bytes()
        assert allocator.is_allocated(values)[1]
        assert driver.page_locked_bytes() == locked


# The table


def test_values_that_the_host_does_not_know_reach_its_copy(driver: Driver) -> None:
    allocator, table = make_allocator(64), ReqToTokenPool(4, 32, "cuda")
    row = some(table.alloc())[0]
    slots = some(allocator.alloc(8))
    foreign = slots.to(torch.int64)
    driver.set_patience(NEVER)
    table.write((row, slice(0, 8)), foreign)
    driver.reset_calls()
    # The kernel has not told yet what it wrote, so the device is asked.
    allocator.free(table.req_to_token[row, :4])
    assert driver.calls("cuMemcpyDtoHAsync_v2") == 1
    driver.run()
    driver.set_patience(1)
    driver.reset_calls()
    allocator.free(table.req_to_token[row, 4:8])
    assert driver.calls("cuMemcpyDtoHAsync_v2") == 0
    allocator.verify()
    assert allocator.stats()["dropped_frees"] == 0
    assert allocator.available_size() == 64


def test_writes_keep_their_order_in_the_copy(driver: Driver) -> None:
    allocator, table = make_allocator(64), ReqToTokenPool(4, 32, "cuda")
    row = some(table.alloc())[0]
    some(allocator.alloc(20))
    driver.set_patience(NEVER)
    table.write((row, slice(0, 4)), ints(1, 2, 3, 4))
    table.write((row, slice(2, 6)), [5, 6, 7, 8])
    table.write((ints(row, row), ints(0, 5)), ints(9, 10, dtype=torch.int32))
    driver.set_patience(1)
    driver.run()
    assert table.read(row, 6).tolist() == [9, 2, 5, 6, 7, 10]
    driver.reset_calls()
    allocator.free(table.read(row, 6))
    assert driver.calls("cuMemcpyDtoHAsync_v2") == 0
    assert allocator.is_allocated(range(1, 11)).tolist() == [
        n not in {9, 2, 5, 6, 7, 10} for n in range(1, 11)
    ]


def test_rows_that_are_freed_while_a_write_is_under_way_come_out_clean(driver: Driver) -> None:
    table = ReqToTokenPool(1, 32, "cuda")
    row = some(table.alloc())[0]
    driver.set_patience(NEVER)
    table.write((ints(row, row), ints(3, 30)), ints(7, 8))
    table.free(row)
    assert some(table.alloc())[0] == row
    assert not table.req_to_token.any()
    allocator = make_allocator(64)
    some(allocator.alloc(8))
    driver.set_patience(1)
    allocator.free(table.read(row, 32))
    allocator.verify()
    assert allocator.stats()["dropped_frees"] == 32


@pytest.mark.parametrize("how", ["mark_modified", "version"])
def test_foreign_writes_are_not_taken_from_the_copy(how: str) -> None:
    allocator, table = make_allocator(64), ReqToTokenPool(4, 32, "cuda")
    one, two = some(table.alloc(2))
    slots = some(allocator.alloc(8))
    table.write((one, slice(0, 4)), slots[:4])
    table.write((two, slice(0, 4)), slots[4:])
    if how == "version":
        table.req_to_token[one, :4] = slots[4:]
        assert table.req_to_token._version > 0
    else:
        # A kernel that PyTorch does not know of.
        raw = table.read(one, 4)
        raw.data.copy_(slots[4:])
        table.mark_modified([one])
    allocator.free(table.req_to_token[one, :4])
    assert allocator.is_allocated(range(1, 9)).tolist() == [True] * 4 + [False] * 4
    assert allocator.stats()["dropped_frees"] == 0


def test_saying_what_was_written_makes_the_rest_known_again(driver: Driver) -> None:
    allocator, table = make_allocator(64), ReqToTokenPool(4, 32, "cuda")
    one, two = some(table.alloc(2))
    slots = some(allocator.alloc(8))
    table.write((two, slice(0, 8)), slots)
    table.req_to_token[one, :3] = slots[:3]
    table.mark_modified([one])
    driver.reset_calls()
    allocator.free(table.req_to_token[two, :4])
    assert driver.calls("cuMemcpyDtoHAsync_v2") == 0
    table.free(one)
    assert not table.req_to_token[one].any()
    table.req_to_token[one, 20] = 5
    table.clear()
    assert not table.req_to_token.any()
    assert some(table.alloc(4)) == [1, 2, 3, 4]


def test_slots_of_a_table_that_others_write_are_copied_from_it(driver: Driver) -> None:
    allocator, table = make_allocator(64, strict=True), ReqToTokenPool(2, 8, "cuda", foreign_writes=True)
    [row] = some(table.alloc())
    table.write((row, slice(0, 4)), some(allocator.alloc(4)))
    # A kernel of another library leaves no trace.
    table.req_to_token.data[row, :2] = ints(3, 4, dtype=torch.int32)
    driver.reset_calls()
    allocator.free(table.read(row, 2))
    assert driver.calls("cuMemcpyDtoHAsync_v2") == 1
    assert allocator.is_allocated([1, 2, 3, 4]).tolist() == [True, True, False, False]


def test_too_many_unknown_writes_make_rows_unknown_and_nothing_wrong(driver: Driver) -> None:
    allocator, table = make_allocator(1 << 17), ReqToTokenPool(2, 1 << 16, "cuda")
    one, two = some(table.alloc(2))
    driver.set_patience(NEVER)
    for row in (one, two, one, two, one, two, one, two):
        slots = some(allocator.alloc(1 << 16))
        table.write((row, slice(0, 1 << 16)), slots.to(torch.int64))
        allocator.clear()
    some(allocator.alloc(1 << 17))
    driver.run()
    driver.set_patience(1)
    allocator.free(table.req_to_token[two])
    allocator.verify()
    assert allocator.stats()["dropped_frees"] == 0
    assert allocator.available_size() == 1 << 16


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_kv_indices_are_the_rows_one_after_the_other(where: str, dtype: torch.dtype) -> None:
    table = ReqToTokenPool(8, 300, "cuda")
    rows = some(table.alloc(3))
    generator = torch.Generator().manual_seed(1)
    contents = torch.randint(1, 1000, (3, 300), generator=generator, dtype=torch.int32)
    for row, values in zip(rows, contents, strict=True):
        table.write((row, slice(0, 300)), values)
    order, lens = [2, 0, 1, 1], [300, 0, 17, 129]
    indptr = torch.tensor([0, *lens], dtype=dtype).cumsum(0).to(dtype).to(where)
    out = torch.full((500,), -1, dtype=torch.int32).cuda()
    table.build_kv_indices(torch.tensor([rows[i] for i in order], dtype=dtype).to(where), indptr, out)
    expected = torch.cat([contents[i, :n] for i, n in zip(order, lens, strict=True)])
    found = out.cpu()
    assert torch.equal(found[: len(expected)], expected)
    assert found[len(expected) :].eq(-1).all()


# Last slots that the host does not know


@pytest.mark.parametrize("index_dtype", ["int32", "int64"])
@pytest.mark.parametrize("last_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("need_sort", [True, False])
def test_last_slots_that_only_the_gpu_knows_give_the_same_slots(
    driver: Driver, index_dtype: str, last_dtype: torch.dtype, need_sort: bool
) -> None:
    options: Any = {"index_dtype": index_dtype, "need_sort": need_sort, "debug": True, "strict": True}
    known, unknown = (make_allocator(600 * 8, 8, **options) for _ in range(2))
    numbers = np.random.default_rng(3)
    requests: dict[int, list[int]] = {}
    for step in range(40):
        for _ in range(int(numbers.integers(1, 3))):
            requests[len(requests) + 100 * step] = []
        batch = [name for name in requests if numbers.random() < 0.8]
        is_decode = bool(numbers.random() < 0.5)
        prefix = [len(requests[name]) for name in batch]
        seq = [length + (1 if is_decode else int(numbers.integers(0, 20))) for length in prefix]
        last = [requests[name][-1] if requests[name] else -1 for name in batch]
        # As an engine has it: gathered from a table, and computed.
        computed = ints(*last, dtype=last_dtype) + 0
        lens = (seq,) if is_decode else (prefix, seq)
        name = "alloc_decode" if is_decode else "alloc_extend"
        expected = some(getattr(known, name)(*lens, last))
        driver.run()
        driver.reset_calls()
        taken = some(getattr(unknown, name)(*lens, computed))
        assert [driver.calls(wait) for wait in WAITS] == [0] * 3
        continues = any(length % 8 and end > length for length, end in zip(prefix, seq, strict=True))
        # One lists the slots, and one adds those that only the GPU knows.
        assert driver.calls("cuLaunchKernel") == int(prefix != seq) + int(continues)
        assert (taken.dtype, taken.tolist()) == (expected.dtype, expected.tolist())
        slots = iter(expected.tolist())
        for request, length, end in zip(batch, prefix, seq, strict=True):
            requests[request] += [next(slots) for _ in range(end - length)]
        if step % 4 == 3:
            done = requests.pop(next(iter(requests)))
            for allocator in (known, unknown):
                allocator.free(done)
        assert known.available_size() == unknown.available_size()
    driver.run()
    for allocator in (known, unknown):
        allocator.verify()
    assert sum(leak.count for leak in unknown.leaks()) == sum(leak.count for leak in known.leaks())
    kept = [slot for slots in requests.values() for slot in slots]
    unknown.free(kept)
    assert unknown.available_size() == 600 * 8


def test_slots_behind_those_are_freed_by_a_copy(driver: Driver) -> None:
    allocator = make_allocator(64, 4, strict=True)
    first = some(allocator.alloc_extend([0, 0], [3, 5], [-1, -1]))
    more = some(allocator.alloc_extend([3, 5], [6, 6], ints(6, 12) + 0))
    driver.reset_calls()
    allocator.free(more)
    assert driver.calls("cuMemcpyDtoHAsync_v2") == 1
    driver.run()
    # Pages 1, 4 and 3; page 2 holds the first four of the second request.
    assert more.tolist() == [7, 16, 17, 13]
    allocator.free(first[3:4])
    assert allocator.available_size() == 64
    allocator.verify()


def test_as_many_requests_as_there_are_continue_their_pages(driver: Driver) -> None:
    count = 1500
    allocator = make_allocator(2 * count, 2, index_dtype="int64")
    first = some(allocator.alloc_extend([0] * count, [1] * count, [-1] * count))
    driver.reset_calls()
    second = some(allocator.alloc_decode([2] * count, first + 0))
    assert (driver.calls("cuLaunchKernel"), driver.calls("cuMemcpyHtoDAsync_v2")) == (4, 1)
    assert torch.equal(second.cpu(), first.cpu() + 1)


@pytest.mark.parametrize("wrong", [-1, 3, 4, 5, 7, 2**40, 68])
def test_last_slots_that_the_gpu_finds_wrong_give_padding_and_are_told_later(wrong: int) -> None:
    allocator = make_allocator(64, 4)
    first = some(allocator.alloc_extend([0, 0], [3, 3], [-1, -1]))
    assert first.tolist() == [4, 5, 6, 8, 9, 10]
    mixed = some(allocator.alloc_extend([3, 3], [5, 6], ints(wrong, 10) + 0))
    assert mixed.tolist() == [0, 12, 11, 16, 17]
    before = allocator.available_size()
    with pytest.raises(ConfigError, match=f"last_loc {wrong} of request 0 does not end its prefix"):
        allocator.alloc_decode([1], [-1])
    assert allocator.available_size() == before
    assert some(allocator.alloc_decode([1], [-1])).tolist() == [20]


def test_lengths_that_contradict_the_number_of_last_slots_on_the_gpu_are_refused() -> None:
    allocator = make_allocator(64, 4)
    with pytest.raises(ConfigError, match="2 prefix_lens, 2 seq_lens and 3 last_loc"):
        allocator.alloc_extend([0, 0], [1, 1], ints(1, 2, 3) + 0)
    assert allocator.available_size() == 64


def test_a_pool_on_the_cpu_waits_for_last_slots_on_a_gpu() -> None:
    allocator = TokenToKVPoolAllocator(64, "cpu", 4)
    allocator.alloc(3)
    assert some(allocator.alloc_decode([4], ints(6) + 0)).tolist() == [7]


# Faults


def test_rows_that_only_the_gpu_knows_to_be_wrong_are_left_out_and_told_later() -> None:
    pool = kv_pool(1)
    k = torch.ones(4, 2, 8, dtype=torch.bfloat16).cuda()
    pool.set_kv_buffer(0, ints(1, 72, -1, 3), k, k)
    with pytest.raises(IndexError, match=r"slot 72 at position 1 .*\[0, 72\)"):
        pool.check()
    pool.check()
    buffer = pool.k_buffer[0].cpu()
    assert buffer.count_nonzero(dim=(1, 2)).nonzero().flatten().tolist() == [1, 3]
    pool.set_kv_buffer(0, ints(2**40, dtype=torch.int64), k[:1], k[:1])
    pool.k_buffer[0].cpu()
    with pytest.raises(IndexError, match=str(2**40)):
        pool.set_kv_buffer(0, ints(2), k[:1], k[:1])
    assert not pool.k_buffer[0].cpu()[2].any()


def test_gathering_missing_rows_gives_zeros_and_raises_later() -> None:
    pool = kv_pool(1)
    pool.k_buffer[0].fill_(1)
    poison = torch.full((3, 2, 8), 9.0, dtype=torch.bfloat16)
    out = poison.cuda(), poison.cuda()
    pool.gather_kv(0, ints(1, -1, 2), out)
    with pytest.raises(IndexError, match="slot -1 at position 1"):
        pool.check()
    assert out[0].cpu()[:, 0, 0].tolist() == [1, 0, 1]


def test_moves_and_states_that_are_not_there_are_left_out_and_told_later() -> None:
    pool = kv_pool(1)
    pool.k_buffer[0].fill_(1)
    pool.move_kv(ints(1, 2), ints(3, 99))
    with pytest.raises(IndexError, match="slot 99"):
        pool.check()
    states = gdn_pool()
    states.recurrent_state.fill_(1)
    states.reset_states(ints(1, 7))
    states.recurrent_state.cpu()
    with pytest.raises(IndexError, match="state 7"):
        states.copy_states(ints(1), ints(2))
    assert states.recurrent_state.cpu().count_nonzero(dim=(0, 2, 3, 4)).tolist() == [384, 0, *[384] * 5]
    states.copy_states(ints(1, -3), ints(2, 3))
    states.recurrent_state.cpu()
    with pytest.raises(IndexError, match="state -3"):
        states.reset_states([1])


@pytest.mark.parametrize(
    ("row", "column", "value", "told"),
    [(9, 0, 1, "row 9"), (1, 32, 1, "column 32"), (1, 0, 2**31, str(2**31)), (-1, 0, 1, "row -1")],
)
def test_places_that_are_not_there_are_left_out_and_told_later(
    row: int, column: int, value: int, told: str
) -> None:
    table = ReqToTokenPool(8, 32, "cuda")
    table.write((ints(2, row), ints(5, column)), ints(6, value))
    assert table.req_to_token.cpu().nonzero().tolist() == [[2, 5]]
    with pytest.raises((IndexError, ValueError), match=told):
        table.write((1, 0), 5)
    table.write((1, 0), 5)
    assert table.req_to_token.cpu()[1, 0] == 5


@pytest.mark.parametrize(("rows", "indptr"), [([9], [0, 2]), ([1], [0, 33]), ([1], [3, 2]), ([1], [-1, 2])])
def test_kv_indices_that_do_not_fit_are_left_out_and_told_later(rows: list[int], indptr: list[int]) -> None:
    table = ReqToTokenPool(8, 32, "cuda")
    out = ints(*[7] * 40, dtype=torch.int32)
    table.build_kv_indices(ints(*rows), ints(*indptr), out)
    assert out.cpu().eq(7).all()
    with pytest.raises(IndexError):
        table.write((1, 0), 5)
    with pytest.raises(IndexError):
        table.build_kv_indices(rows, indptr, out)


# Streams and graphs


def test_work_goes_to_the_current_stream(driver: Driver) -> None:
    pool, allocator, states = kv_pool(), make_allocator(), gdn_pool()
    table = ReqToTokenPool(8, 64, "cuda")
    k = torch.ones(2, 2, 8, dtype=torch.bfloat16).cuda()
    v, indices = k.clone(), ints(1, 2)
    driver.run()
    stream = driver.stream()
    calls: list[Callable[[], object]] = [
        lambda: pool.set_kv_buffer(0, indices, k, k),
        lambda: pool.gather_kv(0, indices, (k, v)),
        lambda: pool.move_kv([1], [2]),
        lambda: states.reset_states(indices),
        lambda: states.copy_states(indices[:1], indices[1:]),
        lambda: table.write((1, slice(0, 2)), indices),
        lambda: table.write((1, slice(0, 2)), [1, 2]),
        lambda: allocator.free(indices),
        lambda: allocator.alloc(3),
    ]
    for call in calls:
        driver.run()
        with on_stream(stream):
            call()
        assert driver.pending(stream) > 0


def test_capture_and_replay_of_set_kv_buffer(driver: Driver) -> None:
    pool = kv_pool(1)
    indices = ints(1, 2)
    k = torch.ones(2, 2, 8, dtype=torch.bfloat16).cuda()
    driver.run()
    stream = driver.stream()
    with on_stream(stream):
        driver.begin_capture(stream)
        pool.set_kv_buffer(0, indices, k, k)
        with pytest.raises(DriverError, match="captured"):
            pool.set_kv_buffer(0, [1, 2], k, k)
        with pytest.raises(DriverError, match="captured"):
            pool.move_kv([1], [2])
        graph = driver.end_capture(stream)
    driver.run()
    assert not pool.k_buffer[0].cpu().any()
    for slots, value in (((3, 4), 5.0), ((5, 6), 7.0)):
        indices.copy_(torch.tensor(slots))
        k.fill_(value)
        driver.replay(graph, stream)
        driver.run(stream)
        buffer = pool.k_buffer[0].cpu()
        assert buffer[list(slots)].eq(value).all()
    assert buffer[[3, 4]].eq(5).all()
    assert not buffer[[1, 2]].any()


def test_slots_written_outside_of_a_capture_are_not_waited_for_within(driver: Driver) -> None:
    allocator = make_allocator(64)
    slots = some(allocator.alloc(3))  # the next ones are there, for the stream that was current
    stream = driver.stream()
    with on_stream(stream):
        driver.begin_capture(stream)
        with pytest.raises(DriverError, match="written outside of the capture cannot be captured"):
            allocator.alloc(3)
        assert driver.end_capture(stream) >= 1
        assert allocator.available_size() == 61
        again = some(allocator.alloc(3))
    driver.run()
    assert again.tolist() == [7, 8, 9]
    allocator.free(slots)
    allocator.verify()


# Failures


@pytest.mark.parametrize("code", NEWER_CODES)
@pytest.mark.parametrize("call", ["cuLaunchKernel", "cuEventQuery", "cuMemFree_v2", "cuStreamIsCapturing"])
def test_codes_that_are_newer_than_every_header_are_told(driver: Driver, call: str, code: int) -> None:
    pool, k = kv_pool(1), torch.ones(2, 2, 8, dtype=torch.bfloat16).cuda()
    allocator = make_allocator(64)
    allocator.free(some(allocator.alloc(4)).to(torch.int64))
    driver.fail(call, 0, code)
    told = []
    try:
        allocator.available_size()
        allocator.stats()
        some(allocator.alloc(64))
        pool.set_kv_buffer(0, [1, 2], k, k)
        del pool  # whoever gives memory back tells nobody
    except DriverError as error:
        told.append(str(error))
    gc.collect()
    assert driver.planned() == 0
    name = "a code that the driver has no name for" if code == 9999 else r"CUDA_ERROR_\w+"
    assert all(re.search(rf"{call} failed with {name} \({code}\)", text) for text in told)
    # Returning memory asks first whether its streams are captured, and does not report it either.
    assert told or call in {"cuMemFree_v2", "cuStreamIsCapturing"}


def test_the_driver_is_the_one_that_everybody_opens(
    driver: Driver, tmp_path: Path, run_snippet: RunSnippet
) -> None:
    assert driver.calls("cuInit") >= 0
    for name in ("libcuda.so", "libcuda.so.1"):
        shutil.copy(os.environ["LD_PRELOAD"], tmp_path / name)
    code = """
        import kvpool
        kvpool.TokenToKVPoolAllocator(8, "cuda")
        with open("/proc/self/maps") as maps:
            print(*sorted({line.split("/")[-1].strip() for line in maps if "libcuda.so" in line}))
    """
    env = {"LD_PRELOAD": "", "LD_LIBRARY_PATH": str(tmp_path)}
    assert run_snippet(code, hidden=["torch"], env=env).split() == ["libcuda.so.1"]


def test_tensors_outlive_their_pool_and_then_give_everything_back(driver: Driver) -> None:
    gc.collect()
    before = driver.device_bytes(), driver.page_locked_bytes()
    allocator, pool, table = make_allocator(), kv_pool(), ReqToTokenPool(4, 32, "cuda")
    kept = [some(allocator.alloc(5)), pool.k_buffer[0], table.req_to_token[1]]
    pool.k_buffer[0].fill_(3)
    del allocator, pool, table
    gc.collect()
    assert kept[0].tolist() == [1, 2, 3, 4, 5]
    assert kept[1].eq(3).all()
    assert driver.device_bytes() > before[0]
    kept.clear()
    gc.collect()
    assert (driver.device_bytes(), driver.page_locked_bytes()) == before


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"KVPOOL_SOFTWARE_DEVICES": "0"}, "the driver reports 0 devices and has no cuda:0"),
        ({"KVPOOL_SOFTWARE_VERSION": "11080"}, "offers CUDA 11.8; at least 12.0 is needed"),
        ({"KVPOOL_SOFTWARE_INIT_ERROR": "100"}, "cuInit failed with CUDA_ERROR_NO_DEVICE"),
    ],
)
def test_missing_driver_functions_are_named(
    driver: Driver, run_snippet: RunSnippet, env: dict[str, str], words: str
) -> None:
    assert driver.calls() == 0
    code = """
        import kvpool
        for kind, arguments in ((kvpool.TokenToKVPoolAllocator, (8,)), (kvpool.KVPool, (8, 1, 1, 2))):
            try:
                kind(*arguments, device="cuda")
            except kvpool.BackendUnavailableError as error:
                print(error)
        # Ordinary memory stands in for page-locked memory.
        print(kvpool.KVPool(8, 1, 1, 2, "cpu").device)
    """
    lines = run_snippet(code, hidden=["torch"], env=env).splitlines()
    assert len(lines) == 3
    assert words in lines[0]
    assert words in lines[1]
    assert lines[2] == "cpu"


@pytest.mark.parametrize("version", [12_000, 12_040, 13_020])
def test_kernels_are_ready_for_captures_whatever_the_driver_offers(
    driver: Driver, run_snippet: RunSnippet, version: int
) -> None:
    assert driver.calls("cuInit") >= 0
    code = """
        import ctypes, kvpool
        soft = ctypes.CDLL(None)
        soft.soft_stream.restype = ctypes.c_size_t
        soft.soft_end_capture.restype = ctypes.c_long
        pool = kvpool.KVPool(8, 1, 1, 4, "cuda", "float32")
        zeros = [kvpool._kvpool._zeros([2], "int32", "cuda") for _ in range(2)]
        stream = ctypes.c_size_t(soft.soft_stream(0))
        kvpool._kvpool._use_stream(stream.value)
        assert soft.soft_begin_capture(stream) == 0
        pool.move_kv(*zeros)
        print(soft.soft_end_capture(stream) > 0, soft.soft_calls(b"cuFuncGetAttribute") > 0)
    """
    env = {"KVPOOL_SOFTWARE_VERSION": str(version)}
    assert run_snippet(code, hidden=["torch"], env=env).split() == ["True", str(version < 12_040)]


def test_without_pytorch_tensors_are_ours_and_come_to_the_host(
    driver: Driver, run_snippet: RunSnippet
) -> None:
    assert driver.calls() == 0
    code = """
        import kvpool, numpy
        allocator = kvpool.TokenToKVPoolAllocator(64, "cuda")
        slots = allocator.alloc(5)
        print(type(slots).__name__, slots.device, slots.cpu().numpy().tolist(), slots.__dlpack_device__())
        allocator.free(slots)
        print(allocator.stats()["pending"], allocator.available_size())
        # Once somebody else has it, it may be written to.
        again = allocator.alloc(5)
        capsule = again.__dlpack__(stream=1, max_version=(1, 1))
        allocator.free(again)
        print(allocator.stats()["pending"])
        allocator.verify()
        for stream in (0, -2):
            try:
                again.__dlpack__(stream=stream)
            except BufferError as error:
                print("refused")
        try:
            again.numpy()
        except BufferError:
            print("refused")
        pool = kvpool.KVPool(8, 1, 1, 2, "cuda", "float32")
        try:
            pool.gather_kv(0, [1])
        except TypeError as error:
            print("out" in str(error))
        out = [kvpool._kvpool._zeros([2, 1, 2], "float32", "cuda") for _ in range(2)]
        one = kvpool._kvpool._zeros([1, 1, 2], "float32", "cuda")
        pool.set_kv_buffer(0, [3], one, one)
        print(pool.gather_kv(0, [3, 4], tuple(out))[0].cpu().numpy().sum())
    """
    lines = run_snippet(code, hidden=["torch"]).splitlines()
    assert lines == [
        "Tensor cuda:0 [1, 2, 3, 4, 5] (2, 0)",
        "0 64",
        "5",
        *["refused"] * 3,
        "True",
        "0.0",
    ]


def test_memory_on_the_host_is_page_locked_where_there_is_a_driver(driver: Driver) -> None:
    gc.collect()
    before = driver.page_locked_bytes()
    pool = KVPool(1000, 2, 2, 8, "cpu", torch.float32)
    assert driver.page_locked_bytes() - before >= pool.mem_bytes()
    pageable = KVPool(1000, 2, 2, 8, "cpu", torch.float32, pin_memory=False)
    assert driver.page_locked_bytes() - before < 2 * pool.mem_bytes()
    assert not pageable.k_buffer[0].any()
    assert not pool.k_buffer[1].any()


# Threads, and everything together


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_a_replay_verifies_every_token(page_size: int, prefix_cache: bool) -> None:
    lens = np.arange(10)
    arrival_s = lens.astype(np.float64) * 0.04
    inputs = 5 + lens * 7 % 40
    # All prompts begin alike.
    blocks = tuple(np.arange(-(-length // 4)) for length in inputs.tolist())
    trace = Trace("short", arrival_s, inputs, output_lens=3 + lens * 5 % 11, blocks=blocks, block_size=4)
    config = ReplayConfig(
        device="cuda",
        page_size=page_size,
        max_running=4,
        prefill_budget=32,
        pool_size=96 if page_size == 1 else 80,
        layers=1,
        prefix_cache=prefix_cache,
    )
    result = Replay(trace, config).run()
    assert result.counts.finished == 10
    assert (result.counts.found_tokens > 0) == prefix_cache
    assert page_size == 16 or prefix_cache or result.counts.retractions > 0
    assert result.counts.verified_tokens >= int((trace.input_lens + trace.output_lens).sum())


# Images of the kernels


IMAGES = {
    (7, 5): (1, 1),
    (8, 0): (2, 2),
    (8, 9): (2, 2),
    (9, 0): (2, 3),
    (10, 0): (2, 3),
    (10, 3): (2, 3),
    (11, 0): (1, 2),
    (12, 1): (2, 3),
}
"""The numbers of images of plan and of rows for each compute capability."""


def test_kernels_load_from_the_first_image_that_suits(driver: Driver, run_snippet: RunSnippet) -> None:
    driver.run()
    code = f"""
    import ctypes, os
    from kvpool import DriverError, KVPool

    soft = ctypes.CDLL(None)
    soft.soft_calls.restype = ctypes.c_long
    # No binary for this device, not PTX that it knows, no image at all.
    codes = [209, 222, 200]

    def make(failures):
        soft.soft_reset_calls()
        for number, code in failures:
            soft.soft_fail(b"cuModuleLoadData", ctypes.c_long(number), code)
        try:
            KVPool(8, 1, 1, 4, "cuda", "float32")
            return "made"
        except DriverError as error:
            return str(error)
        finally:
            print(soft.soft_calls(b"cuModuleLoadData"), end=" ")

    for capability, (plan, rows) in {IMAGES}.items():
        child = os.fork()
        if child:
            assert os.waitpid(child, 0)[1] == 0
            continue
        soft.soft_set_capability(*capability)
        # The files are plan, plan_long, rows and table.
        print(make(list(enumerate(codes[:plan], 1))), end=";")
        print(make(list(enumerate(codes[:rows], 3))), end=";")
        print(make([*enumerate(codes[: plan - 1], 1), *enumerate(codes[: rows - 1], plan + 2)]), flush=True)
        os._exit(0)
    """
    names = ("NO_BINARY_FOR_GPU (209)", "UNSUPPORTED_PTX_VERSION (222)", "INVALID_IMAGE (200)")
    said = run_snippet(code, hidden=["torch"]).splitlines()
    for (plan, rows), line in zip(IMAGES.values(), said, strict=True):
        assert line.split(";") == [
            f"{plan} cuModuleLoadData failed with CUDA_ERROR_{names[plan - 1]}",
            f"{2 + rows} cuModuleLoadData failed with CUDA_ERROR_{names[rows - 1]}",
            f"{plan + 1 + rows + 1} made",
        ]


@pytest.mark.parametrize("version", [12_000, 12_010, 13_020])
@pytest.mark.parametrize(("value", "images"), [("", "cubin"), ("cubin", "cubin"), (" ptx ", "ptx")])
def test_the_environment_chooses_the_kind_of_image(
    driver: Driver, run_snippet: RunSnippet, value: str, images: str, version: int
) -> None:
    driver.run()
    code = """
    import ctypes
    from kvpool import ReqToTokenPool

    table = ReqToTokenPool(4, 4, "cuda")
    [row] = table.alloc()
    table.write((row, slice(0, 3)), [5, 6, 7])
    soft = ctypes.CDLL(None)
    print(table.req_to_token[row].tolist(), soft.soft_calls(b"load:cubin"), soft.soft_calls(b"load:ptx"))
    """
    # One of four files is for kernels with parameters that older drivers do not take.
    files = 4 if version >= 12_010 else 3
    counts = f"{files} 0" if images == "cubin" else f"0 {files}"
    env = {"KVPOOL_KERNELS": value, "KVPOOL_SOFTWARE_VERSION": str(version)}
    said = run_snippet(code, hidden=["torch"], env=env)
    assert said == f"[5, 6, 7, 0] {counts}\n"


def test_an_unknown_kind_of_image_is_refused_and_may_be_corrected(
    driver: Driver, run_snippet: RunSnippet
) -> None:
    driver.run()
    code = """
    import ctypes, os
    from kvpool import ConfigError, KVPool

    def make():
        return KVPool(8, 1, 1, 4, "cuda", "float32")

    def refused(value):
        os.environ["KVPOOL_KERNELS"] = value
        try:
            make()
        except ConfigError as error:
            return str(error)

    soft = ctypes.CDLL(None)
    soft.soft_set_capability(7, 5)
    assert refused("PTX") == (
        'KVPOOL_KERNELS is "PTX"; it must be "ptx", "cubin" or empty, for the best that suits'
    )
    assert refused("cubin") == (
        'KVPOOL_KERNELS is "cubin", and there is no machine code for compute capability 7.5, '
        "only from 8.0 to 12.0"
    )
    os.environ["KVPOOL_KERNELS"] = "ptx"
    make()
    assert soft.soft_calls(b"load:ptx") == 4
    """
    run_snippet(code, hidden=["torch"])


def test_a_pool_is_made_again_after_its_driver_did_not_tell_its_version(
    driver: Driver, run_snippet: RunSnippet
) -> None:
    driver.run()
    code = """
    import ctypes
    from kvpool import DriverError, ReqToTokenPool

    soft = ctypes.CDLL(None)
    # The first call looks whether the driver is too old, and goes on if it does not tell.
    soft.soft_fail(b"cuDriverGetVersion", ctypes.c_long(1), 999)
    soft.soft_fail(b"cuDriverGetVersion", ctypes.c_long(2), 999)
    try:
        ReqToTokenPool(4, 8, "cuda")
    except DriverError as error:
        print(error)
    ReqToTokenPool(4, 8, "cuda")
    """
    said = run_snippet(code, hidden=["torch"])
    assert said == "cuDriverGetVersion failed with CUDA_ERROR_UNKNOWN (999)\n"
