"""kvpool's classes within vLLM: beside vLLM's own, by vLLM's settings, and where vLLM is another.

`tests/python/test_vllm_plugin.py` starts it.
"""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.v1.kv_offload.conftest import make_offloading_config
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.factory import OffloadingSpecFactory

from kvpool._kvpool import _store_keys
from kvpool.errors import ConfigError, IndexOwnershipError, StaleBufferError
from kvpool.integrations import seams as adapters
from kvpool.integrations.seams import EngineMismatchError
from kvpool.integrations.vllm import offload, seams

MODULE = offload.__name__
STEPS = 4000


def keys_of(*numbers: int, group: int = 0) -> list[bytes]:
    return [make_offload_key(number.to_bytes(32, "big"), group) for number in numbers]


class Pair:
    """The same calls to a manager of kvpool and to one of vLLM, each with requests of its own."""

    def __init__(self, ours: Any, theirs: Any) -> None:  # noqa: ANN401
        self.managers = ours, theirs
        self.requests: dict[str, tuple[ReqContext, ReqContext]] = {}

    def request(self, name: str) -> tuple[ReqContext, ReqContext]:
        if name not in self.requests:
            self.requests[name] = ReqContext(req_id=name), ReqContext(req_id=name)
        return self.requests[name]

    def call(self, name: str, keys: list[bytes], request: str, *more: object) -> Any:  # noqa: ANN401
        contexts = zip(self.managers, self.request(request), strict=True)
        ours, theirs = (getattr(manager, name)(keys, context, *more) for manager, context in contexts)
        plain = [self._plain(answer) for answer in (ours, theirs)]
        assert plain[0] == plain[1], (name, keys, request)
        return plain[1]

    def finish(self, request: str) -> None:
        for manager, context in zip(self.managers, self.request(request), strict=True):
            manager.on_request_finished(context)
        del self.requests[request]

    @staticmethod
    def _plain(answer: Any) -> Any:  # noqa: ANN401
        if hasattr(answer, "keys_to_store"):
            return answer.keys_to_store, answer.store_spec.chunk_ids.tolist(), answer.evicted_keys
        return answer.chunk_ids.tolist() if hasattr(answer, "chunk_ids") else answer

    def check(self, keys: list[bytes]) -> None:
        ours, theirs = (
            (
                [manager.lookup(key, ReqContext(req_id="")) for key in keys],
                [(event.keys, event.removed, event.metadata_only) for event in manager.take_events()],
                {name: round(value, 9) for name, value in manager.get_stats().reduce().items()},
            )
            for manager in self.managers
        )
        assert ours == theirs


def pairs(threshold: int) -> list[Pair]:
    """kvpool's manager, and vLLM's with kvpool's order, each beside vLLM's own."""
    options: dict[str, Any] = {"enable_events": True, "store_threshold": threshold, "max_tracker_size": 40}
    policy = {"cache_policy": "KvpoolLRUPolicy", "cache_policy_module_path": MODULE}
    return [
        Pair(offload.KvpoolOffloadingManager(24, **options), CPUOffloadingManager(24, **options)),
        Pair(CPUOffloadingManager(24, **policy, **options), CPUOffloadingManager(24, **options)),
    ]


class History:
    """Random calls to a pair, as an engine makes them."""

    def __init__(self, pair: Pair, seed: int) -> None:
        self.pair = pair
        self.dice = random.Random(seed)  # noqa: S311
        self.known = keys_of(*range(48)) + keys_of(*range(12), group=1)
        self.storing: list[tuple[list[bytes], str]] = []
        self.loading: list[tuple[list[bytes], str]] = []
        self.evicted = self.stored = 0

    def request(self, step: int) -> str:
        """A request. Of some no positions are known, of others not all."""
        name = str(self.dice.randrange(6)) if self.dice.random() < 0.9 else f"brief {step}"
        if name not in self.pair.requests:
            placed = self.dice.sample(self.known, self.dice.choice([0, 30, 60]))
            for context in self.pair.request(name):
                for key in placed:
                    context.set_offload_key_position(key, 16 * (1 + self.known.index(key) % 48))
        return name

    def store(self, name: str) -> None:
        stored = self.pair.call(
            "prepare_store", self.dice.sample(self.known, self.dice.randrange(1, 7)), name
        )
        if stored is not None and stored[0]:
            self.storing.append((stored[0], name))
            self.stored += len(stored[0])
            self.evicted += len(stored[2])

    def load(self, name: str) -> None:
        some = self.dice.sample(self.known, self.dice.randrange(1, 7))
        look = self.pair.managers[1].lookup
        ready = [key for key in some if look(key, ReqContext(req_id="")) is LookupResult.HIT]
        self.pair.call("prepare_load", ready, name)
        self.loading.append((ready, name))

    def end(self, _name: str) -> None:
        if self.storing and (not self.loading or self.dice.random() < 0.6):
            keys, request = self.storing.pop(self.dice.randrange(len(self.storing)))
            self.pair.call("complete_store", keys, request, self.dice.random() < 0.8)
        elif self.loading:
            self.pair.call("complete_load", *self.loading.pop(self.dice.randrange(len(self.loading))))

    def touch(self, name: str) -> None:
        self.pair.call("touch", self.dice.sample(self.known, self.dice.randrange(1, 7)), name)

    def finish(self, name: str) -> None:
        self.pair.finish(name)

    def look(self, _name: str) -> None:
        self.pair.check(self.known)

    def reset(self) -> None:
        for manager in self.pair.managers:
            manager.reset_cache()
        self.storing, self.loading = [], []

    def step(self, number: int) -> None:
        calls = [self.store, self.store, self.load, self.end, self.end, self.touch, self.finish, self.look]
        self.dice.choice(calls)(self.request(number))
        if self.dice.random() < 0.002:
            self.reset()
        manager = self.pair.managers[0]
        if isinstance(manager, offload.KvpoolOffloadingManager):
            manager._table.verify()


@pytest.mark.parametrize("threshold", [0, 2])
@pytest.mark.parametrize("seed", range(3))
def test_random_histories_give_the_same_answers(seed: int, threshold: int) -> None:
    for pair in pairs(threshold):
        history = History(pair, seed)
        for number in range(STEPS):
            history.step(number)
        assert history.stored > history.evicted > 100, "a history without evictions shows little"


def test_one_key_offered_twice_takes_one_place() -> None:
    manager = offload.KvpoolOffloadingManager(4)
    [key] = keys_of(1)
    stored = manager.prepare_store([key, key], ReqContext(req_id="twice"))
    assert stored is not None
    assert (stored.keys_to_store, stored.store_spec.chunk_ids.tolist()) == ([key], [0])


def test_misuse_is_an_error_and_changes_nothing() -> None:
    manager = offload.KvpoolOffloadingManager(4)
    one, two, three = keys_of(1, 2, 3)
    request = ReqContext(req_id="misuse")
    manager.prepare_store([one, two], request)
    manager.complete_store([one], request)
    with pytest.raises(StaleBufferError, match="chunk 1 of 2 is still being stored"):
        manager.prepare_load([one, two], request)
    with pytest.raises(StaleBufferError, match="chunk 1 of 2 is not here"):
        manager.prepare_load([one, three], request)
    manager.prepare_load([one], request)
    with pytest.raises(IndexOwnershipError, match="chunk 1 of 2 is not being loaded"):
        manager.complete_load([one, one], request)
    manager.complete_load([one], request)
    manager.on_request_finished(request)
    with pytest.raises(RuntimeError, match="the request is finished"):
        manager.prepare_store([three], request)
    with pytest.raises(TypeError, match="a key must be bytes, not int"):
        manager.touch([1], request)
    assert manager._table.stats() == {"capacity": 4, "arriving": 1, "loading": 0, "idle": 1}
    with pytest.raises(ConfigError, match="eviction_policy is 'arc'; the manager of kvpool has 'lru'"):
        offload.KvpoolOffloadingManager(4, "arc")


def spec_of(name: str, **extra: Any) -> Any:  # noqa: ANN401
    """A spec as vLLM makes it, by its settings."""
    config = make_offloading_config(
        spec_name=name,
        cpu_bytes_to_use=4 * 4096,
        worker_kv_bytes_per_block=4096,
        engine_id=f"kvpool-{name}-{random.randrange(1 << 60)}",  # noqa: S311
        extra_config={"spec_module_path": MODULE, **extra},
    )
    return OffloadingSpecFactory.create_spec(config)


def test_vllm_makes_the_manager_by_its_settings() -> None:
    spec = spec_of("KvpoolOffloadingSpec", store_threshold=2)
    manager = spec.get_manager()
    assert type(manager) is offload.KvpoolOffloadingManager
    assert spec.get_manager() is manager
    assert manager.config_info() == [spec.cpu_info.as_config_info()]
    assert manager.prepare_store(keys_of(1), ReqContext(req_id="first")).keys_to_store == []
    assert manager.prepare_store(keys_of(1), ReqContext(req_id="second")).keys_to_store == keys_of(1)


class Tiered:
    """Chunks in host memory above a store on disk, as vLLM's scheduler drives them."""

    def __init__(self, folder: Path, **tier: Any) -> None:  # noqa: ANN401
        files = {
            "type": "FileStoreTier",
            "module_path": MODULE,
            "path": str(folder),
            "capacity_bytes": 1 << 20,
        }
        self.manager = spec_of("KvpoolTieringSpec", secondary_tiers=[{**files, **tier}]).get_manager()
        [self.tier] = self.manager.secondary_tiers
        self.memory = torch.frombuffer(self.manager.primary_tier.get_kv_memoryview(), dtype=torch.uint8)
        self.rows = self.memory.view(4, 4096)

    def step(self) -> None:
        self.tier.drain_jobs()
        self.manager.on_schedule_end(ScheduleEndContext(new_req_ids=(), preempted_req_ids=()))

    def store(self, *numbers: int) -> None:
        request = ReqContext(req_id=f"store {numbers}")
        self.manager.on_new_request(request)
        output = self.manager.prepare_store(keys_of(*numbers), request)
        for number, place in zip(numbers, output.store_spec.chunk_ids, strict=True):
            self.rows[int(place)] = number
        self.manager.complete_store(keys_of(*numbers), request)
        self.manager.on_request_finished(request)
        self.step()
        self.step()

    def load(self, number: int) -> int | None:
        """The byte that the chunk is full of; `None` if it is nowhere."""
        request = ReqContext(req_id=f"load {number}")
        self.manager.on_new_request(request)
        [key] = keys_of(number)
        for _ in range(10):
            found = self.manager.lookup(key, request)
            if found in {LookupResult.HIT, LookupResult.MISS}:
                break
            self.step()
        byte = None
        if found is LookupResult.HIT:
            [place] = self.manager.prepare_load([key], request).chunk_ids
            [byte] = set(self.rows[int(place)].tolist())
            self.manager.complete_load([key], request)
        self.manager.on_request_finished(request)
        return byte

    def close(self) -> None:
        del self.rows, self.memory
        self.manager.shutdown()


def test_pages_evicted_from_host_memory_are_read_from_disk(tmp_path: Path) -> None:
    tiers = Tiered(tmp_path)
    for first in (1, 5, 9):
        tiers.store(*range(first, first + 4))
    assert [tiers.load(number) for number in range(1, 13)] == list(range(1, 13))
    assert tiers.load(13) is None
    stats = tiers.tier._store.stats()
    assert stats["hits"] >= 8
    assert stats["errors"] == 0
    tiers.close()

    again = Tiered(tmp_path)  # another process would find the same
    assert [again.load(number) for number in range(1, 14)] == [*range(1, 13), None]
    again.close()


def test_the_beginning_of_a_prompt_outlives_its_end_on_disk(tmp_path: Path) -> None:
    """vLLM names chunks as a set, in parts, and looks them up one at a time."""
    tiers = Tiered(tmp_path, capacity_bytes=8 * 4096, threads=2)
    prompt = keys_of(*range(1, 7))
    request = ReqContext(req_id="prompt")
    for position, key in enumerate(prompt, 1):
        request.set_offload_key_position(key, 16 * position)
    tiers.manager.on_new_request(request)
    for part in ([2, 1, 0], [5, 3, 4]):
        keys = [prompt[at] for at in part]
        tiers.manager.prepare_store(keys, request)
        tiers.manager.complete_store(keys, request)
        tiers.step()
        tiers.step()
    tiers.manager.on_request_finished(request)

    def found() -> list[bool]:
        is_there: list[bool] = tiers.tier._store.find(_store_keys(tiers.tier._space, prompt))
        return is_there

    assert found() == [True] * 6
    looking = ReqContext(req_id="look-up")
    for key in prompt:
        tiers.tier.lookup(key, looking)
    tiers.store(10, 11, 12, 13)
    assert found() == [True] * 4 + [False] * 2
    tiers.close()


def test_a_page_that_is_lost_is_a_failed_load_and_then_a_miss(tmp_path: Path) -> None:
    tiers = Tiered(tmp_path)
    tiers.store(1, 2, 3, 4)
    tiers.store(5, 6, 7, 8)
    [pages] = tmp_path.rglob("pages")
    assert pages.stat().st_size >= 8 * 4096
    pages.write_bytes(bytes(pages.stat().st_size))
    assert [tiers.load(number) for number in (1, 2, 3, 4)] == [None] * 4
    assert [tiers.load(number) for number in (5, 6, 7)] == [5, 6, 7]  # in host memory
    assert tiers.tier._store.stats()["damaged"] == 4
    tiers.close()


def test_it_is_shut_down_with_copies_in_flight(tmp_path: Path) -> None:
    tiers = Tiered(tmp_path)
    request = ReqContext(req_id="last")
    tiers.manager.on_new_request(request)
    tiers.manager.prepare_store(keys_of(1, 2, 3), request)
    tiers.rows[:] = 7
    tiers.manager.complete_store(keys_of(1, 2, 3), request)
    tiers.close()
    again = Tiered(tmp_path)
    assert [again.load(number) for number in (1, 2, 3)] == [7] * 3
    again.close()


def regions() -> set[Path]:
    """The memory that vLLM has mapped."""
    return set(Path("/dev/shm").glob("vllm_offload_*"))  # noqa: S108 - where vLLM puts it


def test_a_directory_that_is_in_use_leaves_nothing_behind(tmp_path: Path) -> None:
    tiers = Tiered(tmp_path)
    before = regions()
    assert before
    with pytest.raises(ConfigError, match="in use by process"):
        Tiered(tmp_path)
    assert regions() <= before
    tiers.store(1)
    assert tiers.load(1) == 1
    tiers.close()


def test_a_drift_of_vllm_names_what_was_found_and_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CPUOffloadingManager, "__init__", lambda self, chunks: None)  # noqa: ARG005
    with pytest.raises(EngineMismatchError) as caught:
        seams.VLLM.require(seams.OFFLOADING)
    said = str(caught.value)
    assert said.startswith("vLLM 0.33.0 is not what kvpool was written for: CPUOffloadingManager.__init__ is")
    assert "(self, chunks), expected was (self, num_chunks, cache_policy='lru'" in said


def test_a_missing_class_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("vllm.v1.kv_offload.file_mapper.FileMapper")
    with pytest.raises(EngineMismatchError, match="has no attribute 'FileMapper'"):
        seams.VLLM.require(seams.OFFLOADING)


def test_another_version_is_warned_about(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seams.VLLM.require(seams.OFFLOADING)
    assert not caplog.records
    monkeypatch.setattr(adapters, "version_of", lambda _: "0.33.0+cpu")
    seams.VLLM.require(seams.OFFLOADING)
    assert not caplog.records
    monkeypatch.setattr(adapters, "version_of", lambda _: "0.34.0")
    with caplog.at_level(logging.WARNING, "kvpool"):
        seams.VLLM.require(seams.OFFLOADING)
        seams.VLLM.require(seams.OFFLOADING)
    assert caplog.messages == ["vLLM 0.34.0 was not tested with kvpool; tested are 0.32.0, 0.33.0"]
