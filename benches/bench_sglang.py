"""SGLang's pools and kvpool's behind the same calls, in one process on the CPU: medians in microseconds.

`make bench-sglang` runs it where SGLang is installed, with its plugin switched on.
"""

from __future__ import annotations

import statistics
import time
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ALLOCATOR = "sglang.srt.mem_cache.allocator"
CLASSES = {
    "TokenToKVPoolAllocator": f"{ALLOCATOR}.token",
    "PagedTokenToKVPoolAllocator": f"{ALLOCATOR}.paged",
    "MambaSlotAllocator": f"{ALLOCATOR}.mamba",
    "ReqToTokenPool": "sglang.srt.mem_cache.memory_pool",
}
SIZES = (1 << 16, 1 << 20)
ROUNDS = 9
CONTEXT = 32768

Case = tuple[str, "Callable[[], object]", int]


def classes() -> dict[str, Any]:
    """The classes that SGLang uses now."""
    return {name: getattr(import_module(module), name) for name, module in CLASSES.items()}


def median_us(call: Callable[[], object], repeats: int) -> float:
    """The median time of a call."""
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        times.append((time.perf_counter() - start) / repeats * 1e6)
    return statistics.median(times)


def decode_step(made: dict[str, Any], size: int, page_size: int) -> Callable[[], object]:
    """The scheduler's calls of its pools for one token of each of 256 requests."""
    requests = 256
    where = "cpu"
    if page_size == 1:
        slots = made["TokenToKVPoolAllocator"](size, torch.float16, where, None, False)
    else:
        slots = made["PagedTokenToKVPoolAllocator"](size, page_size, torch.float16, where, None, False)
    rows = made["ReqToTokenPool"](requests, CONTEXT, where, False)
    taken = torch.tensor(rows.alloc_rows(requests))
    # Requests end at every place of their last pages.
    lengths = 64 + torch.arange(requests) % 64
    for row, length in zip(taken.tolist(), lengths.tolist(), strict=True):
        prompt = slots.alloc(-(-length // page_size) * page_size)
        rows.write((row, slice(0, length)), prompt[:length].to(torch.int32))
    new = torch.nonzero(lengths % page_size == 0).flatten()
    batch = SimpleNamespace(
        device=where,
        reqs=[
            SimpleNamespace(kv=SimpleNamespace(kv_allocated_len=0, kv_committed_len=0))
            for _ in range(requests)
        ],
        seq_lens=lengths,
        seq_lens_cpu=lengths,
        req_pool_indices=taken,
        req_pool_indices_cpu=taken,
        req_to_token_pool=rows,
        tree_cache=SimpleNamespace(
            token_to_kv_pool_allocator=slots, page_size=page_size, supports_prefix_sharing=lambda: False
        ),
        model_config=SimpleNamespace(is_encoder_decoder=False),
        maybe_evict_swa=lambda: None,
    )
    step = import_module("sglang.srt.mem_cache.allocation").alloc_for_decode

    def run() -> None:
        given = step(batch, 1)
        slots.free(given[new])

    return run


def cases(made: dict[str, Any], size: int) -> Iterator[Case]:
    """Calls as the scheduler makes them."""
    slots = made["TokenToKVPoolAllocator"](size, torch.float16, "cpu", None, False)
    yield "alloc 64, free 64", lambda: slots.free(slots.alloc(64)), 60

    def group() -> None:
        taken = [slots.alloc(256) for _ in range(32)]
        slots.free_group_begin()
        for part in taken:
            slots.free(part)
        slots.free_group_end()

    yield "32 times alloc 256, 32 frees in a group", group, 5
    pages = made["PagedTokenToKVPoolAllocator"](size, 64, torch.float16, "cpu", None, False)
    yield "alloc 8192, free_segment", lambda: pages.free_segment(pages.alloc(8192), start_pos=0), 30
    zeros, ends, none = torch.zeros(32, dtype=torch.int64), torch.full((32,), 512), torch.full((32,), -1)

    def extend() -> None:
        taken = pages.alloc_extend(zeros, zeros, ends, ends, none, 32 * 512)
        pages.free_segment(taken, start_pos=0)

    yield "alloc_extend 32 x 512, free_segment", extend, 4
    yield "available_size", pages.available_size, 2000
    states = made["MambaSlotAllocator"](512, "cpu")
    yield "state slot: alloc 1, free 1", lambda: states.free(states.alloc(1)), 500

    def one_by_one() -> None:
        states.alloc_group_begin(32)
        taken = [states.alloc(1) for _ in range(32)]
        states.alloc_group_end()
        for slot in taken:
            states.free(slot)

    yield "32 state slots one by one", one_by_one, 20
    rows = made["ReqToTokenPool"](256, CONTEXT, "cpu", False)
    yield "rows: alloc 32, free 32", lambda: rows.free_rows(rows.alloc_rows(32)), 200
    values = torch.arange(CONTEXT, dtype=torch.int32)

    def written() -> None:
        taken = rows.alloc_rows(32)
        rows.write((taken[0], slice(0, CONTEXT)), values)
        rows.free_rows(taken)

    yield f"rows: alloc 32, write {CONTEXT}, free 32", written, 50
    for page_size in (1, 64):
        yield (
            f"decode step of 256 requests, page size {page_size}",
            decode_step(made, size, page_size),
            20,
        )


def main() -> None:
    """Prints a table for each size."""
    torch.set_num_threads(1)
    own = classes()
    import_module("sglang.srt.plugins").load_plugins()
    pooled = classes()
    assert all(own[name] is not pooled[name] for name in own), "set SGLANG_PLUGINS=kvpool"
    for size in SIZES:
        print(f"\n| {size} slots | SGLang us | kvpool us | ratio |\n|---|---|---|---|")
        theirs = [(name, median_us(call, repeats)) for name, call, repeats in cases(own, size)]
        ours = [median_us(call, repeats) for _, call, repeats in cases(pooled, size)]
        for (name, before), after in zip(theirs, ours, strict=True):
            print(f"| {name} | {before:.2f} | {after:.2f} | {before / after:.1f} |")


if __name__ == "__main__":
    main()
