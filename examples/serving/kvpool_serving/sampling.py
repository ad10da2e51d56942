"""Reproducible sampling of tokens from logits, with parameters for each request.

The random number for a token depends only on the seed of its request and its position there, not on the rest
of the batch or on earlier computations.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvpool.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Sampling", "sample"]


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of a request.

    Attributes:
        temperature: Divides the logits; 0 selects the most likely token.
        top_k: Number of most likely tokens to keep; 0 keeps all.
        top_p: Keeps the most likely tokens whose probabilities reach this sum.
        seed: Seed of the random numbers.

    Raises:
        ConfigError: If a value is out of its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (0 <= self.temperature < float("inf") and self.top_k >= 0 and 0 < self.top_p <= 1):
            raise ConfigError(f"{self}: temperature and top_k must be at least 0, top_p in (0, 1]")


def sample(logits: torch.Tensor, picks: Sequence[tuple[Sampling, int]]) -> list[int]:
    """Sample a token for each request.

    If the temperature is not 0, tokens are sorted by probability, and cut to the first `top_k` and to the
    shortest prefix that reaches `top_p`. Inverse-CDF sampling over the kept tokens selects one. The
    computation is in float64.

    Args:
        logits: `[n, vocab_size]` of any float dtype and device; waits for them.
        picks: The parameters, and the position of the token in its request.

    Returns:
        `n` tokens.
    """
    most_likely: list[int] = logits.argmax(-1).tolist()
    if not any(sampling.temperature for sampling, _ in picks):
        return most_likely
    vocab_size = logits.shape[-1]
    numbers = [
        (s.temperature or 1.0, s.top_k or vocab_size, s.top_p, _random(s.seed, place)) for s, place in picks
    ]
    temperature, top_k, top_p, random = (
        torch.tensor(numbers, dtype=torch.float64).to(logits.device).T[..., None]
    )
    chances, order = (logits.double() / temperature).softmax(-1).sort(stable=True, dim=-1, descending=True)
    before = chances.cumsum(-1) - chances
    rank = torch.arange(vocab_size, device=logits.device)
    sums = chances.masked_fill((rank >= top_k) | (before >= top_p), 0.0).cumsum(-1)
    places = (sums <= random * sums[:, -1:]).sum(-1, keepdim=True)
    sampled: list[int] = order.gather(-1, places)[:, 0].tolist()
    return [
        other if sampling.temperature else likely
        for likely, other, (sampling, _) in zip(most_likely, sampled, picks, strict=True)
    ]


def _random(seed: int, place: int) -> float:
    """Return a pseudo-random number in [0, 1)."""
    digest = hashlib.blake2b(f"{seed} {place}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / 2**53
