"""Cost of allocating and freeing token slots, beside the same allocator in PyTorch operations."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Protocol

import torch
from harness import Case, Report, repeated
from reference import FifoAllocator, PagedAllocator, SortedAllocator

import kvpool

if TYPE_CHECKING:
    from collections.abc import Callable

MILLION = 1 << 20
PAGE_SIZE = 16
MOST = 4096
"""Slots of a large request."""


class Allocator(Protocol):
    """The interface of both sides."""

    def alloc(self, need_size: int, /) -> torch.Tensor | None:
        """Takes slots."""

    def free(self, indices: torch.Tensor, /) -> None:
        """Frees slots."""

    def clear(self) -> None:
        """Frees everything."""


def ours(size: int, *, page_size: int = 1, need_sort: bool = True) -> kvpool.TokenToKVPoolAllocator:
    """An allocator on the CPU."""
    return kvpool.TokenToKVPoolAllocator(size, "cpu", page_size, need_sort)


def take(allocator: Allocator, n: int) -> torch.Tensor:
    """Allocates slots, which the pool must have."""
    slots = allocator.alloc(n)
    if slots is None:
        raise RuntimeError(f"the pool is short of {n} slots")
    return slots


def alloc_and_free(allocator: Allocator, n: int) -> Callable[[int], None]:
    """Allocates and frees `n` slots, the given number of times."""

    def run(number: int) -> None:
        alloc, free = allocator.alloc, allocator.free
        for _ in itertools.repeat(None, number):
            free(alloc(n))  # type: ignore[arg-type]

    return run


def round_trips(report: Report) -> None:
    """Alloc and free of the same slots, in a pool of a million: a fresh one, and one after many such steps.

    The PyTorch allocator copies all released slots at each free, so it is cheap only while they are few:
    a fresh pool is its best case.
    """

    def fresh(allocator: Allocator, n: int) -> Case:
        calls = max(64, min(1024, 32768 // n))
        return Case(alloc_and_free(allocator, n), allocator.clear, calls)

    def used(allocator: Allocator, n: int) -> Case:
        run = alloc_and_free(allocator, n)
        run(min(MILLION // n // 2, 4096))
        return Case(run)

    kinds: dict[str, tuple[Callable[[], Allocator], Callable[[], Allocator], float, float | None]] = {
        "sorted": (lambda: ours(MILLION), lambda: SortedAllocator(MILLION), 1.0, 4.0),
        "first in, first out": (
            lambda: ours(MILLION, need_sort=False),
            lambda: FifoAllocator(MILLION),
            1.0,
            4.0,
        ),
        f"page size {PAGE_SIZE}": (
            lambda: ours(MILLION, page_size=PAGE_SIZE),
            lambda: PagedAllocator(MILLION, PAGE_SIZE),
            1.3,
            None,
        ),
    }
    for name, case in (("fresh pool", fresh), ("used pool", used)):
        for kind, (make, make_plain, few_us, many_us) in kinds.items():
            for n in (1, 128, MOST):
                report.compare(
                    f"alloc + free, n = {n}, {kind}, {name}",
                    case(make(), n),
                    case(make_plain(), n),
                    limit_us=many_us if n == MOST else few_us,
                )


def pool_sizes(report: Report) -> None:
    """The same step on a small and on a large pool."""
    kinds = {"sorted": {"need_sort": True}, "first in, first out": {"need_sort": False}}
    for kind, options in kinds.items():
        for n in (1, 128):
            report.compare(
                f"alloc + free, n = {n}, {kind}, 4 M slots against 64 k",
                Case(alloc_and_free(ours(4 * MILLION, **options), n)),
                Case(alloc_and_free(ours(1 << 16, **options), n)),
                alternative="kvpool, 64 k",
                least_ratio=1 / 1.3,
            )


def merges(report: Report) -> None:
    """An alloc that first merges half of a million slots."""

    def prepared(allocator: Allocator, *, contiguous: bool) -> Case:
        def prepare() -> None:
            allocator.clear()
            slots = take(allocator, MILLION)
            allocator.free(slots[MILLION // 2 :] if contiguous else slots[::2])

        return Case(repeated(lambda: allocator.alloc(128)), prepare)

    for name, contiguous in (("every other slot", False), ("the upper half", True)):
        report.compare(
            f"alloc of 128 that merges half of 1 M: {name}",
            prepared(ours(MILLION), contiguous=contiguous),
            prepared(SortedAllocator(MILLION), contiguous=contiguous),
            limit_us=200.0,
        )


def busy_pools(report: Report) -> None:
    """Fragmented pools, as a serving engine has them after a while."""

    def nearly_full(allocator: Allocator, n: int) -> Case:
        slots = take(allocator, MILLION)
        allocator.free(slots[torch.randperm(MILLION, generator=torch.Generator().manual_seed(1))[:n]].clone())
        return Case(alloc_and_free(allocator, n))

    def fragmented(allocator: Allocator, n: int, every: int) -> Case:
        slots = take(allocator, MILLION)
        allocator.free(slots[::every].clone())
        return Case(alloc_and_free(allocator, n))

    for n in (128, MOST):
        report.compare(
            f"alloc + free, n = {n}, all that is free: each alloc merges",
            nearly_full(ours(MILLION), n),
            nearly_full(SortedAllocator(MILLION), n),
            least_ratio=2.0,
        )
    for n, every in ((1, 2), (128, 2), (MOST, 2), (128, 64)):
        report.compare(
            f"alloc + free, n = {n}, every {'other' if every == 2 else f'{every}th'} slot is free",
            fragmented(ours(MILLION), n, every),
            fragmented(SortedAllocator(MILLION), n, every),
            limit_us=4.0 * n / 1000 if n == MOST else None,
        )
    report.compare(
        f"alloc + free, n = {MOST}, every other slot is free, first in, first out",
        fragmented(ours(MILLION, need_sort=False), MOST, 2),
        fragmented(FifoAllocator(MILLION), MOST, 2),
    )


def churn(report: Report) -> None:
    """A steady state: requests of mixed lengths start and finish in a nearly full pool."""

    def serving(allocator: Allocator) -> Case:
        lengths = torch.randint(1, 4096, (997,), generator=torch.Generator().manual_seed(2)).tolist()
        running: list[torch.Tensor] = []
        turn = 0

        def step() -> None:
            nonlocal turn
            turn = (turn + 1) % len(lengths)
            slots = allocator.alloc(lengths[turn])
            while slots is None:
                allocator.free(running.pop(0))
                slots = allocator.alloc(lengths[turn])
            running.append(slots)

        for _ in range(1500):
            step()
        return Case(repeated(step))

    report.compare(
        "one request in, others out until it fits, 256 k slots, sorted",
        serving(ours(1 << 18)),
        serving(SortedAllocator(1 << 18)),
    )
    report.compare(
        "the same, first in, first out",
        serving(ours(1 << 18, need_sort=False)),
        serving(FifoAllocator(1 << 18)),
    )
    report.compare(
        f"the same, page size {PAGE_SIZE}",
        serving(ours(1 << 18, page_size=PAGE_SIZE)),
        serving(PagedAllocator(1 << 18, PAGE_SIZE)),
    )


def debugging(report: Report) -> None:
    """Cost of the debug ledger."""

    def case(n: int, *, debug: bool) -> Case:
        return Case(alloc_and_free(kvpool.TokenToKVPoolAllocator(MILLION, "cpu", debug=debug), n))

    for n in (1, 128, 4096):
        report.compare(
            f"alloc + free, n = {n}, sorted",
            case(n, debug=False),
            case(n, debug=True),
            alternative="kvpool, debug=True",
        )


def main() -> None:
    """Runs and reports every question."""
    torch.set_num_threads(1)
    report = Report("Token slots, CPU, pool of 1 M")
    for part in (round_trips, pool_sizes, merges, busy_pools, churn, debugging):
        part(report)
    report.finish()


if __name__ == "__main__":
    main()
