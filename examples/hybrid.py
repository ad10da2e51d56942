"""A hybrid model's memory: pages of attention, pages of a window and states of one model, in one arena.

Run it with `python examples/hybrid.py`; it needs PyTorch and no GPU.
"""

import torch

import kvpool

PAGE, WINDOW = 16, 64


def make_layout() -> kvpool.CacheLayout:
    """Six layers: one attends to all tokens, two to the last 64, three keep a state."""
    kv = [kvpool.Plane("k", "bfloat16", (2, 64)), kvpool.Plane("v", "bfloat16", (2, 64))]
    states = [kvpool.Plane("recurrent", "float32", (4, 32, 32)), kvpool.Plane("conv", "bfloat16", (256, 3))]
    groups = [
        kvpool.Group("full", "full", [5], kv),
        kvpool.Group("window", "window", [1, 3], kv, tokens=WINDOW),
        kvpool.Group("state", "state", [0, 2, 4], states),
    ]
    return kvpool.CacheLayout(groups, page_size=PAGE, model="six layers")


def main() -> None:
    """Serve two requests, one longer than the window, and give everything back."""
    layout = make_layout()
    print(layout)
    arena = kvpool.CacheArena(layout, 64 << 20, "cpu", floors={"full": 1})
    print(f"{arena}: {100 * arena.slabs.lost:.2f} % lost to packing")
    for tokens in (40, 200):
        units = layout.request_units(tokens)
        taken = arena.alloc(units)
        assert taken is not None, "short of memory: all groups or none"
        # A unit that had another owner is not zeroed.
        arena.buffer("state", "recurrent", 0)[taken["state"]] = 0
        page, place = divmod(tokens - 1, PAGE)
        arena.buffer("full", "k", 5)[taken["full"][page], place] = torch.ones(2, 64)
        print(f"{tokens} tokens hold {units}, {layout.request_bytes(tokens):,} bytes")
    print({group.name: arena.group_stats(group.name)["slabs"] for group in layout.groups}, "slabs in use")
    arena.clear()
    print(arena.slabs_free, "of", arena.stats()["capacity"], "slabs are anybody's again")


if __name__ == "__main__":
    main()
