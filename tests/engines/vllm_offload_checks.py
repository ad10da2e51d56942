"""`KvpoolConnector` in a whole vLLM on the CPU: host memory, both managers, and tokens on disk."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import vllm_lockstep
from nano_models import make
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm_engine import MODELS, TOKENS, Trace, make_engine, prompts, run, scheduler_of

from kvpool import pools
from kvpool.errors import ConfigError
from kvpool.integrations.vllm import connector

if TYPE_CHECKING:
    from pathlib import Path

    from vllm.v1.engine.llm_engine import LLMEngine

SMALL: dict[str, Any] = {"kv_cache_memory_bytes": 2 << 20, "max_model_len": 600}
"""Less memory than the prompts need, so that they come back from elsewhere."""


def offloading(**extra: Any) -> dict[str, Any]:  # noqa: ANN401
    return {
        "kv_transfer_config": KVTransferConfig(
            kv_connector="KvpoolConnector",
            kv_connector_module_path="kvpool.integrations.vllm.connector",
            kv_role="kv_both",
            kv_connector_extra_config={"cpu_bytes_to_use": 16 << 20, **extra},
        ),
    }


@pytest.fixture(name="moved")
def bytes_moved(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The bytes that were copied up and down."""
    moved = {"up": 0, "down": 0}
    own = connector.CopyWorker._copy

    def copy(self: Any, job: int, engine: Any, host: Any, *, stores: bool) -> bool:  # noqa: ANN401
        done = own(self, job, engine, host, stores=stores)
        moved["down" if stores else "up"] += self._done[-1].transfer_size
        return done

    monkeypatch.setattr(connector.CopyWorker, "_copy", copy)
    return moved


def rounds(engine: LLMEngine) -> list[dict[str, list[int]]]:
    return [run(engine, prompts(seed), TOKENS, f"{at}-")[0] for at, seed in enumerate((1, 2, 1))]


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("llama", SMALL),
        ("gemma3", {"kv_cache_memory_bytes": 6 << 20, "max_model_len": 600}),
    ],
)
def test_blocks_come_back_from_host_memory(
    moved: dict[str, int], model: str, options: dict[str, Any]
) -> None:
    place = make(MODELS, model)
    roomy = {**options, "kv_cache_memory_bytes": 64 << 20}
    plain = make_engine(place, kvpool=True, **roomy)
    expected = rounds(plain)
    plain.engine_core.shutdown()
    engine = make_engine(place, kvpool=True, **options, **offloading())
    # The engine's bytes are a pool of kvpool's: its metrics and snapshots have them.
    memory = get_kv_transfer_group().memory
    assert memory in list(pools())
    assert memory.used_bytes >= options["kv_cache_memory_bytes"] * 0.9
    assert rounds(engine) == expected
    assert moved["down"] > moved["up"] > 0
    engine.engine_core.shutdown()
    assert memory.closed


def test_both_managers_of_chunks_answer_the_same(moved: dict[str, int]) -> None:
    place = make(MODELS, "llama")
    plain = make_engine(place, kvpool=True)
    expected = rounds(plain)
    plain.engine_core.shutdown()
    vllm_lockstep.CALLS.clear()
    lockstep = offloading(spec_name="LockstepSpec", spec_module_path="vllm_lockstep")
    engine = make_engine(place, kvpool=True, **SMALL, **lockstep)
    assert rounds(engine) == expected
    assert moved["down"] > moved["up"] > 0
    called = {"lookup", "prepare_load", "complete_load", "prepare_store", "complete_store"}
    assert called <= vllm_lockstep.CALLS.keys()
    engine.engine_core.shutdown()


def test_tokens_come_back_from_disk_after_a_restart(moved: dict[str, int], tmp_path: Path) -> None:
    answers, found = [], []
    for _ in range(2):
        moved["up"] = 0
        disk = offloading(path=str(tmp_path), capacity_bytes=64 << 20)
        engine = make_engine(make(MODELS, "llama"), kvpool=True, **SMALL, **disk)
        trace = Trace(engine)
        answers.append(run(engine, prompts(1), TOKENS)[0])
        found.append(trace.cached_tokens)
        engine.engine_core.shutdown()
    assert answers[0] == answers[1]
    assert found[1] > found[0]
    assert moved["up"] > 0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"cpu_bytes_to_use": 0}, "needs cpu_bytes_to_use"),
        ({"path": "/somewhere"}, "capacity_bytes None"),
        ({"capacity_bytes": 5}, "path is None"),
    ],
)
def test_settings_that_are_not_whole_are_named(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_engine(make(MODELS, "llama"), kvpool=True, **SMALL, **offloading(**settings))


def test_only_whole_buffers_of_bytes_are_taken() -> None:
    engine = make_engine(make(MODELS, "llama"), kvpool=True, **SMALL, **offloading())
    memory = get_kv_transfer_group().memory
    used = memory.used_bytes
    with connector._zeros_from(memory):
        assert torch.zeros(2, 3).shape == (2, 3)
        assert torch.zeros(5, dtype=torch.int32).dtype == torch.int32
    assert memory.used_bytes == used
    assert scheduler_of(engine).connector.memory is None  # the scheduler's half owns none
    engine.engine_core.shutdown()
