"""Histories of `sglang_tree` in a process of their own: prints how many calls were made, as JSON.

    python tree_histories.py PARTS SEEDS STEPS CORE

PARTS are components joined by "+", "each" for one configuration of each, or "all". CORE is SGLang's: "python"
or "compiled".
"""

from __future__ import annotations

import dataclasses
import json
import sys

from sglang.test.kits.unified_radix_cache.config import CONFIGS
from sglang_tree import Events, run_history

POLICIES = ("lru", "fifo", "lfu", "priority", "slru", "mru", "filo", "tlru")
"""All policies of SGLang."""


def run(parts: str, seeds: int, steps: int, core: str) -> dict[str, dict[str, int]]:
    """The calls of each configuration, by kind."""
    counts: dict[str, dict[str, int]] = {}
    seen = set()
    for config in CONFIGS:
        name = "+".join(part.name for part in config.components)
        if parts not in ("all", "each", name) or (parts == "each" and name in seen):
            continue
        seen.add(name)
        made = counts[config.label] = {}
        for seed in range(seeds):
            turn, policy = divmod(seed, len(POLICIES))
            varied = dataclasses.replace(
                config, eviction_policy=POLICIES[policy], is_eagle=(turn + policy) % 4 == 3
            )
            events = list(Events)[(turn + policy) % 3]
            history = run_history(varied, seed, steps, core=core, in_one_call=seed % 3 == 2, events=events)
            for kind, count in history.items():
                made[kind] = made.get(kind, 0) + count
    return counts


def main() -> None:
    parts, seeds, steps, core = sys.argv[1:]
    json.dump(run(parts, int(seeds), int(steps), core), sys.stdout)


if __name__ == "__main__":
    main()
