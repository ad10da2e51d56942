"""What no policy can exceed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvpool.tools.replay.simulated import next_uses

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


def most_saved(
    paths: Sequence[NDArray[np.int64]], capacity: int, worths: Sequence[NDArray[np.float64]]
) -> list[float]:
    """Return the most that any policy can save, for each kind of worth.

    A block that is found was kept since the request that used it before: it takes up one place at each
    request between the two. Each request has `capacity` places, less those of its own prompt. The bound fills
    all places with the blocks that save most for each place, the last one in part, as if a place could be
    moved from one request to another (PFOO-L of Berger et al., SIGMETRICS 2018).

    Args:
        paths: For each request the numbers of its prompt's blocks.
        capacity: Blocks that are cached at most.
        worths: For each kind, what a block at each place of a prompt saves if it is found.
    """
    lens = np.array([min(len(path), capacity) for path in paths])
    cut = [path[:capacity] for path in paths]
    users = np.repeat(np.arange(len(cut)), lens)
    places = np.concatenate([np.arange(length) for length in lens])
    uses = np.concatenate(next_uses(cut))
    is_again = uses < len(cut)
    spans, places = (uses - users - 1)[is_again].astype(np.float64), places[is_again]
    free = float((capacity - lens).sum())
    return [_fill(free, spans, np.asarray(worth)[places]) for worth in worths]


def _fill(free: float, spans: NDArray[np.float64], worth: NDArray[np.float64]) -> float:
    with np.errstate(divide="ignore"):
        order = np.argsort(-worth / spans, kind="stable")
    taken = np.cumsum(spans[order])
    share = np.clip(1.0 - (taken - free) / np.maximum(spans[order], 1.0), 0.0, 1.0)
    return float((worth[order] * share).sum())
