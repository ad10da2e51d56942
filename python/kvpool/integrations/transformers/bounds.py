"""A guard for what a model looks up: a position may exceed a table, at which a GPU stops for good."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from kvpool.errors import ConfigError
from kvpool.integrations.transformers.layout import name_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedModel

__all__ = ["Bounds"]

_ATEN = torch.ops.aten


class Bounds(TorchDispatchMode):  # type: ignore[no-untyped-call]  # PyTorch's own
    """A block in which an index beyond a table is an error before it is used.

    Args:
        model: The model that runs in the block.
        longest: The most tokens of a request, whose last positions it gets.
    """

    def __init__(self, model: PreTrainedModel, longest: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # PyTorch's own
        self._model, self._longest = model, longest

    @override
    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        for size, indices in _looked_up(func, args):
            if indices.numel() and int(indices.max()) >= size:
                raise ConfigError(
                    f"{name_of(self._model)} has a table of positions with {size} entries, fewer than a "
                    f"request of max_context_len={self._longest} tokens needs"
                )
        return func(*args, **(kwargs or {}))


def _looked_up(
    func: Any,  # noqa: ANN401 - an operation of PyTorch
    args: tuple[Any, ...],
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the size of each dimension that an operation looks up, and the indices."""
    if func is _ATEN.embedding.default:
        yield args[0].shape[0], args[1]
    elif func is _ATEN.index.Tensor:
        for dim, indices in enumerate(args[1]):
            if indices is not None and indices.dtype is torch.int64:
                yield args[0].shape[dim], indices
    elif func in {_ATEN.index_select.default, _ATEN.gather.default}:
        yield args[0].shape[args[1]], args[2]
