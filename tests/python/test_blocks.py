"""`BlockQueue`, `BlockMap` and `Block`: order, hashes, threads and misuse.

Beside vLLM's own pool they are tested within vLLM, by `tests/engines/vllm_block_checks.py`.
"""

from __future__ import annotations

import hashlib
import pickle
import random
import threading
from typing import TYPE_CHECKING

import pytest

from kvpool._kvpool import Block, BlockHasher, BlockMap, BlockQueue
from kvpool.errors import ConfigError, IndexOwnershipError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def key(text: bytes, group: int = 0) -> bytes:
    return text + group.to_bytes(4, "big")


def ids(queue: BlockQueue) -> list[int]:
    return [block.block_id for block in queue.get_all_free_blocks()]


@pytest.mark.parametrize("count", [0, -1, 2**31, 2**80])
def test_a_number_of_blocks_that_cannot_be(count: int) -> None:
    with pytest.raises(ConfigError, match="count"):
        BlockQueue(count)


def test_blocks_are_taken_from_the_front_and_come_back_by_their_hashes() -> None:
    queue, cached = BlockQueue(6), BlockMap()
    blocks, removed = queue.alloc(4, cached, {})
    assert [block.block_id for block in blocks] == [0, 1, 2, 3]
    assert [block.ref_cnt for block in blocks] == [1] * 4
    assert removed == []
    assert cached.cache(blocks[:2], [b"a", b"b"], 0, 16, 16, None, {})
    assert [block.block_hash_num_tokens for block in blocks] == [16, 32, None, None]
    assert queue.free(reversed(blocks)) == []
    assert ids(queue) == [3, 2, 4, 5, 1, 0]
    assert cached.find(b"a", [0]) == blocks[:1]
    assert queue.retain(blocks[:1]) == []
    assert ids(queue) == [3, 2, 4, 5, 1]
    taken, removed = queue.alloc(5, cached, {}, events=True)
    assert [block.block_id for block in taken] == [3, 2, 4, 5, 1]
    assert removed == [key(b"b")]
    assert len(cached) == 1


def test_hashes_without_caching_make_no_difference() -> None:
    queue, cached = BlockQueue(3), BlockMap()
    blocks, _ = queue.alloc(2, cached, {})
    cached.cache(blocks, [b"a", b"b"], 0, 4, 4, None, {})
    queue.free(blocks, keep_hashed=False)
    assert ids(queue) == [0, 1, 2]


def test_the_ends_of_the_queue_can_be_walked_to() -> None:
    queue = BlockQueue(3)
    front, back = queue.fake_free_list_head, queue.fake_free_list_tail
    assert (front.block_id, front.prev_free_block, back.next_free_block) == (-1, None, None)
    assert front.next_free_block is queue.blocks[0]
    assert back.prev_free_block is queue.blocks[2]
    assert queue.blocks[0].prev_free_block is front
    assert queue.blocks[2].next_free_block is back
    middle = queue.blocks[1]
    assert [block.block_id for block in queue.iter_blocks_after(None)] == [0, 1, 2]
    assert [block.block_id for block in queue.iter_blocks_after(middle)] == [2]
    queue.remove(middle)
    assert (middle.prev_free_block, middle.next_free_block) == (None, None)
    assert list(queue.iter_blocks_after(middle)) == []
    queue.append(middle)
    queue.prepend_n([])
    assert [queue.popleft().block_id, *(block.block_id for block in queue.popleft_n(2))] == [0, 2, 1]
    assert front.next_free_block is back
    assert back.prev_free_block is front
    assert len(queue) == queue.num_free_blocks == 0


def test_the_first_block_with_a_hash_answers() -> None:
    blocks, cached = BlockQueue(3).blocks, BlockMap()
    for block in blocks:
        cached.insert(key(b"a"), block)
    cached.insert(key(b"a", 1), blocks[2])
    assert cached.get_one_block(key(b"a")) is blocks[0]
    assert cached.get_one_block(key(b"b")) is None
    assert cached.find(b"a", [0, 1]) == [blocks[0], blocks[2]]
    assert cached.find(b"a", [0, 2]) is None
    assert cached.find(b"a", []) == []
    assert cached.contain(key(b"a"), 1)
    assert not cached.contain(key(b"a", 1), 1)
    assert cached.pop(key(b"a"), 0) is blocks[0]
    assert cached.pop(key(b"a"), 0) is None
    assert sorted(cached.items()) == [(key(b"a"), blocks[1:]), (key(b"a", 1), blocks[2:])]
    cached.clear()
    assert (len(cached), cached.items()) == (0, [])


@pytest.mark.parametrize("size", [1, 32, 60, 61, 500])
def test_hashes_of_any_length_are_found_in_their_group(size: int) -> None:
    blocks, cached = BlockQueue(4).blocks, BlockMap()
    hashes = [bytes([number]) * size for number in range(3)]
    assert cached.cache(blocks[:3], hashes, 7, 4, 4, None, {})
    assert cached.find_prefix([*hashes, bytes(size)[:-1] + b"x"], [7]) == [blocks[:3]]
    assert cached.find_prefix(iter(hashes), [7, 8]) == [[], []]
    assert [block.block_hash for block in blocks] == [*(key(value, 7) for value in hashes), None]


@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 16, 100, 4096])
@pytest.mark.parametrize("most", [200, 256, 70_000, 2**31 - 1])
def test_hashes_are_those_of_pickled_tuples(block_size: int, most: int) -> None:
    numbers = random.Random(block_size)  # noqa: S311
    tokens = [numbers.randrange(most + 1) for _ in range(3 * block_size + block_size // 2)]
    parent = hashlib.sha256(b"parent").digest()
    expected: list[bytes] = []
    for at in range(block_size, len(tokens) - block_size + 1, block_size):
        block = (expected[-1] if expected else parent, tuple(tokens[at : at + block_size]), None)
        expected.append(hashlib.sha256(pickle.dumps(block, protocol=5)).digest())
    hasher = BlockHasher("sha256", block_size)
    assert hasher.hashes(tokens, block_size, parent) == expected
    assert hasher.hashes(tokens, len(tokens) + 1, parent) == []


def test_hashes_that_python_would_compute_otherwise_are_left_to_it() -> None:
    class Token(int):
        pass

    hasher = BlockHasher("sha256_cbor", 2)
    whole = hasher.hashes([1, 2, 3], 0, b"parent")
    assert whole is not None
    assert [len(value) for value in whole] == [32]
    for odd in (Token(2), True, -1, 2**31, "2", None):
        assert hasher.hashes([1, odd], 0, b"parent") is None  # type: ignore[list-item]
    assert hasher.hashes([1, 2], 0, bytes(256)) is None
    large = [2**31 - 1] * 14_000
    assert BlockHasher("sha256", len(large)).hashes(large, 0, b"parent") is None
    assert BlockHasher("xxhash", 2).hashes([1, 2], 0, b"parent") != BlockHasher("xxhash_cbor", 2).hashes(
        [1, 2], 0, b"parent"
    )


def test_the_last_run_of_hashes_is_found_in_all_groups() -> None:
    blocks, cached = BlockQueue(8).blocks, BlockMap()
    hashes = [bytes([number]) * 32 for number in range(4)]
    assert cached.cache(blocks[:4], hashes, 0, 4, 4, None, {})
    assert cached.cache(blocks[4:], hashes, 1, 4, 4, [True, True, True, False], {})
    assert cached.find_last_run(hashes, [0], 2) == (2, [blocks[2:4]])
    assert cached.find_last_run(hashes, [0, 1], 2) == (1, [blocks[1:3], blocks[5:7]])
    assert cached.find_last_run(hashes, [0], 2, period=3) == (1, [blocks[1:3]])
    assert cached.find_last_run(hashes, [0], 2, period=2, first=1) == (1, [blocks[1:3]])
    assert cached.find_last_run(hashes, [0, 1], 5) == (0, [blocks[:3], blocks[4:7]])
    assert cached.find_last_run([b"none"], [0], 1) == (0, [[]])
    assert cached.find_last_run(hashes, [], 1) == (3, [])


def test_unused_blocks_are_counted_in_all_queues() -> None:
    queue, other = BlockQueue(5), BlockQueue(2)
    taken, _ = queue.alloc(2, BlockMap(), {})
    queue.blocks[4].is_null = True
    assert queue.count_unused(queue.blocks) == 2
    assert queue.count_unused([*taken, *other.blocks, other.popleft()]) == 3
    with pytest.raises(AttributeError, match="ref_cnt"):
        queue.count_unused([3])


def test_more_tokens_than_a_number_holds_are_refused() -> None:
    blocks, cached = BlockQueue(2).blocks, BlockMap()
    for first, size in ((2**64 - 1, 1), (0, 2**64 - 1)):
        assert cached.cache(blocks[:1], [b"hash"], 0, first, size, None, {})
        with pytest.raises(OverflowError, match=rf"block 1 of {size} tokens each ends above 2\*\*64"):
            cached.cache(blocks, [b"hash"] * 2, 0, max(first, 1), size, [False, True], {})
        cached.pop(key(b"hash"), 0)
        blocks[0].reset_hash()
    assert len(cached) == 0
    assert blocks[1].block_hash is None


def test_a_block_that_fills_up_has_only_its_new_hash() -> None:
    block, cached = BlockQueue(1).blocks[0], BlockMap()
    more = {0: {key(b"half")}}
    cached.insert(key(b"half"), block)
    assert cached.cache([block], [b"part"], 0, 8, 16, None, {})
    assert cached.cache([block], [b"full"], 0, 16, 16, None, more)
    assert more == {}
    assert [name for name, _ in cached.items()] == [key(b"full")]
    with pytest.raises(AssertionError, match="block 0 has a hash of 16 tokens, not fewer than 16"):
        cached.cache([block], [b"again"], 0, 16, 16, None, {})
    assert block.block_hash == key(b"full")


def test_a_hash_of_unknown_length_is_not_replaced() -> None:
    block, cached = BlockQueue(1).blocks[0], BlockMap()
    block.set_block_hash(key(b"a"))
    with pytest.raises(AssertionError, match="block 0 has a hash of unknown tokens"):
        cached.cache([block], [b"b"], 0, 4, 4, None, {})
    assert (block.block_hash, len(cached)) == (key(b"a"), 0)


def test_the_ends_of_a_queue_are_no_blocks() -> None:
    queue, cached = BlockQueue(1), BlockMap()
    end = queue.fake_free_list_tail
    assert (end.ref_cnt, end.is_null, end.block_hash, end.block_hash_num_tokens) == (0, False, None, None)
    end.reset_hash()
    with pytest.raises(IndexOwnershipError, match="the end of a queue is no block"):
        end.ref_cnt = 1
    with pytest.raises(IndexOwnershipError, match="the end of a queue is no block"):
        end.is_null = True
    with pytest.raises(IndexOwnershipError, match="the end of a queue is no block"):
        end.set_block_hash(b"a")
    with pytest.raises(IndexOwnershipError, match="<Block at an end of its queue> is no block of this queue"):
        queue.append(end)
    assert queue.free([end]) == queue.retain([end]) == [end]
    assert not cached.cache([end], [b"a"], 0, 4, 4, None, {})


def test_null_and_masked_blocks_get_no_hash() -> None:
    blocks, cached = BlockQueue(3).blocks, BlockMap()
    blocks[0].is_null = True
    assert cached.cache(blocks, [b"a", b"b", b"c"], 0, 4, 4, [True, False, True], {})
    assert [block.block_hash for block in blocks] == [None, None, key(b"c")]
    queue = BlockQueue(1)
    queue.blocks[0].is_null = True
    assert queue.free(queue.blocks) == queue.retain(queue.blocks) == []
    assert queue.blocks[0].ref_cnt == 0


def published(
    queue: BlockQueue,
    cached: BlockMap,
    *names: bytes,
    before: Sequence[Block] = (),
    session: str | None = None,
) -> list[Block]:
    """Blocks of a prompt with these hashes behind others, which is over: a turn of a session, or of none."""
    queue.set_user(session)
    queue.retain(before)
    queue.set_user(None)
    blocks, _ = queue.alloc(len(names), cached, {})
    cached.cache(blocks, list(names), 0, 4, 4, None, {})
    queue.look_up(4 * (len(before) + len(names)), session)
    queue.add_prompt(blocks, before[-1] if before else None, session)
    if session is not None:
        queue.end_turn(session, [*before, *blocks])
    queue.free(before)
    # vLLM frees the end of a prompt first; here the queue alone would take the beginning first.
    queue.free(blocks)
    return blocks


def test_a_policy_takes_the_ends_of_prompts_first() -> None:
    queue, cached = BlockQueue(5), BlockMap()
    queue.evict_by("lru", 4)
    first = published(queue, cached, b"a", b"b", b"c")
    second = published(queue, cached, b"d", b"e")
    queue.look_up(12)
    queue.retain(first)
    queue.free(first)
    expected = [second[1], second[0], first[2], first[1], first[0]]
    assert queue.alloc(2, cached, {})[0] == expected[:2]
    assert queue.popleft() is expected[2]
    assert queue.popleft_n(2) == expected[3:]
    assert len(cached) == 3, "popped blocks keep their hashes, as vLLM's do"


def test_a_policy_learns_beside_requests_that_have_blocks() -> None:
    """80 of 90 prompts in turn fit what running requests leave, and all would fit with their blocks."""
    found = {}
    for policy in ("lru", "adaptive"):
        queue, cached = BlockQueue(160), BlockMap()
        queue.evict_by(policy, 64)
        queue.alloc(80, cached, {})
        found[policy], held = 0, dict[int, Block]()
        for turn in range(9000):
            name = turn % 90
            block = held.get(name)
            if block is not None and block.block_hash is not None:
                found[policy] += 1
                queue.retain([block])
                queue.look_up(64)
            else:
                [block], _ = queue.alloc(1, cached, {})
                held = {other: its for other, its in held.items() if its is not block} | {name: block}
                cached.cache([block], [name.to_bytes(4, "big")], 0, 64, 64, None, {})
                queue.look_up(64)
                queue.add_prompt([block])
            queue.free([block])
    assert found["lru"] == 0
    assert found["adaptive"] > 4000


def test_what_only_an_ended_session_used_is_taken_first() -> None:
    queue, cached = BlockQueue(7), BlockMap()
    queue.evict_by("adaptive", 4)
    shared = published(queue, cached, b"a")
    other = published(queue, cached, b"b", before=shared, session="other")
    ended = published(queue, cached, b"c", b"d", before=shared, session="chat")
    later = published(queue, cached, b"e", before=[*shared, *ended], session="chat")
    queue.end_turn("chat", [], pause="user")
    queue.end_turn("chat", [], is_last=True)
    latest = published(queue, cached, b"f")
    # The seventh block has no hash. What both have used is no one's.
    assert queue.alloc(1, cached, {})[0] == [queue.blocks[6]]
    assert queue.alloc(3, cached, {})[0] == [*later, ended[1], ended[0]]
    assert queue.alloc(3, cached, {})[0] == [*other, *shared, *latest]


def test_a_turn_supersedes_what_it_leaves() -> None:
    queue, cached = BlockQueue(6), BlockMap()
    queue.evict_by("adaptive", 4)
    other = published(queue, cached, b"a")
    left = published(queue, cached, b"b", b"c", b"d", session="chat")
    kept = published(queue, cached, b"e", before=left[:1], session="chat")
    queue.alloc(1, cached, {})
    assert queue.alloc(2, cached, {})[0] == [left[2], left[1]]
    assert queue.alloc(1, cached, {})[0] == other
    assert queue.alloc(2, cached, {})[0] == [*kept, left[0]]


def test_what_a_running_turn_uses_is_not_superseded() -> None:
    queue, cached = BlockQueue(4), BlockMap()
    queue.evict_by("adaptive", 4)
    other = published(queue, cached, b"a")
    used = published(queue, cached, b"b", b"c", session="chat")
    queue.set_user("chat")
    queue.retain(used)
    queue.set_user(None)
    published(queue, cached, b"d", session="chat")
    queue.free(used)
    assert queue.alloc(1, cached, {})[0] == other


def test_what_waiting_requests_need_is_taken_last() -> None:
    queue, cached = BlockQueue(6), BlockMap()
    queue.evict_by("adaptive", 4)
    first, second, third, rest = (
        published(queue, cached, b"a", b"b"),
        published(queue, cached, b"c"),
        published(queue, cached, b"d"),
        published(queue, cached, b"e", b"f"),
    )
    numbers = [queue.add_waiting(blocks) for blocks in (second, [*first, *third], first)]
    preempted = queue.add_waiting(third, is_next=True)
    assert preempted < numbers[0] < numbers[1] < numbers[2]
    gone = queue.add_waiting(rest)
    queue.remove_waiting(gone)
    queue.remove_waiting(gone)
    # It runs, and what it has used another one needs.
    queue.retain([*first, *third])
    queue.remove_waiting(numbers[1])
    queue.free([*third, *first[::-1]])
    assert queue.alloc(2, cached, {})[0] == rest[::-1]
    assert queue.alloc(4, cached, {})[0] == [*first[::-1], *second, *third]


def test_waiting_requests_may_have_ranks_and_be_looked_up_again() -> None:
    queue, cached = BlockQueue(5), BlockMap()
    queue.evict_by("adaptive", 4)
    first, second, third = (published(queue, cached, *key) for key in ([b"a"], [b"b", b"c"], [b"d", b"e"]))
    later = queue.add_waiting(first, rank=(1, 0), is_next=True)
    early = queue.add_waiting(second[:1], rank=(0, 7))
    earliest = queue.add_waiting([], rank=(0, 6))
    assert earliest < early < later
    # Others have computed more of what they need.
    queue.extend_waiting(early, second)
    queue.extend_waiting(earliest, third[:1])
    assert queue.alloc(3, cached, {})[0] == [third[1], *first, second[1]]
    assert queue.alloc(2, cached, {})[0] == [second[0], third[0]]


def test_sessions_that_were_not_used_say_nothing() -> None:
    queue, cached = BlockQueue(4), BlockMap()
    queue.set_user("chat")
    queue.look_up(4, "chat")
    queue.end_turn("chat", [], pause="user")
    queue.evict_by("lru", 4)
    blocks = published(queue, cached, b"a", b"b")
    queue.end_turn(b"chat", blocks, is_last=True)
    queue.end_turn(2**80, blocks)
    assert BlockQueue(1).add_waiting([], rank=(2, 3)) == (2, 3, 0)
    BlockQueue(1).extend_waiting((2, 3, 0), [])
    queue.alloc(2, cached, {})
    assert queue.alloc(2, cached, {})[0] == [blocks[1], blocks[0]]


def test_blocks_without_a_hash_are_taken_before_those_of_a_policy() -> None:
    queue, cached = BlockQueue(3), BlockMap()
    queue.evict_by("adaptive", 4)
    published(queue, cached, b"a", b"b")
    [plain], _ = queue.alloc(1, cached, {})
    queue.free([plain])
    assert queue.alloc(1, cached, {})[0] == [plain]
    assert len(cached) == 2
    # Blocks that are named without a hash are as if they had not been named.
    queue.add_prompt([plain])
    queue.free([plain])
    assert queue.popleft() is plain


def test_a_block_that_loses_its_hash_is_out_of_the_order() -> None:
    queue, cached = BlockQueue(3), BlockMap()
    queue.evict_by("lru", 4)
    first, second, third = published(queue, cached, b"a", b"b", b"c")
    second.reset_hash()
    # The third is an end still, the first has become one; the second is taken when it is in front.
    assert queue.alloc(3, cached, {})[0] == [first, second, third]


def test_foreign_blocks_are_returned() -> None:
    queue, other, cached = BlockQueue(2), BlockQueue(2), BlockMap()
    given = [queue.popleft(), other.blocks[0], "block"]
    queue.blocks[0].ref_cnt = 1
    assert queue.free(given) == given[1:]
    assert queue.retain(given) == given[1:]
    assert not cached.cache(given, [b"a"] * 3, 0, 4, 4, None, {})
    assert len(cached) == 0


Misuse = tuple["Callable[[BlockQueue, BlockQueue], object]", type[Exception], str]


def hashes(queue: BlockQueue, count: int, mask: list[bool] | None = None) -> None:
    BlockMap().cache(queue.blocks, [b"a"] * count, 0, 4, 4, mask, {})


def set_hash_twice(block: Block) -> None:
    block.set_block_hash(b"a")
    block.set_block_hash(b"a")


FREE, STRANGE = "block [01] is free already", "is no block of this queue"

MISUSE: dict[str, Misuse] = {
    "append another's": (
        lambda q, other: q.append(other.popleft()),
        IndexOwnershipError,
        f"<Block 0: .*> {STRANGE}",
    ),
    "append no block": (lambda q, _: q.append_n([None]), IndexOwnershipError, f"None {STRANGE}"),  # type: ignore[list-item]
    "append a free one": (lambda q, _: q.append_n([q.popleft(), q.blocks[1]]), IndexOwnershipError, FREE),
    "prepend one twice": (lambda q, _: q.prepend_n([q.popleft()] * 2), IndexOwnershipError, FREE),
    "remove another's": (lambda q, other: q.remove(other.blocks[0]), IndexOwnershipError, STRANGE),
    "remove a taken one": (
        lambda q, _: q.remove(q.popleft()),
        RuntimeError,
        "<Block 0: ref_cnt 0> is not free",
    ),
    "retain a lost one": (lambda q, _: q.retain([q.blocks[1], q.popleft()]), RuntimeError, "is not free"),
    "take more": (lambda q, _: q.popleft_n(4), ValueError, "4 blocks asked for, 3 are free"),
    "alloc more": (lambda q, _: q.alloc(4, BlockMap(), {}), ValueError, "4 blocks asked for, 3 are free"),
    "hash twice": (
        lambda q, _: set_hash_twice(q.blocks[0]),
        AssertionError,
        "block 0 already has a hash",
    ),
    "too few hashes": (lambda q, _: hashes(q, 1), AssertionError, "3 blocks were given with 1 hashes"),
    "a short mask": (lambda q, _: hashes(q, 3, [True]), AssertionError, "a mask of 1"),
    "map no block": (lambda *_: BlockMap().insert(b"a", 3), AttributeError, "block_id"),  # type: ignore[arg-type]
    "evict by nothing known": (
        lambda q, _: q.evict_by("newest", 4),
        ConfigError,
        "unknown policy 'newest'; use one of .*adaptive",
    ),
    "evict empty blocks": (
        lambda q, _: q.evict_by("adaptive", 0),
        ConfigError,
        "block_size is 0; it must be",
    ),
    "evict endless blocks": (lambda q, _: q.evict_by("lru", 2**20), ConfigError, "block_size is 1048576"),
    "a prompt of another's": (lambda q, other: q.add_prompt(other.blocks), IndexOwnershipError, STRANGE),
    "a prompt after another's": (
        lambda q, other: q.add_prompt(q.blocks, other.blocks[0]),
        IndexOwnershipError,
        STRANGE,
    ),
    "end a turn of another's": (
        lambda q, other: q.end_turn("chat", other.blocks),
        IndexOwnershipError,
        STRANGE,
    ),
    "wait for another's": (lambda q, other: q.add_waiting(other.blocks), IndexOwnershipError, STRANGE),
    "find another's": (
        lambda q, other: q.extend_waiting((0, 0, 1), other.blocks),
        IndexOwnershipError,
        STRANGE,
    ),
    "pause at the end": (
        lambda q, _: q.end_turn("chat", [], pause="user", is_last=True),
        ValueError,
        "a session that ends does not pause, and pause is 'user'",
    ),
    "a session of 1.5": (
        lambda q, _: q.set_user(1.5),  # type: ignore[arg-type]
        TypeError,
        "session must be a str, bytes or an int",
    ),
    "hash by md5": (lambda *_: BlockHasher("md5", 16), ConfigError, 'algorithm is "md5"'),
    "hash no tokens": (lambda *_: BlockHasher("sha256", 0), ConfigError, "block_size is 0"),
    "find no run": (lambda *_: BlockMap().find_last_run([3], [0], 1), TypeError, "bytes"),  # type: ignore[list-item]
    "find no hash": (lambda *_: BlockMap().find_prefix([3], [0]), TypeError, "bytes"),  # type: ignore[list-item]
}


@pytest.mark.parametrize("name", MISUSE)
def test_misuse_is_an_error_and_takes_nothing_in(name: str) -> None:
    queue, other = BlockQueue(3), BlockQueue(3)
    work, kind, words = MISUSE[name]
    with pytest.raises(kind, match=words):
        work(queue, other)
    free = ids(queue)
    assert len(free) == len(set(free)) == queue.num_free_blocks
    assert set(free) >= {1, 2}


def test_a_free_block_that_is_counted_is_not_handed_out() -> None:
    queue = BlockQueue(3)
    queue.blocks[1].ref_cnt = 2
    with pytest.raises(AssertionError, match="block 1 is free, and counted 2 times"):
        queue.alloc(2, BlockMap(), {})
    assert ids(queue) == [0, 1, 2]
    assert [block.block_id for block in queue.alloc(1, BlockMap(), {})[0]] == [0]


def test_hashes_that_are_none_stop_an_alloc_that_takes_nothing() -> None:
    queue, cached = BlockQueue(3), BlockMap()
    cached.cache(queue.blocks, [b"a", b"b", b"c"], 0, 4, 4, None, {})
    more = {1: [3]}
    with pytest.raises(TypeError, match="bytes"):
        queue.alloc(3, cached, more)  # type: ignore[arg-type]
    assert ids(queue) == [0, 1, 2]
    assert [block.ref_cnt for block in queue.blocks] == [0, 0, 0]
    assert more == {1: [3]}
    assert queue.blocks[1].block_hash == key(b"b")


def test_a_count_below_zero_is_none() -> None:
    queue = BlockQueue(2)
    queue.blocks[1].ref_cnt = -1
    queue.retain(queue.blocks[1:])
    assert (queue.blocks[1].ref_cnt, ids(queue)) == (1, [0])


def test_taking_a_block_from_an_empty_queue_raises() -> None:
    queue = BlockQueue(1)
    queue.popleft()
    with pytest.raises(ValueError, match="No free blocks available"):
        queue.popleft()


def test_blocks_outlive_their_queue() -> None:
    queue = BlockQueue(2)
    blocks, _ = queue.alloc(2, BlockMap(), {})
    del queue
    assert [block.ref_cnt for block in blocks] == [1, 1]
    assert [block.next_free_block for block in blocks] == [None, None]
    assert [block.pool for block in blocks] == [None, None]
    with pytest.raises(TypeError, match=r"No constructor|cannot create"):
        Block()


def test_threads_share_blocks_without_losing_one() -> None:
    queue, cached = BlockQueue(64), BlockMap()
    more: dict[int, set[bytes]] = {}

    def work(name: int) -> None:
        for turn in range(300):
            blocks, _ = queue.alloc(8, cached, more)
            cached.cache(blocks[:4], [b"%d:%d:%d" % (name, turn, at) for at in range(4)], 0, 4, 4, None, more)
            queue.retain(blocks)
            queue.free(blocks)
            queue.free(blocks)

    threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(ids(queue)) == list(range(64))
    assert {block.ref_cnt for block in queue.blocks} == {0}
    hashed = {block.block_id for block in queue.blocks if block.block_hash is not None}
    assert {block.block_id for _, blocks in cached.items() for block in blocks} == hashed
