"""Serves a small model with random weights through the pools, and compares it with the model alone.

There is no tokenizer: tokens are spelled as syllables, so that the stream looks like text. Weights and
activations are float32, so that batching changes logits only in their last bits. A different token is
accepted only if both had practically equal logits: see `TIE`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config, Qwen3NextConfig

from kvpool.integrations.transformers import PooledModel
from kvpool.serving import Engine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvpool.serving import Request

VOCAB_SIZE = 256
MAX_CONTEXT_LEN = 256
MAX_REQS = 64

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
        requests: Number of requests.
        per_step: Number of requests that arrive in each step.
        pool_size: Token slots.
        page_size: Slots in a page.
        prefill_budget: The most new tokens in a step.
        device: Device of the model and the pools.
        seed: Seed of weights and requests.
    """

    model: str = "qwen3"
    requests: int = 300
    per_step: int = 8
    pool_size: int = 1024
    page_size: int = 1
    prefill_budget: int = 256
    device: str = "cpu"
    seed: int = 0


class Difference(NamedTuple):
    """A difference between a served request and the model alone.

    Attributes:
        request: Number of the request.
        position: The first different token, counted from the end of the prompt.
        gap: By how much the model alone preferred its token.
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
        served_s: Seconds to serve all requests.
        alone_s: Seconds to generate them again, one after the other.
        differences: Differences from the model alone.
    """

    config: ServeConfig
    stats: dict[str, int]
    peak_in_use: int = 0
    peak_running: int = 0
    served_s: float = 0.0
    alone_s: float = 0.0
    differences: tuple[Difference, ...] = ()

    @property
    def is_right(self) -> bool:
        """Whether every request got the tokens of the model alone, and every slot was freed."""
        return all(found.is_tie for found in self.differences) and self.stats["in_use"] == 0


class Service:
    """A model, the engine that serves it, and the requests of a burst."""

    def __init__(self, config: ServeConfig) -> None:
        torch.manual_seed(config.seed)
        self.config = config
        auto: Any = AutoModelForCausalLM
        model: Any = auto.from_config(CONFIGS[config.model](), dtype=torch.float32)
        self.model = model.eval().to(config.device)
        self.pooled = PooledModel(
            self.model, config.pool_size, MAX_REQS, MAX_CONTEXT_LEN, page_size=config.page_size
        )
        self.engine = Engine(self.pooled, config.prefill_budget)
        self.requests: list[Request] = []
        self._random = random.Random(config.seed)  # noqa: S311 - prompts are not secret

    def submit(self) -> Request:
        """Submit a request of random length."""
        prompt = [self._random.randrange(VOCAB_SIZE) for _ in range(self._random.randint(4, 120))]
        self.requests.append(self.engine.submit(prompt, self._random.randint(4, 64)))
        return self.requests[-1]

    def burst(self) -> Iterator[dict[str, int]]:
        """Serve the burst, and yield the engine's statistics after each step."""
        missing, is_busy = self.config.requests, True
        while is_busy or missing:
            arriving = min(self.config.per_step, missing)
            missing -= arriving
            for _ in range(arriving):
                self.submit()
            is_busy = self.engine.step()
            yield self.engine.stats()

    def serve(self, update: Callable[[dict[str, int], float], object] | None = None) -> ServeResult:
        """Serve the burst.

        Args:
            update: Called after each step with the engine's statistics, and the tokens per second so far.

        Returns:
            The result, not checked yet.
        """
        result = ServeResult(self.config, self.engine.stats())
        begin, before = perf_counter(), result.stats["generated_tokens"]
        for stats in self.burst():
            result.stats = stats
            result.peak_in_use = max(result.peak_in_use, stats["in_use"])
            result.peak_running = max(result.peak_running, stats["running"])
            if update is not None:
                update(stats, (stats["generated_tokens"] - before) / (perf_counter() - begin))
        result.served_s = perf_counter() - begin
        return result

    def check(self, result: ServeResult, update: Callable[[], object] | None = None) -> None:
        """Generate every request again with the model alone, and record the differences.

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
        result.alone_s = perf_counter() - begin
        result.differences = tuple(found)

    def _difference(self, number: int, request: Request) -> Iterator[Difference]:
        prompt = torch.tensor([request.prompt], device=self.config.device)
        output = self.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=request.max_new_tokens,
            do_sample=False,
        )
        alone = output[0, prompt.shape[1] :].tolist()
        for position, (expected, token) in enumerate(zip(alone, request.tokens, strict=True)):
            if expected != token:
                with torch.no_grad():
                    logits = self.model(output[:, : prompt.shape[1] + position]).logits[0, -1]
                yield Difference(number, position, float(logits[expected] - logits[token]))
                return


def default_device() -> str:
    """A GPU if PyTorch has one, else the CPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def spell(token: int) -> str:
    """A token as a syllable, some with a leading space."""
    consonants, vowels = "bdfgklmnprstvz", "aeiou"
    syllable = consonants[token % len(consonants)] + vowels[token // len(consonants) % len(vowels)]
    return f" {syllable}" if token % 3 == 0 else syllable
