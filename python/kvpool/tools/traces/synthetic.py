"""A seeded generator of requests that resemble the Azure conversation trace."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvpool.tools.traces.trace import Trace, TraceError

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Close to the Azure conversation trace: mean context 1,155, mean output 211, 5.5 requests/s.
_REQUESTS_PER_S = 5.5
_INPUT_MEDIAN, _INPUT_SIGMA, _INPUT_MAX = 700.0, 1.0, 16_384
_OUTPUT_MEDIAN, _OUTPUT_SIGMA, _OUTPUT_MAX = 150.0, 0.8, 2_048
# Half of the requests begin like one of the last 64, so that their blocks are small.
_SHARING, _SHARED_BEFORE, _SYNTHETIC_BLOCK_SIZE = 0.5, 64, 64


def synthetic_trace(requests: int, seed: int) -> Trace:
    """Generate a trace that resembles the Azure conversation trace.

    Arrivals are a Poisson process of 5.5 requests/s; input and output lengths are log-normal with means near
    1,150 and 205 tokens. Half of the prompts begin like one of the last 64. The same arguments give the same
    trace.

    Args:
        requests: Number of requests, at least 1.
        seed: Any non-negative integer.

    Raises:
        TraceError: If `requests` is not positive or `seed` is negative.
    """
    if requests < 1 or seed < 0:
        raise TraceError(f"a synthetic trace needs requests >= 1 and seed >= 0, not {requests} and {seed}")
    generator = np.random.default_rng(seed)
    arrival_s = np.cumsum(generator.exponential(1.0 / _REQUESTS_PER_S, requests))
    raw_lens = generator.lognormal(np.log(_INPUT_MEDIAN), _INPUT_SIGMA, requests)
    input_lens = np.clip(raw_lens, 1, _INPUT_MAX).astype(np.int64)
    output_lens = generator.lognormal(np.log(_OUTPUT_MEDIAN), _OUTPUT_SIGMA, requests)
    return Trace(
        f"synthetic (seed {seed})",
        arrival_s - arrival_s[0],
        input_lens,
        np.clip(output_lens, 1, _OUTPUT_MAX).astype(np.int64),
        _synthetic_blocks(input_lens, generator),
        _SYNTHETIC_BLOCK_SIZE,
    )


def _synthetic_blocks(
    input_lens: NDArray[np.int64], generator: np.random.Generator
) -> tuple[NDArray[np.int64], ...]:
    """Return blocks of prompts, half of which share whole blocks with one of the last prompts."""
    shares = generator.random(len(input_lens)) < _SHARING
    back = generator.integers(1, _SHARED_BEFORE, len(input_lens), endpoint=True)
    blocks: list[NDArray[np.int64]] = []
    free = 0
    for at, length in enumerate(input_lens.tolist()):
        shared = np.empty(0, np.int64)
        if at and shares[at]:
            like = max(0, at - int(back[at]))
            shared = blocks[like][: min(length, int(input_lens[like])) // _SYNTHETIC_BLOCK_SIZE]
        own = -(-length // _SYNTHETIC_BLOCK_SIZE) - len(shared)
        blocks.append(np.concatenate((shared, np.arange(free, free + own))))
        free += own
    return tuple(blocks)
