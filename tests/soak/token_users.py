"""Users of token slots, of rows of the request table, and of the planner."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from shared_pools import HEAD_DIM, HEADS, Holding, Passing, Pools, User, expect

import kvpool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


MOST_REQUESTS = 2


class SlotUser(User):
    """Takes token slots, stores its mark there, shares them, and frees them in every way there is."""

    actions = (
        *("take", "extend", "grow", "give", "give", "give_group", "give_after", "share", "move"),
        *("misuse_slots", "ask"),
    )

    def __init__(self, pools: Pools, number: int, seed: int) -> None:
        super().__init__(pools, number, seed)
        self._allocator, self._kv, self._owners = pools.allocator, pools.kv, pools.owners["slots"]
        self._size = pools.sizes.page_size
        self._held: list[Holding] = []

    def _pages(self, slots: Iterable[int]) -> set[int]:
        return {slot // self._size for slot in slots}

    def _store(self, slots: list[int], mark: float) -> None:
        k = torch.full((len(slots), HEADS, HEAD_DIM), mark, device=self.device)
        for layer in range(2):
            self._kv.set_kv_buffer(layer, slots, k, k + layer)

    def _check(self, held: Holding) -> None:
        for layer in range(2):
            k, v = self._kv.gather_kv(layer, held.slots)
            is_whole = bool(k.eq(held.mark).all()) and bool(v.eq(held.mark + layer).all())
            expect(is_whole, f"{self}: what was stored with mark {held.mark} has changed in layer {layer}")

    def _hold(self, slots: torch.Tensor | None) -> None:
        if slots is None:
            return
        held = Holding(self, self.mark(), slots.tolist(), slots)
        self._owners.take(self._pages(held.slots), held)
        self._store(held.slots, held.mark)
        self._held.append(held)

    def take(self) -> None:
        """Allocates."""
        count = self.random.randrange(0, 3 * self._size + 40)
        self._hold(self._allocator.alloc(count, contiguous=self.random.random() < 0.2))

    def extend(self) -> None:
        """Allocates for a request."""
        self._hold(self._allocator.alloc_extend([0], [self.random.randrange(1, 3 * self._size + 9)], [-1]))

    def grow(self) -> None:
        """Continues the last page of a request."""
        held = next((held for held in self._held if held.slots), None)
        if held is None:
            return
        new = self._allocator.alloc_decode([len(held.slots) + 1], [held.slots[-1]])
        if new is not None:
            (slot,) = new.tolist()
            self._owners.take(self._pages([slot]) - self._pages(held.slots), held)
            self._store([slot], held.mark)
            held.slots.append(slot)

    def _as_given(self, held: Holding) -> Any:  # noqa: ANN401
        """The slots in one of the forms that `free` takes."""
        way = self.random.randrange(4)
        if way == 0 and held.thing.numel() == len(held.slots):
            return held.thing
        makers: list[Callable[[list[int]], Any]] = [list, np.array, self.here]
        return makers[way - 1](held.slots) if held.slots else []

    def _give(self, held: Holding) -> None:
        self._check(held)
        self._owners.give(self._pages(held.slots), held)
        self._allocator.free(self._as_given(held))

    def give(self) -> None:
        """Frees."""
        if self._held:
            self._give(self.pop(self._held))

    def give_group(self) -> None:
        """Frees in a group."""
        if self.pools.sizes.strict:
            # It would collect the bad frees of others, and raise for them in the end.
            return
        with self._allocator.free_group():
            for _ in range(min(2, len(self._held))):
                self.give()

    def give_after(self) -> None:
        """Frees behind a fence."""
        if self._held:
            held = self.pop(self._held)
            self._check(held)
            pages = self._pages(held.slots)
            fence = Passing(self.random.randrange(1, 5), lambda: self._owners.give(pages, held))
            self._allocator.free(self._as_given(held), after=fence)

    def share(self) -> None:
        """Adds an owner, who leaves again."""
        if self._size > 1 and not self.pools.sizes.strict:
            # Two frees of a page in a group count as one, and any user may have opened a group.
            return
        if self._held:
            held = self.random.choice(self._held)
            self._allocator.share(held.slots)
            self._allocator.free(held.slots)
            self._check(held)
            expect(self._allocator.is_allocated(held.slots).all(), f"{self} has slots that are free")

    def move(self) -> None:
        """Exchanges the rows of two slots and back."""
        held = next((held for held in self._held if len(held.slots) > 1), None)
        if held is not None:
            self._kv.move_kv(held.slots, held.slots[::-1])
            self._check(held)

    def misuse_slots(self) -> None:
        """Frees what nobody has, and asks for what there cannot be."""
        self.misuse("slots", lambda: self._allocator.free([0]))
        self.misuse("slots", lambda: self._allocator.free([self.pools.sizes.slots + 5 * self._size]))
        self.refused(ValueError, lambda: self._allocator.alloc(-1))
        self.refused(TypeError, lambda: self._allocator.free("12"))  # type: ignore[arg-type]
        self.refused(IndexError, lambda: self._kv.gather_kv(0, [1 << 20]))
        expect(self._allocator.alloc(self.pools.sizes.slots + 1) is None, "more slots than there are")

    def ask(self) -> None:
        """Looks whether the pools add up."""
        self.pools.check()

    def finish(self) -> None:
        """Gives everything back."""
        while self._held:
            self.give()
        # Fences are asked by calls.
        for _ in range(5):
            self._allocator.available_size()


class RowUser(User):
    """Takes rows of the request table and writes them whole."""

    actions = ("take", "take", "give", "give", "misuse_rows")

    def __init__(self, pools: Pools, number: int, seed: int) -> None:
        super().__init__(pools, number, seed)
        self._table, self._owners = pools.table, pools.owners["rows"]
        self._held: list[Holding] = []

    def take(self) -> None:
        """Takes rows, which must be empty, and fills them."""
        rows = self._table.alloc(self.random.randrange(1, 3))
        if rows is None:
            return
        held = Holding(self, self.mark(), rows)
        self._owners.take(rows, held)
        for row in rows:
            expect(not self._table.read(row, self._table.max_context_len).any(), f"row {row} is not empty")
            self._table.write((row, slice(0, self._table.max_context_len)), int(held.mark))
            self._table.write((self.here([row]), self.here([self.random.randrange(8)])), [int(held.mark)])
        self._held.append(held)

    def give(self) -> None:
        """Frees rows."""
        if not self._held:
            return
        held = self.pop(self._held)
        for row in held.slots:
            found = self._table.read(row, self._table.max_context_len)
            expect(found.eq(int(held.mark)).all(), f"{self}: row {row} has changed")
        self._owners.give(held.slots, held)
        self._table.free(held.slots)

    def misuse_rows(self) -> None:
        """Frees and writes what is not there."""
        self.misuse("rows", lambda: self._table.free(self._table.size + 9))
        self.refused(IndexError, lambda: self._table.write((self._table.size + 9, 0), 1))
        self.refused(ValueError, lambda: self._table.alloc(-1))

    def finish(self) -> None:
        """Gives everything back."""
        while self._held:
            self.give()


class RequestUser(User):
    """Plans steps of requests of its own on a planner that others use for theirs."""

    actions = ("begin", "begin", "decode", "decode", "decode", "truncate", "fork", "end", "misuse_plans")

    def __init__(self, pools: Pools, number: int, seed: int) -> None:
        super().__init__(pools, number, seed)
        self._planner, self._table = pools.planner, pools.table
        self._rows, self._owners = pools.owners["rows"], pools.owners["slots"]
        self._size = pools.sizes.page_size
        # Of each row its slots, and of each page the rows that have it.
        self._slots: dict[int, list[int]] = {}
        self._pages: dict[int, set[int]] = {}

    def _enter(self, row: int, slots: list[int], known: set[int]) -> None:
        """Notes the slots of a row; pages that are not `known` are new, and nobody may have them."""
        before = self._slots.get(row, [])
        expect(slots[: len(before)] == before, f"{self}: row {row} of the table has changed")
        for page in {slot // self._size for slot in slots}:
            if page not in self._pages:
                self._owners.take([page], self)
                self._pages[page] = set()
            expect(row in self._pages[page] or page in known or not self._pages[page], f"page {page} is mine")
            self._pages[page].add(row)
        self._slots[row] = slots

    def _leave(self, row: int, keep: int) -> None:
        """Strikes out what a row has beyond `keep` tokens, before it is given back."""
        slots = self._slots[row]
        gone = {slot // self._size for slot in slots} - {slot // self._size for slot in slots[:keep]}
        for page in gone:
            self._pages[page].discard(row)
            if not self._pages[page]:
                del self._pages[page]
                self._owners.give([page], self)
        self._slots[row] = slots[:keep]

    def _look(self, plan: kvpool.BatchPlan, rows: list[int], lens: list[int]) -> None:
        """Compares a plan, as far as no later one has taken its place, and the table with what is held."""
        try:
            host_lens, host_rows = plan.host.seq_lens.tolist(), plan.host.req_pool_indices.tolist()
            # Another thread's plan may have come while they were read: then this raises.
            _ = plan.host.seq_lens
        except kvpool.StaleBufferError:
            pass
        else:
            expect(host_lens == lens, f"{self}: a plan of other lengths")
            expect(host_rows == rows, f"{self}: a plan of other rows")
        for row, length in zip(rows, lens, strict=True):
            expect(self._planner.seq_len(row) == length, f"{self}: row {row} has not {length} tokens")
            self._enter(row, self._table.read(row, length).tolist(), set())

    def _room(self, row: int) -> int:
        return self._table.max_context_len - len(self._slots[row])

    def begin(self) -> None:
        """Prefills new requests. Others need rows, too."""
        rows = self._table.alloc(self.random.randrange(1, 3)) if len(self._slots) < MOST_REQUESTS else None
        if rows is None:
            return
        self._rows.take(rows, self)
        lens = [self.random.randrange(1, 60) for _ in rows]
        plan = self._planner.extend(rows, [0] * len(rows), lens)
        if plan is None:
            self._rows.give(rows, self)
            self._table.free(rows)
        else:
            self._look(plan, rows, lens)

    def decode(self) -> None:
        """A step of some requests."""
        tokens = self.random.randrange(1, 4)
        rows = [row for row in self._slots if self.random.random() < 0.7 and self._room(row) >= tokens][:8]
        lens = [len(self._slots[row]) + tokens for row in rows]
        if not rows or not all(self._may_grow(row) for row in rows):
            return
        plan = self._planner.decode(rows, lens, tokens, pad_to=8 if self.random.random() < 0.3 else None)
        if plan is not None and plan.padded_batch_size == len(rows):
            self._look(plan, rows, lens)
        elif plan is not None:
            for row, length in zip(rows, lens, strict=True):
                self._enter(row, self._table.read(row, length).tolist(), set())

    def _may_grow(self, row: int) -> bool:
        """Whether the last page of a row is full, or its own."""
        slots = self._slots[row]
        return len(slots) % self._size == 0 or len(self._pages[slots[-1] // self._size]) == 1

    def truncate(self) -> None:
        """Gives the last tokens of a request back."""
        if not self._slots:
            return
        row = self.random.choice(list(self._slots))
        slots = self._slots[row]
        keep = self.random.randrange(len(slots) + 1)
        # A page with another owner is left whole, for later tokens would overwrite it.
        if keep % self._size and len(self._pages[slots[keep - 1] // self._size]) > 1:
            keep -= keep % self._size
        self._leave(row, keep)
        self._planner.truncate([row], [keep])

    def fork(self) -> None:
        """A second request with the tokens of another."""
        if not self._slots:
            return
        row, other = self.random.choice(list(self._slots)), self._table.alloc()
        if other is None:
            return
        self._rows.take(other, self)
        length = len(self._slots[row])
        moved = self._planner.fork(row, other[0], length)
        if moved is None:
            self._rows.give(other, self)
            self._table.free(other)
            return
        whole = {slot // self._size for slot in self._slots[row]}
        self._enter(other[0], self._table.read(other[0], length).tolist(), whole)

    def end(self) -> None:
        """Finishes a request."""
        if not self._slots:
            return
        row = self.random.choice(list(self._slots))
        length = len(self._slots[row])
        self._leave(row, 0)
        del self._slots[row]
        self._rows.give([row], self)
        self._planner.finish([row], [length])

    def misuse_plans(self) -> None:
        """Asks for steps that cannot be."""
        self.refused(ValueError, lambda: self._planner.decode([1, 1], [4, 4]))
        self.refused(IndexError, lambda: self._planner.finish([self._table.size + 7]))

    def finish(self) -> None:
        """Gives everything back."""
        while self._slots:
            self.end()
