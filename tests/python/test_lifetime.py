"""Memory: tensors outlive pools, capsules may never be used, and what is dropped is given back."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING

import pytest
import torch
from common import MIB, assert_steady, needs_statm, some

import kvpool

if TYPE_CHECKING:
    from shared_fixtures import RunSnippet


def make_kv(size: int = 1016) -> kvpool.KVPool:
    return kvpool.KVPool(size, 2, 4, 16, "cpu", torch.float32)


def test_slots_outlive_their_allocator() -> None:
    kept = []
    for _ in range(50):
        allocator = kvpool.TokenToKVPoolAllocator(5000, "cpu")
        slots = [allocator.alloc(n) for n in (1, 100, 4000)]
        runs = allocator.runs([1, 2, 3])
        del allocator
        kept.append((slots, runs))
    gc.collect()
    for slots, runs in kept:
        assert [tensor.tolist() for tensor in slots if tensor is not None] == [
            [1],
            list(range(2, 102)),
            list(range(102, 4102)),
        ]
        assert runs.tolist() == [[1, 3]]


def test_gathered_rows_outlive_everything() -> None:
    pool = make_kv()
    pool.k_buffer[0].fill_(3)
    k, v = pool.gather_kv(0, range(1, 1000))
    del pool
    gc.collect()
    assert k.eq(3).all()
    assert not v.any()


def test_passed_fences_are_let_go() -> None:
    class Fence:
        def query(self) -> bool:
            return True

    allocator = kvpool.TokenToKVPoolAllocator(64, "cpu")
    fence = Fence()
    gone = weakref.ref(fence)
    allocator.free(some(allocator.alloc(8)), after=fence)
    del fence
    assert allocator.available_size() == 64
    assert gone() is None


def test_given_tensors_are_let_go() -> None:
    pool = make_kv()
    allocator = kvpool.TokenToKVPoolAllocator(64, "cpu")
    allocator.alloc(64)
    k, indices = torch.ones(2, 4, 16), torch.tensor([1, 2])
    gone = [weakref.ref(k), weakref.ref(indices)]
    pool.set_kv_buffer(0, indices, k, k)
    pool.gather_kv(0, indices, out=(k, torch.ones(2, 4, 16)))
    with allocator.free_group():
        allocator.free(indices)
    del k, indices
    assert [ref() for ref in gone] == [None, None]


def test_unused_capsules_give_their_memory_back(run_snippet: RunSnippet) -> None:
    run_snippet(
        """
        import gc, resource
        from pathlib import Path
        import kvpool

        def resident():
            gc.collect()
            return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

        def once():
            pool = kvpool.KVPool(16376, 1, 4, 16, "cpu", "float32")
            pool.set_kv_buffer(0, range(1, 16001), *pool.gather_kv(0, range(16000)))
            tensor = pool.k_buffer[0]
            tensor.__dlpack__()
            return tensor.__dlpack__(max_version=(1, 0))

        # The heap keeps what it was once given, so it is measured only after it has what it needs.
        for _ in range(30):
            once()
        if Path("/proc/self/statm").exists():
            before = resident()
            for _ in range(100):
                once()
            assert resident() - before < 64 << 20, resident() - before  # a leak would be 800 MiB and more
        capsules = [once() for _ in range(5)]
        del capsules[::2]
        """,
        hidden=["torch"],
    )


def test_capsule_outlives_tensor_and_pool(run_snippet: RunSnippet) -> None:
    run_snippet(
        """
        import gc
        import kvpool
        import numpy as np

        class Holder:
            def __init__(self, capsule):
                self.capsule = capsule
            def __dlpack__(self, **_):
                return self.capsule
            def __dlpack_device__(self):
                return (1, 0)

        pool = kvpool.KVPool(1016, 1, 4, 16, "cpu", "float32")
        pool.k_buffer[0].numpy()[:] = 3
        capsule = pool.k_buffer[0].__dlpack__(max_version=(1, 0))
        del pool
        gc.collect()
        others = [kvpool.KVPool(1016, 1, 4, 16, "cpu", "float32") for _ in range(4)]
        array = np.from_dlpack(Holder(capsule))
        del capsule
        gc.collect()
        assert (array == 3).all()
        """,
        hidden=["torch"],
    )


@needs_statm
def test_errors_keep_nothing() -> None:
    def once() -> None:
        pool = make_kv(1016)
        pool.k_buffer[0].fill_(1)
        for _ in range(5):
            with pytest.raises(kvpool.ConfigError):
                pool.set_kv_buffer(0, [1], torch.zeros(50_000), torch.zeros(1))
            with pytest.raises(IndexError):
                pool.gather_kv(0, [10**6])

    assert_steady(once, 16 * MIB, warm=4, turns=30)
