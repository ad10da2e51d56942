"""pymllm on kvpool: its prefix caches over a tree in Rust, and the names that pymllm finds them under.

`enable()` puts kvpool's pools and caches in the place of pymllm's, in this process. A server starts its
scheduler in another process, which runs the main module again: start it with
`python -m kvpool.integrations.pymllm` and the arguments of `pymllm.server.launch`, or call `enable()` at the
top of your own main module.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pymllm.mem_cache import base_prefix_cache as base
from pymllm.mem_cache import chunk_cache

import kvpool
from kvpool import TokenToKVPoolAllocator
from kvpool._kvpool import SlotTree
from kvpool.integrations.seams import EngineMismatchError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["TESTED", "ChunkCache", "RadixCache", "TreeNode", "disable", "enable", "version"]

TESTED = ("2.0.2", "2.0.2b0")
"""Versions of pymllm that the tests ran with."""

_logger = logging.getLogger("kvpool")


class TreeNode:
    """A node of a `RadixCache`. Two objects are equal if they stand for the same node.

    Attributes:
        id: The name of the node, which no other node of its cache ever has.
    """

    __slots__ = ("_tree", "id")

    def __init__(self, tree: SlotTree, node: int) -> None:
        self._tree = tree
        self.id: int = node

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TreeNode) and (self._tree, self.id) == (other._tree, other.id)

    def __hash__(self) -> int:
        return hash(self.id)

    def __repr__(self) -> str:
        return f"TreeNode(id={self.id})"

    @property
    def evicted(self) -> bool:
        """Whether the node was evicted."""
        try:
            self._tree.node(self.id)
        except kvpool.StaleError:
            return True
        return False

    @property
    def lock_ref(self) -> int:
        """Locks of the node and of all nodes behind it."""
        return self._tree.node(self.id).locks

    swa_lock_ref = lock_ref

    @property
    def parent(self) -> TreeNode | None:
        """The node before this one; `None` for the root."""
        parent = self._tree.node(self.id).parent
        return None if parent is None else TreeNode(self._tree, parent)

    @property
    def children(self) -> dict[int, TreeNode]:
        """The nodes behind this one, by `id`."""
        return {child: TreeNode(self._tree, child) for child in self._tree.node(self.id).children}

    @property
    def key(self) -> Any:  # noqa: ANN401 - a class of pymllm
        """The tokens of the node alone, as a `RadixKey` without an `extra_key`."""
        return base.RadixKey(self._tree.node(self.id).tokens)

    @property
    def value(self) -> torch.Tensor:
        """The slots of these tokens, int64 in host memory."""
        return torch.tensor(self._tree.node(self.id).slots, dtype=torch.int64)


class RadixCache(base.BasePrefixCache):  # type: ignore[misc] # without types
    """`pymllm.mem_cache.RadixCache` and `MambaRadixCache`, over a tree that owns its slots.

    Prompts and answers are found by their tokens, in whole pages, and evicted least recently used
    first, after what no look-up finds.
    Slots belong to the tree from `insert` to `evict`.

    Args:
        page_size: Tokens that are found together.
        sliding_window_size: Accepted; everything is kept, as windows have the slots of full attention.
        token_to_kv_pool_allocator: kvpool's allocator; `None` if slots are plain numbers.
        mamba_pool: Accepted; the runner ties states to the ids of nodes itself.
        on_node_evict: Called with the id of each node that ceased to exist, after its slots are free.
    """

    def __init__(
        self,
        page_size: int = 1,
        sliding_window_size: int | None = None,
        token_to_kv_pool_allocator: TokenToKVPoolAllocator | None = None,
        on_node_evict: Callable[[int], None] | None = None,
        *,
        mamba_pool: object = None,
    ) -> None:
        self._tree = SlotTree(token_to_kv_pool_allocator, page_size=page_size)
        self.page_size = page_size
        self.sliding_window_size = sliding_window_size
        self.pool = token_to_kv_pool_allocator
        self.mamba_pool = mamba_pool
        self.on_node_evict = on_node_evict
        self.device: torch.device = torch.device("cpu" if self.pool is None else self.pool.device)

    @property
    def root_node(self) -> TreeNode:
        """The node at the end of no tokens."""
        return TreeNode(self._tree, self._tree.root)

    @property
    def supports_swa(self) -> bool:
        """Whether a sliding window was given."""
        return self.sliding_window_size is not None

    def match_prefix(self, key: Any) -> Any:  # noqa: ANN401 - classes of pymllm
        """Find the longest cached prefix of a `RadixKey`: a `MatchResult` with int32 `indices`."""
        tree = self._tree
        found = tree.match(key.token_ids, namespace=key.extra_key)
        return base.MatchResult(tree.slots(found.node), TreeNode(tree, found.node), found.length)

    def insert(
        self,
        key: Any,  # noqa: ANN401 - a class of pymllm
        value: torch.Tensor | None = None,
        prev_prefix_len: int = 0,  # noqa: ARG002 - nothing is freed here, protected or not
        swa_evicted_seqlen: int = 0,  # noqa: ARG002 - slots that are free already end what is inserted
        mamba_value: None = None,
    ) -> Any:  # noqa: ANN401 - a class of pymllm
        """Add a `RadixKey` with its slots. The caller frees its own of the first `prefix_len` tokens."""
        if mamba_value is not None:
            raise TypeError(
                "mamba_value is given; kvpool keeps no states in the tree, the runner does by node"
            )
        tree = self._tree
        done = tree.insert(key.token_ids, key.token_ids if value is None else value, namespace=key.extra_key)
        self._report(done.removed_nodes)
        return base.InsertResult(done.cached, TreeNode(tree, done.node))

    def evict(self, num_tokens: int, swa_num_tokens: int = 0) -> Any:  # noqa: ANN401 - a class of pymllm
        """Evict whole nodes until that many slots are free, or nothing is evictable: an `EvictResult`."""
        done = self._tree.evict(max(num_tokens, swa_num_tokens))
        self._report(done.removed_nodes)
        return base.EvictResult(full_evicted=done.tokens, swa_evicted=done.tokens)

    def reset(self) -> None:
        """Drop all tokens, locked or not, and free their slots."""
        self._report(self._tree.clear().removed_nodes)

    def _report(self, removed: list[int]) -> None:
        if self.on_node_evict is not None:
            for node in removed:
                self.on_node_evict(node)

    def inc_lock_ref(self, node: TreeNode | None) -> None:
        """Keep a node, and those before it, from being evicted."""
        if node is not None:
            self._tree.lock(node.id)

    def dec_lock_ref(
        self,
        node: TreeNode | None,
        swa_boundary_id: None = None,  # noqa: ARG002 - what `inc_lock_ref` returned
        **_: object,
    ) -> None:
        """Undo one `inc_lock_ref`."""
        if node is not None:
            self._tree.unlock(node.id)

    def evictable_size(self) -> int:
        """Return the number of cached tokens that no lock keeps."""
        return self._tree.evictable_size()

    def protected_size(self) -> int:
        """Return the number of cached tokens that locks keep."""
        return self._tree.locked_size()

    def total_size(self) -> int:
        """Return the number of cached tokens."""
        return self._tree.cached_size()

    def swa_evictable_size(self) -> int:
        """Return `evictable_size()` with a sliding window, otherwise 0."""
        return self.evictable_size() if self.supports_swa else 0

    def swa_protected_size(self) -> int:
        """Return `protected_size()` with a sliding window, otherwise 0."""
        return self.protected_size() if self.supports_swa else 0


class ChunkCache(chunk_cache.ChunkCache):  # type: ignore[misc] # without types
    """`pymllm.mem_cache.ChunkCache`, which keeps nothing: it makes no tensor for each request."""

    def __init__(
        self,
        token_to_kv_pool_allocator: TokenToKVPoolAllocator | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(token_to_kv_pool_allocator, torch.device(device))
        self._nothing = torch.empty(0, dtype=torch.int64, device=self.device)

    def match_prefix(self, key: Any) -> Any:  # noqa: ANN401, ARG002 - classes of pymllm
        """Find nothing."""
        return base.MatchResult(self._nothing)


_SEAMS: dict[str, dict[str, Any]] = {
    "pymllm.mem_cache.radix_cache": {"RadixCache": RadixCache},
    "pymllm.mem_cache.mamba_radix_cache": {"MambaRadixCache": RadixCache},
    "pymllm.mem_cache.chunk_cache": {"ChunkCache": ChunkCache},
    "pymllm.mem_cache.memory_pool": {
        name: getattr(kvpool, name)
        for name in (
            "GDNPool",
            "KVPool",
            "ReqToTokenPool",
            "TokenToKVPoolAllocator",
            "make_full_attention_net_mem_pool",
            "make_req_to_token_pool",
        )
    },
}
"""The replacements, by module and name."""

_replaced: list[tuple[object, str, object]] = []
"""Module, name and object before, of each replacement."""


def version() -> str:
    """Return the version of pymllm, which may be installed or a folder on the path."""
    try:
        return importlib.metadata.version("pymllm")
    except importlib.metadata.PackageNotFoundError:
        note = Path(inspect.getfile(base)).parents[1] / "nightly.ini"
        return note.read_text(encoding="utf-8").strip() if note.is_file() else "unknown"


def _parameters(thing: Any) -> list[str]:  # noqa: ANN401 - a class or a function
    return list(inspect.signature(thing).parameters)


def _originals() -> list[tuple[str, Any, Any]]:
    """Return the name, the object and the replacement of each seam.

    Raises:
        EngineMismatchError: If a seam is missing, or takes other arguments than its replacement.
    """
    found = []
    for module_name, names in _SEAMS.items():
        module = importlib.import_module(module_name)
        for name, ours in names.items():
            theirs = getattr(module, name, None)
            if theirs is None:
                raise EngineMismatchError(
                    f"pymllm {version()} has no {module_name}.{name}, which kvpool looked for; "
                    f"tested are {', '.join(TESTED)}"
                )
            unknown = [each for each in _parameters(theirs) if each not in _parameters(ours)]
            if unknown:
                raise EngineMismatchError(
                    f"{module_name}.{name} of pymllm {version()} takes {', '.join(unknown)}, which kvpool's "
                    f"{ours.__name__} does not take; tested are {', '.join(TESTED)}"
                )
            found.append((name, theirs, ours))
    return found


def enable() -> None:
    """Replace pymllm's pools and prefix caches by kvpool's, for objects that this process makes later.

    A second call does nothing. For a version of pymllm that was not tested, the call warns.

    Raises:
        EngineMismatchError: If pymllm lacks a name that is to be replaced, or its arguments have changed.
            Nothing is replaced then.
    """
    if _replaced:
        return
    originals = _originals()
    if version() not in TESTED:
        _logger.warning("pymllm %s was not tested with kvpool; tested are %s", version(), ", ".join(TESTED))
    modules = [module for name, module in sys.modules.items() if name.partition(".")[0] == "pymllm"]
    for name, theirs, ours in originals:
        for module in modules:
            if vars(module).get(name) is theirs:
                _replaced.append((module, name, theirs))
                setattr(module, name, ours)
    _logger.info("pymllm %s uses kvpool: %s", version(), ", ".join(name for name, *_ in originals))


def disable() -> None:
    """Undo `enable()`, for objects that are made later."""
    while _replaced:
        module, name, theirs = _replaced.pop()
        setattr(module, name, theirs)


if __name__ in {"__main__", "__mp_main__"}:
    # Also in the processes that a server starts, which run its main module under the second name.
    enable()

if __name__ == "__main__":
    importlib.import_module("pymllm.server.launch").main()
