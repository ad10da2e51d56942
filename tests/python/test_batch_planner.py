"""BatchPlanner: slots, table and metadata of batches, against a naive planner; misuse, lifetime, threads."""

from __future__ import annotations

import gc
import itertools
import logging
import random
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import devices
import numpy as np
import pytest
import torch
from common import Fence, assert_steady, needs_statm, some
from planner_pair import NUMBERS, TENSORS, Pair

from kvpool import (
    ArgumentError,
    BatchPlan,
    BatchPlanner,
    ConfigError,
    IndexOwnershipError,
    KVPool,
    ReqToTokenPool,
    StaleBufferError,
    TokenToKVPoolAllocator,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


PAGE_SIZES = [1, 16, 64]

pytestmark = pytest.mark.usefixtures("device")


def pools(page_size: int = 1, size: int = 64) -> tuple[ReqToTokenPool, TokenToKVPoolAllocator]:
    where = devices.current()
    return ReqToTokenPool(4, 32, where), TokenToKVPoolAllocator(size, where, page_size)


def wide(page_size: int, **options: Any) -> Pair:  # noqa: ANN401
    """Enough pages of any size for a few requests of a few pages each."""
    return Pair(40 * page_size, page_size, max_context_len=5 * page_size + 20, max_tokens=1024, **options)


# Construction


def test_attributes_are_the_arguments_and_read_only() -> None:
    table, allocator = pools(16)
    planner = BatchPlanner(table, allocator, 4, 32)
    assert planner.req_to_token_pool is table
    assert planner.allocator is allocator
    assert (planner.max_batch_size, planner.max_tokens, planner.page_size) == (4, 32, 16)
    assert planner.device == allocator.device
    assert type(planner.device) is str
    for name in ("req_to_token_pool", "allocator", "max_batch_size", "max_tokens", "page_size", "device"):
        with pytest.raises(AttributeError):
            setattr(planner, name, getattr(planner, name))


def test_plans_are_only_made_by_planners() -> None:
    with pytest.raises(TypeError):
        BatchPlan()


def test_stats_count_requests_until_they_finish() -> None:
    pair = Pair(page_size=4)
    rows = pair.start(5, 3, 0)
    stats = pair.planner.stats()
    assert type(stats) is dict
    assert {name: stats[name] for name in ("requests", "tokens", "plans")} == {
        "requests": 2,
        "tokens": 8,
        "plans": 1,
    }
    assert (stats["max_batch_size"], stats["max_tokens"]) == (8, 256)
    assert stats["bytes"] > 0
    pair.finish(rows)
    assert pair.planner.stats()["requests"] == 0


@pytest.mark.parametrize(
    ("sizes", "error", "words"),
    [
        *[((0, 1), ConfigError, "0"), ((1, 0), ConfigError, "0"), ((-1, 1), ConfigError, "-1")],
        *[((1, -7), ConfigError, "-7"), ((0, 0), ConfigError, "0")],
        *[((2**40, 1), ConfigError, r"\d"), ((1, 2**40), ConfigError, r"\d")],
        *[((10**30, 1), ConfigError, r"\d"), ((1, 10**30), ConfigError, r"\d")],
        ((2**31, 2**31), ConfigError, r"\d"),
        *[((wrong, 8), TypeError, "") for wrong in (1.0, "4", None, float("nan"), [4])],
        *[((8, wrong), TypeError, "") for wrong in (1.0, "4", None, float("nan"), [4])],
    ],
    ids=str,
)
def test_rejects_bad_sizes(sizes: Any, error: type[Exception], words: str) -> None:  # noqa: ANN401
    with pytest.raises(error, match=words or None):
        BatchPlanner(*pools(), *sizes)


def test_arguments_that_are_no_pools_raise() -> None:
    table, allocator = pools()
    for wrong in (None, 3, object(), BatchPlanner(table, allocator, 1, 1)):
        for pair in ((wrong, allocator), (table, wrong), (allocator, table)):
            with pytest.raises(TypeError):
                BatchPlanner(pair[0], pair[1], 4, 8)  # type: ignore[arg-type]


# Fields, in numbers


def test_a_plan_in_numbers_with_pages_of_one_slot() -> None:
    table, allocator = pools()
    planner = BatchPlanner(table, allocator, 4, 32)
    one, two = some(table.alloc(2))
    plan = some(planner.extend([two, one], [0, 0], [3, 2]))
    assert plan.out_cache_loc.tolist() == some(plan.kv_indices).tolist() == [1, 2, 3, 4, 5]
    assert plan.slot_mapping.tolist() == [1, 2, 3, 4, 5]
    assert plan.positions.tolist() == [0, 1, 2, 0, 1]
    assert plan.req_pool_indices.tolist() == [two, one]
    assert plan.seq_lens.tolist() == plan.cache_seqlens.tolist() == [3, 2]
    assert plan.qo_indptr.tolist() == plan.cu_seqlens_q.tolist() == plan.kv_indptr.tolist() == [0, 3, 5]
    assert plan.kv_last_page_len.tolist() == [1, 1]
    assert some(plan.block_table).shape == (2, 32)
    assert some(plan.block_table)[:, :4].tolist() == [[1, 2, 3, 0], [4, 5, 0, 0]]
    assert [getattr(plan, name) for name in NUMBERS] == [2, 2, 5, 5, 3, 3]
    assert table.read(one, 3).tolist() == [4, 5, 0]

    plan = some(planner.decode([one, two], [3, 4]))
    assert plan.out_cache_loc.tolist() == [6, 7]
    assert plan.positions.tolist() == [2, 3]
    assert plan.qo_indptr.tolist() == [0, 1, 2]
    assert plan.kv_indptr.tolist() == [0, 3, 7]
    assert some(plan.kv_indices).tolist() == [4, 5, 6, 1, 2, 3, 7]
    assert [getattr(plan, name) for name in NUMBERS] == [2, 2, 2, 2, 1, 4]


def test_a_padded_plan_in_numbers_with_pages_of_sixteen_slots() -> None:
    table, allocator = pools(16, 96)
    planner = BatchPlanner(table, allocator, 4, 32)
    one, two = some(table.alloc(2))
    some(planner.extend([one, two], [0, 0], [15, 16]))
    plan = some(planner.decode([one, two], [18, 19], 3, pad_to=[1, 4]))
    # Request one has pages 1 and 3, request two pages 2 and 4.
    assert plan.out_cache_loc.tolist() == [31, 48, 49, 64, 65, 66, 0, 0, 0, 0, 0, 0]
    assert plan.slot_mapping.tolist() == [31, 48, 49, 64, 65, 66, -1, -1, -1, -1, -1, -1]
    assert plan.positions.tolist() == [15, 16, 17, 16, 17, 18, 0, 1, 2, 0, 1, 2]
    assert plan.req_pool_indices.tolist() == [one, two, 0, 0]
    assert plan.seq_lens.tolist() == [18, 19, 3, 3]
    assert plan.qo_indptr.tolist() == [0, 3, 6, 9, 12]
    assert plan.kv_indptr.tolist() == [0, 2, 4, 5, 6]
    assert some(plan.kv_indices).tolist() == [1, 3, 2, 4, 0, 0]
    assert plan.kv_last_page_len.tolist() == [2, 3, 3, 3]
    assert some(plan.block_table).tolist() == [[1, 3], [2, 4], [0, 0], [0, 0]]
    assert [getattr(plan, name) for name in NUMBERS] == [2, 4, 6, 12, 3, 19]


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_every_convention_finds_the_tokens_of_every_request(page_size: int) -> None:
    table, allocator = (
        ReqToTokenPool(4, 200, devices.current()),
        TokenToKVPoolAllocator(960, devices.current(), page_size),
    )
    kv = KVPool(960, 1, 1, 1, devices.current(), torch.float32, page_size=page_size)
    planner = BatchPlanner(table, allocator, 4, 512)
    rows = some(table.alloc(3))
    lens = [0, 0, 0]
    for chunk in ([70, 3, 16], [1, 100, 64], [1, 1, 1], [16, 0, 40]):
        prefix, lens = lens, [have + new for have, new in zip(lens, chunk, strict=True)]
        plan = some(planner.extend(rows, prefix, lens))
        starts = plan.host.qo_indptr
        for i, row in enumerate(rows):
            positions = plan.host.positions[starts[i] : starts[i + 1]]
            values = (row * 1000 + torch.from_numpy(positions.copy())).to(torch.float32)[:, None, None]
            slots = plan.slot_mapping if i % 2 else plan.out_cache_loc
            values = values.to(devices.current())
            kv.set_kv_buffer(0, slots[starts[i] : starts[i + 1]], values, values)
    pages = kv.page_view(0)[0][..., 0, 0].tolist()
    for i, row in enumerate(rows):
        wanted = [row * 1000 + position for position in range(lens[i])]
        begin, end = plan.kv_indptr[i : i + 2].tolist()
        *full, last = some(plan.kv_indices)[begin:end].tolist()
        found = [value for page in full for value in pages[page]]
        assert found + pages[last][: plan.kv_last_page_len[i]] == wanted
        blocks = some(plan.block_table)[i].tolist()
        length = int(plan.cache_seqlens[i])
        assert [pages[blocks[at // page_size]][at % page_size] for at in range(length)] == wanted
        assert kv.gather_kv(0, table.read(row, length), gathered(length))[0].flatten().tolist() == wanted


def gathered(rows: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    if devices.current() == "cpu":
        return None
    return torch.zeros(rows, 1, 1, device="cuda"), torch.zeros(rows, 1, 1, device="cuda")


def test_names_of_one_thing_share_its_memory() -> None:
    pair = Pair()
    plan = pair.extend(pair.rows(2), [0, 0], [3, 4])
    assert plan.cache_seqlens.data_ptr() == plan.seq_lens.data_ptr()
    assert plan.cu_seqlens_q.data_ptr() == plan.qo_indptr.data_ptr()
    others = {getattr(plan, name).data_ptr() for name in TENSORS}
    assert len(others) == len(TENSORS) - 2


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_every_plan_is_at_the_same_addresses(page_size: int) -> None:
    pair = wide(page_size)
    rows = pair.start(1, 2 * page_size)
    plan = pair.decode(rows, [2, 2 * page_size + 1])
    addresses = {name: getattr(plan, name).data_ptr() for name in TENSORS}
    kept = plan.seq_lens
    size = pair.planner.stats()["bytes"]
    more = pair.rows(2)
    steps: list[Callable[[], BatchPlan]] = [
        lambda: pair.extend(more, [0, 0], [page_size + 1, 1]),
        lambda: pair.decode([*more, *rows], [page_size + 2, 2, 3, 2 * page_size + 2]),
        lambda: pair.decode(rows, [5, 2 * page_size + 4], 2, pad_to=[2, 8]),
        lambda: pair.decode(rows[:1], [6], pad_to=[2, 8]),
    ]
    for step in steps:
        plan = step()
        assert {name: getattr(plan, name).data_ptr() for name in TENSORS} == addresses
    assert kept.tolist() == plan.seq_lens.tolist() == [6, 1]
    assert pair.planner.stats()["bytes"] == size


@pytest.mark.parametrize("name", ["kv_indices", "block_table"])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_unwanted_fields_are_none(page_size: int, name: str) -> None:
    pair = wide(page_size, **{name: False})
    rows = pair.start(page_size + 1, 2)
    plan = pair.decode(rows, [page_size + 2, 3], pad_to=4)
    assert getattr(plan, name) is None
    assert getattr(plan.host, name) is None
    assert pair.planner.stats()["bytes"] < wide(page_size).planner.stats()["bytes"]


@pytest.mark.parametrize("on_host", [False, True], ids=["tensor", "host"])
@pytest.mark.parametrize("page_size", [1, 4])
def test_a_field_that_is_asked_for_late_is_in_every_later_plan(*, page_size: int, on_host: bool) -> None:
    def read(plan: BatchPlan, name: str) -> Any:  # noqa: ANN401
        return getattr(plan.host if on_host else plan, name)

    def steps() -> Iterator[BatchPlan]:
        table, allocator = pools(page_size)
        planner = BatchPlanner(table, allocator, 4, 32)
        rows = some(table.alloc(2))
        yield some(planner.extend(rows, [0, 0], [3, 6]))
        # As many tokens as requests, all of one of them.
        yield some(planner.extend(rows, [3, 6], [5, 6]))
        yield some(planner.decode(rows, [6, 7]))
        yield some(planner.decode(rows, [8, 9], 2, pad_to=4))

    for name, first in itertools.product(sorted({*TENSORS} - {"kv_indices", "block_table"}), range(4)):
        kept = None
        for step, (late, early) in enumerate(zip(steps(), steps(), strict=True)):
            expected = read(early, name).tolist()
            if step == first:
                kept = read(late, name)
            if kept is not None:
                assert kept[: len(expected)].tolist() == expected[: len(kept)], (name, first, step)


# extend and decode


def test_scalars_of_other_libraries_are_numbers() -> None:
    pair = Pair(page_size=4)
    rows = pair.start(5, 1)
    pair.decode(rows, [7, 3], np.int64(2), pad_to=np.array([4]))
    row = pair.rows(1)[0]
    assert pair.planner.fork(np.int32(rows[0]), torch.tensor(row), np.int64(6))
    assert pair.planner.seq_len(np.int64(row)) == 6


def test_plans_go_on_in_tensors_of_the_device() -> None:
    pair = Pair(page_size=4)
    rows = torch.tensor(pair.start(5, 1, 8), dtype=torch.int32).to(devices.current())
    plan = pair.decode(rows, torch.tensor([6, 2, 9]).to(devices.current()))
    # As an engine does it: the fields of the last plan are the arguments of the next.
    for _ in range(5):
        plan = pair.decode(plan.req_pool_indices, plan.seq_lens + 1)
    assert plan.seq_lens.tolist() == [11, 7, 14]


@pytest.mark.parametrize("page_size", [1, 16])
def test_large_batches_are_planned_as_small_ones(page_size: int) -> None:
    requests = 150
    pair = Pair(
        1 << 16,
        page_size,
        max_reqs=requests,
        max_context_len=3000,
        max_batch_size=256,
        max_tokens=1 << 16,
    )
    choose = random.Random(page_size)  # noqa: S311
    lens = [choose.choice([1, 40, 333, page_size]) for _ in range(requests - 1)] + [2500]
    rows = pair.start(*lens)
    order = choose.sample(range(requests), requests)
    lens = [length + 3 for length in lens]
    pair.decode([rows[i] for i in order], [lens[i] for i in order], 3, pad_to=[128, 256])
    pair.extend(rows[-2:], lens[-2:], [lens[-2] + 700, lens[-1] + 400])
    pair.finish(rows)


# Cached prefixes


def test_a_prefix_that_alloc_handed_out_is_shared_as_it_is() -> None:
    pair = Pair()
    slots = pair.slots(6)
    rows = pair.rows(2)
    pair.extend(rows, [6, 3], [7, 4], [slots, slots[:3]])
    pair.free(slots.tolist())
    assert pair.allocator.stats()["in_use"] == 8


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_a_prefix_from_the_row_of_another_request(page_size: int) -> None:
    pair = wide(page_size)
    one = pair.start(2 * page_size + 1)[0]
    two = pair.rows(1)[0]
    pair.extend([two], [2 * page_size], [2 * page_size + 1], [pair.table.read(one, 2 * page_size)])
    pair.finish([one])
    pair.decode([two], [2 * page_size + 2])
    pair.finish([two])
    assert pair.allocator.stats()["in_use"] == 0


BAD_PREFIXES: dict[str, tuple[int, int, list[int], type[Exception], str]] = {
    # page_size, prefix_len, slots, error, number that it names
    "free": (1, 3, [1, 2, 40], IndexOwnershipError, "40"),
    "padding": (1, 2, [0, 1], IndexOwnershipError, "0"),
    "negative": (1, 2, [1, -5], IndexOwnershipError, "-5"),
    "outside": (1, 1, [6500], IndexOwnershipError, "6500"),
    "huge": (1, 1, [2**40], IndexOwnershipError, str(2**40)),
    "fenced": (1, 1, [8], IndexOwnershipError, "8"),
    "fewer": (1, 4, [1, 2, 3], ArgumentError, "4"),
    "more": (1, 2, [1, 2, 3], ArgumentError, "3"),
    "none_needed": (1, 0, [1], ArgumentError, "1"),
    "partial_page": (4, 6, [4, 5, 6, 7, 8, 9], ArgumentError, "6"),
    "second_half": (4, 4, [6, 7, 8, 9], ArgumentError, "6"),
    "descending": (4, 4, [7, 6, 5, 4], ArgumentError, "7"),
    "gap": (4, 4, [4, 5, 7, 7], ArgumentError, "7"),
    "mixed": (4, 4, [4, 5, 10, 11], ArgumentError, "10"),
    "free_page": (4, 8, [4, 5, 6, 7, 40, 41, 42, 43], IndexOwnershipError, "40"),
    "padding_page": (4, 4, [0, 1, 2, 3], IndexOwnershipError, "0"),
}


@pytest.mark.parametrize("name", sorted(BAD_PREFIXES))
def test_prefixes_that_do_not_fit(name: str) -> None:
    page_size, prefix, slots, error, number = BAD_PREFIXES[name]
    pair = Pair(page_size=page_size)
    pair.slots(16)
    if name == "fenced":
        pair.free([8], Fence())
    good, bad = pair.rows(2)
    cached = [page_size + i for i in range(page_size)]
    pair.refused(
        error,
        lambda: pair.planner.extend(
            [good, bad], [page_size, prefix], [page_size + 1, prefix + 1], [cached, slots]
        ),
        number,
    )
    pair.extend([good, bad], [page_size, 0], [page_size + 1, 1], [cached, None])


# truncate


def test_truncate_leaves_the_row_as_it_is() -> None:
    pair = Pair()
    row = pair.start(5)[0]
    slots = pair.row_of(row, 5)
    pair.truncate([row], [2])
    assert pair.row_of(row, 5) == slots
    pair.finish([row])
    assert not pair.table.req_to_token.any()


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_a_request_cannot_end_within_a_page_that_others_read(page_size: int) -> None:
    pair = wide(page_size)
    row = pair.start(2 * page_size + 1)[0]
    pair.share(pair.row_of(row, 2 * page_size))
    if page_size == 1:
        pair.truncate([row], [1])
        return
    other = pair.start(1)[0]
    for seq in (1, page_size + 1, 2 * page_size - 1):
        pair.refused(
            IndexOwnershipError,
            lambda seq=seq: pair.planner.truncate([other, row], [0, seq]),
            str(seq),
        )
    pair.truncate([row], [2 * page_size])
    pair.truncate([row], [page_size])
    pair.truncate([row], [0])


# fork


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_a_forked_request_reads_what_its_source_wrote_and_writes_for_itself(page_size: int) -> None:
    where = devices.current()
    kv = KVPool(12 * page_size, 2, 1, 2, where, torch.float32, page_size=page_size)
    pair = Pair(12 * page_size, page_size, max_context_len=4 * page_size)
    length = 2 * page_size + page_size // 2
    src = pair.rows(1)[0]
    slots = pair.extend([src], [0], [length]).out_cache_loc
    values = torch.arange(length, dtype=torch.float32)[:, None, None].expand(-1, 1, 2).contiguous().to(where)
    for layer in range(2):
        kv.set_kv_buffer(layer, slots, values + layer, -values - layer)
    dst = pair.rows(1)[0]
    dst_slots, src_slots = pair.fork(src, dst, length)
    kv.move_kv(dst_slots, src_slots)

    def held(row: int, layer: int) -> list[float]:
        picked = torch.tensor(pair.row_of(row, pair.planner.seq_len(row)))
        k, v = (buffer.cpu()[picked] for buffer in kv.get_kv_buffer(layer))
        assert torch.equal(k, -v)
        numbers: list[float] = k[:, 0, 1].tolist()
        return numbers

    written = [float(i) for i in range(length)]
    for layer in range(2):
        assert held(src, layer) == held(dst, layer) == [value + layer for value in written]
    new = torch.tensor([100.0, 200.0])[:, None, None].expand(-1, 1, 2).contiguous().to(where)
    for _ in range(2):
        lens = [pair.planner.seq_len(src) + 1, pair.planner.seq_len(dst) + 1]
        plan = pair.decode([src, dst], lens)
        for layer in range(2):
            kv.set_kv_buffer(layer, plan.out_cache_loc, new, -new)
    assert held(src, 1) == [*(value + 1 for value in written), 100, 100]
    assert held(dst, 0) == [*written, 200, 200]
    # A part of the source that had been shared is written again.
    pair.truncate([src], [page_size])
    plan = pair.decode([src], [page_size + 1])
    kv.set_kv_buffer(0, plan.out_cache_loc, new[:1] * 7, -new[:1] * 7)
    assert held(src, 0) == [*written[:page_size], 700]
    assert held(dst, 0) == [*written, 200, 200]


# Padding


@pytest.mark.parametrize(
    ("pad_to", "padded"),
    [
        (2, 2),
        (3, 3),
        ([8, 4, 1, 2, 6], 2),
        ((7, 4), 4),
        (np.array([1, 8]), 8),
        (torch.tensor([3]), 3),
        (None, 2),
    ],
    ids=str,
)
def test_the_least_size_that_fits_is_taken(pad_to: Any, padded: int) -> None:  # noqa: ANN401
    pair = Pair(page_size=4)
    rows = pair.start(3, 4)
    assert pair.decode(rows, [4, 5], pad_to=pad_to).padded_batch_size == padded


def test_padded_tokens_count() -> None:
    pair = Pair(max_tokens=12)
    rows = pair.start(3, 4)
    pair.refused(ArgumentError, lambda: pair.planner.decode(rows, [7, 8], 4, pad_to=4), "12")
    pair.decode(rows, [7, 8], 4, pad_to=3)
    pair.refused(ArgumentError, lambda: pair.planner.decode([], [], 4, pad_to=4), "16")


def test_padded_requests_fit_the_table() -> None:
    pair = Pair(max_context_len=8)
    pair.refused(IndexError, lambda: pair.planner.decode([], [], 9, pad_to=2), "9")
    pair.decode([], [], 8, pad_to=2)


def test_padding_needs_a_padding_row() -> None:
    pair = Pair(padding_row=False)
    rows = pair.start(3, 4)
    assert rows == [0, 1]
    pair.refused(ArgumentError, lambda: pair.planner.decode(rows, [4, 5], pad_to=4), "4")
    pair.decode(rows, [4, 5])


# finish


@pytest.mark.parametrize("page_size", [1, 4])
def test_reports_pages_that_were_freed_elsewhere(page_size: int, caplog: pytest.LogCaptureFixture) -> None:
    pair = Pair(page_size=page_size)
    one, two = pair.start(2 * page_size, 3 * page_size)
    stolen = pair.row_of(two, 3 * page_size)[page_size : 2 * page_size]
    pair.free(stolen)
    with caplog.at_level(logging.WARNING, logger="kvpool"):
        pair.planner.finish([one, two])
    assert len(caplog.records) == 1
    assert str(stolen[0]) in caplog.text
    assert pair.allocator.stats()["dropped_frees"] == 1
    assert pair.allocator.stats()["in_use"] == 0


@pytest.mark.parametrize("after", [None, Fence(done=True)], ids=["now", "fence"])
@pytest.mark.parametrize("page_size", [1, 4])
def test_strict_raises_for_pages_freed_elsewhere_after_freeing_the_rest(
    page_size: int, after: Fence | None
) -> None:
    pair = Pair(page_size=page_size, strict=True)
    one, two = pair.start(2 * page_size, 3 * page_size)
    stolen = pair.row_of(one, 2 * page_size)[:page_size]
    pair.free(stolen)
    with pytest.raises(IndexOwnershipError, match=str(stolen[0])):
        pair.planner.finish([one, two], after=after)
    assert pair.table.available_size() == 8
    assert not pair.table.req_to_token.any()
    assert pair.allocator.available_size() == 64
    pair.allocator.verify()


# Misuse


ON_ROWS: dict[str, Callable[[BatchPlanner, int], object]] = {
    "extend": lambda planner, row: planner.extend([1, row], [3, 0], [4, 1]),
    "decode": lambda planner, row: planner.decode([1, row], [4, 1]),
    "truncate": lambda planner, row: planner.truncate([1, row], [1, 0]),
    "finish": lambda planner, row: planner.finish([1, row]),
    "finish, with lengths": lambda planner, row: planner.finish([1, row], [3, 0]),
    "seq_len": lambda planner, row: planner.seq_len(row),
}


@pytest.mark.parametrize("call", sorted(ON_ROWS))
def test_rejects_rows_that_are_nobodys(call: str) -> None:
    """Rows outside of the table, the padding row, and rows that were given back or never taken."""
    pair = Pair()
    pair.finish(pair.start(3, 3, 3)[2:])
    for row in (9, -1, 2**31, 2**40, -(2**40)):
        pair.refused(IndexError, lambda row=row: ON_ROWS[call](pair.planner, row), str(row))
    for row in (0, 3, 5):
        pair.refused(IndexOwnershipError, lambda row=row: ON_ROWS[call](pair.planner, row), str(row))
    pair.decode([1], [4])


def bad(error: type[Exception], words: object, method: str, *given: object, **named: object) -> Any:  # noqa: ANN401
    """A call that is refused, and what the error names."""
    return pytest.param(method, given, named, error, str(words), id=f"{method}{given}{named or ''}")


@pytest.mark.parametrize(
    ("method", "given", "named", "error", "words"),
    [
        bad(ArgumentError, 1, "extend", [1, 2, 1], [3] * 3, [4] * 3),
        bad(ArgumentError, 1, "decode", [1, 2, 1], [4] * 3),
        bad(ArgumentError, 1, "truncate", [1, 2, 1], [1] * 3),
        bad(ArgumentError, 1, "finish", [1, 2, 1]),
        # More than the table has room for, or a step.
        bad(IndexError, 49, "extend", [2, 1], [3, 3], [49, 4]),
        bad(IndexError, 2**31 - 1, "extend", [1], [3], [2**31 - 1]),
        bad(IndexError, 49, "decode", [1, 2], [49, 49], 46),
        bad(ArgumentError, 5, "extend", [1, 2, 3, 4, 5], [3, 3, 0, 0, 0], [4, 4, 1, 1, 1]),
        bad(ArgumentError, 5, "decode", [1, 2, 3, 4, 5], [4, 4, 1, 1, 1]),
        bad(ArgumentError, 61, "extend", [1, 2], [3, 3], [33, 34]),
        bad(ArgumentError, 62, "decode", [1, 2], [34, 34], 31),
        bad(ArgumentError, 62, "decode", [1], [34], 31, pad_to=2),
        bad(ArgumentError, 62, "decode", [], [], 31, pad_to=2),
        # Prefixes: for a request that has tokens, none where one is needed, too few or many, no slots.
        bad(ArgumentError, 3, "extend", [1], [3], [4], [[7, 8, 9]]),
        bad(ArgumentError, 3, "extend", [3], [3], [4], None),
        bad(ArgumentError, 3, "extend", [3], [3], [4], [None]),
        bad(ArgumentError, 3, "extend", [3], [3], [4], [[]]),
        *[
            bad(ArgumentError, len(wrong), "extend", [3, 4], [1, 1], [2, 2], wrong)
            for wrong in ([], [[7]], [[7], [8], [9]])
        ],
        *[
            bad(TypeError, "", "extend", [3], [1], [2], wrong)
            for wrong in (3, 1.5, ..., [1.5], ["1"], [[1.5]], [[True]], [...])
        ],
        # Lengths that do not fit what a request has.
        *[
            bad(error, rf"(?s)(?=.*{prefix})(?=.*{seq})", "extend", [1, 2], [3, prefix], [4, seq])
            for prefix, seq, error in (
                *[(0, 4, ArgumentError), (2, 4, ArgumentError), (4, 5, ArgumentError), (3, 2, ArgumentError)],
                *[(-1, 3, ArgumentError), (3, -1, ArgumentError), (3, -(2**40), ArgumentError)],
                (2**40, 2**40 + 1, ArgumentError),
            )
        ],
        *[
            bad(ArgumentError, seq, "decode", [1, 2], [3 + tokens, seq], tokens)
            for seq, tokens in ((3, 1), (5, 1), (4, 2), (0, 1), (-1, 1), (2, 3))
        ],
        *[bad(ArgumentError, tokens, "decode", [1], [3 + tokens], tokens) for tokens in (0, -1, -(10**30))],
        *[bad(TypeError, "", "decode", [1], [4], wrong) for wrong in (1.0, "1", None, [1], float("nan"))],
        *[bad(TypeError, "", "seq_len", wrong) for wrong in (1.0, "1", None, [1, 2], float("nan"))],
        *[bad(ArgumentError, seq, "truncate", [1, 2], [3, seq]) for seq in (4, -1, 2**40)],
        *[
            bad(ArgumentError, rf"(?s)(?=.*{row})(?=.*3)(?=.*{wrong})", "finish", [1, 2], lens)
            for row, wrong, lens in (
                *[(1, 4, [4, 3]), (2, 2, [3, 2]), (1, 0, [0, 0]), (2, 5, [3, 5]), (1, -1, [-1, 3])],
            )
        ],
        # Sizes to pad to.
        *[
            bad(ArgumentError, number, "decode", [1, 2], [4, 4], pad_to=sizes)
            for sizes, number in ((1, 2), ([1, 0], 2), ([], 2), (-3, -3), (5, 5), ([1, 100], 100))
        ],
        *[bad(ArgumentError, number, "decode", [], [], pad_to=n) for n, number in ((-1, -1), ([-3, -1], -3))],
        *[bad(TypeError, "", "decode", [1], [4], pad_to=wrong) for wrong in (1.5, "4", [1.0], [None], ...)],
        # Fences without a `query`.
        *[bad(TypeError, "", "finish", [1], after=fence) for fence in (..., 1, "fence")],
        *[bad(TypeError, "", "truncate", [1], [2], after=fence) for fence in (..., 1, "fence")],
        # Arguments of unequal lengths.
        *[
            bad(ArgumentError, r"\d", "extend", [1, 2][:rows], [3] * prefixes, [4] * seqs)
            for rows, prefixes, seqs in ((1, 2, 2), (2, 1, 2), (2, 2, 1), (2, 0, 0), (0, 1, 1), (2, 3, 2))
        ],
        *[
            bad(ArgumentError, r"\d", method, [1, 2][:rows], [length] * lens)
            for method, length in (("decode", 4), ("truncate", 1), ("finish", 3))
            for rows, lens in ((1, 2), (2, 1), (2, 0), (0, 1))
        ],
        # Forks: to itself, of more or less than there is, to one that has tokens, of rows not taken.
        bad(ArgumentError, 1, "fork", 1, 1, 2),
        bad(ArgumentError, 7, "fork", 1, 3, 7),
        bad(ArgumentError, -1, "fork", 1, 3, -1),
        bad(ArgumentError, 2, "fork", 1, 2, 3),
        bad(IndexOwnershipError, 6, "fork", 6, 3, 0),
        bad(IndexOwnershipError, 6, "fork", 1, 6, 2),
        bad(IndexOwnershipError, 0, "fork", 0, 3, 0),
        bad(IndexOwnershipError, 0, "fork", 1, 0, 2),
        bad(IndexError, 9, "fork", 9, 3, 0),
        bad(IndexError, -1, "fork", 1, -1, 0),
        bad(TypeError, "", "fork", 1.0, 3, 2),
        bad(TypeError, "", "fork", 1, "3", 2),
        bad(TypeError, "", "fork", 1, 3, 2.0),
        bad(TypeError, "", "fork", None, 3, 2),
        bad(TypeError, "", "fork", [1], 3, 2),
    ],
)
def test_refuses_and_changes_nothing(
    method: str, given: tuple[Any, ...], named: dict[str, Any], error: type[Exception], words: str
) -> None:
    """Rows 1 and 2 have three tokens each, rows 3 to 5 none, and slots 7 to 10 are cached."""
    pair = Pair(max_batch_size=4, max_tokens=60)
    assert pair.start(3, 3) == [1, 2]
    assert pair.rows(3) == [3, 4, 5]
    assert pair.slots(4).tolist() == [7, 8, 9, 10]
    pair.refused(error, lambda: getattr(pair.planner, method)(*given, **named), words or r"\w")
    pair.extend([2, 1], [3, 3], [4, 8])


@pytest.mark.parametrize("tokens", [49, 2**31 - 1, 2**31, 2**40, 2**63 - 1, 10**30])
def test_decodes_of_more_tokens_than_a_table_has(tokens: int) -> None:
    pair = Pair()
    rows = pair.start(3)
    for batch, pad_to in ((rows, None), ([], 8)):
        with pytest.raises((ConfigError, IndexError), match=r"\d"):
            pair.planner.decode(batch, [3][: len(batch)], tokens, pad_to=pad_to)
    pair.check_same()


@pytest.mark.parametrize(("length", "width", "asked"), [(5, 1, 6), (4, 1, 6), (9, 1, 6), (5, 3, 8)])
def test_a_decode_says_which_lengths_it_takes(length: int, width: int, asked: int) -> None:
    pair = Pair()
    [row] = pair.start(5)
    text = rf"row {row} .* has 5 tokens .*after the step, which has {width} new .*: {asked}, not {length}$"
    pair.refused(ArgumentError, lambda: pair.planner.decode([row], [length], width), text)
    pair.decode([row], [6])


@pytest.mark.parametrize("page_size", [1, 16])
def test_requests_grow_up_to_the_end_of_the_table(page_size: int) -> None:
    pair = Pair(page_size=page_size, max_context_len=20, max_tokens=24)
    one, two = pair.start(3, 19)
    pair.refused(IndexError, lambda: pair.planner.decode([one, two], [5, 21], 2), "21")
    pair.decode([one, two], [4, 20])
    pair.refused(IndexError, lambda: pair.planner.decode([two], [21]), "20")
    pair.extend([one], [4], [20])


# Behind the planner's back


def test_a_row_that_was_taken_again_is_shown_with_its_own_pages() -> None:
    pair = Pair(page_size=4, max_reqs=1, need_sort=False)
    row = pair.start(12)[0]
    pair.free_rows([row])
    assert pair.rows(1) == [row]
    pair.extend([row], [0], [12])


@pytest.mark.parametrize("page_size", [1, 4])
def test_does_not_share_pages_that_were_freed_elsewhere(page_size: int) -> None:
    pair = Pair(page_size=page_size)
    src = pair.start(3 * page_size)[0]
    dst = pair.rows(1)[0]
    freed = pair.row_of(src, 2 * page_size)[page_size:]
    pair.free(freed)
    pair.refused(IndexOwnershipError, lambda: pair.planner.fork(src, dst, 3 * page_size), str(freed[0]))
    pair.fork(src, dst, page_size)


def test_two_planners_may_share_an_allocator() -> None:
    table, allocator = pools(4)
    other = ReqToTokenPool(4, 32, devices.current())
    planners = [BatchPlanner(table, allocator, 4, 32), BatchPlanner(other, allocator, 4, 32)]
    rows = [some(planner.req_to_token_pool.alloc()) for planner in planners]
    plans = [some(planner.extend(row, [0], [9])) for planner, row in zip(planners, rows, strict=True)]
    assert [some(plan.kv_indices).tolist() for plan in plans] == [[1, 2, 3], [4, 5, 6]]
    # One request becomes a prefix of the other planner's.
    row = some(other.alloc())
    prefix = table.read(rows[0][0], 8)
    plan = some(planners[1].extend(row, [8], [10], [prefix]))
    assert some(plan.kv_indices).tolist() == [1, 2, 7]
    planners[0].finish(rows[0], [9])
    assert allocator.stats()["in_use"] == 4 * 6
    planners[1].finish([*rows[1], *row])
    assert allocator.stats()["in_use"] == 0


# Staleness


@pytest.mark.parametrize("made", ["extend", "decode"])
def test_a_plan_is_stale_after_the_next(made: str) -> None:
    pair = Pair()
    rows = pair.rows(2)
    plan = pair.extend(rows, [0, 0], [3, 4])
    host, kept = plan.host, plan.seq_lens
    if made == "extend":
        pair.extend(rows, [3, 4], [5, 5])
    else:
        pair.decode(rows, [4, 5])
    for name in TENSORS:
        with pytest.raises(StaleBufferError, match=r"\d"):
            getattr(plan, name)
        with pytest.raises(StaleBufferError, match=r"\d"):
            getattr(host, name)
        with pytest.raises(StaleBufferError):
            getattr(plan.host, name)
    assert plan.batch_size == 2
    assert kept.tolist() == ([5, 5] if made == "extend" else [4, 5])


def test_a_plan_of_an_empty_batch_gets_stale_too() -> None:
    pair = Pair(kv_indices=False)
    plan = pair.extend([], [], [])
    pair.extend([], [], [])
    for name in TENSORS:
        with pytest.raises(StaleBufferError):
            getattr(plan, name)


def test_calls_that_plan_nothing_leave_the_plan() -> None:
    pair = Pair(16, 4)
    rows = pair.start(3, 4)
    plan = pair.decode(rows, [4, 5])
    expected = {name: getattr(plan, name).tolist() for name in TENSORS}
    assert pair.try_decode(rows, [14, 5 + 10], 10) is None
    with pytest.raises(ArgumentError):
        pair.planner.decode(rows, [4, 5])
    with pytest.raises(IndexError):
        pair.planner.extend([99], [0], [1])
    with pytest.raises(TypeError):
        pair.planner.finish(1.5)  # type: ignore[arg-type]
    assert {name: getattr(plan, name).tolist() for name in TENSORS} == expected
    assert {name: getattr(plan.host, name).tolist() for name in TENSORS} == expected
    pair.truncate(rows[:1], [1])
    pair.fork(rows[1], pair.rows(1)[0], 4)
    pair.finish(rows)
    assert {name: getattr(plan, name).tolist() for name in TENSORS} == expected


@pytest.mark.parametrize("call", ["truncate", "finish", "fork"])
def test_arrays_of_the_host_after_a_change(call: str) -> None:
    pair = Pair(page_size=4)
    rows = pair.start(9, 5)
    plan = pair.decode(rows, [10, 6])
    new = pair.rows(1)[0]
    calls: dict[str, Callable[[], object]] = {
        "truncate": lambda: pair.truncate(rows, [1, 1]),
        "finish": lambda: pair.finish(rows[:1]),
        "fork": lambda: pair.fork(rows[0], new, 9),
    }
    calls[call]()
    assert plan.host.seq_lens.tolist() == [10, 6]
    assert plan.host.kv_indptr.tolist() == [0, 3, 5]
    assert some(plan.kv_indices).tolist() == [1, 2, 3, 4, 5]
    if devices.current() == "cpu":
        assert some(plan.host.kv_indices).tolist() == [1, 2, 3, 4, 5]
        assert some(plan.host.block_table)[:, :4].tolist() == [[1, 2, 3, 0], [4, 5, 0, 0]]
        return
    for name in ("kv_indices", "block_table"):
        with pytest.raises(StaleBufferError):
            getattr(plan.host, name)


# Lifetime


def test_tensors_of_a_plan_outlive_everything() -> None:
    pair = Pair(page_size=4)
    plan: Any = pair.extend(pair.rows(2), [0, 0], [5, 2])
    tensors = {name: getattr(plan, name) for name in TENSORS}
    arrays = {name: getattr(plan.host, name) for name in TENSORS}
    expected = {name: tensor.tolist() for name, tensor in tensors.items()}
    gone: list[Callable[[], object]] = [
        weakref.ref(pair.planner),
        weakref.ref(pair.table),
        weakref.ref(pair.allocator),
        weakref.ref(plan),
    ]
    del pair, plan
    gc.collect()
    assert [ref() for ref in gone] == [None] * 4
    others = [Pair(page_size=4) for _ in range(4)]
    for other in others:
        other.start(7, 7, 7)
    assert {name: tensor.tolist() for name, tensor in tensors.items()} == expected
    assert {name: array.tolist() for name, array in arrays.items()} == expected


def test_a_planner_keeps_its_pools() -> None:
    planner = BatchPlanner(*pools(), 4, 32)
    gc.collect()
    rows = some(planner.req_to_token_pool.alloc(2))
    assert some(planner.extend(rows, [0, 0], [3, 4])).out_cache_loc.tolist() == list(range(1, 8))
    assert planner.allocator.available_size() == 57


def test_a_plan_keeps_its_planner() -> None:
    planner: Any = BatchPlanner(*pools(), 4, 32)
    plan = some(planner.extend(some(planner.req_to_token_pool.alloc(1)), [0], [3]))
    del planner
    gc.collect()
    assert plan.positions.tolist() == plan.host.positions.tolist() == [0, 1, 2]


def test_cycles_through_a_planner_are_collected() -> None:
    class Owner:
        def __init__(self) -> None:
            self.planner = BatchPlanner(*pools(), 4, 32)
            rows = some(self.planner.req_to_token_pool.alloc(2))
            self.plan = self.planner.extend(rows, [0, 0], [3, 4])
            self.planner.finish(rows[:1], after=self)
            self.tensors = [some(self.plan).seq_lens, some(self.plan).host]

        def query(self) -> bool:
            return self.planner is None

    owner = Owner()
    gone: list[Callable[[], object]] = [
        weakref.ref(owner),
        weakref.ref(owner.planner),
        weakref.ref(some(owner.plan)),
    ]
    del owner
    gc.collect()
    assert [ref() for ref in gone] == [None] * 3


def test_given_arguments_are_let_go() -> None:
    pair = Pair()
    cached = pair.slots(3)
    rows, lens = torch.tensor(pair.rows(1)), torch.tensor([3])
    gone = [weakref.ref(thing) for thing in (rows, lens, cached)]
    pair.planner.extend(rows, lens, lens, [cached])
    del rows, lens, cached
    assert [ref() for ref in gone] == [None] * 3


@devices.cpu_only
@needs_statm
def test_memory_does_not_grow() -> None:
    table, allocator = ReqToTokenPool(8, 4096, "cpu"), TokenToKVPoolAllocator(1 << 14, "cpu", 4)
    planner = BatchPlanner(table, allocator, 4, 4096)

    def serve_two_requests() -> None:
        one, two = some(table.alloc(2))
        plan = some(planner.extend([one], [0], [3000]))
        some(planner.fork(one, two, 2999))
        plan = some(planner.decode([one, two], [3001, 3000], pad_to=4))
        assert some(plan.host.block_table).sum() == some(plan.block_table).sum()
        planner.truncate([two], [2996])
        planner.finish([one, two])

    # The slots of one request, lost each serve_two_requests, would be 6 MiB.
    assert_steady(serve_two_requests, 4 << 20)


# Calls from within calls


@pytest.mark.timeout(60)
def test_a_fence_may_use_the_planner() -> None:
    pair = Pair()
    rows = pair.start(3, 3, 3)

    class PlannerUsingFence:
        passed = False

        def query(self) -> bool:
            pair.planner.stats()
            pair.planner.seq_len(rows[2])
            pair.planner.truncate(rows[2:], [2])
            return self.passed

    fence = PlannerUsingFence()
    pair.planner.finish(rows[:1], after=fence)
    pair.planner.finish(rows[1:2], after=fence)
    assert pair.allocator.available_size() == 64 - 8
    fence.passed = True
    assert pair.allocator.available_size() == 64 - 2


@pytest.mark.timeout(60)
def test_arguments_may_use_the_planner_while_they_are_read() -> None:
    pair = Pair()
    rows = pair.start(3, 5)

    class PlannerUsingIndex:
        def __index__(self) -> int:
            pair.planner.stats()
            pair.planner.decode(rows[1:], [pair.planner.seq_len(rows[1]) + 1])
            return rows[0]

    assert some(pair.planner.decode([PlannerUsingIndex()], [4])).req_pool_indices.tolist() == rows[:1]
    assert [pair.planner.seq_len(row) for row in rows] == [4, 6]
    with pytest.raises(ZeroDivisionError):
        pair.planner.decode([type("Bad", (), {"__index__": lambda _: 1 // 0})()], [1])
    pair.allocator.verify()


# Threads


def test_two_threads_fork_and_share_one_prefix() -> None:
    pair = Pair(4096, 4, strict=True, max_reqs=32)
    src = pair.start(30)[0]
    prefix = pair.row_of(src, 28)

    def work(_number: int) -> None:
        for _ in range(40):
            one, two = some(pair.table.alloc(2))
            assert pair.planner.fork(src, one, 29) is not None
            assert pair.planner.extend([two], [28], [31], [prefix]) is not None
            pair.planner.truncate([one], [28])
            pair.planner.finish([two, one], [31, 28])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert pair.planner.stats()["tokens"] == 30
    assert pair.allocator.stats()["in_use"] == 32
    assert pair.allocator.stats()["shared"] == 0
    pair.allocator.verify()
