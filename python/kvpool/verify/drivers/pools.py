"""The pools of a layout, for drivers: which groups they take, and bytes in and out."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from kvpool._kvpool import CacheLayout, GDNPool, KVPool
from kvpool.verify.driver import LeftOutError
from kvpool.verify.memory import rows_of
from kvpool.verify.pattern import FREED, Array

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from numpy.typing import NDArray

    from kvpool._kvpool import Group

    Bytes = NDArray[np.uint8]
    Ints = NDArray[np.int64]

_STATE_PLANES = ("recurrent", "conv")
_STATE_SHAPE = (3, 2)


def is_kv(group: Group) -> bool:
    """Return whether a `KVPool` has the entries of a group: two planes of one dtype."""
    planes = group.planes
    return group.kind != "state" and len(planes) == 2 and planes[0].dtype == planes[1].dtype  # noqa: PLR2004


def is_states(group: Group) -> bool:
    """Return whether a `GDNPool` has the states of a group."""
    names = tuple(plane.name for plane in group.planes)
    if group.kind != "state" or names != _STATE_PLANES:
        return False
    recurrent, conv = group.planes
    return name_of(recurrent.dtype) == "float32" and (len(recurrent.shape), len(conv.shape)) == _STATE_SHAPE


def name_of(dtype: object) -> str:
    """Return the name of a dtype of PyTorch or NumPy, or of one that is a name."""
    return str(dtype).removeprefix("torch.")


def choose(
    layout: CacheLayout, choices: tuple[tuple[str, Callable[[Group], bool]], ...], *, one_each: bool
) -> tuple[CacheLayout, list[str]]:
    """Return the part of a layout that a driver takes, and notes about the rest.

    Args:
        layout: All of it.
        choices: What takes groups, by name, and whether it takes one; the first must take at least one.
        one_each: Whether each takes one group, the first.

    Raises:
        LeftOutError: If the first takes none.
    """
    taken: list[Group] = []
    for at, (name, takes) in enumerate(choices):
        found = [group for group in layout.groups if takes(group)]
        if at == 0 and not found:
            raise LeftOutError(
                f"{name} has none of the groups {', '.join(one.name for one in layout.groups)}"
            )
        taken += found[:1] if one_each else found
    groups = [group for group in layout.groups if group in taken]
    rest = [group.name for group in layout.groups if group not in taken]
    notes = [f"without {', '.join(rest)}"] if rest else []
    return CacheLayout(groups, page_size=layout.page_size, model=layout.model), notes


def make_kv(group: Group, slots: int, page: int, device: str) -> KVPool:
    """Return a pool for the entries of a group, overwritten."""
    k, v = group.planes
    shapes = [(int(np.prod(plane.shape[:-1], dtype=int)), plane.shape[-1]) for plane in (k, v)]
    pool = KVPool(
        slots,
        len(group.layers),
        *shapes[0],
        device,
        k.dtype,
        *shapes[1],
        page_size=page,
    )
    free_kv(pool, np.arange(len(pool.k_buffer[0])))
    return pool


def make_states(group: Group, rows: int, tracks: int, device: str) -> GDNPool:
    """Return a pool for the states of a group."""
    recurrent, conv = group.planes
    heads, v_dim, k_dim = recurrent.shape
    conv_dim, taps = conv.shape
    layers = len(group.layers)
    return GDNPool(rows, layers, heads, k_dim, v_dim, conv_dim, taps + 1, device, conv.dtype, tracks)


def free_kv(pool: KVPool, slots: Ints) -> None:
    """Overwrite slots that nothing has."""
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        entry_rows(buffer).put(slots, FREED)


def free_states(pool: GDNPool, rows: Ints) -> None:
    """Overwrite states that nothing has."""
    for layer in range(pool.num_gdn_layers):
        for buffer in pool.get_layer_state(layer):
            entry_rows(buffer).put(rows, FREED)


def entry_rows(buffer: Any) -> Any:  # noqa: ANN401 - of any framework
    """Return the rows of a buffer `[rows, *entry]`."""
    count = len(buffer)
    has_torch = hasattr(buffer, "numel")
    size = buffer[0].numel() * buffer.element_size() if has_torch else buffer.numpy()[0].nbytes
    found = rows_of(buffer, size)
    assert found.count == count  # noqa: S101 - dimensions of entries are not 1
    return found


def typed(data: Bytes, like: Any) -> Any:  # noqa: ANN401 - of any framework
    """Return bytes `[n, entry_bytes]` as entries of the dtype, shape and device of a buffer's."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(like, torch.Tensor):
        flat = torch.from_numpy(np.ascontiguousarray(data)).view(like.dtype)
        return flat.view(-1, *like.shape[1:]).to(like.device)
    array = like.numpy()
    return np.ascontiguousarray(data).view(array.dtype).reshape(-1, *array.shape[1:])


def host_ints(tensor: Any) -> Ints:  # noqa: ANN401 - of PyTorch or kvpool
    """Return the values of a tensor of ints in host memory."""
    found: Ints = tensor.cpu().numpy().astype(np.int64)
    return found


def kv_planes(group: Group) -> Iterator[tuple[int, Array, Array]]:
    """Yield the number of each layer in a pool, and its two arrays."""
    k, v = group.planes
    for number, layer in enumerate(group.layers):
        yield number, Array(group.name, layer, k.name), Array(group.name, layer, v.name)


def write_kv(pool: KVPool, group: Group, slots: Any, data: Mapping[Array, Bytes], begin: int = 0) -> None:  # noqa: ANN401
    """Write the entries of a request from number `begin` on into slots, as a model does."""
    for number, *arrays in kv_planes(group):
        buffers = pool.get_kv_buffer(number)
        k, v = (
            typed(data[array].reshape(-1, data[array].shape[-1])[begin:], buffer)
            for array, buffer in zip(arrays, buffers, strict=True)
        )
        pool.set_kv_buffer(number, slots, k, v)


def write_states(pool: GDNPool, group: Group, row: int, data: Mapping[Array, Bytes]) -> None:
    """Write the state of a request into a row."""
    for number, layer in enumerate(group.layers):
        for plane, buffer in zip(group.planes, pool.get_layer_state(number), strict=True):
            entry_rows(buffer).put(np.array([row]), data[Array(group.name, layer, plane.name)][0])


def read_states(pool: GDNPool, group: Group, row: int) -> Iterator[tuple[Array, Bytes]]:
    """Yield the arrays of the state in a row."""
    for number, layer in enumerate(group.layers):
        for plane, buffer in zip(group.planes, pool.get_layer_state(number), strict=True):
            yield Array(group.name, layer, plane.name), entry_rows(buffer).read(np.array([row]))[None]


def by_pages(found: Bytes, entries: int) -> Bytes:
    """Return entries `[n, entry_bytes]` as `[pages, entries, entry_bytes]`."""
    return found.reshape(-1, entries, found.shape[-1])
