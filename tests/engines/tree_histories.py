"""Histories of `sglang_tree` in a process of their own: prints how many calls were made, as JSON.

    python tree_histories.py PARTS SEEDS STEPS

PARTS are components joined by "+", or "all".
"""

from __future__ import annotations

import dataclasses
import json
import sys

from sglang.test.kits.unified_radix_cache.config import CONFIGS
from sglang_tree import run_history

POLICIES = ("lru", "fifo", "lfu", "priority", "slru", "mru", "filo")
"""The policies of SGLang that kvpool's tree core has."""


def main() -> None:
    parts, seeds, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    counts: dict[str, dict[str, int]] = {}
    for config in CONFIGS:
        if parts not in ("all", "+".join(part.name for part in config.components)):
            continue
        made = counts[config.label] = {}
        for seed in range(seeds):
            varied = dataclasses.replace(
                config, eviction_policy=POLICIES[seed % len(POLICIES)], is_eagle=seed % 4 == 3
            )
            for name, count in run_history(varied, seed, steps, in_one_call=seed % 3 == 2).items():
                made[name] = made.get(name, 0) + count
    json.dump(counts, sys.stdout)


if __name__ == "__main__":
    main()
