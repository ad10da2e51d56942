"""kvpool's pool of blocks beside vLLM's own: random histories of calls, misuse, and what replaces what."""

from __future__ import annotations

import gc
import logging
import random
import weakref
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import prometheus_client
import pytest
from vllm.config.scheduler import SchedulerConfig
from vllm.utils import hashing as vllm_hashing
from vllm.v1.core import block_pool as vllm_block_pool
from vllm.v1.core import kv_cache_coordinator, kv_cache_utils
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched import async_scheduler as vllm_async_scheduler
from vllm.v1.core.sched import scheduler as vllm_scheduler
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import core as vllm_core

import kvpool
from kvpool._kvpool import Block, BlockHasher, BlockQueue
from kvpool.errors import IndexOwnershipError
from kvpool.integrations import vllm as plugin
from kvpool.integrations.seams import EngineMismatchError
from kvpool.integrations.vllm import hashing, replaced, seams, tokens
from kvpool.integrations.vllm.block_pool import KvpoolBlockPool
from kvpool.integrations.vllm.kv_cache_manager import KvpoolKVCacheManager

if TYPE_CHECKING:
    from collections.abc import Callable

SIZE = 4
COUNT = 24
STEPS = 1500


def request(name: str, blocks: int) -> SimpleNamespace:
    """The attributes of a request that a pool reads. The hashes are made from its name."""
    return SimpleNamespace(
        block_hashes=[f"{name}:{number}".encode() for number in range(blocks)],
        all_token_ids=list(range(blocks * SIZE)),
        lora_request=None, session_id=None, mm_features=[], cache_salt=None, prompt_embeds=None,
    )  # fmt: skip


def blocks_of(pool: Any, numbers: list[int]) -> list[Any]:  # noqa: ANN401
    return [pool.blocks[number] for number in numbers]


def state(pool: Any) -> object:  # noqa: ANN401
    """The visible state of a pool, with blocks by their numbers."""
    return (
        [block.block_id for block in pool.free_block_queue.get_all_free_blocks()],
        [(b.ref_cnt, b.block_hash, b.block_hash_num_tokens, b.is_null) for b in pool.blocks],
        [pool.is_block_writable(block) for block in pool.blocks],
        len(pool.cached_block_hash_to_block),
        pool.cached_block_hashes_by_block,
        (pool.get_num_free_blocks(), pool.get_usage()),
        [repr(event) for event in pool.take_events()],
    )


class History:
    """The same calls to a pool of kvpool and to one of vLLM: requests with common prompts, two groups."""

    def __init__(self, seed: int, *, caching: bool, events: bool) -> None:
        kinds: list[Any] = [KvpoolBlockPool, vllm_block_pool.BlockPool]
        self.pools = [kind(COUNT, caching, SIZE, enable_kv_cache_events=events) for kind in kinds]
        self.rng = random.Random(seed)  # noqa: S311 - a test
        self.caching = caching
        # By a number the prompt, the group and the blocks of a request.
        self.held: dict[int, tuple[str, int, list[int]]] = {}

    def call(self, work: Callable[[Any], Any]) -> Any:  # noqa: ANN401
        answers = [work(pool) for pool in self.pools]
        assert answers[0] == answers[1]
        return answers[1]

    def any_name(self) -> int:
        return self.rng.choice(list(self.held))

    def take(self, step: int) -> None:
        """Finds what is there of a prompt, uses that, and takes more blocks, or fails."""
        name, group, count = self.rng.choice("abcd"), self.rng.randrange(2), self.rng.randrange(6)
        hashes = request(name, 6).block_hashes

        def taken(pool: Any) -> tuple[list[int], str]:  # noqa: ANN401
            assert len(pool.get_cached_block(hashes[0], [0, 1]) or []) in {0, 2}
            blocks = [
                found[0] for found in (pool.get_cached_block(each, [group]) for each in hashes) if found
            ]
            pool.touch([pool.null_block, *blocks])
            try:
                return [block.block_id for block in [*blocks, *pool.get_new_blocks(count)]], ""
            except ValueError as error:
                return [block.block_id for block in blocks], str(error)

        self.held[step] = name, group, self.call(taken)[0]

    def hash(self, _: int) -> None:
        """Gives blocks of a request that have no hash theirs, behind null blocks, some with a mask."""
        name, group, blocks = self.held[self.any_name()]
        plain = [
            number for number in dict.fromkeys(blocks) if self.pools[1].blocks[number].block_hash is None
        ]
        first, mask = self.rng.randrange(3), None
        if self.rng.random() < 0.5:
            mask = [self.rng.random() < 0.8 for _ in range(first + len(plain))]
        asked = request(name, first + len(plain) + 1)
        if self.caching and self.rng.random() < 0.7:
            self.call(
                lambda pool: pool.cache_full_blocks(
                    asked,
                    [pool.null_block] * first + blocks_of(pool, plain),
                    0,
                    first + len(plain),
                    SIZE,
                    group,
                    mask,
                )
            )
        elif self.caching and plain:
            for tokens in (SIZE, 2 * SIZE):
                self.call(
                    lambda pool, tokens=tokens: pool.cache_partial_block(  # type: ignore[misc]
                        request(name, 2), blocks_of(pool, plain)[0], tokens, group, SIZE
                    )
                )

    def free(self, _: int) -> None:
        blocks = self.held.pop(self.any_name())[2]
        self.call(lambda pool: pool.free_blocks(reversed([pool.null_block, *blocks_of(pool, blocks)])))

    def touch(self, step: int) -> None:
        if len(self.held) < 6:
            name, group, blocks = self.held[self.any_name()]
            self.call(lambda pool: pool.touch([pool.null_block, *blocks_of(pool, blocks)]))
            self.held[step] = name, group, blocks

    def evict(self, _: int) -> None:
        chosen = set(self.rng.sample(range(COUNT), 3))
        self.call(lambda pool: pool.evict_blocks(chosen))

    def move(self, _: int) -> None:
        blocks = self.pools[1].blocks
        hashed = [block.block_id for block in blocks if block.block_hash is not None]
        plain = [block.block_id for block in blocks if self.pools[1].is_block_writable(block)]
        if hashed and plain:
            self.call(lambda pool: pool.move_block_hashes(*blocks_of(pool, [hashed[0], plain[0]])))

    def reset(self, step: int) -> None:
        """Forgets all hashes, which is refused while a request has blocks."""
        while self.held and self.rng.random() < 0.5:
            self.free(step)
        is_used = any(blocks for *_, blocks in self.held.values())
        assert self.call(lambda pool: pool.reset_prefix_cache()) is not is_used


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("events", [False, True])
@pytest.mark.parametrize("caching", [False, True])
def test_random_histories_leave_the_same_pool(seed: int, *, caching: bool, events: bool) -> None:
    history = History(seed, caching=caching, events=events)
    always, if_held = (
        [history.take, history.evict, history.reset],
        [history.hash] * 3
        + [
            history.free,
            history.touch,
            history.move,
        ],
    )
    for number in range(STEPS):
        history.rng.choice(always + (if_held if history.held else []))(number)
        history.call(state)


def test_a_second_free_is_a_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    pool = KvpoolBlockPool(8, enable_caching=True, hash_block_size=SIZE)
    blocks = pool.get_new_blocks(3)
    pool.free_blocks(blocks)
    order = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
    with caplog.at_level(logging.WARNING, "kvpool"):
        pool.free_blocks(blocks[:1])
    [message] = caplog.messages
    assert message.startswith("BlockQueue-")
    assert message.endswith(": dropped 1 of 1 freed blocks: 1 (already free)")
    assert [block.block_id for block in pool.free_block_queue.get_all_free_blocks()] == order
    assert [block.ref_cnt for block in blocks] == [0, 0, 0]


def test_blocks_of_other_pools_go_to_these() -> None:
    pools = [KvpoolBlockPool(8, enable_caching=True, hash_block_size=SIZE) for _ in range(2)]
    own = vllm_block_pool.BlockPool(8, enable_caching=True, hash_block_size=SIZE)
    mixed = [block for pool in (*pools, own) for block in pool.get_new_blocks(2)]
    pools[0].free_blocks(reversed(mixed))
    assert [pool.get_num_free_blocks() for pool in (*pools, own)] == [7, 7, 7]


def test_a_block_of_no_pool_is_counted_and_hashed_but_never_handed_out() -> None:
    pool = KvpoolBlockPool(8, enable_caching=True, hash_block_size=SIZE)
    stranger = KVCacheBlock(3)
    pool.cache_full_blocks(request("a", 1), [stranger], 0, 1, SIZE, 0)
    assert pool.get_cached_block(b"a:0", [0]) == [stranger]
    pool.free_blocks([stranger])
    assert stranger.ref_cnt == -1
    with pytest.raises(IndexOwnershipError, match="is no block of this queue"):
        pool.touch([KVCacheBlock(4)])
    assert pool.get_num_free_blocks() == 7


def test_contents_are_read_until_a_block_is_used_again() -> None:
    pool = KvpoolBlockPool(4, enable_caching=True, hash_block_size=SIZE)
    reused: list[Block] = []
    blocks = pool.get_new_blocks(2)
    pool.unpin_blocks(blocks, reused.append)
    assert pool.get_new_blocks(1)
    assert not reused
    assert pool.get_new_blocks(2) == reused == blocks


def test_a_watcher_may_use_the_pool_while_hashes_are_removed() -> None:
    pool = KvpoolBlockPool(4, enable_caching=True, hash_block_size=SIZE)
    blocks = pool.get_new_blocks(2)
    pool.cache_full_blocks(request("a", 2), blocks, 0, 2, SIZE, 0)
    found: list[object] = []

    def watch(_: Block) -> None:
        found.append(pool.get_cached_block(b"a:0", [0]))
        raise RuntimeError("a watcher fails")

    pool.unpin_blocks(blocks, watch)
    with pytest.raises(RuntimeError, match="a watcher fails"):
        pool.reset_prefix_cache()
    assert found == [None]
    assert pool.get_cached_block(b"a:0", [0]) is None


def test_a_collector_of_metrics_sees_every_call() -> None:
    seen: list[tuple[str, int]] = []

    class Collector:
        def __getattr__(self, name: str) -> Any:  # noqa: ANN401
            return lambda *blocks: seen.extend((name, block.block_id) for block in blocks)

    pool = KvpoolBlockPool(4, True, SIZE, metrics_collector=Collector())
    blocks = pool.get_new_blocks(1)
    pool.touch(blocks)
    assert seen == [("on_block_evicted", 1), ("on_block_allocated", 1), ("on_block_accessed", 1)]


def test_a_pool_goes_with_its_last_name() -> None:
    pool = KvpoolBlockPool(8, enable_caching=True, hash_block_size=SIZE)
    block, gone = pool.blocks[2], weakref.ref(pool)
    assert block.pool is pool
    gc.disable()
    try:
        del pool
        assert gone() is None
    finally:
        gc.enable()
    assert block.pool is None
    assert block.next_free_block is None


PLACES: list[tuple[Any, str, Any]] = [
    (kv_cache_coordinator, "BlockPool", KvpoolBlockPool),
    (vllm_scheduler, "KVCacheManager", KvpoolKVCacheManager),
    (vllm_core, "get_request_block_hasher", hashing.get_request_block_hasher),
    (vllm_scheduler, "Scheduler", tokens.Scheduler),
    (vllm_async_scheduler, "AsyncScheduler", tokens.AsyncScheduler),
]
"""What is replaced, where, and by what."""


@pytest.fixture(name="own")
def of_vllm(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """vLLM's own classes and functions, put back at the end."""
    monkeypatch.delenv("KVPOOL_VLLM", raising=False)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    found = [getattr(module, name) for module, name, _ in PLACES]
    for (module, name, _), own in zip(PLACES, found, strict=True):
        monkeypatch.setattr(module, name, own)
    return found


def now() -> list[Any]:
    return [getattr(module, name) for module, name, _ in PLACES]


def test_to_be_installed_is_not_enough(own: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    plugin.register()
    assert now() == own


@pytest.mark.parametrize(("name", "value"), [("VLLM_PLUGINS", "other, kvpool"), ("KVPOOL_VLLM", "1")])
@pytest.mark.usefixtures("own")
def test_switched_on_vllm_is_on_kvpool_and_says_so(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(
        logging.getLogger("vllm.plugins.kvpool"), "info", lambda *words: told.append(words[0] % words[1:])
    )
    monkeypatch.setenv(name, value)
    plugin.register()
    plugin.register()
    assert now() == [ours for _, _, ours in PLACES]
    assert told == [f"vLLM 0.33.0 is on kvpool {kvpool.__version__}: blocks, hashes, prefixes, steps, tokens"]
    labels = {
        "engine": "vllm", "engine_version": "0.33.0", "version": kvpool.__version__,
        "seams": "blocks,hashes,prefixes,steps,tokens",
    }  # fmt: skip
    assert prometheus_client.REGISTRY.get_sample_value("kvpool_engine_info", labels) == 1


@pytest.mark.usefixtures("own")
def test_schedulers_that_a_setting_names_are_on_kvpool() -> None:
    named = SchedulerConfig.default_factory(scheduler_cls="kvpool.integrations.vllm.AsyncScheduler")
    assert issubclass(named.get_scheduler_cls(), AsyncScheduler)
    assert issubclass(plugin.Scheduler, Scheduler)
    plugin.install()  # the module may have been imported before
    assert now() == [ours for _, _, ours in PLACES]
    with pytest.raises(AttributeError, match="no attribute 'Other'"):
        _ = plugin.Other  # type: ignore[attr-defined]


@pytest.mark.parametrize("at", range(3))
def test_another_replacement_is_named_and_nothing_is_replaced(
    own: list[Any], at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, name, _ = PLACES[at]
    other = type("Other", (), {})
    monkeypatch.setattr(module, name, other)
    monkeypatch.setenv("VLLM_PLUGINS", "kvpool")
    with pytest.raises(EngineMismatchError, match=f"Other, and not its own {name}"):
        plugin.register()
    assert now() == [*own[:at], other, *own[at + 1 :]]


@pytest.mark.parametrize("other", ["Scheduler", "AsyncScheduler", "both", "vllm"])
def test_schedulers_stay_where_they_are_not_those_of_the_supported_vllm(
    own: list[Any], other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of another package, or of a vLLM whose methods have changed."""
    told: list[Any] = []
    monkeypatch.setattr(replaced, "_tell", told.append)
    monkeypatch.setattr(tokens, "IS_KNOWN", other != "vllm")
    expected = [ours for _, _, ours in PLACES]
    for at, (module, name, _) in enumerate(PLACES):
        if name.endswith("Scheduler") and other in {name, "both"}:
            expected[at] = type("Other", (own[at],), {})
            monkeypatch.setattr(module, name, expected[at])
    if other == "vllm":
        expected[3:] = own[3:]
    plugin.install()
    plugin.install()
    assert now() == expected
    assert told == [(*plugin.SEAMS, "tokens")[: 4 if other in {"both", "vllm"} else 5]]


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"])
@pytest.mark.parametrize("block_size", [1, 3, 16, 256, 4096])
@pytest.mark.parametrize("most", [20, 300, 70_000, 2**31 - 1])
def test_hashes_are_those_of_vllm(algorithm: str, block_size: int, most: int) -> None:
    function = vllm_hashing.get_hash_fn_by_name(algorithm)
    numbers = random.Random(block_size)  # noqa: S311
    tokens = [numbers.randrange(most + 1) for _ in range(3 * block_size)]
    parent = function("parent")
    expected: list[bytes] = []
    for at in range(0, len(tokens), block_size):
        block = tokens[at : at + block_size]
        expected.append(
            kv_cache_utils.hash_block_tokens(function, expected[-1] if expected else parent, block)
        )
    assert BlockHasher(algorithm, block_size).hashes(tokens, 0, parent) == expected


def test_a_hash_that_vllm_computes_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def sha256(_: object) -> bytes:
        return bytes(32)

    monkeypatch.setattr(vllm_hashing, "sha256", sha256)
    kv_cache_utils.init_none_hash(sha256)
    with pytest.raises(EngineMismatchError, match=r"16 tokens hashes to 0000.* by sha256, and to"):
        hashing.get_request_block_hasher(16, sha256)


def test_a_drift_of_the_pool_names_what_was_found_and_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_block_pool.BlockPool, "touch", lambda self, blocks, step: None)  # noqa: ARG005
    with pytest.raises(EngineMismatchError, match=r"touch is \(self, blocks, step\), expected was"):
        seams.VLLM.require(seams.BLOCK_POOL)


def test_blocks_have_the_attributes_of_vllm_blocks() -> None:
    block, own = BlockQueue(1).blocks[0], KVCacheBlock(0)
    assert isinstance(block, Block)
    names = [name for name in dir(own) if not name.startswith("_")]
    assert names
    assert set(names) <= set(dir(block))
