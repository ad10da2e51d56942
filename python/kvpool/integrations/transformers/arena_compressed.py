"""A layer that attends to a window and to compressed entries, each of several tokens: DeepSeek V4's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from typing_extensions import override

from kvpool.integrations.transformers.arena_layer import PagedLayer

if TYPE_CHECKING:
    from kvpool.integrations.transformers.arena_units import Batch, Pages, States

__all__ = ["CompressedLayer"]


class CompressedLayer(PagedLayer):
    """A layer of `DeepseekV4HCACache` or `DeepseekV4CSACache`, with what they keep in the arena.

    Keys are values. Each compressor has a name, under which it has entries, tokens that wait until an entry
    is full, and a part of the last entry's tokens that the next entry needs.
    """

    def __init__(self, batch: Batch, number: int, pages: Pages, chain: Pages, ring: States) -> None:
        super().__init__(batch, number, pages)
        self._chain, self._ring = chain, ring
        self._rate = chain.group.stride

    @override
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new keys to pages, and return those that attention reads, twice."""
        keys = torch.cat((self._append("k", key_states.transpose(1, 2)).transpose(1, 2), key_states), dim=2)
        return keys, keys

    def store_compression_weights(
        self, name: str, kv: torch.Tensor, gate: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Return tokens and weights of whole entries, and the position of the first; keep the others."""
        before = self._batch.base
        ready = []
        for of, states in (("kv", kv), ("gate", gate)):
            waiting = self._of(f"{name}_{of}")[:, : before % self._rate]
            together = torch.cat((waiting, states), dim=1)
            usable = together.shape[1] // self._rate * self._rate
            self._write(f"{name}_{of}", together[:, usable:])
            ready.append(together[:, :usable])
        self._ring.lengths[self._number] = self._batch.length
        return ready[0], ready[1], before // self._rate * self._rate

    def update_compressor_states(self, name: str, compressed: torch.Tensor) -> torch.Tensor:
        """Write new entries to pages, and return all of them."""
        kept = self._chain.append((self._number, name), compressed, self._batch.length)
        return torch.cat((kept, compressed), dim=1)

    def update_overlap_state(
        self, name: str, chunk_kv: torch.Tensor, chunk_gate: torch.Tensor, head_dim: int
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Keep what the next entry needs of the last one's tokens; return what was kept before, if any."""
        is_first = self._batch.base < self._rate
        prior = None if is_first else (self._of(f"{name}_overlap_kv"), self._of(f"{name}_overlap_gate"))
        self._write(f"{name}_overlap_kv", chunk_kv[:, -1, :, :head_dim])
        self._write(f"{name}_overlap_gate", chunk_gate[:, -1, :, :head_dim])
        return prior or (None, None)

    def _of(self, plane: str) -> torch.Tensor:
        """Return a copy of what is kept in a plane of all sequences."""
        return self._ring.buffers[self._number, plane][self._ring.units_of(self._number)]

    def _write(self, plane: str, states: torch.Tensor) -> None:
        """Write the first tokens of a plane of all sequences."""
        units = torch.tensor(self._ring.units_of(self._number), device=states.device)
        self._ring.buffers[self._number, plane][units, : states.shape[1]] = states
