"""`kvpool replay --states`: what a hybrid model finds beside a full-attention model."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvpool.errors import ConfigError
from kvpool.tools.cli import main
from kvpool.tools.replay.hybrid_rates import HybridJob, measure
from kvpool.tools.traces import AgentsSpec, Trace, agents_trace

if TYPE_CHECKING:
    from collections.abc import Sequence


def trace_of(*prompts: Sequence[int], rest: int = 0) -> Trace:
    """A trace of prompts by their blocks of four tokens, the last one without `rest` of them."""
    lens = np.array([4 * len(blocks) - rest for blocks in prompts])
    blocks = tuple(map(np.array, prompts))
    return Trace("test", np.arange(len(lens), dtype=np.float64), lens, np.zeros_like(lens), blocks, 4)


def found(trace: Trace, chunk: int) -> tuple[int, int]:
    """The tokens that a full-attention model and a hybrid one find with much memory."""
    (rate,) = measure(trace, HybridJob([10], [1_000], share=0.5, chunk=chunk)).rates
    assert rate.snapshots == 50
    return rate.full_tokens, rate.hybrid_tokens


def test_a_prompt_that_goes_on_is_found_and_one_that_diverges_from_the_end_of_a_chunk() -> None:
    trace = trace_of([0, 1, 2], [0, 1, 2, 3], [0, 1, 4])
    assert found(trace, 4) == (20, 20)
    assert found(trace, 100) == (20, 12)


def test_a_chunk_ends_where_a_prompt_diverges_so_that_the_next_one_resumes_there() -> None:
    trace = trace_of([0, 1, 2], [0, 1, 3], [0, 1, 4])
    assert found(trace, 100) == (16, 8)


def test_an_arena_gives_snapshots_what_they_are_worth() -> None:
    trace = agents_trace(AgentsSpec(sessions=20, sessions_per_hour=1_000), 0)
    rates = measure(trace, HybridJob([400, 6_000], [400_000], share=None)).rates
    assert [rate.share >= 0.9 for rate in rates] == [True, True]
    # A prompt that does not fit is cut where the memory ends; the snapshots of its beginning go first.
    (rate,) = measure(
        trace_of([0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]), HybridJob([4], [28], share=None, chunk=4)
    ).rates
    assert 12 <= rate.hybrid_tokens < 24


@pytest.mark.parametrize("policy", ["lru", "adaptive"])
def test_snapshots_and_pages_do_not_push_each_other_out(policy: str) -> None:
    """Prompts of three chunks go on while two others have begun; a snapshot takes as much as a prompt."""
    begun = [list(range(20 * number, 20 * number + 12)) for number in range(200)]
    gone_on = [[*prompt, prompt[0] + 12, prompt[0] + 13] for prompt in begun]
    turns = [turn for pair in zip(begun[2:], gone_on, strict=False) for turn in pair]
    (rate,) = measure(trace_of(*turns), HybridJob([50], [1_000], share=None, chunk=16, policy=policy)).rates
    assert rate.share > 0.6


def test_the_last_block_of_a_prompt_counts_only_if_it_is_full() -> None:
    assert found(trace_of([0, 1], [0, 1], rest=1), 100) == (4, 4)


def test_snapshots_of_agents_in_a_twentieth_of_the_memory_find_95_percent() -> None:
    trace = agents_trace(AgentsSpec(sessions=20, sessions_per_hour=1_000), 0)
    (rate,) = measure(trace, HybridJob([1_600], [400_000], chunk=8_192)).rates
    assert rate.snapshots == 12
    assert rate.share >= 0.95


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (HybridJob([1], [100], chunk=3), "chunk 3 is less than a block of 4 tokens"),
        (HybridJob([6], [100]), "5% of 100 tokens for snapshots: needs place for a snapshot of 6 tokens"),
        (HybridJob([1], [5], share=0.4), "beside it for a block of 4"),
    ],
)
def test_rejects_memory_without_place_for_a_snapshot_or_a_block(job: HybridJob, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        measure(trace_of([0]), job)


AGENTS = ("replay", "--agents", "sessions=2,sessions_per_hour=1000", "--capacity", "400K", "--states", "1600")


def test_the_command_prints_a_table_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*AGENTS, "--requests", "20"]) == 0
    assert "full attention" in capsys.readouterr().out
    assert main([*AGENTS, "--requests", "20", "--state-share", "0.1", "--chunk", "512", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    (rate,) = result["rates"]
    assert (result["chunk"], rate["snapshots"]) == (512, 25)
    assert rate["share_found"] == rate["hybrid_tokens"] / rate["full_tokens"] > 0
    assert main([*AGENTS, "--requests", "20", "--state-share", "arena"]) == 0
    assert "as much memory as they are worth" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--compare"], "without --compare"),
        (["--state-share", "1"], "is not between 0 and 1"),
        (["--states", "few"], "--states: 'few' is not a size in tokens"),
    ],
)
def test_the_command_refuses_other_options(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([*AGENTS, *options])
    assert message in capsys.readouterr().err
