"""`kvpool replay --no-kv --prefix-cache --capacity`: what a prefix cache finds."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import command_line
import numpy as np
import pytest

from kvpool.errors import ConfigError
from kvpool.tools.cli import main
from kvpool.tools.policies import BELADY, POLICIES, SIMULATED_POLICIES, WITH_SESSIONS
from kvpool.tools.replay import hit_rates
from kvpool.tools.replay.hit_rates import HitRates, Job
from kvpool.tools.replay.hit_rates import measure as measure_job
from kvpool.tools.replay.prompts import Prompts
from kvpool.tools.traces import AgentsSpec, Trace, agents_trace, read_trace, synthetic_trace

if TYPE_CHECKING:
    from collections.abc import Sequence

TRACES = Path(__file__).parents[3] / "shared" / "traces"
CONVERSATION = TRACES / "mooncake" / "conversation_trace.jsonl"
MILLION = 1_000_000


def trace_of(*prompts: Sequence[int], block_size: int = 4) -> Trace:
    """A trace of prompts by their blocks, one second after the other."""
    lens = np.array([len(blocks) * block_size for blocks in prompts])
    blocks = tuple(map(np.array, prompts))
    return Trace(
        "test", np.arange(len(lens), dtype=np.float64), lens, np.zeros_like(lens), blocks, block_size
    )


def measure(
    trace: Trace, policies: Sequence[str], capacities: Sequence[int], page_size: int | None = None
) -> HitRates:
    return measure_job(trace, Job(policies, capacities, page_size))


def found(rates: HitRates) -> list[int]:
    return [rate.found_blocks for rate in rates.rates]


def found_by_recency(trace: Trace, capacity: int) -> int:
    """An independent cache of blocks that gives up the least recently used leaf."""
    used: dict[int, int] = {}
    parents: dict[int, int] = {}
    hits = 0
    for now, blocks in enumerate(trace.all_blocks()):
        path = blocks.tolist()
        for before, block in zip((-1, *path), path, strict=False):
            hits += block in used
            parents[block] = before
            used[block] = now
        while len(used) > capacity:
            leaves = used.keys() - {parents[block] for block in used} - {*path}
            del used[min(leaves, key=used.__getitem__)]
    return hits


@pytest.mark.parametrize("capacity", [100, 200, 400, 800, 1_600, 30_000])
def test_recency_finds_what_an_independent_cache_finds(capacity: int) -> None:
    """The longest prompt has 100 blocks, so that every one fits."""
    trace = synthetic_trace(400, 3)
    trace = trace.take(np.flatnonzero(trace.input_lens <= 100 * trace.block_size))
    rates = measure(trace, ["lru"], [capacity * trace.block_size])
    assert found(rates) == [found_by_recency(trace, capacity)]


def test_belady_evicts_what_is_used_again_last() -> None:
    trace = trace_of([0], [1], [2], [0], [1], [0])
    assert found(measure(trace, ["lru", BELADY], [2 * 4])) == [1, 2]


def test_belady_evicts_leaves_first_and_keeps_the_running_prompt() -> None:
    trace = trace_of([0, 1, 2], [0, 3, 4], [0, 1, 2], [0, 3, 4])
    assert found(measure(trace, [BELADY], [3 * 4, 4 * 4, 5 * 4])) == [3, 5, 7]


def test_no_policy_finds_more_than_belady_and_all_find_everything_in_time() -> None:
    trace = synthetic_trace(400, 1)
    capacities = [20_000, 60_000, MILLION]
    rates = measure(trace, [*POLICIES, *SIMULATED_POLICIES], capacities)
    best = {rate.capacity: rate.found_blocks for rate in rates.rates if rate.policy == BELADY}
    for rate in rates.rates:
        assert 0 < rate.found_blocks <= best[rate.capacity]
    assert {rate.found_blocks for rate in rates.rates if rate.capacity == MILLION} == {rates.repeated_blocks}
    assert rates.blocks == sum(-(-trace.input_lens // trace.block_size))


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_smaller_pages_find_no_less_in_a_cache_that_is_large_enough(page_size: int) -> None:
    rates = measure(synthetic_trace(100, 1), ["lru", "adaptive"], [MILLION], page_size)
    assert found(rates) == [rates.repeated_blocks] * 2


def test_a_prompt_longer_than_the_cache_is_found_as_far_as_it_fits() -> None:
    trace = trace_of(range(9), range(9))
    assert found(measure(trace, ["lru", "adaptive", BELADY], [5 * 4])) == [5, 5, 5]


@pytest.mark.parametrize(
    ("policies", "capacity", "page_size", "message"),
    [
        (["lru"], 8, 3, "page_size 3 does not divide the trace's blocks of 4"),
        (["lru"], 3, None, "capacity 3 is less than a block of 4 tokens"),
        (["lru", "mru"], 8, None, "unknown policy 'mru'; use lru, "),
        ([WITH_SESSIONS], 8, None, r"policy 'adaptive\+sessions': the trace does not say what follows"),
    ],
)
def test_rejects_bad_arguments(
    policies: list[str], capacity: int, page_size: int | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        measure(trace_of([0]), policies, [capacity], page_size)


def test_equal_prefixes_have_equal_tokens() -> None:
    """Two prompts share 5 blocks; the second ends within the sixth, which is the first one's, too."""
    blocks = (np.arange(9), np.arange(6), np.array([0, 1, 20]))
    lens = np.array([36, 23, 12])
    prompts = Prompts(Trace("test", np.arange(3.0), lens, np.array([5, 5, 5]), blocks, 4))
    first, second, third = (prompts.tokens_of(request, 0, int(lens[request]) + 5) for request in range(3))
    assert first.dtype == np.int32
    assert min(first.min(), second.min(), third.min()) >= 0
    assert np.array_equal(first[:23], second[:23])
    assert (first[23:28] != second[23:28]).all()
    assert np.array_equal(first[:8], third[:8])
    assert (first[8:12] != third[8:12]).all()
    assert np.array_equal(prompts.tokens_of(0, 30, 41), first[30:])
    assert np.array_equal(prompts.whole_blocks_of(1)[:23], first[:23])
    assert len(prompts.whole_blocks_of(1)) == 24
    assert prompts.prefixes_of(2, 7, 14).tolist() == [1, 20, 20, 20, 20, prompts.output(2), prompts.output(2)]


def test_the_conversation_trace() -> None:
    """The figures of an exact replay of the trace."""
    if not CONVERSATION.exists():
        pytest.skip(f"{CONVERSATION.name} is not beside the repository in shared/traces")
    rates = measure(read_trace(CONVERSATION), ["lru", BELADY], [MILLION // 2, 4 * MILLION])
    assert [round(100 * rates.share(rate), 1) for rate in rates.rates] == [4.4, 17.5, 17.7, 36.5]
    assert rates.blocks == 288_500
    assert rates.repeated_blocks == 288_500 - 182_790


def items(kind: str, count: int = 6_000) -> list[int]:
    """Numbers of prompts that mislead a policy that learns."""
    generator = np.random.default_rng(11)
    result: list[int] = []
    new = iter(range(1_000_000, 2_000_000))
    stack, hot = [*range(1_000)], [*range(50)]
    for at in range(count):
        if kind == "phases":  # what was popular never comes back
            result.append(1_000 * (at // 500) + min(int(generator.exponential(60)), 999))
        elif kind == "loops":  # of 700 prompts, and prompts that come three times at once
            result.append(at % 700 if at // 1_000 % 2 == 0 else 10_000 + at // 3)
        elif kind == "dying":  # popular prompts are replaced, one by one
            if generator.random() < 0.02:
                hot[generator.integers(50)] = next(new)
            result.append(hot[generator.integers(50)] if generator.random() < 0.7 else next(new))
        elif kind == "recent":  # recency is best
            back = min(int(generator.exponential(150)), len(stack) - 1)
            stack.append(next(new) if generator.random() < 0.3 else stack.pop(-1 - back))
            result.append(stack[-1])
        else:  # half of the time none comes back
            result.append(next(new) if at // 500 % 2 else int(generator.integers(400)))
    return result


@pytest.mark.parametrize("kind", ["phases", "loops", "dying", "recent", "alternating"])
@pytest.mark.parametrize("prompts", [100, 400])
def test_adaptive_finds_nearly_as_much_as_recency_where_it_is_misled(kind: str, prompts: int) -> None:
    """Prompts have 8 blocks and a page of 16 tokens, which fills no block."""
    trace = trace_of(*(range(50 * item, 50 * item + 33) for item in items(kind)), block_size=16)
    recent, learned = found(measure(trace, ["lru", "adaptive"], [prompts * 33 * 16]))
    assert learned > 0.97 * recent


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_adaptive_finds_nearly_as_much_as_recency_for_agents(seed: int) -> None:
    spec = AgentsSpec(sessions=25, sessions_per_hour=600, tools_tokens=4_000, context=40_000, summary=1_000)
    trace = agents_trace(spec, seed).head(2_000)
    rates = found(measure(trace, ["lru", "adaptive"], [60_000, 150_000]))
    for recent, learned in zip(rates[:2], rates[2:], strict=True):
        assert learned > 0.97 * recent


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_cache_that_is_told_of_sessions_finds_more(seed: int) -> None:
    spec = AgentsSpec(sessions=25, sessions_per_hour=600, tools_tokens=4_000, context=40_000, summary=1_000)
    trace = agents_trace(spec, seed).head(2_000)
    rates = found(measure(trace, ["lru", "adaptive", WITH_SESSIONS], [60_000, 150_000, 300_000]))
    recent, learned, told = (np.array(rates[at : at + 3]) for at in (0, 3, 6))
    assert (told > np.maximum(recent, learned)).all()


def test_compare_tells_of_sessions_where_the_trace_does() -> None:
    arguments = ("--requests", "50", "--compare", "--capacity", "100K", "--json")
    for made, has_sessions in ((("--agents", "coding"), True), (("--synthetic",), False)):
        _, out, _ = invoke(*made, *arguments)
        policies = [rate["policy"] for rate in json.loads(out)["rates"]]
        assert (WITH_SESSIONS in policies) == has_sessions


@pytest.mark.parametrize("capacity", [15_625, 62_000, 128_125])
def test_a_small_cache_learns_as_a_large_one_does(capacity: int) -> None:
    """The conversation trace with 16 tokens in place of the 512 of a block, in a cache smaller by as much."""
    if not CONVERSATION.exists():
        pytest.skip(f"{CONVERSATION.name} is not beside the repository in shared/traces")
    large = read_trace(CONVERSATION)
    small = replace(large, block_size=16, input_lens=-(-large.input_lens // 32))
    recent, learned = found(measure(small, ["lru", "adaptive"], [capacity]))
    (learned_in_large,) = found(measure(large, ["adaptive"], [32 * capacity]))
    assert learned > 1.1 * recent
    assert learned == pytest.approx(learned_in_large, rel=0.1)


def invoke(*arguments: str) -> tuple[int, str, str]:
    result = command_line.invoke(main, ["replay", *arguments])
    return result.exit_code, result.stdout, result.stderr


MEASURE = ("--synthetic", "--requests", "50", "--no-kv", "--prefix-cache", "--capacity", "20K,0.1M")


def test_the_command_prints_a_table_and_draws_a_plot(tmp_path: Path) -> None:
    picture = tmp_path / "rates.svg"
    code, out, err = invoke(*MEASURE, "--policy", "all", "--plot", str(picture), "--progress")
    assert code == 0, err
    for name in (*POLICIES, *SIMULATED_POLICIES):
        assert f" {name} " in out
    assert " 20K " in out
    assert " 100K " in out
    assert "an unlimited cache" in " ".join(out.split())
    assert b"<svg" in picture.read_bytes()
    assert "measuring" in err


def test_json_has_a_rate_for_each_policy_and_capacity() -> None:
    code, out, err = invoke(*MEASURE, "--policy", "lru, belady", "--page-size", "16", "--json")
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert [(rate["policy"], rate["capacity"]) for rate in report["rates"]] == [
        (policy, capacity) for policy in ("lru", "belady") for capacity in (20_000, 100_000)
    ]
    assert all(0 <= rate["hit_rate"] <= report["unlimited_hit_rate"] for rate in report["rates"])
    assert report["page_size"] == 16


def test_requests_have_a_part_of_the_pool_beside_the_cache() -> None:
    arguments = (*MEASURE, "--policy", "lru,adaptive,belady", "--page-size", "16")
    alone, beside = (
        json.loads(invoke(*arguments, "--json", *more)[1]) for more in ((), ("--in-use", "0.25"))
    )
    assert (alone["in_use"], beside["in_use"]) == (0.0, 0.25)
    found_alone, found_beside = ([rate["found_blocks"] for rate in of["rates"]] for of in (alone, beside))
    assert found_beside == found_alone  # too short a trace for a policy that learns
    assert "requests have 25.0% of each pool" in " ".join(invoke(*arguments, "--in-use", "0.25")[1].split())
    allocator = hit_rates._cache("lru", 3_000, 16, Job(["lru"], [3_000], in_use=0.25)).allocator
    assert (allocator.size, allocator.available_size()) == (3_992, 2_992)


@pytest.mark.parametrize("in_use", [0.0, 0.1, 0.3])
def test_adaptive_finds_as_much_beside_requests(in_use: float) -> None:
    """Of the conversation trace in 2 M tokens, beside requests that have a part of the pool."""
    if not CONVERSATION.exists():
        pytest.skip(f"{CONVERSATION.name} is not beside the repository in shared/traces")
    job = Job(["lru", "adaptive"], [2_000_000], in_use=in_use)
    recent, learned = found(measure_job(read_trace(CONVERSATION), job))
    assert learned > 1.6 * recent


def test_a_trace_without_hash_ids_has_no_hits(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "2023-11-16 18:15:46,700,1\n" * 3)
    _, out, _ = invoke(str(path), "--no-kv", "--prefix-cache", "--capacity", "4K", "--json")
    assert json.loads(out)["rates"][0]["found_blocks"] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--capacity", "1K"], "--capacity measures the prefix cache alone; give --no-kv and --prefix-cache"),
        (["--capacity", "1K", "--no-kv"], "give --no-kv and --prefix-cache with it"),
        (["--capacity", "x", "--no-kv", "--prefix-cache"], "--capacity: 'x' is not a size in tokens"),
        (["--capacity", "1K,0", "--no-kv", "--prefix-cache"], "--capacity: '0' is not a size in tokens"),
        (["--capacity", "1K", "--no-kv", "--prefix-cache", "--policy", "mru"], "not 'mru'"),
        (["--in-use", "0.1"], "--in-use is beside the caches of --capacity, without --states"),
        (["--in-use", "0.1", "--states", "16"], "--in-use is beside the caches of --capacity"),
        (["--in-use", "1"], "1 is not 0 or more, and less than 1"),
    ],
)
def test_the_command_reports_errors_in_one_line(arguments: list[str], message: str) -> None:
    code, out, err = invoke("--synthetic", "--requests", "5", *arguments)
    assert code == 2
    assert message in err
    assert err.count("\n") == 1
    assert out == ""
