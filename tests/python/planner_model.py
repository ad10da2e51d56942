"""A naive planner: requests as lists of pages, and metadata made field by field from the table.

`Pair` does everything twice, with kvpool's classes and with the naive ones, and compares what can be seen.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import devices
import numpy as np
import pytest
import torch
from common import some
from models import BadFreeError, Fence, ReqToTokenPoolModel, TokenToKVPoolAllocatorModel

from kvpool import BatchPlanner, ConfigError, IndexOwnershipError, ReqToTokenPool, TokenToKVPoolAllocator

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvpool import BatchPlan

    Kinds = set[type[Exception]]
    Prefixes = Sequence[Sequence[int] | None] | None


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


class RefusedError(Exception):
    """The arguments are wrong, for at least one of these reasons."""

    def __init__(self, kinds: Kinds) -> None:
        super().__init__(kinds)
        self.kinds = tuple(kinds)


class SharingAllocatorModel(TokenToKVPoolAllocatorModel):
    """Each page has a number of owners that stay; others leave when their fence has passed."""

    def clear(self) -> None:
        super().clear()
        self.owners: Counter[int] = Counter()
        self.leaving: list[tuple[Fence, list[int]]] = []

    def leaves(self, page: int) -> int:
        return sum(pages.count(page) for _, pages in self.leaving)

    @property
    def in_use(self) -> int:
        return len(self.live | {page for _, pages in self.leaving for page in pages}) * self.page_size

    @property
    def shared(self) -> int:
        """Slots of pages with more than one owner; one that leaves does so when its fence has passed."""
        return sum(self.owners[page] + self.leaves(page) > 1 for page in list(self.owners)) * self.page_size

    def is_allocated(self, slot: int) -> bool:
        page = slot // self.page_size
        return page in self.live or self.leaves(page) > 0

    def _own(self, pages: list[int]) -> None:
        self.owners.update(pages)
        super()._own(pages)

    def _release_unowned(self, pages: Iterable[int]) -> None:
        self._release([page for page in pages if not self.owners[page] and not self.leaves(page)])

    def poll(self) -> None:
        position = 0
        while position < len(self.leaving):
            fence, pages = self.leaving[position]
            if fence.done:
                del self.leaving[position]
                self._release_unowned(pages)
            else:
                position += 1

    def share(self, slots: Iterable[int]) -> None:
        self.poll()
        pages = [slot // self.page_size for slot in slots]
        if not self.live.issuperset(pages):
            raise BadFreeError
        self.owners.update(pages if self.page_size == 1 else set(pages))

    def free(self, slots: Iterable[int], after: Fence | None = None) -> None:
        self.poll()
        if self.group_depth and after is None:
            self.group += slots
            return
        pages: list[int] = []
        bad = 0
        for slot in slots:
            page = slot // self.page_size
            if self.page_size > 1 and page in pages:
                continue
            if pages.count(page) < self.owners[page]:
                pages.append(page)
            else:
                bad += 1
        if bad and self.strict:
            raise BadFreeError
        self.dropped_frees += bad
        alone = [page for page in pages if self.owners[page] + self.leaves(page) == 1]
        self.owners.subtract(pages)
        self.live = {page for page in self.live if self.owners[page] > 0}
        if after is not None:
            # Those that others own, too, come after the rest.
            self.leaving.append((after, alone))
            self.leaving += [(after, [page]) for page in pages if page not in alone]
        else:
            # A page that several owners leave in one call returns where the last of them does.
            self._release_unowned(reversed(dict.fromkeys(reversed(pages))))


class TableModel(ReqToTokenPoolModel):
    """It counts how often each row was handed out."""

    def __init__(self, max_reqs: int, max_context_len: int, *, padding_row: bool = True) -> None:
        self.turns: Counter[int] = Counter()
        super().__init__(max_reqs, max_context_len, padding_row=padding_row)

    def alloc(self, n: int = 1) -> list[int] | None:
        rows = super().alloc(n)
        self.turns.update(rows or [])
        return rows


@dataclass
class Request:
    """What the planner knows of a row since it was handed out for the `turn`-th time."""

    turn: int
    len: int
    pages: list[int]


@dataclass
class ExpectedPlan:
    """What a plan has to say."""

    batch_size: int
    padded_batch_size: int
    num_tokens: int
    padded_num_tokens: int
    max_seqlen_q: int
    max_seqlen_k: int
    out_cache_loc: list[int]
    positions: list[int]
    slot_mapping: list[int]
    req_pool_indices: list[int]
    seq_lens: list[int]
    cache_seqlens: list[int]
    qo_indptr: list[int]
    cu_seqlens_q: list[int]
    kv_indptr: list[int]
    kv_indices: list[int] | None
    kv_last_page_len: list[int]
    block_table: list[list[int]] | None


class PlannerModel:
    """Requests by row, over a naive table and a naive allocator."""

    def __init__(  # noqa: PLR0913
        self,
        table: TableModel,
        allocator: SharingAllocatorModel,
        max_batch_size: int,
        max_tokens: int,
        *,
        kv_indices: bool = True,
        block_table: bool = True,
    ) -> None:
        self.table = table
        self.allocator = allocator
        self.max_batch_size = max_batch_size
        self.max_tokens = max_tokens
        self.with_kv_indices = kv_indices
        self.with_block_table = block_table
        self.requests: dict[int, Request] = {}
        self.plans = 0

    @property
    def page_size(self) -> int:
        return self.allocator.page_size

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def request(self, row: int) -> Request:
        turn = self.table.turns[row]
        if row not in self.requests or self.requests[row].turn != turn:
            self.requests[row] = Request(turn, 0, [])
        return self.requests[row]

    def seq_len(self, row: int) -> int:
        return self.request(row).len

    def running(self) -> list[Request]:
        return [request for row in sorted(self.table.live) if (request := self.request(row)).len > 0]

    def wrong_rows(self, rows: Sequence[int]) -> Kinds:
        kinds: Kinds = set()
        for row in rows:
            if not 0 <= row < len(self.table.table):
                kinds.add(IndexError)
            elif row not in self.table.live:
                kinds.add(IndexOwnershipError)
        if len(set(rows)) < len(rows):
            kinds.add(ConfigError)
        return kinds

    def wrong_growth(self, row: int, prefix: int, seq: int, slots: Sequence[int] | None) -> Kinds:
        kinds: Kinds = set()
        if not 0 <= prefix <= seq:
            kinds.add(ConfigError)
        if seq > self.table.max_context_len:
            kinds.add(IndexError)
        if not slots:
            return kinds | self.wrong_open_page(row, prefix, seq)
        if self.seq_len(row) > 0 or len(slots) != prefix or prefix % self.page_size:
            kinds.add(ConfigError)
        if any(slot // self.page_size not in self.allocator.live for slot in slots):
            kinds.add(IndexOwnershipError)
        for start in range(0, len(slots), self.page_size):
            page = slots[start] // self.page_size
            whole = [page * self.page_size + i for i in range(self.page_size)]
            if list(slots[start : start + self.page_size]) != whole:
                kinds.add(ConfigError)
        return kinds

    def wrong_open_page(self, row: int, prefix: int, seq: int) -> Kinds:
        if self.seq_len(row) != prefix:
            return {ConfigError}
        # What the request goes on filling, somebody else may have freed.
        goes_on = prefix % self.page_size > 0 and seq > prefix
        if goes_on and self.request(row).pages[-1] not in self.allocator.live:
            return {IndexOwnershipError}
        return set()

    def wrong_batch(
        self,
        rows: Sequence[int],
        prefix_lens: Sequence[int],
        seq_lens: Sequence[int],
        prefixes: Sequence[Sequence[int]],
        padding: tuple[int, int] = (0, 0),
    ) -> Kinds:
        kinds = self.wrong_rows(rows)
        if not len(rows) == len(prefix_lens) == len(seq_lens) == len(prefixes):
            return kinds | {ConfigError}
        if not kinds:
            for growth in zip(rows, prefix_lens, seq_lens, prefixes, strict=True):
                kinds |= self.wrong_growth(*growth)
        padded_requests, padded_tokens = padding
        if sum(seq_lens) - sum(prefix_lens) + padded_tokens > self.max_tokens:
            kinds.add(ConfigError)
        if len(rows) + padded_requests > self.max_batch_size:
            kinds.add(ConfigError)
        return kinds

    def extend(
        self,
        rows: Sequence[int],
        prefix_lens: Sequence[int],
        seq_lens: Sequence[int],
        prefix_slots: Prefixes = None,
    ) -> ExpectedPlan | None:
        self.allocator.poll()
        prefixes: list[Sequence[int]] = [
            entry or () for entry in ([None] * len(rows) if prefix_slots is None else prefix_slots)
        ]
        kinds = self.wrong_batch(rows, prefix_lens, seq_lens, prefixes)
        if kinds:
            raise RefusedError(kinds)
        if not self.grow(rows, prefix_lens, seq_lens, prefixes):
            return None
        return self.describe([*zip(rows, prefix_lens, seq_lens, strict=True)], [])

    def decode(
        self,
        rows: Sequence[int],
        seq_lens: Sequence[int],
        tokens_per_req: int = 1,
        *,
        pad_to: int | Sequence[int] | None = None,
    ) -> ExpectedPlan | None:
        self.allocator.poll()
        prefix_lens = [seq - tokens_per_req for seq in seq_lens]
        kinds: Kinds = set() if tokens_per_req > 0 else {ConfigError}
        padding = 0
        if pad_to is not None:
            sizes = [pad_to] if isinstance(pad_to, int) else pad_to
            fitting = [size for size in sizes if size >= len(rows)]
            if not fitting:
                kinds.add(ConfigError)
            else:
                padding = min(fitting) - len(rows)
        if padding and not self.table.first:
            kinds.add(ConfigError)
        if padding and tokens_per_req > self.table.max_context_len:
            kinds.add(IndexError)
        none: list[Sequence[int]] = [()] * len(rows)
        kinds |= self.wrong_batch(rows, prefix_lens, seq_lens, none, (padding, padding * tokens_per_req))
        if kinds:
            raise RefusedError(kinds)
        if not self.grow(rows, prefix_lens, seq_lens, none):
            return None
        return self.describe(
            [*zip(rows, prefix_lens, seq_lens, strict=True)], [(0, 0, tokens_per_req)] * padding
        )

    def grow(
        self,
        rows: Sequence[int],
        prefix_lens: Sequence[int],
        seq_lens: Sequence[int],
        prefixes: Sequence[Sequence[int]],
    ) -> bool:
        """Takes the slots and writes the table, or nothing of it."""
        pages = self.allocator._take(
            sum(
                self.pages_for(seq) - self.pages_for(prefix)
                for prefix, seq in zip(prefix_lens, seq_lens, strict=True)
            )
        )
        if pages is None:
            return False
        for row, prefix, seq, cached in zip(rows, prefix_lens, seq_lens, prefixes, strict=True):
            request = self.request(row)
            if cached:
                self.allocator.share(cached)
                request.pages = [slot // self.page_size for slot in cached[:: self.page_size]]
                self.table.table[row][:prefix] = cached
            request.len = seq
            while len(request.pages) < self.pages_for(seq):
                request.pages.append(pages.pop(0))
            for position in range(prefix, seq):
                page = request.pages[position // self.page_size]
                self.table.table[row][position] = page * self.page_size + position % self.page_size
        self.plans += 1
        return True

    def describe(self, real: list[tuple[int, int, int]], padding: list[tuple[int, int, int]]) -> ExpectedPlan:
        """The metadata of requests as (row, prefix_len, seq_len), which are in the table."""
        batch = real + padding
        # The pages of each request, read from its row. A padded one lies in the padding page, repeatedly.
        tables = [
            [self.table.table[row][i] // self.page_size for i in range(0, seq, self.page_size)]
            for row, _, seq in real
        ] + [[0] * self.pages_for(seq) for _, _, seq in padding]

        # SGLang: where the step writes the K and V of its tokens, requests one after the other; the padding
        # slot takes what padded tokens write. positions are those of rotary embeddings.
        out_cache_loc, positions, slot_mapping = [], [], []
        for number, (row, prefix, seq) in enumerate(batch):
            for position in range(prefix, seq):
                is_real = number < len(real)
                out_cache_loc.append(self.table.table[row][position] if is_real else 0)
                positions.append(position)
                # vLLM: block number times block size plus the offset in the block, as int64; PAD_SLOT_ID for
                # tokens that are not written.
                block = tables[number][position // self.page_size]
                slot = block * self.page_size + position % self.page_size
                slot_mapping.append(slot if is_real else PAD_SLOT_ID)

        # FlashInfer, ragged tensors: the queries of request i are rows qo_indptr[i] up to qo_indptr[i + 1].
        # FlashAttention's varlen functions have the same prefix sums as cu_seqlens_q.
        indptr = [0]
        for _, prefix, seq in batch:
            indptr.append(indptr[-1] + seq - prefix)

        # FlashInfer, paged KV cache: request i has the pages kv_indices[kv_indptr[i]:kv_indptr[i + 1]], all
        # full but the last, which has kv_last_page_len[i] tokens, from 1 to page_size. (A request without
        # tokens has no page, and 0 in it.)
        kv_indptr, kv_indices, kv_last_page_len = [0], [], []
        for number, (_, _, seq) in enumerate(batch):
            kv_indptr.append(kv_indptr[-1] + len(tables[number]))
            kv_indices += tables[number]
            kv_last_page_len.append(seq - (len(tables[number]) - 1) * self.page_size if seq else 0)

        # FlashAttention, flash_attn_with_kvcache: cache_seqlens[i] tokens of request i are in the cache, the
        # new ones counted, in blocks block_table[i, 0], block_table[i, 1], ...; a row is as wide as the
        # longest request may become. vLLM's kernels read the same table.
        width = self.pages_for(self.table.max_context_len)
        block_table = [[*pages, *[0] * (width - len(pages))] for pages in tables]
        lens = [seq for _, _, seq in batch]
        return ExpectedPlan(
            batch_size=len(real),
            padded_batch_size=len(batch),
            num_tokens=indptr[len(real)],
            padded_num_tokens=indptr[-1],
            max_seqlen_q=max((seq - prefix for _, prefix, seq in batch), default=0),
            max_seqlen_k=max(lens, default=0),
            out_cache_loc=out_cache_loc,
            positions=positions,
            slot_mapping=slot_mapping,
            req_pool_indices=[row for row, _, _ in batch],
            seq_lens=lens,
            cache_seqlens=lens,
            qo_indptr=indptr,
            cu_seqlens_q=indptr,
            kv_indptr=kv_indptr,
            kv_indices=kv_indices if self.with_kv_indices else None,
            kv_last_page_len=kv_last_page_len,
            block_table=block_table if self.with_block_table else None,
        )

    def give_back(self, pages: Sequence[int], after: Fence | None) -> bool:
        """Leaves pages, and says whether all of them were this planner's."""
        dropped = self.allocator.dropped_frees
        strict, self.allocator.strict = self.allocator.strict, False
        self.allocator.free([page * self.page_size for page in pages], after)
        self.allocator.strict = strict
        return self.allocator.dropped_frees == dropped

    def truncate(self, rows: Sequence[int], seq_lens: Sequence[int], after: Fence | None = None) -> None:
        self.allocator.poll()
        kinds = self.wrong_rows(rows)
        if len(rows) != len(seq_lens):
            kinds.add(ConfigError)
        if not kinds:
            for row, seq in zip(rows, seq_lens, strict=True):
                request = self.request(row)
                if not 0 <= seq <= request.len:
                    kinds.add(ConfigError)
                elif seq < request.len and seq % self.page_size:
                    page = request.pages[seq // self.page_size]
                    if self.allocator.owners[page] > 1 or self.allocator.leaves(page):
                        kinds.add(IndexOwnershipError)
        if kinds:
            raise RefusedError(kinds)
        are_own = True
        for row, seq in zip(rows, seq_lens, strict=True):
            request = self.request(row)
            keep = self.pages_for(seq)
            gone, request.pages, request.len = request.pages[keep:], request.pages[:keep], seq
            are_own &= self.give_back(gone, after)
        if not are_own and self.allocator.strict:
            raise BadFreeError

    def finish(
        self, rows: Sequence[int], seq_lens: Sequence[int] | None = None, after: Fence | None = None
    ) -> None:
        self.allocator.poll()
        kinds = self.wrong_rows(rows)
        if seq_lens is not None and not kinds and [self.seq_len(row) for row in rows] != list(seq_lens):
            kinds.add(ConfigError)
        if kinds:
            raise RefusedError(kinds)
        are_own = True
        for row in rows:
            are_own &= self.give_back(self.requests.pop(row, Request(0, 0, [])).pages, after)
        self.table.free(rows)
        if not are_own and self.allocator.strict:
            raise BadFreeError

    def fork(self, src: int, dst: int, seq_len: int) -> tuple[list[int], list[int]] | None:
        self.allocator.poll()
        kinds = self.wrong_rows([src, dst])
        if not kinds and (self.seq_len(dst) > 0 or not 0 <= seq_len <= self.seq_len(src)):
            kinds.add(ConfigError)
        if seq_len > self.table.max_context_len:
            kinds |= {IndexError, ConfigError}
        if not kinds and not self.allocator.live.issuperset(
            self.request(src).pages[: self.pages_for(seq_len)]
        ):
            # Somebody else freed what would be shared or copied.
            kinds.add(IndexOwnershipError)
        if kinds:
            raise RefusedError(kinds)
        rest = seq_len % self.page_size
        fresh = self.allocator._take(1 if rest else 0)
        if fresh is None:
            return None
        full = self.request(src).pages[: seq_len // self.page_size]
        self.allocator.share([page * self.page_size for page in full])
        self.requests[dst] = Request(self.table.turns[dst], seq_len, full + fresh)
        slots = [page * self.page_size + offset for page in full + fresh for offset in range(self.page_size)][
            :seq_len
        ]
        self.table.table[dst][:seq_len] = slots
        return slots[seq_len - rest :], self.table.table[src][seq_len - rest : seq_len]


def compare_plans(plan: BatchPlan, expected: ExpectedPlan, width: int, where: str) -> None:
    """Every field of a plan, as tensors and as arrays of the host."""
    for name in NUMBERS:
        assert getattr(plan, name) == getattr(expected, name), name
    for name in TENSORS:
        compare_field(getattr(plan, name), getattr(plan.host, name), getattr(expected, name), name, width)
        if getattr(expected, name) is not None:
            assert getattr(plan, name).device.type == where, name


def compare_field(tensor: torch.Tensor | None, array: Any, expected: Any, name: str, width: int) -> None:  # noqa: ANN401
    if expected is None:
        assert tensor is None, name
        assert array is None, name
        return
    assert type(tensor) is torch.Tensor, name
    assert tensor.dtype is (torch.int64 if name == "slot_mapping" else torch.int32), name
    shape = (len(expected), width) if name == "block_table" else (len(expected),)
    assert tensor.shape == shape, name
    assert tensor.stride(-1) == 1, name
    assert tensor.tolist() == expected, name
    assert type(array) is np.ndarray, name
    assert array.dtype == (np.int64 if name == "slot_mapping" else np.int32), name
    assert array.shape == shape, name
    assert not array.flags.writeable, name
    assert array.tolist() == expected, name


class Pair:
    """A planner and its pools beside the naive ones. Each call is made on both, and everything compared."""

    def __init__(  # noqa: PLR0913
        self,
        size: int = 64,
        page_size: int = 1,
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
        where = devices.current()
        self.allocator = TokenToKVPoolAllocator(size, where, page_size, need_sort, strict=strict)
        self.table = ReqToTokenPool(max_reqs, max_context_len, where, padding_row=padding_row)
        self.planner = BatchPlanner(self.table, self.allocator, max_batch_size, max_tokens, **options)
        self.model = PlannerModel(
            TableModel(max_reqs, max_context_len, padding_row=padding_row),
            SharingAllocatorModel(size, page_size, need_sort=need_sort, strict=strict),
            max_batch_size,
            max_tokens,
            **options,
        )
        self.width = -(-max_context_len // page_size)

    def rows(self, n: int) -> list[int]:
        rows = some(self.table.alloc(n))
        assert rows == self.model.table.alloc(n)
        return rows

    def slots(self, n: int) -> Any:  # noqa: ANN401
        """Slots of somebody else, such as a prefix cache."""
        slots = some(self.allocator.alloc(n))
        assert slots.tolist() == self.model.allocator.alloc(n)
        return slots

    def share(self, slots: Sequence[int]) -> None:
        self.allocator.share(slots)
        self.model.allocator.share(slots)

    def free(self, slots: Sequence[int], after: Fence | None = None) -> None:
        self.allocator.free(slots, after=after)
        self.model.allocator.free(slots, after)
        self.same()

    def free_rows(self, rows: Sequence[int]) -> None:
        self.table.free(rows)
        self.model.table.free(rows)

    def same_plan(self, plan: BatchPlan | None, expected: ExpectedPlan | None) -> BatchPlan | None:
        if expected is None:
            assert plan is None
        else:
            compare_plans(some(plan), expected, self.width, devices.current())
        self.same()
        return plan

    def try_extend(self, rows: Any, prefix_lens: Any, seq_lens: Any, prefix_slots: Any = None) -> Any:  # noqa: ANN401
        """Extends; the arguments may be in any form. Answers None when both found too few pages."""
        plain = [None if entry is None else ints(entry) for entry in prefix_slots or ()]
        expected = self.model.extend(
            ints(rows), ints(prefix_lens), ints(seq_lens), None if prefix_slots is None else plain
        )
        plan = (
            self.planner.extend(rows, prefix_lens, seq_lens)
            if prefix_slots is None
            else self.planner.extend(rows, prefix_lens, seq_lens, prefix_slots)
        )
        return self.same_plan(plan, expected)

    def extend(self, rows: Any, prefix_lens: Any, seq_lens: Any, prefix_slots: Any = None) -> BatchPlan:  # noqa: ANN401
        plan: BatchPlan = some(self.try_extend(rows, prefix_lens, seq_lens, prefix_slots))
        return plan

    def try_decode(
        self,
        rows: Any,  # noqa: ANN401
        seq_lens: Any,  # noqa: ANN401
        tokens_per_req: int = 1,
        pad_to: int | Sequence[int] | None = None,
    ) -> Any:  # noqa: ANN401
        expected = self.model.decode(ints(rows), ints(seq_lens), tokens_per_req, pad_to=pad_to)
        plan = self.planner.decode(rows, seq_lens, tokens_per_req, pad_to=pad_to)
        return self.same_plan(plan, expected)

    def decode(
        self,
        rows: Any,  # noqa: ANN401
        seq_lens: Any,  # noqa: ANN401
        tokens_per_req: int = 1,
        pad_to: int | Sequence[int] | None = None,
    ) -> BatchPlan:
        plan: BatchPlan = some(self.try_decode(rows, seq_lens, tokens_per_req, pad_to))
        return plan

    def start(self, *lens: int) -> list[int]:
        """New requests with so many tokens; their rows."""
        rows = self.rows(len(lens))
        self.extend(rows, [0] * len(lens), list(lens))
        return rows

    def truncate(self, rows: Any, seq_lens: Any, after: Fence | None = None) -> None:  # noqa: ANN401
        self.planner.truncate(rows, seq_lens, after=after)
        self.model.truncate(ints(rows), ints(seq_lens), after)
        self.same()

    def finish(self, rows: Any, seq_lens: Any = None, after: Fence | None = None) -> None:  # noqa: ANN401
        self.planner.finish(rows, seq_lens, after=after)
        self.model.finish(ints(rows), None if seq_lens is None else ints(seq_lens), after)
        self.same()

    def try_fork(self, src: int, dst: int, seq_len: int) -> Any:  # noqa: ANN401
        expected = self.model.fork(src, dst, seq_len)
        found = self.planner.fork(src, dst, seq_len)
        if expected is None:
            assert found is None
        else:
            for tensor, slots in zip(some(found), expected, strict=True):
                assert type(tensor) is torch.Tensor
                assert tensor.dtype is torch.int32
                assert tensor.device.type == devices.current()
                assert tensor.tolist() == slots
        self.same()
        return found

    def fork(self, src: int, dst: int, seq_len: int) -> tuple[Any, Any]:
        dst_slots, src_slots = some(self.try_fork(src, dst, seq_len))
        return dst_slots, src_slots

    def row_of(self, row: int, length: int) -> list[int]:
        """The slots of a request, from its row."""
        slots: list[int] = self.table.read(row, length).tolist()
        return slots

    def same(self) -> None:
        """Whatever can be seen of the planner and its pools."""
        model, allocator = self.model, self.model.allocator
        self.allocator.verify()
        assert self.allocator.available_size() == allocator.available_size()
        stats = self.allocator.stats()
        assert stats["available"] + stats["in_use"] == stats["capacity"] == allocator.capacity
        assert stats["in_use"] == allocator.in_use
        assert stats["shared"] == allocator.shared
        assert stats["dropped_frees"] == allocator.dropped_frees
        assert stats["high_water"] == allocator.high_water
        assert self.allocator.free_slots.tolist() == allocator.free_pages
        assert self.allocator.release_slots.tolist() == allocator.released_pages
        assert self.table.req_to_token.tolist() == model.table.table
        assert self.table.available_size() == len(model.table.free_rows)
        lens = {row: self.planner.seq_len(row) for row in model.table.live}
        assert lens == {row: model.seq_len(row) for row in model.table.live}
        planned = self.planner.stats()
        assert planned["requests"] == len(model.running())
        assert planned["tokens"] == sum(request.len for request in model.running())
        assert planned["plans"] == model.plans

    def refused(self, kind: type[Exception], call: Any, match: str = r"\w") -> None:  # noqa: ANN401
        """`call` raises exactly `kind`, with a message, and changes nothing."""
        with pytest.raises(kind, match=match) as caught:
            call()
        assert type(caught.value) is kind
        self.same()


def ints(values: Any) -> list[int]:  # noqa: ANN401
    """Indices of any form as a flat list."""
    if isinstance(values, torch.Tensor):
        return [int(value) for value in values.flatten().tolist()]
    return [int(value) for value in np.asarray(values, dtype=np.int64).flatten()]


assert {field.name for field in fields(ExpectedPlan)} == {*TENSORS, *NUMBERS}
