"""The prefix cache beside those of SGLang, vLLM and KVBM, in one process (KVBM: a process of its own).

`make bench-peers` installs them without what they depend on. What cannot be imported is skipped, with the
reason.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from harness import Case, Report
from prefix_cases import evict, insert, lookup, publish
from prefix_sides import Kvpool, Side

if TYPE_CHECKING:
    from collections.abc import Callable

LONG = 131_072
MILLION = 1 << 20
PEERS = (
    ("SGLang, compiled core", "sglang_side", "SGLang"),
    ("SGLang, Python core", "sglang_side", "SGLangPython"),
    ("vLLM", "vllm_side", "VLLM"),
)
KVBM = Path(os.environ.get("KVPOOL_KVBM_BENCH", "target/peers-kvbm/release/kvbm-bench"))


def peers(report: Report) -> dict[str, type[Side]]:
    """The sides that can be imported."""
    found: dict[str, type[Side]] = {}
    for name, module, side in PEERS:
        try:
            imported: Any = importlib.import_module(f"peers.{module}")
            getattr(imported, side)(1024, 16)
        except Exception as failure:  # noqa: BLE001, PERF203 - a peer may fail to start in any way
            report.note(f"{name} was skipped: {type(failure).__name__}: {str(failure).splitlines()[0]}")
        else:
            found[f"{name} {imported.VERSION}"] = getattr(imported, side)
    return found


def beside(
    report: Report,
    sides: dict[str, type[Side]],
    question: str,
    case: Callable[..., Case],
    sizes: tuple[int, int],
    *about: int,
) -> None:
    """Asks kvpool and each peer the same; `sizes` are capacity and page size."""
    if report.wants(question):
        for name, side in sides.items():
            report.compare(
                question, case(Kvpool(*sizes), *about), case(side(*sizes), *about), alternative=name
            )


def beside_kvbm(report: Report) -> None:
    """Asks KVBM, whose figures are those of Rust alone."""
    try:
        answers = subprocess.run([KVBM], check=True, capture_output=True, text=True).stdout  # noqa: S603
    except (OSError, subprocess.SubprocessError) as failure:
        report.note(f"KVBM was skipped: {failure}")
        return
    for question, theirs_us in json.loads(answers).items():
        count = int(question.split()[-2].replace(",", ""))
        case = (
            publish(Kvpool(2 * LONG, 16), 0)
            if "publish" in question
            else lookup(Kvpool(2 * count, 16), count)
        )
        report.compare_with(
            f"{question}, page size 16", case, theirs_us, alternative="KVBM 1.6.1, Rust alone"
        )


def main() -> None:
    """Runs all questions."""
    report = Report("Prefix cache beside its peers, CPU")
    torch.set_num_threads(1)
    sides = peers(report)
    for pages in (64, 512, 4096):
        question = f"match + release of {16 * pages:,} tokens, page size 16"
        beside(report, sides, question, lookup, (32 * pages, 16), 16 * pages)
    for page_size, count in ((16, LONG), (1, LONG), (1, MILLION)):
        question = f"match + release of {count:,} tokens, page size {page_size}"
        able = {name: side for name, side in sides.items() if page_size > 1 or "vLLM" not in name}
        beside(report, able, question, lookup, (2 * count, page_size), count)
    for page_size, prefix in ((16, 0), (16, LONG), (1, LONG)):
        question = f"publish of 64 tokens behind {prefix:,}, page size {page_size}"
        able = {name: side for name, side in sides.items() if page_size > 1 or "vLLM" not in name}
        beside(report, able, question, publish, (2 * LONG, page_size), prefix)
    beside(report, sides, f"insert of {LONG:,} new tokens, page size 16", insert, (2 * LONG, 16), LONG)
    trees = {name: side for name, side in sides.items() if "SGLang" in name}
    for leaves, size in ((1_000, 1), (50_000, 1), (1_000, 16), (50_000, 16)):
        question = f"evict of 64 of {leaves:,} leaves, {size} tokens each"
        beside(report, trees, question, evict, (leaves * size + LONG, size), leaves, size)
    beside_kvbm(report)
    report.finish()


if __name__ == "__main__":
    main()
