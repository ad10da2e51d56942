"""Sessions of a prefix cache: what an ended one leaves, what a turn supersedes, and what pauses teach.

`tests/rust/histories/prefixes.rs` compares random histories with a naive model.
"""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any, cast

import devices
import pytest

import kvpool
from kvpool import ArgumentError, GDNPool, PrefixCache, Session

if TYPE_CHECKING:
    from collections.abc import Sequence

pytestmark = pytest.mark.usefixtures("device")


class Scene:
    """A cache in pages of one slot that evicts the least recently used leaf, unless it is told more."""

    def __init__(
        self,
        *,
        size: int = 64,
        policy: Any = "lru",  # noqa: ANN401
        tracks: int | None = None,
    ) -> None:
        self.allocator = kvpool.TokenToKVPoolAllocator(size, devices.current())
        self.states = (
            None
            if tracks is None
            else GDNPool(4, 1, 1, 2, 2, 4, 3, devices.current(), max_track_slots=tracks)
        )
        self.cache = PrefixCache(self.allocator, states=self.states, policy=policy)

    def turn(self, tokens: Sequence[int], session: Session | None = None) -> int:
        """Runs a request, and returns how many tokens of its prompt were found."""
        lease = self.cache.match(tokens, session=session)
        length = lease.length
        slots = self.allocator.alloc(len(tokens) - length)
        assert slots is not None
        lease.finish(tokens[length:], slots)
        self.cache.verify()
        return length

    def lens(self, *prompts: Sequence[int]) -> list[int]:
        return [self.cache.cached_len(prompt) for prompt in prompts]


SYSTEM, OTHER = [1, 2, 3, 4], [7, 8, 9]
CHAT = [*SYSTEM, 5, 6, 5, 6]


def test_what_only_an_ended_session_used_goes_first() -> None:
    scene = Scene()
    scene.turn(SYSTEM)
    scene.turn(OTHER)
    session = scene.cache.session("chat")
    scene.turn(CHAT[:6], session)
    scene.turn(CHAT, session)
    session.end()
    scene.cache.evict(4)
    assert scene.lens(CHAT, OTHER) == [4, 3], "the system prompt is not the session's"
    scene.cache.evict(3)
    assert scene.lens(CHAT, OTHER) == [4, 0]


def test_a_turn_that_is_used_by_another_session_is_not_the_first_one_s() -> None:
    scene = Scene()
    scene.turn(OTHER)
    first, second = scene.cache.session(1), scene.cache.session(2)
    scene.turn(CHAT, first)
    scene.turn(CHAT, second)
    first.end()
    scene.cache.evict(3)
    assert scene.lens(CHAT, OTHER) == [8, 0]


def test_a_session_ends_before_its_lease() -> None:
    scene = Scene()
    scene.turn(OTHER)
    session = scene.cache.session()
    with scene.cache.match(CHAT, session=session) as lease:
        slots = scene.allocator.alloc(len(CHAT))
        assert slots is not None
        lease.publish(CHAT, slots)
        session.end()
    scene.cache.evict(8)
    assert scene.lens(CHAT, OTHER) == [0, 3]


@pytest.mark.parametrize("is_of_session", [True, False])
def test_a_match_takes_the_end_back(*, is_of_session: bool) -> None:
    scene = Scene()
    session = scene.cache.session("chat")
    scene.turn(CHAT, session)
    session.end()
    scene.turn(OTHER)
    scene.turn(CHAT, session if is_of_session else None)
    scene.cache.evict(3)
    assert scene.lens(CHAT, OTHER) == [8, 0]


def test_a_turn_supersedes_the_branch_that_it_leaves() -> None:
    scene = Scene()
    scene.turn(OTHER)
    session = scene.cache.session("chat")
    scene.turn(CHAT, session)
    compacted = [*SYSTEM, 11, 12]
    scene.turn(compacted, session)
    scene.cache.evict(4)
    assert scene.lens(CHAT, compacted, OTHER) == [4, 6, 3]


def test_a_turn_supersedes_the_snapshot_of_the_one_before() -> None:
    scene = Scene(tracks=2)
    session = scene.cache.session("chat")

    def turn(tokens: list[int], session: Session | None) -> None:
        with scene.cache.match(tokens, session=session) as lease:
            slots = scene.allocator.alloc(len(tokens) - lease.length)
            assert slots is not None
            lease.publish(tokens[lease.length :], slots, state=1)
            scene.cache.verify()

    turn(CHAT[:4], session)
    turn(CHAT, session)
    turn(OTHER, None)
    # Without the session, it would be that at the end of the chat, or of the other prompt.
    assert [scene.cache.match(prompt).length for prompt in (CHAT[:6], CHAT, OTHER)] == [0, 8, 3]


def test_insert_is_a_turn() -> None:
    scene = Scene()
    scene.turn(OTHER)
    session = scene.cache.session(b"chat")
    slots = scene.allocator.alloc(len(CHAT))
    assert slots is not None
    scene.cache.insert(CHAT, slots, session=session)
    session.end()
    scene.cache.evict(8)
    assert scene.lens(CHAT, OTHER) == [0, 3]


def test_the_end_finds_what_is_left_after_an_eviction() -> None:
    scene = Scene()
    session = scene.cache.session("chat")
    scene.turn(CHAT[:6], session)
    scene.turn(CHAT, session)
    scene.turn(OTHER)
    scene.cache.evict(2)
    scene.turn([20])
    session.pause("user")
    session.end()
    scene.cache.evict(6)
    assert scene.lens(CHAT, OTHER) == [0, 3]
    session.pause("user")
    session.end()
    scene.cache.verify()


def test_equal_names_are_one_session_and_no_name_is_another_each_time() -> None:
    scene = Scene()
    scene.turn(OTHER)
    scene.turn(CHAT, scene.cache.session("chat"))
    scene.cache.session(None).end()
    scene.cache.session(b"chat").end()
    scene.cache.evict(1)
    assert scene.lens(CHAT, OTHER) == [8, 2]
    scene.cache.session("chat").end()
    scene.cache.evict(1)
    assert scene.lens(CHAT, OTHER) == [7, 2]


def test_clear_forgets_what_a_session_used() -> None:
    scene = Scene()
    session = scene.cache.session("chat")
    scene.turn(CHAT, session)
    scene.cache.clear()
    session.end()
    scene.turn(OTHER)
    scene.turn(CHAT, session)
    scene.allocator.clear()
    session.pause("user")
    session.end()
    assert scene.turn(CHAT, session) == 0
    assert scene.lens(CHAT, OTHER) == [8, 0]


def found_of(*, has_sessions: bool) -> int:
    """The blocks found of chats, some of which wait for a tool, and are back after nine turns, and the others
    for their users, in room for eight blocks. After a while other chats wait for tools.
    """
    scene = Scene(size=8 * 64, policy="adaptive")
    found = 0
    for round_ in range(400):
        chats = [(round_ // 10 + at) % 37 for at in range(5)]
        chats += [(round_ // 10 + 5 + (round_ * 4 + at) % 32) % 37 for at in range(4)]
        for at, chat in enumerate(chats):
            session = scene.cache.session(chat) if has_sessions else None
            found += scene.turn([100 * chat + token for token in range(64)], session)
            if session is not None:
                session.pause("bash" if at < 5 else "user")
    return found // 64


def test_what_comes_back_late_is_evicted_before_what_comes_back_soon() -> None:
    assert found_of(has_sessions=True) > 0.97 * 400 * 5 > found_of(has_sessions=False)


def test_an_abandoned_session_costs_nothing() -> None:
    def bytes_after(*, has_sessions: bool) -> int:
        scene = Scene()
        for number in range(10_000):
            session = scene.cache.session(number) if has_sessions else None
            scene.turn([number], session)
            if session is not None:
                session.pause("user")
        assert scene.cache.evictable_size() == 64
        return scene.cache.stats()["bytes"]

    assert bytes_after(has_sessions=True) < bytes_after(has_sessions=False) + 200_000


def test_a_session_has_a_name_and_no_hold_on_pages() -> None:
    cache = Scene().cache
    assert [cache.session(name).name for name in ("a", b"a", 7, 1 << 70, None)] == [
        "a",
        b"a",
        7,
        1 << 70,
        None,
    ]
    assert repr(cache.session("a")) == 'Session(name="a")'
    scene = Scene()
    session = scene.cache.session("chat")
    scene.turn(CHAT, session)
    assert scene.cache.locked_size() == 0
    cache, reference = scene.cache, weakref.ref(scene.cache)
    del scene, cache, session
    gc.collect()
    assert reference() is None


def test_rejects_bad_arguments() -> None:
    scene, other = Scene(), Scene()
    session = other.cache.session("chat")
    with pytest.raises(ArgumentError, match="the session is of another prefix cache"):
        scene.cache.match(CHAT, session=session)
    slots = scene.allocator.alloc(2)
    assert slots is not None
    with pytest.raises(ArgumentError, match="the session is of another prefix cache"):
        scene.cache.insert([1, 2], slots, session=session)
    with pytest.raises(TypeError, match="name must be a str, bytes or an int, not float"):
        scene.cache.session(cast("Any", 1.5))
    with pytest.raises(TypeError):
        scene.cache.match(CHAT, session=cast("Any", "chat"))
    with pytest.raises(TypeError):
        session.pause(cast("Any", 7))
    assert scene.cache.cached_size() == 0
