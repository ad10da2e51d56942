"""What the tiers below a device find of the prompts of a trace, by recency and by the policy that learns.

`make bench-tier-eviction` runs it with Mooncake's traces, if they are there, and with agents. Each block of a
prompt is a page: what pages hold makes no difference. "host memory" has a `PrefixCache` with a device and a
`HostTier` of these sizes, both by `lru` and both by `adaptive`. "store" has a `FileStore`: alone, where a
request looks its prompt up, gets the pages that are found, and puts the others, as a connector of an engine
does; and below a `PrefixCache` by `adaptive`, with an eighth of the store's tokens on the device and a
quarter in a `HostTier`. Sizes are in millions of tokens.
"""

from __future__ import annotations

import argparse
import tempfile
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
    import numpy.typing as npt

    from kvpool.tools.traces.trace import Trace
    from kvpool.typing import Policy

PAGE_BYTES = 4096
PAGE_SIZE = 64
"""Tokens of a page in the place of the 512 of a block."""
POLICIES: tuple[Policy, ...] = ("lru", "adaptive")
HOST_TIERS = ((0.26, 0.52), (0.26, 1.05), (0.52, 2.1), (0.26, 4.2), (1.05, 4.2), (0.52, 8.4))
"""The device and host memory."""


def keys_of(blocks: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
    """Keys of blocks, by number."""
    keys = np.zeros((len(blocks), 4), np.int64)
    keys[:, 0] = blocks
    return keys.view(np.uint8)


def make_store(folder: str, policy: Policy, pages: int) -> kvpool.FileStore:
    """Makes a store with a queue for every prompt."""
    return kvpool.FileStore(
        folder,
        pages * PAGE_BYTES,
        page_bytes=PAGE_BYTES,
        policy=policy,
        direct=False,
        queue_bytes=1 << 30,
    )


def found_alone(trace: Trace, policy: Policy, pages: int) -> int:
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


def replay(trace: Trace, policy: Policy, device: int, host: int, store: kvpool.FileStore | None) -> int:
    """Replays a trace in a `PrefixCache` and the tiers below. Returns how many pages were found."""
    kv = kvpool.KVPool(
        device * PAGE_SIZE, 1, 1, 1, device="cpu", dtype="float16", pin_memory=False, page_size=PAGE_SIZE
    )
    slots = kvpool.TokenToKVPoolAllocator(device * PAGE_SIZE, device="cpu", page_size=PAGE_SIZE)
    tier = kvpool.HostTier(kv, size=host * PAGE_SIZE, pin_memory=False)
    if store is None:
        cache = kvpool.PrefixCache(slots, policy=policy, tiers=(tier,))
    else:
        cache = kvpool.PrefixCache(slots, policy=policy, tiers=(tier, store), model="bench")
    found, within = 0, np.arange(PAGE_SIZE, dtype=np.int32)
    for blocks in trace.blocks:
        prompt = (blocks[:device, None].astype(np.int32) * PAGE_SIZE + within).reshape(-1)
        cache.fetch(prompt).wait()
        lease = cache.match(prompt)
        if (load := lease.load()) is not None:
            load.wait_layer(0)
        found += lease.length // PAGE_SIZE
        if (missing := len(prompt) - lease.length) > 0:
            own = slots.alloc(missing)
            assert own is not None
            lease.publish(prompt[lease.length :], own)
        lease.release()
        # The figures do not depend on how fast memory and the disk are.
        cache.wait_written()
    return found


def found_in_host_memory(trace: Trace, policy: Policy, pages: tuple[int, int]) -> int:
    """Replays a trace on a device and in a `HostTier` of so many pages."""
    device, host = pages
    return replay(trace, policy, device, host, None)


def found_below(trace: Trace, policy: Policy, pages: int) -> int:
    """Replays a trace in a `PrefixCache` above a store of so many pages."""
    with (
        tempfile.TemporaryDirectory(prefix="kvpool-bench-") as folder,
        make_store(folder, policy, pages) as store,
    ):
        return replay(trace, "adaptive", pages // 8, pages // 4, store)


def pages_of(millions: float) -> int:
    """The blocks of so many tokens."""
    return round(millions * 1e6) // BLOCK_SIZE


def cells_of(found: list[int], total: int) -> list[str]:
    """What each policy finds, and the ratio."""
    return [*(f"{share / total:.1%}" for share in found), f"{found[1] / found[0]:.2f}"]


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", nargs="?", type=Path)
    parser.add_argument("--agents", metavar="SPEC", help="agents of `kvpool replay` in the place of a trace")
    parser.add_argument("--seed", type=int, default=0, help="of the agents")
    parser.add_argument("--capacity", default="1,2,4.1,8.2", help="of the store")
    asked = parser.parse_args()
    if (asked.trace is None) == (asked.agents is None):
        parser.error("name a trace or --agents")
    trace = agents_trace(parse_agents(asked.agents), asked.seed) if asked.agents else read_trace(asked.trace)
    total = sum(len(blocks) for blocks in trace.blocks)
    console = Console()
    console.print(f"{machine()}; {trace.name}, {len(trace):,} prompts")
    table = Table("host memory: device", "tier", *POLICIES, "ratio")
    for device, host in HOST_TIERS:
        pages = (pages_of(device), pages_of(host))
        found = [found_in_host_memory(trace, policy, pages) for policy in POLICIES]
        table.add_row(f"{device}", f"{host}", *cells_of(found, total))
    console.print(table)
    table = Table("store", "alone: lru", "adaptive", "ratio", "below a cache: lru", "adaptive", "ratio")
    for capacity in asked.capacity.split(","):
        cells = []
        for find in (found_alone, found_below):
            found = [find(trace, policy, pages_of(float(capacity))) for policy in POLICIES]
            cells += cells_of(found, total)
        table.add_row(capacity, *cells)
    console.print(table)


if __name__ == "__main__":
    main()
