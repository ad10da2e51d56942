"""Offloading in a whole vLLM on the CPU: both managers of chunks, and a restart that finds tokens on disk."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import vllm_copies
from nano_models import make
from vllm.config import KVTransferConfig
from vllm_engine import MODELS, TOKENS, Trace, make_engine, prompts, run

if TYPE_CHECKING:
    from pathlib import Path


def offloading(spec: str, **extra: Any) -> dict[str, Any]:  # noqa: ANN401
    """An engine that offloads, with less memory of its own than the prompts need."""
    return {
        "kv_cache_memory_bytes": 2 << 20,
        "max_model_len": 600,
        "kv_transfer_config": KVTransferConfig(
            kv_connector="OffloadingConnector",
            kv_role="kv_both",
            kv_connector_extra_config={
                "spec_name": spec,
                "spec_module_path": "vllm_copies",
                "cpu_bytes_to_use": 16 << 20,
                **extra,
            },
        ),
    }


def test_both_managers_of_chunks_answer_the_same() -> None:
    place = make(MODELS, "llama")
    plain = make_engine(place, kvpool=True)
    expected = [run(plain, prompts(seed), TOKENS)[0] for seed in (1, 2, 1)]
    vllm_copies.CALLS.clear()
    engine = make_engine(place, kvpool=True, **offloading("LockstepSpec"))
    trace = Trace(engine)
    assert [run(engine, prompts(seed), TOKENS)[0] for seed in (1, 2, 1)] == expected
    assert vllm_copies.CALLS["stored"] > vllm_copies.CALLS["loaded"] > 0
    called = {
        "lookup",
        "prepare_load",
        "complete_load",
        "prepare_store",
        "complete_store",
        "on_request_finished",
    }
    assert called <= vllm_copies.CALLS.keys()
    assert trace.cached_tokens > 0


def test_tokens_come_back_from_disk_after_a_restart(tmp_path: Path) -> None:
    place = make(MODELS, "llama")
    tier = {
        "type": "FileStoreTier", "module_path": "kvpool.integrations.vllm.offload", "path": str(tmp_path),
        "capacity_bytes": 64 << 20,
    }  # fmt: skip
    answers, found = [], []
    for _ in range(2):
        vllm_copies.CALLS.clear()
        engine = make_engine(place, kvpool=True, **offloading("TierSpec", secondary_tiers=[tier]))
        trace = Trace(engine)
        answers.append(run(engine, prompts(1), TOKENS)[0])
        found.append(trace.cached_tokens)
        engine.engine_core.shutdown()
    assert answers[0] == answers[1]
    assert found[1] > found[0]
    assert vllm_copies.CALLS["loaded"] > 0
