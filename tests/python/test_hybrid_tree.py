"""The tree that engines drive node by node."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
import torch

from kvpool import ConfigError, IndexOwnershipError, StaleError, StateError
from kvpool._kvpool import HybridFrees, HybridTree

PROMPT = array("q", [5, 6, 7, 8, 9])
SLOTS = torch.arange(20, 25)


def tree_with(page_size: int = 1, **options: Any) -> tuple[HybridTree, int]:  # noqa: ANN401
    """A tree with the prompt, and the node at its end."""
    tree = HybridTree(page_size, **options)
    node = tree.insert(PROMPT, SLOTS).node
    assert node is not None
    return tree, node


@pytest.mark.parametrize("kind", [list, tuple, torch.tensor, lambda tokens: array("q", tokens)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_prompt_is_found_in_any_form(kind: Any, dtype: torch.dtype) -> None:  # noqa: ANN401
    tree = HybridTree(2)
    step = tree.insert(kind([5, 6, 7, 8, 9]), SLOTS.to(dtype))
    assert step.done
    assert (step.found, step.actions()) == (0, [])
    found = tree.match(kind([5, 6, 7, 8, 1]))
    assert (found.length, found.node, found.full_length) == (4, step.node, 4)
    slots = tree.slots(found.node, tree.root())
    assert (slots.dtype, slots.tolist()) == (torch.int64, [20, 21, 22, 23])
    tree.verify()


def test_tokens_count_from_start_to_end() -> None:
    tree, _ = tree_with()
    assert tree.match(PROMPT, 0, 3).length == 3
    assert tree.match(array("q", [1, *PROMPT]), 1).length == 5
    assert tree.match(PROMPT, 2).length == 0
    assert tree.match(array("q")).length == 0
    for start, end in [(0, 6), (4, 3), (6, None)]:
        with pytest.raises(ConfigError, match=r"within the 5"):
            tree.match(PROMPT, start, end)


def test_namespaces_share_nothing() -> None:
    tree = HybridTree(1)
    names: list[Any] = [None, "a", b"a", 1, 1 << 80, ("a", "b"), ("ab", None), ("a", "b", 1), (None, "b"), ()]
    for at, name in enumerate(names):
        tree.insert([1], [at], namespace=name)
    for at, name in enumerate(names):
        assert tree.slots(tree.match([1], namespace=name).node, tree.root()).tolist() == [at]
    with pytest.raises(TypeError, match="namespace"):
        tree.match([1], namespace=1.5)  # type: ignore[arg-type]
    tree.verify()


def test_tokens_of_64_bits_are_tokens() -> None:
    tree = HybridTree(1)
    tokens = [1 << 40, -1, (1 << 63) - 1]
    tree.insert(tokens, SLOTS[:3])
    assert tree.match(tokens).length == 3
    assert tree.match([1 << 40, -2]).length == 1


NAMES: list[Any] = [None, "a", b"a", b"\xff\xff", 1, 1 << 80, ("a", None), (b"b", -1, "", 1 << 80), ()]


@pytest.mark.parametrize("name", NAMES)
def test_pages_that_are_gone_are_named_as_they_were(name: Any) -> None:  # noqa: ANN401
    tree = HybridTree(2)
    step = tree.insert(PROMPT, SLOTS, namespace=name)
    assert step.added is not None
    node, start, end = step.added
    assert (node, start, end) == (step.node, 0, 4)
    assert tree.hash_at(node, 4) is None
    hashes = bytes(range(64))
    tree.set_hashes(node, 0, hashes)
    assert (tree.hash_at(node, 2), tree.hash_at(node, 4)) == (hashes[:32], hashes[32:])
    tree.match([5, 6, 9, 9], namespace=name)
    longer = tree.insert([*PROMPT[:4], 1, 2], range(30, 36), namespace=name, found=4)
    assert longer.added == (longer.node, 4, 6)
    assert tree.insert(PROMPT, SLOTS, namespace=name, found=4).added is None
    # The new leaf has no hash, and the others were cut.
    assert tree.evict(2).removed == []
    assert tree.evict(4).removed == [(name, hashes[32:]), (name, hashes[:32])]
    with pytest.raises(KeyError):
        tree.hash_at(node, 2)
    with pytest.raises(KeyError):
        tree.set_hashes(node, 0, b"")


def test_bad_hashes_change_nothing() -> None:
    tree, node = tree_with(2)
    for start, count, message in [
        (0, 32, "1 hashes for the 2 pages"),
        (2, 32, "begins at 0"),
        (0, 65, "and 1 bytes"),
    ]:
        with pytest.raises(ConfigError, match=message):
            tree.set_hashes(node, start, bytes(count))
    assert tree.hash_at(node, 4) is None
    tree.verify()


def test_a_tail_goes_before_the_others() -> None:
    tree = HybridTree(1, policy="tlru", tail=1)
    for tokens in ([9, 9], [1], [1, 2], [1, 2, 3]):
        tree.insert(tokens, range(10 * len(tokens), 11 * len(tokens)), found=len(tokens) - 1)
    evicted = [tree.evict(1).full for _ in range(2)]
    assert [slots.tolist() for slots in evicted if slots is not None] == [[32], [20, 21]]


def test_what_is_inserted_again_is_worth_more() -> None:
    """Sessions come back, and other prompts do not: the slots of both together do not fit."""
    found = {}
    for policy in ("lru", "adaptive"):
        tree = HybridTree(16, policy=policy, capacity=1280)
        found[policy] = 0
        for turn in range(60):
            for session in range(6):
                for first in (session, 100 + 6 * turn + session):
                    tokens = [first] * 208
                    # Look-ups count nothing.
                    _, length = (tree.match(tokens).length for _ in range(2))
                    found[policy] += length
                    short = tree.evictable_size(0) + 208 - length - 1280
                    if short > 0:
                        tree.evict(short)
                    tree.insert(tokens[:64], range(64), found=min(length, 64))
                    tree.insert(tokens, range(208), found=max(length, 64), inserted=64)
        tree.verify()
    assert found["lru"] == 0
    assert found["adaptive"] > 0.2 * 60 * 6 * 208


def test_what_is_worth_least_is_learned_beside_requests_that_have_slots() -> None:
    """Eight of nine prompts in turn fit what others leave, and all would fit with their slots."""
    found = {}
    for policy in ("lru", "adaptive"):
        tree = HybridTree(16, policy=policy, capacity=2560)
        found[policy] = 0
        for turn in range(1500):
            tokens = [turn % 9] * 160
            length = tree.match(tokens).length
            found[policy] += length
            short = tree.evictable_size(0) + 160 - length - 1280
            if short > 0:
                tree.evict(short)
            tree.insert(tokens, range(160), found=length)
        tree.verify()
    assert found["lru"] == 0
    assert found["adaptive"] > 0.3 * 1500 * 160


def turn(tree: HybridTree, session: Any, tokens: list[int], **after: Any) -> int:  # noqa: ANN401
    """Insert the tokens of a turn, whose slots are their numbers, and end it."""
    node = tree.insert(tokens, tokens, session=session).node
    assert node is not None
    if session is not None:
        tree.end_turn(session, node, **after)
    return node


def evicted(tree: HybridTree, count: int) -> list[int]:
    """Evict slots, and return them in order."""
    slots = tree.evict(count).full
    assert slots is not None
    return sorted(slots.tolist())


def test_what_only_an_ended_session_used_is_evicted_first() -> None:
    tree = HybridTree(1, policy="adaptive", capacity=64)
    turn(tree, None, [7, 8])
    turn(tree, "chat", [1, 2, 3])
    turn(tree, 2**80, [1, 2, 9])
    turn(tree, "chat", [1, 2, 3, 4], is_last=True)
    # What others use is theirs.
    assert evicted(tree, 2) == [3, 4]
    assert evicted(tree, 2) == [7, 8]
    tree.verify()


def test_a_turn_supersedes_what_it_leaves() -> None:
    tree = HybridTree(1, policy="adaptive", capacity=64)
    turn(tree, None, [7, 8])
    node = turn(tree, b"chat", [1, 2, 3, 4])
    turn(tree, b"chat", [1, 2, 5], pause="user")
    assert evicted(tree, 2) == [3, 4]
    # A node that a request uses stays, and so does what another one has used.
    node = turn(tree, b"chat", [1, 2, 5, 6])
    boundary = tree.lock_node(node)[1]
    turn(tree, b"chat", [1, 2, 9])
    tree.unlock_node(node, boundary)
    turn(tree, None, [1, 2, 9])
    turn(tree, b"chat", [1, 2])
    turn(tree, b"chat", [1, 2, 10])
    assert evicted(tree, 2) == [7, 8]
    # At the root it is only said what follows.
    tree.end_turn(b"chat", tree.root(), is_last=True)
    assert evicted(tree, 1) == [10]
    tree.verify()


@pytest.mark.parametrize("policy", ["lru", "adaptive"])
def test_wrong_turns_change_nothing(policy: str) -> None:
    tree = HybridTree(1, policy=policy, capacity=64)
    node = turn(tree, "chat", [1, 2])
    with pytest.raises(ValueError, match="a session that ends does not pause, and pause is 'user'"):
        tree.end_turn("chat", node, pause="user", is_last=True)
    for session in (None, 1.5):
        with pytest.raises(TypeError, match="session"):
            tree.end_turn(session, node)  # type: ignore[arg-type]
    with pytest.raises(KeyError):
        tree.end_turn("chat", node + 1)
    tree.verify()


def test_other_orders_are_not_told_of_sessions() -> None:
    tree = HybridTree(1)
    turn(tree, None, [7, 8])
    turn(tree, "chat", [1, 2], is_last=True)
    assert evicted(tree, 2) == [7, 8]


def test_what_waiting_requests_need_is_evicted_last() -> None:
    tree = HybridTree(1, policy="adaptive", capacity=64)
    first = turn(tree, None, [1, 2, 3])
    second = turn(tree, "chat", [1, 4], is_last=True)
    numbers = tree.set_waiting([(None, first), (None, second), (None, None)])
    assert numbers == sorted(numbers)
    turn(tree, None, [7, 8])
    assert evicted(tree, 3) == [4, 7, 8]
    # It is in front now, and what is left of its prefix is needed by both.
    turn(tree, None, [1, 5])
    numbers = tree.set_waiting([(numbers[1], second), (numbers[0], None)])
    assert evicted(tree, 2) == [3, 5]
    turn(tree, None, [1, 2, 6])
    assert evicted(tree, 2) == [2, 6]
    tree.verify()
    # Nothing is locked.
    assert evicted(tree, 2) == [1]
    # Neither is what is gone needed, nor what another had the number of.
    tree.set_waiting([(numbers[0], first), (numbers[1] + 1, None)])
    node = turn(tree, None, [1, 2])
    turn(tree, None, [7])
    assert evicted(tree, 2) == [1, 2]
    tree.set_waiting([(None, tree.root()), (None, node)])
    assert evicted(tree, 1) == [7]
    assert len(tree.set_waiting([])) == 0
    tree.verify()


def test_a_waiting_request_offers_no_leaf_again_that_was_refused() -> None:
    tree = HybridTree(1, policy="adaptive", capacity=64)
    nodes = [turn(tree, None, [first]) for first in range(3)]
    tree.begin_eviction(0, 3)
    assert [tree.next_victim(0, 0) for _ in range(2)] == nodes[:2]
    numbers = tree.set_waiting([(None, nodes[2]), (None, nodes[0])])
    assert [tree.next_victim(0, 0) for _ in range(2)] == [nodes[2], None]
    tree.end_eviction(0)
    tree.verify()
    tree.set_waiting([(number, None) for number in numbers[::-1]])
    assert evicted(tree, 2) == [1, 2]
    tree.reset()
    assert len(tree.set_waiting([(number, None) for number in numbers])) == 2
    tree.verify()


def test_other_orders_are_not_told_of_waiting_requests() -> None:
    tree = HybridTree(1)
    node = turn(tree, None, [7, 8])
    turn(tree, None, [1, 2])
    assert tree.set_waiting([(None, node), (None, None)]) == [0, 0]
    assert evicted(tree, 2) == [7, 8]


def test_what_is_worth_least_is_named_step_by_step() -> None:
    tree = HybridTree(1, policy="adaptive", capacity=64)
    nodes = [tree.insert([first], [first]).node for first in range(3)]
    tree.begin_eviction(0, 3)
    # One that is refused is not named again, until the eviction has ended.
    assert [tree.next_victim(0, 0) for _ in range(4)] == [*nodes, None]
    tree.end_eviction(0)
    tree.verify()
    tree.reset()
    assert tree.evict(3).full is None


def test_duplicates_are_left_to_the_caller_to_free() -> None:
    tree, node = tree_with()
    step = tree.insert([*PROMPT, 10], torch.arange(30, 36), found=2)
    assert step.actions() == [("free", 2, 5)]
    assert (step.found, step.adopted) == (5, ([(5, 6)], []))
    assert step.node is not None
    assert tree.path(step.node)[-1][:2] == (step.node, node)


def test_bad_insertions_change_nothing() -> None:
    tree = HybridTree(1)
    with pytest.raises(ConfigError, match=r"4 slots for 5 tokens"):
        tree.insert(PROMPT, SLOTS[:4])
    with pytest.raises(ConfigError, match=r"slot -1 at position 1"):
        tree.insert(PROMPT, [1, -1, 2, 3, 4])
    with pytest.raises(StateError, match="no insertion is going on"):
        tree.advance(PROMPT, SLOTS)
    assert tree.end_insertion() == []
    assert not tree.is_inserting()
    with pytest.raises(ConfigError, match="with a state"):
        HybridTree(1, state_grid=1).insert(PROMPT, SLOTS)
    assert tree.match(PROMPT).length == 0
    tree.verify()


def test_nodes_that_are_gone_are_key_errors() -> None:
    tree, node = tree_with()
    assert tree.contains(node)
    assert tree.evict(5).counts == (5, 0, 0)
    assert not tree.contains(node)
    calls: list[Any] = [
        lambda: tree.lock_node(node),
        lambda: tree.unlock_node(node),
        lambda: tree.unlock_window(node),
        lambda: tree.pin(node),
        lambda: tree.unpin(node),
        lambda: tree.slots(node, tree.root()),
        lambda: tree.evict_leaf(node),
        lambda: tree.evict_excess_states(node),
        lambda: tree.adjust_size(node, 0, 1),
        lambda: tree.value(node, 0),
        lambda: tree.set_value(node, 1, [1]),
        lambda: tree.by_common_prefix([node]),
        lambda: tree.path(node),
        lambda: tree.children(node),
        lambda: tree.info(node),
    ]
    for call in calls:
        with pytest.raises(KeyError):
            call()


def test_a_node_is_evicted_when_its_last_lock_is_released() -> None:
    tree, node = tree_with()
    assert tree.lock_node(node) == (5, None)
    assert tree.lock_node(node) == (0, None)
    assert (tree.locked_size(0), tree.evictable_size(0)) == (5, 0)
    with pytest.raises(IndexOwnershipError, match="no leaf without locks"):
        tree.evict_leaf(node)
    tree.unlock_node(node)
    tree.unlock_node(node)
    with pytest.raises(IndexOwnershipError, match="no lock of Full"):
        tree.unlock_node(node)
    tree.pin(node)
    tree.unpin(node)
    with pytest.raises(IndexOwnershipError, match="no lock of Full"):
        tree.unpin(node)
    assert tree.evict_leaf(node).full is not None


def test_an_eviction_is_a_dialogue() -> None:
    tree, node = tree_with()
    with pytest.raises(StateError, match="no eviction of part 0"):
        tree.next_victim(0, 0)
    tree.begin_eviction(0, 1)
    with pytest.raises(StateError, match="going on"):
        tree.begin_eviction(0, 1)
    assert tree.next_victim(0, 0) == node
    frees = tree.evict_leaf(node)
    assert frees.full is not None
    assert (frees.full.tolist(), frees.window, frees.state) == (SLOTS.tolist(), None, None)
    assert tree.next_victim(0, 5) is None
    tree.end_eviction(0)
    with pytest.raises(StateError, match="no eviction of part 0"):
        tree.end_eviction(0)
    with pytest.raises(ConfigError, match="part 3"):
        tree.begin_eviction(3, 1)


def test_windows_are_asked_for() -> None:
    tree = HybridTree(1, window=2)
    step = tree.insert(PROMPT, SLOTS)
    assert not step.done
    assert tree.is_inserting()
    nodes = []
    for act in step.actions():
        assert act[0] == "rebuild"
        _, node, slots = act
        tree.set_value(node, 1, slots + 100)
        nodes.append(node)
    assert tree.advance(PROMPT, SLOTS).done
    assert tree.listed(1) == nodes[::-1]
    assert tree.values(1).sort().values.tolist() == (SLOTS + 100).tolist()
    newly, boundary = tree.lock_node(nodes[1])
    assert (newly, tree.locked_size(1)) == (5, 2)
    assert tree.unlock_window(nodes[1], boundary).counts == (0, 0, 0)
    tree.unlock_node(nodes[1], boundary, window_done=True)
    tree.begin_eviction(1, 1)
    victim = tree.next_victim(1, 0)
    assert isinstance(victim, HybridFrees)
    assert victim.counts == (0, 3, 0)
    assert victim.window is not None
    assert victim.window.tolist() == [20, 21, 22]
    tree.end_eviction(1)
    assert tree.window_gaps(PROMPT, 1, 5) == [(1, 3)]
    with pytest.raises(ConfigError, match=r"1\.\.5 are not all there"):
        tree.attach_window(PROMPT, 1, [1, 2, 3, 4])
    tree.attach_window(PROMPT, 1, [1, 2])
    for part, value, words in [(0, [1], "insertion"), (1, [1], "already"), (2, [1], "no State")]:
        with pytest.raises(ConfigError, match=words):
            tree.set_value(nodes[1], part, value)
    tree.verify()


def test_an_insertion_ends_with_the_node_that_it_has_reached() -> None:
    tree = HybridTree(1, state_grid=2, states_per_path=1)
    (act,) = tree.insert([1, 2], [10, 11], state=[7]).actions()
    assert act[0] == "evict_excess"
    with pytest.raises(ConfigError, match="2 tokens that it began with"):
        tree.advance([1], [10])
    assert tree.evict_leaf(act[1]).counts == (2, 0, 1)
    with pytest.raises(StaleError, match="was evicted"):
        tree.advance([1, 2], [10, 11])
    assert tree.is_inserting()
    assert tree.end_insertion() == []
    tree.verify()


def test_an_insertion_that_has_failed_does_not_go_on() -> None:
    tree = HybridTree(2, window=2)
    with pytest.raises(ConfigError, match="no multiple of the page size"):
        tree.insert([1, 2], [10, 11], namespace="name", window_freed=1)
    with pytest.raises(StateError, match="has failed"):
        tree.advance([1, 2], [10, 11], namespace="name")
    assert tree.end_insertion() == []
    tree.verify()


def test_a_state_that_outlived_its_window_lock_is_released() -> None:
    tree = HybridTree(1, window=2, state_grid=1)
    step = tree.insert([1, 2], [10, 11], state=[7])
    (act,) = step.actions()
    assert act[0] == "rebuild"
    _, node, slots = act
    tree.set_value(node, 1, slots + 100)
    assert tree.advance([1, 2], [10, 11]).done
    _, boundary = tree.lock_node(node)
    tree.unlock_window(node, boundary, with_state=False)
    assert [tree.locked_size(part) for part in range(3)] == [2, 0, 1]
    tree.unlock_node(node, skip=[1])
    assert [tree.locked_size(part) for part in range(3)] == [0, 0, 0]
    tree.verify()


def test_a_prefix_is_found_up_to_a_state() -> None:
    tree = HybridTree(1, state_grid=2, states_per_path=1)
    (act,) = tree.insert([1, 2], [10, 11], state=torch.tensor([7])).actions()
    assert act[0] == "evict_excess"
    assert tree.advance([1, 2], [10, 11]).done
    step = tree.insert([1, 2, 3], [10, 11, 12], found=2, state=[8])
    assert not step.done
    (act,) = step.actions()
    assert act[0] == "evict_excess"
    frees = tree.evict_excess_states(act[1])
    assert frees.state is not None
    assert frees.state.tolist() == [7]
    assert tree.advance([1, 2, 3], [10, 11, 12]).done
    found = tree.match([1, 2, 9])
    assert (found.length, found.full_length, found.state_branch) == (0, 2, 2)
    assert tree.insert([1, 2, 3], [10, 11, 12], found=3, state=[9]).had_state
    tree.verify()


def test_sizes_follow_the_engine() -> None:
    tree, node = tree_with()
    tree.adjust_size(node, 0, -2)
    assert tree.evictable_size(0) == 3
    with pytest.raises(ConfigError, match="would become -1"):
        tree.adjust_size(node, 0, -4)
    assert tree.memory_size() > 0


def test_everything_can_be_looked_at() -> None:
    tree, node = tree_with()
    other = tree.match([5, 6, 1]).node
    assert tree.info(other).hits == tree.info(node).hits == 1
    assert (tree.info(node).tokens, tree.info(node).end, tree.info(node).parent) == ([7, 8, 9], 5, other)
    assert (tree.info(node).is_leaf, tree.info(node).locks) == (True, (0, 0, 0))
    assert tree.children(tree.root()) == [other]
    assert sorted(tree.nodes()) == sorted([tree.root(), other, node])
    assert tree.by_common_prefix([node, tree.root(), other]) == [0, 2, 1]
    assert tree.peek([5, 6, 7, 0]) == (3, node, 5)
    slots, positions, before = tree.slot_rows(unlocked=True)
    assert sorted(zip(slots.tolist(), positions.tolist(), before.tolist(), strict=True)) == [
        (20, 0, -1),
        (21, 1, 20),
        (22, 2, 21),
        (23, 3, 22),
        (24, 4, 23),
    ]
    root = tree.root()
    tree.reset()
    assert tree.nodes() == [tree.root()] != [root]


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="unknown policy 'best'"):
        HybridTree(1, policy="best")
    with pytest.raises(ConfigError, match="the policy 'adaptive' needs a capacity"):
        HybridTree(1, policy="adaptive")
    for page_size, capacity, name in ((1, 1 << 31, "capacity"), (1 << 31, 1, "page_size")):
        with pytest.raises(ConfigError, match=f"{name} is 2147483648; it must be below"):
            HybridTree(page_size, policy="adaptive", capacity=capacity)
    makers: list[Any] = [
        lambda: HybridTree(1, policy="adaptive", capacity=0),
        lambda: HybridTree(0),
        lambda: HybridTree(1, window=0),
        lambda: HybridTree(1, state_grid=0),
    ]
    for make in makers:
        with pytest.raises(ConfigError, match="at least 1"):
            make()


def test_a_slot_of_two_requests_is_counted() -> None:
    tree, _ = tree_with()
    assert tree.second_owners() == (0, None)
    tree.insert([5, 6, 7, 1], [20, 21, 22, 30], found=3)
    assert tree.second_owners() == (0, None)
    # Inserted with other tokens, in one call or in two.
    tree.insert([1, 2, 3], [21, 40, 40])
    assert tree.second_owners() == (2, 40)
    # To be freed as a duplicate, although it is another node's.
    assert tree.insert([5, 6, 7], [50, 51, 30]).actions() == [("free", 0, 3)]
    assert tree.second_owners() == (3, 30)
    # Evicted slots have no owner.
    tree.evict(100)
    tree.insert(PROMPT, SLOTS)
    tree.insert([4], [(1 << 31) - 1])
    assert tree.second_owners() == (3, 30)
    tree.reset()
    tree.insert(PROMPT, SLOTS)
    assert tree.second_owners() == (3, 30)
    tree.verify()
    assert tree.memory_size() < 1 << 20
