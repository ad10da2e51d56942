"""The break-even of loading a prompt's K and V against computing them."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class BreakEven:
    """Computing and loading a prompt, both linear in its tokens.

    Computing `n` tokens takes `n / rate` seconds, loading them through a link of `bandwidth` bytes per second
    `latency_s + (n * token_bytes + state_bytes) / bandwidth`.

    Attributes:
        token_bytes: Bytes of K and V of a token, in all layers.
        state_bytes: Bytes of the states of a request, in all layers.
        rate: Prompt tokens that a machine computes in a second.
        latency_s: Time before the first byte arrives.
    """

    token_bytes: int
    state_bytes: int
    rate: float
    latency_s: float = 0.0

    @property
    def bandwidth(self) -> float:
        """Bytes per second: only through faster links loading is faster, however long the prompt is.

        This bandwidth is the bytes of K and V that a machine computes in a second: `token_bytes * rate`.
        """
        return self.token_bytes * self.rate

    def compute_s(self, tokens: float) -> float:
        """Return the seconds for computing so many tokens."""
        return tokens / self.rate

    def load_s(self, tokens: float, bandwidth: float) -> float:
        """Return the seconds for loading so many tokens through a link of `bandwidth` bytes per second."""
        return self.latency_s + (tokens * self.token_bytes + self.state_bytes) / bandwidth

    def tokens(self, bandwidth: float) -> float:
        """Return the number of tokens beyond which loading is faster; infinite if the link is too slow.

        The number solves `tokens / rate = latency_s + (tokens * token_bytes + state_bytes) / bandwidth`.
        """
        if bandwidth <= self.bandwidth:
            return math.inf
        fixed_s = self.latency_s + self.state_bytes / bandwidth
        return fixed_s / (1 / self.rate - self.token_bytes / bandwidth)
