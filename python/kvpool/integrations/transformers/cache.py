"""The cache of a model's own `generate()`, over kvpool's pools.

Each sequence of the batch has a row of the request table and is planned by a `BatchPlanner`. Its slots are
the same in all layers. Beams and copies of a cache share pages, whose owners the planner counts.
"""

from __future__ import annotations

import weakref
from itertools import count, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    LinearAttentionLayer,
)
from typing_extensions import Self, override

from kvpool._closing import Closing
from kvpool._kvpool import BatchPlanner, GDNPool
from kvpool.errors import ArgumentError, ConfigError, OutOfMemoryError, StaleError, StateError
from kvpool.factories import make_full_attention_net_mem_pool, make_req_to_token_pool
from kvpool.integrations.transformers import seams
from kvpool.integrations.transformers.layout import (
    RecordingCache,
    cache_layers,
    gdn_shape,
    name_of,
    only_shape,
    run_tokens,
)
from kvpool.integrations.transformers.states import StateCache

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel

    from kvpool._kvpool import BatchPlan, KVPool, ReqToTokenPool, TokenToKVPoolAllocator
    from kvpool.typing import DTypeLike

__all__ = ["PooledCache"]


class PooledCache(Cache, Closing):
    """The keys, values and states of a batch in pools, for `model.generate(cache=...)`.

    Before `transformers` 5.24 the argument `cache` of `generate` is named `past_key_values`.

    The cache supports greedy search, sampling, beam search, assisted generation, prompt lookup, several
    return sequences, prompts in chunks, and padding on the left, with the model's own attention. To continue
    where a call ended, pass the cache again. `copy.deepcopy` makes another cache over the same pools. Its
    sequences begin with the same tokens, and share their pages.

    New keys and values are copied into their slots. Attention reads them there, without a copy, where the
    slots of each sequence are a run and the runs are equally far apart: for one sequence in a pool of its
    own, until `crop` frees a page, and for a batch while each sequence fits into one page. Elsewhere each
    layer gathers what it reads into a buffer, which the next layer overwrites. A layer with a sliding window
    reads its window alone, but keeps all tokens, since the slots are those of all layers. Multi-head latent
    attention is kept compressed. Padding takes slots, as in other caches.

    All slots are given back when the cache is closed, reset, or dropped. After a failed call of `generate`,
    the cache has the tokens computed before: call `reset`. Use a cache and its copies from one thread at a
    time.

    Args:
        model: A causal language model, in evaluation mode. Three tokens are run through it to find its
            shapes; it is not changed.
        size: Token slots.
        max_reqs: The most sequences at once, beams and copies included.
        page_size: Slots in a page.
        max_context_len: The most tokens of a sequence, padding included; by default `size`. The tables take 8
            bytes a token of a sequence.
        dtype: Data type in the pool; by default the model's. Any other is converted each time it is read.

    Attributes:
        kv_pool: Keys and values; its layers are the attention layers, in order.
        allocator: The allocator of token slots.
        table: The request table.
        gdn_pool: The states of Gated DeltaNet layers; None without such layers.

    Raises:
        ConfigError: If a layer is neither full nor sliding-window attention nor Gated DeltaNet, layers of one
            kind have different shapes, layers share keys and values, or a size is below 1.
        EngineMismatchError: If the interface of `transformers` differs from the supported one.
        OutOfMemoryError: If there is not enough memory.
    """

    def __init__(  # noqa: PLR0913 - a model and the sizes of its pools
        self,
        model: PreTrainedModel,
        size: int,
        max_reqs: int,
        *,
        page_size: int = 1,
        max_context_len: int | None = None,
        dtype: DTypeLike | None = None,
    ) -> None:
        seams.TRANSFORMERS.require(seams.CACHE)
        kinds = _kinds(model)
        kept, reads_views = _run(model, kinds)
        linear_layers = [layer for layer, kind in enumerate(kinds) if kind is None]
        states = gdn_shape(model, kept, linear_layers)
        shapes = {
            layer: _shape_of(kept.layers[layer]) for layer, kind in enumerate(kinds) if kind is not None
        }
        if not shapes:
            raise ConfigError(f"{name_of(model)} has no layer with attention, and so no keys and values")
        device = str(model.device)
        kv_pool, allocator = make_full_attention_net_mem_pool(
            size,
            len(shapes),
            *only_shape(model, "keys and values (heads and elements of each)", shapes),
            device=device,
            dtype=dtype or model.dtype,
            page_size=page_size,
        )
        table = make_req_to_token_pool(max_reqs, size if max_context_len is None else max_context_len, device)
        gdn_pool = None
        if states is not None:
            gdn_pool = GDNPool(max_reqs, len(linear_layers), *states, device=device, dtype=model.dtype)
        planner = BatchPlanner(table, allocator, max_reqs, size, kv_indices=False)
        places = {layer: i for i, layer in enumerate(linear_layers)}
        self._begin(_Pools(kv_pool, allocator, table, gdn_pool, planner, kinds, places, reads_views))

    def _begin(self, pools: _Pools) -> None:
        """Make an empty cache of these pools."""
        self._pools = pools
        self._batch = _Batch(pools)
        places = count()
        super().__init__(
            layers=[
                LinearAttentionLayer() if kind is None else _PoolLayer(self._batch, next(places), kind)
                for kind in pools.kinds
            ]
        )
        self.kv_pool: KVPool = pools.kv_pool
        self.allocator: TokenToKVPoolAllocator = pools.allocator
        self.table: ReqToTokenPool = pools.table
        self.gdn_pool: GDNPool | None = pools.gdn_pool
        self._closer = weakref.finalize(self, self._batch.close)
        self._closer.atexit = False

    @property
    @override
    def closed(self) -> bool:
        """Whether the cache is closed."""
        return self._batch.closed

    @override
    def close(self) -> None:
        """Free all slots for good: a later write raises `StaleError`. A second call does nothing."""
        self._closer()

    @override
    def reset(self) -> None:
        """Free the slots of all sequences, before prompts that do not continue them."""
        self._batch.release()

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        """Return a cache with the same pools and sequences: whole pages are shared, a part of one is copied.

        Raises:
            OutOfMemoryError: If there are not enough rows or slots. Nothing is changed.
        """
        other = type(self).__new__(type(self))
        other._begin(self._pools)  # noqa: SLF001 - of the same class
        other._batch.copy(self._batch)  # noqa: SLF001 - of the same class
        return other

    @override
    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self._states.get_conv_state(layer_idx) if self.has_previous_state(layer_idx) else None

    @override
    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: object
    ) -> torch.Tensor:
        self._batch.start(len(conv_states))
        return self._states.update_conv_state(conv_states, layer_idx)

    @override
    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self._states.get_recurrent_state(layer_idx) if self.has_previous_state(layer_idx) else None

    @override
    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: object
    ) -> torch.Tensor:
        self._batch.with_states.add(layer_idx)
        return self._states.update_recurrent_state(recurrent_states, layer_idx)

    @override
    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        found = self._batch.with_states
        return bool(found) if layer_idx is None else layer_idx in found

    @override
    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Replace each sequence `i` by sequence `beam_idx[i]`. Copies of one sequence share their pages.

        The call waits for `beam_idx` if it is on a GPU.

        Raises:
            IndexError: If there is no such sequence. Nothing is changed.
        """
        self._batch.select(beam_idx.tolist())

    @override
    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these sequences, in this order: ints, or a mask.

        Raises:
            IndexError: If there is no such sequence. Nothing is changed.
        """
        self._batch.select((indices.nonzero()[:, 0] if indices.dtype is torch.bool else indices).tolist())

    @override
    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence `repeats` times, side by side. The copies share their pages.

        Raises:
            OutOfMemoryError: If there are not enough rows or slots. Nothing is changed.
        """
        self._batch.select([i for i in range(len(self._batch.rows)) for _ in range(repeats)])

    @override
    def crop(self, tokens_to_remove: int) -> None:
        """Free the slots of the last `-tokens_to_remove` tokens of each sequence.

        Raises:
            ArgumentError: If `tokens_to_remove` is positive, there are fewer tokens, or the model has states
                of Gated DeltaNet layers, which cannot be restored. Nothing is changed.
            IndexOwnershipError: If a sequence would end within a page that another one shares. Nothing is
                changed.
        """
        if tokens_to_remove > 0:
            raise ArgumentError(f"crop({tokens_to_remove}): it takes the negative number of tokens to remove")
        if tokens_to_remove and self.gdn_pool is not None:
            raise ArgumentError(
                f"crop({tokens_to_remove}): states of Gated DeltaNet layers cannot be taken back"
            )
        self._batch.truncate(-tokens_to_remove)

    @property
    def _states(self) -> StateCache:
        return self._batch.states


def _kinds(model: PreTrainedModel) -> list[int | None]:
    """Return the sliding window of each layer: 0 for full attention, None for states."""
    layers = cache_layers(model)
    if layers.shared:
        raise ConfigError(
            f"{name_of(model)}: layer {layers.shared[0]} keeps no keys and values of its own: it shares "
            "those of another layer, or has no attention, which is not supported"
        )
    n = len(layers.windows) + len(layers.linear)
    return [None if layer in layers.linear else layers.windows[layer] or 0 for layer in range(n)]


def _run(model: PreTrainedModel, kinds: list[int | None]) -> tuple[RecordingCache, bool]:
    """Return a cache of the model after three tokens, and whether attention reads views of a pool.

    Attention that views keys in another shape needs them copied, where the heads of a token lie side by side.
    """
    try:
        kept, reads_views = RecordingCache(model, strided=True), True
        run_tokens(model, kept, 2)
    except ConfigError:
        kept, reads_views = RecordingCache(model), False
        run_tokens(model, kept, 2)
    named = name_of(model)
    if len(kept.layers) > len(kinds):
        raise ConfigError(
            f"{named} adds {len(kept.layers) - len(kinds)} layers to the {len(kinds)} of its cache as it "
            "runs (it runs layers several times, say), which is not supported"
        )
    for layer, kind in enumerate(kinds):
        if kind is not None and kept.updates[layer] != 1:
            raise ConfigError(
                f"{named}: layer {layer} passes keys and values to the cache {kept.updates[layer]} times in "
                "a forward pass; it must do so once"
            )
    return kept, reads_views


def _shape_of(layer: Any) -> tuple[int, int, int, int]:  # noqa: ANN401 - a cache layer of `transformers`
    """Return the heads and elements of cached keys and values: latent attention compresses them."""
    keys, values = layer.keys.shape, layer.values.shape
    return (keys[1], keys[3], values[1], values[3])


class _Pools(NamedTuple):
    """The pools that a cache and its copies share."""

    kv_pool: KVPool
    allocator: TokenToKVPoolAllocator
    table: ReqToTokenPool
    gdn_pool: GDNPool | None
    planner: BatchPlanner
    kinds: list[int | None]
    linear_layers: dict[int, int]
    reads_views: bool


class _Run(NamedTuple):
    """The slots of sequences with one run each: the first slot, and the distance from one run to the next."""

    slot: int
    step: int


class _Batch:
    """The sequences of a cache: a row of the table for each, all of them equally long.

    Attributes:
        rows: The rows, in the order of the batch.
        length: Tokens of each sequence that have slots.
        lengths: For each attention layer the tokens that it has written: `length` between two forward passes.
        with_states: Gated DeltaNet layers that have a state of these sequences.
        states: Their states.
    """

    def __init__(self, pools: _Pools) -> None:
        self._pools = pools
        self.closed = False
        self._plan: BatchPlan | None = None
        # Where the last tokens of all sequences are, by their number, until the next change: a run, or slots.
        self._places: dict[int, _Run | torch.Tensor] = {}
        self._shapes = [tuple(buffer.shape[1:]) for buffer in pools.kv_pool.get_kv_buffer(0)]
        self._forget()

    def _forget(self) -> None:
        self.rows: list[int] = []
        self.length = 0
        self.lengths = [0] * self._pools.kv_pool.layer_num
        self.with_states: set[int] = set()
        # Keys and values as they were gathered, reused by the next layer.
        self._gathered: tuple[torch.Tensor, torch.Tensor] | None = None
        self._set_rows([])

    def _set_rows(self, rows: list[int]) -> None:
        self.rows = rows
        self._places.clear()
        self._row_indices = torch.tensor(rows, dtype=torch.int64, device=self._pools.kv_pool.device)
        if self._pools.gdn_pool is not None:
            self.states = StateCache(self._pools.gdn_pool, self._pools.linear_layers, self._row_indices)

    def start(self, n: int) -> None:
        """Take rows for the first tokens of `n` sequences; later, check that there still are `n`."""
        if self.closed:
            raise StaleError("the cache is closed")
        if not self.rows:
            rows = self._alloc(n)
            if self._pools.gdn_pool is not None:
                self._pools.gdn_pool.reset_states(rows)
            self._set_rows(rows)
        elif n != len(self.rows):
            raise StateError(f"the batch has {n} sequences, the cache {len(self.rows)}: reset() it")

    def _alloc(self, n: int) -> list[int]:
        table = self._pools.table
        rows = table.alloc(n)
        if rows is None:
            raise OutOfMemoryError(
                f"{n} sequences more do not fit: {table.available_size()} of {table.size} are available "
                "(max_reqs)"
            )
        return rows

    def extend(self, n: int, new: int) -> None:
        """Take the slots of `new` tokens for each of `n` sequences."""
        behind = sum(length != self.length for length in self.lengths)
        if behind:
            raise StaleError(
                f"a forward pass has ended before {behind} of {len(self.lengths)} layers: reset() the cache"
            )
        self.start(n)
        before, after = [self.length] * n, [self.length + new] * n
        planner, allocator = self._pools.planner, self._pools.allocator
        longest = self._pools.table.max_context_len
        fits = n * new <= planner.max_tokens and after[0] <= longest
        plan = planner.extend(self.rows, before, after) if fits else None
        if plan is None:
            available = allocator.available_size()
            if self.length == 0:  # no sequence has a row yet
                self.release()
            raise OutOfMemoryError(
                f"{n} sequences of {before[0]} tokens do not fit with {new} more each: {available} of "
                f"{allocator.size} slots are available, and a sequence has up to {longest} (max_context_len)"
            )
        self._plan = plan
        self.length += new
        self._places.clear()

    def write(self, layer_id: int, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Write keys and values of new tokens in a layer, `[n, heads, new, elements]`."""
        n, new = key_states.shape[0], key_states.shape[2]
        shapes = [(states.shape[1], states.shape[3]) for states in (key_states, value_states)]
        if shapes != self._shapes:
            raise ArgumentError(
                f"keys and values have heads and elements {shapes}, the cache {self._shapes}: it is of "
                "another model"
            )
        if torch.is_grad_enabled() and key_states.requires_grad:
            raise ArgumentError(
                "the pools keep no gradients: generate() has none, otherwise use torch.no_grad()"
            )
        if self.lengths[layer_id] == self.length:
            self.extend(n, new)
        plan = self._plan
        if plan is None or self.lengths[layer_id] + new != self.length:
            raise StaleError(
                f"a layer with {self.lengths[layer_id]} tokens gets {new} more, and another has "
                f"{self.length}: reset() the cache"
            )
        keys, values = (states.transpose(1, 2).flatten(0, 1) for states in (key_states, value_states))
        self._pools.kv_pool.set_kv_buffer(layer_id, plan.out_cache_loc, keys, values)
        self.lengths[layer_id] = self.length

    def read(self, layer_id: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of the last `length` tokens of all sequences: `[n, heads, length, elements]`.

        The result is a view of the pool if the slots allow it, otherwise of a buffer that the next call
        overwrites; for attention that reads no views, a copy.
        """
        pool, n = self._pools.kv_pool, len(self.rows)
        if length not in self._places:
            self._places[length] = self._find(length)
        place = self._places[length]
        if isinstance(place, _Run):
            buffers = pool.get_kv_buffer(layer_id)
            keys, values = (_run_of(buffer, place, n, length) for buffer in buffers)
            return self._readable(keys, values)
        out = self._room(n * length)
        pool.gather_kv(layer_id, place, out)
        keys, values = (x.view(n, length, *x.shape[1:]).transpose(1, 2) for x in out)
        return self._readable(keys, values)

    def _readable(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V as the attention of the model can read them."""
        return (keys, values) if self._pools.reads_views else (keys.contiguous(), values.contiguous())

    def _find(self, length: int) -> _Run | torch.Tensor:
        """Return the places of the last `length` tokens: a run per sequence, or int32 slots `[n, length]`."""
        first, page_size = self.length - length, self._pools.planner.page_size
        table = None if self._plan is None else self._plan.host.block_table
        if table is not None:
            pages = table[:, first // page_size : (self.length - 1) // page_size + 1]
            starts = pages[:, 0].tolist()
            steps = {(after - before) * page_size for before, after in pairwise(starts)} or {0}
            step = steps.pop()
            if not steps and step >= 0 and (pages[:, 1:] - pages[:, :-1] == 1).all():
                return _Run(starts[0] * page_size + first % page_size, step)
        return self._pools.table.req_to_token[self._row_indices, first : self.length]

    def _room(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return buffers for `rows` rows of keys and values, which later calls reuse."""
        if self._gathered is None or len(self._gathered[0]) < rows:
            shapes = (buffer.shape[1:] for buffer in self._pools.kv_pool.get_kv_buffer(0))
            like = self._pools.kv_pool.k_buffer[0]
            keys, values = (like.new_empty(rows + rows // 4, *shape) for shape in shapes)
            self._gathered = keys, values
        keys, values = self._gathered
        return keys[:rows], values[:rows]

    def truncate(self, tokens: int) -> None:
        """Free the slots of the last tokens of each sequence."""
        if tokens > self.length:
            raise ArgumentError(f"{tokens} of {self.length} tokens cannot be removed")
        if tokens:
            self._pools.planner.truncate(self.rows, [self.length - tokens] * len(self.rows))
            self.length -= tokens
            self.lengths = [min(length, self.length) for length in self.lengths]
            self._places.clear()

    def select(self, indices: Sequence[int]) -> None:
        """Keep these sequences, and copy those listed more than once; if that fails, change nothing."""
        n = len(self.rows)
        if not n or indices == list(range(n)):
            return
        wrong = [i for i in indices if not 0 <= i < n]
        if wrong or not indices:
            raise IndexError(f"sequences {wrong} of {n}" if wrong else f"none of {n} sequences is kept")
        dropped = [self.rows[i] for i in sorted({*range(n)} - {*indices})]
        again = [i for at, i in enumerate(indices) if i in indices[:at]]
        # The dropped ones free the rows, and the partly used pages, that as many new ones need.
        is_safe = len(dropped) >= len(again)
        if is_safe:
            self._pools.planner.finish(dropped)
        more = iter(self._fork([self.rows[i] for i in again]))
        if not is_safe:
            self._pools.planner.finish(dropped)
        self._set_rows([next(more) if i in indices[:at] else self.rows[i] for at, i in enumerate(indices)])

    def copy(self, other: _Batch) -> None:
        """Copy the sequences of another batch of the same pools."""
        self._set_rows(other._fork(other.rows))
        self.length, self.lengths = other.length, [*other.lengths]
        self.with_states = {*other.with_states}

    def _fork(self, sources: list[int]) -> list[int]:
        """Make rows that begin with the tokens of other rows: all of them or none."""
        pools, rows = self._pools, self._alloc(len(sources))
        try:
            for source, row in zip(sources, rows, strict=True):
                self._continue(source, row)
        except BaseException:
            pools.planner.finish(rows)
            raise
        if pools.gdn_pool is not None and rows:
            pools.gdn_pool.copy_states(sources, rows)
        return rows

    def _continue(self, source: int, row: int) -> None:
        """Let an empty row begin with the tokens of another row."""
        pools = self._pools
        tokens = pools.planner.seq_len(source)
        moved = pools.planner.fork(source, row, tokens)
        if moved is None:
            raise OutOfMemoryError(
                f"a copy of a sequence of {tokens} tokens needs a page: "
                f"{pools.allocator.available_size()} of {pools.allocator.size} slots are available"
            )
        if len(moved[0]):
            pools.kv_pool.move_kv(*moved)

    def release(self) -> None:
        """Give back all rows and slots."""
        rows = self.rows
        self._forget()
        if rows:
            self._pools.planner.finish(rows)

    def close(self) -> None:
        """Free all rows and slots, and refuse to take others."""
        self.closed = True
        self.release()


def _run_of(buffer: torch.Tensor, run: _Run, n: int, length: int) -> torch.Tensor:
    """Return the runs of all sequences in a layer's buffer, a view `[n, heads, length, elements]`."""
    row, head, element = buffer.stride()
    return buffer.as_strided(
        (n, buffer.shape[1], length, buffer.shape[2]),
        (run.step * row, head, row, element),
        buffer.storage_offset() + run.slot * row,
    )


class _PoolLayer(CacheLayerMixin):
    """An attention layer of a cache.

    With a sliding window, it reads the tokens that `transformers`' own layers would keep.
    """

    is_croppable = True
    supports_early_init = False

    def __init__(self, batch: _Batch, layer_id: int, sliding_window: int) -> None:
        super().__init__()
        self.is_initialized = True
        self.is_sliding = sliding_window > 0
        self._batch, self._layer_id, self._window = batch, layer_id, sliding_window

    @override
    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: the pools have all memory already."""

    @override
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new keys and values to the pool, and return those that attention reads."""
        length, _ = self.get_mask_sizes(key_states.shape[2])
        self._batch.write(self._layer_id, key_states, value_states)
        if length == key_states.shape[2]:
            return key_states, value_states
        keys, values = self._batch.read(self._layer_id, length)
        return keys.to(key_states.dtype), values.to(value_states.dtype)

    @override
    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        seq_len = self.get_seq_length()
        kept = min(seq_len, self._window - 1) if self.is_sliding else seq_len
        return kept + query_length, seq_len - kept

    @override
    def get_seq_length(self) -> int:
        return self._batch.lengths[self._layer_id]

    @override
    def get_max_length(self) -> int:
        return self._window if self.is_sliding else -1
