"""`kvpool replay --compare`: costs, policies in Python, what they save, and the bound."""

from __future__ import annotations

import json
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

import command_line
import numpy as np
import pytest

from kvpool import PrefillCost
from kvpool.errors import ConfigError
from kvpool.tools.cli import main
from kvpool.tools.costs import COSTS, read_cost
from kvpool.tools.policies import (
    ADAPTIVE_IN_SECONDS,
    COMPARED_POLICIES,
    OPTIONAL_POLICIES,
    POLICIES,
    SIMULATED_POLICIES,
)
from kvpool.tools.replay.bound import most_saved
from kvpool.tools.replay.errors import ReplayError
from kvpool.tools.replay.eviction import LookUp, Ranked, Setting
from kvpool.tools.replay.hit_rates import LOAD, Job, measure
from kvpool.tools.replay.simulate import simulate
from kvpool.tools.replay.simulated import SIMULATED
from kvpool.tools.traces import AgentsSpec, Trace, agents_trace, synthetic_trace

if TYPE_CHECKING:
    from collections.abc import Sequence

LINEAR = PrefillCost(1.0, 0.0, "linear")
QUADRATIC = PrefillCost(1.0, 0.5, "quadratic")


class Recent(Ranked):
    """Evicts the leaf that was used least recently."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.used: dict[int, int] = {}

    def rank(self, block: int) -> int:
        return self.used[block]

    def record(self, look_up: LookUp) -> None:
        self.used.update(dict.fromkeys(look_up.path, look_up.request))


class Stubborn(Recent):
    """Names a block that is no leaf."""

    def victim(self) -> int:
        return -7


def trace_of(*prompts: Sequence[int], gap_s: float = 1.0, block_size: int = 4) -> Trace:
    """A trace of prompts by their blocks, one after the other."""
    lens = np.array([len(blocks) * block_size for blocks in prompts])
    paths = tuple(map(np.array, prompts))
    return Trace("test", gap_s * np.arange(float(len(lens))), lens, np.zeros_like(lens), paths, block_size)


def setting_of(trace: Trace, capacity: int, cost: PrefillCost = LINEAR) -> Setting:
    paths = trace.all_blocks()
    longest = max(map(len, paths))
    return Setting(capacity, trace, paths, np.diff(cost.seconds(np.arange(longest + 1) * trace.block_size)))


def agents() -> Trace:
    spec = AgentsSpec(
        sessions=8, tools_tokens=2_000, project_tokens=500, context=20_000, summary=500, block=256
    )
    return agents_trace(spec, 3)


@pytest.mark.parametrize("trace", [synthetic_trace(400, 3), agents()], ids=["synthetic", "agents"])
@pytest.mark.parametrize("capacity", [80, 200, 800])
def test_the_simulator_finds_what_the_cache_finds(trace: Trace, capacity: int) -> None:
    fits = np.array([len(path) <= capacity for path in trace.all_blocks()])
    trace = trace.take(np.flatnonzero(fits))
    setting = setting_of(trace, capacity)
    found = measure(trace, Job(["lru"], [capacity * trace.block_size])).rates[0].found_blocks
    assert simulate(Recent(setting), setting).sum() == found > 0


@pytest.mark.parametrize("name", SIMULATED)
@pytest.mark.parametrize("trace", [synthetic_trace(300, 5), agents()], ids=["synthetic", "agents"])
def test_policies_find_everything_in_a_large_cache_and_less_in_a_small_one(name: str, trace: Trace) -> None:
    paths = trace.all_blocks()
    unlimited = sum(map(len, paths)) - len(np.unique(np.concatenate(paths)))
    found = []
    for capacity in (150, 100_000):
        setting = setting_of(trace, capacity, QUADRATIC)
        hits = simulate(SIMULATED[name](setting), setting)
        assert (hits <= [len(path) for path in paths]).all()
        assert hits[0] == 0
        found.append(int(hits.sum()))
    assert 0 < found[0] < found[1] == unlimited


def test_a_policy_that_names_no_leaf_is_refused() -> None:
    setting = setting_of(trace_of([0], [1], [2]), 2)
    with pytest.raises(ReplayError, match=r"Stubborn.victim\(\) returned -7, which is no leaf"):
        simulate(Stubborn(setting), setting)


def test_s3_fifo_keeps_what_was_used_again() -> None:
    """Blocks 0 and 1 are used twice, then ten others pass once; recency has forgotten them by then."""
    prompts = [[0], [1], [0], [1], *([at] for at in range(2, 12)), [0], [1]]
    setting = setting_of(trace_of(*prompts), 5)
    assert simulate(SIMULATED["s3-fifo"](setting), setting).sum() == 4
    assert simulate(Recent(setting), setting).sum() == 2


def test_s3_fifo_remembers_what_it_evicted() -> None:
    """Block 0 comes back after its eviction, and then stays while others pass."""
    prompts = [[0], [1], [2], [3], [4], [0], *([at] for at in range(5, 15)), [0]]
    setting = setting_of(trace_of(*prompts), 4)
    assert simulate(SIMULATED["s3-fifo"](setting), setting).tolist()[-1] == 1


def test_gdsf_keeps_what_is_expensive() -> None:
    """Prompt 0 has a block at a far position, which costs more than those of the others."""
    prompts = [[0, 1, 2, 3], [4], [5], [6], [7], [0, 1, 2, 3]]
    settings = [setting_of(trace_of(*prompts), 6, cost) for cost in (LINEAR, QUADRATIC)]
    cheap, expensive = (int(simulate(SIMULATED["gdsf"](each), each)[-1]) for each in settings)
    assert cheap < expensive == 4


def test_the_session_aware_policy_learns_which_turns_come_back() -> None:
    """First turns are never continued, second ones always are, after seven other requests."""
    prompts: list[list[int]] = []
    sessions: list[int] = []
    free = 0
    for session in range(0, 400, 10):
        prompts += [[free], [free, free + 1]]
        sessions += [session, session]
        prompts += [[free + 2 + at] for at in range(7)]
        sessions += [session + 1 + at for at in range(7)]
        prompts.append([free, free + 1, free + 9])
        sessions.append(session)
        free += 10
    trace = trace_of(*prompts)
    trace = Trace(**{**vars(trace), "sessions": np.array(sessions)})
    setting = setting_of(trace, 6)
    aware = simulate(SIMULATED["session"](setting), setting)
    assert aware.sum() > 1.5 * simulate(Recent(setting), setting).sum()


def best(prompts: list[list[int]], capacity: int, worth: Sequence[float]) -> float:
    """The most that any order of eviction saves, by trying all of them."""

    @cache
    def most(at: int, cached: frozenset[int]) -> float:
        if at == len(prompts):
            return 0.0
        path = prompts[at]
        found = next((place for place, block in enumerate(path) if block not in cached), len(path))
        saved = sum(worth[:found])
        others = cached - {*path}
        kept = (
            frozenset((*path, *some))
            for size in range(len(others) + 1)
            for some in combinations(others, size)
        )
        return saved + max(most(at + 1, one) for one in kept if len(one) <= capacity)

    return most(0, frozenset())


@pytest.mark.parametrize("seed", range(6))
def test_no_policy_saves_more_than_the_bound(seed: int) -> None:
    """Neither does the best of all orders, which the bound exceeds by less than a third here."""
    generator = np.random.default_rng(seed)
    family = [[0], [0, 1], [0, 1, 2], [3], [3, 4], [5], [6], [0, 7]]
    prompts = [family[at] for at in generator.integers(len(family), size=12)]
    trace, capacity = trace_of(*prompts), 4
    for cost in (LINEAR, QUADRATIC):
        setting = setting_of(trace, capacity, cost)
        worth = setting.saved_s.tolist()
        optimum = best(prompts, capacity, worth)
        (bound,) = most_saved(trace.blocks, capacity, [setting.saved_s])
        assert optimum <= bound + 1e-9
        assert bound < 1.34 * optimum
        for name in SIMULATED:
            found = simulate(SIMULATED[name](setting), setting)
            assert sum(sum(worth[:count]) for count in found) <= optimum + 1e-9


def test_measured_policies_stay_below_the_bound() -> None:
    rates = measure(agents(), Job(COMPARED_POLICIES, [20_000, 60_000], None, tuple(COSTS.values())))
    bounds = {bound.capacity: bound for bound in rates.bounds}
    for rate in rates.rates:
        bound = bounds[rate.capacity]
        assert 0 < rate.found_blocks <= bound.found_blocks + 1e-6
        for saved, most, whole in zip(rate.saved, bound.seconds, rates.prefill_s, strict=True):
            assert 0 < saved.seconds <= most * (1 + 1e-9) <= whole * (1 + 1e-9)
    assert len(rates.rates) == 2 * len(COMPARED_POLICIES)


def test_seconds_are_those_of_the_found_prefix() -> None:
    """4 of 4 tokens, then 8 of 12 are found; the third prompt is new."""
    trace = trace_of([0], [0], [0, 1], [0, 1, 2], [5])
    (rate,) = measure(trace, Job(["lru"], [64], None, (QUADRATIC,))).rates
    assert rate.found_blocks == 4
    assert rate.saved[0].cost == "quadratic"
    assert rate.saved[0].seconds == pytest.approx(2 * (4 + 0.5 * 8) + (8 + 0.5 * 32))


def test_the_time_to_first_token_is_that_of_a_queue() -> None:
    """Four prompts of 4 s arrive so fast that they would need nine tenths of the time."""
    trace = trace_of([0], [1], [2], [3], gap_s=10.0)
    (rate,) = measure(trace, Job(["lru"], [64], None, (LINEAR,))).rates
    gap_s = 16.0 / LOAD / 3
    assert gap_s > 4
    assert rate.saved[0].ttft_s == pytest.approx((4.0, 4.0))
    at_once = Trace(**{**vars(trace), "arrival_s": np.array([0.0, 0.0, 0.0, 30.0])})
    (rate,) = measure(at_once, Job(["lru"], [64], None, (LINEAR,))).rates
    assert rate.saved[0].ttft_s[0] == pytest.approx(np.median([4, 8, 12, 4]))


@pytest.mark.parametrize("policy", OPTIONAL_POLICIES)
def test_a_policy_that_knows_who_waits_keeps_what_they_find(policy: str) -> None:
    """While the long first prompt is computed, all others arrive, and the last one will find it."""
    trace = trace_of([*range(8)], [10, 11], [12, 13], [14, 15], [*range(8)], gap_s=1.0)
    job = Job(["lru", "adaptive", policy], [48], None, (LINEAR,), load=100.0)
    found = [rate.found_blocks for rate in measure(trace, job).rates]
    assert found == [6, 6, 8]


def test_a_policy_that_knows_who_waits_needs_a_clock() -> None:
    with pytest.raises(ConfigError, match=r"policy 'adaptive\+queue' needs a cost"):
        measure(trace_of([0], [1]), Job(["adaptive+queue"], [64]))


def test_the_load_is_that_of_the_machine() -> None:
    trace = trace_of([0], [1], [2], [3], gap_s=10.0)
    (rate,) = measure(trace, Job(["lru"], [64], None, (LINEAR,), load=2.0)).rates
    gap_s = 16.0 / 2.0 / 3
    assert rate.saved[0].ttft_s[0] == pytest.approx(4.0 + 1.5 * (4.0 - gap_s))


def test_a_cost_is_fitted_to_measured_prefills(tmp_path: Path) -> None:
    real = PrefillCost(3e-5, 7e-10, "measured")
    rows = [(0, 512), (4_096, 512), (0, 32_768), (100_000, 2_048)]
    table = tmp_path / "measured.csv"
    lines = (
        f"{before},{tokens},{float(np.diff(real.seconds(np.array([before, before + tokens])))[0])}"
        for before, tokens in rows
    )
    table.write_text("\n".join(("before,tokens,seconds", *lines)))
    found = read_cost(table)
    assert found.name == "measured"
    assert (found.per_token_s, found.per_pair_s) == pytest.approx((3e-5, 7e-10), rel=1e-6)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("before,tokens\n1,2\n", "needs the columns before, tokens, seconds"),
        ("before,tokens,seconds\n0,1,x\n", "not a table of prefills: could not convert"),
        ("before,tokens,seconds\n0,1,\n", "not a table of prefills: could not convert"),
        ("before,tokens,seconds\n0,1,1\n", "needs two prefills or more, each .* not these 1"),
        ("before,tokens,seconds\n0,0,1\n0,5,1\n", "needs two prefills or more, each .* not these 2"),
        ("before,tokens,seconds\n0,9,1\n0,9,1\n", "2 prefills do not tell the linear part from"),
        ("before,tokens,seconds\n0,1,1\n0,9,1\n0,900,1\n", "3 prefills do not tell the linear part from"),
    ],
)
def test_rejects_bad_tables(tmp_path: Path, text: str, message: str) -> None:
    table = tmp_path / "measured.csv"
    table.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_cost(table)


def invoke(*arguments: str) -> tuple[int, str, str]:
    result = command_line.invoke(main, ["replay", *arguments])
    return result.exit_code, result.stdout, result.stderr


COMPARE = ("--synthetic", "--requests", "80", "--compare", "--capacity", "20K")
OWN = """
from kvpool.tools.replay.eviction import Ranked

class Longest(Ranked):
    def record(self, look_up):
        self.places = {**getattr(self, "places", {}), **{b: at for at, b in enumerate(look_up.path)}}

    def rank(self, block):
        return -self.places[block]

nothing = object()
"""


def test_the_command_compares_all_policies_with_ones_own(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(OWN)
    code, out, err = invoke(*COMPARE, "--policy", f"{own}:Longest")
    assert code == 0, err
    for name in (*COMPARED_POLICIES, "bound", "20K tokens", "23.5 us for each token", "0.552 ns"):
        assert name in out
    assert "Longest" in out
    lines = {line.split("│")[1].strip(): line for line in out.splitlines() if line.startswith("│")}
    assert "100%" in lines["belady"]
    assert "0%" in lines["lru"]


def test_json_has_what_each_policy_saves(tmp_path: Path) -> None:
    table = tmp_path / "mine.csv"
    table.write_text("before,tokens,seconds\n0,1000,1\n9000,1000,2\n")
    code, out, err = invoke(*COMPARE, "--cost", f"70B,{table}", "--json")
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert [cost["name"] for cost in report["costs"]] == ["70B on eight H100", "mine"]
    assert [rate["policy"] for rate in report["rates"]] == [*COMPARED_POLICIES]
    for rate in report["rates"]:
        assert [saved["cost"] for saved in rate["saved"]] == ["70B on eight H100", "mine"]
        assert rate["saved"][0]["seconds"] <= report["bounds"][0]["seconds"][0]


def test_the_sizes_have_defaults() -> None:
    code, out, _ = invoke("--synthetic", "--requests", "5", "--compare", "--json")
    assert code == 0
    assert [bound["capacity"] for bound in json.loads(out)["bounds"]] == [
        500_000,
        1_000_000,
        2_000_000,
        4_100_000,
        8_200_000,
    ]


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--cost", "7B"], 2, "cost must be one of 8B, 70B, or a CSV file, not '7B'"),
        (["--cost", "absent.csv"], 1, "No such file"),
        (["--policy", "own.py:Absent"], 2, "policy 'own.py:Absent': AttributeError: "),
        (["--policy", "absent.py:Own"], 2, "policy 'absent.py:Own': FileNotFoundError: "),
        (["--policy", "absent.module:Own"], 2, "policy 'absent.module:Own': ModuleNotFoundError: "),
        (["--policy", "own.py:nothing"], 2, "is no Eviction: it lacks record, insert, remove, victim"),
    ],
)
def test_the_command_reports_errors_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], status: int, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(OWN)
    code, out, err = invoke(*COMPARE, *arguments)
    assert (code, out) == (status, "")
    assert message in err
    assert err.count("\n") == 1


def test_a_cost_is_for_a_comparison() -> None:
    code, _, err = invoke("--synthetic", "--cost", "8B")
    assert code == 2
    assert "--cost is what the hits of --compare save" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--load", "1.1"], "--load is that of the machine of --compare"),
        (["--compare", "--load", "0"], "0 is not above 0, or not finite"),
        (["--compare", "--load", "inf"], "inf is not above 0, or not finite"),
    ],
)
def test_rejects_bad_loads(arguments: list[str], message: str) -> None:
    code, _, err = invoke("--synthetic", *arguments)
    assert code == 2
    assert message in err


def test_the_command_tells_of_the_load() -> None:
    code, out, err = invoke(*COMPARE, "--policy", "adaptive+queue", "--load", "1.25")
    assert code == 0, err
    assert "adaptive+queue" in out
    assert "125% of its time" in out


def test_compared_policies_exist() -> None:
    assert {*COMPARED_POLICIES} <= {*POLICIES, ADAPTIVE_IN_SECONDS, *SIMULATED_POLICIES}
    assert {*SIMULATED} == {*SIMULATED_POLICIES}
