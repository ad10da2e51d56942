"""The masks of a model: which keys a query attends to, where that is a window of the last tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers.masking_utils import sdpa_mask

from kvpool.errors import ConfigError
from kvpool.integrations.transformers.layout import name_of, refused

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel

    # Whether a query attends to a key, by the numbers of sequence, head, query and key.
    MaskFunction = Callable[..., torch.Tensor]

__all__ = ["Masks"]


class Masks:
    """The masks that a model asks for, and the windows of its layers.

    Args:
        model: The model.
        longest: The most tokens of a request: what a mask does later does not matter.
    """

    def __init__(self, model: PreTrainedModel, longest: int) -> None:
        self._model, self._longest = model, longest
        self._made: list[tuple[torch.Tensor, MaskFunction]] = []
        self._windows: dict[int, int | None] = {}  # by the place in `_made`

    def make(self, **options: Any) -> torch.Tensor | None:  # noqa: ANN401 - those of `sdpa_mask`
        """Make a mask as PyTorch's attention gets it, and never leave it out."""
        options |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        mask: torch.Tensor | None = sdpa_mask(**options)
        if mask is not None:
            self._made.append((mask, options["mask_function"]))
        return mask

    def window(self, layer: int, mask: torch.Tensor | None) -> int | None:
        """Return how many tokens a query of a layer attends to, itself included; None for all.

        Args:
            layer: The layer, to name it.
            mask: What its attention got.

        Raises:
            ConfigError: If the mask is not that of a causal model, with a window or without.
        """
        if mask is None:
            return None
        for place, (made, function) in enumerate(self._made):
            # A part of a mask that begins where the mask does, with all keys, is the mask.
            if mask.dtype is made.dtype and mask.data_ptr() == made.data_ptr() and mask.shape == made.shape:
                if place not in self._windows:
                    self._windows[place] = self._window(layer, function)
                return self._windows[place]
        raise ConfigError(
            f"{name_of(self._model)}: layer {layer} attends with a mask that it computes by itself, "
            "which is not supported"
        )

    def _window(self, layer: int, function: MaskFunction) -> int | None:
        keys = torch.arange(self._longest, device=self._model.device)
        first = torch.zeros((), dtype=torch.int64, device=self._model.device)

        def attended(query: int) -> torch.Tensor:
            with refused(self._model):
                return function(first, first, first + query, keys).expand(self._longest)

        window = int(attended(self._longest - 1).sum())
        if not all(
            torch.equal(attended(query), (keys <= query) & (keys > query - window))
            for query in _queries(self._longest)
        ):
            raise ConfigError(
                f"{name_of(self._model)}: layer {layer} has a mask that is not that of a causal model, with "
                "a window of the last tokens or without (it attends in chunks, say, or to later tokens), "
                "which is not supported"
            )
        return None if window == self._longest else window


def _queries(longest: int) -> list[int]:
    """Return positions at which a mask is read, ascending: the first ones, around powers of two, the last."""
    near = {2**power + step for power in range(longest.bit_length()) for step in (-1, 0, 1)}
    return sorted(position for position in {*range(64), *near, longest - 1} if 0 <= position < longest)
