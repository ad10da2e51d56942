"""Requests in a waiting queue, for which a prefix cache keeps what they will find.

`tests/rust/histories/prefixes.rs` compares random histories with a naive model.
"""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any, cast

import devices
import pytest

import kvpool
from kvpool import ArgumentError, GDNPool, PrefixCache, StateError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpool.typing import Policy

pytestmark = pytest.mark.usefixtures("device")


class Scene:
    """A cache in pages of one slot."""

    def __init__(self, *, policy: Policy = "lru", tracks: int | None = None) -> None:
        self.allocator = kvpool.TokenToKVPoolAllocator(64, devices.current())
        self.states = (
            None
            if tracks is None
            else GDNPool(4, 1, 1, 2, 2, 4, 3, devices.current(), max_track_slots=tracks)
        )
        self.cache = PrefixCache(self.allocator, states=self.states, policy=policy)

    def run(self, tokens: Sequence[int], state: int | None = None) -> None:
        """Runs a request."""
        with self.cache.match(tokens) as lease:
            new = tokens[lease.length :]
            slots = self.allocator.alloc(len(new))
            assert slots is not None
            lease.publish(new, slots, state=state)

    def evict(self, count: int) -> None:
        self.cache.evict(count)
        self.cache.verify()

    def lens(self, *prompts: Sequence[int]) -> list[int]:
        return [self.cache.cached_len(prompt) for prompt in prompts]


OLD, NEW = [1, 2, 3], [7, 8, 9]


@pytest.mark.parametrize("policy", ["adaptive", "lru", "fifo", "lfu", "slru", "priority"])
def test_what_a_waiting_request_needs_goes_last(policy: Policy) -> None:
    scene = Scene(policy=policy)
    scene.run(OLD)
    scene.run(NEW)
    request = scene.cache.add_waiting([*OLD, 4])
    assert (request.length, request.rank, scene.cache.stats()["waiting"]) == (3, 0, 1)
    scene.evict(3)
    assert scene.lens(OLD, NEW) == [3, 0]
    # Nothing is locked.
    assert scene.cache.evictable_size() == 3
    scene.evict(1)
    assert scene.lens(OLD) == [2]
    scene.run(NEW)
    scene.evict(3)
    assert scene.lens(OLD, NEW) == [2, 0], "the request needs what is left"
    request.remove()
    request.remove()
    assert scene.cache.stats()["waiting"] == 0
    scene.run(NEW)
    scene.evict(2)
    assert scene.lens(OLD, NEW) == [0, 3]


def test_the_last_request_in_the_queue_loses_first() -> None:
    scene = Scene()
    prompts = [[1, 2], [3, 4], [5, 6], [7, 8]]
    for prompt in prompts:
        scene.run(prompt)
    ranks = [0, 1, 0, -1]
    queue = [scene.cache.add_waiting(prompt, rank=rank) for prompt, rank in zip(prompts, ranks, strict=True)]
    assert [request.rank for request in queue] == ranks
    order = []
    for _ in prompts:
        scene.evict(2)
        order += [prompt for prompt in prompts if scene.lens(prompt) == [0] and prompt not in order]
    assert order == [[3, 4], [5, 6], [1, 2], [7, 8]]


def test_what_several_need_counts_as_of_the_first() -> None:
    scene = Scene()
    scene.run(OLD)
    scene.run(NEW)
    first, _second, third = (scene.cache.add_waiting(prompt) for prompt in (OLD, NEW, OLD))
    scene.evict(3)
    assert scene.lens(OLD, NEW) == [3, 0]
    first.remove()
    scene.run(NEW)
    assert third.length == 3
    # The second request was not looked up again.
    scene.evict(3)
    assert scene.lens(OLD, NEW) == [3, 0]


def test_an_update_finds_what_was_published_meanwhile() -> None:
    scene = Scene()
    request = scene.cache.add_waiting(OLD)
    assert request.length == 0
    scene.run([*OLD, 4])
    scene.run(NEW)
    assert request.length == 0
    assert request.update(OLD) == request.length == 3
    scene.evict(4)
    assert scene.lens([*OLD, 4], NEW) == [3, 0]
    # Its context was edited meanwhile.
    scene.run(NEW)
    assert request.update([*OLD[:1], 9]) == 1
    scene.evict(5)
    assert scene.lens(OLD, NEW) == [1, 0]


def test_a_namespace_is_part_of_what_is_needed() -> None:
    scene = Scene()
    scene.run(OLD)
    request = scene.cache.add_waiting(OLD, namespace="a")
    assert request.length == 0
    scene.run(NEW)
    scene.evict(3)
    assert scene.lens(OLD, NEW) == [0, 3]


def test_what_is_retained_goes_after_what_is_needed_and_what_has_ended_is_kept_if_it_is_needed() -> None:
    scene = Scene()
    with scene.cache.match(OLD, session=scene.cache.session("a")) as lease:
        slots = scene.allocator.alloc(3)
        assert slots is not None
        lease.publish(OLD, slots)
    request = scene.cache.add_waiting(OLD)
    scene.cache.session("a").end()
    scene.run(NEW)
    scene.run([5])
    with scene.cache.match([5]) as lease:
        scene.cache.pin(lease)
    scene.evict(3)
    assert scene.lens(OLD, NEW, [5]) == [3, 0, 1]
    scene.evict(3)
    assert scene.lens(OLD, [5]) == [0, 1]
    assert request.length == 3


def test_the_snapshot_from_which_a_request_will_resume_is_kept() -> None:
    scene = Scene(tracks=2)
    scene.run(OLD, state=1)
    scene.run(NEW, state=1)
    request = scene.cache.add_waiting([*OLD, 4])
    assert request.length == 3
    scene.run([5], state=1)
    scene.cache.verify()
    assert scene.lens(OLD, NEW, [5]) == [3, 0, 1]
    # Without another snapshot to take, a request that runs comes first.
    other = scene.cache.add_waiting([5])
    scene.run([6], state=1)
    assert scene.lens(OLD, [5], [6]) == [3, 0, 1]
    assert (request.update(OLD), other.update([5])) == (3, 0)


def test_a_request_needs_the_snapshot_before_the_one_that_was_evicted() -> None:
    scene = Scene(tracks=3)
    scene.run([1], state=1)
    scene.run([1, 2, 3], state=1)
    scene.run(NEW, state=1)
    request = scene.cache.add_waiting([1, 2, 3])
    assert request.length == 3
    scene.evict(4)
    assert scene.lens([1, 2, 3], NEW) == [1, 0]
    scene.run([5], state=1)
    # Token 2 is left of it, behind the snapshot that the request needs.
    scene.evict(2)
    assert scene.lens([1, 2, 3], [5]) == [1, 0]


def test_the_limit_is_that_of_the_match_to_come() -> None:
    scene = Scene(tracks=2)
    scene.run([1, 2], state=1)
    scene.run([1, 2, 3], state=1)
    request = scene.cache.add_waiting([1, 2, 3], limit=2)
    assert request.length == 2
    for other in ([7], [8]):
        scene.run(other, state=1)
    assert scene.cache.match([1, 2, 3], limit=2).length == 2
    assert (request.update([1, 2, 3], limit=1), request.update([1, 2, 3], limit=2)) == (0, 2)


def test_a_clear_ends_the_needs_and_not_the_wait() -> None:
    scene = Scene()
    scene.run(OLD)
    request = scene.cache.add_waiting(OLD)
    scene.allocator.clear()
    assert scene.cache.stats()["waiting"] == 1
    scene.run(NEW)
    scene.run([5])
    scene.evict(3)
    assert scene.lens(NEW, [5]) == [0, 1]
    scene.run(OLD)
    assert request.update(OLD) == 3
    later = scene.cache.add_waiting([5])
    scene.evict(1)
    assert scene.lens(OLD, [5]) == [3, 0], "it is still before those that came later"
    scene.cache.clear()
    assert (request.update(OLD), later.update([5]), scene.cache.stats()["waiting"]) == (0, 0, 2)


def test_a_request_that_is_dropped_waits_no_more_and_keeps_no_cache() -> None:
    scene = Scene()
    request = scene.cache.add_waiting(OLD)
    assert repr(request) == "WaitingRequest(length=0, rank=0)"
    del request
    assert scene.cache.stats()["waiting"] == 0
    scene.cache.add_waiting(OLD)
    assert scene.cache.stats()["waiting"] == 0
    request = scene.cache.add_waiting(OLD)
    cache, reference = scene.cache, weakref.ref(scene.cache)
    del scene, cache, request
    gc.collect()
    assert reference() is None


def test_rejects_bad_arguments() -> None:
    scene = Scene()
    scene.run(OLD)
    with pytest.raises(ArgumentError, match="-1"):
        scene.cache.add_waiting([1, -1])
    with pytest.raises(TypeError):
        scene.cache.add_waiting(cast("Any", [1.5]))
    with pytest.raises(TypeError):
        scene.cache.add_waiting(OLD, rank=cast("Any", 1.5))
    with pytest.raises(OverflowError):
        scene.cache.add_waiting(OLD, rank=1 << 63)
    with pytest.raises(ArgumentError, match="limit"):
        scene.cache.add_waiting(OLD, limit=-1)
    with pytest.raises(TypeError):
        scene.cache.add_waiting(OLD, namespace=cast("Any", 1.5))
    assert scene.cache.stats()["waiting"] == 0
    request = scene.cache.add_waiting(OLD)
    with pytest.raises(ArgumentError, match="-1"):
        request.update([-1, 2, 3])
    with pytest.raises(ArgumentError, match="limit"):
        request.update(OLD, limit=-1)
    assert request.length == 3
    request.remove()
    with pytest.raises(StateError, match="does not wait any more"):
        request.update(OLD)
