"""The cache of a model's own `generate()`, over a `CacheArena`."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import Cache, DynamicCache
from typing_extensions import Self, override

from kvpool._closing import Closing
from kvpool._kvpool import CacheArena
from kvpool.errors import ArgumentError, ConfigError
from kvpool.integrations.transformers import seams
from kvpool.integrations.transformers.arena_compressed import CompressedLayer
from kvpool.integrations.transformers.arena_layer import HybridLayer, PagedLayer, StateLayer
from kvpool.integrations.transformers.arena_layout import kept_layout
from kvpool.integrations.transformers.arena_units import Batch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvpool.typing import DeviceLike

__all__ = ["ArenaCache"]


class ArenaCache(Cache, Closing):
    """Everything that a model keeps for a batch, in one arena, for `model.generate(cache=...)`.

    Before `transformers` 5.24 the argument `cache` of `generate` is named `past_key_values`.

    The cache supports greedy search, sampling, beam search, several return sequences, prompts in chunks, and
    padding on the left, with the model's own attention. To continue where a call ended, pass the cache again.
    It takes no tokens back: there are no assistants and no prompt lookup.

    Attention gets what `DynamicCache` would return. It is gathered from pages, so it is a copy, which each
    layer makes and drops. Pages behind a window are freed at the end of each forward pass, and of a prompt
    only what is still needed afterwards is written. Layers that attend in chunks keep a window of a chunk's
    tokens. States are views of the arena, written in place, where the units of the sequences are equally far
    apart: for one sequence and for two, always. Elsewhere a layer's states are copied, and copied back when
    the cache is called next. Beams share no pages.

    All units are given back when the cache is closed, reset, or dropped. After a failed call of `generate`,
    the cache has the tokens computed before: call `reset`. Use a cache from one thread at a time; caches of
    one arena may be used from several.

    Args:
        model: A causal language model, in evaluation mode. A few tokens are run through it to find its
            layout; it is not changed.
        arena_bytes: Bytes of an arena of the cache's own.
        arena: An arena of the same layout, in place of `arena_bytes`: that of another cache, say.
        page_size: Tokens of a page of the cache's own arena.
        device: Device of the cache's own arena; by default the model's.

    Attributes:
        arena: The arena. Its layout is what the model keeps.

    Raises:
        ArgumentError: If neither or both of `arena_bytes` and `arena` are given.
        ConfigError: If a layer keeps what has no place in a layout, or an arena has another layout or is too
            small.
        EngineMismatchError: If the interface of `transformers` differs from the supported one.
        OutOfMemoryError: If there is not enough memory.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        arena_bytes: int | None = None,
        *,
        arena: CacheArena | None = None,
        page_size: int = 16,
        device: DeviceLike | None = None,
    ) -> None:
        seams.TRANSFORMERS.require(seams.CACHE)
        if (arena is None) == (arena_bytes is None):
            raise ArgumentError("a cache has either arena_bytes or the arena of another")
        layout = kept_layout(model, page_size if arena is None else arena.layout.page_size)
        if arena is None:
            assert arena_bytes is not None  # noqa: S101 - for the type checker
            arena = CacheArena(layout, arena_bytes, str(model.device) if device is None else device)
        difference = layout.difference(arena.layout)
        if difference is not None:
            raise ConfigError(f"the arena is not of this model's layout: {difference}")
        self.arena: CacheArena = arena
        self._batch = Batch(arena)
        # Layers that keep nothing stay as they are.
        layers: list[Any] = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
        super().__init__(layers=[self._layer(number) or layer for number, layer in enumerate(layers)])
        self._closer = weakref.finalize(self, self._batch.close)
        self._closer.atexit = False

    def _layer(self, number: int) -> PagedLayer | StateLayer | None:
        """Return the layer of a number: with pages, a state, both, or neither."""
        pages = [pages for pages in self._batch.pages if number in pages.group.layers]
        states = [states for states in self._batch.states if number in states.group.layers]
        match pages, states:
            case [window, chain], [ring]:
                return CompressedLayer(self._batch, number, window, chain, ring)
            case [own], [state]:
                return HybridLayer(self._batch, number, own, state)
            case [own], _:
                return PagedLayer(self._batch, number, own)
            case _, [state]:
                return StateLayer(self._batch, number, state)
        return None

    @property
    @override
    def closed(self) -> bool:
        """Whether the cache is closed."""
        return self._batch.closed

    @override
    def close(self) -> None:
        """Free all units for good: a later write raises `StaleError`. A second call does nothing."""
        self._closer()

    @override
    def reset(self) -> None:
        """Free the units of all sequences, before prompts that do not continue them."""
        self._batch.release()
        super().reset()

    @override
    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Return what a layer asks for when a forward pass gets to it: the units of a token are taken.

        Raises:
            OutOfMemoryError: If there are not enough units. Nothing is changed.
        """
        layer = self.layers[layer_idx]
        if isinstance(layer, StateLayer):
            layer.begin()
        found: torch.Tensor | None = super().get_conv_state(layer_idx, state_idx)
        return found

    @override
    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Replace what each sequence `i` has by a copy of what `beam_idx[i]` has.

        Raises:
            IndexError: If there is no such sequence. Nothing is changed.
        """
        self._select(beam_idx.tolist())

    @override
    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these sequences, in this order: ints, or a mask.

        Raises:
            IndexError: If there is no such sequence. Nothing is changed.
        """
        self._select((indices.nonzero()[:, 0] if indices.dtype is torch.bool else indices).tolist())

    @override
    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence `repeats` times, side by side.

        Raises:
            OutOfMemoryError: If there are not enough units. Nothing is changed.
        """
        self._select([i for i in range(self._batch.n) for _ in range(repeats)])

    def _select(self, indices: list[int]) -> None:
        layers = [layer for layer in self.layers if isinstance(layer, StateLayer)] if self._batch.n else []
        for layer in layers:
            layer.store()
        self._batch.select(indices)
        for layer in layers:
            layer.bind()

    @override
    def crop(self, tokens_to_remove: int) -> None:
        """Refuse to take tokens back: what is behind a window has been freed, and states have moved on.

        Raises:
            ConfigError: If `tokens_to_remove` is not 0.
        """
        if tokens_to_remove:
            raise ConfigError("an ArenaCache takes no tokens back, as an assistant or prompt lookup needs")

    @override
    def activate_past_recording(self) -> None:
        """Refuse, as `crop` of a token.

        Raises:
            ConfigError: Always.
        """
        self.crop(-1)

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        """Refuse.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(
            "an ArenaCache is not copied: make another with its arena, and compute the prompt again"
        )
