"""Requests whose bytes are moved: their tokens, the pages that they have, and what is in each."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING

import numpy as np

from kvpool.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from kvpool._kvpool import CacheLayout, Group
    from kvpool.verify.finding import Entry, Finding
    from kvpool.verify.pattern import Array, Pattern

BYTES = 64 << 20
"""Bytes of all requests of a proof, unless the number of tokens is given."""

FIRST, SECOND = 4, 2
"""Requests of the first round, and those that take the places of half of them."""

_SHARES = (5, 4, 3, 2, 3, 4)
"""How the tokens are divided among the requests."""
_MOST_TOKENS, _TOKEN_IDS = 16384, 1 << 16


class Request:
    """A request: its tokens, and the bytes of all that a layout keeps for it after the last of them.

    Requests that begin alike have the same bytes there. Tokens are whole units of every group.

    Attributes:
        number: Number of the request; no two of a proof have the same.
        tokens: Ids of the tokens.
        arrays: The arrays of the layout.
    """

    def __init__(
        self, pattern: Pattern, number: int, tokens: Sequence[int], prefixes: NDArray[np.int64]
    ) -> None:
        self.number = number
        self.tokens = list(tokens)
        self.arrays: tuple[Array, ...] = pattern.arrays
        self._pattern = pattern
        self._groups: dict[str, Group] = {group.name: group for group in pattern.layout.groups}
        self._prefixes = prefixes
        self._units: dict[str, int] = pattern.layout.request_units(len(tokens))

    def pages(self, group: str) -> list[int]:
        """Return which pages of the request a group has, ascending.

        Of a window they are the last ones, and those of its sinks. A state is page 0.
        """
        each, count = self._pattern.unit_tokens(group), self._units[group]
        if each is None:
            return [0]
        all_pages = -(-len(self.tokens) // each)
        sinks = min(-(-self._groups[group].sinks // each), count) if count < all_pages else 0
        return [*range(sinks), *range(all_pages - (count - sinks), all_pages)]

    def data(self, array: Array) -> NDArray[np.uint8]:
        """Return the bytes of an array for this request, in the order of `pages`.

        They are uint8 `[pages, entries, entry_bytes]`; of a state `[1, 1, entry_bytes]`.
        """
        prefixes, positions = self._entries(array.group)
        found = self._pattern.bytes_of(array, prefixes, positions)
        return found.reshape(len(self.pages(array.group)), -1, found.shape[1])

    def has(self, entry: Entry) -> bool:
        """Return whether an entry is one of the request's own, or of its prefix."""
        last = entry.position - 1 if entry.is_state else entry.position
        return last < len(self.tokens) and int(self._prefixes[last]) == entry.prefix

    def check(self, array: Array, found: NDArray[np.uint8]) -> Finding | None:
        """Compare what `data` returns with what was found in its place; pages may be missing at the end.

        Raises:
            ArgumentError: If it is not uint8, of other entries, or has more of them.
        """
        prefixes, positions = self._entries(array.group)
        size = self._pattern.entry_bytes(array)
        if found.dtype != np.uint8 or found.ndim == 0 or found.shape[-1] != size:
            raise ArgumentError(
                f"{array} has entries of {size} bytes, and this is {found.dtype}{list(found.shape)}"
            )
        rows = found.reshape(-1, size)
        if len(rows) > len(positions):
            raise ArgumentError(
                f"{array} has {len(positions)} entries of request {self.number}, not {len(rows)}"
            )
        there = len(rows)
        wrong = self._pattern.check(
            rows,
            np.arange(there),
            prefixes[:there],
            positions[:there],
            array.layer,
            array.plane,
            group=array.group,
            request=self.number,
        )
        if wrong is None and there < len(positions):
            return self._pattern.missing(array, int(prefixes[there]), int(positions[there]), self.number)
        return wrong

    def _entries(self, group: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return prefix and position of each entry."""
        each = self._pattern.unit_tokens(group)
        if each is None:
            return self._prefixes[-1:], np.array([len(self.tokens)])
        begins = np.array(self.pages(group), np.int64) * each
        positions = (begins[:, None] + np.arange(0, each, self._groups[group].stride)).ravel()
        return self._prefixes[positions], positions


class Workload:
    """The requests of a proof: some that begin alike, and others that later take the places of half of them.

    Args:
        pattern: The bytes of the layout.
        tokens: Tokens of all requests together; as many as have 64 MiB by default. Each request has at least
            two units of each group.
        seed: Seed of the token ids.
    """

    def __init__(self, pattern: Pattern, tokens: int | None = None, seed: int = 0) -> None:
        layout = pattern.layout
        self.step = math.lcm(*(pattern.unit_tokens(group.name) or 1 for group in layout.groups))
        units = max(1, (_tokens_of(layout) if tokens is None else tokens) // self.step)
        lengths = [max(2, units * share // sum(_SHARES)) * self.step for share in _SHARES]
        dice = random.Random(seed)  # noqa: S311 - no secrets
        made: list[Request] = []
        for number, length in enumerate(lengths):
            ids = [dice.randrange(_TOKEN_IDS) for _ in range(length)]
            prefixes = np.full(length, number, np.int64)
            # The second begins as the first does, and the last as the second, which lives on.
            other = {1: 0, len(lengths) - 1: 1}.get(number)
            if other is not None:
                before = made[other]
                same = min(length, len(before.tokens)) // self.step // 2 * self.step
                ids[:same], prefixes[:same] = before.tokens[:same], before._prefixes[:same]  # noqa: SLF001
            made.append(Request(pattern, number, ids, prefixes))
        self.first: list[Request] = made[:FIRST]
        self.second: list[Request] = made[FIRST:]
        self.dropped: list[Request] = made[:FIRST:2]

    def units(self, group: str) -> int:
        """Return the most units of a group that live at once."""
        return max(sum(len(one.pages(group)) for one in live) for live in (self.first, self.live))

    @property
    def live(self) -> list[Request]:
        """The requests of the end."""
        return [request for request in self.first if request not in self.dropped] + self.second

    @property
    def most_tokens(self) -> int:
        """The most tokens that live at once."""
        return max(sum(len(one.tokens) for one in live) for live in (self.first, self.live))

    def __iter__(self) -> Iterator[Request]:
        return iter([*self.first, *self.second])


def _tokens_of(layout: CacheLayout) -> int:
    """Return tokens whose pages have `BYTES`, as far as states leave room, and at most 16,384."""
    some = 4 * max((group.tokens or 0) for group in layout.groups) + 64 * layout.page_size
    state = sum(group.entry_bytes * len(group.layers) for group in layout.groups if group.kind == "state")
    a_token: int = max(1, (layout.request_bytes(some) - state) // some)
    return min(_MOST_TOKENS, BYTES // a_token)
