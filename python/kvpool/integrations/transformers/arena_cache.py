"""The cache of a model's own `generate()`, over a `CacheArena`."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import Cache, DynamicCache
from typing_extensions import Self, override

from kvpool._closing import Closing
from kvpool._kvpool import CacheArena
from kvpool.errors import ArgumentError, ConfigError, StateError
from kvpool.integrations.transformers import seams
from kvpool.integrations.transformers.arena_compressed import CompressedLayer
from kvpool.integrations.transformers.arena_layer import HybridLayer, PagedLayer, StateLayer
from kvpool.integrations.transformers.arena_layout import kept_layout
from kvpool.integrations.transformers.arena_units import Batch
from kvpool.integrations.transformers.layout import cache_argument

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvpool._kvpool import ArenaLease, ArenaPrefixCache
    from kvpool.typing import DeviceLike, Namespace

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

    With a prefix cache, `prefill` begins sequences with what is cached of their prompts, computes and
    publishes the other whole pages, and `generate` goes on behind them; `publish` adds what was generated.

    All units are given back when the cache is closed, reset, or dropped. After a failed call of `generate`,
    the cache has the tokens computed before: call `reset`. Use a cache from one thread at a time; caches of
    one arena may be used from several.

    Args:
        model: A causal language model, in evaluation mode. A few tokens are run through it to find its
            layout; it is not changed.
        arena_bytes: Bytes of an arena of the cache's own.
        arena: An arena of the same layout, in place of `arena_bytes`: that of another cache, say.
        prefix_cache: A prefix cache of such an arena, in place of the arena.
        page_size: Tokens of a page of the cache's own arena.
        device: Device of the cache's own arena; by default the model's.

    Attributes:
        arena: The arena. Its layout is what the model keeps.

    Raises:
        ArgumentError: Unless one of `arena_bytes`, `arena` and `prefix_cache` is given.
        ConfigError: If a layer keeps what has no place in a layout, or an arena has another layout or is too
            small.
        EngineMismatchError: If the interface of `transformers` differs from the supported one.
        OutOfMemoryError: If there is not enough memory.
    """

    def __init__(  # noqa: PLR0913 - three places for what is kept
        self,
        model: PreTrainedModel,
        arena_bytes: int | None = None,
        *,
        arena: CacheArena | None = None,
        prefix_cache: ArenaPrefixCache | None = None,
        page_size: int = 16,
        device: DeviceLike | None = None,
    ) -> None:
        seams.TRANSFORMERS.require(seams.CACHE)
        if sum(given is not None for given in (arena, arena_bytes, prefix_cache)) != 1:
            raise ArgumentError("a cache has either arena_bytes, or the arena of another, or a prefix_cache")
        arena = arena if prefix_cache is None else prefix_cache.arena
        layout = kept_layout(model, page_size if arena is None else arena.layout.page_size)
        if arena is None:
            assert arena_bytes is not None  # noqa: S101 - for the type checker
            arena = CacheArena(layout, arena_bytes, str(model.device) if device is None else device)
        difference = layout.difference(arena.layout)
        if difference is not None:
            raise ConfigError(f"the arena is not of this model's layout: {difference}")
        self.arena: CacheArena = arena
        self._batch = Batch(arena, publishes=prefix_cache is not None)
        self._prefix_cache, self._model = prefix_cache, weakref.ref(model)
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
    def num_tokens(self) -> int:
        """Tokens of each sequence that the cache has."""
        return self._batch.length

    @property
    @override
    def closed(self) -> bool:
        """Whether the cache is closed."""
        return self._batch.closed

    @override
    def close(self) -> None:
        """Free all units for good: a later write raises `StaleError`. A second call does nothing."""
        self._closer()

    def prefill(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        namespace: Namespace = None,
    ) -> int:
        """Begin sequences with what is cached of their prompts; compute and publish their other whole pages.

        At least one token of each prompt is left to `generate`, which gets the same prompts and this cache,
        or, if the model has states alone, the tokens from `num_tokens` on. The whole pages are computed by a
        call of the model's own `generate` for one token, which is dropped. For beams and several return
        sequences, repeat the prompts as `generate` does.

        Args:
            input_ids: Token ids of the prompts, ints `[sequences, length]`. Padding is on the left, and part
                of a prefix.
            attention_mask: The mask of the prompts, as that of `generate`.
            namespace: What keeps the prefixes of two users apart.

        Returns:
            The number of tokens of each prompt that were cached.

        Raises:
            ArgumentError: If there is no token, or a mask is not that of padding on the left.
            StateError: If there is no prefix cache, or there are sequences already.
            StaleError: If the cache is closed.
            OutOfMemoryError: If there are not enough units. The cache is empty then.
        """
        model = self._model()
        if self._prefix_cache is None or model is None:
            raise StateError("prefill() needs a prefix_cache, and a model that still exists")
        if input_ids.ndim != 2 or not input_ids.numel():  # noqa: PLR2004 - sequences of tokens
            raise ArgumentError(f"input_ids of the shape {[*input_ids.shape]} have no token of a sequence")
        page, prompts = self.arena.layout.page_size, input_ids.tolist()
        whole = (input_ids.shape[1] - 1) // page * page
        namespaces = [padded(namespace, count) for count in paddings(input_ids, attention_mask)]
        leases = matched(self._prefix_cache, prompts, whole, namespaces)
        found = leases[0].length
        try:
            self._batch.begin(leases, [prompt[:found] for prompt in prompts])
        except BaseException:
            for lease in leases:
                lease.release()
            raise
        try:
            for layer in self.layers if found else []:
                if isinstance(layer, StateLayer):
                    layer.resume()
            if found < whole:
                # Of a model with states alone, generate() drops no tokens that the cache has.
                first = found if all(self.is_linear) else 0
                mask = None if attention_mask is None else attention_mask[:, first:whole]
                options = {cache_argument(model): self, "attention_mask": mask}
                once = {"max_new_tokens": 1, "do_sample": False, "num_beams": 1, "num_return_sequences": 1}
                model.generate(input_ids[:, first:whole], **once, **options)
                self._batch.publish(prompts)
        except BaseException:
            self.reset()
            raise
        return found

    def publish(self, token_ids: torch.Tensor) -> int:
        """Publish the whole pages of sequences that began with `prefill`.

        A request that begins with them does not compute them again. Models with states go on only where there
        is a snapshot of these: where the number of tokens is a multiple of the page size.

        Args:
            token_ids: Token ids of the sequences, as `generate` returned them, ints `[sequences, length]`.

        Returns:
            The number of tokens of each sequence that are published now.

        Raises:
            ArgumentError: If the tokens do not begin with those of the prompts, or are fewer than are cached.
            StateError: If the sequences did not begin with `prefill`, or beams have taken their place.
            StaleError: If the arena or its prefix cache was cleared.
        """
        tokens = token_ids.tolist()
        if len(tokens) != self._batch.n or (tokens and len(tokens[0]) < self._batch.length):
            raise ArgumentError(
                f"token_ids of the shape {[*token_ids.shape]} for {self._batch.n} sequences of "
                f"{self._batch.length} tokens"
            )
        return self._batch.publish(tokens)

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


def paddings(input_ids: torch.Tensor, mask: torch.Tensor | None) -> list[int]:
    """Return the number of tokens that pad each prompt on the left."""
    if mask is None:
        return [0] * len(input_ids)
    counts = (mask == 0).sum(dim=1)
    expected = torch.arange(input_ids.shape[1], device=mask.device) >= counts[:, None]
    if mask.shape != input_ids.shape or not torch.equal(mask != 0, expected):
        raise ArgumentError(
            f"a mask of the shape {[*mask.shape]} for input_ids of the shape {[*input_ids.shape]} is not "
            "that of padding on the left"
        )
    found: list[int] = counts.tolist()
    return found


def padded(namespace: Namespace, count: int) -> Namespace:
    """Return the namespace of prompts with so much padding, which keys and values depend on."""
    return namespace if count == 0 else f"{count} tokens of padding, {namespace!r}"


def matched(
    cache: ArenaPrefixCache, prompts: list[list[int]], whole: int, namespaces: list[Namespace]
) -> list[ArenaLease]:
    """Return leases of one length, of up to `whole` tokens, for prompts of one length.

    What the tiers below the cache have is loaded.
    """
    while True:
        leases = [
            cache.match(prompt, max_tokens=whole, namespace=namespace)
            for prompt, namespace in zip(prompts, namespaces, strict=True)
        ]
        for lease in leases:
            lease.load()
        lengths = {lease.length for lease in leases}
        if len(lengths) == 1:
            return leases
        for lease in leases:
            lease.release()
        whole = min(lengths)
