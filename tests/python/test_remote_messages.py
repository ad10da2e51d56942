"""The messages of endpoints: every message comes through, and nothing else does."""

from __future__ import annotations

import struct
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_network import Network, filled, states
from hypothesis import given
from hypothesis import strategies as st
from message_checks import check_message

from kvpool import ConfigError
from kvpool.remote import messages
from kvpool.remote.messages import Introduction, Offered, RemoteSlots, Returned

SEEDS = Path(__file__).parents[1] / "fuzz" / "corpus" / "remote_messages"

INTRODUCTION = Introduction(
    "prefill-0",
    "prefill-0#0123456789ab",
    {"kv": {"layer_num": 2, "dtype": "bfloat16"}, "states": None},
    {"kv": [(4096, 512), (8192, 512)], "states": []},
    {"kv": 72, "states": 0},
    None,
    (65536, 4096),
    b"metadata",
)

slots = st.lists(st.integers(1, (1 << 31) - 1), max_size=40).map(lambda listed: np.array(listed, np.int32))
words, nonces = st.integers(0, (1 << 32) - 1), st.integers(1, (1 << 64) - 1)


@given(slots, slots, st.booleans(), words, nonces)
def test_a_ticket_is_read_as_it_was_written(
    listed: Any,  # noqa: ANN401 - an array
    rows: Any,  # noqa: ANN401 - an array
    is_writable: bool,
    word: int,
    nonce: int,
) -> None:
    ticket = messages.encode_ticket(RemoteSlots(listed, rows, is_writable, word, nonce, 0.0))
    found = messages.decode_ticket(ticket)
    assert np.array_equal(found.slots, listed)
    assert np.array_equal(found.states, rows)
    assert (found.is_writable, found.word, found.nonce) == (is_writable, word, nonce)
    assert check_message(ticket) == 1


def test_a_run_of_slots_is_short() -> None:
    run = np.arange(5, 100_005, dtype=np.int32)
    lent = RemoteSlots(run, run[:0], is_writable=False, word=0, nonce=1, deadline=0.0)
    assert len(messages.encode_ticket(lent)) == 44
    assert messages.runs(run[::-1]).tolist()[:2] == [[100_004, 1], [100_003, 1]]
    assert messages.runs(np.array([3, 4, 6, 7, 8], np.int32)).tolist() == [[3, 2], [6, 3]]


@given(words, nonces, st.binary(max_size=100), st.binary(max_size=100))
def test_a_note_is_read_as_it_was_written(word: int, nonce: int, notify: bytes, ticket: bytes) -> None:
    for note in (Returned(word, nonce), Offered(word, nonce, notify, ticket)):
        assert messages.decode_note(messages.encode_note(note)) == note
        assert check_message(messages.encode_note(note)) == 1


def test_an_introduction_is_read_as_it_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    assert messages.decode_introduction(messages.encode_introduction(INTRODUCTION)) == INTRODUCTION
    endpoint = Network(monkeypatch).endpoint("a", filled(), states())
    metadata = endpoint.metadata()
    assert check_message(metadata) == 1
    assert messages.encode_introduction(messages.decode_introduction(metadata)) == metadata


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_an_error(content: bytes) -> None:
    check_message(content)


@given(
    st.sampled_from(sorted(SEEDS.iterdir())), st.integers(0, 400), st.binary(max_size=8), st.integers(0, 9)
)
def test_bytes_that_begin_well(seed: Path, at: int, instead: bytes, cut: int) -> None:
    content = seed.read_bytes()
    check_message((content[:at] + instead + content[at + len(instead) :])[: len(content) - cut])


def test_seeds_are_messages() -> None:
    for seed in SEEDS.iterdir():
        assert check_message(seed.read_bytes()) == 1, seed


def header(**changes: object) -> bytes:
    """An introduction whose header has other fields."""
    import json

    message = messages.encode_introduction(INTRODUCTION)
    length = struct.unpack_from("<8sHI", message)[2]
    fields = json.loads(message[14 : 14 + length])
    text = json.dumps({**fields, **changes}).encode()
    return struct.pack("<8sHI", b"kvpeer\r\n", 1, len(text)) + text


POOL: dict[str, list[int]] = {"kv": [], "states": []}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": ""}, "name is '', not a str of 1 to 256"),
        ({"name": "x" * 257}, "name is"),
        ({"name": 3}, "name is 3"),
        ({"agent": None}, "agent is None"),
        ({"shapes": []}, "shapes is not an object"),
        ({"more": "x" * (1 << 22)}, "its header has"),
        ({"shapes": {"kv": 3}}, "the shape of kv is not an object"),
        ({"shapes": {"kv": {"layer_num": -1}}}, r"layer_num is -1, not an int in \[0, "),
        ({"shapes": {"kv": {"layer_num": 1.5}}}, "layer_num is 1.5"),
        ({"shapes": {"kv": {"layer_num": True}}}, "layer_num is True"),
        ({"shapes": {"kv": {str(number): 1 for number in range(257)}}}, "the shape of kv has 257 fields"),
        ({"buffers": {"kv": 1}}, "buffers of kv is not a list of at most"),
        ({"buffers": {"kv": [[1]]}}, "a buffer of kv is not an address and a size"),
        ({"buffers": {"kv": [[0, 1]]}}, r"an address is 0"),
        ({"buffers": {"kv": [[1, 0]]}}, r"the bytes of a row is 0"),
        ({"buffers": {"kv": [[1, 1]] * 20_000}}, "buffers of kv is not a list of at most"),
        ({"rows": {"kv": 1 << 31}}, "rows of kv is 2147483648"),
        ({"rows": {"kv": 72}, "buffers": POOL}, "rows of states is None"),
        ({"device": -1}, "device is -1"),
        ({"device": "cuda"}, "device is 'cuda'"),
        (
            {"rows": {"kv": 1 << 30, "states": 0}},
            "2147483648 rows in all buffers are more than",
        ),
        ({"words": [1]}, "words are not an address and a number"),
        ({"words": [0, 1]}, "the address of words is 0"),
        ({"words": [1, 0]}, "words is 0"),
    ],
)
def test_introductions_that_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=f"a peer's message cannot be used: {message}"):
        messages.decode_introduction(header(**changes))


TICKET = messages.encode_ticket(
    RemoteSlots(
        np.array([3, 4, 9], np.int32), np.array([2], np.int32), is_writable=False, word=7, nonce=5, deadline=0
    )
)
NOTE = messages.encode_note(Offered(1, 2, b"notify", TICKET))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it has 0 bytes"),
        (b"?" * 200, "it is not kvpool's"),
        (TICKET[:4] + b"\x02" + TICKET[5:], "it has version 2, and this is version 1"),
        (TICKET[:-1], "it has 59 bytes, for 2 [+] 1 runs"),
        (TICKET[:6] + b"\x04" + TICKET[7:], "flags 4, seconds"),
        (TICKET[:12] + bytes(8) + TICKET[20:], "nonce 0"),
        (TICKET[:20] + struct.pack("<d", -1.0) + TICKET[28:], "seconds -1"),
        (TICKET[:20] + struct.pack("<d", float("nan")) + TICKET[28:], "seconds nan"),
        (TICKET[:-8] + struct.pack("<ii", 0, 1), "states are not runs of slots"),
        (TICKET[:-8] + struct.pack("<ii", 5, 0), "states are not runs of slots"),
        (TICKET[:-8] + struct.pack("<ii", (1 << 31) - 1, 2), "states are not runs of slots"),
        (TICKET[:-8] + struct.pack("<ii", 1, 1 << 30), "1073741824 states are more than 1048576"),
    ],
)
def test_tickets_that_are_refused(content: bytes, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        messages.decode_ticket(content)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it has 0 bytes"),
        (b"?" * 200, "it is not kvpool's"),
        (NOTE[:4] + b"\x09" + NOTE[5:], "it has version 9"),
        (NOTE[:6] + b"\x03" + NOTE[7:], "kind 3 with 6 of"),
        (NOTE[:6] + b"\x01" + NOTE[7:], "kind 1 with 6 of"),
        (NOTE[:20] + struct.pack("<I", 1000), "kind 2 with 1000 of 0 bytes"),
        (NOTE[:20] + struct.pack("<I", 70_000) + bytes(80_000), "kind 2 with 70000 of 80000 bytes"),
    ],
)
def test_notes_that_are_refused(content: bytes, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        messages.decode_note(content)


def test_messages_are_bounded() -> None:
    too_long = bytes(messages.MAX_MESSAGE_BYTES + 1)
    for read in (messages.decode_introduction, messages.decode_ticket, messages.decode_note):
        with pytest.raises(ConfigError, match=f"it has {len(too_long)} bytes"):
            read(too_long)
    deep = b"[" * 100_000
    with pytest.raises(ConfigError, match="its header is not JSON"):
        messages.decode_introduction(struct.pack("<8sHI", b"kvpeer\r\n", 1, len(deep)) + deep)


def test_every_field_makes_a_difference() -> None:
    other = INTRODUCTION._replace(name="b")
    assert messages.difference(INTRODUCTION, other) is None
    kv, none = INTRODUCTION.shapes["kv"], None
    cases: list[tuple[dict[str, Any], str]] = [
        (
            {"shapes": {"kv": {"layer_num": 3, "dtype": "bfloat16"}, "states": none}},
            "layer_num of kv is 3 at",
        ),
        ({"shapes": {"kv": {"dtype": "bfloat16"}, "states": none}}, "layer_num of kv is None at b"),
        ({"shapes": {"kv": kv, "states": {}}}, "b has states, and prefill-0 has none"),
        ({"shapes": {"kv": none, "states": none}}, "prefill-0 has kv, and b has none"),
        ({"buffers": {"kv": [(1, 8)], "states": []}}, "buffers of kv have rows of"),
    ]
    for changes, message in cases:
        found = messages.difference(INTRODUCTION, other._replace(**changes))
        assert found is not None
        assert message in found


def test_rows_are_numbered_buffer_by_buffer() -> None:
    """Slots of every buffer, and after those of K and V the states'."""
    introduction = INTRODUCTION._replace(
        buffers={"kv": [(1, 8), (2, 8)], "states": [(3, 4)]}, rows={"kv": 10, "states": 5}
    )
    numbers = messages.number_rows(introduction, np.array([1, 9], np.int32), np.array([4], np.int32))
    assert numbers.tolist() == [1, 9, 11, 19, 24]
    pools, _ = messages.blocks(introduction)
    found = []
    for number, (at, (address, size, rows)) in product(numbers.tolist(), enumerate(pools.buffers)):
        first = sum(count for _, _, count in pools.buffers[:at])
        if first <= number < first + rows:
            found.append((address, number - first, size))
    assert found == [(1, 1, 8), (1, 9, 8), (2, 1, 8), (2, 9, 8), (3, 4, 4)]
    assert pools.strided().tolist() == [[1, 8, 0, 8, 10], [2, 8, 0, 8, 10], [3, 4, 0, 4, 5]]
