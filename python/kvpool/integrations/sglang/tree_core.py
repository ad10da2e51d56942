"""SGLang's tree of cached prefixes over kvpool's: a tree core for its `UnifiedRadixCache`."""

from __future__ import annotations

import abc
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

import torch
from sglang.srt.mem_cache.base_prefix_cache import (
    DecLockRefResult,
    IncLockRefResult,
    InsertResult,
    MatchResult,
)
from sglang.srt.mem_cache.events import KVCacheEventRecorder
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.cache_action import (
    FreeDeviceKV,
    FreeDeviceKVFullOnly,
    MambaEvictExcessPathStates,
    RecoverSWAWithLockedFull,
    SWARebuild,
)
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.unified_tree_core_interface import (
    BaseEvictionResult,
    DecSwaLockOnlyResult,
    DriveHostEvictionResult,
    DropSubtreeNoHostResult,
    EvictDeviceLeafResult,
    EvictDeviceNextNodeResult,
    InsertStepResult,
    RadixCacheWalkResult,
    TreePathNodeInfo,
    UnifiedTreeCoreInterface,
)
from sglang.srt.runtime_context import get_exec, mamba_checkpoint_grid

from kvpool._kvpool import HybridTree
from kvpool.errors import ConfigError, IndexOwnershipError
from kvpool.integrations.sglang.tree_events import TreeEvents
from kvpool.integrations.sglang.tree_owners import TreeOwners
from kvpool.integrations.sglang.tree_policy import eviction_policy
from kvpool.integrations.sglang.waiting import WaitingRequests

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import TypeAlias

    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.base_prefix_cache import (
        DecLockRefParams,
        InsertParams,
        MatchPrefixParams,
    )
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams

    from kvpool._kvpool import HybridFrees, HybridStep
    from kvpool.typing import HybridAction, Namespace

    Action: TypeAlias = (
        FreeDeviceKV
        | FreeDeviceKVFullOnly
        | MambaEvictExcessPathStates
        | RecoverSWAWithLockedFull
        | SWARebuild
    )

__all__ = ["DELEGATED", "PARTS", "KvTreeCore"]

_FULL, _SWA, _MAMBA = ComponentType.FULL, ComponentType.SWA, ComponentType.MAMBA
PARTS = (_FULL, _SWA, _MAMBA)
"""The components of a cache that kvpool has."""

DELEGATED = (
    "backfill_missing_hash_values",
    "build_backup_spec",
    "build_external_linker_offload_transfers",
    "build_hicache_transfers",
    "build_load_back_spec",
    "commit_backup",
    "commit_hicache_transfers",
    "commit_load_back",
    "dec_host_lock_ref",
    "demote",
    "finish_external_linker_offload",
    "finish_mamba_state_eviction",
    "finish_swa_state_eviction",
    "finish_write_through",
    "inc_host_lock_ref",
    "insert_host",
    "mark_external_cache_stored_path",
    "mark_external_linker_offload_pending",
    "mark_write_through_pending",
    "node_by_id",
    "prefetch_anchor_info",
    "set_hicache_enabled",
    "set_host_memory_buffer_only",
    "snapshot_buffer_backup",
    "validate_buffer_backup",
)
"""The methods that SGLang calls only with a host tier, storage, a linker, or sessions."""


@dataclass(slots=True)
class _Insertion:
    """An insertion in progress.

    Attributes:
        tokens: The tokens; only those from `start` to `end` are inserted.
        slots: Their slots.
        start: The position of the first inserted token.
        end: One past the position of the last inserted token.
        namespace: The namespace of the tokens.
        key: SGLang's key of the tokens, for KV events.
        session: The session of the tokens, for KV events.
        tracks: Whether to return the slots that the tree takes over.
    """

    tokens: Sequence[int]
    slots: torch.Tensor
    start: int
    end: int
    namespace: Namespace | tuple[Namespace, ...]
    key: RadixKey
    session: str | None
    tracks: bool


def _refuse(name: str) -> Callable[..., NoReturn]:
    def refuse(*_args: object, **_options: object) -> NoReturn:
        raise NotImplementedError(
            f"{name} belongs to a host tier, storage, a linker or sessions, which kvpool's tree core does "
            "not have; start SGLang with SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND=rust to use them"
        )

    refuse.__name__ = name
    refuse.__doc__ = "Raise `NotImplementedError`: see `make_tree_core`."
    return refuse


def _whole(key: RadixKey) -> tuple[Sequence[int], int, int, Namespace | tuple[Namespace, ...]]:
    """Return the tokens, the start and the end of those in whole pages, and the namespace."""
    tokens, limit = key.token_ids, key.limit
    end = len(tokens)
    if limit is not None and limit < end:
        end = limit
    namespace = key.extra_key if key.cache_salt is None else (key.extra_key, key.cache_salt)
    if not key.is_bigram:
        return tokens, 0, end, namespace
    # Pairs of tokens are equal as far as the tokens are, the first one given: they are the tokens behind the
    # first one, in a namespace of its own.
    first = tokens[0] if end else None
    return tokens, min(1, end), end, (key.extra_key, key.cache_salt, first)


class KvTreeCore(UnifiedTreeCoreInterface):  # type: ignore[misc]  # SGLang's types are not installed
    """SGLang's tree core over `kvpool.HybridTree`.

    Args:
        params: The parameters that SGLang makes the cache of.

    Attributes:
        evicts_by_worth: Whether the tree is told of sessions and of waiting requests.
        waiting: The waiting requests.
        session: The name of the session whose tokens are inserted from now on; `None` for none.
    """

    def __init__(self, params: CacheInitParams) -> None:
        parts = tuple(params.tree_components)
        policy = eviction_policy(params)
        if policy is None:
            raise ConfigError(f"the eviction policy {params.eviction_policy} is SGLang's alone")
        states = -1
        if _MAMBA in parts:
            states = get_exec().mamba.mamba_max_states_per_path
        self.page_size: int = params.page_size
        self.is_eagle: bool = params.is_eagle and _MAMBA not in parts
        self.enable_hicache = False
        self.enable_storage = False
        self.enable_external_cache_linker = False
        self.write_through_threshold = 256
        self.is_write_back = False
        self.has_swa_host_pool = False
        self.is_host_memory_buffer_only = False
        self.kv_events: KVCacheEventRecorder = KVCacheEventRecorder(
            enabled=params.enable_kv_cache_events,
            page_size=params.page_size,
            dynamo_format=params.dynamo_kv_event_format,
            lora_names=params.kv_event_lora_names,
        )
        allocator = params.token_to_kv_pool_allocator
        self.device = torch.device("cpu") if allocator is None else allocator.device
        self._is_on_host = torch.device(self.device).type == "cpu"
        self._parts = parts
        self._has_swa = _SWA in parts
        self.evicts_by_worth = policy.policy == "adaptive"
        self.session: str | int | None = None
        self._tree = HybridTree(
            params.page_size,
            policy=policy.policy,
            protected_uses=policy.protected_uses,
            tail=policy.tail,
            capacity=policy.capacity,
            window=params.swa_retain_window if self._has_swa else None,
            window_gates=params.swa_gates_prefix_match,
            state_grid=mamba_checkpoint_grid(params.page_size) if _MAMBA in parts else None,
            states_per_path=states if states >= 0 else None,
        )
        self.waiting = WaitingRequests(self._tree, self._find_waiting)
        self._events = TreeEvents(self.kv_events, self._tree, params.page_size)
        self._owners = TreeOwners(self._tree, allocator)
        self._matches_all = os.environ.get("KVPOOL_SGLANG_FAST_MATCH") == "1"
        self._empty = self._to_device(self._tree.slots(self._tree.root(), self._tree.root()))
        self._insertion: _Insertion | None = None

    def _to_device(self, values: torch.Tensor) -> torch.Tensor:
        return values if self._is_on_host else values.to(self.device)

    # The tree.

    def reset(self) -> None:
        """Drop all tokens."""
        self._insertion = None
        self._tree.reset()

    def root_node_handle(self, extra_key: str | None = None) -> int:
        """Return the node before every prompt: one for all namespaces."""
        return self._tree.root()

    def is_root(self, node_id: int) -> bool:
        """Return whether a node is the one before every prompt."""
        return node_id == self._tree.root()

    @property
    def empty_match_result(self) -> MatchResult:
        """Return the result for a prompt without a cached prefix."""
        root = self._tree.root()
        return MatchResult(0, root, root, root, cache_actions=[])

    def supports_fast_match_prefix(self) -> bool:
        """Return whether the scheduler matches all waiting requests at each attempt to admit one.

        Both of SGLang's cores return false, and with true other batches are made: that is what
        `KVPOOL_SGLANG_FAST_MATCH=1` asks for.
        """
        return self._matches_all

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """Find the longest prefix that all components accept, and refresh it."""
        key = params.key
        if self.is_eagle:
            key, _ = key.maybe_to_bigram_view(True)
        tokens, start, end, namespace = _whole(key)
        if end - start < self.page_size:
            return self.empty_match_result
        found = self._tree.match(tokens, start, end, namespace)
        node = found.node
        return MatchResult(
            device_prefix_len=found.length,
            last_device_node=node,
            last_host_node=node,
            best_match_node=node,
            swa_branching_seqlen=found.window_branch,
            mamba_branching_seqlen=found.state_branch,
            full_kv_hit_length=found.full_length,
            cache_actions=[],
            last_visited_node_id=found.visited,
        )

    def _find_waiting(self, req: Req) -> int:
        """Find what a waiting request can use of the cache, refresh it, and return the node at its end."""
        tokens = req.origin_input_ids + req.output_ids if req.output_ids else req.origin_input_ids
        key = RadixKey(tokens, extra_key=req.extra_key, cache_salt=req.cache_salt)
        return self._tree.match(*_whole(key.maybe_to_bigram_view(self.is_eagle)[0])).node

    def match_full_device_prefix(self, key: RadixKey) -> tuple[int, int, int]:
        """Return the tokens with slots for full attention, the deepest node with some, and its end."""
        key, _ = key.maybe_to_bigram_view(self.is_eagle)
        tokens, start, end, namespace = _whole(key)
        return self._tree.peek(tokens, start, end, namespace)

    def collect_full_device_indices(self, from_node_id: int, until_node_id: int) -> torch.Tensor:
        """Return the slots behind `until_node_id` up to the end of `from_node_id`."""
        if from_node_id == until_node_id:
            return self._empty
        return self._to_device(self._tree.slots(from_node_id, until_node_id))

    def begin_insert(self, params: InsertParams) -> InsertStepResult:
        """Begin to insert tokens, up to the first step that needs an action of the cache."""
        if self._insertion is not None:
            raise RuntimeError("concurrent insert walks")
        self.waiting.may_find_more = True
        key, values = params.key.maybe_to_bigram_view(self.is_eagle, params.value)
        tokens, start, end, namespace = _whole(key)
        if values is None:
            values = torch.tensor(tokens[: end - start], dtype=torch.int64)
        tracks = params.track_adopted_ranges and end - start >= self.page_size
        insertion = _Insertion(tokens, values, start, end, namespace, key, params.session_id, tracks)
        self._insertion = insertion
        freed = params.component_evicted_seqlens
        step = self._tree.insert(
            tokens,
            values,
            start,
            end,
            namespace,
            found=params.prev_prefix_len,
            inserted=params.inserted_len,
            window_freed=freed.get(_SWA, 0) if freed else 0,
            priority=params.priority or 0,
            state=params.mamba_value,
            branch=params.swa_branching_seqlen,
            session=self.session,
        )
        return self._step(step, insertion)

    def insert_plain(  # noqa: PLR0913  # what an insertion varies in
        self,
        tokens: Sequence[int],
        slots: torch.Tensor,
        namespace: Namespace | tuple[Namespace, ...],
        *,
        found: int,
        inserted: int,
        priority: int,
        session: str | int | None = None,
    ) -> tuple[int, int, list[Action]]:
        """Insert as many tokens as there are slots, whole pages, in a cache with full attention alone.

        KV events are not recorded. Return the tokens that were there, the last node, and the actions.
        """
        if self._insertion is not None:
            raise RuntimeError("concurrent insert walks")
        self.waiting.may_find_more = True
        step = self._tree.insert(
            tokens,
            slots,
            0,
            len(slots),
            namespace,
            found=found,
            inserted=inserted,
            priority=priority,
            session=session,
        )
        self._owners.check()
        if step.node is None:
            raise RuntimeError("an insertion with full attention alone takes one step")
        return step.found, step.node, [self._translated(action, slots) for action in step.actions()]

    def end_turn(self, session: str | int, node: int | None, *, pause: str | None, is_last: bool) -> None:
        """End a turn of a session at a node; at `None`, or one that is gone, only what follows counts."""
        if node is None or not self._tree.contains(node):
            node = self._tree.root()
        self._tree.end_turn(session, node, pause=pause, is_last=is_last)

    def resume_insert(self) -> InsertStepResult:
        """Continue an insertion after the cache has done the action of the last step."""
        insertion = self._insertion
        if insertion is None:
            raise RuntimeError("no in-flight insert")
        step = self._tree.advance(
            insertion.tokens, insertion.slots, insertion.start, insertion.end, insertion.namespace
        )
        return self._step(step, insertion)

    def has_ongoing_insert(self) -> bool:
        """Return whether an insertion is in progress."""
        return self._insertion is not None

    def end_insert(self) -> list[Action]:
        """End an insertion, if one is in progress, and return the remaining actions."""
        if self._insertion is None:
            return []
        slots = self._insertion.slots
        actions = [self._translated(action, slots) for action in self._tree.end_insertion()]
        self._insertion = None
        return actions

    def _step(self, step: HybridStep, insertion: _Insertion) -> InsertStepResult:
        slots = insertion.slots
        actions = [self._translated(action, slots) for action in step.actions()]
        if self.kv_events.enabled and step.added is not None:
            node, start, end = step.added
            self._events.record_added(node, start, end, insertion.key, insertion.session)
        self._owners.check()
        if not step.done:
            return InsertStepResult(actions)
        ranges = None
        if insertion.tracks:
            ranges = {part: found for part, found in zip((_FULL, _SWA), step.adopted, strict=True) if found}
        self._insertion = None
        result = InsertResult(
            step.found,
            last_device_node=step.node,
            mamba_exist=step.had_state,
            swa_branch_inserted=step.reached_branch,
            adopted_ranges=ranges,
        )
        return InsertStepResult(actions, result)

    def _translated(self, action: HybridAction, slots: torch.Tensor) -> Action:
        """Return an action of the tree as one of SGLang's cache, with ranges of the inserted slots."""
        if action[0] == "free":
            _, begin, end = action
            return FreeDeviceKV([slots[begin:end]])
        if action[0] == "free_full":
            _, begin, end = action
            return FreeDeviceKVFullOnly([slots[begin:end]])
        if action[0] == "free_old":
            _, old = action
            return FreeDeviceKVFullOnly([self._to_device(old)])
        if action[0] == "rebuild":
            _, node, kept = action
            return SWARebuild(node, self._to_device(kept))
        if action[0] == "recover":
            _, node, kept, begin, end = action
            return RecoverSWAWithLockedFull(node, self._to_device(kept), slots[begin:end])
        _, node = action
        return MambaEvictExcessPathStates(node)

    # Locks.

    def inc_lock_ref(
        self, node_id: int, skip_lock_components: Sequence[ComponentType] = ()
    ) -> IncLockRefResult:
        """Lock a node, and return the handle that releases the lock."""
        newly, boundary = self._tree.lock_node(node_id, skip_lock_components)
        skipped = tuple(skip_lock_components)
        result = IncLockRefResult(
            delta=None if _FULL in skipped else newly, node_id=node_id, skipped_lock_components=skipped
        )
        if self._has_swa and _SWA not in skipped:
            result.component_lock_uuids[_SWA] = boundary
        return result

    def dec_lock_ref(
        self, node_id: int, params: DecLockRefParams, skip_swa: bool = False
    ) -> DecLockRefResult:
        """Release a lock."""
        _expect_anchor(node_id, params)
        skipped = params.skipped_lock_components
        boundary = None
        if self._has_swa and not skip_swa and _SWA not in skipped:
            boundary = params.component_lock_uuids[_SWA]
        try:
            self._tree.unlock_node(node_id, boundary, skipped, window_done=skip_swa)
        except IndexOwnershipError as error:
            raise AssertionError(str(error)) from error
        return DecLockRefResult()

    def dec_swa_lock_only(self, node_id: int, params: DecLockRefParams) -> DecSwaLockOnlyResult:
        """Release the window of a lock early, and its Mamba state with it."""
        _expect_anchor(node_id, params)
        result = DecSwaLockOnlyResult()
        if self._has_swa and not self.is_root(node_id):
            self._release_window(node_id, params, result, with_state=True)
        return result

    def dec_window_lock_only(
        self, node_id: int, component_type: ComponentType, params: DecLockRefParams
    ) -> DecSwaLockOnlyResult:
        """Release the window of a lock early."""
        _expect_anchor(node_id, params)
        result = DecSwaLockOnlyResult()
        if not self.is_root(node_id) and component_type not in params.skipped_lock_components:
            _expect_swa(component_type)
            self._release_window(node_id, params, result, with_state=False)
        return result

    def _release_window(
        self, node_id: int, params: DecLockRefParams, result: BaseEvictionResult, *, with_state: bool
    ) -> None:
        boundary = params.component_lock_uuids[_SWA]
        skipped = params.skipped_lock_components
        try:
            frees = self._tree.unlock_window(node_id, boundary, skipped, with_state=with_state)
        except IndexOwnershipError as error:
            raise AssertionError(str(error)) from error
        self._hand_out(frees, result)
        result.tracker.clear()

    def inc_full_pin(self, node_id: int) -> None:
        """Lock only the slots for full attention up to a node."""
        self._tree.pin(node_id)

    def dec_full_pin(self, node_id: int) -> None:
        """Release `inc_full_pin`."""
        try:
            self._tree.unpin(node_id)
        except IndexOwnershipError as error:
            raise AssertionError(str(error)) from error

    # Eviction.

    def evict_device_start(self, component_type: ComponentType, request_cnt: int) -> None:
        """Begin to evict values of a component."""
        if self.evicts_by_worth:
            self.waiting.tell()
        self._tree.begin_eviction(component_type, request_cnt)

    def evict_device_next_node(
        self, component_type: ComponentType, tracker: dict[ComponentType, int]
    ) -> EvictDeviceNextNodeResult:
        """Return the next leaf to evict, or evict a value of a node that stays."""
        result = EvictDeviceNextNodeResult()
        victim = self._tree.next_victim(component_type, tracker.get(component_type, 0))
        if victim is None:
            return result
        result.made_progress = True
        if isinstance(victim, int):
            result.node_id = victim
        else:
            self._hand_out(victim, result)
        return result

    def evict_device_leaf(self, node_id: int, is_write_back: bool) -> EvictDeviceLeafResult:
        """Evict a leaf with all its values."""
        result = EvictDeviceLeafResult()
        result.unbacked_tokens = self._evict_leaf(node_id, result)
        return result

    def drop_subtree_no_host(self, node_id: int) -> DropSubtreeNoHostResult:
        """Evict a leaf that could not be copied to the host: it has nothing below it."""
        result = DropSubtreeNoHostResult(is_dropped=True)
        self._evict_leaf(node_id, result)
        return result

    def _evict_leaf(self, node_id: int, result: BaseEvictionResult) -> int:
        """Evict a leaf with all its values, and return how many slots for full attention it had."""
        try:
            frees = self._tree.evict_leaf(node_id)
        except IndexOwnershipError as error:
            raise AssertionError(str(error)) from error
        self._hand_out(frees, result)
        return frees.counts[0]

    def evict_device_end(self, component_type: ComponentType) -> None:
        """End `evict_device_start`."""
        self._tree.end_eviction(component_type)

    def evict_many(self, tokens: int) -> BaseEvictionResult:
        """Evict leaves with at least `tokens` slots for full attention in one call, or all leaves."""
        if self.evicts_by_worth:
            self.waiting.tell()
        result = BaseEvictionResult()
        self._hand_out(self._tree.evict(tokens), result)
        return result

    def evict_excess_path_states(
        self,
        tail_node_id: int,
        device_frees: dict[ComponentType, list[torch.Tensor]],
        host_frees: dict[ComponentType, list[torch.Tensor]],
        cache_actions: list[Action],
    ) -> None:
        """Evict Mamba states of a path beyond the number that a path may keep."""
        frees = self._tree.evict_excess_states(tail_node_id)
        if frees.state is not None:
            device_frees[_MAMBA].append(self._to_device(frees.state))

    def _hand_out(self, frees: HybridFrees, result: BaseEvictionResult) -> None:
        if self.kv_events.enabled:
            for namespace, hashes in frees.removed:
                self._events.record_removed(namespace, hashes)
        full, windows, states = frees.counts
        if full:
            self._free(result, _FULL, full, frees.full)
        if windows:
            self._free(result, _SWA, windows, frees.window)
        if states:
            self._free(result, _MAMBA, states, frees.state)

    def _free(
        self, result: BaseEvictionResult, part: ComponentType, count: int, values: torch.Tensor | None
    ) -> None:
        if values is not None:
            result.tracker[part] = count
            result.device_frees[part].append(self._to_device(values))

    def drive_host_eviction(
        self,
        component_type: ComponentType,
        num_tokens: int,
    ) -> DriveHostEvictionResult:
        """Evict nothing: there is no host tier."""
        return DriveHostEvictionResult()

    # Sizes.

    def evictable_size(self) -> int:
        """Return the slots for full attention without locks."""
        return self._tree.evictable_size(_FULL)

    full_evictable_size = evictable_size

    def protected_size(self) -> int:
        """Return the slots for full attention with locks."""
        return self._tree.locked_size(_FULL)

    full_protected_size = protected_size

    def swa_evictable_size(self) -> int:
        """Return the windows without locks."""
        return self._tree.evictable_size(_SWA)

    def swa_protected_size(self) -> int:
        """Return the windows with locks."""
        return self._tree.locked_size(_SWA)

    def mamba_evictable_size(self) -> int:
        """Return the Mamba states without locks."""
        return self._tree.evictable_size(_MAMBA)

    def mamba_protected_size(self) -> int:
        """Return the Mamba states with locks."""
        return self._tree.locked_size(_MAMBA)

    def component_evictable_size(self, component_type: ComponentType) -> int:
        """Return the values of a component without locks; 0 for one that is absent."""
        return self._tree.evictable_size(component_type) if component_type in self._parts else 0

    def component_protected_size(self, component_type: ComponentType) -> int:
        """Return the values of a component with locks; 0 for one that is absent."""
        return self._tree.locked_size(component_type) if component_type in self._parts else 0

    def adjust_component_size(self, node_id: int, component_type: ComponentType, delta: int) -> None:
        """Change the size that a component has on a node."""
        if component_type not in self._parts:
            raise ValueError(f"component is not enabled: {component_type}")
        try:
            self._tree.adjust_size(node_id, component_type, delta)
        except ConfigError as error:
            raise ValueError(str(error)) from error

    def total_size(self) -> tuple[int, int]:
        """Return all slots for full attention, and all other values."""
        full, swa, mamba = (self._tree.evictable_size(part) + self._tree.locked_size(part) for part in PARTS)
        return full, swa + mamba

    # Values.

    def get_component_device_value(self, node_id: int, component_type: ComponentType) -> torch.Tensor | None:
        """Return the value of a node; `None` if it has none."""
        value = self._tree.value(node_id, component_type)
        return None if value is None else self._to_device(value)

    def set_component_device_value(
        self, node_id: int, component_type: ComponentType, value: torch.Tensor
    ) -> None:
        """Give a node a window or a state."""
        self._tree.set_value(node_id, component_type, value)

    def is_full_device_evicted(self, node_id: int) -> bool:
        """Return whether a node is without slots: never, as long as it exists."""
        self._expect(node_id)
        return False

    def component_has_host_value_only(self, node_id: int, component_type: ComponentType) -> bool:
        """Return whether a value is on the host alone: never."""
        self._expect(node_id)
        return False

    def swa_tombstone_ranges(
        self, key: RadixKey, start: int, end: int, component_type: ComponentType = _SWA
    ) -> list[tuple[int, int]]:
        """Return the ranges of tokens that are there without a window."""
        _expect_swa(component_type)
        tokens, first, last, namespace = _whole(key)
        return self._tree.window_gaps(tokens, start, end, first, last, namespace)

    def attach_swa_window(
        self,
        key: RadixKey,
        window_start: int,
        window_end: int,
        swa_values: torch.Tensor,
        component_type: ComponentType = _SWA,
    ) -> list[Action]:
        """Give a window to tokens that are there without one."""
        _expect_swa(component_type)
        if len(swa_values) != window_end - window_start:
            raise AssertionError(f"{len(swa_values)} windows for tokens {window_start}..{window_end}")
        tokens, first, last, namespace = _whole(key)
        try:
            self._tree.attach_window(tokens, window_start, swa_values, first, last, namespace)
        except ConfigError as error:
            raise AssertionError(str(error)) from error
        return []

    def all_values_flatten(self) -> torch.Tensor:
        """Return all slots for full attention."""
        return self._to_device(self._tree.values(_FULL))

    def all_mamba_values_flatten(self) -> torch.Tensor:
        """Return all Mamba states."""
        return self._to_device(self._tree.values(_MAMBA))

    def walk_for_kv_canary(self, unlocked_only: bool, swa_resident_only: bool) -> RadixCacheWalkResult:
        """Return the slots for full attention, the positions of their tokens, and the slots before them."""
        windows = swa_resident_only and self._has_swa
        slots, positions, before = self._tree.slot_rows(unlocked=unlocked_only, windows=windows)
        return RadixCacheWalkResult(slot_indices=slots, positions=positions, prev_slot_indices=before)

    # Looking.

    def stats(self) -> dict[str, int]:
        """Return the numbers of cached slots, and how often one was found to have two owners."""
        return self._owners.stats()

    def dfs_weight_order(self, node_ids: Sequence[int]) -> list[int]:
        """Return positions of nodes, grouped by common prefixes, larger groups first."""
        return self._tree.by_common_prefix(node_ids)

    def collect_path_info(self, end_node_ids: Sequence[int]) -> tuple[tuple[TreePathNodeInfo, ...], ...]:
        """Return the paths to nodes."""
        return tuple(
            tuple(
                TreePathNodeInfo(node, parent, start, end, end - start, children)
                for node, parent, start, end, children in self._tree.path(node_id)
            )
            for node_id in end_node_ids
        )

    def is_backuped(self, node_id: int) -> bool:
        """Return whether a node is on the host: never."""
        self._expect(node_id)
        return False

    def is_write_through_compatible(self) -> bool:
        """Return whether values on the host follow the rules of write-through: always, as there are none."""
        return True

    def build_storage_backup_spec(self, node_id: int, pass_prefix_keys: bool) -> None:
        """Return what storage would get of a node: nothing, as it is not on the host."""
        self._expect(node_id)

    def finish_load_back(self, anchor_node_id: int) -> None:
        """End the loading of nodes from the host: none is ever loading."""
        self._expect(anchor_node_id)

    def get_last_hash_value(self, node_id: int) -> str | None:
        """Return the hash of the last page: no page has one."""
        self._expect(node_id)
        return None

    def get_prefix_hash_values(self, node_id: int) -> list[str]:
        """Return the hashes of the pages before a node: no page has one."""
        self._expect(node_id)
        return []

    get_hash_values = get_prefix_hash_values

    def _expect(self, node_id: int) -> None:
        if not self._tree.contains(node_id):
            raise KeyError(node_id)

    def sanity_check(
        self, ongoing_write_through: list[tuple[int, int]], ongoing_load_back: list[tuple[int, int]]
    ) -> None:
        """Check every invariant, and raise `AssertionError` with the first that is broken."""
        try:
            self._tree.verify()
        except IndexOwnershipError as error:
            raise AssertionError(str(error)) from error
        if ongoing_write_through or ongoing_load_back:
            raise AssertionError("transfers to or from a host tier are going on, but there is no host tier")

    def pretty_print(self) -> None:
        """Print the nodes."""
        for node in self._tree.nodes():
            info = self._tree.info(node)
            parts = ", ".join(
                f"{part}={'yes' if self._tree.value(node, part) is not None else 'no'}"
                for part in self._parts
            )
            print(f"[{node}] {info.end - len(info.tokens)}..{info.end} locks={info.locks} {parts}")  # noqa: T201


def _expect_anchor(node_id: int, params: DecLockRefParams) -> None:
    if params.node_id != node_id:
        raise AssertionError(f"lock receipt anchored on node {params.node_id} released on node {node_id}")


def _expect_swa(component_type: ComponentType) -> None:
    if component_type != _SWA:
        raise NotImplementedError("kvpool's tree core supports one window")


for _name in DELEGATED:
    setattr(KvTreeCore, _name, _refuse(_name))
abc.update_abstractmethods(KvTreeCore)
