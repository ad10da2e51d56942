"""Contexts that grow, fork and are cut, as the numbers of their blocks."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray


class Context:
    """The tokens that a model is given, in whole blocks with numbers and a rest that fills none.

    Two contexts share a number exactly if one was copied from the other behind that block. So the rest of a
    block that contexts have in common is not found, as in the published traces.

    Args:
        block_size: Tokens of a block.
        numbers: Where the numbers of new blocks come from; contexts that are copied share it.
    """

    def __init__(self, block_size: int, numbers: Iterator[int] | None = None) -> None:
        self._block_size = block_size
        self._numbers = count() if numbers is None else numbers
        self._blocks: list[int] = []
        self._rest = 0

    def __len__(self) -> int:
        return len(self._blocks) * self._block_size + self._rest

    def extend(self, tokens: int) -> None:
        """Append tokens that no other context has."""
        whole, self._rest = divmod(self._rest + tokens, self._block_size)
        self._blocks.extend(next(self._numbers) for _ in range(whole))

    def copy(self, tokens: int | None = None) -> Context:
        """Return a context with the first `tokens` tokens of this one, all by default."""
        result = Context(self._block_size, self._numbers)
        kept = len(self) if tokens is None else min(tokens, len(self))
        whole, result._rest = divmod(kept, self._block_size)
        result._blocks = self._blocks[:whole]
        return result

    def prompt(self) -> NDArray[np.int64]:
        """Return the numbers of the blocks of a prompt of these tokens, int64 `[ceil(len / block_size)]`."""
        rest = [next(self._numbers)] if self._rest else []
        return np.array([*self._blocks, *rest], dtype=np.int64)
