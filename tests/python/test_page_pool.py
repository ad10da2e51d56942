"""PagePool: pages, growth that moves nothing, misuse, memory, driver calls, threads, and random histories."""

from __future__ import annotations

import gc
import inspect
import itertools
import logging
import os
import random
import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import devices
import numpy as np
import pytest
import torch
from common import STORAGE, THREADS, cuda_only, on_stream, some, together
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from models import BadFreeError
from software import LAUNCH_FAILED, OUT_OF_MEMORY, each_call

import kvpool
from kvpool import ConfigError, DriverError, IndexOwnershipError, OutOfMemoryError, PagePool

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import RunSnippet
    from software import Driver


STATM = Path("/proc/self/statm")
WAITS = ("cuStreamSynchronize", "cuCtxSynchronize", "cuEventSynchronize")
# So many bytes that no machine can give them, in pages that are cheap to count.
TOO_LARGE = (1 << 24, 1 << 26)
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


def contents(pool: PagePool) -> list[list[float]]:
    return [pool.page(i).float().tolist() for i in range(pool.total_pages)]


# Construction


def test_signature_and_defaults() -> None:
    parameters = inspect.signature(PagePool).parameters
    assert list(parameters) == ["page_size", "initial_pages", "dtype", "device", "grow", "strict", "debug"]
    assert parameters["device"].default == "cpu"
    assert parameters["grow"].default == 0
    assert parameters["strict"].default is False
    for name in ("grow", "strict"):
        assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
    pool = PagePool(4, 3)
    assert (pool.dtype, pool.device, pool.grow, pool.strict) == (torch.float32, "cpu", 0, False)


def test_attributes_are_the_arguments() -> None:
    pool = PagePool(5, 7, torch.bfloat16, devices.current(), grow=2, strict=True)
    assert (pool.page_size, pool.total_pages, pool.free_pages, pool.used_pages) == (5, 7, 7, 0)
    assert (pool.grow, pool.dtype, pool.strict) == (2, torch.bfloat16, True)
    assert pool.device == {"cpu": "cpu", "cuda": "cuda:0"}[devices.current()]
    for name in ("page_size", "total_pages", "free_pages", "used_pages", "grow", "dtype", "device", "strict"):
        with pytest.raises(AttributeError):
            setattr(pool, name, getattr(pool, name))


def test_arguments_by_their_names() -> None:
    pool = PagePool(page_size=2, initial_pages=1, dtype="int8", device=devices.current(), grow=1)
    assert (pool.page_size, counts(pool), pool.dtype) == (2, (1, 1, 0), torch.int8)
    with pytest.raises(TypeError):
        PagePool(2, 1, "int8", devices.current(), 1)  # type: ignore[call-arg]


@pytest.mark.parametrize("dtype", STORAGE, ids=str)
def test_pages_are_tensors_of_zeros(dtype: torch.dtype) -> None:
    pool = make(5, 3, dtype)
    for i in range(3):
        page = pool.page(i)
        assert type(page) is torch.Tensor
        assert page.shape == (5,)
        assert page.dtype is dtype
        assert page.device.type == devices.current()
        assert page.is_contiguous()
        assert not page.view(torch.uint8).any()


@pytest.mark.parametrize(
    "dtype", [torch.float16, "float16", "torch.float16", np.float16, np.dtype("float16")]
)
def test_every_way_to_write_a_dtype(dtype: object) -> None:
    assert PagePool(2, 1, dtype, devices.current()).dtype is torch.float16


@pytest.mark.parametrize("dtype", ["float64", torch.float64, torch.int32, torch.bool, "complex64", "text", 3])
def test_dtypes_that_can_not_be_stored(dtype: object) -> None:
    with pytest.raises(TypeError):
        PagePool(2, 1, dtype, devices.current())


def test_devices_as_pytorch_writes_them() -> None:
    pool = PagePool(2, 1, device=torch.device(devices.current()))
    assert pool.page(0).device.type == devices.current()


@devices.cpu_only
@pytest.mark.parametrize(
    ("name", "error", "words"),
    [("tpu", ConfigError, "tpu"), ("cuda:x", ConfigError, "cuda:x"), (3, TypeError, "int")],
)
def test_devices_that_are_none(name: object, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        PagePool(2, 1, device=name)


@devices.cpu_only
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_cuda_without_a_driver_says_what_was_looked_for() -> None:
    with pytest.raises(kvpool.BackendUnavailableError, match="libcuda"):
        PagePool(2, 1, device="cuda")


@pytest.mark.parametrize("page_size", [0, -1, -(10**30), 10**30])
def test_page_sizes_that_can_not_be(page_size: int) -> None:
    with pytest.raises(ConfigError, match=str(page_size)):
        PagePool(page_size, 1, device=devices.current())


@pytest.mark.parametrize("number", [-1, -(10**30), 10**30])
def test_numbers_of_pages_that_can_not_be(number: int) -> None:
    with pytest.raises(ConfigError, match=str(number)):
        PagePool(4, number, device=devices.current())
    with pytest.raises(ConfigError, match=str(number)):
        PagePool(4, 1, device=devices.current(), grow=number)


def test_more_bytes_than_an_address_can_name() -> None:
    for page_size, pages in ((1 << 62, 1), (1 << 31, 1 << 31), (1, 1 << 62)):
        with pytest.raises((ConfigError, OutOfMemoryError), match=r"\d{10}"):
            PagePool(page_size, pages, device=devices.current())


def test_more_memory_than_any_machine_has() -> None:
    with pytest.raises(OutOfMemoryError, match=TOO_MANY_BYTES):
        make(*TOO_LARGE)


@pytest.mark.parametrize("number", [1.0, "1", None, float("nan"), [1]])
def test_sizes_of_a_wrong_type(number: Any) -> None:  # noqa: ANN401
    with pytest.raises(TypeError):
        PagePool(number, 1, device=devices.current())
    with pytest.raises(TypeError):
        PagePool(1, number, device=devices.current())
    with pytest.raises(TypeError):
        PagePool(1, 1, device=devices.current(), grow=number)


def test_pages_of_one_element_and_pages_of_many() -> None:
    tiny, large = make(1, 300, torch.int8), make(1 << 18, 3)
    assert take(tiny, 300) == list(range(300))
    assert large.page(2).shape == (1 << 18,)
    assert len({tiny.page(i).data_ptr() for i in range(300)}) == 300


# alloc and free


def test_pages_are_handed_out_lowest_first() -> None:
    pool = make(4, 5)
    pages = [pool.alloc() for _ in range(6)]
    assert pages == [0, 1, 2, 3, 4, None]
    assert all(type(page) is int for page in pages[:5])
    assert counts(pool) == (5, 0, 5)


def test_the_last_freed_page_comes_first() -> None:
    pool = make(4, 6)
    take(pool, 6)
    for page in (1, 4, 0, 3):
        assert pool.free(page) is None  # type: ignore[func-returns-value]
    assert take(pool, 4) == [3, 0, 4, 1]
    assert pool.alloc() is None


def test_freed_pages_come_before_those_that_never_were() -> None:
    pool = make(4, 6)
    take(pool, 3)
    pool.free(0)
    pool.free(2)
    assert take(pool, 3) == [2, 0, 3]
    pool.free(3)
    pool.free(1)
    assert take(pool, 4) == [1, 3, 4, 5]
    assert pool.alloc() is None


def test_a_full_pool_answers_none_and_changes_nothing() -> None:
    pool = make(4, 2)
    take(pool, 2)
    pool.page(1).fill_(7)
    before = pool.stats(), contents(pool)
    assert [pool.alloc() for _ in range(5)] == [None] * 5
    assert (pool.stats(), contents(pool)) == before
    pool.free(1)
    assert pool.alloc() == 1
    assert pool.alloc() is None


def test_a_pool_without_pages() -> None:
    pool = make(4, 0)
    assert pool.alloc() is None
    assert counts(pool) == (0, 0, 0)
    with pytest.raises(IndexError, match="0"):
        pool.page(0)
    pool.free(0)
    assert pool.stats()["dropped_frees"] == 1


def test_counts_add_up() -> None:
    pool = make(4, 4)
    for used in range(1, 5):
        pool.alloc()
        assert counts(pool) == (4, 4 - used, used)
    for used in (3, 2, 1, 0):
        pool.free(used)
        assert counts(pool) == (4, 4 - used, used)


@pytest.mark.parametrize("kind", [int, np.int32, np.int64, np.uint8])
def test_numbers_of_numpy_are_numbers(kind: Callable[[int], Any]) -> None:
    pool = PagePool(kind(4), kind(3), device=devices.current(), grow=kind(1))
    take(pool, 3)
    assert pool.page(kind(2)).data_ptr() == pool.page(2).data_ptr()
    pool.free(kind(2))
    pool.free(page=kind(1))
    assert take(pool, 2) == [1, 2]
    assert pool.stats()["dropped_frees"] == 0


def test_stats() -> None:
    pool = make(5, 4, torch.bfloat16)
    take(pool, 3)
    pool.free(1)
    pool.free(1)
    stats = pool.stats()
    assert type(stats) is dict
    assert (stats["capacity"], stats["available"], stats["in_use"], stats["high_water"]) == (4, 2, 2, 3)
    assert stats["dropped_frees"] == 1
    assert 4 * 5 * 2 <= stats["bytes"] < 4 * 5 * 2 + 4096
    assert all(type(value) is int for value in stats.values())


# page


def test_a_page_is_a_view() -> None:
    pool = make(4, 3, torch.int8)
    first, again = pool.page(1), pool.page(i=1)
    assert first.data_ptr() == again.data_ptr()
    first.fill_(7)
    again[2] = 9
    assert pool.page(1).tolist() == first.tolist() == [7, 7, 9, 7]
    assert not pool.page(0).any()
    assert not pool.page(2).any()


@pytest.mark.parametrize("dtype", STORAGE, ids=str)
@pytest.mark.parametrize("page_size", [1, 3, 64, 1000])
def test_pages_share_no_bytes(page_size: int, dtype: torch.dtype) -> None:
    pool = make(page_size, 9, dtype, grow=4)
    take(pool, 10)
    size = page_size * dtype.itemsize
    starts = sorted(pool.page(i).data_ptr() for i in range(13))
    assert all(end - start >= size for start, end in itertools.pairwise(starts))
    for i in range(13):
        pool.page(i).view(torch.uint8).fill_(i + 1)
    for i in range(13):
        assert pool.page(i).view(torch.uint8).eq(i + 1).all()


def test_a_free_page_can_be_looked_at() -> None:
    pool = make(4, 2)
    pool.page(1).fill_(3)
    take(pool, 2)
    assert pool.page(1).tolist() == [3] * 4
    pool.free(1)
    assert pool.page(1).tolist() == [3] * 4


def test_pages_are_zero_at_first_and_not_zeroed_again() -> None:
    pool = make(4, 2)
    page = some(pool.alloc())
    pool.page(page).fill_(5)
    pool.free(page)
    assert pool.alloc() == page
    assert pool.page(page).tolist() == [5] * 4
    assert not pool.page(some(pool.alloc())).any()


def test_pages_stay_where_they_are() -> None:
    pool = make(4, 3, grow=2)
    addresses = [pool.page(i).data_ptr() for i in range(3)]
    take(pool, 3)
    for i in (1, 0, 2):
        pool.free(i)
    take(pool, 8)
    assert [pool.page(i).data_ptr() for i in range(3)] == addresses


@pytest.mark.parametrize("index", [-1, 3, 4, 2**31, 2**32, 2**40, -(2**63), 10**30, -(10**30)])
def test_pages_that_are_not_there(index: int) -> None:
    pool = make(4, 3)
    with pytest.raises(IndexError, match=str(index) if abs(index) < 2**63 else r"\d"):
        pool.page(index)
    with pytest.raises(IndexError, match="3"):
        pool.page(index)


@pytest.mark.parametrize("bad", [1.0, "1", None, float("nan"), [1], True, slice(0, 1), (1,)])
def test_pages_and_frees_of_a_wrong_type(bad: Any) -> None:  # noqa: ANN401
    pool = make(4, 3)
    take(pool, 3)
    with pytest.raises(TypeError):
        pool.page(bad)
    with pytest.raises(TypeError):
        pool.free(bad)
    assert pool.stats()["dropped_frees"] == 0
    assert counts(pool) == (3, 0, 3)


# Bad frees


@pytest.mark.parametrize("bad", [-1, 2, 3, 4, 10**6, 2**31, 2**32, 2**32 + 1, 2**40, 10**30, -(10**30)])
def test_bad_frees_are_dropped_and_counted(bad: int) -> None:
    pool = make(4, 4)
    take(pool, 2)
    before = pool.stats()
    pool.free(bad)
    assert pool.stats() == {**before, "dropped_frees": 1}
    pool.free(bad)
    assert pool.stats() == {**before, "dropped_frees": 2}
    assert [pool.alloc() for _ in range(3)] == [2, 3, None]


def test_a_page_freed_twice_is_handed_out_once() -> None:
    pool = make(4, 3)
    take(pool, 3)
    for _ in range(3):
        pool.free(1)
    assert pool.stats()["dropped_frees"] == 2
    assert counts(pool) == (3, 1, 2)
    assert [pool.alloc(), pool.alloc()] == [1, None]


def test_a_page_that_was_taken_again_can_be_freed_again() -> None:
    pool = make(4, 3)
    take(pool, 2)
    for _ in range(5):
        pool.free(1)
        assert pool.alloc() == 1
    assert pool.stats()["dropped_frees"] == 0


def test_the_first_bad_free_is_a_warning_and_later_ones_are_not(caplog: pytest.LogCaptureFixture) -> None:
    pool = make(4, 30)
    pool.alloc()
    with caplog.at_level(logging.DEBUG, logger="kvpool"):
        pool.free(17)
        pool.free(23)
        pool.free(0)
        pool.free(0)
    found = [(record.name, record.levelno) for record in caplog.records]
    assert found == [("kvpool", logging.WARNING), ("kvpool", logging.DEBUG), ("kvpool", logging.DEBUG)]
    for record, words in zip(caplog.records, ("17", "23", "0"), strict=True):
        assert words in record.getMessage()
        assert "page" in record.getMessage()


def test_every_pool_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="kvpool"):
        for _ in range(3):
            pool = make()
            pool.free(1)
            pool.free(2)
    assert len(caplog.records) == 3


def test_reports_say_why(caplog: pytest.LogCaptureFixture) -> None:
    reports = []
    for bad in (99, 2, 0):
        pool = make(4, 3)
        take(pool, 1)
        pool.free(0)
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="kvpool"):
            pool.free(bad)
        reports.append(caplog.records[0].getMessage().replace(str(bad), "N", 1))
    assert len(set(reports)) == 3, reports


@pytest.mark.parametrize("bad", [-1, 2, 3, 4, 2**40])
def test_strict_raises_before_anything_is_changed(bad: int, caplog: pytest.LogCaptureFixture) -> None:
    pool = make(4, 4, strict=True)
    take(pool, 2)
    before = pool.stats()
    with caplog.at_level(logging.DEBUG, logger="kvpool"), pytest.raises(IndexOwnershipError, match=str(bad)):
        pool.free(bad)
    assert pool.stats() == before
    assert not caplog.records
    assert [pool.alloc() for _ in range(3)] == [2, 3, None]


def test_strict_refuses_a_second_free() -> None:
    pool = make(4, 4, strict=True)
    take(pool, 2)
    pool.free(1)
    with pytest.raises(IndexOwnershipError, match=r"(?s)1.*4"):
        pool.free(1)
    assert counts(pool) == (4, 3, 1)
    assert take(pool, 2) == [1, 2]
    assert pool.stats()["dropped_frees"] == 0


def test_a_handler_that_raises_does_not_undo_a_free(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []

    class Broken(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise RuntimeError(record.getMessage())

    monkeypatch.setattr("sys.unraisablehook", seen.append)
    pool, handler = make(), Broken()
    logging.getLogger("kvpool").addHandler(handler)
    try:
        pool.free(1)
    finally:
        logging.getLogger("kvpool").removeHandler(handler)
    assert len(seen) == 1
    assert pool.stats()["dropped_frees"] == 1
    assert take(pool, 3) == [0, 1, 2]


# Growth


def test_it_grows_instead_of_answering_none() -> None:
    pool = make(4, 2, grow=3)
    assert take(pool, 2) == [0, 1]
    assert counts(pool) == (2, 0, 2)
    assert pool.alloc() == 2
    assert counts(pool) == (5, 2, 3)
    assert take(pool, 3) == [3, 4, 5]
    assert counts(pool) == (8, 2, 6)


def test_it_grows_from_nothing() -> None:
    pool = make(4, 0, grow=1)
    assert take(pool, 5) == [0, 1, 2, 3, 4]
    assert counts(pool) == (5, 0, 5)
    assert not any(pool.page(i).any() for i in range(5))


def test_it_grows_only_when_nothing_is_free() -> None:
    pool = make(4, 2, grow=2)
    take(pool, 2)
    pool.free(0)
    assert pool.alloc() == 0
    assert pool.total_pages == 2
    take(pool, 1)
    pool.free(1)
    assert take(pool, 2) == [1, 3]
    assert pool.total_pages == 4


def test_it_never_shrinks() -> None:
    pool = make(4, 1, grow=4)
    for page in take(pool, 9):
        pool.free(page)
    assert counts(pool) == (9, 9, 0)
    assert take(pool, 9) == list(range(8, -1, -1))
    assert pool.total_pages == 9


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


def test_pages_are_there_as_soon_as_it_has_grown() -> None:
    pool = make(4, 1, grow=3)
    with pytest.raises(IndexError, match="1"):
        pool.page(1)
    pool.free(1)
    take(pool, 2)
    assert not pool.page(3).any()
    with pytest.raises(IndexError, match="4"):
        pool.page(4)
    pool.free(2)
    assert pool.stats()["dropped_frees"] == 2
    assert take(pool, 2) == [2, 3]


def test_stats_grow() -> None:
    pool = make(256, 2, grow=4)
    before = pool.stats()["bytes"]
    take(pool, 3)
    stats = pool.stats()
    assert (stats["capacity"], stats["available"], stats["in_use"], stats["high_water"]) == (6, 3, 3, 3)
    assert stats["bytes"] - before >= 4 * 256 * 4
    pool.free(0)
    assert pool.stats()["high_water"] == 3


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
def test_growth_that_can_not_be(grow: int) -> None:
    """It is refused at once or when it would happen, and both leave no trace."""
    try:
        pool = make(1 << 20, 1, grow=grow)
    except ConfigError as error:
        assert str(grow) in str(error)  # noqa: PT017
        return
    assert pool.alloc() == 0
    with pytest.raises((OutOfMemoryError, ConfigError), match=r"\d{10}"):
        pool.alloc()
    assert counts(pool) == (1, 0, 1)


# Memory


def test_pages_outlive_their_pool() -> None:
    pool = make(1000, 2, grow=2)
    take(pool, 5)
    kept = [pool.page(i) for i in range(6)]
    for i, page in enumerate(kept):
        page.fill_(i)
    addresses = [page.data_ptr() for page in kept]
    del pool
    gc.collect()
    others = [make(1000, 6) for _ in range(4)]
    for other in others:
        for i in range(6):
            other.page(i).fill_(99)
    assert [page.data_ptr() for page in kept] == addresses
    for i, page in enumerate(kept):
        assert page.eq(i).all()
        page.add_(1)
        assert page.eq(i + 1).all()


def test_a_pool_in_a_cycle_is_collected() -> None:
    class Owner:
        def __init__(self) -> None:
            self.pool = make()
            self.page = self.pool.page(1)
            self.me = self

    owner = Owner()
    gone = weakref.ref(owner)
    del owner
    gc.collect()
    assert gone() is None


@devices.cpu_only
@pytest.mark.skipif(not STATM.exists(), reason="needs /proc to see how much memory is in use")
def test_memory_does_not_grow() -> None:
    def resident() -> int:
        gc.collect()
        return int(STATM.read_text(encoding="ascii").split()[1]) * 4096

    def once() -> None:
        pool = make(1 << 16, 4, grow=4)
        for page in take(pool, 16):
            pool.page(page).fill_(1)
            pool.free(page)

    for _ in range(4):
        once()
    before = resident()
    for _ in range(30):
        once()
    assert resident() - before < 16 << 20


@devices.cpu_only
def test_without_pytorch_pages_are_ours(run_snippet: RunSnippet) -> None:
    code = """
        import kvpool, numpy
        pool = kvpool.PagePool(4, 1, "float16", grow=2)
        print(pool.alloc(), pool.alloc(), pool.dtype, pool.device, pool.total_pages)
        page = pool.page(1)
        print(type(page).__name__, page.shape, page.dtype, page.device)
        array = page.numpy()
        array[:] = 3
        print(pool.page(1).numpy().tolist(), pool.page(0).numpy().tolist())
        del pool, page
        other = kvpool.PagePool(4, 3, "float16")
        other.page(1).numpy()[:] = 9
        print(array.tolist(), numpy.from_dlpack(other.page(1)).tolist())
    """
    assert run_snippet(code, hidden=["torch"]).splitlines() == [
        "0 1 float16 cpu 3",
        "Tensor (4,) float16 cpu",
        "[3.0, 3.0, 3.0, 3.0] [0.0, 0.0, 0.0, 0.0]",
        "[3.0, 3.0, 3.0, 3.0] [9.0, 9.0, 9.0, 9.0]",
    ]


# Threads


@pytest.mark.parametrize(("initial_pages", "grow"), [(40, 0), (4, 3)])
def test_no_page_is_in_two_hands(initial_pages: int, grow: int) -> None:
    pool = make(8, initial_pages, grow=grow, strict=True)
    owner: dict[int, int] = {}
    lock = threading.Lock()
    most = THREADS * 8

    def work(number: int) -> None:
        choose = random.Random(number)  # noqa: S311
        held: list[int] = []
        for _ in range(400):
            page = pool.alloc() if len(held) < 8 else None
            if page is not None:
                with lock:
                    assert owner.setdefault(page, number) == number
                    assert page not in held
                held.append(page)
                assert pool.page(page).shape == (8,)
            if held and (page is None or choose.random() < 0.5):
                given = held.pop(choose.randrange(len(held)))
                with lock:
                    assert owner.pop(given) == number
                pool.free(given)
        for given in held:
            with lock:
                assert owner.pop(given) == number
            pool.free(given)

    together(work)
    stats = pool.stats()
    assert (stats["in_use"], stats["dropped_frees"]) == (0, 0)
    assert stats["capacity"] == stats["available"] == pool.total_pages < most + 3
    assert stats["high_water"] <= most
    assert sorted(take(pool, pool.total_pages)) == list(range(pool.total_pages))


@devices.cpu_only
def test_what_a_thread_wrote_stays_while_others_let_the_pool_grow() -> None:
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


def test_each_page_is_freed_once_however_many_threads_try() -> None:
    pool = make(4, 256)
    take(pool, 256)

    def work(number: int) -> None:
        for i in range(256):
            pool.free((i + number * 32) % 256)

    together(work)
    assert counts(pool) == (256, 256, 0)
    assert pool.stats()["dropped_frees"] == 7 * 256
    assert sorted(take(pool, 256)) == list(range(256))


def test_readers_see_whole_operations() -> None:
    pool = make(4, 8, grow=8)

    def work(number: int) -> None:
        held: list[int] = []
        for i in range(300):
            if number % 2:
                stats = pool.stats()
                assert stats["available"] + stats["in_use"] == stats["capacity"]
                assert stats["capacity"] % 8 == 0
                assert stats["in_use"] <= stats["high_water"]
            elif i % 3 < 2:
                held.append(some(pool.alloc()))
            else:
                pool.free(held.pop())
        for page in held:
            pool.free(page)

    together(work)
    assert pool.used_pages == 0


@devices.cpu_only
def test_pages_may_be_dropped_by_another_thread() -> None:
    pages: list[torch.Tensor] = [make(100, 1).page(0) for _ in range(THREADS)]

    def work(number: int) -> None:
        assert not pages[number].any()
        pages[number] = torch.empty(0)

    together(work)


# The driver


@cuda_only
def test_a_pool_costs_one_allocation_and_pages_cost_none(driver: Driver) -> None:
    before = driver.device_bytes()
    pool = make(256, 64)
    assert driver.calls("cuMemAlloc_v2") == 1
    assert driver.device_bytes() - before >= 64 * 256 * 4
    driver.reset_calls()
    for page in take(pool, 64):
        assert pool.page(page).numel() == 256
        pool.free(page)
    pool.free(99)
    assert pool.stats()["in_use"] == 0
    assert driver.calls() == 0


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
def test_pages_keep_device_memory_and_give_it_back(driver: Driver) -> None:
    before = driver.device_bytes(), driver.locked_bytes()
    pool = make(1000, 2, grow=2)
    take(pool, 7)
    kept = [pool.page(0), pool.page(6)]
    kept[0].fill_(3)
    kept[1].fill_(4)
    del pool
    assert driver.device_bytes() > before[0]
    assert kept[0].eq(3).all()
    assert kept[1].eq(4).all()
    kept.clear()
    assert (driver.device_bytes(), driver.locked_bytes()) == before


@cuda_only
def test_every_driver_call_may_fail(driver: Driver) -> None:
    pools: list[PagePool] = []
    taken: list[int] = []

    def work() -> None:
        pools.clear()
        taken.clear()
        pools.append(make(8, 1, grow=2))
        for _ in range(6):
            taken.append(some(pools[0].alloc()))
            pools[0].page(taken[-1])

    def memory() -> int:
        pools.clear()
        driver.run()
        return driver.device_bytes()

    work()
    before, failures = memory(), 0
    for error in each_call(driver, work, codes=(LAUNCH_FAILED, OUT_OF_MEMORY)):
        if error is not None:
            failures += 1
            assert isinstance(error, (DriverError, OutOfMemoryError)), repr(error)
            assert isinstance(error, OutOfMemoryError) or "failed with CUDA_ERROR" in str(error)
        if pools:
            pool, count = pools[0], len(taken)
            assert taken == list(range(count))
            assert counts(pool) == (1 + count // 2 * 2, 1 + count // 2 * 2 - count, count)
            assert pool.stats()["high_water"] == count
            assert take(pool, 9 - count) == list(range(count, 9))
            assert contents(pool) == [[0] * 8] * 9
            for page in range(9):
                pool.free(page)
            assert counts(pool) == (9, 9, 0)
            assert pool.stats()["dropped_frees"] == 0
            del pool
        found = memory()
        # A call that gives memory back tells nobody of its failure; what it had is lost.
        assert error is None or found == before
        before = found
    assert failures > 5


@cuda_only
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_pool_does_not_grow_after_a_fork() -> None:
    pool = make(4, 1, grow=1)
    take(pool, 1)
    child = os.fork()
    if child == 0:
        wrong = 0
        for call in (pool.alloc, make):
            try:
                call()
            except DriverError as error:
                wrong += "forked" not in str(error)
            except BaseException:  # noqa: BLE001 - the child must end here
                wrong += 1
            else:
                wrong += 1
        os._exit(wrong)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert pool.alloc() == 1


# Random histories


class PagePoolModel:
    """A stack of freed pages, the number of pages that were ever taken, and their contents as lists."""

    def __init__(self, page_size: int, pages: int, *, grow: int, strict: bool) -> None:
        self.page_size = page_size
        self.grow = grow
        self.strict = strict
        self.contents = [[0] * page_size for _ in range(pages)]
        self.touched = 0
        self.freed: list[int] = []
        self.live: set[int] = set()
        self.high_water = 0
        self.dropped_frees = 0

    def alloc(self) -> int | None:
        if self.freed:
            page = self.freed.pop()
        else:
            if self.touched == len(self.contents):
                self.contents += [[0] * self.page_size for _ in range(self.grow)]
            if self.touched == len(self.contents):
                return None
            page = self.touched
            self.touched += 1
        self.live.add(page)
        self.high_water = max(self.high_water, len(self.live))
        return page

    def free(self, page: int) -> None:
        if page in self.live:
            self.live.remove(page)
            self.freed.append(page)
        elif self.strict:
            raise BadFreeError
        else:
            self.dropped_frees += 1


class PageHistory(RuleBasedStateMachine):
    """Every operation, misuse included, on the pool and on its naive model."""

    @initialize(
        page_size=st.integers(1, 5),
        pages=st.integers(0, 5),
        grow=st.integers(0, 3),
        dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int8, torch.uint8]),
        strict=st.booleans(),
    )
    def start(self, page_size: int, pages: int, grow: int, dtype: torch.dtype, strict: bool) -> None:
        self.real = make(page_size, pages, dtype, grow=grow, strict=strict)
        self.model = PagePoolModel(page_size, pages, grow=grow, strict=strict)
        self.views: dict[int, torch.Tensor] = {}
        self.addresses: dict[int, int] = {}

    @rule()
    def alloc(self) -> None:
        assert self.real.alloc() == self.model.alloc()

    @rule(page=st.integers(-2, 20))
    def free(self, page: int) -> None:
        try:
            self.model.free(page)
        except BadFreeError:
            with pytest.raises(IndexOwnershipError, match=str(page)):
                self.real.free(page)
        else:
            self.real.free(page)

    @precondition(lambda self: self.model.live)
    @rule(data=st.data())
    def free_live(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(self.model.live)))
        self.model.free(page)
        self.real.free(page)

    @precondition(lambda self: self.model.freed and not self.model.strict)
    @rule(data=st.data())
    def free_again(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(self.model.freed))
        self.model.free(page)
        self.real.free(page)

    @precondition(lambda self: self.model.contents)
    @rule(data=st.data(), value=st.integers(1, 100), kept=st.booleans())
    def write(self, data: st.DataObject, value: int, kept: bool) -> None:
        page = data.draw(st.integers(0, len(self.model.contents) - 1))
        element = data.draw(st.integers(0, self.model.page_size - 1))
        view = self.views.setdefault(page, self.real.page(page)) if kept else self.real.page(page)
        view[element] = value
        self.model.contents[page][element] = value

    @rule(beyond=st.integers(0, 3), page=st.integers(-3, -1))
    def look_outside(self, beyond: int, page: int) -> None:
        for index in (len(self.model.contents) + beyond, page):
            with pytest.raises(IndexError, match=str(index)):
                self.real.page(index)

    @rule()
    def wrong_types(self) -> None:
        for bad in (0.0, "0", None):
            with pytest.raises(TypeError):
                self.real.free(bad)  # type: ignore[arg-type]
            with pytest.raises(TypeError):
                self.real.page(bad)  # type: ignore[arg-type]

    @invariant()
    def same(self) -> None:
        if not hasattr(self, "real"):
            return
        total, used = len(self.model.contents), len(self.model.live)
        assert counts(self.real) == (total, total - used, used)
        stats = self.real.stats()
        assert (stats["capacity"], stats["available"], stats["in_use"]) == (total, total - used, used)
        assert stats["high_water"] == self.model.high_water
        assert stats["dropped_frees"] == self.model.dropped_frees
        pages = [self.real.page(i) for i in range(total)]
        for i, page in enumerate(pages):
            assert self.addresses.setdefault(i, page.data_ptr()) == page.data_ptr()
        if pages:
            assert torch.stack(pages).int().tolist() == self.model.contents


def test_random_histories_agree_with_the_model() -> None:
    run_state_machine_as_test(PageHistory)
