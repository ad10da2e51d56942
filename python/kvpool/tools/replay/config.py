"""Configuration of a replay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvpool._kvpool import _STORAGE_DTYPES
from kvpool.errors import ConfigError
from kvpool.tools.policies import policy_named

if TYPE_CHECKING:
    from kvpool.typing import Policy


@dataclass(frozen=True)
class ReplayConfig:
    """Configuration of a replay.

    Attributes:
        pool_size: Token slots; None takes `suggest_pool_size`.
        page_size: Slots per page.
        need_sort: Lowest slots first; otherwise first in, first out.
        kv: Store and check K and V; otherwise only the allocator and the request table run.
        layers: Layers of the KV pool.
        heads: K and V heads per layer.
        head_dim: Elements per head.
        dtype: Name of the KV pool's dtype.
        device: Device of the pools, in PyTorch's notation.
        max_running: Request rows, which limit the requests that run at once.
        max_context: Tokens per request row; None takes the longest request of the trace.
        prefill_budget: Prompt tokens per step, over all requests.
        step_ms: Virtual time of one step, in which each running request decodes one token.
        speed_up: Factor by which requests arrive faster than in the trace.
        seed: Varies the stored K and V rows; less than 2**32.
        prefix_cache: Find what requests have in common in a prefix cache.
        policy: The policy of the prefix cache.
    """

    pool_size: int | None = None
    page_size: int = 1
    need_sort: bool = True
    kv: bool = True
    layers: int = 2
    heads: int = 2
    head_dim: int = 16
    dtype: str = "bfloat16"
    device: str = "cpu"
    max_running: int = 256
    max_context: int | None = None
    prefill_budget: int = 800
    step_ms: float = 40.0
    speed_up: float = 1.0
    seed: int = 0
    prefix_cache: bool = False
    policy: Policy = "adaptive"

    def __post_init__(self) -> None:
        least_one = ("page_size", "layers", "heads", "head_dim", "max_running", "prefill_budget")
        for name in (*least_one, "pool_size", "max_context"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, not {value}")
        for name in ("step_ms", "speed_up"):
            value = getattr(self, name)
            if not 0.0 < value < float("inf"):
                raise ConfigError(f"{name} must be a positive number, not {value}")
        if not 0 <= self.seed < 1 << 32:
            raise ConfigError(f"seed must be between 0 and {(1 << 32) - 1}, not {self.seed}")
        policy_named(self.policy)
        if self.dtype not in _STORAGE_DTYPES:
            raise ConfigError(f"dtype must be one of {', '.join(_STORAGE_DTYPES)}, not {self.dtype!r}")
