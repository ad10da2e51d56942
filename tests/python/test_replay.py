"""`kvpool replay`: the scheduler over the pools, its checks, and the command."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import command_line
import numpy as np
import pytest
import torch
from common import some

from kvpool._kvpool import _STORAGE_DTYPES
from kvpool.errors import ConfigError, KvPoolError
from kvpool.tools.cli import main
from kvpool.tools.replay.config import ReplayConfig
from kvpool.tools.replay.errors import ReplayError, VerificationError
from kvpool.tools.replay.pool_size import suggest_pool_size
from kvpool.tools.replay.prompts import Prompts
from kvpool.tools.replay.replay import OPERATIONS, Replay, ReplayResult
from kvpool.tools.replay.report import as_json
from kvpool.tools.replay.token_rows import KvStore, TokenRows
from kvpool.tools.traces import Trace, read_trace, synthetic_trace

if TYPE_CHECKING:
    from collections.abc import Callable

TRACES = Path(__file__).parents[3] / "shared" / "traces"
AZURE = TRACES / "azure" / "AzureLLMInferenceTrace_conv.csv"
MOONCAKE = TRACES / "mooncake" / "conversation_trace.jsonl"


def trace_of(*requests: tuple[float, int, int]) -> Trace:
    """A trace of (arrival in s, input length, output length)."""
    arrival_s, inputs, outputs = zip(*requests, strict=True)
    return Trace("test", np.array(arrival_s, dtype=np.float64), np.array(inputs), np.array(outputs))


def run(trace: Trace, **options: Any) -> ReplayResult:  # noqa: ANN401 - ReplayConfig's fields
    return Replay(trace, ReplayConfig(**options)).run()


def small_trace() -> Trace:
    """Eight requests that need three times the 128 slots of the pool."""
    return trace_of(*((0.01 * i, 5 + 7 * i % 40, 10 + 11 * i % 30) for i in range(8)))


@pytest.mark.parametrize(
    ("page_size", "need_sort", "kv"),
    [(1, True, True), (16, False, True), (16, True, False), (1, False, False)],
)
def test_a_short_pool_retracts_and_finishes_everything(page_size: int, need_sort: bool, kv: bool) -> None:
    trace = synthetic_trace(120, 3)
    result = run(trace, pool_size=20_000, page_size=page_size, need_sort=need_sort, kv=kv, speed_up=4.0)
    counts = result.counts
    assert counts.retractions > 0
    assert counts.finished == 120
    assert counts.rejected == 0
    assert counts.admissions == counts.finished + counts.retractions
    assert counts.decoded_tokens == trace.output_lens.sum()
    assert counts.prefilled_tokens > trace.input_lens.sum()
    assert 0.9 * result.capacity < counts.peak_in_use <= result.capacity
    assert (counts.verified_tokens >= trace.total_lens.sum()) == kv


@pytest.mark.parametrize(
    ("dtype", "heads", "head_dim"),
    [*((dtype, 3, 5) for dtype in _STORAGE_DTYPES), ("bfloat16", 2, 16), ("uint8", 1, 1)],
)
def test_rows_survive_in_every_dtype(dtype: str, heads: int, head_dim: int) -> None:
    trace = small_trace()
    result = run(trace, pool_size=128, dtype=dtype, heads=heads, head_dim=head_dim, layers=3)
    assert result.counts.verified_tokens >= trace.total_lens.sum()
    assert result.counts.retractions > 0


def test_the_counts_of_one_request_are_exact() -> None:
    result = run(trace_of((0.0, 1_700, 5)), prefill_budget=800, step_ms=10.0, pool_size=1_705)
    assert dataclasses.asdict(result.counts) == {
        "requests": 1,
        "rejected": 0,
        "admissions": 1,
        "finished": 1,
        "retractions": 0,
        "prefilled_tokens": 1_700,
        "found_tokens": 0,
        "evicted_tokens": 0,
        "decoded_tokens": 5,
        "verified_tokens": 1_705,
        "steps": 8,
        "peak_in_use": 1_705,
        "peak_running": 1,
    }
    assert result.counts.operations == 7
    assert result.virtual_s == pytest.approx(0.08)
    calls = {name: len(samples) for name, samples in result.samples.items()}
    assert calls == {
        "extend": 8,
        "finish": 1,
        "alloc_row": 1,
        "match": 0,
        "publish": 0,
        "read": 1,
        "set_kv": 2 * (3 + 5),
        "gather": 2,
    }
    assert result.occupancy.in_use.tolist() == [800, 1_600, 1_700, 1_701, 1_702, 1_703, 1_704, 1_705]


def test_a_request_without_output_ends_after_its_prefill() -> None:
    result = run(trace_of((0.0, 10, 0), (0.0, 20, 1)), pool_size=21)
    assert result.counts.finished == 2
    assert result.counts.decoded_tokens == 1


def test_the_clock_skips_idle_time() -> None:
    result = run(trace_of((0.0, 4, 2), (1_000.0, 4, 2)), speed_up=2.0)
    assert result.counts.steps == 6
    assert result.virtual_s == pytest.approx(500.12)


def test_the_youngest_is_retracted_and_goes_first() -> None:
    """Two requests fill the pool; the younger is retracted, and admitted again before the third."""
    trace = trace_of((0.0, 10, 10), (0.0, 10, 10), (0.0, 10, 1))
    batches: list[list[int]] = []

    def watch(state: Replay) -> None:
        batch = [request.index for request in state.scheduler.running]
        if batch not in batches:
            batches.append(batch)

    result = Replay(trace, ReplayConfig(pool_size=26)).run(watch)
    assert result.counts.retractions == 1
    assert batches == [[0, 1], [0], [1, 2], [1]]


def test_a_request_is_retracted_in_the_middle_of_its_prefill() -> None:
    result = run(trace_of((0.0, 10, 40), (0.0, 60, 1)), pool_size=80, prefill_budget=3)
    counts = result.counts
    assert counts.retractions == 1
    assert 10 + 60 < counts.prefilled_tokens < 10 + 60 + 60
    assert counts.verified_tokens == counts.prefilled_tokens + counts.decoded_tokens


@pytest.mark.parametrize(
    ("options", "rejected"),
    [
        ({"pool_size": 100}, 2),
        ({"pool_size": 95, "page_size": 16}, 3),
        ({"pool_size": 1_000, "max_context": 99}, 3),
        ({"pool_size": 1_000, "max_context": 100}, 2),
    ],
)
def test_requests_too_large_for_the_pool_are_rejected(options: dict[str, int], rejected: int) -> None:
    trace = trace_of((0.0, 90, 10), (0.0, 91, 10), (0.0, 5, 5), (0.0, 500, 1))
    counts = run(trace, **options).counts
    assert counts.rejected == rejected
    assert counts.finished == 4 - rejected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pool_size": 9}, r"all 2 .* shortest has 10 tokens, .* 20 \(max_context\), .* 9 slots"),
        ({"pool_size": 15, "page_size": 16, "kv": False}, "the pool has 0 slots"),
        ({"max_context": 9}, r"a request can have 9 \(max_context\)"),
    ],
)
def test_rejects_a_trace_without_fitting_requests(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(trace_of((0.0, 5, 5), (0.0, 10, 10)), **options)


def test_max_running_is_kept() -> None:
    result = run(synthetic_trace(40, 0), max_running=3, speed_up=100.0, kv=False)
    assert result.counts.peak_running == 3
    assert result.occupancy.running.max() == 3


def test_the_same_options_give_the_same_run() -> None:
    def outcome(seed: int) -> dict[str, Any]:
        plain = as_json(run(synthetic_trace(60, seed), speed_up=8.0, seed=seed))
        del plain["timing"]
        return plain

    assert outcome(1) == outcome(1)
    assert outcome(1) != outcome(2)


@pytest.mark.parametrize("page_size", [1, 16])
def test_the_default_pool_is_half_of_an_unlimited_ones_peak(page_size: int) -> None:
    trace = synthetic_trace(300, 5)
    config = ReplayConfig(kv=False, page_size=page_size)
    unlimited = Replay(trace, dataclasses.replace(config, pool_size=1_000_000)).run()
    assert suggest_pool_size(trace, config) == pytest.approx(0.5 * unlimited.counts.peak_in_use, rel=0.03)
    result = Replay(trace, config).run()
    assert result.counts.rejected == 0
    assert result.counts.retractions > 0


def test_the_default_pool_holds_the_longest_request() -> None:
    assert suggest_pool_size(trace_of((0.0, 5, 5), (9.0, 100, 3)), ReplayConfig(page_size=8)) == 104
    assert suggest_pool_size(trace_of((0.0, 5, 5), (9.0, 100, 3)), ReplayConfig()) == 103


def test_the_default_pool_counts_no_more_than_max_running() -> None:
    trace = synthetic_trace(300, 5)
    limit = int(np.sort(trace.total_lens)[-2:].sum())
    assert suggest_pool_size(trace, ReplayConfig(max_running=2)) <= limit


def similar_prompts() -> Trace:
    """Requests whose prompts share three of four blocks of 16 tokens, or all."""
    blocks = ([0, 1, 2, 3], [0, 1, 2, 4], [5, 6, 7, 8], [5, 6, 7, 8], [0, 1, 2, 3, 9], [5, 6, 7, 10], [11])
    lens = [60, 64, 64, 64, 70, 49, 16]
    trace = trace_of(*((1.0 * at, length, 20) for at, length in enumerate(lens)))
    return dataclasses.replace(trace, blocks=tuple(map(np.array, blocks)), block_size=16)


@pytest.mark.parametrize(
    ("page_size", "found"), [(1, [0, 48, 0, 63, 60, 48, 0]), (16, [0, 48, 0, 48, 48, 48, 0])]
)
@pytest.mark.parametrize("kv", [True, False])
def test_the_cache_finds_what_prompts_have_in_common(page_size: int, found: list[int], kv: bool) -> None:
    trace = similar_prompts()
    result = run(trace, prefix_cache=True, page_size=page_size, pool_size=640, kv=kv)
    counts = result.counts
    assert counts.found_tokens == sum(found)
    assert counts.prefilled_tokens == trace.input_lens.sum() - sum(found)
    assert counts.verified_tokens == kv * trace.total_lens.sum()
    assert counts.evicted_tokens == 0
    assert len(result.samples["match"]) == counts.admissions == 7
    assert len(result.samples["publish"]) > 0
    assert result.occupancy.evictable.max() > 100


@pytest.mark.parametrize(
    ("page_size", "need_sort", "policy"),
    [(1, True, "adaptive"), (16, False, "slru")],
)
def test_a_short_pool_evicts_and_retracts(page_size: int, need_sort: bool, policy: str) -> None:
    trace = synthetic_trace(150, 3)
    options = {"pool_size": 20_000, "page_size": page_size, "need_sort": need_sort, "speed_up": 4.0}
    without = run(trace, kv=False, **options).counts
    counts = run(trace, prefix_cache=True, policy=policy, **options).counts
    assert counts.finished == 150
    assert counts.retractions > 0
    assert counts.evicted_tokens > 0
    assert counts.decoded_tokens == trace.output_lens.sum()
    assert counts.found_tokens > 0
    assert counts.prefilled_tokens < without.prefilled_tokens
    assert counts.verified_tokens >= trace.total_lens.sum()


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_page_given_to_the_wrong_prefix_is_found_and_named(
    monkeypatch: pytest.MonkeyPatch, page_size: int
) -> None:
    """Requests 0 and 1 differ in block 3 only; the cache is made to take it for the same."""

    def confused(self: Prompts, request: int, begin: int, end: int) -> Any:  # noqa: ANN401
        return own(self, 0 if request == 1 else request, begin, end)

    own = Prompts.tokens_of
    monkeypatch.setattr(Prompts, "tokens_of", confused)
    with pytest.raises(VerificationError) as caught:
        run(similar_prompts(), prefix_cache=True, page_size=page_size, pool_size=640)
    error = caught.value
    assert (error.request, error.position, error.layer) == (1, 48, 0)
    assert error.found_token == (0, 48)


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"policy must be one of .*, not 'belady'"):
        run(similar_prompts(), prefix_cache=True, policy="belady")


def corrupt_when(step: int, change: Callable[[Replay], object]) -> Callable[[Replay], None]:
    def on_step(state: Replay) -> None:
        if state.counts.steps == step:
            change(state)

    return on_step


@pytest.mark.parametrize("part", ["K", "V"])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "uint8", "float32"])
def test_one_wrong_element_is_found_and_named(part: str, page_size: int, dtype: str) -> None:
    trace = trace_of((0.0, 30, 10), (0.0, 50, 20), (0.0, 20, 30))
    job = Replay(trace, ReplayConfig(dtype=dtype, page_size=page_size, pool_size=320))
    place: list[int] = []

    def change(state: Replay) -> None:
        assert state.kv is not None
        slot = int(state.table.req_to_token[2, 17])  # row 2 belongs to request 1
        place.append(slot)
        buffers = state.kv.pool.k_buffer if part == "K" else state.kv.pool.v_buffer
        raw = buffers[1].view(torch.uint8)
        raw[slot, 1, 3] ^= 1

    with pytest.raises(VerificationError) as caught:
        job.run(corrupt_when(5, change))
    error = caught.value
    assert (error.request, error.position, error.layer, error.part) == (1, 17, 1, part)
    assert error.slot == place[0]
    assert len(error.expected) == len(error.found)
    assert error.expected != error.found
    assert f"request 1, position 17, layer 1, {part} in slot {place[0]}: expected 0x" in str(error)


def test_a_wrong_table_entry_is_found_and_named() -> None:
    """The table has another request's slot: the row is intact, but belongs to another token."""

    def change(state: Replay) -> None:
        table = state.table.req_to_token
        table[1, 4] = table[2, 5]
        state.table.mark_modified([1])

    job = Replay(trace_of((0.0, 30, 10), (0.0, 50, 20)), ReplayConfig(pool_size=320))
    with pytest.raises(VerificationError, match="request 0, position 4, layer 0, K in slot") as caught:
        job.run(corrupt_when(3, change))
    assert caught.value.found_token == (1, 5)
    assert str(caught.value).endswith(" of request 1, position 5")


def test_two_requests_in_one_slot_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The effect of a planner that hands out one slot twice."""

    def change(state: Replay) -> None:
        own = state.scheduler._extend

        def twice(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401
            plan = some(own(*arguments, **options))
            slots = plan.out_cache_loc
            slots[:] = slots[0].item()
            for row, position in zip(plan.req_pool_indices.tolist(), plan.positions.tolist(), strict=True):
                state.table.req_to_token[row, position] = slots[0]
                state.table.mark_modified([row])
            return plan

        monkeypatch.setattr(state.scheduler, "_extend", twice)

    job = Replay(trace_of((0.0, 30, 10), (0.0, 50, 20)), ReplayConfig(pool_size=320))
    with pytest.raises(VerificationError, match="request 0, position"):
        job.run(corrupt_when(3, change))


@pytest.mark.parametrize(
    ("change", "pool_size", "message"),
    [
        (lambda state: state.allocator.alloc(2), 320, "2 of 320 slots were not freed"),
        (lambda state: state.table.alloc(), 320, "1 of 256 rows were not freed"),
        (lambda state: state.allocator.free([0]), 320, "1 slot frees were dropped"),
        (lambda state: state.allocator.alloc(8), 40, "no request fits: 32 of 40 slots"),
    ],
    ids=["a leaked slot", "a leaked row", "a dropped free", "a lone request without slots"],
)
def test_a_broken_pool_fails_the_run(
    change: Callable[[Replay], object], pool_size: int, message: str
) -> None:
    job = Replay(trace_of((0.0, 30, 10)), ReplayConfig(pool_size=pool_size))
    with pytest.raises(ReplayError, match=message):
        job.run(corrupt_when(2, change))


def test_vanished_slots_end_the_run() -> None:
    job = Replay(trace_of((0.0, 30, 10), (0.0, 300, 10)), ReplayConfig(pool_size=320))
    with pytest.raises(ReplayError, match=r"after \d+\.\d+ s: no request fits: 220 of 320 slots"):
        job.run(corrupt_when(2, lambda state: state.allocator.alloc(100)))


def test_every_token_layer_and_part_has_its_own_row() -> None:
    rows = TokenRows(ReplayConfig(layers=3), Prompts(trace_of((0.0, 1, 1), (0.0, 1, 1))))
    keys = torch.cat((rows.keys_of(0, 0, 2), rows.keys_of(1, 0, 2)))
    seen = set()
    for layer in range(3):
        for part in (0, 1):
            for row in rows.expected(keys, layer, part):
                seen.add(row.numpy().tobytes())
    assert len(seen) == 4 * 3 * 2


def test_the_seed_changes_the_rows() -> None:
    prompts = Prompts(trace_of((0.0, 9, 1)))
    keys = [TokenRows(ReplayConfig(seed=seed), prompts).keys_of(0, 0, 10).tolist() for seed in (0, 0, 1)]
    assert keys[0] == keys[1]
    assert keys[0] != keys[2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"page_size": 0}, "page_size must be at least 1"),
        ({"pool_size": 0}, "pool_size must be at least 1"),
        ({"max_context": 0}, "max_context must be at least 1"),
        ({"step_ms": 0.0}, "step_ms must be a positive number"),
        ({"speed_up": float("nan")}, "speed_up must be a positive number"),
        ({"speed_up": float("inf")}, "speed_up must be a positive number"),
        ({"dtype": "float64"}, "dtype must be one of"),
        ({"seed": 1 << 32}, "seed must be between 0 and"),
    ],
)
def test_rejects_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ReplayConfig(**options)


def test_rejects_an_empty_trace() -> None:
    with pytest.raises(ConfigError, match="holds no requests"):
        Replay(synthetic_trace(1, 0).head(0), ReplayConfig())


def test_errors_are_pool_errors() -> None:
    assert issubclass(VerificationError, ReplayError)
    assert issubclass(ReplayError, KvPoolError)
    assert issubclass(ReplayError, RuntimeError)


class Outcome(NamedTuple):
    exit_code: int
    stdout: str
    stderr: str


def invoke(*arguments: str) -> Outcome:
    result = command_line.invoke(main, ["replay", *arguments])
    return Outcome(result.exit_code, result.stdout, result.stderr)


def test_the_command_prints_a_report() -> None:
    result = invoke("--synthetic", "--requests", "50", "--prefix-cache")
    assert result.exit_code == 0, result.stderr
    for text in (
        "requests finished",
        "50 of 50",
        "tokens found",
        "retractions",
        "peak occupancy",
        "p99 us",
        "pools' share",
    ):
        assert text in result.stdout
    for name in OPERATIONS:
        assert f" {name} " in result.stdout
    assert result.stderr == ""


def test_json_output_is_one_object_with_every_call() -> None:
    result = invoke("--synthetic", "--requests", "50", "--json", "--page-size", "16", "--no-need-sort")
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert result.stderr == ""
    assert report["finished"] == 50
    assert report["config"]["page_size"] == 16
    assert report["config"]["need_sort"] is False
    assert report["verified_tokens"] > 0
    assert set(report["timing"]["calls"]) == set(OPERATIONS)
    assert report["timing"]["calls"]["extend"]["p99_ns"] > 0


def test_json_without_kv_has_no_times_of_copies() -> None:
    result = invoke("--synthetic", "--requests", "20", "--json", "--no-kv")
    report = json.loads(result.stdout)
    assert report["kv_bytes"] == report["verified_tokens"] == 0
    none = {"count": 0, "median_ns": None, "p99_ns": None, "worst_ns": None, "total_ns": 0}
    assert report["timing"]["calls"]["set_kv"] == none


def test_the_progress_bar_is_on_stderr() -> None:
    result = invoke("--synthetic", "--requests", "50", "--json", "--progress")
    assert result.exit_code == 0, result.stderr
    assert "replaying" in result.stderr
    json.loads(result.stdout)


@pytest.mark.parametrize("options", [[], ["--no-kv", "--page-size", "16"], ["--prefix-cache"]])
def test_plot_writes_a_picture(tmp_path: Path, options: list[str]) -> None:
    picture = tmp_path / "replay.png"
    result = invoke("--synthetic", "--requests", "50", "--plot", str(picture), *options)
    assert result.exit_code == 0, result.stderr
    assert picture.read_bytes().startswith(b"\x89PNG\r\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["/absent/trace.csv"], "No such file or directory: '/absent/trace.csv'"),
        ([], "give one of TRACE, --synthetic and --agents"),
        (["--synthetic", "x.csv"], "give one of TRACE, --synthetic and --agents"),
        (["--synthetic", "--dtype", "float64"], "kvpool: dtype must be one of"),
        (["--synthetic", "--speed-up", "0"], "kvpool: speed_up must be a positive number"),
        (["--synthetic", "--requests", "2", "--plot", "/absent/x.png"], "--plot: /absent is not a folder"),
        (["--synthetic", "--requests", "2", "--plot", "x.gif"], "--plot: x.gif must end in .png"),
        (["--synthetic", "--requests", "2", "--device", "nonsense"], "nonsense"),
        # Also where it is not used.
        (["--synthetic", "--policy", "mru"], "policy must be one of lru, fifo, "),
        (["--synthetic", "--no-kv", "--dtype", "float64"], "dtype must be one of"),
        (["--synthetic", "--requests", "20", "--pool-size", "1"], "kvpool: all 20 requests would be"),
    ],
)
def test_the_command_reports_errors_in_one_line(arguments: list[str], message: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == (1 if "No such file" in message else 2)
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_a_broken_trace_is_named(tmp_path: Path) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_text('{"timestamp": 0}\n')
    result = invoke(str(path))
    assert result.exit_code == 1
    assert "broken.jsonl:1: needs an object" in result.stderr


def test_a_failed_check_ends_with_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    def corrupt(self: KvStore, keys: torch.Tensor, slots: torch.Tensor) -> None:
        own_store(self, keys, slots)
        self.pool.k_buffer[0][int(slots[-1])] = 0

    own_store = KvStore.store
    monkeypatch.setattr(KvStore, "store", corrupt)
    result = invoke("--synthetic", "--requests", "3")
    assert result.exit_code == 1
    assert "VerificationError: request " in result.stderr
    assert result.stdout == ""


def test_python_m_kvpool_runs_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvpool", "replay", "--synthetic", "--requests", "5", "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout)["finished"] == 5


@pytest.mark.parametrize(
    ("path", "requests", "options"),
    [
        (AZURE, 240, {}),
        (AZURE, 240, {"page_size": 16, "need_sort": False}),
        (MOONCAKE, 60, {"layers": 1, "heads": 1, "head_dim": 4, "speed_up": 2.0}),
        (MOONCAKE, 120, {"layers": 1, "heads": 1, "head_dim": 4, "speed_up": 4.0, "prefix_cache": True}),
    ],
)
def test_real_traces_end_with_every_row_right(path: Path, requests: int, options: dict[str, Any]) -> None:
    if not path.exists():
        pytest.skip(f"{path.name} is not beside the repository in shared/traces")
    trace = read_trace(path).head(requests)
    counts = run(trace, **options).counts
    assert counts.finished == requests
    assert counts.retractions > 0
    assert counts.verified_tokens >= trace.total_lens.sum()
