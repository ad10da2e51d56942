"""The rows of `board.py`: what kvpool does, and the same done otherwise.

A group yields the name of each row and what makes and times it. Data are random, and together larger than the
caches wherever rows are large.
"""

from __future__ import annotations

import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import board_peers as peers
import numpy as np
import records
import torch
from board_measure import OURS, Side, Target, event_us

import kvpool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from board_measure import Board, Call

    Rows = Iterator[tuple[str, Callable[[], None]]]

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benches"))

from reference import FifoAllocator, PagedAllocator, SortedAllocator

HEADS = (8, 128)
BF16 = torch.bfloat16
E4M3 = torch.float8_e4m3fn
SCALE = 2.0
QWEN3_NEXT = (36, 32, 128, 128, 8192, 4)
CONTEXTS = ((1024, 1), (8192, 1), (1024, 16), (8192, 16))
HOST_BESIDE = 33e9
SAVE_US = 300.0
MATMULS = 5
Caches = tuple[torch.Tensor, torch.Tensor]


def slots_in(board: Board) -> int:
    return 2048 if board.little else 1 << 18


def some_slots(board: Board, count: int) -> torch.Tensor:
    return torch.randperm(slots_in(board), device=board.device)[:count] + 1


def rows_of(board: Board, count: int, heads: tuple[int, int]) -> Caches:
    k, v = (torch.randn(count, *heads, device=board.device).to(BF16) for _ in range(2))
    return k, v


def equal(*pairs: tuple[torch.Tensor, ...]) -> bool:
    return all(torch.equal(*pair) for pair in pairs)


def empty_caches(board: Board, heads: tuple[int, int], dtype: torch.dtype = BF16) -> Caches:
    k, v = (torch.zeros(slots_in(board) + 16, *heads, dtype=dtype, device=board.device) for _ in range(2))
    return k, v


# Rows of K and V ------------------------------------------------------------------------------------------


def put(caches: Caches, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    caches[0][slots] = k
    caches[1][slots] = v


def copy_rows(caches: Caches, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    caches[0].index_copy_(0, slots, k)
    caches[1].index_copy_(0, slots, v)


def append_calls(page: Any, caches: Caches, data: Sequence[Any]) -> list[Call]:  # noqa: ANN401
    """FlashInfer's append: one request with a page for each token can write any slots."""
    size = 16
    pages = tuple(cache.view(-1, size, *cache.shape[1:]) for cache in caches)
    calls: list[Call] = []
    for slots, _, k, v in data:
        count = len(slots)
        numbers = torch.arange(count, dtype=torch.int32, device=slots.device)
        places = (torch.zeros_like(numbers), numbers * size + slots % size)
        indptr, last = numbers.new_tensor([0, count]), numbers.new_tensor([size])
        calls.append(
            partial(page.append_paged_kv_cache, k, v, *places, pages, slots // size, indptr, last, "NHD")
        )
    return calls


def write_rows(board: Board) -> Rows:
    """set_kv_buffer beside everything that writes rows."""
    flashinfer = board.peer("set_kv", "FlashInfer", peers.flashinfer_page, of_gpu=True)
    raw = board.peer("set_kv", "vLLM's scheme", peers.Raw, of_gpu=True)

    def one(what: str, heads: tuple[int, int], count: int) -> None:
        pool = kvpool.KVPool(slots_in(board), 1, *heads, board.device, BF16)
        caches = empty_caches(board, heads)
        moved = 8 * count * heads[0] * heads[1]
        data = []
        for _ in range(board.sets(moved)):
            slots = some_slots(board, count)
            data.append((slots.int(), slots, *rows_of(board, count, heads)))
        sides: dict[str, list[Call]] = {
            OURS: [partial(pool.set_kv_buffer, 0, slots, k, v) for slots, _, k, v in data],
            "index_put": [partial(put, caches, wide, k, v) for _, wide, k, v in data],
            "index_copy_": [partial(copy_rows, caches, wide, k, v) for _, wide, k, v in data],
        }
        if raw:
            sides["vLLM's scheme"] = [partial(raw.write, caches, wide, k, v) for _, wide, k, v in data]
        if flashinfer and heads[1] == HEADS[1]:
            sides["FlashInfer"] = append_calls(flashinfer, caches, data)

        def same(name: str) -> bool:
            _, wide, k, v = data[0]
            for cache in caches:
                cache.zero_()
            sides[OURS][0]()
            sides[name][0]()
            ours = pool.k_buffer[0][wide], pool.v_buffer[0][wide]
            return equal((ours[0], k), (ours[1], v), (caches[0][wide], k), (caches[1][wide], v))

        board.compare(what, sides, same=same, moved=moved, targets=[Target("device", least=1.0)])
        pool.check()

    counts = (1, 64) if board.little else (1, 8, 64, 256, 1024, 4096, 16384, 65536)
    shapes = [(HEADS, count) for count in board.sizes(*counts)]
    shapes += [
        (heads, n) for heads in ((1, 576), (1, 128)) for n in board.sizes(*counts[3:6:2] or counts[:1])
    ]
    for heads, count in shapes:
        what = f"set_kv {heads[0]} x {heads[1]} bf16, {count} tokens"
        yield what, partial(one, what, heads, count)


def read_rows(board: Board) -> Rows:  # noqa: C901 - two rows
    """gather_kv and move_kv."""

    def gather(what: str, count: int) -> None:
        pool = kvpool.KVPool(slots_in(board), 1, *HEADS, board.device, BF16)
        caches = pool.k_buffer[0].normal_(), pool.v_buffer[0].normal_()
        moved = 8 * count * HEADS[0] * HEADS[1]
        data = []
        for _ in range(board.sets(moved)):
            slots = some_slots(board, count)
            data.append((slots.int(), slots, rows_of(board, count, HEADS), rows_of(board, count, HEADS)))

        def select(slots: torch.Tensor, out: Caches) -> None:
            for cache, to in zip(caches, out, strict=True):
                torch.index_select(cache, 0, slots, out=to)

        sides: dict[str, list[Call]] = {
            OURS: [partial(pool.gather_kv, 0, slots, out) for slots, _, out, _ in data],
            "index_select": [partial(select, wide, out) for _, wide, _, out in data],
        }

        def same(name: str) -> bool:
            sides[OURS][0]()
            sides[name][0]()
            return equal(*zip(*data[0][2:], strict=True))

        board.compare(what, sides, same=same, moved=moved)
        pool.check()

    def move(what: str, count: int) -> None:
        pool = kvpool.KVPool(slots_in(board), 1, *HEADS, board.device, BF16)
        k, v = pool.k_buffer[0].normal_(), pool.v_buffer[0].normal_()
        plain = k.clone(), v.clone()
        moved = 8 * count * HEADS[0] * HEADS[1]
        pairs = [some_slots(board, 2 * count).chunk(2) for _ in range(board.sets(moved))]

        def indexing(dst: torch.Tensor, src: torch.Tensor) -> None:
            put(plain, dst, plain[0][src], plain[1][src])

        sides: dict[str, list[Call]] = {
            OURS: [partial(pool.move_kv, dst.int(), src.int()) for dst, src in pairs],
            "indexing": [partial(indexing, dst, src) for dst, src in pairs],
        }

        def same(name: str) -> bool:
            sides[OURS][0]()
            sides[name][0]()
            return equal((k, plain[0]), (v, plain[1]))

        board.compare(what, sides, same=same, moved=moved)
        pool.check()

    for count in board.sizes(*((256,) if board.little else (256, 4096, 16384, 65536))):
        yield f"gather_kv, {count} tokens", partial(gather, f"gather_kv, {count} tokens", count)
    for count in board.sizes(*((256,) if board.little else (4096, 16384))):
        yield f"move_kv, {count} tokens", partial(move, f"move_kv, {count} tokens", count)


def narrow_rows(board: Board) -> Rows:
    """Rows of 8 bits with scales."""

    def one(what: str, count: int, dtype: torch.dtype) -> None:
        pool = kvpool.KVPool(slots_in(board), 1, *HEADS, board.device, dtype)
        caches = empty_caches(board, HEADS, torch.uint8)
        moved = 2 * count * HEADS[0] * HEADS[1] * 3
        data = []
        for _ in range(board.sets(moved)):
            slots = some_slots(board, count)
            data.append((slots.int(), slots, *rows_of(board, count, HEADS)))

        def plain(slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
            put(caches, slots, *((x / SCALE).to(dtype).view(torch.uint8) for x in (k, v)))

        sides: dict[str, list[Call]] = {
            OURS: [partial(pool.set_kv_buffer, 0, slots, k, v, SCALE, SCALE) for slots, _, k, v in data],
            "PyTorch": [partial(plain, wide, k, v) for _, wide, k, v in data],
        }
        copied = [
            torch.randint(0, 255, (moved // 2,), dtype=torch.uint8, device=board.device) for _ in range(4)
        ]
        sides["copy of as many bytes"] = [partial(copied[i].copy_, copied[i ^ 1]) for i in range(4)]

        def same(name: str) -> bool:
            if name != "PyTorch":
                return True
            sides[OURS][0]()
            sides[name][0]()
            ours = (buffer[0].view(torch.uint8)[data[0][1]] for buffer in (pool.k_buffer, pool.v_buffer))
            return equal(*zip(ours, (cache[data[0][1]] for cache in caches), strict=True))

        # Of fewer tokens the launch takes as long as the bytes.
        target = [Target("device", least=0.8, peer="copy of as many bytes")] if count >= 4096 else []
        board.compare(what, sides, same=same, moved=moved, targets=target)
        pool.check()

    counts = board.sizes(*((64,) if board.little else (256, 4096, 16384)))
    for count, dtype in [*((count, E4M3) for count in counts), (counts[-1], torch.float8_e5m2)]:
        what = f"set_kv to {dtype} with scales, {count} tokens".replace("torch.", "")
        yield what, partial(one, what, count, dtype)


# States and tables ----------------------------------------------------------------------------------------


def states(board: Board) -> Rows:  # noqa: C901 - two rows
    """Resets and copies of Qwen3-Next's states."""
    shape = (2, 2, 16, 16, 64, 4) if board.little else QWEN3_NEXT
    layers, heads, k_dim, v_dim, channels, taps = shape
    one_state = layers * (heads * k_dim * v_dim * 4 + channels * (taps - 1) * 2)
    slots = 48

    def one(what: str, count: int, *, is_copy: bool) -> None:
        pool = kvpool.GDNPool(slots, *shape, board.device, BF16)
        plain = [tensor.normal_().clone() for tensor in (pool.recurrent_state, pool.conv_state)]
        pairs = [(torch.randperm(slots, device=board.device)[: 2 * count] + 1).chunk(2) for _ in range(3)]
        flat = [
            torch.randint(0, 255, (one_state * count,), dtype=torch.uint8, device=board.device)
            for _ in range(4 if count == 1 else 2)
        ]

        def copy(src: torch.Tensor, dst: torch.Tensor) -> None:
            for tensor in plain:
                tensor[:, dst] = tensor[:, src]

        def reset(dst: torch.Tensor) -> None:
            for tensor in plain:
                tensor.index_fill_(1, dst, 0)

        sides: dict[str, list[Call]]
        if is_copy:
            sides = {
                OURS: [partial(pool.copy_states, src.int(), dst.int()) for src, dst in pairs],
                "indexing": [partial(copy, src, dst) for src, dst in pairs],
                "copy_ of as many bytes": [partial(flat[i].copy_, flat[i - 1]) for i in range(len(flat))],
            }
        else:
            sides = {
                OURS: [partial(pool.reset_states, dst.int()) for _, dst in pairs],
                "index_fill_": [partial(reset, dst) for _, dst in pairs],
                "zero_ of as many bytes": [tensor.zero_ for tensor in flat],
            }

        def same(name: str) -> bool:
            if name not in {"indexing", "index_fill_"}:
                return True
            sides[OURS][0]()
            sides[name][0]()
            return equal((pool.recurrent_state, plain[0]), (pool.conv_state, plain[1]))

        board.compare(what, sides, same=same, moved=(1 + is_copy) * count * one_state)

    for count in board.sizes(1, 8, 16):
        for is_copy in (False, True):
            what = f"{'copy' if is_copy else 'reset'}_states of {count}, Qwen3-Next"
            yield what, partial(one, what, count, is_copy=is_copy)


def indices(board: Board) -> Rows:
    """The slots of all requests in one list."""
    batch, context, groups = (4, 64, 2) if board.little else (256, 2048, 8)
    what = f"kv_indices of {batch} x {context}"

    def one() -> None:
        table = kvpool.ReqToTokenPool(batch * groups, context, board.device)
        inner = table.req_to_token
        inner.copy_(torch.randint(1, 1 << 20, inner.shape, dtype=torch.int32, device=board.device))
        rows = torch.tensor(table.alloc(batch * groups), device=board.device)
        chosen = [
            part.contiguous() for part in rows[torch.randperm(len(rows), device=board.device)].chunk(groups)
        ]
        indptr = torch.arange(batch + 1, dtype=torch.int32, device=board.device) * context
        lens = torch.full((batch,), context, device=board.device)
        outs = {
            name: torch.empty(groups, batch * context, dtype=torch.int32, device=board.device)
            for name in "ab"
        }

        def select(number: int) -> None:
            torch.index_select(inner, 0, chosen[number], out=outs["b"][number].view(batch, context))

        sides: dict[str, list[Call]] = {
            OURS: [
                partial(table.build_kv_indices, chosen[i].int(), indptr, outs["a"][i]) for i in range(groups)
            ],
            "index_select of whole rows": [partial(select, i) for i in range(groups)],
        }
        sglang = board.peer(what, "SGLang", peers.sglang)
        if sglang:

            def triton(number: int) -> None:
                arguments = (inner, chosen[number], lens, indptr, None, outs["b"][number], inner.stride(0))
                sglang.kv_indices[(batch,)](*arguments)

            sides["SGLang"] = [partial(triton, i) for i in range(groups)]

        def same(name: str) -> bool:
            outs["b"].zero_()
            for ours, its in zip(sides[OURS], sides[name], strict=True):
                ours()
                its()
            return equal((outs["a"], outs["b"]))

        moved = 8 * batch * context
        board.compare(what, sides, same=same, moved=moved, targets=[Target("device", most_us=3.8)])

    yield what, one


# Bookkeeping ----------------------------------------------------------------------------------------------


def allocations(board: Board) -> Rows:
    """alloc and free of slots."""
    size = slots_in(board)

    def one(what: str, count: int, page: int, *, is_sorted: bool) -> None:
        ours = kvpool.TokenToKVPoolAllocator(size, board.device, page, is_sorted)
        plain = PagedAllocator(size, page, board.device) if page > 1 else None
        lists = plain or (SortedAllocator if is_sorted else FifoAllocator)(size, board.device)
        found: dict[str, Any] = {OURS: ours, "lists": lists}
        make = partial(peers.sglang_allocator, size, page, board.device, is_sorted=is_sorted)
        theirs = board.peer(what, "SGLang", make)
        if theirs:
            found["SGLang"] = theirs

        def same(name: str) -> bool:
            pair: tuple[Any, Any] = ours, found[name]
            for allocator in pair:
                allocator.clear()
            good = True
            for _ in range(3):
                taken = [allocator.alloc(count) for allocator in pair]
                good = good and equal(tuple(slots.long().cpu() for slots in taken))
                for allocator, slots in zip(pair, taken, strict=True):
                    allocator.free(slots)
            return good

        def pair(allocator: Any) -> None:  # noqa: ANN401
            allocator.free(allocator.alloc(count))

        sides = {name: Side([partial(pair, allocator)], allocator.clear) for name, allocator in found.items()}
        target = [Target("host", least=3.0, peer="SGLang")] if count == 4096 else []
        board.compare(what, sides, same=same, device=False, targets=target)

    for page, is_sorted in ((1, True), (1, False), (16, True)):
        for count in board.sizes(*((16,) if board.little else (1, 16, 128, 4096)[page > 1 :])):
            order = f"pages of {page}" if page > 1 else "sorted" if is_sorted else "FIFO"
            what = f"alloc + free of {count}, {order}"
            yield what, partial(one, what, count, page, is_sorted=is_sorted)


PAGE = 16


class Prompts:
    """Slots of the same prompts by kvpool and by SGLang, and of the steps after them, in pages of 16."""

    def __init__(self, board: Board, what: str, batch: int, tokens: int) -> None:
        size = 1 << (16 if board.little else 20)
        self.tokens = tokens
        self.ours = kvpool.TokenToKVPoolAllocator(size, board.device, PAGE)
        self.none, self.full = np.zeros(batch, np.int32), np.full(batch, tokens, np.int32)
        self.now: Any = self.full
        make = partial(peers.sglang_allocator, size, PAGE, board.device)
        self.theirs = board.peer(what, "SGLang", make)
        # SGLang wants lengths on both sides.
        none, full, last = (torch.full((batch,), value) for value in (0, tokens, -1))
        self.lens = full.to(board.device), full
        device_none, device_last = none.to(board.device), last.to(board.device)
        self.arguments = (device_none, none, *self.lens, device_last, batch * tokens)

    def extend(self) -> torch.Tensor:
        slots = self.ours.alloc_extend(self.none, self.full, self.none)
        assert slots is not None
        return slots

    def extend_theirs(self) -> Any:  # noqa: ANN401
        return self.theirs.alloc_extend(*self.arguments)

    def begin(self) -> None:
        self.ours.clear()
        self.last: Any = self.extend()[self.tokens - 1 :: self.tokens].clone()
        self.now = self.full

    def begin_theirs(self) -> None:
        self.theirs.clear()
        self.their_last = self.extend_theirs()[self.tokens - 1 :: self.tokens].clone()
        self.their_lens = [lens.clone() for lens in self.lens]

    def step(self) -> None:
        self.now = self.now + 1
        self.last = self.ours.alloc_decode(self.now, self.last)

    def step_theirs(self) -> None:
        for lens in self.their_lens:
            lens.add_(1)
        self.their_last = self.theirs.alloc_decode(*self.their_lens, self.their_last)


def admissions(board: Board, what: str, batch: int, tokens: int) -> None:
    """Prompts from their lengths on the host to rows of the table."""
    count, width = 20, 1024
    prompts = Prompts(board, what, batch, tokens)
    table = kvpool.ReqToTokenPool(batch * count, width, board.device)
    planner = kvpool.BatchPlanner(table, prompts.ours, batch, batch * tokens, block_table=False)
    groups = np.array(table.alloc(batch * count), np.int32).reshape(count, batch)

    begun: list[Any] = []

    def ours(group: Any) -> None:  # noqa: ANN401
        begun.append(group)
        planner.extend(group, prompts.none, prompts.full)

    def back() -> None:
        for group in begun:
            planner.truncate(group, prompts.none)
        begun.clear()

    sides = {OURS: Side([partial(ours, group) for group in groups], back)}
    lens = [torch.full((batch,), value) for value in (0, tokens, -1)]
    pinned = lens if board.dry else [tensor.pin_memory() for tensor in lens]
    written = torch.zeros(batch + 1, width, dtype=torch.int32, device=board.device)
    numbers = torch.arange(1, batch + 1, device=board.device)
    unread = torch.zeros_like(numbers)

    def theirs() -> None:
        none, full, last = (tensor.to(board.device, non_blocking=True) for tensor in pinned)
        out = prompts.theirs.alloc_extend(none, lens[0], full, lens[1], last, batch * tokens)
        arguments = (written, numbers, unread, none, full, full - none, out, width)
        peers.sglang().write_table[(batch,)](*arguments)

    if prompts.theirs:
        sides["SGLang"] = Side([theirs], prompts.theirs.clear)

    def same(_: str) -> bool:
        prompts.theirs.clear()
        ours(groups[0])
        theirs()
        rows = table.req_to_token.cpu()[groups[0].tolist()]
        return equal((rows[:, :tokens], written.cpu()[1:, :tokens]))

    board.compare(what, sides, same=same, device=False, calls=count)


def slots_of_steps(board: Board) -> Rows:
    """The slots of prompts and of decode steps."""
    target = [Target("host", least=5.0, peer="SGLang")]

    def extend(what: str, batch: int, tokens: int) -> None:
        prompts = Prompts(board, what, batch, tokens)
        sides = {OURS: Side([prompts.extend], prompts.ours.clear)}
        if prompts.theirs:
            sides["SGLang"] = Side([prompts.extend_theirs], prompts.theirs.clear)

        def same(_: str) -> bool:
            prompts.ours.clear()
            return equal((prompts.extend().long().cpu(), prompts.extend_theirs().cpu()))

        board.compare(what, sides, same=same, device=False, calls=20, targets=target)

    def decode(what: str, batch: int) -> None:
        prompts = Prompts(board, what, batch, 48 if board.little else 512)
        sides = {OURS: Side([prompts.step], prompts.begin)}
        if prompts.theirs:
            sides["SGLang"] = Side([prompts.step_theirs], prompts.begin_theirs)

        def same(_: str) -> bool:
            prompts.begin()
            prompts.begin_theirs()
            good = True
            for _number in range(PAGE + 2):
                prompts.step()
                prompts.step_theirs()
                good = good and equal((prompts.last.long().cpu(), prompts.their_last.cpu()))
            return good

        board.compare(what, sides, same=same, device=False, calls=20, targets=target)

    shape = (4, 48) if board.little else (32, 512)
    what = f"alloc_extend of {shape[0]} x {shape[1]}, pages of 16"
    yield what, partial(extend, what, *shape)
    what = f"prompts of {shape[0]} x {shape[1]}, pages of 16: slots, table and lists"
    yield what, partial(admissions, board, what, *shape)
    what = "alloc_decode of 256, pages of 16"
    yield what, partial(decode, what, 8 if board.little else 256)


class OurSteps:
    """Decode steps of a planner. `keep` holds the last plan, as a loop does that still reads it."""

    def __init__(self, board: Board, batch: int, context: int, page: int) -> None:
        self.table = kvpool.ReqToTokenPool(batch, context + 128, board.device)
        allocator = kvpool.TokenToKVPoolAllocator(batch * (context + 128), board.device, page)
        at_once = max(1, min(batch, (1 << 18) // context))
        most = max(batch, at_once * context)
        self.planner = kvpool.BatchPlanner(self.table, allocator, batch, most, block_table=False)
        self.rows = np.array(self.table.alloc(batch), np.int32)
        self.page = page
        self.context = np.full(batch, context, np.int32)
        for begin in range(0, batch, at_once):
            rows = self.rows[begin : begin + at_once]
            if self.planner.extend(rows, np.zeros_like(rows), self.context[: len(rows)]) is None:
                raise RuntimeError("there are no slots for the prompts")
        self.lens = self.context
        self.plan: kvpool.BatchPlan | None = None

    def back(self) -> None:
        self.plan = None
        self.planner.truncate(self.rows, self.context)
        self.lens = self.context

    def step(self, *, keep: bool) -> None:
        self.lens = self.lens + 1
        plan = self.planner.decode(self.rows, self.lens)
        if keep:
            self.plan = plan

    def is_right(self) -> bool:
        """Whether a plan lists what the table holds."""
        self.step(keep=True)
        plan: Any = self.plan
        table, listed, begins = self.table.req_to_token.cpu(), plan.kv_indices.cpu(), plan.kv_indptr.cpu()
        right = True
        for i, row in enumerate(self.rows.tolist()):
            pages = table[row, : int(self.lens[i]) : self.page] // self.page
            right = right and equal((listed[begins[i] : begins[i + 1]], pages.to(listed.dtype)))
        self.back()
        return right


class SglangSteps:
    """The same as SGLang's scheduler does it: slots, the table, running sums and the kernel of indices."""

    def __init__(self, board: Board, batch: int, context: int, page: int) -> None:
        self.device, self.batch, self.context, self.page = board.device, batch, context, page
        self.allocator = peers.sglang_allocator(batch * (context + 128), page, board.device)
        self.table = torch.zeros(batch + 1, context + 128, dtype=torch.int32, device=board.device)
        self.rows = torch.arange(1, batch + 1, device=board.device)
        for row in range(1, batch + 1):
            self.table[row, :context] = self.allocator.alloc(context).int()
        self.free = self.allocator.free_pages
        self.indptr = torch.zeros(batch + 1, dtype=torch.int32, device=board.device)
        self.back()

    def back(self) -> None:
        self.allocator.free_pages = self.free
        self.lens = torch.full((self.batch,), self.context, device=self.device)
        self.host = torch.full((self.batch,), self.context)
        self.total = self.batch * self.context

    def step(self) -> None:
        if self.page == 1:
            out = self.allocator.alloc(self.batch)
        else:
            last = self.table[self.rows, self.lens - 1]
            out = self.allocator.alloc_decode(self.lens + 1, self.host + 1, last)
        self.table[self.rows, self.lens.clone()] = out.int()
        self.lens.add_(1)
        self.host.add_(1)
        self.total += self.batch
        self.indptr[1:] = torch.cumsum(self.lens, dim=0)
        self.listed = torch.empty(self.total, dtype=torch.int32, device=self.device)
        arguments = (self.table, self.rows, self.lens, self.indptr, None, self.listed, self.table.stride(0))
        peers.sglang().kv_indices[(self.batch,)](*arguments)
        self.positions = self.lens - 1

    def is_right(self) -> bool:
        self.step()
        table, count = self.table.cpu(), self.context + 1
        expected = torch.cat([table[row, :count] for row in range(1, self.batch + 1)])
        right = equal((self.listed.cpu(), expected)) and len(set(expected.tolist())) == len(expected)
        self.back()
        return right


def steps(board: Board) -> Rows:
    """Decode steps: slots, table and the lists of an attention kernel."""

    def one(what: str, batch: int, context: int, page: int) -> None:
        ours = OurSteps(board, batch, context, page)
        theirs = None
        if batch >= 256 or board.little:
            make = partial(SglangSteps, board, batch, context, page)
            theirs = board.peer(what, "SGLang", make)
        if not ours.is_right() or not (theirs is None or theirs.is_right()):
            raise AssertionError(f"{what}: a step's indices are not those of the table")
        goals = [Target("host", least=8.0), Target("host", most_us=20.0)] if batch == 256 else []
        for keep in (False, True):
            sides = {OURS: Side([partial(ours.step, keep=keep)], ours.back)}
            if theirs:
                sides["SGLang"] = Side([theirs.step], theirs.back)
            name = f"{what}, the last plan {'kept' if keep else 'dropped'}"
            board.compare(name, sides, device=False, calls=20, targets=goals)

    cases = [(256, *case) for case in board.sizes(*CONTEXTS)] + [(n, 1024, 1) for n in board.sizes(1, 16, 64)]
    for batch, context, page in [(4, 64, 1), (4, 64, 16)] if board.little else cases:
        what = f"decode of {batch}, context {context}, pages of {page}"
        yield what, partial(one, what, batch, context, page)


def buffers(board: Board) -> Rows:
    """Buffers and workspaces of a pass."""
    count = 70 if board.little else 1750
    shapes = [((1 + number % 7) * 64, 128) for number in range(count)]

    def passes(take: Callable[[tuple[int, int]], object], back: Call = lambda: None) -> Side:
        """Everything of a pass, then all of it goes back."""
        return Side([*(partial(take, shape) for shape in shapes), back], back)

    def one(what: str, make: Callable[[], Any], pause: float = 0.0) -> None:
        pool = make()

        def with_tensor(shape: tuple[int, int]) -> object:
            return pool.alloc(shape, torch.float32).tensor

        take = (
            with_tensor if isinstance(pool, kvpool.BufferPool) else partial(pool.empty, dtype=torch.float32)
        )
        sides = {
            OURS: passes(take, pool.reset),
            "torch.empty": passes(partial(torch.empty, dtype=torch.float32, device=board.device)),
        }
        board.compare(what, sides, device=False, calls=20 if pause else count + 1, pause=pause)

    space = partial(kvpool.Workspace, board.device)
    for rounding in ("pow2", "fine"):
        what = f"BufferPool.alloc, {rounding}"
        yield what, partial(one, what, partial(kvpool.BufferPool, board.device, rounding=rounding))
    yield "Workspace.empty", partial(one, "Workspace.empty", space)
    yield "Workspace.empty after 3 ms", partial(one, "Workspace.empty after 3 ms of idleness", space, 0.003)


def first_pool(board: Board) -> Rows:
    """The first pool of this process, which has used no kernel yet, and the second."""

    def one() -> None:
        times = []
        for _ in range(2):
            board.synchronize()
            start = time.perf_counter()
            kvpool.KVPool(64, 1, 1, 8, board.device, torch.float32)
            times.append((time.perf_counter() - start) * 1e6)
        if board.dry:
            board.made("first pool of a process")
        else:
            board.told("first pool of a process", "host", {OURS: times[0], "the second": times[1]})

    yield "first pool of a process", one


# The host tier --------------------------------------------------------------------------------------------


class Tier:
    """A prompt of 4,096 tokens that is saved to host memory and loaded again."""

    def __init__(self, board: Board, page: int) -> None:
        self.board = board
        self.layers, self.tokens = (2, 128) if board.little else (32, 4096)
        self.bytes = 2 * self.tokens * self.layers * HEADS[0] * HEADS[1] * 2
        self.kv = kvpool.KVPool(2 * self.tokens, self.layers, *HEADS, board.device, BF16, page_size=page)
        for buffer in (*self.kv.k_buffer, *self.kv.v_buffer):
            buffer.normal_()
        self.allocator = kvpool.TokenToKVPoolAllocator(2 * self.tokens, board.device, page)
        self.tier = kvpool.HostTier(self.kv, 3 * self.tokens)
        self.tier.wait_page_locked(60)
        self.cache = kvpool.PrefixCache(self.allocator, tiers=(self.tier,))
        self.prompt = torch.randperm(100_000)[: self.tokens].int()
        self.host_us = 0.0

    def save(self, beside: Call = lambda: None) -> float:
        """Seconds until all of a prompt that nobody knows is in host memory."""
        self.cache.clear()
        slots = self.allocator.alloc(self.tokens)
        assert slots is not None
        self.slots = slots.long()
        self.board.synchronize()
        start = time.perf_counter()
        self.cache.insert(self.prompt, slots)
        self.host_us = (time.perf_counter() - start) * 1e6
        beside()
        self.cache.wait_written()
        return time.perf_counter() - start

    def load(self, beside: Call = lambda: None) -> float:
        """Seconds until all of it is back on the device, whose slots others have had."""
        self.cache.evict(self.tokens)
        self.board.synchronize()
        with self.cache.match(self.prompt) as lease:
            start = time.perf_counter()
            load = lease.load()
            if load is None or load.length != self.tokens:
                raise AssertionError(f"a load of {load and load.length} tokens instead of {self.tokens}")
            beside()
            load.wait_layer(self.layers - 1)
            if not self.board.dry:
                torch.cuda.current_stream().synchronize()
            seconds = time.perf_counter() - start
            while not load.query():
                pass
            self.slots = lease.slots.long()
        self.board.synchronize()
        return seconds

    def is_right(self) -> bool:
        """Whether what comes back is what went."""
        self.save()
        ends = self.kv.k_buffer[0], self.kv.v_buffer[self.layers - 1]
        expected = [buffer[self.slots] for buffer in ends]
        self.cache.evict(self.tokens)
        for buffer in (*self.kv.k_buffer, *self.kv.v_buffer):
            buffer.zero_()
        self.load()
        right = equal(*zip(expected, (buffer[self.slots] for buffer in ends), strict=True))
        for buffer in (*self.kv.k_buffer, *self.kv.v_buffer):
            buffer.normal_()
        return right


class Matmul:
    """A matrix product on a stream of its own."""

    def __init__(self, board: Board) -> None:
        side = 64 if board.little else 8192
        self.a, self.b, self.out = (torch.randn(side, side, device=board.device).to(BF16) for _ in range(3))
        self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._ends: Any = None
        self.us()

    def start(self) -> None:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self.stream):
            begin.record()
            for _ in range(MATMULS):
                torch.mm(self.a, self.b, out=self.out)
            end.record()
        self._ends = begin, end

    def started_us(self) -> float:
        torch.cuda.synchronize()
        return float(self._ends[0].elapsed_time(self._ends[1])) * 1e3 / MATMULS

    def us(self) -> float:
        self.start()
        return self.started_us()


def tier(board: Board) -> Rows:
    """Saves and loads of the host tier, alone and beside a matrix product."""

    def one(what: str, page: int) -> None:
        scene = Tier(board, page)
        if not scene.is_right():
            raise AssertionError(f"{what}: what was loaded is not what was saved")
        if board.dry:
            board.made(what)
            return
        matmul = Matmul(board)
        found: dict[str, list[float]] = {}

        def add(name: str, us: float) -> None:
            found.setdefault(name, []).append(us)

        for _ in range(5):
            add("matmul", matmul.us())
            for name, run in (("save", scene.save), ("load", scene.load)):
                add(name, run() * 1e6)
                if name == "save":
                    add("host", scene.host_us)
                add(f"{name} beside", run(matmul.start) * 1e6)
                add(f"matmul beside {name}", matmul.started_us())
        us = {name: statistics.median(times) for name, times in found.items()}
        for name, engine in (("save", "d2h"), ("load", "h2d")):
            times = {OURS: us[name], "the copy engine": board.ceiling_us(engine, scene.bytes)}
            size = scene.bytes
            board.told(f"{name} of {what}", "host", times, [Target("host", least=0.93)], size)
            limit = [Target("host", most_us=round(size / HOST_BESIDE * 1e6))]
            board.told(
                f"{name} of {what}, beside a matmul", "host", {OURS: us[f"{name} beside"]}, limit, size
            )
            slowed = {OURS: us[f"matmul beside {name}"], "alone": us["matmul"]}
            goal = [Target("host", least=0.95)] if name == "save" else []
            board.told(f"matmul of 8192^3 beside the {name} of {what}", "host", slowed, goal)
        limit = [Target("host", most_us=SAVE_US)]
        board.told(f"save of {what}, time of the host", "host", {OURS: us["host"]}, limit)

    for page in board.sizes(1, 16, 64):
        what = f"{128 if board.little else 4096} tokens, pages of {page}"
        yield what, partial(one, what, page)


# A step of a model, and the card ---------------------------------------------------------------------------


def layers(board: Board) -> Rows:
    """A decode step's calls to the pools: rows written and gathered, and attention, for 32 layers."""
    batch, context, depth = (2, 16, 2) if board.little else (64, 1024, 32)
    what = f"decode of {batch}, context {context}: set_kv, gather_kv and SDPA of {depth} layers"

    def one() -> None:
        slots = batch * (context + 1)
        pool = kvpool.KVPool(slots, depth, *HEADS, board.device, BF16)
        for buffer in (*pool.k_buffer, *pool.v_buffer):
            buffer.normal_()
        order = torch.randperm(slots, device=board.device)[: batch * context] + 1
        last = order.view(batch, context)[:, -1].contiguous()
        narrow, narrow_last = order.int(), last.int()
        k, v = rows_of(board, batch, HEADS)
        q = torch.randn(batch, 32, 1, HEADS[1], device=board.device).to(BF16)
        out = rows_of(board, batch * context, HEADS)
        results: dict[str, torch.Tensor] = {}

        def attention() -> torch.Tensor:
            k, v = (rows.view(batch, context, *HEADS).transpose(1, 2) for rows in out)
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

        def ours() -> None:
            for layer in range(depth):
                pool.set_kv_buffer(layer, narrow_last, k, v)
                pool.gather_kv(layer, narrow, out)
                results[OURS] = attention()

        def plain() -> None:
            for caches in zip(pool.k_buffer, pool.v_buffer, strict=True):
                put(caches, last, k, v)
                for cache, to in zip(caches, out, strict=True):
                    torch.index_select(cache, 0, order, out=to)
                results["indexing"] = attention()

        def same(_: str) -> bool:
            ours()
            plain()
            return equal((results[OURS], results["indexing"]))

        board.compare(what, {OURS: [ours], "indexing": [plain]}, same=same, calls=3)

    yield what, one


def card(board: Board) -> Rows:
    """The ceilings of the card."""

    def one() -> None:
        if board.dry:
            board.made("ceilings")
            return
        found = {name: f"{board.ceiling(name):,.0f} GB/s" for name in ("d2d", "zeros", "h2d", "d2h")}
        raw = board.peer("ceilings", "an empty kernel", peers.Raw)
        if raw:
            side = Side([raw.nothing])
            side.capture()
            found["an empty kernel"] = f"{statistics.median(side.device_us() for _ in range(7)):.2f} us"
            found["its launch"] = f"{side.host_us(200, 0):.2f} us of the host"
        small = torch.randn(8, device=board.device)
        found["zero_ of 8"] = f"{event_us(lambda _: small.zero_(), 200):.2f} us in a burst"
        print(found, flush=True)
        records.add("ceilings", **found)

    yield "ceilings", one


# Each group with the seconds that it may take.
GROUPS: dict[str, tuple[float, Callable[[Board], Rows]]] = {
    "card": (40, card),
    "first pool": (20, first_pool),
    "tier": (70, tier),
    "steps": (50, steps),
    "slots": (30, slots_of_steps),
    "indices": (25, indices),
    "allocations": (40, allocations),
    "states": (40, states),
    "reads": (40, read_rows),
    "8 bit": (30, narrow_rows),
    "buffers": (25, buffers),
    "layers": (25, layers),
    "writes": (90, write_rows),
}
