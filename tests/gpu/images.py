"""Whether the kernels write what the same calls write in host memory, bit for bit.

    python tests/gpu/images.py [--count 4194304]

Conversions between float types, with scales and without: every pattern of 16 bits, and random ones of 32.
Rows that are stored, gathered and moved, a request table that is written and read, and plans of every size of
parameters. It ends with 1 if anything differs. `KVPOOL_KERNELS` says which image of the kernels is asked:
machine code, or PTX that the driver compiles.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

import records
import torch
from backend import open_device

from kvpool import BatchPlanner, KVPool, ReqToTokenPool, TokenToKVPoolAllocator

if TYPE_CHECKING:
    from collections.abc import Iterator

SOURCES = (torch.float32, torch.float16, torch.bfloat16)
TARGETS = (torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float16)
SCALES = (1.0, 0.37, 3e-5, 448.0)
WIDTH = 128
PLAN_FIELDS = (
    "out_cache_loc",
    "positions",
    "slot_mapping",
    "req_pool_indices",
    "seq_lens",
    "qo_indptr",
    "kv_indptr",
    "kv_indices",
    "kv_last_page_len",
    "block_table",
)
Pair = tuple[str, torch.Tensor, torch.Tensor]


def patterns(dtype: torch.dtype, count: int) -> torch.Tensor:
    """Rows of numbers: all of 16 bits, or as many of 32."""
    if dtype.itemsize == 2:
        return torch.arange(1 << 16).to(torch.uint16).view(dtype).reshape(-1, 1, WIDTH)
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(-(1 << 31), 1 << 31, (count,), dtype=torch.int32, generator=generator)
    return words.view(dtype).reshape(-1, 1, WIDTH)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().contiguous().view(torch.uint8)


def numbers(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of numbers, where a NaN of 16 bits is like any other."""
    found = tensor.cpu()
    return bits(found if found.itemsize == 1 else found.where(~found.isnan(), torch.nan))


def conversions(count: int) -> Iterator[Pair]:
    """The rows of a pool on each device after the same store."""
    for source in SOURCES:
        values = patterns(source, count)
        on_device = values.cuda()
        for target in TARGETS:
            if source == target:
                continue
            for scale in SCALES:
                found = []
                for device, given in (("cpu", values), ("cuda", on_device)):
                    pool = KVPool(len(values), 1, 1, WIDTH, device, target)
                    slots = torch.arange(1, len(values) + 1)
                    slots = slots.cuda() if device == "cuda" else slots
                    scales = {"k_scale": scale, "v_scale": scale} if target.itemsize == 1 else {}
                    pool.set_kv_buffer(0, slots, given, given, **scales)
                    found.append(numbers(pool.k_buffer[0][1:]))
                yield f"{source} to {target}, scale {scale}", found[0], found[1]
                if target.itemsize > 1:
                    break


def rows() -> Iterator[Pair]:
    """Rows stored in a random order, gathered and moved, in pools of odd shapes."""
    generator = torch.Generator().manual_seed(1)
    for heads, width, dtype in ((1, 7, torch.float16), (3, 64, torch.float32), (8, 128, torch.bfloat16)):
        order = torch.randperm(1024, generator=generator)[:600] + 1
        values = torch.randn(600, heads, width, generator=generator).to(dtype)
        found: dict[str, list[torch.Tensor]] = {}
        for device in ("cpu", "cuda"):
            here = (lambda tensor: tensor) if device == "cpu" else torch.Tensor.cuda
            pool = KVPool(1024, 1, heads, width, device, dtype)
            pool.set_kv_buffer(0, here(order), here(values), here(-values))
            out = here(torch.zeros_like(values[:300])), here(torch.zeros_like(values[:300]))
            pool.gather_kv(0, here(order[100:400]), out)
            pool.move_kv(here(order[:200]), here(order[300:500]))
            pool.check()
            found[device] = [bits(each) for each in (*out, pool.k_buffer[0], pool.v_buffer[0])]
        names = ("gathered K", "gathered V", "moved K", "moved V")
        for name, cpu, cuda in zip(names, found["cpu"], found["cuda"], strict=True):
            yield f"{name}, {heads} x {width} {dtype}", cpu, cuda


def tables() -> Iterator[Pair]:
    """A request table that is written by rows, and the indices built from it."""
    found = []
    for device in ("cpu", "cuda"):
        here = (lambda tensor: tensor) if device == "cpu" else torch.Tensor.cuda
        table = ReqToTokenPool(16, 512, device)
        lengths = [0, 1, 31, 32, 33, 300, 512]
        taken = table.alloc(len(lengths)) or []
        for row, length in zip(taken, lengths, strict=True):
            table.write((row, slice(0, length)), here(torch.arange(length, dtype=torch.int32) + 7 * row))
        indptr = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
        out = here(torch.zeros(sum(lengths), dtype=torch.int32))
        table.build_kv_indices(here(torch.tensor(taken, dtype=torch.int32)), here(indptr), out)
        found.append((bits(table.req_to_token), bits(out)))
    yield "request table", found[0][0], found[1][0]
    yield "indices of a batch", found[0][1], found[1][1]


def plans() -> Iterator[Pair]:
    """Steps that fill the parameters of each kernel, or have a request or a page more."""
    for requests, tokens in (
        *((requests, 1) for requests in (1, 64, 99, 100, 303, 304, 815, 816)),
        *((1, tokens) for tokens in (981, 982, 3029, 3030, 8147, 8148)),
    ):
        found = []
        for device in ("cpu", "cuda"):
            table = ReqToTokenPool(requests, tokens + 1, device)
            allocator = TokenToKVPoolAllocator(requests * (tokens + 1), device)
            planner = BatchPlanner(table, allocator, requests, requests * tokens)
            rows = table.alloc(requests) or []
            for before, after in ((0, tokens), (tokens, tokens + 1)):
                plan = planner.extend(rows, [before] * requests, [after] * requests)
                fields = [getattr(plan, name) for name in PLAN_FIELDS]
                found.append(torch.cat([bits(field).flatten() for field in (*fields, table.req_to_token)]))
        for index, name in enumerate(("prompts", "decode")):
            yield f"plan, {name}, {requests} x {tokens}", found[index], found[2 + index]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=1 << 22, help="random patterns (default: %(default)s)")
    count = parser.parse_args().count // WIDTH * WIDTH
    open_device().use_pytorch()
    kernels = os.environ.get("KVPOOL_KERNELS") or "best"
    checks, wrong = 0, []
    for part in (conversions(count), rows(), tables(), plans()):
        for name, cpu, cuda in part:
            checks += 1
            differ = int((cpu != cuda).sum()) if cpu.shape == cuda.shape else -1
            if differ:
                wrong.append(f"{name}: {differ} of {cpu.numel()} bytes")
                print(f"DIFFERS {wrong[-1]}", flush=True)
    print(f"kernels: {kernels}; {checks} results compared with those in host memory, {len(wrong)} differ")
    records.add("images", kernels=kernels, checks=checks, wrong=wrong)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
