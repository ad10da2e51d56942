"""Blocks as vLLM's engine has them, for drivers of its connectors.

A tensor `[blocks, bytes of a page]` for each layer of a group, which groups with pages of one size share, K
and V of a page one behind the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvpool._kvpool import CacheLayout
from kvpool.verify.memory import rows_of
from kvpool.verify.pattern import FREED, Array, Pattern

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from kvpool._kvpool import Group
    from kvpool.verify.requests import Request, Workload

    Bytes = NDArray[np.uint8]


def part_of(layout: CacheLayout, groups: list[Group]) -> CacheLayout:
    """Return a layout with some of the groups, in its order."""
    kept = [group for group in layout.groups if group in groups]
    return CacheLayout(kept, page_size=layout.page_size, model=layout.model)


def page_bytes(layout: CacheLayout, group: Group) -> int:
    """Return the bytes of a unit of a group in one layer."""
    entries = 1 if group.kind == "state" else max(layout.page_size, group.stride) // group.stride
    return int(group.entry_bytes) * entries


class _Shared:
    """Tensors that groups with pages of one size share, and their free blocks; 0 is vLLM's null block."""

    def __init__(self, page_bytes: int, first: int) -> None:
        self.page_bytes = page_bytes
        self.first = first
        self.count = 0
        self.blocks = 1
        self.free: list[int] = []


class Blocks:
    """The tensors of an engine, with blocks for what a proof keeps at once and for one request more.

    Args:
        layout: The layout.
        load: The requests of the proof.
        device: Device of the tensors.
        one_pool: Whether all tensors have as many blocks, and no two groups one of the same number, as it is
            in vLLM. Otherwise groups whose pages differ in size have numbers of their own, in less memory.

    Attributes:
        groups: The groups of the layout.
        tensors: `torch.Tensor` of uint8, `[blocks, bytes of a page]`.
    """

    def __init__(self, layout: CacheLayout, load: Workload, device: str, *, one_pool: bool = False) -> None:
        import torch  # noqa: PLC0415 - drivers say what is missing

        self._layout = layout
        self._pattern = Pattern(layout)
        self.groups: list[Group] = list(layout.groups)
        self._shared = self._share(load)
        if one_pool:
            total = 1 + sum(one.blocks - 1 for one in self._shared)
            free = list(range(1, total))
            for one in self._shared:
                one.blocks, one.free = total, free
        self.tensors: list[Any] = [
            torch.full((one.blocks, one.page_bytes), FREED, dtype=torch.uint8, device=device)
            for one in self._shared
            for _ in range(one.count)
        ]

    def _share(self, load: Workload) -> list[_Shared]:
        by_size: dict[int, _Shared] = {}
        for group in self.groups:
            size = page_bytes(self._layout, group)
            one = by_size.setdefault(size, _Shared(size, 0))
            one.count = max(one.count, len(group.layers))
            one.blocks += load.units(group.name) + max(len(request.pages(group.name)) for request in load)
        first = 0
        for one in by_size.values():
            one.first, one.free = first, list(range(1, one.blocks))
            first += one.count
        return list(by_size.values())

    def _of(self, group: Group) -> _Shared:
        size = page_bytes(self._layout, group)
        return next(one for one in self._shared if one.page_bytes == size)

    def refs(self) -> list[list[tuple[int, int]]]:
        """Return tensor and bytes of a page of each layer of each group."""
        return [
            [
                (self._of(group).first + layer, page_bytes(self._layout, group))
                for layer in range(len(group.layers))
            ]
            for group in self.groups
        ]

    def _parts(self, group: Group, layer: int) -> Iterator[tuple[Array, Any, int, int]]:
        """Yield array, tensor, and the bytes from and to which each plane of a layer has in a page."""
        entries, begin = page_bytes(self._layout, group) // int(group.entry_bytes), 0
        for plane in group.planes:
            end = begin + entries * int(plane.entry_bytes)
            tensor = self.tensors[self._of(group).first + group.layers.index(layer)]
            yield Array(group.name, layer, plane.name), tensor, begin, end
            begin = end

    def alloc(self, request: Request) -> list[list[int]]:
        """Return blocks for a request, by group."""
        blocks = []
        for group in self.groups:
            free = self._of(group).free
            blocks.append([free.pop(0) for _ in request.pages(group.name)])
        return blocks

    def free(self, blocks: list[list[int]]) -> None:
        """Take blocks back, and overwrite them."""
        for group, numbers in zip(self.groups, blocks, strict=True):
            shared = self._of(group)
            for tensor in self.tensors[shared.first : shared.first + shared.count]:
                rows_of(tensor, shared.page_bytes).put(np.array(numbers), FREED)
            shared.free += numbers

    def write(self, blocks: list[list[int]], data: Mapping[Array, Bytes]) -> None:
        """Write the bytes of a request into its blocks."""
        for group, numbers in zip(self.groups, blocks, strict=True):
            for layer in group.layers:
                for array, tensor, begin, end in self._parts(group, layer):
                    flat = data[array].reshape(len(numbers), -1)
                    rows_of(tensor[:, begin:end], end - begin).put(np.array(numbers), flat)

    def read(self, blocks: list[list[int]]) -> Iterator[tuple[Array, Bytes]]:
        """Yield the bytes of a request, array by array."""
        for group, numbers in zip(self.groups, blocks, strict=True):
            for layer in group.layers:
                for array, tensor, begin, end in self._parts(group, layer):
                    found = rows_of(tensor[:, begin:end], end - begin).read(np.array(numbers))
                    yield array, found.reshape(len(numbers), -1, self._pattern.entry_bytes(array))
