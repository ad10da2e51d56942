"""The planner's metadata beside code of FlashInfer, FlashAttention, vLLM and SGLang that makes or reads it.

That code is of the packages that the tests install, and runs on the CPU.
"""

from __future__ import annotations

import os
import random
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import sglang_on_cpu
import torch
import vllm_runs
from common import some
from library_code import functions_of, interpreted, module_of

from kvpool import BatchPlan, BatchPlanner, KVPool, ReqToTokenPool, TokenToKVPoolAllocator
from kvpool.attention import PoolAttention

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.engines

FLASHINFER = Path(os.environ.get("KVPOOL_FLASHINFER_PATH") or Path(sys.prefix) / "flashinfer")
"""The folder in which `make` installs FlashInfer, without its dependencies."""

SGLANG_KERNELS = sglang_on_cpu.ENGINES / "sglang" / "kernels" / "ops"
VLLM = vllm_runs.VLLM / "vllm" / "v1"

PAGE_SIZES = [1, 16]
MAX_CONTEXT_LEN = 200


@pytest.fixture(autouse=True)
def _in_the_interpreter() -> Iterator[None]:
    if find_spec("triton") is None:
        pytest.skip("Triton, whose interpreter runs the kernels, has no package for this machine")
    with interpreted():
        yield


def require_flashinfer() -> None:
    """Skips the test where FlashInfer was not installed. In `make test-engines` that is an error."""
    if not (FLASHINFER / "flashinfer").is_dir():
        missing = f"FlashInfer is not in {FLASHINFER}: `make test-engines` installs it"
        if os.environ.get("KVPOOL_REQUIRE_ENGINES") or (FLASHINFER / ".installed").exists():
            pytest.fail(missing)
        pytest.skip(missing)


@dataclass
class Step:
    """A plan, the table it was made on, and the tokens that its requests had before."""

    plan: BatchPlan
    table: ReqToTokenPool
    before: list[int]
    page_size: int


def steps(page_size: int) -> Iterator[Step]:
    """Steps of requests that begin, share prefixes, get chunks of any length or none, are cut, and end."""
    chance = random.Random(page_size)  # noqa: S311 - no secrets
    table = ReqToTokenPool(12, MAX_CONTEXT_LEN, "cpu")
    allocator = TokenToKVPoolAllocator(60 * max(page_size, 8), "cpu", page_size)
    planner = BatchPlanner(table, allocator, 16, 1024)
    rows: list[int] = []

    def lens() -> list[int]:
        return [planner.seq_len(row) for row in rows]

    def extended(new: list[int], prefixes: Any = None) -> Step:  # noqa: ANN401
        before = lens()
        if prefixes is not None:
            before = [
                len(prefix) if prefix is not None else n for prefix, n in zip(prefixes, before, strict=True)
            ]
        after = [a + b for a, b in zip(before, new, strict=True)]
        return Step(some(planner.extend(rows, before, after, prefixes)), table, before, page_size)

    for _ in range(3):
        rows += some(table.alloc(3))
        yield extended([chance.choice([0, 1, chance.randint(2, 40)]) for _ in rows])
        yield extended([chance.randint(1, 3) for _ in rows])
        longest = max(rows, key=planner.seq_len)
        whole = planner.seq_len(longest) // page_size * page_size
        rows += some(table.alloc(1))
        yield extended([1] * len(rows), [None] * (len(rows) - 1) + [table.read(longest, whole)])
        chance.shuffle(rows)
        before = lens()
        plan = planner.decode(rows, [n + 2 for n in before], 2, pad_to=[16])
        yield Step(some(plan), table, before, page_size)
        short = [row for row in rows if planner.seq_len(row) % page_size != 1 or page_size == 1]
        planner.truncate(short, [planner.seq_len(row) - 1 for row in short])
        gone = rows[::2]
        planner.finish(gone)
        rows = [row for row in rows if row not in gone]
    yield extended([1] * len(rows))


def assert_same(found: object, wanted: object) -> None:
    assert torch.as_tensor(found).tolist() == torch.as_tensor(wanted).tolist()


# FlashInfer


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_flashinfer_finds_lengths_and_positions(page_size: int) -> None:
    require_flashinfer()
    (get_seq_lens,) = functions_of(FLASHINFER / "flashinfer" / "page.py", "get_seq_lens", torch=torch)
    kernel = module_of(FLASHINFER / "flashinfer" / "triton" / "page.py").get_batch_indices_positions_kernel
    for step in steps(page_size):
        plan = step.plan
        assert_same(get_seq_lens(plan.kv_indptr, plan.kv_last_page_len, page_size), plan.seq_lens)
        requests, positions = (torch.full_like(plan.positions, -9) for _ in range(2))
        kernel[plan.padded_batch_size,](plan.qo_indptr, plan.seq_lens, requests, positions, num_stages=2)
        assert_same(positions, plan.positions)
        assert_same(requests, np.repeat(np.arange(plan.padded_batch_size), np.diff(plan.host.qo_indptr)))


# vLLM


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_vllm_makes_flashinfer_s_metadata_of_its_block_table(page_size: int) -> None:
    """vLLM's builder for FlashInfer, from the lengths and the block table of a plan."""
    vllm_runs.require()
    import triton
    from triton import language

    (buffer,) = functions_of(VLLM / "utils.py", "CpuGpuBuffer", torch=torch, PIN_MEMORY=False, np=np)
    path = VLLM / "attention" / "backends" / "flashinfer.py"
    (copy,) = functions_of(path, "_copy_page_indices_kernel", triton=triton, tl=language)
    (build,) = functions_of(
        path, "_compute_flashinfer_kv_metadata", np=np, torch=torch, _copy_page_indices_kernel=copy
    )
    for step in steps(page_size):
        plan, n = step.plan, step.plan.padded_batch_size
        builder = SimpleNamespace(
            paged_kv_indptr=buffer(n + 1, dtype=torch.int32, device="cpu"),
            paged_kv_indices=torch.full((n * MAX_CONTEXT_LEN,), -9, dtype=torch.int32),
            paged_kv_last_page_len=buffer(n, dtype=torch.int32, device="cpu"),
        )
        lens = plan.host.seq_lens
        indices = build(builder, -(-lens // page_size), lens, some(plan.block_table), n, page_size)
        assert_same(plan.kv_indptr, builder.paged_kv_indptr.cpu)
        assert_same(some(plan.kv_indices), indices)
        assert_same(plan.kv_last_page_len, builder.paged_kv_last_page_len.cpu)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_vllm_maps_tokens_to_the_same_slots(page_size: int) -> None:
    """vLLM's kernel for the slots of new tokens, from positions and the block table of a plan."""
    vllm_runs.require()
    import triton
    from triton import language

    path = VLLM / "worker" / "block_table.py"
    (kernel,) = functions_of(path, "kernel", triton=triton, tl=language)
    constants = (VLLM / "attention" / "backends" / "utils.py").read_text(encoding="utf-8")
    assert "\nPAD_SLOT_ID = -1\n" in constants
    for step in steps(page_size):
        plan, table = step.plan, some(step.plan.block_table)
        slots = torch.full((plan.padded_num_tokens,), -9)
        kernel.__func__[plan.batch_size + 1,](
            plan.num_tokens,
            plan.padded_num_tokens,
            plan.cu_seqlens_q,
            plan.positions.long(),
            table,
            table.stride(0),
            slots,
            KV_CACHE_BLOCK_SIZE=page_size,
            TOTAL_CP_WORLD_SIZE=1,
            TOTAL_CP_RANK=0,
            CP_KV_CACHE_INTERLEAVE_SIZE=1,
            PAD_ID=-1,
            BLOCK_SIZE=1024,
        )
        assert_same(plan.slot_mapping, slots)
        assert_same(plan.out_cache_loc, slots.clamp(min=0))


def test_vllm_splits_decodes_from_prefills() -> None:
    vllm_runs.require()
    path = VLLM / "attention" / "backends" / "utils.py"
    (split,) = functions_of(path, "split_decodes_and_prefills", torch=torch)
    table, allocator = ReqToTokenPool(8, 64, "cpu"), TokenToKVPoolAllocator(256, "cpu", 4)
    planner = BatchPlanner(table, allocator, 8, 128)
    rows = some(table.alloc(6))

    def found(new: list[int]) -> Any:  # noqa: ANN401
        before = [planner.seq_len(row) for row in rows]
        plan = some(planner.extend(rows, before, [a + b for a, b in zip(before, new, strict=True)]))
        batch = {
            "max_query_len": plan.max_seqlen_q,
            "num_reqs": plan.batch_size,
            "num_actual_tokens": plan.num_tokens,
            "query_start_loc_cpu": plan.cu_seqlens_q,
        }
        return split(SimpleNamespace(**batch))

    assert found([5, 9, 1, 1, 2, 7]) == (0, 6, 0, 25)
    assert found([1, 1, 1, 8, 1, 3]) == (3, 3, 3, 12)
    assert found([1, 1, 1, 1, 1, 1]) == (6, 0, 6, 0)


# SGLang


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_sglang_gathers_the_same_indices_from_the_table(page_size: int) -> None:
    """Its kernels for FlashInfer, FlashMLA and FlashAttention, from the request table and a plan's rows."""
    sglang_on_cpu.require()
    indices = module_of(SGLANG_KERNELS / "attention" / "kv_indices.py")
    metadata = module_of(SGLANG_KERNELS / "attention" / "metadata.py")
    for step in steps(page_size):
        plan, table = step.plan, step.table.req_to_token
        n, lens = plan.batch_size, plan.seq_lens[: plan.batch_size]
        rows, starts = plan.req_pool_indices[:n], torch.zeros(n + 1, dtype=torch.int32)
        starts[1:] = lens.cumsum(0)
        slots = torch.full((int(starts[-1]),), -9, dtype=torch.int32)
        indices.create_flashinfer_kv_indices_triton[n,](
            table, rows, lens, starts, None, slots, table.stride(0)
        )
        pages = [some(plan.kv_indices)[a:b] for a, b in zip(plan.kv_indptr, plan.kv_indptr[1:], strict=False)]
        inside = torch.arange(page_size)
        found = [
            (some_pages[:, None] * page_size + inside).flatten()[:length]
            for some_pages, length in zip(pages, lens, strict=False)
        ]
        assert_same(torch.cat(found), slots)

        blocks = some(plan.block_table)[:n]
        wanted = torch.zeros_like(blocks)
        indices.create_flashmla_kv_indices_triton[n, 1](
            table, rows, lens, None, wanted, table.stride(0), wanted.stride(0), PAGED_SIZE=page_size
        )
        assert_same(blocks, wanted)

        wanted, seqlens, cu_seqlens = torch.full_like(blocks, -9), torch.zeros_like(lens), starts.clone()
        metadata.normal_decode_set_metadata(
            seqlens,
            cu_seqlens.fill_(0),
            wanted,
            table,
            rows,
            blocks.shape[1],
            lens,
            0,
            page_size,
            zero_tail=True,
        )
        assert_same(blocks, wanted)
        assert_same(plan.cache_seqlens[:n], seqlens)
        assert_same(starts, cu_seqlens)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_sglang_finds_positions_and_last_slots(page_size: int) -> None:
    sglang_on_cpu.require()
    position = module_of(SGLANG_KERNELS / "attention" / "position.py")
    memory = module_of(SGLANG_KERNELS / "memory" / "common.py")
    for step in steps(page_size):
        plan, n = step.plan, step.plan.batch_size
        before, new = torch.tensor(step.before), torch.tensor(np.diff(plan.host.qo_indptr)[:n])
        positions, starts = position.compute_position_triton(before, new, plan.num_tokens)
        assert_same(plan.positions[: plan.num_tokens], positions)
        assert_same(plan.qo_indptr[:n], starts)
        last = memory.get_last_loc_triton(
            step.table.req_to_token, plan.req_pool_indices[:n].long(), plan.seq_lens[:n].long()
        )
        has_new = new > 0
        assert_same(plan.out_cache_loc[plan.qo_indptr[1 : n + 1][has_new].long() - 1], last[has_new])
        assert last[plan.seq_lens[:n] == 0].tolist() == [-1] * int((plan.seq_lens[:n] == 0).sum())


# FlashAttention


OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {},
    "window": {"sliding_window": 7},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": torch.tensor([-2.0, 0.5, 3.0, 6.0])},
}


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_flash_attention_s_reference_reads_what_the_plan_says(page_size: int) -> None:
    """FlashAttention's own reference, over K and V that are read as its paged kernels do, by the block table.

    SGLang's package has the files of FlashAttention 4 that it is tested with.
    """
    sglang_on_cpu.require()
    module_of(sglang_on_cpu.ENGINES / "einops" / "__init__.py", "einops")
    reference = module_of(SGLANG_KERNELS / "attention" / "flash_attn" / "cute" / "testing.py")
    torch.manual_seed(page_size)
    pool = KVPool(60 * max(page_size, 8), 1, 2, 16, "cpu", torch.float32, page_size=page_size)
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer.normal_()
    for at, step in enumerate(steps(page_size)):
        plan, lens = step.plan, step.plan.cache_seqlens.long()
        new = plan.cu_seqlens_q.diff().long()
        in_keys = torch.arange(plan.max_seqlen_k) < lens[:, None]
        in_queries = torch.arange(plan.max_seqlen_q) < new[:, None]
        queries = torch.randn(len(new), plan.max_seqlen_q, 4, 16)
        pages = some(plan.block_table).long()
        keys, values = (view[pages].flatten(1, 2)[:, : plan.max_seqlen_k] for view in pool.page_view(0))
        made = reference.generate_qkv(queries, keys, values, in_queries, in_keys)
        packed, cu_seqlens_q, cu_seqlens_k = made[0], made[4], made[5]
        max_seqlen_q, max_seqlen_k = made[8], made[9]
        assert_same(plan.cu_seqlens_q, cu_seqlens_q)
        assert_same(plan.cache_seqlens, cu_seqlens_k.diff())
        assert (plan.max_seqlen_q, plan.max_seqlen_k) == (max_seqlen_q, max_seqlen_k)
        options = OPTIONS[[*OPTIONS][at % len(OPTIONS)]]
        window = options.get("sliding_window")
        wanted, _ = reference.attention_ref(
            queries,
            keys,
            values,
            in_queries,
            in_keys,
            causal=True,
            window_size=(None if window is None else window - 1, None),
            softcap=options.get("softcap", 0.0),
            learnable_sink=options.get("sinks"),
        )
        found = PoolAttention(plan, pool)(packed, 0, **options)
        wanted, *_ = reference.unpad_input(wanted, in_queries)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
