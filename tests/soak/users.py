"""Random users of pools that others use, too: each knows what it has, and notices when another has it.

What the pools hand out is entered among the owners; what is stored there bears its owner's mark, which is
compared before it is given back. Users also do what they should not, as far as it hurts no one else. They may
run on any number of threads, one user on one at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from shared_pools import HEAD_DIM, HEADS, DelayedFence, Holding, Pools, User, expect

import kvpool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

MOST_REQUESTS = 2
CHUNK_TOKENS = 16
ARENA_BYTES = 1 << 16
MOST_BUFFERS = 12


class SlotUser(User):
    """Takes token slots, stores its mark there, shares them, and frees them in every way there is."""

    actions = (
        *("take", "extend", "grow", "give", "give", "give_group", "give_after", "share", "move"),
        *("misuse_slots", "ask"),
    )

    def places(self, slots: Iterable[int]) -> set[int]:
        return self.pages(slots)

    def _store(self, slots: list[int], mark: float) -> None:
        k = torch.full((len(slots), HEADS, HEAD_DIM), mark, device=self.device)
        for layer in range(2):
            self.pools.kv.set_kv_buffer(layer, slots, k, k + layer)

    def check(self, held: Holding) -> None:
        for layer in range(2):
            k, v = self.pools.kv.gather_kv(layer, held.slots)
            is_whole = bool(k.eq(held.mark).all()) and bool(v.eq(held.mark + layer).all())
            expect(is_whole, f"{self}: what was stored with mark {held.mark} has changed in layer {layer}")

    def _take(self, slots: torch.Tensor | None) -> None:
        if slots is not None:
            held = self.hold(slots.tolist(), slots)
            self._store(held.slots, held.mark)

    def take(self) -> None:
        count = self.random.randrange(0, 3 * self.pools.sizes.page_size + 40)
        self._take(self.pools.allocator.alloc(count, contiguous=self.random.random() < 0.2))

    def extend(self) -> None:
        count = self.random.randrange(1, 3 * self.pools.sizes.page_size + 9)
        self._take(self.pools.allocator.alloc_extend([0], [count], [-1]))

    def grow(self) -> None:
        """Continues the last page of a request."""
        held = next((held for held in self.held if held.slots), None)
        if held is None:
            return
        new = self.pools.allocator.alloc_decode([len(held.slots) + 1], [held.slots[-1]])
        if new is not None:
            (slot,) = new.tolist()
            self.owners.take(self.pages([slot]) - self.pages(held.slots), held)
            self._store([slot], held.mark)
            held.slots.append(slot)

    def _as_given(self, held: Holding) -> Any:  # noqa: ANN401
        """The slots in one of the forms that `free` takes."""
        way = self.random.randrange(4)
        if way == 0 and held.thing.numel() == len(held.slots):
            return held.thing
        makers: list[Callable[[list[int]], Any]] = [list, np.array, self.on_device]
        return makers[way - 1](held.slots) if held.slots else []

    def give_back(self, held: Holding) -> None:
        self.pools.allocator.free(self._as_given(held))

    def give_group(self) -> None:
        if self.pools.sizes.strict:
            # It would collect the bad frees of others, and raise for them in the end.
            return
        with self.pools.allocator.free_group():
            for _ in range(min(2, len(self.held))):
                self.give()

    def give_after(self) -> None:
        """Frees behind a fence."""
        if self.held:
            held = self.pop(self.held)
            self.check(held)
            pages = self.pages(held.slots)
            fence = DelayedFence(self.random.randrange(1, 5), lambda: self.owners.give(pages, held))
            self.pools.allocator.free(self._as_given(held), after=fence)

    def share(self) -> None:
        """Adds an owner, who leaves again."""
        if self.pools.sizes.page_size > 1 and not self.pools.sizes.strict:
            # Two frees of a page in a group count as one, and any user may have opened a group.
            return
        if self.held:
            held, allocator = self.random.choice(self.held), self.pools.allocator
            allocator.share(held.slots)
            allocator.free(held.slots)
            self.check(held)
            expect(allocator.is_allocated(held.slots).all(), f"{self} has slots that are free")

    def move(self) -> None:
        """Exchanges the rows of two slots and back."""
        held = next((held for held in self.held if len(held.slots) > 1), None)
        if held is not None:
            self.pools.kv.move_kv(held.slots, held.slots[::-1])
            self.check(held)

    def misuse_slots(self) -> None:
        allocator, sizes = self.pools.allocator, self.pools.sizes
        self.misuse("slots", lambda: allocator.free([0]))
        self.misuse("slots", lambda: allocator.free([sizes.slots + 5 * sizes.page_size]))
        self.refused(ValueError, lambda: allocator.alloc(-1))
        self.refused(TypeError, lambda: allocator.free("12"))  # type: ignore[arg-type]
        self.refused(IndexError, lambda: self.pools.kv.gather_kv(0, [1 << 20]))
        expect(allocator.alloc(sizes.slots + 1) is None, "more slots than there are")

    def ask(self) -> None:
        self.pools.check()

    def finish(self) -> None:
        super().finish()
        # Fences are asked by calls.
        for _ in range(5):
            self.pools.allocator.available_size()


class RowUser(User):
    """Takes rows of the request table and writes them whole."""

    actions = ("take", "take", "give", "give", "misuse_rows")
    owned = "rows"

    def take(self) -> None:
        table = self.pools.table
        rows = table.alloc(self.random.randrange(1, 3))
        if rows is None:
            return
        mark = int(self.hold(rows).mark)
        for row in rows:
            expect(not table.read(row, table.max_context_len).any(), f"row {row} is not empty")
            table.write((row, slice(0, table.max_context_len)), mark)
            table.write((self.on_device([row]), self.on_device([self.random.randrange(8)])), [mark])

    def check(self, held: Holding) -> None:
        for row in held.slots:
            found = self.pools.table.read(row, self.pools.table.max_context_len)
            expect(found.eq(int(held.mark)).all(), f"{self}: row {row} has changed")

    def give_back(self, held: Holding) -> None:
        self.pools.table.free(held.slots)

    def misuse_rows(self) -> None:
        table = self.pools.table
        self.misuse("rows", lambda: table.free(table.size + 9))
        self.refused(IndexError, lambda: table.write((table.size + 9, 0), 1))
        self.refused(ValueError, lambda: table.alloc(-1))


class RequestUser(User):
    """Plans steps of requests of its own on a planner that others use for theirs."""

    actions = ("begin", "begin", "decode", "decode", "decode", "truncate", "fork", "end", "misuse_plans")

    def __init__(self, pools: Pools, number: int, seed: int) -> None:
        super().__init__(pools, number, seed)
        self._planner, self._table, self._rows = pools.planner, pools.table, pools.owners["rows"]
        self._size = pools.sizes.page_size
        # Of each row its slots, and of each page the rows that have it.
        self._slots: dict[int, list[int]] = {}
        self._pages: dict[int, set[int]] = {}

    def _enter(self, row: int, slots: list[int], known: set[int]) -> None:
        """Notes the slots of a row; pages that are not `known` are new, and nobody may have them."""
        before = self._slots.get(row, [])
        expect(slots[: len(before)] == before, f"{self}: row {row} of the table has changed")
        for page in self.pages(slots):
            if page not in self._pages:
                self.owners.take([page], self)
                self._pages[page] = set()
            expect(row in self._pages[page] or page in known or not self._pages[page], f"page {page} is mine")
            self._pages[page].add(row)
        self._slots[row] = slots

    def _enter_read(self, row: int, length: int, known: set[int]) -> None:
        self._enter(row, self._table.read(row, length).tolist(), known)

    def _leave(self, row: int, keep: int) -> None:
        """Strikes out what a row has beyond `keep` tokens, before it is given back."""
        slots = self._slots[row]
        for page in self.pages(slots) - self.pages(slots[:keep]):
            self._pages[page].discard(row)
            if not self._pages[page]:
                del self._pages[page]
                self.owners.give([page], self)
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
            self._enter_read(row, length, set())

    def _free_row(self, row: int) -> None:
        self._rows.give([row], self)
        self._table.free([row])

    def begin(self) -> None:
        """Prefills new requests. Others need rows, too."""
        rows = self._table.alloc(self.random.randrange(1, 3)) if len(self._slots) < MOST_REQUESTS else None
        if rows is None:
            return
        self._rows.take(rows, self)
        lens = [self.random.randrange(1, 60) for _ in rows]
        plan = self._planner.extend(rows, [0] * len(rows), lens)
        if plan is not None:
            self._look(plan, rows, lens)
            return
        for row in rows:
            self._free_row(row)

    def decode(self) -> None:
        """A step of some requests."""
        tokens = self.random.randrange(1, 4)
        longest = self._table.max_context_len - tokens
        wanted = [row for row in self._slots if self.random.random() < 0.7]
        rows = [row for row in wanted if len(self._slots[row]) <= longest][:8]
        lens = [len(self._slots[row]) + tokens for row in rows]
        if not rows or not all(self._may_grow(row) for row in rows):
            return
        plan = self._planner.decode(rows, lens, tokens, pad_to=8 if self.random.random() < 0.3 else None)
        if plan is not None and plan.padded_batch_size == len(rows):
            self._look(plan, rows, lens)
        elif plan is not None:
            for row, length in zip(rows, lens, strict=True):
                self._enter_read(row, length, set())

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
        if self._planner.fork(row, other[0], length) is None:
            self._free_row(other[0])
        else:
            self._enter_read(other[0], length, self.pages(self._slots[row]))

    def end(self) -> None:
        if not self._slots:
            return
        row = self.random.choice(list(self._slots))
        length = len(self._slots[row])
        self._leave(row, 0)
        del self._slots[row]
        self._rows.give([row], self)
        self._planner.finish([row], [length])

    def misuse_plans(self) -> None:
        self.refused(ValueError, lambda: self._planner.decode([1, 1], [4, 4]))
        self.refused(IndexError, lambda: self._planner.finish([self._table.size + 7]))

    def finish(self) -> None:
        while self._slots:
            self.end()


class StateUser(User):
    """Keeps snapshots of a recurrent state."""

    actions = ("write", "snapshot", "snapshot", "restore", "give", "misuse_states")
    owned = "tracks"

    def __init__(self, pools: Pools, number: int, seed: int) -> None:
        super().__init__(pools, number, seed)
        self._states = pools.states
        self._working = Holding(self, 0.0, [number + 1])

    def check(self, held: Holding) -> None:
        (slot,) = held.slots
        states = (self._states.recurrent_state[:, slot], self._states.conv_state[:, slot])
        is_whole = all(bool(state.eq(held.mark).all()) for state in states)
        expect(is_whole, f"{self}: state {slot} has changed")

    def write(self) -> None:
        """Zeroes the working slot, and marks it."""
        self.check(self._working)
        self._states.reset_states(self._working.slots)
        self._working.mark = 0.0
        self.check(self._working)
        self._working.mark = self.mark()
        for state in (self._states.recurrent_state, self._states.conv_state):
            state[:, self._working.slots[0]] = self._working.mark

    def snapshot(self) -> None:
        """Copies the working slot to a track slot."""
        slot = self._states.alloc_track_slot()
        if slot is not None:
            self.hold([slot], mark=self._working.mark)
            self._states.copy_states(self._working.slots[0], slot)

    def restore(self) -> None:
        """Copies a track slot to the working slot."""
        if self.held:
            held = self.random.choice(self.held)
            self._states.copy_states(held.slots, self._working.slots)
            self._working.mark = held.mark
            self.check(self._working)

    def give_back(self, held: Holding) -> None:
        self._states.free_track_slot(held.slots[0])

    def misuse_states(self) -> None:
        """Frees a working slot, and copies to where nothing is."""
        slot = self._working.slots[0]
        self.misuse("tracks", lambda: self._states.free_track_slot(slot))
        self.refused(IndexError, lambda: self._states.copy_states(slot, 1 << 20))


class ChunkUser(User):
    """Offloads K and V of token slots to chunks, and loads them back to others."""

    actions = ("offload", "offload", "load", "share", "give", "batch", "misuse_chunks")
    owned = "chunks"

    def _take_slots(self) -> torch.Tensor | None:
        """Slots, entered as this user's."""
        slots: torch.Tensor | None = self.pools.allocator.alloc(CHUNK_TOKENS)
        if slots is not None:
            self.pools.owners["slots"].take(self.pages(slots.tolist()), self)
        return slots

    def _give_slots(self, slots: torch.Tensor) -> None:
        self.pools.owners["slots"].give(self.pages(slots.tolist()), self)
        self.pools.allocator.free(slots)

    def offload(self) -> None:
        """Moves K and V of some slots into a chunk."""
        chunk, slots = self.pools.chunks.allocate(), self._take_slots()
        if chunk is not None:
            mark = self.hold([chunk.index], chunk).mark
            values = torch.full((CHUNK_TOKENS, HEADS, HEAD_DIM), mark, device=self.device)
            if slots is not None:
                self.pools.kv.set_kv_buffer(0, slots, values, values)
                values = self.pools.kv.gather_kv(0, slots)[0]
            chunk.copy_from(torch.stack([values, values])).wait()
        if slots is not None:
            self._give_slots(slots)

    def load(self) -> None:
        """Moves what is in a chunk into slots, and compares it."""
        slots = self._take_slots()
        if slots is None:
            return
        if self.held:
            held = self.random.choice(self.held)
            values = torch.empty(2, CHUNK_TOKENS, HEADS, HEAD_DIM, device=self.device)
            held.thing.copy_to(values).wait()
            self.pools.kv.set_kv_buffer(1, slots, values[0], values[1])
            found = self.pools.kv.gather_kv(1, slots)
            is_whole = all(bool(part.eq(held.mark).all()) for part in found)
            expect(is_whole, f"{self}: chunk {held.slots} has changed")
        self._give_slots(slots)

    def share(self) -> None:
        if self.held:
            chunk = self.random.choice(self.held).thing
            with chunk.retain():
                expect(chunk.references == 2, f"{self}: {chunk.references} references")
            expect(chunk.references == 1, f"{self}: {chunk.references} references")

    def batch(self) -> None:
        """Takes several, all or nothing, and fills them."""
        for chunk in self.pools.chunks.allocate_batch(3) or []:
            chunk.tensor().fill_(self.hold([chunk.index], chunk).mark)

    def check(self, held: Holding) -> None:
        expect(held.thing.tensor().eq(held.mark).all(), f"{self}: chunk {held.slots} has changed")

    def give_back(self, held: Holding) -> None:
        self.pools.chunks.free(held.thing)
        self.misuse("chunks", held.thing.release)

    def misuse_chunks(self) -> None:
        chunks = self.pools.chunks
        expect(chunks.allocate_batch(chunks.num_chunks + 1) is None, "more chunks than there are")
        self.refused(ValueError, lambda: chunks.allocate_batch(-1))


class BufferUser(User):
    """Takes scratch buffers, alone and in batches."""

    actions = ("take", "take", "batch", "give", "give", "give")
    owned = "buffers"

    def _fill(self, buffer: kvpool.Buffer) -> None:
        # Where it begins stands for all of it: buffers have memory of their own.
        buffer.tensor.fill_(self.hold([buffer.tensor.data_ptr()], buffer).mark)

    def _size(self) -> int:
        return self.random.randrange(1, 1 << self.random.randrange(1, 12))

    def take(self) -> None:
        # The pool has no end, its users have.
        if len(self.held) < MOST_BUFFERS:
            self._fill(self.pools.buffers.alloc((self._size(),), "float32"))

    def batch(self) -> None:
        count = min(3, MOST_BUFFERS - len(self.held))
        for buffer in self.pools.buffers.alloc_batch([((self._size(),), "float32") for _ in range(count)]):
            self._fill(buffer)

    def check(self, held: Holding) -> None:
        expect(held.thing.tensor.eq(held.mark).all(), f"{self}: a buffer has changed")

    def give_back(self, held: Holding) -> None:
        held.thing.release()
        self.refused(kvpool.StaleBufferError, held.thing.release)


class PageUser(User):
    """Takes pages of floats, until the pool has grown to its most."""

    actions = ("take", "take", "give", "give", "misuse_pages")
    owned = "pages"

    def take(self) -> None:
        """Takes a page. Each user has only so many, for the pool never shrinks."""
        page = self.pools.pages.alloc() if len(self.held) < self.pools.sizes.pages // 2 else None
        if page is not None:
            self.pools.pages.page(page).fill_(self.hold([page]).mark)

    def check(self, held: Holding) -> None:
        found = self.pools.pages.page(held.slots[0])
        expect(found.eq(held.mark).all(), f"{self}: page {held.slots} has changed")

    def give_back(self, held: Holding) -> None:
        self.pools.pages.free(held.slots[0])

    def misuse_pages(self) -> None:
        self.misuse("pages", lambda: self.pools.pages.free(1 << 20))
        self.refused(IndexError, lambda: self.pools.pages.page(1 << 20))


class WorkspaceUser(User):
    """Runs steps in an arena of its own."""

    actions = ("run",)

    def run(self) -> None:
        """A step of a few tensors, the last of which does not fit; the workspace is new now and then."""
        if self.operations % 64 == 0:
            self._workspace = kvpool.Workspace(self.device, ARENA_BYTES)
        workspace, held = self._workspace, list[tuple[torch.Tensor, float]]()
        with workspace.use():
            for _ in range(self.random.randrange(1, 12)):
                make = self.random.choice((workspace.empty, workspace.zeros))
                tensor = make((self.random.randrange(1, 400),), "float32")
                mark = self.mark()
                held.append((tensor.fill_(mark), mark))
            self.refused(kvpool.WorkspaceExhaustedError, lambda: workspace.empty((ARENA_BYTES,), "uint8"))
        for tensor, mark in held:
            expect(tensor.eq(mark).all(), f"{self}: a tensor of the arena has changed")
        held.clear()
        expect(workspace.reset(), f"{self}: the arena was not reset")

    def finish(self) -> None:
        """Leaves nothing in the arena."""
        if self.operations:
            self._workspace.close()


KINDS: tuple[type[User], ...] = (
    *(SlotUser, RowUser, RequestUser, StateUser, ChunkUser, BufferUser, PageUser, WorkspaceUser),
)


def users_of(pools: Pools, number: int, seed: int) -> list[User]:
    """A user of each kind; no two calls for the same pools may have the same `number`."""
    return [kind(pools, number, seed) for kind in KINDS]
