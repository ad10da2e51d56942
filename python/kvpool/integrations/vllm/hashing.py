"""The hashes of a request's blocks, all of them in one call.

vLLM serializes and hashes block after block in Python. `BlockHasher` writes the same bytes in Rust. Requests
whose hashes cover more than tokens (images, LoRA, a salt, embeddings, tokens ahead) go vLLM's way.

vLLM hashes a request when it receives it, before the scheduler has it, and fails it alone if that fails: what
it says of its session is checked there.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from kvpool._kvpool import BlockHasher
from kvpool.integrations.seams import EngineMismatchError
from kvpool.integrations.vllm.kv_cache_manager import EVICTION
from kvpool.integrations.vllm.seams import HASHES, VLLM
from kvpool.integrations.vllm.turns import check

VLLM.require(HASHES)

from vllm.utils import hashing  # noqa: E402
from vllm.v1.core import kv_cache_utils  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.v1.request import Request

__all__ = ["get_request_block_hasher"]

_ALGORITHMS = ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")

_own = kv_cache_utils.get_request_block_hasher


def get_request_block_hasher(
    hash_block_size: int,
    caching_hash_fn: Callable[[Any], bytes],
    *lookahead: int,
) -> Callable[[Request], list[bytes]]:
    """Return what vLLM's function of this name returns: a function from a request to hashes.

    They are the hashes of the full blocks that it has none for. vLLM 0.32 knows no tokens ahead.

    Raises:
        EngineMismatchError: If a hash of kvpool differs from vLLM's.
    """
    own: Callable[[Request], list[bytes]] = _own(hash_block_size, caching_hash_fn, *lookahead)
    name = next((each for each in _ALGORITHMS if getattr(hashing, each, None) is caching_hash_fn), None)
    if name is None or any(lookahead):
        return _checking(own)
    hasher = BlockHasher(name, hash_block_size)
    _compare(hasher, caching_hash_fn, hash_block_size)
    hashes = hasher.hashes

    def request_block_hasher(request: Request) -> list[bytes]:
        known, tokens = request.block_hashes, request._all_token_ids  # noqa: SLF001
        start = len(known) * hash_block_size
        if start + hash_block_size > len(tokens):
            return []
        if (
            request.mm_features
            or request.lora_request is not None
            or request.cache_salt
            or request.prompt_embeds is not None
        ):
            return own(request)
        found = hashes(tokens, start, known[-1] if known else kv_cache_utils.NONE_HASH)
        return own(request) if found is None else found

    # For `tokens`, which asks only once a block is full.
    request_block_hasher.kvpool_block_size = hash_block_size  # type: ignore[attr-defined]
    return _checking(request_block_hasher)


def _checking(hasher: Callable[[Request], list[bytes]]) -> Callable[[Request], list[bytes]]:
    """Return a hasher that refuses requests with wrong arguments of kvpool, if a policy learns from them."""
    if os.environ.get(EVICTION, "lru") == "lru":
        return hasher

    def checking_hasher(request: Request) -> list[bytes]:
        if not request.block_hashes:
            check(request)
        return hasher(request)

    if size := getattr(hasher, "kvpool_block_size", 0):
        checking_hasher.kvpool_block_size = size  # type: ignore[attr-defined]
    return checking_hasher


def _compare(hasher: BlockHasher, function: Callable[[Any], bytes], block_size: int) -> None:
    tokens = [(0, 23, 24, 255, 256, 65_535, 65_536, 2**31 - 1)[at % 8] for at in range(2 * block_size)]
    first = kv_cache_utils.hash_block_tokens(function, None, tokens[:block_size])
    expected = [first, kv_cache_utils.hash_block_tokens(function, first, tokens[block_size:])]
    found = hasher.hashes(tokens, 0, kv_cache_utils.NONE_HASH)
    if found not in (None, expected):
        raise EngineMismatchError(
            f"a block of {block_size} tokens hashes to {expected[0].hex()} in vLLM by {function.__name__}, "
            f"and to {found[0].hex()} in kvpool"
        )
