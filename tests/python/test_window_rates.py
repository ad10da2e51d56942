"""`kvpool replay --windows`: what a model with sliding windows finds beside them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvpool.errors import ConfigError
from kvpool.tools.cli import main
from kvpool.tools.replay.window_rates import WindowedModel, WindowJob, measure
from kvpool.tools.traces import AgentsSpec, Trace, agents_trace

if TYPE_CHECKING:
    from collections.abc import Sequence


def trace_of(*prompts: Sequence[int]) -> Trace:
    """A trace of prompts by their blocks of four tokens."""
    lens = np.array([4 * len(blocks) for blocks in prompts])
    blocks = tuple(map(np.array, prompts))
    return Trace("test", np.arange(len(lens), dtype=np.float64), lens, np.zeros_like(lens), blocks, 4)


def found(trace: Trace, capacity: int, window: int = 4, policy: str = "adaptive") -> tuple[int, int]:
    """The tokens that could be found and those that are, with three layers with a window for a full one."""
    job = WindowJob([WindowedModel(window, 3)], [capacity], chunk=16, policy=policy)
    (rate,) = measure(trace, job).rates
    return rate.possible_tokens, rate.found_tokens


def test_a_prompt_goes_on_at_the_end_of_another_one_and_where_others_have_diverged() -> None:
    assert found(trace_of([0, 1, 2], [0, 1, 2, 3]), 1_000) == (12, 12)
    # Within a prompt there is no window, unless another one has diverged there.
    assert found(trace_of([0, 1, 2], [0, 1, 3], [0, 1, 4]), 1_000) == (16, 8)


@pytest.mark.parametrize("policy", ["lru", "adaptive"])
def test_windows_take_memory_from_what_is_found(policy: str) -> None:
    order = [(3, number) for number in range(8)] + [(6, number) for number in reversed(range(8))]
    turns = [[*range(10 * number, 10 * number + length)] for length, number in order]
    possible, kept = found(trace_of(*turns), 1_000, 8, policy)
    assert possible == kept == 8 * 12
    # 8 prompts of 3 blocks and a window of 2 blocks for each; a block in four is of the full layer.
    possible, kept = found(trace_of(*turns), 60, 8, policy)
    assert possible == 8 * 12
    assert 0 < kept < possible


def test_ends_within_sessions_go_before_their_last_ones() -> None:
    """Agents go on at the end of their context: windows within it are of no use."""
    trace = agents_trace(AgentsSpec(sessions=20, sessions_per_hour=1_000), 0)
    for policy in ("lru", "adaptive"):
        (rate,) = measure(trace, WindowJob([WindowedModel(8192, 3)], [250_000], policy=policy)).rates
        assert rate.share > 0.9


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (WindowJob([WindowedModel(4, 1)], [100], chunk=3), "chunk 3 is less than a block of 4 tokens"),
        (WindowJob([WindowedModel(6, 1)], [100]), "window 6 is no whole number of blocks of 4 tokens"),
    ],
)
def test_rejects_what_is_no_whole_block(job: WindowJob, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        measure(trace_of([0]), job)


AGENTS = ("replay", "--agents", "sessions=2,sessions_per_hour=1000", "--capacity", "400K")


def test_the_command_prints_a_table_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    command = [*AGENTS, "--windows", "1024x1, 4096x3", "--requests", "20"]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "3 of 4" in printed
    assert "if it were free" in printed
    assert main([*command, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [rate["model"] for rate in result["rates"]] == [
        {"window": 1024, "layers": 1},
        {"window": 4096, "layers": 3},
    ]
    for rate in result["rates"]:
        assert rate["share_found"] == rate["found_tokens"] / rate["possible_tokens"] > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--windows", "1024"], "'1024' is no window and its layers, such as 1024x5"),
        (["--windows", "0x5"], "'0x5' is no window and its layers"),
        (["--windows", "1024x1", "--states", "400"], "--states and --windows have a table each"),
        (["--windows", "1024x1", "--compare"], "--windows has a table of its own, without --compare"),
        (["--windows", "1024x1", "--in-use", "0.1"], "without --states and --windows"),
    ],
)
def test_the_command_refuses_other_options(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([*AGENTS, *options])
    assert message in capsys.readouterr().err
