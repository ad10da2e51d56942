"""`tests/soak/soak.py`: what it decides, and that it finds a leak."""

from __future__ import annotations

import csv
from typing import TYPE_CHECKING

import numpy as np
import pytest
from memory_curve import COLUMNS, HOUR_S, LIMITS, Trend, find_trends, read_samples, theil_sen
from shared_pools import Pools, Sizes
from soak import FILES, TRACES, USERS, Soak, deliver, load_traces, soak_for
from users import KINDS, users_of

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

pytestmark = pytest.mark.processes


def trend_of(values: NDArray[np.float64], minutes: float = 60.0, limit: float = 2048.0) -> Trend:
    columns = {"seconds": np.linspace(0, 60 * minutes, len(values)), "rss_kib": values}
    (trend,) = find_trends(columns, {"rss_kib": limit})
    return trend


def noise(count: int, size: float) -> NDArray[np.float64]:
    return np.random.default_rng(1).normal(0, size, count)


def test_the_slope_is_that_of_most_pairs() -> None:
    times = np.arange(21.0)
    values = 3 * times + 7
    assert theil_sen(times, values) == pytest.approx(3)
    values[[2, 9, 17]] = 1e9, -1e9, 5e8
    assert theil_sen(times, values) == pytest.approx(3, rel=0.01)
    assert theil_sen(np.zeros(4).repeat(2) + np.arange(8) // 4, np.arange(8.0)) == pytest.approx(4)


@pytest.mark.parametrize("count", [40, 720, 5000])
def test_a_process_that_warms_up_and_stays_is_flat(count: int) -> None:
    warming = 500_000 + 80_000 * (1 - np.exp(-np.linspace(0, 20, count)))
    assert trend_of(warming + noise(count, 300)).is_flat
    jump = warming + np.where(np.arange(count) > 0.8 * count, 9000, 0)
    assert trend_of(jump).is_flat
    spikes = warming + np.where(np.arange(count) % 10 == 0, 50_000, 0)
    assert trend_of(spikes).is_flat


@pytest.mark.parametrize("count", [40, 720, 5000])
def test_a_leak_is_found_in_noise(count: int) -> None:
    leak = 500_000 + np.linspace(0, 8192, count)
    trend = trend_of(leak + noise(count, 300))
    assert not trend.is_flat
    assert trend.per_hour == pytest.approx(8192, rel=0.5)
    # Memory that goes back in between, but never all of it.
    saw = leak + np.arange(count) % 7 * 400
    assert not trend_of(saw).is_flat


def test_falling_series_are_flat_and_short_ones_are_not_judged() -> None:
    assert trend_of(np.linspace(9e5, 5e5, 100)).is_flat
    columns = {"seconds": np.arange(9.0), "rss_kib": np.arange(9.0)}
    assert not find_trends(columns, {"rss_kib": 1e9})


def test_the_verdict_is_the_exit_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(grows: str | None, count: int = 60) -> Path:
        path = tmp_path / f"{grows}.csv"
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(COLUMNS)
            for row in range(count):
                line = {"seconds": 60 * row, "rounds": row, "operations": 100 * row}
                writer.writerow([line.get(name, 5 * row if name == grows else 7) for name in COLUMNS])
        return path

    png = tmp_path / "soak.png"
    small = dict.fromkeys(LIMITS, 100.0)
    assert deliver(write(None), png, small) == 0
    assert png.read_bytes()[:4] == b"\x89PNG"
    monkeypatch.setattr("soak.save_curve", lambda *_: None)  # takes the most time
    for name in LIMITS:
        capsys.readouterr()
        assert deliver(write(name), png, small) == 1, name
        rows = [line for line in capsys.readouterr().out.splitlines() if "NO" in line]
        assert len(rows) == 1
        assert name in rows[0]
    assert deliver(write(None, 5), png, small) == 2


@pytest.fixture
def small_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("soak.TOKENS_PER_ROUND", 1000)
    monkeypatch.setattr("soak.STEPS_PER_ROUND", 8)


@pytest.mark.usefixtures("small_rounds")
def test_rounds_use_every_pool_and_leave_nothing(tmp_path: Path) -> None:
    soak = Soak("cpu", 3, [])
    rounds: list[int] = []
    path = tmp_path / "soak.csv"
    soak_for(soak, 8, 1, path, lambda soak, _: rounds.append(soak.rounds), clock=lambda: soak.rounds)
    soak.finish()
    columns = read_samples(path)
    assert tuple(columns) == COLUMNS
    assert columns["seconds"].tolist() == columns["rounds"].tolist() == rounds == list(range(1, 9))
    # Users of pools that stay, of pools that are made anew, and a replay.
    assert soak.operations > 8 * 8 * USERS * len(KINDS) * 5
    assert all(columns[name].all() for name in set(COLUMNS) - {"device_kib"})


@pytest.mark.cuda
@pytest.mark.parametrize(("page_size", "strict"), [(1, False), (16, True)])
def test_users_of_pools_on_a_gpu(page_size: int, strict: bool) -> None:
    pools = Pools(Sizes("cuda", page_size, strict=strict, users=2))
    users = [user for number in range(2) for user in users_of(pools, number, 4)]
    for _ in range(60):
        for user in users:
            user.step()
    pools.check()
    for user in users:
        user.finish()
    pools.check_returned(users)


@pytest.mark.parametrize("is_leaking", [True, False])
def test_a_planted_leak_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_leaking: bool) -> None:
    """Most of a MiB a second, where each round takes a second of a clock of its own.

    Of arrays, whose elements malloc gives out also where Python has another allocator for its objects, as it
    has without a GIL.
    """
    monkeypatch.setattr("soak.TOKENS_PER_ROUND", 250)
    monkeypatch.setattr("soak.STEPS_PER_ROUND", 2)
    hoard: list[NDArray[np.uint8]] = []
    soak = Soak("cpu", 5, [])
    for _ in range(4):
        soak.round()

    def on_round(_soak: Soak, _seconds: float) -> None:
        if is_leaking:
            hoard.extend(np.ones(4096, np.uint8) for _ in range(200))

    path = tmp_path / "soak.csv"
    soak_for(soak, 24, 1, path, on_round, clock=lambda: soak.rounds)
    limits = dict.fromkeys(("anonymous_kib", "heap_kib"), 512 * HOUR_S)
    trends = find_trends(read_samples(path), limits)
    assert [trend.is_flat for trend in trends] == [not is_leaking] * 2


@pytest.mark.skipif(not TRACES.is_dir(), reason="needs the published traces")
def test_the_published_traces_are_replayed() -> None:
    traces = load_traces(TRACES)
    assert len(traces) == len(FILES)
    soak = Soak("cpu", 1, traces)
    for _ in range(4):
        soak.round()
    soak.finish()
