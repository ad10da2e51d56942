"""A trace of requests."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

BLOCK_SIZE = 512
"""Tokens of a block in the Mooncake traces."""

END = "end"
"""What follows a request whose context does not go on."""


class TraceError(ValueError):
    """A trace file cannot be read; the message names the file and the line."""


@dataclass(frozen=True)
class Trace:
    """Requests in order of arrival.

    Attributes:
        name: Name of the trace in reports.
        arrival_s: float64 `[n]`, seconds since the first request, ascending.
        input_lens: int64 `[n]`, prompt tokens, at least 1.
        output_lens: int64 `[n]`, generated tokens, at least 0.
        blocks: For each request the numbers of its prompt's blocks, int64 `[ceil(input_len / block_size)]`,
            or none for a prompt that is like no other. A number names a block with everything before it.
            Empty if the trace does not say which prompts begin alike.
        block_size: Tokens of a block. The last block of a prompt may have fewer.
        sessions: For each request the number of its session, int64 `[n]`; None if the trace does not say
            which requests belong together.
        contexts: For each request the number of its context, int64 `[n]`: a session has one, and each of its
            sub-agents another. None if the trace does not say what follows.
        followed_by: For each request what is known at its end of the next one in its context, str `[n]`:
            `END`, the kind of the pause before it such as "tool" or "user", or "" for nothing. None if the
            trace does not say.
    """

    name: str
    arrival_s: NDArray[np.float64]
    input_lens: NDArray[np.int64]
    output_lens: NDArray[np.int64]
    blocks: tuple[NDArray[np.int64], ...] = ()
    block_size: int = BLOCK_SIZE
    sessions: NDArray[np.int64] | None = None
    contexts: NDArray[np.int64] | None = None
    followed_by: NDArray[np.str_] | None = None

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def total_lens(self) -> NDArray[np.int64]:
        """int64 `[n]`: tokens of each request when it ends."""
        return self.input_lens + self.output_lens

    def take(self, kept: NDArray[np.intp]) -> Trace:
        """Return the requests with these indices, ascending; their arrivals stay what they are."""
        return replace(
            self,
            arrival_s=self.arrival_s[kept],
            input_lens=self.input_lens[kept],
            output_lens=self.output_lens[kept],
            blocks=tuple(self.blocks[at] for at in kept) if self.blocks else (),
            sessions=None if self.sessions is None else self.sessions[kept],
            contexts=None if self.contexts is None else self.contexts[kept],
            followed_by=None if self.followed_by is None else self.followed_by[kept],
        )

    def head(self, requests: int | None) -> Trace:
        """Return the first `requests` requests; all of them for None, or if there are fewer."""
        return self.take(np.arange(len(self))[:requests])

    def all_blocks(self) -> list[NDArray[np.int64]]:
        """Return `blocks`, in which prompts without block numbers get numbers that no other prompt has."""
        counts = (-(-self.input_lens // self.block_size)).tolist()
        free = 1 + max((int(blocks.max()) for blocks in self.blocks if blocks.size), default=-1)
        result = []
        for count, blocks in zip(counts, self.blocks or [np.empty(0, np.int64)] * len(self), strict=True):
            if blocks.size:
                result.append(blocks)
            else:
                result.append(np.arange(free, free + count))
                free += count
        return result
