"""GDNPool: states, resets, copies, track slots, misuse, and random histories."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import devices
import pytest
import torch

from kvpool import ConfigError, GDNPool

if TYPE_CHECKING:
    from collections.abc import Callable

SHAPE = (2, 3, 4, 5, 6, 4)

pytestmark = pytest.mark.usefixtures("device")


def make(
    max_reqs: int = 4,
    shape: tuple[int, int, int, int, int, int] = SHAPE,
    *,
    dtype: torch.dtype = torch.bfloat16,
    tracks: int = 3,
    strict: bool = False,
) -> GDNPool:
    return GDNPool(max_reqs, *shape, devices.current(), dtype, tracks, strict=strict)


def filled(**arguments: Any) -> GDNPool:  # noqa: ANN401
    pool = make(**arguments)
    for seed, state in enumerate((pool.recurrent_state, pool.conv_state)):
        generator = torch.Generator().manual_seed(seed)
        state.copy_(torch.randn(state.shape, generator=generator))
    return pool


def states(pool: GDNPool) -> tuple[torch.Tensor, torch.Tensor]:
    return pool.recurrent_state.cpu().clone(), pool.conv_state.cpu().clone()


def unchanged(pool: GDNPool, before: tuple[torch.Tensor, torch.Tensor]) -> bool:
    recurrent, conv = states(pool)
    return torch.equal(recurrent, before[0]) and torch.equal(conv, before[1])


# Construction


def test_states_have_the_shapes_and_dtypes_of_the_model() -> None:
    pool = make()
    assert pool.recurrent_state.dtype is torch.float32
    assert pool.recurrent_state.shape == (2, 8, 3, 5, 4)
    assert pool.conv_state.shape == (2, 8, 6, 3)


def test_contiguous_buf_infos() -> None:
    pool = make()
    addresses, lengths, row_bytes = pool.get_contiguous_buf_infos()
    layers = [pool.get_layer_state(layer) for layer in range(pool.num_gdn_layers)]
    buffers = [recurrent for recurrent, _ in layers] + [conv for _, conv in layers]
    assert addresses == [buffer.data_ptr() for buffer in buffers]
    assert lengths == [buffer.numel() * buffer.element_size() for buffer in buffers]
    assert row_bytes == [length // pool.pool_size for length in lengths]


def test_states_stay_where_they_are() -> None:
    pool = make()
    addresses = pool.recurrent_state.data_ptr(), pool.conv_state.data_ptr()
    pool.reset_states([1])
    pool.copy_states(1, 2)
    assert (pool.recurrent_state.data_ptr(), pool.conv_state.data_ptr()) == addresses


def test_layer_states_are_views() -> None:
    pool = filled()
    for layer in range(2):
        recurrent, conv = pool.get_layer_state(layer)
        assert recurrent.data_ptr() == pool.recurrent_state[layer].data_ptr()
        assert conv.data_ptr() == pool.conv_state[layer].data_ptr()
        assert torch.equal(recurrent, pool.recurrent_state[layer])
        assert torch.equal(conv, pool.conv_state[layer])


@pytest.mark.parametrize("layer", [2, -1, 2**40, 10**30])
def test_rejects_missing_layers(layer: int) -> None:
    with pytest.raises(IndexError, match=str(layer) if layer < 2**63 else r"\d"):
        make().get_layer_state(layer)


# reset_states and copy_states


def test_reset_zeroes_the_named_states_alone() -> None:
    pool = filled()
    recurrent, conv = states(pool)
    assert pool.reset_states([2, 7, 2]) is None  # type: ignore[func-returns-value]
    recurrent[:, [2, 7]] = 0
    conv[:, [2, 7]] = 0
    assert unchanged(pool, (recurrent, conv))


def test_states_are_named_by_ints() -> None:
    pool = filled()
    recurrent, conv = states(pool)
    pool.copy_states(src=1, dst=6)
    pool.reset_states(3)
    pool.reset_states([])
    for state in (recurrent, conv):
        state[:, 6], state[:, 3] = state[:, 1], 0
    assert unchanged(pool, (recurrent, conv))


@pytest.mark.parametrize(("src", "dst"), [([1, 2], [3]), ([1], [2, 3]), ([], [1]), (1, [2, 3])])
def test_copies_of_different_lengths(src: Any, dst: Any) -> None:  # noqa: ANN401
    pool = filled()
    before = states(pool)
    with pytest.raises(ConfigError, match=r"\d"):
        pool.copy_states(src, dst)
    assert unchanged(pool, before)


@pytest.mark.parametrize("index", [-1, 8, 2**31, 2**40, 10**30])
def test_states_out_of_range(index: int) -> None:
    pool = filled()
    before = states(pool)
    calls: list[Callable[[], object]] = [
        lambda: pool.reset_states([1, index]),
        lambda: pool.reset_states(index),
        lambda: pool.copy_states([1, index], [2, 3]),
        lambda: pool.copy_states([2, 3], [1, index]),
        lambda: pool.copy_states(index, 1),
        lambda: pool.copy_states(1, index),
    ]
    for call in calls:
        with pytest.raises(IndexError, match=str(index) if index < 2**63 else r"\d"):
            call()
    assert unchanged(pool, before)


# Track slots


def test_track_slots_follow_the_working_slots() -> None:
    pool = make()
    assert [pool.alloc_track_slot() for _ in range(4)] == [5, 6, 7, None]
    assert pool.free_track_slot(6) is None  # type: ignore[func-returns-value]
    pool.free_track_slot(5)
    assert [pool.alloc_track_slot() for _ in range(3)] == [6, 5, None]
    assert pool.stats()["dropped_frees"] == 0


def test_mem_bytes_and_stats() -> None:
    pool = make()
    pool.alloc_track_slot()
    pool.alloc_track_slot()
    pool.free_track_slot(5)
    least = pool.recurrent_state.numel() * 4 + pool.conv_state.numel() * 2
    assert least <= pool.mem_bytes() < least + 3 * 4096
    stats = pool.stats()
    assert type(stats) is dict
    assert (stats["capacity"], stats["available"], stats["in_use"], stats["high_water"]) == (3, 2, 1, 2)
    assert stats["dropped_frees"] == 0
    assert stats["bytes"] == pool.mem_bytes()
