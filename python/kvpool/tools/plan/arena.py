"""An arena for everything that a model keeps, and what other ways do with the same memory."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from kvpool.errors import ConfigError
from kvpool.models.layout import layout_of
from kvpool.tools.plan.engines import (
    LEAST_TOKENS,
    REQUEST_TOKENS,
    Usage,
    sglang_usage,
    split_usage,
    vllm_usage,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvpool import CacheLayout, SlabLayout
    from kvpool.models.model import Model
    from kvpool.tools.plan.solver import PlanConfig


@dataclass(frozen=True)
class ArenaPlan:
    """An arena for a model.

    Attributes:
        layout: What the model keeps, on one GPU.
        slabs: How it lies in the arena.
        usages: What the arena and other ways do with the same bytes: kvpool's arena first.
        notes: Ways that cannot hold the model, and why.
    """

    layout: CacheLayout
    slabs: SlabLayout
    usages: tuple[Usage, ...]
    notes: tuple[str, ...]

    @property
    def least_bytes(self) -> int:
        """Bytes that a request of `LEAST_TOKENS` tokens needs, in whole units of each group."""
        return self.layout.request_bytes(LEAST_TOKENS)

    def as_json(self) -> dict[str, Any]:
        """Return the plan as plain values."""
        slabs = self.slabs
        return {
            "fingerprint": self.layout.fingerprint,
            "page_size": self.layout.page_size,
            "groups": {
                group.name: {
                    "kind": group.kind,
                    "tokens": group.tokens,
                    "stride": group.stride,
                    "layers": list(group.layers),
                    "aliases": group.aliases,
                    "planes": {plane.name: list(plane.shape) for plane in group.planes},
                    "entry_bytes": group.entry_bytes,
                    "units_of_a_slab": slabs.units(group.name),
                    "by_layer": slabs.by_layer(group.name),
                }
                for group in self.layout.groups
            },
            "slab_bytes": slabs.slab_bytes,
            "num_slabs": slabs.num_slabs,
            "least_bytes": self.least_bytes,
            "usages": [asdict(usage) for usage in self.usages],
            "notes": list(self.notes),
        }


def make_arena_plan(model: Model, config: PlanConfig) -> ArenaPlan:
    """Lay out an arena of the memory for the pools.

    Raises:
        ConfigError: If the model cannot be divided among GPUs, or the arena is too small for it.
    """
    layout = layout_of(
        model,
        page_size=config.page_size,
        dtype=config.storage_dtype,
        state_dtype=config.state_dtype,
        tp=config.tp,
    )
    budget, page_size = config.budget_bytes, config.page_size
    slabs = layout.slabs(budget)
    usages, notes = [_arena_usage(layout, slabs)], []
    others: dict[str, Callable[[], Usage]] = {
        "kvpool's pools": lambda: split_usage(layout, budget),
        "vLLM": lambda: vllm_usage(layout, budget, page_size),
        "SGLang": lambda: sglang_usage(layout, budget, page_size),
    }
    for name, use in others.items():
        found = _usage_or_reason(use)
        if isinstance(found, Usage):
            usages.append(found)
        else:
            notes.append(f"{name}: {found}")
    return ArenaPlan(layout, slabs, tuple(usages), tuple(notes))


def _usage_or_reason(use: Callable[[], Usage]) -> Usage | str:
    """Return what a way does with the memory, or why it cannot hold the model."""
    try:
        return use()
    except ConfigError as error:
        return str(error)


def _arena_usage(layout: CacheLayout, slabs: SlabLayout) -> Usage:
    """Return what an arena holds: units of each group in slabs of their own."""

    def slabs_of(requests: int, units: dict[str, int]) -> int:
        total = 0
        for group in layout.groups:
            each = len(group.layers) if slabs.by_layer(group.name) else 1
            total += -(-requests * units[group.name] * each // slabs.units(group.name))
        return total

    def fitting(tokens: int) -> int:
        units = layout.request_units(tokens)
        low, high = 0, slabs.mem_bytes // layout.request_bytes(tokens) + 1
        while low + 1 < high:
            middle = (low + high) // 2
            low, high = (middle, high) if slabs_of(middle, units) < slabs.num_slabs else (low, middle)
        return low

    units = layout.request_units(LEAST_TOKENS)
    return Usage(
        name="kvpool, one arena",
        lost=slabs.lost,
        least_bytes=round(sum(units[name] * slabs.held_bytes(name) for name in units)),
        requests={tokens: fitting(tokens) for tokens in REQUEST_TOKENS},
    )
