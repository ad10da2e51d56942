"""The generated workload of agents: its statistics, its contexts, and its specification."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import command_line
import numpy as np
import pytest

from kvpool.errors import ConfigError
from kvpool.tools.cli import main
from kvpool.tools.traces import END, AgentsSpec, Trace, agents_trace, parse_agents
from kvpool.tools.traces.agents import FIRST_STEPS, HUMAN_S, REQUESTS, TOOL_S, TOOL_STEPS, Percentiles

if TYPE_CHECKING:
    from numpy.typing import NDArray

ALONE = AgentsSpec(sub_agents=0.0, abandoned=0.0)


def prompts(trace: Trace, session: int) -> list[list[int]]:
    """The blocks of the prompts of a session, in order."""
    assert trace.sessions is not None
    return [trace.blocks[at].tolist() for at in np.flatnonzero(trace.sessions == session)]


def growth_of(trace: Trace) -> NDArray[np.int64]:
    """By how many tokens the prompts of sessions are longer than those before."""
    assert trace.sessions is not None
    sessions = range(int(trace.sessions.max()) + 1)
    return np.concatenate([np.diff(trace.input_lens[trace.sessions == one]) for one in sessions])


def common(one: list[int], other: list[int]) -> int:
    """The number of blocks with which both begin."""
    differ = (at for at, (left, right) in enumerate(zip(one, other, strict=False)) if left != right)
    return next(differ, min(len(one), len(other)))


@pytest.mark.parametrize(
    ("distribution", "median", "p90", "mean"),
    [
        (REQUESTS, 1, 18, 9.2),
        (TOOL_STEPS, 1, 20, 7.8),
        (FIRST_STEPS, 15, 30, 16.5),
        (TOOL_S, 0.3, 13.6, 16.8),
        (HUMAN_S, 84, 1_236, 2_500),
    ],
    ids=["messages", "steps", "first steps", "seconds of tools", "seconds of users"],
)
def test_distributions_have_the_published_percentiles(
    distribution: Percentiles, median: float, p90: float, mean: float
) -> None:
    generator = np.random.default_rng(7)
    samples = np.array([distribution.sample(generator) for _ in range(40_000)])
    assert samples.min() >= 0
    assert np.percentile(samples, (50, 90)) == pytest.approx([median, p90], rel=0.1)
    whole = np.floor(samples) if distribution in {REQUESTS, TOOL_STEPS, FIRST_STEPS} else samples
    assert whole.mean() == pytest.approx(mean, rel=0.15)


def test_the_workload_resembles_the_published_one() -> None:
    """Prompts and their growth: TraceLab has medians of 116 K and 126 K tokens, and 870 and 886 of growth."""
    trace = agents_trace(AgentsSpec(sessions=300, sub_agents=0.0), 1)
    assert trace.sessions is not None
    calls = np.bincount(trace.sessions)
    assert len(calls) == 300
    assert calls.mean() == pytest.approx(82.5, rel=0.35)
    assert np.median(trace.input_lens) == pytest.approx(121_000, rel=0.2)
    assert np.median(trace.output_lens) == pytest.approx(218, rel=0.1)
    assert trace.output_lens.mean() == pytest.approx(523, rel=0.15)
    growth = growth_of(trace)
    assert np.median(growth) == pytest.approx(870, rel=0.2)
    assert growth[growth > 0].mean() == pytest.approx(1_750, rel=0.2)
    blocks = np.concatenate(trace.blocks)
    assert 0.95 < 1 - len(np.unique(blocks)) / len(blocks) < 0.99


def test_prompts_continue_those_before_until_they_are_compacted() -> None:
    spec = AgentsSpec(sessions=40, sub_agents=0.0, tools_tokens=2_000, project_tokens=600, context=60_000)
    trace = agents_trace(spec, 3)
    assert trace.input_lens.max() <= 60_000
    assert [len(blocks) for blocks in trace.blocks] == (-(-trace.input_lens // spec.block)).tolist()
    shared = 2_600 // spec.block
    compactions = 0
    for session in range(40):
        for before, after in pairwise(prompts(trace, session)):
            if len(after) >= len(before):
                # All but the last block, which is not full.
                assert common(before, after) >= len(before) - 1
            else:
                compactions += 1
                assert common(before, after) == shared
                assert len(before) > 0.7 * 60_000 / spec.block
    assert compactions > 20


def test_sessions_share_the_prompts_of_tools_and_project() -> None:
    spec = AgentsSpec(sessions=30, products=2, projects=4, tools_tokens=10_240, project_tokens=5_120)
    trace = agents_trace(spec, 5)
    firsts = [prompts(trace, session)[0] for session in range(30)]
    found = {common(one, other) for at, one in enumerate(firsts) for other in firsts[:at]}
    assert found == {0, 20, 30}


def test_sub_agents_fork_the_context_or_begin_with_the_prompt_of_tools() -> None:
    spec = AgentsSpec(sessions=30, sub_agents=1.0, tools_tokens=10_240, project_tokens=5_120, projects=1)
    forks = agents_trace(replace(spec, forks=1.0), 5)
    fresh = agents_trace(replace(spec, forks=0.0), 5)
    assert len(forks) > 1.2 * len(agents_trace(replace(spec, sub_agents=0.0), 5))

    def least_common(trace: Trace) -> int:
        return min(
            common(before, after)
            for session in range(30)
            for before, after in pairwise(prompts(trace, session))
            if len(before) < 400
        )

    assert least_common(fresh) == 20
    assert least_common(forks) >= 30


def test_abandoned_sessions_end_earlier() -> None:
    whole, abandoned = (agents_trace(AgentsSpec(sessions=200, abandoned=share), 2) for share in (0.0, 1.0))
    ratio = len(abandoned) / len(whole)
    assert 0.5 < ratio < 0.97


def test_calls_tell_what_follows_them() -> None:
    trace = agents_trace(AgentsSpec(sessions=40, abandoned=0.5), 4)
    assert trace.contexts is not None
    assert trace.followed_by is not None
    assert {*trace.followed_by.tolist()} == {"tool", "sub-agents", "user", END, ""}
    lasts: dict[int, int] = {}
    for at, context in enumerate(trace.contexts.tolist()):
        # Nothing follows an end, and a summary is followed by a shorter prompt.
        before = lasts.get(context)
        assert before is None or trace.followed_by[before] != END
        if before is not None and not trace.followed_by[before]:
            assert trace.input_lens[at] < trace.input_lens[before]
        lasts[context] = at
    last = [str(trace.followed_by[at]) for at in lasts.values()]
    assert {*last} == {"tool", END}, "an abandoned session waits for a tool"
    assert last.count("tool") < 40
    first = trace.take(np.arange(10))
    assert first.followed_by is not None
    assert first.contexts is not None
    assert len(first.followed_by) == len(first.contexts) == 10


def test_pauses_and_growth_are_factors() -> None:
    spec = replace(ALONE, sessions=20)
    trace, slow, large = (
        agents_trace(changed, 4) for changed in (spec, replace(spec, pauses=3.0), replace(spec, growth=4.0))
    )
    assert np.array_equal(np.sort(slow.input_lens), np.sort(trace.input_lens))
    ratio = float(slow.arrival_s[-1] / trace.arrival_s[-1])
    assert 1.5 < ratio <= 3.0
    medians = [np.median(grown[grown > 0]) for grown in map(growth_of, (trace, large))]
    ratio = float(medians[1] / medians[0])
    assert 2.5 < ratio < 4.0


def test_the_generator_is_seeded() -> None:
    one, same, other = (agents_trace(AgentsSpec(sessions=9), seed) for seed in (7, 7, 8))
    assert one.arrival_s[0] == 0.0
    assert (np.diff(one.arrival_s) >= 0.0).all()
    assert np.array_equal(one.arrival_s, same.arrival_s)
    assert all(map(np.array_equal, one.blocks, same.blocks))
    assert not np.array_equal(one.input_lens[:20], other.input_lens[:20])
    with pytest.raises(ConfigError, match="seed must be at least 0, not -1"):
        agents_trace(AgentsSpec(sessions=9), -1)


def test_a_specification_changes_the_published_workload() -> None:
    assert parse_agents("coding") == AgentsSpec()
    assert parse_agents("coding, sessions=7,context=1M,growth=0.5") == AgentsSpec(
        sessions=7, context=1_000_000, growth=0.5
    )
    assert parse_agents("block=16").block == 16


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "agents: '' is none of coding and sessions, "),
        ("chat", "agents: 'chat' is none of coding and sessions, "),
        ("sessions=2,coding", "agents: 'coding' is none of"),
        ("sessions=2,sessions=2", "agents: 'sessions' is given twice"),
        ("sessions=2.5", "agents: sessions must be a whole number such as 50 or 256K, not '2.5'"),
        ("growth=fast", "agents: growth must be a number such as 50 or 256K, not 'fast'"),
        ("growth=-1", "agents: growth must be a number such as 50 or 256K, not '-1'"),
        ("sessions=0", "agents: sessions must be from 1 to "),
        ("forks=2", "agents: forks must be from 0 to 1, not 2.0"),
        ("pauses=0", "agents: pauses must be from 1e-06 to 1,000,000.0, not 0.0"),
        ("context=20K", "agents: context must be from 74,000 to .*, not 20,000"),
    ],
)
def test_rejects_bad_specifications(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_agents(text)


def invoke(*arguments: str) -> tuple[int, str, str]:
    result = command_line.invoke(main, ["replay", *arguments])
    return result.exit_code, result.stdout, result.stderr


def test_the_command_replays_agents_and_checks_every_row() -> None:
    spec = "sessions=3,tools_tokens=300,project_tokens=50,context=3000,summary=100,growth=0.1"
    code, out, err = invoke("--agents", spec, "--requests", "60", "--prefix-cache", "--json")
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert report["trace"] == "agents (seed 0)"
    assert report["finished"] == 60
    assert report["found_tokens"] > 0
    assert report["verified_tokens"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--agents", "coding", "--synthetic"], "give one of TRACE, --synthetic and --agents"),
        ([], "give one of TRACE, --synthetic and --agents"),
        (["--agents", "sessions=x"], "agents: sessions must be a whole number such as 50 or 256K, not 'x'"),
    ],
)
def test_the_command_reports_errors_in_one_line(arguments: list[str], message: str) -> None:
    code, out, err = invoke(*arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
