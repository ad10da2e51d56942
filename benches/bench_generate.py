"""`PooledCache` beside transformers' `DynamicCache`: its part of a decode step, and all of `generate()`.

`make bench-generate` runs it. A model of 4 layers with random weights, 8 heads of 64 elements of float32, and
one thread of PyTorch's. The step is `update` in each layer, of which attention gets all keys and values; for
beams, `reorder_cache` first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from harness import Case, Report
from transformers import AutoModelForCausalLM, DynamicCache, Qwen3Config

from kvpool.integrations.transformers import PooledCache

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers.cache_utils import Cache

LAYERS, HEADS, DIM, VOCAB = 4, 8, 64, 512
DECODED = 40


def a_model() -> Any:  # noqa: ANN401 - of `transformers`
    """The model that all cases have."""
    torch.manual_seed(0)
    ends: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        head_dim=DIM,
        **ends,
    )
    make: Any = AutoModelForCausalLM.from_config
    return make(config).eval()


def write(cache: Cache, batch: int, new: int) -> None:
    """Writes new tokens in every layer."""
    states = torch.randn(batch, HEADS, new, DIM)
    for layer in range(LAYERS):
        cache.update(states, states, layer)


def step(cache: Any, batch: int, length: int, order: torch.Tensor | None = None) -> Case:  # noqa: ANN401
    """A decode step behind `length` tokens, of which the last were decoded too, and its undoing."""
    states = torch.randn(batch, HEADS, 1, DIM)
    write(cache, batch, length - DECODED)
    for _ in range(DECODED + 1):
        write(cache, batch, 1)

    def run(_: int) -> None:
        if order is not None:
            cache.reorder_cache(order)
        for layer in range(LAYERS):
            cache.update(states, states, layer)

    return Case(run, lambda: cache.crop(-1))


def whole(model: Any, make: Callable[[], Any], batch: int, length: int) -> Case:  # noqa: ANN401
    """All of a call of `generate()`, prompts included: 24 tokens."""
    chance = torch.Generator().manual_seed(1)
    prompts = torch.randint(1, VOCAB, (batch, length), generator=chance)

    def run(_: int) -> None:
        model.generate(prompts, max_new_tokens=24, do_sample=False, cache=make())

    return Case(run, calls=1)


def main() -> None:
    """Runs all cases."""
    torch.set_num_threads(1)
    report, model = Report("generate"), a_model()
    order = torch.tensor([0, 0, 1, 1, 2, 4, 4, 7])
    for question, batch, length, page_size, beams in (
        ("a step of 1 sequence of 4,096, read in place", 1, 4096, 16, None),
        ("a step of 8 of 512, a page each, read in place", 8, 512, 1024, None),
        ("a step of 8 of 512, pages of 16, gathered", 8, 512, 16, None),
        ("a step of 8 beams of 1,024, pages of 16, gathered", 8, 1024, 16, order),
    ):
        if report.wants(question):
            size = -(-(length + 1) // page_size) * page_size * batch
            ours = PooledCache(model, size, batch, page_size=page_size)
            sides = (step(cache, batch, length, beams) for cache in (ours, DynamicCache(config=model.config)))
            report.compare(question, *sides, alternative="DynamicCache")
    for question, batch, length, page_size in (
        ("generate(), 1 prompt of 2,048", 1, 2048, 16),
        ("generate(), 8 prompts of 256, pages of 16", 8, 256, 16),
    ):
        if report.wants(question):
            pooled = PooledCache(model, (length + 32) * batch, batch, page_size=page_size)

            def emptied(pooled: PooledCache = pooled) -> PooledCache:
                pooled.reset()
                return pooled

            sides = (whole(model, make, batch, length) for make in (emptied, DynamicCache))
            report.compare(question, *sides, alternative="DynamicCache")
    report.finish()


if __name__ == "__main__":
    main()
