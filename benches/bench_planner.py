"""Cost of planning a scheduler step, beside the calls that pymllm makes for each request.

On a GPU, or with `--device cuda`, both sides only enqueue their work: what is timed is the host.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
import torch
from harness import Case, Report
from reference import PerRequestSteps

import kvpool

if TYPE_CHECKING:
    from collections.abc import Callable

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SLOTS = 2 << 20
COLUMNS = 8192
STEPS = 64
BATCHES = 8
FIELDS = (
    *("out_cache_loc", "positions", "req_pool_indices", "seq_lens", "qo_indptr", "kv_indptr"),
    *("kv_indices", "kv_last_page_len"),
)


class Steps:
    """Requests of a planner, reset before each round."""

    def __init__(self, batch: int, *, page_size: int = 1, kv_indices: bool = True) -> None:
        self.table = kvpool.ReqToTokenPool(batch, COLUMNS, DEVICE)
        self.allocator = kvpool.TokenToKVPoolAllocator(SLOTS, DEVICE, page_size)
        self.planner = kvpool.BatchPlanner(
            self.table, self.allocator, batch, 1 << 20, kv_indices=kv_indices, block_table=False
        )
        self.fields = FIELDS if kv_indices else tuple(name for name in FIELDS if name != "kv_indices")
        self.rows = np.array(self.table.alloc(batch), dtype=np.int32)

    def begin(self, context: int) -> None:
        """Gives each request a context."""
        none = np.zeros_like(self.rows)
        self.planner.extend(self.rows, none, none + context)
        self.lens = none + context

    def decode(self, number: int) -> None:
        """Plans steps of one token per request, and reads every field that the alternative makes."""
        planner, rows, lens, fields = self.planner, self.rows, self.lens, self.fields
        for _ in itertools.repeat(None, number):
            lens = lens + 1
            plan = planner.decode(rows, lens)
            for name in fields:
                getattr(plan, name)

    def back(self) -> None:
        """Drops the tokens of a round."""
        self.planner.truncate(self.rows, self.lens)


def decode_ours(batch: int, context: int, *, page_size: int = 1, kv_indices: bool = True) -> Case:
    """Decode steps of a planner."""
    steps = Steps(batch, page_size=page_size, kv_indices=kv_indices)
    steps.begin(context)
    return Case(steps.decode, steps.back, STEPS)


Kind: TypeAlias = Literal["full", "window", "state"]
LAYOUTS: dict[str, tuple[tuple[Kind, int | None], ...]] = {
    "a full group": (("full", None),),
    "a full and a window group": (("full", None), ("window", 1024)),
    "two full groups": (("full", None), ("full", None)),
    "a full group and states": (("full", None), ("state", None)),
}


def decode_layout(
    kinds: tuple[tuple[Kind, int | None], ...], batch: int, context: int, page_size: int
) -> Case:
    """Decode steps over a layout: for each group, what the planner of pages of one kind writes."""
    planes = [kvpool.Plane(name, "bfloat16", (2, 16)) for name in ("k", "v")]
    groups = [
        kvpool.Group(f"group_{number}", kind, [number], planes, tokens=tokens)
        for number, (kind, tokens) in enumerate(kinds)
    ]
    layout = kvpool.CacheLayout(groups, page_size=page_size)
    arena = kvpool.CacheArena(layout, 300 << 20, DEVICE)
    planner = kvpool.ArenaPlanner(arena, batch, COLUMNS, batch, 1 << 20, block_table=False)
    rows = np.array(planner.alloc(batch), dtype=np.int32)
    none = np.zeros_like(rows)

    def run(number: int) -> None:
        lens = none + context
        for _ in itertools.repeat(None, number):
            lens = lens + 1
            planner.decode(rows, lens)

    def prepare() -> None:
        planner.truncate(rows, none)
        planner.extend(rows, none, none + context)

    return Case(run, prepare, STEPS)


def decode_one_kind(batch: int, context: int, page_size: int) -> Case:
    """Decode steps of pages of one kind, without a look at the fields."""
    steps = Steps(batch, page_size=page_size)
    steps.fields = ()
    steps.begin(context)
    return Case(steps.decode, steps.back, STEPS)


def compare_layouts(report: Report) -> None:
    """Decode steps over layouts beside those of pages of one kind: the ratio is the price of the groups."""
    for name, kinds in LAYOUTS.items():
        for page_size in (16, 64):
            report.compare(
                f"decode of 256 requests over {name}, context 2048, page size {page_size}",
                decode_layout(kinds, 256, 2048, page_size),
                decode_one_kind(256, 2048, page_size),
                alternative="BatchPlanner",
                least_ratio={"a full group": 0.97, "a full and a window group": 1 / 1.6}.get(name),
            )


def decode_theirs(batch: int, context: int) -> Case:
    """Decode steps request by request."""
    steps = PerRequestSteps(batch + 1, COLUMNS, SLOTS, DEVICE)
    rows = list(range(1, batch + 1))

    def run(number: int) -> None:
        lens = [context] * batch
        for _ in itertools.repeat(None, number):
            lens = [n + 1 for n in lens]
            steps.decode(rows, lens)

    def prepare() -> None:
        steps.allocator.clear()
        steps.extend(rows, [0] * batch, [context] * batch)

    return Case(run, prepare, STEPS)


def extend_ours(batch: int, tokens: int) -> Case:
    """Prefill of new requests, batch after batch."""
    steps = Steps(batch * BATCHES)
    none = np.zeros(batch, dtype=np.int32)
    lens = none + tokens
    groups = steps.rows.reshape(BATCHES, batch)

    def run(number: int) -> None:
        for rows in groups[:number]:
            plan = steps.planner.extend(rows, none, lens)
            for name in FIELDS:
                getattr(plan, name)

    return Case(run, lambda: steps.planner.truncate(steps.rows, np.zeros_like(steps.rows)), BATCHES)


def extend_theirs(batch: int, tokens: int) -> Case:
    """The same request by request."""
    steps = PerRequestSteps(batch * BATCHES + 1, COLUMNS, SLOTS, DEVICE)
    groups = [list(range(1 + batch * i, 1 + batch * (i + 1))) for i in range(BATCHES)]

    def run(number: int) -> None:
        for rows in groups[:number]:
            steps.extend(rows, [0] * batch, [tokens] * batch)

    return Case(run, steps.allocator.clear, BATCHES)


def compare_decode(report: Report, limit_us: float) -> None:
    """Decode steps of 256 requests at several contexts: only `kv_indices` may grow with them."""
    for context in (64, 512, 4096):
        question = f"decode of 256 requests, context {context}"
        report.compare(
            question,
            decode_ours(256, context),
            decode_theirs(256, context),
            alternative="per-request PyTorch",
            limit_us=limit_us if context == 64 else None,
        )
    contexts: list[Callable[[], Case]] = [
        lambda: decode_ours(256, 4096, kv_indices=False),
        lambda: decode_ours(256, 64, kv_indices=False),
    ]
    report.compare(
        "decode of 256 requests without kv_indices, context 64 beside 4096",
        contexts[1](),
        contexts[0](),
        alternative="kvpool, context 4096",
    )
    report.compare(
        "decode of 256 requests, context 4096, page size 16",
        decode_ours(256, 4096, page_size=16),
        decode_theirs(256, 4096),
        alternative="per-request PyTorch, page size 1",
    )


def main() -> None:
    """Runs all questions."""
    report = Report(f"A scheduler step in one call ({DEVICE})")
    report.compare(
        "extend of 32 requests by 512 tokens",
        extend_ours(32, 512),
        extend_theirs(32, 512),
        alternative="per-request PyTorch",
        limit_us=60,
    )
    compare_layouts(report)
    compare_decode(report, 25 if DEVICE == "cpu" else 40)
    report.compare(
        "decode of 256 requests, context 64: ratio",
        decode_ours(256, 64),
        decode_theirs(256, 64),
        alternative="per-request PyTorch",
        least_ratio=30,
    )
    report.finish()


if __name__ == "__main__":
    main()
