"""kvpool.verify: the pattern, eight planted faults and how they are named, the drivers, and the command."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import command_line
import numpy as np
import pytest
import torch
from common import STORAGE
from hypothesis import given
from hypothesis import strategies as st
from model_configs import CONFIGS

from kvpool import ArgumentError, CacheLayout, ConfigError, Group, Plane
from kvpool.models.layout import read_layout
from kvpool.tools.cli import main
from kvpool.tools.verify import command
from kvpool.verify import (
    DRIVERS,
    FREED,
    Array,
    Driver,
    Entry,
    LeftOutError,
    Pattern,
    Workload,
    make_driver,
    prove,
)
from kvpool.verify.driver import STEPS
from kvpool.verify.drivers import pool as pool_driver
from kvpool.verify.drivers.arena_tier import ArenaTierDriver
from kvpool.verify.memory import rows_of
from kvpool.verify.pattern import mix, unmix

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray
    from shared_fixtures import RunSnippet

    from kvpool.verify import Finding, Request

    Bytes = NDArray[np.uint8]

KV = [Plane("k", "bfloat16", (2, 16)), Plane("v", "bfloat16", (2, 16))]
SCALES = [Plane("k_scale", "float32", (1,)), Plane("v_scale", "float32", (1,))]
STATES = [Plane("recurrent", "float32", (2, 8, 4)), Plane("conv", "bfloat16", (10, 3))]
LAYOUT = CacheLayout(
    [
        Group("full", "full", [0, 3], [*KV, *SCALES]),
        Group("window", "window", [1], KV, tokens=20, sinks=3),
        Group("state", "state", [2, 4], STATES),
    ],
    page_size=4,
)
PLAIN = CacheLayout([Group("full", "full", [0, 3], KV), LAYOUT.groups[2]], page_size=4)
TOKENS = 400


def small(size: int, *, heads: int = 1) -> CacheLayout:
    """A layout whose entries have `size` bytes in each of `heads`."""
    return CacheLayout([Group("full", "full", [0], [Plane("k", "uint8", (heads, size))])], page_size=4)


# the pattern


@given(st.integers(0, (1 << 64) - 1))
def test_mixing_can_be_undone(word: int) -> None:
    words = np.array([word], np.uint64)
    assert unmix(mix(words)) == words == mix(unmix(words))


@given(
    prefix=st.integers(0, (1 << 12) - 1),
    position=st.integers(0, (1 << 24) - 1),
    array=st.sampled_from(Pattern(LAYOUT).arrays),
    data=st.data(),
)
def test_every_word_of_an_entry_tells_what_it_is(
    prefix: int, position: int, array: Array, data: st.DataObject
) -> None:
    pattern = Pattern(LAYOUT)
    found = pattern.bytes_of(array, prefix, [position])[0]
    whole = len(found) // 8
    if whole:
        place = data.draw(st.integers(0, whole - 1))
        word = int(found[8 * place : 8 * place + 8].view("<u8")[0])
        is_state = array.group == "state"
        expected = Entry(prefix, position, array.layer, array.group, array.plane, 0, is_state)
        assert pattern.decode(word, place) == expected
        assert pattern.decode(word, place + 1) != expected


def test_parts_of_ranks_differ() -> None:
    halves = [
        CacheLayout([Group("full", "full", [0], KV, share=(part, 2))], page_size=4) for part in range(2)
    ]
    memory = np.zeros((8, 64), np.uint8)
    Pattern(halves[1]).fill(memory, range(8), 1, range(8), 0, "k")
    found = Pattern(halves[0]).check(memory, range(8), 1, range(8), 0, "k")
    assert str(found).endswith(": holds position 0 of request 1, layer 0, k, of part 1")


@given(size=st.integers(1, 40), heads=st.sampled_from([1, 2, 3]), count=st.integers(1, 30), data=st.data())
def test_entries_of_any_size_are_checked_to_the_byte(
    size: int, heads: int, count: int, data: st.DataObject
) -> None:
    pattern = Pattern(small(size, heads=heads))
    memory = np.zeros((40, heads, size), np.uint8)
    rows = data.draw(st.permutations(range(40)))[:count]
    positions = np.arange(count)
    pattern.fill(memory, rows, 5, positions, 0, "k")
    assert pattern.check(memory, rows, 5, positions, 0, "k") is None
    assert not memory[[row for row in range(40) if row not in rows]].any()
    which = data.draw(st.integers(0, count - 1))
    byte = data.draw(st.integers(0, heads * size - 1))
    memory.reshape(40, -1)[rows[which], byte] ^= data.draw(st.integers(1, 255))
    found = pattern.check(memory, rows, 5, positions, 0, "k")
    assert found is not None
    assert (found.page, found.byte) == (which // 4, which % 4 * heads * size + byte)
    assert found.should_be == Entry(5, which, 0, "full", "k")
    assert found.wrong_entries == 1


@pytest.mark.parametrize("dtype", STORAGE, ids=str)
def test_tensors_of_every_dtype(device: str, dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    layout = CacheLayout([Group("full", "full", [0], [Plane("k", name, (3, 5))])], page_size=4)
    pattern = Pattern(layout)
    for lead in ((24,), (6, 4)):
        memory = torch.zeros(*lead, 3, 5, dtype=dtype, device=device)
        rows = [7, 3, 20, 21]
        pattern.fill(memory, rows, 2, [0, 1, 2, 9], 0, "k")
        assert pattern.check(memory, rows, 2, [0, 1, 2, 9], 0, "k") is None
        found = pattern.check(memory, rows, 2, [0, 1, 3, 9], 0, "k")
        assert str(found).startswith("page 0 of request 2, layer 0, k, byte ")
        assert found is not None
        assert found.should_be.position == 3
        as_bytes = memory.cpu().view(torch.uint8).reshape(24, -1)
        assert torch.equal(as_bytes[rows].int().ne(0).any(1), torch.ones(4, dtype=torch.bool))
        assert not as_bytes[[0, 1, 23]].any()


def test_entries_may_lie_apart() -> None:
    """As a `CacheArena` has them: planes side by side in a unit."""
    units = np.zeros((5, 400), np.uint8)
    inside = units[:, 16 : 16 + 4 * 64].reshape(5, 4, 64)
    assert np.shares_memory(inside, units)
    pattern = Pattern(LAYOUT)
    pattern.fill(inside, [4, 5, 19], 1, [0, 1, 2], 3, "k")
    assert pattern.check(inside, [4, 5, 19], 1, [0, 1, 2], 3, "k") is None
    assert np.flatnonzero(units.any(1)).tolist() == [1, 4]
    assert not units[:, :16].any()
    assert not units[:, 16 + 4 * 64 :].any()
    tensor = torch.from_numpy(units)[:, 16 : 16 + 4 * 64].view(5, 4, 64)
    assert pattern.check(tensor, [4, 5, 19], 1, [0, 1, 2], 3, "k") is None


def test_tensors_without_pytorch(run_snippet: RunSnippet) -> None:
    run_snippet(
        """
        import kvpool
        from kvpool.verify import Pattern, make_driver, prove
        planes = [kvpool.Plane(name, "float16", (2, 8)) for name in ("k", "v")]
        layout = kvpool.CacheLayout([kvpool.Group("full", "full", [0], planes)])
        kv = kvpool.KVPool(8, 1, 2, 8, "cpu", "float16")
        pattern = Pattern(layout)
        pattern.fill(kv.k_buffer[0], [1, 2], 0, [0, 1], 0, "k")
        assert "holds position 0" in str(pattern.check(kv.k_buffer[0], [1], 0, [1], 0, "k"))
        for name in ("pool", "arena", "host-tier", "arena-tier"):
            with make_driver(name, layout, 200) as driver:
                assert prove(driver, tokens=200).finding is None
        assert "torch" not in sys.modules or sys.modules["torch"] is None
        """,
        hidden=["torch"],
    )


def test_arrays_need_no_pytorch(run_snippet: RunSnippet) -> None:
    run_snippet(
        """
        import numpy, kvpool
        pattern = kvpool.verify.Pattern(
            kvpool.CacheLayout([kvpool.Group("full", "full", [0], [kvpool.Plane("k", "int8", (16,))])]))
        memory = numpy.zeros((4, 16), numpy.int8)
        pattern.fill(memory, [1], 0, [0], 0, "k")
        assert pattern.check(memory, [1], 0, [0], 0, "k") is None
        assert "torch" not in sys.modules
        """
    )


def test_what_else_is_found() -> None:
    pattern = Pattern(LAYOUT)
    memory = np.zeros((12, 64), np.uint8)

    def said(rows: list[int] | range = range(12)) -> str:
        return str(pattern.check(memory, rows, 1, range(len(rows)), 3, "k", group="full"))

    assert (
        said()
        == "page 0 of request 1, layer 3, k of full, byte 0 (position 0): holds zeros: it was never written"
    )
    pattern.fill(memory, range(12), 1, range(12), 3, "k")
    assert said() == "None"
    memory[6] = FREED
    assert said() == (
        "page 1 of request 1, layer 3, k of full, byte 128 (position 6): "
        "holds what freed memory is overwritten with: it has not arrived; 1 of the page's 4 entries are wrong"
    )
    memory[6] = np.arange(64)
    assert ": holds 00 01 02 03 04 05 06 07, which are bytes of no entry; 1 of" in said()
    pattern.fill(memory, range(12), 1, range(12), 3, "k")
    for shift in (8, 20):
        memory[5] = np.roll(memory.ravel(), shift)[5 * 64 : 6 * 64]
        assert (
            f"(position 5): holds byte {64 - shift} of position 4 of request 1, layer 3, k of full; 1"
            in said()
        )
        pattern.fill(memory, [5], 1, [5], 3, "k")
    found = pattern.check(memory, range(12), 1, range(12), 3, "k", request=7)
    assert found is None
    found = pattern.check(memory, range(1, 12), 1, range(11), 3, "k", request=7)
    assert str(found) == (
        "page 0 of request 7, layer 3, k of full, byte 0 (position 0 of request 1): "
        "holds position 1 of request 1, layer 3, k of full"
    )
    assert found is not None
    assert json.loads(json.dumps(found.as_json()))["holds"]["position"] == 1


def test_short_entries_are_told_by_their_neighbours() -> None:
    for size in (1, 2, 4, 12):
        pattern = Pattern(small(size))
        memory = np.zeros((400, size), np.uint8)
        pattern.fill(memory, range(200), 1, range(200), 0, "k")
        pattern.fill(memory, range(200, 400), 2, range(200), 0, "k")
        found = pattern.check(memory[40:], range(100), 1, range(100), 0, "k")
        assert found is not None
        expected = (
            None
            if size == 1 and found.holds is None
            else Entry(1, 40 + found.should_be.position, 0, "full", "k")
        )
        assert found.holds == expected
        assert size == 1 or found.should_be.position == 0


def test_layers_that_read_others_are_the_others() -> None:
    layout = CacheLayout([Group("full", "full", [0, 2], KV, aliases={1: 0})], page_size=4)
    pattern = Pattern(layout)
    assert pattern.array(1, "v") == Array("full", 0, "v")
    assert [array.layer for array in pattern.arrays] == [0, 0, 2, 2]


def test_misuse_of_a_pattern() -> None:
    pattern = Pattern(LAYOUT)
    memory = np.zeros((12, 2, 32), np.uint8)

    right: dict[str, Any] = {
        "buffer": memory,
        "rows": [0],
        "prefix": 0,
        "positions": [0],
        "layer": 0,
        "plane": "k",
    }

    for error, said, arguments in (
        (ArgumentError, "layer 5 has no plane 'k'", {"layer": 5}),
        (ArgumentError, "layer 0 has no plane 'latent'", {"plane": "latent"}),
        (ArgumentError, "layer 0 has no plane 'k' in group window", {"group": "window"}),
        (ArgumentError, "there are 2 rows for 1 positions", {"rows": [0, 1]}),
        (ArgumentError, "there are 2 prefixes for 1 positions", {"prefix": [0, 1]}),
        (ArgumentError, "prefix 4096 is outside of a pattern's 4096", {"prefix": 4096}),
        (ArgumentError, "position -1 is outside of a pattern's 16777216", {"positions": [-1]}),
        (ArgumentError, "rows must be ints, not float64", {"rows": [0.5]}),
        (IndexError, "row 12 is outside of the buffer's 12", {"rows": [12]}),
        (ArgumentError, "a buffer is an array or a tensor, not a list", {"buffer": [1]}),
        (
            ArgumentError,
            r"a buffer of shape \[12, 2, 16\] with elements of 1 bytes has no entries of 64 bytes",
            {"buffer": memory[:, :, :16]},
        ),
        (
            ArgumentError,
            "entries of the buffer are not contiguous: dimension 1 has steps of 64",
            {"buffer": np.zeros((12, 2, 64), np.uint8)[:, :, :32]},
        ),
        (
            ArgumentError,
            "entries of the buffer are not contiguous: dimension 2 has steps of 2",
            {"buffer": torch.zeros(12, 2, 64, dtype=torch.uint8)[:, :, ::2]},
        ),
    ):
        with pytest.raises(error, match=said):
            pattern.fill(**{**right, **arguments})
    assert not memory.any()
    twice = CacheLayout([Group(name, "full", [0], KV) for name in ("a", "b")], page_size=4)
    with pytest.raises(ArgumentError, match="name the group of 'k' of layer 0: a, b"):
        Pattern(twice).array(0, "k")
    for layout, said in (
        (
            CacheLayout([Group("full", "full", [1024], KV)]),
            "the layout has 1025 layers; a pattern names 1024",
        ),
        (
            CacheLayout([Group("full", "full", [0], [Plane(f"p{n}", "int8", (8,)) for n in range(65)])]),
            "the layout has 65 planes; a pattern names 64",
        ),
        (
            CacheLayout([Group("full", "full", [0], KV, share=(0, 65))]),
            "the layout has 65 parts; a pattern names 64",
        ),
    ):
        with pytest.raises(ConfigError, match=said):
            Pattern(layout)


# the requests


@pytest.mark.parametrize("name", ["Llama-3.1-8B", "gemma-3-4b-it", "Qwen3-Next-80B-A3B", "DeepSeek-V3"])
def test_requests_have_the_units_of_the_layout(name: str) -> None:
    layout = read_layout(CONFIGS[name])
    load = Workload(Pattern(layout), 20_000)
    for request in load:
        counts = {group.name: len(request.pages(group.name)) for group in layout.groups}
        assert counts == layout.request_units(len(request.tokens))
        assert len(request.tokens) % load.step == 0


def test_requests_begin_alike_and_windows_have_their_end() -> None:
    load = Workload(Pattern(LAYOUT), TOKENS)
    first, second = load.first[:2]
    same = next(
        at for at, (one, other) in enumerate(zip(first.tokens, second.tokens, strict=False)) if one != other
    )
    assert same >= 4
    array = Array("full", 0, "v")
    assert np.array_equal(first.data(array)[: same // 4], second.data(array)[: same // 4])
    assert not np.array_equal(first.data(array)[same // 4], second.data(array)[same // 4])
    last = len(first.tokens) // 4
    pages = first.pages("window")
    assert pages == [0, *range(last - len(pages) + 1, last)]
    assert first.data(Array("window", 1, "k")).shape == (len(pages), 4, 64)
    assert first.data(Array("state", 2, "conv")).shape == (1, 1, 60)
    assert load.most_tokens >= sum(len(request.tokens) for request in load.live)


# planted faults


class Paged(Driver):
    """A connector of an engine: pages are copied to a store, given up, and loaded into others.

    All arrays lie in one region, one behind the other.
    """

    def __init__(self, layout: CacheLayout = LAYOUT, pages: int = 200) -> None:
        super().__init__(layout)
        pattern = Pattern(layout)
        self.arrays = pattern.arrays
        self.sizes = {array: self.page_bytes(pattern, array) for array in self.arrays}
        self.pages = pages
        ends = np.cumsum([pages * size for size in self.sizes.values()])
        self.offsets = dict(zip(self.arrays, [0, *ends[:-1].tolist()], strict=True))
        self.region = np.zeros(ends[-1], np.uint8)
        self.free = {group.name: list(range(1, pages)) for group in layout.groups}
        self.table: dict[int, dict[str, list[int]]] = {}
        self.store: dict[tuple[int, Array], Bytes] = {}

    def page_bytes(self, pattern: Pattern, array: Array) -> int:
        group = next(group for group in self.layout.groups if group.name == array.group)
        entries: int = (pattern.unit_tokens(array.group) or 1) // group.stride
        return pattern.entry_bytes(array) * entries

    def memory(self, array: Array) -> Bytes:
        """`[pages, bytes of a page]`."""
        begin = self.offsets[array]
        return self.region[begin : begin + self.pages * self.sizes[array]].reshape(self.pages, -1)

    def take(self, request: int, counts: Mapping[str, int]) -> None:
        self.table[request] = {
            group: [self.free[group].pop() for _ in range(count)] for group, count in counts.items()
        }

    def write(self, request: Request, data: Mapping[Array, Bytes]) -> None:
        self.take(request.number, {group: len(request.pages(group)) for group in self.free})
        for array in self.arrays:
            pages = self.table[request.number][array.group]
            self.memory(array)[pages] = data[array].reshape(len(pages), -1)

    def move(self) -> None:
        for request in self.table:
            for array in self.arrays:
                self.save(request, array)
        self.region[:] = FREED
        for request, table in self.table.items():
            for group, pages in table.items():
                self.free[group][:0] = pages
            self.take(request, {group: len(pages) for group, pages in table.items()})
        for request in self.table:
            for array in self.arrays:
                self.load(request, array)

    def save(self, request: int, array: Array) -> None:
        self.store[request, array] = self.memory(array)[self.table[request][array.group]]

    def load(self, request: int, array: Array) -> None:
        self.memory(array)[self.table[request][array.group]] = self.store[request, array]

    def read(self, request: Request) -> Iterator[tuple[Array, Bytes]]:
        pattern = Pattern(self.layout)
        for array in self.arrays:
            pages = self.table[request.number][array.group]
            yield array, self.memory(array)[pages].reshape(len(pages), -1, pattern.entry_bytes(array))

    def drop(self, request: Request) -> None:
        for group, pages in self.table.pop(request.number).items():
            self.free[group] += pages


class SwappedPlanes(Paged):
    def load(self, request: int, array: Array) -> None:
        other = {"k": "v", "v": "k"}.get(array.plane, array.plane)
        self.memory(array)[self.table[request][array.group]] = self.store[
            request, array._replace(plane=other)
        ]


class PageOffByOne(Paged):
    def save(self, request: int, array: Array) -> None:
        pages = self.table[request][array.group]
        self.store[request, array] = self.memory(array)[[*pages[1:], pages[0]]]


class WrongStride(Paged):
    """Layers are one entry shorter to the one that reads."""

    def read(self, request: Request) -> Iterator[tuple[Array, Bytes]]:
        self.offsets = {
            array: offset - 64 * (array.layer > 0) * (array.group == "full")
            for array, offset in self.offsets.items()
        }
        yield from super().read(request)


class StalePage(Paged):
    """A page that somebody had is taken for written; nothing has moved it since."""

    def move(self) -> None: ...

    def write(self, request: Request, data: Mapping[Array, Bytes]) -> None:
        before = self.region.copy()
        super().write(request, data)
        if request.number >= 4:
            page = self.table[request.number]["full"][1]
            for array in self.arrays:
                if array.group == "full":
                    begin = self.offsets[array] + page * self.sizes[array]
                    self.region[begin : begin + self.sizes[array]] = before[begin : begin + self.sizes[array]]


class HalfPage(Paged):
    def load(self, request: int, array: Array) -> None:
        page = self.table[request][array.group][-1]
        before = self.memory(array)[page].copy()
        super().load(request, array)
        if (request, array) == (1, Array("full", 3, "v")):
            half = self.sizes[array] // 2
            self.memory(array)[page, half:] = before[half:]


class ScalesOfAnotherPage(Paged):
    def load(self, request: int, array: Array) -> None:
        super().load(request, array)
        if array.plane == "v_scale":
            pages = self.table[request][array.group]
            self.memory(array)[pages[2]] = self.store[request, array][0]


class StateOfAnother(Paged):
    def load(self, request: int, array: Array) -> None:
        source = 0 if array.group == "state" and request == 2 else request
        self.memory(array)[self.table[request][array.group]] = self.store[source, array]


class NotWaited(Paged):
    """The last layer arrives after it is read."""

    def __init__(self) -> None:
        super().__init__()
        self.late: list[tuple[int, Array]] = []

    def load(self, request: int, array: Array) -> None:
        if array.layer == 3:
            self.late.append((request, array))
        else:
            super().load(request, array)

    def read(self, request: Request) -> Iterator[tuple[Array, Bytes]]:
        yield from super().read(request)
        while self.late:
            super().load(*self.late.pop())


FAULTS = {
    SwappedPlanes: "page 0 of request 0, layer 0, k of full, byte 0 (position 0): "
    "holds position 0 of request 0, layer 0, v of full",
    PageOffByOne: "page 0 of request 0, layer 0, k of full, byte 0 (position 0): "
    "holds position 4 of request 0, layer 0, k of full",
    WrongStride: "page 0 of request 0, layer 3, k of full, byte 0 (position 0): "
    "holds position 7 of request 0, layer 3, k of full",
    StalePage: "page 1 of request 4, layer 0, k of full, byte 0 (position 4): "
    "holds position 48 of request 2, layer 0, k of full, which was dropped",
    HalfPage: "page 18 of request 1, layer 3, v of full, byte 128 (position 74): "
    "holds what freed memory is overwritten with: it has not arrived; 2 of the page's 4 entries are wrong",
    ScalesOfAnotherPage: "page 2 of request 0, layer 0, v_scale, byte 0 (position 8): "
    "holds position 0 of request 0, layer 0, v_scale",
    StateOfAnother: "state of request 2 after 56 tokens, layer 2, recurrent, byte 0: "
    "holds the state of request 0 after 92 tokens, layer 2, recurrent",
    NotWaited: "page 0 of request 0, layer 3, k of full, byte 0 (position 0): "
    "holds what freed memory is overwritten with: it has not arrived",
}


def found_by(driver: Driver) -> Finding:
    finding = prove(driver, tokens=TOKENS).finding
    assert finding is not None
    return finding


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_found_and_named(fault: type[Paged]) -> None:
    assert str(found_by(fault())) == FAULTS[fault]


def test_without_a_fault_there_is_no_finding() -> None:
    steps: list[None] = []
    proof = prove(Paged(), tokens=TOKENS, on_step=lambda: steps.append(None))
    assert (proof.finding, proof.requests, len(steps)) == (None, 6, STEPS)
    assert proof.checked_bytes > 200_000


def test_what_is_missing_is_a_finding() -> None:
    class Short(Paged):
        def read(self, request: Request) -> Iterator[tuple[Array, Bytes]]:
            for array, found in super().read(request):
                if array.plane != "conv":
                    yield array, found[:-1] if array.plane == "v_scale" else found

    assert (
        str(found_by(Short())) == "page 22 of request 0, layer 0, v_scale, byte 0 (position 88): is missing"
    )
    states = CacheLayout([LAYOUT.groups[2]], page_size=4)
    assert (
        str(found_by(Short(states)))
        == "state of request 0 after 95 tokens, layer 2, conv, byte 0: is missing"
    )


def test_drivers_that_answer_wrongly_are_refused() -> None:
    class Answers(Paged):
        def __init__(self, *answers: tuple[Array, Bytes]) -> None:
            super().__init__()
            self.answers = answers

        def read(self, request: Request) -> Iterator[tuple[Array, Bytes]]:
            assert request.number == 0
            yield from self.answers

    array = Array("full", 0, "k")
    right = Workload(Pattern(LAYOUT), TOKENS).first[0].data(array)
    for answers, said in (
        ([(array, right), (array, right)], "read returns layer 0, k of full, again"),
        ([(Array("full", 9, "k"), right)], "read returns layer 9, k of full, which the layout does not have"),
        (
            [(array, right[..., :8])],
            r"layer 0, k of full has entries of 64 bytes, and this is uint8\[23, 4, 8\]",
        ),
        ([(array, right.view(np.int8))], "entries of 64 bytes, and this is int8"),
        ([(array, np.concatenate([right, right]))], "has 92 entries of request 0, not 184"),
    ):
        with pytest.raises(ArgumentError, match=said):
            prove(Answers(*answers), tokens=TOKENS)


# the drivers


@pytest.mark.parametrize("name", ["pool", "arena", "host-tier", "arena-tier", "file-store"])
@pytest.mark.parametrize("layout", [LAYOUT, PLAIN], ids=["full", "plain"])
def test_drivers_bring_every_byte(device: str, name: str, layout: CacheLayout) -> None:
    if layout is LAYOUT and name in {"host-tier", "file-store"}:
        with pytest.raises(LeftOutError, match="a prefix cache has none of the groups full, window, state"):
            make_driver(name, layout, TOKENS, device)
        return
    with make_driver(name, layout, TOKENS, device) as driver:
        proof = prove(driver, tokens=TOKENS)
    assert proof.finding is None
    assert proof.notes == (("without full",) if layout is LAYOUT and name == "pool" else ())


@pytest.mark.parametrize("name", ["gemma-3-4b-it", "Qwen3-Next-80B-A3B", "DeepSeek-V2-Lite"])
def test_layouts_of_models(name: str) -> None:
    layout = read_layout(CONFIGS[name])
    for over in ("arena", "arena-tier"):
        with make_driver(over, layout, 256) as driver:
            assert prove(driver, tokens=256).finding is None


@pytest.mark.parametrize("dtype", STORAGE, ids=str)
def test_pools_of_every_dtype(dtype: torch.dtype) -> None:
    planes = [Plane(name, str(dtype).removeprefix("torch."), (1, dim)) for name, dim in (("k", 5), ("v", 3))]
    layout = CacheLayout([Group("full", "full", [0], planes)], page_size=1)
    for name in ("pool", "arena", "host-tier", "arena-tier"):
        with make_driver(name, layout, 100) as driver:
            assert prove(driver, tokens=100).finding is None


def test_entries_of_compressed_chains() -> None:
    chains = [Group(f"chain_{ratio}", "full", [0, 1], KV, stride=ratio) for ratio in (4, 32)]
    layout = CacheLayout([*chains, Group("window", "window", [0, 1], KV, tokens=8)], page_size=8)
    for name in ("pool", "arena", "arena-tier"):
        with make_driver(name, layout, 600) as driver:
            assert prove(driver, tokens=600).finding is None


def test_faults_of_drivers_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """What moves rows to the wrong place is found over the real pools, too."""
    move = pool_driver._Slots.move

    def rotate(slots: pool_driver._Slots) -> None:
        move(slots)
        one = slots.slots[0]
        slots.pool.move_kv(one, one.roll(4))

    monkeypatch.setattr(pool_driver._Slots, "move", rotate)
    with make_driver("pool", PLAIN, TOKENS) as driver:
        assert str(prove(driver, tokens=TOKENS).finding) == (
            "page 0 of request 0, layer 0, k, byte 0 (position 0): holds position 88 of request 0, layer 0, k"
        )


def test_what_a_tier_exchanges_is_not_loaded() -> None:
    """A fault of host memory is found by the tier: the request has nothing there, and would compute."""
    with make_driver("arena-tier", PLAIN, TOKENS) as driver:
        assert isinstance(driver, ArenaTierDriver)
        write = driver.move

        def move() -> None:
            write()
            ((address,), (size,), _) = driver.tier.get_contiguous_buf_infos()
            memory = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
            memory[:] = np.roll(memory, 64)

        driver.move = move  # type: ignore[method-assign]
        finding = prove(driver, tokens=TOKENS).finding
        assert "page 0 of request 0, layer 0, k, byte 0 (position 0): is missing" in str(finding)
        assert driver.tier.stats()["damaged"] > 0


def test_memory_that_is_given_up_is_overwritten() -> None:
    with make_driver("pool", PLAIN, TOKENS) as driver:
        assert isinstance(driver, pool_driver.PoolDriver)
        prove(driver, tokens=TOKENS)
        [slots] = driver._slots
        free = np.asarray(slots.allocator.free_slots.tolist() + slots.allocator.release_slots.tolist())
        rows = (free[:, None] * 4 + np.arange(4)).ravel()
        found = rows_of(slots.pool.k_buffer[0], 64).read(rows)
        assert len(rows)
        assert (found == FREED).all()


def test_an_unknown_driver() -> None:
    with pytest.raises(ConfigError, match="there is no 'disk'; there are pool, arena, host-tier"):
        make_driver("disk", PLAIN)


# the command


def test_the_command_names_all_drivers() -> None:
    assert tuple(DRIVERS) == command.OVER


def test_the_command_prints_what_was_compared() -> None:
    result = command_line.invoke(main, ["verify", "--over", "pool,arena", "--tokens", "600"])
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.count("every byte is right") == 2
    result = command_line.invoke(
        main, ["verify", "--over", "pool", "--layers", "2", "--dtype", "int8", "--json"]
    )
    assert (result.exit_code, result.stderr) == (0, "")
    found = json.loads(result.stdout)
    [one] = found["results"]
    assert (one["over"], one["left_out"], one["proof"]["finding"]) == ("pool", None, None)
    assert one["proof"]["checked_bytes"] > 0


def test_the_command_reads_models(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["DeepSeek-V2-Lite"]))
    arguments = ["verify", "--config", str(tmp_path), "--tokens", "300", "--over", "pool,arena"]
    result = command_line.invoke(main, arguments)
    assert (result.exit_code, result.stderr) == (0, "")
    assert "left out: KVPool has none of the" in result.stdout
    result = command_line.invoke(main, [*arguments[:-1], "pool"])
    assert (result.exit_code, result.stderr) == (1, "kvpool: nothing could be verified\n")


def test_a_finding_ends_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvpool.tools.verify import proofs

    def planted(name: str, layout: CacheLayout, _tokens: int | None, _device: str) -> Driver:
        return PageOffByOne(layout, 2000) if name == "arena" else Paged(layout, 2000)

    monkeypatch.setattr(proofs, "make_driver", planted)
    arguments = ["verify", "--over", "pool,arena,host-tier", "--tokens", "600"]
    result = command_line.invoke(main, arguments)
    array = "layer 3, k of full"
    said = f"page 0 of request 0, {array}, byte 0 (position 0): holds position 16 of request 0, {array}"
    assert (result.exit_code, result.stderr) == (1, f"kvpool: {said}\n")
    assert "host-tier" not in result.stdout
    result = command_line.invoke(main, [*arguments, "--json"])
    found = json.loads(result.stdout)["results"]
    assert [one["over"] for one in found] == ["pool", "arena"]
    assert found[1]["proof"]["finding"]["text"] == said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("--over", "disk"),
            "--over: there is no 'disk'; there are pool, arena, host-tier, arena-tier, file-store, nixl, ",
        ),
        (("--config", "x", "--layers", "2"), "--layers and --config: give one of them"),
        (("--tp", "2"), "--tp is for --config"),
        (("--dtype", "int3"), "int3"),
        (("--device", "tpu"), "tpu"),
    ],
)
def test_wrong_options_are_refused(arguments: tuple[str, ...], said: str) -> None:
    result = command_line.invoke(main, ["verify", *arguments])
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stderr.count("\n") == 1


# engines

ROOT = Path(__file__).parents[2]


def run_with(over: str, *places: object) -> dict[str, Any]:
    """Verifies over what is only there with these folders, and returns the result."""
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "python"), *map(str, places)]),
        "NIXL_LOG_LEVEL": "FATAL",
        "UCX_LOG_LEVEL": "fatal",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    arguments = ["-W", "ignore", "-m", "kvpool", "verify", "--over", over, "--tokens", "2000", "--json"]
    done = subprocess.run(
        [sys.executable, *arguments], env=env, capture_output=True, text=True, check=False, timeout=250
    )
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"model"')]
    assert len(found) == 1, done.stderr
    [result] = found[0]["results"]
    if result["left_out"] is not None:
        if os.environ.get("KVPOOL_REQUIRE_ENGINES"):
            pytest.fail(result["left_out"])
        pytest.skip(result["left_out"])
    assert done.returncode == 0, done.stderr
    assert result["proof"]["finding"] is None
    return dict(result)


@pytest.mark.engines
def test_rows_between_processes_over_nixl() -> None:
    nixl = os.environ.get("KVPOOL_NIXL") or Path(sys.prefix) / "nixl"
    assert run_with("nixl", nixl)["proof"]["notes"] == ["without window"]


@pytest.mark.engines
@pytest.mark.parametrize(
    ("over", "notes"),
    [("vllm-offload", []), ("vllm-connector", []), ("vllm-transfer", ["without state"])],
)
def test_connectors_of_vllm(over: str, notes: list[str]) -> None:
    from vllm_runs import VLLM, require

    require()
    places = (VLLM, VLLM.with_name("engines"), os.environ.get("KVPOOL_NIXL") or Path(sys.prefix) / "nixl")
    assert run_with(over, *places)["proof"]["notes"] == notes
