"""Picking tokens from logits, each request in its own way, and always the same.

The random number for a token depends on the seed of its request and on its place there alone: neither on what
else is in the batch, nor on what was computed before.
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
    """How the tokens of a request are picked.

    Attributes:
        temperature: Divides the logits; 0 picks the most likely token.
        top_k: Only so many of the most likely tokens; 0 for all.
        top_p: Only the most likely tokens whose probabilities reach this sum.
        seed: Of the random numbers.

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
    """Pick a token for each request.

    Where the temperature is not 0, tokens are sorted by their probability and cut to the first `top_k`, and
    to those before which less than `top_p` is reached. Of these the first is taken up to which the sum is
    more than a random part of the whole. It is computed in float64.

    Args:
        logits: `[n, vocab_size]` of any float dtype and device; waited for.
        picks: How, and the place of the token in its request.

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
    """A number in [0, 1)."""
    digest = hashlib.blake2b(f"{seed} {place}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / 2**53
