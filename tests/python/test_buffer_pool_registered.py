"""BufferPool: memory of others that is registered, and page-locked."""

from __future__ import annotations

import mmap
import weakref
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import devices
import numpy as np
import pytest
import torch
from buffer_pools import address, free, in_use, make, mark, outside
from common import cuda_only
from software import LAUNCH_FAILED, OUT_OF_MEMORY

import kvpool
from kvpool import BufferPool, ConfigError, DriverError, OutOfMemoryError

if TYPE_CHECKING:
    from collections.abc import Callable

    from shared_fixtures import RunSnippet
    from software import Driver


PAGE = mmap.PAGESIZE

pytestmark = pytest.mark.usefixtures("device")


def test_registered_memory_is_neither_owned_nor_recycled() -> None:
    pool, weights = make(), outside(1024)
    assert pool.register_existing(weights) is None  # type: ignore[func-returns-value]
    pool.register_existing(tensor=weights)
    assert (*free(pool), *in_use(pool), pool.high_water_bytes) == (0, 0, 0, 0, 0)
    first, end = weights.data_ptr(), weights.data_ptr() + 4096
    for _ in range(3):
        for _ in range(8):
            buffer = pool.alloc_bytes(4096)
            mark(buffer, 255)
            assert not first - 4096 < address(buffer) < end
        pool.reset()
    pool.clear()
    assert torch.equal(weights, outside(1024))
    del pool
    assert torch.equal(weights, outside(1024))
    weights.fill_(3)
    assert weights.eq(3).all()


OUTSIDE: dict[str, Callable[[], Any]] = {
    "parameter": lambda: torch.nn.Parameter(torch.ones(100)),
    "numpy": lambda: np.ones(100),
    "empty": lambda: torch.empty(0),
    "no_elements": lambda: torch.empty(3, 0, 2),
    "scalar": lambda: torch.tensor(1.5),
    "half": lambda: torch.ones(7, dtype=torch.bfloat16),
    "ours": lambda: kvpool.KVPool(16, 1, 1, 4, "cpu", "float32").k_buffer[0],
    "pageable": lambda: kvpool.KVPool(16, 1, 1, 4, "cpu", "float32", pin_memory=False).k_buffer[0],
}


@pytest.mark.parametrize("kind", sorted(OUTSIDE))
def test_everything_that_can_be_registered(kind: str) -> None:
    pool, tensor = make(), OUTSIDE[kind]()
    pool.register_existing(tensor)
    once = pool.stats()
    pool.register_existing(tensor)
    assert pool.stats() == once
    assert (once["capacity"], once["bytes"], once["stale_uses"]) == (0, 0, 0)


@pytest.mark.parametrize("bad", [None, 3, "weights", [1.0, 2.0], (1,), object()])
def test_register_existing_rejects_non_tensors(bad: Any) -> None:  # noqa: ANN401
    pool = make()
    with pytest.raises(TypeError):
        pool.register_existing(bad)
    assert set(pool.stats().values()) == {0}


def test_register_existing_rejects_tensors_with_gaps() -> None:
    pool, weights = make(), outside()
    for view in (weights[::2], weights.view(10, 100)[:, :50], weights.view(10, 100)[::2]):
        with pytest.raises(ConfigError):
            pool.register_existing(view)
    assert set(pool.stats().values()) == {0}


def test_the_pool_keeps_what_it_registered() -> None:
    pool, array = make(), np.ones(1000)
    gone = weakref.ref(array)
    pool.register_existing(torch.from_numpy(array))
    del array
    assert gone() is not None
    pool.reset()
    pool.clear()
    assert gone() is not None
    del pool
    assert gone() is None


@pytest.mark.cuda
@devices.cpu_only
def test_a_pool_of_the_host_registers_nothing_of_a_device() -> None:
    pool = make()
    with pytest.raises(ConfigError, match=r"cuda:0"):
        pool.register_existing(torch.zeros(4, device="cuda"))
    assert set(pool.stats().values()) == {0}


@cuda_only
def test_device_memory_is_registered_without_the_driver(driver: Driver) -> None:
    pool = make()
    weights = pool.alloc((100,), torch.int32).tensor
    foreign = kvpool._kvpool._zeros([100], "int32", "cuda")
    driver.run()
    locked = driver.page_locked_bytes()
    pool.register_existing(foreign)
    once = pool.stats()
    pool.register_existing(foreign)
    assert pool.stats() == once
    assert driver.page_locked_bytes() == locked
    assert driver.calls("cuMemHostRegister_v2") == 0
    assert weights.shape == (100,)


@cuda_only
def test_memory_of_another_device_is_refused(driver: Driver) -> None:
    pool = make()
    foreign = kvpool._kvpool._zeros([100], "uint8", "cuda:1")
    before = pool.stats(), driver.page_locked_bytes()
    with pytest.raises(ConfigError, match=r"(?s)(cuda:1.*cuda:0|cuda:0.*cuda:1)"):
        pool.register_existing(foreign)
    assert (pool.stats(), driver.page_locked_bytes()) == before


@pytest.mark.cuda
def test_host_memory_is_locked_once_until_the_pool_goes(driver: Driver) -> None:
    pool, weights = make(), outside()
    before = driver.page_locked_bytes()
    pool.register_existing(weights)
    assert driver.page_locked_bytes() - before >= 4000
    assert pool.stats()["registered_bytes"] >= 4000
    locked, stats = driver.page_locked_bytes(), pool.stats()
    driver.reset_calls()
    for again in (weights, weights.view(10, 100), weights.view(torch.uint8), weights.detach()):
        pool.register_existing(again)
    assert (driver.page_locked_bytes(), pool.stats()) == (locked, stats)
    other = outside(500)
    pool.register_existing(other)
    assert driver.page_locked_bytes() - locked >= 2000
    pool.alloc_bytes(100)
    pool.reset()
    pool.clear()
    assert driver.page_locked_bytes() - locked >= 2000
    del weights
    assert driver.page_locked_bytes() - locked >= 2000
    del pool
    assert driver.page_locked_bytes() == before
    assert torch.equal(other, outside(500))


@pytest.mark.cuda
def test_parts_of_a_storage_are_not_locked(driver: Driver) -> None:
    pool, weights, before = make(), outside(), driver.page_locked_bytes()
    for part in (weights[:100], weights[100:]):
        with pytest.raises(ConfigError, match="a part of its allocation"):
            pool.register_existing(part)
    assert (driver.page_locked_bytes(), pool.stats()["registered_bytes"]) == (before, 0)
    pool.register_existing(weights)
    pool.register_existing(weights[:100])  # page-locked already, as all of it is


@pytest.mark.cuda
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_pools_lock_the_same_memory(driver: Driver, order: tuple[int, int]) -> None:
    weights = outside()
    before = driver.page_locked_bytes()
    pools: list[BufferPool | None] = [make(), make()]
    for pool in pools:
        assert pool is not None
        pool.register_existing(weights)
    del pool
    for i in order:
        pools[i] = None
        assert torch.equal(weights, outside())
    assert driver.page_locked_bytes() == before


@pytest.mark.cuda
def test_memory_that_is_locked_already_stays_so(driver: Driver) -> None:
    kv = kvpool.KVPool(1000, 1, 2, 8, "cpu", torch.float32)
    locked = driver.page_locked_bytes()
    pool = make()
    pool.register_existing(kv.k_buffer[0])
    del pool
    assert driver.page_locked_bytes() == locked
    kv.k_buffer[0].fill_(3)
    assert kv.k_buffer[0].eq(3).all()


def pages(*ends: int) -> list[torch.Tensor]:
    """Tensors that lie one behind the other, from the beginning of a page on."""
    memory = np.frombuffer(mmap.mmap(-1, ends[-1]), np.uint8)
    return [torch.from_numpy(memory[start:end]) for start, end in pairwise((0, *ends))]


@pytest.mark.cuda
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_memory_of_which_a_part_is_locked_is_refused(driver: Driver, order: tuple[int, int]) -> None:
    pool, tensors = make(), pages(PAGE + 1000, 3 * PAGE)
    first, second = (tensors[at] for at in order)
    pool.register_existing(first)
    before = pool.stats(), driver.page_locked_bytes()
    said = rf"of the {second.nbytes} bytes at 0x\w+ a part is page-locked already: .* a page of {PAGE} bytes"
    with pytest.raises(ConfigError, match=said):
        pool.register_existing(second)
    driver.fail("cuPointerGetAttribute")
    with pytest.raises(DriverError, match="cuPointerGetAttribute"):
        pool.register_existing(second)
    assert (pool.stats(), driver.page_locked_bytes()) == before


@pytest.mark.cuda
def test_memory_in_pages_that_are_locked_already_is_taken(driver: Driver) -> None:
    pool, tensors = make(), pages(PAGE + 1000, PAGE + 2000)
    pool.register_existing(tensors[0])
    locked = driver.page_locked_bytes()
    pool.register_existing(tensors[1])
    assert (driver.page_locked_bytes(), pool.stats()["registered_bytes"]) == (locked, PAGE + 2000)


STILL_LOCKED: list[torch.Tensor] = []
"""Memory that the driver failed to unlock: its addresses must not be used again."""


@pytest.mark.cuda
@pytest.mark.parametrize("code", [LAUNCH_FAILED, OUT_OF_MEMORY])
def test_a_lock_that_fails_leaves_nothing(driver: Driver, code: int) -> None:
    pool, weights = make(), outside()
    before = pool.stats(), driver.page_locked_bytes()
    driver.fail("cuMemHostRegister_v2", code=code)
    with pytest.raises((DriverError, OutOfMemoryError), match=r"cuMemHostRegister|\d"):
        pool.register_existing(weights)
    assert driver.planned() == 0
    assert (pool.stats(), driver.page_locked_bytes()) == before
    pool.register_existing(weights)
    assert driver.page_locked_bytes() - before[1] >= 4000
    driver.fail("cuMemHostUnregister")
    STILL_LOCKED.append(weights)
    # A pool that goes tells nobody.
    del pool
    assert driver.planned() == 0


@cuda_only
@pytest.mark.parametrize(("env", "locked"), [({}, True), ({"KVPOOL_NO_RESIDENCY": "1"}, False)])
def test_page_locking_can_be_turned_off(
    driver: Driver, run_snippet: RunSnippet, env: dict[str, str], locked: bool
) -> None:
    assert driver.calls() == 0
    code = """
        import ctypes, kvpool, numpy
        soft = ctypes.CDLL(None)
        soft.soft_page_locked_bytes.restype = ctypes.c_long
        for device in ("cuda", "cpu"):
            pool = kvpool.BufferPool(device)
            before = soft.soft_page_locked_bytes()
            weights = numpy.ones(1 << 20, numpy.uint8)
            pool.register_existing(weights)
            print(soft.soft_page_locked_bytes() - before >= 1 << 20, soft.soft_page_locked_bytes() == before)
            del pool
            print(soft.soft_page_locked_bytes() == before)
    """
    lines = run_snippet(code, hidden=["torch"], env=env).splitlines()
    assert lines == [f"{locked} {not locked}", "True"] * 2
