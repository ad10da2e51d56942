"""The bytes of pools of given shapes, without creating them.

The arithmetic is that of the pools (`src/pool`); tests compare both on the CPU and on the software driver.
Every region on the device is counted, transfer buffers included.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvpool.tools.plan.model import KvLayers, States

_ALIGNMENT = 256
_INT32_BYTES, _INT64_BYTES, _FLOAT32_BYTES = 4, 8, 4

_ROW_MULTIPLE = 8
_MOST_AHEAD = 64 << 10  # slots that the allocator's stage predicts
_POOL_RING_ROW_BYTES, _POOL_RING_LEAST_BYTES = 16, 64 << 10
_TABLE_RING_ROW_BYTES, _TABLE_RING_LEAST_BYTES = 48, 1 << 20
_PLAN_NUMBERS, _PLAN_SPARE_BYTES, _PLAN_STEPS_AHEAD = 9, 64, 8


@dataclass(frozen=True)
class Shapes:
    """Shapes of the pools of one GPU.

    Attributes:
        kv: Attention layers by shape, one `KVPool` each.
        kv_item_bytes: Bytes of an element of keys and values.
        states: Layers with states, in a `GDNPool`; None without.
        conv_item_bytes: Bytes of an element of the convolution states.
        page_size: Slots in a page.
        max_context_len: Columns of the request table.
        step_tokens: The most new tokens in a step of the planner; at least the requests.
        on_gpu: Whether the pools are on a GPU, where they need transfer buffers.
    """

    kv: tuple[KvLayers, ...]
    kv_item_bytes: int
    states: States | None
    conv_item_bytes: int
    page_size: int
    max_context_len: int
    step_tokens: int
    on_gpu: bool

    @property
    def context_pages(self) -> int:
        """Pages of a request of `max_context_len` tokens."""
        return -(-self.max_context_len // self.page_size)

    @property
    def token_bytes(self) -> int:
        """Bytes of keys and values of a token in all layers."""
        return sum(sum(row_bytes(group, self.kv_item_bytes)) * len(group.layers) for group in self.kv)

    @property
    def recurrent_bytes(self) -> int:
        """Bytes of the recurrent states of a request, which are float32, in all layers."""
        if self.states is None:
            return 0
        states = self.states
        return len(states.layers) * states.head_num * states.head_v_dim * states.head_k_dim * _FLOAT32_BYTES

    @property
    def conv_bytes(self) -> int:
        """Bytes of the convolution states of a request in all layers."""
        if self.states is None:
            return 0
        taps = self.states.conv_kernel_size - 1
        return len(self.states.layers) * self.states.conv_dim * taps * self.conv_item_bytes


@dataclass(frozen=True)
class Footprint:
    """Bytes of each pool on the device, or in host memory without one.

    Attributes:
        kv_bytes: `KVPool`s.
        states_bytes: The `GDNPool`.
        table_bytes: The `ReqToTokenPool`.
        allocator_bytes: The `TokenToKVPoolAllocator`: its stage.
        planner_bytes: The `BatchPlanner`: the fields of a plan.
        transfer_bytes: Transfer buffers of all pools, for numbers from the host.
    """

    kv_bytes: int
    states_bytes: int
    table_bytes: int
    allocator_bytes: int
    planner_bytes: int
    transfer_bytes: int

    @property
    def total_bytes(self) -> int:
        """Bytes of all pools."""
        return sum(getattr(self, field.name) for field in fields(self))


def row_bytes(group: KvLayers, item_bytes: int) -> tuple[int, int]:
    """Bytes of a row of K and of V in one layer."""
    return (
        group.k_head_num * group.k_head_dim * item_bytes,
        group.v_head_num * group.v_head_dim * item_bytes,
    )


def kv_rows(size: int, page_size: int) -> int:
    """Rows of each buffer of a `KVPool`."""
    return _up(size + page_size, _ROW_MULTIPLE)


def footprint(shapes: Shapes, size: int, max_reqs: int) -> Footprint:
    """Bytes of all pools.

    Args:
        shapes: Shapes of the pools.
        size: Token slots, a multiple of the page size.
        max_reqs: The most requests at once.
    """
    rows = kv_rows(size, shapes.page_size)
    kv_bytes = sum(
        len(group.layers) * sum(_up(rows * part) for part in row_bytes(group, shapes.kv_item_bytes))
        for group in shapes.kv
    )
    slots = max_reqs + 1
    states_bytes = 0
    if shapes.states is not None:
        states_bytes = _up(slots * shapes.recurrent_bytes) + slots * shapes.conv_bytes
    plan_bytes = _plan_bytes(shapes, max_reqs)
    table_bytes = slots * shapes.max_context_len * _INT32_BYTES
    if not shapes.on_gpu:
        return Footprint(kv_bytes, states_bytes, table_bytes, 0, plan_bytes, 0)
    rings = [max(rows * _POOL_RING_ROW_BYTES, _POOL_RING_LEAST_BYTES)] * len(shapes.kv)
    if shapes.states is not None:
        rings.append(max(slots * _POOL_RING_ROW_BYTES, _POOL_RING_LEAST_BYTES))
    widest = max(slots, shapes.max_context_len)
    rings.append(max(widest * _TABLE_RING_ROW_BYTES, _TABLE_RING_LEAST_BYTES))
    rings.append(_plan_ring_bytes(shapes, size, max_reqs))
    stage_bytes = (2 * size + 2 * _MOST_AHEAD) * _INT32_BYTES
    return Footprint(
        kv_bytes, states_bytes, table_bytes, stage_bytes, plan_bytes, sum(_up(ring) for ring in rings)
    )


def _plan_bytes(shapes: Shapes, max_reqs: int) -> int:
    """The fields of a plan, each at a multiple of the alignment."""
    tokens, pages = _step_tokens(shapes, max_reqs), max_reqs * shapes.context_pages
    return (
        2 * _up(tokens * _INT32_BYTES)  # out_cache_loc, positions
        + _up(tokens * _INT64_BYTES)  # slot_mapping
        + 3 * _up(max_reqs * _INT32_BYTES)  # req_pool_indices, seq_lens, kv_last_page_len
        + 2 * _up((max_reqs + 1) * _INT32_BYTES)  # qo_indptr, kv_indptr
        + 2 * _up(pages * _INT32_BYTES)  # kv_indices, block_table
    )


def _plan_ring_bytes(shapes: Shapes, size: int, max_reqs: int) -> int:
    new_pages = _step_tokens(shapes, max_reqs) + 2 * max_reqs
    most_pages = new_pages + min(max_reqs * shapes.context_pages, size // shapes.page_size)

    def batch_bytes(pages: int) -> int:
        return (max_reqs * _PLAN_NUMBERS + pages) * _INT32_BYTES + _PLAN_SPARE_BYTES

    return max(batch_bytes(new_pages) * _PLAN_STEPS_AHEAD, batch_bytes(most_pages) * 2)


def _step_tokens(shapes: Shapes, max_reqs: int) -> int:
    # A step in which every request decodes one token must fit.
    return max(shapes.step_tokens, max_reqs)


def _up(number: int, multiple: int = _ALIGNMENT) -> int:
    return -(-number // multiple) * multiple
