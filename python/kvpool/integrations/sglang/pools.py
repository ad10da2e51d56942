"""Classes that stand in for SGLang's pools, each over a pool of kvpool.

The classes have no bookkeeping: SGLang's calls go to the methods of kvpool's pools, most of them without a
function in between. All other methods are inherited from SGLang's classes.
"""

from __future__ import annotations

import logging
import os
import pkgutil
from abc import ABCMeta
from typing import TYPE_CHECKING

import torch
from sglang.srt.mem_cache import memory_pool
from sglang.srt.mem_cache.allocator import mamba, paged, token
from typing_extensions import override

from kvpool._kvpool import KVPool, ReqToTokenPool, TokenToKVPoolAllocator
from kvpool.integrations.sglang.seams import EngineMismatchError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["REPLACEMENTS", "check_replaced"]

_logger = logging.getLogger("kvpool")


class _StandIn(ABCMeta):
    """The type of a class that stands in for `replaced`, a class of SGLang.

    Instances and subclasses of the original count as those of the stand-in, since SGLang checks for them with
    a name that now means the stand-in, and has derived classes before. The check is the one of `type`: the
    check of an abstract base class would ask every subclass of the original, and so the stand-in again.
    """

    @override
    def __instancecheck__(cls, instance: object) -> bool:
        replaced = cls.__dict__.get("replaced")
        return type.__instancecheck__(replaced, instance) if replaced else super().__instancecheck__(instance)

    @override
    def __subclasscheck__(cls, subclass: type) -> bool:
        replaced = cls.__dict__.get("replaced")
        return type.__subclasscheck__(replaced, subclass) if replaced else super().__subclasscheck__(subclass)

    def __call__(cls, *args: object, **options: object) -> object:
        """Return an instance, or one of the original class if memory has to come from PyTorch.

        Log the choice.
        """
        replaced: type | None = cls.__dict__.get("replaced")
        if replaced is None:
            return super().__call__(*args, **options)
        if options.get("enable_memory_saver") and not issubclass(cls, _KvBuffers):
            _logger.info("SGLang: %s stays its own, because of enable_memory_saver", replaced.__name__)
            return replaced(*args, **options)
        made = super().__call__(*args, **options)
        _logger.info("SGLang: %s is kvpool's", replaced.__name__)
        return made


def _to_pool(name: str) -> Callable[..., object]:
    """Return a method that calls method `name` of the pool."""

    def method(self: _Slots, *args: object, **options: object) -> object:
        call: Callable[..., object] = getattr(self._pool, name)
        return call(*args, **options)

    return method


# The calls of SGLang's allocators, and the methods of kvpool's.
_SLOT_CALLS = {
    "alloc": "alloc",
    "available_size": "available_size",
    "free": "free",
    "free_group_begin": "free_group_begin",
    "free_group_end": "free_group_end",
    "free_page_ids": "free_pages",
    "free_segment": "free_segment",
    "free_segments": "free_segments",
    "merge_and_sort_free": "merge_and_sort_free",
}


class _Slots:
    """An allocator of SGLang over one of kvpool, which is made by the first `clear`."""

    size: int
    page_size: int = 1
    need_sort: bool = False
    device: str
    _pool: TokenToKVPoolAllocator

    def clear(self) -> None:
        """Free every slot. `size` may have changed."""
        pool: TokenToKVPoolAllocator | None = getattr(self, "_pool", None)
        if pool is not None:
            if self.size != pool.size:
                pool.resize(self.size)
            pool.clear()
            return
        strict = os.environ.get("KVPOOL_SGLANG_STRICT") == "1"
        self._pool = TokenToKVPoolAllocator(
            self.size, self.device, self.page_size, self.need_sort, strict=strict, index_dtype="int64"
        )
        # Calls go to the pool at once, unless a subclass or another plugin has a method of its own.
        for call, method in _SLOT_CALLS.items():
            if getattr(type(self), call) is getattr(_Slots, call):
                setattr(self, call, getattr(self._pool, method))

    def get_all_free_pages(self) -> torch.Tensor:
        """Return the free pages in no order, for SGLang's checks."""
        return torch.cat((self._pool.free_slots, self._pool.release_slots))


for _call, _method in _SLOT_CALLS.items():
    setattr(_Slots, _call, _to_pool(_method))


class _TokenSlots(_Slots, token.TokenToKVPoolAllocator, metaclass=_StandIn):  # type: ignore[misc]
    """Token slots."""

    replaced = token.TokenToKVPoolAllocator


class _PagedSlots(_Slots, paged.PagedTokenToKVPoolAllocator, metaclass=_StandIn):  # type: ignore[misc]
    """Token slots in pages."""

    replaced = paged.PagedTokenToKVPoolAllocator

    @override
    def alloc_extend(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
        num_new_pages: int | None = None,
    ) -> torch.Tensor | None:
        """Take the slots of a prefill. The lengths are read from the host."""
        return self._pool.alloc_extend(prefix_lens_cpu, seq_lens_cpu, last_loc)

    @override
    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
    ) -> torch.Tensor | None:
        """Take one slot for each request. The lengths on the host determine where pages begin."""
        return self._pool.alloc_decode(seq_lens_cpu, last_loc)


class _StateSlots(_Slots, mamba.MambaSlotAllocator, metaclass=_StandIn):  # type: ignore[misc]
    """Slots of linear-attention states, with groups that reserve slots for the requests of an admission."""

    replaced = mamba.MambaSlotAllocator
    # The slots of the group that were not handed out.
    _reserved: torch.Tensor | None = None

    @override
    def alloc_group_begin(self, num_reqs: int) -> None:
        """Reserve a slot for each request; none if there are not enough, or no requests."""
        self.alloc_group_end()
        self._reserved = self._pool.alloc(num_reqs) if num_reqs > 0 else None
        if self._reserved is not None:
            self.__dict__.pop("alloc", None)

    @override
    def alloc_group_end(self) -> None:
        """Give back the reserved slots that were not handed out."""
        reserved, self._reserved = self._reserved, None
        if reserved is not None:
            self._alloc_at_once()
            if len(reserved):
                self._pool.free(reserved)

    @override
    def alloc(self, need_size: int) -> torch.Tensor | None:
        """Take slots: a single one from the group, as long as it has some."""
        reserved = self._reserved
        if reserved is None or need_size != 1 or not len(reserved):
            return self._pool.alloc(need_size)
        self._reserved = reserved[1:]
        return reserved[:1]

    def _alloc_at_once(self) -> None:
        """Without a group, take slots of the pool at once, unless another plugin has a method of its own."""
        if type(self).alloc is _StateSlots.alloc:
            setattr(self, "alloc", self._pool.alloc)  # noqa: B010 - it is a method of the class

    @override
    def clear(self) -> None:
        """Free every slot, reserved ones too."""
        self._reserved = None
        super().clear()
        self._alloc_at_once()

    @property
    def free_slots(self) -> torch.Tensor:
        """The free slots, for SGLang's checks."""
        return self.get_all_free_pages()


class _FreeRows:
    """The free rows, for SGLang's code that reads the length of a list of them."""

    def __init__(self, pool: ReqToTokenPool) -> None:
        self._pool = pool

    def __len__(self) -> int:
        return self._pool.available_size()


class _Rows(memory_pool.ReqToTokenPool, metaclass=_StandIn):  # type: ignore[misc]
    """Request rows, in a table that SGLang's kernels write."""

    replaced = memory_pool.ReqToTokenPool
    _pool: ReqToTokenPool | None = None

    @override
    def __init__(
        self,
        size: int,
        max_context_len: int,
        device: str,
        enable_memory_saver: bool,
    ) -> None:
        strict = os.environ.get("KVPOOL_SGLANG_STRICT") == "1"
        pool = ReqToTokenPool(
            size, max_context_len, device, strict=strict, zero_rows=False, foreign_writes=True
        )
        self._pool = pool
        self.size = size
        self._alloc_size = size + 1
        self.max_context_len = max_context_len
        self.device = device
        self.req_to_token = pool.req_to_token
        self.req_generation = pool.generation
        self.free_slots = _FreeRows(pool)
        self._aux_cache = None
        if getattr(type(self), "available_size", None) is _Rows.replaced.available_size:
            setattr(self, "available_size", pool.available_size)  # noqa: B010 - it is a method of the class

    @override
    def alloc_rows(self, need_size: int) -> list[int] | None:
        """Take rows, and pass them to SGLang's hook."""
        rows: list[int] | None
        if self._pool is None:
            rows = super().alloc_rows(need_size)  # a subclass with a constructor of its own
            return rows
        rows = self._pool.alloc(need_size)
        if rows and self._on_alloc_rows is not None:
            self._on_alloc_rows(rows)
        return rows

    @override
    def free_rows(self, indices: list[int]) -> None:
        """Free rows, and the values that SGLang keeps for them."""
        if self._pool is None:
            super().free_rows(indices)
            return
        if self._aux_cache is not None:
            for index in indices:
                self._aux_cache.free(index)
        self._pool.free(indices)

    @override
    def clear(self) -> None:
        """Free every row, and keep counting generations."""
        if self._pool is None:
            super().clear()
            return
        self._pool.clear()
        if self._aux_cache is not None:
            self._aux_cache.clear()


class _HybridRows(memory_pool.HybridReqToTokenPool, _Rows, metaclass=_StandIn):  # type: ignore[misc]
    """Request rows of a model with linear attention: SGLang's class, with kvpool's rows below it."""

    replaced = memory_pool.HybridReqToTokenPool


class _KvBuffers(memory_pool.MHATokenToKVPool, metaclass=_StandIn):  # type: ignore[misc]
    """Buffers of K and V in one region."""

    replaced = memory_pool.MHATokenToKVPool

    @override
    def _create_buffers_normal(self) -> None:
        why = self._why_not()
        if why:
            _logger.info("SGLang: the buffers of K and V stay its own: %s", why)
            super()._create_buffers_normal()
            return
        k_shape, v_shape = self._kv_buffer_shapes()
        rows, head_num, k_dim = k_shape
        self.kvpool = KVPool(
            rows - self.page_size,
            self.layer_num,
            head_num,
            k_dim,
            self.device,
            self.store_dtype,
            v_head_dim=v_shape[-1],
            page_size=self.page_size,
            layout="fused" if k_shape == v_shape else "split",
            pin_memory=False,
        )
        self.k_buffer = [buffer[:rows] for buffer in self.kvpool.k_buffer]
        self.v_buffer = [buffer[:rows] for buffer in self.kvpool.v_buffer]

    def _why_not(self) -> str:
        """Return the reason why SGLang has to make the buffers; empty if kvpool can."""
        if self.memory_saver_adapter.enabled or self.enable_custom_mem_pool:
            return "memory has to come from PyTorch"
        if self.kv_cache_layout != "nhd":
            return f"layout {self.kv_cache_layout}"
        return ""


REPLACEMENTS: dict[str, type] = {
    f"{stand_in.replaced.__module__}.{stand_in.replaced.__name__}": stand_in
    for stand_in in (_TokenSlots, _PagedSlots, _StateSlots, _Rows, _HybridRows, _KvBuffers)
}
"""The stand-ins, by the classes that they replace."""


def check_replaced(*_: object, **__: object) -> None:
    """Check the stand-ins, before SGLang's scheduler is made, when hooks of every plugin are in place.

    Raises:
        EngineMismatchError: If a stand-in is not in its place. SGLang only logs a hook that it could not
            apply, and uses the last of two replacements.
    """
    missing = [
        f"{target} is {found!r}"
        for target, stand_in in REPLACEMENTS.items()
        if (found := pkgutil.resolve_name(target)) is not stand_in
    ]
    if missing:
        raise EngineMismatchError(
            f"SGLang was to run on kvpool's pools, but {', '.join(missing)}: "
            "another plugin replaces or wraps it, or SGLang's log says what failed"
        )
