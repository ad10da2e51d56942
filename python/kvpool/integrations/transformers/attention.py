"""The attention function "kvpool" of `transformers`, and the masks that models make for it.

While a block of `use` runs, calls of the model's attention and requests for masks go to the block's own
functions. Elsewhere the attention is PyTorch's SDPA, or the same formula with capped scores and attention
sinks, so that a model whose implementation is "kvpool" generates as before.
"""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from kvpool.attention import plain_attention
from kvpool.errors import StateError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch
    from transformers import PretrainedConfig, PreTrainedModel

    # Arguments: a module, its query, key, value and mask, and the options of an attention function.
    Attend = Callable[..., torch.Tensor]
    # Arguments: those of `sdpa_mask`, by name.
    MakeMask = Callable[..., "torch.Tensor | None"]

__all__ = ["check_installed", "dense_attention", "implemented", "install", "use"]

_NAME = "kvpool"
"""The name of the attention function in `transformers`."""


class _Functions(NamedTuple):
    """What a model calls for attention and for a mask."""

    attend: Attend
    make_mask: MakeMask


# An option of the model's call would also reach other functions.
_IN_USE: ContextVar[_Functions | None] = ContextVar("kvpool_attention", default=None)


def _no_mask(**_options: object) -> None:
    """Return no mask: the attention function knows which keys a query attends to."""


@contextmanager
def use(attend: Attend, make_mask: MakeMask = _no_mask) -> Iterator[None]:
    """Let models with the attention "kvpool" call these functions, for the length of a block.

    Args:
        attend: Called with a module, its query, key, value and mask, and the options of the model; returns
            the output `[n, tokens, heads, elements]`.
        make_mask: Called with the arguments of `sdpa_mask`, by name; by default there are no masks.
    """
    token = _IN_USE.set(_Functions(attend, make_mask))
    try:
        yield
    finally:
        _IN_USE.reset(token)


@contextmanager
def implemented(model: PreTrainedModel) -> Iterator[None]:
    """Let a model call the attention "kvpool", for the length of a block."""
    before = _implementation(model.config)
    install(model)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def install(model: PreTrainedModel) -> None:
    """Let a model call the attention "kvpool" from now on."""
    model.set_attn_implementation(_NAME)


def check_installed(config: PretrainedConfig) -> None:
    """Refuse a model that would call another attention.

    Args:
        config: The configuration of its decoder.

    Raises:
        StateError: If its attention was set to another one.
    """
    implementation = _implementation(config)
    if implementation != _NAME:
        raise StateError(
            f"the attention of {config.model_type} was set to {implementation!r} after PooledModel set it to "
            f'"{_NAME}": set it back, and give models that need another one a configuration of their own'
        )


def _implementation(config: PretrainedConfig) -> str | None:
    name: str | None = config._attn_implementation  # noqa: SLF001 - there is no public accessor
    return name


def dense_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,  # noqa: ANN401 - passed on by the model
) -> torch.Tensor:
    """Compute attention over the tensors that the model passes, `[n, tokens, heads, elements]`."""
    softcap, sinks = options.get("softcap"), options.get("s_aux")
    output: torch.Tensor
    if softcap is None and sinks is None:
        output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        return output
    scale = options.get("scaling")
    output = plain_attention(query, key, value, attention_mask, scale=scale, softcap=softcap, sinks=sinks)
    return output.transpose(1, 2).contiguous()


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,  # noqa: ANN401 - passed on by the model
) -> tuple[torch.Tensor, None]:
    """Compute the attention "kvpool"."""
    functions = _IN_USE.get()
    attend = dense_attention if functions is None else functions.attend
    return attend(module, query, key, value, attention_mask, **options), None


def _mask(**options: Any) -> torch.Tensor | None:  # noqa: ANN401 - those of `sdpa_mask`
    """Make the mask of "kvpool"."""
    functions = _IN_USE.get()
    make_mask: MakeMask = sdpa_mask if functions is None else functions.make_mask
    return make_mask(**options)


AttentionInterface.register(_NAME, _attention)
AttentionMaskInterface.register(_NAME, _mask)
