"""Classes of Python derived from pools, and why pools are neither pickled nor copied."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from pool_table import CASES, every_pool
from typing_extensions import Self, override

import kvpool
from kvpool import BatchPlanner, KVPool, ReqToTokenPool, TokenToKVPoolAllocator

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import SupportsIndex

    from pool_table import Case

OPEN = (KVPool, TokenToKVPoolAllocator, ReqToTokenPool)
COPIES: list[Callable[[Any], object]] = [pickle.dumps, copy.copy, copy.deepcopy]


class Counting(TokenToKVPoolAllocator):
    """An allocator as an engine would derive it."""

    calls = 0

    @override
    def alloc(self, need_size: SupportsIndex, **options: Any) -> torch.Tensor | None:
        self.calls += 1
        return super().alloc(need_size, **options)


class Configured(KVPool):
    """With a constructor of its own."""

    def __new__(cls, config: dict[str, int], name: str) -> Self:  # noqa: ARG004 - `__init__` has it
        return super().__new__(cls, config["size"], 1, 1, 4, "cpu", "float32")

    def __init__(self, config: dict[str, int], name: str) -> None:
        super().__init__()
        self.config = config
        self.name = name


def test_an_overridden_method_is_for_callers_in_python() -> None:
    allocator, table = Counting(64, "cpu", page_size=4), ReqToTokenPool(4, 16, "cpu")
    slots = allocator.alloc(3)
    assert (allocator.calls, allocator.available_size()) == (1, 60)
    planner = BatchPlanner(table, allocator, 4, 32)
    assert planner.allocator is allocator
    rows = table.alloc(1)
    assert rows is not None
    assert planner.extend(rows, [0], [5]) is not None
    assert (allocator.calls, allocator.available_size()) == (1, 52)
    assert slots is not None
    allocator.free(slots)
    planner.finish(rows, [5])
    assert allocator.available_size() == 64


def test_a_constructor_of_its_own() -> None:
    pool = Configured({"size": 8}, "mine")
    assert isinstance(pool, KVPool)
    assert pool in kvpool.pools()
    assert (pool.size, pool.name, pool.config, pool.stats()["capacity"]) == (8, "mine", {"size": 8}, 8)
    pool.set_kv_buffer(0, [1], torch.ones(1, 1, 4), torch.ones(1, 1, 4))
    assert pool.gather_kv(0, [1])[0].sum() == 4
    allocator = TokenToKVPoolAllocator(8, "cpu", debug=True)
    allocator.poison_freed(pool)  # takes a pool of a derived class


def test_a_class_that_does_not_call_the_constructor_is_not_listed() -> None:
    class Silent(ReqToTokenPool):
        def __init__(self, *_sizes: object) -> None:
            self.note = "it works all the same"

    table = Silent(4, 16, "cpu")
    assert table.alloc(2) == [1, 2]
    assert table not in kvpool.pools()


def test_arguments_go_to_new() -> None:
    class Wrong(ReqToTokenPool):
        def __init__(self, config: object) -> None:
            super().__init__(4, 16, "cpu")
            self.config = config

    with pytest.raises(TypeError, match="max_context_len"):
        Wrong("config")


def test_objects_have_a_dict_and_weak_references_and_are_collected() -> None:
    pool = Counting(64, "cpu")
    pool.itself = pool  # type: ignore[attr-defined]
    seen = weakref.ref(pool)
    del pool
    gc.collect()
    assert seen() is None

    class Slotted(KVPool):
        __slots__ = ()

    slotted = Slotted(8, 1, 1, 4, "cpu")
    assert not hasattr(slotted, "__dict__")
    assert weakref.ref(slotted)() is slotted


@every_pool
def test_which_pools_can_be_base_classes(case: Case) -> None:
    if case.cls in {*OPEN, kvpool.Workspace}:
        type("Derived", (case.cls,), {})
    else:
        with pytest.raises(TypeError, match="not an acceptable base type"):
            type("Derived", (case.cls,), {})


@every_pool
@pytest.mark.parametrize("make_copy", COPIES, ids=lambda each: each.__name__)
def test_a_pool_says_why_it_is_not_copied(case: Case, make_copy: Callable[[Any], object]) -> None:
    words = r" cannot be pickled or copied: it stands for memory and bookkeeping of this process; .*construct"
    with pytest.raises(TypeError, match=case.cls.__name__ + words):
        make_copy(case.make())


@pytest.mark.parametrize("make_copy", COPIES, ids=lambda each: each.__name__)
def test_so_do_derived_pools_and_what_pools_hand_out(make_copy: Callable[[Any], object]) -> None:
    allocator = Counting(64, "cpu")
    table = ReqToTokenPool(4, 16, "cpu")
    cache = kvpool.PrefixCache(allocator)
    things = (
        allocator,
        Configured({"size": 8}, "mine"),
        BatchPlanner(table, allocator, 4, 32),
        cache,
        cache.match([1]),
        CASES["BufferPool"].make().alloc_bytes(8),
        {"a pool within": table},
    )
    for thing in things:
        with pytest.raises(TypeError, match="cannot be pickled or copied"):
            make_copy(thing) if not isinstance(thing, dict) else pickle.dumps(thing)
