"""The bytes of pools of given shapes, without creating them.

Every region on the device is counted, transfer buffers included.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from kvpool._kvpool import _STORAGE_DTYPES, _footprint

if TYPE_CHECKING:
    from kvpool.models.model import KvLayers, States

_FLOAT32_BYTES = 4


@dataclass(frozen=True)
class Shapes:
    """Shapes of the pools of one GPU.

    Attributes:
        kv: Attention layers by shape, one `KVPool` each.
        dtype: Data type of keys and values.
        states: Layers with states, in a `GDNPool`; None without.
        conv_dtype: Data type of the convolution states.
        page_size: Slots in a page.
        max_context_len: Columns of the request table.
        step_tokens: The most new tokens in a step of the planner; at least the requests.
        host_tier: Whether there is a `HostTier` below, which copies through a staging area on a GPU.
        device: Device of the pools. On a GPU they need transfer buffers.
    """

    kv: tuple[KvLayers, ...]
    dtype: str
    states: States | None
    conv_dtype: str
    page_size: int
    max_context_len: int
    step_tokens: int
    host_tier: bool
    device: str

    @property
    def context_pages(self) -> int:
        """Pages of a request of `max_context_len` tokens."""
        return -(-self.max_context_len // self.page_size)

    @property
    def token_bytes(self) -> int:
        """Bytes of keys and values of a token in all layers."""
        return sum(sum(row_bytes(group, self.dtype)) * len(group.layers) for group in self.kv)

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
        return len(self.states.layers) * self.states.conv_dim * taps * _STORAGE_DTYPES[self.conv_dtype]


@dataclass(frozen=True)
class Footprint:
    """Bytes of each pool on the device, or in host memory without one.

    Attributes:
        kv_bytes: `KVPool`s.
        states_bytes: The `GDNPool`.
        table_bytes: The `ReqToTokenPool`.
        allocator_bytes: The `TokenToKVPoolAllocator`: its stage.
        planner_bytes: The `BatchPlanner`: the fields of a plan.
        staging_bytes: The staging area of a `HostTier`, unless that is smaller than half of it.
        transfer_bytes: Transfer buffers of all pools, for numbers from the host.
    """

    kv_bytes: int
    states_bytes: int
    table_bytes: int
    allocator_bytes: int
    planner_bytes: int
    staging_bytes: int
    transfer_bytes: int

    @property
    def total_bytes(self) -> int:
        """Bytes of all pools."""
        return sum(getattr(self, field.name) for field in fields(self))


def row_bytes(group: KvLayers, dtype: str) -> tuple[int, int]:
    """Return the bytes of a row of K and of V in one layer."""
    item_bytes = _STORAGE_DTYPES[dtype]
    return (
        group.k_head_num * group.k_head_dim * item_bytes,
        group.v_head_num * group.v_head_dim * item_bytes,
    )


def footprint(shapes: Shapes, size: int, max_reqs: int) -> Footprint:
    """Return the bytes of all pools.

    Args:
        shapes: Shapes of the pools.
        size: Token slots, a multiple of the page size.
        max_reqs: The most requests at once.

    Raises:
        ConfigError: If no pool can be that large.
    """
    return Footprint(**_footprint(shapes, size, max_reqs))
