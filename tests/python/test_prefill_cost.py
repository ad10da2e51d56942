"""`PrefillCost`, and what caches keep by it."""

from __future__ import annotations

import re
from math import inf
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kvpool import (
    ArenaPrefixCache,
    CacheArena,
    CacheLayout,
    ConfigError,
    Group,
    HostTier,
    KVPool,
    Plane,
    PrefillCost,
    PrefixCache,
    TokenToKVPoolAllocator,
)
from kvpool.tools.costs import COSTS

if TYPE_CHECKING:
    from numpy.typing import NDArray

STEEP = PrefillCost(1e-5, 1e-6)
"""A token at 10,000 takes a thousand times as long as the first."""


def test_a_prefix_takes_seconds_by_its_tokens_and_their_pairs() -> None:
    cost = PrefillCost(0.2, 0.024)
    assert cost.seconds(10) == pytest.approx(2.0 + 1.2)
    assert cost.seconds(np.array([0, 1, 10])) == pytest.approx([0.0, 0.212, 3.2])


def test_the_cost_of_a_model_follows_from_its_shape() -> None:
    """One layer, two heads of three elements: 24 operations for each pair of tokens."""
    cost = PrefillCost.of_model(weights=100, layers=1, heads=2, head_dim=3, flops=1e3, name="tiny")
    assert cost == PrefillCost(0.2, 0.024, "tiny")
    small, large = COSTS["8B"], COSTS["70B"]
    assert (small.per_token_s, small.per_pair_s) == pytest.approx((23.5e-6, 0.883e-9), rel=0.01)
    assert (large.per_token_s, large.per_pair_s) == pytest.approx((28.8e-6, 0.552e-9), rel=0.01)


def test_noise_in_a_table_is_averaged() -> None:
    real = PrefillCost(3e-5, 7e-10)
    random = np.random.default_rng(0)
    prefills = [
        (before, tokens, (real.seconds(before + tokens) - real.seconds(before)) * random.uniform(0.95, 1.05))
        for before in range(0, 100_000, 5_000)
        for tokens in (512, 2_048, 8_192)
    ]
    found = PrefillCost.fit(prefills, "measured")
    assert found.name == "measured"
    assert (found.per_token_s, found.per_pair_s) == pytest.approx((3e-5, 7e-10), rel=0.03)


@pytest.mark.parametrize("parts", [(1.0, -1.0), (-1.0, 1.0), (inf, 0.0), (0.0, float("nan")), (0.0, 0.0)])
def test_a_cost_is_numbers_of_seconds(parts: tuple[float, float]) -> None:
    with pytest.raises(ConfigError, match=r"cost 'x': per_token_s=.* must be finite"):
        PrefillCost(*parts, "x")


class Strange:
    per_token_s, per_pair_s = -1.0, 0.0


@pytest.mark.parametrize(
    ("cost", "error", "message"),
    [
        (1e-5, TypeError, "cost must be a PrefillCost, not float"),
        (Strange(), ConfigError, "a prefill of -1 s for each token and 0 s for each pair"),
    ],
)
def test_caches_take_costs_alone(cost: Any, error: type[Exception], message: str) -> None:  # noqa: ANN401
    layout = CacheLayout([Group("full", "full", [0], [Plane("k", "bfloat16", [2, 64])])], page_size=2)
    with pytest.raises(error, match=message):
        PrefixCache(TokenToKVPoolAllocator(64, "cpu"), cost=cost)
    with pytest.raises(error, match=message):
        ArenaPrefixCache(CacheArena(layout, 1 << 16, device="cpu"), cost=cost)


PAGE = 512
CAPACITY = 512 * PAGE


def cache_of(cost: PrefillCost | None, *, has_tier: bool = False) -> PrefixCache:
    slots = TokenToKVPoolAllocator(CAPACITY, "cpu", page_size=PAGE)
    kv = KVPool(CAPACITY, 1, 1, 8, "cpu", page_size=PAGE)
    return PrefixCache(slots, cost=cost, tiers=(HostTier(kv, 64 * PAGE, write="back"),) if has_tier else ())


def saved_by(cache: PrefixCache, steps: int = 1500) -> float:
    """Ask for short and long prompts, half of which come again when twice the capacity was looked up.

    Returns:
        The seconds that the device's pages save, by `STEEP`.
    """
    random, saved_s = np.random.default_rng(0), 0.0
    comes_again = random.random(steps) < 0.5
    for step in range(steps):
        for number in {step, step - 50 if step >= 50 and comes_again[step - 50] else step}:
            prompt = prompt_of(number)
            with cache.match(prompt) as lease:
                saved_s += STEEP.seconds(lease.length)
                if lease.length < len(prompt):
                    missing = len(prompt) - lease.length
                    lease.publish(prompt[lease.length :], cache.allocator.alloc(missing))
    return saved_s


def prompt_of(number: int) -> NDArray[np.int32]:
    pages = 24 if number % 2 else 2
    return np.arange(pages * PAGE, dtype=np.int32) + number * 25 * PAGE


def test_what_saves_most_seconds_is_kept() -> None:
    # Where all tokens take as long, a cache with a cost keeps the same, but bets more than one without.
    flat = saved_by(cache_of(PrefillCost(1e-5, 0.0)))
    assert flat >= saved_by(cache_of(None))
    assert flat == saved_by(cache_of(PrefillCost(4e-5, 0.0)))
    assert saved_by(cache_of(STEEP)) > 1.05 * flat


def test_what_can_be_loaded_takes_as_long_at_any_position() -> None:
    without = saved_by(cache_of(None))
    assert saved_by(cache_of(STEEP, has_tier=True)) == pytest.approx(without, rel=0.1)


def test_an_eviction_says_what_the_pages_were_worth() -> None:
    cache = cache_of(STEEP)
    saved_by(cache)
    gone = [segment for number in range(1400, 1500, 2) for segment in cache.explain(prompt_of(number))]
    judged = [segment for segment in gone if segment.state == "evicted"]
    assert judged
    for segment in judged:
        assert segment.worth is not None
        assert segment.least_kept_worth is not None
        assert 0.0 <= segment.worth <= segment.least_kept_worth < inf
        worths = re.search(r"worth (\S+) where (\S+) was kept", repr(segment))
        assert worths is not None
        shown = [float(text) for text in worths.groups()]
        assert shown == pytest.approx([segment.worth, segment.least_kept_worth], rel=1e-3)


def test_recency_judges_nothing() -> None:
    cache = cache_of(STEEP)
    saved_by(cache, 50)
    (segment,) = cache.explain(prompt_of(0))
    assert (segment.state, segment.worth, segment.least_kept_worth) == ("evicted", None, None)
    assert "worth" not in repr(segment)
