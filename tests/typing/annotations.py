"""Types that are what they say, where PyTorch's are known. Checked by mypy; nothing runs it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from typing_extensions import assert_type, override

import kvpool
from kvpool import Nope  # type: ignore[attr-defined]  # a name that is not there

if TYPE_CHECKING:
    from typing import SupportsIndex

    from kvpool.typing import Policy


def results(allocator: kvpool.TokenToKVPoolAllocator, kv: kvpool.KVPool, plan: kvpool.BatchPlan) -> None:
    assert_type(allocator.alloc(4), torch.Tensor | None)
    assert_type(kv.get_kv_buffer(0), tuple[torch.Tensor, torch.Tensor])
    assert_type(plan.out_cache_loc, torch.Tensor)
    assert_type(plan.block_table, torch.Tensor | None)


def indices(allocator: kvpool.TokenToKVPoolAllocator, own: kvpool.Tensor) -> None:
    for slots in ([1, 2], (1, 2), range(2), np.arange(2), torch.arange(2), own, np.arange(2).tolist()):
        allocator.free(slots)
    allocator.free([1.5])  # type: ignore[list-item]
    allocator.free({1, 2})  # type: ignore[arg-type]
    allocator.free(3)
    allocator.free(1.5)  # type: ignore[arg-type]
    allocator.used_on("no tensor")  # type: ignore[arg-type]


def dtypes_and_devices() -> None:
    kvpool.KVPool(8, 1, 1, 4, "cpu", "bfloat16")
    kvpool.KVPool(8, 1, 1, 4, torch.device("cpu"), torch.bfloat16)
    kvpool.KVPool(8, 1, 1, 4, dtype=np.float16)
    kvpool.KVPool(8, 1, 1, 4, dtype=np.dtype("float16"))
    kvpool.KVPool(8, 1, 1, 4, 0)  # type: ignore[arg-type]
    kvpool.KVPool(8, 1, 1, 4, dtype=16)  # type: ignore[arg-type]


def names(kv: kvpool.KVPool, allocator: kvpool.TokenToKVPoolAllocator, policy: Policy) -> None:
    """A name that no call takes is an error before the program runs."""
    kvpool.nope()  # type: ignore[attr-defined]
    kvpool.PrefixCache(allocator, policy=policy)
    kvpool.PrefixCache(allocator, policy="best")  # type: ignore[arg-type]
    kvpool.HostTier(kv, 64, write="twice")  # type: ignore[arg-type]
    kvpool.BufferPool("cpu", rounding="up")  # type: ignore[arg-type]
    kvpool.KVPool(8, 1, 1, 4, "cpu", layout="split")
    allocator.alloc(4, contiguous="worst_fit")  # type: ignore[arg-type]
    print(kvpool.metrics.register, kvpool.attention.PoolAttention, Nope)


def places(table: kvpool.ReqToTokenPool) -> None:
    table.write((1, slice(0, 2)), [5, 6])
    table.write((1, 2), 7)
    table.write((torch.tensor([1]), torch.tensor([2])), torch.tensor([7]))
    table.write((1, "2"), 7)  # type: ignore[arg-type]
    table.write((1, 2, 3), 7)  # type: ignore[arg-type]


class Counted(kvpool.TokenToKVPoolAllocator):
    """Pools that engines derive from can be base classes; others are final."""

    calls = 0

    @override
    def alloc(
        self,
        need_size: SupportsIndex,
        *,
        contiguous: bool | str = False,
        owner: str | int | None = None,
    ) -> torch.Tensor | None:
        self.calls += 1
        return super().alloc(need_size, owner=owner)


class Pages(kvpool.PagePool):  # type: ignore[misc]
    """Final."""
