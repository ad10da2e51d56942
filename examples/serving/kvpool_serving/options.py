"""The options of a scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from kvpool.errors import ConfigError

MAX_S = 86_400.0
"""The longest time of an option: a day."""


@dataclass(frozen=True, kw_only=True)
class SchedulerOptions:
    """The options of a scheduler: waiting times, and what it keeps. No option changes a token.

    Attributes:
        snapshot_tokens: Tokens from one snapshot of a decoding request's state to the next, rounded up to
            whole pages. Each takes a track slot.
        alike_tokens: A request waits for another one whose prompt is being computed and begins alike, if it
            finds at least this many more tokens in the cache afterwards.
        copies_timeout_s: Seconds that a step waits for slots that copies hold. After that it makes room in
            other ways: it computes prefixes instead of loading them, and retracts requests.
        fetch_timeout_s: Seconds that the first of the requests that wait for a store waits for its part of
            the prompt. After that the request computes this part, and nothing else is fetched until the store
            has answered.
        fetch_share: The share of the host tier that prompts fetched for waiting requests may take, above 0
            and at most 1. The prompt of the first request is always fetched.
        fetch_wait_s: The most seconds for which `Scheduler.plan` waits for a store when nothing runs.
        move_wait_s: The most seconds for which `Scheduler.plan` waits for rows that move when nothing runs.

    Raises:
        ConfigError: If an option is outside of its range: tokens are at least 1, and seconds in [0, 86400].
    """

    snapshot_tokens: int = 64
    alike_tokens: int = 32
    copies_timeout_s: float = 10.0
    fetch_timeout_s: float = 10.0
    fetch_share: float = 0.5
    fetch_wait_s: float = 0.02
    move_wait_s: float = 0.001

    def __post_init__(self) -> None:
        for name in ("snapshot_tokens", "alike_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("copies_timeout_s", "fetch_timeout_s", "fetch_wait_s", "move_wait_s"):
            if not 0 <= getattr(self, name) <= MAX_S:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be in [0, {MAX_S:g}]")
        if not 0 < self.fetch_share <= 1:
            raise ConfigError(f"fetch_share is {self.fetch_share}; it must be above 0, and at most 1")
