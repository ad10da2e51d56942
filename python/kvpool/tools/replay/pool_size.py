"""The default pool size of a replay."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvpool.tools.replay.config import ReplayConfig
    from kvpool.tools.traces import Trace

DEFAULT_POOL_SHARE = 0.5
"""The default pool size as a share of the trace's peak usage of an unlimited pool."""


def suggest_pool_size(trace: Trace, config: ReplayConfig) -> int:
    """Compute the default pool size: small enough to force retractions, large enough for each request.

    The size is `DEFAULT_POOL_SHARE` of the peak usage of an unlimited pool at the configured rates, at least
    the longest request, in whole pages. In the unlimited pool, requests are prefilled one after another at
    the full budget and then decode one token per step; at most `max_running` count.

    Args:
        trace: A trace with at least one request.
        config: Rates, page size and `max_running`.
    """
    page_size = config.page_size
    totals = -(-trace.total_lens // page_size) * page_size
    most = min(_unlimited_peak(trace, config), float(np.sort(totals)[-config.max_running :].sum()))
    pages = max(-(-int(most * DEFAULT_POOL_SHARE) // page_size), int(totals.max()) // page_size)
    return pages * page_size


def _unlimited_peak(trace: Trace, config: ReplayConfig) -> float:
    """Return the peak number of slots in use in an unlimited pool, with prompts in whole pages."""
    step_s = config.step_ms / 1000.0
    inputs = -(-trace.input_lens // config.page_size) * config.page_size
    prefill_s = trace.input_lens * (step_s / config.prefill_budget)
    # A queue with one server, which has been busy since the last arrival at an idle server.
    busy_s = np.cumsum(prefill_s)
    ready = busy_s + np.maximum.accumulate(trace.arrival_s / config.speed_up - (busy_s - prefill_s))
    ended = ready + trace.output_lens * step_s
    # Usage falls only at the end of a request, so the peak is just before an end, or where a prompt starts.
    times = np.concatenate((ended, ready - prefill_s))
    started = _sums_until(times, ready - prefill_s, inputs, "right")
    over = _sums_until(times, ended, inputs, "left")
    ones = np.ones(len(trace))
    decoding = _sums_until(times, ready, ones, "right") - _sums_until(times, ended, ones, "left")
    ready_of_decoding = _sums_until(times, ready, ready, "right") - _sums_until(times, ended, ready, "left")
    return float((started - over + (decoding * times - ready_of_decoding) / step_s).max())


def _sums_until(
    times: NDArray[np.float64],
    keys: NDArray[np.float64],
    values: NDArray[Any],
    side: Literal["left", "right"],
) -> NDArray[np.float64]:
    """Return for each time the sum of `values` whose key is below it, or equal to it, too, for `"right"`."""
    order = np.argsort(keys)
    sums = np.concatenate(([0.0], np.cumsum(values[order])))
    return sums[np.searchsorted(keys[order], times, side)]
