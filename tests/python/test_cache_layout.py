"""CacheLayout: declarations, their errors, fingerprints, tables, units of requests, and slabs."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvpool import CacheArena, CacheLayout, ConfigError, GDNPool, Group, KVPool, Plane

MIB = 1 << 20


def kv(heads: int = 2, dim: int = 64, dtype: str = "bfloat16") -> list[Plane]:
    return [Plane("k", dtype, (heads, dim)), Plane("v", dtype, (heads, dim))]


def hybrid(**changes: Any) -> CacheLayout:  # noqa: ANN401
    """A layout with a group of each kind."""
    groups = [
        Group("full", "full", [3], kv()),
        Group("window", "window", [0, 2], kv(4), tokens=40, sinks=4),
        Group("chunk", "chunk", [1], kv(4), tokens=64),
        Group("state", "state", [4, 5], [Plane("recurrent", "float32", (2, 16, 16))]),
    ]
    return CacheLayout(groups, **{"model": "hybrid", **changes})


# Declarations


def test_a_plane_knows_its_entry() -> None:
    plane = Plane("latent", torch.float8_e4m3fn, [584])
    assert (plane.name, plane.dtype, plane.shape, plane.entry_bytes) == (
        "latent",
        torch.float8_e4m3fn,
        (584,),
        584,
    )
    assert Plane("scale", "float32", ()).entry_bytes == 4


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("", (1,), "letters, digits and _"),
        ("a b", (1,), '\'?"a b"'),
        ("k", (0, 4), "has no bytes"),
        ("k", (1 << 40, 1 << 40), "more bytes than an address"),
        ("k", (-1,), "no extent may be negative"),
    ],
)
def test_a_plane_is_checked(name: str, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Plane(name, "float32", shape)


def test_a_plane_has_a_storage_dtype() -> None:
    with pytest.raises(TypeError, match="int64"):
        Plane("k", "int64", (1,))


def test_a_group_knows_what_it_was_given() -> None:
    group = Group("w", "window", [1, 3], kv(), tokens=7, sinks=2, aliases={5: 3, 4: 1}, share=(1, 2))
    assert (group.name, group.kind, group.tokens, group.sinks, group.stride) == ("w", "window", 7, 2, 1)
    assert (group.layers, group.aliases, group.share) == ((1, 3), {4: 1, 5: 3}, (1, 2))
    assert group.planes == tuple(kv())
    assert group.entry_bytes == 2 * 2 * 64 * 2
    assert Group("c", "full", [0], kv(), stride=4).stride == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "a-b"}, "letters, digits and _"),
        ({"layers": []}, "has no layer"),
        ({"layers": [1, 1]}, "must ascend"),
        ({"layers": [2, 1]}, "layer 1 behind layer 2"),
        ({"planes": []}, "has no plane"),
        ({"planes": [*kv(), kv()[0]]}, "two planes k"),
        ({"kind": "sliding"}, "none of"),
        ({"kind": "window"}, "a window needs tokens"),
        ({"kind": "chunk"}, "a chunk needs tokens"),
        ({"kind": "window", "tokens": 0}, "window of 0 tokens"),
        ({"tokens": 5}, "neither tokens nor sinks"),
        ({"sinks": 5}, "neither tokens nor sinks"),
        ({"kind": "state", "tokens": 5}, "neither tokens nor sinks"),
        ({"stride": 0}, "entries for 0 tokens"),
        ({"kind": "state", "stride": 4}, "entries for 4 tokens"),
        ({"aliases": {1: 0}}, "layer 1 has entries"),
        ({"aliases": {9: 7}}, "layer 7, which has none"),
        ({"share": (2, 2)}, "part 2 of 2"),
        ({"share": (0, 0)}, "part 0 of 0"),
        ({"share": (-1, 2)}, "negative"),
        (
            {"planes": [Plane(name, "uint8", ((1 << 63) - 1,)) for name in "abc"]},
            "more bytes than an address",
        ),
    ],
)
def test_a_group_is_checked(changes: dict[str, Any], message: str) -> None:
    arguments = {"name": "g", "kind": "full", "layers": [0, 1], "planes": kv(), **changes}
    with pytest.raises(ConfigError, match=message):
        Group(**arguments)


@pytest.mark.parametrize(
    ("groups", "page_size", "message"),
    [
        ([], 16, "has no group"),
        ([Group("a", "full", [0], kv())], 0, "page_size is 0"),
        ([Group("a", "full", [0], kv()), Group("a", "full", [1], kv())], 16, "two groups are called a"),
        ([Group("a", "full", [0], kv(), stride=3)], 16, "one entry for 3 tokens"),
        ([Group("a", "full", [0], kv())], 1 << 60, "more bytes than an address"),
    ],
)
def test_a_layout_is_checked(groups: list[Group], page_size: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CacheLayout(groups, page_size=page_size)


# What differs


CHANGES = {
    "the model": hybrid(model="other"),
    "page_size": hybrid(page_size=32),
    "the list of groups": CacheLayout(hybrid().groups[:3], model="hybrid"),
}


def with_group(name: str, **changes: Any) -> CacheLayout:  # noqa: ANN401
    """The hybrid layout with another group in the place of one."""
    groups = list(hybrid().groups)
    (at,) = [number for number, group in enumerate(groups) if group.name == name]
    arguments, keywords = groups[at].__getnewargs_ex__()
    named = dict(zip(("name", "kind", "layers", "planes"), arguments, strict=True))
    groups[at] = Group(**{**named, **keywords, **changes})
    return CacheLayout(groups, model="hybrid")


CHANGES |= {
    "group window: the kind": with_group("window", tokens=41),
    "group full: the stride": with_group("full", stride=2),
    "group full: the part": with_group("full", share=(1, 2)),
    "group window: the list of layers": with_group("window", layers=[0, 6]),
    "group window: the list of aliases": with_group("window", aliases={7: 0}),
    "group full: the list of planes": with_group("full", planes=kv()[:1]),
    "group full: plane v": with_group("full", planes=[kv()[0], Plane("v", "bfloat16", (2, 32))]),
    "group state: plane recurrent": with_group("state", planes=[Plane("recurrent", "bfloat16", (2, 16, 16))]),
}


@pytest.mark.parametrize("what", CHANGES)
def test_the_first_difference_is_named(what: str) -> None:
    here, there = hybrid(), CHANGES[what]
    assert here != there
    assert here.fingerprint != there.fingerprint
    assert str(here.difference(there)).startswith(f"{what} is ")


def test_equal_layouts_have_one_fingerprint() -> None:
    here, there = hybrid(), hybrid()
    assert here == there
    assert hash(here) == hash(there)
    assert here.difference(there) is None
    assert here.fingerprint == there.fingerprint
    assert len(here.fingerprint) == 64


@pytest.mark.parametrize("move", [copy.deepcopy, lambda layout: pickle.loads(pickle.dumps(layout))])  # noqa: S301
def test_layouts_are_plain_values(move: Any) -> None:  # noqa: ANN401
    layout = with_group("window", aliases={7: 0}, share=(1, 2))
    assert move(layout) == layout
    assert [move(group) for group in layout.groups] == list(layout.groups)


# Requests


def seen(kind: str, tokens: int, span: int, sinks: int) -> set[int]:
    """The positions that the query of the next token sees, itself excluded."""
    if kind == "full":
        return set(range(tokens))
    first = tokens - span + 1 if kind == "window" else tokens // span * span
    return {position for position in range(tokens) if position >= first or position < sinks}


@given(
    kind=st.sampled_from(("full", "window", "chunk")),
    tokens=st.integers(0, 300),
    span=st.integers(1, 90),
    sinks=st.integers(0, 40),
    page=st.sampled_from((1, 4, 16, 64)),
    stride=st.sampled_from((1, 4, 128)),
)
def test_a_request_holds_the_pages_that_are_seen(  # noqa: PLR0913, PLR0917 - drawn
    kind: Any,  # noqa: ANN401
    tokens: int,
    span: int,
    sinks: int,
    page: int,
    stride: int,
) -> None:
    limited: dict[str, Any] = {} if kind == "full" else {"tokens": span, "sinks": sinks}
    group = Group("g", kind, [0], kv(), stride=stride, **limited)
    layout = CacheLayout([group], page_size=page)
    unit = max(page, stride)
    pages = {position // unit for position in seen(kind, tokens, span, 0)}
    # Whole pages from the first that is seen on, and those of sinks before it.
    # The page of the next token is there, if it has others.
    first = min(pages, default=tokens // unit)
    held = set(range(first, -(-tokens // unit))) | {
        number for number in range(first) if number * unit < sinks
    }
    assert layout.request_units(tokens) == {"g": len(held)}
    assert layout.request_bytes(tokens) == len(held) * (unit // stride) * group.entry_bytes


def test_a_request_has_one_state() -> None:
    assert hybrid().request_units(1000)["state"] == 1
    assert hybrid().request_units(0) == {"full": 0, "window": 0, "chunk": 0, "state": 1}


def test_a_table_names_every_group() -> None:
    lines = str(with_group("window", aliases={7: 0})).splitlines()
    assert lines[0] == "hybrid, pages of 16 tokens"
    assert [line.split()[0] for line in lines[2:6]] == ["full", "window", "chunk", "state"]
    assert "window(40) + 4 sinks" in lines[3]
    assert "2 + 1 aliases" in lines[3]
    assert lines[-1] == "3,584 bytes a token, 4,096 a request"


# Pools


def test_pools_say_what_they_keep() -> None:
    pool = KVPool(8, 3, 2, 4, "cpu", "float16", v_head_num=1, page_size=4)
    (group,) = pool.cache_layout.groups
    assert (group.kind, group.layers, pool.cache_layout.page_size) == ("full", (0, 1, 2), 4)
    assert group.planes == (Plane("k", "float16", (2, 4)), Plane("v", "float16", (1, 4)))
    states = GDNPool(4, 2, 3, 4, 5, 6, 4, "cpu", "float16")
    (group,) = states.cache_layout.groups
    assert group.kind == "state"
    assert group.planes == (Plane("recurrent", "float32", (3, 5, 4)), Plane("conv", "float16", (6, 3)))
    assert [plane.name for plane in GDNPool(4, 2, 3, 4, 5, 6, 1, "cpu").cache_layout.groups[0].planes] == [
        "recurrent"
    ]


# Slabs


def test_slabs_are_shared_without_padding() -> None:
    slabs = hybrid().slabs(8 * MIB)
    assert slabs.mem_bytes == slabs.num_slabs * slabs.slab_bytes <= 8 * MIB
    assert slabs.lost < 0.03
    for group in hybrid().groups:
        assert slabs.slab_bytes % slabs.unit_step(group.name) == 0
        assert slabs.units(group.name) >= 1
        assert not slabs.by_layer(group.name)
        assert slabs.held_bytes(group.name) >= slabs.slab_bytes / slabs.units(group.name)


def test_slabs_are_multiples_of_the_granularity() -> None:
    slabs = hybrid().slabs(512 * MIB, granularity=2 * MIB)
    assert slabs.slab_bytes % (2 * MIB) == 0


def test_an_arena_has_room_for_a_unit_of_each_group() -> None:
    with pytest.raises(ConfigError, match=r"30000 bytes is too small.*window 32768, chunk 16384, state 4096"):
        hybrid().slabs(30_000)


def test_an_arena_fits_int32() -> None:
    layout = CacheLayout([Group("g", "full", [0], [Plane("k", "uint8", (1,))])], page_size=16)
    with pytest.raises(ConfigError, match="beyond 2147483647"):
        layout.slabs(1 << 36)


def test_options_of_slabs_are_checked() -> None:
    with pytest.raises(ConfigError, match="granularity is 0"):
        hybrid().slabs(8 * MIB, granularity=0)
    with pytest.raises(ConfigError, match="no size of slabs up to 1 GiB"):
        hybrid().slabs(1 << 40, granularity=(1 << 30) - 1)


def test_a_group_is_named() -> None:
    slabs = hybrid().slabs(8 * MIB)
    for ask in (slabs.units, slabs.unit_step, slabs.by_layer, slabs.held_bytes):
        with pytest.raises(ConfigError, match='no group "latent"'):
            ask("latent")


@pytest.mark.parametrize("arena_bytes", [1 << 17, 1 << 18, 1 << 20, 1 << 24, 1 << 30])
def test_a_request_fits_every_arena(arena_bytes: int) -> None:
    layout = CacheLayout([*hybrid().groups, Group("more", "state", range(6, 20), kv(8))])
    try:
        arena = CacheArena(layout, arena_bytes, "cpu")
    except ConfigError:
        assert arena_bytes < 3 * layout.request_bytes(1)
        return
    assert arena.fits(layout.request_units(1))
    assert arena.slabs.num_slabs <= 1 << 17
