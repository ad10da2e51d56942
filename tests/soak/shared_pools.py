"""Pools that several users share, and who has what of them: a place in two hands is found at once."""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch

import kvpool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

MARKS = 1 << 12
HEADS, HEAD_DIM = 2, 8


class DisagreementError(AssertionError):
    """The pool says otherwise than who uses it."""


def expect(is_so: object, words: str) -> None:
    """Raises `DisagreementError` with `words` unless something holds."""
    if not is_so:
        raise DisagreementError(words)


class Owners:
    """The owner of each unit of a pool."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._owners: dict[int, object] = {}

    def take(self, places: Iterable[int], owner: object) -> None:
        """Enters places that were handed out; each call needs an `owner` of its own."""
        for place in places:
            # One operation, so that of two threads with the same place one finds the other.
            other = self._owners.setdefault(place, owner)
            expect(other is owner, f"{self._what} {place} was handed out to {owner}, but {other} has it")

    def give(self, places: Iterable[int], owner: object) -> None:
        """Removes units from the record, before they are freed."""
        for place in places:
            other = self._owners.pop(place, None)
            expect(other is owner, f"{self._what} {place} is given back by {owner}, but {other} has it")

    def __len__(self) -> int:
        return len(self._owners)


@dataclass(frozen=True)
class Sizes:
    """How large the pools are, and where.

    Attributes:
        device: Where they are; chunks are offloaded to the host in any case.
        page_size: Slots in a page.
        need_sort: Lowest slots first.
        strict: Whether bad frees raise.
        slots, rows, columns, chunks, pages, track_slots: How many of each.
        users: For how many users there are working slots of states.
    """

    device: str = "cpu"
    page_size: int = 1
    need_sort: bool = True
    strict: bool = False
    slots: int = 1024
    rows: int = 24
    columns: int = 160
    chunks: int = 12
    pages: int = 16
    track_slots: int = 6
    users: int = 8


class Pools:
    """One pool of each kind, and who has what of them."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        device, page_size, strict = sizes.device, sizes.page_size, sizes.strict
        self.allocator = kvpool.TokenToKVPoolAllocator(
            sizes.slots, device, page_size, sizes.need_sort, strict=strict
        )
        self.kv = kvpool.KVPool(sizes.slots, 2, HEADS, HEAD_DIM, device, "float32", page_size=page_size)
        self.table = kvpool.ReqToTokenPool(sizes.rows, sizes.columns, device, strict=strict)
        self.planner = kvpool.BatchPlanner(self.table, self.allocator, 8, 1024)
        self.states = kvpool.GDNPool(
            sizes.users, 2, 2, 8, 8, 16, 4, device, "float32", sizes.track_slots, strict=strict
        )
        self.chunks = kvpool.ChunkPool(sizes.chunks, (2, 16, HEADS, HEAD_DIM), "float32", strict=strict)
        self.buffers = kvpool.BufferPool(device)
        self.pages = kvpool.PagePool(32, sizes.pages, device=device, grow=4, strict=strict)
        names = ("slots", "rows", "tracks", "chunks", "buffers", "pages")
        self.owners = {name: Owners(name.removesuffix("s")) for name in names}

    def check(self) -> None:
        """Checks the invariants that hold at any time."""
        pools = (self.allocator, self.table, self.states, self.chunks, self.pages, self.buffers)
        for pool in pools:
            stats = pool.stats()
            total = stats["available"] + stats["in_use"]
            expect(total == stats["capacity"], f"{type(pool).__name__} does not add up: {stats}")
        self.allocator.verify()

    def check_returned(self, users: Sequence[User]) -> None:
        """Checks the invariants that hold when all users are finished."""
        self.kv.check()
        self.check()
        pools: dict[str, Any] = {
            "slots": self.allocator,
            "rows": self.table,
            "tracks": self.states,
            "chunks": self.chunks,
            "pages": self.pages,
        }
        for name, pool in pools.items():
            stats = pool.stats()
            expect(not stats["in_use"], f"{stats['in_use']} {name} were not given back")
            bad_frees = sum(user.bad_frees.get(name, 0) for user in users)
            dropped = stats["dropped_frees"]
            expect(dropped == bad_frees, f"{bad_frees} bad frees of {name}, {dropped} dropped")
        expect(not self.buffers.in_use_count, f"{self.buffers.in_use_count} buffers were not given back")
        expect(self.planner.stats()["tokens"] == 0, f"the planner has {self.planner.stats()}")
        expect(not any(map(len, self.owners.values())), "somebody has something that no pool has given")


class DelayedFence:
    """A fence that passes after some queries, and then takes the slots behind it off the record."""

    def __init__(self, queries: int, give: Callable[[], None]) -> None:
        self._queries = queries
        self._give: Callable[[], None] | None = give
        self._lock = threading.Lock()

    def query(self) -> bool:
        # Once this returns True, the slots may be handed out again, so they must be off the record before.
        with self._lock:
            self._queries -= 1
            if self._queries > 0:
                return False
            give, self._give = self._give, None
            if give is not None:
                give()
            return True


@dataclass(eq=False)
class Holding:
    """The units that one call handed out, and the mark that is stored there."""

    user: User
    mark: float
    slots: list[int] = field(default_factory=list)
    thing: Any = None

    def __repr__(self) -> str:
        return f"{self.user}"


class User:
    """Does one random thing with its pool a step.

    Attributes:
        owned: Which owners it is entered among, of `Pools.owners`.
        held: What it has.
        operations: Steps so far.
        bad_frees: Frees that had to be dropped, by what was freed.
    """

    actions: ClassVar[tuple[str, ...]]
    owned: ClassVar[str] = "slots"

    def __init__(self, pools: Pools, number: int, seed: int) -> None:
        self.pools = pools
        self.device = pools.sizes.device
        self.number = number
        self.operations = 0
        self.bad_frees: dict[str, int] = {}
        self.random = random.Random(f"{seed} {number} {type(self).__name__}")
        self.owners = pools.owners[self.owned]
        self.held: list[Holding] = []
        self._serial = 0

    def step(self) -> None:
        getattr(self, self.random.choice(self.actions))()
        self.operations += 1

    def finish(self) -> None:
        """Gives everything back."""
        while self.held:
            self.give()

    def places(self, slots: Iterable[int]) -> set[int]:
        """The recorded owners of some slots."""
        return set(slots)

    def pages(self, slots: Iterable[int]) -> set[int]:
        return {slot // self.pools.sizes.page_size for slot in slots}

    def hold(self, slots: list[int], thing: Any = None, mark: float | None = None) -> Holding:  # noqa: ANN401
        """Enters what a call handed out."""
        held = Holding(self, self.mark() if mark is None else mark, slots, thing)
        self.owners.take(self.places(slots), held)
        self.held.append(held)
        return held

    def check(self, held: Holding) -> None:
        """Compares what is stored with the mark."""

    def give_back(self, held: Holding) -> None:
        """Frees what is no longer entered among the owners."""
        raise NotImplementedError

    def give(self) -> None:
        """Gives one holding back, whose mark must be unchanged."""
        if self.held:
            held = self.pop(self.held)
            self.check(held)
            self.owners.give(self.places(held.slots), held)
            self.give_back(held)

    def mark(self) -> float:
        """A number that no other user has, and this one had long ago."""
        self._serial = (self._serial + 1) % MARKS
        return float(self.number * MARKS + self._serial + 1)

    def misuse(self, what: str, free: Callable[[], object]) -> None:
        """Frees what is not there: dropped and counted, or refused where the pool is strict."""
        if not self.pools.sizes.strict:
            free()
            self.bad_frees[what] = self.bad_frees.get(what, 0) + 1
            return
        self.refused(kvpool.IndexOwnershipError, free)

    @staticmethod
    def refused(kind: type[Exception], call: Callable[[], object]) -> None:
        try:
            call()
        except kind:
            return
        raise DisagreementError(f"{kind.__name__} was not raised")

    def on_device(self, values: Any) -> torch.Tensor:  # noqa: ANN401
        """Ints as a tensor on the device of the pools."""
        return torch.tensor(values).to(self.device)

    def pop(self, held: list[Any]) -> Any:  # noqa: ANN401
        return held.pop(self.random.randrange(len(held)))

    def __repr__(self) -> str:
        return f"{type(self).__name__} {self.number}"
