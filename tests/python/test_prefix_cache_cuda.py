"""PrefixCache on a GPU: a failure at every driver call of its calls, and of a planner's with leases."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import devices
import pytest
import torch
from common import Fence, failing, some
from devices import to_current

from kvpool import BatchPlanner, GDNPool, PrefixCache, ReqToTokenPool, TokenToKVPoolAllocator

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from software import Driver

    from kvpool import Lease

pytestmark = pytest.mark.cuda

SIZE = 64


@pytest.fixture(autouse=True)
def _on_cuda() -> Iterator[None]:
    with devices.on("cuda"):
        yield


class Scene:
    """A cache with a prompt of sixteen tokens; a request goes on from half of it, another one does not."""

    def __init__(self, page_size: int, *, has_states: bool) -> None:
        self.allocator = TokenToKVPoolAllocator(SIZE, "cuda", page_size, strict=True)
        self.table = ReqToTokenPool(4, 40, "cuda", strict=True)
        self.planner = BatchPlanner(self.table, self.allocator, 4, 128)
        self.states = GDNPool(4, 1, 1, 2, 2, 4, 3, "cuda", max_track_slots=3) if has_states else None
        self.cache = PrefixCache(self.allocator, states=self.states, policy="lru", events=True)
        self.prompt = list(range(100, 116))
        slots, state = some(self.allocator.alloc(16)), 1 if has_states else None
        lease = self.cache.match(self.prompt)
        lease.publish(self.prompt[:8], slots[:8], state=state)
        lease.publish(self.prompt[8:], slots[8:], state=state)
        lease.release()
        self.row, self.lease = self.start(self.prompt[:8] + [7] * 9)
        self.other, self.miss = self.start([5] * 9)
        self.free = some(self.table.alloc())[0]
        self.rows = [self.row, self.other, self.free]
        self.kept = some(self.allocator.alloc(9)).tolist()
        self.by_hand = self.cache.match([9] * 9)
        self.again = self.cache.match([*self.prompt, 7, 7], limit=17)
        self.room = self.allocator.available_size()
        # Values that only the GPU has.
        self.asked, self.mine, self.theirs, self.slots = (
            to_current(torch.tensor(values, dtype=torch.int32))
            for values in (self.prompt, [9] * 9, [5] * 9, self.kept)
        )

    def start(self, prompt: list[int]) -> tuple[int, Lease]:
        lease = self.cache.match(prompt, limit=len(prompt) - 1)
        [row] = some(self.table.alloc())
        some(self.planner.extend([row], [lease.length], [len(prompt)], prefixes=[lease]))
        return row, lease

    def observed_state(self) -> Any:  # noqa: ANN401
        """The state that a failed call must not change. Pages evicted for the call stay evicted."""
        leases = [repr(lease) for lease in (self.lease, self.miss, self.by_hand, self.again)]
        numbers = self.cache.stats()
        stats = {name: numbers[name] for name in ("lookups", "published", "duplicates", "locked")}
        rows = [self.planner.seq_len(row) for row in (self.row, self.other, self.free)]
        in_use = self.allocator.stats()["in_use"] - numbers["cached"]
        return leases, stats, in_use, rows

    def check(self) -> None:
        """Every slot has the owner that the statistics count."""
        self.allocator.verify()
        self.cache.verify()
        stats, cache = self.allocator.stats(), self.cache
        assert stats["available"] + stats["in_use"] == stats["capacity"]
        assert stats["cached"] == cache.cached_size() == cache.evictable_size() + cache.locked_size()
        assert stats["dropped_frees"] == 0
        if self.states is not None:
            assert self.states.stats()["in_use"] == self.cache.stats()["snapshots"]

    def end(self, kept: list[int]) -> None:
        """Gives everything back: nothing was lost."""
        for row in self.rows:
            self.planner.finish([row])
        self.by_hand.release()
        self.again.release()
        self.allocator.free(kept)
        self.check()
        assert self.cache.locked_size() == 0
        assert self.allocator.stats()["in_use"] == self.cache.cached_size()
        self.cache.clear()
        assert self.allocator.available_size() == SIZE
        assert self.table.available_size() == 4
        assert self.states is None or self.states.stats()["in_use"] == 0


def tokens_in_full_pages(scene: Scene) -> int:
    """Tokens of nine that fill pages."""
    return 9 // scene.allocator.page_size * scene.allocator.page_size


Call = tuple["Callable[[Scene], object]", "Callable[[Scene, Any], list[int]]"]


def as_kept(scene: Scene, _answer: object) -> list[int]:
    """The slots that are left to free by hand: all of them."""
    return scene.kept


def after_publication(scene: Scene, _answer: object) -> list[int]:
    assert scene.by_hand.length == tokens_in_full_pages(scene)
    return scene.kept[tokens_in_full_pages(scene) :]


def after_finish(scene: Scene, _answer: object) -> list[int]:
    assert scene.by_hand.released
    assert scene.cache.cached_len([9] * 9) == (0 if scene.states else tokens_in_full_pages(scene))
    return []


def after_match(scene: Scene, lease: Lease) -> list[int]:
    assert lease.length == 16
    assert lease.slots.tolist() == scene.again.slots.tolist()
    lease.release()
    return scene.kept


def equal(expected: Callable[[Scene], object]) -> Callable[[Scene, Any], list[int]]:
    def check(scene: Scene, answer: object) -> list[int]:
        assert answer == expected(scene)
        return scene.kept

    return check


def publish_duplicates(scene: Scene) -> object:
    """The slots of a request give way to those of the cache, in its row, too."""
    return scene.miss.publish(scene.theirs, row=scene.other)


def after_duplicates(scene: Scene, published: Any) -> list[int]:  # noqa: ANN401
    assert published.length == scene.miss.length == tokens_in_full_pages(scene)
    some(scene.planner.extend([scene.other], [9], [9]))
    row = scene.table.req_to_token[scene.other, : tokens_in_full_pages(scene)]
    assert torch.equal(row.cpu(), published.slots.cpu())
    return scene.kept


def extend(scene: Scene) -> object:
    return scene.planner.extend([scene.free], [16], [18], prefixes=[scene.again])


def after_extension(scene: Scene, plan: object) -> list[int]:
    assert plan is not None
    assert (scene.again.length, scene.planner.seq_len(scene.free)) == (16, 18)
    row = scene.table.req_to_token[scene.free, :16].cpu()
    assert torch.equal(row, scene.again.slots.cpu())
    return scene.kept


def after_fork(scene: Scene, answer: object) -> list[int]:
    assert answer is not None
    assert scene.planner.seq_len(scene.free) == 9
    rows = scene.table.req_to_token[[scene.row, scene.free], :8].cpu()
    assert torch.equal(rows[0], rows[1])
    return scene.kept


def after_truncation(scene: Scene, _answer: object) -> list[int]:
    assert (scene.planner.seq_len(scene.row), scene.lease.length) == (4, 4)
    return scene.kept


def after_restore(scene: Scene, _answer: object) -> list[int]:
    assert scene.lease.length == 8
    return scene.kept


def alloc_and_evict(scene: Scene) -> object:
    """More than is free: a part of the prompt goes."""
    return scene.allocator.alloc(scene.room + 8)


CALLS: dict[str, Call] = {
    "match": (lambda scene: scene.cache.match(scene.asked), after_match),
    "slots": (lambda scene: scene.again.slots, lambda scene, slots: [*scene.kept, *slots.tolist()[16:]]),
    "publish": (lambda scene: scene.by_hand.publish([9] * 9, scene.kept), after_publication),
    "publish from the GPU": (
        lambda scene: scene.by_hand.publish(scene.mine, scene.slots),
        after_publication,
    ),
    "publish a row": (publish_duplicates, after_duplicates),
    "publish a state": (
        lambda scene: scene.by_hand.publish([9] * 9, scene.kept, state=1 if scene.states else None),
        after_publication,
    ),
    "finish": (lambda scene: scene.by_hand.finish([9] * 9, scene.kept), after_finish),
    "finish from the GPU": (
        lambda scene: scene.by_hand.finish(scene.mine, scene.slots),
        after_finish,
    ),
    "insert": (
        lambda scene: scene.cache.insert(scene.mine, scene.slots),
        lambda scene, _: scene.kept[tokens_in_full_pages(scene) :],
    ),
    "restore": (lambda scene: scene.lease.restore(2) if scene.states else None, after_restore),
    "evict": (lambda scene: scene.cache.evict(8), equal(lambda _: 8)),
    "clear": (lambda scene: scene.cache.clear(), as_kept),
    "explain": (
        lambda scene: [part.end for part in scene.cache.explain(scene.asked)],
        equal(lambda _: [16]),
    ),
    "alloc": (alloc_and_evict, lambda scene, slots: [*scene.kept, *some(slots).tolist()]),
    "extend": (extend, after_extension),
    "truncate": (lambda scene: scene.planner.truncate([scene.row], [4]), after_truncation),
    "fork": (lambda scene: scene.planner.fork(scene.row, scene.free, 9), after_fork),
    "release": (lambda scene: scene.by_hand.release(), as_kept),
}


# Calls that have nothing to ask of the driver.
QUIET = {"publish", "finish", "evict", "clear", "truncate", "release"}
# Calls for which the prompt is evictable.
EVICTING = {"alloc", "evict"}


@pytest.mark.parametrize(("page_size", "has_states"), [(1, False), (4, True)])
@pytest.mark.parametrize("name", CALLS)
def test_a_call_whose_driver_call_fails_loses_nothing_and_works_again(
    driver: Driver, name: str, page_size: int, *, has_states: bool
) -> None:
    call, check = CALLS[name]
    answers: list[Any] = []

    def make() -> Scene:
        scene = Scene(page_size, has_states=has_states)
        if name in EVICTING:
            scene.again.release()
        return scene

    def work() -> None:
        answers[:] = [call(scene)]

    scene, failures = make(), 0
    before = scene.observed_state()
    for error in failing(driver, work):
        if error is not None:
            failures += 1
            assert "failed with CUDA_ERROR" in str(error)
            scene.check()
            assert scene.observed_state() == before
            work()
        scene.check()
        scene.end(check(scene, answers.pop()))
        scene = make()
        before = scene.observed_state()
    needs_states = name in {"restore", "publish a state"}
    assert (failures == 0) == (name in QUIET or (needs_states and not has_states))


@pytest.mark.parametrize("fenced", [False, True])
def test_a_request_that_ends_in_a_failure_gives_its_lease_back(
    driver: Driver, caplog: pytest.LogCaptureFixture, *, fenced: bool
) -> None:
    scene, fence = Scene(4, has_states=True), Fence()

    def work() -> None:
        scene.planner.finish([scene.row, scene.other], after=fence if fenced else None)

    for error in failing(driver, work):
        assert error is None
        fence.done = True
        scene.allocator.stats()
        assert (scene.lease.released, scene.miss.released) == (True, True)
        scene.rows = [scene.free]
        scene.end(scene.kept)
        scene, fence = Scene(4, has_states=True), Fence()
    assert "zeroed when they are handed out again" in caplog.text
