"""A whole vLLM on the CPU, of both versions, on vLLM's own classes and on kvpool's."""

from __future__ import annotations

import pytest
from vllm_engine_runs import run


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("version", ["0.33", "0.32"])
def test_steps_tokens_and_blocks_are_the_same(version: str) -> None:
    assert run(version, "vllm_engine_checks.py") == 9 + 16 + 9 + 6 + 10


@pytest.mark.timeout(900)
def test_offloading_in_an_engine() -> None:
    assert run("0.33", "vllm_offload_checks.py") == 8
