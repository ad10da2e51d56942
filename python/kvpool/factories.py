"""Factories that create matching pools in one call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpool._kvpool import KVPool, ReqToTokenPool, TokenToKVPoolAllocator

if TYPE_CHECKING:
    from kvpool.typing import DeviceLike, DTypeLike


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

    Every slot of the allocator is a row of the buffers, with and without pages. With `KVPOOL_DEBUG=1`, rows
    are poisoned when their slots are freed (see `TokenToKVPoolAllocator.poison_freed`).

    Args:
        size: Usable token slots.
        layer_num: Layers.
        k_head_num: Heads of a key.
        k_head_dim: Elements of a key head.
        v_head_num: Heads of a value.
        v_head_dim: Elements of a value head.
        device: Device of buffers and index tensors.
        dtype: Data type of the buffers.
        page_size: Slots in a page.
        need_sort: Hand out the lowest free slots first.
        pin_memory: Page-lock host memory where a driver is present.

    Returns:
        A `KVPool` and its `TokenToKVPoolAllocator`.

    Raises:
        ConfigError: If a size is below 1, slots do not fit int32, or bytes overflow.
        TypeError: If `dtype` cannot be stored.
        OutOfMemoryError: If there is not enough memory.
        BackendUnavailableError: If `device` cannot be used on this machine.
    """
    allocator = TokenToKVPoolAllocator(size, device, page_size=page_size, need_sort=need_sort)
    pool = KVPool(
        size,
        layer_num,
        k_head_num,
        k_head_dim,
        device=device,
        dtype=dtype,
        v_head_num=v_head_num,
        v_head_dim=v_head_dim,
        pin_memory=pin_memory,
        page_size=page_size,
    )
    allocator.poison_freed(pool)
    return pool, allocator


def make_req_to_token_pool(
    max_reqs: int, max_context_len: int, device: DeviceLike = "cuda"
) -> ReqToTokenPool:
    """Make the table of every request's slots, with a padding row.

    Args:
        max_reqs: The most requests at once.
        max_context_len: Columns.
        device: Device of the table.

    Returns:
        A `ReqToTokenPool`.

    Raises:
        ConfigError: If a size is below 1 or its bytes overflow.
        OutOfMemoryError: If there is not enough memory.
        BackendUnavailableError: If `device` cannot be used on this machine.
    """
    return ReqToTokenPool(max_reqs, max_context_len, device)
