"""Users of states, chunks, buffers, pages, and of a workspace."""

from __future__ import annotations

import torch
from shared_pools import HEAD_DIM, HEADS, Holding, Pools, User, expect

import kvpool

CHUNK_TOKENS = 16
ARENA_BYTES = 1 << 16
MOST_BUFFERS = 12


class StateUser(User):
    """Keeps snapshots of a recurrent state."""

    actions = ("write", "snapshot", "snapshot", "restore", "give", "misuse_states")

    def __init__(self, pools: Pools, number: int, seed: int) -> None:
        super().__init__(pools, number, seed)
        self._states, self._owners = pools.states, pools.owners["tracks"]
        self._slot = number + 1
        self._mark = 0.0
        self._held: list[Holding] = []

    def _check(self, slot: int, mark: float) -> None:
        states = (self._states.recurrent_state[:, slot], self._states.conv_state[:, slot])
        expect(all(bool(state.eq(mark).all()) for state in states), f"{self}: state {slot} has changed")

    def write(self) -> None:
        """Zeroes the working slot, and marks it."""
        self._check(self._slot, self._mark)
        self._states.reset_states([self._slot])
        self._check(self._slot, 0.0)
        self._mark = self.mark()
        for state in (self._states.recurrent_state, self._states.conv_state):
            state[:, self._slot] = self._mark

    def snapshot(self) -> None:
        """Copies the working slot to a track slot."""
        slot = self._states.alloc_track_slot()
        if slot is not None:
            held = Holding(self, self._mark, [slot])
            self._owners.take([slot], held)
            self._states.copy_states(self._slot, slot)
            self._held.append(held)

    def restore(self) -> None:
        """Copies a track slot to the working slot."""
        if self._held:
            held = self.random.choice(self._held)
            self._states.copy_states(held.slots, [self._slot])
            self._mark = held.mark
            self._check(self._slot, self._mark)

    def give(self) -> None:
        """Frees a track slot."""
        if self._held:
            held = self.pop(self._held)
            self._check(held.slots[0], held.mark)
            self._owners.give(held.slots, held)
            self._states.free_track_slot(held.slots[0])

    def misuse_states(self) -> None:
        """Frees a working slot, and copies to where nothing is."""
        self.misuse("tracks", lambda: self._states.free_track_slot(self._slot))
        self.refused(IndexError, lambda: self._states.copy_states(self._slot, 1 << 20))

    def finish(self) -> None:
        """Gives everything back."""
        while self._held:
            self.give()


class ChunkUser(User):
    """Offloads K and V of token slots to chunks, and loads them back to others."""

    actions = ("offload", "offload", "load", "share", "give", "batch", "misuse_chunks")

    def __init__(self, pools: Pools, number: int, seed: int) -> None:
        super().__init__(pools, number, seed)
        self._chunks, self._owners = pools.chunks, pools.owners["chunks"]
        self._held: list[Holding] = []

    def _hold(self, chunk: kvpool.Chunk, mark: float) -> None:
        held = Holding(self, mark, [chunk.index], chunk)
        self._owners.take(held.slots, held)
        self._held.append(held)

    def _take_slots(self) -> torch.Tensor | None:
        """Slots, entered as this user's."""
        slots: torch.Tensor | None = self.pools.allocator.alloc(CHUNK_TOKENS)
        if slots is not None:
            self.pools.owners["slots"].take(self._pages(slots), self)
        return slots

    def _give_slots(self, slots: torch.Tensor) -> None:
        self.pools.owners["slots"].give(self._pages(slots), self)
        self.pools.allocator.free(slots)

    def _pages(self, slots: torch.Tensor) -> set[int]:
        return {slot // self.pools.sizes.page_size for slot in slots.tolist()}

    def offload(self) -> None:
        """Moves K and V of some slots into a chunk."""
        chunk, slots = self._chunks.allocate(), self._take_slots()
        mark = self.mark()
        if chunk is not None:
            self._hold(chunk, mark)
            values = torch.full((CHUNK_TOKENS, HEADS, HEAD_DIM), mark, device=self.device)
            if slots is not None:
                self.pools.kv.set_kv_buffer(0, slots, values, values)
                values = self.pools.kv.gather_kv(0, slots)[0]
            copies = [chunk.copy_from(torch.stack([values, values]))]
            copies[0].wait()
        if slots is not None:
            self._give_slots(slots)

    def load(self) -> None:
        """Moves what is in a chunk into slots, and compares it."""
        slots = self._take_slots()
        if slots is None:
            return
        if self._held:
            held = self.random.choice(self._held)
            values = torch.empty(2, CHUNK_TOKENS, HEADS, HEAD_DIM, device=self.device)
            held.thing.copy_to(values).wait()
            self.pools.kv.set_kv_buffer(1, slots, values[0], values[1])
            found = self.pools.kv.gather_kv(1, slots)
            is_whole = all(bool(part.eq(held.mark).all()) for part in found)
            expect(is_whole, f"{self}: chunk {held.slots} has changed")
        self._give_slots(slots)

    def share(self) -> None:
        """Adds a reference and drops it."""
        if self._held:
            chunk = self.random.choice(self._held).thing
            with chunk.retain():
                expect(chunk.references == 2, f"{self}: {chunk.references} references")
            expect(chunk.references == 1, f"{self}: {chunk.references} references")

    def batch(self) -> None:
        """Takes several, all or nothing, and fills them."""
        chunks = self._chunks.allocate_batch(3)
        for chunk in chunks or []:
            mark = self.mark()
            self._hold(chunk, mark)
            chunk.tensor().fill_(mark)

    def give(self) -> None:
        """Frees a chunk."""
        if self._held:
            held = self.pop(self._held)
            expect(held.thing.tensor().eq(held.mark).all(), f"{self}: chunk {held.slots} has changed")
            self._owners.give(held.slots, held)
            self._chunks.free(held.thing)
            self.misuse("chunks", held.thing.release)

    def misuse_chunks(self) -> None:
        """Asks for what there cannot be."""
        expect(self._chunks.allocate_batch(self._chunks.num_chunks + 1) is None, "more chunks than there are")
        self.refused(ValueError, lambda: self._chunks.allocate_batch(-1))

    def finish(self) -> None:
        """Gives everything back."""
        while self._held:
            self.give()


class BufferUser(User):
    """Takes scratch buffers, alone and in batches."""

    actions = ("take", "take", "batch", "give", "give", "give")

    def __init__(self, pools: Pools, number: int, seed: int) -> None:
        super().__init__(pools, number, seed)
        self._buffers, self._owners = pools.buffers, pools.owners["buffers"]
        self._held: list[Holding] = []

    def _hold(self, buffer: kvpool.Buffer) -> None:
        tensor = buffer.tensor
        # Where it begins stands for all of it: buffers have memory of their own.
        held = Holding(self, self.mark(), [tensor.data_ptr()], buffer)
        self._owners.take(held.slots, held)
        tensor.fill_(held.mark)
        self._held.append(held)

    def _size(self) -> int:
        return self.random.randrange(1, 1 << self.random.randrange(1, 12))

    def take(self) -> None:
        """Takes one."""
        # The pool has no end, its users have.
        if len(self._held) < MOST_BUFFERS:
            self._hold(self._buffers.alloc((self._size(),), "float32"))

    def batch(self) -> None:
        """Takes several."""
        count = min(3, MOST_BUFFERS - len(self._held))
        for buffer in self._buffers.alloc_batch([((self._size(),), "float32") for _ in range(count)]):
            self._hold(buffer)

    def give(self) -> None:
        """Releases one, once."""
        if self._held:
            held = self.pop(self._held)
            expect(held.thing.tensor.eq(held.mark).all(), f"{self}: a buffer has changed")
            self._owners.give(held.slots, held)
            held.thing.release()
            self.refused(kvpool.StaleBufferError, held.thing.release)

    def finish(self) -> None:
        """Gives everything back."""
        while self._held:
            self.give()


class PageUser(User):
    """Takes pages of floats, until the pool has grown to its most."""

    actions = ("take", "take", "give", "give", "misuse_pages")

    def __init__(self, pools: Pools, number: int, seed: int) -> None:
        super().__init__(pools, number, seed)
        self._pages, self._owners = pools.pages, pools.owners["pages"]
        self._held: list[Holding] = []

    def take(self) -> None:
        """Takes a page. Each user has only so many, for the pool never shrinks."""
        page = self._pages.alloc() if len(self._held) < self.pools.sizes.pages // 2 else None
        if page is not None:
            held = Holding(self, self.mark(), [page])
            self._owners.take([page], held)
            self._pages.page(page).fill_(held.mark)
            self._held.append(held)

    def give(self) -> None:
        """Frees a page."""
        if self._held:
            held = self.pop(self._held)
            found = self._pages.page(held.slots[0])
            expect(found.eq(held.mark).all(), f"{self}: page {held.slots} has changed")
            self._owners.give(held.slots, held)
            self._pages.free(held.slots[0])

    def misuse_pages(self) -> None:
        """Frees and looks at what is not there."""
        self.misuse("pages", lambda: self._pages.free(1 << 20))
        self.refused(IndexError, lambda: self._pages.page(1 << 20))

    def finish(self) -> None:
        """Gives everything back."""
        while self._held:
            self.give()


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
