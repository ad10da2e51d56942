"""Debugging: who took what and where, what bad frees say then, leaks, and poisoned rows."""

from __future__ import annotations

import _thread
import inspect
import logging
import random
import re
import threading
import time
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

import devices
import pytest
import torch
from common import STORAGE, Fence, some
from software import to_host

import kvpool
from kvpool import (
    BatchPlanner,
    BufferPool,
    ChunkPool,
    GDNPool,
    HostTier,
    IndexOwnershipError,
    KVPool,
    PagePool,
    ReqToTokenPool,
    StaleBufferError,
    StateError,
    TokenToKVPoolAllocator,
    Workspace,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from shared_fixtures import RunSnippet
    from software import Driver

HERE = __file__


pytestmark = pytest.mark.usefixtures("device")


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The frames of pytest do not count."""
    monkeypatch.delenv("KVPOOL_DEBUG", raising=False)


def slots(size: int = 64, *, page_size: int = 1, strict: bool = False) -> TokenToKVPoolAllocator:
    return TokenToKVPoolAllocator(size, devices.current(), page_size, strict=strict, debug=True)


def line() -> str:
    """The place of the caller's next line, as a pool notes it."""
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return f"{HERE}:{frame.f_back.f_lineno + 1} in {frame.f_back.f_code.co_name}"


def held(pool: Any) -> Counter[tuple[str | int | None, str]]:  # noqa: ANN401
    return Counter({(leak.owner, leak.site): leak.count for leak in pool.leaks()})


def by_owner(pool: Any) -> Counter[str | int | None]:  # noqa: ANN401
    counts: Counter[str | int | None] = Counter()
    for leak in pool.leaks():
        counts[leak.owner] += leak.count
    return counts


chunk_pool = partial(ChunkPool, 8, (4,), "float32", pin_memory=False)

# Of every call that takes something: how to make its pool, the call, and the one that gives back.
CASES: dict[str, tuple[Callable[..., Any], Callable[[Any, str | int | None], Any], str]] = {
    "slots": (
        partial(TokenToKVPoolAllocator, 64),
        lambda pool, owner: pool.alloc(1, owner=owner),
        "free",
    ),
    "run of slots": (
        partial(TokenToKVPoolAllocator, 64),
        lambda pool, owner: pool.alloc(1, contiguous=True, owner=owner),
        "free",
    ),
    "row": (partial(ReqToTokenPool, 8, 16), lambda pool, owner: pool.alloc(1, owner=owner), "free"),
    "track slot": (
        partial(GDNPool, 2, 1, 1, 2, 2, 4, 3, max_track_slots=6),
        lambda pool, owner: pool.alloc_track_slot(owner=owner),
        "free_track_slot",
    ),
    "chunk": (chunk_pool, lambda pool, owner: pool.allocate(owner=owner), "free"),
    "chunks": (chunk_pool, lambda pool, owner: pool.allocate_batch(1, owner=owner)[0], "free"),
    "buffer": (BufferPool, lambda pool, owner: pool.alloc((4,), "float32", owner=owner), "release"),
    "bytes": (BufferPool, lambda pool, owner: pool.alloc_bytes(4, owner=owner), "release"),
    "buffers": (
        BufferPool,
        lambda pool, owner: pool.alloc_batch([((4,), "int8")], owner=owner)[0],
        "release",
    ),
    "page": (partial(PagePool, 4, 8), lambda pool, owner: pool.alloc(owner=owner), "free"),
}


def case_of(name: str) -> tuple[Any, Callable[[str | int | None], Any], Callable[[Any], None]]:
    """A pool that debugs, how to take something for an owner, and how to give it back."""
    make, take, give = CASES[name]
    pool = make(device=devices.current(), debug=True)
    return pool, partial(take, pool), getattr(pool, give)


@pytest.mark.parametrize("case", sorted(CASES))
def test_live_units_are_listed_by_owner_and_place(case: str) -> None:
    pool, take, give = case_of(case)
    assert pool.leaks() == []
    first = take("request 1")
    again = [take("request 1") for _ in range(2)]
    other = take(7)
    nobody = take(None)
    place = {leak.site for leak in pool.leaks()}
    assert len(place) == 1
    assert re.fullmatch(rf"{re.escape(HERE)}:\d+ in (take|<lambda>)", place.pop())
    assert by_owner(pool) == {"request 1": 3, 7: 1, None: 1}
    give(again[0])
    give(other)
    assert by_owner(pool) == {"request 1": 2, None: 1}
    for thing in (first, again[1], nobody):
        give(thing)
    assert pool.leaks() == []


@pytest.mark.parametrize("case", sorted(CASES))
def test_leaks_are_ordered_and_counted(case: str) -> None:
    pool, take, _ = case_of(case)
    kept = [take("few"), take("many"), take("many")]
    many, few = pool.leaks()
    assert (many.owner, many.count, few.owner, few.count) == ("many", 2, "few", 1)
    assert many.age_s >= 0
    assert few.age_s >= many.age_s
    assert sum(end - first for first, end in many.spans) == 2
    assert len(kept) == 3


@pytest.mark.parametrize("case", sorted(CASES))
def test_expect_balanced_names_what_was_not_freed(case: str) -> None:
    pool, take, give = case_of(case)
    kept = take("before")
    with pool.expect_balanced() as same:
        assert same is pool
        give(take("within"))
    more = r"2 \w+ ?\w* are live, 1 more than the 1 before"
    with pytest.raises(IndexOwnershipError, match=more) as caught, pool.expect_balanced():
        give(take("within"))
        leaked = take("leaky")
    table = str(caught.value).split("\n")[1:]
    assert len(table) == 1
    assert "owner 'leaky', taken at " in table[0]
    assert HERE in table[0]
    with pool.expect_balanced():
        give(kept)
        give(leaked)


def test_expect_balanced_lets_other_errors_pass() -> None:
    pool = slots()
    with pytest.raises(KeyError), pool.expect_balanced():
        pool.alloc(3)
        raise KeyError


def test_expect_balanced_without_debug_knows_the_number() -> None:
    pool = TokenToKVPoolAllocator(64, devices.current())
    pool.name = "decode"
    with (
        pytest.raises(
            IndexOwnershipError, match=r"decode: 3 slots are live, 3 more than the 0 before; debug=True"
        ),
        pool.expect_balanced(),
    ):
        pool.alloc(3, owner="nobody is told")


def test_expect_balanced_shows_the_most() -> None:
    pool = slots(200)
    with pytest.raises(IndexOwnershipError, match="and 10 more owners or places"), pool.expect_balanced():
        for request in range(30):
            pool.alloc(1 + request % 3, owner=request)


def test_the_place_is_the_line_of_the_call() -> None:
    pool = slots()
    place = line()
    pool.alloc(2, owner="x")
    assert held(pool) == {("x", place): 2}


def test_lmcache_names_the_line_of_its_caller() -> None:
    if devices.current() != "cpu":
        pytest.skip("a pool of host memory")
    from kvpool.lmcache import LMCacheMemPoolMetadata, LocalCPUPool

    older = set(kvpool.pools())
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("KVPOOL_DEBUG", "1")
        pool = LocalCPUPool(LMCacheMemPoolMetadata((1, 2, 4, 1, 2), torch.float16, 0.00001))
    (chunks,) = [found for found in set(kvpool.pools()) - older if isinstance(found, ChunkPool)]
    assert chunks.debug
    place = line()
    pool.allocate(torch.zeros(1, 2, 3, 1, 2, dtype=torch.float16))
    assert held(chunks) == {(None, place): 1}


@pytest.mark.parametrize("wanted", [None, False])
def test_without_debug_nothing_is_noted(wanted: bool | None) -> None:
    pool = TokenToKVPoolAllocator(8, devices.current(), debug=wanted)
    assert not pool.debug
    pool.alloc(2, owner="x")
    with pytest.raises(StateError, match=r"TokenToKVPoolAllocator-\d+ records no owners; .* debug=True"):
        pool.leaks()


@pytest.mark.parametrize(
    ("value", "expected"), [("1", True), ("True", True), ("on", True), ("0", False), ("", False)]
)
def test_the_environment_decides_unless_the_caller_does(
    monkeypatch: pytest.MonkeyPatch, value: str, expected: bool
) -> None:
    monkeypatch.setenv("KVPOOL_DEBUG", value)
    device = devices.current()
    made = [
        TokenToKVPoolAllocator(8, device),
        ReqToTokenPool(2, 4, device),
        GDNPool(2, 1, 1, 2, 2, 4, 3, device),
        ChunkPool(2, (4,), "int8", device, pin_memory=False),
        BufferPool(device),
        PagePool(4, 2, device=device),
        Workspace(device, 1 << 16),
    ]
    assert [pool.debug for pool in made] == [expected] * len(made)
    assert not TokenToKVPoolAllocator(8, device, debug=False).debug
    assert TokenToKVPoolAllocator(8, device, debug=True).debug


@pytest.mark.parametrize("debug", [False, True])
def test_an_owner_is_text_or_a_number(debug: bool) -> None:
    pool = TokenToKVPoolAllocator(8, devices.current(), debug=debug)
    for owner in ("x", 3, -1, True, None):
        assert pool.alloc(1, owner=owner) is not None
    for wrong in (1.5, b"x", ["x"], object()):
        with pytest.raises(TypeError, match="owner must be a str or an int, not"):
            pool.alloc(1, owner=wrong)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="owner must be a str or an int, not"):
            pool.free([1], owner=wrong)  # type: ignore[arg-type]
    assert pool.available_size() == 3
    if debug:
        assert by_owner(pool) == {"x": 1, 3: 1, -1: 1, 1: 1, None: 1}


@pytest.mark.parametrize("debug", [False, True])
def test_an_owner_may_have_more_than_64_bits(debug: bool) -> None:
    pool = TokenToKVPoolAllocator(8, devices.current(), debug=debug)
    for owner in (1 << 127, -(1 << 300)):
        pool.alloc(1, owner=owner)
    if debug:
        assert by_owner(pool) == {1 << 127: 1, -(1 << 300): 1}


def test_pools_without_units_have_no_leaks() -> None:
    kv = KVPool(8, 1, 1, 2, devices.current())
    for pool in (kv, HostTier(kv, 8)):
        assert not pool.debug
        for ask in (pool.leaks, pool.expect_balanced):
            with pytest.raises(TypeError, match=f"a {type(pool).__name__} hands out no units"):
                ask()


# Reports of bad frees.


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_double_free_names_both_sides(page_size: int, caplog: pytest.LogCaptureFixture) -> None:
    pool = slots(page_size=page_size)
    place = line()
    taken = some(pool.alloc(3, owner="request 1"))
    freed = line()
    pool.free(taken, owner="request 1")
    with caplog.at_level(logging.WARNING, "kvpool"):
        pool.free(taken, owner="second")
        pool.free(taken[:1])
    first, again = [record.getMessage() for record in caplog.records]
    assert first.startswith(f"{pool.name}: dropped 3 of 3 freed slots: ")
    assert f"taken by 'request 1' at {place}, given back by 'request 1' at {freed}" in first
    assert f"taken by 'request 1' at {place}, given back by 'request 1' at {freed}" in again


def test_a_double_free_within_one_call_says_who_has_it(caplog: pytest.LogCaptureFixture) -> None:
    pool = slots()
    pool.alloc(2, owner=5)
    with caplog.at_level(logging.WARNING, "kvpool"):
        pool.free([1, 2, 2, 40])
    (record,) = caplog.records
    message = record.getMessage()
    assert "2 (named twice), 40 (not allocated); 2: taken by 5 at " in message
    assert "given back" not in message
    assert "40: " not in message.partition(": dropped")[2]  # the pool's number may end so


@pytest.mark.parametrize("case", ["slots", "row", "track slot", "chunk", "page"])
@pytest.mark.parametrize("strict", [False, True])
def test_a_free_in_the_name_of_another_takes_nothing(case: str, strict: bool) -> None:
    make, take, give_call = CASES[case]
    pool = make(device=devices.current(), strict=strict, debug=True)
    give = getattr(pool, give_call)
    held, unnamed = take(pool, "request 1"), take(pool, None)
    if strict:
        with pytest.raises(IndexOwnershipError, match="held by another owner"):
            give(held, owner="request 2")
    else:
        give(held, owner="request 2")
        assert pool.stats()["dropped_frees"] == 1
    assert pool.stats()["in_use"] == 2
    give(unnamed, owner="request 2")  # nobody has said whose it is
    give(held, owner="request 1")
    assert pool.stats()["in_use"] == 0


def test_a_free_in_the_name_of_another_at_the_end_of_a_group_takes_nothing() -> None:
    pool = slots()
    first, second = some(pool.alloc(2, owner="a")), some(pool.alloc(2, owner="b"))
    with pool.free_group():
        pool.free(first, owner="a")
        pool.free(second * 1, owner="a")
    pool.verify()
    assert by_owner(pool) == {"b": 2}
    assert pool.stats()["dropped_frees"] == 2


def test_strict_errors_tell_it_too() -> None:
    pool = slots(strict=True)
    taken = some(pool.alloc(1, owner="a"))
    pool.free(taken)
    with pytest.raises(
        IndexOwnershipError, match=r"1: taken by 'a' at .*, given back by .*; nothing was changed"
    ):
        pool.free(taken)


@pytest.mark.parametrize("case", ["row", "track slot", "chunk", "page"])
def test_every_bad_free_is_a_warning_with_its_history(case: str, caplog: pytest.LogCaptureFixture) -> None:
    _, take, give = case_of(case)
    thing = take("somebody")
    give(thing)
    with caplog.at_level(logging.WARNING, "kvpool"):
        give(thing)
        give(thing)
    assert len(caplog.records) == 2
    for record in caplog.records:
        assert re.search(r"taken by 'somebody' at .*, given back by .*test_debug.py", record.getMessage())


def test_a_stale_buffer_says_who_gave_it_back() -> None:
    pool = BufferPool(devices.current(), debug=True)
    buffer = pool.alloc((2,), "int8", owner="attention")
    place = line()
    pool.reset()
    words = re.escape(f"given back by {place}")
    with pytest.raises(StaleBufferError, match=rf"it was taken by 'attention' at .*, {words}"):
        _ = buffer.tensor


def test_a_foreign_chunk_has_no_history_here(caplog: pytest.LogCaptureFixture) -> None:
    one, other = (ChunkPool(2, (4,), "int8", pin_memory=False, debug=True) for _ in range(2))
    other.allocate(owner="other")
    chunk = one.allocate(owner="one")
    assert chunk is not None
    with caplog.at_level(logging.WARNING, "kvpool"):
        other.free(chunk)
    assert "taken by" not in caplog.text


def test_clear_gives_everything_back(caplog: pytest.LogCaptureFixture) -> None:
    pool = slots()
    taken = some(pool.alloc(2, owner="a"))
    place = line()
    pool.clear()
    assert pool.leaks() == []
    with caplog.at_level(logging.WARNING, "kvpool"):
        pool.free(taken)
    assert f"taken by 'a' at {taken_at(caplog)}, given back by {place}" in caplog.text


def taken_at(caplog: pytest.LogCaptureFixture) -> str:
    found = re.search(r"taken by 'a' at (\S+ in \w+)", caplog.text)
    assert found
    return found[1]


# Fences, groups, shares.


def test_fenced_slots_are_not_leaks() -> None:
    pool, fence = slots(), Fence()
    taken = some(pool.alloc(4, owner="a"))
    with pool.expect_balanced():
        more = some(pool.alloc(2, owner="b"))
        pool.free(more, after=fence)
    assert by_owner(pool) == {"a": 4}
    pool.free(taken[:1], after=fence)
    assert by_owner(pool) == {"a": 3}
    fence.done = True
    assert pool.available_size() == 61
    assert by_owner(pool) == {"a": 3}


@pytest.mark.parametrize("page_size", [1, 4])
def test_each_owner_of_shared_slots_is_known(page_size: int) -> None:
    pool, fence = slots(page_size=page_size), Fence()
    taken = some(pool.alloc(page_size, owner="cache"))
    pool.share(taken, owner="request 1")
    pool.share(taken, owner="request 2")
    assert by_owner(pool) == {"cache": page_size, "request 1": page_size, "request 2": page_size}
    pool.free(taken, owner="request 1")
    assert by_owner(pool) == {"cache": page_size, "request 2": page_size}
    pool.free(taken, owner="cache", after=fence)
    assert by_owner(pool) == {"request 2": page_size}
    pool.share(taken, owner="request 3")
    pool.free(taken)  # nobody says who, so the first one leaves
    assert by_owner(pool) == {"request 3": page_size}
    pool.free(taken, owner="request 3")
    assert pool.leaks() == []
    fence.done = True
    assert pool.available_size() == 64
    assert pool.leaks() == []


def test_a_group_gives_back_when_it_ends(caplog: pytest.LogCaptureFixture) -> None:
    pool = slots()
    taken = some(pool.alloc(2, owner="a"))
    pool.free_group_begin()
    place = line()
    pool.free(taken)
    assert by_owner(pool) == {"a": 2}
    pool.free_group_end()
    assert pool.leaks() == []
    with caplog.at_level(logging.WARNING, "kvpool"):
        pool.free(taken)
    assert f"given back by {place}" in caplog.text


def test_a_failed_alloc_takes_nothing() -> None:
    pool = slots(4)
    assert pool.alloc(5, owner="big") is None
    assert pool.leaks() == []


@pytest.mark.cuda
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_a_free_that_lands_later_is_of_who_made_it(driver: Driver, caplog: pytest.LogCaptureFixture) -> None:
    pool = slots()
    taken = some(pool.alloc(2, owner="a"))
    copy = devices.to_current(torch.tensor(taken.tolist(), dtype=torch.int64))
    place = line()
    pool.free(copy, owner="a")
    pool.alloc(1, owner="meanwhile")
    driver.run()
    assert by_owner(pool) == {"meanwhile": 1}
    with caplog.at_level(logging.WARNING, "kvpool"):
        pool.free([1])
    assert f"given back by 'a' at {place}" in caplog.text


# The planner.


def planned() -> tuple[TokenToKVPoolAllocator, ReqToTokenPool, BatchPlanner]:
    allocator = slots(64, page_size=4)
    table = ReqToTokenPool(4, 32, devices.current(), debug=True)
    return allocator, table, BatchPlanner(table, allocator, 4, 64)


def test_slots_of_a_planner_belong_to_the_owner_of_the_row() -> None:
    allocator, table, planner = planned()
    (first,) = table.alloc(1, owner="request 1") or []
    (second,) = table.alloc(1) or []
    place = line()
    planner.extend([first, second], [0, 0], [6, 3])
    assert held(allocator) == {("request 1", place): 8, (f"row {second}", place): 4}
    planner.decode([first, second], [7, 4])
    planner.decode([first, second], [8, 5])
    assert by_owner(allocator) == {"request 1": 8, f"row {second}": 8}
    planner.truncate([second], [1])
    assert by_owner(allocator) == {"request 1": 8, f"row {second}": 4}
    planner.finish([first])
    assert by_owner(allocator) == {f"row {second}": 4}
    assert by_owner(table) == {None: 1}
    planner.finish([second])
    assert allocator.leaks() == []
    assert table.leaks() == []


def test_shared_pages_of_a_planner_have_both_owners() -> None:
    allocator, table, planner = planned()
    prefix = some(allocator.alloc(8, owner="cache"))
    rows = [some[0] for some in (table.alloc(1, owner=f"request {n}") for n in range(3)) if some]
    planner.extend(rows[:2], [8, 8], [9, 10], [prefix, prefix])
    assert by_owner(allocator) == {"cache": 8, "request 0": 12, "request 1": 12}
    planner.fork(rows[1], rows[2], 10)
    assert by_owner(allocator) == {"cache": 8, "request 0": 12, "request 1": 12, "request 2": 12}
    planner.finish([rows[1]])
    assert by_owner(allocator) == {"cache": 8, "request 0": 12, "request 2": 12}
    allocator.free(prefix, owner="cache")
    assert by_owner(allocator) == {"request 0": 12, "request 2": 12}
    planner.finish([rows[2], rows[0]])
    assert allocator.leaks() == []


def test_only_the_table_debugs() -> None:
    allocator = TokenToKVPoolAllocator(64, devices.current())
    table = ReqToTokenPool(4, 32, devices.current(), debug=True)
    planner = BatchPlanner(table, allocator, 4, 64)
    rows = table.alloc(2, owner="x") or []
    planner.extend(rows, [0, 0], [2, 2])
    planner.finish(rows)
    assert table.leaks() == []


# Poison.


def is_poison(rows: torch.Tensor) -> bool:
    """Whether all bytes are set: NaN in every float, -1 in int8, 255 in uint8."""
    return bool((rows.cpu().contiguous().view(torch.uint8) == 0xFF).all())


def poisoned_rows(kv: KVPool) -> list[int]:
    """Rows of which some buffer is poisoned, each checked to be so in all."""
    buffers = [buffer.cpu() for buffer in (*kv.k_buffer, *kv.v_buffer)]
    rows = [[row for row in range(len(buffer)) if is_poison(buffer[row])] for buffer in buffers]
    assert all(found == rows[0] for found in rows)
    return rows[0]


def kv_and_slots(
    dtype: torch.dtype = torch.float32, page_size: int = 1, size: int = 16
) -> tuple[KVPool, TokenToKVPoolAllocator]:
    kv = KVPool(size, 2, 2, 3, devices.current(), dtype, v_head_dim=5, page_size=page_size)
    pool = slots(size, page_size=page_size)
    pool.poison_freed(kv)
    return kv, pool


@pytest.mark.parametrize("dtype", STORAGE, ids=str)
def test_freed_rows_are_poisoned(dtype: torch.dtype) -> None:
    kv, pool = kv_and_slots(dtype)
    taken = some(pool.alloc(4))
    assert poisoned_rows(kv) == []
    pool.free(taken[1:3])
    assert poisoned_rows(kv) == [2, 3]
    if dtype.is_floating_point:
        assert torch.isnan(kv.k_buffer[0][2].cpu().float()).all()


def test_a_row_that_is_read_after_its_free_shows() -> None:
    kv, pool = kv_and_slots()
    taken = some(pool.alloc(3))
    ones = devices.to_current(torch.ones(3, 2, 3)), devices.to_current(torch.ones(3, 2, 5))
    kv.set_kv_buffer(0, taken, *ones)
    pool.free(taken)
    k, v = kv.gather_kv(0, [1, 2, 3])
    assert torch.isnan(k.cpu()).all()
    assert torch.isnan(v.cpu()).all()
    assert pool.alloc(16) is not None  # all of them, so the merged ones too
    kv.set_kv_buffer(0, taken, *ones)
    assert poisoned_rows_of_layer(kv, 0) == []


def poisoned_rows_of_layer(kv: KVPool, layer: int) -> list[int]:
    key = kv.k_buffer[layer].cpu()
    return [row for row in range(len(key)) if is_poison(key[row])]


def test_pages_are_poisoned_whole_and_when_the_last_owner_leaves() -> None:
    kv, pool = kv_and_slots(page_size=4)
    taken = some(pool.alloc(6))
    pool.share(taken[:1])
    pool.free(taken)
    assert poisoned_rows(kv) == [8, 9, 10, 11]
    pool.free(taken[:1])
    assert poisoned_rows(kv) == list(range(4, 12))


def test_poison_waits_for_the_fence_and_for_the_group() -> None:
    kv, pool = kv_and_slots()
    fence, taken = Fence(), some(pool.alloc(4))
    pool.free(taken[:2], after=fence)
    with pool.free_group():
        pool.free(taken[2:])
        assert poisoned_rows(kv) == []
    assert poisoned_rows(kv) == [3, 4]
    fence.done = True
    assert pool.available_size() == 16
    assert poisoned_rows(kv) == [1, 2, 3, 4]


@pytest.mark.cuda
def test_slots_of_a_failed_plan_are_not_poisoned_once_taken_again(driver: Driver) -> None:
    assert driver.calls() == 0
    slots = TokenToKVPoolAllocator(16, "cuda", debug=True)
    kv = KVPool(16, 1, 1, 8, "cuda", "float32", pin_memory=False)
    slots.poison_freed(kv)
    table = ReqToTokenPool(4, 16, "cuda")
    planner = kvpool.BatchPlanner(table, slots, 4, 32)
    first, second = some(table.alloc(2))
    some(planner.extend([first], [0], [1]))
    driver.fail("cuLaunchKernel")
    with pytest.raises(kvpool.DriverError):
        planner.extend([second], [0], [3])
    driver.forget_plans()
    slots.merge_and_sort_free()  # so that they are the next
    live = some(planner.extend([second], [0], [3])).host.out_cache_loc.tolist()
    ones = torch.ones(3, 1, 8).cuda()
    kv.set_kv_buffer(0, live, ones, ones)
    planner.finish([first])
    driver.run()
    assert to_host(kv.k_buffer[0])[live].eq(1).all()


def test_clear_poisons_what_was_in_use() -> None:
    kv, pool = kv_and_slots()
    taken, fence = some(pool.alloc(4)), Fence()
    pool.free(taken[:1])
    pool.free(taken[1:2], after=fence)
    pool.share(taken[2:3])
    pool.free(taken[2:3], after=fence)
    pool.free(taken[2:3], after=fence)
    assert poisoned_rows(kv) == [1]
    pool.clear()
    assert poisoned_rows(kv) == [1, 2, 3, 4]


def test_finish_of_a_planner_poisons() -> None:
    allocator, table, planner = planned()
    kv = KVPool(64, 1, 1, 4, devices.current(), "float16", page_size=4)
    allocator.poison_freed(kv)
    rows = table.alloc(2) or []
    planner.extend(rows, [0, 0], [5, 2])
    planner.finish(rows[:1])
    assert poisoned_rows(kv) == list(range(4, 12))


def test_rows_beyond_the_pool_are_left_alone() -> None:
    kv = KVPool(8, 1, 1, 4, devices.current(), "float32")
    pool = slots(64)
    pool.poison_freed(kv)
    pool.free(some(pool.alloc(64)))
    assert poisoned_rows(kv) == list(range(1, 16))


def test_a_pool_that_is_gone_is_poisoned_no_more() -> None:
    kv, pool = kv_and_slots()
    key = kv.k_buffer[0]
    del kv
    pool.free(some(pool.alloc(4)))
    assert not is_poison(key[1])


def test_without_debug_nothing_is_poisoned() -> None:
    kv = KVPool(8, 1, 1, 4, devices.current(), "float32")
    pool = TokenToKVPoolAllocator(8, devices.current())
    pool.poison_freed(kv)
    pool.free(some(pool.alloc(4)))
    assert poisoned_rows(kv) == []


def test_the_factory_poisons_where_the_environment_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPOOL_DEBUG", "1")
    kv, pool = kvpool.make_full_attention_net_mem_pool(8, 1, 1, 4, 1, 4, devices.current())
    pool.free(some(pool.alloc(2)))
    assert poisoned_rows(kv) == [1, 2]


@pytest.mark.cuda
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_a_driver_that_refuses_poison_is_logged(driver: Driver, caplog: pytest.LogCaptureFixture) -> None:
    _, pool = kv_and_slots()
    taken = some(pool.alloc(4))
    driver.fail("cuMemsetD8Async", 1, 719)
    with caplog.at_level(logging.WARNING, "kvpool"):
        pool.free(taken)
    assert "freed rows are not poisoned: cuMemsetD8Async" in caplog.text
    assert pool.available_size() == 16


def test_slots_fenced_by_all_owners_are_not_live() -> None:
    pool = slots()
    fence = Fence()
    with pool.expect_balanced():
        taken = some(pool.alloc(3, owner="a"))
        pool.share(taken, owner="b")
        pool.free(taken, owner="a", after=fence)
        assert by_owner(pool) == {"b": 3}
        assert pool.stats()["fenced"] == 0
        pool.free(taken, owner="b", after=fence)
    assert pool.leaks() == []
    assert (pool.stats()["fenced"], pool.stats()["in_use"]) == (3, 3)
    fence.done = True
    assert (pool.stats()["fenced"], pool.stats()["in_use"]) == (0, 0)


def test_a_share_that_stays_is_not_balanced() -> None:
    pool = slots()
    taken = some(pool.alloc(2, owner="cache"))
    with pytest.raises(IndexOwnershipError, match="2 more than the 2 before"), pool.expect_balanced():
        pool.share(taken, owner="request")


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("page_size", [1, 4])
def test_each_giver_of_a_group_is_known(
    page_size: int, on_device: bool, caplog: pytest.LogCaptureFixture
) -> None:
    pool = slots(page_size=page_size)
    shared, alone = some(pool.alloc(page_size, owner="a")), some(pool.alloc(page_size, owner="c"))
    pool.share(shared, owner="b")
    given = (shared * 1, alone * 1) if on_device else (shared, alone)
    with pool.free_group():
        pool.free(given[0], owner="b")
        place = line()
        pool.free(given[1], owner="c")
    pool.verify()
    assert by_owner(pool) == {"a": page_size}
    with caplog.at_level(logging.WARNING, "kvpool"):
        pool.free(alone[:1])
        pool.verify()
    assert f"taken by 'c' at {HERE}" in caplog.text
    assert f"given back by 'c' at {place}" in caplog.text


def test_a_nameless_release_is_of_the_last_nameless_holder() -> None:
    pool = ChunkPool(2, (4,), "int8", devices.current(), pin_memory=False, debug=True)
    chunk = pool.allocate(owner="request 7")
    assert chunk is not None
    chunk.retain()
    chunk.release()
    assert by_owner(pool) == {"request 7": 1}
    chunk.retain()
    pool.free(chunk)
    assert by_owner(pool) == {"request 7": 1, None: 1}
    chunk.release()
    chunk.release()
    assert pool.leaks() == []


def test_calls_from_no_line_of_python_work_too(caplog: pytest.LogCaptureFixture) -> None:
    pool = slots()
    taken = some(pool.alloc(2, owner="a"))
    _thread.start_new_thread(pool.free, (taken,))
    end = time.monotonic() + 60
    while pool.stats()["in_use"] and time.monotonic() < end:
        time.sleep(0.001)
    assert pool.stats()["in_use"] == 0
    with caplog.at_level(logging.WARNING, "kvpool"):
        pool.free(taken)
        pool.verify()
    assert "given back by an unknown place" in caplog.text


def test_owners_of_any_words_are_told_apart(caplog: pytest.LogCaptureFixture) -> None:
    pool = TokenToKVPoolAllocator(6, devices.current(), need_sort=False, debug=True)
    with caplog.at_level(logging.WARNING, "kvpool"):
        # On one line, so that histories differ in their owners only.
        calls = [
            (pool.alloc, 2, "A"),
            (pool.free, [1], "\u00e9 taken by 'O2"),
            (pool.alloc, 2, "O2"),
            (pool.free, [1, 4, 4], None),
        ]
        for call, given, owner in calls:
            call(given, owner=owner)  # type: ignore[operator]
    assert "; 1: taken by 'A' at " in caplog.text
    assert "; 4: taken by 'O2' at " in caplog.text
    pool.verify()
    assert pool.available_size() == 4


def test_a_workspace_has_no_holders() -> None:
    arena = Workspace(devices.current(), 1 << 16, debug=True)
    with pytest.raises(IndexOwnershipError) as caught, arena.expect_balanced():
        arena.empty((64,), "float32")
    assert str(caught.value).endswith("256 bytes are live, 256 more than the 0 before")
    with pytest.raises(TypeError, match="records no owners"):
        arena.leaks()


# Against a model, and from threads.


@pytest.mark.parametrize("page_size", [1, 4])
def test_random_histories_agree_with_a_model(page_size: int) -> None:
    chance = random.Random(page_size)  # noqa: S311 - no secret
    pool = slots(48 * page_size, page_size=page_size)
    holders: dict[int, list[str]] = {}
    fences: list[Fence] = []

    def give(page: int, after: Fence | None = None) -> None:
        who = chance.choice(holders[page])
        pool.free([page * page_size], owner=who, after=after)
        holders[page].remove(who)

    def alloc(owner: str) -> None:
        taken = pool.alloc(chance.randint(1, 5) * page_size, owner=owner)
        holders.update((slot // page_size, [owner]) for slot in ([] if taken is None else taken.tolist()))

    for step in range(600):
        owner = f"owner {step}"
        pages = [page for page, owners in holders.items() if owners]
        match chance.choice(["alloc", "free", "share", "share", "fence", "fence", "pass"]):
            case "share" if pages:
                page = chance.choice(pages)
                pool.share([page * page_size], owner=owner)
                holders[page].append(owner)
            case "fence" if pages:
                fences.append(Fence())
                give(chance.choice(pages), fences[-1])
            case "free":
                with pool.free_group():
                    pool.free([0, -3, 10_000])
                    for page in chance.sample(pages, min(3, len(pages))):
                        give(page)
            case "pass" if fences:
                fences.pop(chance.randrange(len(fences))).done = True
            case _:
                alloc(owner)
        expected = Counter(who for owners in holders.values() for who in owners)
        assert by_owner(pool) == {who: count * page_size for who, count in expected.items()}
        pool.verify()
        stats = pool.stats()
        assert stats["in_use"] - stats["fenced"] == sum(map(bool, holders.values())) * page_size
    assert fences
    assert pool.stats()["high_water"] > 24 * page_size


def test_threads_do_not_sign_for_each_other() -> None:
    pool = slots(4096)
    barrier = threading.Barrier(4)

    def work(name: str) -> None:
        chance, kept = random.Random(name), []  # noqa: S311 - no secret
        barrier.wait()
        for _ in range(150):
            kept.append(some(pool.alloc(chance.randint(1, 3), owner=name)))
            if chance.random() < 0.5:
                pool.free(kept.pop(chance.randrange(len(kept))), owner=name)
        totals[name] = sum(len(slots) for slots in kept)

    totals: dict[str, int] = {}
    threads = [threading.Thread(target=work, args=(f"thread {n}",)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert by_owner(pool) == totals


# All pools.


def test_pools_are_sorted_by_name_and_number() -> None:
    made = [PagePool(4, 1, device=devices.current()) for _ in range(12)]
    for number, pool in enumerate(made):
        pool.name = f"zz-{11 - number}"
    mine = [pool.name for pool in kvpool.pools() if pool.name.startswith("zz-")]
    assert mine == [f"zz-{number}" for number in range(12)]


def test_a_pool_alone_cannot_be_made() -> None:
    with pytest.raises(TypeError):
        kvpool.Pool()


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_debug_needs_no_torch(run_snippet: RunSnippet) -> None:
    code = """
    import kvpool
    pool = kvpool.TokenToKVPoolAllocator(8, "cpu", debug=True)
    pool.alloc(2, owner="x")
    print([(leak.owner, leak.count) for leak in pool.leaks()])
    """
    assert run_snippet(code, hidden=["torch", "numpy"]) == "[('x', 2)]\n"


def test_a_report_of_a_bad_free_names_the_pool(caplog: pytest.LogCaptureFixture, device: str) -> None:
    pools: list[tuple[Any, Any]] = [
        (kvpool.TokenToKVPoolAllocator(8, device), [3]),
        (kvpool.ReqToTokenPool(4, 8, device), 2),
        (kvpool.PagePool(4, 2, device=device), 1),
    ]
    with caplog.at_level(logging.WARNING, "kvpool"):
        for number, (pool, bad) in enumerate(pools):
            if number > 0:
                pool.name = f"pool {number}"
            pool.free(bad)
    names = [pool.name for pool, _ in pools]
    assert names[0].startswith("TokenToKVPoolAllocator-")
    assert [message.partition(": dropped 1 of 1 freed ")[0] for message in caplog.messages] == names
    caplog.clear()
    planner = kvpool.BatchPlanner(pools[1][0], pools[0][0], 4, 8)
    [row] = pools[1][0].alloc(1)
    planner.extend([row], [0], [4])
    allocator = pools[0][0]
    allocator.name = "slots"
    with caplog.at_level(logging.DEBUG, "kvpool"):
        allocator.free([1, 2])
        planner.finish([row])
    assert caplog.messages[-1].startswith("slots: dropped 2 of 4 freed slots")


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
@pytest.mark.parametrize("wanted", ["1", "0"])
def test_live_units_at_exit_are_logged_by_owner_and_line(run_snippet: RunSnippet, wanted: str) -> None:
    code = """
    import logging, os, sys
    import kvpool
    logging.basicConfig(stream=sys.stdout, format="%(message)s")
    pool = kvpool.TokenToKVPoolAllocator(64, "cpu")
    pool.name = "kv"
    kept = pool.alloc(3, owner="request 8")
    pool.free(pool.alloc(2))
    rows = kvpool.ReqToTokenPool(4, 8, "cpu", debug=False)
    rows.alloc(1)
    whole = kvpool.PagePool(4, 2)
    cache = kvpool.PrefixCache(pool)
    cache.insert(range(4), pool.alloc(4))
    if os.fork() == 0:
        sys.exit()
    os.wait()
    """
    printed = run_snippet(code, env={"KVPOOL_DEBUG": wanted})
    lines = printed.splitlines()
    if wanted == "0":
        assert lines == []
        return
    assert len(lines) == 2
    assert lines[0] == "kv: 3 slots are live at exit:"
    assert lines[1].startswith("  3 slots (1..3): owner 'request 8', taken at ")


def test_a_notebook_shows_a_pool(device: str) -> None:
    pool = kvpool.TokenToKVPoolAllocator(64, device, debug=True)
    pool.name = "<b>"
    kept = some(pool.alloc(16, owner="request <1>"))
    shown = pool._repr_html_()
    assert "<strong>&lt;b&gt;</strong>, TokenToKVPoolAllocator on " in shown
    assert "16 of 64 slots in use" in shown
    assert "width:25.0%" in shown
    assert "request &lt;1&gt;" in shown
    assert "<b>" not in shown
    for other in (
        kvpool.KVPool(8, 1, 1, 4, device),
        kvpool.Workspace(device, 4096, debug=True),
        kvpool.PrefixCache(pool),
        kvpool.BufferPool(device, debug=False),
    ):
        assert f"<strong>{other.name}</strong>" in other._repr_html_()
    assert len(kept) == 16
