"""Cost of moving rows on one thread, beside a copy of the same bytes and beside PyTorch's indexing."""

from __future__ import annotations

import itertools
from functools import partial
from typing import TYPE_CHECKING

import torch
from harness import Case, Report, repeated
from reference import KVBuffers, States

import kvpool

if TYPE_CHECKING:
    from collections.abc import Callable

TOKENS = 4096
HEAD_NUM = 8
HEAD_DIM = 128
SIZE = 1 << 16
BATCHES = 8


def in_turn(batches: list[Callable[[], object]]) -> Case:
    """Consecutive calls with different data, so that none finds its data in the cache of the one before.

    A round goes twice through all of them, so that write-backs of data that one case leaves in the caches are
    not charged to the next.
    """
    order = itertools.cycle(batches)

    def step() -> None:
        next(order)()

    return Case(repeated(step), calls=2 * len(batches))


def token_rows(report: Report) -> None:
    """Writes and reads of a prefill chunk at random slots."""
    dtype = torch.bfloat16
    generator = torch.Generator().manual_seed(1)
    pool = kvpool.KVPool(SIZE, 1, HEAD_NUM, HEAD_DIM, "cpu", dtype)
    plain = KVBuffers(SIZE + 8, HEAD_NUM, HEAD_DIM, dtype)
    slots = [(torch.randperm(SIZE, generator=generator)[:TOKENS] + 1).to(torch.int32) for _ in range(BATCHES)]
    runs = [torch.arange(1 + i * TOKENS, 1 + (i + 1) * TOKENS, dtype=torch.int32) for i in range(BATCHES)]
    plain_slots = [indices.long() for indices in slots]
    shape = (TOKENS, HEAD_NUM, HEAD_DIM)
    values = [(torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)) for _ in range(BATCHES)]
    wide = [(k.float(), v.float()) for k, v in values]
    fused = [torch.randn(TOKENS, 3 * HEAD_NUM * HEAD_DIM).to(dtype) for _ in range(BATCHES)]
    parts = [qkv.view(TOKENS, 3, HEAD_NUM, HEAD_DIM).unbind(1)[1:] for qkv in fused]
    targets = [(torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=dtype)) for _ in range(BATCHES)]
    outs = [(torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=dtype)) for _ in range(BATCHES)]
    both = list(range(BATCHES))

    def copy(i: int) -> None:
        targets[i][0].copy_(values[i][0])
        targets[i][1].copy_(values[i][1])

    def clone(i: int) -> tuple[torch.Tensor, torch.Tensor]:
        return values[i][0].clone(), values[i][1].clone()

    copies = in_turn([partial(copy, i) for i in both])

    def write(source: list[tuple[torch.Tensor, ...]]) -> tuple[Case, Case]:
        return (
            in_turn([partial(pool.set_kv_buffer, 0, slots[i], *source[i]) for i in both]),
            in_turn([partial(plain.set_kv_buffer, plain_slots[i], *source[i]) for i in both]),
        )

    ours, theirs = write([*values])
    name = f"{TOKENS} tokens x {HEAD_NUM} x {HEAD_DIM} bfloat16"
    report.compare(
        f"set_kv_buffer, {name}, random slots", ours, copies, alternative="copy_ (memcpy)", least_ratio=0.8
    )
    report.compare(f"set_kv_buffer, {name}, random slots", ours, theirs, alternative="indexing")
    report.compare(
        f"set_kv_buffer, {name}, slots in a row",
        in_turn([partial(pool.set_kv_buffer, 0, runs[i], *values[i]) for i in both]),
        copies,
        alternative="copy_ (memcpy)",
        least_ratio=0.8,
    )
    ours, theirs = write([*parts])
    report.compare("set_kv_buffer from slices of a fused QKV tensor", ours, theirs, alternative="indexing")
    ours, theirs = write([*wide])
    report.compare("set_kv_buffer from float32", ours, theirs, alternative="indexing")

    for kind, places in (("random slots", slots), ("slots in a row", runs)):
        report.compare(
            f"gather_kv with out, {name}, {kind}",
            in_turn([partial(pool.gather_kv, 0, places[i], out=outs[i]) for i in both]),
            copies,
            alternative="copy_ (memcpy)",
            least_ratio=0.8,
        )
    reads = in_turn([partial(pool.gather_kv, 0, slots[i]) for i in both])
    question = f"gather_kv into new tensors, {name}, random slots"
    report.compare(question, reads, copies, alternative="copy_ (memcpy)", least_ratio=0.8)
    clones = in_turn([partial(clone, i) for i in both])
    report.compare(question, reads, clones, alternative="clone, target in the cache")
    report.compare(
        f"gather_kv into new tensors, {name}, random slots",
        reads,
        in_turn([partial(plain.gather_kv, plain_slots[i]) for i in both]),
        alternative="indexing",
    )
    report.compare(
        f"move_kv, {TOKENS} rows",
        in_turn([partial(pool.move_kv, slots[i], slots[(i + 1) % BATCHES]) for i in both]),
        in_turn([partial(plain.move_kv, plain_slots[i], plain_slots[(i + 1) % BATCHES]) for i in both]),
        alternative="indexing",
    )


def decode_rows(report: Report) -> None:
    """One token of each running request."""
    dtype, batch = torch.bfloat16, 256
    pool = kvpool.KVPool(SIZE, 1, HEAD_NUM, HEAD_DIM, "cpu", dtype)
    plain = KVBuffers(SIZE + 8, HEAD_NUM, HEAD_DIM, dtype)
    slots = (torch.randperm(SIZE, generator=torch.Generator().manual_seed(4))[:batch] + 1).to(torch.int32)
    k = torch.randn(batch, HEAD_NUM, HEAD_DIM).to(dtype)
    report.compare(
        f"set_kv_buffer, decode step of {batch} requests",
        Case(repeated(lambda: pool.set_kv_buffer(0, slots, k, k))),
        Case(repeated(lambda: plain.set_kv_buffer(slots, k, k))),
        alternative="indexing",
    )
    length = 8192
    table = kvpool.ReqToTokenPool(batch, length, "cpu")
    plain_table = torch.zeros(batch + 1, length, dtype=torch.int32)
    rows = torch.tensor(table.alloc(batch))
    columns = torch.randint(0, length, (batch,), generator=torch.Generator().manual_seed(5))

    def write() -> None:
        plain_table[rows, columns] = slots

    report.compare(
        f"table write, decode step of {batch} requests",
        Case(repeated(lambda: table.write((rows, columns), slots))),
        Case(repeated(write)),
        alternative="indexing",
    )
    prompt = torch.arange(1, 4097, dtype=torch.int32)

    def write_prompt() -> None:
        plain_table[3, 0:4096] = prompt

    report.compare(
        "table write, prompt of 4096 tokens",
        Case(repeated(lambda: table.write((3, slice(0, 4096)), prompt))),
        Case(repeated(write_prompt)),
        alternative="indexing",
    )


def linear_attention_states(report: Report) -> None:
    """States of a batch of requests, all layers."""
    layers, heads, k_dim, v_dim, conv_dim, kernel, requests = 4, 16, 128, 128, 4096, 4, 24
    pool = kvpool.GDNPool(
        requests, layers, heads, k_dim, v_dim, conv_dim, kernel, "cpu", torch.bfloat16, requests
    )
    plain = States(tuple(pool.recurrent_state.shape), tuple(pool.conv_state.shape), torch.bfloat16)
    for n in (1, 8):
        working = torch.arange(1, n + 1)
        tracks = torch.arange(requests + 1, requests + 1 + n)
        report.compare(
            f"reset_states of {n}, {layers} layers",
            Case(repeated(partial(pool.reset_states, working))),
            Case(repeated(partial(plain.reset_states, working))),
            alternative="indexing",
        )
        report.compare(
            f"copy_states of {n}, {layers} layers",
            Case(repeated(partial(pool.copy_states, working, tracks))),
            Case(repeated(partial(plain.copy_states, working, tracks))),
            alternative="indexing",
        )


def main() -> None:
    """Runs and reports every question."""
    torch.set_num_threads(1)
    kvpool.set_num_threads(1)
    report = Report("Rows and states, CPU, one thread")
    for part in (token_rows, decode_rows, linear_attention_states):
        part(report)
    report.finish()


if __name__ == "__main__":
    main()
