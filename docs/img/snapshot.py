"""Draws the picture of `docs/debugging.md`: requests of two users and a prefix cache hold slots of a pool."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import kvpool

TARGET = Path(__file__).with_name("snapshot.png")


class NotYet:
    """A fence that never passes, as a transfer that hangs."""

    def query(self) -> bool:
        """Whether the transfer is done."""
        return False


def main() -> None:
    """Draw."""
    pick = random.Random(3)  # noqa: S311 - a picture that is the same each time
    allocator = kvpool.TokenToKVPoolAllocator(4096, "cpu", debug=True)
    allocator.name = "kv"
    allocator.alloc(512, owner="prefix cache")
    running: list[Any] = []
    for step in range(160):
        slots = allocator.alloc(pick.randrange(24, 140), owner=("alice", "bob")[step % 2])
        while slots is None or len(running) > 22:
            allocator.free(running.pop(pick.randrange(len(running))))
            if slots is None:
                slots = allocator.alloc(64, owner="bob")
        running.append(slots)
        time.sleep(0.002)
    allocator.free(running.pop(), after=NotYet())
    for _ in range(8):
        allocator.free(running.pop(pick.randrange(len(running))))
    kvpool.snapshot(TARGET, allocator)


if __name__ == "__main__":
    main()
