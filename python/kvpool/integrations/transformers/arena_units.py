"""The units of a batch of sequences in a `CacheArena`: page lists, and states.

The sequences are equally long, so that a page is a number of tokens and has a unit for each sequence. A
forward pass begins with the first layer that asks for more tokens: units of all groups are taken then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from kvpool.errors import ArgumentError, OutOfMemoryError, StaleError, StateError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvpool._kvpool import ArenaLease, CacheArena, Group

__all__ = ["Batch", "Pages", "States", "refuse_gradients"]

PlaneOf = tuple[int, str]
"""A layer, and the name of a plane."""


class Pages:
    """The pages of a group, each of which has a unit for each sequence.

    Attributes:
        group: The group.
        units: Units by the number of a page; pages behind a window are left out.
        leased: The number of leading pages whose units are a prefix cache's.
        buffers: The planes of all layers.
        lengths: Tokens that each of them has.
    """

    def __init__(self, arena: CacheArena, group: Group, keep: int) -> None:
        self.group = group
        # Whole pages of so many tokens can be published with what the next token sees.
        self._keep = keep
        self.units: dict[int, list[int]] = {}
        self.leased = 0
        self.buffers = _buffers(arena, group)
        self.lengths = dict.fromkeys(self.buffers, 0)
        self._arena = arena
        self._entries = max(1, arena.layout.page_size // group.stride)
        # Units of ranges of pages as tensors, until the next change.
        self._tables: dict[range, torch.Tensor] = {}

    def kept(self, length: int) -> range:
        """Return the entries that are needed after `length` tokens, as far as they are whole."""
        first = 0 if self.group.tokens is None else max(0, length - self.group.tokens + 1)
        return range(first, length // self.group.stride)

    def needed(self, length: int) -> range:
        """Return the pages that are needed after `length` tokens: also for an entry that is not whole."""
        return self._pages(range(self.kept(length).start, -(-length // self.group.stride)))

    def missing(self, length: int) -> list[int]:
        """Return the pages without units that `length` tokens need."""
        return [page for page in self.needed(length) if page not in self.units]

    def add(self, length: int, n: int, taken: list[int]) -> None:
        """Give the pages that `length` tokens need their units."""
        for at, page in enumerate(self.missing(length)):
            self.units[page] = taken[at * n : at * n + n]
        self._tables.clear()

    def trim(self, length: int) -> None:
        """Free the pages that are needed neither after `length` tokens nor after the last whole page."""
        needed = range(self.needed(length - length % self._keep).start, self.needed(length).stop)
        for page in [page for page in self.units if page not in needed]:
            self._free(page, self.units.pop(page))
        self._tables.clear()

    def _free(self, page: int, units: list[int]) -> None:
        if page >= self.leased:
            self._arena.free(self.group.name, units)

    def adopt(self, leases: list[ArenaLease], length: int) -> None:
        """Begin with the units of leases of `length` tokens, one for each sequence."""
        found = [lease.units(self.group.name) for lease in leases]
        columns = zip(*(units.units for units in found), strict=True)
        self.units = {found[0].first + at: [*units] for at, units in enumerate(columns)}
        self.leased = found[0].first + len(self.units)
        self.lengths = dict.fromkeys(self.lengths, length)

    def offered(self, sequence: int, length: int) -> list[int | None]:
        """Return the units of a sequence for a publication of whole pages, from the leased ones on."""
        whole = length // self.group.stride // self._entries
        return [
            self.units[page][sequence] if page in self.units else None for page in range(self.leased, whole)
        ]

    def settle(self, published: list[list[int | None]], length: int) -> None:
        """Go on with the units of a prefix cache in the place of those that were published to it."""
        for at, units in enumerate(zip(*published, strict=True)):
            page = self.leased + at
            if page in self.units:
                old = self.units[page]
                self.units[page] = [
                    own if unit is None else unit for own, unit in zip(old, units, strict=True)
                ]
        self.leased += len(published[0])
        self.trim(length)

    def append(self, plane: PlaneOf, states: torch.Tensor, length: int) -> torch.Tensor:
        """Write new entries, `[n, entries, ...]`, and return a copy of those before them that are kept."""
        before, after = self.kept(self.lengths[plane]), self.kept(length)
        kept = self._read(plane, before, states)
        start = max(after.start, before.stop)
        if start < after.stop:
            pages = self._pages(range(start, after.stop))
            at = torch.arange(start, after.stop, device=states.device)
            units = self._indices(pages, states)[:, at // self._entries - pages.start]
            self.buffers[plane][units, at % self._entries] = states[:, start - before.stop :]
        self.lengths[plane] = length
        # From the last, which is behind until the end of the pass.
        if all(length == other for other in reversed(self.lengths.values())):
            self.trim(length)
        return kept

    def _read(self, plane: PlaneOf, entries: range, like: torch.Tensor) -> torch.Tensor:
        if not entries:
            return like[:, :0]
        pages = self._pages(entries)
        start = entries.start - pages.start * self._entries
        found = self.buffers[plane][self._indices(pages, like)].flatten(1, 2)
        return found[:, start : start + len(entries)]

    def _pages(self, entries: range) -> range:
        """Return the pages that have entries."""
        return range(entries.start // self._entries, -(-entries.stop // self._entries) if entries else 0)

    def _indices(self, pages: range, like: torch.Tensor) -> torch.Tensor:
        """Return the units of pages: int64 `[n, pages]`."""
        if pages not in self._tables:
            units = [self.units[page] for page in pages]
            self._tables[pages] = torch.tensor(units, device=like.device).T
        return self._tables[pages]

    def select(self, indices: list[int], taken: list[int]) -> None:
        """Let the sequences have the entries of those at `indices`; `taken` are units for more of them."""
        own = [page for page in self.units if page >= self.leased]
        more = len(taken) // len(own) if own else 0
        for page in [page for page in self.units if page < self.leased]:
            # Nobody writes these.
            self.units[page] = [self.units[page][i] for i in indices]
        for at, page in enumerate(own):
            units = self.units[page]
            together = [*units, *taken[at * more : at * more + more]]
            self.units[page] = together[: len(indices)]
            _copy(self.buffers.values(), [units[i] for i in indices], self.units[page])
            self._arena.free(self.group.name, together[len(indices) :])
        self._tables.clear()

    def release(self) -> None:
        """Free all units."""
        for page, units in self.units.items():
            self._free(page, units)
        self.units, self.leased = {}, 0
        self._tables.clear()
        self.lengths = dict.fromkeys(self.buffers, 0)

    @property
    def own(self) -> int:
        """The number of pages that are no prefix cache's."""
        return sum(page >= self.leased for page in self.units)


class States:
    """The states of a group.

    Attributes:
        group: The group.
        units: Units of all sequences, where a state is in one, or for each layer.
        buffers: The planes of all layers.
        lengths: Tokens that each layer has seen.
    """

    def __init__(self, arena: CacheArena, group: Group) -> None:
        self.group = group
        self.units: list[list[int]] = []
        self.buffers = _buffers(arena, group)
        self.lengths = dict.fromkeys(group.layers, 0)
        self._arena = arena

    def units_of(self, layer: int) -> list[int]:
        """Return the units of all sequences in a layer."""
        return self.units[self.group.layers.index(layer) if len(self.units) > 1 else 0]

    def add(self, taken: list[Any]) -> None:
        """Add the units of more sequences."""
        columns = [*zip(*taken, strict=True)] if isinstance(taken[0], list) else [taken]
        self.units = [
            [*units, *sorted(more)]
            for units, more in zip(self.units or [[]] * len(columns), columns, strict=True)
        ]

    def adopt(self, leases: list[ArenaLease], length: int) -> None:
        """Begin with copies of the snapshots of leases of `length` tokens, one for each sequence."""
        found = [lease.units(self.group.name).units for lease in leases]
        own = [unit for units in zip(*self.units, strict=True) for unit in units]
        self._arena.copy(self.group.name, own, [unit for units in found for unit in units])
        self.lengths = dict.fromkeys(self.lengths, length)

    def snapshot(self, sequence: int, units: list[Any]) -> list[int | None]:
        """Copy the state of a sequence to the unit that was taken for it, and return its numbers."""
        numbers = units[0] if isinstance(units[0], list) else units
        self._arena.copy(self.group.name, numbers, [column[sequence] for column in self.units])
        return [*numbers]

    def read(self, layer: int, plane: str) -> tuple[torch.Tensor, bool]:
        """Return the states of all sequences, and whether it is a view, as of units equally far apart."""
        units, buffer = self.units_of(layer), self.buffers[layer, plane]
        step = units[1] - units[0] if len(units) > 1 else 1
        if step > 0 and units == [*range(units[0], units[-1] + 1, step)]:
            return buffer[units[0] : units[-1] + 1 : step], True
        return buffer[units], False

    def select(self, indices: list[int], taken: list[Any]) -> None:
        """Let the sequences have the states of those at `indices`; `taken` are units for more of them."""
        before = self.units
        if taken:
            self.add(taken)
        together, self.units = self.units, [units[: len(indices)] for units in self.units]
        for column, (old, new, both) in enumerate(zip(before, self.units, together, strict=True)):
            layer = self.group.layers[column] if len(before) > 1 else None
            buffers = [buffer for (of, _), buffer in self.buffers.items() if layer in {None, of}]
            _copy(buffers, [old[i] for i in indices], new)
            self._arena.free(self.group.name, both[len(indices) :])

    def release(self) -> None:
        """Free all units."""
        for units in self.units:
            self._arena.free(self.group.name, units)
        self.units = []
        self.lengths = dict.fromkeys(self.lengths, 0)


class Batch:
    """The sequences of a cache.

    Attributes:
        n: How many there are.
        base: Tokens of each before the forward pass that runs, or ran last.
        length: Tokens after it, which have units.
        late: Copies the states of a layer back that are no views, and forgets itself.
        leases: The prefix of each sequence, while its units can be published.
        prefixes: The tokens of the leases.
    """

    def __init__(self, arena: CacheArena, *, publishes: bool) -> None:
        groups = arena.layout.groups
        keep = arena.layout.page_size if publishes else 1
        self.pages = [Pages(arena, group, keep) for group in groups if group.kind != "state"]
        self.states = [States(arena, group) for group in groups if group.kind == "state"]
        self._groups: list[Pages | States] = [*self.pages, *self.states]
        self.n = self.base = self.length = 0
        self.late: Callable[[], None] | None = None
        self.leases: list[ArenaLease] = []
        self.prefixes: list[list[int]] = []
        # Of sequences that have been replaced by others: these use their units.
        self._earlier: list[ArenaLease] = []
        self.closed = False
        self._arena = arena
        self._clears = arena.clears

    def extend(self, n: int, length: int, new: int) -> None:
        """Take what `n` sequences of `length` tokens need for `new` ones: of all groups or none."""
        if self.late is not None:
            self.late()
        if self.closed:
            raise StaleError("the cache is closed")
        self._notice_clear()
        if self.n not in {0, n}:
            raise StateError(f"the batch has {n} sequences, the cache {self.n}: reset() it")
        if length == self.length:
            self._check_complete()
            self.base = self.length
        after = self.base + new
        if after > self.length:
            units = {group.group.name: n * len(group.missing(after)) for group in self.pages}
            units |= {group.group.name: n for group in self.states if self.n == 0}
            try:
                taken = self._take(units, f"{n} sequences of {self.base} tokens with {new} more each")
            except OutOfMemoryError:
                self._back()
                raise
            for group in self.pages:
                group.add(after, n, taken[group.group.name])
            for states in self.states if self.n == 0 else []:
                states.add(taken[states.group.name])
            self.n, self.length = n, after

    def _notice_clear(self) -> None:
        """Refuse to go on with sequences whose units ended when the arena was cleared."""
        if self._arena.clears != self._clears:
            had = self.n
            self.release()
            if had:
                raise StaleError(f"the {had} sequences ended when the arena was cleared: reset() the cache")

    def begin(self, leases: list[ArenaLease], prefixes: list[list[int]]) -> None:
        """Begin sequences with leases of tokens, as many each."""
        if self.closed:
            raise StaleError("the cache is closed")
        self._notice_clear()
        if self.n:
            raise StateError(f"the cache has {self.n} sequences: reset() it")
        taken = self._take(
            {states.group.name: len(leases) for states in self.states}, f"{len(leases)} states"
        )
        for states in self.states:
            states.add(taken[states.group.name])
        self.n, self.leases, self.prefixes = len(leases), leases, prefixes
        self.base = self.length = length = len(prefixes[0])
        try:
            for group in self._groups if length else []:
                group.adopt(leases, length)
        except BaseException:
            self.release()
            raise

    def publish(self, token_ids: list[list[int]]) -> int:
        """Publish the whole pages of all sequences, with snapshots where the states are at their end."""
        if not self.leases:
            raise StateError("the sequences began without prefill(), or others have taken their place")
        if self.late is not None:
            self.late()
        self._check_complete()
        whole = self.length - self.length % self._arena.layout.page_size
        prefixes = [tokens[:whole] for tokens in token_ids]
        for sequence, (prefix, before) in enumerate(zip(prefixes, self.prefixes, strict=True)):
            if prefix[: len(before)] != before or not all(0 <= token < 2**31 for token in prefix):
                raise ArgumentError(
                    f"token_ids of sequence {sequence} do not begin with its {len(before)} published tokens, "
                    "or are not in [0, 2**31)"
                )
        published: list[dict[str, list[int | None]]] = []
        try:
            published.extend(self._publish(sequence, prefix) for sequence, prefix in enumerate(prefixes))
        except BaseException:
            if published:
                # Some sequences go on with units of the cache, and others do not.
                self.release()
            raise
        for pages in self.pages:
            pages.settle([units[pages.group.name] for units in published], self.length)
        self.prefixes = prefixes
        return whole

    def _publish(self, sequence: int, prefix: list[int]) -> dict[str, list[int | None]]:
        """Publish a sequence, and return the units that stand for it now."""
        units = {pages.group.name: pages.offered(sequence, len(prefix)) for pages in self.pages}
        taken: dict[str, list[Any]] = {}
        if self.states and len(prefix) == self.length:
            # Without room for a snapshot there is none.
            taken = self._arena.alloc({states.group.name: 1 for states in self.states}) or {}
        try:
            for states in self.states if taken else []:
                name = states.group.name
                units[name] = states.snapshot(sequence, taken[name])
            return self.leases[sequence].publish(prefix, units)
        except BaseException:
            for name, numbers in taken.items() if self._arena.clears == self._clears else []:
                self._arena.free(name, numbers)
            raise

    def _back(self) -> None:
        """Go back to before the forward pass, of which nothing has been written."""
        self.length = self.base
        for group in self.pages:
            group.trim(self.base)
        for states in self.states:
            states.lengths = dict.fromkeys(states.lengths, self.base)

    def _check_complete(self) -> None:
        lengths = [length for group in self._groups for length in group.lengths.values()]
        behind = sum(length != self.length for length in lengths)
        if behind:
            raise StaleError(
                f"a forward pass has ended before {behind} of {len(lengths)} writes: reset() the cache"
            )

    def _take(self, units: dict[str, int], what: str) -> dict[str, list[Any]]:
        taken = self._arena.alloc(units)
        if taken is None:
            needs = [
                f"{count * self._parts(name)} units of {name} "
                f"({self._arena.group_stats(name)['available']} are available)"
                for name, count in units.items()
                if count
            ]
            raise OutOfMemoryError(
                f"{what} do not fit: they need {', '.join(needs)}; {self._arena.slabs_free} slabs are free"
            )
        return taken

    def _parts(self, name: str) -> int:
        """Return how many units of the arena a unit of a group is."""
        group = next(group.group for group in self._groups if group.group.name == name)
        return len(group.layers) if self._arena.slabs.by_layer(name) else 1

    def append(self, pages: Pages, plane: PlaneOf, states: torch.Tensor) -> torch.Tensor:
        """Write new entries of a layer, `[n, new, ...]`, and return a copy of those kept before them."""
        n, new, *shape = states.shape
        if shape != [*pages.buffers[plane].shape[2:]]:
            raise ArgumentError(
                f"layer {plane[0]} has {plane[1]} of the shape {shape}, the cache "
                f"{[*pages.buffers[plane].shape[2:]]}: it is of another model"
            )
        refuse_gradients(states)
        length = pages.lengths[plane]
        if length != self.length and length + new != self.length:
            raise StaleError(
                f"layer {plane[0]} with {length} tokens gets {new} more, and another has {self.length}: "
                "reset() the cache"
            )
        self.extend(n, length, new)
        return pages.append(plane, states, self.length)

    def select(self, indices: list[int]) -> None:
        """Let the sequences be those at `indices`; if that fails, change nothing."""
        if self.n == 0:
            return
        wrong = [i for i in indices if not 0 <= i < self.n]
        if wrong or not indices:
            raise IndexError(
                f"sequences {wrong} of {self.n}" if wrong else f"none of {self.n} sequences is kept"
            )
        self._check_complete()
        more = max(0, len(indices) - self.n)
        units = {group.group.name: more * group.own for group in self.pages}
        units |= {states.group.name: more for states in self.states}
        taken = self._take(units, f"{more} sequences of {self.length} tokens more")
        for group in self._groups:
            group.select(indices, taken[group.group.name])
        if indices != [*range(self.n)]:
            self._earlier, self.leases = [*self._earlier, *self.leases], []
        self.n = len(indices)

    def release(self) -> None:
        """Free all units, unless the arena was cleared: then they are others'."""
        self.n = self.base = self.length = 0
        self.late = None
        if self._arena.clears != self._clears:
            self._clears = self._arena.clears
            for group in self._groups:
                group.units.clear()
        for group in self._groups:
            group.release()
        for lease in (*self.leases, *self._earlier):
            lease.release()
        self.leases, self._earlier = [], []

    def close(self) -> None:
        """Free all units, and refuse to take others."""
        self.closed = True
        self.release()


def refuse_gradients(states: torch.Tensor) -> None:
    """Refuse what would make the memory of the arena a part of a graph."""
    if torch.is_grad_enabled() and states.requires_grad:
        raise ArgumentError("an arena keeps no gradients: generate() has none, otherwise use torch.no_grad()")


def _buffers(arena: CacheArena, group: Group) -> dict[PlaneOf, torch.Tensor]:
    """Return the planes of all layers of a group."""
    return {
        (layer, plane.name): arena.buffer(group.name, plane.name, layer)
        for layer in group.layers
        for plane in group.planes
    }


def _copy(buffers: Iterable[torch.Tensor], sources: list[int], targets: list[int]) -> None:
    """Copy units, where they differ. All of them are read before any is written."""
    pairs = [pair for pair in zip(sources, targets, strict=True) if pair[0] != pair[1]]
    if pairs:
        read, written = zip(*pairs, strict=True)
        for buffer in buffers:
            buffer[list(written)] = buffer[list(read)]
