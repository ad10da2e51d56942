"""vLLM's schedulers, with short ways for what most steps do with most requests.

A running request gets one token. It goes on, none of its blocks becomes full, and it takes no block. vLLM
makes a call for each thing that may be otherwise; where one may be, vLLM's own method does all of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvpool.integrations.seams import have_source
from kvpool.integrations.vllm.seams import TOKENS, VLLM

VLLM.require(TOKENS)

from vllm.sampling_params import SamplingParams  # noqa: E402
from vllm.v1.core.sched.async_scheduler import AsyncScheduler as _AsyncScheduler  # noqa: E402
from vllm.v1.core.sched.request_queue import SchedulingPolicy  # noqa: E402
from vllm.v1.core.sched.scheduler import CachedRequestData, check_stop  # noqa: E402
from vllm.v1.core.sched.scheduler import Scheduler as _Scheduler  # noqa: E402
from vllm.v1.request import Request  # noqa: E402

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks

__all__ = ["IS_KNOWN", "AsyncScheduler", "Scheduler"]

_METHODS = ("_make_cached_request_data", "_reserve_prefill_lookahead", "_update_request_with_output")

IS_KNOWN = all(
    getattr(_AsyncScheduler, name) is getattr(_Scheduler, name) for name in _METHODS
) and have_source(
    [*(getattr(_Scheduler, name) for name in _METHODS), check_stop, Request, CachedRequestData],
    "275c6bb574382c0006af3138b977855d7bdff36c554f78533f9da33d2cf46bda",
)
"""Whether vLLM's methods are those that this module's were written after: they are in 0.33, not in 0.32."""


class _Tokens:
    """The methods that kvpool's schedulers have in the place of vLLM's."""

    kv_cache_manager: Any
    policy: SchedulingPolicy
    requests: dict[str, Request]
    max_model_len: int
    num_prefill_lookahead: int
    prev_step_scheduled_req_ids: set[str]
    use_pp: bool
    use_v2_model_runner: bool

    def add_request(self, request: Request) -> None:
        """Add a request to the waiting queue."""
        own: Any = super()
        own.add_request(request)
        # Not what goes on with a request that is there.
        if self.requests.get(request.request_id) is request:
            by_priority = self.policy == SchedulingPolicy.PRIORITY
            self.kv_cache_manager.add_waiting(request, by_priority=by_priority)

    def _reserve_prefill_lookahead(
        self, request: Request, num_computed_tokens: int, num_new_tokens: int
    ) -> int:
        """Return how many tokens to compute, so that no chunk ends where a drafter looks ahead."""
        if self.num_prefill_lookahead:
            own: Any = super()
            return own._reserve_prefill_lookahead(  # type: ignore[no-any-return]  # noqa: SLF001
                request, num_computed_tokens, num_new_tokens
            )
        return num_new_tokens if num_new_tokens > 0 else 0  # noqa: FURB136 - a call for each request

    def _make_cached_request_data(
        self,
        running_reqs: list[Request],
        resumed_reqs: list[Request],
        num_scheduled_tokens: dict[str, int],
        spec_decode_tokens: dict[str, list[int]],
        req_to_new_blocks: dict[str, KVCacheBlocks],
    ) -> CachedRequestData:
        """Return what a step tells workers of the requests that they know."""
        if resumed_reqs or self.use_pp:
            own: Any = super()
            return own._make_cached_request_data(  # noqa: SLF001
                running_reqs, resumed_reqs, num_scheduled_tokens, spec_decode_tokens, req_to_new_blocks
            )
        names = [request.request_id for request in running_reqs]
        known, tokens = self.prev_step_scheduled_req_ids, {}
        if not self.use_v2_model_runner and not known.issuperset(names):
            tokens = {
                request.request_id: request.all_token_ids.copy()
                for request in running_reqs
                if request.request_id not in known
            }
        no_blocks = self.kv_cache_manager.empty_kv_cache_blocks
        return CachedRequestData(
            req_ids=names,
            resumed_req_ids=set(),
            new_token_ids=[],
            all_token_ids=tokens,
            new_block_ids=[
                None if (new := req_to_new_blocks[name]) is no_blocks else new.get_block_ids(allow_none=True)
                for name in names
            ],
            num_computed_tokens=[request.num_computed_tokens for request in running_reqs],
            num_output_tokens=[
                len(request._output_token_ids) + request.num_output_placeholders  # noqa: SLF001
                for request in running_reqs
            ],
        )

    def _update_request_with_output(
        self, request: Request, new_token_ids: list[int], is_stale: bool = False
    ) -> tuple[list[int], bool]:
        """Append new tokens, and return those that are left of them, and whether the request ends."""
        params = request.sampling_params
        if (
            len(new_token_ids) == 1
            and type(request) is Request
            and type(params) is SamplingParams
            and params.repetition_detection is None
            and not request.pooling_params
        ):
            token = new_token_ids[0]
            tokens, output = request._all_token_ids, request._output_token_ids  # noqa: SLF001
            count = len(tokens) + 1
            if (
                type(token) is int
                and token != params.eos_token_id
                and token not in (params.stop_token_ids or ())
                and count < self.max_model_len
                and len(output) + 1 < request.max_tokens
            ):
                output.append(token)
                tokens.append(token)
                hasher = request._block_hasher  # noqa: SLF001
                # A hasher that is not kvpool's may have something to do after any token.
                if hasher is not None:
                    size = getattr(hasher, "kvpool_block_size", 0)
                    if count >= (len(request.block_hashes) + 1) * size:
                        request.update_block_hashes()
                if not is_stale and request.num_output_placeholders > 0:
                    request.num_output_placeholders -= 1
                return new_token_ids, False
        own: Any = super()
        return own._update_request_with_output(  # type: ignore[no-any-return]  # noqa: SLF001
            request, new_token_ids, is_stale
        )


_replacing: tuple[Any, ...] = (_Tokens,) if IS_KNOWN else ()


class Scheduler(*_replacing, _Scheduler):  # type: ignore[misc]  # vLLM has no types here
    """vLLM's `Scheduler`, over the classes that `kvpool.integrations.vllm.install` puts in."""


class AsyncScheduler(*_replacing, _AsyncScheduler):  # type: ignore[misc]
    """vLLM's `AsyncScheduler`, over the same."""
