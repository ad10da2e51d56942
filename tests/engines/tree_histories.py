"""Histories of `sglang_tree` in a process of their own: prints how many calls were made, as JSON.

    python tree_histories.py PARTS SEEDS STEPS CORE

PARTS are components joined by "+", "each" for one configuration of each, or "all". CORE is SGLang's: "python"
or "compiled". With "kvpool" both caches are over kvpool's, and evict by worth.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from typing import TYPE_CHECKING
from unittest import mock

from sglang.test.kits.unified_radix_cache.config import CONFIGS
from sglang_tree import Events, run_history

from kvpool.integrations.sglang.tree_policy import EVICTION

if TYPE_CHECKING:
    from sglang.test.kits.unified_radix_cache.config import CacheConfig

POLICIES = ("lru", "fifo", "lfu", "priority", "slru", "mru", "filo", "tlru")
"""All policies of SGLang."""


def cores_agree(config: CacheConfig, seed: int, steps: int, events: Events) -> bool:
    """Whether SGLang's two cores do the same: kvpool's does what the one in Python does."""
    try:
        run_history(config, seed, steps, ours="python", core="compiled", events=events)
    except AssertionError:
        return False
    return True


def run(parts: str, seeds: int, steps: int, core: str) -> dict[str, dict[str, int]]:
    """The calls of each configuration, by kind, and the histories in which SGLang's cores differ."""
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
            learns = {EVICTION: "adaptive"} if core == "kvpool" else {}
            varied = dataclasses.replace(
                config,
                eviction_policy="lru" if learns else POLICIES[policy],
                is_eagle=(turn + policy) % 4 == 3,
            )
            events = list(Events)[(turn + policy) % 3]
            try:
                with mock.patch.dict(os.environ, learns):
                    history = run_history(
                        varied, seed, steps, core=core, in_one_call=seed % 3 == 0, events=events
                    )
            except AssertionError:
                if core != "compiled" or cores_agree(varied, seed, steps, events):
                    raise
                made["excused"] = made.get("excused", 0) + 1
                continue
            for kind, count in history.items():
                made[kind] = made.get(kind, 0) + count
    return counts


def main() -> None:
    parts, seeds, steps, core = sys.argv[1:]
    json.dump(run(parts, int(seeds), int(steps), core), sys.stdout)


if __name__ == "__main__":
    main()
