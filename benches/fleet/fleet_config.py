"""The configuration of a fleet of machines."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvpool.errors import ConfigError
from kvpool.tools.policies import policy_named

if TYPE_CHECKING:
    from kvpool.typing import Policy

ROUTES: dict[str, str] = {
    "earliest": "where its prompt would be computed first, queue and prefix considered",
    "prefix": "where its longest prefix is",
    "turns": "to one machine after the other",
}
"""The ways to choose the prefill machine of a request."""


@dataclass(frozen=True)
class Machine:
    """The capacity of a machine of one or several GPUs.

    Attributes:
        token_bytes: Bytes of K and V of a token, in all layers.
        state_bytes: Bytes of the states of a request, in all layers; 0 without states.
        tokens: Token slots.
        requests: The most requests at once.
    """

    token_bytes: int
    state_bytes: int
    tokens: int
    requests: int


@dataclass(frozen=True)
class FleetConfig:
    """Configuration of a fleet.

    Attributes:
        prefill: Machines that compute prompts.
        decode: Machines that generate answers.
        prefill_rate: Prompt tokens per second of a prefill machine.
        decode_rate: Tokens per second of a decode machine, over all its requests.
        link: Bytes per second from a prefill machine to a decode machine. Each machine has one such link,
            used by one transfer at a time.
        step_s: The least time between two tokens of a request.
        store_bytes: Capacity of the store that prefill machines share; 0 for none.
        store_link: Bytes per second from the store to a prefill machine.
        latency_s: Time before the first byte of a transfer or a load arrives.
        route: One of `ROUTES`.
        policy: The eviction policy of the prefix caches. Runs with "adaptive" differ, since each draws its
            own seed; other policies give the same result in each run. The store evicts the least recently
            used blocks.
        speed_up: Factor by which requests arrive faster than in the trace.
    """

    prefill: int
    decode: int
    prefill_rate: float
    decode_rate: float
    link: float
    step_s: float = 0.04
    store_bytes: int = 0
    store_link: float = 0.0
    latency_s: float = 0.0
    route: str = "earliest"
    policy: Policy = "lru"
    speed_up: float = 1.0

    def __post_init__(self) -> None:
        for name in ("prefill", "decode"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("prefill_rate", "decode_rate", "link", "step_s", "speed_up"):
            if not 0.0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be a positive number, not {getattr(self, name)}")
        for name in ("store_bytes", "store_link", "latency_s"):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be a number of at least 0, not {getattr(self, name)}")
        if self.store_bytes and not self.store_link:
            raise ConfigError("a store needs a store_link")
        policy_named(self.policy)
        if self.route not in ROUTES:
            raise ConfigError(f"route must be one of {', '.join(ROUTES)}, not {self.route!r}")
