"""Serves a small model with random weights through the pools, and compares it with the model alone.

The load is a burst of requests, or conversations, which share a system prompt and whose turns repeat the
earlier turns and answers. There is no tokenizer: tokens are spelled as syllables, so that the stream looks
like text. Weights and activations are float32, so that batching changes logits only in their last bits. A
different token is accepted only if both had practically equal logits: see `TIE`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import partial
from math import inf
from statistics import median
from time import perf_counter, sleep
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config, Qwen3NextConfig

from kvpool import FileStore, HostTier, PrefixCache
from kvpool.errors import ConfigError
from kvpool.integrations.transformers import PooledModel
from kvpool_serving import Engine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvpool_serving.generation import Generation
    from kvpool_serving.swap import SwapMode

VOCAB_SIZE = 256
MAX_CONTEXT_LEN = 512
MAX_REQS = 64

TURNS = 4
SYSTEM_PROMPT = 96
"""Turns of a conversation, and the tokens with which all conversations begin."""

_SETTLE_S = 10.0
"""Seconds that copies may take when all is served."""

TIE = 1e-3
"""Logits, which are of order 1, that differ by less may swap order in another batch."""

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": MAX_CONTEXT_LEN,
    # Larger than in training, so that tokens depend on earlier ones.
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
CONFIGS: dict[str, Callable[[], Any]] = {
    "qwen3": lambda: Qwen3Config(num_hidden_layers=3, **_COMMON),
    "llama": lambda: LlamaConfig(num_hidden_layers=3, **_COMMON),
    "qwen3-next": lambda: Qwen3NextConfig(
        num_hidden_layers=4,  # three with linear attention, and one with full attention
        linear_conv_kernel_dim=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        num_experts=0,
        **_COMMON,
    ),
}
"""Small models, by name: dense with grouped-query attention, and a hybrid with Gated DeltaNet layers."""


@dataclass(frozen=True)
class ServeConfig:
    """Configuration of a run.

    Attributes:
        model: A name in `CONFIGS`.
        requests: Number of requests of a burst.
        conversations: Number of users with a conversation; if there are any, there is no burst.
        per_step: Number of requests, or of users, that arrive in each step.
        pool_size: Token slots.
        page_size: Slots in a page.
        prefill_budget: The most new tokens in a step.
        device: Device of the model and the pools.
        seed: Seed of weights and requests.
        prefix_cache: Whether the engine has a prefix cache.
        host_tokens: Tokens of host memory below the cache; 0 for none.
        store: A directory for a `FileStore` below host memory; empty for none.
        store_mib: Its capacity in MiB.
        swap: The treatment of tokens that only the tiers have.
    """

    model: str = "qwen3"
    requests: int = 300
    conversations: int = 0
    per_step: int = 8
    pool_size: int = 1024
    page_size: int = 1
    prefill_budget: int = 256
    device: str = "cpu"
    seed: int = 0
    prefix_cache: bool = True
    host_tokens: int = 0
    store: str = ""
    store_mib: int = 1024
    swap: SwapMode = "auto"


class Difference(NamedTuple):
    """A difference between a served request and the model alone.

    Attributes:
        request: Number of the request.
        position: The first different token, counted from the end of the prompt.
        gap: The margin by which the model alone preferred its token.
    """

    request: int
    position: int
    gap: float

    @property
    def is_tie(self) -> bool:
        """Whether both tokens had practically equal logits."""
        return self.gap < TIE


@dataclass
class ServeResult:
    """The result of a run.

    Attributes:
        config: The configuration.
        stats: `Engine.stats()` at the end.
        peak_in_use: The most slots in use.
        peak_running: The most requests running at once.
        first_token_s: Median seconds from the arrival of a request to its first token.
        served_s: Seconds to serve all requests.
        checked_s: Seconds to compare them with the model alone.
        differences: Differences from the model alone.
        host_pages: Pages in host memory at the end.
        host_capacity: Pages that host memory has room for; 0 without any.
        stored_pages: Pages and snapshots in the store at the end.
        uncached: The result of the same conversations without the prefix cache.
    """

    config: ServeConfig
    stats: dict[str, int]
    peak_in_use: int = 0
    peak_running: int = 0
    first_token_s: float = 0.0
    served_s: float = 0.0
    checked_s: float = 0.0
    differences: tuple[Difference, ...] = ()
    host_pages: int = 0
    host_capacity: int = 0
    stored_pages: int = 0
    uncached: ServeResult | None = None

    @property
    def is_right(self) -> bool:
        """Whether every request got the tokens of the model alone, and gave up every slot."""
        is_right = all(found.is_tie for found in self.differences) and self.stats["in_use"] == 0
        return is_right and (self.uncached is None or self.uncached.is_right)

    @property
    def hit_rate(self) -> float:
        """The share of the tokens to compute that were found in the prefix cache."""
        found = self.stats["found_tokens"]
        return found / max(found + self.stats["computed_tokens"], 1)


class Server(Protocol):
    """A server of requests, such as an `Engine`."""

    def submit(
        self, prompt: list[int], max_new_tokens: int, *, on_token: Callable[[Generation, int], object]
    ) -> Generation:
        """Queue a request."""

    def step(self) -> bool:
        """Run one step of the server. Return whether any request is not over."""

    def stats(self) -> dict[str, int]:
        """Return statistics as `Engine.stats` has them."""


def make_model(config: ServeConfig) -> Any:  # noqa: ANN401 - transformers has no types
    """Return the model, whose weights depend on the seed alone."""
    torch.manual_seed(config.seed)
    auto: Any = AutoModelForCausalLM
    return auto.from_config(CONFIGS[config.model](), dtype=torch.float32).eval().to(config.device)


def revision(config: ServeConfig) -> str:
    """Return a text that stands for the weights and everything else that tokens depend on."""
    return f"kvpool serve {config.model} of seed {config.seed}, torch {torch.__version__}"


class Pools:
    """A model with pools and an engine, and the tiers below its cache.

    Args:
        config: The configuration.
        model: The model.
    """

    def __init__(self, config: ServeConfig, model: Any) -> None:  # noqa: ANN401
        self.pooled: PooledModel = PooledModel(
            model, config.pool_size, MAX_REQS, MAX_CONTEXT_LEN, page_size=config.page_size
        )
        self.tier: HostTier | None = None
        self.store: FileStore | None = None
        self.cache: PrefixCache | None = None
        if config.prefix_cache:
            self.cache = self._make_cache(config)
        self.engine: Engine = Engine(
            self.pooled, config.prefill_budget, prefix_cache=self.cache or False, swap=config.swap
        )

    def _make_cache(self, config: ServeConfig) -> PrefixCache:
        """Return a cache, perhaps with host memory below, and a store."""
        pooled, states = self.pooled, self.pooled.gdn_pool
        if not config.host_tokens:
            if config.store:
                raise ConfigError("a store needs host memory above it, and there are 0 host tokens")
            return PrefixCache(pooled.allocator, states=states)
        self.tier = HostTier(pooled.kv_pool, config.host_tokens, states=states)
        if not config.store:
            return PrefixCache(pooled.allocator, states=states, tiers=(self.tier,))
        self.store = FileStore(config.store, config.store_mib << 20, page_bytes=self.tier.page_bytes)
        tiers = (self.tier, self.store)
        return PrefixCache(pooled.allocator, states=states, tiers=tiers, model=revision(config))


class Service:
    """A load of requests, its server, and the model that checks the answers.

    Args:
        config: The configuration.
        server: Serves the requests; by default an engine of its own.
    """

    def __init__(self, config: ServeConfig, server: Server | None = None) -> None:
        self.config = config
        self.model: Any = make_model(config)
        self.pools: Pools | None = None
        if server is None:
            self.pools = Pools(config, self.model)
            server = self.pools.engine
        self.server: Server = server
        self.requests: list[Generation] = []
        self._random = random.Random(config.seed)  # noqa: S311 - prompts are not secret
        self._system_prompt = _tokens(self._random, SYSTEM_PROMPT)
        self._first_tokens_s: list[float] = []

    def submit(self) -> Generation:
        """Submit a request of random length."""
        return self._submit(_tokens(self._random, self._random.randint(4, 120)), self._random.randint(4, 64))

    def converse(self, chance: random.Random, before: list[int], turns: int = TURNS) -> None:
        """Submit a turn of a conversation; its answer is followed by the next one."""
        prompt = before + _tokens(chance, chance.randint(8, 40))

        def go_on(request: Generation) -> None:
            if turns > 1:
                self.converse(chance, request.prompt + request.tokens, turns - 1)

        self._submit(prompt, chance.randint(8, 24), go_on)

    def _submit(
        self, prompt: list[int], new_tokens: int, then: Callable[[Generation], None] | None = None
    ) -> Generation:
        begin = perf_counter()

        delivered: list[int] = []

        def on_token(request: Generation, token: int) -> None:
            delivered.append(token)
            if len(delivered) == 1:
                self._first_tokens_s.append(perf_counter() - begin)
            if request.is_over and len(delivered) == len(request.tokens) and then is not None:
                then(request)

        self.requests.append(self.server.submit(prompt, new_tokens, on_token=on_token))
        return self.requests[-1]

    def steps(self) -> Iterator[dict[str, int]]:
        """Serve the load, and yield the engine's statistics after each step."""
        arrivals: list[Callable[[], object]] = [self.submit] * self.config.requests
        if self.config.conversations:
            users = [self._random.randrange(1 << 32) for _ in range(self.config.conversations)]
            arrivals = [partial(self.converse, random.Random(user), self._system_prompt) for user in users]  # noqa: S311
        is_busy = True
        while is_busy or arrivals:
            for arrive in arrivals[: self.config.per_step]:
                arrive()
            del arrivals[: self.config.per_step]
            is_busy = self.server.step()
            yield self.server.stats()

    def serve(self, update: Callable[[dict[str, int], float], object] | None = None) -> ServeResult:
        """Serve the load.

        Args:
            update: Called after each step with the engine's statistics, and the tokens per second so far.

        Returns:
            The result, not checked yet.
        """
        result = ServeResult(self.config, self.server.stats())
        begin, before = perf_counter(), result.stats["generated_tokens"]
        for stats in self.steps():
            result.stats = stats
            result.peak_in_use = max(result.peak_in_use, stats["in_use"])
            result.peak_running = max(result.peak_running, stats["running"])
            if update is not None:
                update(stats, (stats["generated_tokens"] - before) / (perf_counter() - begin))
        result.served_s = perf_counter() - begin
        self._settle()
        result.stats = self.server.stats()
        if self.pools is not None:
            _record_tiers(self.pools, result)
        if self._first_tokens_s:
            result.first_token_s = median(self._first_tokens_s)
        return result

    def _settle(self) -> None:
        """Wait until all copies are over, since copies keep slots in use."""
        deadline = perf_counter() + _SETTLE_S
        if self.pools is not None and self.pools.cache is not None:
            self.pools.cache.wait_written(_SETTLE_S)
        while self.server.stats()["in_use"] and perf_counter() < deadline:
            # An engine has nothing to do but a load that was given up.
            if not self.server.step():
                sleep(0.001)

    def check(self, result: ServeResult, update: Callable[[], object] | None = None) -> None:
        """Compare every request with the model alone, and record the differences.

        Args:
            result: The result to complete.
            update: Called after each request.
        """
        begin = perf_counter()
        found: list[Difference] = []
        for number, request in enumerate(self.requests):
            found += self._difference(number, request)
            if update is not None:
                update()
        result.checked_s = perf_counter() - begin
        result.differences = tuple(found)

    def _difference(self, number: int, request: Generation) -> Iterator[Difference]:
        """Yield the first token that differs from the model's own choice after the same tokens."""
        tokens = torch.tensor(request.tokens, device=self.config.device)
        if len(tokens) != request.max_new_tokens:
            yield Difference(number, min(len(tokens), request.max_new_tokens), inf)
            return
        text = torch.tensor([request.prompt + request.tokens[:-1]], device=self.config.device)
        with torch.no_grad():
            logits = self.model(text, use_cache=False).logits[0, len(request.prompt) - 1 :]
        behind = logits.amax(1) - logits.gather(1, tokens[:, None])[:, 0]
        for position in behind.nonzero()[:1, 0].tolist():
            yield Difference(number, position, float(behind[position]))


def _record_tiers(pools: Pools, result: ServeResult) -> None:
    """Complete a result with the statistics of the tiers below the cache."""
    if pools.tier is not None:
        tier = pools.tier.stats()
        result.host_pages, result.host_capacity = tier["pages"], tier["capacity"]
    if pools.store is not None:
        # What is in host memory only is put, too.
        pools.store.close()
        result.stored_pages = pools.store.stats()["pages"]


def _tokens(chance: random.Random, count: int) -> list[int]:
    return [chance.randrange(VOCAB_SIZE) for _ in range(count)]


def default_device() -> str:
    """Return a GPU if PyTorch has one, else the CPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def spell(token: int) -> str:
    """Return a token as a syllable, some with a leading space."""
    consonants, vowels = "bdfgklmnprstvz", "aeiou"
    syllable = consonants[token % len(consonants)] + vowels[token // len(consonants) % len(vowels)]
    return f" {syllable}" if token % 3 == 0 else syllable
