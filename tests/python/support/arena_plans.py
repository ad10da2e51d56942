"""A naive planner over a layout, and the arrays that a plan must have."""

from __future__ import annotations

from typing import Any

import devices
import numpy as np
import torch

from kvpool import ArenaPlan, ArenaPlanner, CacheArena, CacheLayout, Group, Plane

PAGE = 4
COMMON = ("positions", "req_pool_indices", "seq_lens", "cache_seqlens", "qo_indptr", "cu_seqlens_q")
PAGED = ("out_cache_loc", "slot_mapping", "kv_indptr", "kv_indices", "kv_last_page_len", "block_table")


def kv(dim: int = 8) -> list[Plane]:
    return [Plane("k", "float32", (2, dim)), Plane("v", "float32", (2, dim))]


LAYOUT = CacheLayout(
    [
        Group("full", "full", [0, 5], kv()),
        Group("window", "window", [1], kv(16), tokens=6),
        Group("sinks", "window", [2], kv(), tokens=5, sinks=6),
        Group("chunk", "chunk", [3], kv(), tokens=8),
        Group("chain", "full", [4], [Plane("k", "float32", (8,))], stride=2),
        Group("long", "full", [6], [Plane("k", "float32", (8,))], stride=8),
        Group("state", "state", [7, 8], [Plane("recurrent", "float32", (4, 8))]),
    ],
    page_size=PAGE,
)
PLAIN = CacheLayout(
    [Group("full", "full", [0], kv()), Group("window", "window", [1], kv(), tokens=8)], page_size=PAGE
)


def make(
    layout: CacheLayout = LAYOUT,
    arena_bytes: int = 1 << 18,
    sizes: tuple[int, int, int, int] = (5, 48, 6, 64),
    **options: Any,  # noqa: ANN401
) -> ArenaPlanner:
    return ArenaPlanner(CacheArena(layout, arena_bytes, devices.current()), *sizes, **options)


def numbers(array: Any) -> list[Any]:  # noqa: ANN401
    found: list[Any] = array.tolist()
    return found


# What a group keeps


def tokens_of_unit(group: Group) -> int:
    return max(PAGE, group.stride)


def first_seen(group: Group, tokens: int) -> int:
    """The first token, sinks apart, that the next one sees."""
    if group.kind == "window":
        assert group.tokens is not None
        return max(0, tokens - group.tokens + 1)
    if group.kind == "chunk":
        assert group.tokens is not None
        return tokens - tokens % group.tokens
    return 0


class Naive:
    """What each request has: its length, and the positions of its units by group."""

    def __init__(self, planner: ArenaPlanner) -> None:
        self.planner = planner
        self.groups = planner.arena.layout.groups
        self.lens: dict[int, int] = {}
        self.kept: dict[tuple[int, str], set[int]] = {}

    def begin(self, row: int) -> None:
        self.lens[row] = 0
        for group in self.groups:
            self.kept[row, group.name] = set()

    def trim(self, row: int) -> None:
        """Drop what the next token does not see."""
        for group in self.groups:
            if group.kind != "state":
                each = tokens_of_unit(group)
                first, sinks = first_seen(group, self.lens[row]) // each, -(-group.sinks // each)
                kept = self.kept[row, group.name]
                self.kept[row, group.name] = {at for at in kept if at >= first or at < sinks}

    def grow(self, row: int, seq: int) -> None:
        for group in self.groups:
            if group.kind == "state":
                by_layer = self.planner.arena.slabs.by_layer(group.name)
                self.kept[row, group.name] = set(range(len(group.layers) if by_layer else 1))
            else:
                each = tokens_of_unit(group)
                begin = -(-self.lens[row] // each)
                self.kept[row, group.name] |= set(range(begin, -(-seq // each)))
        self.lens[row] = seq

    def can_shrink(self, row: int, seq: int) -> bool:
        """Whether the next token after `seq` tokens sees only units that are kept."""
        for group in self.groups:
            if group.kind in {"window", "chunk"}:
                each = tokens_of_unit(group)
                seen = range(first_seen(group, seq) // each, -(-seq // each))
                if not set(seen) <= self.kept[row, group.name]:
                    return False
        return True

    def shrink(self, row: int, seq: int) -> None:
        for group in self.groups:
            if group.kind != "state" or seq == 0:
                end = -(-seq // tokens_of_unit(group))
                self.kept[row, group.name] = {at for at in self.kept[row, group.name] if at < end}
        self.lens[row] = seq

    def finish(self, row: int) -> None:
        del self.lens[row]
        for group in self.groups:
            del self.kept[row, group.name]

    def check(self) -> None:
        """Every unit has one request, and every request the units that it must have."""
        self.planner.verify()
        self.planner.arena.verify()
        stats = self.planner.stats()
        assert stats["rows"] == len(self.lens)
        assert stats["tokens"] == sum(self.lens.values())
        for group in self.groups:
            owned: list[int] = []
            for row, length in self.lens.items():
                assert self.planner.seq_len(row) == length
                units = self.planner.units(row, group.name)
                assert set(units) == self.kept[row, group.name], (row, group.name)
                owned += units.values()
            assert len(set(owned)) == len(owned)
            assert 0 not in owned
            assert self.planner.arena.group_stats(group.name)["in_use"] == len(owned)


def expected(planner: ArenaPlanner, plan: ArenaPlan, batch: list[tuple[int, int, int]]) -> dict[str, Any]:
    """The arrays of a plan of `(row, prefix, seq)`, those of padding included, by their names."""
    starts = np.cumsum([0, *(seq - prefix for _, prefix, seq in batch)]).tolist()
    found: dict[str, Any] = {
        "positions": [at for _, prefix, seq in batch for at in range(prefix, seq)],
        "req_pool_indices": [row for row, _, _ in batch],
        "seq_lens": [seq for _, _, seq in batch],
        "qo_indptr": starts,
    }
    found["cache_seqlens"], found["cu_seqlens_q"] = found["seq_lens"], starts
    for group in planner.arena.layout.groups:
        name = group.name
        units = [planner.units(row, name) if row else {} for row, _, _ in batch]
        if group.kind == "state":
            width = len(group.layers) if planner.arena.slabs.by_layer(name) else 1
            found[name] = {"state_indices": [[of.get(at, 0) for of in units] for at in range(width)]}
            continue
        each = tokens_of_unit(group)
        entries = each // group.stride
        slots, lists, lasts = [], [], []
        for (row, prefix, seq), of in zip(batch, units, strict=True):
            whole = seq // group.stride
            lasts.append((whole - 1) % entries + 1 if whole else 0)
            shown = -(-whole // entries)
            lists.append([unit for at, unit in sorted(of.items()) if at < shown] if row else [0] * shown)
            for at in range(prefix, seq):
                ends = row and (at + 1) % group.stride == 0
                slots.append(of[at // each] * entries + at % each // group.stride if ends else 0)
        width = -(-planner.max_context_len // each)
        found[name] = {
            "out_cache_loc": slots,
            "slot_mapping": [slot or -1 for slot in slots],
            "kv_indptr": np.cumsum([0, *map(len, lists)]).tolist(),
            "kv_indices": [unit for units in lists for unit in units],
            "kv_last_page_len": lasts,
            "block_table": [[of.get(at, 0) for at in range(width)] for of in units],
        }
    assert plan.padded_batch_size == len(batch)
    assert plan.padded_num_tokens == starts[-1]
    assert plan.batch_size == sum(1 for row, _, _ in batch if row)
    assert plan.num_tokens == sum(seq - prefix for row, prefix, seq in batch if row)
    assert plan.max_seqlen_q == max((seq - prefix for _, prefix, seq in batch), default=0)
    assert plan.max_seqlen_k == max((seq for _, _, seq in batch), default=0)
    return found


def check_plan(planner: ArenaPlanner, plan: ArenaPlan | None, batch: list[tuple[int, int, int]]) -> None:
    assert plan is not None
    wanted = expected(planner, plan, batch)
    for name in COMMON:
        tensor = getattr(plan, name)
        assert tensor.dtype == torch.int32
        assert tensor.device.type == devices.current()
        assert numbers(tensor) == wanted[name] == numbers(plan.host(name)), name
    for group in planner.arena.layout.groups:
        of = plan.group(group.name)
        for name in (*PAGED, "state_indices"):
            tensor, host = getattr(of, name), of.host(name)
            if name not in wanted[group.name]:
                assert tensor is host is None
                continue
            assert host is not None
            assert tensor.dtype == (torch.int64 if name == "slot_mapping" else torch.int32)
            assert numbers(tensor) == wanted[group.name][name] == numbers(host), (group.name, name)
            assert not host.flags.writeable
