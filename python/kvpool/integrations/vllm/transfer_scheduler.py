"""The scheduler's half of `KvpoolTransferConnector`: what is lent, and what is read instead of computed."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvpool.errors import ArgumentError
from kvpool.integrations.vllm.handoff import Handoff, Lend, Load, Plan, digest_of
from kvpool.remote import LeaseKey, LeaseKeys, TransferError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

_logger = logging.getLogger("kvpool")

RENEWALS = 3
"""How often a lease is renewed within its time, while the request that needs it waits."""


@dataclass(slots=True)
class _Prefill:
    """A request whose prompt is computed here for another engine.

    Attributes:
        request: The request.
        lent: The lease of its blocks, once the last tokens of the prompt are scheduled.
    """

    request: Request
    lent: _Lent | None = None


@dataclass(slots=True)
class _Lent:
    """A lease, as the scheduler knows it.

    Attributes:
        key: Its key.
        groups: As in the hand-off.
        blocks: The blocks that are lent, int32.
        kept: Those of them that vLLM does not keep until the request is over.
        preemptions: How often the request had been preempted.
        until: When it is over, in seconds of `time.monotonic`.
    """

    key: LeaseKey
    groups: tuple[tuple[int, int], ...]
    blocks: np.ndarray[Any, np.dtype[np.int32]]
    kept: list[KVCacheBlock]
    preemptions: int
    until: float


@dataclass(slots=True)
class _Arrival:
    """A request whose prompt another engine has computed.

    Attributes:
        handoff: What that engine told of it.
        heard: When the other engine was last told that its lease is needed, in seconds of `time.monotonic`.
        local: Tokens that were cached here when the others were asked for.
        fits: Whether the hand-off was found to belong to the request.
        begun: Whether its blocks were asked for, or given back. They are asked for once.
    """

    handoff: Handoff
    heard: float
    local: int = 0
    fits: bool = False
    begun: bool = False


class TransferScheduler:
    """Decides what the workers lend and read.

    Args:
        engine_id: The name of this engine.
        block_sizes: Tokens of a block, by group of the KV cache.
        lease_s: Seconds of a lease.
        may_lend: Whether the role of the engine is to compute prompts for others.
        may_read: Whether its role is to read those of others.
    """

    def __init__(
        self,
        engine_id: str,
        block_sizes: Sequence[int],
        lease_s: float,
        *,
        may_lend: bool = True,
        may_read: bool = True,
    ) -> None:
        self.peers: tuple[bytes, ...] = ()
        self.manager: KVCacheManager | None = None
        self._engine_id, self._block_sizes, self._lease_s = engine_id, [*block_sizes], lease_s
        self._may_lend, self._may_read = may_lend, may_read
        self._keys = LeaseKeys()
        self._prefills: dict[str, _Prefill] = {}
        self._arrivals: dict[str, _Arrival] = {}
        self._sent: dict[str, _Lent] = {}
        self._plan = Plan()

    def add(self, request: Request) -> None:
        """Note a new request."""
        params = request.kv_transfer_params or {}
        roles = {"do_remote_decode": self._may_lend, "do_remote_prefill": self._may_read}
        for asked, may in roles.items():
            if params.get(asked) and not may:
                _logger.warning("request %s asks for %s, and kv_role forbids it", request.request_id, asked)
                return
        if params.get("do_remote_decode"):
            self._prefills[request.request_id] = _Prefill(request)
        elif params.get("do_remote_prefill"):
            try:
                handoff = Handoff.from_params(params)
            except ArgumentError as error:
                _logger.warning("request %s computes its prompt: %s", request.request_id, error)
                return
            self._arrivals[request.request_id] = _Arrival(handoff, time.monotonic())

    def tokens_elsewhere(self, request: Request, computed: int) -> int:
        """Return how many tokens after the `computed` ones of this engine can be read from another.

        The last one of a prompt is computed here in any case, since its logits are needed.
        """
        arrival = self._arrivals.get(request.request_id)
        if arrival is None or arrival.begun:
            return 0
        why = None if arrival.fits else self._why_useless(request, arrival.handoff)
        arrival.fits = why is None
        if why is not None:
            # The lease is not given back: it may be that of another request, which needs it.
            _logger.warning("request %s computes its prompt: %s", request.request_id, why)
            arrival.begun = True
            return 0
        arrival.local = computed
        last = int(request.num_prompt_tokens) - 1
        return max(0, min(arrival.handoff.tokens, last) - computed)

    def _why_useless(self, request: Request, handoff: Handoff) -> str | None:
        if handoff.tokens > request.num_prompt_tokens or digest_of(request, handoff.tokens) != handoff.digest:
            return f"it is not the one of {handoff.tokens} tokens that was computed for it"
        blocks = [-(-handoff.tokens // size) for size in self._block_sizes]
        if [sum(group) for group in handoff.groups] != blocks:
            return f"it has groups of {blocks} blocks, and they were computed in {handoff.groups}"
        return None

    def allocated(self, request: Request, blocks: KVCacheBlocks, elsewhere: int) -> None:
        """Read `elsewhere` tokens of a request into its blocks; give their lease back if there are none."""
        arrival = self._arrivals.get(request.request_id)
        if arrival is None or arrival.begun:
            return
        arrival.begun = True
        handoff, begin, end = arrival.handoff, arrival.local, arrival.local + elsewhere
        there: list[int] = []
        here: list[int] = []
        before, is_whole = 0, True
        for (skipped, count), own, size in zip(
            handoff.groups, blocks.get_block_ids(), self._block_sizes, strict=True
        ):
            # A block 0 is behind the window of its group, and needs nothing.
            wanted = [at for at in range(begin // size, -(-end // size)) if own[at]]
            is_whole = is_whole and all(at >= skipped for at in wanted)
            there += [before + at - skipped for at in wanted]
            here += [own[at] for at in wanted]
            before += count
        if elsewhere and is_whole:
            load = Load(request.request_id, handoff, np.array(there, np.int32), np.array(here, np.int32))
            self._plan.loads.append(load)
            return
        self._plan.returns.append(handoff)
        if elsewhere:
            self._plan.lacking.append(request.request_id)

    def plan(self, output: SchedulerOutput) -> Plan:
        """Return what the workers do at this step."""
        now = time.monotonic()
        for request_id, prefill in self._prefills.items():
            request, lent = prefill.request, prefill.lent
            if lent is not None and (lent.preemptions != request.num_preemptions or lent.until <= now):
                self._end(request_id, prefill)
            scheduled = output.num_scheduled_tokens.get(request_id)
            if scheduled is None:
                continue
            is_last = request.num_computed_tokens + scheduled >= request.num_prompt_tokens
            if is_last and prefill.lent is None:
                prefill.lent = self._lend(request_id, request)
        self._renew()
        plan, self._plan = self._plan, Plan()
        return plan

    def _renew(self) -> None:
        """Have leases last as long as the requests wait that need them."""
        now = time.monotonic()
        for arrival in self._arrivals.values():
            if not arrival.begun and now - arrival.heard >= self._lease_s / RENEWALS:
                arrival.heard = now
                self._plan.renewals.append(arrival.handoff)

    def _lend(self, request_id: str, request: Request) -> _Lent | None:
        """Lend what the last token of a prompt attends to, and that token's block.

        vLLM frees what is behind the window of the token after it before it asks what is to be kept: that is
        kept here.
        """
        if self.manager is None or not self.peers:
            return None
        tokens = request.num_prompt_tokens
        groups: list[tuple[int, int]] = []
        lent: list[KVCacheBlock] = []
        kept: list[KVCacheBlock] = []
        owned = self.manager.get_blocks(request_id).blocks
        kinds = self.manager.coordinator.single_type_managers
        for own, kind, size in zip(owned, kinds, self._block_sizes, strict=True):
            first, later = (kind.get_num_skipped_tokens(count) // size for count in (tokens - 1, tokens))
            blocks = own[first : -(-tokens // size)]
            if any(block.is_null for block in blocks):
                return None
            groups.append((first, len(blocks)))
            lent += blocks
            kept += own[first:later]
        try:
            key = self._keys.take()
        except TransferError as error:
            _logger.warning("request %s is not handed over: %s", request_id, error)
            return None
        self.manager.block_pool.touch(kept)
        numbers = np.array([block.block_id for block in lent], np.int32)
        self._plan.lends.append(Lend(request_id, key, numbers, self._lease_s))
        until = time.monotonic() + self._lease_s
        return _Lent(key, tuple(groups), numbers, kept, request.num_preemptions, until)

    def _end(self, request_id: str, prefill: _Prefill) -> None:
        """End the lease of a request before its time."""
        if prefill.lent is not None:
            self._plan.ends.append(request_id)
            self._forget(prefill.lent)
            prefill.lent = None

    def _forget(self, lent: _Lent) -> None:
        """Give back what a lease had."""
        self._keys.give_back(lent.key)
        if self.manager is not None:
            self.manager.block_pool.free_blocks(lent.kept)

    def finished(
        self, request: Request, blocks: tuple[list[int], ...], *, is_whole: bool
    ) -> tuple[bool, dict[str, Any] | None]:
        """Return whether a request that is over keeps its blocks, and the parameters of its answer.

        Args:
            request: The request.
            blocks: Its blocks, by group.
            is_whole: Whether it was answered, and not ended before.
        """
        request_id = request.request_id
        arrival = self._arrivals.pop(request_id, None)
        if arrival is not None and not arrival.begun and self._why_useless(request, arrival.handoff) is None:
            self._plan.returns.append(arrival.handoff)
        prefill = self._prefills.pop(request_id, None)
        if prefill is None:
            return False, None
        lent, digest = prefill.lent, digest_of(request, request.num_prompt_tokens)
        left = 0.0 if lent is None else lent.until - time.monotonic()
        if lent is None or digest is None or left <= 0 or not is_whole or not _has(blocks, lent):
            if is_whole:
                why = "its blocks were not lent until its end" if digest else "its prompt has no tokens"
                _logger.warning("request %s is not handed over: %s", request_id, why)
            self._end(request_id, prefill)
            return False, None
        self._plan.sent.append(request_id)
        self._sent[request_id] = lent
        handoff = Handoff(
            request.num_prompt_tokens, digest, lent.groups, lent.key.ticket(lent.blocks, left), self.peers
        )
        return True, handoff.to_params(request_id, self._engine_id)

    def returned(self, request_ids: Iterable[str]) -> None:
        """Note that the leases of requests are over."""
        for request_id in request_ids:
            lent = self._sent.pop(request_id, None)
            if lent is not None:
                self._forget(lent)


def _has(blocks: tuple[list[int], ...], lent: _Lent) -> bool:
    """Return whether a request still has the blocks that were lent for it."""
    still = {block for group in blocks for block in group} | {block.block_id for block in lent.kept}
    return still.issuperset(lent.blocks.tolist())
