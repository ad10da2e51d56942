"""Requests of a planner with leased prefixes, on every device.

`tests/rust/histories/leased.rs` checks random histories by the contents of slots.
"""

from __future__ import annotations

from typing import Any

import devices
import pytest
import torch
from common import Fence, some

from kvpool import (
    BatchPlan,
    BatchPlanner,
    ConfigError,
    ReqToTokenPool,
    StaleBufferError,
    StateError,
    TokenToKVPoolAllocator,
)
from kvpool._kvpool import Lease, PrefixCache

pytestmark = pytest.mark.usefixtures("device")


class Scene:
    """A planner of four requests of 32 tokens on 64 slots, and a cache."""

    def __init__(self, page_size: int = 4) -> None:
        where = devices.current()
        self.table = ReqToTokenPool(4, 32, where)
        self.allocator = TokenToKVPoolAllocator(64, where, page_size, strict=True)
        self.planner = BatchPlanner(self.table, self.allocator, 4, 128)
        self.cache = PrefixCache(self.allocator, policy="lru")
        self.prompt = list(range(100, 110))

    def start(self, prompt: list[int] | None = None) -> tuple[int, Lease]:
        """Admits a request; its row and its lease."""
        prompt = self.prompt if prompt is None else prompt
        lease = self.cache.match(prompt, limit=len(prompt) - 1)
        [row] = some(self.table.alloc(1))
        some(self.planner.extend([row], [lease.length], [len(prompt)], prefixes=[lease]))
        return row, lease

    def row(self, row: int, length: int) -> list[int]:
        slots: list[int] = self.table.req_to_token[row, :length].cpu().tolist()
        return slots

    def plan(self, row: int, length: int) -> BatchPlan:
        """A step without new tokens, which brings the table up to date."""
        return some(self.planner.extend([row], [length], [length]))

    def in_use(self) -> int:
        return self.allocator.stats()["in_use"] - self.cache.cached_size()


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_prefix_is_leased_published_and_given_back(page_size: int) -> None:
    scene = Scene(page_size)
    row, lease = scene.start()
    slots = scene.row(row, 10)
    published = lease.publish(scene.prompt, row=row)
    whole = 10 // page_size * page_size
    assert (published.length, published.duplicates, lease.length) == (whole, 0, whole)
    assert published.slots.tolist() == slots[:whole]
    assert scene.cache.locked_size() == whole
    other, again = scene.start([*scene.prompt, 7])
    assert again.length == whole
    assert scene.row(other, whole) == slots[:whole]
    assert scene.planner.seq_len(other) == 11
    scene.planner.finish([row, other])
    assert (scene.cache.locked_size(), scene.cache.evictable_size(), scene.in_use()) == (0, whole, 0)
    for ended in (lease, again):
        with pytest.raises(StaleBufferError, match="released"):
            _ = ended.length


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("with_slots", [False, True])
def test_a_request_is_published_and_finished_in_one_call(page_size: int, with_slots: bool) -> None:
    scene = Scene(page_size)
    row, lease = scene.start()
    lease.publish(scene.prompt[:4], row=row)
    slots = scene.row(row, 10)[4:] if with_slots else None
    lease.finish(scene.prompt[4:], slots, row=row)
    whole = 10 // page_size * page_size
    assert (scene.cache.cached_size(), scene.cache.locked_size(), scene.in_use()) == (whole, 0, 0)
    assert scene.table.available_size() == 4
    assert lease.released
    scene.allocator.verify()
    again, found = scene.start([*scene.prompt, 7])
    assert found.length == whole
    found.finish(range(whole, 11), row=again)
    assert scene.in_use() == 0


def test_a_planner_keeps_what_its_caller_drops() -> None:
    scene = Scene()
    row, lease = scene.start()
    lease.publish(scene.prompt)
    lease.release()
    del lease
    assert scene.cache.locked_size() == 8
    assert scene.cache.evict(64) == 0
    scene.planner.finish([row])
    assert scene.cache.evict(64) == 8


def test_duplicates_are_freed_and_rows_rewritten_by_the_next_plan() -> None:
    scene = Scene()
    (first, one), (second, two) = scene.start(), scene.start()
    kept, freed = scene.row(first, 10), scene.row(second, 10)
    assert not set(kept) & set(freed)
    one.publish(scene.prompt, row=first)
    before = scene.allocator.available_size()
    published = two.publish(scene.prompt, row=second)
    assert (published.duplicates, published.slots.tolist()) == (8, kept[:8])
    assert scene.allocator.available_size() == before + 8
    plan = scene.plan(second, 10)
    assert scene.row(second, 10) == kept[:8] + freed[8:]
    pages = some(plan.host.block_table)[0, :3].tolist()
    assert [page * 4 for page in pages] == [kept[0], kept[4], freed[8]]
    scene.planner.finish([first, second])
    assert scene.in_use() == 0


def test_chunks_are_published_as_they_are_computed() -> None:
    scene = Scene()
    prompt = list(range(20))
    lease = scene.cache.match(prompt)
    [row] = some(scene.table.alloc(1))
    some(scene.planner.extend([row], [0], [10], prefixes=[lease]))
    assert lease.publish(prompt[:10]).length == 8
    some(scene.planner.extend([row], [10], [20]))
    assert lease.publish(prompt[8:20]).length == 20
    assert scene.cache.cached_len(prompt) == 20
    scene.planner.finish([row], [20])
    assert (scene.in_use(), scene.cache.stats()["nodes"]) == (0, 1)


def test_cut_requests_shorten_their_leases() -> None:
    scene = Scene()
    row, lease = scene.start(list(range(16)))
    lease.publish(list(range(16)))
    scene.planner.truncate([row], [8])
    assert (lease.length, scene.cache.locked_size(), scene.cache.evictable_size()) == (8, 8, 8)
    some(scene.planner.decode([row], [9]))
    with pytest.raises(ValueError, match="another owner"):
        scene.planner.truncate([row], [7])
    scene.planner.finish([row])
    assert (scene.in_use(), scene.cache.evictable_size()) == (0, 16)


def test_forked_requests_have_leases_of_their_own() -> None:
    scene = Scene()
    src, lease = scene.start()
    lease.publish(scene.prompt)
    [dst] = some(scene.table.alloc(1))
    some(scene.planner.fork(src, dst, 10))
    scene.planner.finish([src])
    assert scene.cache.locked_size() == 8
    assert scene.allocator.stats()["shared"] == 0
    scene.planner.finish([dst])
    assert (scene.cache.locked_size(), scene.in_use()) == (0, 0)


def test_leases_end_behind_fences() -> None:
    scene = Scene()
    row, lease = scene.start()
    lease.publish(scene.prompt)
    fence = Fence()
    scene.planner.finish([row], after=fence)
    assert (scene.cache.locked_size(), scene.cache.evict(64)) == (8, 0)
    fence.done = True
    scene.allocator.stats()
    assert (scene.cache.locked_size(), scene.in_use()) == (0, 0)


@pytest.mark.parametrize("then", ["finish", "truncate", "a later fence"])
def test_a_lease_that_was_cut_behind_a_fence_ends_behind_it(then: str) -> None:
    scene = Scene()
    row, lease = scene.start(list(range(16)))
    lease.publish(list(range(16)))
    fence, later = Fence(), Fence()
    scene.planner.truncate([row], [12], after=fence)
    if then == "truncate":
        scene.planner.truncate([row], [4])
    else:
        scene.planner.finish([row], after=later if then == "a later fence" else None)
    later.done = True
    # The work before the fence may still read all of it.
    assert (scene.cache.locked_size(), scene.cache.evict(64)) == (16, 0)
    fence.done = True
    scene.allocator.stats()
    assert scene.cache.locked_size() == (4 if then == "truncate" else 0)
    if then == "truncate":
        assert lease.length == 4
        lease.publish([])
        scene.planner.finish([row])
    assert (scene.cache.evictable_size(), scene.in_use()) == (16, 0)


def test_a_short_planner_evicts() -> None:
    scene = Scene()
    slots = some(scene.allocator.alloc(60))
    scene.cache.insert(list(range(60)), slots)
    row, lease = scene.start(list(range(500, 520)))
    assert (lease.length, scene.cache.cached_size()) == (0, 44)
    scene.planner.finish([row])


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"prefixes": []}, "1 rows and 0 prefixes"),
        ({"prefixes": [None], "prefix_slots": [None]}, "not from both"),
        ({"prefix_lens": [4]}, "has 0 tokens for a prefix of 4"),
        ({"row": 9}, "row 9"),
        ({"bound": True}, "request row 1 already"),
        ({"foreign": True}, "another allocator"),
        ({"released": True}, "released"),
    ],
)
def test_wrong_leases_are_refused_and_stay(wrong: dict[str, Any], text: str) -> None:
    scene = Scene()
    lease = Scene().cache.match([1]) if wrong.get("foreign") else scene.cache.match([1])
    [row] = some(scene.table.alloc(1))
    if wrong.get("bound"):
        some(scene.planner.extend([row], [0], [1], prefixes=[lease]))
        [row] = some(scene.table.alloc(1))
    if wrong.get("released"):
        lease.release()
    with pytest.raises((ConfigError, StateError, StaleBufferError, IndexError), match=text):
        scene.planner.extend(
            [wrong.get("row", row)],
            wrong.get("prefix_lens", [0]),
            [6],
            wrong.get("prefix_slots"),
            prefixes=wrong.get("prefixes", [lease]),
        )
    if not {"bound", "foreign", "released"} & set(wrong):
        some(scene.planner.extend([row], [0], [6], prefixes=[lease]))


def test_a_request_may_name_its_own_lease_with_every_chunk() -> None:
    scene = Scene()
    row, lease = scene.start()
    some(scene.planner.extend([row], [10], [13], prefixes=[lease]))
    assert lease.publish([*scene.prompt, 1, 2, 3], row=row).length == 12
    [other] = some(scene.table.alloc(1))
    new = scene.cache.match([*scene.prompt, 9], limit=10)
    some(scene.planner.extend([row, other], [13, 8], [14, 11], prefixes=[lease, new]))
    assert [scene.planner.seq_len(one) for one in (row, other)] == [14, 11]
    for prefixes, said in (
        ([new], "that of request row 2 already"),
        ([scene.cache.match([1])], "continues with its own lease or none"),
    ):
        with pytest.raises((ConfigError, StateError), match=said):
            scene.planner.extend([row], [14], [15], prefixes=prefixes)
    # Its lengths are checked as without a lease.
    with pytest.raises(ConfigError, match="has 14 tokens with slots"):
        scene.planner.extend([row], [12], [15], prefixes=[lease])
    lease.release()
    with pytest.raises(StaleBufferError, match="released"):
        scene.planner.extend([row], [14], [15], prefixes=[lease])
    some(scene.planner.extend([row], [14], [15]))
    scene.planner.finish([row, other])
    assert (scene.cache.locked_size(), scene.in_use()) == (0, 0)


def test_a_lease_of_an_earlier_request_of_a_row_is_not_its_own() -> None:
    scene = Scene()
    row, lease = scene.start()
    scene.table.free(row)
    while some(scene.table.alloc(1)) != [row]:
        pass
    some(scene.planner.extend([row], [0], [5]))
    with pytest.raises((ConfigError, StaleBufferError)):
        scene.planner.extend([row], [5], [6], prefixes=[lease])
    scene.planner.finish([row])


def test_entries_of_prefixes_are_leases() -> None:
    scene = Scene()
    [row] = some(scene.table.alloc(1))
    entries: list[Any] = [1, [1], torch.tensor([1])]
    for entry in entries:
        with pytest.raises(TypeError, match="must be a Lease or None"):
            scene.planner.extend([row], [0], [4], prefixes=[entry])


def test_wrong_publications_of_requests_change_nothing() -> None:
    scene = Scene()
    row, lease = scene.start()
    free = scene.cache.match([1])
    for call, text in (
        (lambda: lease.publish([*scene.prompt, 5]), "has 10 tokens with slots"),
        (lambda: lease.publish(scene.prompt, row=row + 1), f"lease of request row {row}"),
        (
            lambda: lease.publish(
                scene.prompt[:4], [4, 5, 6, 7] if scene.row(row, 1) != [4] else [8, 9, 10, 11]
            ),
            "not those",
        ),
        (lambda: lease.finish(scene.prompt, scene.row(row, 10)), f"give row={row}, and it finishes"),
        (lambda: lease.finish(scene.prompt, row=row + 1), f"lease of request row {row}"),
        (lambda: lease.finish([*scene.prompt, 5], row=row), "has 10 tokens with slots"),
        (lambda: free.finish([1], row=row), "no planner has"),
        (lambda: free.finish([1]), "slots are needed"),
        (lambda: free.publish([1], row=row), "no planner has.*write the slots published"),
        (lambda: free.publish([1]), "slots are needed"),
    ):
        with pytest.raises((ConfigError, StateError), match=text):
            call()
    assert (lease.length, scene.cache.cached_size()) == (0, 0)
    assert lease.publish(scene.prompt, scene.row(row, 10)).length == 8
    scene.planner.finish([row])


def test_clearing_the_allocator_ends_leases_of_requests() -> None:
    scene = Scene()
    row, lease = scene.start()
    lease.publish(scene.prompt)
    scene.allocator.clear()
    with pytest.raises(StaleBufferError, match="cleared"):
        lease.publish([1], row=row)
    assert scene.cache.cached_size() == 0
    scene.cache.verify()


class ClearingFence:
    """A fence that has passed. The first query clears the allocator and takes all of its slots."""

    def __init__(self, allocator: TokenToKVPoolAllocator) -> None:
        self.allocator = allocator
        self.taken: torch.Tensor | None = None

    def query(self) -> bool:
        if self.taken is None:
            self.allocator.clear()
            self.taken = some(self.allocator.alloc(60))
        return True


@pytest.mark.parametrize("call", ["extend", "fork"])
def test_no_request_begins_with_a_prefix_of_before_a_clear(call: str) -> None:
    """Also if the clear comes while the call asks fences: the slots of the prefix have new owners then."""
    scene = Scene()
    row, lease = scene.start()
    lease.publish(scene.prompt, row=row)
    other = scene.cache.match(scene.prompt)
    [new] = some(scene.table.alloc(1))
    scene.allocator.free(some(scene.allocator.alloc(4)), after=ClearingFence(scene.allocator))
    with pytest.raises(StaleBufferError, match="the allocator was cleared"):
        if call == "extend":
            scene.planner.extend([new], [8], [10], prefixes=[other])
        else:
            scene.planner.fork(row, new, 8)
    assert scene.allocator.stats()["in_use"] == 60
    assert scene.planner.seq_len(new) == 0
    scene.allocator.verify()
