"""SlotTree: nodes and their names, what is kept behind the last whole page, locks, eviction, misuse."""

from __future__ import annotations

import gc
import logging
import random
import weakref
from typing import TYPE_CHECKING

import devices
import pytest
import torch
from common import cuda_only, some

import kvpool
from kvpool import ConfigError, IndexOwnershipError, StaleBufferError
from kvpool._kvpool import SlotTree

if TYPE_CHECKING:
    from software import Driver

pytestmark = pytest.mark.usefixtures("device")


class Scene:
    """A tree, its allocator, and slots for whom it may concern."""

    def __init__(self, page_size: int = 1, device: str = "cpu") -> None:
        self.allocator = kvpool.TokenToKVPoolAllocator(64, device, strict=True)
        self.tree = SlotTree(self.allocator, page_size=page_size)

    def take(self, count: int) -> list[int]:
        found: list[int] = some(self.allocator.alloc(count)).tolist()
        return found

    def slots(self, node: int) -> list[int]:
        found: list[int] = self.tree.slots(node).tolist()
        return found


@pytest.fixture
def scene(device: str) -> Scene:
    return Scene(device=device)


def test_inserted_tokens_are_found_and_owned_by_the_tree(scene: Scene) -> None:
    slots = scene.take(4)
    done = scene.tree.insert([1, 2, 3, 4], torch.tensor(slots))
    assert (done.cached, done.length, done.removed_nodes) == (0, 4, [])
    found = scene.tree.match([1, 2, 3, 4, 5])
    assert (found.node, found.length, scene.slots(found.node)) == (done.node, 4, slots)
    assert scene.tree.slots(found.node).dtype == torch.int32
    with pytest.raises(IndexOwnershipError, match="cache"):
        scene.allocator.free(torch.tensor(slots))
    assert scene.tree.match([9]).node == scene.tree.root
    assert scene.tree.match([1, 2]).length == 2
    assert scene.tree.match([1, 2], namespace="other").length == 0
    scene.tree.verify()


def test_a_name_that_no_node_has_yet_is_stale(scene: Scene) -> None:
    node = scene.tree.insert([1], scene.take(1)).node
    assert scene.tree.evict(1).removed_nodes == [node]
    # Its number is vacant, and this is the name of the next node that has it.
    coming = node + (1 << 32)
    for call in (scene.tree.lock, scene.tree.unlock, scene.tree.slots, scene.tree.node):
        with pytest.raises(StaleBufferError, match="was evicted"):
            call(coming)
    assert scene.tree.insert([2], scene.take(1)).node == coming
    scene.tree.lock(coming)
    scene.tree.verify()
    assert scene.tree.evict(1).tokens == 0


def test_namespaces_without_an_allocator_may_have_the_same_slots() -> None:
    tree = SlotTree(page_size=4)
    nodes = [tree.insert([5, 6], [5, 6], namespace=name).node for name in ("a", "b", "a", "b")]
    assert nodes[:2] == nodes[2:]
    with pytest.raises(IndexOwnershipError, match="slot 5 is cached twice"):
        tree.verify()
    assert len(tree.evict(4).removed_nodes) == 2
    assert tree.locked_size() == tree.evictable_size() == 0


def test_a_cut_leaves_name_end_and_locks_to_the_deeper_half(scene: Scene) -> None:
    whole = scene.tree.insert([1, 2, 3, 4], scene.take(4)).node
    scene.tree.lock(whole)
    scene.tree.lock(whole)
    half = scene.tree.match([1, 2, 9]).node
    assert half != whole
    assert len(scene.slots(whole)) == 4
    lower, upper = scene.tree.node(whole), scene.tree.node(half)
    assert (lower.tokens, lower.parent, lower.locks) == ([3, 4], half, 2)
    assert (upper.tokens, upper.children, upper.locks) == ([1, 2], [whole], 2)
    assert upper.parent == scene.tree.root
    assert scene.tree.node(upper.parent).parent is None
    assert scene.tree.locked_size() == 4
    assert scene.tree.evict(1).tokens == 0
    scene.tree.unlock(whole)
    scene.tree.unlock(whole)
    evicted = scene.tree.evict(3)
    assert (evicted.tokens, evicted.removed_nodes) == (4, [whole, half])
    assert sorted(evicted.slots.tolist()) == sorted(lower.slots + upper.slots)
    assert scene.allocator.available_size() == 64


def test_names_are_not_used_again(scene: Scene) -> None:
    seen: set[int] = set()
    for number in range(50):
        node = scene.tree.insert([number % 3, number], scene.take(2)).node
        assert node not in seen
        assert node < 2**63
        seen.add(node)
        if number % 2:
            assert {*scene.tree.evict(4).removed_nodes} <= seen
        if number % 10 == 9:
            seen.add(scene.tree.root)
            scene.tree.clear()
            assert scene.tree.root not in seen
    for node in seen:
        if node != scene.tree.root:
            with pytest.raises(StaleBufferError, match=f"node {node} was evicted"):
                scene.tree.lock(node)


def test_duplicates_stay_the_callers(scene: Scene) -> None:
    first, second = scene.take(3), scene.take(4)
    scene.tree.insert([1, 2, 3], first)
    done = scene.tree.insert([1, 2, 3, 4], second)
    assert done.cached == 3
    assert scene.slots(done.node) == [*first, second[3]]
    scene.allocator.free(torch.tensor(second[:3]))
    again = scene.tree.insert([1, 2, 3, 4], [*first, second[3]])
    assert (again.node, again.cached) == (done.node, 4)
    assert scene.tree.evictable_size() == 4, "inner nodes count"


def test_an_insertion_ends_before_the_first_slot_that_is_not_allocated(scene: Scene) -> None:
    slots = scene.take(3)
    done = scene.tree.insert([1, 2, 3, 4, 5], [*slots[:2], 0, slots[2], 60])
    assert (done.length, scene.tree.cached_size()) == (2, 2)
    assert scene.tree.insert([7], [60]).node == scene.tree.root
    # Also within what is cached: the caller has no slot there to free.
    assert scene.tree.insert([1, 2], [slots[0], 0]).cached == 1


def test_a_rest_behind_the_last_page_waits_for_its_request(device: str) -> None:
    scene = Scene(page_size=4, device=device)
    mine = scene.take(9)
    done = scene.tree.insert([1, 2, 3, 4, 5, 6], mine[:6])
    assert done.length == 6
    assert scene.slots(done.node) == mine[:6]
    found = scene.tree.match([1, 2, 3, 4, 5, 6])
    assert found.length == 4
    assert found.node != done.node
    # It is kept while the node before it is locked.
    scene.tree.lock(found.node)
    assert scene.tree.locked_size() == 6
    assert scene.tree.evict(1).tokens == 0
    # Another request with the same tokens has a rest of its own.
    other = scene.take(6)
    twin = scene.tree.insert([1, 2, 3, 4, 5, 6], other)
    assert twin.cached == 4
    assert scene.slots(twin.node) == mine[:4] + other[4:]
    scene.allocator.free(torch.tensor(other[:4]))
    # The same slots again: nothing is new. More of them: the rest becomes part of a page.
    assert scene.tree.insert([1, 2, 3, 4, 5, 6], mine[:6]).node == done.node
    longer = scene.tree.insert([1, 2, 3, 4, 5, 6, 7, 8, 9], mine)
    assert (longer.cached, longer.removed_nodes) == (4, [done.node])
    assert scene.tree.match([1, 2, 3, 4, 5, 6, 7, 8]).length == 8
    # Others have inserted the page in between: the rest goes back to its request with the duplicates.
    late = scene.take(2)
    beaten = scene.tree.insert([1, 2, 3, 4, 5, 6, 7, 8], mine[:4] + other[4:] + late)
    assert (beaten.cached, beaten.removed_nodes) == (8, [twin.node])
    scene.allocator.free(torch.tensor(other[4:] + late))
    scene.tree.verify()
    scene.tree.unlock(found.node)
    assert scene.tree.evict(64).tokens == 9
    assert scene.allocator.available_size() == 64


def test_a_rest_without_a_page_waits_for_its_second_insertion(device: str) -> None:
    scene = Scene(page_size=4, device=device)
    slots = scene.take(3)
    node = scene.tree.insert([1, 2], slots[:2]).node
    assert (scene.tree.locked_size(), scene.tree.evict(9).tokens) == (2, 0)
    longer = scene.tree.insert([1, 2, 3], slots)
    assert longer.removed_nodes == [node]
    assert longer.node != node
    assert scene.tree.evict(9).removed_nodes == [longer.node]


def test_a_partial_match_refreshes_only_what_it_found(scene: Scene) -> None:
    deep = scene.tree.insert([1, 2, 3, 4], scene.take(4)).node
    other = scene.tree.insert([5], scene.take(1)).node
    assert scene.tree.match([1, 2]).length == 2
    assert scene.tree.evict(3).removed_nodes == [deep, other]


def test_the_least_recently_used_goes_first(scene: Scene) -> None:
    nodes = [scene.tree.insert([number], scene.take(1)).node for number in range(6)]
    order = random.Random(3).sample(range(6), 6)  # noqa: S311 - only variety is needed
    for number in order:
        scene.tree.match([number])
    assert scene.tree.evict(6).removed_nodes == [nodes[number] for number in order]


def test_a_lock_is_undone_once(scene: Scene) -> None:
    node = scene.tree.insert([1, 2], scene.take(2)).node
    for unlocked in (node, scene.tree.root):
        with pytest.raises(IndexOwnershipError, match="has no lock to undo"):
            scene.tree.unlock(unlocked)
    scene.tree.lock(node)
    assert scene.tree.evict(2).tokens == 0
    scene.tree.unlock(node)
    with pytest.raises(StaleBufferError, match="no node has the number -1"):
        scene.tree.lock(-1)


def test_the_root_is_unlocked_as_often_as_it_was_locked(scene: Scene) -> None:
    node = scene.tree.insert([1, 2], scene.take(2), namespace="other").node
    root = scene.tree.node(node).parent
    assert root == scene.tree.root
    scene.tree.lock(root)
    scene.tree.lock(root)
    assert scene.tree.node(root).locks == 2
    scene.tree.unlock(root)
    scene.tree.unlock(root)
    with pytest.raises(IndexOwnershipError, match="has no lock to undo"):
        scene.tree.unlock(root)
    scene.tree.lock(root)
    assert scene.tree.evict(2).removed_nodes == [node]
    scene.tree.unlock(root)
    with pytest.raises(IndexOwnershipError, match="has no lock to undo"):
        scene.tree.unlock(root)
    scene.tree.verify()


def test_clearing_gives_up_everything_locked_or_not(scene: Scene) -> None:
    nodes = {scene.tree.insert([1, 2], scene.take(2)).node, scene.tree.insert([3], scene.take(1)).node}
    scene.tree.lock(min(nodes))
    done = scene.tree.clear()
    assert ({*done.removed_nodes}, done.tokens) == (nodes, 3)
    assert scene.allocator.available_size() == 64
    node = scene.tree.insert([1], scene.take(1)).node
    scene.allocator.clear()
    assert scene.tree.match([1]).length == 0
    assert scene.tree.evict(0).removed_nodes == [node], "what the allocator's end took is reported once"
    assert scene.tree.evict(0).removed_nodes == []


def test_misuse_changes_nothing(scene: Scene) -> None:
    slots = scene.take(3)
    scene.tree.insert([1], slots[:1])
    with pytest.raises(ConfigError, match="2 tokens and 1 slots"):
        scene.tree.insert([1, 2], slots[:1])
    with pytest.raises(ConfigError, match="token -1 at position 1"):
        scene.tree.insert([1, -1], slots[:2])
    with pytest.raises(IndexOwnershipError, match="cannot be published"):
        scene.tree.insert([4, 5], [slots[1], slots[1]])
    with pytest.raises(IndexOwnershipError, match="cannot be published"):
        scene.tree.insert([6], slots[:1])
    with pytest.raises(TypeError, match="namespace"):
        scene.tree.match([1], namespace=1.5)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="tokens"):
        scene.tree.evict(-1)
    assert scene.tree.stats()["cached"] == 1
    assert scene.tree.stats()["nodes"] == 1
    scene.allocator.free(torch.tensor(slots[1:]))
    with pytest.raises(ConfigError, match="pages of 16 slots"):
        SlotTree(kvpool.TokenToKVPoolAllocator(64, "cpu", page_size=16))
    with pytest.raises(ConfigError, match="page_size"):
        SlotTree(page_size=0)


def test_without_an_allocator_slots_are_numbers() -> None:
    tree = SlotTree(page_size=2)
    node = tree.insert([1, 2, 3, 4], [40, 40, 0, 7]).node
    assert tree.slots(node).tolist() == [40, 40, 0, 7]
    with pytest.raises(ConfigError, match="slot -1 at position 1"):
        tree.insert([1, 2], [3, -1])
    with pytest.raises(IndexOwnershipError, match="slot 40 is cached twice"):
        tree.verify()
    done = tree.evict(1)
    assert (done.tokens, done.slots.tolist(), done.removed_nodes) == (4, [40, 40, 0, 7], [node])


def test_the_end_of_a_tree_frees_its_slots(scene: Scene) -> None:
    node = scene.tree.insert([1, 2, 3], scene.take(3)).node
    scene.tree.lock(node)
    assert scene.allocator.stats()["cached"] == 3
    tree = weakref.ref(scene.tree)
    del scene.tree
    gc.collect()
    assert tree() is None
    assert scene.allocator.available_size() == 64


@pytest.mark.timeout(60)
@cuda_only
@pytest.mark.parametrize("call", ["evict", "clear", "drop"])
def test_a_notice_is_logged_without_locks(call: str, driver: Driver) -> None:
    allocator = kvpool.TokenToKVPoolAllocator(64, devices.current(), debug=True)
    kv = kvpool.KVPool(64, 1, 1, 4, devices.current(), "float32")
    allocator.poison_freed(kv)
    tree = SlotTree(allocator)
    tree.insert([1, 2, 3], some(allocator.alloc(3)))
    seen: list[int] = []
    held = weakref.ref(tree)

    class TreeUsingHandler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            assert "not poisoned" in record.getMessage()
            found = held()
            seen.append(allocator.stats()["cached"] if found is None else found.cached_size())

    handler, logger = TreeUsingHandler(), logging.getLogger("kvpool")
    logger.addHandler(handler)
    driver.fail("cuMemsetD8Async", 1, 719)
    try:
        if call == "evict":
            tree.evict(3)
        elif call == "clear":
            tree.clear()
        else:
            del tree
            gc.collect()
    finally:
        logger.removeHandler(handler)
    assert seen == [0]


def test_reports_call_locked_slots_locked(device: str) -> None:
    allocator = kvpool.TokenToKVPoolAllocator(16, device, debug=True)
    tree = SlotTree(allocator, page_size=4)
    slots = some(allocator.alloc(6)).tolist()
    tree.insert([1, 2, 3, 4, 5, 6], slots)
    assert {leak.state for leak in allocator.leaks()} == {"evictable"}
    # The rest behind the last page is kept by the lock of the node before it.
    node = tree.match([1, 2, 3, 4]).node
    tree.lock(node)
    assert tree.locked_size() == 6
    assert [(leak.state, leak.count) for leak in allocator.leaks()] == [("locked", 6)]
    assert allocator.alloc(16) is None, "a tree evicts only when it is told to"
    tree.unlock(node)
    assert [(leak.state, leak.count) for leak in allocator.leaks()] == [("evictable", 6)]
    assert allocator.alloc(16) is None
    assert tree.cached_size() == 6


def test_reports_name_the_tree(device: str) -> None:
    allocator = kvpool.TokenToKVPoolAllocator(8, device, debug=True)
    tree = SlotTree(allocator, name="prompts")
    tree.insert([1], some(allocator.alloc(1)).tolist())
    assert [leak.owner for leak in allocator.leaks()] == ["prompts"]
