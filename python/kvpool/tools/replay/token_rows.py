"""Rows of K and V that identify their token, and the pool that holds them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvpool import KVPool
from kvpool.tools.replay.errors import VerificationError
from kvpool.tools.replay.timing import timed

if TYPE_CHECKING:
    from array import array

    from kvpool.tools.replay.config import ReplayConfig
    from kvpool.tools.replay.prompts import Prompts

CHUNK_BYTES = 1 << 20
"""Most bytes of K, and as many of V, per `set_kv_buffer` or `gather_kv` call; small enough for the cache."""

_TELLING_BYTES = 6
"""Rows of so many bytes or more are different for all tokens of a trace."""


def _hex(words: torch.Tensor) -> str:
    return words.cpu().numpy().tobytes().hex()


def _mix(words: torch.Tensor) -> torch.Tensor:
    """Scramble int64 words so that every input bit moves every output bit (SplitMix64, modulo 2**64)."""
    words = (words ^ ((words >> 30) & 0x3_FFFF_FFFF)) * -0x40A7_B892_E31B_1A47
    words = (words ^ ((words >> 27) & 0x1F_FFFF_FFFF)) * -0x6B2F_B644_ECCE_EE15
    return words ^ ((words >> 31) & 0x1_FFFF_FFFF)


class TokenRows:
    """K and V rows that identify their token, layer and part.

    A token's key is a 64-bit hash of (seed, prefix, position), with the prefix of `Prompts`; word `w` of its
    row is the key XOR a random word for (layer, part, `w`), so that a row takes one pass over memory. Words
    are as wide as the row's byte length allows, up to 8 bytes. Rows are bit patterns in the pool's dtype:
    they are never converted, so they are exact in any dtype.

    Attributes:
        prompts: The prefix of each position.
        dtype: The pool's dtype.
        chunk: The most rows that `expected` computes at once.
        prefix_keys: int64 `[prefixes]`, a 64-bit hash of (seed, prefix).
    """

    _STRIDE = -0x61C8_8646_80B5_83EB  # 2**64 divided by the golden ratio: SplitMix64's increment

    def __init__(self, config: ReplayConfig, prompts: Prompts) -> None:
        self.prompts = prompts
        self.dtype: torch.dtype = getattr(torch, config.dtype)
        row_bytes = config.heads * config.head_dim * self.dtype.itemsize
        self._shape = (config.heads, config.head_dim)
        self._device = torch.device(config.device)
        widths = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
        self._word_bytes = next(width for width in widths if row_bytes % width == 0)
        self._word = widths[self._word_bytes]
        self._words = row_bytes // self._word_bytes
        seed = _mix(torch.tensor([config.seed]).to(self._device))
        prefixes = torch.arange(prompts.prefixes, device=self._device)
        self.prefix_keys: torch.Tensor = _mix(prefixes ^ seed)
        salts = torch.arange(config.layers * 2 * self._words, device=self._device)
        self._salts = _mix(salts * self._STRIDE + (config.seed + 1)).view(config.layers, 2, self._words)
        self.chunk: int = max(1, CHUNK_BYTES // (8 * self._words))
        self._wide = torch.empty(2, self.chunk, self._words, dtype=torch.int64, device=self._device)

    def keys(self, prefix_keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the token keys, int64 `[n]`, of `positions` `[n]` with `prefix_keys`, int64 `[n]`."""
        return _mix(positions.to(torch.int64) * self._STRIDE + prefix_keys)

    def prefix_keys_of(self, request: int, begin: int, end: int) -> torch.Tensor:
        """Return the prefix keys, int64 `[end - begin]`, of one request's positions from `begin` to `end`."""
        prefixes = torch.from_numpy(self.prompts.prefixes_of(request, begin, end))
        return self.prefix_keys[prefixes.to(self._device)]

    def keys_of(self, request: int, begin: int, end: int) -> torch.Tensor:
        """Return the token keys, int64 `[end - begin]`, of one request's positions from `begin` to `end`."""
        positions = torch.arange(begin, end, device=self._device)
        return self.keys(self.prefix_keys_of(request, begin, end), positions)

    def expected(self, keys: torch.Tensor, layer: int, part: int) -> torch.Tensor:
        """Compute the rows' words `[n, words]` for at most `chunk` keys.

        The result is valid until the next call for the same `part`.

        Args:
            keys: int64 `[n]`.
            layer: Layer of the KV pool.
            part: 0 for K, 1 for V.
        """
        words = self._wide[part, : keys.numel()]
        torch.bitwise_xor(keys[:, None], self._salts[layer, part], out=words)
        if self._word is torch.int64:
            return words
        # The product's high bits depend on all bits of the key and the salt; the shift keeps as many as fit.
        narrow = (words * self._STRIDE) >> (64 - 8 * self._word_bytes)
        return narrow.to(self._word)

    def as_rows(self, words: torch.Tensor) -> torch.Tensor:
        """Return the same memory in the pool's dtype, `[n, heads * head_dim]`."""
        return words.view(self.dtype)

    def as_words(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the same memory of contiguous rows `[n, heads, head_dim]` as words `[n, words]`."""
        return rows.view(rows.shape[0], -1).view(self._word)

    def buffers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return two uninitialised tensors `[chunk, heads, head_dim]` for gathered K and V."""
        shape = (self.chunk, *self._shape)
        return (
            torch.empty(shape, dtype=self.dtype, device=self._device),
            torch.empty(shape, dtype=self.dtype, device=self._device),
        )


class KvStore:
    """The KV pool, written and checked token by token."""

    def __init__(
        self, config: ReplayConfig, pool_size: int, prompts: Prompts, samples: dict[str, array[int]]
    ) -> None:
        self.pool: KVPool = KVPool(
            pool_size,
            config.layers,
            config.heads,
            config.head_dim,
            device=config.device,
            dtype=config.dtype,
            page_size=config.page_size,
        )
        self.rows: TokenRows = TokenRows(config, prompts)
        self._layers = config.layers
        self._set_kv = timed(self.pool.set_kv_buffer, samples["set_kv"])
        self._gather = timed(self.pool.gather_kv, samples["gather"])
        self._k, self._v = self.rows.buffers()

    def store(self, keys: torch.Tensor, slots: torch.Tensor) -> None:
        """Write the rows of all layers for token keys `[n]` into slots `[n]`."""
        for begin in range(0, keys.numel(), self.rows.chunk):
            part = slice(begin, begin + self.rows.chunk)
            for layer in range(self._layers):
                k = self.rows.as_rows(self.rows.expected(keys[part], layer, 0))
                v = self.rows.as_rows(self.rows.expected(keys[part], layer, 1))
                self._set_kv(layer, slots[part], k, v)

    def check(self, request: int, keys: torch.Tensor, slots: torch.Tensor) -> None:
        """Compare K and V of all layers in slots `[n]` with what `store` wrote for token keys `[n]`.

        Args:
            request: Index of the request, for the error.
            keys: int64 `[n]`, for positions 0 to n - 1.
            slots: int32 `[n]`, from the request table.

        Raises:
            VerificationError: If for the first row that differs.
        """
        for begin in range(0, keys.numel(), self.rows.chunk):
            part = slice(begin, begin + self.rows.chunk)
            count = keys[part].numel()
            for layer in range(self._layers):
                found = self._gather(layer, slots[part], (self._k[:count], self._v[:count]))
                for which, rows in enumerate(found):
                    words = self.rows.as_words(rows)
                    expected = self.rows.expected(keys[part], layer, which)
                    if not torch.equal(words, expected):
                        row = int((words != expected).any(dim=1).nonzero()[0, 0])
                        raise VerificationError(
                            request=request,
                            position=begin + row,
                            layer=layer,
                            part="KV"[which],
                            slot=int(slots[begin + row]),
                            expected=_hex(expected[row]),
                            found=_hex(words[row]),
                            found_token=self._token_of(words[row].clone(), layer, which),
                        )

    def _token_of(self, words: torch.Tensor, layer: int, part: int) -> tuple[int, int] | None:
        """Return the first (request, position) with this row, if rows are long enough to tell."""
        if words.numel() * words.itemsize < _TELLING_BYTES:
            return None
        for request, total_len in enumerate(self.rows.prompts.total_lens):
            for begin in range(0, total_len, self.rows.chunk):
                keys = self.rows.keys_of(request, begin, min(begin + self.rows.chunk, total_len))
                same = (self.rows.expected(keys, layer, part) == words).all(dim=1)
                if same.any():
                    return request, begin + int(same.nonzero()[0, 0])
        return None
