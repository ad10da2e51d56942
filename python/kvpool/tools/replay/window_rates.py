"""The share of what a model could find in a prefix cache that it finds beside the windows that it keeps.

The cache alone is measured, as in `hit_rates`. A model with sliding-window attention resumes only where
K and V of its windows are, so that these have part of the memory of an arena: as much as they are worth.
Prompts are cut to whole blocks, because a trace does not say what follows the last tokens of a prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvpool import ArenaPrefixCache, CacheArena, CacheLayout, Group, Plane
from kvpool.errors import ConfigError
from kvpool.tools.policies import policy_named
from kvpool.tools.replay.found_tokens import found_by_full_attention, found_in_arena, whole_blocks

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from kvpool.tools.traces import Trace


@dataclass(frozen=True)
class WindowedModel:
    """A model some of whose layers have sliding windows.

    Attributes:
        window: Tokens of a window.
        layers: Layers with a window for each one with full attention, all with the same K and V for a token.
    """

    window: int
    layers: int


@dataclass(frozen=True)
class WindowJob:
    """What is measured.

    Attributes:
        models: The models.
        capacities: Tokens whose K and V, of all layers, fill the memory.
        chunk: Tokens of a chunk of a prompt, which is published when it is computed.
        policy: Name of the policy of eviction.
    """

    models: Sequence[WindowedModel]
    capacities: Sequence[int]
    chunk: int = 8192
    policy: str = "adaptive"


@dataclass(frozen=True)
class WindowRate:
    """What a model with windows finds.

    Attributes:
        capacity: Tokens whose K and V, of all layers, would fill the memory.
        model: The model.
        possible_tokens: Tokens that it would find if windows took no memory and were everywhere.
        found_tokens: Tokens that it finds.
    """

    capacity: int
    model: WindowedModel
    possible_tokens: int
    found_tokens: int

    @property
    def share(self) -> float:
        """The share of the tokens that it finds; 1 if there is nothing to find."""
        return self.found_tokens / self.possible_tokens if self.possible_tokens else 1.0


@dataclass(frozen=True)
class WindowRates:
    """What models with windows find.

    Attributes:
        trace: Name of the trace.
        requests: Requests of the trace.
        prompt_tokens: Tokens of all prompts, in whole blocks.
        chunk: Tokens of a chunk.
        policy: Name of the policy of eviction.
        rates: One entry for each capacity and model.
    """

    trace: str
    requests: int
    prompt_tokens: int
    chunk: int
    policy: str
    rates: list[WindowRate]


def measure(trace: Trace, job: WindowJob) -> WindowRates:
    """Measure what models with windows find.

    Raises:
        ConfigError: If a chunk is less than a block, a window is no whole number of them, or the memory has
            no place for a block.
    """
    block = trace.block_size
    texts = whole_blocks(trace, job.chunk)
    for model in job.models:
        if model.window % block:
            raise ConfigError(f"window {model.window} is no whole number of blocks of {block} tokens")
    rates = []
    for capacity in job.capacities:
        for model in job.models:
            possible = found_by_full_attention(texts, capacity * (1 + model.layers), block, job.policy)
            found = _found(texts, capacity, block, job, model)
            rates.append(WindowRate(capacity, model, possible, found))
    return WindowRates(
        trace=trace.name,
        requests=len(trace),
        prompt_tokens=sum(map(len, texts)),
        chunk=job.chunk,
        policy=job.policy,
        rates=rates,
    )


def _found(
    texts: Sequence[NDArray[np.int32]], capacity: int, block: int, job: WindowJob, model: WindowedModel
) -> int:
    """Return the tokens that are found in an arena."""
    plane = [Plane("kv", "uint8", (1,))]
    window = Group("window", "window", range(1, 1 + model.layers), plane, tokens=model.window)
    layout = CacheLayout([Group("full", "full", [0], plane), window], page_size=block)
    arena = CacheArena(layout, capacity * (1 + model.layers), "cpu")
    cache = ArenaPrefixCache(arena, policy=policy_named(job.policy))

    def alloc(pages: int) -> dict[str, list[Any]] | None:
        kept = min(pages, model.window // block)
        units = arena.alloc({"full": pages, "window": kept})
        if units is not None:
            # The others are behind the window.
            units["window"] = [*[None] * (pages - kept), *units["window"]]
        return units

    return found_in_arena(texts, cache, job.chunk, alloc)
