"""`benches/gpu_results.py`: the figures of a board in RESULTS.md, which the chart leaves out."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from types import ModuleType

BENCHES = Path(__file__).resolve().parents[2] / "benches"
MACHINE = {"date": "2026-12-01", "processor": "a Xeon", "cores": 16, "gpu": "NVIDIA H100", "versions": "1"}
LINE = {
    "question": "set_kv, device",
    "ours_us": 1234.5,
    "gbs": 2000.4,
    "peer": "FlashInfer",
    "its_us": 2469.0,
}
BOARD: dict[str, Any] = {
    "machine": MACHINE,
    "ceilings": {"d2d": "2,995 GB/s"},
    "lines": [
        {**LINE, "ratio": 2.0, "target": "ratio >= 1.00", "met": True},
        {
            **LINE,
            "gbs": None,
            "peer": "limit",
            "its_us": 600.0,
            "ratio": 0.486,
            "target": "<= 600 us",
            "met": False,
        },
        {**LINE, "question": "alone", "peer": "", "its_us": None, "ratio": None, "target": "", "met": None},
    ],
    "missing": [{"question": "set_kv", "peer": "vLLM's scheme", "why": "no cupy"}],
    "failed": [],
}


@pytest.fixture
def benches(monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, ModuleType]:
    """The modules `gpu_results` and `chart`."""
    monkeypatch.syspath_prepend(BENCHES)
    import chart
    import gpu_results

    return gpu_results, chart


def test_a_table_of_the_same_card_is_replaced(benches: tuple[ModuleType, ModuleType]) -> None:
    gpu_results, _ = benches
    before = (BENCHES / "RESULTS.md").read_text()
    once = gpu_results.with_section(before, BOARD)
    assert once.startswith(before.rstrip("\n"))
    later = copy.deepcopy(BOARD)
    later["machine"]["date"] = "2026-12-02"
    other = copy.deepcopy(BOARD)
    other["machine"]["gpu"] = "NVIDIA H200"
    both = gpu_results.with_section(once, other)
    twice = gpu_results.with_section(both, later)
    assert twice == both.replace(
        "date: 2026-12-01; processor: a Xeon; cores: 16; gpu: NVIDIA H100;",
        "date: 2026-12-02; processor: a Xeon; cores: 16; gpu: NVIDIA H100;",
    )
    assert twice.count("## On one NVIDIA H100\n") == twice.count("## On one NVIDIA H200\n") == 1
    lines = once.splitlines()
    for line in (
        "| set_kv, device | 1,234.50 | 2,000 | FlashInfer | 2,469.00 | 2.00 | ratio >= 1.00 | yes |",
        "| set_kv, device | 1,234.50 |  | limit | 600.00 | 0.49 | <= 600 us | no |",
        "- alone: 1,234.50 us, beside nothing",
        "- set_kv: vLLM's scheme was missing",
        "Ceilings: d2d 2,995 GB/s.",
    ):
        assert line in lines


def test_the_results_have_the_figures_of_the_card_and_the_chart_has_not(
    benches: tuple[ModuleType, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu_results, chart = benches
    file, results = tmp_path / "board.json", tmp_path / "RESULTS.md"
    file.write_text(json.dumps(BOARD))
    results.write_text((BENCHES / "RESULTS.md").read_text())
    monkeypatch.setattr(sys, "argv", ["gpu_results.py", str(file), "--results", str(results)])
    assert gpu_results.main() == 0
    before = chart.sections()
    monkeypatch.setattr(chart, "RESULTS", results)
    found = chart.sections()
    assert found[:-1] == before
    assert found[-1].title == "On one NVIDIA H100"
    assert found[-1].machine == "2026-12-01, NVIDIA H100, a Xeon, 16 cores"
    figures = [(figure.alternative, figure.ratio, figure.target) for figure in found[-1].figures]
    assert figures == [("FlashInfer", 2.0, 1.0), ("limit", 0.49, 1.0)]
    assert "set_kv, device" not in "".join(chart.charts().values())


@pytest.mark.parametrize("change", [{"lines": []}, {"machine": {"date": "2026-12-01"}}])
def test_a_board_without_figures_of_a_gpu_is_refused(
    benches: tuple[ModuleType, ModuleType],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    change: dict[str, Any],
) -> None:
    gpu_results, _ = benches
    file, results = tmp_path / "board.json", tmp_path / "RESULTS.md"
    file.write_text(json.dumps({**BOARD, **change}))
    results.write_text("# Results\n")
    monkeypatch.setattr(sys, "argv", ["gpu_results.py", str(file), "--results", str(results)])
    assert gpu_results.main() == 1
    assert "the board has no figures of a GPU" in capsys.readouterr().err
    assert results.read_text() == "# Results\n"
