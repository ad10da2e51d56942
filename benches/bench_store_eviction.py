"""What a `FileStore` finds of the prompts of a trace, by recency and by the policy that learns.

`make bench-store-eviction` runs it with Mooncake's conversation trace. Each block of a prompt is a page, as
small as a file system allows: what pages hold makes no difference. In the column "alone" a request looks its
prompt up, gets the pages that are found, and puts the others, as a connector of an engine does. In "below a
cache" a `PrefixCache` finds pages: on a device with an eighth of the store's tokens, in a `HostTier` with a
quarter, and in the store. `--capacity` counts the tokens of the store, in millions.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from harness import machine
from rich.console import Console
from rich.table import Table

import kvpool
from kvpool.tools.traces import read_trace
from kvpool.tools.traces.agents import agents_trace, parse_agents
from kvpool.tools.traces.trace import BLOCK_SIZE

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from kvpool.tools.traces.trace import Trace

PAGE_BYTES = 4096
HEAD_DIM = 64
HEADS = PAGE_BYTES // (2 * 2 * HEAD_DIM)
"""K and V of one token and layer, in float16, are a page."""
POLICIES = ("lru", "adaptive")


def keys_of(blocks: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
    """Keys of blocks, by number."""
    keys = np.zeros((len(blocks), 4), np.int64)
    keys[:, 0] = blocks
    return keys.view(np.uint8)


def make_store(folder: str, policy: str, pages: int) -> kvpool.FileStore:
    """Makes a store with a queue for every prompt."""
    return kvpool.FileStore(
        folder,
        pages * PAGE_BYTES,
        page_bytes=PAGE_BYTES,
        policy=policy,
        direct=False,
        queue_bytes=1 << 30,
    )


def found_alone(trace: Trace, policy: str, pages: int) -> int:
    """Replays a trace in a store of so many pages. Returns how many pages were found."""
    longest = max(len(blocks) for blocks in trace.blocks)
    memory, found = np.zeros((longest, PAGE_BYTES), np.uint8), 0
    with (
        tempfile.TemporaryDirectory(prefix="kvpool-bench-") as folder,
        make_store(folder, policy, pages) as store,
    ):
        for blocks in trace.blocks:
            keys = keys_of(blocks)
            here = store.exists(keys, will_use=True)
            store.get(keys[:here], memory[:here]).wait()
            parent = keys[here - 1].tobytes() if here else b""
            store.put(keys[here:], memory[here : len(keys)], parent=parent).wait()
            found += here
    return found


def found_below(trace: Trace, policy: str, pages: int) -> int:
    """Replays a trace in a `PrefixCache` above a store of so many pages. Returns how many were found."""
    device, found = pages // 8, 0
    kv = kvpool.KVPool(device, 1, HEADS, HEAD_DIM, device="cpu", dtype="float16")
    slots = kvpool.TokenToKVPoolAllocator(device, device="cpu")
    tier = kvpool.HostTier(kv, size=pages // 4)
    with (
        tempfile.TemporaryDirectory(prefix="kvpool-bench-") as folder,
        make_store(folder, policy, pages) as store,
    ):
        cache = kvpool.PrefixCache(slots, tiers=(tier, store), model="bench")
        for blocks in trace.blocks:
            prompt = blocks.astype(np.int32)[:device]
            cache.fetch(prompt).wait()
            lease = cache.match(prompt)
            if (load := lease.load()) is not None:
                load.wait_layer(0)
            found += lease.length
            if (missing := len(prompt) - lease.length) > 0:
                own = slots.alloc(missing)
                assert own is not None
                lease.publish(prompt[lease.length :], own)
            lease.release()
            # The figures do not depend on how fast the disk is.
            while tier.stats()["storing"] or tier.stats()["arriving"]:
                time.sleep(0.0002)
        del cache
    return found


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", nargs="?", type=Path)
    parser.add_argument("--agents", metavar="SPEC", help="agents of `kvpool replay` in the place of a trace")
    parser.add_argument("--seed", type=int, default=0, help="of the agents")
    parser.add_argument("--capacity", default="1,2,4.1,8.2")
    asked = parser.parse_args()
    if (asked.trace is None) == (asked.agents is None):
        parser.error("name a trace or --agents")
    trace = agents_trace(parse_agents(asked.agents), asked.seed) if asked.agents else read_trace(asked.trace)
    total = sum(len(blocks) for blocks in trace.blocks)
    console = Console()
    console.print(f"{machine()}; {trace.name}, {len(trace):,} prompts")
    table = Table("M tokens", "alone: lru", "adaptive", "ratio", "below a cache: lru", "adaptive", "ratio")
    for capacity in asked.capacity.split(","):
        pages = round(float(capacity) * 1e6) // BLOCK_SIZE
        cells = [capacity]
        replays: tuple[Callable[[Trace, str, int], int], ...] = (found_alone, found_below)
        for replay in replays:
            found = [replay(trace, policy, pages) for policy in POLICIES]
            cells += [*(f"{share / total:.1%}" for share in found), f"{found[1] / found[0]:.2f}"]
        table.add_row(*cells)
    console.print(table)


if __name__ == "__main__":
    main()
