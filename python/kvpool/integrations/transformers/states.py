"""The caches of `transformers` that a model gets when its keys, values and states are in pools."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from transformers.cache_utils import Cache
from typing_extensions import override

if TYPE_CHECKING:
    from kvpool._kvpool import GDNPool

__all__ = ["LengthCache", "StateCache"]


class LengthCache(Cache):
    """A cache that keeps nothing, since attention writes to a pool, and knows its length.

    Attributes:
        is_asked: Whether the model asked for the length; masks ask for sizes and offsets.
    """

    def __init__(self, length: int = 0) -> None:
        super().__init__(layers=[])
        self.is_asked = False
        self._length = length

    @override
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: object, **_options: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return key_states, value_states

    @override
    def get_seq_length(self, layer_idx: int = 0) -> int:
        self.is_asked = True
        return self._length

    @override
    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self._length

    @override
    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self._length + query_length, 0


class StateCache(LengthCache):
    """The states of the requests in a rectangular batch, stored in a `GDNPool`.

    A layer gets copies, works on them, and passes them back at its end. Its recurrent states are
    `[n, heads, k_dim, v_dim]`; those of the pool have V before K. There always is a previous state, since
    zeros are equivalent to none.
    """

    def __init__(self, pool: GDNPool, layers: dict[int, int], rows: torch.Tensor, length: int = 0) -> None:
        super().__init__(length)
        self._pool, self._layers, self._rows = pool, layers, rows
        # The state of the running layer, which may write to it.
        self._conv_state = torch.empty(0)

    @override
    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return True

    @override
    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    @override
    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor:
        _, conv_state = self._pool.get_layer_state(self._layers[layer_idx])
        self._conv_state = conv_state[self._rows]
        return self._conv_state

    @override
    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: object
    ) -> torch.Tensor:
        # The first new inputs need the last old ones, whose outputs the layer drops.
        inputs = torch.cat((self.get_conv_state(layer_idx), conv_states), dim=-1)
        self._conv_state = inputs[..., -self._conv_state.shape[-1] :]
        return inputs

    @override
    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor:
        recurrent_state, _ = self._pool.get_layer_state(self._layers[layer_idx])
        states: torch.Tensor = recurrent_state[self._rows]
        return states.transpose(-1, -2)

    @override
    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: object
    ) -> torch.Tensor:
        recurrent_state, conv_state = self._pool.get_layer_state(self._layers[layer_idx])
        recurrent_state[self._rows] = recurrent_states.transpose(-1, -2).to(recurrent_state.dtype)
        conv_state[self._rows] = self._conv_state.to(conv_state.dtype)
        return recurrent_states
