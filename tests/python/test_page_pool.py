"""PagePool: pages, growth that moves nothing, misuse, memory, driver calls, threads, and random histories."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import devices
import numpy as np
import pytest
import torch
from common import WAITS, assert_refused_after_fork, cuda_only, needs_fork, on_stream, some, together

from kvpool import ConfigError, OutOfMemoryError, PagePool

if TYPE_CHECKING:
    from collections.abc import Callable

    from software import Driver


TOO_MANY_BYTES = str(1 << 52)

pytestmark = pytest.mark.usefixtures("device")


def make(
    page_size: int = 4,
    initial_pages: int = 3,
    dtype: torch.dtype = torch.float32,
    *,
    grow: int = 0,
    strict: bool = False,
) -> PagePool:
    return PagePool(page_size, initial_pages, dtype, devices.current(), grow=grow, strict=strict)


def take(pool: PagePool, count: int) -> list[int]:
    return [some(pool.alloc()) for _ in range(count)]


def counts(pool: PagePool) -> tuple[int, int, int]:
    return pool.total_pages, pool.free_pages, pool.used_pages


# alloc and free


def test_a_pool_without_pages() -> None:
    pool = make(4, 0)
    assert pool.alloc() is None
    assert counts(pool) == (0, 0, 0)
    with pytest.raises(IndexError, match="0"):
        pool.page(0)
    pool.free(0)
    assert pool.stats()["dropped_frees"] == 1


@pytest.mark.parametrize("kind", [int, np.int32, np.int64, np.uint8])
def test_numbers_of_numpy_are_numbers(kind: Callable[[int], Any]) -> None:
    pool = PagePool(kind(4), kind(3), device=devices.current(), grow=kind(1))
    take(pool, 3)
    assert pool.page(kind(2)).data_ptr() == pool.page(2).data_ptr()
    pool.free(kind(2))
    pool.free(page=kind(1))
    assert take(pool, 2) == [1, 2]
    assert pool.stats()["dropped_frees"] == 0


# page


def test_a_page_is_a_view_of_its_memory() -> None:
    pool = make(4, 3, torch.int8)
    first, again = pool.page(1), pool.page(i=1)
    assert first.data_ptr() == again.data_ptr()
    first.fill_(7)
    again[2] = 9
    assert pool.page(1).tolist() == first.tolist() == [7, 7, 9, 7]
    assert not pool.page(0).any()
    assert not pool.page(2).any()


@pytest.mark.parametrize("index", [-1, 3, 4, 2**31, 2**32, 2**40, -(2**63), 10**30, -(10**30)])
def test_rejects_missing_pages(index: int) -> None:
    pool = make(4, 3)
    with pytest.raises(IndexError, match=str(index) if abs(index) < 2**63 else r"\d"):
        pool.page(index)
    with pytest.raises(IndexError, match="3"):
        pool.page(index)


@pytest.mark.parametrize("bad", [1.0, "1", None, float("nan"), [1], True, slice(0, 1), (1,)])
def test_rejects_pages_of_a_wrong_type(bad: Any) -> None:  # noqa: ANN401
    pool = make(4, 3)
    take(pool, 3)
    with pytest.raises(TypeError):
        pool.page(bad)
    with pytest.raises(TypeError):
        pool.free(bad)
    assert pool.stats()["dropped_frees"] == 0
    assert counts(pool) == (3, 0, 3)


# Growth


def test_it_grows_instead_of_answering_none() -> None:
    pool = make(4, 2, grow=3)
    assert take(pool, 2) == [0, 1]
    assert counts(pool) == (2, 0, 2)
    assert pool.alloc() == 2
    assert counts(pool) == (5, 2, 3)
    assert take(pool, 3) == [3, 4, 5]
    assert counts(pool) == (8, 2, 6)


def test_growth_moves_nothing_and_changes_nothing() -> None:
    pool = make(4, 2, grow=2)
    held = []
    for number in range(20):
        page = some(pool.alloc())
        view = pool.page(page)
        view.fill_(number + 1)
        held.append((page, view, view.data_ptr()))
    for number, (page, view, address) in enumerate(held):
        assert pool.page(page).data_ptr() == view.data_ptr() == address
        assert pool.page(page).eq(number + 1).all()
        view.add_(100)
        assert pool.page(page).eq(number + 101).all()
    assert len({address for _, _, address in held}) == 20


def test_growth_that_fails_changes_nothing() -> None:
    # 4 MiB a page, of which there would be 4 PiB more.
    pool = make(1 << 20, 2, grow=1 << 30)
    take(pool, 2)
    pool.page(1)[:3] = 7
    before, addresses = pool.stats(), [pool.page(i).data_ptr() for i in range(2)]
    for _ in range(3):
        with pytest.raises(OutOfMemoryError, match=TOO_MANY_BYTES):
            pool.alloc()
    assert pool.stats() == before
    assert [pool.page(i).data_ptr() for i in range(2)] == addresses
    assert pool.page(1)[:4].tolist() == [7, 7, 7, 0]
    with pytest.raises(IndexError, match="2"):
        pool.page(2)
    pool.free(1)
    assert pool.alloc() == 1
    with pytest.raises(OutOfMemoryError):
        pool.alloc()


@pytest.mark.parametrize("grow", [2**31, 2**40, 2**62])
def test_rejects_bad_growth(grow: int) -> None:
    """Growth beyond the limit is refused by the constructor or when it would happen, and changes nothing."""
    try:
        pool = make(1 << 20, 1, grow=grow)
    except ConfigError as error:
        assert str(grow) in str(error)  # noqa: PT017
        return
    assert pool.alloc() == 0
    with pytest.raises((OutOfMemoryError, ConfigError), match=r"\d{10}"):
        pool.alloc()
    assert counts(pool) == (1, 0, 1)


# Threads


@devices.cpu_only
def test_pages_keep_their_values_while_the_pool_grows() -> None:
    pool = make(64, 1, torch.int8, grow=1)

    def work(number: int) -> None:
        held = []
        for i in range(60):
            page = some(pool.alloc())
            view = pool.page(page)
            assert not view.any()
            view.fill_(number * 8 + i % 8)
            held.append((page, view, number * 8 + i % 8))
        for page, view, mark in held:
            assert pool.page(page).data_ptr() == view.data_ptr()
            assert view.eq(mark).all()

    together(work)
    assert counts(pool) == (480, 0, 480)


# The driver


@cuda_only
def test_growth_costs_one_allocation_and_waits_for_nothing(driver: Driver) -> None:
    pool = make(256, 1, grow=4)
    take(pool, 1)
    for _ in range(3):
        before = driver.device_bytes()
        driver.reset_calls()
        take(pool, 1)
        assert driver.calls("cuMemAlloc_v2") == 1
        assert driver.device_bytes() - before >= 4 * 256 * 4
        assert [driver.calls(name) for name in (*WAITS, "cuMemFree_v2")] == [0] * 4
        driver.reset_calls()
        take(pool, 3)
        assert driver.calls() == 0


@cuda_only
def test_new_pages_are_zeroed_on_the_stream_that_is_current_when_they_are_made(driver: Driver) -> None:
    pool = make(256, 1, grow=4)
    take(pool, 1)
    driver.run()
    stream = driver.stream()
    with on_stream(stream):
        take(pool, 1)
    assert driver.pending(stream) > 0
    assert driver.pending() == driver.pending(stream)
    driver.run(stream)
    assert not pool.page(1).cpu().any()


@cuda_only
def test_out_of_memory_tells_both_numbers_and_leaves_nothing(driver: Driver) -> None:
    before = driver.device_bytes()
    driver.set_capacity(before + (1 << 20))
    with pytest.raises(OutOfMemoryError, match=r"4194304 bytes asked for, 1048576 of \d+ free on cuda:0"):
        make(1 << 10, 1 << 10)
    assert driver.device_bytes() == before
    pool = make(1 << 10, 1 << 7, grow=1 << 10)
    take(pool, 1 << 7)
    stats, held = pool.stats(), driver.device_bytes()
    with pytest.raises(OutOfMemoryError, match="4194304 bytes"):
        pool.alloc()
    assert (pool.stats(), driver.device_bytes()) == (stats, held)
    driver.set_capacity(64 << 30)
    assert pool.alloc() == 1 << 7
    assert pool.total_pages == (1 << 7) + (1 << 10)


@cuda_only
@needs_fork
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_pool_does_not_grow_after_a_fork() -> None:
    pool = make(4, 1, grow=1)
    take(pool, 1)
    assert_refused_after_fork([pool.alloc], lambda: pool.total_pages != 1)
    assert pool.alloc() == 1
