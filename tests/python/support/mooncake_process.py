"""A process that has a MooncakeStore: one command for each line of standard input, one answer for each."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import random
import sys
import threading
from contextlib import suppress
from typing import Any, NamedTuple
from unittest import mock

from kvpool import ConfigError
from kvpool.integrations import mooncake
from kvpool.integrations.mooncake import MooncakeStore

MEMORY = 16 << 20
MASTER, SEGMENT = sys.argv[1], int(sys.argv[2])
JUNK = b"\x5a"


def answer(value: object) -> None:
    sys.stdout.write(f"{json.dumps(value)}\n")
    sys.stdout.flush()


class Pages(NamedTuple):
    """Pages in the memory of this process, side by side."""

    numbers: list[int]
    keys: list[bytes]
    addresses: list[int]
    sizes: list[int]


def bytes_of(number: int, size: int) -> bytes:
    """The bytes that belong to a key: no two begin or end alike."""
    source = random.Random(number)  # noqa: S311
    return b"".join((source.randbytes(size // 2 % 999), source.randbytes(16) * (size // 16 + 1)))[:size]


class Process:
    """The store, its memory, and what each command does."""

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, MEMORY)
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.store = MooncakeStore(MASTER, segment_bytes=SEGMENT)
        # Two pieces, side by side.
        self.store.attach([(self.base, MEMORY // 2), (self.base + MEMORY // 2, MEMORY // 2)])

    def pages(self, numbers: list[int], size: int, start: int = 0) -> Pages:
        assert start + len(numbers) * size <= MEMORY // 2
        keys = [number.to_bytes(32, "little") for number in numbers]
        return Pages(
            numbers, keys, [self.base + start + i * size for i in range(len(keys))], [size] * len(keys)
        )

    def fill(self, pages: Pages) -> None:
        for number, address, size in zip(pages.numbers, pages.addresses, pages.sizes, strict=True):
            self.memory[address - self.base : address - self.base + size] = bytes_of(number, size)

    def write(self, numbers: list[int], size: int, start: int = 0) -> list[bool]:
        pages = self.pages(numbers, size, start)
        self.fill(pages)
        return self.store.write(*pages[1:])

    def write_pieces(self, numbers: list[int], size: int, pieces: int) -> int:
        """Writes in many calls and tells how many are there."""
        step = len(numbers) // pieces
        return sum(sum(self.write(numbers[i : i + step], size)) for i in range(0, len(numbers), step))

    def remove(self, numbers: list[int]) -> list[bool]:
        """Removes values, except those that the master keeps."""
        names = [mooncake._name(number.to_bytes(32, "little")) for number in numbers]
        return [self.store._client.remove(name, False) == 0 for name in names]

    def touch(self, numbers: list[int]) -> list[bool]:
        return self.store.touch([number.to_bytes(32, "little") for number in numbers])

    def find(self, numbers: list[int]) -> list[bool]:
        return self.store.find([number.to_bytes(32, "little") for number in numbers])

    def read(self, numbers: list[int], size: int, start: int = 0) -> list[str]:
        """For each page `right`, `missing`, or, never, `wrong`."""
        pages = self.pages(numbers, size, start)
        length = len(numbers) * size
        self.memory[start : start + length] = JUNK * length
        done = self.store.read(*pages[1:])
        states = []
        for i, (number, is_read) in enumerate(zip(numbers, done, strict=True)):
            found = self.memory[start + i * size : start + (i + 1) * size]
            states.append(
                "missing" if not is_read else "right" if found == bytes_of(number, size) else "wrong"
            )
        return states

    def read_all(self, numbers: list[int], size: int) -> dict[str, int]:
        """How many of many pages are in which state."""
        step = max(1, MEMORY // 2 // size)
        states = [s for i in range(0, len(numbers), step) for s in self.read(numbers[i : i + step], size)]
        return {state: states.count(state) for state in sorted(set(states))}

    def forge(self, number: int, size: int, key: int) -> int:
        """Stores the page of a key, with its trailer, under the name of another number."""
        client: Any = self.store._client
        pages = self.pages([key], size)
        self.fill(pages)
        self.store.write(*pages[1:])
        name = "kvpool1:" + number.to_bytes(32, "little").hex()
        trailer = self.store._trailers[0].address(0)
        (put,) = client.batch_put_from_multi_buffers([name], [[pages.addresses[0], trailer]], [[size, 36]])
        return int(put)

    def tear(self, number: int, size: int) -> None:
        """Changes a page while it is written, as a place does that was given to another meanwhile."""
        pages = self.pages([number], size)
        self.fill(pages)
        client: Any = self.store._client
        put = client.batch_put_from_multi_buffers

        def change_and_put(*arguments: Any) -> Any:  # noqa: ANN401
            self.memory[size - 1] ^= 1
            return put(*arguments)

        class PatchedClient:
            batch_put_from_multi_buffers = staticmethod(change_and_put)
            health_check = client.health_check

        self.store._client = PatchedClient()  # type: ignore[assignment]
        assert self.store.write(*pages[1:]) == [True]
        self.store._client = client

    def damaged(self) -> int:
        return self.store.damaged

    def endless(self, first: int, size: int) -> None:
        """Writes until the process is killed."""
        answer(None)
        while True:
            self.write([*range(first, first + 4)], size)
            first += 4

    def fork(self) -> str:
        """The results of the store's calls in the child of a fork."""
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            said = []
            for call in (lambda: self.find([1]), lambda: self.read([1], 64), self.store.close):
                try:
                    call()
                except RuntimeError as error:
                    said.append(str(error))
            os.write(writer, json.dumps(said).encode())
            os._exit(0)
        os.close(writer)
        _, status = os.waitpid(child, 0)
        assert status == 0
        return os.read(reader, 10_000).decode()

    def threads(self, count: int, rounds: int, size: int) -> list[str]:
        """Each writes and reads pages of its own and of its neighbour."""
        states: list[str] = []

        def work(thread: int) -> None:
            start = thread * 4 * size
            for turn in range(rounds):
                own = [1_000_000 + (turn * count + thread) * 4 + i for i in range(4)]
                assert all(self.write(own, size, start))
                other = [1_000_000 + (turn * count + (thread + 1) % count) * 4 + i for i in range(4)]
                states.extend(self.read(own, size, start) + self.read(other, size, start))

        threads = [threading.Thread(target=work, args=(i,)) for i in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return states

    def read_slowly(self, number: int, size: int) -> list[object]:
        """The store's answers to reads that were ended by Mooncake's own limit, in two threads at once."""
        client: Any = self.store._client
        both = threading.Barrier(2, timeout=60)

        class SlowClient:
            close = client.close
            health_check = client.health_check
            register_buffer = client.register_buffer

            @staticmethod
            def batch_get_into_multi_buffers(keys: list[str], *_: object) -> list[int]:
                both.wait()
                return [-800] * len(keys)

        self.store._client = SlowClient()  # type: ignore[assignment]
        mooncake._SLOW_S = 0.0
        states: list[list[str]] = []
        threads = [
            threading.Thread(target=lambda start=i * size: states.append(self.read([number], size, start)))
            for i in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        said = [states, self.read([number], size), self.find([number]), self.write([number], size)]
        self.store.attach([(self.base, size)])
        self.store.close()
        return said

    def close(self) -> list[str]:
        """Closes while threads read and write, then once more; what they were told."""
        said: list[str] = []
        began = threading.Barrier(4, timeout=60)

        def work(thread: int) -> None:
            began.wait()
            try:
                while True:
                    self.write([2_000_000 + thread], 4096, thread * 4096)
                    self.read([2_000_000 + thread], 4096, thread * 4096)
            except RuntimeError as error:
                said.append(str(error))

        threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
        for thread in threads:
            thread.start()
        began.wait()
        self.store.close()
        for thread in threads:
            thread.join()
        self.store.close()
        return said

    def attach_again(self) -> list[list[bool]]:
        """The writes that succeed after memory was attached again, freed, and attached in other pieces."""
        half, quarter, key = MEMORY // 2, MEMORY // 4, bytes([7]) * 32
        self.store.attach([(self.base, half)])
        written = [self.store.write([key], [self.base], [64])]
        self.store.attach([(self.base + quarter, half)])  # in place of both
        written.append(self.store.write([key], [self.base + half - 32], [64]))
        for address in (self.base, self.base + half + quarter):
            with suppress(ConfigError):
                written.append(self.store.write([key], [address], [64]))
        self.store.attach([(self.base, quarter)])
        written.append(self.store.write([key], [self.base], [64]))
        return written

    def without_a_limit(self) -> None:
        with mock.patch.dict(os.environ, {"MC_TCP_PROGRESS_TIMEOUT_SEC": "0"}):
            MooncakeStore(MASTER)

    def errors(self) -> list[str]:
        """The errors of invalid calls."""
        page, key = self.base, bytes(32)
        end = self.base + MEMORY
        said = []
        for call in (
            lambda: self.store.find([b"short"]),
            lambda: self.store.write([bytes(33)], [page], [64]),
            lambda: self.store.read([key, key], [page], [64]),
            lambda: self.store.read([key], [page - 1], [64]),
            lambda: self.store.read([key], [end - 63], [64]),
            lambda: self.store.read([key], [page + MEMORY // 2 - 1], [64]),
            lambda: self.store.read([key], [page], [0]),
            lambda: self.store.write([key], [page], [-1]),
            lambda: self.store.attach([(end, 0)]),
            lambda: self.store.attach([(page, 4096), (page + 4095, 1)]),
            lambda: MooncakeStore("127.0.0.1"),
            lambda: MooncakeStore("127.0.0.1:0"),
            lambda: MooncakeStore(":50051"),
            lambda: MooncakeStore(MASTER, segment_bytes=-1),
            lambda: MooncakeStore(MASTER, protocol="pigeon"),
            lambda: MooncakeStore(MASTER, timeout_s=0),
            lambda: MooncakeStore(MASTER, timeout_s=31),
            self.without_a_limit,
            lambda: MooncakeStore("127.0.0.1:1"),
        ):
            try:
                call()
            except Exception as error:  # noqa: BLE001
                said.append(f"{type(error).__name__}: {error}")
            else:
                said.append("nothing")
        return said


process = Process()
answer(None)
for line in sys.stdin:
    name, *arguments = json.loads(line)
    answer(getattr(process, name)(*arguments))
