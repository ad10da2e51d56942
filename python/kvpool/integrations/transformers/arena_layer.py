"""The layers of an `ArenaCache`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import CacheLayerMixin, LinearAttentionLayer
from typing_extensions import override

from kvpool.errors import ArgumentError
from kvpool.integrations.transformers.arena_units import refuse_gradients

if TYPE_CHECKING:
    from kvpool.integrations.transformers.arena_units import Batch, Pages, States

__all__ = ["HybridLayer", "PagedLayer", "StateLayer"]


class PagedLayer(CacheLayerMixin):
    """A layer with attention. It returns what the layers of `DynamicCache` would."""

    is_croppable = False
    supports_early_init = False

    def __init__(self, batch: Batch, number: int, pages: Pages) -> None:
        super().__init__()
        self.is_initialized = True
        self.is_sliding = pages.group.tokens is not None
        self._batch, self._number, self._pages = batch, number, pages

    @override
    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: the arena has all memory already."""

    @override
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new keys and values to pages, and return those that attention reads."""
        keys, values = (
            torch.cat((self._append(plane, new.transpose(1, 2)).transpose(1, 2), new), dim=2)
            for plane, new in (("k", key_states), ("v", value_states))
        )
        return keys, values

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Write new index keys to pages, and return all of them."""
        return torch.cat((self._append("index_k", indexer_key_states), indexer_key_states), dim=1)

    def _append(self, plane: str, states: torch.Tensor) -> torch.Tensor:
        return self._batch.append(self._pages, (self._number, plane), states)

    @override
    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        kept = self._pages.kept(self.get_seq_length())
        return len(kept) + query_length, kept.start

    @override
    def get_seq_length(self) -> int:
        return self._pages.lengths[self._number, "k"]

    @override
    def get_max_length(self) -> int:
        return self._pages.group.tokens or -1

    @override
    def reset(self) -> None:
        """Do nothing: the cache frees the units of all layers."""


class StateLayer(LinearAttentionLayer):
    """A layer with a state in the arena; one of `transformers` that finds its tensors there."""

    is_compileable = False
    is_croppable = False

    def __init__(self, batch: Batch, number: int, states: States) -> None:
        LinearAttentionLayer.__init__(self)
        self._batch, self._number, self._states = batch, number, states
        self._copies: dict[str, torch.Tensor] = {}

    def resume(self) -> None:
        """Find the states that the sequences begin with."""
        for plane in self._states.group.planes:
            states = self._read(plane.name)
            self.dtype, self.device = states.dtype, states.device
            if plane.name == "conv":
                self.conv_states[0], self.conv_kernel_size[0] = states, states.shape[-1]
                self.is_conv_states_initialized[0] = True
            else:
                self.recurrent_states[0] = states
                self.is_recurrent_states_initialized[0] = True
        self.has_previous_state[0] = True

    def begin(self) -> None:
        """Take the units of a token before the layer changes its state, which it may do in place."""
        if self.has_previous_state[0]:
            self._extend(self._states.lengths[self._number], 1, self._batch.n)

    def _extend(self, length: int, new: int, n: int) -> None:
        self._batch.extend(n, length, new)
        self._states.lengths[self._number] = self._batch.length
        self._batch.late = self.store if self._copies else None

    @override
    def update_conv_state(
        self,
        conv_states: torch.Tensor,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        refuse_gradients(conv_states)
        # `begin` has moved the length of a layer with a state already.
        self._extend(self._batch.base, conv_states.shape[-1], len(conv_states))
        found: torch.Tensor = super().update_conv_state(conv_states, state_idx, conv_kernel_size, **kwargs)
        return found

    @override
    def lazy_initialization(
        self,
        conv_states: torch.Tensor | None = None,
        recurrent_states: torch.Tensor | None = None,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
    ) -> None:
        given = conv_states if conv_states is not None else recurrent_states
        assert given is not None  # noqa: S101 - one of them is
        self.dtype, self.device = given.dtype, given.device
        if conv_states is not None:
            self.conv_kernel_size[0] = conv_kernel_size or conv_states.shape[-1]
            self.conv_states[0] = self._read("conv")
            self.is_conv_states_initialized[0] = True
            own, shape = self.conv_states[0], (*given.shape[:-1], self.conv_kernel_size[0])
        else:
            self.recurrent_states[0] = self._read("recurrent")
            self.is_recurrent_states_initialized[0] = True
            own, shape = self.recurrent_states[0], (*given.shape,)
        if own.shape != shape:
            raise ArgumentError(
                f"layer {self._number} has a state of the shape {shape}, the cache {(*own.shape,)}: it is of "
                "another model"
            )

    def _read(self, plane: str) -> torch.Tensor:
        """Return the states of all sequences, and note whether they are a copy."""
        states, is_view = self._states.read(self._number, plane)
        if not is_view:
            self._copies[plane] = states
            self._batch.late = self.store
        return states

    def bind(self) -> None:
        """Find the states of all sequences again, after their units have changed."""
        self._copies = {}
        if self.is_conv_states_initialized[0]:
            self.conv_states[0] = self._read("conv")
        if self.is_recurrent_states_initialized[0]:
            self.recurrent_states[0] = self._read("recurrent")

    def store(self) -> None:
        """Copy the states back that are no views."""
        for plane, states in self._copies.items():
            self._states.buffers[self._number, plane][self._states.units_of(self._number)] = states
        self._batch.late = None

    @override
    def reset(self) -> None:
        """Forget the states, whose units the cache frees."""
        LinearAttentionLayer.__init__(self)
        self._copies = {}


class HybridLayer(StateLayer, PagedLayer):
    """A layer with attention and a state."""

    def __init__(self, batch: Batch, number: int, pages: Pages, states: States) -> None:
        PagedLayer.__init__(self, batch, number, pages)
        StateLayer.__init__(self, batch, number, states)
