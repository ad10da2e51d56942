"""Prefix caches behind one small interface: kvpool's, and a plain one in Python."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import kvpool

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from kvpool.typing import Policy


class Side(ABC):
    """A prefix cache under test. Prompts are made once by `prompt`, outside of what is timed."""

    def __init__(self, capacity: int, page_size: int) -> None:
        """Makes an empty cache of `capacity` tokens."""
        self.capacity = capacity
        self.page_size = page_size

    def prompt(self, tokens: NDArray[np.int32]) -> Any:  # noqa: ANN401 - each side has its own
        """The tokens in the form that the cache takes."""
        return torch.from_numpy(tokens)

    @abstractmethod
    def insert(self, prompt: Any) -> None:  # noqa: ANN401
        """Takes slots and caches a prompt, of which nothing else keeps a use."""

    @abstractmethod
    def lookup(self, prompt: Any) -> int:  # noqa: ANN401
        """Finds the longest cached prefix, keeps and gives up a use of it, and returns its length."""

    @abstractmethod
    def chunks(self, prefix: NDArray[np.int32], chunks: list[NDArray[np.int32]]) -> Iterator[None]:
        """Caches one chunk of a request behind a cached prefix at each step, from the second step on."""

    @abstractmethod
    def evict(self, tokens: int) -> None:
        """Evicts at least so many tokens."""

    @abstractmethod
    def cached(self) -> int:
        """Cached tokens."""


class Kvpool(Side):
    """`kvpool.PrefixCache`."""

    def __init__(self, capacity: int, page_size: int, policy: Policy = "adaptive") -> None:
        """Makes an empty cache with a policy."""
        super().__init__(capacity, page_size)
        self.allocator = kvpool.TokenToKVPoolAllocator(capacity, "cpu", page_size)
        self.cache = kvpool.PrefixCache(self.allocator, policy=policy)

    def slots(self, count: int) -> torch.Tensor:
        """Takes slots."""
        slots = self.allocator.alloc(count)
        if slots is None:
            raise MemoryError(f"no {count} slots")
        return slots

    def insert(self, prompt: torch.Tensor) -> None:  # noqa: D102
        self.cache.insert(prompt, self.slots(len(prompt)))

    def lookup(self, prompt: torch.Tensor) -> int:  # noqa: D102
        lease = self.cache.match(prompt)
        length = lease.length
        lease.release()
        return length

    def chunks(self, prefix: NDArray[np.int32], chunks: list[NDArray[np.int32]]) -> Iterator[None]:  # noqa: D102
        tokens = [torch.from_numpy(chunk) for chunk in chunks]
        slots = [self.slots(len(chunk)) for chunk in chunks]
        with self.cache.match(torch.from_numpy(prefix)) as lease:
            yield
            for new in zip(tokens, slots, strict=True):
                lease.publish(*new)
                yield

    def evict(self, tokens: int) -> None:  # noqa: D102
        self.cache.evict(tokens)

    def cached(self) -> int:  # noqa: D102
        return self.cache.cached_size()


class _Run:
    """A run of tokens with their slots."""

    def __init__(self, parent: _Run | None, tokens: NDArray[np.int32], slots: NDArray[np.int32]) -> None:
        self.parent = parent
        self.tokens = tokens
        self.slots = slots
        self.children: dict[bytes, _Run] = {}
        self.uses = 0


class Plain(Side):
    """A radix tree in Python over NumPy arrays, whose leaves go in the order of their last use."""

    def __init__(self, capacity: int, page_size: int) -> None:
        super().__init__(capacity, page_size)
        none = np.empty(0, dtype=np.int32)
        self._root = _Run(None, none, none)
        self._leaves: OrderedDict[_Run, None] = OrderedDict()
        self._free: NDArray[np.int32] = np.arange(capacity, dtype=np.int32)
        self._available = capacity

    def prompt(self, tokens: NDArray[np.int32]) -> NDArray[np.int32]:  # noqa: D102
        return tokens

    def take(self, count: int) -> NDArray[np.int32]:
        """Takes slots."""
        self._available -= count
        taken: NDArray[np.int32] = self._free[self._available : self._available + count].copy()
        return taken

    def give(self, slots: NDArray[np.int32]) -> None:
        """Makes slots free."""
        self._free[self._available : self._available + len(slots)] = slots
        self._available += len(slots)

    def _descend(self, tokens: NDArray[np.int32]) -> tuple[_Run, int]:
        run, at = self._root, 0
        while child := run.children.get(tokens[at : at + self.page_size].tobytes()):
            count = min(len(child.tokens), len(tokens) - at)
            differ = child.tokens[:count] != tokens[at : at + count]
            equal = int(differ.argmax()) if differ.any() else count
            equal -= equal % self.page_size
            at += equal
            if equal < len(child.tokens):
                return self._split(child, equal), at
            run = child
        return run, at

    def held(self, tokens: NDArray[np.int32]) -> NDArray[np.int32]:
        """The slots of a cached prefix."""
        run: _Run | None = self._descend(tokens)[0]
        parts = []
        while run is not None:
            parts.append(run.slots)
            run = run.parent
        return np.concatenate(parts[::-1])

    def _split(self, run: _Run, at: int) -> _Run:
        assert run.parent is not None
        upper = _Run(run.parent, run.tokens[:at], run.slots[:at])
        upper.uses = min(run.uses, 1)
        run.parent.children[upper.tokens[: self.page_size].tobytes()] = upper
        run.parent, run.tokens, run.slots = upper, run.tokens[at:], run.slots[at:]
        upper.children[run.tokens[: self.page_size].tobytes()] = run
        return upper

    def _lock(self, run: _Run | None) -> None:
        while run is not None:
            run.uses += 1
            self._leaves.pop(run, None)
            run = run.parent

    def _unlock(self, run: _Run | None) -> None:
        while run is not None:
            run.uses -= 1
            self._queue(run)
            run = run.parent

    def _queue(self, run: _Run) -> None:
        if run.uses == 0 and not run.children and run.parent is not None:
            self._leaves[run] = None

    def _publish(self, tokens: NDArray[np.int32]) -> _Run:
        run, found = self._descend(tokens)
        if found < len(tokens):
            child = _Run(run, tokens[found:], self.take(len(tokens) - found))
            run.children[tokens[found : found + self.page_size].tobytes()] = child
            self._leaves.pop(run, None)
            return child
        return run

    def insert(self, prompt: NDArray[np.int32]) -> None:  # noqa: D102
        self._queue(self._publish(prompt))

    def lookup(self, prompt: NDArray[np.int32]) -> int:  # noqa: D102
        run, found = self._descend(prompt)
        self._lock(run)
        self._unlock(run)
        return found

    def chunks(self, prefix: NDArray[np.int32], chunks: list[NDArray[np.int32]]) -> Iterator[None]:  # noqa: D102
        run, _ = self._descend(prefix)
        self._lock(run)
        tokens = np.concatenate([prefix, *chunks])
        yield
        for end in itertools.accumulate((len(chunk) for chunk in chunks), initial=len(prefix)):
            if end == len(prefix):
                continue
            child = self._publish(tokens[:end])
            self._lock(child)
            self._unlock(run)
            run = child
            yield
        self._unlock(run)

    def evict(self, tokens: int) -> None:  # noqa: D102
        while tokens > 0 and self._leaves:
            run, _ = self._leaves.popitem(last=False)
            assert run.parent is not None
            del run.parent.children[run.tokens[: self.page_size].tobytes()]
            self._queue(run.parent)
            self.give(run.slots)
            tokens -= len(run.slots)

    def cached(self) -> int:  # noqa: D102
        return self.capacity - self._available
