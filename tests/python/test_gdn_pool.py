"""GDNPool: states, resets, copies, track slots, misuse, and random histories."""

from __future__ import annotations

import inspect
import logging
from typing import TYPE_CHECKING, Any

import devices
import pytest
import torch
from common import some
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from models import BadFreeError, GDNPoolModel

import kvpool
from kvpool import ConfigError, GDNPool, IndexOwnershipError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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


def test_signature_and_defaults() -> None:
    parameters = inspect.signature(GDNPool).parameters
    assert list(parameters) == [
        "max_reqs",
        "num_gdn_layers",
        "num_v_heads",
        "head_k_dim",
        "head_v_dim",
        "conv_dim",
        "conv_kernel_size",
        "device",
        "dtype",
        "max_track_slots",
        "strict",
        "debug",
    ]
    assert parameters["device"].default == "cuda"
    assert parameters["max_track_slots"].default == 0
    assert parameters["strict"].kind is inspect.Parameter.KEYWORD_ONLY
    pool = GDNPool(4, *SHAPE, device="cpu")
    assert pool.conv_state.dtype is torch.bfloat16
    assert pool.recurrent_state.shape[1] == 5
    assert pool.alloc_track_slot() is None


def test_attributes_are_the_arguments() -> None:
    pool = GDNPool(4, 2, 3, 4, 5, 6, 7, "cpu", torch.float16, 3)
    assert (pool.max_reqs, pool.num_gdn_layers, pool.num_v_heads) == (4, 2, 3)
    assert (pool.head_k_dim, pool.head_v_dim, pool.conv_dim, pool.conv_kernel_size) == (4, 5, 6, 7)
    assert (pool.device, pool.dtype, pool.max_track_slots) == ("cpu", torch.float16, 3)
    for name in ("max_reqs", "conv_dim", "dtype", "device", "recurrent_state", "conv_state"):
        with pytest.raises(AttributeError):
            setattr(pool, name, getattr(pool, name))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_states(dtype: torch.dtype) -> None:
    pool = make(dtype=dtype)
    assert pool.recurrent_state.dtype is torch.float32
    assert pool.recurrent_state.shape == (2, 8, 3, 5, 4)
    assert pool.conv_state.dtype is dtype
    assert pool.conv_state.shape == (2, 8, 6, 3)
    for state in (pool.recurrent_state, pool.conv_state):
        assert type(state) is torch.Tensor
        assert state.device.type == devices.current()
        assert state.is_contiguous()
        assert not state.any()


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
def test_layers_that_are_not_there(layer: int) -> None:
    with pytest.raises(IndexError, match=str(layer) if layer < 2**63 else r"\d"):
        make().get_layer_state(layer)


@devices.cpu_only
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_cuda_without_a_driver_says_what_was_looked_for() -> None:
    with pytest.raises(kvpool.BackendUnavailableError, match="libcuda"):
        GDNPool(4, *SHAPE)


@pytest.mark.parametrize("position", range(9))
@pytest.mark.parametrize("number", [-1, 2**62, 10**30])
def test_sizes_that_can_not_be(position: int, number: int) -> None:
    arguments: list[Any] = [4, *SHAPE, "cpu", torch.bfloat16, 3]
    if position >= 7:
        position = 9
    arguments[position] = number
    with pytest.raises((ConfigError, kvpool.OutOfMemoryError), match=r"\d"):
        GDNPool(*arguments)


def test_more_memory_than_any_machine_has() -> None:
    with pytest.raises(kvpool.OutOfMemoryError, match=r"\d{10}"):
        make(2**30, (2**8, 2**6, 2**8, 2**8, 2**12, 4))


@pytest.mark.parametrize("number", [1.0, "1", None, float("nan")])
def test_sizes_of_a_wrong_type(number: Any) -> None:  # noqa: ANN401
    with pytest.raises(TypeError):
        GDNPool(number, *SHAPE, "cpu")
    with pytest.raises(TypeError):
        GDNPool(4, *SHAPE, "cpu", torch.bfloat16, number)


# reset_states and copy_states


def test_reset(as_index: Callable[[Sequence[int]], Any]) -> None:
    pool = filled()
    recurrent, conv = states(pool)
    assert pool.reset_states(as_index([2, 7, 2])) is None  # type: ignore[func-returns-value]
    recurrent[:, [2, 7]] = 0
    conv[:, [2, 7]] = 0
    assert unchanged(pool, (recurrent, conv))


def test_reset_of_one_and_of_none() -> None:
    pool = filled()
    recurrent, conv = states(pool)
    pool.reset_states(3)
    pool.reset_states([])
    recurrent[:, 3] = 0
    conv[:, 3] = 0
    assert unchanged(pool, (recurrent, conv))
    pool.reset_states(range(8))
    assert not pool.recurrent_state.any()
    assert not pool.conv_state.any()


COPIES = {
    "one": ([1], [5]),
    "chain": ([1, 2, 3], [2, 3, 4]),
    "swap": ([1, 2], [2, 1]),
    "cycle": ([4, 1, 2, 3], [1, 2, 3, 4]),
    "fan_out": ([1, 1, 1], [5, 6, 7]),
    "in_place": ([3], [3]),
    "later_wins": ([1, 2, 3], [5, 5, 5]),
    "nothing": ([], []),
    "padding": ([0, 1], [1, 0]),
}


@pytest.mark.parametrize("copy", sorted(COPIES))
def test_copy(copy: str) -> None:
    src, dst = COPIES[copy]
    pool = filled()
    expected = states(pool)
    for state in expected:
        before = state.clone()
        for origin, to in zip(src, dst, strict=True):
            state[:, to] = before[:, origin]
    assert pool.copy_states(src, dst) is None  # type: ignore[func-returns-value]
    assert unchanged(pool, expected)


def test_copy_takes_every_form_of_indices(as_index: Callable[[Sequence[int]], Any]) -> None:
    pool = filled()
    recurrent, conv = states(pool)
    pool.copy_states(as_index([1, 2]), as_index([3, 6]))
    recurrent[:, [3, 6]] = recurrent[:, [1, 2]]
    conv[:, [3, 6]] = conv[:, [1, 2]]
    assert unchanged(pool, (recurrent, conv))


def test_copy_takes_ints() -> None:
    pool = filled()
    recurrent, conv = states(pool)
    pool.copy_states(src=1, dst=6)
    recurrent[:, 6] = recurrent[:, 1]
    conv[:, 6] = conv[:, 1]
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


def test_states_refuse_what_is_no_index(bad_index: Any) -> None:  # noqa: ANN401
    pool = filled()
    before = states(pool)
    calls: list[Callable[[], object]] = [
        lambda: pool.reset_states(bad_index),
        lambda: pool.copy_states(bad_index, [1, 2]),
        lambda: pool.copy_states([1, 2], bad_index),
    ]
    for call in calls:
        with pytest.raises(TypeError):
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


def test_track_slot_keeps_its_snapshot() -> None:
    pool = filled()
    slot = some(pool.alloc_track_slot())
    pool.copy_states(1, slot)
    wanted = pool.recurrent_state[:, 1].clone()
    pool.reset_states(1)
    pool.copy_states(slot, 2)
    assert torch.equal(pool.recurrent_state[:, 2], wanted)
    assert not pool.recurrent_state[:, 1].any()


@pytest.mark.parametrize("bad", [0, 1, 4, 6, 8, -1, 10**6, 2**40, 10**30])
def test_bad_frees_are_dropped_and_counted(bad: int) -> None:
    pool = make()
    assert pool.alloc_track_slot() == 5
    before = pool.stats()
    pool.free_track_slot(bad)
    pool.free_track_slot(bad)
    assert pool.stats() == {**before, "dropped_frees": 2}
    assert [pool.alloc_track_slot() for _ in range(3)] == [6, 7, None]


def test_track_slot_freed_twice() -> None:
    pool = make()
    pool.alloc_track_slot()
    pool.free_track_slot(5)
    pool.free_track_slot(5)
    assert pool.stats()["dropped_frees"] == 1
    assert sorted(some(pool.alloc_track_slot()) for _ in range(3)) == [5, 6, 7]
    assert pool.alloc_track_slot() is None


def test_first_bad_free_is_a_warning_and_later_ones_are_not(caplog: pytest.LogCaptureFixture) -> None:
    pool = make()
    with caplog.at_level(logging.WARNING, logger="kvpool"):
        pool.free_track_slot(7)
        pool.free_track_slot(1)
    assert len(caplog.records) == 1
    assert "7" in caplog.records[0].getMessage()


@pytest.mark.parametrize("bad", [0, 1, 6, 8, -1])
def test_strict_raises_before_anything_is_changed(bad: int) -> None:
    pool = make(strict=True)
    pool.alloc_track_slot()
    before = pool.stats()
    with pytest.raises(IndexOwnershipError, match=str(bad)):
        pool.free_track_slot(bad)
    assert pool.stats() == before


@pytest.mark.parametrize("bad", [5.0, "5", None, float("nan"), [5.0]])
def test_free_track_slot_of_a_wrong_type(bad: Any) -> None:  # noqa: ANN401
    pool = make()
    pool.alloc_track_slot()
    with pytest.raises(TypeError):
        pool.free_track_slot(bad)
    assert pool.stats()["in_use"] == 1


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


# Random histories


class StateHistory(RuleBasedStateMachine):
    """Resets, copies and track slots, misuse included, on the pool and on its naive model."""

    @initialize(
        max_reqs=st.integers(1, 5),
        tracks=st.integers(0, 4),
        dims=st.tuples(st.integers(1, 3), st.integers(1, 2), *[st.integers(1, 4)] * 3, st.integers(2, 4)),
        dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
        strict=st.booleans(),
    )
    def start(
        self,
        max_reqs: int,
        tracks: int,
        dims: tuple[int, int, int, int, int, int],
        dtype: torch.dtype,
        strict: bool,
    ) -> None:
        self.real = make(max_reqs, dims, dtype=dtype, tracks=tracks, strict=strict)
        self.slots = max_reqs + 1 + tracks
        self.tracks = tracks
        self.seed = 0
        self.model = GDNPoolModel(
            self.real.recurrent_state.shape,
            self.real.conv_state.shape,
            dtype,
            range(max_reqs + 1, self.slots),
            strict=strict,
        )

    @rule(data=st.data())
    def fill(self, data: st.DataObject) -> None:
        slot = data.draw(st.integers(0, self.slots - 1))
        self.seed += 1
        for real, model in (
            (self.real.recurrent_state, self.model.recurrent_state),
            (self.real.conv_state, self.model.conv_state),
        ):
            content = torch.randn(model[:, slot].shape, generator=torch.Generator().manual_seed(self.seed))
            real[:, slot] = content.to(real.dtype)
            model[:, slot] = content.to(model.dtype)

    @rule(data=st.data())
    def reset(self, data: st.DataObject) -> None:
        indices = data.draw(st.lists(st.integers(-1, self.slots), max_size=5))
        if min(indices, default=0) < 0 or max(indices, default=0) >= self.slots:
            with pytest.raises(IndexError):
                self.real.reset_states(indices)
        else:
            self.real.reset_states(torch.tensor(indices, dtype=torch.int32))
            self.model.reset_states(indices)

    @rule(data=st.data())
    def copy(self, data: st.DataObject) -> None:
        pairs = data.draw(
            st.lists(st.tuples(st.integers(0, self.slots), st.integers(0, self.slots - 1)), max_size=6)
        )
        src, dst = [origin for origin, _ in pairs], [to for _, to in pairs]
        if self.slots in src:
            with pytest.raises(IndexError):
                self.real.copy_states(src, dst)
        else:
            self.real.copy_states(src, torch.tensor(dst, dtype=torch.int64))
            self.model.copy_states(src, dst)

    @rule()
    def alloc_track(self) -> None:
        assert self.real.alloc_track_slot() == self.model.alloc_track_slot()

    @rule(data=st.data())
    def free_track(self, data: st.DataObject) -> None:
        slot = data.draw(st.integers(-1, self.slots + 1))
        try:
            self.model.free_track_slot(slot)
        except BadFreeError:
            with pytest.raises(IndexOwnershipError):
                self.real.free_track_slot(slot)
        else:
            self.real.free_track_slot(slot)

    @invariant()
    def same(self) -> None:
        if not hasattr(self, "real"):
            return
        assert torch.equal(self.real.recurrent_state, self.model.recurrent_state)
        assert torch.equal(self.real.conv_state, self.model.conv_state)
        stats = self.real.stats()
        assert stats["available"] + stats["in_use"] == stats["capacity"] == self.tracks
        assert stats["in_use"] == len(self.model.live)
        assert stats["dropped_frees"] == self.model.dropped_frees


def test_random_histories_agree_with_the_model() -> None:
    run_state_machine_as_test(StateHistory)
