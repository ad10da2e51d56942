"""kvpool's memory within LMCache, beside LMCache's own: the same calls, invalid frees, and another LMCache.

`lmcache_runs.run` starts it with `KVPOOL_LMCACHE=1`.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import logging
import random
import sys
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from lmcache.v1 import memory_management
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_allocators.host_memory_allocator import HostMemoryAllocator
from lmcache.v1.memory_allocators.mixed_memory_allocator import MixedMemoryAllocator
from lmcache.v1.memory_allocators.paged_tensor_memory_allocator import PagedTensorMemoryAllocator
from lmcache.v1.memory_allocators.tensor_memory_allocator import TensorMemoryAllocator
from lmcache.v1.memory_management import AddressManager, MemoryFormat
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

import kvpool
from kvpool.errors import ConfigError, IndexOwnershipError
from kvpool.integrations import lmcache as adapter
from kvpool.integrations import seams as adapters
from kvpool.integrations.lmcache import memory, seams
from kvpool.integrations.seams import EngineMismatchError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

STEPS = 3000
PAGE = 4096


def own_module() -> ModuleType:
    """LMCache's module as it is without kvpool: its file, executed a second time under another name."""
    file = memory_management.__file__
    assert file is not None
    spec = importlib.util.spec_from_file_location("memory_management_of_lmcache", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its dataclasses look
    spec.loader.exec_module(module)
    return module


OwnAddressManager: Any = own_module().AddressManager
OwnPaged: Any = memory.PagedTensorMemoryAllocator.__base__


def test_lmcache_has_put_kvpool_in() -> None:
    assert AddressManager is memory.AddressManager is not OwnAddressManager
    assert PagedTensorMemoryAllocator is memory.PagedTensorMemoryAllocator is not OwnPaged
    assert OwnPaged.__module__ == "lmcache.v1.memory_allocators.paged_tensor_memory_allocator"
    assert memory_management._allocate_cpu_memory is memory.allocate_cpu_memory
    assert memory_management._free_cpu_memory is memory.free_cpu_memory
    adapter.register()  # does nothing the second time
    assert sum(isinstance(finder, adapter._Replacing) for finder in sys.meta_path) == 1


def answer(call: Callable[[], Any]) -> Any:  # noqa: ANN401
    """The result of a call, or the built-in error that it raises."""
    try:
        return call()
    except RuntimeError:
        return RuntimeError
    except ValueError:
        return ValueError


@pytest.mark.parametrize("seed", range(3))
def test_ranges_are_those_of_lmcache(seed: int) -> None:
    """The same addresses, since both take the lowest range that is long enough."""
    dice = random.Random(seed)  # noqa: S311
    align = dice.choice([1, 256, PAGE])
    managers = [kind(50 * PAGE + 100, align) for kind in (AddressManager, OwnAddressManager)]
    taken: list[tuple[int, int]] = []
    refused = 0

    def call_both(name: str, *arguments: int) -> Any:  # noqa: ANN401
        ours, theirs = (answer(partial(getattr(each, name), *arguments)) for each in managers)
        assert ours == theirs, (name, arguments)
        return ours

    for _ in range(STEPS):
        match dice.randrange(8):
            case 0 | 1 | 2:
                found = call_both(
                    "allocate", dice.choice([0, 1, 100, PAGE, PAGE + 1, dice.randrange(10 * PAGE)])
                )
                taken += [found] if isinstance(found, tuple) else []
                refused += found is RuntimeError
            case 3:
                found = call_both(
                    "batched_allocate", dice.choice([0, 1, PAGE, 3 * PAGE]), dice.randrange(-1, 9)
                )
                taken += found if isinstance(found, list) else []
                refused += found is RuntimeError
            case 4 | 5 | 6 if taken:
                # Neighbours are freed in one call, as LMCache frees a batch; or half of one.
                taken.sort()
                address, size = taken.pop(dice.randrange(len(taken)))
                behind = [place for place in taken if place[0] == address + size]
                if behind and dice.random() < 0.5:
                    taken.remove(behind[0])
                    size += behind[0][1]
                elif size > align and dice.random() < 0.2:
                    taken.append((address + align, size - align))
                    size = align
                call_both("free", address, size)
            case 7 if dice.random() < 0.05:
                call_both("sbrk", dice.choice([1, PAGE, 3 * PAGE]))
        for name in ("get_free_size", "get_heap_size", "check_consistency"):
            call_both(name)
        assert managers[0].total_allocated_size == managers[1].total_allocated_size
    assert refused > 100, "a history without a full space shows little"


SHAPES = [
    [torch.Size([2, 4, 16, 8])],
    [torch.Size([2, 4, 7, 8])],
    [torch.Size([40, 64]), torch.Size([3, 5])],
    [torch.Size([700])],
]
DTYPES = [torch.bfloat16, torch.uint8, torch.float32]


class Pair:
    """The same calls to two allocators, and the objects that both have given."""

    def __init__(self, ours: Any, theirs: Any, *, same_places: bool) -> None:  # noqa: ANN401
        self.sides = ours, theirs
        self.same_places = same_places
        self.held: list[tuple[tuple[Any, Any], int]] = []
        self.marks = self.refused = 0

    def plain(self, found: Any) -> Any:  # noqa: ANN401
        if found is None:
            return None
        meta = found.meta
        known = meta.shape, meta.dtype, meta.shapes, meta.dtypes, meta.fmt, meta.phy_size, meta.ref_count
        return (meta.address if self.same_places else None, found.get_size(), found.is_valid(), *known)

    def take(self, shapes: list[torch.Size], dtypes: list[torch.dtype], count: int | None) -> None:
        options = {} if count is None else {"batch_size": count}
        name = "allocate" if count is None else "batched_allocate"
        found = [
            getattr(side, name)(shapes, dtypes, fmt=MemoryFormat.KV_T2D, **options) for side in self.sides
        ]
        ours, theirs = ([side] if count is None and side is not None else side for side in found)
        assert (ours is None) == (theirs is None)
        if ours is None:
            self.refused += 1
            return
        assert [self.plain(each) for each in ours] == [self.plain(each) for each in theirs]
        for pair in zip(ours, theirs, strict=True):
            self.marks = (self.marks + 1) % 251
            for each in pair:
                each.raw_tensor.fill_(self.marks)
            self.held.append((pair, self.marks))

    def give_back(self, pairs: list[tuple[tuple[Any, Any], int]], *, batched: bool) -> None:
        for index, side in enumerate(self.sides):
            objects = [pair[index] for pair, _ in pairs]
            for each in objects:
                assert each.raw_tensor.unique().tolist() == [dict_of(pairs)[id(each)]]
            if batched:
                side.batched_free(objects)
            else:
                for each in objects:
                    each.ref_count_down()

    def check(self) -> None:
        ours, theirs = self.sides
        assert ours.memcheck()
        assert theirs.memcheck()
        for name in ("total_allocated_size", "num_active_allocations"):
            assert getattr(ours, name) == getattr(theirs, name)
        for name in ("get_free_size", "get_heap_size"):
            assert getattr(ours.address_manager, name)() == getattr(theirs.address_manager, name)()


def dict_of(pairs: list[tuple[tuple[Any, Any], int]]) -> dict[int, int]:
    """By object, what it is full of."""
    return {id(each): mark for pair, mark in pairs for each in pair}


def history(pair: Pair, dice: random.Random) -> None:
    for _ in range(STEPS // 6):
        action = dice.random()
        shapes = dice.choice(SHAPES)
        dtypes = [dice.choice(DTYPES) for _ in shapes]
        if action < 0.4:
            pair.take(shapes, dtypes, None)
        elif action < 0.7:
            pair.take(shapes, dtypes, dice.randrange(0, 5))
        elif pair.held:
            chosen = [pair.held.pop(dice.randrange(len(pair.held))) for _ in range(min(3, len(pair.held)))]
            pair.give_back(chosen, batched=action < 0.85)
        pair.check()
    assert pair.refused > 20, "a history without a full memory shows little"


def test_tensors_are_those_of_lmcache() -> None:
    sides = [TensorMemoryAllocator(torch.zeros(20 * PAGE, dtype=torch.uint8)) for _ in range(2)]
    sides[1].address_manager = OwnAddressManager(20 * PAGE)
    history(Pair(*sides, same_places=True), random.Random(1))  # noqa: S311


def test_pages_are_as_many_as_those_of_lmcache() -> None:
    """Not the same: the lowest comes first, where LMCache's come in the order of their frees."""
    shapes, dtypes = [torch.Size([40, 64]), torch.Size([3, 5])], [torch.float32, torch.float32]
    sides = [
        kind(torch.zeros(12 * 10_300, dtype=torch.uint8), shapes, dtypes)
        for kind in (PagedTensorMemoryAllocator, OwnPaged)
    ]
    history(Pair(*sides, same_places=False), random.Random(2))  # noqa: S311


def test_double_frees_are_dropped_and_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    manager = AddressManager(8 * PAGE)
    (first, size), (second, _) = manager.batched_allocate(PAGE, 2)
    manager.free(first, size)
    with caplog.at_level(logging.WARNING, "kvpool"):
        manager.free(first, size)
        manager.free(first, 2 * size)  # half of it is allocated
        manager.free(100 * PAGE, size)
    (message,) = caplog.messages
    assert message.endswith(": dropped 1 of 1 freed ranges: 0 (already free)")
    assert manager._space.stats()["dropped_frees"] == 3
    assert manager.check_consistency()
    assert manager.allocate(6 * PAGE) == (2 * PAGE, 6 * PAGE)
    assert manager.allocate(PAGE) == (first, size)
    assert manager.get_free_size() == 0
    manager.free(second, size)
    assert manager.get_free_size() == PAGE


def test_a_page_that_is_dropped_is_free_again_however_often(caplog: pytest.LogCaptureFixture) -> None:
    """LMCache's own object frees its page when it is dropped, but only the first time."""
    allocator = pages()
    total = len(allocator.free_blocks)
    with caplog.at_level(logging.WARNING, "kvpool"):
        for _ in range(3):
            page = allocator.allocate(torch.Size([10]), torch.uint8)
            del page
            assert len(allocator.free_blocks) == total
            assert allocator.num_active_allocations == 0
    lost = "page 0 of LMCache was dropped without ref_count_down, and is free again"
    assert [text for text in caplog.messages if "page 0" in text] == [lost]
    page = allocator.allocate(torch.Size([10]), torch.uint8)
    assert page.tensor.shape == (10,)
    page.ref_count_down()
    assert allocator.memcheck()
    gone = weakref.ref(allocator)
    del allocator, page
    gc.collect()
    assert gone() is None


def test_an_invalid_free_raises_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPOOL_LMCACHE_STRICT", "1")
    manager = AddressManager(8 * PAGE)
    with pytest.raises(IndexOwnershipError, match=r"ranges: 4096 \(already free\); nothing was changed"):
        manager.free(PAGE, PAGE)
    assert manager.get_free_size() == 8 * PAGE
    allocator = pages()
    page, other = allocator.batched_allocate(torch.Size([10]), torch.uint8, 2)
    allocator.free(other)
    for batch in ([page, page], [page, other]):
        with pytest.raises(IndexOwnershipError, match="1 of 2 freed ranges"):
            allocator.batched_free(batch)
        assert page.tensor.shape == (10,)
        assert other.tensor is None
    with pytest.raises(IndexOwnershipError, match="1 of 1 freed ranges"):
        allocator.free(other)
    allocator.free(page)
    assert allocator.memcheck()
    assert allocator.num_active_allocations == 0


def pages(count: int = 4) -> Any:  # noqa: ANN401
    return PagedTensorMemoryAllocator(
        torch.zeros(count * 64, dtype=torch.uint8), [torch.Size([64])], [torch.uint8]
    )


def test_a_page_that_is_freed_twice_has_one_owner(caplog: pytest.LogCaptureFixture) -> None:
    shape, dtype = torch.Size([64]), torch.uint8
    own = OwnPaged(torch.zeros(4 * 64, dtype=dtype), [shape], [dtype])
    owners = []
    for allocator in (own, pages()):
        page, _ = allocator.batched_allocate(shape, dtype, 2)
        with caplog.at_level(logging.WARNING, "kvpool"):
            page.ref_count_down()
            page.ref_count_down()
        taken = [allocator.allocate(shape, dtype) for _ in range(4)]
        owners.append([each.meta.address for each in taken if each is not None])
        if allocator is not own:
            assert allocator.memcheck()
    # LMCache's own gives the page to two owners.
    assert owners == [[2, 3, 0, 0], [0, 2, 3]]
    (message,) = [text for text in caplog.messages if "freed" in text]
    assert message.endswith(": dropped 1 of 1 freed ranges: 0 (already free)")


def test_a_free_page_is_invalid_and_a_foreign_one_is_refused() -> None:
    ours, others = pages(), pages()
    page = ours.allocate(torch.Size([10]), torch.uint8)
    assert page.tensor.shape == (10,)
    foreign, far = others.allocate(torch.Size([64]), torch.uint8), HostMemoryAllocator(1 << 20)
    for stranger in (foreign, far.batched_allocate(torch.Size([64]), torch.uint8, 2)[1]):
        with pytest.raises(IndexOwnershipError, match="is of another allocator"):
            ours.batched_free([page, stranger])
        assert page.is_valid()
    ours.free(page)
    assert page.tensor is None
    assert len(ours.free_blocks) == 4
    with pytest.raises(ConfigError, match="count is -1; it must not be negative"):
        ours.batched_allocate(torch.Size([64]), torch.uint8, -1)


def test_an_allocator_that_goes_reports_nothing(caplog: pytest.LogCaptureFixture) -> None:
    gc.collect()
    allocator = pages()
    allocator.free(allocator.allocate(torch.Size([64]), torch.uint8))
    caplog.clear()
    del allocator
    gc.collect()
    assert not caplog.messages


def test_bookkeeping_that_is_broken_is_not_consistent(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def verify(self) -> None:
            raise AssertionError("the gaps do not add up")

    manager, allocator = AddressManager(PAGE), pages()
    monkeypatch.setattr(manager, "_space", Broken())
    assert not manager.check_consistency()
    monkeypatch.setattr(allocator, "_space", Broken())
    assert not allocator.memcheck()


def test_memory_is_a_chunk_and_outlives_its_allocator() -> None:
    allocator = MixedMemoryAllocator(1 << 20)
    [pool] = [pool for pool in kvpool.pools() if isinstance(pool, kvpool.ChunkPool)]
    assert (pool.num_chunks, pool.chunk_shape, pool.stats()["in_use"]) == (1, (1 << 20,), 1)
    held = allocator.allocate(torch.Size([1000]), torch.uint8)
    kept = held.tensor.fill_(7)
    assert held.data_ptr % PAGE == 0
    held.ref_count_down()
    allocator.close()
    assert pool.stats()["in_use"] == 0
    del pool, held, allocator
    gc.collect()
    assert not kvpool.pools()
    assert kept.unique().tolist() == [7]


def test_memory_of_a_numa_node_and_memory_that_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mapping:
        gpu_to_numa_mapping = {3: 0}  # noqa: RUF012 - as LMCache has it

    class Device:
        waits = 0

        def is_available(self) -> bool:
            return True

        def current_device(self) -> int:
            return 3

        def synchronize(self) -> None:
            self.waits += 1

    device = Device()
    monkeypatch.setattr(memory_management, "torch_dev", device)
    buffer = memory.allocate_cpu_memory(1 << 20, Mapping())
    [pool] = [pool for pool in kvpool.pools() if isinstance(pool, kvpool.ChunkPool)]
    assert pool.numa_node == 0
    memory.free_cpu_memory(buffer, 1 << 20, Mapping())
    assert device.waits == 1
    monkeypatch.undo()
    del pool
    name = f"kvpool_{random.randrange(1 << 60):x}"  # noqa: S311
    shared = memory.allocate_cpu_memory(1 << 16, shm_name=name)
    assert not kvpool.pools()
    assert shared.fill_(3).sum() == 3 << 16
    memory.free_cpu_memory(shared, 1 << 16, shm_name=name)
    assert memory.allocate_cpu_memory(0).numel() == 0


def test_a_backend_of_lmcache_has_kvpools_memory(lmcache_engine_metadata: Any) -> None:  # noqa: ANN401
    """As an engine makes it, from LMCache's settings."""
    config = LMCacheEngineConfig.from_defaults(max_local_cpu_size=0.01)
    backend = LocalCPUBackend(config, lmcache_engine_metadata, "cpu")
    chunk = backend.allocate(torch.Size([2, 4, 256, 64]), torch.bfloat16)
    assert chunk is not None
    allocator = backend.get_memory_allocator()
    assert isinstance(allocator.pin_allocator.address_manager, memory.AddressManager)
    assert allocator.buffer.data_ptr() == chunk.data_ptr
    chunk.ref_count_down()
    assert allocator.memcheck()
    allocator.close()


def test_a_drift_of_lmcache_names_what_was_found_and_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    """LMCache's modules are imported again, as at its start: nothing is replaced, however often."""
    methods = seams.SEAMS["lmcache.v1.memory_management.AddressManager"]
    monkeypatch.setitem(methods, "free", "(self, address)")
    monkeypatch.setitem(methods, "realloc", "(self, address, size)")
    modules = "lmcache.v1.memory_management", OwnPaged.__module__
    for name in modules:
        monkeypatch.delitem(sys.modules, name)
    for name in (*modules, *modules):
        with pytest.raises(EngineMismatchError) as caught:
            importlib.import_module(name)
        said = str(caught.value)
        assert said.startswith("LMCache 0.5.6 is not what kvpool was written for: ")
        assert "AddressManager.free is (self, address, size), expected was (self, address)" in said
        assert "AddressManager.realloc(self, address, size) is missing" in said
        assert not {*modules} & {*sys.modules}


def test_an_import_that_fails_replaces_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("lmcache.v1.memory_management", OwnPaged.__module__):
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, memory.__name__, None)
    with pytest.raises(ImportError, match=r"lmcache\.memory"):
        importlib.import_module(OwnPaged.__module__)
    assert "lmcache.v1.memory_management" not in sys.modules


def test_a_missing_class_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(seams.SEAMS, "lmcache.v1.memory_management.AddressKeeper", {})
    with pytest.raises(EngineMismatchError, match="has no attribute 'AddressKeeper'"):
        seams.LMCACHE.require(seams.SEAMS)


def test_another_version_is_warned_about(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(seams, "SEAMS", {})
    seams.LMCACHE.require(seams.SEAMS)
    assert not caplog.records
    monkeypatch.setattr(adapters, "version_of", lambda _: "0.6.0")
    with caplog.at_level(logging.WARNING, "kvpool"):
        seams.LMCACHE.require(seams.SEAMS)
    assert caplog.messages == ["LMCache 0.6.0 was not tested with kvpool; tested are 0.5.6"]


def test_an_import_that_comes_too_late_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", [])
    with pytest.raises(
        ConfigError, match="memory_management is imported already; kvpool must be registered before"
    ):
        adapter.register()
    monkeypatch.delenv("KVPOOL_LMCACHE")
    adapter.register()
    assert not sys.meta_path
