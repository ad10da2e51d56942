"""AddressSpace: what it returns, refuses and reports. Its order is compared with a naive one in Rust."""

from __future__ import annotations

import logging
import re
import threading

import pytest

from kvpool import ConfigError, IndexOwnershipError, OutOfMemoryError
from kvpool._kvpool import AddressSpace

HUGE = 1 << 80


def test_ranges_are_taken_and_given_back() -> None:
    space = AddressSpace(4096, alignment=256)
    assert (space.take(300), space.take_many(1, 3), space.take(4096)) == (0, [512, 768, 1024], None)
    assert (space.capacity, space.alignment, space.in_use, space.available) == (4096, 256, 1280, 2816)
    space.give_back(512, 512)
    space.give_back_many([0, 256], 256)
    space.grow(100)
    assert space.stats() == {
        "capacity": 4352,
        "available": 4096,
        "in_use": 256,
        "high_water": 1280,
        "longest": 3072,
        "dropped_frees": 0,
    }
    assert [space.rounded(size) for size in (0, 1, 256, 257)] == [0, 256, 256, 512]
    space.verify()


def test_a_space_without_bytes_grows() -> None:
    space = AddressSpace(0)
    assert (space.take(1), space.take_many(1, 0), space.take_many(1, 1)) == (None, [], None)
    space.grow(1)
    assert space.take(1) == 0


def test_invalid_frees_are_dropped_and_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    space = AddressSpace(4096)
    space.take(1000)
    with caplog.at_level(logging.WARNING, "kvpool"):
        space.give_back_many([0, 0, 900, 4096, 1 << 62], 200)
        space.give_back(HUGE, HUGE)
    said = "0 (already free), 900 (already free), 4096 (out of range), 4611686018427387904 (out of range)"
    [message] = caplog.messages
    assert re.fullmatch(rf"AddressSpace-\d+: dropped 4 of 5 freed ranges: {re.escape(said)}", message)
    assert (space.in_use, space.stats()["dropped_frees"]) == (800, 5)
    space.verify()


def test_a_strict_space_changes_nothing() -> None:
    space = AddressSpace(4096, strict=True)
    space.take(1000)
    with pytest.raises(
        IndexOwnershipError, match=r"1 of 3 freed ranges: 0 \(already free\); nothing was changed"
    ):
        space.give_back_many([0, 500, 0], 200)
    assert (space.in_use, space.stats()["dropped_frees"]) == (1000, 0)
    space.give_back_many([0, 500], 200)
    assert space.in_use == 600


def test_wrong_numbers_are_errors_and_change_nothing() -> None:
    space = AddressSpace(4096)
    space.take(100)
    for call, said in (
        (lambda: AddressSpace(-1), "capacity is -1; it must not be negative"),
        (lambda: AddressSpace(HUGE), "more than an address can name"),
        (lambda: AddressSpace(1, alignment=3), "alignment is 3; it must be a power of two"),
        (lambda: AddressSpace(1, alignment=0), "alignment is 0; it must be a power of two"),
        (lambda: space.take(0), "size is 0; it must be at least 1"),
        (lambda: space.take_many(-1, 1), "size is -1; it must not be negative"),
        (lambda: space.take_many(1, -1), "count is -1; it must not be negative"),
        (lambda: space.give_back(-1, 1), "start is -1; it must not be negative"),
        (lambda: space.give_back(0, 0), "size is 0; it must be at least 1"),
        (lambda: space.give_back_many([0, -2], 1), "start is -2; it must not be negative"),
        (lambda: space.grow(0), "size is 0; it must be at least 1"),
        (lambda: space.grow(HUGE), "more than an address can name"),
        (lambda: space.rounded(-1), "size is -1; it must not be negative"),
        (lambda: space.rounded(HUGE), "more than an address can name"),
        (lambda: AddressSpace(1, alignment=4).rounded((1 << 64) - 2), "more than an address can name"),
    ):
        with pytest.raises(ConfigError, match=said):
            call()
    with pytest.raises(TypeError):
        space.take("1")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        space.give_back_many(1, 1)  # type: ignore[arg-type]
    assert [space.take(HUGE), space.take_many(HUGE, 1), space.take_many(1, HUGE)] == [None] * 3
    assert (space.capacity, space.in_use) == (4096, 100)


def test_a_list_that_memory_does_not_hold_is_an_error() -> None:
    space = AddressSpace(1 << 62)
    with pytest.raises(OutOfMemoryError):
        space.take_many(1, 1 << 61)
    assert space.in_use == 0


def test_threads_share_a_space() -> None:
    space = AddressSpace(1 << 20, alignment=64)
    overlaps: list[int] = []

    def work(number: int) -> None:
        mine: dict[int, int] = {}
        for step in range(300):
            size = 64 * (1 + (step * 7 + number) % 9)
            start = space.take(size)
            assert start is not None
            overlaps.extend(at for at, held in mine.items() if at < start + size and start < at + held)
            mine[start] = size
            if step % 3:
                space.give_back(*mine.popitem())
        for start, size in mine.items():
            space.give_back(start, size)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not overlaps
    assert (space.in_use, space.stats()["longest"], space.stats()["dropped_frees"]) == (0, 1 << 20, 0)
