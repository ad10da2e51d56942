"""CacheArena: units of several groups in one region, against tensors that hold what they should."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any

import devices
import numpy as np
import pytest
import torch
from common import some
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool import ArgumentError, CacheArena, CacheLayout, ConfigError, Group, IndexOwnershipError, Plane

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.usefixtures("device")

PAGE = 4


def kv(heads: int = 2) -> list[Plane]:
    return [Plane("k", "float32", (heads, 8)), Plane("v", "float32", (heads, 8))]


LAYOUT = CacheLayout(
    [
        Group("full", "full", [1, 4], kv(), aliases={5: 4}),
        Group("window", "window", [0, 2, 3], kv(4), tokens=8),
        Group("latent", "full", [6], [Plane("latent", "bfloat16", (56,)), Plane("scale", "float32", (4,))]),
        Group(
            "state",
            "state",
            [7, 8],
            [Plane("recurrent", "float32", (4, 8, 8)), Plane("conv", "bfloat16", (8, 8))],
        ),
    ],
    page_size=PAGE,
    model="hybrid",
)


def make(arena_bytes: int = 1 << 17, **options: Any) -> CacheArena:  # noqa: ANN401
    return CacheArena(LAYOUT, arena_bytes, devices.current(), **options)


def planes(arena: CacheArena) -> dict[tuple[str, str, int], torch.Tensor]:
    """Every plane of every layer."""
    return {
        (group.name, plane.name, layer): arena.buffer(group.name, plane.name, layer)
        for group in arena.layout.groups
        for layer in group.layers
        for plane in group.planes
    }


# Memory


def test_planes_are_tensors_over_the_arena() -> None:
    arena = make()
    found = planes(arena)
    assert found["full", "k", 1].shape[1:] == (PAGE, 2, 8)
    assert found["latent", "latent", 6].shape[1:] == (PAGE, 56)
    assert found["latent", "scale", 6].shape[1:] == (PAGE, 4)
    assert found["state", "recurrent", 7].shape[1:] == (4, 8, 8)
    assert found["state", "conv", 8].dtype == torch.bfloat16
    [address], [size], [slab_bytes] = arena.get_contiguous_buf_infos()
    assert size == arena.mem_bytes() == arena.slabs.mem_bytes
    assert slab_bytes == arena.slabs.slab_bytes
    for (group, _, _), tensor in found.items():
        assert not tensor.any()
        assert tensor.stride(0) * tensor.element_size() == arena.slabs.unit_step(group)
        last = tensor[-1]
        assert last.is_contiguous()
        end = last.data_ptr() + last.numel() * last.element_size()
        assert address <= tensor.data_ptr() < end <= address + size


def test_pages_of_k_and_v_have_the_stride_of_a_page() -> None:
    k = make().buffer("full", "k", 4)
    assert k.is_contiguous()
    assert k.flatten(0, 1).shape[1:] == (2, 8)


def test_an_alias_reads_the_entries_of_another_layer() -> None:
    arena = make()
    assert arena.buffer("full", "v", 5).data_ptr() == arena.buffer("full", "v", 4).data_ptr()


def test_tensors_keep_the_arena_alive() -> None:
    arena = make()
    k = arena.buffer("full", "k", 1)
    del arena
    k.fill_(3)
    assert bool((k == 3).all())


# Units


def test_units_of_all_groups_or_none() -> None:
    arena = make()
    taken = some(arena.alloc({"full": 3, "state": 2}))
    assert set(taken) == {"full", "state"}
    assert (len(taken["full"]), len(taken["state"])) == (3, 2)
    before = arena.stats()
    assert arena.alloc({"full": 1, "state": 10_000}) is None
    assert arena.alloc({"window": 1 << 40}) is None
    assert not arena.fits({"full": 1, "state": 10_000})
    assert arena.stats() == before
    assert arena.alloc({}) == {}
    assert arena.fits({})


def test_units_hold_what_was_written_whoever_else_writes() -> None:
    arena = make()
    found, written = planes(arena), {}
    for value in range(1, 40):
        taken = arena.alloc({"full": 2, "window": 1, "latent": 1, "state": 1})
        if taken is None:
            break
        for (group, plane, layer), tensor in found.items():
            tensor[taken[group]] = value
            written[group, plane, layer, value] = taken[group]
    assert len({value for *_, value in written}) > 5
    for (group, plane, layer, value), units in written.items():
        assert bool((found[group, plane, layer][units] == value).all())
    # Nobody has been given what padded tokens write to.
    for tensor in found.values():
        tensor[0] = -1
    for (group, plane, layer, value), units in written.items():
        assert bool((found[group, plane, layer][units] == value).all())
    arena.verify()


def test_memory_goes_to_whoever_needs_it() -> None:
    arena = make()
    everything = arena.group_stats("window")["available"]
    pages = some(arena.alloc({"window": everything}))
    assert arena.slabs_free == 0
    assert arena.alloc({"state": 1}) is None
    arena.free("window", pages["window"])
    states = some(arena.alloc({"state": arena.group_stats("state")["available"]}))
    assert arena.slabs_free == 0
    arena.free("state", states["state"])
    assert arena.slabs_free == arena.stats()["capacity"] == arena.slabs.num_slabs - 1


def test_a_floor_is_left_to_its_group() -> None:
    arena = make(floors={"full": 2})
    states = some(arena.alloc({"state": arena.group_stats("state")["available"]}))
    assert arena.slabs_free == 2
    assert arena.alloc({"state": 1}) is None
    pages = some(arena.alloc({"full": 2 * arena.slabs.units("full")}))
    assert arena.slabs_free == 0
    arena.free("full", pages["full"])
    # A slab that the floor's own group gives back stays with the floor.
    assert not arena.fits({"window": 1})
    arena.free("state", states["state"][:1])
    arena.verify()


def test_the_fullest_slab_is_taken_from_first() -> None:
    arena = make()
    each = arena.slabs.units("full")
    assert each > 2
    taken = some(arena.alloc({"full": 2 * each}))["full"]
    arena.free("full", taken[:2])
    arena.free("full", taken[-1:])
    assert some(arena.alloc({"full": 1}))["full"] == taken[-1:]
    assert some(arena.alloc({"full": 2}))["full"] == taken[:2]


def test_group_stats_add_up() -> None:
    arena = make()
    some(arena.alloc({"full": 3}))
    stats = arena.group_stats("full")
    assert stats["slabs"] == 1
    assert (stats["in_use"], stats["high_water"], stats["dropped_frees"]) == (3, 3, 0)
    assert stats["ready"] == arena.slabs.units("full") - 3
    assert stats["available"] == stats["ready"] + arena.slabs_free * arena.slabs.units("full")
    assert arena.stats()["units_in_use"] == 3
    arena.clear()
    assert arena.group_stats("full")["in_use"] == 0
    assert arena.slabs_free == arena.stats()["capacity"]


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor, lambda units: torch.tensor(units).int()])
def test_units_are_freed_as_ints_or_tensors(kind: Callable[[list[int]], Any]) -> None:
    arena = make(strict=True)
    units = some(arena.alloc({"full": 5}))["full"]
    arena.free("full", kind(units))
    assert arena.group_stats("full")["in_use"] == 0


def test_a_state_may_have_a_number_for_each_layer() -> None:
    planes = [Plane("recurrent", "float32", (64, 64)), Plane("conv", "float32", (3, 5))]
    layout = CacheLayout(
        [Group("full", "full", range(7), kv()), Group("state", "state", range(7, 12), planes)], page_size=PAGE
    )
    arena = CacheArena(layout, 1 << 20, devices.current(), strict=True)
    assert arena.slabs.by_layer("state")
    states = some(arena.alloc({"state": 2}))["state"]
    assert [len(state) for state in states] == [5, 5]
    for number, state in enumerate(states):
        for layer, unit in zip(range(7, 12), state, strict=True):
            arena.buffer("state", "recurrent", layer)[unit] = 10 * number + layer
    for number, state in enumerate(states):
        for layer, unit in zip(range(7, 12), state, strict=True):
            assert bool((arena.buffer("state", "recurrent", layer)[unit] == 10 * number + layer).all())
    arena.free("state", states)
    assert arena.slabs_free == arena.stats()["capacity"]


# Misuse


def test_bad_frees_are_dropped_and_reported(caplog: pytest.LogCaptureFixture) -> None:
    arena = make()
    units = some(arena.alloc({"full": 2, "window": 1}))
    bad = [0, -1, 1 << 40, units["full"][0], units["full"][0], 3_000]
    with caplog.at_level(logging.WARNING, "kvpool"):
        arena.free("full", bad)
    assert "padding" in caplog.text
    assert "named twice" in caplog.text
    assert "out of range" in caplog.text
    assert arena.group_stats("full")["dropped_frees"] == arena.stats()["dropped_frees"] == 5
    assert arena.group_stats("full")["in_use"] == 1
    arena.free("window", units["window"])
    arena.free("window", units["window"])
    assert arena.group_stats("window")["dropped_frees"] == 1
    arena.verify()


def test_a_strict_arena_refuses_a_bad_free() -> None:
    arena = make(strict=True)
    units = some(arena.alloc({"full": 2}))["full"]
    for bad in ([*units, units[0]], [*units, 0], [*units, units[-1] + 1]):
        with pytest.raises(IndexOwnershipError, match="nothing was changed"):
            arena.free("full", bad)
    assert arena.group_stats("full")["in_use"] == 2


def test_arguments_are_checked() -> None:
    arena = make()
    for call in (
        lambda: arena.alloc({"heads": 1}),
        lambda: arena.fits({"heads": 1}),
        lambda: arena.free("heads", [1]),
        lambda: arena.group_stats("heads"),
        lambda: arena.buffer("heads", "k", 1),
    ):
        with pytest.raises(ArgumentError, match="the groups are full, window, latent, state"):
            call()
    with pytest.raises(ArgumentError, match="negative"):
        arena.alloc({"full": -1})
    with pytest.raises(TypeError, match="named by a str, not int"):
        arena.alloc({1: 1})  # type: ignore[dict-item]
    with pytest.raises(ArgumentError, match="its planes are k, v"):
        arena.buffer("full", "q", 1)
    with pytest.raises(IndexError, match="layer 0 has no entries in group full"):
        arena.buffer("full", "k", 0)


def test_names_that_fail_take_nothing() -> None:
    class Once(str):
        """A name that can be hashed once."""

        __slots__ = ("hashed",)

        def __hash__(self) -> int:
            if hasattr(self, "hashed"):
                raise ValueError("again")
            self.hashed = True
            return super().__hash__()

    arena = make()
    assert set(some(arena.alloc({Once("full"): 2}))) == {"full"}
    assert arena.group_stats("full")["in_use"] == 2

    class Growing:
        def __index__(self) -> int:
            units["window"] = 1
            return 1

    units: dict[str, Any] = {"full": Growing()}
    assert set(some(arena.alloc(units))) == {"full"}
    arena.verify()


def test_an_arena_is_checked() -> None:
    with pytest.raises(ConfigError, match="too small"):
        make(1024)
    with pytest.raises(ConfigError, match='no group "heads"'):
        make(floors={"heads": 1})
    with pytest.raises(ConfigError, match="floors of 100000 slabs are more than"):
        make(floors={"full": 100_000})


def test_threads_share_an_arena() -> None:
    arena = make(strict=True)
    errors: list[BaseException] = []

    def work(group: str) -> None:
        try:
            for _ in range(300):
                taken = arena.alloc({group: 2})
                if taken is not None:
                    arena.free(group, taken[group])
        except BaseException as error:  # noqa: BLE001 - for the test
            errors.append(error)

    threads = [threading.Thread(target=work, args=(group,)) for group in ("full", "window", "state") * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert arena.slabs_free == arena.stats()["capacity"]
    arena.verify()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(("full", "window", "latent", "state")), st.integers(-6, 6)), max_size=40
    )
)
def test_no_unit_has_two_owners(steps: list[tuple[str, int]]) -> None:
    arena = CacheArena(LAYOUT, 1 << 17, "cpu", strict=True)
    live: dict[str, list[int]] = {group.name: [] for group in LAYOUT.groups}
    for group, count in steps:
        if count >= 0:
            taken = arena.alloc({group: count})
            new = [] if taken is None else taken[group]
            assert not set(new) & set(live[group])
            live[group] += new
        else:
            freed, live[group] = live[group][count:], live[group][:count]
            arena.free(group, freed)
        arena.verify()
    assert {name: arena.group_stats(name)["in_use"] for name in live} == {
        name: len(units) for name, units in live.items()
    }
