"""The tokens of a trace's requests, equal where the trace says that prompts are equal."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvpool.tools.traces import Trace


def token_ids(prefixes: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int32]:
    """Return token ids, int32 `[n]`, not negative: a hash of the number of a prefix and the position."""
    words: NDArray[np.uint32] = prefixes.astype(np.uint32) * np.uint32(0x9E37_79B1)
    words += positions.astype(np.uint32) * np.uint32(0x85EB_CA6B)
    words ^= words >> np.uint32(16)
    words *= np.uint32(0x7FEB_352D)
    words ^= words >> np.uint32(15)
    words >>= np.uint32(1)
    return words.astype(np.int32)


class Prompts:
    """The texts of a trace's requests.

    A position belongs to a numbered *prefix*: in the prompt to its block with everything before it, behind
    the prompt to the request's own output. Equal numbers mean equal tokens up to the position.

    Attributes:
        prefixes: The number of prefixes.
        total_lens: For each request its tokens, prompt and output.
    """

    def __init__(self, trace: Trace) -> None:
        self._blocks = trace.all_blocks()
        self._block_size = trace.block_size
        self._input_lens = trace.input_lens.tolist()
        self.total_lens: list[int] = trace.total_lens.tolist()
        self._first_output = 1 + max((int(blocks.max()) for blocks in self._blocks), default=-1)
        self.prefixes: int = self._first_output + len(trace)

    def output(self, request: int) -> int:
        """Return the number of the prefix of all positions behind a prompt."""
        return self._first_output + request

    def prefixes_of(self, request: int, begin: int, end: int) -> NDArray[np.int64]:
        """Return the numbers of the prefixes, int64 `[end - begin]`, of positions from `begin` to `end`."""
        prompt_end = min(max(self._input_lens[request], begin), end)
        result = np.full(end - begin, self.output(request), dtype=np.int64)
        positions = np.arange(begin, prompt_end)
        result[: prompt_end - begin] = self._blocks[request][positions // self._block_size]
        return result

    def tokens_of(self, request: int, begin: int, end: int) -> NDArray[np.int32]:
        """Return the token ids, int32 `[end - begin]`, of positions from `begin` to `end`."""
        return token_ids(self.prefixes_of(request, begin, end), np.arange(begin, end))

    def whole_blocks_of(self, request: int) -> NDArray[np.int32]:
        """Return the prompt's token ids, int32 `[blocks * block_size]`, as if its last block were full."""
        prefixes = np.repeat(self._blocks[request], self._block_size)
        return token_ids(prefixes, np.arange(len(prefixes)))
