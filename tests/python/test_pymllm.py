"""kvpool.integrations.pymllm: its caches by themselves, under pymllm's runner as it ships, and its faults.

The real package comes from the folder that `PYMLLM_PATH` names.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pymllm_engine
import pytest
import torch
from common import some

import kvpool

pymllm_engine.need_pymllm()

from pymllm.mem_cache.base_prefix_cache import BasePrefixCache, RadixKey  # noqa: E402
from pymllm.orchestrator import model_runner_process  # noqa: E402
from pymllm_engine import Engine, Request  # noqa: E402

from kvpool.integrations import pymllm  # noqa: E402
from kvpool.integrations.pymllm import ChunkCache, RadixCache  # noqa: E402
from kvpool.integrations.seams import EngineMismatchError  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.engines

SHORT = 150
"""Requests of a run, in the run of all tests."""
REQUESTS = int(os.environ.get("KVPOOL_ENGINE_REQUESTS", SHORT))

# Of pymllm's own tests those that say something else, and why.
OTHERWISE = {
    "TestEviction::test_evict_frees_tokens": "inserts slots that were never allocated",
    "TestLockEdgeCases::test_dec_without_inc_corrupts_lock_semantics": "documents a fault: R12",
}


@pytest.fixture(autouse=True)
def _enabled() -> Iterator[None]:
    pymllm.enable()
    yield
    pymllm.disable()


class Scene:
    """A cache, and what its owner is told."""

    def __init__(self, **config: Any) -> None:  # noqa: ANN401
        self.allocator = kvpool.TokenToKVPoolAllocator(64, "cpu", strict=True)
        self.gone: list[int] = []
        self.cache = RadixCache(
            token_to_kv_pool_allocator=self.allocator, on_node_evict=self.gone.append, **config
        )

    def take(self, count: int) -> torch.Tensor:
        return some(self.allocator.alloc(count)).to(torch.int64)

    def insert(self, tokens: list[int], slots: torch.Tensor | None = None) -> Any:  # noqa: ANN401
        return self.cache.insert(RadixKey(tokens), self.take(len(tokens)) if slots is None else slots)

    def match(self, *tokens: int) -> Any:  # noqa: ANN401
        return self.cache.match_prefix(RadixKey([*tokens]))


def test_the_surface_is_pymllms() -> None:
    scene = Scene()
    assert isinstance(scene.cache, BasePrefixCache)
    slots = scene.take(3)
    inserted = scene.insert([1, 2, 3], slots)
    assert (inserted.prefix_len, inserted.mamba_exist) == (0, False)
    slots.zero_()  # the cache has copied them
    found = scene.match(1, 2, 3, 4)
    assert (found.prefix_len, found.indices.tolist()) == (3, [1, 2, 3])
    assert found.mamba_branching_seqlen is None
    node = found.last_node
    assert node == inserted.last_node
    assert hash(node) == hash(inserted.last_node)
    assert scene.match(9).last_node == scene.cache.root_node != node
    assert scene.cache.inc_lock_ref(node) is None
    assert (node.lock_ref, node.parent, node.children, node.evicted) == (1, scene.cache.root_node, {}, False)
    assert (node.key.token_ids, node.value.tolist()) == ([1, 2, 3], [1, 2, 3])
    assert (scene.cache.evictable_size(), scene.cache.protected_size()) == (0, 3)
    scene.cache.dec_lock_ref(node, None)
    scene.cache.dec_lock_ref(None, None)
    assert scene.cache.inc_lock_ref(None) is None
    assert (scene.cache.evict(1).full_evicted, scene.gone, node.evicted) == (3, [node.id], True)
    assert repr(node) == f"TreeNode(id={node.id})"
    assert (scene.cache.page_size, scene.cache.device) == (1, torch.device("cpu"))
    assert scene.cache.total_size() == 0


def test_namespaces_are_extra_keys() -> None:
    scene = Scene()
    scene.cache.insert(RadixKey([1, 2], "adapter"), scene.take(2))
    assert scene.match(1, 2).prefix_len == 0
    assert scene.cache.match_prefix(RadixKey([1, 2], "adapter")).prefix_len == 2


def test_a_chunk_cache_keeps_nothing() -> None:
    cache = ChunkCache(token_to_kv_pool_allocator=None, device="cpu")
    assert isinstance(cache, model_runner_process.ChunkCache)
    assert not hasattr(cache, "page_size")
    assert cache.insert(RadixKey([1]), torch.tensor([1])).prefix_len == 0
    found = cache.match_prefix(RadixKey([1]))
    assert (found.prefix_len, found.last_node, found.indices.numel()) == (0, None, 0)
    assert (cache.evict(1).full_evicted, cache.evictable_size()) == (0, 0)


# The faults of pymllm's caches, by their numbers.


def test_r1_inner_nodes_are_evictable() -> None:
    scene = Scene()
    scene.insert([1, 2, 3])
    scene.insert([1, 2, 3, 4, 5])
    assert scene.cache.evictable_size() == 5


def test_r2_a_window_does_not_mix_prefixes() -> None:
    scene = Scene(sliding_window_size=4)
    scene.insert([1, 2, 3, 4, 5, 6])
    scene.insert([1, 2, 3, 7, 8, 9])
    assert scene.match(1, 2, 3, 7, 8, 9).prefix_len == 6
    assert scene.match(1, 2, 3, 4, 5, 6, 7, 8, 9).prefix_len == 6
    assert scene.cache.supports_swa
    assert scene.cache.swa_evictable_size() == 9
    assert scene.cache.swa_protected_size() == 0


def test_r3_an_insertion_frees_nothing() -> None:
    scene = Scene(sliding_window_size=4)
    slots = scene.take(3)
    scene.insert([1, 2, 3], slots)
    again = scene.insert([1, 2, 3], slots)
    assert scene.allocator.available_size() == 61
    assert (again.prefix_len, again.last_node) == (3, scene.match(1, 2, 3).last_node)


def test_r4_and_r5_a_rest_is_owned_once() -> None:
    scene = Scene(page_size=4)
    slots = scene.take(8)
    assert scene.insert([1, 2, 3, 4, 5, 6], slots[:6]).prefix_len == 0
    assert scene.insert([1, 2, 3, 4, 5, 6], slots[:6]).prefix_len == 4
    assert scene.insert([1, 2, 3, 4, 5, 6, 7, 8], slots).prefix_len == 4
    assert scene.cache.total_size() == 8
    assert scene.cache.evict(64).full_evicted == 8
    assert scene.allocator.available_size() == 64


def test_r7_and_r8_there_are_no_states_in_the_tree() -> None:
    scene = Scene(mamba_pool=object())
    node = scene.insert([1, 2, 3, 4]).last_node
    half = scene.match(1, 2).last_node
    assert half != node, "a state at the end of the whole prompt is not that of its half"
    scene.cache.inc_lock_ref(node)
    scene.cache.dec_lock_ref(node, None)
    with pytest.raises(TypeError, match="mamba_value"):
        scene.cache.insert(RadixKey([5]), scene.take(1), mamba_value=torch.tensor([9]))  # type: ignore[arg-type]


def test_keys_of_bigrams_are_refused() -> None:
    """The runner makes every key of ints: pymllm has no speculative decoding."""
    scene = Scene()
    scene.insert([1, 2])
    bigrams = RadixKey([(1, 2), (2, 3)])
    with pytest.raises(TypeError):
        scene.cache.match_prefix(bigrams)
    with pytest.raises(TypeError):
        scene.cache.insert(bigrams, scene.take(2))
    assert (scene.cache.total_size(), scene.match(1, 2).prefix_len) == (2, 2)


def test_r10_a_window_is_evicted_in_the_order_of_use() -> None:
    scene = Scene(sliding_window_size=4)
    scene.insert([1])
    other = scene.insert([2]).last_node
    scene.match(1)
    scene.cache.evict(1)
    assert scene.gone == [other.id]


def test_r11_the_half_that_was_not_found_is_not_refreshed() -> None:
    scene = Scene()
    deep = scene.insert([1, 2, 3, 4]).last_node
    scene.insert([5])
    scene.match(1, 2)
    scene.cache.evict(1)
    assert scene.gone == [deep.id]


def test_r12_a_lock_is_not_undone_twice() -> None:
    scene = Scene()
    node = scene.insert([1]).last_node
    with pytest.raises(kvpool.IndexOwnershipError):
        scene.cache.dec_lock_ref(node)
    scene.cache.inc_lock_ref(node)
    assert scene.cache.evict(1).full_evicted == 0


def test_r13_a_reset_frees_and_reports() -> None:
    scene = Scene()
    nodes = {scene.insert([1, 2, 3]).last_node.id, scene.insert([4]).last_node.id}
    scene.cache.reset()
    assert ({*scene.gone}, scene.allocator.available_size()) == (nodes, 64)


def test_r14_an_insertion_needs_live_slots_one_for_each_token() -> None:
    scene = Scene()
    slots = scene.take(2)
    done = scene.insert([1, 2, 3], torch.tensor([*slots.tolist(), 0]))
    assert (done.prefix_len, scene.cache.total_size()) == (0, 2)
    with pytest.raises(ValueError, match="3 tokens and 2 slots"):
        scene.insert([1, 2, 3], slots)


# The runner.


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_the_runner_leaves_nothing_behind_on_dense_models(page_size: int) -> None:
    engine = Engine(radix_cache_page_size=page_size)
    engine.run(REQUESTS)
    assert engine.hit_tokens > REQUESTS
    assert engine.allocator.stats()["dropped_frees"] == 0
    engine.cache._tree.verify()
    engine.check_idle()


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_the_runner_leaves_nothing_behind_on_hybrid_models(page_size: int) -> None:
    engine = Engine(hybrid=True, strict=False, radix_cache_page_size=page_size)
    engine.run(REQUESTS)
    assert engine.hit_tokens > 0
    # The runner frees the place of the last token, which was never computed.
    assert engine.allocator.stats()["dropped_frees"] == REQUESTS
    engine.check_idle()
    states = some(engine.states)
    assert len(states.free) == states.total
    assert engine.process._node_id_to_gdn_track_slot == {}


def test_the_runner_works_with_a_window_and_with_the_mamba_cache() -> None:
    for config in ({"sliding_window_size": 8}, {"enable_mamba_cache": True}):
        engine = Engine(**config)
        assert isinstance(engine.cache, RadixCache)
        engine.run(40)
        assert engine.hit_tokens > 0
        assert engine.allocator.stats()["dropped_frees"] == 0
        engine.check_idle()


def test_the_runner_without_a_cache_frees_what_it_took() -> None:
    engine = Engine(strict=False, disable_radix_cache=True)
    assert type(engine.cache) is ChunkCache
    engine.run(40)
    assert (engine.hit_tokens, engine.allocator.stats()["in_use"]) == (0, 0)


def test_the_runner_evicts_when_it_is_short() -> None:
    engine = Engine(slots=96, rows=4)
    engine.run(REQUESTS, most=1)
    assert engine.allocator.stats()["high_water"] == 96
    engine.check_idle()


def test_the_runner_gives_up_when_everything_is_in_use() -> None:
    engine = Engine(slots=32)
    engine.extend([Request("first", [1, 2] * 12, 4)])
    with pytest.raises(RuntimeError, match="Failed to allocate 20 KV tokens"):
        engine.extend([Request("second", [3] * 20, 4)])
    assert engine.cache.protected_size() == 24
    engine.finish(engine.live[0])
    engine.check_idle()


def test_a_wrong_row_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    # pymllm's own cache, as its HEAD has it, keeps an entry without a slot.
    from pymllm.mem_cache import radix_cache

    pymllm.disable()
    monkeypatch.setattr(model_runner_process, "RadixCache", radix_cache.RadixCache)
    engine = Engine(strict=False)
    with pytest.raises(AssertionError):
        engine.run(SHORT)
        engine.check_idle()


# The seams.


def test_replacements_take_the_arguments_that_pymllm_passes() -> None:
    pymllm.disable()
    assert {name for name, *_ in pymllm._originals()} == {
        "ChunkCache",
        "GDNPool",
        "KVPool",
        "MambaRadixCache",
        "RadixCache",
        "ReqToTokenPool",
        "TokenToKVPoolAllocator",
        "make_full_attention_net_mem_pool",
        "make_req_to_token_pool",
    }


@pytest.mark.parametrize(
    "method", ["match_prefix", "insert", "evict", "inc_lock_ref", "dec_lock_ref", "reset"]
)
def test_methods_take_what_pymllms_take(method: str) -> None:
    for theirs, ours in ((BasePrefixCache, RadixCache), (BasePrefixCache, ChunkCache)):
        expected = [name for name in pymllm._parameters(getattr(theirs, method)) if name != "kwargs"]
        assert pymllm._parameters(getattr(ours, method))[: len(expected)] == expected


def test_enabling_replaces_the_names_and_disabling_brings_them_back() -> None:
    assert model_runner_process.RadixCache is model_runner_process.MambaRadixCache is RadixCache
    assert model_runner_process.ChunkCache is ChunkCache
    pymllm.enable()
    pymllm.disable()
    assert model_runner_process.RadixCache.__module__ == "pymllm.mem_cache.radix_cache"
    assert model_runner_process.ChunkCache.__module__ == "pymllm.mem_cache.chunk_cache"


def test_a_seam_that_is_missing_replaces_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from pymllm.mem_cache import memory_pool

    pymllm.disable()
    monkeypatch.delattr(memory_pool, "GDNPool")
    with pytest.raises(EngineMismatchError, match=r"has no pymllm\..*\.GDNPool.*tested are"):
        pymllm.enable()
    assert model_runner_process.RadixCache is not RadixCache


def test_a_seam_that_has_changed_replaces_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from pymllm.mem_cache import memory_pool

    pymllm.disable()

    def changed(max_reqs: int, color: str) -> None:
        raise NotImplementedError(max_reqs, color)

    monkeypatch.setattr(memory_pool, "make_req_to_token_pool", changed)
    with pytest.raises(EngineMismatchError, match="takes color, which kvpool's make_req_to_token_pool"):
        pymllm.enable()
    assert model_runner_process.RadixCache is not RadixCache


def test_an_untested_version_is_warned_about(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pymllm.disable()
    monkeypatch.setattr(pymllm, "version", lambda: "9.9")
    with caplog.at_level(logging.WARNING):
        pymllm.enable()
        pymllm.enable()
    assert [record.getMessage() for record in caplog.records] == [
        "pymllm 9.9 was not tested with kvpool; tested are 2.0.2, 2.0.2b0"
    ]


def test_the_version_here_is_tested() -> None:
    assert pymllm.version() in pymllm.TESTED


def test_a_started_process_uses_kvpool(tmp_path: Path) -> None:
    main = tmp_path / "serve.py"
    main.write_text(
        """
import multiprocessing
import pymllm_engine
pymllm_engine.need_pymllm()
from kvpool.integrations import pymllm
pymllm.enable()

def child(answers):
    from pymllm.orchestrator import model_runner_process
    answers.put(model_runner_process.RadixCache.__module__)

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    process = context.Process(target=child, args=(answers,))
    process.start()
    print(answers.get(timeout=60))
    process.join()
"""
    )
    folder = str(Path(__file__).with_name("support"))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([folder, *sys.path])}
    done = subprocess.run(
        [sys.executable, str(main)], env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.strip() == "kvpool.integrations.pymllm"


def test_pymllms_own_tests_pass() -> None:
    tests = Path(pymllm_engine.FOLDER) / "pymllm" / "tests" / "test_radix_cache.py"
    if not tests.is_file():
        pytest.skip("this pymllm has no tests of its cache: pymllm/tests/test_radix_cache.py")
    folder = str(Path(__file__).with_name("support"))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([folder, *sys.path])}
    options = ["-q", "-p", "pymllm_plugin", "-c", os.devnull, "--rootdir", str(tests.parent), "-rf"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "-p", "no:cacheprovider", str(tests)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    lines = [line.split(" - ")[0] for line in done.stdout.splitlines() if line.startswith("FAILED ")]
    failed = {line.partition("::")[2] for line in lines}
    assert failed == {*OTHERWISE}, done.stdout
    assert " 58 passed" in done.stdout, done.stdout
