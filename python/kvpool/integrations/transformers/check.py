"""The comparison of a model over pools with its own forward pass, on a few random tokens."""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers import DynamicCache

from kvpool._kvpool import BatchPlanner, GDNPool
from kvpool.errors import ConfigError
from kvpool.factories import make_full_attention_net_mem_pool, make_req_to_token_pool
from kvpool.integrations.transformers import attention
from kvpool.integrations.transformers.layout import call, name_of, refused, some_tokens
from kvpool.integrations.transformers.probe import empty_cache, run_step
from kvpool.integrations.transformers.runner import Runner

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvpool.integrations.transformers.probe import Layout

__all__ = ["check_logits"]

_DECODED = 4
"""Tokens that each request decodes."""

_SHORT = 7
"""Tokens of the shorter prompt."""

_LONG = 24
"""Tokens of the longer prompt, at least."""

_CHEAP = 64
"""Prompts become longer than windows of up to so many tokens."""

_WINDOW = re.compile("window|chunk|block|scale|original_max")
"""Numbers in a configuration from which on a model may treat tokens in another way."""

_FINE, _HALF, _COARSE = 5e-4, 0.05, 0.2
"""The most that logits may differ, as a part of the largest one: in float32, float16, and with fewer bits."""


class _Task(NamedTuple):
    """A request of the comparison.

    Attributes:
        tokens: Its tokens, the decoded ones included.
        chunks: The number of new tokens in each step, of which the last ones are decoded.
    """

    tokens: torch.Tensor
    chunks: list[int]


def check_logits(model: PreTrainedModel, layout: Layout, longest: int) -> None:
    """Compare the logits of a model over small pools with its own.

    Two prompts of unequal length are computed in chunks, then tokens are decoded, all in the same steps. The
    model's own forward pass gets one prompt at a time, as `generate` does.

    Args:
        model: The model, with its own attention.
        layout: Its layers.
        longest: The most tokens of a request.

    Raises:
        ConfigError: If they differ.
    """
    _check_positions(model, layout, longest)
    tasks = _tasks(model, longest)
    own = [_own_logits(model, task) for task in tasks]
    with attention.implemented(model), refused(model):
        pooled = _pooled_logits(model, layout, tasks)
    for wanted, found in zip(own, pooled, strict=True):
        _compare(model, wanted, found)


def _tasks(model: PreTrainedModel, longest: int) -> list[_Task]:
    """Return two requests: one is longer than windows of the configuration, where these are short."""
    config: Any = model.config.get_text_config(decoder=True)
    windows = [
        value
        for name, value in config.to_dict().items()
        if _WINDOW.search(name) and type(value) is int and 1 < value <= _CHEAP
    ]
    most = longest - _DECODED
    if most < 1:
        return []
    long = min(max([_LONG, *(window + window // 4 + 4 for window in windows)]), most)
    short = min(_SHORT, most)
    parts = {True: [long - long // 2, long // 2], False: [short - short // 2, short // 2]}
    return [
        _Task(
            some_tokens(model, sum(chunks) + _DECODED, seed=seed),
            [*(chunk for chunk in chunks if chunk), *([1] * _DECODED)],
        )
        for seed, chunks in enumerate((parts[True], parts[False]))
    ]


def _check_positions(model: PreTrainedModel, layout: Layout, longest: int) -> None:
    """Run tokens at first positions, alone and beside tokens at the last ones of the longest request.

    Raises:
        ConfigError: If that changes the logits of the first ones.
    """
    if layout.by_length:  # requests of other lengths are in other calls
        return
    n = min(3, longest)
    tokens, last = some_tokens(model, 2, n), longest - n

    def run(tokens: torch.Tensor, starts: list[int]) -> torch.Tensor:
        return run_step(model, layout, tokens, starts, empty_cache(model, layout, len(tokens)))

    with attention.implemented(model):
        alone = run(tokens[:1], [0])
        beside = run(tokens, [0, last])[:1]
        run(tokens[:1], [0])  # what the model keeps of positions is as before
    if not _is_near(model, alone[0], beside[0]):
        raise ConfigError(
            f"{name_of(model)} computes other logits for a request when another one of the same step has "
            f"{longest} tokens, which is not supported (a lower max_context_len may be)"
        )


def _own_logits(model: PreTrainedModel, task: _Task) -> torch.Tensor:
    """Return the logits at the end of each chunk: of the prompt at once, then token by token."""
    with refused(model):
        cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    prompt = len(task.tokens) - _DECODED
    takes = inspect.signature(model.forward).parameters
    logits, start = [], 0
    for length in (prompt, *([1] * _DECODED)):
        end = start + length
        options: dict[str, object] = {}
        if "attention_mask" in takes:
            options["attention_mask"] = torch.ones(1, end, dtype=torch.int64, device=task.tokens.device)
        if "position_ids" in takes:
            options["position_ids"] = torch.arange(start, end, device=task.tokens.device)[None]
        logits.append(call(model, task.tokens[None, start:end], cache, **options)[0])
        start = end
    ends = torch.tensor(task.chunks).cumsum(0) - 1
    return torch.cat(logits)[ends.to(task.tokens.device)]


def _pooled_logits(model: PreTrainedModel, layout: Layout, tasks: list[_Task]) -> list[torch.Tensor]:
    """Return the same logits of all requests, computed over pools."""
    if not tasks:
        return []
    device, longest = str(model.device), max(len(task.tokens) for task in tasks)
    n, page_size = len(tasks), 4
    size = n * (longest + page_size)
    kv_pool, allocator = make_full_attention_net_mem_pool(
        -(-size // page_size) * page_size,
        len(layout.attention_layers),
        *layout.kv_shape,
        device=device,
        dtype=model.dtype,
        page_size=page_size,
    )
    table = make_req_to_token_pool(n, longest, device)
    gdn_pool = None
    if layout.gdn_shape is not None:
        gdn_pool = GDNPool(n, len(layout.linear_layers), *layout.gdn_shape, device=device, dtype=model.dtype)
    planner = BatchPlanner(table, allocator, n, size)
    rows = table.alloc(n) or []
    runner = Runner(model, layout, kv_pool, gdn_pool)
    logits: list[list[torch.Tensor]] = [[] for _ in tasks]
    done = [0] * n
    for step in range(max(len(task.chunks) for task in tasks)):
        # The order of the batch is not that of the rows.
        running = [i for i in reversed(range(n)) if step < len(tasks[i].chunks)]
        ends = [done[i] + tasks[i].chunks[step] for i in running]
        plan = planner.extend([rows[i] for i in running], [done[i] for i in running], ends)
        assert plan is not None, "the pools have room for all tokens"  # noqa: S101
        new = [tasks[i].tokens[done[i] : end] for i, end in zip(running, ends, strict=True)]
        for i, end, row in zip(running, ends, runner.forward(torch.cat(new), plan), strict=True):
            logits[i].append(row)
            done[i] = end
    return [torch.stack(of) for of in logits]


def _compare(model: PreTrainedModel, wanted: torch.Tensor, found: torch.Tensor) -> None:
    """Refuse logits over pools that differ by more than rounding."""
    if not wanted.isfinite().any():
        raise ConfigError(
            f"the logits of {name_of(model)} are not finite, so that they cannot be compared: pass "
            "check=False where its weights are loaded later"
        )
    if not _is_near(model, wanted, found):
        raise ConfigError(
            f"{name_of(model)} has other logits over pools than in its own forward pass: it does what pools "
            "do not support (check=False leaves the comparison out)"
        )


def _is_near(model: PreTrainedModel, wanted: torch.Tensor, found: torch.Tensor) -> bool:
    """Return whether logits `[n, vocab]` differ by no more than rounding.

    With 16 bits or less, another expert may be chosen for a token: then most of the tokens tell.
    """
    wanted, found = wanted.float(), found.float()
    finite = wanted.isfinite()
    if not torch.equal(finite, found.isfinite()):
        return False
    largest = float(wanted.where(finite, 0).abs().max())
    differences = (wanted - found).where(finite, 0).abs().amax(1)
    part = _tolerance(model)
    differs = differences.max() if part == _FINE else differences.median()
    return float(differs) <= part * largest


def _tolerance(model: PreTrainedModel) -> float:
    """Return by which part of the largest logit a model's logits may differ from one batch to another."""
    if model.dtype is torch.float32 and model.device.type == "cuda":
        return _FINE if torch.get_float32_matmul_precision() == "highest" else _HALF
    return {torch.float32: _FINE, torch.float64: _FINE, torch.float16: _HALF}.get(model.dtype, _COARSE)
