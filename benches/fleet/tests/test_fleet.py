"""The fleet on paper: small fleets computed by hand, what adds up, and the command."""

from __future__ import annotations

import importlib.util
import json
import math
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import command_line
import numpy as np
import pytest
from break_even import BreakEven
from fleet import FleetResult, _Cache, simulate
from fleet_command import main
from fleet_config import ROUTES, FleetConfig, Machine
from fleet_options import FleetOptions, fleet_of, machine_of
from fleet_report import fleet_as_json
from model_configs import CONFIGS

from kvpool.errors import ConfigError
from kvpool.models.model_config import parse_model
from kvpool.tools.bandwidths import Bandwidth, as_json, read_bandwidths
from kvpool.tools.cli import main as kvpool
from kvpool.tools.plan.solver import PlanConfig, make_plan
from kvpool.tools.replay.hit_rates import Job, measure
from kvpool.tools.traces import Trace, read_trace, synthetic_trace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
GIB = 1 << 30
FLEETS = Path(__file__).parents[1]
PAGE = FLEETS / "README.md"
RESULTS = FLEETS.parent / "RESULTS.md"
CONVERSATION = Path(__file__).parents[4] / "shared" / "traces" / "mooncake" / "conversation_trace.jsonl"


def trace_of(
    *requests: tuple[float, int, int] | tuple[float, int, int, Sequence[int]], block_size: int = 4
) -> Trace:
    """Arrival, tokens of the prompt and of the answer, and the blocks of those that share some."""
    blocks = tuple(np.array(request[3] if len(request) > 3 else [], np.int64) for request in requests)
    arrivals, inputs, outputs = (np.array([request[at] for request in requests]) for at in range(3))
    return Trace("test", arrivals.astype(float), inputs, outputs, blocks, block_size)


def spaced(requests: int) -> NDArray[np.float64]:
    """Arrivals so far apart that every request meets an idle fleet."""
    return np.arange(requests, dtype=np.float64) * 1e6


# Ten tokens a second are computed and go through the link; tokens come every half second.
MACHINE = Machine(token_bytes=10, state_bytes=0, tokens=100, requests=8)
FLEET = FleetConfig(prefill=1, decode=1, prefill_rate=10, decode_rate=100, link=100, step_s=0.5, policy="lru")


def run(trace: Trace, machine: Machine = MACHINE, **others: Any) -> FleetResult:  # noqa: ANN401 - FleetConfig's
    return simulate(trace, machine, replace(FLEET, **others))


def parts(result: FleetResult, *names: str) -> list[list[float]]:
    return [[round(float(value), 9) for value in getattr(result, f"{name}_s")] for name in names]


ALL = ("prefill_wait", "prefill", "handover_wait", "handover", "first_token", "decode")


def test_two_requests_on_two_machines() -> None:
    """The second waits for the computation of the first, and then for its transfer."""
    result = run(trace_of((0, 20, 3), (1, 10, 5)))
    assert parts(result, *ALL) == [[0, 1], [2, 1], [0, 1], [2, 1], [4, 4], [1, 2]]
    assert result.duration_s == 7
    assert result.handover_bytes.tolist() == [200, 100]
    # Tokens of prompts and answers have slots from 2 s to 5 s, and from 4 s to 7 s.
    memory = {"decode memory": (23 * 3 + 15 * 3) / (100 * 7), "decode requests": (3 + 3) / (8 * 7)}
    busy = {"prefill": 3, "decode": 6 / 100, "link of prefill": 3, "link of decode": 3}
    assert result.busy == pytest.approx({**memory, **{name: seconds / 7 for name, seconds in busy.items()}})
    assert result.bottleneck == "prefill"
    assert result.balanced_decode == pytest.approx(((23 * 3 + 15 * 3) / 100) / 3)


def test_a_prompt_is_computed_behind_what_is_cached() -> None:
    """Of twelve tokens eight are there; of eight seven, since one is computed in any case."""
    trace = trace_of((0, 8, 2, [0, 1]), (10, 12, 2, [0, 1, 2]), (20, 8, 2, [0, 1]), (30, 8, 2, [5, 6]))
    result = run(trace)
    assert result.device_tokens.tolist() == [0, 8, 7, 0]
    assert result.computed_tokens.tolist() == [8, 4, 1, 8]
    assert parts(result, "prefill") == [[0.8, 0.4, 0.1, 0.8]]
    assert result.repeated_share == 4 / 9
    assert result.store_tokens.sum() == result.loaded_bytes == result.stored_bytes == 0


def test_a_prompt_that_was_not_handed_over_yet_is_found() -> None:
    result = run(trace_of((0, 20, 9, range(5)), (0, 20, 9, range(5))), link=1)
    assert result.device_tokens.tolist() == [0, 19]


def test_requests_share_the_speed_of_a_decode_machine() -> None:
    """Alone 10 tokens a second, two 5 each; the first comes 1 s before the second."""
    trace = trace_of((0, 10, 21), (0, 10, 6))
    result = run(trace, step_s=0.1, decode_rate=10, prefill_rate=100, link=100)
    # They arrive at 1.1 and 2.1 s. Then 10 of the first one's 20 tokens are left, and 5 of the second.
    assert parts(result, "first_token") == [[1.1, 2.1]]
    # Both get 5 a second: the second ends after 1 s, and the first has 5 left, at 10 a second.
    assert parts(result, "decode") == [[1 + 1 + 0.5, 1]]


def test_stored_prefixes_are_loaded_if_that_is_faster() -> None:
    """Blocks 0 to 4 leave the machine for those of the second request, and come back from the store."""
    machine = replace(MACHINE, tokens=24)
    trace = trace_of((0, 20, 2, range(5)), (10, 20, 2, range(10, 15)), (20, 20, 2, range(5)))
    store = {"store_bytes": 1000, "store_link": 190.0}
    result = run(trace, machine, **store)
    assert result.store_tokens.tolist() == [0, 0, 15]
    assert result.device_tokens.tolist() == [0, 0, 4]
    # 15 tokens, 150 bytes, come in 150 / 190 s; one is computed.
    assert parts(result, "prefill_wait", "prefill") == [[0, 0, round(150 / 190, 9)], [2, 2, 0.1]]
    assert (result.loaded_bytes, result.stored_bytes) == (150, 400)
    assert result.busy["store link"] == pytest.approx(150 / 190 / result.duration_s)
    slow = run(trace, machine, store_bytes=1000, store_link=99.0)
    assert slow.store_tokens.sum() == 0
    assert parts(slow, "prefill") == [[2, 2, 1.6]]
    # A store of 5 blocks has what was used last only, and one of 3 the begin of that.
    assert run(trace, machine, store_bytes=5 * 40, store_link=190.0).store_tokens.sum() == 0
    short = run(trace.take(np.array([0, 1])), machine, store_bytes=3 * 40, store_link=190.0)
    assert short.stored_bytes == 2 * 3 * 40


def test_a_load_that_ends_with_a_computation_is_waited_for() -> None:
    """Both at 21 s: of what came at 19 s to the second machine, and of 19 tokens for the last request."""
    trace = trace_of((0, 20, 2, range(5)), (19, 20, 2), (19.5, 4, 2), (20, 20, 2, range(5)))
    result = run(trace, prefill=2, route="turns", store_bytes=1000, store_link=190.0)
    assert result.store_tokens.tolist() == [0, 0, 0, 19]
    assert parts(result, "prefill_wait")[0][3] == 1
    assert result.prefill_s[3] == pytest.approx(0.1)


def test_pages_behind_an_evicted_prefix_are_lost() -> None:
    cache, first, other = _Cache(6, 4, "lru"), np.arange(5), np.arange(10, 16)
    assert (cache.put(first), cache.length(first)) == (5, 5)
    assert (cache.put(other), cache.length(first)) == (6, 0)
    assert (cache.put(first, 1), cache.length(first)) == (0, 0)
    assert cache.put(first, 0) == 5


def test_states_and_latency_count_once_for_each_transfer() -> None:
    machine = replace(MACHINE, state_bytes=50, tokens=24)
    trace = trace_of((0, 20, 2, range(5)), (10, 20, 2, range(10, 15)), (20, 20, 2, range(5)))
    result = run(trace, machine, store_bytes=1000, store_link=1000.0, latency_s=0.25)
    assert parts(result, "handover") == [[0.25 + 250 / 100] * 3]
    assert parts(result, "prefill_wait") == [[0, 0, 0.25 + 200 / 1000]]
    assert result.handover_bytes.tolist() == [250] * 3


def test_a_request_waits_for_room_on_the_decode_machine() -> None:
    """The first has 25 of 40 tokens until it ends at 2 + 2 + 2 s; the second needs 24."""
    machine = replace(MACHINE, tokens=40)
    result = run(trace_of((0, 20, 5), (0, 20, 4)), machine)
    assert parts(result, "handover_wait", "handover") == [[0, 2], [2, 2]]
    assert parts(result, "decode") == [[2, 1.5]]


def test_a_request_waits_for_a_row_on_the_decode_machine() -> None:
    result = run(trace_of((0, 20, 5), (0, 20, 4)), replace(MACHINE, requests=1))
    assert parts(result, "handover_wait") == [[0, 2]]


def test_a_small_request_does_not_pass_one_that_waits_for_room() -> None:
    """Two prefill machines: the large second prompt is computed before the small third one."""
    machine = replace(MACHINE, tokens=40)
    trace = trace_of((0, 20, 5), (0, 32, 2), (0.1, 14, 2))
    result = run(trace, machine, prefill=2, route="turns")
    ends = [result.handover_wait_s[at] + result.prefill_wait_s[at] + result.prefill_s[at] for at in range(3)]
    assert ends[1] == pytest.approx(6)
    # It is computed at 3.4 s, and the link and the room are free when the second has come and gone.
    assert ends[2] + 0.1 > ends[1]


def test_prompts_wait_until_others_have_left_the_prefill_machine() -> None:
    """Each takes 5 of 9 blocks: the second begins when the first was handed over, at 2 + 2 s."""
    machine = replace(MACHINE, tokens=36)
    result = run(trace_of((0, 20, 2), (0, 20, 2)), machine)
    assert parts(result, "prefill_wait") == [[0, 4]]


def test_an_answer_of_one_token_is_not_handed_over() -> None:
    result = run(trace_of((0, 20, 1), (0, 10, 0)))
    assert result.handover_bytes.sum() == 0
    assert parts(result, "first_token", "decode", "handover") == [[2, 3], [0, 0], [0, 0]]
    assert result.duration_s == 3
    report = fleet_as_json(result, [])
    assert report["token_s"] == {"median": None, "p99": None}


def test_requests_that_no_machine_holds_are_rejected() -> None:
    trace = trace_of((0, 20, 2), (1, 90, 11), (2, 10, 2))
    result = run(trace)
    assert (result.rejected, result.input_lens.tolist()) == (1, [20, 10])


def test_requests_go_where_they_are_sent() -> None:
    """A long prompt is computed where the short one was cached."""
    trace = trace_of((0, 8, 2, [0, 1]), (10, 60, 2, range(10, 25)), (10, 12, 2, [0, 1, 2]))
    found = {route: run(trace, prefill=2, route=route) for route in ROUTES}
    # At 10 s the first machine has two blocks of the third request, and is busy with the second one if that
    # went there: it has nothing anywhere, and takes 6 s.
    waits = {route: [round(float(wait), 6) for wait in found[route].prefill_wait_s] for route in ROUTES}
    hits = {route: found[route].device_tokens.tolist() for route in ROUTES}
    assert waits["prefix"] == [0, 0, 6]
    assert hits["prefix"] == [0, 0, 8]
    assert waits["earliest"] == [0, 0, 0]
    assert hits["earliest"] == [0, 0, 0]
    assert waits["turns"] == [0, 0, 0]
    assert hits["turns"] == [0, 0, 8]


BUSY: dict[str, Any] = {
    "prefill_rate": 4000.0,
    "decode_rate": 600.0,
    "link": 3e8,
    "step_s": 0.02,
    "speed_up": 2.0,
}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("store_link", [0.0, 1e9])
def test_a_fleet_that_is_short_of_everything_adds_up(route: str, store_link: float) -> None:
    """A fleet that is short of everything: blocks, links, room and rows."""
    trace = synthetic_trace(400, 7)
    machine = Machine(token_bytes=60_000, state_bytes=1_000_000, tokens=20_000, requests=6)
    store: dict[str, Any] = {"store_bytes": 8 * GIB, "store_link": store_link} if store_link else {}
    config = replace(FLEET, prefill=3, decode=2, route=route, **BUSY, **store)
    result = simulate(trace, machine, config)
    assert len(result.input_lens) + result.rejected == len(trace)
    tokens = result.device_tokens + result.store_tokens + result.computed_tokens
    assert (tokens == result.input_lens).all()
    assert result.computed_tokens.min() >= 1
    for name in ("prefill_wait_s", "prefill_s", "handover_wait_s", "handover_s", "decode_s"):
        assert getattr(result, name).min() >= 0, name
    moved = result.output_lens > 1
    expected = (result.input_lens * machine.token_bytes + machine.state_bytes) * moved
    assert (result.handover_bytes == expected).all()
    assert result.handover_s[moved] == pytest.approx(expected[moved] / config.link)
    assert result.prefill_s == pytest.approx(result.computed_tokens / config.prefill_rate)
    steps = result.output_lens[moved] - 1
    assert (result.decode_s[moved] >= steps * config.step_s * (1 - 1e-9)).all()
    assert all(0 <= share <= 1 + 1e-9 for share in result.busy.values())
    assert result.busy["decode"] * result.duration_s * 2 * config.decode_rate == pytest.approx(steps.sum())
    assert (result.loaded_bytes > 0) == (result.store_tokens.sum() > 0)
    assert (result.loaded_bytes > 0) == (store_link > 0 and route != "prefix")
    assert result.device_tokens.sum() > 0
    again = simulate(trace, machine, config)
    assert (again.first_token_s == result.first_token_s).all()
    assert again.busy == result.busy


def test_one_machine_finds_what_the_replay_finds() -> None:
    """Requests one after the other: the cache is all that matters."""
    made = synthetic_trace(300, 3)
    whole = -(-made.input_lens // made.block_size) * made.block_size
    kept = np.flatnonzero(whole + made.output_lens <= 20_000)
    trace = replace(made, input_lens=whole, arrival_s=spaced(len(made))).take(kept)
    for tokens in (20_032, 60_032):
        for rate in measure(trace, Job(["lru", "adaptive"], [tokens])).rates:
            result = run(trace, replace(MACHINE, tokens=tokens), policy=rate.policy)
            found = -(-result.device_tokens // trace.block_size)
            # The adaptive policy draws a seed for each cache.
            spread = 0.0 if rate.policy == "lru" else 0.1
            assert found.sum() == pytest.approx(rate.found_blocks, rel=spread)
            assert found.sum() > 0
    share = run(trace, replace(MACHINE, tokens=20_032)).repeated_share
    assert share == pytest.approx(
        1 - len(np.unique(np.concatenate(trace.blocks))) / sum(map(len, trace.blocks))
    )


@pytest.mark.parametrize("load", [0.5, 0.8])
def test_queues_are_those_of_the_theory(load: float) -> None:
    """Random arrivals, and prompts that all take a second: Pollaczek and Khinchine's mean wait."""
    count = 6_000
    arrivals = np.cumsum(np.random.default_rng(1).exponential(1 / load, count))
    lens = np.full(count, 10)
    result = run(Trace("random", arrivals, lens, np.ones_like(lens), (), 10))
    assert result.prefill_wait_s.mean() == pytest.approx(load / (2 * (1 - load)), rel=0.1)
    assert result.busy["prefill"] == pytest.approx(load, rel=0.05)


def test_faster_parts_make_no_request_later() -> None:
    """One machine of each kind, and prompts that share nothing: a chain of queues."""
    trace = replace(synthetic_trace(150, 5), blocks=())
    machine = Machine(token_bytes=60_000, state_bytes=0, tokens=2_000_000, requests=256)
    base: dict[str, Any] = {**BUSY, "link": 1e8}
    for name in ("prefill_rate", "link"):
        times = [
            run(trace, machine, **{**base, name: base[name] * factor}).first_token_s for factor in (1, 2, 8)
        ]
        for slower, faster in pairwise(times):
            assert (faster <= slower + 1e-9).all()
            assert faster.sum() < slower.sum()
    ends = [run(trace, machine, **{**base, "decode_rate": rate}).duration_s for rate in (100, 200, 1600)]
    assert ends == sorted(ends, reverse=True)


def test_a_larger_store_has_no_less() -> None:
    trace = replace(synthetic_trace(300, 2), arrival_s=spaced(300))
    machine = replace(MACHINE, tokens=20_032)
    loads = [
        run(trace, machine, store_bytes=size, store_link=1e9).store_tokens.sum()
        for size in (250_000, 300_000, 400_000)
    ]
    assert 0 < loads[0] < loads[1] < loads[2]


def test_loading_breaks_even_where_both_take_the_same_time() -> None:
    costs = BreakEven(token_bytes=100, state_bytes=5000, rate=10.0, latency_s=2.0)
    assert costs.bandwidth == 1000
    assert costs.tokens(1000) == costs.tokens(10) == math.inf
    # 2 + (100 n + 5000) / 2000 = n / 10
    assert costs.tokens(2000) == pytest.approx(90)
    for tokens in (89, 91):
        assert (costs.load_s(tokens, 2000) < costs.compute_s(tokens)) == (tokens > 90)
    assert BreakEven(100, 0, 10.0).tokens(1001) == 0


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("prefill", 0, "prefill must be at least 1, not 0"),
        ("decode", -1, "decode must be at least 1, not -1"),
        ("prefill_rate", 0.0, "prefill_rate must be a positive number, not 0.0"),
        ("decode_rate", math.nan, "decode_rate must be a positive number, not nan"),
        ("link", math.inf, "link must be a positive number, not inf"),
        ("step_s", -1.0, "step_s must be a positive number"),
        ("speed_up", 0.0, "speed_up must be a positive number"),
        ("store_bytes", -1, "store_bytes must be a number of at least 0, not -1"),
        ("store_link", math.nan, "store_link must be a number of at least 0, not nan"),
        ("latency_s", -0.1, "latency_s must be a number of at least 0, not -0.1"),
        ("store_bytes", 1000, "a store needs a store_link"),
        ("route", "shortest", "route must be one of earliest, prefix, turns, not 'shortest'"),
        ("policy", "mru", "mru"),
    ],
)
def test_impossible_fleets_are_refused(name: str, value: Any, message: str) -> None:  # noqa: ANN401 - any value
    with pytest.raises(ConfigError) as caught:
        run(trace_of((0, 20, 2)), **{name: value})
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("requests", "tokens", "store_bytes", "message"),
    [
        ((0, 20, 2), 3, 0, "has 4 tokens, 40 bytes: a machine has room for 3 tokens"),
        ((0, 20, 2), 100, 39, "and the store for 39 bytes"),
        ((0, 20, 2), 21, 0, "no request fits: the shortest has 22 tokens, a machine room for 21"),
    ],
)
def test_machines_without_room_are_refused(
    requests: tuple[float, int, int], tokens: int, store_bytes: int, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        run(trace_of(requests), replace(MACHINE, tokens=tokens), store_bytes=store_bytes, store_link=1.0)
    assert message in str(caught.value)


def test_a_machine_has_what_its_gpus_have() -> None:
    plan = make_plan(
        parse_model(CONFIGS["Qwen3-Next-80B-A3B"]),
        PlanConfig(memory_bytes=24 * GIB, tp=4, max_requests=16, context_len=1000),
    )
    machine = machine_of(plan)
    assert machine.tokens == plan.size
    assert machine.requests == 16
    # Two KV heads on four GPUs: each has one of them.
    assert machine.token_bytes == 2 * (24 << 10)
    assert machine.state_bytes == 36 * (32 * 128 * 128 * 4 + 8192 * 3 * 2)


MEASURED = [
    Bandwidth("host.copy", "host", 2e10, 1, 3),
    Bandwidth("directory.write", "disk", 1e9, 1, 3),
    Bandwidth("directory.read", "disk", 3e9, 1, 3),
    Bandwidth("nixl.contiguous", "loopback", 2e9, 1, 3),
    Bandwidth("nixl.scattered", "loopback", 1e8, 1, 3),
]
RATES = FleetOptions(prefill_rate=1e4, decode_rate=1e3)


def test_bandwidths_are_given_or_measured() -> None:
    assert fleet_of(RATES, MEASURED).link == 2e9
    assert fleet_of(replace(RATES, scattered=True), MEASURED).link == 1e8
    assert fleet_of(replace(RATES, link="8Gbit/s"), MEASURED).link == 1e9
    stored = fleet_of(replace(RATES, store="1TB"), MEASURED)
    assert (stored.store_bytes, stored.store_link) == (10**12, 3e9)
    assert fleet_of(replace(RATES, store="1TB", store_link="1GB/s", link="1GB/s"), []).store_link == 1e9
    assert fleet_of(replace(RATES, step_ms=20, latency_ms=5, link="1GB/s"), []).latency_s == 0.005


FAILED = [Bandwidth("nixl", "", problem="nixl is not installed")]


@pytest.mark.parametrize(
    ("options", "measured", "message"),
    [
        (FleetOptions(decode_rate=1.0), [], "give --prefill-rate and --decode-rate"),
        (FleetOptions(prefill_rate=1.0), [], "give --prefill-rate and --decode-rate"),
        (RATES, [], "give --link, or --bandwidth with a file of kvpool doctor --bandwidth --json"),
        (RATES, FAILED, "--bandwidth has no nixl.contiguous: nixl is not installed; give --link"),
        (RATES, MEASURED[:1], "--bandwidth has no nixl.contiguous; give --link"),
        (replace(RATES, store="1TB"), MEASURED[3:], "--bandwidth has no directory.read; give --store-link"),
        (replace(RATES, link="1GB/s", scattered=True), [], "give --link or --scattered, not both"),
        (replace(RATES, link="fast"), [], "'fast' is not a bandwidth"),
        (replace(RATES, link="1GB/s", store_link="1GB/s"), [], "give its size, --store"),
        (replace(RATES, link="1GB/s", store="big", store_link="1GB/s"), [], "'big' is not a size"),
    ],
)
def test_speeds_that_nobody_knows_are_asked_for(
    options: FleetOptions, measured: list[Bandwidth], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        fleet_of(options, measured)
    assert message in str(caught.value)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with models, measured bandwidths and a trace."""
    for name, config in CONFIGS.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(config))
    (tmp_path / "measured.json").write_text(json.dumps(as_json(MEASURED)))
    lines = [
        {"timestamp": at * 1000, "input_length": 700, "output_length": 9, "hash_ids": [0, at // 2]}
        for at in range(6)
    ]
    (tmp_path / "conversation_trace.jsonl").write_text("\n".join(map(json.dumps, lines)))
    rows = [f"2023-11-16 18:15:{at}.0,700,9" for at in range(10, 16)]
    head = "TIMESTAMP,ContextTokens,GeneratedTokens"
    (tmp_path / "AzureLLMInferenceTrace_conv.csv").write_text("\n".join([head, *rows]))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def invoke(*arguments: str, model: str = "Llama-3.1-8B") -> command_line.Result:
    return command_line.invoke(main, [f"{model}.json", "--memory", "60GiB", *arguments])


SMALL = ("--requests", "30", "--prefill-rate", "9000", "--decode-rate", "2000")


@pytest.mark.usefixtures("folder")
def test_the_command_prints_tables() -> None:
    result = invoke(*SMALL, "--bandwidth", "measured.json", "--store", "1TB", "--latency-ms", "1")
    assert result.exit_code == 0, result.stderr
    assert max(map(len, result.stdout.splitlines())) <= 80
    text = " ".join(result.stdout.split())
    for part in (
        "1 prefill and 1 decode machines, synthetic (seed 0)",
        "tokens of 131,072 B; 256 requests",
        "an unlimited cache",
        "loaded from the store",
        "first token",
        "(bottleneck)",
        "decode machines for each prefill machine",
        "(n x 131,072 B) / bandwidth < n / 9,000 s",
        "131,072 B x 9,000/s = 1.18 GB/s",
        "nixl.scattered │ 100 MB/s (800 Mbit/s)",
        "never",
        "beyond 15 tokens",
    ):
        assert part in text, part
    assert "directory.write" not in text


@pytest.mark.usefixtures("folder")
def test_the_command_prints_json() -> None:
    arguments = (*SMALL, "--link", "100Gbit/s", "--json")
    report = json.loads(invoke(*arguments, model="Qwen3-Next-80B-A3B").stdout)
    assert report["machine"]["token_bytes"] == 24 << 10
    assert report["machine"]["state_bytes"] > 0
    assert report["machine"]["requests"] == 256
    assert report["requests"] == 30
    assert report["prompt_tokens"] == report["device_tokens"] + report["computed_tokens"]
    assert report["config"]["link"] == 12.5e9
    assert report["break_even"]["links"][0]["name"] == "link"
    assert report["break_even"]["links"][0]["tokens"] > 0
    assert set(report["busy"]) >= {report["bottleneck"]}
    slow = json.loads(invoke(*SMALL, "--link", "1MB/s", "--json").stdout)
    assert slow["break_even"]["links"][0]["tokens"] is None
    assert slow["bottleneck"] in {"link of prefill", "link of decode"}
    other = json.loads(invoke(*arguments, "--max-requests", "3", "--seed", "1", "--speed-up", "2").stdout)
    assert other["machine"]["requests"] == 3
    assert other["trace"] == "synthetic (seed 1)"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give --prefill-rate and --decode-rate"),
        ((*SMALL,), "give --link, or --bandwidth"),
        ((*SMALL, "--bandwidth", "none.json"), "[Errno 2] No such file or directory: 'none.json'"),
        ((*SMALL, "--bandwidth", "Llama-3.1-8B.json"), "Llama-3.1-8B.json was not written by kvpool doctor"),
        ((*SMALL, "--link", "1GB/s", "--trace", "measured.json"), "measured.json:1: "),
        (
            (*SMALL, "--link", "1GB/s", "--trace", "none.csv"),
            "[Errno 2] No such file or directory: 'none.csv'",
        ),
        ((*SMALL, "--link", "1GB/s", "--step-ms", "0"), "step_s must be a positive number"),
        ((*SMALL, "--link", "1GB/s", "--policy", "mru"), "policy"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_the_command_reports_errors_in_one_line(arguments: tuple[str, ...], message: str) -> None:
    result = invoke(*arguments)
    assert (result.exit_code, result.stdout) == (1 if ".json" in message or ".csv" in message else 2, "")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def commands() -> list[str]:
    """The commands of the page."""
    shell = re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    return [line for source in shell for line in source.splitlines()]


@pytest.mark.parametrize("command", commands())
def test_the_commands_of_the_page_run(command: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With few requests, and small copies to another folder."""
    (folder / "benches").symlink_to(FLEETS.parent)
    words, _, target = command.partition(" > ")
    name, *arguments = words.replace("/mnt/nvme", ".").split()
    program = kvpool
    if name == "python":
        program, folder_of_it = main, arguments.pop(0)
        assert (folder / folder_of_it).resolve() == FLEETS
        arguments += ["--requests", "20"]
    else:
        assert name == "kvpool"
    if arguments[0] == "doctor":
        arguments += ["--size", "1MiB", "--seconds", "1e-6"]
        find = importlib.util.find_spec
        # NIXL takes seconds.
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "nixl" else find(name))
    elif arguments[0] == "replay":
        arguments += ["--requests", "20"]
    result = command_line.invoke(program, arguments)
    assert result.exit_code == 0, result.stderr
    if target:
        assert read_bandwidths(write_text(folder / target, result.stdout))


def write_text(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def rows_of(section: str) -> dict[str, list[str]]:
    """The cells of the tables of a section, by the first cell of each row."""
    text = PAGE.read_text().partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line[:1] == "|"]
    return {row[0]: row[1:] for row in rows}


MODELS = {
    name: machine_of(
        make_plan(parse_model(CONFIGS[name]), PlanConfig(memory_bytes=60 * GIB, max_requests=256))
    )
    for name in ("Llama-3.1-8B", "Qwen3-30B-A3B", "DeepSeek-V3", "Qwen3-Next-80B-A3B")
}


def number_in(text: str) -> float:
    return float(re.findall(r"[\d.]+", text.replace(",", ""))[0])


def test_the_arithmetic_of_the_page() -> None:
    """Bytes, times on links, break-even bandwidths and sizes of stores."""
    links = {line.name: line for line in read_bandwidths(FLEETS / "links.json")}
    in_bytes, on_links, even, stores = map(
        rows_of, ("Bytes", "Links", "Loading or computing", "How large a store")
    )
    tokens = [number_in(cell) * 1e6 for cell in stores["tokens"]]
    results, text = RESULTS.read_text(), " ".join(PAGE.read_text().split())
    speeds = [
        (64 << 20) / float(found.replace(",", "")) / 1e3
        for kind in ("in one run", "in pages of 16", "scattered")
        for found in re.findall(rf"2048 tokens of 32 KiB {kind}, TCP \| ([\d,.]+)", results)
    ]
    quoted = "{:.2f} GB/s in one run, {:.2f} in pages of 16 slots and {:.2f} from scattered slots"
    assert quoted.format(*speeds) in text
    for column, (name, machine) in enumerate(MODELS.items(), 1):
        costs = BreakEven(machine.token_bytes, machine.state_bytes, 20_000)
        row = next(cells for title, cells in in_bytes.items() if title.startswith(name))
        assert number_in(row[1]) == machine.token_bytes
        assert (number_in(row[2]) if row[2] else 0) == machine.state_bytes
        for link, line in links.items():
            assert line.bytes_per_s is not None
            assert number_in(on_links[link][0]) == pytest.approx(line.bytes_per_s / 1e9, rel=0.01)
            milliseconds = 1000 * costs.load_s(6909, line.bytes_per_s)
            assert number_in(on_links[link][column]) == pytest.approx(milliseconds, rel=0.005)
        for cell, rate in zip(even[name], (5_000, 20_000, 80_000), strict=False):
            assert number_in(cell) == pytest.approx(machine.token_bytes * rate / 1e9, rel=0.05)
        assert number_in(even[name][3]) == round(costs.tokens(7e9))
        cells = next(cells for title, cells in stores.items() if title.startswith(name))
        for cell, count in zip(cells, tokens, strict=True):
            assert number_in(cell) == round(count * machine.token_bytes / 1e9)


def test_the_figures_of_the_page() -> None:
    """The options of a fleet without a store."""
    if not CONVERSATION.exists():
        pytest.skip(f"{CONVERSATION.name} is not beside the repository in shared/traces")
    config = FleetConfig(3, 2, prefill_rate=20_000, decode_rate=2_500, link=12.5e9)
    result = simulate(read_trace(CONVERSATION), MODELS["Llama-3.1-8B"], config)
    median, p99 = (f"{seconds:.2f} s" for seconds in np.percentile(result.first_token_s, (50, 99)))
    busy = {name: f"{100 * share:.1f} %" for name, share in result.busy.items()}
    found, computed = (
        f"{100 * tokens.sum() / result.input_lens.sum():.1f} %"
        for tokens in (result.device_tokens, result.computed_tokens)
    )
    row = rows_of("How large a store")["none"]
    assert row == [found, "", computed, median, p99, busy["prefill"], ""]
    assert rows_of("How many machines")["2"] == [median, p99, result.bottleneck, busy[result.bottleneck]]
    text = " ".join(PAGE.read_text().split())
    assert f"make it {2 * result.busy['decode memory']:.2f} in the simulation" in text
    assert f"wants {result.balanced_decode:.2f} decode machines" in text
