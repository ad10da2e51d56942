"""The policies of `PrefixCache`, as users name them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpool.errors import ConfigError

if TYPE_CHECKING:
    from kvpool.typing import Policy

POLICIES: tuple[Policy, ...] = ("lru", "fifo", "lfu", "slru", "priority", "adaptive")
"""The policies of `PrefixCache`."""

ADAPTIVE_IN_SECONDS = "adaptive-seconds"
"""The adaptive policy with the first cost, for `kvpool replay --compare`."""

WITH_QUEUE = "adaptive+queue"
"""The default policy, in a cache that is told which requests wait, for `kvpool replay --compare`."""

IN_SECONDS_WITH_QUEUE = "adaptive-seconds+queue"
"""The same with the first cost."""

OPTIONAL_POLICIES = (WITH_QUEUE, IN_SECONDS_WITH_QUEUE)
"""Policies that `kvpool replay --compare` measures if they are asked for."""

BELADY = "belady"
"""The policy that knows future requests, for `kvpool replay --capacity`: it evicts what is used last."""

BELADY_IN_SECONDS = "belady-seconds"
"""Likewise, by the seconds that are saved."""

WITH_SESSIONS = "adaptive+sessions"
"""The default policy, in a cache that is told of sessions, their pauses and their ends, for `kvpool replay
--capacity` and a trace that knows them."""

SIMULATED_POLICIES = ("s3-fifo", "gdsf", "session", BELADY, BELADY_IN_SECONDS)
"""The policies of `kvpool replay --capacity` alone."""

COMPARED_POLICIES = (
    "lru",
    "lfu",
    "slru",
    "s3-fifo",
    "gdsf",
    "session",
    "adaptive",
    ADAPTIVE_IN_SECONDS,
    BELADY,
    BELADY_IN_SECONDS,
)
"""The policies of `kvpool replay --compare`."""


def policy_named(name: str) -> Policy:
    """Return the policy with a name.

    Raises:
        ConfigError: If there is none.
    """
    for known in POLICIES:
        if known == name:
            return known
    raise ConfigError(f"policy must be one of {', '.join(POLICIES)}, not {name!r}")
