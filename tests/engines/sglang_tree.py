"""SGLang's prefix cache over kvpool's tree core and over its own, side by side.

`Pair` makes the same calls of two caches of SGLang's test kit, which differ in their tree core alone, and
compares everything that can be seen: results, what was freed, and every node with its values, locks and place
in the lists of what is evicted.
"""

from __future__ import annotations

import dataclasses
import random
from array import array
from enum import Enum
from functools import partial
from hashlib import sha256
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from sglang.srt.environ import envs
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.cpp_utils import native_hash
from sglang.srt.mem_cache.events import KvEventLoraNames
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.tree_core_registry import _TREE_CORE_REGISTRY
from sglang.test.kits.unified_radix_cache import fixtures
from sglang.test.kits.unified_radix_cache.unified_tree_core_inspection_interface import (
    UnifiedTreeCoreInspectionInterface,
)

from kvpool.integrations.sglang.radix_cache import KvUnifiedRadixCache
from kvpool.integrations.sglang.tree_core import KvTreeCore

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sglang.test.kits.unified_radix_cache.config import CacheConfig

FULL, SWA, MAMBA = ComponentType.FULL, ComponentType.SWA, ComponentType.MAMBA


class KvTreeCoreInspector(KvTreeCore, UnifiedTreeCoreInspectionInterface):  # type: ignore[misc]
    """kvpool's tree core with what SGLang's test kit wants to see."""

    def contains_node(self, node_id: int) -> bool:
        return self._tree.contains(node_id)

    def get_parent_node_id(self, node_id: int) -> int | None:
        return self._tree.info(node_id).parent

    def get_child_node_ids(self, node_id: int) -> list[int]:
        return self._tree.children(node_id)

    def get_node_key_length(self, node_id: int) -> int:
        return len(self._tree.info(node_id).tokens)

    def get_node_token_ids(self, node_id: int) -> list[int]:
        return self._tree.info(node_id).tokens

    def is_node_key_bigram(self, node_id: int) -> bool:
        self._expect(node_id)
        return self.is_eagle

    def get_component_host_value(self, node_id: int, component_type: ComponentType) -> None:
        self._expect(node_id)

    def get_component_device_lock_ref(self, node_id: int, component_type: ComponentType) -> int:
        return self._tree.info(node_id).locks[component_type]

    def get_component_host_lock_ref(self, node_id: int, component_type: ComponentType) -> int:
        self._expect(node_id)
        return 0

    def get_node_hit_count(self, node_id: int) -> int:
        return self._tree.info(node_id).hits

    def get_write_through_pending_id(self, node_id: int) -> None:
        self._expect(node_id)

    def is_external_cache_stored(self, node_id: int) -> bool:
        self._expect(node_id)
        return False

    def is_node_in_device_lru(self, node_id: int, component_type: ComponentType) -> bool:
        return node_id in self.get_component_device_lru_node_ids(component_type)

    def is_node_in_host_lru(self, node_id: int, component_type: ComponentType) -> bool:
        self._expect(node_id)
        return False

    def get_component_device_lru_node_ids(self, component_type: ComponentType) -> list[int]:
        if component_type is FULL or component_type not in self._parts:
            return []
        return self._tree.listed(component_type)

    def is_device_evictable_leaf(self, node_id: int) -> bool:
        return self._tree.contains(node_id) and self._tree.info(node_id).is_leaf

    def is_device_leaf(self, node_id: int) -> bool:
        return self._tree.info(node_id).is_leaf

    def is_host_evictable_leaf(self, node_id: int) -> bool:
        return False

    def get_all_node_ids(self) -> list[int]:
        return self._tree.nodes()

    def update_duplicate_tracking(self, node_id: int) -> None:
        self._expect(node_id)

    def finalize_component_match_result(self, component_type: ComponentType, result: Any, *_: Any) -> Any:
        raise NotImplementedError

    def evict_component(self, node_id: int, component_type: ComponentType, target: Any) -> Any:
        raise NotImplementedError

    def advance_insert_walk_once(self) -> None:
        raise NotImplementedError

    build_backup_node_ids = cleanup_tombstone_ancestors = validate_cascade_evict = advance_insert_walk_once
    insert_node_into_host_lru = remove_node_from_device_lru = set_component_device_lock_ref = (
        advance_insert_walk_once
    )
    set_component_device_value_raw = set_component_evictable_size = set_component_host_value_raw = (
        advance_insert_walk_once
    )
    set_component_protected_size = set_node_hash_values = advance_insert_walk_once


def _make_compiled(params: CacheInitParams, _components: object) -> Any:
    """SGLang's compiled core. Its nodes cannot be looked at: what shows them is not in the package."""
    from sglang.srt.mem_cache.rust_tree_core.adapter import RustUnifiedTreeCore

    made: Any = type("CompiledTreeCore", (RustUnifiedTreeCore, UnifiedTreeCoreInspectionInterface), {})
    made.__abstractmethods__ = frozenset()
    return made(params)


def build(config: CacheConfig, backend: str, **options: Any) -> Any:
    """A cache of the kit with a tree core: "python" and "compiled" are SGLang's, and "kvpool" is the other.

    Returns the cache, its allocator, and the table of requests.
    """
    factories = {
        "kvpool": lambda params, _components: KvTreeCoreInspector(params),
        "compiled": _make_compiled,
    }
    # The kit leaves the settings of policies out.
    page = config.page_size
    settings = {
        "slru": {"protected_threshold": 3},
        "tlru": {"threshold": 4 * page, "next_prompt_estimate": page},
    }
    make_params = partial(CacheInitParams, eviction_policy_config=settings.get(config.eviction_policy))
    with (
        mock.patch.dict(_TREE_CORE_REGISTRY, factories),
        mock.patch.object(fixtures, "CacheInitParams", make_params),
    ):
        return fixtures.build_fixture(config, tree_core_backend=backend, **options)


class PageHashes:
    """Hashes of pages, each with those before: SGLang builds them with a C++ compiler at first use."""

    @staticmethod
    def get_hash(  # noqa: PLR0913, PLR0917  # as there
        raw: array[int], count: int, width: int, is_bigram: bool, prior: bytes | None, page_size: int
    ) -> list[str]:
        assert is_bigram == (width == 2)
        hashes, digest = [], prior or b""
        for begin in range(0, count, page_size):
            units = range(begin, min(begin + page_size, count))
            words = array("I", (raw[at + behind] for at in units for behind in range(width)))
            digest = sha256(digest + words.tobytes()).digest()
            hashes.append(digest.hex())
        return hashes


class Events(Enum):
    """The KV events that a cache notes."""

    NONE = 0
    SGLANG = 1
    DYNAMO = 2


def _options_of(events: Events) -> dict[str, Any]:
    """Options of `build` for events, in which the namespace "a" is an adapter with a name."""
    names = KvEventLoraNames()
    names.register(SimpleNamespace(lora_id="1", extra_key="a"), "adapter")
    return {
        "enable_kv_cache_events": True,
        "dynamo_kv_event_format": events is Events.DYNAMO,
        "kv_event_lora_names": names,
    }


class Tree:
    """One cache and everything around it."""

    def __init__(
        self, config: CacheConfig, backend: str, *, in_one_call: bool = False, **options: Any
    ) -> None:
        # Both number their boundaries and requests from the same number on.
        self.config = config
        self.cache, self.allocator, self.rows = build(config, backend, **options)
        if in_one_call:
            self.cache.__class__ = KvUnifiedRadixCache
        self.core = self.cache.tree_core
        self.locks: list[Any] = []
        self.freed: list[Any] = []
        names = ("free", "free_segment", "free_full_segment", "free_swa_segment", "free_swa")
        self._watch(self.allocator, *names)
        for part in ("full_attn_allocator", "swa_attn_allocator"):
            self._watch(getattr(self.allocator, part, None), *names)

    def _watch(self, owner: Any, *names: str) -> None:
        """Lists what is freed, in order."""
        for name in names:
            method = getattr(owner, name, None)
            if method is None:
                continue

            def watched(
                indices: Any, *args: Any, _name: str = name, _method: Any = method, **options: Any
            ) -> Any:
                self.freed.append((_name, indices.tolist()))
                return _method(indices, *args, **options)

            setattr(owner, name, watched)

    def path(self, node: int) -> tuple[int, ...]:
        """A node by the slots up to its end, which both trees have."""
        return tuple(self.cache.path_device_indices(node).tolist())

    def tokens(self, node: int) -> list[int]:
        tokens = list(self.core.get_node_token_ids(node))
        # SGLang's nodes of pairs have a token more than pairs.
        return tokens[len(tokens) - self.core.get_node_key_length(node) :]

    def aligned(self, key: RadixKey) -> RadixKey:
        """A key as SGLang's cache passes it to calls that cut nothing off."""
        key, _ = key.maybe_to_bigram_view(self.core.is_eagle)
        return key.page_aligned(self.config.page_size)

    def gaps(self, key: RadixKey) -> Any:
        """The tokens of the second to the fourth page that are there without a window."""
        page, key = self.config.page_size, self.aligned(key)
        end = min(4 * page, len(key))
        return self.core.swa_tombstone_ranges(key, page, end) if end > page else None

    def nodes(self) -> dict[Any, Any]:
        """Everything that can be seen of the nodes."""
        core, parts = self.core, self.config.components
        lists = {part: core.get_component_device_lru_node_ids(part) for part in parts}
        places = {part: {node: at for at, node in enumerate(found)} for part, found in lists.items()}
        found: dict[Any, Any] = {}
        for node in core.get_all_node_ids():
            values = {part: core.get_component_device_value(node, part) for part in parts}
            if core.is_root(node):
                continue
            seen = {
                "values": {part: None if value is None else value.tolist() for part, value in values.items()},
                "locks": [core.get_component_device_lock_ref(node, part) for part in parts],
                "hits": core.get_node_hit_count(node),
                "leaf": core.is_device_evictable_leaf(node),
                "length": core.get_node_key_length(node),
                "children": [self.path(child) for child in core.get_child_node_ids(node)],
                "listed": [places[part].get(node) for part in parts],
            }
            name = self.path(node)
            assert name not in found
            found[name] = {"tokens": self.tokens(node), **seen}
        return found

    def values(self) -> list[Any]:
        """All values, for a core whose nodes cannot be looked at."""
        core = self.core
        rows = core.walk_for_kv_canary(unlocked_only=False, swa_resident_only=False)
        resident = core.walk_for_kv_canary(unlocked_only=True, swa_resident_only=True)
        return [
            *(
                sorted(zip(*(each.tolist() for each in _fields(found)), strict=True))
                for found in (rows, resident)
            ),
            sorted(core.all_mamba_values_flatten().tolist()),
        ]

    def sizes(self) -> list[int]:
        core = self.core
        sizes = [core.total_size(), self.allocator.available_size()]
        for part in self.config.components:
            sizes += [core.component_evictable_size(part), core.component_protected_size(part)]
        if self.config.has_mamba:
            sizes.append(self.rows.mamba_allocator.available_size())
        return sizes


@dataclasses.dataclass
class Request:
    """The operations of a request."""

    tokens: list[int]
    extra_key: str | None
    cache_salt: str | None

    def key(self) -> RadixKey:
        return RadixKey(array("q", self.tokens), extra_key=self.extra_key, cache_salt=self.cache_salt)


class Pair:
    """Two caches that get the same calls.

    Args:
        config: What both are made for.
        seed: Decides the calls.
        ours: The tree core of the first one: "python" compares SGLang's cores with each other.
        core: The tree core of SGLang: "python" or "compiled"; "kvpool" compares kvpool's with itself.
        in_one_call: Whether kvpool's evicts in one call. By worth that evicts the end of a leaf, where
            SGLang's loop evicts all of it.
        events: What both note.
    """

    def __init__(  # noqa: PLR0913  # what varies
        self,
        config: CacheConfig,
        seed: int,
        *,
        ours: str = "kvpool",
        core: str = "python",
        in_one_call: bool = False,
        events: Events = Events.NONE,
    ) -> None:
        self.config, self.in_one_call, self.events = config, in_one_call, events
        self.core = core
        self.random = random.Random(seed)  # noqa: S311
        options = {} if events is Events.NONE else _options_of(events)
        self.ours = Tree(config, ours, in_one_call=in_one_call, **options)
        both = in_one_call and core == "kvpool"
        self.theirs = Tree(config, core, in_one_call=both, **options)
        assert isinstance(self.ours.core, KvTreeCore) == (ours == "kvpool"), type(self.ours.core)
        self.counts: dict[str, int] = {}

    def call_both(self, call: Callable[[Tree], Any]) -> Any:
        """Makes a call of both, and compares what it returns and what it frees."""
        answers = []
        for tree in (self.ours, self.theirs):
            tree.freed.clear()
            answer = call(tree)
            events = tree.cache.take_events()
            self.counts["events"] = self.counts.get("events", 0) + len(events)
            answers.append((answer, self._comparable(tree.freed), self._comparable_events(events)))
        assert answers[0] == answers[1], f"\nkvpool: {answers[0]}\nSGLang: {answers[1]}"
        return answers[0][0]

    def _comparable(self, freed: list[Any]) -> Any:
        """The freed slots, in order as far as both cores have the same order."""
        if self.core == "compiled":
            # It frees the values of a node in another order.
            return sorted((name, slot) for name, slots in freed for slot in slots)
        if not self.in_one_call:
            return list(freed)
        # One call frees at once what a loop frees leaf by leaf, in the same order.
        by_name: dict[str, list[int]] = {}
        for name, slots in freed:
            by_name.setdefault(name, []).extend(slots)
        return by_name

    def _comparable_events(self, events: list[Any]) -> list[Any]:
        # The compiled core puts other pages into one event.
        return events if self.core != "compiled" else [page for event in events for page in _pages(event)]

    def compare(self) -> None:
        """Compares all that is there."""
        if self.core != "compiled":
            ours, theirs = self.ours.nodes(), self.theirs.nodes()
            for name in [*ours, *theirs]:
                assert ours.get(name) == theirs.get(name), (
                    f"\n{name}\nkvpool: {ours.get(name)}\nSGLang: {theirs.get(name)}"
                )
        assert self.ours.values() == self.theirs.values()
        assert self.ours.sizes() == self.theirs.sizes()
        if isinstance(self.ours.core, KvTreeCore):
            assert self.ours.core.stats()["second_owners"] == 0
        self.ours.cache.sanity_check()
        self.theirs.cache.sanity_check()

    def prompt(self) -> Request:
        """A prompt that shares its beginning with others."""
        pick, page = self.random, self.config.page_size
        unit = max(1, page // 2)
        tokens: list[int] = []
        for _ in range(pick.randint(1, 6)):
            tokens += [pick.randint(0, 1)] * (unit * pick.randint(1, 3))
        namespace = pick.choice([None, None, None, "a", "b"])
        salt = pick.choice([None, None, None, "s"])
        return Request(tokens, namespace, salt)

    def step(self) -> None:
        """One call of both."""
        kinds: list[tuple[int, Callable[[], None]]] = [
            (8, self.insert),
            (3, self.match),
            (3, self.lock),
            (3, self.unlock),
            (2, self.evict),
            (1, self.evict_for_alloc),
            (1, self.look),
            (1, self.drop),
        ]
        if self.config.has_swa:
            kinds.append((1, self.release_window))
        if self.config.components == (FULL,):
            kinds.append((3, self.serve))
        weights, calls = zip(*kinds, strict=True)
        call = self.random.choices(calls, weights)[0]
        self.counts[call.__name__] = self.counts.get(call.__name__, 0) + 1
        call()

    def match(self) -> None:
        request = self.prompt()
        self.call_both(lambda tree: self._match(tree, request))

    @staticmethod
    def _match(tree: Tree, request: Request) -> Any:
        found = tree.cache.match_prefix(MatchPrefixParams(key=request.key()))
        nodes = (found.last_device_node, found.last_host_node, found.best_match_node)
        visited = found.last_visited_node_id
        return (
            found._replace(
                last_device_node=0, last_host_node=0, best_match_node=0, last_visited_node_id=None
            ),
            [tree.path(node) for node in nodes],
            None if visited is None else tree.path(visited),
            tree.cache.path_device_indices(found.last_device_node).tolist(),
        )

    def _alloc(self, tree: Tree, count: int) -> Any:
        if count == 0:
            return torch.empty(0, dtype=torch.int64)
        if not (self.config.has_swa and self.config.page_size > 1):
            return tree.allocator.alloc(count)
        page = self.config.page_size
        pages = -(-count // page) * page
        full, swa = tree.allocator.full_attn_allocator, tree.allocator.swa_attn_allocator
        if min(full.available_size(), swa.available_size()) < pages:
            return None
        slots, windows = full.alloc(pages), swa.alloc(pages)
        tree.allocator.full_to_swa_index_mapping[slots] = windows
        return slots[:count]

    def insert(self) -> None:  # noqa: C901  # one request from its match to its end
        """A request matches, computes the rest, and inserts it, as the scheduler does."""
        request, pick = self.prompt(), self.random
        page = self.config.page_size
        shared = pick.random() < 0.8
        priority, inserted, tracked = pick.randint(0, 3), pick.choice([0, 0, page]), pick.random() < 0.5
        session = pick.choice([None, "s"])
        freed_pages = pick.choice([0, 0, 1, 2, 3])
        size = len(request.tokens) // page * page
        if size == 0:
            return

        def run(tree: Tree) -> Any:
            found = tree.cache.match_prefix(MatchPrefixParams(key=request.key()))
            length = found.device_prefix_len if shared else 0
            node = found.last_device_node
            receipt = tree.cache.inc_lock_ref(node).to_dec_params() if length else None
            prefix = tree.cache.path_device_indices(node)[:length]
            # The extra token of a pair is computed, too.
            rest = self._alloc(tree, len(request.tokens) // page * page - length)
            state = tree.rows.mamba_allocator.alloc(1) if self.config.has_mamba else None
            if rest is None or (self.config.has_mamba and state is None):
                if rest is not None and len(rest):
                    tree.allocator.free(rest)
                if state is not None:
                    tree.rows.mamba_allocator.free(state)
                if receipt is not None:
                    tree.cache.dec_lock_ref(node, receipt)
                tree.cache.evict(
                    EvictParams(
                        num_tokens=size, swa_num_tokens=size if self.config.has_swa else 0, mamba_num=2
                    )
                )
                return "short"
            values = torch.cat([prefix, rest])
            params = InsertParams(
                key=RadixKey(
                    array("q", request.tokens[:size]), request.extra_key, cache_salt=request.cache_salt
                ),
                value=values,
                mamba_value=state,
                prev_prefix_len=length,
                inserted_len=inserted,
                priority=priority,
                track_adopted_ranges=tracked,
                session_id=session,
            )
            if self.config.has_swa and freed_pages:
                # Tokens behind the window are freed before the rest is inserted.
                end = min(size - page, length + freed_pages * page)
                if end > length:
                    tree.allocator.free_swa_segment(values[length:end], start_pos=0)
                    params.set_evicted_seqlen(SWA, end)
            result = tree.cache.insert(params)
            # Pairs of tokens are one fewer, so that a page is left over.
            kept = len(tree.cache.path_device_indices(result.last_device_node))
            if len(values) > max(kept, length):
                tree.allocator.free(values[max(kept, length) :])
            if result.mamba_exist and state is not None:
                tree.rows.mamba_allocator.free(state)
            if receipt is not None:
                tree.cache.dec_lock_ref(node, receipt)
            answer = dataclasses.replace(result, last_device_node=None)
            return answer, tree.path(result.last_device_node), values.tolist()

        self.call_both(run)

    def serve(self) -> None:
        """A request is computed in chunks, generates, and ends: each time the cache takes what there is."""
        prompt, pick, page = self.prompt(), self.random, self.config.page_size
        answer = [pick.randint(0, 1) for _ in range(pick.randint(0, 2 * page))]
        chunk, priority = pick.randint(1, len(prompt.tokens)), pick.randint(0, 3)
        tokens = array("q", [*prompt.tokens, *answer])
        # Others may end with the same tokens while this one runs.
        twin = pick.random() < 0.3

        def run(tree: Tree) -> Any:
            found = tree.cache.match_prefix(MatchPrefixParams(key=prompt.key()))
            length, node = found.device_prefix_len, found.last_device_node
            lock = tree.cache.lock(node)
            rest = self._alloc(tree, -(-len(tokens) // page) * page - length)
            if rest is None:
                tree.cache.unlock(lock)
                tree.cache.evict(EvictParams(num_tokens=len(tokens) + page))
                return "short"
            (row,) = tree.rows.alloc_rows(1)
            slots = torch.cat([tree.cache.path_device_indices(node)[:length], rest])
            tree.rows.write((row, slice(0, len(slots))), slots.to(torch.int32))
            request = SimpleNamespace(
                full_untruncated_fill_ids=array("q", prompt.tokens),
                origin_input_ids=array("q", prompt.tokens),
                extra_key=prompt.extra_key,
                cache_salt=prompt.cache_salt,
                priority=priority,
                session_id=None,
                sampling_params=SimpleNamespace(custom_params=None),
                kv_rotation_base=None,
                lock=lock,
                last_node=node,
                finished=lambda: False,
                kv=SimpleNamespace(req_pool_idx=row, cache_protected_len=length, cache_inserted_len=0),
            )
            # A pair of tokens ends with a token more.
            seen = [self._checkpoint(tree, request, max(chunk, length + tree.core.is_eagle))]
            if twin:
                self._insert_all(tree, prompt)
            seen.append(self._checkpoint(tree, request, len(prompt.tokens)))
            request.full_untruncated_fill_ids, request.finished = tokens, lambda: True
            seen.append(self._checkpoint(tree, request, len(tokens)))
            kept = request.kv.cache_protected_len
            if len(slots) > kept:
                tree.allocator.free_segment(
                    tree.rows.req_to_token[row, kept : len(slots)].to(torch.int64), start_pos=kept
                )
            tree.cache.unlock(request.lock)
            tree.rows.free_rows([row])
            return seen, slots.tolist()

        self.call_both(run)

    @staticmethod
    def _checkpoint(tree: Tree, request: Any, up_to: int) -> Any:
        tree.cache.checkpoint_into_tree(request, up_to=up_to)
        kv = request.kv
        assert request.last_node == request.lock.node
        return (
            kv.cache_protected_len,
            kv.cache_inserted_len,
            tree.path(request.last_node),
            tree.rows.req_to_token[kv.req_pool_idx, :up_to].tolist(),
        )

    def _insert_all(self, tree: Tree, request: Request) -> None:
        """Another request inserts the same tokens with slots of its own."""
        size = len(request.tokens) // self.config.page_size * self.config.page_size
        slots = self._alloc(tree, size) if size else None
        if slots is None:
            return
        key = RadixKey(array("q", request.tokens[:size]), request.extra_key, cache_salt=request.cache_salt)
        result = tree.cache.insert(InsertParams(key=key, value=slots))
        kept = len(tree.cache.path_device_indices(result.last_device_node))
        if size > kept:
            tree.allocator.free(slots[kept:])

    def lock(self) -> None:
        request = self.prompt()
        skip = self.random.choice([(), (), (MAMBA,)]) if self.config.has_mamba else ()

        def run(tree: Tree) -> Any:
            node = tree.cache.match_prefix(MatchPrefixParams(key=request.key())).last_device_node
            result = tree.cache.inc_lock_ref(node, skip)
            tree.locks.append([node, result.to_dec_params(), False])
            has_boundary = {part: uuid is not None for part, uuid in result.component_lock_uuids.items()}
            return tree.path(node), result.delta, result.skipped_lock_components, has_boundary

        self.call_both(run)

    def unlock(self) -> None:
        if not self.ours.locks:
            return
        at = self.random.randrange(len(self.ours.locks))

        def run(tree: Tree) -> Any:
            node, receipt, window_done = tree.locks.pop(at)
            tree.cache.dec_lock_ref(node, receipt, skip_swa=window_done)
            return tree.path(node)

        self.call_both(run)

    def release_window(self) -> None:
        with_window = [at for at, lock in enumerate(self.ours.locks) if not lock[2]]
        if not with_window:
            return
        at = self.random.choice(with_window)

        def run(tree: Tree) -> Any:
            lock = tree.locks[at]
            tree.cache._apply_eviction_result(tree.core.dec_swa_lock_only(lock[0], lock[1]))
            lock[2] = True
            return tree.path(lock[0])

        self.call_both(run)

    def evict(self) -> None:
        params = self._eviction()
        self.call_both(lambda tree: tree.cache.evict(params))

    def evict_for_alloc(self) -> None:
        params = self._eviction()
        self.call_both(lambda tree: tree.cache.evict_for_alloc(params))

    def drop(self) -> None:
        """The host has no place for the node of a prompt: it is dropped if it is a leaf without locks."""
        request = self.prompt()
        refused: list[tuple[int, ...]] = []

        def run(tree: Tree) -> Any:
            node = tree.cache.match_prefix(MatchPrefixParams(key=request.key())).last_device_node
            name = tree.path(node)
            tree.core.finish_load_back(node)
            assert tree.core.build_storage_backup_spec(node, pass_prefix_keys=True) is None
            # The compiled core panics where the others raise: it is not asked what the first one has refused.
            if refused and self.core == "compiled":
                return name, "stays"
            try:
                result = tree.core.drop_subtree_no_host(node)
            except AssertionError:
                refused.append(name)
                return name, "stays"
            tracker = dict(result.tracker)
            tree.cache._apply_eviction_result(result)
            return name, result.is_dropped, tracker

        self.call_both(run)

    def _eviction(self) -> EvictParams:
        pick, page = self.random, self.config.page_size
        return EvictParams(
            num_tokens=pick.choice([0, 1, page, 4 * page]),
            swa_num_tokens=pick.choice([0, 1, page, 4 * page]) if self.config.has_swa else 0,
            mamba_num=pick.choice([0, 1, 2]) if self.config.has_mamba else 0,
        )

    def look(self) -> None:
        """Calls that change nothing but recency."""
        prompts = [self.prompt() for _ in range(8)]

        def run(tree: Tree) -> Any:
            nodes = [
                tree.cache.match_prefix(MatchPrefixParams(key=prompt.key())).last_device_node
                for prompt in prompts
            ]
            paths = tree.core.collect_path_info(nodes)
            tokens, node, pinned = tree.core.match_full_device_prefix(prompts[0].key())
            rows = tree.core.walk_for_kv_canary(unlocked_only=True, swa_resident_only=True)
            return (
                [tree.path(nodes[at]) for at in tree.core.dfs_weight_order(nodes)],
                [
                    [
                        (info.path_start, info.path_end, info.full_value_len, info.num_children)
                        for info in path
                    ]
                    for path in paths
                ],
                (tokens, tree.path(node), pinned),
                sorted(zip(*(rows_of.tolist() for rows_of in _fields(rows)), strict=True)),
                sorted(tree.core.all_values_flatten().tolist()),
                sorted(tree.core.all_mamba_values_flatten().tolist()),
                [tree.gaps(prompt.key()) for prompt in (prompts if self.config.has_swa else [])],
            )

        self.call_both(run)

    def finish(self) -> None:
        """Releases everything, and sees that all of it is evictable."""
        while self.ours.locks:
            self.unlock()
        self.compare()
        everything = EvictParams(num_tokens=1 << 30)
        self.call_both(lambda tree: tree.cache.evict(everything))
        self.compare()
        assert self.ours.core.total_size() == (0, 0)
        assert (self.counts["events"] > 0) == (self.events is not Events.NONE)
        self.call_both(lambda tree: tree.cache.reset())
        self.compare()


def _pages(event: Any) -> list[Any]:
    """The content of an event, page by page."""
    kind = type(event).__name__
    if kind != "BlockStored":
        return [(kind, page) for page in getattr(event, "block_hashes", [None])]
    before = [event.parent_block_hash, *event.block_hashes]
    size = event.block_size
    return [
        (kind, page, before[at], event.token_ids[at * size : (at + 1) * size], *_names(event))
        for at, page in enumerate(event.block_hashes)
    ]


def _names(event: Any) -> tuple[Any, ...]:
    return event.medium, event.lora_id, event.lora_name, event.cache_salt, event.session_id


def _fields(rows: Any) -> Sequence[Any]:
    return rows.slot_indices, rows.positions, rows.prev_slot_indices


def run_history(config: CacheConfig, seed: int, steps: int, **options: Any) -> dict[str, int]:
    """`steps` calls of both caches, compared after each. Returns how many of each kind were made."""
    with (
        envs.SGLANG_MAMBA_SSM_DTYPE.override("bfloat16"),
        mock.patch.object(native_hash, "_load_native_hash_module", PageHashes),
    ):
        pair = Pair(config, seed, **options)
        for _ in range(steps):
            pair.step()
            pair.compare()
        pair.finish()
    return pair.counts
