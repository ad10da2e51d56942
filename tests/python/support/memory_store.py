"""A store in memory."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from kvpool import Store

if TYPE_CHECKING:
    from collections.abc import Sequence


class Memory(Store):
    """Has every page that was written, and knows what it was asked for."""

    def __init__(self) -> None:
        self.pages: dict[bytes, bytes] = {}
        self.attached: list[tuple[int, int]] = []
        self.calls: list[tuple[str, int]] = []
        super().__init__()

    def attach(self, memory: Sequence[tuple[int, int]]) -> None:
        self.attached += memory

    def find(self, keys: Sequence[bytes]) -> Sequence[bool]:
        self.calls.append(("find", len(keys)))
        return [key in self.pages for key in keys]

    def touch(self, keys: Sequence[bytes]) -> Sequence[bool]:
        self.calls.append(("touch", len(keys)))
        return [key in self.pages for key in keys]

    def read(self, keys: Sequence[bytes], addresses: Sequence[int], sizes: Sequence[int]) -> Sequence[bool]:
        self.calls.append(("read", len(keys)))
        for key, address, size in zip(keys, addresses, sizes, strict=True):
            assert any(begin <= address and address + size <= begin + all_ for begin, all_ in self.attached)
            if len(self.pages.get(key, b"")) == size:
                ctypes.memmove(address, self.pages[key], size)
        return [key in self.pages for key in keys]

    def write(self, keys: Sequence[bytes], addresses: Sequence[int], sizes: Sequence[int]) -> Sequence[bool]:
        self.calls.append(("write", len(keys)))
        for key, address, size in zip(keys, addresses, sizes, strict=True):
            page = ctypes.string_at(address, size)
            assert self.pages.setdefault(key, page) == page
        return [True] * len(keys)
