"""The prefix cache beside a plain one in Python: a radix tree whose leaves go in the order of their use."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from harness import Case, Report
from prefix_cases import CHUNK, evict, insert, lookup, publish, tokens_of
from prefix_sides import Kvpool, Plain

import kvpool

if TYPE_CHECKING:
    from collections.abc import Callable

LONG = 131_072
MILLION = 1 << 20
PLAIN = "radix tree in Python"


def beside_plain(
    report: Report,
    question: str,
    case: Callable[..., Case],
    sizes: tuple[int, int],
    *about: int,
    limit_us: float | None = None,
) -> None:
    """Asks both sides the same; `sizes` are capacity and page size."""
    if report.wants(question):
        ours, plain = case(Kvpool(*sizes), *about), case(Plain(*sizes), *about)
        report.compare(question, ours, plain, alternative=PLAIN, limit_us=limit_us)


def lookups(report: Report) -> None:
    """Look-ups of prompts that are cached whole."""
    for page_size, counts in [(16, [64 * 16, 512 * 16, 4096 * 16, LONG, MILLION]), (1, [64, LONG, MILLION])]:
        for count in counts:
            question = f"match + release of {count:,} tokens, page size {page_size}"
            limit = {LONG: 40, MILLION: 350}.get(count)
            beside_plain(report, question, lookup, (2 * count, page_size), count, limit_us=limit)
    question = f"match + release of {LONG:,} tokens, page size 16, a list"
    if report.wants(question):
        of_list, of_tensor = Kvpool(2 * LONG, 16), Kvpool(2 * LONG, 16)
        of_list.prompt = lambda tokens: tokens.tolist()  # type: ignore[method-assign]
        cases = lookup(of_list, LONG), lookup(of_tensor, LONG)
        report.compare(question, *cases, alternative="kvpool, a tensor")


def publications(report: Report) -> None:
    """Chunks of a prefill, and whole prompts."""
    for page_size in (1, 16):
        for prefix in (0, LONG):
            question = f"publish of 64 tokens behind {prefix:,}, page size {page_size}"
            sizes = (2 * LONG, page_size)
            beside_plain(report, question, publish, sizes, prefix, limit_us=2)
        question = f"insert of {LONG:,} new tokens, page size {page_size}"
        beside_plain(report, question, insert, (2 * LONG, page_size), LONG)


def evictions(report: Report) -> None:
    """Evictions: their cost depends neither on the number of leaves nor on their order."""
    for size in (1, 16, 64):
        for leaves in (1_000, 50_000):
            question = f"evict of 64 of {leaves:,} leaves, {size} tokens each"
            sizes = (leaves * size + LONG, min(size, 16))
            beside_plain(report, question, evict, sizes, leaves, size, limit_us=15)
    for size in (1, 16):
        question = f"evict of 64 of 1 M leaves, {size} tokens each"
        if not report.wants(question):
            continue
        few, many = (Kvpool(leaves * size + LONG, size) for leaves in (1_000, MILLION))
        cases = evict(many, MILLION, size), evict(few, 1_000, size)
        report.compare(question, *cases, alternative="kvpool, 1,000 leaves", limit_us=15)


class Admission:
    """Requests with a cached prompt, which enter a batch one by one."""

    def __init__(self, page_size: int) -> None:
        """Caches the prompt, and reserves a row."""
        self.side = Kvpool(2 * LONG, page_size)
        table = kvpool.ReqToTokenPool(1, LONG + CHUNK, "cpu")
        self.planner = kvpool.BatchPlanner(
            table, self.side.allocator, 1, LONG, kv_indices=False, block_table=False
        )
        self.row = np.array(table.alloc(1), dtype=np.int32)
        self.table = table.req_to_token
        self.prompt = torch.from_numpy(tokens_of(LONG))
        self.side.insert(self.prompt)
        self.cached = np.array([LONG], dtype=np.int32)
        self.zero = np.zeros(1, dtype=np.int32)

    def ours(self) -> Case:
        """Match, new slots and the row of the table in two calls."""

        def run(_: int) -> None:
            lease = self.side.cache.match(self.prompt)
            self.planner.extend(self.row, self.cached, self.cached + CHUNK, prefixes=[lease])

        return Case(run, lambda: self.planner.truncate(self.row, self.zero))

    def theirs(self, plain: Plain) -> Case:
        """The same with the plain tree, whose slots are joined and written to the row."""
        tokens = tokens_of(LONG)
        plain.insert(tokens)
        row = self.table[int(self.row[0])]

        def run(_: int) -> None:
            slots = plain.held(tokens)
            row[:LONG] = torch.from_numpy(slots)
            new = plain.take(CHUNK)
            row[LONG : LONG + CHUNK] = torch.from_numpy(new)
            plain.give(new)

        return Case(run, calls=1)


def admissions(report: Report) -> None:
    """A request whose prompt is cached, with its table row."""
    for page_size in (1, 16):
        question = f"admission with {LONG:,} cached tokens, page size {page_size}"
        if report.wants(question):
            cases = Admission(page_size).ours(), Admission(page_size).theirs(Plain(2 * LONG, page_size))
            report.compare(question, *cases, alternative=PLAIN, limit_us=100)


def bookkeeping(report: Report) -> None:
    """Notes the bytes a cached token and a node."""
    for page_size, most in ((1, 16), (16, 6)):
        if not report.wants("bytes"):
            return
        side = Kvpool(2 * MILLION, page_size)
        empty = side.cache.stats()["bytes"]
        side.insert(side.prompt(tokens_of(MILLION)))
        whole = side.cache.stats()["bytes"] - empty
        report.note(f"bytes a cached token, page size {page_size}: {whole / MILLION:.1f} (target <= {most})")
    side = Kvpool(MILLION, 1)
    empty = side.cache.stats()["bytes"]
    leaves = 50_000
    for token in range(leaves):
        side.insert(torch.tensor([token], dtype=torch.int32))
    stats = side.cache.stats()
    report.note(f"bytes a node of one token: {(stats['bytes'] - empty) / leaves:.0f} (target <= 200 + 16)")


def main() -> None:
    """Runs all questions."""
    report = Report("Prefix cache, CPU")
    torch.set_num_threads(1)
    lookups(report)
    publications(report)
    evictions(report)
    admissions(report)
    bookkeeping(report)
    report.finish()


if __name__ == "__main__":
    main()
