"""Pools that fit each other, made by one call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpool._kvpool import KVPool, ReqToTokenPool, TokenToKVPoolAllocator

if TYPE_CHECKING:
    from kvpool._typing import DeviceLike, DTypeLike


def make_full_attention_net_mem_pool(
    size: int,
    layer_num: int,
    k_head_num: int,
    k_head_dim: int,
    v_head_num: int,
    v_head_dim: int,
    device: DeviceLike = "cuda",
    dtype: DTypeLike = "float16",
    page_size: int = 1,
    need_sort: bool = True,
    pin_memory: bool = True,
) -> tuple[KVPool, TokenToKVPoolAllocator]:
    """Make the KV buffers and the slot allocator of a model with full attention in every layer.

    Every slot that the allocator hands out is a row of the buffers, also when paged. With `KVPOOL_DEBUG=1`
    rows are poisoned when their slots are freed (see `TokenToKVPoolAllocator.poison_freed`).

    Args:
        size: Usable token slots.
        layer_num: Layers.
        k_head_num: Heads of a key.
        k_head_dim: Elements of a key head.
        v_head_num: Heads of a value.
        v_head_dim: Elements of a value head.
        device: Where buffers and index tensors are.
        dtype: Of the buffers.
        page_size: Slots in a page.
        need_sort: Hand out the lowest free slots first.
        pin_memory: Page-lock host memory where a driver is present.

    Returns:
        A `KVPool` and its `TokenToKVPoolAllocator`.

    Raises:
        ConfigError: If a size is below 1, slots do not fit int32, or bytes overflow.
        TypeError: If `dtype` cannot be stored.
        OutOfMemoryError: If the memory cannot be had.
        BackendUnavailableError: If `device` cannot be used here.
    """
    allocator = TokenToKVPoolAllocator(size, device, page_size, need_sort)
    pool = KVPool(
        size,
        layer_num,
        k_head_num,
        k_head_dim,
        device,
        dtype,
        v_head_num,
        v_head_dim,
        pin_memory,
        page_size=page_size,
    )
    allocator.poison_freed(pool)
    return pool, allocator


def make_req_to_token_pool(
    max_reqs: int, max_context_len: int, device: DeviceLike = "cuda"
) -> ReqToTokenPool:
    """Make the table of every request's slots, with a padding row.

    Args:
        max_reqs: Requests that can be in it at once.
        max_context_len: Columns.
        device: Where the table is.

    Returns:
        A `ReqToTokenPool`.

    Raises:
        ConfigError: If a size is below 1 or its bytes overflow.
        OutOfMemoryError: If the memory cannot be had.
        BackendUnavailableError: If `device` cannot be used here.
    """
    return ReqToTokenPool(max_reqs, max_context_len, device)
