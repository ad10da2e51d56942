"""The tokens that models find in a prefix cache: prompts of whole blocks, computed in chunks, one by one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvpool import TokenToKVPoolAllocator
from kvpool._kvpool import PrefixCache
from kvpool.errors import ConfigError
from kvpool.tools.policies import policy_named
from kvpool.tools.replay.prompts import Prompts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from kvpool import ArenaPrefixCache
    from kvpool.tools.traces import Trace


def whole_blocks(trace: Trace, chunk: int) -> list[NDArray[np.int32]]:
    """Return the prompts of a trace, without the last tokens of each that do not fill a block.

    Raises:
        ConfigError: If a chunk of them is less than a block.
    """
    block = trace.block_size
    if chunk < block:
        raise ConfigError(f"chunk {chunk} is less than a block of {block} tokens")
    prompts = Prompts(trace)
    return [
        prompts.whole_blocks_of(request)[: length // block * block]
        for request, length in enumerate(trace.input_lens.tolist())
    ]


def found_by_full_attention(
    texts: Sequence[NDArray[np.int32]], capacity: int, block: int, policy: str
) -> int:
    """Return the tokens that a full-attention model finds with memory of `capacity` tokens."""
    size = capacity // block * block
    allocator = TokenToKVPoolAllocator(size, device="cpu", page_size=block, need_sort=False)
    cache = PrefixCache(allocator, policy=policy_named(policy))
    found = 0
    for text in texts:
        tokens = text[:size]
        with cache.match(tokens) as lease:
            found += lease.length
            if lease.length < len(tokens):
                lease.publish(tokens[lease.length :], allocator.alloc(len(tokens) - lease.length))
    return found


def chunk_end(begin: int, length: int, chunk: int, known: int) -> int:
    """Return where a chunk ends: at the latest where other prompts diverge from this one, at `known`."""
    end = min(begin + chunk, length)
    return known if begin < known < end else end


def found_in_arena(
    texts: Sequence[NDArray[np.int32]],
    cache: ArenaPrefixCache,
    chunk: int,
    alloc: Callable[[int], dict[str, list[Any]] | None],
) -> int:
    """Return the tokens that are found in an arena, which gives units for so many pages by `alloc`."""
    page = cache.arena.layout.page_size
    chunk = chunk // page * page
    found = 0
    for text in texts:
        with cache.match(text) as lease:
            found += lease.length
            known = lease.known_length
            while lease.length < len(text):
                begin = lease.length
                end = chunk_end(begin, len(text), chunk, known)
                units = alloc((end - begin) // page)
                # The arena has no room for more of the prompt.
                if units is None:
                    break
                lease.publish(text[:end], units)
    return found
