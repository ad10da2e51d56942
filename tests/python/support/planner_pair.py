"""A planner and its pools twice: those of the test, and in host memory others that are given plain lists.

Rust compares the ones in host memory with a naive planner: `tests/rust/histories/planner.rs`. What a plan has
to say is derived here from the table, field by field.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import devices
import numpy as np
import pytest
import torch
from common import some

from kvpool import BatchPlanner, IndexOwnershipError, ReqToTokenPool, TokenToKVPoolAllocator

if TYPE_CHECKING:
    from collections.abc import Sequence

    from common import Fence

    from kvpool import BatchPlan

    Expected = dict[str, Any]
    # A request of a batch: its row, and its tokens before and after the step.
    Growth = tuple[int, int, int]

# vLLM skips the write of a token whose slot is this one.
PAD_SLOT_ID = -1

TENSORS = (
    "out_cache_loc",
    "positions",
    "slot_mapping",
    "req_pool_indices",
    "seq_lens",
    "cache_seqlens",
    "qo_indptr",
    "cu_seqlens_q",
    "kv_indptr",
    "kv_indices",
    "kv_last_page_len",
    "block_table",
)
NUMBERS = (
    "batch_size",
    "padded_batch_size",
    "num_tokens",
    "padded_num_tokens",
    "max_seqlen_q",
    "max_seqlen_k",
)


def compare_plans(plan: BatchPlan, expected: Expected, where: str) -> None:
    """Every field of a plan, as tensors and as arrays of the host."""
    assert {name: getattr(plan, name) for name in NUMBERS} == {name: expected[name] for name in NUMBERS}
    for name in TENSORS:
        compare_field(getattr(plan, name), getattr(plan.host, name), expected[name], name)
        if expected[name] is not None:
            assert getattr(plan, name).device.type == where, name


def compare_field(tensor: torch.Tensor | None, array: Any, expected: Any, name: str) -> None:  # noqa: ANN401
    if expected is None:
        assert tensor is None, name
        assert array is None, name
        return
    wide = name == "slot_mapping"
    assert type(tensor) is torch.Tensor, name
    assert tensor.dtype is (torch.int64 if wide else torch.int32), name
    assert tensor.stride(-1) == 1, name
    assert tensor.tolist() == expected, name
    assert type(array) is np.ndarray, name
    assert array.dtype == (np.int64 if wide else np.int32), name
    assert array.shape == tensor.shape, name
    assert not array.flags.writeable, name
    assert array.tolist() == expected, name


class Side:
    """A planner with its pools."""

    def __init__(  # noqa: PLR0913
        self,
        where: str,
        size: int,
        page_size: int,
        *,
        need_sort: bool = True,
        strict: bool = False,
        max_reqs: int = 8,
        max_context_len: int = 48,
        padding_row: bool = True,
        max_batch_size: int = 8,
        max_tokens: int = 256,
        **options: bool,
    ) -> None:
        self.allocator = TokenToKVPoolAllocator(size, where, page_size, need_sort, strict=strict)
        self.table = ReqToTokenPool(max_reqs, max_context_len, where, padding_row=padding_row)
        self.planner = BatchPlanner(self.table, self.allocator, max_batch_size, max_tokens, **options)
        self.context = max_context_len
        self.options = options

    def lens(self) -> dict[int, int]:
        """The length of every request, by its row."""
        found = {}
        for row in range(len(self.table.req_to_token)):
            try:
                found[row] = self.planner.seq_len(row)
            except IndexOwnershipError:
                continue
        return found

    def observed_state(self) -> dict[str, Any]:
        """Whatever can be seen of the planner and its pools, but for memory and counters of either."""
        self.allocator.verify()
        stats: dict[str, Any] = {**self.allocator.stats()}
        planned: dict[str, Any] = {**self.planner.stats()}
        counts = ("capacity", "available", "in_use", "shared", "fenced", "dropped_frees", "high_water")
        return {
            **{name: stats[name] for name in counts},
            **{name: planned[name] for name in ("requests", "tokens", "plans")},
            "free": self.allocator.free_slots.tolist(),
            "released": self.allocator.release_slots.tolist(),
            "table": self.table.req_to_token.tolist(),
            "free_rows": self.table.available_size(),
            "lens": self.lens(),
        }

    def describe(self, real: Sequence[Growth], padding: int = 0, tokens: int = 0) -> Expected:
        """The metadata of requests that are in the table, and of so many padded ones of so many tokens."""
        batch = [*real, *[(0, 0, tokens)] * padding]
        table, page_size = self.table.req_to_token.tolist(), self.allocator.page_size
        # The pages of each request, read from its row. A padded one lies in the padding page, repeatedly.
        tables = [
            [table[row][i] // page_size if number < len(real) else 0 for i in range(0, seq, page_size)]
            for number, (row, _, seq) in enumerate(batch)
        ]

        # SGLang: where the step writes the K and V of its tokens, requests one after the other; the padding
        # slot takes what padded tokens write. positions are those of rotary embeddings.
        out_cache_loc, positions, slot_mapping = [], [], []
        for number, (row, prefix, seq) in enumerate(batch):
            for position in range(prefix, seq):
                is_real = number < len(real)
                out_cache_loc.append(table[row][position] if is_real else 0)
                positions.append(position)
                # vLLM: block number times block size plus the offset in the block, as int64; PAD_SLOT_ID for
                # tokens that are not written.
                block = tables[number][position // page_size]
                slot_mapping.append(block * page_size + position % page_size if is_real else PAD_SLOT_ID)

        # FlashInfer, ragged tensors: the queries of request i are rows qo_indptr[i] up to qo_indptr[i + 1].
        # FlashAttention's varlen functions have the same prefix sums as cu_seqlens_q.
        indptr = [0, *np.cumsum([seq - prefix for _, prefix, seq in batch], dtype=int).tolist()]
        # FlashInfer, paged KV cache: request i has the pages kv_indices[kv_indptr[i]:kv_indptr[i + 1]], all
        # full but the last, which has kv_last_page_len[i] tokens, from 1 to page_size. (A request without
        # tokens has no page, and 0 in it.)
        kv_indptr = [0, *np.cumsum([len(pages) for pages in tables], dtype=int).tolist()]
        # FlashAttention, flash_attn_with_kvcache: cache_seqlens[i] tokens of request i are in the cache, the
        # new ones counted, in blocks block_table[i, 0], block_table[i, 1], ...; a row is as wide as the
        # longest request may become. vLLM's kernels read the same table.
        width = -(-self.context // page_size)
        lens = [seq for _, _, seq in batch]
        expected: Expected = {
            "batch_size": len(real),
            "padded_batch_size": len(batch),
            "num_tokens": indptr[len(real)],
            "padded_num_tokens": indptr[-1],
            "max_seqlen_q": max((seq - prefix for _, prefix, seq in batch), default=0),
            "max_seqlen_k": max(lens, default=0),
            "out_cache_loc": out_cache_loc,
            "positions": positions,
            "slot_mapping": slot_mapping,
            "req_pool_indices": [row for row, _, _ in batch],
            "seq_lens": lens,
            "cache_seqlens": lens,
            "qo_indptr": indptr,
            "cu_seqlens_q": indptr,
            "kv_indptr": kv_indptr,
            "kv_indices": [page for pages in tables for page in pages],
            "kv_last_page_len": [(seq - 1) % page_size + 1 if seq else 0 for seq in lens],
            "block_table": [[*pages, *[0] * (width - len(pages))] for pages in tables],
        }
        return expected | {name: None for name, wanted in self.options.items() if not wanted}


class Pair(Side):
    """A planner on the device of the test. Its twin is told the same in plain lists, and must do the same."""

    def __init__(self, size: int = 64, page_size: int = 1, **options: Any) -> None:  # noqa: ANN401
        super().__init__(devices.current(), size, page_size, **options)
        self.twin = Side("cpu", size, page_size, **options)

    def check_same(self) -> None:
        assert self.observed_state() == self.twin.observed_state()

    def rows(self, n: int) -> list[int]:
        rows = some(self.table.alloc(n))
        assert rows == self.twin.table.alloc(n)
        return rows

    def slots(self, n: int) -> Any:  # noqa: ANN401
        """Slots of somebody else, such as a prefix cache."""
        slots = some(self.allocator.alloc(n))
        assert slots.tolist() == some(self.twin.allocator.alloc(n)).tolist()
        return slots

    def share(self, slots: Sequence[int]) -> None:
        for side in (self, self.twin):
            side.allocator.share(slots)

    def free(self, slots: Sequence[int], after: Fence | None = None) -> None:
        for side in (self, self.twin):
            side.allocator.free(slots, after=after)
        self.check_same()

    def free_rows(self, rows: Sequence[int]) -> None:
        for side in (self, self.twin):
            side.table.free(rows)

    def planned(self, plan: BatchPlan | None, other: BatchPlan | None, real: Sequence[Growth]) -> Any:  # noqa: ANN401
        """The plan, when it says what follows from the table. Both find too few pages, or none of them."""
        assert (plan is None) == (other is None)
        if plan is not None and other is not None:
            padding = other.padded_batch_size - other.batch_size
            expected = self.twin.describe(real, padding, other.max_seqlen_q)
            compare_plans(plan, expected, devices.current())
        self.check_same()
        return plan

    def try_extend(self, rows: Any, prefix_lens: Any, seq_lens: Any, prefix_slots: Any = None) -> Any:  # noqa: ANN401
        """Extends; the arguments may be in any form."""
        given = [] if prefix_slots is None else [prefix_slots]
        plain = [[None if entry is None else ints(entry) for entry in each] for each in given]
        numbers = ints(rows), ints(prefix_lens), ints(seq_lens)
        return self.planned(
            self.planner.extend(rows, prefix_lens, seq_lens, *given),
            self.twin.planner.extend(*numbers, *plain),
            [*zip(*numbers, strict=True)],
        )

    def extend(self, rows: Any, prefix_lens: Any, seq_lens: Any, prefix_slots: Any = None) -> BatchPlan:  # noqa: ANN401
        plan: BatchPlan = some(self.try_extend(rows, prefix_lens, seq_lens, prefix_slots))
        return plan

    def try_decode(self, rows: Any, seq_lens: Any, tokens_per_req: int = 1, pad_to: Any = None) -> Any:  # noqa: ANN401
        numbers, sizes = (ints(rows), ints(seq_lens)), None if pad_to is None else ints(pad_to)
        return self.planned(
            self.planner.decode(rows, seq_lens, tokens_per_req, pad_to=pad_to),
            self.twin.planner.decode(*numbers, int(tokens_per_req), pad_to=sizes),
            [(row, seq - tokens_per_req, seq) for row, seq in zip(*numbers, strict=True)],
        )

    def decode(self, rows: Any, seq_lens: Any, tokens_per_req: int = 1, pad_to: Any = None) -> BatchPlan:  # noqa: ANN401
        plan: BatchPlan = some(self.try_decode(rows, seq_lens, tokens_per_req, pad_to))
        return plan

    def start(self, *lens: int) -> list[int]:
        """New requests with so many tokens; their rows."""
        rows = self.rows(len(lens))
        self.extend(rows, [0] * len(lens), list(lens))
        return rows

    def truncate(self, rows: Any, seq_lens: Any, after: Fence | None = None) -> None:  # noqa: ANN401
        self.planner.truncate(rows, seq_lens, after=after)
        self.twin.planner.truncate(ints(rows), ints(seq_lens), after=after)
        self.check_same()

    def finish(self, rows: Any, seq_lens: Any = None, after: Fence | None = None) -> None:  # noqa: ANN401
        self.planner.finish(rows, seq_lens, after=after)
        self.twin.planner.finish(ints(rows), None if seq_lens is None else ints(seq_lens), after=after)
        self.check_same()

    def fork(self, src: int, dst: int, seq_len: int) -> tuple[Any, Any]:
        found = some(self.planner.fork(src, dst, seq_len))
        expected = some(self.twin.planner.fork(src, dst, seq_len))
        for tensor, slots in zip(found, expected, strict=True):
            assert type(tensor) is torch.Tensor
            assert tensor.dtype is torch.int32
            assert tensor.device.type == devices.current()
            assert tensor.tolist() == slots.tolist()
        self.check_same()
        return found

    def row_of(self, row: int, length: int) -> list[int]:
        """The slots of a request, from its row."""
        slots: list[int] = self.table.read(row, length).tolist()
        return slots

    def refused(self, kind: type[Exception], call: Any, match: str = r"\w") -> None:  # noqa: ANN401
        """`call` raises exactly `kind`, with a message, and changes nothing."""
        with pytest.raises(kind, match=match) as caught:
            call()
        assert type(caught.value) is kind
        self.check_same()


def ints(values: Any) -> list[int]:  # noqa: ANN401
    """Indices of any form as a flat list."""
    if isinstance(values, torch.Tensor):
        return [int(value) for value in values.flatten().tolist()]
    return [int(value) for value in np.asarray(values, dtype=np.int64).flatten()]
