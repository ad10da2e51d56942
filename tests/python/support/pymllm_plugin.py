"""A pytest plugin that runs pymllm's own tests over kvpool: `-p pymllm_plugin`."""

from __future__ import annotations

import pymllm_engine

pymllm_engine.need_pymllm()

from kvpool.integrations import pymllm  # noqa: E402 - found once the folder is on the path


def _evictable_leaves(cache: pymllm.RadixCache) -> list[pymllm.TreeNode]:
    """The attributes of the cache that pymllm's tests read."""
    leaves, rest = [], [cache.root_node]
    while rest:
        node = rest.pop()
        rest += node.children.values()
        if not node.children and node.lock_ref == 0 and node != cache.root_node:
            leaves.append(node)
    return leaves


pymllm.RadixCache._collect_evictable_leaves = _evictable_leaves
pymllm.enable()
