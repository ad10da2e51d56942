"""Managers of offloaded chunks, kvpool's beside vLLM's own with its LRU order, in one process.

`make bench-vllm` runs it. The keys are as vLLM's: 32 bytes of a hash and a group, with their positions.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from harness import Case, Report
from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

from kvpool.integrations.vllm.offload import KvpoolOffloadingManager

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CAPACITY = 50_000


class Side:
    """A manager that is full of other chunks, and the keys of a prompt."""

    def __init__(self, kind: type[Any], chunks: int) -> None:
        """Makes the manager, and fills it."""
        self.manager = kind(CAPACITY)
        self.chunks = chunks
        self._number = 0
        for _ in range(CAPACITY // 1000):
            self.store(self.prompt(1000))()

    def prompt(self, chunks: int | None = None) -> list[bytes]:
        """Keys that no manager has."""
        self._number += 1
        seed = self._number.to_bytes(8, "big")
        count = self.chunks if chunks is None else chunks
        return [
            make_offload_key(hashlib.sha256(seed + number.to_bytes(8, "big")).digest(), 0)
            for number in range(count)
        ]

    def request(self, keys: list[bytes]) -> ReqContext:
        """A request whose prompt has these chunks."""
        request = ReqContext(req_id="request")
        for position, key in enumerate(keys, 1):
            request.set_offload_key_position(key, 16 * position)
        self.manager.on_new_request(request)
        return request

    def store(self, keys: list[bytes]) -> Callable[[], None]:
        """Stores chunks, which evicts as many, and ends the request."""
        request = self.request(keys)

        def run() -> None:
            output = self.manager.prepare_store(keys, request)
            assert len(output.keys_to_store) == len(keys)
            self.manager.complete_store(keys, request)
            self.manager.on_request_finished(request)

        return run

    def load(self, keys: list[bytes]) -> Callable[[], None]:
        """Looks chunks up one by one, as the scheduler does, loads them, and ends the request."""
        request = self.request(keys)

        def run() -> None:
            for key in keys:
                assert self.manager.lookup(key, request) is LookupResult.HIT
            self.manager.prepare_load(keys, request)
            self.manager.complete_load(keys, request)
            self.manager.on_request_finished(request)

        return run


def case(prepared: Callable[[], Callable[[], None]]) -> Case:
    """A case of one call for each round: a request is used once."""
    waiting: list[Callable[[], None]] = []
    return Case(lambda _: waiting.pop()(), lambda: waiting.append(prepared()), calls=1)


def cases(side: Side) -> Iterator[tuple[str, Case]]:
    """Calls as the scheduler makes them."""
    chunks, keys = f"{side.chunks:,} chunks", side.prompt()
    side.store(keys)()
    request = side.request(keys)

    def look_up(number: int) -> None:
        for _ in range(number):
            for key in keys:
                side.manager.lookup(key, request)

    yield f"lookup of {chunks}, one by one", Case(look_up)
    yield (
        f"touch of {chunks}",
        Case(lambda number: [side.manager.touch(keys, request) for _ in range(number)]),
    )
    yield f"lookup, prepare_load, complete_load, finish of {chunks}", case(lambda: side.load(keys))
    yield (
        f"prepare_store, complete_store, finish of {chunks}, evicting as many",
        case(lambda: side.store(side.prompt())),
    )


def main() -> None:
    """Compares both at two sizes."""
    report = Report("vllm")
    for chunks in (1024, 4096):
        sides = Side(KvpoolOffloadingManager, chunks), Side(CPUOffloadingManager, chunks)
        for (question, ours), (_, theirs) in zip(*(cases(side) for side in sides), strict=True):
            if report.wants(question):
                report.compare(question, ours, theirs, alternative="vLLM 0.33.0")
    report.finish()


if __name__ == "__main__":
    main()
